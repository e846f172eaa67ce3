"""Read the settings: dataclasses, .ini files and the command line.

    args = load_config("breakout", ["--train.learning-rate", "0.01"])    # nested dicts
    args["train"]["horizon"]

The dataclasses below have the defaults. config/ENV.ini changes them, then the command line.
(config/default.ini comes before both; it has the ranges of sweeps.) To add a setting, add a field
with its docstring: it appears in --help and is known in each .ini file. An unknown key or a wrong
type is a ConfigError that names the file, the key and the nearest known key.
"""

import ast
import configparser
import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import json
import math
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import auto
import emulation
import environments
import ocean
from errors import ConfigError, require

ROOT = Path(__file__).resolve().parent


# --------------------------------------------------------------------------------------------------
# The settings: a dataclass per section


Auto = Literal["auto"]
BACKENDS = "native", "serial", "multiprocessing", "ray", "package", "tensors"  # of vector.py
# the networks of models.py, which need no file
POLICIES = "auto", "default", "feed-forward", "separate", "board", "impala"
# train.total_timesteps of an environment without an .ini
STEPS_IN_C, STEPS_IN_PYTHON = 20_000_000, 1_000_000


@dataclass
class Base:
    load_model_path: str | None = None
    """Start from these weights: a model file, a run's folder, latest (the last run here) or best
    (its best model)."""
    baseline: bool = False
    """Start from the small trained policy that ships with the environment,
    ocean/ENV/ENV.safetensors."""
    resume: str | None = None
    """Continue a run in its folder: the folder, latest, or (on the command line) auto, which is
    latest if there is a run and a new run if not."""
    logger: Literal["tensorboard", "none"] = "tensorboard"
    """Where metrics go besides metrics.jsonl in the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases as well; WANDB_API_KEY or `wandb login` identifies you."""
    project: str = "pufferl"
    """Project of Weights & Biases."""
    entity: str | None = None
    """The project's owner in Weights & Biases (default: you)."""
    group: str | None = None
    """Group of the run in Weights & Biases."""
    tag: str | None = None
    """Label of the run in Weights & Biases."""
    data_dir: str | None = "experiments"
    """Folder of the runs: checkpoints, logs, resolved settings. none: nothing is written."""


@dataclass
class Env:
    num_envs: int = 1
    """Environments side by side."""


@dataclass
class EnvInC:
    num_envs: int | Auto = "auto"
    """Environments side by side. auto: as many as give 90 epochs, 1,024 agents at most."""


@dataclass
class Vec:
    backend: Literal["auto", *BACKENDS] = "auto"
    """native: environments in C. serial: one after the other in this process. multiprocessing and
    ray: in workers. package: the vector environment of a Gymnasium id's own package. tensors: one
    object of torch or JAX that holds many environments. auto: native for C, tensors if a reset
    returns them, package for ALE and CartPole, serial if one process would step all, else
    multiprocessing."""
    num_envs: int | Auto = "auto"
    """Copies of the env section's num_envs: vec.num_envs × env.num_envs environments run in all.
    auto: 1 if they are in C or one object holds many; otherwise as many as make 32 agents (8 if
    actions are continuous), and more in a long run."""
    num_workers: int | None = None
    """Processes or Ray actors that step environments in Python (default: the physical cores, or a
    divisor of the environments below that)."""
    batch_size: int | None = None
    """Environments whose workers the policy waits for before it acts on them (default: all)."""
    timeout: float = 60.0
    """Seconds after which an environment in Python that does not answer is an error; in this
    process (serial) its traceback is printed. inf: no limit."""
    total_agents: int | None = None
    """Agents in all, in place of vec.num_envs × env.num_envs; a multiple of the agents of one
    environment."""
    num_buffers: int | None = None
    """native: ranges of environments that step together (default: as many as make the data of one
    fit a core's cache)."""
    num_threads: int | None = None
    """Threads that step environments and run the network (default: the physical cores)."""
    device: Literal["auto", "host", "cuda"] = "auto"
    """native: where environments step. cuda: on the policy's GPU, one thread for each environment;
    the header's struct must hold plain data. auto: with train.device cuda, the faster of both by
    sixteen steps; host if the header cannot step on a GPU, with the reason."""


@dataclass
class Policy:
    name: str = "auto"
    """auto: an encoder that fits the observations, then the MinGRU. The encoder is a linear map for
    plain numbers, convolutions for images and small boards of integers, one-hot for choices; a Dict
    or Tuple has one for each field (models.MultiInputPolicy). default: the same without boards.
    feed-forward: default without a recurrent layer. separate: policy and value apart, for robots
    (models.Separate). board: 3 × 3 convolutions for games in which each cell is an action
    (models.Board). impala: residual convolutions for images (models.Impala).
    path/to/file.py:Class: a custom network."""
    hidden_size: int = 128
    """Width of the network."""
    squash: Literal["auto", "none", "tanh"] = "auto"
    """How continuous actions are kept within their bounds. none: the environment clips the
    Gaussian's sample to them. tanh: each number with two finite bounds goes through a tanh scaled
    to them; any other is clipped, and begins at its bound (models.squash). auto: tanh if the bounds
    are far from -1 and 1. Weights that were trained with tanh always use it."""
    log_std_init: float = 0.0
    """Continuous actions: log of the initial deviation of the Gaussian; -2 explores gently."""


