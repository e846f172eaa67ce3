"""Train policies with PPO: the trainer `PuffeRL` and the command line.

    python pufferl.py train breakout                              # trains and saves a policy
    python pufferl.py train breakout --train.learning-rate 0.01   # --help lists all settings
    python pufferl.py eval breakout --load-model-path latest      # mean score of 256 episodes

    from pufferl import PuffeRL, load_config, load_env, load_policy      # or from a script
    args = load_config("breakout")
    vecenv = load_env("breakout", args)
    policy = load_policy(args, vecenv, "breakout")
    trainer = PuffeRL({**args["train"], "env": "breakout"}, vecenv, policy)
    while trainer.global_step < args["train"]["total_timesteps"]:
        trainer.evaluate()
        logs = trainer.train()
    trainer.close()

An epoch is one `evaluate` (a rollout of `horizon` steps of all agents) and one `train` (advantages,
then minibatches of prioritized segments). The steps of the algorithm are in `PuffeRL.train`, its
formulas (advantage, loss, sampling) in kernels.py. ppo.py has the same algorithm in one file, which
pufferl.py does not import. Networks are in models.py, environments in vector.py, settings with
their defaults in configuration.py; config/ENV.ini changes them for one environment. An engine runs
the network in rollout and learning: engines.py any network, fast/compiled.py the default network on
a CPU, fast/fused.py on a GPU.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
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

# After an operation torch's threads spin for 0.2 to 0.5 ms, because waking one takes 0.1 ms. Then
# they sleep, because spinning keeps cores from other threads (docs/findings.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# All hardware queues of a GPU instead of 8: streams that share one wait for each other. CUDA reads
# the variable when it starts.
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
from arena import Arena, all_columns, clock, compile_timer
from auto import decide, drawn_steps, facts_of, gpu_reason, plural
from configuration import (
    Base,
    Entry,
    Train,
    check_names,
    command,
    convert,
    convert_section,
    find_run,
    has_custom_optimizer,
    load_attribute,
    load_config,
    named,
    replace_batch_size,
    stem_of,
)
from errors import ConfigError, exit_on_error, require
from fast import verify
from flat_spaces import ROUNDING_TOLERANCE, action_bounds, leaf_kind, name_field

# for scripts too
from loggers import NoLogger, TensorBoardLogger, WandbLogger  # noqa: F401
from models import load_policy
from vector import Native, Tensors, load_env, make

processes.keep_memory()

# --------------------------------------------------------------------------------------------------
# The trainer


class PuffeRL:
    """PPO for a vectorized environment and a policy.

    config: the train section as a dict; missing keys have their defaults. It may also have "env"
    (the environment's name), "data_dir" (None: no files), "run_id" and "settings" (all sections,
    which are saved with the run). vecenv (or env): from make or load_env, or one PufferEnv. policy:
    a module that maps observations to (logits, value), see models.py. logger: an object with the
    methods of loggers.NoLogger. Without config, settings are keywords, and batch_size sets the
    horizon:

        PuffeRL(vecenv, policy, logger=logger, learning_rate=0.01,
                batch_size=128 * vecenv.num_agents)

    Attributes: engine runs the network forward and backward; buffers holds the tensors of the
    rollout and the minibatch (not those of vector.py); arena is the one memory block behind all
    tensors; ranks are the processes that train together.

    Properties: global_step, epoch, total_epochs, sps, uptime, and learning_rate, which overrides
    the schedule if you assign it. Under torchrun every rank makes a trainer with its own
    environments and calls the same methods. batch_size, global_step, losses and statistics are of
    all ranks, num_agents and storage of this rank (docs/scale.md). Raises ConfigError if the
    settings cannot work.
    """

    def __init__(self, config=None, vecenv=None, policy=None, logger=None, *, env=None, **settings):
        config, vecenv, policy = normalize_args(config, vecenv if env is None else env, policy)
        self.ranks = data_parallel.connect()
        agents = self.ranks.gather(vecenv.num_agents)
        c = self.config = Settings(check_train({**config, **settings}, vecenv, policy, sum(agents),
                                               self.ranks))
        train_section = {field.name: named(c[field.name]) for field in dataclasses.fields(Train)}
        self.args = {"env_name": c["env"], **c.pop("settings", {}), "train": train_section,
                     "agents": sum(agents), "versions": VERSIONS}
        self.vecenv = vecenv
        self.policy = policy
        has_logger = logger is not None and self.ranks.rank == 0
        self.logger = loggers.check_logger(logger) if has_logger else NoLogger()
        self.env_name = stem_of(c["env"])
        self.horizon = c["horizon"]
        self.num_agents = vecenv.num_agents
        self.batch_size = self.horizon * sum(agents)
        drawn = c["minibatch_size"] // drawn_steps(c)  # segments of a minibatch, of all ranks
        self._first_segment = drawn * self.ranks.rank // self.ranks.count
        self.segments = drawn * (self.ranks.rank + 1) // self.ranks.count - self._first_segment
        self.epoch = 0
        self.global_step = 0  # environment steps so far, of all agents of all ranks
        self._rollouts = 0
        self._minibatches_owed = 0.0
        self._rate_factor = 1.0
        self._override_lr = None
        self._has_rollout = self._has_loaded = False
        self._is_closed = False
        self._start_time = clock()
        self._last_log = self._start_time, 0
        self._dashboard = loggers.Dashboard(loggers.solved_at(self.args))
        self.losses = {}
        self._custom_advantage = None
        if c["advantage"]:
            self._custom_advantage = load_attribute("train.advantage", c["advantage"])
        self.statistics = Statistics(self.ranks.count)
        self.warnings = diagnostics.Warnings(c, sum(agents))
        run_id = c.get("run_id") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        name = f"{self.env_name}_{self.ranks.broadcast_object(run_id)}"
        folder = None if c["data_dir"] is None else Path(c["data_dir"]) / name
        self.run = runs.Run(folder, self.env_name, c["keep"])
        if self.ranks.count > 1:
            self.ranks.join(self, agents)
        self.normalizer = models.find_normalizer(policy)
        self._layout = flat_spaces.FlatObservation(emulation.declared_space(vecenv.driver_env))
        self.reward_scale = (models.RewardScale(self.num_agents, c["gamma"])
                             if c["norm_reward"] else None)
        check_policy(policy, vecenv, c)
        self._allocate(*choose_engine(policy, vecenv, c), sum(agents[: self.ranks.rank]))
        self.statistics.best = runs.copies(policy.state_dict())
        self.bonus = None if c["bonus"] == "none" else models.Bonus(
            c["bonus"], vecenv.driver_env, self.num_agents, self.buffers.torch_device)

    def _allocate(self, engine, reason, first_agent):
        """Make the engine, the optimizer and all long-lived tensors, in one arena."""
        c = self.config
        minibatches = math.ceil(c["replay_ratio"] * self.batch_size / c["minibatch_size"]) + 1
        self.buffers = engine.Buffers(self.policy, self.vecenv, c, self.segments, first_agent)
        self.engine = engine(self.buffers)
        arena = self.arena = Arena()
        arena.adopt(self.policy)
        self.buffers.register(arena, self.engine.num_learners, minibatches)
        self.engine.register(arena)
        self.optimizer = None
        if c["optimizer"] == "muon":  # registers its state, so before the arena is allocated
            self.optimizer = optim.Muon(arena, c["momentum"], c["weight_decay"], c["max_grad_norm"],
                                        batched=c["device"] == "cuda")
        arena.allocate(self.buffers.torch_device)
        self.buffers.bind()
        self.engine.bind()
        self.ranks.device = arena.memory.device
        self._frozen = []  # names in the arena
        self._addresses = {name: parameter.data_ptr()
                           for name, parameter in self.policy.named_parameters()}
        if self.optimizer is None:
            self.optimizer = optim.TorchOptimizer(c, self.policy, arena)
        self._use_engine(reason)

    def _use_engine(self, reason):
        """Print why autograd runs, if it does; let CUDA graphs replace methods on a GPU."""
        self.args["engine"] = {"name": self.engine.name, "why": reason}
        if reason and self.ranks.rank == 0:
            text = f"engine: {self.engine.name}, because {reason}"
            processes.say_once(text, sys.stderr)
            self.run.note(text, self.global_step)
        capture, is_custom = self.engine.capture, has_custom_optimizer(self.config)
        # With several ranks each piece is captured, because ranks sum gradients in between. A
        # custom optimizer may synchronize with the GPU, which a CUDA graph cannot.
        pieces = "_sample_segments", "_compute_gradients", "_step_optimizer", "_write_back"
        captured = {*pieces} - {"_step_optimizer"} if is_custom else pieces
        if self.engine.whole_minibatches and self.ranks.count == 1 and not is_custom:
            captured = {"_minibatch_step"}
        captured = {"_compute_all_advantages", *captured}
        # Graphs share a memory pool, so they are captured in the order of their replay.
        for name in ("_compute_all_advantages", "_minibatch_step", *pieces):
            function = getattr(type(self), name).__get__(self)
            setattr(self, name, capture(function) if name in captured else function)

    def _check_engine(self, has_loaded=False):
        """Detect frozen parameters, replaced modules or methods, and loaded weights.

        If the network is no longer what fast/ implements, the engine for any network replaces the
        fast one. Raises RuntimeError if a parameter is no longer the one in the arena.
        """
        frozen = []
        for name, parameter in self.policy.named_parameters():
            if parameter.data_ptr() != self._addresses.get(name):
                raise RuntimeError(f"{name}: was added, replaced or moved after the trainer was "
                                   "made, and would not be trained. Change the network first, then "
                                   "make a PuffeRL.")
            if not parameter.requires_grad:
                frozen.append(f"policy.{name}")
        if frozen != self._frozen:
            self._frozen = frozen
            self.engine.refresh()
        if self.engine.name not in verify.NETWORKS:
            return
        reason = None
        if engines.inspect_modules(self.policy) != self.engine.inspected:
            reason = (verify.find_edit(self.policy, self.engine.name)
                      or "a part of the network is replaced")
        elif has_loaded:
            reason = verify.compare(self.policy, self.vecenv, self.engine.Sample,
                                    self.buffers.torch_device)
        if reason is not None:
            self.engine.release()
            self.engine = generic_engine(self.config)(self.buffers)
            self.engine.bind()
            self._use_engine(reason)

    # -- an epoch ----------------------------------------------------------------------------------

    def evaluate(self):
        """Collect a rollout of `horizon` steps of all agents with `engine.rollout`.

        Returns the environments' means over the episodes since the last log entry. After several
        calls, `train` uses and counts the last rollout only.
        """
        if self._is_closed:
            raise RuntimeError("evaluate(): this trainer is closed. Make another one; its "
                               "load_checkpoint(trainer.run_folder) continues this run.")
        self.buffers.check_environments()
        self.record()
        self._check_engine()
        statistics = self.statistics
        self._has_rollout, start = False, clock()
        seconds = self.engine.rollout(self._rollouts)
        log = self.vecenv.log()  # waits for a GPU that steps the environments
        statistics.seconds["environment"] += seconds
        statistics.seconds["policy"] += clock() - start - seconds
        logs = self.ranks.gather(log) if self.ranks.count > 1 else [log]
        statistics.add_episodes(logs, self.policy)
        self._rollouts += 1  # the random numbers of actions depend on it, so does an exact resume
        self._has_rollout = True
        return dict(statistics.environment) if statistics.has_episodes else {}

    def train(self):
        """Update the network on replay_ratio · batch_size steps of the last rollout.

        Returns the losses, those of the last update if there is none: policy_loss, value_loss,
        entropy, approx_kl, clipfrac, explained_variance, old_approx_kl and importance of the valid
        steps of these minibatches, the mean grad_norm, the learning_rate. Logs and saves when due.
        Raises FloatingPointError if a gradient is not finite; minibatches from that gradient on
        change nothing. An exact resume depends on this order (runs.py, items 3 and 7 above
        Snapshot).
        """
        if not self._has_rollout:
            raise RuntimeError("train(): there is no new rollout. Call evaluate() before each "
                               "train().")
        start = clock() - self.ranks.collective_seconds
        with self.engine.learning():
            self._update_schedules()
            self._scale_rewards()
            self._compute_all_advantages()
            if self.reward_scale is not None:
                self._update_value_offset()
            minibatches = self._claim_minibatches()
            for _ in range(minibatches):
                self._minibatch_step()
            norms, sums = self._read_sums(minibatches)
            if self.config["norm_obs"]:
                self._update_normalizer()
        return self._end_epoch(start, norms, sums)

    def _minibatch_step(self):
        """Update the weights once; several ranks add up their moments and gradients.

        An exact resume depends on this order (runs.py, items 2 and 7 above Snapshot).
        """
        self._sample_segments()
        if self.ranks.count > 1:
            self.ranks.sum(self.buffers.moments)
        self._compute_gradients()
        if self.ranks.count > 1:
            self.ranks.sum(self.buffers.gradients[0])
        self._step_optimizer()
        self._write_back()

    def _claim_minibatches(self):
        """Return how many are due; the fraction that is left waits for the next epoch.

        On average replay_ratio · batch_size / minibatch_size, none while observations are only
        measured.
        """
        c = self.config
        if c["norm_obs"] and self.normalizer.is_warmup(self.global_step, c["total_timesteps"]):
            return 0
        self._minibatches_owed += c["replay_ratio"] * self.batch_size / c["minibatch_size"]
        count = int(self._minibatches_owed + 1e-9)
        self._minibatches_owed -= count
        return count

    def _update_schedules(self):
        """Write this epoch's settings into the buffers that kernels read."""
        c, buffers = self.config, self.buffers
        self.args["train"].update({name: c[name] for name in MUTABLE})
        if self.reward_scale is not None:
            self.reward_scale.gamma = c["gamma"]
        if c.has_new_rate:  # a new learning_rate ends an override
            self._override_lr, c.has_new_rate = None, False
        if c.has_stale_graphs:
            self.engine.refresh()
            c.has_stale_graphs = False
        progress = min(1.0, self.global_step / c["total_timesteps"])
        self._used_lr = self.learning_rate
        ent_coef = c["ent_coef"] * (1 - progress if c["anneal_ent_coef"] else 1)
        numbers = {**c, "ent_coef": ent_coef}
        first = kernels.CLIP_COEF  # kernels.normalisation writes those before it
        settings = torch.tensor([numbers[name] for name in kernels.LOSS_SETTINGS[first:]])
        buffers.settings[first:].copy_(settings, non_blocking=True)
        buffers.beta.fill_(c["prio_beta0"] + (1 - c["prio_beta0"]) * progress)
        buffers.rate.fill_(self._used_lr)
        buffers.counter.copy_(torch.tensor([self.epoch, 0]), non_blocking=True)  # for draws
        buffers.found_inf.zero_()
        buffers.ratios.fill_(1.0)
        buffers.sums.zero_()

    def _scale_rewards(self):
        """Divide rewards by the discounted return's standard deviation; add train.bonus.

        The deviation includes this rollout; otherwise the first reward after many zeros would be
        divided by almost 0.
        """
        scale, buffers, storage = self.reward_scale, self.buffers, self.buffers.storage
        rewards = storage["rewards"]
        if scale is not None:
            moments = scale.measure_returns(*map(buffers.on_host, ("rewards", "resets", "valid")))
            scale.merge(scale.moments, self.ranks.gather(moments))
            rewards = torch.mul(rewards, scale.factor, out=buffers.rewards)
            buffers.value_offset.fill_(scale.value_offset)
        if self.bonus is not None:
            bonuses = self.bonus.update(storage["observations"], storage["resets"],
                                        storage["valid"])
            torch.add(rewards, bonuses, alpha=self.config["bonus_coef"], out=buffers.rewards)
            self.statistics.bonuses.append(float(bonuses.mean()))

    def _update_value_offset(self):
        """Update the offset of the values; recompute the advantages if it changed.

        offset = m - clip(m, ± RewardScale.FAR), where m is the mean value target, divided by the
        deviation of the return.
        """
        scale, buffers = self.reward_scale, self.buffers
        if scale.factor > 0:  # 0 after an infinite reward, for which _read_sums raises an error
            offset_before = scale.value_offset
            targets = torch.add(buffers.advantages, buffers.values[:-1], out=buffers.value_targets)
            moments = kernels.masked_moments(targets, buffers.storage["valid"], None)
            count, total, _ = moments.tolist()
            mean = (total / max(count, 1.0) + offset_before) / scale.factor
            scale.merge(scale.targets, self.ranks.gather((count, mean, 0.0)))
            if scale.value_offset != offset_before:
                buffers.value_offset.fill_(scale.value_offset)
                self._compute_all_advantages()

    def _compute_all_advantages(self):
        """Compute the advantages of all segments.

        On a GPU, `_use_engine` replaces this method by a CUDA graph of it.
        """
        self._compute_advantages()

    def _compute_advantages(self, index=None):
        """Compute advantages and priorities of all segments, or of those in `index`.

        A segment's advantages depend on that segment alone, so a minibatch changes only those of
        its own segments.
        """
        c, s, buffers = self.config, self.buffers.storage, self.buffers
        reward_clip = math.inf if c["reward_clip"] is None else c["reward_clip"]
        if not self._custom_advantage:
            kernels.advantage(
                buffers.values, buffers.rewards, s["terminals"], s["truncations"],
                buffers.bootstraps, buffers.ratios, s["valid"], buffers.advantages,
                gamma=c["gamma"], gae_lambda=c["gae_lambda"], rho_clip=c["vtrace_rho_clip"],
                c_clip=c["vtrace_c_clip"], reward_clip=reward_clip, index=index,
                offset=buffers.value_offset)
        else:  # train.advantage
            agents = all_columns(self.num_agents, buffers.values) if index is None else index
            ends = {name: s[name].index_select(1, agents)
                    for name in ("terminals", "truncations", "valid")}
            rewards, *others = (tensor.index_select(1, agents) for tensor in (
                buffers.rewards, buffers.values, buffers.bootstraps, buffers.ratios))
            args = SimpleNamespace(**{**c, "reward_clip": reward_clip})
            result = self._custom_advantage(args, SimpleNamespace(**ends), rewards,
                                            buffers.value_offset, *others)
            shape = getattr(result, "shape", type(result).__name__)
            require(shape == rewards.shape, f"train.advantage = {named(c['advantage'])}: returned "
                    f"{shape}. Return a tensor of the rewards' shape.")
            buffers.advantages.index_copy_(1, agents, torch.as_tensor(
                result, dtype=torch.float32, device=rewards.device))
        kernels.priorities(buffers.columns.advantages, buffers.columns.valid, buffers.priorities,
                           alpha=c["prio_alpha"], index=index)

    def _sample_segments(self):
        """Draw a minibatch's segments, and sum the moments of their advantages."""
        buffers = self.buffers
        kernels.draw_segments(buffers.priorities, buffers.cumulative, buffers.index,
                              buffers.segment_weights, seed=self.config["seed"],
                              counter=buffers.counter, beta=buffers.beta, first=self._first_segment)
        kernels.masked_moments(buffers.columns.advantages, buffers.columns.valid, buffers.index,
                               buffers.moments)

    def _compute_gradients(self):
        """Compute the gradients of the minibatch's loss with `engine.backward`."""
        kernels.normalisation(self.buffers.moments, self.buffers.settings)
        self.engine.backward()

    def _step_optimizer(self):
        """Step the optimizer; after a gradient that is not finite, steps change nothing.

        Frozen weights get their values back: a momentum or a decay would move them.
        """
        arena, buffers = self.arena, self.buffers
        frozen = [arena[f"weights/{name}"] for name in self._frozen]
        copies = [weight.clone() for weight in frozen]
        for name in self._frozen:
            arena[f"gradients/{name}"].zero_()  # an engine may have written to it
        norm = torch.as_tensor(self.optimizer.step(buffers.rate, buffers.found_inf),
                               dtype=torch.float64)
        for weight, copy in zip(frozen, copies, strict=True):
            weight.copy_(copy)
        buffers.norms.index_copy_(0, buffers.counter[1:], norm.view(1))

    def _write_back(self):
        """Write the segments' new values and ratios, and recompute their advantages.

        With train.draw = steps a minibatch has no whole segments, and nothing is written. Both ways
        count the minibatch, after the draw and the optimizer have read the counter.
        """
        buffers = self.buffers
        if self.config["draw"] == "steps":
            buffers.counter[1:].add_(1)
        else:
            kernels.write_back(buffers.index, buffers.new_values, buffers.new_ratios,
                               buffers.counter, buffers.values, buffers.ratios)
            self._compute_advantages(buffers.index)

    def _read_sums(self, minibatches):
        """Return the gradient norms and summed statistics of this epoch's minibatches.

        Raises FloatingPointError, which names the first number that is not finite, if a norm or
        train.loss is not finite.
        """
        norms = self.buffers.norms[:minibatches].tolist()
        sums = self.buffers.sums.sum(0).cpu().numpy()
        # Without a minibatch, as in a warm-up, no gradient tells of a NaN in the rollout.
        is_finite = bool(norms) and all(map(math.isfinite, norms))
        if not (is_finite and math.isfinite(sums[-1])):
            fault = self._find_nan()
            # All ranks have the same gradient, and one rank's numbers may be the cause. The sum of
            # train.loss is of this rank alone.
            faults = [fault] if is_finite else self.ranks.gather(fault)
            if norms or min(faults)[0] < math.inf:
                self._stop(faults)
        return norms, sums

    def _stop(self, faults):
        """Raise FloatingPointError for the first of one rank's or all ranks' faults."""
        _, cause = min(faults)
        saved = f"; the last checkpoint is in {self.run_folder}" if self.run_folder else ""
        error = FloatingPointError(f"epoch {self.epoch + 1}: {cause}. Training stops{saved}.")
        error.elsewhere = len(faults) > 1 and self.ranks.rank > 0  # rank 0 prints it
        raise error

    def _update_normalizer(self):
        """Merge the moments of this rollout's observations, of all ranks.

        Raises FloatingPointError if they are not finite: an observation is clipped after it is
        normalised, so neither the loss nor the gradient tells.
        """
        observations, valid = (self.buffers.storage[name][: self.horizon].flatten(0, 1)
                               for name in ("observations", "valid"))
        moments = self.ranks.gather(self.normalizer.moments(observations, valid))
        if not all(part.isfinite().all() for _, *parts in moments for part in parts):
            self._stop(self.ranks.gather(self._find_nan()))
        self.normalizer.merge(moments)

    def _end_epoch(self, start, norms, sums):
        """Count the epoch, adapt the rate, log and save if due; return the losses.

        An exact resume depends on this order (runs.py, item 7 above Snapshot).
        """
        c, statistics = self.config, self.statistics
        self.epoch += 1
        self.global_step += self.batch_size
        self._has_rollout = False
        # Log here, too, so that the final entry has only the episodes at the end of the run.
        before_last = self.total_epochs - max(3, self.total_epochs // 20)
        log_due = (clock() - self._last_log[0] >= c["log_interval"]
                   or self.epoch in (1, before_last, self.total_epochs))
        if self.ranks.count > 1:
            sums, log_due = self.ranks.end_epoch(self, sums, log_due)
        statistics.loss_sums += sums
        statistics.grad_norms += norms
        statistics.seconds["learn"] += clock() - self.ranks.collective_seconds - start
        if norms or not self.losses:
            self.losses = self._loss_means(sums, norms)
        logs = dict(self.losses)
        if len(norms) > 1 and c["target_kl"] is not None:  # the first minibatch moves by 0
            self._rate_factor = self._adapt_rate(logs["approx_kl"])
        if log_due:  # before the checkpoint, so that a resumed run has this entry
            self.mean_and_log()
        if self.epoch % c["checkpoint_interval"] == 0 and self.run_folder:
            try:
                self.save_checkpoint()
            except OSError as error:  # a full disk; the last checkpoint stays intact
                processes.say(f"{self.run_folder}: checkpoint at epoch {self.epoch} not written: "
                              f"{error}. Training continues.", sys.stderr)
        return logs

    # -- schedules and numbers ---------------------------------------------------------------------

    @property
    def total_epochs(self):
        """Return the epoch at which total_timesteps is reached."""
        remaining = self.config["total_timesteps"] - self.global_step
        return max(0, self.epoch - (-remaining // self.batch_size))

    @property
    def learning_rate(self):
        """Return the rate of the next epoch; assign one to override the schedule."""
        if self._override_lr is not None and not self.config.has_new_rate:
            return self._override_lr
        return (self.config["learning_rate"] * self._rate_factor
                * schedule(self.config, self.global_step))

    @learning_rate.setter
    def learning_rate(self, value):
        """Override the schedule; None returns to it."""
        require(value is None or 0 <= value < math.inf,
                f"learning_rate = {value}: must be 0 or more, and not inf.")
        self._override_lr = None if value is None else float(value)
        self.config.has_new_rate = False

    @property
    def uptime(self):
        """Return the trainer's age in seconds, without the compilation of kernels."""
        return clock() - self._start_time

    @property
    def sps(self):
        """Return the environment steps per second since the last log entry."""
        time_before, step = self._last_log
        if self.global_step == step:  # right after the entry
            return self.statistics.entry.get("performance/sps", 0.0)
        return (self.global_step - step) / max(clock() - time_before, 1e-9)

    @property
    def last_sps(self):
        """Return the environment steps per second of the last log entry, or so far."""
        return self.statistics.entry.get("performance/sps", self.sps)

    @property
    def environment(self):
        """Return episode means since the last log entry, those of the entry if none ended."""
        return self.statistics.environment

    @property
    def storage(self):
        """Return the rollout's arrays by name, those of Vector.new_storage."""
        return self.buffers.storage

    @property
    def run_folder(self):
        """Return the run's folder, or None."""
        return self.run.folder

    # -- checks and adaptation ---------------------------------------------------------------------

    def _count_outside(self):
        """Return how many observations in a sample are outside of the declared space.

        The sample changes with each log entry. With train.norm_obs a bound b is widened by
        max(1, |b|).
        """
        T, N, size = self.horizon, self.num_agents, math.prod(self._layout.shape)
        strides = max(1, T // 4), min(N, max(1, 4 * N * size // diagnostics.SAMPLE))
        part = tuple(slice(self._rollouts % stride, end, stride)
                     for stride, end in zip(strides, (T, N), strict=True))
        observations, valid = (self.buffers.on_host(name, part).numpy()
                               for name in ("observations", "valid"))
        tolerance = 1.0 if self.config["norm_obs"] else ROUNDING_TOLERANCE
        count, words = self._layout.find_outside(observations, valid, tolerance)
        if words and not self.warnings.outside:
            self.warnings.outside = f"{words} ({self._check_command()})"
        return count

    def _check_command(self):
        """Return advice on a number that is not finite, with a command that finds it."""
        name, library = self.config["env"], getattr(self.vecenv, "library", None)
        if library is not None and library.header.parent.parent != ocean.FOLDER:
            name = str(library.header)
        maker = library or environments.load_creator(name)
        if maker is None:
            return "its reset() or step() returned it"
        changed = [f"{key}={value}" for key, value in self.args.get("env", {}).items()
                   if maker.settings.get(key, value) != value]
        options = [name, "--check", *(["--set", *changed] if changed else [])]
        return f"the environment writes it. To find where: python -m ocean {shlex.join(options)}"

    def _find_nan(self):
        """Return (order, description) of this epoch's first number that is not finite."""
        s, buffers, environment = self.buffers.storage, self.buffers, self._check_command()
        low, loss = "lower train.learning_rate", named(self.config["loss"] or "")
        logprobs, masked = buffers.logprobs, None
        if s["action_masks"] is not None:
            heads = s["action_masks"][: self.horizon].split(buffers.heads.tolist(), dim=-1)
            has_choice = torch.stack([(head != 0).any(-1) for head in heads]).all(0)
            masked = logprobs.masked_fill(has_choice, 0.0)
        observations = buffers.on_host("observations").numpy()
        fields = self._layout.fields(observations.reshape(-1, *self._layout.shape))
        numbers = [(name_field(keys) if keys else "observations",
                    torch.from_numpy(field).view(*observations.shape[:2], -1))
                   for (keys, *_), field in zip(self._layout.leaves, fields, strict=True)
                   if field.dtype.kind == "f"]
        rollout = (
            *((name, tensor, environment) for name, tensor in numbers),
            ("logprobs", masked,
             "the action mask forbids every choice of a head: allow one, or set valid to 0"),
            ("logprobs", logprobs, "the network's outputs overflow, or are -inf for every choice "
             f"of a head: allow one, or {low}"),
            ("values", buffers.values, f"the network's outputs overflow; {low}"),
            ("rewards", s["rewards"], environment),
            ("final observations", buffers.bootstraps, environment))
        update = (
            ("advantages", buffers.advantages,
             "rewards or values overflow; scale them or set train.reward_clip"),
            ("new_values", buffers.new_values, f"the loss's forward pass overflows; {low}"),
            (f"train.loss = {loss}", buffers.sums[:, kernels.SUMS], "your function returned it"),
            ("gradients", buffers.gradients[0], f"the update overflows; {low}"
             + (", or correct the derivative of train.loss" if loss else "")))
        return diagnostics.find_nan(self.arena.flat("weights"), s["valid"] != 0, rollout, update)

    def _loss_means(self, sums, norms):
        """Return the losses to log, from the sums and gradient norms of some minibatches."""
        extra = {}
        if self.config["loss"]:
            name = named(self.config["loss"]).replace(":", ".").rpartition(".")[2]
            extra[f"custom_{name}_loss"] = float(sums[-1]) / max(1, len(norms))
        norm = float(np.mean(norms)) if norms else math.nan
        return {**kernels.loss_statistics(sums[:-1]), **extra, "grad_norm": norm,
                "learning_rate": self._used_lr}

    def _adapt_rate(self, kl):
        """Return the next factor of the learning rate, for a KL near target_kl.

        As in Schulman et al. 2017, section 4, but in small steps, every epoch. Advantages that are
        small relative to the return's deviation are mostly noise. They lower the target, because
        Muon's steps do not shrink with the gradient.
        """
        target, factor = self.config["target_kl"], self._rate_factor
        if self.reward_scale is not None:
            count, total, squares = self.buffers.moments.tolist()  # of the last minibatch
            count = max(count, 1.0)  # all agents may be inactive
            deviation = math.sqrt(max(0.0, squares / count - (total / count) ** 2))
            target *= min(1.0, deviation / SMALL_ADVANTAGES)
        annealing = schedule(self.config, self.global_step)
        if annealing <= 0.05:
            return factor
        step = min(RATE_STEPS[1], max(RATE_STEPS[0], math.sqrt(target / max(kl, 1e-12))))
        return min(RATE_FACTORS[1], RATE_MOST / annealing, max(RATE_FACTORS[0], factor * step))

    # -- logs and checkpoints ----------------------------------------------------------------------

    def mean_and_log(self):
        """Log the means since the last entry; return them, or that entry without a step."""
        time_before, step = self._last_log
        if self.global_step == step:
            return self.statistics.entry
        statistics, seconds, sps = self.statistics, clock() - time_before, self.sps
        losses = self._loss_means(statistics.loss_sums, statistics.grad_norms)
        metrics = statistics.means(self.ranks, seconds, losses)
        metrics |= {"performance/sps": sps, "performance/uptime": self.uptime,
                    "performance/epoch": self.epoch, "performance/seconds_epoch":
                    seconds * self.batch_size / (self.global_step - step)}
        sample = dict.fromkeys(("observations", "actions"), (slice(None), diagnostics.AGENTS))
        arrays = {name: self.buffers.on_host(name, sample.get(name, ...)).numpy() for name in (
            "observations", "actions", "rewards", "valid", "terminals", "truncations")}
        metrics |= diagnostics.vital(
            **arrays, bounds=action_bounds(self.vecenv.single_action_space),
            choices=any(leaf_kind(leaf) == "choices" for *_, leaf in self._layout.leaves))
        sentences = []
        if self.warnings is not None:
            metrics["vital/observation_outside"] = float(self._count_outside())
            sentences = self.warnings.update(self.global_step, metrics)
        self.logger.log(metrics, self.global_step)
        if self.ranks.rank == 0:
            self.run.log(metrics, sentences, self.global_step)
        statistics.begin(metrics)
        self._last_log = clock(), self.global_step
        return metrics

    def record(self):
        """Make the run's folder, with settings and first checkpoint, if there is none.

        Raises ConfigError if it cannot be written.
        """
        if self.run.begun:
            return
        self.run.begun = True
        if self.run_folder is not None:
            is_new = self.ranks.first(lambda: not (self.run_folder / "trainer_state.pt").exists())
            require(is_new or self._has_loaded, f"{self.run_folder}: this run exists. Continue it "
                    "with load_checkpoint, or give another run_id.")
            state = runs.Snapshot(self).take() if is_new else None
            self.ranks.first(lambda: self.run.begin(self.args, state, self.global_step))
        self.logger.config(self.args)

    def print_dashboard(self):
        """Show progress: a live panel on a terminal, otherwise one line per call."""
        if self.ranks.rank == 0:
            self._dashboard.show(self)

    def save_checkpoint(self, path=None, metadata=None):
        """Write model and trainer state to the run's folder, or both to one file `path`.

        metadata: plain values and tensors, which load_checkpoint returns. A file is written under
        another name, synced and renamed, so it is never incomplete. All ranks call this. Returns
        the model's path. Raises OSError, and FloatingPointError for weights that are not finite.
        """
        require(path or self.run_folder, "save_checkpoint(): data_dir = None, so there is no "
                "folder. Give a path.")
        if not self.arena.flat("weights").isfinite().all():
            raise FloatingPointError("the weights are not finite, so no checkpoint is written.")
        state, statistics = runs.Snapshot(self).take(metadata), self.statistics
        model = path or self.run.model(self.epoch)
        if self.ranks.rank == 0 and path is not None:
            runs.save(state, Path(path))
        elif self.ranks.rank == 0:
            self.run.save(state, model, statistics.best if statistics.best_unsaved else None)
            statistics.best_unsaved = False
            self.logger.artifact(str(model))
        return str(model)

    def load_checkpoint(self, path):
        """Continue from a file of save_checkpoint or a run's folder; return its metadata.

        With the same settings, versions, buffers, threads and ranks the run continues bit for bit;
        differences are printed. Environments that cannot be restored (in Python, or with other
        settings, agents or ranks) start new episodes, which is printed too. Only rank 0 reads the
        file. Raises ConfigError, and changes nothing, for another network or optimizer.
        """
        saved = runs.Snapshot(self).restore(Path(path))
        self._has_rollout, self._has_loaded = False, True
        self._start_time = clock() - saved["uptime"]
        self._last_log = clock(), self.global_step
        self.run.rewind(self.global_step)
        self._check_engine(has_loaded=True)
        return saved["metadata"]

    def close(self):
        """Call `finish`, then `release`; return the model's path, '' if none was saved.

        A second call does nothing. Raises ConfigError if the checkpoint cannot be written.
        """
        if self._is_closed:
            return ""
        try:
            return self.finish()
        finally:
            self.release()

    def finish(self):
        """Log and save the last checkpoint; return the model's path, '' if none was saved.

        Raises ConfigError if it cannot be written.
        """
        self.record()
        try:
            self.mean_and_log()
        except Exception as error:  # of a logger: what was learned is still saved
            kind = type(error).__name__
            processes.say(f"the last log entry failed: {kind}: {error}", sys.stderr)
        try:
            return self.save_checkpoint() if self.run_folder else ""
        except FloatingPointError as error:
            processes.say(str(error), sys.stderr)
            return ""
        except OSError as error:
            path = self.run_folder / "trainer_state.pt"
            last = f"{path} is an earlier one" if path.exists() else "there is no earlier one"
            raise ConfigError(
                f"the last checkpoint, of epoch {self.epoch}, was not written: {error}; "
                f"{last}. Free some space, and --resume {self.run_folder} trains what "
                "is missing; or copy that folder to a disk with room and resume the "
                "copy.") from None

    def release(self):
        """Stop workers, environments, logger and dashboard, without saving."""
        self._is_closed = True
        self._has_rollout = False
        with contextlib.ExitStack() as stack:  # if one of them raises, the others are still called
            for close in (self.vecenv.close, self.buffers.release, self.engine.release,
                          self.logger.close, self.run.release, self._dashboard.close):
                stack.callback(close)


# Limits of the rate factor's change per epoch. Down is faster: too large a rate does harm at once,
# too small a one only takes longer.
RATE_STEPS = 0.5, 1.2
SMALL_ADVANTAGES = 0.2  # the advantages' deviation, as a share of the return's
RATE_FACTORS = 0.1, 10.0  # limits of the factor by which target_kl multiplies the schedule
# The largest rate as a multiple of train.learning_rate. A larger rate destroys policies that depend
# on a few decisive steps, which weigh little in the mean KL divergence (docs/findings.md).
RATE_MOST = 4.0
VERSIONS = {"torch": str(torch.__version__), "numba": numba.__version__, "numpy": np.__version__}


# --------------------------------------------------------------------------------------------------
# The choice of the engine


def generic_engine(config):
    """Return the class of the engine that runs any network on train.device."""
    is_gpu = config["device"] == "cuda"
    return importlib.import_module("fast.fused").Graphs if is_gpu else engines.Autograd


def choose_engine(policy, vecenv, config):
    """Return (engine class, why a default network does not get the hand-written one).

    With train.engine = auto the hand-written engine of the device runs the policies that it
    implements. The reason is None if that engine runs the policy, if another one is requested, and
    for custom networks. Raises ConfigError if train.engine cannot run this.
    """
    requested, general = config["engine"], generic_engine(config)
    fast, module = ("fused", "Fused") if config["device"] == "cuda" else ("compiled", "Compiled")
    if requested in ("autograd", general.name):
        return general, None
    conditions = (
        (requested not in ("auto", fast),
         f"the engines for train.device {config['device']} are {fast} and autograd"),
        (config["compile"], "train.compile compiles the network with torch"),
        (config["loss"], "train.loss needs its derivative"),
        (vecenv.single_observation_space.dtype == np.float16, "observations are float16"),
        (importlib.util.find_spec(f"fast.{fast}") is None, f"there is no fast/{fast}.py"),
        (verify.digest() not in (verify.DIGEST, None),
         "a method of models.py or engines.py that fast/ reimplements was edited (fast/verify.py "
         "says how to keep the fast engine)"))
    reason = (verify.find_edit(policy, fast)
              or next((text for is_true, text in conditions if is_true), None))
    if reason is None:
        try:
            engine = getattr(importlib.import_module(f"fast.{fast}"), module)
            reason = verify.compare(policy, vecenv, engine.Sample)
        except (RuntimeError, OSError) as error:  # without fast/tile.c, or a compiler for it
            reason = str(error).splitlines()[0]
    if reason is None:
        return engine, None
    require(requested == "auto", f"train.engine = {requested}: cannot run this, because {reason}. "
            "Take auto or autograd.")
    inner = policy.policy if type(policy) is models.Normalized else policy
    is_default = isinstance(policy, models.MinGRUPolicy) or type(inner) in verify.NETWORKS[fast]
    return general, reason if is_default else None


# --------------------------------------------------------------------------------------------------
# What the trainer uses: statistics, checks, settings

BEST_EPISODES = 100  # the best score is a mean of at least so many episodes


class Statistics:
    """Collect statistics between two log entries, and the weights of the best score."""

    def __init__(self, rank_count):
        stages = "environment", "policy", "learn", *(["ranks"] if rank_count > 1 else []), "other"
        self.stages = dict.fromkeys(stages, 0.0)  # seconds of the last entry
        self.environment = {}  # means over episodes
        self.best_score = -math.inf
        self.best = {}
        self.best_unsaved = False
        self._recent = 0.0, 0
        self.begin({})

    def begin(self, entry):
        """Begin the next log entry."""
        self.entry = entry
        self.seconds = dict.fromkeys(self.stages, 0.0)
        self.loss_sums = np.zeros(kernels.SUMS + 1)
        self.grad_norms = []
        self.bonuses = []
        self._totals = {}

    @property
    def has_episodes(self):
        """Return whether an episode has ended since the last log entry."""
        return bool(self._totals)

    def add_episodes(self, logs, policy):
        """Add each rank's means over `n` episodes, {} without one.

        The weights with the best mean score over BEST_EPISODES or more are copied.
        """
        logs = [log for log in logs if log.get("n", 0)]
        if not logs:
            return
        total, episodes = self._recent
        for log in logs:
            count = log["n"]
            for name, value in log.items():
                values, weight = self._totals.get(name, (0.0, 0))
                self._totals[name] = values + value * count, weight + count
            total += log.get("score", log.get("episode_return", math.nan)) * count
            episodes += count
        self._recent = total, episodes
        self.environment = {name: values / weight
                            for name, (values, weight) in self._totals.items()}
        self.environment["n"] = self._totals["n"][1]
        if episodes >= BEST_EPISODES:
            # the newest of equals: in self-play all may be 0
            if total / episodes >= self.best_score:
                self.best_score, self.best_unsaved = total / episodes, True
                self.best = runs.copies(policy.state_dict())
            self._recent = 0.0, 0

    def means(self, ranks, seconds, losses):
        """Return the metrics to log, {"environment/score": ..., "losses/...": ...}.

        seconds: since the last entry. All ranks call this.
        """
        stages = dict(self.seconds)
        if ranks.count > 1:
            stages["ranks"] = ranks.take_seconds()
        stages["other"] = max(0.0, seconds - sum(stages.values()))
        self.stages = stages
        episodes = self.environment if self.has_episodes else {}
        losses = losses if self.grad_norms else {}
        bonus = {"losses/bonus": float(np.mean(self.bonuses))} if self.bonuses else {}
        return {**{f"environment/{name}": value for name, value in episodes.items()},
                **{f"losses/{name}": value for name, value in losses.items()}, **bonus,
                **{f"performance/seconds_{name}": value for name, value in stages.items()}}


def normalize_args(config, vecenv, policy):
    """Return (configuration, vectorized environment, policy) from PuffeRL's arguments.

    The configuration may be missing. A network from torch.compile is replaced by the original,
    with train.compile. Raises ConfigError for another type.
    """
    if config is not None and not isinstance(config, Mapping):  # PuffeRL(env, policy)
        config, vecenv, policy = None, config, vecenv if policy is None else policy
    if isinstance(policy, torch.nn.Module) and hasattr(policy, "_orig_mod"):
        config, policy = {**(config or {}), "compile": True}, policy._orig_mod
    vecenv = make(vecenv) if isinstance(vecenv, emulation.PufferEnv) else vecenv
    place = "PuffeRL(config, vecenv, policy)"
    require(hasattr(vecenv, "num_agents") and not isinstance(vecenv, torch.nn.Module),
            f"{place}: vecenv is a {type(vecenv).__name__}, expected what make or load_env "
            "returns.")
    require(isinstance(policy, torch.nn.Module),
            f"{place}: policy is a {type(policy).__name__}, expected a torch.nn.Module.")
    parallel = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    require(not isinstance(policy, parallel), f"{place}: policy is a {type(policy).__name__}, give "
            "the network itself. The trainer averages the gradients of all ranks (docs/scale.md).")
    return config or {}, vecenv, policy


def check_train(config, vecenv, policy, agents, ranks):
    """Return the train section that a trainer runs with, checked, without "auto".

    The train command has decided "auto" before (resolve_auto); scripts may leave it to this.
    config: train's settings, by their names here or in other trainers, and perhaps env, data_dir,
    run_id, settings and use_rnn. agents: of all ranks. ranks: data_parallel.connect(). Raises
    ConfigError.
    """
    names = config.keys() & {"env", "data_dir", "run_id", "settings", "use_rnn"}
    given = {key: value for key, value in config.items() if key not in names}
    settings = dataclasses.asdict(Train()) | convert_section("train", given)
    c = replace_batch_size(settings, agents)
    is_recurrent = bool(models.initial_state(policy, 1))
    c |= {"env": vecenv.name, "data_dir": Base.data_dir, "use_rnn": is_recurrent,
          **{key: config[key] for key in names}}
    if c["norm_obs"] == "auto":  # the network already has a normalizer, or has none
        c["norm_obs"] = models.find_normalizer(policy) is not None
    facts = facts_of(vecenv.driver_env, agents, c["total_timesteps"])
    c |= {name: value for name, (value, _) in decide(c, facts).items()}

    span, batch, largest = drawn_steps(c), agents * c["horizon"], c["max_minibatch_size"]
    multiple = (f"must be a multiple of train.horizon = {span}" if c["draw"] == "segments"
                else "must be 1 or more")
    size = f"train.minibatch_size = {c['minibatch_size']}"
    require(c["use_rnn"] == is_recurrent,
            f"use_rnn = {c['use_rnn']}: must be {is_recurrent}, because this policy "
            f"{'has an' if is_recurrent else 'has no'} initial_state. Leave it out; "
            "models.LSTMWrapper makes a policy recurrent.")
    require(c["gpus"] in (1, ranks.local_count), f"train.gpus = {c['gpus']}: there are "
            f"{ranks.local_count} ranks on this machine. pufferl.py train or torchrun starts them.")
    require(c["bonus"] == "none" or ranks.count == 1, f"train.bonus = {c['bonus']}: with several "
            "ranks each would count other observations as new. Take one process.")
    require(c["minibatch_size"] % span == 0, f"{size}: {multiple}, whole segments are drawn.")
    require(c["minibatch_size"] <= batch,
            f"{size}: is more than one epoch's batch, {agents} agents × horizon {c['horizon']} = "
            f"{batch}. Take a smaller one or more agents (vec.total_agents).")
    require(c["minibatch_size"] >= span * ranks.count,
            f"{size}: is less than one segment of {plural(span, 'step')} for each of {ranks.count} "
            "ranks. Take a larger one.")
    require(largest is None or (largest >= span and largest % span == 0),
            f"train.max_minibatch_size = {largest}: {multiple}.")
    require(c["draw"] == "segments" or not (is_recurrent and policy.initial_state(1)),
            f"train.draw = {c['draw']}: a recurrent network needs steps in their order. Take "
            "segments, or rnn.name none.")
    return c


def check_policy(policy, vecenv, config):
    """Check that a network can run here and has what the settings need."""
    network, size = type(policy).__name__, math.prod(vecenv.observation_shape)
    if isinstance(policy, models.MinGRUPolicy):
        inputs = getattr(policy.encoder, "in_features", size)
        require(inputs == size,
                f"{network}: was made for observations of {inputs} numbers, these environments "
                f"give {size}. Make it from this vecenv, or keep the setting that changed.")
    for name, weight in policy.named_parameters():
        require(not isinstance(weight, torch.nn.UninitializedParameter),
                f"{network}: {name} has no shape yet, because its layer is lazy. Call the network "
                "once on a batch of observations, for example at the end of its __init__.")
        require(weight.dtype == torch.float32,
                f"{network}: {name} is {weight.dtype}, but weights must be float32 "
                "(network.float()). train.precision is for the computation.")
    models.find_form(policy, vecenv.single_observation_space)
    for name, tensor in (policy.initial_state(1) if config["use_rnn"] else {}).items():
        require(tensor.dim() >= 2 and tensor.shape[1] == 1,
                f"{network}.initial_state(1): {name} has the shape {tuple(tensor.shape)}, expected "
                "(layers, 1, size).")
    problem = verify.check_recurrent_contract(policy, vecenv)
    require(problem is None, problem)
    require(not config["norm_obs"] or models.find_normalizer(policy) is not None,
            "train.norm_obs = True: this network has no models.Normalizer. load_policy adds one, "
            "as do models.MinGRUPolicy(env, normalize=True) and models.Normalized(env, policy).")


def schedule(config, step):
    """Return the cosine's share of learning_rate (Loshchilov and Hutter 2017)."""
    if not config["anneal_lr"]:
        return 1.0
    progress, low = min(1.0, step / config["total_timesteps"]), config["min_lr_ratio"]
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))


# settings that a GPU's graphs contain
IN_GRAPHS = ("gamma", "gae_lambda", "vtrace_rho_clip", "vtrace_c_clip", "prio_alpha", "reward_clip")
MUTABLE = ("total_timesteps", "learning_rate", "anneal_lr", "min_lr_ratio", "target_kl",
           *kernels.LOSS_SETTINGS[kernels.CLIP_COEF :], "anneal_ent_coef", "bonus_coef", *IN_GRAPHS,
           "prio_beta0", "state", "log_interval", "checkpoint_interval")


class Settings(dict):
    """A trainer's settings; those in MUTABLE may be assigned between epochs.

    Raises ConfigError if another one is assigned, because memory or a part of the trainer depends
    on it, and for an unknown name or a value that the setting cannot have. (check_train checks the
    first values.)
    """

    has_stale_graphs = False  # whether one of IN_GRAPHS was assigned since the last epoch
    has_new_rate = False  # whether learning_rate was

    def __setitem__(self, name, value):
        require(name in self, f"train.{name}: {ocean.nearest(name, MUTABLE)}.")
        # the schedule of a rate or a clip may end in 0
        ends_in_0 = name in ("learning_rate", "clip_coef", "vf_clip_coef") and value == 0
        if name in MUTABLE and not ends_in_0:
            *_, value = convert(Entry("train", name, value, f"train.{name}"), {"train": Train})
        require(value != "auto" if name in MUTABLE else value == self[name],
                f"train.{name} = {named(value)}: this trainer was made for {named(self[name])}. "
                "Make another one; its load_checkpoint continues this run. These may change "
                f"between epochs: {', '.join(MUTABLE)}.")
        self.has_stale_graphs |= name in IN_GRAPHS and value != self[name]
        self.has_new_rate |= name == "learning_rate"
        super().__setitem__(name, value)

    def __ior__(self, other):
        for name, value in dict(other).items():
            self[name] = value
        return self

    def update(self, *others, **settings):
        self.__ior__(dict(*others, **settings))


# --------------------------------------------------------------------------------------------------
# The train command

MEASURED_SECONDS = 1.0  # of measuring, after the epoch in which kernels are compiled
MEASURED_AGENTS = {True: 1024, False: 16}  # at most; True: environments in C
MEASURED_HORIZON = 16
MEASURED_EPISODES = 16  # episodes needed before their length is used
MESSAGE_SECONDS = 3e-4  # cost of a step's messages to other processes


def measure(env_name, args, vecenv, facts):
    """Measure the cost of environment steps and of learning; return facts with both.

    Runs a few epochs with a new network on temporary environments, in this process unless the
    backend is named, so that an environment's error may be raised here. The run's random numbers
    stay as they are. Returns facts unchanged if a process can hold these environments only once,
    for one environment in Python, and for Tensors.
    """
    if not facts.native and (vecenv.num_envs == 1 or isinstance(vecenv, Tensors)):
        return facts
    num_envs = max(1, MEASURED_AGENTS[facts.native] * vecenv.num_envs // vecenv.num_agents)
    backend = args["vec"]["backend"]
    is_remote = backend in ("multiprocessing", "ray")  # a crash or a hang must not end this process
    small = {
        **args,
        "vec": {**args["vec"], "num_envs": 1, "device": "host",
                "backend": backend if is_remote else "native" if facts.native else "serial",
                "num_workers": 1 if is_remote else None,
                **dict.fromkeys(("total_agents", "batch_size", "num_buffers"))},
        "env": {**args["env"], "num_envs": min(num_envs, vecenv.num_envs)},
        "train": {**args["train"], "norm_obs": False, "replay_ratio": 1.0,
                  "total_timesteps": 10**12, "horizon": MEASURED_HORIZON, "minibatch_size": "auto",
                  "max_minibatch_size": None, "log_interval": math.inf}}
    terminals, truncations = [], []
    with data_parallel.single_process(), contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())  # which environments may draw from
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        try:
            trial = load_env(env_name, small)
        except Exception:  # a process can hold only one, as with emulators
            return facts
        stack.callback(trial.close)
        if not facts.native:  # its errors, prints and hangs belong to this trial
            place = "another" if is_remote else "this"
            print(f"auto: measuring {plural(trial.num_envs, 'environment')} in {place} process",
                  file=sys.stderr, flush=True)
        config = {**small["train"], "env": args["env_name"], "data_dir": None, "cudagraphs": -1,
                  "gpus": 1}
        trainer = PuffeRL(config, trial, load_policy(small, trial, env_name))
        stack.callback(trainer.release)
        trainer.warnings = None  # no warnings about these settings
        start = math.inf
        while trainer.epoch < 2 or time.perf_counter() - start < MEASURED_SECONDS:
            trainer.evaluate()
            terminals.append(trial.storage.terminals.copy())
            truncations.append(trial.storage.truncations.copy())
            trainer.train()
            if trainer.epoch == 1:  # in which kernels are compiled
                start, before = time.perf_counter(), dict(trainer.statistics.seconds)
    steps = (trainer.epoch - 1) * trainer.batch_size
    spent = {stage: (seconds - before[stage]) / steps
             for stage, seconds in trainer.statistics.seconds.items()}
    vec, count = args["vec"], vecenv.num_workers
    is_chosen = vec["backend"] != "auto" or vec["num_workers"] or vec["batch_size"]
    gain = spent["environment"] * vecenv.num_agents * (1 - 1 / count)
    is_serial_faster = count > 1 and not is_chosen and gain < MESSAGE_SECONDS
    seconds = spent["environment"] / (1 if is_serial_faster else count) + spent["policy"]
    cutoff = find_cutoff(np.concatenate(terminals), np.concatenate(truncations))
    return dataclasses.replace(facts, step_seconds=seconds, learn_seconds=spent["learn"],
                               cutoff=cutoff, is_serial_faster=is_serial_faster)


def find_cutoff(terminals, truncations):
    """Return the length at which every episode is truncated, or None.

    terminals, truncations: (T, N). None if an episode terminates, if lengths differ, or with fewer
    than MEASURED_EPISODES episodes.
    """
    agents, steps = truncations.T.nonzero()
    is_first = np.diff(agents, prepend=-1) > 0
    lengths = np.where(is_first, steps + 1, np.diff(steps, prepend=0))
    if terminals.any() or len(lengths) < MEASURED_EPISODES or np.ptp(lengths) > 0:
        return None
    return int(lengths[0])


def resolve_auto(env_name, args, vecenv):
    """Replace "auto" in args["train"]; write the reasons to args["auto"].

    Rank 0 chooses for all ranks. Returns the Facts that the choice is based on.
    """
    ranks = data_parallel.connect()
    agents = sum(ranks.gather(vecenv.num_agents))
    section = args["train"] = replace_batch_size(args["train"], agents)
    facts = facts_of(vecenv.driver_env, agents, section["total_timesteps"])

    def choose():
        is_unknown = "auto" in (section["replay_ratio"], section["gamma"])
        measured = measure(env_name, args, vecenv, facts) if is_unknown else facts
        return decide(section, measured), measured

    choices, facts = ranks.first(choose)
    section |= {name: value for name, (value, _) in choices.items()}
    reasons = {f"train.{name}": reason for name, (_, reason) in choices.items()}
    args["auto"] = args.get("auto", {}) | reasons
    return facts


def choose_device(vecenv, args):
    """Replace train.device "auto" where torch finds a GPU; add the reason.

    Several ranks stay on the CPU, and so does the engine that runs there only.
    """
    train = args["train"]
    is_auto = train["device"] == "auto" and train["engine"] != "compiled"
    if not is_auto or data_parallel.connect().count > 1 or not torch.cuda.is_available():
        return
    device, reason = "cpu", gpu_reason(vecenv, args)
    if reason:
        try:
            importlib.import_module("fast.fused").check_gpu()
            torch.ones(1, device="cuda").add_(1).item()  # a full or an old GPU refuses
            device = "cuda"
        except (ConfigError, ImportError, RuntimeError) as error:
            reason = f"a GPU is here, but {error}"
    train["device"] = device
    args["auto"]["train.device"] = reason or "few agents and a small network"


def make_trainer(env_name, args):
    """Return a configuration's trainer, with the settings that "auto" means."""
    ranks, vecenv = data_parallel.connect(), load_env(env_name, args)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: vecenv.close())
        choose_device(vecenv, args)
        is_chosen = args["train"]["device"] == "cuda" and "train.device" in args["auto"]
        if is_chosen and isinstance(vecenv, Native):  # they may step there, too
            vecenv.close()
            vecenv = load_env(env_name, args)
        facts = resolve_auto(env_name, args, vecenv)
        if facts.is_serial_faster:
            vecenv.close()
            args["vec"]["backend"] = "serial"
            args["auto"]["vec.backend"] = ("a step of all environments is shorter than messages to "
                                           "other processes")
            vecenv = load_env(env_name, args)
        policy = load_policy(args, vecenv, env_name)
        normalizes = models.find_normalizer(policy) is not None
        is_loaded = args["load_model_path"] or args["baseline"]
        is_open = is_loaded or "train.norm_obs" in args["auto"]
        if normalizes != args["train"]["norm_obs"] and is_open:
            args["train"]["norm_obs"] = normalizes
            args["auto"]["train.norm_obs"] = "the network decides that"
        trainer = PuffeRL({**args["train"], "env": args["env_name"], "data_dir": args["data_dir"],
                           "settings": args}, vecenv, policy)
        if args["resume"]:
            path = ranks.first(lambda: find_run(args["resume"], args["data_dir"], env_name,
                                                "trainer_state.pt"))
            trainer.run.folder = path.parent if path.name == "trainer_state.pt" else path
        stack.pop_all()
    return trainer


def describe(trainer, args):
    """Yield lines that describe a run: sizes, network, engine, choices of "auto"."""
    vecenv = trainer.vecenv
    count = vecenv.num_workers
    others = f" and {count} processes of environments" if count > 1 else ""
    folder = f"run folder {trainer.run_folder}" if trainer.run_folder else "nothing is written"
    yield (f"{trainer.env_name}: {plural(trainer.batch_size // trainer.horizon, 'agent')} × "
           f"horizon {trainer.horizon} = {trainer.batch_size:,} steps an epoch, "
           f"{plural(trainer.total_epochs, 'epoch')}; {plural(vecenv.num_threads, 'thread')}"
           f"{others}; engine {trainer.engine.name}; {folder}")
    yield f"network: {models.summarize(trainer.policy)}"
    if trainer.engine.blocking_classes:
        classes = ", ".join(trainer.engine.blocking_classes)
        yield (f"one thread of {vecenv.num_threads} learns. If forward keeps no state between "
               "calls and draws no random numbers, write thread_safe = True into "
               f"{classes}: then all threads learn (docs/speed.md)")
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
           for module in trainer.policy.modules()):
        yield ("batch norms: the moments of a rollout's step and of a minibatch differ, so such a "
               "network may learn nothing. Take nn.LayerNorm, or call eval() of these layers")
    for name, reason in args["auto"].items():
        section, _, key = name.partition(".")
        if reason is not None:
            yield f"auto: --{name.replace('_', '-')} {args[section][key]}  # {reason}"


