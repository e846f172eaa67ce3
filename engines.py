"""How a policy acts and learns: the trainer asks an engine for rollouts and for gradients.

    engine = Autograd(policy, vecenv, config, buffers)   # or Compiled, Graphs, Fused
    engine.register(arena)                # before arena.allocate(buffers.torch_device)
    engine.bind(arena)                    # after
    seconds = engine.rollout(number)      # fill the rollout buffers; seconds spent in environments
    step = engine.capture(function)       # on a CPU `function` itself; on a GPU it becomes a CUDA graph
    with engine.learning():
        engine.backward(index)            # gradients, new values and ratios, loss sums of one minibatch
    engine.refresh()                      # weights were loaded or replaced

`Buffers` holds what all engines read and write. `Autograd` is the engine of any nn.Module on a CPU:
its own forward and torch's autograd (`TorchPolicy`), and one loop over `vecenv.wait` and `advance`
(`StepByStep`). fast/compiled.py has an engine of the default networks on a CPU, fast/fused.py those of
a GPU, for any network (`Graphs`) and for the default one (`Fused`); pufferl.choose_engine takes one.
"""

import contextlib
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
from configuration import ConfigError, load_attribute, named
from fast import products
from flat_spaces import warn_once
from vector import SEEN

# Operations of a pass through the network above which threads share each matrix product.
MIN_FLOPS_FOR_THREADS = 1e8
# Operations of a buffer's step above which each worker of a rollout runs the network in a thread of its own.
MIN_FLOPS_FOR_WORKERS = 5e7
# How far a run's first minibatch may be from the rollout: divergence, and the values' relative squared error.
MAX_DIFFERENCE = 1e-4
# The most numbers in a tensor of one pass, 8 MB: larger ones leave the caches (and above 16 MB are mapped anew).
MAX_NUMBERS_IN_PASS = 2**21
# Operations of a minibatch, gradient and all, for each thread that learns a share of it.
MIN_FLOPS_FOR_LEARNER = 3e8


