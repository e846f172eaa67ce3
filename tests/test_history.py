"""The commands `runs` and `plot`, on folders as training leaves them."""

import json
import math
import os
import time

import pytest

import configuration
import pufferl
import runs
from tools import history

MINE = """
import gymnasium, numpy as np
from pathlib import Path

class Mine(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(0, 1, (2,), np.float32), gymnasium.spaces.Discrete(2)

    def __init__(self, size=3, speed=1.0): ...
    def reset(self, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 1.0, True, False, {}
"""
SETTINGS = configuration.load_config("squared")
SCORES = [0.1, 0.2, 0.4, 0.7, 0.9]


def leave(folder, name, minutes, scores=SCORES, **train):
    """A run of squared, as it lies there after some minutes."""
    args = {**SETTINGS, "train": SETTINGS["train"] | train}
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text(json.dumps(args, default=str))
    entries = [{"step": 600_000 * (i + 1), "environment/score": score, "losses/entropy": 1.0 - i / 10,
                "performance/uptime": 2.0 * (i + 1)} for i, score in enumerate(scores)]
    path = folder / name / "metrics.jsonl"
    # torn
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries)
                    + '{"step": 9000000, "environ')
    os.utime(path, (time.time() - 60 * minutes,) * 2)
    return folder / name


@pytest.fixture
def left(tmp_path):
    """Three runs; the second is the newest, and another one than the shipped."""
    leave(tmp_path, "squared_1-aa", 30)
    leave(tmp_path, "squared_2-bb", 2, [-1.0, 0.25], learning_rate=0.01)
    leave(tmp_path, "squared_3-cc", 40, [])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/config.json").write_text('{"a": 1}')
    return tmp_path


def call(*words):
    pufferl.main([*map(str, words)])


def test_a_run_is_found_by_the_name_that_it_printed(tmp_path):
    args = {**SETTINGS, "env_name": f"{tmp_path}/mine.py:Env", "config_name": f"{tmp_path}/mine.py:Env"}
    (tmp_path / "mine_1-aa").mkdir()
    (tmp_path / "mine_1-aa/config.json").write_text(json.dumps(args, default=str))
    assert history.find("mine", tmp_path).folder == tmp_path / "mine_1-aa"
    assert configuration.stem_of("<lambda>") == "lambda" and configuration.stem_of("gym/my:A-v0") == "my:A-v0"


def test_runs_are_listed_the_newest_first_with_what_differs(left, capsys):
    call("runs", "--data-dir", left)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["squared_2-bb", "squared_1-aa",
                                                        "squared_3-cc"]
    assert ("2m 00s" in lines[1] and "stopped" in lines[1] and "1,200,000" in lines[1]
            and " 0.25 " in lines[1])
    assert lines[1].endswith("learning_rate 0.01"), "and nothing else differs"
    assert "done" in lines[2] and " 0.9 " in lines[2] and lines[2].split()[-1] == "10"
    assert "notes" not in "".join(lines) and str(left / "squared_2-bb") in lines[-1]
    call("runs", "breakout", "--data-dir", left)
    assert "no run of breakout" in capsys.readouterr().out


def test_a_run_of_an_environment_that_is_gone_is_listed_all_the_same(left, capsys):
    path = left / "squared_1-aa/config.json"
    path.write_text(json.dumps({**SETTINGS, "config_name": "gone.py:make", "env_name": "gone.py:make",
                                "train": SETTINGS["train"] | {"gamma": 0.5}}, default=str))
    call("runs", "gone.py:make", "--data-dir", left)
    assert capsys.readouterr().out.splitlines()[1].endswith("  gamma 0.5")


@pytest.mark.parametrize("name", ["squared_2-bb", "bb", "latest", "squared"])
def test_a_run_is_shown_by_any_of_its_names(left, name, capsys):
    call("runs", "show", name, "--data-dir", left)
    shown = capsys.readouterr().out
    assert f"{left / 'squared_2-bb'} " in shown and "best entry 0.25" in shown and "▁█" in shown
    assert f"--resume {left / 'squared_2-bb'}" in shown and "learning_rate 0.01" in shown


@pytest.mark.parametrize(("words", "message"), [
    (["runs", "show"], "which run"), (["runs", "rm"], "which run"),
    (["runs", "show", "nothing"], "no folder, no run"),
    (["runs", "rm", "notes"], "not a run's folder"), (["plot", "squared_3-cc"], "no entry has it"),
    (["runs", "show", "squared_1-aa", "squared_2-bb"], "which run"),
    (["runs", "a", "b"], "expected nothing"),
    (["plot", "aa", "--metric", "loss"], "There are: environment/score, losses/entropy"),
    (["plot", "aa", "--output", "a.jpg"], r"must end in \.html"),
    (["plot", "aa", "squared_3-cc"], "squared_3-cc: no"),
])
def test_what_cannot_be_is_said(left, words, message):
    with pytest.raises(SystemExit, match=message):
        call(*words, "--data-dir", left)
    assert len(list(left.iterdir())) == 4


def test_a_run_is_removed_only_if_that_is_wanted(left, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "")
    call("runs", "rm", "aa", "--data-dir", left)
    assert "squared_1-aa: 3,000,000 steps, score 0.9?" in asked[0]
    assert "kept" in capsys.readouterr().out and (left / "squared_1-aa").exists()
    monkeypatch.setattr("builtins.input", lambda text: "y")
    call("runs", "rm", "aa", "--data-dir", left)
    call("runs", "rm", "bb", "--yes", "--data-dir", left)
    assert sorted(path.name for path in left.iterdir()) == ["notes", "squared_3-cc"]


