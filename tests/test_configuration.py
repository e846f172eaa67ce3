"""Settings, the command line, and errors in an environment's own code."""

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import torch.distributed.run
from conftest import start, wait_for

import configuration
import data_parallel
import pufferl
import vector
import workers
from configuration import load_config
from errors import ConfigError
from tools import watch
from tools.sweep.command import Sweep

ROOT = Path(__file__).resolve().parent.parent
CATCH, POINT = f"{ROOT}/tests/user_envs.py:Catch", f"{ROOT}/tests/user_envs.py:PointMass"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with networks, an optimizer and headers of a user."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("""import torch
from models import FeedForward as Plain
class Fixed(Plain):
    def __init__(self, env):
        super().__init__(env, 16)
class Optimizer(torch.optim.RMSprop):
    pass
""")
    (tmp_path / "mine.h").write_text((ROOT / "ocean/squared/squared.h").read_text())
    return tmp_path


SETTINGS = [
    ("breakout", "--vec.total-agents 256 --train.lr 0.5 --env.frameskip 2",
     {"vec.total_agents": 256, "train.learning_rate": 0.5, "env.frameskip": 2}),
    ("squared", "--train.total-timesteps 1e6 --train.reward-clip=none --wandb --train.num-steps 16 "
     "--rnn.name none --train.vf-clip-coef inf",
     {"train.total_timesteps": 1_000_000, "train.reward_clip": None, "wandb": True,
      "train.horizon": 16, "rnn.name": "none", "train.vf_clip_coef": math.inf}),
    ("squared", "--train.norm-obs --train.horizon auto --train.minibatch-size 1e3 --train.gamma 1",
     {"train.norm_obs": True, "train.horizon": "auto", "train.minibatch_size": 1000,
      "train.gamma": 1.0}),
    ("squared", "--train.norm-obs auto --train.target-kl none --data-dir None",
     {"train.norm_obs": "auto", "train.target_kl": None, "data_dir": None}),
    # names of PufferLib
    ("squared", "--track --tag first --eval-model-path your_model.pt --vec Serial --slowly "
     "--fps 15 --wandb-project mine --train.adam-beta1 0.9",
     {"wandb": True, "tag": "first", "load_model_path": "your_model.pt", "project": "mine",
      "vec.backend": "serial", "train.engine": "autograd", "eval.fps": 15.0, "train.momentum": 0.9}),
    # two configurations of one environment
    ("drone", "--baseline", {"env_name": "drone", "env.race": False}),
    ("drone_race", "", {"env_name": "drone", "env.race": True}),
    # steps without a setting, and as many copies as they are worth
    ("default", "", {"train.total_timesteps": 10_000_000}),
    ("mine.h", "", {"train.total_timesteps": 20_000_000, "env.num_envs": 1024}),
    ("mine.h", "--train.total-timesteps 300_000", {"env.num_envs": 32}),
    (CATCH, "", {"train.total_timesteps": 1_000_000}),
    (CATCH, "--train.total-timesteps 300000", {"vec.num_envs": 32}),
    (POINT, "--train.total-timesteps 300000", {"vec.num_envs": 8}),
    # what a setting would change nothing for is refused; these change something
    ("squared", "--policy.name nets.py:Fixed --policy.hidden-size 16 --rnn.name lstm", {}),
    ("squared", "--policy.name nets.py:Fixed --rnn.name lstm --rnn.num-layers 2", {}),
    ("squared", "--train.optimizer adam --train.eps 0.1 --rnn.num-layers 3", {}),
]


@pytest.mark.parametrize(("env", "options", "expected"), SETTINGS,
                         ids=[f"{Path(row[0]).name} {row[1][:40]}" for row in SETTINGS])
def test_a_command_line_gives_settings(files, env, options, expected):
    args = load_config(env, options.split())
    for name, value in expected.items():
        found = functools.reduce(dict.__getitem__, name.split("."), args)
        assert (found, type(found)) == (value, type(value)), name


@pytest.mark.parametrize(("env", "options"), [
    ("squared", "--train.batch-size 4096"),
    (CATCH, "--train.batch-size 4096 --train.horizon 32")])
def test_batch_size_becomes_the_horizon(env, options):
    args = load_config(env, [*options.split(), "--vec.total-agents=128", "--data-dir=none",
                             "--train.minibatch-size=auto"])
    trainer = pufferl.make_trainer(env, args)
    assert trainer.horizon == 32 and trainer.config["batch_size"] is None
    trainer.release()


REFUSED = [  # others: test_messages.py
    ("--learning-rate 1", "--train.learning-rate"), ("--n-steps 1", "--train.horizon"),
    ("--policy.gamma 1", "--train.gamma"), ("--train.wandb 1", "--wandb"),
    ("--frameskip 1", "--env.frameskip"), ("--env.size 3", "env.size"),
    ("--train.gae-lambda auto", "train.gae-lambda"),
    ("--policy.name nets.py:Fixed --rnn.num-layers 2", "rnn.num-layers"),
    ("--train.optimizer nets.py:Optimizer --train.momentum 0.5", "momentum.*Optimizer"),
]


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_a_command_line_cannot_mean_is_refused(files, options, name):
    with pytest.raises(ConfigError, match=name):
        load_config("breakout", options.split())


@pytest.mark.parametrize(("env", "content", "name"), [  # of an environment, and of a name that is none
    ("breakout", b"[train]\nhorizon = many", "horizon"), ("breakout", b"[env]\nframe_skip = 3", "frameskip"),
    ("breakout", b"[train]\ngamma = 0.9\ngamma = 0.8", "gamma"), ("zz", b"\x99", "read"), ("zz", None, "read")])
def test_an_ini_that_is_wrong_is_named(tmp_path, monkeypatch, env, content, name):
    path = tmp_path / "config" / f"{env}.ini"
    path.parent.mkdir()
    path.mkdir() if content is None else path.write_bytes(content)
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match=f"(?s){name}") as error:
        load_config(env)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", configuration.BOUND_OF)
def test_a_number_beyond_its_bounds_is_refused(name):
    low, high, _ = configuration.BOUND_OF[name]
    section, key = name.split(".")

    def convert(value):
        entry = configuration.Entry(section, key, value, name)
        return configuration.convert(entry, {"env": configuration.Env, "sweep": Sweep, **configuration.SECTIONS})

    for value in (math.ceil(low) - 1 if math.isfinite(low) else math.nan, high + max(1, high / 1e6), math.nan):
        if value < low or value > high or value != value:
            with pytest.raises(ConfigError, match=name):
                convert(value)
    for value in {low, high} - {math.inf, -math.inf, configuration.ABOVE_0}:
        assert convert(value)[2] == value


@pytest.mark.parametrize(("section", "key", "near"), [
    ("policy", "hiden_size", "hidden_size"), ("rnn", "num_layer", "num_layers"),
    ("vec", "num_env", "num_envs"), ("eval", "episode", "episodes"),
    (None, "wandb_project", "project"), (None, "gamma", "train.gamma")])
def test_a_misspelt_key_in_a_scripts_settings_is_refused(section, key, near):
    args = load_config("squared", ["--data-dir", "none", "--env.num-envs", "4"])
    (args if section is None else args[section])[key] = 3
    with pytest.raises(ConfigError, match=f"{key}.*{near}"):
        pufferl.train("squared", args)
    if section == "vec":
        with pytest.raises(ConfigError, match=near):
            pufferl.load_env("squared", args)
    if section in ("policy", "rnn"):
        with vector.make("squared", 4) as vecenv, pytest.raises(ConfigError, match=near):
            pufferl.load_policy(args, vecenv)


# -- commands


@pytest.mark.parametrize(("words", "name"), [  # the settings that the error names
    ("train squared --train.gpus 2147483648", "train.gpus"),
    ("train squared --vec.num-threads 100000", "vec.num_threads"),
    ("train squared --vec.total-agents 2e12", "vec.total_agents"),
    ("train gym/CartPole-v1 --vec.num-workers 1e5 --vec.num-envs 1e5 --vec.backend multiprocessing",
     "vec.num_workers"),
    ("train gym/CartPole-v1 --vec.num-envs 2e9 --vec.backend serial", "vec.num_envs"),
    ("eval squared --eval.episodes 1e30", "eval.episodes")])
def test_numbers_that_the_machine_cannot_hold_start_nothing(words, name, monkeypatch):
    for owner, attribute in ((torch.distributed.run, "run"), (workers, "Process"),
                             (pufferl, "PuffeRL"), (watch, "Play")):
        monkeypatch.setattr(owner, attribute, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=f"(?s)^pufferl.py.*{name}".replace("_", "[-_]")):
        pufferl.main(words.split())


def test_with_gpus_there_are_as_many_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"train\.gpus = 4.* 3\b"):
        data_parallel.launch(4, "cuda", [])
    monkeypatch.setattr(torch.distributed.run, "run", lambda options: options)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(data_parallel.processes, "end_children", lambda: None)
    for gpus, device in ((3, "cuda"), (4, "auto")):  # auto is the CPU
        data_parallel.launch(gpus, device, ["script.py"])


@pytest.mark.parametrize("verb", ["train", "eval", "sweep", "export", "autotune", "profile"])
def test_every_verb_has_help(verb, capsys):
    assert f"\n  {verb} " in pufferl.USAGE
    with contextlib.suppress(SystemExit):
        pufferl.main([verb, "squared", "--help"])
    shown = capsys.readouterr().out
    assert len(shown) > 200
    assert verb != "train" or ("--train.learning-rate" in shown and "--env.distance" in shown)


@pytest.mark.parametrize(("old", "new"), [
    ("--env puffer_snake --mode train --track", "train puffer_snake --track"),
    ("--mode=sweep-carbs --env=puffer_pong", "sweep puffer_pong"),
    ("--help --env snake", "train snake --help"), ("train snake --env.vision 3", "train snake --env.vision 3")])
def test_pufferlibs_form_of_a_command_line_in_which_the_verb_is_an_option(old, new):
    assert pufferl.put_verb_first(old.split()) == new.split()


def test_what_to_type_can_be_typed(monkeypatch, tmp_path):
    python = ROOT / ".venv/bin/python"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    typed = configuration.command("train", "my env")
    assert typed == ".venv/bin/python pufferl.py train 'my env'"
    monkeypatch.setattr(shutil, "which", lambda name: str(python))
    assert configuration.command("runs") == "python pufferl.py runs"
    monkeypatch.chdir(tmp_path)
    assert configuration.command("runs") == f"python {ROOT / 'pufferl.py'} runs"


def test_a_run_is_trained_evaluated_and_resumed_with_its_own_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = "--env.num-envs 64 --train.minibatch-size 1024 --train.total-timesteps 40000"
    own = "--policy.hidden-size 24 --rnn.num-layers 2 --env.distance 2"
    command = [sys.executable, str(ROOT / "pufferl.py"), "train", "squared", *small.split(), *own.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "checkpoint" in done.stdout and "tensorboard" in done.stdout
    [folder] = (tmp_path / "experiments").glob("squared_*")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 40960 and "losses/entropy" in last
    assert list((folder / "tensorboard").glob("events.*"))
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["env"]["num_envs"], saved["policy"]["hidden_size"]) == (64, 24)
    model = max(folder.glob("model_*.pt"))
    assert model.stat().st_size < 100_000, "weights alone, not the arena behind them"

    pufferl.main(["eval", "squared", "--load-model-path", "latest", "--eval.episodes", "20"])
    shown = capsys.readouterr().out
    assert "score" in shown and "20" in shown
    for words in (["train", "squared", "--resume"], ["eval", "squared", "--load-model-path"]):
        with pytest.raises(SystemExit, match=r"\(24, \d+\).*\(32, \d+\)"):
            pufferl.main([*words, "latest", "--policy.hidden-size", "32"])
    moved = folder.rename(tmp_path / "mine")
    state = str(moved / "trainer_state.pt")
    pufferl.main(["train", "squared", "--resume", state, "--train.total-timesteps", "60000",
                  "--tag", "again"])
    assert json.loads((moved / "config.json").read_text())["tag"] == "again"
    shown = capsys.readouterr().out
    assert "40,960" in shown and str(moved) in shown and not [*(tmp_path / "experiments").iterdir()]
    saved["train"]["total_timesteps"] = 8192
    again = pufferl.train("squared", saved)
    assert again.global_step == 8192 and again.policy.hidden_size == 24


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]],
                         ids=["interrupt", "closed terminal"])
def test_a_signal_stops_a_run_with_a_checkpoint(tmp_path, signals):
    """SIGHUP comes twice, as the system and the shell each send one."""
    options = "--env.num-envs 64 --logger none --train.minibatch-size 1024 --train.total-timesteps 1000000000"
    process = start([sys.executable, str(ROOT / "pufferl.py"), "train", "squared", *options.split()],
                    cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    # tests may themselves run under nohup
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    wait_for(lambda: process.poll() is not None
             or list(tmp_path.glob("experiments/*/metrics.jsonl")))
    for number in signals:
        os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopping" in err and "checkpoint   " in out
    [model] = tmp_path.glob("experiments/*/model_*.pt")
    assert torch.load(model, weights_only=True)


# -- errors in an environment's own code


ERRORS = {"": (RuntimeError, "the sky has fallen"), "exits": (SystemExit, 3),
          "full": (MemoryError,), "divides": (FloatingPointError, "divide by zero")}


class Wrong(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)

    def __init__(self, where="step"):
        self.where = where
        self.fail("init")

    def fail(self, method):
        where, _, error = self.where.partition(" ")
        if where == method:
            kind, *arguments = ERRORS[error]
            raise kind(*arguments)  # a new one: a second raise would extend the first's traceback

    def reset(self, seed=None, options=None):
        self.fail("reset")
        return self.observation_space.sample(), {}

    def step(self, action):
        self.fail("step")
        shape = 4 if self.where == "shape" else 3
        return np.zeros(shape, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(("backend", "where", "words"), [
    ("serial", "init", "the sky has fallen"), ("serial", "reset", "the sky has fallen"),
    ("serial", "reset exits", "SystemExit: 3"), ("serial", "step exits", "SystemExit: 3"),
    ("serial", "step divides", "FloatingPointError: divide by zero"),
    ("serial", "reset full", "MemoryError"), ("serial", "step full", "MemoryError"),
    ("serial", "shape", r"step\(\)"), ("multiprocessing", "reset", "the sky has fallen"),
    ("multiprocessing", "step", "the sky has fallen"), ("multiprocessing", "shape", r"step\(\)")])
def test_an_error_in_an_environment_is_shown_by_its_own_lines(backend, where, words):
    with pytest.raises(SystemExit, match=words) as error:
        pufferl.main(["train", f"{__file__}:Wrong", "--vec.backend", backend, "--vec.num-envs", "2",
                      "--logger", "none", "--data-dir", "none", "--env.where", where])
    text = str(error.value)
    assert text.startswith("pufferl.py: ")
    assert ("(environment 0)" in text) == ("step" in where or where == "shape")
    assert (Path(__file__).name in text) == (where != "shape")
    assert ("vec." in text) == ("full" in where)  # what to lower
    assert where != "shape" or len(text.splitlines()) == 2
    inner = [name for name in ("workers", "emulation", "vector", "engines") if f"/{name}.py" in text]
    assert not inner


def test_settings_are_read_without_torch():
    code = ("import sys, configuration; configuration.load_config('breakout', ['--train.gamma', '0.9']); "
            "print([name for name in ('torch', 'numba', 'tyro') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_zero_is_not_above_zero_where_denormals_are_zero():
    """As on the command line, which sets that for speed."""
    torch.set_flush_denormal(True)
    try:
        for option in ("--train.horizon", "--train.max-grad-norm", "--train.total-timesteps"):
            with pytest.raises(ConfigError, match="above 0"):
                load_config("squared", [option, "0"])
    finally:
        torch.set_flush_denormal(False)


def test_a_header_beside_the_project(tmp_path):
    """config/NAME.ini is not for another header of that name; an .ini may be beside it."""
    header = tmp_path / "cartpole.h"
    header.write_text((ROOT / "ocean" / "squared" / "squared.h").read_text())
    assert load_config(str(header))["train"]["learning_rate"] == "auto"
    header.with_suffix(".ini").write_text("[train]\nlearning_rate = 0.25")
    args = load_config(str(header))
    assert args["train"]["learning_rate"] == 0.25 and args["env_file"] == str(header)
    with pytest.raises(ConfigError, match=r"vec\.timeout"):
        load_config("squared", ["--vec.timeout", "3"])


@pytest.mark.parametrize(("section", "key", "value"), [
    ("rnn", "name", "transformer"), ("policy", "hidden_size", "wide"), ("vec", "total_agents", "many")])
def test_a_wrong_value_in_a_scripts_settings(section, key, value):
    args = load_config("squared")
    args[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        configuration.check_names(args)
    args[section][key] = {"name": "mingru"}.get(key, 32.0)
    configuration.check_names(args)
    assert args[section][key] in ("mingru", 32) and not isinstance(args[section][key], float)
