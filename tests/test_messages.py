"""The sentences that users read. Each is asserted here alone; other tests name an error's type and
the setting.

A row is (subject, type, sentence, cause). The cause is a command line of squared, which is read
and not run, or a function that fails; it may take a folder (`path`). The type None stands for a
message that is printed. The sentence is a part of the message that contains no path.
"""

import atexit
import dataclasses
import functools
import importlib
import inspect
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import auto
import checkpoints
import configuration
import models
import pufferl
import pufferlib
import pufferlib.vector
import vector

Error = configuration.ConfigError


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def read_ini(text, name="squared"):
    """Read a configuration file with this text, in the place of all that ship."""
    def cause(path):
        write(path / "config" / f"{name}.ini", text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(configuration, "ROOT", path)
            configuration.load_config(name)

    return cause


def network(code, options=""):
    """Train squared with a network of this code."""
    def cause(path):
        file = write(path / "mine.py", f"import models, torch\nclass Mine({code}\n")
        pufferl.main(["train", "squared", "--policy.name", f"{file}:Mine", "--data-dir", "none",
                      *options.split()])

    return cause


def main(line):
    return lambda: pufferl.main(line.split())


def raise_memory_error(*_):
    raise MemoryError


def reasons():
    """Print why `auto` chose what it did for a run of two epochs."""
    settings = dataclasses.asdict(configuration.Train(replay_ratio=1.0))
    print(auto.decide(settings, auto.Facts(agents=1, steps=64, discrete=True, spaces=[])))


def no_memory():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pufferl, "make_trainer", raise_memory_error)
        pufferl.main(["train", "squared", "--logger", "none"])


SMALL = ["--env.num-envs=4", "--policy.hidden-size=8", "--train.total-timesteps=64", "--logger=none",
         "--train.horizon=16", "--train.minibatch-size=64", "--vec.num-threads=1"]


def train(line, name="squared"):
    return lambda: pufferl.train(name, configuration.load_config(name, [
        "--data-dir", "none", *SMALL, *line.split()]))


def give(**settings):
    """Make a trainer of a script with these settings."""
    def cause():
        with vector.make("squared", 8) as vecenv:
            policy = models.MinGRUPolicy(vecenv, hidden_size=8)
            pufferl.PuffeRL({"data_dir": None, "horizon": 8, "minibatch_size": 32, **settings},
                            vecenv, policy)

    return cause


