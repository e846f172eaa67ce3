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
from typing import Annotated, Literal, NamedTuple, get_args, get_origin

import auto
import emulation
import environments
import ocean
import processes
from errors import ConfigError

ROOT = Path(__file__).resolve().parent


# --------------------------------------------------------------------------------------------------
# Configuration: a dataclass a section; config/default.ini, config/ENV.ini and the command line change the defaults


Auto = Literal["auto"]
BACKENDS = "native", "serial", "multiprocessing", "ray", "package", "tensors"  # of vector.py
POLICIES = "auto", "default", "feed-forward", "separate", "board", "impala"  # of models.py; they need no file
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
    backend: Literal["auto", *BACKENDS] = "auto"
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
    bonus: Literal["none", "rnd", "count"] = "none"
    """Reward observations that are new to the run, where reward is rare (docs/metrics.md has losses/bonus). rnd: the
    error with which a network predicts a random one (Burda et al. 2018). count: 1 / sqrt(visits), for observations of
    integers (Strehl and Littman 2008)."""
    bonus_coef: float = 0.5
    """Weight of the bonus, whose discounted returns have a deviation of 1, beside the rewards."""
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
# Belong to one run: --resume does not take them over, and they are no difference between two.
RUN_SETTINGS = ("config_name", "auto", "agents", "load_model_path", "baseline", "resume", "data_dir",
                "launch", "defaults", "sources")
# What config.json has besides settings.
OF_A_RUN = ("config_name", "auto", "agents", "versions", "engine", "launch", "defaults", "turn", "sources")
# What a run did, if its file is so old that it lacks these settings.
OFF = {"norm_obs": False, "norm_reward": False, "target_kl": None, "draw": "segments",
       "advantage_floor": 0.0}
SIZES = {"batch_size": "horizon", "num_iterations": "total_timesteps"}  # may be given in their place
FLAG = object()  # the text of an option without a value

# What a number must be, in words: the settings; None and auto are always allowed.
BOUNDS = {
    "must be 1 or more": (lambda x: x >= 1, "train.checkpoint_interval train.keep train.gpus vec.num_envs env.num_envs "
                          "vec.num_threads vec.num_workers policy.hidden_size rnn.hidden_size rnn.input_size "
                          "rnn.num_layers"),
    "must be above 0": (lambda x: x > 0, "train.learning_rate train.max_grad_norm train.vtrace_rho_clip "
                        "train.vtrace_c_clip train.clip_coef train.vf_clip_coef train.total_timesteps train.horizon "
                        "train.minibatch_size vec.timeout"),
    "must be above 0, and not inf": (lambda x: 0 < x < math.inf, "train.replay_ratio eval.seconds eval.fps"),
    "must be above 0, or none": (lambda x: x > 0, "train.reward_clip train.target_kl"),
    "must be 0 or more": (lambda x: x >= 0, "train.bonus_coef train.prio_alpha train.ent_coef "
                          "train.advantage_floor train.eps "
                          "train.weight_decay train.vf_coef train.log_interval"),
    "must lie within 0 and 1": (lambda x: 0 <= x <= 1,
                                "train.gamma train.gae_lambda train.prio_beta0 train.min_lr_ratio"),
    "must lie within 0 and 1, without 1": (lambda x: 0 <= x < 1, "train.momentum train.beta2"),
    "must lie within 0 and 2 ** 62": (lambda x: 0 <= x < 2**62, "train.seed"),
    "must lie within 0 and 65535": (lambda x: 0 <= x < 65536, "eval.port"),
    "must lie within -10 and 2, deviations of 0.00005 and 7": (lambda x: -10 <= x <= 2, "policy.log_std_init"),
    "must be 1 or more, or -1 for none": (lambda x: x == -1 or x >= 1, "train.cudagraphs"),
}
BOUND_OF = {name: (is_right, what) for what, (is_right, names) in BOUNDS.items() for name in names.split()}


class Entry(NamedTuple):
    """A setting as a source gives it. place: where that is, for errors."""

    section: str
    key: str
    text: object
    place: str


