"""processes.py: nothing is left running or started that the machine cannot hold, and
Ctrl-C shows no traceback."""

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest
from conftest import slow_but, start, wait_for

import ocean
import processes

ROOT = Path(__file__).resolve().parent.parent
PUFFERL, QUIET = str(ROOT / "pufferl.py"), {"stdout": subprocess.DEVNULL,
                                            "stderr": subprocess.DEVNULL}
FOREVER = ["--train.total-timesteps", "1000000000", "--logger", "none",
           "--train.minibatch-size", "1024"]
TRAIN = [sys.executable, PUFFERL, "train"]
PARENTS = {  # each kind of process that starts others
    "ranks": [*TRAIN, "squared", "--env.num-envs", "64", *FOREVER, "--train.gpus", "2"],
    "workers": [*TRAIN, "gym/CartPole-v1", "--vec.num-envs", "8", "--vec.backend",
                "multiprocessing", "--vec.num-workers", "2", *FOREVER, "--train.horizon", "128",
                "--train.replay-ratio", "1"],
    "sweep": [sys.executable, str(ROOT / "protein.py"), "squared", "--sweep.workers", "2",
              "--sweep.logger", "none", "--sweep.train.total-timesteps.min", "1e8",
              "--sweep.train.total-timesteps.max", "1e9",
              "--sweep.train.total-timesteps.mean", "5e8"],
    "video": [sys.executable, PUFFERL, "eval", "breakout", "--baseline", "--eval.episodes", "1",
              "--eval.video", "out.mp4"],
}
CHILDREN = {"ranks": 2, "workers": 2}  # of others one


def alive(mark):
    """The processes that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (process.environ().get("TEST_MARK") == mark
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
    return found


def left_after_kill(kind, folder, moment, children):
    """Start a parent, kill -9 it `moment` seconds after it has so many children: the command lines
    of what is there 5 seconds later."""
    mark, deadline = secrets.token_hex(8), time.monotonic() + 120
    folder.mkdir()
    for name in ("squared", "breakout"):  # a compiler ends by itself, but it may take longer
        ocean.load(name)
    parent = start(PARENTS[kind], cwd=folder, env={**os.environ, "TEST_MARK": mark}, **QUIET)
    try:
        while len(psutil.Process(parent.pid).children()) < children and time.monotonic() < deadline:
            assert parent.poll() is None, f"{kind} has ended by itself"
            time.sleep(0.1)
        time.sleep(moment)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and alive(mark):
            time.sleep(0.1)
        return [" ".join(process.cmdline())[-200:] for process in alive(mark)]
    finally:
        for process in alive(mark):
            process.kill()


LINUX = pytest.mark.skipif(sys.platform != "linux",
                           reason="it looks into /proc, and other systems tell nobody that a "
                           "parent was killed")


@pytest.mark.slow
@LINUX
def test_nothing_outlives_a_parent_that_is_killed(tmp_path):
    """All kinds side by side, each when it has just begun to start others, or is about to."""
    kinds, moments = list(PARENTS), random.Random(7)
    with ThreadPoolExecutor(len(kinds)) as pool:
        left = pool.map(lambda kind, moment: left_after_kill(kind, tmp_path / kind, moment,
                                                             CHILDREN.get(kind, 1)),
                        kinds, [moments.uniform(0.0, 1.0) for _ in kinds])
        assert dict(zip(kinds, left, strict=True)) == {kind: [] for kind in kinds}


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_nothing_outlives_a_parent_that_is_killed_at_any_moment(number, tmp_path):
    moments = random.Random(number)
    kind = list(PARENTS)[number % len(PARENTS)]
    assert left_after_kill(kind, tmp_path / "run", moments.uniform(0.0, 15.0 if kind != "video" else 2.0), 0) == []


def test_a_guarded_process_whose_parent_is_gone_already_ends_at_once():
    """It was killed before the guard could ask to be told."""
    command = processes.guarded([sys.executable, "-c", "import time; time.sleep(60)"])
    command[command.index(str(os.getpid()))] = str(2**22 - 7)
    assert subprocess.run(command, timeout=30).returncode == -signal.SIGTERM


HALF = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import data_parallel, processes, psutil

class Popen(subprocess.Popen):
    count = 0
    def __init__(self, *arguments, **options):
        Popen.count += 1
        if Popen.count == 3:
            print([child.pid for child in psutil.Process().children()], flush=True)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        super().__init__(*arguments, **options)

import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
handler.Popen = Popen
sys.exit(data_parallel.launch(4, [sys.argv[1] + "/pufferl.py", "train", "squared", "--train.gpus", "4"]))
"""


def test_a_launch_that_fails_half_way_leaves_no_rank(tmp_path):
    mark = secrets.token_hex(8)
    done = subprocess.run([sys.executable, "-c", HALF, str(ROOT)], cwd=tmp_path,
                          capture_output=True, text=True,
                          env={**os.environ, "TEST_MARK": mark}, timeout=200)
    assert done.stdout.count(",") == 1, "two ranks had been started"
    assert alive(mark) == []
    assert done.returncode == 1 and "train.gpus = 4: not all ranks could be started" in done.stderr
    assert "Traceback" not in done.stderr


