"""A sweep: many training runs (trials), each a process, on one or more machines or a Ray cluster; and its report.

    python protein.py breakout --sweep.workers 2                   # two at a time
    python protein.py breakout --train.device cuda --sweep.gpus 8 --sweep.workers 2    # sixteen
    python protein.py breakout --sweep.ray auto                    # as many as the cluster has room for
    python protein.py breakout --sweep.web 8080                    # the page, live, at http://127.0.0.1:8080
    python protein.py report experiments/sweep_breakout            # front, predictions, effects, best settings
    python protein.py report experiments                           # ordinary runs side by side, by environment

A tuner of protein.py chooses the settings of each trial. A trial runs `pufferl.py train`; its curve tells the tuner
(cost, score). A sweep's whole state is its folder: any machine that can read it can continue the sweep, or help. The
report is one HTML file that needs no network; to add a figure, edit `sweep_figures` or `run_figures`. The file reads
in this order: ledger, one trial, where trials run, the sweep, the report, command line.
"""

import contextlib
import dataclasses
import functools
import html
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

import processes
import protein
import signs
from protein import Protein, SpaceError, front_of

# Our other files are imported within functions, because most import torch, and the report of a
# finished sweep does not need it.

ROOT = Path(__file__).resolve().parent
TRAINER = "pufferl.py"

# --------------------------------------------------------------------------------------------------
# The ledger: the files of the sweep's folder


class Ledger:
    """Trials of a sweep on disk, shared by all processes and machines that work on it.

        FOLDER/sweep.json             what is searched; a later start must ask for the same
        FOLDER/trials/00007.running   a claim: settings, owner, who touches the file while alive
        FOLDER/trials/00007.json      finished: settings, score, cost, curve; never changes
        FOLDER/runs/00007/            what `pufferl.py train` wrote, and its output

    Claims and results are made by link(2), which fails if the name exists. So a number has one owner, and its first
    result stays. If an owner died (seen at once on its own machine, elsewhere when its claim is LEASE seconds old), one
    process takes the claim over by renaming it to 00007.lost-TOKEN, and runs the trial again. Only one process can
    rename it, and meanwhile no other claims the number. An owner that finds another's claim leaves that alone.
    """

    LEASE = 60.0  # seconds without a touch after which a claim's owner counts as dead

    def __init__(self, folder):
        self.folder = Path(folder)
        self.trials = self.folder / "trials"
        self.trials.mkdir(parents=True, exist_ok=True)
        self.owner = {"host": host_identity(), "pid": os.getpid(), "born": processes.born(os.getpid())}
        self.token = f"{os.getpid():x}-{os.urandom(4).hex()}"  # unique; pids are used again
        self._results = {}

    def results(self):
        """{number: record} of all finished trials."""
        for path in self.trials.glob("*.json"):
            if int(path.stem) not in self._results:
                self._results[int(path.stem)] = read_whole(path, RECORD)
        return dict(sorted(self._results.items()))

    def claims(self):
        """{number: claim} of all trials that are running or wait to be run again."""
        found = {}
        for path in self._claimed():
            number = int(path.name[:5])
            if not (self.trials / f"{number:05d}.json").exists():
                with contextlib.suppress(OSError, ValueError):  # the file may vanish just now
                    found[number] = json.loads(path.read_text())
        return found

    def claim(self, number=0, below=None, **fields):
        """Claim the lowest free number from `number` on; returns the claim, a dict, or None if none is free `below`."""
        for at in itertools.count(number):
            if below is not None and at >= below:
                return None
            claim = {"attempts": 0, "settings": None, **fields, "trial": at, **self.owner, "token": self.token}
            result = self.trials / f"{at:05d}.json"
            if not result.exists() and self._appear(self._path(claim), claim):
                # The claim's file may be missing only because another process has just finished
                # this trial (it writes the result, then removes the claim) or is taking it over (it has
                # renamed the claim to .lost-...).
                free = not result.exists() and not any(self.trials.glob(f"{at:05d}.lost-*"))
                if free and self._ours(claim):
                    return claim
                self.drop(claim)

    def update(self, claim):
        """Write a changed claim to its file, if the file is still ours."""
        if self._ours(claim):
            write_json(self._path(claim), claim)

    def finish(self, claim, record):
        """Make `record` the trial's result; False, and nothing changes, if it has one already."""
        first = self._appear(self.trials / f"{claim['trial']:05d}.json", record)
        self.drop(claim)
        return first

    def drop(self, claim):
        """Remove a claim's file, if it is still ours."""
        if self._ours(claim):
            self._path(claim).unlink(missing_ok=True)

    def give_back(self, claim):
        """Make a claim of ours look abandoned, so that the next process takes it over."""
        self.update({**claim, "host": None})

    def take_over(self):
        """Take over a claim whose owner died: returns the claim, with one more attempt, or None."""
        for path in self._claimed():
            result = self.trials / f"{int(path.name[:5]):05d}.json"
            try:
                claim = json.loads(path.read_text())
                if result.exists():  # its owner died between the result and the claim's removal
                    if self._lost(path, claim):
                        path.unlink()
                    continue
                if not self._lost(path, claim):
                    continue
                mine = self.trials / f"{claim['trial']:05d}.lost-{self.token}"
                os.utime(path)  # its age tells others if we die before the new claim
                os.rename(path, mine)
                if json.loads(mine.read_text()) != claim:  # another took it over meanwhile
                    os.rename(mine, path)
                    continue
                if claim["settings"] is None:  # its owner died before it chose the settings
                    mine.unlink()
                    continue
                ours = {key: value for key, value in claim.items() if key != "at"}
                ours |= {**self.owner, "token": self.token, "attempts": claim["attempts"] + (claim["host"] is not None)}
                if not self._appear(self._path(claim), ours):
                    continue  # another process holds the name for a moment; LEASE decides
                mine.unlink(missing_ok=True)
            except (OSError, ValueError, KeyError):
                continue  # another process was faster
            kill_orphan(claim)
            return ours
        return None

    def beat(self):
        """Touch the files of our claims, to show that their owner is alive."""
        for claim in self.claims().values():
            if claim["token"] == self.token:
                with contextlib.suppress(OSError):
                    os.utime(self._path(claim))

    @contextlib.contextmanager
    def alive(self):
        """Within, a thread calls `beat`, because the main thread may have to wait for a minute, for
        example until runs have saved."""
        over = threading.Event()

        def beat():
            while not over.wait(self.LEASE / 6):
                self.beat()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _path(self, claim):
        return self.trials / f"{claim['trial']:05d}.running"

    def _claimed(self):
        return sorted([*self.trials.glob("*.running"), *self.trials.glob("*.lost-*")])

    def _ours(self, claim):
        """Whether the claim's file is still ours: not gone, and not another's."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._path(claim).read_text())["token"] == self.token
        return False

    def _lost(self, path, claim):
        waits, ours = claim["host"] is None, claim["host"] == self.owner["host"]
        if path.suffix == ".running" and (waits or ours):
            return waits or (claim["token"] != self.token and not is_alive(claim["pid"], claim["born"]))
        probe = self.trials / f".clock-{self.token}"  # a new file's time is the file system's clock
        probe.touch()
        age = probe.stat().st_mtime - path.stat().st_mtime
        probe.unlink()
        return age > self.LEASE

    def _appear(self, path, content):
        """Write a whole file under a name that must be free; False if it is not."""
        part = path.with_name(f"{path.name}.{self.token}.{threading.get_ident()}.part")
        write_json(part, content)
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True


RECORD = {"trial": int, "status": str, "settings": dict, "curve": list, "score": float | int | None,
          "cost": float | int | None, "steps": float | int, "error": str | None}
TOLD = {"asked": dict, "options": list, "space": dict}


def read_whole(path, kinds):
    """A JSON file of the ledger's folder; SpaceError if it is damaged or a field has another
    type."""
    try:
        found = json.loads(path.read_text())
        wrong = [key for key, kind in kinds.items() if not isinstance(found[key], kind)]
        if wrong:
            raise ValueError(f"{wrong[0]} is a {type(found[wrong[0]]).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpaceError(f"{path}: damaged ({type(error).__name__}: {error}). A trial without its file is run again; "
                         "sweep.json is written anew by the command that began the sweep.") from None
    return found


def host_identity():
    """A name for this machine, or for a container with process numbers of its own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return "/".join(parts)


