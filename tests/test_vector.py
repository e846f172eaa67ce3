"""Backends for environments in Python: the same numbers from each; nothing left running
when something breaks."""

import os
import re
import signal
import sys
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv

import emulation
import environments
import models
import ocean
import pufferl
import vector
import workers
from vector import Multiprocessing, Native, Serial

ROOT = Path(__file__).resolve().parent.parent
# Workers get this file's classes by value, so that they need not import what the tests import.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nothing_left")


class Squared(emulation.PufferEnv):
    """A numpy squared: find the corner square of a 5 × 5 board; one episode is at most 8 steps."""

    def __init__(self, num_agents=4, buf=None, seed=0):
        self.single_observation_space = spaces.Box(0, 1, (50,), np.float32)
        self.single_action_space = spaces.Discrete(4)
        self.num_agents = num_agents
        super().__init__(buf)

    def reset(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self._begin(np.arange(self.num_agents))
        self._observe()
        return self.observations, []

    def _begin(self, agents):
        if not hasattr(self, "place"):
            self.place, self.goal = np.zeros((2, self.num_agents, 2), int)
            self.age = np.zeros(self.num_agents, int)
        self.place[agents] = 2
        self.goal[agents] = self.rng.choice([0, 4], (len(agents), 2))
        self.age[agents] = 0

    def _observe(self):
        self.observations[:] = 0
        agents = np.arange(self.num_agents)
        self.observations[agents, self.place[:, 0] * 5 + self.place[:, 1]] = 1
        self.observations[agents, 25 + self.goal[:, 0] * 5 + self.goal[:, 1]] = 1

    def step(self, actions):
        self.place += np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])[actions]
        np.clip(self.place, 0, 4, out=self.place)
        self.age += 1
        found = (self.place == self.goal).all(1)
        self.rewards[:], self.terminals[:] = found, found
        self.truncations[:] = (self.age == 8) & ~found
        ended = np.flatnonzero(found | (self.age == 8))
        self._observe()
        self.final_observations[:] = self.observations
        self._begin(ended)
        self._observe()
        infos = [{"perf": float(found[ended].mean()), "n": len(ended)}] if len(ended) else []
        return self.observations, self.rewards, self.terminals, self.truncations, infos


class Walk(gymnasium.Env):
    """A random walk in a Dict space; trouble of a chosen kind at step 3 of environment `victim`."""

    observation_space = spaces.Dict({"x": spaces.Box(-100, 100, (2,), np.float64),
                                     "t": spaces.Discrete(50)})
    action_space = spaces.Discrete(3)

    def __init__(self, trouble=None, limit=6):
        self.trouble, self.limit = trouble, limit

    def _observe(self):
        return {"x": self.x.copy(), "t": self.t}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.normal(size=2), 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        self.x += (action - 1) + 0.1 * self.np_random.normal(size=2)
        if self.trouble and self.t == 3:
            if self.trouble == "raise":
                raise ArithmeticError("the walker fell")
            if self.trouble == "hang":
                time.sleep(1000)
            if self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "segfault":
                import ctypes

                ctypes.string_at(0)
            if self.trouble == "shape":
                self.x = np.zeros(3)
            if self.trouble == "interrupt":
                raise KeyboardInterrupt
        return self._observe(), float(self.x[0]), bool(self.x[1] > 4), self.t == self.limit, {"height": self.x[1]}

    def render(self):
        return self.x.copy()


def rollout(vecenv, steps=20):
    """Everything that a vector gives to fixed actions."""
    rng = np.random.default_rng(1)
    with vecenv:
        observations, infos = vecenv.reset(seed=7)
        history = [(observations.copy(), infos)]
        for _ in range(steps):
            actions = rng.integers(0, vecenv.action_heads[0], vecenv.num_agents)
            *arrays, infos = vecenv.step(actions)
            history.append((*(array.copy() for array in arrays),
                            vecenv.storage.final_observations.copy(), infos))
        return history, vecenv.log()


def assert_same(a, b):
    for x, y in zip(a[0], b[0], strict=True):
        for p, q in zip(x[:-1], y[:-1], strict=True):
            np.testing.assert_array_equal(p, q)
        assert x[-1] == y[-1]
    assert a[1].keys() == b[1].keys() and a[1]["n"] > 0
    for name, value in a[1].items():
        assert value == pytest.approx(b[1][name])


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "creator, kwargs",
    [
        (Walk, {"limit": 5}),
        (Squared, {"num_agents": 3}),
        (environments.load_creator("gym/CartPole-v1"), {"max_episode_steps": 12}),
    ],
)
def test_every_backend_gives_the_same(creator, kwargs):
    make = lambda backend, **options: vector.make(creator, 4, backend, env_kwargs=kwargs, **options)  # noqa: E731
    serial = rollout(make(Serial))
    assert_same(serial, rollout(make("multiprocessing", num_workers=2)))
    assert_same(serial, rollout(make(Multiprocessing, num_workers=4, batch_size=2)))
    with make(Multiprocessing, num_workers=1) as vecenv:
        assert (vecenv.num_agents == 4 * kwargs.get("num_agents", 1)
                and vecenv.agents_per_batch == vecenv.num_agents)
        assert vecenv.driver_env.single_action_space == vecenv.single_action_space


def test_an_instance_and_a_class_under_native():
    with vector.make(Squared(num_agents=2)) as vecenv:
        assert vecenv.reset()[0].shape == (2, 50)
    with vector.make(Squared, backend=Native, env_kwargs={"num_agents": 2}) as vecenv:
        assert isinstance(vecenv, Serial) and vecenv.num_agents == 2


def test_the_first_environments_that_are_ready_come_first(tmp_path):
    class Gated(gymnasium.Env):
        """A step that waits until a file is there."""

        observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)

        def __init__(self, gate):
            self.gate = gate

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            while not os.path.exists(self.gate):
                time.sleep(0.01)
            return np.full(1, action, np.float32), 0.0, False, False, {}

    gate = tmp_path / "open"
    gates = [{"gate": str(path)} for path in (tmp_path, gate, tmp_path, gate)]  # 1 and 3 must wait
    with vector.make(Gated, 4, Multiprocessing, num_workers=4, batch_size=2, env_kwargs=gates) as vecenv:
        vecenv.async_reset(seed=0)
        stepped = set()

        def turn():
            observations, rewards, terminals, truncations, infos, agents, masks = vecenv.recv()
            assert (masks.all() and rewards.shape == terminals.shape == truncations.shape == (2,)
                    and infos == [])
            assert observations.tolist() == [[agent in stepped] for agent in agents]
            stepped.update(agents.tolist())
            vecenv.send(np.ones(2, int))
            return agents.tolist()

        while not {1, 3} <= stepped:
            turn()
        assert [turn() for _ in range(5)] == [[0, 2]] * 5
        gate.touch()
        late = set()
        while not {1, 3} <= late:
            late.update(turn())


