"""bench/prose.py: what `make lint` warns of, and that no page has a refused word."""

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


def test_places_are_found_and_only_pages_fail(tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text(
        "A page.\nNobody begins anew. `Nobody` is quoted.\n```text\nanew\n```\n")
    (tmp_path / "code.py").write_text(CODE + "x = 1  # " + 100 * "x" + "\n")
    places = prose.check(tmp_path, ["page.md", "code.py"])
    assert [line for _, line, _ in places["words in pages"]] == [2, 2]
    assert [name for name, _, _ in places["words in the product"]] == ["code.py", "code.py"]
    assert [line for _, line, _ in places["docstrings"]] == [3, 5, 7]
    assert [(line, message.partition(":")[0]) for _, line, message in places["names"]] == [
        (10, "found")]
    assert [line for _, line, _ in places["lines over 100 columns"]] == [14]
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert not prose.main(["code.py"]) and prose.main(["page.md"])
    assert "page.md:2: " in capsys.readouterr().out
