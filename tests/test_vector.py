"""Backends for environments in Python: the same numbers from each; nothing left running when something breaks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from conftest import read_until, start
from gymnasium import spaces

import emulation
import environments
import ocean
import vector
from vector import Multiprocessing, Native, Ray, Serial, WorkerError

ROOT = Path(__file__).resolve().parent.parent
# Workers get this file's classes by value, so that they need not import what the tests import.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


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

    observation_space = spaces.Dict({"x": spaces.Box(-100, 100, (2,), np.float64), "t": spaces.Discrete(50)})
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
            history.append((*(array.copy() for array in arrays), vecenv.storage.final_observations.copy(), infos))
        return history, vecenv.log()


def assert_same(a, b):
    for x, y in zip(a[0], b[0], strict=True):
        for p, q in zip(x[:-1], y[:-1], strict=True):
            np.testing.assert_array_equal(p, q)
        assert x[-1] == y[-1]
    assert a[1].keys() == b[1].keys() and a[1]["n"] > 0
    for name, value in a[1].items():
        assert value == pytest.approx(b[1][name])


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves a process or a file in shared memory."""

    def shared():
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def command(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:  # it has just ended, as those of Ray do in their own time
            return ""

    def children():
        return {p.pid for p in psutil.Process().children(recursive=True) if "workers.serve" in command(p)}

    def others_have(name):
        """Whether another program on this machine, which came meanwhile, has that file in its memory."""
        ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if int(maps.parent.name) not in ours and f"/dev/shm/{name}" in maps.read_text():
                    return True
        return False

    before = shared(), children()
    yield
    assert children() == before[1]
    assert [name for name in shared() - before[0] if not others_have(name)] == []


# ---------------------------------------------------------------------------------------------------------------------


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
        assert vecenv.num_agents == 4 * kwargs.get("num_agents", 1) and vecenv.agents_per_batch == vecenv.num_agents
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
            assert masks.all() and rewards.shape == terminals.shape == truncations.shape == (2,) and infos == []
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
        for call in (vecenv.recv, lambda: vecenv.send(np.zeros(2)), lambda: vecenv.step(np.zeros(2))):
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
    for options in ({"backend": "serial"}, {"backend": "multiprocessing", "num_workers": 2, "batch_size": 2}):
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
                np.testing.assert_array_equal(storage.resets[1:], storage.terminals | storage.truncations)
                rows.append({name: array.copy() for name, array in vars(storage).items() if array is not None})
            histories.append((rows, vecenv.log()))
    (rows, log), (others, other) = histories
    assert log["episode_length"] == 4 and log["score"] == log["episode_return"] and log["n"] == 12 == other["n"]
    for a, b in zip(rows, others, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


class Endless(gymnasium.Env):
    """A picture that counts its own steps, and never an end."""

    observation_space, action_space = spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(4, start=-2)

    def __init__(self, wrong=False, seen=observation_space, actions=action_space):
        self.wrong, self.observation_space, self.action_space = wrong, seen, actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = np.full((2, 3), self.np_random.integers(9), np.uint8), 0
        return self.x, {}

    def step(self, action):
        assert action in self.action_space
        self.t += 1
        self.x += np.uint8(action + 3)  # in place: a vectorizer must copy
        return np.zeros(5) if self.wrong and self.t > 2 else self.x, 0.5, False, False, {}


@pytest.mark.filterwarnings("ignore:.*share an object")
def test_time_limits_are_those_of_the_wrappers():
    """The wrappers that gymnasium.make adds are stepped past; episodes are the same as with them."""

    def limited(first, second):
        env = gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.PassiveEnvChecker(Endless()))
        return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.TimeLimit(env, first), second)

    limits = [(3, 9), (9, 4), (7, 7)]
    envs = [limited(*pair) for pair in limits]
    expected = [env.reset(seed=5 + i)[0].copy() for i, env in enumerate(envs)]
    rng, truncated = np.random.default_rng(0), 0
    with vector.make([lambda pair=pair: limited(*pair) for pair in limits], 3) as vecenv:
        np.testing.assert_array_equal(vecenv.reset(seed=5)[0], expected)
        for t in range(30):
            if t == 15:  # in the middle of episodes
                expected = [env.reset()[0] for env in envs]
                np.testing.assert_array_equal(vecenv.reset()[0], expected)
            actions = rng.integers(0, 4, 3)
            observations, rewards, terminals, truncations, infos = vecenv.step(actions)
            for i, env in enumerate(envs):
                observation, reward, terminated, cut, _ = env.step(actions[i] - 2)
                assert (rewards[i], terminals[i], truncations[i]) == (reward, terminated, cut)
                if cut:
                    truncated += 1
                    np.testing.assert_array_equal(vecenv.storage.final_observations[i], observation)
                    observation, _ = env.reset()
                np.testing.assert_array_equal(observations[i], observation)
            assert len(infos) == truncations.sum()
            assert all(info["episode_length"] == 2 * info["episode_return"] for info in infos)
    assert truncated == 20