@dataclass
class Rnn:
    name: Literal["auto", "mingru", "lstm", "gru", "none"] = "auto"
    """auto: mingru for policy.name auto and default, none for any other."""
    hidden_size: int | None = None
    """Width of the recurrent layers (default: policy.hidden_size)."""
    input_size: int | None = None
    """Width of the encoder's output, which the recurrent layers read (default:
    policy.hidden_size)."""
    num_layers: int = 1
    """Recurrent layers."""


@dataclass
class Train:
    total_timesteps: int = 10_000_000
    """Environment steps of all agents of all ranks together; rounded up to whole epochs of agents ×
    horizon steps. An environment without an .ini has 20,000,000 if it is in C, 1,000,000 if not."""
    learning_rate: float | Auto = "auto"
    """Step size at the start. Muon's steps have unit scale, so this is about ten times Adam's."""
    anneal_lr: bool = True
    """Cosine from learning_rate to min_lr_ratio of it (Loshchilov and Hutter 2017)."""
    min_lr_ratio: float = 0.0
    """Fraction of learning_rate that is left at the end."""
    target_kl: float | Auto | None = "auto"
    """Multiply the scheduled learning rate by 0.1 to 10, but never above four times the setting, so
    that an epoch's updates move the policy by this KL divergence on average, until the schedule has
    nearly ended. With norm_reward and small advantages, which are mostly noise, by less. none: the
    rate is the schedule's. auto: 0.01, or 0.02 with continuous actions, if learning_rate is auto,
    else none."""
    gamma: float | Auto = "auto"
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of GAE: 0 trusts the value function alone, 1 the returns (Schulman et al. 2016)."""
    horizon: int | Auto = "auto"
    """Steps of one rollout; an agent's steps in it are one segment."""
    batch_size: int | Auto | None = None
    """Steps of an epoch in place of horizon: agents × horizon, as in CleanRL."""
    minibatch_size: int | Auto = "auto"
    """Steps of one update, a multiple of horizon if draw is segments, divided among the ranks if
    there are several."""
    draw: Literal["segments", "steps"] = "segments"
    """What a minibatch is made of. segments: whole rollouts of agents, whose advantages are
    recomputed after each minibatch. steps: single steps, for a network without memory; advantages
    stay as the rollout left them, as in CleanRL and Stable-Baselines3, so V-trace corrects
    nothing."""
    max_minibatch_size: int | None = None
    """Steps that go through the network at once (on a CPU: a custom network); gradients add up
    (default: on a GPU the whole; on a CPU parts that its caches may hold, or the whole if
    train.loss or a batch norm needs it)."""
    replay_ratio: float | Auto = "auto"
    """How often each step is learnt from on average: minibatches an epoch = replay_ratio · batch /
    minibatch_size."""
    clip_coef: float = 0.2
    """PPO: how far the probability ratio may leave 1."""
    min_advantage_std: float | Auto = "auto"
    """Advantages are divided by their standard deviation in the minibatch, or by this if it is
    larger: where no reward occurs they are only errors of the value function, which must not weigh
    as much as a reward. auto: 0.1 (standard deviations of the return) with norm_reward and
    discrete actions, else 0."""
    vf_coef: float = 2.0
    """Weight of the value loss."""
    vf_clip_coef: float = 0.2
    """How far a value may leave its old one in an update; inf for no clipping."""
    vf_error_bound: float | Auto = "auto"
    """If the value errors of a minibatch have a larger standard deviation, its value loss is
    divided by (deviation / bound)^1.5, so that a rare reward leaves the policy its share of the
    clipped gradient. auto: 0.4 (standard deviations of the return) with norm_reward and
    discrete actions, else inf."""
    ent_coef: float | Auto = "auto"
    """Weight of the entropy bonus."""
    anneal_ent_coef: bool = False
    """Let ent_coef fall to zero linearly over the training."""
    max_grad_norm: float = 1.5
    """Global gradient norm above which gradients are scaled down."""
    optimizer: Literal["muon", "adam"] | str = "muon"
    """muon: orthogonalises each matrix's momentum (Jordan et al. 2024). adam: torch's AdamW.
    path/to/file.py:Class: a custom torch.optim.Optimizer, made as Class(parameters,
    lr=learning_rate, weight_decay=weight_decay), without weight_decay if Class does not name it
    and it is 0. The schedule sets the rate."""
    loss: str | None = None
    """path/to/file.py:function, a custom term of the loss. It gets the minibatch, whose fields are
    a table in docs/recipes.md. Its result, a tensor (), is added to the loss, differentiated by
    autograd, and logged as losses/custom_function_loss. A script may give the function itself here,
    and a class as optimizer."""
    advantage: str | None = None
    """path/to/file.py:function in place of the advantage, with the arguments and result of
    ppo.py's: (args, storage, rewards, offset, values, bootstraps, ratios) to advantages (T, N).
    args: the train section; storage: terminals and truncations (T, N), valid (T + 1, N). values
    are (T + 1, N), offset is (1,), the others are (T, N). Each agent's must depend on that agent
    alone."""
    momentum: float = 0.95
    """Muon's Nesterov momentum, and Adam's beta1."""
    beta2: float = 0.999
    """Adam's second moment; only with optimizer adam."""
    eps: float = 1e-8
    """Adam's denominator; only with optimizer adam."""
    weight_decay: float = 0.0
    """Decoupled weight decay: an update scales the weights by 1 - learning rate · weight_decay."""
    vtrace_rho_clip: float = 1.0
    """V-trace: upper bound of the importance weight of a temporal difference (Espeholt et al.
    2018)."""
    vtrace_c_clip: float = 1.0
    """V-trace: upper bound of the weight with which later differences count for earlier steps."""
    prio_alpha: float | Auto = "auto"
    """How much segments with large advantages are preferred; 0: not at all (Schaul et al. 2016)."""
    prio_beta0: float = 0.2
    """How much that preference is corrected at the start, in the policy loss only; it rises to 1
    over the training."""
    norm_obs: bool | Auto = "auto"
    """Normalise each element of the observations by its moments (models.Normalizer). Rollouts that
    begin within the first 1,024 steps, or the first twentieth of the run if that is less, are only
    measured."""
    norm_reward: bool | Auto = "auto"
    """Divide rewards by the deviation of recent discounted returns; values are learnt relative to
    their mean if that is far from 0 (models.RewardScale). Logs keep the true rewards."""
    reward_clip: float | None = None
    """Clip rewards to ± this in the advantage, after norm_reward has divided them (the logs keep
    the true ones); none by default. For Atari's ±1 also set --train.norm-reward False."""
    bonus: Literal["none", "rnd", "count"] = "none"
    """Reward observations that are new to the run, where reward is rare (docs/metrics.md has
    losses/bonus). rnd: the error with which a network predicts a random one (Burda et al. 2018).
    count: 1 / sqrt(visits), for observations of integers (Strehl and Littman 2008)."""
    bonus_coef: float = 0.5
    """Weight of the bonus, whose discounted returns have a deviation of 1, beside the rewards."""
    state: Literal["carry", "zero"] = "carry"
    """Recurrent state at the start of a rollout: that of the last rollout (carry), or zero."""
    seed: int = 0
    """Seed of the weights, the environments, the actions and the draws. A script seeds what it
    makes itself: torch.manual_seed(seed) before the network, make(..., seed=seed)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network runs and learns. auto: the train command takes a GPU for environments in C
    with 1,024 agents, for pictures and for policy.hidden_size 256 or more; else, in sweeps, scripts
    and with several ranks, the CPU (docs/gpu.md has what a GPU needs)."""
    engine: Literal["auto", "compiled", "fused", "autograd", "graphs"] = "auto"
    """How the network acts and learns (engines.py). autograd: any network, by its own forward (on a
    GPU in CUDA graphs, called graphs). compiled (on a CPU, also feed-forward and separate) and
    fused (on a GPU): a hand-written implementation of the default network. auto: one of these if
    it implements the network as it is, else autograd."""
    cudagraphs: int = 2
    """On a GPU: after how many epochs the rollout's steps and the minibatch are captured as CUDA
    graphs; -1: never."""
    gpus: int = 1
    """Processes that train together on this machine: one a GPU with train.device cuda, else sharing
    the cores; for several machines there is torchrun (docs/scale.md)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products. All else stays float32; on a GPU float32 products are computed
    as TF32. bfloat16 is worth it on a processor that has it (AVX-512 BF16, AMX): Breakout trains
    1.5 times as fast, Atari twice. On others the default network gives the same results, not
    faster; most other networks stay in float32, and print so."""
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
    """Episodes that count. Each environment plays equally many, so that short episodes are not
    favoured."""
    deterministic: bool = False
    """Play the most likely action in place of drawing one."""
    max_steps: int = 100_000
    """Steps after which an episode that does not end is an error."""
    video: str | None = None
    """Write an episode to out.mp4 or out.gif, or a frame from the middle of it to out.png; needs no
    display."""
    terminal: bool = False
    """Show the policy playing in the terminal."""
    web: bool = False
    """Show the policy playing on a page at 127.0.0.1, also through an ssh tunnel."""
    open: bool = False
    """Open the page in a browser, if there is a display."""
    window: bool | None = None
    """Show the policy playing in a window (default: if there is a display and the output is a
    terminal)."""
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