@contextlib.contextmanager
def torch_threads(count):
    """torch's threads within an operation; workers bring their own parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def has_bfloat16():
    """Whether the processor has instructions for products of bfloat16, as AVX-512, AMX and ARM may have."""
    return any(has is True for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


# torch's modules that draw random numbers or write their buffers in forward.
NOT_THREAD_SAFE = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.modules.batchnorm._NormBase)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def thread_safe(policy):
    """Return whether threads may run a network side by side."""
    return not classes_not_marked_thread_safe(policy) and not needs_one_thread(policy)


def classes_not_marked_thread_safe(policy):
    """Return the names of the custom classes in a network without `thread_safe = True`."""
    def is_marked(module):
        place = type(module).__module__
        return (place in ("models", "fast.pictures") or place.startswith("torch.nn.")
                or getattr(module, "thread_safe", False))

    return sorted({type(module).__name__ for module in policy.modules() if not is_marked(module)})


def needs_one_thread(policy):
    """Return whether a module of a network draws random numbers, writes buffers, or has hooks,
    parametrizations or replaced methods."""
    return is_hooked(nn.modules.module, "_global") or any(
        isinstance(module, NOT_THREAD_SAFE) or getattr(module, "dropout", 0) or is_hooked(module)
        or nn.utils.parametrize.is_parametrized(module)
        or any(not getattr(module, "thread_safe", False) or hasattr(type(module), name)
               for name in replaced_methods(module))
        for module in policy.modules()) or any(
        weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in policy.parameters())


def flops(policy, rows):
    """Return the operations of a pass of `rows` rows. A network that uses a weight more than once a row, as a
    convolution does, has its `operations` a row, a number."""
    operations = getattr(policy, "operations", None)
    return rows * (operations if isinstance(operations, int | float) else
                   2 * sum(weight.numel() for weight in policy.parameters()))


def replaced_methods(module):
    """Return the names of functions that were assigned to this one module."""
    return [name for name, value in vars(module).items()
            if callable(value) and value is not models.flatten_observation]


def is_hooked(owner, prefix=""):
    """Return whether a module has hooks; with "_global", whether torch has some for all modules."""
    return any(getattr(owner, prefix + hooks) for hooks in HOOKS)


# --------------------------------------------------------------------------------------------------
# What all engines share: buffers, threads, the loop of a rollout


class Buffers:
    """The tensors of rollouts and minibatches, in the arena (docs/design.md has their shapes).

    config: PuffeRL's, checked. segments: how many of this process's agents' segments a minibatch has.
    first_agent: of this process among all ranks, for the random numbers.

    host: the arrays that environments write, as tensors. storage: what the policy reads, on a CPU the same.
    columns: the rollout as (span, segments of all agents, ...), from which minibatches are drawn.
    """

    torch_device = torch.device("cpu")

    def __init__(self, policy, vecenv, config, segments, first_agent):
        self.policy = policy
        self.vecenv = vecenv
        self.config = config
        self.horizon = config["horizon"]
        self.span = drawn_steps(config)  # of a segment that is drawn for learning
        self.num_agents = vecenv.num_agents
        self.segments = segments
        self.first_agent = first_agent
        self.has_heads = bool(vecenv.action_heads)
        self.heads = torch.tensor(vecenv.action_heads) if self.has_heads else None
        # numbers in the decoder's output: the logits or means, and the value
        self.width = 1 + (sum(vecenv.action_heads) if self.has_heads else vecenv.action_dims)
        self.largest = max(agents.stop - agents.start for agents in vecenv.ranges)

    def register(self, arena, num_learners, minibatches):
        """Ask the arena for all tensors. minibatches: the most in an epoch."""
        T, N, M, span = self.horizon, self.num_agents, self.segments, self.span
        self.arena = arena
        arrays = vars(self.vecenv.allocate(T))
        self.host = {name: None if array is None else torch.from_numpy(array)
                     for name, array in arrays.items()}
        float32, float64, int64 = torch.float32, torch.float64, torch.int64
        shapes = {
            "logprobs": ((T, N), float32), "values": ((T + 1, N), float32), "bootstraps": ((T, N), float32),
            # The number of each step is in the arena because a captured CUDA graph reads it there.
            "steps": ((T,), int64), "new_values": ((span, M), float32), "new_ratios": ((span, M), float32),
            # the sums of the loss's statistics, and one of train.loss
            "sums": ((num_learners, kernels.SUMS + 1), float64),
            "ratios": ((T, N), float32), "advantages": ((T, N), float32), "segment_weights": ((M,), float32),
            "settings": ((len(kernels.LOSS_SETTINGS),), float32), "beta": ((1,), float32), "rate": ((), float32),
            "found_inf": ((), float32), "value_mean": ((1,), float32),
            "priorities": ((N * T // span,), float64), "cumulative": ((N * T // span,), float64),
            "moments": ((3,), float64), "index": ((M,), int64),
            "counter": ((2,), int64),  # epoch, minibatch
            "norms": ((minibatches,), float64)}  # of the gradients, a minibatch
        if self.config["norm_reward"]:
            shapes |= {"rewards": ((T, N), float32), "value_targets": ((T, N), float32)}
        if models.squash_of(self.policy) is not None:
            shapes["samples"] = (T, N, self.vecenv.action_dims), float32
        self.fields = getattr(self.policy, "rollout_fields", {})
        shapes |= {f"fields/{name}": ((T, N, *shape), dtype) for name, (shape, dtype) in self.fields.items()}
        state = self.policy.initial_state(N) if hasattr(self.policy, "initial_state") else {}
        self.state = dict.fromkeys(state)
        for name, tensor in state.items():
            shapes |= {f"state/{name}": (tensor.shape, float32), f"initial_state/{name}": (tensor.shape, float32)}
            shapes |= {f"scratch {w}/{name}": ((len(tensor), self.largest, *tensor.shape[2:]), float32)
                       for w in range(self.vecenv.num_workers)}
        for name, (shape, dtype) in shapes.items():
            arena.register(name, shape, dtype)
        self._names = [name for name in shapes if "/" not in name and name not in ("rewards", "samples")]

    def bind(self):
        """Take the views out of the allocated arena."""
        arena, N = self.arena, self.num_agents
        self.storage = self._make_storage()
        self.squash = models.squash_of(self.policy)
        for name in self._names:
            setattr(self, name, arena[name])
        # The loss needs what was drawn: the actions, or with squash the samples before the tanh.
        self.samples = self.storage["actions"] if self.squash is None else arena["samples"]
        self.rewards = arena["rewards"] if self.config["norm_reward"] else self.storage["rewards"]
        self.state, names = {name: arena[f"state/{name}"] for name in self.state}, list(self.state)
        self.initial_state = {name: arena[f"initial_state/{name}"] for name in names}
        self.scratch = [{name: arena[f"scratch {w}/{name}"] for name in names}
                        for w in range(self.vecenv.num_workers)]
        self.fields = {name: arena[f"fields/{name}"] for name in self.fields}
        resets = torch.zeros(N, dtype=torch.uint8, device=self.torch_device)
        self.final_flags = resets, resets + 1  # resets and valid of episodes' last observations
        self.rows = [[self._make_row(agents, t) for t in range(self.horizon + 1)]
                     for agents in self.vecenv.ranges]
        columns = {**{name: self.storage[name] for name in SEEN}, "samples": self.samples,
                   "logprobs": self.logprobs, "values": self.values, "advantages": self.advantages}
        self.columns = SimpleNamespace(**{name: self.as_columns(array) for name, array in columns.items()})
        self.running_returns = torch.zeros(N, device=self.host["rewards"].device)

    def _make_storage(self):
        return self.host

    def as_columns(self, array):
        """Return a rollout's array (T or T + 1, N, ...) as (span, segments, ...): each column is what may be drawn,
        an agent's T steps, or with train.draw steps a single one."""
        return None if array is None else array[: self.horizon].view(self.span, -1, *array.shape[2:])

    def _make_row(self, agents, t):
        """Return the views that a worker needs at step t of a range of agents, made once: no step slices."""
        storage, host = self.storage, self.host
        row = {name: storage[name][t, agents] if storage[name] is not None else None for name in SEEN}
        row["values"] = self.values[t, agents]
        if t == self.horizon:
            return row
        ends = {name: host[name][t, agents] for name in ("truncations", "terminals")}  # numpy's are quicker to ask
        return {**row, "step": self.steps[t : t + 1], "logprobs": self.logprobs[t, agents],
                "actions": storage["actions"][t, agents], "samples": self.samples[t, agents],
                "fields": {name: field[t, agents] for name, field in self.fields.items()},
                **{name: end if end.is_cuda else end.numpy() for name, end in ends.items()}}

    def begin_rollout(self, number):
        """Go to step 0 of a rollout. number: of rollouts before this one."""
        self.vecenv.begin()
        self.bootstraps.zero_()
        self.steps.copy_(number * self.horizon + torch.arange(self.horizon))
        for name, state in self.state.items():
            if self.config["state"] == "zero":
                state.zero_()
            self.initial_state[name].copy_(state)

    def draw(self, outputs, log_std, row, agents):
        """Draw a row's actions from outputs (n, A + 1), and write log-probabilities and values."""
        kernels.sample(outputs, **self.draw_arguments(row, agents), log_std=log_std)

    def draw_arguments(self, row, agents):
        """Return the arguments of `kernels.sample` for a row."""
        return {"actions": row["actions"], "logprobs": row["logprobs"], "values": row["values"],
                "seed": self.config["seed"], "step": row["step"], "first_agent": self.first_agent + agents.start,
                "heads": self.heads, "masks": row["action_masks"], "squash": self.squash, "samples": row["samples"]}

    def copy_state(self, worker, state, index=None):
        """Return a copy of the recurrent state in the worker's scratch, of the agents in `index` if it is given."""
        copies = {}
        for name, tensor in state.items():
            copies[name] = self.scratch[worker][name][:, : tensor.shape[1] if index is None else len(index)]
            for source, copy in zip(tensor, copies[name], strict=True):
                copy.copy_(source) if index is None else torch.index_select(source, 0, index, out=copy)
        return copies

    def loss(self, outputs, grad, start, sums, log_std=None, grad_log_std=None):
        """Write the loss's gradient by the outputs (span, n, A + 1) of the segments index[start : start + n], their
        new values and ratios, and add their statistics to `sums`."""
        columns = self.columns
        kernels.ppo_loss(
            outputs, columns.samples, columns.logprobs, columns.values, columns.advantages, self.segment_weights,
            columns.valid, self.settings, grad, self.new_values, self.new_ratios, sums, heads=self.heads,
            log_std=log_std, grad_log_std=grad_log_std, squash=self.squash, masks=columns.action_masks,
            index=self.index, start=start)

    def steps_at_once(self):
        """Return the steps of a minibatch that train.max_minibatch_size lets through the network together."""
        whole = self.segments * self.span
        return min(whole, self.config["max_minibatch_size"] or whole)

    def on_host(self, name, part=...):
        """Return one of the rollout's arrays, or a part of it, to log figures of."""
        return self.host[name][part]

    def return_range(self, low, high):
        """Return the smallest and largest return of the episodes that ended in the last rollout, and low, high."""
        arrays = (self.host[name].numpy() for name in ("rewards", "valid", "resets"))
        return kernels.return_range(*arrays, self.running_returns.numpy(), low, high)

    def usage(self):
        """Return {"GPU": "87%", ...} for a dashboard."""
        return {}

    def release(self):
        """Free what is not memory."""


