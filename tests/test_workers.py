"""Environments in worker processes: stepped together they give the same as one by one, and nothing is
left running when something breaks."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import cloudpickle
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from conftest import read_until, slow_but, start
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emulation import Leavers, Nested, OldCounter, Timed, nested
from test_vector import Constant, Squared, Walk, assert_same, rollout

import emulation
import environments
import vector
import workers
from emulation import GymnasiumPufferEnv, GymnasiumTogether, ScaledReward
from vector import Multiprocessing, Ray, Serial, WorkerError

ROOT = Path(__file__).resolve().parent.parent
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_worker_imports_no_torch():
    """Nor anything else that takes long: each process pays for it when it begins."""
    code = "import sys, workers; print({'torch', 'numba', 'vector', 'environments', 'ocean'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                          text=True, check=True)
    assert done.stdout == "set()\n"


# --------------------------------------------------------------------------------------------------
# Stepped together, or one by one


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
    """The wrappers that gymnasium.make adds are stepped past; episodes are
    the same as with them."""

    def limited(first, second):
        env = gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.PassiveEnvChecker(Endless()))
        return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.TimeLimit(env, first), second)

    limits = [(3, 9), (9, 4), (7, 7)]
    envs = [limited(*pair) for pair in limits]
    expected = [env.reset(seed=5 + i)[0].copy() for i, env in enumerate(envs)]
    rng, truncated = np.random.default_rng(0), 0
    with vector.make([lambda pair=pair: limited(*pair) for pair in limits], 3, Serial) as vecenv:
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
    with vector.make(Endless, 2, Serial, env_kwargs=[{}, {"wrong": True}]) as vecenv:
        vecenv.reset(seed=0)
        with pytest.raises(ValueError, match=r"environment 1, .*Endless.*expected shape \(2, 3\), "
                           r"got shape \(5,\)"):
            for _ in range(3):
                vecenv.step(np.ones(2, int))


LATE = [("reward", "x", "reward of environment 1 in a later step.* must be a number, got 'x'"),
        ("reward", 10**400, "reward .* must be a number, got 1000"),
        ("terminated", np.zeros(2), r"terminated .* must be a bool, got array\(\[0., 0.\]\)"),
        ("info", 5, r"info, which comes last, 5 \(int\); it must be a dict"),
        ("observation", {"a": 1}, "observation .* breaks its space"),
        ("observation", [[1], [2, 3]], "observation .* breaks its space"),
        ("observation", "text", "observation .* breaks its space")]


@pytest.mark.parametrize("what, value, words, workers",
                         [*((*case, 1) for case in LATE), (*LATE[0], 2), (*LATE[3], 2)])
def test_what_a_later_step_returns_wrong_is_named(what, value, words, workers):
    class Late(gymnasium.Env):
        observation_space, action_space = spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(2)

        def __init__(self, wrong=False):
            self.wrong = wrong

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.t += 1
            returned = {"observation": np.ones(3, np.float32), "reward": 1.0,
                        "terminated": what == "info" and self.t == 5,
                        "truncated": False, "info": {}}
            if self.wrong and self.t == 5:
                returned[what] = value
            return tuple(returned.values())

    backend = {"backend": Serial} if workers == 1 else {"backend": Multiprocessing,
                                                        "num_workers": 2}
    vecenv = vector.make(Late, 2, env_kwargs=[{}, {"wrong": True}], **backend)
    with vecenv, pytest.raises(emulation.Fault, match=words):
        vecenv.reset(seed=0)
        for _ in range(6):
            vecenv.step(np.ones(2, int))


class Loose(gymnasium.Env):
    """Its reward may be an array of one, its reset may give the observation alone."""

    observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, reward=1.0, info=({},)):
        self.reward, self.info = reward, info

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return (np.zeros(1, np.float32), *self.info) if self.info else np.zeros(1, np.float32)

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), self.reward, self.t == 3, False, {}


@pytest.mark.parametrize("options",
                         [{"reward": np.ones(1)}, {"info": ()}, {"reward": np.ones(1), "info": ()}])
def test_what_the_first_step_allows_goes_on(options):
    with vector.make(Loose, 2, Serial, env_kwargs=options) as vecenv:
        vecenv.reset(seed=0)
        steps = [vecenv.step([0, 1]) for _ in range(7)]
        assert vecenv.log()["episode_return"] == 3 and all((step[1] == 1).all() for step in steps)


@pytest.mark.parametrize("number", [1, 2])
def test_a_reward_that_becomes_an_array_of_one_goes_on(number):
    """Later than the first step, of one environment or of both at once."""
    kinds = [{"reward": 1.0}, {"reward": 1.0}]
    with vector.make(Loose, number, Serial, env_kwargs=kinds[:number]) as vecenv:
        vecenv.reset(seed=0)
        for step in range(9):
            for env in vecenv.envs[: 1 if step < 6 else 2]:
                env.env.reward = np.ones(1) if step > 3 else 1.0
            assert (vecenv.step([0] * number)[1] == 1).all()
        assert vecenv.log() == {"episode_return": 3, "episode_length": 3,
                                "n": 3 * number, "score": 3}
        assert vecenv._envs.together is not None


class Drawn(gymnasium.Env):
    """Any spaces; observations, rewards, ends, infos and masks are drawn from its own generator."""

    def __init__(self, seen, actions, masked, infos):
        self.observation_space, self.action_space, self.masked, self.infos = seen, actions, masked, infos

    def _info(self):
        options = sum(emulation.FlatAction(self.action_space).heads)
        info = {"action_mask": self.np_random.integers(0, 2, options)} if self.masked else {}
        if self.infos:
            info |= {"height": self.np_random.normal(), "word": "no number",
                     "deep": {"n": np.int16(3)}, "nan": np.nan}
        return info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), self._info()

    def step(self, action):
        assert self.action_space.contains(action)
        reward, ends = self.np_random.normal(), self.np_random.random(2) < 0.2
        return self.observation_space.sample(), reward, bool(ends[0]), ends[1], self._info()


def in_wrappers(env, *limits):
    """As gymnasium.make wraps it."""
    env = gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.PassiveEnvChecker(env))
    for limit in limits:
        env = gymnasium.wrappers.TimeLimit(env, limit)
    return env


def several(autoreset):
    return gymnasium.vector.SyncVectorEnv([Timed, lambda: Timed(2)], autoreset_mode=autoreset)


def scaled():
    return environments.load_creator("gym/Pendulum-v1")(reward_scale=0.3, max_episode_steps=9)


def in_float32():
    return gymnasium.wrappers.TransformReward(gymnasium.make("Pendulum-v1", max_episode_steps=9), np.float32)


MASK = np.array([1, 0, 1, 1, 1, 0, 0, 0, 1])
KINDS = {  # creator of environment i, whether they can be stepped together
    "CartPole": (lambda i: gymnasium.make("CartPole-v1", max_episode_steps=5 + i), True),
    "Pendulum": (lambda i: gymnasium.make("Pendulum-v1", max_episode_steps=7), True),
    "Acrobot": (lambda i: gymnasium.make("Acrobot-v1", max_episode_steps=7), True),
    "Blackjack": (lambda i: gymnasium.make("Blackjack-v1"), True),
    "rewards that are scaled": (lambda i: scaled(), True),
    "float32 that is scaled": (lambda i: ScaledReward(in_float32(), 0.1), True),
    "a Dict": (lambda i: Walk(limit=4 + i), True),
    "nested": (lambda i: Nested(limit=5, end=None if i else 3), True),
    "nested, masked": (lambda i: Nested(limit=5, mask=MASK), True),
    "pictures": (lambda i: in_wrappers(Endless(), 3 + i, 9), True),
    "terminates": (lambda i: Constant(terminates=i == 0), True),
    "both ends": (lambda i: Timed(2 + i), True),
    "reward in an array": (lambda i: Loose(reward=np.ones(1)), False),
    "reset without info": (lambda i: Loose(info=()), False),
    "old Gym": (lambda i: OldCounter(), True),
    "numpy": (lambda i: Squared(num_agents=2, seed=i), False),
    "PettingZoo": (lambda i: Leavers(), False),
    "vector, next step": (lambda i: several(gymnasium.vector.AutoresetMode.NEXT_STEP), False),
    "vector, same step": (lambda i: several(gymnasium.vector.AutoresetMode.SAME_STEP), False),
    "in C": (lambda i: environments.OceanPufferEnv("cartpole", 2, 2 * i, max_steps=9), False),
}


def played(creator, number, horizon, seed, again):
    """(all arrays and infos of three rollouts, whether they were stepped together); new episodes
    after one of them."""
    history = []

    def finish(worker, infos):
        history.append(infos)
        Serial._finish(vecenv, worker, infos)

    with vector.make([lambda i=i: creator(i) for i in range(number)], number, Serial, seed=seed) as vecenv:
        vecenv._finish = finish
        storage, rng = vecenv.allocate(horizon), np.random.default_rng(seed)
        for epoch in range(3):
            vecenv.begin()
            while (ready := vecenv.wait())[1] < horizon:
                shape, heads = storage.actions[0].shape, vecenv.action_heads
                storage.actions[ready[1]] = (rng.normal(size=shape) if heads is None
                                             else rng.integers(0, heads, shape))
                vecenv.advance(ready[0])
            history.append({name: array.copy() for name, array in vars(storage).items()
                            if array is not None})
            if epoch == again:
                vecenv.restart()
        return history, vecenv._envs.together is not None


def assert_stepped_alike(creator, number, horizon, seed, again):
    """The same bits together as one by one. Returns whether they were stepped together."""
    history, together = played(creator, number, horizon, seed, again)
    with mock.patch.object(GymnasiumTogether, "of", lambda *_: None):
        expected, alone = played(creator, number, horizon, seed, again)
    assert not alone
    for ours, theirs in zip(history, expected, strict=True):
        if isinstance(ours, dict):
            for name in theirs:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
        else:
            assert ours == theirs
    return together


plays = {"number": st.integers(1, 4), "horizon": st.integers(1, 9), "seed": st.integers(0, 2**20),
         "again": st.integers(0, 2)}


@pytest.mark.filterwarnings("ignore:.*share an object", "ignore:.*Casting input",
                            "ignore:.*box bound")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(**plays)
def test_every_kind_is_stepped_together_as_one_by_one(kind, number, horizon, seed, again):
    creator, can = KINDS[kind]
    together = assert_stepped_alike(creator, number, horizon, seed, again)
    # The last restart is followed by a step in all rollouts but the last.
    assert together == (can and again < 2), (
        f"the checksum of what GymnasiumTogether restates is {GymnasiumTogether.checksum():#010x}")


choices = st.one_of(st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9),
                              st.integers(-5, 5)),
                    st.builds(spaces.MultiDiscrete,
                              st.lists(st.integers(1, 9), min_size=1, max_size=3)),
                    st.builds(spaces.MultiBinary, st.integers(1, 5)))
moves = st.one_of(choices, st.just(spaces.Box(-2, 1, (2,), np.float64)),
                  st.just(spaces.Box(-1, 2, (), np.float32)),
                  st.lists(choices, min_size=1, max_size=3).map(spaces.Tuple))


@settings(max_examples=80)
@given(seen=nested, actions=moves, masked=st.booleans(), infos=st.booleans(), **plays)
def test_any_space_is_stepped_together_as_one_by_one(seen, actions, masked, infos, **options):
    import copy

    masked = masked and bool(emulation.FlatAction(actions).heads)
    assert_stepped_alike(lambda i: Drawn(copy.deepcopy(seen), copy.deepcopy(actions), masked, infos), **options)


def doubled(method):
    def step(self, *arguments):
        result = method(self, *arguments)
        if method.__name__ == "step_into":
            arguments[0][2][arguments[0][4]] *= 2
            return result
        return result[0], 2 * result[1], *result[2:]

    return step


class Doubled(GymnasiumPufferEnv):
    step_into = doubled(GymnasiumPufferEnv.step_into)


def one_doubled(i):
    env = GymnasiumPufferEnv(Timed())
    env.step_into = doubled(GymnasiumPufferEnv.step_into).__get__(env)
    return env


@pytest.mark.parametrize("how", ["subclass", "instance", "step_into", "_step_env"])
def test_an_edited_step_is_the_one_that_runs(how):
    """It is only slower then, and says so."""
    creator = {"subclass": lambda i: Doubled(Timed()), "instance": one_doubled}.get(how, lambda i: Timed())
    if how.startswith(("step", "_step")):
        edit = mock.patch.object(GymnasiumPufferEnv, how, doubled(getattr(GymnasiumPufferEnv, how)))
        with edit, pytest.warns(UserWarning, match="GymnasiumPufferEnv was edited"):
            history, together = played(creator, 2, 4, 0, 2)
    else:
        history, together = played(creator, 2, 4, 0, 2)
    assert not together
    assert all((rows["rewards"] == 2).all() for rows in history if isinstance(rows, dict))


def test_an_edited_file_is_the_one_that_runs(tmp_path):
    for name in ("absolute_imports.py", "flat_spaces.py", "emulation.py", "workers.py"):
        shutil.copy(ROOT / name, tmp_path)
    file = tmp_path / "emulation.py"
    source = file.read_text()
    assert source.count("        rewards[i] = reward\n") == 1
    file.write_text(source.replace("        rewards[i] = reward\n",
                                   "        rewards[i] = 2 * reward\n"))
    code = """if True:
        import gymnasium, numpy as np, emulation, workers
        env = gymnasium.make("CartPole-v1")
        envs = workers.Envs([(env, (), {})], emulation.signature(emulation.wrap(env)))
        rows = vars(emulation.new_rows(emulation.wrap(env), 1))
        arrays = {name: np.zeros((3, *array.shape), array.dtype) for name, array in rows.items() if array is not None}
        envs.bind({**arrays, "actions": arrays["actions"][:2], "resets": np.zeros((3, 1), np.uint8),
                   "final_observations": arrays["final_observations"][0]}, 0)
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(0), envs.step(1)
        print(arrays["rewards"][:2, 0].tolist())
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, check=True)
    assert done.stdout == "[2.0, 2.0]\n" and "was edited" in done.stderr


