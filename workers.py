"""Environments that step in another process or on another machine, and their messages.

    envs = Envs(creators, signature, first_env=0, seed=0)   # some environments, in their part of a rollout's arrays
    envs.bind(arrays, first_agent=0); envs.reset(); envs.step(t)

    process = Process(memory, setup)                        # Multiprocessing: a process in which `serve` has Envs
    process.send(STEP, t); kind, payload = process.receive()

    actor = ray.remote(RemoteEnvs).remote(...)              # Ray: an actor that has Envs
    infos, results = ray.get(actor.do.remote(STEP, t, actions)); RemoteEnvs.store(results, ...)

A worker process imports this file first, so it imports neither torch nor numba, which are slow.
"""

import contextlib
import faulthandler
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np

import emulation
import flat_spaces
from errors import EnvError, user_traceback


class Envs:
    """Some environments in this process, in a part of a rollout's arrays.

    creators: (creator, args, kwargs) of each; expected: the signature of the whole vector's first
    environment, which all must have, or this is a ValueError; first_env: the number of the first
    one here, on which seeds depend: environment i gets seed + i. A vector environment of Gymnasium
    counts as several.
    """

    def __init__(self, creators, expected, first_env=0, seed=0):
        self.envs = []
        for i, (creator, args, kwargs) in enumerate(creators, first_env):
            copies = emulation.copies(self.envs[0]) if self.envs else 1
            self.envs.append(emulation.create(creator, args, kwargs, seed + i * copies))
            got = emulation.signature(self.envs[-1])
            if got != expected:
                says = "has the observation space {}, the action space {} and {} agents"
                raise EnvError(
                    f"environment {i} {says.format(*got)}, but environment 0 "
                    f"{says.format(*expected)}; all environments of a vector "
                    "need the same.")
        self.copies = emulation.copies(self.envs[0])
        self.numbers = [self.copies * i for i in range(first_env, first_env + len(creators))]
        self.sizes = [emulation.slots(env) for env in self.envs]

    def bind(self, arrays, first_agent):
        """Take one part of {name: array (T or T + 1, N, ...)}, the agents from first_agent on."""
        part = slice(first_agent, first_agent + sum(self.sizes))
        self._rows = []
        for t in range(len(arrays["actions"])):
            after = {name: arrays[name][t + 1, part]
                     for name in ("observations", "resets", "valid")}
            now = {name: arrays[name][t, part]
                   for name in ("actions", "rewards", "terminals", "truncations")}
            masks = arrays.get("action_masks")
            self._rows.append(SimpleNamespace(**after, **now,
                                              final_observations=arrays["final_observations"][part],
                                              action_masks=None if masks is None
                                              else masks[t + 1, part]))
        firsts = np.cumsum([0, *self.sizes])[:-1].tolist()
        self._views = [
            [env.views(row, first) for env, first in zip(self.envs, firsts, strict=True)]
            for row in self._rows
        ]
        self._inactive = np.zeros(sum(self.sizes), bool)
        self._fresh, self.together = True, None

    def reset(self, seed=None):
        """Begin new episodes, write the last row's observations; returns [(environment, info)]."""
        row, infos = self._rows[-1], []
        self._fresh, self.together = True, None
        self._clear(row)
        for i, env, view in zip(self.numbers, self.envs, self._views[-1], strict=True):
            own = seed if seed is None or getattr(env, "same_seed", False) else seed + i
            infos += [(i, info) for info in env.reset_into(view, own)]
        row.resets[:] = 1
        np.equal(row.valid, 0, out=self._inactive)
        return infos

    def step(self, t):
        """Step all with the actions of row t; returns [(environment, info)] of ended episodes."""
        row, infos = self._rows[t], []
        if self.together is not None:
            return self.together.step(row)
        self._clear(row)
        for i, env, view in zip(self.numbers, self.envs, self._views[t], strict=True):
            ended = env.step_into(view)
            if ended:
                which = env.ended if self.copies > 1 else [0] * len(ended)
                infos += [(i + copy, info) for copy, info in zip(which, ended, strict=True)]
        np.bitwise_or(row.terminals, row.truncations, out=row.resets)
        row.resets[self._inactive & (row.valid != 0)] = 1  # they act again
        np.equal(row.valid, 0, out=self._inactive)
        if self._fresh:  # the first step after a reset: now they have been checked
            self._fresh, self.together = False, emulation.GymnasiumTogether.of(self.envs, self.numbers, self._rows)
        return infos

    def do(self, kind, number):
        """What a message asks: STEP row `number`, RESET with a seed (-1: without one),
        RENDER an environment, or ASK, whose `number` is what `ask` takes, pickled."""
        try:
            if kind == ASK:
                return self.ask(*pickle.loads(number))
            if kind == RENDER:
                return self.render(number)
            return self.step(number) if kind == STEP else self.reset(None if number < 0 else number)
        except (Exception, SystemExit) as error:
            fault = error if isinstance(error, EnvError) else emulation.explain(error) or error
            if (number := self.find_env(fault)) is not None:
                fault.add_note(f"(environment {number})")
            if fault is error:
                raise
            raise fault from None

    @staticmethod
    def _clear(row):
        row.rewards[:] = 0
        row.terminals[:] = 0
        row.truncations[:] = 0
        row.valid[:] = 1

    def find_env(self, error):
        """The number of the environment whose code raised an error; None if that is unknown."""
        selves = {id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)}
        return next((number for number, env in zip(self.numbers, self.envs, strict=True)
                     if selves & {id(env), *map(id, emulation.within(env))}), None)

    def render(self, index=0):
        env, copy = divmod(index, self.copies)
        frame = self.envs[env].render()
        return frame[copy] if self.copies > 1 else frame

    def ask(self, name, args, kwargs):
        """(what the method `name` of each environment returns, of the outermost wrapper that has one, or its attribute
        of that name; None). With kwargs None the attribute is set to args. (None, an error's words) if there is none,
        or if setting it would do nothing."""
        answers = []
        for env in self.envs:
            layers = [*emulation.within(getattr(env, "env", None)), env]  # ours is the last to be asked
            vectors = [layer for layer in layers if hasattr(layer, "set_attr") and hasattr(layer, "call")]
            if self.copies > 1 and vectors:  # of environments, which are asked by it
                whole = vectors[0]
                answers += (whole.set_attr(name, args) if kwargs is None else whole.call(name, *args, **kwargs)) or ()
                continue
            owner = next((layer for layer in layers if hasattr(layer, name)), None)
            if owner is None:
                return None, f"{flat_spaces.describe(layers[0])} has no {name}, and what it wraps has none"
            if kwargs is None and isinstance(owner, gymnasium.wrappers.TimeLimit | emulation.ScaledReward):
                return None, f"{name} of {type(owner).__name__} was read when the environments began; make new ones"
            if kwargs is None:
                setattr(owner, name, args)
            else:
                value = getattr(owner, name)
                answers.append(value(*args, **kwargs) if callable(value) else value)
        return answers, None

    def close(self, first=0):
        """Close all of them from `first` on, even if one of them raises, and raise that then."""
        with contextlib.ExitStack() as stack:
            for env in self.envs[first:]:
                stack.callback(env.close)




