"""What `auto` chooses, normalisation, and the networks that are chosen for users' own environments."""

import contextlib
import dataclasses
import json
import math
import re
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import auto
import configuration
import models
import pufferl
import vector
from auto import Facts, decide
from configuration import ConfigError
from tools import export

ROOT = Path(__file__).resolve().parent.parent
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
AUTOS = ("horizon", "replay_ratio", "minibatch_size", "learning_rate", "target_kl", "gamma",
         "ent_coef", "prio_alpha", "norm_obs",
         "norm_reward")


def env_of(space, action=None):
    """What a policy is built from."""
    return SimpleNamespace(single_observation_space=space, env_single_observation_space=space,
                           single_action_space=action or spaces.Discrete(3))


# --------------------------------------------------------------------------------------------------
# The rules


def test_the_shipped_configs_resolve_to_what_they_did():
    """tests/shipped_settings.json was written before the defaults became automatic; a new
    setting is off in all."""
    shipped = json.loads(Path(__file__).with_name("shipped_settings.json").read_text())
    found = {path.stem for path in (ROOT / "config").glob("*.ini")} - {"default"}
    assert set(shipped) <= found
    for name in found:
        sections = {"policy": configuration.Policy, "rnn": configuration.Rnn,
                    "train": configuration.Train}
        values = {section: dataclasses.asdict(cls()) for section, cls in sections.items()}
        own = configuration.parse_ini(ROOT / "config" / f"{name}.ini")
        for section, cls in sections.items():
            types = {field.name: field.type for field in dataclasses.fields(cls)}
            for key, text in own.items(section) if own.has_section(section) else ():
                values[section][key] = configuration.coerce(text, types[key], name)
        missing = [key for key in AUTOS if values["train"][key] == "auto" and key != "target_kl"]
        assert not missing and values["policy"]["name"] != "auto", (
            f"config/{name}.ini must state {missing}")
        if name in shipped:
            assert not values["train"]["norm_obs"] and not values["train"]["norm_reward"]
        for section, before in shipped.get(name, {}).items():
            assert values[section] == {**values[section], **before}


@settings(deadline=None, max_examples=200)
@given(agents=st.integers(1, 20_000), steps=st.integers(1, 10**9), discrete=st.booleans(),
       native=st.booleans(),
       costs=st.none() | st.tuples(st.floats(1e-7, 1.0), st.floats(1e-7, 1.0)))
def test_the_rules_give_settings_that_work(agents, steps, discrete, native, costs):
    costs = dict(zip(("step_seconds", "learn_seconds"), costs or (None, None), strict=True))
    train = dataclasses.asdict(configuration.Train(total_timesteps=steps))
    chosen = decide(train, Facts(agents, steps, discrete, [BOX], native, **costs))
    assert tuple(sorted(chosen)) == tuple(sorted(AUTOS)) and all(reason
                                                                 for _, reason in chosen.values())
    c = {name: value for name, (value, _) in chosen.items()}
    assert (c["minibatch_size"] % c["horizon"] == 0
            and 0 < c["minibatch_size"] <= agents * c["horizon"])
    assert 1 <= c["replay_ratio"] <= auto.PASSES[discrete] and c["learning_rate"] > 0
    if agents >= 64:  # what made people's environments fail: one update an epoch
        assert c["replay_ratio"] * agents * c["horizon"] / c["minibatch_size"] >= 4


def test_what_is_set_stays_and_the_rest_fits_it():
    train = dataclasses.asdict(configuration.Train(horizon=50, learning_rate=0.1))
    chosen = decide(train, Facts(64, 300_000, True, [BOX]))
    assert "horizon" not in chosen and "learning_rate" not in chosen
    assert chosen["minibatch_size"][0] % 50 == 0 and chosen["target_kl"] == (None, None)
    for size, horizon in ((127, 64), (2000, 125)):  # single steps need no whole segments, but an epoch as large
        train = dataclasses.asdict(configuration.Train(minibatch_size=size, draw="steps"))
        assert decide(train, Facts(16, 100_000, True, [BOX]))["horizon"][0] == horizon


@pytest.mark.parametrize(("space", "expected"), [
    (BOX, True),
    (spaces.Box(0.0, 1.0, (7, 7), np.float32), False),
    (spaces.Box(-1.0, 1.0, (3,), np.float32), False),
    (spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32)), True),
    (spaces.Box(0, 255, (84, 84, 3), np.uint8), False),
    (spaces.Box(0, 4, (6, 6), np.int64), False),
    (spaces.Box(0, 255, (128,), np.uint8), True),
    (spaces.Box(-128, 127, (3,), np.int8), True),
    (spaces.Box(0, 10, (3,), np.int64), False),
    (spaces.Text(5), True),
    (spaces.Box(0, 20_000, (2,), np.int64), True),
    (spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32), True),
    (spaces.Discrete(16), False),
])
def test_what_is_normalised(space, expected):
    chosen, reason = auto.wants_normalising(Facts(64, 1000, True, [space]))
    assert chosen is expected and reason


@pytest.mark.parametrize("other", [spaces.Box(0, 32, (3,), np.int64), spaces.Discrete(9),
                                   spaces.Box(0, 255, (8, 8, 3), np.uint8), None])
def test_the_reason_speaks_of_all_that_is_seen(other):
    fields = [spaces.Box(-1.0, 1.0, (3,), np.float32), *filter(None, [other])]
    chosen, reason = auto.wants_normalising(Facts(64, 1000, True, fields))
    assert not chosen and ("aside" in reason) is (other is not None)


@pytest.mark.parametrize(("text", "kind", "value"), [
    ("auto", int | configuration.Auto, "auto"), ("1e3", int | configuration.Auto, 1000),
    ("auto", bool | configuration.Auto, "auto"), ("true", bool | configuration.Auto, True),
    ("none", float | configuration.Auto | None, None),
    ("0.5", float | configuration.Auto | None, 0.5),
])
def test_auto_is_a_value(text, kind, value):
    assert configuration.coerce(text, kind, "here") == value


def test_a_run_on_the_cpu_says_that_there_is_a_gpu(monkeypatch):
    def said(*options):
        args = pufferl.load_config("squared", options)
        trainer, facts = pufferl.make_trainer("squared", {**args, "data_dir": None})
        lines = list(pufferl.describe(trainer, args, facts))
        trainer.close()
        return [line for line in lines if "a GPU is here" in line]

    assert not said()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert said() and not said("--train.device", "cpu")


