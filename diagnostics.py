"""Explain from the metrics of a run why it does not learn, and what to try.

    warnings = Warnings(settings)                      # the train section, a dict
    for sentence in warnings.update(step, metrics):    # each entry of the log, in order
        print(sentence)                                # each warning comes once
    python pufferl.py diagnose RUN                     # the same of a finished run, with its curves

A detector is a method whose name begins with `warn_`. It reads the entries so far and returns a
sentence or None. It must be silent on a run that learns, because false alarms make users ignore
warnings. To add one, write the method and plant its failure in tests/test_diagnostics.py.
docs/metrics.md describes the metrics; the health metrics (`vital/`) are measured here.
"""

import contextlib
import json
import math

import numpy as np

PATIENCE = 5  # entries for which a state must last
RANDOM_EPISODES = 100  # a run's first episodes, which approximate random play
BEGUN = 0.1  # share of the run after which a policy could have moved
SAMPLE = 1 << 12  # numbers of a rollout's observations that are sampled
AGENTS = slice(0, 16)  # agents whose observations and actions are sampled
# An episode should end within AHEAD times the discount's horizon, in steps of each agent, bounded
# by LONG.
LONG, AHEAD = (5_000, 20_000), 50
VAST = 1000.0  # observations should be of the order of 1
VAST_VALUE_LOSS = 1000.0  # the policy's loss is below 1