def test_send_and_recv_must_alternate():
    with vector.make(Walk, 2) as vecenv:
        for call in (vecenv.recv, lambda: vecenv.send(np.zeros(2)),
                     lambda: vecenv.step(np.zeros(2))):
            with pytest.raises(RuntimeError, match=r"comes after|needs reset"):
                call()
        vecenv.async_reset()
        vecenv.recv()
        with pytest.raises(ValueError, match="expected"):
            vecenv.send(np.zeros(3, int))
        with pytest.raises(ValueError, match="outside"):
            vecenv.send(np.full(2, 3))


def test_the_trainers_protocol_rotates_rows():
    T = 5
    actions = np.random.default_rng(0).integers(0, 3, (3 * T, 4))
    histories = []
    for options in ({"backend": "serial"},
                    {"backend": "multiprocessing", "num_workers": 2, "batch_size": 2}):
        with vector.make(Walk, 4, env_kwargs={"limit": 4}, seed=3, **options) as vecenv:
            storage, rows = vecenv.allocate(T), []
            for epoch in range(3):
                last = storage.observations[-1].copy()
                vecenv.begin()
                np.testing.assert_array_equal(storage.observations[0], last)
                given = 0
                while (ready := vecenv.wait()) is not None:
                    buffer, t = ready
                    given += t == T
                    if t < T:
                        storage.actions[t, vecenv.ranges[buffer], 0] = actions[epoch * T + t, vecenv.ranges[buffer]]
                        vecenv.advance(buffer)
                assert given == vecenv.num_buffers
                np.testing.assert_array_equal(storage.resets[1:],
                                              storage.terminals | storage.truncations)
                rows.append({name: array.copy() for name, array in vars(storage).items()
                             if array is not None})
            histories.append((rows, vecenv.log()))
    (rows, log), (others, other) = histories
    assert (log["episode_length"] == 4 and log["score"] == log["episode_return"]
            and log["n"] == 12 == other["n"])
    for a, b in zip(rows, others, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_an_info_of_no_episode_is_not_counted():
    class Silent(Squared):
        def step(self, actions):
            return *super().step(actions)[:4], [{"perf": 1.0, "n": 0}]

    with vector.make(Silent, 2, Serial) as vecenv:
        vecenv.reset(seed=0)
        vecenv.step(np.zeros(8, int))
        assert vecenv.log() == {}


def test_one_action_must_be_an_array_too():
    for vecenv in (vector.make("cartpole"), vector.make(Walk)):
        with vecenv, pytest.raises(ValueError, match=r"shape \(\), expected \(1, 1\)"):
            vecenv.reset()
            vecenv.step(0)


def test_logs_of_one_environment_and_the_rest():
    with vector.make(Walk, 3, Serial, env_kwargs=[{"limit": 2}, {"limit": 3}, {"limit": 4}]) as vecenv:
        vecenv.reset(seed=0)
        for _ in range(4):
            vecenv.step(np.ones(3, int))
        assert vecenv.log(0)["episode_length"] == 2 and vecenv.log(0) == {}
        assert vecenv.log()["n"] == 2 and vecenv.log() == {}


def test_c_environments_are_the_same_in_processes():
    native, rng = vector.make("cartpole", 6, num_threads=1, seed=5), np.random.default_rng(0)
    others = [
        vector.make(ocean.Cartpole, 3, Serial, seed=5, env_kwargs={"num_envs": 2}),
        vector.make("cartpole", 3, Multiprocessing, num_workers=3, seed=5,
                    env_kwargs={"num_envs": 2}),
    ]
    expected = native.reset(seed=5)[0]
    for other in others:
        np.testing.assert_array_equal(other.reset()[0], expected)
    for _ in range(60):
        actions = rng.integers(0, 2, 6)
        observations, rewards, terminals, _, _ = native.step(actions)
        for other in others:
            result = other.step(actions)
            np.testing.assert_array_equal(result[0], observations)
            np.testing.assert_array_equal(result[1], rewards)
            np.testing.assert_array_equal(result[2], terminals)
            assert result[2].dtype == terminals.dtype == bool
    for vecenv in (native, *others):
        vecenv.close()
    with vector.make(ocean.Breakout, backend=Native, env_kwargs={"num_envs": 8, "frameskip": 2}) as vecenv:
        assert isinstance(vecenv, Native) and vecenv.num_agents == 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_envs": 6, "num_workers": 4}, "vec.num_workers can be 1, 2, 3, 6"),
        ({"num_envs": 8, "num_workers": 4, "batch_size": 3}, "vec.batch_size can be 2, 4, 8"),
        ({"backend": "serial", "num_envs": 4, "num_workers": 2}, "take multiprocessing"),
        ({"env": "squared", "num_envs": 4, "num_workers": 2}, "batch_size 4; vec.num_threads says how many threads"),
        ({"env": "squared", "num_envs": 4, "batch_size": 2}, "num_workers is 1 and batch_size 4; "),
        ({"num_envs": 4, "num_buffers": 2}, "vec.num_buffers = 2 is for backend native, not for multiprocessing"),
        ({"backend": "threads"}, "there are native, serial"),
        ({"backend": "native"}, "serial, multiprocessing and ray"),
        ({"backend": "package"}, "serial, multiprocessing and ray"),
        ({"num_envs": 2, "env_kwargs": [{}]}, "list of 1"),
        ({"num_envs": 0}, "must be 1 or more"),
    ],
)
def test_impossible_combinations_name_the_possible_ones(options, message):
    with pytest.raises(ValueError, match=message):
        backend = "native" if "env" in options else "multiprocessing"
        vector.make(**{"env": Walk, "backend": backend, **options})