class Workers:
    """Threads that act or learn side by side; the first one is the caller's."""

    def __init__(self, count, threads_each):
        self.threads_each = threads_each
        self._pool = ThreadPoolExecutor(count, "worker", set_threads, (threads_each,))
        # A waiting worker gets the interpreter's lock after 0.2 ms instead of 5, by which rollouts
        # take a tenth less time.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)

    def run(self, function, numbers):
        """Return [function(number), ...], each in a thread of its own, of which the first is this one: to
        wake another takes as long as a small minibatch."""
        first, *others = numbers
        calls = [self._pool.submit(function, number) for number in others]
        try:
            with threads(self.threads_each):
                return [function(first), *(call.result() for call in calls)]
        finally:
            # After an interrupt too, because workers must not write while a checkpoint is saved.
            wait(calls)

    def release(self):
        self._pool.shutdown()
        sys.setswitchinterval(self._interval)


class StepByStep:
    """The rollout as a loop over `vecenv.wait` and `advance`.

    act(worker, observations, state, resets, valid) -> outputs (n, A + 1), log_std: a step of the network that
    updates the tensors in `state` in place. step(worker, buffer, t) and bootstrap(worker, buffer, t): what an
    engine does in place of `act_on_row` and `bootstrap`.
    """

    def __init__(self, vecenv, buffers, act, step=None, bootstrap=None):
        self.vecenv, self.buffers, self.act = vecenv, buffers, act
        self._step = step or self.act_on_row
        self._bootstrap = bootstrap or self.bootstrap

    @torch.no_grad()
    def rollout(self, worker):
        """Run one worker's share of the rollout; return its seconds in environments, waits included."""
        vecenv, horizon, rows = self.vecenv, self.buffers.horizon, self.buffers.rows
        seconds, begun = 0.0, clock()
        while (ready := vecenv.wait(worker)) is not None:
            buffer, t = ready
            seconds += clock() - begun
            if t > 0 and rows[buffer][t - 1]["truncations"].any():
                self._bootstrap(worker, buffer, t - 1)
            self._step(worker, buffer, t)
            begun = clock()
            if t < horizon:
                vecenv.advance(buffer)
        return seconds

    def act_on_row(self, worker, buffer, t):
        """Act on row t of a buffer: actions, log-probabilities and values. At t = horizon compute only V, to
        bootstrap from, and change no state."""
        buffers, agents = self.buffers, self.vecenv.ranges[buffer]
        row = buffers.rows[buffer][t]
        state = {name: tensor[:, agents] for name, tensor in buffers.state.items()}
        if t == buffers.horizon:
            state = buffers.copy_state(worker, state)
        outputs, log_std = self.act(worker, row["observations"], state, row["resets"], row["valid"])
        if t == buffers.horizon:
            row["values"].copy_(outputs[:, -1])
            return
        buffers.draw(outputs, log_std, row, agents)
        for name, field in row["fields"].items():
            field.copy_(state["fields"][name])

    def bootstrap(self, worker, buffer, t):
        """Write V of the final observations of agents that step t truncated; the state is that before the reset."""
        buffers, agents = self.buffers, self.vecenv.ranges[buffer]
        row = buffers.rows[buffer][t]
        cut = row["truncations"] & ~row["terminals"]  # after a terminal nothing follows
        cut = torch.from_numpy(np.flatnonzero(cut)) + agents.start
        if len(cut) == 0:
            return
        state = buffers.copy_state(worker, buffers.state, cut)
        flags = (flag[: len(cut)] for flag in buffers.final_flags)
        outputs, _ = self.act(worker, buffers.storage["final_observations"][cut], state, *flags)
        buffers.bootstraps[t, cut] = outputs[:, -1]


