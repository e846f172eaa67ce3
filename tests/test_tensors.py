"""Environments of torch and JAX: episodes, copies, waits, simulators and errors."""

import functools
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import slow_but
from gymnasium import spaces
from small_envs import assert_same, rollout
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import run_epochs

import environments
import models
import pufferl
import tensors
import vector
from fast import fused
from tools import watch

ROOT = Path(__file__).resolve().parent.parent
CARTPOLE = f"{ROOT}/examples/torch_cartpole.py:make"
KINDS = ["torch", pytest.param("jax", marks=pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="requirements/extras.txt"))]
MODES = ["SameStep", "NextStep", "Disabled"]


def convert(array, kind):
    if kind == "torch":
        return torch.from_numpy(array.copy())
    return array.copy() if kind == "numpy" else importlib.import_module("jax").numpy.array(array)


class Walks(gymnasium.vector.VectorEnv):
    """Walkers for any kind of array and any mode of autoreset."""

    single_observation_space = spaces.Dict({"x": spaces.Box(-100, 100, (2,), np.float32),
                                            "t": spaces.Discrete(50)})
    single_action_space = spaces.Discrete(3, start=-1)

    def __init__(self, num_envs=5, kind="torch", mode="SameStep", limit=7):
        self.num_envs, self.kind, self.mode, self.limit = num_envs, kind, mode, limit
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode(mode)}
        self.number, self.episode = np.arange(num_envs), np.zeros(num_envs, int)
        self.x, self.t = np.zeros((num_envs, 2), np.float32), np.zeros(num_envs, int)
        self.ended = np.zeros(num_envs, bool)

    def _begin(self, which):
        self.episode[which] += 1
        angle = self.number + 0.3 * self.episode
        self.x[which] = np.stack([np.sin(angle), np.cos(angle)], 1)[which]
        self.t[which] = 0

    def _see(self):
        return {"x": convert(self.x, self.kind), "t": convert(self.t, self.kind)}

    def _masks(self):
        masks = np.ones((self.num_envs, 3), bool)
        masks[self.t % 2 == 1, 1] = False  # no standing still then
        masks[self.t % 5 == 4] = False  # nothing allowed, which counts as everything
        return {"action_mask": convert(masks, self.kind)}

    def reset(self, *, seed=None, options=None):
        if options:
            self._begin(np.asarray(options["reset_mask"]))
        else:
            self.episode[:], self.ended[:] = 0, False
            self._begin(slice(None))
        return self._see(), self._masks()

    def step(self, actions):
        actions = np.asarray(actions)
        assert actions.shape == (self.num_envs,) and set(actions) <= {-1, 0, 1}
        before = self.ended if self.mode == "NextStep" else np.zeros(self.num_envs, bool)
        self.t += 1
        self.x += actions[:, None].astype(np.float32) * np.array([1, 0.5], np.float32)
        terminated = (np.abs(self.x[:, 0]) > 3) & ~before
        truncated = (self.t == self.limit) & ~before
        rewards = self.x[:, 1].copy()  # also in a step that only begins an episode
        self._begin(before)
        self.ended, info = terminated | truncated, {}
        if self.mode == "SameStep" and self.ended.any():
            info = {"final_obs": self._see(), "_final_obs": convert(self.ended, self.kind),
                    "final_info": {"height": convert(self.x[:, 1], self.kind)}}
            self._begin(self.ended)
        elif self.mode != "SameStep":
            info = {"height": convert(self.x[:, 1], self.kind)}
        return (self._see(), *(convert(a, self.kind) for a in (rewards, terminated, truncated)),
                self._masks() | info)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rollout_is_that_of_the_same_environment_in_numpy(kind, mode):
    """Compare Dict observations, masks, actions from -1, and the last info's numbers."""
    ours = rollout(vector.make(lambda: Walks(kind=kind, mode=mode)))
    theirs = rollout(vector.make(lambda: Walks(kind="numpy", mode=mode), backend="serial"))
    assert_same(ours, theirs)
    assert {"height", "score", "episode_return", "episode_length"} < ours[2].keys()
    assert (ours[0][0]["valid"] == 0).any() == (mode == "NextStep")


