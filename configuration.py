"""Settings: the dataclasses, the .ini files and the command line, and the environment and network that they describe.

    args = load_config("breakout", ["--train.learning-rate", "0.01"])      # nested dicts: args["train"]["horizon"]
    vecenv = load_env("breakout", args)
    policy = load_policy(args, vecenv, "breakout")

The defaults in the dataclasses are changed by config/default.ini, then config/ENV.ini, then the command line. To add a
setting, add a field with its docstring: it appears in --help and may stand in any .ini. An unknown key or a wrong type
is a ConfigError that names the file, the key and the nearest right ones.
"""

import ast
import configparser
import contextlib
import copy
import dataclasses
import difflib
import errno
import fnmatch
import functools
import inspect
import itertools
import json
import math
import shlex
import shutil
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import gymnasium
import torch

import checkpoints
import data_parallel
import emulation
import environments
import models
import ocean
import ocean.device
import processes
import tensors
import vector
import workers
from auto import agents_in_c, agents_in_python, decide, drawn_steps, facts_of, plural, wants_normalising

ROOT = Path(__file__).resolve().parent


# --------------------------------------------------------------------------------------------------
# Configuration: a dataclass a section; config/default.ini, config/ENV.ini and the command line change the defaults


Auto = Literal["auto"]
STEPS_IN_C, STEPS_IN_PYTHON = 20_000_000, 1_000_000  # train.total_timesteps of an environment without an .ini


@dataclass
class Base:
    load_model_path: str | None = None
    """Start from these weights: a model file, a run's folder, latest (the last run here) or best (its best)."""
    baseline: bool = False
    """Start from the small trained policy that ships with the environment, ocean/ENV/baseline.safetensors."""
    resume: str | None = None
    """Go on with a run, same folder and log: its folder, latest, or, on the command line, auto: the latest if there is
    one, whatever its settings, else a new one."""
    logger: Literal["tensorboard", "none"] = "tensorboard"
    """Where metrics go besides metrics.jsonl in the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases as well; WANDB_API_KEY or `wandb login` identifies you."""
    neptune: bool = False
    """Log to Neptune as well; NEPTUNE_API_TOKEN identifies you."""
    project: str = "pufferl"
    """Project of Weights & Biases and Neptune."""
    entity: str | None = None
    """The project's owner: W&B's entity (default: you), Neptune's workspace (default: the one in NEPTUNE_PROJECT)."""
    group: str | None = None
    """Runs of one group belong together there."""
    tag: str | None = None
    """A label of the run there."""
    data_dir: str | None = "experiments"
    """Folder of the runs: checkpoints, logs, the resolved configuration. none: nothing is written."""


@dataclass
class Vec:
    backend: Literal["auto", *vector.BACKENDS] = "auto"
    """native is for environments in C. Others: serial (one after the other in this process), multiprocessing, ray,
    package (the vector environment of a Gymnasium id's own package), or tensors (one object of torch or JAX that
    holds many). auto is native for C, tensors if a reset returns them, package for ALE and if it gives the same
    episodes (CartPole), serial if one process would step all, else multiprocessing."""
    num_envs: int | Auto = "auto"
    """Copies of the env section's num_envs: vec.num_envs × env.num_envs environments run in all.
    auto: 1 if they are in C or one object holds many; otherwise as many as make 32 agents (8 if
    actions are continuous), and more in a long run."""
    num_workers: int | None = None
    """Processes or Ray actors that step environments in Python (default: the physical cores, or an even divisor)."""
    batch_size: int | None = None
    """Environments whose workers the policy waits for before it acts on them (default: all)."""
    timeout: float = 60.0
    """Seconds after which an environment in Python that does not answer is an error."""
    total_agents: int | None = None
    """Agents in all, in place of vec.num_envs × env.num_envs; a multiple of the agents of one environment."""
    num_buffers: int | None = None
    """native: ranges of environments that step together (default: so many that one's data fit a core's cache)."""
    num_threads: int | None = None
    """Threads that step environments and run the network (default: the physical cores)."""
    device: Literal["auto", "host", "cuda"] = "auto"
    """native: where environments step. cuda: on the policy's GPU, one thread for each environment; the header's struct
    must hold plain data. auto is cuda if train.device is cuda and the header allows it; if not, it prints why."""


@dataclass
class Policy:
    name: str = "auto"
    """auto: an encoder that fits the observations, then the MinGRU. It is a linear map for plain numbers, convolutions
    for images and small boards of integers, one-hot for choices; a Dict or Tuple has one for each field
    (models.Encoded). default: the same without boards. feed-forward: default without a recurrent layer. separate:
    policy and value apart, for robots (models.Separate). board: 3 × 3 convolutions for games in which each cell is an
    action (models.Board). impala: residual convolutions for images (models.Impala). path/to/file.py:Class: yours."""
    hidden_size: int = 128
    """Width of the network."""
    squash: Literal["auto", "none", "tanh"] = "auto"
    """How continuous actions are kept within their bounds. none: the environment clips the Gaussian's sample to them.
    tanh: each number with two finite bounds goes through a tanh scaled to them; any other is clipped, and begins
    at its bound (models.squash). auto: tanh if the bounds are far from -1 and 1. Weights that were trained with
    tanh always use it."""
    log_std_init: float = 0.0
    """Continuous actions: log of the deviation that the Gaussian begins with; -2 explores gently."""


@dataclass
class Rnn:
    name: Literal["auto", "mingru", "lstm", "gru", "none"] = "auto"
    """auto is mingru for policy.name auto and default, and none for any other."""
    hidden_size: int | None = None
    """Width of the recurrent layers (default: policy.hidden_size)."""
    input_size: int | None = None
    """Width of the encoder's output, which the recurrent layers read (default: policy.hidden_size)."""
    num_layers: int = 1
    """Recurrent layers."""


@dataclass
class Train:
    total_timesteps: int = 10_000_000
    """Environment steps of all agents of all ranks together; rounded up to whole epochs of agents × horizon steps. An
    environment without an .ini has 20,000,000 if it is in C, 1,000,000 if not."""
    learning_rate: float | Auto = "auto"
    """Step size at the start. Muon's steps have unit scale, so this is about ten times what Adam wants."""
    anneal_lr: bool = True
    """Cosine from learning_rate to min_lr_ratio of it (Loshchilov and Hutter 2017)."""
    min_lr_ratio: float = 0.0
    """Fraction of learning_rate that is left at the end."""
    target_kl: float | Auto | None = "auto"
    """Multiply the scheduled learning rate by 0.1 to 10, up to four times the setting, so that an epoch's updates move
    the policy by this KL divergence on average, until the schedule has nearly ended. (By less if norm_reward is on
    and advantages are small, because they are then mostly noise.) none: the rate is the schedule's. auto: 0.01, or
    0.02 with continuous actions, if learning_rate is auto, else none."""
    gamma: float | Auto = "auto"
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of GAE: 0 trusts the value function alone, 1 the returns seen (Schulman et al. 2016)."""
    horizon: int | Auto = "auto"
    """Steps of one rollout; an agent's steps in it are one segment."""
    minibatch_size: int | Auto = "auto"
    """Steps of one update, a multiple of horizon if draw is segments, divided among the ranks if there are several."""
    draw: Literal["segments", "steps"] = "segments"
    """What a minibatch is made of. segments: whole rollouts of agents, whose advantages are computed anew after each
    minibatch. steps: single steps, for a network without memory; advantages stay as the rollout left them, as in
    CleanRL and Stable-Baselines3, so V-trace has nothing to correct."""
    max_minibatch_size: int | None = None
    """Steps that go through the network at once (on a CPU: a custom network); gradients add up (default: on a GPU
    the whole; on a CPU parts that its caches may hold, or the whole if train.loss or a batch norm needs it)."""
    replay_ratio: float | Auto = "auto"
    """How often each step is learnt from on average: minibatches an epoch = replay_ratio · batch / minibatch_size."""
    clip_coef: float = 0.2
    """PPO: how far the probability ratio may leave 1."""
    vf_coef: float | Auto = "auto"
    """Weight of the value loss."""
    vf_clip_coef: float = 0.2
    """How far a value may leave its old one in an update; inf for no clipping."""
    ent_coef: float | Auto = "auto"
    """Weight of the entropy bonus."""
    advantage_floor: float | Auto = "auto"
    """Advantages are divided by their deviation in the minibatch, or by this if it is less: else a minibatch without a
    reward has the errors of the value in place of a success. auto: 1, a deviation of the return, with norm_reward and
    discrete actions, if learning_rate is auto, else 0."""
    anneal_ent_coef: bool = False
    """Let ent_coef fall to zero linearly over the training."""
    max_grad_norm: float = 1.5
    """Global gradient norm above which gradients are scaled down."""
    optimizer: Literal["muon", "adam"] | str = "muon"
    """muon orthogonalises each matrix's momentum (Jordan et al. 2024); adam is torch's AdamW; path/to/file.py:Class is
    a torch.optim.Optimizer of your own, made as Class(parameters, lr=learning_rate), with weight_decay if it takes it;
    the schedule sets its rate."""
    loss: str | None = None
    """path/to/file.py:function of your own. It gets the minibatch, whose fields are a table in docs/recipes.md ("A loss
    and an optimizer of your own"). Its result, a tensor (), is added to the loss, differentiated by autograd, and
    logged as losses/own_function_loss. A script may give the function itself here, and a class as optimizer."""
    advantage: str | None = None
    """path/to/file.py:function in place of the advantage, with the arguments and result of ppo.py's: (args, storage,
    rewards, mean, values, bootstraps, ratios), all (T, N), to advantages (T, N). args: the train section; storage:
    terminals, truncations, valid. Each agent's must depend on that agent alone."""
    momentum: float = 0.95
    """Muon's Nesterov momentum, and Adam's beta1."""
    beta2: float = 0.999
    """Adam's second moment; only with optimizer adam."""
    eps: float = 1e-8
    """Adam's denominator; only with optimizer adam."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each update scales the weights by 1 - learning rate · weight_decay."""
    vtrace_rho_clip: float = 1.0
    """V-trace: upper bound of the importance weight of a temporal difference (Espeholt et al. 2018)."""
    vtrace_c_clip: float = 1.0
    """V-trace: upper bound of the weight with which later differences count for earlier steps."""
    prio_alpha: float | Auto = "auto"
    """How much segments with large advantages are preferred; 0: not at all (Schaul et al. 2016)."""
    prio_beta0: float = 0.2
    """How much that preference is corrected in the loss at the start; it rises to 1 over the training."""
    norm_obs: bool | Auto = "auto"
    """Normalise each element of the observations by its moments (models.Normalizer). Rollouts that begin within the
    first 1,024 steps, or the first twentieth of the run if that is less, are only measured."""
    norm_reward: bool | Auto = "auto"
    """Divide rewards by the deviation of recent discounted returns; values are learnt relative to their mean if that
    is far from 0 (models.RewardScale). Logs keep the true rewards."""
    reward_clip: float | None = None
    """Clip rewards to ± this in the advantage (the logs keep the true ones); none by default."""
    state: Literal["carry", "zero"] = "carry"
    """Recurrent state at the start of a rollout: carry it over from the last rollout, or zero."""
    seed: int = 0
    """Seed of the weights, the environments, the actions and the draws."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network runs and learns. auto is cpu: on a GPU little was measured yet (docs/gpu.md)."""
    engine: Literal["auto", "compiled", "fused", "autograd", "graphs"] = "auto"
    """How the network acts and learns (engines.py). autograd: any network, by its own forward (on a GPU in CUDA graphs,
    called graphs). compiled (on a CPU, also feed-forward and separate), fused (on a GPU): the default network by hand.
    auto takes these if they implement the network as it is."""
    cudagraphs: int = 2
    """On a GPU: after how many epochs the rollout's steps and the minibatch are captured as CUDA graphs; -1: never."""
    gpus: int = 1
    """Processes that train together on this machine: one a GPU with train.device cuda, else sharing
    the cores; for several machines there is torchrun (docs/scale.md)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products. All else stays float32; on a GPU float32 products are computed as TF32. bfloat16 is
    worth it on a processor that has it (AVX-512 BF16, AMX): Breakout trains 1.5 times as fast, Atari twice. On others
    the default network gives the same results, not faster; most other networks go on in float32, and say so."""
    compile: bool = False
    """torch.compile for a custom network (the default one is fused by hand)."""
    compile_mode: str = "default"
    """torch.compile's mode."""
    checkpoint_interval: int = 200
    """Epochs between checkpoints; one is always written at the end and on Ctrl-C."""
    keep: int = 5
    """Model files that are kept of a run."""
    log_interval: float = 1.0
    """Seconds between log entries and dashboard refreshes."""


