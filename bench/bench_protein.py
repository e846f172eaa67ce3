r"""Compare Protein with Random and Optuna's TPE and Gaussian-process samplers.

    python bench/bench_protein.py               # 20 seeds, 200 trials: hours on one core
    python bench/bench_protein.py --seeds 3 --trials 50 --only branin training \
        --methods protein random tpe
    python bench/bench_protein.py --times       # seconds of a suggestion

The problems have a known Pareto front. Each run is written to experiments/bench_protein.jsonl
(--results) when it ends and is not repeated, so the command can be stopped at any time, and
`--seeds 0` shows what there is. Runs of our tuners count while the code of protein.py is unchanged;
those of Optuna, which take the hours, are beside this file (bench_protein.jsonl, Optuna 5.0;
--rivals none repeats them). No method looks ahead, so a run of 200 trials includes one of 50.

The measure is the dominated hypervolume in the plane of log cost and score, from the problem's
reference point, as a fraction of the box up to the best score: 1 is the best score at the lowest
cost. It is without noise: the settings that a method tried count with their true score. Regret is
the best possible minus the best true score, as a fraction of the box's height. Seeds are shared, so
that methods are compared in pairs; the last tables are the paired difference to each rival, of all
problems and of each, with the lower end of its bootstrap 90% interval (equal to the one-sided 95%).
Problems, reference points and budgets (50 and 200 trials, 20 seeds) were fixed before the tuner was
tuned. The last line is one JSON object with the same figures.
"""

import argparse
import ast
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BUDGETS, SEEDS = (50, 200), 20
RIVALS = Path(__file__).with_suffix(".jsonl")


@dataclass
class Problem:
    space: dict  # {"section.key": {"distribution", "min", "max"}}
    # config -> (score without noise, cost in seconds); a score of NaN is a failed trial
    truth: Callable
    reference: float  # score below which nothing counts
    best: float  # highest score there is, rounded up
    costs: tuple  # lowest and highest cost, seconds
    noise: float = 0.0  # standard deviation of the observed score

    def evaluate(self, config, rng):
        """Return (observed score, cost) of one trial."""
        score, cost = self.truth(config)
        return score + self.noise * rng.standard_normal(), cost


def uniform(low, high):
    return {"distribution": "uniform", "min": low, "max": high}


def branin(config):
    """Return Branin and Hoo 1972, negated, with three equal optima at -0.398.

    The cost rises with x2, so they differ in price.
    """
    x, y = config["env.x"], config["env.y"]
    bowl = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6) ** 2
    return -(bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10), 10 ** (2 * y / 15)


HARTMANN_ALPHA = np.array([1.0, 1.2, 3.0, 3.2])
HARTMANN_A = np.array([[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14],
                       [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]])
HARTMANN_P = 1e-4 * np.array([[1312, 1696, 5569, 124, 8283, 5886],
                              [2329, 4135, 8307, 3736, 1004, 9991],
                              [2348, 1451, 3522, 2883, 3047, 6650],
                              [4047, 8828, 8732, 5743, 1091, 381]])


def hartmann6(config):
    """Return Hartmann 1973, six dimensions, maximum 3.322.

    The cost rises with the mean of all coordinates.
    """
    x = np.array([config[f"env.x{i}"] for i in range(6)])
    return float(HARTMANN_ALPHA @ np.exp(-(HARTMANN_A * (x - HARTMANN_P) ** 2).sum(1))), 10 ** (2 * float(x.mean()))


PEAKS = [(0.2, 0.3, 0.6, 0.16, 0.0), (0.7, 0.65, 0.8, 0.12, 0.45), (0.85, 0.2, 1.0, 0.07, 0.9),
         (0.4, 0.8, 0.7, 0.1, 0.3)]


def valleys(config):
    """Return four peaks (x, y, height, width, spend).

    The higher ones are narrower and cost more; two idle settings.
    """
    x, y = config["env.x"], config["env.y"]
    money = math.log10(config["train.money"]) / 3
    peaks = [h * math.exp(-((x - px) ** 2 + (y - py) ** 2) / (2 * w * w)) / (1 + math.exp(-20 * (money - spend + 0.1)))
             for px, py, h, w, spend in PEAKS]
    return max(peaks), config["train.money"]


