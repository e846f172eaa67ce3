"""protein.py: the search space, the models against closed forms and gpytorch, the tuners on
problems whose Pareto front is known."""

import contextlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import slow_but

import configuration
import ocean
import protein
from bench import bench_protein
from protein import GP, Grid, ParetoGenetic, Protein, Random, Space, SpaceError
from tools.sweep import command as sweep

UNIT = {"distribution": "uniform", "min": 0, "max": 1}


# -- the search space
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [
    {"distribution": "uniform", "min": -2, "max": 3},
    {"distribution": "int_uniform", "min": 1, "max": 6},
    {"distribution": "uniform_pow2", "min": 16, "max": 512},
    {"distribution": "log_normal", "min": "1e-5", "max": ".1"},
    {"distribution": "logit_normal", "min": 0.8, "max": 0.9999},
    {"distribution": "log_normal", "min": 1, "max": 9e9, "integer": True},
    [8, 16, 40], ["adam", "muon"], [True, False], {"values": "1, 2.5, 7"},
])
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
        assert len(counts) == setting.levels and max(counts) - min(counts) <= 2, (
            "all levels must be equally wide")


def test_scales():
    space = Space({"train.a": {"distribution": "log_normal", "min": 1e-4, "max": 1},
                   "train": {"b": {"distribution": "logit_normal", "min": 0.01, "max": 0.99},
                             "c": {"distribution": "uniform_pow2", "min": 2, "max": 32}}})
    assert space.names == ["train.a", "train.b", "train.c"]
    config = space.decode(np.array([0.5, 0.5, 0.5]))
    assert config == pytest.approx({"train.a": 1e-2, "train.b": 0.5, "train.c": 8})


def test_a_distribution_is_a_row_of_the_table(monkeypatch):
    monkeypatch.setitem(protein.SCALES, "cube", protein.Scale(
        math.cbrt, lambda place: place**3, lambda value: value != 7,
        "{value} is the one that cube cannot have"))
    space = Space({"train.key": {"distribution": "cube", "min": -8, "max": 1}})
    assert [space.decode(np.array([u]))["train.key"] for u in (0, 1 / 3, 2 / 3, 1)] == [-8, -1, 0, 1]
    assert space.encode({"train.key": -1.0}) == pytest.approx(1 / 3)
    with pytest.raises(SpaceError, match="7 is the one that cube cannot have"):
        Space({"train.key": {"distribution": "cube", "min": 7, "max": 9}})
    with pytest.raises(SpaceError, match=r"one of uniform,.*, none, cube"):
        Space({"train.key": {"distribution": "sphere", "min": 0, "max": 9}})


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
    ({"min": 0, "max": 1}, "has no distribution: one of uniform"),
    ({"distribution": "uniform", "min": 0, "max": 1, "mean": "mid"},
     "mean = 'mid': must be a number"),
    (0.9, "must be a list of values"),
    ("muon,adam", "must be a list of values"),
    ([3], "two or more"),
    ([3, 3], "all different"),
])
def test_nonsense_is_refused_by_name(what, message):
    with pytest.raises(SpaceError, match=r"sweep\.train\.lr") as error:
        Space({"train.lr": what})
    assert message in str(error.value)


def test_sizes_that_are_automatic_are_searched_if_they_have_a_range_of_their_own():
    """The shipped ranges are for environments in C: thousands of agents."""
    brought = f"{Path(__file__).parent}/user_envs.py:Catch"
    space = sweep.searched_settings(brought, None)
    assert "train.learning_rate" in space and not set(sweep.SIZES) & space.keys()
    own = sweep.searched_settings(brought, {"train.horizon": {"distribution": "uniform_pow2", "min": 8, "max": 64}})
    assert own["train.horizon"]["max"] == 64
    assert set(sweep.SIZES) <= sweep.searched_settings("breakout", None).keys()


def test_settings_that_do_not_exist_are_refused():
    ok = {"distribution": "uniform", "min": 0, "max": 1}
    with pytest.raises(SpaceError, match="no section 'trian'"):
        sweep.searched_settings("squared", {"trian.gamma": ok})
    with pytest.raises(ValueError, match="Did you mean gamma"):
        sweep.searched_settings("squared", {"train.gama": ok})
    with pytest.raises(SpaceError, match="nothing to search"):
        Space({"train.gamma": {"distribution": "none"}})


@pytest.mark.parametrize("name, what, message", [
    ("train.gamma", {"distribution": "uniform", "min": 0, "max": "high"},
     "max = 'high': must be a number"),
    ("train.gamma", {"distribution": "uniform", "min": 0, "max": ""}, "max is missing"),
    ("train.momentum", {"max": "0.9"}, "has no distribution"),
    ("train.optimizer", ["muon", "adamm"], "values = 'adamm': must be one of muon, adam"),
    ("train.optimizer", UNIT, "is no number: take distribution = choice"),
    ("train.anneal_lr", UNIT, "is no number: take distribution = choice"),
])
def test_what_a_setting_cannot_be_is_refused(name, what, message):
    with pytest.raises(ValueError, match=rf"sweep\.{name}.* {message}"):
        sweep.searched_settings("squared", {name: what})


