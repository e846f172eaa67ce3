"""Vectorization: many environments as one set of time-major arrays.

    import vector
    vecenv = vector.make("breakout", num_envs=4096, num_buffers=8, num_threads=2, seed=0)
    observations, infos = vecenv.reset()
    observations, rewards, terminals, truncations, infos = vecenv.step(actions)

That is the synchronous form, for scripts. The trainer uses the asynchronous form below it, which
copies nothing:

    storage = vecenv.allocate(horizon)      # arrays (T, N, ...) that environments write and the policy reads
    vecenv.begin()                          # the last row becomes the first; every buffer stands at t = 0
    while (ready := vecenv.wait(worker)):   # a buffer of this worker whose row t is there to act on
        buffer, t = ready                   #   its agents are vecenv.ranges[buffer]
        ...write storage.actions[t, agents]; at t == horizon only the value of the last row is wanted...
        vecenv.advance(buffer)              # step its environments: rewards[t], observations[t + 1], ...

A *buffer* is a contiguous range of environments, and of agents. Buffers never touch each other's
slices; each has its own t. A *worker* is a thread that serves its own share of the buffers; a
backend whose environments step elsewhere (processes, Ray) has one worker, and `wait` gives the
buffer that is ready first.

`Native` steps environments in C; `Serial`, `Multiprocessing` and `Ray` step PufferEnvs, Gymnasium's
and PettingZoo's (see emulation.py) in this process, in others and on other machines; `Tensors`
steps those of torch and JAX, on their device (see tensors.py):

    vecenv = vector.make(lambda: gymnasium.make("CartPole-v1"), num_envs=64, backend=Multiprocessing, num_workers=2)
    vecenv = vector.make("gym/CartPole-v1", num_envs=64, num_workers=4, batch_size=32)
    vecenv.async_reset(seed=0)              # and then, with the first batch_size environments that are ready,
    observations, rewards, terminals, truncations, infos, agent_ids, masks = vecenv.recv()
    vecenv.send(actions)

The docstring of `Vector` has the duties of a backend, for one of your own.
"""

import contextlib
import faulthandler
import functools
import inspect
import math
import os
import pickle
import select
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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
from arena import default_stream, driver, run, threads
from auto import plural
from errors import ConfigError, EnvError, WorkerError
from fast import cuda_cpp


def physical_cores():
    """The physical cores this process may use: its share of them if torchrun has started several on
    this machine."""
    allowed = processes.cores()
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _most_workers(num_envs):
    """The number of cores, or the largest number below it that divides the environments."""
    return max([n for n in range(1, physical_cores() + 1) if num_envs % n == 0], default=1)


def _divide(num_envs, num_workers, batch_size):
    """(workers, workers a batch), or ValueError with the numbers that divide."""
    divisors = [n for n in range(1, num_envs + 1) if num_envs % n == 0]
    num_workers = _most_workers(num_envs) if num_workers is None else num_workers
    if num_workers not in divisors:
        raise ConfigError(f"{num_envs} environments cannot be shared by {num_workers} workers; "
                          f"vec.num_workers can be {', '.join(map(str, divisors[:32]))}.")
    each = num_envs // num_workers
    batches = [n for n in divisors if n % each == 0]
    if (batch_size or num_envs) not in batches:
        raise ConfigError(f"a batch of {batch_size} environments cannot be made of workers with "
                          f"{each} each; with {num_envs} environments and {num_workers} workers "
                          f"vec.batch_size can be {', '.join(map(str, batches[:32]))}.")
    return num_workers, (batch_size or num_envs) // each


PAGE = 4096  # bytes
SEEN = ("observations", "resets", "valid", "action_masks")  # of the rollout's arrays, those with a row more than steps


