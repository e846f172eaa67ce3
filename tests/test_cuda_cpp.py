"""Cells as C, and kernels.cu: compiled by NVRTC for three generations of GPUs, run on the CPU behind tests/cuda_shim.h.
What the kernels compute is compared with the references by tests/test_cuda.py.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_on_a_cpu
import numpy as np
import nvrtc
import pytest
import reference
import torch
from numba import njit

import arena
import cuda_cpp
import kernels

pytestmark = [pytest.mark.skipif(arena.SIMULATOR, reason="numba compiles nothing here"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]
GENERATIONS = ("sm_80", "sm_90", "sm_120")
f32 = np.float32


# ---------------------------------------------------------------------------------------------------------------------
# Cells

KINDS = {"f": "float", "i": "int", "u": "u32", "h": "u16", "b": "bool"}
CELLS = {  # what each takes and returns: float, int32, uint32, uint16, bool
    "power_of_two": ("f", "f"), "exp_cell": ("f", "f"), "sigmoid_cell": ("f", "f"), "log_cell": ("f", "f"),
    "exponent_and_mantissa": ("f", "ff"), "cos_turn_cell": ("f", "f"), "uniform_cell": ("u", "f"),
    "philox_cell": ("uuuuuu", "uuuu"), "float_of_bfloat": ("h", "f"), "bfloat_of_float": ("f", "h"),
    "normalise_cell": ("fff", "f"), "advantage_cell": ("ffbffbfffffff", "ff"), "mingru_gates_cell": ("fff", "fff"),
    "mingru_cell": ("fffffb", "ff"), "mingru_cell_grad": ("fffffbff", "fffff"), "ppo_cell": ("ffff", "ffff"),
    "value_cell": ("ffff", "ff"), "entropy_cell": ("ff", "f"), "entropy_grad_cell": ("fff", "f"),
    "logit_grad_cell": ("ffbff", "f"), "nesterov_cell": ("fff", "ff"), "squash_cell": ("f", "ff"),
    "gaussian_cell": ("ffff", "ff"), "gaussian_grad_cell": ("ffffff", "ff"),
}


def probe(name):
    """extern "C" void probe_NAME(n, inputs..., outputs...)."""
    takes, gives = CELLS[name]
    inputs = [f"const {KINDS[kind]} *in{i}" for i, kind in enumerate(takes)]
    outputs = [f"{KINDS[kind]} *out{i}" for i, kind in enumerate(gives)]
    call = f"{name}({', '.join(f'in{i}[k]' for i in range(len(takes)))})"
    body = f"out0[k] = {call};"
    if len(gives) > 1:
        body = (f"auto [{', '.join(f'r{i}' for i in range(len(gives)))}] = {call}; " +
                " ".join(f"out{i}[k] = r{i};" for i in range(len(gives))))
    return (f'extern "C" __global__ void probe_{name}(i64 n, {", ".join(inputs + outputs)}) {{\n'
            f"    for (i64 k = 0; k < n; k++) {{ {body} }}\n}}\n")


@functools.cache
def probes():
    cells = cuda_cpp.translate([vars(kernels)[name] for name in CELLS])
    return cuda_on_a_cpu.build(f"{cuda_cpp.PRELUDE}{cells}{''.join(map(probe, CELLS))}", ("-ffp-contract=off",))


def numbers(rng, kind, n):
    if kind in "uhi":
        return rng.integers(0, 2**16 if kind == "h" else 2**31, n, dtype=np.uint32).astype(
            {"u": np.uint32, "h": np.uint16, "i": np.int32}[kind])
    if kind == "b":
        return rng.integers(0, 2, n).astype(np.bool_)
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-12, 7, n))).astype(f32)
    special = f32([0.0, -0.0, 1.0, 0.5, -1.0, 1e30, -1e30, np.inf, -np.inf, np.nan, 88.5, -87.5, 16.1, 1e-38])
    return np.concatenate([special, x])[:n][rng.permutation(n)]


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cell_in_c_is_the_cell_in_python_bit_for_bit(name):
    takes, gives = CELLS[name]
    rng, n = np.random.default_rng(len(name)), 20_000
    inputs = [numbers(rng, kind, n) for kind in takes]
    if name in ("log_cell", "exponent_and_mantissa"):
        inputs = [np.abs(inputs[0]) + f32(1e-30)]  # normal and above 0
        inputs = [np.where(np.isfinite(inputs[0]), inputs[0], f32(2))]
    if name == "power_of_two":
        inputs = [rng.integers(-80, 80, n).astype(f32) + f32(12582912.0)]
    if name == "cos_turn_cell":
        inputs = [rng.random(n, dtype=f32)]
    kinds = {"f": f32, "i": np.int32, "u": np.uint32, "h": np.uint16, "b": np.bool_}
    outputs = [np.zeros(n, kinds[kind]) for kind in gives]
    arrays = [array.ctypes.data for array in inputs + outputs]
    kernel = cuda_on_a_cpu.Kernel(probes(), f"probe_{name}", cuda_on_a_cpu.cupy())
    kernel.owner.streams.append(cuda_on_a_cpu.STREAM)
    kernel((1,), (1,), (np.int64(n), *map(np.uint64, arrays)))
    cell = vars(kernels)[name]
    scope = {"cell": cell}
    values = ", ".join(f"in{i}[k]" for i in range(len(takes)))
    targets = ", ".join(f"out{i}[k]" for i in range(len(gives)))
    names = ", ".join([f"in{i}" for i in range(len(takes))] + [f"out{i}" for i in range(len(gives))])
    exec(f"def loop({names}):\n for k in range(len(in0)):\n  {targets} = cell({values})", scope)
    expected = [np.zeros_like(array) for array in outputs]
    njit(scope["loop"], error_model="numpy")(*inputs, *expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert np.array_equal(ours, theirs, equal_nan=ours.dtype == f32), name
        assert not (ours == 0).all()


def test_no_cell_of_the_kernels_is_left_out():
    """Those that take arrays or settings are compared within their kernels, by tests/test_cuda.py."""
    cells = set(re.findall(r"CELL auto (\w+)\(", kernels.CUDA.source))
    assert cells - CELLS.keys() == {"head_max_cell", "objective_cell", "philox_round", "search_cell", "statistics_cell"}


def unknown_call(x):
    return x + print(x)


def bare_literal(x):
    return x * 0.5


def inner_name(x):
    if x > f32(0):
        y = x
    return y


@pytest.mark.parametrize("function", [unknown_call, bare_literal, inner_name], ids=lambda function: function.__name__)
def test_what_c_cannot_say_is_an_error(function):
    with pytest.raises((NotImplementedError, TypeError), match=r"cannot be written in C|becomes double"):
        cuda_cpp.translate([function])


# ---------------------------------------------------------------------------------------------------------------------
# The file

DOUBLES = {"advantage_moments", "gradient_norm", "clip", "add_rows", "add_rows_half", "ppo_loss_discrete",
           "ppo_loss_continuous", "draw", "newton_schulz"}  # kernels that add up in double


@pytest.fixture(scope="module", params=GENERATIONS)
def compiled(request):
    if nvrtc.library() is None:
        pytest.skip("there is no libnvrtc: pip install -r requirements-test.txt")
    return request.param, nvrtc.compile(kernels.CUDA.source, "kernels.cu", request.param, cuda_cpp.OPTIONS)


def test_every_kernel_compiles_for_every_generation(compiled):
    generation, ptx = compiled
    assert f".target {generation}" in ptx
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\n\}", ptx, flags=re.DOTALL))
    assert entries.keys() == kernels.CUDA.signatures.keys()
    for name, text in entries.items():
        assert ".local" not in text, f"{name}: an array that was meant for registers lies in memory"
        assert (".f64" in text) == (name in DOUBLES), f"{name} computes in another precision than it should"


def test_the_compiler_sees_the_arguments_that_python_hands_over(compiled):
    """Each parameter of each kernel, by its size, as the compiled code declares it."""
    for name, parameters in re.findall(r"\.entry (\w+)\((.*?)\)", compiled[1], flags=re.DOTALL):
        kinds = re.findall(r"\.param \.(\w+)", parameters)
        expected = [8 if is_array else dtype.itemsize for dtype, is_array, _ in kernels.CUDA.signatures[name]]
        assert [int(kind[1:]) // 8 for kind in kinds] == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_stays_in_registers(generation):
    """What the assembler within NVRTC says of each kernel: nothing is moved to memory for want of registers."""
    library, program = nvrtc.library(), ctypes.c_void_p()
    if library is None:
        pytest.skip("there is no libnvrtc: pip install -r requirements-test.txt")
    library.nvrtcCreateProgram(ctypes.byref(program), kernels.CUDA.source.encode(), b"kernels.cu", 0, None, None)
    options = [f"--gpu-architecture={generation}", *cuda_cpp.OPTIONS, "--ptxas-options=-v"]
    texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    assert library.nvrtcCompileProgram(program, len(options), texts) == 0
    log = nvrtc._text(library, program, "ProgramLog")
    spilled, used = re.findall(r"(\d+) bytes spill stores", log), re.findall(r"Used (\d+) registers", log)
    assert set(spilled) == {"0"} and len(used) == len(kernels.CUDA.signatures), log


def test_a_wrong_argument_is_refused_before_the_launch(monkeypatch):
    cupy = cuda_on_a_cpu.install(monkeypatch)
    good = [1, 1, 1, 2, *(np.zeros(6, f32) for _ in range(3)), *(np.ones(1, np.uint8) for _ in range(2)),
            np.zeros(1, np.int64), 0, np.zeros(2, f32), False, np.zeros(2, f32)]
    kernels.CUDA.launch("mingru_scan", 1, 64, *good)
    with pytest.raises(TypeError, match="takes 14 arguments, not 13"):
        kernels.CUDA.launch("mingru_scan", 1, 64, *good[:-1])
    with pytest.raises(TypeError, match="states is float64, expected float32"):
        kernels.CUDA.launch("mingru_scan", 1, 64, *good[:6], np.zeros(6), *good[7:])
    with pytest.raises(TypeError, match=r"resets is .*int.*, expected uint8"):
        kernels.CUDA.launch("mingru_scan", 1, 64, *good[:7], 5, *good[8:])
    assert cupy.launches == ["mingru_scan"]


def test_threads_that_never_meet_are_found(monkeypatch):
    """As the stand-in's own proof: it sees a barrier that not all reach, and a scalar of another size."""
    library = cuda_on_a_cpu.build(cuda_cpp.PRELUDE + """
        extern "C" __global__ void apart(i64 n) { if (threadIdx.x < n) __syncthreads(); else __shfl_sync(~0u, 1, 0); }
    """)
    kernel = cuda_on_a_cpu.Kernel(library, "apart", cuda_on_a_cpu.install(monkeypatch))
    monkeypatch.setattr(kernel.owner, "streams", [cuda_on_a_cpu.STREAM])
    kernel((1,), (64,), (np.int64(64),))
    with pytest.raises(AssertionError, match="never meet"):
        kernel((1,), (64,), (np.int64(5),))
    with pytest.raises(AssertionError, match="takes"):
        kernel((1,), (64,), (np.int32(64),))
    with pytest.raises(AssertionError, match="another stream"):
        monkeypatch.setattr(kernel.owner, "streams", [0])
        kernel((1,), (64,), (np.int64(64),))


