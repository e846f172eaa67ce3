"""The command `list`: what it prints agrees with the headers and the settings."""

import re
import sys

import pytest

import configuration
import ocean
import pufferl
from tools import catalogue


def test_every_environment_has_a_line_of_its_own():
    names = catalogue.names()
    assert (set(ocean.names()) < set(names) and {"drone_race", "atari_pong"} < set(names)
            and "default" not in names)
    lines = []
    for name in names:
        header, ini = ocean.FOLDER / name / f"{name}.h", configuration.ROOT / "config" / f"{name}.ini"
        path = header if header.exists() else ini
        lines.append(catalogue.Entry(name, catalogue.rules_of(path), None, None, None, None, False).line)
        assert 8 <= len(lines[-1]) < 220 and lines[-1][0].isupper() and "*/" not in lines[-1], (
            lines[-1])
    assert len(set(lines)) == len(lines)
    assert "A paddle keeps a ball in play that knocks bricks out of a wall" in lines


def test_the_settings_of_an_ini_count():
    """tetris.ini plays an action a piece, so that it has 41 actions and not the header's 8;
    drone_race is drone's."""
    race = catalogue.look("drone_race")
    assert (race.agents == 8 and race.does == "4 numbers" and race.solved.score == 6
            and not race.ships)
    squared = catalogue.look("squared")
    assert (squared.sees, squared.does, squared.agents, squared.ships) == ("11 × 11 uint8", "5", 1, True)
    assert catalogue.took(squared.solved) == "2 M, 8 s"


def test_the_table_has_a_line_each(monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "names", lambda: ["atari_pong", "bandit", "gym_cartpole", "squared"])
    monkeypatch.setitem(sys.modules, "ale_py", None)  # as if it was not installed
    pufferl.main(["list"])
    title, pong, bandit, cartpole, squared, *rest = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", cartpole)[1:4] == ["4 float32", "2", "1"]
    assert re.split(r"\s{2,}", title) == [
        "environment", "sees", "does", "agents", "solved at", "after", "ships", "what it is"]
    assert re.split(r"\s{2,}", squared) == [
        "squared", "11 × 11 uint8", "5", "1", "0.95", "2 M, 8 s", "yes",
        "The smallest complete environment"]
    assert ("perf 0.97" in bandit and pong.split()[1:4] == ["-", "-", "-"]
            and "list breakout" in rest[-1])


@pytest.mark.parametrize(("name", "said"), [
    ("squared", ["The agent starts in the middle", "solved at    a mean score of 0.95",
                 "ships        a policy",
                 "ocean/squared/squared.h", "config/squared.ini", "train squared",
                 "eval squared --baseline", "protein.py squared"]),
    ("gym/CartPole-v1",
     ["sees         4 float32", "does         2", "a mean score of 475", "train gym/CartPole-v1"]),
])
def test_one_is_shown_with_what_to_type_next(name, said, capsys):
    pufferl.main(["list", name])
    shown = capsys.readouterr().out
    assert not [text for text in said if text not in shown], shown


@pytest.mark.parametrize(("words", "message"),
                         [(["brakeout"], "did you mean breakout"), (["--all"], "got --all"),
                          (["squared", "target"], "expected nothing")])
def test_what_cannot_be_listed_is_said(words, message):
    with pytest.raises(SystemExit, match=message):
        pufferl.main(["list", *words])


@pytest.mark.parametrize(("text", "message"),
                         [("score = 1\nperf = 1", "one of them"), ("steps = 3", "one of them"),
                          ("scores = 1", "no such setting"), ("score = x", "must be a number")])
def test_a_wrong_mark_is_an_error(text, message, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/squared.ini").write_text(f"[solved]\n{text}\n")
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    with pytest.raises(configuration.ConfigError, match=message):
        configuration.solved("squared")
