"""What a training run prints on a terminal, and into a file or pipe."""

import contextlib
import fcntl
import io
import math
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import slow_but
from rich.console import Console

import configuration
import loggers
import processes


class Fake:
    """As much of a trainer as a dashboard looks at."""

    def __init__(self, **environment):
        self.uptime, self.global_step, self.sps = 40.0, 1000, 25.0
        self.epoch, self.total_epochs, self.num_agents = 1, 10, 8
        self.config, self.env_name = {"total_timesteps": 10_000}, "squared"
        self.args = {"config_name": "squared", "env": configuration.load_config("squared")["env"]}
        self.environment = environment
        self.losses = {"entropy": 1.5, "approx_kl": 0.2, "clipfrac": 0.1}
        self.engine = SimpleNamespace(name="compiled")
        self.buffers = SimpleNamespace(usage=dict)
        self.statistics = SimpleNamespace(stages={"environment": 1.0, "learn": 3.0})
        self.signs = SimpleNamespace(said={"kl": (5, "Updates are too large.")}, has_ended=True)
        self.policy = SimpleNamespace(parameters=list)
        self.run_folder = None


def terminal(width=120, height=50):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height,
                   color_system="truecolor")


def dashboard(width=None):
    """A dashboard, in a terminal if there is a width."""
    screen = loggers.Dashboard(loggers.solved_at(Fake().args))
    if width:
        screen.console = terminal(width)
    return screen


def test_the_time_left_leaves_out_what_came_before_the_first_entry(capsys):
    trainer, screen = Fake(score=0.5), dashboard()
    screen.show(trainer)
    trainer.uptime, trainer.global_step = 45.0, 4000  # 3,000 steps in 5 s; the first 1,000 took 40
    screen.show(trainer)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "steps" in line
                     and "gone" in line]
    assert first.endswith("40s gone") and "score 0.500" in first
    assert second.endswith("45s gone, 10s left")


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_has_a_curve_and_colours(width):
    screen, trainer = dashboard(width), Fake(score=0.1, perf=0.5, n=3.0)
    for score in (0.1, 0.5, 0.96):
        trainer.environment = {**trainer.environment, "score": score}
        screen.show(trainer)
    trainer.environment |= {f"item_{i}": float(i) for i in range(50)}
    screen.show(trainer)
    screen.close()
    shown = screen.console.file.getvalue()
    assert "▁▄█" in shown and "0.95" in shown and "Updates are too large." in shown
    assert "\x1b[1;32m" in shown.split("0.96")[0][-40:], "green: it is solved"
    assert "\x1b[33m" in shown.split("0.2\x1b")[0][-40:], "yellow: approx_kl is worth a look"
    assert "? " not in shown, "nobody can press it"
    assert re.search(r"and \d+ more", shown), "many statistics do not fill the screen"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 12), (100, 30), (200, 50)])
@pytest.mark.parametrize("explaining", [None, False, True])
def test_the_panel_fits_the_terminal(width, height, explaining):
    """Nothing is cut off, and as many numbers are shown as there is room for."""
    trainer = Fake(**dict.fromkeys(("score", "perf", "episode_return", "episode_length", "n",
                                    "episode_return_min", "episode_return_max"), 0.5))
    trainer.losses = dict.fromkeys(("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac",
                                    "explained_variance", "old_approx_kl", "importance", "grad_norm",
                                    "learning_rate"), 0.01)
    stages = "environment", "policy", "learn", "ranks", "other"
    trainer.statistics = SimpleNamespace(stages=dict.fromkeys(stages, 1.0))
    console = terminal(width, height)
    shown = loggers.panel(trainer, [0.1, 0.5, 0.96], ("score", 0.95), "40s gone, 6m 00s left",
                          console, explaining)
    lines = ["".join(segment.text for segment in line) for line in console.render_lines(shown)]
    assert len(lines) <= height and {len(line) for line in lines} == {width}
    assert lines[0].startswith("╭") and lines[-1].startswith("╰")
    text = "\n".join(lines)
    assert "━" in text and "6m 00s left" in text and "Updates are too large." in text
    assert ("? " in lines[-1]) == (explaining is not None)
    if not explaining and width >= 80:
        names = (*trainer.losses, *trainer.environment, *stages, "memory")
        assert not [name for name in names if name not in text]
    if not explaining and (width, height) == (60, 20):
        assert all(name in text for name in ("policy_loss", "entropy", "score", "steps/s", "learn"))