@dataclass
class Eval:
    episodes: int = 256
    """Episodes that count. Each environment plays equally many, so that short episodes are not favoured."""
    deterministic: bool = False
    """Take the most likely action in place of drawing one."""
    max_steps: int = 100_000
    """Steps after which an episode that does not end is an error."""
    video: str | None = None
    """Write an episode to out.mp4 or out.gif, or a frame from the middle of it to out.png; needs no display."""
    terminal: bool = False
    """Show the policy playing in the terminal."""
    web: bool = False
    """Show the policy playing on a page at 127.0.0.1, also through an ssh tunnel."""
    open: bool = False
    """Open the page in a browser, if there is a display."""
    window: bool | None = None
    """Show the policy playing in a window (default: if there is a display and the output is a terminal)."""
    port: int = 8899
    """The page's port; if it is taken, the next free one."""
    fps: float | None = None
    """Steps a second that are shown (default: the environment's own)."""
    seconds: float = 30.0
    """A video's greatest length; of a longer episode it shows the beginning."""


@dataclass
class Profile:
    epochs: int = 3
    """Epochs that are traced, after two that are not."""
    output: str | None = None
    """File of the trace (default: profile_ENV.json in data_dir)."""


SECTIONS = {"vec": Vec, "policy": Policy, "rnn": Rnn, "train": Train, "eval": Eval, "profile": Profile}
# {name in PufferLib or another trainer: its name here}, if the meaning is the same. A name is "section.key", or for
# the base section the key alone. NAME=VALUE: the other name is a flag, which gives this value to NAME.
RENAMED = {
    "train.lr": "train.learning_rate", "train.num_steps": "train.horizon",
    "train.n_steps": "train.horizon", "train.bptt_horizon": "train.horizon", "train.num_workers": "vec.num_workers",
    "train.n_epochs": "train.replay_ratio", "train.update_epochs": "train.replay_ratio",
    "train.clip_range": "train.clip_coef", "train.adam_beta1": "train.momentum", "train.beta1": "train.momentum",
    "train.adam_beta2": "train.beta2", "train.adam_eps": "train.eps", "train.data_dir": "data_dir",
    "track": "wandb", "wandb_project": "project", "neptune_project": "project", "wandb_group": "group",
    "neptune_name": "entity", "eval_model_path": "load_model_path", "checkpoint_dir": "data_dir",
    "vec": "vec.backend", "vec.seed": "train.seed", "seed": "train.seed", "cudagraphs": "train.cudagraphs",
    "checkpoint_interval": "train.checkpoint_interval", "slowly": "train.engine=autograd",
    "fps": "eval.fps", "gif_path": "eval.video", "eval_episodes": "eval.episodes",
    "policy_name": "policy.name", "policy.num_layers": "rnn.num_layers", "rnn_name": "rnn.name",
    "sweep.max_runs": "sweep.num_trials", "train.env_batch_size": "vec.batch_size", "train.num_envs": "vec.num_envs",
}
# Names whose meaning is not the same: {name: what to do instead}. A section's name stands for all of its settings.
REFUSED = {
    "train.batch_size": "it is agents × train.horizon: set vec.total_agents (or env.num_envs) and train.horizon; "
                        "what Stable-Baselines3 calls so is train.minibatch_size",
    "train.num_iterations": "set train.total_timesteps = num_iterations × agents × train.horizon",
    "train.num_minibatches": "set train.minibatch_size = agents × train.horizon / num_minibatches",
    "train.use_rnn": "rnn.name says whether there is a recurrent layer, and which",
    "train.rollout": "train.engine autograd steps environments one by one, as train.rollout plain did",
    "train.torch_deterministic": "a run with the same settings repeats bit for bit without it (docs/reliability.md)",
    "train.cpu_offload": "a rollout lies where the network is; fewer vec.total_agents or a shorter horizon take less",
    "train.compile_fullgraph": "train.compile and train.compile_mode are all that is handed to torch.compile",
    "train.min_ent_coef_ratio": "train.anneal_ent_coef takes ent_coef to zero",
    "train.name": "entity is whose project it is, and a run's name is that of its folder",
    "train.project": "it is a setting of its own, --project", "train.zero_copy": "nothing is copied",
    "vec.zero_copy": "nothing is copied: environments write where the policy reads",
    "vec.overwork": "vec.num_workers may be more than the cores",
    "policy.expansion_factor": "a layer is as wide as policy.hidden_size",
    "torch": "the network is policy.name and rnn.name; policy.name my_file.py:Class is one of your own",
    "selfplay": "there is no self-play; an opponent is part of the environment",
    "mode": "the verb comes first: python pufferl.py train breakout",
    "env": "the environment comes after the verb: python pufferl.py train breakout",
    "package": "it is part of the environment's name: gym/ID, pettingzoo/FAMILY/NAME (docs/environments.md)",
    "load_id": "download the run's model and give its file to --load-model-path",
    "render_mode": "--eval.window, --eval.terminal, --eval.web and --eval.video say how it is shown",
    "save_frames": "--eval.video out.gif --eval.seconds 30 writes an episode",
    "max_runs": "a sweep's --sweep.num-trials", "max_suggestion_cost": "a sweep's --sweep.max-suggestion-cost",
    "sweep.use_gpu": "the model of a sweep is fitted on the CPU", "sweep.early_stop_quantile": "it is sweep.early_stop",
    "sweep.prune_pareto": "the model's front has no points by luck to prune (protein.Protein._target)",
    "sweep.metric_distribution": "scores are taken as they are",
    "profile": "it is a verb: python pufferl.py profile breakout",
    "log_dir": "logs lie in the run's folder, in --data-dir",
    "reset_state": "--train.state zero begins each rollout without memory",
    **dict.fromkeys(("local_rank", "rank", "world_size", "gpu_id", "nccl_id"),
                    "--train.gpus N starts N processes, and torchrun tells each its number (docs/scale.md)"),
}


RUN_SETTINGS = ("config_name", "auto", "agents", "load_model_path", "baseline", "resume", "data_dir",
                "launch", "defaults", "sources")  # belong to one run: --resume does not take them over

# What config.json has besides settings.
OF_A_RUN = ("config_name", "auto", "agents", "versions", "engine", "launch", "defaults", "turn", "sources")

# What a run did, if its file is so old that it lacks these settings.
OFF = {"norm_obs": False, "norm_reward": False, "target_kl": None, "draw": "segments", "advantage_floor": 0.0}


