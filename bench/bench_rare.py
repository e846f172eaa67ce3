"""Measure learning where reward is rare: the games of rare_rewards.py.

    python bench/bench_rare.py                                       # all games, five seeds
    python bench/bench_rare.py --only push_box lock --seeds 0 1 --steps 300_000
    python bench/bench_rare.py --set train.ent_coef=0.05             # screens a setting
    python bench/bench_rare.py --only gym/FrozenLake8x8-v1 --jobs 2  # a public environment; two runs at once

A score is the mean return of the episodes that ended in the last tenth of the steps, of the policy as it explores,
normalised between random play's (0) and the best (1). Those two are exact: dynamic programming over the game's tables,
or over Gymnasium's for FrozenLake. MiniGrid's are 1,000 random episodes, and 1 less the steps of a good way. The last
line is JSON.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
from rare_rewards import GAMES, tables_of

ROOT = Path(__file__).resolve().parent.parent
BINS = 20
# the public ones, with what a good policy earns; None: computed
PUBLIC = {"gym/FrozenLake8x8-v1": None, "gym/MiniGrid-DoorKey-6x6-v0": 0.96, "gym/MiniGrid-FourRooms-v0": 0.8,
          "gym/MiniGrid-LavaGapS6-v0": 0.95, "gym/MiniGrid-KeyCorridorS3R1-v0": 0.95,
          "gym/MiniGrid-UnlockPickup-v0": 0.95}


def frozen_lake():
    """Return the facts of FrozenLake8x8, as Tables.facts, from its table of chances."""
    env = gymnasium.make("FrozenLake8x8-v1")
    table, length = env.unwrapped.P, env.spec.max_episode_steps

    def score(choose):
        value = np.zeros(len(table))
        for _ in range(length):
            value = np.array([choose([sum(p * (reward + (0.0 if end else value[after]))
                                          for p, after, reward, end in table[s][a]) for a in range(4)])
                              for s in range(len(table))])
        return float(value[0])

    return {"random": score(np.mean), "success": score(np.mean), "best": score(np.max)}


def sampled(name, best, episodes=1000):
    """Return the facts of an environment without a table, from random episodes."""
    if "MiniGrid" in name:
        import minigrid  # noqa: F401  registers its environments

    env, returns = gymnasium.make(name.removeprefix("gym/")), []
    env.action_space.seed(0)
    for episode in range(episodes):
        env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return {"random": statistics.mean(returns), "success": float(np.mean(np.array(returns) > 0)), "best": best}


@functools.cache
def facts_of(name):
    if name in GAMES:
        return tables_of(name).facts
    return frozen_lake() if "FrozenLake" in name else sampled(name, PUBLIC[name])


def run(name, seed, steps, settings):
    """Train on one core; returns score, entropy, curve and seconds."""
    environment = f"{ROOT}/bench/rare_rewards.py:make_{name}" if name in GAMES else name
    options = [word for setting in settings for word in ("--" + setting.replace("_", "-")).split("=", 1)]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, f"{ROOT}/pufferl.py", "train", environment, "--train.total-timesteps", str(steps),
             "--train.seed", str(seed), "--train.log-interval", "0.2", "--logger", "none", "--data-dir", folder,
             *options], capture_output=True, text=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        entries = [json.loads(line) for path in Path(folder).glob("*/metrics.jsonl") for line in path.open()]
    entries = [entry for entry in entries if entry.get("environment/n")]
    bins = [[entry for entry in entries if min(BINS - 1, (entry["step"] - 1) * BINS // entries[-1]["step"]) == b]
            for b in range(BINS)]
    curve = [round(mean(part), 4) if part else None for part in bins]
    last = [entry for entry in entries if entry["step"] > 0.9 * entries[-1]["step"]]
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    return {"score": mean(last), "entropy": last[-1].get("losses/entropy"), "curve": curve,
            "seconds": round(seconds, 1), "warnings": warnings}


def mean(entries):
    count = sum(entry["environment/n"] for entry in entries)
    return sum(entry["environment/episode_return"] * entry["environment/n"] for entry in entries) / count


def normalise(score, facts):
    return (score - facts["random"]) / (facts["best"] - facts["random"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*GAMES, *PUBLIC], metavar="NAME", default=list(GAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--set", nargs="+", default=[], metavar="train.x=y")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    a = parser.parse_args()
    row = "{:30} {:>7} {:>8} {:>7} {:>8} {:>8} {:>8} {:>8}  {}"
    print(row.format("game", "success", "random", "best", "score", "norm.", "entropy", "seconds", "norm. by seed"))
    games = {}
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        runs = {name: [pool.submit(run, name, seed, a.steps, a.set) for seed in a.seeds] for name in a.only}
        for name, futures in runs.items():
            facts, results = facts_of(name), [future.result() for future in futures]
            each = [normalise(result["score"], facts) for result in results]
            average = {key: statistics.mean(result[key] for result in results)
                       for key in ("score", "entropy", "seconds")}
            print(row.format(name, f"{facts['success']:.2%}", f"{facts['random']:.3f}", f"{facts['best']:.3f}",
                             f"{average['score']:.3f}", f"{statistics.mean(each):.2f}", f"{average['entropy']:.2f}",
                             f"{average['seconds']:.0f}", " ".join(f"{x:.2f}" for x in each)), flush=True)
            games[name] = facts | {"normalised": each, "runs": dict(zip(map(str, a.seeds), results, strict=True))}
    print(json.dumps({"benchmark": "rare", "steps": a.steps, "set": a.set, "games": games}))


if __name__ == "__main__":
    main()
