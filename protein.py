"""Tune hyper-parameters: find the best ones for every budget of time.

    python protein.py breakout                          # continues a stopped sweep; Ctrl-C is safe
    python protein.py breakout --sweep.workers 2 --sweep.num-trials 100
    python protein.py breakout --sweep.train.learning-rate.max 0.1 --help
    python protein.py report experiments/sweep_breakout # a page: front, importance, curves

    from protein import Protein                         # or from a script
    best = Protein("breakout", {"train.learning_rate": {"distribution": "log_normal",
                                                        "min": 1e-4, "max": 0.1},
                                "policy.hidden_size": [32, 64, 128]}, num_trials=50).optimize()

The [sweep.SECTION.KEY] sections of config/*.ini define the search space. Gaussian processes for
score, log cost and success choose the next trial. The file has the search space, the Gaussian
process, then the tuners. To change how a trial is chosen, edit `Protein._gain`. Every tuner has the
methods suggest and observe. tools/sweep/command.py has the command line and runs the trials.
"""

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import absolute_imports  # noqa: F401  first
import processes
from errors import require

if __name__ == "__main__":
    processes.stop_at_once()  # Ctrl-C during the slow imports below prints no traceback

import numpy as np
from scipy import linalg, optimize, special
from scipy.stats import qmc
from threadpoolctl import ThreadpoolController

# --------------------------------------------------------------------------------------------------
# The search space: settings as coordinates in the unit cube


class Distribution(NamedTuple):
    """The map from a setting's values to an axis on which equal steps matter equally.

    For example the logarithm for log_normal. The density on each axis is a truncated normal around
    the setting's mean, uniform without one.
    """

    transform: Callable = float  # a value's place on the axis
    inverse: Callable = float  # the value at a place
    fits: Callable = lambda value: True  # whether a bound of the range can be on the axis
    needs: str = ""  # what fits, in words
    whole: bool = False  # places and values are whole numbers
    axis: str | None = None  # "log" if the axis is the logarithm; plotly's type of axis, too


DISTRIBUTIONS = {
    "uniform": Distribution(),
    "int_uniform": Distribution(inverse=int, fits=lambda value: float(value).is_integer(),
                                needs="whole numbers", whole=True),
    "uniform_pow2": Distribution(math.log2, lambda place: 2**place,
                                 lambda value: value >= 1 and math.log2(value).is_integer(),
                                 "powers of two", whole=True, axis="log"),
    "log_normal": Distribution(math.log, math.exp, lambda value: value > 0, "values above 0",
                               axis="log"),
    "logit_normal": Distribution(lambda value: math.log(value / (1 - value)), special.expit,
                                 lambda value: 0 < value < 1,
                                 "values between 0 and 1, without both"),
    "choice": Distribution(),  # of values, not of a range
    "none": Distribution(),  # not searched
}
FIELDS = ("distribution", "min", "max", "mean", "scale", "values")
DEFAULT_SCALE = 0.25  # a setting's scale, as a fraction of its range, if it has a mean and no scale


