"""Choose the settings that are "auto", by rules over facts about an environment.

    facts = facts_of(env, agents, steps)        # pufferl.measure adds what a step costs
    chosen = decide(args["train"], facts)       # {setting: (value, reason)} of the "auto" ones

The rules make environments learnable without tuning; bench/bench_defaults.py measures how well.
docs/learning.md gives the reason of each rule. The chosen reasons are printed when a run starts.
"""

import math
from dataclasses import dataclass

import gymnasium
import numpy as np

import emulation
import environments
from flat_spaces import (
    KINDS,
    PICTURE,
    FlatObservation,
    action_bounds,
    leaf_kind,
    shorter_side,
)


@dataclass
class Facts:
    """The facts that the rules read; None: unknown."""

    agents: int  # of all ranks
    steps: int  # train.total_timesteps
    discrete: bool  # whether actions are discrete
    spaces: list  # the spaces of the observation's fields
    native: bool = False  # whether environments are in C
    step_seconds: float | None = None  # per step of one agent, in environment and network
    learn_seconds: float | None = None  # per step, to learn from it once
    cutoff: int | None = None  # steps after which every episode is truncated, if none terminates
    is_serial_faster: bool = False  # to step in this process than to send messages to others


EPOCHS = 90  # per run with few agents, so that rollouts follow the policy closely
LONGEST_HORIZON = {True: 64, False: 256}  # steps; True here and below: discrete actions
BATCH = 2048  # steps of an epoch, for environments in Python and a short run
UPDATES = 4000  # gradient steps per run, from which the size of minibatches follows
PASSES = {True: 4, False: 8}  # the largest replay ratio
LEARNT_STEPS = 4e6  # a run learns from about this many steps, repeats included
FREE_SECONDS = 60  # time per run for learning that more passes may always take
GPU_AGENTS, GPU_WIDTH = 1024, 256  # agents in C, hidden size: from one of these on a GPU is faster
KL = {True: 0.01, False: 0.02}  # change of the policy per epoch, if target_kl is auto


def facts_of(env, agents, steps):
    """Return the Facts of one environment (vecenv.driver_env), not measured."""
    layout = FlatObservation(emulation.declared_space(env))
    return Facts(agents, steps, not isinstance(env.single_action_space, gymnasium.spaces.Box),
                 [leaf for *_, leaf in layout.leaves], hasattr(env, "library"))


