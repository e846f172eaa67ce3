"""Loggers: the same numbers everywhere, offline, without tokens; whole lines; full disks."""

import builtins
import inspect
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
                          capture_output=True,
                          text=True, env={**os.environ, **OFFLINE}, timeout=300)
    assert done.returncode == 0, done.stderr
    return next((folder / "experiments").glob("squared_*"))


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wandb_records(path):
    """The records of a .wandb file: LevelDB's log format, blocks of 32 kB,
    after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def same(left, right):
    return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-12) or (math.isnan(left)
                                                                      and math.isnan(right))


def test_tensorboard_holds_what_metrics_jsonl_holds(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    lines = lines_of(run)
    assert len(lines) == 5 and [line["step"] for line in lines] == [4096 * i for i in range(1, 6)]
    assert set(events.Tags()["scalars"]) == {name for line in lines for name in line} - {"step"}
    for name in events.Tags()["scalars"]:
        values = {event.step: event.value for event in events.Scalars(name)}
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert values.keys() == expected.keys(), name
        assert all(same(values[step], expected[step]) for step in values), name


def test_wandb_offline_holds_what_metrics_jsonl_holds(run):
    pytest.importorskip("wandb", reason="needs the package wandb")
    records = list(wandb_records(next(run.glob("wandb/offline-run-*/*.wandb"))))
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json)
                         for item in record.history.item})
    lines = lines_of(run)
    assert [row["global_step"] for row in rows] == [line["step"] for line in lines]
    for row, line in zip(rows, lines, strict=True):
        assert {name: row[name] for name in line if name != "step"} == {n: line[n] for n in line
                                                                        if n != "step"}
    of = {kind: getattr(record, kind) for record in records
          if (kind := record.WhichOneof("record_type"))}
    settings = {item.key: json.loads(item.value_json) for record in records
                if record.WhichOneof("record_type") in ("run", "config")
                for item in (record.run.config if record.HasField("run") else record.config).update}
    assert (of["run"].project, of["run"].entity, of["run"].run_group, list(of["run"].tags)) == (
        "pufferl", "me", "pair", ["x"])
    assert of["run"].run_id == run.name and settings["train"]["horizon"] == 64
    assert "artifact" in of, "the model goes along"


def test_neptune_offline_holds_what_metrics_jsonl_holds(run):
    pytest.importorskip("neptune", reason="needs the package neptune")
    values, strings = {}, {}
    for path in run.parent.parent.glob(".neptune/offline/*/data-*.log"):
        decoder, text, position = json.JSONDecoder(), path.read_text(), 0
        while position < len(text.rstrip()):
            entry, position = decoder.raw_decode(text, position)
            position += len(text[position:]) - len(text[position:].lstrip())
            what, name = entry["obj"], "/".join(entry["obj"]["path"])
            if what["type"] == "LogFloats":
                values.setdefault(name, {}).update({value["step"]: value["value"]
                                                    for value in what["values"]})
            elif "value" in what:
                strings[name] = what["value"]
    lines = lines_of(run)
    assert set(values) >= {"losses/entropy", "environment/score", "performance/sps"}
    for name in {name for line in lines for name in line} - {"step"}:
        assert values[name] == {line["step"]: line[name] for line in lines if name in line}, name
    assert strings["sys/name"] == run.name and strings["config/train/horizon"] == 64


def test_tokens_are_written_nowhere(run):
    files = [path for path in run.parent.parent.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_the_classes_have_the_keywords_of_the_docs():
    assert (pufferl.WandbLogger is loggers.WandbLogger
            and pufferl.TensorBoardLogger is loggers.TensorBoardLogger)
    assert list(inspect.signature(pufferl.WandbLogger).parameters)[:4] == ["project", "entity", "name", "config"]
    assert list(inspect.signature(pufferl.NeptuneLogger).parameters)[:3] == ["project", "name", "api_token"]
    pufferl.NoLogger().log({"losses/entropy": 1.0}, 0)


@pytest.mark.parametrize("package", ["wandb", "neptune"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    args = pufferl.load_config("squared", [f"--{package}", "--data-dir", str(tmp_path),
                                           "--env.num-envs", "64"])
    assert args[package] is True, "the flag stands alone"
    with pytest.raises(pufferl.ConfigError, match=f"pip install {package}"):
        pufferl.train("squared", args)


def test_a_resumed_log_has_every_step_once_and_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for step in (10, 20, 30):
        log.log({"losses/entropy": float(step)}, step)
    path.write_text(path.read_text() + '{"step": 40, "losses/entr')  # what kill -9 may leave
    log = JsonLines(path, first_step=20)
    log.log({"losses/entropy": 31.0}, 30)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["step"], e["losses/entropy"]) for e in entries] == [(10, 10.0),
                                                                   (20, 20.0), (30, 31.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_logger_made_from_all_settings(tmp_path, monkeypatch):
    """As PufferLib 3's scripts make it: WandbLogger(args)."""
    asked = {}

    class Told(Exception): ...

    def init(**options):
        asked.update(options)
        raise Told

    for package, start in (("wandb", "init"), ("neptune", "init_run")):
        module = SimpleNamespace(**{start: init}, errors=SimpleNamespace(Error=OSError),
                                 exceptions=SimpleNamespace(NeptuneException=OSError))
        monkeypatch.setitem(sys.modules, package, module)
    args = pufferl.load_config("squared", ["--project", "p", "--entity", "me", "--group", "pair",
                                           "--tag", "x"])
    with pytest.raises(Told):
        pufferl.WandbLogger(args)
    expected = {"project": "p", "entity": "me", "name": "squared", "group": "pair", "tags": ["x"],
                "config": args}
    assert {name: asked[name] for name in expected} == expected
    with pytest.raises(Told):
        pufferl.NeptuneLogger(args)
    assert (asked["project"], asked["name"], asked["tags"]) == ("me/p", "squared", ["x", "pair"])
    for logger in (pufferl.WandbLogger, pufferl.NeptuneLogger):
        for wrong, text in (({"train": {}}, "got a dict without project, entity"),
                            ([1], r"got \[1\]")):
            with pytest.raises(TypeError, match=rf"{logger.__name__}: project must be "
                               rf".*load_config gives, {text}"):
                logger(wrong)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    log.log({"a": 1.0}, 1)
    real = builtins.open

    class Full:
        """A file on a disk with room for five bytes."""

        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            return self.file.write(data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", lambda *a, **k: Full(real(*a, **k)))
        log.log({"a": 2.0}, 2)
        log.log({"a": 2.0}, 3)
    log.log({"a": 4.0}, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    assert capsys.readouterr().err.count("Training goes on") == 1


def test_every_metric_stands_in_the_docs(run):
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for line in lines_of(run) for name in line} - {"step"}
    assert len(names) > 20 and not [name for name in names if f"`{name}`" not in text]
