"""Measure environment steps per second on one core, from Python and in C loops.

    python bench/bench_env.py [--agents 8192] [--only breakout] [--setting frameskip=8]

64 steps of legal random play are recorded, then repeated from the same state in each of these ways,
interleaved: the best of five times or more in processor time, because disturbances only add to it.
The observations at the end must equal the recorded ones.

    bare     a C loop that only calls c_step: each environment always writes to one place, from
             which a trainer would have to copy
    C loop   the same, but each step writes to another row: c_step behind eight pointers per
             environment
    Python   `Envs.step`, one call per step, as in training
    ratio    Python to C loop: the cost of Python. A call takes half a microsecond for any number
             of environments
    64 rows  Python, through the rows of a rollout as in training, which exceed the cache; the other
             ways use one row
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ocean

HORIZON, WARM_UP = 64, 128
REPEATS, SECONDS = 25, 4  # at most so often and, from the fifth time on, so long for an environment
LARGEST = 2**28  # bytes of the observations of all rows


class Vector:
    """Environments with `horizon` rows of buffers and HORIZON repeated actions."""

    def __init__(self, library, num_envs, settings, actions=None, horizon=1):
        self.envs = envs = library.create(num_envs, settings=settings)
        agents = envs.num_agents
        if actions is None:
            actions = np.zeros((HORIZON, agents, envs.action_dims), envs.action_dtype)
        self.actions = actions
        self.observations = np.zeros((horizon, agents, *envs.observation_shape),
                                     envs.observation_dtype)
        self.final_observations = np.zeros_like(self.observations[0])
        self.masks = np.ones((horizon, agents, sum(envs.action_heads or ())), np.uint8)
        self.small = [np.zeros((horizon, agents), kind)
                      for kind in (np.float32, np.uint8, np.uint8, np.uint8)]
        rewards, terminals, truncations, valid = self.small
        masks = self.masks if envs.has_action_masks else [None] * horizon
        valid = valid if envs.has_valid else [None] * horizon
        self.rows = np.stack([
            ocean.rows(self.observations[k], actions[t], rewards[k], terminals[k], truncations[k],
                       self.final_observations, valid[k], masks[k])
            for t, k in ((t, t % horizon) for t in range(HORIZON))
        ])
        self.addresses = [row.ctypes.data for row in self.rows]
        envs.reset(self.addresses[0])

    def step(self):
        for address in self.addresses:
            self.envs.step(address)

    def play(self, steps, rng):
        """Play `steps` of legal random actions in the first row.

        The last HORIZON stay in self.actions.
        """
        heads = np.cumsum([0, *(self.envs.action_heads or ())])
        for t in range(steps):
            for i, (first, last) in enumerate(itertools.pairwise(heads)):
                legal = self.masks[0, :, first:last]
                self.actions[t % HORIZON, :, i] = np.where(legal, rng.random(legal.shape),
                                                           -1).argmax(axis=1)
            if not self.envs.action_heads:
                self.actions[t % HORIZON] = rng.uniform(-1, 1, self.actions.shape[1:])
            self.envs.step(self.addresses[t % HORIZON])


def measure(name, num_agents, settings):
    header = ocean.load(name).header
    library = ocean.Library(header, ocean.build(header, extra_flags=["-DOCEAN_BENCH"]))
    num_envs = max(1, num_agents // library.create(1, settings=settings).num_agents)
    bench = library.functions.ocean_bench
    bench.restype, bench.argtypes = None, [ocean.POINTER, *[ocean.INT] * 2, ocean.POINTER,
                                           *[ocean.INT] * 2]

    record, rng = Vector(library, num_envs, settings), np.random.default_rng(0)
    record.play(WARM_UP, rng)
    saved = record.envs.save()
    record.play(HORIZON, rng)
    size = max(record.observations.nbytes, 1)

    # In the same memory for the first three, for where it lies makes a difference of some percent.
    here = Vector(library, num_envs, settings, record.actions)
    horizon = max(n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or n * size <= LARGEST)
    rolling = Vector(library, num_envs, settings, record.actions, horizon)

    def c_loop(bind):
        return lambda: bench(here.envs.address, num_envs, HORIZON, here.rows.ctypes.data,
                             HORIZON, bind)

    ways = {"bare": (here, c_loop(0)), "c": (here, c_loop(1)), "python": (here, here.step),
            "rolling": (rolling, rolling.step)}
    best, begun = dict.fromkeys(ways, np.inf), time.thread_time()
    for repeat in range(REPEATS):
        if repeat >= 5 and time.thread_time() - begun > SECONDS:
            break
        for key, (vector, run) in ways.items():
            vector.envs.load(saved)
            vector.observations[-1] = 0
            start = time.thread_time()
            run()
            best[key] = min(best[key], time.thread_time() - start)
            assert np.array_equal(vector.observations[-1], record.observations[0]), (
                f"{name}: {key} went another way")
    speeds = {key: HORIZON * record.envs.num_agents / seconds for key, seconds in best.items()}
    return {**speeds, "ratio": speeds["python"] / speeds["c"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=8192,
                        help="agents of all environments together, about")
    parser.add_argument("--only", nargs="+",
                        help="some environments (default, and with --all: all of them)")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--setting", nargs="+", default=[],
                        help="name=value, where not the default")
    arguments = parser.parse_args()
    settings = {key: json.loads(value)
                for key, value in (pair.split("=") for pair in arguments.setting)}
    results = {}
    print(f"million agent steps a second on one core, {arguments.agents} agents, best of 5 to "
          f"{REPEATS} times")
    print(f"{'':15s} {'bare':>8s} {'C loop':>8s} {'Python':>8s} {'ratio':>7s} {'64 rows':>8s}")
    for name in arguments.only or ocean.names():
        result = results[name] = measure(name, arguments.agents, settings)
        bare, c, python, rolling = (result[way] / 1e6 for way in ("bare", "c", "python", "rolling"))
        print(f"{name:15s} {bare:8.1f} {c:8.1f} {python:8.1f} {result['ratio']:7.3f} "
              f"{rolling:8.1f}", flush=True)
    print(json.dumps({"agents": arguments.agents, "agent_steps_per_second": results}))


if __name__ == "__main__":
    main()
