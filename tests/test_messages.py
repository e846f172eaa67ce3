"""The sentences that users read, each asserted here alone.

A row is (subject, type, sentence, cause). The cause is a command line of squared, which is read
and not run, or a function that fails; it may take a folder. Type None: the message is printed.
"""

import atexit
import functools
import importlib
import inspect
import math
import shlex
import shutil
import tempfile
import threading
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import small_envs
import torch
import trainer_faults as faults
from gymnasium import spaces
from trainers import make_trainer

import configuration
import emulation
import models
import ocean
import ocean.gymnasium
import pufferl
import pufferlib
import pufferlib.vector
import vector
from arena import Arena
from errors import ConfigError, EnvError, NetworkError, WorkerError
from flat_spaces import FlatAction, FlatObservation
from protein import Random, Space
from tools.sweep import command as sweep
from tools.sweep.command import searched_settings

Error = ConfigError


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def read_ini(text, name="squared"):
    """Read a configuration file with this text, instead of all that ship."""
    def cause(path):
        write(path / "config" / f"{name}.ini", text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(configuration, "ROOT", path)
            configuration.load_config(name)

    return cause


def network(code, options=""):
    def cause(path):
        file = write(path / "mine.py", f"import models, torch\nclass Mine({code}\n")
        options_of_run = ["--policy.name", f"{file}:Mine", "--data-dir", "none", *options.split()]
        pufferl.main(["train", "squared", *options_of_run])

    return cause


def main(line):
    return lambda: pufferl.main(line.split())


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


LOSS = "import torch\n\ndef loss(minibatch): 1 / 0\n"
USERS_LINES = ('an error in the environment, the network or the loss: Traceback (most recent call '
               'last): File "FOLDER/mine.py", line 3, in {}')

CONFIGURATION = [
    ("train.gamma", Error, "= 'high': must be a number or auto", "--train.gamma high"),
    ("train.horizon", Error, "= 2.5: must be a whole number", give(horizon=2.5)),
    ("train.anneal-lr", Error, "must be true or false", "--train.anneal-lr 3"),
    ("train.optimizer", Error, "must be one of muon, adam, or path/to/file.py:name",
     "--train.optimizer sgd"),
    ("train.gamma", Error, "= 1.5: must lie within 0 and 1", give(gamma=1.5)),
    ("train.keep", Error, "must be 1 or more", give(keep=0)),
    ("train.reward_clip", Error, "must be above 0, or none", give(reward_clip=-1.0)),
    ("train.gama", Error, "there is no such setting. Did you mean --train.gamma?", "--train.gama 1"),
    ("trian", Error, "there is no such setting. Did you mean --train.gamma? There are: base, env",
     "--trian.gamma 1"),
    ("--num-envs", Error, "Did you mean --env.num-envs or --vec.num-envs?", "--num-envs 1"),
    ("batch_size", Error, "must be agents × horizon, 8 × a whole number",
     give(batch_size=1001, horizon="auto")),
    ("batch_size", Error, "must be agents × horizon, 8 × 8. Leave out horizon",
     give(batch_size=128)),
    ("train.minibatch_size", Error, "must be a multiple of train.horizon = 8",
     give(minibatch_size=20)),
    ("train.minibatch_size", Error, "is more than one epoch's batch, 8 agents × horizon 8 = 64. "
     "Take a smaller one or more agents (vec.total_agents)", give(minibatch_size=128)),
    ("train.draw", Error, "a recurrent network needs steps in their order", give(draw="steps")),
    ("use_rnn", Error, "must be True, because this policy has an", give(use_rnn=False)),
    ("train.norm_obs", Error, "has no models.Normalizer", give(norm_obs=True)),
    ("hidden-size", SystemExit, "Mine does not use it. Leave it out.", network(
        "models.FeedForward):\n def __init__(self, env): super().__init__(env, 16)",
        "--policy.hidden-size 8")),
    ("--rnn.num-layers", Error, "would change nothing: a network without rnn.name does not use it",
     "--policy.name feed-forward --rnn.num-layers 2"),
    ("--train.eps", Error, "would change nothing: train.optimizer muon does not use it", "--train.eps 0.1"),
    ("ZeroDivisionError", SystemExit, USERS_LINES.format("__init__"), network(
        "torch.nn.Module):\n def __init__(self, env): 1 / 0")),
    ("ZeroDivisionError", SystemExit, USERS_LINES.format("forward"), network(
        "models.FeedForward):\n def forward(self, x): 1 / 0", "--rnn.name none")),
    ("ZeroDivisionError", SystemExit, USERS_LINES.format("loss"), lambda path: main(
        f"train squared --data-dir none --train.loss {write(path / 'mine.py', LOSS)}:loss")()),
    ("policy.name", SystemExit, "is called with (env), but takes (env, size)", network(
        "torch.nn.Module):\n def __init__(self, env, size): pass")),
    ("policy.name", Error, "path/to/file.py:name of a file that exists", "--policy.name no.py:A"),
    ("CartPole", Error, "one gym/CartPole-v1 has 1 agent; use a multiple", train(
        "--vec.total-agents 0", "gym/CartPole-v1")),
    ("--baseline", Error, "the policy that ships with drone was trained without drone_race.ini",
     lambda: configuration.load_config("drone_race", ["--baseline"])),
    ("squared.ini", Error, "contains no section headers", read_ini("gamma = 1")),
    ("squared.ini", Error, "[trian] gamma: there is no such setting. Did you mean train.gamma?",
     read_ini("[trian]\ngamma = 1")),
    ("--resume", SystemExit, "is for train. To use a run's weights, network and environment, "
     "give --load-model-path", main("eval squared --resume latest")),
    ("squarde", SystemExit, "did you mean squared", main("train squarde")),
    ("trian", SystemExit, "there is no verb 'trian': did you mean train", main("trian squared")),
    ("train", SystemExit, "which environment? There are: ", main("train")),
    ("--mode", SystemExit, "the verb comes first", main("train snake --mode train")),
]


@functools.cache
def run_folder():
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


RUNS = [  # run folders, checkpoints, loggers, names from PufferLib
    ("trainer_state.pt", Error, "damaged (truncated at byte 1,000, or torch cannot read it) or not "
     "a checkpoint; the newest whole weights are",
     state(lambda path: path.write_bytes(path.read_bytes()[:1000]))),
    ("config.json", Error, "damaged or not a run's settings",
     resume(harm=lambda folder: write(folder / "config.json", "{"))),
    ("trainer_state.pt", Error, "is of another network: encoder.weight is (8, 121) floats there and "
     "(16, 121) floats here. Name its environment and --policy.name, undo changes",
     resume("--policy.hidden-size", "16")),
    ("train.optimizer", Error, "muon, which cannot be changed at resume",
     resume("--train.optimizer", "adam")),
    ("--resume", Error, "this is a run of squared, not of bandit. Name squared",
     resume(env="bandit")),
    ("changed since", None, "train.gae_lambda: 0.95 is now 0.5", resume("--train.gae-lambda", "0.5")),
    ("episodes", None, "all environments begin new episodes (there were other agents or spaces)",
     resume("--env.num-envs", "8")),
    ("nothing is left", None, "of its train.total_timesteps; give more to continue",
     resume("--train.total-timesteps", "64")),
    ("--data-dir", Error, "none there are no runs to look through; name the run's folder",
     lambda: pufferl.train("squared", configuration.load_config("squared", [
         "--data-dir", "none"]) | {"load_model_path": "latest"})),
    ("latest", Error, "there is no run of squared with a model_*.pt in", lambda path: (
        configuration.load_config("squared", ["--data-dir", str(path), "--load-model-path",
                                              "latest"]))),
    ("nothing is written", None, "an epoch, 1 epoch; 1 thread; engine", train("")),
    ("observations", Error, "made for observations of 118 numbers, these environments give 25",
     lambda: pufferl.PuffeRL(env=vector.make("squared", 8, env_kwargs={"distance": 2}),
                             policy=models.MinGRUPolicy(vector.make("breakout", 8), 8))),
    ("--load-model-path", Error, "and --baseline both name weights to start from",
     train("--load-model-path a.pt --baseline")),
    ("Seral", AttributeError, "did you mean Serial",
     lambda: pufferlib.vector.Seral),
    ("nmmo", ImportError, "environment needs none: vector.make(a function that makes it)",
     lambda: importlib.import_module("pufferlib.environments.nmmo")),
    ("distanse", ValueError, "squared has no setting 'distanse': did you mean distance?",
     lambda: pufferlib.make("squared", distanse=2)),
]

def act_on_two_threads(path):
    with mock.patch("engines.MIN_FLOPS_FOR_LEARNER", 1):
        network("models.FeedForward): ...", " ".join([*SMALL, "--rnn.name none --vec.num-threads 2"]))(path)


TRAINER = [  # trainer, engines, models, diagnostics, processes of one run
    ("train.engine", ConfigError, "are compiled and autograd",
     lambda: make_trainer(engine="fused")),
    ("train.engine", ConfigError, "Tripled is not models.MinGRUPolicy", lambda: make_trainer(**faults.TRIPLED)),
    ("train.compile", ConfigError, "train.compile compiles the network with", lambda:
     make_trainer(compile=True, engine="compiled")),
    ("engine: autograd", None, "because encoder has hooks", faults.hook),
    ("DataParallel", ConfigError, "policy is a DataParallel, give the network itself", lambda:
     faults.construct(wrap=torch.nn.DataParallel)),
    ("vecenv", ConfigError, "vecenv is a FeedForward, expected", faults.swap),
    ("policy", ConfigError, "policy is a dict, expected a torch.nn.Module", lambda: faults.construct(wrap=vars)),
    ("logger", ConfigError, "Mine has no config and no artifact", lambda: faults.construct(logger=faults.Mine())),
    ("train.horizon", ConfigError, "this trainer was made for 8", lambda: faults.assign("horizon", 9)),
    ("train.learning_rat", ConfigError, "did you mean learning_rate", lambda: faults.assign("learning_rat", 1)),
    ("decoder", RuntimeError, "would not be trained", faults.new_decoder),
    ("rewards", FloatingPointError, "not finite, first at step 3 of the rollout, of agent 2",
     lambda: faults.meddle(rewards=((3, 2), math.nan))),
    ("final observations", FloatingPointError, "not finite, first at step 3 of the rollout, of agent 2",
     lambda: faults.meddle(bootstraps=((3, 2), math.nan))),
    ("observation['place']", FloatingPointError, "its reset() or step() returned it", lambda:
     faults.train(make_trainer(env=faults.NanInDict, backend="serial", policy=models.MultiInputPolicy))),
    ("Muon", ConfigError, "only supports 2D parameters", give(optimizer=torch.optim.Muon)),
    ("train.advantage", ConfigError, "Return a tensor of the rewards' shape",
     lambda: faults.train(make_trainer(advantage=lambda *_: None))),
    ("of agent 1", FloatingPointError, "the action mask forbids every choice of a head: allow one", faults.forbid),
    ("logprobs", FloatingPointError, "or are -inf for every choice of a head: allow one", faults.rule_out),
    ("train.loss", FloatingPointError, "your function returned it",
     lambda: faults.train(make_trainer(loss=faults.nan_loss))),
    ("train.loss", UserWarning, "does not depend on the network's outputs",
     lambda: faults.train(make_trainer(loss=lambda minibatch: minibatch.advantages.mean()))),
    ("train.loss", ConfigError, "a file that exists", lambda: make_trainer(loss="missing.py:name")),
    ("train.optimizer", ConfigError, "nan_loss() got an unexpected keyword argument 'lr'. Give",
     lambda: make_trainer(optimizer=faults.nan_loss)),
    ("train.optimizer", ConfigError, "got an unexpected keyword argument 'weight_decay'",
     lambda: make_trainer(optimizer=faults.RateOnly, weight_decay=0.1)),
    ("network: Decodes", UserWarning, "returns probabilities, but logits are expected",
     lambda: faults.decode("probabilities")),
    ("network:", UserWarning, "the policy is not learnt, because no gradient leads from the logits",
     lambda: faults.decode("logits")),
    ("network: Decodes", None, "computes other outputs in learning than in the rollout",
     lambda: faults.decode("noise")),
    ("thread_safe", None, "write thread_safe = True into Mine", act_on_two_threads),
    ("Returns.forward", NetworkError, "must return (logits, value), got Tensor (",
     lambda: faults.returns(lambda y: y)),
    ("Returns", NetworkError, "returns 1 logits per observation, expected 2",
     lambda: faults.returns(lambda y: (y[:, :1], y[:, :1]))),
    ("heads of [2, 3]", NetworkError, "expected [3, 2]: the order is that of", lambda:
     models.check_logits(None, [torch.zeros(1, 2), torch.zeros(1, 3)], torch.zeros(1, 6), None, (3, 2), 2)),
    ("LostState", ConfigError, "leaves c, h in the state, which would be lost. Return it from initial_state",
     lambda: make_trainer(policy=faults.LostState)),
    ("FeedForward", ConfigError, "has no shape yet, because its layer is lazy",
     lambda: make_trainer(policy=faults.lazy)),
    ("tanh", NetworkError, "has two finite bounds. Set it to none", faults.squash_unbounded),
    ("log_std_init", NetworkError, "no models.Decoder of continuous actions",
     train("--policy.log-std-init=-1")),
    ("policy.squash", NetworkError, "the actions are not a Box", train("--policy.squash=tanh")),
    ("impala", NetworkError, "Use policy.name auto", lambda: models.Impala(faults.environment())),
]

# -- Emulation, vector, workers, tensors, environments


def step(env, steps=4, **options):
    """Make a vector and step it; a warning is an error."""
    emulation.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with vector.make(env, options.pop("num_envs", 1), **options) as vecenv:
            vecenv.reset(seed=0)
            for _ in range(steps):
                vecenv.step(np.zeros(vecenv.storage.actions[0].shape, np.int32))


def step_with(first=1, space=None, **parts):
    """Step an environment that returns other parts from a step on."""
    step(lambda: small_envs.Steps(None, 5, lambda t: parts if t >= first else {}, space), 6,
         backend="serial")


def keep_arrays():
    class Keeps(small_envs.Counters):
        def __init__(self, **options):
            super().__init__(**options)
            self.first = self.observations

        def _observe(self):
            self.first[:] = np.stack([self.count, self.age], 1)

    step(Keeps, backend="serial")


class OldStep(small_envs.Steps):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


LOCK = threading.Lock()


def stepped(name, action):
    with vector.make(name, 2, num_threads=1) as env:
        env.reset()
        env.step(np.full((2, env.action_dims), action))


def closed_vector():
    with vector.make("squared", 2, num_threads=1) as env:
        env.reset()
    return env


ENVIRONMENTS = [
    ("vec.num_workers", ValueError, "evenly. It can be 1, 2, 3, 6",
     lambda: vector.make(small_envs.Walk, 6, "multiprocessing", num_workers=4)),
    ("vec.batch_size", ValueError, "evenly into workers of 2. It can be 2, 4, 8", lambda: vector.make(
        small_envs.Walk, 8, "multiprocessing", num_workers=4, batch_size=3)),
    ("serial", ValueError, "For more workers use multiprocessing",
     lambda: vector.make(small_envs.Walk, 4, "serial", num_workers=2)),
    ("num_workers", ValueError, "Set vec.num_threads",
     lambda: vector.make("squared", 4, num_workers=2)),
    ("vec.num_buffers", ValueError, "is for backend native, not for multiprocessing",
     lambda: vector.make(small_envs.Walk, 4, "multiprocessing", num_buffers=2)),
    ("threads", ValueError, "there are native, serial, ",
     lambda: vector.make(small_envs.Walk, 4, "threads")),
    ("package", ValueError, "there are serial, multiprocessing and ray",
     lambda: vector.make(small_envs.Walk, 4, "package")),
    ("tensors", ValueError, "cannot step breakout; there are native", lambda: vector.make(
        "breakout", 1, "tensors")),
    ("batchsize", ValueError, "did you mean batch_size?", lambda: vector.make(
        "gym/CartPole-v1", batchsize=2)),
    ("CartPol-v1", ValueError, "did you mean CartPole-v1", lambda: vector.make("gym/CartPol-v1")),
    ("knights", ValueError, "docs/environments.md has its install line",
     lambda: vector.make("pettingzoo/knights")),
    ("nothing_v0", ConfigError, "pettingzoo.butterfly has no nothing_v0. There are: cooperative_pong",
     lambda: vector.make("pettingzoo/butterfly/nothing_v0")),
    ("pyboy", ValueError, "needs a ROM, which is not shipped", lambda: vector.make("pyboy/pokemon_red")),
    ("mine.py", ValueError, "a class or function of that file, got ''. It has walk",
     lambda path: vector.make(write(path / "mine.py", "def walk(): ...\n"))),
    ("nowhere.py", ValueError, "no such file", lambda: vector.make("nowhere.py:Env")),
    ("closed", RuntimeError, "make another one", lambda: closed_vector().reset()),
    ("closed", RuntimeError, "make another one", lambda: closed_vector().recv()),
    ("render(4)", ConfigError, "there are 2 environments",
     lambda: vector.make(small_envs.Walk, 2, "serial").render(4)),
    ("env_name", ConfigError, "got <class 'small_envs.Walk'>. Give a class to make() and PuffeRL()",
     lambda: pufferl.train(small_envs.Walk)),
    ("whole number", ValueError, "an action is not a whole number: Discrete(5)",
     lambda: stepped("squared", 0.5)),
    ("finite", ValueError, "an action is not finite: Box(", lambda: stepped("pendulum", math.nan)),
    ("step()", RuntimeError, "needs reset() first",
     lambda: vector.make(small_envs.Walk).step(np.zeros(1))),
    ("aaa", SystemExit, "File name too long",
     lambda: pufferl.main(["train", "squared", "--resume", 300 * "a"])),
    ("another process", ConfigError, "use backend serial", lambda: step(
        lambda: LOCK and small_envs.Walk(), num_envs=2, backend="multiprocessing", num_workers=2)),
    ("worker", WorkerError, "died by signal 9 (SIGKILL)", lambda: step(
        small_envs.Walk, num_envs=2, backend="multiprocessing", num_workers=2, trouble="kill")),
    ("of step()", EnvError, "expected 0.0 to 1.0 in element (0,), got 7.0",
     lambda: step_with(1, spaces.Box(0, 1, (1,)), observation=np.full(1, 7, np.float32))),
    ("a/t = Text", EnvError, "cannot be made flat; Dict, Tuple, Box, Discrete, MultiDiscrete and",
     lambda: FlatObservation(spaces.Dict({"a": spaces.Dict({"t": spaces.Text(3)})}))),
    ("b = Tuple()", EnvError, "holds no number. Leave it out",
     lambda: FlatObservation(spaces.Dict({"b": spaces.Tuple([])}))),
    ("Discrete(100000)", EnvError, "has 100,000 values, at most 65,536 are possible. Use narrower",
     lambda: FlatAction(spaces.Discrete(100_000))),
    ("Tuple(Discrete(2), Box(", EnvError, "mixes integers and floats. Use only discrete spaces",
     lambda: FlatAction(spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))]))),
    ("reward", EnvError, "must be a number, got an array of shape (2,) and dtype float64",
     lambda: step_with(reward=np.ones(2))),
    ("reward", EnvError, "must be a number, got 'x'", lambda: step_with(3, reward="x")),
    ("info", EnvError, "must be a dict, got 5", lambda: step_with(5, info=5)),
    ("step()", EnvError, "must return observation, reward, terminated, truncated, info, got "
     "4 values", lambda: step(OldStep, backend="serial")),
    ("reset", EnvError, "has a reset without seed. Derive from gymnasium.Env, set both spaces",
     lambda: vector.make(type("NoSeed", (small_envs.Steps,), {"reset": lambda self: None}))),
    ("not a gymnasium.Env", EnvError, "and define reset(self, *, seed=None, options=None)",
     lambda: vector.make(type("Bare", (), {"step": None}))),
    ("reset()", ValueError, "gave none", lambda: step_with(info={"action_mask": np.ones(2)})),
    ("mask", ValueError, "3 entries; the action space has 2 options",
     lambda: step_with(0, info={"action_mask": np.ones(3)})),
    ("Keeps", EnvError, "did not write its observations. Write to self.observations[:]",
     keep_arrays),
    ("tensors", ValueError, "neither torch tensors nor arrays with __dlpack__",
     lambda: vector.make(lambda: small_envs.several(small_envs.SAME_STEP), backend="tensors")),
]


