"""How a policy acts and learns: the trainer asks an engine for rollouts and for gradients.

    engine = choose(policy, vecenv, config)(policy, vecenv, config, segments, first_agent)
    engine.register(arena)              # before arena.allocate(engine.torch_device), engine.bind() after
    seconds = engine.rollout(number)    # `horizon` steps of all agents; how long they were in environments
    with engine.learning():
        engine.learn()                  # a minibatch's gradients, from the segments in arena["index"]

`Autograd`, below, is the engine of any nn.Module: its own forward, torch's autograd, and one plain
loop over `vecenv.wait` and `advance`. fast/compiled.py has the engine of the default network on a CPU,
fast/fused.py those of a GPU: they compute the same in fewer calls; fast/compiled.py can be deleted. They must not run
in the place of a network that somebody has changed: `choose` compares them with the network's own
forward and gradients on sample inputs before a run begins, and again after a checkpoint is loaded.
It misses an edit that changes the results of these samples by less than 0.1%, or only those of other
inputs. In doubt: `--train.engine autograd`.
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
from arena import clock
from auto import drawn_steps
from configuration import ConfigError, load_attribute, named
from fast import products
from flat_spaces import warn_once
from vector import SEEN

# Operations of a pass through the network above which threads share each matrix product.
WORTH_THREADS = 1e8
# Operations of a buffer's step above which each worker of a rollout runs the network in a thread of its own.
WORTH_A_WORKER = 5e7
# How far a run's first minibatch may be from the rollout: divergence, and the values' relative squared error.
OTHER = 1e-4
# The most numbers in a tensor of one pass, 8 MB: larger ones leave the caches (and above 16 MB are mapped anew).
PASS = 2**21


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
        or (not getattr(module, "thread_safe", False) and replaced_methods(module))
        for module in policy.modules()) or any(
        weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in policy.parameters())


def replaced_methods(module):
    """Return the names of methods that were assigned to this one module."""
    return [name for name, value in vars(module).items()
            if callable(value) and value is not models.flattened and hasattr(type(module), name)]


def is_hooked(owner, prefix=""):
    """Return whether a module has hooks; with "_global", whether torch has some for all modules."""
    return any(getattr(owner, prefix + hooks) for hooks in HOOKS)


class Acting:
    """How any nn.Module (models.py says what it must have) acts on a CPU: the first half of an engine.

    config: PuffeRL's, checked. segments: how many of this process's agents' segments a minibatch
    has. first_agent: of this process among all ranks, for the random numbers.
    """

    name, rollout_name, torch_device = "autograd", "plain", torch.device("cpu")
    through_torch = True  # the network runs as torch modules, on a CPU

    def __init__(self, policy, vecenv, config, segments, first_agent):
        self.policy, self.vecenv, self.config = policy, vecenv, config
        self.horizon, self.num_agents, self.segments, self.first_agent = (
            config["horizon"], vecenv.num_agents, segments, first_agent)
        self.span = drawn_steps(config)  # of a segment that is drawn for learning
        self.precision = getattr(torch, config["precision"])
        if self.through_torch and self.precision == torch.bfloat16 and not has_bfloat16():
            self.precision = torch.float32
            if data_parallel.connect().rank == 0:
                print("precision: float32, because torch takes up to ten times as long for bfloat16, which was asked "
                      "for, on a processor without it; --train.precision float32 asks for that", file=sys.stderr)
        self.chooses = bool(vecenv.action_heads)
        self.heads = torch.tensor(vecenv.action_heads) if self.chooses else None
        # numbers in the decoder's output: the logits or means, and the value
        self.width = 1 + (sum(vecenv.action_heads) if self.chooses else vecenv.action_dims)
        self.tiles, self.pool = self._find_tiles(), None
        # whether the rollout's workers run in threads of their own
        self.side_by_side = not self.through_torch or (self._worth_workers() and thread_safe(policy))

    def _worth_workers(self):
        """Whether threads that each run the network for buffers of their own are worth it, and give the same result.
        torch's own threads share the products that go through torch."""
        return bool(self.tiles and self.vecenv.num_buffers >= self.vecenv.num_workers > 1 and not self._takes_moments()
                    and self._operations(self.vecenv.agents_per_batch) >= WORTH_A_WORKER)

    def _takes_moments(self):
        """Whether a layer normalises by the moments of its batch."""
        return any(isinstance(module, nn.modules.batchnorm._NormBase) for module in self.policy.modules())

    def _find_tiles(self):
        """products.Tiles, through which the network's linear maps go, or None: they go through torch. A network with
        other matrices, or larger ones, has it only on one thread, because torch's threads spin on
        the cores that fast/tile.c's want."""
        if not self.through_torch or self.precision != torch.float32 or self.config["compile"] or products.missing():
            return None
        known = (nn.Linear, nn.LSTM, nn.GRU)
        every = all(isinstance(module, known) and len(weight) * weight.shape[1] <= products.LARGEST
                    for module in self.policy.modules()
                    for weight in module.parameters(recurse=False) if weight.dim() > 1 and len(weight) > 1)
        return products.Tiles if every or self.vecenv.num_threads == 1 else None

    # -- memory
    # ----------------------------------------------------------------------------------------------

    def register(self, arena):
        """Ask the arena for everything that lives as long as the engine."""
        T, N = self.horizon, self.num_agents
        self.arena = arena
        arrays = vars(self.vecenv.allocate(T))
        self.host = {name: None if array is None else torch.from_numpy(array)
                     for name, array in arrays.items()}
        for name, shape in (("logprobs", (T, N)), ("values", (T + 1, N)), ("bootstraps", (T, N))):
            arena.register(name, shape)
        if models.squash_of(self.policy) is not None:
            arena.register("samples", (T, N, self.vecenv.action_dims))
        # the number of each step, in the arena because a captured CUDA graph reads it there
        arena.register("steps", (T,), torch.int64)
        state = self.policy.initial_state(N) if hasattr(self.policy, "initial_state") else {}
        self.state = dict.fromkeys(state)
        self.largest = max(agents.stop - agents.start for agents in self.vecenv.ranges)
        for name, tensor in state.items():
            arena.register(f"state/{name}", tensor.shape)
            arena.register(f"initial_state/{name}", tensor.shape)
            for w in range(self.vecenv.num_workers):
                arena.register(f"scratch {w}/{name}",
                               (len(tensor), self.largest, *tensor.shape[2:]))

    def bind(self):
        """Take the views out of the allocated arena."""
        arena, N = self.arena, self.num_agents
        self.storage, self.squash = self._storage(), models.squash_of(self.policy)
        # The loss needs what was drawn: the actions, or with squash the samples before the tanh.
        self.samples = self.storage["actions"] if self.squash is None else arena["samples"]
        self.logprobs, self.values, self.bootstraps = arena["logprobs"], arena["values"], arena["bootstraps"]
        self.state, names = {name: arena[f"state/{name}"] for name in self.state}, list(self.state)
        self.initial_state = {name: arena[f"initial_state/{name}"] for name in names}
        self.scratch = [{name: arena[f"scratch {w}/{name}"] for name in names}
                        for w in range(self.vecenv.num_workers)]
        flags = torch.zeros(N, dtype=torch.uint8, device=self.torch_device)
        self.flags = flags, flags + 1  # resets (0) and valid (1) for episodes' last observations
        self.rows = [[self._row(agents, t) for t in range(self.horizon + 1)]
                     for agents in self.vecenv.ranges]

    def _storage(self):
        """What the policy reads: here the arrays that the environments write."""
        return self.host

    def _row(self, agents, t):
        """The views that a worker needs at step t of a buffer, made once: no step slices."""
        s, host = self.storage, self.host
        row = {name: s[name][t, agents] if s[name] is not None else None for name in SEEN}
        row["values"] = self.values[t, agents]
        if t == self.horizon:
            return row
        ends = {name: host[name][t, agents] for name in ("truncations", "terminals")}  # numpy's are quicker to ask
        return {**row, "step": self.arena["steps"][t : t + 1], "logprobs": self.logprobs[t, agents],
                "actions": s["actions"][t, agents], "samples": self.samples[t, agents],
                **{name: end if end.is_cuda else end.numpy() for name, end in ends.items()}}

    # -- the rollout
    # ----------------------------------------------------------------------------------------------

    def rollout(self, number):
        """Fill the storage with `horizon` steps of all agents; number: of rollouts before this one.
        Returns the seconds that were spent in environments or in waiting for them."""
        with torch_threads(1):  # more of torch's threads would take the workers' cores
            self._begin(number)
            seconds = self._run_workers()
        # Workers run side by side, so this is the mean over those that had environments to step.
        return sum(seconds) / (max(1, sum(one > 0 for one in seconds)) if self.side_by_side else 1)

    def _begin(self, number):
        """Everything stands at step 0 of a rollout."""
        self.vecenv.begin()
        self.bootstraps.zero_()
        self.arena["steps"].copy_(number * self.horizon + torch.arange(self.horizon))
        for name, state in self.state.items():
            if self.config["state"] == "zero":
                state.zero_()
            self.initial_state[name].copy_(state)

    def _run_workers(self):
        """The rollout; returns the seconds that each worker spent in environments."""
        workers, threads = range(self.vecenv.num_workers), self._threads(self.vecenv.agents_per_batch)
        if self.side_by_side and self._is_thread_safe():
            return self.in_parallel(self._rollout_in_a_thread, workers)
        with kernels.threads(self.vecenv.num_threads), torch_threads(threads):
            return [self._rollout(worker) for worker in workers]

    def _is_thread_safe(self):
        """Return whether the network is still `thread_safe`; if not, one thread acts from now on."""
        self.side_by_side = not self.through_torch or thread_safe(self.policy)
        return self.side_by_side

    def _rollout_in_a_thread(self, worker):
        with torch_threads(1):
            return self._rollout(worker)

    def in_parallel(self, function, workers):
        """[function(worker), ...], each in a thread of its own, of which the first is this one: to
        wake another takes as long as a small minibatch."""
        first, *others = workers
        calls = [self.pool.submit(function, worker) for worker in others]
        try:
            with kernels.threads(self.vecenv.threads_per_worker):
                return [function(first), *(call.result() for call in calls)]
        finally:
            # After an interrupt too, because workers must not write while a checkpoint is saved.
            wait(calls)

    @torch.no_grad()
    def _rollout(self, worker):
        """One worker's share of the rollout; returns its seconds in
        environments, waits included."""
        vecenv, seconds, begun = self.vecenv, 0.0, clock()
        while (ready := vecenv.wait(worker)) is not None:
            buffer, t = ready
            seconds += clock() - begun
            if t > 0 and self.rows[buffer][t - 1]["truncations"].any():
                self._bootstrap(worker, buffer, t - 1)
            self.step(worker, buffer, t)
            begun = clock()
            if t < self.horizon:
                vecenv.advance(buffer)
        return seconds

    def step(self, worker, buffer, t):
        """Act on row t of a buffer: actions, log-probabilities and values. At t = horizon it
        computes only V, to bootstrap from, and changes no state."""
        agents, row = self.vecenv.ranges[buffer], self.rows[buffer][t]
        state = {name: tensor[:, agents] for name, tensor in self.state.items()}
        if t == self.horizon:
            state = self._copy_state(worker, state)
        outputs, log_std = self._act(worker, row["observations"], state, row["resets"],
                                     row["valid"])
        if t == self.horizon:
            row["values"].copy_(outputs[:, -1])
            return
        kernels.sample(outputs, **self._drawn(row, agents), log_std=log_std)

    def _drawn(self, row, agents):
        """What `kernels.sample` draws a row's actions with, and where to."""
        return {"actions": row["actions"], "logprobs": row["logprobs"], "values": row["values"],
                "seed": self.config["seed"], "step": row["step"], "first_agent": self.first_agent + agents.start,
                "heads": self.heads, "masks": row["action_masks"], "squash": self.squash, "samples": row["samples"]}

    def _act(self, worker, observations, state, resets, valid):
        """outputs (n, A + 1) and log_std of one step; updates the tensors in `state` in place."""
        view = {**state, "resets": resets, "valid": valid}
        # No cache, because threads share it: one could get a weight that another's CUDA stream is
        # still casting.
        with self._autocast(cache_enabled=False), self._tiles(len(observations)):
            outputs, log_std = models.join_outputs(*models.one_step(self.policy,
                                                                    observations, view))
        if outputs.shape[-1] != self.width or (log_std is None) != self.chooses:
            models.check_logits(self.policy, outputs, log_std, self.vecenv.action_heads,
                                self.vecenv.action_dims)
        for name, tensor in state.items():
            tensor.copy_(view[name])
        return outputs.float().contiguous(), None if log_std is None else log_std.float().contiguous()

    def _bootstrap(self, worker, buffer, t):
        """V of the final observations of agents that step t truncated; the state is that before the
        reset."""
        agents, row = self.vecenv.ranges[buffer], self.rows[buffer][t]
        cut = row["truncations"] & ~row["terminals"]  # after a terminal nothing follows
        cut = torch.from_numpy(np.flatnonzero(cut)) + agents.start
        if len(cut) == 0:
            return
        state, flags = self._copy_state(worker, self.state, cut), (flag[: len(cut)]
                                                                   for flag in self.flags)
        outputs, _ = self._act(worker, self.storage["final_observations"][cut], state, *flags)
        self.bootstraps[t, cut] = outputs[:, -1]

    def _copy_state(self, worker, state, index=None):
        """The recurrent state of these agents, or of those in `index`, copied to the worker's
        scratch."""
        copies = {}
        for name, tensor in state.items():
            copies[name] = self.scratch[worker][name][:, : tensor.shape[1] if index is None
                                                      else len(index)]
            for source, copy in zip(tensor, copies[name], strict=True):
                copy.copy_(source) if index is None else torch.index_select(source, 0, index, out=copy)
        return copies

    def _threads(self, rows):
        """torch's threads within an operation: all cores if a pass of `rows` rows is large enough,
        else one, because threads would wait longer than they work; one also with `self.tiles`,
        because torch's threads spin on the cores that these want."""
        return self.vecenv.num_threads if not self.tiles and self._operations(rows) > WORTH_THREADS else 1

    def _operations(self, rows):
        """Of a pass of `rows` rows. A network that uses a weight more than once a row, as a convolution does, says its
        `operations` a row, a number."""
        said = getattr(self.policy, "operations", None)
        return rows * (said if isinstance(said, int | float) else
                       2 * sum(weight.numel() for weight in self.policy.parameters()))

    def _tiles(self, rows):
        """What a pass of `rows` rows goes through: `self.tiles`, if that is enough rows for it."""
        return self.tiles() if self.tiles and rows >= products.ROWS else contextlib.nullcontext()

    def _autocast(self, **options):
        """The network's products at train.precision."""
        enabled = self.precision != torch.float32
        return torch.autocast(self.torch_device.type, self.precision, enabled=enabled, **options)

    def on_host(self, name, part=...):
        """One of the rollout's arrays, or a part of it, to log figures of."""
        return self.host[name][part]

    def return_range(self, running, low, high):
        """kernels.return_range of the last rollout."""
        arrays = (self.host[name].numpy() for name in ("rewards", "valid", "resets"))
        return kernels.return_range(*arrays, running.numpy(), low, high)

    def usage(self):
        """{"GPU": "87%", ...} for a dashboard."""
        return {}

    def _start_pool(self):
        """Threads for the rollout's workers and the learners."""
        self.pool = ThreadPoolExecutor(max(self.vecenv.num_workers, self.num_learners), "worker",
                                       kernels.set_threads, (self.vecenv.threads_per_worker,))
        # A waiting worker gets the interpreter's lock after 0.2 ms instead of 5, by which rollouts
        # take a tenth less time.
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)

    def release(self):
        """Stop the workers."""
        if self.pool is not None:
            self.pool.shutdown()
            sys.setswitchinterval(self.interval)