class Section(dict):
    """Settings by their names here, which may be read by other trainers' names and train.use_rnn too.

    name: the section's, "" for `args`, which holds all of them. KeyError for any other name."""

    def __init__(self, values, name="", args=None):
        super().__init__(values)
        self.name, self.args = name, self if args is None else args

    def __missing__(self, key):
        name = f"{self.name}.{key}".removeprefix(".")
        if name == "train.use_rnn":
            network = self.args["policy"]["name"]
            return recurrent_layer(self.args) != "none" or (
                network not in POLICIES and hasattr(load_attribute("policy.name", network), "initial_state"))
        section, _, new = foreign_options()["renamed"][name].rpartition(".")
        return (self.args[section] if section else self.args)[new]


@functools.cache
def foreign_options():
    """Names of other trainers: {"renamed": {name: name here}, "refused": {name: what to do instead}}.

    A name is "section.key", or for the base section the key alone. NAME=VALUE: the other name is a flag,
    which gives this value to NAME. Among the refused a section's name is for all of its settings.
    """
    return json.loads((Path(__file__).parent / "config" / "foreign_options.json").read_text())


# --------------------------------------------------------------------------------------------------
# One setting: its name, its type, its bounds


def types_of(cls):
    """{name: type} of a section's settings."""
    return {f.name: f.type for f in dataclasses.fields(cls)}


def translate(section, key, schema, place):
    """(section, key, value) here of a setting that may have another trainer's name; the value is None
    but for a name that implies one. ConfigError, with nearest names in all sections of `schema`, if
    there is none."""
    known = types_of(schema[section]) if section in schema else {}
    if key in known:
        return section, key, None
    name, foreign = key if section == "base" else f"{section}.{key}", foreign_options()
    if name in foreign["renamed"]:
        new, _, value = foreign["renamed"][name].partition("=")
        return new.rpartition(".")[0] or "base", new.rpartition(".")[2], value or None
    refused = foreign["refused"].get(name) or (section not in schema and foreign["refused"].get(section))
    if refused:
        raise ConfigError(f"{place}: {refused}.")
    if section not in schema:
        raise ConfigError(f"{place}: there is no section {section!r}: {ocean.nearest(section, schema)}.")
    for cutoff in (1.0, 0.8, 0.5):
        near = difflib.get_close_matches(key, known, 3, cutoff)
        if section != "env" or cutoff > 0.5:  # an environment's own words resemble anything a little
            near = near or _in_other_sections(key, schema, cutoff, place.startswith("--"))
        if near:
            break
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"{place}: there is no such setting.{hint} There are: {', '.join(known)}.")


def _in_other_sections(key, schema, cutoff, is_option):
    """The names, such as ["train.horizon"], of settings near `key`, which may be another trainer's
    name; is_option: as the command line has them, ["--train.horizon"]."""
    names = [("" if section == "base" else f"{section}.") + name
             for section, cls in schema.items() for name in types_of(cls)]
    names = [*foreign_options()["renamed"].items(), *((name, name) for name in names),
             *((f"train.{name}", f"train.{name}") for name in SIZES)]
    near = difflib.get_close_matches(key, {old.rpartition(".")[2] for old, _ in names}, 1, cutoff)
    found = {new.partition("=")[0] for old, new in names if old.rpartition(".")[2] in near}
    return sorted("--" + name.replace("_", "-") if is_option else name for name in found)


GIVEN = (" (A run that was given the object itself is resumed by its script: PuffeRL with the same object, then "
         "load_checkpoint.)")


