"""Measure the cost of ranks: steps per second with and without torchrun, bytes.

    python bench/bench_scale.py                 # Breakout: 1 rank, 1 under torchrun, 2 ranks
    python bench/bench_scale.py --env squared --repeats 7
    python bench/bench_scale.py --predict 10e6  # a calculation for GPUs of 10 M steps/s each

Three kinds of runs are interleaved, each in separate processes, and the medians of their steps per
second count, without the first epochs, which compile. `forced` is one rank with a process group of
one member, so that each sum goes through torch.distributed: the cost of the calls alone. A single
rank has no group and no cost. Bytes are counted where they are sent. CPU seconds are more reliable
than steps per second where other work shares the cores. The last line is one JSON object.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass
class Arguments:
    env: str = "breakout"
    """A C environment."""
    repeats: int = 5
    """Runs of each kind, of which the median counts."""
    epochs: int = 6
    """Epochs that are timed in a run, after two that are not."""
    num_threads: int = 1
    """Threads of a rank, the same in every kind."""
    kinds: str = "plain torchrun forced two"
    """Which kinds to run; the first one is what the others are compared with."""
    predict: float | None = None
    """Trained steps/s of one device: print what 8, 64 and 512 of them would give by
    `prediction`, and run nothing."""
    measure: bool = False
    """Be one rank (what the benchmark starts)."""


def measure(arguments):
    """Time the epochs of one rank; rank 0 prints one JSON line."""
    import data_parallel
    import pufferl

    if os.environ.get("FORCED"):
        data_parallel.connect = forced_group(data_parallel)
    group = data_parallel.connect()
    args = pufferl.load_config(arguments.env, ["--vec.num-threads", str(arguments.num_threads)])
    vecenv = pufferl.load_env(arguments.env, args)
    policy = pufferl.load_policy(args, vecenv)
    config = {**args["train"], "env": arguments.env, "log_interval": 1e9, "data_dir": None}
    trainer = pufferl.PuffeRL(config, vecenv, policy)
    compute_gradients = trainer._compute_gradients

    def compute_and_sum():
        group.sum(trainer.buffers.moments)
        compute_gradients()
        group.sum(trainer.buffers.gradients[0])

    if os.environ.get("FORCED"):  # one rank sums nothing by itself
        trainer._compute_gradients = compute_and_sum
    seconds, sent, add_up = [], [], group.sum

    def count_and_sum(values):
        sent.append(values.nbytes)
        return add_up(values)

    group.sum = count_and_sum
    for epoch in range(2 + arguments.epochs):
        if epoch == 2:
            sent.clear()
            group.collective_seconds, cpu = 0.0, time.process_time()
        begun = time.perf_counter()
        trainer.evaluate()
        trainer.train()
        seconds.append(time.perf_counter() - begun)
    timed, cpu = sum(seconds[2:]), time.process_time() - cpu
    minibatches = trainer.config["replay_ratio"] * trainer.batch_size / trainer.config["minibatch_size"]
    if group.rank == 0:
        print(json.dumps({"sps": trainer.batch_size * arguments.epochs / timed,
                          "steps_epoch": trainer.batch_size,
                          "bytes_epoch": sum(sent) / arguments.epochs,
                          "minibatches_epoch": minibatches,
                          "gradient_bytes": trainer.arena.flat("gradients").nbytes,
                          "parameters": sum(p.numel() for p in policy.parameters()),
                          "share_in_ranks": group.collective_seconds / timed,
                          "cpu_seconds": cpu / arguments.epochs}))
    trainer.release()


def forced_group(ranks):
    """Connect one rank whose sums go through gloo."""
    import numpy as np
    import torch
    import torch.distributed as dist

    class Forced(ranks.Ranks):
        def sum(self, values):
            tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            self._run(dist.all_reduce, tensor)
            return values

    dist.init_process_group("gloo")
    group = Forced()
    return lambda: group


def run(kind, arguments):
    """Return the JSON line of one run."""
    words = [str(Path(__file__)), "--measure", "--env", arguments.env, "--epochs",
           str(arguments.epochs), "--num-threads", str(arguments.num_threads)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = {"plain": [sys.executable, *words], "forced": [sys.executable, *words],
               "torchrun": [*torchrun, "--nproc-per-node=1", *words],
               "two": [*torchrun, "--nproc-per-node=2", *words]}[kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "forced":
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        environment |= {"FORCED": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{kind} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1])


# Assumed, not measured: an all-reduce of a few bytes over 8 GPUs of one machine, what each doubling
# of machines adds to it, and the bytes a second that one GPU sends to its neighbour: NVLink 4
# within a machine, 400 Gb/s between machines.
ALL_REDUCE, PER_DOUBLING, NVLINK, NETWORK = 25e-6, 15e-6, 400e9, 45e9
GRADIENT = 131_584  # bytes: the default network of breakout, as this benchmark counts them


def prediction(rate, count, minibatch, *, replay=1.42, agents=4096, horizon=64, gradient=GRADIENT):
    """Return steps per second of `count` GPUs that train `rate` alone.

    A minibatch waits for two all-reduces, an epoch for four. The loss of a GPU through its small
    share of a minibatch is not included.
    """
    machines = -(-count // 8)
    latency = ALL_REDUCE + PER_DOUBLING * (machines - 1).bit_length() if count > 1 else 0.0
    transfer = 2 * gradient * (count - 1) / count / (NVLINK if machines == 1 else NETWORK)
    batch = count * agents * horizon
    alone = agents * horizon / rate
    return batch / (alone + replay * batch / minibatch * (2 * latency + transfer) + 4 * latency)


def print_predictions(rate):
    """Print the table of docs/scale.md."""
    print(f"calculated, not measured: {rate:,.0f} steps/s a GPU")
    print(f"{'GPUs':>5} {'minibatch':>10} {'steps/s':>14} {'of k':>6}")
    for count in (8, 64, 512):
        for minibatch in dict.fromkeys((65_536, 65_536 * count // 8, 65_536 * count)):
            total = prediction(rate, count, minibatch)
            print(f"{count:5} {minibatch:10,} {total:14,.0f} {total / rate / count:6.0%}")


def main():
    arguments = tyro.cli(Arguments)
    if arguments.measure:
        return measure(arguments)
    if arguments.predict:
        return print_predictions(arguments.predict)
    kinds = arguments.kinds.split()
    results = {kind: [] for kind in kinds}
    for _ in range(arguments.repeats):
        for kind in kinds:
            results[kind].append(run(kind, arguments))
    base = statistics.median(one["sps"] for one in results[kinds[0]])
    result = {"env": arguments.env}
    print(f"{'kind':10} {'steps/s':>12} {'ratio':>7} {'CPU ratio':>10} {'in ranks':>9} "
          f"{'bytes/epoch':>12} {'bytes/step':>11}")
    for kind in kinds:
        sps = statistics.median(one["sps"] for one in results[kind])
        # Ratios of runs that followed each other, so that what else the
        # machine does counts for both.
        pairs = list(zip(results[kind], results[kinds[0]], strict=True))
        ratio = statistics.median(one["sps"] / first["sps"] for one, first in pairs)
        cpu = statistics.median(one["cpu_seconds"] / first["cpu_seconds"] for one, first in pairs)
        share = statistics.median(one["share_in_ranks"] for one in results[kind])
        last = results[kind][-1]
        print(f"{kind:10} {sps:12,.0f} {ratio:7.3f} {cpu:10.3f} {share:9.1%} "
              f"{last['bytes_epoch']:12,.0f} {last['bytes_epoch'] / last['steps_epoch']:11.3f}")
        result[kind] = {**last, "sps": sps, "ratio": ratio, "cpu_ratio": cpu,
                        "share_in_ranks": share}
    print(f"{results[kinds[0]][0]['parameters']:,} parameters; {base:,.0f} steps/s is 1")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