def test_a_header_by_its_path_takes_settings_as_keywords():
    with vector.make(Path(ocean.__file__).parent / "breakout/breakout.h", 4, frameskip=2) as vecenv:
        assert isinstance(vecenv, Native) and vecenv.num_envs == 4
    with pytest.raises(ValueError, match=r"has no setting 'frameskp'.*frameskip"):
        vector.make(Path(ocean.__file__).parent / "breakout/breakout.h", 4, frameskp=2)


def test_the_memory_is_that_of_all_copies(monkeypatch):
    monkeypatch.setattr(vector.processes, "available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"^64 environments would take"):
        vector.make("breakout", 1, env_kwargs={"num_envs": 64})


CHOICES = [  # environment, settings of the vec section, cores, the backend
    ("cartpole", {"num_envs": 4}, 4, Native),
    ("cartpole", {"num_envs": 2, "backend": "serial"}, 4, Serial),
    ("gym/Acrobot-v1", {"num_envs": 1}, 4, Serial),
    ("gym/Acrobot-v1", {"num_envs": 4}, 1, Serial),
    ("gym/Acrobot-v1", {"num_envs": 4}, 2, Multiprocessing),
    ("gym/Acrobot-v1", {"num_envs": 3}, 2, Serial),  # one worker is all that divides them
    ("gym/Acrobot-v1", {"num_envs": 4, "num_workers": 1}, 2, Serial),
    ("gym/Acrobot-v1", {"num_envs": 4, "num_workers": 2}, 1, Multiprocessing),
    ("gym/CartPole-v1", {"num_envs": 4}, 2, vector.Package),  # it gives the same episodes
    ("gym/CartPole-v1", {"num_envs": 1}, 2, Serial),
    ("gym/CartPole-v1", {"num_envs": 4, "num_workers": 2}, 2, Multiprocessing),
    ("gym/CartPole-v1", {"num_envs": 4, "backend": "native"}, 2, vector.Package),
    ("gym/CartPole-v1", {"num_envs": 4, "backend": "package"}, 2, vector.Package),
    ("gym/ALE/Pong-v5", {"num_envs": 4}, 2, vector.Package),
    ("gym/ALE/Pong-v5", {"num_envs": 1}, 2, Serial),
    ("gym/ALE/Pong-v5", {"num_envs": 4, "num_workers": 2}, 2, Multiprocessing),
]


@pytest.mark.parametrize("name, vec, cores, expected", CHOICES)
def test_scripts_and_the_command_line_get_the_same_backend(name, vec, cores, expected, monkeypatch):
    import pufferl

    if "ALE" in name:
        for package in ("ale_py", "cv2"):
            pytest.importorskip(package, reason="needs ale-py and opencv (requirements/extras.txt)")
    monkeypatch.setattr(vector, "physical_cores", lambda: cores)
    asked = {"backend": "auto", **vec}  # CartPole's .ini says serial
    args = pufferl.load_config(name, ["--env.num-envs=1",
                                      *(f"--vec.{key}={value}" for key, value in asked.items())])
    with vector.make(name, **vec) as script, pufferl.load_env(name, args) as line:
        assert type(script) is type(line) is expected
        assert script.num_envs == line.num_envs == vec["num_envs"]


def test_what_else_chooses_a_backend(monkeypatch):
    class Mine(Serial):
        pass

    monkeypatch.setattr(vector, "physical_cores", lambda: 4)
    assert vector.choose_backend(Walk, Mine, 4) is Mine
    assert vector.choose_backend([Walk(), Walk()], None, 2) is Serial  # instances live here
    assert vector.choose_backend([Walk, Walk], "auto", 2) is Multiprocessing
    assert (vector.choose_backend(Squared, "puffer") is Serial
            and vector.choose_backend("cartpole", "puffer") is Native)
    with pytest.raises(ValueError, match="breakout is in C: take native"):
        vector.make("breakout", backend="package")
    with pytest.raises(ValueError, match="one dict of env_kwargs for all"):
        vector.make("gym/CartPole-v1", 2, "package", env_kwargs=[{}, {"max_episode_steps": 3}])


def test_what_cannot_be_sent_to_a_process_is_named():
    import threading

    lock = threading.Lock()
    vecenv = vector.make(lambda: lock and Walk(), 2, Multiprocessing, num_workers=2)
    with vecenv, pytest.raises(TypeError,
                               match=r"cannot be sent to another process .*take backend serial"):
        vecenv.reset()


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("gym/CartPol-v1", ValueError, "Did you mean CartPole-v1"),
        ("pettingzoo/knights", ValueError, "expected pettingzoo/FAMILY/NAME"),
        ("pettingzoo/butterfly/nothing_v0", ImportError, "install line"),
        ("pettingzoo/butterfly/knights_archers_zombies_v0", ImportError,
         r"did you mean knights_\w+_v\d+\?"),
        (f"{__file__}:Nothing", ValueError, "it has .*Walk"),
        ("nowhere.py:Nothing", ValueError, "no such file"),
    ],
)
def test_names_that_do_not_exist(name, error, message):
    with pytest.raises(error, match=message):
        vector.make(name)