def test_compiling_is_announced_once_and_ends(capsys):
    dashboard().compiling()
    assert capsys.readouterr().out.strip() == loggers.COMPILING
    screen = dashboard(120)
    screen.compiling()
    screen.close()
    shown = screen.console.file.getvalue()
    assert loggers.COMPILING in shown and screen.live is None
    assert shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the line goes, the cursor is back"


def test_every_word_of_the_dashboard_has_a_meaning():
    words = {"losses": "entropy approx_kl clipfrac grad_norm", "environment": "score episode_return",
             "performance": "seconds_environment seconds_policy seconds_learn seconds_ranks",
             "run": "engine agents parameters steps steps/s epoch CPU memory GPU"}
    names = {f"{title}/{name}" for title, text in words.items() for name in text.split()}
    names |= {"environment/perf", "environment/n", "performance/seconds_other", "run/GPU memory"}
    assert names <= set(loggers.meanings())
    assert not [text for text in loggers.meanings().values() if re.search(r"[`|]|\]\(", text)]


TRAINS = """
import sys, time
import pufferl, loggers
from test_runs_dashboard import Fake

class Training(Fake):
    _dashboard = loggers.Dashboard()

    def evaluate(self):
        time.sleep(60 if self._dashboard.explaining and sys.argv[1:] == ["twice"] else 0.02)
        if self._dashboard.explaining and sys.argv[1:] == ["fails"]:
            raise MemoryError("it fails")

    def train(self): ...

    def print_dashboard(self):
        self._dashboard.show(self)

trainer = Training(score=0.5)
try:
    pufferl.learn(trainer, {"train": {"log_interval": 60}})
finally:
    trainer._dashboard.close()
print("the end")
"""


