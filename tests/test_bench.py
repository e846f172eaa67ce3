"""The tools that compare two trees: what they count, and that they see a difference."""

import ast

import pytest
import torch

from bench import same_bits, size

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
    bare = SOURCE.replace("  # the other", "").replace('    """A function."""\n', "")
    path.write_text(bare.replace('"""A module."""\n', ""))
    assert size.count(path) == {**counts, "lines": 6}
    path.write_text(bare.replace("import b", "import b, c"))
    assert size.count(path)["tokens"] == counts["tokens"] + 2


@pytest.mark.parametrize(("other", "at_import", "all_of_them"), [
    ("import a", [["a", "p.b"]], [["a", "p.b"]]),
    ("def f():\n    import a", [], [["a", "p.b"]]),
    ("import p", [], []),
])
def test_circles(other, at_import, all_of_them):
    sources = {"a": ("a.py", "from p import b"), "p": ("p/__init__.py", ""), "p.b": ("p/b.py", other)}
    modules = {name: (path, ast.parse(text)) for name, (path, text) in sources.items()}
    assert size.circles(modules, True) == at_import
    assert size.circles(modules, False) == all_of_them


def test_the_product_is_what_git_tracks():
    rows, figures = size.measure(size.ROOT)
    assert {"pufferl.py", "ocean/device.py", "kernels.cu", "fast/tile.c"} < rows.keys()
    assert not any(name.startswith(("tests/", "bench/")) for name in rows)
    assert figures["attributes of PuffeRL"][0] > 10 and figures["functions with trainer first"][0] > 0


def test_a_difference_of_one_bit_is_seen():
    state = {"model": {"w": torch.zeros(3)}, "epoch": 3}
    before = dict(same_bits.leaves(state))
    assert same_bits.compare(before, dict(before))[0] == "same"
    other = {**before, "model/w": torch.tensor([0.0, -0.0, 0.0])}
    verdict, details = same_bits.compare(before, other)
    assert verdict == "differs" and "model/w" in details
    assert same_bits.digest(state) != same_bits.digest({**state, "epoch": 4})
    assert same_bits.compare(before, {"epoch": before["epoch"]})[0] == "differs"


def test_a_tensor_by_another_name_is_the_same():
    before = {"masses": torch.arange(3.0), "w": torch.zeros(2)}
    now = {"priorities": torch.arange(3.0), "w": torch.zeros(2)}
    verdict, details = same_bits.compare(before, now)
    assert verdict == "same" and "masses -> priorities" in details
    assert same_bits.compare(before, {**now, "priorities": torch.zeros(3)})[0] == "differs"


def test_a_text_that_differs_is_shown():
    assert same_bits.compare_texts("a\nb", "a\nb")[0] == "same"
    verdict, details = same_bits.compare_texts("a\nb", "a\nc")
    assert verdict == "differs" and "-b" in details and "+c" in details
