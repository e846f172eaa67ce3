"""docs/tour.md and its notebook: the commands there run, and print what the page shows.
tests/test_pages.py reads the commands that only the slow tests run."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import tour
from PIL import Image

import ocean.__main__
import pufferl

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_has_all_of_it():
    blocks = [step for step in tour.steps() if step.kind == "sh"]
    assert {step.who for step in blocks} == {"fast", "wrong", "slow", "typed"}
    assert all(step.seen or step.who == "typed" for step in blocks), "what one sees is below"
    code = re.sub(r"/\*.*?\*/", "", tour.header(), flags=re.S)
    assert 50 <= sum(bool(line.strip()) for line in code.splitlines()) < 70, "as the page says"
    assert not (ROOT / "ocean/kite").exists(), "it is a game that is not there yet"


def test_what_takes_no_time(tmp_path, monkeypatch, capfd):
    """The errors and the picture, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    (tmp_path / "kite.h").write_text(tour.header())
    commands = [*tour.typed("fast", "wrong")]
    assert len(commands) >= 3
    for command, seen in commands:
        words = shlex.split(command)
        monkeypatch.setattr(sys, "argv", words[2 if words[1] == "-m" else 1 :])
        error = ""
        try:
            (ocean.__main__ if words[1] == "-m" else pufferl).main()
        except SystemExit as end:
            error = end.code or ""
        printed = f"{''.join(capfd.readouterr())}{error}"
        assert tour.missing(seen, printed) is None, f"{command}\n{printed}"
    with Image.open("kite.png") as image:
        assert image.size == (640, 400) and len(image.getcolors()) > 3


def test_the_notebook_is_the_page():
    assert tour.NOTEBOOK.read_text() == tour.as_text(), "python tests/tour.py writes it"
    nbformat = pytest.importorskip("nbformat", reason="pip install -r requirements/test.txt")
    nbformat.validate(nbformat.read(tour.NOTEBOOK, as_version=4))


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """On this Python, cell by cell; each prints what the page shows."""
    nbclient = pytest.importorskip("nbclient", reason="pip install -r requirements/test.txt")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="pip install -r requirements/test.txt")
    for path in ROOT.iterdir():  # a folder that looks like this project's, without its runs
        if path.name not in ("experiments", ".git", "kite.h"):
            (tmp_path / path.name).symlink_to(path)
    done = nbformat.read(tour.NOTEBOOK, as_version=4)
    nbclient.NotebookClient(done, timeout=1800, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = {cell.source: "".join(output.get("text", "") for output in cell.outputs)
               for cell in done.cells if cell.cell_type == "code"}
    compared = 0
    for step in tour.steps():
        if step.kind == "sh" and step.who != "typed":
            cell = tour.as_cell(step.text)
            assert tour.missing(step.seen, printed[cell].replace("\r\n", "\n")) is None, (
                f"{cell}\n{printed[cell]}")
            compared += 1
    assert compared > 8
