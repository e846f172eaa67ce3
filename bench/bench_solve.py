"""Measure the seconds of training until each environment is solved.

    python bench/bench_solve.py                               # all with seed 0, in sequence
    python bench/bench_solve.py --only pong maze --seeds 0 1 2 3 4
    python bench/bench_solve.py --only pendulum --tune 5      # search for faster settings, minutes
    python bench/bench_solve.py --only breakout --options --train.precision bfloat16

An environment is solved when 100 greedy episodes reach on average the value in [solved] of its
.ini, in two evaluations in sequence; the first one counts. The sanity suite's values are a perf,
all others a score, and `stochastic` is evaluated with random actions, as its best policy is
random. Seconds are the processor time of `evaluate` and `train` on one core, without evaluations
and without the first epoch, which compiles; with --cores or on a GPU they are those of a clock.
A policy is evaluated at the end, and once the score of its exploring episodes is half way to the
threshold. "end" is the mean score of the last twentieth of the epochs, as the policy explores. If
episodes are longer than that (enduro), only those that failed early end in it, so "greedy" tells.
The last line is one JSON object.

--tune searches with Protein around the shipped settings, two seeds a trial, and measures the three
best settings with five seeds. It prints options; copy what holds into config/NAME.ini.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import arena
import configuration
import ocean
import protein
import pufferl
from tools import watch
from tools.sweep import command

SOLVED = {name: solved for name in (*ocean.names(), "drone_race")
          if (solved := configuration.solved(name))}
EPISODES = 100
PACE = 1.06  # an evaluation when the seconds have grown by this factor
ROW = "{:16} {:>6} {:>9} {:>9} {:>8} {:>10} {:>7} {:>9} {:>9}"


class Greedy:
    """Evaluate a policy in fresh episodes without exploration."""

    def __init__(self, name, args):
        args["eval"]["deterministic"] = name != "stochastic"
        num_envs = min(EPISODES, args["env"].get("num_envs", 1))
        self.play = watch.Play(name, args, num_envs, args["train"]["seed"] + watch.EVAL_SEED)
        self.agents_per_env = self.play.vecenv.num_agents // num_envs
        self.quotas = [max(1, -(-EPISODES // self.play.vecenv.num_agents))] * num_envs

    def score(self, policy, seed, metric):
        """Return the mean of `metric` over the episodes."""
        play = self.play
        play.policy.load_state_dict(policy.state_dict())
        play.restart(seed)
        if hasattr(play.policy, "initial_state"):
            play.state = play.policy.initial_state(play.vecenv.num_agents)
        episodes = watch.Episodes(self.quotas, self.agents_per_env, always_report=True)
        while episodes.unfinished:
            episodes.play(play, play.vecenv.log)
        return episodes.statistics()[metric].mean


def run(name, options=(), seed=0, limit=math.inf, to_end=False, pace=PACE):
    """Train until solved, or to the end of the schedule, or for `limit` seconds.

    Returns {"threshold", "seconds", "steps": at the solution, None without one; "end_seconds", "end_steps",
    "end", "end_greedy": the scores, None before the end}.
    """
    metric, threshold = SOLVED[name].metric
    args = pufferl.load_config(name, [*options, "--train.seed", str(seed)])
    vecenv = pufferl.load_env(name, args)
    policy = pufferl.load_policy(args, vecenv, name)
    config = {**args["train"], "env": name, "data_dir": None, "log_interval": math.inf}
    trainer = pufferl.PuffeRL(config, vecenv, policy)
    trainer.warnings = None
    is_one_core = next(policy.parameters()).is_cpu and len(os.sched_getaffinity(0)) == 1
    clock = time.process_time if is_one_core else arena.clock
    greedy = Greedy(name, args)

    def is_solved(policy, epoch):
        return greedy.score(policy, seed + epoch, metric) >= threshold

    seconds, due, first, candidate, solution, end = 0.0, 0.01, None, None, None, None
    last = trainer.total_epochs - max(3, trainer.total_epochs // 20)
    while trainer.epoch < trainer.total_epochs and seconds < limit:
        start = clock()
        trainer.evaluate()
        trainer.train()
        if trainer.epoch > 1:
            seconds += clock() - start
        explored = trainer.environment.get(metric)
        if solution is None and seconds >= due and explored is not None:
            first = explored if first is None else first
            due = seconds * pace + 0.02
            trainer.mean_and_log()  # a new mean begins
            is_near = explored - first >= (threshold - first) / 2
            if not (is_near and is_solved(trainer.policy, trainer.epoch)):
                candidate = None
            elif candidate is None:
                candidate, due = (seconds, trainer.global_step), seconds * 1.04
            else:
                solution = candidate
                if not to_end:
                    break
        if trainer.epoch == last:
            trainer.mean_and_log()
    if trainer.epoch == trainer.total_epochs:
        scores = [greedy.score(trainer.policy, seed + i, metric) for i in range(2)]
        end = {"end": trainer.environment[metric], "end_greedy": scores[0]}
        if solution is None and min(scores) >= threshold:
            solution = seconds, trainer.global_step
    trainer.release()
    greedy.play.close()
    return {"threshold": threshold, "seconds": solution and solution[0],
            "steps": solution and solution[1],
            "end_seconds": seconds, "end_steps": trainer.global_step,
            **(end or {"end": None, "end_greedy": None})}


def around(args):
    """Return a search space around an environment's settings."""
    train, num_envs = args["train"], args["env"]["num_envs"]

    def within(value, factor):
        return {"distribution": "log_normal", "min": value / factor, "max": value * factor,
                "mean": value}

    def power(value, least, most):
        return {"distribution": "uniform_pow2", "min": least, "max": most, "mean": value}

    space = {
        "train.learning_rate": within(train["learning_rate"], 4),
        "train.horizon": power(train["horizon"], 8, 128),
        "train.minibatch_size": power(train["minibatch_size"], 256, 16384),
        "train.replay_ratio": {"distribution": "log_normal", "min": 0.5, "max": 4,
                               "mean": train["replay_ratio"]},
        "train.gae_lambda": {"distribution": "logit_normal", "min": 0.7, "max": 0.99,
                             "mean": train["gae_lambda"]},
        "train.vf_coef": within(train["vf_coef"], 5),
        "train.max_grad_norm": within(train["max_grad_norm"], 3),
        "train.total_timesteps": {"distribution": "log_normal", "integer": True,
                                  "min": 0.25 * train["total_timesteps"],
                                  "max": train["total_timesteps"],
                                  "mean": 0.6 * train["total_timesteps"]}}
    if train["ent_coef"]:
        space["train.ent_coef"] = within(train["ent_coef"], 8)
    if num_envs >= 8:
        most = 2 ** int(math.log2(num_envs))
        space["env.num_envs"] = power(most, max(1, most // 16), most)
    return space


def tune(name, minutes, common):
    """Search for `minutes`; yield (label, options) of the shipped settings and the three best.

    common: the options of all runs.
    """
    args = pufferl.load_config(name, common)
    agents_per_env = command.count_agents(args) // args["env"]["num_envs"]
    tuner = protein.Protein(search_space=around(args), num_trials=10_000, random_trials=16)
    end, trials = time.monotonic() + 60 * minutes, []
    base = [run(name, common, seed) for seed in (10, 11)]
    best = statistics.mean(result["seconds"] or result["end_seconds"] for result in base)
    while time.monotonic() < end:
        config = tuner.suggest()
        used = {"env.num_envs": args["env"]["num_envs"], **config}
        batch = used["env.num_envs"] * agents_per_env * used["train.horizon"]
        used["train.minibatch_size"] = min(used["train.minibatch_size"], batch)
        options = [word for key, value in used.items() for word in (f"--{key}", str(value))]
        seconds, cost = [], 0.0
        for seed in (100 + 2 * len(trials), 101 + 2 * len(trials)):
            result = run(name, [*common, *options], seed, limit=2.5 * best, pace=1.2)
            seconds.append(result["seconds"] or 5 * best)
            cost += result["end_seconds"]
            if seconds[0] > 1.5 * best:
                break
        mean = statistics.geometric_mean(seconds)
        tuner.observe(config, -math.log(mean), cost)
        trials.append((mean, options))
        best = min(best, mean) if len(seconds) == 2 else best
    print(f"{name}: {len(trials)} trials")
    yield "ships", common
    for rank, (_, options) in enumerate(sorted(trials)[:3], 1):
        print(f"{rank}: {' '.join(options)}")
        yield str(rank), [*common, *options]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(SOLVED), metavar="NAME",
                        default=list(SOLVED))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0; with --tune: 0 to 4")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--to-end", action="store_true", help="train to the end of the schedule")
    parser.add_argument("--tune", type=float, metavar="MINUTES")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[],
                        help="more options of pufferl.py train")
    a = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:a.cores])
    a.options += ["--vec.num-threads", str(len(os.sched_getaffinity(0)))]
    seeds = a.seeds or (range(5) if a.tune else [0])
    results = {}
    print(ROW.format("environment", "seed", "threshold", "M steps", "seconds", "M, to end",
                     "seconds", "end", "greedy"))
    for name in a.only:
        run(name, a.options, limit=0.01)  # compile
        runs = tune(name, a.tune, a.options) if a.tune else [("", a.options)]
        for label, options in runs:
            for seed in seeds:
                result = run(name, options, seed, to_end=a.to_end)
                results.setdefault(name, {})[f"{label}{':' if label else ''}{seed}"] = result
                solved = result["seconds"] is not None
                print(ROW.format(
                    name, f"{label} {seed}".strip(), f"{SOLVED[name].metric[1]:g}",
                    f"{result['steps'] / 1e6:.2f}" if solved else "never",
                    f"{result['seconds']:.2f}" if solved else "",
                    f"{result['end_steps'] / 1e6:.1f}", f"{result['end_seconds']:.1f}",
                    *(f"{result[key]:.4g}" if result[key] is not None else ""
                      for key in ("end", "end_greedy"))), flush=True)
    print(json.dumps({"benchmark": "solve", "cores": a.cores, "environments": results}))


if __name__ == "__main__":
    main()