def train(env_name, args=None):
    """Train; return the trainer, closed. Its files are in trainer.run_folder.

    args: from load_config, by default load_config(env_name).
    """
    args, ranks = load_config(env_name) if args is None else args, data_parallel.connect()
    # a copy, because automatic settings are filled in
    args = {key: dict(value) if isinstance(value, dict) else value for key, value in args.items()}
    check_names(args)
    if data_parallel.started():
        args["train"]["gpus"] = ranks.local_count
    say = processes.say if ranks.rank == 0 else lambda text: None
    compile_timer.announce = lambda: say(loggers.COMPILING)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not args["resume"]:
        say("torchrun has restarted this command, and a new run begins: with --resume auto it "
            "continues from the last checkpoint")
    trainer, shown = make_trainer(env_name, args), None

    def make_logger():
        trainer.logger = loggers.make_logger(args, trainer.run_folder, trainer.global_step)

    try:
        if args["resume"]:
            trainer.load_checkpoint(trainer.run_folder)
        ranks.first(make_logger)
        trainer.record()
        if args["resume"]:
            say(f"resumed {trainer.run_folder} at step {trainer.global_step:,}")
            if trainer.epoch >= trainer.total_epochs:
                say("nothing is left of its train.total_timesteps; give more to continue")
        for line in describe(trainer, args):
            say(line)
        shown, interval = 0.0, args["train"]["log_interval"] * (1 if sys.stdout.isatty() else 5)
        with processes.Interrupts(is_silent=ranks.rank > 0) as interrupts:
            while trainer.epoch < trainer.total_epochs and not ranks.any(interrupts.requested):
                trainer.evaluate()
                trainer.train()
                if time.perf_counter() - shown > interval or trainer.epoch == trainer.total_epochs:
                    trainer.print_dashboard()
                    shown = time.perf_counter()
        model = trainer.finish()
        trainer._dashboard.close()
        for line in trainer._dashboard.closing(trainer, args, model):
            say(line)
    except Exception as error:
        folder = trainer.run_folder
        if shown is not None and folder and ranks.count == 1 and not trainer._has_rollout:
            with contextlib.suppress(Exception):  # the last complete epoch's
                trainer.save_checkpoint()
        if shown is not None and folder and (folder / "trainer_state.pt").exists():
            resume = command("train", env_name, "--resume", str(folder))
            error.add_note(f"To continue from the last checkpoint: {resume}")
        raise
    finally:
        trainer.release()  # last, because an environment's close() may hang
    return trainer