def test_nobody_who_answers_removes_nothing(left, monkeypatch):
    def nobody(text):
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    with pytest.raises(SystemExit, match="--yes"):
        call("runs", "rm", "aa", "--data-dir", left)
    assert (left / "squared_1-aa").exists()


def test_what_is_running_stays(left, capsys):
    run = runs.Run(left / "squared_1-aa", "squared", 1)
    run.begin({"env_name": "squared", "train": {"total_timesteps": 1}}, None, math.inf)
    with pytest.raises(SystemExit, match="this run is running"):
        call("runs", "rm", "bb", "aa", "--yes", "--data-dir", left)
    assert (left / "squared_2-bb").exists(), "none is removed if one of them cannot be"
    assert history.find("aa", left).state == "running"
    run.release()
    assert history.find("aa", left).state == "done"


def test_a_link_and_a_folder_of_runs_stay(left):
    (left / "squared_4-dd").symlink_to(left / "squared_1-aa")
    leave(left / "squared_1-aa", "squared_5-ee", 1)
    for name, message in (("dd", "a link"), ("aa", "other runs lie in it")):
        with pytest.raises(SystemExit, match=message):
            call("runs", "rm", name, "--yes", "--data-dir", left)


def test_curves_are_named_by_what_differs(left, capsys):
    name, drawn = history.curves([history.find(one, left) for one in ("aa", "bb")])
    assert (name == "environment/score"
            and [curve.y.tolist() for curve in drawn] == [SCORES, [-1.0, 0.25]])
    assert [curve.label for curve in drawn] == ["squared_1-aa: learning_rate 0.03",
                                                "squared_2-bb: learning_rate 0.01"]
    call("plot", "aa", "bb", "--data-dir", left)
    shown = capsys.readouterr().out.splitlines()
    assert (shown[0] == "environment/score over steps" and shown[1].split()[0] == "0.9"
            and "-1 │" in shown[16])
    assert shown[1].endswith("a") and "600,000" in shown[18] and "3,000,000" in shown[18]
    assert any("a squared_1-aa" in line and "(last 0.9, most 0.9)" in line for line in shown)
    call("plot", "aa", "--metric", "entropy", "--x", "seconds", "--data-dir", left)
    assert "losses/entropy over seconds" in capsys.readouterr().out


def test_a_line_is_drawn_where_its_numbers_are():
    rise = history.Curve("", *map(history.np.array, ([0.0, 1.0, 2.0], [0.0, 2.0, 0.0])))
    lines, *bounds = history.draw([rise], 9, 3)
    assert bounds == [0, 2, 0, 2]
    text = ["".join(character for character, _ in line) for line in lines]
    assert text[0].strip() and text[0][4] != " " and text[0][0] == text[0][8] == " "
    assert text[2][0] != " " and text[2][8] != " " and text[2][4] == " "
    flat = history.Curve("", history.np.array([1.0]), history.np.array([5.0]))
    rows = ["".join(character for character, _ in line).strip()
            for line in history.draw([flat], 9, 3)[0]]
    assert rows[0] and rows[1:] == ["", ""]


@pytest.mark.parametrize("ending", ["html", pytest.param("png", marks=pytest.mark.slow)])
def test_curves_are_written(left, ending, capsys):
    if ending == "png":
        pytest.importorskip("matplotlib")
    path = left / f"curves.{ending}"
    call("plot", "aa", "bb", "--data-dir", left, "--output", path)
    start = path.read_bytes()[:2000]
    assert start[:4] == b"\x89PNG" if ending == "png" else b"<html>" in start


def test_a_picture_without_its_package_says_what_to_install(left, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        call("plot", "aa", "--data-dir", left, "--output", left / "a.png")


@pytest.mark.parametrize(("options", "other"), [
    ([], ""), (["--env.size", "9", "--train.gamma", "0.9"], "env.size 9, gamma 0.9")])
def test_a_run_of_a_users_environment_has_its_settings(options, other, tmp_path, capsys):
    """The file itself is not needed any more, and is not run."""
    (tmp_path / "mine.py").write_text(MINE)
    steps = ["--train.total-timesteps", "512", "--vec.backend", "serial", "--logger", "none"]
    pufferl.main(["train", f"{tmp_path}/mine.py:Mine", *options, *steps, "--data-dir", str(tmp_path / "runs")])
    (tmp_path / "mine.py").write_text("raise RuntimeError('it was run')")
    capsys.readouterr()
    pufferl.main(["runs", "--data-dir", str(tmp_path / "runs")])
    title, row, *_ = capsys.readouterr().out.splitlines()
    found = row[title.index("other than shipped"):]
    assert found == ", ".join(filter(None, [other.partition(", ")[0], "vec.backend serial", "total_timesteps 512",
                                            other.partition(", ")[2]]))
    pufferl.main(["diagnose", str(next((tmp_path / "runs").iterdir()))])


def test_what_cannot_be_known_is_a_dash_with_the_reason(tmp_path, capsys):
    leave(tmp_path, "mine_1-aa", 3)
    saved = json.loads((tmp_path / "mine_1-aa/config.json").read_text())
    for name in ("config_name", "defaults"):
        del saved[name]
    (tmp_path / "mine_1-aa/config.json").write_text(json.dumps({**saved, "env_name": "mine"}))
    history.table(tmp_path)
    title, row, *_ = capsys.readouterr().out.splitlines()
    assert row[title.index("other"):].startswith("-  (a script's")
