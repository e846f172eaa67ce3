"""Evaluation: how a policy scores over fresh episodes, and the policy playing, in a window, a video or a page.

    python pufferl.py eval breakout --load-model-path latest        # scores; python watch.py breakout ... is the same
    python pufferl.py eval breakout --baseline                      # of the trained policy that ships with breakout
    python watch.py breakout --baseline --eval.video out.mp4        # or out.gif, out.png; needs no display
    python watch.py ship breakout --load-model-path latest          # make a run's policy the one that ships

An episode is counted by a quota that is fixed before it starts: whoever counts "the first N that finish" counts too
many short ones. docs/watch.md has the details.
"""

import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import models
import ocean
import ocean.__main__ as playing
import pufferl

EVAL_SEED = 1_000_003  # added to the seed, so that evaluation draws other episodes than training did
GIF_SIDE = 480  # pixels of a GIF's longer side
MOST_ENVS = 4096  # environments in C that play side by side; with more episodes each plays several
LARGEST_BASELINE = 300_000  # bytes of a policy that ships with an environment


# ---------------------------------------------------------------------------------------------------------------------
# A policy in some environments


class Play:
    """A policy in fresh environments, a step at a time: `decide`, then `advance`.

    args: as from pufferl.load_config. Attributes: vecenv; policy; storage, of a horizon of 1, whose row 0 the policy
    sees and whose row 1 the step writes; step, how many there were; logits and value of the last `decide`.
    """

    def __init__(self, env_name, args, num_envs, seed):
        self.seed, self.deterministic, self.step = seed, args["eval"]["deterministic"], 0
        vec = {"num_envs": 1, "total_agents": None, "num_buffers": 1, "num_workers": None, "batch_size": None}
        args = {**args, "vec": {**args["vec"], **vec}, "env": {**args["env"], "num_envs": num_envs}}
        self.vecenv = pufferl.load_env(env_name, {**args, "train": {**args["train"], "seed": seed}})
        self.policy = pufferl.load_policy(args, self.vecenv, env_name)
        self.storage = self.vecenv.allocate(1)
        policy, agents = self.policy, self.vecenv.num_agents
        self.state = policy.initial_state(agents) if hasattr(policy, "initial_state") else {}
        self.vecenv.begin()
        self.threads = self.vecenv.num_threads if agents >= 4096 else 1  # few are not worth waking others

    def decide(self):
        """Choose the actions for what is seen now."""
        s = self.storage
        self.state |= {"resets": torch.from_numpy(s.resets[0]), "valid": torch.from_numpy(s.valid[0])}
        self.masks = None if s.action_masks is None else torch.from_numpy(s.action_masks[0])
        with torch.no_grad(), pufferl.torch_threads(self.threads):
            self.logits, self.value = models.one_step(self.policy, torch.from_numpy(s.observations[0]), self.state)
        actions, _, _ = models.sample_logits(self.logits, self.value, seed=self.seed, step=self.step, masks=self.masks,
                                             heads=self.vecenv.action_heads, deterministic=self.deterministic)
        s.actions[0] = actions.numpy()

    def advance(self):
        """Step the environments with these actions, and make what they show now the row to decide on."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Scores


class Statistic(NamedTuple):
    """Of one field of the environments' logs over the episodes that count."""

    mean: float
    error: float  # the standard error of the mean
    min: float
    max: float


