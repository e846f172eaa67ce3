"""Vital signs: from the metrics of a run to sentences that say why it does not
learn and what to try.

    signs = Signs(settings)                     # the train section, a dict
    for sentence in signs.see(step, metrics):   # each entry of the log, in order; a sentence comes once in a run
        print(sentence)
    python pufferl.py diagnose RUN              # the same of a finished run, with a page of curves

A detector is a method whose name begins with `sign_`. It looks at the entries so far and returns a
sentence, or None. It must stay silent on a run that learns: one false alarm, and nobody believes
the next. To add one, write the method and plant its failure in
tests/test_diagnostics.py. The metrics are those of docs/metrics.md; those under `vital/` are measured for
this file (`vital`).
"""

import contextlib
import itertools
import json
import math
from pathlib import Path

import numpy as np

PATIENCE = 5  # a state must last so many entries before it is said
RANDOM_EPISODES = 100  # a run's first ones, which are about random play's
BEGUN = 0.1  # share of the run after which a policy could have moved
# so many numbers of a rollout's observations are sampled, at least one agent's in a step
SAMPLE = 1 << 12
AGENTS = slice(0, 16)  # whose observations and actions are looked at
# An episode should end in so many steps of each agent: AHEAD times what the discount looks ahead,
# within LONG.
LONG, AHEAD = (5_000, 20_000), 50
VAST = 1000.0  # larger observations are not of the order of 1
VAST_VALUE_LOSS = 1000.0  # while the policy's is below 1