def create(name, num_envs=2, **settings):
    return lambda: ocean.load(name).create(num_envs, settings=settings)


def step_gym(name, action):
    def step():
        env = ocean.gymnasium.OceanEnv(name)
        env.reset(seed=0)
        env.step(action)

    return step


def compile_small(right, wrong):
    from test_ocean import SMALL, load_text

    return lambda path: load_text(path, SMALL.replace(right, wrong)).create(2)


OCEAN = [
    ("breakot", ValueError, "did you mean breakout", lambda: ocean.load("breakot")),
    ("CartPole-v1", ValueError, "Gymnasium's is gym/CartPole-v1", lambda: ocean.load("CartPole-v1")),
    ("breakout", ValueError, "no setting 'framskip': did you mean frameskip", create("breakout", framskip=4)),
    ("frameskip", ConfigError, "must be an integer of 32 bits, got 4.5", create("breakout", frameskip=4.5)),
    ("continuous", ConfigError, "must be true or false", create("breakout", continuous=2)),
    ("ball_speed", ConfigError, "must be a finite number of 32 bits", create("breakout", ball_speed=1e300)),
    ("max_ball_speed", ValueError, "must be at most 512", create("breakout", max_ball_speed=2000.0)),
    ("komi", ValueError, "no integer", create("go", komi=7.0)),
    ("num_envs", ValueError, "and the length of settings if that is a list",
     lambda: ocean.load("cartpole").create(2, settings=[{}])),
    ("cartpole", ValueError, "must have the same spaces",
     lambda: ocean.load("cartpole").create(2, settings=[{}, {"continuous": True}])),
    ("rows", ValueError, "must be contiguous",
     lambda: ocean.rows(np.zeros((4, 4))[:, ::2], None, None, None, None)),
    ("vec.num_buffers", ValueError, "It can be 1, 3", lambda: vector.Native("snake", 3, num_buffers=2)),
    (".num_agents", ValueError, "c_spaces gives no .num_agents", compile_small(".num_agents = 1", ".num_agents = 0")),
    ("small.h", ConfigError, "does not compile", compile_small("env->tick++;", "env->tock++;")),
    ("breakout", ValueError, "actions must have the shape () and be in Discrete(3), got (), 3 to 3",
     step_gym("breakout", 3)),
    ("pendulum", ValueError, "got (1,), nan to nan", step_gym("pendulum", np.full(1, np.nan))),
]