class Episodes:
    """The finished episodes of a vector of environments, counted fairly.

    quotas (environments,): how many episodes of each count. An environment of several agents reports in one of two
    ways, which shows while they play: once an episode for all of its agents (as PettingZoo's do, and windows of fixed
    length), then its first `quota` reports count; or for each agent by itself, where an agent's first `quota` episodes
    do. In that case reports of agents that end at the same step are one mean; where some of these are beyond their
    quota, it stands for the others. always_report: every environment reports sooner or later (those in C do); others
    that never do are counted by their rewards.
    """

    def __init__(self, quotas, agents_per_env, always_report=False):
        self.quotas, self.agents, self.always_report = np.asarray(quotas), agents_per_env, always_report
        self.ended = np.zeros((len(quotas), agents_per_env), int)  # episodes of each agent
        self.open = set(range(len(quotas)))  # environments with episodes to play
        self.by_agent = True  # until a report says otherwise
        self.reports = [[] for _ in quotas]  # of each environment: (agents within their quota, log)
        self.returns, self.lengths = np.zeros((2, *self.ended.shape))
        self.own = []  # (agents, {"episode_return", "episode_length"}): for environments that report nothing themselves

    def add(self, rewards, resets, valid, log):
        """A step: rewards, resets (1 where it ended an agent's episode) and valid before it, each (all agents,);
        log: the vector's, called with an environment's number."""
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
                self.own.append((int(within[env].sum()), dict(zip(("episode_return", "episode_length"), means,
                                                                  strict=True))))
        self.returns[ended] = self.lengths[ended] = 0
        silent = not self.always_report and not any(self.reports)
        self.open = {env for env in self.open if not self._done(env, silent)}

    def _done(self, env, silent):
        if self.by_agent or silent:
            return bool((self.ended[env] >= self.quotas[env]).all())
        return len(self.reports[env]) >= self.quotas[env]

    def statistics(self):
        """{field: Statistic}. The error takes the episodes of one environment with several agents for related."""
        if self.by_agent:
            samples = [(env, weight, log) for env, reports in enumerate(self.reports) for weight, log in reports]
        else:
            samples = [(env, 1, log) for env, reports in enumerate(self.reports)
                       for _, log in reports[: self.quotas[env]]]
        own = [(number, *one) for number, one in enumerate(self.own)]
        names = dict.fromkeys(name for _, _, log in samples for name in log if name != "n")
        results = {name: self._statistic(name, samples) for name in names}
        results |= {name: self._statistic(name, own) for name in ("episode_return", "episode_length")
                    if name not in names and own}
        results.setdefault("score", results["episode_return"])
        return results

    def _statistic(self, name, samples):
        envs, weights, values = np.array([(env, weight, log[name]) for env, weight, log in samples
                                          if name in log and weight]).T  # fmt: skip
        mean = np.average(values, weights=weights)
        groups = envs if self.agents > 1 and len(set(envs)) > 1 else np.arange(len(envs))
        labels, index = np.unique(groups, return_inverse=True)
        deviations = np.bincount(index, weights * (values - mean)) / weights.sum()
        count = len(labels)
        error = math.sqrt((deviations**2).sum() * count / (count - 1)) if count > 1 else math.nan
        return Statistic(float(mean), error, float(values.min()), float(values.max()))


