"""diagnostics.py: each detector names a failure that is planted in a real run, and is silent on others."""

import json
import math
import types

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import configuration
import diagnostics
import flat_spaces
import loggers
import models
import pufferl
import vector
from tools import history

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SETTINGS = {"horizon": 16, "minibatch_size": 64, "replay_ratio": 2, "learning_rate": 0.01, "target_kl": None,
            "gamma": 0.9, "ent_coef": 0.01, "norm_obs": False, "norm_reward": False, "log_interval": 0.0}
AGENTS, EPOCHS = 16, 30


class World(gymnasium.Env):
    """Four steps an episode: action = observation is right. Keywords plant failures."""

    def __init__(self, length=4, reward=1.0, observation=1.0, grow=0.0, ends=True, cut=False, bounds=None, high=np.inf):
        self.observation_space = spaces.Box(-high, high, (3,), np.float32)
        self.action_space = spaces.Discrete(3) if bounds is None else spaces.Box(*bounds, (2,), np.float32)
        self.length, self.reward, self.observation, self.grow = length, reward, observation, grow
        self.ends, self.cut, self.total = ends, cut, 1.0

    def _observe(self):
        self.total *= 1 + self.grow
        self.right = int(self.np_random.integers(3))
        return (np.eye(3, dtype=np.float32)[self.right] * self.observation * self.total).astype(np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        right = action == self.right if np.ndim(action) == 0 else action[0] > action[1]
        self.steps += 1
        over = self.ends and self.steps == self.length
        return self._observe(), self.reward * float(right), over and not self.cut, over and self.cut, {}


def names_of(warnings):
    return {name.removeprefix("warn_") for name in warnings.reported}


def run_world(world=None, epochs=EPOCHS, agents=AGENTS, policy=None, metrics=None, **settings):
    """Return the names of a run's warnings. metrics: values by the entry's number."""
    vecenv = vector.make(lambda **_: World(**(world or {})), num_envs=agents, backend="serial")
    config = {**SETTINGS, **settings, "data_dir": None}
    config["total_timesteps"] = epochs * agents * config["horizon"]
    torch.manual_seed(0)
    network = policy(vecenv.driver_env) if policy else models.MinGRUPolicy(vecenv.driver_env, 32)
    trainer = pufferl.PuffeRL(config, vecenv, network)
    see, count = trainer.warnings.update, [0]

    def change(step, entry):
        count[0] += 1
        changed = {key.replace("__", "/"): value(count[0]) for key, value in (metrics or {}).items()}
        entry.update({name: value for name, value in changed.items() if name in entry})
        return see(step, entry)

    trainer.warnings.update = change
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        trainer.train()
    trainer.release()
    return names_of(trainer.warnings)


def squashed(env):
    policy = models.MinGRUPolicy(env, 32)
    models.squash(policy, env.single_action_space)
    return policy


FAILURES = {
    "one_update": {"minibatch_size": 256, "replay_ratio": 1},
    "nothing_moves": {"learning_rate": 1e-9},
    # with the usual ent_coef and 30 epochs some policies are certain before the detector sees it
    "rate_too_high": {"learning_rate": 0.3, "replay_ratio": 4, "clip_coef": 10, "max_grad_norm": 100, "ent_coef": 0.3,
                      "epochs": 90},
    "entropy_gone": {"world": {"reward": 0.0}, "metrics": {"losses__entropy": lambda n: 1.0 / n**2}},
    "settled_at_random": {"metrics": {"losses__entropy": lambda n: 1.1 if n < 9 else 0.5,
                                      "environment__episode_return": lambda n: 1.0 + n % 2 / 10}},
    "score_lost": {"metrics": {"environment__episode_return": lambda n: 9.0 + n % 2 if 3 < n < 12 else n % 2,
                               "environment__score": lambda n: float(3 < n < 12)}},
    "value_dwarfs": {"world": {"reward": 1000.0}, "vf_clip_coef": math.inf},
    "value_knows_nothing": {"metrics": {"losses__explained_variance": lambda n: -0.5,
                                        "losses__value_loss": lambda n: 1.0}},
    "rewards_zero": {"world": {"reward": 0.0}},
    "return_fell": {"metrics": {"environment__episode_return": lambda n: 1.5 if n < 11 else 0.1,
                                "environment__score": lambda n: 1.5 if n < 11 else 0.1}},
    "rewards_vast": {"world": {"reward": 5000.0}},
    "actions_reach_little": {"world": {"bounds": (0.0, 500.0)}},
    "observations_constant": {"world": {"observation": 0.0}},
    "observations_outside": {"world": {"grow": 0.01, "high": 1.1}},
    "observations_vast": {"world": {"observation": 1e5}},
    "episodes_never_end": {"world": {"ends": False}, "epochs": 90, "agents": 2, "horizon": 128, "minibatch_size": 128},
    "cut_at_the_same_step": {"world": {"reward": 0.0, "cut": True}},
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_planted_failure_is_named(name):
    assert set(FAILURES) == {
        name.removeprefix("warn_") for name in dir(diagnostics.Warnings) if name.startswith("warn_")}
    assert name in run_world(**FAILURES[name])


@pytest.mark.parametrize("case", [
    {}, {"prio_alpha": 0.0, "vf_clip_coef": math.inf, "target_kl": 0.01, "replay_ratio": 4},
    {"optimizer": "adam", "learning_rate": 1e-3, "policy": lambda env: models.FeedForward(env, 32)},
    {"world": {"cut": True, "observation": 30.0}}, {"world": {"length": 1}}, {"world": {"length": 30, "reward": 10.0}},
    {"world": {"reward": -1.0, "high": 1.0}}, {"norm_reward": True, "world": {"reward": 5000.0}},
    {"world": {"bounds": (-1e-3, 1e-3)}}, {"world": {"bounds": (0.0, 500.0)}, "policy": squashed},
    {"world": {"bounds": (-np.inf, np.inf)}}, {"world": {"bounds": (0.0, np.inf)}},
    {"norm_obs": True, "world": {"observation": 1e5},
     "policy": lambda env: models.MinGRUPolicy(env, 32, normalize=True)},
], ids=lambda case: " ".join(case) or "nothing set")
def test_a_healthy_run_is_left_alone(case):
    assert run_world(**case) == set()


def entries(first=1, number=40, total=40, settings=SETTINGS, **metrics):
    """The names of the warnings in entries of 256 steps; metrics: the value of each, by the entry's number."""
    found = diagnostics.Warnings({**settings, "total_timesteps": total * 256}, AGENTS)
    for n in range(number):
        found.update(256 * (n + first), {key.replace("__", "/"): value(n) for key, value in metrics.items()})
    return names_of(found)


def constant(value):
    return lambda n: value


RETURNS = [  # whether it fell, and the entries of the run
    (lambda n: 0.5 if n < 8 else 0.0, True, {}), (lambda n: -10.0 if n < 9 else -60.0, True, {}),
    (constant(0.5), False, {}), (lambda n: 1.0 if n < 2 else 0.1, False, {}),  # luck, or ended early
    (lambda n: [-8, -24, -40, -80][n] if n < 4 else -120 + 3 * n, False, {}),  # a cost a step, and it is learnt
    (lambda n: 0.5 if n < 15 else 0.6 - 0.01 * n, False, {}),
    (lambda n: 0.9 if n < 8 else 0.1, False, {"total": 80, "first": 41}),  # a resumed run
]


@pytest.mark.parametrize(("name", "expected", "options", "metrics"), [
    # a value whose error shrinks is only behind
    ("value_knows_nothing", False, {}, {"losses__explained_variance": constant(-0.5),
                                        "losses__value_loss": lambda n: 1 + 1 / (n + 1)}),
    # large updates do not matter while the score rises
    *(("rate_too_high", slope <= 0, {"number": 29}, {
        "losses__approx_kl": constant(0.3), "environment__episode_return": lambda n, slope=slope: slope * n})
      for slope in (1.0, 0.0, -1.0)),
    *(("return_fell", expected, options, {"environment__episode_return": returns})
      for returns, expected, options in RETURNS),
    # a resumed run counts its own steps
    ("episodes_never_end", False, {"first": 4000, "number": 10, "total": 400_000, "settings": {}},
     {"vital__terminated": constant(0), "vital__truncated": constant(0)}),
])
def test_what_a_detector_says_of_entries(name, expected, options, metrics):
    assert (name in entries(**options, **metrics)) == expected


@pytest.mark.parametrize(("returns", "expected"), [
    ([0.0] * 5 + [0.9] * 10 + [0.0] * 15, True), ([0.0] * 20 + [1.0] + [0.0] * 20, False),
    ([0.0, 0.1, 0.9, 0.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0, 0.1], False),
    ([-0.5] * 4 + [0.9, -0.8] * 8 + [-0.5] * 12, False), ([0.0] * 5 + [0.9] * 10 + [0.5] * 15, False)])
def test_a_lost_score_was_there_for_long_and_is_gone(returns, expected):
    def lost(score):
        size = len(returns)
        return "score_lost" in entries(number=size, total=size, environment__episode_return=lambda n: returns[n],
                                       environment__score=score)

    assert lost(lambda n: returns[n]) == expected
    assert not lost(lambda n: n)  # as with a bonus that fades out


@pytest.mark.parametrize(("returns", "entropy", "settled", "level"), [
    (lambda n: -0.36 - 0.04 * (n > 8) + 0.01 * (n % 2), 0.5, True, -0.358),  # the box that is pushed nowhere
    (lambda n: -0.36 + 0.01 * (n % 2), 0.8, False, None),
    (lambda n: -0.36 + 0.01 * n, 0.2, False, None),  # it learns
    (lambda n: -0.36 + (n > 30), 0.5, True, None),  # said before it learns
    (lambda n: 0.0, 0.2, False, None),  # two players: what one wins the other loses
])
def test_a_policy_that_settles_where_random_play_is(returns, entropy, settled, level):
    warnings = diagnostics.Warnings({**SETTINGS, "total_timesteps": 40 * 256}, AGENTS)
    for n in range(40):
        warnings.update(256 * (n + 1), {"environment/episode_return": returns(n), "environment/n": 30.0,
                                  "losses/entropy": 1.4 if n < 5 else 1.4 * entropy - 0.1})
    assert ("settled_at_random" in names_of(warnings)) == settled
    assert warnings.below_random_play() == (None if level is None else pytest.approx(level, abs=0.01))


def test_random_play_is_that_of_a_run_from_its_begin():
    for first, count, expected in ((256, 100.0, 0.5), (256 * 30, 100.0, None), (256, 20.0, None)):
        warnings = diagnostics.Warnings({**SETTINGS, "total_timesteps": 40 * 256}, AGENTS)
        warnings.update(first, {"environment/episode_return": 0.5, "environment/n": count, "losses/entropy": 1.0})
        assert warnings.random_play == expected


@pytest.mark.parametrize(("gamma", "steps", "ends", "expected"), [
    (0.99, 4_000, None, False), (0.99, 6_000, None, True), (0.5, 4_000, None, False), (0.995, 6_000, None, False),
    (0.995, 11_000, None, True), (1.0, 30_000, None, True), (0.99, 6_000, "environment/n", False),
    (0.99, 6_000, "vital/terminated", False)])
def test_episodes_that_never_end(gamma, steps, ends, expected):
    """Two entries are enough; an end without a log is one."""
    found = diagnostics.Warnings({"gamma": gamma}, AGENTS)
    metrics = {"vital/terminated": 0.0, "vital/truncated": 0.0} | ({ends: 1.0} if ends else {})
    for n in range(2):
        found.update(256 + n * steps * AGENTS, metrics)
    assert ("episodes_never_end" in names_of(found)) is expected and found.has_ended is (ends is not None)


def test_a_sentence_comes_once_and_names_what_to_try():
    found = diagnostics.Warnings({"horizon": 16, "minibatch_size": 256, "replay_ratio": 1.0}, agents=16)
    first = found.update(256, {"losses/entropy": 1.0})
    assert len(first) == 1 and "--train.minibatch-size" in first[0]
    assert found.update(512, {"losses/entropy": 1.0}) == []


# -- metrics under vital/


def vital(observations=None, rewards=0.0, actions=None, space=None, **options):
    T, N = (4, 2) if observations is None else (len(observations) - 1, observations.shape[1])
    observations = np.zeros((T + 1, N, 1), np.float32) if observations is None else observations
    valid, flags = options.pop("valid", np.ones((T + 1, N), np.uint8)), np.eye(T, N, dtype=np.uint8)
    bounds = None if space is None else flat_spaces.action_bounds(space)
    rewards = np.full((T, N), rewards, np.float32)
    metrics = diagnostics.vital(observations, rewards, valid, flags, flags, actions, bounds, **options)
    return {name.removeprefix("vital/"): value for name, value in metrics.items()}


def test_vital_looks_at_valid_agents_only():
    observations, valid = np.zeros((5, 2, 3), np.float32), np.ones((5, 2), np.uint8)
    observations[:, 1], valid[:, 1] = np.nan, 0
    metrics = vital(observations, [2.0, -9.0], valid=valid)
    assert metrics["reward_min"] == metrics["reward_max"] == 2 and metrics["terminated"] == metrics["truncated"] == 1
    assert metrics["observation_max"] == 0 and metrics["observation_constant"] == 1


@pytest.mark.parametrize(("low", "high", "first", "others", "reach"), [
    ([-1, 3], [1, 3], 0.5, 3.0, 0.25),  # one without a choice
    (np.int8([-128, -128]), np.int8([127, 127]), 0.5, 3.0, 2.5 / 255),  # 255 is beyond int8
    ([-500, -np.inf], [500, np.inf], -1, (1, 2), 0.002), ([-np.inf, 100], [np.inf, np.inf], -1, (1, 2), 0.0),
    ([-1, 0], [1, np.inf], -1, (1, 2), 1.0)])
def test_the_reach_of_actions_has_each_number_that_has_a_bound(low, high, first, others, reach):
    """An infinite bound of one number hides no other; all that lies below a bound is clipped to it."""
    actions, dtype = np.full((4, 2, 2), others, np.float32), getattr(low, "dtype", np.dtype(np.float32))
    actions[0] = first
    space = spaces.Box(np.asarray(low, dtype), np.asarray(high, dtype), dtype=dtype.type)
    assert vital(actions=actions, space=space)["action_reach"] == reach


def test_vital_looks_at_all_of_a_large_observation_and_at_no_index():
    rng = np.random.default_rng(0)
    metrics = vital(rng.integers(0, 255, (9, 4, 84, 84, 4)).astype(np.uint8))
    assert metrics["observation_constant"] < 1 and metrics["observation_max"] > 200
    metrics = vital(rng.integers(0, 10**5, (9, 4, 1)), choices=True)
    assert metrics["observation_constant"] == 0 and "observation_max" not in metrics


# -- the command


def write_run(folder, entries, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"env_name": "mine", "agents": 4, **config}))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)))


