"""bench/prose.py: what `make lint` warns of, and that no page has a refused word."""

import ast
import subprocess

import pytest

from bench import prose

CODE = '''"""Compute things."""


def lengthy():
    """Return a first line that goes on for so long that nobody reads it to its end, at all."""


def noun():
    """The sum."""


def third_person():
    """Returns the sum."""


def imperative():
    """Process the sum."""
    found, total = 1, 2
    return found + total


class Noun:
    """A sum."""
'''


def test_pages_have_no_refused_word():
    pages = prose.list_pages(prose.ROOT)
    assert {"README.md", "docs/tour.md", ".github/CONTRIBUTING.md"} <= set(pages)
    assert prose.check(prose.ROOT, pages)["words in pages"] == []


def test_places_are_found(tmp_path):
    (tmp_path / "page.md").write_text(
        "A page.\nNobody begins anew. `Nobody` is quoted.\n```text\nanew\n```\n")
    (tmp_path / "code.py").write_text(CODE + "x = 1  # " + 100 * "x" + "\n")
    places = prose.check(tmp_path, ["page.md", "code.py"])
    assert [line for _, line, _ in places["words in pages"]] == [2, 2]
    assert [name for name, _, _ in places["words in the product"]] == ["code.py", "code.py"]
    assert [line for _, line, _ in places["docstrings"]] == [5, 9, 13]
    assert [(line, message.partition(":")[0]) for _, line, message in places["names"]] == [
        (18, "found")]
    assert [line for _, line, _ in places["lines over 100 columns"]] == [24]


@pytest.mark.parametrize(("line", "expected"), [
    ("Pass it on.", True), ("Compute x.", True), ("Seed it.", True), ("Reads x.", False),
    ("A sum.", False), ("What it is.", False), ("`x`, or None.", False), ("Making it.", False)])
def test_an_imperative_is_told_from_a_noun(line, expected):
    assert prose.is_imperative(line) is expected


def test_each_refused_word_has_a_replacement():
    words, names = prose.read_words()
    assert len(words) > 10 and all(words.values()) and all(names.values())
    assert all(name.isidentifier() for name in names)
    ast.parse("\n".join(f"{name} = 1" for name in names))


def test_subjects_since_the_merge_base(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                       check=True, capture_output=True)

    assert prose.find_subjects(tmp_path) == []
    git("init", "-b", "main")
    git("commit", "--allow-empty", "-m", 80 * "x")
    git("checkout", "-b", "branch")
    git("commit", "--allow-empty", "-m", "Add a line")
    git("commit", "--allow-empty", "-m", 73 * "y")
    assert [subject.split()[1] for subject in prose.find_subjects(tmp_path)] == [73 * "y"]


def test_the_command_fails_for_pages_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "check", lambda root, names: {"words in the product": [("a.py", 1, "")]})
    monkeypatch.setattr(prose, "find_subjects", lambda root: ["1234 subject"])
    assert not prose.main([])
    assert capsys.readouterr().out.splitlines() == [
        "words in the product: 1 (a.py 1)", "subject over 72 characters: 1234 subject"]
    monkeypatch.setattr(prose, "check", lambda root, names: {"words in pages": [("a.md", 1, "bad")]})
    assert prose.main([])
    assert "a.md:1: bad" in capsys.readouterr().out
