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

One epoch is `evaluate` (a rollout of `horizon` steps of all agents) and `train` (advantages, then minibatches of
prioritized segments). To change the algorithm, edit `PuffeRL.train`; the formulas are in kernels.py, the networks in
models.py, the environments' side in vector.py, what can be set in configuration.py and config/*.ini.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import random
import secrets
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

# torch's threads sleep while they wait: those that spin keep the cores from whoever they wait for. (docs/LOG.md)
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")

import numba
import numpy as np
import torch

import kernels
import loggers
import models
import ocean
import products
import ranks
import signs
from configuration import (  # load_* for scripts
    RENAMED,
    Base,
    ConfigError,
    Train,
    check_sizes,
    check_train,
    decide,
    difference,
    facts_of,
    find_device,
    find_run,
    load_config,
    load_env,
    load_policy,
    out_of_memory,
)  # fmt: skip
from loggers import NeptuneLogger, NoLogger, TensorBoardLogger, WandbLogger  # noqa: F401  for scripts
from vector import aligned_zeros, make  # noqa: F401  make for scripts: make("breakout", num_envs=256)

# ---------------------------------------------------------------------------------------------------------------------
# The trainer


class PuffeRL:
    """PPO over a vectorized environment and a policy.

    config: the train section as a dict (missing keys take their defaults), "env": the environment's name, optionally
    "data_dir" (None: nothing is written), "run_id" and "settings" (all sections, kept with the run). vecenv: from
    make or load_env. policy: any network that models.py's docstring describes; models.Policy runs fused. logger: see
    NoLogger. The short form takes keywords in place of a configuration; batch_size stands for horizon there:

        PuffeRL(env=vecenv, policy=policy, learning_rate=0.01, batch_size=128 * vecenv.num_agents)

    Properties: global_step, epoch, total_epochs, sps, uptime, learning_rate (assign to override the schedule).
    Started by torchrun, every rank makes a trainer with environments of its own and calls the same methods; batch_size,
    steps, losses and statistics are those of all ranks, num_agents and storage a rank's own (docs/scale.md).
    Raises ConfigError before anything starts if the settings cannot work.
    """

    def __init__(self, config=None, vecenv=None, policy=None, logger=None, *, env=None, **settings):
        vecenv = env if vecenv is None else vecenv
        if vecenv is None or policy is None:
            raise ConfigError("PuffeRL needs an environment and a policy: PuffeRL(env=make('breakout', num_envs=256), "
                              "policy=policy, learning_rate=0.01) or PuffeRL(config, vecenv, policy).")
        self.ranks = ranks.connect()
        agents = self.ranks.gather(vecenv.num_agents)
        batch_size = settings.pop("batch_size", None)
        if batch_size is not None:
            given = [key for key in settings if RENAMED.get(key, key) == "horizon"]
            if given or batch_size < sum(agents) or batch_size % sum(agents):
                raise ConfigError(f"batch_size = {batch_size}: is horizon × agents, in place of "
                                  f"{given[0] if given else 'horizon'}; there are {sum(agents)} agents.")
            settings["horizon"] = int(batch_size) // sum(agents)
        c = self.config = check_train({**(config or {}), **settings}, vecenv, policy, sum(agents), self.ranks)
        own = {f.name: c[f.name] for f in dataclasses.fields(Train)}
        self.args = {"env_name": c["env"], **c.pop("settings", {}), "train": own, "agents": sum(agents),
                     "versions": VERSIONS}
        self.vecenv, self.policy = vecenv, policy
        self.logger = logger if logger and self.ranks.rank == 0 else NoLogger()
        self.env_name = Path(c["env"]).stem
        self.horizon, self.num_agents = c["horizon"], vecenv.num_agents
        self.batch_size = self.horizon * sum(agents)
        self._first_agent = sum(agents[: self.ranks.rank])
        drawn = c["minibatch_size"] // self.horizon
        self._first_segment = drawn * self.ranks.rank // self.ranks.count
        self.segments = drawn * (self.ranks.rank + 1) // self.ranks.count - self._first_segment
        self.epoch, self._rollouts, self._override_lr, self._steps_before = 0, 0, None, 0
        self._minibatches_owed, self._rate_factor = 0.0, 1.0
        stages = ("environment", "policy", "learn", *(("ranks",) if self.ranks.count > 1 else ()), "other")
        self._started, self._stage_seconds = time.perf_counter(), dict.fromkeys(stages, 0.0)
        self._loss_sums, self._grad_norms = np.zeros(kernels.SUMS), []
        self._environment, self._last_log = {}, None
        self.losses, self.environment = {}, {}
        self.signs = signs.Signs(c, sum(agents))
        self._dashboard = self._record = self._entry = None
        run_id = c.get("run_id") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        name = f"{self.env_name}_{self.ranks.share(run_id)}"
        self.run_folder = None if c["data_dir"] is None else Path(c["data_dir"]) / name
        if self.ranks.count > 1:
            self.ranks.join(self, agents)
        self.heads = torch.tensor(vecenv.action_heads) if vecenv.action_heads else None
        self.fused = type(policy) is models.Policy
        if self.fused and policy.encoder.in_features != (size := math.prod(vecenv.observation_shape)):
            raise ConfigError(f"the policy was made for observations of {policy.encoder.in_features} numbers, these "
                              f"environments give {size}: make it from this vecenv, or keep the setting that changed.")
        if self.fused and vecenv.observation_dtype == np.float16:
            raise ConfigError("observations of float16 are for networks of your own; the default one takes float32.")
        self.normalizer = models.find_normalizer(policy)
        if c["norm_obs"] and self.normalizer is None:
            raise ConfigError("train.norm_obs = True: this network has no models.Normalizer. load_policy makes one "
                              "that has, as models.Policy(env, normalize=True) does; models.Normalized(env, policy) "
                              "puts one before a network of your own.")
        self.device = find_device(c["device"], vecenv.num_workers)
        self._precision = getattr(torch, c["precision"])
        if c["precision"] == "bfloat16" and not (self.device.separate or torch.cpu._is_avx512_bf16_supported()):
            raise ConfigError("train.precision = bfloat16: this processor has no AVX-512 BF16; use float32.")
        self._allocate()
        self.ranks.device = self.arena.memory.device
        self.best_score, self._recent, self._return_range = -math.inf, (0.0, 0), (math.inf, -math.inf)
        self._best = on_the_cpu(policy.state_dict())
        self._best_unsaved = False
        self._rows = [[self._row(agents, t) for t in range(self.horizon + 1)] for agents in vecenv.ranges]
        workers = vecenv.num_workers
        self._pool = None
        if self.fused or self.device.separate:
            # A worker that waits for the interpreter gets it after 0.2 ms, not 5: a rollout takes a tenth less.
            sys.setswitchinterval(2e-4)
            self._pool = ThreadPoolExecutor(workers, "worker", kernels.set_threads, (vecenv.threads_per_worker,))
        self._worker_of = {}  # buffer -> the worker that serves it
        self._rolled_out, self._learned_epochs, self._captured = False, 0, False
        self._handles = {}  # buffer -> what replays its rollout's graphs without the interpreter
        self._forward = self.policy
        if c["compile"]:
            if self.fused:
                raise ConfigError("train.compile: the default network is fused by hand; compile is for your own.")
            self._forward = torch.compile(self.policy, mode=c["compile_mode"])

    # -- memory ----------------------------------------------------------------------------------------------------

    @out_of_memory("vec.total_agents (or env.num_envs) or train.horizon")
    def _allocate(self):
        """Everything that lives as long as the trainer: the rollout's arrays, and all else in one arena."""
        T, N, M, c = self.horizon, self.num_agents, self.segments, self.config
        arrays = vars(self.vecenv.allocate(T))
        self.host = {name: None if array is None else torch.from_numpy(array) for name, array in arrays.items()}
        self.policy.to(self.device.torch_device)
        arena = self.arena = kernels.Arena()
        arena.adopt(self.policy)
        self.optimizer = None
        if c["optimizer"] == "muon":
            self.optimizer = kernels.Muon(arena, c["momentum"], c["weight_decay"], c["max_grad_norm"],
                                          together=self.device.separate)
        for name, shape in (("logprobs", (T, N)), ("values", (T + 1, N)), ("bootstraps", (T, N)), ("ratios", (T, N)),
                            ("advantages", (T, N)), ("weights", (M,)), ("new_values", (T, M)), ("new_ratios", (T, M)),
                            ("settings", (len(kernels.LOSS_SETTINGS),))):
            arena.register(name, shape)
        for name in ("masses", "cumulative"):
            arena.register(name, (N,), torch.float64)
        arena.register("moments", (3,), torch.float64)
        arena.register("index", (M,), torch.int64)
        # What changes from one epoch or minibatch to the next stands in memory, where a captured graph reads it.
        arena.register("steps", (T,), torch.int64)
        arena.register("clock", (2,), torch.int64)  # epoch, minibatch
        for name, shape in (("beta", (1,)), ("rate", ()), ("found_inf", ())):
            arena.register(name, shape)
        if self.device.separate:
            for name, tensor in self.host.items():
                if tensor is not None:
                    arena.register(f"storage/{name}", tensor.shape, tensor.dtype)
            arena.register("norms", (math.ceil(c["replay_ratio"] * self.batch_size / c["minibatch_size"]) + 1,),
                           torch.float64)  # of the gradients, a minibatch
            arena.register("cut", (N,), torch.uint8)
            arena.register("cut_step", (self.vecenv.num_buffers,), torch.int64)
        state = self.policy.initial_state(N) if hasattr(self.policy, "initial_state") else {}
        for name, tensor in state.items():
            arena.register(f"state/{name}", tensor.shape)
            arena.register(f"initial_state/{name}", tensor.shape)
        workers = self.vecenv.num_workers
        largest = max(agents.stop - agents.start for agents in self.vecenv.ranges)
        for w in range(workers):
            for name, tensor in state.items():
                arena.register(f"scratch {w}/{name}", (len(tensor), largest, *tensor.shape[2:]))

        learners = 1
        if self.fused:
            learners = 1 if self.device.separate else workers
            bounds = [M * worker // learners for worker in range(learners + 1)]
            rows = max(1, CHUNK_STEPS * 4 // self._precision.itemsize // T)
            if self.device.separate:  # all at once
                rows = min(c["minibatch_size"], c["max_minibatch_size"] or c["minibatch_size"]) // T
            self._chunks = [[(start, min(rows, last - start)) for start in range(first, last, rows)]
                            for first, last in itertools.pairwise(bounds)]
            self._actors = [models.Fused(self.policy, arena, f"actor {w}", steps=0, rows=largest,
                                         precision=self._precision) for w in range(workers)]  # fmt: skip
            self._learners = [models.Fused(self.policy, arena, f"learner {w}", steps=T, rows=min(rows, M),
                                           precision=self._precision) for w in range(learners)]  # fmt: skip
            for w in range(1, learners):  # worker 0 adds into the gradients themselves
                for name, parameter in self.policy.named_parameters():
                    arena.register(f"gradients {w}/policy.{name}", parameter.shape, group=f"gradients {w}")
        arena.register("sums", (learners, kernels.SUMS), torch.float64)
        if c["norm_reward"]:
            arena.register("rewards", (T, N))

        arena.allocate(self.device.torch_device)
        for name in ("logprobs", "values", "bootstraps", "ratios", "advantages", "weights", "new_values", "new_ratios",
                     "settings", "masses", "cumulative", "moments", "index", "sums"):
            setattr(self, name, arena[name])
        self.storage = self.host  # what the policy reads and learns from
        if self.device.separate:
            self.storage = {name: None if tensor is None else arena[f"storage/{name}"]
                            for name, tensor in self.host.items()}
            self.storage["valid"].copy_(self.host["valid"])  # all alive, where agents never die: then it stays
            for array in arrays.values():
                if array is not None:
                    self.device.pin(array)
            cut, cut_step = aligned_zeros((N,), np.uint8), aligned_zeros((self.vecenv.num_buffers,), np.int64)
            self.device.pin(cut)
            self.device.pin(cut_step)
            self._host_cut, self._host_cut_step = torch.from_numpy(cut), torch.from_numpy(cut_step)
        self.rewards, self.reward_scale = self.storage["rewards"], None  # what is learnt from
        if c["norm_reward"]:
            self.rewards, self.reward_scale = arena["rewards"], models.RewardScale(N, c["gamma"])
        self._flat_observations = self.storage["observations"].view(T + 1, N, -1)
        self.running_returns = torch.zeros(N)
        self.state = {name: arena[f"state/{name}"] for name in state}
        self.initial_state = {name: arena[f"initial_state/{name}"] for name in state}
        self._scratch = [{name: arena[f"scratch {w}/{name}"] for name in state} for w in range(workers)]
        if self.fused:
            for actor in self._actors:
                actor.bind()
            groups = ["gradients", *(f"gradients {w}" for w in range(1, learners))]
            for learner, group in zip(self._learners, groups, strict=True):
                learner.bind(group)
            self._gradients = [arena.flat(group) for group in groups]
        if c["optimizer"] == "adam":
            rate = arena["rate"].fill_(c["learning_rate"]) if self.device.separate else c["learning_rate"]
            self.optimizer = torch.optim.AdamW(
                self.policy.parameters(), lr=rate, betas=(c["momentum"], c["beta2"]), eps=c["eps"],
                weight_decay=c["weight_decay"], fused=True, capturable=self.device.separate)
            if self.device.separate:
                self.optimizer.found_inf = arena["found_inf"]
        flags = torch.zeros(N, dtype=torch.uint8, device=self.device.torch_device)
        self._flags = flags, flags + 1

    def _row(self, agents, t):
        """The views that a worker needs at step t of a buffer, made once: the hot loop slices nothing."""
        s, host, last = self.storage, self.host, t == self.horizon
        names = ("observations", "resets", "valid", "action_masks")
        row = {name: s[name][t, agents] if s[name] is not None else None for name in names}
        copied = names if self.device.separate else ()
        row["copied"] = [(row[name], host[name][t, agents]) for name in copied
                         if row[name] is not None and (name != "valid" or self.vecenv.has_valid)]
        row["values"] = self.values[t, agents]
        if last:
            return row
        return {**row, "step": self.arena["steps"][t : t + 1], "logprobs": self.logprobs[t, agents],
                "actions": s["actions"][t, agents], "host_actions": host["actions"][t, agents],
                "truncations": host["truncations"][t, agents].numpy(),
                "terminals": host["terminals"][t, agents].numpy()}

    # -- the rollout -----------------------------------------------------------------------------------------------

    @out_of_memory("vec.total_agents (or env.num_envs) or policy.hidden_size")
    def evaluate(self):
        """Roll out `horizon` steps of all agents; returns the means of the environments' statistics over the episodes
        that finished since the last log. train learns from the last one; others count as no steps."""
        self.record()
        self._rolled_out, begun = False, time.perf_counter()
        with self.device.main(), torch_threads(1):  # others would spin for a while after each pass, beside the workers
            if self.device.separate and not self._captured and self._learned_epochs == self.config["cudagraphs"]:
                self._capture()
            self._begin()
            seconds = self._run_workers()
            if self.device.separate:
                for name in ("rewards", "terminals", "truncations"):
                    self.storage[name].copy_(self.host[name], non_blocking=True)
            # Workers run side by side; where environments are elsewhere only the first one has something to do.
            stepping = sum(seconds) / (max(1, sum(one > 0 for one in seconds)) if self._pool else 1)
            self._stage_seconds["environment"] += stepping
            self._stage_seconds["policy"] += time.perf_counter() - begun - stepping
            log = self.ranks.merge_log(self.vecenv.log())
            self._track_returns()
            self._gather_statistics(log)
            self._remember_best(log)
        self._rollouts += 1
        self._rolled_out = True
        return dict(self.environment)

    def _begin(self):
        """Everything stands at step 0 of a rollout."""
        self.vecenv.begin()
        self.bootstraps.zero_()
        self.arena["steps"].copy_(self._rollouts * self.horizon + torch.arange(self.horizon))
        for name, state in self.state.items():
            if self.config["state"] == "zero":
                state.zero_()
            self.initial_state[name].copy_(state)
        self.device.wait()  # the workers have streams of their own

    def _run_workers(self):
        """The rollout; returns the seconds that each worker spent in environments."""
        workers = range(self.vecenv.num_workers)
        if self._pool:
            with torch_threads(self.vecenv.threads_per_worker):
                return self._in_parallel(self._rollout, workers)
        threads = self._threads(self.vecenv.agents_per_batch)
        with kernels.threads(self.vecenv.num_threads), torch_threads(threads):
            return [self._rollout(worker) for worker in workers]

    def _in_parallel(self, function, workers):
        """[function(worker), ...], each in a thread of its own."""
        calls = [self._pool.submit(function, worker) for worker in workers]
        try:
            return [call.result() for call in calls]
        finally:
            wait(calls)  # after an interrupt too: nobody must write any more when a checkpoint is loaded or saved

    def _rollout(self, worker):
        """One worker's share of the rollout; returns the seconds it spent in environments or waited for them."""
        vecenv, seconds, begun = self.vecenv, 0.0, time.perf_counter()
        with torch.no_grad(), self.device.worker(worker):
            if self.fused:
                self._actors[worker].refresh()
                if vecenv.can_step_in_kernels:
                    buffers = range(worker, vecenv.num_buffers, vecenv.num_workers)
                    if self._actors[worker].in_one_call:
                        return sum(self._rollout_in_one_call(worker, buffer) for buffer in buffers)
                    if all(map(self._handles.get, buffers)):
                        return sum(map(self._rollout_in_graphs, buffers))
            while (ready := vecenv.wait(worker)) is not None:
                buffer, t = ready
                seconds += time.perf_counter() - begun
                self._worker_of[buffer] = worker
                if t > 0:
                    self._bootstrap(worker, buffer, t - 1)
                self.device.play(("step", buffer, t), self._step, worker, buffer, t)
                self.device.wait()  # for the actions
                begun = time.perf_counter()
                if t < self.horizon:
                    vecenv.advance(buffer)
        return seconds

    def _rollout_in_one_call(self, worker, buffer):
        """The same for one buffer, without the interpreter: a step of few agents costs half as much."""
        begun, s, agents = time.perf_counter(), self.storage, self.vecenv.ranges[buffer]
        names, log_std = ("resets", "valid", "actions", "terminals", "truncations"), self.policy.decoder.log_std
        final_observations = s["final_observations"].view(self.num_agents, -1)
        share = self._actors[worker].rollout(
            agents, self.vecenv.addresses(buffer),
            (self._flat_observations, *(s[name] for name in names), final_observations),
            [state[agents] for state in self.state["mingru"]], self._scratch[worker]["mingru"], heads=self.heads,
            log_std=None if log_std is None else log_std.data, masks=s["action_masks"], seed=self.config["seed"],
            first_agent=self._first_agent, clock=self.arena["steps"], logprobs=self.logprobs, values=self.values,
            bootstraps=self.bootstraps)
        self.vecenv.finish(buffer)
        return share * (time.perf_counter() - begun)

    def _rollout_in_graphs(self, buffer):
        """The same where the policy is in graphs."""
        begun, host = time.perf_counter(), self.host
        self.device.wait()  # this thread has spoken to the GPU
        share = products.rollout_in_graphs(
            self.vecenv.ranges[buffer], self.vecenv.addresses(buffer), self._handles[buffer],
            (host["terminals"], host["truncations"], host["resets"]), self._host_cut,
            self._host_cut_step[buffer : buffer + 1])
        self.vecenv.finish(buffer)
        return share * (time.perf_counter() - begun)

    def _calls(self, worker, buffer):
        """[(key, function, arguments)] of a buffer's rollout: its steps, and its final values."""
        steps = [(("step", buffer, t), self._step, (worker, buffer, t)) for t in range(self.horizon + 1)]
        return [*steps, (("final", buffer), self._final_values, (worker, buffer))]

    def _step(self, worker, buffer, t):
        """Act on row t of a buffer: actions, log-probabilities and values; at t = horizon V alone, which bootstraps,
        and nothing is committed."""
        agents, row = self.vecenv.ranges[buffer], self._rows[buffer][t]
        for tensor, host in row["copied"]:
            tensor.copy_(host, non_blocking=True)
        state = {name: tensor[:, agents] for name, tensor in self.state.items()}
        if t == self.horizon:
            state = self._copy_state(worker, state)
            outputs, _ = self._act(worker, row["observations"], state, row["resets"], row["valid"])
            row["values"].copy_(outputs[:, -1])
            return
        outputs, log_std = self._act(worker, row["observations"], state, row["resets"], row["valid"])
        kernels.sample(outputs, row["actions"], row["logprobs"], row["values"], seed=self.config["seed"],
                       step=row["step"], first_agent=self._first_agent + agents.start, heads=self.heads,
                       log_std=log_std, masks=row["action_masks"])
        if self.device.separate:
            row["host_actions"].copy_(row["actions"], non_blocking=True)

    def _act(self, worker, observations, state, resets, valid):
        """outputs (n, A + 1) and log_std for one step; the tensors in `state` are updated in place."""
        if self.fused:
            log_std = self.policy.decoder.log_std
            outputs = self._actors[worker].step(observations, state["mingru"], resets, valid)
            return outputs, None if log_std is None else log_std.data
        view = {**state, "resets": resets, "valid": valid}
        with self._autocast(cache_enabled=False):  # all threads share it: it hands on what another stream still casts
            outputs, log_std = models.join_outputs(*models.one_step(self.policy, observations, view))
        for name, tensor in state.items():
            tensor.copy_(view[name])
        return outputs.float().contiguous(), None if log_std is None else log_std.float().contiguous()

    def _threads(self, rows):
        """torch's threads within an operation: the fused path's workers bring their own; a custom network gets all
        cores for a pass of that many rows where they have something to do, else they wait longer than they work. Where
        a weight works more than once a row, as in a convolution, the network says its `operations` a row itself."""
        if self.fused:
            return self.vecenv.threads_per_worker
        if self.device.separate:  # threads do nothing there, and torch.compile compiles anew for another number of them
            return 1
        weights = sum(parameter.numel() for parameter in self.policy.parameters())
        operations = rows * getattr(self.policy, "operations", 2 * weights)
        return self.vecenv.num_threads if operations > WORTH_THREADS else 1

    def _autocast(self, **options):
        """A custom network's products at train.precision."""
        enabled = self._precision != torch.float32
        return torch.autocast(self.device.torch_device.type, self._precision, enabled=enabled, **options)

    def _bootstrap(self, worker, buffer, t):
        """V of the final observation of the agents that step t truncated, from the state before the reset."""
        agents, row = self.vecenv.ranges[buffer], self._rows[buffer][t]
        if not row["truncations"].any():
            return
        cut = row["truncations"] & ~row["terminals"]  # terminal as well: nothing follows
        if self.device.separate:
            self._host_cut[agents], self._host_cut_step[buffer] = torch.from_numpy(cut), t
            self.device.play(("final", buffer), self._final_values, worker, buffer)
            return
        cut = torch.from_numpy(np.flatnonzero(cut)) + agents.start
        if len(cut) == 0:
            return
        state, flags = self._copy_state(worker, self.state, cut), (flag[: len(cut)] for flag in self._flags)
        outputs, _ = self._act(worker, self.storage["final_observations"][cut], state, *flags)
        self.bootstraps[t, cut] = outputs[:, -1]

    def _final_values(self, worker, buffer):
        """On a GPU, where shapes are fixed: V of all of a buffer's final observations into the bootstraps of the step
        that the host sets, 0 where it sets no cut."""
        agents, one = self.vecenv.ranges[buffer], slice(buffer, buffer + 1)
        final, cut = self.storage["final_observations"][agents], self.arena["cut"][agents]
        step = self.arena["cut_step"][one]
        final.copy_(self.host["final_observations"][agents], non_blocking=True)
        cut.copy_(self._host_cut[agents], non_blocking=True)
        step.copy_(self._host_cut_step[one], non_blocking=True)
        state = self._copy_state(worker, {name: tensor[:, agents] for name, tensor in self.state.items()})
        outputs, _ = self._act(worker, final, state, *(flags[agents] for flags in self._flags))
        values = outputs[:, -1].masked_fill(cut == 0, 0.0)  # a NaN may be among them
        self.bootstraps[:, agents].index_copy_(0, step, values.unsqueeze(0))

    def _copy_state(self, worker, state, index=None):
        """A copy of the recurrent state of these agents, or of those in `index`, in the worker's scratch memory."""
        copies = {}
        for name, tensor in state.items():
            copies[name] = self._scratch[worker][name][:, : tensor.shape[1] if index is None else len(index)]
            for source, copy in zip(tensor, copies[name], strict=True):
                copy.copy_(source) if index is None else torch.index_select(source, 0, index, out=copy)
        return copies

    def _track_returns(self):
        """Keep the smallest and the largest return of the agents' episodes that ended since the last log entry."""
        s = self.vecenv.storage
        self._return_range = kernels.return_range(s.rewards, s.valid, s.resets, self.running_returns.numpy(),
                                                  *self._return_range)

    def _gather_statistics(self, log):
        """Add a log's means, weighted by their number of episodes, to those since the last log entry."""
        count = log.get("n", 0)
        if not count:
            return
        for name, value in log.items():
            total, weight = self._environment.get(name, (0.0, 0))
            self._environment[name] = (total + value * count, weight + count)
        self.environment = {name: total / weight for name, (total, weight) in self._environment.items()}
        self.environment["n"] = self._environment["n"][1]

    def _remember_best(self, log):
        """Keep a copy of the weights that had the best mean score over BEST_EPISODES or more; checkpoints write it."""
        count = log.get("n", 0)
        if not count:
            return
        score = log.get("score", log.get("episode_return", math.nan))
        total, episodes = self._recent[0] + score * count, self._recent[1] + count
        self._recent = total, episodes
        if episodes >= BEST_EPISODES:
            if total / episodes > self.best_score:
                self.best_score, self._best_unsaved = total / episodes, True
                for name, tensor in self.policy.state_dict().items():
                    self._best[name].copy_(tensor)
            self._recent = 0.0, 0

    def _capture(self):
        """Record what an epoch does on the GPU as graphs, which from now on are replayed; nothing runs or changes.
        Where that cannot be, the run goes on without, and says why."""
        self._captured = True
        learning = [("renew", self._renew, (None,)), ("draw", self._draw, ()),
                    ("gradients", self._compute_gradients, ()), ("update", self._update_on_gpu, ()),
                    ("write back", self._write_back, ())]
        if self.fused and self.ranks.count == 1:  # nobody to add up with, and no graph that is looked at by itself
            learning[1:] = [("minibatch", self._minibatch, ([],))]
        try:
            with torch.no_grad():
                for buffer, worker in self._worker_of.items() if self.fused else ():  # not every environment truncates
                    with self.device.worker(worker):
                        self._final_values(worker, buffer)
                for buffer, worker in self._worker_of.items():
                    self.device.capture(worker, self._calls(worker, buffer))
                    if self.fused:  # torch's own replay also counts the random numbers that another network may draw
                        self._handles[buffer] = self.device.handles(worker, self._calls(worker, buffer))
            self.device.capture(None, learning)
            if not self.fused:
                self._check_capture(learning)
        except Exception as error:  # numba's CudaAPIError is no RuntimeError
            self._forget_graphs()
            if self.ranks.rank == 0:
                print(f"train.cudagraphs: the network cannot be captured and runs without, which is slower: "
                      f"{(str(error) or type(error).__name__).splitlines()[0]}", file=sys.stderr)
        except BaseException:  # an interrupt: half of the graphs are none
            self._forget_graphs()
            raise

    def _forget_graphs(self):
        self.device.forget()
        self._handles.clear()

    def _check_capture(self, learning):
        """RuntimeError unless the graphs of a custom network's update leave what its code leaves."""
        def gradients(way):
            before = self.arena.memory.clone()
            for key, function, arguments in learning[:3]:
                way(key, function, *arguments)
            result = self.arena.flat("gradients").clone()
            self.arena.memory.copy_(before)
            return result

        eager = gradients(lambda key, function, *arguments: function(*arguments))
        error = (gradients(self.device.play) - eager).norm() / (eager.norm() + 1e-8)
        if not error < 1e-2:
            raise RuntimeError(f"its gradients from a graph differ by {float(error):.2g} from those without (has it "
                               "random numbers, or some outside of tensors?)")

    # -- learning --------------------------------------------------------------------------------------------------

    @out_of_memory("train.max_minibatch_size (of a network of your own), train.minibatch_size or policy.hidden_size")
    def train(self):
        """Learn from the last rollout: replay_ratio · batch_size steps in minibatches of prioritized segments.

        Returns the means over the valid steps of its minibatches: policy_loss, value_loss, entropy, approx_kl,
        clipfrac, explained_variance, old_approx_kl, importance, grad_norm, learning_rate. Logs where log_interval has
        passed.
        Raises FloatingPointError, weights untouched, where a gradient is not finite.
        """
        if not self._rolled_out:
            raise RuntimeError("train() learns from a rollout, once: call evaluate() before each train().")
        begun, c, count = self._clock(), self.config, 0
        if not (c["norm_obs"] and self.normalizer.count == 0):  # else this rollout only shows what observations are
            self._minibatches_owed += c["replay_ratio"] * self.batch_size / c["minibatch_size"]
            count = int(self._minibatches_owed + 1e-9)
            self._minibatches_owed -= count
        rows = min(c["minibatch_size"], c["max_minibatch_size"] or c["minibatch_size"])
        threads = kernels.threads(self.vecenv.num_threads), torch_threads(self._threads(rows))
        with threads[0], threads[1], self.device.main():
            self._scale_rewards()
            norms, sums = self._learn(count)
            if c["norm_obs"]:
                self._merge_observations()
        self.epoch += 1
        self._rolled_out = False
        self._learned_epochs += count > 0
        log_due = self._last_log is None or time.perf_counter() - self._last_log[0] >= c["log_interval"]
        log_due = log_due or self.epoch == self.total_epochs
        if self.ranks.count > 1:
            sums, log_due = self.ranks.end_epoch(self, sums, log_due)
        self._loss_sums += sums
        self._grad_norms += norms
        self._stage_seconds["learn"] += self._clock() - begun
        logs = self._losses(sums, norms) if count or not self.losses else dict(self.losses)
        self.losses = logs
        if count and c["target_kl"] is not None:
            self._adapt_rate(logs["approx_kl"])
        if self.epoch % c["checkpoint_interval"] == 0:
            self._try_checkpoint()
        if log_due:
            self.mean_and_log()
        return logs

    def _adapt_rate(self, kl):
        """Nearer to the learning rate at which an epoch moves the policy by target_kl (Schulman et al. 2017, 4; here
        every epoch and gently), until the schedule takes it to its end. Advantages that are small beside the return's
        deviation are mostly noise: less is then aimed at, since Muon's steps do not shrink with the gradient."""
        target = self.config["target_kl"]
        if self.reward_scale is not None:
            count, total, squares = self.moments.tolist()  # of the last minibatch, of all ranks
            count = max(count, 1.0)  # all may have been dead
            deviation = math.sqrt(max(0.0, squares / count - (total / count) ** 2))
            target *= min(1.0, deviation / SMALL_ADVANTAGES)
        if self._schedule() > 0.05:
            step = math.sqrt(target / max(kl, 1e-12))
            step = min(RATE_STEPS[1], max(RATE_STEPS[0], step))
            self._rate_factor = min(RATE_FACTORS[1], max(RATE_FACTORS[0], self._rate_factor * step))

    def _scale_rewards(self):
        """The rollout's rewards in deviations of the discounted return, this rollout's included: a first reward after
        many zeros would else be divided by next to nothing."""
        if self.reward_scale is not None:
            moments = self.reward_scale.follow(*(self.host[name] for name in ("rewards", "resets", "valid")))
            self.reward_scale.merge(self.ranks.gather(moments))
            torch.mul(self.storage["rewards"], self.reward_scale.scale, out=self.rewards)

    def _merge_observations(self):
        """Add the rollout's observations to the moments that normalise those of the next."""
        seen, valid = (self.storage[name][: self.horizon].flatten(0, 1) for name in ("observations", "valid"))
        self.normalizer.merge(self.ranks.gather(self.normalizer.moments(seen, valid)))

    def _learn(self, count):
        """`count` minibatches; returns the gradient norm of each and the sums of the losses' statistics."""
        c = self.config
        progress = min(1.0, self.global_step / c["total_timesteps"])
        self._used_lr = self.learning_rate
        self.settings[3:] = torch.tensor([c["clip_coef"], c["vf_coef"], c["vf_clip_coef"],
                                          c["ent_coef"] * (1 - progress if c["anneal_ent_coef"] else 1)])
        self.arena["beta"].fill_(c["prio_beta0"] + (1 - c["prio_beta0"]) * progress)
        self.arena["rate"].fill_(self._used_lr)
        self.arena["clock"].copy_(torch.tensor([self.epoch, 0]))
        self.arena["found_inf"].zero_()
        self.ratios.fill_(1.0)
        self.sums.zero_()
        self.device.play("renew", self._renew, None)
        norms = []
        for _ in range(count):
            self.device.play("minibatch", self._minibatch, norms)
        if self.device.separate:
            norms = self.arena["norms"][:count].tolist()
            self._check_norms(norms)
        return norms, self.sums.sum(0).cpu().numpy()

    def _minibatch(self, norms):
        """Draw, gradients, update, write-back; adds the gradient's norm to `norms`, on a GPU to the arena's."""
        self.device.play("draw", self._draw)
        self.ranks.sum(self.moments)
        self.device.play("gradients", self._compute_gradients)
        self.ranks.sum(self.arena.flat("gradients"))
        if self.device.separate:
            self.device.play("update", self._update_on_gpu)
        else:
            norms.append(self._update(self._used_lr))
        self.device.play("write back", self._write_back)

    def _clock(self):
        """Seconds, without those spent waiting for other ranks."""
        return time.perf_counter() - self.ranks.seconds

    def _draw(self):
        """Draw the segments of a minibatch, and what normalises their advantages."""
        clock, c = self.arena["clock"], self.config
        kernels.draw(self.masses, self.cumulative, self.index, self.weights, seed=c["seed"], clock=clock,
                     beta=self.arena["beta"], first=self._first_segment)
        self.moments.copy_(kernels.advantage_moments(self.advantages, self.storage["valid"], self.index))

    def _compute_gradients(self):
        """Of the minibatch's loss, with respect to all weights."""
        kernels.normalisation(self.moments, self.settings)
        if not self.fused:
            self._learn_custom()
        elif self.device.separate:
            self._learn_fused(0)
        else:
            self._in_parallel(self._learn_fused, range(len(self._chunks)))
            for other in self._gradients[1:]:
                self._gradients[0].add_(other)

    def _write_back(self):
        kernels.write_back(self.index, self.new_values, self.new_ratios, self.values, self.ratios)
        self._renew(self.index)
        self.arena["clock"][1:].add_(1)

    def _renew(self, index):
        """Advantages and priorities of all segments, or of those just learnt from (a segment's depend on no other)."""
        c, s = self.config, self.storage
        kernels.advantage(
            self.values, self.rewards, s["terminals"], s["truncations"], self.bootstraps, self.ratios, s["valid"],
            self.advantages, gamma=c["gamma"], gae_lambda=c["gae_lambda"], rho_clip=c["vtrace_rho_clip"],
            c_clip=c["vtrace_c_clip"], reward_clip=math.inf if c["reward_clip"] is None else c["reward_clip"],
            index=index)
        kernels.priorities(self.advantages, s["valid"], self.masses, alpha=c["prio_alpha"], index=index)

    def _loss(self, outputs, grad, start, sums, log_std=None, grad_log_std=None):
        s = self.storage
        kernels.ppo_loss(
            outputs, s["actions"], self.logprobs, self.values, self.advantages, self.weights, s["valid"], self.settings,
            grad, self.new_values, self.new_ratios, sums, heads=self.heads, log_std=log_std, grad_log_std=grad_log_std,
            masks=s["action_masks"], index=self.index, start=start)

    def _learn_fused(self, worker):
        """One worker's segments of the minibatch, chunk by chunk, so that a chunk's activations stay in cache."""
        s, learner, log_std = self.storage, self._learners[worker], self.policy.decoder.log_std
        self._gradients[worker].zero_()
        learner.refresh()
        for start, count in self._chunks[worker]:
            chunk = learner.chunk(count)
            learner.gather(chunk, self._flat_observations, self.index, start)
            for layer, states in enumerate(chunk.states):
                torch.index_select(self.initial_state["mingru"][layer], 0, self.index[start : start + count],
                                   out=states[0])
            flags = s["resets"], s["valid"], self.index, start
            learner.forward(chunk, *flags)
            self._loss(chunk.outputs, chunk.grad_outputs, start, self.sums[worker],
                       None if log_std is None else log_std.data, chunk.grad_log_std)
            learner.backward(chunk, *flags)

    def _learn_custom(self):
        """The same through a custom network's own forward and autograd."""
        s, T = self.storage, self.horizon
        self.arena.flat("gradients").zero_()
        step = (self.config["max_minibatch_size"] or self.config["minibatch_size"]) // T
        for start in range(0, self.segments, step):
            index = self.index[start : start + step]
            state = {name: tensor[:, index] for name, tensor in self.initial_state.items()}
            state |= {name: s[name][:T].index_select(1, index) for name in ("resets", "valid")}
            observations = s["observations"][:T].index_select(1, index)
            with self._autocast():
                outputs, log_std = models.join_outputs(
                    *models.over_time(self.policy, observations, state, self._forward))
            outputs = outputs.float().contiguous()
            grads = [torch.empty_like(outputs), None]
            if log_std is not None:
                log_std = log_std.float().contiguous()
                grads[1] = torch.empty_like(log_std)
            fixed = None if log_std is None else log_std.detach()
            self._loss(outputs.detach(), grads[0], start, self.sums[0], fixed, grads[1])
            pairs = zip((outputs, log_std), grads, strict=True)
            leaves = [(x, grad) for x, grad in pairs if x is not None and x.requires_grad]
            torch.autograd.backward([x for x, _ in leaves], [grad for _, grad in leaves])

    def _update(self, learning_rate):
        """One optimizer step; returns the gradient norm before the clip. Where that is not finite nothing changes."""
        if isinstance(self.optimizer, kernels.Muon):
            norm = self.optimizer.step(learning_rate)
        else:
            gradients = self.arena.flat("gradients")
            norm = kernels.gradient_norm(gradients)
            if math.isfinite(norm):
                gradients.mul_(min(1.0, self.config["max_grad_norm"] / (norm + 1e-6)))
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate
                self.optimizer.step()
        self._check_norms([norm])
        return norm

    def _update_on_gpu(self):
        """The same without a wait for the GPU: the norm goes to its place among the epoch's, and once one of them is
        not finite nothing changes any more."""
        rate, found_inf = self.arena["rate"], self.arena["found_inf"]
        if isinstance(self.optimizer, kernels.Muon):
            norm = self.optimizer.step(rate, found_inf)
        else:
            gradients = self.arena.flat("gradients")
            norm = kernels.gradient_norm(gradients)
            found_inf.copy_((found_inf != 0) | ~norm.isfinite())
            gradients.mul_((self.config["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0))
            self.optimizer.step()
        self.arena["norms"].index_copy_(0, self.arena["clock"][1:], norm.view(1))

    def _check_norms(self, norms):
        """FloatingPointError that says what was not finite first, if a gradient norm is not."""
        if not all(map(math.isfinite, norms)):  # the gradient is everybody's, but one rank's numbers may be the cause
            what, good = min(self.ranks.gather(self._explain_nan()))[1], self.run_folder
            raise FloatingPointError(f"epoch {self.epoch}: {what}. The weights were left as they were"
                                     + (f", and so was the last checkpoint, in {good}." if good else "."))

    def _explain_nan(self):
        """(how early, what): what was not finite first, the weights, then in the order of the rollout, then of the
        update. The earliest of all ranks is the cause."""
        s, low = self.storage, "lower train.learning_rate"
        check = f"the environment writes it: python -m ocean {self.env_name} --check"
        rollout = (("observations", s["observations"], check),
                   ("logprobs", self.logprobs, f"the network's outputs overflow; {low}"),
                   ("values", self.values, f"the network's outputs overflow; {low}"),
                   ("rewards", s["rewards"], check))
        learning = (("advantages", self.advantages, "rewards or values overflow; scale them or set train.reward_clip"),
                    ("new_values", self.new_values, f"the loss's forward pass overflows; {low}"),
                    ("gradients", self.arena.flat("gradients"), f"the update overflows; {low}"))
        if not torch.isfinite(self.arena.flat("weights")).all():
            return -1, "weights not finite (too large an update, or something outside, wrote them)"
        broken = []
        for order, (name, tensor, cause) in enumerate(rollout):
            rows = torch.isfinite(tensor.float().flatten(1)).all(1)
            if not rows.all():
                step = int(rows.int().argmin())
                broken.append((step + order / 10, f"{name} not finite, first at step {step} of the rollout ({cause})"))
        for order, (name, tensor, cause) in enumerate(learning):
            if not torch.isfinite(tensor).all():
                broken.append((self.horizon + 1 + order, f"{name} not finite ({cause})"))
        return min(broken, default=(math.inf, f"gradient norm not finite ({low})"))

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
        return self.config["learning_rate"] * self._rate_factor * self._schedule()

    def _schedule(self):
        """The share of learning_rate that the cosine leaves at this step."""
        c = self.config
        if not c["anneal_lr"]:
            return 1.0
        progress, low = min(1.0, self.global_step / c["total_timesteps"]), c["min_lr_ratio"]
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))

    @learning_rate.setter
    def learning_rate(self, value):
        self._override_lr = float(value)

    @property
    def uptime(self):
        """Seconds since the trainer was made."""
        return time.perf_counter() - self._started

    @property
    def sps(self):
        """Environment steps a second since the last log entry."""
        since, step = self._last_log or (self._started, 0)
        return (self.global_step - step) / max(time.perf_counter() - since, 1e-9)

    def _losses(self, sums, norms):
        norm = float(np.mean(norms)) if norms else math.nan
        return {**kernels.loss_statistics(sums), "grad_norm": norm, "learning_rate": self._used_lr}

    # -- logs ------------------------------------------------------------------------------------------------------

    def mean_and_log(self):
        """Log the means since the last entry and return them. With nothing new since then it logs nothing and returns
        that entry."""
        if self.global_step == (self._last_log[1] if self._last_log else 0):
            return self._entry or {}
        stages, (since, step) = dict(self._stage_seconds), self._last_log or (self._started, 0)
        seconds = time.perf_counter() - since
        if self.ranks.count > 1:
            stages["ranks"] = self.ranks.take_seconds()
            low, high = self._return_range
            low, high = self.ranks.max(np.array([-low, high])).tolist()
            self._return_range = -low, high
        if self._environment and self._return_range[0] <= self._return_range[1]:
            ends = ("episode_return_min", "episode_return_max")
            self.environment |= dict(zip(ends, self._return_range, strict=True))
        stages["other"] = max(0.0, seconds - sum(stages.values()))
        self.stages, self.last_sps = stages, self.sps
        metrics = {f"environment/{name}": value for name, value in self.environment.items() if self._environment}
        if self._grad_norms:
            losses = self._losses(self._loss_sums, self._grad_norms)
            metrics |= {f"losses/{name}": value for name, value in losses.items()}
        metrics |= {"performance/sps": self.last_sps, "performance/uptime": self.uptime,
                    "performance/epoch": self.epoch,
                    "performance/seconds_epoch": seconds * self.batch_size / (self.global_step - step)}
        metrics |= {f"performance/seconds_{name}": value for name, value in stages.items()}
        shown = ("observations", "rewards", "valid", "terminals", "truncations")
        metrics |= signs.vital(*(self.host[name].numpy() for name in shown))
        sentences = self.signs.see(self.global_step, metrics) if self.signs else []
        self.logger.log(metrics, self.global_step)
        if self._record:
            self._record.log(metrics, self.global_step)
        for sentence in sentences if self.ranks.rank == 0 else ():
            print(f"sign: {sentence}", file=sys.stderr)
            if self._record:
                with contextlib.suppress(OSError), open(self.run_folder / "signs.txt", "a") as file:
                    file.write(f"step {self.global_step:,}: {sentence}\n")
        self._entry = metrics
        self._last_log = (time.perf_counter(), self.global_step)
        self._stage_seconds = dict.fromkeys(stages, 0.0)
        self._loss_sums[:], self._grad_norms, self._environment = 0.0, [], {}
        self._return_range = math.inf, -math.inf
        return metrics

    def record(self):
        """Make the run's folder, with the resolved configuration and a first checkpoint, and write metrics.jsonl there
        from now on; the first rollout does it, if it was not done before. Raises ConfigError where that cannot be."""
        if self._record is not None:
            return
        self._record, folder = False, self.run_folder
        if folder is not None:
            fresh = self.ranks.first(lambda: not (folder / "trainer_state.pt").exists())
            state = self._complete_state() if fresh else None

            def begin():
                settings = json.dumps(self.args, indent=2, default=str) + "\n"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    for part in folder.glob("*.part"):  # of a process that was killed
                        part.unlink()
                    loggers.write_whole(folder / "config.json", lambda file: file.write(settings.encode()))
                    self._record = loggers.JsonLines(folder / "metrics.jsonl", self.global_step)
                    if fresh:
                        self._save(state, folder / "trainer_state.pt")
                except OSError as error:
                    raise ConfigError(UNWRITABLE.format(folder, error)) from None

            self.ranks.first(begin)
        self.logger.config(self.args)

    def print_dashboard(self):
        """Show progress: a live panel on a terminal, one line a call elsewhere."""
        if self.ranks.rank > 0:
            return
        if self._dashboard is None:
            self._dashboard = loggers.Dashboard()
        self._dashboard.show(self)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path=None, metadata=None):
        """Write the model and the trainer's state to the run's folder, or one complete file to `path`; returns the
        model's path. metadata: plain values and tensors of yours, given back by load_checkpoint. Files are written
        under another name, synced and renamed: none is ever half written. Raises OSError where one cannot be. All ranks
        call it, rank 0 writes."""
        if path is None and self.run_folder is None:
            raise ConfigError("save_checkpoint() without a path needs a run's folder, but data_dir is None.")
        state = self._complete_state(metadata)
        model = None if path else self.run_folder / f"model_{self.env_name}_{self.epoch:06d}.pt"
        if self.ranks.rank > 0:
            return str(path or model)
        if path is not None:
            self._save(state, Path(path))
            return str(path)
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self._save(state["model"], model)
        if self._best_unsaved:
            self._save(self._best, self.run_folder / f"best_{self.env_name}.pt")
            self._best_unsaved = False
        self._save(state, self.run_folder / "trainer_state.pt")
        for old in sorted(self.run_folder.glob("model_*.pt"))[: -self.config["keep"]]:
            old.unlink()
        self.logger.artifact(str(model))
        return str(model)

    @staticmethod
    def _save(state, path):
        try:
            loggers.write_whole(path, lambda file: torch.save(state, file))
        except RuntimeError as error:  # torch's own word for a write that failed
            raise OSError(f"{path}: {error}") from None

    def load_checkpoint(self, path):
        """Go on from a file that save_checkpoint wrote (or the trainer_state.pt in a folder); returns its metadata.

        With the same settings, versions, buffers, threads and ranks the run continues bit for bit; what differs is
        printed. Environments that cannot be restored (in Python, or with other settings, agents or ranks) begin new
        episodes, which is printed as well. Only rank 0 reads the file. Raises ConfigError, and changes nothing, for
        another network or optimizer."""
        path = Path(path) / "trainer_state.pt" if Path(path).is_dir() else Path(path)
        others, ours = [], self._saved_tensors()

        def read():
            if not path.exists():
                raise ConfigError(f"{path}: there is no such checkpoint.")
            saved = torch.load(path, weights_only=True, map_location="cpu")
            others.extend(saved.pop("others"))
            return saved, 1 + len(others)

        def shapes(tensors):
            return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

        saved, count = self.ranks.first(read)
        tensors, environments = saved["tensors"], saved["environments"]
        if count == self.ranks.count:
            own, environments = self.ranks.scatter([(tensors, environments), *others])
            tensors = {**tensors, **own}
        say = print if self.ranks.rank == 0 else lambda text: None
        if (saved["adam"] is None) != isinstance(self.optimizer, kernels.Muon):
            raise ConfigError(f"{path} was trained with the other train.optimizer, which cannot be changed at resume.")
        theirs, mine = shapes(saved["model"]), shapes(self.policy.state_dict())
        if theirs != mine:
            name = next(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
            raise ConfigError(f"{path} is of another network, which cannot be resumed: {name} is "
                              f"{theirs.get(name, 'not in it')} there and {mine.get(name, 'missing')} here.")
        changes = difference(json.loads(saved["config"]), json.loads(json.dumps(self.args, default=str)))
        if changes:
            say(f"changed since {path} was written: {', '.join(changes)}")
        restored = tensors.keys() & ours.keys()
        try:
            if count != self.ranks.count:
                raise ValueError(f"there were {count} ranks, now there are {self.ranks.count}")
            scale = {"discounted_returns", "return_moments"}  # a run may begin or cease to scale rewards
            if {**shapes(tensors), **dict.fromkeys(scale)} != {**shapes(ours), **dict.fromkeys(scale)}:
                raise ValueError("there were other agents or spaces")
            if not len(environments):
                raise ValueError("those in Python cannot be saved")
            self.vecenv.load(environments.numpy())
        except ValueError as problem:
            say(f"all environments begin new episodes ({problem}); weights and optimizer are as they were, but the run "
                "does not go on bit for bit.")
            self.vecenv.restart(self.vecenv.seed + saved["epoch"])
            self.running_returns.zero_()
            for state in self.state.values():
                state.zero_()
            restored = tensors.keys() & ours.keys() & {"momentum", "return_moments"}
        self.policy.load_state_dict(saved["model"])
        for name in restored:
            ours[name].copy_(tensors[name])
        if saved["adam"] is not None:
            groups = self._adam_state()["param_groups"]  # the settings are this run's
            self.optimizer.load_state_dict({**saved["adam"], "param_groups": groups})
            if self.device.separate:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.arena["rate"]
                self._forget_graphs()  # they go on with the moments that were
                self._captured, self._learned_epochs = False, 0
        for name, value in saved["numbers"].items():
            setattr(self, name, value)
        before = json.loads(saved["config"])["train"]
        if self.config["target_kl"] is None or before.get("learning_rate") != self.config["learning_rate"]:
            self._rate_factor = 1.0  # it was of another rate
        self._rolled_out = False
        self._steps_before = saved["global_step"] - self.epoch * self.batch_size
        self._started = time.perf_counter() - saved["uptime"]
        self._last_log = (time.perf_counter(), self.global_step)
        return saved["metadata"]

    def _saved_tensors(self):
        s = self.host
        rows = ("observations", "resets", "valid", "action_masks")
        rows = {name: s[name][-1] for name in rows if s[name] is not None}
        momentum = {"momentum": self.arena.flat("momentum")} if isinstance(self.optimizer, kernels.Muon) else {}
        state = {f"state/{name}": tensor for name, tensor in self.state.items()}
        if self.reward_scale is not None:
            state |= {"discounted_returns": self.reward_scale.returns, "return_moments": self.reward_scale.moments}
        return {**rows, **momentum, **state, "running_returns": self.running_returns}

    def _complete_state(self, metadata=None):
        # Copies: the tensors are views of the arena, and torch.save writes all of the memory behind a view.
        tensors = on_the_cpu(self._saved_tensors())
        environments = torch.from_numpy(self.vecenv.save())
        own = {name: tensor for name, tensor in tensors.items() if name != "momentum"}
        return {
            "model": on_the_cpu(self.policy.state_dict()),
            "tensors": tensors,
            "adam": None if isinstance(self.optimizer, kernels.Muon) else self._adam_state(),
            "environments": environments,
            "others": self.ranks.gather_to_first((own, environments))[1:],  # what the ranks after rank 0 have
            "numbers": {name: getattr(self, name) for name in SAVED_NUMBERS},
            "epoch": self.epoch,
            "global_step": self.global_step,
            "uptime": self.uptime,
            "config": json.dumps(self.args, default=str),
            "metadata": metadata or {},
        }

    def _adam_state(self):
        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])  # on a GPU a view of the arena
        return state

    def _try_checkpoint(self):
        try:
            return self.save_checkpoint() if self.run_folder else ""
        except OSError as error:  # a full disk must not end the run; the last checkpoint stays whole
            print(f"checkpoint at epoch {self.epoch} not written: {error}. Training goes on.", file=sys.stderr)
            return ""

    def close(self):
        """Save, log what is left, stop the workers and the environments; returns the model's path."""
        try:
            self.record()
            self.mean_and_log()
            return self._try_checkpoint()
        finally:
            self.release()

    def release(self):
        """Stop the workers, the dashboard, the logger and the environments, without saving."""
        if self._dashboard is not None:
            self._dashboard.close()
        if self._pool is not None:
            self._pool.shutdown()
        self.logger.close()
        self.device.release()
        self.vecenv.close()


UNWRITABLE = ("cannot write the run's folder {}: {}. Set --data-dir to one that can be, on a disk with room for "
              "checkpoints.")
BEST_EPISODES = 100  # that a score must be the mean of before it counts as the best
RATE_STEPS = 0.5, 1.2  # in an epoch: too large a rate does harm at once, too small a one only takes longer
SMALL_ADVANTAGES = 0.2  # their deviation, in deviations of the return
RATE_FACTORS = 0.1, 10.0  # how far target_kl may take the learning rate from the one that is set
SAVED_NUMBERS = ("epoch", "_rollouts", "_minibatches_owed", "_rate_factor", "_override_lr", "best_score", "_recent")
VERSIONS = {"torch": str(torch.__version__), "numba": numba.__version__, "numpy": np.__version__}
WORTH_THREADS = 1e8  # operations in one pass of a custom network from which on several threads share each product
CHUNK_STEPS = 1024  # float32 steps that one worker takes through the default network at once: what fits its caches


def on_the_cpu(tensors):
    """Copies there of all tensors of a dict."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


@contextlib.contextmanager
def torch_threads(count):
    """torch's threads within an operation; workers bring their own parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class Interrupts:
    """Within it, the first SIGINT or SIGTERM asks for a stop at the epoch's end; the second one leaves at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number, frame):
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
        if ranks.connect().rank == 0:
            print("\nstopping after this epoch, with a checkpoint; once more to leave at once", file=sys.stderr)

    def __exit__(self, *_):
        for number, handler in getattr(self, "_before", {}).items():
            signal.signal(number, handler)


MEASURED_SECONDS = 1.0  # that measure spends, after the epoch in which kernels are compiled
MEASURED_AGENTS = {True: 1024, False: 16}  # at most; in C or not
MEASURED_HORIZON = 16
MEASURED_EPISODES = 16  # at least, before anything is said of them


def measure(env_name, args, vecenv, facts):
    """Add to the Facts of an environment what a step of it and learning from one cost, and how its episodes end, from
    some epochs of throw-away environments and a copy of the network. Nothing random that the run uses is drawn. The
    Facts as they are if one process cannot hold more of these environments, or one environment holds many agents'
    worlds itself."""
    if not facts.native and vecenv.num_envs == 1:
        return facts
    num_envs = max(1, MEASURED_AGENTS[facts.native] * vecenv.num_envs // vecenv.num_agents)
    vec = {**args["vec"], "num_envs": 1, "total_agents": None, "num_workers": None, "batch_size": None,
           "num_buffers": None, "backend": "native" if facts.native else "serial"}  # fmt: skip
    small = {**args, "vec": vec, "env": {**args["env"], "num_envs": min(num_envs, vecenv.num_envs)},
             "train": {**args["train"], "norm_obs": False, "replay_ratio": 1.0, "total_timesteps": 10**12,
                       "horizon": MEASURED_HORIZON, "minibatch_size": "auto", "max_minibatch_size": None,
                       "log_interval": math.inf}}  # fmt: skip
    with ranks.alone(), contextlib.ExitStack() as stack:  # environments may draw from the generators of all
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        try:
            trial = load_env(env_name, small)
        except Exception:  # one of a kind in a process, as emulators are
            return facts
        stack.callback(trial.close)
        config = {**small["train"], "env": args["env_name"], "data_dir": None, "cudagraphs": -1, "gpus": 1}
        trainer = PuffeRL(config, trial, load_policy(small, trial, env_name))
        stack.callback(trainer.release)
        trainer.signs = None  # of this run they would say what is only so here
        episodes = EpisodeEnds(trial.num_agents)
        trainer.evaluate()
        episodes.add(trial.storage)
        trainer.train()
        begun, before, warm = time.perf_counter(), dict(trainer._stage_seconds), trainer.epoch
        while trainer.epoch == warm or time.perf_counter() - begun < MEASURED_SECONDS:
            trainer.evaluate()
            episodes.add(trial.storage)
            trainer.train()
    steps = (trainer.epoch - warm) * trainer.batch_size
    spent = {stage: (seconds - before[stage]) / steps for stage, seconds in trainer._stage_seconds.items()}
    side_by_side = 1 if facts.native else max(1, getattr(vecenv, "num_processes", 1))
    return dataclasses.replace(facts, step_seconds=spent["environment"] / side_by_side + spent["policy"],
                               learn_seconds=spent["learn"], cut=episodes.cut)  # fmt: skip


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
        """The steps after which every episode is cut off; None if one ends by itself, or if too few have ended."""
        known = not self.by_itself and len(self.lengths) >= MEASURED_EPISODES and len(set(self.lengths)) == 1
        return self.lengths[0] if known else None


def settle(env_name, args, vecenv):
    """Put numbers in the place of "auto" in the train section of `args`, and the reasons into args["auto"]; the same on
    all ranks, as rank 0 finds them. Returns the Facts that they were chosen by."""
    group, section = ranks.connect(), args["train"]
    check_sizes(section)
    facts = facts_of(vecenv, sum(group.gather(vecenv.num_agents)), section["total_timesteps"])

    def choose():
        unknown = "auto" in (section["replay_ratio"], section["gamma"])
        found = measure(env_name, args, vecenv, facts) if unknown else facts
        return decide(section, found), found.step_seconds, found.learn_seconds

    chosen, *seconds = group.first(choose)
    section |= {name: value for name, (value, _) in chosen.items()}
    args["auto"] = args.get("auto", {}) | {f"train.{name}": reason for name, (_, reason) in chosen.items()}
    return dataclasses.replace(facts, step_seconds=seconds[0], learn_seconds=seconds[1])


def train(env_name, args):
    """Train and return the trainer, closed; its checkpoint and logs are in trainer.run_folder."""
    group = ranks.connect()
    if ranks.started():
        args["train"]["gpus"] = group.local_count
    if not args["resume"]:
        args["resume"] = group.find_interrupted(args["data_dir"], Path(args["env_name"]).stem)
        if args["resume"]:  # the same command goes on: what it chose by measuring stays
            saved = group.first(lambda: json.loads((Path(args["resume"]) / "config.json").read_text()))
            args["train"] |= {name: value for name, value in saved["train"].items()
                              if args["train"].get(name) == "auto"}
    vecenv = load_env(env_name, args)
    try:
        facts = settle(env_name, args, vecenv)
        policy = load_policy(args, vecenv, env_name)
        normalises = models.find_normalizer(policy) is not None
        loaded = args["load_model_path"] or args["baseline"]
        if normalises != args["train"]["norm_obs"] and (loaded or "train.norm_obs" in args["auto"]):
            args["train"]["norm_obs"] = normalises
            args["auto"]["train.norm_obs"] = "as the network does that is loaded or of your own"
    except BaseException:
        vecenv.close()
        raise
    config = {**args["train"], "env": args["env_name"], "data_dir": args["data_dir"],
              "settings": {**args, "launch": group.launchers()}}
    if args["resume"]:
        folder = group.first(lambda: find_run(args["resume"], args["data_dir"], env_name, "trainer_state.pt"))
    trainer = PuffeRL(config, vecenv, policy)
    if args["resume"]:
        trainer.run_folder = folder.parent if folder.name == "trainer_state.pt" else folder
    say, shown = print if group.rank == 0 else lambda text: None, 0.0

    def open_logger():
        try:
            trainer.logger = loggers.make_logger(args, trainer.run_folder, trainer.global_step)
        except (ImportError, ValueError) as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise ConfigError(UNWRITABLE.format(trainer.run_folder, error)) from None

    try:
        if args["resume"]:
            trainer.load_checkpoint(trainer.run_folder)
            say(f"resumed {trainer.run_folder} at step {trainer.global_step:,}")
            if trainer.epoch >= trainer.total_epochs:
                say("nothing is left of its train.total_timesteps; give more to go on")
        group.first(open_logger)
        trainer.record()
        say(f"{trainer.env_name}: {trainer.batch_size // trainer.horizon:,} agents × horizon {trainer.horizon} = "
            f"{trainer.batch_size:,} steps an epoch, {trainer.total_epochs:,} epochs; {vecenv.num_workers} workers; "
            f"run folder {trainer.run_folder}")
        speed = ""
        if facts.learn_seconds is not None:
            seconds = facts.step_seconds + args["train"]["replay_ratio"] * facts.learn_seconds
            speed = f"; some {float(f'{1 / seconds:.2g}'):,.0f} steps a second"
        say(f"network: {models.describe(policy)}{speed}")
        for name, reason in args["auto"].items():
            section, _, key = name.partition(".")
            say(f"auto: --{name.replace('_', '-')} {args[section][key]}  # {reason}")
        with Interrupts() as interrupts:
            while trainer.epoch < trainer.total_epochs and not group.any(interrupts.requested):
                trainer.evaluate()
                trainer.train()
                interval = args["train"]["log_interval"] * (1 if sys.stdout.isatty() else 5)
                if time.perf_counter() - shown > interval or trainer.epoch == trainer.total_epochs:
                    trainer.print_dashboard()
                    shown = time.perf_counter()
    except BaseException:
        trainer.release()
        raise
    model = trainer.close()
    speed = trainer.global_step / trainer.uptime
    say(f"{trainer.global_step:,} steps in {trainer.uptime:.1f} s ({speed:,.0f} steps/s)")
    say(f"checkpoint   {model}")
    if args["logger"] == "tensorboard":
        say(f"tensorboard  {trainer.run_folder / 'tensorboard'}   (tensorboard --logdir {args['data_dir']})")
    return trainer


USAGE = """usage: python pufferl.py {train,eval,sweep,export,autotune,profile} ENV [--section.key value ...]
       python pufferl.py diagnose RUN [--data-dir FOLDER]

  train ENV    train a policy; Ctrl-C stops it with a checkpoint
  eval ENV     play episodes with a trained policy: --load-model-path latest; the same as python watch.py ENV
  sweep ENV    search hyper-parameters; the same as python protein.py ENV
  export ENV   a trained policy as ONNX, for C or as a web page: --load-model-path latest --export.web FOLDER
  autotune ENV find the backend, workers and batch size that step it fastest here
  profile ENV  where the time goes: tables, and a trace for a browser; the same as python speed.py profile ENV
  diagnose RUN why a run did not learn: what its metrics say, and a page of its curves; a folder, or ENV for the newest

  python pufferl.py train breakout --help    lists every setting with its default

ENV: gym/CartPole-v1, pettingzoo/mpe/simple_spread_v3 and the like, my_file.py:make_env, my_environment.h, a file of
config/ (drone_race, atari_pong), or an environment in C: """


def diagnose(argv):
    """`pufferl.py diagnose RUN`: a run's folder, or an environment, whose newest run it then is."""
    if len(argv) not in (1, 3) or argv[0].startswith("-") or argv[1:2] not in ([], ["--data-dir"]):
        sys.exit("pufferl.py diagnose: which run? Its folder, or an environment for its newest run in experiments "
                 "(or --data-dir FOLDER).")
    try:
        folder = Path(argv[0])
        if not folder.is_dir():
            folder = find_run("latest", argv[2] if len(argv) == 3 else Base.data_dir, argv[0], "metrics.jsonl")
        signs.diagnose(folder)
    except (ConfigError, OSError, ValueError, KeyError) as error:
        sys.exit(f"pufferl.py diagnose: {error}")


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    verbs = {"train": train}
    if not argv or argv[0] in ("-h", "--help") or argv in (["train", "-h"], ["train", "--help"]):
        print(USAGE + ", ".join(ocean.names()))
        return
    if argv[0] == "diagnose":
        return diagnose(argv[1:])
    elsewhere = {"sweep": "sweep", "eval": "watch", "autotune": "speed", "profile": "speed", "export": "export"}
    if argv[0] in elsewhere:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            sys.exit(f"pufferl.py: {argv[0]} runs in one process; torchrun's are for train.")
        room = elsewhere[argv[0]]
        return importlib.import_module(room).main(argv if room == "speed" else argv[1:])
    if argv[0] not in verbs:
        sys.exit(f"pufferl.py: there is no verb {argv[0]!r}.\n{USAGE}{', '.join(ocean.names())}")
    if len(argv) < 2 or argv[1].startswith("-"):
        sys.exit(f"pufferl.py {argv[0]}: which environment? There are: {', '.join(ocean.names())}")
    try:
        args = ranks.connect().first(lambda: load_config(argv[1], argv[2:]))
        gpus, started = args["train"]["gpus"], ranks.connect().local_count
        if gpus > 1 and not ranks.started():
            sys.exit(ranks.launch(gpus, [__file__, *argv]))
        if gpus != started and any(option.startswith("--train.gpus") for option in argv):
            raise ConfigError(f"train.gpus = {gpus}, but torchrun has started {started} on this machine; leave it out.")
        verbs[argv[0]](argv[1], args)
    except (ConfigError, FloatingPointError, MemoryError, ranks.RankError) as error:
        # Rank 0 says it where it happened there, or to all alike, as a gradient that is not finite does.
        alike = isinstance(error, FloatingPointError) and ranks.connect().rank > 0
        sys.exit(1 if alike or getattr(error, "elsewhere", False) else f"pufferl.py: {error}")


if __name__ == "__main__":
    if ranks.started():
        from torch.distributed.elastic.multiprocessing.errors import record

        record(main)()  # so that torchrun shows the traceback of the rank that failed first
    else:
        main()
