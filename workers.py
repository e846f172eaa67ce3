"""Environments that step in another process or on another machine.

    envs = Envs(creators, signature, first_env=0, seed=0)   # some, in their part of the arrays
    envs.bind(step_rows(arrays)); envs.reset(); envs.step(t)

    process = Process(memory, setup)                        # Multiprocessing: `serve` has Envs
    process.send(("step", t)); problem, infos = process.receive()

    actor = ray.remote(RemoteEnvs).remote(...)              # Ray: an actor that has Envs
    infos, rows = ray.get(actor.do.remote("step", t, actions))

A worker process imports this file first, so it imports neither torch nor numba, which are slow.
"""

import contextlib
import copy
import faulthandler
import math
import mmap
import os
import pickle
import signal
import socket
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

READ_ONCE = gymnasium.wrappers.TimeLimit, emulation.GymnasiumPufferEnv  # by SyncStepper


# the arrays of a rollout that have a row more than steps
POLICY_INPUTS = ("observations", "resets", "valid", "action_masks")


def step_rows(arrays):
    """Return {name: array} of each step's row: what it reads and what it writes.

    arrays: {name: array or tensor (T or T + 1, N, ...)}. A reset uses the last step's row.
    """
    rows = []
    for t in range(len(arrays["actions"])):
        row = {name: arrays[name][t] for name in ("actions", "rewards", "terminals", "truncations")}
        for name in POLICY_INPUTS:
            row[name] = None if arrays[name] is None else arrays[name][t + 1]
        rows.append({**row, "final_observations": arrays["final_observations"]})
    return rows


class Envs:
    """Some environments in this process, in a part of a rollout's arrays.

    creators: (creator, args, kwargs) of each. expected: the signature of the whole vector's first
    environment; an environment here with another signature raises EnvError. first_env: the number
    of the first creator. copies: environments that each creator makes, more than one if that is a
    vector environment of Gymnasium. Environment i gets seed + i.
    """

    stepper = None  # of plain Gymnasium environments; others are stepped one by one

    def __init__(self, creators, expected, first_env=0, seed=0, copies=1):
        self.envs, self.copies = [], copies
        for i, (creator, args, kwargs) in enumerate(creators, first_env):
            self.envs.append(emulation.create(creator, args, kwargs, seed + i * copies))
            signature = emulation.signature(self.envs[-1])
            if signature != expected:
                spaces = "has the observation space {}, the action space {} and {} agents"
                raise EnvError(f"environment {i} {spaces.format(*signature)}, but environment 0 "
                               f"{spaces.format(*expected)}. Make all of them the same.")
        self.numbers = [copies * i for i in range(first_env, first_env + len(creators))]
        self.sizes = [emulation.slots(env) for env in self.envs]

    def bind(self, rows, first_agent=0):
        """Use the agents from first_agent on of these rows, as `step_rows` returns them."""
        self._rows = [emulation.slice_rows(SimpleNamespace(**row), first_agent, sum(self.sizes))
                      for row in rows]
        if all(type(env) is emulation.GymnasiumPufferEnv for env in self.envs):
            self.stepper = emulation.SyncStepper(self.envs, self.numbers)
            self._rows = [*map(self.stepper.prepare, self._rows)]
            return
        firsts = np.cumsum([0, *self.sizes])[:-1].tolist()
        self._views = [[env.views(row, first)
                        for env, first in zip(self.envs, firsts, strict=True)]
                       for row in self._rows]

    def reset(self, seed=None):
        """Begin new episodes and write the last row; return [(environment, info)]."""
        row, infos = self._rows[-1], []
        seeds = [seed if seed is None or getattr(env, "same_seed", False) else seed + i
                 for i, env in zip(self.numbers, self.envs, strict=True)]
        if self.stepper is not None:
            self.stepper.reset(row, seeds)
            return []
        self._clear(row)
        for i, env, view, own_seed in zip(self.numbers, self.envs, self._views[-1], seeds,
                                          strict=True):
            infos += [(i, info) for info in env.reset_into(view, own_seed)]
        row.resets[:] = 1
        return infos

    def step(self, t):
        """Step all at row t; return [(environment, info)] of the episodes that ended."""
        row, infos = self._rows[t], []
        if self.stepper is not None:
            return self.stepper.step(row)
        self._clear(row)
        for i, env, view in zip(self.numbers, self.envs, self._views[t], strict=True):
            ended = env.step_into(view)
            if ended:
                numbers = env.ended if self.copies > 1 else [0] * len(ended)
                infos += [(i + copy, info) for copy, info in zip(numbers, ended, strict=True)]
        np.bitwise_or(row.terminals, row.truncations, out=row.resets)
        return infos

    def do(self, command, argument):
        """Call the method `command`: step, reset, render or ask.

        An error gets a note with the environment's number.
        """
        try:
            return getattr(self, command)(argument)
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
        """Return the number of the environment whose code raised an error, or None."""
        selves = {id(frame.f_locals.get("self"))
                  for frame, _ in traceback.walk_tb(error.__traceback__)}
        return next((number for number, env in zip(self.numbers, self.envs, strict=True)
                     if selves & {id(env), *map(id, emulation.within(env))}), None)

    def render(self, index=0):
        env, copy = divmod(index, self.copies)
        frame = self.envs[env].render()
        return frame[copy] if self.copies > 1 else frame

    def ask(self, question):
        """Call the method `name` of each environment's outermost wrapper that has it.

        question: (name, args, kwargs), pickled. It may be an attribute, too. With kwargs None the
        attribute is set to args. Returns (a list of the results, None), or (None, the problem) if
        there is no such name, or if setting it would do nothing.
        """
        (name, args, kwargs), answers = pickle.loads(question), []
        for env in self.envs:
            layers = [*emulation.within(getattr(env, "env", None)), env]  # our wrapper is the last
            owner = next((layer for layer in layers if hasattr(layer, name)), None)
            if owner is None:
                return None, (f"{flat_spaces.describe(layers[0])} has no {name}, nor has what it "
                              "wraps.")
            if kwargs is None and isinstance(owner, READ_ONCE):
                return None, (f"{name} of {type(owner).__name__} is read when the environments "
                              "begin. Make new ones.")
            if kwargs is None:
                setattr(owner, name, args)
            else:
                value = getattr(owner, name)
                answers.append(value(*args, **kwargs) if callable(value) else value)
        return answers, None

    def close(self, first=0):
        """Close all from `first` on, also if one of them raises; then raise that."""
        with contextlib.ExitStack() as stack:
            for env in self.envs[first:]:
                stack.callback(env.close)


