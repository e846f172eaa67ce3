"""Scripts and command lines for PufferLib run here (docs/from_pufferlib.md)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import reference
import torch
from gymnasium.spaces import Box
from small_envs import Leavers, Steps

import absolute_imports
import configuration
import emulation
import models
import pufferl
import pufferlib
import pufferlib.cleanrl
import pufferlib.models
import pufferlib.ocean
import pufferlib.pytorch
import pufferlib.spaces
import pufferlib.vector
import vector
from errors import ConfigError, EnvError
from pufferlib import NoLogger, Protein, PuffeRL
from pufferlib.environments import classic_control
from pufferlib.ocean import Breakout, Squared
from tools.sweep import command as sweep

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_torch_thread")
Serial, Multiprocessing = pufferlib.vector.Serial, pufferlib.vector.Multiprocessing


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_epochs(trainer, count=2):
    for _ in range(count):
        trainer.evaluate()
        losses = trainer.train()
        metrics = trainer.mean_and_log()
    assert np.isfinite(losses["policy_loss"]) and metrics["performance/epoch"] == trainer.epoch
    assert trainer.stats == trainer.last_stats == trainer.environment  # PufferLib's names for it


# -- import names


def test_names_lead_to_ours():
    assert vector.__spec__.name == "vector" and vector.__name__ == "vector"
    for theirs, ours in ((pufferlib.pufferl, pufferl), (pufferlib.vector, vector),
                         (pufferlib.PuffeRL, pufferl.PuffeRL), (pufferlib.make, vector.make),
                         (pufferlib.spaces.Box, gymnasium.spaces.Box),
                         (pufferlib.ocean.breakout.breakout.Breakout, Breakout)):
        assert theirs is ours
    assert issubclass(pufferlib.PufferEnv, emulation.PufferEnv)
    assert pufferlib.ocean.NMMO3.ocean_name == "nmmo3"
    for name in pufferlib.NAMES:
        assert pufferlib.find(name.rpartition(".")[0], name.rpartition(".")[2]) is not None
    for module in {**pufferlib.MODULES, **pufferlib.ALIASES}:
        assert importlib.util.find_spec(f"pufferlib.{module}") is not None, module


def test_environments_of_families_have_names_here():
    assert classic_control.env_creator("cartpole").name == "gym/CartPole-v1"
    assert pufferlib.environments.atari.env_creator("ms_pacman").name == "gym/ALE/MsPacman-v5"
    for family, (default, _, special) in pufferlib.FAMILIES.items():
        for name in (default, *special):
            assert getattr(pufferlib.environments, family).env_creator(name) is not None


def test_a_name_without_an_equivalent_is_told_what_took_its_place():
    for name, text in pufferlib.GONE.items():
        path, _, attribute = name.rpartition(".")
        with pytest.raises(AttributeError, match=re.escape(text)):
            pufferlib.find(path, attribute)
    with pytest.raises(ModuleNotFoundError, match="vectr"):
        importlib.import_module("pufferlib.vectr")


def run_python(*command, fails=False):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr.splitlines()[-1] if fails else done.stdout


def test_importing_it_loads_no_torch_and_the_trainer_does_not_load_it():
    imports = ("import sys, pufferlib.ocean, pufferlib.spaces; from pufferlib.ocean import Breakout;"
               "from pufferlib.environments import atari")
    for code, name in ((imports, "torch"), ("import sys, pufferl", "pufferlib")):
        assert run_python("-c", f"{code}; print({name!r} in sys.modules)") == "False\n"


@pytest.mark.parametrize("module", ["pufferlib.emulation", "tools.watch", "ocean"])
def test_a_file_of_a_user_may_have_the_name_of_ours(module, tmp_path):
    for name in absolute_imports.NAMES - {module.partition(".")[0], "absolute_imports"}:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    script = tmp_path / "vector.py"  # itself
    script.write_text(f"import {module} as ours\nprint(ours.__file__)\n")
    assert str(ROOT) in run_python(script)


def test_a_copy_without_a_folder_takes_it_from_no_other_copy(monkeypatch, tmp_path):
    monkeypatch.setattr(absolute_imports, "ROOT", tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no fast"):
        absolute_imports.find_spec("fast")


@pytest.mark.parametrize(("code", "file"), [
    ("import emulation\nimport pufferlib", "emulation.py"),
    ("import helper\nimport pufferl", "emulation.py"),
    ("import protein\ndef later():\n    from ocean.a import b", "ocean/__init__.py")])
def test_a_file_that_is_imported_by_the_name_of_ours_is_refused(code, file, tmp_path):
    (tmp_path / "emulation.py").write_text("mine = 1\n")
    (tmp_path / "helper.py").write_text("import helper, emulation\n")
    (tmp_path / "ocean").mkdir()
    (tmp_path / "ocean/__init__.py").touch()
    (tmp_path / "script.py").write_text(code)
    last = run_python(tmp_path / "script.py", fails=True)
    assert last.startswith("errors.ConfigError")
    assert str(tmp_path / file) in last and str(ROOT / file) in last


def test_a_file_beside_an_environment_or_a_network_too(tmp_path):
    net = "from models import FeedForward\n\nclass Net(FeedForward):\n    pass\n"
    (tmp_path / "models.py").write_text(net)
    (tmp_path / "mine.py").write_text("from models import Net\n")
    mine = f"{tmp_path}/mine.py:Net"
    for words in ([mine], ["squared", "--policy.name", mine]):
        with pytest.raises(SystemExit) as error:
            pufferl.main(["train", *words])
        for folder in (tmp_path, ROOT):
            assert str(folder / "models.py") in str(error.value)
    args = pufferl.load_config("squared", ["--policy.name", f"{tmp_path}/models.py:Net"])
    assert args["policy"]["name"].endswith("models.py:Net"), "it imports ours, and not itself"


@pytest.mark.slow
def test_modules_run_as_commands():
    assert "usage: python pufferl.py" in run_python("-m", "pufferlib.pufferl", "--help")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2")
    text = run_python(*torchrun, "-m", "pufferlib.pufferl", "train", "puffer_squared", "--slowly",
                      "--train.total-timesteps", "4096", "--env.num-envs", "32",
                      "--train.batch-size", "2048", "--train.minibatch-size", "1024")
    assert "64 agents × horizon 32" in text and "engine autograd" in text and "4,096 steps" in text


# -- vectorization


def test_backends_of_the_tutorial():
    cartpole = classic_control.env_creator("cartpole")
    with vector.make(cartpole, num_envs=4, backend="Serial") as vecenv:
        assert type(vecenv) is Serial
    with vector.make(cartpole, num_envs=4, backend="Multiprocessing", num_workers=2,
                     batch_size=2) as vecenv:
        vecenv.async_reset()
        assert len(vecenv.recv()[0]) == 2
        vecenv.send(vecenv.action_space.sample())
    with pytest.raises(pufferlib.APIUsageError):
        vector.make(cartpole, num_envs=1, num_workers=2, batch_size=3, backend=Multiprocessing)
    for backend in (pufferlib.vector.Native, pufferlib.PufferEnv):
        with vector.make(Squared, backend=backend, env_kwargs={"num_envs": 2}) as vecenv:
            assert type(vecenv) is vector.Native and vecenv.num_agents == 2
    env = Squared(num_envs=4, distance=2)
    assert env.reset(seed=3)[0].shape == (4, 5, 5)
    env.close()


def test_make_gives_unknown_keywords_to_the_environment():
    assert pufferlib.make("squared", num_envs=4, distance=2).single_observation_space.shape == (5, 5)
    for name in ("gym/CartPole-v1", gymnasium.envs.classic_control.CartPoleEnv):
        with pytest.raises(ConfigError, match="distanse"):
            pufferlib.make(name, distanse=2)


class Raised(Squared):
    def step(self, actions):
        result = super().step(actions)
        self.rewards += 0.25
        return result


class Shaped(pufferlib.PufferEnv):
    def step(self, actions):
        observations, rewards, dones, infos = super().step(actions)
        return observations, rewards + 0.25, dones, infos


SHAPED = [(Raised, {"num_envs": 32}), (lambda: Shaped(Squared(num_envs=32)), {}),
          (lambda: Shaped("puffer_squared", num_envs=32), {})]


@pytest.mark.parametrize(("creator", "options"), SHAPED, ids=["subclass", "instance", "name"])
def test_rewards_are_shaped_over_an_environment_in_c(creator, options):
    """By a subclass of its class, or around it; a second copy has other episodes."""
    shaped = vector.make(creator, num_envs=2, backend=Serial, env_kwargs=options, seed=5)
    plain = vector.make("squared", num_envs=32, seed=5)
    with plain, shaped:
        first, second = shaped.reset(seed=5)[0].reshape(2, 32, -1)
        assert (first == plain.reset(seed=5)[0].reshape(32, -1)).all() and (first != second).any()
        total = 0
        for _ in range(40):
            actions = shaped.action_space.sample()
            expected, results = plain.step(actions[:32])[:3], shaped.step(actions)
            expected[1][:] += 0.25
            for ours, theirs in zip(results, expected, strict=False):
                np.testing.assert_array_equal(ours[:32].reshape(32, -1), theirs.reshape(32, -1))
            total += expected[2].sum()
        assert total > 0


class Counter(pufferlib.PufferEnv):
    """As PufferLib allows: it binds its arrays once, and clears none."""

    def __init__(self, num_envs=2, bonus=0.0, buf=None, seed=0):
        self.single_observation_space = Box(0, 100, (1,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(3)
        self.num_agents = num_envs
        super().__init__(buf)
        self.bound, self.paid, self.bonus = self.observations, self.rewards, bonus

    def reset(self, seed=None):
        self.bound[:] = 0
        return self.observations, []

    def step(self, actions):
        self.bound[:, 0] += actions
        self.paid[:] = actions + self.bonus
        self.terminals[:] = self.bound[:, 0] > 5
        self.bound[self.terminals] = 0
        return self.observations, self.rewards, self.terminals, self.truncations, [{"score": 1.0}]


def test_an_environment_may_keep_its_arrays():
    for backend in (Serial, Multiprocessing):
        with vector.make([Counter, Counter], num_envs=2, backend=backend, env_args=[[1], [1]],
                         env_kwargs=[{"bonus": 1.0}, {"bonus": 2.0}]) as vecenv:
            seen = vecenv.reset()[0].copy()
            for _ in range(8):
                actions, before = vecenv.action_space.sample(), seen
                seen, rewards, terminals = (array.copy() for array in vecenv.step(actions)[:3])
                assert (rewards - actions == [1.0, 2.0]).all()
                assert (seen[:, 0] == np.where(terminals, 0, before[:, 0] + actions)).all()
    assert configuration.stem_of("puffer_breakout") == "breakout"
    assert configuration.coerce("auto", int | None, "[vec] num_workers") is None
    env = Counter()
    env.async_reset()
    env.send(np.array([1, 2]))
    assert env.recv()[1].tolist() == [1, 2]


def test_a_truncation_bootstraps_from_a_final_observation_of_its_step():
    class Cut(Counter):
        count = 0

        def step(self, actions):
            result = super().step(actions)
            self.terminals[0], self.truncations[0] = self.count == 1, self.count != 1
            self.count += 1
            if self.count < 4:
                self.final_observations[0] = 7 * (self.count < 3)  # 0 is an observation, too
            return result

    with vector.make(Cut, backend=Serial) as vecenv:
        vecenv.reset()
        for is_written, final in ((True, 7), (False, 0), (True, 0), (False, 0)):
            _, _, terminals, truncations, _ = vecenv.step(np.array([1, 1]))
            assert terminals.tolist() == [not is_written, False]
            assert truncations.tolist() == [is_written, False]
            assert vecenv.storage.final_observations[0, 0] == final


@pytest.mark.parametrize("change", [
    lambda result: (result[0], np.ones(1), *result[2:]), lambda result: (result[0][:1], *result[1:]),
    lambda result: None, lambda result: (*result[:2], False, *result[3:]),
    lambda result: (*result[:-1], {}), lambda result: (*result, {}, {})])
def test_a_wrong_return_is_an_error_that_names_the_call(change):
    class Wrong(Counter):
        def step(self, actions):
            return change(super().step(actions))

    with vector.make(Wrong, backend=Serial) as vecenv:
        vecenv.reset()
        with pytest.raises(EnvError, match=r"step\(\)"):
            vecenv.step(np.array([1, 1]))


def test_the_template_for_environments_in_c():
    from pufferlib.ocean.squared.cy_squared import CySquared

    results = np.zeros((8, 49), np.uint8), np.zeros(8, np.float32), np.zeros(8, bool)
    observations, rewards, terminals = results
    actions = np.zeros(8, np.int32)
    theirs = CySquared(observations, actions, rewards, terminals, 8, 7)
    theirs.reset()
    with vector.make("squared", num_envs=8, distance=3) as ours:
        assert pufferlib.pytorch.nativize_dtype(ours)[:2] == (torch.uint8, (7, 7))
        assert (ours.reset()[0].reshape(8, -1) == observations).all()
        for _ in range(30):
            actions[:] = ours.action_space.sample()
            theirs.step()
            for expected, result in zip(ours.step(actions)[:3], results, strict=True):
                np.testing.assert_array_equal(expected.reshape(result.shape), result)


# -- emulation


class NoSeed(Steps):
    action_space = gymnasium.spaces.MultiDiscrete([2, 5])

    def reset(self):
        return super().reset()


def test_emulation_of_structured_spaces():
    space = gymnasium.spaces.Dict(a=Box(-1, 1, (2,)), b=Box(2, 3, (3,)))
    coins = NoSeed(None, 3, lambda t: {"observation": space.sample(), "info": {"coins": 2}}, space)
    env = pufferlib.emulation.GymnasiumPufferEnv(env=pufferlib.EpisodeStats(coins), buf=None)
    flat, _ = env.reset()
    tensors = pufferlib.pytorch.nativize_tensor(torch.from_numpy(flat),
                                                pufferlib.pytorch.nativize_dtype(env.emulated))
    np.testing.assert_array_equal(tensors["b"], flat.view(env.obs_dtype)["b"][0])
    for _ in range(3):
        *_, info = env.step(env.action_space.sample())
    assert (info["coins"], info["episode_return"], info["episode_length"]) == (6, 3, 3)


class ResetWithoutOptions(Leavers):
    def reset(self, seed=None):
        return super().reset(seed)


def test_emulation_of_a_reset_without_options():
    env = pufferlib.emulation.PettingZooPufferEnv(
        env=pufferlib.MeanOverAgents(ResetWithoutOptions()), buf=None)
    assert set(env.reset()[0]) == {"a", "b", "c"}
    assert dict(env.step(dict.fromkeys("abc", 0))[1]) == dict.fromkeys("abc", 1.0)


def test_small_wrappers():
    pixels = np.arange(48, dtype=np.uint8).reshape(8, 6)
    picture = Steps(change=lambda t: {"observation": pixels},
                    observation_space=Box(0, 255, (8, 6), np.uint8))
    env = pufferlib.ResizeObservation(picture, downscale=2)
    assert env.observation_space.shape == (4, 3) and env.reset()[0].tolist()[1] == [12, 14, 16]
    assert list(pufferlib.unroll_nested_dict({"a": {"b": 1}, "c": 2})) == [("a/b", 1), ("c", 2)]
    assert pufferlib.wrappers.PettingZooTruncatedWrapper(env) is env
    assert pufferlib.pytorch.layer_init(torch.nn.Linear(2, 2), std=0.01).weight.abs().max() < 0.02


# -- policies


class LookupPolicy(torch.nn.Module):
    """PufferLib 2's form: encode_observations gives a lookup, which decode_actions takes."""

    def __init__(self, env, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.network = models.FeedForward(env, hidden_size)

    def forward(self, observations):
        return self.decode_actions(*self.encode_observations(observations))

    def encode_observations(self, observations):
        return self.network.encode_observations(observations), None

    def decode_actions(self, hidden, lookup, concat=True):
        assert lookup is None and hidden.dim() == 2
        return self.network.decode_actions(hidden)


@pytest.mark.parametrize("name", ["squared", "spaces", "continuous"])
def test_a_policy_of_the_tutorial(name):
    vecenv = vector.make(pufferlib.ocean.env_creator(name), backend=vector.Native)
    policy, obs = LookupPolicy(vecenv.driver_env, 16), torch.as_tensor(vecenv.reset()[0])
    recurrent = pufferlib.models.LSTMWrapper(vecenv.driver_env, policy, input_size=16,
                                             hidden_size=16)
    zeros = torch.zeros(1, 1, recurrent.hidden_size)
    _, first, state = recurrent(obs, (zeros, zeros))
    _, value, again = recurrent(obs, state)
    assert value.shape == (1, 1) and (again[0] != state[0]).any()
    carried = {"lstm_h": zeros, "lstm_c": zeros}
    torch.testing.assert_close(recurrent.forward_eval(obs, carried)[1], first)
    for agent in (pufferlib.cleanrl.Policy(policy), pufferlib.cleanrl.RecurrentPolicy(recurrent)):
        action, logprob, entropy, value, *_ = agent.get_action_and_value(obs)
        assert action.shape == (1, *vecenv.single_action_space.shape)
        assert logprob.shape == entropy.shape == (1,)
        vecenv.step(action.numpy())
    vecenv.close()


class BatchPolicy(models.FeedForward):
    """PufferLib 3's form: it takes a state that it does not use, and its forward sees a batch."""

    def forward(self, observations, state=None):
        return self.forward_eval(observations, state)


def normalized(env, hidden_size):
    return models.Normalized(env, models.FeedForward(env, hidden_size))


@pytest.mark.parametrize(("name", "kind", "recurrent"), [
    ("squared", LookupPolicy, False), ("squared", LookupPolicy, True),
    ("spaces", BatchPolicy, False), ("squared", normalized, False)])
def test_a_policy_of_the_tutorial_learns(name, kind, recurrent):
    vecenv = pufferlib.make(name, num_envs=16)
    policy = kind(vecenv.driver_env, 16)
    policy = models.LSTMWrapper(vecenv.driver_env, policy, 16, 16) if recurrent else policy
    trainer = PuffeRL(vecenv, policy, data_dir=None, batch_size=128)
    run_epochs(trainer)
    trainer.close()
    assert trainer.config["use_rnn"] is recurrent
    assert kind is not BatchPolicy or trainer.policy.takes_batches


def test_the_advantage_in_their_layout():
    """Time is the second axis, and rewards and ends are a step later than here."""
    rng = np.random.default_rng(0)
    values, rewards, ratio = torch.tensor(rng.normal(size=(3, 3, 6)), dtype=torch.float32)
    done = torch.tensor(rng.random((3, 6)) < 0.3).float()
    ours = pufferlib.pufferl.compute_puff_advantage(values, rewards, done, ratio.exp(),
                                                    torch.ones(3, 6), 0.9, 0.8, 1.0, 0.7)
    no = torch.zeros(5, 3)
    expected = reference.advantage(values.T, rewards.T[1:], done.T[1:], no, no, ratio.exp().T[:5],
                                   no + 1, 0.9, 0.8, 1.0, 0.7)
    torch.testing.assert_close(ours[:, :5].T, expected.float())
    assert not ours[:, 5].any()


# -- the trainer


def test_a_trainer_from_an_environment_and_a_policy():
    class Logger(NoLogger):
        steps = ()

        def log(self, metrics, step):
            self.steps += (step,)

    env, logger = pufferlib.make("squared", num_envs=16), Logger()
    policy = models.MinGRUPolicy(env.driver_env, hidden_size=16)
    trainer = PuffeRL(env=env, policy=policy, logger=logger, device="cpu", learning_rate=3e-4,
                      batch_size=256, n_epochs=4, gamma=0.99, gae_lambda=0.95, clip_coef=0.2,
                      ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, log_interval=1e9)
    assert (trainer.horizon, trainer.config["replay_ratio"]) == (16, 4.0)
    assert trainer.config["use_rnn"] is True and trainer.env_name == "squared"
    run_epochs(trainer, 3)
    assert logger.steps == (256, 512, 768)
    metadata = {"iteration": 3, "best_reward": np.float32(0.5)}
    assert trainer.save_checkpoint("checkpoint.pt", metadata=metadata) == "checkpoint.pt"
    assert trainer.load_checkpoint("checkpoint.pt") == {"iteration": 3, "best_reward": 0.5}
    for rate in (1e-3, 1e-4):
        trainer.learning_rate = rate
        trainer.evaluate()
        assert trainer.train()["learning_rate"] == pytest.approx(rate)
    assert Path(trainer.close()).exists()


def test_the_trainer_page():
    from pufferlib import pufferl

    args = pufferl.load_config("puffer_squared")
    args["vec"]["num_envs"], args["env"]["num_envs"] = 2, 32
    args["policy"]["hidden_size"] = args["rnn"]["input_size"] = args["rnn"]["hidden_size"] = 32
    args["train"] |= {"total_timesteps": 64 * 64 * 2, "learning_rate": 0.03}
    vecenv = pufferl.load_env("puffer_squared", args)
    policy = pufferl.load_policy(args, vecenv, "puffer_squared")
    trainer = pufferl.PuffeRL(args["train"], vecenv, policy)
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        logs = trainer.train()
        trainer.print_dashboard()
    assert {"policy_loss", "approx_kl", "explained_variance"} <= set(logs)
    assert trainer.global_step == 8192 and trainer.uptime > 0 and trainer.sps > 0
    args["load_model_path"] = trainer.close()
    again = pufferl.load_policy(args, vecenv, "puffer_squared").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in policy.state_dict().items())