# What a script may read of `load_config`'s settings though it is none: {name there: how it follows from all settings}.
READ_ONLY = {
    "train.use_rnn": lambda args: recurrent_layer(args) != "none" or (
        args["policy"]["name"] not in POLICIES
        and hasattr(load_attribute("policy.name", args["policy"]["name"]), "initial_state")),
}


class Section(dict):
    """Settings by their names here, which may be read by those in RENAMED and READ_ONLY too. name: the section's, ""
    for `args`, which holds all of them. KeyError for any other name."""

    def __init__(self, values, name="", args=None):
        super().__init__(values)
        self.name, self.args = name, self if args is None else args

    def __missing__(self, key):
        old = f"{self.name}.{key}".removeprefix(".")
        if old in READ_ONLY:
            return READ_ONLY[old](self.args)
        section, _, new = RENAMED[old].rpartition(".")
        return (self.args[section] if section else self.args)[new]


class ConfigError(ValueError):
    """A setting that does not exist, has the wrong type or cannot work; the message says what to do."""


def difference(before, after, name=""):
    """What two configurations, nested dicts, do not share: ["train.gamma: 0.9 is now 0.99", ...]."""
    changes = []
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if not name and key in RUN_SETTINGS:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            changes += difference(old, new, f"{name}{key}.")
        elif old != new:
            changes.append(f"{name}{key}: {old} is now {new}")
    return changes


@contextlib.contextmanager
def out_of_memory(settings):
    """If memory runs out within, on a CPU or a GPU: a MemoryError that says to lower `settings`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        texts = ("out of memory", "allocate memory", "Unable to allocate", "bad_alloc")
        if isinstance(error, MemoryError) or any(text in str(error) for text in texts):
            what = (str(error) or type(error).__name__).splitlines()[0]
            told, (text, own) = MemoryError(f"out of memory: lower {settings}. ({what})"), workers.own_part(error)
            if own:
                told.add_note(f"This is in the environment's own code:\n{text}".rstrip())
            raise told from error
        raise


EXPECTED = (ConfigError, emulation.Fault, FloatingPointError, MemoryError, data_parallel.RankError, vector.WorkerError,
            models.NetworkFault, ocean.MissingPackage, gymnasium.error.DependencyNotInstalled)
REFUSED_PATHS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}


def error_text(error):
    """The text that a command line prints for an error, with the place in an environment's own code
    if that raised it. None for a fault of this project, which needs its traceback."""
    text, own = workers.own_part(error)
    if own and (not isinstance(error, EXPECTED) or isinstance(error, FloatingPointError | MemoryError)):
        return f"this is in the environment's own code:\n{text}".rstrip()
    if isinstance(error, MemoryError) and not str(error):
        return ("out of memory (MemoryError): lower vec.total_agents (or env.num_envs, vec.num_envs), train.horizon, "
                "train.minibatch_size or policy.hidden_size.")
    if isinstance(error, OSError) and error.errno in REFUSED_PATHS and isinstance(error.filename, str):
        return f"the system refuses a path ({error.strerror}): {error.filename[:100]}. Give another one."
    if isinstance(error, EXPECTED):
        return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return None


@contextlib.contextmanager
def said_by(program, expected=()):
    """An error within ends the program: it prints the program's name and the `error_text`. An error
    without one is raised on, unless it is of the classes `expected`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = error_text(error)
        if text is None and not isinstance(error, expected):
            raise
        sys.exit(f"{program}: {text or error}")


def command(*words, script="pufferl.py"):
    """What to type in this folder for `python SCRIPT WORDS`. It has the path of the Python that
    runs now if `python` is another one, for example outside an activated virtual environment."""
    here, python = Path.cwd(), shutil.which("python")
    python = "python" if python and Path(python).parent == Path(sys.executable).parent else Path(sys.executable)
    paths = [path.relative_to(here) if isinstance(path, Path) and path.is_relative_to(here) else path
             for path in (python, ROOT / script)]
    return shlex.join(map(str, (*paths, *words)))


def find_config(env_name):
    """(environment, ini file) of a name on the command line. An ini file may say which environments it is for:
    `[base] env_name = gym/CartPole-v1 gym/CartPole-*`. The file's own name then means the first of these."""
    name = env_name.removeprefix("puffer_")
    own = ROOT / "config" / (Path(name).with_suffix(".ini").name if name.endswith(".h") else f"{name}.ini")
    found = []
    for path in sorted((ROOT / "config").glob("*.ini")):
        names = parse_ini(path, strict=False, word="env_name").get("base", "env_name", fallback="").split()
        if names and path == own:
            return names[0], path
        found += [(len(pattern), path) for pattern in names if fnmatch.fnmatchcase(name, pattern)]
    if own.exists() or not found:
        return name, own
    return name, max(found)[1]  # if several patterns fit, the longest, as it is the most specific


def parse_ini(path, strict=True, word=""):
    """A configparser that has read an ini file, or nothing of one without `word`: to parse takes a millisecond. If it
    cannot be read, a ConfigError with file and line. strict: a section or a key that comes twice is an error too."""
    parser = configparser.ConfigParser(inline_comment_prefixes="#", interpolation=None, strict=strict)
    try:
        if word in (text := path.read_text(encoding="utf-8")):
            parser.read_string(text, source=str(path))
    except configparser.Error as error:
        raise ConfigError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error}).") from None
    return parser


def load_creator(name):
    """The creator of an environment in Python (gym/ID, pettingzoo/FAMILY/NAME, file.py:callable); None for one in C."""
    with making():
        return environments.load_creator(name)


def env_section(name):
    """The env section as a dataclass: num_envs, and the settings that a C environment's header declares or the keyword
    arguments of one in Python that have plain defaults. No fields for "default", which is no environment."""
    if name == "default":
        return dataclasses.make_dataclass("Env", [])
    creator = load_creator(name)
    if creator is not None:
        with making():
            settings = creator.settings
        fields = [(key, type(value), field(default=value, metadata={"help": f"As {name} has it."}))
                  for key, value in {"num_envs": 1, **settings}.items()]
        return dataclasses.make_dataclass("Env", fields)
    library = load_library(name)
    what = "Environments side by side. auto: so many that the steps asked for make 90 epochs, 1,024 agents at most."
    fields = [("num_envs", int | Auto, field(default="auto", metadata={"help": what}))]
    fields += [(key, type(value), field(default=value, metadata={"help": library.settings_help.get(key, "")}))
               for key, value in library.settings.items()]
    return dataclasses.make_dataclass("Env", fields)


def policy_section(name):
    """The policy section as a dataclass; for a network of one's own also with the keywords of its class that have plain
    defaults."""
    if name in POLICIES or not (callable(name) or ".py" in name):
        return Policy
    own = environments.plain_defaults(load_attribute("policy.name", name, POLICIES))
    fields = [(key, type(value), field(default=value, metadata={"help": f"As {named(name)} has it."}))
              for key, value in own.items()
              if not hasattr(Policy, key) or (key == "hidden_size" and type(value) is int)]
    return dataclasses.make_dataclass("Policy", fields, bases=(Policy,))


def take_network(schema, values, name, sized=None):
    """Let the policy section be that of the network `name`; settings that it does not have go. sized: the network that
    the hidden_size in `values` was written for, None if it is a default. Another one with a default of its own has
    that."""
    kept, schema["policy"] = values["policy"], policy_section(name)
    own = any(f.name == "hidden_size" and f.metadata for f in dataclasses.fields(schema["policy"]))
    if name != kept["name"] and (sized is None or (own and sized != name)):
        kept = {key: value for key, value in kept.items() if key != "hidden_size"}
    values["policy"] = {key: kept.get(key, default) for key, default in dataclasses.asdict(schema["policy"]()).items()}


def typed(argv, *options):
    """What a command line gives one of these options, which have a value; None if it gives nothing."""
    for word, following in reversed([*itertools.pairwise([*argv, ""])]):  # the last one counts
        option, equals, value = word.partition("=")
        if option.replace("_", "-") in options:
            return None if (found := value if equals else following) in ("", "None", "none") else found
    return None


def load_library(name):
    """The compiled environment behind ENV on the command line: a name in ocean/ or the path of a header."""
    try:
        return ocean.load(name.removeprefix("puffer_"))
    except (ValueError, RuntimeError) as error:  # RuntimeError: it does not compile
        own = find_config(name)[1]
        if isinstance(error, ValueError) and own.exists() and name not in ocean.names():
            parse_ini(own)  # a fault of the whole file comes first
            raise ConfigError(f"{own}: its [base] must say env_name = ENVIRONMENT, because {name} itself is none. "
                              f"({error})") from None
        raise ConfigError(str(error)) from None


GIVEN = (" (A run that was given the object itself is resumed by its script: PuffeRL with the same object, then "
         "load_checkpoint.)")


