"""Vectorization: many environments as one set of time-major arrays.

    import vector
    vecenv = vector.make("breakout", num_envs=4096, num_buffers=8, num_threads=2, seed=0)
    observations, infos = vecenv.reset()
    observations, rewards, terminals, truncations, infos = vecenv.step(actions)

That is the synchronous form, for scripts. The trainer uses the asynchronous form, which copies
nothing (with environments in C its engines may step the buffers in a kernel, in place of `wait` and
`advance`; see Native.can_step_in_kernels):

    storage = vecenv.allocate(horizon)      # arrays (T, N, ...)
    vecenv.begin()                          # the last row becomes the first; t = 0 in every buffer
    while (ready := vecenv.wait(actor)):    # a buffer of this actor with a row to act on
        buffer, t = ready                   # its agents are vecenv.ranges[buffer]
        ...write storage.actions[t, agents], unless t is the horizon (only a value is needed)...
        vecenv.advance(buffer)              # writes rewards[t], observations[t + 1], ...

A *buffer* is a contiguous range of environments, and of agents. Buffers never touch each other's
slices; each has its own t. An *actor* is a thread of this process that runs the network for its
share of the buffers and steps them. A *worker* is a process, or an actor of Ray, that steps
environments in Python. A backend with workers has one actor, and `wait` returns the buffer that is
ready first.

`Native` steps environments in C. `Serial`, `Multiprocessing` and `Ray` step PufferEnvs, Gymnasium's
and PettingZoo's (see emulation.py) in this process, in others and on other machines. `Tensors`
steps those of torch and JAX on their device (see tensors.py). Environments in Python can also be
stepped batch by batch:

    vecenv = vector.make("gym/CartPole-v1", num_envs=64, num_workers=4, batch_size=32)
    vecenv.async_reset(seed=0)              # then the first buffer that is ready:
    observations, rewards, terminals, truncations, infos, agent_ids, masks = vecenv.recv()
    vecenv.send(actions)

To add a backend, read `Vector`.
"""

import contextlib
import faulthandler
import functools
import inspect
import itertools
import os
import pickle
import select
import sys
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import torch

import absolute_imports  # noqa: F401  first
import configuration
import data_parallel
import emulation
import environments
import flat_spaces
import ocean
import ocean.device
import processes
import tensors
import workers
from arena import default_stream, run, threads
from auto import plural
from errors import ConfigError, EnvError, WorkerError, require
from fast import cuda_cpp
from workers import POLICY_INPUTS


def physical_cores():
    """Count this process's physical cores: its share, if torchrun started several."""
    allowed = processes.cores()
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _most_workers(num_envs):
    """Return the largest number up to the cores that divides the environments."""
    return max([n for n in range(1, physical_cores() + 1) if num_envs % n == 0], default=1)


def _check_divides(setting, value, num_envs, multiple_of=1):
    """Raise ConfigError unless a number divides the environments into whole workers."""
    if value < 1 or num_envs % value or value % multiple_of:
        choices = [n for n in range(multiple_of, num_envs + 1, multiple_of) if num_envs % n == 0]
        workers = f" into workers of {multiple_of}" if multiple_of > 1 else ""
        raise ConfigError(f"{setting} = {value}: does not divide {num_envs} environments evenly"
                          f"{workers}. It can be {', '.join(map(str, choices[:32]))}.")


PAGE = 4096  # bytes
ROW = ("observations", "actions", "rewards", "terminals", "truncations", "final_observations",
       "valid", "action_masks")  # the order of ocean.rows


