"""Count how many small faults in the product the tests catch.

    python bench/mutate.py                           # mutants of this commit, tests of this commit
    python bench/mutate.py --tests main              # the same mutants, tests of another commit
    python bench/mutate.py --only 3 17 --log out     # two of them, with pytest's output
    python bench/mutate.py --survivors result.jsonl  # those that survived, against all fast tests
    python bench/mutate.py --reword                  # ten messages reworded: which tests fail

A mutant is the product with one edit: a sign (`+` is `-`, `<` is `>=`), an index or bound that is
off by one, two arguments that are swapped, or a statement that is skipped. Ten mutants are in
kernels.py, ten in the environments in C, the rest anywhere in the product. A seed and a commit of
the product determine all of them. A mutant runs against the test files that import its module
(an environment in C: all files that name it or are about Ocean), those that name it most often
first, until one test fails. After --limit seconds without a failure it counts as survived. A line
of JSON per mutant goes to --out.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "tests", "bench", "examples", "docs", "experiments", "families"
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
             ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
             ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
             ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
SKIPPED = ast.Assign, ast.AugAssign, ast.Expr
C_EDITS = (("sign", re.compile(r"(?<=[\w)\]] )([+\-*<>]|<=|>=|==|!=|\+=|-=)(?= [\w(\-])")),
           ("off by one", re.compile(r"(?<![\w.])([1-9]\d?)(?![\w.])")),
           ("skipped", re.compile(r"(?<=\n)([ ]{4,}[a-z][\w.\->\[\]]* [+\-*]?= [^\n;{}]+;)(?=\n)")))
C_OPERATORS = {"+": "-", "-": "+", "*": "+", "<": ">=", ">": "<=", "<=": ">", ">=": "<",
               "==": "!=", "!=": "==", "+=": "-=", "-=": "+="}


def git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout


def checkout(commit, folder, *paths):
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, *paths))) as tar:
        tar.extractall(folder, filter="data")


def is_inert(node):
    """Return whether an edit within `node` changes only texts or annotations."""
    return (isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1]
                in ("print", "warn", "warn_once", "add_argument")))


def python_sites(source):
    """Return all edits of a module.

    [(kind, first, last, replacement)], offsets in its text.
    """
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    sites = []

    def offsets(node):
        starts = lines[node.lineno - 1], lines[node.end_lineno - 1]
        return starts[0] + node.col_offset, starts[1] + node.end_col_offset

    def replace(kind, node, new):
        sites.append((kind, *offsets(node), ast.unparse(ast.fix_missing_locations(new))))

    def visit(node, function):
        if is_inert(node) or (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
            return
        if function:
            if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                new = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
                if not any(isinstance(side, ast.Constant) and isinstance(side.value, str)
                           for side in (node.left, node.right)):
                    replace("sign", node, new)
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
                operators = [OPERATORS[type(node.ops[0])](), *node.ops[1:]]
                replace("sign", node, ast.Compare(node.left, operators, node.comparators))
            elif isinstance(node, ast.BoolOp):
                replace("sign", node, ast.BoolOp(OPERATORS[type(node.op)](), node.values))
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                replace("off by one", node, ast.Constant(node.value + 1))
            elif isinstance(node, ast.Call) and len(node.args) > 1 and not any(
                    isinstance(argument, ast.Starred) for argument in node.args[:2]):
                swapped = [node.args[1], node.args[0], *node.args[2:]]
                replace("swapped", node, ast.Call(node.func, swapped, node.keywords))
            if isinstance(node, SKIPPED):
                sites.append(("skipped", *offsets(node), "pass"))
        for field, value in ast.iter_fields(node):
            if field not in ("decorator_list", "annotation", "returns", "args") or isinstance(node, ast.Call):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, function or isinstance(node, ast.FunctionDef))

    visit(ast.parse(source), False)
    return [site for site in sites if source[site[1]:site[2]] != site[3]]


def c_sites(source):
    """Return all edits of an environment in C, by its text without comments."""
    blank = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"|^#[^\n]*$", lambda match: re.sub(r"[^\n]", "@", match[0]),
                   source, flags=re.S | re.M)
    sites = []
    for kind, pattern in C_EDITS:
        for match in pattern.finditer(blank):
            old = match[1]
            new = {"sign": C_OPERATORS.get(old), "skipped": ";",
                   "off by one": str(int(old) + 1) if old.isdigit() else None}[kind]
            sites.append((kind, *match.span(1), new))
    return sites


def message_sites(source):
    """Return the edits of messages: the first long word of each raised message.

    [("reworded", first, last, replacement)].
    """
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    sites = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            first = lines[node.lineno - 1] + node.col_offset
            last = lines[node.end_lineno - 1] + node.end_col_offset
            text = re.search(r"(?<=[ \"])(?!raise|from)[a-z]{4,}(?= [a-z]{2,}[^\"\n]*\")", source[first:last])
            if text:
                sites.append(("reworded", first + text.start(), first + text.end(), "xyzzy"))
    return sites


def pick(rng, texts, sites_of, number):
    """Return `number` random sites.

    A file in proportion to its sites, a kind, then a site of that kind.
    """
    sites = {name: result for name, text in sorted(texts.items()) if (result := sites_of(text))}
    chosen = []
    while len(chosen) < number:
        name = rng.choices(list(sites), [len(result) for result in sites.values()])[0]
        kind = rng.choice(sorted({site[0] for site in sites[name]}))
        site = rng.choice([site for site in sites[name] if site[0] == kind])
        if (name, site) not in chosen:
            chosen.append((name, site))
    return chosen


def mutants(folder, seed, number, reword):
    """Return random mutants of the product in `folder`.

    [{id, file, line, kind, first, last, old, new}].
    """
    rng = random.Random(seed)
    modules = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")
               if path.relative_to(folder).parts[0] not in OUTSIDE}
    headers = {path.relative_to(folder).as_posix(): path.read_text()
               for path in (folder / "ocean").rglob("*.h")}
    if reword:
        chosen = pick(rng, modules, message_sites, 10)
    else:
        kernels = {"kernels.py": modules.pop("kernels.py")}
        chosen = pick(rng, kernels, python_sites, number // 5) + pick(rng, headers, c_sites, number // 5)
        chosen += pick(rng, modules, python_sites, number - len(chosen))
        modules |= kernels
    for position, (name, (kind, first, last, new)) in enumerate(chosen):
        text = (modules | headers)[name]
        yield {"id": position, "file": name, "line": text.count("\n", 0, first) + 1, "kind": kind,
               "first": first, "last": last, "old": text[first:last], "new": new}


def test_files(folder, mutant):
    """Test files that import the mutated module, those that name it most often first."""
    path = Path(mutant["file"])
    word = path.parent.name if path.name == "__init__.py" or path.suffix == ".h" else path.stem
    helpers = {}
    for file in (folder / "tests").glob("*.py"):
        helpers[file.stem] = file.read_text()

    def names(text, depth=2):
        count = len(re.findall(rf"\b{word}\b", text))
        if path.suffix == ".py" and not re.search(
                rf"^\s*(import|from) .*\b{word}\b|import_module\(.*\b{word}\b|^{word} = ", text, re.M):
            count = 0
        if not count and depth:
            imported = re.findall(r"^(?:import|from) (\w+)", text, re.M)
            count = any(names(helpers[name], depth - 1) for name in imported
                        if name in helpers and name not in ("conftest", "reference"))
        return int(count)

    def rank(stem):
        about = stem.removeprefix("test_").split("_")[0] == word
        ocean = path.suffix == ".h" and ("ocean" in stem)
        return 1_000 * about + names(helpers[stem]) + ocean

    ranked = sorted(((rank(stem), stem) for stem in helpers if stem.startswith("test_")), reverse=True)
    return [f"tests/{stem}.py" for count, stem in ranked if count]


def run(arguments, folder, seconds, log):
    """Return (exit code or None after `seconds`, output) of a command.

    Its children are ended with it.
    """
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with open(log, "w+") as output:
        process = subprocess.Popen(arguments, cwd=folder, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=env | {"PYTHONHASHSEED": "0"})
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def try_mutant(mutant, tree, args):
    """Return the mutant with its fate, in a copy of `tree`."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    try:
        shutil.copytree(tree, folder, dirs_exist_ok=True, symlinks=True)
        path = folder / mutant["file"]
        text = path.read_text()
        path.write_text(text[:mutant["first"]] + mutant["new"] + text[mutant["last"]:])
        files = ["tests"] if args.survivors or args.reword else test_files(folder, mutant)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600",
                   "-m", "not slow and not gpu and not cudasim", *([] if args.reword else ["-x"]),
                   *(["-n", str(args.jobs)] if args.survivors or args.reword else []), *files]
        begun = time.monotonic()
        limit = args.limit * (10 if args.survivors or args.reword else 1)
        code, output = run(command, folder, limit, (args.log or folder) / f"mutant{mutant['id']}.log")
        failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)))
        caught = code not in (0, None, 5)
        return mutant | {"caught": caught, "timed_out": code is None, "failed": failed, "files": len(files),
                         "seconds": round(time.monotonic() - begun)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--product", default="HEAD", help="the commit that is mutated (HEAD)")
    parser.add_argument("--tests", help="the commit whose tests run; default: that of --product")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", type=int, default=50)
    parser.add_argument("--limit", type=int, default=180, help="seconds a mutant (180)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side (2)")
    parser.add_argument("--only", type=int, nargs="*", help="ids of the mutants to run")
    parser.add_argument("--survivors", type=Path, help="a result: its survivors, against all fast tests")
    parser.add_argument("--reword", action="store_true", help="reword ten messages, and list what fails")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--log", type=Path, help="keep pytest's output in this folder")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutate-") as base:
        tree = Path(base) / "tree"
        tree.mkdir()
        checkout(args.product, tree)
        chosen = list(mutants(tree, args.seed, args.mutants, args.reword))
        if args.tests:
            shutil.rmtree(tree / "tests")
            checkout(args.tests, tree, "tests")
        if args.only is not None:
            chosen = [mutant for mutant in chosen if mutant["id"] in args.only]
        if args.survivors:
            results = map(json.loads, args.survivors.read_text().splitlines())
            ids = {result["id"] for result in results if not result["caught"]}
            chosen = [mutant for mutant in chosen if mutant["id"] in ids]
        if args.list:
            for mutant in chosen:
                print(*(mutant[key] for key in ("id", "kind", "file", "line", "old", "new")), sep="\t")
            return
        if args.log:
            args.log.mkdir(parents=True, exist_ok=True)
        # What the product compiles is valid for each mutant that leaves its sources as they are.
        for name in ("__pycache__", "fast/__pycache__", "ocean/.build"):
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, tree / name)
        jobs = 1 if args.survivors or args.reword else args.jobs
        done = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool, open(args.out, "w") as out:
            tries = [pool.submit(try_mutant, mutant, tree, args) for mutant in chosen]
            for future in concurrent.futures.as_completed(tries):
                done.append(result := future.result())
                print(json.dumps(result), file=out, flush=True)
                fate = f"{len(result['failed'])} fail" if args.reword else "caught" if result["caught"] else "SURVIVED"
                print(f"{result['id']:>3} {fate:<9}{result['seconds']:>4} s  {result['kind']:<11}"
                      f"{result['file']}:{result['line']}  {result['old'][:40]!r} -> {result['new'][:40]!r}"
                      f"  {' '.join(result['failed'])[:80]}", flush=True)
        print(f"{sum(result['caught'] for result in done)} of {len(done)} caught")


if __name__ == "__main__":
    main()