@dataclass
class Solved:
    """Hold what counts as solved: the section [solved] of an .ini.

    score or perf, one of them: a mean of it that is enough. steps, seconds: after which training
    got there, with seed 0, the shipped settings and two cores (None: not measured).
    """

    score: float | None = None
    perf: float | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def metric(self):
        """Return (statistic, how much of it is enough), e.g. ("score", 800.0)."""
        return ("score", self.score) if self.perf is None else ("perf", self.perf)


SECTIONS = {"vec": Vec, "policy": Policy, "rnn": Rnn, "train": Train, "eval": Eval,
            "profile": Profile}
# What config.json has besides settings, with its type. A type with None may be missing.
RUN_FACTS = {"env_name": str, "config_name": str | None, "auto": dict | None, "agents": int | None,
             "versions": dict | None, "engine": dict | None, "turn": int, "defaults": dict | None,
             "env_file": str | None}
# Settings of one run, which --resume leaves as they are.
RUN_SETTINGS = {"load_model_path", "baseline", "resume", "data_dir"}

# What a number must be: least, greatest, the settings. None and auto are always allowed. ABOVE_0 is
# no denormal, because torch.set_flush_denormal makes the processor compare these as 0.
ABOVE_0, BELOW_1, FINITE = sys.float_info.min, math.nextafter(1, 0), sys.float_info.max
BOUNDS = {
    "must be 1 or more": (
        1, math.inf,
        "train.checkpoint_interval train.keep train.gpus vec.num_envs env.num_envs "
        "vec.num_threads vec.num_workers sweep.workers sweep.attempts sweep.downsample"),
    "must lie within 1 and 65536": (
        1, 65536, "policy.hidden_size rnn.hidden_size rnn.input_size"),
    "must lie within 1 and 1000": (1, 1000, "rnn.num_layers"),
    "must be above 0": (
        ABOVE_0, math.inf,
        "train.learning_rate train.max_grad_norm train.vtrace_rho_clip train.vtrace_c_clip "
        "train.clip_coef train.vf_clip_coef train.vf_error_bound train.total_timesteps "
        "train.horizon train.batch_size train.minibatch_size vec.timeout "
        "sweep.max_suggestion_cost sweep.cpus"),
    "must be above 0, and not inf": (ABOVE_0, FINITE, "train.replay_ratio eval.seconds eval.fps"),
    "must be above 0, or none": (ABOVE_0, math.inf, "train.reward_clip train.target_kl"),
    "must be 0 or more": (
        0, math.inf,
        "train.bonus_coef train.prio_alpha train.ent_coef train.eps train.weight_decay "
        "train.vf_coef train.min_advantage_std train.log_interval sweep.num_trials "
        "sweep.gpus sweep.random_trials"),
    "must lie within 0 and 1": (
        0, 1, "train.gamma train.gae_lambda train.prio_beta0 train.min_lr_ratio "
        "sweep.early_stop"),
    "must lie within 0 and 1, without 1": (0, BELOW_1, "train.momentum train.beta2"),
    "must lie within 0 and 2 ** 62": (0, 2**62 - 1, "train.seed"),
    "must lie within 0 and 65535": (0, 65535, "eval.port"),
    "must be 10 million or less": (-math.inf, 1e7, "eval.episodes"),
    "must lie within -10 and 2, deviations of 0.00005 and 7": (-10, 2, "policy.log_std_init"),
    "must be 1 or more, or -1 for none": (1, math.inf, "train.cudagraphs"),
}
EXEMPT = {"train.cudagraphs": -1}
BOUND_OF = {name: (low, high, text) for text, (low, high, names) in BOUNDS.items()
            for name in names.split()}
NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class Entry(NamedTuple):
    """Hold a setting as a source gives it; place: where that is, for errors."""

    section: str
    key: str
    value: object
    place: str


@functools.cache
def foreign_options():
    """Read the option names of other trainers.

    Returns {"renamed": {name: name here}, "refused": {name: advice}}. A name is "section.key", or
    for the base section the key alone. NAME=VALUE: the other name is a flag, which gives this value
    to NAME. Among the refused a section's name means all its settings.
    """
    return json.loads((Path(__file__).parent / "config" / "foreign_options.json").read_text("utf-8"))


# --------------------------------------------------------------------------------------------------
# One setting: its name, its type, its bounds


def full_name(section, key):
    """Return a setting's name on the command line, without the base section."""
    return key if section == "base" else f"{section}.{key}"


def translate(section, key, schema, place):
    """Return (section, key, value) of a setting in this or another trainer's name.

    The value is None except for a name that implies one. Raises ConfigError, with the nearest name
    in all sections of `schema`, if there is no such setting.
    """
    known = get_type_hints(schema[section]) if section in schema else schema
    if section in schema and key in known:
        return section, key, None
    name, options = full_name(section, key), foreign_options()
    if name in options["renamed"]:
        new, _, value = options["renamed"][name].partition("=")
        section, _, key = new.rpartition(".")
        return section or "base", key, value or None
    advice = options["refused"].get(
        name, options["refused"].get(section) if section not in schema else None)
    if advice is None:
        advice = (f"there is no such setting.{_suggest(key, schema, place)} There are: "
                  f"{', '.join(known)}")
    raise ConfigError(f"{place}: {advice}.")


def _suggest(key, schema, place):
    """Return a question with the settings nearest to a key, if there are any."""
    names = [full_name(section, known) for section, cls in schema.items()
             for known in get_type_hints(cls)]
    meanings = [*zip(names, names, strict=True), *foreign_options()["renamed"].items()]
    near = difflib.get_close_matches(key, [name.rpartition(".")[2] for name, _ in meanings], 1)
    options = {new.partition("=")[0] for name, new in meanings if name.rpartition(".")[2] in near}
    if place.startswith("--"):
        options = {"--" + name.replace("_", "-") for name in options}
    return f" Did you mean {' or '.join(sorted(options))}?" if options else ""


def coerce(value, kind, place):
    """Convert a text, or a value from Python, to a setting's type.

    kind: a plain type, a Literal or a union of them. Raises ConfigError that names `place`.
    """
    parts = [kind] if get_origin(kind) in (None, Literal) else get_args(kind)
    words = [word for part in parts for word in get_args(part)]
    plain = next((part for part in parts if part in (int, float, bool, str)), None)
    lower = value.lower() if isinstance(value, str) else value
    if lower in words:
        return lower
    absent = (None, "none", "") if plain is str else (None, "none", "auto", "")
    if NoneType in parts and lower in absent:
        return None
    is_text = isinstance(value, str) and (not words or ".py:" in value)
    if plain is str and (is_text or callable(value)):
        return value
    with contextlib.suppress(ValueError, TypeError, SyntaxError, OverflowError, RecursionError,
                             MemoryError):
        number = {"true": True, "false": False, "inf": math.inf}.get(lower, lower)
        number = ast.literal_eval(number) if isinstance(number, str) else number
        if plain not in (None, str) and plain(number) == number and (
                plain is bool or not isinstance(number, bool)):
            return plain(number)
    noun = " or ".join([NOUNS[plain], *words]) if plain else ""
    if words and plain in (None, str):
        noun = f"one of {', '.join(words)}" + (", or path/to/file.py:name" if plain else "")
    raise ConfigError(f"{place} = {value!r}: must be {noun}.")


