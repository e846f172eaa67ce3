"""Nothing is left running, and Ctrl-C shows no traceback."""

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import slow_but, start, wait_for

import ocean
import processes

ROOT = Path(__file__).resolve().parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, and a signal at the death "
                           "of a parent")
FOREVER = ["--train.total-timesteps", "1000000000", "--logger", "none",
           "--train.minibatch-size", "1024"]
TRAIN = [sys.executable, str(ROOT / "pufferl.py"), "train"]
PARENTS = {  # each kind of process that starts others: how many, and its command
    "ranks": (2, [*TRAIN, "squared", "--env.num-envs", "64", *FOREVER, "--train.gpus", "2"]),
    "workers": (2, [*TRAIN, "gym/CartPole-v1", "--vec.num-envs", "8", "--vec.backend",
                    "multiprocessing", "--vec.num-workers", "2", *FOREVER, "--train.horizon", "128",
                    "--train.replay-ratio", "1"]),
    "sweep": (1, [sys.executable, str(ROOT / "protein.py"), "squared", "--sweep.workers", "2",
                  "--sweep.logger", "none", "--sweep.train.total-timesteps.min", "1e8",
                  "--sweep.train.total-timesteps.max", "1e9",
                  "--sweep.train.total-timesteps.mean", "5e8"]),
    "video": (1, [*TRAIN[:2], "eval", "breakout", "--baseline", "--eval.episodes", "1",
                  "--eval.video", "out.mp4"]),
}


def run_python(code, *arguments, **options):
    return subprocess.run([sys.executable, "-c", code, str(ROOT), *arguments], capture_output=True,
                          text=True, timeout=200, **options)


