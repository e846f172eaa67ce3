"""Cells as C, and kernels.cu: compiled by NVRTC for three generations of GPUs, run on the CPU behind
tests/cuda_shim.h. tests/test_cuda.py compares the kernels' results with the references.
"""

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
import kernel_cases as cases
import numpy as np
import nvrtc
import pytest
import reference
import torch
from hypothesis import assume, example, given, settings
from hypothesis.strategies import booleans, integers, sampled_from
from kernel_cases import poison
from numba import njit
from test_devices import install, on_a_cpu, skip_without_gpu

import arena
import kernels
import models
import optim
from arena import Arena
from bench import bench_kernels
from fast import cuda_cpp, fused, rollout

pytestmark = [pytest.mark.skipif(arena.SIMULATOR, reason="numba compiles nothing here"),
              pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]
GENERATIONS = ("sm_80", "sm_90", "sm_120")
f32 = np.float32


@pytest.fixture
def simulated(monkeypatch):
    """GPUs' kernels on CPU tensors: CUDA C++ behind the shim, numba's drivers as they are."""
    install(monkeypatch, on_a_cpu)
    return sys.modules["cupy"]


# -- Cells

KINDS = {"f": ("float", f32), "i": ("int", np.int32), "u": ("u32", np.uint32),
         "h": ("u16", np.uint16), "b": ("bool", np.bool_)}


def probe(name):
    """extern "C" void probe_NAME(n, inputs..., outputs...)."""
    inputs, outputs = cases.CELLS[name]
    arrays = [f"const {KINDS[kind][0]} *in{i}" for i, kind in enumerate(inputs)]
    arrays += [f"{KINDS[kind][0]} *out{i}" for i, kind in enumerate(outputs)]
    call = f"{name}({', '.join(f'in{i}[k]' for i in range(len(inputs)))})"
    body = f"out0[k] = {call};"
    if len(outputs) > 1:
        results = ", ".join(f"r{i}" for i in range(len(outputs)))
        copies = " ".join(f"out{i}[k] = r{i};" for i in range(len(outputs)))
        body = f"auto [{results}] = {call}; {copies}"
    return (f'extern "C" __global__ void probe_{name}(i64 n, {", ".join(arrays)}) {{\n'
            f"    for (i64 k = 0; k < n; k++) {{ {body} }}\n}}\n")


def modules():
    return kernels.CUDA, *(rollout.module("policy_step", precision, tile)
                           for precision in (torch.float32, torch.bfloat16) for tile in (16, 32))


@functools.cache
def probes():
    cells = cuda_cpp.translate([vars(kernels)[name] for name in cases.CELLS])
    source = f"{cuda_cpp.PRELUDE}{cells}{''.join(map(probe, cases.CELLS))}"
    return cuda_on_a_cpu.build(source, (cuda_on_a_cpu.APART,))


def numbers(rng, kind, n):
    if kind != "f":
        most = {"h": 2**16, "b": 2}.get(kind, 2**31)
        return rng.integers(0, most, n, dtype=np.uint32).astype(KINDS[kind][1])
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-12, 7, n))).astype(f32)
    special = f32([0.0, -0.0, 1.0, 0.5, -1.0, 1e30, -1e30, np.inf, -np.inf, np.nan, 88.5, -87.5,
                   16.1, 1e-38])
    return np.concatenate([special, x])[:n][rng.permutation(n)]