def is_alive(pid, born):
    """Whether the process `pid` that was started at `born` still runs; pids are used again."""
    with contextlib.suppress(psutil.Error):
        return abs(processes.born(pid) - born) < 1.0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill_orphan(claim, patience=60.0):
    """End a dead owner's training process on this machine; at that death it was told to save."""
    child = claim.get("child")
    if not child or claim["host"] not in (None, host_identity()):
        return
    deadline = time.monotonic() + patience
    while is_alive(*child) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_alive(*child):
        psutil.Process(child[0]).kill()


def write_json(path, content):
    """Write a file under another name, sync and rename it, so that no one ever reads half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    with open(part, "w") as file:
        file.write(json.dumps(content, indent=1, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# --------------------------------------------------------------------------------------------------
# Trials: one training run in a process of its own


@dataclass
class Curve:
    """A training curve: entries of metrics.jsonl that have the metric, as arrays (n,), by steps."""

    step: np.ndarray
    score: np.ndarray
    cost: np.ndarray
    names: tuple = ()
    last: float = 0.0  # step of the last entry, with or without the metric
    last_cost: float = 0.0  # the cost in the last entry that has one

    @classmethod
    def read(cls, path, metric, cost="performance/uptime"):
        """Read metrics.jsonl, whose last line may be half written. A resumed run starts at its
        checkpoint's steps and seconds, so its entries replace those after that."""
        rows, names = [], {}
        text = Path(path).read_text(errors="replace") if Path(path).exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                values = (entry["step"], entry.get(metric), entry.get(cost))
                row = [float(value) if isinstance(value, int | float) else math.nan for value in values]
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue
            if not math.isfinite(row[0]):
                continue
            names |= dict.fromkeys(entry)
            while rows and rows[-1][0] >= row[0]:
                rows.pop()
            rows.append(row)
        columns = np.array(rows, dtype=float).reshape(-1, 3)
        known = np.isfinite(columns)
        costs = columns[known[:, 2], 2]
        return cls(*columns[known.all(1)].T, names=tuple(names), last=rows[-1][0] if rows else 0.0,
                   last_cost=costs[-1] if len(costs) else 0.0)

    def at(self, step, window):
        """(score, cost) at a step; score: the last `window` steps' mean, of one entry at least."""
        last = np.searchsorted(self.step, step, side="right")
        first = min(np.searchsorted(self.step, step - window, side="right"), last - 1)
        return float(self.score[first:last].mean()), float(self.cost[last - 1])

    def points(self, total, count):
        """[(progress, score, cost)]: points at `count` even places of the schedule of `total` steps, as far as the run
        came, the last where it ended. A score is the mean over the last tenth of the schedule."""
        if len(self.step) == 0:
            return []
        end = self.step[-1]
        steps = [total * i / count for i in range(1, count + 1) if self.step[0] <= total * i / count < end] + [end]
        return [(min(1.0, step / total), *self.at(step, total / 10)) for step in steps]


def hopeless(curve, total, rule):
    """Whether a running trial should be stopped: it is past `after` of its schedule but not near
    the end, and its score has not come `share` of the way from the floor to the best score of any
    trial at the same cost."""
    if not rule or len(curve.step) == 0 or not rule["after"] <= curve.step[-1] / total <= 0.9:
        return False
    score, cost = curve.at(curve.step[-1], total / 10)
    reached = [s for c, s in rule["front"] if c <= cost]
    return bool(reached) and rule["sign"] * score - rule["floor"] < rule["share"] * (max(reached) - rule["floor"])


