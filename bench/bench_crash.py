"""Kill runs at random moments and fill disks; check what is lost or left running.

    python bench/bench_crash.py                                   # 200 kills, 100 disks
    python bench/bench_crash.py --kills 40 --disks 0 --kinds squared ranks --seed 3

Four kinds of run: squared (in C), CartPole in two worker processes, squared on two ranks, and a
sweep of two trials at a time. Each runs once undisturbed. Then it starts in an empty folder, is
killed (kill -9) at a random moment between its first instruction and its end, and resumed, until it
ends by itself; then it starts again, until all kills are used. After each kill no process may be
left after ten seconds, every checkpoint must be whole, and no more than a checkpoint interval may
be lost. At the end squared's curve and weights, of one process and of two ranks, must equal those
of the undisturbed run bit for bit. CartPole's environments are in Python and begin new episodes, so
only the steps of its curve are compared. A sweep must have each trial once, and finished trials may
not change.

The disks are file systems in memory (which takes the right to mount) of random sizes, from one page
to one and a half times what a run needs. The run must end with 0 and a checkpoint of its end, or
with 1, a message with the reason and no traceback; all checkpoints must be whole.

Runs of one process are forked from one that has imported everything, as in fuzz.py; every fifth is
a command. The last line of the output is one JSON object.
"""

import contextlib
import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Before torch: a process that is forked while torch's threads exist would wait for them for ever.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

import fuzz  # noqa: E402

# isort: split
import psutil  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

import runs  # noqa: E402
from tools.sweep.trials import Ledger  # noqa: E402

INTERVAL = 2  # epochs between checkpoints
OFTEN = ["--train.checkpoint-interval", str(INTERVAL), "--train.log-interval", "0",
         "--logger", "none"]
SQUARED = ["train", "squared", "--env.num-envs", "64", "--train.minibatch-size", "1024",
           "--vec.num-threads", "1", "--vec.num-buffers", "1", *OFTEN]
COMMANDS = {
    "squared": [*SQUARED, "--train.total-timesteps", str(50 * 4096)],
    "workers": ["train", "gym/CartPole-v1", "--vec.backend", "multiprocessing",
                "--vec.num-envs", "8",
                "--vec.num-workers", "2", "--train.horizon", "64", "--train.replay-ratio", "1",
                "--vec.num-threads", "1", *OFTEN, "--train.total-timesteps", str(40 * 512)],
    "ranks": [*SQUARED, "--train.gpus", "2", "--train.total-timesteps", str(50 * 8192)],
    "sweep": ["sweep", "squared", "--env.num-envs", "512", "--vec.num-threads", "1",
              "--sweep.workers", "2",
              "--sweep.num-trials", "4", "--sweep.logger", "none", "--sweep.early-stop", "0",
              "--sweep.train.total-timesteps.min", "5e4",
              "--sweep.train.total-timesteps.max", "2e5",
              "--sweep.train.total-timesteps.mean", "1e5"],
}
EPOCH = {"squared": 4096, "workers": 512, "ranks": 8192}
# of the kills: starts of the last two take long
SHARE = {"squared": 0.6, "workers": 0.2, "ranks": 0.1, "sweep": 0.1}
LIMIT = 600  # seconds that a run may take


@dataclass
class Arguments:
    kills: int = 200
    """Of all kinds together."""
    disks: int = 100
    """Sizes of a disk."""
    kinds: tuple[str, ...] = tuple(COMMANDS)
    """Kinds of run that are killed."""
    seed: int = 0
    """Of the moments and the sizes."""
    seconds: float = math.inf
    """After so many no new kill and no new disk is begun."""


# --------------------------------------------------------------------------------------------------
# Kills


def ended(process, seconds):
    """Return a process's exit code (minus the signal), or None if it still runs.

    It waits for so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def left(seconds=10.0):
    """Kill what this process and its children have left running; return the commands."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ChildProcessError):  # orphans come to this process
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        others = psutil.Process().children(recursive=True)
        if not others or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    names = []
    for one in others:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(one.cmdline())[-100:])
            one.kill()
    return names


def run_of(folder):
    """Return the one run's folder, or None if there is none."""
    result = list(folder.glob("experiments/*"))
    assert len(result) <= 1, f"there are {len(result)} runs"
    return result[0] if result else None


def entries(run):
    """Return the whole entries of a run's metrics.jsonl; the last line may be torn."""
    path = run / "metrics.jsonl"
    *whole, _ = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in whole]


def curve(run):
    """Return what a run logs without times, which an undisturbed run equals."""
    return [{name: value for name, value in entry.items() if not name.startswith("performance/")}
            for entry in entries(run)]


def check_whole(folder):
    """Check that every finished file can be read; return the number of whole runs."""
    states = list(folder.glob("**/trainer_state.pt"))
    for path in states:
        runs.load(path, runs.whole_run)
        json.loads(path.with_name("config.json").read_text())
    for path in folder.glob("**/model_*.pt"):
        runs.load(path)
    return len(states)


