"""Play, watch, draw or check an environment, without any training code.

    python -m ocean                                  # the names of all environments
    python -m ocean breakout                         # a window; you play with its KEYS, else an agent acts at random
    python -m ocean breakout --random --set frameskip=2 balls=0
    python -m ocean breakout --png breakout.png --steps 200      # no window: the picture after some random steps
    python -m ocean path/to/own.h --check            # looks for the usual bugs in a million steps, with sanitizers
    python -m ocean my_file.py:make_env --check      # one in Python, also gym/CartPole-v1: 10,000 steps
    python -m ocean breakout --standalone            # builds a program without Python; also for --debug, --profile

In the window: F12 saves a picture, Ctrl+F12 starts and stops a GIF, R begins anew, Escape ends. The
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

import numpy as np

import diagnostics
import errors
import ocean
import processes

# Raylib's codes of the keys that the window itself uses.
ESCAPE, F12, CONTROL, R = 256, 301, 341, ord("R")
NO_REWARD = "no reward but 0 was ever given. Can a random agent find one at all?"
GUARD = 64  # bytes before and after each buffer, in which a check finds writes out of bounds


class Agents:
    """Environments, the arrays of one step for them, and random actions.

    apart: each environment has buffers of its own. Then an array is (environments, agents of each,
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
        """Random actions. With a mask nine of ten are legal: a policy never takes the others, but
        an agent at random does, so environments must survive them."""
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
    """Bytes that this process has allocated in C; 0 without the sanitizers."""
    count = getattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes", None)
    if count is None:
        return 0
    count.restype = ctypes.c_size_t
    return count()


def check(library, settings, steps=1_000_000, num_envs=8, seed=0, show=lambda text: None):
    """Steps environments at random and returns (problems, notes), each a list of sentences.

    Two copies run side by side: one as a vector, the other as single environments, stepped from the last to the first.
    Their buffers hold different garbage before each step. So an output that differs between them was not written, or
    depends on something else than the environment's state and generator. show: is called with how far it is.
    """
    rng, problems, notes = np.random.default_rng(seed), {}, []
    whole, twin = Agents(library, num_envs, settings, seed), Agents(library, num_envs, settings, seed, apart=True)
    backwards = [(part, rows.ctypes.data) for part, rows in zip(twin.parts, twin.rows, strict=True)][::-1]
    for part in twin.parts:  # writing more final observations must not change anything else
        part.every_final()
    other = Agents(library, num_envs, settings, seed + 1)
    space, agents = whole.envs.single_observation_space, whole.envs.num_agents
    low, high = np.full(space.shape, np.inf), np.full(space.shape, -np.inf)
    ended, together, same_seed, unfinished = np.zeros(agents, int), True, True, False
    begun_low, begun_high = low.copy(), high.copy()  # bounds of episodes' first observations
    played, largest_reward, held = diagnostics.RandomPlay(num_envs), 0.0, 0

    def problem(key, text):
        problems.setdefault(key, text)

    rounds = max(200, steps // agents)
    for t in range(1, rounds + 1):
        show(f"step {t:,} of {rounds:,} of {agents} agents")
        whole.act(rng)
        twin.actions[:] = whole.actions.reshape(twin.actions.shape)
        compare = t <= 3000 or t % 16 == 0  # comparing takes longer than stepping
        if compare:
            whole.fill(0xFF)
            twin.fill(0x7F)
        whole.envs.step(whole.rows)
        for part, rows in backwards:
            part.step(rows)
        if same_seed:
            other.actions[:] = whole.actions
            other.envs.step(other.rows)
        over = (twin.terminals | twin.truncations) == 1
        if over.any():
            ends = twin.final_observations[over]
            if (ends.reshape(len(ends), -1).view(np.uint8) == 0x7F).all(axis=1).any():
                unfinished = True
            elif not ((ends >= space.low) & (ends <= space.high)).all():
                problem("final_range", f"step {t}: a final observation lies outside {space.low.min()} .. "
                                       f"{space.high.max()}.")
        for name, array in twin.outputs.items() if compare else ():
            mine = whole.outputs[name].reshape(array.shape)
            if np.array_equal(mine, array, equal_nan=array.dtype.kind == "f"):
                continue
            ours, its = mine.view(np.uint8), twin.bytes[name]
            differ = np.argwhere(ours != its)[0]
            where = f"{name} of agent {differ[1]}, from byte {differ[-1]}" if array.ndim > 2 else name
            if ours[tuple(differ)] == 0xFF and its[tuple(differ)] == 0x7F:
                problem("unwritten", f"step {t}: c_step does not write {where}. Rows move on every step, so that "
                                     "all of an output is written on each one, also if nothing changed.")
            else:
                problem("differs", f"step {t}: {where} differs between two environments of one seed. Something "
                                   "else than the struct and its generator is used: a static variable, rand(), "
                                   "the time, another environment, or memory that c_reset leaves as it is.")
        done = (whole.terminals | whole.truncations) == 1
        ended += done
        together &= done.all() or not done.any()
        played.add(whole.rewards, done)
        largest_reward = max(largest_reward, reach := np.abs(whole.rewards).max())
        if not math.isfinite(reach):
            problem("reward", f"step {t}: a reward is {whole.rewards[~np.isfinite(whole.rewards)][0]}.")
            break
        if t == rounds // 2:
            held = allocated()
        if not compare:
            continue
        seen = whole.observations
        outside = ~((seen >= space.low) & (seen <= space.high))
        if outside.any() and "unwritten" not in problems:
            at = np.argwhere(outside)[0]
            problem("range", f"step {t}: observation {at[1:].tolist()} of agent {at[0]} is {seen[tuple(at)]}, outside "
                             f"{space.low.min()} .. {space.high.max()}. Correct c_spaces, or scale and cut it.")
        for name in ("terminals", "truncations"):
            if (whole.outputs[name] > 1).any() and "unwritten" not in problems:
                problem(name, f"step {t}: {name} holds {whole.outputs[name].max()}; it must be 0 or 1.")
        cut = whole.truncations == 1
        untouched = (whole.bytes["final_observations"] == 0xFF).reshape(agents, -1)
        if untouched[cut].all(axis=1).any():
            problem("final", f"step {t}: an agent is truncated, but its final observation is not written. The trainer "
                             "values what would have come next by it: write it before the reset.")
        if not untouched[~cut].all():
            problem("final", f"step {t}: a final observation is written for an agent that is not truncated.")
        if whole.masks is not None:
            first = 0
            for n in whole.envs.action_heads:
                if not whole.masks[:, first : first + n].any(axis=1).all():
                    problem("mask", f"step {t}: an agent has no legal action.")
                first += n
        low, high = np.minimum(low, seen.min(axis=0)), np.maximum(high, seen.max(axis=0))
        if done.any():
            begun_low, begun_high = (np.minimum(begun_low, seen[done].min(axis=0)),
                                     np.maximum(begun_high, seen[done].max(axis=0)))
        same_seed = same_seed and (np.array_equal(seen, other.observations)
                                   and np.array_equal(whole.rewards, other.rewards))
        if problems:
            break
    grown = allocated() - held
    if not (whole.guards_are_whole() and twin.guards_are_whole()):
        problem("guard", "c_step or c_reset writes outside its own part of a buffer.")
    if not problems:
        log = whole.envs.log()
        if not ended.any():
            problem("end", f"no episode ended in {rounds:,} steps: terminals and truncations are always 0. Is there a "
                           "limit of steps?")
        elif not log:
            problem("log", "episodes end, but log.n stays 0: call LOG_EPISODE when an episode ends.")
        elif not 0 <= log["perf"] <= 1:
            problem("perf", f"log.perf is {log['perf']:.3g} in the mean; it must lie within 0..1.")
        elif not all(map(math.isfinite, log.values())):
            problem("log", f"not finite in the log: {', '.join(k for k, v in log.items() if not math.isfinite(v))}.")
        saved, first = whole.envs.save(), []
        for trial in range(2):
            replay = np.random.default_rng(1)
            whole.envs.load(saved)
            for k in range(50):
                for n, dim in zip(whole.envs.action_heads or [], range(99), strict=False):
                    whole.actions[:, dim] = replay.integers(0, n, agents)
                whole.envs.step(whole.rows)
                if trial == 0:
                    first.append(whole.observations.copy())
                elif not np.array_equal(first[k], whole.observations):
                    problem("save", "after save and load it goes on otherwise: state lives outside the struct, or "
                                    "c_save and c_load leave something out.")
        if unfinished:
            notes.append("a terminated agent gets no final observation, which ocean.gymnasium wants: write it when an "
                         "episode ends, `if (WANTS_FINAL(env, truncated))` (env.h).")
        if largest_reward == 0:
            notes.append(NO_REWARD)
        notes += filter(None, [played.find_drift(), played.find_log_error(log) if log else None])
        constant = np.flatnonzero((low == high).ravel())
        if len(constant):
            shown = ", ".join(map(str, constant[:12])) + (" ..." if len(constant) > 12 else "")
            notes.append(f"{len(constant)} of {low.size} elements of the observation never change (number {shown}): "
                         "are they stale, or of no use?")
        finite = np.isfinite(high) & np.isfinite(low)
        largest = max(np.abs(high[finite]).max(initial=0), np.abs(low[finite]).max(initial=0))
        if largest > 20:
            notes.append(f"observations reach {largest:.4g}; networks learn best from numbers of about 1.")
        if largest_reward > 1000:
            notes.append(f"rewards reach {largest_reward:.4g}; scale them so that returns are below ten or so.")
        if grown > max(2**16, 4 * rounds):
            notes.append(f"memory grows: {grown:,} bytes more after {rounds - rounds // 2:,} steps. Does c_step or "
                         "c_reset allocate what nobody frees?")
        if ended.sum() > 10 and agents == num_envs:
            fresh = Agents(library, 1024, settings, seed + 2)
            reach = 0.25 * (high.astype(float) - low)  # as floats: unsigned numbers would wrap around
            unlike = (begun_high > fresh.observations.max(axis=0) + reach) & (reach > 0)
            unlike |= (begun_low < fresh.observations.min(axis=0) - reach) & (reach > 0)
            if unlike.any():
                shown = ", ".join(map(str, np.flatnonzero(unlike.ravel())[:12]))
                notes.append(f"after an episode the first observation is unlike those of new environments (number "
                             f"{shown}): does c_reset begin everything anew?")
            fresh.envs.close()
        if num_envs > 1 and ended.any() and together and ended.max() > 3:
            notes.append("all episodes end on the same steps, so that batches hold one phase of an episode only: "
                         "stagger their starts if their length is fixed.")
        if same_seed:
            notes.append("another seed changes nothing: does the environment use its generator?")
        if largest > 0 and not np.any(low < high):
            notes.append("the observation is the same at all times.")
    for one in (whole.envs, other.envs, *twin.parts):
        one.close()
    return list(problems.values()), notes


def check_python(creator, settings, steps, seed=0, seconds=15.0, show=lambda text: None):
    """The same for an environment in Python, which is stepped as the trainer does, for so many steps or seconds.
    Gymnasium's and PettingZoo's own checks come first."""
    import emulation
    import flat_spaces
    import vector

    try:
        problems, notes = _check_interface(creator(**settings))
        with vector.make(creator, 1, vector.Serial, env_kwargs=settings, seed=seed) as vecenv:
            flat = flat_spaces.FlatObservation(emulation.seen_space(vecenv.driver_env))
            _play(vecenv, flat, steps, seconds, show, problems, notes)
    except Exception as error:
        text = errors.error_text(error)
        if text is None:
            raise
        return [text], []
    return problems, notes


def _play(vecenv, flat, steps, seconds, show, problems, notes):
    """Step a vector of environments in Python at random, until there is a problem more."""
    import gymnasium

    from flat_spaces import name_field, outside

    def place(wrong, values):
        agent, *index = np.argwhere(wrong)[0]
        return f"{[int(i) for i in index] or ''} of agent {agent} is {values[(agent, *index)]}"

    deadline, ends, rewarded = time.monotonic() + seconds, 0, False
    known, played, rng = len(problems), diagnostics.RandomPlay(vecenv.num_envs), np.random.default_rng(0)
    seen, rewards = vecenv.reset(seed=0)[0], np.zeros(vecenv.num_agents)
    vecenv.single_action_space.seed(0)
    for t in range(steps):
        show(f"step {t:,} of {steps:,}")
        for (_, names, leaf), values in zip(flat.leaves, flat.fields(seen), strict=True):
            where = f"step {t}: {name_field(names)}"
            with np.errstate(over="ignore"):
                narrow = values.astype(np.float32) if values.dtype.kind == "f" else values  # as a network sees it
            if not np.isfinite(narrow).all():
                what = "is not finite" if not np.isfinite(values).all() else "is too large for a float32"
                problems.append(f"{where}{place(~np.isfinite(narrow), values)}, which {what}.")
            elif (wrong := outside(leaf, values, vecenv.storage.valid[-1])).any():
                if not isinstance(leaf, gymnasium.spaces.Box):
                    problems.append(f"{where}{place(wrong, values)}, which is not in {leaf}.")
                elif not any("lies outside" in note for note in notes):
                    notes.append(f"{where}{place(wrong, values)}, which lies outside {leaf}.")
        if not np.isfinite(rewards).all():
            problems.append(f"step {t}: the reward{place(~np.isfinite(rewards), rewards)}, which is not finite.")
        if len(problems) > known or time.monotonic() > deadline:
            break
        heads = vecenv.action_heads
        actions = rng.integers(0, heads, (vecenv.num_agents, len(heads))) if heads else \
            np.stack([vecenv.single_action_space.sample() for _ in range(vecenv.num_agents)])
        seen, rewards, terminals, truncations = vecenv.step(actions)[:4]
        ends, rewarded = ends + int((terminals | truncations).sum()), rewarded or bool(rewards.any())
        played.add(rewards, terminals | truncations)
    if not problems:
        notes += [f"no episode ended in {t:,} steps. Is there a limit of steps?"] * (not ends)
        notes += [NO_REWARD] * (not rewarded)
        notes += filter(None, [played.find_drift()])


def _check_interface(env):
    """(problems, notes) of the package's own check of one environment."""
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
            problems.append(str(error).strip() or "its package's own check fails without a word")
    for warning in warned:
        text = re.sub("\x1b\\[[0-9;]*m", "", str(warning.message)).removeprefix("WARN: ").strip()
        if "unwrapped version" not in text and text not in notes:
            notes.append(text)
    return problems, notes


def run_check(name, back_end, *arguments):
    """Print what a back end, `check` or `check_python`, finds; 1 if that is a problem, else 0."""
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
    """The command for an environment in Python, which is only checked here."""
    if not arguments.check:
        raise SystemExit(f"{arguments.name} is an environment in Python: --check looks at it; "
                         f"`python pufferl.py eval {arguments.name} --eval.video "
                         "out.mp4` draws it.")
    known = creator.settings  # or the error of an unknown name
    settings = dict(parse_setting(creator.name, known, text) for text in arguments.set)
    steps = arguments.steps or 10_000
    print(f"{creator.name}: playing {steps:,} random steps, each looked at; 15 s at most", file=sys.stderr)
    return run_check(creator.name, check_python, creator, settings, steps, arguments.seed)


def restart_with_sanitizers():
    """Starts this same command anew with the sanitizers preloaded, the only way to have them in
    Python. Returns False if the compiler has none."""
    compiler = ocean.find_compiler()
    found = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
             for name in ("libasan.so", "libubsan.so")]
    if not all(os.path.isabs(path) for path in found):
        print("no sanitizers found beside the compiler: checking without them", file=sys.stderr)
        return False
    environment = {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0",
                   "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    os.execve(sys.executable, [sys.executable, "-m", "ocean", *sys.argv[1:]], environment)


# Playing


def save_png(path, picture):
    from PIL import Image

    Image.fromarray(picture).save(path)
    print(f"saved {path}")


def keyed_action(envs, keys, is_down, cell):
    """The player's action, from the `keys` that are down or the `cell` that was clicked. None if
    there is neither and the game waits for a key."""
    action, pressed = np.zeros(envs.action_dims), False
    for key in keys:
        if key.name == "REST" or is_down(key.code):
            action[key.head] = key.value
            pressed |= key.name != "REST"
    if cell is not None:
        return np.array([cell])
    return action if pressed or not envs.library.by_turns else None


def clicked_cell(envs, raylib, columns, width):
    """The number of the cell that was clicked just now, or None, on a board of `columns` columns
    that is `width` pixels wide."""
    if not columns or not raylib.IsMouseButtonPressed(0) & 0xFF:
        return None
    side = width // columns
    column, row = raylib.GetMouseX() // side, raylib.GetMouseY() // side
    cell = row * columns + column
    return cell if column < columns and cell < envs.action_heads[0] else None


def find_raylib(compiler):
    """The compiler's options that link the system's raylib, a list, or None without a raylib."""
    static = ["-lraylib", "-lGL", "-lm", "-lpthread", "-ldl", "-lrt", "-lX11"]
    candidates = [["-lraylib", "-lm"], static]
    if shutil.which("pkg-config"):
        found = subprocess.run(["pkg-config", "--cflags", "--libs", "raylib"],
                               capture_output=True, text=True)
        candidates = [found.stdout.split()] * (found.returncode == 0) + candidates
    program = "int GetScreenWidth(void); int main(void) { return GetScreenWidth(); }"
    with tempfile.TemporaryDirectory() as folder:
        for options in candidates:
            command = [compiler, "-x", "c", "-", "-o", os.path.join(folder, "probe"), *options]
            if subprocess.run(command, input=program, capture_output=True, text=True).returncode == 0:
                return options
    return None


def standalone(library, settings, path, kind="fast"):
    """Builds the environment as a program without Python (main.c) at `path`: with a window if the
    system has raylib, except for a profile. `kind`: fast (optimised), debug (with sanitizers) or
    profile (optimised, with symbols)."""
    compiler = ocean.find_compiler()
    flags = {"fast": ocean.FLAGS, "debug": ocean.DEBUG_FLAGS, "profile": ocean.PROFILE_FLAGS}[kind]
    raylib = None if kind == "profile" else find_raylib(compiler)
    window = [] if raylib is None else ["-DDRAW"]
    command = [compiler, *flags, "-I", str(ocean.FOLDER),
               f'-DENV_HEADER="{library.header}"', *window,
               str(ocean.FOLDER / "main.c"), "-o", str(path), *(raylib or []), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{library.header} does not "
                           f"compile:\n{' '.join(command)}\n{result.stderr}")
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
        held = raylib.IsKeyPressed if turns else raylib.IsKeyDown
        agents.act(rng)
        if not at_random:
            cell = clicked_cell(agents.envs, raylib, columns, picture.shape[1])
            action = keyed_action(agents.envs, keys,
                                  lambda code, held=held: held(code) & 0xFF, cell)
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
    """(setting, value) of NAME=VALUE. settings: {name: default} of an environment."""
    key, _, value = text.partition("=")
    if key not in settings:
        raise SystemExit(f"{name} has no setting {key!r}: {ocean.nearest(key, settings)}")
    if isinstance(settings[key], str):
        return key, value
    try:
        return key, json.loads(value.lower() if re.fullmatch("(?i)true|false", value) else value)
    except json.JSONDecodeError:
        raise SystemExit(f"--set {key} wants a number, true or false, got {value!r}") from None


def main():
    parser = argparse.ArgumentParser(prog="python -m ocean", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="an environment, or the path of a header of your own; with "
                        "--check any that pufferl.py takes")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings that are not the default")
    parser.add_argument("--random", action="store_true", help="watch an agent at random")
    parser.add_argument("--check", action="store_true", help="look for the usual bugs, then end with status 0 or 1")
    parser.add_argument("--png", metavar="FILE", help="save the picture after some random steps, without a window")
    parser.add_argument("--gif", metavar="FILE", help="the same for all of these steps")
    parser.add_argument("--steps", type=int, help="of --png and --gif (100), agent steps of --check (1,000,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--standalone", nargs="?", const="", metavar="FILE",
                        help="build a program that needs no Python (FILE: its path, by default the environment's name)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--debug", action="store_true", help="build with address and undefined-behaviour sanitizers")
    kind.add_argument("--fast", action="store_true", help="build optimised: what --check does not do by itself")
    kind.add_argument("--profile", action="store_true",
                      help="build the standalone program optimised with symbols, to be run under perf")
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
        settings = dict(parse_setting(library.name, library.settings, text) for text in arguments.set)
        library.create(1, settings=settings).close()  # it says what is wrong with the settings or the spaces
        if build_program:
            built = "debug" if arguments.debug else "profile" if arguments.profile else "fast"
            path = arguments.standalone or (f"{library.name}_{built}" if built != "fast" else library.name)
            standalone(library, settings, path, built)
            return 0
    except (ValueError, TypeError, RuntimeError) as error:
        raise SystemExit(str(error)) from None
    if arguments.check:
        steps = arguments.steps or 1_000_000
        print(f"{library.name}: playing {steps:,} random steps", file=sys.stderr)
        return run_check(library.name, check, library, settings, steps)
    if arguments.png or arguments.gif:
        os.environ["SDL_VIDEODRIVER"] = "dummy"
        agents, rng, frames = Agents(library, 1, settings, arguments.seed), np.random.default_rng(arguments.seed), []
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
        raise SystemExit("there is no display here (neither DISPLAY nor WAYLAND_DISPLAY is set): --png FILE and "
                         "--gif FILE draw without one")
    with contextlib.suppress(KeyboardInterrupt):
        play(library, settings, arguments.random, arguments.seed)
    return 0


if __name__ == "__main__":
    processes.run_command(lambda: sys.exit(main()))
