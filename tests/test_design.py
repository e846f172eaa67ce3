"""The project's own rules: files import only from lower layers, files and functions have a readable
size, pages name only what exists."""

import ast
import functools
import itertools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [  # docs/design.md; a file imports from those before its own
    {"processes", "flat"},
    {"arena", "checkpoints", "cuda_cpp", "emulation", "ocean", "protein", "ranks", "signs"},
    {"kernels", "workers", "environments", "tensors"},
    {"pictures", "products"},
    {"muon", "recurrent"},
    {"models"},
    {"vector", "auto", "configuration"},
    {"engines", "compiled", "fused", "runs"},
    {"ppo", "pufferl"},
    {"sweep_trials", "sweep_report", "sweep", "watch", "export", "speed", "catalogue", "history", "doctor"},
    {"pufferlib"},
]
WITHIN = {  # what else a file may import, of its own layer
    "cuda_cpp": {"arena"}, "auto": {"vector"}, "configuration": {"vector", "auto"},
    "compiled": {"engines"}, "fused": {"engines", "compiled"},
    "sweep_report": {"sweep_trials", "watch"}, "sweep": {"sweep_trials", "sweep_report"}, "ocean": set(),
}
UPWARD = {  # a room above that a function reaches: (file, room): the function
    ("protein", "sweep"): {"__main__", "__init__", "optimize"},
    ("engines", "compiled"): {"choose"},
    ("engines", "fused"): {"choose", "plain_engine"},
}
LINES, CLASS, FUNCTION = 1500, 420, 60
COLUMNS, WIDER = 100, 0.05  # the share of lines that may be wider
REASON = "longer because"  # what the docstring of a longer function says


def layer(name):
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


@functools.cache
def files():
    """Ours at the root: those that git tracks, because a reader may have files of his own there."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    tracked = {ROOT / name for name in listed.stdout.splitlines()}
    return sorted(path for path in ROOT.glob("*.py") if path in tracked or not tracked)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def imports(tree):
    """[(imported room, name of the function that imports it or None)]."""
    found = []

    def look(node, inside):
        for child in ast.iter_child_nodes(node):
            here = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                here = inside or child.name
            if isinstance(child, ast.If) and "__main__" in ast.unparse(child.test):
                here = "__main__"
            if isinstance(child, ast.Import):
                found.extend((alias.name.partition(".")[0], inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                found.append((child.module.partition(".")[0], inside))
            look(child, here)

    look(tree, None)
    return found


def test_every_file_has_a_layer():
    rooms = {path.stem for path in files()} | {"ocean"}
    assert rooms == set().union(*LAYERS)
    page = (ROOT / "docs/design.md").read_text()
    listed = re.findall(r"^\d+\. (.*)", page, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)(?:\.py|/)`", line)) for line in listed] == LAYERS


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_a_file_imports_from_below(path):
    own = path.stem
    for room, function in imports(tree_of(path)):
        if (layer(room) is None or room == own or layer(room) < layer(own)
                or room in WITHIN.get(own, ())):
            continue
        assert function in UPWARD.get((own, room), ()) or function == "main", (
            f"{path.name} imports {room} from above it, in {function or 'the file itself'}")


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_nothing_is_too_long(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno - node.lineno < CLASS, f"class {node.name}"
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION:
            assert REASON in (ast.get_docstring(node) or ""), (
                f"{node.name} has {node.end_lineno - node.lineno} lines")


def test_few_lines_are_wide():
    paths = [path for folder in (".", "tests", "ocean", "examples")
             for path in (ROOT / folder).glob("*.py")]
    wide = {path: [len(line) > COLUMNS for line in path.read_text().splitlines()] for path in paths}
    share = sum(map(sum, wide.values())) / sum(map(len, wide.values()))
    most = sorted(wide, key=lambda path: -sum(wide[path]))[:5]
    assert share <= WIDER, (
        f"{share:.1%} of all lines have over {COLUMNS} columns; most are in "
        f"{', '.join(path.name for path in most)}")


PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md",
         *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_what_is_there(page):
    # code has brackets of its own
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in link:
            assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_the_readme_names_every_file_and_page():
    readme = (ROOT / "README.md").read_text()
    assert not [path.name for path in files() if f"({path.name})" not in readme]


def test_the_map_of_the_source_names_what_is_there():
    named = re.findall(r"^(\w+)\.(\w+)\.(\w+)  ",
                       (ROOT / "docs" / "README.md").read_text(), flags=re.M)
    assert len(named) > 6
    for file, cls, method in named:
        body = (ROOT / f"{file}.py").read_text().partition(f"class {cls}")[2]
        assert f"    def {method}(" in body, f"{file}.{cls}.{method}"


def test_no_processor_is_chosen_by_its_vendor():
    """Features are asked for (docs/design.md)."""
    for path in files():
        found = re.search(r"znver|GenuineIntel|AuthenticAMD|vendor_id|get_host_cpu_name",
                          path.read_text())
        assert not found, f"{path.name}: {found}"


def said():
    """Every text in the source, with "..." for what is filled in."""
    texts = []
    for path in (*files(), *(ROOT / "ocean").glob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0"
                         for part in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value.replace("{}", "\0"))
    return texts


def test_a_quoted_message_is_one_that_is_said():
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## It says")[2].partition("\n\n## ")[0]
    rows = [row.split(" | ")[0].removeprefix("| ") for row in page.splitlines()
            if row.startswith("| `")]
    assert len(rows) > 25 and rows == sorted(rows, key=lambda row: row.replace("`", "").lower())
    texts = "\1".join(said())
    for quoted in itertools.chain.from_iterable(re.findall(r"`(.*?)`", row) for row in rows):
        parts = [part.strip() for part in quoted.split("...") if part.strip()]
        pattern = r"[^\1]*\0[^\1]*".join(map(re.escape, parts))  # within one text
        assert re.search(pattern, texts), f"nothing says {quoted!r}"
