"""Evaluation: how a policy scores over fresh episodes, and pictures of it.

    python watch.py breakout --load-model-path latest                       # the same as python pufferl.py eval
    python watch.py breakout --load-model-path latest --eval.video out.gif
"""

import math
import sys

import numpy as np
import torch

import models
import ocean
import pufferl

EVAL_SEED = 1_000_003  # added to the seed, so that evaluation draws other episodes than training did


def evaluate(env_name, args):
    """Play the first episode of each of eval.episodes fresh environments; prints and returns {field: (mean, error)}."""
    episodes = args["eval"]["episodes"]
    args = {**args, "vec": {**args["vec"], "num_envs": 1, "total_agents": None, "num_buffers": 1, "num_workers": None,
                             "batch_size": None},
            "env": {**args["env"], "num_envs": episodes},
            "train": {**args["train"], "seed": args["train"]["seed"] + EVAL_SEED}}
    vecenv = pufferl.load_env(env_name, args)
    policy = pufferl.load_policy(args, vecenv, env_name)
    if not args["load_model_path"]:
        print("no --load-model-path: this is an untrained policy")
    storage = vecenv.allocate(1)
    state = policy.initial_state(vecenv.num_agents) if hasattr(policy, "initial_state") else {}
    finished, frames, stride, video = {}, [], 4, args["eval"]["video"]
    if video and not video.endswith((".gif", ".png")):
        raise pufferl.ConfigError(f"eval.video = {video}: must end in .gif or .png.")
    for step in range(args["eval"]["max_steps"]):
        vecenv.begin()
        state |= {"resets": torch.from_numpy(storage.resets[0]), "valid": torch.from_numpy(storage.valid[0])}
        masks = None if storage.action_masks is None else torch.from_numpy(storage.action_masks[0])
        observations = torch.from_numpy(storage.observations[0])
        with torch.no_grad():
            logits, value = models.one_step(policy, observations, state)
        actions, _, _ = models.sample_logits(logits, value, seed=args["train"]["seed"], step=step, masks=masks,
                                             heads=vecenv.action_heads, deterministic=args["eval"]["deterministic"])
        storage.actions[0] = actions.numpy()
        vecenv.advance(0)
        if video and 0 not in finished and step % stride == 0:
            frames.append(vecenv.render(0))
            if len(frames) == 400:  # a longer episode is shown by fewer of its frames
                frames, stride = frames[::2], 2 * stride
        for env in set(range(episodes)) - finished.keys():
            log = vecenv.log(env)
            if log:
                finished[env] = log
        if len(finished) == episodes:
            break
    else:
        raise RuntimeError(f"{episodes - len(finished)} of {episodes} episodes did not end within eval.max_steps = "
                           f"{args['eval']['max_steps']} steps.")
    vecenv.close()
    if video:
        write_video(frames, video)
    results = {}
    for name in dict.fromkeys(name for log in finished.values() for name in log):
        if name != "n":
            values = np.array([log[name] for log in finished.values() if name in log])
            results[name] = (float(values.mean()), float(values.std() / math.sqrt(len(values))))
            print(
                f"{name:20} mean {values.mean():10.3f} ± {results[name][1]:.3f}   "
                f"min {values.min():.3f}   max {values.max():.3f}"
            )
    print(f"{episodes} episodes, {step + 1} steps")
    return results


def write_video(frames, path):
    """Frames (height, width, 3) uint8 as an animated GIF, or the middle one as a PNG."""
    from PIL import Image

    chosen = frames if path.endswith(".gif") else [frames[len(frames) // 2]]
    first, *others = [Image.fromarray(frame) for frame in chosen]
    first.save(path, **({"save_all": True, "append_images": others, "duration": 40, "loop": 0} if others else {}))
    print(f"wrote {path}")


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        print(f"usage: python watch.py ENV [--section.key value ...]\nenvironments: {', '.join(ocean.names())}")
        if not argv or argv[0] not in ("-h", "--help"):
            sys.exit("watch.py: which environment?")
        return
    try:
        evaluate(argv[0], pufferl.load_config(argv[0], argv[1:]))
    except pufferl.ConfigError as error:
        sys.exit(f"watch.py: {error}")


if __name__ == "__main__":
    main()