def test_the_synchronous_form():
    with vector.make(Walks) as vecenv:
        assert type(vecenv) is vector.Tensors and vecenv.num_envs == 5
        assert vecenv.device == torch.device("cpu")
        first, count = vecenv.reset(seed=1)[0].copy(), 0
        for _ in range(7):
            observations, rewards, _, _, infos = vecenv.step(np.full(5, 1))
            count += sum(info["n"] for info in infos)
        assert observations.shape == (5, 2 * 8) and rewards.dtype == np.float32 and count == 5
        with pytest.raises(ValueError, match=r"\(5,"):
            vecenv.step(np.zeros(4))
        np.testing.assert_array_equal(vecenv.reset(seed=1)[0], first)
        for _ in range(7):
            vecenv.begin()
            vecenv.storage.actions[0] = 1
            vecenv.advance(0)
        one, others = vecenv.log(2), vecenv.log()
        assert (one["n"], one["episode_length"], others["n"]) == (1, 7, 4) and vecenv.log() == {}


# -- Copies and waits ------------------------------------------------------------------------------


class Watched(TorchDispatchMode):
    """The operations within it, with the addresses of what they copy."""

    def __init__(self):
        super().__init__()
        self.names, self.copies = set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name)
        if function._schema.name == "aten::copy_":
            self.copies.append((args[1].data_ptr(), args[0].data_ptr(), args[0].numel()))
        return function(*args, **(kwargs or {}))

    def of_size(self, size):
        return [(source, target) for source, target, number in self.copies if number == size]


class Unmoved:
    """Environments whose arrays cost nothing: all operations are the backend's.

    Keywords replace its attributes and methods; `part` is the number of a step's array to replace.
    """

    single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
    single_action_space = spaces.Box(-2, 1, (3,), np.float32)

    def __init__(self, mode="same_step", part=None, value=None, num_envs=8, **changes):
        self.metadata, self.num_envs = {"autoreset_mode": mode}, num_envs
        flags = torch.arange(num_envs) % 2 == 0
        self.answer = [torch.zeros(num_envs, 2), torch.ones(num_envs), flags, ~flags]
        if part is not None:
            self.answer[part] = value
        vars(self).update(changes)

    def reset(self, seed=None):
        return self.answer[0], {}

    def step(self, actions):
        self.given = actions
        return *self.answer, {"final_obs": self.answer[0], "final_info": {"speed": self.answer[1]}}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied(kind):
    """Copy an observation once, into the row that the policy reads, and actions of torch once."""
    def address(array):
        return array.data_ptr() if kind == "torch" else array.unsafe_buffer_pointer()

    # 64 agents: each row begins at a multiple of 64 bytes, which JAX wants
    env = Unmoved("disabled", num_envs=64, single_action_space=spaces.Discrete(3, dtype=np.int32))
    env.answer[2:] = torch.zeros(2, 64, dtype=torch.bool)
    env.answer = [convert(tensor.numpy(), kind) for tensor in env.answer]
    with vector.make(lambda: env) as vecenv:
        trainer = make_trainer(vecenv)
        storage = vecenv.storage
        assert trainer.storage["observations"].data_ptr() == storage.observations.ctypes.data
        for t in range(4):
            with Watched() as watched:
                vecenv.advance(0)
            assert watched.of_size(2 * 64) == [(address(env.answer[0]),
                                                storage.observations[t + 1].ctypes.data)]
            shares = address(env.given) == storage.actions[t].ctypes.data
            assert shares == (kind == "jax")
            if kind == "torch":
                assert env.given.dtype == torch.int32 and "aten::clone" in watched.names
                # reward, two flags and resets
                assert sum(size for _, _, size in watched.copies) == 64 * (2 + 4)
        trainer.release()


@pytest.mark.parametrize("space", [spaces.Box(-np.inf, np.inf, (3,), np.float32),
                                   spaces.Discrete(9, dtype=np.int32),
                                   spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(9)])