def convert(entry, schema):
    """Return (section, key, value) of an Entry.

    The name is this trainer's, and the value has the setting's type. Raises ConfigError outside of
    the setting's bounds.
    """
    section, key, implied = translate(entry.section, entry.key, schema, entry.place)
    value = coerce(implied or entry.value, get_type_hints(schema[section])[key], entry.place)
    name = f"{section}.{key}"
    low, high, text = BOUND_OF.get(name, (-math.inf, math.inf, ""))
    is_bounded = text and value not in (None, "auto", EXEMPT.get(name))  # -1 may stand for none
    require(not is_bounded or low <= value <= high, f"{entry.place} = {value}: {text}.")
    return section, key, value


def convert_section(section, settings, schema=None):
    """Return a script's settings of a section, converted, with their names here.

    settings: by their names here or in other trainers; an optimizer, a loss or an advantage may be
    the object itself. schema: each section's dataclass, without one the plain ones. Raises
    ConfigError for a name, a type or bounds that are wrong.
    """
    converted, schema = {}, schema or {"base": Base, **SECTIONS}
    for name, value in settings.items():
        place = f"{section}.{name}"
        new_section, key, converted_value = convert(Entry(section, name, value, place), schema)
        require(new_section == section, f"{place}: it is {full_name(new_section, key)} now.")
        converted[key] = converted_value
    return converted


def check_names(args):
    """Check and convert the settings in a script's `args`: names, types and bounds.

    The sections env and train are checked where they are used. Raises ConfigError.
    """
    network = policy_section(args.get("policy", {}).get("name", Policy.name))
    schema = {"base": Base, **SECTIONS, "policy": network}
    for key in args.keys() - {*SECTIONS, "env", "sweep", *RUN_FACTS}:
        *new, _ = translate("base", key, schema, f"args[{key!r}]")
        require(new == ["base", key], f"args[{key!r}]: it is {full_name(*new)} now.")
    for section in (SECTIONS.keys() - {"train"}) & args.keys():
        args[section] = convert_section(section, args[section], schema)


# --------------------------------------------------------------------------------------------------
# The sources: .ini files, the settings of a run, the command line


def find_config(env_name):
    """Return (environment, .ini file) of a name on the command line.

    An .ini may say which environments it is for: `[base] env_name = gym/CartPole-v1 gym/Cart*`.
    The file's name then means the first of these. The longest pattern that fits is taken. The .ini
    of a header may be beside it; the one of an included environment is not for another header.
    """
    name = env_name.removeprefix("puffer_")
    stem = Path(name).stem if name.endswith(".h") else name
    ini, matches = ROOT / "config" / f"{stem}.ini", []
    if name.endswith(".h"):
        header = Path(name).resolve()
        beside = header.with_suffix(".ini")
        if beside.exists() or (stem in ocean.names() and header.parent.parent != ocean.FOLDER):
            return name, beside
    for path in sorted((ROOT / "config").glob("*.ini")):
        names = parse_ini(path, "env_name").get("base", "env_name", fallback="").split()
        if names and path == ini:
            return names[0], path
        matches += [(len(pattern), path) for pattern in names if fnmatch.fnmatchcase(name, pattern)]
    return name, ini if ini.exists() or not matches else max(matches)[1]


def parse_ini(path, word=""):
    """Parse an .ini file.

    One that does not contain `word` gives an empty parser, which is faster. Raises ConfigError
    with file and line.
    """
    parser = configparser.ConfigParser(inline_comment_prefixes="#", interpolation=None)
    try:
        if word in (text := path.read_text(encoding="utf-8")):
            parser.read_string(text, source=str(path))
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from None
    return parser


def read_ini(path, sweep):
    """Yield the entries of an .ini file; [sweep*] goes into `sweep` as text."""
    for section, texts in parse_ini(path).items():
        if section.partition(".")[0] == "sweep":
            sweep.setdefault(section, {}).update(texts)
        elif section != "solved":
            yield from (Entry(section, key, text, f"{path} [{section}] {key}")
                        for key, text in texts.items()
                        if (section, key) != ("base", "env_name"))  # find_config reads it


def read_options(argv):
    """Yield the entries of a command line; a lone option is a flag, True."""
    words = list(argv)
    while words:
        word = words.pop(0)
        place, equals, value = word.partition("=")
        require(word.startswith("--"),
                f"{word!r}: expected an option, --section.key VALUE; --help lists them.")
        if not equals:
            value = True if not words or words[0].startswith("--") else words.pop(0)
        section, _, key = place[2:].replace("-", "_").rpartition(".")
        yield Entry(section or "base", key, value, place)


