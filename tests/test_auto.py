"""What `auto` chooses, normalisation, and the networks that are chosen for users' own environments."""

import contextlib
import dataclasses
import importlib
import json
import math
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
import trainers
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from small_envs import Drawn
from trainers import Tanh, make_trainer, run_epochs

import auto
import configuration
import data_parallel
import environments
import flat_spaces
import models
import pufferl
import vector
from auto import Facts, decide
from errors import NetworkError

ROOT = Path(__file__).resolve().parent.parent
BROUGHT = f"{ROOT}/tests/user_envs.py"
CART, CATCH = f"{BROUGHT}:cartpole", f"{BROUGHT}:Catch"
CUSTOM = f"{trainers.__file__}:Tanh"
CARTPOLES = {"env": "gym/CartPole-v1", "num_envs": 8, "backend": "serial"}
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
AUTOS = {"horizon", "replay_ratio", "minibatch_size", "learning_rate", "target_kl", "gamma",
         "ent_coef", "prio_alpha", "norm_obs", "norm_reward", "min_advantage_std",
         "vf_error_bound"}


def box(low, high, shape, dtype):
    return spaces.Box(low, high, shape, np.dtype(dtype).type)


class Episodes(gymnasium.Env):
    """Episodes of `length` steps; a subclass has observe() and pay(action)."""

    length, cut = 10, False
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return self.observe(), {}

    def step(self, action):
        reward, self.left = float(self.pay(action)), self.left - 1
        end = self.left == 0
        return self.observe(), reward, end and not self.cut, end and self.cut, {}

    def pay(self, action):
        return 0.0


def configure(name, *options, steps=2000):
    return pufferl.load_config(name, ["--train.total-timesteps", str(steps), "--logger", "none",
                                      "--data-dir", "none", "--vec.num-threads", "1", *options])


def train(name, *options, steps=2000):
    return pufferl.train(name, configure(name, *options, steps=steps))


# -- the rules


def test_the_shipped_settings_are_what_they_were(monkeypatch):
    """shipped_settings.json is from before any default was automatic."""
    load = environments.load_creator

    def load_c(name):
        if (ROOT / "ocean" / name).is_dir():
            return load(name)
        settings = {"terminal_on_life_loss": False, "reward_scale": 1.0}
        return SimpleNamespace(name=name, settings=settings)  # its package may be missing

    monkeypatch.setattr(environments, "load_creator", load_c)
    shipped = json.loads(Path(__file__).with_name("shipped_settings.json").read_text())
    for name in {path.stem for path in (ROOT / "config").glob("*.ini")} - {"default"}:
        args = pufferl.load_config(name)
        automatic = {key for key in AUTOS if args["train"][key] == "auto"}
        if automatic == AUTOS:  # learned best so
            assert name.startswith(("gym_", "minigrid", "mpe")) and args["policy"]["name"] == "auto", name
            continue
        assert automatic <= {"target_kl", "min_advantage_std", "vf_error_bound"}, name
        assert args["policy"]["name"] != "auto", name
        for section, values in shipped.pop(name, {}).items():
            assert args[section] == {**args[section], **values}, name
    assert not shipped


@settings(deadline=None, max_examples=200)
@given(agents=st.integers(1, 20_000), steps=st.integers(1, 10**9), discrete=st.booleans(),
       native=st.booleans(),
       costs=st.just((None, None)) | st.tuples(st.floats(1e-7, 1.0), st.floats(1e-7, 1.0)))
def test_the_rules_give_settings_that_work(agents, steps, discrete, native, costs):
    train = dataclasses.asdict(configuration.Train(total_timesteps=steps))
    chosen = decide(train, Facts(agents, steps, discrete, [BOX], native, *costs))
    assert set(chosen) == AUTOS and all(reason for _, reason in chosen.values())
    c = {name: value for name, (value, _) in chosen.items()}
    assert c["minibatch_size"] % c["horizon"] == 0
    assert 0 < c["minibatch_size"] <= agents * c["horizon"]
    assert 1 <= c["replay_ratio"] <= auto.PASSES[discrete] and c["learning_rate"] > 0
    if agents >= 64:  # what made people's environments fail: one update an epoch
        assert c["replay_ratio"] * agents * c["horizon"] / c["minibatch_size"] >= 4


