"""Measure nanoseconds per element of every kernel at the trainer's shapes.

    python bench/bench_kernels.py [--threads 1] [--repeats 7] [--only mingru] [--device cuda]

The shapes are those of Breakout: 4,096 agents, horizon 64, hidden 64, minibatches of 1,024 segments
in chunks of 16. A kernel is first compared with its float64 reference; a wrong one is not timed,
and the exit status is then 1. GB/s counts every array that the kernel reads or writes once. Its
share of the copy bandwidth (a copy of 256 MB, read plus write) exceeds 100% where the arrays are in
the cache, as chunks are meant to be. Everything is interleaved in one run; figures are medians of
the repeats. On a shared machine only ratios are meaningful, so a copy and a matrix product (1,024 x
64 by 64 x 192, the layer's) of the same run are printed as well.

On a GPU a chunk is the whole minibatch, as in training, and the time is that of replaying a graph
of 20 calls, without launches from Python and without preparation; kernels that work in place
continue with their results. There each kernel is printed with a copy that reads and writes as many
bytes, because a launch takes longer than a small kernel's bytes, and both use the cache.
"""

import argparse
import json
import math
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
import reference

import kernels
import models
import optim
from arena import Arena, threads
from fast import fused

# horizon, agents, hidden, minibatch, chunk, actions, observation
T, N, H, B, M, A, D = 64, 4096, 64, 1024, 16, 3, 118
GAE = {"gamma": 0.972, "gae_lambda": 0.949, "rho_clip": 2.1, "c_clip": 1.08}
CLIPS = {"clip_coef": 0.67, "vf_coef": 1.22, "vf_clip_coef": 1.23, "ent_coef": 0.0033}
START = 32  # of the chunk
SECONDS = 0.02  # of one kernel in one repeat, at least
CALLS = 20  # in a graph


class Case(NamedTuple):
    run: callable  # one call of the kernel
    check: callable  # raises AssertionError if what the call just left is wrong
    elements: int
    moved: int  # bytes read and written
    prepare: callable = None  # puts back what the call overwrites; not timed


rng = torch.Generator().manual_seed(0)  # a CPU's, so that the numbers are the same everywhere


def here(tensor):
    return tensor.to(torch.get_default_device())


def normal(*shape):
    return here(torch.randn(shape, generator=rng, device="cpu"))


def uniform(*shape):
    return here(torch.rand(shape, generator=rng, device="cpu"))


def integers(high, *shape, dtype=torch.int64):
    return here(torch.randint(high, shape, generator=rng, dtype=dtype, device="cpu"))


def flags(probability, *shape):
    return (uniform(*shape) < probability).to(torch.uint8)


def close(name, actual, expected, tolerance):
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    error = ((actual - expected).abs() / (1 + expected.abs())).max().item()
    # NaN is not <= either
    assert error <= tolerance, f"{name} is off by {error:.1e}, more than {tolerance:.0e}"


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def poisoned(*shape):
    return torch.full(shape, math.nan)


def sample_case(kind):
    outputs, log_std, heads = normal(N, A + 1), 0.3 * normal(A), torch.tensor([A], device="cpu")
    actions = torch.full((N, 1), -1, dtype=torch.int32) if kind == "discrete" else poisoned(N, A)
    logprobs, values = poisoned(N), poisoned(N)
    options = {"heads": heads} if kind == "discrete" else {"log_std": log_std}
    step = torch.tensor([3])

    def run():
        kernels.sample(outputs, actions, logprobs, values, seed=1, step=step, **options)

    def check():
        y = outputs[:, :-1].double()
        if kind == "discrete":
            expected, _ = reference.discrete_logprob_entropy(y, actions, [A])
            for i in range(64):
                u = (reference.philox4x32((i, 3, 0, 1), (1, 0))[0] >> 8) * 2.0**-24
                assert actions[i, 0] == reference.draw(y[i].softmax(0), torch.tensor(u).double()), (
                    "another action")
        else:
            expected, _ = reference.gaussian_logprob_entropy(y, log_std.double(), actions.double())
            z = (actions - y) / log_std.double().exp()
            assert z.mean().abs() < 0.05 and (z.std() - 1).abs() < 0.05, "not a standard normal"
        close("logprobs", logprobs, expected, 1e-5)
        assert torch.equal(values, outputs[:, -1])

    return Case(run, check, N, size(outputs, actions, logprobs, values))


