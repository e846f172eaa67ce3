"""Play, watch, draw or check an environment, without any training code.

    python -m ocean                                  # the names of all environments
    python -m ocean breakout                    # a window; play with its KEYS, if it has some
    python -m ocean breakout --random --set frameskip=2 balls=0
    python -m ocean breakout --png breakout.png --steps 200     # the picture after random steps
    python -m ocean path/to/my.h --check        # a million steps with sanitizers, to find bugs
    python -m ocean my_file.py:make_env --check # one in Python, also gym/CartPole-v1: 10,000 steps
    python -m ocean breakout --standalone       # builds a program; also --debug, --profile

In the window: F12 saves a picture, Ctrl+F12 starts and stops a GIF, R restarts, Escape ends. The
first agent is the player; all others act at random. `--debug` builds with sanitizers.
"""

import argparse
import contextlib
import ctypes
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from types import SimpleNamespace

import numpy as np

import diagnostics
import errors
import ocean
import processes

# raylib's codes of the keys that the window uses
ESCAPE, F12, CONTROL, R = 256, 301, 341, ord("R")
NO_REWARD = "no reward but 0 was ever given. Can a random agent find one?"
GUARD = 64  # bytes before and after each buffer, in which a check finds writes out of bounds


class Agents:
    """Environments, the arrays of one step for them, and random actions.

    apart: each environment has its own buffers. Then an array is (environments, agents of each,
    ...), else (agents, ...).
    """

    def __init__(self, library, num_envs, settings, seed=0, apart=False):
        each = 1 if apart else num_envs
        self.parts = [library.create(each, seed=seed, settings=settings, first_env=first)
                      for first in range(0, num_envs, each)]
        self.envs = envs = self.parts[0]
        self.apart, self.blocks, agents = apart, [], envs.num_agents
        self.observations = self._buffer((agents, *envs.observation_shape), envs.observation_dtype)
        self.final_observations = self._buffer((agents, *envs.observation_shape),
                                               envs.observation_dtype)
        self.actions = self._buffer((agents, envs.action_dims), envs.action_dtype)
        self.rewards = self._buffer((agents,), np.float32)
        self.terminals, self.truncations = (self._buffer((agents,), np.uint8) for _ in range(2))
        self.valid = self._buffer((agents,), np.uint8) if envs.has_valid else None
        self.masks = (self._buffer((agents, sum(envs.action_heads)), np.uint8)
                      if envs.has_action_masks else None)
        named = {"observations": self.observations, "rewards": self.rewards,
                 "terminals": self.terminals, "truncations": self.truncations,
                 "valid": self.valid, "action_masks": self.masks}
        self.outputs = {name: array for name, array in named.items() if array is not None}
        self.bytes = {name: array.view(np.uint8) for name, array in
                      {**self.outputs, "final_observations": self.final_observations}.items()}
        arrays = (self.observations, self.actions, self.rewards, self.terminals, self.truncations,
                  self.final_observations, self.valid, self.masks)
        self.rows = ocean.rows(*arrays) if not apart else [
            ocean.rows(*(None if array is None else array[i] for array in arrays))
            for i in range(num_envs)]
        for part, rows in zip(self.parts, self.rows if apart else [self.rows], strict=True):
            part.reset(rows)

    def _buffer(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        block = np.full((len(self.parts), size + 2 * GUARD), 0xA5, np.uint8)
        self.blocks.append(block)
        inside = block[:, GUARD:-GUARD]
        inside[:] = 0
        arrays = inside.view(dtype).reshape(len(self.parts), *shape)
        return arrays if self.apart else arrays[0]

    def act(self, rng):
        """Draw random actions.

        With a mask nine of ten are legal. A policy never takes the others, but an agent at random
        does, so environments must survive them.
        """
        if not self.envs.action_heads:
            self.actions[:] = rng.uniform(-1.2, 1.2, self.actions.shape)
            return
        first = 0
        for i, n in enumerate(self.envs.action_heads):
            self.actions[:, i] = rng.integers(0, n, len(self.actions))
            if self.masks is not None:
                mask = self.masks[:, first : first + n]
                legal = np.where(mask, rng.random(mask.shape), -1).argmax(axis=1)
                self.actions[:, i] = np.where(rng.random(len(mask)) < 0.9, legal,
                                              self.actions[:, i])
            first += n

    def fill(self, value):
        """Write a byte into all that a step writes."""
        for array in self.bytes.values():
            array[...] = value

    def guards_are_whole(self):
        return all((block[:, :GUARD] == 0xA5).all() and (block[:, -GUARD:] == 0xA5).all()
                   for block in self.blocks)


# Checking


def allocated():
    """Return the bytes allocated in C by this process; 0 without the sanitizers."""
    count = getattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes", None)
    if count is None:
        return 0
    count.restype = ctypes.c_size_t
    return count()


def check(library, settings, steps=1_000_000, num_envs=8, seed=0, show=lambda text: None):
    """Step environments at random; return (problems, notes), each a list of sentences.

    Two copies run side by side: one as a vector, the other as single environments, stepped from the
    last to the first. Their buffers hold different garbage before each step. So an output that
    differs was not written, or depends on something else than the environment's state and
    generator. show: is called with the progress.
    """
    rng, problems = np.random.default_rng(seed), {}
    whole = Agents(library, num_envs, settings, seed)
    twin = Agents(library, num_envs, settings, seed, apart=True)
    backwards = [(part, rows.ctypes.data)
                 for part, rows in zip(twin.parts, twin.rows, strict=True)][::-1]
    for part in twin.parts:  # more final observations must not change anything else
        part.every_final()
    other = Agents(library, num_envs, settings, seed + 1)
    space, agents = whole.envs.single_observation_space, whole.envs.num_agents
    play = SimpleNamespace(
        low=np.full(space.shape, np.inf), high=np.full(space.shape, -np.inf),
        first_low=np.full(space.shape, np.inf), first_high=np.full(space.shape, -np.inf),
        ended=np.zeros(agents, int), end_together=True, same_as_other_seed=True,
        lacks_finals=False, largest_reward=0.0, allocated=0, rounds=max(200, steps // agents),
        random=diagnostics.RandomPlay(num_envs))
    for t in range(1, play.rounds + 1):
        show(f"step {t:,} of {play.rounds:,} of {agents} agents")

        def problem(key, text, t=t):
            problems.setdefault(key, f"step {t}: {text}")

        whole.act(rng)
        twin.actions[:] = whole.actions.reshape(twin.actions.shape)
        compare = t <= 3000 or t % 16 == 0  # comparing takes longer than stepping
        if compare:
            whole.fill(0xFF)
            twin.fill(0x7F)
        whole.envs.step(whole.rows)
        for part, rows in backwards:
            part.step(rows)
        if play.same_as_other_seed:
            other.actions[:] = whole.actions
            other.envs.step(other.rows)
        finals = twin.final_observations[(twin.terminals | twin.truncations) == 1]
        if len(finals):
            octets = finals.reshape(len(finals), -1).view(np.uint8)
            if (octets == 0x7F).all(axis=1).any():
                play.lacks_finals = True
            elif not ((finals >= space.low) & (finals <= space.high)).all():
                problem("final_range", f"a final observation lies outside {space.low.min()} .. "
                                       f"{space.high.max()}.")
        if compare:
            _compare_copies(whole, twin, problem)
        done = (whole.terminals | whole.truncations) == 1
        play.ended += done
        play.end_together &= done.all() or not done.any()
        play.random.add(whole.rewards, done)
        largest = np.abs(whole.rewards).max()
        play.largest_reward = max(play.largest_reward, largest)
        if not math.isfinite(largest):
            problem("reward", f"a reward is {whole.rewards[~np.isfinite(whole.rewards)][0]}.")
            break
        if t == play.rounds // 2:
            play.allocated = allocated()
        if compare:
            _check_outputs(whole, problem, problems)
            observations = whole.observations
            play.low = np.minimum(play.low, observations.min(axis=0))
            play.high = np.maximum(play.high, observations.max(axis=0))
            if done.any():
                play.first_low = np.minimum(play.first_low, observations[done].min(axis=0))
                play.first_high = np.maximum(play.first_high, observations[done].max(axis=0))
            play.same_as_other_seed &= (np.array_equal(observations, other.observations)
                                        and np.array_equal(whole.rewards, other.rewards))
            if problems:
                break
    grown = allocated() - play.allocated
    if not (whole.guards_are_whole() and twin.guards_are_whole()):
        problems["guard"] = "c_step or c_reset writes outside its part of a buffer."
    notes = []
    if not problems:
        log = whole.envs.log()
        problems |= _check_log(log, play)
        if not _continues_after_load(whole):
            problems["save"] = ("after save and load it continues otherwise: state is outside the "
                                "struct, or c_save and c_load leave something out.")
        notes = _list_notes(library, settings, seed, whole, play, log, grown)
    for envs in (whole.envs, other.envs, *twin.parts):
        envs.close()
    return list(problems.values()), notes


def _compare_copies(whole, twin, problem):
    """Compare all outputs of the vector with those of the single environments."""
    for name, single in twin.outputs.items():
        vector = whole.outputs[name].reshape(single.shape)
        if np.array_equal(vector, single, equal_nan=single.dtype.kind == "f"):
            continue
        vector, single = vector.view(np.uint8), twin.bytes[name]
        index = tuple(np.argwhere(vector != single)[0])
        where = f"{name} of agent {index[1]}, from byte {index[-1]}" if single.ndim > 2 else name
        if vector[index] == 0xFF and single[index] == 0x7F:
            problem("unwritten", f"c_step does not write {where}. Rows move on every step, so "
                                 "write all of an output each time, also if nothing changed.")
        else:
            problem("differs", f"{where} differs between two environments of one seed. Something "
                               "else than the struct and its generator is used: a static variable, "
                               "rand(), the time, another environment, or memory that c_reset does "
                               "not set.")


def _check_outputs(whole, problem, problems):
    """Check one step's observations, flags, final observations and masks."""
    space, observations = whole.envs.single_observation_space, whole.observations
    outside = ~((observations >= space.low) & (observations <= space.high))
    if outside.any() and "unwritten" not in problems:
        agent, *index = np.argwhere(outside)[0].tolist()
        problem("range", f"observation {index} of agent {agent} is "
                         f"{observations[(agent, *index)]}, outside {space.low.min()} .. "
                         f"{space.high.max()}. Correct c_spaces, or scale and clip it.")
    for name in ("terminals", "truncations"):
        if (whole.outputs[name] > 1).any() and "unwritten" not in problems:
            problem(name, f"{name} holds {whole.outputs[name].max()}; it must be 0 or 1.")
    truncated = whole.truncations == 1
    untouched = (whole.bytes["final_observations"] == 0xFF).reshape(len(observations), -1)
    if untouched[truncated].all(axis=1).any():
        problem("final", "an agent is truncated, but its final observation is not written. The "
                         "trainer bootstraps from it: write it before the reset.")
    if not untouched[~truncated].all():
        problem("final", "a final observation is written for an agent that is not truncated.")
    if whole.masks is not None:
        firsts = np.cumsum([0, *whole.envs.action_heads[:-1]])
        if not np.bitwise_or.reduceat(whole.masks, firsts, axis=1).all():
            problem("mask", "an agent has no legal action.")


def _check_log(log, play):
    """Return {key: problem} of the log after a game without other problems."""
    if not play.ended.any():
        return {"end": f"no episode ended in {play.rounds:,} steps: terminals and truncations are "
                       "always 0. Is there a limit of steps?"}
    if not log:
        return {"log": "episodes end, but log.n stays 0: call LOG_EPISODE when an episode ends."}
    if not 0 <= log["perf"] <= 1:
        return {"perf": f"log.perf is {log['perf']:.3g} in the mean; it must lie within 0..1."}
    infinite = [name for name, value in log.items() if not math.isfinite(value)]
    return {"log": f"not finite in the log: {', '.join(infinite)}."} if infinite else {}


def _continues_after_load(whole):
    """Tell whether the same actions after a load lead to the same observations twice."""
    saved, trials = whole.envs.save(), []
    for _ in range(2):
        rng, observations = np.random.default_rng(1), []
        whole.envs.load(saved)
        for _ in range(50):
            for dim, n in enumerate(whole.envs.action_heads or []):
                whole.actions[:, dim] = rng.integers(0, n, len(whole.actions))
            whole.envs.step(whole.rows)
            observations.append(whole.observations.copy())
        trials.append(observations)
    return np.array_equal(*trials)


def _list_notes(library, settings, seed, whole, play, log, grown):
    """List what may be a mistake in an environment without problems."""
    num_envs, notes = whole.envs.num_envs, []
    low, high = play.low, play.high
    if play.lacks_finals:
        notes.append("a terminated agent gets no final observation, which ocean.gymnasium needs: "
                     "write it when an episode ends, `if (WANTS_FINAL(env, truncated))` (env.h).")
    if play.largest_reward == 0:
        notes.append(NO_REWARD)
    notes += filter(None, [play.random.find_drift(),
                           play.random.find_log_error(log) if log else None])
    constant = np.flatnonzero((low == high).ravel())
    if len(constant):
        shown = ", ".join(map(str, constant[:12])) + (" ..." if len(constant) > 12 else "")
        notes.append(f"{len(constant)} of {low.size} elements of the observation never change "
                     f"(number {shown}): are they stale, or of no use?")
    finite = np.isfinite(high) & np.isfinite(low)
    largest = np.abs([low[finite], high[finite]]).max(initial=0)
    if largest > 20:
        notes.append(f"observations reach {largest:.4g}; networks learn best from numbers "
                     "of about 1.")
    if play.largest_reward > 1000:
        notes.append(f"rewards reach {play.largest_reward:.4g}; scale them so that returns are "
                     "below ten or so.")
    if grown > max(2**16, 4 * play.rounds):
        notes.append(f"memory grows: {grown:,} bytes more after "
                     f"{play.rounds - play.rounds // 2:,} steps. Does c_step or c_reset allocate "
                     "what is never freed?")
    if play.ended.sum() > 10 and whole.envs.num_agents == num_envs:
        fresh = Agents(library, 1024, settings, seed + 2)
        margin = 0.25 * (high.astype(float) - low)  # as floats: unsigned numbers would wrap around
        differs = (play.first_high > fresh.observations.max(axis=0) + margin) & (margin > 0)
        differs |= (play.first_low < fresh.observations.min(axis=0) - margin) & (margin > 0)
        if differs.any():
            shown = ", ".join(map(str, np.flatnonzero(differs.ravel())[:12]))
            notes.append("after an episode the first observation is unlike those of new "
                         f"environments (number {shown}): does c_reset set everything again?")
        fresh.envs.close()
    if num_envs > 1 and play.end_together and play.ended.max() > 3:
        notes.append("all episodes end on the same steps, so that batches hold one phase of an "
                     "episode only: stagger their starts if their length is fixed.")
    if play.same_as_other_seed:
        notes.append("another seed changes nothing: does the environment use its generator?")
    return notes


def check_python(creator, settings, steps, seed=0, seconds=15.0, show=lambda text: None):
    """Check an environment in Python as `check` does, for so many steps or seconds.

    Gymnasium's or PettingZoo's check comes first. Then the trainer's vector steps it.
    """
    import emulation
    import flat_spaces
    import vector

    try:
        problems, notes = _check_interface(creator(**settings))
        with vector.make(creator, 1, vector.Serial, env_kwargs=settings, seed=seed) as vecenv:
            flat = flat_spaces.FlatObservation(emulation.declared_space(vecenv.driver_env))
            _play(vecenv, flat, steps, seconds, show, problems, notes)
    except Exception as error:
        text = errors.error_text(error)
        if text is None:
            raise
        return [text], []
    return problems, notes


def _play(vecenv, flat, steps, seconds, show, problems, notes):
    """Step a vector of environments at random, until there is a new problem."""
    import gymnasium

    from flat_spaces import name_field, outside

    def place(wrong, values):
        agent, *index = np.argwhere(wrong)[0]
        return f"{[int(i) for i in index] or ''} of agent {agent} is {values[(agent, *index)]}"

    deadline, ends, rewarded = time.monotonic() + seconds, 0, False
    known, rng = len(problems), np.random.default_rng(0)
    random_play = diagnostics.RandomPlay(vecenv.num_envs)
    observations, rewards = vecenv.reset(seed=0)[0], np.zeros(vecenv.num_agents)
    vecenv.single_action_space.seed(0)
    for t in range(steps):
        show(f"step {t:,} of {steps:,}")
        fields = flat.fields(observations)
        for (_, names, leaf), values in zip(flat.leaves, fields, strict=True):
            where = f"step {t}: {name_field(names)}"
            with np.errstate(over="ignore"):  # a network computes in float32
                narrow = values.astype(np.float32) if values.dtype.kind == "f" else values
            if not np.isfinite(narrow).all():
                fault = "not finite" if not np.isfinite(values).all() else "too large for a float32"
                problems.append(f"{where}{place(~np.isfinite(narrow), values)}, which is {fault}.")
            elif (wrong := outside(leaf, values, vecenv.storage.valid[-1])).any():
                if not isinstance(leaf, gymnasium.spaces.Box):
                    problems.append(f"{where}{place(wrong, values)}, which is not in {leaf}.")
                elif not any("lies outside" in note for note in notes):
                    notes.append(f"{where}{place(wrong, values)}, which lies outside {leaf}.")
        if not np.isfinite(rewards).all():
            problems.append(f"step {t}: the reward{place(~np.isfinite(rewards), rewards)}, "
                            "which is not finite.")
        if len(problems) > known or time.monotonic() > deadline:
            break
        heads = vecenv.action_heads
        if heads:
            actions = rng.integers(0, heads, (vecenv.num_agents, len(heads)))
        else:
            actions = [vecenv.single_action_space.sample() for _ in range(vecenv.num_agents)]
        observations, rewards, terminals, truncations = vecenv.step(np.stack(actions))[:4]
        ends += int((terminals | truncations).sum())
        rewarded |= bool(rewards.any())
        random_play.add(rewards, terminals | truncations)
    if not problems:
        notes += [f"no episode ended in {t:,} steps. Is there a limit of steps?"] * (not ends)
        notes += [NO_REWARD] * (not rewarded)
        notes += filter(None, [random_play.find_drift()])


def _check_interface(env):
    """Return (problems, notes) of Gymnasium's or PettingZoo's check."""
    import gymnasium

    problems, notes = [], []
    with warnings.catch_warnings(record=True) as warned, contextlib.closing(env):
        warnings.simplefilter("always")
        try:
            if isinstance(env, gymnasium.Env):
                from gymnasium.utils.env_checker import check_env

                check_env(env, skip_render_check=True)
            elif hasattr(env, "possible_agents") and not hasattr(env, "agent_iter"):
                from pettingzoo.test import parallel_api_test

                with contextlib.redirect_stdout(io.StringIO()):
                    parallel_api_test(env, num_cycles=100)
        except AssertionError as error:
            problems.append(str(error).strip() or "its package's check fails without a message")
    for warning in warned:
        text = re.sub("\x1b\\[[0-9;]*m", "", str(warning.message)).removeprefix("WARN: ").strip()
        if "unwrapped version" not in text and text not in notes:
            notes.append(text)
    return problems, notes


def run_check(name, back_end, *arguments):
    """Print what `check` or `check_python` finds; return 1 for a problem, else 0."""
    start = time.perf_counter()
    with processes.progress() as show:
        problems, notes = back_end(*arguments, show=show)
    for text in problems:
        print(f"{name}: PROBLEM: {text}")
    for text in notes:
        print(f"{name}: look at this: {text}")
    if not problems:
        print(f"{name}: no problem found ({time.perf_counter() - start:.0f} s)")
    return 1 if problems else 0


def main_python(creator, arguments):
    """Check an environment in Python, which this command does not draw."""
    if not arguments.check:
        raise SystemExit(f"{arguments.name} is an environment in Python. --check checks it; "
                         "`python pufferl.py eval` with --eval.video draws it.")
    known = creator.settings  # raises for an unknown name
    settings = dict(parse_setting(creator.name, known, text) for text in arguments.set)
    steps = arguments.steps or 10_000
    print(f"{creator.name}: playing {steps:,} random steps, 15 s at most", file=sys.stderr)
    return run_check(creator.name, check_python, creator, settings, steps, arguments.seed)


def restart_with_sanitizers():
    """Restart this command with the sanitizers preloaded, as Python needs it.

    Returns False if the compiler has none.
    """
    compiler = ocean.find_compiler()
    paths = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True,
                            text=True).stdout.strip() for name in ("libasan.so", "libubsan.so")]
    if not all(map(os.path.isabs, paths)):
        print("no sanitizers found beside the compiler: checking without them", file=sys.stderr)
        return False
    environment = {**os.environ, "LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0",
                   "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    os.execve(sys.executable, [sys.executable, "-m", "ocean", *sys.argv[1:]], environment)


# Playing


def save_png(path, picture):
    from PIL import Image

    Image.fromarray(picture).save(path)
    print(f"saved {path}")


def keyed_action(envs, keys, is_down, cell):
    """Return the player's action, of the `keys` that are down or the clicked `cell`.

    Returns None if there is neither and the game waits for a key.
    """
    action, pressed = np.zeros(envs.action_dims), False
    for key in keys:
        if key.name == "REST" or is_down(key.code):
            action[key.head] = key.value
            pressed |= key.name != "REST"
    if cell is not None:
        return np.array([cell])
    return action if pressed or not envs.library.by_turns else None


def clicked_cell(envs, raylib, columns, width):
    """Return the number of the cell that is clicked now, or None.

    The board has `columns` columns and is `width` pixels wide.
    """
    if not columns or not raylib.IsMouseButtonPressed(0) & 0xFF:
        return None
    side = width // columns
    column, row = raylib.GetMouseX() // side, raylib.GetMouseY() // side
    cell = row * columns + column
    return cell if column < columns and cell < envs.action_heads[0] else None


def find_raylib(compiler):
    """List the compiler's options that link the system's raylib; None without raylib."""
    static = ["-lraylib", "-lGL", "-lm", "-lpthread", "-ldl", "-lrt", "-lX11"]
    candidates = [["-lraylib", "-lm"], static]
    if shutil.which("pkg-config"):
        result = subprocess.run(["pkg-config", "--cflags", "--libs", "raylib"],
                                capture_output=True, text=True)
        candidates = [result.stdout.split()] * (result.returncode == 0) + candidates
    program = "int GetScreenWidth(void); int main(void) { return GetScreenWidth(); }"
    with tempfile.TemporaryDirectory() as folder:
        for options in candidates:
            command = [compiler, "-x", "c", "-", "-o", os.path.join(folder, "probe"), *options]
            result = subprocess.run(command, input=program, capture_output=True, text=True)
            if result.returncode == 0:
                return options
    return None


def standalone(library, settings, path, kind="fast"):
    """Build the environment as a program without Python (main.c) at `path`.

    It has a window if the system has raylib, except for a profile. `kind`: fast (optimised), debug
    (with sanitizers) or profile (optimised, with symbols).
    """
    compiler = ocean.find_compiler()
    flags = {"fast": ocean.FLAGS, "debug": ocean.DEBUG_FLAGS, "profile": ocean.PROFILE_FLAGS}[kind]
    raylib = None if kind == "profile" else find_raylib(compiler)
    window = [] if raylib is None else ["-DDRAW"]
    command = [compiler, *flags, "-I", str(ocean.FOLDER),
               f'-DENV_HEADER="{library.header}"', *window,
               str(ocean.FOLDER / "main.c"), "-o", str(path), *(raylib or []), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{library.header} does not compile:\n{' '.join(command)}\n"
                           f"{result.stderr}")
    run = " ".join([str(path) if os.path.dirname(path) else f"./{path}",
                    *(f"{name}={float(value):.10g}" for name, value in settings.items())])
    print(f"built {path} {'with a window' if window else 'without a window'}"
          + (" (no raylib was found)" if raylib is None and kind != "profile" else ""))
    print(f"to run it: {run}   at random; add a file of python pufferl.py export "
          f"{library.name} for a policy")
    if kind == "profile":
        print(f"to see where the time goes: perf record -g {run} --episodes 100000 --steps "
              "10000000 && perf report")


def play(library, settings, at_random, seed):
    name, raylib = library.name, ocean._raylib()
    agents, rng = Agents(library, 1, settings, seed), np.random.default_rng(seed)
    keys, columns = agents.envs.keys()
    keyed = bool(keys or columns)
    at_random |= not keyed
    turns = library.by_turns and not at_random
    frames, recording, score, action = [], False, 0.0, None
    raylib.GetMouseX.restype = raylib.GetMouseY.restype = ctypes.c_int
    raylib.SetExitKey(ESCAPE)
    picture = agents.envs.render()
    if at_random:
        print("an agent at random" + ("" if keyed else f"; {name} has no keys"))
    while not raylib.WindowShouldClose() & 0xFF:
        start = time.perf_counter()
        is_down = raylib.IsKeyPressed if turns else raylib.IsKeyDown
        agents.act(rng)
        if not at_random:
            cell = clicked_cell(agents.envs, raylib, columns, picture.shape[1])
            action = keyed_action(agents.envs, keys,
                                  lambda code, is_down=is_down: is_down(code) & 0xFF, cell)
            if action is not None:
                agents.actions[0] = action
        if at_random or action is not None:
            agents.envs.step(agents.rows)
            score += float(agents.rewards[0])
            if agents.terminals[0] or agents.truncations[0]:
                print(f"episode over, return {score:g}")
                score = 0.0
        if raylib.IsKeyPressed(R) & 0xFF and all(key.code != R for key in keys):
            agents.envs.reset(agents.rows)
            score = 0.0
        picture = agents.envs.render()
        if recording:
            frames.append(picture)
        if raylib.IsKeyPressed(F12) & 0xFF:
            stamp = f"{name}_{time.strftime('%Y%m%d-%H%M%S')}"
            if not raylib.IsKeyDown(CONTROL) & 0xFF:
                save_png(f"{stamp}.png", picture)
            elif not recording:
                recording = True
            else:
                save_gif(f"{stamp}.gif", frames, library.fps)
                frames, recording = [], False
        rate = 30 if turns else library.fps  # a game that waits for a key must notice it soon
        time.sleep(max(0.0, 1 / rate - (time.perf_counter() - start)))
    raylib.CloseWindow()


def save_gif(path, frames, fps):
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    if images:
        images[0].save(path, save_all=True, append_images=images[1:],
                       duration=round(1000 / fps), loop=0)
        print(f"saved {path}")


def parse_setting(name, settings, text):
    """Parse NAME=VALUE to (setting, value); settings: {name: default}."""
    key, _, value = text.partition("=")
    if key not in settings:
        raise SystemExit(f"{name} has no setting {key!r}: {ocean.nearest(key, settings)}")
    if isinstance(settings[key], str):
        return key, value
    try:
        return key, json.loads(value.lower() if re.fullmatch("(?i)true|false", value) else value)
    except json.JSONDecodeError:
        raise SystemExit(f"--set {key}={value}: must be a number, true or false.") from None


def main():
    parser = argparse.ArgumentParser(prog="python -m ocean", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name", nargs="?", help="an environment, or the path of a header; with --check any that "
        "pufferl.py takes")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the environment")
    add("--random", action="store_true", help="watch an agent at random")
    add("--check", action="store_true", help="find common bugs; exits with status 0 or 1")
    add("--png", metavar="FILE", help="save the picture after random steps, without a window")
    add("--gif", metavar="FILE", help="save a film of these steps")
    add("--steps", type=int, help="of --png and --gif (100), agent steps of --check (1,000,000)")
    add("--seed", type=int, default=0)
    add("--standalone", nargs="?", const="", metavar="FILE", help="build a program that needs no "
        "Python (FILE: its path, by default the environment's name)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--debug", action="store_true", help="build with sanitizers")
    add("--fast", action="store_true", help="build optimised; --check does not by default")
    add("--profile", action="store_true", help="build the program optimised with symbols, for perf")
    arguments = parser.parse_args()
    if arguments.name is None:
        print("\n".join(ocean.names()))
        return 0
    if not arguments.name.endswith(".h") and arguments.name not in ocean.names():
        import environments

        try:
            if (creator := environments.load_creator(arguments.name)) is not None:
                return main_python(creator, arguments)
        except (ValueError, ImportError) as error:
            raise SystemExit(str(error)) from None
    build_program = arguments.standalone is not None or arguments.profile
    debug = not build_program and (arguments.debug or (arguments.check and not arguments.fast))
    try:
        if debug and "asan" not in os.environ.get("LD_PRELOAD", ""):
            debug = restart_with_sanitizers()
        library = ocean.load(arguments.name, debug=debug)
        settings = dict(parse_setting(library.name, library.settings, text)
                        for text in arguments.set)
        library.create(1, settings=settings).close()  # raises for wrong settings or spaces
        if build_program:
            kind = "debug" if arguments.debug else "profile" if arguments.profile else "fast"
            suffix = "" if kind == "fast" else f"_{kind}"
            standalone(library, settings, arguments.standalone or library.name + suffix, kind)
            return 0
    except (ValueError, TypeError, RuntimeError) as error:
        raise SystemExit(str(error)) from None
    if arguments.check:
        steps = arguments.steps or 1_000_000
        print(f"{library.name}: playing {steps:,} random steps", file=sys.stderr)
        return run_check(library.name, check, library, settings, steps)
    if arguments.png or arguments.gif:
        os.environ["SDL_VIDEODRIVER"] = "dummy"
        agents, frames = Agents(library, 1, settings, arguments.seed), []
        rng = np.random.default_rng(arguments.seed)
        for _ in range(100 if arguments.steps is None else arguments.steps):
            agents.act(rng)
            agents.envs.step(agents.rows)
            if arguments.gif:
                frames.append(agents.envs.render())
        if arguments.gif:
            save_gif(arguments.gif, frames, library.fps)
        if arguments.png:
            save_png(arguments.png, agents.envs.render())
        return 0
    if not ocean.has_display():
        raise SystemExit("there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set). "
                         "--png FILE and --gif FILE draw without one.")
    with contextlib.suppress(KeyboardInterrupt):
        play(library, settings, arguments.random, arguments.seed)
    return 0


if __name__ == "__main__":
    processes.run_command(lambda: sys.exit(main()))