def aligned_zeros(shape, dtype):
    """np.zeros on pages of its own. The address of a matrix decides how its products round, so a
    run repeats bit for bit only if addresses do not depend on the allocator. For a GPU whole pages
    are pinned."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = np.zeros(-(-size // PAGE) * PAGE + PAGE, np.uint8)
    skip = -block.ctypes.data % PAGE
    return block[skip : skip + size].view(dtype).reshape(shape)


class Vector:
    """The duties of a backend, and what follows from them: the synchronous API.

    A backend has these attributes (in brackets: the default):
        name: of the environment; seed: of the environments, as given
        num_envs, num_agents; agents_per_batch: agents of one buffer
        single_observation_space, single_action_space: of one agent, a Box and a Discrete, MultiDiscrete or Box
        observation_shape, observation_dtype: of the first; action_heads: the sizes of discrete choices, None for a Box;
        action_dims: numbers in an action; action_dtype: int32, or float32 for a Box
        has_action_masks; has_valid [True]: whether agents may be inactive; if none may, `allocate` fills valid with 1
        ranges: the slice of agents of each buffer, in order, without gaps; num_buffers [their number]
        num_workers: threads that may call `wait`, each with its own number; threads_per_worker: cores that each may
            use; num_threads: cores of all
        driver_env [itself]: what policies read the spaces from; it may have obs_dtype and env_single_observation_space
        storage [None until `allocate`]: the arrays that `new_storage` makes
        device [None]: the torch.device that the environments' own tensors lie on; see Tensors
        in_graphs [False]: whether a CUDA graph can step them; see OnGpu
        library [absent]: the ocean.Library of environments in C
        can_step_in_kernels [False]: see Native; if it is True `addresses` and `finish` are duties too
    and these methods:
        allocate(horizon): set `storage` to what new_storage(horizon, zeros) makes for so many steps, `restart`, `begin`
            and return it; zeros(shape, dtype) makes an array: aligned_zeros, or one of your own
        restart(seed=None): begin new episodes in all environments; their first observations stand in the last row of
            storage.observations, 1 in that of resets, and valid and action_masks there speak of them
        begin() [moves the last row to row 0, sets _t of each buffer to 0 and _waiting of each worker to its buffers]
        wait(worker=0): (buffer, t) of the next buffer of this worker whose row t is there to act on, or None when each
            has been given with t = horizon, once. Who acts writes storage.actions[t, agents], unless t is the horizon
        advance(buffer): step its environments with the actions of row t. Until wait gives the buffer again, row t of
            rewards, terminals and truncations is written, row t + 1 of observations, resets, valid and action_masks,
            and final_observations of the agents that step t truncated
        log(env=None): {name: mean} of the episodes that ended since the last call, n being their number, or {}
        save(), load(saved) [nothing, and new episodes]: the state of all environments as a uint8 array, and back. An
            empty array says that they cannot be saved; a resumed run then calls restart
        number_from(first_env) [adds to the seed]: before `allocate`, on the ranks that follow others with so many
        render(index=0): environment `index` as an RGB array; close()
    Only what a caller asks for is needed: the trainer does not ask for `render`.

    To have environments in Python stepped elsewhere takes less: a subclass of Emulated with
        _start(horizon): set storage, and begin num_processes workers, each with a workers.Envs: envs_of(worker) has its
            arguments, pickled by cloudpickle. Envs.bind takes vars(storage) and the worker's first agent
        _send(worker, kind, number): have one do Envs.do(kind, number): step row `number` if kind is workers.STEP, begin
            new episodes if it is RESET. If the arrays are not shared, send storage.actions[number] of its agents too
        _collect(): take the answers that are there, or sleep for half a second at most until there is one. The worker's
            agents, agents_of(worker), are then written as above, a reset as in `restart`. Call _finish(worker, infos)
            for each that has answered, infos being [(environment, info)], and _fail(worker, what, text) if one is lost
        _stop(): end the workers. It may come without _start and more than once
        render(index=0)
    Emulated itself watches over those in _busy, {worker: (since when, seconds it may take, kind)}.
    """

    storage = None
    closed = False
    has_valid = True
    device = None
    in_graphs = False  # see OnGpu
    _watched_since = math.inf
    _arrays = None  # what is stepped into in the place of `storage`, by name; see write_to
    can_step_in_kernels = False  # see Native

    def _step_in_time(self, step, t):
        """Step row t of a rollout by `step`, in this process: if one takes longer than vec.timeout, where each thread
        is then is printed, once. Nothing is watched at a horizon of 1."""
        last, now = t == len(self.storage.actions) - 1, time.monotonic()
        if (t == 0 and not last) or now > self._watched_since + self.timeout / 10:
            self._watched_since = now
            faulthandler.dump_traceback_later(self.timeout, file=sys.__stderr__)
        try:
            step()
        except BaseException:
            last = True
            raise
        finally:
            if last:
                self._watched_since = math.inf
                faulthandler.cancel_dump_traceback_later()

    def number_from(self, first_env):
        """Give the environments the random numbers of number first_env and on, if other ranks
        have those before. Comes before `allocate`."""
        self.seed += first_env

    @property
    def driver_env(self):
        return self

    @property
    def num_buffers(self):
        return len(self.ranges)

    @property
    def agents_per_recv(self):
        """The agents that one `recv` gives."""
        return self.num_agents

    @property
    def action_space(self):
        """The action space of one `recv`: agents_per_recv actions."""
        return self._batch_space("single_action_space")

    @property
    def observation_space(self):
        """The observation space of one `recv`: agents_per_recv observations."""
        return self._batch_space("single_observation_space")

    def _batch_space(self, name):
        if name not in self.__dict__.setdefault("_batch_spaces", {}):  # made once: a space has a random generator
            self._batch_spaces[name] = gymnasium.vector.utils.batch_space(getattr(self, name), self.agents_per_recv)
        return self._batch_spaces[name]

    def new_storage(self, horizon, zeros):
        """The arrays of a rollout; `zeros(shape, dtype)` makes one."""
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}; it must be 1 or more.")
        T, N = horizon, self.num_agents
        observation = (*self.observation_shape,)
        seen = int(np.prod(observation)) * np.dtype(self.observation_dtype).itemsize
        processes.check_memory((T + 1) * N * (seen + 12 + 4 * self.action_dims), "the rollout's arrays")
        storage = SimpleNamespace(
            observations=zeros((T + 1, N, *observation), self.observation_dtype),  # row t: what the policy sees at t
            resets=zeros((T + 1, N), np.uint8),  # 1: the observation at t is the first of an episode
            valid=zeros((T + 1, N), np.uint8),  # 0: the agent does not act at t
            action_masks=zeros((T + 1, N, sum(self.action_heads)), np.uint8) if self.has_action_masks else None,
            actions=zeros((T, N, self.action_dims), self.action_dtype),
            rewards=zeros((T, N), np.float32),  # row t: what the action at t led to
            terminals=zeros((T, N), np.uint8),
            truncations=zeros((T, N), np.uint8),
            final_observations=zeros((N, *observation), self.observation_dtype),  # of the agents truncated just now
        )
        storage.resets[T], storage.valid[T] = 1, 1  # begin() moves row T to row 0
        if storage.action_masks is not None:
            storage.action_masks[T] = 1
        return storage

    def _take_spaces(self, env):
        """What the shapes of a rollout's arrays follow from, as an environment in Python declares it."""
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.has_action_masks = env.has_action_masks
        self.observation_shape = self.single_observation_space.shape
        self.observation_dtype = self.single_observation_space.dtype
        action = flat_spaces.FlatAction(self.single_action_space)
        self.action_heads, self.action_dims = action.heads or None, action.columns
        self.action_dtype = np.dtype(np.int32 if action.heads else np.float32)

    def begin(self):
        """The last row becomes the next rollout's first; every buffer stands at t = 0."""
        arrays = self._arrays or vars(self.storage)
        for name in SEEN:
            if arrays[name] is not None:
                arrays[name][0] = arrays[name][-1]
        self._rewind()

    def _rewind(self):
        self._t = [0] * self.num_buffers
        self._waiting = [list(range(worker, self.num_buffers, self.num_workers)) for worker in range(self.num_workers)]

    def reset(self, seed=None):
        """Begin new episodes: (observations (N, *obs), infos). A seed other than the last one
        builds the environments anew with it."""
        if self.storage is None:
            self.allocate(1)
        self.restart(seed)
        self.begin()
        return self.storage.observations[0], []

    def step(self, actions):
        """(observations, rewards, terminals, truncations, infos), views that the next
        step overwrites; actions (N,) or (N, heads) integers, or (N, dims) floats. Raises
        RuntimeError before the first reset and ValueError for actions of another shape
        or outside their space."""
        if self.storage is None or len(self.storage.actions) != 1:
            raise RuntimeError("step() needs reset() first, and cannot be mixed with a trainer's longer horizon.")
        storage = self.storage
        self._check_actions(actions, self.num_agents)
        self._rewind()
        storage.actions[0] = np.reshape(actions, storage.actions[0].shape)
        with threads(getattr(self, "num_threads", 1)):
            for buffer in range(self.num_buffers):
                self.advance(buffer)
        infos = self._last_infos()
        flags = storage.terminals[0].view(bool), storage.truncations[0].view(bool)
        return storage.observations[1], storage.rewards[0], *flags, infos

    def _last_infos(self):
        log = self.log()
        return [log] if log else []

    def _check_actions(self, actions, agents):
        actions = np.asarray(actions)
        if actions.size != agents * self.action_dims or actions.ndim == 0 or len(actions) != agents:
            raise ValueError(f"actions have shape {actions.shape}, expected ({agents}, "
                             f"{self.action_dims}): {agents} agents of {self.single_action_space}.")
        if self.action_heads:
            # As unsigned numbers, negative ones are large, so one comparison checks both ends.
            actions, heads = actions.astype(np.int64, copy=False).view(np.uint64), self.action_heads
            if actions.max() >= heads[0] if len(heads) == 1 else (
                    actions.reshape(agents, -1) >= np.array(heads, np.uint64)).any():
                raise ValueError(f"an action lies outside {self.single_action_space}.")

    def async_reset(self, seed=None):
        """Begin new episodes; `recv` gives their observations."""
        observations, infos = self.reset(seed)
        none = np.zeros(self.num_agents, bool)
        self._last = observations, none.astype(np.float32), none, none, infos

    def recv(self):
        """(observations, rewards, terminals, truncations, infos, agent_ids, masks) of the batch to
        act on next; agent_ids are its agents' numbers, masks is False for an inactive agent."""
        return (*self._last, np.arange(self.num_agents), self.storage.valid[-1].view(bool))

    def send(self, actions):
        """Step the agents of the last `recv`, all of them: actions (num_agents,) or
        (num_agents, heads or dims)."""
        self._last = self.step(actions)

    def save(self):
        """Nothing, so `load` begins new episodes."""
        return np.zeros(0, np.uint8)

    def load(self, saved):
        """Begin new episodes; see save."""
        self.restart()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# --------------------------------------------------------------------------------------------------
# Steps of environments in C from compiled code (fast/compiled.py, fast/fused.py), without the interpreter

LONG, WORD = ir.IntType(64), ir.IntType(32)


def call_address(builder, result, function, *numbers):
    """LLVM's call of a C function by its address; pointers are passed as integers."""
    kind = ir.FunctionType(result, [LONG] * len(numbers))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), numbers)