def test_values_of_a_choice_are_what_the_setting_takes():
    space = Space(sweep.searched_settings("squared", {
        "rnn.name": {"distribution": "choice", "values": "mingru, lstm, none"},
        "train.reward_clip": [None, 1],
        "train.anneal_lr": {"values": "true, false"}, "policy.hidden_size": {"values": "32, 64"}}))
    assert [setting.values for setting in space.settings] == [
        ("mingru", "lstm", "none"), (None, 1.0), (True, False), (32, 64)]


def test_fixed_settings_are_not_searched():
    searched = lambda **fixed: Protein("squared", fixed=fixed).space.names  # noqa: E731
    everything = searched()
    for fixed, out in (({"train.total_timesteps": 1_000_000}, {"train.total_timesteps"}),
                       ({"train": {"num_steps": 32}}, {"train.horizon"}),
                       ({"env.num_envs": 8}, {"vec.total_agents"})):
        assert set(everything) - set(searched(**fixed)) == out
    for fixed, message in (({"train.gama": 1}, "Did you mean gamma"),
                           ({"train.gamma": "x"}, "must be a number")):
        with pytest.raises(ValueError, match=message):
            searched(**fixed)


def test_a_size_that_the_network_does_not_take_is_not_searched(tmp_path):
    (tmp_path / "net.py").write_text("""import models
class Fixed(models.FeedForward):
    def __init__(self, env):
        super().__init__(env, 16)
class Sized(models.FeedForward):
    pass
""")
    for name, searched in (("Fixed", False), ("Sized", True)):
        space = sweep.searched_settings("squared", None, ["--policy.name", f"{tmp_path}/net.py:{name}"])
        assert ("policy.hidden_size" in space) == searched and "train.gamma" in space


def test_present_values_are_the_means_and_whole_numbers_stay_whole():
    space = sweep.searched_settings("squared", {
        "train.total_timesteps": {"distribution": "log_normal", "min": 1e5, "max": 1e8},
        "env.distance": {"distribution": "int_uniform", "min": 2, "max": 9},
        "train.gamma": {**UNIT, "mean": 0.3},
        "train.vf_coef": {"distribution": "uniform", "min": 5, "max": 9}})
    present = configuration.load_config("squared")["train"]["total_timesteps"]
    assert (space["train.total_timesteps"]["mean"] == present
            and space["train.total_timesteps"]["integer"])
    assert space["env.distance"]["mean"] == 5 and space["train.gamma"]["mean"] == 0.3
    assert "mean" not in space["train.vf_coef"], "the present value lies outside: no preference"
    assert isinstance(Random(search_space=space).suggest()["train.total_timesteps"], int)
    choices = {"train.optimizer": ["muon", "adam"], "train.reward_clip": [1, None],
               "policy.hidden_size": [128, 64, 32]}
    section = configuration.load_config("squared")
    shipped = {name: section[name.split(".")[0]][name.split(".")[1]] for name in choices}
    assert Random(search_space=sweep.searched_settings("squared", choices)).suggest() == shipped


INIS = [path for path in sorted((Path(protein.__file__).parent / "config").glob("*.ini"))
        if path.stem != "default"]
SWEPT = [path.stem for path in INIS if path.stem in ocean.names() and "[sweep." in path.read_text()]


@pytest.mark.parametrize("name", SWEPT)
def test_the_sweep_of_each_environment_begins_at_its_own_settings(name):
    """So that what is known to learn is the first trial: every present value lies in its
    range, and is its mean."""
    space, args = sweep.searched_settings(name, None), configuration.load_config(name)
    settings = dict(args["env"])
    num_envs = settings.pop("num_envs") * args["vec"]["num_envs"]
    with contextlib.closing(ocean.load(name).create(1, settings=settings)) as one:
        agents = num_envs * one.num_agents
    default = {"vec.total_agents": agents,
               "train.minibatch_size": min(8192, agents * args["train"]["horizon"])}
    means = {key: what.get("mean") for key, what in space.items()}
    present = {key: args[key.split(".")[0]][key.split(".")[1]] for key in space}
    present = {key: default.get(key) if value is None else value for key, value in present.items()}
    assert means == present


@pytest.mark.parametrize("path",
                         [path for path in INIS if re.search("env_name = .*/", path.read_text())],
                         ids=lambda path: path.stem)