def saved_entries(base, env_name):
    """Yield the entries of the run or the shipped policy that a base setting names.

    For load_model_path and baseline these are of the sections env, policy and rnn, for resume also
    of vec, train and base.
    """
    name, ini = find_config(env_name)
    resume, sections = base["resume"], ["env", "policy", "rnn"]
    if resume or base["load_model_path"]:
        path = find_run(resume or base["load_model_path"], base["data_dir"], env_name,
                        "trainer_state.pt" if resume else None)
        folder = path if path.is_dir() else path.parent
        file = folder / "config.json"
        saved = read_settings(folder) if file.exists() else {}
    else:
        file, saved = "--baseline", read_baseline(name)[1]
        require(ini.stem == Path(name).stem,
                f"--baseline: the policy that ships with {name} was trained without {ini.name}. "
                f"Use {name}, or train one.")
    if resume and saved:
        other = saved["env_name"]
        require(identify(other)[0] == identify(name)[0],
                f"--resume {path}: this is a run of {other}, not of {name}. Name {other}, or use "
                f"the weights alone: --load-model-path {path}.")
        saved["base"] = {key: saved[key] for key in saved.keys() - RUN_SETTINGS}
        sections += ["vec", "train", "base"]
    elif base["load_model_path"] and saved and identify(saved["env_name"])[0] != identify(name)[0]:
        sections.remove("env")  # of another environment, whose weights alone are taken
    for section in ("train", "vec"):
        if f"{section}.device" in (saved.get("auto") or ()):
            saved[section].pop("device")  # this machine may have no GPU
    for section in sections:
        for key, value in saved.get(section, {}).items():
            yield Entry(section, key, value, f"{file}: {section}.{key}")


def read_settings(folder):
    """Return the config.json of a run's folder. Raises ConfigError for damage."""
    path, sections = Path(folder) / "config.json", {name: {} for name in ("env", *SECTIONS)}
    try:
        saved = {"turn": 0, **sections, **json.loads(path.read_text())}
        check_form(saved, {**sections, **RUN_FACTS,
                           "train": {"total_timesteps": int | float | None}})
        return saved
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged or not a run's settings ({type(error).__name__}: "
                          f"{error}). Weights in another folder load without it.") from None


def check_form(items, form, name="it"):
    """Raise ValueError if what a file holds under `name` does not have a form.

    form: {name: type, or what a dict there holds}. A type with None may be missing; ... means every
    name.
    """
    if not isinstance(items, dict):
        raise ValueError(f"{name} is a {type(items).__name__}, not a dict")
    for key, kind in dict.fromkeys(items, form[...]).items() if ... in form else form.items():
        if isinstance(kind, dict):
            check_form(items.get(key), kind, key)
        elif not isinstance(items.get(key), kind):
            is_there = f"holds a {type(items[key]).__name__} as" if key in items else "lacks"
            raise ValueError(f"{name} {is_there} {key}")


def saved_runs(data_dir, pattern="*"):
    """Yield (folder, settings) of the runs in a folder whose settings are whole."""
    for path in Path(data_dir).glob(f"{pattern}/config.json"):
        with contextlib.suppress(ConfigError):
            yield path.parent, read_settings(path.parent)


# --------------------------------------------------------------------------------------------------
# The environment, the network and their sections


def make_section(base, settings, helps, owner):
    """Make a section's dataclass: `base` and an owner's settings, {name: default}."""
    fields = [(key, type(value), field(default=value, metadata={"owner": owner}))
              for key, value in settings.items()]
    section = dataclasses.make_dataclass(base.__name__, fields, bases=(base,))
    section.__doc__ = "".join(f"\n:param {key}: {helps.get(key, f'As {owner} has it.')}"
                              for key in settings)  # tyro reads this
    return section


def env_section(name, maker):
    """Make the env section's dataclass; no fields without a maker.

    It has num_envs, and the settings that a C header declares or the keyword arguments of an
    environment in Python that have plain defaults.
    """
    if maker is None:
        return dataclasses.make_dataclass("Env", [])
    return make_section(EnvInC if isinstance(maker, ocean.Library) else Env, maker.settings,
                        getattr(maker, "settings_help", {}), name)


def policy_section(name):
    """Make the policy section's dataclass.

    A custom network adds the keywords of its class that have plain defaults.
    """
    if not callable(name) and ".py" not in str(name):
        return Policy
    keywords = environments.plain_defaults(load_attribute("policy.name", name, POLICIES))
    custom = {key: value for key, value in keywords.items()
              if not hasattr(Policy, key) or (key == "hidden_size" and type(value) is int)}
    return make_section(Policy, custom, {}, named(name))


# --------------------------------------------------------------------------------------------------
# All settings


