"""PPO that trains in minutes what others train in hours: the trainer and the command line.

    python pufferl.py train breakout                                # a solved policy, a checkpoint, a TensorBoard log
    python pufferl.py train breakout --train.learning-rate 0.01     # any setting; --help lists them all
    python pufferl.py eval breakout --load-model-path latest        # mean score of 256 fresh episodes

    from pufferl import PuffeRL, load_config, load_env, load_policy      # or from a script
    args = load_config("breakout")
    vecenv = load_env("breakout", args)
    policy = load_policy(args, vecenv, "breakout")
    trainer = PuffeRL({**args["train"], "env": "breakout"}, vecenv, policy)
    while trainer.global_step < args["train"]["total_timesteps"]:
        trainer.evaluate()
        logs = trainer.train()
    trainer.close()

One epoch is `evaluate` (a rollout of `horizon` steps of all agents) and `train` (advantages, then
minibatches of prioritized segments). To change the algorithm, edit `PuffeRL.train`; the formulas
are in kernels.py, the networks in models.py, how they act and learn in engines.py, the
environments' side in vector.py, what can be set in configuration.py and config/*.ini. ppo.py is the
same algorithm on one page.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import random
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import absolute_imports  # noqa: F401  first
import processes

if __name__ == "__main__":
    processes.stop_at_once()  # also during the imports below
    if sys.argv[1:2] == ["train"] and sys.stderr and sys.stderr.isatty():
        print("loading torch and numba", file=sys.stderr)

# torch's threads spin for 0.2 to 0.5 ms after an operation, because to wake one takes 0.1 ms. Then they
# sleep, because those that spin keep the cores from the threads that they wait for. (docs/findings.md)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000")}
# All queues that a GPU has, in place of 8: streams that share one wait for each other. CUDA reads
# it when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import numba
import numpy as np
import torch

import data_parallel
import diagnostics
import emulation
import engines
import environments
import flat_spaces
import kernels
import loggers
import models
import ocean
import optim
import runs
from arena import Arena, clock, compile_timer
from auto import decide, drawn_steps, facts_of, plural
from configuration import (
    Base,
    Train,
    check_bound,
    check_names,
    coerce,
    command,
    find_run,
    load_attribute,
    load_config,
    named,
    own_optimizer,
    sizes_of,
    stem_of,
    train_settings,
)
from errors import ConfigError, exit_on_error
from fast import verify
from flat_spaces import HAIR, action_bounds
from loggers import NeptuneLogger, NoLogger, TensorBoardLogger, WandbLogger  # noqa: F401  for scripts
from models import load_policy
from vector import Native, Tensors, load_env, make  # for scripts too: make("breakout", num_envs=256)

processes.keep_memory()

# --------------------------------------------------------------------------------------------------
# The trainer


class PuffeRL:
    """PPO over a vectorized environment and a policy.

    config: the train section as a dict (missing keys take their defaults), "env": the environment's
    name, optionally "data_dir" (None: nothing is written), "run_id" and "settings" (all sections,
    kept with the run). vecenv: from make or load_env, or one PufferEnv. policy: any network that
    models.py's docstring describes. logger: see loggers.NoLogger. The short form takes keywords in
    place of a configuration; batch_size stands for horizon there:

        PuffeRL(vecenv, policy, logger=logger, learning_rate=0.01, batch_size=128 * vecenv.num_agents)

    Properties: global_step, epoch, total_epochs, sps, uptime, learning_rate (assign to override the schedule).
    `engine` acts and learns (engines.py). Started by torchrun, every rank makes a trainer with environments of
    its own and calls the same methods; batch_size, steps, losses and statistics are those of all ranks, num_agents and
    storage a rank's own (docs/scale.md). Raises ConfigError before anything starts if the settings cannot work.
    """

    def __init__(self, config=None, vecenv=None, policy=None, logger=None, *, env=None, **settings):
        config, vecenv, policy = normalize_args(config, vecenv if env is None else env, policy)
        self.ranks = data_parallel.connect()
        agents = self.ranks.gather(vecenv.num_agents)
        config = sizes_of({**config, **settings}, sum(agents))
        c = self.config = Settings(check_train(config, vecenv, policy, sum(agents), self.ranks))
        train_section = {field.name: named(c[field.name]) for field in dataclasses.fields(Train)}
        c["use_rnn"] = hasattr(policy, "initial_state")
        self.args = {"env_name": c["env"], **c.pop("settings", {}), "train": train_section, "agents": sum(agents),
                     "versions": VERSIONS,
                     "sources": runs.sources(policy, vecenv, c["loss"], c["optimizer"], c["advantage"])}
        self.vecenv = vecenv
        self.policy = policy
        self.logger = loggers.check_logger(logger) if logger is not None and self.ranks.rank == 0 else NoLogger()
        self.env_name = stem_of(c["env"])
        self.horizon = c["horizon"]
        self.num_agents = vecenv.num_agents
        self.span = drawn_steps(c)
        self.batch_size = self.horizon * sum(agents)
        drawn = c["minibatch_size"] // self.span
        self._first_segment = drawn * self.ranks.rank // self.ranks.count
        self.segments = drawn * (self.ranks.rank + 1) // self.ranks.count - self._first_segment
        self.epoch = 0
        self._rollouts = 0
        self._steps_before = 0
        self._minibatches_owed = 0.0
        self._rate_factor = 1.0
        self._override_lr = None
        self._rolled_out = False
        self._closed = False
        self._started = clock()
        self._last_log = None
        self._dashboard = None
        self.losses = {}
        self._advantage = load_attribute("train.advantage", c["advantage"]) if c["advantage"] else None
        self.statistics = Statistics(self.ranks.count)
        self.signs = diagnostics.Signs(c, sum(agents))
        run_id = c.get("run_id") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        name = f"{self.env_name}_{self.ranks.share(run_id)}"
        self.run = runs.Run(None if c["data_dir"] is None else Path(c["data_dir"]) / name, self.env_name, c["keep"])
        if self.ranks.count > 1:
            self.ranks.join(self, agents)
        self.normalizer = models.find_normalizer(policy)
        self._layout = flat_spaces.FlatObservation(emulation.seen_space(vecenv.driver_env))
        self.reward_scale = models.RewardScale(self.num_agents, c["gamma"]) if c["norm_reward"] else None
        check_policy(policy, vecenv, c)
        self._allocate(*choose_engine(policy, vecenv, c), sum(agents[: self.ranks.rank]))
        self.statistics.best = runs.copies(policy.state_dict())
        self.bonus = None if c["bonus"] == "none" else self._make_bonus()

    def _allocate(self, engine, reason, first_agent):
        """Make the engine, and all tensors that live as long as the trainer, in one arena (docs/design.md)."""
        c = self.config
        minibatches = math.ceil(c["replay_ratio"] * self.batch_size / c["minibatch_size"]) + 1
        self.buffers = engine.Buffers(self.policy, self.vecenv, c, self.segments, first_agent)
        self.engine = engine(self.policy, self.vecenv, c, self.buffers)
        arena = self.arena = Arena()
        arena.adopt(self.policy)
        self.buffers.register(arena, self.engine.num_learners, minibatches)
        self.engine.register(arena)
        self.optimizer = None if c["optimizer"] != "muon" else optim.Muon(  # before `allocate`: its state is in there
            arena, c["momentum"], c["weight_decay"], c["max_grad_norm"], batched=c["device"] == "cuda")
        arena.allocate(self.buffers.torch_device)
        self.buffers.bind()
        self.engine.bind(arena)
        self.ranks.device = arena.memory.device
        self.gradients = arena.flat("gradients")
        if self.optimizer is None:
            self.optimizer = optim.TorchOptimizer(c, self.policy, arena)
        self._use_engine(reason)

    def _make_bonus(self):
        """Return the models.Bonus of train.bonus. Raises ConfigError if there cannot be one."""
        name = self.config["bonus"]
        if self.ranks.count > 1:
            raise ConfigError(f"train.bonus = {name}: with several ranks each would find other "
                              "observations new. Take one process.")
        try:
            return models.Bonus(name, self.vecenv.driver_env, self.num_agents, self.buffers.torch_device)
        except TypeError as error:
            raise ConfigError(f"train.bonus = {name}: {error}.") from None

    def _use_engine(self, reason):
        """Capture an epoch's learning, and keep and print why the engine is not the fast one."""
        self.args["engine"] = {"name": self.engine.name, "why": reason}
        if reason and self.ranks.rank == 0:
            text = f"engine: {self.engine.name}, because {reason}"
            processes.say(text, sys.stderr)
            self.run.note(text, self.global_step)
        capture = self.engine.capture
        self._compute_all_advantages = capture(self._compute_advantages)
        if self.engine.whole_minibatches and self.ranks.count == 1 and not own_optimizer(self.config):
            self._minibatch_step = capture(self._minibatch)
            return
        self._minibatch_step = self._minibatch
        for name in ("_sample_segments", "_compute_gradients", "_step_optimizer", "_write_back"):
            # ranks sum in between, and an optimizer from a file may wait for the GPU, as no graph can
            if name != "_step_optimizer" or not own_optimizer(self.config):
                setattr(self, name, capture(getattr(type(self), name).__get__(self)))

    def _check_engine(self, has_loaded=False):
        """Go on with an engine for any network if the policy is no longer the one that a hand-written engine
        implements; tell the optimizer what is frozen."""
        self._sync_frozen()
        if self.engine.name not in verify.NETWORKS:
            return
        reason = verify.find_edit(self.policy, self.engine.name, self.engine.modules)
        if reason is None and has_loaded:
            reason = verify.compare(self.policy, self.vecenv, self.engine.Sample, self.buffers.torch_device)
        if reason is not None:
            self.engine.release()
            self.engine = any_network_engine(self.config)(self.policy, self.vecenv, self.config, self.buffers)
            self.engine.bind(self.arena)
            self._use_engine(reason)

    # -- an epoch --------------------------------------------------------------------------------------------------

    def evaluate(self):
        """Roll out `horizon` steps of all agents; returns the environments' means over the episodes
        since the last log. train learns from the last rollout only; others count as no steps."""
        self._check_open()
        self.record()
        self._check_engine()
        self._rolled_out, begun = False, clock()
        stepping = self.engine.rollout(self._rollouts)
        self.statistics.seconds["environment"] += stepping
        self.statistics.seconds["policy"] += clock() - begun - stepping
        log = self.ranks.merge_log(self.vecenv.log())
        self.statistics.add_returns(self.buffers)
        self.statistics.add_episodes(log, self.policy)
        if self._rollouts == 0 and self.normalizer is None and self.signs is not None:  # no run that only measures
            self._layout.note_indistinct(self.storage["observations"], self.vecenv.name)
        if self.signs:
            self._count_outside()
        self._rollouts += 1  # counts the random words of actions: an exact resume rests on it (runs.py)
        self._rolled_out = True
        return dict(self.environment)

    def train(self):
        """Learn from the last rollout: replay_ratio · batch_size steps in minibatches of segments or single steps.

        Returns the means over the valid steps of its minibatches: policy_loss, value_loss, entropy, approx_kl,
        clipfrac, explained_variance, old_approx_kl, importance, grad_norm, learning_rate. Logs if that is due.
        Raises FloatingPointError if a gradient is not finite; the weights are then as before.
        """
        if not self._rolled_out:
            raise RuntimeError("train() learns from a rollout, once: call evaluate() before each train().")
        begun = clock() - self.ranks.seconds
        with self.engine.learning():
            self._update_schedules()
            self._scale_rewards()
            self._compute_all_advantages()
            self._center_values()
            minibatches = self._num_minibatches()
            for _ in range(minibatches):
                self._minibatch_step()
            norms, sums = self._read_sums(minibatches)
        return self._end_epoch(begun, norms, sums)

    def _minibatch(self):
        self._sample_segments()
        self.ranks.sum(self.buffers.moments)
        self._compute_gradients()
        self.ranks.sum(self.gradients)
        self._step_optimizer()
        self._write_back()

    def _num_minibatches(self):
        """Return how many this epoch has: on average replay_ratio · batch_size / minibatch_size."""
        c = self.config
        if c["norm_obs"] and self.normalizer.is_measured_only(self.global_step, c["total_timesteps"]):
            return 0
        self._minibatches_owed += c["replay_ratio"] * self.batch_size / c["minibatch_size"]
        count = int(self._minibatches_owed + 1e-9)
        self._minibatches_owed -= count
        return count

    def _update_schedules(self):
        """Put this epoch's numbers where the kernels read them."""
        c, buffers = self._sync_config(), self.buffers
        progress = min(1.0, self.global_step / c["total_timesteps"])
        self._used_lr = self.learning_rate
        numbers = {**c, "ent_coef": c["ent_coef"] * (1 - progress if c["anneal_ent_coef"] else 1)}
        first = kernels.CLIP_COEF  # settings[:first] are written by kernels.normalisation in each minibatch
        buffers.settings[first:] = torch.tensor([numbers[name] for name in kernels.LOSS_SETTINGS[first:]])
        buffers.beta.fill_(c["prio_beta0"] + (1 - c["prio_beta0"]) * progress)
        buffers.rate.fill_(self._used_lr)
        buffers.counter.copy_(torch.tensor([self.epoch, 0]))  # counts the random words of draws, as `_rollouts` do
        buffers.found_inf.zero_()
        buffers.ratios.fill_(1.0)
        buffers.sums.zero_()

    def _scale_rewards(self):
        """Divide the rewards by the deviation of the discounted return, which includes this
        rollout: else the first reward after many zeros would be divided by almost 0. Add the bonus."""
        scale, buffers = self.reward_scale, self.buffers
        if scale is not None:
            moments = scale.measure_returns(*map(buffers.on_host, ("rewards", "resets", "valid")))
            scale.merge(scale.moments, self.ranks.gather(moments))
            torch.mul(self.storage["rewards"], scale.scale, out=buffers.rewards)
            buffers.value_mean.fill_(scale.value_mean)
        if self.bonus is not None:
            bonuses = self.bonus.update(*(self.storage[name] for name in ("observations", "resets", "valid")))
            base = self.storage["rewards"] if scale is None else buffers.rewards
            torch.add(base, bonuses, alpha=self.config["bonus_coef"], out=buffers.rewards)
            self.statistics.bonuses.append(float(bonuses.mean()))

    def _center_values(self):
        """Renew what values are relative to, which depends on the mean of the rollout's value targets."""
        scale, buffers = self.reward_scale, self.buffers
        if scale is not None and scale.scale > 0:  # 0 after an infinite reward, which _read_sums names
            before = scale.value_mean
            targets = torch.add(buffers.advantages, buffers.values[:-1], out=buffers.value_targets)
            count, total, _ = kernels.advantage_moments(targets, self.storage["valid"], None).tolist()
            mean = (total / max(count, 1.0) + before) / scale.scale
            scale.merge(scale.targets, self.ranks.gather((count, mean, 0.0)))
            if scale.value_mean != before:
                buffers.value_mean.fill_(scale.value_mean)
                self._compute_all_advantages()

    def _compute_advantages(self, index=None):
        """Advantages and priorities of all segments, or of those in `index`. A segment's depend on
        that segment alone, so after a minibatch of segments only these have new ones."""
        c, s, buffers = self.config, self.storage, self.buffers
        reward_clip = math.inf if c["reward_clip"] is None else c["reward_clip"]
        if self._advantage is None:
            kernels.advantage(
                buffers.values, buffers.rewards, s["terminals"], s["truncations"], buffers.bootstraps, buffers.ratios,
                s["valid"], buffers.advantages, gamma=c["gamma"], gae_lambda=c["gae_lambda"],
                rho_clip=c["vtrace_rho_clip"], c_clip=c["vtrace_c_clip"], reward_clip=reward_clip,
                index=index, mean=buffers.value_mean)
        else:  # train.advantage
            every = torch.arange(self.num_agents, device=buffers.advantages.device) if index is None else index
            ends = {name: s[name].index_select(1, every) for name in ("terminals", "truncations", "valid")}
            rewards, *others = (tensor.index_select(1, every) for tensor in (
                buffers.rewards, buffers.values, buffers.bootstraps, buffers.ratios))
            args = SimpleNamespace(**{**c, "reward_clip": reward_clip})
            result = self._advantage(args, SimpleNamespace(**ends), rewards, buffers.value_mean, *others)
            buffers.advantages.index_copy_(1, every, result)
        kernels.priorities(buffers.columns.advantages, buffers.columns.valid, buffers.priorities,
                           alpha=c["prio_alpha"], index=index)

    def _sample_segments(self):
        """Draw the segments of a minibatch, and what normalises their advantages."""
        buffers = self.buffers
        kernels.draw_segments(buffers.priorities, buffers.cumulative, buffers.index, buffers.segment_weights,
                              seed=self.config["seed"], counter=buffers.counter, beta=buffers.beta,
                              first=self._first_segment)
        kernels.advantage_moments(buffers.columns.advantages, buffers.columns.valid, buffers.index, buffers.moments)

    def _compute_gradients(self):
        """The gradients of the minibatch's loss."""
        kernels.normalisation(self.buffers.moments, self.buffers.settings)
        self.engine.backward(self.buffers.index)

    def _step_optimizer(self):
        """One optimizer step; after a gradient's norm was not finite, no step changes anything."""
        buffers = self.buffers
        norm = torch.as_tensor(self.optimizer.step(buffers.rate, buffers.found_inf), dtype=torch.float64)
        buffers.norms.index_copy_(0, buffers.counter[1:], norm.view(1))

    def _write_back(self):
        """The drawn segments' new values and ratios, and what follows from them; nothing of single steps."""
        buffers = self.buffers
        if self.config["draw"] == "steps":
            buffers.counter[1:].add_(1)
        else:
            kernels.write_back(buffers.index, buffers.new_values, buffers.new_ratios, buffers.counter, buffers.values,
                               buffers.ratios)
            self._compute_advantages(buffers.index)

    def _read_sums(self, minibatches):
        """Return the gradients' norms and the sums of the loss's statistics, and merge the observations' moments.
        Raises FloatingPointError that says what was not finite first, if a norm or train.loss is not."""
        norms, sums = self.buffers.norms[:minibatches].tolist(), self.buffers.sums.sum(0).cpu().numpy()
        # all ranks have the same gradient, but one rank's numbers may be the cause
        if not all(map(math.isfinite, norms)):
            cause, folder = min(self.ranks.gather(self._find_nan()))[1], self.run_folder
            checkpoint = f", and so was the last checkpoint, in {folder}." if folder else "."
            error = FloatingPointError(f"epoch {self.epoch}: {cause}. The weights were left as they were{checkpoint}")
            error.elsewhere = self.ranks.rank > 0  # all ranks raise it, one prints it
            raise error
        if not math.isfinite(sums[-1]):
            raise FloatingPointError(f"train.loss = {named(self.config['loss'])} gave {sums[-1]}; a finite number is "
                                     f"expected. It gets T = {self.span} steps of each segment.")
        if self.config["norm_obs"]:
            seen, valid = (self.storage[name][: self.horizon].flatten(0, 1) for name in ("observations", "valid"))
            self.normalizer.merge(self.ranks.gather(self.normalizer.moments(seen, valid)))
        return norms, sums

    def _end_epoch(self, begun, norms, sums):
        """Count the epoch, adapt the learning rate, log and save if due; returns the losses."""
        c, statistics = self.config, self.statistics
        self.epoch += 1
        self._rolled_out = False
        log_due = self._last_log is None or clock() - self._last_log[0] >= c["log_interval"]
        log_due = log_due or self.epoch == self.total_epochs
        if self.ranks.count > 1:
            sums, log_due = self.ranks.end_epoch(self, sums, log_due)
        statistics.loss_sums += sums
        statistics.grad_norms += norms
        statistics.seconds["learn"] += clock() - self.ranks.seconds - begun
        if norms or not self.losses:
            self.losses = self._loss_means(sums, norms)
        logs = dict(self.losses)
        if norms and c["target_kl"] is not None:
            self._rate_factor = self._adapt_rate(logs["approx_kl"])
        if log_due:  # before the checkpoint: a resume logs later entries again, but cannot log an earlier one
            self.mean_and_log()
        if self.epoch % c["checkpoint_interval"] == 0:
            self._try_checkpoint()
        return logs

    # -- schedules and numbers -------------------------------------------------------------------------------------

    @property
    def global_step(self):
        """Environment steps of all agents of all ranks so far."""
        return self._steps_before + self.epoch * self.batch_size

    @property
    def total_epochs(self):
        """The epoch at which total_timesteps are reached."""
        return max(0, -(-(self.config["total_timesteps"] - self._steps_before) // self.batch_size))

    @property
    def learning_rate(self):
        if self._override_lr is not None:
            return self._override_lr
        return self.config["learning_rate"] * self._rate_factor * schedule(self.config, self.global_step)

    @learning_rate.setter
    def learning_rate(self, value):
        self._override_lr = float(value)

    @property
    def uptime(self):
        """Seconds since the trainer was made, without those in which kernels were compiled."""
        return clock() - self._started

    @property
    def sps(self):
        """Environment steps a second since the last log entry."""
        since, step = self._last_log or (self._started, 0)
        return (self.global_step - step) / max(clock() - since, 1e-9)

    @property
    def environment(self):
        """The environments' means over the episodes since the last log entry, or of that entry."""
        return self.statistics.environment

    @property
    def storage(self):
        """What the policy sees and does, {name: (T or T + 1, N, ...)}."""
        return self.buffers.storage

    @property
    def run_folder(self):
        """The run's folder (a Path, or None). Assign another one before the first rollout."""
        return self.run.folder

    @run_folder.setter
    def run_folder(self, folder):
        self.run.folder = folder

    # -- checks and adaptation --------------------------------------------------------------------------------------

    def _check_open(self):
        """RuntimeError if the trainer was closed."""
        if self._closed:
            raise RuntimeError("this trainer was closed, and its environments with it; make another one. With "
                               "load_checkpoint(trainer.run_folder) it goes on where this one ended.")

    def _sync_config(self):
        """Return the settings, which what is saved has too. If one of CAPTURED was assigned since the last epoch, no
        graph is kept that has the old one."""
        c = self.config
        self.args["train"].update({name: c[name] for name in MOVING})
        if self.reward_scale is not None:
            self.reward_scale.gamma = c["gamma"]
        if c.moved:
            self.engine.refresh()
            c.moved = False
        return c

    def _sync_frozen(self):
        """Tell the optimizer which parameters are frozen now (requires_grad is False). RuntimeError if
        weights were added to the network after the trainer was made: nothing would train them."""
        frozen, arena = [], self.arena
        for name, parameter in self.policy.named_parameters():
            place = f"weights/policy.{name}"
            if place not in arena or parameter.data_ptr() != arena[place].data_ptr():
                raise RuntimeError(f"{name} has come into the network after the trainer was made, and would not be "
                                   "trained: change the network first, then make a PuffeRL.")
            if not parameter.requires_grad:
                frozen.append(f"policy.{name}")
        if frozen != self.optimizer.frozen:
            self.optimizer.freeze(frozen)
            self.engine.refresh()

    def _count_outside(self):
        """Count what lies outside the declared space in a few of a rollout's observations, others in
        each, for diagnostics.py. What train.norm_obs normalises may reach twice the bounds."""
        layout = self._layout
        T, N = self.horizon, self.num_agents
        steps = max(1, T // 4), min(N, max(1, 4 * N * math.prod(layout.shape) // diagnostics.SAMPLE))
        part = tuple(slice(self._rollouts % step, end, step)
                     for step, end in zip(steps, (T, N), strict=True))
        seen, valid = (self.buffers.on_host(name, part).numpy() for name in ("observations", "valid"))
        count, words = layout.find_outside(seen, valid, 1.0 if self.config["norm_obs"] else HAIR)
        self.statistics.outside += count
        if words and not self.signs.outside:
            self.signs.outside = f"{words} ({self._check_command()})"

    def _check_command(self):
        """How to find where an environment writes what is not finite."""
        name, library = self.config["env"], getattr(self.vecenv, "library", None)
        if library is not None and library.header.parent.parent != ocean.FOLDER:
            name = str(library.header)
        known = library or environments.load_creator(name) or (ocean.load(name)
                                                               if name in ocean.names() else None)
        if known is None:
            return "its reset() or step() returned it"
        settings = self.args.get("env", {}).items()
        changed = [f"{key}={value}" for key, value in settings
                   if known.settings.get(key, value) != value]
        options = [name, "--check", *(["--set", *changed] if changed else [])]
        return f"the environment writes it: python -m ocean {shlex.join(options)}"

    def _find_nan(self):
        """What diagnostics.find_nan says of this epoch's numbers."""
        s, buffers, environment = self.storage, self.buffers, self._check_command()
        low = "lower train.learning_rate"
        inactive, barred = s["valid"][: self.horizon] == 0, None  # agents whose numbers are never used
        logprobs = buffers.logprobs.masked_fill(inactive, 0.0)
        if s["action_masks"] is not None:
            heads = s["action_masks"][: self.horizon].split(buffers.heads.tolist(), dim=-1)
            has_choice = torch.stack([(head != 0).any(-1) for head in heads]).all(0)
            barred = logprobs.masked_fill(has_choice, 0.0)
        rollout = (("observations", s["observations"], environment),
                   ("logprobs", barred, "the action mask forbids every choice of a head: leave one, or let the agent "
                    "be dead"),
                   ("logprobs", logprobs,
                    f"the network's outputs overflow, or are -inf for every choice of a head: leave one, or {low}"),
                   ("values", buffers.values, f"the network's outputs overflow; {low}"),
                   ("rewards", s["rewards"].masked_fill(inactive, 0.0), environment))
        update = (("advantages", buffers.advantages, "rewards or values overflow; scale them or set train.reward_clip"),
                  ("new_values", buffers.new_values, f"the loss's forward pass overflows; {low}"),
                  ("train.loss", buffers.sums[:, kernels.SUMS], "your own function returned it"),
                  ("gradients", self.gradients, f"the update overflows; {low}"
                   + (", or mend the derivative of train.loss" if self.config["loss"] else "")))
        return diagnostics.find_nan(self.arena.flat("weights"), rollout, update)

    def _loss_means(self, sums, norms):
        """Return the logged means of the losses' sums and the gradients' norms of some minibatches."""
        name = named(self.config["loss"] or "").replace(":", ".").rpartition(".")[2]
        extra = {f"own_{name}_loss": float(sums[-1]) / max(1, len(norms))} if name else {}
        norm = float(np.mean(norms)) if norms else math.nan
        return {**kernels.loss_statistics(sums[:-1]), **extra, "grad_norm": norm, "learning_rate": self._used_lr}

    def _adapt_rate(self, kl):
        """Return the factor of the learning rate, adapted so that an epoch moves the policy by target_kl
        (Schulman et al. 2017, section 4; here gently, every epoch). Advantages that are small beside
        the return's deviation are mostly noise. The aim is then smaller, because Muon's steps do not
        shrink with the gradient."""
        target, factor = self.config["target_kl"], self._rate_factor
        if self.reward_scale is not None:
            count, total, squares = self.buffers.moments.tolist()  # of the last minibatch, of all ranks
            count = max(count, 1.0)  # all may be inactive
            deviation = math.sqrt(max(0.0, squares / count - (total / count) ** 2))
            target *= min(1.0, deviation / SMALL_ADVANTAGES)
        share = schedule(self.config, self.global_step)
        if share <= 0.05:
            return factor
        step = min(RATE_STEPS[1], max(RATE_STEPS[0], math.sqrt(target / max(kl, 1e-12))))
        return min(RATE_FACTORS[1], RATE_MOST / share, max(RATE_FACTORS[0], factor * step))

    # -- logs and checkpoints --------------------------------------------------------------------------------------

    def mean_and_log(self):
        """Log the means since the last entry and return them; if nothing is new, return that entry."""
        since, step = self._last_log or (self._started, 0)
        if self.global_step == step:
            return self.statistics.entry
        seconds, self.last_sps = clock() - since, self.sps
        losses = self._loss_means(self.statistics.loss_sums, self.statistics.grad_norms)
        metrics = self.statistics.means(self.ranks, seconds, losses)
        metrics |= {"performance/sps": self.last_sps, "performance/uptime": self.uptime,
                    "performance/epoch": self.epoch,
                    "performance/seconds_epoch": seconds * self.batch_size / (self.global_step - step)}
        shown = {name: self.buffers.on_host(name).numpy() for name in ("rewards", "valid", "terminals", "truncations")}
        few = slice(None), diagnostics.AGENTS
        shown |= {name: self.buffers.on_host(name, few).numpy() for name in ("observations", "actions")}
        metrics["vital/observation_outside"] = float(self.statistics.outside)
        metrics |= diagnostics.vital(**shown, bounds=action_bounds(self.vecenv.single_action_space),
                                     choices=emulation.sees_choices(self.vecenv))
        sentences = self.signs.see(self.global_step, metrics) if self.signs else []
        self.logger.log(metrics, self.global_step)
        if self.ranks.rank == 0:
            self.run.log(metrics, sentences, self.global_step)
        self.statistics.begin(metrics)
        self._last_log = (clock(), self.global_step)
        return metrics

    def record(self):
        """Make the run's folder: configuration, first checkpoint, and metrics.jsonl from now on, if nobody did.
        Raises ConfigError if it cannot be written."""
        if self.run.begun:
            return
        self.run.begun = True
        if self.run_folder is not None:
            fresh = self.ranks.first(lambda: not (self.run_folder / "trainer_state.pt").exists())
            state = runs.Snapshot(self).take() if fresh else None
            self.ranks.first(lambda: self.run.begin(self.args, state, self.global_step))
        self.logger.config(self.args)

    def print_dashboard(self):
        """Show progress: a live panel on a terminal, one line a call elsewhere."""
        if self.ranks.rank == 0:
            self._dashboard = self._dashboard or loggers.Dashboard(loggers.solved_at(self.args))
            self._dashboard.show(self)

    def save_checkpoint(self, path=None, metadata=None):
        """Write the model and the trainer's state to the run's folder, or one complete file to `path`; returns the
        model's path. metadata: plain values and tensors of yours, given back by load_checkpoint. Files are written
        under another name, synced and renamed, so none is half written. Raises OSError. All ranks call it."""
        if path is None and self.run_folder is None:
            raise ConfigError("save_checkpoint() without a path needs a run's folder, but data_dir is None.")
        state = runs.Snapshot(self).take(metadata)
        model = path or self.run.model(self.epoch)
        if self.ranks.rank == 0:
            if path is not None:
                runs.save(state, Path(path))
            else:
                self.run.save(state, model, self.statistics.best if self.statistics.best_unsaved else None)
                self.statistics.best_unsaved = False
                self.logger.artifact(str(model))
        return str(model)

    def _try_checkpoint(self):
        try:
            if self.run_folder:
                self.save_checkpoint()
        except OSError as error:  # a full disk must not end the run; the last checkpoint stays whole
            loggers.warn(f"checkpoint at epoch {self.epoch} not written: {error}")

    def load_checkpoint(self, path):
        """Go on from a file of save_checkpoint, or a folder's trainer_state.pt; returns its metadata.

        With the same settings, versions, buffers, threads and ranks the run continues bit for bit; what differs is
        printed. Environments that cannot be restored (in Python, or with other settings, agents or ranks) begin new
        episodes, which is printed as well. Only rank 0 reads the file. Raises ConfigError, and changes nothing, for
        another network or optimizer."""
        saved = runs.Snapshot(self).restore(Path(path))
        self._rolled_out = False
        self._started = clock() - saved["uptime"]
        self._last_log = (clock(), self.global_step)
        self._check_engine(has_loaded=True)
        return saved["metadata"]

    def close(self):
        """Save, log what is left, release; returns the model's path. ConfigError if that fails."""
        try:
            self.record()
            self.mean_and_log()
            return self._save_last() if self.run_folder else ""
        finally:
            self.release()

    def _save_last(self):
        """The run's last save_checkpoint. If it fails, a ConfigError on all ranks says what is left."""
        try:
            model, error = self.save_checkpoint(), None
        except OSError as problem:
            error = problem

        def check():
            if error is not None:
                raise self.run.unsaved(self.epoch, error)

        self.ranks.first(check)
        return model

    def release(self):
        """Stop the workers, the dashboard, the logger and the environments, without saving."""
        self._closed, self._rolled_out = True, False
        with contextlib.ExitStack() as stack:  # the rest ends if one of them raises
            for end in (self.vecenv.close, self.buffers.release, self.engine.release, self.logger.close,
                        self.run.release):
                stack.callback(end)
            if self._dashboard is not None:
                self._dashboard.close()


# in an epoch: too large a rate does harm at once, too small a one only takes longer
RATE_STEPS = 0.5, 1.2
SMALL_ADVANTAGES = 0.2  # the advantages' deviation, as a share of the return's
# how far target_kl may move the schedule, either way, and how many times the setting the learning rate may be: with
# more, solved policies were lost whose few decisive steps weigh little in the mean divergence (docs/findings.md)
RATE_FACTORS, RATE_MOST = (0.1, 10.0), 4.0
VERSIONS = {"torch": str(torch.__version__), "numba": numba.__version__, "numpy": np.__version__}


# --------------------------------------------------------------------------------------------------
# Which engine runs


def any_network_engine(config):
    """Return the class of the engine that runs any network on train.device."""
    return load_engine("fused").Graphs if config["device"] == "cuda" else engines.Autograd


def load_engine(name):
    """Return the module fast.compiled or fast.fused. Raises ImportError, RuntimeError or OSError without it."""
    return importlib.import_module(f"fast.{name}")


def choose_engine(policy, vecenv, config):
    """Return the class of the engine for a policy, and why it is not the hand-written one.

    That is the engine of train.engine, or for auto the hand-written one of the device if it implements the policy. The
    reason is None if there is none to be told, as of a custom network. Raises ConfigError for an engine that cannot
    run this.
    """
    requested, any_network = config["engine"], any_network_engine(config)
    fast, module = ("fused", "Fused") if config["device"] == "cuda" else ("compiled", "Compiled")
    if requested not in ("auto", "autograd", any_network.name, fast):
        raise ConfigError(f"train.engine = {requested}: with train.device {config['device']} there are {fast} and "
                          "autograd.")
    if requested in ("autograd", any_network.name):
        return any_network, None
    reason = verify.find_edit(policy, fast)
    if reason is None and verify.digest() not in (verify.DIGEST, None):
        reason = "models.py or engines.py was edited, and fast/ reimplements it (fast/verify.py says how to have both)"
    if reason is None and config["loss"]:
        reason = "train.loss needs its derivative"
    if reason is None and np.dtype(vecenv.observation_dtype) == np.float16:
        reason = "observations are float16"
    if reason is None:
        try:
            engine = getattr(load_engine(fast), module)
        except ModuleNotFoundError as error:
            if error.name != f"fast.{fast}":
                raise
            reason = f"there is no fast/{fast}.py"
        except (RuntimeError, OSError) as error:  # fast/tile.c is missing, or a compiler for it
            reason = str(error).splitlines()[0]
        else:
            reason = verify.compare(policy, vecenv, engine.Sample)
    if reason is None:
        if config["compile"] and requested == "auto" and not isinstance(policy, models.MinGRUPolicy):
            return any_network, None
        if config["compile"]:
            raise ConfigError("train.compile: the default network is compiled by hand; it is for "
                              "your own, or for train.engine autograd.")
        return engine, None
    if requested != "auto":
        raise ConfigError(f"train.engine = {requested} cannot run this: {reason}. Take auto or autograd.")
    inner = policy.policy if type(policy) is models.Normalized else policy
    is_default = isinstance(policy, models.MinGRUPolicy) or type(inner) in verify.NETWORKS[fast]
    return any_network, reason if is_default else None


# --------------------------------------------------------------------------------------------------
# What the trainer uses: statistics, checks, settings

BEST_EPISODES = 100  # a score counts as the best only if it is the mean of as many episodes


class Statistics:
    """What has happened since the last log entry, and the best score of all."""

    def __init__(self, ranks):
        stages = ("environment", "policy", "learn", *(("ranks",) if ranks > 1 else ()), "other")
        self.seconds = self.stages = dict.fromkeys(stages, 0.0)  # since the last entry, and of it
        self.best_score, self.best, self._recent, self.best_unsaved = -math.inf, {}, (0.0, 0), False
        self.environment, self.entry = {}, {}  # means of the episodes, and the last entry
        self._clear()

    def _clear(self):
        self.loss_sums, self.grad_norms, self.bonuses = np.zeros(kernels.SUMS + 1), [], []
        self._totals, self._returns, self.outside = {}, (math.inf, -math.inf), 0

    def add_returns(self, buffers):
        """Keep the smallest and the largest return of the episodes that ended in a rollout."""
        self._returns = buffers.return_range(*self._returns)

    def add_episodes(self, log, policy):
        """Add the environments' means; their "n" is the number of episodes. Keep a copy of the
        weights with the best mean score over BEST_EPISODES or more."""
        count = log.get("n", 0)
        if not count:
            return
        for name, value in log.items():
            total, weight = self._totals.get(name, (0.0, 0))
            self._totals[name] = (total + value * count, weight + count)
        self.environment = {name: total / weight for name, (total, weight) in self._totals.items()}
        self.environment["n"] = self._totals["n"][1]
        score = log.get("score", log.get("episode_return", math.nan))
        total, episodes = self._recent[0] + score * count, self._recent[1] + count
        self._recent = total, episodes
        if episodes >= BEST_EPISODES:
            if total / episodes >= self.best_score:  # the newest of equals: in self-play all may score 0
                self.best_score, self.best_unsaved = total / episodes, True
                for name, tensor in policy.state_dict().items():
                    if not isinstance(tensor, torch.Tensor):  # from get_extra_state
                        self.best |= runs.copies({name: tensor})
                        continue
                    if self.best[name].shape != tensor.shape:
                        raise ConfigError(f"{type(policy).__name__}: its {name} is {tuple(tensor.shape)} now, but "
                                          f"{tuple(self.best[name].shape)} when the run began, so no checkpoint fits "
                                          "both. If it depends on the number of agents, it belongs in the state "
                                          "(initial_state, docs/scripts.md).")
                    self.best[name].copy_(tensor)
            self._recent = 0.0, 0

    def means(self, group, seconds, losses):
        """{"environment/score": ..., "losses/...": ..., "performance/seconds_...": ...} since the
        last entry, which is `seconds` ago; all ranks call it."""
        stages, ends = dict(self.seconds), ("episode_return_min", "episode_return_max")
        if group.count > 1:
            stages["ranks"] = group.take_seconds()
            low, high = self._returns
            low, high = group.max(np.array([-low, high])).tolist()
            self._returns = -low, high
        known = (dict(zip(ends, self._returns, strict=True))
                 if self._returns[0] <= self._returns[1] else {})
        self.environment |= known if self._totals else {}
        stages["other"] = max(0.0, seconds - sum(stages.values()))
        self.stages = stages
        metrics = {f"environment/{name}": value  # episodes may end without a log
                   for name, value in (self.environment if self._totals else known).items()}
        metrics |= {f"losses/{name}": value for name, value in losses.items() if self.grad_norms}
        metrics |= {"losses/bonus": float(np.mean(self.bonuses))} if self.bonuses else {}
        return metrics | {f"performance/seconds_{name}": value for name, value in stages.items()}

    def begin(self, entry):
        """Begin anew after a log entry."""
        self.entry, self.seconds = entry, dict.fromkeys(self.seconds, 0.0)
        self._clear()


def normalize_args(config, vecenv, policy):
    """(configuration, vectorized environment, policy) from PuffeRL's arguments; the configuration
    may be missing. What torch.compile made of a network is that network with train.compile."""
    if config is not None and not isinstance(config, Mapping):  # PuffeRL(env, policy)
        config, vecenv, policy = None, config, vecenv if policy is None else policy
    if isinstance(policy, torch.nn.Module) and hasattr(policy, "_orig_mod"):
        config, policy = {**(config or {}), "compile": True}, policy._orig_mod
    if isinstance(policy, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise ConfigError(f"PuffeRL(config, vecenv, policy): give the network itself in place of its "
                          f"{type(policy).__name__}. The trainer averages the gradients of all ranks (docs/scale.md).")
    if vecenv is None or policy is None:
        raise ConfigError("PuffeRL needs an environment and a policy: PuffeRL(env=make('breakout', "
                          "num_envs=256), policy=policy, learning_rate=0.01) or PuffeRL(config, "
                          "vecenv, policy).")
    vecenv = make(vecenv) if isinstance(vecenv, emulation.PufferEnv) else vecenv
    for name, given, right, what in (
            ("vecenv", vecenv,
             hasattr(vecenv, "num_agents") and not isinstance(vecenv, torch.nn.Module),
             "what make or load_env gives"),
            ("policy", policy, isinstance(policy, torch.nn.Module), "a torch.nn.Module")):
        if not right:
            raise ConfigError(f"PuffeRL(config, vecenv, policy): {name} is a "
                              f"{type(given).__name__}, expected {what}"
                              + ("; the two are swapped."
                                 if isinstance(vecenv, torch.nn.Module) else "."))
    return config or {}, vecenv, policy


def check_train(config, vecenv, policy, agents, group):
    """The settings that a trainer runs with: the train section, checked, with numbers in place of "auto".

    config: a dict of train's settings, by their names here or in other trainers. It may also have
    env, data_dir, run_id, settings and use_rnn. agents: of all ranks; group: data_parallel.connect().
    Raises ConfigError that says what would work.
    """
    recurrent = hasattr(policy, "initial_state")
    if config.get("use_rnn", recurrent) != recurrent:
        raise ConfigError(f"use_rnn = {config['use_rnn']}: it is {recurrent} of this policy, whether it has an "
                          "initial_state; models.LSTMWrapper and MinGRUWrapper make one recurrent.")
    extra = {key: config[key] for key in config.keys() & {"env", "data_dir", "run_id", "settings", "use_rnn"}}
    c = train_settings({key: value for key, value in config.items() if key not in extra})
    c |= {"env": vecenv.name, "data_dir": Base.data_dir, **extra}
    if c["norm_obs"] == "auto":  # the network exists already, with a normalizer or without
        c["norm_obs"] = models.find_normalizer(policy) is not None
    c |= {name: value for name, (value, _) in decide(c, facts_of(vecenv, agents, c["total_timesteps"])).items()}

    def need(is_right, key, what):
        if not is_right:
            raise ConfigError(f"train.{key} = {named(c[key])}: {what}.")

    need(c["gpus"] in (1, group.local_count), "gpus",
         f"there are {group.local_count} ranks on this machine; pufferl.py train starts them, or torchrun does")
    span, batch = drawn_steps(c), agents * c["horizon"]
    whole = f"must be a multiple of train.horizon = {span}" if c["draw"] == "segments" else "must be 1 or more"
    need(c["minibatch_size"] % span == 0, "minibatch_size", f"{whole}, whole segments are drawn")
    need(c["minibatch_size"] <= batch, "minibatch_size", f"is more than one epoch's batch, {agents} agents × horizon "
         f"{c['horizon']} = {batch}; take a smaller one or more agents (vec.total_agents)")
    need(c["minibatch_size"] >= span * group.count, "minibatch_size",
         f"gives not one segment of {plural(span, 'step')} to each of {group.count} ranks; take a larger one")
    most = c["max_minibatch_size"]
    need(most is None or (most >= span and most % span == 0), "max_minibatch_size", whole)
    need(c["draw"] == "segments" or not (recurrent and policy.initial_state(1)), "draw",
         "this network has a memory, which needs steps in their order; take segments, or rnn.name none")
    for name in ("loss", "advantage"):
        if c[name]:
            need(callable(load_attribute(f"train.{name}", c[name])), name, "must be a function")
    if own_optimizer(c):
        optim.check_optimizer(load_attribute("train.optimizer", c["optimizer"]), c["weight_decay"])
    return c


def check_policy(policy, vecenv, config):
    """ConfigError if the network cannot read these observations, or lacks what a setting needs."""
    inputs, size = getattr(getattr(policy, "encoder", None), "in_features", None), math.prod(vecenv.observation_shape)
    if isinstance(policy, models.MinGRUPolicy) and inputs not in (None, size):
        raise ConfigError(f"the policy was made for observations of {inputs} numbers, these "
                          f"environments give {size}: make it from this vecenv, or keep the "
                          "setting that changed.")
    for name, weight in policy.named_parameters():
        if isinstance(weight, torch.nn.UninitializedParameter):
            raise ConfigError(f"{type(policy).__name__}: {name} has no shape yet, because its layer is lazy. Call the "
                              "network once on a batch of observations, at the end of its __init__ for example.")
        if weight.dtype != torch.float32:
            raise ConfigError(f"{type(policy).__name__}: {name} is {weight.dtype}. What is trained must be float32 "
                              "(network.float()); train.precision says in what numbers to compute.")
    models.find_form(policy, vecenv.single_observation_space)
    for name, tensor in (policy.initial_state(1) if config["use_rnn"] else {}).items():
        if tensor.dim() < 2 or tensor.shape[1] != 1:
            raise ConfigError(f"{type(policy).__name__}.initial_state(1): {name} has the shape {tuple(tensor.shape)}, "
                              "expected (layers, 1, size).")
    if (wrong := engines.check_recurrent_contract(policy, vecenv)) is not None:
        raise ConfigError(wrong)
    if config["norm_obs"] and models.find_normalizer(policy) is None:
        raise ConfigError("train.norm_obs = True: this network has no models.Normalizer. "
                          "load_policy makes one that has, as models.MinGRUPolicy(env, "
                          "normalize=True) does; models.Normalized(env, policy) puts one before a "
                          "network of your own.")


def schedule(config, step):
    """The share of learning_rate that the cosine leaves at a step (Loshchilov and Hutter 2017)."""
    if not config["anneal_lr"]:
        return 1.0
    progress, low = min(1.0, step / config["total_timesteps"]), config["min_lr_ratio"]
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))


# graphs of a GPU have these
CAPTURED = ("gamma", "gae_lambda", "vtrace_rho_clip", "vtrace_c_clip", "prio_alpha", "reward_clip")
MOVING = ("total_timesteps", "learning_rate", "anneal_lr", "min_lr_ratio", "target_kl", "clip_coef", "vf_coef",
          "vf_clip_coef", "ent_coef", "advantage_floor", "anneal_ent_coef", "bonus_coef", *CAPTURED,
          "prio_beta0", "state", "log_interval", "checkpoint_interval")


class Settings(dict):
    """A trainer's settings. Those in MOVING may be assigned between epochs. ConfigError for another setting of the
    train section, because memory or a part of the trainer was made for it, for a name that there is not, and for a
    value that a setting cannot have."""

    moved = False  # one of CAPTURED, since the last epoch

    def __setitem__(self, name, value):
        if name not in self and name != "use_rnn":
            raise ConfigError(f"train.{name}: {ocean.nearest(name, MOVING)}.")
        if name in FIXED and value != self[name]:
            raise ConfigError(f"train.{name} = {named(value)}: this trainer was made for {named(self[name])}; make "
                              "another one, whose load_checkpoint goes on from this one's. What may change between "
                              f"epochs: {', '.join(MOVING)}.")
        if name in MOVING:
            value = coerce(value, TYPES[name], f"train.{name}")
            if value == "auto":
                raise ConfigError(f"train.{name} = auto: it was decided when this trainer was made; give a value.")
            if value != 0 or name not in ("learning_rate", "clip_coef", "vf_clip_coef"):  # a schedule may end in 0
                check_bound(f"train.{name}", value, f"train.{name}")
        self.moved |= name in CAPTURED and value != self[name]
        super().__setitem__(name, value)

    def update(self, *others, **settings):
        for name, value in dict(*others, **settings).items():
            self[name] = value

    def __ior__(self, other):
        self.update(other)
        return self


TYPES = {f.name: f.type for f in dataclasses.fields(Train)}
FIXED = set(TYPES) - set(MOVING)


# --------------------------------------------------------------------------------------------------
# Command line


MEASURED_SECONDS = 1.0  # of measuring, after the epoch in which kernels are compiled
MEASURED_AGENTS = {True: 1024, False: 16}  # at most; in C or not
MEASURED_HORIZON = 16
MEASURED_EPISODES = 16  # episodes at least, before their length is used
# extra seconds of a step of all environments in processes of their own, for the messages
EXCHANGE = 3e-4


def measure(env_name, args, vecenv, facts):
    """Add to the Facts of an environment what a step of it and learning from one cost, and how its
    episodes end, from some epochs of throw-away environments and a copy of the network. Nothing
    random that the run uses is drawn. The Facts as they are if one process cannot hold more of
    these environments, or one environment holds many agents' worlds itself."""
    if not facts.native and (vecenv.num_envs == 1 or isinstance(vecenv, Tensors)):
        return facts
    num_envs = max(1, MEASURED_AGENTS[facts.native] * vecenv.num_envs // vecenv.num_agents)
    vec = {**args["vec"], "num_envs": 1, "total_agents": None, "num_workers": None,
           "batch_size": None,
           "num_buffers": None, "device": "host", "backend": "native" if facts.native else "serial"}
    small = {**args, "vec": vec, "env": {**args["env"], "num_envs": min(num_envs, vecenv.num_envs)},
             "train": {**args["train"], "norm_obs": False, "replay_ratio": 1.0,
                       "total_timesteps": 10**12,
                       "horizon": MEASURED_HORIZON, "minibatch_size": "auto",
                       "max_minibatch_size": None, "log_interval": math.inf}}
    # environments may draw from global generators
    with data_parallel.alone(), contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        try:
            trial = load_env(env_name, small)
        except Exception:  # a process can hold only one, as with emulators
            return facts
        stack.callback(trial.close)
        config = {**small["train"], "env": args["env_name"], "data_dir": None,
                  "cudagraphs": -1, "gpus": 1}
        trainer = PuffeRL(config, trial, load_policy(small, trial, env_name))
        stack.callback(trainer.release)
        trainer.signs = None  # this run only measures; its settings are not those of the real run
        episodes = EpisodeEnds(trial.num_agents)
        trainer.evaluate()
        episodes.add(trial.storage)
        trainer.train()
        begun, before, warm = time.perf_counter(), dict(trainer.statistics.seconds), trainer.epoch
        try:
            while trainer.epoch == warm or time.perf_counter() - begun < MEASURED_SECONDS:
                trainer.evaluate()
                episodes.add(trial.storage)
                trainer.train()
        except Exception as error:
            error.add_note("No run had begun: this was while steps were measured, to choose settings that are auto.")
            raise
    steps = (trainer.epoch - warm) * trainer.batch_size
    spent = {stage: (seconds - before[stage]) / steps
             for stage, seconds in trainer.statistics.seconds.items()}
    side_by_side = 1 if facts.native else max(1, getattr(vecenv, "num_processes", 1))
    chosen = (args["vec"]["backend"] != "auto" or args["vec"]["num_workers"]
              or args["vec"]["batch_size"])
    saved = spent["environment"] * vecenv.num_agents * (1 - 1 / side_by_side)
    here = side_by_side > 1 and not chosen and saved < EXCHANGE
    seconds = spent["environment"] / (1 if here else side_by_side) + spent["policy"]
    return dataclasses.replace(facts, step_seconds=seconds, learn_seconds=spent["learn"],
                               cut=episodes.cut, here=here)


class EpisodeEnds:
    """How the episodes of rollouts end."""

    def __init__(self, agents):
        self.age, self.lengths, self.by_itself = np.zeros(agents, int), [], False

    def add(self, storage):
        """A rollout's terminals and truncations, (T, N)."""
        self.by_itself |= bool(storage.terminals.any())
        for cut in storage.truncations:
            self.age += 1
            self.lengths += self.age[cut > 0].tolist()
            self.age[cut > 0] = 0

    @property
    def cut(self):
        """The step at which every episode is cut off; None if one ends by itself, or too few have
        ended."""
        known = (not self.by_itself and len(self.lengths) >= MEASURED_EPISODES
                 and len(set(self.lengths)) == 1)
        return self.lengths[0] if known else None


def settle(env_name, args, vecenv):
    """Replace "auto" in the train section of `args` by numbers, and put the reasons into
    args["auto"]. Rank 0 chooses for all ranks. Returns the Facts that it chose by."""
    group, section = data_parallel.connect(), args["train"]
    facts = facts_of(vecenv, sum(group.gather(vecenv.num_agents)), section["total_timesteps"])

    def choose():
        unknown = "auto" in (section["replay_ratio"], section["gamma"])
        found = measure(env_name, args, vecenv, facts) if unknown else facts
        return decide(section, found), found

    chosen, found = group.first(choose)
    section |= {name: value for name, (value, _) in chosen.items()}
    args["auto"] = args.get("auto", {}) | {f"train.{name}": reason
                                           for name, (_, reason) in chosen.items()}
    return found


def find_interrupted(group, args):
    """If a launcher has started this command again, go on with its run."""
    args["resume"] = group.find_interrupted(args["data_dir"], stem_of(args["env_name"]))
    if args["resume"]:  # its measured choices stay
        saved = group.first(lambda: json.loads((Path(args["resume"]) / "config.json").read_text()))
        for section in ("train", "vec"):
            args[section] |= {name: value for name, value in saved[section].items()
                              if args[section].get(name) == "auto"}


def make_trainer(env_name, args):
    """(the trainer that a configuration describes, the Facts that "auto" was settled by)."""
    group, vecenv = data_parallel.connect(), load_env(env_name, args)
    try:
        facts = settle(env_name, args, vecenv)
        if facts.here:
            vecenv.close()
            args["vec"]["backend"] = "serial"
            args["auto"]["vec.backend"] = "a step of all environments is shorter than messages to other processes"
            vecenv = load_env(env_name, args)
        policy = load_policy(args, vecenv, env_name)
        normalises = models.find_normalizer(policy) is not None
        loaded = args["load_model_path"] or args["baseline"]
        if normalises != args["train"]["norm_obs"] and (loaded or "train.norm_obs" in args["auto"]):
            args["train"]["norm_obs"] = normalises
            args["auto"]["train.norm_obs"] = f"{'the loaded' if loaded else 'your own'} network decides that"
        if args["resume"]:
            folder = group.first(lambda: find_run(args["resume"], args["data_dir"], env_name,
                                                  "trainer_state.pt"))
        trainer = PuffeRL({**args["train"], "env": args["env_name"], "data_dir": args["data_dir"],
                           "settings": {**args, "launch": group.launchers()}}, vecenv, policy)
    except BaseException:
        vecenv.close()
        raise
    if args["resume"]:
        trainer.run_folder = folder.parent if folder.name == "trainer_state.pt" else folder
    return trainer, facts


def describe(trainer, args, facts):
    """Lines that describe a run: its sizes, its network and engine, and what "auto" chose."""
    speed, minutes = "", 0.0
    if facts.learn_seconds is not None:
        seconds = facts.step_seconds + args["train"]["replay_ratio"] * facts.learn_seconds
        speed = f"; some {float(f'{1 / seconds:.2g}'):,.0f} steps a second"
        minutes = args["train"]["total_timesteps"] * seconds / 60
    elsewhere = getattr(trainer.vecenv, "num_processes", 1)
    steps = f" and {elsewhere} processes of environments" if elsewhere > 1 else ""
    folder = ("nothing is written" if trainer.run_folder is None
              else f"run folder {trainer.run_folder}")
    yield (f"{trainer.env_name}: "
           f"{plural(trainer.batch_size // trainer.horizon, 'agent')} × horizon "
           f"{trainer.horizon} = {trainer.batch_size:,} steps an epoch, "
           f"{plural(trainer.total_epochs, 'epoch')}; "
           f"{plural(trainer.vecenv.num_threads, 'thread')}{steps}; engine {trainer.engine.name}; {folder}")
    yield f"network: {models.summarize(trainer.policy)}{speed}"
    if minutes > 10:
        yield (f"this run takes some {minutes:.0f} minutes: --train.total-timesteps "
               f"{float(f'{5 / seconds * 60:.2g}'):.0f} takes five")
    if trainer.engine.blocking_classes:
        yield (f"one thread of {trainer.vecenv.num_threads} learns. If forward keeps nothing from call to call and "
               f"draws no random numbers, write thread_safe = True into {', '.join(trainer.engine.blocking_classes)}: "
               "then each learns (docs/speed.md)")
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
           for module in trainer.policy.modules()):
        yield ("batch norms: the moments of a rollout's step and of a minibatch differ, so what learns is not what "
               "acted, and such a network may learn nothing; take nn.LayerNorm, or call eval() of these layers")
    if args["train"]["device"] == "auto" and isinstance(trainer.vecenv, Native) and torch.cuda.is_available():
        yield "a GPU is here: --train.device cuda trains on it, Breakout many times as fast (docs/gpu.md)"
    for name, reason in args["auto"].items():
        section, _, key = name.partition(".")
        if reason is not None:
            yield f"auto: --{name.replace('_', '-')} {args[section][key]}  # {reason}"


def train(env_name, args=None):
    """Train and return the trainer, closed; its checkpoint and logs are in trainer.run_folder.
    args: from load_config, which is called if they are missing."""
    args, group = load_config(env_name) if args is None else args, data_parallel.connect()
    check_names(args)
    if data_parallel.started():
        args["train"]["gpus"] = group.local_count
    if not args["resume"] and args["data_dir"] is not None:
        find_interrupted(group, args)
    say = processes.say if group.rank == 0 else lambda text: None
    screen = loggers.Dashboard(loggers.solved_at(args))
    with contextlib.closing(screen):
        compile_timer.announce = lambda: say(loggers.COMPILING)
        trainer, facts = make_trainer(env_name, args)
        trainer._dashboard = screen
        try:
            start(trainer, args, facts, say)
            shown, interval = 0.0, args["train"]["log_interval"] * (1 if sys.stdout.isatty() else 5)
            with processes.Interrupts(is_silent=group.rank > 0) as interrupts:
                while trainer.epoch < trainer.total_epochs and not group.any(interrupts.requested):
                    trainer.evaluate()
                    trainer.train()
                    if time.perf_counter() - shown > interval or trainer.epoch == trainer.total_epochs:
                        trainer.print_dashboard()
                        shown = time.perf_counter()
        except BaseException as error:
            trainer.release()
            folder = trainer.run_folder
            if isinstance(error, Exception) and trainer.epoch and folder and (folder / "trainer_state.pt").exists():
                error.add_note(f"The last checkpoint is whole: {command('train', env_name, '--resume', str(folder))}")
            raise
        model = trainer.close()
    for line in screen.closing(trainer, args, model):
        say(line)
    return trainer


def start(trainer, args, facts, say):
    """Resume or begin a run: make its logger and folder, and describe it."""
    group = data_parallel.connect()

    def open_logger():
        try:
            trainer.logger = loggers.make_logger(args, trainer.run_folder, trainer.global_step)
        except (ImportError, ValueError) as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise ConfigError(runs.UNWRITABLE.format(trainer.run_folder, error)) from None

    if args["resume"]:
        trainer.load_checkpoint(trainer.run_folder)
        say(f"resumed {trainer.run_folder} at step {trainer.global_step:,}")
        if trainer.epoch >= trainer.total_epochs:
            say("nothing is left of its train.total_timesteps; give more to go on")
    group.first(open_logger)
    trainer.record()
    for line in describe(trainer, args, facts):
        say(line)


USAGE = """usage: python pufferl.py {train,eval,ship,sweep,export,autotune,profile} ENV [--section.key value ...]
       python pufferl.py {list,runs,plot,diagnose,doctor} ...

  list [ENV]   the environments: what each is, sees and does, and what solving it takes; all of one
  train ENV    train a policy; Ctrl-C stops it with a checkpoint
  eval ENV     play episodes with a trained policy: --load-model-path latest
  ship ENV     make a run's policy the one that ships with its environment: --load-model-path latest
  sweep ENV    search hyper-parameters; the same as python protein.py ENV
  export ENV   a trained policy as ONNX, for C or as a web page: --load-model-path latest --export.web FOLDER
  autotune ENV find the backend, workers and batch size that step it fastest here
  profile ENV  where the time goes: tables, and a trace for a browser
  runs         the runs so far; runs show RUN: all of one; runs rm RUN: remove it
  plot RUN ... curves of a metric over the steps, in the terminal and as a page: --metric entropy --output a.html
  diagnose RUN why a run did not learn: what its metrics say, and a page of its curves; a folder, latest, or ENV
  doctor       what this machine has, how fast it trains, and what is missing; for a report of a bug

  python pufferl.py train breakout --help    lists every setting with its default

ENV: gym/CartPole-v1, pettingzoo/mpe/simple_spread_v3 and the like, my_file.py:make_env, my_environment.h, a file of
config/ (drone_race, atari_pong), or an environment in C: """


def verb_first(argv):
    """PufferLib 2's command line (--mode train --env breakout) in today's form; any other
    unchanged."""
    if (not argv or not argv[0].startswith("--")
            or not {word.partition("=")[0] for word in argv} & {"--mode", "--env"}):
        return argv
    named, rest, words = {"--mode": "train"}, [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--mode", "--env"):
            named[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    # PufferLib 2 had one verb for each method of sweeps
    verb = "sweep" if named["--mode"].startswith("sweep") else named["--mode"]
    return [verb, *filter(None, [named.get("--env")]), *rest]


def main(argv=None):
    argv = verb_first(list(sys.argv[1:] if argv is None else argv))
    if not argv or argv[0] in ("-h", "--help") or argv in (["train", "-h"], ["train", "--help"]):
        print(USAGE + ", ".join(ocean.names()))
        return
    elsewhere = {"sweep": "sweep.command", "eval": "watch", "ship": "watch", "autotune": "speed", "profile": "speed",
                 "export": "export", "list": "catalogue", "doctor": "doctor",
                 **dict.fromkeys(("runs", "plot", "diagnose"), "history")}
    if argv[0] in elsewhere:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            sys.exit(f"pufferl.py: {argv[0]} runs in one process; torchrun's are for train.")
        room = elsewhere[argv[0]]
        verb = importlib.import_module(f"tools.{room}").main
        return verb(argv if room in ("speed", "history", "watch") else argv[1:],
                    program=f"pufferl.py {argv[0]}")
    if argv[0] != "train":
        known = ocean.nearest(argv[0], ["train", *elsewhere])
        sys.exit(f"pufferl.py: there is no verb {argv[0]!r}: {known}.\n{USAGE}{', '.join(ocean.names())}")
    if len(argv) < 2 or argv[1].startswith("-"):
        sys.exit(f"pufferl.py {argv[0]}: which environment? There are: {', '.join(ocean.names())}")
    with exit_on_error("pufferl.py"):
        args = data_parallel.connect().first(lambda: load_config(argv[1], argv[2:]))
        gpus, started = args["train"]["gpus"], data_parallel.connect().local_count
        if gpus > 1 and not data_parallel.started():
            sys.exit(data_parallel.launch(gpus, [__file__, *argv]))
        if gpus != started and any(option.startswith("--train.gpus") for option in argv):
            raise ConfigError(f"train.gpus = {gpus}, but torchrun has started {started} on this "
                              "machine; leave it out.")
        train(argv[1], args)


if __name__ == "__main__":
    if data_parallel.started():
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)  # so that torchrun shows the traceback of the rank that failed first
    processes.run_command(main)
