"""Reads docs/tour.md for the tests and the notebook: commands, their output, and the game.

    python tests/tour.py        # writes docs/tour.ipynb from the page

The word after a block's `sh` says which tests run it: fast (the fast tests too), wrong (the same;
it ends in an error), slow (only the slow ones), or typed (none; it is only parsed).
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs/tour.md", ROOT / "docs/tour.ipynb"
FENCE = re.compile(r"^```(\w+) ?(\w*).*\n((?s:.*?))^```\n(?:\n```text\n((?s:.*?))^```\n)?",
                   flags=re.M)
PICTURE = re.compile(r"^!\[.*\]\((.*)\)\n", flags=re.M)
NUMBER = re.compile(r"(_\d{8}-\d{6}-[0-9a-f]{6}|(?:\d+h )?(?:\d+m )?\d+s\b|-?\d[\d,.]*\d|-?\d|\s+|"
                    r"\.\.\.)")
SETUP = """\
import os
import sys

# On Colab, or wherever this project's files are not: put the address of its repository here. The rest of this cell
# fetches and installs it, which takes a minute. The index has torch's small build for CPUs.
REPOSITORY = ""
if not any(os.path.exists(folder + "/pufferl.py") for folder in (".", "..")):
    assert REPOSITORY, "there is no pufferl.py here: put the address of the project's repository above"
    !git clone --quiet {REPOSITORY} pufferl
    %cd pufferl
    !{sys.executable} -m pip install --quiet -r requirements.txt --extra-index-url https://download.pytorch.org/whl/cpu
if not os.path.exists("pufferl.py"):
    %cd ..
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # `python` is this Python
# The trainer draws a dashboard on a terminal. A notebook is none, so `2>&1 | cat` stands behind what is typed below.
os.environ.pop("FORCE_COLOR", None)
"""


class Step(NamedTuple):
    """A block of the page: its language, who types it, its lines, and what is seen then, or ""."""

    kind: str
    who: str
    text: str
    seen: str


def steps(page=None):
    return [Step(*(part or "" for part in match.groups()))
            for match in FENCE.finditer(page or PAGE.read_text())]


def typed(*who):
    """Yield (command, the output of a block's last command) of blocks for `who`."""
    for step in steps():
        if step.kind == "sh" and step.who in who:
            *before, last = step.text.splitlines()
            yield from ((command, "") for command in before)
            yield last, step.seen


def header():
    return next(step.text for step in steps() if step.kind == "c")


def generalize(word):
    """Return a pattern for a number, a date, a duration or a space."""
    if word.isspace():
        return r"\s+"
    if word == "...":
        return ".*"
    if word[0] == "_":
        return r"_\d{8}-\d{6}-[0-9a-f]{6}"
    return r"(\d+h )?(\d+m )?\d+s" if word[-1] == "s" else r"-?[\d,.]*\d"


def missing(seen, printed):
    """The first line of the page's output that was not printed after the ones before it, or None.
    Numbers, dates, curves and the width of spaces may differ; ... matches anything."""
    lines = iter(printed.replace(sys.executable, "python").splitlines())
    for line in seen.splitlines():
        # text and numbers alternate
        parts = NUMBER.split(re.sub("[▁-█]+", "...", line))  # a curve
        wanted = re.compile("".join(generalize(part) if i % 2 else re.escape(part)
                                    for i, part in enumerate(parts)))
        if line != "..." and not any(wanted.fullmatch(one.rstrip()) for one in lines):
            return line
    return None


def as_cell(lines):
    """What is typed in a shell, as a notebook has it."""
    return "\n".join(f"!{line}{' 2>&1 | cat' * line.startswith('python')}"
                     for line in lines.splitlines())


def notebook():
    """Return the page as a notebook: the same words, each block a cell."""
    cells, page, at = [], PAGE.read_text(), 0

    def add(kind, text):
        if text.strip():
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {},
                    "source": text.strip("\n")}
            cells.append(cell if kind == "markdown"
                         else {**cell, "execution_count": None, "outputs": []})

    for match in sorted([*FENCE.finditer(page), *PICTURE.finditer(page)],
                        key=lambda match: match.start()):
        if match.re is FENCE and match[2] == "typed":
            continue
        add("markdown", page[at : match.start()])
        if not any(cell["cell_type"] == "code" for cell in cells):
            add("code", SETUP)
        if match.re is PICTURE:
            add("code", f'from IPython.display import Image\n\nImage("{match[1]}")')
        elif match[1] == "c":
            add("code", f"%%writefile kite.h\n{match[3]}")
        else:
            add("code", as_cell(match[3]))
        at = match.end()
    add("markdown", page[at:])
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def as_text():
    return json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(as_text())
    print(f"wrote {NOTEBOOK}")