def coerce(value, kind, where):
    """A string from an ini file, or a value from Python, as `kind`; ConfigError naming `where` if it is not one."""
    options = getattr(kind, "__args__", ())
    if type(None) in options and (value is None or (isinstance(value, str) and value.lower() in ("none", ""))):
        return None
    if Auto in options and value == "auto":
        return value
    names = [name for option in options if option is not Auto for name in getattr(option, "__args__", ())]
    if str in options and names:  # or a file of one's own
        if value not in names and ".py:" not in str(value):
            raise ConfigError(f"{where} = {value!r}: must be one of {', '.join(names)}, or path/to/file.py:name."
                              + GIVEN)
        return str(value)
    if {type(None), Auto} & set(options):
        kind = next(option for option in options if option not in (type(None), Auto))
        options = getattr(kind, "__args__", ())
    if options:
        value = value.lower() if isinstance(value, str) else value
        if value not in options:
            raise ConfigError(f"{where} = {value!r}: must be one of {', '.join(map(str, options))}.")
        return value
    try:
        if kind is str:
            return str(value)
        if isinstance(value, str):
            value = {"true": True, "false": False, "inf": math.inf}.get(value.lower(), value)
            value = ast.literal_eval(value) if isinstance(value, str) else value
        if kind is bool and value in (0, 1):
            return bool(value)
        if kind is float and not isinstance(value, bool):
            return float(value)
        if kind is int and not isinstance(value, bool) and int(value) == value:
            return int(value)
    except (ValueError, TypeError, SyntaxError, OverflowError):
        pass
    what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    raise ConfigError(f"{where} = {value!r}: must be {what}.")


def translate(section, key, known, where, schema=SECTIONS):
    """The name here of a setting that may have another trainer's name. ConfigError, with nearest
    names in all sections of `schema`, if there is none. where: its place, for the error."""
    if key in known:
        return key
    old = key if section == "base" else f"{section}.{key}"
    if old in RENAMED:
        new = RENAMED[old]
        if (new.rpartition(".")[0] or "base") == section and "=" not in new:
            return new.rpartition(".")[2]
        raise ConfigError(f"{where}: it is {new} now.")
    if old in REFUSED:
        raise ConfigError(f"{where}: {REFUSED[old]}.")
    for cutoff in (1.0, 0.8, 0.5):
        near = difflib.get_close_matches(key, known, 3, cutoff)
        if section != "env" or cutoff > 0.5:  # an environment's own words resemble anything a little
            near = near or in_other_sections(key, schema, cutoff, where.startswith("--"))
        if near:
            break
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"{where}: there is no such setting.{hint} There are: {', '.join(known)}.")


def in_other_sections(key, schema, cutoff, option):
    """The names, such as ["train.horizon"], of settings near `key`, which may be another trainer's
    name; option: as the command line has them, ["--train.horizon"]."""
    names = [("" if section == "base" else f"{section}.") + f.name
             for section, cls in schema.items() for f in dataclasses.fields(cls)]
    names = [*RENAMED.items(), *((name, name) for name in (*names, *(f"train.{name}" for name in SIZES)))]
    near = difflib.get_close_matches(key, {old.rpartition(".")[2] for old, _ in names}, 1, cutoff)
    found = {new.partition("=")[0] for old, new in names if old.rpartition(".")[2] in near}
    return sorted("--" + name.replace("_", "-") if option else name for name in found)


def check_names(args, *sections):
    """ConfigError for a setting in these sections of `args` that does not exist, with the nearest ones; without
    sections for all but env and train, which are checked where they are used, and for a section that does not exist."""
    outside = [*SECTIONS, "env", "sweep", "env_name", *(f.name for f in dataclasses.fields(Base)), *OF_A_RUN]
    for section in sections or ("base", *(name for name in SECTIONS if name != "train")):
        kind = SECTIONS.get(section)
        if section == "policy":
            kind = policy_section(args.get(section, {}).get("name", Policy.name))
        known = outside if section == "base" else [f.name for f in dataclasses.fields(kind)]
        for key in args if section == "base" else args.get(section, {}):
            where = f"args[{key!r}]" if section == "base" else f"{section}.{key}"
            name = translate(section, key, known, where)
            if name != key:
                raise ConfigError(f"{where}: it is {name} now.")


def read_ini(path, schema, values):
    """Put an ini file's settings over `values`, {section: {key: value}}; [sweep*] sections go to "sweep" as text."""
    parser = parse_ini(path)
    for section in parser.sections():
        if section.partition(".")[0] == "sweep":
            values["sweep"].setdefault(section, {}).update(parser[section])
            continue
        if section == "solved":
            continue  # the function solved reads these
        if section not in schema:
            near = ocean.nearest(section, [*schema, "sweep"])
            raise ConfigError(f"{path} [{section}]: there is no such section: {near}.")
        types = {f.name: f.type for f in dataclasses.fields(schema[section])}
        for key, text in parser[section].items():
            if (section, key) == ("base", "env_name"):
                continue  # find_config reads it
            where = f"{path} [{section}] {key}"
            key = translate(section, key, list(types), where, schema)
            values[section][key] = coerce(text, types[key], where)


@dataclass
class Solved:
    """What counts as solved ([solved] of an .ini): a mean score or a mean perf; and the steps and seconds after which
    training got there, with seed 0, the settings that ship and two cores (None: not measured)."""

    score: float | None = None
    perf: float | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def metric(self):
        """(name of the statistic, how much of it is enough), such as ("score", 800.0)."""
        return ("score", self.score) if self.perf is None else ("perf", self.perf)


def solved(env_name, path=None):
    """The Solved of an environment; None if its .ini (`path`, if that is known) has none."""
    path = path or find_config(env_name)[1]
    parser, types = parse_ini(path) if path.exists() else {}, {f.name: f.type for f in dataclasses.fields(Solved)}
    if "solved" not in parser:
        return None
    found = {}
    for key, text in parser["solved"].items():
        where = f"{path} [solved] {key}"
        if key not in types:
            raise ConfigError(f"{where}: there is no such setting: {ocean.nearest(key, types)}.")
        found[key] = coerce(text, types[key], where)
    if (found.get("score") is None) == (found.get("perf") is None):
        raise ConfigError(f"{path} [solved]: must have score or perf, one of them.")
    return Solved(**found)


def resolve(env_name, argv=()):
    """(schema, values) before the command line `argv`: each section's dataclass, each one's settings."""
    given, (env_name, own) = env_name, find_config(env_name)
    files = [path for path in (ROOT / "config" / "default.ini", own) if path.exists()]
    policies = [dict(ini["policy"]) if "policy" in (ini := parse_ini(path, word="policy")) else {} for path in files]
    schema = {"base": Base, "env": env_section(env_name), **SECTIONS}
    schema["policy"] = policy_section(next((one["name"] for one in reversed(policies) if "name" in one), Policy.name))
    values = {section: dataclasses.asdict(cls()) for section, cls in schema.items()} | {"sweep": {}}
    creator = load_creator(env_name)
    if env_name != "default":  # what no .ini says
        values["train"]["total_timesteps"] = STEPS_IN_C if creator is None else STEPS_IN_PYTHON
    if not getattr(creator, "takes_copies", True):
        values["vec"]["num_envs"] = 1
    for path in files:
        read_ini(path, schema, values)
    saved = saved_settings(argv, given, schema, values) or {}
    name = (typed(argv, "--policy.name", "--policy-name")
            or saved.get("policy", {}).get("name", values["policy"]["name"]))
    sized = next((one.get("name", name) for one in reversed(policies) if "hidden_size" in one), None)
    take_network(schema, values, name, sized)
    return schema, values


def load_config(env_name, argv=()):
    """The resolved configuration of an environment as nested dicts: args["train"]["learning_rate"];
    of "default" for an environment that you make yourself.

    argv: command line options, e.g. ["--train.learning-rate", "0.01"]. Raises ConfigError for a setting that does not
    exist or has the wrong type; --help, and what is no option at all, print and exit, as on a command line.
    """
    schema, values = resolve(env_name, argv)
    defaults = copy.deepcopy({section: values[section] for section in ("env", *SECTIONS)})
    argv, sizes = take_sizes(argv)
    argv = spell_out(schema, argv)
    apply_saved(argv, env_name, schema, values)
    if argv:
        values = {**parse_arguments(env_name, schema, values, argv), "sweep": values["sweep"]}
    reasons, steps, env, vec = {}, values["train"]["total_timesteps"], values["env"], values["vec"]
    name = find_config(env_name)[0]
    creator = load_creator(name)
    if env.get("num_envs") == "auto":
        env["num_envs"] = choose_num_envs(load_library(name), env, steps)
        reasons["env.num_envs"] = f"{steps:,} steps"
    if vec["num_envs"] == "auto":
        vec["num_envs"] = 1
        if creator is not None and vec["total_agents"] is None:
            vec["num_envs"], agents = choose_copies(creator, env, steps)
            reasons["vec.num_envs"] = f"{steps:,} steps, {agents} agent{'s' * (agents > 1)} each"
    base = values.pop("base")
    args = Section({"config_name": env_name, "env_name": name, **base, "auto": reasons, "defaults": defaults})
    args |= {section: Section(settings, section, args) for section, settings in values.items()}
    for key in sorted(unused(args)):
        if typed(argv, f"--{key}".replace("_", "-")):
            why = {"policy": f"{named(args['policy']['name'])} has no keyword hidden_size. What its __init__ takes "
                             "with a plain default is a setting, --policy.NAME",
                   "rnn": "this network has no recurrent layer of ours; it has one with --rnn.name mingru, lstm or gru",
                   "train": f"{named(args['train']['optimizer'])} does not get it. muon gets momentum, adam beta2 and "
                            "eps as well; an optimizer of your own says all else in its class"}[key.partition(".")[0]]
            raise ConfigError(f"--{key.replace('_', '-')} would change nothing: {why}.")
    check_counts(args)
    if sizes:
        given = typed(argv, "--train.horizon") or "batch_size" not in sizes
        known = {"horizon": args["train"]["horizon"]} if given else {}
        args["train"] |= sizes_of({**known, **sizes}, count_agents(args), "train.")
        check_counts(args)
    return args


def no_resume(argv):
    """The options of a verb that resumes no run. Raises ConfigError for --resume, which would leave its weights."""
    if typed(argv, "--resume"):
        raise ConfigError("--resume is for train. To take a run's weights, network and environment, give "
                          "--load-model-path.")
    return argv