def vital(observations, rewards, valid, terminals, truncations, actions=None, bounds=None, choices=False):
    """Metrics that only the rollout itself shows, from observations (T, N, ...), rewards, valid,
    terminals, truncations (T, N), numpy arrays of one rollout; of actions (T, N, A) only with their
    bounds (flat_spaces.action_bounds); choices: whether observations have indices, whose size means nothing. Of
    observations and actions the AGENTS suffice."""
    live, size = valid[: len(rewards)].view(bool), max(1, observations[0, 0].size)
    some = slice(0, None, max(1, 16 * size // SAMPLE))  # of the numbers, if an observation has many
    rows = slice(0, None, max(1, 256 * len(range(size)[some]) // SAMPLE))
    metrics = {"vital/terminated": float(terminals.sum(where=live)),
               "vital/truncated": float(truncations.sum(where=live))}
    flat = observations[: len(rewards), AGENTS].reshape(*live[:, AGENTS].shape, -1)[rows, :, some]
    seen = flat[live[rows, AGENTS]]
    if len(seen) > 1 and seen.dtype.kind in "fiub":
        low, high = seen.min(0).astype(np.float64), seen.max(0).astype(np.float64)
        metrics["vital/observation_constant"] = float((low == high).mean())
        if not choices:
            metrics["vital/observation_max"] = float(max(-low.min(), high.max()))
    if bounds is not None and len(seen):
        (least, most), nearest = bounds, np.clip(0.0, *bounds)
        taken = np.clip(actions[: len(rewards)][rows, AGENTS][live[rows, AGENTS]], least, most)
        free = (most > least) & (np.isfinite(least) | np.isfinite(most))
        span = np.where(np.isfinite(most - least), most - least, np.maximum(1.0, np.abs(nearest)))
        if free.any():
            metrics["vital/action_reach"] = float((np.ptp(taken, 0)[free] / span[free]).min())
    low, high = rewards.min(where=live, initial=np.inf), rewards.max(where=live, initial=-np.inf)
    return metrics | ({"vital/reward_min": float(low), "vital/reward_max": float(high)}
                      if low <= high else {})


def find_nan(weights, rollout, update):
    """(how early, what) is not finite first: of the weights, else of the rollout's tensors (T, N, ...), step by
    step, else of the update's. rollout, update: (name, tensor or None, cause), in the order of a step."""
    if not weights.isfinite().all():
        return -1, "weights not finite (too large an update, or something outside, wrote them)"
    broken = []
    for order, (name, tensor, cause) in enumerate(rollout):
        if tensor is None:
            continue
        fine = tensor.float().isfinite().reshape(*tensor.shape[:2], -1).all(2)
        if not fine.all():
            step, agent = (~fine).nonzero()[0].tolist()
            broken.append((step + order / 10,
                           f"{name} not finite, first at step {step} of the rollout, of agent {agent} ({cause})"))
    for order, (name, tensor, cause) in enumerate(update, len(rollout[0][1])):
        if not tensor.isfinite().all():
            broken.append((order, f"{name} not finite ({cause})"))
    return min(broken, default=(math.inf, "gradient norm not finite (lower train.learning_rate)"))


class RandomPlay:
    """Returns of episodes that are played at random, of one agent of each environment, because those of one may share
    their rewards. They have no reason to move from episode to episode, unless something of those before is left in the
    environment: a sum of rewards that reset does not clear, for example."""

    KEPT = 200  # episodes of each

    def __init__(self, environments):
        self.total, self.paid, self.ended = 0.0, 0.0, 0  # since each agent's episode began; in all that ended
        self.count, self.returns = np.zeros(environments, int), np.zeros((environments, self.KEPT))

    def add(self, rewards, over):
        """A step: rewards, and whether an episode ended, (agents,), those of an environment side by side."""
        each, self.total = len(rewards) // len(self.count), self.total + np.asarray(rewards, float)
        if not over.any():
            return
        for env in np.flatnonzero(over[::each] & (self.count < self.KEPT)):
            self.returns[env, self.count[env]] = self.total[env * each]
            self.count[env] += 1
        self.paid, self.ended = self.paid + self.total[over != 0].sum(), self.ended + (over != 0).sum()
        self.total[over != 0] = 0

    def logged_otherwise(self, log):
        """A sentence if the mean return in an environment's log is neither the mean nor the sum of its agents' rewards
        in the same episodes, else None; also None if it counts its episodes otherwise."""
        each = np.size(self.total) // len(self.count)
        if not self.ended or "episode_return" not in log or round(log["n"]) not in (self.ended, self.ended // each):
            return None
        paid = self.paid / self.ended
        if any(abs(log["episode_return"] - total) <= 1e-3 * max(1, abs(total)) for total in (paid, paid * each)):
            return None
        return (f"log.episode_return is {log['episode_return']:.4g} in the mean, but the rewards of these episodes "
                f"add up to {paid:.4g}: does a reset forget the sum, or does the log leave some rewards out?")

    def moved(self):
        """A sentence if the later half of each environment's episodes is unlike the earlier one by more than chance
        (the rank-sum test of Mann and Whitney 1947, from five standard deviations on), else None."""
        halves = []
        for returns, count in zip(self.returns, self.count, strict=True):
            whole, half = returns[1:count], (count - 1) // 2  # the first episode may have begun in its middle
            if half > 0:
                halves.append((whole[:half], whole[-half:]))
        early, late = (np.array([r for pair in halves for r in pair[i]]) for i in range(2))
        if not len(early) or not np.isfinite([early, late]).all():
            return None
        below, beside = (np.searchsorted(np.sort(early), late, side) for side in ("left", "right"))
        share = (below + beside).mean() / (2 * len(early))  # of the pairs in which the later episode has more
        error = math.sqrt((2 * len(early) + 1) / 12) / len(early)
        if abs(share - 0.5) < max(0.25, 5 * error):
            return None
        return (f"the return of random play moves from {early.mean():.4g} in the earlier episodes to {late.mean():.4g} "
                "in the later ones: does a reset leave something of the episodes before, as a sum of rewards?")


class Signs:
    """The detectors and what they remember of a run. settings: the resolved train section; a
    detector stays silent if a setting that it needs is missing. agents: of all ranks."""

    def __init__(self, settings, agents=None):
        self.settings, self.agents = settings, agents
        self.step, self.first, self.lists, self.said = 0, None, {}, {}
        self.outside = ""  # the first number of an observation that lay outside its space, in words

    def see(self, step, metrics):
        """The new sentences after one more entry of the log."""
        new, self.step = [], step
        self.first = step if self.first is None else self.first  # a resumed run's is not 0
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.lists.setdefault(name, []).append(value)
        for name in sorted(dir(self)):
            if (name.startswith("sign_") and name not in self.said
                    and (sentence := getattr(self, name)())):
                self.said[name] = step, sentence
                new.append(sentence)
        return new

    # -- what detectors use
    # ------------------------------------------------------------------------------------------

    @property
    def progress(self):
        return min(1.0, self.step / self.settings.get("total_timesteps", math.inf))

    @property
    def steps(self):
        """Steps of each agent since the first entry."""
        return (self.step - (self.first or 0)) / (self.agents or math.inf)

    @property
    def has_ended(self):
        """Whether any episode has ended."""
        counts = ("environment/n", "vital/terminated", "vital/truncated")
        return (any(any(self.values(name)) for name in counts)
                or bool(self.values("environment/episode_return_max")))

    def values(self, name):
        """All finite numbers that were logged under a name, in order."""
        return self.lists.get(name, [])

    def lasting(self, name, condition, count=PATIENCE):
        """Whether the last `count` values under a name all fulfil a condition."""
        last = self.values(name)[-count:]
        return len(last) == count and all(map(condition, last))

    def score_moved(self):
        """Whether the returns, three entries at a time, differed by more than chance does at the
        end, or the first from the last; True with too few to tell."""
        returns = np.array(self.values("environment/episode_return"))
        if len(returns) < 2 * PATIENCE:
            return True
        smooth, last = np.convolve(returns, np.ones(3) / 3, "valid"), returns[-max(PATIENCE, len(returns) // 4) :]
        chance, small = np.std(last), 1e-3 * abs(np.mean(last))
        risen = abs(np.mean(last) - smooth[0]) > 2 * chance / 3**0.5 + small
        return bool(risen or np.ptp(smooth) > 4 * chance + small)

    def score_rises(self):
        """Whether the last returns are better on average than as many before them."""
        returns = self.values("environment/episode_return")[-2 * PATIENCE :]
        return len(returns) == 2 * PATIENCE and np.mean(returns[PATIENCE:]) > np.mean(returns[:PATIENCE])

    @property
    def random_play(self):
        """Mean return of a run's first RANDOM_EPISODES episodes, or three an agent, while all actions are about equally
        likely; None without them, in a resumed run, or if the entropy fell meanwhile."""
        counts, returns = self.values("environment/n"), self.values("environment/episode_return")
        entropies, total, episodes = self.values("losses/entropy"), 0.0, 0.0
        enough = max(RANDOM_EPISODES, 3 * (self.agents or 0))  # the first to end are the shortest
        if (self.first or 0) > BEGUN * self.settings.get("total_timesteps", math.inf):
            return None
        for i, (count, mean) in enumerate(zip(counts, returns, strict=False)):
            total, episodes = total + count * mean, episodes + count
            if episodes >= enough:
                uniform = entropies and min(entropies[: i + 1]) >= 0.8 * entropies[0] > 0
                return total / episodes if uniform else None
        return None

    def chance_of_mean(self, count):
        """Standard error of the mean of the last `count` logged returns, from how much they differ."""
        return float(np.std(self.values("environment/episode_return")[-count:])) / count**0.5

    def below_random_play(self):
        """Random play's mean return if the last returns are below it by more than chance, else None."""
        last = self.values("environment/episode_return")[-2 * PATIENCE :]
        level = self.random_play
        if level is None or len(last) < 2 * PATIENCE:
            return None
        return level if np.mean(last) < level - 3 * self.chance_of_mean(2 * PATIENCE) - 0.02 * abs(level) else None

    @property
    def minibatches(self):
        """Updates an epoch, or None."""
        c = self.settings
        if self.agents is None or not all(isinstance(c.get(key), int | float) for key in (
                "horizon", "minibatch_size", "replay_ratio")):
            return None
        return c["replay_ratio"] * self.agents * c["horizon"] / c["minibatch_size"]

    # -- learning
    # ----------------------------------------------------------------------------------------------

    def sign_one_update(self):
        """The ratio is 1 in the first minibatch of an epoch by definition:
        with one there is no PPO."""
        if self.minibatches is not None and self.minibatches < 2:
            return (f"There is {self.minibatches:.3g} update an epoch, before which the policy "
                    "cannot have moved: clipping does nothing. Try --train.minibatch-size "
                    "auto, or a larger --train.replay-ratio.")

    def sign_nothing_moves(self):
        """clipfrac and KL stay at zero though there are several updates and much is undecided."""
        entropies = self.values("losses/entropy")
        still = self.lasting("losses/approx_kl", lambda kl: kl < 1e-6) and self.lasting(
            "losses/clipfrac", lambda share: share == 0)
        undecided = not entropies or entropies[-1] > 0.5 * entropies[0]
        if still and undecided and self.progress < 0.8 and (self.minibatches or 2) >= 2:
            return ("The policy has not moved: clipfrac and approx_kl are 0 though there are "
                    "several updates an epoch. Try a larger --train.learning-rate, or "
                    "--train.learning-rate auto.")

    def sign_rate_too_high(self):
        """KL over 0.1 in half of the last entries, and the score gains nothing by it."""
        last = self.values("losses/approx_kl")[-2 * PATIENCE :]
        if len(last) == 2 * PATIENCE and sum(kl > 0.1 for kl in last) > PATIENCE and not self.score_rises():
            return ("Updates are too large: approx_kl is over 0.1 again and again (now "
                    f"{last[-1]:.2g}, usual is 0.01). Try a smaller --train.learning-rate, or "
                    "--train.learning-rate auto.")

    def sign_entropy_gone(self):
        """The policy has settled and the score is where it was."""
        entropies = self.values("losses/entropy")
        if len(entropies) > PATIENCE and entropies[0] > 0 and self.progress > BEGUN and not self.score_moved() and (
                self.lasting("losses/entropy", lambda entropy: entropy < 0.05 * entropies[0])):
            return (f"The policy has stopped trying: its entropy fell from {entropies[0]:.2g} to "
                    f"{entropies[-1]:.2g} while the score stayed. Try a larger "
                    "--train.ent-coef (0.01 to 0.05) or a smaller --train.learning-rate.")

    def sign_settled_at_random(self):
        """The entropy fell by half, and no returns have been better than random play's."""
        entropies, returns = self.values("losses/entropy"), self.values("environment/episode_return")
        level = self.random_play
        if level is None or len(returns) < 4 * PATIENCE or self.progress < 2 * BEGUN or not np.ptp(returns):
            return None
        smooth = np.convolve(returns, np.ones(2 * PATIENCE) / (2 * PATIENCE), "valid")
        unmoved = max(smooth[-2 * PATIENCE :]) < level + 3 * self.chance_of_mean(2 * PATIENCE) + 0.02 * abs(level)
        if unmoved and self.lasting("losses/entropy", lambda entropy: entropy < 0.5 * entropies[0], 2 * PATIENCE):
            larger = 5 * self.settings.get("ent_coef", 0.01) or 0.05
            return (f"The policy settles at what random play earns ({level:.3g}): its entropy fell from "
                    f"{entropies[0]:.2g} to {entropies[-1]:.2g}. Try --train.ent-coef {larger:.2g}, a smaller "
                    "--train.gamma, or rewards on the way (docs/recipes.md).")

    def lost(self, name):
        """(first, best, last) of the values under a name if they stayed far above the first ones for long and are
        back there in the last quarter, else None."""
        values = np.array(self.values(name))
        if len(values) < 2 * PATIENCE:
            return None
        smooth, last = np.convolve(values, np.ones(3) / 3, "valid"), values[-len(values) // 4 :]
        first, best = smooth[0], max(smooth)
        gain = best - first
        noise = max(np.std(last), 1.5 * np.median(np.abs(values[1:-1] - smooth)))
        rose = gain > 6 * noise + 0.3 * abs(best) and sum(values > first + 0.7 * gain) >= 3  # one may be luck
        return (first, best, np.mean(last)) if rose and max(last) < first + 0.3 * gain else None

    def sign_score_lost(self):
        """Returns, and the score if the environment has one, rose and are back where they began."""
        found = self.lost("environment/episode_return") if self.progress > 0.5 else None
        if found and (not self.values("environment/score") or self.lost("environment/score")):
            first, best, now = found
            return (f"What was learnt is lost: the mean return rose from {first:.4g} to {best:.4g} and is {now:.4g} "
                    "now. If the task did not become harder meanwhile, steps were too large: try a smaller "
                    "--train.learning-rate. The run's folder has the weights of the best score (best_*.pt).")

    def fell(self, name):
        """(first, last) of the values under a name if the last half of them all are far below those at first, and do
        not rise, else None. The very first are of episodes that ended early."""
        values = np.array(self.values(name))
        if len(values) < 4 * PATIENCE:
            return None
        first, last = np.mean(values[2:PATIENCE]), values[-(len(values) // 2) :]
        noise, half = max(np.std(values[2 : 2 + PATIENCE]), np.std(last)), len(last) // 2
        below = first - max(last) > 3 * noise + 0.3 * abs(first)
        return (first, np.mean(last)) if below and np.mean(last[half:]) <= np.mean(last[:half]) else None

    def sign_return_fell(self):
        """Returns, and the score if the environment has one, stay far below those at the run's begin."""
        whole = self.progress > 0.5 and (self.first or 0) < BEGUN * self.settings.get("total_timesteps", math.inf)
        found = self.fell("environment/episode_return") if whole else None
        if found and (not self.values("environment/score") or self.fell("environment/score")):
            return (f"The policy earns far less than it did at first: the mean return fell from {found[0]:.4g} to "
                    f"{found[1]:.4g} and stays there. If the task did not become harder meanwhile: do rewards pay for "
                    "something else, or does the environment's reset forget a variable? Else try a smaller "
                    "--train.learning-rate.")

    def sign_value_dwarfs(self):
        """The clipped gradient is nearly all the value's."""
        weight, clip = self.settings.get("vf_coef", 1.0), self.settings.get("max_grad_norm", math.inf)
        if self.lasting("losses/value_loss", lambda loss: weight * loss > VAST_VALUE_LOSS) and self.lasting(
                "losses/grad_norm", lambda norm: norm > 10 * clip):
            loss = self.values("losses/value_loss")[-1]
            reward = "" if self.settings.get("norm_reward") is True else "--train.norm-reward True, or "
            return (f"The value's loss ({loss:.3g} × vf_coef) dwarfs the policy's, and the "
                    f"gradient is clipped to a tenth and less. Try {reward}a smaller --train.vf-coef.")

    def sign_value_knows_nothing(self):
        """Explained variance far below zero for long, with returns that differ and an error that does not shrink:
        a value that follows a policy that gets better is behind it, and that is healthy."""
        losses = self.values("losses/value_loss")[-4 * PATIENCE :]
        if self.progress > 2 * BEGUN and self.lasting(
                "losses/explained_variance", lambda share: share < -0.3, 4 * PATIENCE) and min(losses) > 0.02 and (
                np.mean(losses[2 * PATIENCE :]) >= np.mean(losses[: 2 * PATIENCE])):
            share = self.values("losses/explained_variance")[-1]
            return ("The value predicts worse than a constant would: explained_variance is "
                    f"{share:.2g} and stays below 0. Try --train.norm-reward True, "
                    "--train.vf-clip-coef inf, or --train.norm-obs True.")

    def sign_actions_reach_little(self):
        """Of the first actions, before anything is learnt."""
        reach = self.values("vital/action_reach")
        if reach and reach[0] < 0.05 and self.progress < BEGUN:
            return (f"Actions reach {reach[0]:.1%} of the range that the environment's bounds give them. Try "
                    "--policy.squash tanh, in a script models.squash(policy, vecenv.single_action_space).")

    # -- the environment
    # ---------------------------------------------------------------------------------------------

    def sign_rewards_zero(self):
        low, high = self.values("vital/reward_min"), self.values("vital/reward_max")
        if len(low) > PATIENCE and self.progress > BEGUN and max(high) == min(low) == 0 and not any(
                self.values("environment/episode_return")):
            return ("Every reward so far is 0: there is nothing to learn from. Is the goal ever "
                    "reached by chance? Make it easier at first, or reward steps towards it "
                    "(docs/recipes.md).")

    def sign_returns_without_rewards(self):
        """The environment counts what it does not pay: its own figure is not 0, the sum of the rewards always is."""
        paid = [self.values(f"environment/episode_return_{end}") for end in ("min", "max")]
        counted = self.values("environment/episode_return")
        if min(map(len, paid)) > PATIENCE and not any(map(any, paid)) and any(counted):
            return ("The rewards of every episode so far sum to 0, but the environment logs returns "
                    f"({counted[-1]:.4g} now). Does its step pay what it counts? In C, c_step has to write rewards[0].")

    def sign_rewards_vast(self):
        low, high = self.values("vital/reward_min"), self.values("vital/reward_max")
        c = self.settings
        if (low and not c.get("norm_reward") and c.get("reward_clip") is None
                and max(abs(low[-1]), abs(high[-1])) > 100):
            return (f"Rewards are vast: they reach from {low[-1]:.4g} to {high[-1]:.4g}, where "
                    "about 1 is learnt best. Try --train.norm-reward True.")

    def sign_observations_constant(self):
        """Observations are constant and nothing is learnt: a bandit, which learns, has constant
        ones too."""
        if (self.lasting("vital/observation_constant", lambda share: share == 1)
                and not self.score_moved()):
            return ("The observations never change: no number in them differs between agents or "
                    "steps. Does the environment write them in each step?")

    def sign_observations_outside(self):
        if any(self.values("vital/observation_outside")):
            which = self.outside or "signs.txt says which, and python -m ocean ENV --check does"
            return ("Observations lie outside the space that the environment declares: "
                    f"{which}. Correct the space or the observations: the network and its settings "
                    "were chosen for that space.")

    def sign_observations_vast(self):
        if not self.settings.get("norm_obs") and self.lasting("vital/observation_max",
                                                              lambda x: x > VAST):
            largest = self.values("vital/observation_max")[-1]
            return (f"Observations are vast: they reach {largest:.4g}, where about 1 "
                    "is learnt best. Try --train.norm-obs True or, if the network is your own, scale them in it.")

    def sign_observations_grow(self):
        """The numbers are finite so far, but they double."""
        largest = self.values("vital/observation_max")
        if len(largest) >= PATIENCE and largest[-1] > 100 * VAST and all(
                later > 2 * earlier for earlier, later in itertools.pairwise(largest[-PATIENCE:])):
            return (f"Observations grow without bound: {largest[-1]:.3g} now, twice as much with "
                    "each entry of the log. Does something in the environment add up for ever?")

    def sign_episodes_never_end(self):
        ahead = 1 / max(1e-9, 1 - self.settings.get("gamma", 0.99))
        if not self.has_ended and self.steps > np.clip(AHEAD * ahead, *LONG):
            return (f"No episode has ended in {self.steps:,.0f} steps of each agent, so there is no "
                    "score. Give it a time limit: --env.max-episode-steps 1000 for gym/ID; return "
                    "gymnasium.wrappers.TimeLimit(env, 1000) in a file of yours; in C "
                    "env->truncations[0] = 1 and c_reset(env) at env->tick 1000, as in "
                    "ocean/cartpole/cartpole.h.")

    def sign_every_step_ends(self):
        """Once episodes were longer, now each has a single step, and earns no more. (With one rank: a rollout is
        compared with all agents.)"""
        size, ended = (self.agents or 0) * self.settings.get("horizon", 0), [
            max(both) for both in zip(self.values("vital/terminated"), self.values("vital/truncated"), strict=False)]
        returns = self.values("environment/episode_return")
        if size and len(ended) > PATIENCE and ended[0] < size / 2 and min(ended[-PATIENCE:]) > 0.99 * size and (
                len(returns) < PATIENCE or np.mean(returns[-PATIENCE:]) <= max(returns[:3])):
            return ("By now each step ends an episode, which was not so at first. Does the environment's reset begin "
                    "its counters at 0?")

    def sign_cut_at_the_same_step(self):
        """Every episode is truncated, all at one step, and the score does not move."""
        ended, cut = (sum(self.values(f"vital/{name}")) for name in ("terminated", "truncated"))
        lengths = self.values("environment/episode_length")
        alike = len(lengths) > PATIENCE and max(lengths) - min(lengths) < 1e-6 * max(lengths)
        if cut > 20 and not ended and alike and self.progress > 0.5 and not self.score_moved():
            return (f"Every episode is cut off at step {lengths[-1]:,.0f}, none ends by itself, "
                    "and the score does not move. If there is a goal, it was never "
                    "reached: try a larger --train.ent-coef, more steps, or rewards on the way "
                    "(docs/recipes.md).")


# --------------------------------------------------------------------------------------------------
# A finished run


def read_metrics(path, tail=None):
    """The entries of a metrics.jsonl, {"step": ..., name: number}, in order, without lines that a crash
    has torn; [] without the file. tail: of its last so many bytes alone."""
    entries = []
    if not Path(path).exists():
        return entries
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - tail) if tail else 0)
        lines = file.read().splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            entry = {name: value for name, value in json.loads(line).items() if isinstance(value, int | float)}
            if math.isfinite(entry.get("step", math.nan)):
                entries.append({**entry, "step": int(entry["step"])})
    return entries


def read(folder):
    """(Signs, entries) of a run's folder, from its config.json and metrics.jsonl. Raises ValueError if
    they are not there or cannot be read."""
    path, log = Path(folder, "config.json"), Path(folder, "metrics.jsonl")
    try:
        config = json.loads(path.read_text())
        signs = Signs(config["train"], config.get("agents"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or not a run's settings ({type(error).__name__}: {error})") from None
    if not log.exists():
        raise ValueError(f"{folder}: nothing was logged yet.")
    return signs, read_metrics(log)


# The look of all pages of curves: the colours of tools/watch.html.
DARK = {"template": "plotly_dark", "paper_bgcolor": "#131f2a", "plot_bgcolor": "#0c141c", "margin": {"t": 60, "b": 60},
        "font": {"color": "#ecf2f6"}, "colorway": ["#00bbcc", "#fabe3c", "#5ac878", "#e25454", "#a96fe8", "#ee8a3c"]}
CURVES = ("environment/score", "environment/episode_return", "environment/episode_length",
          "losses/entropy",
          "losses/approx_kl", "losses/clipfrac", "losses/value_loss", "losses/explained_variance",
          "losses/grad_norm", "losses/learning_rate", "vital/reward_max", "vital/observation_max")


def diagnose(folder):
    """Print what the signs say of a run and write FOLDER/diagnosis.html, its curves with the places
    where they said it; returns the Signs."""
    signs, entries = read(folder)
    for entry in entries:
        signs.see(entry["step"], entry)
    said = sorted(signs.said.values())
    for step, sentence in said:
        print(f"step {step:,}: {sentence}")
    if (level := signs.below_random_play()) is not None:
        print(f"the last returns are below random play ({level:.3g})")
    if not said:
        but = "" if signs.has_ended else ", but no episode has ended, so there is no score"
        print(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, no sign of "
              f"trouble{but}.")
    page = Path(folder, "diagnosis.html")
    page.write_text(draw(Path(folder).name, entries, said, signs.random_play))
    print(f"curves: {page}")
    return signs


def draw(name, entries, said, random_play=None):
    """The page: a curve for each metric, a line at each sentence, and one at the return of random play."""
    import html

    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names = [metric for metric in CURVES if any(metric in entry for entry in entries)]
    figure = make_subplots(rows=max(1, -(-len(names) // 3)), cols=3, subplot_titles=names)
    for i, metric in enumerate(names):
        points = [(entry["step"], entry[metric]) for entry in entries if metric in entry]
        x, y = zip(*points, strict=True)
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", name=metric), row=i // 3 + 1,
                         col=i % 3 + 1)
        if metric == "environment/episode_return" and random_play is not None:
            figure.add_hline(y=random_play, line={"dash": "dash", "color": "#fabe3c"}, row=i // 3 + 1, col=i % 3 + 1,
                             annotation_text="random play")
        for step, sentence in said:
            figure.add_vline(x=step, line={"dash": "dot", "color": "#e25454"}, row=i // 3 + 1,
                             col=i % 3 + 1, name=sentence)
    figure.update_layout(height=260 * max(1, -(-len(names) // 3)), showlegend=False, **DARK)
    items = "".join(f"<li>step {step:,}: {html.escape(sentence)}</li>" for step, sentence in said)
    title = html.escape(name)
    colours = f"background:{DARK['paper_bgcolor']};color:{DARK['font']['color']}"
    return (f"<!doctype html><meta charset='utf-8'><title>{title}</title>"
            f"<body style='font-family:sans-serif;{colours}'><h1>{title}</h1>"
            f"<ul>{items or '<li>No sign of trouble.</li>'}</ul>"
            + figure.to_html(full_html=False, include_plotlyjs=True))