def run_trial(job, stop=None, started=None):
    """Train once and return its outcome, a dict: status (done, stopped, failed, interrupted, or
    lost if another process ended it), score, cost, steps, curve, error, run.

    job: command, folder (None: a temporary one, removed afterwards), total (steps), metric, cost, downsample, rule (see
    `hopeless`), limit (seconds of cost after which it is stopped). stop: an Event that asks to save and leave. started:
    called with the process's (pid, creation time). This also runs as a Ray task, on any machine with these files.
    """
    begun, since = time.time(), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(job["folder"] or stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-")))
        folder.mkdir(parents=True, exist_ok=True)
        trainer = str(ROOT / job["trainer"])
        command = [sys.executable, trainer, *job["command"], "--data-dir", str(folder)]
        previous = newest_run(folder)
        if previous and (previous / "trainer_state.pt").exists():
            command += ["--resume", str(previous)]
        output = stack.enter_context(open(folder / "output.txt", "ab"))
        position = output.tell()
        # If this process is killed, the training run is told to save and stop.
        process = subprocess.Popen(processes.guarded(command), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                                   start_new_session=True, env={**os.environ, **job["env"]})
        try:
            if started:
                with contextlib.suppress(psutil.Error):
                    started((process.pid, processes.born(process.pid)))
            status = attend(process, folder, job, stop)
        except BaseException:
            end(process)
            raise
        text = (folder / "output.txt").read_bytes()[position:].decode(errors="replace")
        run = newest_run(folder)
        curve = curve_of(folder, job)
        points = curve.points(job["total"], job["downsample"])
        error = None
        if status == "done" and process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
            how = signal.Signals(-process.returncode).name
            status, error = "lost", f"it was killed ({how}), by somebody or because the machine ran out of memory"
        elif status == "done" and process.returncode != 0:
            status, error = "failed", explain(process.returncode, text)
        elif status == "done" and curve.last < job["total"]:
            status, error = "lost", f"it was told to stop at {100 * curve.last / job['total']:.0f}% by something else"
        elif status != "interrupted" and not points:
            status = "failed"
            absent = [name for name in (job["metric"], job["cost"]) if name not in curve.names] or [job["metric"]]
            error = (f"{' and '.join(absent)} was never logged as a number; there are: {', '.join(curve.names)}"
                     if curve.names else f"no metrics were logged: {explain(process.returncode, text)}")
        if run and status in ("done", "stopped"):  # a finished trial is never resumed, so only its model stays
            (run / "trainer_state.pt").unlink(missing_ok=True)
        score, cost = points[-1][1:] if points else (None, None)
        return {"status": status, "score": score, "cost": cost, "steps": float(curve.step[-1]) if points else 0.0,
                "curve": points, "error": error, "started": begun, "seconds": time.monotonic() - since,
                "run": str(run) if run and job["folder"] else None, "ran_on": socket.gethostname()}


def attend(process, folder, job, stop):
    """Wait for a training run. Returns done (it ended by itself), stopped (hopeless, or too dear) or interrupted."""
    begun = checked = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return "done"
        now = time.monotonic()
        if stop is not None and stop.is_set():
            end(process)
            return "interrupted"
        if now - checked < max(1.0, 0.02 * (now - begun)):  # reading a long log takes time
            continue
        checked = now
        curve = curve_of(folder, job)
        if len(curve.step):
            job.get("at", {}).update(progress=curve.step[-1] / job["total"], score=curve.score[-1])
        if curve.last_cost > job["limit"] or hopeless(curve, job["total"], job["rule"]):
            end(process)
            return "stopped"


def curve_of(folder, job):
    """The curve of the run in a trial's folder, empty before it has one."""
    return Curve.read((newest_run(folder) or folder) / "metrics.jsonl", job["metric"], job["cost"])


def end(process, patience=60.0):
    """Ask a training run to save and stop; kill it if it does not."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def newest_run(folder):
    """The run folder that `pufferl.py train` made in a trial's folder; None before it did."""
    runs = [path.parent for path in Path(folder).glob("*/config.json")]
    return max(runs, key=lambda run: run.stat().st_mtime) if runs else None


def explain(code, text):
    """Why a training run failed, in one line: the kind of failure, and its last printed line."""
    lines = [line for line in (line.strip(" │╭╰╮╯─") for line in text.splitlines()) if line]  # without boxes
    last = lines[-1] if lines else "it printed nothing"
    lower = text[-4000:].lower()
    if "out of memory" in lower or "memoryerror" in lower or "can't allocate" in lower:
        return f"out of memory (exit {code}): {last}"
    if "not finite" in lower or "floatingpointerror" in lower:
        return f"not finite: {last}"
    return f"exit {code}: {last}"


# --------------------------------------------------------------------------------------------------
# Where trials run


class LocalPool:
    """Runs trials on this machine; each thread watches one training process. slots: trials at once
    (`workers`, or as many on each GPU); gpus: how many GPUs share them, by CUDA_VISIBLE_DEVICES."""

    def __init__(self, workers, gpus=0):
        processes.check_count("sweep.workers", workers, *processes.processes_at_most())
        self.slots = workers * max(1, gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = (visible.split(",") if visible else [str(gpu) for gpu in range(gpus)])[:gpus]
        if len(self.gpus) < gpus:
            raise SpaceError(f"sweep.gpus is {gpus}, but CUDA_VISIBLE_DEVICES names only {visible}.")
        self.stop = threading.Event()
        self.threads = futures.ThreadPoolExecutor(self.slots, thread_name_prefix="trial")
        self.running = {}  # future -> (claim, GPU or None)

    def submit(self, claim, job, started):
        gpu = None
        if self.gpus:
            used = [taken for _, taken in self.running.values()]
            gpu = min(self.gpus, key=used.count)
            job = {**job, "env": {**job["env"], "CUDA_VISIBLE_DEVICES": gpu}}
        self.running[self.threads.submit(run_trial, job, self.stop, started)] = claim, gpu

    @property
    def claims(self):
        return [claim for claim, _ in self.running.values()]

    def finished(self, timeout):
        """[(claim, outcome)] of the trials that ended; waits up to `timeout` seconds for one."""
        done, _ = futures.wait(self.running, timeout, return_when=futures.FIRST_COMPLETED) if self.running else ((), ())
        return [(self.running.pop(future)[0], future.result()) for future in done]

    def close(self):
        """Make all trials save and end; returns [(claim, outcome)]."""
        self.stop.set()
        left = self.finished(None)
        while self.running:
            left += self.finished(None)
        self.threads.shutdown()
        return left


class RayPool:
    """Runs trials as Ray tasks on a cluster. address: the cluster's, "auto" for this machine's
    cluster, or "local" to start one here. Ray sends the project's files along; the nodes need
    the Python packages and a C compiler. slots: `workers` if given, else as many trials as the
    cluster has room for. If a node is lost, its trials get status "lost" and are run again."""

    def __init__(self, address, workers, cpus=1.0, gpus=0.0):
        import ray

        self.ray, self.started = ray, not ray.is_initialized()
        if self.started:
            excludes = [".venv", ".git", "experiments", "ocean/.build", "__pycache__", ".hypothesis", ".pytest_cache"]
            ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False,
                     include_dashboard=False if address == "local" else None,
                     runtime_env={"working_dir": str(ROOT), "excludes": excludes})
        total = ray.cluster_resources()
        room = [int(total.get("CPU", 0) / cpus)] + ([int(total.get("GPU", 0) / gpus)] if gpus else [])
        self.slots = workers or max(1, min(room))
        self.task = ray.remote(run_trial).options(num_cpus=cpus, num_gpus=gpus, max_retries=0,
                                                  scheduling_strategy="SPREAD")
        self.running = {}

    def submit(self, claim, job, started):
        self.running[self.task.remote({**job, "folder": None})] = claim

    @property
    def claims(self):
        return list(self.running.values())

    def finished(self, timeout):
        if not self.running:
            return []
        ended = []
        for ref in self.ray.wait(list(self.running), timeout=timeout)[0]:
            claim = self.running.pop(ref)
            try:
                ended.append((claim, self.ray.get(ref)))
            except self.ray.exceptions.RayTaskError:
                raise  # an error of run_trial itself, and not a lost node
            except self.ray.exceptions.RayError as error:
                ended.append((claim, {"status": "lost", "error": str(error).splitlines()[0]}))
        return ended

    def close(self):
        left = [(claim, {"status": "interrupted"}) for claim in self.claims]
        for ref in self.running:
            self.ray.cancel(ref, force=True)
        if self.started:
            self.ray.shutdown()
        return left


# --------------------------------------------------------------------------------------------------
# The sweep


METHODS = {"protein": Protein, "random": protein.Random, "genetic": protein.ParetoGenetic, "grid": protein.Grid}


@dataclass
class Sweep:
    method: Literal[*METHODS] = "protein"
    """How settings are chosen: protein (a model of score and cost), random, genetic (children of the front) or grid."""
    num_trials: int = 100
    """Trials in all, those of earlier starts and other machines included."""
    metric: str = "environment/score"
    """What is searched for: any name in metrics.jsonl."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """Whether more of the metric is better, or less."""
    cost: str = "performance/uptime"
    """What a trial costs: any name in metrics.jsonl that grows; seconds of training by default."""
    max_suggestion_cost: float | None = None
    """Trials that are expected to cost more than this are not suggested; one that costs twice as
    much is stopped (default: 3600 seconds; no limit if the cost is not performance/uptime)."""
    random_trials: int | None = None
    """Trials before the model is asked (default: 16, at most a third of all)."""
    downsample: int = 5
    """Points along each training curve that the model learns from."""
    early_stop: float = 0.25
    """A trial past a quarter of its schedule is stopped, if its score has not come this share of
    the way from bad trials' scores to the best one at the same cost; 0: never."""
    workers: int | None = None
    """Trials side by side; if gpus is given, on each GPU (default: 1; on Ray what has room)."""
    gpus: int = 0
    """GPUs of this machine to use; on Ray, GPUs of each trial."""
    cpus: float = 1.0
    """CPU cores that Ray reserves for each trial, and threads that it steps environments with."""
    ray: str | None = None
    """Run the trials on this Ray cluster: its address, "auto", or "local"."""
    attempts: int = 3
    """A trial that is lost this many times (killed, or its machine went down) counts as failed."""
    name: str | None = None
    """Names the sweep, if an environment has several; its folder is DATA_DIR/sweep_ENV_NAME."""
    seed: int = 0
    """Seed of the suggestions; the trials themselves use train.seed."""
    logger: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where trials go besides the ledger: TensorBoard's HParams, or one W&B run each in a group."""
    web: int | None = None
    """Serve the report on this port of this machine (127.0.0.1) while the sweep runs."""


def settings_of(tuner):
    """(Sweep, options of `pufferl.py train` that all trials share) of a tuner that was made in
    Python. Raises SpaceError for a setting that does not exist."""
    given = dict(tuner.sweep_settings)
    fixed = {}
    for name, value in given.pop("fixed", {}).items():
        fixed |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    known = [field.name for field in dataclasses.fields(Sweep) if field.name != "method"]
    for key in given:
        if key not in known:
            raise SpaceError(f"{key}: there is no such setting of a sweep. There are: fixed, {', '.join(known)}.")
    own = {key: getattr(tuner, key) for key in ("num_trials", "metric", "goal", "seed", "max_suggestion_cost")}
    own["metric"] = metric_of(tuner.metric)
    return Sweep(**{**given, **own}), as_options(fixed)


def as_options(settings):
    """{"train.learning_rate": 0.01} -> ["--train.learning-rate", "0.01"]."""
    return [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), str(value))]


def fixed_settings(schema, options):
    """Names, "section.key", of the settings that options of `pufferl.py train` fix: those that are given, and numbers
    of agents and environments that these override. Raises ConfigError for an option that does not exist."""
    import configuration

    options, sizes = configuration.take_sizes(options)
    names = {option.partition("=")[0][2:].replace("-", "_") for option in configuration.spell_out(schema, options)
             if option.startswith("--")}
    names |= {{"batch_size": "train.horizon", "num_iterations": "train.total_timesteps"}[size] for size in sizes}
    if names & {"env.num_envs", "vec.num_envs"}:
        return names | {"vec.total_agents"}
    return names | ({"env.num_envs", "vec.num_envs"} if "vec.total_agents" in names else set())


SIZES = "vec.total_agents", "train.horizon", "train.minibatch_size"


