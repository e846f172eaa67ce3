"""Make names of this project's modules independent of the folder of a script.

Each module that a script may import first imports this one first. A user's file with such a name,
beside the script or an environment, is then hidden, so importing it is an error.
"""

import sys
from importlib.machinery import PathFinder
from modulefinder import ModuleFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NAMES = {path.stem for path in ROOT.glob("*.py")}
NAMES |= {"fast", "ocean", "tools", *(path.parent.name for path in ROOT.glob("*/__init__.py"))}


def find_spec(name, path=None, target=None):
    """Return the specification of a project module, None for others (sys.meta_path).

    Raises ModuleNotFoundError for one that this copy lacks, which another copy may have.
    """
    spec = PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None
    if spec is None and name in NAMES:
        raise ModuleNotFoundError(f"{ROOT} has no {name}. Copy the whole project.", name=name)
    return spec


def check(file):
    """Raise ConfigError if a user's file imports one with a project module's name.

    The imports of the files beside it are checked too. A file in this folder means the project's
    modules.
    """
    file = Path(file).resolve()
    if file.parent == ROOT:
        return
    finder = ModuleFinder([str(file.parent)])
    finder.run_script(str(file))  # reads what it imports from its folder, and runs nothing
    for name in NAMES & finder.modules.keys():
        path = finder.modules[name].__file__
        if path != str(file):
            from errors import ConfigError

            raise ConfigError(f"{file} imports {path}: {name} is this project's "
                              f"{find_spec(name).origin}. Rename the former.")


script = Path(getattr(sys.modules["__main__"], "__file__", None) or __file__).resolve()
if script.suffix == ".py" and script.is_file():
    check(script)
sys.meta_path.insert(0, sys.modules[__name__])