MACHINES = [  # facts, what is set -> what is chosen
    ((64, 300_000, True, [BOX]), {"horizon": 50, "learning_rate": 0.1},
     {"minibatch_size": 500, "target_kl": None, "gamma": 0.99, "ent_coef": 0.01, "vf_error_bound": 0.4,
      "min_advantage_std": 0.1, "prio_alpha": 0.4, "norm_obs": True, "norm_reward": True, "replay_ratio": 4.0}),
    ((64, 300_000, True, [BOX]), {"norm_reward": False}, {"vf_error_bound": math.inf, "min_advantage_std": 0.0}),
    ((64, 300_000, False, [BOX]), {}, {
        "horizon": 32, "replay_ratio": 8.0, "minibatch_size": 512, "learning_rate": 0.005,
        "target_kl": 0.02, "gamma": 0.99, "ent_coef": 0.0, "prio_alpha": 0.0, "vf_error_bound": math.inf}),
    ((1024, 20_000_000, True, [BOX], True), {}, {
        "horizon": 64, "replay_ratio": 2.0, "minibatch_size": 8192, "learning_rate": 0.02,
        "target_kl": 0.01, "min_advantage_std": 0.1, "vf_error_bound": 0.4}),
    ((1, 10**9, False, [BOX]), {}, {"horizon": 256}),
    ((64, 300_000, True, [BOX]), {"optimizer": "adam"}, {"learning_rate": 0.0005}),
    # single steps need no whole segments, but an epoch as large
    ((16, 100_000, True, [BOX]), {"minibatch_size": 127, "draw": "steps"}, {"horizon": 64}),
    ((16, 100_000, True, [BOX]), {"minibatch_size": 2000, "draw": "steps"}, {"horizon": 125}),
    *(((agents, 300_000, True, [BOX]), {"minibatch_size": size}, {"horizon": horizon})
      for size, agents, horizon in ((1000, 64, 40), (4096, 64, 64), (512, 1, 512), (96, 8, 48))),
    # what was measured
    ((64, 10**7, True, [BOX], False, 1e-3, 1e-3), {}, {"replay_ratio": 1.0}),
    ((64, 10**7, True, [BOX], False, 2e-3, 1e-3), {}, {"replay_ratio": 2.0}),
    ((64, 10**7, False, [BOX], False, 1.0, 1e-6), {}, {"replay_ratio": 8.0}),
    # every episode is cut off after so many steps
    *(((64, 300_000, True, [BOX], False, None, None, cut), {}, {"gamma": gamma})
      for cut, gamma in ((1, 0.5), (25, 0.96), (100, 0.99), (500, 0.99))),
]


@pytest.mark.parametrize(("facts", "given", "expected"), MACHINES)
def test_the_rules_choose(facts, given, expected):
    given = {"total_timesteps": facts[1], **given}
    chosen = decide(dataclasses.asdict(configuration.Train(**given)), Facts(*facts))
    assert set(chosen) == AUTOS - set(given)
    assert {name: chosen[name][0] for name in expected} == expected


IMAGE = box(0, 255, (8, 8, 3), "uint8")  # in C, a linear map reads it


@pytest.mark.parametrize(("fields", "expected"), [
    ([BOX], True), ([box(-1.0, 1.0, (3,), "float32")], False),
    ([box(-2.0, 2.0, (3,), "float32")], False), ([box(-2.5, 2.0, (3,), "float32")], True),
    ([spaces.Box(np.float32([-1.2, -0.07]), np.float32([0.6, 0.07]))], True),
    ([IMAGE], False), ([box(0, 4, (6, 6), "int64")], False), ([box(0, 255, (128,), "uint8")], True),
    ([box(0, 10, (3,), "int64")], False), ([box(0, 20_000, (2,), "int64")], True),
    ([spaces.Discrete(16)], False),
    *(([box(-1.0, 1.0, (3,), "float32"), other], False)
      for other in (box(0, 32, (3,), "int64"), spaces.Discrete(9), IMAGE))])