@dataclass
class Setting:
    """One searched setting, which maps its values to a coordinate in 0..1 and back.

    distribution: a name in DISTRIBUTIONS; log_normal is for learning rates, logit_normal for values
    near 0 or 1 such as gamma. mean: where the search starts and which region it prefers at first;
    None for no preference (if None is among a choice's values, it is that value). scale: the
    standard deviation of that preference, as a fraction of the range's length on the axis.
    Categories have no regions: their mean only says where the search starts. Raises ConfigError,
    naming the setting, for a setting that cannot be searched.
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
        place, values = f"[sweep.{self.name}]", list(self.values)
        require(self.distribution in DISTRIBUTIONS,
                f"{place} distribution = {self.distribution!r}: must be one of "
                f"{', '.join(DISTRIBUTIONS)}.")
        if self.distribution == "choice":
            require(len(set(map(repr, values))) == len(values) > 1,
                    f"{place} values = {values}: there must be two or more, all different. To fix "
                    f"a setting give --{self.name.replace('_', '-')} VALUE.")
        else:
            require(not values,
                    f"{place} values are for distribution = choice, not {self.distribution}.")
            require(-math.inf < self.min < self.max < math.inf,
                    f"{place} min = {self.min}, max = {self.max}: give both, min below max.")
            for bound in (self.min, self.max):
                require(self.row.fits(bound), f"{place} min = {self.min}, max = {self.max}: "
                        f"{self.distribution} needs {self.row.needs}.")
        if self.mean is not None:
            is_within = self.mean in values if values else self.min <= self.mean <= self.max
            require(is_within, f"{place} mean = {self.mean}: must be one of the values, or lie "
                    "within min and max.")
            if self.scale is None and not self.categorical:
                self.scale = DEFAULT_SCALE
        require(self.scale is None or self.scale > 0,
                f"{place} scale = {self.scale}: must be above 0.")
        self.integer |= self.row.whole

    @property
    def row(self):
        """Return the distribution's row of DISTRIBUTIONS."""
        return DISTRIBUTIONS[self.distribution]

    @property
    def levels(self):
        """Return the number of values; 0 if they are continuous."""
        if self.values:
            return len(self.values)
        low, high = self._ends()
        return round(high - low) + 1 if self.row.whole else 0

    @property
    def categorical(self):
        """Return whether the values have no order, as some are not numbers."""
        return any(isinstance(value, bool) or not isinstance(value, int | float)
                   for value in self.values)

    @property
    def unit_mean(self):
        """Return the mean's coordinate; 0.5 without one."""
        has_mean = self.mean is not None or None in self.values
        return self.to_unit(self.mean) if has_mean else 0.5

    def _ends(self):
        return self.row.transform(self.min), self.row.transform(self.max)

    def to_unit(self, value):
        """Return a value's coordinate in 0..1.

        n discrete values divide 0..1 into n equal cells; the coordinate is the middle of the
        value's cell.
        """
        if self.values:
            return (self.values.index(value) + 0.5) / len(self.values)
        (low, high), position = self._ends(), self.row.transform(value)
        if self.levels:
            return (round(position - low) + 0.5) / self.levels
        return min(1.0, max(0.0, (position - low) / (high - low)))

    def from_unit(self, unit):
        """Return the value at a coordinate in 0..1."""
        if self.levels:
            level = min(int(unit * self.levels), self.levels - 1)
            if self.values:
                return self.values[level]
            return self.row.inverse(round(self._ends()[0]) + level)
        low, high = self._ends()
        value = self.row.inverse(low + unit * (high - low))
        # six digits, so that 0.015 is not 0.01499999999999998
        value = min(float(self.max), max(float(self.min), float(f"{value:.6g}")))
        return round(value) if self.integer else value


class Space:
    """The searched settings, in order, with their preference as a density.

    The density of `mean` and `scale` is on the unit cube. settings: {"section.key": spec}, also
    nested {"section": {"key": spec}}; a spec is a dict with distribution, min, max and optionally
    mean and scale (texts from an ini file are read as numbers), or a plain list of values: ordered
    if all are numbers, otherwise categories. distribution none removes a setting.
    """

    def __init__(self, settings):
        settings = [self._read(name, spec) for name, spec in flatten(settings).items()]
        self.settings = [setting for setting in settings if setting is not None]
        require(self.settings, "there is nothing to search: there is no [sweep.SECTION.KEY] "
                "section with a distribution.")
        self.names = [setting.name for setting in self.settings]

    @staticmethod
    def _read(name, spec):
        is_text = isinstance(spec, dict) and isinstance(spec.get("values"), str)
        spec = {key: value for key, value in described(name, spec).items() if value is not None}
        if spec["distribution"] == "none":
            return None
        spec["values"] = tuple(map(number, spec["values"]) if is_text else spec.get("values", ()))
        numbers = {"min", "max", "scale"} if spec["values"] else {"min", "max", "scale", "mean"}
        for key, value in spec.items():
            require(key in (*FIELDS, "integer"), f"[sweep.{name}] {key}: there is no such field. "
                    f"There are: {', '.join(FIELDS)}.")
            require(key not in numbers or isinstance(value, int | float | np.number),
                    f"[sweep.{name}] {key} = {value!r}: must be a number.")
        return Setting(name, **spec)

    def __len__(self):
        return len(self.settings)

    def encode(self, config):
        """Return the (d,) coordinates of {"section.key": value}."""
        return np.array([setting.to_unit(config[setting.name]) for setting in self.settings])

    def decode(self, unit):
        """Return {"section.key": value} of (d,) coordinates."""
        return {setting.name: setting.from_unit(float(u))
                for setting, u in zip(self.settings, unit, strict=True)}

    def snap(self, units):
        """Move coordinates (n, d) of discrete settings to the middle of their cells."""
        units = units.copy()
        for k, setting in enumerate(self.settings):
            if setting.levels:
                level = np.minimum(np.floor(units[:, k] * setting.levels), setting.levels - 1)
                units[:, k] = (level + 0.5) / setting.levels
        return units

    def features(self, units):
        """Return (n, f) inputs of the Gaussian processes for (n, d) coordinates.

        Each category becomes a column, so that any two are at distance 1; other settings keep their
        coordinate.
        """
        columns = []
        for k, setting in enumerate(self.settings):
            if setting.categorical:
                level = np.minimum((units[:, k] * setting.levels).astype(int), setting.levels - 1)
                columns.append(np.eye(setting.levels)[level] / math.sqrt(2))
            else:
                columns.append(units[:, k : k + 1])
        return np.concatenate(columns, axis=1)

    def center(self):
        """Return the settings' means (d,), 0.5 without one; None if no setting has one."""
        has_mean = [setting.mean is not None or None in setting.values for setting in self.settings]
        if not any(has_mean):
            return None
        return np.array([setting.unit_mean for setting in self.settings])

    def warp(self, units):
        """Map evenly distributed coordinates (n, d) to the density of the preference.

        By the inverse of its distribution function (a normal cut off at the bounds).
        """
        units = units.copy()
        for k, setting in enumerate(self.settings):
            if setting.scale is not None:
                mean = setting.unit_mean
                low, high = special.ndtr((np.array([0.0, 1.0]) - mean) / setting.scale)
                units[:, k] = np.clip(mean + setting.scale
                                      * special.ndtri(low + units[:, k] * (high - low)), 0, 1)
        return units

    def log_preference(self, units):
        """Return the logarithm (n,) of the preference's density; its maximum is 0."""
        total = np.zeros(len(units))
        for k, setting in enumerate(self.settings):
            if setting.scale is not None:
                total -= 0.5 * ((units[:, k] - setting.unit_mean) / setting.scale) ** 2
        return total