CONFIGURATION = [
    ("train.gamma", Error, "= 'high': must be a number", "--train.gamma high"),
    ("train.horizon", Error, "= 2.5: must be a whole number", give(horizon=2.5)),
    ("train.anneal-lr", Error, "must be true or false", "--train.anneal-lr 3"),
    ("train.state", Error, "must be one of carry, zero", "--train.state on"),
    ("train.optimizer", Error, "must be one of muon, adam, or path/to/file.py:name",
     "--train.optimizer sgd"),
    ("train.horizon", Error, "= 0: must be above 0", "--train.horizon 0"),
    ("train.gamma", Error, "= 1.5: must lie within 0 and 1", give(gamma=1.5)),
    ("train.keep", Error, "must be 1 or more", give(keep=0)),
    ("train.reward_clip", Error, "must be above 0, or none", give(reward_clip=-1.0)),
    ("train.gama", Error, "there is no such setting. Did you mean gamma?", "--train.gama 1"),
    ("trian", Error, "there is no section 'trian': did you mean train", "--trian.gamma 1"),
    ("--lr", Error, "Did you mean --train.learning-rate?", "--lr 1"),
    ("--num-envs", Error, "Did you mean --env.num-envs or --vec.num-envs?", "--num-envs 1"),
    ("wandb_project", Error, "it is project now", lambda: configuration.check_names(
        {"wandb_project": "x"})),
    ("--train.use-rnn", Error, "rnn.name says whether there is a recurrent layer",
     "--train.use-rnn 1"),
    ("batch_size", Error, "is agents × horizon, and there are 1024 agents",
     "--train.batch-size 1000"),
    ("batch_size", Error, "is a horizon of 32, but horizon is 64: give one of the two",
     "--train.batch-size 32768 --train.horizon 64"),
    ("num_iterations", Error, "give horizon or batch_size as well",
     "--train.num-iterations 3 --train.horizon auto"),
    ("train.minibatch_size", Error, "must be a multiple of train.horizon = 8",
     give(minibatch_size=20)),
    ("train.minibatch_size", Error, "is more than one epoch's batch, 8 agents × horizon 8 = 64; "
     "take a smaller one or more agents (vec.total_agents)", give(minibatch_size=128)),
    ("train.draw", Error, "this network has a memory", give(draw="steps")),
    ("use_rnn", Error, "it is True of this policy", give(use_rnn=False)),
    ("train.norm_obs", Error, "has no models.Normalizer", give(norm_obs=True)),
    ("hidden-size", SystemExit, "Mine has no keyword hidden_size. What its __init__ takes", network(
        "models.FeedForward):\n def __init__(self, env): super().__init__(env, 16)",
        "--policy.hidden-size 8")),
    ("--rnn.num-layers", Error, "would change nothing: this network has no recurrent layer",
     "--policy.name feed-forward --rnn.num-layers 2"),
    ("--train.eps", Error, "would change nothing: muon does not get it", "--train.eps 0.1"),
    ("policy.name", SystemExit, "this is in the network's own code:", network(
        "torch.nn.Module):\n def __init__(self, env): 1 / 0")),
    ("policy.name", SystemExit, "is called with (env), but takes (env, size)", network(
        "torch.nn.Module):\n def __init__(self, env, size): pass")),
    ("policy.name", Error, "path/to/file.py:name of a file that exists", "--policy.name no.py:A"),
    ("train.gpus", Error, "= 500: this machine has", "--train.gpus 500"),
    ("policy.hidden_size", MemoryError, "the network would take", "--policy.hidden-size 1e7"),
    ("MemoryError", SystemExit, "out of memory (MemoryError): lower vec.total_agents (or",
     no_memory),
    ("train.horizon", MemoryError, "out of memory: lower train.horizon. (MemoryError)",
     configuration.out_of_memory("train.horizon")(raise_memory_error)),
    ("env.num_envs", SystemExit, "2,000,000,000,000 environments would take",
     main("train squared --env.num-envs 2e12 --data-dir none")),
    ("CartPole", Error, "one gym/CartPole-v1 has 1 agent; take a multiple", train(
        "--vec.total-agents 0", "gym/CartPole-v1")),
    ("--baseline", Error, "was trained with env.race = False, drone_race.ini has True",
     lambda: configuration.load_config("drone_race", ["--baseline"])),
    ("zz.ini", Error, "its [base] must say env_name = ENVIRONMENT, because zz itself is none",
     read_ini("[base]\nenv_nam = x\n", "zz")),
    ("squared.ini", Error, "contains no section headers", read_ini("gamma = 1")),
    ("squared.ini", Error, "[trian]: there is no such section: did you mean train",
     read_ini("[trian]\n")),
    ("squared.ini", Error, "[solved]: must have score or perf, one of them", lambda path: (
        configuration.solved("squared", Path(write(path / "squared.ini", "[solved]\nsteps=1"))))),
    ("--resume", SystemExit, "is for train. To take a run's weights, network and environment, "
     "give --load-model-path", main("eval squared --resume latest")),
    ("squarde", SystemExit, "did you mean squared", main("train squarde")),
    ("trian", SystemExit, "there is no verb 'trian': did you mean train", main("trian squared")),
    ("train", SystemExit, "which environment? There are: ", main("train")),
    ("--mode", SystemExit, "the verb comes first", main("train snake --mode train")),
    ("torn.h", SystemExit, "torn.h does not compile", lambda path: pufferl.main(
        ["train", write(path / "torn.h", "this is no C")])),
    ("horizon", None, "1 agent: 2 epochs of 32 steps", reasons),
    ("minibatch_size", None, "1 update an epoch, 2 in all", reasons),
    ("list", SystemExit, "expected nothing", main("list squared target")),
]


