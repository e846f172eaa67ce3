"""A name of a module here always leads to that module, whatever lies beside a user's script.

Each module that a script may import first imports this one before any other of ours. A user's file of such a name,
beside the script or an environment, would then be left out without a word, so to import it is an error.
"""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NAMES = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}


def find_spec(name, path=None, target=None):
    """Part of sys.meta_path: the specification of a name of ours, None for others."""
    return PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None


def check(file):
    """ConfigError if a user's file, or one beside it that it imports, imports one beside it that has a name of ours.
    A file of this folder means these modules."""
    files = [Path(file).resolve()]
    if files[0].parent == ROOT:
        return
    for one in files:  # which grows
        for node in ast.walk(ast.parse(one.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in [name.partition(".")[0] for name in names]:
                folder = files[0].parent / name
                theirs = [path for path in (folder.with_suffix(".py"), *folder.glob("*.py"))
                          if path.exists() and path not in files]
                if theirs and name in NAMES:
                    from errors import ConfigError

                    raise ConfigError(f"{one} imports {theirs[0]}, but {name} is this project's "
                                      f"{find_spec(name).origin}: rename yours.")
                files += theirs


script = Path(getattr(sys.modules["__main__"], "__file__", None) or __file__).resolve()
if script.suffix == ".py" and script.is_file():
    check(script)
sys.meta_path.insert(0, sys.modules[__name__])
