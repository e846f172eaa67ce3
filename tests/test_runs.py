"""Reliability of runs: crashes, signals, full disks, resuming, NaNs, memory, and starting from
another run's policy."""

import collections
import contextlib
import errno
import functools
import gc
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import conftest
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from conftest import read_until, wait_for
from test_pufferl import Plain, make_trainer, run_epochs

import configuration
import loggers
import models
import pufferl
import runs
import vector
from pufferl import ConfigError, PuffeRL, make
from tools import speed
from tools.sweep import command as sweep

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--env.num-envs", "64", "--train.minibatch-size", "1024", "--logger", "none"]


def start(*arguments, cwd, **options):
    return conftest.start([sys.executable, "-u", str(ROOT / "pufferl.py"), *arguments],
                          cwd=cwd, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


# -- crashes and signals
# ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kill_9_at_20_moments_loses_at_most_an_interval_and_no_bit(tmp_path):
    """One run, killed 20 times while it trains and writes, ends with the weights
    of an undisturbed one."""
    interval, epoch, epochs = 2, 64 * 64, 400
    command = ["train", "squared", *SMALL, "--train.total-timesteps", str(epochs * epoch)]
    often = ["--train.checkpoint-interval", str(interval), "--train.log-interval", "0"]
    moments, reached = random.Random(5), 0
    for kill in range(20):
        process = start(*command, *often, *(["--resume", "latest"] if kill else []), cwd=tmp_path)
        output = read_until(process, "run folder")
        run, *others = (tmp_path / "experiments").iterdir()
        assert not others
        if kill:
            resumed = int(output.split("at step ")[1].split()[0].replace(",", ""))
            assert resumed >= reached - interval * epoch, "more than an interval was lost"
        # epochs from now, whatever else this machine does
        log, more = run / "metrics.jsonl", moments.randint(0, 30)
        size = lambda: log.stat().st_size if log.exists() else 0  # noqa: B023, E731
        before, deadline = size(), time.monotonic() + 60
        while size() <= before + 500 * more and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        process.communicate()
        assert torch.load(run / "trainer_state.pt", weights_only=True)["model"]
        json.loads((run / "config.json").read_text())
        # the last one may be torn
        *whole, _ = log.read_text().split("\n") if log.exists() else [""]
        steps = [json.loads(line)["step"] for line in whole]
        assert steps == sorted(set(steps))
        reached = max(steps, default=0)
    assert 40 * epoch < reached < epochs * epoch, "it was not killed while it trained"
    process = start(*command, "--resume", "latest", cwd=tmp_path)
    output = process.communicate()[0]
    assert process.returncode == 0 and not list(run.glob("*.part")), output
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == epochs * epoch
    process = start(*command, "--data-dir", "undisturbed", cwd=tmp_path)
    assert "checkpoint" in process.communicate()[0]
    final = [torch.load(max(folder.glob("*/model_*.pt")), weights_only=True)
             for folder in (tmp_path / "experiments", tmp_path / "undisturbed")]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[1])


CRASH = ROOT / "bench" / "bench_crash.py"