def test_the_sweep_of_an_environment_in_python_begins_at_its_own_settings(path, monkeypatch):
    """Its package need not be here: a stand-in has the settings that the file names."""
    ini = configuration.parse_ini(path)
    given = {key: protein.number(text) for key, text in ini["env"].items()} if "env" in ini else {}
    creator = SimpleNamespace(settings=given)
    monkeypatch.setattr(configuration, "load_creator", lambda name: creator)
    space, args = sweep.searched_settings(path.stem, None), configuration.load_config(path.stem)
    assert {key: what.get("mean") for key, what in space.items()} == {
        key: args[key.split(".")[0]][key.split(".")[1]] for key in space}


def test_preference_has_the_mean_and_the_scale():
    space = Space({"a.x": {**UNIT, "mean": 0.3, "scale": 0.1}, "a.y": UNIT})
    even = np.random.default_rng(0).random((4000, 2))
    warped = space.warp(even)
    assert abs(warped[:, 0].mean() - 0.3) < 0.01 and abs(warped[:, 0].std() - 0.1) < 0.01
    assert np.array_equal(warped[:, 1], even[:, 1])
    assert space.log_preference(np.array([[0.3, 0.9], [0.4, 0.9]])) == pytest.approx([0, -0.5])


# -- the Gaussian process
# ---------------------------------------------------------------------------------------------


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
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x),
                                                             self.smooth(x) + self.linear(x))

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
        # by log length; theirs is by the raw, softplus-transformed one
        ours = (gradient - z / gp.prior_sd)[:3]
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


# -- tuners
# -----------------------------------------------------------------------------------------------------------


def play(tuner, objective, trials):
    """Run `trials` of objective(config, rng) -> (score, cost); returns the
    coordinates (trials, d)."""
    rng = np.random.default_rng(tuner.seed)
    for _ in range(trials):
        config = tuner.suggest()
        score, cost = objective(config, rng)
        tuner.observe(config, score, cost, failed=not math.isfinite(score))
    return np.array([o.unit for o in tuner.observations])


def test_front_of():
    assert protein.front_of([1, 3, 2, 3, 0], [1, 4, 2, 5, 0.5]) == [4, 0, 2, 1]
    assert protein.front_of([1, 2, 2], [1, 1, 1]) in ([1], [2])


@pytest.mark.parametrize("name", slow_but(["branin", "hartmann6", "valleys", "training", "faulty"],
                                          "branin", "training"))
def test_finds_the_front_better_than_random(name):
    problem, gains = bench_protein.PROBLEMS[name], []
    for seed in range(4):
        volumes = [bench_protein.hypervolume(problem,
                                             bench_protein.run_protein(name, problem, 40,
                                                                       seed, method))
                   for method in ("Protein", "Random")]
        gains.append(volumes[0] - volumes[1])
    assert np.mean(gains) > (0.01 if name == "branin" else 0.04), (
        f"hypervolume over random, by seed: {gains}")


def test_does_not_hug_the_bounds():
    """Six settings with an optimum inside and two idle ones: by chance 4% of coordinates
    lie within 2% of a bound."""
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
    # and yet it leaves when the scores say so
    away = Protein(search_space=space, num_trials=60, seed=0)
    units = play(away, lambda config, rng: (-sum((x - 0.8) ** 2 for x in config.values()), 1.0), 60)
    assert np.abs(units[-15:] - 0.8).mean() < 0.15


def test_parallel_suggestions_differ_and_observing_frees_them():
    tuner = Protein(search_space={"env.x": UNIT,
                                  "env.n": {"distribution": "log_normal", "min": 10, "max": 1e6,
                                            "integer": True}},
                    num_trials=100, seed=0)
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

    tuner = Protein(search_space={"env.x": UNIT, "env.y": UNIT, "env.z": UNIT},
                    num_trials=60, seed=0)
    units = play(tuner, objective, 60)
    assert (units[-20:, 0] > 0.65).mean() <= 0.25, (
        "near 0.6 it may err: the best settings lie at the edge")
    assert tuner.best()[1] > 0.8
    assert sum(o.failed for o in tuner.observations) <= 30


def test_suggestions_stay_below_the_limit_of_cost():
    def objective(config, rng):
        return config["env.x"], 10 ** (3 * config["env.x"])

    tuner = Protein(search_space={"env.x": UNIT, "env.y": UNIT}, num_trials=40,
                    max_suggestion_cost=30, seed=0)
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
    tuner = Grid(search_space={"env.x": {"distribution": "log_normal", "min": 1, "max": 100},
                               "env.k": ["a", "b"]},
                 num_trials=6)
    values = []
    while (config := tuner.suggest()) is not None:
        values.append((round(config["env.x"], 6), config["env.k"]))
    assert sorted(values) == [(x, k) for x in (1, 10, 100) for k in "ab"]