@pytest.mark.parametrize("name", cases.CELLS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cell_in_c_is_the_cell_in_python_bit_for_bit(name):
    kinds, n = cases.CELLS[name], 20_000
    rng = np.random.default_rng(len(name))
    inputs = [numbers(rng, kind, n) for kind in kinds[0]]
    if name in ("log_cell", "exponent_and_mantissa"):  # normal and above 0
        inputs = [np.abs(inputs[0]) + f32(1e-30)]
        inputs = [np.where(np.isfinite(inputs[0]), inputs[0], f32(2))]
    if name == "power_of_two":
        inputs = [rng.integers(-80, 80, n).astype(f32) + f32(12582912.0)]
    if name == "cos_turn_cell":
        inputs = [rng.random(n, dtype=f32)]
    outputs, expected = ([np.zeros(n, KINDS[kind][1]) for kind in kinds[1]] for _ in range(2))
    kernel = cuda_on_a_cpu.Kernel(probes(), f"probe_{name}", cuda_on_a_cpu.cupy())
    kernel.owner.streams.stack.append(cuda_on_a_cpu.STREAM)
    addresses = [np.uint64(array.ctypes.data) for array in inputs + outputs]
    kernel((1,), (1,), (np.int64(n), *addresses))
    njit(cases.cell_loop(name), error_model="numpy")(*inputs, *expected)
    for actual, right in zip(outputs, expected, strict=True):
        assert np.array_equal(actual, right, equal_nan=actual.dtype == f32), name
        assert not (actual == 0).all()


def test_no_cell_of_the_kernels_is_left_out():
    """Those left out take arrays or settings: tests/test_cuda.py compares them within their kernels."""
    cells = {name for module in modules() for name in
             re.findall(r"CELL auto (\w+)\(", module.source.removeprefix(cuda_cpp.PRELUDE))}
    assert cells - cases.CELLS.keys() == {
        "action_words_cell", "choose_cell", "gaussian_grad_cell", "head_max_cell", "logit_grad_cell",
        "objective_cell", "philox_round", "prefetch", "search_cell", "statistics_cell"}


def bare_literal(x):
    return x * 0.5


def test_a_number_that_would_make_a_cell_double_is_an_error():
    with pytest.raises(TypeError):
        cuda_cpp.translate([bare_literal])


# -- The file

DOUBLES = {"priorities", "masked_moments", "gradient_norm", "clip", "add_bias_gradients",
           "ppo_loss_discrete", "ppo_loss_continuous", "draw_segments", "newton_schulz"}  # add up in double


@nvrtc.needed
@pytest.mark.parametrize("generation", [
    GENERATIONS[0], *(pytest.param(g, marks=pytest.mark.slow) for g in GENERATIONS[1:])])
def test_every_kernel_compiles_for_every_generation(generation):
    """In the precision that it should have, its arrays in registers; each parameter has the size
    that Python hands over."""
    for module in modules():
        ptx, _ = nvrtc.compile(module.source, module.path.name, generation, module.options)
        assert f".target {generation}" in ptx
        entries = re.findall(r"\.entry (\w+)\((.*?)\)(.*?)\n\}", ptx, flags=re.DOTALL)
        assert {name for name, *_ in entries} == module.signatures.keys()
        for name, parameters, text in entries:
            assert ".local" not in text, f"{name}: an array that was meant for registers is in memory"
            # observations may be float64
            operations = set(re.findall(r"\s(\w+)[\w.]*\.f64", text)) - {"ld", "cvt"}
            assert bool(operations) == (name in DOUBLES), f"{name} computes in another precision"
            sizes = [int(kind[1:]) // 8 for kind in re.findall(r"\.param \.(\w+)", parameters)]
            assert sizes == [8 if is_array else dtype.itemsize
                             for dtype, is_array, _ in module.signatures[name]], name


@nvrtc.needed
@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_stays_in_registers(generation):
    for module in modules():
        options = (*module.options, "--ptxas-options=-v")
        _, log = nvrtc.compile(module.source, module.path.name, generation, options, assembles=True)
        spills, used = (re.findall(pattern, log)
                        for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers"))
        assert set(spills) == {"0"} and len(used) == len(module.signatures), log


def test_a_wrong_argument_is_refused_before_the_launch(simulated):
    good = [1, 1, 1, 2, *(np.zeros(6, f32) for _ in range(3)),
            *(np.ones(1, np.uint8) for _ in range(2)), np.zeros(1, np.int64), 0, np.zeros(2, f32),
            False, np.zeros(2, f32)]
    kernels.CUDA.launch("mingru_scan", 1, 64, *good)
    for wrong, match in ((good[:-1], "mingru_scan"), ([*good[:6], np.zeros(6), *good[7:]], "states"),
                         ([*good[:7], 5, *good[8:]], "resets")):
        with pytest.raises(TypeError, match=match):
            kernels.CUDA.launch("mingru_scan", 1, 64, *wrong)
    assert simulated.launches == ["mingru_scan"]


@pytest.mark.parametrize("T", [1, 7, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scans_with_two_channels_a_thread_are_those_with_one(T, dtype, simulated, monkeypatch):
    """Bit for bit. Two are for many channels only, so MIN_CHANNELS_FOR_PAIRS is lower here."""
    results = []
    for many in (1 << 16, 1):
        monkeypatch.setattr(kernels, "MIN_CHANNELS_FOR_PAIRS", many)
        monkeypatch.setattr(kernels, "CUDA", cuda_cpp.Module("kernels.cu", vars(kernels)))
        options = {"rounded": True, "dtype": dtype}
        scan = cases.mingru_scan(T, 5, 6, **options).run()
        results.append(scan | cases.mingru_scan_grad(T, 5, 6, **options).run())
    assert len(simulated.launches) == 6
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The grid size will be reduced")
def test_newton_schulz_takes_fewer_blocks_if_the_gpu_cannot_hold_all(monkeypatch):
    """In a graph, too."""
    skip_without_gpu()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(
        multi_processor_count=100 * processors))
    matrices, memory = torch.randn(40, 128, 256), Arena()
    expected = torch.stack([reference.newton_schulz(matrix.double()) for matrix in matrices])
    memory.adopt(torch.nn.Linear(2, 2))
    x, y = matrices.cuda(), torch.zeros(matrices.shape, device="cuda")
    gram = torch.full((40, 128, 128), torch.nan, device="cuda")
    optimizer = optim.Muon(memory, batched=True)

    def call():
        optimizer._orthogonalise_batched(x, y, gram)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
        torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=1e-3)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        call()
        graph.capture_end()
        x.copy_(matrices)
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=1e-3)


# -- The step of a rollout in one kernel

BOX = gymnasium.spaces.Box(-2, 3, (2,), np.float32)
ONE_SIDED = gymnasium.spaces.Box(np.float32([-2, 7, -np.inf]), np.float32([3, np.inf, np.inf]))
SPACES = {"discrete": gymnasium.spaces.Discrete(3), "continuous": BOX, "squashed": BOX,
          "masks": gymnasium.spaces.MultiDiscrete([2, 1, 5]), "one-sided": ONE_SIDED,
          "heads": gymnasium.spaces.MultiDiscrete([3, 2])}


class Actor:
    """The network's step over an arena, and what it reads and writes; the state is a part of that
    of more agents."""

    def __init__(self, n, inputs, hidden, layers, kind="discrete", precision=torch.float32,
                 normalize=False, dtype=torch.float32, seed=0):
        rng = cases.generator(seed)
        torch.manual_seed(seed)
        box = gymnasium.spaces.Box(-9, 9, (inputs,), np.float32)
        spaces = {"single_observation_space": box, "single_action_space": SPACES[kind]}
        env = types.SimpleNamespace(**spaces)
        self.policy = policy = models.MinGRUPolicy(env, hidden, layers, normalize)
        with torch.no_grad():
            policy.decoder.weight.mul_(30)
            for name, parameter in policy.named_parameters():
                if name.endswith(("bias", "log_std")):
                    parameter.normal_(std=0.3, generator=rng)
        if normalize:
            policy.normalizer.shift.normal_(generator=rng)
            policy.normalizer.scale.uniform_(0.1, 9.0, generator=rng)
        memory = Arena()
        memory.adopt(policy)
        self.layers = fused.Layers(policy, memory, "actor", steps=0, rows=n, precision=precision)
        memory.allocate()
        self.layers.bind()
        if dtype.is_floating_point:
            self.observations = torch.randn(n, inputs, generator=rng, dtype=dtype)
        else:
            most = 2 if dtype == torch.bool else 9
            self.observations = torch.randint(most, (n, inputs), generator=rng).to(dtype)
        self.all_states = torch.randn(layers, n + 5, hidden, generator=rng)
        self.state = self.all_states[:, 2 : n + 2]
        self.flags = [cases.flags(rng, p, n) for p in (0.3, 0.8)]
        width, heads = policy.decoder.out_features - 1, policy.decoder.heads
        self.written = {"logprobs": poison(n), "values": poison(n), "actions": poison(n, width),
                        "samples": poison(n, width)}
        self.options = {"seed": 2**40 + 7, "step": torch.tensor([2**34 + 5]), "first_agent": 2**31 - 3}
        if heads:
            actions = poison(n, len(heads), dtype=torch.int32)
            self.written |= {"actions": actions, "samples": None}
            self.options["heads"] = torch.tensor(heads)
        else:
            self.options["log_std"] = policy.decoder.log_std.data
        if kind == "masks":
            self.options["masks"] = cases.some_masks(rng, n, heads)
        if kind in ("squashed", "one-sided"):
            self.options["squash"] = models.squash_of(models.squash(policy, SPACES[kind]))

    def fresh(self):
        return {name: None if tensor is None else tensor.clone()
                for name, tensor in self.written.items()}

    def step(self, drawn=True, commit=True, final=None):
        """(outputs, what was drawn, the state of all agents) of one step from where it began."""
        before, written = self.all_states.clone(), self.fresh()
        outputs = self.layers.step(self.observations, self.state, *self.flags, commit=commit,
                                   final=final, drawn={**written, **self.options} if drawn else None)
        after = self.all_states.clone()
        self.all_states.copy_(before)
        return outputs.clone(), written, after

    def by_products(self):
        """(outputs, state) of the step without PolicyStep."""
        before, layers = self.all_states.clone(), self.layers
        kernel, layers.step_kernel = layers.step_kernel, None
        outputs = layers.step(self.observations, self.state, *self.flags).clone()
        layers.step_kernel, state = kernel, self.state.clone()
        self.all_states.copy_(before)
        return outputs, state


def check_step(cupy, actor):
    """A step is that of products, draws as kernels.sample does, and writes nothing else."""
    cupy.launches.clear()
    outputs, written, states = actor.step()
    assert cupy.launches == ["policy_step"]
    n, half = len(outputs), actor.layers.precision == torch.bfloat16
    for actual, right in zip((outputs, states[:, 2 : n + 2]), actor.by_products(), strict=True):
        error = (actual - right).abs() / (1 + right.abs().max())
        # Rounded to 8 bits, a number between two of them may go to the other one; most do not.
        assert error.max() < (0.03 if half else 2e-5)
        assert error.median() < (1e-3 if half else 1e-6)
    for outside in (slice(0, 2), slice(n + 2, None)):
        assert torch.equal(states[:, outside], actor.all_states[:, outside])
    drawn = actor.fresh()
    kernels.sample(outputs, **drawn, **actor.options)
    for name, tensor in written.items():
        if tensor is not None and (name != "samples" or "squash" in actor.options):
            torch.testing.assert_close(tensor, drawn[name], rtol=2e-6, atol=2e-6)
    alone, untouched, states = actor.step(drawn=False, commit=False)
    assert torch.equal(alone, outputs) and torch.equal(states, actor.all_states)
    for name, tensor in actor.written.items():
        assert tensor is None or torch.equal(cases.bits(untouched[name]), cases.bits(tensor)), name


def test_the_benchmark_of_the_policys_step(simulated):
    for _, case in bench_kernels.policy_step_cases():
        case.prepare()
        with pytest.raises(AssertionError):
            case.check()
        case.run()
        case.check()
    assert simulated.launches[-1] == "policy_step"


@settings(max_examples=30)
@given(n=integers(1, 80), inputs=integers(1, 140), hidden=integers(1, 130), layers=integers(1, 4),
       kind=sampled_from(list(SPACES)), precision=sampled_from([torch.float32, torch.bfloat16]),
       normalize=booleans(), dtype=sampled_from(list(rollout.DTYPES)), seed=integers(0, 2**31))
@example(n=1, inputs=1, hidden=1, layers=1, kind="masks", precision=torch.bfloat16, normalize=False,
         dtype="float32", seed=0)
@example(n=5, inputs=118, hidden=64, layers=2, kind="squashed", precision=torch.float32,
         normalize=True, dtype="float32", seed=0)
def test_a_step_of_any_shape(dtype, **options):
    with pytest.MonkeyPatch.context() as patch:
        install(patch, on_a_cpu)
        actor = Actor(**options, dtype=getattr(torch, dtype))
        assume(actor.layers.step_kernel is not None)
        check_step(sys.modules["cupy"], actor)


def test_a_network_that_does_not_fit_takes_its_products_from_cublas(simulated, monkeypatch):
    actor = Actor(5, 118, 64, 2)
    sizes = [rollout.PolicyStep.size(actor.policy, torch.float32, rows) for rows in rollout.TILES]
    assert sizes == [156_880, 157_008, 169_040]  # Breakout's, in docs/gpu.md
    assert actor.layers.step_kernel.grid(9000, None)[0] == 32
    monkeypatch.setattr(cuda_on_a_cpu, "LIMIT", 169_039)
    assert actor.layers.step_kernel.grid(9000, None)[0] == 16  # the largest tile that fits
    monkeypatch.setattr(cuda_on_a_cpu, "LIMIT", 156_879)
    actor.layers.bind()
    assert actor.layers.step_kernel is None
    actor.layers.step(actor.observations, actor.state, *actor.flags)
    assert "policy_step" not in simulated.launches
    with pytest.raises(AssertionError, match="PolicyStep"):
        actor.step(drawn=False, commit=False)


def on_processors(monkeypatch, count, **others):
    properties = torch.cuda.get_device_properties(None)
    vars(properties).update(multi_processor_count=count, **others)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_step_is_the_same_whatever_is_side_by_side(simulated, monkeypatch, precision):
    """Any order of threads, any number of blocks, tiles of 8, 16 or 32: the same bits."""
    actor, results = Actor(77, 19, 33, 2, "masks", precision), []
    for processors, backwards in ((3, False), (3, True), (1, True), (5, False), (132, True)):
        monkeypatch.setattr(simulated, "backwards", backwards)
        on_processors(monkeypatch, processors)
        results.append(actor.step())
    for outputs, written, states in results:
        assert torch.equal(outputs, results[0][0]) and torch.equal(states, results[0][2])
        assert all(tensor is None or torch.equal(tensor, results[0][1][name])
                   for name, tensor in written.items())


def test_a_step_for_some_agents_leaves_out_tiles_without_any(simulated, monkeypatch):
    """65 agents are tiles of 32, 32 and 1, three on two blocks."""
    monkeypatch.setattr(rollout, "TILES", (32,))
    on_processors(monkeypatch, 2, shared_memory_per_multiprocessor=1)
    actor = Actor(65, 5, 8, 2)
    expected = actor.step(drawn=False, commit=False)[0]
    for agent, written in ((None, ()), (3, (0, 2)), (64, (0, 2)), (40, (1,))):
        truncations, terminals = torch.zeros(2, 65, dtype=torch.uint8)
        truncations[20] = terminals[20] = 1  # the end, after which nothing follows
        if agent is not None:
            truncations[agent] = 1
        actor.layers.chunk(65).flat_outputs.fill_(math.nan)
        values = poison(65)
        outputs, *_ = actor.step(drawn=False, commit=False, final=(truncations, terminals, values))
        cut = truncations > terminals
        assert torch.equal(values[cut], expected[cut, -1]) and not values[~cut].any()
        for tile, rows in enumerate((slice(32), slice(32, 64), slice(64, 65))):
            if tile in written:
                assert torch.equal(outputs[rows], expected[rows])
            else:
                assert outputs[rows].isnan().all()


@pytest.mark.parametrize("error, name, change", [
    (TypeError, "observations", {"observations": torch.zeros(4, 6, dtype=torch.bfloat16)}),
    (TypeError, "resets", {"flags": torch.zeros(2, 4, dtype=torch.bool)}),
    (ValueError, "actions", {"written": {"actions": torch.zeros(3, 2, dtype=torch.int32)}})])
def test_what_a_step_refuses(error, name, change, simulated):
    actor = Actor(4, 6, 8, 1, "heads")
    change = dict(change)
    actor.written |= change.pop("written", {})
    vars(actor).update(change)
    with pytest.raises(error, match=name):
        actor.step()


# -- Any order of threads and blocks


def results(cupy, monkeypatch, backwards):
    """(what small calls and larger ones leave, the kernels that ran)."""
    monkeypatch.setattr(cupy, "backwards", backwards)
    cupy.launches.clear()
    torch.manual_seed(0)
    calls = {name: make() for name, make in cases.SMALL.items()}
    calls |= {"scan": cases.mingru_scan(9, 65, 18), "grad": cases.mingru_scan_grad(9, 65, 18)}
    left = {(name, key): tensor for name, call in calls.items() for key, tensor in call.run().items()}
    rows = torch.randn(500, 33)
    pairs = [(rows, torch.zeros(33)), (rows.bfloat16(), torch.zeros(33)),
             (torch.randn(9, 300), torch.zeros(300))]
    kernels.add_bias_gradients(pairs)
    left |= {("rows", i): gradient for i, (_, gradient) in enumerate(pairs)}
    memory = Arena()
    memory.adopt(torch.nn.Linear(33, 40))
    optimizer = optim.Muon(memory, batched=True)
    memory.allocate()
    memory.flat("gradients").normal_()
    left |= {"norm": optimizer.step(torch.tensor(0.1), torch.zeros(())), "weights": memory.flat("weights")}
    outputs, written, states = Actor(40, 5, 9, 2, "squashed").step()
    left |= {**written, "outputs": outputs, "states": states}
    return {key: tensor.clone() for key, tensor in left.items()}, set(cupy.launches)


def test_results_do_not_depend_on_the_order_of_threads(simulated, monkeypatch):
    """Bit for bit: twice, and from the last thread of the last block to the first."""
    first, launched = results(simulated, monkeypatch, False)
    assert launched == {name for module in modules() for name in module.signatures
                        if not name.startswith("mingru_scan_") or name == "mingru_scan_grad"}
    for backwards in (False, True):
        for key, tensor in results(simulated, monkeypatch, backwards)[0].items():
            torch.testing.assert_close(tensor, first[key], rtol=0, atol=0, equal_nan=True,
                                       msg=str(key))


@pytest.mark.slow
def test_no_access_is_out_of_bounds():
    """Under the sanitizers of addresses and undefined behaviour."""
    command = ["g++", "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no address sanitizer")
    environment = os.environ | {
        "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "CUDA_SHIM_FLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"}
    options = {"env": environment, "cwd": Path(__file__).parent.parent, "capture_output": True, "text": True}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
               "tests/test_cuda_cpp.py", "-k",
               "order or wrong_argument or any_shape or side_by_side"]
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