# --------------------------------------------------------------------------------------------------
# What breaks


@pytest.mark.parametrize(
    "trouble, message",
    [
        ("raise", r"(?s)worker 1 \(environments 2 to 3 of Walk\) raised.*in step.*ArithmeticError: "
         r"the walker fell"),
        ("kill", r"worker 1 .* died by signal 9 \(SIGKILL\)"),
        ("segfault", r"(?s)worker 1 .* died by signal 11 \(SIGSEGV\).*in step"),
        ("hang", r"(?s)worker 1 .* has not answered for 1 s.*in step"),
        ("shape", r"\['x'\] breaks its space: expected shape \(2,\), got shape \(3,\)"),
        ("interrupt", r"(?s)worker 1 .* raised.*KeyboardInterrupt"),
    ],
)
def test_a_worker_in_trouble_is_an_error_that_says_what(trouble, message):
    kwargs = [{}, {}, {}, {"trouble": trouble}]
    timeout = 1 if trouble == "hang" else 600  # a busy machine may take long for what is right
    vecenv = vector.make(Walk, 4, Multiprocessing, num_workers=2, env_kwargs=kwargs,
                         timeout=timeout)
    vecenv.reset(seed=0)
    begun = time.perf_counter()
    with pytest.raises(emulation.Fault if trouble == "shape" else WorkerError, match=message):
        for _ in range(4):
            vecenv.step(np.ones(4, int))
    # what hangs sleeps 1,000 s, and what dies is noticed at once
    assert time.perf_counter() - begun < 100


