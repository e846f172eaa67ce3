"""Loggers have the same numbers, files have whole lines, and the terminal shows a panel."""

import errno
import io
import json
import math
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

import configuration
import loggers
import processes
import pufferl
from loggers import JsonLines

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "0123456789abcdef" * 2 + "feedf00d"
OFFLINE = {"WANDB_MODE": "offline", "WANDB_API_KEY": TOKEN, "WANDB_SILENT": "true"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that logs every epoch to everything at once; its folder."""
    pytest.importorskip("wandb", reason="needs the package wandb")
    folder = tmp_path_factory.mktemp("run")
    command = ["train", "squared", "--env.num-envs", "64", "--train.total-timesteps", "20000",
               "--train.log-interval", "0", "--wandb", "--entity", "me", "--group", "pair", "--tag", "x"]
    done = subprocess.run([sys.executable, str(ROOT / "pufferl.py"), *command], cwd=folder,
                          capture_output=True, text=True, env={**os.environ, **OFFLINE},
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return next((folder / "experiments").glob("squared_*"))


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_events(folder):
    """Return ({metric: {step: value}}, the events of TensorBoard)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)}
            for name in events.Tags()["scalars"]}, events


def read_offline(path):
    """Return ({metric: {step: value}}, settings, {kind: the last record of it}) of a .wandb file.

    It is in LevelDB's log format, blocks of 32 kB, after a header of 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    metrics, settings, records = {}, {}, {}
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, part = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if part not in (1, 4):  # neither a whole record nor the last part of one
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(parts)
        parts, kind = b"", record.WhichOneof("record_type")
        records[kind] = getattr(record, kind)
        if kind == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json)
                   for item in record.history.item}
            for name in row.keys() - {"global_step"}:
                metrics.setdefault(name, {})[row["global_step"]] = row[name]
        elif kind in ("run", "config"):
            config = record.run.config if kind == "run" else record.config
            settings |= {item.key: json.loads(item.value_json) for item in config.update}
    return metrics, settings, records


# What a logger has written of a run: ({metric: {step: value}}, settings)


def read_tensorboard(run):
    return read_events(run / "tensorboard")[0], {}


def read_wandb(run):
    metrics, settings, records = read_offline(next(run.glob("wandb/offline-run-*/*.wandb")))
    assert "artifact" in records, "the model is saved too"
    about = records["run"]
    return metrics, {"horizon": settings["train"]["horizon"], "name": about.run_id,
                     "project": about.project, "entity": about.entity,
                     "group": about.run_group, "tags": list(about.tags)}


@pytest.mark.parametrize("read", [read_tensorboard, read_wandb])
def test_a_logger_has_what_metrics_jsonl_has(run, read):
    lines = lines_of(run)
    assert [line["step"] for line in lines] == [4096 * i for i in range(1, 6)]
    expected = {name: {line["step"]: line[name] for line in lines if name in line}
                for name in {name for line in lines for name in line} - {"step"}}
    assert {"losses/entropy", "environment/score", "performance/sps"} <= expected.keys()
    metrics, settings = read(run)
    if read is read_tensorboard:  # which has float32
        expected = {name: {step: pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True)
                           for step, value in values.items()} for name, values in expected.items()}
        assert metrics.keys() == expected.keys()
    assert {name: metrics.get(name) for name in expected} == expected
    wanted = {"horizon": 64, "name": run.name, "project": "pufferl", "entity": "me",
              "group": "pair", "tags": ["x"]}
    assert settings == {name: wanted[name] for name in settings}


def test_tokens_are_written_nowhere(run):
    files = [path for path in run.parent.parent.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_every_metric_has_a_meaning_in_the_docs(run):
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for line in lines_of(run) for name in line} - {"step"}
    own = {name for name in names if name.startswith("environment/")}  # the row `environment/NAME`
    names -= own - {f"environment/{name}" for name in ("score", "perf", "episode_return", "episode_length", "n")}
    assert len(names) > 20 and not [name for name in names if f"`{name}`" not in text]


def test_wandb_is_made_from_all_settings_and_named_if_it_is_missing(monkeypatch):
    """As PufferLib 3's scripts make it: WandbLogger(args)."""
    module = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    pufferl.WandbLogger(configuration.load_config(
        "squared", ["--project", "p", "--entity", "me", "--group", "pair", "--tag", "x"]))
    options, expected = module.init.call_args.kwargs, {
        "project": "p", "entity": "me", "name": "squared", "group": "pair", "tags": ["x"]}
    assert {name: options[name] for name in expected} == expected
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(pufferl.ConfigError, match="wandb"):
        pufferl.WandbLogger()