def kernel_rows():  # kernels, arena, fast/, devices
    import kernel_cases
    import test_devices
    import test_ocean_device
    import torch

    import vector
    from fast import pictures, products

    def change(call, **arguments):
        return lambda: kernel_cases.SMALL[call]().run(**arguments)

    def register(*names, allocate=False):
        def cause():
            arena = Arena()
            arena.register(names[0], (2,))
            if allocate:
                arena.allocate()
            arena.register(names[-1], (2,))
        return cause

    zeros, refused = torch.zeros, ConfigError
    return [
        ("bootstraps", ValueError, "has shape (3, 4) and strides (4, 1), expected (3, 5)",
         change("advantage", bootstraps=zeros(3, 4))),
        ("rewards", TypeError, "kernels.advantage: rewards is float64, expected float32",
         change("advantage", rewards=zeros(3, 5).double())),
        ("values", ValueError, "and strides (1, 4), expected (4, 5), contiguous",
         change("advantage", values=zeros(5, 4).t())),
        ("valid", ValueError, "expected at least (3, 5), contiguous", change("priorities", valid=zeros(2, 5))),
        ("hgp", TypeError, "expected float32 or bfloat16", change("mingru_step", hgp=zeros(4, 18).double())),
        ("twice", ValueError, "register each name once", register("twice", "twice")),
        ("late", ValueError, "and before arena.allocate()", register("a", "late", allocate=True)),
        ("stride", ValueError, "a kernel of 5 is not a multiple of the stride 2",
         lambda: pictures.BytesConvolution(3, 8, 5, 2)),
        ("kernel", ValueError, "images of 5 × 84 are smaller than the kernel, 8 × 8",
         lambda: pictures.BytesConvolution(4, 8, 8, 4)(zeros(1, 4, 5, 84, dtype=torch.uint8))),
        ("bias", RuntimeError, "4 inputs and a bias of 3 are expected",
         lambda: products.multiply(torch.ones(4, 8), torch.ones(4, 3))),
        ("train.device", refused, "finds no GPU", lambda: test_devices.find_gpu(available=False)),
        ("train.device", refused, "is numba's own here", lambda: test_devices.find_gpu(implementation="Built-in")),
        ("train.device", refused, "pip install 'numpy<2.5'", lambda: test_devices.find_gpu(knows_numpy=False)),
        ("train.device", refused, "needs CuPy", lambda: test_devices.find_gpu(has_cupy=False)),
        ("train.device", None, "ulimit -l unlimited", test_devices.pin_where_no_memory_is_locked),
        ("vec.device", refused, "squared cannot step on a GPU", lambda: test_ocean_device.choose("squared", "cuda")),
        ("performance", ValueError, "it includes <time.h>", lambda: vector.make("performance", device="cpu")),
    ]