def hang_beside_another(backend):
    vecenv = vector.make(Walk, 2, backend, num_workers=2, batch_size=1,
                         env_kwargs=[{}, {"trouble": "hang"}], timeout=1)
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
        vector.make(creator, 2, Multiprocessing, num_workers=2,
                    env_kwargs=[{}, {"number": 1}]).reset()


class Behind(Walk):
    """Behind a socket, as many simulators are."""

    def step(self, action):
        if self.trouble and self.t == 2:
            raise self.trouble("the simulator hung up")
        return super().step(action)


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, BrokenPipeError])
def test_an_environments_own_connection_is_not_that_to_the_worker(error):
    with vector.make(Behind, 2, Multiprocessing, num_workers=2, env_kwargs=[{}, {"trouble": error}]) as vecenv:
        vecenv.reset(seed=0)
        said = rf"(?s)worker 1 .*raised.*in step.*{error.__name__}: the simulator hung up"
        with pytest.raises(WorkerError, match=said) as raised:
            for _ in range(4):
                vecenv.step(np.ones(2, int))
    assert str(raised.value).count("  File ") == 1, "its own line alone"


class Spins(Walk):
    def step(self, action):
        while self.trouble and self.t == 2:
            pass
        return super().step(action)


@pytest.mark.parametrize("horizon", [1, 4])
def test_an_environment_of_this_process_that_hangs_is_named(horizon):
    vecenv = vector.make(Spins, 3, Serial, env_kwargs=[{}, {"trouble": "spin"}, {}], timeout=0.5)
    with vecenv, mock.patch.object(vector, "STARTUP", 0.5), pytest.raises(WorkerError) as raised:
        if horizon == 1:
            vecenv.reset(seed=0)
            for _ in range(4):
                vecenv.step(np.ones(3, int))
        vecenv.allocate(horizon)
        while vecenv.wait()[1] < horizon:
            vecenv.advance(0)
    said = str(raised.value)
    assert said.startswith("environment 1 of Spins has not answered for 0.5 s (vec.timeout). It "
                           "is in:\n  File ")
    assert "in step" in said and said.count("  File ") == 1