# --------------------------------------------------------------------------------------------------
# The command line

USAGE = """usage: python pufferl.py {train,eval,ship,sweep,export,autotune,profile} ENV [--key X]
       python pufferl.py {list,runs,plot,diagnose,doctor} ...

  list [ENV]   the environments: observations, actions, what solving them takes; or all about one
  train ENV    train a policy; Ctrl-C stops it with a checkpoint
  eval ENV     play episodes with a trained policy: --load-model-path latest
  ship ENV     make a run's policy the baseline of its environment: --load-model-path latest
  sweep ENV    search hyper-parameters; the same as python protein.py ENV
  export ENV   a policy as ONNX, C or a web page: --load-model-path latest --export.web FOLDER
  autotune ENV find the backend, workers and batch size that step it fastest on this machine
  profile ENV  where the time goes: tables, and a trace for a browser
  runs         the runs so far; runs show RUN: all of one
  plot RUN ... curves of a metric, in the terminal and as a page: --metric entropy --output a.html
  diagnose RUN why a run does not learn: warnings and curves; RUN: a folder, latest or ENV
  doctor       what this machine has, how fast it trains, and what is missing; for a bug report

  python pufferl.py train breakout --help    lists every setting with its default

ENV: gym/CartPole-v1, pettingzoo/mpe/simple_spread_v3 and the like, my_file.py:make_env,
my_environment.h, a file of config/ (drone_race, atari_pong), or an environment in C: """
TOOLS = {"sweep": "sweep.command", "eval": "watch", "ship": "watch", "autotune": "speed",
         "profile": "speed", "export": "export", "list": "catalogue", "doctor": "doctor",
         **dict.fromkeys(("runs", "plot", "diagnose"), "history")}  # {verb: module of tools/}


