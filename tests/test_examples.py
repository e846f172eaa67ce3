"""Every script of examples/ runs, in the slow tests to its end."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_sweep import FAKE_SPACE, record, write_sweep
from trainers import Tanh, make_trainer, run_epochs

import models
from protein import Random

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/recipes.md").read_text()
OTHER_TESTS = "cleanrl_ppo_atari", "torch_cartpole", "hub", "compare_sweeps"  # not in RUNS
LOG_STEPS = [1024, 2048, 3072, 4096, 5120]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Run a script of examples/ in an empty folder; returns its globals as attributes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def run(name, steps=None, main=True):
        path = ROOT / f"examples/{name}.py"
        text = path.read_text()
        if steps is not None:
            text, count = re.subn(r"(total_timesteps=|num_iterations = 16, 64, )[\d_]+",
                                  rf"\g<1>{steps}", text)
            assert count, "nothing says how long it trains"
            text = text.replace("steps=80)", "steps=4)")  # of cloning
        names = {"__name__": "__main__" if main else name}
        exec(compile(text, str(path), "exec"), names)
        return SimpleNamespace(**names)

    return run


# name, steps of the fast test, what holds after the whole script
RUNS = [
    ("quickstart", 20_000, lambda e: e.trainer.horizon == 32
     and e.trainer.environment["score"] > 50),  # a random policy: 22
    ("curriculum", 17_000, lambda e: e.scores[0] > 0.7 and e.scores[2] > 0.9),
    ("change_running_envs", None, lambda e: e.forces == [6.0] * 8 or e.forces == [6.0]),
    ("reward_shaping", None, lambda e: e.statistics["true_return"]
     == pytest.approx(e.statistics["episode_length"], abs=0.01)
     and e.statistics["episode_return"] < e.statistics["true_return"] - 0.5),
    ("learning_rate_stages", 10_000, lambda e: len(e.rates) == 98
     and e.rates == sorted(e.rates, reverse=True) and set(e.rates) == {0.02, 0.005, 0.001}),
    ("target_kl", 10_000, lambda e: e.divergences[0] < 0.005 < np.mean(e.divergences[-5:]) < 0.04
     and 1.5 * e.rates[0] < max(e.rates) < 4.01 * e.rates[0]),
    ("rnd", 10_000, lambda e: e.errors[-1] < e.errors[0] / 2
     and e.trainer.environment["episode_return"] <= 0),  # the logs have the true rewards
    ("behaviour_cloning", 13_000, lambda e: e.loss < 0.4  # untrained: log 2
     and max(e.scores[:5]) > 60),
    ("wrappers", None, lambda e: e.env.observation_shape == (3, 4)
     and e.statistics["episode_return"] > 1.5 * e.statistics["episode_length"]),
    ("seeds", 5_000, lambda e: np.shape(e.curves) == (40, 3)
     and len(set(e.curves[9])) == 3 and np.min(e.curves[-1]) > 50),
    ("custom_network", 1_024, lambda e: e.trainer.global_step == 4096
     and isinstance(e.trainer.policy, models.LSTMWrapper)),
    ("attention", 4_100, lambda e: e.statistics["score"] > 0.9),
    ("squashed_actions", 6_000, lambda e: e.scores[-1] > e.scores[0] + 0.5 and e.largest <= 1
     and e.entropy < 2 * np.log(2)),  # the largest entropy within ±1
    ("gradient_accumulation", None, lambda e: e.difference < 1e-4),
    ("early_stopping", 12_000, lambda e: e.best >= 475 and e.trainer.run_folder is None
     and e.trainer.epoch < e.trainer.total_epochs and (e.play(e.trained, 3) >= 475).all()),
    ("cleanrl_ppo", 2, lambda e: np.mean(e.episode_returns[-20:]) > 150),
    ("save_and_load", None, lambda e: e.equal),
    ("preemption", 9_000, lambda e: e.begin == 0 and e.trainer.global_step >= 9_000),
    ("custom_loss", None, lambda e: e.losses["custom_smooth_loss"] != 0),
    ("asymmetric_critic", None, lambda e: critic_alone_sees_velocities(e)),
    ("custom_logger", None, lambda e: csv_has_scores()),
    ("notebook", None, lambda e: e.trainer.epoch == 5),
    ("mlflow_logger", None, None),
]


def critic_alone_sees_velocities(names):
    policy, observations = names.policy, names.trainer.storage["observations"][0]
    assert observations.shape == (8, 4) and observations.dtype == torch.float32
    changes = [[not torch.equal(a, b) for a, b in zip(policy(observations),
                                                      policy(observations + step), strict=True)]
               for step in torch.eye(4)]
    return sorted(changes) == [[False, True]] * 2 + [[True, True]] * 2


def csv_has_scores():
    rows = [line.split(",") for line in Path("score.csv").read_text().splitlines()]
    return (rows[0] == ["step", "score of cartpole"] and float(rows[-1][1]) > 5
            and [int(row[0]) for row in rows[1:]] == LOG_STEPS)


def test_the_page_names_each_script_and_each_script_is_short():
    paths = sorted((ROOT / "examples").glob("*.py"))
    named = re.findall(r"\]\(\.\./examples/(\w+)\.py\)", PAGE.partition("\n## ")[0])
    assert sorted(named) == [path.stem for path in paths]
    assert {path.stem for path in paths} == {name for name, *_ in RUNS} | set(OTHER_TESTS)
    for path in paths:
        text = path.read_text()
        assert path.stem == "cleanrl_ppo_atari" or text.count("\n") <= 110, path.name
        launch = rf"^    python (-m )?(pufferl\.py .*)?(examples[/.]{path.stem})"
        assert re.search(launch, text.split('"""')[1], flags=re.M), path.name


