"""Every block of docs/recipes.md runs as it stands there and does what it says."""

import dataclasses
import re
from pathlib import Path

import pytest

import configuration
import models

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "recipes.md").read_text(), flags=re.M)[1:]
RECIPES = {section.split("\n")[0]: re.findall(r"```python\n(.*?)```", section, flags=re.S) for section in SECTIONS}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(title, *more):
        names = {"__name__": "recipe"}
        for block in (*RECIPES[title], *more):
            exec(compile(block, title, "exec"), names)
        return names

    return run


def test_every_recipe_has_a_test():
    here = Path(__file__).read_text()
    assert all(blocks for blocks in RECIPES.values()) and len(RECIPES) == 10
    assert [title for title in RECIPES if f'"{title}"' not in here and not title.startswith("CleanRL")] == []


def test_recipes_are_short():
    for title, blocks in RECIPES.items():
        if not title.startswith("CleanRL"):
            assert 10 <= sum(block.count("\n") for block in blocks) <= 36, title


def test_short_forms(recipe, tmp_path):
    names = recipe("Short forms")
    assert names["trainer"].horizon == 32 and names["trainer"].environment["score"] > 50, "a random policy has 22"
    assert not list(tmp_path.iterdir())


def test_curriculum(recipe):
    scores = recipe("Curriculum over environment settings")["scores"]
    assert len(scores) == 3 and scores[0] > 0.7 and scores[2] > 0.9, "guessing gives 0.5"


def test_reward_shaping(recipe):
    statistics = recipe("Reward shaping by a wrapper")["statistics"]
    assert statistics["true_return"] == pytest.approx(statistics["episode_length"], abs=0.01)
    assert statistics["episode_return"] < statistics["true_return"] - 0.5


def test_stages(recipe):
    used = recipe("Several stages with other learning rates")["used"]
    assert used == sorted(used, reverse=True) and set(used) == {0.02, 0.005, 0.001} and len(used) == 98


def test_own_network(recipe):
    trainer = recipe("A network of your own")["trainer"]
    assert isinstance(trainer.policy, models.LSTMWrapper) and trainer.global_step == 4096


def test_own_logger(recipe, tmp_path):
    recipe("A logger of your own")
    rows = [line.split(",") for line in (tmp_path / "score.csv").read_text().splitlines()]
    assert rows[0] == ["step", "score of cartpole"]
    assert [int(row[0]) for row in rows[1:]] == [1024, 2048, 3072, 4096, 5120]
    assert float(rows[-1][1]) > 5


def test_notebook(recipe):
    stop = """
good = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
before, calls = trainer._update, []
def interrupt():
    calls.append(before())
    raise KeyboardInterrupt
trainer._update = interrupt
train_until_stopped(5)
trainer._update = before
restored = trainer.epoch == 5 and all((good[name] == x).all() for name, x in trainer.policy.state_dict().items())
train_until_stopped(2)
"""
    names = recipe("Training from a notebook", stop)
    assert len(names["calls"]) == 1 and names["restored"] and names["trainer"].epoch == 7
    names["trainer"].close()


def test_gradient_accumulation(recipe):
    assert recipe("Gradient accumulation")["difference"] < 1e-4


def test_checkpoints(recipe, capsys):
    assert recipe("Checkpoints from a script")["same"]
    assert "{'why': 'half way'}" in capsys.readouterr().out


def test_settings_in_the_docs_exist():
    schema, _ = configuration.resolve("squared")
    names = {f"{section}.{field.name}" for section, cls in schema.items() for field in dataclasses.fields(cls)}
    names |= {f"train.{size}" for size in configuration.SIZES}  # of the command line, in the place of others
    named = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in ("LOG.md", "sweeps.md"):
            for name in re.findall(r"(?<![\w./])(?:--)?((?:train|vec|rnn|eval|profile)\.[a-z_-]+)", path.read_text()):
                named.setdefault(name.replace("-", "_"), path.name)
    assert len(named) > 20 and {name: path for name, path in named.items() if name not in names} == {}