# --------------------------------------------------------------------------------------------------
# Processes: shared memory for the arrays, and messages through a socket


# A command is the pickled arguments of Envs.do, an answer (None, its result) or (problem, None) with
# an EnvError or a traceback as text.
CLOSING = 10  # seconds that an idle worker's environments have to close


class SharedMemory:
    """Arrays that several processes map, in memory that is gone when they end."""

    def __init__(self):
        self.file = (os.fdopen(os.memfd_create("rollout"), "w+b") if hasattr(os, "memfd_create")
                     else tempfile.TemporaryFile())  # noqa: SIM115
        self.layouts = []

    def zeros(self, shape, dtype):
        offset, page = self.file.seek(0, os.SEEK_END), 1 << 16  # of any system
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        self.file.truncate(offset + -(-size // page) * page)
        self.layouts.append((tuple(shape), np.dtype(dtype), offset))
        return map_array(self.file.fileno(), *self.layouts[-1])


def map_array(fd, shape, dtype, offset):
    """Map the array at an offset, a multiple of the page size, of shared memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(fd, max(size, 1), offset=offset), dtype,
                         math.prod(shape)).reshape(shape)


class Process:
    """A worker process, as the side that starts it sees it.

    memory: a SharedMemory. setup: {"path": sys.path, "envs": the arguments of its Envs, pickled,
    "arrays": {name: layout in the memory}, "first_agent": of the worker}.

    It is a new interpreter, not a fork: it inherits no threads or devices, and scripts need no
    `if __name__ == "__main__"`. Both sides sleep on the socket; if one dies, the other is woken.
    """

    # The guard comes first: the other imports take seconds.
    CODE = ("import sys; sys.path.insert(0, sys.argv[1]); numbers = [*map(int, sys.argv[2:])]; "
            "import processes; processes.leave_with(numbers[0], numbers.pop(), numbers.pop()); "
            "import workers; workers.serve(*numbers)")

    def __init__(self, memory, setup):
        self._channel, child_channel = socket.socketpair()
        self._report = tempfile.TemporaryFile()  # noqa: SIM115
        fds = child_channel.fileno(), memory.file.fileno(), self._report.fileno()
        # A worker's own threads would only take the cores from the other workers.
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(Path(__file__).parent),
             *map(str, (*fds, CLOSING, os.getpid()))],
            pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        child_channel.close()
        self._answers = self._channel.makefile("rb")
        self.pid = self._process.pid
        self.send(setup)

    def fileno(self):
        """Return the descriptor that becomes readable with an answer, for polling."""
        return self._channel.fileno()

    def send(self, message):
        with contextlib.suppress(OSError):  # of one that has died: receive raises
            self._channel.sendall(pickle.dumps(message))

    def receive(self):
        """Return the next answer, (problem, result); raise EOFError if there is none."""
        try:
            return pickle.load(self._answers)
        except (OSError, pickle.UnpicklingError):  # it ended within an answer
            raise EOFError from None

    def describe_end(self):
        """Return how it ended, in words, if it ends within two seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(2)
            return (f" by signal {-code} ({signal.Signals(-code).name})" if code < 0
                    else f" with exit code {code}")
        return ""

    def report(self, ask=False):
        """Return faulthandler's text: where it crashed, or if asked each thread's place."""
        if ask:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        self._report.seek(0)
        return self._report.read().decode(errors="replace")

    def leave(self):
        """Close the socket; an idle process then ends by itself."""
        self._answers.close()
        self._channel.close()

    def end(self, seconds):
        """Wait so long for the end, and then kill it."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._report.close()


def serve(channel_fd, memory_fd, report_fd):
    """Step a worker process's environments on request until the other side is gone."""
    import cloudpickle

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer answers Ctrl-C
    for fd in (channel_fd, memory_fd, report_fd):
        os.set_inheritable(fd, False)
    report = os.fdopen(report_fd, "w")
    faulthandler.enable(report)  # where a crash happened
    faulthandler.register(signal.SIGUSR1, report)  # where it hangs, when the trainer asks
    channel = socket.socket(fileno=channel_fd)
    commands, envs = channel.makefile("rb"), None
    try:
        setup = pickle.load(commands)
        sys.path[:] = setup["path"]
        envs = Envs(*cloudpickle.loads(setup["envs"]))
        arrays = {name: map_array(memory_fd, *layout) for name, layout in setup["arrays"].items()}
        envs.bind(step_rows({"action_masks": None, **arrays}), setup["first_agent"])
        while commands.peek(1):  # b"" when the other side is gone
            result = envs.do(*pickle.load(commands))
            channel.sendall(pickle.dumps((None, result)))
    except BaseException as error:
        problem = error if isinstance(error, EnvError) else user_traceback(error)[0]
        with contextlib.suppress(OSError):
            channel.sendall(pickle.dumps((problem, None)))
    finally:
        if envs is not None:
            with contextlib.suppress(Exception):
                envs.close()


# --------------------------------------------------------------------------------------------------
# Ray: actors, whose results are sent back


class RemoteEnvs:
    """The environments of a Ray actor, with one row of arrays.

    envs: the arguments of Envs, pickled. row: of emulation.new_rows. path: sys.path.
    """

    def __init__(self, envs, row, path):
        import cloudpickle

        sys.path[:] = path
        self.envs, self.row = Envs(*cloudpickle.loads(envs)), copy.deepcopy(row)  # Ray's: read-only
        self.envs.bind([vars(self.row)])

    def do(self, command, argument, actions):
        """Return (result, {name: array (agents, ...)}) of Envs.do with these actions."""
        if command == "step":
            self.row.actions[:], argument = actions, 0
        result = self.envs.do(command, argument)
        if command not in ("step", "reset"):
            return result, {}
        unsent = {"actions"} if self.row.truncations.any() else {"actions", "final_observations"}
        return result, {name: array for name, array in vars(self.row).items() if name not in unsent}
