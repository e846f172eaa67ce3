"""protein.py and report.py: the models against closed forms and gpytorch, the tuners on problems with a known front,
the ledger under several owners and kills, sweeps with a stand-in trainer (and real ones, slow)."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import bench_protein
import numpy as np
import psutil
import pytest

import ocean
import protein
from protein import GP, Curve, Grid, Ledger, ParetoGenetic, Protein, Random, Space, SpaceError

FAKE = Path(__file__).with_name("fake_trainer.py")
UNIT = {"distribution": "uniform", "min": 0, "max": 1}
FAKE_SPACE = {"train.learning_rate": {"distribution": "log_normal", "min": 3e-4, "max": 0.09},
              "train.total_timesteps": {"distribution": "log_normal", "min": 1000, "max": 20000}}


# -- the search space -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [
    {"distribution": "uniform", "min": -2, "max": 3}, {"distribution": "int_uniform", "min": 1, "max": 6},
    {"distribution": "uniform_pow2", "min": 16, "max": 512}, {"distribution": "log_normal", "min": "1e-5", "max": ".1"},
    {"distribution": "logit_normal", "min": 0.8, "max": 0.9999},
    {"distribution": "log_normal", "min": 1, "max": 9e9, "integer": True},
    [8, 16, 40], ["adam", "muon"], [True, False], {"values": "1, 2.5, 7"},
])  # fmt: skip
def test_values_and_coordinates_round_trip(what):
    space = Space({"train.key": what})
    setting = space.settings[0]
    for unit in np.linspace(0, 1, 37):
        value = setting.from_unit(unit)
        assert setting.from_unit(setting.to_unit(value)) == pytest.approx(value)
        if setting.values:
            assert value in setting.values
        else:
            assert setting.min <= value <= setting.max
            assert isinstance(value, int) == setting.integer
    if setting.levels:
        seen = [setting.from_unit((i + 0.5) / 1000) for i in range(1000)]
        counts = [seen.count(value) for value in set(seen)]
        assert len(counts) == setting.levels and max(counts) - min(counts) <= 2, "all levels must be equally wide"


def test_scales():
    space = Space({"train.a": {"distribution": "log_normal", "min": 1e-4, "max": 1},
                   "train": {"b": {"distribution": "logit_normal", "min": 0.01, "max": 0.99},
                             "c": {"distribution": "uniform_pow2", "min": 2, "max": 32}}})
    assert space.names == ["train.a", "train.b", "train.c"]
    config = space.decode(np.array([0.5, 0.5, 0.5]))
    assert config == pytest.approx({"train.a": 1e-2, "train.b": 0.5, "train.c": 8})


@pytest.mark.parametrize("what, message", [
    ({"distribution": "uniform", "min": 2, "max": 1}, "min = 2 must be below max = 1"),
    ({"distribution": "log_normal", "min": 0, "max": 1}, "log_normal needs values above 0"),
    ({"distribution": "logit_normal", "min": 0.5, "max": 1}, "between 0 and 1"),
    ({"distribution": "uniform_pow2", "min": 3, "max": 8}, "not a power of two"),
    ({"distribution": "int_uniform", "min": 0.5, "max": 8}, "not a whole number"),
    ({"distribution": "gauss", "min": 0, "max": 1}, "must be one of uniform"),
    ({"distribution": "uniform", "min": 0, "max": 1, "mean": 2}, "mean = 2: must lie within"),
    ({"distribution": "uniform", "min": 0, "max": 1, "scale": 0}, "must be above 0"),
    ({"distribution": "uniform", "min": 0}, "max is missing"),
    ({"distribution": "uniform", "min": "low", "max": 1}, "must be a number"),
    ({"distribution": "uniform", "min": 0, "max": 1, "maen": 1}, "Did you mean mean"),
    ([3], "two or more"),
    ([3, 3], "all different"),
])  # fmt: skip
def test_nonsense_is_refused_by_name(what, message):
    with pytest.raises(SpaceError, match=r"sweep\.train\.lr") as error:
        Space({"train.lr": what})
    assert message in str(error.value)


def test_settings_that_do_not_exist_are_refused():
    ok = {"distribution": "uniform", "min": 0, "max": 1}
    with pytest.raises(SpaceError, match="no section 'trian'"):
        protein.searched_settings("squared", {"trian.gamma": ok})
    with pytest.raises(ValueError, match="Did you mean gamma"):
        protein.searched_settings("squared", {"train.gama": ok})
    with pytest.raises(SpaceError, match="nothing to search"):
        Space({"train.gamma": {"distribution": "none"}})


def test_present_values_are_the_means_and_whole_numbers_stay_whole():
    space = protein.searched_settings("squared", {
        "train.total_timesteps": {"distribution": "log_normal", "min": 1e5, "max": 1e8},
        "env.distance": {"distribution": "int_uniform", "min": 2, "max": 9}, "train.gamma": {**UNIT, "mean": 0.3},
        "train.vf_coef": {"distribution": "uniform", "min": 5, "max": 9}})  # fmt: skip
    present = protein.import_configuration().load_config("squared")["train"]["total_timesteps"]
    assert space["train.total_timesteps"]["mean"] == present and space["train.total_timesteps"]["integer"]
    assert space["env.distance"]["mean"] == 5 and space["train.gamma"]["mean"] == 0.3
    assert "mean" not in space["train.vf_coef"], "the present value lies outside: no preference"
    assert isinstance(Random(search_space=space).suggest()["train.total_timesteps"], int)


SWEPT = [path.stem for path in sorted((Path(protein.__file__).parent / "config").glob("*.ini"))
         if path.stem in ocean.names() and "[sweep." in path.read_text()]


@pytest.mark.parametrize("name", SWEPT)
def test_the_sweep_of_each_environment_begins_at_its_own_settings(name):
    """So that what is known to learn is the first trial: every present value lies in its range, and is its mean."""
    space, args = protein.searched_settings(name, None), protein.import_configuration().load_config(name)
    settings = dict(args["env"])
    num_envs = settings.pop("num_envs") * args["vec"]["num_envs"]
    with contextlib.closing(ocean.load(name).create(1, settings=settings)) as one:
        agents = num_envs * one.num_agents
    default = {"vec.total_agents": agents, "train.minibatch_size": min(8192, agents * args["train"]["horizon"])}
    means = {key: what.get("mean") for key, what in space.items()}
    present = {key: args[key.split(".")[0]][key.split(".")[1]] for key in space}
    present = {key: default.get(key) if value is None else value for key, value in present.items()}
    assert means == present


def test_preference_has_the_mean_and_the_scale():
    space = Space({"a.x": {**UNIT, "mean": 0.3, "scale": 0.1}, "a.y": UNIT})
    even = np.random.default_rng(0).random((4000, 2))
    warped = space.warp(even)
    assert abs(warped[:, 0].mean() - 0.3) < 0.01 and abs(warped[:, 0].std() - 0.1) < 0.01
    assert np.array_equal(warped[:, 1], even[:, 1])
    assert space.log_preference(np.array([[0.3, 0.9], [0.4, 0.9]])) == pytest.approx([0, -0.5])


# -- the Gaussian process ---------------------------------------------------------------------------------------------


def regression_data(n=30, features=4, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((n, features))
    return X, np.sin(4 * X).sum(1) - 1 + 0.1 * rng.standard_normal(n), rng


@pytest.mark.parametrize("features, grouped", [(1, False), (4, False), (4, True)])
def test_gradient_of_the_marginal_likelihood(features, grouped):
    X, y, rng = regression_data(features=features)
    groups = np.arange(30) // 3 if grouped else None
    gp = GP(features)
    theta = gp.prior_mean + 0.3 * rng.standard_normal(len(gp.prior_mean))
    gradient = gp.loss(theta, X, y, groups)[1]
    for k, step in enumerate(1e-5 * np.eye(len(theta))):
        numeric = (gp.loss(theta + step, X, y, groups)[0] - gp.loss(theta - step, X, y, groups)[0]) / 2e-5
        assert gradient[k] == pytest.approx(numeric, abs=1e-6, rel=1e-6)


def test_loss_and_posterior_in_closed_form():
    """Written out naively, entry by entry, with the group term."""
    X, y, rng = regression_data(n=7, features=2)
    groups = np.array([0, 0, 1, 2, 2, 2, 3])
    gp = GP(2)
    gp.theta = theta = gp.prior_mean + 0.2 * rng.standard_normal(6)
    lengths, matern, linear, group, noise = np.exp(theta[:2]), *np.exp(theta[2:])

    def k(a, b):
        r = math.sqrt(sum(((a - b) / lengths) ** 2))
        return matern * (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r) + linear * (a - 0.5) @ (b - 0.5)

    K = np.array([[k(a, b) + group * (i == j) for b, j in zip(X, groups, strict=True)]
                  for a, i in zip(X, groups, strict=True)]) + (noise + 1e-9) * np.eye(7)
    loss = 0.5 * y @ np.linalg.solve(K, y) + 0.5 * np.linalg.slogdet(K)[1] + 3.5 * math.log(2 * math.pi)
    loss += 0.5 * (((theta - gp.prior_mean) / gp.prior_sd) ** 2).sum()
    assert gp.loss(theta, X, y, groups)[0] == pytest.approx(loss, rel=1e-10)
    x = rng.random(2)
    cross = np.array([k(x, row) for row in X])
    mean, sd = gp.condition(X, y, groups).predict(x[None])
    assert mean[0] == pytest.approx(cross @ np.linalg.solve(K, y), rel=1e-8)
    assert sd[0] ** 2 == pytest.approx(k(x, x) - cross @ np.linalg.solve(K, cross), rel=1e-8)


def test_against_gpytorch():
    gpytorch = pytest.importorskip("gpytorch", reason="the reference; pip install gpytorch")
    import torch

    X, y, rng = regression_data(n=25, features=3)
    gp = GP(3)
    gp.theta = gp.prior_mean + 0.3 * rng.standard_normal(7)
    lengths, (matern, linear, _, noise) = np.exp(gp.theta[:3]), np.exp(gp.theta[3:])
    double = {"dtype": torch.float64}

    class Model(gpytorch.models.ExactGP):
        def __init__(self, X, y, likelihood):
            super().__init__(X, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.smooth = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=3))
            self.linear = gpytorch.kernels.LinearKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.smooth(x) + self.linear(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    model = Model(torch.tensor(X - 0.5), torch.tensor(y), likelihood).double()
    likelihood.double()
    model.smooth.base_kernel.lengthscale = torch.tensor(lengths)
    model.smooth.outputscale, model.linear.variance = torch.tensor(matern, **double), torch.tensor(linear, **double)
    likelihood.noise = torch.tensor(noise + 1e-9, **double)
    z = (gp.theta - gp.prior_mean) / gp.prior_sd
    with gpytorch.settings.fast_computations(False, False, False):
        model.train()
        marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        theirs = -marginal(model(torch.tensor(X - 0.5)), torch.tensor(y)) * len(X)
        theirs.backward()
        value, gradient = gp.loss(gp.theta, X, y)
        assert value - 0.5 * z @ z == pytest.approx(theirs.item(), rel=1e-8)
        ours = (gradient - z / gp.prior_sd)[:3]  # by log length; theirs is by the raw, softplus-transformed one
        raw = model.smooth.base_kernel.raw_lengthscale
        chain = lengths / torch.sigmoid(raw.detach()).numpy().ravel()
        np.testing.assert_allclose(ours, raw.grad.numpy().ravel() * chain, rtol=1e-6)
        model.eval()
        at = rng.random((6, 3))
        posterior = model(torch.tensor(at - 0.5))
        mean, sd = gp.condition(X, y).predict(at)
        np.testing.assert_allclose(mean, posterior.mean.detach().numpy(), rtol=1e-6)
        np.testing.assert_allclose(sd**2, posterior.variance.detach().numpy(), rtol=1e-5)


def test_fit_finds_the_settings_that_matter_and_predicts():
    rng = np.random.default_rng(1)
    X = rng.random((120, 5))
    f = lambda X: np.sin(6 * X[:, 0]) + 2 * X[:, 1]  # noqa: E731
    gp = GP(5).fit(X, f(X) - 1 + 0.05 * rng.standard_normal(120))
    lengths = np.exp(gp.theta[:5])
    assert lengths[0] < 0.3 * lengths[2:].min()
    assert math.exp(gp.theta[-1] / 2) == pytest.approx(0.05, rel=0.5)
    at = rng.random((300, 5))
    mean, sd = gp.predict(at)
    error = mean + 1 - f(at)
    assert np.sqrt((error**2).mean()) < 0.1
    assert (np.abs(error) < 2 * sd).mean() > 0.8


# -- tuners -----------------------------------------------------------------------------------------------------------


def play(tuner, objective, trials):
    """Run `trials` of objective(config, rng) -> (score, cost); returns the coordinates (trials, d)."""
    rng = np.random.default_rng(tuner.seed)
    for _ in range(trials):
        config = tuner.suggest()
        score, cost = objective(config, rng)
        tuner.observe(config, score, cost, failed=not math.isfinite(score))
    return np.array([o.unit for o in tuner.observations])


def test_front_of():
    assert protein.front_of([1, 3, 2, 3, 0], [1, 4, 2, 5, 0.5]) == [4, 0, 2, 1]
    assert protein.front_of([1, 2, 2], [1, 1, 1]) in ([1], [2])


@pytest.mark.parametrize("name", ["branin", "hartmann6", "valleys", "training", "faulty"])
def test_finds_the_front_better_than_random(name):
    problem, gains = bench_protein.PROBLEMS[name], []
    for seed in range(4):
        volumes = [bench_protein.hypervolume(problem, bench_protein.run_protein(name, problem, 40, seed, method))
                   for method in ("Protein", "Random")]
        gains.append(volumes[0] - volumes[1])
    assert np.mean(gains) > (0.01 if name == "branin" else 0.04), f"hypervolume over random, by seed: {gains}"


def test_does_not_hug_the_bounds():
    """Six settings with an optimum inside and two idle ones: by chance 4% of coordinates lie within 2% of a bound."""
    space = {f"env.x{i}": UNIT for i in range(8)}

    def objective(config, rng):
        x = np.array(list(config.values()))
        return -((x[:6] - 0.35) ** 2).sum() + 0.02 * rng.standard_normal(), math.exp(2 * x[0])

    tuner = Protein(search_space=space, num_trials=60, seed=3)
    late = play(tuner, objective, 60)[20:]
    assert ((late < 0.02) | (late > 0.98)).mean() < 0.08
    assert np.abs(late[:, 1:6].mean(0) - 0.35).mean() < 0.1


def test_respects_the_mean():
    space = {f"env.x{i}": {**UNIT, "mean": 0.2, "scale": 0.1} for i in range(4)}
    for method in (Random, ParetoGenetic, Protein):
        tuner = method(search_space=space, num_trials=100, seed=0)
        units = play(tuner, lambda config, rng: (rng.standard_normal(), 1 + rng.random()), 25)
        np.testing.assert_allclose(units[0], 0.2, err_msg="the first trial is the mean itself")
        assert abs(units.mean() - 0.2) < 0.08, method
    away = Protein(search_space=space, num_trials=60, seed=0)  # and yet it leaves when the scores say so
    units = play(away, lambda config, rng: (-sum((x - 0.8) ** 2 for x in config.values()), 1.0), 60)
    assert np.abs(units[-15:] - 0.8).mean() < 0.15


def test_parallel_suggestions_differ_and_observing_frees_them():
    tuner = Protein(search_space={"env.x": UNIT, "env.n": {"distribution": "log_normal", "min": 10, "max": 1e6,
                                                           "integer": True}}, num_trials=100, seed=0)  # fmt: skip
    play(tuner, lambda config, rng: (-((config["env.x"] - 0.5) ** 2), config["env.n"]), 20)
    configs = [tuner.suggest() for _ in range(8)]
    units = np.array([tuner.space.encode(config) for config in configs])
    distances = np.linalg.norm(units[:, None] - units, axis=-1) + np.eye(8)
    assert distances.min() > 1e-3 and len(tuner.pending) == 8
    for config in configs:
        tuner.observe(config, 0.0, 1.0)
    assert not tuner.pending


def test_failures_are_avoided():
    def objective(config, rng):
        x, y = config["env.x"], config["env.y"]
        return (math.nan if x > 0.6 else x + 0.3 * y), 1 + y

    tuner = Protein(search_space={"env.x": UNIT, "env.y": UNIT, "env.z": UNIT}, num_trials=60, seed=0)
    units = play(tuner, objective, 60)
    assert (units[-20:, 0] > 0.65).mean() <= 0.25, "near 0.6 it may err: the best settings lie at the edge"
    assert tuner.best()[1] > 0.8
    assert sum(o.failed for o in tuner.observations) <= 30


def test_suggestions_stay_below_the_limit_of_cost():
    def objective(config, rng):
        return config["env.x"], 10 ** (3 * config["env.x"])

    tuner = Protein(search_space={"env.x": UNIT, "env.y": UNIT}, num_trials=40, max_suggestion_cost=30, seed=0)
    units = play(tuner, objective, 40)
    costs = 10 ** (3 * units[tuner.random_trials :, 0])
    assert (costs > 33).mean() < 0.1 and tuner.front()[-1][1] > 0.4


def test_small_spaces_are_exhausted_without_repeats():
    space = {"env.a": [1, 2, 3], "env.b": ["x", "y"], "env.c": [True, False]}
    for method in (Protein, Grid):
        tuner = method(search_space=space, num_trials=50, seed=0)
        configs = []
        for _ in range(12):
            configs.append(tuner.suggest())
            tuner.observe(configs[-1], configs[-1]["env.a"] * (configs[-1]["env.b"] == "x"), 1.0)
        if method is Grid:
            assert tuner.suggest() is None
            assert len({json.dumps(config) for config in configs}) == 12
        else:
            late = configs[tuner.random_trials :]
            assert len({json.dumps(config) for config in late}) == len(late)


def test_grid_covers_the_range():
    tuner = Grid(search_space={"env.x": {"distribution": "log_normal", "min": 1, "max": 100}, "env.k": ["a", "b"]},
                 num_trials=6)  # fmt: skip
    values = []
    while (config := tuner.suggest()) is not None:
        values.append((round(config["env.x"], 6), config["env.k"]))
    assert sorted(values) == [(x, k) for x in (1, 10, 100) for k in "ab"]


def test_minimise_and_optimize_in_python():
    best = Protein(search_space={"train": {"x": UNIT, "kind": ["good", "bad"]}}, num_trials=30, goal="minimize",
                   seed=1).optimize(lambda c: ((c["train.x"] - 0.7) ** 2 + (c["train.kind"] == "bad"), 1.0))
    assert best["train.kind"] == "good" and abs(best["train.x"] - 0.7) < 0.05
    with pytest.raises(RuntimeError, match="none of 3 trials"):
        Random(search_space={"env.x": UNIT}, num_trials=3).optimize(lambda config: 1 / 0)
    with pytest.raises(SpaceError, match="maximize or minimize"):
        Random(search_space={"env.x": UNIT}, goal="best")


def test_a_sweep_that_goes_on_suggests_as_if_it_had_not_stopped_repeating_nothing():
    """A tuner that is made anew and told the same draws new points in the random start, and the same as the old one."""
    problem = bench_protein.PROBLEMS["branin"]
    whole = Protein(search_space=problem.space, num_trials=40, seed=5)
    play(whole, problem.evaluate, 4)
    again = Protein(search_space=problem.space, num_trials=40, seed=5)
    for o in whole.observations:
        again.observe(again.space.decode(o.unit), o.score, o.cost)
    assert again.suggest(4) == whole.suggest(4)
    assert again.suggest(7) == whole.suggest(7)


def test_curves_teach_without_counting_a_lucky_trial_five_times():
    """With the curve's points, the model learns how cost grows along the schedule; the group term takes what a trial's
    points share."""
    tuner = Protein(search_space={"train.total_timesteps": {"distribution": "log_normal", "min": 1e5, "max": 1e7},
                                  "train.learning_rate": {"distribution": "log_normal", "min": 1e-3, "max": 1}},
                    num_trials=100, seed=0)  # fmt: skip
    rng = np.random.default_rng(0)
    for _ in range(20):
        config = tuner.suggest()
        steps, luck = config["train.total_timesteps"], 0.1 * rng.standard_normal()
        curve = [(p, 1 - math.exp(-p * steps / 1e6) + luck, p * steps / 1e5) for p in (0.2, 0.4, 0.6, 0.8, 1.0)]
        tuner.observe(config, *curve[-1][1:], curve=curve)
    tuner.fit()
    units = tuner.space.encode({"train.total_timesteps": 2e6, "train.learning_rate": 0.03})[None]
    score, score_sd, cost, _, success = tuner.predict(units)
    assert abs(score[0] - (1 - math.exp(-2))) < 0.12 and 0.01 < score_sd[0] < 0.12
    assert cost[0] == pytest.approx(math.log(20), abs=0.2) and success[0] == 1
    theta = tuner.models["score"].theta
    assert theta[-2] > theta[-1] + 2, "the noise belongs to trials, not to points"


def test_suggestions_after_many_observations_come_from_the_models():
    """How long one takes is for tests/bench_protein.py --times to say."""
    rng = np.random.default_rng(0)
    tuner = Protein(search_space={f"env.x{i}": UNIT for i in range(15)}, num_trials=500, seed=0)
    for _ in range(500):
        config = tuner.space.decode(rng.random(15))
        x = np.array(list(config.values()))
        tuner.observe(config, -((x - 0.6) ** 2).sum(), math.exp(3 * x[0]), failed=rng.random() < 0.1)
    tuner.suggest()
    assert tuner.prediction


# -- the ledger -------------------------------------------------------------------------------------------------------


def record(number, score=1.0, cost=1.0, status="done", **settings):
    return {"trial": number, "settings": settings, "status": status, "score": score, "cost": cost, "steps": 10.0,
            "curve": [[1.0, score, cost]], "error": None, "predicted": {}, "run": None, "attempts": 1}


def dead_owner(folder, number, **fields):
    """A claim whose owner does not live any more."""
    other = Ledger(folder)
    other.owner = {**other.owner, "pid": 2**22 - 7}
    claim = other.claim(number, settings={"x": number}, **fields)
    assert claim["trial"] == number
    return other, claim


def test_claims_are_exclusive(tmp_path):
    ledgers, numbers = [Ledger(tmp_path) for _ in range(6)], []

    def work(ledger):
        for _ in range(15):
            numbers.append(ledger.claim()["trial"])

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(numbers) == list(range(90))
    assert Ledger(tmp_path).claim(below=90) is None
    assert not list(tmp_path.rglob("*.part"))


def test_one_result_a_trial(tmp_path):
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    claim = first.claim(settings={"x": 1})
    assert second.take_over() is None, "its owner lives"
    assert first.finish(claim, record(0, score=1.0))
    assert not second.finish(claim, record(0, score=2.0))
    assert second.results()[0]["score"] == 1.0 and not second.claims()
    assert second.claim()["trial"] == 1


def test_trials_of_dead_owners_are_taken_over_by_one(tmp_path):
    for number in range(5):
        dead_owner(tmp_path, number)
    ledgers, taken = [Ledger(tmp_path) for _ in range(6)], []

    def work(ledger):
        while (claim := ledger.take_over()) is not None:
            taken.append(claim)

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(claim["settings"]["x"] for claim in taken) == list(range(5))
    assert sorted(claim["trial"] for claim in taken) == list(range(5)) and {claim["attempts"] for claim in taken} == {1}
    assert not list(tmp_path.glob("trials/*.lost-*"))


def test_a_late_result_of_a_lost_owner_is_refused(tmp_path):
    lost, claim = dead_owner(tmp_path, 0)
    ours = Ledger(tmp_path)
    mine = ours.take_over()
    assert ours.finish(mine, record(0, score=5.0))
    assert not lost.finish(claim, record(0, score=7.0))
    assert Ledger(tmp_path).results()[0]["score"] == 5.0


def test_other_machines_are_judged_by_their_sign_of_life(tmp_path):
    far = Ledger(tmp_path)
    far.owner = {**far.owner, "host": "elsewhere"}
    claim, ours = far.claim(settings={"x": 1}), Ledger(tmp_path)
    assert ours.take_over() is None
    path = tmp_path / "trials" / "00000.running"
    os.utime(path, (time.time() - 50, time.time() - 50))
    far.beat([claim])
    assert ours.take_over() is None
    os.utime(path, (time.time() - 70, time.time() - 70))
    assert ours.take_over()["settings"] == {"x": 1}


def test_death_between_result_and_claim_and_in_a_takeover(tmp_path):
    dead_owner(tmp_path, 0)
    protein.write_json(tmp_path / "trials" / "00000.json", record(0))
    ours = Ledger(tmp_path)
    assert ours.take_over() is None and ours.claims() == {}
    assert not (tmp_path / "trials" / "00000.running").exists()
    dead_owner(tmp_path, 1)
    taken = tmp_path / "trials" / "00001.lost-abc"
    os.rename(tmp_path / "trials" / "00001.running", taken)
    assert ours.take_over() is None, "who takes it over may still be at it"
    os.utime(taken, (time.time() - 70, time.time() - 70))
    assert ours.take_over()["settings"] == {"x": 1}
    dead = Ledger(tmp_path)  # one that died before it knew what to run leaves its number free
    dead.owner = {**dead.owner, "pid": 2**22 - 7}
    assert dead.claim()["trial"] == 2
    assert ours.take_over() is None and ours.claim()["trial"] == 2


def test_given_back_trials_keep_their_settings_and_attempts(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.give_back(ledger.claim(settings={"x": 3}, predicted={"score": 1}))
    claim = Ledger(tmp_path).take_over()
    assert claim["settings"] == {"x": 3} and claim["attempts"] == 0 and claim["predicted"] == {"score": 1}


# -- curves -----------------------------------------------------------------------------------------------------------


def write_metrics(path, entries):
    path.write_text("".join(json.dumps({"step": step, "score": score, "performance/uptime": clock}) + "\n"
                            for step, score, clock in entries) + '{"step": 9')  # fmt: skip


def test_curve_of_a_run_and_of_a_resumed_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [(10, 1.0, 1.0), (20, None, 2.0), (30, 3.0, 3.0), (40, math.nan, 4.0)])
    curve = Curve.read(path, "score")
    assert curve.step.tolist() == [10, 30] and curve.cost.tolist() == [1, 3] and "performance/uptime" in curve.names
    # the checkpoint was at 20, resumed with the clock where it stood: what came after it is replaced
    write_metrics(path, [(10, 1.0, 1.0), (20, 2.0, 2.0), (30, 9.0, 3.0), (30, 3.0, 3.5), (40, 4.0, 4.5)])
    curve = Curve.read(path, "score")
    assert curve.step.tolist() == [10, 20, 30, 40] and curve.score.tolist() == [1, 2, 3, 4]
    assert curve.cost.tolist() == [1, 2, 3.5, 4.5]
    assert len(Curve.read(tmp_path / "nothing", "score").step) == 0


def test_points_along_a_curve(tmp_path):
    steps = np.arange(1, 101)
    curve = Curve(steps * 10.0, steps / 100, steps * 2.0)
    points = curve.points(1000, 5)
    assert [p for p, _, _ in points] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert points[-1] == (1.0, pytest.approx(0.955), 200.0), "the score is the mean over a tenth of the schedule"
    half = Curve(curve.step[:50], curve.score[:50], curve.cost[:50]).points(1000, 5)
    assert [p for p, _, _ in half] == [0.2, 0.4, 0.5]
    assert Curve(*np.empty((3, 0))).points(1000, 5) == []


def test_hopeless():
    rule = {"front": [(1.0, 0.1), (10.0, 1.0)], "floor": 0.0, "share": 0.25, "after": 0.25, "sign": 1.0}
    curve = lambda score, step=500.0, cost=20.0: Curve(*np.array([[step], [score], [cost]]))  # noqa: E731
    assert protein.hopeless(curve(0.2), 1000, rule) and not protein.hopeless(curve(0.3), 1000, rule)
    assert not protein.hopeless(curve(0.2, step=200), 1000, rule), "it has only begun"
    assert not protein.hopeless(curve(0.2, step=950), 1000, rule), "it is nearly through"
    assert not protein.hopeless(curve(0.05, cost=2.0), 1000, rule), "at that cost nobody was better"
    assert not protein.hopeless(curve(-9.0, cost=0.5), 1000, rule) and not protein.hopeless(curve(0.2), 1000, None)


# -- sweeps with a stand-in trainer -----------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(protein, "TRAINER", str(FAKE))


def sweep(folder, trials, space=FAKE_SPACE, **settings):
    options = ["--data-dir", str(folder)]
    settings = protein.Sweep(num_trials=trials, logger="none", **settings)
    tuner = Protein(search_space=protein.searched_settings("squared", space, options), num_trials=trials,
                    metric=settings.metric)  # fmt: skip
    tuner.env_name = "squared"
    return protein.run_sweep("squared", tuner, settings, options, quiet=True), tuner


def test_a_sweep_and_its_continuation(tmp_path, fake):
    ledger, _ = sweep(tmp_path, 8, workers=2, early_stop=0)
    results = ledger.results()
    assert list(results) == list(range(8)) and {r["status"] for r in results.values()} == {"done"}
    for r in results.values():
        steps, rate = r["settings"]["train.total_timesteps"], r["settings"]["train.learning_rate"]
        assert r["cost"] == pytest.approx(steps / 1000) and r["steps"] == steps and len(r["curve"]) == 5
        run = json.loads((ledger.folder / r["run"] / "config.json").read_text())
        assert float(run["options"]["--train.learning-rate"]) == rate
    assert results[7]["predicted"]["score"] < 1.5 and not ledger.claims()
    before = {path: path.read_text() for path in ledger.trials.iterdir()}
    ledger, _ = sweep(tmp_path, 10, workers=2, early_stop=0)
    assert list(ledger.results()) == list(range(10))
    assert all(path.read_text() == text for path, text in before.items()), "finished trials never change"
    assert len({json.dumps(r["settings"]) for r in ledger.results().values()}) == 10
    with pytest.raises(SpaceError, match=r"holds another sweep.*learning_rate"):
        sweep(tmp_path, 10, {**FAKE_SPACE, "train.learning_rate": {"distribution": "uniform", "min": 1e-3, "max": 1}})


def test_failures_are_recorded_with_their_kind(tmp_path, fake):
    ledger, tuner = sweep(tmp_path, 4, {**FAKE_SPACE, "train.learning_rate": [0.0001, 0.01, 0.5]})
    kinds = {r["settings"]["train.learning_rate"]: (r["status"], r["error"]) for r in ledger.results().values()}
    for rate, (status, error) in kinds.items():
        assert status == ("done" if rate == 0.01 else "failed")
        assert rate != 0.5 or error.startswith("not finite: FloatingPointError: epoch 3")
        assert rate != 0.0001 or error.startswith("out of memory")
    assert len(tuner.observations) == 4


def test_a_metric_that_is_never_logged_stops_the_sweep(tmp_path, fake):
    with pytest.raises(RuntimeError, match=r"the first 5 trials all failed[\s\S]*environment/score"):
        sweep(tmp_path, 20, metric="environment/scroe")
    assert not Ledger(tmp_path / "sweep_squared").claims()


def test_hopeless_trials_are_stopped(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "4")
    ledger = Ledger(tmp_path / "x")
    rule = {"front": [(0.1, 0.5)], "floor": -2.0, "share": 1.0, "after": 0.25, "sign": 1.0}
    job = {"trainer": str(FAKE), "folder": str(ledger.folder / "runs" / "0"), "env": {}, "total": 1000, "downsample": 5,
           "metric": "environment/score", "cost": "performance/uptime", "limit": 1e9, "rule": rule,
           "command": ["train", "squared", "--train.total-timesteps", "1000", "--train.learning-rate", "0.0003"]}
    outcome = protein.run_trial(job)
    assert outcome["status"] == "stopped" and 0.25 < outcome["curve"][-1][0] < 0.9
    outcome = protein.run_trial({**job, "folder": job["folder"] + "b", "rule": None, "limit": 0.4})
    assert outcome["status"] == "stopped" and 0.4 < outcome["cost"] < 0.9


def test_optimize_in_python_trains(tmp_path, fake):
    tuner = Protein("squared", FAKE_SPACE, num_trials=4, workers=2, logger="none", early_stop=0,
                    fixed={"data_dir": str(tmp_path), "train": {"gamma": 0.9}})
    best = tuner.optimize()
    results = Ledger(tmp_path / "sweep_squared").results()
    assert len(results) == 4 and best == max(results.values(), key=lambda r: r["score"])["settings"]
    run = next((tmp_path / "sweep_squared" / "runs" / "00000").glob("*/config.json"))
    assert json.loads(run.read_text())["options"]["--train.gamma"] == "0.9"
    with pytest.raises(SpaceError, match="wrokers"):
        Protein("squared", FAKE_SPACE, wrokers=2)


def test_trials_are_spread_over_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    seen, release = [], threading.Event()

    def run_trial(job, stop, started):
        seen.append(job["env"]["CUDA_VISIBLE_DEVICES"])
        release.wait(10)
        return {"status": "done"}

    monkeypatch.setattr(protein, "run_trial", run_trial)
    pool = protein.LocalPool(workers=2, gpus=2)
    assert pool.slots == 4
    for trial in range(4):
        pool.submit({"trial": trial}, {"env": {}}, None)
    wait_for(lambda: len(seen) == 4, 10)
    assert sorted(seen) == ["3", "3", "5", "5"]
    release.set()
    assert len(pool.close()) == 4


def test_a_trial_that_somebody_else_stops_goes_on(tmp_path, fake, monkeypatch):
    """A training run that is told to stop saves and ends well; that is not the end of the trial."""
    monkeypatch.setenv("FAKE_SECONDS", "2")

    def stop_it():
        running = tmp_path / "sweep_squared" / "trials" / "00000.running"
        logs = lambda: list(tmp_path.glob("sweep_squared/runs/00000/*/metrics.jsonl"))  # noqa: E731
        wait_for(lambda: logs() and len(logs()[0].read_text().splitlines()) >= 3)
        os.kill(json.loads(running.read_text())["child"][0], signal.SIGTERM)

    thread = threading.Thread(target=stop_it)
    thread.start()
    results = sweep(tmp_path, 1)[0].results()
    thread.join()
    assert results[0]["status"] == "done" and results[0]["attempts"] == 2 and results[0]["curve"][-1][0] == 1.0
    assert results[0]["cost"] == pytest.approx(results[0]["settings"]["train.total_timesteps"] / 1000)


def start_sweep(folder, trials, workers=2, seconds=1.0):
    """The sweep in a process of its own."""
    code = (f"import sys; sys.path.insert(0, {str(protein.ROOT)!r}); import protein; protein.TRAINER = {str(FAKE)!r}; "
            "protein.main(sys.argv[1:])")  # fmt: skip
    space = [f"--sweep.{name}.{field}={value}" for name, what in FAKE_SPACE.items() for field, value in what.items()]
    others = [f"--sweep.{name}.distribution=none" for name in
              ("train.gamma", "train.gae_lambda", "train.ent_coef", "train.replay_ratio", "train.clip_coef",
               "train.vf_coef", "train.max_grad_norm", "train.horizon", "train.minibatch_size", "vec.total_agents",
               "policy.hidden_size")]
    return subprocess.Popen(
        [sys.executable, "-c", code, "squared", "--data-dir", str(folder), "--sweep.num-trials", str(trials),
         "--sweep.workers", str(workers), "--sweep.logger", "none", "--sweep.early-stop", "0", *space, *others],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "FAKE_SECONDS": str(seconds)})


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_kill_and_interrupt_lose_nothing(tmp_path):
    """kill -9, then Ctrl-C, then to the end: every trial once, running ones resumed where they stood."""
    trials = tmp_path / "sweep_squared" / "trials"

    def steps():
        logs = sorted(tmp_path.glob("sweep_squared/runs/*/*/metrics.jsonl"))
        return [len(path.read_text().splitlines()) for path in logs]

    process = start_sweep(tmp_path, 5)
    wait_for(lambda: len(list(trials.glob("*.json"))) >= 1 and len(steps()) >= 3 and steps()[-1] >= 4)
    process.kill()
    process.communicate()
    finished = {path.name: path.read_text() for path in trials.glob("*.json")}
    claimed = {path.stem: json.loads(path.read_text())["settings"] for path in trials.glob("*.running")}
    assert claimed

    process = start_sweep(tmp_path, 5)
    wait_for(lambda: len(list(trials.glob("*.json"))) > len(finished))
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "the same command goes on" in output, output

    process = start_sweep(tmp_path, 5)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    ledger = Ledger(tmp_path / "sweep_squared")
    results = ledger.results()
    assert list(results) == list(range(5)) and {r["status"] for r in results.values()} == {"done"}
    assert all((trials / name).read_text() == text for name, text in finished.items())
    assert all(results[int(number)]["settings"] == settings for number, settings in claimed.items() if settings)
    for r in results.values():  # resumed, not begun anew: one run folder each, and the full schedule's cost
        assert len(list((ledger.folder / "runs" / f"{r['trial']:05d}").glob("*/config.json"))) == 1
        assert r["cost"] == pytest.approx(r["settings"]["train.total_timesteps"] / 1000, rel=1e-6)
    assert "best settings: python pufferl.py train squared --train." in output
    assert {p.suffix for p in trials.iterdir()} == {".json"}


@pytest.mark.slow
def test_two_sweeps_share_a_folder(tmp_path):
    processes = [start_sweep(tmp_path, 8, workers=1, seconds=0.3) for _ in range(2)]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    results = Ledger(tmp_path / "sweep_squared").results()
    assert list(results) == list(range(8))
    assert len({json.dumps(r["settings"]) for r in results.values()}) == 8


# -- the command line and the report ----------------------------------------------------------------------------------


def test_split_options():
    sweep, space, others = protein.split_options(
        ["--sweep.num-trials", "5", "--sweep.train.learning-rate.max=0.1", "--train.gamma", "0.9", "--sweep.web=0",
         "--help", "--sweep.env.speed.distribution", "none"])
    assert sweep == ["--sweep.num-trials", "5", "--sweep.web=0", "--help"] and others == ["--train.gamma", "0.9"]
    assert space == {"train.learning_rate": {"max": "0.1"}, "env.speed": {"distribution": "none"}}
    with pytest.raises(SpaceError, match=r"SECTION\.KEY\.FIELD"):
        protein.split_options(["--sweep.train.gamma", "0.9"])


def test_command_line_errors(tmp_path, capsys):
    for argv, message in ((["nowhere"], "nowhere"), (["squared", "--sweep.train.gama.max", "1"], "Did you mean gamma"),
                          (["report", str(tmp_path)], "neither a sweep")):
        with pytest.raises(SystemExit) as error:
            protein.main(argv)
        assert message in str(error.value), argv
    protein.main([])
    assert "report PATH" in capsys.readouterr().out


@pytest.fixture
def swept(tmp_path):
    """A folder as a sweep of 12 trials leaves it."""
    ledger, rng = Ledger(tmp_path / "sweep_x"), np.random.default_rng(0)
    space = {**FAKE_SPACE, "train.optimizer": ["muon", "adam"]}
    protein.write_json(ledger.folder / "sweep.json", {"asked": {"env": "squared", "metric": "environment/score",
                       "goal": "maximize", "cost": "performance/uptime"}, "options": [], "space": space})  # fmt: skip
    tuner = Random(search_space=space)
    for number in range(12):
        claim = ledger.claim(settings=tuner.suggest())
        r = record(number, float(rng.random()), float(1 + 9 * rng.random()), **claim["settings"])
        if number == 3:
            r |= {"status": "failed", "score": None, "cost": None, "curve": [], "error": "exit 1: <broken>"}
        if number > 8:
            r["predicted"] = {"score": 0.5, "score_sd": 0.1, "cost": 3.0, "log_cost_sd": 0.2, "success": 1.0}
        ledger.finish(claim, r)
    return ledger


def test_report_of_a_sweep(swept):
    pytest.importorskip("plotly", reason="the page is made with it; pip install plotly")
    import report

    told, records, tuner = report.load_sweep(swept.folder)
    figures = {title: figure for title, _, figure in report.sweep_figures(told, records, tuner)}
    assert set(figures) == {"Score against cost", "Curves", "Importance", "Marginal effects", "Parallel coordinates",
                            "Similar settings"}
    points = figures["Score against cost"].data[0]
    good = [r for r in records if r["status"] != "failed"]
    assert list(points.customdata) == [r["trial"] for r in good]
    assert list(points.x) == [r["cost"] for r in good] and list(points.y) == [r["score"] for r in good]
    assert "trial 5" in points.text[4] and "learning_rate" in points.text[4]
    assert sum(figures["Importance"].data[0].x) == pytest.approx(1)
    text = report.write_report(swept.folder).read_text()
    best = max(good, key=lambda r: r["score"])
    assert f"--train.learning-rate {best['settings']['train.learning_rate']}" in text and "[train]" in text
    assert text.count("<tr>") == 13 and "&lt;broken&gt;" in text
    assert 'src="http' not in text, "it must work without a network"


def test_report_of_runs_and_the_live_page(swept, tmp_path):
    pytest.importorskip("plotly", reason="the page is made with it; pip install plotly")
    from urllib.request import urlopen

    import report

    for i in range(9):
        run = tmp_path / "runs" / f"squared_{i}"
        run.mkdir(parents=True)
        sections = {"env": {}, "vec": {}, "policy": {}, "rnn": {}}
        sections["train"] = {"total_timesteps": 100, "gamma": 0.9 + i / 100}
        (run / "config.json").write_text(json.dumps({"env_name": "squared", "tag": "ab"[i % 2], **sections}))
        entries = [{"step": s, "environment/score": s * i, "performance/uptime": s / 10} for s in range(10, 101, 10)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = report.page(tmp_path / "runs")
    assert text.count("<tr>") == 10 and "squared: curves over environment steps" in text and "train.gamma" in text
    assert report.page(tmp_path / "runs", tag="a").count("<tr>") == 6
    with pytest.raises(SpaceError, match="have the tag c"):
        report.page(tmp_path / "runs", tag="c")
    server = report.serve(swept.folder, 0)
    host, port = server.server_address
    assert host == "127.0.0.1"
    assert "Sweep of squared" in urlopen(f"http://127.0.0.1:{port}/").read().decode()
    server.shutdown()
    server.server_close()


def test_tsne_keeps_clusters_apart():
    import report

    rng = np.random.default_rng(0)
    label = np.arange(60) % 3
    spot = report.tsne(np.eye(5)[label] * 3 + 0.1 * rng.standard_normal((60, 5)))
    distance = np.linalg.norm(spot[:, None] - spot[None], axis=-1) + 1e9 * np.eye(60)
    assert (label[distance.argmin(1)] == label).all()


@pytest.mark.slow
def test_report_in_a_browser(swept, tmp_path):
    """The page in a headless Chromium: what it shows is the ledger."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium; apt-get install chromium")
    pytest.importorskip("plotly", reason="the page is made with it; pip install plotly")
    import report

    page = report.write_report(swept.folder)
    probe = """<pre id="probe"></pre><script>window.addEventListener("load", () => setTimeout(() => {
      const plot = document.querySelector(".js-plotly-plot"), trace = plot.data[0];
      Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 4}]);
      const values = axis => Array.from(plot.calcdata[0], point => plot._fullLayout[axis].d2c ? point[axis[0]] : null);
      setTimeout(() => document.getElementById("probe").textContent = JSON.stringify({
        trials: Array.from(trace.customdata), drawn: plot.querySelectorAll(".points path").length,
        x: values("xaxis"), y: values("yaxis"), hover: plot.querySelector(".hoverlayer").textContent,
        rows: document.querySelectorAll("tbody tr").length}), 500);
    }, 1000));</script></body>"""
    page.write_text(page.read_text().replace("</body>", probe))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
                 "--virtual-time-budget=20000", "--window-size=1250,4600", page.as_uri()]  # fmt: skip
    text = subprocess.run([browser, *arguments], capture_output=True, text=True, timeout=120).stdout
    shown = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', text).group(1))
    good = [r for r in swept.results().values() if r["status"] != "failed"]
    assert shown["trials"] == [r["trial"] for r in good] and shown["drawn"] >= len(good) and shown["rows"] == 12
    np.testing.assert_allclose(shown["x"], [r["cost"] for r in good])
    np.testing.assert_allclose(shown["y"], [r["score"] for r in good])
    assert f"trial {good[4]['trial']} (done)" in shown["hover"]