CATCH = f"{ROOT}/tests/brought.py:Catch"


@pytest.mark.parametrize(("name", "options", "steps"), [
    (CATCH, [], 1_000_000), ("gym/FrozenLake-v1", [], 1_000_000), ("default", [], 10_000_000),
    ("mine.h", [], 20_000_000), ("squared", [], 3_000_000),
    (CATCH, ["--train.total-timesteps", "5e3"], 5000),
    (CATCH, ["--train.num-iterations", "3", "--train.horizon", "32"], 3 * 32 * 32)])
def test_steps_without_a_setting_are_those_of_a_first_look(name, options, steps, tmp_path):
    if name == "mine.h":
        name = str(tmp_path / name)
        Path(name).write_text((ROOT / "ocean/squared/squared.h").read_text())
    args = pufferl.load_config(name, options)
    assert args["train"]["total_timesteps"] == steps


@pytest.mark.parametrize(("seconds", "flags"), [(1e-3, ["--train.total-timesteps 300000"]), (1e-5, [])])
def test_a_long_run_says_which_steps_take_five_minutes(seconds, flags):
    args = pufferl.load_config(CATCH, ["--data-dir", "none", "--train.gamma", "0.9", "--train.replay-ratio", "1"])
    trainer, facts = pufferl.make_trainer(CATCH, args)
    facts = dataclasses.replace(facts, step_seconds=seconds / 2, learn_seconds=seconds / 2)
    lines = list(pufferl.describe(trainer, args, facts))
    trainer.close()
    assert [re.search(r"minutes: (--train\S+ \d+)", line)[1] for line in lines if " minutes: " in line] == flags


def test_auto_is_for_settings_that_have_it():
    with pytest.raises(ConfigError, match="gae-lambda = 'auto'"):
        pufferl.load_config("squared", ["--train.gae-lambda", "auto"])
    assert pufferl.load_config("squared", ["--train.norm-obs", "--train.horizon", "auto"])["train"]["norm_obs"] is True


def test_the_printed_flags_repeat_the_run_and_a_resume_keeps_them(tmp_path, capsys):
    name, options = f"{ROOT}/tests/brought.py:PointMass", ["--vec.num-envs", "16",
                                                           "--vec.backend", "serial",
                                                           "--logger", "none"]

    def train(*more, steps="6000", folder="a"):
        argv = [*options, "--train.total-timesteps", steps, "--data-dir",
                str(tmp_path / folder), *more]
        trainer = pufferl.train(name, pufferl.load_config(name, argv))
        return trainer, capsys.readouterr().out

    first, out = train()
    lines = [line.removeprefix("auto: ").partition("  #") for line in out.splitlines()
             if line.startswith("auto: ")]
    assert len(lines) == len(AUTOS) and all(reason.strip() for *_, reason in lines)
    second, again = train(*" ".join(flags for flags, *_ in lines).split(), folder="b")
    assert "auto: " not in again
    assert torch.equal(first.arena.flat("weights"), second.arena.flat("weights"))
    saved = json.loads((first.run_folder / "config.json").read_text())
    assert (saved["train"]["norm_obs"] is True
            and set(saved["auto"]) == {f"train.{name}" for name in AUTOS})
    resumed, out = train("--resume", str(first.run_folder), steps="9000")
    assert "auto: " not in out and resumed.config["horizon"] == first.config["horizon"]
    assert resumed.normalizer.count > first.normalizer.count


def test_an_environment_in_c_gets_as_many_copies_as_its_steps_are_worth(tmp_path):
    header = tmp_path / "mine.h"
    header.write_text((ROOT / "ocean" / "squared" / "squared.h").read_text())
    few = pufferl.load_config(str(header), ["--train.total-timesteps", "300_000"])
    many = pufferl.load_config(str(header))
    assert few["env"]["num_envs"] == 32 and many["env"]["num_envs"] == 1024


@pytest.mark.parametrize(("name", "steps", "expected"), [
    (f"{ROOT}/tests/brought.py:Catch", 300_000, 32),
    (f"{ROOT}/tests/brought.py:Catch", 10_000_000, 64),
    (f"{ROOT}/tests/brought.py:PointMass", 300_000, 8)])
def test_environments_in_python_are_few_so_that_rollouts_are_long(name, steps, expected):
    args = pufferl.load_config(name, ["--train.total-timesteps", str(steps)])
    assert args["vec"]["num_envs"] == expected and "vec.num_envs" in args["auto"]
    assert pufferl.load_config(name, ["--vec.num-envs", "3"])["vec"]["num_envs"] == 3


# --------------------------------------------------------------------------------------------------
# Normalisation


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), offset=st.floats(-1e4, 1e4),
       seed=st.integers(0, 99), dtype=st.sampled_from([np.float32, np.float64, np.int16]))