def evaluate(env_name, args):
    """Play eval.episodes episodes; prints and returns {field of the environment's log: Statistic}."""
    episodes = args["eval"]["episodes"]
    if episodes < 1:
        raise pufferl.ConfigError(f"eval.episodes = {episodes}: must be 1 or more.")
    native = pufferl.load_creator(args["env_name"]) is None
    # In Python an environment may be a process's worth of memory: no more of them than a training has.
    num_envs = min(episodes, MOST_ENVS if native else args["vec"]["num_envs"] * args["env"].get("num_envs", 1))
    play = Play(env_name, args, num_envs, args["train"]["seed"] + EVAL_SEED)
    vecenv, storage = play.vecenv, play.storage
    quotas = [episodes // vecenv.num_envs + (env < episodes % vecenv.num_envs) for env in range(vecenv.num_envs)]
    counted = Episodes(quotas, vecenv.num_agents // vecenv.num_envs, always_report=native)
    longest = args["eval"]["max_steps"] * max(quotas)
    try:
        while counted.open:
            if play.step == longest:
                raise RuntimeError(
                    f"{len(counted.open)} of {vecenv.num_envs} environments did not finish {max(quotas)} episodes in "
                    f"{longest} steps. Raise eval.max_steps where they are meant to be that long.")
            play.decide()
            valid = storage.valid[0].copy()
            play.advance()
            counted.add(storage.rewards[0], storage.resets[1], valid, vecenv.log)
    finally:
        play.close()
    results = counted.statistics()
    for name, value in results.items():
        print(f"{name:20} mean {value.mean:10.3f} ± {value.error:.3f}   min {value.min:.3f}   max {value.max:.3f}")
    each = f" of {counted.agents} agents" if counted.agents > 1 else ""
    print(f"{episodes} episodes{each}, {play.step} steps, {describe_policy(args)}")
    return results


def describe_policy(args):
    """Which policy it is, for people."""
    if args["baseline"]:
        about = pufferl.read_baseline(args["env_name"])[1]
        return f"the baseline (score {about['score']:.4g} after {about['steps']:,} steps)"
    if args["load_model_path"]:
        return str(pufferl.find_model(args["load_model_path"], args["data_dir"], args["env_name"]))
    return "an untrained policy (no --load-model-path, no --baseline)"


# ---------------------------------------------------------------------------------------------------------------------
# Pictures of one environment


class View(Play):
    """A policy in one environment that is drawn.

    Attributes besides Play's: fps, the steps a second at which it looks natural; agents; labels, for each action head
    {action: what it is called}.
    """

    def __init__(self, env_name, args, seed):
        creator = pufferl.load_creator(args["env_name"])
        self.native = creator is None
        drawn = {} if creator is None else creator.picture_settings
        args = {**args, "vec": {**args["vec"], "backend": "auto"}, "env": {**args["env"], **drawn}}
        super().__init__(env_name, args, 1, seed)
        driver, self.agents = self.vecenv.driver_env, self.vecenv.num_agents
        name = Path(args["env_name"]).stem
        if creator is None:
            self.fps = playing.FPS.get(name, 10 if name in playing.TURNS else 30)
            keys = playing.PLAY.get(name) or playing.TURNS.get(name) or []
            self.labels = [{action: key for key, action in head.items() if key} for head in keys]
        else:
            metadata = getattr(driver, "metadata", None) or getattr(getattr(driver, "env", None), "metadata", None)
            self.fps = (metadata or {}).get("render_fps") or 30
            meanings = getattr(getattr(driver, "unwrapped", None), "get_action_meanings", list)()
            self.labels = [dict(enumerate(meanings))]
        self.fps = args["eval"]["fps"] or self.fps

    def picture(self):
        """The environment now: (height, width, 3) uint8. Raises ConfigError where it draws nothing."""
        drawn = self.vecenv.render(0)
        if isinstance(drawn, list):
            drawn = drawn[-1] if drawn else None
        if isinstance(drawn, str):
            return picture_of_text(drawn)
        if drawn is None or np.ndim(drawn) not in (2, 3):
            what = "nothing" if drawn is None else f"a {type(drawn).__name__}"
            raise pufferl.ConfigError(f"{self.vecenv.name} cannot be shown: its render() gave {what}, expected a "
                                      "picture (height, width, 3). A callable of yours gets "
                                      "render_mode='rgb_array' where it has that parameter.")
        drawn = np.asarray(drawn)
        drawn = drawn[..., None].repeat(3, -1) if drawn.ndim == 2 else drawn[..., :3]
        return np.ascontiguousarray(drawn, np.uint8)


def picture_of_text(text):
    """What an environment prints, without its colours, as a picture."""
    from PIL import Image, ImageDraw, ImageFont

    text = re.sub("\x1b\\[[0-9;]*m", "", text).strip("\n")
    font = ImageFont.load_default(24)
    box = ImageDraw.Draw(Image.new("RGB", (1, 1))).multiline_textbbox((24, 24), text, font)
    image = Image.new("RGB", (math.ceil(box[2]) + 24, math.ceil(box[3]) + 24), (12, 20, 28))
    ImageDraw.Draw(image).multiline_text((24, 24), text, (236, 242, 246), font)
    return np.asarray(image)


def episode_pictures(view, seconds):
    """The pictures of one episode, or of its first `seconds`."""
    counted = Episodes([1], view.agents, always_report=view.native)
    for _ in range(max(2, round(seconds * view.fps))):
        yield view.picture()
        if not counted.open:
            return
        view.decide()
        valid = view.storage.valid[0].copy()
        view.advance()
        counted.add(view.storage.rewards[0], view.storage.resets[1], valid, view.vecenv.log)


def check_video(path):
    """Raises ConfigError where a video cannot be written to `path`."""
    suffix = Path(path).suffix
    if suffix not in (".mp4", ".gif", ".png"):
        raise pufferl.ConfigError(f"eval.video = {path}: must end in .mp4, .gif or .png.")
    if not Path(path).resolve().parent.is_dir():
        raise pufferl.ConfigError(f"eval.video = {path}: there is no folder {Path(path).resolve().parent}.")
    if suffix == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401
        except ImportError:
            raise pufferl.ConfigError("eval.video: .mp4 needs the package imageio-ffmpeg: pip install imageio-ffmpeg "
                                      "(.gif and .png need nothing).") from None


def write_video(pictures, path, fps):
    """Pictures (height, width, 3) uint8 of one size to an .mp4 (H.264) or .gif, or the middle one to a .png; returns
    how many there were."""
    from PIL import Image

    pictures = iter(pictures)
    first = next(pictures)
    if path.endswith(".mp4"):
        import imageio_ffmpeg

        height, width = first.shape[:2]
        pad = ((0, height % 2), (0, width % 2), (0, 0))  # yuv420p halves both
        writer = imageio_ffmpeg.write_frames(
            path, (width + width % 2, height + height % 2), fps=fps, codec="libx264", pix_fmt_out="yuv420p", quality=8,
            macro_block_size=2, output_params=["-movflags", "+faststart"])  # fmt: skip
        writer.send(None)
        for count, picture in enumerate(itertools.chain([first], pictures), 1):  # noqa: B007
            writer.send(np.ascontiguousarray(np.pad(picture, pad, "edge")))
        writer.close()
    elif path.endswith(".gif"):
        small = [shrink(Image.fromarray(picture), GIF_SIDE) for picture in itertools.chain([first], pictures)]
        small[0].save(path, save_all=True, append_images=small[1:], duration=round(1000 / fps), loop=0)
        count = len(small)
    else:
        kept, count, stride = [first], 1, 1
        for picture in pictures:
            if count % stride == 0:
                kept.append(picture)
            if len(kept) == 64:
                kept, stride = kept[::2], 2 * stride
            count += 1
        Image.fromarray(kept[len(kept) // 2]).save(path)
    print(f"wrote {path}: {'one of ' if path.endswith('.png') else ''}{count} pictures of {first.shape[1]} × "
          f"{first.shape[0]}")
    return count


def shrink(image, side):
    """A picture whose longer side is at most `side` pixels."""
    from PIL import Image

    scale = min(1.0, side / max(image.size))
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BOX)


# ---------------------------------------------------------------------------------------------------------------------
# The policies that ship


def ship(env_name, args):
    """Evaluate a run's policy and write it beside the environment's header, as --baseline reads it; returns the path.
    Raises ConfigError for what cannot ship."""
    from safetensors.torch import save

    path = pufferl.find_baseline(args["env_name"])
    if not args["load_model_path"]:
        raise pufferl.ConfigError("ship: which policy? --load-model-path latest, or a run's folder, or a model file.")
    if args["policy"]["name"] not in ("default", "feed-forward"):
        raise pufferl.ConfigError(f"ship: policy.name {args['policy']['name']} lives in a file that does not ship.")
    model = pufferl.find_model(args["load_model_path"], args["data_dir"], args["env_name"])
    before = pufferl.read_baseline(env_name)[1] if path.exists() else None
    results = evaluate(env_name, args)
    about = {"score": results["score"].mean, "score_error": results["score"].error,
             "episodes": args["eval"]["episodes"], "steps": steps_of(model), "seed": args["train"]["seed"],
             "env": {name: value for name, value in args["env"].items() if name != "num_envs"},
             "policy": args["policy"], "rnn": args["rnn"]}  # fmt: skip
    weights = {name: tensor.contiguous() for name, tensor in
               torch.load(model, weights_only=True, map_location="cpu").items()}  # fmt: skip
    data = save(weights, {name: json.dumps(value) for name, value in about.items()})
    if len(data) > LARGEST_BASELINE:
        raise pufferl.ConfigError(f"ship: {len(data):,} bytes are more than the {LARGEST_BASELINE:,} that a shipped "
                                  "policy may have; train one with a smaller policy.hidden_size.")
    path.write_bytes(data)
    if before is not None:
        print(f"replaced     one with score {before['score']:.4g}")
    print(f"wrote        {path} ({len(data):,} bytes, score {about['score']:.4g}, {about['steps']:,} steps)")
    return path


def steps_of(model):
    """Environment steps that a run's model file was trained for."""
    state = torch.load(model.parent / "trainer_state.pt", weights_only=True, map_location="cpu")
    epoch = int(re.search(r"_(\d+)$", model.stem)[1])
    return epoch * state["global_step"] // state["epoch"]


def play(env_name, args):
    """The eval verb: scores, and what the eval section asks to show."""
    video = args["eval"]["video"]
    if video:
        check_video(video)
    evaluate(env_name, args)
    if video:
        view = View(env_name, args, args["train"]["seed"] + EVAL_SEED)
        try:
            write_video(episode_pictures(view, args["eval"]["seconds"]), video, view.fps)
        finally:
            view.close()


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv.pop(0) if argv[:1] == ["ship"] else "eval"
    if not argv or argv[0].startswith("-"):
        print(f"usage: python watch.py [ship] ENV [--section.key value ...]\n{__doc__}\n"
              f"environments: {', '.join(ocean.names())}")
        if not argv or argv[0] not in ("-h", "--help"):
            sys.exit("watch.py: which environment?")
        return
    try:
        args = pufferl.load_config(argv[0], argv[1:])
        if verb == "ship":
            ship(argv[0], args)
        else:
            play(argv[0], args)
    except pufferl.ConfigError as error:
        sys.exit(f"watch.py: {error}")


if __name__ == "__main__":
    main()