@intrinsic
def _call_step(typing, function, environments, first, last, rows):
    """ocean_step(environments, first, last, rows), all of them integers, function and
    pointers by their addresses."""

    def codegen(context, builder, signature, arguments):
        call_address(builder, ir.VoidType(), *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def cycles(typing):
    """The processor's cycle counter."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(LONG, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), codegen


@driver
def step_environments(environments, t, begin, end, terminals, truncations, resets):
    """Step t of the environments, whose agents are [begin, end), and row t + 1 of the
    resets; the cycles it took."""
    function, address, first, last, rows = environments
    entered = cycles()
    _call_step(function, address, first, last, rows[t])
    for i in range(begin, end):
        resets[t + 1, i] = terminals[t, i] | truncations[t, i]
    return cycles() - entered


# --------------------------------------------------------------------------------------------------
# Native: environments in C, stepped without the GIL


class Native(Vector):
    """Environments in C, each range stepped by its worker's thread straight
    into the rollout's arrays.

    See `make` for the arguments. With fewer buffers than threads each worker steps with several
    threads of its own.
    """

    # Few enough for a core's caches, enough that the calls of a step cost little beside its work (docs/findings.md).
    AGENTS_PER_BUFFER = 2048
    first_env = 0

    def __init__(self, env, num_envs, *, num_buffers=None, num_threads=None, seed=0, env_kwargs=None):
        self.library = env if isinstance(env, ocean.Library) else ocean.load(env)
        self.name = self.library.name
        self.num_envs, self.seed, self.env_kwargs = num_envs, seed, env_kwargs
        self.num_threads = num_threads or physical_cores()
        if self.num_threads < 1:
            raise ConfigError(f"num_threads is {num_threads}; it must be 1 or more.")
        self._build(seed)
        envs = self.envs
        self.num_agents = envs.num_agents
        num_buffers = num_buffers or self._default_buffers()
        if num_buffers < 1 or num_envs % num_buffers:
            divisors = [n for n in range(1, min(num_envs, 256) + 1) if num_envs % n == 0]
            raise ConfigError(f"{num_envs} environments cannot be cut into {num_buffers} equal buffers; "
                              f"vec.num_buffers can be {', '.join(map(str, divisors))}.")
        per_buffer = num_envs // num_buffers
        self.env_ranges = [(i * per_buffer, (i + 1) * per_buffer) for i in range(num_buffers)]
        offsets = envs.agent_offsets
        self.ranges = [slice(int(offsets[first]), int(offsets[last])) for first, last in self.env_ranges]
        self.agents_per_batch = self.ranges[0].stop
        self.num_workers = min(self.num_threads, num_buffers)
        self.threads_per_worker = max(1, self.num_threads // self.num_workers)
        for name in ("observation_shape", "observation_dtype", "action_heads", "action_dims", "action_dtype",
                     "has_valid", "has_action_masks", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(envs, name))

    def _build(self, seed):
        self.envs = self.library.create(self.num_envs, seed=seed, settings=self.env_kwargs, first_env=self.first_env)
        self.seed, self._fresh = seed, True

    def number_from(self, first_env):
        self.first_env = first_env
        self.envs.close()
        self._build(self.seed)

    def _default_buffers(self):
        """The number of buffers that divides the environments and comes nearest to
        AGENTS_PER_BUFFER agents in each."""
        wanted = max(self.num_threads, -(-self.num_agents // self.AGENTS_PER_BUFFER))
        candidates = [n for n in range(1, min(self.num_envs, 4 * wanted) + 1)
                      if self.num_envs % n == 0]
        return min(candidates, key=lambda n: (n < self.num_threads, abs(n - wanted)))

    def allocate(self, horizon):
        """Make the arrays of `horizon` steps (see new_storage) and begin the first episodes."""
        self.storage = storage = self.new_storage(horizon, aligned_zeros)
        self._tables = [ocean.rows(*self._at(vars(storage), t, t + 1)) for t in range(horizon)]
        self._step_rows = [table.ctypes.data for table in self._tables]
        storage.valid[:] = 1
        self.restart()
        self.begin()
        return storage

    def restart(self, seed=None):
        """Begin new episodes, observations in row T; a seed begins its random numbers anew."""
        self._renew(seed)
        self.envs.reset(ocean.rows(*self._at(vars(self.storage), -1, -1)))
        self.storage.resets[-1] = 1

    def _renew(self, seed):
        """New environments, unless the present ones have that seed and have not begun."""
        if seed is not None and not (self._fresh and seed == self.seed):
            self.envs.close()
            self._build(seed)
        self._fresh = False

    def _at(self, arrays, t, after):
        """The eight rows of step t, as ocean.rows takes them; `after` is the row of the next
        observations."""
        masks = arrays["action_masks"]
        return (arrays["observations"][after], *(arrays[name][t] for name in ("actions", "rewards", "terminals",
                "truncations")), arrays["final_observations"],
                arrays["valid"][after] if self.has_valid else None,
                None if masks is None else masks[after])

    def wait(self, worker=0):
        """(buffer, t) of the next buffer of this worker to act on, or None when all of
        them have reached t = T.

        The same buffer again until it is done, so that its environments and activations stay in the
        core's cache. At t = T it is given once, for the value of the last row.
        """
        waiting = self._waiting[worker]
        if not waiting:
            return None
        buffer = waiting[0]
        t = self._t[buffer]
        if t == len(self.storage.actions):
            waiting.pop(0)
        return buffer, t

    def advance(self, buffer):
        """Step a buffer's environments with the actions of its row t; blocks, without the GIL."""
        t, storage, agents = self._t[buffer], self.storage, self.ranges[buffer]
        first, last = self.env_ranges[buffer]
        run(self._step, last - first, 1, first, self._step_rows[t])
        np.bitwise_or(storage.terminals[t, agents], storage.truncations[t, agents],
                      out=storage.resets[t + 1, agents])
        self._t[buffer] = t + 1

    @property
    def can_step_in_kernels(self):
        """Whether a kernel may step a buffer itself. It may if no subclass or patch changes `wait`
        or `advance`."""
        return (type(self) is Native and not {"wait", "advance"} & set(vars(self))
                and self.threads_per_worker == 1)

    def addresses(self, buffer):
        """For such a kernel: the addresses of ocean_step and of the environments, the first and the
        last of the buffer, and the addresses of the rows (T,) int64. The resets are for the kernel
        to write, and `finish` comes after."""
        return self.library.step_address, self.envs.address, *self.env_ranges[buffer], np.array(self._step_rows)

    def finish(self, buffer):
        """Called after a kernel has taken all steps of a buffer."""
        self._t[buffer] = len(self.storage.actions)

    def _step(self, start, end, first, rows):
        self.envs.step(rows, first + start, first + end)

    def log(self, env=None):
        """Means of the Log fields over the episodes since the last call, and their
        number n; env: of one."""
        return self.envs.log() if env is None else self.envs.log(env, env + 1)

    def save(self):
        """The state of all environments as a uint8 array, for `load`."""
        return self.envs.save()

    def load(self, saved):
        self.envs.load(saved)

    def render(self, index=0):
        """Environment `index` as an RGB array (height, width, 3)."""
        return self.envs.render(index)

    def close(self):
        if not self.closed:
            self.closed = True
            self.envs.close()


class OnGpu(Native):
    """Environments in C that are plain data, on a GPU: one thread an environment,
    all of them one buffer.

    device: the torch.device. They are made on the host and copied there. An engine on that device
    gives `write_to` its own arrays; then a step brings nothing to the host, so that CUDA graphs can
    hold a rollout's steps, in which `launch` steps, and `log` brings the sums. Else each step copies its
    rows from `storage` and back. Raises ImportError without CuPy, ocean.device.NotCompiled if the
    header does not compile there.
    """

    in_graphs = True
    _memory = None

    def __init__(self, env, num_envs, *, device, num_buffers=None, num_threads=None, seed=0,
                 env_kwargs=None):
        self._kernels, self.truncates = ocean.device.Kernels(env), ocean.device.truncates(env)
        self.device = torch.device(device)
        super().__init__(env, num_envs, num_buffers=1, num_threads=num_threads, seed=seed,
                         env_kwargs=env_kwargs)
        self._logs = torch.zeros(num_envs, len(env.log_fields), device=self.device)

    def _build(self, seed):
        super()._build(seed)
        self._put()

    def _put(self):
        """Copy the environments from the host to the addresses that CUDA graphs use."""
        memory = torch.from_numpy(self.envs.memory)
        if self._memory is None:
            self._memory = memory.to(self.device, copy=True)
        else:
            self._memory.copy_(memory)

    def _get(self):
        """Copy the environments to the host, without their pointers, which hold for the device
        only."""
        shape, plain = (self.num_envs, self.library.struct_size), self.library.plain_start
        self.envs.memory.reshape(shape)[:, plain:] = self._memory.view(shape)[:, plain:].cpu().numpy()

    def allocate(self, horizon):
        """Make the arrays of `horizon` steps (see new_storage) and begin the first episodes."""
        self.storage = self.new_storage(horizon, aligned_zeros)
        self.storage.valid[:] = 1
        self._host = {name: None if array is None else torch.from_numpy(array)
                      for name, array in vars(self.storage).items()}
        one = self.new_storage(1, lambda shape, dtype: torch.from_numpy(np.zeros(shape, dtype)).to(self.device))
        one.valid[:] = 1
        self._arrays = None
        self._bind(vars(one))
        self.restart()
        self.begin()
        return self.storage

    def write_to(self, arrays):
        """From now on step into {name: tensor}, shaped as the rollout's arrays; copies our last row
        there."""
        for name in SEEN:
            if arrays[name] is not None:
                arrays[name][-1].copy_(self._bound[name][-1])
        self._arrays = arrays
        self._bind(arrays)

    def _bind(self, arrays):
        """Addresses for the kernels: the rows of each step, and last those of a reset."""
        self._bound, horizon = arrays, len(arrays["actions"])
        rows = [self._at(arrays, t, t + 1) for t in range(horizon)] + [self._at(arrays, -1, -1)]
        addresses = [[0 if row is None else row.data_ptr() for row in step] for step in rows]
        tables = [self.envs.rows_for_a_gpu(np.array(step, np.int64)) for step in addresses]
        self._tables = torch.from_numpy(np.stack(tables)).to(self.device)
        self._step_rows = [table.data_ptr() for table in self._tables]

    def _launch(self, name, *arguments, first=0, num_envs=None):
        stream = torch.cuda.current_stream(self.device).cuda_stream
        envs = self._memory.data_ptr() + first * self.library.struct_size
        with cuda_cpp.on_stream(stream):
            self._kernels.launch(name, num_envs or self.num_envs, (envs, *arguments))

    def restart(self, seed=None):
        """Begin new episodes, observations in row T; a seed begins its random numbers anew."""
        self._renew(seed)
        self._launch("reset", self._step_rows[-1])
        self._bound["resets"][-1] = 1
        if self._arrays is None:
            self._tell(SEEN, -1, -1)

    def launch(self, t):
        """Step all environments with row t's actions on torch's current
        stream; it can be captured."""
        self._launch("step", self._step_rows[t], self._bound["resets"][t + 1].data_ptr())

    def advance(self, buffer):
        """Step all environments with the actions of row t."""
        t = self._t[0]
        if self._arrays is not None:
            self.launch(t)
        else:
            self._bound["actions"][0].copy_(self._host["actions"][t])
            self.launch(0)
            self._tell(("rewards", "terminals", "truncations"), 0, t)
            self._tell(SEEN, 1, t + 1)
            self._tell(("final_observations",), slice(None), slice(None))
        self._t[0] = t + 1

    def _tell(self, names, row, to):
        for name in names:
            if self._host[name] is not None:
                self._host[name][to] = self._bound[name][row]

    def log(self, env=None):
        """As Native's; only the sums come to the host."""
        first, count = (0, self.num_envs) if env is None else (env, 1)
        logs = self._logs[first : first + count]
        self._launch("log", logs.data_ptr(), first=first, num_envs=count)
        return self.envs.means(logs.double().sum(0).tolist())

    def save(self):
        """The state of all environments as a uint8 array, for `load`, on the host as well."""
        self._get()
        return self.envs.save()

    def load(self, saved):
        self.envs.load(saved)
        self._put()

    def render(self, index=0):
        """Environment `index` as an RGB array (height, width, 3)."""
        self._get()
        return self.envs.render(index)


# --------------------------------------------------------------------------------------------------
# Environments in Python


STARTUP = 120.0  # a worker has at least so many seconds for its first answer: packages load slowly


class Emulated(Vector):
    """Serial, Multiprocessing and Ray: workers that each step a contiguous
    share of the environments.

    A buffer is the workers of one batch. Infos are dicts of the episodes that ended, with
    episode_return, episode_length and the numbers of the environment's last info; `log` averages
    them. See `make` for the arguments.
    """

    has_valid = True
    num_workers = threads_per_worker = 1  # one thread acts, `num_threads` learn

    def __init__(self, creators, *, num_workers=None, batch_size=None, seed=0,
                 num_threads=None, name=None, timeout=60.0):
        processes, per_batch = _divide(len(creators), num_workers, batch_size)
        self.seed, self.name, self._creators = seed, name or type(self).__name__.lower(), creators
        self.timeout, self._next_look, self._starting = timeout, 0.0, set()
        self.num_threads = num_threads or physical_cores()
        self._driver = driver = emulation.create(*creators[0], seed)
        emulation.note_moments(driver)
        self._take_spaces(driver)
        self.num_envs = len(creators) * emulation.copies(driver)
        self.agents_per_env = emulation.slots(driver) // emulation.copies(driver)
        self.num_agents = self.num_envs * self.agents_per_env
        self.num_processes, self.workers_per_batch = processes, per_batch
        self._envs_each = len(creators) // processes
        each = self._agents_each = self.num_agents // processes
        self.agents_per_batch = per_batch * each
        self.ranges = [slice(i, i + self.agents_per_batch)
                       for i in range(0, self.num_agents, self.agents_per_batch)]
        self._busy, self._ready = {}, deque()
        self._pending, self._infos, self._answers, self._given = [0] * len(self.ranges), {}, {}, {}
        self._logs, self._received, self._fresh = {}, None, False
        self._done = deque(maxlen=processes)  # of the workers that have stepped, the first one first
        # a PufferEnv's infos may tell how many episodes they speak for; else its ends are counted
        self._counts = not isinstance(driver, emulation.WRAPPERS)
        self._uncounted, self._ends = False, 0

    @property
    def driver_env(self):
        """One environment of this process: what policies read spaces and obs_dtype from."""
        return self._driver

    @property
    def agents_per_recv(self):
        return self.agents_per_batch

    def envs_of(self, worker):
        """The arguments of a worker's workers.Envs, pickled. Raises TypeError if they cannot be."""
        import cloudpickle

        first = worker * self._envs_each
        creators = self._creators[first : first + self._envs_each]
        try:
            return cloudpickle.dumps((creators, emulation.signature(self._driver),
                                      first, self.seed))
        except (TypeError, pickle.PicklingError) as error:
            raise ConfigError(f"{self.name} cannot be sent to another process ({error}); give a creator without such "
                              "things in it, or take backend serial.") from error

    def agents_of(self, worker):
        """The slice of a worker's agents."""
        return slice(worker * self._agents_each, (worker + 1) * self._agents_each)

    def allocate(self, horizon):
        """Make the arrays of `horizon` steps (see new_storage) and begin the first episodes."""
        self._stop()
        self._busy.clear()
        self._starting = set(range(self.num_processes))
        self._start(horizon)
        for name, value in self._given.items():  # its workers are new ones
            self._ask(name, value, None)
        self.restart(self.seed)
        self.begin()
        self._fresh = True  # its first episodes have begun, and none was reset for
        return self.storage

    def restart(self, seed=None):
        """Begin new episodes, observations in row T; a seed begins its random numbers anew."""
        self._settle()
        for worker in range(self.num_processes):
            self._tell(worker, workers.RESET, -1 if seed is None else seed)
        self._settle()

    def begin(self):
        self._settle()
        super().begin()

    def _rewind(self):
        super()._rewind()
        self._ready = deque(range(self.num_buffers))

    def wait(self, worker=0):
        """(buffer, t) of the first buffer that is ready to act on, or None when all have been given
        with t = T, which each is once, for the value of the last row."""
        while not self._ready:
            if not self._busy:
                return None
            self._listen()
        buffer = self._ready.popleft()
        return buffer, self._t[buffer]

    def advance(self, buffer):
        """Have a buffer's environments stepped with the actions of its row t."""
        self._pending[buffer] = self.workers_per_batch
        for worker in range(buffer * self.workers_per_batch, (buffer + 1) * self.workers_per_batch):
            self._tell(worker, workers.STEP, self._t[buffer])

    def _tell(self, worker, kind, number):
        allowed = max(self.timeout, STARTUP) if worker in self._starting else self.timeout
        self._busy[worker] = time.monotonic(), allowed, kind
        self._send(worker, kind, number)

    def _settle(self):
        while self._busy:
            self._listen()

    def _listen(self):
        """Take answers, or wait half a second for one. Raises WorkerError if a worker fails or is
        late."""
        self._collect()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 0.5
        for worker, (since, allowed, _) in self._busy.items():
            if now - since > allowed:
                self._fail(worker, f"has not answered for {allowed:.0f} s (vec.timeout)",
                           self._where(worker))

    def _where(self, worker):
        """The place in which a worker hangs, as far as it is known."""
        return ""

    def _fail(self, worker, what, text="", cause=None):
        """End all workers and raise WorkerError: `what` happened to a worker; `text` has the
        details."""
        with contextlib.suppress(Exception):
            self.close()
        raise WorkerError(f"worker {worker} ({self._which(worker)} of {self.name}) {what}.\n{text}".rstrip()) from cause

    def _blame(self, worker, fault):
        """End all workers and raise the EnvError of a worker's environment."""
        self.close()
        if not hasattr(fault, "__notes__"):
            fault.add_note(f"({self._which(worker)} of {self.name})")
        raise fault

    def _which(self, worker):
        """The environments of a worker, in words."""
        each = self.num_envs // self.num_processes
        first, last = worker * each, (worker + 1) * each - 1
        return f"environment {first}" if first == last else f"environments {first} to {last}"

    def _finish(self, worker, infos):
        """A worker has answered; infos: [(environment, info)]."""
        _, _, kind = self._busy.pop(worker)
        self._starting.discard(worker)
        if kind in (workers.RENDER, workers.ASK):
            self._answers[worker] = infos
            return
        for env, info in infos:
            self._add_to_log(env, info)
        if kind == workers.STEP:
            buffer = worker // self.workers_per_batch
            self._infos[worker] = [info for _, info in infos]
            self._done.append(worker)
            self._pending[buffer] -= 1
            if self._pending[buffer] == 0:
                self._t[buffer] += 1
                self._ready.append(buffer)

    def _add_to_log(self, env, info):
        numbers = flat_spaces.numeric_scalars({key: value for key, value in info.items()
                                             if key != "episode"})
        if not self._counts and "n" in numbers:
            numbers["info_n"] = numbers.pop("n")
        self._uncounted |= self._counts and "n" not in numbers
        count = numbers.pop("n", 1.0)
        if not count:  # of no episode
            return
        sums = self._logs.setdefault(env, {"n": [0.0, 1.0]})
        sums["n"][0] += count
        for name, value in numbers.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += value * count
            entry[1] += count

    def log(self, env=None):
        """Means of the infos' numbers over the episodes finished since the last call, and their
        number n; of all environments, or of one. {} if none finished."""
        self._settle()
        sums = {}
        for one in list(self._logs) if env is None else [env]:
            for name, (total, weight) in self._logs.pop(one, {}).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + weight
        means = flat_spaces.episode_means(sums, sums.pop("n", [0.0])[0])
        if self._uncounted and env is None and len(self.storage.actions) > 1:  # a rollout ends with each call
            s = self.storage
            self._ends += int(np.count_nonzero((s.terminals | s.truncations) & s.valid[:-1]))
            if means:
                means["n"], self._ends = max(means["n"], self._ends), 0
        return means

    def recv(self):
        """(observations, rewards, terminals, truncations, infos, agent_ids, masks) of the first
        batch_size environments that are ready; agent_ids are their agents' numbers, masks is False
        for an inactive agent. Arrays are views that stay as they are until these environments step
        again, copies if these are no contiguous range. Raises RuntimeError if nothing was
        sent before, and WorkerError."""
        if self._received is not None or not (self._busy or self._done):
            raise RuntimeError("recv() comes after async_reset() or send().")
        while len(self._done) < self.workers_per_batch:
            self._listen()
        s, self._received = self.storage, sorted(self._done.popleft() for _ in range(self.workers_per_batch))
        parts = [self.agents_of(worker) for worker in self._received]
        agent_ids = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        agents = slice(parts[0].start, parts[-1].stop)
        if agents.stop - agents.start > len(agent_ids):
            agents = agent_ids
        infos = [info for worker in self._received for info in self._infos.get(worker, [])]
        return (s.observations[1, agents], s.rewards[0, agents], s.terminals[0, agents].view(bool),
                s.truncations[0, agents].view(bool), infos, agent_ids, s.valid[1, agents].view(bool))

    def send(self, actions):
        """Step the agents of the last `recv` with actions (agents_per_batch,) or (agents_per_batch,
        heads or dims). Raises RuntimeError without one, ValueError for another shape or actions
        outside their space."""
        if self._received is None:
            raise RuntimeError("send() comes after recv().")
        self._check_actions(actions, self.agents_per_batch)
        actions = np.reshape(actions, (len(self._received), self._agents_each, self.action_dims))
        batch, self._received = self._received, None
        for worker, part in zip(batch, actions, strict=True):
            self.storage.actions[0, self.agents_of(worker)] = part
            self._tell(worker, workers.STEP, 0)

    def async_reset(self, seed=None):
        """Begin new episodes; `recv` gives the observations of the first batch."""
        self.reset(seed)

    def reset(self, seed=None):
        """Begin new episodes: (observations (N, *obs), infos). The first one has the vector's own
        seed, and later ones without a seed go on with the random numbers of the one before."""
        if self.storage is None or len(self.storage.actions) != 1:
            self.allocate(1)
        self.restart(self.seed if seed is None and self._fresh else seed)
        self._fresh, self._received = False, None
        self.begin()
        self._infos.clear()
        self._done.extend(range(self.num_processes))
        return self.storage.observations[1], []

    def _last_infos(self):
        self._settle()
        return [info for worker in range(self.num_processes) for info in self._infos[worker]]

    def call(self, name, *args, **kwargs):
        """[what the method `name` of each environment returns], or its attribute of that name; also of an environment
        within wrappers, and in another process. Between rollouts only. Raises AttributeError if it has none."""
        return self._ask(name, args, kwargs)

    def set_attr(self, name, value):
        """Set an attribute that each environment has, or one within its wrappers; as `call`."""
        self._ask(name, value, None)
        self._given[name] = value

    def _ask(self, *question):
        import cloudpickle

        if self.closed:
            raise RuntimeError("these environments are closed.")
        if self.storage is None:
            self.allocate(1)
        self._settle()
        for worker in range(self.num_processes):
            self._tell(worker, workers.ASK, cloudpickle.dumps(question))
        self._settle()
        answers = [self._answers.pop(worker) for worker in range(self.num_processes)]
        if missing := next((words for _, words in answers if words), None):
            raise AttributeError(f"{missing}.")
        return [answer for part, _ in answers for answer in part]

    def close(self):
        """End the workers and close all environments."""
        if not self.closed:
            self.closed = True
            try:
                self._stop()
            finally:
                self._driver.close()

    def __del__(self):
        if "_driver" in self.__dict__ and not self.closed:
            try:  # noqa: SIM105 - when the interpreter ends, contextlib may be gone already
                self.close()
            except Exception:
                pass


class Serial(Emulated):
    """Environments in Python, one after the other in this process; see `make`."""

    _envs = None

    def __init__(self, creators, **options):
        super().__init__(creators, num_workers=1, **options)

    def _start(self, horizon):
        self.storage = self.new_storage(horizon, aligned_zeros)
        if self._envs is None:
            creators = [(self._driver, (), {}), *self._creators[1:]]
            self._envs = workers.Envs(creators, emulation.signature(self._driver), seed=self.seed)
        self._envs.bind(vars(self.storage), 0)

    @property
    def envs(self):
        """The environments themselves, wrapped ones as their wrappers."""
        if self._envs is None:
            self.allocate(1)
        return self._envs.envs

    def _send(self, worker, kind, number):
        try:
            self._finish(worker, self._envs.do(kind, number))
        finally:
            self._busy.clear()  # also after an error or Ctrl-C, which nobody else will answer

    def advance(self, buffer):
        """Step all environments with the actions of row t."""
        self._step_in_time(functools.partial(super().advance, buffer), self._t[buffer])

    def step(self, actions):
        s = self.storage
        if s is None or len(s.actions) != 1:
            return super().step(actions)  # it says what is wrong
        self._check_actions(actions, self.num_agents)
        s.actions[0] = np.reshape(actions, s.actions[0].shape)
        infos = self._envs.do(workers.STEP, 0)
        for env, info in infos:
            self._add_to_log(env, info)
        flags = s.terminals[0].view(bool), s.truncations[0].view(bool)
        return s.observations[1], s.rewards[0], *flags, [info for _, info in infos]

    def _stop(self):
        if self.closed and self._envs is not None:
            self._envs.close(first=1)  # environment 0 is the one that policies read

    def render(self, index=0):
        """Environment `index` as its own render gives it."""
        return self._envs.render(index)


class Package(Serial):
    """The vector environment of an environment's own package (ALE's in C++, CartPole's in numpy),
    in this process; see `make`. creators: all the same one, with a method `vector`
    (environments.GymnasiumCreator)."""

    def __init__(self, creators, *, num_threads=None, **options):
        creator, _, kwargs = creators[0]
        if any(other != creators[0] for other in creators):
            raise ConfigError("a package's own vector environment has one creator and one dict of "
                              "env_kwargs for all.")
        several = creator.vector, (len(creators),), {**kwargs, "num_threads": num_threads}
        super().__init__([several], num_threads=num_threads, **options)


class Multiprocessing(Emulated):
    """Environments in Python in processes of their own (workers.Process), which write into the
    arrays that the policy reads; see `make`."""

    _workers = ()

    def _start(self, horizon):
        memory = workers.SharedMemory()
        self.storage = self.new_storage(horizon, memory.zeros)
        names = [name for name, array in vars(self.storage).items() if array is not None]
        layouts, self._poller = dict(zip(names, memory.layouts, strict=True)), select.poll()
        self._workers, self._numbers = [], {}
        for worker in range(self.num_processes):
            process = workers.Process(memory, {"path": sys.path, "envs": self.envs_of(worker),
                                               "arrays": layouts,
                                               "first_agent": self.agents_of(worker).start})
            self._workers.append(process)
            self._numbers[process.fileno()] = worker
            self._poller.register(process, select.POLLIN)

    def _send(self, worker, kind, number):
        self._workers[worker].send(kind, number)

    def _collect(self):
        for fd, _ in self._poller.poll(500):
            self._take(self._numbers[fd])

    def _take(self, worker):
        process = self._workers[worker]
        try:
            kind, payload = process.receive()
        except workers.Gone:
            self._fail(worker, "died" + process.how_it_died(), process.report())
        if kind == workers.FAULT:  # its words say all; no traceback is needed
            self._blame(worker, pickle.loads(payload))
        if kind == workers.ERROR:
            self._fail(worker, "raised", payload.decode())
        self._finish(worker, pickle.loads(payload) if payload else ())

    def _where(self, worker):
        return self._workers[worker].report(ask=True)

    def _stop(self):
        stopped, self._workers = self._workers, ()
        # An idle worker ends when its channel closes; its environments may have to finish a video
        # first.
        deadline = time.monotonic() + (1.0 if self._busy else workers.CLOSING)
        self._busy.clear()
        for process in stopped:
            process.leave()
        for process in stopped:
            process.end(deadline - time.monotonic())

    def render(self, index=0):
        """Environment `index` as its own render gives it."""
        self._settle()
        worker, number = divmod(index, self.num_envs // self.num_processes)
        self._tell(worker, workers.RENDER, number)
        self._settle()
        return self._answers.pop(worker)


class Ray(Emulated):
    """Environments in Python in Ray actors, on this machine or others; see `make`. Their
    results are copied here."""

    _actors = ()

    def _start(self, horizon):
        try:
            import ray
        except ImportError:
            raise ConfigError("backend ray needs the package ray: pip install ray") from None
        self._ray = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        self.storage = self.new_storage(horizon, aligned_zeros)
        actor, layout = ray.remote(workers.RemoteEnvs), workers.RemoteEnvs.layout(self.storage)
        self._actors, self._references = [], {}
        for worker in range(self.num_processes):
            self._actors.append(actor.remote(self.envs_of(worker), self._agents_each,
                                             layout, sys.path))

    def _send(self, worker, kind, number):
        actions = (self.storage.actions[number, self.agents_of(worker)] if kind == workers.STEP
                   else None)
        self._references[self._actors[worker].do.remote(kind, number, actions)] = worker, kind, number

    def _collect(self):
        references = list(self._references)
        self._ray.wait(references, timeout=0.5)  # ray.wait gives one at most
        for reference in self._ray.wait(references, num_returns=len(references), timeout=0)[0]:
            worker, kind, t = self._references.pop(reference)
            try:
                infos, results = self._ray.get(reference)
            except Exception as error:  # an error of the environment, or of a lost machine
                self._fail(worker, "failed", error, error)
            if results is None:
                self._blame(worker, infos)
            workers.RemoteEnvs.store(results, self.storage, self.agents_of(worker), kind, t)
            self._finish(worker, infos)

    def _stop(self):
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        self._actors, self._references = (), {}
        self._busy.clear()


# --------------------------------------------------------------------------------------------------
# Environments whose arrays are tensors


class Tensors(Vector):
    """Many environments in one object that takes and returns tensors (tensors.py says what it must
    have), stepped in this process on their device, as one buffer; see `make`. creators: one, of an
    environment that has num_envs itself.

    The rollout's arrays lie on the host, and the network that acts reads its rows there. An engine
    on the environments' own device gives `write_to` arrays of its own instead. Then a step brings
    only its terminals and truncations to the host, which checks if there is anything to bootstrap.
    Episodes are counted on the device; `log` reads the sums, once.
    """

    num_workers = num_processes = 1

    def __init__(self, creators, *, seed=0, num_threads=None, timeout=60.0, name="tensors"):
        if len(creators) != 1:
            raise ConfigError("backend tensors steps one object that holds many environments, not "
                              f"{len(creators)}: leave vec.num_envs at 1 and set its own "
                              "number, env.num_envs.")
        env = emulation.build(*creators[0], seed)
        self._env = tensors.look(env, seed)
        if self._env is None:
            raise ConfigError(f"backend tensors: {env} has no num_envs and "
                              "single_observation_space, or its reset returns neither torch tensors "
                              "nor arrays with __dlpack__ as JAX's; take another backend.")
        self.seed, self.name, self.timeout, self.num_envs = seed, name, timeout, self._env.num_agents
        self.num_threads = self.threads_per_worker = num_threads or physical_cores()
        self.num_agents = self.agents_per_batch = self.num_envs
        self.ranges = [slice(0, self.num_agents)]
        self.has_valid, self.device = self._env.has_valid, self._env.device
        self._take_spaces(self._env)

    @property
    def driver_env(self):
        """What policies read spaces and obs_dtype from."""
        return self._env

    def allocate(self, horizon):
        """Make the arrays of `horizon` steps (see new_storage) and begin the first episodes."""
        self.storage = self.new_storage(horizon, aligned_zeros)
        self.storage.valid[:] = 1
        self._host = {name: None if array is None else torch.from_numpy(array)
                      for name, array in vars(self.storage).items()}
        self._arrays = self._host
        self.write_to(self._host)
        self.restart(self.seed)
        self.begin()
        return self.storage

    def write_to(self, arrays):
        """From now on step into {name: tensor}, shaped as the rollout's
        arrays; copies those there."""
        for name, tensor in self._arrays.items():
            if tensor is not None:
                arrays[name].copy_(tensor)
        self._arrays, self._told = arrays, [] if arrays is self._host else ["terminals", "truncations"]

        def row(t):
            before = {"before": arrays["observations"][t],
                      "final_observations": arrays["final_observations"]}
            now = {name: arrays[name][t]
                   for name in ("actions", "rewards", "terminals", "truncations")}
            after = {name: None if arrays[name] is None else arrays[name][t + 1] for name in SEEN}
            return self._env.view({**before, **now, **after})

        self._rows = [row(t) for t in range(len(arrays["actions"]))]

    def restart(self, seed=None):
        """Begin new episodes, observations in row T; a seed begins its random numbers anew."""
        self._env.reset_into(self._rows[-1], seed)

    def _rewind(self):
        self._t, self._given = 0, -1

    def step(self, actions):
        self.begin()  # an environment may have the row before as its final observations
        return super().step(actions)

    def wait(self, worker=0):
        """(0, t), or None after row T, which is given once for the value of the last row."""
        if worker or self._given == self._t:
            return None
        self._given = self._t
        return 0, self._t

    def advance(self, buffer):
        """Step all environments with the actions of row t."""
        self._step_in_time(self._step, self._t)
        self._t += 1

    def _step(self):
        with default_stream(self.device):
            self._env.step_into(self._rows[self._t])
        for name in self._told:
            self._host[name][self._t].copy_(self._arrays[name][self._t])

    def log(self, env=None):
        """Means over the episodes finished since the last call, and their number n; of all
        environments, or of one. {} if none finished."""
        return self._env.log(env)

    def render(self, index=0):
        """Environment `index` as its own render gives it, or the one picture of all."""
        frames = self._env.render()
        several = isinstance(frames, list | tuple) or np.ndim(frames) == 4
        return frames[index] if several else frames

    def close(self):
        if not self.closed:
            self.closed = True
            self._env.close()


# --------------------------------------------------------------------------------------------------
# Which backend steps what


BACKENDS = dict(zip(configuration.BACKENDS, (Native, Serial, Multiprocessing, Ray, Package, Tensors), strict=True))


def choose_backend(env, backend=None, num_envs=1, num_workers=None, batch_size=None):
    """The class that steps `num_envs` of `env`: an environment in C, as `make` takes it, a
    creator, or an instance.

    backend: a class, which it is then; a name in BACKENDS, in any case; PufferEnv and "PufferEnv",
    as PufferLib has it, are Native. "auto" or None: Native for environments in C. For others
    Package if their creator prefers it and neither workers nor a batch are asked for, Serial if one
    worker would step all of them or they are instances, else Multiprocessing.
    Raises ValueError if there is no backend of that name, or if it cannot step this environment.
    """
    one = next(iter(env), None) if isinstance(env, (list, tuple)) else env
    if isinstance(backend, type) and issubclass(backend, emulation.PufferEnv):
        backend = "native"
    if isinstance(backend, str):
        name = {"puffer": "native", "pufferenv": "native"}.get(backend.lower(), backend.lower())  # PufferLib's names
        if name not in ("auto", *BACKENDS):
            raise ConfigError(f"vec.backend = {backend}: there is no such backend; there are {', '.join(BACKENDS)}.")
        backend = BACKENDS.get(name)
    in_c, tensors_given = environments.is_in_c(env), getattr(one, "gives_tensors", False)
    if backend is Native and isinstance(one, type) and issubclass(one, emulation.PufferEnv):
        return Serial  # PufferLib's word for a class that steps its agents itself
    if backend is None and (in_c or tensors_given):
        return Native if in_c else Tensors
    if backend is None:
        alone = (num_workers or (_most_workers(num_envs) if callable(one) else 1)) == 1
        free = num_workers is None and batch_size is None
        packed = num_envs > 1 and free and getattr(one, "prefers_vector", False)
        return Package if packed else Serial if alone else Multiprocessing
    if backend in ((Package, Tensors) if in_c else (Native,)) or (
            backend is Package and not getattr(one, "has_vector", False)):
        kinds = "native, serial, multiprocessing and ray" if in_c else "serial, multiprocessing and ray"
        raise ConfigError(
            f"vec.backend = {backend.__name__.lower()}: cannot step {environments.name_of(one)}; "
            f"there are {kinds} for it.")
    return backend


ENVIRONMENT = 4000  # bytes of a small environment in Python


def make(env, num_envs=1, backend=None, *, num_workers=None, batch_size=None, num_buffers=None, num_threads=None,
         device=None, seed=0, env_args=(), env_kwargs=None, timeout=60.0, **settings):
    """A vector of `num_envs` environments.

    env: the name of a C environment ("breakout"), the path of its header or an `ocean.Library`;
    "gym/ID", "pettingzoo/FAMILY/NAME" or "path/to/file.py:callable"; a creator (a class or
    function), or a list of one an environment; or an instance, if num_envs is 1.
    backend: Native, Serial, Multiprocessing, Ray, Package, Tensors, or its name in lower case, or a
    class of your own that is called as Multiprocessing is; by default the one that `choose_backend`
    names, or Tensors if one environment is made, or a named one that holds num_envs itself, and its
    reset returns tensors. It then holds num_envs × env_kwargs["num_envs"].
    num_buffers: Native's. num_threads: of learning, too. device: "cuda" is for environments in C, see OnGpu.
    num_workers: processes or Ray actors (default: the physical cores, or the most below them that
    divide num_envs). batch_size: environments that one `recv` waits for (default: all). env_args:
    the creator's positional arguments, or a list of one list an environment if env is a list.
    env_kwargs: its keyword arguments, or the C environment's settings, one dict or a list of one
    dict an environment; any other keyword is one of them for all. seed: environment i is reset with
    seed + i. timeout: seconds after which a worker, or a step in this process, that does not answer
    is an error. num_workers and batch_size may be "auto", their default.
    Raises ValueError for numbers that do not divide, and names numbers that do, for more threads or
    workers than this machine can use, and for a setting that the environment does not have;
    MemoryError for more environments than it can hold; TypeError for what is no environment.
    """
    env, num_workers, batch_size = environments.find_maker(env), _number(num_workers), _number(batch_size)
    if device is not None and "device" in (environments.settings_of(env) or ()):  # its own setting
        settings, device = {**settings, "device": device}, None
    env_kwargs = environments.with_settings(env, env_kwargs, settings, KEYWORDS)
    backend, asked = choose_backend(env, backend, num_envs, num_workers, batch_size), backend
    if backend is Native:
        num_envs, env_kwargs = environments.count_copies(num_envs, env_kwargs)
    holds = not getattr(env, "takes_copies", True) and "num_envs" in env.settings  # it makes as many as it is told
    looks = holds and asked in (None, "auto") and backend in (Serial, Multiprocessing)  # it may be one for Tensors
    if not looks:
        _check_backend(backend, num_envs, num_workers, batch_size, num_buffers)
    if holds and backend is Tensors:
        num_envs, env_kwargs = 1, _all_in_one(num_envs, env_kwargs)
    _check_counts(env, asked, num_envs, num_workers, num_threads)
    if device is not None or backend is Native:
        native = Native if device is None else _on_gpu(env, backend, num_buffers, device)
        return native(env, num_envs, num_buffers=num_buffers, num_threads=num_threads, seed=seed, env_kwargs=env_kwargs)
    if environments.is_in_c(env):
        header = str(env.header if isinstance(env, ocean.Library) else env)
        creators, name = environments.ocean_creators(header, num_envs, env_kwargs), Path(header).stem
    else:
        creators, name = environments.creators_of(env, num_envs, env_args, env_kwargs)
    alone = backend is Serial and len(creators) == 1
    if looks or (alone and asked in (None, "auto")):
        made = emulation.build(*creators[0], seed)
        found = tensors.look(made, seed)
        backend = backend if found is None else Tensors
        _check_backend(backend, num_envs, num_workers, batch_size, num_buffers)
        if alone:
            creators = [(lambda: found or made, (), {})]
        else:
            if found is not None:
                creators, _ = environments.creators_of(env, 1, env_args, _all_in_one(num_envs, env_kwargs))
            (found or made).close()
    options = {"num_workers": num_workers, "batch_size": batch_size, "timeout": timeout}
    options = {"timeout": timeout} if issubclass(backend, (Serial, Tensors)) else options
    return backend(creators, seed=seed, num_threads=num_threads, name=name, **options)


KEYWORDS = [name for name, p in inspect.signature(make).parameters.items()
            if p.kind is p.KEYWORD_ONLY]


def why_not_on_gpu(env, backend="auto", num_buffers=None):
    """Why `make` would not step an environment on a GPU, in words; None if it would."""
    if not isinstance(env, ocean.Library) or backend not in ("auto", "native", None, Native):
        return "only environments in C do, with backend native"
    if num_buffers not in (None, 1):
        return f"vec.num_buffers is {num_buffers}, but all environments are one buffer there"
    return ocean.device.why_not(env)


def _on_gpu(env, backend, num_buffers, device):
    why = why_not_on_gpu(env, backend, num_buffers)
    if why is not None:
        raise ConfigError(f"{environments.name_of(env)} cannot step on {device}: {why}; "
                          "leave device out.")
    return functools.partial(OnGpu, device=device)


def _number(value):
    return None if value == "auto" else value


def _check_backend(backend, num_envs, num_workers, batch_size, num_buffers):
    name = backend.__name__.lower()
    if num_buffers not in (None, 1) and not issubclass(backend, Native):
        raise ConfigError(f"vec.num_buffers = {num_buffers} is for backend native, not for {name}; of "
                          "environments in Python vec.batch_size says how many act together.")
    if issubclass(backend, (Native, Serial, Tensors)) and (num_workers not in (None, 1)
                                                           or batch_size not in (None, num_envs)):
        other = {Native: "; vec.num_threads says how many threads step them", Tensors: ""}.get(
            backend, "; for more workers take multiprocessing")
        raise ConfigError(f"backend {name} steps all environments in this process: num_workers is 1 and batch_size "
                          f"{num_envs}{other}.")


def _all_in_one(num_envs, env_kwargs):
    """The env_kwargs of one object that holds all environments: its own
    number times the vector's."""
    if num_envs == 1:
        return env_kwargs
    if isinstance(env_kwargs, (list, tuple)):
        raise ConfigError("backend tensors makes one object that holds all environments, but "
                          f"env_kwargs is a list of {len(env_kwargs)}; give one dict.")
    total, others = environments.count_copies(num_envs, env_kwargs)
    return {**(others or {}), "num_envs": total}


def _check_counts(env, backend, num_envs, num_workers, num_threads):
    processes.check_count("vec.num_threads", num_threads, *processes.processes_at_most())
    if backend not in ("ray", Ray):  # a cluster has more cores than this machine
        processes.check_count("vec.num_workers", num_workers, *processes.processes_at_most())
    # An environment in Python has an unknown size before it is made; this is about the least.
    each = getattr(env, "struct_size", 0 if environments.is_in_c(env) else ENVIRONMENT)
    processes.check_memory(num_envs * each, f"{num_envs:,} environments")


# --------------------------------------------------------------------------------------------------
# From a configuration


def load_env(env_name, args):
    """The vectorized environment that `args` describes. Raises ConfigError for sizes that cannot work."""
    configuration.check_names(args, "vec")
    maker, vec = configuration.load_maker(configuration.find_config(env_name)[0]), args["vec"]
    if isinstance(maker, ocean.Library) and vec["backend"] not in ("auto", "native"):
        if vec["total_agents"] is not None:
            raise ConfigError("vec.total_agents is for vec.backend native; set vec.num_envs and env.num_envs instead.")
        return make_from(maker, vec["num_envs"], args, args["env"])  # each holds env.num_envs
    copies, settings = environments.split_copies(maker, args["env"])
    num_envs, total = vec["num_envs"] * copies, vec["total_agents"]
    if total is not None:
        with environments.sample(maker, args["env"]) as probe:
            agents = emulation.slots(probe)
        num_envs, rest = divmod(total, agents)
        if rest or not num_envs:
            raise ConfigError(f"vec.total_agents = {total}: one {maker.name} has {plural(agents, 'agent')}; "
                              "take a multiple of that.")
    if num_envs < 1:
        raise ConfigError(f"vec.num_envs × env.num_envs = {num_envs}: there must be 1 environment or more.")
    return make_from(maker, num_envs, args, settings)


def make_from(maker, num_envs, args, settings):
    """`make` with the vec section's settings."""
    vec, device = args["vec"], choose_device(maker, args["vec"], args["train"])
    options = {name: vec[name] for name in ("num_buffers", "num_threads", "num_workers", "batch_size", "timeout")}
    options |= {"seed": args["train"]["seed"], "env_kwargs": settings}
    try:
        return make(maker, num_envs, vec["backend"], device=device, **options)
    except EnvError as error:  # the GPU's compiler does not take the header
        if device is None:
            raise
        if vec["device"] == "cuda":
            raise ConfigError(f"vec.device = cuda: {error}") from None
        first, *lines = str(error).splitlines()
        _print_host(maker, " ".join([first, *(line.strip() for line in lines if "error" in line)][:2]))
        return make(maker, num_envs, vec["backend"], **options)


def choose_device(env, vec, train):
    """The torch.device on which environments step, None for the host. ConfigError if vec.device =
    cuda cannot be. If auto keeps environments in C on the host of a GPU, it prints why."""
    asked, in_c = vec["device"], isinstance(env, ocean.Library) and vec["backend"] in ("auto", "native")
    if asked == "host" or (asked == "auto" and not (train["device"] == "cuda" and in_c and torch.cuda.is_available())):
        return None  # the trainer refuses cuda without a GPU
    why = ("train.device is cpu, to which each step would be copied" if train["device"] != "cuda" else
           "torch finds no GPU here" if not torch.cuda.is_available() else
           why_not_on_gpu(env, vec["backend"], vec["num_buffers"]))
    if why is None:
        return torch.device("cuda", data_parallel.connect().choose_gpu())
    if asked == "cuda":
        raise ConfigError(f"vec.device = cuda: {getattr(env, 'name', 'this environment')} cannot step on a GPU: {why}. "
                          "Take auto or host.")
    _print_host(env, why)
    return None


def _print_host(env, why):
    if data_parallel.connect().rank == 0:
        print(f"vec.device: {env.name} steps on the host, because {why}", file=sys.stderr)