def aligned_zeros(shape, dtype):
    """Return np.zeros that begins on a page.

    The rounding of a matrix product depends on the alignment of its operands, so a run repeats bit
    for bit only if that does not depend on the allocator. For a GPU whole pages are pinned.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = np.zeros(-(-size // PAGE) * PAGE + PAGE, np.uint8)
    skip = -block.ctypes.data % PAGE
    return block[skip : skip + size].view(dtype).reshape(shape)


class Vector(contextlib.AbstractContextManager):
    """Define what a backend provides, and the synchronous API that follows from it.

    To add a backend, derive from this class, or from `Emulated` for environments in Python.
    `make(env, backend=YourClass)` calls it with the arguments of `Emulated.__init__`. For the
    command line, configuration.BACKENDS has its name, and BACKENDS the class at the same place.
    tests/test_vector.py has a backend that derives from `Emulated`.

    Attributes [default]:
        name: of the environment; seed: of the environments
        num_envs: of all buffers
        single_observation_space, single_action_space: flat, of one agent
        has_valid [True]: whether agents may be inactive
        ranges: the slice of agents of each buffer, in order. `_set_shapes` sets them, the spaces,
            num_buffers, num_agents, agents_per_batch and agents_per_recv (of one buffer),
            observation_shape, action_heads (sizes of discrete choices, None for a Box),
            action_dims (numbers of an action: heads, or the size of a Box), has_action_masks
        num_actors: threads that call `wait`, each with its number from 0; threads_per_actor: cores
            of each; num_threads: of all
        num_workers [1]: processes that step environments in Python
        driver_env [itself]: the object whose spaces policies read. Of environments in Python it
            also has obs_dtype and env_single_observation_space
        storage [None until `allocate`]: the arrays of `new_storage`
        closed [False until `close`]
        timeout: seconds after which a step in Python that does not return is reported
        _t: the row of each buffer to act on; `begin` sets it to 0, each step adds 1
        device [None]: the torch.device of the environments' own tensors; see Tensors
        in_graphs [False]: whether a CUDA graph can step them; see GpuEnvs
        library [absent]: the ocean.Library of environments in C
        can_step_in_kernels [False]: whether kernels step with `addresses`; see Native

    Methods. Brackets hold what this class itself does; a subclass writes those without brackets:
        allocate(horizon) [all of it]: set `storage` to new_storage(horizon, zeros), where
            zeros(shape, dtype) makes an array, call `_bind()`, `restart(self.seed)` and `begin`,
            and return the storage
        _bind(): prepare for stepping in `storage`
        restart(seed=None): begin new episodes; write the last row, which `begin` moves to row 0, of
            observations, resets (1), valid and action_masks
        begin() [all of it]: move the last row to row 0 and set t to 0 in each buffer
        wait(actor=0) [returns its buffers in turn]: (buffer, t) of the next buffer of this actor
            whose row t is there to act on; None when each has been returned with t = horizon
        advance(buffer): step its environments with the actions of row t. By the time that `wait`
            returns the buffer again, row t of rewards, terminals and truncations is written, row
            t + 1 of observations, resets, valid and action_masks, and final_observations of the
            agents that step t truncated
        _settle() [nothing]: wait until all that `advance` began is written
        log(env=None): {name: mean} over the episodes that ended since the last call, and their
            number n; {} for none
        save() [an empty array]: the state of all environments as a uint8 array
        load(saved) [begins new episodes]: restore that state
        set_first_env(first_env) [adds to the seed]: called before `allocate` if other ranks have
            the environments before that number
        render(index=0): environment `index` as an RGB array, for `eval`
        close() [calls _close() once]
        _close(): free what the environments hold
    """

    storage = None
    device = None
    has_valid = True
    closed = in_graphs = can_step_in_kernels = False
    num_workers = 1
    _next_seed = None  # of the first reset of a script
    _driver = None
    _arrays = None  # stepped into in place of `storage`; see write_to
    _watched_since = 0.0
    _received = ()  # the buffers of the last `recv`

    @contextlib.contextmanager
    def _watchdog(self, t):
        """Print all tracebacks if step t, in this process, takes over vec.timeout."""
        horizon, now, is_inside = len(self.storage.actions), time.monotonic(), False
        if horizon > 1 and (t == 0 or now > self._watched_since + self.timeout / 10):
            self._watched_since = now
            seconds = min(self.timeout, threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(seconds, file=sys.__stderr__)
        try:
            yield
            is_inside = t + 1 < horizon
        finally:
            if horizon > 1 and not is_inside:
                faulthandler.cancel_dump_traceback_later()

    def set_first_env(self, first_env):
        """Number the environments from first_env on; call it before `allocate`."""
        self.seed += first_env

    @property
    def driver_env(self):
        return self if self._driver is None else self._driver

    @functools.cached_property
    def action_space(self):
        """Return the action space of one `recv`: agents_per_recv actions."""
        return gymnasium.vector.utils.batch_space(self.single_action_space, self.agents_per_recv)

    @functools.cached_property
    def observation_space(self):
        """Return the observation space of one `recv`: agents_per_recv observations."""
        return gymnasium.vector.utils.batch_space(self.single_observation_space,
                                                  self.agents_per_recv)

    def new_storage(self, horizon, zeros):
        """Make the arrays of a rollout with `zeros(shape, dtype)`."""
        T, N = horizon, self.num_agents
        shape, dtype = self.observation_shape, self.single_observation_space.dtype
        size = int(np.prod(shape)) * dtype.itemsize + 12 + 4 * self.action_dims
        processes.check_memory((T + 1) * N * size, "the rollout's arrays")
        storage = SimpleNamespace(
            observations=zeros((T + 1, N, *shape), dtype),  # row t: what the policy sees at t
            resets=zeros((T + 1, N), np.uint8),  # 1: the observation at t is an episode's first
            valid=zeros((T + 1, N), np.uint8),  # 0: the agent does not act at t
            action_masks=(zeros((T + 1, N, sum(self.action_heads)), np.uint8)
                          if self.has_action_masks else None),
            actions=zeros((T, N, self.action_dims),
                          np.dtype(np.int32 if self.action_heads else np.float32)),
            rewards=zeros((T, N), np.float32),  # row t: the result of the action at t
            terminals=zeros((T, N), np.uint8),
            truncations=zeros((T, N), np.uint8),
            final_observations=zeros((N, *shape), dtype),  # of the agents truncated just now
        )
        storage.valid[:] = 1
        if storage.action_masks is not None:
            storage.action_masks[T] = 1
        return storage

    def _set_shapes(self, env, ranges):
        """Set the buffers, and the shapes of a rollout's arrays from one environment."""
        self.ranges = ranges
        self.num_buffers = len(ranges)
        self.num_agents = ranges[-1].stop
        self.agents_per_batch = ranges[0].stop
        self.agents_per_recv = self.num_agents
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.has_action_masks = env.has_action_masks
        self.observation_shape = self.single_observation_space.shape
        action = flat_spaces.FlatAction(self.single_action_space)
        self.action_heads, self.action_dims = action.heads or None, action.columns

    def allocate(self, horizon):
        """Make the arrays of `horizon` steps and begin the first episodes."""
        self._make_storage(horizon)
        self.restart(self.seed)
        self.begin()
        return self.storage

    def _make_storage(self, horizon):
        self.storage = self.new_storage(horizon, aligned_zeros)
        self._bind()
        self._next_seed = self.seed

    def begin(self):
        """Begin a rollout: the last row becomes the first, and t is 0."""
        arrays = self._arrays or vars(self.storage)
        for name in POLICY_INPUTS:
            if arrays[name] is not None:
                arrays[name][0] = arrays[name][-1]
        self._t = [0] * self.num_buffers

    def wait(self, actor=0):
        """Return (buffer, t) of this actor's next buffer, None after t = T in all.

        It is the same buffer until that is done, so that its environments and activations stay in
        the core's cache. t = T is returned once, for the value of the last row.
        """
        horizon = len(self.storage.actions)
        for buffer in range(actor, self.num_buffers, self.num_actors):
            t = self._t[buffer]
            if t == horizon:
                self._t[buffer] += 1
            if t <= horizon:
                return buffer, t
        return None

    def _settle(self):
        """Wait until all that `advance` began is written."""

    def reset(self, seed=None):
        """Begin new episodes; return (observations (N, *shape), infos).

        The first call uses the vector's seed, later calls without one continue the random numbers.
        """
        self._check_open()
        if self.storage is None or len(self.storage.actions) != 1:
            self._make_storage(1)
        self.restart(self._next_seed if seed is None else seed)
        self._next_seed, self._received = None, ()
        self.begin()
        return self.storage.observations[0], []

    def step(self, actions):
        """Return (observations, rewards, terminals, truncations, infos).

        The arrays are views that the next step overwrites. actions: (N,) or (N, heads) integers, or
        (N, dims) floats. Raises RuntimeError before the first reset, and ValueError for actions of
        another shape or outside their space.
        """
        if self.storage is None or len(self.storage.actions) != 1:
            raise RuntimeError("step() needs reset() first, and cannot be called while a trainer "
                               "uses this vector.")
        self._settle()
        self._received = range(self.num_buffers)
        self.send(actions)
        self._settle()
        return self._results_of(range(self.num_buffers))

    def _results_of(self, buffers):
        s, agents = self.storage, self._agents_of(buffers)
        flags = s.terminals[0, agents].view(bool), s.truncations[0, agents].view(bool)
        return s.observations[1, agents], s.rewards[0, agents], *flags, self._infos_of(buffers)

    def _agents_of(self, buffers):
        return slice(self.ranges[buffers[0]].start, self.ranges[buffers[-1]].stop)

    def _infos_of(self, buffers):
        log = self.log()
        return [log] if log else []

    def _check_open(self):
        if self.closed:
            raise RuntimeError("this vector is closed: make another one.")

    def _check_actions(self, actions, agents):
        actions = np.asarray(actions)
        if actions.ndim == 0 or len(actions) != agents or actions.size != agents * self.action_dims:
            raise ValueError(f"actions have shape {actions.shape}, expected ({agents}, "
                             f"{self.action_dims}): {agents} agents of {self.single_action_space}.")
        if actions.dtype.kind == "f" and not (actions % 1 == 0 if self.action_heads
                                              else np.isfinite(actions)).all():
            kind = "a whole number" if self.action_heads else "finite"
            raise ValueError(f"an action is not {kind}: {self.single_action_space}.")
        if self.action_heads:
            # As unsigned numbers negative ones are large, so one comparison checks both ends.
            actions = actions.astype(np.int64, copy=False).view(np.uint64)
            if (actions.reshape(agents, -1) >= np.array(self.action_heads, np.uint64)).any():
                raise ValueError(f"an action lies outside {self.single_action_space}.")

    def async_reset(self, seed=None):
        """Begin new episodes; `recv` returns the observations of the first batch."""
        self.reset(seed)

    def _next_buffers(self):
        """Return the buffers of the next `recv`, () if none steps."""
        return range(self.num_buffers)

    def recv(self):
        """Return (observations, rewards, terminals, truncations, infos, agent_ids, masks).

        They are of the batch to act on next, views that stay as they are until its environments
        step again: agent_ids are its agents' numbers, masks is False for an inactive agent. Raises
        RuntimeError if nothing was sent.
        """
        self._check_open()
        buffers = () if self.storage is None or self._received else self._next_buffers()
        if not buffers:
            raise RuntimeError("recv() comes after async_reset() or send().")
        self._received = buffers
        agents = self._agents_of(buffers)
        return (*self._results_of(buffers), np.arange(agents.start, agents.stop),
                self.storage.valid[1, agents].view(bool))

    def send(self, actions):
        """Step the agents of the last `recv`, by actions (agents_per_recv, ...).

        Raises RuntimeError without one, and ValueError for another shape or actions outside their
        space.
        """
        if not self._received:
            raise RuntimeError("send() comes after recv().")
        self._check_open()
        rows = self.storage.actions[0, self._agents_of(self._received)]
        self._check_actions(actions, len(rows))
        rows[:] = np.reshape(actions, rows.shape)
        buffers, self._received = self._received, ()
        with threads(self.num_threads):
            for buffer in buffers:
                self._t[buffer] = 0
                self.advance(buffer)

    def save(self):
        """Return an empty array: `load` begins new episodes."""
        return np.zeros(0, np.uint8)

    def load(self, saved):
        """Begin new episodes; see save."""
        self.restart()

    def close(self):
        """End what steps the environments; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self._close()

    def __exit__(self, *_):
        self.close()


# --------------------------------------------------------------------------------------------------
# Native: environments in C, stepped without the GIL


class Native(Vector):
    """Environments in C, stepped by threads; they write into the rollout's arrays.

    See `make` for the arguments. With fewer buffers than threads, several threads step one buffer
    of many agents.
    """

    # 2,048 agents fit into a core's caches, and to step them takes much longer than to call C.
    AGENTS_PER_BUFFER = 2048
    STEP_NANOSECONDS = 50  # of an agent; decides whether an actor's threads are worth starting
    first_env = 0

    def __init__(self, env, num_envs, *, num_buffers=None, num_threads=None, seed=0,
                 env_kwargs=None):
        self.library = env if isinstance(env, ocean.Library) else ocean.load(env)
        self.name, self.num_envs, self.env_kwargs = self.library.name, num_envs, env_kwargs
        self.num_threads = num_threads or physical_cores()
        self._build(seed)
        if num_buffers is None:  # with about AGENTS_PER_BUFFER agents in each
            target = max(self.num_threads, -(-self.envs.num_agents // self.AGENTS_PER_BUFFER))
            divisors = [n for n in range(1, min(num_envs, 4 * target) + 1) if num_envs % n == 0]
            num_buffers = min(divisors, key=lambda n: (n < self.num_threads, abs(n - target)))
        _check_divides("vec.num_buffers", num_buffers, num_envs)
        self.env_ranges = [*itertools.pairwise(range(0, num_envs + 1, num_envs // num_buffers))]
        offsets = self.envs.agent_offsets.tolist()
        self._set_shapes(self.envs, [slice(offsets[first], offsets[last])
                                     for first, last in self.env_ranges])
        self.has_valid = self.envs.has_valid
        self.num_actors = min(self.num_threads, num_buffers)
        self.threads_per_actor = max(1, self.num_threads // self.num_actors)

    def _build(self, seed):
        self.envs = None  # frees those before
        self.envs = self.library.create(self.num_envs, seed=seed, settings=self.env_kwargs,
                                        first_env=self.first_env)
        self.seed, self._is_fresh = seed, True

    def set_first_env(self, first_env):
        self.first_env = first_env
        self._build(self.seed)

    def _bind(self):
        self._make_tables(tensors.as_tensors(self.storage))

    def _make_tables(self, arrays):
        """Make the table of addresses of each step, in the order of ocean.rows.

        Those of the last step are also of the arrays of a reset.
        """
        self._rows = workers.step_rows(arrays if self.has_valid else {**arrays, "valid": None})
        self._tables = np.array([[0 if row[name] is None else row[name].data_ptr() for name in ROW]
                                 for row in self._rows], np.int64)
        self._step_rows = [table.ctypes.data for table in self._tables]

    def restart(self, seed=None):
        """Begin new episodes, seeded if given; observations go to row T."""
        if seed is not None and not (self._is_fresh and seed == self.seed):
            self._build(seed)
        self._is_fresh = False
        self._reset()
        self._rows[-1]["resets"].fill_(1)

    def _reset(self):
        self.envs.reset(self._tables[-1])

    def advance(self, buffer):
        """Step a buffer's environments with row t's actions, without the GIL."""
        t, storage, agents = self._t[buffer], self.storage, self.ranges[buffer]
        first, last = self.env_ranges[buffer]
        cost = self.STEP_NANOSECONDS * self.num_agents // self.num_envs
        run(self._step, last - first, cost, first, self._step_rows[t])
        np.bitwise_or(storage.terminals[t, agents], storage.truncations[t, agents],
                      out=storage.resets[t + 1, agents])
        self._t[buffer] = t + 1

    @property
    def can_step_in_kernels(self):
        """Return whether a compiled loop may step a buffer, without Python in between.

        It may if `wait` and `advance` are not replaced and an actor has one thread.
        """
        return (type(self) is Native and not {"wait", "advance"} & set(vars(self))
                and self.threads_per_actor == 1)

    def addresses(self, buffer):
        """Return what a kernel needs to step a buffer.

        These are the addresses of ocean_step and of the environments, the buffer's first and last +
        1 environment, and the addresses of the rows (T,) int64. The kernel writes the resets.
        """
        return (self.library.step_address, self.envs.address, *self.env_ranges[buffer],
                np.array(self._step_rows))

    def _step(self, start, end, first, rows):
        self.envs.step(rows, first + start, first + end)

    def log(self, env=None):
        """Return {name: mean} over the episodes since the last call, and n."""
        return self.envs.log() if env is None else self.envs.log(env, env + 1)

    def save(self):
        """Return the state of all environments as a uint8 array, for `load`."""
        return self.envs.save()

    def load(self, saved):
        self.envs.load(saved)

    def render(self, index=0):
        """Return environment `index` as an RGB array (height, width, 3)."""
        return self.envs.render(index)

    def _close(self):
        self.envs.close()


class GpuEnvs(Native):
    """Environments in C on a GPU: one thread each, all in one buffer.

    device: the torch.device. The structs and the arrays of HEAP are made on the host and copied
    there. An engine on the same device passes its tensors to `write_to`: then a step copies nothing
    to the host, CUDA graphs can hold a rollout's steps (`launch`), and `log` copies the sums.
    Otherwise each step copies its rows from `storage` and back. Raises ImportError without CuPy,
    and EnvError if the header does not compile there.
    """

    in_graphs = True

    def __init__(self, env, num_envs, *, device, **options):
        self._kernels = ocean.device.Kernels(env)
        self.truncates = ocean.device.truncates(env)
        self.device = torch.device(device)
        self._memory = None
        super().__init__(env, num_envs, num_buffers=1, **options)
        self._logs = torch.zeros(num_envs, len(env.log_fields), device=self.device)

    def _build(self, seed):
        super()._build(seed)
        if self._memory is None:
            self._memory, self._heap = (
                torch.zeros(len(block), dtype=torch.uint8, device=self.device)
                for block in (self.envs.memory, self.envs.heap))
        self._copy_to_device()

    def _copy_to_device(self):
        """Copy the environments to the addresses that CUDA graphs use."""
        self.envs.place_heap(self._heap.data_ptr())
        self._memory.copy_(torch.from_numpy(self.envs.memory))
        self.envs.place_heap(self.envs.heap.ctypes.data)
        self._heap.copy_(torch.from_numpy(self.envs.heap))

    def _copy_from_device(self):
        """Copy the environments to the host, except pointers, valid on the GPU only."""
        structs = self._memory.view(self.num_envs, -1)[:, self.library.plain_start:]
        for block, other in zip(self.envs.state, (structs, self._heap), strict=True):
            block[:] = other.cpu().numpy()

    def _bind(self):
        self._arrays = None
        self._host_rows = workers.step_rows(tensors.as_tensors(self.storage))
        row = self.new_storage(1, lambda shape, dtype: torch.from_numpy(
            np.zeros(shape, dtype)).to(self.device))
        self._make_tables(vars(row))

    def write_to(self, arrays):
        """Step into {name: tensor}, shaped as the storage, and copy the last row there."""
        last = self._rows[-1]
        self._make_tables(arrays)
        for name in POLICY_INPUTS:
            if last[name] is not None:
                self._rows[-1][name].copy_(last[name])
        self._arrays = arrays

    def _make_tables(self, arrays):
        """Make the kernels' table of addresses of each step."""
        super()._make_tables(arrays)
        tables = [self.envs.rows_for_a_gpu(table) for table in self._tables]
        self._tables = torch.from_numpy(np.stack(tables)).to(self.device)
        self._step_rows = [table.data_ptr() for table in self._tables]

    @property
    def device_addresses(self):
        """Return the addresses there of the environments, and of the rows (T,) of all steps."""
        return self._memory.data_ptr(), self._tables.data_ptr()

    def _launch(self, name, *arguments, first=0, num_envs=None):
        stream = torch.cuda.current_stream(self.device).cuda_stream
        envs = self._memory.data_ptr() + first * self.library.struct_size
        with cuda_cpp.on_stream(stream):
            self._kernels.launch(name, num_envs or self.num_envs, (envs, *arguments))

    def restart(self, seed=None):
        """Begin new episodes, seeded if given; observations go to row T."""
        super().restart(seed)
        if self._arrays is None:
            self._copy_to_host(-1)

    def _reset(self):
        self._launch("reset", self._step_rows[-1])

    def launch(self, t):
        """Step all environments with row t's actions on torch's stream."""
        self._launch("step", self._step_rows[t], self._rows[t]["resets"].data_ptr())

    def advance(self, buffer):
        """Step all environments with the actions of row t."""
        t = self._t[0]
        if self._arrays is not None:
            self.launch(t)
        else:
            self._rows[0]["actions"].copy_(self._host_rows[t]["actions"])
            self.launch(0)
            self._copy_to_host(t)
        self._t[0] = t + 1

    def _copy_to_host(self, t):
        """Copy the one row on the device to that of step t."""
        for name, array in self._rows[0].items():
            if array is not None and name != "actions":
                self._host_rows[t][name].copy_(array)

    def log(self, env=None):
        """Return what Native's does; only the sums are copied to the host."""
        first, count = (0, self.num_envs) if env is None else (env, 1)
        logs = self._logs[first : first + count]
        self._launch("log", logs.data_ptr(), first=first, num_envs=count)
        return self.envs.log(sums=logs.double().sum(0).tolist())

    def save(self):
        """Return the environments' state as a uint8 array; the host can load it, too."""
        self._copy_from_device()
        return self.envs.save()

    def load(self, saved):
        self.envs.load(saved)
        self._copy_to_device()

    def render(self, index=0):
        self._copy_from_device()
        return self.envs.render(index)