def test_a_packages_own_vector_environment_that_hangs_is_named():
    class Spinning(gymnasium.vector.SyncVectorEnv):
        def step(self, actions):
            while True:
                pass

    def creator():
        raise AssertionError("all of them are in the vector environment")

    def several(number, num_threads):
        return Spinning([lambda: gymnasium.make("CartPole-v1")] * number)

    creator.has_vector, creator.vector = True, several
    with mock.patch.object(vector, "STARTUP", 0.5), pytest.raises(WorkerError) as raised:
        vecenv = vector.make(creator, 3, "package", timeout=0.5)
        with vecenv:
            vecenv.reset(seed=0)
            vecenv.step(np.ones(3, int))
    said = str(raised.value)
    assert (said.startswith("environment 0 of ")
            and "has not answered for 0.5 s (vec.timeout). It is in:" in said)
    assert "in step" in said and said.count("  File ") == 1


def test_a_step_that_ends_while_the_words_are_made_is_no_error(monkeypatch):
    """To name an environment takes a while."""
    class Late(Walk):
        ended = threading.Event()

        def step(self, action):
            while self.t == 2 and not self.ended.is_set():
                pass
            return super().step(action)

    def who(self, frames):
        inside = self.inside
        Late.ended.set()
        while self.inside is inside:
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(Serial, "who", who)
    monkeypatch.setattr(vector, "STARTUP", 0.5)
    with vector.make(Late, 1, Serial, timeout=0.5) as vecenv:
        vecenv.reset(seed=0)
        for _ in range(4):
            vecenv.step(np.ones(1, int))
        begun = time.perf_counter()
        while time.perf_counter() - begun < 1:  # it would come now
            sum(range(1000))
        assert Late.ended.is_set() and vecenv.hung is None


