"""Run the trials of a sweep and keep what they show.

    ledger = Ledger("experiments/sweep_breakout")
    ledger.results()                             # {number: record} of the finished trials

command.py decides what is tried, report.py makes a page of the results. A sweep's whole state is
its folder, so the same command continues one that was stopped or killed.
"""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import diagnostics
import processes
from errors import ConfigError

# Files that import torch are imported within functions: the report of a finished sweep needs none.

ROOT = Path(__file__).resolve().parents[2]

# --------------------------------------------------------------------------------------------------
# The ledger: the files of the sweep's folder


class Ledger:
    """Trials of a sweep on disk. One process at a time works on it (runs.lock).

        FOLDER/sweep.json             what is searched; a later start must ask for the same
        FOLDER/trials/00007.running   settings, attempts and process of a trial that runs or waits
        FOLDER/trials/00007.json      finished: settings, score, cost, curve; never changes
        FOLDER/runs/00007/            what `pufferl.py train` wrote, and its output
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.trials = self.folder / "trials"
        self.trials.mkdir(parents=True, exist_ok=True)
        self._results = {}

    def results(self):
        """Return {number: record} of all finished trials."""
        for path in self.trials.glob("*.json"):
            if int(path.stem) not in self._results:
                self._results[int(path.stem)] = read_json(path)
        return dict(sorted(self._results.items()))

    def claims(self):
        """Return {number: claim} of all trials that run or wait to be run again."""
        return {int(path.stem): read_json(path)
                for path in sorted(self.trials.glob("*.running"))
                if not path.with_suffix(".json").exists()}

    def free_number(self):
        """Return the lowest number that no trial has."""
        return next(number for number in itertools.count()
                    if not any(self.trials.glob(f"{number:05d}.*")))

    def update(self, claim):
        """Write a new or changed claim to its file."""
        write_json(self.trials / f"{claim['trial']:05d}.running", claim)

    def finish(self, record):
        """Make `record` its trial's result."""
        path = self.trials / f"{record['trial']:05d}.json"
        write_json(path, record)
        path.with_suffix(".running").unlink(missing_ok=True)


