"""Measure nanoseconds per element of every kernel at the trainer's shapes.

    python bench/bench_kernels.py [--threads 1] [--repeats 7] [--only mingru] [--device cuda]

The shapes are those of Breakout: 4,096 agents, horizon 64, hidden 64, minibatches of 1,024 segments
in chunks of 16. The calls are those of tests/kernel_cases.py. A kernel is first compared with its
float64 reference; a wrong one is not timed, and the exit status is then 1. GB/s counts every array
that the kernel reads or writes once. Its share of the copy bandwidth (a copy of 256 MB, read plus
write) exceeds 100% where the arrays are in the cache, as chunks are meant to be. Everything is
interleaved in one run; figures are medians of the repeats. On a shared machine only ratios are
meaningful, so a copy and a matrix product (1,024 x 64 by 64 x 192, the layer's) of the same run are
printed as well.

On a GPU a chunk is the whole minibatch, as in training, and the time is that of replaying a graph
of 20 calls, without launches from Python; kernels that work in place continue with their results.
There each kernel is printed with a copy that reads and writes as many bytes, because a launch takes
longer than a small kernel's bytes, and both use the cache.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium
import numba
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))
import kernel_cases
import reference

import kernels
import models
import optim
from arena import Arena, threads
from fast import fused

# horizon, agents, hidden, minibatch, chunk, actions, observation
T, N, H, B, M, A, D = 64, 4096, 64, 1024, 16, 3, 118
MATRICES = [(H, D), (H,), (3 * H, H), (3 * H, H), (A + 1, H), (A + 1,)]  # of Breakout's network
START = 32  # of the chunk
SECONDS = 0.02  # of one kernel in one repeat, at least
CALLS = 20  # in a graph


class Case(NamedTuple):
    run: callable  # one call of the kernel
    check: callable  # raises AssertionError if what the call just left is wrong
    elements: int
    moved: int  # bytes read and written
    prepare: callable = None  # puts back what the call overwrites; not timed


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=kernel_cases.generator(seed), device="cpu")


def kernel_case(call, elements, segments=N):
    """Return the Case of a kernel_cases.Call; segments: of N, whose columns the kernel reads."""
    device, kernel = torch.get_default_device(), getattr(kernels, call.kernel)
    arguments = {name: value.to(device) if isinstance(value, torch.Tensor) and name != "heads"
                 else value for name, value in call.arguments.items()}
    changed = {name: arguments[name] for name in call.written}
    before = {name: tensor.clone() for name, tensor in changed.items()}
    results = [None]

    def run():
        results[0] = kernel(**arguments)

    def check():
        with torch.device("cpu"):
            for name, actual, expected, tolerance in call.compare(
                    **call.outputs(arguments, results[0])):
                kernel_cases.close(actual, expected, tolerance, name)

    def prepare():
        for name, tensor in before.items():
            changed[name].copy_(tensor)

    moved = sum(size(tensor) * segments // N if tensor.shape[1:2] == (N,) else size(tensor)
                for tensor in arguments.values() if isinstance(tensor, torch.Tensor))
    return Case(run, check, elements, moved, prepare)


def kernel_calls():
    """Yield (name, call, elements, segments of N that it reads)."""
    drawn = torch.randint(N, (B,), generator=kernel_cases.generator(), device="cpu").sort().values
    unique = len(drawn.unique())
    counter, beta = torch.tensor([5, 2]), torch.tensor([0.8])
    scan = {"columns": N, "drawn": True, "start": START, "resets": 0.02, "live": 0.99}
    loss = {"N": N, "live": 0.99}
    yield "sample, discrete", kernel_cases.sample(N, heads=[A], step=torch.tensor([3])), N, N
    yield "sample, continuous", kernel_cases.sample(N, dims=A, step=torch.tensor([3])), N, N
    yield "advantage, all", kernel_cases.advantage(T, N, live=0.99), T * N, N
    yield ("advantage, drawn", kernel_cases.advantage(T, N, index=drawn.tolist(), live=0.99),
           T * unique, unique)
    yield "priorities", kernel_cases.priorities(T, N, alpha=0.1), T * N, N
    yield ("draw_segments", kernel_cases.draw_segments(N, B, counter=counter, beta=beta), B, N)
    yield "masked_moments", kernel_cases.masked_moments(T, N, B), T * B, B
    yield ("gather, chunk", kernel_cases.gather(tail=(D,), T=T, N=N, M=M, start=START), T * M * D,
           M)
    yield "write_back", kernel_cases.write_back(T, N, B), T * B, B
    yield "mingru_step", kernel_cases.mingru_step(N, H), N * H, N
    yield "mingru_scan, chunk", kernel_cases.mingru_scan(T, M, H, **scan), T * M * H, M
    yield "mingru_scan_grad, chunk", kernel_cases.mingru_scan_grad(T, M, H, **scan), T * M * H, M
    yield "ppo_loss, discrete, chunk", kernel_cases.ppo_loss(T, M, heads=[A], **loss), T * M, M
    yield "ppo_loss, continuous, chunk", kernel_cases.ppo_loss(T, M, dims=A, **loss), T * M, M
    count = sum(map(np.prod, MATRICES))
    yield "gradient_norm", kernel_cases.gradient_norm(int(count)), int(count), N


def policy_step_cases():
    """Yield the default network's step with the draw, by products and in one kernel (GPU)."""
    spaces = gymnasium.spaces
    env = SimpleNamespace(single_observation_space=spaces.Box(-9, 9, (D,), np.float32),
                          single_action_space=spaces.Discrete(A))
    policy, arena = models.MinGRUPolicy(env, H, 2), Arena()
    arena.adopt(policy)
    layers = fused.Layers(policy, arena, "actor", steps=0, rows=N)
    device = torch.get_default_device()
    arena.allocate(device)
    layers.bind()
    observations, before = normal(N, D).to(device), normal(2, N, H, seed=1).to(device)
    resets, valid = torch.zeros(N, dtype=torch.uint8), torch.ones(N, dtype=torch.uint8)
    state, heads = before.clone(), torch.tensor([A], device="cpu")
    drawn = {"actions": torch.zeros(N, 1, dtype=torch.int32), "logprobs": torch.zeros(N),
             "values": torch.zeros(N)}
    draw = {**drawn, "seed": 1, "step": torch.tensor([3]), "heads": heads}
    with torch.no_grad():
        logits, value = policy.forward_eval(observations, {
            policy.states[0]: before.clone(), "resets": resets, "valid": valid})

    def by_products():
        layers.step_kernel = None
        kernels.sample(layers.step(observations, state, resets, valid), **draw)

    def in_one_kernel():
        layers.step_kernel = kernel
        layers.step(observations, state, resets, valid, drawn=draw)

    def check():
        logprobs, _ = reference.discrete_logprob_entropy(logits.double(), drawn["actions"], [A])
        # a GPU's products may round to TF32
        kernel_cases.close(drawn["values"], value.view(N), 1e-3, "values")
        kernel_cases.close(drawn["logprobs"], logprobs, 1e-3, "logprobs")

    def prepare():
        state.copy_(before)
        drawn["values"].fill_(torch.nan)

    kernel, moved = layers.step_kernel, size(observations, state, state, *drawn.values())
    yield "policy step, by products", Case(by_products, check, N, moved, prepare)
    yield "policy step, in one kernel", Case(in_one_kernel, check, N, moved, prepare)