def training(config):
    """Return a learning curve.

    The score approaches an asymptote set by width and discount, at a rate set by the step size.
    """
    steps, width, lr = config["train.total_timesteps"], config["policy.hidden_size"], config["train.learning_rate"]
    off = math.log10(lr / (0.01 * (64 / width) ** 0.5))
    rate = 3e-7 * math.exp(-(off**2) / 0.5) * (width / 64) ** 0.3 * config["train.replay_ratio"] ** 0.5
    discount = math.log10((1 - config["train.gamma"]) / 0.005)
    entropy = math.log10(config["train.ent_coef"] / 0.003)
    ceiling = (1 - 0.3 * (32 / width) ** 0.7) * math.exp(-0.25 * discount**2 - 0.05 * entropy**2)
    cost = steps * (width / 64) ** 1.2 * (0.4 + 0.6 * config["train.replay_ratio"]) / 2e5
    return ceiling * (1 - math.exp(-((rate * steps) ** 1.3))), cost


def faulty(config):
    """Return `training` with failures.

    A large step diverges (NaN at once), a wide network with a large batch runs out of memory.
    """
    score, cost = training(config)
    if config["train.learning_rate"] * config["train.replay_ratio"] > 0.1:
        return math.nan, 0.1 * cost
    if config["policy.hidden_size"] * config["vec.total_agents"] > 2**21:
        return math.nan, 1.0
    return score * (1 - 0.1 * abs(math.log2(config["vec.total_agents"] / 2048)) / 4), cost


TRAINING = {
    "train.total_timesteps": {"distribution": "log_normal", "min": 1e6, "max": 1e8},
    "train.learning_rate": {"distribution": "log_normal", "min": 1e-4, "max": 1.0},
    "train.gamma": {"distribution": "logit_normal", "min": 0.8, "max": 0.9999},
    "train.ent_coef": {"distribution": "log_normal", "min": 1e-5, "max": 0.2},
    "train.replay_ratio": {"distribution": "uniform", "min": 0.25, "max": 4.0},
    "policy.hidden_size": {"distribution": "uniform_pow2", "min": 16, "max": 512},
}
FAULTY = {**TRAINING,
          "vec.total_agents": {"distribution": "uniform_pow2", "min": 256, "max": 16384},
          **{f"env.idle{i}": uniform(0, 1) for i in range(4)}}
VALLEYS = {**{f"env.{key}": uniform(0, 1) for key in ("x", "y", "idle0", "idle1")},
           "train.money": {"distribution": "log_normal", "min": 1, "max": 1000}}
PROBLEMS = {
    "branin": Problem({"env.x": uniform(-5, 10), "env.y": uniform(0, 15)}, branin, -60.0, -0.39,
                      (1.0, 100.0)),
    "hartmann6": Problem({f"env.x{i}": uniform(0, 1) for i in range(6)}, hartmann6, 0.0, 3.33,
                         (1.0, 100.0)),
    "valleys": Problem(VALLEYS, valleys, 0.0, 1.0, (1.0, 1000.0)),
    "training": Problem(TRAINING, training, 0.0, 1.0, (1.0, 20000.0)),
    "faulty": Problem(FAULTY, faulty, 0.0, 1.0, (1.0, 20000.0), noise=0.03),
}


def hypervolume(problem, trials):
    """Return the fraction of the box (log cost × score) that `trials` dominate.

    trials: (score, cost). The box starts at the reference point.
    """
    low, high = map(math.log, problem.costs)
    area, best, at = 0.0, problem.reference, None
    counted = [(score, cost) for score, cost in trials if math.isfinite(score)
               and cost <= problem.costs[1]]
    for score, cost in sorted(counted, key=lambda trial: trial[1]):
        if score > best:
            here = max(low, math.log(cost))
            area += (best - problem.reference) * (here - at) if at is not None else 0.0
            best, at = score, here
    area += (best - problem.reference) * (high - at) if at is not None else 0.0
    return area / ((high - low) * (problem.best - problem.reference))


def regret(problem, trials):
    """Return the best possible score minus the best of `trials`, in box heights.

    At most 1.
    """
    best = max((score for score, cost in trials if score > problem.reference),
               default=problem.reference)
    return (problem.best - best) / (problem.best - problem.reference)