def resumed(kind, folder):
    """Return the command that starts or resumes a run."""
    command = list(COMMANDS[kind])
    run = None if kind == "sweep" else run_of(folder)
    if kind != "sweep" and run is not None and (run / "trainer_state.pt").exists():
        command += ["--resume", "latest"]
    elif run is not None:  # killed before there was a checkpoint
        for path in run.iterdir():
            path.unlink()
        run.rmdir()
    return [*command, "--data-dir", str(folder / "experiments")]


def trials(folder):
    """Return {number: result as text} of a sweep's finished trials."""
    return {path.name: path.read_text()
            for path in folder.glob("experiments/sweep_*/trials/*.json")}


def check_end(kind, folder, reference):
    """Compare a finished run with the undisturbed one."""
    if kind == "sweep":
        results = Ledger(next(folder.glob("experiments/sweep_*"))).results()
        statuses = {number: result["status"] for number, result in results.items()}
        assert statuses == dict.fromkeys(range(4), "done"), (
            f"trials that are missing or not done: {statuses}")
        for number in range(4):
            assert len(list(folder.glob(f"experiments/sweep_*/runs/{number:05d}/*/config.json"))) == 1
        return
    ours, theirs = run_of(folder), run_of(reference)
    assert not list(ours.glob("*.part")), "a half-written file is left"
    mine, expected = curve(ours), curve(theirs)
    assert [entry["step"] for entry in mine] == [entry["step"] for entry in expected], (
        "a step is missing or twice")
    if kind == "workers":
        return
    for one, other in zip(mine, expected, strict=True):
        assert json.dumps(one) == json.dumps(other), (
            f"the curve differs at step {one['step']}: {one} {other}")
    final = [torch.load(max(run.glob("model_*.pt")), weights_only=True) for run in (ours, theirs)]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[1]), (
        "the weights differ")


def run_through(kind, folder, typed):
    """Run to the end without a kill; returns its seconds."""
    folder.mkdir()
    begun = time.monotonic()
    code = ended(fuzz.start(folder, resumed(kind, folder), typed), LIMIT)
    output = (folder / "stderr").read_text()
    assert code == 0, f"{kind} ended with {code}:\n{output}"
    return time.monotonic() - begun


class Kills:
    """One kind of run and its kills.

    `count` kills, `whole` runs that ended by themselves after some.
    """

    def __init__(self, kind, here, draw):
        self.kind, self.here, self.draw = kind, here, draw
        # they start processes that a fork of this one could not
        self.alone = kind in ("ranks", "sweep")
        here.mkdir()
        self.reference = here / "undisturbed"
        self.seconds = [run_through(kind, self.reference, self.alone)]
        if not self.alone:
            self.seconds.append(run_through(kind, here / "typed", True))
        self.count, self.whole, self.folder, self.starts = 0, 0, None, 0

    def once(self):
        """Start or resume the run, and kill it.

        Raises AssertionError or ConfigError for a fault.
        """
        if self.folder is None:
            self.folder = self.here / f"killed {self.whole}"
            self.folder.mkdir()
        folder, typed = self.folder, self.alone or self.starts % 5 == 4
        self.starts += 1
        begun = entries(run_of(folder)) if self.kind != "sweep" and run_of(folder) else []
        before = trials(folder)
        command = resumed(self.kind, folder)
        for name in ("stdout", "stderr"):
            (folder / name).unlink(missing_ok=True)
        process = fuzz.start(folder, command, typed)
        code = ended(process, self.draw.uniform(0, self.seconds[-1 if typed else 0]))
        if code is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            self.count += 1
        others = left()
        assert not others, f"left running: {others}"
        check_whole(folder)
        self.check_loss(folder, begun, code)
        assert all(trials(folder).get(name) == text for name, text in before.items()), (
            "a trial's result has changed")
        if code is not None:
            assert code == 0, f"it ended with {code}: {(folder / 'stderr').read_text()[-500:]}"
            check_end(self.kind, folder, self.reference)
            self.whole, self.folder = self.whole + 1, None

    def check_loss(self, folder, begun, code):
        """At most an interval of what had been logged before is lost."""
        output = (folder / "stdout").read_text() if (folder / "stdout").exists() else ""
        if begun and "at step " in output:
            at = int(output.split("at step ")[1].split()[0].replace(",", ""))
            lost = begun[-1]["step"] - at
            assert lost <= INTERVAL * EPOCH[self.kind], f"{lost:,} steps were lost"

    def finish(self):
        """Let the last one end."""
        if self.folder is not None:
            code = ended(fuzz.start(self.folder, resumed(self.kind, self.folder), self.alone),
                         LIMIT)
            assert code == 0, f"it ended with {code}: {(self.folder / 'stderr').read_text()[-500:]}"
            assert not left()
            check_end(self.kind, self.folder, self.reference)
            self.whole, self.folder = self.whole + 1, None