@pytest.mark.slow
def test_every_kind_of_run_is_whole_after_kills_and_on_full_disks():
    command = [sys.executable, str(CRASH), "--kills", "20", "--disks", "20"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [] and min(found["ended"].values()) >= 1 and sum(found["kills"].values()) >= 18, found


@pytest.mark.slow
def test_the_crash_benchmark_is_not_blind(tmp_path):
    """A step that is missing, another number, another weight, a torn file, half a file, and a
    process that is left."""
    script = f"""
import json, shutil, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(CRASH.parents[1])!r})
from bench import bench_crash
import torch
here = Path({str(tmp_path)!r})
run = here / "whole" / "experiments" / "squared_1"
run.mkdir(parents=True)
torch.save({{"a": torch.ones(3)}}, run / "model_squared_000050.pt")
lines = [json.dumps({{"step": step, "losses/x": 0.5 * step, "performance/sps": 7}}) for step in (1, 2)]
(run / "metrics.jsonl").write_text("".join(line + chr(10) for line in lines))
changes = {{
    "nothing": lambda run: (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("7", "8")),
    "a step is missing": lambda run: (run / "metrics.jsonl").write_text(lines[1] + chr(10)),
    "the curve differs at step 2": lambda run: (run / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text().replace("1.0", "1.5")),
    "the weights differ": lambda run: torch.save({{"a": torch.zeros(3)}}, run / "model_squared_000050.pt"),
    "a half-written file": lambda run: (run / "x.part").touch(),
    "damaged": lambda run: (run / "model_squared_000050.pt").write_bytes(b"PK"),
}}
for number, (expected, change) in enumerate(changes.items()):
    shutil.copytree(here / "whole", here / str(number))
    change(here / str(number) / "experiments" / "squared_1")
    try:
        bench_crash.check_whole(here / str(number))
        bench_crash.check_end("squared", here / str(number), here / "whole")
        said = "nothing"
    except (AssertionError, ValueError) as error:
        said = str(error)
    assert expected in said, (expected, said)
subprocess.Popen(["sleep", "60"])
assert bench_crash.left(0.5) == ["sleep 60"] and bench_crash.left(5) == []
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_entry_of_the_curve_is_lost_between_a_checkpoint_and_its_log(tmp_path):
    trainer, logged = make_trainer(tmp_path, checkpoint_interval=1, log_interval=0), []
    save = trainer.run.save
    trainer.run.save = lambda *parts: (logged.append((trainer.run_folder / "metrics.jsonl").read_text()), save(*parts))
    run_epochs(trainer, 2)
    last = [json.loads(text.splitlines()[-1])["step"] for text in logged]
    assert last == [trainer.batch_size, 2 * trainer.batch_size]
    trainer.release()


def test_a_run_that_is_still_trained_is_not_resumed(tmp_path):
    first, second = make_trainer(tmp_path), make_trainer(tmp_path)
    run_epochs(first, 1)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in first.run_folder.iterdir())
    second.run_folder = first.run_folder
    with pytest.raises(ConfigError, match=r"still being trained, .* Wait until it has ended"):
        second.evaluate()
    assert sorted((path.name, path.stat().st_mtime_ns) for path in first.run_folder.iterdir()) == before
    first.close()
    second.evaluate()
    second.release()


def interrupted(tmp_path, *command, wait=1.0):
    """Start, send SIGINT twice, return (process, output, its children before)."""
    process = start(*command, cwd=tmp_path)
    output = read_until(process, "run folder")
    time.sleep(wait)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output += read_until(process, "once more to leave at once")
    process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=60)[0]
    return process, output, children


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
    long = ["--vec.total-agents", "2048", "--train.horizon", "2048", "--train.minibatch-size",
            "65536", "--logger", "none"]
    process, output, _ = interrupted(tmp_path, "train", "squared", *long)
    assert process.returncode == -signal.SIGINT, output
    run = next((tmp_path / "experiments").iterdir())
    assert torch.load(run / "trainer_state.pt", weights_only=True)["epoch"] == 0, (
        "the first checkpoint is whole")
    assert not list(run.glob("model_*.pt"))


@pytest.mark.slow
def test_a_second_signal_leaves_no_worker_behind(tmp_path):
    long = ["--vec.backend", "multiprocessing", "--vec.num-envs", "8", "--vec.num-workers", "2",
            "--train.horizon", "8192", "--train.minibatch-size", "8192", "--logger", "none"]
    process, output, children = interrupted(tmp_path, "train", "gym/CartPole-v1", *long, wait=3.0)
    assert process.returncode == -signal.SIGINT and len(children) == 2, output
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_closed_terminal_stops_a_run_with_a_checkpoint(tmp_path):
    """Two SIGHUPs, as the system and the shell each send one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may themselves run under nohup
    try:
        process = start("train", "squared", *SMALL, cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    read_until(process, "run folder")
    time.sleep(1.0)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.01)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "stopping after this epoch" in output and "checkpoint   " in output, output
    assert list(tmp_path.glob("experiments/*/model_*.pt"))


@pytest.mark.slow
def test_nohup_goes_on(tmp_path):
    few = [*SMALL, "--train.total-timesteps", str(64 * 64 * 20)]
    process = start("train", "squared", *few, cwd=tmp_path,
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    output = read_until(process, "run folder")
    process.send_signal(signal.SIGHUP)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "stopping" not in output and f"{64 * 64 * 20:,} steps in" in output, output


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path):
    """As `| head -1` does; the file that keeps what was said of the run says it."""
    few = [*SMALL, "--train.total-timesteps", str(64 * 64 * 40), "--train.log-interval", "0"]
    command = [sys.executable, str(ROOT / "pufferl.py"), "train", "squared", *few]
    process = conftest.start(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(120) == 0 and "Traceback" not in errors and "Broken" not in errors, errors
    (run,) = (tmp_path / "experiments").iterdir()
    assert (run / "signs.txt").read_text().count("nobody reads the output any more ([Errno 32] Broken pipe)") == 1
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 64 * 64 * 40 and list(run.glob("model_*.pt"))


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    trainers = [make_trainer(tmp_path) for _ in range(3)]
    assert len({trainer.run_folder for trainer in trainers}) == 3
    for trainer in trainers:
        trainer.release()


def test_a_clock_that_jumps_back_changes_nothing(tmp_path, monkeypatch):
    trainer, now = make_trainer(tmp_path, checkpoint_interval=1), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e7)
    begun = trainer.uptime
    run_epochs(trainer, 3)
    assert trainer.uptime > begun >= 0 and trainer.last_sps > 0
    assert "left" in loggers.time_left(trainer) and "-" not in loggers.time_left(trainer)
    names = sorted(path.name for path in trainer.run_folder.glob("model_*.pt"))
    assert names[-1] == "model_cartpole_000003.pt"
    assert configuration.find_model(str(trainer.run_folder), tmp_path, "cartpole").name == names[-1]
    assert runs.is_running(trainer.run_folder)
    trainer.release()
    assert not runs.is_running(trainer.run_folder)


# -- disks
# ------------------------------------------------------------------------------------------------------------


def test_an_unwritable_folder_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    trainer = make_trainer(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot write the run's folder .*--data-dir"):
        trainer.evaluate()
    trainer.release()


def test_an_unwritable_folder_is_named_with_a_logger_too(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    args = pufferl.load_config("squared",
                               ["--data-dir", str(tmp_path / "file"), "--env.num-envs", "64"])
    with pytest.raises(ConfigError, match="cannot write the run's folder"):
        pufferl.train("squared", args)


def test_too_small_a_disk_is_an_error_before_anything_starts(tmp_path):
    """A real limit of the operating system: no file above 16 kB."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))  # noqa: E731
    process = start("train", "squared", *SMALL, cwd=tmp_path, preexec_fn=limit)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "cannot write the run's folder" in output and "Traceback" not in output, output
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.part"))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path):
    """The limit falls while it trains: later files are cut off as on a full disk."""
    process = start("train", "squared", *SMALL, "--train.total-timesteps", "100000000",
                    "--train.checkpoint-interval", "100000", cwd=tmp_path)
    output = read_until(process, "run folder")
    run = next((tmp_path / "experiments").iterdir())
    wait_for((run / "metrics.jsonl").exists)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (16384, 16384))
    process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=240)[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    last = output.splitlines()[-1]
    assert re.search(r"pufferl\.py: the last checkpoint, of epoch \d+, was not written: .*too large", last), output
    assert f"the last whole one is experiments/{run.name}/trainer_state.pt, of epoch 0" in last
    assert (f"--resume experiments/{run.name} trains what is missing" in last
            and "--data-dir" in last)
    assert ("checkpoint   " not in output and not list(run.glob("*.part"))
            and not list(run.glob("model_*.pt")))
    again = start("train", "squared", *SMALL, "--train.total-timesteps", "8192", "--resume",
                  str(run), cwd=tmp_path)
    assert "checkpoint   " in again.communicate(timeout=240)[0] and again.returncode == 0


def test_a_script_is_told_that_the_last_checkpoint_is_lost(tmp_path, monkeypatch):
    def no_space(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make_trainer(tmp_path, checkpoint_interval=1)
    run_epochs(trainer, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        trainer.config["checkpoint_interval"] = 100
        run_epochs(trainer, 1)
        with pytest.raises(ConfigError, match=r"of epoch 3, was not written: .*No "
                           r"space.*trainer_state.pt, of epoch 2"):
            trainer.close()
    assert trainer.vecenv.closed, "all the rest ended"


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """A file system of its own, or a skip where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def check_full_disk(trainer, fill, free, capfd):
    """Training goes on over a full disk, the last checkpoint loads, and later
    ones are written again."""
    run_epochs(trainer, 2)
    path = trainer.run_folder / "trainer_state.pt"
    assert torch.load(path, weights_only=True)["epoch"] == 2
    fill()
    run_epochs(trainer, 3)
    assert trainer.epoch == 5
    saved = torch.load(path, weights_only=True)
    assert saved["epoch"] == 2 and len(list(trainer.run_folder.glob("model_*.pt"))) >= 1
    assert "not written" in capfd.readouterr().err and not list(trainer.run_folder.glob("*.part"))
    free()
    run_epochs(trainer, 1)
    assert torch.load(path, weights_only=True)["epoch"] == 6
    steps = [json.loads(line)["step"]
             for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == trainer.global_step


# TensorBoard's writer
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_really_full_disk_keeps_the_run_and_the_checkpoint(tmp_path, capfd):
    with small_disk(tmp_path / "disk", 2) as disk:
        filler = disk / "filler"

        def fill():
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            assert os.statvfs(disk).f_bavail == 0

        trainer = make_trainer(disk, checkpoint_interval=1, keep=2)
        trainer.logger = pufferl.TensorBoardLogger(disk / "tensorboard")
        check_full_disk(trainer, fill, filler.unlink, capfd)
        trainer.close()


def test_a_disk_that_fails_keeps_the_run_and_the_checkpoint(tmp_path, capfd, monkeypatch):
    def no_space(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make_trainer(tmp_path, checkpoint_interval=1)
    with pytest.MonkeyPatch.context() as patch:
        check_full_disk(trainer, lambda: patch.setattr(os, "fsync", no_space), patch.undo, capfd)
    trainer.close()


@pytest.mark.slow
def test_a_project_and_a_home_that_cannot_be_written_are_enough(tmp_path):
    """Files stand where folders for compiled things would be, which stops root as well."""
    project, rest = tmp_path / "project", tmp_path / "rest"
    left_out = shutil.ignore_patterns(".git", "__pycache__", ".build", "experiments", "tests",
                                      "docs", ".venv")
    shutil.copytree(ROOT, project, ignore=left_out)
    for name in ("__pycache__", "ocean/.build", "ocean/__pycache__"):
        (project / name).touch()
    rest.mkdir()
    options = ["--env.num-envs", "64", "--train.total-timesteps", "4096", "--logger", "none"]
    done = subprocess.run([sys.executable, str(project / "pufferl.py"), "train", "squared", *options], cwd=rest,
                          env={**os.environ, "HOME": "/proc/nowhere", "TMPDIR": str(rest)},
                          text=True, capture_output=True)
    assert done.returncode == 0 and "checkpoint   " in done.stdout, done.stderr
    assert f"compiled kernels are kept in {rest}" in done.stderr
    assert f"compiled environments are kept in {rest}" in done.stderr


# -- checkpoints and resume
# -------------------------------------------------------------------------------------------


def test_the_last_models_are_kept_and_the_best(tmp_path):
    trainer = make_trainer(tmp_path, "squared", checkpoint_interval=1, keep=2, num_envs=64,
                           hidden_size=8)
    logs = iter([{"score": 0.1, "n": 150}, {"score": 0.9, "n": 60}, {"score": 0.9, "n": 60},
                 {"score": 0.4, "n": 500}, {"score": 5.0, "n": 20}])
    trainer.vecenv.log = lambda: next(logs)
    weights = []
    for _ in range(5):
        weights.append({name: tensor.clone()
                        for name, tensor in trainer.policy.state_dict().items()})
        run_epochs(trainer, 1)
    assert trainer.statistics.best_score == pytest.approx(0.9), (
        "20 episodes are not enough to be the best")
    names = sorted(path.name for path in trainer.run_folder.glob("*.pt"))
    assert names == ["best_squared.pt", "model_squared_000004.pt", "model_squared_000005.pt",
                     "trainer_state.pt"]
    best = torch.load(trainer.run_folder / "best_squared.pt", weights_only=True)
    assert all(torch.equal(best[name], weights[2][name]) for name in best), (
        "the weights that played")
    assert configuration.find_model("best", tmp_path, "squared").name == "best_squared.pt"
    assert configuration.find_model("latest", tmp_path, "squared").name == "model_squared_000005.pt"
    # the newer one has no best
    for name, other in (("squared_mine_1", "squared_mine"), ("squared_2", "squared")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"env_name": other, "turn": 2,
                                                                  "policy": {"hidden_size": 77}}))
        (tmp_path / name / "model_x.pt").touch()
    os.utime(tmp_path / "squared_mine_1" / "model_x.pt", (9e9, 9e9))
    assert configuration.find_model("latest", tmp_path, "ocean/squared/squared.h").parent.name == "squared_2"
    for number, name in enumerate(("drone", "drone_race")):  # one environment, two configurations
        folder = tmp_path / f"drone_{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"env_name": "drone", "config_name": name}))
        (folder / "model_x.pt").touch()
        assert configuration.find_model("latest", tmp_path, name).parent == folder
    assert configuration.find_model("latest", tmp_path, "puffer_drone").parent.name == "drone_0"
    widths = [configuration.load_config("squared", ["--data-dir", str(tmp_path),
                                                    "--load-model-path", path])["policy"]
              for path in ("best", "latest")]
    assert widths[0]["hidden_size"] != 77 and widths[1]["hidden_size"] == 77
    again = make_trainer(tmp_path, "squared", num_envs=64, hidden_size=8)
    again.load_checkpoint(trainer.run_folder)
    assert again.statistics.best_score == trainer.statistics.best_score
    assert again.statistics._recent == (pytest.approx(100.0), 20)


def test_the_latest_run_is_the_one_that_was_started_or_resumed_last(tmp_path):
    """Whatever the clock says, and whoever copies a folder."""
    first, second = (make_trainer(tmp_path, "squared", num_envs=64, run_id=name) for name in "ba")

    def latest():
        return configuration.find_run("latest", tmp_path, "squared", "trainer_state.pt").name

    for trainer in (first, second):
        run_epochs(trainer, 1)
        trainer.close()
    os.utime(second.run_folder / "trainer_state.pt", (1, 1))  # the clock had jumped back
    assert latest() == "squared_a"
    copy = shutil.copytree(first.run_folder, tmp_path / "squared_copy")
    os.utime(copy / "trainer_state.pt", (9e9, 9e9))
    assert latest() == "squared_a"
    again = make_trainer(tmp_path, "squared", num_envs=64, run_id="b")
    again.load_checkpoint(again.run_folder)
    run_epochs(again, 1)
    again.release()
    assert latest() == "squared_b"
    (first.run_folder / "config.json").write_text("[]")
    assert configuration.turn_of(first.run_folder) == 0


def test_metadata_comes_back(tmp_path):
    trainer = make_trainer(tmp_path)
    path = trainer.save_checkpoint(tmp_path / "mine.pt",
                                   metadata={"stage": 2, "note": "α", "goal": torch.ones(2)})
    metadata = make_trainer(tmp_path).load_checkpoint(path)
    assert (metadata["stage"] == 2 and metadata["note"] == "α"
            and torch.equal(metadata["goal"], torch.ones(2)))
    pair = collections.namedtuple("pair", "x y")(np.float32(0.5), {1: np.arange(2)})
    path = trainer.save_checkpoint(tmp_path / "mine.pt", metadata={"pair": pair, "none": None})
    x, y = make_trainer(tmp_path).load_checkpoint(path)["pair"]
    assert x == 0.5 and y[1].tolist() == [0, 1]


@pytest.mark.parametrize("value",
                         [Path("here"), np.array(["a"]), object(), {"deep": [Path("here")]}])
def test_metadata_that_could_not_be_read_is_refused_when_it_is_saved(tmp_path, value):
    with pytest.raises(ConfigError, match=r"metadata\['mine'\].* is a .*; a checkpoint holds "
                       r"numbers, text, tensors"):
        make_trainer(tmp_path).save_checkpoint(tmp_path / "mine.pt", metadata={"mine": value})
    assert not (tmp_path / "mine.pt").exists()


def test_a_dead_agent_is_not_blamed(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.evaluate()
    trainer.storage["valid"][:, 0] = 0
    trainer.buffers.logprobs[2, [0, 5]] = math.nan
    assert "first at step 2 of the rollout, of agent 5" in pufferl.explain_nan(trainer)[1]


def test_what_is_of_one_run_is_no_change():
    one, other = ({"auto": {"train.gamma": reason}, "train": {"gamma": 0.9, "seed": 1}}
                  for reason in ("a", "b"))
    assert configuration.difference(one, other) == []
    assert configuration.difference(one, {**other, "train": {"gamma": 0.8}}) == [
        "train.gamma: 0.9 is now 0.8", "train.seed: 1 is now None"]


class Remembers(models.FeedForward):
    """A network that keeps something beside its weights, as torch lets it."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.restored = state["seen"]


def test_the_best_weights_take_no_more_memory_than_weights(tmp_path):
    """Although the network's are a part of the arena."""
    trainer = make_trainer(tmp_path)
    kept = trainer.statistics.best.values()
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == sum(tensor.nbytes for tensor in kept)
    assert trainer.arena.memory.nbytes > 10 * sum(tensor.nbytes for tensor in kept)


def test_what_a_network_keeps_beside_its_weights_is_resumed(tmp_path):
    trainer = make_trainer(tmp_path, policy=lambda env: Remembers(env, 8))
    path = trainer.save_checkpoint(tmp_path / "mine.pt")
    again = make_trainer(tmp_path, policy=lambda env: Remembers(env, 8))
    again.load_checkpoint(path)
    assert again.policy.restored == 3
    again.statistics.add_episodes({"n": 100.0, "score": 1.0}, again.policy)  # the best so far are kept
    assert again.statistics.best["_extra_state"] == {"seen": 3}


def test_a_run_of_another_environment_is_not_gone_on_with(tmp_path):
    trainer = pufferl.train("bandit", configuration.load_config("bandit", [
        "--train.total-timesteps", "100", "--logger", "none", "--data-dir", str(tmp_path)]))
    run = str(trainer.run_folder)
    assert configuration.load_config("puffer_bandit", ["--resume", run])["env_name"] == "bandit"
    with pytest.raises(ConfigError,
                       match="this is a run of bandit, and would go on as one of squared"):
        configuration.load_config("squared", ["--resume", run])
    assert configuration.same_environment("a/mine.py:Env", "/b/mine.py:Env")
    assert not configuration.same_environment("a/mine.py:Env", "a/mine.py:Other")
    assert not configuration.same_environment("dm_control/walker/walk", "dm_control/humanoid/walk")


@pytest.mark.parametrize("name, ignored", [("squared", {"num_workers": 2, "batch_size": 4}),
                                           ("gym/CartPole-v1", {"num_buffers": 2})])
def test_what_a_backend_once_ignored_does_not_stop_a_resume(tmp_path, name, ignored):
    options = ["--data-dir", str(tmp_path), "--train.total-timesteps", "4096", "--vec.num-threads", "1"]
    folder = pufferl.train(name, pufferl.load_config(name, options)).run_folder
    config = json.loads((folder / "config.json").read_text())
    config["vec"] |= ignored
    (folder / "config.json").write_text(json.dumps(config))
    args = pufferl.load_config(name, ["--resume", str(folder), "--data-dir", str(tmp_path)])
    assert not any(args["vec"][key] for key in ignored)
    pufferl.load_env(name, args).close()


class Unhashable:
    """A loss with an __eq__, as of a dataclass."""

    def __call__(self, minibatch):
        return minibatch

    def __eq__(self, other):
        return False


def test_an_edited_file_is_said_at_resume(tmp_path, capsys):
    """Of the network, the environment and what a setting names; not what else a file imports, nor what is installed."""
    own = tmp_path / "nets_of_one.py"
    own.write_text("import models\n\n\nclass Mine(models.FeedForward):\n    pass\n")
    name = f"{Path(__file__).parent}/brought.py:Catch"
    options = ["--policy.name", f"{own}:Mine", "--data-dir", str(tmp_path), "--train.total-timesteps", "2048",
               "--vec.num-threads", "1"]
    folder = pufferl.train(name, pufferl.load_config(name, options)).run_folder
    kept = json.loads((folder / "config.json").read_text())["sources"]
    assert {Path(file).name for file in kept} == {"nets_of_one.py", "brought.py", "models.py"}
    env = vector.make("squared", 2)
    policy = models.FeedForward(env, 8)
    assert {Path(file).name for file in runs.sources(policy, env)} == {"squared.h", "models.py"}
    for setting, file in ((f"{own}:loss", "nets_of_one.py"), (read_until, "conftest.py"),
                          (functools.partial(read_until, 1), "conftest.py"), (Unhashable(), "test_runs.py")):
        files = {Path(path).name for path in runs.sources(policy, env, "muon", None, setting)}
        assert files == {"squared.h", "models.py", file}
    env.close()
    for text, said in (("", False), ("# now\n", True)):
        own.write_text(own.read_text() + text)
        capsys.readouterr()
        pufferl.train(name, pufferl.load_config(name, [*options, "--resume", str(folder)]))
        assert ("edited since" in (out := capsys.readouterr().out)) == said and (": nets_of_one.py." in out) == said


def test_a_run_of_ones_own_network_is_read_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "nets_of_two.py").write_text("import models\n\n\nclass Mine(models.FeedForward):\n    pass\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--policy.name", "nets_of_two.py:Mine", "--data-dir", "runs", "--train.total-timesteps", "2048",
               "--vec.num-threads", "1"]
    folder = pufferl.train("squared", pufferl.load_config("squared", options)).run_folder.resolve()
    monkeypatch.chdir(tmp_path / "elsewhere")
    args = pufferl.load_config("squared", ["--load-model-path", str(folder)])
    assert args["policy"]["name"] == f"{tmp_path / 'nets_of_two.py'}:Mine"
    assert type(pufferl.load_policy(args, pufferl.load_env("squared", args))).__name__ == "Mine"
    config = json.loads((folder / "config.json").read_text())
    for sources in ({"/other/nets_of_two.pyc": "", "/a/nets_of_two.py": "", "/b/nets_of_two.py": ""}, 5, None, [[1]]):
        (folder / "config.json").write_text(json.dumps({**config, "sources": sources}))
        with pytest.raises(ConfigError, match=r"policy\.name = nets_of_two\.py:Mine: must be auto"):
            pufferl.load_config("squared", ["--load-model-path", str(folder)])


def test_what_changed_at_resume_is_said_and_takes_effect(tmp_path, capsys):
    first = make_trainer(tmp_path, env_kwargs={"max_steps": 30})
    run_epochs(first, 2)
    path = first.save_checkpoint(tmp_path / "a.pt")
    second = make_trainer(tmp_path, env_kwargs={"max_steps": 30}, gamma=0.5, learning_rate=0.3)
    capsys.readouterr()
    second.load_checkpoint(path)
    said = capsys.readouterr().out
    assert "train.gamma: 0.99 is now 0.5" in said and "train.learning_rate: 0.01 is now 0.3" in said
    assert (said.count(" is now ") == 2 and second.config["gamma"] == 0.5
            and "begin new episodes" not in said)
    assert torch.equal(second.storage["observations"][-1], first.storage["observations"][-1])


@pytest.mark.parametrize("change", [{"env_kwargs": {"max_steps": 7}}, {"num_envs": 12}],
                         ids=["settings", "agents"])
def test_other_environments_begin_new_episodes_which_is_said(tmp_path, capsys, change):
    first = make_trainer(tmp_path, env_kwargs={"max_steps": 30})
    run_epochs(first, 2)
    path = first.save_checkpoint(tmp_path / "a.pt")
    second = make_trainer(tmp_path, **{"env_kwargs": {"max_steps": 30}, **change})
    second.load_checkpoint(path)
    assert "all environments begin new episodes" in capsys.readouterr().out
    assert (second.storage["resets"][-1].all() and not second.running_returns.any()
            and second.epoch == 2)
    assert second.global_step == first.global_step
    momenta = [trainer.arena.flat("momentum") for trainer in (first, second)]
    assert torch.equal(*momenta) and momenta[0].any()
    run_epochs(second, 1)
    if "env_kwargs" in change:
        assert second.environment["episode_length"] <= 7


def test_other_networks_and_optimizers_are_refused_and_nothing_is_changed(tmp_path):
    first = make_trainer(tmp_path)
    run_epochs(first, 1)
    path = first.save_checkpoint(tmp_path / "a.pt")
    for change, message in (({"hidden_size": 8},
                             r"another network.*encoder.weight is \(16, 4\) there and \(8, 4\)"),
                            ({"policy": Plain}, "another network"),
                            ({"optimizer": "adam"}, "train.optimizer")):
        second = make_trainer(tmp_path, **change)
        before = {name: tensor.clone() for name, tensor in second.policy.state_dict().items()}
        with pytest.raises(ConfigError, match=message):
            second.load_checkpoint(path)
        assert all(torch.equal(before[name], tensor)
                   for name, tensor in second.policy.state_dict().items())
        assert second.epoch == 0
        second.release()


def test_a_trainer_in_a_script_logs_and_can_be_resumed_from_the_command_line(tmp_path):
    policy = models.MinGRUPolicy(vecenv := make("squared", num_envs=64), hidden_size=16)
    trainer = PuffeRL(env=vecenv, policy=policy, total_timesteps=8192, minibatch_size=1024,
                      data_dir=str(tmp_path))
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        trainer.train()
    assert Path(trainer.close()).exists()
    last = json.loads((trainer.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 8192 and math.isfinite(last["losses/entropy"])
    options = ["--data-dir", str(tmp_path), "--resume", "latest", "--env.num-envs", "64",
               "--logger", "none", "--policy.hidden-size", "16", "--train.total-timesteps", "12288"]
    args = pufferl.load_config("squared", options)
    assert args["train"]["minibatch_size"] == 1024
    assert pufferl.train("squared", args).run_folder == trainer.run_folder


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vecenv = make("squared", num_envs=64)
    trainer = PuffeRL(env=vecenv, policy=models.MinGRUPolicy(vecenv, hidden_size=8), data_dir=None)
    run_epochs(trainer, 1)
    assert trainer.close() == "" and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="data_dir"):
        trainer.save_checkpoint()


# -- statistics
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("none", ["None", "none", "NONE"])
def test_none_is_no_folder_on_the_command_line(tmp_path, monkeypatch, capsys, none):
    monkeypatch.chdir(tmp_path)
    options = ["--data-dir", none, "--env.num-envs", "64", "--train.total-timesteps", "4096"]
    trainer = pufferl.train("squared", pufferl.load_config("squared", options))
    assert (trainer.run_folder is None and trainer.global_step >= 4096
            and not list(tmp_path.iterdir()))
    told = capsys.readouterr().out
    assert "; nothing is written" in told and "folder" not in told and "checkpoint" not in told
    with pytest.raises(ConfigError, match=r"--data-dir none there are no runs"):
        pufferl.train("squared",
                      pufferl.load_config("squared", options) | {"load_model_path": "latest"})
    with pytest.raises(ConfigError, match=r"--profile.output says where"):
        speed.profile("squared", pufferl.load_config("squared", options))
    with pytest.raises(ValueError, match="must not be none"):
        sweep.Runner(SimpleNamespace(env_name="squared"), None, options)


def test_smallest_and_largest_return_and_seconds_an_epoch(tmp_path):
    trainer = make_trainer(tmp_path, "cartpole", env_kwargs={"max_steps": 20}, log_interval=1e9)
    returns, running = [], torch.zeros(trainer.num_agents)
    for _ in range(6):
        trainer.evaluate()
        for t in range(trainer.horizon):
            running += trainer.storage["rewards"][t]
            done = trainer.storage["resets"][t + 1].bool()
            returns += running[done].tolist()
            running[done] = 0.0
        trainer.train()
        if trainer.epoch == 1:
            returns.clear()  # logged at the first epoch
    before = trainer._last_log
    metrics = trainer.mean_and_log()
    assert metrics["environment/episode_return_min"] == min(returns) < max(returns)
    assert metrics["environment/episode_return_max"] == max(returns)
    mean = metrics["environment/episode_return"]
    assert min(returns) <= mean <= max(returns) and metrics["environment/n"] == len(returns)
    assert mean == pytest.approx(sum(returns) / len(returns))
    seconds = trainer._last_log[0] - before[0]
    assert metrics["performance/seconds_epoch"] == pytest.approx(seconds / 5, rel=0.2)
    trainer.release()


# -- NaNs
# -------------------------------------------------------------------------------------------------------------


def plant(trainer, name, epoch, t=3):
    """Have environments write a NaN into `name` at step t of an epoch, or break
    the weights before it."""
    advance = trainer.vecenv.advance

    def broken(buffer):
        now = trainer.vecenv._t[buffer]
        advance(buffer)
        if trainer.epoch == epoch and buffer == 0 and now == t:
            row = now + 1 if name == "observations" else now
            getattr(trainer.vecenv.storage, name)[row, 2] = math.nan

    if name == "weights":
        trainer.policy.encoder.weight.data[0, 0] = math.nan
    else:
        trainer.vecenv.advance = broken


@pytest.mark.parametrize("space", ["discrete", "continuous"])
@pytest.mark.parametrize("name", ["observations", "rewards", "weights"])
def test_a_planted_nan_is_named_and_the_checkpoint_left(tmp_path, name, space):
    trainer = make_trainer(tmp_path, env_kwargs={"continuous": space == "continuous"},
                           checkpoint_interval=1)
    run_epochs(trainer, 2)
    saved = (trainer.run_folder / "trainer_state.pt").read_bytes()
    plant(trainer, name, epoch=2)
    trainer.evaluate()
    with pytest.raises(FloatingPointError, match=rf"epoch 2: {name} not finite") as error:
        trainer.train()
    if name != "weights":
        step = 4 if name == "observations" else 3
        assert f"first at step {step} of the rollout" in str(error.value)
        assert "python -m ocean cartpole" in str(error.value)
        assert all(torch.isfinite(tensor).all() for tensor in trainer.policy.state_dict().values())
    trainer.release()
    assert (trainer.run_folder / "trainer_state.pt").read_bytes() == saved
    assert str(trainer.run_folder) in str(error.value)


class Poisoned(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


@pytest.mark.parametrize("name, advice", [
    ("squared", "python -m ocean squared --check"),
    ("my_file.py:Poisoned", "python -m ocean {folder}/my_file.py:Poisoned --check --set limit=3"),
    ("mine.h", "python -m ocean {folder}/mine.h --check"),
    (None, "its reset.. or step.. returned it"),
])
def test_a_nan_says_how_to_find_it_in_any_kind_of_environment(tmp_path, name, advice):
    env, settings = name, {}
    if name == "mine.h":
        env = str(tmp_path / name)
        (tmp_path / name).write_text((ROOT / "ocean/squared/squared.h").read_text())
    elif name and ".py:" in name:
        env, settings = str(tmp_path / name), {"limit": 3}
        (tmp_path / "my_file.py").write_text("import gymnasium\n\nclass "
                                             "Poisoned(gymnasium.make('CartPole-v1')"
                                             ".unwrapped.__class__):\n    def "
                                             "__init__(self, limit=2):\n"
                                             "        super().__init__()\n")
    vecenv = vector.make(env or Poisoned, 2,
                         *([] if env in ("squared", str(tmp_path / "mine.h")) else ["serial"]),
                         env_kwargs=settings)
    config = {"data_dir": None, "horizon": 4, "settings": {"env": {"num_envs": 2, **settings}}}
    config |= {"env": env} if env else {}
    trainer = PuffeRL(config, vecenv, models.MinGRUPolicy(vecenv, hidden_size=8))
    trainer.evaluate()
    trainer.storage["rewards"][2, 1] = math.nan
    with pytest.raises(FloatingPointError,
                       match=rf"step 2 of .*, of agent 1 .*{advice.format(folder=tmp_path)}\)"):
        trainer.train()
    trainer.release()


def test_outputs_that_overflow_are_named(tmp_path):
    trainer = make_trainer(tmp_path)
    run_epochs(trainer, 1)
    trainer.policy.decoder.weight.data.fill_(3e38)
    trainer.evaluate()
    with pytest.raises(FloatingPointError,
                       match=r"(logprobs|values) not finite.*overflow; lower train.learning_rate"):
        trainer.train()
    trainer.release()


# -- short forms, memory
# ----------------------------------------------------------------------------------------------


def test_the_short_form_takes_keywords():
    vecenv = make("breakout", num_envs=256)
    policy = models.MinGRUPolicy(vecenv, hidden_size=16)
    trainer = PuffeRL(env=vecenv, policy=policy, learning_rate=0.02, batch_size=256 * 32,
                      minibatch_size=2048, data_dir=None)
    assert (trainer.horizon, trainer.batch_size, trainer.config["learning_rate"]) == (32, 8192, 0.02)
    trainer.release()
    with pytest.raises(ConfigError, match="there are 256 agents"):
        PuffeRL(env=vecenv, policy=policy, batch_size=1000)
    with pytest.raises(ConfigError, match="Did you mean learning_rate"):
        PuffeRL(env=vecenv, policy=policy, learning_rat=0.02)
    with pytest.raises(ConfigError,
                       match="made for observations of 118 numbers, these environments give 25"):
        PuffeRL(env=make("squared", num_envs=8, env_kwargs={"distance": 2}), policy=policy)
    with pytest.raises(ConfigError, match="needs an environment and a policy"):
        PuffeRL({"learning_rate": 0.1}, vecenv)


@pytest.mark.parametrize("kind", ["fused", "custom", "lstm"])
def test_a_second_trainer_takes_over_a_policy_and_memory_does_not_grow(kind):
    vecenv = make("cartpole", num_envs=16, num_threads=1)
    if kind == "fused":
        policy = models.MinGRUPolicy(vecenv, hidden_size=32)
    elif kind == "custom":
        policy = Plain(vecenv)
    else:
        policy = models.LSTMWrapper(vecenv, models.FeedForward(vecenv, hidden_size=16),
                                    hidden_size=16)
    arenas = []
    for stage in range(3):
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        env = make("cartpole", num_envs=16, num_threads=1,
                   env_kwargs={"max_steps": 20 * (stage + 1)})
        trainer = PuffeRL(env=env, policy=policy, learning_rate=0.01 / (stage + 1), batch_size=128,
                          data_dir=None)
        assert all(torch.equal(before[name], tensor)
                   for name, tensor in policy.state_dict().items())
        run_epochs(trainer, 2)
        assert any(not torch.equal(before[name], tensor)
                   for name, tensor in policy.state_dict().items())
        arenas.append(weakref.ref(trainer.arena))
        flat = trainer.arena.flat("weights")
        assert policy.state_dict()[next(iter(before))].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        trainer.close()
        del trainer, flat, env
        gc.collect()
        assert [arena() is None for arena in arenas] == [True] * (stage + 1), (
            "an old trainer is still held")


def test_running_out_of_memory_names_the_setting(tmp_path):
    vecenv = vector.make("cartpole", 64)
    policy = models.MinGRUPolicy(vecenv, hidden_size=16)
    with pytest.raises(MemoryError,
                       match=r"out of memory: lower vec.total_agents .* or train.horizon"):
        PuffeRL(env=vecenv, policy=policy, horizon=2**38, minibatch_size=2**38, data_dir=None)
    trainer = make_trainer(tmp_path, policy=Plain)
    trainer.evaluate()
    trainer.engine.forward = lambda observations, state: torch.empty(2**50)
    with pytest.raises(MemoryError, match=r"lower train\.max_minibatch_size"):
        trainer.train()
    trainer.release()
