"""What "auto" means: rules that choose settings from what is known of an environment, so that one that nobody has tuned
is learnt from without a setting. bench/bench_defaults.py measures how well.

    facts = facts_of(vecenv, agents, steps)          # what can be seen of it; pufferl.measure adds what a step costs
    chosen = decide(args["train"], facts)            # {setting: (value, reason)} of those that are "auto" in there

docs/learning.md says what each rule does and why. The reasons are printed when a run starts.
"""

import math
from dataclasses import dataclass

import gymnasium

import models
import vector


@dataclass
class Facts:
    """What the rules read; None: not known."""

    agents: int  # of all ranks
    steps: int  # train.total_timesteps
    discrete: bool  # whether actions are discrete
    spaces: list  # the spaces of the observation's fields
    native: bool = False  # whether environments are in C
    step_seconds: float | None = None  # that one agent's step takes, in environment and network
    learn_seconds: float | None = None  # that learning from one step once takes
    cut: int | None = None  # steps after which every episode is cut off, if none ends by itself
    here: bool = False  # True if stepping here is quicker than sending messages to other processes


EPOCHS = 90  # a run's, if its agents are few enough: so no rollout is made by a much older policy
LONGEST_HORIZON = {True: 64, False: 256}  # steps; True here and below: with discrete actions
BATCH = 2048  # steps of an epoch, if environments are in Python and the run is not long
UPDATES = 4000  # gradient steps in a run, which minibatches are sized for
PASSES = {True: 4, False: 8}  # the largest replay ratio
FEW_STEPS = 4e6  # passes are chosen so that a run learns from about so many steps, repeats counted
FREE_SECONDS = 60  # time for learning, in the whole run, that may always be spent on more passes
KL = {True: 0.01, False: 0.02}  # how far an epoch moves the policy, if target_kl is auto


def facts_of(vecenv, agents, steps):
    """The Facts of a vectorized environment, before anything is measured."""
    return Facts(agents, steps, vecenv.action_heads is not None, models.seen_spaces(vecenv),
                 isinstance(vecenv, vector.Native))


