"""What a training run prints on a terminal, and into a file or pipe."""

import errno
import io
import math
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

import configuration
import loggers
import processes


class Fake:
    """As much of a trainer as a dashboard looks at."""

    def __init__(self, **environment):
        self.uptime, self.global_step = 40.0, 1000
        self.sps = self.last_sps = 25.0
        self.epoch, self.total_epochs, self.num_agents = 1, 10, 8
        self.config, self.env_name = {"total_timesteps": 10_000}, "squared"
        self.args = {"config_name": "squared", "env": configuration.load_config("squared")["env"]}
        self.environment = environment
        self.losses = {"entropy": 1.5, "approx_kl": 0.2, "clipfrac": 0.1}
        self.engine = SimpleNamespace(name="compiled")
        self.buffers = SimpleNamespace(usage=dict)
        self.statistics = SimpleNamespace(stages={"environment": 1.0, "learn": 3.0}, entry={})
        self.warnings = SimpleNamespace(reported={"kl": (5, "Updates are too large.")}, has_ended=True,
                                     below_random_play=lambda: None)
        self.policy = SimpleNamespace(parameters=list)
        self.run_folder = None


def terminal(width=120, height=50):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height,
                   color_system="truecolor")


def dashboard():
    return loggers.Dashboard(loggers.solved_at(Fake().args))


def test_the_time_left_leaves_out_what_came_before_the_first_entry(capsys):
    trainer, screen = Fake(score=0.5), dashboard()
    screen.show(trainer)
    trainer.uptime, trainer.global_step = 45.0, 4000  # 3,000 steps in 5 s; the first 1,000 took 40
    screen.show(trainer)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "steps" in line
                     and "gone" in line]
    assert first.endswith("40s gone") and "score 0.500" in first
    assert second.endswith("45s gone, 10s left")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 12), (200, 50)])
def test_the_panel_fits_the_terminal(width, height):
    """Nothing is cut off, and as many numbers are shown as there is room for."""
    trainer = Fake(**dict.fromkeys(("score", "perf", "episode_return", "episode_length", "n",
                                    "episode_return_min", "episode_return_max"), 0.96))
    trainer.losses = dict.fromkeys(("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac",
                                    "explained_variance", "old_approx_kl", "importance", "grad_norm",
                                    "learning_rate"), 0.01)
    trainer.statistics.stages = dict.fromkeys(("environment", "policy", "learn", "ranks", "other"), 1.0)
    screen, console = dashboard(), terminal(width, height)
    screen.console, screen.scores, screen.first = console, [0.1, 0.5, 0.96], (0.0, 0)
    console.print(screen.panel(trainer))
    assert "\x1b[1;32m" in console.file.getvalue().split("0.96")[0][-40:], "green: it is solved"
    lines = ["".join(segment.text for segment in line) for line in console.render_lines(screen.panel(trainer))]
    assert len(lines) <= height and {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "6m 00s left" in text and "Updates are too large." in text and "docs/metrics.md" in lines[-1]
    names = ("policy_loss", "entropy", "score") if width >= 60 else ()
    if width >= 80:
        names = (*trainer.losses, *trainer.environment, *trainer.statistics.stages, "steps/s", "▁▄█", "0.95")
    assert not [name for name in names if name not in text]


def test_a_terminal_that_is_closed_ends_no_training(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    discard = mock.Mock()
    monkeypatch.setattr(processes, "discard_output", discard)
    screen = dashboard()
    screen.console = terminal()
    screen.show(Fake(score=0.5))
    screen.console.file = Closed()
    screen.show(Fake(score=0.5))
    assert discard.called
    screen.console.file = io.StringIO()
    screen.close()


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
        return [line.split() for line in loggers.Dashboard(solved_at).closing(trainer, args, model)]

    score, warning, checkpoint, _, resume = lines()[1:6]
    assert score[:2] == ["score", "0.9"] and {"12", "not", "(0.95"} <= {*score}
    assert warning[:3] == ["warning", "step", "5:"] and checkpoint == ["checkpoint", "model.pt"]
    assert "--resume" in resume, "it was stopped"
    trainer.warnings.below_random_play = lambda: 0.91
    assert lines()[2] == ["below", "random", "play", "(0.91)"]
    trainer.warnings.below_random_play = lambda: None
    trainer.environment, trainer.epoch = {"score": 0.96, "n": 1.0}, trainer.total_epochs
    score, *_, watch, tune, own = lines()[1:]
    assert "1 episode: solved" in " ".join(score)
    assert [words[0] for words in (watch, tune, own)] == ["watch", "tune", "custom"]
    assert str(trainer.run_folder) in watch and tune[-2].endswith("protein.py")
    # what counts as solved is known of the settings that ship alone
    args["env"]["distance"] = 9
    solved_at = loggers.solved_at(args)
    assert lines("")[1][-1] == "episode"
