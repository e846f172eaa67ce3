"""diagnostics.py: each detector names a failure that is planted in a real run, and
stays silent on others."""

import json
import math
import types

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import diagnostics
import loggers
import models
import pufferl
import vector

SETTINGS = {"horizon": 16, "minibatch_size": 64, "replay_ratio": 2, "learning_rate": 0.01,
            "target_kl": None,
            "gamma": 0.9, "ent_coef": 0.01, "norm_obs": False, "norm_reward": False,
            "log_interval": 0.0}
AGENTS, EPOCHS = 16, 30


class World(gymnasium.Env):
    """Four steps an episode; the action that is the observation's number is right,
    with bounds a first one above the second.
    Keywords plant failures."""

    def __init__(self, length=4, reward=1.0, observation=1.0, grow=0.0, ends=True, cut=False,
                 bounds=None, seen=np.inf):
        self.observation_space = gymnasium.spaces.Box(-seen, seen, (3,), np.float32)
        self.action_space = (gymnasium.spaces.Discrete(3) if bounds is None
                             else gymnasium.spaces.Box(*bounds, (2,), np.float32))
        self.length, self.reward, self.observation, self.grow = length, reward, observation, grow
        self.ends, self.cut, self.total = ends, cut, 1.0

    def _see(self):
        self.total *= 1 + self.grow
        self.right = int(self.np_random.integers(3))
        return (np.eye(3, dtype=np.float32)[self.right] * self.observation
                * self.total).astype(np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def step(self, action):
        right = action == self.right if np.ndim(action) == 0 else action[0] > action[1]
        reward = self.reward * float(right)
        self.steps += 1
        over = self.ends and self.steps == self.length
        return self._see(), reward, over and not self.cut, over and self.cut, {}


def said(world=None, epochs=EPOCHS, agents=AGENTS, policy=None, meddle=None, **settings):
    """The names of the signs that a run of the trainer gave."""
    vecenv = vector.make(lambda **_: World(**(world or {})), num_envs=agents, backend="serial")
    config = {**SETTINGS, **settings, "data_dir": None}
    config["total_timesteps"] = epochs * agents * config["horizon"]
    with pytest.MonkeyPatch.context() as patch:
        if meddle:
            meddle(patch)
        torch.manual_seed(0)  # the same first weights whatever test ran before
        network = (policy(vecenv.driver_env) if policy
                   else models.MinGRUPolicy(vecenv.driver_env, 32))
        trainer = pufferl.PuffeRL(config, vecenv, network)
        while trainer.epoch < trainer.total_epochs:
            trainer.evaluate()
            trainer.train()
        trainer.release()
    return {name.removeprefix("sign_") for name in trainer.signs.said}


def change_metrics(**functions):
    """Let a metric be another function of the entry's number: for what no
    small run does by itself."""
    def meddle(patch):
        see, count = diagnostics.Signs.see, [0]

        def changed(self, step, metrics):
            count[0] += 1
            others = {name.replace("__", "/"): function(count[0])
                      for name, function in functions.items()}
            metrics.update({name: value for name, value in others.items() if name in metrics})
            return see(self, step, metrics)

        patch.setattr(diagnostics.Signs, "see", changed)
    return meddle


@pytest.mark.parametrize("drift, said", [(0.0, False), (1.0, True)])
def test_returns_of_random_play(drift, said):
    """The agents of an environment share their rewards."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(50):
        played = diagnostics.RandomPlay(2)
        for episode in range(40):
            rewards = np.repeat(rng.normal(drift * episode, 1, 2), 20)
            played.add(rewards, np.zeros(40, bool))
            played.add(rewards, np.ones(40, bool))
        found += played.moved() is not None
    assert found == (50 if said else 0)
    assert diagnostics.RandomPlay(3).moved() is None


def squashed(env):
    policy = models.MinGRUPolicy(env, 32)
    models.squash(policy, env.single_action_space)
    return policy


def test_a_value_whose_error_shrinks_is_only_behind():
    late = change_metrics(losses__explained_variance=lambda n: -0.5, losses__value_loss=lambda n: 1.0 + 1 / n)
    assert "value_knows_nothing" not in said(meddle=late)


FAILURES = {
    "one_update": {"minibatch_size": 256, "replay_ratio": 1},
    "nothing_moves": {"learning_rate": 1e-9},
    # For any seed and processor: 200 of 200 first weights. With the usual ent_coef and 30
    # epochs, some policies were certain, and moved no more, before the sign could see it.
    "rate_too_high": {"learning_rate": 0.3, "replay_ratio": 4, "clip_coef": 10,
                      "max_grad_norm": 100, "ent_coef": 0.3, "epochs": 90},
    "entropy_gone": {"world": {"reward": 0.0},
                     "meddle": change_metrics(losses__entropy=lambda n: 1.0 / n**2)},
    "score_lost": {"meddle": change_metrics(environment__episode_return=lambda n: 9.0 + n % 2 if 3 < n < 12 else n % 2,
                                            environment__score=lambda n: float(3 < n < 12))},
    "value_dwarfs": {"world": {"reward": 1000.0}, "vf_clip_coef": math.inf},
    "value_knows_nothing": {"meddle": change_metrics(losses__explained_variance=lambda n: -0.5,
                                                      losses__value_loss=lambda n: 1.0)},
    "rewards_zero": {"world": {"reward": 0.0}},
    "returns_without_rewards": {"meddle": change_metrics(environment__episode_return_min=lambda n: 0.0,
                                                         environment__episode_return_max=lambda n: 0.0)},
    "return_fell": {"meddle": change_metrics(environment__episode_return=lambda n: 1.5 if n < 11 else 0.1,
                                             environment__score=lambda n: 1.5 if n < 11 else 0.1)},
    "every_step_ends": {"meddle": change_metrics(
        vital__terminated=lambda n: 0.0, vital__truncated=lambda n: 64.0 if n < 9 else 256.0,
        environment__episode_return=lambda n: 1.0)},
    "rewards_vast": {"world": {"reward": 5000.0}},
    "actions_reach_little": {"world": {"bounds": (0.0, 500.0)}},
    "observations_constant": {"world": {"observation": 0.0}},
    "observations_outside": {"world": {"grow": 0.01, "seen": 1.1}},
    "observations_vast": {"world": {"observation": 1e5}},
    "observations_grow": {"world": {"grow": 0.06}, "epochs": 25},
    "episodes_never_end": {"world": {"ends": False}, "epochs": 90, "agents": 2, "horizon": 128,
                           "minibatch_size": 128},
    "cut_at_the_same_step": {"world": {"reward": 0.0, "cut": True}},
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_planted_failure_is_named(name):
    found = said(**FAILURES[name])
    assert name in found


def test_every_detector_has_a_failure():
    assert {name.removeprefix("sign_") for name in dir(diagnostics.Signs) if name.startswith("sign_")} == set(FAILURES)


@pytest.mark.parametrize("case", [
    {}, {"replay_ratio": 4}, {"minibatch_size": 128}, {"learning_rate": 0.01}, {"world": {"cut": True}},
    {"world": {"length": 1}}, {"world": {"length": 30}}, {"world": {"reward": 10.0}}, {"world": {"reward": -1.0}},
    {"world": {"observation": 30.0}}, {"gamma": 0.0}, {"ent_coef": 0.0}, {"optimizer": "adam", "learning_rate": 1e-3},
    {"norm_reward": True, "world": {"reward": 5000.0}}, {"vf_clip_coef": math.inf}, {"prio_alpha": 0.0},
    {"policy": lambda env: models.FeedForward(env, 32)}, {"target_kl": 0.01}, {"world": {"length": 7, "reward": 0.01}},
    {"world": {"seen": 1.0}},
    {"world": {"bounds": (-1.0, 1.0)}}, {"world": {"bounds": (0.0, 10.0)}}, {"world": {"bounds": (-1e-3, 1e-3)}},
    {"world": {"bounds": (0.0, 500.0)}, "policy": squashed}, {"world": {"bounds": (-np.inf, np.inf)}},
    {"world": {"bounds": (0.0, np.inf)}}, {"world": {"bounds": (100.0, np.inf)}, "policy": squashed},
    {"norm_obs": True, "world": {"observation": 1e5},
     "policy": lambda env: models.MinGRUPolicy(env, 32, normalize=True)},
], ids=lambda case: " ".join(case) or "nothing set")
def test_a_healthy_run_is_left_alone(case):
    assert said(**case) == set()


@pytest.mark.parametrize(("slope", "expected"), [(1.0, False), (0.0, True), (-1.0, True)])
def test_large_updates_are_no_trouble_while_the_score_rises(slope, expected):
    found = diagnostics.Signs({"total_timesteps": 100}, agents=16)
    for step in range(1, 30):
        found.see(step, {"losses/approx_kl": 0.3, "environment/episode_return": slope * step})
    assert ("sign_rate_too_high" in found.said) == expected


@pytest.mark.parametrize(("returns", "expected"), [
    ([0.0] * 5 + [0.9] * 10 + [0.0] * 15, True), ([0.0] * 20 + [1.0] + [0.0] * 20, False),
    ([0.0, 0.1, 0.9, 0.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0, 0.1], False),
    ([-0.5] * 4 + [0.9, -0.8] * 8 + [-0.5] * 12, False), ([0.0] * 5 + [0.9] * 10 + [0.5] * 15, False)])
def test_a_lost_score_was_there_for_long_and_is_gone(returns, expected):
    found = diagnostics.Signs({"total_timesteps": len(returns)}, agents=16)
    for step, value in enumerate(returns, 1):
        found.see(step, {"environment/episode_return": value, "environment/score": value})
    assert ("sign_score_lost" in found.said) == expected
    found = diagnostics.Signs({"total_timesteps": len(returns)}, agents=16)
    for step, value in enumerate(returns, 1):  # as with a bonus that fades out
        found.see(step, {"environment/episode_return": value, "environment/score": step})
    assert "sign_score_lost" not in found.said


def entries(name, **metrics):
    """Whether a detector speaks in a run of 40 entries; metrics: the value of each, by the entry's number."""
    found = diagnostics.Signs({**SETTINGS, "total_timesteps": 40 * 256}, AGENTS)
    for n in range(40):
        found.see(256 * (n + 1), {key.replace("__", "/"): value(n) for key, value in metrics.items()})
    return f"sign_{name}" in found.said


@pytest.mark.parametrize("returns, expected", [
    (lambda n: 0.5 if n < 8 else 0.0, True), (lambda n: -10.0 if n < 9 else -60.0, True),
    (lambda n: 0.5, False), (lambda n: 1.0 if n < 2 else 0.1, False),  # luck, or episodes that ended early
    (lambda n: [-8, -24, -40, -80][n] if n < 4 else -120 + 3 * n, False),  # a cost a step, and it is learnt
    (lambda n: 0.5 if n < 15 else 0.6 - 0.01 * n, False),
])
def test_a_return_that_fell(returns, expected):
    assert entries("return_fell", environment__episode_return=returns) == expected


def test_a_resumed_run_has_no_untrained_returns():
    found = diagnostics.Signs({**SETTINGS, "total_timesteps": 80 * 256}, AGENTS)
    for n in range(40):
        found.see(256 * (n + 41), {"environment/episode_return": 0.9 if n < 8 else 0.1})
    assert "sign_return_fell" not in found.said


@pytest.mark.parametrize("returns, cut, expected", [
    (lambda n: 0.7, lambda n: 0, True), (lambda n: 1.0 - n / 40, lambda n: 0, True),
    (lambda n: min(1.0, 0.7 + n / 40), lambda n: 0, False),  # the sooner the better, and it is as soon as can be
    (lambda n: 0.7, lambda n: 128 if n > 9 else 30, False),  # two steps, whose ends are marked as both
])
def test_steps_that_all_end_episodes(returns, cut, expected):
    ended = (lambda n: 256 if n > 9 else 60) if expected or cut(20) == 0 else cut
    assert entries("every_step_ends", environment__episode_return=returns, vital__truncated=cut,
                   vital__terminated=ended) == expected


@pytest.mark.parametrize("gamma, steps, ends, expected", [
    (0.99, 4_000, None, False), (0.99, 6_000, None, True), (0.5, 4_000, None, False),
    (0.995, 6_000, None, False), (0.995, 11_000, None, True), (1.0, 30_000, None, True),
    (0.99, 6_000, "environment/n", False), (0.99, 6_000, "vital/terminated", False),
    (0.99, 6_000, "environment/episode_return_max", False)])
def test_episodes_that_never_end(gamma, steps, ends, expected):
    """Two entries are enough; an end without a log is one."""
    found = diagnostics.Signs({"gamma": gamma}, AGENTS)
    metrics = {"vital/terminated": 0.0, "vital/truncated": 0.0} | ({ends: 1.0} if ends else {})
    for n in range(2):
        found.see(256 + n * steps * AGENTS, metrics)
    assert ("sign_episodes_never_end" in found.said) is expected
    assert found.has_ended is (ends is not None)


@pytest.mark.parametrize("steps, words", [(4_000, ["no episode has ended"]), (
    6_000, ["--env.max-episode-steps", "TimeLimit(env, 1000)", "env->truncations"])])
def test_the_end_of_a_run_and_diagnose_agree_that_no_episode_ended(tmp_path, capsys, steps, words):
    (tmp_path / "config.json").write_text(json.dumps({"train": {"gamma": 0.99}, "agents": 4}))
    lines = [{"step": 4 * step, "vital/terminated": 0.0, "vital/truncated": 0.0}
             for step in (1, steps)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pufferl.main(["diagnose", str(tmp_path)])
    told = capsys.readouterr().out
    trainer = types.SimpleNamespace(global_step=4 * steps, uptime=1.0, environment={},
                                    run_folder=None, signs=diagnostics.read(tmp_path)[0])
    for entry in lines:
        trainer.signs.see(entry["step"], entry)
    closing = "\n".join(loggers.closing(trainer, {"config_name": "mine"}, "", (None, None)))
    assert all(word in told and word in closing for word in words)
    assert "no episode has ended" in closing


def test_an_episode_that_is_not_logged_has_ended():
    class Silent(vector.emulation.PufferEnv):
        single_observation_space = spaces.Box(0, 1, (1,), np.float32)
        single_action_space, num_agents = spaces.Discrete(2), 4

        def reset(self, seed=None):
            self.steps = 0
            return self.observations, []

        def step(self, actions):
            self.steps += 1
            self.rewards[:], self.terminals[:] = 1, self.steps % 5 == 3
            return self.observations, self.rewards, self.terminals, self.truncations, []

    env = vector.make(Silent, 1, "serial")
    config = {**SETTINGS, "minibatch_size": 8, "horizon": 4, "data_dir": None}
    trainer = pufferl.PuffeRL(config, env, models.MinGRUPolicy(env.driver_env, 8))
    trainer.evaluate()
    trainer.train()
    assert trainer.signs.has_ended and not trainer.environment
    trainer.close()


def test_a_sentence_comes_once_and_says_what_to_try():
    found = diagnostics.Signs({"horizon": 16, "minibatch_size": 256, "replay_ratio": 1.0}, agents=16)
    first = found.see(256, {"losses/entropy": 1.0})
    assert len(first) == 1 and "--train.minibatch-size" in first[0]
    assert found.see(512, {"losses/entropy": 1.0}) == []


def test_vital_looks_at_live_agents_only():
    observations = np.zeros((5, 2, 3), np.float32)
    observations[:, 1] = np.nan  # dead
    valid = np.ones((5, 2), np.uint8)
    valid[:, 1] = 0
    flags = np.zeros((4, 2), np.uint8)
    metrics = diagnostics.vital(observations, np.full((4, 2), [2.0, -9.0], np.float32), valid,
                          flags, flags)
    assert metrics["vital/reward_min"] == metrics["vital/reward_max"] == 2
    assert metrics["vital/observation_max"] == 0 and metrics["vital/observation_constant"] == 1


def test_an_action_without_a_choice_has_no_reach():
    flat, flags = np.zeros((5, 2, 1), np.float32), np.zeros((4, 2), np.uint8)
    space = gymnasium.spaces.Box(np.array([-1, 3], np.float32), np.array([1, 3], np.float32))
    actions = np.full((4, 2, 2), 3.0, np.float32)
    actions[0] = 0.5
    metrics = diagnostics.vital(flat, np.zeros((4, 2), np.float32), np.ones((5, 2), np.uint8), flags, flags, actions,
                         models.action_bounds(space))
    assert metrics["vital/action_reach"] == 0.25
    space = gymnasium.spaces.Box(np.int8(-128), np.int8(127), (2,), np.int8)  # 255 is beyond int8
    metrics = diagnostics.vital(flat, np.zeros((4, 2), np.float32), np.ones((5, 2), np.uint8), flags, flags, actions,
                         models.action_bounds(space))
    assert metrics["vital/action_reach"] == 2.5 / 255


@pytest.mark.parametrize("low, high, reach", [
    ([-500, -np.inf], [500, np.inf], 0.002), ([-np.inf, 100], [np.inf, np.inf], 0.0), ([-1, 0], [1, np.inf], 1.0)])
def test_the_reach_of_actions_has_each_number_that_has_a_bound(low, high, reach):
    """An infinite bound of one number hides no other; all that lies below a bound is clipped to it."""
    actions, flags = np.zeros((4, 2, 2), np.float32), np.zeros((4, 2), np.uint8)
    actions[1:] = 1, 2
    actions[0] = -1, -1
    bounds = models.action_bounds(gymnasium.spaces.Box(np.float32(low), np.float32(high)))
    metrics = diagnostics.vital(np.zeros((5, 2, 1), np.float32), flags.astype(np.float32), np.ones((5, 2), np.uint8),
                                flags, flags, actions, bounds)
    assert metrics["vital/action_reach"] == reach


def test_diagnose_a_finished_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"train": {"total_timesteps": 100},
                                                      "agents": 4}))
    entries = [{"step": step, "vital/reward_min": 0.0, "vital/reward_max": 0.0,
                "losses/entropy": 1.0}
               for step in range(10, 100, 10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)))
    pufferl.main(["diagnose", str(tmp_path)])
    assert "Every reward so far is 0" in capsys.readouterr().out
    page = (tmp_path / "diagnosis.html").read_text()
    assert "Every reward so far is 0" in page and "entropy" in page
    run = tmp_path / "runs" / "squared_1"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"env_name": "squared", "agents": 4,
                                                "train": {"total_timesteps": 100}}))
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)))
    for name in ("latest", "squared"):
        pufferl.main(["diagnose", name, "--data-dir", str(tmp_path / "runs")])
        assert str(run / "diagnosis.html") in capsys.readouterr().out
    (run / "config.json").write_text(json.dumps({"env_name": "squared", "config_name": "squared", "agents": 4,
                                                 "env": {"distance": 5}, "train": {"total_timesteps": 100}}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps({"step": 90, "environment/score": 0.5}))
    pufferl.main(["diagnose", str(run)])
    assert ("not solved: score 0.5, 0.95 counts as solved; settings other than shipped: total_timesteps 100"
            in capsys.readouterr().out)
    with pytest.raises(SystemExit, match="2"):
        pufferl.main(["diagnose"])
    assert "required: RUN" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="diagnose: "):
        pufferl.main(["diagnose", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^pufferl.py diagnose: .*No such file"):
        pufferl.main(["diagnose", str(tmp_path / "runs")])  # a folder, but no run's
    (run / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"^pufferl.py diagnose: .*damaged"):
        pufferl.main(["diagnose", str(run)])


def test_vital_sees_large_observations_change():
    observations = np.random.default_rng(0).integers(0, 255, (9, 4, 84, 84, 4)).astype(np.uint8)
    valid, flags = np.ones((9, 4), np.uint8), np.zeros((8, 4), np.uint8)
    metrics = diagnostics.vital(observations, np.zeros((8, 4), np.float32), valid, flags, flags)
    assert metrics["vital/observation_constant"] < 1 and metrics["vital/observation_max"] > 200


def test_the_size_of_an_index_is_no_sign():
    indices, flags = np.random.default_rng(0).integers(0, 10**5, (9, 4, 1)), np.zeros((8, 4), np.uint8)
    metrics = diagnostics.vital(indices, np.zeros((8, 4), np.float32), np.ones((9, 4), np.uint8), flags, flags,
                                choices=True)
    assert metrics["vital/observation_constant"] == 0 and "vital/observation_max" not in metrics
    for space, choices in ((spaces.Discrete(10), True), (spaces.Box(0, 1, (2,)), False),
                           (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (2,))), True)):
        env = types.SimpleNamespace(single_observation_space=space)
        assert models.sees_choices(types.SimpleNamespace(driver_env=env)) is choices


def test_a_resumed_run_counts_its_own_steps():
    found = diagnostics.Signs({"total_timesteps": 10**8}, agents=4)
    for step in range(10**6, 10**6 + 10):
        assert not found.see(step, {"vital/terminated": 0.0, "vital/truncated": 0.0})
