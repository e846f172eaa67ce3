"""Reliability of runs: crashes, signals, full disks, resuming, NaNs, memory, and starting from
another run's policy."""

import collections
import errno
import functools
import gc
import json
import math
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

import conftest
import gymnasium
import numpy as np
import pytest
import torch
from conftest import read_until
from test_pufferl import Plain, make_trainer, run_epochs

import configuration
import loggers
import models
import pufferl
import runs
import vector
from errors import error_text
from pufferl import ConfigError, PuffeRL, load_config, make
from tools import speed
from tools.sweep import command as sweep

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--env.num-envs", "64", "--train.minibatch-size", "1024", "--logger", "none"]


def start(*arguments, cwd, stderr=subprocess.STDOUT, **options):
    return conftest.start([sys.executable, "-u", str(ROOT / "pufferl.py"), *arguments], cwd=cwd,
                          text=True, stdout=subprocess.PIPE, stderr=stderr, **options)


def train(name, *options, steps=2048):
    options = ["--train.total-timesteps", str(steps), "--logger", "none", "--vec.num-threads", "1",
               *options]
    return pufferl.train(name, load_config(name, options))


def steps_of(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
    second.run_folder = first.run_folder
    with pytest.raises(ConfigError, match=str(first.run_folder)):
        second.evaluate()
    assert files() == before
    first.close()
    second.evaluate()
    second.release()


@pytest.mark.slow
def test_nohup_trains_on(tmp_path):
    process = start("train", "squared", *SMALL, "--train.total-timesteps", str(64 * 64 * 20),
                    cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    output = read_until(process, "run folder")
    process.send_signal(signal.SIGHUP)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "stopping" not in output, output
    [run] = (tmp_path / "experiments").iterdir()
    assert steps_of(run)[-1] == 64 * 64 * 20


def test_a_run_trains_on_when_nobody_reads_its_output(tmp_path):
    """As `| head -1` does."""
    process = start("train", "squared", *SMALL, "--train.total-timesteps", str(64 * 64 * 40),
                    "--train.log-interval", "0", cwd=tmp_path, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(120) == 0 and "Traceback" not in errors and "Broken" not in errors, errors
    [run] = (tmp_path / "experiments").iterdir()
    assert steps_of(run)[-1] == 64 * 64 * 40 and list(run.glob("model_*.pt"))


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
    screen = loggers.Dashboard()
    screen.first = before, 0
    assert "left" in screen.time_left(trainer) and "-" not in screen.time_left(trainer)
    model = configuration.find_model(str(trainer.run_folder), tmp_path, "cartpole")
    assert model.name == "model_cartpole_000003.pt"
    assert runs.is_running(trainer.run_folder)
    trainer.release()
    assert not runs.is_running(trainer.run_folder)


# -- disks


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    trainer = make_trainer(tmp_path / "file")
    with pytest.raises(ConfigError, match="--data-dir"):
        trainer.evaluate()
    trainer.release()
    options = ["--data-dir", str(tmp_path / "file"), "--env.num-envs", "64"]
    with pytest.raises(ConfigError, match="--data-dir"):  # with a logger too
        pufferl.train("squared", load_config("squared", options))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # too small a disk: no file above 16 kB
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
        with pytest.raises(SystemExit, match="--data-dir"):
            pufferl.main(["train", "squared", *SMALL, "--data-dir", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.part"))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_and_the_run_can_be_resumed(tmp_path):
    trainer = make_trainer(tmp_path, checkpoint_interval=1)
    run_epochs(trainer, 2)
    folder = trainer.run_folder
    models_before = sorted(folder.glob("model_*.pt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        trainer.config["checkpoint_interval"] = 100
        run_epochs(trainer, 1)
        with pytest.raises(ConfigError, match=rf"3\b.*{folder}/trainer_state.pt.* 2\b.*--resume "
                                              rf"{folder} "):
            trainer.close()
    assert trainer.vecenv.closed, "all the rest ended"
    assert not list(folder.glob("*.part")) and sorted(folder.glob("model_*.pt")) == models_before
    again = make_trainer(tmp_path, checkpoint_interval=1)
    again.load_checkpoint(folder)
    run_epochs(again, 1)
    assert again.epoch == 3
    again.release()


def test_a_full_disk_stops_no_training_and_keeps_the_checkpoint(tmp_path, capfd):
    """The last checkpoint loads, and later ones are written again. bench/bench_crash.py fills real disks."""
    trainer = make_trainer(tmp_path, checkpoint_interval=1, keep=2)
    run_epochs(trainer, 2)
    path = trainer.run_folder / "trainer_state.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        run_epochs(trainer, 3)
    assert trainer.epoch == 5 and torch.load(path, weights_only=True)["epoch"] == 2
    assert len(list(trainer.run_folder.glob("model_*.pt"))) == 2
    assert not list(trainer.run_folder.glob("*.part")) and "checkpoint" in capfd.readouterr().err
    run_epochs(trainer, 1)
    assert torch.load(path, weights_only=True)["epoch"] == 6
    assert steps_of(trainer.run_folder) == [192 * epoch for epoch in range(1, 7)]
    trainer.close()


@pytest.mark.slow
def test_a_project_and_a_home_that_cannot_be_written_are_enough(tmp_path):
    """Files stand where folders for compiled things would be, which stops root as well."""
    project, rest = tmp_path / "project", tmp_path / "rest"
    ignore = shutil.ignore_patterns(".git", "__pycache__", ".build", "experiments", "tests",
                                    "docs", ".venv")
    shutil.copytree(ROOT, project, ignore=ignore)
    for name in ("__pycache__", "ocean/.build", "ocean/__pycache__"):
        (project / name).touch()
    rest.mkdir()
    done = subprocess.run([sys.executable, str(project / "pufferl.py"), "train", "squared", *SMALL,
                           "--train.total-timesteps", "4096"], cwd=rest, text=True,
                          env={**os.environ, "HOME": "/proc/nowhere", "TMPDIR": str(rest)},
                          capture_output=True)
    assert done.returncode == 0 and "checkpoint   " in done.stdout, done.stderr
    assert done.stderr.count(f"kept in {rest}") == 2  # kernels, environments


# -- checkpoints and resume


def find(path, folder, name="squared"):
    return configuration.find_model(path, folder, name)


def test_the_last_models_are_kept_and_the_best(tmp_path):
    options = {"num_envs": 64, "hidden_size": 8}
    trainer = make_trainer(tmp_path, "squared", checkpoint_interval=1, keep=2, **options)
    logs = iter([{"score": 0.1, "n": 150}, {"score": 0.9, "n": 60}, {"score": 0.9, "n": 60},
                 {"score": 0.4, "n": 500}, {"score": 5.0, "n": 20}])
    trainer.vecenv.log = lambda: next(logs)
    weights = []
    for _ in range(5):
        weights.append(weights_of(trainer))
        run_epochs(trainer, 1)
    assert trainer.statistics.best_score == pytest.approx(0.9), "20 episodes are not enough"
    names = sorted(path.name for path in trainer.run_folder.glob("*.pt"))
    assert names == ["best_squared.pt", "model_squared_000004.pt", "model_squared_000005.pt",
                     "trainer_state.pt"]
    best = torch.load(trainer.run_folder / "best_squared.pt", weights_only=True)
    assert equal(best, weights[2]), "the weights that played"
    for tensor in trainer.statistics.best.values():  # copies, and not views of the arena
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert find("best", tmp_path).name == "best_squared.pt"
    assert find("latest", tmp_path).name == "model_squared_000005.pt"
    again = make_trainer(tmp_path, "squared", **options)
    again.load_checkpoint(trainer.run_folder)
    assert again.statistics.best_score == trainer.statistics.best_score
    assert again.statistics._recent == (pytest.approx(100.0), 20)
    # runs of other names, and one without a best that is newer
    for name, config in {"squared_mine_1": {"env_name": "squared_mine"}, "squared_2": {
            "env_name": "squared"}, "drone_0": {"env_name": "drone", "config_name": "drone"},
            "drone_1": {"env_name": "drone", "config_name": "drone_race"}}.items():
        (tmp_path / name).mkdir()
        config |= {"turn": 2, "policy": {"hidden_size": 77}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model_x.pt").touch()
    os.utime(tmp_path / "squared_mine_1" / "model_x.pt", (9e9, 9e9))
    for name, folder in (("ocean/squared/squared.h", "squared_2"), ("drone", "drone_0"),
                         ("drone_race", "drone_1"), ("puffer_drone", "drone_0")):
        assert find("latest", tmp_path, name).parent.name == folder
    for path in ("best", "latest"):
        args = load_config("squared", ["--data-dir", str(tmp_path), "--load-model-path", path])
        assert (args["policy"]["hidden_size"] == 77) == (path == "latest")


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


def test_metadata_comes_back(tmp_path):
    trainer, path = make_trainer(tmp_path), tmp_path / "mine.pt"
    pair = collections.namedtuple("pair", "x y")(np.float32(0.5), {1: np.arange(2)})
    trainer.save_checkpoint(path, metadata={"stage": 2, "note": "α", "goal": torch.ones(2),
                                            "pair": pair, "none": None})
    metadata = trainer.load_checkpoint(path)
    assert (metadata["stage"], metadata["note"], metadata["none"]) == (2, "α", None)
    assert torch.equal(metadata["goal"], torch.ones(2))
    assert metadata["pair"][0] == 0.5 and metadata["pair"][1][1].tolist() == [0, 1]
    path.unlink()
    for value in (Path("here"), np.array(["a"]), object(), {"deep": [Path("here")]}):
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
    again.statistics.add_episodes({"n": 100.0, "score": 1.0}, again.policy)  # the best so far
    assert again.statistics.best["_extra_state"] == {"seen": 3}


def test_names_of_one_environment():
    for one, other, same in (("a/user_envs.py:Env", "/b/user_envs.py:Env", True),
                             ("a/user_envs.py:Env", "a/user_envs.py:Other", False),
                             ("puffer_bandit", "bandit", True), ("a/mine.h", "mine", True),
                             ("dm_control/walker/walk", "dm_control/humanoid/walk", False)):
        assert (configuration.identify(one) == configuration.identify(other)) == same


class Unhashable:
    """A loss with an __eq__, as of a dataclass."""

    def __call__(self, minibatch):
        return minibatch

    def __eq__(self, other):
        return False


def test_an_edited_file_is_named_at_resume(tmp_path, capsys):
    """Of the network, the environment and a setting; not what else a file imports."""
    net = tmp_path / "nets_of_one.py"
    net.write_text("import models\nclass Mine(models.FeedForward):\n    pass\n")
    name = f"{Path(__file__).parent}/user_envs.py:Catch"
    options = ["--policy.name", f"{net}:Mine", "--data-dir", str(tmp_path)]
    folder = train(name, *options).run_folder
    saved = json.loads((folder / "config.json").read_text())["sources"]
    assert {Path(file).name for file in saved} == {"nets_of_one.py", "user_envs.py", "models.py"}
    with vector.make("squared", 2) as env:
        policy = models.FeedForward(env, 8)
        for setting, file in (("muon", "models.py"), (f"{net}:loss", "nets_of_one.py"),
                              (read_until, "conftest.py"), (Unhashable(), "test_runs.py"),
                              (functools.partial(read_until, 1), "conftest.py")):
            files = {Path(path).name for path in runs.sources(policy, env, None, setting)}
            assert files == {"squared.h", "models.py", file}
    for text in ("", "# now\n"):
        net.write_text(net.read_text() + text)
        capsys.readouterr()
        train(name, *options, "--resume", str(folder))
        assert (": nets_of_one.py" in capsys.readouterr().out) == bool(text)


@pytest.mark.parametrize("change", [
    {"gamma": 0.5, "learning_rate": 0.3}, {"env_kwargs": {"max_steps": 7}}, {"num_envs": 12}],
    ids=["training", "environment", "agents"])
def test_what_changed_at_resume_is_printed_and_takes_effect(tmp_path, capsys, change):
    """Of other environments, new episodes begin."""
    settings = {"env_kwargs": {"max_steps": 30}, "norm_reward": True}
    first = make_trainer(tmp_path, **settings)
    run_epochs(first, 2)
    path = first.save_checkpoint(tmp_path / "a.pt")
    second = make_trainer(tmp_path, **settings | change)
    capsys.readouterr()
    second.load_checkpoint(path)
    printed = capsys.readouterr().out
    assert (second.epoch, second.global_step) == (2, first.global_step)
    momenta = [trainer.arena.flat("momentum") for trainer in (first, second)]
    assert torch.equal(*momenta) and momenta[0].any()
    if "gamma" in change:
        assert "train.gamma: 0.99 is now 0.5" in printed
        assert "train.learning_rate: 0.01 is now 0.3" in printed
        assert printed.count(" is now ") == 2 and "episodes" not in printed
        assert second.config["gamma"] == 0.5
        assert torch.equal(second.storage["observations"][-1], first.storage["observations"][-1])
    else:
        assert "episodes" in printed
        assert second.storage["resets"][-1].all() and not second.buffers.running_returns.any()
        for name in ("moments", "targets"):
            ours, theirs = (getattr(one.reward_scale, name) for one in (second, first))
            assert torch.equal(ours, theirs) and ours.any()
    run_epochs(second, 1)
    if "env_kwargs" in change:
        assert second.environment["episode_length"] <= 7


def test_a_run_of_a_script_can_be_resumed_from_the_command_line(tmp_path):
    policy = models.MinGRUPolicy(vecenv := make("squared", num_envs=64), hidden_size=16)
    trainer = PuffeRL(env=vecenv, policy=policy, total_timesteps=8192, minibatch_size=1024,
                      data_dir=str(tmp_path))
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        trainer.train()
    assert Path(trainer.close()).exists()
    last = json.loads((trainer.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 8192 and math.isfinite(last["losses/entropy"])
    again = train("squared", "--data-dir", str(tmp_path), "--resume", "latest", "--env.num-envs",
                  "64", "--policy.hidden-size", "16", steps=12288)
    assert again.args["train"]["minibatch_size"] == 1024
    assert again.run_folder == trainer.run_folder and again.global_step == 12288


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for none in ("None", "none", "NONE"):
        options = ["--data-dir", none, "--env.num-envs", "64", "--train.total-timesteps", "4096"]
        args = load_config("squared", options)
        with pytest.raises(ConfigError, match=r"--profile\.output"):
            speed.profile("squared", args)
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


def test_smallest_and_largest_return_and_seconds_an_epoch(tmp_path):
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
    before = trainer._last_log
    metrics = trainer.mean_and_log()
    assert metrics["environment/episode_return_min"] == min(returns) < max(returns)
    assert metrics["environment/episode_return_max"] == max(returns)
    assert metrics["environment/n"] == len(returns)
    assert metrics["environment/episode_return"] == pytest.approx(np.mean(returns))
    seconds = trainer._last_log[0] - before[0]
    assert metrics["performance/seconds_epoch"] == pytest.approx(seconds / 5, rel=0.2)
    trainer.release()


# -- NaNs


def plant(trainer, name, epoch, t=3):
    """Have environments write a NaN into `name` at step t of an epoch, or break the weights."""
    advance = trainer.vecenv.advance

    def broken(buffer):
        now = trainer.vecenv._t[buffer]
        advance(buffer)
        if trainer.epoch == epoch and buffer == 0 and now == t:
            row = now + 1 if name == "observations" else now
            getattr(trainer.vecenv.storage, name)[row, 2] = math.nan

    if name == "weights":
        trainer.policy.encoder.weight.data[0, 0] = math.nan
    else:
        trainer.vecenv.advance = broken


@pytest.mark.parametrize(("name", "continuous"), [
    ("observations", False), ("rewards", True), ("weights", True)])
def test_a_planted_nan_is_named_and_the_checkpoint_left(tmp_path, name, continuous):
    trainer = make_trainer(tmp_path, env_kwargs={"continuous": continuous}, checkpoint_interval=1)
    run_epochs(trainer, 2)
    saved = (trainer.run_folder / "trainer_state.pt").read_bytes()
    plant(trainer, name, epoch=2)
    trainer.evaluate()
    with pytest.raises(FloatingPointError, match=rf"epoch 2: {name}\b") as error:
        trainer.train()
    if name != "weights":
        assert f"step {4 if name == 'observations' else 3} " in str(error.value)
        assert "python -m ocean cartpole" in str(error.value)
        assert all(tensor.isfinite().all() for tensor in weights_of(trainer).values())
    trainer.release()
    assert (trainer.run_folder / "trainer_state.pt").read_bytes() == saved
    assert str(trainer.run_folder) in str(error.value)


class Poisoned(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, limit=2):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


@pytest.mark.parametrize(("name", "advice"), [
    ("squared", "python -m ocean squared --check"), ("mine.h", "python -m ocean {} --check"),
    (f"{__file__}:Poisoned", "python -m ocean {} --check --set limit=3"), (None, "reset")])
def test_a_nan_says_how_to_find_it_in_any_kind_of_environment(tmp_path, name, advice):
    settings = {"limit": 3} if name and "Poisoned" in name else {}
    if name == "mine.h":
        name = str(tmp_path / name)
        Path(name).write_text((ROOT / "ocean/squared/squared.h").read_text())
    backend = "native" if name and "Poisoned" not in name else "serial"
    vecenv = vector.make(name or Poisoned, 2, backend, env_kwargs=settings)
    config = {"data_dir": None, "horizon": 4, "settings": {"env": {"num_envs": 2, **settings}}}
    trainer = PuffeRL(config | ({"env": name} if name else {}), vecenv,
                      models.MinGRUPolicy(vecenv, hidden_size=8))
    trainer.evaluate()
    trainer.storage["rewards"][2, 1] = math.nan
    with pytest.raises(FloatingPointError, match=rf"step 2 .*agent 1 .*{advice.format(name)}"):
        trainer.train()
    trainer.release()


# -- short forms, memory


POLICIES = {
    "fused": lambda env: models.MinGRUPolicy(env, hidden_size=32), "custom": Plain,
    "lstm": lambda env: models.LSTMWrapper(env, models.FeedForward(env, hidden_size=16),
                                           hidden_size=16)}


@pytest.mark.parametrize("make_policy", POLICIES.values(), ids=POLICIES)
def test_a_second_trainer_takes_over_a_policy_and_memory_does_not_grow(make_policy):
    policy, arenas = make_policy(make("cartpole", num_envs=16, num_threads=1)), []
    for stage in range(3):
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        env = make("cartpole", num_envs=16, num_threads=1,
                   env_kwargs={"max_steps": 20 * (stage + 1)})
        trainer = PuffeRL(env=env, policy=policy, learning_rate=0.01 / (stage + 1), batch_size=128,
                          data_dir=None)
        assert equal(before, weights_of(trainer))
        run_epochs(trainer, 2)
        assert not equal(before, policy.state_dict())
        arenas.append(weakref.ref(trainer.arena))
        flat = trainer.arena.flat("weights").untyped_storage().data_ptr()
        assert next(iter(policy.state_dict().values())).untyped_storage().data_ptr() == flat
        trainer.close()
        del trainer, env
        gc.collect()
        assert [arena() for arena in arenas] == [None] * (stage + 1), "an old trainer is still held"


def test_running_out_of_memory_names_the_setting():
    vecenv = vector.make("cartpole", 64)
    policy = models.MinGRUPolicy(vecenv, hidden_size=16)
    with pytest.raises((MemoryError, RuntimeError)) as error:
        PuffeRL(env=vecenv, policy=policy, horizon=2**38, minibatch_size=2**38, data_dir=None)
    assert re.search(r"vec\.total_agents.*train\.horizon", error_text(error.value))
