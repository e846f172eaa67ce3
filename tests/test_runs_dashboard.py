"""What a training says on a terminal and elsewhere."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

import configuration
import pufferl
import runs


class Fake:
    """As much of a trainer as a dashboard looks at."""

    def __init__(self, **environment):
        self.uptime, self.global_step, self.epoch, self.total_epochs, self.sps = 40.0, 1000, 1, 10, 25.0
        self.config, self.num_agents, self.env_name = {"total_timesteps": 10_000}, 8, "squared"
        self.args = {"config_name": "squared", "env": configuration.load_config("squared")["env"]}
        self.environment, self.losses = environment, {"entropy": 1.5, "approx_kl": 0.2,
                                                      "clipfrac": 0.1}
        self.engine = SimpleNamespace(name="compiled", usage=dict)
        self.statistics = SimpleNamespace(stages={"environment": 1.0, "learn": 3.0})
        self.signs = SimpleNamespace(said={"kl": (5, "Updates are too large.")})
        self.policy = SimpleNamespace(parameters=list)
        self.run_folder = None


def terminal(width=120):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=50,
                   color_system="truecolor")


def on(dashboard, console):
    dashboard.console = console
    return dashboard


def test_the_time_left_leaves_out_what_came_before_the_first_entry(capsys):
    trainer, screen = Fake(score=0.5), runs.Dashboard(runs.solved_at(Fake().args))
    screen.show(trainer)
    trainer.uptime, trainer.global_step = 45.0, 4000  # 3,000 steps in 5 s; the first 1,000 took 40
    screen.show(trainer)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "steps" in line
                     and "gone" in line]
    assert (first.endswith("40s gone") and second.endswith("45s gone, 10s left")
            and "score 0.500" in first)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_panel_has_a_curve_colours_and_an_explanation(width):
    screen, trainer = on(runs.Dashboard(runs.solved_at(Fake().args)), terminal(width)), Fake(score=0.1, perf=0.5, n=3.0)
    for score in (0.1, 0.5, 0.96):
        trainer.environment = {**trainer.environment, "score": score}
        screen.show(trainer)
    screen.close()
    shown = screen.console.file.getvalue()
    assert "▁▄█" in shown and "0.95 counts as solved" in shown and "Updates are too large." in shown
    assert "\x1b[1;32m" in shown.split("0.96")[0][-40:], "green: it is solved"
    assert "\x1b[33m" in shown.split("0.2\x1b")[0][-40:], "yellow: approx_kl is worth a look"
    assert any(f"{name}: {what[:20]}" in shown for name, what in runs.meanings().items())


def test_many_statistics_do_not_fill_the_screen():
    screen = on(runs.Dashboard(runs.solved_at(Fake().args)), terminal())
    screen.show(Fake(**{f"item_{i}": float(i) for i in range(50)}))
    screen.close()
    assert f"and {50 - runs.MOST_ROWS} more" in screen.console.file.getvalue()


def test_compiling_is_announced_once_and_ends(capsys):
    screen = runs.Dashboard(runs.solved_at(Fake().args))
    screen.compiling()
    assert capsys.readouterr().out.strip() == runs.COMPILING
    screen = on(runs.Dashboard(runs.solved_at(Fake().args)), terminal())
    screen.compiling()
    screen.close()
    assert runs.COMPILING in screen.console.file.getvalue() and screen.live is None
    assert screen.console.file.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), (
        "the line goes, the cursor is back")


def test_every_metric_of_the_page_has_a_meaning():
    assert {"score", "entropy", "approx_kl", "clipfrac", "episode_return", "grad_norm"} <= set(runs.meanings())
    assert not [what for what in runs.meanings().values() if "`" in what or "|" in what]


def test_numbers_are_for_people():
    numbers = {0: "0", 4096.0: "4,096", 1e6: "1,000,000", 0.5: "0.5", 12.3456: "12.35",
               3e-5: "3e-05", -2500.4: "-2,500", math.nan: "nan", math.inf: "inf"}
    assert {number: runs.figure(number) for number in numbers} == numbers


def test_a_sparkline():
    assert runs.sparkline([], 9) == runs.sparkline([math.nan], 9) == ""
    assert (runs.sparkline([2.0, 2.0], 9) == "▁▁"
            and runs.sparkline([0.0, math.nan, 7.0, 3.0], 9) == "▁█▄")
    assert runs.sparkline([*range(100)], 4) == "▁▃▆█"


def test_the_end_says_how_far_it_is_from_solved_and_what_to_type(tmp_path):
    args = configuration.load_config("squared", ["--data-dir", str(tmp_path)])
    trainer = Fake(score=0.9, n=12.0)
    trainer.run_folder = tmp_path / "squared_1"
    lines = [*runs.closing(trainer, args, "model.pt", runs.solved_at(args))]
    assert lines[1] == "score        0.9 in the last 12 episodes: not solved yet (0.95 counts as solved)"
    assert lines[2] == "checkpoint   model.pt" and lines[4].startswith("go on        "), (
        "it was stopped")
    trainer.environment, trainer.epoch = {"score": 0.96, "n": 1.0}, trainer.total_epochs
    lines = [*runs.closing(trainer, args, "model.pt", runs.solved_at(args))]
    assert lines[1] == "score        0.96 in the last 1 episode: solved (0.95 counts as solved)"
    words = [line.split()[:2] for line in lines[4:]]
    assert (words == [["watch", "it"], ["tune", "it"], ["your", "own"]]
            and str(trainer.run_folder) in lines[4])
    args["env"]["distance"] = 9  # what counts as solved is said of the settings that ship
    assert [*runs.closing(trainer, args, "", runs.solved_at(args))][1] == "score        0.96 in the last 1 episode"


def test_what_to_type_can_be_typed(monkeypatch, tmp_path):
    monkeypatch.chdir(configuration.ROOT)
    monkeypatch.setattr(configuration.shutil, "which", lambda name: None)
    monkeypatch.setattr(configuration.sys, "executable",
                        str(configuration.ROOT / ".venv/bin/python"))
    assert configuration.command("train", "my env") == ".venv/bin/python pufferl.py train 'my env'"
    monkeypatch.setattr(configuration.shutil, "which",
                        lambda name: str(configuration.ROOT / ".venv/bin/python"))
    assert configuration.command("runs") == "python pufferl.py runs"
    monkeypatch.chdir(tmp_path)
    assert configuration.command("runs") == f"python {configuration.ROOT / 'pufferl.py'} runs"


@pytest.mark.parametrize("verb", ["train", "eval", "sweep", "export", "autotune", "profile", "list",
                                  "runs", "plot", "diagnose", "doctor"])
def test_every_verb_has_a_line(verb):
    assert f"\n  {verb} " in pufferl.USAGE