def test_a_vector_environment_counts_as_its_copies():
    """Each copy has its own number, seed, log and episodes; two of them are one longer vector."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    pair = lambda: gymnasium.vector.SyncVectorEnv([lambda: Walk(limit=4)] * 2, autoreset_mode=mode)  # noqa: E731
    single = vector.make(Walk, 4, Serial, env_kwargs={"limit": 4})
    for options in ({"backend": Serial}, {"backend": Multiprocessing, "num_workers": 2}):
        with vector.make(pair, 2, **options) as vecenv:
            assert vecenv.num_envs == 4 and vecenv.agents_per_env == 1
            np.testing.assert_array_equal(vecenv.reset(seed=5)[0], single.reset(seed=5)[0])
            for _ in range(4):
                ours, expected = vecenv.step(np.ones(4, int)), single.step(np.ones(4, int))
                for a, b in zip(ours[:4], expected[:4], strict=True):
                    np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal([vecenv.render(i) for i in range(4)],
                                          [single.render(i) for i in range(4)])
            ours, expected = [vecenv.log(env) for env in range(4)], [single.log(env)
                                                                     for env in range(4)]
            assert ours == [pytest.approx(log) for log in expected] and ours[0]["n"] == 1


@pytest.mark.parametrize("backend", ["package", "native"])  # the second is what it was called
@pytest.mark.parametrize("name", ["gym/CartPole-v1", "gym/ALE/Pong-v5"])
def test_a_packages_own_vector_environment(name, backend):
    if "ALE" in name:
        for package in ("ale_py", "cv2"):
            pytest.importorskip(package, reason="needs ale-py and opencv (requirements/extras.txt)")
    # 4 frames a step
    limit = {"max_num_frames_per_episode": 320} if "ALE" in name else {"max_episode_steps": 80}
    kwargs = {**limit, "reward_scale": 0.5}
    serial = vector.make(name, env_kwargs=kwargs)
    with serial, vector.make(environments.load_creator(name), 4, backend, env_kwargs=kwargs) as native:
        assert type(native) is vector.Package
        assert native.single_observation_space == serial.single_observation_space
        assert native.single_action_space == serial.single_action_space
        assert (native.num_envs, native.num_agents) == (4, 4)
        history = [native.reset(seed=3)[0].copy()] + [native.step(np.ones(4, int))[0].copy()
                                                      for _ in range(85)]
        # each has its own seed
        assert any((observations != observations[0]).any() for observations in history)
        log = native.log(2)
        assert 0 < log["episode_length"] <= 80 and "env_id" not in log and native.log()["n"] >= 3
        if "CartPole" in name:
            # the true one, whatever reward_scale is
            assert log["episode_return"] == log["episode_length"]
        np.testing.assert_array_equal(native.reset(seed=3)[0], history[0])
        for expected in history[1:]:
            np.testing.assert_array_equal(native.step(np.ones(4, int))[0], expected)


class Generous(CartPoleEnv):
    """Its package's vector environment pays less."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 2 * reward, *rest


class Endless(CartPoleVectorEnv):
    """Takes a time limit and does not keep it."""

    def __init__(self, num_envs, max_episode_steps=0, **options):
        super().__init__(num_envs, max_episode_steps=10**6, **options)


@pytest.mark.parametrize("one, many, same", [
    (CartPoleEnv, CartPoleVectorEnv, True), (Generous, CartPoleVectorEnv, False),
    (CartPoleEnv, Endless, False), (CartPoleEnv, None, False)])
def test_a_vector_environment_that_is_another_is_found_out(one, many, same):
    gymnasium.register("Tried-v0", one, vector_entry_point=many, max_episode_steps=500)
    try:
        assert environments.same_episodes("Tried-v0") is same
    finally:
        environments.same_episodes.cache_clear()
        del gymnasium.registry["Tried-v0"]


def test_environments_by_name():
    settings = environments.load_creator("gym/CartPole-v1").settings
    assert settings == {"sutton_barto_reward": False, "max_episode_steps": 500, "reward_scale": 1.0}
    for backend in ("serial", "multiprocessing"):
        with vector.make(
            "gym/CartPole-v1", 2, backend, env_kwargs={"reward_scale": 0.5, "max_episode_steps": 3}
        ) as vecenv:
            vecenv.reset(seed=0)
            rewards = [vecenv.step([1, 0])[1].tolist() for _ in range(6)]
            assert rewards == [[0.5, 0.5]] * 6 and vecenv.log()["score"] == 3
    assert environments.load_creator(f"{__file__}:Walk").settings == {"limit": 6}
    with vector.make(f"{__file__}:Walk", 2, Multiprocessing, num_workers=2, env_kwargs={"limit": 2}) as vecenv:
        vecenv.reset(seed=0)
        assert vecenv.step([1, 1])[0].view(vecenv.driver_env.obs_dtype)["t"].tolist() == [[1], [1]]
        assert vecenv.step([1, 1])[3].all()


# --------------------------------------------------------------------------------------------------
# Under the trainer


class Constant(gymnasium.Env):
    """Reward 1 at every step of 5; the end is a truncation or a termination."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, terminates=False):
        self.terminates = terminates

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.t += 1
        end = self.t == 5
        return np.ones(1, np.float32), 1.0, end and self.terminates, end and not self.terminates, {"t": self.t}


class Numbered(Constant):
    """Episodes of 5 and 10 steps by turns; whatever `told` says is in the info of an episode's last step."""

    def __init__(self, told):
        super().__init__()
        self.told, self.episodes = told, 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed)

    def step(self, action):
        self.t += 1
        end = self.t == 5 * (1 + self.episodes % 2)
        return np.ones(1, np.float32), 1.0, end, False, {name: self.t for name in self.told} if end else {}


@pytest.mark.parametrize("told", [(), ("n",), ("episode",), ("n", "episode", "win")])
def test_an_info_may_have_any_names(told):
    """n, which counts episodes in a PufferEnv's infos, and episode, which RecordEpisodeStatistics writes, too."""
    with vector.make(lambda: Numbered(told), 2, Serial) as vecenv:
        vecenv.reset()
        for _ in range(30):
            vecenv.step(np.zeros(2, int))
        log = vecenv.log()
    assert log["n"] == 8 and log["episode_return"] == log["score"] == 7.5
    assert log.get("info_n", 7.5) == log.get("win", 7.5) == 7.5 and ("info_n" in log) == ("n" in told)


def test_a_return_that_only_some_ends_tell_is_noticed():
    """A TimeLimit around RecordEpisodeStatistics cuts episodes whose end that does not see."""
    wrappers = gymnasium.wrappers
    half = lambda: wrappers.TransformReward(wrappers.RecordEpisodeStatistics(Numbered(())), lambda r: r / 100)  # noqa: E731
    with (vector.make(lambda: wrappers.TimeLimit(half(), 7), 2, Serial) as vecenv,
          pytest.warns(UserWarning, match="sees the end of some episodes only, so episode_return mixes")):
        vecenv.reset()
        for _ in range(30):
            vecenv.step(np.zeros(2, int))


class Reports(emulation.PufferEnv):
    """PufferLib's way: an info now and then, which does not say of how many episodes."""

    single_observation_space, single_action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
    num_agents = 4

    def reset(self, seed=None):
        self.tick, self.observations[:] = 0, 1
        return self.observations, []

    def step(self, actions):
        self.tick += 1
        self.rewards[:], self.terminals[:] = 1, self.tick % 2 == 0
        self.masks[2:] = False  # two are dead, and their ends count for nothing
        infos = [{"score": 3.0}] if self.tick % 16 == 0 else []
        return self.observations, self.rewards, self.terminals, self.truncations, infos