def coerce(value, kind, place):
    """A text, or a value from Python, as `kind`: a plain type, a Literal, or a union of them.
    ConfigError that names `place` if it is not one."""
    parts = [kind] if get_origin(kind) in (None, Literal) else get_args(kind)
    names = [name for part in parts if get_origin(part) is Literal for name in get_args(part)]
    plain = next((part for part in parts if get_origin(part) is None and part is not NoneType), None)
    lower = value.lower() if isinstance(value, str) else value
    if NoneType in parts and lower in (None, "none", ""):
        return None
    if lower in names:
        return lower
    if plain is None or (plain is str and names and ".py:" not in str(value)):
        file = ", or path/to/file.py:name" if plain else ""
        raise ConfigError(f"{place} = {value!r}: must be one of {', '.join(names)}{file}.{GIVEN if plain else ''}")
    if plain is str:
        return str(value)
    try:
        found = {"true": True, "false": False, "inf": math.inf}.get(lower) if isinstance(value, str) else value
        found = ast.literal_eval(lower) if found is None else found
        if plain is bool and found in (0, 1):
            return bool(found)
        if plain is not bool and not isinstance(found, bool) and plain(found) == found:
            return plain(found)
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        pass
    what = {int: "a whole number", float: "a number", bool: "true or false"}[plain]
    raise ConfigError(f"{place} = {value!r}: must be {what}.")


def check_bound(name, value, place):
    """ConfigError if a setting, "section.key", cannot have this value."""
    is_right, what = BOUND_OF.get(name, (None, None))
    if is_right and value not in (None, "auto") and not is_right(value):
        raise ConfigError(f"{place} = {value}: {what}.")


def convert(entry, schema):
    """(section, key, value) of an Entry: translated, of the setting's type, within its bounds."""
    section, key, text, place = entry
    if section == "train" and key in SIZES and place.startswith("--"):
        return section, key, coerce(text, int, f"train.{key}")
    section, key, implied = translate(section, key, schema, place)
    kind = types_of(schema[section])[key]
    text = implied if implied is not None else text
    if text is FLAG and bool not in (kind, *get_args(kind)):
        raise ConfigError(f"{place}: needs a value, {place} VALUE.")
    value = coerce(True if text is FLAG else text, kind, place)
    check_bound(f"{section}.{key}", value, place)
    return section, key, value


def check_names(args, *sections):
    """ConfigError for a setting in these sections of a script's `args` that does not exist; without
    sections in all but env and train, which are checked where they are used."""
    top = [(name, object, None) for name in (*SECTIONS, "env", "sweep", "env_name", *OF_A_RUN)]
    schema = {**SECTIONS, "policy": policy_section(args.get("policy", {}).get("name", Policy.name)),
              "base": dataclasses.make_dataclass("Top", top, bases=(Base,))}
    for section in sections or ("base", *(name for name in SECTIONS if name != "train")):
        for key in args if section == "base" else args.get(section, {}):
            place = f"args[{key!r}]" if section == "base" else f"{section}.{key}"
            new = translate(section, key, schema, place)[:2]
            if new != (section, key):
                raise ConfigError(f"{place}: it is {'.'.join(new).removeprefix('base.')} now.")


# --------------------------------------------------------------------------------------------------
# The sources: .ini files, the settings of a run, the command line


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


def read_ini(path, schema, sweep):
    """Yield the entries of an .ini file; its [sweep*] sections are put into `sweep` as text."""
    parser = parse_ini(path)
    for section in parser.sections():
        if section.partition(".")[0] == "sweep":
            sweep.setdefault(section, {}).update(parser[section])
        elif section not in (*schema, "solved"):  # the function solved reads that one
            raise ConfigError(f"{path} [{section}]: there is no such section: "
                              f"{ocean.nearest(section, [*schema, 'sweep'])}.")
        elif section != "solved":
            yield from (Entry(section, key, text, f"{path} [{section}] {key}") for key, text in parser[section].items()
                        if (section, key) != ("base", "env_name"))  # find_config reads it


def read_options(argv):
    """Yield the entries of a command line. A flag may stand alone; the value is the next word otherwise."""
    words = list(argv)
    while words:
        word = words.pop(0)
        place, equals, text = word.partition("=")
        if not word.startswith("--") or len(place) < 3:
            raise ConfigError(f"{word!r}: expected an option, --section.key VALUE; --help lists them.")
        if not equals:
            text = FLAG if not words or words[0].startswith("--") else words.pop(0)
        section, _, key = place[2:].replace("-", "_").rpartition(".")
        yield Entry(section or "base", key, text, place)