def test_an_environment_that_changes_its_actions_changes_none_of_the_rollout(space):
    def step(actions):
        env.given = actions.clamp_(-1, 1)
        return *env.answer, {}

    env = Unmoved("disabled", single_action_space=space, step=step)
    env.answer[2:] = torch.zeros(2, 8, dtype=torch.bool)
    with vector.make(lambda: env) as vecenv:
        storage = vecenv.allocate(2)
        for t in range(2):
            storage.actions[t] = 7
            vecenv.advance(0)
            assert (env.given == 1).all() and (storage.actions[t] == 7).all()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_nothing_waits_for_a_device(mode):
    """Learn without a wait if an episode has ended; only the log waits, once."""
    env = Unmoved(mode)
    with vector.make(lambda: env) as vecenv:
        storage = vecenv.allocate(2)
        vecenv._driver._is_on_host = False  # as on a GPU
        vecenv.advance(0)
        storage.actions[1] = 5
        with Watched() as watched:
            vecenv.advance(0)
        assert not watched.names & {"aten::_local_scalar_dense", "aten::nonzero",
                                    "aten::is_nonzero", "aten::item"}
        assert env.given.max() == 1 and env.given.shape == (8, 3)  # within its bounds
        log = vecenv.log()
        assert log["n"] == 16 and (log.get("speed") == 1) == (mode == "same_step")


def make_trainer(vecenv, network=models.MinGRUPolicy, **settings):
    torch.manual_seed(1)
    policy = network(vecenv, hidden_size=16) if network is models.MinGRUPolicy else network(vecenv)
    settings = {"horizon": 8, "minibatch_size": 128, "replay_ratio": 1.3, "total_timesteps": 10**5,
                "data_dir": None, "log_interval": 1e9, "learning_rate": 0.01, **settings}
    return pufferl.PuffeRL(settings, vecenv, policy)


def train(epochs, mode, **settings):
    """Return (the rollout, weights, losses, logged entry) of a run."""
    trainer = make_trainer(vector.make(lambda: Walks(32, mode=mode, limit=3)), **settings)
    run_epochs(trainer, epochs)
    losses, entry = dict(trainer.losses), trainer.mean_and_log()
    names = ("observations", "actions", "rewards", "terminals", "truncations", "resets", "valid")
    arrays = {name: trainer.storage[name].clone() for name in names}
    arrays["bootstraps"] = trainer.buffers.bootstraps.clone()
    assert getattr(trainer.buffers, "envs_on_gpu", False) == (trainer.vecenv.device is not None)
    trainer.release()
    return arrays, trainer.arena.flat("weights").clone(), losses, entry


@pytest.mark.parametrize("cudagraphs", [pytest.param(-1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize("network", slow_but([models.MinGRUPolicy, models.FeedForward],
                                             models.MinGRUPolicy))
def test_on_the_policys_own_device(network, mode, cudagraphs, monkeypatch):
    """Compare with the host's rollout; the GPU is test_devices.py's recorder."""
    from test_devices import install, on_a_cpu

    install(monkeypatch, on_a_cpu)
    common = {"network": network, "device": "cuda", "cudagraphs": cudagraphs}
    with monkeypatch.context() as patch:
        cpu = property(lambda self: torch.device("cpu"), lambda self, device: None)
        patch.setattr(vector.Tensors, "device", cpu, raising=False)
        through_host = train(5, mode, **common)
    written = []
    monkeypatch.setattr(fused.GpuBuffers, "on_host", lambda self, name, part=...: (
        written.append(name) or self.storage[name][part]))
    direct = train(5, mode, **common)
    assert "observations" in written and direct[0]["bootstraps"].any()
    for name, tensor in direct[0].items():
        assert torch.equal(tensor, through_host[0][name]), name
    assert torch.equal(direct[1], through_host[1]) and direct[2] == through_host[2]
    same = {name for name in direct[3] if name.startswith(("environment/", "vital/"))}
    assert same and all(direct[3][name] == pytest.approx(through_host[3][name], nan_ok=True)
                        for name in same)


UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,))


class Simulator:
    """Walkers on a line: they observe place and steps, and are rewarded for their place.

    Ended episodes begin again within the step: beyond 10, or after 5 steps.
    """

    num_envs = 4
    single_observation_space = UNBOUNDED
    single_action_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self):
        self.place, self.steps = torch.zeros(2, self.num_envs)

    def observe(self):
        return torch.stack([self.place, self.steps], 1)

    def begin(self, which):
        self.place[which] = self.steps[which] = 0

    def move(self, actions):
        """Return rewards, terminations and truncations."""
        assert actions.shape == (self.num_envs, 1) and actions.dtype == torch.float32
        self.place += actions[:, 0]
        self.steps += 1
        return self.place.clone(), self.place > 10, self.steps >= 5