# --------------------------------------------------------------------------------------------------
# Any network


class TorchPolicy:
    """Any nn.Module by its own forward and torch's autograd, on a CPU or a GPU.

    precision: of the products. tiles: what a pass's linear maps go through (products.Tiles), or None for torch.
    """

    def __init__(self, policy, vecenv, config, buffers, precision, tiles=None):
        self.policy, self.vecenv, self.config, self.buffers = policy, vecenv, config, buffers
        self.precision, self.use_tiles = precision, tiles
        self.forward = torch.compile(policy, mode=config["compile_mode"]) if config["compile"] else policy
        self.extra_loss = load_attribute("train.loss", config["loss"]) if config["loss"] else None
        self.is_compared = False  # whether a minibatch was compared with the rollout

    @property
    def normalises_batches(self):
        """Whether a layer normalises by the moments of its batch."""
        return any(isinstance(module, nn.modules.batchnorm._NormBase) for module in self.policy.modules())

    def _tiles(self, rows):
        """Return the context of a pass of `rows` rows."""
        return self.use_tiles() if self.use_tiles and rows >= products.ROWS else contextlib.nullcontext()

    def _autocast(self, **options):
        """Return the context of products at train.precision."""
        is_enabled = self.precision != torch.float32
        return torch.autocast(self.buffers.torch_device.type, self.precision, enabled=is_enabled, **options)

    def act(self, worker, observations, state, resets, valid):
        """Return outputs (n, A + 1) and log_std of one step; update the tensors in `state` in place."""
        view = {**state, "resets": resets, "valid": valid}
        # No cache, because threads share it: one could get a weight that another's CUDA stream is
        # still casting.
        with self._autocast(cache_enabled=False), self._tiles(len(observations)):
            outputs, log_std = models.join_outputs(*models.one_step(self.policy, observations, view))
        if outputs.shape[-1] != self.buffers.width or (log_std is None) != self.buffers.has_heads:
            models.check_logits(self.policy, outputs, log_std, self.vecenv.action_heads, self.vecenv.action_dims)
        for name, tensor in state.items():
            tensor.copy_(view[name])
        if "fields" in view:
            state["fields"] = view["fields"]
        return outputs.float().contiguous(), None if log_std is None else log_std.float().contiguous()

    def state_of(self, part):
        """Return these segments' memory before their first step, resets and valid, as models.over_time takes them."""
        buffers = self.buffers
        state = {name: tensor[:, part] for name, tensor in buffers.initial_state.items()}
        return state | {name: getattr(buffers.columns, name).index_select(1, part) for name in ("resets", "valid")}

    def add_gradients(self, part, start, sums, gradients=None, cache=True, rows=None):
        """Add the gradients of the minibatch's segments `part`, of which `start` others come before.

        sums: (SUMS + 1,) of the learner, added to. gradients: [(parameter, the tensor that its gradient is added to)];
        None for the parameters' own. cache: whether autocast may keep cast weights. rows: steps of the pass.
        """
        buffers = self.buffers
        observations, state = buffers.columns.observations.index_select(1, part), self.state_of(part)
        rows = len(part) * buffers.span if rows is None else rows
        with self._autocast(cache_enabled=cache), self._tiles(rows):
            logits, value = models.over_time(self.policy, observations, state, self.forward)
            outputs, log_std = models.join_outputs(logits, value)
        outputs = outputs.float().contiguous()
        if not self.is_compared and start == 0:
            self._warn_of_probabilities(outputs)
        grads = [torch.empty_like(outputs), None]
        if log_std is not None:
            log_std = log_std.float().contiguous()
            grads[1] = torch.empty_like(log_std)
        fixed = None if log_std is None else log_std.detach()
        buffers.loss(outputs.detach(), grads[0], start, sums[: kernels.SUMS], fixed, grads[1])
        pairs = list(zip((outputs, log_std), grads, strict=True))
        if self.extra_loss is not None:
            with self._tiles(rows):
                pairs.append((self._extra_loss(part, observations, logits, value, sums, state.get("fields", {})), None))
        leaves = [(x, grad) for x, grad in pairs if x is not None and x.requires_grad]
        if not leaves or self.extra_loss is None:
            warn_of_detached(self.policy, logits, value)
        losses, slopes = [x for x, _ in leaves], [grad for _, grad in leaves]
        if gradients is None:
            torch.autograd.backward(losses, slopes)
            return
        trained = [(parameter, total) for parameter, total in gradients if parameter.requires_grad]
        if not trained:
            return
        grads = torch.autograd.grad(losses, [parameter for parameter, _ in trained], slopes, allow_unused=True)
        for (_, total), grad in zip(trained, grads, strict=True):
            if grad is not None:
                total.add_(grad)

    def _warn_of_probabilities(self, outputs):
        if self.buffers.has_heads and models.are_probabilities(outputs.detach(), self.vecenv.action_heads):
            name = type(models.inner_policy(self.policy)).__name__
            warn_once(f"network: {name} returns probabilities, but logits are "
                      "expected, of which a softmax is taken: all actions stay about as likely, and little is learnt. "
                      "Return what goes into the softmax, or the probabilities' logarithm.")

    def _extra_loss(self, index, observations, logits, value, sums, fields):
        """Return train.loss of these segments, in proportion to the minibatch that they are a part of.

        It gets a namespace: observations (T, M, ...), logits as the network gave them, values, old_values, logprobs
        (of the rollout), advantages, returns, resets, valid (T, M), actions, state, as models.over_time takes it, and
        action_masks if the environment has them. If a tanh squashes the actions, these are the Gaussian's samples,
        and logprobs theirs. Each of the policy's rollout_fields is there as the network gives it now, and as old_... of
        the rollout. Raises ConfigError unless it returns a tensor ().
        """
        buffers, names, T = self.buffers, {"samples": "actions", "values": "old_values"}, self.buffers.span
        taken = {names.get(name, name): tensor.index_select(1, index)
                 for name, tensor in vars(buffers.columns).items() if tensor is not None and name != "observations"}
        taken |= fields | {f"old_{name}": buffers.as_columns(field).index_select(1, index)
                           for name, field in buffers.fields.items()}
        if buffers.squash is not None:  # 1 - tanh² u = sech² u
            of_tanh = 2 * (math.log(2) - taken["actions"] - softplus(-2 * taken["actions"]))
            taken["logprobs"] += (buffers.squash[2] + of_tanh * (buffers.squash[1] > 0)).sum(-1)
        logits = [head.float() for head in logits] if isinstance(logits, list | tuple) else (
            logits.float() if isinstance(logits, torch.Tensor) else logits)
        minibatch = Minibatch(observations=observations, logits=logits,
                              values=value.reshape(T, -1).float(), state=self.state_of(index),
                              **taken, returns=taken["advantages"] + taken["old_values"])
        extra = self.extra_loss(minibatch)
        if isinstance(extra, torch.Tensor) and not extra.requires_grad:
            warn_once(f"train.loss = {named(self.config['loss'])}: what it returns does not depend on the network's "
                      "outputs (logits, values), so nothing is learnt from it.")
        if not isinstance(extra, torch.Tensor) or extra.numel() != 1:
            raise ConfigError(f"train.loss = {named(self.config['loss'])}: returned "
                              f"{type(extra).__name__} {tuple(getattr(extra, 'shape', ()))}; a "
                              "tensor () is expected.")
        extra = extra.reshape(()) * (len(index) * T / self.config["minibatch_size"])
        sums[kernels.SUMS].add_(extra.detach())
        return extra

    def compare_with_rollout(self):
        """Say if what learns is not what acted: before a run's first update, values and the probabilities of actions
        must be those of the rollout."""
        if self.is_compared:
            return
        self.is_compared, buffers = True, self.buffers
        valid, values = (getattr(buffers.columns, name).index_select(1, buffers.index) for name in ("valid", "values"))
        valid = valid != 0
        # Schulman's k2, for ratios near 1
        divergence = 0.5 * (buffers.new_ratios[valid] - 1).square().mean().item()
        error = (buffers.new_values - values)[valid].square().mean() / (values[valid].square().mean() + 1e-12)
        is_known = self.precision != torch.float32 or self.normalises_batches  # it rounds more, or is told of anyway
        if max(divergence, error.item()) > MAX_DIFFERENCE and not is_known and data_parallel.connect().rank == 0:
            name = type(models.inner_policy(self.policy)).__name__
            print(f"network: {name} does not learn what it does: before the first update, its outputs are not those of "
                  f"the rollout (probabilities by {divergence:.1e}, values by {error:.1e}). Dropout and other noise do "
                  "that. So does what a network keeps in itself from call to call, a memory or statistics: "
                  "initial_state and the state are for it (docs/scripts.md).", file=sys.stderr)


