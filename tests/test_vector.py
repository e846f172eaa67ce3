"""Backends of vectors: each has its environments' episodes, and the same log."""

import gc
import re
import sys
import warnings
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from small_envs import Counters, Steps, Walk, assert_same, creators_of, rollout, same_as_bare

import emulation
import models
import ocean
import pufferl
import vector
import workers
from tools import watch
from vector import Multiprocessing, Native, Serial, VectorEntryPoint

ROOT = Path(__file__).resolve().parent.parent
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import the tests
pytestmark = pytest.mark.usefixtures("nothing_left")


class Threads(vector.Emulated):
    """A custom backend, from the docstring of Vector alone: a thread a worker."""

    threads = None

    def _start(self):
        self.threads, self.futures = ThreadPoolExecutor(self.num_workers), {}
        self.envs = [workers.Envs(*cloudpickle.loads(self.envs_of(worker)))
                     for worker in range(self.num_workers)]
        for worker, envs in enumerate(self.envs):
            envs.bind(workers.step_rows(vars(self.storage)), self.agents_of(worker).start)

    def _send(self, worker, command, argument):
        self.futures[self.threads.submit(self.envs[worker].do, command, argument)] = worker

    def _collect(self):
        for future in wait(self.futures, 0.5, FIRST_COMPLETED).done:
            worker = self.futures.pop(future)
            if future.exception():
                self._fail(worker, "raised", future.exception())
            self._finish(worker, future.result())

    def _stop(self):
        if self.threads is not None:
            self.threads.shutdown(wait=False)


# -- The contract: kinds of environments through each backend --------------------------------------

BARE = ["CartPole", "Pendulum", "Blackjack", "Dict", "nested", "masked", "drawn", "time limits",
        "both ends", "reward in array"]


