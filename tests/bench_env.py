"""Environment steps a second on one core, through our Python path and in a plain C loop beside it.

    python tests/bench_env.py [--agents 4096] [--only breakout] [--setting frameskip=8]

Both step the same environments with the same random actions on one row of buffers, interleaved, the median of 5
repeats. The C loop (ocean_bench in ocean/binding.c) sets the pointers once and then only calls c_step; ours goes
through `Envs.step`, which binds the pointers of every environment on every step. The last column has everything rotate
through the rows of a horizon of 64, as in training, where it no longer stays in the cache. An environment is timed
only if both ways give the same observations.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ocean

HORIZON, REPEATS, SECONDS = 64, 5, 0.25


def make(library, num_envs, horizon, actions, settings):
    """Environments, the rows of each of HORIZON steps, and the buffers (observations first) that these point into."""
    envs = library.create(num_envs, settings=settings)
    agents = envs.num_agents
    observations = np.zeros((horizon, agents, *envs.observation_shape), envs.observation_dtype)
    final_observations = np.zeros_like(observations[0])
    masks = np.zeros((horizon, agents, sum(envs.action_heads)), np.uint8) if envs.has_action_masks else None
    rewards, terminals, truncations = (np.zeros((horizon, agents), kind) for kind in (np.float32, np.uint8, np.uint8))
    rows = [
        ocean.rows(observations[t % horizon], actions[t], rewards[t % horizon], terminals[t % horizon],
                   truncations[t % horizon], final_observations, None, None if masks is None else masks[t % horizon])
        for t in range(HORIZON)
    ]  # fmt: skip
    envs.reset(rows[0])
    return envs, rows, (observations, rewards, terminals, truncations, final_observations, masks)


def measure(name, num_agents, settings):
    library = ocean.load(name)
    num_envs = max(1, num_agents // library.create(1, settings=settings).num_agents)
    plain = ocean.Library(ocean.FOLDER / name / f"{name}.h", extra_flags=["-DOCEAN_BENCH"])
    bench = plain.functions.ocean_bench
    bench.restype, bench.argtypes = None, [ocean.POINTER, *[ocean.INT] * 2, ocean.POINTER, *[ocean.INT] * 3]

    probe = library.create(num_envs, settings=settings)
    rng = np.random.default_rng(0)
    shape = (HORIZON, probe.num_agents)
    dims = probe.action_dims
    if probe.action_heads:
        actions = np.stack([rng.integers(0, n, shape, dtype=np.int32) for n in probe.action_heads], axis=-1)
    else:
        actions = rng.uniform(-1, 1, (*shape, dims)).astype(np.float32)

    ours, rows, buffers = make(library, num_envs, 1, actions, settings)
    c_envs, _, c_buffers = make(plain, num_envs, 1, actions, settings)
    rolling, rolling_rows, rolling_buffers = make(library, num_envs, HORIZON, actions, settings)

    def python_path(envs, rows, steps):
        addresses = [row.ctypes.data for row in rows]
        for t in range(steps):
            envs.step(addresses[t % HORIZON])

    def c_loop(steps):
        bench(c_envs.address, num_envs, steps, actions.ctypes.data, HORIZON, probe.num_agents * dims, dims)

    python_path(ours, rows, 10 * HORIZON)
    c_loop(10 * HORIZON)
    assert np.array_equal(buffers[0], c_buffers[0]), f"{name}: the C loop and Envs.step see different observations"

    start = time.perf_counter()
    c_loop(HORIZON)
    steps = HORIZON * max(1, round(SECONDS / (time.perf_counter() - start)))
    ways = {
        "c": lambda: c_loop(steps),
        "python": lambda: python_path(ours, rows, steps),
        "rolling": lambda: python_path(rolling, rolling_rows, steps),
    }
    speeds = {way: [] for way in ways}
    for _ in range(REPEATS):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            speeds[way].append(steps * probe.num_agents / (time.perf_counter() - start))
    assert np.isfinite(rolling_buffers[0]).all()
    result = {way: statistics.median(values) for way, values in speeds.items()}
    return {**result, "ratio": statistics.median(p / c for p, c in zip(speeds["python"], speeds["c"], strict=True))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4096, help="agents of all environments together, about")
    parser.add_argument("--only", nargs="+", help="some environments (default, and with --all: all of them)")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--setting", nargs="+", default=[], help="name=value, where not the default")
    arguments = parser.parse_args()
    settings = {key: json.loads(value) for key, value in (pair.split("=") for pair in arguments.setting)}
    results = {}
    print(f"million agent steps a second on one core, {arguments.agents} agents, median of {REPEATS}")
    print(f"{'':15s} {'C loop':>8s} {'Python':>8s} {'ratio':>7s} {'64 rows':>8s}")
    for name in arguments.only or ocean.names():
        result = results[name] = measure(name, arguments.agents, settings)
        c, python, rolling = (result[way] / 1e6 for way in ("c", "python", "rolling"))
        print(f"{name:15s} {c:8.1f} {python:8.1f} {result['ratio']:7.3f} {rolling:8.1f}", flush=True)
    print(json.dumps({"agents": arguments.agents, "agent_steps_per_second": results}))


if __name__ == "__main__":
    main()