def flatten(settings, prefix=""):
    """Turn {"section": {"key": value}} into {"section.key": value}; flat keys stay."""
    flat = {}
    for key, value in settings.items():
        if (isinstance(value, dict) and value and not set(value) & set(FIELDS)
                and all(isinstance(entry, dict | list | tuple) for entry in value.values())):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def described(name, spec):
    """Return a searched setting, a dict of FIELDS or a list of values, as a dict.

    It always has a distribution ("" if none is given). Texts become numbers, except in `values`:
    the meaning of these depends on the setting, so "a, b" only becomes the list ["a", "b"].
    """
    if isinstance(spec, list | tuple):
        spec = {"values": spec}
    require(isinstance(spec, dict), f"[sweep.{name}] is {spec!r}: must be a list of values, or "
            "have distribution, min and max.")
    spec = {key: value if key in ("values", "distribution") else number(value)
            for key, value in spec.items()}
    if isinstance(spec.get("values"), str):
        spec["values"] = [value.strip() for value in spec["values"].split(",")]
    return {**spec, "distribution": str(spec.get("distribution", "choice" if "values" in spec
                                                 else "")).lower()}


def number(text):
    """Return a text as int, float, bool or None if it is one."""
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


# --------------------------------------------------------------------------------------------------
# Gaussian process regression

# Matrices this small gain nothing from a second thread. While trials use the cores, a second thread
# mostly waits for one: on a busy machine two threads took 100 times as long.
one_thread = ThreadpoolController().wrap(limits=1, user_api="blas")