def resolve(env_name, argv=()):
    """Return (schema, values, names, maker) of an environment and a command line.

    schema: each section's dataclass; values: each section's settings; names: those that the command
    line gives; maker: of find_maker, None for "default". Each source changes those before it: the
    dataclasses, config/default.ini, the environment's .ini, the run that a base setting names, the
    command line.
    """
    name, ini = find_config(env_name)
    maker = None if name == "default" else environments.find_maker(name)
    schema = {"base": Base, "env": env_section(name, maker), **SECTIONS}
    values = {section: dataclasses.asdict(cls()) for section, cls in schema.items()}
    values |= {"sweep": {}, "env_name": name}
    if maker is not None:
        values["train"]["total_timesteps"] = (
            STEPS_IN_C if isinstance(maker, ocean.Library) else STEPS_IN_PYTHON)

    def apply(entries, ignore_unknown=False):
        entries, names = list(entries), set()
        networks = [entry.value for entry in entries
                    if entry[:2] in (("policy", "name"), ("base", "policy_name"))]
        if networks and networks[-1] != values["policy"]["name"]:  # it decides what can be set
            # what both networks have stays, unless the new one has its own default (metadata)
            before, policy = dataclasses.asdict(schema["policy"]()), values["policy"]
            schema["policy"] = policy_section(networks[-1])
            values["policy"] = {
                f.name: f.default if f.metadata or policy[f.name] == before[f.name]
                else policy[f.name] for f in dataclasses.fields(schema["policy"])}
        for entry in entries:
            if not ignore_unknown or entry.key in get_type_hints(schema[entry.section]):
                section, key, value = convert(entry, schema)
                values[section][key] = value
                names.add(full_name(section, key))
        return names

    for path in (ROOT / "config" / "default.ini", ini):
        if path.exists():
            apply(read_ini(path, values["sweep"]))
    values["defaults"] = {section: dict(values[section]) for section in ("env", *SECTIONS)}
    options, base = list(read_options(argv)), values["base"]
    names = apply(entry for entry in options if entry.section == "base")  # which may name a run
    if base["resume"] == "auto":
        base["resume"] = None
        with contextlib.suppress(ConfigError):
            base["resume"] = str(find_run("latest", base["data_dir"], env_name, "trainer_state.pt"))
    if base["resume"] or base["load_model_path"] or base["baseline"]:
        apply(saved_entries(base, env_name), ignore_unknown=True)  # of an older version, perhaps
    names |= apply(entry for entry in options if entry[:2] != ("base", "resume"))
    return schema, values, names, maker


def load_config(env_name, argv=()):
    """Return the resolved settings of an environment as nested dicts.

    env_name: "default" for an environment that a script makes itself. argv: command line options,
    such as ["--train.learning-rate", "0.01"]; --help prints and exits. Raises ConfigError for a
    setting that does not exist or has the wrong type, and for an option that would change nothing.
    """
    require(isinstance(env_name, str), f"env_name: expected a name, got {env_name}. Give a class to "
            "make() and PuffeRL() (docs/scripts.md).")
    options = [word for word in argv if word not in ("-h", "--help")]
    schema, values, names, maker = resolve(env_name, options)
    if len(options) < len(argv):
        show_help(env_name, schema, values)
    train = values["train"]
    if "train.batch_size" in names and "train.horizon" not in names:
        train["horizon"] = "auto"  # batch_size gives it
    args = {"config_name": env_name, **values.pop("base"), **values}
    args["env_file"] = find_file(values["env_name"])
    args["auto"] = auto.choose_copies(maker, args["env"], args["vec"], train["total_timesteps"])
    in_c = {"vec.timeout": "an environment in C"} if isinstance(maker, ocean.Library) else {}
    for name, owner in {**unused(args), **in_c}.items():
        require(name not in names, f"--{name.replace('_', '-')} would change nothing: {owner} does "
                "not use it. Leave it out.")
    return args


def show_help(env_name, schema, values):
    """Print the settings with their help, through tyro, and exit."""
    import tyro

    sections = [(section, cls, field(default_factory=functools.partial(cls, **values[section])))
                for section, cls in schema.items() if section != "base"]
    arguments = dataclasses.make_dataclass("Arguments", sections, bases=(Base,))
    arguments.__doc__ = f"Settings of {env_name}; defaults from configuration.py and config/."
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    tyro.cli(arguments, args=["--help"], default=arguments(**values["base"]),
             prog=" ".join([Path(sys.argv[0]).name, *words[:2]]),
             config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands))


def command(*words, script="pufferl.py"):
    """Return what to type in this folder for `python SCRIPT WORDS`.

    It has the path of the Python that runs now if `python` is another one, for example outside an
    activated virtual environment.
    """
    here, python = Path.cwd(), shutil.which("python") or ""
    is_same = Path(python).parent == Path(sys.executable).parent
    paths = [path.relative_to(here) if path.is_relative_to(here) else path
             for path in (Path("python" if is_same else sys.executable), ROOT / script)]
    return shlex.join(map(str, (*paths, *words)))


def solved(env_name, path=None):
    """Return the Solved of an environment, None if its .ini (`path`) has none."""
    path = path or find_config(env_name)[1]
    parser = parse_ini(path, "[solved]") if path.exists() else {}
    if "solved" not in parser:
        return None
    return Solved(**{key: convert(Entry("solved", key, text, f"{path} [solved] {key}"),
                                  {"solved": Solved})[2]
                     for key, text in parser["solved"].items()})


# --------------------------------------------------------------------------------------------------
# Relations between settings


def recurrent_layer(args):
    """Return the recurrent layer that rnn.name means."""
    name, policy = args["rnn"]["name"], args["policy"]["name"]
    automatic = "mingru" if policy in ("default", "auto") else "none"
    return automatic if name == "auto" else name


