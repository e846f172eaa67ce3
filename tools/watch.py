"""Evaluate a policy and watch it play: scores, a window, a video, a page.

    python pufferl.py eval breakout --load-model-path latest      # scores
    python pufferl.py eval breakout --baseline                    # of the policy that ships
    python pufferl.py eval breakout --baseline --eval.video out.mp4     # or out.gif, out.png
    python pufferl.py eval breakout --baseline --eval.web         # on a page; forwards over ssh
    python pufferl.py eval breakout --baseline --eval.terminal    # in any terminal
    python pufferl.py ship breakout --load-model-path latest      # make a policy the one that ships

The episodes that count are fixed before they start: "the first N that finish" would be too many
short ones. docs/watch.md has the details.
"""

import base64
import contextlib
import functools
import http.server
import io
import itertools
import json
import math
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

import absolute_imports  # noqa: F401  first
import arena
import configuration
import emulation
import engines
import environments
import loggers
import models
import ocean
import processes
import pufferl
import runs
from auto import plural
from errors import ConfigError, exit_on_error, require
from tools.options import read_command, with_envs

EVAL_SEED = 1_000_003  # added to the seed, so that episodes differ from those of training
GIF_SIDE = 480  # pixels of a GIF's longer side
STILL_STEPS = 60  # before a picture in the page's menu
MOST_ENVS = 4096  # environments in C side by side; with more episodes each plays several
LARGEST_BASELINE = 450_000  # bytes of a policy that ships with an environment


# --------------------------------------------------------------------------------------------------
# A policy in some environments


class Play:
    """A policy in fresh environments, a step at a time: `decide`, then `advance`.

    args: as from pufferl.load_config. Attributes: vecenv; policy; storage, of a horizon of 1, whose
    row 0 the policy reads and whose row 1 the step writes; step, the number of steps so far; logits
    and value of the last `decide`.
    """

    def __init__(self, env_name, args, num_envs, seed):
        configuration.check_names(args)
        self.seed = seed
        self.options = args["eval"]
        self.step = 0
        args = with_envs(args, num_envs, args["vec"]["backend"])
        self.vecenv = pufferl.load_env(env_name, {**args, "train": {**args["train"], "seed": seed}})
        # eval() for batch norms and dropouts
        self.policy = pufferl.load_policy(args, self.vecenv, env_name).eval()
        self.storage = self.vecenv.allocate(1)
        policy, agents = self.policy, self.vecenv.num_agents
        self.state = models.initial_state(policy, agents)
        self.vecenv.begin()
        # a few agents take less time than waking other threads
        self.threads = self.vecenv.num_threads if agents >= 4096 else 1

    def decide(self):
        """Choose the actions for the present observations."""
        s = self.storage
        self.state |= {"resets": torch.from_numpy(s.resets[0]),
                       "valid": torch.from_numpy(s.valid[0])}
        self.masks = None if s.action_masks is None else torch.from_numpy(s.action_masks[0])
        with torch.no_grad(), engines.torch_threads(self.threads):
            observations = torch.from_numpy(s.observations[0])
            self.logits, self.value = models.one_step(self.policy, observations, self.state)
        if self.step == 0:
            outputs = models.join_outputs(self.logits, self.value)
            models.check_logits(self.policy, self.logits, *outputs, self.vecenv.action_heads,
                                self.vecenv.action_dims)
        actions, _, _ = models.sample_logits(
            self.logits, self.value, seed=self.seed, step=self.step, masks=self.masks,
            heads=self.vecenv.action_heads, deterministic=self.options["deterministic"],
            squash=models.squash_of(self.policy))
        s.actions[0] = actions.numpy()

    def advance(self):
        """Step the environments with these actions."""
        self.vecenv.advance(0)
        self.step += 1
        self.vecenv.begin()

    def restart(self, seed):
        """Begin new episodes with the random numbers of `seed`."""
        self.seed = seed
        self.step = 0
        self.vecenv.restart(seed)
        self.vecenv.begin()

    def close(self):
        self.vecenv.close()


# --------------------------------------------------------------------------------------------------
# Scores


class Statistic(NamedTuple):
    """A field of the environments' logs over the episodes that count."""

    mean: float
    error: float  # the standard error of the mean
    min: float
    max: float