class GP:
    """An exact Gaussian process in float64.

    A Matérn 3/2 kernel with one length for each feature, plus a linear kernel, plus noise:

        k(x, x') = matern · (1 + √3 r) exp(−√3 r) + linear · (x − ½)·(x' − ½)
                   + group · [same trial] + noise · [same row],  r² = Σ_k ((x_k − x'_k) / length_k)²

    (Rasmussen and Williams 2006, eq. 4.17; 5.8 and 5.9 for the marginal likelihood and its
    gradient). `group` is the variance that all points of one trial's curve share: a lucky seed
    counts once, and not once for each point. Hyper-parameters, as logarithms in `theta` =
    [length..., matern, linear, group, noise], have normal priors and are fitted by L-BFGS; lengths
    are expected to grow with √features (Hvarfner et al. 2024), so that with many settings not every
    point is far from all others. Targets should have mean 0 and variance about 1.
    """

    FIT_ROWS = 400  # rows that hyper-parameters are fitted on; the posterior uses all
    FIT_STEPS = 40  # evaluations of the marginal likelihood in one fit, at most
    BOUNDS = (-3.5, 6.0), (-7.0, 4.0), (-12.0, 4.0), (-14.0, 1.0), (-12.0, 1.0)

    def __init__(self, features):
        self.features = features
        lengths = np.full(features, math.log(0.5) + 0.5 * math.log(features))
        self.prior_mean = np.concatenate([lengths,
                                          [0.0, math.log(0.1), math.log(1e-2), math.log(3e-3)]])
        self.prior_sd = np.concatenate([np.full(features, 1.0), [1.0, 1.5, 1.5, 1.5]])
        self.bounds = [self.BOUNDS[0]] * features + list(self.BOUNDS[1:])
        self.theta = self.prior_mean.copy()

    def kernel(self, theta, X, Z):
        """Return the covariance (n, m) between rows of X (n, f) and Z (m, f).

        Without group and noise; also returns exp(−√3 r) (n, m).
        """
        lengths = np.exp(theta[: self.features])
        matern, linear = np.exp(theta[self.features : self.features + 2])
        A, B = X / lengths, Z / lengths
        squared = (A * A).sum(1)[:, None] + (B * B).sum(1) - 2 * (A @ B.T)
        r = np.sqrt(np.maximum(squared, 0.0, out=squared), out=squared) * math.sqrt(3)
        decay = np.exp(-r)
        return matern * (1 + r) * decay + linear * ((X - 0.5) @ (Z - 0.5).T), decay

    def covariance(self, theta, X, groups):
        """Return the covariance (n, n) of the observations.

        Also returns exp(−√3 r), and 1 for rows that share a trial (None without groups).
        """
        K, decay = self.kernel(theta, X, X)
        same_trial = None if groups is None else (groups[:, None] == groups).astype(float)
        if same_trial is not None:
            K += math.exp(theta[-2]) * same_trial
        K[np.diag_indices_from(K)] += math.exp(theta[-1]) + 1e-9
        return K, decay, same_trial

    def loss(self, theta, X, y, groups=None):
        """Return the negative log posterior of theta, and its gradient.

        The negative log marginal likelihood of y (n,) minus the log prior.
        """
        n, f = X.shape
        K, decay, same_trial = self.covariance(theta, X, groups)
        try:
            L = linalg.cholesky(K, lower=True, check_finite=False)
        except linalg.LinAlgError:  # theta is extreme; a huge loss makes the line search step back
            return 1e25, np.zeros_like(theta)
        alpha = linalg.cho_solve((L, True), y, check_finite=False)
        value = 0.5 * y @ alpha + np.log(np.diag(L)).sum() + 0.5 * n * math.log(2 * math.pi)
        # dpotri gives the lower triangle of K's inverse; the upper one is 0.
        half = linalg.lapack.dpotri(L, lower=1, overwrite_c=1)[0]
        half[np.diag_indices(n)] *= 0.5
        G = 0.5 * (half + half.T - np.outer(alpha, alpha))  # d value / dK
        lengths, (matern, linear, group, noise) = np.exp(theta[:f]), np.exp(theta[f:])
        gradient = np.empty_like(theta)
        # dk/dlog length_k = 3 · matern · exp(−√3 r) · (Δ_k / length_k)²: no division by r, and the
        # sum over all pairs is two matrix products instead of a loop over features.
        W, Z = G * decay, (X - 0.5) / lengths
        gradient[:f] = 6 * matern * (W.sum(1) @ (Z * Z) - (Z * (W @ Z)).sum(0))
        C = X - 0.5
        by_linear = linear * (C * (G @ C)).sum()
        by_group = group * (G * same_trial).sum() if same_trial is not None else 0.0
        by_noise = noise * np.trace(G)
        in_K = (G * K).sum() - by_linear - by_group - by_noise - 1e-9 * np.trace(G)
        gradient[f:] = in_K, by_linear, by_group, by_noise
        z = (theta - self.prior_mean) / self.prior_sd
        return value + 0.5 * (z @ z), gradient + z / self.prior_sd

    def fit(self, X, y, groups=None):
        """Fit theta on FIT_ROWS rows from its present value, then condition on all rows.

        X (n, f), y (n,), groups (n,) the trial of each row, or None. Returns self.
        """
        if len(X) >= 3:
            # A fixed seed draws mostly the same rows as the last fit. So the last theta is nearly
            # right, and the fit soon ends (ftol: a step gains no more than some thousandths).
            rows = np.sort(np.argsort(np.random.default_rng(0).random(len(X)))[: self.FIT_ROWS])
            subset = None if groups is None else groups[rows]
            result = optimize.minimize(self.loss, self.theta, (X[rows], y[rows], subset), jac=True,
                                       method="L-BFGS-B", bounds=self.bounds,
                                       options={"maxfun": self.FIT_STEPS, "ftol": 1e-5})
            if np.isfinite(result.fun) and result.fun < 1e24:
                self.theta = result.x
        return self.condition(X, y, groups)

    def condition(self, X, y, groups=None):
        """Predict from these observations from now on, with the present theta.

        Arguments as of `fit`.
        """
        self.X = X
        K = self.covariance(self.theta, X, groups)[0]
        self.L = linalg.cholesky(K, lower=True, check_finite=False)
        self.alpha = linalg.cho_solve((self.L, True), y, check_finite=False)
        return self

    def predict(self, X):
        """Return mean and standard deviation (m,) of the function at X (m, f).

        Without noise.
        """
        K, _ = self.kernel(self.theta, X, self.X)
        V = linalg.solve_triangular(self.L, K.T, lower=True, check_finite=False)
        C = X - 0.5
        matern, linear = map(math.exp, self.theta[self.features : self.features + 2])
        prior = matern + linear * (C * C).sum(1)
        return K @ self.alpha, np.sqrt(np.maximum(prior - (V * V).sum(0), 1e-12))