def saved_entries(base, env_name, schema, values):
    """Yield the entries of the run or the policy that `base` names: of the environment and the network, and for
    resume of all sections. Settings that no longer exist are left out."""
    name, ini = find_config(env_name)
    resume, path = base["resume"], base["resume"] or base["load_model_path"]
    if path is not None:
        holding = "trainer_state.pt" if resume else "best_*.pt" if path == "best" else "model_*.pt"
        folder = find_run(path, base["data_dir"], env_name, holding)
        file = (folder if folder.is_dir() else folder.parent) / "config.json"
        if not file.exists():
            return
        saved = read_settings(file)
        if resume and not same_environment(saved.get("env_name", name), name):
            raise ConfigError(f"--resume {file.parent}: this is a run of {saved['env_name']}, and would go on as one "
                              f"of {name}. Name that environment, or take its weights alone: --load-model-path "
                              f"{file.parent}.")
    elif base["baseline"]:
        file, saved = "--baseline", read_baseline(name)[1]
        for key, value in saved["env"].items() if ini.stem != Path(name).stem else ():
            if values["env"].get(key) != value:
                raise ConfigError(f"--baseline: the policy that ships with {name} was trained with env.{key} = "
                                  f"{value}, {ini.name} has {values['env'].get(key)}. Train one for it, or take "
                                  f"{name}.")
    else:
        return
    if resume:
        saved["train"] = {**OFF, **saved.get("train", {})}
        native = is_in_c(name) and saved.get("vec", {}).get("backend", "auto") in ("auto", "native")
        ignored = ("num_workers", "batch_size") if native else ("num_buffers",)  # an older run may have them
        saved["vec"] = {**saved.get("vec", {}), **dict.fromkeys(ignored)}
    network = policy_section(saved.get("policy", {}).get("name", Policy.name))
    for section in ("env", "policy", "rnn", *(("vec", "train", "base") if resume else ())):
        known = types_of(network if section == "policy" else schema[section])
        for key, value in (saved if section == "base" else saved.get(section, {})).items():
            if key in known and (section != "base" or key not in RUN_SETTINGS):
                yield Entry(section, key, value, f"{file}: {section}.{key}")


def same_environment(one, other):
    """Whether two names mean one environment. A file may have moved, so only its name counts."""
    one, other = (str(name).removeprefix("puffer_") for name in (one, other))
    files = all(".py:" in name or name.endswith(".h") for name in (one, other))
    return Path(one).name == Path(other).name if files else one == other


def read_settings(path):
    """The sections of a run's config.json, a dict. ConfigError for a file that is damaged."""
    try:
        saved = json.loads(path.read_text())
        wrong = [section for section in ("env", *SECTIONS) if not isinstance(saved.get(section, {}), dict)]
        if wrong:
            raise ValueError(f"its section {wrong[0]} is a {type(saved[wrong[0]]).__name__}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged or not a run's settings ({error}). Give the settings on the command line, "
                          "with a copy of the weights in another folder.") from None
    sources = saved.get("sources") if isinstance(saved.get("sources"), dict) else {}
    for section in {"policy", "rnn"} & saved.keys():  # a file was named from where the run was started
        name, colon, what = str(saved[section].get("name")).rpartition(":")
        parts = tuple(part for part in Path(name).parts if part not in (".", ".."))
        known = [file for file in sources if Path(file).parts[-len(parts) :] == parts]
        if name.endswith(".py") and not Path(name).exists() and len(known) == 1:
            saved[section]["name"] = known[0] + colon + what
    return saved


# --------------------------------------------------------------------------------------------------
# The environment and its section


def load_maker(name):
    """What makes an environment: a creator (gym/ID, pettingzoo/FAMILY/NAME, file.py:callable) or an
    ocean.Library, for a name in ocean/ or the path of a header."""
    creator = environments.load_creator(name)
    if creator is not None:
        return creator
    try:
        return ocean.load(name.removeprefix("puffer_"))
    except ConfigError as error:
        ini = find_config(name)[1]
        if ini.exists() and name not in ocean.names() and not name.endswith(".h"):
            parse_ini(ini)  # a fault of the whole file comes first
            raise ConfigError(f"{ini}: its [base] must say env_name = ENVIRONMENT, because {name} itself is none. "
                              f"({error})") from None
        raise