def test_a_wrong_shape_after_many_steps_is_named():
    with vector.make(Endless, 2, env_kwargs=[{}, {"wrong": True}]) as vecenv:
        vecenv.reset(seed=0)
        with pytest.raises(ValueError, match=r"environment 1, .*Endless.*expected shape \(2, 3\), got shape \(5,\)"):
            for _ in range(3):
                vecenv.step(np.ones(2, int))


@pytest.mark.parametrize("options", [{"reward": np.ones(1)}, {"info": ()}, {"reward": np.ones(1), "info": ()}])
def test_what_the_first_step_allows_goes_on(options):
    """A reward that is an array of one; a reset that gives the observation alone."""

    class Loose(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)

        def __init__(self, reward=1.0, info=({},)):
            self.reward, self.info = reward, info

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return (np.zeros(1, np.float32), *self.info) if self.info else np.zeros(1, np.float32)

        def step(self, action):
            self.t += 1
            return np.full(1, self.t, np.float32), self.reward, self.t == 3, False, {}

    with vector.make(Loose, 2, env_kwargs=options) as vecenv:
        vecenv.reset(seed=0)
        steps = [vecenv.step([0, 1]) for _ in range(7)]
        assert vecenv.log()["episode_return"] == 3 and all((step[1] == 1).all() for step in steps)


def test_an_info_of_no_episode_is_not_counted():
    class Silent(Squared):
        def step(self, actions):
            return *super().step(actions)[:4], [{"perf": 1.0, "n": 0}]

    with vector.make(Silent, 2) as vecenv:
        vecenv.reset(seed=0)
        vecenv.step(np.zeros(8, int))
        assert vecenv.log() == {}


def test_one_action_must_be_an_array_too():
    for vecenv in (vector.make("cartpole"), vector.make(Walk)):
        with vecenv, pytest.raises(ValueError, match=r"shape \(\), expected \(1, 1\)"):
            vecenv.reset()
            vecenv.step(0)


def test_logs_of_one_environment_and_the_rest():
    with vector.make(Walk, 3, env_kwargs=[{"limit": 2}, {"limit": 3}, {"limit": 4}]) as vecenv:
        vecenv.reset(seed=0)
        for _ in range(4):
            vecenv.step(np.ones(3, int))
        assert vecenv.finished() == [0, 2]
        assert vecenv.log(0)["episode_length"] == 2 and vecenv.log(0) == {}
        assert vecenv.log()["n"] == 2 and vecenv.log() == {}


def test_c_environments_are_the_same_in_processes():
    native, rng = vector.make("cartpole", 6, num_threads=1, seed=5), np.random.default_rng(0)
    others = [
        vector.make(ocean.Cartpole, 3, Serial, seed=5, env_kwargs={"num_envs": 2}),
        vector.make("cartpole", 3, Multiprocessing, num_workers=3, seed=5, env_kwargs={"num_envs": 2}),
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
        ({"backend": "threads"}, "there are native, serial"),
        ({"backend": "native"}, "serial, multiprocessing and ray"),
        ({"num_envs": 2, "env_kwargs": [{}]}, "list of 1"),
        ({"num_envs": 0}, "must be 1 or more"),
    ],
)
def test_impossible_combinations_name_the_possible_ones(options, message):
    with pytest.raises(ValueError, match=message):
        vector.make(Walk, **{"backend": "multiprocessing", **options})


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("gym/CartPol-v1", ValueError, "Did you mean CartPole-v1"),
        ("pettingzoo/knights", ValueError, "expected pettingzoo/FAMILY/NAME"),
        ("pettingzoo/butterfly/nothing_v0", ImportError, "install line"),
        ("pettingzoo/butterfly/knights_archers_zombies_v0", ImportError, r"did you mean knights_\w+_v\d+\?"),
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
            assert vecenv.finished() == [0, 1, 2, 3]
            np.testing.assert_array_equal([vecenv.render(i) for i in range(4)], [single.render(i) for i in range(4)])
            ours, expected = [vecenv.log(env) for env in range(4)], [single.log(env) for env in range(4)]
            assert ours == [pytest.approx(log) for log in expected] and ours[0]["n"] == 1