def test_minimise_and_optimize_in_python():
    best = Protein(search_space={"train": {"x": UNIT, "kind": ["good", "bad"]}}, num_trials=30, goal="minimize",
                   seed=1).optimize(lambda c: ((c["train.x"] - 0.7) ** 2
                                               + (c["train.kind"] == "bad"), 1.0))
    assert best["train.kind"] == "good" and abs(best["train.x"] - 0.7) < 0.05
    with pytest.raises(RuntimeError, match="none of 3 trials"):
        Random(search_space={"env.x": UNIT}, num_trials=3).optimize(lambda config: 1 / 0)
    with pytest.raises(SpaceError, match="needs an objective"):
        Random(search_space={"env.x": UNIT}).optimize()
    with pytest.raises(SpaceError, match="maximize or minimize"):
        Random(search_space={"env.x": UNIT}, goal="best")


def test_a_sweep_that_goes_on_suggests_as_if_it_had_not_stopped_repeating_nothing():
    """A tuner that is made anew and told the same draws new points in the random start, and the
    same as the old one."""
    problem = bench_protein.PROBLEMS["branin"]
    whole = Protein(search_space=problem.space, num_trials=40, seed=5)
    play(whole, problem.evaluate, 4)
    again = Protein(search_space=problem.space, num_trials=40, seed=5)
    for o in whole.observations:
        again.observe(again.space.decode(o.unit), o.score, o.cost)
    assert again.suggest(4) == whole.suggest(4)
    assert again.suggest(7) == whole.suggest(7)


def test_curves_teach_without_counting_a_lucky_trial_five_times():
    """With the curve's points, the model learns how cost grows along the schedule; the group term
    takes what a trial's points share."""
    tuner = Protein(search_space={"train.total_timesteps": {"distribution": "log_normal",
                                                            "min": 1e5, "max": 1e7},
                                  "train.learning_rate": {"distribution": "log_normal",
                                                          "min": 1e-3, "max": 1}},
                    num_trials=100, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        config = tuner.suggest()
        steps, luck = config["train.total_timesteps"], 0.1 * rng.standard_normal()
        curve = [(p, 1 - math.exp(-p * steps / 1e6) + luck, p * steps / 1e5)
                 for p in (0.2, 0.4, 0.6, 0.8, 1.0)]
        tuner.observe(config, *curve[-1][1:], curve=curve)
    tuner.fit()
    units = tuner.space.encode({"train.total_timesteps": 2e6, "train.learning_rate": 0.03})[None]
    score, score_sd, cost, _, success = tuner.predict(units)
    assert abs(score[0] - (1 - math.exp(-2))) < 0.12 and 0.01 < score_sd[0] < 0.12
    assert cost[0] == pytest.approx(math.log(20), abs=0.2) and success[0] == 1
    theta = tuner.models["score"].theta
    assert theta[-2] > theta[-1] + 2, "the noise belongs to trials, not to points"


def test_suggestions_after_many_observations_come_from_the_models():
    """How long one takes is for bench/bench_protein.py --times to say."""
    rng = np.random.default_rng(0)
    tuner = Protein(search_space={f"env.x{i}": UNIT for i in range(15)}, num_trials=500, seed=0)
    for _ in range(500):
        config = tuner.space.decode(rng.random(15))
        x = np.array(list(config.values()))
        tuner.observe(config, -((x - 0.6) ** 2).sum(), math.exp(3 * x[0]),
                      failed=rng.random() < 0.1)
    tuner.suggest()
    assert tuner.prediction


def test_what_only_some_trials_use_is_searched():
    """beta2 is for adam; a trial with muon goes without it."""
    between = {"distribution": "uniform", "min": 0.9, "max": 0.99}
    space = {"train.optimizer": {"distribution": "choice", "values": "muon, adam"}, "train.beta2": between}
    assert sweep.searched_settings("squared", space).keys() == space.keys()
    only = sweep.searched_settings("squared", {**space, "train.gamma": between}, ["--train.optimizer", "muon"])
    assert only.keys() == {"train.gamma"}
    del space["train.optimizer"]
    assert sweep.searched_settings("squared", {**space, "train.gamma": between}).keys() == {"train.gamma"}
    config = configuration.load_config("squared")
    trial = {"train.optimizer": "muon", "train.beta2": 0.95, "train.gamma": 0.9}
    assert sweep.used(trial, config) == {"train.optimizer": "muon", "train.gamma": 0.9}
    assert sweep.used({**trial, "train.optimizer": "adam"}, config).keys() == trial.keys()


def test_why_trials_of_an_own_objective_failed_is_said():
    def objective(config):
        raise ValueError("the licence server is down")

    tuner = Protein(search_space={"env.x": UNIT}, num_trials=3)
    with pytest.warns(UserWarning, match="a trial failed: ValueError: the licence server is down"), pytest.raises(
            RuntimeError, match="none of 3 trials gave a result; the last one that failed: ValueError: the licence"):
        tuner.optimize(objective)