def is_in_c(name):
    """Whether a name is one of an environment in C."""
    return environments.load_creator(name) is None


def env_section(name, maker):
    """The env section as a dataclass: num_envs, and the settings that a C environment's header declares or the keyword
    arguments of one in Python that have plain defaults. No fields without a maker."""
    helps = getattr(maker, "settings_help", None)  # of one in C
    what = "Environments side by side. auto: so many that the steps asked for make 90 epochs, 1,024 agents at most."
    fields = [("num_envs", int | Auto, field(default="auto", metadata={"help": what}))] if helps is not None else []
    settings = {} if maker is None else maker.settings if fields else {"num_envs": 1, **maker.settings}
    fields += [(key, type(value), field(default=value, metadata={"help": (helps or {}).get(key, f"As {name} has it.")}))
               for key, value in settings.items()]
    return dataclasses.make_dataclass("Env", fields)


def policy_section(name):
    """The policy section as a dataclass; for a custom network also with the keywords of its class that have plain
    defaults."""
    if name in POLICIES or not (callable(name) or ".py" in name):
        return Policy
    keywords = environments.plain_defaults(load_attribute("policy.name", name, POLICIES))
    fields = [(key, type(value), field(default=value, metadata={"help": f"As {named(name)} has it."}))
              for key, value in keywords.items()
              if not hasattr(Policy, key) or (key == "hidden_size" and type(value) is int)]
    return dataclasses.make_dataclass("Policy", fields, bases=(Policy,))


# --------------------------------------------------------------------------------------------------
# All settings


def resolve(env_name, argv=()):
    """(schema, values, given, maker): each section's dataclass, its settings, the names that the command
    line gives, and what load_maker gave (None for "default"). A later source changes an earlier one: the
    dataclasses, config/default.ini, the environment's .ini, the run that a base setting names, the command
    line."""
    name, ini = find_config(env_name)
    maker = None if name == "default" else load_maker(name)
    schema = {"base": Base, "env": env_section(name, maker), **SECTIONS}
    values = {section: dataclasses.asdict(cls()) for section, cls in schema.items()} | {"sweep": {}}
    if maker is not None:  # what no .ini says
        values["train"]["total_timesteps"] = STEPS_IN_C if isinstance(maker, ocean.Library) else STEPS_IN_PYTHON
    if not getattr(maker, "takes_copies", True):
        values["vec"]["num_envs"] = 1
    values["policy"], sized_for = {}, None

    def lay(entries):
        nonlocal sized_for
        entries, found = list(entries), []
        networks = [one.text for one in entries if one[:2] in (("policy", "name"), ("base", "policy_name"))]
        if networks:
            values["policy"]["name"] = networks[-1]
        schema["policy"] = policy_section(values["policy"].get("name", Policy.name))
        for entry in entries:
            section, key, value = convert(entry, schema)
            values[section][key] = value
            found.append(f"{section}.{key}".removeprefix("base."))
            if (section, key) == ("policy", "hidden_size"):
                sized_for = networks[-1] if networks else None
        return found

    for path in (ROOT / "config" / "default.ini", ini):
        if path.exists():
            lay(read_ini(path, schema, values["sweep"]))
    defaults = {section: dict(values[section]) for section in ("env", *SECTIONS)}
    options = list(read_options(argv))
    given = lay(one for one in options if one.section == "base")
    base = values["base"]
    if base["resume"] == "auto":
        base["resume"] = None
        with contextlib.suppress(ConfigError):
            base["resume"] = str(find_run("latest", base["data_dir"], env_name, "trainer_state.pt"))
    lay(saved_entries(base, env_name, schema, values))
    given += lay(one for one in options if one.section != "base")
    network, policy = schema["policy"], values["policy"]
    has_size = any(f.name == "hidden_size" and f.metadata for f in dataclasses.fields(network))
    if has_size and sized_for not in (None, policy["name"]):  # the size is another network's
        del policy["hidden_size"]
    for found in (values, defaults):
        found["policy"] = dataclasses.asdict(network()) | {
            key: value for key, value in found["policy"].items() if key in types_of(network)}
    return schema, {**values, "env_name": name, "defaults": defaults}, set(given), maker


