"""The tools that compare two trees and two tables of scores, and the kernels' benchmark."""

import numpy as np
import pytest
import torch

from bench import bench_kernels, same_bits, scores


def test_the_benchmark_of_kernels_finds_none_wrong(one_torch_thread):
    for name, case in bench_kernels.cases():
        case.prepare()
        with pytest.raises((AssertionError, TypeError)):  # nothing is written, or no result there
            case.check()
        case.run()
        case.check()
        assert case.moved > case.elements > 0, name


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