# --------------------------------------------------------------------------------------------------
# Environments in Python


STARTUP = 120.0  # seconds at least for what is no step: a worker's packages load slowly


class Emulated(Vector):
    """Workers that each step a contiguous share of environments in Python.

    A buffer is the workers of one batch. Infos are dicts of the episodes that ended, with
    episode_return, episode_length and the numbers of the environment's last info; `log` averages
    them. creators: (creator, args, kwargs) of each environment; `make` has the other arguments. A
    subclass has these methods:

        _start(): begin num_workers workers. Each makes a workers.Envs of the arguments that
            `envs_of(worker)` returns, pickled by cloudpickle, and binds it to
            workers.step_rows(vars(storage)) and its first agent, agents_of(worker).start
        _send(worker, command, argument): have the worker call Envs.do(command, argument). If arrays
            are not shared, send the actions of a "step", too: of row `argument`
        _collect(): call `_finish(worker, result)` for each worker that has answered, once its
            agents' rows are written, and `_fail` for one that is lost; sleep half a second at most
            until there is one
        _stop(): end the workers. It may be called without `_start`, and more than once
    """

    num_actors = threads_per_actor = 1  # one thread acts, `num_threads` learn
    _next_check = 0.0

    def __init__(self, creators, *, num_workers=None, batch_size=None, seed=0, num_threads=None,
                 name="", timeout=60.0):
        count = len(creators)
        self.num_workers = num_workers or _most_workers(count)
        _check_divides("vec.num_workers", self.num_workers, count)
        self._creators_each = count // self.num_workers
        _check_divides("vec.batch_size", batch_size or count, count, self._creators_each)
        self.workers_per_batch = (batch_size or count) // self._creators_each
        self.seed, self.name, self._creators = seed, name, creators
        self.timeout, self.num_threads = timeout, num_threads or physical_cores()
        self._driver = env = emulation.create(*creators[0], seed)
        emulation.warn_of_moments(env)
        self.num_envs = count * emulation.copies(env)
        self._agents_each = self._creators_each * emulation.slots(env)
        size = self.workers_per_batch * self._agents_each
        self._set_shapes(env, [slice(first, first + size)
                               for first in range(0, count * emulation.slots(env), size)])
        self.agents_per_recv = size
        self._busy = {}  # {worker: (when its command was sent, the command)}
        self._ready = {}  # {buffer: None}, the first one first
        self._results = {}  # {(command, worker): the result of the last such command}
        self._attributes = {}  # those of set_attr, for workers that begin later
        self._episodes = EpisodeLog(has_counts=not isinstance(env, emulation.WRAPPERS))

    def envs_of(self, worker):
        """Return the arguments of a worker's workers.Envs, pickled."""
        import cloudpickle

        first = worker * self._creators_each
        creators = self._creators[first : first + self._creators_each]
        try:
            return cloudpickle.dumps((creators, emulation.signature(self._driver), first,
                                      self.seed, emulation.copies(self._driver)))
        except (TypeError, pickle.PicklingError) as error:
            raise ConfigError(f"{self.name} cannot be sent to another process ({error}). Give a "
                              "creator that can be pickled, or use backend serial.") from error

    def agents_of(self, worker):
        """Return the slice of a worker's agents."""
        return slice(worker * self._agents_each, (worker + 1) * self._agents_each)

    # -- commands to workers, and their answers

    def _bind(self):
        self._stop()
        self._busy.clear()
        self._start()
        for name, value in self._attributes.items():
            self._ask(name, value, None)

    def restart(self, seed=None):
        """Begin new episodes, seeded if given; observations go to row T."""
        self._command(range(self.num_workers), "reset", seed)

    def begin(self):
        self._settle()
        super().begin()
        self._results.clear()
        self._ready = dict.fromkeys(range(self.num_buffers))

    def wait(self, actor=0):
        """Return (buffer, t) of the first buffer that is ready, None after all."""
        while not self._ready:
            if not self._busy:
                return None
            self._listen()
        buffer = next(iter(self._ready))
        del self._ready[buffer]
        return buffer, self._t[buffer]

    def advance(self, buffer):
        """Have a buffer's environments step with the actions of its row t."""
        self._send_all(self._workers_of(buffer), "step", self._t[buffer])

    def _send_all(self, indices, command, argument):
        for worker in indices:
            self._busy[worker] = time.monotonic(), command
            self._send(worker, command, argument)

    def _command(self, indices, command, argument):
        """Have workers do a command between steps; return their results."""
        self._check_open()
        if self.storage is None:
            self.allocate(1)
        self._settle()
        self._send_all(indices, command, argument)
        self._settle()
        return [self._results.pop((command, worker)) for worker in indices]

    def _settle(self):
        while self._busy:
            self._listen()

    def _listen(self):
        """Collect answers. Raises WorkerError if a worker fails or is late."""
        self._collect()
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + 0.5
        for worker, (start, command) in self._busy.items():
            seconds = self.timeout if command == "step" else max(self.timeout, STARTUP)
            if now - start > seconds:
                self._fail(worker, f"has not answered for {seconds:.0f} s (vec.timeout)",
                           self._locate(worker))

    def _locate(self, worker):
        """Return the lines at which a worker hangs, as far as they are known."""
        return ""

    def _fail(self, worker, problem, details=""):
        """End all workers and raise a WorkerError, or `details`, if that is an EnvError."""
        with contextlib.suppress(Exception):
            self.close()
        if isinstance(details, EnvError):
            raise details
        each = self.num_envs // self.num_workers
        first, last = worker * each, (worker + 1) * each - 1
        envs = f"environment {first}" if each == 1 else f"environments {first} to {last}"
        raise WorkerError(f"worker {worker} ({envs} of {self.name}) {problem}.\n{details}"
                          .rstrip())

    def _finish(self, worker, result):
        """Note that a worker has answered with the result of Envs.do."""
        _, command = self._busy.pop(worker)
        self._results[command, worker] = result
        if command in ("step", "reset"):
            for env, info in result:
                self._episodes.add(env, info)
        buffer = worker // self.workers_per_batch
        if command == "step" and self._busy.keys().isdisjoint(self._workers_of(buffer)):
            self._t[buffer] += 1
            self._ready[buffer] = None

    def log(self, env=None):
        """Return {name: mean} over the episodes since the last call, and n.

        n: their number, of all environments or of one; {} if none ended.
        """
        return self._episodes.means(env)

    # -- scripts

    def _next_buffers(self):
        ready = self.wait()
        return () if ready is None else ready[:1]

    def _workers_of(self, buffer):
        return range(buffer * self.workers_per_batch, (buffer + 1) * self.workers_per_batch)

    def _infos_of(self, buffers):
        return [info for buffer in buffers for worker in self._workers_of(buffer)
                for _, info in self._results.get(("step", worker), ())]

    def call(self, name, *args, **kwargs):
        """Call the method `name` of each environment, or read its attribute.

        The environment may be within wrappers, or in another process. Call between rollouts. A
        vector environment counts as one, whose own set_attr is call("set_attr", name, value).
        Returns a list. Raises AttributeError if there is none of that name.
        """
        return self._ask(name, args, kwargs)

    def set_attr(self, name, value):
        """Set an attribute that each environment, or one within its wrappers, has.

        A list is one value, which every environment gets.
        """
        self._ask(name, value, None)
        self._attributes[name] = value

    def _ask(self, *question):
        import cloudpickle

        answers = self._command(range(self.num_workers), "ask", cloudpickle.dumps(question))
        if problem := next((problem for _, problem in answers if problem), None):
            raise AttributeError(problem)
        return [answer for part, _ in answers for answer in part]

    def render(self, index=0):
        """Return what environment `index` draws. Raises ConfigError if there is none."""
        require(0 <= index < self.num_envs,
                f"render({index}): there are {self.num_envs} environments.")
        worker, number = divmod(index, self.num_envs // self.num_workers)
        return self._command([worker], "render", number)[0]

    def _close(self):
        with contextlib.closing(self._driver):
            self._stop()
        self._busy.clear()

    def __del__(self):
        if self._driver is not None and not self.closed:
            with contextlib.suppress(Exception):
                self.close()


class EpisodeLog:
    """Sums over the episodes that ended, of each environment.

    has_counts: whether an info's `n` is a number of episodes, as a PufferEnv's is.
    """

    def __init__(self, has_counts):
        self._has_counts = has_counts
        self._sums = defaultdict(lambda: [0.0, 0.0])  # {(environment, name): [sum, episodes]}

    def add(self, env, info):
        """Add the numbers of an info."""
        numbers = flat_spaces.numeric_scalars({key: value for key, value in info.items()
                                               if key != "episode"})
        count = numbers.pop("n", 1.0) if self._has_counts else 1.0
        if "n" in numbers:
            numbers["info_n"] = numbers.pop("n")
        for name, value in {"n": 1.0, **numbers}.items():
            entry = self._sums[env, name]
            entry[0] += value * count
            entry[1] += count

    def means(self, env=None):
        """Return the means since the last call, of all environments or of one."""
        sums = defaultdict(lambda: (0.0, 0.0))
        for key in [key for key in self._sums if env in (None, key[0])]:
            sums[key[1]] = tuple(map(sum, zip(sums[key[1]], self._sums.pop(key), strict=True)))
        return flat_spaces.episode_means(sums, sums.pop("n", [0.0])[0])


class Serial(Emulated):
    """Environments in Python, one after the other in this process; see `make`."""

    _envs = None

    def __init__(self, creators, *, num_workers=1, batch_size=None, **options):
        super().__init__(creators, num_workers=1, **options)

    def _start(self):
        if self._envs is None:
            creators = [(self._driver, (), {}), *self._creators[1:]]
            self._envs = workers.Envs(creators, emulation.signature(self._driver), seed=self.seed,
                                      copies=emulation.copies(self._driver))
        self._envs.bind(workers.step_rows(vars(self.storage)))

    def _send(self, worker, command, argument):
        try:
            self._finish(worker, self._envs.do(command, argument))
        finally:
            self._busy.clear()  # also after an error or Ctrl-C, which nothing else answers

    def advance(self, buffer):
        """Step all environments with the actions of row t."""
        with self._watchdog(self._t[buffer]):
            super().advance(buffer)

    def _stop(self):
        if self.closed and self._envs is not None:
            self._envs.close(first=1)  # environment 0 is the one that policies read


class VectorEntryPoint(Serial):
    """vec.backend package: the vector environment that a package provides.

    ALE's is in C++, CartPole's in numpy. It steps in this process; see `make`. creators: all the
    same one, with a method `vector` (environments.GymnasiumCreator).
    """

    def __init__(self, creators, *, num_threads=None, **options):
        creator, _, kwargs = creators[0]
        if any(other != creators[0] for other in creators):
            raise ConfigError("vec.backend = package: env_kwargs differ between environments. "
                              "Give one dict for all, or use another backend.")
        whole = creator.vector, (len(creators),), {**kwargs, "num_threads": num_threads}
        super().__init__([whole], num_threads=num_threads, **options)


class Multiprocessing(Emulated):
    """Environments in Python in processes, which write into shared arrays.

    See `make`.
    """

    _workers = ()

    def new_storage(self, horizon, zeros):
        self._memory = workers.SharedMemory()
        return super().new_storage(horizon, self._memory.zeros)

    def _start(self):
        names = [name for name, array in vars(self.storage).items() if array is not None]
        arrays = dict(zip(names, self._memory.layouts, strict=True))
        self._workers, self._numbers, self._poller = [], {}, select.poll()
        for worker in range(self.num_workers):
            process = workers.Process(self._memory, {
                "path": sys.path, "envs": self.envs_of(worker), "arrays": arrays,
                "first_agent": self.agents_of(worker).start})
            self._workers.append(process)
            self._numbers[process.fileno()] = worker
            self._poller.register(process, select.POLLIN)

    def _send(self, worker, command, argument):
        self._workers[worker].send((command, argument))

    def _collect(self):
        for fd, _ in self._poller.poll(500):
            worker = self._numbers[fd]
            process = self._workers[worker]
            try:
                problem, result = process.receive()
            except EOFError:
                self._fail(worker, "died" + process.describe_end(), process.report())
            if problem is not None:
                self._fail(worker, "raised", problem)
            self._finish(worker, result)

    def _locate(self, worker):
        return self._workers[worker].report(ask=True)

    def _stop(self):
        stopped, self._workers = self._workers, ()
        # An idle worker ends when its channel closes; its environments may have to finish a video.
        deadline = time.monotonic() + (1.0 if self._busy else workers.CLOSING)
        for process in stopped:
            process.leave()
        for process in stopped:
            process.end(deadline - time.monotonic())


class Ray(Emulated):
    """Environments in Python in Ray actors, whose results are copied here.

    See `make`.
    """

    _actors = ()

    def _start(self):
        try:
            import ray
        except ImportError:
            raise ConfigError("backend ray needs the package ray: pip install ray") from None
        self._ray = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        actor, self._references = ray.remote(workers.RemoteEnvs), {}
        row = emulation.new_rows(self._driver, self._agents_each)
        self._rows = workers.step_rows(vars(self.storage))
        self._actors = [actor.remote(self.envs_of(worker), row, sys.path)
                        for worker in range(self.num_workers)]

    def _send(self, worker, command, argument):
        t = argument if command == "step" else -1
        actions = self._rows[t]["actions"][self.agents_of(worker)]
        reference = self._actors[worker].do.remote(command, argument, actions)
        self._references[reference] = worker, t

    def _collect(self):
        for reference in self._ray.wait(list(self._references), timeout=0.5)[0]:  # one at most
            worker, t = self._references.pop(reference)
            try:
                result, rows = self._ray.get(reference)
            except Exception as error:  # an error of the environment, or of a lost machine
                cause = getattr(error, "cause", error)
                self._fail(worker, "failed", cause if isinstance(cause, EnvError) else error)
            for name, row in rows.items():
                if row is not None:
                    self._rows[t][name][self.agents_of(worker)] = row
            self._finish(worker, result)

    def _stop(self):
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        self._actors, self._references = (), {}


# --------------------------------------------------------------------------------------------------
# Environments whose arrays are tensors


class Tensors(Vector):
    """Many environments in one object that takes and returns tensors; see tensors.py.

    It steps in this process on its device, as one buffer; see `make`. creators: one TensorEnv, in
    the form of `Emulated`'s.

    The rollout's arrays lie on the host, and the network that acts reads its rows there. An engine
    on the environments' device gives `write_to` arrays of its own instead. Then a step copies only
    its terminals and truncations to the host, which checks if there is anything to bootstrap.
    Episodes are counted on the device; `log` reads the sums, once.
    """

    num_actors = 1

    def __init__(self, creators, *, seed=0, num_threads=None, name="tensors", timeout=60.0, **_):
        self._driver, self.seed, self.name, self.timeout = creators[0][0], seed, name, timeout
        self.num_threads = self.threads_per_actor = num_threads or physical_cores()
        self.num_envs = self._driver.num_agents
        self.has_valid, self.device = self._driver.has_valid, self._driver.device
        self._set_shapes(self._driver, [slice(0, self.num_envs)])

    def _bind(self):
        self._host = self._arrays = tensors.as_tensors(self.storage)
        self.write_to(self._host)

    def write_to(self, arrays):
        """Step into {name: tensor} from now on, and copy the present arrays there.

        The tensors have the storage's shapes.
        """
        for name, tensor in self._arrays.items():
            if tensor is not None:
                arrays[name].copy_(tensor)
        self._arrays = arrays
        self._copied = () if arrays is self._host else ("terminals", "truncations")
        self._rows = [self._driver.view({**row, "before": before}) for row, before
                      in zip(workers.step_rows(arrays), arrays["observations"], strict=False)]

    def restart(self, seed=None):
        """Begin new episodes, seeded if given; observations go to row T."""
        self._driver.reset_into(self._rows[-1], seed)

    def send(self, actions):
        self.begin()  # without final_obs, a truncated episode is valued by row 0
        super().send(actions)

    def advance(self, buffer):
        """Step all environments with the actions of row t."""
        t = self._t[0]
        with self._watchdog(t), default_stream(self.device):
            self._driver.step_into(self._rows[t])
        for name in self._copied:
            self._host[name][t].copy_(self._arrays[name][t])
        self._t[0] = t + 1

    def log(self, env=None):
        """Return {name: mean} over the episodes since the last call, and n.

        n: their number, of all environments or of one; {} if none ended.
        """
        return self._driver.log(env)

    def render(self, index=0):
        """Return what environment `index` draws, or the one picture of all."""
        frames = self._driver.render()
        is_several = isinstance(frames, list | tuple) or np.ndim(frames) == 4
        return frames[index] if is_several else frames

    def _close(self):
        self._driver.close()


# --------------------------------------------------------------------------------------------------
# Which backend steps what


BACKENDS = dict(zip(configuration.BACKENDS,
                    (Native, Serial, Multiprocessing, Ray, VectorEntryPoint, Tensors), strict=True))


def _name_of(backend):
    return next((name for name, known in BACKENDS.items() if known is backend), backend.__name__)


def choose_backend(env, backend=None, num_envs=1, num_workers=None, batch_size=None):
    """Return the class that steps `num_envs` of `env`, of environments.find_maker.

    backend: a class, which is returned; a name in BACKENDS, in any case. PufferLib's class
    PufferEnv counts as Native. "auto" or None is Native for environments in C, and for others:

    1. Tensors if their creator says so;
    2. VectorEntryPoint if their creator prefers it, num_envs is above 1, and neither workers nor
       a batch are requested;
    3. Serial if one worker would step all of them or they are instances;
    4. Multiprocessing.

    Raises ConfigError for an unknown name, and for a backend that cannot step this environment.
    """
    one = next(iter(env), None) if isinstance(env, (list, tuple)) else env
    is_in_c = isinstance(env, ocean.Library)
    if isinstance(backend, type) and issubclass(backend, emulation.PufferEnv):
        backend = Native
    if isinstance(backend, str):
        names = {"auto": None, "puffer": Native, "pufferenv": Native, **BACKENDS}
        if backend.lower() not in names:
            raise ConfigError(f"vec.backend = {backend}: there is no such backend; there are "
                              f"{', '.join(BACKENDS)}.")
        backend = names[backend.lower()]
    if backend is None:
        if is_in_c:
            return Native
        if getattr(one, "gives_tensors", False):
            return Tensors
        is_free = num_envs > 1 and num_workers is None and batch_size is None
        if is_free and getattr(one, "prefers_vector", False):
            return VectorEntryPoint
        num_workers = num_workers or (_most_workers(num_envs) if callable(one) else 1)
        return Serial if num_workers == 1 else Multiprocessing
    if backend is Native and isinstance(one, type) and issubclass(one, emulation.PufferEnv):
        return Serial  # PufferLib's word for a class that steps its agents itself
    has_vector = getattr(one, "has_vector", False)
    if not {Native: is_in_c, Tensors: not is_in_c, VectorEntryPoint: has_vector}.get(backend, True):
        others = f"{'native, ' * is_in_c}serial, multiprocessing and ray"
        raise ConfigError(f"vec.backend = {_name_of(backend)}: cannot step "
                          f"{environments.name_of(one)}; there are {others} for it.")
    return backend


def make(env, num_envs=1, backend=None, *, num_workers=None, batch_size=None, num_buffers=None,
         num_threads=None, device=None, seed=0, env_args=(), env_kwargs=None, timeout=60.0,
         **settings):
    """Make a vector of `num_envs` environments.

    env: the name of a C environment ("breakout"), the path of its header or an `ocean.Library`;
        "gym/ID", "pettingzoo/FAMILY/NAME" or "path/to/file.py:callable"; a creator (a class or
        function), or a list of one per environment; or an instance, if num_envs is 1
    backend: a class, or a name in BACKENDS. Default: `choose_backend`'s; Tensors for one object
        whose reset returns tensors. If that object holds several environments (its setting
        num_envs), their number is num_envs × env_kwargs["num_envs"]
    num_workers: processes or Ray actors (default: the physical cores, or the most below them that
        divide num_envs)
    batch_size: environments of one buffer, for which one `recv` waits (default: all)
    num_buffers: Native's
    num_threads: of environments in C, and of learning
    device: "cuda" for environments in C; see GpuEnvs
    seed: environment i is reset with seed + i
    env_args: the creator's positional arguments; of a list of creators, a list of one list each
    env_kwargs: its keyword arguments, or the C environment's settings, one dict or a list of one
        per environment; any other keyword is one of them for all
    timeout: seconds after which a worker that does not answer is an error. inf: no limit

    For num_workers and batch_size "auto" is the same as None. Raises ConfigError for settings
    that cannot work together, MemoryError for more environments than the machine can hold, and
    TypeError for an `env` of another type.
    """
    num_workers, batch_size = (None if number == "auto" else number
                               for number in (num_workers, batch_size))
    env = environments.find_maker(env)
    # the environment's own setting
    if device is not None and "device" in (environments.settings_of(env) or ()):
        settings, device = {**settings, "device": device}, None
    env_kwargs = environments.with_settings(env, env_kwargs, settings, KEYWORDS)
    is_auto = backend in (None, "auto")
    backend = choose_backend(env, backend, num_envs, num_workers, batch_size)
    if backend is Native:
        num_envs, env_kwargs = environments.count_copies(num_envs, env_kwargs)
    processes.check_count("vec.num_threads", num_threads, *processes.processes_at_most())
    if backend is not Ray:  # a cluster has more cores than this machine
        processes.check_count("vec.num_workers", num_workers, *processes.processes_at_most())
    # The size of an environment in Python is unknown before it is made; 4 kB is about the least.
    size = getattr(env, "struct_size", 4096)
    processes.check_memory(num_envs * size, f"{num_envs:,} environments")
    if backend is Native or device is not None:
        _check_backend(backend, num_envs, num_workers, batch_size, num_buffers)
        options = {"num_threads": num_threads, "seed": seed, "env_kwargs": env_kwargs}
        if device is None:
            return Native(env, num_envs, num_buffers=num_buffers, **options)
        if not isinstance(env, ocean.Library) or backend is not Native:
            reason = "only environments in C do, with backend native"
        elif num_buffers not in (None, 1):
            reason = f"vec.num_buffers is {num_buffers}, but all environments are one buffer there"
        else:
            reason = ocean.device.why_not(env)
        if reason:
            raise EnvError(f"vec.device: {environments.name_of(env)} cannot step on a GPU, because "
                           f"{reason}")
        return GpuEnvs(env, num_envs, device=device, **options)
    if isinstance(env, ocean.Library):
        creators = environments.ocean_creators(str(env.header), num_envs, env_kwargs)
        name = env.name
    else:
        creators, name = environments.creators_of(env, num_envs, env_args, env_kwargs)
    holds_copies = not getattr(env, "takes_copies", True) and "num_envs" in env.settings
    may_be_tensors = is_auto and backend in (Serial, Multiprocessing)
    if backend is Tensors or (may_be_tensors and (holds_copies or num_envs == 1)):
        whole = _as_one_object(env, holds_copies, num_envs, env_args, env_kwargs)
        made = emulation.build(*whole, seed)
        tensor_env = tensors.wrap(made, seed)
        if tensor_env is not None:
            backend, creators = Tensors, [(tensor_env, (), {})]
        elif backend is Tensors:
            raise ConfigError(f"backend tensors: {made} lacks num_envs or "
                              "single_observation_space, or its reset returns neither torch "
                              "tensors nor arrays with __dlpack__ as JAX's; use another backend.")
        elif num_envs == 1:
            creators = [(lambda: made, (), {})]
        else:
            made.close()
    _check_backend(backend, num_envs, num_workers, batch_size, num_buffers)
    return backend(creators, seed=seed, num_threads=num_threads, name=name, timeout=timeout,
                   num_workers=num_workers, batch_size=batch_size)


KEYWORDS = [name for name, p in inspect.signature(make).parameters.items()
            if p.kind is p.KEYWORD_ONLY]


def _as_one_object(env, holds_copies, num_envs, env_args, env_kwargs):
    """Return (creator, args, kwargs) of one object that holds all environments."""
    if num_envs > 1:
        if not holds_copies or isinstance(env_kwargs, (list, tuple)):
            raise ConfigError(f"vec.num_envs = {num_envs}: {environments.name_of(env)} is one "
                              "object that holds all environments. Set env.num_envs; env_kwargs is "
                              "one dict.")
        num_envs, others = environments.count_copies(num_envs, env_kwargs)
        env_kwargs = {**(others or {}), "num_envs": num_envs}
    return environments.creators_of(env, 1, env_args, env_kwargs)[0][0]


def _check_backend(backend, num_envs, num_workers, batch_size, num_buffers):
    """Raise ConfigError for settings of another backend."""
    name = _name_of(backend)
    if num_buffers not in (None, 1) and not issubclass(backend, Native):
        raise ConfigError(f"vec.num_buffers = {num_buffers}: is for backend native, not for {name}."
                          " Set vec.batch_size.")
    if issubclass(backend, (Native, Serial, Tensors)) and (
            num_workers not in (None, 1) or batch_size not in (None, num_envs)):
        advice = {Native: "Set vec.num_threads.", Tensors: "Leave both out."}.get(
            backend, "For more workers use multiprocessing.")
        raise ConfigError(f"backend {name} steps all environments in this process: num_workers is "
                          f"1 and batch_size {num_envs}. {advice}")


# --------------------------------------------------------------------------------------------------
# From a configuration


def load_env(env_name, args):
    """Make the vector of environments that `args`, of load_config, describes."""
    configuration.check_names(args)
    vec, maker = args["vec"], environments.find_maker(configuration.find_config(env_name)[0])
    copies, settings = environments.split_copies(maker, args["env"])
    num_envs, total = vec["num_envs"] * copies, vec["total_agents"]
    if total is not None:
        with environments.sample(maker, args["env"]) as env:
            agents = emulation.slots(env)
        num_envs, rest = divmod(total, agents)
        if rest or not num_envs:
            raise ConfigError(f"vec.total_agents = {total}: one {maker.name} has "
                              f"{plural(agents, 'agent')}; use a multiple of that.")
    elif isinstance(maker, ocean.Library) and vec["backend"] not in ("auto", "native"):
        num_envs, settings = vec["num_envs"], args["env"]  # each holds env.num_envs
    return make_from(maker, num_envs, args, settings)


def make_from(maker, num_envs, args, settings):
    """Call `make` with the vec section's settings.

    If vec.device = auto may be a GPU, the faster of GPU and host is written there, with the reason
    in args["auto"]. Prints why, if the header cannot step on a GPU.
    """
    vec, device = args["vec"], choose_device(maker, args["vec"], args["train"])
    names = "num_buffers", "num_threads", "num_workers", "batch_size", "timeout"
    make_on = functools.partial(make, maker, num_envs, vec["backend"], seed=args["train"]["seed"],
                                env_kwargs=settings, **{name: vec[name] for name in names})
    try:
        vecenv = make_on(device=device)
    except (EnvError, torch.OutOfMemoryError) as error:
        if device is None or vec["device"] == "cuda":
            raise
        first, *lines = str(error).splitlines()  # of the GPU's compiler
        errors = [line.strip() for line in lines if "error" in line]
        if data_parallel.connect().rank == 0:
            print(f"{' '.join([first, *errors][:2])}; the host steps it", file=sys.stderr)
        return make_on()
    if device is None or vec["device"] == "cuda":
        return vecenv
    host = make_on()
    seconds = data_parallel.connect().first(lambda: time_steps(vecenv, host))
    vec["device"] = min(seconds, key=seconds.get)
    args.setdefault("auto", {})["vec.device"] = ", ".join(
        f"a step takes {1e3 * spent:.2g} ms on {place}" for place, spent in seconds.items())
    chosen, other = (vecenv, host) if vec["device"] == "cuda" else (host, vecenv)
    other.close()
    return chosen


TIMED_STEPS = 16


def time_steps(gpu, host):
    """Return the seconds of a step, {"cuda": of GpuEnvs, "host": of Native}.

    Both begin new episodes. The host's threads share a step, and its observations are copied to the
    GPU.
    """
    def seconds(function):
        function()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TIMED_STEPS):
            function()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / TIMED_STEPS

    gpu.reset()
    observations = torch.from_numpy(host.reset()[0])
    threads = min(host.num_threads, host.num_envs)
    step = seconds(lambda: host.envs.step(host._step_rows[0])) / threads
    result = {"cuda": seconds(lambda: gpu.launch(0)),
              "host": step + seconds(lambda: observations.to(gpu.device))}
    gpu.storage = host.storage = None  # the next reset begins again, as without timing
    return result


def choose_device(env, vec, train):
    """Return the torch.device on which to try to step environments, None for the host.

    Raises ConfigError if there is none for vec.device = cuda.
    """
    has_gpu = train["device"] == "cuda" and torch.cuda.is_available()
    if vec["device"] == "cuda" and not has_gpu:
        problem = ("torch finds no GPU here" if train["device"] == "cuda" else
                   "train.device is cpu, to which each step would be copied")
        raise ConfigError(f"vec.device = cuda: {environments.name_of(env)} cannot step on a GPU: "
                          f"{problem}. Set auto or host.")
    is_in_c = isinstance(env, ocean.Library) and vec["backend"] in ("auto", "native")
    if vec["device"] == "cuda" or (vec["device"] == "auto" and has_gpu and is_in_c):
        return torch.device("cuda", data_parallel.connect().choose_gpu())
    return None  # the trainer refuses cuda without a GPU
