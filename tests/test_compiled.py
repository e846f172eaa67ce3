"""fast/compiled.py: a minibatch takes few calls, and what is kept of its kernels."""

import math
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numba
import numpy as np
import pytest

import arena
import kernels
import models
import pufferl
import vector
from fast import compiled


def python_calls(segments, minibatch):
    """How many Python functions are called for each minibatch."""
    vecenv = vector.make("squared", num_envs=segments, seed=1, num_threads=1)
    settings = {"horizon": 16, "minibatch_size": minibatch, "data_dir": None, "log_interval": 1e9,
                "replay_ratio": 4, "learning_rate": 0.01, "total_timesteps": 10**7}
    trainer = pufferl.PuffeRL(settings, vecenv, models.MinGRUPolicy(vecenv, 16))
    # to be counted
    trainer.engine.in_parallel = lambda function, workers: [function(worker) for worker in workers]
    for _ in range(2):
        trainer.evaluate()
        trainer.train()
    trainer.evaluate()
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name)
                   if event == "call" else None)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    trainer.release()
    places = [i for i, name in enumerate(calls) if name == "learn"]
    assert len(places) == segments * 16 * 4 // minibatch
    return np.median(np.diff(places))  # a collection of garbage may call something between two


def test_a_minibatch_is_few_calls():
    """However large it is: no Python goes between its segments. Most of them check
    the arguments of kernels."""
    small, large = python_calls(64, 128), python_calls(256, 2048)
    assert small == large < 160


def test_a_step_of_python_environments_is_one_call():
    """From observations to actions."""
    vecenv = vector.make("squared", 8, "serial")
    trainer = pufferl.PuffeRL({"horizon": 8, "minibatch_size": 32, "data_dir": None}, vecenv,
                              models.MinGRUPolicy(vecenv, 8))
    trainer.evaluate()
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name)
                   if event == "call" else None)
    try:
        trainer.engine.step(0, 0, 3)
    finally:
        sys.setprofile(None)
    trainer.release()
    # numba tells a profiler of its function up to Python 3.11
    assert [name for name in calls if name != "_act_cpu"] == ["step", "run"]


@pytest.mark.parametrize("backend", ["native", "serial"])
def test_learners_learn_side_by_side(backend, monkeypatch):
    """As many as there are threads, also if one worker steps all environments."""
    vecenv = vector.make("squared", 8, backend, num_threads=2)
    settings = {"horizon": 8, "minibatch_size": 32, "data_dir": None, "log_interval": 1e9,
                "learning_rate": 0.01}
    trainer = pufferl.PuffeRL(settings, vecenv, models.MinGRUPolicy(vecenv, 8))
    learn, both = compiled._learn_cpu, threading.Barrier(2, timeout=60)

    def wait_and_learn(*arguments):
        both.wait()
        learn(*arguments)

    monkeypatch.setattr(compiled, "_learn_cpu", wait_and_learn)
    trainer.evaluate()
    trainer.train()
    trainer.release()


@pytest.mark.parametrize("shares, learners", [(0.5, 1), (1.9, 1), (2, 2), (100, 2)])
def test_a_small_minibatch_has_fewer_learners_than_threads(monkeypatch, shares, learners):
    """To wake a thread takes as long as some millions of operations."""
    vecenv = vector.make("squared", 8, num_threads=2)
    policy = models.MinGRUPolicy(vecenv, 8)
    operations = 6 * 32 * sum(weight.numel() for weight in policy.parameters())
    monkeypatch.setattr(compiled.Compiled, "worth_a_learner", operations / shares)
    trainer = pufferl.PuffeRL({"horizon": 8, "minibatch_size": 32, "data_dir": None}, vecenv, policy)
    assert trainer.engine.num_learners == learners
    trainer.evaluate()
    assert math.isfinite(trainer.train()["policy_loss"])
    trainer.release()


def test_what_is_kept_of_a_driver_depends_on_what_it_inlines():
    """numba looks at a driver's own file alone; the cells stand in another one."""
    drivers = [compiled._learn_cpu, compiled._rollout_cpu, kernels._mingru_scan_lanes,
               vector.step_environments]
    assert all(driver._cache._cache_file._source_stamp[-1] == arena.SOURCES for driver in drivers)