def choose_copies(maker, env, vec, steps):
    """Replace "auto" in env.num_envs and vec.num_envs; returns {setting: reason}.

    maker: an ocean.Library or a creator; None without an environment. env, vec: the sections.
    """
    reasons = {}
    if env.get("num_envs") == "auto":
        agents = power_of_two(steps / (EPOCHS * LONGEST_HORIZON[True]), 16, 1024)
        with environments.sample(maker, env) as probe:
            env["num_envs"] = max(1, agents // probe.num_agents)
        reasons["env.num_envs"] = f"{steps:,} steps"
    if vec["num_envs"] == "auto":
        vec["num_envs"] = 1
        if getattr(maker, "takes_copies", False) and vec["total_agents"] is None:
            with environments.sample(maker, env) as probe:
                agents = emulation.slots(probe)
                if not getattr(probe, "gives_tensors", False):  # one object of tensors holds many
                    # Few agents give long rollouts. Runs of over a thousand epochs take more.
                    is_discrete = not isinstance(probe.single_action_space, gymnasium.spaces.Box)
                    fewest = BATCH // LONGEST_HORIZON[is_discrete]
                    most = fewest * power_of_two(steps / (1000 * BATCH), 1, 64 // fewest)
                    vec["num_envs"] = max(1, most // agents)
            reasons["vec.num_envs"] = f"{steps:,} steps, {plural(agents, 'agent')} each"
    return reasons


def gpu_reason(vecenv, args):
    """Return why a GPU trains faster than a CPU, or None if it may not (docs/gpu.md)."""
    agents, width = vecenv.num_agents, args["policy"].get("hidden_size", 0)
    if hasattr(vecenv.driver_env, "library") and agents >= GPU_AGENTS:
        return f"{agents:,} agents in C"
    if width >= GPU_WIDTH:
        return f"policy.hidden_size is {width}"
    spaces = facts_of(vecenv.driver_env, agents, 0).spaces
    if any(leaf_kind(leaf) == "image" and shorter_side(leaf) >= PICTURE for leaf in spaces):
        return "observations are pictures"
    return None


def plural(count, noun):
    """Return a count with its noun: 1 epoch, 2 epochs."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def power_of_two(x, low, high):
    """Return the largest power of two up to x, or low or high if that is outside."""
    return int(min(high, max(low, 2 ** math.floor(math.log2(max(x, 1))))))


def drawn_steps(train):
    """Return the steps of one agent that train.draw draws at once."""
    return 1 if train["draw"] == "steps" else train["horizon"]


def decide(train, facts):
    """Return {setting: (value, reason)} of the settings that are "auto".

    train: the train section, a dict. The values fit the settings that are given, which stay. The
    reason is None if a given setting decides.
    """
    chosen, c = {}, dict(train)

    def choose(name, value, reason):
        if c[name] == "auto":
            chosen[name] = value, reason
            c[name] = value

    if c["horizon"] == "auto":
        choose("horizon", *choose_horizon(c, facts))
    choose("replay_ratio", *choose_replay_ratio(facts))
    batch, ratio, span = facts.agents * c["horizon"], c["replay_ratio"], drawn_steps(c)
    size = power_of_two(min(facts.steps * ratio / UPDATES, batch / 4), min(512, batch), 8192)
    size = max(span, size // span * span)
    each = float(f"{batch * ratio / size:.3g}")
    choose("minibatch_size", size, f"{each:g} update{'s' * (each != 1)} an epoch, "
                                   f"{facts.steps * ratio / size:,.0f} in all")
    adapts, kl = c["learning_rate"] == "auto", KL[facts.discrete]
    scale = 0.005 if c["optimizer"] == "muon" else 0.0005
    follows = (f"; then what moves the policy by {kl} an epoch" if c["target_kl"] == "auto" else "")
    choose("learning_rate", float(f"{scale * math.sqrt(c['minibatch_size'] / 512):.2g}"),
           f"for minibatches of {c['minibatch_size']:,}{follows}")
    choose("target_kl", *((kl, "learning_rate is auto") if adapts else (None, None)))
    choose("gamma", *discount(facts.cutoff))
    kind = "discrete actions" if facts.discrete else "continuous actions"
    choose("ent_coef", 0.01 if facts.discrete else 0.0, kind)
    choose("prio_alpha", 0.4 if facts.discrete else 0.0, kind)
    choose("norm_obs", *wants_normalising(facts))
    choose("norm_reward", True, "so that values are near 1 for any rewards")
    for name, bound, none in (("min_advantage_std", 0.1, 0.0), ("vf_error_bound", 0.4, math.inf)):
        value = bound if facts.discrete else none
        choose(name, *((value, kind) if c["norm_reward"] else (none, None)))
    return chosen


def choose_horizon(train, facts):
    """Return (horizon, reason) that fits minibatch_size, if that is given."""
    value = power_of_two(facts.steps / (EPOCHS * facts.agents), 16 if facts.agents > 256 else 32,
                         LONGEST_HORIZON[facts.discrete])
    size = train["minibatch_size"]
    if size != "auto" and train["draw"] == "steps":  # a minibatch is at most an epoch
        value = max(value, -(-size // facts.agents))
    elif size != "auto":  # and here it has whole segments
        divisors = [n for n in range(1, size + 1) if size % n == 0 and n * facts.agents >= size]
        value = min(divisors, key=lambda n: abs(math.log(n / value)))
    epochs = plural(round(facts.steps / (value * facts.agents)), "epoch")
    return value, f"{plural(facts.agents, 'agent')}: {epochs} of {value * facts.agents:,} steps"


def choose_replay_ratio(facts):
    """Return (replay_ratio, reason): more for few steps, or if learning is cheap."""
    few = LEARNT_STEPS / facts.steps
    if facts.learn_seconds is None:
        most = max(few, 2 if facts.native else 4)
        reason = "environments in C" if facts.native else "environments in Python"
    else:
        step, learn = facts.step_seconds, facts.learn_seconds
        most, reason = max(
            (few, "each of few steps counts"),
            (FREE_SECONDS / (facts.steps * learn), "learning is quick"),
            (step / learn,
             f"a step takes {step * 1e6:.3g} us, learning from it {learn * 1e6:.3g} us"))
    return float(power_of_two(most, 1, PASSES[facts.discrete])), reason


def discount(cutoff):
    """Return (gamma, reason); cutoff: as in Facts."""
    if cutoff is None or cutoff >= 100:
        return 0.99, "looks some 100 steps ahead"
    return round(1 - 1 / max(2, cutoff), 3), f"every episode is cut off after {cutoff} steps"


def farthest(space):
    """Return the bound of a Box that is farthest from 0."""
    return max(float(abs(bound.astype(float)).max()) for bound in (space.low, space.high))


def wants_normalising(facts):
    """Return (whether to normalise observations, reason)."""
    # a linear map reads the images of environments in C
    kinds = ("numbers", "image") if facts.native else ("numbers",)
    numbers = [space for space in facts.spaces if leaf_kind(space) in kinds]
    if not numbers:
        return False, "no plain numbers are seen"
    # Small integers often name things, a cell or a kind. Larger ones saturate a network.
    boxes = [space for space in numbers if isinstance(space, gymnasium.spaces.Box)
             and (space.dtype.kind == "f" or farthest(space) > KINDS)]
    if not boxes:
        return False, "observations are small integers"
    largest = max(map(farthest, boxes))
    smallest = min(float((space.high.astype(float) - space.low).min()) for space in boxes)
    if largest <= 2 and smallest >= 0.5:
        others = len(boxes) < len(facts.spaces)
        return False, (f"observations lie within ±{largest:.3g}"
                       + ", small integers, choices and images aside" * others)
    if largest > 1e6:
        return True, "observations have no bounds"
    return True, (f"by its bounds an observation may be {largest:.3g}" if largest > 2
                  else f"the smallest range is {smallest:.2g}")


def why_squash(space):
    """Return why actions in this space want a tanh, None if the clip is as good.

    A Gaussian begins near 0 with a deviation near 1: clipped to bounds that are far from -1 and 1,
    its samples reach a small part of the range, or hardly anything but its ends.
    """
    bounds = action_bounds(space)
    if bounds is None:
        return None
    low, high = bounds
    half = (high - low) / 2
    far = (half < 0.3) | ((half > 3) & np.isfinite(half)) | (low > 1) | (high < -1)
    far &= half > 0  # a number that cannot move is left alone
    return "the bounds of actions are far from -1 and 1" if far.any() else None