class Episodes:
    """The finished episodes of a vector of environments, counted without bias.

    quotas (environments,): the number of episodes of each that count. An environment of several
    agents reports in one of two ways, which shows while it plays: once an episode for all agents
    (PettingZoo, windows of fixed length), then its first `quota` reports count; or once for each
    agent, then each agent's first `quota` episodes count. In the second case agents that end at the
    same step share one report, their mean; it counts if one of them is within its quota.
    always_report: every environment reports sooner or later (those in C do). Environments that
    never report are counted by their rewards.
    """

    RETURN_FIELDS = "episode_return", "episode_length"  # what is measured here

    def __init__(self, quotas, agents_per_env, always_report=False):
        self.quotas = np.asarray(quotas)
        self.agents = agents_per_env
        self.always_report = always_report
        self.ended = np.zeros((len(quotas), agents_per_env), int)  # episodes of each agent
        self.unfinished = set(range(len(quotas)))  # environments with episodes to play
        self.by_agent = True  # until a report says otherwise
        self.reports = [[] for _ in quotas]  # of each environment: (agents within their quota, log)
        self.returns, self.lengths = np.zeros((2, *self.ended.shape))
        self.return_samples = []  # [(environments and agents, {field: mean})] of RETURN_FIELDS

    def add(self, rewards, resets, valid, log):
        """Add a step.

        rewards, resets (1 where it ended an agent's episode) and valid before it: (all agents,).
        log: the vector's, called with an environment's number.
        """
        shape = self.ended.shape
        self.returns += rewards.reshape(shape)
        self.lengths += valid.reshape(shape)
        ended = resets.reshape(shape) != 0
        within = ended & (self.ended < self.quotas[:, None])
        self.ended += ended
        for env in [*self.unfinished]:
            report, count, weight = log(env), int(ended[env].sum()), int(within[env].sum())
            if count or report:
                self.by_agent &= report.get("n", 0) == count
            if report:
                self.reports[env].append((weight, report))
            if weight:
                means = self.returns[env, within[env]].mean(), self.lengths[env, within[env]].mean()
                fields = dict(zip(self.RETURN_FIELDS, means, strict=True))
                self.return_samples.append((len(self.return_samples), weight, fields))
        self.returns[ended] = self.lengths[ended] = 0
        by_agent = self.by_agent or not (self.always_report or any(self.reports))
        self.unfinished = {
            env for env in self.unfinished
            if (self.ended[env].min() if by_agent else len(self.reports[env])) < self.quotas[env]}

    def play(self, play, log):
        """Step a `Play` and count what ends."""
        play.decide()
        valid = play.storage.valid[0].copy()
        play.advance()
        self.add(play.storage.rewards[0], play.storage.resets[1], valid, log)

    def samples(self):
        """Return [(environment, agents in its mean, log)] of the reports that count."""
        if self.by_agent:
            return [(env, weight, log) for env, reports in enumerate(self.reports)
                    for weight, log in reports if weight]
        return [(env, 1, log) for env, reports in enumerate(self.reports)
                for _, log in reports[: self.quotas[env]]]

    def statistics(self):
        """Return {field: Statistic}.

        The error allows for dependence between the agents of one environment.
        """
        samples = self.samples()
        names = dict.fromkeys(name for _, _, log in samples for name in log if name != "n")
        results = {name: self._statistic(name, samples) for name in names}
        for name in self.RETURN_FIELDS:
            if name not in names and self.return_samples:
                results[name] = self._statistic(name, self.return_samples)
        if "episode_return" in results:  # not before an episode has ended
            results.setdefault("score", results["episode_return"])
        return results

    def _statistic(self, name, samples):
        rows = [(env, weight, log[name]) for env, weight, log in samples if name in log]
        envs, weights, values = np.array(rows).T
        mean = np.average(values, weights=weights)
        groups = envs if self.agents > 1 and len(set(envs)) > 1 else np.arange(len(envs))
        labels, index = np.unique(groups, return_inverse=True)
        deviations = np.bincount(index, weights * (values - mean)) / weights.sum()
        count = len(labels)
        error = math.sqrt((deviations**2).sum() * count / (count - 1)) if count > 1 else math.nan
        return Statistic(float(mean), error, float(values.min()), float(values.max()))