# --------------------------------------------------------------------------------------------------
# Processes: shared memory for the arrays, and messages through a socket


# To the worker go a kind and a number (of ASK that of the bytes that follow); from it come a kind and bytes: a
# traceback, a pickled EnvError, or the result of Envs.do, if it has one.
COMMAND, ANSWER = struct.Struct("<Bq"), struct.Struct("<BI")
STEP, RESET, RENDER, ASK, DONE, ERROR, FAULT = range(7)
CLOSING = 10  # seconds that an idle worker's environments have to close


class SharedMemory:
    """Arrays that several processes map. The memory has no name, so it is gone when they end."""

    def __init__(self):
        if hasattr(os, "memfd_create"):
            self.file = os.fdopen(os.memfd_create("rollout"), "w+b")
        else:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.layouts = []

    def zeros(self, shape, dtype):
        offset, page = self.file.seek(0, os.SEEK_END), 1 << 16  # of any system
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        self.file.truncate(offset + -(-size // page) * page)
        self.layouts.append((tuple(shape), np.dtype(dtype), offset))
        return map_array(self.file.fileno(), *self.layouts[-1])


def map_array(fd, shape, dtype, offset):
    """The array at an offset (a multiple of the page size) of a descriptor's shared memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(fd, max(size, 1), offset=offset), dtype,
                         math.prod(shape)).reshape(shape)


class Gone(Exception):
    """The other side of a socket is gone. It is no OSError: environments raise those for sockets of
    theirs."""


def receive(channel, size):
    """Exactly `size` bytes. Raises Gone."""
    data = b""
    while len(data) < size:
        try:
            part = channel.recv(size - len(data))
        except OSError as error:
            raise Gone from error
        if not part:
            raise Gone
        data += part
    return data


class Process:
    """A worker process, seen from the side that starts it. memory: a SharedMemory. setup: {"path":
    sys.path, "envs": the arguments of its Envs, pickled, "arrays": {name: layout in the memory},
    "first_agent": of the worker}.

    It is a new interpreter, not a fork: nothing of this process's threads or devices goes with it,
    and scripts need no `if __name__ == "__main__"`. Both sides sleep on the socket; whichever side
    dies, the other one hears of it at once.
    """

    # The guard comes first: the other imports take seconds.
    CODE = ("import sys; sys.path.insert(0, sys.argv[1]); numbers = [*map(int, sys.argv[2:])]; "
            "import processes; processes.leave_with(numbers[0], numbers.pop(), numbers.pop()); "
            "import workers; workers.serve(*numbers)")

    def __init__(self, memory, setup):
        self._channel, theirs = socket.socketpair()
        self._report = tempfile.TemporaryFile()  # noqa: SIM115
        fds = theirs.fileno(), memory.file.fileno(), self._report.fileno()
        # A worker's own threads would only take the cores from the other workers.
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(Path(__file__).parent),
             *map(str, (*fds, CLOSING, os.getpid()))],
            pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        theirs.close()
        self.pid, setup = self._process.pid, pickle.dumps(setup)
        self._say(struct.pack("<Q", len(setup)) + setup)

    def fileno(self):
        """The descriptor that becomes readable with an answer; so a process can be polled."""
        return self._channel.fileno()

    def send(self, kind, number):
        self._say(COMMAND.pack(kind, number) if kind != ASK else COMMAND.pack(kind, len(number)) + number)

    def _say(self, data):
        with contextlib.suppress(OSError):  # of one that has died, which receive finds
            self._channel.sendall(data)

    def receive(self):
        """(kind, payload) of the next answer. Raises Gone if the process is."""
        kind, size = ANSWER.unpack(receive(self._channel, ANSWER.size))
        return kind, receive(self._channel, size)

    def how_it_died(self):
        """How it ended, in words, if it ends within two seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(2)
            return (f" by signal {-code} ({signal.Signals(-code).name})" if code < 0
                    else f" with exit code {code}")
        return ""

    def report(self, ask=False):
        """What faulthandler wrote: the place of its crash, or, if asked, of each thread."""
        if ask:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        self._report.seek(0)
        return self._report.read().decode(errors="replace")

    def leave(self):
        """Close the socket; an idle process then ends by itself."""
        self._channel.close()

    def end(self, seconds):
        """Wait so long for the end, and then kill it."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._report.close()


def send_answer(channel, kind, payload):
    """Raises Gone."""
    try:
        channel.sendall(ANSWER.pack(kind, len(payload)) + payload)
    except OSError as error:
        raise Gone from error


def serve(channel_fd, memory_fd, report_fd):
    """A worker process: it steps its environments on request until the other side is gone."""
    import cloudpickle

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer answers Ctrl-C
    for fd in (channel_fd, memory_fd, report_fd):
        os.set_inheritable(fd, False)
    report = os.fdopen(report_fd, "w")
    faulthandler.enable(report)  # where a crash happened
    faulthandler.register(signal.SIGUSR1, report)  # where it hangs, when the trainer asks
    channel = socket.socket(fileno=channel_fd)
    envs = None
    try:
        (size,) = struct.unpack("<Q", receive(channel, 8))
        setup = pickle.loads(receive(channel, size))
        sys.path[:] = setup["path"]
        envs = Envs(*cloudpickle.loads(setup["envs"]))
        arrays = {name: map_array(memory_fd, *layout) for name, layout in setup["arrays"].items()}
        envs.bind(arrays, setup["first_agent"])
        while True:
            kind, number = COMMAND.unpack(receive(channel, COMMAND.size))
            answer = envs.do(kind, receive(channel, number) if kind == ASK else number)
            send_answer(channel, DONE, pickle.dumps(answer) if kind == RENDER or answer else b"")
    except Gone:
        pass
    except EnvError as error:
        with contextlib.suppress(Gone):
            send_answer(channel, FAULT, pickle.dumps(error))
    except BaseException as error:
        with contextlib.suppress(Gone):
            send_answer(channel, ERROR, user_traceback(error)[0].encode())
    finally:
        if envs is not None:
            with contextlib.suppress(Exception):
                envs.close()


# --------------------------------------------------------------------------------------------------
# Ray: actors, whose results are sent back


class RemoteEnvs:
    """The environments of a Ray actor, with arrays of a horizon of 1. envs: the arguments of Envs,
    pickled; agents: of them all; layout: as `layout` gives it; path: sys.path."""

    def __init__(self, envs, agents, layout, path):
        import cloudpickle

        sys.path[:] = path
        self.envs = Envs(*cloudpickle.loads(envs))
        rows = {"actions": (1,), "rewards": (1,), "terminals": (1,), "truncations": (1,),
                "final_observations": ()}
        self.arrays = {name: np.zeros((*rows.get(name, (2,)), agents, *shape), dtype)
                       for name, (shape, dtype) in layout.items()}
        self.envs.bind(self.arrays, 0)

    def do(self, kind, number, actions):
        """(infos, {name: array (agents, ...)}) of Envs.do; a step takes these actions. (EnvError, None)
        if one is raised."""
        if kind == STEP:
            self.arrays["actions"][0], number = actions, 0
        try:
            infos, kept = self.envs.do(kind, number), ("actions", "final_observations")
        except EnvError as error:
            return error, None
        if kind == ASK:
            return infos, {}
        results = {name: array[-1] for name, array in self.arrays.items() if name not in kept}
        if self.arrays["truncations"].any():
            results["final_observations"] = self.arrays["final_observations"]
        return infos, results

    @staticmethod
    def layout(storage):
        """{name: (shape of one agent's part, dtype)} of a rollout's arrays."""
        return {name: (array.shape[2 if name != "final_observations" else 1 :], array.dtype)
                for name, array in vars(storage).items() if array is not None}

    @staticmethod
    def store(results, storage, agents, kind, t):
        """Write an actor's arrays of step t, or of a reset, into its agents' part."""
        for name, array in results.items():
            if name == "final_observations":
                storage.final_observations[agents] = array
            else:
                row = t if name in ("rewards", "terminals", "truncations") else t + 1
                getattr(storage, name)[row if kind == STEP else -1, agents] = array