def test_what_is_normalised(fields, expected):
    chosen, reason = auto.wants_normalising(Facts(64, 1000, True, fields))
    assert chosen is expected and ("aside" in reason) == (len(fields) > 1)
    assert auto.wants_normalising(Facts(64, 1000, True, [IMAGE], native=True))[0]


def test_auto_takes_a_gpu_where_it_is_faster(monkeypatch):
    fused = importlib.import_module("fast.fused")

    def device(name, *options):
        """Return train.device as the train command chooses it, and the reason."""
        args = configure(name, *options)
        vecenv = pufferl.load_env(name, args)
        pufferl.choose_device(vecenv, args)
        vecenv.close()
        return args["train"]["device"], args["auto"].get("train.device")

    assert device("breakout") == ("auto", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen, reason = device("breakout")
    assert chosen == "cpu" and reason.startswith("a GPU is here, but train.device = cuda: ")
    monkeypatch.setattr(fused, "check_gpu", lambda: None)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **options: ones(*size, **options))
    assert device("breakout") == ("cuda", "4,096 agents in C")
    assert device("squared", "--env.num-envs", "8") == ("cpu", "few agents and a small network")
    assert device("squared", "--env.num-envs", "8", "--policy.hidden-size", "256")[0] == "cuda"
    assert device(f"{BROUGHT}:Catch")[0] == "cpu"
    pictures = device(f"{BROUGHT}:CatchImage")
    assert pictures == ("cuda", "observations are pictures")
    assert device("breakout", "--train.device", "cpu") == ("cpu", None)
    assert device("breakout", "--train.engine", "compiled") == ("auto", None)
    monkeypatch.setattr(data_parallel, "_connected", SimpleNamespace(count=2, rank=0))
    args = configure("squared")
    pufferl.choose_device(None, args)
    assert args["train"]["device"] == "auto"


def test_the_printed_flags_repeat_the_run_and_a_resume_has_them(tmp_path, capsys):
    def run(*more, steps=6000, folder="a"):
        trainer = train(f"{BROUGHT}:PointMass", "--vec.num-envs", "16", "--vec.backend", "serial",
                        "--data-dir", str(tmp_path / folder), *more, steps=steps)
        lines = capsys.readouterr().out.splitlines()
        return trainer, [line.partition(" ")[2] for line in lines if line.startswith("auto: ")]

    first, lines = run()
    flags = [line.partition("  #") for line in lines]
    assert len(flags) == len(AUTOS) and all(reason.strip() for *_, reason in flags)
    second, lines = run(*" ".join(words for words, *_ in flags).split(), folder="b")
    assert not lines
    assert torch.equal(first.arena.flat("weights"), second.arena.flat("weights"))
    saved = json.loads((first.run_folder / "config.json").read_text())
    assert saved["train"]["norm_obs"] is True
    assert set(saved["auto"]) == {f"train.{name}" for name in AUTOS}
    saved["auto"]["train.device"], saved["train"]["device"] = "pictures", "cuda"
    (first.run_folder / "config.json").write_text(json.dumps(saved))  # of a machine with a GPU
    resumed, lines = run("--resume", str(first.run_folder), steps=9000)
    assert not lines and resumed.config["horizon"] == first.config["horizon"]
    assert resumed.config["device"] == "auto"
    assert resumed.normalizer.count > first.normalizer.count


def test_an_environment_that_one_process_cannot_hold_twice_is_not_measured(monkeypatch):
    load, calls = pufferl.load_env, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise RuntimeError("one emulator a process")
        return load(*arguments)

    monkeypatch.setattr(pufferl, "load_env", once)
    trainer = train(CART, "--vec.num-envs", "8", "--vec.backend", "serial")
    assert trainer.config["replay_ratio"] == 4 and len(calls) == 2


@pytest.mark.parametrize(("name", "option", "gamma"), [
    ("PointMass", "--env.length=25", 0.96), ("Catch", "--env.size=7", 0.99)])
def test_episodes_that_are_all_cut_off_soon_shorten_the_view(name, option, gamma):
    assert train(f"{BROUGHT}:{name}", option, steps=3000).config["gamma"] == gamma