@pytest.mark.parametrize("count, rows, columns", [(1, 1, 1), (2, 3, 70), (3, 33, 40), (2, 64, 100)])
@pytest.mark.parametrize("backwards", [False, True])
def test_newton_schulz_in_one_launch(count, rows, columns, backwards, monkeypatch):
    """Every matrix as the reference has it; what was in the scratch, and the order of the blocks, does not matter."""
    cupy = cuda_on_a_cpu.install(monkeypatch)
    monkeypatch.setattr(cupy, "backwards", backwards)
    monkeypatch.setattr(arena, "SIMULATOR", True)
    memory = kernels.Arena()
    memory.adopt(torch.nn.Linear(2, 2))
    x = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(rows))
    x[-1] *= 0 if count > 2 else 1e-4
    expected = torch.stack([reference.newton_schulz(matrix.double()) for matrix in x])
    y, gram, polynomial = (torch.full(shape, torch.nan) for shape in (x.shape, *2 * [(count, rows, rows)]))
    kernels.Muon(memory, together=True)._orthogonalise_together(x, y, gram, polynomial)
    assert cupy.launches == ["newton_schulz"]
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Any order of threads and blocks


def results(monkeypatch, backwards):
    """Everything that the good calls of the promises' tests leave, and of larger ones."""
    import test_kernel_promises as promises
    import test_kernels as cases

    cupy = cuda_on_a_cpu.install(monkeypatch)
    monkeypatch.setattr(cupy, "backwards", backwards)
    monkeypatch.setattr(arena, "SIMULATOR", True)
    monkeypatch.setattr(arena, "_launch", lambda function, lanes, arguments: function(0, lanes, *arguments))
    torch.manual_seed(0)
    left = {}
    for name, (function, tensors, options) in promises.good_calls().items():
        function(**tensors, **options)
        left |= {(name, key): tensor for key, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    data = cases.segments(9, 65, 18)
    out, sums = cases.poison(9, 65, 18), cases.poison(65, 54)
    kernels.mingru_scan(**data, out=out)
    kernels.mingru_scan_grad(data["hgp"], data["x"], data["states"], data["resets"], data["valid"], out, sums)
    rows, gradient = torch.randn(500, 33), torch.zeros(33)
    kernels.add_rows(rows, gradient)
    kernels.add_rows(rows.bfloat16(), gradient)
    memory = kernels.Arena()
    memory.adopt(torch.nn.Linear(33, 40))
    optimizer = kernels.Muon(memory, together=True)
    memory.allocate()
    memory.flat("gradients").normal_()
    left |= {("muon", "norm"): optimizer.step(0.1), ("muon", "weights"): memory.flat("weights"),
             ("rows", "gradient"): gradient}
    left |= {("scan", key): tensor for key, tensor in {**data, "out": out, "sums": sums}.items()}
    return {key: tensor.clone() for key, tensor in left.items()}, set(cupy.launches)


def test_results_do_not_depend_on_the_order_of_threads(monkeypatch):
    """Bit for bit: twice, and from the last thread of the last block to the first."""
    first, launched = results(monkeypatch, False)
    assert launched == {name for name in kernels.CUDA.signatures if not name.startswith("mingru_scan_") or
                        name == "mingru_scan_grad"}
    for backwards in (False, True):
        for key, tensor in results(monkeypatch, backwards)[0].items():
            torch.testing.assert_close(tensor, first[key], rtol=0, atol=0, equal_nan=True, msg=str(key))


OUTSIDE = """
import numpy, pytest, cuda_on_a_cpu, kernels
cuda_on_a_cpu.install(pytest.MonkeyPatch())
flat, parts, ticket = numpy.zeros(100, 'f4'), numpy.zeros(1), numpy.zeros(1, 'i4')
kernels.CUDA.launch("gradient_norm", 1, 32, 101, flat, parts, ticket, numpy.zeros(1))
"""


@pytest.mark.slow
def test_no_access_is_out_of_bounds():
    """All kernels under the sanitizers of addresses and undefined behaviour, which see an array that is too short."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no address sanitizer")
    environment = os.environ | {
        "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "CUDA_SHIM_FLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"}
    options = {"env": environment, "cwd": Path(__file__).parent.parent, "capture_output": True, "text": True}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/test_cuda_cpp.py", "-k",
               "order or wrong_argument or one_launch"]
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parent.parent}"
    result = subprocess.run([sys.executable, "-c", OUTSIDE], **options)
    assert result.returncode != 0 and "heap-buffer-overflow" in result.stderr