@pytest.mark.parametrize("name", ["gym/CartPole-v1", "gym/ALE/Pong-v5"])
def test_a_packages_own_vector_environment_is_native(name):
    if "ALE" in name:
        pytest.importorskip("ale_py", reason="needs ale-py (requirements-extras.txt)")
    limit = {"max_num_frames_per_episode": 320} if "ALE" in name else {"max_episode_steps": 80}  # 4 frames a step
    kwargs = {**limit, "reward_scale": 0.5}
    serial = vector.make(name, env_kwargs=kwargs)
    with serial, vector.make(environments.load_creator(name), 4, "native", env_kwargs=kwargs) as native:
        assert native.single_observation_space == serial.single_observation_space
        assert native.single_action_space == serial.single_action_space
        assert (native.num_envs, native.num_agents) == (4, 4)
        history = [native.reset(seed=3)[0].copy()] + [native.step(np.ones(4, int))[0].copy() for _ in range(85)]
        assert any((observations != observations[0]).any() for observations in history)  # each has its own seed
        log = native.log(2)
        assert 0 < log["episode_length"] <= 80 and "env_id" not in log and native.log()["n"] >= 3
        if "CartPole" in name:
            assert log["episode_return"] == log["episode_length"]  # the true one, whatever reward_scale is
        np.testing.assert_array_equal(native.reset(seed=3)[0], history[0])
        for expected in history[1:]:
            np.testing.assert_array_equal(native.step(np.ones(4, int))[0], expected)


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


# ---------------------------------------------------------------------------------------------------------------------
# What breaks


@pytest.mark.parametrize(
    "trouble, message",
    [
        ("raise", r"(?s)worker 1 \(environments 2 to 3 of Walk\) raised.*in step.*ArithmeticError: the walker fell"),
        ("kill", r"worker 1 .* died by signal 9 \(SIGKILL\)"),
        ("segfault", r"(?s)worker 1 .* died by signal 11 \(SIGSEGV\).*in step"),
        ("hang", r"(?s)worker 1 .* has not answered for 1 s.*in step"),
        ("shape", r"(?s)worker 1 .* raised.*could not broadcast"),
        ("interrupt", r"(?s)worker 1 .* raised.*KeyboardInterrupt"),
    ],
)
def test_a_worker_in_trouble_is_an_error_that_says_what(trouble, message):
    kwargs = [{}, {}, {}, {"trouble": trouble}]
    timeout = 1 if trouble == "hang" else 600  # a busy machine may take long for what is right
    vecenv = vector.make(Walk, 4, Multiprocessing, num_workers=2, env_kwargs=kwargs, timeout=timeout)
    vecenv.reset(seed=0)
    begun = time.perf_counter()
    with pytest.raises(WorkerError, match=message):
        for _ in range(4):
            vecenv.step(np.ones(4, int))
    assert time.perf_counter() - begun < 100  # what hangs sleeps 1,000 s, and what dies is noticed at once


def hang_beside_another(backend):
    vecenv = vector.make(Walk, 2, backend, num_workers=2, batch_size=1, env_kwargs=[{}, {"trouble": "hang"}], timeout=1)
    vecenv.async_reset(seed=0)
    begun = time.perf_counter()
    with pytest.raises(WorkerError, match=r"worker 1 .*has not answered for 1 s"):
        while time.perf_counter() - begun < 100:
            vecenv.recv()
            vecenv.send([1])


def test_a_worker_that_hangs_is_noticed_while_others_answer():
    hang_beside_another(Multiprocessing)


def test_an_environment_that_cannot_be_made_in_the_worker():
    def creator(number=0):
        if number:
            raise OSError("no display")
        return Walk()

    with pytest.raises(WorkerError, match=r"(?s)worker 1 .*OSError: no display"):
        vector.make(creator, 2, Multiprocessing, num_workers=2, env_kwargs=[{}, {"number": 1}]).reset()


