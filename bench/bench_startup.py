"""Measure the parts of `python pufferl.py train breakout` up to its first update.

    python bench/bench_startup.py [--env breakout] [--warm 3]
    python bench/bench_startup.py --beside ../other       # whole commands, next to another checkout

Runs in a copy of the tracked files: the first start has no compiled environment, no compiled kernel
and no bytecode (cold), the next ones have all of them (warm; the median of each part). Wall
seconds, and processor seconds in brackets: on a busy machine only the latter are meaningful.
--beside: processor seconds of whole commands, warm, interleaved in copies of both. The last line of
the output is one JSON object.
"""

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent

CHILD = """
import json, os, sys, time
marks, begun = [], float(sys.argv[1])
def mark(name):
    used = os.times()
    marks.append((name, time.time() - begun, used.user + used.system + used.children_user + used.children_system))
def wrap(owner, name, label, last=False):
    function = getattr(owner, name)
    def wrapped(*a, **k):
        mark("first minibatch, its kernels" if last else "between")
        result = function(*a, **k)
        mark(label)
        if last:
            print(json.dumps(marks), flush=True)
            os._exit(0)
        return result
    setattr(owner, name, wrapped)
mark("interpreter")
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
import torch
mark("import torch")
import numba
mark("import numba")
import gymnasium
mark("import gymnasium")
import pufferl
mark("import the rest")
wrap(pufferl, "load_config", "settings, the environment's library")
wrap(pufferl, "load_env", "environments")
wrap(pufferl, "load_policy", "policy")
wrap(pufferl.PuffeRL, "__init__", "trainer")
wrap(pufferl.loggers, "make_logger", "logger")
wrap(pufferl.PuffeRL, "evaluate", "first rollout, its kernels")
wrap(pufferl.PuffeRL, "_step_optimizer", "first update", last=True)
pufferl.main(["train", sys.argv[2], "--data-dir", sys.argv[3]])
"""


@dataclass
class Arguments:
    env: str = "breakout"
    """A C environment."""
    warm: int = 3
    """Warm starts after the cold one."""
    beside: Path | None = None
    """Another checkout, whose commands take turns with this one's."""


def start(copy, env):
    """Return {part: (wall seconds, processor seconds)} of one start."""
    now = [sys.executable, "-c", "import time; print(time.time())"]
    begun = subprocess.run(now, capture_output=True, text=True, check=True).stdout.strip()
    child = [sys.executable, "-c", CHILD, begun, env, str(copy / "experiments")]
    done = subprocess.run(child, cwd=copy, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    parts, wall_before, used_before = {}, 0.0, 0.0
    for name, wall, used in json.loads(done.stdout.splitlines()[-1]):
        old = parts.get(name, (0.0, 0.0))
        parts[name] = old[0] + wall - wall_before, old[1] + used - used_before
        wall_before, used_before = wall, used
    return parts | {"all": (wall_before, used_before)}


COMMANDS = {
    "train ENV --help": ["train", "ENV", "--help"],
    "train ENV, one epoch": ["train", "ENV", "--train.total-timesteps", "1", "--logger", "none"],
    "eval ENV, one episode": ["eval", "ENV", "--baseline", "--eval.episodes", "1"],
}


def copy_of(project, copy):
    """Copy a checkout's tracked files without pages and tests; return the folder."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=project, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (project / name).is_file() and not name.startswith(("docs/", "tests/", "bench/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project / name, copy / name)
    return copy


def processor_seconds(copy, command, env):
    """Measure a whole command, with all that it starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "pufferl.py", *(env if word == "ENV" else word for word in command)]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(a, folder):
    """Print a table of the commands of both checkouts."""
    copies = [copy_of(project, folder / name)
              for name, project in (("ours", ROOT), ("theirs", a.beside.resolve()))]
    rows = {}
    for name, command in COMMANDS.items():
        for copy in copies:  # compiles
            processor_seconds(copy, command, a.env)
        runs = [[processor_seconds(copy, command, a.env) for copy in copies] for _ in range(a.warm)]
        ours, theirs = (statistics.median(column) for column in zip(*runs, strict=True))
        rows[name] = ours, theirs, statistics.median(one / other for one, other in runs)
    print(f"processor seconds, medians of {a.warm} in turns; {a.env}\n")
    print(f"{'':24} {'this':>8} {'other':>8} {'ratio':>7}")
    for name, (ours, theirs, ratio) in rows.items():
        print(f"{name:24} {ours:>8.2f} {theirs:>8.2f} {ratio:>7.2f}", flush=True)
    print(json.dumps({"benchmark": "startup", "env": a.env, "beside": rows}))


def main():
    a = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        if a.beside is not None:
            return compare(a, Path(folder))
        copy = copy_of(ROOT, Path(folder) / "copy")
        cold = start(copy, a.env)
        runs = [start(copy, a.env) for _ in range(a.warm)]
    warm = {name: tuple(statistics.median(run[name][i] for run in runs) for i in (0, 1))
            for name in runs[0]}
    print(f"python pufferl.py train {a.env}: seconds (processor seconds) until its first update\n")
    print(f"{'':38} {'cold':>16} {'warm':>16} {'share':>6}")
    for name, (wall, used) in warm.items():
        first, second = (f"{x:.2f} ({y:.2f})" for x, y in (cold[name], (wall, used)))
        print(f"{name:38} {first:>16} {second:>16} {wall / warm['all'][0]:>6.0%}")
    print(json.dumps({"benchmark": "startup", "env": a.env, "cold": cold, "warm": warm}))


if __name__ == "__main__":
    main()