def vital(observations, rewards, valid, terminals, truncations, actions=None, bounds=None,
          choices=False):
    """Return the health metrics of one rollout.

    observations, valid: (T or T + 1, N, ...); the others (T, N), numpy arrays. actions: (T, N, A),
    used with their bounds (flat_spaces.action_bounds). Of observations and actions the first AGENTS
    suffice. choices: whether observations contain indices, whose size has no meaning.
    """
    T, size = len(rewards), max(1, observations[0, 0].size)
    valid = valid[:T].view(bool)
    numbers = slice(0, None, max(1, 16 * size // SAMPLE))  # of large observations
    rows = slice(0, None, max(1, 256 * len(range(size)[numbers]) // SAMPLE))
    is_sampled = valid[rows, AGENTS]
    metrics = {"vital/terminated": float(terminals.sum(where=valid)),
               "vital/truncated": float(truncations.sum(where=valid))}
    flat = observations[:T, AGENTS].reshape(*valid[:, AGENTS].shape, -1)[rows, :, numbers]
    sample = flat[is_sampled]
    if len(sample) > 1 and sample.dtype.kind in "fiub":
        low, high = sample.min(0).astype(np.float64), sample.max(0).astype(np.float64)
        metrics["vital/observation_constant"] = float((low == high).mean())
        if not choices:
            metrics["vital/observation_max"] = float(max(-low.min(), high.max()))
    if bounds is not None and len(sample):
        (low, high), nearest = bounds, np.clip(0.0, *bounds)
        clipped = np.clip(actions[:T][rows, AGENTS][is_sampled], low, high)
        is_free = (high > low) & (np.isfinite(low) | np.isfinite(high))
        span = np.where(np.isfinite(high - low), high - low, np.maximum(1.0, np.abs(nearest)))
        if is_free.any():
            reach = np.ptp(clipped, 0)[is_free] / span[is_free]
            metrics["vital/action_reach"] = float(reach.min())
    low, high = (rewards.min(where=valid, initial=np.inf),
                 rewards.max(where=valid, initial=-np.inf))
    if low <= high:
        metrics |= {"vital/reward_min": float(low), "vital/reward_max": float(high)}
    return metrics


def find_nan(weights, valid, rollout, update):
    """Return (order, description) of the first number that is not finite.

    (inf, a sentence about the gradient's norm) if there is none. Weights come first, then the
    rollout's tensors (T or T + 1, N, ...) step by step, where `valid` (T + 1, N) is True, then the
    update's. (A reward of an inactive step shows in the advantages.) rollout, update: (name, tensor
    or None, cause), in the order of a step.
    """
    if not weights.isfinite().all():
        return -1, "weights not finite (after too large an update, or written from outside)"
    faults = [(math.inf, "gradient norm not finite (lower train.learning_rate)")]
    for order, (name, tensor, cause) in enumerate(rollout):
        if tensor is None or not tensor.is_floating_point():
            continue
        # what float32 does not hold is infinite in the network
        is_finite = tensor.float().isfinite().reshape(*tensor.shape[:2], -1).all(2)
        is_finite |= ~valid[: len(tensor)].to(tensor.device)
        if not is_finite.all():
            step, agent = (~is_finite).nonzero()[0].tolist()
            faults.append((step + order / len(rollout),
                           f"{name} not finite, first at step {step} of the rollout, of agent "
                           f"{agent} ({cause})"))
    for order, (name, tensor, cause) in enumerate(update, len(valid)):
        if not tensor.isfinite().all():
            faults.append((order, f"{name} not finite ({cause})"))
    return min(faults)


class Warnings:
    """The detectors, with what they need to know of a run.

    settings: the train section; a detector is silent if a setting that it needs is missing. agents:
    of all ranks. reported: {detector: (step, sentence)}.
    """

    def __init__(self, settings, agents=None):
        self.settings = settings
        self.agents = agents
        self.step = 0
        self.first = None
        self.history = {}
        self.reported = {}
        self.outside = ""  # the first observed number outside of its space, in words

    def update(self, step, metrics):
        """Return the new sentences after one more entry of the log."""
        new, self.step = [], step
        self.first = step if self.first is None else self.first  # not 0 in a resumed run
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.history.setdefault(name, []).append(value)
        for name in sorted(dir(self)):
            if (name.startswith("warn_") and name not in self.reported
                    and (sentence := getattr(self, name)())):
                self.reported[name] = step, sentence
                new.append(sentence)
        return new

    # -- what detectors use ------------------------------------------------------------------------

    @property
    def progress(self):
        """Return the share of the run that is done."""
        return min(1.0, self.step / self.settings.get("total_timesteps", math.inf))

    @property
    def steps(self):
        """Return the steps of each agent since the first entry."""
        return (self.step - (self.first or 0)) / (self.agents or math.inf)

    @property
    def is_late_start(self):
        """Return whether the first entry is of a trained policy, as after a resume."""
        return (self.first or 0) > BEGUN * self.settings.get("total_timesteps", math.inf)

    @property
    def has_ended(self):
        """Return whether any episode has ended."""
        counts = ("environment/n", "vital/terminated", "vital/truncated")
        return any(any(self.values(name)) for name in counts)

    def values(self, name):
        """Return all finite numbers that were logged under a name, in order."""
        return self.history.get(name, [])

    def lasting(self, name, condition, count=PATIENCE):
        """Return whether the last `count` values under a name all fulfil a condition."""
        last = self.values(name)[-count:]
        return len(last) == count and all(map(condition, last))

    def returns_moved(self):
        """Return whether the returns change by more than chance, or are too few.

        They do if the means of three entries span more than four standard deviations of the last
        quarter, or if that quarter's mean is far from the first of them.
        """
        returns = np.array(self.values("environment/episode_return"))
        if len(returns) < 2 * PATIENCE:
            return True
        smooth = np.convolve(returns, np.ones(3) / 3, "valid")
        last = returns[-max(PATIENCE, len(returns) // 4) :]
        chance, small = np.std(last), 1e-3 * abs(np.mean(last))
        rise = abs(np.mean(last) - smooth[0])
        return bool(rise > 2 * chance / 3**0.5 + small or np.ptp(smooth) > 4 * chance + small)

    def returns_rise(self):
        """Return whether the last returns are better on average than as many before."""
        returns = self.values("environment/episode_return")[-2 * PATIENCE :]
        return (len(returns) == 2 * PATIENCE
                and np.mean(returns[PATIENCE:]) > np.mean(returns[:PATIENCE]))

    @property
    def random_play(self):
        """Return the mean return of a run's first episodes, or None.

        They are RANDOM_EPISODES, or three per agent because the shortest end first. None without
        them, after a resume, or if the entropy fell meanwhile.
        """
        counts, returns = self.values("environment/n"), self.values("environment/episode_return")
        entropies = self.values("losses/entropy")
        episodes = max(RANDOM_EPISODES, 3 * (self.agents or 0))
        entries = 1 + np.searchsorted(np.cumsum(counts), episodes)
        if self.is_late_start or entries > min(len(counts), len(returns)) or not entropies:
            return None
        is_uniform = min(entropies[:entries]) >= 0.8 * entropies[0] > 0
        return np.average(returns[:entries], weights=counts[:entries]) if is_uniform else None

    def standard_error(self, count):
        """Return the standard error of the mean of the last `count` returns."""
        return float(np.std(self.values("environment/episode_return")[-count:])) / count**0.5

    def below_random_play(self):
        """Return random play's mean return if the last returns are below it, else None."""
        last = self.values("environment/episode_return")[-2 * PATIENCE :]
        level = self.random_play
        if level is None or len(last) < 2 * PATIENCE:
            return None
        limit = level - 3 * self.standard_error(2 * PATIENCE) - 0.02 * abs(level)
        return level if np.mean(last) < limit else None

    @property
    def minibatches(self):
        """Return the updates an epoch, or None if a setting is unknown."""
        c = self.settings
        names = "horizon", "minibatch_size", "replay_ratio"
        if self.agents is None or not all(isinstance(c.get(name), int | float) for name in names):
            return None
        return c["replay_ratio"] * self.agents * c["horizon"] / c["minibatch_size"]

    # -- learning ----------------------------------------------------------------------------------

    def warn_one_update(self):
        """Warn of one update an epoch: its ratio is 1, so nothing is clipped."""
        if self.minibatches is not None and self.minibatches < 2:
            return (f"There is {self.minibatches:.3g} update an epoch, before which the policy "
                    "cannot have moved: clipping and target_kl do nothing. Try a smaller "
                    "--train.minibatch-size, or a larger --train.replay-ratio.")

    def warn_nothing_moves(self):
        """Warn of a clipfrac and KL of 0, with several updates and much entropy."""
        entropies = self.values("losses/entropy")
        is_still = (self.lasting("losses/approx_kl", lambda kl: kl < 1e-6)
                    and self.lasting("losses/clipfrac", lambda share: share == 0))
        is_undecided = not entropies or entropies[-1] > 0.5 * entropies[0]
        if is_still and is_undecided and self.progress < 0.8 and (self.minibatches or 2) >= 2:
            return ("The policy has not moved: clipfrac and approx_kl are 0 though there are "
                    "several updates an epoch. Try a larger --train.learning-rate, or "
                    "--train.learning-rate auto.")

    def warn_rate_too_high(self):
        """Warn of a KL over 0.1 in half of the last entries, unless the score rises."""
        last = self.values("losses/approx_kl")[-2 * PATIENCE :]
        is_high = len(last) == 2 * PATIENCE and sum(kl > 0.1 for kl in last) > PATIENCE
        if is_high and not self.returns_rise():
            return ("Updates are too large: approx_kl is over 0.1 again and again (now "
                    f"{last[-1]:.2g}, usual is 0.01). Try a smaller --train.learning-rate, or "
                    "--train.learning-rate auto.")

    def warn_entropy_gone(self):
        """Warn of a policy that has settled while the score did not change."""
        entropies = self.values("losses/entropy")
        if (len(entropies) > PATIENCE and entropies[0] > 0 and self.progress > BEGUN
                and not self.returns_moved()
                and self.lasting("losses/entropy", lambda entropy: entropy < 0.05 * entropies[0])):
            return (f"The policy has stopped trying: its entropy fell from {entropies[0]:.2g} to "
                    f"{entropies[-1]:.2g} while the score stayed. Try a larger "
                    "--train.ent-coef (0.01 to 0.05) or a smaller --train.learning-rate.")

    def warn_settled_at_random(self):
        """Warn of an entropy that fell by half, with returns like random play's."""
        entropies, returns = (self.values("losses/entropy"),
                              self.values("environment/episode_return"))
        level = self.random_play
        if (level is None or len(returns) < 4 * PATIENCE or self.progress < 2 * BEGUN
                or not np.ptp(returns)):
            return None
        smooth = np.convolve(returns, np.ones(2 * PATIENCE) / (2 * PATIENCE), "valid")
        limit = level + 3 * self.standard_error(2 * PATIENCE) + 0.02 * abs(level)
        if max(smooth[-2 * PATIENCE :]) < limit and self.lasting(
                "losses/entropy", lambda entropy: entropy < 0.5 * entropies[0], 2 * PATIENCE):
            larger = 5 * self.settings.get("ent_coef", 0.01) or 0.05
            return (f"The policy settles at what random play earns ({level:.3g}): its entropy fell "
                    f"from {entropies[0]:.2g} to {entropies[-1]:.2g}. Try --train.ent-coef "
                    f"{larger:.2g}, a smaller --train.gamma, or rewards on the way "
                    "(docs/recipes.md).")

    def find_setback(self, name):
        """Return (first, best, last) of values that rose and fell back, else None."""
        values = np.array(self.values(name))
        if len(values) < 2 * PATIENCE:
            return None
        smooth, last = np.convolve(values, np.ones(3) / 3, "valid"), values[-len(values) // 4 :]
        first, best = smooth[0], max(smooth)
        gain = best - first
        noise = max(np.std(last), 1.5 * np.median(np.abs(values[1:-1] - smooth)))
        # one high value may be luck
        rose = gain > 6 * noise + 0.3 * abs(best) and sum(values > first + 0.7 * gain) >= 3
        return (first, best, np.mean(last)) if rose and max(last) < first + 0.3 * gain else None

    def warn_score_lost(self):
        """Warn of returns, and a score if there is one, that rose and fell back."""
        setback = self.find_setback("environment/episode_return") if self.progress > 0.5 else None
        has_score = bool(self.values("environment/score"))
        if setback and (not has_score or self.find_setback("environment/score")):
            first, best, last = setback
            return (f"What was learned is lost: the mean return rose from {first:.4g} to "
                    f"{best:.4g} and is {last:.4g} now. If the task did not become harder "
                    "meanwhile, steps were too large: try a smaller --train.learning-rate. The "
                    "run's folder has the weights of the best score (best_*.pt).")

    def find_fall(self, name):
        """Return (first, last) of values that fell far and do not rise, else None.

        The very first ones are ignored, because they are of episodes that ended early.
        """
        values = np.array(self.values(name))
        if len(values) < 4 * PATIENCE:
            return None
        first, last = np.mean(values[2:PATIENCE]), values[-(len(values) // 2) :]
        noise, half = max(np.std(values[2 : 2 + PATIENCE]), np.std(last)), len(last) // 2
        is_below = first - max(last) > 3 * noise + 0.3 * abs(first)
        is_rising = np.mean(last[half:]) > np.mean(last[:half])
        return (first, np.mean(last)) if is_below and not is_rising else None

    def warn_return_fell(self):
        """Warn of returns, and a score if there is one, far below the first ones."""
        is_whole = self.progress > 0.5 and not self.is_late_start
        fall = self.find_fall("environment/episode_return") if is_whole else None
        if fall and (not self.values("environment/score") or self.find_fall("environment/score")):
            return ("The policy earns far less than it did at first: the mean return fell from "
                    f"{fall[0]:.4g} to {fall[1]:.4g} and stays there. If the task did not become "
                    "harder meanwhile: do rewards pay for something else, or does the "
                    "environment's reset forget a variable? Else try a smaller "
                    "--train.learning-rate.")

    def warn_value_dwarfs(self):
        """Warn of a clipped gradient that is nearly all the value's."""
        weight = self.settings.get("vf_coef", 1.0)
        limit = 10 * self.settings.get("max_grad_norm", math.inf)
        if (self.lasting("losses/value_loss", lambda loss: weight * loss > VAST_VALUE_LOSS)
                and self.lasting("losses/grad_norm", lambda norm: norm > limit)):
            loss = self.values("losses/value_loss")[-1]
            is_scaled = self.settings.get("norm_reward") is True
            reward = "" if is_scaled else "--train.norm-reward True, or "
            return (f"The value's loss ({loss:.3g} × vf_coef) dwarfs the policy's, and the "
                    f"gradient is clipped to a tenth and less. Try {reward}a smaller "
                    "--train.vf-coef.")

    def warn_value_knows_nothing(self):
        """Warn of an explained variance far below 0 for long, with an error that stays.

        A value that lags behind an improving policy is healthy: its error shrinks.
        """
        losses = self.values("losses/value_loss")[-4 * PATIENCE :]
        if (self.progress > 2 * BEGUN
                and self.lasting("losses/explained_variance", lambda share: share < -0.3,
                                 4 * PATIENCE)
                and min(losses) > 0.02
                and np.mean(losses[2 * PATIENCE :]) >= np.mean(losses[: 2 * PATIENCE])):
            share = self.values("losses/explained_variance")[-1]
            return ("The value predicts worse than a constant would: explained_variance is "
                    f"{share:.2g} and stays below 0. Try --train.norm-reward True, "
                    "--train.vf-clip-coef inf, or --train.norm-obs True.")

    def warn_actions_reach_little(self):
        """Warn of first actions that use a small part of their bounds."""
        reach = self.values("vital/action_reach")
        if reach and reach[0] < 0.05 and self.progress < BEGUN:
            return (f"Actions reach {reach[0]:.1%} of the range that the environment's bounds give "
                    "them. Try --policy.squash tanh, in a script "
                    "models.squash(policy, vecenv.single_action_space).")

    # -- the environment ---------------------------------------------------------------------------

    def warn_rewards_zero(self):
        """Warn of rewards that are all 0."""
        low, high = self.values("vital/reward_min"), self.values("vital/reward_max")
        if (len(low) > PATIENCE and self.progress > BEGUN and max(high) == min(low) == 0
                and not any(self.values("environment/episode_return"))):
            return ("Every reward so far is 0: there is nothing to learn from. Is the goal ever "
                    "reached by chance? Make it easier at first, or reward steps towards it "
                    "(docs/recipes.md).")

    def warn_rewards_vast(self):
        """Warn of rewards above 100 that are neither normalized nor clipped."""
        low, high = self.values("vital/reward_min"), self.values("vital/reward_max")
        c = self.settings
        if (low and not c.get("norm_reward") and c.get("reward_clip") is None
                and max(abs(low[-1]), abs(high[-1])) > 100):
            return (f"Rewards are vast: they reach from {low[-1]:.4g} to {high[-1]:.4g}, where "
                    "about 1 is learned best. Try --train.norm-reward True.")

    def warn_observations_constant(self):
        """Warn of constant observations, unless the policy learns, as in a bandit."""
        if (self.lasting("vital/observation_constant", lambda share: share == 1)
                and not self.returns_moved()):
            return ("The observations never change: no number in them differs between agents or "
                    "steps. Does the environment write them in each step?")

    def warn_observations_outside(self):
        """Warn of observations outside of the declared space."""
        if any(self.values("vital/observation_outside")):
            place = self.outside or "warnings.txt names it, and python -m ocean ENV --check does"
            return ("Observations lie outside the space that the environment declares: "
                    f"{place}. Correct the space or the observations: the network and its settings "
                    "were chosen for that space.")

    def warn_observations_vast(self):
        """Warn of observations above VAST that are not normalized."""
        if (not self.settings.get("norm_obs")
                and self.lasting("vital/observation_max", lambda largest: largest > VAST)):
            largest = self.values("vital/observation_max")[-1]
            return (f"Observations are vast: they reach {largest:.4g}, where about 1 is learned "
                    "best. Try --train.norm-obs True, or scale them in a custom network.")

    def warn_episodes_never_end(self):
        """Warn of no end of an episode in many steps."""
        horizon = 1 / max(1e-9, 1 - self.settings.get("gamma", 0.99))
        if not self.has_ended and self.steps > np.clip(AHEAD * horizon, *LONG):
            return (f"No episode has ended in {self.steps:,.0f} steps of each agent, so there is "
                    "no score. Give it a time limit: --env.max-episode-steps 1000 for gym/ID; "
                    "return gymnasium.wrappers.TimeLimit(env, 1000) in a Python file; in C "
                    "env->truncations[0] = 1 and c_reset(env) at env->tick 1000, as in "
                    "ocean/cartpole/cartpole.h.")

    def warn_cut_at_the_same_step(self):
        """Warn of episodes that are all truncated at one step, and a score that stays."""
        ended, cut = (sum(self.values(f"vital/{name}")) for name in ("terminated", "truncated"))
        lengths = self.values("environment/episode_length")
        is_alike = len(lengths) > PATIENCE and max(lengths) - min(lengths) < 1e-6 * max(lengths)
        if cut > 20 and not ended and is_alike and self.progress > 0.5 and not self.returns_moved():
            return (f"Every episode is cut off at step {lengths[-1]:,.0f}, none ends by itself, "
                    "and the score does not move. If there is a goal, it was never "
                    "reached: try a larger --train.ent-coef, more steps, or rewards on the way "
                    "(docs/recipes.md).")


# --------------------------------------------------------------------------------------------------
# The log of a run


def read_metrics(path, tail=None):
    """Return the entries of a metrics.jsonl, {"step": ..., name: number}, in order.

    Lines that a crash has torn are left out; [] without the file. tail: read only its last so many
    bytes.
    """
    entries, lines = [], []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - tail) if tail else 0)
        lines = file.read().splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError,
                                 RecursionError):
            entry = {name: value for name, value in json.loads(line).items()
                     if isinstance(value, int | float)}
            if math.isfinite(entry.get("step", math.nan)):
                entries.append({**entry, "step": int(entry["step"])})
    return entries