def muon_case():
    module, arena = torch.nn.Module(), Arena()
    module.tensors = torch.nn.ParameterList([normal(*shape) for shape in MATRICES])
    arena.adopt(module)
    device = torch.get_default_device()
    optimizer = optim.Muon(arena, batched=device.type == "cuda")
    arena.allocate(device)
    for parameter in module.parameters():
        parameter.grad.copy_(0.01 * normal(*parameter.shape, seed=1))
    flat = [arena.flat(group) for group in ("weights", "gradients", "momentum")]
    before = [group.clone() for group in flat]
    weights, gradients = ([tensor.detach().double() for tensor in tensors] for tensors in (
        module.parameters(), [parameter.grad for parameter in module.parameters()]))
    rate, found_inf = torch.tensor(0.015), torch.tensor(0.0)

    def check():
        expected, _ = reference.muon_step(
            weights, gradients, [torch.zeros_like(g) for g in gradients], 0.015, optimizer.momentum,
            0.0, torch.tensor(optimizer.max_grad_norm).double())
        for parameter, right in zip(module.parameters(), expected, strict=True):
            kernel_cases.close(parameter.detach(), right, 1e-5, "weights")

    def prepare():
        for group, old in zip(flat, before, strict=True):
            group.copy_(old)

    count = flat[0].numel()
    return Case(lambda: optimizer.step(rate, found_inf), check, count, 7 * 4 * count, prepare)


def cases():
    """Yield (name, Case) of every kernel."""
    with torch.device("cpu"):
        calls = list(kernel_calls())
    for name, call, elements, segments in calls:
        yield name, kernel_case(call, elements, segments)
    if torch.get_default_device().type == "cuda":
        yield from policy_step_cases()
    yield "Muon.step", muon_case()