def unused(args):
    """The settings that no part of the network takes, nor its optimizer."""
    name = args["policy"]["name"]
    idle = {"adam": set(), "muon": {"train.beta2", "train.eps"}}.get(
        args["train"]["optimizer"], {"train.beta2", "train.eps", "train.momentum"})
    if recurrent_layer(args) != "none":
        return idle
    sized = name in POLICIES or emulation.takes(load_attribute("policy.name", name, POLICIES), "hidden_size")
    return idle | {"rnn.hidden_size", "rnn.input_size", "rnn.num_layers"} | (set() if sized else {"policy.hidden_size"})


def recurrent_layer(args):
    """The rnn.name that "auto" stands for."""
    name = args["rnn"]["name"]
    return name if name != "auto" else "mingru" if args["policy"]["name"] in ("default", "auto") else "none"


EPISODE = 500  # bytes that an evaluation keeps for each episode
STEP = 40  # bytes that a trainer keeps for each step of an agent, at least


def check_counts(values):
    """ConfigError or MemoryError, before anything starts, for numbers too large for this machine."""
    train, vec, evaluation = values["train"], values["vec"], values["eval"]
    with making():
        most, why = processes.processes_at_most()
        if train["gpus"] > 1 or train["gpus"] < 1:
            gpus = torch.cuda.device_count()
            reason = f"{why} and {gpus or 'no'} GPU{'s' * (gpus > 1)}"
            most_ranks = gpus if gpus and train["device"] == "cuda" else most
            processes.check_count("train.gpus", train["gpus"], most_ranks, reason)
        processes.check_count("vec.num_threads", vec["num_threads"], most, why)
        if vec["backend"] != "ray":  # Ray's workers may be on other machines
            processes.check_count("vec.num_workers", vec["num_workers"], most, why)
        episodes = evaluation["episodes"]
        processes.check_memory(episodes * EPISODE, f"eval.episodes = {episodes:,}: to count them")
    check_sizes(train)
    for key in ("horizon", "minibatch_size"):
        if train[key] != "auto":
            processes.check_memory(train[key] * STEP, f"train.{key} = {train[key]:,}: the arrays")
    size, layers = values["policy"]["hidden_size"], values["rnn"]["num_layers"]
    widths = {"policy.hidden_size": size} if values["policy"]["name"] in POLICIES else {}
    if recurrent_layer(values) != "none":
        widths |= {f"rnn.{key}": values["rnn"][key] for key in ("hidden_size", "input_size")}
    for key, width in widths.items():
        if isinstance(width, int) and width < 1:
            raise ConfigError(f"{key} = {width}: must be 1 or more.")
    if values["policy"]["name"] in POLICIES:  # 4 arrays: weights, gradients, momentum and a copy
        processes.check_memory(4 * 4 * 3 * size * size * max(1, layers),
                               f"policy.hidden_size = {size:,} with rnn.num_layers = {layers:,}: the network")
    for key, right, what in (("port", 0 <= evaluation["port"] < 65536, "must lie within 0 and 65535"),
                             ("seconds", 0 < evaluation["seconds"] < math.inf, "must be above 0, and not inf"),
                             ("fps", evaluation["fps"] is None or 0 < evaluation["fps"] < math.inf, "must be above 0")):
        if not right:
            raise ConfigError(f"eval.{key} = {evaluation[key]}: {what}.")
    if not vec["timeout"] > 0:
        raise ConfigError(f"vec.timeout = {vec['timeout']}: must be above 0.")


def spell_out(schema, argv):
    """argv in the words that tyro takes: present names for those of other trainers, True behind the flags that stand
    alone, and values as an .ini may have them, 1e6 for 1000000 and none for None. Raises ConfigError as for an .ini."""
    spelt, kind, given = [], None, ""
    for option, following in itertools.zip_longest(argv, argv[1:], fillvalue="--"):
        name, equals, value = option.partition("=") if option.startswith("--") else ("", "", option)
        if name not in ("", "--help"):
            old = name[2:].replace("-", "_")
            own = old.partition(".")[2] in [f.name for f in dataclasses.fields(schema.get(old.partition(".")[0], Base))]
            new, flag, meant = (old if own else RENAMED.get(old, old)).partition("=")
            section, dot, key = new.rpartition(".")
            if (section or "base") not in schema:
                raise ConfigError(f"{name}: {REFUSED[section]}." if section in REFUSED else
                                  f"{name}: there is no section {section!r}: {ocean.nearest(section, schema)}.")
            types = {f.name: f.type for f in dataclasses.fields(schema[section or "base"])}
            key = translate(section or "base", key, list(types), name, schema)
            if flag:  # the old name had no value and stood for one
                equals, value = flag, meant
            given, kind, name = name, types[key], "--" + (section + dot + key).replace("_", "-")
        if kind is not None and (equals or not name):
            value, kind = str(coerce(value, kind, given)), None
        spelt.append(name + equals + value)
        if kind in (bool, bool | None, bool | Auto) and following.startswith("--"):
            spelt.append("True")
    return spelt


SIZES = ("batch_size", "num_iterations")  # may stand in [train] for horizon and total_timesteps


