"""Check the prose of pages, the product and the commits.

    python bench/prose.py             # a summary; fails if a page has a refused word
    python bench/prose.py --all       # every place
    python bench/prose.py FILE ...    # every place in these files

Warnings: words of bench/words.ini, names of it that are assigned to, docstrings whose first line is
not an imperative of at most 80 characters, lines over 100 columns, and subjects of commits over 72
characters since the merge base with `main`. A class or module needs a first line of at most 80
characters only. docs/log/ and docs/gpu/report.md are records and are left out.
"""

import argparse
import ast
import collections
import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.size import product_files  # noqa: E402

FIRST_LINE, COLUMNS, SUBJECT = 80, 100, 72
RECORDS = "docs/log/", "docs/gpu/report.md"
MAIN = "origin/main", "main", "origin/master", "master"
# first words that are no imperative: articles, pronouns, nouns that describe, third person, gerund
NOT_IMPERATIVE = re.compile(
    r"(an?|the|this|that|these|it|its|what|which|who|how|where|when|whether|if|as|for|of|in|on|"
    r"all|each|every|one|two|some|no|not|same|true|false|none|\w+ing|\w+ed|\w*[^s\W]s)$", re.I)
IMPERATIVE = {"bring", "string", "ring", "need", "feed", "seed", "embed", "shed", "bias", "focus"}


def read_words(path=ROOT / "bench/words.ini"):
    """Read the refused words; returns {pattern: instead} and {name: instead}."""
    parser = configparser.ConfigParser(delimiters=(" = ",), interpolation=None)
    parser.optionxform = str
    parser.read(path)
    words = {re.compile(pattern, re.I): instead for pattern, instead in parser["words"].items()}
    return words, dict(parser["names"])


def list_pages(root):
    """List the pages that users read."""
    paths = [root / "README.md", *root.glob(".github/**/*.md"), *root.glob("docs/**/*.md")]
    names = sorted(path.relative_to(root).as_posix() for path in paths if path.exists())
    return [name for name in names if not name.startswith(RECORDS)]


def list_product(root):
    """List the product's files with prose: Python, CUDA, C, settings, web pages."""
    others = "ocean/**/*.h", "ocean/**/*.c", "config/*.ini", "tools/**/*.html", "examples/*.py"
    names = [path.relative_to(root).as_posix() for pattern in others for path in root.glob(pattern)
             if ".build" not in path.parts]
    return sorted({*product_files(root), *names})


def without_quotes(page):
    """Blank out inline code and blocks of output, which quote the product."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    page = re.sub(r"^```text\n.*?^```$", blank, page, flags=re.M | re.S)
    return re.sub(r"(?<!`)`[^`\n]+`", blank, page)


def find_words(text, words):
    """Yield (line, message) for each refused word."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in words.items():
            for match in pattern.finditer(line):
                yield number, f"{match[0]!r}: write {instead}"


def is_imperative(line):
    """Tell whether a docstring's first line can be an imperative."""
    word = re.match(r"[A-Z][\w-]*", line)
    return word is not None and (word[0].lower() in IMPERATIVE
                                 or not NOT_IMPERATIVE.match(word[0]))


def find_docstrings(tree):
    """Yield (line, message) for each docstring with another first line."""
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        first, line = text.partition("\n")[0], node.body[0].lineno
        if len(first) > FIRST_LINE:
            yield line, f"first line of a docstring has {len(first)} characters"
        elif isinstance(node, functions) and not is_imperative(first):
            yield line, f"no imperative: {first}"


def find_names(tree, names):
    """Yield (line, message) for each assignment to a refused name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in names:
            yield node.lineno, f"{name}: name it {names[name]}"


def find_wide(text):
    """Yield (line, message) for each line over the limit."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS:
            yield number, f"{len(line)} columns"


def find_subjects(root):
    """List the subjects of commits since the merge base that are too long."""
    def git(*arguments):
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    base = next(filter(None, (git("merge-base", "HEAD", branch) for branch in MAIN)), "")
    log = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD") if base else ""
    subjects = [line.partition(" ") for line in log.splitlines()]
    return [f"{commit} {subject}" for commit, _, subject in subjects if len(subject) > SUBJECT]


def check(root, names=None):
    """Check a folder; returns {kind: [(file, line, message)]}."""
    words, refused = read_words()
    pages = list_pages(root)
    product = list_product(root)
    places_of = collections.defaultdict(list)

    def add(kind, name, places):
        places_of[kind] += [(name, line, message) for line, message in places]

    for name in names if names is not None else [*pages, *product]:
        text = (root / name).read_text()
        is_page = name.endswith(".md")
        if is_page:
            add("words in pages", name, find_words(without_quotes(text), words))
        else:
            add("words in the product", name, find_words(text, words))
        if not is_page:
            add("lines over 100 columns", name, find_wide(text))
        if name.endswith(".py"):
            tree = ast.parse(text)
            add("docstrings", name, find_docstrings(tree))
            add("names", name, find_names(tree, refused))
    return dict(places_of)


def main(argv=None):
    """Print the warnings; returns 1 if a page has a refused word."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="relative to the project's folder")
    parser.add_argument("--all", action="store_true", help="print every place")
    args = parser.parse_args(argv)
    warnings = check(ROOT, args.files or None)
    for kind, places in warnings.items():
        if not places:
            continue
        counts = collections.Counter(name for name, _, _ in places)
        most = ", ".join(f"{name} {count}" for name, count in counts.most_common(4))
        print(f"{kind}: {len(places)} ({most})")
        if args.all or args.files or kind == "words in pages":
            for name, line, message in places:
                print(f"  {name}:{line}: {message}")
    for subject in find_subjects(ROOT) if not args.files else []:
        print(f"subject over {SUBJECT} characters: {subject}")
    return bool(warnings.get("words in pages"))


if __name__ == "__main__":
    sys.exit(main())