class IsaacLabStandIn(Simulator, gymnasium.Env):
    """The types of ManagerBasedRLEnv; an episode's last observation is lost."""

    single_observation_space = spaces.Dict(policy=UNBOUNDED, critic=UNBOUNDED)

    def __init__(self):
        super().__init__()
        self.extras = {}  # they last until the next reset

    def observe(self):
        return {"policy": super().observe(), "critic": -super().observe()}

    def reset(self, seed=None, env_ids=slice(None), options=None):
        self.extras["log"] = {"Episode_Reward/place": self.place[env_ids].mean(),
                              "Episode_Termination/time_out": len(self.place[env_ids])}
        self.begin(env_ids)
        return self.observe(), self.extras

    def step(self, action, resets_itself=True):
        results = self.move(action)
        ended = (results[1] | results[2]).nonzero().squeeze(-1)
        if resets_itself and len(ended):
            self.reset(env_ids=ended)
        return self.observe(), *results, self.extras


def mjlab_box(size):
    return SimpleNamespace(dtype="float32", low=-math.inf, high=math.inf, shape=(size,))


class MjlabStandIn(IsaacLabStandIn):
    """mjlab's differences: other spaces and names of groups, resets by the caller."""

    cfg = SimpleNamespace(auto_reset=False)
    single_observation_space = SimpleNamespace(spaces={"actor": mjlab_box(2)})
    single_action_space = mjlab_box(1)

    def observe(self):
        return {"actor": super().observe()["policy"]}

    def step(self, action):
        return super().step(action, resets_itself=False)


