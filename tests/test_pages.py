"""Every command in the pages for users can be typed. Nothing is run."""

import dataclasses
import functools
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tour

import configuration
import environments
import ocean.__main__
import pufferl
from tools import catalogue, doctor, export, history, speed, watch
from tools.sweep import command as sweep

ROOT = Path(__file__).resolve().parent.parent
PAGES = "README.md", *(f"docs/{name}.md"
                       for name in ("tour", "write_an_environment", "watch", "export", "sweeps"))
BEGINNINGS = re.compile(r"(make|python (pufferl|protein)\.py|python -m ocean)(?= |$)")
# what write_an_environment.md has its reader make
OWN = {"mine": "squared", "ocean/mine/mine.h": "squared"}
EXAMPLE = """
import gymnasium, torch
make_env = lambda: gymnasium.make("CartPole-v1")
MyPolicy = Network = torch.nn.Module
"""


def shell(page):
    """Yield a page's shell commands, without comments and wrong examples."""
    flags, fence = re.M | re.S, r"^```.*?\n(.*?)^```$"
    text = re.sub(r"^```(?:sh wrong|(?!sh\b)\w).*?^```$", "", page, flags=flags)
    blocks = re.findall(fence, text, flags)
    blocks += re.findall(r"^ {4}\S.*$", re.sub(fence, "", text, flags=flags), re.M)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|\|?|;) ", re.sub(r"(^|\s)#.*", "", line)):
            yield part.strip().removeprefix("$ ")


def commands(page):
    """Those of them that are for this project's programs, as lists of words."""
    return [shlex.split(line) for line in shell(page) if BEGINNINGS.match(line)]


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Read a command up to where it would begin; SystemExit if it is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_file.py").write_text(EXAMPLE)
    for name in ("kite.h", "broken.h"):
        (tmp_path / name).write_text(tour.header())
    done = mock.Mock(return_value=None)
    for owner, names in {
        pufferl: ("train", "find_run"), watch: ("play", "ship"),
        export: ("export",), speed: ("profile",), catalogue: ("table",),
        history: ("table", "show", "plot", "diagnose"),
        ocean.__main__: ("run_check", "play", "standalone", "save_picture"),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, done)
    monkeypatch.setattr(history, "find", mock.Mock())
    monkeypatch.setattr(configuration, "saved_entries", lambda *_: ())  # of a run that is not here
    monkeypatch.setattr(ocean.__main__, "Agents", mock.MagicMock())
    monkeypatch.setattr(doctor, "examine", lambda seconds: [])
    monkeypatch.setattr(speed, "autotune",
                        lambda name, seconds, argv: configuration.load_config(name, argv))
    monkeypatch.setattr(sweep, "Runner", lambda *_: SimpleNamespace(run=done))
    monkeypatch.setattr(sweep, "write_report",
                        functools.wraps(sweep.write_report)(lambda *_, **__: ""))
    monkeypatch.setattr(ocean.__main__, "restart_with_sanitizers", lambda: False)
    monkeypatch.setattr(ocean, "has_display", lambda: True)
    before = dict(configuration.SECTIONS)

    def run(words):
        words = [stand_in(word) for word in words]
        if words[0] == "make":
            return check_make(words[1:])
        monkeypatch.setattr(sys, "argv", words[2 if words[1] == "-m" else 1 :])
        programs = {"pufferl.py": pufferl, "-m": ocean.__main__}
        try:
            programs.get(words[1], sweep).main()
        except SystemExit as end:
            assert not end.code, end.code
        finally:
            configuration.SECTIONS.clear()
            configuration.SECTIONS.update(before)

    return run


def stand_in(word):
    """Replace an environment that a reader makes, or of a package."""
    family, slash, _ = word.partition("/")
    foreign = slash and ".py:" not in word and family in ("gym", "pettingzoo",
                                                          *environments.FAMILIES)
    return "gym/CartPole-v1" if foreign else OWN.get(word, word)


def check_make(words):
    """The targets exist, in the Makefile here or, behind -C, in that of an exported program."""
    text = (ROOT / "Makefile").read_text()
    if words[:1] == ["-C"]:
        words, text = words[2:], export.MAKEFILE
    for word in words:
        assert "=" in word or re.search(rf"^[\w .-]*\b{re.escape(word)}\b[\w .-]*:", text, flags=re.M), f"make {word}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_typed(page, parse):
    lines = commands((ROOT / page).read_text())
    assert len(lines) >= 3, "the page has some"
    for words in lines:
        try:
            parse(words)
        except Exception as error:
            error.add_note(f"{page}: {shlex.join(words)}")
            raise


def test_the_example_of_the_readme_learns(tmp_path, monkeypatch):
    page = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["trainer"].environment["episode_return"] > 60, "a random policy has 22"


def test_settings_in_the_docs_exist():
    schema = configuration.resolve("squared")[0]
    names = {f"{section}.{field.name}" for section, cls in schema.items()
             for field in dataclasses.fields(cls)}
    used = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name != "sweeps.md":
            page = re.sub(r"^```sh wrong\n.*?^```$\n+```text\n.*?^```$", "", path.read_text(),
                          flags=re.M | re.S)
            pattern = r"(?<![\w./])(?:--)?((?:train|vec|rnn|eval|profile)\.[a-z_-]+)"
            for name in re.findall(pattern, page):
                used[name.replace("-", "_")] = path.name
    assert len(used) > 20 and {name: used[name] for name in used.keys() - names} == {}


def test_the_findings_are_short_and_the_log_has_every_entry():
    assert len((ROOT / "docs/findings.md").read_text().splitlines()) <= 300
    for path in (ROOT / "docs/log").glob("*.md"):
        contents, *entries = re.split(r"^## ", path.read_text(), flags=re.M)
        titles = [re.sub(r"[^\w\- ]", "", entry.partition("\n")[0].lower()) for entry in entries]
        assert re.findall(r"\]\(#(.+?)\) \| \S", contents) == [t.replace(" ", "-") for t in titles]


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, flags=re.M)
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in pages)