def unused(args):
    """Return {setting: what does not use it} of those that would change nothing."""
    policy, optimizer = args["policy"]["name"], args["train"]["optimizer"]
    names = {"adam": (), "muon": ("train.beta2", "train.eps")}.get(
        optimizer, ("train.beta2", "train.eps", "train.momentum"))
    owners = dict.fromkeys(names, f"train.optimizer {optimizer}")
    if recurrent_layer(args) == "none":
        owners |= dict.fromkeys(("rnn.hidden_size", "rnn.input_size", "rnn.num_layers"),
                                "a network without rnn.name")
        if policy not in POLICIES and not emulation.takes(
                load_attribute("policy.name", policy, POLICIES), "hidden_size"):
            owners["policy.hidden_size"] = f"policy.name {policy}"
    return owners


def replace_batch_size(train, agents):
    """Return the train section with horizon in place of batch_size.

    agents: of all ranks. Raises ConfigError if the sizes do not fit together.
    """
    batch, horizon = train["batch_size"], train["horizon"]
    if batch in (None, "auto"):
        return {**train, "batch_size": None}
    require(batch % agents == 0 and horizon in ("auto", batch // agents),
            f"train.batch_size = {batch}: must be agents × horizon, {agents} × "
            f"{'a whole number' if horizon == 'auto' else horizon}. Leave out horizon, or set "
            "vec.total_agents.")
    return {**train, "batch_size": None, "horizon": batch // agents}


# --------------------------------------------------------------------------------------------------
# What a setting names: an object in a file, a run, a model


MODELS = {"latest": "model_*.pt", "best": "best_*.pt"}


def named(value):
    """Return a setting as config.json has it: an object becomes its name."""
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}" if callable(value) else value


def has_custom_optimizer(train):
    """Tell whether train.optimizer is custom: a file's class, or a class itself."""
    return train["optimizer"] not in ("muon", "adam")


def load_attribute(setting, name, others=()):
    """Return what path/to/file.py:name means, or an object as it is.

    setting: for the error; others: what it may be instead of a file.
    """
    if callable(name):
        return name
    path, suffix, attribute = str(name).rpartition(".py")
    path = Path(path + suffix)
    require(suffix and path.is_file(), f"{setting} = {name}: must be {', '.join([*others, ''])}"
            "path/to/file.py:name of a file that exists.")
    # a file runs once for all settings that name it, and again after an edit
    module_name = f"{path.resolve()} {path.stat().st_mtime_ns}"
    return environments.find_callable(path, attribute.removeprefix(":"), module_name, f"{setting}: ")


def stem_of(env_name):
    """Return the stem of the names of an environment's runs."""
    # <> of a lambda; a shell would read them
    return Path(env_name.removeprefix("puffer_")).stem.strip("<>")


def identify(name):
    """Return (environment, .ini) of a name, the same from any folder."""
    env_name, ini = find_config(name)
    file_name = Path(env_name).name.removesuffix(".h")
    return file_name if find_file(env_name) else env_name, ini.name


def find_file(env_name):
    """Return the path of an environment's file, None for a name that is no file's."""
    path, suffix, _ = env_name.partition(".py:")
    is_file = suffix or path.endswith(".h")
    return str(Path(path + suffix.removesuffix(":")).resolve()) if is_file else None


def find_run(path, data_dir, name, pattern=None):
    """Return the folder of the last run for latest and best, else `path` as it is.

    The last one was started or resumed last, and has a file that fits the pattern (default: a
    model's). Starts are counted (`turn`), because a clock may jump and a copy has another time.
    name: the environment on the command line. A run of another file with that name does not count;
    if its file is gone, it was moved.
    """
    if path not in ("latest", "best"):
        return Path(path)
    pattern = pattern or MODELS[path]
    require(data_dir is not None, f"{path}: with --data-dir none there are no runs to look "
            "through; name the run's folder.")
    env_name, identity = find_config(name)[0], identify(name)
    env_file = find_file(env_name)
    runs = [(saved["turn"], file.stat().st_mtime, folder)
            for folder, saved in saved_runs(data_dir, f"{stem_of(env_name)}_*")
            if identify(saved.get("config_name") or saved["env_name"]) == identity
            and (saved.get("env_file") in (None, env_file)
                 or not Path(saved["env_file"]).exists())
            for file in folder.glob(pattern)]
    advice = ("Train one, or wait for its first checkpoint." if path == "latest" else
              "It comes once episodes have ended; latest is any model.")
    require(runs, f"{path}: there is no run of {name} with a {pattern} in "
            f"{Path(data_dir).resolve()}. {advice}")
    return max(runs)[2]


def find_model(path, data_dir, name):
    """Return a model file. path: it, a run's folder (the newest), "latest" or "best"."""
    pattern = MODELS.get(path, MODELS["latest"])
    path = find_run(path, data_dir, name)
    return max(path.glob(pattern), default=path / pattern) if path.is_dir() else path


def find_baseline(env_name):
    """Return where the trained policy of an environment in C is, by its header."""
    maker = environments.find_maker(env_name)
    require(isinstance(maker, ocean.Library),
            f"--baseline: {env_name} is not in C, and only those ship with a policy.")
    return maker.header.with_suffix(".safetensors")


def read_baseline(env_name):
    """Return (weights, metadata) of the policy that ships with an environment.

    `python pufferl.py ship` writes it. metadata: the env, policy and rnn sections that it was
    trained with, its score and its steps.
    """
    from safetensors import SafetensorError, safe_open

    path = find_baseline(env_name)
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {name: json.loads(text) for name, text in file.metadata().items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--baseline: {path} is missing or damaged ({error}). Train a policy and "
                          "use --load-model-path.") from None
    return weights, metadata
