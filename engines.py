"""Act and learn: the trainer asks an engine for rollouts and gradients.

    engine = Autograd(buffers)            # or Compiled, Graphs, Fused
    engine.register(arena)                # before arena.allocate(buffers.torch_device)
    engine.bind()                         # after
    seconds = engine.rollout(number)      # fill the rollout buffers; seconds in environments
    step = engine.capture(function)       # CPU: `function` itself; GPU: replays a CUDA graph
    with engine.learning():
        engine.backward()                 # gradients, new values and ratios, loss sums
    engine.refresh()                      # the weights were loaded or replaced

`Buffers` holds the tensors of all engines. `Autograd` runs any nn.Module on a CPU, by its forward
and torch's autograd (`TorchPolicy`) and a loop over `vecenv.wait` and `advance` (`StepByStep`).
fast/compiled.py has the engine of the default networks on a CPU. fast/fused.py has the engines of
a GPU: `Graphs` for any network, `Fused` for the default one. pufferl.choose_engine chooses.
"""

import contextlib
import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus

import data_parallel
import kernels
import models
from arena import clock, set_threads, threads
from auto import drawn_steps
from configuration import load_attribute, named
from errors import ConfigError
from fast import products
from flat_spaces import warn_once
from vector import POLICY_INPUTS

# FLOPs of a forward pass above which threads share each matrix product.
MIN_FLOPS_FOR_THREADS = 1e8
# FLOPs of a buffer's step above which each actor of a rollout runs the network in its thread.
MIN_FLOPS_FOR_ACTORS = 5e7
# Largest divergence of the probabilities, and largest relative squared error of the values,
# between a run's first minibatch and the rollout.
MAX_DIFFERENCE = 1e-4
# Most numbers in a tensor of one pass (8 MB): larger tensors do not fit into the caches.
MAX_NUMBERS_IN_PASS = 2**21
# FLOPs of a minibatch, forward and backward, for each thread that learns a share of it.
MIN_FLOPS_FOR_LEARNER = 3e8


SMALLEST_FLOAT = math.ulp(0.0)  # a denormal number


@contextlib.contextmanager
def torch_threads(count):
    """Set torch's threads within an operation, and flush denormal numbers to zero.

    Actors and learners are parallel by themselves. Momenta of unused weights decay to denormal
    numbers, on which a matrix product is a hundred times slower. A thread inherits the mode from
    its parent.
    """
    before, is_flushing = torch.get_num_threads(), SMALLEST_FLOAT * 1.0 == 0.0
    torch.set_num_threads(count)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(is_flushing)


def has_bfloat16():
    """Return whether the processor multiplies bfloat16 (AVX-512, AMX, ARM)."""
    capabilities = torch.cpu.get_capabilities().items()
    return any(is_present is True for name, is_present in capabilities if "bf16" in name)


# torch's modules that draw random numbers or write their buffers in forward.
NOT_THREAD_SAFE = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.modules.batchnorm._NormBase)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def inspect_modules(policy):
    """List what each module of a network runs.

    Returns [(path, module, functions assigned to it, hooks, its classes' attributes)]. A result that
    equals an earlier one says that the same code runs. The hooks are also those of the module's
    weights and of torch.
    """
    inspected = []
    for path, module in policy.named_modules():
        kind = type(module)
        functions = {name: value for name, value in vars(module).items() if callable(value)}
        groups = [getattr(module, name) for name in HOOKS]
        groups += [getattr(nn.modules.module, f"_global{name}") for name in HOOKS]
        for weight in module.parameters(recurse=False):
            groups += [weight._backward_hooks, weight._post_accumulate_grad_hooks]
        hooks = [hook for group in groups if group for hook in group.values()]
        attributes = [list(vars(base).values()) for base in kind.__mro__[:-2]]  # not nn.Module's
        inspected.append((path, module, functions, hooks, attributes))
    return inspected


def unmarked_classes(policy):
    """Return the names of a network's custom classes without `thread_safe = True`.

    None if marks would not help: a module draws random numbers, writes buffers, or has hooks,
    parametrizations or replaced methods.
    """
    names = set()
    for _, module, functions, hooks, _ in inspect_modules(policy):
        replaced = [name for name in functions if hasattr(type(module), name)]
        if (replaced or hooks or isinstance(module, NOT_THREAD_SAFE)
                or getattr(module, "dropout", 0) or nn.utils.parametrize.is_parametrized(module)):
            return None
        place = type(module).__module__
        is_known = place in ("models", "fast.pictures") or place.startswith("torch.nn.")
        is_marked = getattr(module, "thread_safe", False)
        if not is_marked and (functions or not is_known):  # a function as attribute may be any
            names.add(type(module).__name__)
    return sorted(names)