def read_json(path):
    """Read a JSON file of the ledger's folder. Raises ConfigError if it is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}). A trial without its file is run again; the "
                          "command that began the sweep writes sweep.json.") from None


def end_orphan(claim, patience=60.0):
    """End the training process of a dead sweep, which is saving since then."""
    pid, created = claim.get("child") or (None, None)
    with contextlib.suppress(psutil.Error):
        # the system uses numbers again
        if pid is None or abs(psutil.Process(pid).create_time() - created) > 5:
            return
        if psutil.wait_procs([psutil.Process(pid)], timeout=patience)[1]:
            psutil.Process(pid).kill()


def write_json(path, content):
    """Write a JSON file, whole."""
    text = json.dumps(content, indent=1, default=str) + "\n"
    processes.write_whole(path, lambda file: file.write(text.encode()))


# --------------------------------------------------------------------------------------------------
# Trials: one training run in a process


@dataclass
class Curve:
    """A training curve: arrays (n,) of the entries that have the metric."""

    step: np.ndarray
    score: np.ndarray
    cost: np.ndarray
    begin: np.ndarray  # the step of the entry before: a score is a mean since then
    count: np.ndarray  # the episodes in that mean, or its steps
    names: tuple = ()
    last: float = 0.0  # step of the last entry, with or without the metric
    last_cost: float = 0.0  # the cost in the last entry that has one

    @classmethod
    def read(cls, path, metric, cost="performance/uptime"):
        """Read metrics.jsonl."""
        entries = diagnostics.read_metrics(path)
        begins = [0, *(entry["step"] for entry in entries)]
        rows = [[entry["step"], entry.get(metric, math.nan), entry.get(cost, math.nan), begin,
                 entry.get("environment/n", entry["step"] - begin)]
                for entry, begin in zip(entries, begins, strict=False)]
        columns = np.array(rows, dtype=float).reshape(-1, 5)
        known = np.isfinite(columns)
        costs = columns[known[:, 2], 2]
        names = dict.fromkeys(name for entry in entries for name in entry)
        return cls(*columns[known.all(1)].T, names=tuple(names), last=rows[-1][0] if rows else 0.0,
                   last_cost=costs[-1] if len(costs) else 0.0)

    def at(self, step, window):
        """Return (score, cost) at a step; score: the mean over the last `window` steps.

        An entry counts by its episodes, as many as its share in the window, so that the score does
        not depend on how often a run logs.
        """
        last = np.searchsorted(self.step, step, side="right")
        end, begin = self.step[:last], self.begin[:last]
        inside = np.clip(end - np.maximum(begin, step - window), 0, None)
        weights = self.count[:last] * inside / np.maximum(end - begin, 1)
        if not weights.any():  # the last entry ended before the window
            weights[-1] = 1.0
        return float(np.average(self.score[:last], weights=weights)), float(self.cost[last - 1])

    def points(self, total, count):
        """Return [(progress, score, cost)] at `count` even places.

        Of a schedule of `total` steps, as far as the run came, the last where it ended. A score is
        the mean over the last tenth of the schedule.
        """
        if len(self.step) == 0:
            return []
        end = self.step[-1]
        places = [total * i / count for i in range(1, count + 1)]
        steps = [step for step in places if self.step[0] <= step < end] + [end]
        return [(min(1.0, step / total), *self.at(step, total / 10)) for step in steps]


def should_stop_early(curve, total, rule):
    """Return whether a running trial should be stopped.

    Past `after` of its schedule and before its last tenth, if its score has not come `share` of the
    way from the rule's `low` score to the best score of any trial at the same cost.
    """
    if (not rule or len(curve.step) == 0
            or not rule["after"] <= curve.step[-1] / total <= 0.9):
        return False
    score, cost = curve.at(curve.step[-1], total / 10)
    scores = [s for c, s in rule["front"] if c <= cost]
    return bool(scores) and (rule["sign"] * score - rule["low"]
                             < rule["share"] * (max(scores) - rule["low"]))


def run_trial(job, stop=None, on_start=None):
    """Train once and return the outcome.

    A dict: status (done, stopped, failed, interrupted, or lost if another process ended it), score,
    cost, steps, curve, error, run. job: command, cwd (the folder of its relative paths, if this
    machine has it), folder (None: a temporary one), total (steps), metric, cost, downsample, rule
    (see `should_stop_early`), limit (cost after which it is stopped). stop: an Event that asks to
    save and leave. on_start: called with the process's (pid, creation time). This also runs as a
    Ray task, on any machine with these files.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(job["folder"]
                      or stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-")))
        folder.mkdir(parents=True, exist_ok=True)
        trainer = str(ROOT / job["trainer"])
        command = [sys.executable, trainer, *job["command"], "--data-dir", str(folder)]
        previous = newest_run(folder)
        if previous and (previous / "trainer_state.pt").exists():
            command += ["--resume", str(previous)]
        output = stack.enter_context(open(folder / "output.txt", "ab"))
        position = output.tell()
        # if this process is killed, the training run saves and stops
        process = subprocess.Popen(processes.guarded(command), stdout=output, stderr=output,
                                   stdin=subprocess.DEVNULL, start_new_session=True,
                                   cwd=job["cwd"] if os.path.isdir(job["cwd"]) else None,
                                   env={**os.environ, **job["env"]})
        stack.callback(end, process)  # after an error
        if on_start:
            with contextlib.suppress(psutil.Error):
                on_start((process.pid, psutil.Process(process.pid).create_time()))
        status = watch_process(process, folder, job, stop)
        text = (folder / "output.txt").read_bytes()[position:].decode(errors="replace")
        run = newest_run(folder)
        curve = curve_of(folder, job)
        points = curve.points(job["total"], job["downsample"])
        error = None
        if status == "done" and process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
            name = signal.Signals(-process.returncode).name
            status = "lost"
            error = f"it was killed ({name}), by a user or because the machine ran out of memory"
        elif status == "done" and process.returncode != 0:
            status, error = "failed", explain(process.returncode, text)
        elif status == "done" and curve.last < job["total"]:
            status = "lost"
            error = f"a signal stopped it at {100 * curve.last / job['total']:.0f}%"
        elif status != "interrupted" and not points:
            status = "failed"
            error = (f"{job['metric']} or {job['cost']} was never logged as a number; there are: "
                     f"{', '.join(curve.names)}" if curve.names
                     else f"no metrics were logged: {explain(process.returncode, text)}")
        if run and status in ("done", "stopped"):  # only the model of a finished trial is needed
            (run / "trainer_state.pt").unlink(missing_ok=True)
        score, cost = points[-1][1:] if points else (None, None)
        return {"status": status, "score": score, "cost": cost,
                "steps": float(curve.step[-1]) if points else 0.0, "curve": points, "error": error,
                "run": str(run) if run and job["folder"] else None}


def watch_process(process, folder, job, stop):
    """Wait for a training run.

    Returns done (it ended), stopped (by the rule or the limit) or interrupted.
    """
    begin = last_check = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return "done"
        now = time.monotonic()
        if stop is not None and stop.is_set():
            end(process)
            return "interrupted"
        if now - last_check < max(1.0, 0.02 * (now - begin)):  # reading a long log takes time
            continue
        last_check = now
        curve = curve_of(folder, job)
        if len(curve.step):
            job.get("at", {}).update(progress=curve.step[-1] / job["total"], score=curve.score[-1])
        if curve.last_cost > job["limit"] or should_stop_early(curve, job["total"], job["rule"]):
            end(process)
            return "stopped"


def curve_of(folder, job):
    """Read the curve of the run in a trial's folder, empty before it has one."""
    log = (newest_run(folder) or folder) / "metrics.jsonl"
    return Curve.read(log, job["metric"], job["cost"])


def end(process, patience=60.0):
    """Ask a training run to save and stop; kill it if it does not."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def newest_run(folder):
    """Return the newest run in a trial's folder; None if there is none."""
    runs = [path.parent for path in Path(folder).glob("*/config.json")]
    return max(runs, key=lambda run: run.stat().st_mtime, default=None)


def explain(code, text):
    """Return the exit status of a failed run, and its last printed line.

    If it ended by itself, a line of the last ten that names an error comes first, because advice
    may follow it. After a crash it is Python's line about the signal, with the place.
    """
    lines = [line for line in (line.strip(" │╭╰╮╯─") for line in text.splitlines()) if line]
    errors = [line for line in lines[-10:] if code > 0 and re.match(
        r"[\w.]*(Error|Exception|SystemExit|StopIteration)\b", line)]
    if crashes := [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]:
        traceback = lines[crashes[-1] :]
        places = [line for line in traceback if line.startswith("File ")]
        errors = [", ".join([traceback[0], *places[:1]])]
    last = (errors or lines or ["it printed nothing"])[-1][:200]
    return f"exit {code}: {last}"


# --------------------------------------------------------------------------------------------------
# Where trials run


class LocalPool:
    """Runs trials on this machine; each thread watches one training process.

    slots: trials at once (`workers`, or as many on each GPU). gpus: the number of GPUs that share
    them, by CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, workers, gpus=0):
        processes.check_count("sweep.workers", workers, *processes.processes_at_most())
        self.slots = workers * max(1, gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = (visible.split(",") if visible else [str(gpu) for gpu in range(gpus)])[:gpus]
        self.stop = threading.Event()
        self.threads = futures.ThreadPoolExecutor(self.slots, thread_name_prefix="trial")
        self.running = {}  # {future: claim}

    def submit(self, claim, job, on_start):
        if self.gpus:
            busy = [running["gpu"] for running in self.running.values()]
            claim["gpu"] = min(self.gpus, key=busy.count)
            job = {**job, "env": {**job["env"], "CUDA_VISIBLE_DEVICES": claim["gpu"]}}
        self.running[self.threads.submit(run_trial, job, self.stop, on_start)] = claim

    def finished(self, timeout):
        """Wait up to `timeout` seconds; returns [(claim, outcome)] of what ended."""
        done, _ = futures.wait(self.running, timeout, return_when=futures.FIRST_COMPLETED)
        return [(self.running.pop(future), future.result()) for future in done]

    def close(self):
        """Make all trials save and end; returns [(claim, outcome)]."""
        self.stop.set()
        outcomes = []
        while self.running:
            outcomes += self.finished(None)
        self.threads.shutdown()
        return outcomes


class RayPool:
    """Runs trials as Ray tasks on a cluster.

    address: the cluster's, "auto" for this machine's cluster, or "local" to start one here. Ray
    sends the project's files along; the nodes need the Python packages and a C compiler. slots:
    `workers` if given, else as many trials as fit the cluster. If a node is lost, its trials get
    status "lost" and are run again.
    """

    def __init__(self, address, workers, cpus=1.0, gpus=0.0):
        import ray

        self.ray = ray
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            excludes = [".venv", ".git", "experiments", "ocean/.build", "__pycache__",
                        ".hypothesis", ".pytest_cache"]
            ray.init(address=None if address == "local" else address, log_to_driver=False,
                     configure_logging=False,
                     include_dashboard=False if address == "local" else None,
                     runtime_env={"working_dir": str(ROOT), "excludes": excludes})
        total = ray.cluster_resources()
        fits = [int(total.get(name, 0) / share) for name, share in (("CPU", cpus), ("GPU", gpus))
                if share]
        self.slots = workers or max(1, min(fits))
        self.task = ray.remote(run_trial).options(num_cpus=cpus, num_gpus=gpus, max_retries=0,
                                                  scheduling_strategy="SPREAD")
        self.running = {}  # {reference: claim}

    def submit(self, claim, job, on_start):
        self.running[self.task.remote({**job, "folder": None})] = claim

    def finished(self, timeout):
        outcomes = []
        for ref in self.ray.wait(list(self.running), timeout=timeout)[0]:
            claim = self.running.pop(ref)
            try:
                outcomes.append((claim, self.ray.get(ref)))
            except self.ray.exceptions.RayTaskError:
                raise  # an error of run_trial itself, and not a lost node
            except self.ray.exceptions.RayError as error:
                outcomes.append((claim, {"status": "lost", "error": str(error).splitlines()[0]}))
        return outcomes

    def close(self):
        outcomes = [(claim, {"status": "interrupted"}) for claim in self.running.values()]
        for ref in self.running:
            self.ray.cancel(ref, force=True)
        if self.is_ours:
            self.ray.shutdown()
        return outcomes


# --------------------------------------------------------------------------------------------------
# A record: its settings as options, its numbers as text, and what a tuner learns from it


DECIDING = {"train.optimizer", "rnn.name", "policy.name"}  # these decide which others are used


def used(settings, config):
    """Drop the settings that a trial's network and optimizer do not use.

    `train` refuses them. config: that of all trials.
    """
    import configuration

    args = {name: dict(section) if isinstance(section, dict) else section
            for name, section in config.items()}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        args[section][key] = value
    idle = configuration.unused(args)
    return {name: value for name, value in settings.items() if name not in idle}


def as_options(settings):
    """Return settings as options: ["--train.learning-rate", "0.01", ...]."""
    return [text for name, value in settings.items()
            for text in ("--" + name.replace("_", "-"), str(value))]


def observe_record(tuner, record):
    """Let a tuner observe a record of the ledger."""
    score, cost = (math.nan if record[key] is None else record[key] for key in ("score", "cost"))
    tuner.observe(record["settings"], score, cost, record["status"] == "failed", record["curve"])


def short(value):
    """Format a value for people: 4,096 and not 4.1e+03."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if 1000 <= abs(value) < math.inf or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.4g}"