def test_one_that_waits_in_c_code_ends_the_process_with_the_same_words():
    script = """
import sys
sys.path.insert(0, "tests")
import numpy as np, vector
from test_vector import Walk
vecenv = vector.make(Walk, 2, "serial", env_kwargs=[{}, {"trouble": "hang"}], timeout=0.5)
vecenv.reset(seed=0)
for _ in range(4):
    vecenv.step(np.ones(2, int))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 1 and "environment 1 of Walk has not answered" in done.stderr
    assert "time.sleep(1000)" in done.stderr


def test_a_slow_step_is_not_one_that_hangs():
    """Each shorter than the timeout, all together longer."""
    class Slow(Walk):
        def step(self, action):
            time.sleep(0.15)
            return super().step(action)

    with vector.make(Slow, 2, Serial, timeout=0.8) as vecenv:
        vecenv.reset(seed=0)
        for _ in range(6):
            vecenv.step(np.ones(2, int))


def test_a_fault_says_which_environment_of_a_worker_it_was():
    class Wide(Walk):
        def reset(self, *, seed=None, options=None):
            seen, info = super().reset(seed=seed)
            return ({**seen, "x": np.zeros(3)} if self.trouble else seen), info

    vecenv = vector.make(Wide, 4, Multiprocessing, num_workers=2,
                         env_kwargs=[{}] * 3 + [{"trouble": "wide"}])
    with vecenv, pytest.raises(emulation.Fault, match="breaks its space") as raised:
        vecenv.reset(seed=0)
    assert raised.value.__notes__ == ["(environment 3 of Wide)"]


def test_an_error_of_this_process_says_which_environment():
    with vector.make(Walk, 3, Serial, env_kwargs=[{}, {}, {"trouble": "raise"}]) as vecenv:
        vecenv.reset(seed=0)
        with pytest.raises(ArithmeticError) as raised:
            for _ in range(4):
                vecenv.step(np.ones(3, int))
    assert raised.value.__notes__ == ["(environment 2 of Walk)"]
    text, own = workers.own_part(raised.value)
    assert (own and text.count("  File ") == 1 and "in step" in text
            and text.endswith("(environment 2 of Walk)\n"))


def test_a_policys_error_is_not_an_environments():
    """It reads its observations with what the environments' files have for that."""
    with pytest.raises(RuntimeError, match="unflatten") as raised:
        emulation.nativize_tensor(torch.zeros(2, 3), {"a": (torch.float32, (5,), 0, 12)})
    assert not workers.own_part(raised.value)[1]


