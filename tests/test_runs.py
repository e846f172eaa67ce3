"""Runs: crashes, signals, full disks, checkpoints, resume, NaNs and memory."""

import collections
import errno
import gc
import json
import math
import operator
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import user_envs
from trainers import NETWORKS, make_trainer, run_epochs

import configuration
import models
import processes
import pufferl
import runs
import vector
from errors import WorkerError, error_text
from pufferl import ConfigError, PuffeRL, load_config, make
from tools import history
from tools.sweep import command as sweep

ROOT = Path(__file__).resolve().parent.parent
CATCH = f"{ROOT}/tests/user_envs.py:Catch"
SMALL = ["--env.num-envs", "64", "--train.minibatch-size", "1024", "--logger", "none"]


def train(name, *options, steps=2048):
    options = ["--train.total-timesteps", str(steps), "--logger", "none", "--vec.num-threads", "1",
               *options]
    return pufferl.train(name, load_config(name, options))


def steps_of(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- crashes and signals


@pytest.mark.slow
def test_every_kind_of_run_is_whole_after_kills_and_on_full_disks():
    command = [sys.executable, str(ROOT / "bench/bench_crash.py"), "--kills", "20", "--disks", "20"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == [] and min(result["ended"].values()) >= 1, result
    assert sum(result["kills"].values()) >= 18, result


def test_an_entry_is_logged_before_the_checkpoint_of_its_epoch(tmp_path):
    trainer, logs = make_trainer(tmp_path, checkpoint_interval=1, log_interval=0), []
    save = trainer.run.save
    trainer.run.save = lambda *parts: (logs.append(steps_of(trainer.run_folder)), save(*parts))
    run_epochs(trainer, 2)
    assert [steps[-1] for steps in logs] == [trainer.batch_size, 2 * trainer.batch_size]
    trainer.release()


def test_a_run_that_is_still_trained_is_not_resumed(tmp_path):
    first, second = make_trainer(tmp_path), make_trainer(tmp_path)
    run_epochs(first, 1)

    def files():
        return sorted((path.name, path.stat().st_mtime_ns) for path in first.run_folder.iterdir())

    before = files()
    second.run.folder = first.run_folder
    with pytest.raises(ConfigError, match=str(first.run_folder)):
        second.evaluate()
    assert files() == before
    first.close()
    second.evaluate()
    second.release()


def test_nohup_trains_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes.Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    trainers = [make_trainer(tmp_path) for _ in range(3)]
    assert len({trainer.run_folder for trainer in trainers}) == 3
    for trainer in trainers:
        trainer.release()


def test_a_clock_that_jumps_back_changes_nothing(tmp_path, monkeypatch):
    trainer, now = make_trainer(tmp_path, checkpoint_interval=1), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e7)
    before = trainer.uptime
    run_epochs(trainer, 3)
    assert trainer.uptime > before >= 0 and trainer.statistics.entry["performance/sps"] > 0
    model = configuration.find_model(str(trainer.run_folder), tmp_path, "cartpole")
    assert model.name == "model_cartpole_000003.pt"
    assert history.is_running(trainer.run_folder)
    trainer.release()
    assert not history.is_running(trainer.run_folder)


# -- disks


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    trainer = make_trainer(tmp_path / "file")
    with pytest.raises(ConfigError, match="--data-dir"):
        trainer.evaluate()
    trainer.release()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # too small a disk: no file above 16 kB
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
        with pytest.raises(SystemExit, match="--data-dir"):
            pufferl.main(["train", "squared", *SMALL, "--data-dir", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.part"))


def test_a_full_disk_stops_no_training_and_keeps_the_checkpoint(tmp_path, capfd):
    """Later checkpoints are written again, and the last is an error. bench/bench_crash.py fills real disks."""
    trainer = make_trainer(tmp_path, checkpoint_interval=1, keep=2)
    run_epochs(trainer, 2)
    folder = trainer.run_folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        run_epochs(trainer, 3)
    assert trainer.epoch == 5 and torch.load(folder / "trainer_state.pt", weights_only=True)["epoch"] == 2
    assert len(list(folder.glob("model_*.pt"))) == 2
    assert not list(folder.glob("*.part")) and "checkpoint" in capfd.readouterr().err
    run_epochs(trainer, 1)
    assert steps_of(folder) == [192 * epoch for epoch in range(1, 7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        run_epochs(trainer, 1)
        with pytest.raises(ConfigError, match=rf"7\b.*{folder}/trainer_state.pt.*--resume {folder} "):
            trainer.close()
    assert trainer.vecenv.closed, "all the rest ended"
    again = make_trainer(tmp_path)
    again.load_checkpoint(folder)
    assert again.epoch == 6
    again.release()


# -- checkpoints and resume


def find(path, folder, name="squared"):
    return configuration.find_model(path, folder, name)


def test_the_last_models_are_kept_and_the_best(tmp_path):
    trainer = make_trainer(tmp_path, "squared", checkpoint_interval=1, keep=2)
    logs = iter([{"score": 0.1, "n": 150}, {"score": 0.9, "n": 60}, {"score": 0.9, "n": 60},
                 {"score": 0.4, "n": 500}, {"score": 5.0, "n": 20}])
    trainer.vecenv.log = lambda: next(logs)
    weights = [run_epochs(trainer, 1) for _ in range(5)]
    assert trainer.statistics.best_score == pytest.approx(0.9), "20 episodes are not enough"
    names = sorted(path.name for path in trainer.run_folder.glob("*.pt"))
    assert names == ["best_squared.pt", "model_squared_000004.pt", "model_squared_000005.pt",
                     "trainer_state.pt"]
    best = torch.load(trainer.run_folder / "best_squared.pt", weights_only=True)
    assert all(torch.equal(best[name], tensor) for name, tensor in weights[1].items()), "the weights that played"
    for tensor in trainer.statistics.best.values():  # copies, and not views of the arena
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert find("best", tmp_path).name == "best_squared.pt"
    assert find("latest", tmp_path).name == "model_squared_000005.pt"
    again = make_trainer(tmp_path, "squared")
    again.load_checkpoint(trainer.run_folder)
    assert again.statistics.best_score == trainer.statistics.best_score
    assert again.statistics._recent == (pytest.approx(100.0), 20)


def test_the_latest_run_is_of_the_configuration_that_is_named(tmp_path):
    configs = {"squared_1": {"env_name": "squared", "policy": {"hidden_size": 77}},
               "squared_mine_1": {"env_name": "squared_mine"},
               "drone_0": {"env_name": "drone", "config_name": "drone"},
               "drone_1": {"env_name": "drone", "config_name": "drone_race"}}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"turn": 1, **config}))
        (tmp_path / name / "model_x.pt").touch()
    os.utime(tmp_path / "squared_mine_1" / "model_x.pt", (9e9, 9e9))
    for name, folder in (("ocean/squared/squared.h", "squared_1"), ("drone", "drone_0"),
                         ("drone_race", "drone_1"), ("puffer_drone", "drone_0")):
        assert find("latest", tmp_path, name).parent.name == folder
    args = load_config("squared", ["--data-dir", str(tmp_path), "--load-model-path", "latest"])
    assert args["policy"]["hidden_size"] == 77


def test_a_run_that_is_still_trained_is_refused_without_advice_to_resume_it(tmp_path):
    options = ["--data-dir", str(tmp_path), "--logger", "none", "--env.num-envs", "64"]
    trainer = pufferl.make_trainer("squared", load_config("squared", options))
    run_epochs(trainer, 1)
    trainer.save_checkpoint()
    args = load_config("squared", [*options, "--resume", str(trainer.run_folder)])
    with pytest.raises(ConfigError, match="is still being trained") as error:
        pufferl.train("squared", args)
    trainer.release()
    assert not getattr(error.value, "__notes__", ())


def test_a_summary_is_printed_before_environments_close(capsys, monkeypatch):
    close = vector.Native._close
    monkeypatch.setattr(vector.Native, "_close", lambda self: print("closing") or close(self))
    pufferl.train("squared", load_config("squared", [
        "--data-dir", "none", "--train.total-timesteps", "1", "--env.num-envs", "64"]))
    output = capsys.readouterr().out
    assert 0 < output.index("steps/s") < output.index("closing")


def test_the_latest_run_is_the_one_that_was_started_or_resumed_last(tmp_path):
    """Whatever the clock says, and whoever copies a folder."""
    first, second = (make_trainer(tmp_path, "squared", num_envs=64, run_id=name) for name in "ba")

    def latest():
        return find("latest", tmp_path).parent.name

    for trainer in (first, second):
        run_epochs(trainer, 1)
        trainer.close()
    os.utime(next(second.run_folder.glob("model_*.pt")), (1, 1))  # the clock had jumped back
    assert latest() == "squared_a"
    copy = shutil.copytree(first.run_folder, tmp_path / "squared_copy")
    os.utime(next(copy.glob("model_*.pt")), (9e9, 9e9))
    assert latest() == "squared_a"
    again = make_trainer(tmp_path, "squared", num_envs=64, run_id="b")
    again.load_checkpoint(again.run_folder)
    run_epochs(again, 1)
    again.release()
    assert latest() == "squared_b"
    (first.run_folder / "config.json").write_text("[]")
    assert latest() == "squared_a"


def test_the_latest_run_is_of_the_file_that_is_named(tmp_path, monkeypatch):
    """Of a file of the same name only if that one is gone: it may have been moved."""
    monkeypatch.chdir(tmp_path)
    for turn, folder in enumerate("ab"):
        header, run = Path(folder) / "game.h", Path("runs") / f"game_{folder}"
        for path in (header, run / "model_x.pt"):
            path.parent.mkdir(parents=True)
            path.touch()
        (run / "config.json").write_text(json.dumps(
            {"turn": turn, "env_name": "game.h", "env_file": configuration.find_file(str(header))}))
    assert find("latest", "runs", "a/game.h").parent.name == "game_a"
    Path("b/game.h").unlink()
    assert find("latest", "runs", "a/game.h").parent.name == "game_b"


def test_weights_of_another_environment_come_without_its_settings(tmp_path):
    trainer = make_trainer(tmp_path, "squared", settings={"env": {"num_envs": 77}, "policy": {"hidden_size": 16}})
    run_epochs(trainer, 1)
    trainer.close()
    sizes = [load_config(name, ["--load-model-path", str(trainer.run_folder)])["env"]["num_envs"]
             for name in ("squared", "cartpole")]
    assert sizes == [77, load_config("cartpole")["env"]["num_envs"]]


def test_a_trainer_begins_no_run_that_exists(tmp_path):
    trainer = make_trainer(tmp_path, run_id="x")
    run_epochs(trainer, 2)
    assert trainer.close() and not trainer.close()
    again = make_trainer(tmp_path, run_id="x")
    with pytest.raises(ConfigError, match="run_id"):
        again.evaluate()
    again.load_checkpoint(trainer.run_folder)
    run_epochs(again, 1)
    again.close()


def test_a_trainer_goes_back_to_an_earlier_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, checkpoint_interval=1)
    run_epochs(trainer, 1)
    path = trainer.save_checkpoint(tmp_path / "early.pt")
    run_epochs(trainer, 3)
    trainer.load_checkpoint(path)
    run_epochs(trainer, 1)
    model = trainer.close()
    assert find("latest", tmp_path, "cartpole") == Path(model)
    assert steps_of(trainer.run_folder) == [192, 384]


def test_what_fails_at_the_end_loses_nothing(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    run_epochs(trainer, 1)
    trainer.global_step += 1  # an entry is due
    trainer.logger.log = mock.Mock(side_effect=ConnectionError("away"))
    trainer.vecenv.close()
    assert Path(trainer.close()).exists() and "away" in capsys.readouterr().err
    assert torch.load(trainer.run_folder / "trainer_state.pt", weights_only=True)["epoch"] == 1


def test_weights_that_are_not_finite_are_not_saved(tmp_path, capsys):
    trainer = make_trainer(tmp_path, checkpoint_interval=1)
    run_epochs(trainer, 1)
    for rate in (math.nan, math.inf, -1):
        with pytest.raises(ConfigError, match="learning_rate"):
            trainer.learning_rate = rate
    trainer.learning_rate, scheduled = 0.5, trainer.learning_rate
    trainer.learning_rate = None
    assert trainer.learning_rate == scheduled
    next(trainer.policy.parameters()).data[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="weights"):
        trainer.save_checkpoint()
    assert trainer.close() == "" and "weights" in capsys.readouterr().err
    assert find("latest", tmp_path, "cartpole").name == "model_cartpole_000001.pt"


def test_what_differs_between_two_runs():
    """Also a setting of the environment that was renamed; a script's run has no sections."""
    before, after = {"env": {"arrows": 7, "size": 2}}, {"env": {"count": 5, "size": 2}}
    for one, other, names in ((before, after, ["arrows: 7", "count: missing is now 5"]),
                              (before, before, []), ({}, after, [])):
        lines = runs.difference(one, other)
        assert len(lines) == len(names) and all(map(operator.contains, lines, names)), lines


def test_metadata_comes_back(tmp_path):
    trainer, path = make_trainer(tmp_path), tmp_path / "mine.pt"
    pair = collections.namedtuple("pair", "x y")(np.float32(0.5), {1: np.arange(2)})
    trainer.save_checkpoint(path, metadata={"note": "α", "goal": torch.ones(2), "pair": pair, "none": None})
    metadata = trainer.load_checkpoint(path)
    assert (metadata["note"], metadata["none"]) == ("α", None)
    assert torch.equal(metadata["goal"], torch.ones(2))
    assert metadata["pair"][0] == 0.5 and metadata["pair"][1][1].tolist() == [0, 1]
    path.unlink()
    for value in (np.array(["a"]), {"deep": [Path("here")]}):
        with pytest.raises(ConfigError, match=r"metadata\['mine'\]"):
            trainer.save_checkpoint(path, metadata={"mine": value})
        assert not path.exists()


class Remembers(models.FeedForward):
    """A network that saves something beside its weights, as torch lets it."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.restored = state["seen"]


def test_what_a_network_has_beside_its_weights_is_resumed(tmp_path):
    trainer = make_trainer(tmp_path, policy=lambda env: Remembers(env, 8))
    path = trainer.save_checkpoint(tmp_path / "mine.pt")
    again = make_trainer(tmp_path, policy=lambda env: Remembers(env, 8))
    again.load_checkpoint(path)
    assert again.policy.restored == 3
    again.statistics.add_episodes([{"n": 100.0, "score": 1.0}], again.policy)  # the best so far
    assert again.statistics.best["_extra_state"] == {"seen": 3}


def test_names_of_one_environment():
    for one, other, same in (("a/user_envs.py:Env", "/b/user_envs.py:Env", True),
                             ("a/user_envs.py:Env", "a/user_envs.py:Other", False),
                             ("puffer_bandit", "bandit", True), ("a/mine.h", "mine", True),
                             ("dm_control/walker/walk", "dm_control/humanoid/walk", False)):
        assert (configuration.identify(one) == configuration.identify(other)) == same


@pytest.mark.parametrize("change", [{"env_kwargs": {"max_steps": 7}}, {"num_envs": 12}])
def test_other_environments_begin_new_episodes_at_a_resume(tmp_path, capsys, change):
    settings = {"env_kwargs": {"max_steps": 30}, "norm_reward": True}
    first = make_trainer(tmp_path, **settings)
    run_epochs(first, 2)
    path = first.save_checkpoint(tmp_path / "a.pt")
    second = make_trainer(tmp_path, **settings | change)
    capsys.readouterr()
    second.load_checkpoint(path)
    assert "episodes" in capsys.readouterr().out
    assert (second.epoch, second.global_step) == (2, first.global_step)
    assert second.storage["resets"][-1].all()
    for get in (lambda trainer: trainer.arena.flat("momentum"), lambda trainer: trainer.reward_scale.moments,
                lambda trainer: trainer.reward_scale.targets):
        assert torch.equal(get(first), get(second)) and get(first).any()
    run_epochs(second, 1)
    assert "env_kwargs" not in change or second.environment["episode_length"] <= 7


def test_a_run_of_a_script_can_be_resumed_from_the_command_line(tmp_path):
    policy = models.MinGRUPolicy(vecenv := make("squared", num_envs=64), hidden_size=16)
    trainer = PuffeRL(env=vecenv, policy=policy, total_timesteps=8192, minibatch_size=1024,
                      data_dir=str(tmp_path))
    run_epochs(trainer, trainer.total_epochs)
    assert Path(trainer.close()).exists()
    again = train("squared", "--data-dir", str(tmp_path), "--resume", "latest", "--env.num-envs",
                  "64", "--policy.hidden-size", "16", steps=12288)
    assert again.args["train"]["minibatch_size"] == 1024
    assert again.run_folder == trainer.run_folder and again.global_step == 12288
    assert steps_of(again.run_folder)[-1] == 12288


def test_the_settings_of_a_script_stay_as_they_are():
    args = load_config("gym/CartPole-v1", ["--train.total-timesteps", "256", "--data-dir", "none",
                                           "--vec.num-envs", "2", "--vec.backend", "serial"])
    before = json.dumps(args, default=str)
    pufferl.train("gym/CartPole-v1", args)
    assert json.dumps(args, default=str) == before


class Breaks(user_envs.PointMass):
    """Fail at step 200 of the training, whose run has a folder in `runs`."""

    total = 0

    def __init__(self, runs=""):
        super().__init__()
        self.runs = runs

    def step(self, action):
        self.total += any(Path(self.runs).glob("*/*"))
        if self.total == 200:
            raise RuntimeError("out of order")
        return super().step(action)


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_what_was_learned_is_saved_when_an_environment_fails(tmp_path, backend):
    name = f"{__file__}:Breaks"
    args = load_config(name, [
        "--data-dir", str(tmp_path), "--env.runs", str(tmp_path), "--vec.backend", backend,
        "--vec.num-envs", "2", "--train.horizon", "16", "--train.minibatch-size", "32"])
    with pytest.raises((RuntimeError, WorkerError), match="out of order") as error:
        pufferl.train(name, args)
    assert "To continue from the last checkpoint" in error.value.__notes__[-1]
    (state,) = tmp_path.glob("*/trainer_state.pt")
    assert torch.load(state)["epoch"] == 12  # 12 · 16 steps of each environment


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for none in ("None", "none"):
        options = ["--data-dir", none, "--env.num-envs", "64", "--train.total-timesteps", "4096"]
        args = load_config("squared", options)
        with pytest.raises(ValueError, match="none"):
            sweep.Runner(SimpleNamespace(env_name="squared"), None, options)
    trainer = pufferl.train("squared", args)
    assert trainer.run_folder is None and trainer.global_step >= 4096
    printed = capsys.readouterr().out
    assert "folder" not in printed and "checkpoint" not in printed
    with pytest.raises(ConfigError, match="data_dir"):
        trainer.save_checkpoint()
    assert not list(tmp_path.iterdir())


# -- statistics


def test_mean_return_and_seconds_an_epoch(tmp_path):
    trainer = make_trainer(tmp_path, "cartpole", env_kwargs={"max_steps": 20}, log_interval=1e9)
    returns, running = [], torch.zeros(trainer.num_agents)
    for _ in range(6):
        trainer.evaluate()
        for t in range(trainer.horizon):
            running += trainer.storage["rewards"][t]
            done = trainer.storage["resets"][t + 1].bool()
            returns += running[done].tolist()
            running[done] = 0.0
        trainer.train()
        if trainer.epoch == 1:
            returns.clear()  # logged at the first epoch
    seconds = -trainer._last_log[0]
    metrics = trainer.mean_and_log()
    seconds += trainer._last_log[0]
    expected = {"environment/n": len(returns),
                "environment/episode_return": pytest.approx(np.mean(returns)),
                "performance/seconds_epoch": pytest.approx(seconds / 5, rel=0.2)}
    assert metrics == {**metrics, **expected}
    trainer.release()


# -- NaNs


@pytest.mark.parametrize("name", ["observations", "weights"])
def test_a_planted_nan_is_named_and_the_checkpoint_left(tmp_path, name):
    trainer = make_trainer(tmp_path, env_kwargs={"continuous": name == "weights"}, checkpoint_interval=1)
    run_epochs(trainer, 2)
    saved = (trainer.run_folder / "trainer_state.pt").read_bytes()
    before = trainer.arena.flat("weights").clone()
    if name == "weights":
        trainer.policy.encoder.weight.data[0, 0] = math.nan
    trainer.evaluate()
    if name == "observations":
        trainer.storage["observations"][4, 2] = math.nan
    with pytest.raises(FloatingPointError, match=rf"epoch 3: {name}\b") as error:
        trainer.train()
    if name == "observations":
        assert "step 4 " in str(error.value) and "python -m ocean cartpole" in str(error.value)
        assert torch.equal(trainer.arena.flat("weights"), before)
    trainer.release()
    assert (trainer.run_folder / "trainer_state.pt").read_bytes() == saved
    assert str(trainer.run_folder) in str(error.value)


@pytest.mark.parametrize(("name", "advice"), [
    ("squared", "python -m ocean squared --check"), ("mine.h", "python -m ocean {} --check"),
    (CATCH, "python -m ocean {} --check --set size=5"), (None, "reset")])
def test_a_nan_says_how_to_find_it_in_any_kind_of_environment(tmp_path, name, advice):
    settings = {"size": 5} if name == CATCH else {}
    if name == "mine.h":
        name = str(tmp_path / name)
        Path(name).write_text((ROOT / "ocean/squared/squared.h").read_text())
    backend = "serial" if name in (CATCH, None) else "native"
    vecenv = vector.make(name or user_envs.Catch, 2, backend, env_kwargs=settings)
    config = {"data_dir": None, "horizon": 4, "settings": {"env": {"num_envs": 2, **settings}}}
    trainer = PuffeRL(config | ({"env": name} if name else {}), vecenv,
                      models.MinGRUPolicy(vecenv, hidden_size=8))
    trainer.evaluate()
    trainer.storage["rewards"][2, 1] = math.nan
    with pytest.raises(FloatingPointError, match=rf"step 2 .*agent 1 .*{advice.format(name)}"):
        trainer.train()
    trainer.release()


# -- short forms, memory


@pytest.mark.parametrize("network", ["mingru", "plain", "lstm"])
def test_a_second_trainer_takes_over_a_policy_and_memory_does_not_grow(network):
    trainer, arenas = make_trainer(policy=NETWORKS[network]), []
    policy = trainer.policy
    for stage in range(1, 4):
        trainer.release()
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        trainer = make_trainer(policy=lambda env: policy, env_kwargs={"max_steps": 20 * stage},
                               learning_rate=0.01 / stage)
        assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
        after = run_epochs(trainer, 2)
        assert not all(torch.equal(before[name], after[name]) for name in before)
        flat = trainer.arena.flat("weights").untyped_storage().data_ptr()
        assert next(iter(policy.state_dict().values())).untyped_storage().data_ptr() == flat
        gc.collect()
        assert not [arena for arena in arenas if arena()], "an old trainer is still held"
        arenas.append(weakref.ref(trainer.arena))
    trainer.release()


def test_running_out_of_memory_names_the_setting():
    vecenv = vector.make("cartpole", 64)
    policy = models.MinGRUPolicy(vecenv, hidden_size=16)
    with pytest.raises((MemoryError, RuntimeError)) as error:
        PuffeRL(env=vecenv, policy=policy, horizon=2**38, minibatch_size=2**38, data_dir=None)
    assert re.search(r"vec\.total_agents.*train\.horizon", error_text(error.value))