def searched_settings(env_name, given, options=()):
    """The search space as a tuner takes it, checked against the environment's settings. A setting
    without a mean gets its present value. given: a search space; None: the [sweep.*] sections.
    options: of `pufferl.py train`; what they fix is not searched. env_name None: `given` unchanged.

    Returns {"section.key": what}. Raises SpaceError or ConfigError for a setting that does not exist.
    """
    if env_name is None:
        return given or {}
    import configuration

    schema = configuration.resolve(env_name, options)[0]
    args = configuration.load_config(env_name, list(options))
    fixed = fixed_settings(schema, options) | configuration.unused(args)
    if given is None:
        given = {name.partition(".")[2]: dict(what) for name, what in args["sweep"].items() if name != "sweep"}
    space, general = {}, configuration.load_config("default")["sweep"] if args["train"]["horizon"] == "auto" else {}
    for name, what in protein.flatten(given).items():
        if name in SIZES and what == general.get(f"sweep.{name}"):
            continue  # they are chosen to fit each trial's steps, and each other; a range of your own is searched
        if name.rpartition(".")[2] == "batch_size" and name != "vec.batch_size":
            name, what = "train.horizon", horizons(args, protein.described(name, what))
        section, _, key = find_setting(schema, name).partition(".")
        if section not in schema or section == "base":
            sections = [section for section in schema if section != "base"]
            raise SpaceError(f"[sweep.{name}] there is no section {section!r}. There are: {', '.join(sections)}.")
        types = {field.name: field.type for field in dataclasses.fields(schema[section])}
        key = configuration.translate(section, key, list(types), f"[sweep.{name}]")
        what = protein.described(name, what)
        takes = protein.SCALES.get(what["distribution"], protein.Scale()).takes  # Space refuses an unknown one
        if takes == "nothing" or f"{section}.{key}" in fixed:
            continue
        kinds, present = getattr(types[key], "__args__", (types[key],)), args[section][key]
        if takes == "values":
            where, texts = f"[sweep.{name}] values", what.get("values", ())
            what["values"] = [configuration.coerce(text, types[key], where) for text in texts]
            fits = present in what["values"]
        else:
            if not {int, float} & set(kinds):
                raise SpaceError(f"[sweep.{name}] is no number: take distribution = choice with values.")
            if float not in kinds:
                what["integer"] = True
            bounds = (what.get("min"), present, what.get("max"))
            fits = all(isinstance(value, int | float) for value in bounds) and bounds[0] <= present <= bounds[2]
        if fits and what.get("mean") is None:
            what["mean"] = present
        space[f"{section}.{key}"] = what
    protein.Space(space)
    return space


def find_setting(schema, name):
    """The full name, "section.key", of a setting that may be given without its section."""
    import configuration

    if "." in name:
        return name
    for section in ("train", "policy", "rnn", "vec", "env"):
        keys = {field.name for field in dataclasses.fields(schema[section])}
        renamed = configuration.RENAMED.get(f"{section}.{name}", "").rpartition(".")
        if name in keys or (renamed[0] == section and renamed[2] in keys):
            return f"{section}.{name}"
    return f"train.{name}"  # it does not exist: the lookup of this name raises an error


