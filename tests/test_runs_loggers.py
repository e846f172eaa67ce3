"""Loggers: the same numbers everywhere, offline, without tokens; whole lines; full disks."""

import json
import math
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import loggers
import pufferl
from loggers import JsonLines

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "0123456789abcdef" * 2 + "feedf00d"
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "WANDB_API_KEY": TOKEN,
           "NEPTUNE_API_TOKEN": TOKEN, "WANDB_SILENT": "true"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that logs every epoch to everything at once; its folder."""
    pytest.importorskip("wandb", reason="needs the package wandb")
    pytest.importorskip("neptune", reason="needs the package neptune")
    folder = tmp_path_factory.mktemp("run")
    command = ["train", "squared", "--env.num-envs", "64", "--train.total-timesteps", "20000",
               "--train.log-interval", "0", "--wandb", "--neptune", "--entity", "me", "--group",
               "pair", "--tag", "x"]
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


def read_neptune(run):
    metrics, strings, decoder = {}, {}, json.JSONDecoder()
    for path in run.parent.parent.glob(".neptune/offline/*/data-*.log"):
        text = path.read_text().strip()
        while text:
            entry, size = decoder.raw_decode(text)
            text, entry = text[size:].lstrip(), entry["obj"]
            name = "/".join(entry["path"])
            if entry["type"] == "LogFloats":
                values = {value["step"]: value["value"] for value in entry["values"]}
                metrics.setdefault(name, {}).update(values)
            elif "value" in entry:
                strings[name] = entry["value"]
    return metrics, {"horizon": strings["config/train/horizon"], "name": strings["sys/name"]}


@pytest.mark.parametrize("read", [read_tensorboard, read_wandb, read_neptune])
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
    assert len(names) > 20 and not [name for name in names if f"`{name}`" not in text]


@pytest.mark.parametrize(("package", "function", "logger", "expected"), [
    ("wandb", "init", pufferl.WandbLogger, {"project": "p", "entity": "me", "name": "squared",
                                            "group": "pair", "tags": ["x"]}),
    ("neptune", "init_run", pufferl.NeptuneLogger,
     {"project": "me/p", "name": "squared", "tags": ["x", "pair"]})])
def test_a_logger_is_made_from_all_settings_and_names_a_missing_package(
        monkeypatch, package, function, logger, expected):
    """As PufferLib 3's scripts make it: WandbLogger(args)."""
    module = mock.MagicMock()
    monkeypatch.setitem(sys.modules, package, module)
    logger(pufferl.load_config("squared", ["--project", "p", "--entity", "me", "--group", "pair",
                                           "--tag", "x"]))
    options = getattr(module, function).call_args.kwargs
    assert {name: options[name] for name in expected} == expected
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(pufferl.ConfigError, match=package):
        logger()


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