@pytest.mark.filterwarnings("ignore:.*share an object", "ignore:.*box bound")
@pytest.mark.parametrize("kind", BARE)
def test_episodes_are_those_of_the_environment(kind):
    returns, lengths, log = same_as_bare(creators_of(kind, 3), 40, reset_at=15)
    assert log["n"] == len(returns) > 8 and log["score"] == log["episode_return"]
    assert log["episode_return"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert log["episode_length"] == pytest.approx(np.mean(lengths))


CONTRACT = [  # kind, other backends
    ("Dict", [(Multiprocessing, 4, 2), (Threads, 2, None)]),
    ("masked", [(Multiprocessing, 2, None), (Threads, 4, 2)]),
    ("PettingZoo", [(Multiprocessing, 2, None), (Threads, 4, 2)]),
    ("PufferEnv", [(Multiprocessing, 2, None), (Threads, 4, 2)]),
    ("CartPole", [(Threads, 4, 2)]),
    ("same step", [(Threads, 2, None)]),
    ("next step", [(Threads, 2, None)]),
]


@pytest.mark.parametrize(("kind", "others"), CONTRACT, ids=[kind for kind, _ in CONTRACT])
def test_every_backend_gives_the_same(kind, others):
    expected = rollout(vector.make(creators_of(kind, 4), 4, Serial, seed=7))
    assert_same(expected, rollout(vector.make(creators_of(kind, 4), 4, Serial, seed=7)))
    other = rollout(vector.make(creators_of(kind, 4), 4, Serial, seed=8))
    drawn = kind not in ("PettingZoo", "same step", "next step")
    assert drawn == (expected[0][0]["observations"] != other[0][0]["observations"]).any()
    for backend, num_workers, batch_size in others:
        vecenv = vector.make(creators_of(kind, 4), 4, backend, num_workers=num_workers,
                             batch_size=batch_size, seed=7)
        assert vecenv.agents_per_batch * 4 == vecenv.num_agents * (batch_size or 4)
        assert vecenv.driver_env.single_action_space == vecenv.single_action_space
        assert_same(expected, rollout(vecenv))


def test_c_environments_are_the_same_in_python_backends():
    settings = {"max_steps": 7}
    expected = rollout(vector.make("cartpole", 6, num_buffers=1, seed=5, env_kwargs=settings))
    for env, options in ((ocean.load("cartpole"), {"backend": Serial}),
                         ("cartpole", {"backend": Multiprocessing, "num_workers": 3})):
        vecenv = vector.make(env, 3, seed=5, env_kwargs={**settings, "num_envs": 2}, **options)
        assert_same(expected, rollout(vecenv))


def test_a_vector_environment_counts_as_its_copies():
    def pair(seed):
        seeds.append(seed)
        return gymnasium.vector.SyncVectorEnv(
            [lambda: Walk(limit=4)] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    seeds, single = [], vector.make(Walk, 4, Serial, env_kwargs={"limit": 4})
    for options in ({"backend": Serial}, {"backend": Multiprocessing, "num_workers": 2}):
        with vector.make(pair, 2, **options) as vecenv:
            assert vecenv.num_envs == vecenv.num_agents == 4
            np.testing.assert_array_equal(vecenv.reset(seed=5)[0], single.reset(seed=5)[0])
            for _ in range(4):
                ours, expected = vecenv.step(np.ones(4, int)), single.step(np.ones(4, int))
                for a, b in zip(ours[:4], expected[:4], strict=True):
                    np.testing.assert_array_equal(a, b)
            for i in range(4):
                np.testing.assert_array_equal(vecenv.render(i), single.render(i))
                log = single.log(i)
                assert vecenv.log(i) == pytest.approx(log) and log["n"] == 1
    workers.Envs([(pair, (), {})], *cloudpickle.loads(vecenv.envs_of(1))[1:])
    assert seeds[-1] == 2, "those before have 0 and 1"


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_running_environments_are_called_and_changed(backend):
    def make():
        return vector.make(lambda **_: gymnasium.wrappers.TimeLimit(Paced(), 9), 4, backend,
                           num_workers=1 if backend == "serial" else 2, seed=3)

    with make() as plain:
        first = [plain.reset()[0].copy() for _ in range(2)]
    with make() as env:
        assert env.call("pace") == [1.0] * 4
        np.testing.assert_array_equal([env.reset()[0].copy() for _ in range(2)], first)
        env.set_attr("pace", 3.0)
        assert env.call("faster", by=2.0) == env.call("pace") == [5.0] * 4
        assert (env.step(np.zeros(4))[1] == 5).all()
        for call, name in ((lambda: env.call("pase"), "pase"),
                           (lambda: env.set_attr("pase", 1), "pase"),
                           (lambda: env.set_attr("_max_episode_steps", 3), "TimeLimit")):
            with pytest.raises(AttributeError, match=name):
                call()
        env.set_attr("pace", 9.0)
        storage = env.allocate(1)  # as a trainer does, for which other processes start
        env.begin()
        env.wait()
        env.advance(0)
        env.wait()
        assert (storage.rewards == 9).all()


class Paced(CartPoleEnv):
    def __init__(self, pace=1.0):
        super().__init__()
        self.pace = pace

    def step(self, action):
        observation, _, *ends = super().step(action)
        return observation, self.pace, *ends

    def faster(self, by=1.0):
        self.pace += by
        return self.pace


def test_a_vector_environment_is_called_by_its_own_methods():
    def make():
        several = gymnasium.vector.SyncVectorEnv([Paced] * 3)
        return gymnasium.wrappers.vector.ClipReward(several, 0, 9)

    with vector.make(make) as vecenv:
        vecenv.reset()
        vecenv.call("set_attr", "pace", 4.0)
        assert vecenv.call("call", "pace") == [(4.0,) * 3]
        assert vecenv.call("call", "faster") == [(5.0,) * 3]
        assert (vecenv.step(np.zeros(3))[1] == 5).all()


@pytest.mark.parametrize(("counts", "infos", "log"), [
    (True, [{"perf": 5.0, "n": 1}, {"perf": 1.0, "n": 3}, {"perf": 7.0, "n": 0}],
     {"perf": 2.0, "n": 4}),
    (True, [{"perf": 7.0, "n": 0}], {}),
    (False, [{"episode_return": 5.0, "n": 2}, {"episode_return": 10.0, "episode": {"r": 3}}],
     {"episode_return": 7.5, "score": 7.5, "info_n": 2.0, "n": 2})])
def test_infos_weigh_as_many_episodes_as_they_say(counts, infos, log):
    """Only a PufferEnv's n is a number of episodes; "episode" is RecordEpisodeStatistics's."""
    episodes = vector.EpisodeLog(counts)
    for env in (0, 1):
        for info in infos:
            episodes.add(env, info)
    assert episodes.means(1) == log and episodes.means(1) == {}
    assert episodes.means() == log and episodes.means() == {}


# -- Which backend, and what it refuses ------------------------------------------------------------


@pytest.mark.parametrize(("options", "name"), [
    ({"env": "squared", "num_envs": 4, "batch_size": 2}, "vec.num_threads"),
    ({"backend": "native"}, "ray"),
    ({"env": "gym/CartPole-v1", "num_envs": 2, "backend": "package",
      "env_kwargs": [{}, {"max_episode_steps": 3}]}, "env_kwargs"),
    ({"env": "gym/CartPole-v1", "num_envs": 4, "backend": "package", "num_workers": 2},
     "num_workers"),
    ({"num_envs": 2, "env_kwargs": [{}]}, "list"),
    ({"num_envs": 0}, "num_envs"),
])
def test_impossible_combinations_are_refused(options, name):
    backend = {} if options.get("env") == "squared" else {"backend": "multiprocessing"}
    with pytest.raises(ValueError, match=name):
        vector.make(**{"env": Walk, **backend, **options})


def test_send_recv_and_step_want_their_order_and_shapes():
    with vector.make(Walk, 2) as vecenv:
        for call in (vecenv.recv, lambda: vecenv.send(np.zeros(2)),
                     lambda: vecenv.step(np.zeros(2))):
            with pytest.raises(RuntimeError):
                call()
        vecenv.async_reset()
        vecenv.recv()
        for actions in (np.zeros(3, int), np.full(2, 3), np.array([0, -1])):
            with pytest.raises(ValueError, match="action"):
                vecenv.send(actions)
    for vecenv in (vector.make("cartpole"), vector.make(Walk)):
        with vecenv, pytest.raises(ValueError, match="shape"):
            vecenv.reset()
            vecenv.step(0)  # one action must be an array, too


CHOICES = [  # environment, settings of the vec section, cores, the backend
    ("cartpole", {"num_envs": 4}, 4, Native),
    ("cartpole", {"num_envs": 2, "backend": "serial"}, 4, Serial),
    ("gym/Acrobot-v1", {"num_envs": 1}, 4, Serial),
    ("gym/Acrobot-v1", {"num_envs": 4}, 1, Serial),
    ("gym/Acrobot-v1", {"num_envs": 4}, 2, Multiprocessing),
    ("gym/Acrobot-v1", {"num_envs": 3}, 2, Serial),  # one worker is all that divides them
    ("gym/Acrobot-v1", {"num_envs": 4, "num_workers": 1}, 2, Serial),
    ("gym/Acrobot-v1", {"num_envs": 4, "num_workers": 2}, 1, Multiprocessing),
    ("gym/CartPole-v1", {"num_envs": 4}, 2, VectorEntryPoint),  # it gives the same episodes
    ("gym/CartPole-v1", {"num_envs": 1}, 2, Serial),
    ("gym/CartPole-v1", {"num_envs": 4, "num_workers": 2}, 2, Multiprocessing),
    ("gym/CartPole-v1", {"num_envs": 4, "backend": "package"}, 2, VectorEntryPoint),
    ("gym/ALE/Pong-v5", {"num_envs": 4}, 2, VectorEntryPoint),
]


@pytest.mark.parametrize(("name", "vec", "cores", "expected"), CHOICES)
def test_scripts_and_the_command_line_get_the_same_backend(name, vec, cores, expected, monkeypatch):
    for package in ("ale_py", "cv2") if "ALE" in name else ():
        pytest.importorskip(package, reason="requirements/extras.txt")
    monkeypatch.setattr(vector, "physical_cores", lambda: cores)
    options = {"backend": "auto", **vec}  # CartPole's .ini says serial
    args = pufferl.load_config(name, ["--env.num-envs=1", *(f"--vec.{key}={value}"
                                                            for key, value in options.items())])
    with vector.make(name, **vec) as script, pufferl.load_env(name, args) as line:
        assert type(script) is type(line) is expected
        assert script.num_envs == line.num_envs == vec["num_envs"]


def test_what_else_chooses_a_backend(monkeypatch):
    monkeypatch.setattr(vector, "physical_cores", lambda: 4)
    assert vector.choose_backend(Walk, Threads, 4) is Threads
    assert vector.choose_backend([Walk(), Walk()], None, 2) is Serial  # instances live here
    assert vector.choose_backend([Walk, Walk], "auto", 2) is Multiprocessing
    assert vector.choose_backend(ocean.load("cartpole"), "puffer") is Native
    with vector.make(Counters(num_agents=2)) as vecenv:
        assert vecenv.reset()[0].shape == (2, 2)
    with vector.make(Counters, backend=Native, env_kwargs={"num_agents": 2}) as vecenv:
        assert type(vecenv) is Serial and vecenv.num_agents == 2
    options = {"num_envs": 8, "frameskip": 2}
    with vector.make(ocean.load("breakout"), backend=Native, env_kwargs=options) as vecenv:
        assert type(vecenv) is Native and vecenv.num_agents == 8
    with vector.make(ROOT / "ocean/breakout/breakout.h", 4, frameskip=2) as vecenv:
        assert type(vecenv) is Native and vecenv.num_envs == 4


def test_a_packages_own_vector_environment():
    kwargs = {"max_episode_steps": 80, "reward_scale": 0.5}
    with vector.make("gym/CartPole-v1", 4, "package", env_kwargs=kwargs) as package:
        assert type(package) is VectorEntryPoint and package.num_envs == package.num_agents == 4

        def episodes():
            return np.array([package.reset(seed=3)[0].copy(),
                             *(package.step(np.ones(4, int))[0].copy() for _ in range(85))])

        first = episodes()
        assert any((row != row[0]).any() for row in first)  # each has its own seed
        log = package.log(2)
        assert 0 < log["episode_length"] <= 80 and "env_id" not in log and package.log()["n"] >= 3
        assert log["episode_return"] == log["episode_length"]  # without reward_scale
        assert (package.storage.rewards == 0.5).all()
        np.testing.assert_array_equal(episodes(), first)
        package.set_attr("force_mag", 4.0)
        assert package.call("force_mag") == [4.0]  # one object for all


# -- Under the trainer -----------------------------------------------------------------------------


def train(vecenv, epochs, **settings):
    """Return a trainer after so many epochs, and its last rollout's log."""
    settings = {"horizon": 16, "minibatch_size": 32, "data_dir": None, **settings}
    trainer = pufferl.PuffeRL(settings, vecenv, models.FeedForward(vecenv.driver_env, 8))
    for _ in range(epochs):
        log = trainer.evaluate()
        trainer.train()
    return trainer, log


class OnlyDuties:
    """A backend that has nothing but what the docstring of Vector names."""

    def __init__(self, vecenv):
        self._vecenv = vecenv

    def __getattr__(self, name):
        assert re.search(rf"\b{name}\b", vector.Vector.__doc__), name
        return getattr(self._vecenv, name)


@pytest.mark.parametrize(("env", "options", "agents"), [
    ("squared", {"num_envs": 64, "num_buffers": 2, "num_threads": 1}, 64),
    (Walk, {"num_envs": 4, "backend": Threads, "num_workers": 4, "batch_size": 2}, 4)])
def test_a_backend_is_asked_for_its_duties_alone(env, options, agents, tmp_path):
    vecenv = vector.make(env, **options)
    trainer, log = train(OnlyDuties(vecenv), 3, data_dir=str(tmp_path), log_interval=0.0,
                         total_timesteps=3 * 16 * agents, minibatch_size=4 * agents)
    trainer.save_checkpoint()
    trainer.release()
    assert trainer.global_step == 3 * 16 * agents and vecenv.closed and log["n"] > 0


def test_a_run_continues_after_a_step_that_was_interrupted(tmp_path):
    step, result = CartPoleEnv.step, (np.zeros(4, np.float32), 1.0, False, False, {})
    with mock.patch.object(CartPoleEnv, "step", autospec=True, side_effect=step) as patch:
        trainer, _ = train(vector.make(CartPoleEnv, 4, "serial"), 1)
        trainer.save_checkpoint(str(tmp_path / "last.pt"))
        patch.side_effect = [*[result] * 29, KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            trainer.evaluate()
        patch.side_effect = step
        trainer.load_checkpoint(str(tmp_path / "last.pt"))
        trainer.evaluate()
        trainer.train()
        trainer.close()


CONFIGS = [
    ("gym_cartpole", 0, 475, "gymnasium"),
    ("gym_acrobot", 0, -100, "gymnasium"),
    ("gym_pendulum", 0, -200, "gymnasium"),
    ("gym_lunarlander", 1, 200, "Box2D"),
    ("minigrid", 0, 0.9, "minigrid"),
    ("minigrid_doorkey", 0, 0.9, "minigrid"),
    ("mpe", 0, -21, "mpe2"),  # untrained -28
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed", "threshold", "package"), CONFIGS)
def test_shipped_configs_learn(name, seed, threshold, package, tmp_path):
    pytest.importorskip(package, reason=f"needs {package} (requirements/extras.txt)")
    options = ["--data-dir", str(tmp_path), "--logger", "none", "--train.seed", str(seed)]
    if package != "gymnasium":
        # what the figures in docs/environments.md were reached with
        options += ["--vec.num-threads", "1"]
    pufferl.train(name, pufferl.load_config(name, options))
    options += ["--load-model-path", "latest", "--eval.episodes", "64"]
    results = watch.evaluate(name, pufferl.load_config(name, options))
    assert results["score"][0] >= threshold


# -- Observations outside their space, other dtypes, and wrappers that measure ---------------------

MIXED = spaces.Dict(at=spaces.Discrete(5), to=spaces.MultiDiscrete([2, 3], start=[1, 1]),
                    x=spaces.Box(-1, 1, (2,), np.float32))
PAIR = spaces.Box(-1, 1, (2,), np.float32)


def strange(name=None, value=None, space=MIXED):
    """From its second step on, an observation (or its field `name`) is `value`."""
    def change(t):
        first = {"at": 4, "to": np.array([1, 3]), "x": np.array([0, 1], np.float32)}
        if space is not MIXED:
            return {"observation": value if t > 1 else np.array([0, 1], space.dtype)}
        return {"observation": first | ({name: value} if t > 1 and name else {})}

    return Steps(limit=9, change=change, observation_space=space)


def outside(env, **config):
    """Return a run's warning of observations outside their space, or None."""
    network = models.MultiInputPolicy(env, 8)
    network = models.Normalized(env, network) if config.get("norm_obs") else network
    settings = {"horizon": 16, "minibatch_size": 32, "data_dir": None, "log_interval": 0, **config}
    trainer = pufferl.PuffeRL(settings, env, network)
    for _ in range(2):
        trainer.evaluate()
        trainer.train()
    trainer.close()
    return trainer.warnings.reported.get("warn_observations_outside", (0, None))[1]


HALF_OUT = np.array([0, 1.9], np.float32)  # not far enough for a normalizer


@pytest.mark.parametrize(("backend", "name", "value", "normalizes", "words"), [
    ("serial", "at", 5, False, "['at'] was 5, declared are 0 to 4"),
    ("multiprocessing", "to", np.array([0, 3]), False, "['to'][0] was 0, declared are 1 to 2"),
    ("serial", "x", np.array([0, 1 + 1e-7], np.float64), False, None),
    ("serial", None, HALF_OUT, False, "[1] was 1.9"), ("serial", None, HALF_OUT, True, None)])
def test_observations_outside_their_space_after_the_first_step(
        backend, name, value, normalizes, words):
    env = vector.make(lambda: strange(name, value, MIXED if name else PAIR), 4, backend)
    text = outside(env, norm_obs=normalizes)
    assert text is None if words is None else words in text


@pytest.mark.parametrize(("space", "value", "margin", "words"), [
    (PAIR, [0, 7], 1.0, "[1] was 7.0"),  # a margin of 1 is a normaliser's
    (PAIR, [0, 1.9], 1.0, None),
    (PAIR, [0, 1.9], 1e-6, "[1] was 1.9"),
    (PAIR, [0, np.nan], 1e-6, None),
    (PAIR, [0, np.inf], 1e-6, "[1] was inf"),
    (spaces.Dict(x=PAIR), {"x": [0, 7]}, 1e-6, "['x'][1] was 7.0"),
    (spaces.Dict(at=spaces.Discrete(3, start=1)), {"at": 0}, 0.0, "['at'] was 0")])
def test_what_lies_outside_a_space(space, value, margin, words):
    flat = emulation.FlatObservation(space)
    rows = np.stack([np.asarray(flat.flatten(one)) for one in (flat.space.sample(), value)])
    count, text = flat.find_outside(rows, np.array([1, 1], np.uint8), margin)
    assert count == bool(text) == (words is not None) and (words or "") in text
    assert flat.find_outside(rows, np.array([1, 0], np.uint8), margin) == (0, "")


class OtherDtype(gymnasium.vector.SyncVectorEnv):
    """From its second step on it returns float64."""

    def step(self, actions):
        observations, *rest = super().step(actions)
        return observations.astype(np.float64) if self.envs[0].t > 1 else observations, *rest


INT16, BYTES = spaces.Box(0, 9, (2,), np.int16), spaces.Box(0, 255, (4,), np.uint8)


@pytest.mark.parametrize(("creator", "words"), [
    (lambda: Steps(change=lambda t: {"observation": np.full(4, 7)}, observation_space=BYTES),
     ["int64", "uint8"]),  # from the first on
    (lambda: strange("at", np.float64(3.5)), ["['at']", "float64", "int64"]),
    (lambda: strange("x", np.array([0.5, 0.5])), None),
    (lambda: OtherDtype([lambda: Steps(limit=9, observation_space=INT16)] * 2),
     ["float64", "int16"]),
    # a resumed run loses what these wrappers measured
    (lambda: gymnasium.wrappers.TimeLimit(
        gymnasium.wrappers.NormalizeObservation(CartPoleEnv()), 10), ["norm-obs"]),
    (lambda: gymnasium.wrappers.vector.NormalizeReward(
        gymnasium.vector.SyncVectorEnv([CartPoleEnv] * 2)), ["norm-reward"]),
    (lambda: gymnasium.wrappers.ClipReward(CartPoleEnv(), max_reward=1.0), None)])
def test_another_dtype_and_a_wrapper_that_measures_are_warned_of_once(creator, words):
    emulation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught, vector.make(creator, 2, "serial") as env:
        warnings.simplefilter("always")
        env.reset()
        for _ in range(8):
            env.step(np.zeros(env.num_agents))
    texts = [str(warning.message) for warning in caught]
    texts = [text for text in texts if "64" in text or "norm-" in text]
    assert len(texts) == (words is not None), texts
    assert all(word in texts[0] for word in words or ())


@pytest.mark.parametrize("value", [np.zeros(5), None])
def test_an_attribute_env_may_be_no_wrapper(value):
    env, back = CartPoleEnv(), CartPoleEnv()
    env.env, back.env = back if value is None else value, env
    vector.make([env], 1, "serial").close()


class Claims(Steps):
    """It reports a return of its own, and counts what closes it."""

    closed = 0

    def step(self, action):
        *results, info = super().step(action)
        return *results, {**info, "episode_return": -7.0}

    def close(self):
        Claims.closed += 1


def test_a_vector_that_is_forgotten_closes_its_environments():
    vecenv = vector.make(Claims, num_envs=2, backend="serial")
    vecenv.reset()
    for _ in range(20):
        vecenv.step(np.zeros(2, int))
    assert vecenv.log()["episode_return"] >= 0
    del vecenv
    gc.collect()
    assert Claims.closed == 2
