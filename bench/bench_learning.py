"""Compare learning in bfloat16 and float32: Breakout, several seeds, one picture.

    python bench/bench_learning.py                  # 2 × 5 runs of 24 million steps, in sequence
    python bench/bench_learning.py --seeds 2 --total-timesteps 12e6

The picture is docs/learning.png. A run is solved at the first epoch whose finished episodes score
`threshold` or more on average. The schedules end with the run, so a shorter one is another
experiment. The last line of the output is one JSON object.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pufferl


@dataclass
class Arguments:
    env: str = "breakout"
    """A C environment."""
    seeds: int = 5
    """Runs of each precision, with seeds 0, 1, ..."""
    total_timesteps: float = 24e6
    """Steps of a run."""
    threshold: float = 800
    """The score that counts as solved."""
    plot: Path = Path(pufferl.__file__).parent / "docs" / "learning.png"
    """Where the drawing goes."""


def learn(a, precision, seed):
    """Return [(steps, mean score of the epoch's finished episodes)] of one run."""
    args = pufferl.load_config(a.env)
    args["train"] |= {"precision": precision, "seed": seed,
                      "total_timesteps": int(a.total_timesteps)}
    args["train"]["log_interval"] = 0  # an entry an epoch
    vecenv = pufferl.load_env(a.env, args)
    policy = pufferl.load_policy(args, vecenv)
    trainer = pufferl.PuffeRL({**args["train"], "env": a.env, "data_dir": None}, vecenv, policy)
    curve = []
    while trainer.epoch < trainer.total_epochs:
        finished = trainer.evaluate()
        trainer.train()
        if finished.get("n"):
            curve.append((trainer.global_step, finished["score"]))
    trainer.release()
    return curve


def solved(curve, threshold):
    return next((steps for steps, score in curve if score >= threshold), None)


def draw(a, curves):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (precision, runs), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        for seed, curve in enumerate(runs):
            axes.plot(*zip(*curve, strict=True), color=colour, alpha=0.8, lw=1,
                      label=None if seed else precision)
            at = solved(curve, a.threshold)
            if at:
                axes.plot(at, a.threshold, "o", color=colour)
    axes.axhline(a.threshold, color="grey", lw=0.5)
    axes.set(xlabel="environment steps", ylabel="score of finished episodes",
             title=f"{a.env}: {a.seeds} seeds of each precision; dots: solved")
    axes.legend()
    figure.savefig(a.plot, dpi=120)


def main():
    a = tyro.cli(Arguments, description=__doc__)
    curves, result = {"float32": [], "bfloat16": []}, {"benchmark": "learning", **vars(a),
                                                       "plot": str(a.plot)}
    for seed in range(a.seeds):
        for precision, runs in curves.items():
            runs.append(learn(a, precision, seed))
            at, last = solved(runs[-1], a.threshold), runs[-1][-1][1]
            print(f"{precision:9} seed {seed}: solved at {f'{at:,}' if at else 'no'} steps, "
                  f"{last:.0f} at the end", flush=True)
            draw(a, curves)
    for precision, runs in curves.items():
        steps = [solved(curve, a.threshold) for curve in runs]
        result[precision] = {"solved": steps, "end": [curve[-1][1] for curve in runs]}
        known = [at for at in steps if at]
        if known:
            print(f"{precision:9} solved {len(known)} of {a.seeds}, median "
                  f"{statistics.median(known):,.0f} steps, {min(known):,} to {max(known):,}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