@pytest.mark.parametrize("options", [{"backend": Serial}, {"backend": Multiprocessing, "num_workers": 1}])
def test_closing_ends_what_it_can(options, tmp_path):
    """Slow environments have the time to close, one that fails does not keep the others open."""

    class Closes(Walk):
        def __init__(self, path, seconds, trouble=None):
            super().__init__(trouble)
            self.path, self.seconds = path, seconds

        def close(self):
            time.sleep(self.seconds)
            with open(self.path, "a") as file:
                file.write("closed ")
            raise OSError("the window is gone")

    seconds = [0.0, 0.0 if options["backend"] is Serial else 1.2, 0.0]
    envs = [{"path": str(tmp_path / str(i)), "seconds": seconds[i]} for i in range(3)]
    vecenv = vector.make(Closes, 3, env_kwargs=envs, **options)
    vecenv.reset(seed=0)
    with pytest.raises(OSError, match="the window is gone"):
        vecenv.close()
    times = [(tmp_path / str(i)).read_text().split().count("closed") for i in range(3)]
    assert times == [1 if options["backend"] is Serial else 2, 1, 1]  # processes have an environment 0 and we have one
    envs[1].update(trouble="raise", seconds=0.0)
    vecenv = vector.make(Closes, 3, env_kwargs=envs, **options)
    vecenv.reset(seed=0)
    with pytest.raises((WorkerError, ArithmeticError), match="the walker fell"):
        for _ in range(3):
            vecenv.step(np.ones(3, int))


@pytest.mark.parametrize(
    "creator, kwargs",
    [
        (lambda n=2, start=0: Endless(actions=spaces.Discrete(n, start=start)), [{}, {"n": 4}]),
        (lambda n=2, start=0: Endless(actions=spaces.Discrete(n, start=start)), [{}, {"start": 5}]),
        (lambda seen=(2, 3): Endless(seen=spaces.Box(0, 255, seen, np.uint8)), [{}, {"seen": (1, 3)}]),
        (Squared, [{}, {"num_agents": 3}]),
    ],
)
@pytest.mark.parametrize("options", [{"backend": Serial}, {"backend": Multiprocessing, "num_workers": 2}])
def test_environments_of_one_vector_have_the_same_spaces(creator, kwargs, options):
    with pytest.raises((ValueError, WorkerError), match=r"environment 1 has .* but environment 0 has .*the same"):
        vector.make(creator, 2, env_kwargs=kwargs, **options).reset()


@pytest.mark.parametrize("how", ["forgotten", "exception", "SIGINT", "SIGKILL"])
def test_workers_end_with_their_parent(how):
    script = f"""
import os, signal, sys, time
sys.path.insert(0, "tests")
import numpy as np, vector
from test_vector import Walk
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background may be born without
vecenv = vector.make(Walk, 2, "multiprocessing", num_workers=2)
vecenv.reset()
print(*[process.pid for process in vecenv._workers], flush=True)
{"raise SystemExit(1)" if how == "exception" else "time.sleep(600)" if how.startswith("SIG") else ""}
"""
    parent = start(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(pid) for pid in read_until(parent, "\n").split()]
    assert len(pids) == 2
    if how.startswith("SIG"):
        parent.send_signal(getattr(signal, how))
    parent.wait(60)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.05)


@pytest.mark.slow
def test_ray_gives_the_same():
    ray = pytest.importorskip("ray", reason="needs ray (requirements-extras.txt)")
    serial = rollout(vector.make(Walk, 4, Serial))
    try:
        # A busy machine may take minutes to start an actor.
        assert_same(serial, rollout(vector.make(Walk, 4, Ray, num_workers=2, timeout=600)))
        with pytest.raises(WorkerError, match="the walker fell"):
            kwargs = [{}, {"trouble": "raise"}]
            rollout(vector.make(Walk, 2, Ray, num_workers=2, env_kwargs=kwargs, timeout=600))
        hang_beside_another(Ray)
    finally:
        ray.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
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


def converged_values(vecenv, tmp_path, epochs=150):
    """V of the steps that count, after training with gamma 0.9 on Constant."""
    import models
    import pufferl

    config = {"total_timesteps": epochs * vecenv.num_agents * 20, "horizon": 20, "gamma": 0.9, "gae_lambda": 0.95,
              "vf_clip_coef": float("inf"), "learning_rate": 0.01, "replay_ratio": 4.0,
              "minibatch_size": 320, "norm_reward": False,
              "data_dir": str(tmp_path)}  # fmt: skip
    torch.manual_seed(0)
    trainer = pufferl.PuffeRL(config, vecenv, models.Policy(vecenv.driver_env, hidden_size=16))
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    trainer.release()
    storage = {name: tensor.numpy() for name, tensor in trainer.storage.items() if tensor is not None}
    return trainer.values[:-1].numpy(), storage, trainer.environment