def plural(count, what):
    """1 epoch, 2 epochs."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def power_of_two(x, low, high):
    """The largest power of two up to x, within low and high."""
    return int(min(high, max(low, 2 ** math.floor(math.log2(max(x, 1))))))


def agents_in_c(steps):
    """How many agents a run of environments in C has."""
    return power_of_two(steps / (EPOCHS * LONGEST_HORIZON[True]), 16, 1024)


def agents_in_python(steps, discrete):
    """The same of environments in Python. Few of them give long rollouts and many epochs; with more than a thousand
    epochs there are more."""
    wanted = BATCH // LONGEST_HORIZON[discrete]
    return wanted * power_of_two(steps / (1000 * BATCH), 1, 64 // wanted)


def drawn_steps(train):
    """How many steps of one agent train.draw draws at once."""
    return 1 if train["draw"] == "steps" else train["horizon"]


def decide(train, facts):
    """{setting: (value, reason)} of the settings that are "auto" in the train section `train`, a dict. They are
    chosen to fit the settings that have a value there; the reason is None if one of these leaves no choice."""
    chosen, c = {}, dict(train)

    def choose(name, rule):
        if c[name] == "auto":
            chosen[name] = rule()
            c[name] = chosen[name][0]

    def horizon():
        value = power_of_two(facts.steps / (EPOCHS * facts.agents), 16 if facts.agents > 256 else 32,
                             LONGEST_HORIZON[facts.discrete])
        size = c["minibatch_size"]
        if size != "auto" and c["draw"] == "steps":  # it must not be larger than an epoch
            value = max(value, -(-size // facts.agents))
        elif size != "auto":  # nor that, and it must be made of whole segments
            divisors = [n for n in range(1, size + 1) if size % n == 0 and n * facts.agents >= size]
            value = min(divisors, key=lambda n: abs(math.log(n / value)))
        epochs = facts.steps / (value * facts.agents)
        return value, (f"{plural(facts.agents, 'agent')}: {plural(round(epochs), 'epoch')} of "
                       f"{value * facts.agents:,} steps")

    def replay_ratio():
        few = FEW_STEPS / facts.steps
        if facts.learn_seconds is None:
            value = float(power_of_two(max(few, 2 if facts.native else 4), 1, PASSES[facts.discrete]))
            return value, f"environments in {'C' if facts.native else 'Python'}"
        waiting, free = facts.step_seconds / facts.learn_seconds, FREE_SECONDS / (facts.steps * facts.learn_seconds)
        step, learn = (f"{seconds * 1e6:.3g} us" for seconds in (facts.step_seconds, facts.learn_seconds))
        most, why = max((few, "each of few steps counts"), (free, "learning is quick"),
                        (waiting, f"a step takes {step}, learning from it {learn}"))
        return float(power_of_two(most, 1, PASSES[facts.discrete])), why

    def minibatch_size():
        batch = facts.agents * c["horizon"]
        size = power_of_two(min(facts.steps * c["replay_ratio"] / UPDATES, batch / 4), min(512, batch), 8192)
        size = max(drawn_steps(c), size // drawn_steps(c) * drawn_steps(c))
        updates = facts.steps * c["replay_ratio"] / size
        each = float(f"{batch * c['replay_ratio'] / size:.3g}")
        return size, f"{each:g} update{'s' * (each != 1)} an epoch, {updates:,.0f} in all"

    def learning_rate():
        value = 0.005 * math.sqrt(c["minibatch_size"] / 512) * (1 if c["optimizer"] == "muon" else 0.1)
        value = float(f"{value:.2g}")
        return value, f"for minibatches of {c['minibatch_size']:,}" + (
            f"; then what moves the policy by {kl} an epoch" if c["target_kl"] == "auto" else "")

    adapts, kl = c["learning_rate"] == "auto", KL[facts.discrete]
    choose("horizon", horizon)
    choose("replay_ratio", replay_ratio)
    choose("minibatch_size", minibatch_size)
    choose("learning_rate", learning_rate)
    choose("target_kl", lambda: (kl, "learning_rate is auto") if adapts else (None, None))
    choose("gamma", lambda: discount(facts.cut))
    choose("ent_coef", lambda: (0.01, "discrete actions") if facts.discrete else (0.0, "continuous actions"))
    choose("prio_alpha", lambda: (0.4, "discrete actions") if facts.discrete else (0.0, "continuous actions"))
    choose("norm_obs", lambda: wants_normalising(facts))
    choose("norm_reward", lambda: (True, "so that values are near 1 whatever an environment pays"))
    scaled = adapts and c["norm_reward"] is True and facts.discrete
    why = None if not adapts or not c["norm_reward"] else f"{'discrete' if scaled else 'continuous'} actions"
    choose("advantage_floor", lambda: (1.0 if scaled else 0.0, why))
    choose("vf_coef", lambda: (0.2 if scaled else 2.0, why))
    return chosen


def discount(cut):
    """(gamma, why); cut: as in Facts."""
    if cut is None or cut >= 100:
        return 0.99, "looks some 100 steps ahead"
    return round(1 - 1 / max(2, cut), 3), f"every episode is cut off after {cut} steps"


def farthest(space):
    """The bound of a Box that is farthest from 0."""
    return max(float(abs(bound.astype(float)).max()) for bound in (space.low, space.high))


def wants_normalising(facts):
    """(whether to normalise observations, why)."""
    seen = ("numbers", "image") if facts.native else ("numbers",)  # what is seen in C, one linear map reads
    numbers = [space for space in facts.spaces if models.leaf_kind(space) in seen]
    if not numbers:
        return False, "no plain numbers are seen"
    if any(isinstance(space, gymnasium.spaces.Text) for space in numbers):
        return True, "characters are seen as numbers"
    # Small integers often name things, a cell or a kind. In larger ones a network drowns.
    boxes = [space for space in numbers if isinstance(space, gymnasium.spaces.Box)
             and (space.dtype.kind == "f" or farthest(space) > models.KINDS)]
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
                  else f"some move within {smallest:.2g}")
