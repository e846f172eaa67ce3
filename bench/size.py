"""Measure the size of the product, and how much of it one training step enters.

    python bench/size.py              # a table of this tree
    python bench/size.py c23df8b      # the modules that differ from a commit, and by how much
    python bench/size.py --summary    # two lines, without training (make lint)

The product is every Python file that git tracks outside tests/, bench/, examples/ and docs/, and
the kernels in C++ and C, of which only lines count. A statement is an ast.stmt. Tokens are names,
numbers, strings and operators, as in tinygrad's sz.py. Docstrings are neither, comments are no
tokens. A circle is a set of modules each of which imports, directly or not, all others. "Entered"
are the functions of the product that Python calls, on any thread, in one `evaluate` and `train` of
a trainer after two of each; what numba has compiled into machine code is not seen.
"""

import argparse
import ast
import collections
import json
import subprocess
import sys
import tempfile
import threading
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "tests", "bench", "examples", "docs"
COLUMNS = "statements", "tokens", "lines", "raises"
TOKENS = tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP
SCOPES = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
UNNAMED = "<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"
SMALL = ["--env.num-envs", "64", "--train.horizon", "32", "--train.minibatch-size", "512",
         "--train.device", "cpu"]


def product_files(tree):
    """Return the names of the tracked files in the folder `tree`.

    In a folder without git, of all files.
    """
    if (tree / ".git").exists():
        listing = subprocess.run(["git", "-C", str(tree), "ls-files"], capture_output=True,
                                 text=True, check=True).stdout.splitlines()
    else:
        listing = [path.relative_to(tree).as_posix() for path in tree.rglob("*.*")]
    return sorted(name for name in listing if (tree / name).is_file()
                  and not name.startswith(".") and name.partition("/")[0] not in OUTSIDE
                  and (name.endswith((".py", ".cu")) or Path(name).name == "tile.c"))


def count(path):
    """Return {column: number} of one file."""
    lines = len(path.read_text().splitlines())
    if path.suffix != ".py":
        return {"lines": lines}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.body[0].lineno for node in nodes
                  if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None}
    with open(path, "rb") as file:
        tokens = sum(token.type in TOKENS
                     and not (token.type == tokenize.STRING and token.start[0] in docstrings)
                     for token in tokenize.tokenize(file.readline))
    return {"statements": sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings),
            "tokens": tokens, "lines": lines,
            "raises": sum(isinstance(node, ast.Raise) for node in nodes)}


def imports_of(node, package, at_import=True):
    """Yield the dotted names that a syntax tree imports.

    package: the dotted name of the module's package. at_import: leave out those in functions and
    behind `if __name__ == "__main__"`.
    """
    for child in ast.iter_child_nodes(node):
        later = (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                 or (isinstance(child, ast.If) and "__main__" in ast.unparse(child.test)))
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1]
            base = ".".join([*(above if child.level else ()), *filter(None, [child.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif not (at_import and later):
            yield from imports_of(child, package, at_import)


def circles(modules, at_import):
    """Return the import circles, sorted lists of names.

    modules: {dotted name: (path, syntax tree)}.
    """
    graph, reach = {}, {}
    for name, (path, tree) in modules.items():
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        parts = (target.split(".") for target in imports_of(tree, package, at_import))
        targets = {".".join(part[:i]) for part in parts for i in range(1, len(part) + 1)}
        graph[name] = targets & modules.keys() - {name}
    for name in graph:
        observed, stack = set(), [name]
        while stack:
            new = graph[stack.pop()] - observed
            observed |= new
            stack += new
        reach[name] = observed
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other]))
              for name in graph if name in reach[name]}
    return sorted(map(list, groups))


def measure(tree):
    """Return ({file: its counts}, {metric: (number, remark)}) of the folder `tree`.

    Runs nothing.
    """
    rows = {name: count(tree / name) for name in product_files(tree)}
    modules = {}
    for path in rows:
        if path.endswith(".py"):
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            modules[name] = path, ast.parse((tree / path).read_text())
    nodes = [node for _, module in modules.values() for node in ast.walk(module)]
    passed = [node for node in nodes if isinstance(node, ast.FunctionDef)
              and [arg.arg for arg in node.args.posonlyargs + node.args.args][:1] == ["trainer"]]
    attributes = {part.attr for node in nodes
                  if isinstance(node, ast.ClassDef) and node.name == "PuffeRL"
                  for part in ast.walk(node)
                  if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                  and isinstance(part.value, ast.Name) and part.value.id == "self"}
    figures = {"modules": (len(modules), ""),
               "modules at the root": (sum("/" not in path for path, _ in modules.values()), ""),
               "functions with trainer first": (len(passed), ""),
               "attributes of PuffeRL": (len(attributes), "")}
    for label, at_import in (("import circles", True), ("import circles, functions too", False)):
        result = circles(modules, at_import)
        figures[label] = len(result), "; ".join(map(" ".join, result))
    return rows, figures