def copy_of(moved):
    """Return a plain copy that reads and writes `moved` bytes."""
    source, target = (torch.zeros(max(1, moved // 2), dtype=torch.uint8) for _ in range(2))
    return Case(lambda: target.copy_(source), lambda: None, source.numel(), 2 * size(source))


def baselines():
    device, product = torch.get_default_device(), torch.empty(T * M, 3 * H)
    left, right = normal(T * M, H).to(device), normal(3 * H, H, seed=1).to(device)
    matmul = Case(lambda: torch.matmul(left, right.t(), out=product), lambda: None,
                  2 * T * M * H * 3 * H, size(left, right, product))
    return {"copy": copy_of(2**28), "matrix product": matmul}


_graphs = {}


def seconds_a_call(case):
    """Return the mean over as many calls as fill SECONDS.

    Each is timed separately, so that `prepare` is not included.
    """
    total, calls = 0.0, 0
    if torch.get_default_device().type == "cuda":
        if id(case) not in _graphs:
            _graphs[id(case)] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(_graphs[id(case)]):
                for _ in range(CALLS):
                    case.run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while total < SECONDS:
            if case.prepare:
                case.prepare()
            begin.record()
            _graphs[id(case)].replay()
            end.record()
            end.synchronize()
            total, calls = total + begin.elapsed_time(end) / 1000, calls + CALLS
        return total / calls
    while total < SECONDS or calls < 2:
        if case.prepare:
            case.prepare()
        begin = time.perf_counter()
        case.run()
        total += time.perf_counter() - begin
        calls += 1
    return total / calls


def measure(args):
    """Return (cases, reasons of wrong ones, seconds per call of each repeat)."""
    timed, wrong = baselines(), {}
    for name, case in cases():
        if args.only not in name:
            continue
        try:
            if case.prepare:
                case.prepare()
            case.run()
            case.check()
        except Exception as error:
            # that of a compiler or a driver too: the others are timed all the same
            wrong[name] = f"{type(error).__name__}: {error}"
        else:
            timed[name] = case
            if torch.get_default_device().type == "cuda":
                timed[f"copy beside {name}"] = copy_of(case.moved)
    samples = {name: [] for name in timed}
    for case in timed.values():
        seconds_a_call(case)
    for _ in range(args.repeats):
        for name, case in timed.items():
            samples[name].append(seconds_a_call(case))
    return timed, wrong, samples


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1,
                        help="of kernels and torch (an actor has 1)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved; the median counts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error("--threads: at least 1")
    if args.repeats < 1:
        parser.error("--repeats: at least 1")
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.set_default_device("cuda")
        global M, START
        M, START = B, 0

    with threads(args.threads):
        timed, wrong, samples = measure(args)
    median = {name: statistics.median(values) for name, values in samples.items()}

    bandwidth = timed["copy"].moved / median["copy"] / 1e9
    gflops = timed["matrix product"].elements / median["matrix product"] / 1e9
    where = f"{args.threads} thread(s)" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, copy {bandwidth:.1f} GB/s, matrix product {gflops:.0f} GFLOP/s\n")
    print(f"{'kernel':28} {'elements':>9} {'µs a call':>10} {'ns/element':>11} {'GB/s':>7} "
          f"{'of copy':>8}"
          + (" of its copy" if args.device == "cuda" else ""))
    rows = {}
    for name, case in timed.items():
        if name in ("copy", "matrix product") or name.startswith("copy beside "):
            continue
        seconds = median[name]
        speed = case.moved / seconds / 1e9
        rows[name] = {"elements": case.elements, "microseconds": round(seconds * 1e6, 2),
                      "ns_per_element": round(seconds / case.elements * 1e9, 4),
                      "gb_per_second": round(speed, 3),
                      "share_of_copy": round(speed / bandwidth, 4)}
        beside = median.get(f"copy beside {name}")
        if beside is not None:
            rows[name]["share_of_copy_of_its_size"] = round(beside / seconds, 4)
        print(f"{name:28} {case.elements:9,} {seconds * 1e6:10.1f} "
              f"{seconds / case.elements * 1e9:11.3f} {speed:7.2f} "
              f"{speed / bandwidth:8.1%}" + (f" {beside / seconds:12.1%}" if beside else ""))
    for name, reason in wrong.items():
        print(f"{name:28} WRONG, not timed: {reason}")
    print(json.dumps({"benchmark": "kernels", "device": where, "threads": args.threads,
                      "repeats": args.repeats,
                      "copy_gb_per_second": round(bandwidth, 2), "matmul_gflops": round(gflops, 1),
                      "numpy": np.__version__, "torch": torch.__version__,
                      "numba": numba.__version__, "kernels": rows, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
