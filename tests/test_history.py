"""The commands `runs`, `plot` and `diagnose`, on folders as training leaves them."""

import json
import math
import os
import time

import pytest

import configuration
import pufferl
import runs
from tools import history

SETTINGS = configuration.load_config("squared")
SCORES = [0.1, 0.2, 0.4, 0.7, 0.9]


def write_config(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **changes}, default=str))


def write_run(folder, minutes, scores=SCORES, **train):
    """A run of squared whose last entry is some minutes old, and whose last line is torn."""
    write_config(folder, train=SETTINGS["train"] | train)
    entries = [{"step": 600_000 * (i + 1), "environment/score": score,
                "losses/entropy": 1.0 - i / 10, "performance/uptime": 2.0 * (i + 1)}
               for i, score in enumerate(scores)]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 90, "env')
    os.utime(path, (time.time() - 60 * minutes,) * 2)


@pytest.fixture
def folder(tmp_path):
    """Three runs, of which the second is the newest, and a folder that is none."""
    write_run(tmp_path / "squared_1-aa", 30)
    write_run(tmp_path / "squared_2-bb", 2, [-1.0, 0.25], learning_rate=0.01)
    write_run(tmp_path / "squared_3-cc", 40, [])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/config.json").write_text('{"a": 1}')
    return tmp_path


@pytest.fixture
def call(capsys):
    def run(*words):
        capsys.readouterr()
        pufferl.main([*map(str, words)])
        return capsys.readouterr().out.splitlines()

    return run


def test_runs_are_listed_the_newest_first_with_what_differs(folder, call):
    rows = call("runs", "--data-dir", folder)
    assert [row.split() for row in rows[1:4]] == [
        ["squared_2-bb", "2m", "00s", "stopped", "1,200,000", "0.25", "4", "learning_rate", "0.01"],
        ["squared_1-aa", "30m", "00s", "done", "3,000,000", "0.9", "10"],
        ["squared_3-cc", "40m", "00s", "stopped", "0", "-", "0"]]
    assert len(rows) == 7 and all(str(folder / "squared_2-bb") in row for row in rows[5:])
    assert [str(folder) in row for row in call("runs", "breakout", "--data-dir", folder)] == [True]


def test_what_differs_of_an_environment_that_is_gone_or_of_an_old_run(folder, call):
    path, name = folder / "squared_1-aa", "gone.py:make"
    write_config(path, config_name=name, env_name=name, train=SETTINGS["train"] | {"gamma": 0.5})
    assert call("runs", name, "--data-dir", folder)[1].endswith("  gamma 0.5")
    old = {key: value for key, value in SETTINGS.items() if key not in ("config_name", "defaults")}
    (path / "config.json").write_text(json.dumps({**old, "env_name": "mine"}, default=str))
    title, row, *_ = call("runs", "mine", "--data-dir", folder)
    assert row[title.index("changed"):].startswith("-  (")


@pytest.mark.parametrize("name", ["squared_2-bb", "bb", "latest", "squared"])
def test_a_run_is_shown_by_any_of_its_names(folder, name, call):
    text = "\n".join(call("runs", "show", name, "--data-dir", folder))
    for part in (f"{folder / 'squared_2-bb'} ", "best entry 0.25", "▁█", "learning_rate 0.01",
                 f"--resume {folder / 'squared_2-bb'}"):
        assert part in text


@pytest.mark.parametrize(("words", "name"), [
    ("runs show", "show"), ("runs a b", "a:"), ("runs show notes", "notes"),
    ("plot squared_3-cc", "no run has an entry yet"), ("plot bb --metric nothing", "nothing"),
    ("plot bb --metric loss", "losses/entropy")])
def test_what_cannot_be_is_refused(folder, words, name):
    with pytest.raises(SystemExit, match=name):
        pufferl.main([*words.split(), "--data-dir", str(folder)])


def test_a_run_that_a_process_writes_is_running(folder):
    run = runs.Run(folder / "squared_1-aa", "squared", 1)
    run.begin({"env_name": "squared", "train": {"total_timesteps": 1}}, None, math.inf)
    assert history.find("aa", folder).state == "running"
    run.release()
    assert history.find("aa", folder).state == "done"


def test_curves_are_named_by_what_differs(folder, call):
    name, curves = history.curves([history.find(run, folder) for run in ("aa", "bb")])
    assert name == "environment/score"
    assert [curve.y.tolist() for curve in curves] == [SCORES, [-1.0, 0.25]]
    assert [curve.label for curve in curves] == ["squared_1-aa: learning_rate 0.03",
                                                 "squared_2-bb: learning_rate 0.01"]
    path = folder / "curves.html"
    lines = call("plot", "aa", "bb", "--data-dir", folder, "--output", path)
    assert lines[0] == "environment/score over steps" and b"<html>" in path.read_bytes()[:2000]
    assert lines[1].startswith("▁▂▄▆█ ") and "squared_1-aa" in lines[1] and lines[1].count("0.9") == 2
    assert "3,000,000" in lines[1] and "-1" in lines[2]
    lines = call("plot", "aa", "--metric", "entropy", "--x", "seconds", "--data-dir", folder)
    assert lines[0] == "losses/entropy over seconds" and " 10 seconds" in lines[1]
    lines = call("plot", "bb", "squared_3-cc", "--data-dir", folder)
    assert lines[0] == "squared_3-cc: no entry has environment/score" and len(lines) == 3


def test_latest_is_what_was_started_last(folder):
    for name, turn in (("squared_1-aa", 3), ("squared_2-bb", 2)):
        write_config(folder / name, turn=turn)
    assert history.find("latest", folder).folder.name == "squared_1-aa"


def test_a_run_of_a_users_environment_has_its_settings(tmp_path, call):
    (tmp_path / "mine.py").write_text("from small_envs import Steps")
    call("train", f"{tmp_path}/mine.py:Steps", "--env.limit", "9", "--train.gamma", "0.9",
         "--train.total-timesteps", "512", "--vec.backend", "serial", "--logger", "none",
         "--data-dir", tmp_path / "runs")
    (tmp_path / "mine.py").write_text("raise RuntimeError('it was run')")
    title, row, *_ = call("runs", "--data-dir", tmp_path / "runs")
    assert row[title.index("changed"):] == (
        "env.limit 9, vec.backend serial, total_timesteps 512, gamma 0.9")
    (run,) = (tmp_path / "runs").iterdir()
    assert call("diagnose", run) and history.find("mine", tmp_path / "runs").folder == run
    assert configuration.stem_of("gym/my:A-v0") == "my:A-v0"