@pytest.mark.slow
def test_kernels_of_a_gpu_are_kept_until_their_file_is_edited(tmp_path):
    pytest.importorskip("numba_cuda")
    file, script = tmp_path / "own.py", tmp_path / "script.py"
    file.write_text("def fill(begin, end, a):\n    a[begin] = 1\n")
    script.write_text(f"""if True:
        import sys, types
        sys.path[:0] = [{str(tmp_path)!r}, {str(arena.FOLDER)!r}]
        import arena, own
        code = types.SimpleNamespace(magic_tuple=lambda: ("a GPU",))

        def keep(what, signature="int64"):
            cache = arena._kept_kernel(own.fill)._cache
            cache._impl.rebuild = lambda context, kept: types.SimpleNamespace(**kept)
            before = cache._load_overload(("int64",), types.SimpleNamespace(codegen=lambda: code))
            left = {{"what": what, "signature": types.SimpleNamespace(args=(signature,))}}
            cache._save_overload(("int64",), types.SimpleNamespace(codegen=code, _reduce_states=lambda: left))
            return before and before.what

        print(keep(sys.argv[1]))
        if sys.argv[1] == "second":
            print(keep("another's", "float64"), keep("third"))
            open(own.__file__, "a").write("# edited")
            print(keep("fourth"), keep("fifth"))
        """)

    def run(what):
        done = subprocess.run([sys.executable, script, what], capture_output=True, text=True, check=True,
                              env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")})
        return done.stdout.split()

    assert run("first") == ["None"]
    assert run("second") == ["first", "second", "None", "None", "fourth"]


@pytest.mark.slow  # everything is compiled three times
def test_an_edited_cell_is_what_runs(tmp_path):
    root = Path(compiled.__file__).parents[1]
    copy = shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "tests", "docs", "experiments"))
    script = """import pufferl, vector, models, torch
torch.manual_seed(0)
vecenv = vector.make("squared", num_envs=8, num_threads=1)
settings = {"horizon": 8, "minibatch_size": 32, "data_dir": None, "log_interval": 1e9, "learning_rate": 0.01}
trainer = pufferl.PuffeRL(settings, vecenv, models.MinGRUPolicy(vecenv, 8))
trainer.evaluate(); trainer.train()
print(trainer.engine.name, float(trainer.arena.flat("weights").double().sum()))"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run():
        return subprocess.run([sys.executable, "-c", script], cwd=copy, env=environment, check=True, text=True,
                              stdout=subprocess.PIPE).stdout

    first = run()
    assert first.startswith("compiled") and run() == first
    kernels_py = copy / "kernels.py"
    text, edited = kernels_py.read_text(), "return plain, (ZERO if outside else f32(0.5) * plain), ratio, logratio"
    kernels_py.write_text(text.replace("return plain, (ZERO if outside else plain), "
                                       "ratio, logratio", edited))
    assert edited in kernels_py.read_text() and run() != first


def test_without_a_compiler_the_network_runs_through_autograd(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fast.compiled", types.ModuleType("fast.compiled"))

    def no_compiler(name):
        raise RuntimeError("no C compiler found: install gcc or clang, or set CC to one")

    sys.modules["fast.compiled"].__getattr__ = no_compiler
    trainer = pufferl.PuffeRL({"horizon": 8, "minibatch_size": 16, "data_dir": None,
                               "log_interval": 1e9},
                              vecenv := vector.make("gym/Acrobot-v1", 2, "serial"),
                              models.MinGRUPolicy(vecenv, 8))
    assert trainer.engine.name == "autograd" and "no C compiler found" in capsys.readouterr().err
    trainer.release()


def test_the_clock_leaves_out_compiling(monkeypatch):
    said = []
    monkeypatch.setattr(arena.compiling, "announce", lambda: said.append(1))
    monkeypatch.setattr(arena.compiling, "seconds", 2.0)  # so it takes a while, however quick this machine is
    before, wall = arena.compiling.seconds, arena.clock()
    function = numba.njit(lambda x: x + 1)
    function(1)
    function(1.0)
    spent = arena.compiling.seconds - before
    assert said == [1] and spent > 0
    function(2)
    assert arena.compiling.seconds - before == spent, "nothing is compiled twice"
    assert arena.clock() - wall < spent
