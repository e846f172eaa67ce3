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


def test_every_recipe_has_a_test():
    here = Path(__file__).read_text()
    assert all(blocks for blocks in RECIPES.values()) and len(RECIPES) == 23
    assert [title for title in RECIPES if f'"{title}"' not in here and not title.startswith("CleanRL")] == []


def test_recipes_are_short():
    for title, blocks in RECIPES.items():
        if not title.startswith("CleanRL"):
            assert 10 <= sum(block.count("\n") for block in blocks) <= 60, title


def test_short_forms(recipe, tmp_path):
    names = recipe("Short forms")
    assert names["trainer"].horizon == 32 and names["trainer"].environment["score"] > 50, (
        "a random policy has 22")
    assert not list(tmp_path.iterdir())


def test_curriculum(recipe):
    names = recipe("Curriculum over environment settings")
    assert len(scores := names["scores"]) == 3 and scores[0] > 0.7 and scores[2] > 0.9, "guessing gives 0.5"
    assert names["forces"] == [6.0]


def test_reward_shaping(recipe):
    statistics = recipe("Reward shaping by a wrapper")["statistics"]
    assert statistics["true_return"] == pytest.approx(statistics["episode_length"], abs=0.01)
    assert statistics["episode_return"] < statistics["true_return"] - 0.5


def test_stages(recipe):
    used = recipe("Several stages with other learning rates")["used"]
    assert (used == sorted(used, reverse=True) and set(used) == {0.02, 0.005, 0.001}
            and len(used) == 98)


def test_bounds_of_actions(recipe):
    names = recipe("Bounds of continuous actions")
    assert names["scores"][-1] > names["scores"][0] + 0.5 and names["largest"] <= 1
    assert names["entropy"] < 2 * np.log(2), "no distribution within ±1 has more"


def test_target_kl(recipe):
    names = recipe("A target for how far the policy moves")
    assert names["moved"][0] < 0.005 < np.mean(names["moved"][-5:]) < 0.04
    assert 1.5 * names["rates"][0] < max(names["rates"]) < 4.01 * names["rates"][0]


def test_a_bonus_for_what_is_new(recipe):
    names = recipe("A bonus for what is new")
    assert names["errors"][-1] < names["errors"][0] / 2
    assert names["trainer"].environment["episode_return"] <= 0, "the logs have the true rewards"


def test_behaviour_cloning(recipe):
    names = recipe("Behaviour cloning first")
    assert names["loss"].item() < 0.4, "at first log 2"
    assert max(names["scores"][:5]) > 60, "without it, 22"


def test_stacked_frames_and_repeated_actions(recipe):
    names = recipe("Stacked frames and repeated actions")
    assert names["env"].observation_shape == (3, 4)
    assert names["statistics"]["episode_return"] > 1.5 * names["statistics"]["episode_length"]


def test_several_seeds(recipe):
    curves = np.array(recipe("Several seeds in one script")["curves"])
    assert curves.shape == (40, 3) and len(set(curves[9])) == 3 and curves[-1].min() > 50


def test_own_network(recipe):
    trainer = recipe("A network of your own")["trainer"]
    assert isinstance(trainer.policy, models.LSTMWrapper) and trainer.global_step == 4096


def test_own_loss_and_optimizer(recipe):
    names = recipe("A loss and an optimizer of your own")
    trainer, seen = names["trainer"], names["seen"]
    page = (ROOT / "docs/recipes.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| ([^|]*) \|",
                      page.split("## A loss and an optimizer")[1], flags=re.M)
    segments, T = trainer.segments, trainer.horizon
    sizes = {"T": T, "M": segments}
    assert {name for name, _ in told} - {"action_masks"} == set(vars(seen)), (
        "every field stands on the page")
    assert set(seen.state) == {"mingru", "resets", "valid"}
    for name, shape in told:
        if name not in ("action_masks", "state"):
            expected = [sizes.get(word, word)
                        for word in re.findall(r"\w+", shape.partition(")")[0])]
            assert list(getattr(seen, name).shape)[:2] == expected[:2] == [T, segments], name
            assert getattr(seen, name).dim() == len(shape.partition(")")[0].split(",")), name
    assert seen.observations.shape == (T, segments, 4) and seen.logits.shape == (T, segments, 2)
    assert (isinstance(trainer.optimizer.optimizer, torch.optim.RMSprop)
            and names["losses"]["own_calm_loss"] != 0)
    assert trainer.args["train"]["loss"] == "recipe.calm"


