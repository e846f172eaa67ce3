"""Cells as C, and kernels.cu: compiled by NVRTC for three generations of GPUs, run on the CPU behind tests/cuda_shim.h.
What the kernels compute is compared with the references by tests/test_cuda.py.
"""

import ctypes
import functools
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import cuda_on_a_cpu
import gymnasium
import numpy as np
import nvrtc
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis.strategies import booleans, integers, sampled_from
from numba import njit

import arena
import kernels
import models
import optim
from fast import cuda_cpp, fused

pytestmark = [pytest.mark.skipif(arena.SIMULATOR, reason="numba compiles nothing here"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]
GENERATIONS = ("sm_80", "sm_90", "sm_120")
f32 = np.float32


# ---------------------------------------------------------------------------------------------------------------------
# Cells

KINDS = {"f": "float", "i": "int", "u": "u32", "h": "u16", "b": "bool"}
CELLS = {  # what each takes and returns: float, int32, uint32, uint16, bool
    "power_of_two": ("f", "f"), "exp_cell": ("f", "f"), "sigmoid_cell": ("f", "f"), "log_cell": ("f", "f"),
    "half_tanh_cell": ("f", "f"), "tanh_cell": ("f", "f"),
    "exponent_and_mantissa": ("f", "ff"), "cos_turn_cell": ("f", "f"), "uniform_cell": ("u", "f"),
    "philox_cell": ("uuuuuu", "uuuu"), "float_of_bfloat": ("h", "f"), "bfloat_of_float": ("f", "h"),
    "normalise_cell": ("fff", "f"), "advantage_cell": ("ffbbffbfffffffff", "fff"), "mingru_gates_cell": ("fff", "fff"),
    "mingru_cell": ("fffffb", "ff"), "mingru_cell_grad": ("fffffbff", "fffff"), "ppo_cell": ("ffff", "ffff"),
    "value_cell": ("ffff", "ff"), "entropy_cell": ("ff", "f"), "entropy_grad_cell": ("fff", "f"),
    "logit_grad_cell": ("ffbff", "f"), "nesterov_cell": ("fff", "ff"), "squash_cell": ("ff", "ff"),
    "gaussian_cell": ("ffff", "ff"), "gaussian_grad_cell": ("ffffff", "ff"), "gaussian_draw_cell": ("ffuub", "ff"),
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
    kernel.owner.streams.stack.append(cuda_on_a_cpu.STREAM)
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
    assert cells - CELLS.keys() == {"action_words_cell", "choose_cell", "head_max_cell", "objective_cell",
                                    "philox_round", "search_cell", "statistics_cell"}


def unknown_call(x):
    return x + print(x)


def bare_literal(x):
    return x * 0.5


def inner_name(x):
    if x > f32(0):
        y = x
    return y


def nine_numbers(x):
    return x, x, x, x, x, x, x, x, x


@pytest.mark.parametrize("function", [unknown_call, bare_literal, inner_name, nine_numbers],
                         ids=lambda function: function.__name__)
def test_what_c_cannot_say_is_an_error(function):
    with pytest.raises((NotImplementedError, TypeError), match=r"cannot be written in C|becomes double"):
        cuda_cpp.translate([function])


# ---------------------------------------------------------------------------------------------------------------------
# The file

DOUBLES = {"priorities", "advantage_moments", "gradient_norm", "clip", "add_rows", "ppo_loss_discrete",
           "ppo_loss_continuous", "draw", "newton_schulz"}  # kernels that add up in double


@pytest.fixture(scope="module",
                params=[GENERATIONS[0], *(pytest.param(g, marks=pytest.mark.slow) for g in GENERATIONS[1:])])
def compiled(request):
    if nvrtc.library() is None:
        pytest.skip("there is no libnvrtc: pip install -r requirements/test.txt")
    return request.param, nvrtc.compile(kernels.CUDA.source, "kernels.cu", request.param, cuda_cpp.OPTIONS)


def test_every_kernel_compiles_for_every_generation(compiled):
    generation, ptx = compiled
    assert f".target {generation}" in ptx
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\n\}", ptx, flags=re.DOTALL))
    assert entries.keys() == kernels.CUDA.signatures.keys()
    for name, text in entries.items():
        assert ".local" not in text, f"{name}: an array that was meant for registers lies in memory"
        computes = set(re.findall(r"\s(\w+)[\w.]*\.f64", text)) - {"ld", "cvt"}  # observations may be float64
        assert bool(computes) == (name in DOUBLES), f"{name} computes in another precision than it should"


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
        pytest.skip("there is no libnvrtc: pip install -r requirements/test.txt")
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
    monkeypatch.setattr(kernel.owner.streams, "stack", [cuda_on_a_cpu.STREAM])
    kernel((1,), (64,), (np.int64(64),))
    with pytest.raises(AssertionError, match="never meet"):
        kernel((1,), (64,), (np.int64(5),))
    with pytest.raises(AssertionError, match="takes"):
        kernel((1,), (64,), (np.int32(64),))
    with pytest.raises(AssertionError, match="another stream"):
        monkeypatch.setattr(kernel.owner.streams, "stack", [0])
        kernel((1,), (64,), (np.int64(64),))


@pytest.mark.parametrize("T", [1, 7, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scans_with_two_channels_a_thread_are_those_with_one(T, dtype, monkeypatch):
    """Bit for bit. Two are for many channels only, so MANY is lower here."""
    import test_kernels as cases

    def scanned(many):
        cupy = cuda_on_a_cpu.install(monkeypatch)
        monkeypatch.setattr(arena, "SIMULATOR", True)
        monkeypatch.setattr(kernels, "MANY", many)
        monkeypatch.setattr(kernels, "CUDA", cuda_cpp.Module("kernels.cu", vars(kernels)))
        data = cases.segments(T, 5, 6)
        data |= {name: data[name].to(dtype) for name in ("hgp", "x")}
        out, sums = torch.full((T, 5, 6), math.nan, dtype=dtype), cases.poison(5, 18)
        kernels.mingru_scan(**data, out=out)
        result = out.clone()
        kernels.mingru_scan_grad(data["hgp"], data["x"], data["states"], data["resets"], data["valid"], out, sums)
        assert len(cupy.launches) == 2
        return {**data, "out": result, "grad": out, "sums": sums}

    one, two = scanned(1 << 16), scanned(1)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("count, rows, columns", [(1, 1, 1), (2, 3, 70), (3, 33, 40), (2, 64, 100), (2, 70, 131)])
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
    optim.Muon(memory, together=True)._orthogonalise_together(x, y, gram, polynomial)
    assert cupy.launches == ["newton_schulz"]
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The grid size will be reduced")
def test_newton_schulz_takes_fewer_blocks_if_the_gpu_cannot_hold_all(monkeypatch):
    """In a graph, too."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(
        multi_processor_count=100 * properties.multi_processor_count))
    memory = kernels.Arena()
    memory.adopt(torch.nn.Linear(2, 2))
    given = torch.randn(40, 128, 256)
    expected = torch.stack([reference.newton_schulz(matrix.double()) for matrix in given])
    shapes = given.shape, given.shape, (40, 128, 128), (40, 128, 128)
    x, y, gram, polynomial = (torch.zeros(shape, device="cuda") for shape in shapes)
    optimizer, graph = optim.Muon(memory, together=True), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.copy_(given)
        optimizer._orthogonalise_together(x, y, gram, polynomial)
        torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=1e-3)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        optimizer._orthogonalise_together(x, y, gram, polynomial)
        graph.capture_end()
        x.copy_(given)
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# The step of a rollout in one kernel

BOX = gymnasium.spaces.Box(-2, 3, (2,), np.float32)
ONE_SIDED = gymnasium.spaces.Box(np.float32([-2, 7, -np.inf]), np.float32([3, np.inf, np.inf]))
SPACES = {"discrete": gymnasium.spaces.Discrete(3), "masks": gymnasium.spaces.MultiDiscrete([2, 1, 5]),
          "heads": gymnasium.spaces.MultiDiscrete([3, 2]), "continuous": BOX, "squashed": BOX,
          "one-sided": ONE_SIDED}


class Actor:
    """The network's step over an arena, and what it reads and writes; the state lies within that of more agents."""

    def __init__(self, n, inputs, hidden, layers, kind="discrete", precision=torch.float32, normalize=False,
                 dtype=torch.float32, seed=0):
        rng = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        seen = gymnasium.spaces.Box(-9, 9, (inputs,), np.float32)
        self.policy = policy = models.MinGRUPolicy(
            types.SimpleNamespace(single_observation_space=seen, single_action_space=SPACES[kind]), hidden, layers,
            normalize)
        with torch.no_grad():
            policy.decoder.weight.mul_(30)
            for name, parameter in policy.named_parameters():
                if name.endswith("bias") or name.endswith("log_std"):
                    parameter.normal_(std=0.3, generator=rng)
        if normalize:
            policy.normalizer.shift.normal_(generator=rng)
            policy.normalizer.scale.uniform_(0.1, 9.0, generator=rng)
        memory = kernels.Arena()
        memory.adopt(policy)
        self.layers = fused.Layers(policy, memory, "actor", steps=0, rows=n, precision=precision)
        memory.allocate()
        self.layers.bind()
        floating = dtype.is_floating_point
        self.observations = (torch.randn(n, inputs, generator=rng, dtype=dtype) if floating else
                             torch.randint(2 if dtype == torch.bool else 9, (n, inputs), generator=rng).to(dtype))
        self.all_states = torch.randn(layers, n + 5, hidden, generator=rng)
        self.state = self.all_states[:, 2 : n + 2]
        self.flags = [(torch.rand(n, generator=rng) < p).to(torch.uint8) for p in (0.3, 0.8)]
        width, heads = policy.decoder.out_features - 1, policy.decoder.heads
        nan = lambda *shape: torch.full(shape, math.nan)  # noqa: E731
        self.written = {"logprobs": nan(n), "values": nan(n), "actions": nan(n, width), "samples": nan(n, width)}
        self.options = {"seed": 2**40 + 7, "step": torch.tensor([2**34 + 5]), "first_agent": 2**31 - 3}
        if heads:
            self.written |= {"actions": torch.full((n, len(heads)), -1, dtype=torch.int32), "samples": None}
            self.options["heads"] = torch.tensor(heads)
        else:
            self.options["log_std"] = policy.decoder.log_std.data
        if kind == "masks":
            masks = torch.rand(n, width, generator=rng) < 0.6
            masks[:, [0, 2, 4]] = True  # one of each head is allowed
            self.options["masks"] = masks.to(torch.uint8)
        if kind in ("squashed", "one-sided"):
            self.options["squash"] = models.squash_of(models.squash(policy, SPACES[kind]))

    def step(self, drawn=True, commit=True, final=None):
        """(outputs, what was drawn, the state of all agents) of one step from where it began."""
        before = self.all_states.clone()
        written = {name: tensor if tensor is None else tensor.clone() for name, tensor in self.written.items()}
        outputs = self.layers.step(self.observations, self.state, *self.flags, commit=commit, final=final,
                                   drawn={**written, **self.options} if drawn else None)
        after = self.all_states.clone()
        self.all_states.copy_(before)
        return outputs.clone(), written, after

    def expected(self):
        """(outputs, state) in float64, rounded to bfloat16 where the network's precision says so."""
        policy, weights = self.policy, self.layers.products.weights
        half = self.layers.products.precision == torch.bfloat16
        rounded = (lambda x: x.float().bfloat16().double()) if half else lambda x: x
        x = self.observations.double()
        if policy.normalizer is not None:
            x = policy.normalizer(self.observations).double()

        def linear(name, x, weights=weights):
            return x @ weights[f"{name}.weight"].double().t() + weights[f"{name}.bias"].double()

        x, states = rounded(linear("encoder", rounded(x))), []
        for i in range(policy.num_layers):
            hgp = rounded(linear(f"rnn.layers.{i}", x))
            x, s = reference.mingru_layer(x[None], hgp[None], self.state[i].double(), *(f[None] for f in self.flags))
            x = rounded(x[0]) if i + 1 < policy.num_layers else x[0]
            states.append(s[0])
        return linear("decoder", x, self.layers.products.masters), torch.stack(states)


def simulate(monkeypatch):
    cupy = cuda_on_a_cpu.install(monkeypatch)
    monkeypatch.setattr(arena, "SIMULATOR", True)
    monkeypatch.setattr(arena, "_launch", lambda function, lanes, arguments: function(0, lanes, *arguments))
    return cupy


simulated = pytest.fixture(lambda monkeypatch: simulate(monkeypatch), name="simulated")


def check_step(cupy, actor):
    """A step is that of the reference, draws as kernels.sample does, and leaves the rest alone."""
    cupy.launches.clear()
    outputs, written, states = actor.step()
    assert cupy.launches == ["policy_step"]
    expected, state = actor.expected()
    n, half = len(outputs), actor.layers.products.precision == torch.bfloat16
    for found, right in ((outputs, expected), (states[:, 2 : n + 2], state)):
        error = (found.double() - right).abs() / (1 + right.abs().max())
        # Rounded to 8 bits, a number between two of them may go to the other one; most do not.
        assert error.max() < (0.03 if half else 2e-5) and error.median() < (1e-3 if half else 1e-6), error.max()
    for outside in (slice(0, 2), slice(n + 2, None)):
        assert torch.equal(states[:, outside], actor.all_states[:, outside])
    drawn = {name: tensor if tensor is None else tensor.clone() for name, tensor in actor.written.items()}
    kernels.sample(outputs, **drawn, **actor.options)
    for name, tensor in written.items():
        if tensor is not None and (name != "samples" or "squash" in actor.options):
            torch.testing.assert_close(tensor, drawn[name], rtol=2e-6, atol=2e-6)
    outputs_alone, untouched, states = actor.step(drawn=False, commit=False)
    assert torch.equal(outputs_alone, outputs) and torch.equal(states, actor.all_states)
    for name, tensor in untouched.items():
        assert tensor is None or torch.equal(tensor.isnan() | (tensor == -1), torch.ones_like(tensor, dtype=bool)), name


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("n, inputs, hidden, layers, normalize", [
    (1, 1, 1, 1, False), (5, 118, 64, 2, False), (33, 7, 33, 3, True), (70, 12, 32, 4, False), (9, 33, 66, 1, True)])
def test_a_step_in_one_kernel(simulated, kind, precision, n, inputs, hidden, layers, normalize):
    check_step(simulated, Actor(n, inputs, hidden, layers, kind, precision, normalize, seed=n))


@settings(max_examples=20)
@given(n=integers(1, 80), inputs=integers(1, 140), hidden=integers(1, 130), layers=integers(1, 3),
       kind=sampled_from(list(SPACES)), precision=sampled_from([torch.float32, torch.bfloat16]),
       normalize=booleans(), dtype=sampled_from(list(fused.DTYPES)), seed=integers(0, 2**31))
def test_a_step_of_any_shape(n, inputs, hidden, layers, kind, precision, normalize, dtype, seed):
    with pytest.MonkeyPatch.context() as patch:
        cupy = simulate(patch)
        actor = Actor(n, inputs, hidden, layers, kind, precision, normalize, getattr(torch, dtype), seed)
        assume(actor.layers.in_one is not None)
        check_step(cupy, actor)


def test_a_network_that_does_not_fit_takes_its_products_from_cublas(simulated, monkeypatch):
    """By the bytes that it needs and those that a block may have, at every size of a tile."""
    actor = Actor(5, 118, 64, 2)
    assert fused.PolicyStep.size(actor.policy, torch.float32) == 166_096  # Breakout's, in docs/gpu.md
    assert actor.layers.in_one is not None
    expected = actor.step()[0]
    for most in (166_095, 48 << 10):
        monkeypatch.setattr(cuda_on_a_cpu, "LIMIT", most)
        other = Actor(5, 118, 64, 2)
        assert other.layers.in_one is None
        simulated.launches.clear()
        outputs = other.layers.step(other.observations, other.state, *other.flags)
        assert "policy_step" not in simulated.launches
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="for PolicyStep alone"):
        other.layers.step(other.observations, other.state, *other.flags, commit=False)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_is_the_same_whatever_is_side_by_side(simulated, monkeypatch, precision):
    """Any order of threads, any number of blocks, tiles of 8, 16 or 32: the same bits."""
    actor, found = Actor(77, 19, 33, 2, "masks", precision), []
    for processors, backwards in ((3, False), (3, True), (1, False), (1, True), (5, False), (132, True)):
        monkeypatch.setattr(simulated, "backwards", backwards)
        properties = torch.cuda.get_device_properties(None)
        properties.multi_processor_count = processors
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        found.append(actor.step())
    for outputs, written, states in found:
        assert torch.equal(outputs, found[0][0]) and torch.equal(states, found[0][2])
        assert all(tensor is None or torch.equal(tensor, found[0][1][name]) for name, tensor in written.items())


def test_a_step_for_some_agents_leaves_out_tiles_without_any(simulated, monkeypatch):
    """65 agents are tiles of 32, 32 and 1, three on two blocks."""
    monkeypatch.setattr(fused, "TILES", (32,))
    properties = torch.cuda.get_device_properties(None)
    properties.multi_processor_count, properties.shared_memory_per_multiprocessor = 2, 1
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    actor = Actor(65, 5, 8, 2)
    expected = actor.step(drawn=False, commit=False)[0]
    for agent, written in ((None, ()), (3, (0, 2)), (64, (0, 2)), (40, (1,))):
        truncations, terminals = torch.zeros(2, 65, dtype=torch.uint8)
        values = torch.full((65,), math.nan)
        truncations[20] = terminals[20] = 1  # the end, after which nothing follows
        if agent is not None:
            truncations[agent] = 1
        actor.layers.chunk(65).flat_outputs.fill_(math.nan)
        outputs = actor.step(drawn=False, commit=False, final=(truncations, terminals, values))[0]
        cut = truncations > terminals
        assert torch.equal(values[cut], expected[cut, -1]) and not values[~cut].any()
        for tile, rows in enumerate((slice(32), slice(32, 64), slice(64, 65))):
            assert torch.equal(outputs[rows], expected[rows]) if tile in written else outputs[rows].isnan().all()


def test_what_a_step_refuses(simulated):
    actor = Actor(4, 6, 8, 1, "heads")
    actor.observations = actor.observations.bfloat16()
    with pytest.raises(TypeError, match=r"fused\.PolicyStep: observations are torch\.bfloat16"):
        actor.step()
    for name in ("actions", "logprobs", "values"):
        actor = Actor(4, 6, 8, 1, "heads")
        actor.written[name] = actor.written[name][:3]
        with pytest.raises(ValueError, match=name):
            actor.step()
    actor = Actor(4, 6, 8, 1, "heads")
    actor.flags[0] = actor.flags[0].bool()
    with pytest.raises(TypeError, match="resets"):
        actor.step()


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
    rows = torch.randn(500, 33)
    pairs = [(rows, torch.zeros(33)), (rows.bfloat16(), torch.zeros(33)), (torch.randn(9, 300), torch.zeros(300))]
    kernels.add_rows(pairs)
    memory = kernels.Arena()
    memory.adopt(torch.nn.Linear(33, 40))
    optimizer = optim.Muon(memory, together=True)
    memory.allocate()
    memory.flat("gradients").normal_()
    outputs, written, states = Actor(40, 5, 9, 2, "squashed").step()
    left |= {("step", name): tensor for name, tensor in {**written, "outputs": outputs, "states": states}.items()}
    left |= {("muon", "norm"): optimizer.step(0.1), ("muon", "weights"): memory.flat("weights"),
             **{("rows", i): gradient for i, (_, gradient) in enumerate(pairs)}}
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
               "order or wrong_argument or one_launch or (one_kernel and heads) or side_by_side"]
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parent.parent}"
    result = subprocess.run([sys.executable, "-c", OUTSIDE], **options)
    assert result.returncode != 0 and "heap-buffer-overflow" in result.stderr
