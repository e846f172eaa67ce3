"""Protein: sweeps that find, for every budget of time, the best known hyper-parameters.

    python protein.py breakout                                     # goes on where it was stopped; Ctrl-C loses nothing
    python protein.py breakout --sweep.workers 2 --sweep.num-trials 100 --train.total-timesteps 20000000
    python protein.py breakout --sweep.train.learning-rate.max 0.1 --help
    python protein.py report experiments/sweep_breakout            # a page: front, importance, curves, best settings

    from protein import Protein                                    # or from a script
    best = Protein("breakout", {"train.learning_rate": {"distribution": "log_normal", "min": 1e-4, "max": 0.1},
                                "policy.hidden_size": [32, 64, 128]}, num_trials=50).optimize()

What is searched stands in the [sweep.SECTION.KEY] sections of config/*.ini. A trial is a `pufferl.py train` in a
process of its own; its curve becomes observations of (cost, score); Gaussian processes for score, log cost and success
choose the next trial. The file reads in that order: search space, Gaussian process, tuners, ledger, trials, the sweep.
To change how a trial is chosen, edit `Protein._gain`; the others have the same two methods. The page is in report.py.
"""

import contextlib
import dataclasses
import difflib
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
from scipy import linalg, optimize, special
from scipy.stats import qmc
from threadpoolctl import ThreadpoolController

ROOT = Path(__file__).resolve().parent
TRAINER = "pufferl.py"

# ---------------------------------------------------------------------------------------------------------------------
# The search space: settings as coordinates in the unit cube

DISTRIBUTIONS = ("uniform", "int_uniform", "uniform_pow2", "log_normal", "logit_normal", "choice", "none")
FIELDS = ("distribution", "min", "max", "mean", "scale", "values")
DEFAULT_SCALE = 0.25  # of the range, where a mean is given without a scale


class SpaceError(ValueError):
    """A search space that makes no sense; the message names the setting."""


@dataclass
class Setting:
    """One searched setting. `to_unit` and `from_unit` go between its values and a coordinate in 0..1.

    distribution: the scale on which steps are even: uniform and int_uniform (linear), uniform_pow2 (powers of two),
    log_normal (logarithm), logit_normal (logit, for values near 0 or 1 such as gamma), choice (a list of values).
    mean: where the search starts and which region it prefers at first; None for no preference. scale: the standard
    deviation of that preference as a fraction of the whole range on the setting's own scale.
    Raises SpaceError, naming the setting, for anything that cannot be searched.
    """

    name: str
    distribution: str
    min: float = math.nan
    max: float = math.nan
    mean: object = None
    scale: float | None = None
    values: tuple = ()
    integer: bool = False

    def __post_init__(self):
        if self.distribution not in DISTRIBUTIONS:
            self._refuse(f"distribution = {self.distribution!r}: must be one of {', '.join(DISTRIBUTIONS)}")
        if self.distribution == "choice":
            if len(self.values) < 2 or len(set(map(repr, self.values))) < len(self.values):
                self._refuse(f"values = {list(self.values)}: there must be two or more, all different")
        else:
            if self.values:
                self._refuse(f"values are for distribution = choice, not {self.distribution}")
            self._check_range()
        if self.mean is not None:
            if self.values and self.mean not in self.values:
                self._refuse(f"mean = {self.mean}: must be one of {list(self.values)}")
            if not self.values and not self.min <= self.mean <= self.max:
                self._refuse(f"mean = {self.mean}: must lie within min = {self.min} and max = {self.max}")
        if self.scale is not None and not self.scale > 0:
            self._refuse(f"scale = {self.scale}: must be above 0")
        if self.scale is None and self.mean is not None and not self.categorical:
            self.scale = DEFAULT_SCALE
        self.integer |= self.distribution in ("int_uniform", "uniform_pow2")

    def _refuse(self, what):
        raise SpaceError(f"[sweep.{self.name}] {what}.")

    def _check_range(self):
        for key in ("min", "max"):
            if not math.isfinite(getattr(self, key)):
                self._refuse(f"{key} is missing")
        if not self.min < self.max:
            self._refuse(f"min = {self.min} must be below max = {self.max}")
        if self.distribution == "log_normal" and self.min <= 0:
            self._refuse(f"min = {self.min}: log_normal needs values above 0")
        if self.distribution == "logit_normal" and not 0 < self.min < self.max < 1:
            self._refuse(f"min = {self.min}, max = {self.max}: logit_normal needs values between 0 and 1, without both")
        for value in (self.min, self.max):
            if self.distribution == "uniform_pow2" and (value < 1 or not math.log2(value).is_integer()):
                self._refuse(f"{value:g} is not a power of two; uniform_pow2 goes from one to another")
            if self.distribution == "int_uniform" and not float(value).is_integer():
                self._refuse(f"{value} is not a whole number")

    @property
    def levels(self):
        """How many values there are; 0 for a continuum."""
        if self.values:
            return len(self.values)
        if self.distribution in ("int_uniform", "uniform_pow2"):
            return round(self._stretch(self.max) - self._stretch(self.min)) + 1
        return 0

    @property
    def categorical(self):
        """Values without an order: a list with anything in it that is not a number."""
        return any(isinstance(value, bool) or not isinstance(value, int | float) for value in self.values)

    def _stretch(self, value):
        if self.distribution == "log_normal":
            return math.log(value)
        if self.distribution == "logit_normal":
            return math.log(value / (1 - value))
        return math.log2(value) if self.distribution == "uniform_pow2" else float(value)

    def to_unit(self, value):
        """A value's coordinate; the middle of its cell where values are discrete."""
        if self.values:
            if value not in self.values:
                self._refuse(f"{value!r} is not one of {list(self.values)}")
            return (self.values.index(value) + 0.5) / len(self.values)
        low, high, at = self._stretch(self.min), self._stretch(self.max), self._stretch(value)
        if self.levels:
            return (round(at - low) + 0.5) / self.levels
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def from_unit(self, unit):
        """The value at a coordinate in 0..1."""
        if self.levels:
            level = min(int(unit * self.levels), self.levels - 1)
            if self.values:
                return self.values[level]
            level += round(self._stretch(self.min))
            return 2**level if self.distribution == "uniform_pow2" else level
        low, high = self._stretch(self.min), self._stretch(self.max)
        at = low + unit * (high - low)
        value = {"log_normal": math.exp, "logit_normal": special.expit}.get(self.distribution, float)(at)
        value = min(float(self.max), max(float(self.min), float(f"{value:.6g}")))  # 0.015, not 0.01499999999999998
        return round(value) if self.integer else value