def test_episodes_are_counted_if_reports_do_not_say_how_many(tmp_path):
    _, _, log = converged_values(vector.make(Reports, 4, Serial), tmp_path, epochs=5)
    assert log["score"] == 3 and log["n"] in range(80, 401, 80), "half of 20 steps, of 8 agents alive, in each epoch"


def converged_values(vecenv, tmp_path, epochs=150):
    """V of the steps that count, after training with gamma 0.9 on Constant."""
    import models
    import pufferl

    config = {"total_timesteps": epochs * vecenv.num_agents * 20, "horizon": 20, "gamma": 0.9,
              "gae_lambda": 0.95,
              "vf_clip_coef": float("inf"), "learning_rate": 0.01, "replay_ratio": 4.0,
              "minibatch_size": 320, "norm_reward": False,
              "data_dir": str(tmp_path)}
    torch.manual_seed(0)
    trainer = pufferl.PuffeRL(config, vecenv,
                              models.MinGRUPolicy(vecenv.driver_env, hidden_size=16))
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    trainer.release()
    storage = {name: tensor.numpy() for name, tensor in trainer.storage.items()
               if tensor is not None}
    return trainer.buffers.values[:-1].numpy(), storage, trainer.environment


def test_truncated_values_are_those_of_an_endless_episode(tmp_path):
    values, _, log = converged_values(vector.make(Constant, 16, Serial), tmp_path)
    np.testing.assert_allclose(values, 10.0, atol=0.5)
    ends = {"episode_return_min": 5, "episode_return_max": 5}
    assert log == {"t": 5, "episode_return": 5, "episode_length": 5, "score": 5,
                   "n": log["n"], **ends}


def test_terminated_values_are_those_of_the_rest_of_the_episode(tmp_path):
    vecenv = vector.make(Constant, 16, Multiprocessing, num_workers=2, batch_size=8,
                         env_kwargs={"terminates": True})
    values, _, _ = converged_values(vecenv, tmp_path)
    rest = (1 - 0.9 ** np.arange(5, 0, -1)) / (1 - 0.9)
    np.testing.assert_allclose(values, np.tile(rest, 4)[:, None].repeat(16, 1), atol=0.5)


def test_dead_steps_of_next_step_autoreset_count_for_nothing(tmp_path):
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    vecenv = vector.make(lambda: gymnasium.vector.SyncVectorEnv([Constant] * 16,
                                                                autoreset_mode=mode))
    values, storage, log = converged_values(vecenv, tmp_path)
    assert (log["episode_return_min"], log["episode_return_max"]) == (5, 5), "a dead step is no episode"
    valid = storage["valid"][:-1].astype(bool)
    assert 0 < (~valid).sum() < valid.sum() and storage["rewards"][~valid].sum() == 0
    assert (storage["valid"][1:][storage["truncations"] != 0] == 0).all()
    np.testing.assert_allclose(values[valid], 10.0, atol=0.5)