def verb(words):
    """A cause: a command of pufferl.py, or of protein.py; FOLDER is the test's folder."""
    def run(path):
        command, *argv = [word.replace("FOLDER", str(path)) for word in shlex.split(words)]
        sweep.main(argv) if command == "sweep" else pufferl.main([command, *argv])

    return run


def searched(entry, name="train.gamma"):
    return lambda: searched_settings("squared", {name: entry})


TOOLS = [  # eval, export, sweep, history, watch, speed
    ("eval.max_steps", SystemExit, "Raise eval.max_steps where they are meant to be that long.",
     verb("eval performance --eval.episodes 1 --eval.max-steps 5")),
    ("eval.video", SystemExit, "must end in .mp4, .gif or .png and be in a folder that exists.",
     verb("eval squared --eval.video a.avi")),
    ("--eval.web", SystemExit, "--eval.window: one of them at a time.",
     verb("eval squared --eval.web --eval.window")),
    ("ship", SystemExit, "which policy? --load-model-path latest, or a run's folder",
     verb("ship squared")),
    ("--export.c", SystemExit, "compiles the environment, but gym/CartPole-v1 is not one in C.",
     verb("export gym/CartPole-v1 --export.c FOLDER")),
    ("--baseline", None, "neither --load-model-path nor --baseline: this is an untrained policy",
     verb("export squared --export.flat FOLDER/a.bin")),
    ("--data-dir", SystemExit, "--profile.output says where else.",
     verb("profile squared --data-dir none")),
    ("nothing", SystemExit, "no folder, no run in", verb("runs show nothing --data-dir FOLDER")),
    ("breakout", None, "python pufferl.py train breakout makes one",
     verb("runs breakout --data-dir FOLDER")),
    ("train.gamma", ConfigError, "distribution = '': must be one of uniform", searched({"min": 0, "max": 1})),
    ("train.gamma", ConfigError, "maen: there is no such field. There are: distribution, min",
     searched({"distribution": "uniform", "min": 0, "max": 1, "maen": 1})),
    ("train.optimizer", ConfigError, "is not a number: use distribution = choice with values.",
     searched({"distribution": "uniform", "min": 0, "max": 1}, "train.optimizer")),
    ("sweep.trian.gamma", ConfigError, "there is no such setting. Did you mean train.gamma?",
     searched([1, 2], "trian.gamma")),
    ("there is nothing to search", ConfigError, "no [sweep.SECTION.KEY] section", lambda: Space({})),
    ("optimize()", ConfigError, "needs an objective, or the tuner an env_name.",
     lambda: Random(search_space={"env.x": [1, 2]}).optimize()),
    ("sweep_squared", SystemExit, "holds another sweep (train.gamma: 0.9 there, ",
     lambda path: [verb(f"sweep squared --data-dir FOLDER --train.gamma {gamma} --sweep.num-trials 0"
                        " --sweep.logger none")(path) for gamma in (0.9, 0.8)]),
    ("train.horizon", None, "train.horizon is given, so it is not searched",
     verb("sweep squared --data-dir FOLDER --train.horizon 32 --sweep.num-trials 0 "
          "--sweep.logger none")),
    ("--sweep.train.gamma", SystemExit, "is --sweep.SECTION.KEY.FIELD VALUE with a field of",
     verb("sweep squared --sweep.train.gamma 0.9")),
    ("report", SystemExit, "there is no sweep (sweep.json) in it.",
     verb("sweep report FOLDER")),
]

TABLE = CONFIGURATION + RUNS + TRAINER + ENVIRONMENTS + OCEAN + kernel_rows() + TOOLS


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
        text = output.out + output.err
    else:
        with pytest.raises(kind) as error:
            fail()
        text = str(error.value)
    text = " ".join(text.split())
    assert sentence.replace("FOLDER", str(tmp_path)) in text and subject in text