def run_protein(name, problem, trials, seed, method="Protein"):
    import protein

    tuner = getattr(protein, method)(search_space=problem.space, num_trials=trials, seed=seed)
    rng, results = np.random.default_rng(seed), []
    for _ in range(trials):
        config = tuner.suggest()
        score, cost = problem.evaluate(config, rng)
        tuner.observe(config, score, cost, failed=not math.isfinite(score))
        results.append(problem.truth(config))
    return results


def run_optuna(name, problem, trials, seed, sampler="tpe"):
    import optuna
    import torch

    # the GP sampler's matrices are small: threads would only wait for each other
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
    study = optuna.create_study(directions=["maximize", "minimize"],
                                sampler=kinds[sampler](seed=seed))
    rng, results = np.random.default_rng(seed), []
    for _ in range(trials):
        trial, config = study.ask(), {}
        for key, setting in problem.space.items():
            low, high = setting["min"], setting["max"]
            if setting["distribution"] == "uniform_pow2":
                config[key] = 2 ** trial.suggest_int(key, round(math.log2(low)),
                                                     round(math.log2(high)))
            elif setting["distribution"] == "logit_normal":
                logit = trial.suggest_float(key, math.log(low / (1 - low)),
                                            math.log(high / (1 - high)))
                config[key] = 1 / (1 + math.exp(-logit))
            else:
                config[key] = trial.suggest_float(key, low, high,
                                                  log=setting["distribution"] == "log_normal")
        score, cost = problem.evaluate(config, rng)
        # A failed trial counts as the worst corner of the box: reported as FAIL, it teaches Optuna's
        # samplers nothing, and they ask for the same point again and again.
        failed = not math.isfinite(score)
        study.tell(trial, [problem.reference, math.log(problem.costs[1])] if failed
                   else [score, math.log(cost)])
        results.append(problem.truth(config))
    return results


METHODS = {
    "protein": run_protein,
    "random": lambda *args: run_protein(*args, method="Random"),
    "genetic": lambda *args: run_protein(*args, method="ParetoGenetic"),
    "tpe": run_optuna,
    "gp": lambda *args: run_optuna(*args, sampler="gp"),
}


def bootstrap_bound(differences, rng, repeats=4000):
    """Return the 5% quantile of the mean of resampled paired differences.

    The lower end of the two-sided 90% interval.
    """
    differences = np.asarray(differences)
    draws = differences[rng.integers(0, len(differences), (repeats, len(differences)))].mean(1)
    return float(np.quantile(draws, 0.05))


def suggestion_seconds(rows, settings=15, repeats=3):
    """Return median seconds of one suggestion.

    After `rows` observations of `settings` settings.
    """
    from protein import Protein

    rng = np.random.default_rng(0)
    space = {f"env.x{i}": {"distribution": "uniform", "min": 0.0, "max": 1.0}
             for i in range(settings)}
    tuner = Protein(search_space=space, num_trials=rows, seed=0)
    for _ in range(rows):
        config = tuner.space.decode(rng.random(settings))
        x = np.array(list(config.values()))
        tuner.observe(config, -((x - 0.6) ** 2).sum(), math.exp(3 * x[0]),
                      failed=rng.random() < 0.1)
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        tuner.suggest()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def run(name, method, seed, trials):
    """Return one run as a line of the results."""
    begun = time.perf_counter()
    results, problem = METHODS[method](name, PROBLEMS[name], trials, seed), PROBLEMS[name]
    return {"problem": name, "method": method, "seed": seed, "trials": trials,
            "source": source(method), "seconds": round(time.perf_counter() - begun, 2),
            "hypervolume": {str(budget): hypervolume(problem, results[:budget])
                            for budget in budgets(trials)},
            "regret": {str(budget): regret(problem, results[:budget])
                       for budget in budgets(trials)}}


def budgets(trials):
    return [budget for budget in BUDGETS if budget < trials] + [trials]