def horizons(args, what):
    """The values of train.horizon that give these batch sizes. SpaceError if one is no multiple of the agents."""
    import configuration

    agents, values = configuration.count_agents(args), [protein.number(value) for value in what.get("values", ())]
    if not values:
        raise SpaceError("[sweep.batch_size] must be a list of values; for a range take train.horizon.")
    if any(value % agents for value in values):
        raise SpaceError(f"[sweep.batch_size] values = {values}: each must be a multiple of the {agents} agents "
                         "(env.num_envs, vec.total_agents), the horizon times which it is.")
    return {**what, "values": [value // agents for value in values]}


METRICS = {"mean_reward": "environment/episode_return", "mean_episode_length": "environment/episode_length"}


def metric_of(name):
    """A metric's name in metrics.jsonl; `name` may be another library's, or lack "environment/"."""
    return METRICS.get(name) or (name if "/" in name else f"environment/{name}")


class Runner:
    """Runs trials until the sweep's folder holds settings.num_trials of them, old ones included.

    tuner: chooses each trial's settings, and has the environment's name. settings: a Sweep.
    options: of `pufferl.py train`, for all trials. Raises SpaceError if the folder holds another
    sweep.
    """

    def __init__(self, tuner, settings, options=(), quiet=False):
        import torch

        import pufferl

        self.tuner, self.settings, self.options = tuner, settings, list(options)
        self.config, self.interrupts = pufferl.load_config(tuner.env_name, self.options), pufferl.Interrupts()
        if self.config["data_dir"] is None:
            raise SpaceError("a sweep keeps its trials in --data-dir, which must not be none.")
        if self.config["train"]["device"] == "cuda" and not settings.ray and torch.cuda.device_count() < settings.gpus:
            raise SpaceError(f"sweep.gpus is {settings.gpus}, but torch finds {torch.cuda.device_count()} here.")
        if settings.cpus != 1 and not settings.ray:
            raise SpaceError("sweep.cpus goes with --sweep.ray; on this machine --vec.num-threads says it.")
        name = "_".join(filter(None, ("sweep", Path(self.config["env_name"]).stem, settings.name)))
        self.folder = Path(self.config["data_dir"]) / name
        self.ledger = Ledger(self.folder)
        begin(self.ledger, tuner, settings, self.options, self.config)
        self.log = make_logger(settings.logger, self.folder, self.config)
        self.status, self.quiet = StatusLine(sys.stdout.isatty() and not quiet), quiet
        self.known = set()  # numbers of the trials that the tuner has observed

    def run(self):
        """Returns the Ledger. At Ctrl-C (or SIGTERM) the running trials save, and the next start
        resumes them; a second Ctrl-C ends at once. RuntimeError if the first trials all fail."""
        settings, ledger = self.settings, self.ledger
        self.pool = (RayPool(settings.ray, settings.workers, settings.cpus, settings.gpus) if settings.ray else
                     LocalPool(settings.workers or 1, settings.gpus))
        server = serve(self.folder, settings.web) if settings.web is not None else None
        self.say(f"sweep {self.folder}: {len(self.tuner.space)} settings ({', '.join(self.tuner.space.names)}), "
                 f"{len(ledger.results())} of {settings.num_trials} trials done, {self.pool.slots} at a time; "
                 "a line comes as each ends")
        if settings.gpus and self.config["train"]["device"] != "cuda":
            self.say("sweep.gpus without --train.device cuda: the trials train on the CPU")
        if server:
            self.say(f"report: http://127.0.0.1:{server.server_address[1]}")
        with self.interrupts, ledger.alive():
            try:
                while not self.interrupts.requested:
                    while len(self.pool.claims) < self.pool.slots and not self.interrupts.requested:
                        claim = self.next_claim()
                        if claim is None:
                            break
                        self.submit(claim)
                    if not self.pool.claims:
                        if not ledger.claims():
                            break
                        time.sleep(0.5)  # other processes run the rest; if one dies, we do
                    for claim, outcome in self.pool.finished(0.5):
                        self.settle(claim, outcome)
                    self.status.show(self.pool.claims)
                    refuse_if_all_fail(ledger)
            finally:
                self.status.clear()
                for claim, outcome in self.pool.close():
                    self.settle(claim, outcome if outcome["status"] != "lost" else {"status": "interrupted"})
                if server:
                    server.shutdown()
                    server.server_close()
        self.learn()
        self.conclude()
        return ledger

    def say(self, text):
        if not self.quiet:
            self.status.clear()
            print(text, flush=True)

    def learn(self):
        """Tell the tuner what is new in the ledger."""
        for number, record in self.ledger.results().items():
            if number not in self.known:
                self.known.add(number)
                observe_record(self.tuner, record)

    def next_claim(self):
        """The next trial to run, a claim of ours with settings: an abandoned one, else a new one; or None."""
        claim = self.ledger.take_over()
        if claim is not None:
            return claim
        self.learn()
        others = self.ledger.claims()
        claim = self.ledger.claim(below=self.settings.num_trials)
        if claim is None:
            return None
        self.tuner.pending = [self.tuner.space.encode(c["settings"]) for c in others.values() if c["settings"]]
        claim["settings"] = self.tuner.suggest(claim["trial"])
        if claim["settings"] is None:  # the grid is finished
            self.ledger.drop(claim)
            return None
        claim["predicted"] = self.tuner.prediction
        self.ledger.update(claim)
        return claim

    def submit(self, claim):
        """Start a claimed trial."""
        from vector import physical_cores

        settings = self.settings
        command = ["train", self.tuner.env_name, *self.options, "--logger", "none", "--train.keep", "1"]
        if self.config["vec"]["num_threads"] is None and (settings.ray or self.pool.slots > 1):
            threads = int(settings.cpus) if settings.ray else physical_cores() // self.pool.slots
            command += ["--vec.num-threads", str(max(1, threads))]
        total = claim["settings"].get("train.total_timesteps", self.config["train"]["total_timesteps"])
        claim["at"] = {}  # `attend`, in another thread, writes the trial's progress here
        job = {"trainer": TRAINER, "command": command + as_options(claim["settings"]), "env": {}, "total": total,
               "folder": str(self.folder / "runs" / f"{claim['trial']:05d}"), "at": claim["at"],
               "metric": settings.metric, "cost": settings.cost, "downsample": settings.downsample,
               "limit": 2 * self.tuner.max_suggestion_cost, "rule": stopping_rule(self.tuner, settings)}
        self.pool.submit(claim, job, lambda child: self.ledger.update({**claim, "child": child}))

    def settle(self, claim, outcome):
        """Write down a trial's outcome; a lost trial is run again."""
        attempts = claim["attempts"] + 1
        if outcome["status"] == "interrupted":
            self.ledger.give_back(claim)
            return
        if outcome["status"] == "lost" and attempts < self.settings.attempts:
            self.say(f"trial {claim['trial']}: lost ({outcome['error']}); it is run again")
            claim["attempts"] = attempts
            self.ledger.update(claim)
            self.submit(claim)
            return
        if outcome["status"] == "lost":
            outcome = {"status": "failed", "score": None, "cost": None, "curve": [], "steps": 0.0,
                       "error": f"lost {attempts} times: {outcome['error']}"}
        if outcome.get("run"):
            outcome["run"] = os.path.relpath(outcome["run"], self.folder)
        record = {"trial": claim["trial"], "settings": claim["settings"], **outcome,
                  "predicted": claim.get("predicted", {}), "attempts": attempts}
        if self.ledger.finish(claim, record):
            self.learn()
            self.log(record)
            self.say(describe(record, self.tuner, self.settings))

    def conclude(self):
        """Print the front and how to train with the best settings; write the report."""
        tuner = self.tuner
        if not tuner.observations:
            return
        self.say(f"\n{self.settings.metric:>20}  {self.settings.cost:>20}   the front, cheapest first")
        for config, score, cost in tuner.front():
            self.say(f"{score:20.5g}  {cost:20.5g}   " + brief(config))
        if tuner.best():
            options = " ".join([tuner.env_name, *self.options, *as_options(tuner.best()[0])])
            self.say(f"\nbest settings: python pufferl.py train {options}")
        with contextlib.suppress(ModuleNotFoundError):  # without plotly there is no report
            self.say(f"report: {write_report(self.folder)}")
        if self.interrupts.requested:
            self.say("stopped; the same command goes on from here")


class StatusLine:
    """Shows the running trials on the last line of a terminal."""

    def __init__(self, wanted):
        self.wanted, self.began = wanted, time.monotonic()

    def show(self, claims):
        if self.wanted:
            at = [(c["trial"], c["at"].get("progress", 0), c["at"].get("score", math.nan)) for c in claims]
            line = f"{time.monotonic() - self.began:.0f} s, running: "
            line += ", ".join(f"{trial} {100 * progress:.0f}% score {score:.4g}" for trial, progress, score in at)
            print("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def clear(self):
        if self.wanted:
            print("\r\x1b[K", end="", flush=True)


def begin(ledger, tuner, settings, options, config):
    """Write sweep.json. If the folder has one, check that it asks for the same, or trials could not be compared."""
    path = ledger.folder / "sweep.json"
    asked = {"env": tuner.env_name, "metric": settings.metric, "goal": settings.goal, "cost": settings.cost}
    asked |= {f"sweep.{name}.{field}": value for name, what in tuner.search_space.items()
              for field, value in (what if isinstance(what, dict) else {"values": list(what)}).items()}
    asked |= {f"{section}.{key}": value for section in ("env", "vec", "policy", "rnn", "train")
              for key, value in config[section].items() if f"{section}.{key}" not in tuner.space.names}
    asked |= {key: config[key] for key in ("load_model_path", "baseline") if config[key]}
    asked = json.loads(json.dumps(asked, default=str))
    whole = {"asked": asked, "options": list(options), "space": tuner.search_space, "created": time.time()}
    if ledger._appear(path, whole):
        return
    held = read_whole(path, TOLD)["asked"]
    different = [f"{key}: {held.get(key, 'nothing')} there, {asked.get(key, 'nothing')} now"
                 for key in {**held, **asked} if held.get(key, "nothing") != asked.get(key, "nothing")]
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        what = "; ".join(different[:5]) + more
        raise SpaceError(f"{ledger.folder} holds another sweep ({what}). Give this one a name of its own, --sweep.name "
                         "NAME (name=\"NAME\" in Python), or move the folder away.")


def observe_record(tuner, record):
    """Let a tuner observe a record of the ledger."""
    score, cost = (math.nan if record[key] is None else record[key] for key in ("score", "cost"))
    failed, complete = record["status"] == "failed", record["status"] == "done"
    tuner.observe(record["settings"], score, cost, failed, record["curve"], complete)


def stopping_rule(tuner, settings):
    """The rule that `hopeless` takes, from the trials so far: [(cost, score)] of all curves' points, and the floor."""
    done = [o for o in tuner.observations if not o.failed]
    if not settings.early_stop or len(done) < 5:
        return None
    points = [(cost, score) for o in done for _, score, cost in o.curve]
    front = front_of([score for _, score in points], [cost for cost, _ in points])
    return {"front": [points[i] for i in front], "floor": float(np.quantile([o.score for o in done], 0.1)),
            "share": settings.early_stop, "after": 0.25, "sign": tuner.sign}


def refuse_if_all_fail(ledger, count=5):
    """RuntimeError if the first `count` trials all failed: then their settings are not the cause."""
    records = list(ledger.results().values())
    if len(records) >= count and all(record["status"] == "failed" for record in records):
        errors = "\n".join(f"  trial {record['trial']}: {record['error']}" for record in records[:count])
        raise RuntimeError(f"the first {len(records)} trials all failed:\n{errors}\n"
                           f"Their output is in {ledger.folder}/runs/*/output.txt; move the folder away to begin anew.")


def describe(record, tuner, settings):
    """A finished trial in a line."""
    head = f"trial {record['trial']:4d} of {settings.num_trials}"
    if record["status"] == "failed":
        return f"{head}  failed: {record['error']}"
    front = any(cost == record["cost"] and score == record["score"] for _, score, cost in tuner.front())
    expected = record["predicted"].get("score")
    note = "  on the front" if front else "  stopped early" if record["status"] == "stopped" else ""
    known = f" (expected {expected:.4g})" if expected is not None else ""
    return f"{head}  score {record['score']:.4g}{known}  cost {record['cost']:.4g}{note}   {brief(record['settings'])}"


def brief(settings):
    """Settings in one line, without the names of their sections."""
    return " ".join(f"{name.partition('.')[2]}={short(value)}" for name, value in settings.items())


def short(value):
    """A number as people read it: 4,096 and not 4.1e+03."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf or isinstance(value, int) else f"{value:.4g}"


def make_logger(kind, folder, config):
    """A function that takes each finished trial's record. Raises ImportError if the package is
    missing. Later errors only lose log entries: the sweep goes on, and the ledger has all."""
    import runs

    if kind == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ImportError("--sweep.logger wandb needs the package wandb: pip install wandb")

    def write(record):
        """A trial's settings, and its curve over steps."""
        name, failed = f"{record['trial']:05d}", record["status"] == "failed"
        if failed and kind == "tensorboard":  # its page of settings needs a score, which a failed trial lacks
            return
        if kind == "wandb":
            logger = runs.WandbLogger(config["project"], config["entity"], name, record["settings"],
                                         group=folder.name, tag=record["status"], folder=str(folder))
        else:
            from torch.utils.tensorboard.summary import hparams

            logger = runs.TensorBoardLogger(folder / "tensorboard" / name)
            last = {"sweep/final_score": record["score"], "sweep/final_cost": record["cost"]}
            for summary in hparams(record["settings"], last):  # add_hparams opens a second file
                logger.writer.file_writer.add_summary(summary)
            logger.log(last, 0)
        for progress, score, cost in record["curve"]:
            step = round(record["steps"] * progress / record["curve"][-1][0])
            logger.log({"sweep/score": score, "sweep/cost": cost}, step)
        if failed:
            logger.run.finish(exit_code=1)
        logger.close()

    def log(record):
        try:
            write(record)
        except (OSError, ValueError) as error:
            runs.warn(f"trial {record['trial']} was not logged to {kind} ({error})")

    return log if kind != "none" else lambda record: None


# --------------------------------------------------------------------------------------------------
# The report: a page about a sweep or a folder of runs, made of [(title, text, plotly figure)]


def load_sweep(folder):
    """(sweep.json's content, records of the finished trials, a Protein that has observed them)."""
    folder = Path(folder)
    told = read_whole(folder / "sweep.json", TOLD)
    records = list(Ledger(folder).results().values())
    asked = told["asked"]
    tuner = Protein(search_space=told["space"], num_trials=max(1, len(records)), metric=asked["metric"],
                    goal=asked["goal"])
    for record in records:
        observe_record(tuner, record)
    return told, records, tuner


def marginal_effects(tuner, points=24, samples=48):
    """{setting: (values, mean score (points,), sd (points,))}: the predicted score of `samples` tried configurations,
    averaged, if this one setting is changed in all of them (partial dependence)."""
    done = np.array([o.unit for o in tuner.observations if not o.failed])
    base = done[np.linspace(0, len(done) - 1, min(samples, len(done))).astype(int)]
    effects = {}
    for k, setting in enumerate(tuner.space.settings):
        grid = np.linspace(0, 1, points)
        if 0 < setting.levels <= points:
            grid = (np.arange(setting.levels) + 0.5) / setting.levels
        units = np.repeat(base[None], len(grid), axis=0)
        units[:, :, k] = grid[:, None]
        score, sd, _, _, _ = tuner.predict(tuner.space.snap(units.reshape(-1, len(tuner.space))))
        score, sd = (value.reshape(len(grid), -1).mean(1) for value in (score, sd))
        effects[setting.name] = [setting.from_unit(u) for u in grid], tuner.sign * score, sd
    return effects


def tsne(X, perplexity=15.0, steps=300, seed=0):
    """(n, 2) places: similar rows of X come near each other (van der Maaten and Hinton 2008); n < 1,000."""
    n = len(X)
    squared = ((X[:, None] - X[None]) ** 2).sum(-1)
    P = np.zeros((n, n))
    for i in range(n):  # bisect its kernel's inverse width, until it has about `perplexity` neighbours
        low, high, distance = 1e-6, 1e6, np.delete(squared[i], i)
        for _ in range(40):
            precision = math.sqrt(low * high)
            p = np.exp(-(distance - distance.min()) * precision)
            p /= p.sum()
            wide = -(p * np.log(np.maximum(p, 1e-300))).sum() > math.log(min(perplexity, (n - 1) / 3))
            low, high = (precision, high) if wide else (low, precision)
        P[i, np.arange(n) != i] = p
    P = np.maximum((P + P.T) / (2 * n), 1e-12)
    Y = 1e-2 * np.random.default_rng(seed).standard_normal((n, 2))
    speed = np.zeros_like(Y)
    for step in range(steps):
        difference = Y[:, None] - Y[None]
        near = 1 / (1 + (difference**2).sum(-1))
        np.fill_diagonal(near, 0)
        pull = (P * (4 if step < 80 else 1) - near / near.sum()) * near
        speed = (0.5 if step < 80 else 0.8) * speed - n / 3 * (pull[..., None] * difference).sum(1)
        Y = Y + speed - Y.mean(0)
    return Y


def sweep_figures(told, records, tuner):
    """[(title, text, figure)] of a sweep."""
    good = [r for r in records if r["status"] != "failed"]
    if not good:
        return []
    text, cost, score = [hover_text(r) for r in good], [r["cost"] for r in good], [r["score"] for r in good]
    figures = [against_cost(told["asked"], good, text, tuner), curves_of_trials(told["asked"], good, text)]
    if len(good) >= 4:
        figures.append(stars(told["asked"], good, text, tuner))
    if len(good) >= enough(tuner):
        tuner.fit()
        effects = marginal_effects(tuner)
        figures += [importance(effects), effects_of_settings(effects, good, text, tuner)]
    columns = {name: [r["settings"][name] for r in good] for name in tuner.space.names}
    logarithmic = {s.name for s in tuner.space.settings if s.row.axis == "log"} | {"cost"}
    figures.append(("Parallel coordinates", "Drag along an axis to keep a range.",
                    parallel(columns | {"cost": cost, "score": score}, logarithmic, score)))
    if len(good) >= 8:
        units = tuner.space.features(np.array([tuner.space.encode(r["settings"]) for r in good[:600]]))
        figures.append(similarity(units, score[:600], text[:600]))
    return figures


# Of the colours of watch.html, as DARK is.
CYAN, GOLD, GREY = "#00bbcc", "#fabe3c", "#93a7b6"


def new_figure(**layout):
    """An empty figure. plotly is imported here, because a sweep needs it only for the report."""
    import plotly.graph_objects as go

    return go.Figure().update_layout(**layout)


def hover_text(record):
    settings = [f"{name} = {short(value)}" for name, value in record["settings"].items()]
    return "<br>".join([f"trial {record['trial']} ({record['status']})",
                        f"score {short(record['score'])}, cost {short(record['cost'])}", *settings])


def against_cost(asked, good, text, tuner):
    cost, score, number = [r["cost"] for r in good], [r["score"] for r in good], [r["trial"] for r in good]
    front = front_of([tuner.sign * s for s in score], cost)
    figure = new_figure(xaxis_type="log", xaxis_title=asked["cost"], yaxis_title=asked["metric"],
                        legend={"orientation": "h", "y": 1.12})
    figure.add_scatter(x=cost, y=score, mode="markers", name="trials", text=text, hoverinfo="text", customdata=number,
                       marker={"color": number, "colorscale": "Viridis", "size": 8,
                               "symbol": ["circle" if r["status"] == "done" else "triangle-down" for r in good],
                               "colorbar": {"title": "trial"}}, meta="trials")
    figure.add_scatter(x=[cost[i] for i in front], y=[score[i] for i in front], mode="lines", line_shape="hv",
                       name="front", line={"color": GOLD}, hoverinfo="skip")
    expected = [(r["trial"], r["predicted"]) for r in good if r["predicted"].get("score") is not None]
    figure.add_scatter(x=[p["cost"] for _, p in expected], y=[p["score"] for _, p in expected], mode="markers",
                       name="expected, ± 1 sd", visible="legendonly", marker={"symbol": "x-thin-open"},
                       error_y={"array": [p["score_sd"] for _, p in expected], "thickness": 0.6}, hoverinfo="text",
                       text=[f"trial {number}, as expected before it" for number, _ in expected])
    return ("Score against cost", "Each point is a trial (triangles: stopped early); the line is the front. "
            "Click the legend for what the model had expected.", figure)


def curves_of_trials(asked, good, text):
    figure = new_figure(xaxis_type="log", xaxis_title=asked["cost"], yaxis_title=asked["metric"])
    for r, words in zip(good, text, strict=True):
        figure.add_scatter(x=[c for _, _, c in r["curve"]], y=[s for _, s, _ in r["curve"]], mode="lines+markers",
                           name=f"{r['trial']}", text=words, hoverinfo="text", marker={"size": 4}, line={"width": 1})
    return "Curves", "The points of each trial that the model learns from.", figure


def stars(asked, good, text, tuner):
    names = tuner.space.names
    values = {s.name: [str(r["settings"][s.name]) if s.categorical else r["settings"][s.name] for r in good]
              for s in tuner.space.settings}
    logarithmic = {s.name for s in tuner.space.settings if s.row.axis == "log"}
    score = [r["score"] for r in good]
    buttons = [{"label": name, "method": "update", "args": [
        {"y": [values[name]]}, {"scene.yaxis.title.text": name,
                                "scene.yaxis.type": "log" if name in logarithmic else "-"}]} for name in names]
    scene = {"xaxis": {"title": {"text": asked["cost"]}, "type": "log"}, "zaxis": {"title": {"text": asked["metric"]}},
             "yaxis": {"title": {"text": names[0]}, "type": "log" if names[0] in logarithmic else "-"}}
    figure = new_figure(scene=scene, height=600, updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1}])
    look = {"color": score, "colorscale": "Viridis", "showscale": True, "size": 5}
    figure.add_scatter3d(x=[r["cost"] for r in good], y=values[names[0]], z=score, mode="markers", text=text,
                         hoverinfo="text", marker=look)
    return ("Stars", "Each star is a trial, over its cost, its score and the setting of the menu; it turns until you "
            "take hold of it.", figure)


def enough(tuner):
    """How many trials there must be before the report says something about single settings."""
    return max(10, 2 * len(tuner.space))


def importance(effects):
    share = np.array([np.var(mean) for _, mean, _ in effects.values()])
    share, order = share / (share.sum() or 1.0), np.argsort(share)
    figure = new_figure(xaxis_title="share of the variance of the marginal effects", xaxis_tickformat=".0%",
                        margin_l=180)
    figure.add_bar(x=share[order], y=[list(effects)[i] for i in order], orientation="h")
    return "Importance", "How much the predicted score changes with each setting alone.", figure


def effects_of_settings(effects, good, text, tuner, columns=3):
    from plotly.subplots import make_subplots

    rows = -(-len(effects) // columns)
    figure = make_subplots(rows, columns, subplot_titles=list(effects))
    for i, (setting, (values, mean, sd)) in enumerate(zip(tuner.space.settings, effects.values(), strict=True)):
        at = {"row": i // columns + 1, "col": i % columns + 1}
        values = [str(v) for v in values] if setting.categorical else values
        figure.add_scatter(x=values, y=mean + sd, line={"width": 0}, hoverinfo="skip", showlegend=False, **at)
        figure.add_scatter(x=values, y=mean - sd, line={"width": 0}, fill="tonexty", hoverinfo="skip",
                           fillcolor="rgba(0,187,204,0.2)", showlegend=False, **at)
        figure.add_scatter(x=values, y=mean, line={"color": CYAN}, showlegend=False, **at)
        tried = [r["settings"][setting.name] for r in good]
        figure.add_scatter(x=[str(v) for v in tried] if setting.categorical else tried, y=[r["score"] for r in good],
                           mode="markers", marker={"size": 4, "color": GREY}, text=text, hoverinfo="text",
                           showlegend=False, **at)
        figure.update_xaxes(type=setting.row.axis, **at)
    figure.update_layout(height=240 * rows + 60)
    return ("Marginal effects", "Predicted score at the end, averaged over the tried values of all other settings, "
            "± 1 sd; points are trials.", figure)


def parallel(columns, logarithmic, score):
    """Parallel coordinates of {name: values}, coloured by score."""
    dimensions = []
    for name, values in columns.items():
        label = name.partition(".")[2] or name
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
            kinds = sorted(set(map(str, values)))
            dimensions.append({"label": label, "values": [kinds.index(str(v)) for v in values],
                               "tickvals": list(range(len(kinds))), "ticktext": kinds})
        elif name in logarithmic and min(values) > 0:
            ticks = np.unique(np.round(np.linspace(math.log10(min(values)), math.log10(max(values)), 5), 2))
            dimensions.append({"label": f"{label} (log)", "values": np.log10(values), "tickvals": ticks,
                               "ticktext": [short(float(10**t)) for t in ticks]})
        else:
            dimensions.append({"label": label, "values": values})
    line = {"color": score, "colorscale": "Viridis", "showscale": True}
    return new_figure().add_parcoords(dimensions=dimensions, line=line)


def similarity(features, score, text):
    spot = tsne(np.asarray(features, dtype=float))
    figure = new_figure(xaxis_showticklabels=False, yaxis_showticklabels=False)
    figure.add_scatter(x=spot[:, 0], y=spot[:, 1], mode="markers", text=text, hoverinfo="text",
                       marker={"color": score, "colorscale": "Viridis", "showscale": True})
    return "Similar settings", "t-SNE of the settings, coloured by score: near points have like settings.", figure


def load_runs(folder, metric, tag=None):
    """[{name, env, settings, step, score, cost, ...}] of all runs in a folder, or in its sweeps."""
    runs = []
    for path in sorted(Path(folder).glob("**/config.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            config = json.loads(path.read_text())
            curve = Curve.read(path.parent / "metrics.jsonl", metric)
            settings = {f"{section}.{key}": value for section in ("env", "vec", "policy", "rnn", "train")
                        for key, value in config[section].items()}
            if len(curve.step) and (tag is None or config.get("tag") == tag):
                score, cost = curve.at(curve.step[-1], settings["train.total_timesteps"] / 10)
                runs.append({"name": str(path.parent.relative_to(folder)), "env": config["env_name"], "curve": curve,
                             "tag": config.get("tag") or "", "settings": settings, "score": score, "cost": cost})
    return runs


def as_row(run, varied):
    """{column: value} of a run: shown in the table and beside its curve, and searched by the page's filter."""
    told = {"run": run["name"], "env": run["env"], "tag": run["tag"], "score": f"{run['score']:.5g}",
            "seconds": run["cost"], "steps": run["curve"].step[-1]}
    return told | {name: run["settings"].get(name, "") for name in varied}


def varied_settings(runs):
    """The settings that have more than one value among the runs that have them."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    return [name for name in names if len({str(run["settings"][name]) for run in runs if name in run["settings"]}) > 1]


def run_figures(runs, metric):
    """[(title, text, figure)] of ordinary runs, for each environment: curves, score against each
    setting, and a map of similar settings."""
    figures = []
    for env in sorted({run["env"] for run in runs}):
        mine = [run for run in runs if run["env"] == env]
        varied = varied_settings(mine)
        text = ["<br>".join(f"{name} = {short(value)}" for name, value in as_row(run, varied).items()) for run in mine]
        for axis, title in (("step", "environment steps"), ("cost", "seconds")):
            figure = new_figure(xaxis_title=title, yaxis_title=metric, showlegend=True)
            for run, words in zip(mine, text, strict=True):
                every = max(1, len(run["curve"].step) // 400)
                figure.add_scatter(x=getattr(run["curve"], axis)[::every], y=run["curve"].score[::every], mode="lines",
                                   name=run["name"], text=words, hoverinfo="text")
            figures.append((f"{env}: curves over {title}", "", figure))
        if varied:
            def column(name, mine=mine):
                values = [run["settings"].get(name) for run in mine]
                plain = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
                return values if plain else [str(v) for v in values]

            axes = {"seconds": [run["cost"] for run in mine]} | {name: column(name) for name in varied}
            buttons = [{"label": name, "method": "update", "args": [{"x": [values]}, {"xaxis.title.text": name}]}
                       for name, values in axes.items()]
            figure = new_figure(updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.15}],
                                xaxis_title="seconds", yaxis_title=metric)
            figure.add_scatter(x=axes["seconds"], y=[run["score"] for run in mine], mode="markers", text=text,
                               hoverinfo="text")
            figures.append((f"{env}: score by setting", "Choose the setting in the menu.", figure))
            numeric = [name for name in varied if not isinstance(column(name)[0], str)]
            if len(mine) >= 8 and numeric:
                X = np.array([column(name) for name in numeric], dtype=float).T[:600]
                X = np.where((X > 0).all(0), np.log(np.maximum(X, 1e-30)), X)
                X = (X - X.mean(0)) / np.maximum(X.std(0), 1e-12)
                title, note, figure = similarity(X, [run["score"] for run in mine][:600], text[:600])
                figures.append((f"{env}: {title.lower()}", note, figure))
    return figures


# The page's Content-Security-Policy: it loads nothing; plotly compiles code and makes images.
SOURCES = "script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "


def table(rows):
    """[{column: value}] as an HTML table; a click on a column's head sorts it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    cells = ["".join(f"<td>{html.escape(short(row.get(name, '')))}</td>" for name in columns) for row in rows]
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>" + "".join(
        f"<tr>{row}</tr>" for row in cells) + "</tbody></table></div>"


def as_ini(settings):
    """{"train.learning_rate": 0.01} -> the text of an ini file."""
    sections = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {value}")
    return "\n\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()) + "\n"


def page(folder, metric="environment/score", tag=None, refresh=None):
    """The report of a sweep's folder, or of a folder of runs, as one HTML text
    that needs no network."""
    from plotly.offline import get_plotlyjs

    folder, parts = Path(folder), []
    if (folder / "sweep.json").exists():
        told, records, tuner = load_sweep(folder)
        counts = {status: sum(r["status"] == status for r in records) for status in ("done", "stopped", "failed")}
        title = f"Sweep of {told['asked']['env']}"
        parts.append(f"<p>{len(records)} trials: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + "; "
                     f"{told['asked']['goal']} {html.escape(told['asked']['metric'])}.</p>")
        if tuner.best():
            best = tuner.best()[0]
            command = " ".join(["python pufferl.py train", told["asked"]["env"], *told["options"], *as_options(best)])
            parts.append(f"<h2>Best settings: {short(tuner.best()[1])} for {short(tuner.best()[2])}</h2>"
                         f"<pre>{html.escape(command)}</pre><pre>{html.escape(as_ini(best))}</pre>")
        figures = sweep_figures(told, records, tuner)
        rows = [{**{key: r[key] for key in ("trial", "status", "score", "cost", "steps")}, **r["settings"],
                 "error": r["error"] or ""} for r in records]
    else:
        runs = load_runs(folder, metric, tag)
        if not runs:
            what = f" that log {metric}" + (f" and have the tag {tag}" if tag else "")
            others = ", ".join(str(path.parent) for path in folder.parent.glob(f"{folder.name}*/sweep.json"))
            raise SpaceError(f"{folder}: there is neither a sweep (sweep.json) nor are there runs{what} in it."
                             + (f" There is {others}." if others else ""))
        title = f"Runs in {folder.name}"
        figures = run_figures(runs, metric)
        varied = varied_settings(runs)
        rows = [as_row(run, varied) for run in runs]
    if (folder / "sweep.json").exists() and len(records) - counts["failed"] < enough(tuner):
        parts.append(f"<p>What each setting does is shown from {enough(tuner)} finished trials on.</p>")
    parts.append('<p>Show only what contains <input id="filter" placeholder="text"></p>')
    for name, note, figure in figures:
        figure.update_layout(signs.DARK, height=figure.layout.height or 480)
        figure.update_xaxes(automargin=True, title_standoff=12).update_yaxes(automargin=True, title_standoff=12)
        plot = figure.to_html(full_html=False, include_plotlyjs=False)
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(note)}</p>{plot}")
    parts.append(f"<h2>Table</h2>{table(rows)}")
    meta = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    filled = {"title": html.escape(title), "refresh": meta, "plotly": get_plotlyjs(), "body": "\n".join(parts)}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], (ROOT / "report.html").read_text())


def write_report(path: Path, output: Path | None = None, metric: str = "environment/score", tag: str | None = None):
    """Write the report of a sweep's folder, or of a folder of runs.

    Args:
        path: a sweep's folder, or one of runs such as experiments.
        output: the page (default: report.html in the folder).
        metric: what runs are compared by; a sweep's own metric is used in any case.
        tag: only runs with this tag.
    """
    output = Path(output or Path(path) / "report.html")
    output.write_text(page(path, metric, tag))
    return output


def serve(folder, port):
    """Serve the report on 127.0.0.1; it is made again whenever the ledger has changed. Returns the
    server (server_address, shutdown). port 0 takes a free one."""
    import watch

    lock, made = threading.Lock(), functools.lru_cache(1)(lambda trials: page(folder, refresh=30))

    class Requests(watch.Requests):
        def do_GET(self):
            if self.refuse():
                return
            if self.path != "/":
                self.answer(404, "there is / only")
                return
            with lock:
                text = made(len(list((Path(folder) / "trials").glob("*.json"))))
            self.answer(200, text, "text/html; charset=utf-8", SOURCES)

    server = watch.Server(port, Requests)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


# --------------------------------------------------------------------------------------------------
# Command line

USAGE = """usage: python protein.py ENV [--sweep.key value ...] [--section.key value ...]
       python protein.py report PATH [--output FILE] [--metric NAME] [--tag TAG]

  ENV         search the settings of [sweep.*] in config/default.ini and config/ENV.ini; the same command goes on
              where it was stopped, also on several machines that share the folder
  report      the page of a sweep's folder, or of a folder of runs

  --sweep.num-trials 50 --sweep.workers 2       how it is searched; python protein.py ENV --help lists all
  --sweep.train.learning-rate.max 0.1           where to search: distribution, min, max, mean, scale or values
  --sweep.train.gamma.distribution none         takes a setting out
  --train.total-timesteps 10000000              fixes a setting for all trials, and takes it out
"""


def split_options(argv):
    """Command line -> (--sweep.key options, {setting: {field: text}}, all
    other options as they are)."""
    sweep, space, others, i = [], {}, [], 0
    while i < len(argv):
        name, equals, value = argv[i].partition("=")
        taken = [argv[i]]
        if not equals and i + 1 < len(argv) and not argv[i + 1].startswith("--"):
            value = argv[i + 1]
            taken.append(value)
        i += len(taken)
        parts = name.removeprefix("--").replace("-", "_").split(".")
        if parts[0] == "sweep" and len(parts) == 4:
            space.setdefault(f"{parts[1]}.{parts[2]}", {})[parts[3]] = value
        elif parts[0] == "sweep" and len(parts) != 2:
            raise SpaceError(f"{name}: is --sweep.SECTION.KEY.FIELD VALUE with a field of {', '.join(protein.FIELDS)}, "
                             "or --sweep.KEY VALUE; --help lists the keys.")
        else:
            (sweep if parts[0] == "sweep" or name in ("-h", "--help") else others).extend(taken)
    return sweep, space, others


def main(argv=None, program="protein.py"):
    """The command line; program: the name in front of errors."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    try:
        if argv[0] == "report":
            import tyro

            print(tyro.cli(write_report, args=argv[1:], prog="protein.py report",
                           config=(tyro.conf.PositionalRequiredArgs,)))
        else:
            sweep_command(argv[0], argv[1:])
    except (ImportError, ValueError, RuntimeError, OSError, OverflowError, MemoryError) as error:  # Overflow: a port
        sys.exit(f"{program}: {str(error) or type(error).__name__}")


def sweep_command(env_name, argv):
    import tyro

    import configuration

    sweep_options, space_options, options = split_options(argv)
    args = configuration.load_config(env_name, configuration.no_resume(options))
    types = {field.name: field.type for field in dataclasses.fields(Sweep)}
    shipped = {}
    for key, text in args["sweep"].get("sweep", {}).items():
        key = configuration.translate("sweep", key, list(types), f"config [sweep] {key}")
        shipped[key] = configuration.coerce(text, types[key], f"config [sweep] {key}")
    for i, word in enumerate(sweep_options):
        name, equals, value = word.partition("=")
        if name.startswith("--sweep."):
            key = configuration.translate("sweep", name[8:].replace("-", "_"), list(types), name)
            sweep_options[i] = f"--sweep.{key.replace('_', '-')}{equals}{value}"
    arguments = dataclasses.make_dataclass("Arguments", [("sweep", Sweep, dataclasses.field(
        default_factory=lambda: Sweep(**shipped)))])
    arguments.__doc__ = f"Search hyper-parameters of {env_name}.\n\n{USAGE[USAGE.index('  --sweep.num'):]}"
    settings = tyro.cli(arguments, args=sweep_options, prog=f"protein.py {env_name}",
                        config=(tyro.conf.FlagConversionOff,)).sweep
    settings.metric = metric_of(settings.metric)

    space = {name.partition(".")[2]: dict(what) for name, what in args["sweep"].items() if name != "sweep"}
    for name, fields in space_options.items():
        space.setdefault(name, {}).update(fields)
    fixed = fixed_settings(configuration.resolve(env_name, options)[0], options)
    for name in [name for name in space if name in fixed]:
        print(f"{name} is given, so it is not searched")
    limit = settings.max_suggestion_cost
    if limit is None:
        limit = 3600.0 if settings.cost == "performance/uptime" else math.inf
    tuner = METHODS[settings.method](
        search_space=searched_settings(env_name, space, options), num_trials=settings.num_trials,
        metric=settings.metric, goal=settings.goal, seed=settings.seed,
        max_suggestion_cost=limit, random_trials=settings.random_trials)
    tuner.env_name = env_name  # set last: the constructor would check settings without options
    Runner(tuner, settings, options).run()