def test_moments_are_those_of_all_valid_rows(sizes, offset, seed, dtype):
    rng, normalizer, seen = np.random.default_rng(seed), models.Normalizer(3), []
    for size in sizes:
        rows = (rng.normal(size=(size, 3)) * [1, 10, 100] + offset).astype(dtype)
        valid = rng.random(size) < 0.7
        seen.append(rows[valid].astype(np.float64))
        normalizer.merge([normalizer.moments(torch.from_numpy(rows),
                                             torch.from_numpy(valid.astype(np.uint8)))])
    rows = np.concatenate(seen)
    assert normalizer.count == len(rows)
    if len(rows):
        np.testing.assert_allclose(normalizer.mean, rows.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(normalizer.squares / normalizer.count, rows.var(0),
                                   rtol=1e-6, atol=1e-6)


def test_normalised_observations_are_clipped_deviations():
    normalizer, rows = models.Normalizer(2), torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    normalizer.merge([normalizer.moments(rows, torch.ones(2, dtype=torch.uint8))])
    torch.testing.assert_close(normalizer(rows), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    # a number that never moved until now
    assert normalizer(torch.tensor([[2.0, 6.0]])).tolist() == [[0.0, 10.0]]


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_deviations_far_from_0_are_exact(dtype):
    rows = np.random.default_rng(0).integers(-3, 4, (50, 2)).astype(dtype) + 10**12
    normalizer, valid = models.Normalizer(2, exact=True), torch.ones(25, dtype=torch.uint8)
    for part in (rows[:25], rows[25:]):
        normalizer.merge([normalizer.moments(torch.from_numpy(part), valid)])
    expected = torch.from_numpy((rows - 10.0**12 - (rows - 10.0**12).mean(0)) / rows.std(0)).float()
    torch.testing.assert_close(normalizer(torch.from_numpy(rows)), expected, atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 99), gamma=st.floats(0, 1), cut=st.integers(1, 9))
def test_the_reward_scale_is_the_deviation_of_the_discounted_return(seed, gamma, cut):
    rng = np.random.default_rng(seed)
    rewards, resets = rng.normal(2, 50, (10, 3)).astype(np.float32), (rng.random((11, 3))
                                                                      < 0.2).astype(np.uint8)
    valid = (rng.random((11, 3)) < 0.8).astype(np.uint8)
    scale = models.RewardScale(3, gamma)
    for rows in (slice(0, cut), slice(cut, 10)):
        parts = scale.follow(*(torch.from_numpy(array[rows]) for array in (rewards, resets, valid)))
        scale.merge(scale.moments, [parts])
    returns, seen, weights = np.zeros(3), [], []
    old = math.exp(-(10 - cut) * (1 - gamma) / 25)  # what the first rollout counts in the end
    for t in range(10):
        returns[resets[t] != 0] = 0.0  # also of an agent that is inactive at its reset
        for i in range(3):
            if valid[t, i]:
                returns[i] = gamma * returns[i] + rewards[t, i]
                seen.append(returns[i])
                weights.append(old if t < cut else 1.0)
    if seen:
        mean = np.average(seen, weights=weights)
        variance = np.average((seen - mean) ** 2, weights=weights)
        assert scale.scale == pytest.approx((variance + 1e-8) ** -0.5, rel=1e-6)


def test_a_discounted_return_ends_with_its_episode_also_at_an_inactive_step():
    rewards, flags = torch.tensor([[1.0], [0.0], [1.0]]), torch.uint8
    scale = models.RewardScale(1, gamma=0.9)
    scale.follow(rewards, torch.tensor([[0], [1], [0]], dtype=flags), torch.tensor([[1], [0], [1]], dtype=flags))
    assert scale.returns.tolist() == [1.0]


@pytest.mark.parametrize("base, gain", [(0.0, 1.0), (10_000.0, 1.0), (-1e5, 1.0), (100.0, 1e-3), (5.0, 0.0)])
def test_the_value_target_is_near_1_for_any_offset_and_scale_of_rewards(base, gain):
    class Choice(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(0, 1, (4,)), gymnasium.spaces.Discrete(4)

        def observe(self):
            self.right = int(self.np_random.integers(4))
            return np.eye(4, dtype=np.float32)[self.right]

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return self.observe(), {}

        def step(self, action):
            right = float(action == self.right)
            return self.observe(), base + gain * right, True, False, {}

    settings = {"total_timesteps": 40_000, "horizon": 32, "minibatch_size": 256, "replay_ratio": 4.0,
                "learning_rate": 0.005, "norm_reward": True, "data_dir": None, "env": "choice"}
    vecenv = vector.make([Choice] * 32, 32, "serial")
    trainer = pufferl.PuffeRL(settings, vecenv, models.FeedForward(vecenv, hidden_size=32))
    try:
        for _ in range(30):
            trainer.evaluate()
            losses = trainer.train()
            assert losses["value_loss"] < 100.0  # half the square of RewardScale.FAR, and what is learnt
        right = (trainer.storage["rewards"] - base) > gain / 2
        assert gain == 0.0 or right.float().mean() > 0.9
    finally:
        trainer.release()


def test_the_reward_scale_follows_a_policy_that_learns():
    scale, rng = models.RewardScale(8, gamma=0.99), np.random.default_rng(0)
    resets, valid = torch.zeros(257, 8, dtype=torch.uint8), torch.ones(257, 8, dtype=torch.uint8)
    for size in (100.0,) * 20 + (1.0,) * 100:  # at first each episode costs a hundred times as much
        rewards = torch.from_numpy(rng.normal(0, size, (256, 8)).astype(np.float32))
        scale.merge(scale.moments, [scale.follow(rewards, resets, valid)])
    deviation = 1 / math.sqrt(1 - 0.99**2)  # of the discounted sum of numbers of deviation 1
    assert 0.8 < scale.scale * deviation < 1.25


def test_ranks_merge_to_what_one_would_have():
    rows, valid = torch.randn(40, 3, dtype=torch.float64) * 7 + 3, torch.ones(40, dtype=torch.uint8)
    one, two = models.Normalizer(3), models.Normalizer(3)
    one.merge([one.moments(rows, valid)])
    two.merge([two.moments(rows[:10], valid[:10]), two.moments(rows[10:], valid[10:])])
    torch.testing.assert_close(one.squares, two.squares)
    torch.testing.assert_close(one.shift, two.shift)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_fused_network_normalises_as_its_forward_does(precision):
    args = pufferl.load_config("cartpole", ["--env.num-envs", "32", "--train.minibatch-size", "512",
                                            "--rnn.num-layers", "2", "--train.norm-obs",
                                            "--train.norm-reward", "--train.precision", precision])
    vecenv = pufferl.load_env("cartpole", args)
    policy = pufferl.load_policy(args, vecenv)
    trainer = pufferl.PuffeRL({**args["train"], "env": "cartpole", "data_dir": None},
                              vecenv, policy)
    weights = trainer.arena.flat("weights").clone()
    trainer.evaluate()
    trainer.train()
    assert torch.equal(trainer.arena.flat("weights"), weights), "the first rollout only measures"
    assert policy.normalizer.count == 64 * 32
    trainer.evaluate()
    s, state = trainer.storage, {name: tensor.clone()
                                 for name, tensor in trainer.engine.initial_state.items()}
    with torch.no_grad():
        logits, value = policy(s["observations"][:-1],
                               {**state, "resets": s["resets"][:-1], "valid": s["valid"][:-1]})
    logprobs = logits.log_softmax(-1).gather(-1, s["actions"].long())[..., 0]
    tolerance = 1e-4 if precision == "float32" else 0.05
    torch.testing.assert_close(trainer.buffers.values[:-1], value[..., 0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(trainer.buffers.logprobs, logprobs, atol=tolerance, rtol=tolerance)
    trainer.train()
    assert trainer.losses["approx_kl"] < 0.1 and not torch.equal(trainer.arena.flat("weights"),
                                                                 weights)
    scaled = trainer.storage["rewards"] * trainer.reward_scale.scale
    torch.testing.assert_close(trainer.buffers.rewards, scaled)
    trainer.release()


@pytest.mark.parametrize("steps, measured", [(20_000, 4), (2_000, 1)])
def test_small_rollouts_are_measured_until_the_moments_are_of_many(steps, measured):
    """1,024 observations, or a twentieth of the run's."""
    name = f"{ROOT}/tests/brought.py:Track"
    args = pufferl.load_config(name, ["--train.total-timesteps", str(steps), "--train.horizon", "32", "--vec.num-envs",
                                      "8", "--vec.backend", "serial", "--train.norm-obs"])
    vecenv = pufferl.load_env(name, args)
    trainer = pufferl.PuffeRL({**args["train"], "data_dir": None}, vecenv, pufferl.load_policy(args, vecenv))
    weights, same = trainer.arena.flat("weights").clone(), []
    for _ in range(measured + 1):
        trainer.evaluate()
        trainer.train()
        same.append(torch.equal(trainer.arena.flat("weights"), weights))
    assert same == [True] * measured + [False]
    trainer.release()


def test_an_image_from_c_is_read_by_a_linear_map_and_normalised():
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    for native in (True, False):
        assert auto.wants_normalising(Facts(64, 1000, True, [image], native))[0] == native


def test_what_is_only_measured():
    normalizer = models.Normalizer(2)
    assert normalizer.only_measures(0, 10**9) and normalizer.only_measures(5_000, 10**9)  # nothing alive was seen yet
    normalizer.count.fill_(300)
    assert normalizer.only_measures(768, 10**9) and not normalizer.only_measures(1024, 10**9)  # also if few are alive
    assert normalizer.only_measures(99, 2000) and not normalizer.only_measures(100, 2000)
    normalizer.count.fill_(1024)  # loaded, or resumed
    assert not normalizer.only_measures(0, 10**9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_a_short_run_learns_with_whatever_is_seen_first(tmp_path, seed):
    """-38 and -22 were reached with moments of 256 observations; a random policy has about -80, the best about -3."""
    name = f"{ROOT}/tests/brought.py:Track"
    trainer = pufferl.train(name, pufferl.load_config(name, [
        "--train.total-timesteps", "20_000", "--train.seed", str(seed), "--train.log-interval", "0.2",
        "--data-dir", str(tmp_path), "--vec.num-threads", "1"]))
    assert trainer.environment["episode_return"] > -10


def test_normalisation_goes_on_exactly_after_a_checkpoint(tmp_path):
    def make(folder):
        args = pufferl.load_config("cartpole",
                                   ["--env.num-envs", "32", "--train.minibatch-size", "512",
                                    "--train.norm-obs", "--train.norm-reward"])
        vecenv = pufferl.load_env("cartpole", args)
        policy = pufferl.load_policy(args, vecenv)
        return pufferl.PuffeRL({**args["train"], "env": "cartpole", "data_dir": str(tmp_path / folder)}, vecenv, policy)

    def epochs(trainer, count):
        for _ in range(count):
            trainer.evaluate()
            trainer.train()

    whole, half = make("a"), make("b")
    epochs(whole, 6)
    epochs(half, 3)
    half.save_checkpoint(tmp_path / "half.pt")
    rest = make("c")
    rest.load_checkpoint(tmp_path / "half.pt")
    epochs(rest, 3)
    assert torch.equal(whole.arena.flat("weights"), rest.arena.flat("weights"))
    assert torch.equal(whole.normalizer.squares, rest.normalizer.squares)
    for trainer in (whole, half, rest):
        trainer.release()


def test_an_exported_policy_normalises(tmp_path):
    env = env_of(BOX)
    policy = models.MinGRUPolicy(env, hidden_size=8, normalize=True)
    rows = torch.randn(50, 4) * 30 + 100
    policy.normalizer.merge([policy.normalizer.moments(rows, torch.ones(50, dtype=torch.uint8))])
    export.flat_policy(policy, env).tofile(tmp_path / "policy.bin")
    program = tmp_path / "run.c"
    program.write_text('''#include "policy.h"
int main(void) { Policy p; const char* problem = policy_load(&p, "policy.bin");
  if (problem) { puts(problem); return 1; }
  float x[4]; float* state = policy_new_state(&p, 1);
  while (scanf("%f %f %f %f", x, x + 1, x + 2, x + 3) == 4) { policy_forward(&p, x, true, state);
    for (int i = 0; i < p.width; i++) printf("%.9g ", p.outputs[i]); } }''')
    subprocess.run(["cc", "-std=gnu11", f"-I{ROOT}/ocean", "run.c", "-o", "run", "-lm"],
                   cwd=tmp_path, check=True)
    text = "\n".join(" ".join(map(str, row)) for row in rows[:5].tolist())
    out = subprocess.run(["./run"], cwd=tmp_path, input=text, capture_output=True, text=True, check=True).stdout
    with torch.no_grad():
        logits, value = policy.forward_eval(rows[:5], policy.initial_state(5))
    expected = torch.cat([logits, value], dim=1)
    torch.testing.assert_close(torch.tensor([float(x) for x in out.split()]).view(5, 4), expected,
                               atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------------------
# Networks


@pytest.mark.parametrize(("space", "kind"), [
    (spaces.Box(0, 4, (6, 6), np.int64), "board"),
    (spaces.Box(0, 1, (10, 10, 4), bool), "board"),
    (spaces.Box(0, 1, (3, 3, 2), np.int8), "board"),
    (spaces.Box(-1, 1, (2, 8, 8), np.int8), "board"),
    (spaces.Box(0, 255, (84, 84, 3), np.uint8), "image"),
    (spaces.Box(0, 255, (7, 7, 3), np.uint8), "image"),
    (spaces.Box(0, 255, (84, 84), np.uint8), "image"),
    (spaces.Box(0, 255, (31, 40), np.uint8), "numbers"),
    (spaces.Box(0, 255, (4, 32, 40, 3), np.uint8), "image"),
    (spaces.Box(0, 65535, (64, 64, 1), np.uint16), "image"),
    (spaces.Box(0.0, 1.0, (3, 64, 64), np.float32), "image"),
    (spaces.Box(0.0, 255.0, (64, 64), np.float64), "image"),
    (spaces.Box(0.0, 1.0, (31, 64, 3), np.float32), "numbers"),
    (spaces.Box(-1.0, 1.0, (64, 64), np.float32), "numbers"),
    (spaces.Box(0, 255, (12,), np.uint8), "numbers"),
    (spaces.Box(0, 1000, (6, 6), np.int64), "numbers"),
    (spaces.Box(0.0, 1.0, (7, 7), np.float32), "numbers"),
    (spaces.Discrete(5), "choices"),
])
def test_the_encoder_follows_what_is_seen(space, kind):
    assert models.leaf_kind(space) == kind


@pytest.mark.parametrize("space", [
    spaces.Box(0, 4, (6, 6), np.int64), spaces.Box(0, 1, (10, 10, 4), bool),
    spaces.Box(-1, 1, (2, 8, 8), np.int8)])
def test_planes_are_one_hot(space):
    planes = models._Planes(space)
    space.seed(1)
    boards = np.stack([space.sample() for _ in range(3)])
    out = planes(torch.from_numpy(boards))
    sides = sorted(space.shape)[-2:]
    assert out.shape == (3, planes.planes, *sides)
    if space.dtype == bool:
        np.testing.assert_array_equal(out.numpy(), boards.transpose(0, 3, 1, 2))
    else:
        assert (out.unflatten(1, (planes.channels, -1)).sum(2) == 1).all()
        whole = boards if boards.ndim == 4 else boards[:, None]
        pieces = out.unflatten(1, (planes.channels, -1)).argmax(2).numpy() + space.low.min()
        np.testing.assert_array_equal(pieces, whole)


class Boarded(gymnasium.Env):
    observation_space = spaces.Dict(board=spaces.Box(0, 2, (5, 5), np.int8),
                                    mode=spaces.Discrete(3),
                                    speed=spaces.Box(-9.0, 9.0, (2,), np.float32))
    action_space = spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), bool(self.np_random.random() < 0.1), False, {}


def test_a_dict_gets_one_encoder_a_key_and_a_memory():
    with vector.make(lambda **_: Boarded(), num_envs=8, backend="serial") as vecenv:
        args = pufferl.load_config("squared",
                                   ["--policy.name", "auto", "--policy.hidden-size", "16"])
        args["train"]["norm_obs"] = "auto"
        policy = pufferl.load_policy(args, vecenv)
        assert isinstance(policy, models.MinGRUWrapper)
        assert sorted(kind for *_, kind in policy.policy.leaves) == ["board", "choices", "numbers"]
        trainer = pufferl.PuffeRL({"data_dir": None, "total_timesteps": 20_000}, vecenv, policy)
        assert trainer.config["norm_obs"]
        for _ in range(3):
            trainer.evaluate()
            trainer.train()
        observations = trainer.storage["observations"][: trainer.horizon].flatten(0, 1)
        numbers = trainer.normalizer.read(observations)
        assert numbers.shape[1] == 2 and float(trainer.normalizer.scale.max()) < 1
        text = models.describe(policy)
        assert "board" in text and "one-hot" in text and "MinGRU" in text
        trainer.release()


class Plain(torch.nn.Module):
    """As simple as a network can be."""

    def __init__(self, env, hidden_size=32):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, hidden_size), torch.nn.Tanh())
        self.logits, self.value = torch.nn.Linear(hidden_size, 2), torch.nn.Linear(hidden_size, 1)

    def forward(self, observations):
        assert observations.dim() == 2, "a batch without time"
        hidden = self.body(observations)
        return self.logits(hidden), self.value(hidden)


def cartpoles():
    return vector.make("gym/CartPole-v1", num_envs=8, backend="serial")


@pytest.mark.parametrize("normalised", [False, True])
def test_a_plain_network_sees_a_batch(normalised):
    with cartpoles() as vecenv:
        policy = Plain(vecenv.driver_env)
        assert (models.is_plain(policy)
                and not models.is_plain(models.FeedForward(vecenv.driver_env)))
        policy = models.Normalized(vecenv.driver_env, policy) if normalised else policy
        trainer = pufferl.PuffeRL({"data_dir": None, "total_timesteps": 5000}, vecenv, policy)
        before = trainer.arena.flat("weights").clone()
        for _ in range(3):
            trainer.evaluate()
            trainer.train()
        assert not torch.equal(trainer.arena.flat("weights"), before)
        assert trainer.config["norm_obs"] is normalised
        logits, value = models.one_step(policy, trainer.storage["observations"][0], {})
        assert logits.shape == (8, 2) and value.shape[0] == 8
        trainer.release()


def test_an_edit_of_a_plain_network_is_what_runs():
    class Edited(Plain):
        def forward(self, observations):
            logits, value = super().forward(observations)
            return logits * 0 + torch.tensor([0.0, 50.0]), value

    with cartpoles() as vecenv:
        trainer = pufferl.PuffeRL({"data_dir": None, "total_timesteps": 5000}, vecenv,
                                  Edited(vecenv.driver_env))
        trainer.evaluate()
        assert (trainer.storage["actions"] == 1).all()
        trainer.release()


def test_an_error_about_shapes_says_which_form_was_given():
    class Timeless(Plain):
        # takes a state, so that it is given time, and then a batch
        def forward(self, observations, state):
            hidden = self.body(observations.reshape(len(observations), 5))
            return self.logits(hidden), self.value(hidden)

    class Narrow(Plain):
        def forward(self, observations):
            return super().forward(observations[:, :3])

    with cartpoles() as vecenv:
        for cls, form in ((Timeless, "T, N, *observation"), (Narrow, "a batch without time")):
            with pytest.raises(RuntimeError) as caught:
                trainer = pufferl.PuffeRL({"data_dir": None, "total_timesteps": 5000}, vecenv,
                                          cls(vecenv.driver_env))
                trainer.evaluate()
                trainer.train()
            assert form in " ".join(caught.value.__notes__) and "forward(observations)" in " ".join(
                caught.value.__notes__)


@pytest.mark.parametrize(("config", "message"), [
    ({"norm_obs": True}, "has no models.Normalizer"), ({"target_kl": -1}, "target_kl = -1"),
    ({"horizon": 0}, "horizon = 0"), ({"minibatch_size": "many"}, "minibatch_size = 'many'")])
def test_settings_that_cannot_work(config, message):
    with cartpoles() as vecenv, pytest.raises(ConfigError, match=re.escape(message)):
        pufferl.PuffeRL({"data_dir": None, **config}, vecenv, Plain(vecenv.driver_env))


def test_normalisation_of_a_dict_for_a_network_of_ones_own_says_what_to_do():
    vecenv = vector.make(lambda **_: Boarded(), num_envs=2, backend="serial")
    with vecenv, pytest.raises(TypeError, match="one array"):
        models.Normalized(vecenv.driver_env, Plain(vecenv.driver_env))


def test_target_kl_moves_the_learning_rate_towards_it():
    with cartpoles() as vecenv:
        trainer = pufferl.PuffeRL({"data_dir": None, "total_timesteps": 10**6, "learning_rate": 1e-5,
                                   "target_kl": 0.01}, vecenv, Plain(vecenv.driver_env))
        for _ in range(20):
            trainer.evaluate()
            trainer.train()
        assert trainer.learning_rate == pytest.approx(4e-5, rel=1e-2), "four times what was set, and no further"
        assert trainer.losses["learning_rate"] <= trainer.learning_rate * 1.01
        trainer._steps_before, trainer._rate_factor = 8 * 10**5, 9.5
        assert pufferl.adapted(trainer, 0.0) == 10.0, "late, when the schedule is a tenth, ten times what it says"
        trainer.release()


# --------------------------------------------------------------------------------------------------
# What a reading found


class Normalising(Plain):
    """A network of one's own that normalises by itself."""

    def __init__(self, env):
        super().__init__(env)
        self.normalizer = models.Normalizer(4)

    def forward(self, observations):
        return super().forward(self.normalizer(observations))


@pytest.fixture
def own_network(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import sys\nfrom pathlib import Path\n"
                    f"sys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom test_auto "
                    "import Normalising\n")
    return f"{file}:Normalising"


CART = f"{ROOT}/tests/brought.py:cartpole"


def run(tmp_path, *options, env=CART):
    argv = ["--vec.num-envs", "8", "--vec.backend", "serial", "--logger", "none", "--data-dir",
            str(tmp_path), "--train.total-timesteps", "2000", *options]
    return pufferl.train(env, pufferl.load_config(env, argv))


def test_a_network_that_normalises_itself_is_not_wrapped(tmp_path, own_network):
    options = ["--policy.name", own_network, "--train.horizon", "32"]
    first = run(tmp_path, *options, "--train.norm-obs", "True")
    assert type(first.policy).__name__ == "Normalising" and first.normalizer.count > 0
    resumed = run(tmp_path, "--resume", str(first.run_folder), "--train.total-timesteps", "3000")
    assert (type(resumed.policy).__name__ == "Normalising"
            and resumed.normalizer.count > first.normalizer.count)
    args = pufferl.load_config(CART,
                               ["--load-model-path", str(first.run_folder), "--vec.num-envs", "8"])
    with cartpoles() as vecenv:
        loaded = pufferl.load_policy(args, vecenv, CART)
    assert torch.equal(loaded.normalizer.squares, resumed.normalizer.squares)


def test_what_starts_from_normalised_weights_can_be_resumed(tmp_path, capsys):
    first = run(tmp_path, "--train.norm-obs", "True")
    second = run(tmp_path, "--load-model-path", str(first.run_folder), "--train.norm-obs", "False")
    assert second.config["norm_obs"] is True and second.normalizer is not None
    assert run(tmp_path, "--resume", str(second.run_folder), "--train.total-timesteps", "3000").normalizer is not None


def test_reward_scaling_may_begin_and_cease_at_a_resume(tmp_path, capsys):
    def make(**settings):
        args = pufferl.load_config("cartpole",
                                   ["--env.num-envs", "32", "--train.minibatch-size", "512"])
        vecenv = pufferl.load_env("cartpole", args)
        policy = pufferl.load_policy(args, vecenv)
        return pufferl.PuffeRL({**args["train"], "data_dir": str(tmp_path), **settings},
                               vecenv, policy)

    with_scale, without = make(norm_reward=True), make(norm_reward=False)
    for trainer in (with_scale, without):
        trainer.evaluate()
        trainer.train()
    a, b = with_scale.save_checkpoint(tmp_path / "a.pt"), without.save_checkpoint(tmp_path / "b.pt")
    capsys.readouterr()
    without.load_checkpoint(a)
    with_scale.load_checkpoint(b)
    assert "begin new episodes" not in capsys.readouterr().out
    # a file without value_targets: its values are relative to 0, from which their mean moves slowly
    with_scale.evaluate()
    with_scale.train()
    saved = torch.load(with_scale.save_checkpoint(tmp_path / "c.pt"))
    count = saved["tensors"].pop("value_targets")[0]
    torch.save(saved, tmp_path / "c.pt")
    with_scale.load_checkpoint(tmp_path / "c.pt")
    assert with_scale.reward_scale.targets.tolist() == [count, 0.0, 0.0]


def test_a_rate_that_is_set_at_a_resume_is_the_one_that_is_used(tmp_path):
    first = run(tmp_path, "--train.total-timesteps", "20000")
    assert first._rate_factor != 1
    second = run(tmp_path, "--resume", str(first.run_folder), "--train.total-timesteps", "24000",
                 "--train.target-kl",
                 "none", "--train.learning-rate", "0.001", "--train.anneal-lr", "False")
    assert second.learning_rate == 0.001


def test_an_environment_that_one_process_cannot_hold_twice_is_not_measured(tmp_path, monkeypatch):
    load, made = pufferl.load_env, []

    def once(*arguments):
        made.append(arguments)
        if len(made) > 1:
            raise RuntimeError("one emulator a process")
        return load(*arguments)

    monkeypatch.setattr(pufferl, "load_env", once)
    assert run(tmp_path).config["replay_ratio"] == 4 and len(made) == 2


@pytest.mark.parametrize(("name", "option", "gamma"), [("PointMass", "--env.length=25", 0.96),
                                                     pytest.param("PointMass", "--env.length=500", 0.99,
                                                                  marks=pytest.mark.slow),
                                                     ("Catch", "--env.size=7", 0.99)])
def test_episodes_that_are_all_cut_off_soon_shorten_the_view(tmp_path, name, option, gamma):
    name = f"{ROOT}/tests/brought.py:{name}"
    trainer = pufferl.train(name,
                            pufferl.load_config(name, ["--train.total-timesteps", "3000",
                                                       "--logger", "none",
                                                       "--data-dir", str(tmp_path), option]))
    assert trainer.config["gamma"] == gamma


@pytest.mark.parametrize(("exchange", "options", "backend"), [
    (10.0, [], "serial"), (0.0, [], "auto"), (10.0, ["--vec.num-workers", "2"], "auto"),
    (10.0, ["--vec.backend", "multiprocessing"], "multiprocessing"),
])
def test_environments_that_are_quicker_than_messages_stay_in_this_process(
        tmp_path, monkeypatch, exchange, options, backend):
    monkeypatch.setattr(vector, "physical_cores", lambda: 2)
    monkeypatch.setattr(pufferl, "EXCHANGE", exchange)
    name = f"{ROOT}/tests/brought.py:Catch"
    args = pufferl.load_config(name, ["--train.total-timesteps", "256", "--logger", "none",
                                      "--data-dir", str(tmp_path), "--vec.num-envs", "8", *options])
    trainer = pufferl.train(name, args)
    assert type(trainer.vecenv) is (vector.Serial if backend == "serial"
                                    else vector.Multiprocessing)
    assert trainer.args["vec"]["backend"] == backend
    assert ("vec.backend" in trainer.args["auto"]) == (backend == "serial")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40), ended=st.booleans(),
       agents=st.integers(1, 3))
def test_how_episodes_end(lengths, ended, agents):
    steps = sum(lengths) + 3
    truncations = np.zeros((steps, agents), np.uint8)
    truncations[np.cumsum(lengths) - 1] = 1
    terminals = np.zeros_like(truncations)
    terminals[-1, -1] = ended
    ends = pufferl.EpisodeEnds(agents)
    for rollout in range(0, steps, 5):
        part = slice(rollout, rollout + 5)
        ends.add(SimpleNamespace(truncations=truncations[part], terminals=terminals[part]))
    enough = len(lengths) * agents >= pufferl.MEASURED_EPISODES
    assert ends.cut == (lengths[0] if enough and len(set(lengths)) == 1 and not ended else None)


@pytest.mark.parametrize("space", [
    spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (5, 5), np.int64),
    spaces.Box(0, np.iinfo(np.uint64).max, (5, 5), np.uint64),
])
def test_boards_without_bounds_are_numbers(space):
    assert models.leaf_kind(space) == "numbers"