def alive(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (process.environ().get("TEST_MARK") == mark
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile what PARENTS run: signals wait for compilers, which may take longer than a test."""
    for name in ("squared", "gym/CartPole-v1"):
        command = [*TRAIN, name, "--train.total-timesteps", "10000", "--logger", "none"]
        subprocess.run(command, cwd=tmp_path_factory.mktemp("compiled"), check=True, timeout=300,
                       capture_output=True)
    ocean.load("breakout")


def left_after_kill(kind, folder, moment, children):
    """Return the command lines that are there 5 seconds after a kill -9."""
    mark = secrets.token_hex(8)
    folder.mkdir()
    parent = start(PARENTS[kind][1], cwd=folder, env={**os.environ, "TEST_MARK": mark},
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(psutil.Process(parent.pid).children()) >= children, 120)
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


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("number", range(54))
def test_nothing_outlives_a_parent_that_is_killed(number, tmp_path, compiled):
    kind, moments = list(PARENTS)[number % len(PARENTS)], random.Random(number)
    count, longest = (PARENTS[kind][0], 1) if number < 4 else (0, 2 if kind == "video" else 15)
    assert left_after_kill(kind, tmp_path / "run", moments.uniform(0, longest), count) == []


def test_a_guarded_process_whose_parent_is_gone_already_ends_at_once():
    command = processes.guarded([sys.executable, "-c", "import time; time.sleep(60)"])
    command[command.index(str(os.getpid()))] = str(2**22 - 7)
    assert subprocess.run(command, timeout=30).returncode == -signal.SIGTERM


HALF = """
import sys
sys.path.insert(0, sys.argv[1])
import data_parallel
import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler

ranks, Popen = [], handler.Popen

def start(*arguments, **options):
    if len(ranks) == 2:
        print([rank.pid for rank in ranks], flush=True)
        raise BlockingIOError(11, "Resource temporarily unavailable")
    ranks.append(Popen(*arguments, **options))
    return ranks[-1]

handler.Popen = start
sys.exit(data_parallel.launch(4, "cpu", [sys.argv[1] + "/pufferl.py", "train", "squared"]))
"""


def test_a_launch_that_fails_half_way_leaves_no_rank(tmp_path):
    mark = secrets.token_hex(8)
    done = run_python(HALF, cwd=tmp_path, env={**os.environ, "TEST_MARK": mark})
    assert done.stdout.count(",") == 1, "two ranks had been started"
    assert alive(mark) == []
    assert done.returncode == 1 and "train.gpus" in done.stderr and "Traceback" not in done.stderr


# -- Signals, and outputs that nobody reads --------------------------------------------------------


@LINUX
@pytest.mark.parametrize("file", slow_but(["pufferl.py", "protein.py"], "pufferl.py"))
def test_ctrl_c_shows_no_traceback(file):
    moments, train = random.Random(file), ["train"] if file == "pufferl.py" else []
    for _ in range(2):
        process = start([sys.executable, "-S", "-c", "import signal, sys, os\n"
                         "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                         "os.execv(sys.argv[1], sys.argv[1:])", sys.executable,
                         str(ROOT / file), *train, "squared", "--help"],
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "numpy" in maps.read_text())  # noqa: B023  packages are imported now
        time.sleep(moments.uniform(0.0, 2.0))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        assert "Traceback" not in output and "KeyboardInterrupt" not in output, output
        assert process.returncode in (-signal.SIGINT, 0), output


def test_a_crash_in_c_names_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("""
import ctypes, gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
class Crash(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    def reset(self, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): ctypes.string_at(0)
""")
    done = subprocess.run([*TRAIN, "mine.py:Crash"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == -signal.SIGSEGV and 'mine.py", line 7 in step' in done.stderr


def test_a_process_that_ignores_ctrl_c_continues_to():
    done = run_python(
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.insert(0, "
        "sys.argv[1]); import processes; processes.stop_at_once(); processes.run_command("
        "lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))", check=True)
    assert done.stdout == "True\n"


def test_a_second_signal_leaves_at_once():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's would stay ignored
    with processes.Interrupts() as interrupts:
        for number in (signal.SIGHUP, signal.SIGHUP):  # as of a terminal that closes
            os.kill(os.getpid(), number)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # of which Linux may send several
    assert signal.signal(signal.SIGHUP, signal.SIG_DFL) is signal.SIG_IGN


@pytest.mark.parametrize("options", [["-u"], []], ids=["unbuffered", "buffered"])
def test_an_output_that_nobody_reads_ends_nothing(options):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import processes\n"
            "processes.say('αβ'); sys.stdin.readline()\n"
            "for _ in range(3): processes.say('more'); print('more', flush=True)\n"
            "assert not sys.stdout.isatty(); processes.say('lost', sys.stderr); sys.exit(3)")
    assert close_early(code, "αβ", "-X", "utf8", *options) == 3


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_in_a_terminal(is_terminal, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with processes.progress() as show:
        show("step 0 of 9")
    assert ("step 0 of 9" in capsys.readouterr().err) == is_terminal


def test_a_command_ends_quietly_when_enough_is_read():
    close_early("import sys; sys.path.insert(0, sys.argv[1]); import processes\n"
                "processes.run_command(lambda: [print(i) for i in range(100_000)])", "0")


def close_early(code, line, *options):
    """Read the first line of a process and close its output; return its status."""
    process = start([sys.executable, *options, "-c", code, str(ROOT)], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().decode() == line + "\n"
    process.stdout.close()
    assert process.communicate(b"\n", timeout=60)[1] == b""
    return process.returncode


def test_a_run_without_stderr_in_a_locale_without_our_signs(tmp_path):
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *TRAIN, "squared",
                           "--train.total-timesteps", "70_000", "--logger", "none", "--data-dir",
                           str(tmp_path)], capture_output=True, text=True, env=plain, timeout=300)
    assert done.returncode == 0 and " ? horizon" in done.stdout  # in place of ×


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


def test_compiled_code_lies_where_nobody_else_can_put_any(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    known = tmp_path / f"kept-{os.getuid()}"
    assert processes.spare_folder("kernels are") == known == processes.spare_folder("kernels are")
    known.chmod(0o777)
    assert processes.spare_folder("kernels are") != known
    known.rmdir()
    (tmp_path / "other").mkdir()
    known.symlink_to(tmp_path / "other")
    assert processes.spare_folder("kernels are") not in (known, tmp_path / "other")
    assert "kernels" in capsys.readouterr().err