@pytest.mark.parametrize(("exchange", "options", "backend"), [
    (10.0, [], "serial"), (0.0, [], "auto"), (10.0, ["--vec.num-workers", "2"], "auto"),
    (10.0, ["--vec.backend", "multiprocessing"], "multiprocessing")])
def test_environments_that_are_quicker_than_messages_stay_in_this_process(
        monkeypatch, exchange, options, backend):
    monkeypatch.setattr(vector, "physical_cores", lambda: 2)
    monkeypatch.setattr(pufferl, "MESSAGE_SECONDS", exchange)
    trainer = train(CATCH, "--vec.num-envs", "8", *options, steps=256)
    kind = vector.Serial if backend == "serial" else vector.Multiprocessing
    assert type(trainer.vecenv) is kind and trainer.args["vec"]["backend"] == backend
    assert ("vec.backend" in trainer.args["auto"]) == (backend == "serial")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40), ended=st.booleans(),
       agents=st.integers(1, 3))
def test_how_episodes_end(lengths, ended, agents):
    truncations = np.zeros((sum(lengths) + 3, agents), np.uint8)
    truncations[np.cumsum(lengths) - 1] = 1
    terminals = np.zeros_like(truncations)
    terminals[-1, -1] = ended
    enough = len(lengths) * agents >= pufferl.MEASURED_EPISODES
    expected = lengths[0] if enough and len(set(lengths)) == 1 and not ended else None
    assert pufferl.find_cutoff(terminals, truncations) == expected


# -- normalisation


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), offset=st.floats(-1e4, 1e4),
       seed=st.integers(0, 99), dtype=st.sampled_from([np.float32, np.float64, np.int16]))