class Plane(gymnasium.Env):
    """Which half of an image (H, W) is white; in a Dict if `nested`."""

    action_space = spaces.Discrete(2)

    def __init__(self, nested=False):
        image = spaces.Box(0, 255, (40, 40), np.uint8)
        self.nested, self.observation_space = nested, spaces.Dict({"image": image}) if nested else image

    def observe(self):
        self.side, image = int(self.np_random.integers(2)), np.zeros((40, 40), np.uint8)
        image[:, 20 * self.side : 20 * self.side + 20] = 255
        return {"image": image} if self.nested else image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.observe(), {}

    def step(self, action):
        reward, self.left = float(action == self.side), self.left - 1
        return self.observe(), reward, self.left == 0, False, {}


@pytest.mark.parametrize(("name", "nested"), [("auto", False), ("feed-forward", True)])
def test_a_checkpoint_keeps_the_linear_map_of_its_image(tmp_path, monkeypatch, name, nested):
    env = f"{__file__}:Plane"

    def train(*options, steps=256):
        options = ["--train.total-timesteps", str(steps), "--train.horizon", "8", "--train.minibatch-size", "64",
                   "--data-dir", str(tmp_path), "--logger", "none", "--vec.num-threads", "1", *options]
        trainer = pufferl.train(env, pufferl.load_config(env, options))
        return trainer, "convolutions of an image (H, W)" in models.describe(trainer.policy)

    new = "--policy.name", name, "--env.nested", str(nested), "--vec.num-envs", "8"
    assert train(*new)[1]
    with monkeypatch.context() as patch:
        patch.setattr(models, "_is_image", lambda space: False)
        old, convolved = train(*new, "--train.norm-obs", "True")
    weights, folder = {key: tensor.clone() for key, tensor in old.policy.state_dict().items()}, str(old.run_folder)
    assert not convolved
    args = pufferl.load_config(env, ["--load-model-path", folder, "--data-dir", "none"])
    with contextlib.closing(pufferl.load_env(env, args)) as vecenv:
        loaded = pufferl.load_policy(args, vecenv).state_dict()
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[key], weights[key]) for key in weights)
    resumed, convolved = train("--resume", folder, steps=512)
    assert not convolved and resumed.global_step == 512


