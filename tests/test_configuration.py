"""Settings and the command line: what is read, what is refused before anything starts, and what errors say."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import start, wait_for
from test_pufferl import make_trainer

import auto
import configuration
import data_parallel
import models
import pufferl
import vector
import workers
from tools import watch

ROOT = Path(__file__).resolve().parent.parent


def test_the_policy_that_ships_is_no_baseline_for_another_task():
    with pytest.raises(pufferl.ConfigError,
                       match=r"trained with env\.race = False, drone_race\.ini has True"):
        pufferl.load_config("drone_race", ["--baseline"])
    assert pufferl.load_config("drone", ["--baseline"])["env"]["race"] is False


def test_command_line_goes_over_the_ini():
    args = pufferl.load_config(
        "breakout",
        ["--vec.total-agents", "256", "--train.learning-rate", "0.5", "--env.frameskip", "2"]
    )
    assert (args["vec"]["total_agents"], args["train"]["learning_rate"], args["env"]["frameskip"]) == (256, 0.5, 2)


def test_options_are_read_as_an_ini_is():
    args = pufferl.load_config("squared", ["--train.total-timesteps", "1e6",
                                           "--train.reward-clip=none", "--wandb",
                                           "--train.num-steps", "16", "--rnn.name", "none"])
    train = args["train"]
    assert (train["total_timesteps"], train["reward_clip"], train["horizon"]) == (1_000_000, None, 16)
    assert args["wandb"] is True and args["rnn"]["name"] == "none"
    for option, message in (("--train.gamma=high", r"--train\.gamma = 'high': must be a number"),
                            ("--train.gama=1", "Did you mean gamma"),
                            ("--trian.gamma=1", "no section 'trian'"),
                            ("--train.batch-size=1", "set vec.total_agents")):
        with pytest.raises(pufferl.ConfigError, match=message):
            pufferl.load_config("squared", [option])


BAD = {
    "reward_clip": {"reward_clip": -1.0},
    "multiple of": {"minibatch_size": 60},
    "more than one epoch": {"minibatch_size": 6400},
    "horizon": {"horizon": 0},
    "learning_rate": {"learning_rate": 0},
    "gamma": {"gamma": 1.5},
    "Did you mean learning_rate": {"learning_rat": 0.1},
    "must be a whole number": {"horizon": 2.5}, "must be a number": {"gamma": "abc"},
    "must be one of muon, adam": {"optimizer": "sgd"},
    "vec.total_agents": {"batch_size": 3},
    "horizon or batch_size": {"num_iterations": 3, "horizon": "auto"},
    "initial_state": {"use_rnn": False},
    "max_minibatch_size": {"max_minibatch_size": 9},
    "has a memory": {"draw": "steps"},
}


@pytest.mark.parametrize(("message", "settings"), BAD.items(), ids=BAD.keys())
def test_bad_settings_are_named_before_anything_starts(tmp_path, message, settings):
    with pytest.raises(pufferl.ConfigError, match=message):
        make_trainer(tmp_path, **settings)


@pytest.mark.parametrize("settings",
                         [{"batch_size": 12, "num_steps": 5}, {"batch_size": 9}, {"batch_size": 0}])
def test_a_batch_that_does_not_fit_is_refused(settings):
    vecenv = vector.make("cartpole", 2)
    with pytest.raises(pufferl.ConfigError,
                       match=rf"batch_size = {settings['batch_size']}.* 2 agents"):
        pufferl.PuffeRL(env=vecenv, policy=models.MinGRUPolicy(vecenv), data_dir=None, **settings)
    vecenv.close()


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [("policy", "hiden_size", "hidden_size"), ("rnn", "num_layer", "num_layers"),
     ("vec", "num_env", "num_envs"),
     ("eval", "episode", "episodes"), ("profile", "epoch", "epochs"), (None, "trian", "train"),
     (None, "wandb_project", "it is project now"), (None, "gamma", "train.gamma")],
)
def test_a_misspelt_key_in_a_scripts_configuration_is_refused(tmp_path, section, key, near):
    args = pufferl.load_config("squared", ["--data-dir", str(tmp_path), "--env.num-envs", "4"])
    (args if section is None else args[section])[key] = 3
    message = rf"{key}.*{near}"
    with pytest.raises(pufferl.ConfigError, match=message):
        pufferl.train("squared", args)
    assert not list(tmp_path.iterdir())
    if section == "vec":
        with pytest.raises(pufferl.ConfigError, match=message):
            pufferl.load_env("squared", args)
    if section in ("policy", "rnn"):
        with vector.make("squared", 4) as vecenv, pytest.raises(pufferl.ConfigError, match=message):
            pufferl.load_policy(args, vecenv)


def test_a_runs_own_settings_train_again(tmp_path):
    options = ["--data-dir", str(tmp_path), "--env.num-envs", "64", "--rnn.num-layers", "2",
               "--train.total-timesteps", "4096"]
    trainer = pufferl.train("squared", pufferl.load_config("squared", options))
    saved = json.loads((trainer.run_folder / "config.json").read_text())
    assert pufferl.train("squared", saved).global_step == trainer.global_step


@pytest.mark.parametrize(
    ("option", "hint"),
    [("--learning-rate", r"Did you mean --train\.learning-rate\?"),
     ("--lr", r"Did you mean --train\.learning-rate\?"),
     ("--n-steps", r"--train\.horizon\?"), ("--num-envs", r"--env\.num-envs or --vec\.num-envs\?"),
     ("--batch-size", r"--train\.batch-size or --vec\.batch-size\?"),
     ("--learnin-rate", r"--train\.learning-rate\?"),
     ("--policy.gamma", r"--train\.gamma\?"), ("--train.wandb", r"mean --wandb\?"),
     ("--frameskip", r"--env\.frameskip\?"), ("--trian.gamma", "mean train"),
     ("--train.learning-rat", "mean learning_rate")],
)
def test_an_option_without_its_section_is_found(option, hint):
    with pytest.raises(pufferl.ConfigError, match=hint):
        pufferl.load_config("breakout", [option, "1"])
    assert pufferl.load_config("breakout", ["--train.lr", "0.5"])["train"]["learning_rate"] == 0.5


def test_old_names_are_translated(tmp_path):
    trainer = make_trainer(tmp_path, num_steps=4, minibatch_size=32, update_epochs=2,
                           adam_beta1=0.5)
    assert (trainer.horizon, trainer.config["replay_ratio"], trainer.config["momentum"]) == (4, 2.0, 0.5)
    trainer.release()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlearning_rat = 1", "Did you mean learning_rate"),
        ("[trian]\ngamma = 1", r"\[trian\]"),
        ("[train]\nhorizon = many", "must be a whole number"),
        ("[train]\nanneal_lr = 3", "must be true or false"),
        ("[env]\nframe_skip = 3", "frameskip"),
        ("gamma = 1", "no section headers"),
    ],
)
def test_ini_errors_name_file_and_key(tmp_path, text, message):
    schema, values = configuration.resolve("breakout")
    path = tmp_path / "bad.ini"
    path.write_text(text)
    with pytest.raises(pufferl.ConfigError, match=message) as error:
        configuration.read_ini(path, schema, values)
    assert "bad.ini" in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe[train]", b"\x99", None])
def test_an_ini_that_is_no_text_is_named(tmp_path, content):
    path = tmp_path / "a.ini"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(pufferl.ConfigError, match=r"a\.ini: cannot be read as text"):
        configuration.parse_ini(path)


def test_an_ini_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "other.ini").write_text("env_name = squared\n")
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    with pytest.raises(pufferl.ConfigError, match=r"no section headers[\s\S]*other\.ini"):
        configuration.find_config("squared")


def test_a_file_of_an_environments_own_name_comes_before_one_that_names_it():
    for name, race in (("drone", False), ("drone_race", True)):
        args = pufferl.load_config(name)
        assert (args["env_name"], args["env"]["race"]) == ("drone", race)


def test_unknown_environment_and_sizes_that_buffers_do_not_divide():
    with pytest.raises(pufferl.ConfigError, match="breakout"):
        pufferl.load_config("braekout")
    args = pufferl.load_config("squared", ["--env.num-envs", "10", "--vec.num-buffers", "3"])
    with pytest.raises(pufferl.ConfigError, match="1, 2, 5, 10"):
        pufferl.load_env("squared", args)


def run(*arguments, cwd, **kwargs):
    return subprocess.run(
        [sys.executable, str(ROOT / "pufferl.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        **kwargs,
    )


def test_command_line_trains_evaluates_and_resumes(tmp_path, monkeypatch, capsys):
    small = ["--env.num-envs", "64", "--train.minibatch-size", "1024",
             "--train.total-timesteps", "40000"]
    trained = run("train", "squared", *small, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "checkpoint" in trained.stdout and "tensorboard" in trained.stdout
    folder = next((tmp_path / "experiments").glob("squared_*"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 40960 and "losses/entropy" in lines[-1]
    assert list((folder / "tensorboard").glob("events.*"))
    assert json.loads((folder / "config.json").read_text())["env"]["num_envs"] == 64

    monkeypatch.chdir(tmp_path)
    pufferl.main(["eval", "squared", "--load-model-path", "latest", "--eval.episodes", "20"])
    played = capsys.readouterr().out
    assert "score" in played and "20 episodes" in played

    pufferl.main(["train", "squared", *small[:-1], "60000", "--resume", "latest"])
    resumed = capsys.readouterr().out
    assert "resumed" in resumed and "step 40,960" in resumed
    assert len(list((tmp_path / "experiments").iterdir())) == 1
    (tmp_path / "kept").mkdir()
    moved = folder.rename(tmp_path / "kept" / "mine")
    state = str(moved / "trainer_state.pt")
    pufferl.main(["train", "squared", "--resume", state, "--train.total-timesteps", "60000"])
    assert f"resumed {moved} at step 6" in capsys.readouterr().out
    assert list((tmp_path / "kept").iterdir()) == [moved]


@pytest.mark.parametrize(("verb", "rest"), [
    ("eval", ["squared", "--trian.gamma", "1"]), ("export", ["squared", "--x"]),
    ("profile", ["braekout"]), ("eval", ["-x"]), ("sweep", ["braekout"])])
def test_errors_begin_with_what_was_typed(verb, rest, capsys):
    with pytest.raises(SystemExit) as error:
        pufferl.main([verb, *rest])
    assert str(error.value).startswith(f"pufferl.py {verb}: ")


def test_one_of_a_thing_is_told_as_one(tmp_path, capsys):
    options = ["--data-dir", str(tmp_path), "--env.num-envs", "64",
               "--train.total-timesteps", "4096"]
    pufferl.train("squared", pufferl.load_config("squared", [*options, "--vec.num-threads", "1"]))
    told = capsys.readouterr().out
    assert ("an epoch, 1 epoch; 1 thread; engine" in told and "1 epochs" not in told
            and "1 updates" not in told)
    facts = auto.Facts(agents=1, steps=64, discrete=True, spaces=[])
    train = dataclasses.asdict(configuration.Train(horizon="auto", replay_ratio=1.0,
                                                   minibatch_size="auto"))
    reasons = [reason for _, reason in auto.decide(train, facts).values()]
    assert (reasons[0] == "1 agent: 2 epochs of 32 steps"
            and reasons[1] == "1 update an epoch, 2 in all")
    with pytest.raises(pufferl.ConfigError, match="one gym/CartPole-v1 has 1 agent;"):
        configuration.divide_agents(0, 1, "gym/CartPole-v1")


@pytest.mark.parametrize("verb", ["train", "eval", "sweep", "export", "autotune", "profile"])
def test_every_verb_has_help(verb, capsys):
    try:
        pufferl.main([verb, "--help"])
    except SystemExit as end:
        assert not end.code
    assert len(capsys.readouterr().out) > 200


def test_a_misspelt_environment_is_told_what_was_meant():
    with pytest.raises(SystemExit, match="squared"):
        pufferl.main(["train", "squarde"])


def test_help_explains_each_setting_of_the_trainer_and_of_the_environment(capsys):
    with pytest.raises(SystemExit):
        pufferl.main(["train", "squared", "--help"])
    told = capsys.readouterr().out
    assert "--train.learning-rate" in told and "--env.distance" in told


def test_a_header_that_does_not_compile_is_an_error_in_a_line(tmp_path):
    (tmp_path / "broken.h").write_text("this is no C")
    with pytest.raises(SystemExit, match=r"(?s)pufferl\.py: .*broken\.h"):
        pufferl.main(["train", str(tmp_path / "broken.h")])


def test_a_run_brings_its_own_network_and_refuses_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--env.num-envs", "64", "--train.total-timesteps", "4096", "--logger", "none"]
    pufferl.main(["train", "squared", *small, "--policy.hidden-size", "24", "--env.distance", "2"])
    pufferl.main(["eval", "squared", "--load-model-path", "latest", "--eval.episodes", "4"])
    for words in (["train", "squared", "--resume"], ["eval", "squared", "--load-model-path"]):
        with pytest.raises(SystemExit, match=r"weight is \(24, \d+\) there and \(32, \d+\) here"):
            pufferl.main([*words, "latest", "--policy.hidden-size", "32"])
    capsys.readouterr()
    pufferl.main(["train", "squared", "--resume", "latest", "--train.total-timesteps", "8192"])
    assert "resumed" in capsys.readouterr().out, "the refusal must leave the run as it was"
    model = max(tmp_path.glob("experiments/*/model_*.pt"))
    assert model.stat().st_size < 100_000, "weights alone, not the arena behind them"


def test_a_header_that_does_not_compile_is_no_fault_of_its_file(monkeypatch):
    def load(name):
        raise RuntimeError("squared.h does not compile")

    monkeypatch.setattr(configuration.ocean, "load", load)
    with pytest.raises(configuration.ConfigError, match=r"^squared.h does not compile$"):
        configuration.load_library("squared")


@pytest.mark.parametrize("text, words", [
    ("[base]\nenv_nam = gym/CartPole-v1\n", r"its \[base\] must say env_name = ENVIRONMENT, because zz itself is none"),
    ("[train]\ngamma = 0.9\ngamma = 0.8\n", r"zz.ini.*option 'gamma' in section 'train' already exists")])
def test_a_file_that_names_no_environment_is_the_one_that_is_blamed(tmp_path, monkeypatch, text, words):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/zz.ini").write_text(text)
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    with pytest.raises(configuration.ConfigError, match=words):
        configuration.load_config("zz")


def test_a_size_that_no_part_of_the_network_takes_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("""import models
class Fixed(models.FeedForward):
    def __init__(self, env):
        super().__init__(env, 16)