def source(method):
    """Return what the results of our tuners depend on, beside this file.

    protein.py without its comments and docstrings; None for the others.
    """
    if method in ("tpe", "gp"):
        return None
    tree = ast.parse((ROOT / "protein.py").read_text())
    for node in ast.walk(tree):
        if (isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
                and ast.get_docstring(node) is not None):
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def show(rows, names, methods, trials):
    """Print the tables of [line of the results]; returns the figures."""
    held = {(row["problem"], row["method"], row["seed"], int(budget)): (volume,
                                                                        row["regret"][budget])
            for row in rows for budget, volume in row["hypervolume"].items()}
    seeds = {(n, m, b): [s for *key, s, budget in held if key == [n, m] and budget == b]
             for n in names for m in methods for b in budgets(trials)}
    rng, figures = np.random.default_rng(0), {"seeds": {f"{n}/{m}/{b}": len(s)
                                                        for (n, m, b), s in seeds.items()}}
    for which, measure in enumerate(("hypervolume", "regret")):
        figures[measure] = {}
        print(f"\n{'mean ' + measure:24}" + "".join(f"{method:>12}" for method in methods))
        for name in names:
            for b in budgets(trials):
                means = {m: float(np.mean([held[name, m, s, b][which] for s in seeds[name, m, b]]))
                         for m in methods if seeds[name, m, b]}
                figures[measure][f"{name}/{b}"] = means
                print(f"{name:14}{b:6} t  " + "".join(f"{means.get(m, math.nan):12.4f}"
                                                      for m in methods))
    figures["difference"] = {}
    print(f"\n{'protein minus rival':34}{'pairs':>6}{'mean':>12}{'5% bound':>12}")
    for rival in methods if "protein" in methods else ():
        for b in budgets(trials) if rival != "protein" else ():
            pairs = {name: [held[name, "protein", s, b][0] - held[name, rival, s, b][0]
                            for s in sorted({*seeds[name, rival, b]} & {*seeds[name, "protein", b]})] for name in names}
            for label, result in [("all", [d for each in pairs.values() for d in each]),
                                 *pairs.items()]:
                if result:
                    mean, bound = float(np.mean(result)), bootstrap_bound(result, rng)
                    figures["difference"][f"{rival}/{label}/{b}"] = {"mean": mean, "bound": bound}
                    print(f"{rival:8}{label:14}{b:6} t  {len(result):8}{mean:12.4f}{bound:12.4f}")
    print(f"\n{'median seconds a run':24}" + "".join(f"{method:>12}" for method in methods))
    figures["seconds"] = {}
    for b in budgets(trials):
        result = {m: [row["seconds"] for row in rows if row["method"] == m and row["trials"] == b]
                 for m in methods}
        figures["seconds"][str(b)] = {m: float(np.median(f)) if f else None
                                      for m, f in result.items()}
        print(f"{b:20} t  " + "".join(f"{np.median(f) if f else math.nan:12.1f}"
                                      for f in result.values()))
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS,
                        help="0 only shows the results that there are")
    parser.add_argument("--trials", type=int, default=max(BUDGETS))
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS,
                        default=["protein", "random", "tpe", "gp"])
    parser.add_argument("--results", type=Path,
                        default=ROOT / "experiments" / "bench_protein.jsonl")
    parser.add_argument("--rivals", type=Path, default=RIVALS, help="runs that count as well")
    parser.add_argument("--times", action="store_true", help="only the seconds of a suggestion")
    args = parser.parse_args()
    if args.times:
        times = {rows: suggestion_seconds(rows) for rows in (500, 2000)}
        for rows, seconds in times.items():
            print(f"{rows:6} observations: {seconds:.2f} s a suggestion")
        print(json.dumps({"suggestion_seconds": times}))
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for path in (args.rivals, args.results) if path.exists()
            for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["problem"] in args.only and row["method"] in args.methods
            and row["source"] == source(row["method"])]
    for seed, name, method in itertools.product(range(args.seeds), args.only, args.methods):
        if not any((row["problem"], row["method"], row["seed"]) == (name, method, seed) and
                   str(args.trials) in row["hypervolume"] for row in rows):
            rows.append(run(name, method, seed, args.trials))
            with open(args.results, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            volume, seconds = rows[-1]["hypervolume"][str(args.trials)], rows[-1]["seconds"]
            print(f"{name} {method} seed {seed}: {volume:.4f}, {seconds} s",
                  file=sys.stderr, flush=True)
    print(json.dumps(show(rows, args.only, args.methods, args.trials)))


if __name__ == "__main__":
    main()