@functools.cache
def run_folder():
    """The folder of a run of squared."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path)
    options = ["--data-dir", str(path), *SMALL]
    return pufferl.train("squared", configuration.load_config("squared", options)).run_folder


def resume(*options, env="squared", harm=lambda folder: None):
    def cause(path):
        folder = shutil.copytree(run_folder(), path / run_folder().name)
        harm(folder)
        pufferl.train(env, configuration.load_config(env, [
            "--resume", str(folder), "--train.total-timesteps", "128", "--logger", "none",
            *options]))

    return cause


def state(harm):
    """A resume from a trainer_state.pt to which harm was done."""
    return resume(harm=lambda folder: harm(folder / "trainer_state.pt"))


def save_all(path):
    """Save metadata that could not be read."""
    with vector.make("squared", 8) as vecenv:
        trainer = pufferl.PuffeRL({"data_dir": str(path), "horizon": 8, "minibatch_size": 32},
                                  vecenv, models.MinGRUPolicy(vecenv, hidden_size=8))
        trainer.save_checkpoint(path / "a.pt", metadata={"mine": Path("here")})


def other_observations():
    env = vector.make("squared", 8, env_kwargs={"distance": 2})
    pufferl.PuffeRL(env=env, policy=models.MinGRUPolicy(vector.make("breakout", 8), 8))


RUNS = [  # run folders, checkpoints, loggers, names from PufferLib
    ("trainer_state.pt", Error, "damaged (it is empty) or not a checkpoint; the newest whole "
     "weights are", state(lambda path: path.write_bytes(b""))),
    ("trainer_state.pt", Error, "torch cannot read it: it is no file that torch.save wrote",
     state(lambda path: path.write_text("hello " * 100))),
    ("trainer_state.pt", Error, "damaged (truncated at byte 1,000)",
     state(lambda path: path.write_bytes(path.read_bytes()[:1000]))),
    ("trainer_state.pt", Error, "it holds nothing of a run; weights alone are for "
     "--load-model-path", state(lambda path: torch.save({"a": torch.zeros(3)}, path))),
    ("a.pt", checkpoints.CheckpointError, "there is no whole one beside it", lambda path: (
        torch.save([1, 2], path / "a.pt"), checkpoints.load(path / "a.pt"))),
    ("config.json", Error, "damaged or not a run's settings",
     resume(harm=lambda folder: write(folder / "config.json", "{"))),
    ("trainer_state.pt", Error, "is of another network: encoder.weight is (8, 121) there and "
     "(16, 121) here. Take back what was changed", resume("--policy.hidden-size", "16")),
    ("train.optimizer", Error, "muon, which cannot be changed at resume",
     resume("--train.optimizer", "adam")),
    ("--resume", Error, "this is a run of squared, and would go on as one of bandit",
     resume(env="bandit")),
    ("changed since", None, "train.gae_lambda: 0.95 is now 0.5", resume("--train.gae-lambda", "0.5")),
    ("episodes", None, "all environments begin new episodes (there were other agents or spaces)",
     resume("--env.num-envs", "8")),
    ("nothing is left", None, "of its train.total_timesteps; give more to go on",
     resume("--train.total-timesteps", "64")),
    ("--data-dir", Error, "cannot write the run's folder",
     lambda path: train("--data-dir " + write(path / "file", ""))()),
    ("--data-dir", Error, "none there are no runs to look through; name the run's folder",
     lambda: pufferl.train("squared", configuration.load_config("squared", [
         "--data-dir", "none"]) | {"load_model_path": "latest"})),
    ("latest", Error, "there is no run of squared with a model_*.pt in", lambda path: (
        configuration.load_config("squared", ["--data-dir", str(path), "--load-model-path",
                                              "latest"]))),
    ("nothing is written", None, "an epoch, 1 epoch; 1 thread; engine", train("")),
    ("metadata['mine']", Error, "Path; a checkpoint holds numbers, text, tensors", save_all),
    ("observations", Error, "made for observations of 118 numbers, these environments give 25",
     other_observations),
    ("policy", Error, "needs an environment and a policy", lambda: pufferl.PuffeRL({}, None)),
    ("--load-model-path", Error, "and --baseline both name weights to start from",
     train("--load-model-path a.pt --baseline")),
    ("Seral", AttributeError, "there is no such name. Did you mean Serial?",
     lambda: pufferlib.vector.Seral),
    ("nmmo", ModuleNotFoundError, "environment needs none: vector.make(a function that makes it)",
     lambda: importlib.import_module("pufferlib.environments.nmmo")),
    ("distanse", ValueError, "squared has no setting 'distanse': did you mean distance?",
     lambda: pufferlib.make("squared", distanse=2)),
    ("zero_copy", ValueError, "make takes no zero_copy any more: nothing is copied now. Leave it "
     "out", lambda: pufferlib.make("squared", zero_copy=True)),
    ("WandbLogger", TypeError, "project must be a project's name, or the settings that "
     "load_config gives, got [1]", lambda: (pytest.importorskip("wandb"), pufferl.WandbLogger([1]))),
]

TRAINER = []  # trainer, engines, models, diagnostics, processes of one run

ENVIRONMENTS = []  # emulation, vector, workers, tensors, environments

OCEAN = []

KERNELS = []  # kernels, arena, fast/, devices

TOOLS = []  # eval, export, sweep, history, watch, speed

TABLE = CONFIGURATION + RUNS + TRAINER + ENVIRONMENTS + OCEAN + KERNELS + TOOLS


@pytest.mark.parametrize(("subject", "kind", "sentence", "cause"), TABLE,
                         ids=[f"{row[0]}-{index}" for index, row in enumerate(TABLE)])
def test_a_message_says(subject, kind, sentence, cause, tmp_path, capsys):
    def fail():
        if isinstance(cause, str):
            return configuration.load_config("squared", shlex.split(cause))
        return cause(tmp_path) if inspect.signature(cause).parameters else cause()

    if kind is None:
        fail()
        output = capsys.readouterr()
        said = output.out + output.err
    else:
        with pytest.raises(kind) as error:
            fail()
        said = str(error.value)
    assert sentence in " ".join(said.split()) and subject in said