""")
    own = ["--policy.name", f"{tmp_path}/mine.py:Fixed"]
    with pytest.raises(configuration.ConfigError, match=r"hidden-size would change nothing: .*Fixed has no keyword"):
        configuration.load_config("squared", [*own, "--policy.hidden-size", "32"])
    configuration.load_config("squared", own)
    memory = {"rnn.hidden_size", "rnn.input_size", "rnn.num_layers"}
    adam = ["--train.optimizer", "adam"]
    assert configuration.unused(configuration.load_config("squared", [*own, *adam])) == {"policy.hidden_size"} | memory
    configuration.load_config("squared", [*own, "--policy.hidden-size", "16", "--rnn.name", "lstm"])
    plain = ["--policy.name", "feed-forward"]
    assert configuration.unused(configuration.load_config("squared", [*plain, *adam])) == memory
    assert configuration.unused(configuration.load_config("squared", adam)) == set()
    with pytest.raises(configuration.ConfigError, match=r"num-layers would change nothing: this network has no"):
        configuration.load_config("squared", [*plain, "--rnn.num-layers", "2"])


def test_a_setting_that_the_optimizer_does_not_get_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nclass Own(torch.optim.RMSprop):\n    pass\n")
    own = ["--train.optimizer", f"{tmp_path}/mine.py:Own", "--train.momentum", "0.5"]
    for options in (["--train.eps", "0.1"], own):
        with pytest.raises(configuration.ConfigError, match=r"would change nothing: (muon|.*Own) does not get it"):
            configuration.load_config("squared", options)
    configuration.load_config("squared", ["--train.optimizer", "adam", "--train.eps", "0.1"])


@pytest.mark.parametrize("verb", ["eval", "export", "sweep"])
def test_only_training_resumes(verb):
    with pytest.raises(SystemExit, match="--resume is for train"):
        pufferl.main([verb, "squared", "--resume", "latest"])


def test_interrupt_saves_a_checkpoint(tmp_path):
    process = start(
        [
            sys.executable,
            str(ROOT / "pufferl.py"),
            "train",
            "squared",
            "--env.num-envs",
            "64",
            "--logger",
            "none",
            "--train.minibatch-size",
            "1024",
            "--train.total-timesteps",
            "1000000000",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: process.poll() is not None
             or list(tmp_path.glob("experiments/*/metrics.jsonl")))
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopping after this epoch" in err and "checkpoint" in out
    model = next(tmp_path.glob("experiments/*/model_*.pt"))
    assert torch.load(model, weights_only=True)


MANY = {
    "--train.gpus 50": r"train.gpus = 50: this machine has \d+ cores? and no GPU; the most is \d+\.",
    "--train.gpus 2147483648": "train.gpus = 2147483648: this machine has",
    "--train.gpus 0": "train.gpus = 0: must be above 0",
    "--vec.num-threads 100000": r"vec.num_threads = 100000: this machine has \d+ "
    r"cores?; the most is", "--env.num-envs 2e12": "2,000,000,000,000 environments would take",
    "--vec.total-agents 2e12": "environments would take",
    "--policy.hidden-size 0": "policy.hidden_size = 0: must be 1 or more",
    "--rnn.hidden-size 0": "rnn.hidden_size = 0: must be 1 or more",
    "--policy.hidden-size 1e7": "policy.hidden_size = 10,000,000 .*: the network would take",
    "--rnn.num-layers 1e9": "rnn.num_layers = 1,000,000,000: the network would take",
    "--train.horizon 1e13": "train.horizon = 10,000,000,000,000: the arrays would take",
    "--train.minibatch-size 1e13": "train.minibatch_size = 10,000,000,000,000: the "
    "arrays would take", "--train.seed 1e30": r"train.seed = \d+: must lie within",
    "gym/CartPole-v1 --vec.num-workers 100000 --vec.num-envs 100000": "vec.num_workers = 100000: "
    "this machine has", "gym/CartPole-v1 --vec.num-envs 2e9 --vec.backend serial": "2,000,000,000 "
    "environments would take",
    "eval --eval.episodes 1e30": "eval.episodes = .* would take .*, and .* are free",
    "eval --eval.port 70000": "eval.port = 70000: must lie within",
    "eval --eval.fps 0": "eval.fps = 0.0: must be above 0",
}


@pytest.mark.parametrize("options", MANY)
def test_numbers_that_the_machine_cannot_hold_start_nothing(options, capsys, monkeypatch):
    for place, name in ((data_parallel, "launch"), (workers, "Process"), (pufferl, "PuffeRL"),
                        (watch, "Play")):
        monkeypatch.setattr(place, name, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = options.split()
    verb, *words = words if words[0] == "eval" else ("train", *words)
    env = words.pop(0) if words[0].startswith("gym") else "squared"
    with pytest.raises(SystemExit, match=MANY[options]):
        pufferl.main([verb, env, *words])


def test_with_gpus_there_are_as_many_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(configuration.ConfigError,
                       match=r"train.gpus = 4: .* and 3 GPUs; the most is 3"):
        pufferl.load_config("squared", ["--train.gpus", "4", "--train.device", "cuda"])
    assert pufferl.load_config("squared", ["--train.gpus", "3", "--train.device", "cuda"])["train"]["gpus"] == 3
    assert pufferl.load_config("squared", ["--train.gpus", "4"])["train"]["gpus"] == 4  # on the CPU


def test_an_error_without_words_says_what_to_lower(monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(pufferl, "make_trainer", no_memory)
    with pytest.raises(SystemExit,
                       match=r"pufferl.py: out of memory \(MemoryError\): lower vec.total_agents"):
        pufferl.main(["train", "squared", "--logger", "none"])
    with pytest.raises(MemoryError, match=r"out of memory: lower train.horizon. \(MemoryError\)"):
        configuration.out_of_memory("train.horizon")(no_memory)()


WRONG = """
import gymnasium
import numpy as np

