"""Evaluation: how a policy scores over fresh episodes, and the policy playing, in a
window, a video or a page.

    python pufferl.py eval breakout --load-model-path latest        # scores
    python pufferl.py eval breakout --baseline                      # of the trained policy that ships with breakout
    python pufferl.py eval breakout --baseline --eval.video out.mp4        # or out.gif, out.png; needs no display
    python pufferl.py eval breakout --baseline --eval.web                  # on a page; over ssh, forward its port
    python pufferl.py eval breakout --baseline --eval.terminal             # the same in any terminal
    python pufferl.py ship breakout --load-model-path latest          # make a run's policy the one that ships

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
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.parse
import webbrowser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import absolute_imports  # noqa: F401  first
import arena
import checkpoints
import configuration
import engines
import environments
import loggers
import models
import ocean
import processes
import pufferl
from auto import plural
from errors import ConfigError, exit_on_error

EVAL_SEED = 1_000_003  # added to the seed, so that episodes are not those of training
GIF_SIDE = 480  # pixels of a GIF's longer side
STILL_SIDE, STILL_STEPS = 240, 60  # of a picture in the page's menu; it is drawn after so many steps
MOST_ENVS = 4096  # environments in C that play side by side; with more episodes each plays several
LARGEST_BASELINE = 450_000  # bytes of a policy that ships with an environment


# --------------------------------------------------------------------------------------------------
# A policy in some environments


class Play:
    """A policy in fresh environments, a step at a time: `decide`, then `advance`.

    args: as from pufferl.load_config. Attributes: vecenv; policy; storage, of a horizon of 1, whose
    row 0 the policy sees and whose row 1 the step writes; step, how many there were; logits and
    value of the last `decide`.
    """

    def __init__(self, env_name, args, num_envs, seed):
        configuration.check_names(args, "eval")
        self.seed, self.deterministic, self.step = seed, args["eval"]["deterministic"], 0
        vec = {"num_envs": 1, "total_agents": None, "num_buffers": 1, "num_workers": None,
               "batch_size": None, "device": "host"}
        args = {**args, "vec": {**args["vec"], **vec}, "env": {**args["env"], "num_envs": num_envs}}
        self.vecenv = pufferl.load_env(env_name, {**args, "train": {**args["train"], "seed": seed}})
        # for batch norms and dropouts
        self.policy = pufferl.load_policy(args, self.vecenv, env_name).eval()
        self.storage = self.vecenv.allocate(1)
        policy, agents = self.policy, self.vecenv.num_agents
        self.state = policy.initial_state(agents) if hasattr(policy, "initial_state") else {}
        self.vecenv.begin()
        # few agents are not worth waking other threads
        self.threads = self.vecenv.num_threads if agents >= 4096 else 1

    def decide(self):
        """Choose the actions for the present observations."""
        s = self.storage
        self.state |= {"resets": torch.from_numpy(s.resets[0]),
                       "valid": torch.from_numpy(s.valid[0])}
        self.masks = None if s.action_masks is None else torch.from_numpy(s.action_masks[0])
        with torch.no_grad(), engines.torch_threads(self.threads):
            seen = torch.from_numpy(s.observations[0])
            self.logits, self.value = models.one_step(self.policy, seen, self.state)
        if self.step == 0:
            outputs = models.join_outputs(self.logits, self.value)
            models.check_logits(self.policy, *outputs, self.vecenv.action_heads,
                                self.vecenv.action_dims)
        actions, _, _ = models.sample_logits(
            self.logits, self.value, seed=self.seed, step=self.step, masks=self.masks,
            heads=self.vecenv.action_heads, deterministic=self.deterministic,
            squash=models.squash_of(self.policy))
        s.actions[0] = actions.numpy()

    def advance(self):
        """Step the environments with these actions; their observations become the row to decide
        on."""
        self.vecenv.advance(0)
        self.step += 1
        self.vecenv.begin()

    def restart(self, seed):
        """New episodes, with the random numbers of `seed`."""
        self.seed, self.step = seed, 0
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
    """The finished episodes of a vector of environments, counted fairly.

    quotas (environments,): how many episodes of each count. An environment of several agents
    reports in one of two ways, which shows while they play: once an episode for all of its agents
    (as PettingZoo's do, and windows of fixed length), then its first `quota` reports count; or for
    each agent by itself, if an agent's first `quota` episodes do. In that case reports of agents
    that end at the same step are one mean; if some of these are beyond their quota, it stands
    for the others. always_report: every environment reports sooner or later (those in C do); others
    that never do are counted by their rewards.
    """

    OWN = "episode_return", "episode_length"  # what is counted here

    def __init__(self, quotas, agents_per_env, always_report=False):
        self.quotas, self.agents, self.always_report = np.asarray(quotas), agents_per_env, always_report
        self.ended = np.zeros((len(quotas), agents_per_env), int)  # episodes of each agent
        self.open = set(range(len(quotas)))  # environments with episodes to play
        self.by_agent = True  # until a report says otherwise
        self.reports = [[] for _ in quotas]  # of each environment: (agents within their quota, log)
        self.returns, self.lengths = np.zeros((2, *self.ended.shape))
        # [(number of agents, {"episode_return", "episode_length"})], kept for environments that
        # report nothing themselves
        self.own = []

    def add(self, rewards, resets, valid, log):
        """A step: rewards, resets (1 where it ended an agent's episode) and valid before it, each
        (all agents,); log: the vector's, called with an environment's number."""
        shape = self.ended.shape
        self.returns += rewards.reshape(shape)
        self.lengths += valid.reshape(shape)
        ended = resets.reshape(shape) != 0
        within = ended & (self.ended < self.quotas[:, None])
        self.ended += ended
        for env in [*self.open]:
            report, count = log(env), int(ended[env].sum())
            if count or report:
                self.by_agent &= report.get("n", 0) == count
            if report:
                self.reports[env].append((int(within[env].sum()), report))
            if within[env].any():
                means = self.returns[env, within[env]].mean(), self.lengths[env, within[env]].mean()
                self.own.append((int(within[env].sum()), dict(zip(self.OWN, means, strict=True))))
        self.returns[ended] = self.lengths[ended] = 0
        silent = not self.always_report and not any(self.reports)
        self.open = {env for env in self.open if not self._done(env, silent)}

    def play(self, play, log):
        """Step a `Play` and count what ends."""
        play.decide()
        valid = play.storage.valid[0].copy()
        play.advance()
        self.add(play.storage.rewards[0], play.storage.resets[1], valid, log)

    def _done(self, env, silent):
        if self.by_agent or silent:
            return bool((self.ended[env] >= self.quotas[env]).all())
        return len(self.reports[env]) >= self.quotas[env]

    @property
    def done(self):
        """How many of the episodes were played; an environment of several agents is as far as its slowest."""
        return int(np.minimum(self.ended.min(1), self.quotas).sum())

    def samples(self):
        """[(environment, agents that it stands for, log)] of the reports that count."""
        if self.by_agent:
            return [(env, weight, log) for env, reports in enumerate(self.reports)
                    for weight, log in reports if weight]
        return [(env, 1, log) for env, reports in enumerate(self.reports)
                for _, log in reports[: self.quotas[env]]]

    def statistics(self):
        """{field: Statistic}. The error allows for dependence between the agents of one
        environment."""
        samples = self.samples()
        own = [(number, *one) for number, one in enumerate(self.own)]
        names = dict.fromkeys(name for _, _, log in samples for name in log if name != "n")
        results = {name: self._statistic(name, samples) for name in names}
        results |= {key: self._statistic(key, own) for key in self.OWN if key not in names and own}
        results.setdefault("score", results["episode_return"])
        return results

    def _statistic(self, name, samples):
        envs, weights, values = np.array([(env, weight, log[name]) for env, weight, log in samples if name in log]).T
        mean = np.average(values, weights=weights)
        groups = envs if self.agents > 1 and len(set(envs)) > 1 else np.arange(len(envs))
        labels, index = np.unique(groups, return_inverse=True)
        deviations = np.bincount(index, weights * (values - mean)) / weights.sum()
        count = len(labels)
        error = math.sqrt((deviations**2).sum() * count / (count - 1)) if count > 1 else math.nan
        return Statistic(float(mean), error, float(values.min()), float(values.max()))


def evaluate(env_name, args):
    """Play eval.episodes episodes; prints and returns {field of the
    environment's log: Statistic}."""
    episodes = args["eval"]["episodes"]
    if episodes < 1:
        raise ConfigError(f"eval.episodes = {episodes}: must be 1 or more.")
    native = environments.load_creator(args["env_name"]) is None
    # An environment in Python may take as much memory as a process: make no more than a training
    # does.
    num_envs = min(episodes, MOST_ENVS if native
                   else args["vec"]["num_envs"] * args["env"].get("num_envs", 1))
    play = Play(env_name, args, num_envs, args["train"]["seed"] + EVAL_SEED)
    vecenv = play.vecenv
    inner = vecenv.num_envs < num_envs
    if inner:  # one environment that itself holds num_envs, whose agents have a quota each
        quotas = [-(-episodes // num_envs)]
        episodes = quotas[0] * num_envs
    else:
        quotas = [episodes // num_envs + (env < episodes % num_envs) for env in range(num_envs)]
    counted = Episodes(quotas, vecenv.num_agents // vecenv.num_envs, always_report=native)
    longest = args["eval"]["max_steps"] * max(quotas)
    with contextlib.closing(play), processes.progress() as show:
        while counted.open:
            if play.step == longest:
                raise ConfigError(
                    f"{len(counted.open)} of {vecenv.num_envs} environments did not finish "
                    f"{max(quotas)} episodes in {longest} steps. Raise eval.max_steps where they "
                    "are meant to be that long.")
            counted.play(play, vecenv.log)
            show(f"{counted.done * episodes // counted.quotas.sum():,} of {episodes:,} episodes, "
                 f"{play.step:,} steps of all environments")
    results = counted.statistics()
    for name, value in results.items():
        error = "" if math.isnan(value.error) else f" ± {value.error:.3f}"
        print(f"{name:20} mean {value.mean:10.3f}{error}   min {value.min:.3f}   max "
              f"{value.max:.3f}")
    each = f" of {counted.agents} agents" if counted.agents > 1 and not inner else ""
    print(f"{episodes} episodes{each}, {play.step} steps of all environments, {describe_policy(args)}")
    return results


def describe_policy(args):
    """The policy's name, for people."""
    if args["baseline"]:
        about = configuration.read_baseline(args["env_name"])[1]
        return f"the baseline (score {loggers.figure(about['score'])} after {about['steps']:,} steps)"
    if args["load_model_path"]:
        return str(configuration.find_model(args["load_model_path"], args["data_dir"],
                                            args["config_name"]))
    return "an untrained policy (no --load-model-path, no --baseline)"


# --------------------------------------------------------------------------------------------------
# Pictures of one environment


class View(Play):
    """A policy in one environment that is drawn.

    Attributes besides Play's: fps, the steps a second at which it looks natural; agents; labels,
    for each action head {action: what it is called}.
    """

    def __init__(self, env_name, args, seed):
        creator = environments.load_creator(args["env_name"])
        self.native = creator is None
        drawn = {} if creator is None else creator.picture_settings
        args = {**args, "vec": {**args["vec"], "backend": "auto"}, "env": {**args["env"], **drawn}}
        super().__init__(env_name, args, 1, seed)
        driver, self.agents = self.vecenv.driver_env, self.vecenv.num_agents
        if creator is None:
            self.fps = self.vecenv.library.fps
            keys = [key for key in self.vecenv.envs.keys()[0] if key.name != "REST"]
            self.labels = [{int(key.value): key.name for key in keys if key.head == head}
                           for head in range(len(self.vecenv.action_heads or ()))]
        else:
            metadata = getattr(driver, "metadata", None) or getattr(getattr(driver, "env", None),
                                                                    "metadata", None)
            self.fps = (metadata or {}).get("render_fps") or 30
            meanings = getattr(getattr(driver, "unwrapped", None), "get_action_meanings", list)()
            self.labels = [dict(enumerate(meanings))]
        self.fps = args["eval"]["fps"] or self.fps
        self.restart(seed)

    def restart(self, seed):
        """Begin anew with the random numbers of `seed`, and with no episode played."""
        super().restart(seed)
        # rewards so far of the present episodes
        self.returns, self.lengths = np.zeros(self.agents), np.zeros(self.agents, int)
        # the environment's log of the last step; the score of each episode
        self.report, self.scores = {}, []

    def advance(self):
        """One step; keeps the scores."""
        super().advance()
        s = self.storage
        self.returns += s.rewards[0]
        self.lengths += 1
        self.report, ended = self.vecenv.log(0), s.resets[1] != 0
        score = self.report.get("score", self.report.get("episode_return"))
        if score is None and ended[0] and not self.native:
            score = self.returns[0]
        if score is not None:
            self.scores.append(float(score))
        self.returns[ended], self.lengths[ended] = 0, 0

    def thoughts(self, agent=0):
        """What the policy makes of what it sees, after `decide`, for one agent: its value, and for
        each action head {probabilities, taken, barred, labels}, or for continuous actions one
        {mean, spread, taken}."""
        taken = self.storage.actions[0, agent].tolist()
        value = float(self.value.reshape(-1)[agent])
        if isinstance(self.logits, torch.distributions.Normal):
            mean, spread = self.logits.loc[agent], self.logits.scale[agent]
            squash = models.squash_of(self.policy)
            # as the environment takes them, and half the distance from one deviation below to one
            # above
            if squash is not None:
                less, mean, more = (models.squashed(squash, u) for u in (mean - spread, mean, mean + spread))
                spread = (more - less) / 2
            return {"value": value,
                    "heads": [{"mean": mean.tolist(), "spread": spread.tolist(), "taken": taken}]}
        heads, sizes = [], self.vecenv.action_heads
        logits, _ = models.join_outputs(self.logits, self.value)
        allowed = None if self.masks is None else self.masks[agent].bool()
        for number, columns in enumerate(torch.arange(sum(sizes)).split(sizes)):
            head, barred = logits[agent, columns].double(), []
            if allowed is not None:
                head, barred = head.masked_fill(~allowed[columns], -math.inf), (~allowed[columns]).tolist()
            names = self.labels[number] if number < len(self.labels) else {}
            labels = [names.get(i) for i in range(len(columns))]
            heads.append({"probabilities": head.softmax(0).tolist(), "taken": taken[number],
                          "barred": barred, "labels": labels if any(labels) else []})
        return {"value": value, "heads": heads}

    def picture(self):
        """The environment now: (height, width, 3) uint8. Raises ConfigError
        if it draws nothing."""
        drawn = None
        with contextlib.suppress(NotImplementedError):  # of a class that others derive from
            drawn = self.vecenv.render(0)
        if isinstance(drawn, list):
            drawn = drawn[-1] if drawn else None
        if drawn is None or np.ndim(drawn) not in (2, 3):
            what = "nothing" if drawn is None else f"a {type(drawn).__name__}"
            raise ConfigError(f"{self.vecenv.name} cannot be shown: its render() gave "
                                      f"{what}, expected a picture (height, width, 3). A callable "
                                      "of yours gets render_mode='rgb_array' where it has "
                                      "that parameter. Without pictures, eval prints the scores.")
        drawn = np.asarray(drawn)
        drawn = drawn[..., None].repeat(3, -1) if drawn.ndim == 2 else drawn[..., :3]
        return np.ascontiguousarray(drawn, np.uint8)


def episode_pictures(view, seconds):
    """The pictures of one episode, or of its first `seconds`."""
    counted = Episodes([1], view.agents, always_report=view.native)
    for _ in range(max(2, round(seconds * view.fps))):
        yield view.picture()
        if not counted.open:
            return
        counted.play(view, lambda env: view.report)


def check_video(path):
    """Raises ConfigError if a video cannot be written to `path`."""
    suffix = Path(path).suffix
    if suffix not in (".mp4", ".gif", ".png"):
        raise ConfigError(f"eval.video = {path}: must end in .mp4, .gif or .png.")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"eval.video = {path}: there is no folder "
                                  f"{Path(path).resolve().parent}.")
    if suffix == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401
        except ImportError:
            raise ConfigError("eval.video: .mp4 needs the package imageio-ffmpeg: pip install imageio-ffmpeg "
                                      "(.gif and .png need nothing).") from None


def check_window():
    """Raises ConfigError if there is no display."""
    if not ocean.has_display():
        raise ConfigError("eval.window: there is no display (neither DISPLAY nor "
                                  "WAYLAND_DISPLAY is set). --eval.web works through an ssh "
                                  "tunnel, --eval.terminal in any terminal, --eval.video "
                                  "writes a file.")


def write_video(pictures, path, fps):
    """Pictures (height, width, 3) uint8 of one size to an .mp4 (H.264) or .gif, or one of their
    second half to a .png; returns how many there were."""
    from PIL import Image

    pictures = iter(pictures)
    first = next(pictures)
    if path.endswith(".mp4"):
        import imageio_ffmpeg

        height, width = first.shape[:2]
        pad = ((0, height % 2), (0, width % 2), (0, 0))  # yuv420p halves both
        writer = imageio_ffmpeg.write_frames(
            path, (width + width % 2, height + height % 2), fps=fps, codec="libx264",
            pix_fmt_out="yuv420p", quality=8,
            macro_block_size=2, output_params=["-movflags", "+faststart"])
        # ffmpeg ends with its input, also if this process is killed
        with contextlib.closing(writer):
            writer.send(None)
            for count, picture in enumerate(itertools.chain([first], pictures), 1):  # noqa: B007
                writer.send(np.ascontiguousarray(np.pad(picture, pad, "edge")))
    elif path.endswith(".gif"):
        small = [shrink(Image.fromarray(picture), GIF_SIDE)
                 for picture in itertools.chain([first], pictures)]
        small[0].save(path, save_all=True, append_images=small[1:],
                      duration=round(1000 / fps), loop=0)
        count = len(small)
    else:
        for count, picture in enumerate(itertools.chain([first], pictures), 1):
            if count & (count - 1) == 0:  # 1, 2, 4, ...: the last of them is in the second half
                middle = picture
        Image.fromarray(middle).save(path)
    print(f"wrote {path}: {'one of ' if path.endswith('.png') else ''}{count} pictures of "
          f"{first.shape[1]} × {first.shape[0]}")
    return count


def shrink(image, side):
    """A picture whose longer side is at most `side` pixels."""
    from PIL import Image

    scale = min(1.0, side / max(image.size))
    return image.resize((round(image.width * scale), round(image.height * scale)),
                        Image.Resampling.BOX)


# --------------------------------------------------------------------------------------------------
# A window, and the terminal


def summary(view):
    """The scores so far, in one line."""
    if not view.scores:
        return "no episode has ended"
    count = len(view.scores)
    error = f" ± {np.std(view.scores, ddof=1) / math.sqrt(count):.3f}" if count > 1 else ""
    return f"{plural(count, 'episode')}, score {np.mean(view.scores):.3f}{error}"


def show_in_window(view):
    """Plays in a window until it is closed or escape is pressed; space pauses, the
    right arrow steps. Environments in C draw in raylib's window themselves, the
    pictures of others are put there."""
    import raylib

    picture, paused = view.picture(), False
    texture = None if view.native else Texture(picture, view.vecenv.name)
    raylib.SetExitKey(raylib.KEY_ESCAPE)
    while not raylib.WindowShouldClose():
        begun = time.perf_counter()
        paused ^= raylib.IsKeyPressed(raylib.KEY_SPACE)
        if raylib.IsKeyPressed(raylib.KEY_RIGHT) or not paused:
            view.decide()
            view.advance()
        picture = view.picture()
        if texture is not None:
            texture.draw(picture)
        time.sleep(max(0.0, 1 / view.fps - (time.perf_counter() - begun)))
    raylib.CloseWindow()
    print(summary(view))


class Texture:
    """A raylib window that shows pictures (height, width, 3) uint8 of one size."""

    def __init__(self, picture, title):
        os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # see ocean._raylib
        import raylib

        self.raylib = raylib
        height, width = picture.shape[:2]
        self.scale = max(1, 720 // max(height, width))
        raylib.SetTraceLogLevel(raylib.LOG_WARNING)
        raylib.InitWindow(width * self.scale, height * self.scale, title.encode())
        self.pixels = np.full((height, width, 4), 255, np.uint8)
        image = raylib.ffi.new("Image *", (raylib.ffi.cast("void *", self.pixels.ctypes.data),
                                           width, height, 1,
                                           raylib.PIXELFORMAT_UNCOMPRESSED_R8G8B8A8))
        self.texture = raylib.LoadTextureFromImage(image[0])

    def draw(self, picture):
        raylib = self.raylib
        self.pixels[..., :3] = picture
        raylib.UpdateTexture(self.texture, raylib.ffi.cast("void *", self.pixels.ctypes.data))
        raylib.BeginDrawing()
        raylib.DrawTextureEx(self.texture, (0, 0), 0, self.scale, raylib.WHITE)
        raylib.EndDrawing()


class HalfBlocks:
    """A picture for rich: a character is two pixels, the upper one its colour and the
    lower one its background."""

    def __init__(self, picture, caption=""):
        self.picture, self.caption = picture, caption

    def __rich_console__(self, console, options):
        from PIL import Image
        from rich.segment import Segment

        image, columns, lines = Image.fromarray(self.picture), options.max_width, max(1, console.height - 2)
        scale = min(columns / image.width, 2 * lines / image.height)
        size = max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2))
        pixels = np.asarray(image.resize(size, Image.Resampling.BOX))
        for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
            for colors, run in itertools.groupby(zip(map(tuple, upper), map(tuple, lower),
                                                     strict=True)):
                yield Segment("▀" * len([*run]), block_style(*colors))
            yield Segment.line()
        yield Segment(self.caption[:columns])
        yield Segment.line()


@functools.lru_cache(65536)
def block_style(upper, lower):
    from rich.color import Color
    from rich.style import Style

    return Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))


def show_in_terminal(view, console=None, steps=None):
    """Plays in the terminal until ctrl-C, or for some steps."""
    from rich.console import Console
    from rich.live import Live

    console = console or Console()
    if not console.is_terminal:
        raise ConfigError("eval.terminal: the output is no terminal; --eval.video "
                                  "writes a file.")
    due = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while steps is None or view.step < steps:
            view.decide()
            caption = (f"{view.vecenv.name}   step {view.lengths[0]}   return "
                       f"{view.returns[0]:.6g}   value {view.thoughts()['value']:.3f}   "
                       f"{summary(view)}   ctrl-C ends")
            live.update(HalfBlocks(view.picture(), caption), refresh=True)
            view.advance()
            due = max(due + 1 / view.fps, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
    print(summary(view))


# --------------------------------------------------------------------------------------------------
# The page


class Page:
    """The policy playing on a page at 127.0.0.1.

    One thread plays and draws, that of `run`: raylib is bound to one. Requests come in threads of
    their own; they read the last state that was published, and put orders ({"pause": true},
    {"seed": 3}) into a queue. Nothing is played while no page asks for it.
    """

    PICTURES = 40  # states a second that are published at most
    PATIENCE = 10.0  # seconds that a request waits for a new state
    LARGEST = 960  # pixels of a picture's longer side

    def __init__(self, env_name, args):
        self.given = args
        self.orders, self.changed = queue.SimpleQueue(), threading.Condition()
        self.number, self.runs, self.token = 0, 0, f"{random.SystemRandom().getrandbits(32):08x}"
        self.state, self.scores = {}, []
        self.paused, self.steps, self.agent, self.problem = False, 0, 0, None
        self.asked, self.closing, self.view = 0.0, False, None
        shipped = {path.parent.name for path in ocean.FOLDER.glob("*/baseline.safetensors")}
        names = dict.fromkeys([*ocean.names(), env_name])
        self.trained = [name for name in names if name in shipped]
        self.others = [name for name in names if name not in shipped]
        self._open(env_name, "given")
        self.server = serve(self, args["eval"]["port"])
        self.port = self.server.server_address[1]

    def run(self):
        """Play, until `close` or an interrupt."""
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        due = published = time.perf_counter()
        interval = 1 / self.PICTURES
        self._publish()
        try:
            while not self.closing:
                now = time.perf_counter()
                idle = (self.paused and not self.steps) or now - self.asked > self.PATIENCE + 2
                try:
                    order = self.orders.get(timeout=0.25 if idle else max(0.0, due - now))
                except queue.Empty:
                    order = None
                if order is not None:
                    self._obey(order)
                    self._publish()
                elif not idle:
                    stepped = bool(self.steps)
                    self.steps = max(0, self.steps - 1)
                    self._decide()
                    self.view.advance()
                    self.decided = False
                    self.total += 1
                    now = time.perf_counter()
                    due = max(due + 1 / self.speed, now - 0.1)
                    if stepped or now - published >= interval:
                        published = now
                        self._publish()
                        # Drawing takes half of the time at most, so that a busy machine keeps up.
                        interval = max(1 / self.PICTURES, 2 * (time.perf_counter() - now))
        finally:
            self.server.shutdown()
            self.server.server_close()
            self.view.close()

    def close(self):
        """End `run`; may be called by a signal's handler."""
        self.closing = True
        self.orders.put({})  # wakes it

    def _obey(self, order):
        """Do what the page asks for; if that fails, show the error on the page."""
        self.problem = None
        try:
            for name, value in order.items():
                getattr(self, f"_set_{name}")(value)
        except (ValueError, TypeError, KeyError, OverflowError) as error:  # ConfigError is one
            self.problem = str(error)
        except Exception as error:  # of an environment that does not load; the last one plays on
            traceback.print_exc()
            self.problem = f"{type(error).__name__}: {error}"

    def _set_pause(self, value):
        self.paused, self.steps = bool(value), 0

    def _set_step(self, count):
        self.paused, self.steps = True, max(0, min(int(count), 1000))

    def _set_speed(self, value):
        if not math.isfinite(float(value)):
            raise ValueError(f"the speed is {value}; it must be a number of steps a second")
        self.speed = min(max(float(value), 0.1), 1e5)

    def _set_agent(self, number):
        self.agent = min(max(int(number), 0), self.view.agents - 1)

    def _set_deterministic(self, value):
        self.view.deterministic = bool(value)
        self.given["eval"]["deterministic"] = bool(value)

    def _set_seed(self, value):
        self.view.restart(EVAL_SEED + int(value) % 2**53)
        self._begin()

    def _set_policy(self, name):
        self._open(self.environment, name)

    def _set_environment(self, name):
        if name not in (*self.trained, *self.others):
            raise ValueError(f"there is no environment {name} to choose")
        self._open(name, None)

    def _open(self, name, policy):
        """Another environment, or another policy in it. policy: "given" is that of the command
        line, None the best."""
        policies = self._policies(name)
        policy = policy or policies[0][0]
        if policy not in [one for one, *_ in policies]:
            raise ValueError(f"there is no policy {policy!r} of {name} to choose")
        run = ["--load-model-path", policy, "--data-dir", self.given["data_dir"]]
        options = {"given": None, "baseline": ["--baseline"], "untrained": []}.get(policy, run)
        args = self.given if options is None else pufferl.load_config(name, options)
        args = {**args, "eval": self.given["eval"]}
        seed = self.view.seed if self.view else self.given["train"]["seed"] + EVAL_SEED
        view = View(name, args, seed)
        try:
            view.picture()
        except ConfigError:
            view.close()
            raise
        if self.view:
            self.view.close()
        self.view, self.environment, self.policy, self.policies = view, name, policy, policies
        self.speed, self.agent = view.fps, 0
        self._begin()

    def _policies(self, name):
        """[(name, what to call it, what it is)] of an environment's policies, the best first."""
        found = []
        if self.view is None or name == self.started:
            self.started = name
            found.append(("given", "as started", describe_policy(self.given)))
        if name in self.trained:
            about = configuration.read_baseline(name)[1]
            score = loggers.figure(about["score"])
            found.append(("baseline", "the one that ships",
                          f"score {score}, {about['steps']:,} steps"))
        for run, what in (("best", "the latest run's best"), ("latest", "the latest run")):
            with contextlib.suppress(ConfigError):
                model = configuration.find_model(run, self.given["data_dir"], name)
                found.append((run, what, str(model)))
        return [*found, ("untrained", "untrained", "random weights")]

    def _begin(self):
        self.runs += 1
        self.total, self.decided = 0, False

    def _decide(self):
        if not self.decided:
            self.view.decide()
            self.decided = True

    def _publish(self):
        """Publish the present state for the page."""
        self._decide()
        view, scores = self.view, self.view.scores
        count = len(scores)
        state = {
            "run": f"{self.token}-{self.runs}", "environment": self.environment,
            "policy": self.policy, "environments": {"trained": self.trained, "others": self.others},
            "policies": self.policies, "paused": self.paused, "speed": self.speed, "fps": view.fps,
            "seed": view.seed - EVAL_SEED, "deterministic": view.deterministic,
            "agents": view.agents, "agent": self.agent, "steps": self.total,
            "length": int(view.lengths[self.agent]), "return": float(view.returns[self.agent]),
            "count": count, "mean": float(np.mean(scores)) if scores else None,
            "error": float(np.std(scores, ddof=1) / math.sqrt(count)) if count > 1 else None,
            "problem": self.problem, "picture": png(view.picture(), self.LARGEST),
            **view.thoughts(self.agent),
        }
        with self.changed:
            self.number += 1
            self.state, self.scores = {"number": self.number, **state}, scores
            self.changed.notify_all()

    def read(self, after, run, first_score):
        """For a request: the state as JSON, once there is one later than number `after` or of
        another run than `run`, with the scores from number first_score on; None if there is none
        for PATIENCE seconds."""
        self.asked = time.perf_counter()
        with self.changed:
            if not self.changed.wait_for(lambda: self.state
                                         and (self.number > after or self.state["run"] != run),
                                         self.PATIENCE):
                return None
            state, scores = self.state, self.scores
        self.asked = time.perf_counter()
        first = first_score if state["run"] == run else 0
        return json.dumps(without_nan({**state, "first_score": first,
                                       "scores": scores[first : state["count"]]}))


def without_nan(value):
    """A value for JSON, which has no NaN and no infinity: None stands for them."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def png(picture, side):
    """A picture as PNG in base64."""
    from PIL import Image

    file = io.BytesIO()
    shrink(Image.fromarray(picture), side).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


@functools.cache
def still(name):
    """A small picture of an environment in C after some random steps, as PNG in base64. Another
    process draws it, as raylib is bound to one thread, and makes way for the one that plays."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/still.png"
        command = ["/usr/bin/env", "nice", "-n", "5", sys.executable, "-m", "ocean", name,
                   "--png", path, "--steps", str(STILL_STEPS)]
        try:
            subprocess.run(processes.guarded(command), cwd=configuration.ROOT, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            if error.returncode == -signal.SIGINT:  # the Ctrl-C that ends the page reaches both
                raise ConnectionAbortedError("the page ends") from None
            raise
        return png(np.asarray(Image.open(path)), STILL_SIDE)


class Requests(http.server.BaseHTTPRequestHandler):
    """For a page of this machine: a subclass asks `refuse` before it does anything, and ends with
    `answer`. The sweep's report is such a page too. If it cannot be made, both sides are told in a
    line, and the next request may go well."""

    protocol_version = "HTTP/1.1"  # connections stay open for the next request
    timeout = 60
    LOOPBACK = ("127.0.0.1", "localhost", "::1")

    def refuse(self):
        """Answer 403 to requests that are not of this page: under another name that points here
        (DNS rebinding), or from another site's script. Any port will do, because an ssh tunnel has
        its own."""
        host, origin, own = self.headers.get("Host", ""), self.headers.get("Origin"), False
        with contextlib.suppress(ValueError):  # of a host such as "["
            own = urllib.parse.urlsplit(f"//{host}").hostname in self.LOOPBACK
        if (own and len(self.headers.get_all("Host", [])) == 1
                and origin in (None, f"http://{host}")):
            return False
        self.answer(403, "this page is for http://127.0.0.1 and http://localhost only")
        return True

    def handle_one_request(self):
        self.answered = False
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):  # the other side has gone
            self.close_connection = True
        except Exception as error:
            self.close_connection, problem = True, f"{type(error).__name__}: {error}"
            print(f"the page was asked for, but could not be made: {problem}", file=sys.stderr)
            if not self.answered:
                self.answer(500, f"the page could not be made: {problem}")

    def answer(self, status, text="", kind="text/plain; charset=utf-8", sources=""):
        """sources: what the page may load, as in a Content-Security-Policy; by default nothing."""
        self.answered = True
        body = text.encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        policy = f"default-src 'none'; {sources}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        for name, value in (("Content-Security-Policy", policy), ("Cache-Control", "no-store"),
                            ("X-Content-Type-Options", "nosniff"),
                            ("Referrer-Policy", "no-referrer"),
                            ("Cross-Origin-Resource-Policy", "same-origin")):
            self.send_header(name, value)
        self.end_headers()
        if status != 204:
            self.wfile.write(body)

    def log_message(self, *_): ...


class Server(http.server.ThreadingHTTPServer):
    """At a port of 127.0.0.1 (0: any) for a subclass of Requests. Raises OSError, OverflowError."""

    daemon_threads = True

    def __init__(self, port, requests):
        super().__init__(("127.0.0.1", port), requests)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a page was closed
            super().handle_error(request, client_address)


class PlayRequests(Requests):
    """The page, its states, its menu's pictures and its orders. `server.page` is the Page."""

    ORDERS = ("pause", "step", "speed", "seed", "environment", "policy", "agent", "deterministic")

    def do_GET(self):
        if self.refuse():
            return
        path, _, query = self.path.partition("?")
        if path == "/":
            nonce = f"{random.SystemRandom().getrandbits(128):032x}"
            page = Path(__file__).with_name("watch.html").read_text().replace("NONCE", nonce)
            own = f"'nonce-{nonce}'"
            self.answer(200, page, "text/html; charset=utf-8",
                        f"img-src data:; style-src {own}; script-src {own}; connect-src 'self'; ")
        elif path == "/state":
            asked = dict(urllib.parse.parse_qsl(query))
            try:
                after, first = int(asked.get("after", -1)), max(0, int(asked.get("scores", 0)))
            except ValueError:
                self.answer(400, "after and scores must be whole numbers")
                return
            state = self.server.page.read(after, asked.get("run"), first)
            self.answer(204) if state is None else self.answer(200, state, "application/json")
        elif path == "/still" and query in self.server.page.trained:
            self.answer(200, still(query))
        else:
            self.answer(404, "there is /, /state and /still")

    def do_POST(self):
        try:
            size = int(self.headers.get("Content-Length", -1))
        except ValueError:
            size = -1
        if not 0 <= size <= 4096:
            self.close_connection = True
            self.answer(413, "an order has at most 4096 bytes, and says how many")
            return
        body = self.rfile.read(size)
        if self.refuse():
            return
        if self.path != "/order":
            self.answer(404, "orders go to /order")
        elif self.headers.get_content_type() != "application/json":  # forms cannot send it
            self.answer(415, "an order is application/json")
        else:
            try:
                order = json.loads(body)
                known = isinstance(order, dict) and order.keys() <= set(self.ORDERS)
            except (ValueError, RecursionError):  # too deep
                known = False
            if not known:
                self.answer(400, f"an order is an object with some of {', '.join(self.ORDERS)}")
                return
            self.server.page.orders.put(order)
            self.answer(204)


def serve(page, port):
    """A server at 127.0.0.1, at `port` or the next one that is free (0:
    any). Raises ConfigError."""
    for candidate in [0] if port == 0 else range(port, min(port + 20, 65536)):
        try:
            server = Server(candidate, PlayRequests)
            server.page = page
            return server
        except OSError as error:
            problem = error
    raise ConfigError(f"eval.port = {port}: neither it nor one of the 19 after it is "
                              f"free ({problem}).")


def tunnel(port):
    """What to type on another machine to see the page there: this machine by the name that
    an ssh session came to."""
    _, _, address, ssh_port = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
    options = f"-p {ssh_port} " if ssh_port not in ("", "22") else ""
    user = os.environ.get("USER") or os.environ.get("LOGNAME")
    machine = f"{user}@{address}" if address and user else address or "this-machine"
    return f"ssh {options}-L {port}:127.0.0.1:{port} {machine}"


def show_on_page(env_name, args):
    page = Page(env_name, args)
    address, here = f"http://127.0.0.1:{page.port}", not os.environ.get("SSH_CONNECTION")
    print(f"{env_name}, {describe_policy(args)}: {address}   (ctrl-C ends)\n"
          f"from {'another' if here else 'your own'} machine: {tunnel(page.port)}, then the "
          "same address there", flush=True)
    if args["eval"]["open"] and here and ocean.has_display():
        webbrowser.open(address)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: page.close())
    page.run()
    print(summary(page.view))


# --------------------------------------------------------------------------------------------------
# The policies that ship


def ship(env_name, args):
    """Evaluate a run's policy and write it beside the environment's header, as --baseline reads it;
    returns the path. Raises ConfigError for what cannot ship."""
    from safetensors.torch import save

    path = configuration.find_baseline(args["env_name"])
    if not args["load_model_path"]:
        raise ConfigError("ship: which policy? --load-model-path latest, or a run's "
                                  "folder, or a model file.")
    if args["policy"]["name"] not in configuration.POLICIES:
        raise ConfigError(f"ship: policy.name {args['policy']['name']} lives in a file "
                                  "that does not ship.")
    model = configuration.find_model(args["load_model_path"], args["data_dir"], args["config_name"])
    before = configuration.read_baseline(env_name)[1] if path.exists() else None
    saved = checkpoints.load(model)
    weights = {name: tensor.to(torch.half if tensor.is_floating_point()
                               else tensor.dtype, copy=True, memory_format=torch.contiguous_format)
               for name, tensor in saved.items()}
    # evaluate the rounded weights, because these ship
    with tempfile.TemporaryDirectory() as folder:
        torch.save(weights, Path(folder) / "rounded.pt")
        results = evaluate(env_name, {**args, "load_model_path": str(Path(folder) / "rounded.pt")})
    about = {"score": results["score"].mean, "score_error": results["score"].error,
             "episodes": args["eval"]["episodes"], "steps": steps_of(model),
             "seed": args["train"]["seed"],
             "env": {name: value for name, value in args["env"].items() if name != "num_envs"},
             "policy": args["policy"], "rnn": args["rnn"]}
    data = save(weights, {name: json.dumps(value) for name, value in about.items()})
    if len(data) > LARGEST_BASELINE:
        raise ConfigError(f"ship: {len(data):,} bytes are more than the "
                                  f"{LARGEST_BASELINE:,} that a shipped policy may have; train one "
                                  "with a smaller policy.hidden_size.")
    path.write_bytes(data)
    if before is not None:
        print(f"replaced     one with score {loggers.figure(before['score'])}")
    print(f"wrote        {path} ({len(data):,} bytes, score {loggers.figure(about['score'])}, "
          f"{about['steps']:,} steps)")
    return path


def steps_of(model):
    """Environment steps that a run's model file was trained for; of
    best_*.pt, that the run has had."""
    path = model.parent / "trainer_state.pt"
    if not path.exists():
        raise ConfigError(f"ship: {path} is missing, which says for how many steps "
                                  f"{model.name} was trained.")
    state = checkpoints.load(path, checkpoints.whole_run)
    epoch = re.search(r"_(\d+)$", model.stem)
    return (state["global_step"] if epoch is None
            else int(epoch[1]) * state["global_step"] // max(1, state["epoch"]))


# --------------------------------------------------------------------------------------------------
# Command line


def play(env_name, args):
    """The eval verb: scores, and what the eval section asks to show. The page, the
    terminal and a video play at once, without scores of many episodes."""
    show = args["eval"]
    asked = [key for key in ("web", "terminal", "video", "window") if show[key]]
    if len(asked) > 1 and asked not in (["video", "window"], ["terminal", "video"]):
        raise ConfigError(f"--eval.{asked[0]} and --eval.{asked[1]}: one of them at a time.")
    arena.compile_timer.announce = lambda: print(loggers.COMPILING, file=sys.stderr)
    if show["video"]:
        check_video(show["video"])
    if show["window"]:
        check_window()
    if show["web"]:
        return show_on_page(env_name, args)
    if not (show["terminal"] or show["video"]):
        evaluate(env_name, args)
    window = show["window"]
    if window is None:
        window = ocean.has_display() and sys.stdout.isatty() and not show["video"]
    if not (show["video"] or show["terminal"] or window):
        return None
    view = View(env_name, args, args["train"]["seed"] + EVAL_SEED)
    try:
        if show["terminal"]:
            show_in_terminal(view)
        if show["video"]:
            view.restart(view.seed)
            write_video(episode_pictures(view, show["seconds"]), show["video"], view.fps)
            print(summary(view))
        if window and not show["terminal"]:
            # One that was not asked for is left out if nothing is drawn.
            with contextlib.suppress(*[ConfigError] * (show["window"] is None)):
                show_in_window(view)
    finally:
        view.close()


def main(argv=None, program="pufferl.py eval"):
    """The command line; program: what errors begin with."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv.pop(0) if argv[:1] in (["ship"], ["eval"]) else "eval"
    if not argv or argv[0].startswith("-"):
        print(f"usage: python pufferl.py {{eval,ship}} ENV [--section.key value ...]\n{__doc__}\n"
              f"environments: {', '.join(ocean.names())}")
        if not argv or argv[0] not in ("-h", "--help"):
            sys.exit(f"{program}: which environment?")
        return
    with exit_on_error(program):
        args = pufferl.load_config(argv[0], configuration.no_resume(argv[1:]))
        if verb == "ship":
            ship(argv[0], args)
        else:
            play(argv[0], args)