@pytest.mark.parametrize("options",
                         [{"backend": Serial}, {"backend": Multiprocessing, "num_workers": 1}])
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
    # processes have an environment 0 and we have one
    assert times == [1 if options["backend"] is Serial else 2, 1, 1]
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
        (lambda seen=(2, 3): Endless(seen=spaces.Box(0, 255, seen, np.uint8)),
         [{}, {"seen": (1, 3)}]),
        (Squared, [{}, {"num_agents": 3}]),
    ],
)
@pytest.mark.parametrize("options",
                         [{"backend": Serial}, {"backend": Multiprocessing, "num_workers": 2}])
def test_environments_of_one_vector_have_the_same_spaces(creator, kwargs, options):
    with pytest.raises((ValueError, WorkerError),
                       match=r"environment 1 has .* but environment 0 has .*the same"):
        vector.make(creator, 2, env_kwargs=kwargs, **options).reset()


@pytest.mark.parametrize("how", slow_but(["forgotten", "exception", "SIGINT", "SIGKILL"], "forgotten", "SIGKILL"))
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
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True
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
    ray = pytest.importorskip("ray", reason="needs ray (requirements/extras.txt)")
    serial = rollout(vector.make(Walk, 4, Serial))
    try:
        # A busy machine may take minutes to start an actor.
        assert_same(serial, rollout(vector.make(Walk, 4, Ray, num_workers=2, timeout=600)))
        with pytest.raises(WorkerError, match="the walker fell"):
            kwargs = [{}, {"trouble": "raise"}]
            rollout(vector.make(Walk, 2, Ray, num_workers=2, env_kwargs=kwargs, timeout=600))
        with pytest.raises(emulation.Fault, match=r"breaks its space: expected shape") as raised:
            kwargs = [{}, {}, {}, {"trouble": "shape"}]
            rollout(vector.make(Walk, 4, Ray, num_workers=2, env_kwargs=kwargs, timeout=600))
        assert (raised.value.__notes__ == ["(environment 3 of Walk)"]
                and "Traceback" not in str(raised.value))
        hang_beside_another(Ray)
        vecenv = vector.make(Walk, 4, Ray, num_workers=2, timeout=600)
        vecenv.reset(seed=0)
        actors = [process for process in psutil.Process().children(recursive=True)
                  if "ray::RemoteEnvs" in "".join(process.cmdline())]
        assert len(actors) == 2
        actors[0].kill()  # as a machine that is lost
        with pytest.raises(WorkerError, match=r"worker [01] \(environments [02] to [13] of Walk\) failed"):
            for _ in range(20):
                vecenv.step(np.ones(4, int))
        psutil.wait_procs(actors, timeout=60)
        assert not any(process.is_running() for process in actors)
    finally:
        ray.shutdown()
