"""Measure trained steps per second, where the time goes, and the roofline.

    python bench/bench_train.py                           # Breakout, 4,096 agents, hidden 64 × 2
    python bench/bench_train.py --hidden-size 128 --num-layers 1 --total-agents 16384
    python bench/bench_train.py --table                   # sizes, agents, precisions, cost

The roofline is the least time of an epoch: torch's matrix products at the shapes, the precision and
on the threads of the trainer, and the least bytes (an observation is written and read in the
rollout, and read once for each time it is learnt from) at the speed of a copy; on a GPU the
products alone. Epochs and roofline are interleaved in one run and the medians count, because on a
shared machine an absolute time means little; the products' GFLOP/s and the copy's GB/s of the run
are printed as well. The first line of the table is the figure to quote: SPS, and SPS / roofline.
The last line of the output is one JSON object.
"""

import dataclasses
import gc
import json
import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import engines
import pufferl


@dataclass
class Arguments:
    env: str = "breakout"
    """A C environment."""
    total_agents: int = 4096
    """Agents in all."""
    policy_name: str = "auto"
    """policy.name: one of linear maps (default, feed-forward, separate, or FILE.py:CLASS)."""
    rnn_name: str = "mingru"
    """rnn.name."""
    hidden_size: int = 64
    """Width of the network."""
    num_layers: int = 2
    """MinGRU layers."""
    minibatch_size: int = 65536
    """Steps of one update."""
    horizon: int = 64
    """Steps of one rollout."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the network runs."""
    engine: Literal["auto", "autograd"] = "auto"
    """autograd: run the default network as a custom one."""
    env_device: Literal["host", "cuda"] | None = None
    """Where the environments run (default: as in training)."""
    replay_ratio: float = 1.42
    """How often a step is learnt from."""
    num_threads: int | None = None
    """Actors (default: the physical cores)."""
    num_buffers: int | None = None
    """Ranges of environments (default: as in training)."""
    repeats: int = 5
    """Interleaved measurements, of which the median counts."""
    seconds: float = 0.5
    """Of whole epochs in one measurement, at least."""
    table: bool = False
    """Measure every size, number of agents and precision, and how the cost of a step grows."""


