"""Play, watch, draw or check an environment, without any training code.

    python -m ocean                                  # the names of all environments
    python -m ocean breakout                    # a window; play with its KEYS, if it has some
    python -m ocean breakout --random --set frameskip=2 balls=0
    python -m ocean breakout --png breakout.png --steps 200     # the picture after random steps
    python -m ocean path/to/my.h --check        # a million steps with sanitizers, to find bugs
    python -m ocean my_file.py:make_env --check # one in Python, also gym/CartPole-v1: 10,000 steps
    python -m ocean breakout --standalone       # a program with symbols for perf; also --debug

In the window: F12 saves a picture, R restarts, Escape ends. The first agent is the player; all
others act at random. `--debug` builds with sanitizers.
"""

import argparse
import contextlib
import ctypes
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from types import SimpleNamespace

import numpy as np

import emulation
import environments
import errors
import flat_spaces
import ocean
import processes
from ocean import device

# raylib's codes of the keys that the window uses
ESCAPE, F12, R = 256, 301, ord("R")
NO_REWARD = "no reward but 0 was ever given. Can a random agent find one?"
GUARD = 64  # bytes before and after each buffer, in which a check finds writes out of bounds
SECONDS = 15.0  # that a check of an environment in Python takes at most


class Agents:
    """Hold environments, arrays of one step between guards, and random actions.

    apart: each environment has its own buffers. Then an array is (environments, agents of each,
    ...), else (agents, ...). has_finals: whether c_step gets final_observations.
    Attributes: the arrays that ocean.rows takes, valid and action_masks None if there are none;
    outputs, {name: array} of all that a step writes but final_observations; envs and rows, of the
    first environment if apart, else of all.
    """

    valid = action_masks = None

    def __init__(self, library, num_envs, settings=None, seed=0, first_env=0, apart=False,
                 has_finals=True):
        each = 1 if apart else num_envs
        parts = [library.create(each, seed, settings, first_env + first)
                 for first in range(0, num_envs, each)]
        self.envs, self.blocks, arrays = parts[0], [], {}
        for name, array in vars(emulation.new_rows(self.envs)).items():
            if array is None or name == "resets" or (name == "valid" and not self.envs.has_valid):
                continue
            block = np.full((len(parts), array.nbytes + 2 * GUARD), 0xA5, np.uint8)
            block[:, GUARD:-GUARD] = 0
            self.blocks.append(block)
            arrays[name] = block[:, GUARD:-GUARD].view(array.dtype).reshape(len(parts), *array.shape)
        self._tables = [ocean.rows(**{name: array[i] for name, array in arrays.items()
                                      if has_finals or name != "final_observations"})
                        for i in range(len(parts))]
        self.parts = [(part, table.ctypes.data)
                      for part, table in zip(parts, self._tables, strict=True)]
        self.rows = self.parts[0][1]
        if not apart:
            arrays = {name: array[0] for name, array in arrays.items()}
        self.__dict__.update(arrays)
        self.outputs = {name: array for name, array in arrays.items()
                        if name not in ("actions", "final_observations")}
        for part, table in self.parts:
            part.reset(table)

    def act(self, rng):
        """Draw random actions.

        With a mask nine of ten are legal. A policy never takes the others, but an agent at random
        does, so environments must survive them.
        """
        heads, first = self.envs.action_heads, 0
        if not heads:
            self.actions[:] = 2.4 * rng.random(self.actions.shape) - 1.2
            return
        self.actions[:] = rng.random(self.actions.shape) * heads
        for i, n in enumerate(heads if self.envs.has_action_masks else ()):
            mask = self.action_masks[:, first : first + n]
            legal = np.where(mask, rng.random(mask.shape), -1).argmax(axis=1)
            self.actions[:, i] = np.where(rng.random(len(mask)) < 0.9, legal, self.actions[:, i])
            first += n

    def step(self):
        """Step all, the last environment first."""
        for part, table in reversed(self.parts):
            part.step(table)

    def poison(self, byte):
        """Write a byte into all that a step writes."""
        for array in (*self.outputs.values(), self.final_observations):
            array.view(np.uint8)[...] = byte

    def guards_are_whole(self):
        return all((block[:, :GUARD] == 0xA5).all() and (block[:, -GUARD:] == 0xA5).all()
                   for block in self.blocks)

    def close(self):
        for part, _ in self.parts:
            part.close()