def test_an_image_of_few_colours_is_an_image():
    assert models.leaf_kind(spaces.Box(0, 1, (84, 84, 1), np.uint8)) == "image"
    assert models.leaf_kind(spaces.Box(0, 10, (7, 7, 3), np.uint8)) == "board"


@pytest.mark.parametrize("options", [["--train.horizon", "0"], ["--train.minibatch-size", "-64"],
                                     ["--train.total-timesteps", "0"],
                                     ["--train.replay-ratio", "0"]])
def test_sizes_that_cannot_be_are_named(tmp_path, options):
    with pytest.raises(ConfigError, match="must be above 0"):
        run(tmp_path, *options)


@pytest.mark.parametrize(("minibatch", "agents"),
                         [(1000, 64), (4096, 64), (512, 1), (96, 8), (2048, 64)])
def test_the_horizon_fits_a_minibatch_that_is_set(minibatch, agents):
    train = dataclasses.asdict(configuration.Train(minibatch_size=minibatch))
    horizon = decide(train, Facts(agents, 300_000, True, [BOX]))["horizon"][0]
    assert minibatch % horizon == 0 and minibatch <= agents * horizon


def test_a_setting_of_the_environment_may_be_called_agents():
    assert configuration.difference({"env": {"agents": 2}}, {"env": {"agents": 8}}) == ["env.agents: 2 is now 8"]
    assert configuration.difference({"agents": 2}, {"agents": 8}) == []