def evaluate(env_name, args):
    """Play eval.episodes episodes; prints and returns {field: Statistic}."""
    episodes = args["eval"]["episodes"]
    require(episodes > 0, f"eval.episodes = {episodes}: must be 1 or more.")
    native = environments.load_creator(args["env_name"]) is None
    # an environment in Python may take as much memory as a process: make no more than training
    most = MOST_ENVS if native else args["vec"]["num_envs"] * args["env"].get("num_envs", 1)
    num_envs = min(episodes, most)
    play = Play(env_name, args, num_envs, args["train"]["seed"] + EVAL_SEED)
    vecenv = play.vecenv
    is_vector = vecenv.num_envs < num_envs  # one environment, whose agents are its copies
    if is_vector:
        quotas = [-(-episodes // num_envs)]
        episodes = quotas[0] * num_envs
    else:
        quotas = [episodes // num_envs + (env < episodes % num_envs) for env in range(num_envs)]
    counter = Episodes(quotas, vecenv.num_agents // vecenv.num_envs, always_report=native)
    longest = args["eval"]["max_steps"] * max(quotas)
    with contextlib.closing(play), processes.progress() as show:
        while counter.unfinished:
            require(play.step < longest, f"{len(counter.unfinished)} of {vecenv.num_envs} "
                    f"environments did not finish {max(quotas)} episodes in {longest} steps. Raise "
                    "eval.max_steps where they are meant to be that long.")
            counter.play(play, vecenv.log)
            show(f"{play.step:,} vector steps; {len(counter.unfinished):,} of {vecenv.num_envs:,} "
                 "environments are playing")
    results = counter.statistics()
    for name, value in results.items():
        print(f"{name:20} mean {figure_with_error(value.mean, value.error, 10)}   min "
              f"{value.min:.3f}   max {value.max:.3f}")
    each = f" of {counter.agents} agents" if counter.agents > 1 and not is_vector else ""
    print(f"{plural(episodes, 'episode')}{each}, {plural(play.step, 'vector step')}, "
          f"{describe_policy(args)}")
    return results


def figure_with_error(mean, error, width=0):
    """Format a mean and its standard error, which is left out if it is NaN."""
    return f"{mean:{width}.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def describe_policy(args):
    """Describe where the policy comes from."""
    if args["baseline"]:
        about = configuration.read_baseline(args["env_name"])[1]
        score = loggers.figure(about["score"])
        return f"the baseline (score {score} after {about['steps']:,} steps)"
    if args["load_model_path"]:
        return str(configuration.find_model(args["load_model_path"], args["data_dir"],
                                            args["config_name"]))
    return "an untrained policy (no --load-model-path, no --baseline)"


# --------------------------------------------------------------------------------------------------
# Pictures of one environment


class View(Play):
    """A policy in one environment that is drawn.

    Attributes besides Play's: fps, the natural number of steps a second; agents; labels, {(head,
    action): its name}.
    """

    def __init__(self, env_name, args, seed):
        creator = environments.load_creator(args["env_name"])
        self.native = creator is None
        drawing = {} if self.native else creator.picture_settings
        args = {**args, "vec": {**args["vec"], "backend": "auto"},
                "env": {**args["env"], **drawing}}
        super().__init__(env_name, args, 1, seed)
        driver, self.agents = self.vecenv.driver_env, self.vecenv.num_agents
        if self.native:
            fps = self.vecenv.library.fps
            keys = [key for key in self.vecenv.envs.keys()[0] if key.name != "REST"]
            self.labels = {(key.head, int(key.value)): key.name for key in keys}
        else:
            metadata = getattr(getattr(driver, "env", driver), "metadata", None) or {}
            fps = metadata.get("render_fps") or 30
            meanings = getattr(getattr(driver, "unwrapped", None), "get_action_meanings", list)()
            self.labels = {(0, action): name for action, name in enumerate(meanings)}
        self.fps = args["eval"]["fps"] or fps
        self.reward_scale = args["env"].get("reward_scale", 1.0)  # the return is shown without it
        self.restart(seed)

    def restart(self, seed):
        """Begin again with the random numbers of `seed`, without scores."""
        super().restart(seed)
        self.returns = np.zeros(self.agents)  # of the present episodes
        self.lengths = np.zeros(self.agents, int)
        self.report = {}  # the environment's log of the last step
        self.scores = []  # of each episode

    def advance(self):
        """Step once and keep the scores."""
        super().advance()
        s = self.storage
        self.returns += s.rewards[0] / self.reward_scale
        self.lengths += 1
        self.report, ended = self.vecenv.log(0), s.resets[1] != 0
        score = self.report.get("score", self.report.get("episode_return"))
        if score is None and ended[0] and isinstance(self.vecenv.driver_env, emulation.PufferEnv):
            score = self.returns[0]  # it may report nothing
        if score is not None:
            self.scores.append(float(score))
        self.returns[ended] = self.lengths[ended] = 0

    def mean_score(self):
        """Return the mean of the scores and its standard error, NaN for too few."""
        count = len(self.scores)
        error = np.std(self.scores, ddof=1) / math.sqrt(count) if count > 1 else math.nan
        return (float(np.mean(self.scores)) if count else math.nan), float(error)

    def thoughts(self, agent=0):
        """Return what the policy makes of an agent's observation, after `decide`.

        {value, heads}: for each action head {probabilities, taken, labels}; for continuous actions
        one {mean, low, high, taken}, in the environment's units; low, high: a deviation away.
        """
        actions = self.storage.actions[0, agent].tolist()
        if isinstance(self.logits, torch.distributions.Normal):
            mean, deviation = self.logits.loc[agent], self.logits.scale[agent]
            squash = models.squash_of(self.policy)
            row = [mean - deviation, mean, mean + deviation]
            if squash is not None:
                row = [models.squashed(squash, u) for u in row]
            low, mean, high = (u.tolist() for u in row)
            heads = [{"mean": mean, "low": low, "high": high, "taken": actions}]
        else:
            sizes = self.vecenv.action_heads
            logits = models.join_outputs(self.logits, self.value)[0][agent, : sum(sizes)].double()
            if self.masks is not None:
                logits = logits.masked_fill(self.masks[agent] == 0, -math.inf)
            heads = [{"probabilities": row.softmax(0).tolist(), "taken": actions[number],
                      "labels": [self.labels.get((number, i)) for i in range(len(row))]}
                     for number, row in enumerate(logits.split(sizes))]
        return {"value": float(self.value.reshape(-1)[agent]), "heads": heads}

    def picture(self):
        """Draw the environment: (height, width, 3) uint8. ConfigError if it draws nothing."""
        drawing = None
        with contextlib.suppress(NotImplementedError):  # an abstract render()
            drawing = self.vecenv.render(0)
        require(np.ndim(drawing) in (2, 3),
                f"{self.vecenv.name} cannot be shown: its render() gave {type(drawing).__name__}, "
                "expected a picture (height, width, 3). A callable gets render_mode='rgb_array' if "
                "it has that parameter. Without pictures, eval prints the scores.")
        drawing = np.asarray(drawing)
        drawing = drawing[..., None].repeat(3, -1) if drawing.ndim == 2 else drawing[..., :3]
        return np.ascontiguousarray(drawing, np.uint8)


def episode_pictures(view, seconds):
    """Yield the pictures of one episode, or of its first `seconds`."""
    counter = Episodes([1], view.agents, always_report=view.native)
    for _ in range(max(2, round(seconds * view.fps))):
        yield view.picture()
        if not counter.unfinished:
            return
        counter.play(view, lambda env: view.report)


def write_video(pictures, path, fps):
    """Write pictures (height, width, 3) uint8 of one size.

    To an .mp4 (H.264) or .gif, or one of their second half to a .png.
    """
    pictures, images = iter(pictures), []
    first = next(pictures)
    height, width = first.shape[:2]
    with contextlib.ExitStack() as stack:
        if path.endswith(".mp4"):
            import imageio_ffmpeg

            # yuv420p halves both sides; ffmpeg ends with its input, also after a kill
            writer = stack.enter_context(contextlib.closing(imageio_ffmpeg.write_frames(
                path, (width, height), fps=fps, codec="libx264", pix_fmt_out="yuv420p", quality=8,
                macro_block_size=1, output_params=["-movflags", "+faststart", "-vf",
                                                   "pad=ceil(iw/2)*2:ceil(ih/2)*2"])))
            writer.send(None)
        for count, picture in enumerate(itertools.chain([first], pictures), 1):
            if path.endswith(".mp4"):
                writer.send(picture)
            elif path.endswith(".gif"):
                images.append(shrink(Image.fromarray(picture), GIF_SIDE))
            elif count & (count - 1) == 0:  # 1, 2, 4, ...: the last of them is in the second half
                images = [Image.fromarray(picture)]
    if images:
        width, height = images[0].size
        images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps),
                       loop=0)
    print(f"wrote {path}: {'one of ' if path.endswith('.png') else ''}{count} pictures of "
          f"{width} × {height}")


def shrink(image, side):
    """Shrink a picture to a longer side of at most `side` pixels."""
    scale = min(1.0, side / max(image.size))
    return image.resize((round(image.width * scale), round(image.height * scale)),
                        Image.Resampling.BOX)


# --------------------------------------------------------------------------------------------------
# A window, and the terminal


def summary(view):
    """Summarize the scores so far in one line."""
    if not view.scores:
        return "no episode has ended"
    mean, error = view.mean_score()
    return f"{plural(len(view.scores), 'episode')}, score {figure_with_error(mean, error)}"


def show_in_window(view):
    """Play in a window until it is closed or escape is pressed.

    Space pauses, the right arrow steps. Environments in C draw in raylib's window themselves; the
    pictures of others are put there.
    """
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # see ocean._raylib
    import raylib

    paused, (height, width) = False, view.picture().shape[:2]
    if not view.native:
        scale = max(1, 720 // max(height, width))
        raylib.SetTraceLogLevel(raylib.LOG_WARNING)
        raylib.InitWindow(width * scale, height * scale, view.vecenv.name.encode())
        pixels = np.full((height, width, 4), 255, np.uint8)
        pointer = raylib.ffi.cast("void *", pixels.ctypes.data)
        image = raylib.ffi.new("Image *", (pointer, width, height, 1,
                                           raylib.PIXELFORMAT_UNCOMPRESSED_R8G8B8A8))
        texture = raylib.LoadTextureFromImage(image[0])
    raylib.SetExitKey(raylib.KEY_ESCAPE)
    while not raylib.WindowShouldClose():
        begin = time.perf_counter()
        paused ^= raylib.IsKeyPressed(raylib.KEY_SPACE)
        if raylib.IsKeyPressed(raylib.KEY_RIGHT) or not paused:
            view.decide()
            view.advance()
        picture = view.picture()
        if not view.native:
            pixels[..., :3] = picture
            raylib.UpdateTexture(texture, pointer)
            raylib.BeginDrawing()
            raylib.DrawTextureEx(texture, (0, 0), 0, scale, raylib.WHITE)
            raylib.EndDrawing()
        time.sleep(max(0.0, 1 / view.fps - (time.perf_counter() - begin)))
    raylib.CloseWindow()
    print(summary(view))


def half_blocks(picture, caption, size):
    """Return a picture for rich: a character is two pixels, one above the other.

    size: (width, height) of the terminal, in characters.
    """
    from rich.segment import Segment, Segments
    from rich.style import Style

    image, columns = Image.fromarray(picture), size[0]
    scale = min(columns / image.width, 2 * max(1, size[1] - 2) / image.height)
    shape = max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2))
    pixels, segments = np.asarray(image.resize(shape, Image.Resampling.BOX)), []
    for pairs in np.concatenate([pixels[::2], pixels[1::2]], axis=2).tolist():
        for colors, run in itertools.groupby(pairs):
            style = Style.parse("rgb({},{},{}) on rgb({},{},{})".format(*colors))
            segments.append(Segment("▀" * len([*run]), style))
        segments.append(Segment.line())
    return Segments([*segments, Segment(caption[:columns]), Segment.line()])


def show_in_terminal(view, console=None, steps=None):
    """Play in the terminal until Ctrl-C, or for some steps."""
    from rich.console import Console
    from rich.live import Live

    console = console or Console()
    require(console.is_terminal,
            "eval.terminal: this output is no terminal; --eval.video writes a file.")
    due = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True,
                                                      auto_refresh=False) as live:
        while steps is None or view.step < steps:
            view.decide()
            caption = (f"{view.vecenv.name}   step {view.lengths[0]}   return "
                       f"{view.returns[0]:.6g}   value {view.thoughts()['value']:.3f}   "
                       f"{summary(view)}   ctrl-C ends")
            live.update(half_blocks(view.picture(), caption, console.size), refresh=True)
            view.advance()
            due = max(due + 1 / view.fps, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
    print(summary(view))


# --------------------------------------------------------------------------------------------------
# The page


class Page:
    """The policy playing on a page at 127.0.0.1.

    One thread, that of `run`, plays and draws, because raylib is bound to one. Requests come in
    other threads: they read the last published state, and put orders, which are changes of
    `controls`, into a queue. It plays only while a page asks for states.
    """

    PICTURES = 40  # states a second that are published at most
    PATIENCE = 10.0  # seconds that a request waits for a new state
    LARGEST = 960  # pixels of a picture's longer side
    DRAWN_SCORES = 300  # the last ones

    def __init__(self, env_name, args):
        self.args = args
        self.env_name = env_name
        self.environments = [*dict.fromkeys([*ocean.names(), env_name])]
        # step: steps to play while paused
        self.controls = {"paused": False, "step": 0, "agent": 0, "seed": args["train"]["seed"],
                         "deterministic": args["eval"]["deterministic"]}
        self.orders = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.number = 0  # of the last published state
        self.problem = None
        self.last_request = 0.0
        self.view = None
        self._open(env_name, "given")
        self._publish()
        self.server = start_server(self, args["eval"]["port"])

    def run(self):
        """Play, until `close`."""
        due = next_publish = time.perf_counter()
        controls = self.controls
        while True:
            now = time.perf_counter()
            is_idle = ((controls["paused"] and not controls["step"])
                       or now - self.last_request > self.PATIENCE + 2)
            with contextlib.suppress(queue.Empty):
                order = self.orders.get(timeout=0.25 if is_idle else max(0.0, due - now))
                if order is ...:
                    return self.view.close()
                self._obey(order)
                self._publish()
                continue
            if is_idle:
                continue
            controls["step"] = max(0, controls["step"] - 1)
            self.view.advance()
            self.view.decide()
            now = time.perf_counter()
            due = max(due + 1 / max(0.1, controls["speed"]), now - 0.1)
            if controls["paused"] or now >= next_publish:
                self._publish()
                # drawing takes at most half of the time, so that a busy machine keeps up
                next_publish = max(now + 1 / self.PICTURES, 2 * time.perf_counter() - now)

    def close(self):
        """End `run`; a signal's handler may call it."""
        self.orders.put(...)

    def _obey(self, order):
        """Carry out an order of the page; an error is shown there, and the game continues."""
        self.problem = None
        try:
            changes = {name: type(self.controls[name])(value) for name, value in order.items()}
            if {"environment", "policy"} & changes.keys():
                self._open(changes.get("environment", self.controls["environment"]),
                           changes.get("policy"))
            elif "seed" in changes:
                self.view.restart(EVAL_SEED + changes["seed"] % 2**53)
                self._begin()
            self.controls.update(changes)
            self.args["eval"]["deterministic"] = self.controls["deterministic"]
        except Exception as error:
            self.problem = (str(error) if isinstance(error, ConfigError)
                            else f"{type(error).__name__}: {error}")

    def _open(self, name, policy=None):
        """Open an environment with a policy, by default the best."""
        require(name in self.environments, f"there is no environment {name} to choose")
        policies = {"given": self.args} if name == self.env_name else {}
        for key, options in (("baseline", ["--baseline"]), ("best", ["--load-model-path", "best"]),
                             ("latest", ["--load-model-path", "latest"]), ("untrained", [])):
            with contextlib.suppress(ConfigError):  # there is none
                policies[key] = pufferl.load_config(
                    name, [*options, "--data-dir", str(self.args["data_dir"])])
        policy = policy or next(iter(policies))
        view = View(name, {**policies[policy], "eval": self.args["eval"]},
                    EVAL_SEED + self.controls["seed"])
        view.picture()  # raises ConfigError if it draws nothing
        if self.view:
            self.view.close()
        self.view = view
        self.policies = {key: describe_policy(args) for key, args in policies.items()}
        self.controls |= {"environment": name, "policy": policy, "speed": float(view.fps)}
        self._begin()

    def _begin(self):
        self.began = time.time()  # tells the page's runs apart
        self.view.decide()

    def _publish(self):
        """Publish the present state for the page."""
        view, agent = self.view, self.controls["agent"] % self.view.agents
        mean, error = view.mean_score()
        state = {
            **self.controls, "number": self.number + 1, "run": self.began,
            "environments": self.environments, "policies": self.policies, "fps": view.fps,
            "agents": view.agents, "agent": agent, "steps": view.step,
            "length": int(view.lengths[agent]), "return": float(view.returns[agent]),
            "count": len(view.scores), "scores": view.scores[-self.DRAWN_SCORES :], "mean": mean,
            "error": error, "problem": self.problem, "picture": png(view.picture(), self.LARGEST),
            **view.thoughts(agent),
        }
        text = NOT_JSON.sub("null", json.dumps(state))
        with self.changed:
            self.number += 1
            self.state = text
            self.changed.notify_all()

    def read(self, after):
        """Return the last state as JSON, once its number is above `after`.

        Or after PATIENCE seconds.
        """
        self.last_request = time.perf_counter()
        with self.changed:
            self.changed.wait_for(lambda: self.number > after, self.PATIENCE)
            return self.state


NOT_JSON = re.compile(r"(?<=[\[ ])(NaN|-?Infinity)(?=[,\]}])")  # numbers that json.dumps writes


def png(picture, side):
    """Encode a picture as PNG in base64."""
    file = io.BytesIO()
    shrink(Image.fromarray(picture), side).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


@functools.cache
def still(name):
    """Draw an environment in C after some random steps, as PNG in base64.

    Another process draws it, because raylib is bound to one thread.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/still.png"
        command = ["/usr/bin/env", "nice", "-n", "5", sys.executable, "-m", "ocean", name,
                   "--png", path, "--steps", str(STILL_STEPS)]
        # in its own session, which the Ctrl-C that ends the page does not reach
        subprocess.run(processes.guarded(command), cwd=configuration.ROOT, check=True,
                       capture_output=True, start_new_session=True)
        return base64.b64encode(Path(path).read_bytes()).decode()


class Requests(http.server.BaseHTTPRequestHandler):
    """Requests for the page, its states, its menu's pictures and its orders.

    Only from this machine.
    """

    protocol_version = "HTTP/1.1"  # connections stay open for the next request
    timeout = 60
    LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")  # any port, for ssh tunnels
    POLICY = ("default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
              "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
              "form-action 'none'; frame-ancestors 'none'")

    def handle(self):
        with contextlib.suppress(ConnectionError, TimeoutError):  # the other side has gone
            super().handle()

    def do_GET(self):
        # other names of this machine (DNS rebinding) and other sites are refused
        host = ", ".join(self.headers.get_all("Host", []))
        if self.LOCAL.fullmatch(host) and self.headers.get("Origin") in (None, f"http://{host}"):
            self._send(*self.respond())
        else:
            self._send(403, "this page is for http://127.0.0.1 and http://localhost only")

    do_POST = do_GET

    def _send(self, status, text, kind="text/plain; charset=utf-8"):
        body = text.encode()
        self.send_response(status)
        for name, value in {
                "Content-Type": kind, "Content-Length": len(body), "Cache-Control": "no-store",
                "Content-Security-Policy": self.POLICY,
                "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                # of an error the request's body may be unread
                "Connection": "keep-alive" if status == 200 else "close"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...

    def respond(self):
        """Return (status, text) and, unless it is plain text, the content type."""
        page, (path, _, query) = self.server.page, self.path.partition("?")
        if self.command == "POST":
            size = self.headers.get("Content-Length", "")
            is_json = self.headers.get_content_type() == "application/json"  # forms cannot send it
            if path != "/order" or not is_json or not re.fullmatch(r"\d{1,4}", size):
                return 400, "an order goes to /order, as application/json of at most 9999 bytes"
            page.orders.put(json.loads(self.rfile.read(int(size))))
            return 200, ""
        if path == "/":
            text = Path(__file__).with_name("watch.html").read_text("utf-8")
            return 200, text, "text/html; charset=utf-8"
        if path == "/state" and re.fullmatch(r"after=-?\d{1,15}", query):
            return 200, page.read(int(query.removeprefix("after="))), "application/json"
        if path == "/still" and query in ocean.names():
            return 200, still(query)
        return 404, "there is /, /state?after=N and /still?ENV"


def start_server(page, port):
    """Serve a Page on 127.0.0.1 in threads, at `port` or the next free one (0: any)."""
    for candidate in range(port, min(port + 20, 65536)):
        with contextlib.suppress(OSError):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", candidate), Requests)
            server.page = page
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return server
    raise ConfigError(f"port {port}: it and the next 19 are in use. Choose another port.")


def show_on_page(env_name, args):
    """Play on a page until Ctrl-C."""
    page = Page(env_name, args)
    port, is_local = page.server.server_port, not os.environ.get("SSH_CONNECTION")
    print(f"{env_name}, {describe_policy(args)}: http://127.0.0.1:{port}   (ctrl-C ends)\n"
          f"from another machine: ssh -L {port}:127.0.0.1:{port} {platform.node()}, then "
          "the same address there", flush=True)
    if args["eval"]["open"] and is_local and ocean.has_display():
        webbrowser.open(f"http://127.0.0.1:{port}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: page.close())
    page.run()
    print(summary(page.view))


# --------------------------------------------------------------------------------------------------
# The policies that ship


def ship(env_name, args):
    """Evaluate a run's policy and write it beside the environment's header.

    --baseline reads it there. Returns the path. Raises ConfigError for a policy that cannot ship.
    """
    from safetensors.torch import save

    path = configuration.find_baseline(args["env_name"])
    require(args["load_model_path"] and args["policy"]["name"] in configuration.POLICIES,
            "which policy? --load-model-path latest, or a run's folder, or a model file, of a "
            "network that ships.")
    model = configuration.find_model(args["load_model_path"], args["data_dir"], args["config_name"])
    weights = {name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous().clone()
               for name, tensor in runs.load(model).items()}
    state = runs.load(model.parent / "trainer_state.pt", runs.whole_run)
    epoch = re.search(r"_(\d+)$", model.stem)  # best_*.pt has none: the run's steps
    steps = (state["global_step"] if epoch is None
             else int(epoch[1]) * state["global_step"] // max(1, state["epoch"]))
    # evaluate the rounded weights, because these ship
    with tempfile.TemporaryDirectory() as folder:
        rounded = str(Path(folder) / model.name)
        torch.save(weights, rounded)
        results = evaluate(env_name, {**args, "load_model_path": rounded})
    about = {"score": results["score"].mean, "score_error": results["score"].error,
             "episodes": args["eval"]["episodes"], "steps": steps,
             "seed": args["train"]["seed"],
             "env": {name: value for name, value in args["env"].items() if name != "num_envs"},
             "policy": args["policy"], "rnn": args["rnn"]}
    data = save(weights, {name: json.dumps(value) for name, value in about.items()})
    require(len(data) <= LARGEST_BASELINE,
            f"{model}: {len(data):,} bytes; a shipped policy has {LARGEST_BASELINE:,} at most. "
            "Train one with a smaller policy.hidden_size.")
    path.write_bytes(data)
    print(f"wrote        {path} ({len(data):,} bytes, score {loggers.figure(about['score'])}, "
          f"{about['steps']:,} steps)")
    return path


# --------------------------------------------------------------------------------------------------
# Command line


def play(env_name, args):
    """Print scores, and show what the eval section asks for.

    The page, the terminal and a video play at once, without scores of many episodes.
    """
    show = args["eval"]
    chosen = [key for key in ("web", "terminal", "video", "window") if show[key]]
    require(len(chosen) < 2, f"--eval.{' and --eval.'.join(chosen)}: one of them at a time.")
    arena.compile_timer.announce = lambda: print(loggers.COMPILING, file=sys.stderr)
    if show["video"]:
        path = Path(show["video"])
        require(path.suffix in (".mp4", ".gif", ".png") and path.resolve().parent.is_dir(),
                f"eval.video = {path}: must end in .mp4, .gif or .png and be in a folder that "
                "exists.")
    require(not show["window"] or ocean.has_display(),
            "eval.window: there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set). "
            "--eval.web works over ssh, --eval.terminal in any terminal, --eval.video writes a "
            "file.")
    if show["web"]:
        return show_on_page(env_name, args)
    if not (show["terminal"] or show["video"]):
        evaluate(env_name, args)
    is_automatic = show["window"] is None and ocean.has_display() and sys.stdout.isatty()
    if not (chosen or is_automatic):
        return None
    view = View(env_name, args, args["train"]["seed"] + EVAL_SEED)
    with contextlib.closing(view):
        if show["terminal"]:
            show_in_terminal(view)
        elif show["video"]:
            write_video(episode_pictures(view, show["seconds"]), show["video"], view.fps)
            print(summary(view))
        else:
            # the automatic window is left out if the environment draws nothing
            with contextlib.suppress(*[ConfigError] * is_automatic):
                show_in_window(view)


def main(argv, program="pufferl.py eval"):
    """Run `eval` or `ship`; `program` is what errors begin with."""
    with exit_on_error(program, ImportError):
        act = ship if program.endswith("ship") else play
        act(*read_command(argv, program, __doc__))