def products(trainer):
    """Return [(m, k, n, dtype, count per epoch)] of the matrix products of a network.

    Each is (m, k) @ (k, n). For a network whose matrices are those of linear maps and recurrent
    layers, used once per step.
    """
    vecenv, T, engine = trainer.vecenv, trainer.horizon, trainer.engine
    half, full, inputs = engine.precision, torch.float32, math.prod(vecenv.observation_shape)
    maps = [(weight.shape[1], weight.shape[0], full if "decoder" in name else half)
            for name, weight in trainer.policy.named_parameters() if weight.dim() == 2]
    steps = vecenv.num_buffers * (T + 1)  # row T is evaluated too
    shapes = [(vecenv.agents_per_batch, k, n, dtype, steps) for k, n, dtype in maps]
    minibatches = trainer.config["replay_ratio"] * trainer.batch_size / trainer.config["minibatch_size"]
    # torch is quickest with some thousand steps at once on a CPU: what fits its caches
    rows = (engine.at_once if trainer.buffers.torch_device.type == "cuda"
            else T * max(1, 4096 // half.itemsize // T))
    rows = min(rows, trainer.segments * T // engine.num_learners)
    passes = minibatches * trainer.segments * T / rows
    for k, n, dtype in maps:
        shapes += [(rows, k, n, dtype, passes), (n, rows, k, dtype, passes)]
        if k != inputs:  # observations have no gradient
            shapes.append((rows, n, k, dtype, passes))
    merged = {}
    for *shape, count in shapes:
        merged[tuple(shape)] = merged.get(tuple(shape), 0) + count
    return [(*shape, count) for shape, count in merged.items()]


def operands(m, k, n, dtype):
    """Return (a, b, out) with the trainer's layout.

    Activations (rows, width), weights (out, in).
    """
    if k > max(m, n):  # a weight gradient: both factors are activations, the first one transposed
        shapes = torch.randn(k, m).t(), torch.randn(k, n), torch.empty(m, n)
    else:
        shapes = torch.randn(m, k), torch.randn(n, k).t(), torch.empty(m, n)
    return [tensor.to(dtype) for tensor in shapes]


def product_seconds(shapes, actors, pool):
    """Return seconds of one epoch's products on all actors at once.

    Each actor has one thread; every shape is timed for 5 ms.
    """

    def one(_):
        total = 0.0
        for *shape, count in shapes:
            a, b, out = operands(*shape)
            for _ in range(2):
                torch.mm(a, b, out=out)
            done, begun = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - begun) < 0.005:
                torch.mm(a, b, out=out)
                done += 1
            total += elapsed / done * count
        return total

    with engines.torch_threads(1):
        return sum(pool.map(one, range(actors))) / actors / actors


def copy_speed(actors, pool):
    """Return bytes per second, read and written, of all actors copying 64 MB each."""

    def one(_):
        source, target = torch.zeros(2**24), torch.ones(2**24)
        target.copy_(source)
        begun = time.perf_counter()
        for _ in range(3):
            target.copy_(source)
        return 3 * 2 * source.nbytes / (time.perf_counter() - begun)

    with engines.torch_threads(1):
        return sum(pool.map(one, range(actors)))


def gpu_product_seconds(shapes):
    """Return the same on a GPU, from graphs of 20 calls each."""
    total = 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for *shape, count in shapes:
        a, b, out = (tensor.cuda() for tensor in operands(*shape))
        torch.mm(a, b, out=out)
        graph, seconds, done = torch.cuda.CUDAGraph(), 0.0, 0
        with torch.cuda.graph(graph):
            for _ in range(20):
                torch.mm(a, b, out=out)
        while seconds < 0.005:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds, done = seconds + begin.elapsed_time(end) / 1000, done + 20
        total += seconds / done * count
    return total


def gpu_events(function):
    """Return (torch's profiler events of function() on the GPU in order, seconds)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        begun = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    events = [event for event in profile.events()
              if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(events, key=lambda event: event.time_range.start), seconds


def busy_us(events):
    """Return microseconds in which at least one of these events is active.

    Those of several streams overlap.
    """
    busy, last = 0.0, -math.inf
    for event in events:
        busy += max(0.0, event.time_range.end - max(last, event.time_range.start))
        last = max(last, event.time_range.end)
    return busy


def gpu_shares(trainer, seconds, epochs=5):
    """Return the shares of an epoch's time on a GPU, the mean of some epochs.

    {"busy": share in which the GPU does anything, "copies", "kernels": seconds of those}. seconds:
    an epoch's without a profiler, which slows the host down.
    """
    events, _ = gpu_events(lambda: [(trainer.evaluate(), trainer.train()) for _ in range(epochs)])
    copies = sum(event.time_range.elapsed_us() for event in events if "Mem" in event.name) / 1e6 / epochs
    total = sum(event.time_range.elapsed_us() for event in events) / 1e6 / epochs
    return {"busy": busy_us(events) / 1e6 / epochs / seconds, "copies": copies, "kernels": total - copies}


def memory(trainer):
    """Return {"bytes": memory of the trainer, "bytes_least": the least it needs}.

    The latter: the arrays that environments write, five numbers per agent and step
    (log-probability, value, bootstrap, advantage, ratio), and weights, gradients and momentum. The
    rest is scratch memory of the engine.
    """
    rollout = sum(array.nbytes for array in vars(trainer.vecenv.storage).values()
                  if array is not None)
    least = rollout + 5 * 4 * trainer.batch_size + 3 * trainer.arena.flat("weights").nbytes
    return {"bytes": rollout + trainer.arena.memory.nbytes, "bytes_least": least}


def make_trainer(a):
    """Return the trainer of one setting.

    Raises SystemExit if a.env_device is not a setting of this checkout.
    """
    args = pufferl.load_config(a.env)
    if a.env_device is not None and "device" in args["vec"]:
        args["vec"]["device"] = a.env_device
    elif a.env_device == "cuda":
        raise SystemExit("--env-device cuda: the vec section of the configuration has no "
                         "setting device.")
    args["vec"] |= {"total_agents": a.total_agents, "num_threads": a.num_threads,
                    "num_buffers": a.num_buffers}
    args["policy"] |= {"name": a.policy_name, "hidden_size": a.hidden_size}
    args["rnn"] |= {"name": a.rnn_name, "num_layers": a.num_layers}
    args["train"] |= {
        "minibatch_size": min(a.minibatch_size, a.total_agents * a.horizon),
        "replay_ratio": a.replay_ratio,
        "precision": a.precision,
        "device": a.device,
        "engine": a.engine,
        "horizon": a.horizon,
        "log_interval": 1e9,
        "total_timesteps": 10**12,
    }
    vecenv = pufferl.load_env(a.env, args)
    return pufferl.PuffeRL({**args["train"], "env": a.env, "data_dir": None}, vecenv,
                           pufferl.load_policy(args, vecenv))


def warm_up(trainer):
    """Run the epochs that compile kernels, touch every page and capture graphs."""
    for _ in range(4 if trainer.config["device"] == "cuda" else 2):
        trainer.evaluate()
        trainer.train()


def measure(a):
    """Return all figures of one setting, as a dict."""
    trainer = make_trainer(a)
    vecenv = trainer.vecenv
    actors, shapes = vecenv.num_actors, products(trainer)
    flops = sum(2 * m * k * n * count for m, k, n, _, count in shapes)
    row = vecenv.storage.observations[0, 0].nbytes
    least = trainer.batch_size * row * (2 + a.replay_ratio)
    gpu = a.device == "cuda"
    warm_up(trainer)
    trainer.statistics.seconds = dict.fromkeys(trainer.statistics.seconds, 0.0)
    epochs, count, rooflines, multiplied, copied = [], 0, [], [], []
    with ThreadPoolExecutor(actors) as pool:
        for _ in range(a.repeats):
            begun, done = time.perf_counter(), 0
            while time.perf_counter() - begun < a.seconds or not done:
                trainer.evaluate()
                trainer.train()
                done += 1
            if gpu:
                torch.cuda.synchronize()
            epochs.append((time.perf_counter() - begun) / done)
            count += done
            multiplied.append(gpu_product_seconds(shapes) if gpu else product_seconds(shapes, actors, pool))
            # a GPU's roofline is its products
            copied.append(math.inf if gpu else copy_speed(actors, pool))
            rooflines.append(multiplied[-1] + least / copied[-1])
    epoch, roofline = statistics.median(epochs), statistics.median(rooflines)
    ratios = sorted(f / e for f, e in zip(rooflines, epochs, strict=True))
    stages = {name: seconds / count for name, seconds in trainer.statistics.seconds.items() if seconds}
    result = {
        "env": a.env,
        "agents": trainer.num_agents,
        "horizon": a.horizon,
        "hidden_size": a.hidden_size,
        "num_layers": a.num_layers,
        "minibatch_size": trainer.config["minibatch_size"],
        "replay_ratio": a.replay_ratio,
        "actors": actors,
        "buffers": vecenv.num_buffers,
        "precision": trainer.config["precision"],
        "sps": trainer.batch_size / epoch,
        "roofline_sps": trainer.batch_size / roofline,
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
        "gflops_per_actor": flops / statistics.median(multiplied) / (1 if gpu else actors) / 1e9,
        "copy_gb_per_second": None if gpu else statistics.median(copied) / 1e9,
        "seconds_epoch": epoch,
        "seconds_roofline": roofline,
        "seconds_stage": stages,
        "mflop_per_step": flops / trainer.batch_size / 1e6,
        "bytes_per_step": least / trainer.batch_size,
        **memory(trainer),
    }
    if gpu:
        result |= {"gpu": torch.cuda.get_device_name(), "shares": gpu_shares(trainer, epoch)}
    trainer.release()
    del trainer, vecenv
    gc.collect()
    return result


def show(r, repeats):
    print(
        f"{r['env']}: {r['agents']:,} agents × horizon {r['horizon']}, hidden {r['hidden_size']} × "
        f"{r['num_layers']}, minibatch {r['minibatch_size']:,}, replay {r['replay_ratio']}, "
        f"{r['precision']}, {r['actors']} actors, {r['buffers']} buffers"
    )
    print(f"  {'trained steps a second':28} {r['sps']:12,.0f}")
    rates = f"at {r['gflops_per_actor']:,.0f} GFLOP/s{'' if 'gpu' in r else ' an actor'}, "
    rates += f"{r['mflop_per_step']:.2f} MFLOP a step"
    if "gpu" not in r:
        rates += f", {r['copy_gb_per_second']:.0f} GB/s, {r['bytes_per_step']:,.0f} bytes a step"
    print(f"  {'roofline':28} {r['roofline_sps']:12,.0f}   {rates}")
    low, high = r["ratio_range"]
    print(
        f"  {'SPS / roofline':28} {r['ratio']:12.2f}   median of {repeats} interleaved pairs, "
        f"{low:.2f} to {high:.2f}"
    )
    print(f"  {'memory':28} {r['bytes'] / 1e6:9.1f} MB   "
          f"{r['bytes'] / r['bytes_least']:.2f} of the least")
    for name, seconds in r["seconds_stage"].items():
        print(f"  {name:28} {seconds * 1e3:9.1f} ms   {100 * seconds / r['seconds_epoch']:.0f}%")
    if "gpu" in r:
        print("  {gpu}: busy {busy:.0%} of an epoch; copies {copies:.4f} s, kernels "
              "{kernels:.4f} s".format(
                  **r, **r["shares"]))


HEAD = (f"{'hidden':>8} {'agents':>7} {'horizon':>7} {'precision':9} {'SPS':>10} "
        f"{'roofline':>10} {'ratio':>6} {'env':>5} {'fwd':>5} {'train':>6} {'ns/step':>8} "
        f"{'GFLOP/s':>8} {'GB/s':>5}")


def line(r):
    share = {name: 100 * seconds / r["seconds_epoch"]
             for name, seconds in r["seconds_stage"].items()}
    print(f"{r['hidden_size']:>5}×{r['num_layers']:<2} {r['agents']:>7,} {r['horizon']:>7} "
          f"{r['precision']:9} {r['sps']:>10,.0f} {r['roofline_sps']:>10,.0f} {r['ratio']:>6.2f} "
          f"{share['environment']:>4.0f}% {share['policy']:>4.0f}% {share['learn']:>5.0f}% "
          f"{1e9 / r['sps']:>8,.0f} {r['gflops_per_actor']:>8.0f} "
          f"{r['copy_gb_per_second'] or math.nan:>5.0f}", flush=True)


def table(a):
    """Measure each size, number of agents and precision, then single dimensions."""
    results = []

    def row(**changes):
        results.append(measure(dataclasses.replace(a, **changes)))
        line(results[-1])

    print(f"{a.env}, minibatch {a.minibatch_size:,}, replay {a.replay_ratio}\n\n{HEAD}")
    for hidden, layers in ((64, 2), (128, 1), (256, 2)):
        for agents in (512, 4096, 16384):
            for precision in ("float32", "bfloat16"):
                row(hidden_size=hidden, num_layers=layers, total_agents=agents, precision=precision)
    for name, values in (("horizon", (16, 32, 128, 256)), ("num_layers", (1, 4, 8)),
                         ("hidden_size", (32, 128, 512))):
        print(f"\n{name}\n{HEAD}")
        for value in values:
            for precision in ("float32", "bfloat16"):
                row(**{"total_agents": 1024, "precision": precision, name: value})
    return results


def main():
    a = tyro.cli(Arguments, description=__doc__)
    if a.table:
        print(json.dumps({"benchmark": "train", "rows": table(a)}))
        return
    result = measure(a)
    show(result, a.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