class Minibatch(SimpleNamespace):
    """What train.loss gets (see Autograd._extra)."""

    def __getattr__(self, name):
        raise AttributeError(f"a minibatch of train.loss has no {name}; it has {', '.join(vars(self))}.")


def warn_of_detached(policy, logits, value):
    """Warn, once, if a network's outputs, as it gave them, lead no gradient to its weights: one of them if no weights
    are frozen, both if some are not."""
    both = grad_of(logits), value.requires_grad
    if not all(both) and (all if any(both) else any)(weights.requires_grad for weights in policy.parameters()):
        what = {(False, True): "the policy is not learnt, because no gradient leads from the logits",
                (True, False): "the value is not learnt, because no gradient leads from it",
                (False, False): "nothing is learnt, because no gradient leads from its outputs"}[both]
        warn_once(f"network: {what} back to its weights. Is its forward within torch.no_grad, or are its outputs "
                  "detached?")


def grad_of(logits):
    """Whether a gradient leads from logits, a tensor, a list of tensors or a Normal, back to weights."""
    parts = logits if isinstance(logits, list | tuple) else [getattr(logits, "loc", logits)]
    return any(part.requires_grad for part in parts)


class Autograd:
    """Any nn.Module (models.py says what it must have) on a CPU."""

    name = "autograd"
    whole_minibatches = True  # a minibatch may be captured as a whole
    Buffers = Buffers

    def __init__(self, policy, vecenv, config, buffers):
        self.policy, self.vecenv, self.config, self.buffers = policy, vecenv, config, buffers
        self.precision = getattr(torch, config["precision"])
        if self.precision == torch.bfloat16 and not has_bfloat16():
            self.precision = torch.float32
            if data_parallel.connect().rank == 0:
                print("precision: float32, because torch takes up to ten times as long for bfloat16, which was asked "
                      "for, on a processor without it; --train.precision float32 asks for that", file=sys.stderr)
        self.network = TorchPolicy(policy, vecenv, config, buffers, self.precision, self._find_tiles())
        self.blocking_classes = ()  # without `thread_safe`, if one thread learns for that reason alone
        self._set_learners(self._count_learners())
        self.side_by_side = self._can_act_side_by_side() and thread_safe(policy)
        self.workers = None
        if self.side_by_side or self.num_learners > 1:
            self.workers = Workers(max(vecenv.num_workers, self.num_learners), vecenv.threads_per_worker)
        self.steps = StepByStep(vecenv, buffers, self.network.act)

    def _find_tiles(self):
        """Return products.Tiles, through which the network's linear maps go, or None: they go through torch. A network
        with other matrices, or larger ones, has it only on one thread, because torch's threads spin on
        the cores that fast/tile.c's want."""
        if self.precision != torch.float32 or self.config["compile"] or products.missing():
            return None
        known = (nn.Linear, nn.LSTM, nn.GRU)
        every = all(isinstance(module, known) and len(weight) * weight.shape[1] <= products.LARGEST
                    for module in self.policy.modules()
                    for weight in module.parameters(recurse=False) if weight.dim() > 1 and len(weight) > 1)
        return products.Tiles if every or self.vecenv.num_threads == 1 else None

    def _can_act_side_by_side(self):
        """Return whether threads that each run the network for buffers of their own are worth it, and give the same
        result. torch's own threads share the products that go through torch."""
        vecenv, network = self.vecenv, self.network
        return bool(network.use_tiles and vecenv.num_buffers >= vecenv.num_workers > 1
                    and not network.normalises_batches
                    and flops(self.policy, vecenv.agents_per_batch) >= MIN_FLOPS_FOR_WORKERS)

    # -- learners

    def _is_undivided(self):
        """Return whether a minibatch goes through the network as a whole, because parts would give another result:
        with train.loss, or a layer that takes moments of its batch."""
        return self.network.extra_loss is not None or self.network.normalises_batches

    def _count_learners(self):
        """Return how many threads learn, each from its share of a minibatch. One learns with torch.compile, with a
        network that is not `thread_safe`, and with train.max_minibatch_size, which bounds what is in memory."""
        if self._is_undivided() or self.config["compile"] or self.config["max_minibatch_size"]:
            return 1
        count = count_learners(self.policy, self.vecenv, self.buffers, MIN_FLOPS_FOR_LEARNER)
        if count == 1 or thread_safe(self.policy):
            return count
        if not needs_one_thread(self.policy):
            self.blocking_classes = classes_not_marked_thread_safe(self.policy)
        return 1

    def _set_learners(self, count):
        self.num_learners = count
        self.at_once = self._count_steps_at_once()

    def _count_steps_at_once(self):
        """Return the steps that go through the network at once in learning: train.max_minibatch_size. If it is not
        set, equal parts of a learner's share that a cache may hold, or all of a minibatch that is not divided."""
        buffers = self.buffers
        if self.config["max_minibatch_size"] or self._is_undivided():
            return buffers.steps_at_once()
        widths = [len(weight) for weight in self.policy.parameters() if weight.dim() > 1]
        widest = max(math.prod(self.vecenv.observation_shape), *widths, 1)
        share = -(-buffers.segments // self.num_learners)
        parts = -(-share * buffers.span // max(buffers.span, MAX_NUMBERS_IN_PASS // widest))
        return -(-share // parts) * buffers.span

    # -- memory

    def register(self, arena):
        """Ask the arena for the gradients of all learners but the first, whose are the parameters' own."""
        register_learners(arena, self.policy, self.num_learners)

    def bind(self, arena):
        """Take the views out of the allocated arena."""
        self._set_learners(min(self.num_learners, len(self.buffers.sums)))  # after another engine
        groups = learner_groups(self.num_learners)
        self.gradients = [arena.flat(group) for group in groups]
        self.learner_gradients = [[(parameter, arena[f"{group}/policy.{name}"])
                                   for name, parameter in self.policy.named_parameters()] for group in groups]

    # -- the engine's four methods

    def rollout(self, number):
        """Fill the buffers with `horizon` steps of all agents; number: of rollouts before this one.
        Returns the seconds that were spent in environments or in waiting for them."""
        vecenv, workers = self.vecenv, range(self.vecenv.num_workers)
        self.side_by_side = self.side_by_side and thread_safe(self.policy)
        with torch_threads(1):  # more of torch's threads would take the workers' cores
            self.buffers.begin_rollout(number)
            if self.side_by_side:
                return mean_of_workers(self.workers.run(self._rollout_in_thread, workers))
            with threads(vecenv.num_threads), torch_threads(self._torch_threads(vecenv.agents_per_batch)):
                return sum(map(self.steps.rollout, workers))

    def _rollout_in_thread(self, worker):
        with torch_threads(1):
            return self.steps.rollout(worker)

    def _torch_threads(self, rows):
        """Return torch's threads within an operation: all cores if a pass of `rows` rows is large enough, else one,
        because threads would wait longer than they work; one also with tiles, because torch's threads spin on the
        cores that these want."""
        large = not self.network.use_tiles and flops(self.policy, rows) > MIN_FLOPS_FOR_THREADS
        return self.vecenv.num_threads if large else 1

    @contextlib.contextmanager
    def learning(self):
        """Within it, the threads are those of learning; several learners only while the network is thread-safe."""
        if self.num_learners > 1 and not thread_safe(self.policy):
            self._set_learners(1)
        with threads(self.vecenv.num_threads), torch_threads(self._torch_threads(self.at_once)):
            yield

    def backward(self, index):
        """Compute the gradients, new values and ratios, and loss sums of the minibatch's segments `index` (M,)."""
        if self.num_learners == 1:
            self._learn(index, 0)
        else:
            self.workers.run(lambda learner: self._learn(index, learner), range(self.num_learners))
        for gradient in self.gradients[1 : self.num_learners]:  # in this order: an exact resume rests on it (runs.py)
            self.gradients[0].add_(gradient)
        self.network.compare_with_rollout()

    def _learn(self, index, learner):
        """Learn from one learner's share of the minibatch."""
        step, (first, last) = self.at_once // self.buffers.span, share(learner, self.num_learners, len(index))
        threads_each = self.vecenv.num_threads // self.num_learners
        self.gradients[learner].zero_()
        gradients = self.learner_gradients[learner] if learner > 0 else None
        with threads(threads_each), torch_threads(min(threads_each, self._torch_threads(self.at_once))):
            for start in range(first, last, step):
                # autocast's cache of cast weights belongs to all threads: one would use, or empty, another's
                self.network.add_gradients(index[start : min(start + step, last)], start, self.buffers.sums[learner],
                                           gradients, self.num_learners == 1, self.at_once)

    def capture(self, function):
        """Return the function itself; on a GPU it becomes a CUDA graph."""
        return function

    def refresh(self):
        """Follow weights that were loaded or replaced: nothing is kept of them here."""

    def release(self):
        """Stop the threads."""
        if self.workers is not None:
            self.workers.release()


def share(learner, num_learners, segments):
    """Return (first, last) of a learner's segments of a minibatch."""
    return segments * learner // num_learners, segments * (learner + 1) // num_learners


def count_learners(policy, vecenv, buffers, min_flops):
    """Return how many threads learn: each has min_flops of a minibatch at least, gradient and all."""
    most = 3 * flops(policy, buffers.segments * buffers.span) // min_flops
    return int(max(1, min(most, vecenv.num_threads, buffers.segments)))


def learner_groups(num_learners):
    """Return the names of the arena's groups of gradients, one a learner."""
    return ["gradients", *(f"gradients {learner}" for learner in range(1, num_learners))]


def register_learners(arena, policy, num_learners):
    """Register the gradients of all learners but the first, whose are the parameters' own."""
    for group in learner_groups(num_learners)[1:]:
        for name, parameter in policy.named_parameters():
            arena.register(f"{group}/policy.{name}", parameter.shape, group=group)


def mean_of_workers(seconds):
    """Return the mean seconds in environments of the workers that had some to step: they run side by side."""
    return sum(seconds) / max(1, sum(one > 0 for one in seconds))


# --------------------------------------------------------------------------------------------------
# The contract of a recurrent policy

STEPS, AGENTS = 16, 5  # of a sample


def sample_inputs(vecenv, device):
    """Return observations near 1 of the vecenv's shape and dtype, and resets and valid, all (STEPS, AGENTS, ...)."""
    random = np.random.default_rng(0)
    shape, dtype = (STEPS, AGENTS, *vecenv.observation_shape), np.dtype(vecenv.observation_dtype)
    observations = random.normal(size=shape) if dtype.kind == "f" else random.integers(0, 2, shape)
    flags = [(random.random((STEPS, AGENTS)) < p).astype(np.uint8) for p in (0.2, 0.8)]
    return [torch.from_numpy(array).to(device) for array in (observations.astype(dtype), *flags)]


def misread(policy, vecenv):
    """What a network that takes a state gets wrong in silence, in words: what a step leaves in the state is not in
    `initial_state`, so that nobody keeps it, or its forward takes agents for time. None if neither."""
    if type(policy).__module__ == models.__name__ or models.is_plain(policy):
        return None
    device = next(policy.parameters(), torch.zeros(())).device
    seen, *_ = sample_inputs(vecenv, device)

    def beginning(*shape):
        """The state of (T, N) steps or (N,) agents at the start."""
        kept = policy.initial_state(shape[-1]) if hasattr(policy, "initial_state") else {}
        flags = torch.zeros(shape, dtype=torch.uint8, device=device)
        return {**{name: tensor.to(device) for name, tensor in kept.items()}, "resets": flags, "valid": flags + 1}

    def over_time(seen):
        return models.join_outputs(*policy(seen, beginning(*seen.shape[:2])))[0]

    def by_steps(keep):
        """The outputs, and the names that a step has added to the state, which are kept or not."""
        torch.manual_seed(0)  # a network may draw noise; `evaluation_mode` puts the generator back
        state, outputs = beginning(AGENTS), []
        names = set(state)
        for now in seen:
            outputs.append(models.join_outputs(*models.one_step(policy, now, state))[0])
            added = state.keys() - names - {"fields"}
            state = state if keep else {name: state[name] for name in names}
        return torch.stack(outputs), added

    name, step = type(policy).__name__, "forward_eval" if hasattr(policy, "forward_eval") else "forward"
    try:
        with models.evaluation_mode(policy):
            steps, added = by_steps(False)
            if added and relative_error(by_steps(True)[0], steps) > 1e-3:
                return (f"{name}.{step} leaves {', '.join(sorted(added))} in the state, which would be lost: "
                        "initial_state(num_agents) must return it, zeros of (layers, num_agents, size), and forward "
                        "take time first, (T, N, *observation). Or let --rnn.name lstm or gru be the memory.")
            if not hasattr(policy, "forward_eval") or getattr(policy, "takes_batches", False):
                return None
            swapped = over_time(seen.transpose(0, 1)).transpose(0, 1)
            if relative_error(over_time(seen), steps) > 1e-3 > relative_error(swapped, steps):
                return (f"{name}.forward takes the first dimension for agents and the second for time. It is given "
                        "time first, (T, N, *observation): is a layer batch_first=True?")
    except Exception:  # whatever it is, the run itself will say it
        return None
    return None


def relative_error(result, expected):
    """Return the norm of the difference, relative to that of `expected`."""
    return float((result - expected).norm() / (expected.norm() + 1e-6))