class Space:
    """The settings that are searched, in order, and their preference (`mean`, `scale`) as a density on the unit cube.

    settings: {"section.key": what}, also nested {"section": {"key": what}}; `what` is a dict with distribution, min,
    max and optionally mean and scale (texts from an ini file are read as numbers), or a plain list of values: ordered
    where all are numbers, otherwise categories. distribution none takes a setting out again.
    """

    def __init__(self, settings):
        read = [self._read(name, what) for name, what in flatten(settings).items()]
        self.settings = [setting for setting in read if setting is not None]
        if not self.settings:
            raise SpaceError("there is nothing to search: there is no [sweep.SECTION.KEY] section with a distribution.")
        self.names = [setting.name for setting in self.settings]

    @staticmethod
    def _read(name, what):
        if not isinstance(what, dict):
            return Setting(name, "choice", values=tuple(what))
        what = {key: number(value) for key, value in what.items()}
        for key in what:
            if key not in (*FIELDS, "integer"):
                near = difflib.get_close_matches(key, FIELDS, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise SpaceError(f"[sweep.{name}] {key}: there is no such field.{hint} There are: {', '.join(FIELDS)}.")
        what.setdefault("distribution", "choice" if "values" in what else "")
        if what["distribution"] in (None, "none"):
            return None
        if isinstance(what.get("values"), str):
            what["values"] = [number(value.strip()) for value in what["values"].split(",")]
        what["values"] = tuple(what.get("values") or ())
        for key in ("min", "max", "scale"):
            if isinstance(what.get(key), str):
                raise SpaceError(f"[sweep.{name}] {key} = {what[key]!r}: must be a number.")
            if what.get(key) is None:
                what.pop(key, None)
        return Setting(name, **what)

    def __len__(self):
        return len(self.settings)

    def encode(self, config):
        """{"section.key": value} -> (d,) coordinates. Raises SpaceError for a setting that is missing."""
        missing = [name for name in self.names if name not in config]
        if missing:
            raise SpaceError(f"the configuration lacks {', '.join(missing)}.")
        return np.array([setting.to_unit(config[setting.name]) for setting in self.settings])

    def decode(self, unit):
        """(d,) coordinates -> {"section.key": value}."""
        return {setting.name: setting.from_unit(float(u)) for setting, u in zip(self.settings, unit, strict=True)}

    def snap(self, units):
        """(n, d) coordinates moved to the middle of their cells where values are discrete."""
        units = units.copy()
        for k, setting in enumerate(self.settings):
            if setting.levels:
                level = np.minimum(np.floor(units[:, k] * setting.levels), setting.levels - 1)
                units[:, k] = (level + 0.5) / setting.levels
        return units

    def features(self, units):
        """(n, d) coordinates -> (n, f) inputs of the Gaussian processes: categories become one column each, at
        distance 1 of each other; all else stays."""
        columns = []
        for k, setting in enumerate(self.settings):
            if setting.categorical:
                level = np.minimum((units[:, k] * setting.levels).astype(int), setting.levels - 1)
                columns.append(np.eye(setting.levels)[level] / math.sqrt(2))
            else:
                columns.append(units[:, k : k + 1])
        return np.concatenate(columns, axis=1)

    def center(self):
        """(d,) the means, 0.5 where there is none; None where no setting has one."""
        if all(setting.mean is None for setting in self.settings):
            return None
        return np.array([0.5 if s.mean is None else s.to_unit(s.mean) for s in self.settings])

    def warp(self, units):
        """(n, d) even coordinates -> coordinates with the density of the preference (inverse of its distribution:
        a normal cut off at the bounds)."""
        units = units.copy()
        for k, setting in enumerate(self.settings):
            if setting.scale is not None:
                mean = 0.5 if setting.mean is None else setting.to_unit(setting.mean)
                low, high = special.ndtr((np.array([0.0, 1.0]) - mean) / setting.scale)
                units[:, k] = np.clip(mean + setting.scale * special.ndtri(low + units[:, k] * (high - low)), 0, 1)
        return units

    def log_preference(self, units):
        """(n,) logarithm of the preference's density, 0 at its top."""
        total = np.zeros(len(units))
        for k, setting in enumerate(self.settings):
            if setting.scale is not None:
                mean = 0.5 if setting.mean is None else setting.to_unit(setting.mean)
                total -= 0.5 * ((units[:, k] - mean) / setting.scale) ** 2
        return total


def flatten(settings, prefix=""):
    """{"train": {"learning_rate": {...}}} -> {"train.learning_rate": {...}}; flat ones stay."""
    flat = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value and all(isinstance(v, dict | list | tuple) for v in value.values()) and (
                not set(value) & set(FIELDS)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def number(text):
    """A text from an ini file or the command line as int, float, bool or None where it is one."""
    if not isinstance(text, str):
        return text
    named = {"true": True, "false": False, "none": None, "auto": None, "": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Gaussian process regression

# Matrices this small gain nothing from a second thread, which beside running trials waits for a core all the time: on a
# busy machine two threads took 100 times as long.
one_thread = ThreadpoolController().wrap(limits=1, user_api="blas")


class GP:
    """Exact Gaussian process in float64: Matérn 3/2 with a length a feature, plus a linear kernel, plus noise.

    k(x, x') = matern · (1 + √3 r) exp(−√3 r) + linear · (x − ½)·(x' − ½) + group · [same trial] + noise · [same row],
    r² = Σ_k ((x_k − x'_k) / length_k)² (Rasmussen and Williams 2006, eq. 4.17; 5.8 and 5.9 for the marginal likelihood
    and its gradient). `group` is what all points of one trial's curve share: a lucky seed must not count as often as
    its curve has points. Hyper-parameters, as logarithms in `theta` = [length..., matern, linear, group, noise], have
    normal priors and are fitted by L-BFGS; lengths are expected to grow with √features (Hvarfner et al. 2024), so that
    many settings do not make everything look new. Targets should have mean 0 and variance about 1.
    """

    FIT_ROWS = 400  # rows that hyper-parameters are fitted on; the posterior uses all
    FIT_STEPS = 40  # evaluations of the marginal likelihood in one fit, at most
    BOUNDS = (-3.5, 6.0), (-7.0, 4.0), (-12.0, 4.0), (-14.0, 1.0), (-12.0, 1.0)

    def __init__(self, features):
        self.features = features
        lengths = np.full(features, math.log(0.5) + 0.5 * math.log(features))
        self.prior_mean = np.concatenate([lengths, [0.0, math.log(0.1), math.log(1e-2), math.log(3e-3)]])
        self.prior_sd = np.concatenate([np.full(features, 1.0), [1.0, 1.5, 1.5, 1.5]])
        self.bounds = [self.BOUNDS[0]] * features + list(self.BOUNDS[1:])
        self.theta = self.prior_mean.copy()

    def kernel(self, theta, X, Z):
        """(n, m) covariance of the function between rows of X (n, f) and Z (m, f), without group and noise; and r."""
        lengths, (matern, linear) = np.exp(theta[: self.features]), np.exp(theta[self.features : self.features + 2])
        A, B = X / lengths, Z / lengths
        squared = (A * A).sum(1)[:, None] + (B * B).sum(1) - 2 * (A @ B.T)
        r = np.sqrt(np.maximum(squared, 0.0, out=squared), out=squared) * math.sqrt(3)
        decay = np.exp(-r)
        return matern * (1 + r) * decay + linear * ((X - 0.5) @ (Z - 0.5).T), decay

    def covariance(self, theta, X, groups):
        """(n, n) covariance of the observations, the Matérn part's exp(−√3 r), and which rows share a trial."""
        K, decay = self.kernel(theta, X, X)
        same = None if groups is None else (groups[:, None] == groups).astype(float)
        if same is not None:
            K += math.exp(theta[-2]) * same
        K[np.diag_indices_from(K)] += math.exp(theta[-1]) + 1e-9
        return K, decay, same

    def loss(self, theta, X, y, groups=None):
        """Negative log marginal likelihood of y (n,) minus the log prior, and its gradient by theta."""
        n, f = X.shape
        K, decay, same = self.covariance(theta, X, groups)
        try:
            L = linalg.cholesky(K, lower=True, check_finite=False)
        except linalg.LinAlgError:  # only at extreme theta: the line search steps back
            return 1e25, np.zeros_like(theta)
        alpha = linalg.cho_solve((L, True), y, check_finite=False)
        value = 0.5 * y @ alpha + np.log(np.diag(L)).sum() + 0.5 * n * math.log(2 * math.pi)
        half = linalg.lapack.dpotri(L, lower=1, overwrite_c=1)[0]  # the inverse's lower triangle; the upper one is 0
        half[np.diag_indices(n)] *= 0.5
        G = 0.5 * (half + half.T - np.outer(alpha, alpha))  # d value / dK
        lengths, (matern, linear, group, noise) = np.exp(theta[:f]), np.exp(theta[f:])
        gradient = np.empty_like(theta)
        # dk/dlog length_k = 3 · matern · exp(−√3 r) · (Δ_k / length_k)²: no division by r, and the sum over all pairs
        # is two matrix products instead of a loop over features.
        W, Z = G * decay, (X - 0.5) / lengths
        gradient[:f] = 6 * matern * (W.sum(1) @ (Z * Z) - (Z * (W @ Z)).sum(0))
        C = X - 0.5
        by_linear = linear * (C * (G @ C)).sum()
        by_group = group * (G * same).sum() if same is not None else 0.0
        by_noise = noise * np.trace(G)
        in_K = (G * K).sum() - by_linear - by_group - by_noise - 1e-9 * np.trace(G)
        gradient[f:] = in_K, by_linear, by_group, by_noise
        z = (theta - self.prior_mean) / self.prior_sd
        return value + 0.5 * (z @ z), gradient + z / self.prior_sd

    def fit(self, X, y, groups=None):
        """Fit theta from where it stands, on FIT_ROWS rows, then condition on all."""
        if len(X) >= 3:
            # The same rows as before, and a few of those that have come: then the last theta is nearly right, and the
            # fit ends as soon as a step gains no more than some thousandths.
            rows = np.sort(np.argsort(np.random.default_rng(0).random(len(X)))[: self.FIT_ROWS])
            subset = None if groups is None else groups[rows]
            found = optimize.minimize(self.loss, self.theta, (X[rows], y[rows], subset), jac=True, method="L-BFGS-B",
                                      bounds=self.bounds, options={"maxfun": self.FIT_STEPS, "ftol": 1e-5})
            if np.isfinite(found.fun) and found.fun < 1e24:
                self.theta = found.x
        return self.condition(X, y, groups)

    def condition(self, X, y, groups=None):
        """Keep theta, take these observations."""
        self.X = X
        K = self.covariance(self.theta, X, groups)[0]
        self.L = linalg.cholesky(K, lower=True, check_finite=False)
        self.alpha = linalg.cho_solve((self.L, True), y, check_finite=False)
        return self

    def predict(self, X):
        """Mean and standard deviation (m,) of the function itself, without noise, at X (m, f)."""
        K, _ = self.kernel(self.theta, X, self.X)
        V = linalg.solve_triangular(self.L, K.T, lower=True, check_finite=False)
        C = X - 0.5
        prior = math.exp(self.theta[self.features]) + math.exp(self.theta[self.features + 1]) * (C * C).sum(1)
        return K @ self.alpha, np.sqrt(np.maximum(prior - (V * V).sum(0), 1e-12))


# ---------------------------------------------------------------------------------------------------------------------
# Tuners: suggest() -> configuration, observe(configuration, score, cost)


@dataclass
class Observation:
    """One finished trial as a tuner sees it. Scores are to be maximised; costs are seconds."""

    unit: np.ndarray  # (d,) coordinates
    score: float
    cost: float
    failed: bool = False
    complete: bool = True  # False for a trial that was stopped early: its last point is not the schedule's end
    curve: list = dataclasses.field(default_factory=list)  # [(progress in 0..1, score, cost)] up to the last point


def front_of(scores, costs):
    """Indices of the Pareto front, cheapest first: no other trial has at least the score for at most the cost."""
    order, best, front = np.lexsort((-np.asarray(scores), np.asarray(costs))), -math.inf, []
    for i in order:
        if scores[i] > best:
            best = scores[i]
            front.append(int(i))
    return front


class Random:
    """Draws from the preference (everything evenly, where no mean is given). Also what the other tuners share.

    env_name: the environment that `optimize` trains. search_space: see Space; None for the [sweep.*] sections of
    config/. metric: any name in metrics.jsonl. goal: maximize or minimize it. seed: the draws are repeatable.
    random_trials: before a tuner uses what it learnt. settings: further fields of `Sweep` below, e.g. workers=2, and
    fixed={"train.total_timesteps": 1_000_000} for settings that all trials share.
    """

    STEPS = "train.total_timesteps"  # a point along a curve is also a look at a shorter run

    def __init__(self, env_name=None, search_space=None, num_trials=100, metric="environment/score", goal="maximize",
                 seed=0, max_suggestion_cost=math.inf, random_trials=None, **settings):
        if goal not in ("maximize", "minimize"):
            raise SpaceError(f"goal = {goal!r}: must be maximize or minimize.")
        self.env_name, self.num_trials, self.metric, self.goal, self.seed = env_name, num_trials, metric, goal, seed
        self.max_suggestion_cost = max_suggestion_cost or math.inf
        known = [field.name for field in dataclasses.fields(Sweep)] + ["fixed"]
        for key in settings:
            if key not in known:
                raise SpaceError(f"{key}: there is no such setting of a sweep. There are: {', '.join(known)}.")
        self.extra = settings
        self.search_space = searched_settings(env_name, search_space)
        self.space = Space(self.search_space)
        self.sign = 1.0 if goal == "maximize" else -1.0
        self.observations, self.pending, self.number = [], [], -1
        self.prediction = {}  # of the last suggestion: what the models expect of it
        self.rng = np.random.default_rng(seed)
        self.random_trials = random_trials
        if random_trials is None:
            self.random_trials = min(16, max(2, num_trials // 3))

    @one_thread
    def suggest(self, number=None):
        """The next configuration to try, {"section.key": value}; None when there is nothing left to try. It counts as
        pending, and is kept away from, until it is observed. number: of the trial, from 0, by default counted here; all
        draws come from it and the seed, so that a sweep that goes on, or runs on several machines, repeats none."""
        self.number = self.number + 1 if number is None else number
        self.rng = np.random.default_rng([self.seed, self.number])
        self.prediction = {}
        unit = self._next()
        if unit is None:
            return None
        config = self.space.decode(unit)
        self.pending.append(self.space.encode(config))
        return config

    def observe(self, config, score, cost, failed=False, curve=(), complete=True):
        """Tell the outcome of a trial. score: the metric at the end; cost: seconds; failed: it gave no usable result
        (crash, not a number, out of memory), the score is then ignored; curve: [(progress, score, cost), ...] along
        the way, progress in 0..1; complete: False where it was stopped early."""
        unit = self.space.encode(config)
        failed = bool(failed) or not (math.isfinite(score) and math.isfinite(cost))
        for i, other in enumerate(self.pending):
            if np.allclose(other, unit, atol=1e-9):
                del self.pending[i]
                break
        points = [(p, self.sign * s, max(c, 1e-3)) for p, s, c in curve if math.isfinite(s) and math.isfinite(c)]
        score = self.sign * score if not failed else math.nan
        cost = max(cost, 1e-3) if math.isfinite(cost) else math.nan
        if not failed and not points:
            points = [(1.0, score, cost)]
        self.observations.append(Observation(unit, score, cost, failed, complete, points))

    def front(self):
        """The Pareto front so far: [(configuration, score, cost)], cheapest first."""
        done = [o for o in self.observations if not o.failed]
        order = front_of([o.score for o in done], [o.cost for o in done])
        return [(self.space.decode(done[i].unit), self.sign * done[i].score, done[i].cost) for i in order]

    def best(self):
        """(configuration, score, cost) of the highest score; None before there is one."""
        return self.front()[-1] if self.front() else None

    def optimize(self, objective=None):
        """Run the trials and return the best configuration, {"section.key": value}.

        objective: config -> (score, cost in seconds), called here one after the other; None trains `env_name` in
        processes of their own, as `python protein.py` does. An exception in an objective is a failed trial.
        """
        if objective is None:
            run_sweep(self.env_name, tuner=self)
        while objective is not None and len(self.observations) < self.num_trials:
            config = self.suggest()
            if config is None:
                break
            try:
                score, cost = objective(config)
            except (ArithmeticError, MemoryError, RuntimeError, ValueError):
                score, cost = math.nan, math.nan
            self.observe(config, score, cost, failed=not math.isfinite(score))
        if self.best() is None:
            raise RuntimeError(f"none of {len(self.observations)} trials gave a result.")
        return self.best()[0]

    def _next(self):
        center = self.space.center()
        if self.number == 0 and center is not None:
            return center  # the shipped settings are the first to beat
        sobol = qmc.Sobol(len(self.space), rng=np.random.default_rng(self.seed))
        if self.number:
            sobol.fast_forward(self.number)
        return self.space.warp(sobol.random(1))[0]

    def _spread(self, count):
        """(count, d) even Sobol points, new ones in each suggestion; count is a power of two."""
        return qmc.Sobol(len(self.space), rng=self.rng).random(count)

    def _breed(self, parents, count, spread):
        """(count, d) children: two parents crossed, then some coordinates moved by steps of very different size,
        reflected at the bounds (cutting off would heap them up there)."""
        d = len(self.space)
        mothers, fathers = (parents[self.rng.integers(0, len(parents), count)] for _ in range(2))
        children = np.where(self.rng.random((count, d)) < 0.2, fathers, mothers)
        moved = self.rng.random((count, d)) < self.rng.uniform(1.0 / d, 1.0, (count, 1))
        steps = spread * 10 ** self.rng.uniform(-1.5, 0.0, (count, 1)) * self.rng.standard_normal((count, d))
        children = np.abs((children + moved * steps) % 2.0)
        children = np.where(children > 1, 2 - children, children)
        for k, setting in enumerate(self.space.settings):
            if setting.levels:  # a small step would stay in its cell
                jump = self.rng.random(count) < 0.3 / d + (0.2 if setting.levels <= 3 else 0.1)
                hop = np.sign(self.rng.standard_normal(count)) / setting.levels
                fresh = self.rng.random(count) if setting.categorical else children[:, k] + hop
                children[:, k] = np.where(jump, np.clip(fresh, 0, 1), children[:, k])
        return children

    def _fresh(self, units, else_all=True):
        """Those of (n, d) that are neither tried nor pending; by default all of them where there is nothing else."""
        seen = np.array([o.unit for o in self.observations] + self.pending).reshape(-1, len(self.space))
        known = {row.tobytes() for row in np.round(seen, 6)}
        fresh = np.array([row.tobytes() not in known for row in np.round(units, 6)])
        return units[fresh] if fresh.any() or not else_all else units


class ParetoGenetic(Random):
    """Children of the Pareto front, after a random start; a simple rival without a model."""

    def _next(self):
        done = [o for o in self.observations if not o.failed]
        begun = max(self.number, len(self.observations)) >= self.random_trials
        if not done or not begun or self.number % 10 == 9:
            return super()._next()
        front = front_of([o.score for o in done], [o.cost for o in done])
        return self._breed(np.array([done[i].unit for i in front]), 1, 0.3)[0]


class Grid(Random):
    """All combinations of evenly spaced values, as many a setting as num_trials allows (all of a list's), in a random
    order; then suggest() returns None."""

    def _next(self):
        if not hasattr(self, "points"):
            fixed = math.prod(s.levels for s in self.space.settings if s.values)
            free = sum(not s.values for s in self.space.settings)
            share = max(2, int((max(1, self.num_trials / fixed)) ** (1 / free) + 1e-9)) if free else 0
            axes = []
            for s in self.space.settings:
                count = len(s.values) or min(share, s.levels or share)
                axes.append((np.arange(count) + 0.5) / count if s.levels else np.linspace(0, 1, count))
            self.points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(self.space))
            self.points = np.random.default_rng(self.seed).permutation(self.space.snap(self.points))
        fresh = self._fresh(self.points, else_all=False)
        return fresh[0] if len(fresh) else None


class Protein(Random):
    """Cost-aware Bayesian optimisation of the Pareto front.

    Candidates bred around the front and from Sobol points are scored by the expected improvement of the front at a
    target cost t, drawn anew for each suggestion, even in log cost: a candidate improves the front there by
    max(0, score − front(t)) if it costs at most t, so with Gaussian score and log cost the gain is P(cost ≤ t) ·
    EI(score; front(t)); its mean over t would be the expected gain in hypervolume. One target at a time does as well
    (tests/bench_protein.py) and leaves the bounds alone more, as cheap and dear trials get their turns. Uncertainty
    counts in both factors. The preference multiplies the gain with a weight that fades as trials come in (πBO, Hvarfner
    et al. 2022), and so does the squared probability of success.
    """

    CANDIDATES, ROUNDS, IDLE = 1024, 3, 0.7

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.models = {}  # "score", "cost", and "success" once a trial failed

    def _next(self):
        done = [o for o in self.observations if not o.failed]
        if max(self.number, len(self.observations)) < self.random_trials or len(done) < 2:
            return super()._next()
        self.fit()
        best = self._maximise(*self._target())
        score, score_sd, cost, cost_sd, success = (float(value[0]) for value in self.predict(best[None]))
        self.prediction = {"score": self.sign * score, "score_sd": score_sd, "cost": math.exp(cost),
                           "log_cost_sd": cost_sd, "success": success}
        return best

    # -- models ----------------------------------------------------------------------------------------------------

    def inputs(self, units, progress):
        """(n, f + 1) inputs of the models: features, and how far the schedule has come. A point half way is not a run
        of half the length (its learning rate has not come down), so both coordinates tell what it is."""
        units, progress = np.array(units, dtype=float), np.asarray(progress, dtype=float)
        if self.STEPS in self.space.names:
            k = self.space.names.index(self.STEPS)
            setting = self.space.settings[k]
            if setting.distribution == "log_normal" and (progress < 1).any():
                units[:, k] += np.log(np.maximum(progress, 1e-6)) / math.log(setting.max / setting.min)
        return np.concatenate([self.space.features(units), progress[:, None]], axis=1)

    @one_thread
    def fit(self):
        """Fit the models to all observations; returns self. Scores are standardised in self.score_scale."""
        done = [(i, o) for i, o in enumerate(self.observations) if not o.failed]
        rows = [(i, o.unit, *point) for i, o in done for point in o.curve]
        groups = np.array([row[0] for row in rows])
        X = self.inputs(np.array([row[1] for row in rows]), np.array([row[2] for row in rows]))
        scores, log_costs = np.array([row[3] for row in rows]), np.log([row[4] for row in rows])
        low, middle, high = np.quantile(scores, [0.25, 0.5, 0.75])
        if high > low:  # a few very bad trials must not flatten the differences among the good ones
            scores = np.maximum(scores, middle - 5 * (high - low))
        self.score_scale = scores.mean(), scores.std() or 1.0
        self.cost_scale = log_costs.mean(), log_costs.std() or 1.0
        shared = groups if len(set(groups.tolist())) < len(groups) else None
        data = {"score": ((scores - self.score_scale[0]) / self.score_scale[1], shared),
                "cost": ((log_costs - self.cost_scale[0]) / self.cost_scale[1], shared)}
        for name, (y, trial) in data.items():
            model = self.models.setdefault(name, GP(X.shape[1]))
            model.fit(X, y, trial)
        labels = np.array([not o.failed for o in self.observations], dtype=float)
        self.success_rate = labels.mean()
        if labels.all():
            self.models.pop("success", None)
        else:
            units = np.array([o.unit for o in self.observations])
            model = self.models.setdefault("success", GP(X.shape[1]))
            model.fit(self.inputs(units, np.ones(len(units))), 2 * (labels - self.success_rate))
        if self.pending:  # what runs already counts as known, at its expected score, so that nothing is tried twice
            pending = self.inputs(np.array(self.pending), np.ones(len(self.pending)))
            expected, _ = self.models["score"].predict(pending)
            if shared is not None:
                shared = np.concatenate([groups, len(self.observations) + np.arange(len(pending))])
            y = np.concatenate([data["score"][0], expected])
            self.models["score"].condition(np.concatenate([X, pending]), y, shared)
        return self

    @one_thread
    def predict(self, units):
        """At (n, d) coordinates: score mean and sd, log cost mean and sd, probability of success, each (n,)."""
        X = self.inputs(units, np.ones(len(units)))
        score, score_sd = self.models["score"].predict(X)
        cost, cost_sd = self.models["cost"].predict(X)
        success = np.ones(len(X))
        if "success" in self.models:  # least-squares classification: the latent value against the middle of the labels
            latent, sd = self.models["success"].predict(X)
            success = special.ndtr((latent + 2 * self.success_rate - 1) / np.sqrt(sd**2 + 0.05))
        return (self.score_scale[0] + self.score_scale[1] * score, self.score_scale[1] * score_sd,
                self.cost_scale[0] + self.cost_scale[1] * cost, self.cost_scale[1] * cost_sd, success)

    # -- the choice ------------------------------------------------------------------------------------------------

    def _target(self):
        """A log cost to improve the front at, and the front's score there. The front is the predicted one: luck counts
        as noise, not as a record."""
        done = [o for o in self.observations if not o.failed]
        units, log_costs = np.array([o.unit for o in done]), np.log([o.cost for o in done])
        score = self.predict(units)[0]
        self._parents = units[front_of(score, log_costs)]
        anywhere = self.predict(self.space.snap(self.space.warp(self._spread(64))))[2]
        high = min(math.log(self.max_suggestion_cost), max(log_costs.max(), np.quantile(anywhere, 0.9)))
        low = min(log_costs.min(), np.quantile(anywhere, 0.1), high)
        target = self.rng.uniform(low, high)
        return target, max(score[log_costs <= target], default=np.quantile(score, 0.1))

    def _gain(self, units, target, reached):
        """(n,) logarithm of the expected improvement of the front, weighted by preference and probability of success.
        What is expected to cost more than max_suggestion_cost comes last, the cheapest of it first."""
        score, score_sd, cost, cost_sd, success = self.predict(units)
        z = (score - reached) / score_sd
        improvement = score_sd * (z * special.ndtr(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
        affordable = special.ndtr((target - cost) / cost_sd)
        # success counts twice: where all fails, the score is extrapolated, and mostly too well
        gain = np.log(np.maximum(improvement / self.score_scale[1] * affordable * success**2, 1e-300))
        gain += self.num_trials / 10 / max(1, len(self.observations)) * self.space.log_preference(units)
        excess = cost - math.log(self.max_suggestion_cost)
        return np.where(excess > 0, -1e4 - excess, gain)

    def _maximise(self, target, reached):
        """(d,) the best candidate: some rounds of breeding, each around the last one's best, with shorter steps."""
        count = self.CANDIDATES
        units = np.concatenate([self._breed(self._parents, count // 2, 0.4),
                                self.space.warp(self._spread(count // 4)), self._spread(count // 4)])
        best_units, best_gain = np.empty((0, len(self.space))), np.empty(0)
        for round_ in range(self.ROUNDS):
            units = self._fresh(self.space.snap(units))
            best_units = np.concatenate([best_units, units])
            best_gain = np.concatenate([best_gain, self._gain(units, target, reached)])
            keep = np.argsort(-best_gain)[:24]
            best_units, best_gain = best_units[keep], best_gain[keep]
            units = self._breed(best_units, count // 3, 0.15 / 2**round_)
        return self._leave_idle_bounds(best_units[0])

    def _leave_idle_bounds(self, unit):
        """Settings that do not matter drift to a bound, where the models know least. One that lies within 3% of it gets
        another value, if by that neither score nor cost gets worse by IDLE standard deviations of what is expected."""
        for k in self.rng.permutation(len(unit)):
            if min(unit[k], 1 - unit[k]) < 0.03 and not self.space.settings[k].levels:
                both = np.array([unit, unit])
                both[1, k] = self.rng.uniform(0.03, 0.97)
                score, score_sd, cost, cost_sd, success = self.predict(both)
                worse = max((score[0] - score[1]) / score_sd[1], (cost[1] - cost[0]) / cost_sd[1])
                if worse < self.IDLE and success[1] > 0.9 * success[0]:
                    unit = both[1]
        return unit


# ---------------------------------------------------------------------------------------------------------------------
# The ledger: the sweep's folder is the truth


class Ledger:
    """Trials of a sweep on disk, shared by all processes and machines that work on it.

        FOLDER/sweep.json             what is swept; a sweep that goes on must ask for the same
        FOLDER/trials/00007.running   claimed: settings, owner; its age is the owner's last sign of life
        FOLDER/trials/00007.json      finished: settings, score, cost, curve; never changes
        FOLDER/runs/00007/            what `pufferl.py train` wrote, and its output

    Claims and results appear by link(2), which fails if the name exists: a number has one owner and one result. A claim
    whose owner died (seen at once on the same machine, after LEASE seconds without a sign of life from another) is
    taken over by renaming it, which only one can do, and run again; a late result of the old owner is then refused.
    """

    LEASE = 60.0  # seconds

    def __init__(self, folder):
        self.folder = Path(folder)
        self.trials = self.folder / "trials"
        self.trials.mkdir(parents=True, exist_ok=True)
        self.owner = {"host": host_identity(), "pid": os.getpid(), "born": psutil.Process().create_time()}
        self.token = f"{os.getpid():x}-{os.urandom(4).hex()}"  # told apart from another process with the same number
        self._results = {}

    def results(self):
        """{number: record} of all finished trials."""
        for path in self.trials.glob("*.json"):
            if int(path.stem) not in self._results:
                self._results[int(path.stem)] = json.loads(path.read_text())
        return dict(sorted(self._results.items()))

    def claims(self):
        """{number: claim} of all trials that are running or wait to be run again."""
        found = {}
        for path in sorted(self.trials.glob("*.running")):
            if not path.with_suffix(".json").exists():
                with contextlib.suppress(OSError, ValueError):  # finished or given up in this moment
                    found[int(path.stem)] = json.loads(path.read_text())
        return found

    def claim(self, number=0, below=None, **fields):
        """Claim the lowest free number from `number` on; returns the claim, a dict, or None if none is free `below`."""
        for at in itertools.count(number):
            if below is not None and at >= below:
                return None
            claim = {"attempts": 0, "settings": None, **fields, "trial": at, **self.owner, "token": self.token}
            free = not (self.trials / f"{at:05d}.json").exists()
            if free and self._appear(self.trials / f"{at:05d}.running", claim):
                return claim

    def update(self, claim):
        """Write a changed claim of ours."""
        write_json(self.trials / f"{claim['trial']:05d}.running", claim)

    def finish(self, claim, record):
        """Make `record` the trial's result; False, and nothing changes, if it has one already."""
        first = self._appear(self.trials / f"{claim['trial']:05d}.json", record)
        self.drop(claim)
        return first

    def drop(self, claim):
        """Give a claim up, if it still is ours."""
        path = self.trials / f"{claim['trial']:05d}.running"
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text())["token"] == self.token:
                path.unlink()

    def give_back(self, claim):
        """Leave a claim of ours to whoever comes next."""
        self.update({**claim, "host": None})

    def take_over(self):
        """A claim whose owner is gone, now ours, one attempt later; None if there is none."""
        for path in sorted([*self.trials.glob("*.running"), *self.trials.glob("*.lost-*")]):
            result = self.trials / f"{int(path.name[:5]):05d}.json"
            try:
                claim = json.loads(path.read_text())
                if result.exists():  # its owner died between the result and the claim's removal
                    if self._lost(path, claim):
                        path.unlink()
                    continue
                if not self._lost(path, claim):
                    continue
                mine = self.trials / f"{claim['trial']:05d}.lost-{self.token}"
                os.utime(path)  # until the new claim stands, age alone tells whether who took it lives
                os.rename(path, mine)
                if json.loads(mine.read_text()) != claim:  # another took it over since it was read: give it back
                    os.rename(mine, path)
                    continue
            except (OSError, ValueError, KeyError):
                continue  # somebody else was faster
            if claim["settings"] is None:  # died before it knew what to run
                mine.unlink()
                continue
            kill_orphan(claim)
            given_back = claim["host"] is None
            gone = ("trial", "token", "child", "at", *self.owner)
            ours = {key: value for key, value in claim.items() if key not in gone}
            ours["attempts"] += not given_back
            claim = self.claim(claim["trial"], **ours)
            mine.unlink()
            return claim
        return None

    def beat(self, claims):
        """A sign of life for our claims."""
        for claim in claims:
            with contextlib.suppress(OSError):
                os.utime(self.trials / f"{claim['trial']:05d}.running")

    def _lost(self, path, claim):
        waits, ours = claim["host"] is None, claim["host"] == self.owner["host"]
        if path.suffix == ".running" and (waits or ours):
            return waits or (claim["token"] != self.token and not is_alive(claim["pid"], claim["born"]))
        probe = self.trials / f".clock-{self.token}"  # the age by the clock that stamps the files, not by ours
        probe.touch()
        age = probe.stat().st_mtime - path.stat().st_mtime
        probe.unlink()
        return age > self.LEASE

    def _appear(self, path, content):
        """Write a whole file under a name that must be free; False if it is not."""
        part = path.with_name(f"{path.name}.{self.token}.{threading.get_ident()}.part")
        write_json(part, content)
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True


def host_identity():
    """Machines, and containers with process numbers of their own, told apart."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}"


def is_alive(pid, born):
    """Whether the process that was started then still runs; numbers are used again."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return abs(process.create_time() - born) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_orphan(claim, patience=60.0):
    """End the training process of a dead owner on this machine: it was told to save and stop when its owner died."""
    child = claim.get("child")
    if not child or claim["host"] not in (None, host_identity()):
        return
    deadline = time.monotonic() + patience
    while is_alive(*child) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_alive(*child):
        psutil.Process(child[0]).kill()


def write_json(path, content):
    """A file that is never half there: another name, fsync, rename."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    with open(part, "w") as file:
        file.write(json.dumps(content, indent=1, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# ---------------------------------------------------------------------------------------------------------------------
# Trials: one training run in a process of its own

# Linux tells the training run when the process that watches it dies; it then saves and stops.
GUARD = ("import os, sys\n"
         "try:\n    import ctypes; ctypes.CDLL(None).prctl(1, 15)\nexcept Exception:\n    pass\n"
         "os.execv(sys.argv[1], sys.argv[1:])")


@dataclass
class Curve:
    """A training curve: entries of metrics.jsonl that have the metric, each (n,), in the order of steps."""

    step: np.ndarray
    score: np.ndarray
    cost: np.ndarray
    names: tuple = ()
    last: float = 0.0  # step of the last entry, with or without the metric

    @classmethod
    def read(cls, path, metric, cost="performance/uptime"):
        """From metrics.jsonl (its last line may be half written). A run that is resumed goes on from a checkpoint, with
        its clock too, so entries after that are replaced."""
        rows, names = [], {}
        text = Path(path).read_text() if Path(path).exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                step, clock = entry["step"], float(entry[cost])
            except (ValueError, KeyError, TypeError):
                continue
            names |= dict.fromkeys(entry)
            while rows and rows[-1][0] >= step:
                rows.pop()
            value = entry.get(metric)
            rows.append((step, float(value) if isinstance(value, int | float) else math.nan, clock))
        columns = np.array(rows, dtype=float).reshape(-1, 3)
        return cls(*columns[np.isfinite(columns[:, 1])].T, names=tuple(names), last=rows[-1][0] if rows else 0.0)

    def at(self, step, window):
        """(score, cost) at a step: the mean score of the last `window` steps until then, at least of one entry."""
        last = np.searchsorted(self.step, step, side="right")
        first = min(np.searchsorted(self.step, step - window, side="right"), last - 1)
        return float(self.score[first:last].mean()), float(self.cost[last - 1])

    def points(self, total, count):
        """[(progress, score, cost)]: `count` even points along the schedule of `total` steps, as far as it came; the
        last one is where it ended. Scores are means over a tenth of the schedule."""
        if len(self.step) == 0:
            return []
        end = self.step[-1]
        steps = [total * i / count for i in range(1, count + 1) if self.step[0] <= total * i / count < end] + [end]
        return [(min(1.0, step / total), *self.at(step, total / 10)) for step in steps]


def hopeless(curve, total, rule):
    """Whether a running trial is so far behind that it is not worth going on: past `after` of its schedule, and not
    nearly through, its score has not come `share` of the way from the floor to the best score that any trial had at
    the same cost."""
    if not rule or len(curve.step) == 0 or not rule["after"] <= curve.step[-1] / total <= 0.9:
        return False
    score, cost = curve.at(curve.step[-1], total / 10)
    reached = [s for c, s in rule["front"] if c <= cost]
    return bool(reached) and rule["sign"] * score - rule["floor"] < rule["share"] * (max(reached) - rule["floor"])


def run_trial(job, stop=None, started=None):
    """Train once and return what came of it, a dict: status (done, stopped, failed, interrupted, or lost where somebody
    else ended it), score, cost, steps, curve, error, run.

    job: command, folder (None: a temporary one, removed afterwards), total (steps), metric, cost, downsample, rule (see
    `hopeless`), limit (seconds of cost after which it is stopped). stop: an Event that asks to save and leave. started:
    called with the process's (pid, creation time). Runs on any machine that has these files; also as a Ray task.
    """
    begun = time.time()
    with contextlib.ExitStack() as stack:
        folder = Path(job["folder"] or stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-")))
        folder.mkdir(parents=True, exist_ok=True)
        trainer = str(ROOT / job["trainer"])
        command = [sys.executable, trainer, *job["command"], "--data-dir", str(folder)]
        previous = newest_run(folder)
        if previous and (previous / "trainer_state.pt").exists():
            command += ["--resume", str(previous)]
        output = stack.enter_context(open(folder / "output.txt", "ab"))
        position = output.tell()
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", GUARD, *command], stdout=output, stderr=output,
                                   stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **job["env"]})
        try:
            if started:
                with contextlib.suppress(psutil.Error):
                    started((process.pid, psutil.Process(process.pid).create_time()))
            status = watch(process, folder, job, stop)
        except BaseException:
            end(process)
            raise
        text = (folder / "output.txt").read_bytes()[position:].decode(errors="replace")
        run = newest_run(folder)
        curve = curve_of(folder, job)
        points = curve.points(job["total"], job["downsample"])
        error = None
        if status == "done" and process.returncode != 0:
            status, error = "failed", explain(process.returncode, text)
        elif status == "done" and points and curve.last < job["total"]:
            status, error = "lost", f"it was told to stop at {100 * curve.last / job['total']:.0f}% by something else"
        elif status != "interrupted" and not points:
            status = "failed"
            error = (f"{job['metric']} was never logged; there are: {', '.join(curve.names)}" if curve.names else
                     f"no metrics were logged: {explain(process.returncode, text)}")
        if run and status in ("done", "stopped"):  # a finished trial is not resumed; its model stays
            (run / "trainer_state.pt").unlink(missing_ok=True)
        score, cost = points[-1][1:] if points else (None, None)
        return {"status": status, "score": score, "cost": cost, "steps": float(curve.step[-1]) if points else 0.0,
                "curve": points, "error": error, "started": begun, "seconds": time.time() - begun,
                "run": str(run) if run and job["folder"] else None, "ran_on": socket.gethostname()}


def watch(process, folder, job, stop):
    """Wait for a training run: done (it ended by itself), stopped (hopeless, or over its limit) or interrupted."""
    begun = checked = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return "done"
        now = time.monotonic()
        if stop is not None and stop.is_set():
            end(process)
            return "interrupted"
        if now - checked < max(1.0, 0.02 * (now - begun)):  # reading a long log again and again would cost
            continue
        checked = now
        curve = curve_of(folder, job)
        if len(curve.step):
            job.get("at", {}).update(progress=curve.step[-1] / job["total"], score=curve.score[-1])
        if (len(curve.cost) and curve.cost[-1] > job["limit"]) or hopeless(curve, job["total"], job["rule"]):
            end(process)
            return "stopped"


def curve_of(folder, job):
    """The curve of the run in a trial's folder, empty before it has one."""
    return Curve.read((newest_run(folder) or folder) / "metrics.jsonl", job["metric"], job["cost"])


def end(process, patience=60.0):
    """Ask a training run to save and stop; kill it if it does not."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def newest_run(folder):
    """The run folder that `pufferl.py train` made in a trial's folder; None before it did."""
    runs = [path.parent for path in Path(folder).glob("*/config.json")]
    return max(runs, key=lambda run: run.stat().st_mtime) if runs else None


def explain(code, text):
    """Why a training run failed, in a line: what kind of failure, and the last line that it printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    lower = text[-4000:].lower()
    if "out of memory" in lower or "memoryerror" in lower or "can't allocate" in lower or code == -9:
        return f"out of memory (exit {code}): {last}"
    if "not finite" in lower or "floatingpointerror" in lower:
        return f"not finite: {last}"
    return f"exit {code}: {last}"


# ---------------------------------------------------------------------------------------------------------------------
# Where trials run


class LocalPool:
    """Threads, each of which watches a training process. slots: how many trials at a time; gpus: they are spread over
    this many, by CUDA_VISIBLE_DEVICES."""

    def __init__(self, workers, gpus=0):
        self.slots = workers * max(1, gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = (visible.split(",") if visible else [str(gpu) for gpu in range(gpus)])[:gpus]
        self.stop = threading.Event()
        self.threads = ThreadPoolExecutor(self.slots, thread_name_prefix="trial")
        self.running = {}  # future -> (claim, GPU or None)

    def submit(self, claim, job, started):
        gpu = None
        if self.gpus:
            used = [taken for _, taken in self.running.values()]
            gpu = min(self.gpus, key=used.count)
            job = {**job, "env": {**job["env"], "CUDA_VISIBLE_DEVICES": gpu}}
        self.running[self.threads.submit(run_trial, job, self.stop, started)] = claim, gpu

    @property
    def claims(self):
        return [claim for claim, _ in self.running.values()]

    def finished(self, timeout):
        """[(claim, outcome)] of the trials that ended; waits up to `timeout` seconds for one."""
        done, _ = futures.wait(self.running, timeout, return_when=futures.FIRST_COMPLETED) if self.running else ((), ())
        return [(self.running.pop(future)[0], future.result()) for future in done]

    def close(self):
        """Have all trials saved and left; returns [(claim, outcome)]."""
        self.stop.set()
        left = self.finished(None)
        while self.running:
            left += self.finished(None)
        self.threads.shutdown()
        return left


class RayPool:
    """Ray tasks on a cluster. address: of the cluster, "auto" for the one this machine belongs to, or "local" to start
    one here. The project's files travel along; the nodes need the Python packages and a C compiler. slots: workers if
    given, otherwise as many as the cluster has room for. Trials of a lost node come back as None and are run again."""

    def __init__(self, address, workers, cpus=1.0, gpus=0.0):
        import ray

        import protein  # the task must stand in a module: __main__ would travel with this machine's paths in it

        self.ray, self.started = ray, not ray.is_initialized()
        if self.started:
            excludes = [".venv", ".git", "experiments", "ocean/.build", "__pycache__", ".hypothesis", ".pytest_cache"]
            ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False,
                     include_dashboard=False if address == "local" else None,
                     runtime_env={"working_dir": str(ROOT), "excludes": excludes})
        total = ray.cluster_resources()
        room = [int(total.get("CPU", 0) / cpus)] + ([int(total.get("GPU", 0) / gpus)] if gpus else [])
        self.slots = workers or max(1, min(room))
        self.task = ray.remote(protein.run_trial).options(num_cpus=cpus, num_gpus=gpus, max_retries=0,
                                                          scheduling_strategy="SPREAD")
        self.running = {}

    def submit(self, claim, job, started):
        self.running[self.task.remote({**job, "folder": None})] = claim

    @property
    def claims(self):
        return list(self.running.values())

    def finished(self, timeout):
        if not self.running:
            return []
        ended = []
        for ref in self.ray.wait(list(self.running), timeout=timeout)[0]:
            claim = self.running.pop(ref)
            try:
                ended.append((claim, self.ray.get(ref)))
            except self.ray.exceptions.RayTaskError:
                raise  # a fault in run_trial itself
            except self.ray.exceptions.RayError as error:
                ended.append((claim, {"status": "lost", "error": str(error).splitlines()[0]}))
        return ended

    def close(self):
        left = [(claim, {"status": "interrupted"}) for claim in self.claims]
        for ref in self.running:
            self.ray.cancel(ref, force=True)
        if self.started:
            self.ray.shutdown()
        return left


# ---------------------------------------------------------------------------------------------------------------------
# The sweep


@dataclass
class Sweep:
    method: Literal["protein", "random", "genetic", "grid"] = "protein"
    """How a trial is chosen: protein (a model of score and cost), random, genetic (children of the front) or grid."""
    num_trials: int = 100
    """Trials in all, those of earlier starts and other machines included."""
    metric: str = "environment/score"
    """What is searched for: any name in metrics.jsonl."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """Whether more of the metric is better, or less."""
    cost: str = "performance/uptime"
    """What a trial costs: any name in metrics.jsonl that grows; seconds of training by default."""
    max_suggestion_cost: float = 3600.0
    """Trials that are expected to cost more than this are not suggested; one that costs twice as much is stopped."""
    random_trials: int | None = None
    """Trials before the model is asked (default: 16, at most a third of all)."""
    downsample: int = 5
    """Points along each training curve that the model learns from."""
    early_stop: float = 0.25
    """A trial is stopped when, past a quarter of its schedule, it has not come this share of the way from the scores
    of bad trials to the best one at the same cost; 0 for never."""
    workers: int | None = None
    """Trials side by side, on each GPU if gpus is given (default: 1; on Ray as many as there is room for)."""
    gpus: int = 0
    """GPUs of this machine to use; on Ray, GPUs of each trial."""
    cpus: float = 1.0
    """CPU cores that Ray reserves for each trial."""
    ray: str | None = None
    """Run the trials on this Ray cluster: its address, "auto", or "local"."""
    attempts: int = 3
    """How often a trial is started that goes down with its machine, before it counts as failed."""
    name: str | None = None
    """Name of the sweep, for several of one environment: its folder is DATA_DIR/sweep_ENV_NAME."""
    seed: int = 0
    """Seed of the suggestions (trials train with train.seed)."""
    logger: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where trials go besides the ledger: TensorBoard's HParams, or one W&B run each in a group."""
    web: int | None = None
    """Serve the report on this port of this machine (127.0.0.1) while the sweep runs."""


METHODS = {"protein": Protein, "random": Random, "genetic": ParetoGenetic, "grid": Grid}


def searched_settings(env_name, given, options=()):
    """The search space as a tuner takes it, checked against the environment's settings: their type, their present value
    as the mean. given: None for the [sweep.*] sections. env_name None leaves `given` as it is.

    Returns {"section.key": what}. Raises SpaceError for a setting that does not exist.
    """
    if env_name is None:
        return given or {}
    configuration = import_configuration()
    args, schema = configuration.load_config(env_name, list(options)), configuration.resolve(env_name)[0]
    if given is None:
        given = {name.partition(".")[2]: dict(what) for name, what in args["sweep"].items() if name != "sweep"}
    space = {}
    for name, what in flatten(given).items():
        section, _, key = name.partition(".")
        if section not in schema or section == "base":
            sections = [section for section in schema if section != "base"]
            raise SpaceError(f"[sweep.{name}] there is no section {section!r}. There are: {', '.join(sections)}.")
        types = {field.name: field.type for field in dataclasses.fields(schema[section])}
        key = configuration.translate(section, key, list(types), f"[sweep.{name}]")
        if not isinstance(what, dict):
            what = {"distribution": "choice", "values": list(what)}
        what = {field: number(value) for field, value in what.items()}
        if what.get("distribution") in (None, "none") and "values" not in what:
            continue
        kinds = getattr(types[key], "__args__", (types[key],))
        if int in kinds and float not in kinds and bool not in kinds and what.get("distribution") != "choice":
            what["integer"] = True
        present = args[section][key]
        if what.get("mean") is None and what.get("distribution") != "choice" and isinstance(present, int | float) and (
                what.get("min", math.inf) <= present <= what.get("max", -math.inf)):
            what["mean"] = present
        space[f"{section}.{key}"] = what
    Space(space)
    return space


def import_configuration():
    """configuration, imported only where it is needed: it brings torch, and nodes that just start trials, the report
    and the tuners by themselves do without."""
    import configuration

    return configuration


def import_report():
    """report.py, which reads ledgers and so imports this file; this file only hands over to it."""
    import report

    return report


def as_options(settings):
    """{"train.learning_rate": 0.01} -> ["--train.learning-rate", "0.01"]."""
    return [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), str(value))]


def run_sweep(env_name, tuner, settings=None, options=(), quiet=False):
    """Run trials until there are settings.num_trials of them, going on with what the folder holds; returns the Ledger.

    settings: a Sweep; None makes one from the tuner. options: of `pufferl.py train`, fixed for all trials. Ctrl-C (or
    SIGTERM) has the running trials save and leaves them to the next start; a second one leaves at once.
    Raises SpaceError where the folder holds another sweep, RuntimeError where the first trials all fail.
    """
    import pufferl

    if settings is None:
        extra = dict(tuner.extra)
        fixed = extra.pop("fixed", {})
        nested = {f"{section}.{key}": value for section, keys in fixed.items() if isinstance(keys, dict)
                  for key, value in keys.items()}
        options = as_options(nested | {key: value for key, value in fixed.items() if not isinstance(value, dict)})
        settings = Sweep(**extra)
        settings.num_trials, settings.metric, settings.goal = tuner.num_trials, tuner.metric, tuner.goal
        settings.max_suggestion_cost = tuner.max_suggestion_cost
    config = pufferl.load_config(env_name, list(options))
    folder = Path(config["data_dir"]) / "_".join(filter(None, ("sweep", Path(config["env_name"]).stem, settings.name)))
    ledger = Ledger(folder)
    begin(ledger, env_name, tuner, settings, options, config)
    pool = (RayPool(settings.ray, settings.workers, settings.cpus, settings.gpus) if settings.ray else
            LocalPool(settings.workers or 1, settings.gpus))
    fixed = list(options)
    if not settings.ray and not settings.gpus and pool.slots > 1 and config["vec"]["num_threads"] is None:
        cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0))
                    if hasattr(os, "sched_getaffinity") else os.cpu_count())
        fixed += ["--vec.num-threads", str(max(1, cores // pool.slots))]
    logger = make_logger(settings.logger, folder)
    server = import_report().serve(folder, settings.web) if settings.web else None
    known, beaten = set(), 0.0
    status = StatusLine(sys.stdout.isatty() and not quiet)

    def say(text):
        if not quiet:
            status.clear()
            print(text, flush=True)

    say(f"sweep {folder}: {len(tuner.space)} settings ({', '.join(tuner.space.names)}), {len(ledger.results())} of "
        f"{settings.num_trials} trials done, {pool.slots} at a time")
    if server:
        say(f"report: http://127.0.0.1:{server.server_address[1]}")

    def learn():
        for number, record in ledger.results().items():
            if number not in known:
                known.add(number)
                observe_record(tuner, record)

    def next_claim():
        claim = ledger.take_over()
        if claim is not None:
            return claim
        learn()
        others = ledger.claims()
        claim = ledger.claim(below=settings.num_trials)
        if claim is None:
            return None
        tuner.pending = [tuner.space.encode(c["settings"]) for c in others.values() if c["settings"]]
        claim["settings"] = tuner.suggest(claim["trial"])
        if claim["settings"] is None:
            ledger.drop(claim)
            return None
        claim["predicted"] = tuner.prediction
        ledger.update(claim)
        return claim

    def submit(claim):
        total = claim["settings"].get("train.total_timesteps", config["train"]["total_timesteps"])
        place = folder / "runs" / f"{claim['trial']:05d}"
        job = {"trainer": TRAINER, "folder": str(place), "env": {}, "total": total, "metric": settings.metric,
               "command": ["train", env_name, *fixed, "--logger", "none", "--train.keep", "1",
                           *as_options(claim["settings"])],
               "cost": settings.cost, "downsample": settings.downsample, "limit": 2 * settings.max_suggestion_cost,
               "rule": stopping_rule(tuner, settings)}

        def started(child):
            ledger.update({**claim, "child": child})

        claim["at"] = job["at"] = {}
        pool.submit(claim, job, started)

    def settle(claim, outcome):
        if outcome["status"] == "lost" and claim["attempts"] + 1 < settings.attempts:
            say(f"trial {claim['trial']}: lost ({outcome['error']}); it is run again")
            claim["attempts"] += 1
            ledger.update(claim)
            submit(claim)
            return
        if outcome["status"] == "interrupted":
            ledger.give_back(claim)
            return
        if outcome["status"] == "lost":
            outcome = {"status": "failed", "score": None, "cost": None, "curve": [], "steps": 0.0,
                       "error": f"lost {settings.attempts} times: {outcome['error']}"}
        if outcome.get("run"):
            outcome["run"] = os.path.relpath(outcome["run"], folder)
        record = {"trial": claim["trial"], "settings": claim["settings"], **outcome,
                  "predicted": claim.get("predicted", {}), "attempts": claim["attempts"] + 1}
        if ledger.finish(claim, record):
            learn()
            logger(record)
            say(describe(record, tuner, settings))

    try:
        with pufferl.Interrupts() as interrupts:
            while not interrupts.requested:
                while len(pool.claims) < pool.slots and not interrupts.requested:
                    claim = next_claim()
                    if claim is None:
                        break
                    submit(claim)
                if not pool.claims:
                    break
                for claim, outcome in pool.finished(0.5):
                    settle(claim, outcome)
                status.show(pool.claims)
                if time.monotonic() - beaten > Ledger.LEASE / 6:
                    ledger.beat(pool.claims)
                    beaten = time.monotonic()
                refuse_if_all_fail(ledger)
    finally:
        status.clear()
        for claim, outcome in pool.close():
            settle(claim, outcome if outcome["status"] != "lost" else {"status": "interrupted"})
        logger(None)
        if server:
            server.shutdown()
    learn()
    conclude(folder, tuner, settings, say, interrupts.requested)
    return ledger


class StatusLine:
    """What runs now, on the last line of a terminal."""

    def __init__(self, wanted):
        self.wanted, self.began = wanted, time.monotonic()

    def show(self, claims):
        if self.wanted:
            at = [(c["trial"], c["at"].get("progress", 0), c["at"].get("score", math.nan)) for c in claims]
            line = f"{time.monotonic() - self.began:.0f} s, running: "
            line += ", ".join(f"{trial} {100 * progress:.0f}% score {score:.4g}" for trial, progress, score in at)
            print("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def clear(self):
        if self.wanted:
            print("\r\x1b[K", end="", flush=True)


def begin(ledger, env_name, tuner, settings, options, config):
    """Write sweep.json, or check that the folder's one asks for the same, so that all its trials can be compared."""
    path = ledger.folder / "sweep.json"
    asked = {"env": env_name, "metric": settings.metric, "goal": settings.goal, "cost": settings.cost}
    asked |= {f"sweep.{name}.{field}": value for name, what in tuner.search_space.items()
              for field, value in (what if isinstance(what, dict) else {"values": list(what)}).items()}
    asked |= {f"{section}.{key}": value for section in ("env", "vec", "policy", "rnn", "train")
              for key, value in config[section].items() if f"{section}.{key}" not in tuner.space.names}
    asked = json.loads(json.dumps(asked, default=str))
    whole = {"asked": asked, "options": list(options), "space": tuner.search_space, "created": time.time()}
    if ledger._appear(path, whole):
        return
    held = json.loads(path.read_text())["asked"]
    different = [f"{key}: {held.get(key, 'nothing')} there, {asked.get(key, 'nothing')} now"
                 for key in {**held, **asked} if held.get(key, "nothing") != asked.get(key, "nothing")]
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        what = "; ".join(different[:5]) + more
        raise SpaceError(f"{ledger.folder} holds another sweep ({what}). Give this one a name of its own, --sweep.name "
                         "NAME, or move the folder away.")


def observe_record(tuner, record):
    """Tell a tuner a ledger's record."""
    score, cost = (math.nan if record[key] is None else record[key] for key in ("score", "cost"))
    failed, complete = record["status"] == "failed", record["status"] == "done"
    tuner.observe(record["settings"], score, cost, failed, record["curve"], complete)


def stopping_rule(tuner, settings):
    """The rule for `hopeless` from what is known now: [(cost, score)] of all points of all curves, and the floor."""
    done = [o for o in tuner.observations if not o.failed]
    if not settings.early_stop or len(done) < 5:
        return None
    points = [(cost, score) for o in done for _, score, cost in o.curve]
    front = front_of([score for _, score in points], [cost for cost, _ in points])
    return {"front": [points[i] for i in front], "floor": float(np.quantile([o.score for o in done], 0.1)),
            "share": settings.early_stop, "after": 0.25, "sign": tuner.sign}


def refuse_if_all_fail(ledger, count=5):
    """RuntimeError where the first trials fail without exception: then the settings are not what is wrong."""
    records = list(ledger.results().values())
    if len(records) == count and all(record["status"] == "failed" for record in records):
        errors = "\n".join(f"  trial {record['trial']}: {record['error']}" for record in records)
        raise RuntimeError(f"the first {count} trials all failed:\n{errors}\n"
                           f"Their output is in {ledger.folder}/runs/*/output.txt; move the folder away to begin anew.")


def describe(record, tuner, settings):
    """A finished trial in a line."""
    head = f"trial {record['trial']:4d} of {settings.num_trials}"
    if record["status"] == "failed":
        return f"{head}  failed: {record['error']}"
    front = any(cost == record["cost"] and score == record["score"] for _, score, cost in tuner.front())
    expected = record["predicted"].get("score")
    note = "  on the front" if front else "  stopped early" if record["status"] == "stopped" else ""
    known = f" (expected {expected:.4g})" if expected is not None else ""
    return f"{head}  score {record['score']:.4g}{known}  cost {record['cost']:.4g}{note}   {brief(record['settings'])}"


def brief(settings):
    """Settings in a line, without their sections."""
    return " ".join(f"{name.partition('.')[2]}={short(value)}" for name, value in settings.items())


def short(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def conclude(folder, tuner, settings, say, interrupted):
    """Print the front and how to train with the best settings; write the report."""
    if not tuner.observations:
        return
    say(f"\n{settings.metric:>20}  {settings.cost:>20}   the front, cheapest first")
    for config, score, cost in tuner.front():
        say(f"{score:20.5g}  {cost:20.5g}   " + brief(config))
    if tuner.best():
        say(f"\nbest settings: python pufferl.py train {tuner.env_name} " + " ".join(as_options(tuner.best()[0])))
    with contextlib.suppress(ModuleNotFoundError):  # plotly; the sweep does not hang on it
        say(f"report: {import_report().write_report(folder)}")
    if interrupted:
        say("stopped; the same command goes on from here")


def make_logger(kind, folder):
    """A function that takes each finished trial's record, and None at the end."""
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        def log(record):
            if record is None or record["status"] == "failed":
                return
            with SummaryWriter(str(folder / "tensorboard" / f"{record['trial']:05d}")) as writer:
                last = {"sweep/final_score": record["score"], "sweep/final_cost": record["cost"]}
                writer.add_hparams(record["settings"], last, run_name=".")
                for progress, score, cost in record["curve"]:
                    writer.add_scalar("sweep/score", score, round(100 * progress))
                    writer.add_scalar("sweep/cost", cost, round(100 * progress))

        return log
    if kind == "wandb":
        import wandb

        def log(record):
            if record is None:
                return
            run = wandb.init(project="pufferl", group=folder.name, name=f"{record['trial']:05d}", dir=str(folder),
                             config=record["settings"], tags=["sweep", record["status"]], reinit="finish_previous")
            for progress, score, cost in record["curve"]:
                run.log({"sweep/score": score, "sweep/cost": cost, "sweep/progress": progress})
            run.finish(exit_code=int(record["status"] == "failed"))

        return log
    return lambda record: None


# ---------------------------------------------------------------------------------------------------------------------
# Command line

USAGE = """usage: python protein.py ENV [--sweep.key value ...] [--section.key value ...]
       python protein.py report PATH [--output FILE] [--metric NAME] [--tag TAG]

  ENV         search the settings of [sweep.*] in config/default.ini and config/ENV.ini; the same command goes on
              where it was stopped, also on several machines that share the folder
  report      the page of a sweep's folder, or of a folder of runs

  --sweep.num-trials 50 --sweep.workers 2       how it is searched; python protein.py ENV --help lists all
  --sweep.train.learning-rate.max 0.1           where to search: distribution, min, max, mean, scale or values
  --sweep.train.gamma.distribution none         takes a setting out
  --train.total-timesteps 10000000              fixes a setting for all trials, and takes it out
"""


def split_options(argv):
    """Command line -> (--sweep.key options, {setting: {field: text}}, all other options as they are)."""
    sweep, space, others, i = [], {}, [], 0
    while i < len(argv):
        name, equals, value = argv[i].partition("=")
        taken = [argv[i]]
        if not equals and i + 1 < len(argv) and not argv[i + 1].startswith("--"):
            value = argv[i + 1]
            taken.append(value)
        i += len(taken)
        parts = name.removeprefix("--").replace("-", "_").split(".")
        if parts[0] == "sweep" and len(parts) == 4:
            space.setdefault(f"{parts[1]}.{parts[2]}", {})[parts[3]] = value
        elif parts[0] == "sweep" and len(parts) != 2:
            raise SpaceError(f"{name}: is --sweep.SECTION.KEY.FIELD VALUE with a field of {', '.join(FIELDS)}, or "
                             "--sweep.KEY VALUE; --help lists the keys.")
        else:
            (sweep if parts[0] == "sweep" or name in ("-h", "--help") else others).extend(taken)
    return sweep, space, others


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    try:
        if argv[0] == "report":
            report_command(argv[1:])
        else:
            sweep_command(argv[0], argv[1:])
    except (ValueError, RuntimeError) as error:  # SpaceError, pufferl's ConfigError, trials that all fail
        sys.exit(f"protein.py: {error}")


def report_command(argv):
    import tyro

    def report(path: tyro.conf.Positional[Path], output: Path | None = None, metric: str = "environment/score",
               tag: str | None = None):
        """Write the report of a sweep's folder, or of a folder of runs.

        Args:
            path: a sweep's folder, or one of runs such as experiments.
            output: the page (default: report.html in the folder).
            metric: what runs are compared by; a sweep knows its own.
            tag: only runs with this tag.
        """
        print(import_report().write_report(path, output, metric=metric, tag=tag))

    tyro.cli(report, args=argv, prog="protein.py report")


def sweep_command(env_name, argv):
    import tyro

    configuration = import_configuration()
    sweep_options, space_options, options = split_options(argv)
    args = configuration.load_config(env_name, options)
    types = {field.name: field.type for field in dataclasses.fields(Sweep)}
    shipped = {}
    for key, text in args["sweep"].get("sweep", {}).items():
        key = configuration.translate("sweep", key, list(types), f"config [sweep] {key}")
        shipped[key] = configuration.coerce(text, types[key], f"config [sweep] {key}")

    arguments = dataclasses.make_dataclass("Arguments", [("sweep", Sweep, dataclasses.field(
        default_factory=lambda: Sweep(**shipped)))])
    arguments.__doc__ = f"Search hyper-parameters of {env_name}.\n\n{USAGE[USAGE.index('  --sweep.num'):]}"
    settings = tyro.cli(arguments, args=sweep_options, prog=f"protein.py {env_name}",
                        config=(tyro.conf.FlagConversionOff,)).sweep

    space = {name.partition(".")[2]: dict(what) for name, what in args["sweep"].items() if name != "sweep"}
    for name, fields in space_options.items():
        space.setdefault(name, {}).update(fields)
    for option in options:
        name = option.partition("=")[0].removeprefix("--").replace("-", "_")
        if option.startswith("--") and space.pop(name, None) is not None:
            print(f"{name} is given, so it is not searched")
    tuner = METHODS[settings.method](
        search_space=searched_settings(env_name, space, options), num_trials=settings.num_trials,
        metric=settings.metric, goal=settings.goal, seed=settings.seed,
        max_suggestion_cost=settings.max_suggestion_cost, random_trials=settings.random_trials)
    tuner.env_name = env_name
    run_sweep(env_name, tuner, settings, options)


if __name__ == "__main__":
    main()