# -- real clusters and real training (slow) ----------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_on_two_nodes_one_of_which_is_lost(tmp_path, fake, monkeypatch):
    """Trials spread over both nodes; those of a node that goes down are run again; each counts once."""
    pytest.importorskip("ray", reason="the cluster; pip install ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("FAKE_SECONDS", "3")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        second = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        trials = tmp_path / "sweep_squared" / "trials"

        def trains_there():
            with contextlib.suppress(psutil.Error):
                node = psutil.Process(second.all_processes["raylet"][0].process.pid)
                return any(FAKE.name in " ".join(child.cmdline()) for child in node.children(recursive=True))
            return False

        def lose_a_node():
            wait_for(lambda: len(list(trials.glob("*.json"))) >= 2 and trains_there(), 120)
            cluster.remove_node(second, allow_graceful=False)

        thread = threading.Thread(target=lose_a_node)
        thread.start()
        ledger, _ = sweep(tmp_path, 12, ray=cluster.address, early_stop=0, workers=4)
        thread.join()
    finally:
        cluster.shutdown()
    results = ledger.results()
    assert list(results) == list(range(12)) and {r["status"] for r in results.values()} == {"done"}
    assert max(r["attempts"] for r in results.values()) >= 2, "the lost node was running trials"
    assert not ledger.claims() and all(len(r["curve"]) == 5 for r in results.values())


@pytest.mark.slow
def test_a_real_sweep_on_squared(tmp_path):
    """Through the command line, with the real trainer: scores come from training, and the best trial has learnt."""
    command = [sys.executable, str(protein.ROOT / "protein.py"), "squared", "--data-dir", str(tmp_path),
               "--sweep.num-trials", "4", "--train.total-timesteps", "1500000", "--vec.total-agents", "512",
               "--vec.num-threads", "1", "--train.learning-rate", "0.02", "--sweep.train.horizon.max", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.learning_rate is given, so it is not searched" in done.stdout
    results = Ledger(tmp_path / "sweep_squared").results()
    assert len(results) == 4
    assert max(r["score"] for r in results.values() if r["status"] == "done") > -0.5, "it begins at -0.98"
    assert (tmp_path / "sweep_squared" / "report.html").exists()
    assert list((tmp_path / "sweep_squared" / "tensorboard").glob("00000/events*"))