def is_thread_safe(policy):
    """Return whether several threads may run a network at once."""
    return unmarked_classes(policy) == []


def flops(policy, rows):
    """Return the FLOPs of a forward pass of `rows` rows, two for each weight.

    A network that uses a weight more than once a row, as a convolution does, may say so by an
    attribute `operations`, its FLOPs a row; models.Board does.
    """
    operations = getattr(policy, "operations", None)
    return rows * (operations if isinstance(operations, int | float) else
                   2 * sum(weight.numel() for weight in policy.parameters()))


# --------------------------------------------------------------------------------------------------
# What all engines share: buffers, threads, the loop of a rollout


class Buffers:
    """Hold the tensors of rollouts and minibatches, which are in the arena.

    docs/design.md has their shapes.

    config: PuffeRL's, checked. segments: of this process's agents, in a minibatch.
    first_agent: number of this process's first agent among all ranks, for the random numbers.

    host: the arrays that environments write, as tensors.
    storage: the tensors that the policy reads; on a CPU those of `host`.
    columns: the rollout as (span, segments of all agents, ...), from which minibatches are sampled.
    """

    torch_device = torch.device("cpu")

    def __init__(self, policy, vecenv, config, segments, first_agent):
        self.policy = policy
        self.vecenv = vecenv
        self.config = config
        self.horizon = config["horizon"]
        self.span = drawn_steps(config)  # steps of a segment
        self.num_agents = vecenv.num_agents
        self.segments = segments
        self.first_agent = first_agent
        self.heads = torch.tensor(vecenv.action_heads) if vecenv.action_heads else None
        self.max_agents = max(agents.stop - agents.start for agents in vecenv.ranges)

    def register(self, arena, num_learners, minibatches):
        """Register all tensors. minibatches: the most in an epoch.

        Each learner has gradients of its own; the first one's are the parameters' .grad.
        """
        self.gradient_groups = ["gradients", *(f"gradients {i}" for i in range(1, num_learners))]
        for group in self.gradient_groups[1:]:
            for name, parameter in self.policy.named_parameters():
                arena.register(f"{group}/policy.{name}", parameter.shape, group=group)
        T, N, M, span = self.horizon, self.num_agents, self.segments, self.span
        self.arena = arena
        self._storage = self.vecenv.allocate(T)
        arrays = vars(self._storage)
        self.host = {name: None if array is None else torch.from_numpy(array)
                     for name, array in arrays.items()}
        float32, float64, int64 = torch.float32, torch.float64, torch.int64
        shapes = {
            "logprobs": ((T, N), float32), "values": ((T + 1, N), float32),
            "bootstraps": ((T, N), float32),
            # The number of each step is in the arena because captured CUDA graphs read it there.
            "steps": ((T,), int64), "new_values": ((span, M), float32),
            "new_ratios": ((span, M), float32),
            # the sums of the loss's statistics, and one of train.loss
            "sums": ((num_learners, kernels.SUMS + 1), float64),
            "ratios": ((T, N), float32), "advantages": ((T, N), float32),
            "segment_weights": ((M,), float32),
            "settings": ((len(kernels.LOSS_SETTINGS),), float32), "beta": ((1,), float32),
            "rate": ((), float32), "found_inf": ((), float32), "value_offset": ((1,), float32),
            "priorities": ((N * T // span,), float64), "cumulative": ((N * T // span,), float64),
            "moments": ((3,), float64), "index": ((M,), int64),
            "counter": ((2,), int64),  # epoch, minibatch
            "norms": ((minibatches,), float64)}  # of the gradients, a minibatch
        if self.config["norm_reward"] or self.config["bonus"] != "none":
            shapes["rewards"] = (T, N), float32
        if self.config["norm_reward"]:
            shapes["value_targets"] = (T, N), float32
        if models.squash_of(self.policy) is not None:
            shapes["samples"] = (T, N, self.vecenv.action_dims), float32
        self.fields = getattr(self.policy, "rollout_fields", {})
        shapes |= {f"fields/{name}": ((T, N, *shape), dtype)
                   for name, (shape, dtype) in self.fields.items()}
        state = models.initial_state(self.policy, N)
        self.state = dict.fromkeys(state)
        for name, tensor in state.items():
            shape = tensor.shape
            shapes[f"state/{name}"] = shape, float32
            shapes[f"initial_state/{name}"] = shape, float32
            rows = shape[0], self.max_agents, *shape[2:]
            shapes |= {f"scratch {actor}/{name}": (rows, float32)
                       for actor in range(self.vecenv.num_actors)}
        for name, (shape, dtype) in shapes.items():
            arena.register(name, shape, dtype)
        self._names = [name for name in shapes if "/" not in name]

    def check_environments(self):
        """Raise RuntimeError unless the environments write into these arrays."""
        if self.vecenv.closed:
            raise RuntimeError("these environments are closed, by a script or after an error. Make "
                               "others, and a PuffeRL for them.")
        if self.vecenv.storage is not self._storage:
            raise RuntimeError("these environments were reset by a script, or another trainer has "
                               "them. Make others, and a PuffeRL for them.")

    def bind(self):
        """Make the views of the allocated arena."""
        arena, N = self.arena, self.num_agents
        self.gradients = [arena.flat(group) for group in self.gradient_groups]
        self.storage = self._make_storage()
        self.squash = models.squash_of(self.policy)
        # The loss needs the samples: the actions, or with squash the samples before the tanh.
        self.samples = self.storage["actions"]
        self.rewards = self.storage["rewards"]
        for name in self._names:  # perhaps other samples, and scaled rewards
            setattr(self, name, arena[name])
        self.state, names = {name: arena[f"state/{name}"] for name in self.state}, list(self.state)
        self.initial_state = {name: arena[f"initial_state/{name}"] for name in names}
        self.scratch = [{name: arena[f"scratch {actor}/{name}"] for name in names}
                        for actor in range(self.vecenv.num_actors)]
        self.fields = {name: arena[f"fields/{name}"] for name in self.fields}
        zeros = torch.zeros(N, dtype=torch.uint8, device=self.torch_device)
        self.final_flags = zeros, zeros + 1  # resets and valid of episodes' last observations
        self.rows = [[self._make_row(agents, t) for t in range(self.horizon + 1)]
                     for agents in self.vecenv.ranges]
        columns = {name: self.storage[name] for name in POLICY_INPUTS}
        columns |= {"samples": self.samples, "logprobs": self.logprobs, "values": self.values,
                    "advantages": self.advantages}
        self.columns = SimpleNamespace(
            **{name: self.as_columns(array) for name, array in columns.items()})

    def _make_storage(self):
        return self.host

    def as_columns(self, array):
        """Return a rollout's array (T or T + 1, N, ...) as (span, segments, ...).

        A column is a segment: an agent's T steps, or with train.draw steps a single step.
        """
        if array is None:
            return None
        return array[: self.horizon].view(self.span, -1, *array.shape[2:])

    def _make_row(self, agents, t):
        """Return the views that an actor needs at step t of a range of agents.

        They are made once: a step slices nothing.
        """
        storage, host = self.storage, self.host
        row = {name: None if storage[name] is None else storage[name][t, agents]
               for name in POLICY_INPUTS}
        row["values"] = self.values[t, agents]
        if t == self.horizon:
            return row
        for name in ("truncations", "terminals"):  # as numpy arrays, which are faster to read
            ends = host[name][t, agents]
            row[name] = ends if ends.is_cuda else ends.numpy()
        fields = {name: field[t, agents] for name, field in self.fields.items()}
        return row | {"step": self.steps[t : t + 1], "logprobs": self.logprobs[t, agents],
                      "actions": storage["actions"][t, agents], "samples": self.samples[t, agents],
                      "fields": fields}

    def begin_rollout(self, number):
        """Go to step 0 of a rollout. number: of the rollout, from 0."""
        self.vecenv.begin()
        self.bootstraps.zero_()
        torch.arange(number * self.horizon, (number + 1) * self.horizon, out=self.steps)
        for name, state in self.state.items():
            if self.config["state"] == "zero":
                state.zero_()
            self.initial_state[name].copy_(state)

    def sample_arguments(self, row, agents):
        """Return the arguments of `kernels.sample` for a row."""
        return {"actions": row["actions"], "logprobs": row["logprobs"], "values": row["values"],
                "seed": self.config["seed"], "step": row["step"],
                "first_agent": self.first_agent + agents.start, "heads": self.heads,
                "masks": row["action_masks"], "squash": self.squash, "samples": row["samples"]}

    def copy_state(self, actor, state, index=None):
        """Copy the recurrent state of all agents, or of `index`, to an actor's scratch.

        Returns {name: (layers, n, size)}.
        """
        copies = {}
        for name, tensor in state.items():
            tensor = tensor if index is None else tensor.index_select(1, index)
            copies[name] = self.scratch[actor][name][:, : tensor.shape[1]].copy_(tensor)
        return copies

    def loss(self, outputs, grad, start, sums, log_std=None, grad_log_std=None):
        """Write the loss's gradient with respect to the outputs (span, n, A + 1).

        outputs: of the n segments index[start : start + n]. Writes the new values and ratios of
        these segments, and adds their statistics to `sums`.
        """
        columns = self.columns
        kernels.ppo_loss(
            outputs, columns.samples, columns.logprobs, columns.values, columns.advantages,
            self.segment_weights, columns.valid, self.settings, grad, self.new_values,
            self.new_ratios, sums, heads=self.heads, log_std=log_std, grad_log_std=grad_log_std,
            squash=self.squash, masks=columns.action_masks, index=self.index, start=start)

    def steps_at_once(self):
        """Return how many steps of a minibatch pass the network at once."""
        steps = self.segments * self.span
        return min(steps, self.config["max_minibatch_size"] or steps)

    def on_host(self, name, index=...):
        """Return one of the rollout's arrays, or array[index], on the host."""
        return self.host[name][index]

    def usage(self):
        """Return {"GPU": "87%", ...} for a dashboard."""
        return {}

    def release(self):
        """Free what is not memory."""


class ThreadPool:
    """Run functions in threads; the first one is the caller's."""

    def __init__(self, vecenv, num_learners=1):
        self.threads_each = vecenv.threads_per_actor
        count = max(vecenv.num_actors, num_learners)
        self._pool = ThreadPoolExecutor(count, "pool", set_threads, (self.threads_each,))
        # A waiting thread gets the interpreter's lock after 0.2 ms instead of 5: rollouts take a
        # tenth less time. For the whole process, which may have another trainer.
        sys.setswitchinterval(2e-4)

    def run(self, function, numbers):
        """Return [function(number), ...], each called in a thread.

        The first one runs in this thread: to wake another takes as long as a small minibatch.
        """
        first, *others = numbers
        calls = [self._pool.submit(function, number) for number in others]
        try:
            with threads(self.threads_each):
                return [function(first), *(call.result() for call in calls)]
        finally:
            # After an interrupt too: they must not write while a checkpoint is saved.
            wait(calls)

    def release(self):
        """Stop the threads."""
        self._pool.shutdown()


@contextlib.contextmanager
def running_moments(policy):
    """Have batch norms use running moments: final observations are no batch."""
    norms = [module for module in policy.modules()
             if isinstance(module, nn.modules.batchnorm._NormBase) and module.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


class StepByStep:
    """Roll out by a loop over `vecenv.wait` and `advance`.

    act(actor, observations, state, resets, valid): a step of the network; returns outputs
    (n, A + 1) and log_std, and updates the tensors in `state` in place.
    step(actor, buffer, t), bootstrap(actor, buffer, t): replace `act_on_row` and `bootstrap`.
    """

    def __init__(self, buffers, act, step=None, bootstrap=None):
        self.buffers = buffers
        self.vecenv = buffers.vecenv
        self.act = act
        self._step = step or self.act_on_row
        self._bootstrap = bootstrap or self.bootstrap

    @torch.no_grad()
    def run(self, actor):
        """Run one actor's share of a rollout; return its seconds in environments."""
        vecenv, horizon, rows = self.vecenv, self.buffers.horizon, self.buffers.rows
        seconds, begin = 0.0, clock()
        while (ready := vecenv.wait(actor)) is not None:
            buffer, t = ready
            seconds += clock() - begin
            if t > 0 and rows[buffer][t - 1]["truncations"].any():
                self._bootstrap(actor, buffer, t - 1)
            self._step(actor, buffer, t)
            begin = clock()
            if t < horizon:
                vecenv.advance(buffer)
        return seconds

    def act_on_row(self, actor, buffer, t):
        """Write actions, logprobs and values of row t of a buffer.

        At t = horizon write only the values, and leave the state.
        """
        buffers, agents = self.buffers, self.vecenv.ranges[buffer]
        row = buffers.rows[buffer][t]
        state = {name: tensor[:, agents] for name, tensor in buffers.state.items()}
        if t == buffers.horizon:
            state = buffers.copy_state(actor, state)
        outputs, log_std = self.act(
            actor, row["observations"], state, row["resets"], row["valid"])
        if t == buffers.horizon:
            row["values"].copy_(outputs[:, -1])
            return
        kernels.sample(outputs, **buffers.sample_arguments(row, agents), log_std=log_std)
        for name, field in row["fields"].items():
            field.copy_(state["fields"][name])

    def bootstrap(self, actor, buffer, t):
        """Write V of the final observations of the agents that step t truncated.

        The recurrent state is that of step t, which the reset leaves alone.
        """
        buffers, agents = self.buffers, self.vecenv.ranges[buffer]
        row = buffers.rows[buffer][t]
        is_truncated = row["truncations"] & ~row["terminals"]  # after a terminal nothing follows
        index = torch.from_numpy(np.flatnonzero(is_truncated)) + agents.start
        if len(index) == 0:
            return
        state = buffers.copy_state(actor, buffers.state, index)
        flags = (flag[: len(index)] for flag in buffers.final_flags)
        observations = buffers.storage["final_observations"][index]
        with running_moments(buffers.policy):
            outputs, _ = self.act(actor, observations, state, *flags)
        buffers.bootstraps[t, index] = outputs[:, -1]


# --------------------------------------------------------------------------------------------------
# Any network


class TorchPolicy:
    """Run any nn.Module by its forward and torch's autograd, on a CPU or a GPU.

    precision: dtype of the products. tiles: products.Tiles, the context in which linear maps go
    through fast/tile.c, or None for torch's products.
    """

    def __init__(self, buffers, precision, tiles=None):
        self.buffers = buffers
        self.policy = buffers.policy
        self.precision = precision
        self.tiles = tiles
        self._autocast = functools.partial(torch.autocast, buffers.torch_device.type, precision,
                                           enabled=precision != torch.float32)
        config = buffers.config
        if config["compile"] and data_parallel.connect().rank == 0:
            print("train.compile: torch compiles the network in the first epoch, for minutes",
                  file=sys.stderr)
        self.forward = (torch.compile(self.policy, mode=config["compile_mode"])
                        if config["compile"] else self.policy)
        self.extra_loss = load_attribute("train.loss", config["loss"]) if config["loss"] else None
        self.is_compared = False  # whether a minibatch was compared with the rollout

    @property
    def has_batch_norm(self):
        """Return whether a layer normalises by moments, in training or with running ones."""
        return any(isinstance(module, nn.modules.batchnorm._NormBase)
                   for module in self.policy.modules())

    def _tiles(self, rows):
        """Return the context of a pass of `rows` rows."""
        is_large = self.tiles and rows >= products.ROWS
        return self.tiles() if is_large else contextlib.nullcontext()

    def act(self, actor, observations, state, resets, valid):
        """Run one step; return outputs (n, A + 1) and log_std.

        The tensors in `state` are updated in place; state["fields"] are rollout_fields.
        """
        view = {**state, "resets": resets, "valid": valid}
        # Threads share autocast's cache: one could get a weight that another's CUDA stream is
        # still casting.
        with self._autocast(cache_enabled=False), self._tiles(len(observations)):
            results = models.one_step(self.policy, observations, view)
            outputs, log_std = models.join_outputs(*results)
        vecenv = self.buffers.vecenv
        models.check_logits(self.policy, results[0], outputs, log_std, vecenv.action_heads,
                            vecenv.action_dims)
        for name, tensor in state.items():
            tensor.copy_(view[name])
        if "fields" in view:
            state["fields"] = view["fields"]
        return outputs, log_std

    def state_of(self, index):
        """Return the initial state, resets and valid of segments, for models.over_time."""
        buffers = self.buffers
        state = {name: tensor[:, index] for name, tensor in buffers.initial_state.items()}
        return state | {name: getattr(buffers.columns, name).index_select(1, index)
                        for name in ("resets", "valid")}

    def add_gradients(self, index, start, sums, gradients=None, cache=True, rows=None):
        """Add the gradients of the segments `index`, the minibatch's from `start` on.

        sums: (SUMS + 1,) of the learner, added to. gradients: [(parameter, tensor that its gradient
        is added to)]; None for the parameters' .grad. cache: whether autocast may keep cast
        weights. rows: steps of the pass.
        """
        buffers = self.buffers
        observations = buffers.columns.observations.index_select(1, index)
        state = self.state_of(index)
        rows = len(index) * buffers.span if rows is None else rows
        with self._autocast(cache_enabled=cache), self._tiles(rows):
            logits, value = models.over_time(self.policy, observations, state, self.forward)
            outputs, log_std = models.join_outputs(logits, value)
        is_first = not self.is_compared and start == 0
        if is_first and buffers.heads is not None and models.are_probabilities(
                outputs.detach(), buffers.vecenv.action_heads):
            warn_once(f"network: {type(models.inner_policy(self.policy)).__name__} returns "
                      "probabilities, but logits are expected: little is learnt. Return the input "
                      "of the softmax, or the log probabilities.")
        grad = torch.empty_like(outputs)
        grad_log_std = None if log_std is None else torch.empty_like(log_std)
        buffers.loss(outputs, grad, start, sums[: kernels.SUMS], log_std, grad_log_std)
        pairs = [(outputs, grad), (log_std, grad_log_std)]
        if self.extra_loss is not None:
            with self._tiles(rows):
                extra = self._compute_extra_loss(index, observations, logits, value, sums,
                                                 state.get("fields", {}))
                pairs.append((extra, None))
        roots = [(x, grad) for x, grad in pairs if x is not None and x.requires_grad]
        if not roots or self.extra_loss is None:
            warn_of_detached(self.policy, logits, value)
        losses, slopes = zip(*roots, strict=True) if roots else ((), ())
        if gradients is None:
            torch.autograd.backward(losses, slopes)
            return
        trained = {parameter: total for parameter, total in gradients if parameter.requires_grad}
        grads = ()
        if trained:
            grads = torch.autograd.grad(losses, [*trained], slopes, allow_unused=True)
        for total, grad in zip(trained.values(), grads, strict=True):
            if grad is not None:
                total.add_(grad)

    def _compute_extra_loss(self, index, observations, logits, value, sums, fields):
        """Return train.loss of segments, scaled by their share of the minibatch.

        The function gets a namespace: observations (T, M, ...), logits as the network returned
        them, values, old_values, logprobs (of the rollout), advantages, returns, resets and valid
        (T, M), actions, state (as models.over_time takes it), and action_masks if the environment
        has them. If a tanh squashes the actions, `actions` are the Gaussian's samples, and
        `logprobs` theirs. Each of the policy's rollout_fields is there as the network returned it,
        and as old_... of the rollout. Raises ConfigError unless the function returns a tensor ().
        """
        buffers, T = self.buffers, self.buffers.span
        names = {"samples": "actions", "values": "old_values"}
        columns = {names.get(name, name): tensor.index_select(1, index)
                   for name, tensor in vars(buffers.columns).items()
                   if tensor is not None and name != "observations"}
        columns |= fields | {f"old_{name}": buffers.as_columns(field).index_select(1, index)
                             for name, field in buffers.fields.items()}
        if buffers.squash is not None:  # 1 - tanh² u = sech² u
            u = columns["actions"]
            log_slope = 2 * (math.log(2) - u - softplus(-2 * u))
            log_slope = log_slope * (buffers.squash[1] > 0)
            columns["logprobs"] += (buffers.squash[2] + log_slope).sum(-1)
        minibatch = SimpleNamespace(
            observations=observations, values=value.reshape(T, -1).float(),
            logits=models.map_logits(torch.Tensor.float, logits), state=self.state_of(index),
            **columns, returns=columns["advantages"] + columns["old_values"])
        extra = self.extra_loss(minibatch)
        setting = f"train.loss = {named(buffers.config['loss'])}"
        if isinstance(extra, torch.Tensor) and not extra.requires_grad:
            warn_once(f"{setting}: the result does not depend on the network's outputs (logits, "
                      "values), so nothing is learnt from it.")
        if not isinstance(extra, torch.Tensor) or extra.numel() != 1:
            raise ConfigError(f"{setting}: returned {type(extra).__name__} "
                              f"{tuple(getattr(extra, 'shape', ()))}. Return a tensor ().")
        extra = extra.reshape(()) * (len(index) * T / buffers.config["minibatch_size"])
        sums[kernels.SUMS].add_(extra.detach())
        return extra

    def compare_with_rollout(self):
        """Warn if learning computes other outputs than acting.

        At a run's first update, values and the probabilities of actions must be the rollout's.
        """
        # bfloat16 rounds more; pufferl.py warns of batch norms
        is_exempt = (self.is_compared or self.precision != torch.float32 or self.has_batch_norm
                     or data_parallel.connect().rank != 0)
        self.is_compared = True
        if is_exempt:
            return
        buffers = self.buffers
        valid, values = (getattr(buffers.columns, name).index_select(1, buffers.index)
                         for name in ("valid", "values"))
        valid = valid != 0
        # Schulman's k2 (http://joschu.net/blog/kl-approx.html), for ratios near 1
        divergence = 0.5 * (buffers.new_ratios[valid] - 1).square().mean().item()
        error = (buffers.new_values - values)[valid].square().mean()
        error = (error / (values[valid].square().mean() + 1e-12)).item()
        if max(divergence, error) > MAX_DIFFERENCE:
            name = type(models.inner_policy(self.policy)).__name__
            print(f"network: {name} computes other outputs in learning than in the rollout "
                  f"(probabilities by {divergence:.1e}, values by {error:.1e}). Remove noise such "
                  "as dropout; keep memory in the state (docs/scripts.md).", file=sys.stderr)


def warn_of_detached(policy, logits, value):
    """Warn once if no gradient leads from a network's outputs to its weights.

    If some weights are frozen, one of logits and value may be without a gradient.
    """
    tensors = logits if isinstance(logits, list | tuple) else [getattr(logits, "loc", logits)]
    has_grads = any(tensor.requires_grad for tensor in tensors), value.requires_grad
    if all(has_grads) or not (all if any(has_grads) else any)(
            weights.requires_grad for weights in policy.parameters()):
        return
    problem = {
        (False, True): "the policy is not learnt, because no gradient leads from the logits",
        (True, False): "the value is not learnt, because no gradient leads from it",
        (False, False): "nothing is learnt, because no gradient leads from the outputs"}[has_grads]
    warn_once(f"network: {problem} to the weights. Remove torch.no_grad and detach from forward.")


class Engine:
    """Share what all engines have; on a CPU nothing is captured.

    Each thread learns from its share of a minibatch. An engine sets `num_learners` and `pool`,
    and has `rollout`, `learning`, and `backward` or `_backward_share(learner)`.
    """

    whole_minibatches = True  # a minibatch may be captured as a whole
    blocking_classes = ()  # classes without `thread_safe`, if only they forbid threads
    pool = None
    Buffers = Buffers

    def __init__(self, buffers):
        self.buffers = buffers
        self.policy = buffers.policy
        self.vecenv = buffers.vecenv
        self.config = buffers.config
        self.precision = getattr(torch, self.config["precision"])

    def register(self, arena):
        """Register what must lie in the arena: nothing, except for `Fused`."""

    def bind(self):
        """Make the views of the allocated arena."""

    def backward(self):
        """Compute the gradients and the loss of the segments `buffers.index`.

        `_backward_share` does so for each learner. New values, new ratios and the sums of the loss
        are in `buffers`. An exact resume depends on the gradients' order in the sum
        (runs.py, item 2 above Snapshot).
        """
        if self.num_learners == 1:
            self._backward_share(0)
        else:
            self.pool.run(self._backward_share, range(self.num_learners))
        first, *others = self.buffers.gradients[: self.num_learners]
        for gradient in others:
            first.add_(gradient)

    def capture(self, function):
        """Return the function itself; on a GPU it becomes a CUDA graph."""
        return function

    def refresh(self):
        """Take over loaded or replaced weights: nothing to do, they are read at each use."""

    def release(self):
        """Stop the threads."""
        if self.pool is not None:
            self.pool.release()


class Autograd(Engine):
    """Run any nn.Module on a CPU (models.py has the contract)."""

    name = "autograd"

    def __init__(self, buffers):
        super().__init__(buffers)
        policy, vecenv = self.policy, self.vecenv
        if self.precision == torch.bfloat16 and not has_bfloat16():
            self.precision = torch.float32
            if data_parallel.connect().rank == 0:
                print("train.precision = bfloat16: this processor has no instructions for it; "
                      "float32 runs, up to ten times as fast. Set float32.", file=sys.stderr)
        self.network = TorchPolicy(buffers, self.precision, self._find_tiles())
        self._set_learners(self._count_learners())
        # Actors may each run the network for their buffers; torch's own threads share the products
        # that go through torch.
        self.is_threaded = bool(
            self.network.tiles and vecenv.num_buffers >= vecenv.num_actors > 1
            and not self.network.has_batch_norm and is_thread_safe(policy)
            and flops(policy, vecenv.agents_per_batch) >= MIN_FLOPS_FOR_ACTORS)
        if self.is_threaded or self.num_learners > 1:
            self.pool = ThreadPool(vecenv, self.num_learners)
        self.loop = StepByStep(buffers, self.network.act)

    def _find_tiles(self):
        """Return products.Tiles, through which linear maps go, or None for torch's.

        If a matrix is not of nn.Linear, LSTM or GRU, or has more than products.LARGEST numbers,
        Tiles are for runs of one thread only: torch's threads spin on the cores that fast/tile.c's
        threads need.
        """
        if self.precision != torch.float32 or self.config["compile"] or products.find_problem():
            return None
        is_small = all(
            isinstance(module, (nn.Linear, nn.LSTM, nn.GRU))
            and len(weight) * weight.shape[1] <= products.LARGEST
            for module in self.policy.modules() for weight in module.parameters(recurse=False)
            if weight.dim() > 1 and len(weight) > 1)
        return products.Tiles if is_small or self.vecenv.num_threads == 1 else None

    # -- learners

    def _is_undivided(self):
        """Return whether the network sees a minibatch as a whole by default.

        It does with train.loss, or with a layer that normalises by moments.
        """
        return self.network.extra_loss is not None or self.network.has_batch_norm

    def _count_learners(self):
        """Return how many threads learn, each from its share of a minibatch.

        One learns with torch.compile, with a network that is not `thread_safe`, with
        train.max_minibatch_size, which bounds memory, and if a minibatch is not divided.
        """
        config = self.config
        if self._is_undivided() or config["compile"] or config["max_minibatch_size"]:
            return 1
        count = count_learners(self.buffers, MIN_FLOPS_FOR_LEARNER)
        names = unmarked_classes(self.policy) if count > 1 else []
        self.blocking_classes = names or ()
        return count if names == [] else 1

    def _set_learners(self, count):
        """Set how many threads learn, and how many steps each takes at once.

        at_once: train.max_minibatch_size if set, else the whole minibatch if it is not divided,
        else equal parts of a learner's share that fit a cache.
        """
        self.num_learners, buffers = count, self.buffers
        if self.config["max_minibatch_size"] or self._is_undivided():
            self.at_once = buffers.steps_at_once()
            return
        widths = [len(weight) for weight in self.policy.parameters() if weight.dim() > 1]
        widest = max(math.prod(self.vecenv.observation_shape), *widths, 1)
        segments = -(-buffers.segments // count)
        steps = max(buffers.span, MAX_NUMBERS_IN_PASS // widest)
        parts = -(-segments * buffers.span // steps)
        self.at_once = -(-segments // parts) * buffers.span

    # -- memory

    def bind(self):
        """Make the views of the allocated arena."""
        # A trainer that replaces its engine keeps the buffers, made for fewer learners.
        self._set_learners(min(self.num_learners, len(self.buffers.gradients)))
        arena, parameters = self.buffers.arena, list(self.policy.named_parameters())
        self.learner_gradients = [
            [(parameter, arena[f"{group}/policy.{name}"]) for name, parameter in parameters]
            for group in self.buffers.gradient_groups]

    # -- acting and learning

    def rollout(self, number):
        """Roll out all agents for `horizon` steps; return the seconds in environments.

        Each actor goes through `StepByStep.run`. number: of the rollout, from 0. The seconds are
        the largest of the actors', or their sum if one thread runs all; they include waits.
        """
        vecenv, actors = self.vecenv, range(self.vecenv.num_actors)
        self.is_threaded = self.is_threaded and is_thread_safe(self.policy)
        with torch_threads(1):  # more of torch's threads would take the actors' cores
            self.buffers.begin_rollout(number)
            if self.is_threaded:
                return max(self.pool.run(self._run_in_thread, actors))
            count = self._count_torch_threads(vecenv.agents_per_batch)
            with threads(vecenv.num_threads), torch_threads(count):
                return sum(map(self.loop.run, actors))

    def _run_in_thread(self, actor):
        with torch_threads(1):
            return self.loop.run(actor)

    def _count_torch_threads(self, rows):
        """Return torch's threads within an operation of a pass of `rows` rows.

        A small pass has one: threads would wait longer than they work. With tiles it is one too,
        because torch's threads spin on the cores that the tiles' threads need.
        """
        is_large = not self.network.tiles and flops(self.policy, rows) > MIN_FLOPS_FOR_THREADS
        return self.vecenv.num_threads if is_large else 1

    @contextlib.contextmanager
    def learning(self):
        """Set the threads of learning; one learner if the network is not thread-safe."""
        if self.num_learners > 1 and not is_thread_safe(self.policy):
            self._set_learners(1)
        count = self._count_torch_threads(self.at_once)
        with threads(self.vecenv.num_threads), torch_threads(count):
            yield

    def backward(self):
        """Compute as Engine does; compare a run's first minibatch with its rollout."""
        super().backward()
        self.network.compare_with_rollout()

    def _backward_share(self, learner):
        """Compute one learner's share of a minibatch, by `TorchPolicy.add_gradients`."""
        step, index = self.at_once // self.buffers.span, self.buffers.index
        first, last = share(learner, self.num_learners, len(index))
        threads_each = self.vecenv.num_threads // self.num_learners
        self.buffers.gradients[learner].zero_()
        gradients = self.learner_gradients[learner] if learner > 0 else None
        count = min(threads_each, self._count_torch_threads(self.at_once))
        with threads(threads_each), torch_threads(count):
            for start in range(first, last, step):
                # Threads share autocast's cache: a learner would read or empty another's.
                self.network.add_gradients(
                    index[start : min(start + step, last)], start, self.buffers.sums[learner],
                    gradients, self.num_learners == 1, self.at_once)


def share(learner, num_learners, segments):
    """Return the first and the last + 1 of a learner's segments of a minibatch."""
    return segments * learner // num_learners, segments * (learner + 1) // num_learners


def count_learners(buffers, min_flops):
    """Return how many threads learn.

    min_flops: the least FLOPs of a learner's share, forward and backward.
    """
    most = 3 * flops(buffers.policy, buffers.segments * buffers.span) // min_flops
    return int(max(1, min(most, buffers.vecenv.num_threads, buffers.segments)))
