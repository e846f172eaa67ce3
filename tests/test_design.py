"""The project's own rules: layers of imports, and pages that name what exists."""

import ast
import functools
import importlib
import inspect
import itertools
import re
import subprocess
from pathlib import Path

import pytest

import arena
import engines
from tools.sweep import command, trials

ROOT = Path(__file__).resolve().parent.parent
# docs/design.md numbers the layers; a file imports from those before its own
LAYERS = [set(re.findall(r"`([\w/]+?)(?:\.py|/)`", line)) for line in re.findall(
    r"^\d+\. (.*(?:\n    .*)*)", (ROOT / "docs/design.md").read_text(), re.MULTILINE)]
WITHIN = {  # what else a file may import, of its own layer
    "fast/cuda_cpp": {"arena"}, "auto": {"environments"}, "absolute_imports": {"errors"}, "processes": {"errors"},
    "flat_spaces": {"errors"}, "configuration": {"auto", "environments"},
    "environments": {"families/adapters", "tensors"}, "runs": {"loggers"},
    "fast/compiled": {"engines"}, "fast/fused": {"engines"}, "fast/verify": {"engines"},
    "tools/sweep/report": {"tools/sweep/trials"},
    "tools/sweep/command": {"tools/sweep/trials", "tools/sweep/report"}, "ocean": set(),
}
PRIMITIVES = {"fast/c_calls", "fast/cuda_cpp", "fast/pictures", "fast/products", "fast/recurrent"}
BELOW_PRIMITIVES = {"arena", "errors", "kernels", "processes", "ocean"}  # what they import from the root


def layer(name):
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


@functools.cache
def files():
    """The product's modules that git tracks: a reader may have files of their own there."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    tracked = {ROOT / name for name in listed.stdout.splitlines()}
    paths = [path for pattern in ("*.py", "fast/*.py", "families/*.py", "tools/**/*.py")
             for path in ROOT.glob(pattern) if path.name != "__init__.py"]
    return sorted(path for path in paths if path in tracked or not tracked)


ROOT_FILES = [path for path in files() if path.parent == ROOT]


def name_of(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def module_of(name):
    """The module, as in LAYERS, that a dotted name is in."""
    path = name.replace(".", "/")
    while layer(path) is None and "/" in path:
        path = path.rpartition("/")[0]
    return path


def imports(node, function=None):
    """Yield (imported module, name of the function that imports it or None)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((module_of(alias.name), function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield from ((module_of(f"{child.module}.{alias.name}"), function)
                        for alias in child.names)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from imports(child, function or (child.name if is_function else None))


def test_every_file_has_a_layer():
    modules = [name_of(path) for path in files()] + ["ocean"]
    assert sorted(modules) == sorted(name for layer in LAYERS for name in layer)
    assert len(LAYERS) == 12 and len(ROOT_FILES) <= 24


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_a_file_imports_from_below(path):
    name, tree = name_of(path), tree_of(path)
    for module, function in imports(tree):
        # verbs are imported by name, when they are asked for
        assert path not in ROOT_FILES or not module.startswith("tools")
        if layer(module) is None or module == name:
            continue
        if name in PRIMITIVES:  # so that kernels.py, optim.py and models.py may import it
            assert module in PRIMITIVES | BELOW_PRIMITIVES
        assert layer(module) < layer(name) or module in WITHIN.get(name, ()), (
            f"{name} imports {module} from above it, in {function or 'the file itself'}")


PAGES = ["README.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md",
         *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, flags=re.M)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_links_to_what_is_there(name):
    page = ROOT / name
    # code has brackets of its own
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\((?!\w+://)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists() and (not anchor or anchor in anchors(linked)), (target, anchor)


def test_files_that_the_code_names_are_there():
    """A missing one is passed over in silence: kernels are not compiled again."""
    paths = [*arena.FILES, trials.ROOT / command.TRAINER]
    assert not [path for path in paths if not path.exists()]
    for name in ("models", "fast.pictures"):  # whose classes are thread safe: engines.unmarked_classes
        source = inspect.getsource(engines.unmarked_classes)
        assert f'"{name}"' in source and importlib.import_module(name)


def test_the_map_of_the_source_names_what_is_there():
    page = (ROOT / "docs/README.md").read_text()
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"config", "examples"}
    names = [*(path.name for path in ROOT_FILES), *folders, "tests"]
    assert not [name for name in names if f"(../{name})" not in page]
    epoch = page.partition("**One epoch.**")[2].partition("| --- |")[2].partition("## Words")[0]
    functions = re.findall(r"`(?:((?:fast\.)?[a-z_]+)\.)?(?:[A-Z]\w+\.)?(\w+)` \|", epoch)
    assert len(functions) > 14
    for module, function in functions:
        body = (ROOT / f"{(module or 'pufferl').replace('.', '/')}.py").read_text()
        assert f"def {function}(" in body, f"{module}.{function}"


def test_no_processor_is_chosen_by_its_vendor():
    """Features are asked for (docs/design.md)."""
    vendors = r"znver|GenuineIntel|AuthenticAMD|vendor_id|get_host_cpu_name"
    assert not [path.name for path in files() if re.search(vendors, path.read_text())]


def texts():
    """Every text in the source, with "..." for what is filled in."""
    found = []
    for path in (*files(), *(ROOT / "ocean").glob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0"
                         for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.replace("{}", "\0"))
    return found


def test_a_quoted_message_is_one_of_the_source():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    table = page.partition("## It says")[2].partition("\n\n## ")[0]
    rows = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()
            if row.startswith("| `")]
    assert len(rows) > 25 and rows == sorted(rows, key=lambda row: row.replace("`", "").lower())
    source = "\1".join(texts())
    for quoted in itertools.chain.from_iterable(re.findall(r"`(.*?)`", row) for row in rows):
        parts = [part.strip() for part in quoted.split("...") if part.strip()]
        pattern = r"[^\1]*\0[^\1]*".join(map(re.escape, parts))  # within one text
        assert re.search(pattern, source), f"no message is {quoted!r}"