# --------------------------------------------------------------------------------------------------
# Tuners: suggest() -> configuration, observe(configuration, score, cost)


@dataclass
class Observation:
    """One finished trial. Scores are to be maximised; costs are seconds."""

    unit: np.ndarray  # (d,) coordinates
    score: float
    cost: float
    failed: bool
    curve: list  # [(progress in 0..1, score, cost)] up to the last point


def front_of(scores, costs):
    """Return indices of the Pareto front, cheapest first.

    No other trial has at least the score for at most the cost.
    """
    order, best, front = np.lexsort((-np.asarray(scores), np.asarray(costs))), -math.inf, []
    for i in order:
        if scores[i] > best:
            best = scores[i]
            front.append(int(i))
    return front


class Random:
    """Draw from the preference (evenly, without means). The base of the other tuners.

    env_name: the environment that `optimize` trains. search_space: see Space; None for the
    [sweep.*] sections of config/. metric: any name in metrics.jsonl. goal: maximize or minimize it.
    max_suggestion_cost: in seconds; dearer trials are not suggested. seed: equal seeds repeat the
    draws. random_trials: the number of random trials at the start. settings: further fields of
    sweep.Sweep, e.g. workers=2, and fixed={"train.total_timesteps": 1_000_000} for settings that
    all trials share, which are then not searched. Unlike the command line, this reads no [sweep]
    section of an .ini, and does not limit a trial to an hour by default.
    """

    STEPS = "train.total_timesteps"  # Protein.inputs changes it for points half way along a curve

    def __init__(self, env_name=None, search_space=None, num_trials=100, metric="environment/score",
                 goal="maximize",
                 seed=0, max_suggestion_cost=math.inf, random_trials=None, **settings):
        require(goal in ("maximize", "minimize"), f"goal = {goal!r}: must be maximize or minimize.")
        self.env_name = env_name
        self.num_trials = num_trials
        self.metric = metric
        self.goal = goal
        self.seed = seed
        self.max_suggestion_cost = max_suggestion_cost or math.inf
        self.sweep_settings = settings
        self.search_space = search_space or {}
        if settings or env_name is not None:
            sweep = sweep_command()
            self.search_space = sweep.searched_settings(env_name, search_space,
                                                        sweep.settings_of(self)[1])
        self.space = Space(self.search_space)
        self.sign = 1.0 if goal == "maximize" else -1.0
        self.observations = []
        self.pending = []  # coordinates of suggestions without an outcome
        self.number = -1
        self.prediction = {}  # what the models expect of the last suggestion
        self.rng = np.random.default_rng(seed)
        automatic = min(16, max(2, num_trials // 3))
        self.random_trials = automatic if random_trials is None else random_trials

    @one_thread
    def suggest(self, number=None):
        """Return the next configuration, {"section.key": value}.

        It counts as pending until it is observed, and is not suggested again. number: the trial's,
        from 0, by default counted here. All draws depend on it and on the seed, so that a sweep
        that is continued, or runs on several machines, repeats no draw.
        """
        self.number = self.number + 1 if number is None else number
        self.rng = np.random.default_rng([self.seed, self.number])
        self.prediction = {}
        config = self.space.decode(self._next())
        self.pending.append(self.space.encode(config))
        return config

    def observe(self, config, score, cost, failed=False, curve=()):
        """Record the outcome of a trial.

        score: the metric at the end; cost: seconds; failed: there is no usable result (crash, not a
        number, out of memory), the score is then ignored; curve: [(progress, score, cost), ...]
        along the way, progress in 0..1.
        """
        unit = self.space.encode(config)
        failed = bool(failed) or not (math.isfinite(score) and math.isfinite(cost))
        self.pending = [other for other in self.pending if not np.allclose(other, unit, atol=1e-9)]
        points = [(p, self.sign * s, max(c, 1e-3)) for p, s, c in curve if math.isfinite(s)
                  and math.isfinite(c)]
        score = self.sign * score if not failed else math.nan
        cost = max(cost, 1e-3) if math.isfinite(cost) else math.nan
        if not failed and not points:
            points = [(1.0, score, cost)]
        self.observations.append(Observation(unit, score, cost, failed, points))

    def front(self):
        """Return the Pareto front, [(configuration, score, cost)], cheapest first."""
        return [(self.space.decode(o.unit), self.sign * o.score, o.cost)
                for o in self._front_observations()]

    @property
    def results(self):
        """Return the observations of trials that did not fail."""
        return [o for o in self.observations if not o.failed]

    def _front_observations(self):
        results = self.results
        order = front_of([o.score for o in results], [o.cost for o in results])
        return [results[i] for i in order]

    def best(self):
        """Return (configuration, score, cost) of the highest score, or None."""
        return self.front()[-1] if self.front() else None

    def optimize(self, objective=None):
        """Run the trials and return the best configuration, {"section.key": value}.

        objective: config -> (score, cost in seconds), called in this process; None trains
        `env_name` in separate processes, as `python protein.py` does. A RuntimeError, ValueError,
        ArithmeticError or MemoryError in an objective is a failed trial, with a warning; any other
        error ends the search. Raises KeyboardInterrupt at Ctrl-C if no trial has ended yet.
        """
        if objective is None:
            sweep = sweep_command()
            require(self.env_name, "optimize() needs an objective, or the tuner an env_name.")
            runner = sweep.Runner(self, *sweep.settings_of(self))
            runner.run()
            if runner.interrupts.requested and self.best() is None:
                raise KeyboardInterrupt("the sweep stopped without a result. Start it to continue.")
        while objective is not None and len(self.observations) < self.num_trials:
            config = self.suggest()
            try:
                score, cost = objective(config)
            except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
                score, cost = math.nan, math.nan
                warnings.warn(f"a trial failed: {type(error).__name__}: {error}", stacklevel=2)
            self.observe(config, score, cost, failed=not math.isfinite(score))
        if self.best() is None:
            raise RuntimeError(f"none of {len(self.observations)} trials has a result.")
        return self.best()[0]

    def _next(self):
        center = self.space.center()
        if self.number == 0 and center is not None:
            return center  # usually the shipped settings, the baseline of all others
        sobol = qmc.Sobol(len(self.space), rng=np.random.default_rng(self.seed))
        if self.number:
            sobol.fast_forward(self.number)
        return self.space.warp(sobol.random(1))[0]

    def _spread(self, count):
        """Return evenly spread Sobol points (count, d), new ones in each suggestion.

        count is a power of two.
        """
        return qmc.Sobol(len(self.space), rng=self.rng).random(count)

    def _breed(self, parents, count, spread):
        """Return children (count, d) of random pairs of parents (n, d).

        Each has coordinates of both, then some move by random steps of very different size,
        at most about `spread`. Steps are reflected at the bounds, because clipping would gather the
        children there.
        """
        d = len(self.space)
        mothers, fathers = (parents[self.rng.integers(0, len(parents), count)] for _ in range(2))
        children = np.where(self.rng.random((count, d)) < 0.2, fathers, mothers)
        is_moved = self.rng.random((count, d)) < self.rng.uniform(1.0 / d, 1.0, (count, 1))
        sizes = spread * 10 ** self.rng.uniform(-1.5, 0.0, (count, 1))
        steps = sizes * self.rng.standard_normal((count, d))
        children = np.abs((children + is_moved * steps) % 2.0)
        children = np.where(children > 1, 2 - children, children)
        for k, setting in enumerate(self.space.settings):
            if setting.levels:  # a small step would not leave the value's cell, so some jump a cell
                jump = self.rng.random(count) < 0.3 / d + (0.2 if setting.levels <= 3 else 0.1)
                hop = np.sign(self.rng.standard_normal(count)) / setting.levels
                new_values = self.rng.random(count) if setting.categorical else children[:, k] + hop
                children[:, k] = np.where(jump, np.clip(new_values, 0, 1), children[:, k])
        return children

    def _untried(self, units):
        """Return those of (n, d) that are neither tried nor pending.

        If there are none: all of them.
        """
        tried = np.array([o.unit for o in self.observations] + self.pending)
        tried = tried.reshape(-1, len(self.space))
        tried_keys = {row.tobytes() for row in np.round(tried, 6)}
        is_fresh = np.array([row.tobytes() not in tried_keys for row in np.round(units, 6)])
        return units[is_fresh] if is_fresh.any() else units


class ParetoGenetic(Random):
    """Breed children of the Pareto front, after a random start, without a model."""

    def _next(self):
        is_past_start = max(self.number, len(self.observations)) >= self.random_trials
        if not self.results or not is_past_start or self.number % 10 == 9:
            return super()._next()
        return self._breed(np.array([o.unit for o in self._front_observations()]), 1, 0.3)[0]


class Protein(Random):
    """Cost-aware Bayesian optimisation of the Pareto front.

    Candidates are bred around the front and drawn from Sobol points. They are ranked by how much
    they are expected to improve the front at a target cost t. Each suggestion draws a new t, evenly
    in log cost. A candidate that costs at most t improves the front there by max(0, score −
    front(t)); score and log cost are Gaussian, so the expected gain is P(cost ≤ t) · EI(score;
    front(t)). Its mean over all t would be the expected gain in hypervolume. One t at a time does
    as well (bench/bench_protein.py) and suggests fewer points at the bounds, because cheap and dear
    trials alternate.

    The score's standard deviation is multiplied by 1 to OPTIMISM, drawn for each suggestion.
    Without this, expected improvement relies too much on a model of few trials, and may never leave
    a lesser optimum (Bull 2011). The gain is multiplied by the squared probability of success, and
    by the preference to a power that fades as trials come in (πBO, Hvarfner et al. 2022).
    """

    CANDIDATES, ROUNDS, IDLE, OPTIMISM = 1024, 3, 0.7, 3.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.models = {}  # "score", "cost", and "success" once a trial failed

    def _next(self):
        if max(self.number, len(self.observations)) < self.random_trials or len(self.results) < 2:
            return super()._next()
        self.fit()
        self.optimism = math.exp(self.rng.uniform(0.0, math.log(self.OPTIMISM)))
        best = self._maximise(*self._target())
        score, score_sd, cost, cost_sd, success = (float(value[0])
                                                   for value in self.predict(best[None]))
        self.prediction = {"score": self.sign * score, "score_sd": score_sd, "cost": math.exp(cost),
                           "log_cost_sd": cost_sd, "success": success}
        return best

    # -- models ------------------------------------------------------------------------------------

    def inputs(self, units, progress):
        """Return inputs (n, f + 1) of the models: the features and `progress` (n,).

        progress: the fraction of the run that is done. A point half way along a run is not the end
        of a run of half the length, because its learning rate is still high. So a searched number
        of steps is replaced by the steps done so far, and the progress tells the two points apart.
        """
        units, progress = np.array(units, dtype=float), np.asarray(progress, dtype=float)
        for k, setting in enumerate(self.space.settings):
            if (setting.name == self.STEPS and setting.row.axis == "log" and not setting.levels
                    and (progress < 1).any()):
                units[:, k] += np.log(np.maximum(progress,
                                                 1e-6)) / math.log(setting.max / setting.min)
        return np.concatenate([self.space.features(units), progress[:, None]], axis=1)

    @one_thread
    def fit(self):
        """Fit the models to all observations; return self.

        They model scores and log costs, standardised by the (mean, deviation) in score_scale and
        cost_scale.
        """
        results = [(i, o) for i, o in enumerate(self.observations) if not o.failed]
        rows = [(i, o.unit, *point) for i, o in results for point in o.curve]
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
        # Pending trials count as observed at their expected score, so that nothing is tried twice.
        if self.pending:
            pending = self.inputs(np.array(self.pending), np.ones(len(self.pending)))
            expected, _ = self.models["score"].predict(pending)
            if shared is not None:
                shared = np.concatenate([groups, len(self.observations) + np.arange(len(pending))])
            y = np.concatenate([data["score"][0], expected])
            self.models["score"].condition(np.concatenate([X, pending]), y, shared)
        return self

    @one_thread
    def predict(self, units):
        """Predict at coordinates (n, d): (score, sd, log cost, sd, success).

        Means and standard deviations, and the probability of success, each (n,).
        """
        X = self.inputs(units, np.ones(len(units)))
        score, score_sd = self.models["score"].predict(X)
        cost, cost_sd = self.models["cost"].predict(X)
        success = np.ones(len(X))
        # Least-squares classification: a trial succeeds if its latent value is above the middle of
        # the two labels, +1 and -1 (the model predicts labels minus their mean).
        if "success" in self.models:
            latent, sd = self.models["success"].predict(X)
            success = special.ndtr((latent + 2 * self.success_rate - 1) / np.sqrt(sd**2 + 0.05))
        return (self.score_scale[0] + self.score_scale[1] * score, self.score_scale[1] * score_sd,
                self.cost_scale[0] + self.cost_scale[1] * cost,
                self.cost_scale[1] * cost_sd, success)

    # -- the next settings -------------------------------------------------------------------------

    def _target(self):
        """Return (log cost t at which to improve the front, the front's score there).

        The front has predicted scores, so that a lucky trial is not a record.
        """
        units = np.array([o.unit for o in self.results])
        log_costs = np.log([o.cost for o in self.results])
        score = self.predict(units)[0]
        self._parents = units[front_of(score, log_costs)]
        spread_costs = self.predict(self.space.snap(self.space.warp(self._spread(64))))[2]
        high = min(math.log(self.max_suggestion_cost),
                   max(log_costs.max(), np.quantile(spread_costs, 0.9)))
        low = min(log_costs.min(), np.quantile(spread_costs, 0.1), high)
        target = self.rng.uniform(low, high)
        return target, max(score[log_costs <= target], default=np.quantile(score, 0.1))

    def _gain(self, units, target, reached):
        """Return the logarithm (n,) of the expected improvement of the front.

        It is weighted by preference and probability of success. Candidates that are expected to
        cost more than max_suggestion_cost come last, the cheapest of them first.
        """
        score, score_sd, cost, cost_sd, success = self.predict(units)
        score_sd = self.optimism * score_sd
        z = (score - reached) / score_sd
        improvement = score_sd * (z * special.ndtr(z) + np.exp(-0.5 * z * z)
                                  / math.sqrt(2 * math.pi))
        affordable = special.ndtr((target - cost) / cost_sd)
        # Success is squared: if all trials of a region fail, its score is a guess, mostly too high.
        gain = np.log(np.maximum(improvement / self.score_scale[1] * affordable * success**2,
                                 1e-300))
        power = self.num_trials / 10 / max(1, len(self.observations))
        gain += power * self.space.log_preference(units)
        excess = cost - math.log(self.max_suggestion_cost)
        return np.where(excess > 0, -1e4 - excess, gain)

    def _maximise(self, target, reached):
        """Return the best candidate (d,) of some rounds of breeding.

        Each round breeds from the best candidates so far, with shorter steps.
        """
        count = self.CANDIDATES
        units = np.concatenate([self._breed(self._parents, count // 2, 0.4),
                                self.space.warp(self._spread(count // 4)),
                                self._spread(count // 4)])
        best_units, best_gain = np.empty((0, len(self.space))), np.empty(0)
        for round_ in range(self.ROUNDS):
            units = self._untried(self.space.snap(units))
            best_units = np.concatenate([best_units, units])
            best_gain = np.concatenate([best_gain, self._gain(units, target, reached)])
            best_rows = np.argsort(-best_gain)[:24]
            best_units, best_gain = best_units[best_rows], best_gain[best_rows]
            units = self._breed(best_units, count // 3, 0.15 / 2**round_)
        return self._replace_idle_bounds(best_units[0])

    def _replace_idle_bounds(self, unit):
        """Return `unit` (d,) with other values for settings at a bound that do not matter.

        Such settings drift to a bound, because the models know least there. One within 3% of a
        bound gets a random value, if neither the predicted score nor the predicted cost gets worse
        by IDLE of their standard deviations.
        """
        for k in self.rng.permutation(len(unit)):
            if min(unit[k], 1 - unit[k]) < 0.03 and not self.space.settings[k].levels:
                candidates = np.array([unit, unit])
                candidates[1, k] = self.rng.uniform(0.03, 0.97)
                score, score_sd, cost, cost_sd, success = self.predict(candidates)
                worse = max((score[0] - score[1]) / score_sd[1], (cost[1] - cost[0]) / cost_sd[1])
                if worse < self.IDLE and success[1] > 0.9 * success[0]:
                    unit = candidates[1]
        return unit


def sweep_command():
    """Return tools.sweep.command, which runs trials.

    By name, because it imports this file, and a tuner alone does not need it.
    """
    return importlib.import_module("tools.sweep.command")


if __name__ == "__main__":
    processes.run_command(sweep_command().main)