def test_truncated_values_are_those_of_an_endless_episode(tmp_path):
    values, _, log = converged_values(vector.make(Constant, 16), tmp_path)
    np.testing.assert_allclose(values, 10.0, atol=0.5)
    ends = {"episode_return_min": 5, "episode_return_max": 5}
    assert log == {"t": 5, "episode_return": 5, "episode_length": 5, "score": 5, "n": log["n"], **ends}


def test_terminated_values_are_those_of_the_rest_of_the_episode(tmp_path):
    vecenv = vector.make(Constant, 16, Multiprocessing, num_workers=2, batch_size=8, env_kwargs={"terminates": True})
    values, _, _ = converged_values(vecenv, tmp_path)
    rest = (1 - 0.9 ** np.arange(5, 0, -1)) / (1 - 0.9)
    np.testing.assert_allclose(values, np.tile(rest, 4)[:, None].repeat(16, 1), atol=0.5)


def test_dead_steps_of_next_step_autoreset_count_for_nothing(tmp_path):
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    vecenv = vector.make(lambda: gymnasium.vector.SyncVectorEnv([Constant] * 16, autoreset_mode=mode))
    values, storage, _ = converged_values(vecenv, tmp_path)
    valid = storage["valid"][:-1].astype(bool)
    assert 0 < (~valid).sum() < valid.sum() and storage["rewards"][~valid].sum() == 0
    assert (storage["valid"][1:][storage["truncations"] != 0] == 0).all()
    np.testing.assert_allclose(values[valid], 10.0, atol=0.5)


def test_the_command_line_takes_python_environments(tmp_path):
    import pufferl
    import watch

    (tmp_path / "my_env.py").write_text(
        "import gymnasium\n\n\n"
        "def make_env(limit=9):\n    return gymnasium.make('Acrobot-v1', max_episode_steps=limit)\n"
    )
    name = f"{tmp_path}/my_env.py:make_env"
    options = ["--train.total-timesteps", "512", "--train.horizon", "16", "--vec.num-envs", "4", "--vec.num-workers",
               "2", "--env.limit", "7", "--policy.hidden-size", "16", "--logger", "none",
               "--data-dir", str(tmp_path)]  # fmt: skip
    trainer = pufferl.train(name, pufferl.load_config(name, options))
    assert trainer.global_step == 512 and trainer.environment["episode_length"] == 7
    resumed = pufferl.train(
        name, pufferl.load_config(name, [*options, "--train.total-timesteps", "1024", "--resume", "latest"])
    )
    assert resumed.global_step == 1024 and resumed.run_folder == trainer.run_folder
    results = watch.evaluate(
        name, pufferl.load_config(name, [*options, "--load-model-path", "latest", "--eval.episodes", "3"])
    )
    assert results["score"][0] == -7
    with pytest.raises(pufferl.ConfigError, match=r"vec.num_workers can be 1, 2, 4"):
        pufferl.load_env(name, pufferl.load_config(name, [*options, "--vec.num-workers", "3"]))
    with pytest.raises(pufferl.ConfigError, match="Did you mean CartPole-v1"):
        pufferl.load_config("gym/CartPol-v1")


CONFIGS = [  # with the seed of its training, the mean return it must reach, and the package it needs
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
    import watch

    pytest.importorskip(package, reason=f"needs {package} (requirements-extras.txt)")
    options = ["--data-dir", str(tmp_path), "--logger", "none", "--train.seed", str(seed)]
    if package != "gymnasium":
        options += ["--vec.num-threads", "1"]  # what the figures in docs/environments.md were reached with
    trainer = pufferl.train(name, pufferl.load_config(name, options))
    if name == "gym_cartpole" and os.getloadavg()[0] < 2 * vector.physical_cores():
        assert trainer.uptime < 60
    options += ["--load-model-path", "latest", "--eval.episodes", "64"]
    results = watch.evaluate(name, pufferl.load_config(name, options))
    assert results["score"][0] >= threshold
