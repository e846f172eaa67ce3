"""Measure the host's work in a rollout with a policy on a GPU, without a GPU.

    python bench/bench_host.py [--agents 4096] [--buffers 2 16] [--threads 2] [--env breakout]

Environments step, and CUDA graphs do nothing. The host's time limits the steps per second of a GPU.
Each line is a number of buffers: milliseconds per rollout and microseconds per step of a buffer,
once with the interpreter between the steps, as for environments in Python and custom networks, and
once without. Both are interleaved in one run; medians.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import cfunc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))
import cuda_on_a_cpu

import arena
import models
import pufferl
from fast import fused


@cfunc("int32(int64, int64)")
def do_nothing(graph, stream):
    return 0


class Idle:
    """A device whose work takes no time, and that does nothing after one epoch."""

    torch_device, idle, captured = torch.device("cpu"), False, False

    def pin(self, array): ...

    def wait(self): ...

    def release(self): ...

    def main(self):
        return contextlib.nullcontext()

    def actor(self, number):
        return contextlib.nullcontext()

    def replay_or_call(self, key, function, *arguments):
        if not self.idle:
            function(*arguments)


def measure(env, agents, buffers, threads, repeats):
    """Return {"interpreter": seconds of a rollout, "compiled": the same}."""
    vecenv = pufferl.make(env, num_envs=agents, seed=1, num_buffers=buffers,
                          num_threads=max(threads, buffers))
    settings = {"device": "cuda", "horizon": 64, "cudagraphs": -1, "log_interval": 1e9,
                "data_dir": None, "total_timesteps": 10**12}
    trainer = pufferl.PuffeRL(settings, vecenv, models.MinGRUPolicy(vecenv, hidden_size=16))
    trainer.evaluate()
    trainer.train()
    trainer.buffers.gpu.idle, seconds = True, {"interpreter": [], "compiled": []}
    graphs = do_nothing.address, do_nothing.address, 0, np.zeros(trainer.horizon + 2, np.int64)
    for name in ["interpreter", "compiled"] * repeats:
        trainer.engine.handles = dict.fromkeys(range(buffers), graphs) if name == "compiled" else {}
        begun = time.perf_counter()
        trainer.evaluate()
        seconds[name].append(time.perf_counter() - begun)
        trainer.train()
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="breakout")
    parser.add_argument("--agents", type=int, default=4096)
    parser.add_argument("--buffers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--threads", type=int, default=1,
                        help="at least; each buffer has one of its own")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    cuda_on_a_cpu.install(pytest.MonkeyPatch())
    arena.SIMULATOR, arena._launch = True, lambda function, lanes, arguments: function(0, lanes, *arguments)
    fused.find_gpu = lambda actors: Idle()
    results = {}
    for buffers in args.buffers:
        result = results[buffers] = measure(args.env, args.agents, buffers, args.threads,
                                           args.repeats)
        print(f"{buffers:3} buffers: " + ", ".join(
            f"{name} {1e3 * seconds:7.2f} ms ({1e6 * seconds / 65 / buffers:5.1f} µs a step)"
            for name, seconds in result.items()), flush=True)
    print(json.dumps({"benchmark": "host", **vars(args), "seconds": results}))


if __name__ == "__main__":
    main()
