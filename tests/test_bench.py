"""The tools that compare two trees: what they count, and that they see a difference."""

import ast

import numpy as np
import pytest
import torch

from bench import same_bits, scores, size

SOURCE = '''"""A module."""
import b  # the other


def f(trainer):
    """A function."""
    from a import x
    raise ValueError(f"{x}")
'''


def test_a_count_leaves_out_docstrings_and_comments(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(SOURCE)
    counts = size.count(path)
    assert (counts["statements"], counts["lines"], counts["raises"]) == (4, 8, 1)
    path.write_text(SOURCE.replace("import b  # the other", "import b, c"))
    assert size.count(path)["tokens"] == counts["tokens"] + 2


@pytest.mark.parametrize(("other", "at_import", "everywhere"), [
    ("import a", [["a", "p.b"]], [["a", "p.b"]]),
    ("def f():\n    import a", [], [["a", "p.b"]]),
    ("import p", [], []),
])
def test_circles(other, at_import, everywhere):
    sources = {"a": ("a.py", "from p import b"), "p": ("p/__init__.py", ""),
               "p.b": ("p/b.py", other)}
    modules = {name: (path, ast.parse(text)) for name, (path, text) in sources.items()}
    assert size.circles(modules, True) == at_import
    assert size.circles(modules, False) == everywhere


def test_the_product_is_what_git_tracks(tmp_path):
    names = size.product_files(size.ROOT)
    assert {"pufferl.py", "ocean/device.py", "kernels.cu", "fast/tile.c"} < {*names}
    assert not any(name.startswith(("tests/", "bench/")) for name in names)
    (tmp_path / "tests").mkdir()
    trainer = ("class PuffeRL:\n    def f(self):\n        import a\n        self.x, self.y = 1, 2\n"
               "        self.x = 3\n")
    for name, text in (("a.py", SOURCE), ("b.py", trainer), ("tests/c.py", SOURCE), ("d.cu", "\n")):
        (tmp_path / name).write_text(text)
    rows, figures = size.measure(tmp_path)
    assert list(rows) == ["a.py", "b.py", "d.cu"] and rows["d.cu"] == {"lines": 1}
    assert {name: number for name, (number, _) in figures.items()} == {
        "modules": 2, "modules at the root": 2, "functions with trainer first": 1,
        "attributes of PuffeRL": 2, "import circles": 0, "import circles, functions too": 1}


def test_a_difference_of_one_bit_is_seen_and_another_name_is_none():
    weights, masses = torch.zeros(3), torch.arange(3.0)
    before = dict(same_bits.leaves({"model": {"w": weights}, "masses": masses}))
    assert before.keys() == {"model/w", "masses"}
    assert same_bits.compare(before, dict(before))[0] == "same"
    for now in ({**before, "model/w": torch.tensor([0.0, -0.0, 0.0])}, {"masses": masses},
                {"model/w": weights, "priorities": torch.zeros(3)}):
        verdict, details = same_bits.compare(before, now)
        assert verdict == "differs" and details
    verdict, details = same_bits.compare(before, {"model/w": weights, "priorities": masses})
    assert verdict == "same" and "masses -> priorities" in details
    assert same_bits.digest(before) != same_bits.digest({**before, "masses": masses + 1})
    verdict, details = same_bits.compare_texts("a\nb", "a\nc")
    assert verdict == "differs" and "-b" in details and "+c" in details


def test_scores_over_environments_and_seeds():
    table = {"a": [0.0, 1.0], "b": [1.0, 1.0]}
    assert scores.interquartile_mean(np.arange(8)) == 3.5  # of 2, 3, 4 and 5
    low, value, high = scores.interval(table, np.mean)
    assert (low, value, high) == (0.5, 0.75, 1.0)  # b's seeds never replace a's
    assert scores.interval({"a": [0.3]}, np.mean) == (0.3, 0.3, 0.3)
    assert scores.overlap([0.0, 1.0], [0.5]) and not scores.overlap([0.0, 0.2], [0.5])
    assert scores.profile({"a": [0.2, 0.8], "b": [0.9]}, np.array([0.0, 0.5, 0.8])).tolist() == [
        1.0, 0.75, 0.5]