def take_sizes(argv):
    """(argv without the options --train.batch-size and --train.num-iterations, {"batch_size": value, ...})."""
    rest, sizes = [], {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--train.").replace("-", "_")
        if name.startswith("--train.") and key in SIZES:
            sizes[key] = value if equals else next(words, "")
        else:
            rest.append(word)
    return rest, sizes


def sizes_of(settings, agents, where=""):
    """Settings of the train section with batch_size (horizon × agents) turned into horizon, and
    num_iterations (each is one batch) into total_timesteps. where: what errors put in front of
    these names. Raises ConfigError if they do not fit together."""
    settings = dict(settings)
    batch, iterations = (settings.pop(name, None) for name in SIZES)
    horizons = [key for key in settings if RENAMED.get(f"train.{key}", f"train.{key}") == "train.horizon"
                and settings[key] not in (None, "auto")]
    if batch not in (None, "auto"):
        size = coerce(batch, int, f"{where}batch_size")
        if size < agents or size % agents:
            raise ConfigError(f"{where}batch_size = {size}: is agents × horizon, and there are {agents} agents. Take a "
                              "multiple of that, or set vec.total_agents and horizon.")
        if horizons and settings[horizons[0]] != size // agents:
            raise ConfigError(f"{where}batch_size = {size} with {agents} agents is a horizon of {size // agents}, but "
                              f"{horizons[0]} is {settings[horizons[0]]}: give one of the two, or as many agents as "
                              "fit both. A batch holds one segment an agent here.")
        settings |= {"horizon": size // agents}
        horizons = ["horizon"]
    if iterations is not None:
        count = coerce(iterations, int, f"{where}num_iterations")
        if not horizons:
            raise ConfigError(f"{where}num_iterations = {count}: an iteration is agents × horizon steps; give "
                              "horizon or batch_size as well, or total_timesteps in its place.")
        settings["total_timesteps"] = count * agents * settings[horizons[0]]
    return settings


def count_agents(args):
    """The agents of all ranks that the vec and env sections of `args` describe."""
    vec, count = args["vec"], data_parallel.connect().count if data_parallel.started() else args["train"]["gpus"]
    if vec["total_agents"] is not None:
        return vec["total_agents"] * count
    env = load_creator(args["env_name"]) or load_library(args["env_name"])
    copies, settings = split_copies(env, args["env"])
    with one_of(env, settings) as probe:
        each = probe.num_agents if isinstance(env, ocean.Library) else emulation.slots(probe)
    return vec["num_envs"] * copies * each * count


def apply_saved(argv, name, schema, values):
    """Put the settings that a run was started with over `values`, if the command line names one: all of them for
    --resume, those of the environment and the network for --load-model-path and --baseline."""
    env_name, ini = find_config(name)
    resume = typed(argv, "--resume")
    settings = saved_settings(argv, name, schema, values)
    if typed(argv, "--baseline") == "True" and not resume:
        settings = read_baseline(env_name)[1]
        for key, value in settings["env"].items() if ini.stem != Path(env_name).stem else ():
            if values["env"].get(key) != value:
                raise ConfigError(f"--baseline: the policy that ships with {env_name} was trained with env.{key} = "
                                  f"{value}, {ini.name} has {values['env'].get(key)}. Train one for it, or take "
                                  f"{env_name}.")
        take_network(schema, values, settings["policy"]["name"], settings["policy"]["name"])
    elif resume and settings is not None and not same_environment(settings.get("env_name", env_name), env_name):
        folder = settings["folder"]
        raise ConfigError(f"--resume {folder}: this is a run of {settings['env_name']}, and would go on as one of "
                          f"{env_name}. Name that environment, or take its weights alone: --load-model-path {folder}.")
    if settings is not None:
        for section in ("env", "policy", "rnn", *(("vec", "train", "base") if resume else ())):
            own = settings if section == "base" else settings.get(section, {})
            values[section] |= {key: own[key] for key in values[section]
                                if key in own and (section != "base" or key not in RUN_SETTINGS)}
        if resume:
            # Of an older run: what its backend ignored, and is an error by now.
            native = load_creator(find_config(env_name)[0]) is None and values["vec"]["backend"] in ("auto", "native")
            values["vec"] |= {"num_workers": None, "batch_size": None} if native else {"num_buffers": None}
            # Its file may lack these, because they did not exist yet.
            values["train"] |= {key: value for key, value in OFF.items() if key not in settings.get("train", {})}


def saved_settings(argv, name, schema, values):
    """The settings of the run that a command line resumes or takes weights from, and its "folder"; None without one."""
    resume = typed(argv, "--resume")
    path = resume or typed(argv, "--load-model-path")
    if path is None:
        return None
    holding = "trainer_state.pt" if resume else "best_*.pt" if path == "best" else "model_*.pt"
    folder = find_run(path, typed(argv, "--data-dir") or values["base"]["data_dir"], name, holding)
    folder = folder if folder.is_dir() else folder.parent
    saved = folder / "config.json"
    return {**read_settings(saved, schema), "folder": folder} if saved.exists() else None


def same_environment(one, other):
    """Whether two names mean one environment. A file may have moved, so only its name counts."""
    one, other = (str(name).removeprefix("puffer_") for name in (one, other))
    files = all(".py:" in name or name.endswith(".h") for name in (one, other))
    return Path(one).name == Path(other).name if files else one == other


def read_settings(path, schema):
    """The sections of a run's config.json, a dict. Its top level holds the base section's settings
    beside the other sections. ConfigError for a file that is damaged."""
    try:
        saved = json.loads(path.read_text())
        if not isinstance(saved, dict):
            raise ValueError("it holds no sections")
        for section in schema:
            if not isinstance(saved.get(section, {}), dict):
                raise ValueError(f"its section {section} is a {type(saved[section]).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged or not a run's settings ({error}). Give the settings on the command line, "
                          "with a copy of the weights in another folder.") from None
    for section, cls in schema.items():
        own = saved if section == "base" else saved.get(section, {})
        for known in dataclasses.fields(cls):
            if known.name in own and (section != "env" or known.type in (bool, int, float, str)):
                own[known.name] = coerce(own[known.name], known.type, f"{path}: {section}.{known.name}")
    sources = saved.get("sources") if isinstance(saved.get("sources"), dict) else {}
    for section in {"policy", "rnn"} & saved.keys() & schema.keys():  # a file was named from where the run was started
        name, colon, what = str(saved[section].get("name")).rpartition(":")
        parts = tuple(part for part in Path(name).parts if part not in (".", ".."))
        known = [file for file in sources if Path(file).parts[-len(parts) :] == parts]
        if name.endswith(".py") and not Path(name).exists() and len(known) == 1:
            saved[section]["name"] = known[0] + colon + what
    return saved


def parse_arguments(env_name, schema, values, argv):
    """`values` with the command line's options over them, through tyro."""
    import tyro

    sections = []
    for section, cls in schema.items():
        if section == "base":
            continue
        if section == "env":  # made at run time: there is no source from which tyro could read help
            helped = [(f.name, Annotated[f.type, tyro.conf.arg(help=f.metadata["help"])], f)
                      for f in dataclasses.fields(cls)]
            cls = dataclasses.make_dataclass("Env", helped)
        sections.append((section, cls, field(default_factory=lambda cls=cls, section=section: cls(**values[section]))))
    arguments = dataclasses.make_dataclass("Arguments", sections, bases=(Base,))
    arguments.__doc__ = f"Settings of {env_name}; defaults from configuration.py and config/."
    defaults = arguments(**values["base"])
    typed = sys.argv[1 : sys.argv.index(env_name) + 1] if env_name in sys.argv else ["train", env_name]
    parsed = tyro.cli(arguments, args=argv, default=defaults, prog=" ".join([Path(sys.argv[0]).name, *typed]),
                      config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands))
    result = dataclasses.asdict(parsed)
    return {"base": {f.name: result.pop(f.name) for f in dataclasses.fields(Base)}, **result}


@out_of_memory("vec.num_envs, env.num_envs or vec.total_agents")
def load_env(env_name, args):
    """The vectorized environment that `args` describes. Raises ConfigError for sizes that cannot work."""
    check_names(args, "vec")
    env_name, vec = find_config(env_name)[0], args["vec"]
    env = load_creator(env_name) or load_library(env_name)
    if isinstance(env, ocean.Library) and vec["backend"] not in ("auto", "native"):
        if vec["total_agents"] is not None:
            raise ConfigError("vec.total_agents is for vec.backend native; set vec.num_envs and env.num_envs instead.")
        return make_vector(env, vec["num_envs"], args, args["env"])  # each holds env.num_envs
    copies, settings = split_copies(env, args["env"])
    num_envs = vec["num_envs"] * copies
    if vec["total_agents"] is not None:
        with one_of(env, settings) as probe:
            num_envs = divide_agents(vec["total_agents"], emulation.slots(probe), env.name)
    if num_envs < 1:
        raise ConfigError(f"vec.num_envs × env.num_envs = {num_envs}: there must be 1 environment or more.")
    return make_vector(env, num_envs, args, settings)


def split_copies(env, section):
    """(environments side by side, the settings of each) of the env section. num_envs says how many,
    unless the environment has a setting num_envs of its own: then there is one, which gets it."""
    settings = dict(section)
    return 1 if "num_envs" in env.settings else settings.pop("num_envs", 1), settings


@contextlib.contextmanager
def one_of(env, settings):
    """One environment of a creator or a Library, to read its spaces and agents; then it is closed."""
    with making():
        if isinstance(env, ocean.Library):
            probe = env.create(1, settings=settings)
        else:
            made = emulation.build(env, (), settings, 0)
            probe = tensors.look(made, 0) or emulation.wrap(made)
    with contextlib.closing(probe):
        yield probe


@contextlib.contextmanager
def making():
    """Within: an error of the settings is raised as a ConfigError; one in the environment's own lines stays."""
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        if workers.own_part(error)[1]:
            raise
        hint = "; arguments with a plain default are settings (--env.NAME), others a function of yours must give"
        lacks = " missing " in str(error) and " required " in str(error)
        raise ConfigError(f"{error}{hint if lacks else ''}") from None


def choose_num_envs(library, section, steps):
    """How many environments in C, if env.num_envs is auto."""
    with one_of(library, split_copies(library, section)[1]) as probe:
        return max(1, agents_in_c(steps) // probe.num_agents)


def choose_copies(creator, section, steps):
    """(how many environments in Python if vec.num_envs is auto, agents in each)."""
    with one_of(creator, split_copies(creator, section)[1]) as probe:
        if isinstance(probe, tensors.TensorEnv):
            return 1, probe.num_agents
        agents, continuous = emulation.slots(probe), isinstance(probe.single_action_space, gymnasium.spaces.Box)
    return max(1, agents_in_python(steps, not continuous) // agents), agents


def divide_agents(total, agents, name):
    """How many environments of `agents` agents each hold `total`; ConfigError if none do."""
    if total < agents or total % agents:
        raise ConfigError(f"vec.total_agents = {total}: one {name} has {plural(agents, 'agent')}; take a multiple of "
                          "that.")
    return total // agents


def make_vector(env, num_envs, args, settings):
    """vector.make with the vec section's settings; ConfigError if they cannot work."""
    vec = args["vec"]
    device = choose_device(env, vec, args["train"])
    with making():
        make = functools.partial(
            vector.make, env, num_envs, vec["backend"], num_buffers=vec["num_buffers"], num_threads=vec["num_threads"],
            num_workers=vec["num_workers"], batch_size=vec["batch_size"], timeout=vec["timeout"],
            seed=args["train"]["seed"], env_kwargs=settings)
        try:
            return make(device=device)
        except ocean.device.NotCompiled as error:
            if vec["device"] == "cuda":
                raise ConfigError(f"vec.device = cuda: {error}") from None
            what, *lines = str(error).splitlines()
            _say_host(env, " ".join([what, *(line.strip() for line in lines if "error" in line)][:2]))
            return make()


def choose_device(env, vec, train):
    """The torch.device on which environments step, None for the host. ConfigError if vec.device =
    cuda cannot be. If auto keeps environments in C on the host of a GPU, it prints why."""
    asked, in_c = vec["device"], isinstance(env, ocean.Library) and vec["backend"] in ("auto", "native")
    if asked == "host" or (asked == "auto" and not (train["device"] == "cuda" and in_c and torch.cuda.is_available())):
        return None  # the trainer refuses cuda without a GPU
    why = ("train.device is cpu, to which each step would be copied" if train["device"] != "cuda" else
           "torch finds no GPU here" if not torch.cuda.is_available() else
           vector.why_not_on_gpu(env, vec["backend"], vec["num_buffers"]))
    if why is None:
        return torch.device("cuda", data_parallel.connect().choose_gpu())
    if asked == "cuda":
        raise ConfigError(f"vec.device = cuda: {getattr(env, 'name', 'this environment')} cannot step on a GPU: {why}. "
                          "Take auto or host.")
    _say_host(env, why)
    return None


def _say_host(env, why):
    if data_parallel.connect().rank == 0:
        print(f"vec.device: {env.name} steps on the host, because {why}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# What a trainer runs with


def check_sizes(train):
    """ConfigError for sizes with which no rule can compute anything."""
    for key in ("total_timesteps", "horizon", "minibatch_size", "replay_ratio"):
        if train[key] != "auto" and not 0 < train[key] < math.inf:
            raise ConfigError(f"train.{key} = {train[key]}: must be above 0.")
    if not 0 <= train["seed"] < 2**62:
        raise ConfigError(f"train.seed = {train['seed']}: must lie within 0 and 2 ** 62.")


def check_train(config, vecenv, policy, agents, group):
    """The train section that a trainer runs with: every setting, checked, and
    numbers in place of "auto".

    config: a dict of train's settings, by their names here or in other trainers. It may also have
    env, data_dir, run_id, settings and use_rnn. agents: of all ranks; group: data_parallel.connect().
    Raises ConfigError that says what would work.
    """
    types = {f.name: f.type for f in dataclasses.fields(Train)}
    recurrent = hasattr(policy, "initial_state")
    if config.get("use_rnn", recurrent) != recurrent:
        raise ConfigError(f"use_rnn = {config['use_rnn']}: it is {recurrent} of this policy, whether it has an "
                          "initial_state; models.LSTMWrapper and MinGRUWrapper make one recurrent.")
    extra = {"env", "data_dir", "run_id", "settings", "use_rnn"}
    c = dataclasses.asdict(Train()) | {"env": vecenv.name, "data_dir": Base.data_dir}
    for key, value in config.items():
        if key in extra:
            c[key] = value
        else:
            name = translate("train", key, list(types), f"train.{key}")
            given = name in ("optimizer", "loss", "advantage") and callable(value)  # a class or function itself
            c[name] = value if given else coerce(value, types[name], f"train.{key}")

    def need(right, key, what):
        if not right:
            raise ConfigError(f"train.{key} = {c[key]}: {what}.")

    check_sizes(c)
    if c["norm_obs"] == "auto":  # the network exists already, with a normalizer or without
        c["norm_obs"] = models.find_normalizer(policy) is not None
    c |= {name: value for name, (value, _) in decide(c, facts_of(vecenv, agents, c["total_timesteps"])).items()}

    need(c["gpus"] in (1, group.local_count), "gpus",
         f"there are {group.local_count} ranks on this machine; pufferl.py train starts them, or torchrun does")
    check_minibatches(c, agents, group.count, need)
    need(c["draw"] == "segments" or not (recurrent and policy.initial_state(1)), "draw",
         "this network has a memory, which needs steps in their order; take segments, or rnn.name none")
    check_bounds(c)
    check_own(c, need)
    return c


BOUNDS = (  # settings of the train section, what they must be, and that in words
    (("checkpoint_interval", "keep"), lambda x: x >= 1, "must be 1 or more"),
    (("learning_rate", "max_grad_norm", "vtrace_rho_clip", "vtrace_c_clip", "clip_coef", "vf_clip_coef"),
     lambda x: x > 0, "must be above 0"),
    (("gamma", "gae_lambda", "prio_beta0", "min_lr_ratio"), lambda x: 0 <= x <= 1, "must lie within 0 and 1"),
    (("momentum", "beta2"), lambda x: 0 <= x < 1, "must lie within 0 and 1, without 1"),
    (("reward_clip", "target_kl"), lambda x: x is None or x > 0, "must be above 0, or none"),
    (("cudagraphs",), lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for none"),
    (("prio_alpha", "ent_coef", "eps", "weight_decay", "vf_coef", "advantage_floor", "log_interval"), lambda x: x >= 0,
     "must be 0 or more"))


def check_bounds(settings):
    """ConfigError if one of these settings of the train section, a dict, cannot be what it is."""
    for keys, right, what in BOUNDS:
        for key in settings.keys() & keys:
            if not right(settings[key]):
                raise ConfigError(f"train.{key} = {settings[key]}: {what}.")


def check_minibatches(c, agents, ranks, need):
    """ConfigError, by check_train's `need`, if minibatches cannot be drawn from an epoch's batch."""
    span, batch = drawn_steps(c), agents * c["horizon"]
    whole = f"must be a multiple of train.horizon = {span}" if c["draw"] == "segments" else "must be 1 or more"
    need(c["minibatch_size"] % span == 0, "minibatch_size", f"{whole}, whole segments are drawn")
    need(c["minibatch_size"] <= batch, "minibatch_size", f"is more than one epoch's batch, {agents} agents × horizon "
         f"{c['horizon']} = {batch}; take a smaller one or more agents (vec.total_agents)")
    need(c["minibatch_size"] >= span * ranks, "minibatch_size",
         f"gives not one segment of {plural(span, 'step')} to each of {ranks} ranks; take a larger one")
    if (most := c["max_minibatch_size"]) is not None:
        need(most >= span and most % span == 0, "max_minibatch_size", whole)


def own_optimizer(train):
    """Whether train.optimizer names a file."""
    return train["optimizer"] not in ("muon", "adam")


def named(value):
    """A setting as it stands in config.json: an object that a script gave becomes its name."""
    if not callable(value):
        return value
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}"


def check_own(c, need):
    """ConfigError for an optimizer, a loss or an advantage of the user's that is missing or cannot be used."""
    for name in ("loss", "advantage"):
        if c[name]:
            need(callable(load_attribute(f"train.{name}", c[name])), name, "must be a function")
    if own_optimizer(c):
        own = load_attribute("train.optimizer", c["optimizer"])
        need(isinstance(own, type) and issubclass(own, torch.optim.Optimizer), "optimizer",
             f"must be a class of torch.optim.Optimizer's kind, it is a {type(own).__name__}; to change what one is "
             "made with, give a subclass whose __init__ takes (parameters, lr)")
        need(emulation.takes(own, "lr"), "optimizer",
             "is made as Class(parameters, lr=learning_rate), but takes no lr")
        need(not c["weight_decay"] or emulation.takes(own, "weight_decay"), "weight_decay",
             f"is for an optimizer that takes it, and {own.__name__} does not; leave it at 0")
        closure = inspect.signature(own.step).parameters.get("closure")
        need(closure is None or closure.default is not closure.empty, "optimizer",
             "its step must do without a closure: the gradients are there when it is called")


POLICIES = ("auto", "default", "feed-forward", "separate", "board", "impala")  # of policy.name; they need no file


def _named_weights(args):
    """(path, weights) that the settings name, or (None, None)."""
    if args.get("load_model_path") and args.get("baseline"):
        raise ConfigError("--load-model-path and --baseline both name weights to start from; give one of them.")

    def read():
        if args.get("baseline"):
            return find_baseline(args["env_name"]), read_baseline(args["env_name"])[0]
        path = find_model(args["load_model_path"], args["data_dir"], args["config_name"])
        return path, load_checkpoint(path)

    return data_parallel.connect().first(read) if args.get("load_model_path") or args.get("baseline") else (None, None)


def _resumed_weights(args):
    """The names of the weights of the run that is resumed."""
    def read():
        path = find_run(args["resume"], args["data_dir"], args["config_name"], "trainer_state.pt")
        return list(load_checkpoint(path / "trainer_state.pt" if path.is_dir() else path))

    return data_parallel.connect().first(read)


@out_of_memory("policy.hidden_size or rnn.num_layers")
def load_policy(args, vecenv, env_name=""):
    """The network that the policy and rnn sections describe, with weights from load_model_path if that is given."""
    check_names(args, "policy", "rnn")
    torch.manual_seed(args["train"]["seed"])
    name, hidden, rnn = args["policy"]["name"], args["policy"]["hidden_size"], args["rnn"]
    kind, recurrent = recurrent_layer(args), rnn["hidden_size"] or hidden
    env, (path, weights) = vecenv.driver_env, _named_weights(args)
    normalize = args["train"]["norm_obs"]
    if weights is not None:
        normalize = any("normalizer." in key for key in weights)
    elif normalize == "auto" or "train.norm_obs" in args.get("auto", ()):  # a user's own: never
        facts = facts_of(vecenv, vecenv.num_agents, args["train"]["total_timesteps"])
        normalize = name in POLICIES and wants_normalising(facts)[0]
    if kind != "none" and rnn["num_layers"] < 1:
        raise ConfigError(f"rnn.num_layers = {rnn['num_layers']}: must be 1 or more, or set rnn.name none.")
    own = name not in POLICIES
    recurrent_default = name in ("default", "auto") and kind == "mingru"
    resumed = args.get("resume") and models.wants_encoding(env, True)
    trained = _resumed_weights(args) if resumed else list(weights or ())
    encoded = name == "impala" or (
        name in ("auto", "default", "feed-forward") and models.wants_encoding(env, name == "auto", trained))
    if recurrent_default and not encoded:
        if (recurrent, rnn["input_size"] or hidden) != (hidden, hidden):
            raise ConfigError(f"rnn.hidden_size {recurrent} and rnn.input_size {rnn['input_size'] or hidden} must "
                              f"equal policy.hidden_size {hidden}: the MinGRU's highway adds input and output.")
        policy = models.MinGRUPolicy(env, hidden_size=hidden, num_layers=rnn["num_layers"], normalize=normalize)
    else:
        if kind != "none" and recurrent != hidden and not own and name != "board":
            raise ConfigError(f"rnn.hidden_size {recurrent} must equal policy.hidden_size {hidden}: the decoder reads "
                              "it.")
        if name == "board" and kind != "none":
            raise ConfigError(f"rnn.name = {kind}: policy.name board has no recurrent form; set rnn.name none.")
        policy = make_network(args["policy"], env, encoded, normalize, trained)
        if kind != "none":
            wrapper = {"mingru": models.MinGRUWrapper, "lstm": models.LSTMWrapper, "gru": models.GRUWrapper}[kind]
            policy = wrapper(env, policy, hidden_size=recurrent, num_layers=rnn["num_layers"],
                             input_size=rnn["input_size"] or hidden)
        models.find_form(policy, env.single_observation_space)
        if normalize and not encoded and models.find_normalizer(policy) is None:
            try:
                policy = models.Normalized(env, policy)
            except TypeError as error:
                raise ConfigError(str(error)) from None
    shape_actions(policy, env.single_action_space, args, weights or {})
    if weights is not None:
        put_weights(policy, weights, path)
    return policy


def shape_actions(policy, space, args, weights):
    """policy.log_std_init, and models.squash if it is wanted or if these weights were trained so;
    ConfigError if either cannot be. What "auto" chooses is written into args."""
    settings, kept = args["policy"], weights.get("action_squash")
    if settings["squash"] == "auto":
        why = None if weights else models.why_squash(space)
        settings["squash"] = "none" if why is None else "tanh"
        args.setdefault("auto", {}).update({} if why is None else {"policy.squash": why})
    first = settings["log_std_init"]
    asked = f"policy.log_std_init = {first}"
    try:
        if first != 0:
            models.begin_with(policy, first)
        asked = "policy.squash = tanh"
        if settings["squash"] == "tanh" or kept is not None:
            models.squash(policy, space)
    except TypeError as error:
        raise ConfigError(f"{asked}: {error}") from None
    if kept is not None and not torch.equal(kept, policy.action_squash):
        raise ConfigError(f"these weights were trained to act between other bounds than {space} has; take the "
                          "environment and the settings that they were trained with.")


def put_weights(policy, weights, path):
    """Weights of the file `path` into a network; raises ConfigError if they do not fit or are not finite."""
    check_kinds(weights, policy.state_dict(), path)
    masks = infinite(policy.state_dict())
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        check_shapes(weights, policy.state_dict(), path)
        raise ConfigError(f"{path} does not fit this network: {error}") from None
    check_finite(policy.state_dict(), masks, path)


def load_checkpoint(path, check=checkpoints.weights):
    """As checkpoints.load; raises ConfigError."""
    try:
        return checkpoints.load(path, check)
    except checkpoints.CheckpointError as error:
        raise ConfigError(str(error)) from None


def check_shapes(theirs, mine, path):
    """ConfigError that names the first tensor of weights that the network lacks, or has in another shape."""
    theirs, mine = ({name: tuple(getattr(tensor, "shape", ())) for name, tensor in weights.items()}
                    for weights in (theirs, mine))
    if theirs != mine:
        name = next(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
        raise ConfigError(f"{path} is of another network: {name} is {theirs.get(name, 'not in it')} there and "
                          f"{mine.get(name, 'missing')} here. Take back what was changed of its class, or of the env, "
                          "policy and rnn settings; or begin a new run.")


def check_kinds(theirs, mine, path):
    """ConfigError if weights are complex, or whole numbers if the network has others."""
    for name in theirs.keys() & mine.keys():
        pair = [one.dtype for one in (theirs[name], mine[name]) if isinstance(one, torch.Tensor)]
        if len({(dtype.is_floating_point, dtype.is_complex) for dtype in pair}) > 1:
            raise ConfigError(f"{path} does not fit this network: {name} is {pair[0]} there and {pair[1]} here.")


def infinite(weights):
    """The names of those that hold infinities, as a mask may."""
    return {name for name, tensor in weights.items() if isinstance(tensor, torch.Tensor) and tensor.isinf().any()}


def check_finite(weights, masks, path):
    """ConfigError for weights that are NaN, or infinite under another name than those in `masks`."""
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor) and (tensor.isnan().any() or (name not in masks and tensor.isinf().any())):
            bad = int((~tensor.isfinite()).sum())
            raise ConfigError(f"{path}: {bad:,} of the {tensor.numel():,} numbers in {name} are not finite, so the "
                              "network can decide nothing. Take an older checkpoint, or the best: "
                              "--load-model-path best.")


def make_network(settings, env, encoded, normalize, trained=()):
    """What policy.name stands for, without a recurrent layer of ours. settings: the policy section; trained: as in
    models.leaf_kinds."""
    name, hidden = settings["name"], settings["hidden_size"]
    own = name not in POLICIES
    try:
        if name == "impala":
            return models.Impala(env, hidden_size=hidden, normalize=normalize, trained=trained)
        if encoded:
            return models.Encoded(env, hidden_size=hidden, boards=name == "auto", normalize=normalize, trained=trained)
        ours = {"board": models.Board, "separate": models.Separate}.get(name, models.FeedForward)
        cls = load_attribute("policy.name", name, POLICIES) if own else ours
        options = {"hidden_size": hidden} if emulation.takes(cls, "hidden_size") else {}
        options |= {key: value for key, value in settings.items() if not hasattr(Policy, key)}
        try:
            inspect.signature(cls).bind(env, **options)
        except TypeError as error:
            raise ConfigError(f"policy.name = {name}: is called with ({', '.join(['env', *options])}), but takes "
                              f"{inspect.signature(cls)} ({error}); env has single_observation_space and "
                              "single_action_space. What has a default is a setting, --policy.NAME.") from None
        network = _made(cls, env, options, name) if own else cls(env, **options)
        if not isinstance(network, torch.nn.Module):
            raise ConfigError(f"policy.name = {name}: must make a torch.nn.Module, it made a "
                              f"{type(network).__name__}.")
        return network
    except TypeError as error:  # one of ours that cannot read these spaces
        raise ConfigError(str(error)) from None


def _made(cls, env, options, name):
    """A network of one's own. ConfigError, with the place in its own code, for what its __init__ raises."""
    try:
        return cls(env, **options)
    except EXPECTED:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        own = "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next)).rstrip()
        raise ConfigError(f"policy.name = {name}: this is in the network's own code:\n{own}") from error


def load_attribute(setting, name, others=()):
    """What path/to/file.py:name stands for, or the object itself that a script gave. setting: for
    the error; others: what it may be instead of a file."""
    if callable(name):
        return name
    path, _, attribute = name.removesuffix(":").partition(".py:")
    path = Path(path.removesuffix(".py") + ".py")
    whole = not attribute and name.removesuffix(":").endswith(".py")  # a file, and nothing in it
    if not path.exists() or not (attribute or whole):
        known = "".join(f"{other}, " for other in others[:-1]) + f"{others[-1]} or " if others else ""
        raise ConfigError(f"{setting} = {name}: must be {known}path/to/file.py:name of a file that exists."
                          + ("" if others else GIVEN))
    # a file is run once for all settings that name it, and anew after an edit
    with making():
        module = environments.run_file(path, f"{path.resolve()} {path.stat().st_mtime_ns}")
    if not attribute or not hasattr(module, attribute):
        names = [key for key, value in vars(module).items()
                 if callable(value) and getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{setting} = {name}: " + (f"{path} has no {attribute}" if attribute else
                          f"say what in that file, {path}:NAME") + f"; it has {', '.join(names) or 'none'}.")
    return getattr(module, attribute)


def turn_of(folder):
    """The number of the start, or of the last resume, of a run among all in its data_dir. They are
    counted, because a clock may jump and a copy has another time. 0 if its config.json has none, as
    those of before had not."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        turn = json.loads((folder / "config.json").read_text()).get("turn")
        return turn if type(turn) is int else 0
    return 0


def stem_of(env_name):
    """What the files of an environment's runs are called; a lambda's brackets would trouble a shell."""
    return Path(env_name).stem.strip("<>")


def find_run(path, data_dir, name, holding="model_*.pt"):
    """The folder of a run: `path` itself, or for "latest" and "best" the one that was started or
    resumed last (see turn_of; if that is equal, by the file's time) of what the command line calls
    `name`, environment and ini file, that holds a model (or another file)."""
    if path not in ("latest", "best"):
        return Path(path)
    if data_dir is None:
        raise ConfigError(f"{path}: with --data-dir none there are no runs to look through; name the run's folder.")

    def label(name):  # the same from any folder that a header or a file in Python is named from
        env_name, ini = find_config(name)
        return Path(env_name).name.removesuffix(".h"), ini.name

    def is_ours(folder):  # a run of squared_mine begins with squared_ too, and drone_race is another drone
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            saved = json.loads((folder / "config.json").read_text())
            return label(saved.get("config_name", saved["env_name"])) == label(name)

    stem = stem_of(find_config(name)[0])
    files = [file for file in Path(data_dir).glob(f"{stem}_*/{holding}") if is_ours(file.parent)]
    if not files:
        todo = "train one first" if path == "latest" else "it comes once episodes have ended; latest takes any model"
        raise ConfigError(f"{path}: there is no run of {name} with a {holding} in {Path(data_dir).resolve()}; {todo}.")
    return max(files, key=lambda file: (turn_of(file.parent), file.stat().st_mtime)).parent


def find_model(path, data_dir, name):
    """A model file: `path` itself, the newest in the folder `path`, "latest" or "best"."""
    pattern = "best_*.pt" if path == "best" else "model_*.pt"
    path = find_run(path, data_dir, name, pattern)
    if path.is_dir():
        path = max(path.glob(pattern), default=path / pattern)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such model file.")
    return path


def find_baseline(env_name):
    """Where the trained policy that ships with an environment in C lies: beside its header."""
    if load_creator(env_name) is not None:
        raise ConfigError(f"--baseline: trained policies ship with the environments in C only, not with {env_name}.")
    return load_library(env_name).header.parent / "baseline.safetensors"


def read_baseline(env_name):
    """(weights, metadata) of it: the env, policy and rnn sections that it was trained with, its
    score and its steps. `python pufferl.py ship` writes one."""
    from safetensors import SafetensorError, safe_open

    path = find_baseline(env_name)
    if not path.exists():
        raise ConfigError(f"--baseline: no trained policy ships with {env_name}; train one and use --load-model-path.")
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged or not a shipped policy ({error}); git has the whole one.") from None
    missing = {"env", "policy", "rnn", "score", "steps"} - about.keys()
    if missing:
        raise ConfigError(f"{path}: not a shipped policy, it lacks {', '.join(sorted(missing))}.")
    return weights, about