class Terminal:
    """A Python script in a terminal of its own, started by a shell that does not repair the terminal itself."""

    SHELL = 'trap : INT; "$@"; echo "it is $?."; read line; fg >/dev/null; echo "it is $?."'

    def __init__(self, script, *words):
        self.ours, self.its = os.openpty()
        self.mode, self.seen = termios.tcgetattr(self.its), ""
        fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("4H", 50, 150, 0, 0))
        paths = f"{configuration.ROOT}:{configuration.ROOT / 'tests'}"
        self.shell = subprocess.Popen(
            ["sh", "-m", "-c", self.SHELL, "sh", sys.executable, "-c", script, *words], stdin=self.its,
            stdout=self.its, stderr=self.its, start_new_session=True, cwd=configuration.ROOT,
            env={**os.environ, "PYTHONPATH": paths, "TERM": "xterm"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def wait_for(self, text, seconds=120):
        """Read until `text` stands there."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline and self.shell.poll() is None, self.seen
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def press(self, keys):
        os.write(self.ours, keys)

    def is_as_before(self):
        return termios.tcgetattr(self.its) == self.mode

    def close(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.shell.pid).children(recursive=True):
                process.kill()
        self.shell.kill()
        self.shell.wait()
        os.close(self.ours)
        os.close(self.its)


def test_a_key_explains_the_words_and_the_terminal_is_given_back():
    with contextlib.closing(Terminal(TRAINS)) as terminal:
        terminal.wait_for("? explains these words")
        terminal.press(b"x?")
        terminal.wait_for("? shows the numbers again")
        terminal.wait_for(loggers.meanings()["losses/entropy"])
        assert not terminal.is_as_before()
        terminal.press(b"?")
        terminal.wait_for("? explains these words")
        terminal.press(b"\x1a")
        terminal.wait_for(f"it is {128 + signal.SIGTSTP}.")
        assert terminal.is_as_before()
        terminal.press(b"\n")  # and the shell says `fg`
        terminal.press(b"?")
        terminal.wait_for("? shows the numbers again")
        terminal.press(b"\x03")
        terminal.wait_for("once more to leave at once")
        terminal.wait_for("the end")
        terminal.wait_for("it is 0.")
        assert terminal.is_as_before()


@pytest.mark.parametrize("end", slow_but(["twice", "terminated", "fails"], "fails"))
def test_the_terminal_is_given_back_however_the_training_ends(end):
    with contextlib.closing(Terminal(TRAINS, end)) as terminal:
        terminal.wait_for("? explains these words")
        terminal.press(b"?")
        terminal.wait_for("? shows the numbers again")
        assert end == "fails" or not terminal.is_as_before()
        if end == "twice":
            terminal.press(b"\x03")
            terminal.wait_for("once more to leave at once")
            terminal.press(b"\x03")
        elif end == "terminated":
            psutil.Process(terminal.shell.pid).children()[0].terminate()
        terminal.wait_for(f"it is { {'twice': 128 + signal.SIGINT, 'terminated': 0, 'fails': 1}[end]}.")
        assert terminal.is_as_before()


def test_no_key_is_read_from_a_terminal_of_which_the_process_is_in_the_background(monkeypatch):
    ours, its = os.openpty()  # not this process's terminal at all
    before = termios.tcgetattr(its)
    stdin = os.dup(0)
    os.dup2(its, 0)
    try:
        with processes.Keys() as keys:
            os.write(ours, b"?\n")
            assert keys.possible and keys.pressed() == b"" and termios.tcgetattr(its) == before
        assert not processes.Keys(wanted=False).possible
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        assert not processes.Keys().possible
    finally:
        os.dup2(stdin, 0)


def test_numbers_and_curves():
    numbers = {0: "0", 4096.0: "4,096", 1e6: "1,000,000", 0.5: "0.5", 12.3456: "12.35",
               3e-5: "3e-05", -2500.4: "-2,500", math.nan: "nan", math.inf: "inf"}
    assert {number: loggers.figure(number) for number in numbers} == numbers
    curves = [([], 9, ""), ([math.nan], 9, ""), ([2.0, 2.0], 9, "▁▁"),
              ([0.0, math.nan, 7.0, 3.0], 9, "▁█▄"), ([*range(100)], 4, "▁▃▆█")]
    for values, width, curve in curves:
        assert loggers.sparkline(values, width) == curve


def test_the_end_tells_how_far_it_is_from_solved_and_what_to_type(tmp_path):
    args = configuration.load_config("squared", ["--data-dir", str(tmp_path)])
    trainer, solved_at = Fake(score=0.9, n=12.0), loggers.solved_at(args)
    trainer.run_folder = tmp_path / "squared_1"

    def lines(model="model.pt"):
        return [line.split() for line in loggers.closing(trainer, args, model, solved_at)]

    score, sign, checkpoint, _, resume = lines()[1:6]
    assert score[:2] == ["score", "0.9"] and "12" in score and "not" in score and "(0.95" in score
    assert sign[:3] == ["sign", "step", "5:"] and checkpoint == ["checkpoint", "model.pt"]
    assert "--resume" in resume, "it was stopped"
    trainer.environment, trainer.epoch = {"score": 0.96, "n": 1.0}, trainer.total_epochs
    score, *_, watch, tune, own = lines()[1:]
    assert "1 episode: solved" in " ".join(score) and "(0.95" in score
    assert [words[:2] for words in (watch, tune, own)] == [["watch", "it"], ["tune", "it"],
                                                           ["your", "own"]]
    assert str(trainer.run_folder) in watch and tune[-2].endswith("protein.py")
    # what counts as solved is known of the settings that ship alone
    args["env"]["distance"] = 9
    solved_at = loggers.solved_at(args)
    assert lines("")[1][-1] == "episode"
