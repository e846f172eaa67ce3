"""The command `list`: what it prints agrees with the headers and the settings."""

import re
import sys

import pytest

import configuration
import ocean
import pufferl
from errors import ConfigError
from tools import catalogue


def test_every_environment_has_a_line_of_its_own():
    names = catalogue.names()
    assert {*ocean.names(), "drone_race", "atari_pong"} <= set(names) and "default" not in names
    lines = []
    for name in names:
        header = ocean.FOLDER / name / f"{name}.h"
        path = header if header.exists() else configuration.ROOT / "config" / f"{name}.ini"
        rules = catalogue.rules_of(path)
        lines.append(catalogue.Entry(name, rules, None, None, None, None, False).line)
        assert 8 <= len(lines[-1]) < 220 and lines[-1][0].isupper() and "*/" not in lines[-1]
    assert len(set(lines)) == len(lines)


def test_the_settings_of_an_ini_count():
    """drone_race is drone's, which has another number of agents."""
    race = catalogue.complete(catalogue.look("drone_race"), configuration.load_config("drone_race"))
    assert (race.agents, race.does, race.solved.score, race.ships) == (8, "4 numbers", 6, False)


def test_the_table_has_a_line_each(monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "names",
                        lambda: ["atari_pong", "bandit", "gym_cartpole", "squared"])
    monkeypatch.setitem(sys.modules, "ale_py", None)  # as if it was not installed
    pufferl.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    title, pong, bandit, cartpole, squared = [re.split(r"\s{2,}", line) for line in lines[:5]]
    assert title == ["environment", "sees", "does", "agents", "solved at", "after", "ships",
                     "what it is"]
    assert squared[:-1] == ["squared", "11 × 11 uint8", "5", "1", "0.95", "2 M, 8 s", "yes"]
    assert cartpole[1:4] == ["4 float32", "2", "1"] and pong[1:4] == ["-", "-", "-"]
    assert "perf 0.97" in bandit and "list breakout" in lines[-1]


@pytest.mark.parametrize(("name", "texts"), [
    ("squared", ["The agent starts in the middle", "0.95", "ocean/squared/squared.h",
                 "config/squared.ini", "train squared", "eval squared --baseline",
                 "protein.py squared", "11 × 11 uint8"]),
    ("gym/CartPole-v1", ["4 float32", "475", "train gym/CartPole-v1"])])
def test_one_is_shown_with_what_to_type_next(name, texts, capsys):
    pufferl.main(["list", name])
    shown = capsys.readouterr().out
    assert not [text for text in texts if text not in shown], shown
    assert ("\nships" in shown) == (name == "squared")


@pytest.mark.parametrize(("text", "name"), [
    ("scores = 1", "score"), ("score = x", "score")])
def test_a_wrong_mark_is_an_error(text, name, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/squared.ini").write_text(f"[solved]\n{text}\n")
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match=rf"squared\.ini.*{name}"):
        catalogue.look("squared")