def trace(tree):
    """Return {metric: (functions, files)} of the folder `tree` that a step enters.

    Imports its modules.
    """
    sys.path[:] = [str(tree), *(path for path in sys.path
                                if Path(path).resolve() not in (ROOT, ROOT / "bench"))]
    entered, recorders = {}, []

    def hook(frame, event, argument):
        if recorders and event == "call":
            recorders[0].add(frame.f_code)

    def record(name, *functions):
        codes = set()
        recorders.append(codes)
        sys.setprofile(hook)
        for function in functions:
            function()
        sys.setprofile(None)
        recorders.clear()
        places = {(code.co_filename, code.co_firstlineno, code.co_name) for code in codes
                  if code.co_filename.startswith(f"{tree}/") and "/.venv" not in code.co_filename
                  and code.co_filename != __file__ and code.co_name not in UNNAMED}
        entered[name] = len(places), len({place[0] for place in places})

    threading.setprofile(hook)
    import pufferl

    record("load_config", lambda: pufferl.load_config("breakout", SMALL))
    for engine in ("auto", "autograd"):
        args = pufferl.load_config("breakout", [*SMALL, "--train.engine", engine])
        vecenv = pufferl.load_env("breakout", args)
        policy = pufferl.load_policy(args, vecenv, "breakout")
        config = {**args["train"], "env": "breakout", "data_dir": None, "log_interval": 1e9}
        trainer = pufferl.PuffeRL(config, vecenv, policy)
        for _ in range(2):
            trainer.evaluate()
            trainer.train()
        record(f"a step, engine {engine}", trainer.evaluate, trainer.train)
        trainer.close()
    return entered


def trace_elsewhere(tree):
    """Run `trace` in a process; {} and a line on stderr if that tree does not train."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([sys.executable, __file__, "--trace", str(tree)], cwd=folder,
                                capture_output=True, text=True)
    if result.returncode:
        print(f"{tree}: {result.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return {}
    entered = json.loads(result.stdout.splitlines()[-1])
    return {f"{label} entered, {name}": (number, "") for name, pair in entered.items()
            for label, number in zip(("functions", "files"), pair, strict=True)}


def sums(rows):
    """Return {folder or "total": the sums of its files' counts}."""
    totals = collections.defaultdict(collections.Counter)
    for path, counts in rows.items():
        folder = path.partition("/")[0] + "/" if "/" in path else "root"
        totals[folder].update(counts)
        totals["total"].update(counts)
    return totals


def cells(now, before):
    """Return a number and its difference to the earlier one, if there is one."""
    change = f"{now - before:+,}" if before is not None and now != before else ""
    return f"{now:>12,}{change:>8}"


def show(now, before, figures, old_figures):
    """Print the table; before and old_figures are None, or those of the other tree."""
    width = max(len(name) for name in (*now, *(before or ()), *figures)) + 2
    print(f"{'module':{width}}" + "".join(f"{column:>12}{'':8}" for column in COLUMNS))

    def row(name, counts, old):
        print(f"{name:{width}}" + "".join(
            cells(counts.get(column, 0), None if before is None else old.get(column, 0))
            for column in COLUMNS).rstrip())

    for name in sorted({*now, *(before or ())}):
        if before is None or now.get(name) != before.get(name):
            row(name, now.get(name, {}), (before or {}).get(name, {}))
    totals, old_totals = sums(now), sums(before or {})
    print()
    for name in sorted({*totals, *old_totals}, key=lambda name: (name == "total", name != "root", name)):
        row(name, totals[name], old_totals[name])
    print()
    for name, (number, remark) in figures.items():
        old = (old_figures or {}).get(name, (None, ""))[0]
        print(f"{name:{width}}{cells(number, old)}  {remark}".rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit", nargs="?", help="compare with this commit")
    parser.add_argument("--summary", action="store_true", help="two lines; nothing is trained")
    parser.add_argument("--trace", metavar="FOLDER", type=Path,
                        help="print as JSON what is entered in the project in FOLDER, nothing else")
    args = parser.parse_args()
    if args.trace:
        print(json.dumps(trace(args.trace.resolve())))
        return
    rows, figures = measure(ROOT)
    if args.summary:
        print("size: " + ", ".join(f"{sums(rows)['total'][column]:,} {column}" for column in COLUMNS))
        print("      " + ", ".join(f"{number} {name}" for name, (number, _) in figures.items()))
        return
    figures |= trace_elsewhere(ROOT)
    before = old_figures = None
    if args.commit:
        sys.path.insert(0, str(ROOT))
        from bench import checkout

        name, folder = checkout(args.commit)
        before, old_figures = measure(folder)
        old_figures |= trace_elsewhere(folder)
        print(f"this tree, and the difference to {name}\n")
    show(rows, before, figures, old_figures)


if __name__ == "__main__":
    main()
