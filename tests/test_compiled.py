"""The matrix products of the default policy against float64 for all kinds of shapes, and that
a minibatch takes few calls.

    python -m pytest tests/test_compiled.py -k accumulate
"""

import concurrent.futures
import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import arena
import compiled
import kernels
import models
import pufferl
import vector

PRECISIONS = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
SIZES = st.integers(1, 150)
FEW = settings(max_examples=40)
CANARY = 7.0


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(array, half):
    """What a product reads, in float64: bfloat16 is the upper half of a float32, rounded."""
    if half:
        array = ((array.view(np.uint32) + np.uint32(0x8000))
                 & np.uint32(0xFFFF0000)).view(np.float32)
    return array.astype(np.float64)


def guarded(*shape):
    """An array of NaN, and what lies behind it in memory, which nobody may touch."""
    memory = np.full(math.prod(shape) + 64, CANARY, np.float32)
    array, behind = memory[:-64].reshape(shape), memory[-64:]
    array.fill(np.nan)
    return array, behind


def packed(matrix, half):
    """`matrix` packed, within memory that is NaN where it is not written."""
    target = np.full(compiled.packed_size(*matrix.shape, half), np.nan, np.float32)
    target = target.view(np.uint32) if half else target
    compiled.pack(matrix, target)
    return target


def close(actual, expected, inner):
    """Within the rounding of sums of `inner` products of standard normals."""
    assert (abs(actual - expected) <= 1e-6 * inner + 1e-6).all(), abs(actual - expected).max()


CHECKED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TILES = {  # what the same text is compiled for: (compiler, flags, what runs it)
    "the processor at hand": ("gcc", ["-march=native"], []),
    "AVX2": ("gcc", ["-march=haswell"], []),
    "AVX2 by clang": ("clang", ["-march=haswell"], []),
    "any x86-64": ("gcc", ["-march=x86-64"], []),
    "no byte beside": ("gcc", ["-march=native", *CHECKED], []),
    "NEON": ("aarch64-linux-gnu-gcc", ["-static"], ["qemu-aarch64-static"]),
}