class Wrong(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)

    def __init__(self, where="step"):
        self.where = where
        self.fail("init")

    def fail(self, where):
        if where == self.where:
            raise RuntimeError("the sky has fallen")
        if where == self.where.removesuffix(" exits"):
            raise SystemExit(3)
        if where == self.where.removesuffix(" divides"):
            with np.errstate(all="raise"):
                np.ones(1) / np.zeros(1)
        if where == self.where.removesuffix(" is full"):
            raise MemoryError

    def reset(self, seed=None, options=None):
        self.fail("reset")
        return self.observation_space.sample(), {}

    def step(self, action):
        self.fail("step")
        shape = 4 if self.where == "shape" else 3
        return np.zeros(shape, np.float32), 0.0, False, False, {}
"""


def said_of(tmp_path, backend, where):
    """What the command line says of that environment."""
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    options = ["--vec.backend", backend, "--vec.num-envs", "2", "--logger", "none", "--data-dir",
               str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        pufferl.main(["train", f"{path}:Wrong", *options, "--env.where", where])
    return str(ended.value)


@pytest.mark.parametrize("where, words", [("step divides", "FloatingPointError: divide by zero"),
                                          ("step exits", "SystemExit: 3"), ("reset exits", "SystemExit: 3"),
                                          ("step is full", "MemoryError"),
                                          ("reset is full", "MemoryError")])
def test_what_may_be_ours_is_shown_by_an_environments_own_lines(tmp_path, where, words):
    said = said_of(tmp_path, "serial", where)
    assert ("this is in the environment's own code" in said.lower() and words in said
            and "wrong.py" in said)
    assert ("(environment 0 of " in said) == ("step" in where) and "emulation.py" not in said
    assert ("out of memory: lower vec" in said) == ("full" in where)


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_a_fault_says_which_environment(tmp_path, backend):
    said = said_of(tmp_path, backend, "shape")
    assert "the first step() breaks its space" in said and "(environment 0 of " in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize("where", ["init", "reset", "step", "import"])
@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_an_environment_that_raises_is_shown_by_its_own_lines(tmp_path, where, backend):
    path = tmp_path / "wrong.py"
    path.write_text(WRONG + ("1 / 0\n" if where == "import" else ""))
    options = ["--vec.backend", backend, "--vec.num-envs", "2", "--logger", "none", "--data-dir",
               str(tmp_path)]
    options += ["--env.where", where] if where != "import" else []
    with pytest.raises(SystemExit) as ended:
        pufferl.main(["train", f"{path}:Wrong", *options])
    said = str(ended.value)
    assert said.splitlines()[0].startswith("pufferl.py: ") and "wrong.py" in said
    assert ("ZeroDivisionError" if where == "import" else "RuntimeError: the sky has fallen") in said
    assert not any(f"{name}.py" in said
                   for name in ("workers", "emulation", "vector", "engines", "configuration"))