def put_verb_first(argv):
    """Put the verb first in PufferLib 2's command line (--mode train --env breakout)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mode")
    parser.add_argument("--env")
    options, rest = parser.parse_known_args(argv)
    if not argv or not argv[0].startswith("--") or not (options.mode or options.env):
        return argv
    verb = options.mode or "train"  # PufferLib 2 had a verb for each method of sweeps
    return ["sweep" if verb.startswith("sweep") else verb, *filter(None, [options.env]), *rest]


def main(argv=None):
    argv = put_verb_first(list(sys.argv[1:] if argv is None else argv))
    usage = USAGE + ", ".join(ocean.names())
    if not argv or argv[0] in ("-h", "--help") or argv in (["train", "-h"], ["train", "--help"]):
        print(usage)
        return
    verb = argv[0]
    with exit_on_error("pufferl.py"):
        require(verb in ("train", *TOOLS), f"there is no verb {verb!r}: "
                f"{ocean.nearest(verb, ['train', *TOOLS])}.\n{usage}")
        if verb in TOOLS:
            data_parallel.refuse_ranks(verb)
            tool = importlib.import_module(f"tools.{TOOLS[verb]}")
            return tool.main(argv[1:], f"pufferl.py {verb}")
        require(len(argv) > 1 and not argv[1].startswith("-"),
                f"train: which environment? There are: {', '.join(ocean.names())}")
        ranks = data_parallel.connect()
        args = ranks.first(lambda: load_config(argv[1], argv[2:]))
        gpus = args["train"]["gpus"]
        if gpus > 1 and not data_parallel.started():
            return data_parallel.launch(gpus, args["train"]["device"], [__file__, *argv])
        require(gpus == ranks.local_count
                or not any(option.startswith("--train.gpus") for option in argv),
                f"train.gpus = {gpus}: torchrun has started {ranks.local_count} ranks on this "
                "machine. Leave it out.")
        train(argv[1], args)


if __name__ == "__main__":
    torch.set_flush_denormal(True)  # torch's threads inherit it (engines.torch_threads)
    if data_parallel.started():
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)  # torchrun then shows the traceback of the rank that failed first
    processes.run_command(main)