def test_moments_are_those_of_all_valid_rows(sizes, offset, seed, dtype):
    """Also of ranks, which merge to what one would have."""
    rng, normalizer, seen = np.random.default_rng(seed), models.Normalizer(3), []
    ranks, parts = models.Normalizer(3), []
    for size in sizes:
        rows = (rng.normal(size=(size, 3)) * [1, 10, 100] + offset).astype(dtype)
        valid = rng.random(size) < 0.7
        seen.append(rows[valid].astype(np.float64))
        both = torch.from_numpy(rows), torch.from_numpy(valid.astype(np.uint8))
        normalizer.merge([normalizer.moments(*both)])
        parts.append(ranks.moments(*both))
    ranks.merge(parts)
    rows = np.concatenate(seen)
    for one in (normalizer, ranks):
        assert one.count == len(rows)
        if len(rows):
            np.testing.assert_allclose(one.mean, rows.mean(0), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(one.squares / one.count, rows.var(0), rtol=1e-6, atol=1e-6)


def test_normalised_observations_are_clipped_deviations():
    normalizer, rows = models.Normalizer(2), torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    assert pickle.loads(pickle.dumps(normalizer)).count == 0
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
    rewards = rng.normal(2, 50, (10, 3)).astype(np.float32)
    resets = (rng.random((11, 3)) < 0.2).astype(np.uint8)
    valid = (rng.random((11, 3)) < 0.8).astype(np.uint8)
    scale = models.RewardScale(3, gamma)
    for rows in (slice(0, cut), slice(cut, 10)):
        parts = scale.measure_returns(*(torch.from_numpy(array[rows]) for array in (rewards, resets, valid)))
        scale.merge(scale.moments, [parts])
    returns, seen, weights = np.zeros(3), [], []
    old = math.exp(-(10 - cut) * (1 - gamma) / 25)  # what the first rollout counts in the end
    for t in range(10):
        returns[resets[t] != 0] = 0.0  # also of an agent that is inactive at its reset
        for i in range(3):
            returns[i] = (gamma if valid[t, i] else 1.0) * returns[i] + rewards[t, i]
            if valid[t, i]:
                seen.append(returns[i])
                weights.append(old if t < cut else 1.0)
    np.testing.assert_allclose(scale.returns, returns, rtol=1e-5, atol=1e-5)
    if seen:
        mean = np.average(seen, weights=weights)
        variance = np.average((seen - mean) ** 2, weights=weights)
        assert scale.factor == pytest.approx((variance + 1e-8) ** -0.5, rel=1e-6)


@pytest.mark.parametrize(("base", "gain"), [(-1e5, 1.0), (100.0, 1e-3), (5.0, 0.0)])
def test_the_value_target_is_near_1_for_any_offset_and_scale_of_rewards(base, gain):
    class Choice(Episodes):
        observation_space, action_space, length = box(0, 1, (4,), "float32"), spaces.Discrete(4), 1

        def observe(self):
            self.right = int(self.np_random.integers(4))
            return np.eye(4, dtype=np.float32)[self.right]

        def pay(self, action):
            return base + gain * (action == self.right)

    trainer = make_trainer(env=Choice, policy=lambda env: models.FeedForward(env, 32), num_envs=32,
                           backend="serial", horizon=32, minibatch_size=256, replay_ratio=4.0,
                           learning_rate=0.005, norm_reward=True, total_timesteps=40_000)
    for _ in range(30):
        trainer.evaluate()
        losses = trainer.train()
        assert losses["value_loss"] < 100.0  # half the square of RewardScale.FAR, and what is learnt
    right = (trainer.storage["rewards"] - base) > gain / 2
    assert gain == 0.0 or right.float().mean() > 0.9
    trainer.release()


def test_what_is_only_measured():
    normalizer = models.Normalizer(2)
    for count, begun, steps, expected in (
            (0, 0, 10**9, True), (0, 5_000, 10**9, True),  # nothing active was seen yet
            (300, 768, 10**9, True), (300, 1024, 10**9, False), (300, 99, 2000, True),
            (300, 100, 2000, False), (1024, 0, 10**9, False)):  # loaded, or resumed
        normalizer.count.fill_(count)
        assert normalizer.is_warmup(begun, steps) == expected


# -- networks


KINDS = {
    "board": [box(0, 4, (6, 6), "int64"), box(0, 1, (10, 10, 4), bool), box(-1, 1, (2, 8, 8), "int8"),
              box(0, 10, (7, 7, 3), "uint8")],
    "image": [box(0, 255, (84, 84, 3), "uint8"), box(0, 255, (7, 7, 3), "uint8"),
              box(0, 255, (84, 84), "uint8"), box(0, 255, (4, 32, 40, 3), "uint8"),
              box(0.0, 255.0, (64, 64), "float64"), box(0, 1, (84, 84, 1), "uint8")],
    "numbers": [box(0, 255, (31, 40), "uint8"), box(-1.0, 1.0, (64, 64), "float32"),
                box(0, 255, (12,), "uint8"), box(0, 1000, (6, 6), "int64"),
                box(0.0, 1.0, (7, 7), "float32"), box(0, 2**64 - 1, (5, 5), "uint64")],
    "choices": [spaces.Discrete(5)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_fits_what_is_seen(kind):
    assert {flat_spaces.leaf_kind(space) for space in KINDS[kind]} == {kind}


@pytest.mark.parametrize("space", KINDS["board"][:3], ids=str)
def test_planes_are_one_hot(space):
    planes = models._Planes(space)
    space.seed(1)
    boards = np.stack([space.sample() for _ in range(3)])
    out = planes(torch.from_numpy(boards))
    assert out.shape == (3, planes.planes, *sorted(space.shape)[-2:])
    if space.dtype == bool:
        np.testing.assert_array_equal(out.numpy(), boards.transpose(0, 3, 1, 2))
    else:
        hot = out.unflatten(1, (planes.channels, -1))
        assert (hot.sum(2) == 1).all()
        whole = boards if boards.ndim == 4 else boards[:, None]
        np.testing.assert_array_equal(hot.argmax(2).numpy() + space.low.min(), whole)


def test_a_dict_gets_one_encoder_a_key_and_a_memory():
    space = spaces.Dict(board=box(0, 2, (5, 5), "int8"), mode=spaces.Discrete(3),
                        speed=box(-9.0, 9.0, (2,), "float32"))
    with vector.make(lambda **_: Drawn(space, spaces.Discrete(2)), 8, "serial") as vecenv:
        args = configure("squared", "--policy.name", "auto", "--policy.hidden-size", "16",
                         "--train.norm-obs", "auto")
        policy = pufferl.load_policy(args, vecenv)
        assert isinstance(policy, models.MinGRUWrapper)
        assert sorted(kind for *_, kind in policy.policy.leaves) == ["board", "choices", "numbers"]
        assert {"board", "one-hot", "MinGRU"} <= set(re.findall(r"[\w-]+", models.summarize(policy)))
        trainer = pufferl.PuffeRL({"data_dir": None, "total_timesteps": 20_000}, vecenv, policy)
        assert trainer.config["norm_obs"]
        run_epochs(trainer, 3)
        observations = trainer.storage["observations"][: trainer.horizon].flatten(0, 1)
        numbers = trainer.normalizer.read(observations)
        assert numbers.shape[1] == 2 and float(trainer.normalizer.scale.max()) < 1
        trainer.release()
        with pytest.raises(NetworkError, match="array"):  # a custom network has one input
            models.Normalized(vecenv.driver_env, torch.nn.Identity())


class Narrow(Tanh):
    def forward(self, observations):
        return super().forward(observations[:, :3])


def test_a_fault_of_a_plain_network_names_its_form():
    with pytest.raises(RuntimeError) as error:
        run_epochs(make_trainer(**CARTPOLES, policy=Narrow), 1)
    assert "forward(observations)" in " ".join(error.value.__notes__)


def test_target_kl_moves_the_learning_rate_towards_it():
    trainer = make_trainer(**CARTPOLES, policy=Tanh, total_timesteps=10**6, horizon=64,
                           learning_rate=1e-5, target_kl=0.01)
    run_epochs(trainer, 20)
    assert trainer.learning_rate == pytest.approx(4e-5, rel=1e-2), "four times what was set"
    assert trainer.losses["learning_rate"] <= trainer.learning_rate * 1.01
    trainer.global_step, trainer._rate_factor = 8 * 10**5, 9.5
    assert trainer._adapt_rate(0.0) == 10.0, "late, when the schedule is a tenth, ten times that"
    trainer.release()


def test_target_kl_needs_two_minibatches_an_epoch():
    trainer = make_trainer(**CARTPOLES, policy=Tanh, horizon=64, target_kl=0.01,
                           minibatch_size=512, replay_ratio=1)
    run_epochs(trainer, 5)
    assert abs(trainer.losses["approx_kl"]) < 1e-9 and trainer._rate_factor == 1
    trainer.release()


class Normalising(Tanh):
    def __init__(self, env):
        super().__init__(env)
        self.normalizer = models.Normalizer(4)

    def forward(self, observations):
        return super().forward(self.normalizer(observations))


def run_cart(folder, *options, steps=2000):
    return train(CART, "--vec.num-envs", "8", "--vec.backend", "serial", "--data-dir", str(folder),
                 *options, steps=steps)


def test_a_network_that_normalises_itself_is_not_wrapped(tmp_path):
    first = run_cart(tmp_path, "--policy.name", f"{__file__}:Normalising", "--train.horizon", "32",
                     "--train.norm-obs", "True")
    assert type(first.policy).__name__ == "Normalising" and first.normalizer.count > 0
    resumed = run_cart(tmp_path, "--resume", str(first.run_folder), steps=3000)
    assert type(resumed.policy).__name__ == "Normalising"
    assert resumed.normalizer.count > first.normalizer.count
    args = configure(CART, "--load-model-path", str(first.run_folder), "--vec.num-envs", "8")
    with pufferl.load_env(CART, args) as vecenv:
        loaded = pufferl.load_policy(args, vecenv, CART)
    assert torch.equal(loaded.normalizer.squares, resumed.normalizer.squares)


def test_what_starts_from_normalised_weights_can_be_resumed(tmp_path):
    first = run_cart(tmp_path, "--train.norm-obs", "True")
    second = run_cart(tmp_path, "--load-model-path", str(first.run_folder), "--train.norm-obs",
                      "False")
    assert second.config["norm_obs"] is True and second.normalizer is not None
    resumed = run_cart(tmp_path, "--resume", str(second.run_folder), steps=3000)
    assert resumed.normalizer is not None


def test_reward_scaling_may_begin_and_cease_at_a_resume(tmp_path, capsys):
    scaled, plain = (make_trainer(tmp_path, norm_reward=value) for value in (True, False))
    paths = []
    for trainer in (scaled, plain):
        run_epochs(trainer, 1)
        paths.append(trainer.save_checkpoint(tmp_path / f"{len(paths)}.pt"))
    capsys.readouterr()
    plain.load_checkpoint(paths[0])
    scaled.load_checkpoint(paths[1])
    assert "episodes" not in capsys.readouterr().out


def test_a_rate_that_is_set_at_a_resume_is_used(tmp_path):
    first = run_cart(tmp_path, steps=20000)
    assert first._rate_factor != 1
    second = run_cart(tmp_path, "--resume", str(first.run_folder), "--train.target-kl", "none",
                      "--train.learning-rate", "0.001", "--train.anneal-lr", "False", steps=24000)
    assert second.learning_rate == 0.001


# -- actions and observations of any size


VAST = np.finfo(np.float32).max  # many an environment's "no bound"
INF = np.inf


@pytest.mark.parametrize(("low", "high", "is_wanted", "is_possible"), [
    (-2, 2, False, True), (-0.4, 0.4, False, True), (-1e6, 1e6, True, True), (0, 500, True, True),
    (-0.01, 0.01, True, True), (2, 4, True, True), (-4, -2, True, True),
    (7, INF, True, True), (-INF, -7, True, True), (0.5, INF, False, True),
    (-INF, INF, False, False), (0, INF, False, False), (-VAST, VAST, False, False),
    (0, 0, False, False)])
def test_actions_far_from_one_go_through_a_tanh(low, high, is_wanted, is_possible):
    space = box(low, high, (2,), "float32")
    one = spaces.Box(np.float32([-1, low]), np.float32([1, high]))
    beside = spaces.Box(np.float32([-INF, low, 3]), np.float32([INF, high, 3]))
    for each in (space, one, beside):
        assert (auto.why_squash(each) is not None) == is_wanted
    with contextlib.nullcontext() if is_possible else pytest.raises(NetworkError):
        models.squash(torch.nn.Identity(), space)


class Ticks(Episodes):
    """Whether a number near 10^9 is odd says which action pays. In a Dict if `nested`."""

    def __init__(self, dtype="int64", nested=False):
        self.price = box(0, 2e9, (1,), dtype)
        self.observation_space = (spaces.Dict({"price": self.price, "x": BOX}) if nested
                                  else self.price)

    def observe(self):
        self.odd = int(self.np_random.integers(2))
        price = np.array([10**9 + self.odd], self.price.dtype)
        nested = self.observation_space is not self.price
        return {"price": price, "x": np.zeros(BOX.shape, BOX.dtype)} if nested else price

    def pay(self, action):
        return action == self.odd


def train_ticks(*options, steps=20_000):
    return train(f"{__file__}:Ticks", "--train.log-interval", "0", "--vec.backend", "serial",
                 *options, steps=steps)


@pytest.mark.parametrize("options", [
    ["--env.nested", "True"], ["--policy.name", CUSTOM, "--train.norm-obs", "True"]])
def test_what_float32_cannot_tell_apart_is_learnt(options):
    """Chance is 5."""
    assert train_ticks(*options).environment["episode_return"] > 8


class OneSided(Episodes):
    """Wants 0.0005 of a number within ±0.001, and 800 of one that is 100 or more."""

    cut, observation_space = True, box(-1, 1, (1,), "float32")
    action_space = spaces.Box(np.array([-0.001, 100.0]), np.array([0.001, INF]), dtype=np.float64)

    def observe(self):
        return np.zeros(1, np.float32)

    def pay(self, action):
        return -abs(action[1] - 800) / 100 - abs(action[0] - 0.0005) * 1000


def test_actions_of_any_size_are_learnt_without_a_setting():
    """A uniform draw of the first number alone gives -6."""
    trainer = train(f"{__file__}:OneSided", "--train.replay-ratio", "8", steps=60_000)  # not measured
    assert trainer.args["policy"]["squash"] == "tanh" and "policy.squash" in trainer.args["auto"]
    assert trainer.environment["episode_return"] > -0.75