def load_config(env_name, argv=()):
    """The resolved configuration of an environment as nested dicts: args["train"]["learning_rate"];
    of "default" for an environment that you make yourself.

    argv: command line options, e.g. ["--train.learning-rate", "0.01"]. Raises ConfigError for a setting that does not
    exist or has the wrong type; --help prints and exits.
    """
    wants_help = {"-h", "--help"} & {*argv}
    schema, values, given, maker = resolve(env_name, [word for word in argv if word not in ("-h", "--help")])
    if wants_help:
        show_help(env_name, schema, values)
    train = values["train"]
    sizes = {key: train.pop(key) for key in SIZES if key in train}
    reasons = auto.choose_copies(maker, values["env"], values["vec"], train["total_timesteps"])
    base, name, defaults = (values.pop(key) for key in ("base", "env_name", "defaults"))
    args = Section({"config_name": env_name, "env_name": name, **base, "auto": reasons, "defaults": defaults})
    args |= {section: Section(settings, section, args) for section, settings in values.items()}
    check_used(args, given)
    check_machine(args)
    if sizes:
        known = {"horizon": train["horizon"]} if "train.horizon" in given or "batch_size" not in sizes else {}
        args["train"] |= sizes_of({**known, **sizes}, count_agents(args), "train.")
        check_machine(args)
    return args


def show_help(env_name, schema, values):
    """Print the settings with their help, through tyro, and exit."""
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
    words = sys.argv[1 : sys.argv.index(env_name) + 1] if env_name in sys.argv else ["train", env_name]
    tyro.cli(arguments, args=["--help"], default=arguments(**values["base"]),
             prog=" ".join([Path(sys.argv[0]).name, *words]),
             config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands))


def no_resume(argv):
    """The options of a verb that resumes no run. Raises ConfigError for --resume, which would leave its weights."""
    if any(word.partition("=")[0] == "--resume" for word in argv):
        raise ConfigError("--resume is for train. To take a run's weights, network and environment, give "
                          "--load-model-path.")
    return argv


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


def command(*words, script="pufferl.py"):
    """What to type in this folder for `python SCRIPT WORDS`. It has the path of the Python that
    runs now if `python` is another one, for example outside an activated virtual environment."""
    here, python = Path.cwd(), shutil.which("python")
    python = "python" if python and Path(python).parent == Path(sys.executable).parent else Path(sys.executable)
    paths = [path.relative_to(here) if isinstance(path, Path) and path.is_relative_to(here) else path
             for path in (python, ROOT / script)]
    return shlex.join(map(str, (*paths, *words)))


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


# --------------------------------------------------------------------------------------------------
# Relations between settings


def recurrent_layer(args):
    """The rnn.name that "auto" means."""
    name = args["rnn"]["name"]
    return name if name != "auto" else "mingru" if args["policy"]["name"] in ("default", "auto") else "none"


def unused(args):
    """The settings that no part of the network takes, nor its optimizer."""
    name = args["policy"]["name"]
    idle = {"adam": set(), "muon": {"train.beta2", "train.eps"}}.get(
        args["train"]["optimizer"], {"train.beta2", "train.eps", "train.momentum"})
    if recurrent_layer(args) != "none":
        return idle
    sized = name in POLICIES or emulation.takes(load_attribute("policy.name", name, POLICIES), "hidden_size")
    return idle | {"rnn.hidden_size", "rnn.input_size", "rnn.num_layers"} | (set() if sized else {"policy.hidden_size"})


def check_used(args, given):
    """ConfigError for a setting that the command line gives and nothing takes."""
    for name in sorted(unused(args) & given):
        why = {"policy": f"{named(args['policy']['name'])} has no keyword hidden_size. What its __init__ takes "
                         "with a plain default is a setting, --policy.NAME",
               "rnn": "this network has no recurrent layer of ours; it has one with --rnn.name mingru, lstm or gru",
               "train": f"{named(args['train']['optimizer'])} does not get it. muon gets momentum, adam beta2 and "
                        "eps as well; an optimizer of your own says all else in its class"}[name.partition(".")[0]]
        raise ConfigError(f"--{name.replace('_', '-')} would change nothing: {why}.")


