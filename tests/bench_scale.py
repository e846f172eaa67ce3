"""What ranks cost: steps a second with torchrun and without, and what travels between them.

    python tests/bench_scale.py                       # Breakout's own settings, 1 rank plain, 1 under torchrun, 2 ranks
    python tests/bench_scale.py --env squared --repeats 7

Three kinds of runs take turns, each in processes of its own, and the medians of their steps a second count; the first
epochs, with the compiler in them, do not. `forced` is one rank with a process group of one member, so that each sum
really goes through torch.distributed: what the calls alone cost. With one rank there is no group, and nothing to pay.
Bytes are counted where they are sent. The last line is one JSON object.
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
    measure: bool = False
    """Be one rank (what the benchmark starts)."""


def measure(arguments):
    """One rank: times its epochs; rank 0 prints one JSON line."""
    import pufferl
    import ranks

    if os.environ.get("FORCED"):
        ranks.connect = forced_group(ranks)
    group = ranks.connect()
    args = pufferl.load_config(arguments.env, ["--vec.num-threads", str(arguments.num_threads)])
    vecenv = pufferl.load_env(arguments.env, args)
    policy = pufferl.load_policy(args, vecenv)
    config = {**args["train"], "env": arguments.env, "log_interval": 1e9, "data_dir": None}
    trainer = pufferl.PuffeRL(config, vecenv, policy)
    seconds = []
    for epoch in range(2 + arguments.epochs):
        if epoch == 2:
            group.bytes, group.seconds = 0, 0.0
        begun = time.perf_counter()
        trainer.evaluate()
        trainer.train()
        seconds.append(time.perf_counter() - begun)
    timed = sum(seconds[2:])
    minibatches = trainer.config["replay_ratio"] * trainer.batch_size / trainer.config["minibatch_size"]
    if group.rank == 0:
        print(json.dumps({"sps": trainer.batch_size * arguments.epochs / timed, "steps_epoch": trainer.batch_size,
                          "bytes_epoch": group.bytes / arguments.epochs, "minibatches_epoch": minibatches,
                          "gradient_bytes": trainer.arena.flat("gradients").nbytes,
                          "parameters": sum(p.numel() for p in policy.parameters()),
                          "share_in_ranks": group.seconds / timed}))  # fmt: skip
    trainer.release()


def forced_group(ranks):
    """ranks.connect for one rank whose sums go through gloo all the same."""
    import numpy as np
    import torch
    import torch.distributed as dist

    class Forced(ranks.Ranks):
        def sum(self, values):
            tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            self.bytes += tensor.nbytes
            self._run(dist.all_reduce, tensor)
            return values

    dist.init_process_group("gloo")
    group = Forced()
    return lambda: group


def run(kind, arguments):
    """The JSON line of one run."""
    own = [str(Path(__file__)), "--measure", "--env", arguments.env, "--epochs", str(arguments.epochs),
           "--num-threads", str(arguments.num_threads)]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = {"plain": [sys.executable, *own], "forced": [sys.executable, *own],
               "torchrun": [*torchrun, "--nproc-per-node=1", *own],
               "two": [*torchrun, "--nproc-per-node=2", *own]}[kind]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "forced":
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        environment |= {"FORCED": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{kind} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1])


def main():
    arguments = tyro.cli(Arguments)
    if arguments.measure:
        return measure(arguments)
    kinds = arguments.kinds.split()
    found = {kind: [] for kind in kinds}
    for _ in range(arguments.repeats):
        for kind in kinds:
            found[kind].append(run(kind, arguments))
    base = statistics.median(one["sps"] for one in found[kinds[0]])
    result = {"env": arguments.env}
    print(f"{'kind':10} {'steps/s':>12} {'median ratio':>13} {'in ranks':>9} {'bytes/epoch':>12} {'bytes/step':>11}")
    for kind in kinds:
        sps = statistics.median(one["sps"] for one in found[kind])
        # Ratios of runs that followed each other, so that what else the machine does counts for both.
        pairs = zip(found[kind], found[kinds[0]], strict=True)
        ratio = statistics.median(one["sps"] / first["sps"] for one, first in pairs)
        share = statistics.median(one["share_in_ranks"] for one in found[kind])
        last = found[kind][-1]
        print(f"{kind:10} {sps:12,.0f} {ratio:13.3f} {share:9.1%} {last['bytes_epoch']:12,.0f} "
              f"{last['bytes_epoch'] / last['steps_epoch']:11.3f}")  # fmt: skip
        result[kind] = {**last, "sps": sps, "ratio": ratio, "share_in_ranks": share}
    print(f"{found[kinds[0]][0]['parameters']:,} parameters; {base:,.0f} steps/s is 1")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
