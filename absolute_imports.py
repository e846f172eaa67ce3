"""Make names of this project's modules independent of the folder of a script.

Each module that a script may import first imports this one first. A user's file with such a name,
beside the script or an environment, is then hidden, so importing it is an error.
"""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NAMES = {path.stem for path in ROOT.glob("*.py")}
NAMES |= {path.parent.name for path in ROOT.glob("*/__init__.py")}


def find_spec(name, path=None, target=None):
    """Return the specification of a project module, None for others (sys.meta_path)."""
    return PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None


def check(file):
    """Raise ConfigError if a user's file imports one with a project module's name.

    The imports of the files beside it are checked too. A file in this folder means the project's
    modules.
    """
    files = [Path(file).resolve()]
    if files[0].parent == ROOT:
        return
    for user_file in files:  # the loop appends to it
        for node in ast.walk(ast.parse(user_file.read_bytes())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in [name.partition(".")[0] for name in names]:
                folder = files[0].parent / name
                same_named = [path for path in (folder.with_suffix(".py"), *folder.glob("*.py"))
                              if path.exists() and path not in files]
                if same_named and name in NAMES:
                    from errors import ConfigError

                    raise ConfigError(f"{user_file} imports {same_named[0]}: {name} is this "
                                      f"project's {find_spec(name).origin}. Rename the former.")
                files += same_named


script = Path(getattr(sys.modules["__main__"], "__file__", None) or __file__).resolve()
if script.suffix == ".py" and script.is_file():
    check(script)
sys.meta_path.insert(0, sys.modules[__name__])
