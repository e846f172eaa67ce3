"""Train three of MuJoCo's robots for a million steps, next to Stable-Baselines3.

    python bench/bench_mujoco.py                                 # measure what is missing, print
    python bench/bench_mujoco.py --sides zoo --core 1 --seeds 0  # the peer, on the second core
    python bench/bench_mujoco.py --table --draw docs/mujoco.png  # table and picture of the results

Ours have the settings in config/, the peer's PPO those that its authors tuned for each robot
(rl-baselines3-zoo, hyperparams/ppo.yml). Each run is a process on one core. `while it trains` is
the mean return of the episodes in the last tenth of the steps, with the noise of the actions;
`without noise` that of 20 fresh episodes of the last policy with the mean actions. CleanRL's
figures are those that its authors publish for ppo_continuous_action.py after a million steps of the
version-4 robots (docs.cleanrl.dev/rl-algorithms/ppo). bench_mujoco.json beside this file has the
results; finished runs are not repeated. Both sides need `pip install "gymnasium[mujoco]"`, the peer
in .venv-bench.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import diagnostics  # noqa: E402
from bench import bench_defaults  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
STEPS = 1_000_000
EPISODES = 20  # of the policy without noise
WIDE = {"log_std_init": -2, "ortho_init": False, "wide": True}
ZOO = {  # the values of rl-baselines3-zoo for version 3 of each robot; all normalise observations and rewards
    "HalfCheetah-v5": dict(batch_size=64, n_steps=512, gamma=0.98, learning_rate=2.0633e-05, ent_coef=0.000401762,
                           clip_range=0.1, n_epochs=20, gae_lambda=0.92, max_grad_norm=0.8, vf_coef=0.58096, **WIDE),
    "Hopper-v5": dict(batch_size=32, n_steps=512, gamma=0.999, learning_rate=9.80828e-05, ent_coef=0.00229519,
                      clip_range=0.2, n_epochs=5, gae_lambda=0.99, max_grad_norm=0.7, vf_coef=0.835671, **WIDE),
    "Walker2d-v5": dict(batch_size=32, n_steps=512, gamma=0.99, learning_rate=5.05041e-05, ent_coef=0.000585045,
                        clip_range=0.1, n_epochs=20, gae_lambda=0.95, max_grad_norm=1.0, vf_coef=0.871923),
}
CLEANRL = {"HalfCheetah-v5": 1442.64, "Hopper-v5": 2382.86, "Walker2d-v5": 2287.95}
SIDES = {"ours": "ours", "zoo": "Stable-Baselines3"}


def ours(name, seed, options):
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, str(ROOT / "pufferl.py"), "train", f"gym/{name}", "--train.seed", str(seed),
                 "--train.total-timesteps", str(STEPS), "--train.log-interval", "0.05", "--logger", "none",
                 "--data-dir", folder, *options]
        begun = time.perf_counter()
        finished(train)
        seconds = time.perf_counter() - begun
        log = next(Path(folder).glob("*/metrics.jsonl"))
        entries = diagnostics.read_metrics(log)
        output = finished([sys.executable, str(ROOT / "pufferl.py"), "eval", f"gym/{name}", "--load-model-path",
                         str(log.parent), "--eval.deterministic", "true", "--eval.episodes", str(EPISODES)])
    before = seconds - entries[-1]["performance/uptime"]  # imports and compilation
    episodes = [(entry["step"], before + entry["performance/uptime"], entry["environment/episode_return"],
                 entry["environment/n"]) for entry in entries if "environment/n" in entry]
    return {"curve": bench_defaults.curve(episodes, STEPS), "seconds": round(seconds, 1),
            "without noise": float(re.search(r"episode_return\s+mean\s+(-?[\d.,]+)", output)[1].replace(",", ""))}


def zoo(name, seed):
    """Train with the peer, in its interpreter."""
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(1)
    settings = dict(ZOO[name])
    policy = {key: settings.pop(key) for key in ("log_std_init", "ortho_init") if key in settings}
    if settings.pop("wide", False):
        policy |= {"activation_fn": torch.nn.ReLU, "net_arch": {"pi": [256, 256], "vf": [256, 256]}}
    recorder = bench_defaults.Recorder(STEPS)
    env = VecNormalize(DummyVecEnv([lambda: recorder.wrap(gymnasium.make(name))]), gamma=settings["gamma"])
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", policy_kwargs=policy, **settings)
    begun = time.perf_counter()
    model.learn(STEPS)
    seconds = time.perf_counter() - begun
    fresh = VecNormalize(DummyVecEnv([lambda: gymnasium.make(name)]), training=False, norm_reward=False)
    fresh.obs_rms = env.obs_rms
    fresh.seed(seed + 1000)
    mean, _ = evaluate_policy(model, fresh, EPISODES, warn=False)
    print(json.dumps({"curve": bench_defaults.curve(recorder.episodes, STEPS), "seconds": round(seconds, 1),
                      "without noise": float(mean)}))


def finished(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def measure(side, name, seed, a):
    if side == "ours":
        return ours(name, seed, a.options)
    output = finished([a.peer_python, __file__, "--child", name, str(seed)],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    return json.loads(output.splitlines()[-1])


def show(results):
    row = "{:16} {:18} {:>6} {:>17} {:>14} {:>9} {:>13}"
    print(row.format("environment", "", "seeds", "while it trains", "without noise", "seconds", "to peer's end"))
    for name in ZOO:
        runs = {side: list(results.get(side, {}).get(name, {}).values()) for side in SIDES}
        goal = statistics.mean(map(bench_defaults.score, runs["zoo"])) if runs["zoo"] else None
        for side, result in runs.items():
            if result:
                scores = [bench_defaults.score(run) for run in result]
                has_goal = goal and side == "ours"
                reached = [bench_defaults.seconds_to(run, goal) if has_goal else None
                           for run in result]
                print(row.format(name, SIDES[side], len(result), f"{statistics.mean(scores):,.0f}",
                                 f"{statistics.mean(run['without noise'] for run in result):,.0f}",
                                 f"{statistics.median(run['seconds'] for run in result):,.0f}",
                                 "" if None in reached else f"{statistics.median(reached):,.0f}"))
        print(row.format(name, "CleanRL, published", 3, f"{CLEANRL[name]:,.0f}", "", "", ""))


def draw(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(ZOO), figsize=(13, 3.4))
    for name, axis in zip(ZOO, axes, strict=True):
        for side, colour in (("ours", "tab:blue"), ("zoo", "tab:orange")):
            for i, run in enumerate(results.get(side, {}).get(name, {}).values()):
                steps, _, means, _ = zip(*run["curve"], strict=True)
                axis.plot([step / 1e6 for step in steps], means, colour, lw=1, label=None if i else SIDES[side])
        axis.axhline(CLEANRL[name], color="tab:green", ls=":", label="CleanRL, published")
        axis.set(title=name, xlabel="million steps")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return while it trains")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["ours"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--core", type=int, help="the one that all runs have (default: the first that is allowed)")
    parser.add_argument("--peer-python", default=str(ROOT / ".venv-bench/bin/python"), help="has stable_baselines3")
    parser.add_argument("--draw", help="also draw the curves into this file")
    parser.add_argument("--table", action="store_true", help="measure nothing, show what is there")
    parser.add_argument("--scratch", action="store_true", help="show the runs and keep nothing")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="more options of pufferl.py train")
    a = parser.parse_args()
    os.sched_setaffinity(0, {a.core if a.core is not None else min(os.sched_getaffinity(0))})
    for seed in [] if a.table else a.seeds:
        for name in a.only:
            for side in a.sides:
                if not a.scratch and str(seed) in bench_defaults.load(RESULTS).get(side, {}).get(name, {}):
                    continue
                result = measure(side, name, seed, a)
                if not a.scratch:
                    bench_defaults.store(side, name, seed, result, RESULTS)
                print(f"{SIDES[side]:18} {name:15} seed {seed}  {bench_defaults.score(result):8,.0f} while it trains  "
                      f"{result['without noise']:8,.0f} without noise  {result['seconds']} s  "
                      f"{[round(row[2]) for row in result['curve']]}", flush=True)
    results = bench_defaults.load(RESULTS)
    show(results)
    if a.draw:
        draw(results, a.draw)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        zoo(sys.argv[2], int(sys.argv[3]))
    else:
        main()
