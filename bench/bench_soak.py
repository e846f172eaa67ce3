"""Check that memory, files, threads and processes do not grow over time.

    python bench/bench_soak.py                        # an hour
    python bench/bench_soak.py --minutes 20 --nice 10

Four programs run at the same time: a C environment that is trained with a checkpoint and a log
entry every few seconds, CartPole in two worker processes, one process that evaluates repeatedly,
and the page, from which a client requests pictures and to which it sends commands. Counted are each
program and its children; memory is the proportional set size, so that shared memory counts once. A
tenth of the time is a warm-up; the first third of the rest is compared with the last. Exit code 1
if something has grown, if a program has ended by itself, or if one survives SIGTERM for a minute.
The last line of the output is one JSON object.
"""

import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
PUFFERL = [sys.executable, "-u", str(ROOT / "pufferl.py")]
FOREVER = ["--train.total-timesteps", "1000000000000", "--vec.num-threads", "1",
           "--train.log-interval", "2"]
AGAIN = """
import contextlib, io, signal, sys
sys.path.insert(0, sys.argv[1])
import pufferl
from tools import watch
print("evaluates", flush=True)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
while not told:
    with contextlib.redirect_stdout(io.StringIO()):
        for name in ("squared", "gym/CartPole-v1"):
            more = ["--baseline"] if name == "squared" else ["--vec.backend", "serial"]
            watch.evaluate(name, pufferl.load_config(name, [*more, "--eval.episodes", "16"]))
"""
PROGRAMS = {  # and the words after which each has begun
    "train squared": ([*PUFFERL, "train", "squared", "--env.num-envs", "256", *FOREVER,
                       "--train.checkpoint-interval", "100"], "run folder"),
    "train CartPole, 2 workers": ([*PUFFERL, "train", "gym/CartPole-v1", "--vec.backend",
                                   "multiprocessing",
                                   "--vec.num-envs", "8", "--vec.num-workers", "2",
                                   "--train.horizon", "64", "--train.replay-ratio", "1", *FOREVER,
                                   "--train.checkpoint-interval", "50"],
                                  "run folder"),
    "evaluate again and again": ([sys.executable, "-u", "-c", AGAIN, str(ROOT)], "evaluates"),
    "page": ([*PUFFERL, "eval", "squared", "--baseline", "--eval.web", "--eval.port", "0"],
             "http://127.0.0.1:"),
}
COUNTED = {"memory, MiB": (1.05, 4.0), "descriptors": (1, 2), "threads": (1, 1),
           "processes": (1, 0)}
# The most that the last third may have: so many times the first third's median, and so much more.


@dataclass
class Arguments:
    minutes: float = 60.0
    """How long, the warm-up included."""
    every: float = 5.0
    """Seconds between two counts."""
    nice: int = 0
    """How far the programs stand back behind others on this machine."""


def count(process):
    """Return the counts of a program and its children, in the order of COUNTED."""
    sums = [0.0, 0, 0, 0]
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # one that has just ended
            with one.oneshot():
                usage = (one.memory_full_info().pss / 2**20, one.num_fds(), one.num_threads(), 1)
            sums = [total + number for total, number in zip(sums, usage, strict=True)]
    return sums


class Stranger:
    """Who looks at the page: asks for its state, pictures included, and gives orders."""

    ORDERS = ({"pause": True}, {"step": 3}, {"pause": False}, {"speed": 4}, {"seed": 5},
              {"deterministic": True},
              {"policy": "untrained"}, {"policy": "baseline"}, {"agent": 0})

    def __init__(self, port):
        self.port, self.asked = port, 0

    def ask(self):
        """Eleven requests, each with a connection of its own, one of them an order."""
        for number in range(11):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            if number < 10:
                connection.request("GET", "/state?after=-1" if number else "/")
            else:
                order = self.ORDERS[self.asked // 11 % len(self.ORDERS)]
                connection.request("POST", "/order", json.dumps(order),
                                   {"Content-Type": "application/json"})
            status = connection.getresponse().status
            assert status in (200, 204), f"the page answers {status}"
            connection.close()
            self.asked += 1


def begin(name, folder, nice):
    """Start a program; return (its psutil.Popen, the line that reports its start)."""
    command, word = PROGRAMS[name]
    path = folder / f"{len(list(folder.iterdir()))}.txt"
    with open(path, "w") as output:
        process = psutil.Popen(["nice", "-n", str(nice), *command], cwd=folder, stdout=output,
                               stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while word not in path.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{name} has not begun:\n{path.read_text()}")
        time.sleep(0.2)
    return process, next(line for line in path.read_text().splitlines() if word in line)


def end(process):
    """End a program; return (exit code, processes left a minute after SIGTERM).

    Those are killed.
    """
    everyone = [process, *process.children(recursive=True)]
    process.terminate()  # no Ctrl-C: what is started in the background is born without
    left = psutil.wait_procs(everyone, timeout=60)[1]
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    return process.wait(), len(left)


def soak(a, folder):
    """Return ({program: [counts]}, faults)."""
    running, wrong, counts = {}, [], {name: [] for name in PROGRAMS}
    try:
        for name in PROGRAMS:
            running[name], line = begin(name, folder, a.nice)
        stranger = Stranger(int(line.split("127.0.0.1:")[1].split()[0]))
        began = time.monotonic()
        while (gone := time.monotonic() - began) < 60 * a.minutes and not wrong:
            stranger.ask()
            for name, process in running.items():
                if process.poll() is not None:
                    wrong.append(f"{name} has ended by itself with {process.returncode}")
                elif gone > 6 * a.minutes:
                    counts[name].append(count(process))
            time.sleep(a.every)
        print(f"{stranger.asked:,} requests to the page")
    finally:
        for name, process in running.items():
            code, left = end(process)
            if code or left:
                wrong.append(f"{name} ended with {code} after SIGTERM, {left} processes left")
    written = {path.parent.name: len(path.read_text().splitlines())
               for path in folder.glob("experiments/*/metrics.jsonl")}
    print("log entries:", ", ".join(f"{name} {number:,}" for name, number in written.items()))
    return counts, wrong


def main():
    a = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = soak(a, Path(folder))
    figures = {}
    print(f"\n{a.minutes:g} minutes, medians of the first third after the warm-up -> of the "
          "last (the most)\n")
    print(f"{'':27}" + "".join(f"{name:>26}" for name in COUNTED))
    for name, rows in counts.items():
        cells = []
        for column, (label, (times, more)) in zip(zip(*rows, strict=True), COUNTED.items(),
                                                 strict=False):
            third = max(1, len(column) // 3)
            first, last = statistics.median(column[:third]), statistics.median(column[-third:])
            cells.append(f"{first:,.0f} -> {last:,.0f} ({max(column):,.0f})")
            figures.setdefault(name, {})[label] = [first, last, max(column)]
            if last > times * first + more:
                wrong.append(f"{name}: {label} has grown from {first:,.1f} to {last:,.1f}")
        print(f"{name:27}" + "".join(f"{cell:>26}" for cell in cells))
    print("\n" + ("\n".join(wrong) if wrong else "nothing has grown, and nothing is left"))
    print(json.dumps({"benchmark": "soak", "minutes": a.minutes,
                      "counts": len(next(iter(counts.values()))),
                      "wrong": wrong, **figures}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