def parameters():
    for name, steps, check in RUNS:
        if check and steps:
            yield pytest.param(name, steps, None, id=f"{name}-short")
        if check:  # without steps it takes seconds as it is
            yield pytest.param(name, None, check, id=name, marks=[pytest.mark.slow] * bool(steps))


@pytest.mark.parametrize(("name", "steps", "check"), [*parameters()])
def test_an_example_runs(example, tmp_path, name, steps, check):
    names = example(name, steps)
    if check is not None:
        assert check(names)
    if 'data_dir=None' in (ROOT / f"examples/{name}.py").read_text():
        assert not (tmp_path / "experiments").exists()
    if name == "notebook":
        names.trainer.close()


def test_a_minibatch_has_the_fields_of_the_page(example):
    names = example("custom_loss", main=False)
    minibatches = []

    def loss(minibatch):
        minibatches.append(minibatch)
        return names.smooth(minibatch)

    trainer = make_trainer(loss=loss, optimizer=names.Slow)
    run_epochs(trainer, 1)
    minibatch = minibatches[-1]
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGE, flags=re.M))
    del table["action_masks"]
    assert table.keys() == vars(minibatch).keys()
    assert set(minibatch.state) == {"mingru", "resets", "valid"}
    for name in table.keys() - {"state"}:
        dimensions = table[name].partition(")")[0].split(",")
        shape = getattr(minibatch, name).shape
        assert [word.strip(" (") for word in dimensions[:2]] == ["T", "M"], name
        assert shape[:2] == (trainer.horizon, trainer.segments), name
        assert len(shape) == len(dimensions), name
    assert isinstance(trainer.optimizer.optimizer, torch.optim.RMSprop)
    trainer.close()


def test_an_interrupt_restores_the_last_epoch(example, monkeypatch):
    names = example("notebook")
    trainer = names.trainer
    weights = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}

    def interrupt(train=trainer.train):
        train()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train", interrupt)
        names.train_until_stopped(5)
    assert trainer.epoch == 5
    assert all((weights[name] == x).all() for name, x in trainer.policy.state_dict().items())
    names.train_until_stopped(2)
    assert trainer.epoch == 7
    trainer.close()


def test_batch_norm_and_dropout_are_in_training_mode():
    """As docs/recipes.md says: in rollouts and updates, unless the network is in eval mode."""
    modes = set()

    def record(policy):
        policy.encoder.register_forward_hook(lambda module, *_: modes.add(
            (torch.is_grad_enabled(), module.training)))

    trainer = make_trainer(policy=Tanh, change=record)
    for training in (True, False):
        trainer.policy.train(training)
        modes.clear()
        run_epochs(trainer, 1)
        assert modes == {(False, training), (True, training)}
    trainer.release()


@pytest.mark.slow  # the import of MLflow takes seconds
def test_mlflow(example, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/runs")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = example("mlflow_logger").trainer.logger.run.info.run_id
    client = mlflow.MlflowClient(f"file:{tmp_path}/runs")
    history = client.get_metric_history(run, "environment/score")
    assert [point.step for point in history] == LOG_STEPS
    assert client.get_run(run).data.params["train.total_timesteps"] == "5000"


def test_hub(example, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs the package huggingface_hub")
    folder, uploads = tmp_path / "squared_20260101", []
    folder.mkdir()
    (folder / "config.json").write_text('{"env_name": "squared"}')
    for name in ("model_squared_000001.pt", "model_squared_000002.pt"):
        (folder / name).touch()
    monkeypatch.setattr(sys, "argv", ["hub.py", str(folder), "me/squared"])
    monkeypatch.setattr(hub.HfApi, "create_repo", lambda *arguments, **options: None)
    monkeypatch.setattr(hub.HfApi, "upload_folder", lambda self, **options: uploads.append(options))
    example("hub")
    readme = (folder / "README.md").read_text()
    assert "eval squared --load-model-path model_squared_000002.pt" in readme
    assert uploads[0]["repo_id"] == "me/squared" and uploads[0]["folder_path"] == folder
    files = {path.name for path in folder.iterdir()} & set(uploads[0]["allow_patterns"])
    assert files == {"README.md", "config.json", "model_squared_000002.pt"}


def test_fronts_of_several_sweeps(example, tmp_path, monkeypatch):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        ledger = write_sweep(tmp_path / name, FAKE_SPACE)
        for number, (score, cost) in enumerate([(0.2, 1.0), (0.1, 2.0), (0.6, 4.0)]):
            settings = Random(search_space=FAKE_SPACE).suggest()
            ledger.finish(record(number, factor * score, cost, **settings))
    monkeypatch.setattr(sys, "argv", ["compare_sweeps.py", "a", "b"])
    names = example("compare_sweeps")
    assert Path("fronts.html").exists()
    points, front = names.draw_fronts("a", "b").data[2:]
    assert list(points.y) == [0.4, 0.2, 1.2]
    assert (list(front.x), list(front.y)) == ([1.0, 4.0], [0.4, 1.2])


def test_a_preempted_training_continues(example):
    first = example("preemption", 9_000).trainer.global_step
    second = example("preemption", 20_000)
    assert second.begin == first and second.trainer.global_step >= 20_000