def test_batch_norm_and_dropout_are_in_training_mode(monkeypatch):
    """As the page says: in rollouts and in learning, unless the network
    itself is told otherwise."""
    import pufferl
    import vector

    class Watches(torch.nn.Module):
        def __init__(self, env):
            super().__init__()
            self.layer, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(4)
            self.modes = []

        def forward(self, x):
            self.modes.append((torch.is_grad_enabled(), self.training, self.norm.training))
            outputs = self.layer(self.norm(x))
            return outputs[:, :2], outputs[:, 2:]

    env = vector.make("cartpole", num_envs=16)
    policy = Watches(env)
    trainer = pufferl.PuffeRL(env=env, policy=policy, horizon=8, minibatch_size=64, data_dir=None)
    trainer.evaluate()
    trainer.train()
    assert set(policy.modes) == {(False, True, True), (True, True, True)}
    policy.modes.clear()
    policy.eval()
    trainer.evaluate()
    trainer.train()
    assert set(policy.modes) == {(False, False, False), (True, False, False)}
    trainer.release()


def test_asymmetric_critic(recipe):
    names = recipe("An asymmetric critic")
    policy, observations = names["policy"], names["trainer"].storage["observations"][0]
    assert observations.shape == (8, 4) and observations.dtype == torch.float32
    told = [[not torch.equal(a, b)
             for a, b in zip(policy(observations), policy(observations + step), strict=True)]
            for step in torch.eye(4)]
    assert sorted(told) == [[False, True]] * 2 + [[True, True]] * 2, (
        "the actor sees two of four, the critic all")


def test_own_logger(recipe, tmp_path):
    recipe("A logger of your own")
    rows = [line.split(",") for line in (tmp_path / "score.csv").read_text().splitlines()]
    assert rows[0] == ["step", "score of cartpole"]
    assert [int(row[0]) for row in rows[1:]] == [1024, 2048, 3072, 4096, 5120]
    assert float(rows[-1][1]) > 5


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
    kept = mlflow.MlflowClient(f"file:{tmp_path}/runs")
    assert [point.step for point in kept.get_metric_history(run, "environment/score")] == [1024, 2048, 3072, 4096, 5120]
    assert kept.get_run(run).data.params["train.total_timesteps"] == "5000"


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
    assert "eval squared --load-model-path model_squared_000002.pt" in (folder
                                                                        / "README.md").read_text()
    sent = []
    monkeypatch.setattr(hub.HfApi, "create_repo", lambda *arguments, **options: None)
    monkeypatch.setattr(hub.HfApi, "upload_folder", lambda self, **options: sent.append(options))
    names["publish"](folder, "me/squared")
    assert sent[0]["repo_id"] == "me/squared" and sent[0]["folder_path"] == folder
    found = {path.name for path in folder.iterdir()} & set(sent[0]["allow_patterns"])
    assert found == {"README.md", "config.json", "model_squared_000002.pt"}


def test_fronts_of_several_sweeps(recipe, tmp_path):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        ledger = Ledger(tmp_path / name)
        write_json(ledger.folder
                   / "sweep.json", {"asked": {"env": "squared", "metric": "environment/score",
     "goal": "maximize", "cost": "performance/uptime"}, "options": [],
                                    "space": FAKE_SPACE})
        tuner = Random(search_space=FAKE_SPACE)
        for number, (score, cost) in enumerate([(0.2, 1.0), (0.1, 2.0), (0.6, 4.0)]):
            claim = ledger.claim(settings=tuner.suggest())
            ledger.finish(claim, record(number, factor * score, cost, **claim["settings"]))
    figure = recipe("The fronts of several sweeps")["draw_fronts"](tmp_path / "a", tmp_path / "b")
    points, front = figure.data[2:]
    assert (list(points.y) == [0.4, 0.2, 1.2] and list(front.x) == [1.0, 4.0]
            and list(front.y) == [0.4, 1.2])


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


def test_evaluate_stop_early_and_play(recipe):
    names = recipe("Evaluate, stop early, play")
    assert names["best"] >= 475 and names["trainer"].epoch < names["trainer"].total_epochs
    assert (names["play"](names["trained"], 3) >= 475).all() and names["trainer"].run_folder is None


def test_settings_in_the_docs_exist():
    schema, _ = configuration.resolve("squared")
    names = {f"{section}.{field.name}" for section, cls in schema.items()
             for field in dataclasses.fields(cls)}
    # of the command line, in the place of others
    names |= {f"train.{size}" for size in configuration.SIZES}
    named = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in ("LOG.md", "sweeps.md"):
            page = re.sub(r"^```sh wrong\n.*?^```\n+```text\n.*?^```$", "", path.read_text(),
                          flags=re.M | re.S)
            for name in re.findall(r"(?<![\w./])(?:--)?((?:train|vec|rnn|eval|profile)\.[a-z_-]+)",
                                   page):
                named.setdefault(name.replace("-", "_"), path.name)
    assert (len(named) > 20
            and {name: path for name, path in named.items() if name not in names} == {})
