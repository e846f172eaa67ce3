"""Vectorization: many environments as one set of time-major arrays.

    import vector
    vecenv = vector.make("breakout", num_envs=4096, num_buffers=8, num_threads=2, seed=0)
    observations, infos = vecenv.reset()
    observations, rewards, terminals, truncations, infos = vecenv.step(actions)

That is the synchronous form, for scripts. The trainer uses the form underneath, which copies nothing:

    storage = vecenv.allocate(horizon)      # arrays (T, N, ...) that environments write and the policy reads
    vecenv.begin()                          # the last row becomes the first; every buffer stands at t = 0
    while (ready := vecenv.wait(worker)):   # a buffer of this worker whose row t is there to act on
        buffer, t = ready                   #   its agents are vecenv.ranges[buffer]
        ...write storage.actions[t, agents]; at t == horizon only the value of the last row is wanted...
        vecenv.advance(buffer)              # step its environments: rewards[t], observations[t + 1], ...

A *buffer* is a contiguous range of environments, and of agents. Buffers never touch each other's slices; each has its
own t. A *worker* is a thread that serves its own share of the buffers; a backend where environments step elsewhere
(processes, Ray) has one worker, and `wait` gives whichever buffer is ready first.

`Native` steps environments in C. To add a backend, give it what `Native` gives: the attributes of `_Vector`, and
`allocate`, `begin`, `wait`, `advance`, `log`, `close`.
"""

import os
from types import SimpleNamespace

import numba
import numpy as np
import psutil
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numba.extending import intrinsic

import ocean


