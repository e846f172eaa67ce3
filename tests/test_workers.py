"""Environments in workers: stepped together or one by one, and when they break."""

import functools
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from conftest import read_until, start, wait_for
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from small_envs import Counters, Drawn, Steps, Walk, assert_same, rollout
from test_emulation import choices, nested

import emulation
import vector
from emulation import GymnasiumPufferEnv
from errors import EnvError, WorkerError, user_traceback
from vector import Multiprocessing, Ray, Serial

ROOT = Path(__file__).resolve().parent.parent
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_worker_imports_no_torch():
    code = ("import sys, workers; print({'torch', 'numba', 'vector', 'environments', 'ocean'} "
            "& set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    assert done.stdout == "set()\n"


# -- Stepped together, or one by one ---------------------------------------------------------------


class Alone(GymnasiumPufferEnv):
    """A subclass, which may step in another way, so that each is stepped by itself."""


moves = st.one_of(choices, st.just(spaces.Box(-2, 1, (2,), np.float64)),
                  st.just(spaces.Box(-1, 2, (), np.float32)),
                  st.lists(choices, min_size=1, max_size=3).map(spaces.Tuple))


@settings(max_examples=50)
@given(space=nested, actions=moves, masked=st.booleans(), infos=st.booleans(),
       number=st.integers(1, 4), horizon=st.integers(1, 9), seed=st.integers(0, 2**20))
def test_any_space_is_stepped_together_as_one_by_one(
        space, actions, masked, infos, number, horizon, seed):
    masked = masked and bool(emulation.FlatAction(actions).heads)

    def make(kind):
        env = emulation.wrap(Drawn(space, actions, masked, infos))
        env.__class__ = kind
        return env

    results = []
    for kind in (Alone, GymnasiumPufferEnv):
        vecenv = vector.make([functools.partial(make, kind)] * number, number, Serial, seed=seed)
        results.append(rollout(vecenv, horizon, 3))
        assert (vecenv._envs.stepper is not None) == (kind is GymnasiumPufferEnv)
    np.testing.assert_equal(*results)


def test_a_reward_may_become_an_array_of_one():
    def change(t):
        return {"reward": np.ones(1)} if t == 3 else {}

    with vector.make([lambda: Steps(change=change), Steps], 2, Serial) as vecenv:
        vecenv.reset(seed=0)
        for _ in range(9):
            assert (vecenv.step([0, 0])[1] == 1).all()
        assert vecenv.log()["episode_return"] == 3 and vecenv._envs.stepper is not None


# -- What breaks -----------------------------------------------------------------------------------


def unmakable(trouble=None):
    if trouble:
        raise trouble("no display")
    return Walk()


def sized(trouble=2):
    return Counters(trouble or 2)


def fails(creator, trouble, backend=Multiprocessing, **options):
    """Step a vector whose last environment is in trouble until an error is raised."""
    kwargs = [{"trouble": None}] * 3 + [{"trouble": trouble}]
    options |= {"num_workers": 2, "env_kwargs": kwargs}
    with vector.make(creator, 4, backend, **options) as vecenv:
        vecenv.reset(seed=0)
        for _ in range(4):
            vecenv.step(np.ones(vecenv.num_agents, int))


@pytest.mark.parametrize(("creator", "trouble", "error", "words"), [
    (Walk, ArithmeticError, WorkerError, r"worker 1 .*2 to 3 of Walk.*step.*ArithmeticError"),
    (Walk, EOFError, WorkerError, r"worker 1 .*raised.*step.*EOFError"),  # not the worker's
    (Walk, KeyboardInterrupt, WorkerError, r"worker 1 .*raised.*KeyboardInterrupt"),
    (Walk, "segfault", WorkerError, r"worker 1 .*11.*SIGSEGV.*step"),
    (Walk, "hang", WorkerError, r"worker 1 .*vec\.timeout.*step"),
    (Walk, "shape", EnvError, r"\['x'\].*\(2,\).*\(3,\)"),
    (unmakable, OSError, WorkerError, "worker 1 .*OSError"),
    (sized, 3, EnvError, "environment 3 .*environment 0")])
def test_a_worker_in_trouble_is_an_error(creator, trouble, error, words):
    begun = time.perf_counter()
    with pytest.raises(error, match=f"(?s){words}") as raised:
        fails(creator, trouble, timeout=1 if trouble == "hang" else 600)
    # what hangs sleeps 1,000 s, and what dies is noticed at once
    assert time.perf_counter() - begun < 100
    if trouble == "shape":
        assert raised.value.__notes__ == ["(environment 3)"]
    if trouble is EOFError:
        assert str(raised.value).count("  File ") == 2, "its own lines alone"


def hang_beside_another(backend):
    """The worker whose batch is there is received first, the other one is noticed."""
    begun, received = time.perf_counter(), [0, 0]
    with vector.make(Walk, 2, backend, num_workers=2, batch_size=1, timeout=1,
                     env_kwargs=[{}, {"trouble": "hang"}]) as vecenv:
        vecenv.async_reset(seed=0)
        with pytest.raises(WorkerError, match=r"worker 1 .*vec\.timeout"):
            while time.perf_counter() - begun < 100:
                observations, *arrays, infos, (agent,), masks = vecenv.recv()
                assert masks.all() and all(array.shape == (1,) for array in arrays)
                assert observations.shape[0] == 1 and (agent == 0 or infos == [])
                received[agent] += 1
                vecenv.send([1])
    assert received[0] > 10 and received[1] == 3  # it hangs in its third step


def test_a_worker_that_hangs_is_noticed_while_others_answer():
    hang_beside_another(Multiprocessing)


@pytest.mark.parametrize(("name", "one", "other"), [
    ("observation_space", spaces.Box(0, 9, (2, 3)), spaces.Box(0, 9, (1, 3))),
    ("action_space", spaces.Discrete(2), spaces.Discrete(5)),
    ("action_space", spaces.Discrete(2), spaces.Discrete(2, start=5))])
def test_environments_of_other_spaces_are_named(name, one, other):
    creators = [functools.partial(Steps, **{name: space}) for space in (one, other)]
    with pytest.raises(ValueError, match=r"environment 1 .*environment 0"):
        vector.make(creators, 2, Serial).reset()


def test_a_policys_error_is_not_an_environments():
    with pytest.raises(RuntimeError, match="unflatten") as raised:
        emulation.nativize_tensor(torch.zeros(2, 3), {"a": (torch.float32, (5,), 0, 12)})
    assert not user_traceback(raised.value)[1]


class Slow(Walk):
    def __init__(self, pauses):
        super().__init__()
        self.pauses = iter(pauses)

    def step(self, action):
        time.sleep(next(self.pauses))
        return super().step(action)


@pytest.mark.parametrize(("pauses", "late"), [((0, 1.5, 0, 0), True), ((0.2,) * 6, False)])
def test_a_step_of_this_process_that_takes_too_long_shows_where_it_is(pauses, late, capfd):
    """Print it and continue; each of several steps has the whole of vec.timeout."""
    with vector.make(Slow, 1, Serial, env_kwargs={"pauses": pauses}, timeout=0.6) as vecenv:
        vecenv.allocate(len(pauses))
        while vecenv.wait()[1] < len(pauses):
            vecenv.advance(0)
    shown = capfd.readouterr().err
    assert (f'{Path(__file__).name}"' in shown and "in step" in shown) == late, shown
    assert late or "Timeout" not in shown


@pytest.mark.parametrize("options", [{"backend": Serial},
                                     {"backend": Multiprocessing, "num_workers": 1}])
def test_closing_ends_what_it_can(options, tmp_path):
    class Closes(Walk):
        def __init__(self, path, trouble=None):
            super().__init__(trouble)
            self.path = path

        def close(self):
            time.sleep(0.4)
            with open(self.path, "a") as file:
                file.write("closed ")
            raise OSError("the_window")

    envs = [{"path": str(tmp_path / str(i))} for i in range(3)]
    for trouble, error, words in ((None, OSError, "the_window"),
                                  (ArithmeticError, (WorkerError, ArithmeticError), "walker")):
        envs[1]["trouble"] = trouble
        vecenv = vector.make(Closes, 3, env_kwargs=envs, **options)
        vecenv.reset(seed=0)
        with pytest.raises(error, match=words):
            for _ in range(3 if trouble else 0):
                vecenv.step(np.ones(3, int))
            vecenv.close()
        times = [(tmp_path / str(i)).read_text().count("closed") for i in range(3)]
        # processes have an environment 0 and we have one
        assert trouble or times == [1 if options["backend"] is Serial else 2, 1, 1]


@pytest.mark.parametrize("end", ["", pytest.param("raise SystemExit(1)", marks=pytest.mark.slow)])
def test_workers_end_with_their_parent(end):
    """test_processes.py kills parents."""
    code = f"""if True:
        import sys
        sys.path.insert(0, "tests")
        import vector
        from small_envs import Walk
        vecenv = vector.make(Walk, 2, "multiprocessing", num_workers=2)
        vecenv.reset()
        print(*[process.pid for process in vecenv._workers], flush=True)
        {end}
    """
    parent = start([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                   stderr=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(pid)) for pid in read_until(parent, "\n").split()]
    assert len(workers) == 2
    parent.communicate(timeout=100)
    wait_for(lambda: not any(process.is_running() and process.status() != "zombie"
                             for process in workers), 60)


@pytest.mark.slow
def test_ray_gives_the_same():
    ray = pytest.importorskip("ray", reason="requirements/extras.txt")
    # A busy machine may take minutes to start an actor.
    make = functools.partial(vector.make, Walk, 4, Ray, num_workers=2, timeout=600)
    try:
        assert_same(rollout(vector.make(Walk, 4, Serial)), rollout(make()))
        with make() as vecenv:
            vecenv.reset()
            vecenv.set_attr("limit", 3)
            assert vecenv.call("limit") == [3] * 4
        for trouble, error, words in ((ArithmeticError, WorkerError, "walker"),
                                      ("shape", EnvError, "shape")):
            with pytest.raises(error, match=words):
                fails(Walk, trouble, Ray, timeout=600)
        hang_beside_another(Ray)
        vecenv = make()
        vecenv.reset(seed=0)
        actors = [process for process in psutil.Process().children(recursive=True)
                  if "ray::RemoteEnvs" in "".join(process.cmdline())]
        assert len(actors) == 2
        actors[0].kill()  # as a machine that is lost
        with pytest.raises(WorkerError, match=r"worker [01] .* of Walk"):
            for _ in range(20):
                vecenv.step(np.ones(4, int))
        assert psutil.wait_procs(actors, timeout=60)[1] == []
    finally:
        ray.shutdown()