class Range:
    """The least and the greatest number of each element of arrays (rows, ...)."""

    low, high = np.inf, -np.inf

    def add(self, rows):
        rows = rows.astype(float)  # unsigned integers have no infinity
        self.low = np.minimum(self.low, rows.min(axis=0, initial=np.inf))
        self.high = np.maximum(self.high, rows.max(axis=0, initial=-np.inf))


# Checking


def allocated():
    """Return the bytes allocated in C by this process; 0 without the sanitizers."""
    count = getattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes", None)
    if count is None:
        return 0
    count.restype = ctypes.c_size_t
    return count()


class RandomPlay:
    """Returns of episodes that are played at random, of one agent of each environment.

    One agent, because those of an environment may share rewards. The returns have no reason to
    change from episode to episode, unless `reset` leaves something of earlier episodes, for example
    a sum of rewards.
    """

    LIMIT = 200  # episodes of each environment

    def __init__(self, environments):
        self.total = 0.0  # since each agent's episode began
        self.sum = 0.0  # of all episodes that ended
        self.ended = 0
        self.count = np.zeros(environments, int)
        self.returns = np.zeros((environments, self.LIMIT))
        self.steps = np.zeros(environments, int)  # of the current episode
        self.lengths = np.zeros((environments, self.LIMIT), int)

    def add(self, rewards, done):
        """Add a step: rewards and ends of episodes, (agents,), grouped by environment."""
        each, self.total = len(rewards) // len(self.count), self.total + np.asarray(rewards, float)
        self.steps += 1
        if not done.any():
            return
        for env in np.flatnonzero(done[::each] & (self.count < self.LIMIT)):
            self.returns[env, self.count[env]] = self.total[env * each]
            self.lengths[env, self.count[env]] = self.steps[env]
            self.count[env] += 1
        self.steps[done[::each] != 0] = 0
        self.sum += self.total[done != 0].sum()
        self.ended += (done != 0).sum()
        self.total[done != 0] = 0

    def find_log_error(self, log):
        """Return a sentence if an environment's log has another mean return, else None.

        The log may have the mean or the sum over an environment's agents. None also if it counts
        episodes in another way.
        """
        each = np.size(self.total) // len(self.count)
        counts = self.ended, self.ended // each
        if log.get("n", 0) > self.ended:
            return (f"log.n counts {log['n']:.0f} episodes, but {self.ended} ended: is a terminal "
                    "or a truncation missing?")
        if not self.ended or "episode_return" not in log or round(log["n"]) not in counts:
            return None
        mean, logged = self.sum / self.ended, log["episode_return"]
        if any(abs(logged - total) <= 1e-3 * max(1, abs(total)) for total in (mean, mean * each)):
            return None
        return (f"log.episode_return is {logged:.4g} in the mean, but the rewards of these "
                f"episodes add up to {mean:.4g}: does reset forget the sum, or does the log omit "
                "rewards?")

    def find_short_episodes(self):
        """Return a sentence if only the first episodes last over one step, else None."""
        later = self.lengths[:, 2:][self.lengths[:, 2:] > 0]
        if not later.size or later.max() > 1 or self.lengths[:, :2].max() == 1:
            return None
        return "later episodes last one step: does c_reset reset the counter of a time limit?"

    def find_drift(self):
        """Return a sentence if later episodes differ from earlier ones, else None.

        By the rank-sum test (Mann and Whitney 1947), from five standard deviations on.
        """
        halves = zip(self.returns, self.count, (self.count - 1) // 2, strict=True)
        pairs = [(returns[1 : 1 + half], returns[count - half : count])
                 for returns, count, half in halves]  # the first may begin in its middle
        early, late = map(np.concatenate, zip(*pairs, strict=True))
        if not len(early) or not np.isfinite([early, late]).all():
            return None
        below, up_to = (np.searchsorted(np.sort(early), late, side) for side in ("left", "right"))
        share = (below + up_to).mean() / (2 * len(early))  # of pairs in which the later is larger
        error = math.sqrt((2 * len(early) + 1) / 12) / len(early)
        if abs(share - 0.5) < max(0.25, 5 * error):
            return None
        return (f"the return of random play moves from {early.mean():.4g} in earlier episodes to "
                f"{late.mean():.4g} in later ones: does reset keep something of the episodes "
                "before, as a sum of rewards?")


def check(library, settings, steps=1_000_000, num_envs=8, seed=0, show=lambda text: None):
    """Step environments at random; return (problems, notes), each a list of sentences.

    Two copies run side by side: one as a vector, the other as single environments, stepped from the
    last to the first. Their buffers hold different garbage before each step. So an output that
    differs was not written, or depends on something else than the environment's state and
    generator. show: is called with the progress.
    """
    rng, problems, t = np.random.default_rng(seed), {}, 0
    whole = Agents(library, num_envs, settings, seed)
    twin = Agents(library, num_envs, settings, seed, apart=True)
    other = Agents(library, num_envs, settings, seed + 1, has_finals=False)  # as in C programs
    for part, _ in twin.parts:  # more final observations must not change anything else
        part.every_final()
    agents = whole.envs.num_agents
    play = SimpleNamespace(
        observations=Range(), first_observations=Range(), end_together=True,
        same_as_other_seed=True, lacks_finals=False, largest_reward=0.0, allocated=0,
        rounds=max(200, steps // agents), random=RandomPlay(num_envs))

    def problem(key, text):
        problems.setdefault(key, f"step {t}: {text}")

    while t < play.rounds and not problems:
        t += 1
        show(f"step {t:,} of {play.rounds:,} of {agents} agents")
        whole.act(rng)
        twin.actions[:] = whole.actions.reshape(twin.actions.shape)
        compare = t <= 3000 or t % 16 == 0  # comparing takes longer than stepping
        if compare:
            whole.poison(0xFF)
            twin.poison(0x7F)
        whole.step()
        twin.step()
        if compare:
            _compare_copies(whole, twin, problem)
        done = (whole.terminals | whole.truncations) == 1
        play.end_together &= done.all() or not done.any()
        play.random.add(whole.rewards, done)
        largest = np.abs(whole.rewards).max()
        play.largest_reward = max(play.largest_reward, largest)
        if not problems and not math.isfinite(largest):
            problem("reward", f"a reward is {whole.rewards[~np.isfinite(whole.rewards)][0]}.")
        if t == play.rounds // 2:
            play.allocated = allocated()
        if play.same_as_other_seed or t <= 1000:
            other.actions[:] = whole.actions
            other.step()
            play.same_as_other_seed &= (np.array_equal(whole.observations, other.observations)
                                        and np.array_equal(whole.rewards, other.rewards))
        if compare and not problems:
            _check_outputs(whole, twin, play, problem)
            play.observations.add(whole.observations)
            play.first_observations.add(whole.observations[done])
    grown, notes = allocated() - play.allocated, []
    if not (whole.guards_are_whole() and twin.guards_are_whole()):
        problems["guard"] = ("c_step or c_reset writes outside its part of a buffer. The "
                             "program of --standalone --debug names the line.")
    if not problems:
        log = whole.envs.log()
        problems |= _check_log(log, play)
        if device.holds_pointer(library):
            problems["pointer"] = ("struct Env has a pointer, which a resumed run reads in another "
                                   "process: hold arrays in the struct, or declare them with HEAP "
                                   "(docs/write_an_environment.md).")
        elif not _continues_after_load(whole, other):
            problems["save"] = ("after save and load it continues otherwise: state is outside the "
                                "struct and its HEAP arrays.")
        notes = _list_notes(library, settings, seed, whole, play, log, grown)
    for each in (whole, twin, other):
        each.close()
    return list(problems.values()), notes


def _compare_copies(whole, twin, problem):
    """Compare all outputs of the vector with those of the single environments."""
    for name, single in twin.outputs.items():
        vector = whole.outputs[name].reshape(single.shape)
        if np.array_equal(vector, single, equal_nan=single.dtype.kind == "f"):
            continue
        vector, single = vector.view(np.uint8), single.view(np.uint8)
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


def _check_outputs(whole, twin, play, problem):
    """Check one step's observations, flags, final observations and masks."""
    space, observations = whole.envs.single_observation_space, whole.observations
    finals = twin.final_observations[(twin.terminals | twin.truncations) == 1]
    octets = finals.reshape(len(finals), math.prod(space.shape)).view(np.uint8)
    is_unwritten = (octets == 0x7F).all(axis=1)
    play.lacks_finals |= is_unwritten.any()
    for name, rows in (("", observations), ("final ", finals[~is_unwritten])):
        outside = ~((rows >= space.low) & (rows <= space.high) & np.isfinite(rows))
        if outside.any():
            row, *index = np.argwhere(outside)[0].tolist()
            problem("range", f"{name}observation {index} of agent {row} is "
                             f"{rows[(row, *index)]}, outside {space.low.min()} .. "
                             f"{space.high.max()}. Correct c_spaces, or scale and clip it.")
    for name in ("terminals", "truncations"):
        if (whole.outputs[name] > 1).any():
            problem(name, f"{name} holds {whole.outputs[name].max()}; it must be 0 or 1.")
    truncated = whole.truncations == 1
    untouched = (whole.final_observations.view(np.uint8) == 0xFF).reshape(len(observations), -1)
    if untouched[truncated].all(axis=1).any():
        problem("final", "an agent is truncated, but its final observation is not written. The "
                         "trainer bootstraps from it: write it before the reset.")
    if not untouched[~truncated].all():
        problem("final", "a final observation is written for an agent that is not truncated.")
    if whole.envs.has_action_masks:
        firsts = np.cumsum([0, *whole.envs.action_heads[:-1]])
        if not np.bitwise_or.reduceat(whole.action_masks, firsts, axis=1).all():
            problem("mask", "an agent has no legal action.")


def _check_log(log, play):
    """Return {key: problem} of the log after a game without other problems."""
    infinite = [name for name, value in log.items() if not math.isfinite(value)]
    perf = log.get("perf", 0.0)
    faults = [
        (not play.random.ended, "end", f"no episode ended in {play.rounds:,} steps: terminals and "
                                      "truncations are always 0. Is there a limit of steps?"),
        (not log, "log", "episodes end, but log.n stays 0: call LOG_EPISODE when an episode ends."),
        (not 0 <= perf <= 1, "perf",
         f"log.perf is {perf:.3g} in the mean; it must lie within 0..1."),
        (infinite, "log", f"not finite in the log: {', '.join(infinite)}."),
    ]
    return next(({key: text} for is_so, key, text in faults if is_so), {})


def _continues_after_load(whole, other):
    """Tell whether environments that load what `whole` saves continue as it does."""
    rng = np.random.default_rng(1)
    other.envs.load(whole.envs.save())
    for _ in range(1000):
        whole.act(rng)
        other.actions[:] = whole.actions
        for agents in (whole, other):
            agents.poison(0xFF)  # the same where nothing is written
            agents.step()
        if not all(np.array_equal(array, other.outputs[name], equal_nan=array.dtype.kind == "f")
                   for name, array in whole.outputs.items()):
            return False
    return True


def _list_notes(library, settings, seed, whole, play, log, grown):
    """List what may be a mistake in an environment without problems."""
    low, high = play.observations.low, play.observations.high
    finite = np.isfinite(high) & np.isfinite(low)
    largest = np.abs([low[finite], high[finite]]).max(initial=0)
    constant, differs = (low == high).ravel(), np.zeros(1, bool)
    if play.random.ended > 10 and whole.envs.num_agents == whole.envs.num_envs:
        fresh, begin, margin = Range(), Agents(library, 1024, settings, seed + 2), (high - low) / 4
        fresh.add(begin.observations)
        begin.close()
        first = play.first_observations
        differs = (first.high > fresh.high + margin) | (first.low < fresh.low - margin)
        differs = (differs & (margin > 0)).ravel()

    def indices(flags):
        shown = np.flatnonzero(flags)
        return ", ".join(map(str, shown[:12])) + " ..." * (len(shown) > 12)

    return [note for is_so, note in (
        (play.lacks_finals,
         "a terminated agent gets no final observation, which ocean.gymnasium needs: write it when "
         "an episode ends, `if (WANTS_FINAL(env, truncated))` (env.h)."),
        (play.largest_reward == 0, NO_REWARD),
        (True, play.random.find_drift()),
        (True, play.random.find_short_episodes()),
        (log, play.random.find_log_error(log)),
        (constant.any(),
         f"{constant.sum()} of {low.size} elements of the observation never change (number "
         f"{indices(constant)}): are they stale, or of no use?"),
        (largest > 20,
         f"observations reach {largest:.4g}; networks learn best from numbers of about 1."),
        (play.largest_reward > 1000,
         f"rewards reach {play.largest_reward:.4g}; scale them so that returns are below ten or "
         "so."),
        (grown > max(2**16, 4 * play.rounds),
         f"memory grows: {grown:,} bytes more after {play.rounds - play.rounds // 2:,} steps. Does "
         "c_step or c_reset allocate what is never freed? The program of --standalone --debug "
         "names the line."),
        (differs.any(),
         "after an episode the first observation is unlike those of new environments (number "
         f"{indices(differs)}): does c_reset set everything again?"),
        (whole.envs.num_envs > 1 and play.end_together
         and play.random.ended > 3 * whole.envs.num_agents,
         "all episodes end on the same steps, so that batches hold one phase of an episode only: "
         "stagger their starts if their length is fixed."),
        (play.same_as_other_seed,
         "another seed changes nothing: does the environment use its generator?"),
    ) if is_so and note]


def check_python(creator, settings, steps, seed=0, show=lambda text: None):
    """Check an environment in Python as `check` does, for so many steps or SECONDS.

    Gymnasium's or PettingZoo's check comes first. Then the trainer's vector steps it.
    """
    import vector

    try:
        problems, notes = _check_interface(creator(**settings))
        with vector.make(creator, 1, vector.Serial, env_kwargs=settings, seed=seed) as vecenv:
            flat = flat_spaces.FlatObservation(emulation.declared_space(vecenv.driver_env))
            _play(vecenv, flat, steps, show, problems, notes)
    except Exception as error:
        text = errors.error_text(error)
        if text is None:
            raise
        return [text], []
    return problems, notes


def _play(vecenv, flat, steps, show, problems, notes):
    """Step a vector of environments at random, until there is a new problem."""
    deadline, known, ends, reward_sum = time.monotonic() + SECONDS, len(problems), 0, 0.0
    outside, random_play = "", RandomPlay(vecenv.num_envs)
    rng = np.random.default_rng(0)
    observations, rewards = vecenv.reset(seed=0)[0], np.zeros(vecenv.num_agents)
    vecenv.single_action_space.seed(0)
    for t in range(steps):
        show(f"step {t:,} of {steps:,}")
        fields = {flat_spaces.name_field(keys): values for (keys, *_), values
                  in zip(flat.leaves, flat.fields(observations), strict=True)}
        for name, values in {**fields, "reward": rewards}.items():
            with np.errstate(over="ignore"):  # a network computes in float32
                wrong = ~np.isfinite(values.astype(np.float32))
            if wrong.any():
                agent, *index = np.argwhere(wrong)[0].tolist()
                problems.append(f"step {t}: {name}{index or ''} of agent {agent} is "
                                f"{values[(agent, *index)]}, which is not finite in float32.")
        words = flat.find_outside(observations, vecenv.storage.valid[-1], 0)[1]
        if words and not outside:
            outside = f"step {t}: {words}"
        if len(problems) > known or time.monotonic() > deadline:
            break
        heads = vecenv.action_heads
        if heads:
            actions = rng.integers(0, heads, (vecenv.num_agents, len(heads)))
        else:
            actions = [vecenv.single_action_space.sample() for _ in range(vecenv.num_agents)]
        observations, rewards, terminals, truncations = vecenv.step(np.stack(actions))[:4]
        ends += int((terminals | truncations).sum())
        reward_sum += np.abs(rewards).sum()
        random_play.add(rewards, terminals | truncations)
    no_end = f"no episode ended in {t:,} steps. Is there a limit of steps?"
    notes += filter(None, [outside] if problems else [
        outside, not ends and no_end, reward_sum == 0 and NO_REWARD, random_play.find_drift()])


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


def run_check(maker, settings, steps, seed):
    """Check an ocean.Library or a creator, and print what is found.

    steps: None for the usual number. Returns 1 for a problem, else 0.
    """
    is_in_c, start = isinstance(maker, ocean.Library), time.perf_counter()
    steps = steps or (1_000_000 if is_in_c else 10_000)
    limit = "" if is_in_c else f", {SECONDS:.0f} s at most"
    print(f"{maker.name}: playing {steps:,} random steps{limit}", file=sys.stderr)
    with processes.progress() as show:
        check_kind = check if is_in_c else check_python
        problems, notes = check_kind(maker, settings, steps, seed=seed, show=show)
    for text in problems:
        print(f"{maker.name}: PROBLEM: {text}")
    for text in notes:
        print(f"{maker.name}: look at this: {text}")
    if not problems:
        print(f"{maker.name}: no problem found ({time.perf_counter() - start:.0f} s)")
    return 1 if problems else 0


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


def save_picture(path, picture):
    from PIL import Image

    Image.fromarray(picture).save(path)
    print(f"saved {path}")


def player_action(envs, raylib, is_down, width):
    """Return the player's action, from the keys or from the clicked cell of a board.

    Returns None if there is neither and the game waits for one. width: of the picture, in pixels.
    """
    keys, columns = envs.keys()
    if columns and raylib.IsMouseButtonPressed(0):
        column, row = (position * columns // width
                       for position in (raylib.GetMouseX(), raylib.GetMouseY()))
        if column < columns and row * columns + column < envs.action_heads[0]:
            return np.array([row * columns + column])
    pressed = [key for key in keys if key.name == "REST" or is_down(key.code)]
    if envs.library.by_turns and all(key.name == "REST" for key in pressed):
        return None
    action = np.zeros(envs.action_dims)
    for key in pressed:
        action[key.head] = key.value
    return action


def find_raylib(compiler):
    """List the compiler's options that link the system's raylib; None without raylib."""
    listed = subprocess.run("pkg-config --cflags --libs raylib", shell=True, capture_output=True,
                           text=True).stdout.split()
    static = ["-lraylib", "-lGL", "-lm", "-lpthread", "-ldl", "-lrt", "-lX11"]
    program = "int GetScreenWidth(void); int main(void) { return GetScreenWidth(); }"

    def links(options):
        with tempfile.TemporaryDirectory() as folder:
            command = [compiler, "-x", "c", "-", "-o", f"{folder}/probe", *options]
            return subprocess.run(command, input=program, capture_output=True,
                                  text=True).returncode == 0

    return next(filter(links, (listed, ["-lraylib", "-lm"], static)), None)


def standalone(library, settings, path, debug):
    """Build the environment as a program without Python (main.c), with symbols.

    It has a window if the system has raylib. path: "" is the environment's name; debug: with
    sanitizers, else optimised.
    """
    path = path or f"{library.name}{'_debug' if debug else ''}"
    compiler = ocean.find_compiler()
    flags = ocean.DEBUG_FLAGS if debug else [*ocean.FLAGS, "-g"]
    raylib = find_raylib(compiler)
    window = [] if raylib is None else ["-DDRAW"]
    command = [compiler, *flags, *ocean.header_flags(library.header), *window,
               str(ocean.FOLDER / "main.c"), "-o", str(path), *(raylib or []), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise errors.ConfigError(f"{library.header} does not compile:\n{' '.join(command)}\n"
                           f"{result.stderr}")
    run = " ".join([str(path) if os.path.dirname(path) else f"./{path}",
                    *(f"{name}={float(value):.10g}" for name, value in settings.items())])
    print(f"built {path} {'with a window' if window else 'without a window (no raylib was found)'}")
    print(f"to run it: {run}   at random; add a file of python pufferl.py export "
          f"{library.name} for a policy")


def play(library, settings, at_random, seed):
    """Show a window until it is closed, and play by keys and clicks, or at random."""
    name, raylib = library.name, ocean._raylib()
    agents, rng = Agents(library, 1, settings, seed), np.random.default_rng(seed)
    keys, columns = agents.envs.keys()
    has_keys = bool(keys or columns)
    at_random |= not has_keys
    turns = library.by_turns and not at_random
    rate = 30 if turns else library.fps  # a game that waits for a key must notice it soon
    score, action = 0.0, None
    raylib.SetExitKey(ESCAPE)
    picture = agents.envs.render()
    if at_random:
        print("an agent at random" + ("" if has_keys else f"; {name} has no keys"))
    while not raylib.WindowShouldClose():
        start = time.perf_counter()
        agents.act(rng)
        if not at_random:
            is_down = raylib.IsKeyPressed if turns else raylib.IsKeyDown
            action = player_action(agents.envs, raylib, is_down, picture.shape[1])
        if action is not None:
            agents.actions[0] = action
        if at_random or action is not None:
            agents.step()
            score += float(agents.rewards[0])
        if agents.terminals[0] or agents.truncations[0]:
            print(f"episode over, return {score:g}")
            score, agents.terminals[0], agents.truncations[0] = 0.0, 0, 0
        if raylib.IsKeyPressed(R) and all(key.code != R for key in keys):
            agents.envs.reset(agents.rows)
            score = 0.0
        picture = agents.envs.render()
        if raylib.IsKeyPressed(F12):
            save_picture(f"{name}_{time.strftime('%Y%m%d-%H%M%S')}.png", picture)
        time.sleep(max(0.0, 1 / rate - (time.perf_counter() - start)))
    raylib.CloseWindow()


def parse_setting(text):
    """Parse NAME=VALUE to (name, value): a number, true or false, or else a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value.lower())
    except json.JSONDecodeError:
        return name, value


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
    add("--steps", type=int, help="of --png (100), agent steps of --check (1,000,000)")
    add("--seed", type=int, default=0)
    add("--standalone", nargs="?", const="", metavar="FILE", help="build a program that needs no "
        "Python (FILE: its path, by default the environment's name)")
    add("--debug", action="store_true", help="build with sanitizers, as --check does")
    arguments = parser.parse_args()
    if arguments.name is None:
        print("\n".join(ocean.names()))
        return 0
    settings = dict(map(parse_setting, arguments.set))
    with errors.exit_on_error("python -m ocean", (ValueError, TypeError, OSError)):
        maker = environments.load_creator(arguments.name)
        if maker is None:
            build_program = arguments.standalone is not None
            debug = (arguments.debug or arguments.check) and not build_program
            if debug and "asan" not in os.environ.get("LD_PRELOAD", ""):
                debug = restart_with_sanitizers()
            maker = library = ocean.load(arguments.name, debug)
            library.create(1, settings=settings).close()  # raises for wrong settings or spaces
            if build_program:
                standalone(library, settings, arguments.standalone, arguments.debug)
                return 0
        elif arguments.check:
            environments.with_settings(maker, {}, settings, ())
        else:
            raise errors.ConfigError(
                f"{arguments.name} is an environment in Python. --check checks it; "
                "`python pufferl.py eval` with --eval.video draws it.")
    if arguments.check:
        return run_check(maker, settings, arguments.steps, arguments.seed)
    if arguments.png:
        os.environ["SDL_VIDEODRIVER"] = "dummy"
        agents = Agents(library, 1, settings, arguments.seed)
        rng = np.random.default_rng(arguments.seed)
        for _ in range(100 if arguments.steps is None else arguments.steps):
            agents.act(rng)
            agents.step()
        with errors.exit_on_error("python -m ocean", (ValueError, OSError)):
            save_picture(arguments.png, agents.envs.render())
        return 0
    if not ocean.has_display():
        raise SystemExit("there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set). "
                         "--png FILE draws without one.")
    with contextlib.suppress(KeyboardInterrupt):
        play(library, settings, arguments.random, arguments.seed)
    return 0


if __name__ == "__main__":
    processes.run_command(lambda: sys.exit(main()))