# -- Ctrl-C, and outputs that nobody reads
# ----------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("file", slow_but(["pufferl.py", "protein.py"], "pufferl.py"))
def test_ctrl_c_shows_no_traceback(file):
    """Also while packages are imported."""
    moments = random.Random(file)
    for _ in range(2):
        options = ["squared", "--help"] if file != "pufferl.py" else ["train", "squared", "--help"]
        process = start([sys.executable, "-S", "-c", "import signal, sys, os\n"
                         "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                         "os.execv(sys.argv[1], sys.argv[1:])", sys.executable,
                         str(ROOT / file), *options],
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "numpy" in maps.read_text())  # noqa: B023 - Python itself has begun, and packages are imported
        time.sleep(moments.uniform(0.0, 2.0))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        assert "Traceback" not in output and "KeyboardInterrupt" not in output, output
        assert process.returncode in (-signal.SIGINT, 0), output


def test_a_crash_in_c_says_where_it_was(tmp_path):
    """Of an environment that is tried out in the trainer's own process."""
    (tmp_path / "mine.py").write_text("""
import ctypes, gymnasium, numpy as np
class Crash(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): ctypes.string_at(0)
""")
    done = subprocess.run([sys.executable, ROOT / "pufferl.py", "train", "mine.py:Crash"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error" in done.stderr
    assert 'mine.py", line 6 in step' in done.stderr


def test_one_that_ignores_ctrl_c_goes_on_ignoring_it():
    code = ("import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.insert(0, "
            "sys.argv[1]); import processes; processes.stop_at_once(); processes.run_command("
            "lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))")
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True,
                          text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_into_c_that_does_not_return_is_left_at_the_second_signal(number):
    code = f"""
import ctypes, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import processes

def wait_for_ever():
    signal.signal({int(number)}, lambda *_: None)
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    print("here", flush=True)
    library.pthread_mutex_lock(lock)

processes.STUCK = 0.3
processes.run_command(wait_for_ever)
"""
    process = start([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, 60)  # else Python handles it
    process.send_signal(number)
    assert process.stderr.readline() == b"\n" and b"in one call into C for 0 s" in process.stderr.readline()
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number and errors == b"left at once, in the middle of that call\n"


def test_signals_of_a_forked_child_are_not_the_parents():
    with processes.unstuck():
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_signal_that_is_handled_ends_nothing(capsys):
    before, count = signal.signal(signal.SIGINT, lambda *_: None), threading.active_count()
    try:
        with mock.patch.object(processes, "STUCK", 20), processes.unstuck():
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
        assert threading.active_count() <= count  # one of an earlier test may have ended meanwhile
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [["-u"], []], ids=["unbuffered", "buffered"])
def test_outputs_are_what_they_were_until_nobody_reads_them(options):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import processes; "
            "processes.outlive_readers()\n"
            "print('αβ', end='', flush=sys.argv[2] == 'buffered'); sys.stdin.readline()\n"
            "assert processes.lost_output() is None and not sys.stdout.isatty()\n"
            "print('more', flush=True); print('still more', flush=True)\n"
            "print(type(processes.lost_output()).__name__, file=sys.stderr)")
    process = start([sys.executable, *options, "-X", "utf8", "-c", code, str(ROOT),
                     "" if options else "buffered"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(4).decode() == "αβ"
    process.stdout.close()
    errors = process.communicate(b"\n", timeout=60)[1]
    assert process.returncode == 0 and errors.decode() == "BrokenPipeError\n"


# -- what a machine can hold
# ------------------------------------------------------------------------------------------


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch):
    files = {"memory.max": "3000000", "memory.current": "2000000",
             "memory.stat": "anon 5\ninactive_file 500000"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = processes.available_memory()
    monkeypatch.setattr(processes, "Path", lambda folder, name: tmp_path / name)
    assert processes.available_memory() == 1_500_000 < before
    (tmp_path / "memory.max").write_text("max")
    assert processes.available_memory() > 1_500_000


def test_kept_code_lies_where_nobody_else_can_put_any(tmp_path, monkeypatch, capsys):
    """A link that somebody else made leads elsewhere, and a folder that others may
    write to is not taken."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    known = tmp_path / f"kept-{os.getuid()}"
    assert processes.spare_folder("kernels are") == known == processes.spare_folder("kernels are")
    known.chmod(0o777)
    assert processes.spare_folder("kernels are") != known
    known.rmdir()
    (tmp_path / "other").mkdir()
    known.symlink_to(tmp_path / "other")
    assert processes.spare_folder("kernels are") not in (known, tmp_path / "other")
    assert "kernels are kept in" in capsys.readouterr().err


def test_a_run_without_stderr_in_a_locale_without_our_signs(tmp_path):
    """As some daemons start jobs, and old machines are set."""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [*TRAIN, "squared", "--train.total-timesteps", "70_000", "--logger", "none", "--data-dir", str(tmp_path)]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], capture_output=True, text=True, env=plain,
                          timeout=300)
    assert done.returncode == 0 and "1,024 agents ? horizon 64 = 65,536 steps" in done.stdout