def test_a_normaliser_can_be_pickled():
    import pickle

    assert pickle.loads(pickle.dumps(models.Normalizer(3))).count == 0


VAST = np.finfo(np.float32).max  # many an environment's "no bound"


@pytest.mark.parametrize("low, high, wanted", [
    (-1, 1, False), (-2, 2, False), (0, 1, False), (-0.4, 0.4, False), (-np.inf, np.inf, False), (0, np.inf, False),
    (-VAST, VAST, False), (0, VAST, False), (-1e10, 1e10, False), (-1e6, 1e6, True),
    (0, 0, False), (0, 500, True), (-0.01, 0.01, True), (2, 4, True), (-4, -2, True), (7, np.inf, True),
    (-np.inf, -7, True), (0.5, np.inf, False)])
def test_actions_far_from_one_go_through_a_tanh(low, high, wanted):
    space = gymnasium.spaces.Box(low, high, (2,), np.float32)
    assert (models.why_squash(space) is not None) == wanted
    one = gymnasium.spaces.Box(np.float32([-1, low]), np.float32([1, high]))
    assert (models.why_squash(one) is not None) == wanted
    beside = gymnasium.spaces.Box(np.float32([-np.inf, low, 3]), np.float32([np.inf, high, 3]))
    assert (models.why_squash(beside) is not None) == wanted
    assert models.why_squash(gymnasium.spaces.Discrete(5)) is None
    if low == high or high in (VAST, 1e10) or (low in (-np.inf, 0) and high == np.inf):  # nothing would change
        with pytest.raises(TypeError, match="finite bound"):
            models.squash(torch.nn.Identity(), space)
    else:
        models.squash(torch.nn.Identity(), space)


