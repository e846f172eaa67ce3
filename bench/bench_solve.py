"""Measure steps and seconds until each environment is solved, by the command.

    python bench/bench_solve.py                           # all with seed 0, in sequence
    python bench/bench_solve.py --only pong maze --seeds 0 1 2
    python bench/bench_solve.py --only breakout --options --train.precision bfloat16

Trains each in a separate process (`pufferl.py train NAME`, to the end of its schedule) and reads
its metrics. An environment is solved at the first entry whose episodes, those of the last tenth of
a second, reach on average the value in [solved] of its .ini: a score, in the sanity suite a perf.
Seconds count from the trainer's first step, two seconds after the command where its kernels are
cached; "end" is the mean of the last twentieth of the entries. The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))
import test_ocean_learning as learning

import diagnostics
import pufferl

ROW = "{:16} {:>4} {:>9} {:>9} {:>8} {:>10} {:>7} {:>9} {:>8}"


def train(name, seed, options):
    """Return the entries of the metrics of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, pufferl.__file__, "train", name, "--data-dir", folder,
                   "--train.seed", str(seed), "--train.log-interval", "0.1", "--logger",
                   "none", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        return diagnostics.read_metrics(next(Path(folder).glob("*/metrics.jsonl")))


def summary(name, entries):
    """Return the figures of one run.

    {"threshold", "steps" and "seconds" to it (None: never), "end_steps", "end_seconds", "score",
    "perf"}.
    """
    metric, threshold = learning.SOLVED[name].metric
    key = f"environment/{metric}"
    first = next((entry for entry in entries if entry.get(key, -float("inf")) >= threshold), {})
    last = [entry for entry in entries if "environment/n" in entry]
    last = last[-max(1, len(last) // 20) :]
    episodes = sum(entry["environment/n"] for entry in last)
    end = {kind: sum(entry[f"environment/{kind}"] * entry["environment/n"] for entry in last)
           / episodes
           for kind in ("score", "perf")}
    return {"threshold": threshold, "steps": first.get("step"),
            "seconds": first.get("performance/uptime"),
            "end_steps": entries[-1]["step"],
            "end_seconds": entries[-1]["performance/uptime"], **end}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(learning.SOLVED), metavar="NAME",
                        default=list(learning.SOLVED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[],
                        help="more options of pufferl.py train")
    arguments = parser.parse_args()
    results = {}
    print(ROW.format("environment", "seed", "threshold", "M steps", "seconds", "M, to end",
                     "seconds", "score", "perf"))
    for name in arguments.only:
        for seed in arguments.seeds:
            result = summary(name, train(name, seed, arguments.options))
            results.setdefault(name, {})[seed] = result
            reached = ("never", "") if result["steps"] is None else (
                f"{result['steps'] / 1e6:.2f}", f"{result['seconds']:.1f}")
            print(ROW.format(name, seed, f"{result['threshold']:g}", *reached,
                             f"{result['end_steps'] / 1e6:.1f}",
                             f"{result['end_seconds']:.1f}", f"{result['score']:.4g}",
                             f"{result['perf']:.3f}"),
                  flush=True)
    print(json.dumps({"benchmark": "solve", "cores": os.cpu_count(), "environments": results}))


if __name__ == "__main__":
    main()