@pytest.mark.parametrize(("steps", "is_named"), [(4_000, False), (6_000, True)])
def test_the_end_of_a_run_and_diagnose_agree_that_no_episode_ended(tmp_path, capsys, steps, is_named):
    lines = [{"step": 4 * step, "vital/terminated": 0.0, "vital/truncated": 0.0} for step in (1, steps)]
    write_run(tmp_path, lines, train={"gamma": 0.99})
    pufferl.main(["diagnose", str(tmp_path)])
    past = history.read(tmp_path, configuration.read_settings(tmp_path))
    trainer = types.SimpleNamespace(global_step=4 * steps, uptime=1.0, environment={}, run_folder=None,
                                    statistics=types.SimpleNamespace(entry={}), vecenv=None,
                                    warnings=history.replay(past)[0])
    closing = "\n".join(loggers.Dashboard().closing(trainer, {"config_name": "mine"}, ""))
    for text in (capsys.readouterr().out, closing):
        assert "episode" in text and ("--env.max-episode-steps" in text) == is_named


def test_diagnose_a_finished_run(tmp_path, capsys):
    entries = [{"step": step, "vital/reward_min": 0.0, "vital/reward_max": 0.0, "losses/entropy": 1.0}
               for step in range(10, 100, 10)]
    run = tmp_path / "runs" / "squared_1"
    write_run(run, [*entries, {"step": 90, "environment/score": 0.5}], env_name="squared", config_name="squared",
              train={"total_timesteps": 100}, env={"distance": 5},
              defaults={"env": {"distance": 5}, "train": {"total_timesteps": 50}})
    sentences = history.replay(history.read(run, configuration.read_settings(run)))[0].reported.values()
    for name in (str(run), "latest", "squared"):
        pufferl.main(["diagnose", name, "--data-dir", str(tmp_path / "runs")])
        text, page = capsys.readouterr().out, (run / "diagnosis.html").read_text()
        assert str(run / "diagnosis.html") in text and "entropy" in page
        assert sentences and all(sentence in text and sentence in page for _, sentence in sentences)
        assert "0.95" in text and "total_timesteps" in text  # what solves it, and changed settings
    (run / "config.json").write_text("{}")
    for arguments in ([], [str(tmp_path / "none")], [str(run.parent)], [str(run)]):
        with pytest.raises(SystemExit):
            pufferl.main(["diagnose", *arguments])