class Ticks(gymnasium.Env):
    """Whether a number near 10^9 is odd says which action pays; 10 steps. In a Dict if `nested`."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype="int64", nested=False):
        self.price = spaces.Box(0, 2e9, (1,), np.dtype(dtype).type)
        self.observation_space = spaces.Dict({"price": self.price, "x": BOX}) if nested else self.price

    def observe(self):
        self.odd = int(self.np_random.integers(2))
        price = np.array([10**9 + self.odd], self.price.dtype)
        return price if self.observation_space is self.price else {"price": price, "x": np.zeros(BOX.shape, BOX.dtype)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return self.observe(), {}

    def step(self, action):
        reward, self.left = float(action == self.odd), self.left - 1
        return self.observe(), reward, self.left == 0, False, {}


class Small(torch.nn.Module):
    """A network of a user's own."""

    def __init__(self, env):
        super().__init__()
        self.body, self.decoder = torch.nn.Linear(1, 16), models.Decoder(16, env.single_action_space)

    def forward(self, observations):
        return self.decoder.split(self.decoder(torch.tanh(self.body(observations.float()))))


def train_ticks(*options):
    args = pufferl.load_config(f"{__file__}:Ticks", [
        "--train.total-timesteps", "20_000", "--train.log-interval", "0", "--data-dir", "none",
        "--logger", "none", "--vec.num-threads", "1", "--vec.backend", "serial", *options])
    return pufferl.train(f"{__file__}:Ticks", args)