def advantage_cases():
    done = flags(0.02, T, N)
    data = {"values": normal(T + 1, N), "rewards": normal(T, N), "terminals": done,
            "truncations": flags(0.01, T, N) * (1 - done), "bootstraps": torch.zeros(T, N),
            "ratios": (0.2 * normal(T, N)).exp(), "valid": flags(0.99, T + 1, N)}
    index = integers(N, B).sort().values
    unique = index.unique()
    advantages, part, priorities = poisoned(T, N), poisoned(T, N), torch.full((N,), math.nan, dtype=torch.float64)
    doubles = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    expected = reference.advantage(**doubles, gamma=GAE["gamma"], lam=GAE["gae_lambda"],
                                   rho_clip=GAE["rho_clip"], c_clip=GAE["c_clip"])
    source = expected.float()
    cumulative, drawn, weights = torch.empty_like(priorities), torch.zeros(B, dtype=torch.int64), poisoned(B)
    p = reference.probabilities(source.double(), data["valid"], 0.1)
    counter, beta = torch.tensor([5, 2]), torch.tensor([0.8])
    moved = size(*data.values(), advantages)

    def check_draw():
        assert torch.equal(drawn, reference.draw_segments(p, B, seed=7, epoch=5, minibatch=2)), "other segments"
        close("weights", weights, reference.importance_weights(p, 0.8)[drawn], 1e-5)

    moments, offset = [], here(torch.zeros(1))
    chosen = source[:, index].double()[data["valid"][:-1, index] != 0]
    yield "advantage, all", Case(
        lambda: kernels.advantage(**data, advantages=advantages, offset=offset, **GAE),
        lambda: close("advantages", advantages, expected, 1e-5), T * N, moved)
    yield "advantage, drawn", Case(
        lambda: kernels.advantage(**data, advantages=part, offset=offset, **GAE,
                                  index=index),
        lambda: close("advantages", part[:, unique], expected[:, unique], 1e-5),
        T * len(unique), moved * len(unique) // N)
    yield "priorities", Case(
        lambda: kernels.priorities(source, data["valid"], priorities, alpha=0.1),
        lambda: close("priorities", priorities / priorities.sum(), p, 1e-9), T * N,
        size(source, data["valid"]))
    yield "draw_segments", Case(
        lambda: kernels.draw_segments(p, cumulative, drawn, weights, seed=7, counter=counter, beta=beta),
        check_draw, B, size(p, cumulative, drawn, weights))
    yield "masked_moments", Case(
        lambda: moments.append(kernels.masked_moments(source, data["valid"], index)),
        lambda: close("moments", moments[-1],
                      [len(chosen), chosen.sum(), chosen.square().sum()], 1e-6),
        T * B, T * B * 5, moments.clear)


def gather_cases():
    index = integers(N, B).sort().values
    source, out = normal(T + 1, N, D), poisoned(T, M, D)
    yield "gather, chunk", Case(
        lambda: kernels.gather(source, index, out, start=START),
        lambda: close("out", out, source[:T, index[START : START + M]], 0), out.numel(),
        2 * size(out))
    new_values, new_ratios = normal(T, N)[:, index], normal(T, N)[:, index]
    values, ratios = poisoned(T + 1, N), poisoned(T, N)

    def check():
        close("values", values[:T, index], new_values, 0)
        close("ratios", ratios[:, index], new_ratios, 0)

    counter = torch.zeros(2, dtype=torch.int64)
    yield "write_back", Case(lambda: kernels.write_back(index, new_values, new_ratios, counter, values, ratios), check,
                             T * B, 2 * size(new_values, new_ratios))


def step_case():
    hgp, x, state0 = normal(N, 3 * H), normal(N, H), normal(N, H)
    state, out = state0.clone(), poisoned(N, H)
    resets, valid = flags(0.02, N), flags(0.99, N)

    def check_step():
        y, s = reference.mingru_layer(*(t.double()[None] for t in (x, hgp)), state0.double(),
                                      resets[None], valid[None])
        close("out", out, y[0], 2e-6)
        close("state", state, s[0], 2e-6)

    return Case(lambda: kernels.mingru_step(hgp, x, state, resets, valid, out), check_step, N * H,
                size(hgp, x, state, state, out), lambda: state.copy_(state0))


def policy_step_cases():
    """Yield the whole network's step with the draw.

    Product by product, and on a GPU in one kernel too.
    """
    device, spaces = torch.get_default_device(), gymnasium.spaces
    policy = models.MinGRUPolicy(SimpleNamespace(single_observation_space=spaces.Box(-9, 9, (D,), np.float32),
                                                 single_action_space=spaces.Discrete(A)), H, 2)
    arena = Arena()
    arena.adopt(policy)
    ways = {way: fused.Layers(policy, arena, way, steps=0, rows=N) for way in ("by products", "in one kernel")}
    arena.allocate(device)
    observations, state0 = normal(N, D), normal(2, N, H)
    resets, valid, heads = flags(0.02, N), flags(0.99, N), torch.tensor([A], device="cpu")
    weights = {name: parameter.detach().double() for name, parameter in policy.named_parameters()}
    layers = [{part: weights[f"rnn.layers.{i}.{part}"] for part in ("weight", "bias")} for i in range(2)]
    params = {f"{name}_{part}": weights[f"{name}.{part}"] for name in ("encoder", "decoder")
              for part in ("weight", "bias")}
    params |= {"layer_weights": [layer["weight"] for layer in layers],
               "layer_biases": [layer["bias"] for layer in layers]}

    def case(way):
        ways[way].bind()
        if way == "by products":
            ways[way].step_kernel = None
        state, drawn = state0.clone(), {"actions": torch.full((N, 1), -1, dtype=torch.int32),
                                        "logprobs": poisoned(N), "values": poisoned(N)}
        how = {**drawn, "seed": 1, "step": torch.tensor([3]), "heads": heads}

        def run():
            if ways[way].step_kernel is None:
                kernels.sample(ways[way].step(observations, state, resets, valid), **how)
            else:
                ways[way].step(observations, state, resets, valid, drawn=how)

        def check():
            logits, value, final = reference.policy_forward(params, observations[None], state0.double(), resets[None],
                                                            valid[None])
            logprobs, _ = reference.discrete_logprob_entropy(logits[0], drawn["actions"], [A])
            close("state", state, final, 1e-5)
            close("values", drawn["values"], value[0], 1e-5)
            close("logprobs", drawn["logprobs"], logprobs, 1e-5)

        moved = size(observations, state, state, *drawn.values()) + N * 4 * (A + 1)
        return Case(run, check, N, moved, lambda: state.copy_(state0))

    for way in ways if device.type == "cuda" else ["by products"]:
        yield f"policy step, {way}", case(way)


def scan_cases():
    hgp, x, out, dy = normal(T, M, 3 * H), normal(T, M, H), poisoned(T, M, H), normal(T, M, H)
    states = torch.cat([normal(1, M, H), poisoned(T, M, H)])
    resets, valid = flags(0.02, T, N), flags(0.99, T, N)
    where = {"index": integers(N, B).sort().values, "start": START}
    columns = where["index"][START : START + M]
    hgp64, x64 = hgp.double().requires_grad_(), x.double().requires_grad_()
    y64, s64 = reference.mingru_layer(x64, hgp64, states[0].double(), resets[:, columns],
                                      valid[:, columns])
    y64.backward(dy.double())
    full = torch.cat([states[:1], s64.detach().float()])
    dhgp, dx, sums = hgp.clone(), dy.clone(), torch.empty(hgp.shape[1:])

    def check_scan():
        close("out", out, y64.detach(), 2e-6)
        close("states", states[1:], s64.detach(), 2e-6)

    def check_grad():
        close("d hgp", dhgp, hgp64.grad, 1e-5)
        close("d x", dx, x64.grad, 1e-5)

    def restore():
        dhgp.copy_(hgp)
        dx.copy_(dy)

    yield "mingru_scan, chunk", Case(
        lambda: kernels.mingru_scan(hgp, x, states, resets, valid, out, **where),
        check_scan, T * M * H, size(hgp, x, states, out))
    yield "mingru_scan_grad, chunk", Case(
        lambda: kernels.mingru_scan_grad(dhgp, x, full, resets, valid, dx, sums, **where),
        check_grad, T * M * H, size(dhgp, dhgp, x, full, dx, dx), restore)


def loss_case(kind):
    continuous = kind == "continuous"
    index = integers(N, M).sort().values
    outputs, grad = normal(T, M, A + 1), poisoned(T, M, A + 1)
    values, advantages, logprobs = normal(T + 1, N), normal(T, N), normal(T, N) * 0.2 - 1.1
    weights, valid = uniform(M) + 0.5, flags(0.99, T + 1, N)
    actions = normal(T, N, A) if continuous else integers(A, T, N, 1, dtype=torch.int32)
    log_std, grad_log_std = 0.3 * normal(A), poisoned(T, M, A) if continuous else None
    if continuous:
        mean = torch.zeros(T, N, A, dtype=torch.float64)
        logprobs = (reference.gaussian_logprob_entropy(mean, log_std.double(), actions.double())[0]).float()
    new_values, ratios = poisoned(T, M), poisoned(T, M)
    sums = torch.zeros(kernels.SUMS, dtype=torch.float64)
    moments = kernels.masked_moments(advantages, valid, index)
    settings = torch.tensor([CLIPS.get(name, 0.0) for name in kernels.LOSS_SETTINGS])
    kernels.normalisation(moments, settings)
    heads = {"heads": torch.tensor([A], device="cpu")}
    options = {"log_std": log_std, "grad_log_std": grad_log_std} if continuous else heads

    def run():
        kernels.ppo_loss(outputs, actions, logprobs, values, advantages, weights, valid, settings,
                         grad, new_values, ratios, sums, index=index, **options)

    def check():
        y, spread = outputs.double().requires_grad_(), log_std.double().requires_grad_()
        acts = actions[:, index].double() if continuous else actions[:, index]
        loss = reference.ppo_loss(
            y[..., :-1], y[..., -1], acts,
            *(x[:T, index].double() for x in (logprobs, values, advantages)),
            weights.double(), valid[:T, index], **CLIPS, heads=None if continuous else [A],
            log_std=spread if continuous else None)
        loss["loss"].backward()
        ratio = loss["ratio"].detach()
        # clipped or not, as rounding has it
        edge = ((ratio - 1).abs() - CLIPS["clip_coef"]).abs() < 1e-5
        share = edge.sum().item() / (T * M)
        close("grad", *((g * T * M).masked_fill(edge[..., None], 0) for g in (grad, y.grad)), 5e-5)
        close("ratios", ratios, ratio, 1e-5)
        if continuous:
            close("grad_log_std", grad_log_std.double().sum((0, 1)), spread.grad, 1e-5 + share)
        for name, value in kernels.loss_statistics(sums).items():
            close(name, value, loss[name].detach(), 1e-5 + share)

    moved = size(outputs, grad, new_values, ratios) + 3 * 4 * T * M + T * M + T * M * actions.shape[2] * 4
    return Case(run, check, T * M, moved + (size(grad_log_std) if continuous else 0), sums.zero_)


def muon_cases():
    shapes = [(H, D), (H,), (3 * H, H), (3 * H, H), (A + 1, H), (A + 1,)]
    module = torch.nn.Module()
    module.tensors = torch.nn.ParameterList([normal(*shape) for shape in shapes])
    arena = Arena()
    arena.adopt(module)
    device = torch.get_default_device()
    optimizer = optim.Muon(arena, momentum=0.73, max_grad_norm=1.81,
                             batched=device.type == "cuda")
    arena.allocate(device)
    groups = ("weights", "gradients", "momentum")
    for p in module.parameters():
        p.grad.copy_(0.01 * normal(*p.shape))
    start = {group: arena.flat(group).clone() for group in groups}
    before = [p.detach().double() for p in module.parameters()]
    grads = [p.grad.double() for p in module.parameters()]
    norms = []

    def restore():
        norms.clear()
        for group in groups:
            arena.flat(group).copy_(start[group])

    def check():
        expected, _ = reference.muon_step(before, grads, [torch.zeros_like(g) for g in grads],
                                          0.015, 0.73, 0.0, torch.tensor(1.81).double())
        for p, e in zip(module.parameters(), expected, strict=True):
            close("weights", p.detach(), e, 1e-6)

    flat = arena.flat("gradients")

    def check_norm():
        expected = flat.double().norm().item()
        assert abs(norms[-1] / expected - 1) < 1e-6, f"norm {norms[-1]}, expected {expected}"

    count = sum(p.numel() for p in module.parameters())
    yield "gradient_norm", Case(
        lambda: norms.append(kernels.gradient_norm(flat)), check_norm, count, 4 * count, restore)
    rate, found_inf = here(torch.tensor(0.015)), here(torch.tensor(0.0))
    yield "Muon.step", Case(lambda: optimizer.step(rate, found_inf), check, count, 7 * 4 * count,
                            restore)


def cases():
    yield "sample, discrete", sample_case("discrete")
    yield "sample, continuous", sample_case("continuous")
    yield from advantage_cases()
    yield from gather_cases()
    yield "mingru_step", step_case()
    yield from policy_step_cases()
    yield from scan_cases()
    yield "ppo_loss, discrete, chunk", loss_case("discrete")
    yield "ppo_loss, continuous, chunk", loss_case("continuous")
    yield from muon_cases()


def copy_of(moved):
    """Return a plain copy that reads and writes `moved` bytes."""
    source, target = (torch.zeros(max(1, moved // 2), dtype=torch.uint8) for _ in range(2))
    return Case(lambda: target.copy_(source), lambda: None, source.numel(), 2 * size(source))


def baselines():
    source, target = torch.zeros(2**25), torch.ones(2**25)
    left, right, product = normal(T * M, H), normal(3 * H, H), torch.empty(T * M, 3 * H)
    copy = Case(lambda: target.copy_(source), lambda: None, source.numel(), 2 * size(source))
    matmul = Case(lambda: torch.matmul(left, right.t(), out=product), lambda: None,
                  2 * T * M * H * 3 * H, size(left, right, product))
    return {"copy": copy, "matrix product": matmul}


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