def test_a_full_disk_leaves_no_half_line(tmp_path, capsys):
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    log = JsonLines(path)
    log.log({"a": 1.0}, 1)
    try:  # there is room for five bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        log.log({"a": math.nan}, 2)
        log.log({"a": 2.0}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.log({"a": 4.0}, 4)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 4]
    assert capsys.readouterr().err.count("metrics.jsonl") == 1


def test_a_full_disk_ends_tensorboard_alone(tmp_path, capsys):
    def refuse(*_):
        raise OSError("the disk is full")

    log = loggers.TensorBoardLogger(tmp_path)
    log.writer.add_scalar = refuse
    for step in (1, 2):
        log.log({"a": 1.0}, step)
    log.close()
    assert capsys.readouterr().err.count("TensorBoard") == 1


# -- what a terminal shows


class Fake:
    """As much of a trainer as a dashboard looks at."""

    def __init__(self, **environment):
        self.uptime, self.global_step = 40.0, 1000
        self.sps = self.last_sps = 25.0
        self.epoch, self.total_epochs, self.num_agents = 1, 10, 8
        self.config, self.env_name = {"total_timesteps": 10_000}, "squared"
        self.args = configuration.load_config("squared")
        self.environment = environment
        self.losses = {"entropy": 1.5, "approx_kl": 0.2, "clipfrac": 0.1}
        self.engine = SimpleNamespace(name="compiled")
        self.buffers = SimpleNamespace(usage=dict)
        self.statistics = SimpleNamespace(stages={"environment": 1.0, "learn": 3.0}, entry={})
        self.warnings = SimpleNamespace(reported={"kl": (5, "Updates are too large.")}, has_ended=True,
                                     below_random_play=lambda: None)
        self.policy = SimpleNamespace(parameters=list)
        self.run_folder = self.vecenv = None


def terminal(width=120, height=50):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height,
                   color_system="truecolor")


def dashboard():
    return loggers.Dashboard(loggers.solved_at(Fake().args))


def test_the_time_left_leaves_out_what_came_before_the_first_entry(capsys):
    trainer, screen = Fake(score=0.5), dashboard()
    screen.show(trainer)
    trainer.uptime, trainer.epoch = 45.0, 4  # 3 epochs in 5 s; the first took 40
    screen.show(trainer)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "steps" in line
                     and "gone" in line]
    assert first.endswith("40s gone") and "score 0.500" in first
    assert second.endswith("45s gone, 10s left")


@pytest.mark.parametrize(("environment", "has_ended", "first", "is_late_start", "line"), [
    ({"score": 0.5, "n": 3.0}, True, 100, False, "score        0.5 in the last 3 episodes"),
    ({}, True, 100, False, "score        none: the environment's infos do not have it"),
    ({}, False, 100, False, "score        none: no episode has ended in 125 steps of each agent"),
    ({}, False, 900, True, ""), ({}, False, None, False, "")])
def test_a_run_ends_with_its_score_or_why_there_is_none(environment, has_ended, first, is_late_start, line):
    trainer = Fake(**environment)
    trainer.warnings.__dict__.update(has_ended=has_ended, first=first, is_late_start=is_late_start, agents=8)
    lines = [text for text in dashboard().closing(trainer, trainer.args, "model.pt") if text.startswith("score")]
    assert len(lines) == bool(line) and all(text.startswith(line) for text in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 12), (200, 50)])
def test_the_panel_fits_the_terminal(width, height):
    """Nothing is cut off, and as many numbers are shown as there is room for."""
    trainer = Fake(**dict.fromkeys(("score", "perf", "episode_return", "episode_length", "n"),
                                  0.96))
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