def kill_all(a, here, until):
    """Return {kind: (kills, finished runs, [faults])}."""
    result = {}
    for kind in a.kinds:
        kills, wrong = Kills(kind, here / kind, random.Random(f"{a.seed} {kind}")), []
        share = SHARE[kind] / sum(SHARE[one] for one in a.kinds)
        most = max(1, round(a.kills * share))
        until_here = time.monotonic() + (until - time.monotonic()) * share / sum(
            SHARE[one] / sum(SHARE[two] for two in a.kinds)
            for one in a.kinds[a.kinds.index(kind) :])
        try:
            while kills.count < most and time.monotonic() < until_here:
                kills.once()
            kills.finish()
        except (AssertionError, ValueError) as error:
            wrong.append(f"{kind}, kill {kills.count}: {error}")
        left()
        result[kind] = kills.count, kills.whole, wrong
        print(f"{kind:10} {kills.count:4} kills, {kills.whole} finished runs; "
              f"{kills.seconds[0]:.1f} s undisturbed; {wrong or 'nothing wrong'}", flush=True)
    return result


# --------------------------------------------------------------------------------------------------
# Full disks

ON_DISK = [*SQUARED[:-2], "--train.total-timesteps", str(40 * 4096)]


@contextlib.contextmanager
def disk(folder, size):
    """Mount a file system of `size` bytes in memory.

    Raises OSError if the user has no right to.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def on_disk(here, size, logger):
    """Return (exit code, fault or None) of a run on a disk of that size."""
    here.mkdir()
    with disk(here / "disk", size) as folder:
        code = ended(fuzz.start(here, [*ON_DISK, "--logger", logger, "--data-dir", str(folder)], False), LIMIT)
        others = left()
        output = (here / "stderr").read_text()
        lines = [line for line in output.splitlines() if line.strip()]
        last = " ".join(lines[-2:])  # the error, and how to continue
        try:
            whole = check_whole(folder)
        except ValueError as error:
            return code, f"not whole: {error}"
        epochs = [runs.load(path, runs.whole_run)["epoch"]
                  for path in folder.glob("*/trainer_state.pt")]
        for wrong, label in (
                (others, f"left running: {others}"),
                (code not in (0, 1), f"it ended with {code}: {output[-300:]}"),
                ("Traceback" in output, f"a traceback: {last}"),
                (list(folder.glob("*/*.part")), "a part is left"),
                (code == 0 and epochs != [40], f"it ended with 0 and the checkpoints {epochs}"),
                (code == 1
                 and not ("cannot write the run's folder" in last or "was not written" in last),
                 f"it does not say why: {last}"),
                (whole == 0 and "was not written" in last, "the first checkpoint is gone")):
            if wrong:
                return code, label
    return code, None


def fill_disks(a, here, until):
    """Return ({exit code: count}, [faults], the bytes that a run needs)."""
    draw, counts, wrong = random.Random(f"{a.seed} disks"), {}, []
    here.mkdir()
    try:
        with disk(here / "large", 1 << 30) as folder:
            run = [*ON_DISK, "--logger", "tensorboard", "--data-dir", str(folder)]
            code = ended(fuzz.start(here, run, False), LIMIT)
            needed = sum(4096 * -(-path.stat().st_size // 4096) for path in folder.rglob("*")
                         if path.is_file())
            assert code == 0, (here / "stderr").read_text()
    except OSError as error:
        print(f"no disks: {error}")
        return counts, wrong, 0
    for number in range(a.disks):
        if time.monotonic() > until:
            break
        size, logger = 4096 * draw.randrange(1, needed * 3 // 2 // 4096), draw.choice(["none", "tensorboard"])
        code, label = on_disk(here / str(number), size, logger)
        counts[code] = counts.get(code, 0) + 1
        if label:
            wrong.append(f"{size:,} bytes, logger {logger}: {label}")
            print(wrong[-1], flush=True)
    return counts, wrong, needed


def main():
    a = tyro.cli(Arguments, description=__doc__)
    # PR_SET_CHILD_SUBREAPER: whatever a killed run leaves becomes this process's child
    ctypes.CDLL(None).prctl(36, 1)
    began, result, full = time.monotonic(), {}, ({}, [], 0)
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        if a.disks:
            full = fill_disks(a, Path(folder, "disks"), began + a.seconds)
            print(f"disks      {sum(full[0].values()):4} sizes from 4 kB to 1.5 x "
                  f"{full[2]:,} bytes, exit codes {full[0]}; {len(full[1])} wrong", flush=True)
        if a.kills:
            result = kill_all(a, Path(folder), began + a.seconds)
    wrong = [*full[1], *(one for _, _, several in result.values() for one in several)]
    print(json.dumps({"benchmark": "crash", "seed": a.seed,
                      "kills": {kind: row[0] for kind, row in result.items()},
                      "ended": {kind: row[1] for kind, row in result.items()}, "disks": full[0],
                      "wrong": wrong, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