def physical_cores():
    """The physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def make(env, num_envs=1, backend=None, *, num_buffers=None, num_threads=None, seed=0, env_kwargs=None):
    """A vector of `num_envs` environments.

    env: the name of a C environment ("breakout"), the path of a header, or an `ocean.Library`. backend: Native.
    num_buffers: how many ranges the environments are cut into (default: so that a buffer's work fits a core's cache).
    num_threads: threads that step and run the policy (default: the physical cores). env_kwargs: the environment's
    settings, one dict or a list of one dict an environment.
    Raises ValueError for a number of environments that the buffers do not divide, and names numbers that they do.
    """
    if backend not in (None, Native, "native"):
        raise NotImplementedError(f"backend {backend!r}: only the native one, for environments in C, exists so far.")
    if not isinstance(env, (str, ocean.Library)) and not hasattr(env, "__fspath__"):
        raise TypeError(f"vector.make wants the name of a C environment, got {env!r} ({type(env).__name__}).")
    return Native(env, num_envs, num_buffers=num_buffers, num_threads=num_threads, seed=seed, env_kwargs=env_kwargs)


class _Vector:
    """What every backend has: attributes, and the synchronous API on top of allocate, begin, wait and advance.

    Attributes: num_envs, num_agents, agents_per_batch (agents of one buffer), single_observation_space,
    single_action_space, ranges (a slice of agents a buffer), num_workers, driver_env (what policies are built from),
    storage (None before allocate).
    """

    storage = None
    closed = False

    @property
    def driver_env(self):
        return self

    @property
    def num_buffers(self):
        return len(self.ranges)

    def _new_storage(self, horizon, zeros):
        """The arrays of a rollout; `zeros(shape, dtype)` makes one."""
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}; it must be 1 or more.")
        T, N = horizon, self.num_agents
        observation = (*self.observation_shape,)
        storage = SimpleNamespace(
            observations=zeros((T + 1, N, *observation), self.observation_dtype),  # row t: what the policy sees at t
            resets=zeros((T + 1, N), np.uint8),  # 1: the observation at t is the first of an episode
            valid=zeros((T + 1, N), np.uint8),  # 0: the agent is dead at t
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

    def begin(self):
        """The last row becomes the first of the next rollout; every buffer stands at t = 0."""
        storage = self.storage
        for array in (storage.observations, storage.resets, storage.valid, storage.action_masks):
            if array is not None:
                array[0] = array[-1]
        self._t = [0] * self.num_buffers
        self._waiting = [list(range(worker, self.num_buffers, self.num_workers)) for worker in range(self.num_workers)]

    def reset(self, seed=None):
        """Begin new episodes: (observations (N, *obs), infos). A seed other than the last one builds the environments
        anew with it."""
        if self.storage is None:
            self.allocate(1)
        self.restart(seed)
        self.begin()
        return self.storage.observations[0], []

    def step(self, actions):
        """(observations, rewards, terminals, truncations, infos), views that the next step overwrites; actions
        (N,) or (N, heads) integers, or (N, dims) floats. Raises RuntimeError before the first reset and ValueError for
        actions of another shape or outside their space."""
        if self.storage is None or len(self.storage.actions) != 1:
            raise RuntimeError("step() needs reset() first, and cannot be mixed with a trainer's longer horizon.")
        storage = self.storage
        actions = np.asarray(actions).reshape(self.num_agents, -1)
        if actions.shape != storage.actions[0].shape:
            raise ValueError(f"actions have {actions.shape[1]} columns, expected {self.action_dims}.")
        if self.action_heads and not ((actions >= 0) & (actions < np.array(self.action_heads))).all():
            raise ValueError(f"an action lies outside {self.single_action_space}.")
        self.begin()
        storage.actions[0] = actions
        for buffer in range(self.num_buffers):
            self.advance(buffer)
        log = self.log()
        return (storage.observations[1], storage.rewards[0], storage.terminals[0], storage.truncations[0],
                [log] if log else [])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---------------------------------------------------------------------------------------------------------------------
# Native: environments in C, stepped without the GIL


@intrinsic
def _call(typingctx, address, envs, start, end, rows):
    """Call `void f(char* envs, int64 start, int64 end, const int64* rows)` at an address that is known only at run
    time; with the address as an argument the compiled caller can be cached on disk."""

    def codegen(context, builder, signature, arguments):
        word = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [word] * 4).as_pointer())
        builder.call(function, arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit(nogil=True, parallel=True, cache=True)
def _step_range(pieces, address, envs, start, end, rows, first_agent, last_agent, terminals, truncations, resets):
    """Step environments [start, end) in parallel pieces; resets[t + 1] = done[t]."""
    for piece in prange(pieces):
        i = np.int64(piece)
        _call(address, envs, start + (end - start) * i // pieces, start + (end - start) * (i + 1) // pieces, rows)
    for agent in range(first_agent, last_agent):
        resets[agent] = terminals[agent] | truncations[agent]


class Native(_Vector):
    """Environments in C, each range stepped by its worker's thread straight into the rollout's arrays.

    See `make` for the arguments. With fewer buffers than threads each worker steps with several numba threads.
    """

    # One buffer's activations should stay in a core's second-level cache: measured best from 512 to 1,024 agents.
    AGENTS_PER_BUFFER = 1024

    def __init__(self, env, num_envs, *, num_buffers=None, num_threads=None, seed=0, env_kwargs=None):
        self.library = env if isinstance(env, ocean.Library) else ocean.load(env)
        self.name = self.library.name
        self.num_envs, self.seed, self.env_kwargs = num_envs, seed, env_kwargs
        self.num_threads = num_threads or physical_cores()
        if self.num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be 1 or more.")
        self._build(seed)
        envs = self.envs
        self.num_agents = envs.num_agents
        self.num_buffers_asked = num_buffers
        num_buffers = num_buffers or self._default_buffers()
        if num_buffers < 1 or num_envs % num_buffers:
            divisors = [n for n in range(1, min(num_envs, 256) + 1) if num_envs % n == 0]
            raise ValueError(f"{num_envs} environments cannot be cut into {num_buffers} equal buffers; "
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
        self.action_space, self.observation_space = self.single_action_space, self.single_observation_space

    def _build(self, seed):
        self.envs = self.library.create(self.num_envs, seed=seed, settings=self.env_kwargs)
        self.seed, self._fresh = seed, True

    def _default_buffers(self):
        """The most buffers that divide the environments, at least one a thread, each of AGENTS_PER_BUFFER or fewer."""
        wanted = max(self.num_threads, -(-self.num_agents // self.AGENTS_PER_BUFFER))
        candidates = [n for n in range(1, min(self.num_envs, 4 * wanted) + 1) if self.num_envs % n == 0]
        return min(candidates, key=lambda n: (n < self.num_threads, abs(n - wanted)))

    def allocate(self, horizon):
        """Make the arrays of a rollout of `horizon` steps (see _new_storage) and begin the first episodes."""
        self.storage = storage = self._new_storage(horizon, np.zeros)
        masks = storage.action_masks
        self._step_rows = [
            ocean.rows(storage.observations[t + 1], storage.actions[t], storage.rewards[t], storage.terminals[t],
                       storage.truncations[t], storage.final_observations,
                       storage.valid[t + 1] if self.has_valid else None, None if masks is None else masks[t + 1])
            for t in range(horizon)]
        # What a step writes beside the environments' own rows, as arguments made once.
        self._flags = [(storage.terminals[t], storage.truncations[t], storage.resets[t + 1]) for t in range(horizon)]
        storage.valid[:] = 1
        self.restart()
        self.begin()
        return storage

    def restart(self, seed=None):
        """Begin new episodes in all environments, observations in row T; with a seed, from that seed's beginning."""
        if seed is not None and not (self._fresh and seed == self.seed):
            self.envs.close()
            self._build(seed)
        storage, last = self.storage, -1
        masks = None if storage.action_masks is None else storage.action_masks[last]
        self.envs.reset(ocean.rows(
            storage.observations[last], storage.actions[last], storage.rewards[last], storage.terminals[last],
            storage.truncations[last], storage.final_observations, storage.valid[last] if self.has_valid else None, masks))
        storage.resets[last] = 1
        self._fresh = False

    def wait(self, worker=0):
        """(buffer, t) of the next buffer of this worker to act on, or None when all of them have reached t = T.

        The same buffer again until it is done, so that its environments and activations stay in the core's cache.
        At t = T it is given once, for the value of the last row.
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
        t = self._t[buffer]
        agents = self.ranges[buffer]
        _step_range(numba.get_num_threads(), self.library.step_address, self.envs.address, *self.env_ranges[buffer], self._step_rows[t].ctypes.data,
                    agents.start, agents.stop, *self._flags[t])
        self._t[buffer] = t + 1

    def log(self, env=None):
        """Means of the environments' Log fields over the episodes finished since the last call, and their number n; of
        all environments, or of one."""
        return self.envs.log() if env is None else self.envs.log(env, env + 1)

    def finished(self):
        """The environments in which an agent's episode ended at the last step."""
        done = np.flatnonzero(self.storage.resets[-1])
        return np.unique(np.searchsorted(self.envs.agent_offsets, done, side="right") - 1).tolist()

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
