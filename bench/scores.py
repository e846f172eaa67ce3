"""Compare scores over environments and seeds (Agarwal et al. 2021).

    from bench.scores import interquartile_mean, interval, profile, overlap

A table of scores is {environment: [normalised score of each seed]}. Bootstrap intervals draw seeds
with replacement within each environment, so each environment keeps its weight.
"""

import numpy as np
from scipy import stats

RESAMPLES = 2_000


def interquartile_mean(scores, axis=None):
    """Return the mean of the middle half of an array of scores."""
    return stats.trim_mean(scores, 0.25, axis=axis)


def resamples(table, count=RESAMPLES, seed=0):
    """Return (count, runs) scores, whose rows draw seeds with replacement."""
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [np.asarray(scores)[generator.integers(len(scores), size=(count, len(scores)))]
         for scores in table.values()], axis=1)


def interval(table, statistic=interquartile_mean, level=0.95):
    """Return (low, value, high): a statistic and its percentile bootstrap interval.

    statistic: a function of (scores, axis). With one seed an environment the interval is a point.
    """
    value = statistic(np.concatenate([np.asarray(scores) for scores in table.values()]), axis=0)
    tails = 100 * (1 - level) / 2, 100 * (1 + level) / 2
    low, high = np.percentile(statistic(resamples(table), axis=1), tails)
    return float(low), float(value), float(high)


def overlap(first, second):
    """Return whether the 95% intervals of the means of two lists of scores overlap."""
    (low, _, high), (other_low, _, other_high) = (
        interval({"": scores}, np.mean) for scores in (first, second))
    return low <= other_high and other_low <= high


def profile(table, thresholds):
    """Return the share of runs above each threshold, all environments alike."""
    shares = [(np.asarray(scores)[:, None] > thresholds).mean(0) for scores in table.values()]
    return np.mean(shares, axis=0)