EPISODE = 500  # bytes that an evaluation keeps for each episode
STEP = 40  # bytes that a trainer keeps for each step of an agent, at least


def check_machine(args):
    """ConfigError or MemoryError, before anything starts, for numbers too large for this machine."""
    train, vec, size, layers = args["train"], args["vec"], args["policy"]["hidden_size"], args["rnn"]["num_layers"]
    most, why = processes.processes_at_most()
    if train["gpus"] > 1:
        import torch

        gpus = torch.cuda.device_count()
        processes.check_count("train.gpus", train["gpus"], gpus if gpus and train["device"] == "cuda" else most,
                              f"{why} and {gpus or 'no'} GPU{'s' * (gpus > 1)}")
    processes.check_count("vec.num_threads", vec["num_threads"], most, why)
    if vec["backend"] != "ray":  # Ray's workers may be on other machines
        processes.check_count("vec.num_workers", vec["num_workers"], most, why)
    for name, count, octets in (("eval.episodes", args["eval"]["episodes"], EPISODE),
                                *((f"train.{key}", train[key], STEP) for key in ("horizon", "minibatch_size"))):
        if count != "auto":
            processes.check_memory(count * octets, f"{name} = {count:,}: the arrays")
    if args["policy"]["name"] in POLICIES:  # 4 arrays: weights, gradients, momentum and a copy
        processes.check_memory(4 * 4 * 3 * size * size * max(1, layers),
                               f"policy.hidden_size = {size:,} with rnn.num_layers = {layers:,}: the network")


def train_settings(config):
    """The train section of a script's dict of settings, by their names here or in other trainers: every
    setting, translated, converted and checked. An optimizer, a loss or an advantage may be the object itself."""
    schema, settings = {"train": Train, "base": Base}, dataclasses.asdict(Train())
    for key, value in config.items():
        if key in ("optimizer", "loss", "advantage") and callable(value):
            settings[key] = value
            continue
        section, name, found = convert(Entry("train", key, value, f"train.{key}"), {**SECTIONS, **schema})
        if section != "train":
            raise ConfigError(f"train.{key}: it is {section}.{name} now.".replace("base.", ""))
        settings[name] = found
    return settings


def sizes_of(settings, agents, where=""):
    """Settings of the train section with batch_size (horizon × agents) turned into horizon, and
    num_iterations (each is one batch) into total_timesteps. where: what errors put in front of
    these names. Raises ConfigError if they do not fit together."""
    settings = dict(settings)
    batch, iterations = (settings.pop(name, None) for name in SIZES)
    if batch in (None, "auto") and iterations is None:
        return settings
    names = {"horizon", *(old.removeprefix("train.") for old, new in foreign_options()["renamed"].items()
                          if new == "train.horizon")}
    horizons = [key for key in settings if key in names and settings[key] not in (None, "auto")]
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
    import data_parallel

    vec, count = args["vec"], data_parallel.connect().count if data_parallel.started() else args["train"]["gpus"]
    if vec["total_agents"] is not None:
        return vec["total_agents"] * count
    maker = load_maker(args["env_name"])
    with environments.sample(maker, args["env"]) as probe:
        each = probe.num_agents if isinstance(maker, ocean.Library) else emulation.slots(probe)
    return vec["num_envs"] * environments.split_copies(maker, args["env"])[0] * each * count


# --------------------------------------------------------------------------------------------------
# What a setting names: an object in a file, a run, a model


def named(value):
    """A setting as it stands in config.json: an object that a script gave becomes its name."""
    if not callable(value):
        return value
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}"


def own_optimizer(train):
    """Whether train.optimizer is custom: a file's class, or a class itself."""
    return train["optimizer"] not in ("muon", "adam")


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
    maker = load_maker(env_name)
    if not isinstance(maker, ocean.Library):
        raise ConfigError(f"--baseline: trained policies ship with the environments in C only, not with {env_name}.")
    return maker.header.parent / "baseline.safetensors"


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