def test_every_old_option_is_understood_or_refused_with_a_reason():
    schema = configuration.resolve("squared")[0]
    known = {f"{section}.{field}" if section != "base" else field
             for section, cls in {**schema, "sweep": sweep.Sweep}.items()
             for field in cls.__dataclass_fields__}
    for old, new in configuration.foreign_options()["renamed"].items():
        assert new.partition("=")[0] in known and old not in known, old
    for old, reason in configuration.foreign_options()["refused"].items():
        if not old.startswith("sweep."):
            name = "--" + old.replace("_", "-") + (".x" if old in ("torch", "selfplay") else "")
            with pytest.raises(ConfigError, match=re.escape(reason)):
                configuration.load_config("squared", [name, "1"])


# -- Protein


def test_a_search_space_of_bare_names():
    space = {"learning_rate": [1e-4, 3e-4, 1e-3], "batch_size": [16384, 32768, 65536],
             "clip_coef": [0.1, 0.2, 0.3], "hidden_size": [32, 64]}
    tuner = Protein(env_name="squared", search_space=space, num_trials=100, metric="mean_reward")
    assert set(tuner.space.names) == {"train.learning_rate", "train.horizon", "train.clip_coef",
                                      "policy.hidden_size"}
    assert tuner.suggest()["train.horizon"] in (16, 32, 64)
    assert sweep.settings_of(tuner)[0].metric == "environment/episode_return"
    for space, name in (({"learning_rat": [1, 2]}, "learning_rate"),
                        ({"batch_size": [1000, 2048]}, "1024")):
        with pytest.raises(ValueError, match=name):
            Protein(env_name="squared", search_space=space)