@pytest.mark.parametrize("target", TILES)
def test_tile_on_every_processor(tmp_path, target):
    """tile.c beside plain loops in double precision, at awkward sizes. Debian's
    gcc-aarch64-linux-gnu and qemu-user-static stand for a processor with NEON."""
    compiler, flags, runner = TILES[target]
    missing = [tool for tool in (compiler, *runner) if not shutil.which(tool)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if not runner and "native" not in flags[0] and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these flags are of another kind of processor")
    if "haswell" in flags[0] and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    source, program = Path(__file__).with_name("tile_main.c"), tmp_path / "tile"
    level = "-O1" if flags[-1] == CHECKED[-1] else "-O3"
    subprocess.run([compiler, level, "-fno-math-errno", *flags, "-o", program, source, "-lm"],
                   check=True)
    done = subprocess.run([*runner, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@PRECISIONS
@FEW
@given(rows=SIZES, inner=SIZES, columns=SIZES)
@example(rows=200, inner=1, columns=1)
@example(rows=64, inner=118, columns=64)
@example(rows=65, inner=65, columns=193)
def test_multiply_rows(half, rows, inner, columns):
    x, weight, bias = numbers(0, rows, inner), numbers(1, inner, columns), numbers(2, columns)
    expected = bias + rounded(x, half) @ rounded(weight, half)
    (out, behind), weight = guarded(rows, columns), packed(weight, half)
    compiled.multiply_rows(rows, x, weight, bias, 0, out)
    close(out, expected, inner)
    before = out.astype(np.float64)
    compiled.multiply_rows(rows, x, weight, out.reshape(-1), columns, out)  # adds to it
    close(out, before + expected - bias, inner)
    part = guarded(rows, columns)[0]
    compiled.multiply_rows(rows // 2, x, weight, bias, 0, part)
    close(part[: rows // 2], expected[: rows // 2], inner)
    assert np.isnan(part[rows // 2 :]).all()
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
@FEW
@given(rows=st.integers(0, 400), outputs=SIZES, inputs=SIZES)
@example(rows=129, outputs=192, inputs=64)
@example(rows=1, outputs=4, inputs=118)
def test_accumulate_rows(half, rows, outputs, inputs):
    grad, x = numbers(0, rows, outputs), numbers(1, rows, inputs)
    gradient, behind = guarded(outputs, inputs)
    gradient[:] = numbers(2, outputs, inputs)
    expected = gradient + rounded(grad, half).T @ rounded(x, half)
    compiled.accumulate_rows(half, grad, x, gradient)
    close(gradient, expected, rows)
    assert (behind == CANARY).all(), "written beyond the end"


@FEW
@given(rows=st.integers(0, 400), columns=SIZES)
def test_add_rows(rows, columns):
    x = numbers(0, rows, columns)
    total, behind = guarded(columns)
    total[:] = numbers(1, columns)
    expected = total.astype(np.float64) + x.sum(0, dtype=np.float64)
    compiled.add_rows(x, total)
    close(total, expected, rows)
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
def test_any_split_gives_the_same_bits(half):
    """Rows do not depend on how many there are beside them: a rollout's
    buffers may be of any size."""
    x, weight, bias = numbers(0, 300, 70), packed(numbers(2, 70, 130), half), numbers(3, 130)
    results = []
    for pieces in (1, 2, 5, 300):
        bounds = [300 * i // pieces for i in range(pieces + 1)]
        out = np.empty((300, 130), np.float32)
        with concurrent.futures.ThreadPoolExecutor(pieces) as pool:
            for first, last in itertools.pairwise(bounds):
                pool.submit(compiled.multiply_rows, last - first, x[first:], weight, bias, 0,
                            out[first:])
        results.append(out)
    assert all(np.array_equal(result, results[0]) for result in results)


@PRECISIONS
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(half, poison):
    """The odd step of a pair, the rows beside and the columns beyond must not take part."""
    x, weight = numbers(0, 7, 5), numbers(1, 5, 20)
    x[3, 4] = poison
    out = np.empty((7, 20), np.float32)
    compiled.multiply_rows(7, x, packed(weight, half), np.zeros(20, np.float32), 0, out)
    assert not np.isfinite(out[3]).any() and np.isfinite(np.delete(out, 3, 0)).all()
    gradient = np.zeros((20, 5), np.float32)
    compiled.accumulate_rows(half, numbers(2, 7, 20), x, gradient)
    assert not np.isfinite(gradient[:, 4]).any() and np.isfinite(gradient[:, :4]).all()


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
    return (places[-1] - places[0]) / (len(places) - 1)


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
    monkeypatch.setattr(compiled, "WORTH_A_LEARNER", operations / shares)
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


@pytest.mark.slow  # everything is compiled three times
def test_an_edited_cell_is_what_runs(tmp_path):
    root = Path(compiled.__file__).parent
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
    monkeypatch.setitem(sys.modules, "compiled", types.ModuleType("compiled"))

    def no_compiler(name):
        raise RuntimeError("no C compiler found: install gcc or clang, or set CC to one")

    sys.modules["compiled"].__getattr__ = no_compiler
    trainer = pufferl.PuffeRL({"horizon": 8, "minibatch_size": 16, "data_dir": None,
                               "log_interval": 1e9},
                              vecenv := vector.make("gym/Acrobot-v1", 2, "serial"),
                              models.MinGRUPolicy(vecenv, 8))
    assert trainer.engine.name == "autograd" and "no C compiler found" in capsys.readouterr().err
    trainer.release()


def test_the_clock_leaves_out_compiling(monkeypatch):
    said = []
    monkeypatch.setattr(arena.compiling, "announce", lambda: said.append(1))
    before, wall = arena.compiling.seconds, arena.clock()
    function = numba.njit(lambda x: x + 1)
    function(1)
    function(1.0)
    spent = arena.compiling.seconds - before
    assert said == [1] and spent > 0
    function(2)
    assert arena.compiling.seconds - before == spent, "nothing is compiled twice"
    assert arena.clock() - wall < spent