class Copycats(vector.Vector):
    """A backend from nothing but the docstring of Vector: agents in numpy are rewarded for the
    number that they see. An agent is cut off after 4 steps; two buffers."""

    def __init__(self, agents):
        self.name, self.seed, self.num_envs, self.num_agents = "copycat", 3, agents, agents
        self.agents_per_batch = agents // 2
        self.single_observation_space, self.single_action_space = spaces.Box(0, 1, (3,), np.float32), spaces.Discrete(3)
        self.observation_shape, self.observation_dtype, self.has_action_masks = (3,), np.dtype(np.float32), False
        self.action_heads, self.action_dims, self.action_dtype = [3], 1, np.dtype(np.int32)
        self.ranges = [slice(0, agents // 2), slice(agents // 2, agents)]
        self.num_workers = self.threads_per_worker = self.num_threads = 1

    def allocate(self, horizon):
        self.storage = self.new_storage(horizon, np.zeros)
        self.restart(self.seed)
        self.begin()
        return self.storage

    def restart(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.age, self.returns, self.ended = np.zeros(self.num_agents), np.zeros(self.num_agents), []
        self.storage.observations[-1] = np.eye(3)[self.rng.integers(0, 3, self.num_agents)]
        self.storage.resets[-1] = self.storage.valid[-1] = 1

    def wait(self, worker=0):
        if not self._waiting[worker]:
            return None
        buffer = self._waiting[worker].pop(0)
        if self._t[buffer] < len(self.storage.actions):
            self._waiting[worker].append(buffer)  # in turns
        return buffer, self._t[buffer]

    def advance(self, buffer):
        s, t, agents = self.storage, self._t[buffer], self.ranges[buffer]
        s.rewards[t, agents] = s.actions[t, agents, 0] == s.observations[t, agents].argmax(1)
        self.returns[agents] += s.rewards[t, agents]
        self.age[agents] += 1
        cut = self.age[agents] == 4
        s.terminals[t, agents], s.truncations[t, agents], s.resets[t + 1, agents] = 0, cut, cut
        s.valid[t + 1, agents] = 1
        s.observations[t + 1, agents] = np.eye(3)[self.rng.integers(0, 3, len(cut))]
        s.final_observations[agents] = s.observations[t + 1, agents]
        self.ended += self.returns[agents][cut].tolist()
        self.returns[agents] *= ~cut
        self.age[agents] *= ~cut
        self._t[buffer] = t + 1

    def log(self, env=None):
        ended, self.ended = self.ended, []
        return {"score": float(np.mean(ended)), "n": len(ended)} if ended else {}

    def save(self):
        return np.zeros(0, np.uint8)

    def close(self):
        self.closed = True


class Threads(vector.Emulated):
    """A backend for environments in Python from the docstring's second part: a thread a worker."""

    threads = None

    def _start(self, horizon):
        self.storage = self.new_storage(horizon, np.zeros)
        self.threads, self.futures = ThreadPoolExecutor(self.num_processes), {}
        self.envs = [workers.Envs(*cloudpickle.loads(self.envs_of(worker)))
                     for worker in range(self.num_processes)]
        for worker, envs in enumerate(self.envs):
            envs.bind(vars(self.storage), self.agents_of(worker).start)

    def _send(self, worker, kind, number):
        self.futures[self.threads.submit(self.envs[worker].do, kind, number)] = worker

    def _collect(self):
        for future in wait(self.futures, 0.5, FIRST_COMPLETED).done:
            worker = self.futures.pop(future)
            if future.exception():
                self._fail(worker, "raised", future.exception())
            self._finish(worker, future.result())

    def _stop(self):
        if self.threads is not None:
            self.threads.shutdown(wait=False)


class OnlyDuties:
    """A backend of which nothing can be asked but what the docstring names."""

    def __init__(self, vecenv):
        self._vecenv = vecenv

    def __getattr__(self, name):
        assert re.search(rf"\b{name}\b", vector.Vector.__doc__), (
            f"vecenv.{name} is no duty of a backend")
        return getattr(self._vecenv, name)


def trained(vecenv, folder, epochs):
    """The trainer, which has learned and saved, and what it logged last."""
    import models
    import pufferl

    torch.manual_seed(0)
    vecenv = OnlyDuties(vecenv)
    config = {"env": vecenv.name, "total_timesteps": epochs * vecenv.num_agents * 16, "horizon": 16,
              "replay_ratio": 2.0, "minibatch_size": 4 * vecenv.num_agents, "learning_rate": 0.01,
              "data_dir": str(folder), "log_interval": 0.0}
    trainer = pufferl.PuffeRL(config, vecenv,
                              models.MinGRUPolicy(vecenv.driver_env, hidden_size=16))
    for _ in range(epochs):
        log = trainer.evaluate()
        trainer.train()
    trainer.save_checkpoint()
    trainer.release()
    return trainer, log


def test_a_backend_of_ones_own_trains(tmp_path):
    vecenv = Copycats(64)
    _, log = trained(vecenv, tmp_path, 40)
    assert vecenv.closed and log["score"] > 3.5  # of 4
    with Copycats(64) as vecenv:  # and has the synchronous API
        observations, _ = vecenv.reset()
        for _ in range(8):
            observations, rewards, terminals, truncations, infos = vecenv.step(observations.argmax(1))
            assert rewards.all() and not terminals.any()
        assert truncations.all() and infos == [{"score": 4.0, "n": 64}]
        vecenv.async_reset()
        assert vecenv.recv()[5].tolist() == list(range(64))


def test_threads_of_ones_own_give_the_same_and_train(tmp_path):
    make = lambda backend, **options: vector.make(Walk, 4, backend, env_kwargs={"limit": 5}, **options)  # noqa: E731
    assert_same(rollout(make(Serial)), rollout(make(Threads, num_workers=2)))
    trainer, log = trained(make(Threads, num_workers=4, batch_size=2), tmp_path, 3)
    assert trainer.global_step == 3 * 16 * 4 and 3 < log["episode_length"] <= 5
    kwargs = [{}, {"trouble": "raise"}]
    with pytest.raises(vector.WorkerError,
                       match=r"worker 1 \(environment 1 of Walk\) raised.\nthe walker fell"):
        rollout(vector.make(Walk, 2, Threads, num_workers=2, env_kwargs=kwargs))


def test_the_command_line_takes_python_environments(tmp_path):
    import pufferl
    from tools import watch

    (tmp_path / "my_env.py").write_text(
        "import gymnasium\n\n\n"
        "def make_env(limit=9):\n    return gymnasium.make('Acrobot-v1', max_episode_steps=limit)\n"
    )
    name = f"{tmp_path}/my_env.py:make_env"
    options = ["--train.total-timesteps", "512", "--train.horizon", "16", "--vec.num-envs", "4",
               "--vec.num-workers",
               "2", "--env.limit", "7", "--policy.hidden-size", "16", "--logger", "none",
               "--data-dir", str(tmp_path)]
    trainer = pufferl.train(name, pufferl.load_config(name, options))
    assert trainer.global_step == 512 and trainer.environment["episode_length"] == 7
    resumed = pufferl.train(
        name,
        pufferl.load_config(name,
                            [*options, "--train.total-timesteps", "1024", "--resume", "latest"])
    )
    assert resumed.global_step == 1024 and resumed.run_folder == trainer.run_folder
    results = watch.evaluate(
        name,
        pufferl.load_config(name, [*options, "--load-model-path", "latest", "--eval.episodes", "3"])
    )
    assert results["score"][0] == -7
    with pytest.raises(pufferl.ConfigError, match=r"vec.num_workers can be 1, 2, 4"):
        pufferl.load_env(name, pufferl.load_config(name, [*options, "--vec.num-workers", "3"]))
    with pytest.raises(pufferl.ConfigError, match="Did you mean CartPole-v1"):
        pufferl.load_config("gym/CartPol-v1")


# with the seed of its training, the mean return it must reach, and the package it needs
CONFIGS = [
    ("gym_cartpole", 0, 475, "gymnasium"),
    ("gym_acrobot", 0, -100, "gymnasium"),
    ("gym_pendulum", 0, -250, "gymnasium"),
    ("gym_lunarlander", 1, 200, "Box2D"),
    ("minigrid", 0, 0.9, "minigrid"),
    ("minigrid_doorkey", 0, 0.9, "minigrid"),
    ("mpe", 0, -21, "mpe2"),  # untrained -28
]


@pytest.mark.slow
@pytest.mark.parametrize("name, seed, threshold, package", CONFIGS)
def test_shipped_configs_learn(name, seed, threshold, package, tmp_path):
    """Mean return of 64 fresh episodes after the config's own training."""
    import pufferl
    from tools import watch

    pytest.importorskip(package, reason=f"needs {package} (requirements/extras.txt)")
    options = ["--data-dir", str(tmp_path), "--logger", "none", "--train.seed", str(seed)]
    if package != "gymnasium":
        # what the figures in docs/environments.md were reached with
        options += ["--vec.num-threads", "1"]
    pufferl.train(name, pufferl.load_config(name, options))
    options += ["--load-model-path", "latest", "--eval.episodes", "64"]
    results = watch.evaluate(name, pufferl.load_config(name, options))
    assert results["score"][0] >= threshold


def test_a_misspelt_keyword_of_makes_own_is_told():
    for env in ("squared", "gym/CartPole-v1"):
        with pytest.raises(ValueError, match=r"'batchsize': did you mean batch_size\?.*make "
                           r"itself takes num_w"):
            vector.make(env, batchsize=2)


def test_a_ray_that_does_not_start_is_said(monkeypatch):
    ray = pytest.importorskip("ray")

    def fails(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(vector.WorkerError, match="Ray did not start"), vector.make(Walk, 2, "ray") as vecenv:
        vecenv.reset()


class Broken(CartPoleEnv):
    """One of its steps is interrupted, or has a bug."""

    left, how = 10**9, KeyboardInterrupt

    def step(self, action):
        Broken.left -= 1
        if Broken.left == 0:
            raise self.how
        return super().step(action)


@pytest.mark.parametrize("how", [KeyboardInterrupt, ZeroDivisionError])
def test_a_run_goes_on_after_a_step_that_was_interrupted(how, tmp_path, monkeypatch):
    """As in a notebook, whose cell is stopped."""
    monkeypatch.setattr(Broken, "how", how)
    env = vector.make(Broken, 4, "serial")
    trainer = pufferl.PuffeRL(env=env, policy=models.FeedForward(env, 8), horizon=16, minibatch_size=32, data_dir=None)
    trainer.evaluate()
    trainer.train()
    trainer.save_checkpoint(str(tmp_path / "last.pt"))
    monkeypatch.setattr(Broken, "left", 30)
    with pytest.raises(how):
        trainer.evaluate()
    trainer.load_checkpoint(str(tmp_path / "last.pt"))
    trainer.evaluate()
    trainer.train()
    trainer.close()


class Strange(gymnasium.Env):
    """From its second step on, a field has what its space has not."""

    observation_space = spaces.Dict(at=spaces.Discrete(5),
                                    to=spaces.MultiDiscrete([2, 3], start=[1, 1]),
                                    x=spaces.Box(-1, 1, (2,), np.float32))
    action_space = spaces.Discrete(2)

    def __init__(self, strange=None, value=None):
        self.strange, self.value = strange, value

    def _see(self):
        seen = {"at": 4, "to": np.array([1, 3]), "x": np.array([0, 1], np.float32)}
        return seen | ({self.strange: self.value} if self.steps > 1 and self.strange else {})

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def step(self, action):
        self.steps += 1
        return self._see(), 1.0, False, self.steps == 9, {}


class Plain(Strange):
    """With one field, which many environments step together."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def _see(self):
        return np.array(self.value if self.steps > 1 else [0, 1], np.float32)


def outside_said(env, /, **config):
    """What a run's signs say of observations outside their space; None for nothing."""
    network = models.Encoded(env, 8)
    network = models.Normalized(env, network) if config.get("norm_obs") else network
    config = {"horizon": 16, "minibatch_size": 32, "data_dir": None, "log_interval": 0, **config}
    trainer = pufferl.PuffeRL(config, env, network)
    for _ in range(3):
        trainer.evaluate()
        trainer.train()
    trainer.close()
    return trainer.signs.said.get("sign_observations_outside", (0, None))[1]


@pytest.mark.parametrize("backend", ["serial", "multiprocessing", "vector"])
@pytest.mark.parametrize("make, value, words", [
    (("at",), 5, r"\['at'\] was 5, declared are 0 to 4"),
    (("to",), np.array([0, 3]), r"\['to'\]\[0\] was 0, declared are 1 to 2"),
    (("x",), np.array([0, 7], np.float32), r"\['x'\]\[1\] was 7.0, declared are -1.0 to 1.0"),
    (("x",), np.array([0, 1 + 1e-7], np.float64), None),
    ((), [0, 7], r"\[1\] was 7.0"), ((), [0, 1], None)])
def test_what_lies_outside_its_space_after_the_first_step_is_said(backend, make, value, words):
    def creator(**_):
        return Strange(*make, value) if make else Plain(value=value)

    env = (vector.make(creator, 4, backend) if backend != "vector"
           else vector.make(lambda: gymnasium.vector.SyncVectorEnv([creator] * 4)))
    said = outside_said(env)
    assert (said is None) if words is None else re.search(words, said), said
    with vector.make(creator, 1, "serial") as env:
        problems, notes = environments.check(creator, env, {}, 50)
    if words is not None:
        assert problems or any("lies outside" in note for note in notes)


@pytest.mark.parametrize("high, said", [("TARGET", None), (
    "AGENT", r"observation\[\d+, \d+\] was 2, declared are 0 to 1 .*mine.h --check")])
def test_observations_in_c_outside_their_space_are_said(tmp_path, high, said):
    path, text = tmp_path / "mine.h", (ROOT / "ocean/squared/squared.h").read_text()
    assert text.count("high = TARGET") == 1
    path.write_text(text.replace("high = TARGET", f"high = {high}"))
    found = outside_said(vector.make(str(path), 4), env=str(path))
    assert (found is None) if said is None else re.search(said, found), found


@pytest.mark.parametrize("value, normalised, expected", [
    (7, True, True), (1.9, True, False), (1.9, False, True), (np.nan, False, False),
    (np.inf, False, True)])
def test_what_a_normaliser_copes_with_and_nan_are_not_outside(value, normalised, expected):
    flat = emulation.FlatObservation(spaces.Box(-1, 1, (2,), np.float32))
    count, words = flat.find_outside(np.array([[0, value]], np.float32), np.ones(1, np.uint8),
                                     1.0 if normalised else 1e-6)
    assert count == expected and bool(words) == expected
    if np.isfinite(value):
        env = vector.make(lambda **_: Plain(value=[0, value]), 4, "serial")
        said = outside_said(env, norm_obs=normalised)
        assert (said is not None) is expected


def test_what_the_dead_see_is_not_outside():
    flat = emulation.FlatObservation(spaces.Dict(at=spaces.Discrete(3, start=1)))
    rows = np.stack([flat.flatten({"at": 2}), flat.flatten({"at": 0})])
    assert flat.find_outside(rows, np.array([1, 0], np.uint8), 0.0) == (0, "")
    assert flat.find_outside(rows, np.array([1, 1], np.uint8), 0.0)[0] == 1


class Wide(CartPoleEnv):
    """Its bytes come as int64."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (4,), np.uint8)

    def reset(self, **options):
        return np.full(4, 7), super().reset(**options)[1]

    def step(self, action):
        return np.full(4, 9), *super().step(action)[1:]


def test_a_wider_type_than_the_space_says_is_said_once():
    emulation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with vector.make(Wide, 3, "serial") as env:
            env.reset()
            env.step(np.zeros(3))
    assert [str(one.message) for one in found] == [
        "an observation is int64, but its space says uint8: numbers that do not fit into uint8 are changed without an "
        "error. Return uint8."]


class Whole(Strange):
    """Later its whole numbers may come as another dtype."""

    observation_space = spaces.Box(0, 9, (2,), np.int16)

    def __init__(self, later=np.float64):
        self.later = later

    def _see(self):
        return np.array([3, 4], np.int16 if self.steps < 2 else self.later)


class WholeVector(gymnasium.vector.SyncVectorEnv):
    """Likewise, of many."""

    def step(self, actions):
        observations, *rest = super().step(actions)
        later = self.envs[0].steps > 1
        return observations.astype(np.float64) if later else observations, *rest


@pytest.mark.parametrize("creator, words", [
    (lambda: Strange("at", np.float64(3.5)), r"observation\['at'\] is float64, .* int64"),
    (lambda: Strange("x", np.array([0.5, 0.5])), None),
    (Whole, "observation is float64, .* int16"),
    (lambda: WholeVector([lambda: Whole(np.int16)] * 2), "observation is float64, .* int16")])
def test_another_dtype_after_the_first_step_is_said_once(creator, words):
    emulation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found, vector.make(creator, 2, "serial") as env:
        warnings.simplefilter("always")
        env.reset()
        for _ in range(8):
            env.step(np.zeros(env.num_agents))
    texts = [str(one.message) for one in found if "its space says" in str(one.message)]
    assert len(texts) == (words is not None), texts
    assert all(re.search(words, text) for text in texts), texts


class Paced(CartPoleEnv):
    """Its rewards are its `pace`, which a method can change, too."""

    def __init__(self, pace=1.0):
        super().__init__()
        self.pace = pace

    def step(self, action):
        seen, _, *ends = super().step(action)
        return seen, self.pace, *ends

    def faster(self, by=1.0):
        self.pace += by
        return self.pace


@pytest.mark.parametrize("backend", ["serial", "multiprocessing", pytest.param("ray", marks=pytest.mark.slow)])
def test_running_environments_are_asked_and_changed(backend):
    """One within a wrapper; in a rollout of a trainer too."""
    if backend == "ray":
        pytest.importorskip("ray")
    workers = {} if backend == "serial" else {"num_workers": 2}
    with vector.make(lambda **_: gymnasium.wrappers.TimeLimit(Paced(), 9), 4, backend, **workers) as env:
        assert env.call("pace") == [1.0] * 4
        env.reset()
        env.set_attr("pace", 3.0)
        assert env.call("faster", by=2.0) == env.call("pace") == [5.0] * 4
        assert (env.step(np.zeros(4))[1] == 5).all()
        for ask, words in ((lambda: env.call("pase"), "has no pase, and what it wraps has none"),
                           (lambda: env.set_attr("pase", 1), "has no pase, and what it wraps has none"),
                           (lambda: env.set_attr("_max_episode_steps", 3), "of TimeLimit was read when")):
            with pytest.raises(AttributeError, match=words):
                ask()
        assert (env.step(np.zeros(4))[1] == 5).all()
    with pytest.raises(RuntimeError, match="are closed"):
        env.call("pace")


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_to_ask_before_the_first_episode_changes_none_of_it(backend):
    seen = []
    for ask in (False, True):
        with vector.make(Paced, 2, backend, seed=3) as env:
            if ask:
                assert env.call("pace") == [1.0] * 2
            seen.append([env.reset()[0].copy(), env.reset()[0].copy()])
    np.testing.assert_array_equal(*seen)


def test_environments_are_changed_between_rollouts_of_a_trainer():
    env = vector.make(Paced, 4, "multiprocessing", num_workers=2)
    env.set_attr("pace", 9.0)  # holds in the processes that the trainer starts
    trainer = pufferl.PuffeRL(env=env, policy=models.FeedForward(env, 8), horizon=16, minibatch_size=32, data_dir=None,
                              norm_reward=False)
    for pace in (9.0, 7.0, 2.0):
        if pace != 9.0:
            env.set_attr("pace", pace)
        trainer.evaluate()
        assert (trainer.storage["rewards"] == pace).all()
        trainer.train()
    trainer.close()


def test_a_vector_environment_of_a_package_is_asked_by_its_own_methods():
    with vector.make(gymnasium.vector.SyncVectorEnv([Paced] * 3)) as env:
        env.reset()
        env.set_attr("pace", 4.0)
        assert env.call("faster") == [5.0] * 3
        assert (env.step(np.zeros(3))[1] == 5).all()
    with vector.make(gymnasium.wrappers.vector.ClipReward(gymnasium.vector.SyncVectorEnv([Paced] * 3), 0, 9)) as env:
        assert env.call("pace") == [1.0] * 3
    with vector.make("gym/CartPole-v1", 3) as env:  # one object for all
        assert isinstance(env, vector.Package)
        env.set_attr("force_mag", 4.0)
        assert env.call("force_mag") == [4.0]


@pytest.mark.parametrize("wrapper, said", [(gymnasium.wrappers.NormalizeObservation, "norm-obs True"),
                                           (gymnasium.wrappers.NormalizeReward, "norm-reward True"),
                                           (gymnasium.wrappers.ClipReward, None)])
def test_a_wrapper_that_measures_for_itself_is_said(wrapper, said):
    """Also if another one is around it."""
    options = {"max_reward": 1.0} if said is None else {}
    emulation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        vector.make(lambda **_: gymnasium.wrappers.TimeLimit(wrapper(CartPoleEnv(), **options), 10), num_envs=2,
                    backend="serial").close()
    texts = [str(one.message) for one in found if "begin anew" in str(one.message)]
    assert [said in text and wrapper.__name__ in text for text in texts] == [True] * (said is not None)


def test_a_vector_wrapper_that_measures_is_said():
    emulation.warn_once.cache_clear()
    env = gymnasium.wrappers.vector.NormalizeReward(gymnasium.make_vec("CartPole-v1", num_envs=2))
    with pytest.warns(UserWarning, match=r"^NormalizeReward: a resume.*norm-reward True"):
        vector.make(env).close()


def test_what_an_environment_keeps_as_env_is_no_wrapper():
    """An array, or something that refers back to the environment."""
    class Keeps(CartPoleEnv):
        def __init__(self, back=False):
            super().__init__()
            self.env = np.zeros(5) if not back else Keeps()
            if back:
                self.env.env = self

    for back in (False, True):
        vector.make(lambda back=back, **_: Keeps(back), num_envs=2, backend="serial").close()
