"""What the compiler makes of the kernels: vectorised loops in single precision that keep no memory."""

import gc
import re
import tracemalloc
from functools import cache, partial

import kernel_cases as cases
import llvmlite.binding
import numba
import pytest
import torch
from numba.core.runtime import _nrt_python, rtsys
from test_optim import made

import arena
import kernels

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CONVERSIONS = re.compile(r"\tv?cvt(?:ss2sd|sd2ss|ps2pd|pd2ps)\b.*")
FUNCTION = re.compile(r"^(\w[\w$.]*):", re.MULTILINE)
PACKED = r"\tv(?:{})ps\t.*%[yz]mm"
DIVIDES, MULTIPLIES = "div|rcp14", r"mul|fn?m(?:add|sub)\d*"
needs_avx = pytest.mark.skipif(not llvmlite.binding.get_host_cpu_features().get("avx2"),
                               reason="this processor has no AVX2")


def assembly_of(compiled):
    """The machine code without the wrapper for Python callers, which has double scalars."""
    (text,) = compiled.inspect_asm().values()
    parts = FUNCTION.split(text)[1:]
    code = [body for name, body in zip(parts[::2], parts[1::2], strict=True)
            if "cpython" not in name]
    assert code
    return "".join(code)


def check_vectorised(assembly, operations):
    assert re.search(PACKED.format(operations), assembly), "scalar"
    assert not CONVERSIONS.search(assembly), CONVERSIONS.search(assembly)[0]


@needs_avx
@pytest.mark.parametrize("name", ["log_cell", "tanh_cell", "normalise_cell", "ppo_cell", "value_cell"])
def test_a_cell_is_vectorised_in_single_precision(name):
    """Those in whose drivers the test below finds nothing."""
    arrays = {"f": numba.float32[::1], "b": numba.boolean[::1]}
    signature = tuple(arrays[kind] for kind in "".join(cases.CELLS[name]))
    compiled = numba.njit(signature, error_model="numpy", fastmath=arena.FASTMATH,
                          pipeline_class=arena._NoAlias)(cases.cell_loop(name))
    check_vectorised(assembly_of(compiled), f"{DIVIDES}|{MULTIPLIES}|add|sub")


DRIVERS = {  # the call that compiles it, and packed arithmetic that its hot loop needs at least
    "_advantage_lanes": ("advantage", MULTIPLIES), "_sample_discrete_lanes": ("sample", MULTIPLIES),
    "_mingru_step_lanes": ("mingru_step", DIVIDES), "_mingru_scan_lanes": ("mingru_scan", DIVIDES),
    "_mingru_scan_grad_lanes": ("mingru_scan_grad", MULTIPLIES),
    "_nesterov_lanes": ("muon", MULTIPLIES), "_apply_lanes": ("muon", MULTIPLIES)}


@cache
def compiled_again(name, call):
    """The driver for the types of its plainest call, without the cache, which keeps no assembly."""
    driver = getattr(kernels, name)
    if call == "muon":
        made([(3, 4)])[2].step(torch.tensor(0.1), torch.zeros(()))
    else:
        cases.SMALL[call]().run()
    options = {name: value for name, value in driver.targetoptions.items()
               if name not in ("nopython", "boundscheck")}
    again = numba.njit(pipeline_class=driver._compiler.pipeline_class, **options)(driver.py_func)
    # other tests compile it with arrays in place of None
    again.compile(max(driver.signatures, key=lambda types: types.count(numba.types.none)))
    return again


@needs_avx
@pytest.mark.parametrize("name", DRIVERS)
def test_a_cpu_driver_is_vectorised(name):
    call, operations = DRIVERS[name]
    assembly = assembly_of(compiled_again(name, call))
    check_vectorised(assembly, operations)
    # steps of a segment lie far apart: they are prefetched
    assert ("\tprefetch" in assembly) == ("scan" in name)


@pytest.mark.parametrize("call, driver, loops", [
    ("ppo_loss", "_ppo_loss_discrete_lanes", ("_head_rows", "_objective_rows", "_logit_grad_rows")),
    ("sample", "_sample_discrete_lanes", ("_uniform_rows", "_choose_rows"))])
def test_rows_lie_side_by_side(call, driver, loops):
    """numba knows it, else their loops are scalar: a row of two dimensions may have any stride."""
    assembly = assembly_of(compiled_again(driver, call))  # and what it calls
    # a copy of its own: one outside differs in the last bit, and which runs depends on the cache
    assert not re.search(rf"_ZN7kernels\d+({'|'.join(loops)})", assembly)
    for rows in (getattr(kernels, name) for name in loops):
        arrays = [kind for kind in rows.signatures[0] if isinstance(kind, numba.types.Array)]
        assert arrays and {array.layout for array in arrays} == {"C"}, rows.__name__


# -- Memory


@pytest.fixture
def counting():
    was_on = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    if not was_on:
        _nrt_python.memsys_disable_stats()


def growth(function):
    """(Python and numpy bytes that stay, their peak above the start, numba blocks that stay)."""
    def blocks():
        return rtsys.get_allocation_stats().alloc - rtsys.get_allocation_stats().free

    for _ in range(3):
        function()
    start, (before, _) = blocks(), tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for _ in range(50):
        function()
    gc.collect()  # Python's free lists of small tuples too
    after, peak = tracemalloc.get_traced_memory()
    return after - before, peak - before, blocks() - start


@pytest.mark.parametrize("call", [*cases.SMALL, "muon"])
def test_repeated_calls_keep_no_memory(call, counting):
    run = cases.SMALL[call]().run if call != "muon" else partial(
        made([(192, 64), (64,)])[2].step, torch.tensor(0.01), torch.zeros(()))
    seen = []
    for _ in range(3):  # another thread of the process may allocate once
        seen.append(growth(run))
        stays, peak, blocks = seen[-1]
        if stays < 4096 and peak < 65536 and blocks == 0:
            return
    raise AssertionError(f"bytes that stay, their peak, and blocks of numba's: {seen}")