class ManiSkillStandIn(Simulator, gymnasium.vector.VectorEnv):
    """The types of ManiSkillVectorEnv with record_metrics."""

    auto_reset, metadata, device = True, {"render_modes": []}, torch.device("cpu")
    single_action_space = spaces.Box(-3, 3, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.begin(slice(None) if options is None else options["env_idx"])
        return self.observe(), {"reconfigure": False}

    def step(self, actions):
        rewards, success, truncations = self.move(actions)
        observations, infos = self.observe(), {
            "success": success, "episode": {"episode_len": self.steps.clone()}}
        ended = success | truncations
        if ended.any():
            last = {"final_observation": observations, "final_info": infos, "_final_info": ended,
                    "_final_observation": ended, "_elapsed_steps": ended}
            observations, infos = self.reset(options={"env_idx": ended.nonzero()[:, 0]})
            infos |= last
        return observations, rewards, success, truncations, infos


ISAAC_LAB = {  # of the first to end the mean was 12, of the three others together 5
    "Episode_Reward/place": (12 + 3 * 5) / 4, "Episode_Termination/time_out": 2.5}


@pytest.mark.parametrize(("kind", "adapt", "word", "expected"), [
    (IsaacLabStandIn, tensors.IsaacLab, "IsaacLab", ISAAC_LAB),
    (MjlabStandIn, functools.partial(tensors.IsaacLab, group="actor"), "actor", ISAAC_LAB),
    (ManiSkillStandIn, tensors.ManiSkill, "autoreset",
     {"success": 0.25, "episode/episode_len": 4.75})])
def test_simulators_have_adapters(kind, adapt, word, expected):
    def make():  # Isaac Lab's as gymnasium.make gives it
        return gymnasium.wrappers.OrderEnforcing(kind()) if kind is IsaacLabStandIn else kind()

    with pytest.raises((ValueError, TypeError), match=word):
        vector.make(lambda: tensors.IsaacLab(make()) if word == "actor" else make())
    with vector.make(lambda: adapt(make())) as vecenv:
        assert vecenv.single_observation_space == UNBOUNDED
        storage = vecenv.allocate(5)
        storage.actions[:, :, 0] = [0, 1, 2, 9 if kind is ManiSkillStandIn else 3]  # clipped to 3
        for _ in range(5):
            vecenv.advance(0)
        np.testing.assert_array_equal(storage.terminals[:, 3], [0, 0, 0, 1, 0])
        np.testing.assert_array_equal(storage.truncations[4], [1, 1, 1, 0])
        np.testing.assert_array_equal(storage.observations[5], [[0, 0], [0, 0], [0, 0], [3, 1]])
        # or the one that the last action was taken from, if the last one is not given
        lost = kind is IsaacLabStandIn
        final = storage.observations[4, :3] if lost else [[0, 5], [5, 5], [10, 5]]
        np.testing.assert_array_equal(storage.final_observations[:3], final)
        log = vecenv.log()
        assert log["episode_return"] == (0 + 15 + 30 + 30) / 4
        assert log.items() >= {"n": 4, "episode_length": 4.75, **expected}.items()


def test_gymnax():
    pytest.importorskip("gymnax")
    options = {"env_kwargs": {"max_steps_in_episode": 30}, "seed": 3}
    with vector.make("gymnax/CartPole-v1", 64, **options) as vecenv:
        assert type(vecenv) is vector.Tensors and vecenv.num_envs == 64
        rng, cut, ended = np.random.default_rng(0), 0, 0
        first = vecenv.reset(seed=3)[0].copy()
        assert len(np.unique(first, axis=0)) == 64
        for _ in range(120):
            observations, _, terminals, truncations, infos = vecenv.step(rng.integers(0, 2, 64))
            assert (abs(observations[terminals | truncations]) <= 0.05).all()
            final = abs(vecenv.storage.final_observations[truncations & ~terminals])
            assert (final.max(1) > 0.05).all() and (final[:, 2] < 0.2095).all()
            cut, ended = cut + len(final), ended + terminals.sum()
            assert all(info["episode_length"] <= 30 for info in infos)
        assert cut > 0 and ended > 50
        np.testing.assert_array_equal(vecenv.reset(seed=3)[0], first)


def test_brax():
    pytest.importorskip("brax")
    with vector.make("brax/fast", 4, env_kwargs={"episode_length": 5}) as vecenv:
        storage = vecenv.allocate(12)
        for _ in range(12):
            vecenv.advance(0)
        np.testing.assert_array_equal(storage.truncations[:, 0], [0, 0, 0, 0, 1] * 2 + [0, 0])
        assert not storage.terminals.any() and vecenv.log() == {
            "episode_return": 0, "episode_length": 5, "score": 0, "n": 8}


# -- Which backend, and errors ---------------------------------------------------------------------


def test_only_what_returns_tensors_is_taken_for_it():
    with vector.make(lambda: Walks(kind="numpy")) as vecenv:
        assert type(vecenv) is vector.Serial and vecenv.num_agents == 5
    with pytest.raises((ValueError, TypeError), match="tensors"):
        vector.make(lambda: Unmoved("disabled"), backend="serial")
    creator = environments.load_creator("gymnax/CartPole-v1")
    assert creator.settings == {"num_envs": 1024, "max_steps_in_episode": 0}
    assert not creator.takes_copies
    assert vector.choose_backend(creator, None, 64) is vector.Tensors
    assert vector.choose_backend(creator, "serial") is vector.Serial


@pytest.mark.parametrize("backend", ["tensors", None])
def test_env_num_envs_multiplies_that_of_the_vector(backend):
    with vector.make(CARTPOLE, 8, backend, env_kwargs={"num_envs": 4}) as vecenv:
        assert type(vecenv) is vector.Tensors and vecenv.num_agents == 32
    for name, options in (("env_kwargs", {"env_kwargs": [{"num_envs": 4}] * 4}),
                          ("num_workers", {"num_workers": 2}), ("num_workers", {"batch_size": 2})):
        with pytest.raises(ValueError, match=name):
            vector.make(CARTPOLE, 4, backend, **options)
    args = pufferl.load_config(CARTPOLE, [
        "--env.num-envs", "4", "--vec.total-agents", "12",
        *(["--vec.backend", backend] if backend else [])])
    with pufferl.load_env(CARTPOLE, args) as vecenv:
        assert vecenv.num_agents == 12


ERRORS = [  # of Unmoved, and the words that the error names
    ({"mode": "sometimes"}, "sometimes"),
    ({"part": 0, "value": torch.zeros(8, 3)}, r"reset.*\(8, 2\).*\(8, 3\)"),
    ({"part": 0, "value": torch.full((8, 2), math.nan)}, r"reset.*nan"),
    ({"single_observation_space": spaces.Box(0, 9, (2,), np.uint8)}, "uint8"),
    ({"part": 1, "value": torch.ones(8, 1)}, r"reward.*\(8, 1\)"),
    ({"part": 1, "value": [1.0] * 8}, "list"),
    ({"step": lambda actions: tuple(Unmoved().answer)}, "4 values"),
    ({"reset": lambda seed=None: torch.zeros(8, 2)}, "observation, info"),
    ({"single_action_space": spaces.Dict(a=spaces.Discrete(2))}, "Discrete"),
    (lambda: Walks(kind="numpy"), "__dlpack__"),
    (lambda: gymnasium.make("CartPole-v1"), "num_envs"),
]


@pytest.mark.parametrize(("make", "words"), ERRORS)
def test_a_wrong_environment_is_an_error(make, words):
    with (pytest.raises((ValueError, TypeError), match=words),
          vector.make(make if callable(make) else lambda: Unmoved(**make),
                      backend="tensors") as vecenv):
        vecenv.allocate(2)
        vecenv.advance(0)


def test_a_run_resumes_with_new_episodes(tmp_path, capsys):
    def make():
        vecenv = vector.make(CARTPOLE, env_kwargs={"num_envs": 32}, seed=1)
        return make_trainer(vecenv, total_timesteps=2048)

    ends, trainer = [], make()
    run_epochs(trainer, 4)
    trainer.save_checkpoint(tmp_path / "a.pt")
    for _ in range(2):
        again = make()
        again.load_checkpoint(tmp_path / "a.pt")
        assert again.global_step == 4 * 8 * 32 and "episodes" in capsys.readouterr().out
        run_epochs(again, 4)
        ends.append(again.arena.flat("weights"))
    assert torch.equal(*ends) and not torch.equal(ends[0], trainer.arena.flat("weights"))


def test_train_and_eval_by_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    options = ["--env.num-envs", "16", "--data-dir", str(tmp_path)]
    pufferl.main(["train", CARTPOLE, *options, "--train.total-timesteps", "4000"])
    pufferl.main(["eval", CARTPOLE, *options, "--load-model-path", "latest",
                  "--eval.episodes", "16"])
    output = capsys.readouterr().out
    assert "16 episodes" in output and "episode_return" in output, output


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    """Reach a mean return of 400, in the middle one of three seeds."""
    scores = []
    for seed in ("0", "1", "42"):
        options = ["--env.num-envs", "256", "--data-dir", str(tmp_path / seed), "--logger", "none",
                   "--train.total-timesteps", "400000", "--train.seed", seed]
        pufferl.train(CARTPOLE, pufferl.load_config(CARTPOLE, options))
        options += ["--load-model-path", "best", "--eval.episodes", "256"]
        results = watch.evaluate(CARTPOLE, pufferl.load_config(CARTPOLE, options))
        scores.append(results["score"][0])
    assert sorted(scores)[1] >= 400, scores
