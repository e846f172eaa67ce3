"""Every block of docs/recipes.md runs as it stands there and does what it says."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sweep import FAKE_SPACE, record

import configuration
import models
import pufferl
import vector
from protein import Random
from tools.sweep.trials import Ledger, write_json

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "recipes.md").read_text(), flags=re.M)[1:]
RECIPES = {section.split("\n")[0]: re.findall(r"```python\n(.*?)```", section, flags=re.S)
           for section in SECTIONS}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # else a network's first weights depend on the tests before

    def run(title, *more):
        names = {"__name__": "recipe"}
        for block in (*RECIPES[title], *more):
            exec(compile(block, title, "exec"), names)
        return names

    return run


def test_every_recipe_has_a_test_and_is_short():
    here = Path(__file__).read_text()
    assert len(RECIPES) == 23
    for title, blocks in RECIPES.items():
        if not title.startswith("CleanRL"):  # tests/test_cleanrl.py
            assert f'"{title}"' in here and 10 <= sum(b.count("\n") for b in blocks) <= 60, title


@pytest.mark.parametrize(("title", "check"), [
    ("Short forms", lambda names: names["trainer"].horizon == 32
     and names["trainer"].environment["score"] > 50),  # a random policy has 22
    ("Curriculum over environment settings", lambda names: len(names["scores"]) == 3
     and names["scores"][0] > 0.7 and names["scores"][2] > 0.9 and names["forces"] == [6.0]),
    ("Reward shaping by a wrapper", lambda names: names["statistics"]["true_return"]
     == pytest.approx(names["statistics"]["episode_length"], abs=0.01)
     and names["statistics"]["episode_return"] < names["statistics"]["true_return"] - 0.5),
    ("Several stages with other learning rates", lambda names: len(names["used"]) == 98
     and names["used"] == sorted(names["used"], reverse=True)
     and set(names["used"]) == {0.02, 0.005, 0.001}),
    ("Bounds of continuous actions", lambda names: names["scores"][-1] > names["scores"][0] + 0.5
     and names["largest"] <= 1 and names["entropy"] < 2 * np.log(2)),  # nothing within ±1 has more
    ("A target for how far the policy moves", lambda names: names["moved"][0] < 0.005
     < np.mean(names["moved"][-5:]) < 0.04
     and 1.5 * names["rates"][0] < max(names["rates"]) < 4.01 * names["rates"][0]),
    ("A bonus for what is new", lambda names: names["errors"][-1] < names["errors"][0] / 2
     and names["trainer"].environment["episode_return"] <= 0),  # the logs have the true rewards
    ("Behaviour cloning first", lambda names: names["loss"].item() < 0.4  # at first log 2
     and max(names["scores"][:5]) > 60),  # without it, 22
    ("Stacked frames and repeated actions", lambda names: names["env"].observation_shape == (3, 4)
     and names["statistics"]["episode_return"] > 1.5 * names["statistics"]["episode_length"]),
    ("Several seeds in one script", lambda names: np.shape(names["curves"]) == (40, 3)
     and len(set(names["curves"][9])) == 3 and np.min(names["curves"][-1]) > 50),
    ("A network of your own", lambda names: names["trainer"].global_step == 4096
     and isinstance(names["trainer"].policy, models.LSTMWrapper)),
    ("Gradient accumulation", lambda names: names["difference"] < 1e-4),
    ("Evaluate, stop early, play", lambda names: names["best"] >= 475
     and names["trainer"].epoch < names["trainer"].total_epochs
     and (names["play"](names["trained"], 3) >= 475).all()
     and names["trainer"].run_folder is None),
])
def test_a_recipe_does_what_it_says(recipe, tmp_path, title, check):
    assert check(recipe(title))
    assert title != "Short forms" or not list(tmp_path.iterdir())


def test_own_loss_and_optimizer(recipe):
    names = recipe("A loss and an optimizer of your own")
    trainer, seen = names["trainer"], names["seen"]
    section = (ROOT / "docs/recipes.md").read_text().split("## A loss and an optimizer")[1]
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, flags=re.M))
    assert table.keys() - {"action_masks"} == vars(seen).keys(), "every field is on the page"
    assert set(seen.state) == {"mingru", "resets", "valid"}
    T, segments = trainer.horizon, trainer.segments
    for name in table.keys() - {"action_masks", "state"}:
        dimensions, shape = table[name].partition(")")[0].split(","), getattr(seen, name).shape
        assert [word.strip(" (") for word in dimensions[:2]] == ["T", "M"], name
        assert tuple(shape[:2]) == (T, segments) and len(shape) == len(dimensions), name
    assert seen.observations.shape == (T, segments, 4) and seen.logits.shape == (T, segments, 2)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.RMSprop)
    assert names["losses"]["own_calm_loss"] != 0
    assert trainer.args["train"]["loss"] == "recipe.calm"


class Watches(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(4)
        self.modes = set()

    def forward(self, x):
        self.modes.add((torch.is_grad_enabled(), self.training, self.norm.training))
        outputs = self.layer(self.norm(x))
        return outputs[:, :2], outputs[:, 2:]


def test_batch_norm_and_dropout_are_in_training_mode():
    """As the page says: in rollouts and in learning, unless the network is in eval mode."""
    env = vector.make("cartpole", num_envs=16)
    policy = Watches(env)
    trainer = pufferl.PuffeRL(env=env, policy=policy, horizon=8, minibatch_size=64, data_dir=None)
    for training in (True, False):
        policy.train(training)
        policy.modes.clear()
        trainer.evaluate()
        trainer.train()
        assert policy.modes == {(False, training, training), (True, training, training)}
    trainer.release()


def test_asymmetric_critic(recipe):
    names = recipe("An asymmetric critic")
    policy, observations = names["policy"], names["trainer"].storage["observations"][0]
    assert observations.shape == (8, 4) and observations.dtype == torch.float32
    changes = [[not torch.equal(a, b) for a, b in zip(policy(observations),
                                                      policy(observations + step), strict=True)]
               for step in torch.eye(4)]
    assert sorted(changes) == [[False, True]] * 2 + [[True, True]] * 2, (
        "the actor sees two of four, the critic all")


STEPS = [1024, 2048, 3072, 4096, 5120]


def test_own_logger(recipe, tmp_path):
    recipe("A logger of your own")
    rows = [line.split(",") for line in (tmp_path / "score.csv").read_text().splitlines()]
    assert rows[0] == ["step", "score of cartpole"]
    assert [int(row[0]) for row in rows[1:]] == STEPS and float(rows[-1][1]) > 5


@pytest.mark.slow
def test_attention_over_the_last_steps(recipe):
    names = recipe("Attention over the last steps")
    assert names["statistics"]["score"] > 0.9, "guessing gives 0.5"
    env, policy = names["env"], names["policy"]
    observations = torch.randn(9, 5, *env.single_observation_space.shape)
    resets = torch.randint(0, 4, (9, 5)) == 0
    whole, stepped = policy.initial_state(5), policy.initial_state(5)
    logits, value = policy(observations, whole | {"resets": resets.to(torch.uint8)})
    for t in range(9):
        stepped["resets"] = resets[t].to(torch.uint8)
        one, v = policy.forward_eval(observations[t], stepped)
        assert torch.allclose(one, logits[t], atol=1e-5) and torch.allclose(v, value[t], atol=1e-5)


@pytest.mark.slow  # MLflow's import alone takes seconds
def test_mlflow(recipe, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/runs")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = recipe("Curves in MLflow")["trainer"].logger.run.info.run_id
    client = mlflow.MlflowClient(f"file:{tmp_path}/runs")
    history = client.get_metric_history(run, "environment/score")
    assert [point.step for point in history] == STEPS
    assert client.get_run(run).data.params["train.total_timesteps"] == "5000"


def test_hub(recipe, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs the package huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "squared_20260101"
    folder.mkdir()
    (folder / "config.json").write_text('{"env_name": "squared"}')
    for name in ("model_squared_000001.pt", "model_squared_000002.pt"):
        (folder / name).touch()
    names = recipe("A policy on the Hugging Face Hub")
    with pytest.raises(hub.errors.OfflineModeIsEnabled):
        names["publish"](folder, "me/squared")
    readme = (folder / "README.md").read_text()
    assert "eval squared --load-model-path model_squared_000002.pt" in readme
    sent = []
    monkeypatch.setattr(hub.HfApi, "create_repo", lambda *arguments, **options: None)
    monkeypatch.setattr(hub.HfApi, "upload_folder", lambda self, **options: sent.append(options))
    names["publish"](folder, "me/squared")
    assert sent[0]["repo_id"] == "me/squared" and sent[0]["folder_path"] == folder
    files = {path.name for path in folder.iterdir()} & set(sent[0]["allow_patterns"])
    assert files == {"README.md", "config.json", "model_squared_000002.pt"}


def test_fronts_of_several_sweeps(recipe, tmp_path):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        ledger = Ledger(tmp_path / name)
        asked = {"env": "squared", "metric": "environment/score", "goal": "maximize",
                 "cost": "performance/uptime"}
        write_json(ledger.folder / "sweep.json",
                   {"asked": asked, "options": [], "space": FAKE_SPACE})
        tuner = Random(search_space=FAKE_SPACE)
        for number, (score, cost) in enumerate([(0.2, 1.0), (0.1, 2.0), (0.6, 4.0)]):
            ledger.finish(record(number, factor * score, cost, **tuner.suggest()))
    figure = recipe("The fronts of several sweeps")["draw_fronts"](tmp_path / "a", tmp_path / "b")
    points, front = figure.data[2:]
    assert list(points.y) == [0.4, 0.2, 1.2]
    assert (list(front.x), list(front.y)) == ([1.0, 4.0], [0.4, 1.2])


def test_notebook(recipe):
    stop = """
good = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
before, calls = trainer._step_optimizer, []
def interrupt():
    calls.append(before())
    raise KeyboardInterrupt
trainer._step_optimizer = interrupt
train_until_stopped(5)
trainer._step_optimizer = before
restored = trainer.epoch == 5 and all((good[name] == x).all() for name, x in trainer.policy.state_dict().items())
train_until_stopped(2)
"""
    names = recipe("Training from a notebook", stop)
    assert len(names["calls"]) == 1 and names["restored"] and names["trainer"].epoch == 7
    names["trainer"].close()


def test_checkpoints(recipe, capsys):
    assert recipe("Checkpoints from a script")["same"]
    assert "{'why': 'half way'}" in capsys.readouterr().out


def test_settings_in_the_docs_exist():
    schema, _ = configuration.resolve("squared")
    names = {f"{section}.{field.name}" for section, cls in schema.items()
             for field in dataclasses.fields(cls)}
    names |= {f"train.{size}" for size in configuration.SIZES}  # in the place of others
    used = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in ("LOG.md", "sweeps.md"):
            page = re.sub(r"^```sh wrong\n.*?^```\n+```text\n.*?^```$", "", path.read_text(),
                          flags=re.M | re.S)
            pattern = r"(?<![\w./])(?:--)?((?:train|vec|rnn|eval|profile)\.[a-z_-]+)"
            for name in re.findall(pattern, page):
                used[name.replace("-", "_")] = path.name
    assert len(used) > 20 and {name: used[name] for name in used.keys() - names} == {}