@pytest.mark.parametrize("options", [
    ["--env.dtype", "int64"], ["--env.dtype", "float64"], ["--env.nested", "True"],
    ["--policy.name", f"{__file__}:Small", "--train.norm-obs", "True"]])
def test_what_float32_cannot_tell_apart_is_learnt(options):
    """Chance is 5."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*float32")
        assert train_ticks(*options).environment["episode_return"] > 8


@pytest.mark.parametrize("options", [
    ["--train.norm-obs", "False"], ["--env.nested", "True", "--train.norm-obs", "False"],
    ["--policy.name", f"{__file__}:Small"]])
def test_what_float32_cannot_tell_apart_is_told(options):
    field = r"observation\['price'\]" if "--env.nested" in options else "observation"
    with pytest.warns(UserWarning, match=f"{field} has numbers near 100000000.*float32.*--train.norm-obs"):
        train_ticks(*options, "--train.total-timesteps", "512")


class Heating(gymnasium.Env):
    """The observation says which setting, from 0 to 500, is wanted."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(0, 500, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.wanted = 10, self.np_random.random(1, np.float32)
        return self.wanted, {}

    def step(self, action):
        reward, self.left = -abs(float(action[0] / 500 - self.wanted[0])), self.left - 1
        self.wanted = self.np_random.random(1, np.float32)
        return self.wanted, reward, self.left == 0, False, {}


def test_a_range_of_500_is_learnt_without_a_setting(tmp_path):
    """Any constant is at -2.5 or less; without the tanh it stays at -4.9."""
    args = pufferl.load_config(f"{__file__}:Heating", ["--train.total-timesteps", "30_000", "--data-dir", str(tmp_path),
                                                       "--logger", "none", "--vec.num-threads", "1"])
    trainer = pufferl.train(f"{__file__}:Heating", args)
    assert trainer.args["policy"]["squash"] == "tanh" and "policy.squash" in trainer.args["auto"]
    assert trainer.environment["episode_return"] > -1.2


class OneSided(gymnasium.Env):
    """Wants 0.0005 of a number within ±0.001, and 800 of one that is 100 or more; 10 steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(np.array([-0.001, 100.0]), np.array([0.001, np.inf]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        reward = -abs(action[1] - 800) / 100 - abs(action[0] - 0.0005) * 1000
        return np.zeros(1, np.float32), reward, False, self.left == 0, {}


def test_a_number_with_one_bound_is_learnt_beside_one_with_two(tmp_path):
    """A uniform draw of the first number alone gives -6."""
    args = pufferl.load_config(f"{__file__}:OneSided", ["--train.total-timesteps", "60_000", "--logger", "none",
                                                        "--data-dir", str(tmp_path), "--vec.num-threads", "1"])
    trainer = pufferl.train(f"{__file__}:OneSided", args)
    assert trainer.args["policy"]["squash"] == "tanh" and trainer.environment["episode_return"] > -0.75


class Beside(gymnasium.Env):
    """1 for the place of the largest of four numbers, beside which stands a picture of noise; 20 steps."""

    observation_space = spaces.Dict({"numbers": spaces.Box(-1, 1, (4,), np.float32),
                                     "noise": spaces.Box(0, 255, (12, 12, 3), np.uint8)})
    action_space = spaces.Discrete(4)

    def observe(self):
        self.numbers = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return {"numbers": self.numbers, "noise": self.np_random.integers(0, 256, (12, 12, 3)).astype(np.uint8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return self.observe(), {}

    def step(self, action):
        reward, self.left = float(action == self.numbers.argmax()), self.left - 1
        return self.observe(), reward, self.left == 0, False, {}


@pytest.mark.slow
def test_numbers_beside_a_picture_are_learnt():
    """Chance is 5. Through one linear map of both they stayed there."""
    args = pufferl.load_config(f"{__file__}:Beside", ["--train.total-timesteps", "30_000", "--data-dir", "none",
                                                      "--logger", "none", "--vec.num-threads", "1"])
    assert pufferl.train(f"{__file__}:Beside", args).environment["episode_return"] > 15
