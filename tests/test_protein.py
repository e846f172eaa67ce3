"""The search space, the models against closed forms, the tuners on known problems."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import slow_but

import configuration
import environments
import ocean
import protein
from bench import bench_protein
from errors import ConfigError
from protein import GP, ParetoGenetic, Protein, Random, Space
from tools.sweep.command import SIZES, searched_settings, used


def span(low, high, distribution="uniform", **more):
    return {"distribution": distribution, "min": low, "max": high, **more}


UNIT = span(0, 1)
XY = {"env.x": UNIT, "env.y": UNIT}

# -- the search space


@pytest.mark.parametrize("entry", [
    span(-2, 3), span(1, 6, "int_uniform"), span(16, 512, "uniform_pow2"),
    span("1e-5", ".1", "log_normal"), span(0.8, 0.9999, "logit_normal"),
    span(1, 9e9, "log_normal", integer=True),
    [8, 16, 40], ["adam", "muon"], [True, False], {"values": "1, 2.5, 7"}])
def test_values_and_coordinates_round_trip(entry):
    (setting,) = Space({"train.key": entry}).settings
    for unit in np.linspace(0, 1, 37):
        value = setting.from_unit(unit)
        assert setting.from_unit(setting.to_unit(value)) == pytest.approx(value)
        if setting.values:
            assert value in setting.values
        else:
            assert setting.min <= value <= setting.max
            assert isinstance(value, int) == setting.integer
    if setting.levels:
        values = [setting.from_unit((i + 0.5) / 1000) for i in range(1000)]
        counts = [values.count(value) for value in set(values)]
        assert len(counts) == setting.levels and max(counts) - min(counts) <= 2, "equally wide"


def test_scales():
    space = Space({"train.a": span(1e-4, 1, "log_normal"),
                   "train": {"b": span(0.01, 0.99, "logit_normal"), "c": span(2, 32, "uniform_pow2")}})
    assert space.names == ["train.a", "train.b", "train.c"]
    assert [*space.decode(np.full(3, 0.5)).values()] == pytest.approx([1e-2, 0.5, 8])


@pytest.mark.parametrize(("entry", "word"), [
    (span(2, 1), "min"), (span(0, 1, "log_normal"), "log_normal"),
    (span(0.5, 1, "logit_normal"), "logit_normal"), (span(3, 8, "uniform_pow2"), "uniform_pow2"),
    (span(0.5, 8, "int_uniform"), r"0\.5"), (span(0, 9, "gauss"), "gauss.*int_uniform.*none"),
    (span(0, 1, mean=2), "mean"), (span(0, 1, scale=0), "scale"), (span(0, None), "max"),
    (span("low", 1), "low"), (span(0, 1, mean="mid"), "mid"), (0.9, "list"),
    ("muon,adam", "list"), ([3], "values"), ([3, 3], "values")])
def test_nonsense_is_refused_by_name(entry, word):
    with pytest.raises(ConfigError, match=rf"sweep\.train\.lr.*\b{word}\b"):
        Space({"train.lr": entry})


@pytest.mark.parametrize(("name", "entry", "word"), [
    ("train.gama", UNIT, "gamma"), ("train.gamma", span(0, "high"), "max"),
    ("train.gamma", span(0, ""), "max"), ("train.optimizer", ["muon", "adamm"], "adamm"),
    ("train.gamma", {"distribution": "none"}, "sweep")])
def test_what_a_setting_cannot_be_is_refused(name, entry, word):
    with pytest.raises(ValueError, match=word):
        Space(searched_settings("squared", {name: entry}))


@pytest.mark.parametrize(("fixed", "out"), [
    ({"train.total_timesteps": 1_000_000}, "train.total_timesteps"),
    ({"train": {"num_steps": 32}}, "train.horizon"), ({"env.num_envs": 8}, "vec.total_agents")])
def test_what_is_fixed_is_not_searched(fixed, out):
    everything = {*Protein("squared").space.names}
    assert everything - {*Protein("squared", fixed=fixed).space.names} == {out}


@pytest.mark.parametrize("sizes", [(), ("hidden_size",)])
def test_sizes_that_a_network_lacks_are_not_searched(tmp_path, sizes):
    (tmp_path / "net.py").write_text(
        "import models\nclass Net(models.FeedForward):\n"
        f"    def __init__(self, {', '.join(('env', *sizes))}):\n"
        "        super().__init__(env, 16)\n")
    space = searched_settings("squared", None, ["--policy.name", f"{tmp_path}/net.py:Net"])
    assert {"policy.hidden_size", "train.gamma"} & {*space} == {
        "train.gamma", *(f"policy.{size}" for size in sizes)}


def test_automatic_sizes_are_searched_only_in_a_custom_range():
    catch = f"{Path(__file__).parent}/user_envs.py:Catch"
    space = searched_settings(catch, None)
    assert "train.learning_rate" in space and not {*SIZES} & {*space}
    space = searched_settings(catch, {"train.horizon": span(8, 64, "uniform_pow2")})
    assert space["train.horizon"]["max"] == 64
    assert {*SIZES} <= {*searched_settings("breakout", None)}


def test_settings_of_another_optimizer_are_not_searched():
    some = {"train.beta2": span(0.9, 0.99), "train.gamma": span(0.9, 0.99)}
    optimizer = {"train.optimizer": {"distribution": "choice", "values": "muon, adam"}}
    assert {*searched_settings("squared", optimizer | some)} == {*optimizer, *some}
    assert {*searched_settings("squared", optimizer | some, ["--train.optimizer", "muon"])} == {
        "train.gamma"}
    assert {*searched_settings("squared", some)} == {"train.gamma"}
    config, trial = configuration.load_config("squared"), {"train.beta2": 0.95, "train.gamma": 0.9}
    muon, adam = ({"train.optimizer": name, **trial} for name in ("muon", "adam"))
    assert used(muon, config) == {"train.optimizer": "muon", "train.gamma": 0.9}
    assert used(adam, config) == adam


def test_present_values_are_the_means_and_values_have_the_settings_types():
    config = configuration.load_config("squared")
    space = searched_settings("squared", {
        "train.total_timesteps": span(1e5, 1e8, "log_normal"),
        "env.distance": span(2, 9, "int_uniform"), "train.gamma": {**UNIT, "mean": 0.3},
        "train.vf_coef": span(5, 9)})
    assert {name: entry.get("mean") for name, entry in space.items()} == {
        "train.total_timesteps": config["train"]["total_timesteps"], "env.distance": 5,
        "train.gamma": 0.3, "train.vf_coef": None}
    assert isinstance(Random(search_space=space).suggest()["train.total_timesteps"], int)
    space = searched_settings("squared", {
        "train.optimizer": ["muon", "adam"], "train.reward_clip": [1, None],
        "rnn.name": {"distribution": "choice", "values": "mingru, lstm, none"},
        "train.anneal_lr": {"values": "true, false"}, "policy.hidden_size": {"values": "128, 64"}})
    assert [setting.values for setting in Space(space).settings] == [
        ("muon", "adam"), (1.0, None), ("mingru", "lstm", "none"), (True, False), (128, 64)]
    first = Random(search_space=space).suggest()
    del first["rnn.name"]  # auto, which is none of the values
    assert first == {name: config[name.split(".")[0]][name.split(".")[1]] for name in first}


INIS = [path for path in sorted((configuration.ROOT / "config").glob("*.ini"))
        if path.stem != "default"]


@pytest.mark.parametrize("path", [
    path for path in INIS if re.search("(?s)env_name = .*/.*learning_rate", path.read_text())
    or (path.stem in ocean.names() and "[sweep." in path.read_text())], ids=lambda path: path.stem)
def test_a_sweep_begins_at_the_environments_own_settings(path, monkeypatch):
    """Check that each present value lies in its range and is its mean; test_sweep.py has "auto"."""
    if path.stem not in ocean.names():
        sections = dict(configuration.parse_ini(path))
        settings = {key: protein.number(text) for key, text in sections.get("env", {}).items()}
        creator = SimpleNamespace(settings=settings)
        monkeypatch.setattr(environments, "load_creator", lambda name: creator)
    args = configuration.load_config(path.stem)
    for name, entry in searched_settings(path.stem, None).items():
        section, _, key = name.partition(".")
        present = args[section][key]
        assert entry.get("mean") == present or (present is None and name in SIZES), name


def test_preference_has_the_mean_and_the_scale():
    space = Space({"a.x": {**UNIT, "mean": 0.3, "scale": 0.1}, "a.y": UNIT})
    even = np.random.default_rng(0).random((4000, 2))
    warped = space.warp(even)
    assert abs(warped[:, 0].mean() - 0.3) < 0.01 and abs(warped[:, 0].std() - 0.1) < 0.01
    assert np.array_equal(warped[:, 1], even[:, 1])
    assert space.log_preference(np.array([[0.3, 0.9], [0.4, 0.9]])) == pytest.approx([0, -0.5])


@pytest.mark.parametrize("grouped", [True, False])
def test_loss_its_gradient_and_posterior(grouped):
    """Rasmussen and Williams 2006, eq. 2.25 to 2.30 and 4.17, written out entry by entry."""
    rng = np.random.default_rng(0)
    X, y = rng.random((7, 2)), rng.standard_normal(7)
    groups = np.array([0, 0, 1, 2, 2, 2, 3]) if grouped else None
    gp = GP(2)
    gp.theta = theta = gp.prior_mean + 0.2 * rng.standard_normal(6)
    lengths, (matern, linear, group, noise) = np.exp(theta[:2]), np.exp(theta[2:])

    def k(a, b):
        r = math.sqrt(3 * sum(((a - b) / lengths) ** 2))
        return matern * (1 + r) * math.exp(-r) + linear * (a - 0.5) @ (b - 0.5)

    same = 0 if groups is None else groups[:, None] == groups
    K = np.array([[k(a, b) for b in X] for a in X]) + group * same + (noise + 1e-9) * np.eye(7)
    expected = 0.5 * y @ np.linalg.solve(K, y) + 0.5 * np.linalg.slogdet(K)[1]
    expected += 3.5 * math.log(2 * math.pi)
    expected += 0.5 * (((theta - gp.prior_mean) / gp.prior_sd) ** 2).sum()
    loss, gradient = gp.loss(theta, X, y, groups)
    assert loss == pytest.approx(expected, rel=1e-10)
    for partial, step in zip(gradient, 1e-5 * np.eye(6), strict=True):
        numeric = gp.loss(theta + step, X, y, groups)[0] - gp.loss(theta - step, X, y, groups)[0]
        assert partial == pytest.approx(numeric / 2e-5, abs=1e-6, rel=1e-6)
    x = rng.random(2)
    cross = np.array([k(x, row) for row in X])
    mean, sd = gp.condition(X, y, groups).predict(x[None])
    assert mean[0] == pytest.approx(cross @ np.linalg.solve(K, y), rel=1e-8)
    assert sd[0] ** 2 == pytest.approx(k(x, x) - cross @ np.linalg.solve(K, cross), rel=1e-8)


# -- tuners


def play(tuner, objective, trials):
    """Run objective(config, rng) -> (score, cost); return the coordinates (trials, d)."""
    rng = np.random.default_rng(tuner.seed)
    for _ in range(trials):
        config = tuner.suggest()
        score, cost = objective(config, rng)
        tuner.observe(config, score, cost, failed=not math.isfinite(score))
    return np.array([o.unit for o in tuner.observations])


@pytest.mark.parametrize("name", slow_but(["branin", "hartmann6", "valleys", "training", "faulty"],
                                          "branin", "training"))
def test_finds_the_front_better_than_random(name):
    problem = bench_protein.PROBLEMS[name]

    def volume(seed, method):
        trials = bench_protein.run_protein(name, problem, 40, seed, method)
        return bench_protein.hypervolume(problem, trials)

    gains = [volume(seed, "Protein") - volume(seed, "Random") for seed in range(4)]
    assert np.mean(gains) > (0.01 if name == "branin" else 0.04), gains


def test_does_not_hug_the_bounds():
    """By chance 4% of coordinates lie within 2% of a bound."""
    def objective(config, rng):
        x = np.array(list(config.values()))
        return -((x[:6] - 0.35) ** 2).sum() + 0.02 * rng.standard_normal(), math.exp(2 * x[0])

    tuner = Protein(search_space={f"env.x{i}": UNIT for i in range(8)}, num_trials=60, seed=3)
    late = play(tuner, objective, 60)[20:]
    assert ((late < 0.02) | (late > 0.98)).mean() < 0.08
    assert np.abs(late[:, 1:6].mean(0) - 0.35).mean() < 0.1


def test_respects_the_mean_and_leaves_it_when_the_scores_say_so():
    space = {f"env.x{i}": {**UNIT, "mean": 0.2, "scale": 0.1} for i in range(4)}
    for method in (Random, ParetoGenetic, Protein):
        tuner = method(search_space=space, num_trials=100, seed=0)
        units = play(tuner, lambda config, rng: (rng.standard_normal(), 1 + rng.random()), 25)
        np.testing.assert_allclose(units[0], 0.2, err_msg="the first trial is the mean itself")
        assert abs(units.mean() - 0.2) < 0.08, method
    away = Protein(search_space=space, num_trials=60, seed=0)
    units = play(away, lambda config, rng: (-sum((x - 0.8) ** 2 for x in config.values()), 1.0), 60)
    assert np.abs(units[-15:] - 0.8).mean() < 0.15


def test_parallel_suggestions_differ_and_observing_frees_them():
    space = {"env.x": UNIT, "env.n": span(10, 1e6, "log_normal", integer=True)}
    tuner = Protein(search_space=space, num_trials=100, seed=0)
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

    tuner = Protein(search_space={**XY, "env.z": UNIT}, num_trials=60, seed=0)
    units = play(tuner, objective, 60)
    assert (units[-20:, 0] > 0.65).mean() <= 0.25, "the best settings lie at the edge"
    assert tuner.best()[1] > 0.8 and sum(o.failed for o in tuner.observations) <= 30


def test_suggestions_stay_below_the_limit_of_cost():
    tuner = Protein(search_space=XY, num_trials=40, max_suggestion_cost=30, seed=0)
    units = play(tuner, lambda config, rng: (config["env.x"], 10 ** (3 * config["env.x"])), 40)
    costs = 10 ** (3 * units[tuner.random_trials :, 0])
    assert (costs > 33).mean() < 0.1 and tuner.front()[-1][1] > 0.4
    dear, cheap = tuner._gain(np.array([[0.9, 0.5], [0.4, 0.5]]), math.log(30), 0.0)
    assert dear < -1e4 < cheap


def test_small_spaces_are_exhausted_without_repeats():
    space = {"env.a": [1, 2, 3], "env.b": ["x", "y"], "env.c": [True, False]}
    tuner = Protein(search_space=space, num_trials=50, seed=0)
    play(tuner, lambda c, rng: (c["env.a"] * (c["env.b"] == "x"), 1.0), 12)
    late = tuner.observations[tuner.random_trials :]
    assert len({o.unit.tobytes() for o in late}) == len(late)


def test_minimise_and_optimize_in_python():
    best = Protein(search_space={"train": {"x": UNIT, "kind": ["good", "bad"]}}, num_trials=30,
                   goal="minimize", seed=1).optimize(
        lambda c: ((c["train.x"] - 0.7) ** 2 + (c["train.kind"] == "bad"), 1.0))
    assert best["train.kind"] == "good" and abs(best["train.x"] - 0.7) < 0.05

    with (pytest.warns(UserWarning, match="ZeroDivisionError"),
          pytest.raises(RuntimeError, match="none of 3 trials")):
        Random(search_space=XY, num_trials=3).optimize(lambda config: 1 / 0)
    with pytest.raises(ConfigError, match="goal"):
        Random(search_space=XY, goal="best")


def test_a_sweep_that_is_continued_suggests_as_if_it_had_not_stopped():
    problem = bench_protein.PROBLEMS["branin"]
    whole, again = (Protein(search_space=problem.space, num_trials=40, seed=5) for _ in range(2))
    play(whole, problem.evaluate, 4)
    for o in whole.observations:
        again.observe(again.space.decode(o.unit), o.score, o.cost)
    assert again.suggest(4) == whole.suggest(4)
    assert again.suggest(7) == whole.suggest(7)
    assert len({json.dumps(whole.space.decode(o.unit)) for o in whole.observations}) == 4


def test_curves_teach_without_counting_a_lucky_trial_five_times():
    """The group term takes what a trial's points share."""
    tuner = Protein(search_space={"train.total_timesteps": span(1e5, 1e7, "log_normal"),
                                  "train.learning_rate": span(1e-3, 1, "log_normal")},
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
    half = tuner.space.encode({"train.total_timesteps": 1e6, "train.learning_rate": 0.03})
    assert tuner.inputs(units, [0.5])[0] == pytest.approx([*half, 0.5]), "the steps so far"


def test_suggestions_after_many_observations_come_from_the_models():
    rng, tuner = np.random.default_rng(0), Protein(search_space=XY, num_trials=500, seed=0)
    for x in rng.random((GP.FIT_ROWS + 20, 2)):
        tuner.observe(tuner.space.decode(x), -((x - 0.6) ** 2).sum(), math.exp(3 * x[0]),
                      failed=rng.random() < 0.1)
    tuner.suggest()
    assert tuner.prediction