class Autograd(Acting):
    """Any nn.Module through its own forward and torch's autograd, on a CPU: it acts as `Acting` does, and learns.

    A subclass overrides `register`, `bind`, `_act`, and `learn` or `_learn`, and any other method that it can do
    faster. It reads from the arena what the trainer writes (index, segment_weights, advantages,
    settings), and writes there what the trainer reads (logprobs, values, bootstraps, new_values,
    new_ratios, sums), all in the shapes that docs/design.md has.
    """

    in_parts = True  # a minibatch goes through the network in parts small enough for a cache
    worth_a_learner = 3e8  # operations of a minibatch, gradient and all, for each thread that learns a share of it
    blocking_classes = ()  # without `thread_safe`, if one thread learns for that reason alone

    def __init__(self, policy, vecenv, config, segments, first_agent):
        super().__init__(policy, vecenv, config, segments, first_agent)
        self.forward = (torch.compile(policy, mode=config["compile_mode"]) if config["compile"]
                        else policy)
        self.extra_loss = load_attribute("train.loss", config["loss"]) if config["loss"] else None
        self.compared = False  # whether a minibatch was compared with the rollout
        self._set_learners(self._count_learners())
        if self.side_by_side or self.num_learners > 1:
            self._start_pool()

    def _undivided(self):
        """Whether a minibatch goes through the network as a whole: on a GPU, and if parts would give another result
        (with train.loss, or a layer that takes moments of its batch)."""
        return not self.in_parts or self.extra_loss is not None or self._takes_moments()

    def _count_learners(self):
        """How many threads learn, each from its share of a minibatch. One learns with torch.compile, with a network
        that is not `thread_safe`, and with train.max_minibatch_size, which bounds what is in memory."""
        if self._undivided() or self.config["compile"] or (self.through_torch and self.config["max_minibatch_size"]):
            return 1
        worth = 3 * self._operations(self.segments * self.span) // self.worth_a_learner
        count = int(max(1, min(worth, self.vecenv.num_threads, self.segments)))
        if count == 1 or not self.through_torch or thread_safe(self.policy):
            return count
        self.blocking_classes = [] if needs_one_thread(self.policy) else classes_not_marked_thread_safe(self.policy)
        return 1

    def _set_learners(self, count):
        self.num_learners = count
        self.at_once = self._at_once()  # how many steps go through the network together

    def _at_once(self):
        """Steps that go through the network at once in learning: train.max_minibatch_size. If it is
        not set, equal parts of a learner's share that a cache may hold, or all of a minibatch that is not divided."""
        whole, most = self.segments * self.span, self.config["max_minibatch_size"]
        if most or self._undivided():
            return min(whole, most or whole)
        widths = [len(weight) for weight in self.policy.parameters() if weight.dim() > 1]
        widest = max(math.prod(self.vecenv.observation_shape), *widths, 1)
        share = -(-self.segments // self.num_learners)
        parts = -(-share * self.span // max(self.span, PASS // widest))
        return -(-share // parts) * self.span

    def register(self, arena):
        super().register(arena)
        for name in ("new_values", "new_ratios"):
            arena.register(name, (self.span, self.segments))
        # the sums of the loss's statistics, and one of train.loss
        arena.register("sums", (self.num_learners, kernels.SUMS + 1), torch.float64)
        for group in self._groups()[1:]:  # the trainer registers the first learner's itself
            for name, parameter in self.policy.named_parameters():
                arena.register(f"{group}/policy.{name}", parameter.shape, group=group)

    def bind(self):
        super().bind()
        arena = self.arena
        self.new_values, self.new_ratios, self.sums = arena["new_values"], arena["new_ratios"], arena["sums"]
        self.index = arena["index"]
        arrays = {**{name: self.storage[name] for name in SEEN}, "samples": self.samples, "logprobs": self.logprobs,
                  "values": self.values, "advantages": arena["advantages"]}
        self.columns = SimpleNamespace(**{name: self._as_columns(array) for name, array in arrays.items()})
        self.loss_settings, self.segment_weights = arena["settings"], arena["segment_weights"]
        self.gradients = [arena.flat(group) for group in self._groups()]
        self.own = [[(parameter, arena[f"{group}/policy.{name}"]) for name, parameter in self.policy.named_parameters()]
                    for group in self._groups()]

    def _as_columns(self, array):
        """A rollout's array (T or T + 1, N, ...) as (steps, segments, ...): each column of it is what may be drawn, an
        agent's T steps, or with train.draw steps a single one."""
        return None if array is None else array[: self.horizon].view(self.span, -1, *array.shape[2:])

    def _groups(self):
        """Each learner's gradients, by the name of their group in the arena."""
        return ["gradients", *(f"gradients {worker}" for worker in range(1, self.num_learners))]

    @contextlib.contextmanager
    def learning(self):
        """Within it, the threads are those of learning; several learners only if nothing has been put on the network
        meanwhile that is for one."""
        if self.through_torch and self.num_learners > 1 and not thread_safe(self.policy):
            self._set_learners(1)
        with kernels.threads(self.vecenv.num_threads), torch_threads(self._threads(self.at_once)):
            yield

    @staticmethod
    def play(key, function, *arguments):
        """Run a part of the epoch; fast/fused.py replays what it has captured under `key`."""
        function(*arguments)

    def learn(self):
        """Compute the minibatch's loss, this process's share of it. Its gradients replace those in
        the arena, its statistics go to `sums`, and the values and ratios of the segments in `index`
        go to new_values and new_ratios."""
        self.in_parallel(self._learn, range(self.num_learners))
        for gradient in self.gradients[1 : self.num_learners]:  # in this order: an exact resume rests on it (runs.py)
            self.gradients[0].add_(gradient)
        if not self.compared:
            self._compare_with_rollout()

    def _compare_with_rollout(self):
        """Say if what learns is not what acted: before a run's first update, values and the probabilities of actions
        must be those of the rollout."""
        self.compared = True
        alive, seen = (getattr(self.columns, name).index_select(1, self.index) for name in ("valid", "values"))
        alive = alive != 0
        divergence = 0.5 * (self.new_ratios[alive] - 1).square().mean().item()  # Schulman's k2, for ratios near 1
        error = (self.new_values - seen)[alive].square().mean() / (seen[alive].square().mean() + 1e-12)
        known = self.precision != torch.float32 or self._takes_moments()  # it rounds more, or is told of anyway
        if max(divergence, error.item()) > OTHER and not known and data_parallel.connect().rank == 0:
            name = type(models.wrapped(self.policy)).__name__
            print(f"network: {name} does not learn what it does: before the first update, its outputs are not those of "
                  f"the rollout (probabilities by {divergence:.1e}, values by {error:.1e}). Dropout and other noise do "
                  "that. So does what a network keeps in itself from call to call, a memory or statistics: "
                  "initial_state and the state are for it (docs/scripts.md).", file=sys.stderr)

    def _share(self, worker):
        """(the first, the one behind the last) of a learner's segments of the minibatch."""
        return self.segments * worker // self.num_learners, self.segments * (worker + 1) // self.num_learners

    def _learn(self, worker):
        """One learner's share of the minibatch."""
        step, (first, last) = self.at_once // self.span, self._share(worker)
        threads = self.vecenv.num_threads // self.num_learners
        self.gradients[worker].zero_()
        with kernels.threads(threads), torch_threads(min(threads, self._threads(self.at_once))):
            for start in range(first, last, step):
                self._learn_part(self.index[start : min(start + step, last)], start, worker)

    def _inputs(self, part):
        """observations and state of these segments, as a network takes them over time."""
        return self.columns.observations.index_select(1, part), self._state_of(part)

    def _state_of(self, part):
        """These segments' memory before their first step, resets and valid, as models.over_time takes them."""
        state = {name: tensor[:, part] for name, tensor in self.initial_state.items()}
        return state | {name: getattr(self.columns, name).index_select(1, part) for name in ("resets", "valid")}

    def _pass(self, observations, state):
        """logits and value of these segments, as the network gave them, outputs (T, n, A + 1) and log_std."""
        # autocast's cache of cast weights belongs to all threads: one would use, or empty, another's.
        with self._autocast(cache_enabled=self.num_learners == 1), self._tiles(self.at_once):
            logits, value = models.over_time(self.policy, observations, state, self.forward)
            return logits, value, *models.join_outputs(logits, value)

    def _learn_part(self, part, start, worker):
        """Add the gradients of the minibatch's segments `part`, of which `start` others come before, to those of a
        learner."""
        observations, state = self._inputs(part)
        logits, value, outputs, log_std = self._pass(observations, state)
        outputs = outputs.float().contiguous()
        if not self.compared and worker == start == 0 and self.chooses and models.are_probabilities(
                outputs.detach(), self.vecenv.action_heads):
            warn_once(f"network: {type(models.wrapped(self.policy)).__name__} returns probabilities, but logits are "
                      "expected, of which a softmax is taken: all actions stay about as likely, and little is learnt. "
                      "Return what goes into the softmax, or the probabilities' logarithm.")
        grads = [torch.empty_like(outputs), None]
        if log_std is not None:
            log_std = log_std.float().contiguous()
            grads[1] = torch.empty_like(log_std)
        fixed = None if log_std is None else log_std.detach()
        self._loss(outputs.detach(), grads[0], start, self.sums[worker, : kernels.SUMS],
                   fixed, grads[1])
        pairs = list(zip((outputs, log_std), grads, strict=True))
        if self.extra_loss is not None:
            with self._tiles(self.at_once):
                pairs.append((self._extra(part, observations, logits, value), None))
        leaves = [(x, grad) for x, grad in pairs if x is not None and x.requires_grad]
        if not leaves or self.extra_loss is None:
            warn_of_detached(self.policy, logits, value)
        losses, slopes = [x for x, _ in leaves], [grad for _, grad in leaves]
        if worker == 0:
            torch.autograd.backward(losses, slopes)
            return
        own = [(parameter, total) for parameter, total in self.own[worker] if parameter.requires_grad]
        if not own:
            return
        grads = torch.autograd.grad(losses, [parameter for parameter, _ in own], slopes, allow_unused=True)
        for (_, total), grad in zip(own, grads, strict=True):
            if grad is not None:
                total.add_(grad)

    def _extra(self, index, observations, logits, value):
        """train.loss of these segments, in proportion to the minibatch that they are a part of. It
        gets a namespace: observations (T, M, ...), logits as the network gave them, values,
        old_values, logprobs (of the rollout), advantages, returns, resets, valid (T, M), actions, state,
        as models.over_time takes it, and action_masks if the environment has them. If a tanh squashes
        the actions, these are the Gaussian's samples, and logprobs theirs."""
        names, T = {"samples": "actions", "values": "old_values"}, self.span
        taken = {names.get(name, name): tensor.index_select(1, index) for name, tensor in vars(self.columns).items()
                 if tensor is not None and name != "observations"}
        if self.squash is not None:  # 1 - tanh² u = sech² u
            of_tanh = 2 * (math.log(2) - taken["actions"] - softplus(-2 * taken["actions"]))
            taken["logprobs"] += (self.squash[2] + of_tanh * (self.squash[1] > 0)).sum(-1)
        logits = [head.float() for head in logits] if isinstance(logits, list | tuple) else (
            logits.float() if isinstance(logits, torch.Tensor) else logits)
        minibatch = Minibatch(observations=observations, logits=logits,
                              values=value.reshape(T, -1).float(), state=self._state_of(index),
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
        self.sums[0, kernels.SUMS].add_(extra.detach())
        return extra

    def _loss(self, outputs, grad, start, sums, log_std=None, grad_log_std=None):
        c = self.columns
        kernels.ppo_loss(
            outputs, c.samples, c.logprobs, c.values, c.advantages, self.segment_weights, c.valid, self.loss_settings,
            grad, self.new_values, self.new_ratios, sums, heads=self.heads, log_std=log_std, grad_log_std=grad_log_std,
            squash=self.squash, masks=c.action_masks, index=self.index, start=start)

    def take_over(self, engine):
        """Take over the memory that another engine, now released, has registered."""
        self.arena, self.host, self.state = engine.arena, engine.host, engine.state
        self._set_learners(min(self.num_learners, engine.num_learners))
        self.bind()
        return self

    def forget(self):
        """Forget what was captured; see fast/fused.py."""


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
        torch.manual_seed(0)  # a network may draw noise; `on_trial` puts the generator back
        state, outputs = beginning(AGENTS), []
        names = set(state)
        for now in seen:
            outputs.append(models.join_outputs(*models.one_step(policy, now, state))[0])
            added = state.keys() - names
            state = state if keep else {name: state[name] for name in names}
        return torch.stack(outputs), added

    name, step = type(policy).__name__, "forward_eval" if hasattr(policy, "forward_eval") else "forward"
    try:
        with models.on_trial(policy):
            steps, added = by_steps(False)
            if added and _error(by_steps(True)[0], steps) > 1e-3:
                return (f"{name}.{step} leaves {', '.join(sorted(added))} in the state, which would be lost: "
                        "initial_state(num_agents) must return it, zeros of (layers, num_agents, size), and forward "
                        "take time first, (T, N, *observation). Or let --rnn.name lstm or gru be the memory.")
            if not hasattr(policy, "forward_eval") or getattr(policy, "takes_batches", False):
                return None
            if _error(over_time(seen), steps) > 1e-3 > _error(over_time(seen.transpose(0, 1)).transpose(0, 1), steps):
                return (f"{name}.forward takes the first dimension for agents and the second for time. It is given "
                        "time first, (T, N, *observation): is a layer batch_first=True?")
    except Exception:  # whatever it is, the run itself will say it
        return None
    return None


def _error(ours, theirs):
    """The relative error of the norm."""
    return float((ours - theirs).norm() / (theirs.norm() + 1e-6))


class Restated:
    """What fast/compiled.py's and fast/fused.py's engines share, beside Autograd or Graphs. Sample: their
    network, for `difference`; actors: one for each worker, which steps its agents."""

    def bind(self):
        super().bind()
        self.flat_observations = self.storage["observations"].view(self.horizon + 1, self.num_agents, -1)
        self.flat_columns = self._as_columns(self.flat_observations)
        self.modules, log_std = list(self.policy.named_modules()), self.policy.decoder.log_std
        self.log_std = None if log_std is None else log_std.data  # (A,); None for discrete actions

    def _act(self, worker, observations, state, resets, valid):
        return self.actors[worker].step(observations, state.get("mingru"), resets, valid), self.log_std


# --------------------------------------------------------------------------------------------------
# Which engine runs

def plain_engine(config):
    """The class of the engine that runs any network on train.device."""
    if config["device"] == "cuda":
        from fast.fused import Graphs

        return Graphs
    return Autograd


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


def any_network(engine):
    """An engine for any network, in the place of the fast `engine`."""
    engine.release()
    made = plain_engine(engine.config)(engine.policy, engine.vecenv, engine.config, engine.segments,
                                       engine.first_agent)
    return made.take_over(engine)
