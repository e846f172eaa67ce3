"""List, show and plot runs.

    python pufferl.py runs                              # the newest first, with their scores
    python pufferl.py runs show latest                  # or a folder, a name or its end, or ENV
    python pufferl.py plot latest                       # the score over the steps, in the terminal
    python pufferl.py diagnose squared                  # why it did not learn, and a page of curves
    python pufferl.py plot RUN RUN --metric entropy --x seconds --output curves.html

`--data-dir FOLDER` is the folder of the runs, by default experiments. A run is running while a
process holds the lock of its folder.
"""

import argparse
import html
import math
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import configuration
import diagnostics
from configuration import Base, command, stem_of
from errors import ConfigError, exit_on_error, require
from loggers import duration, figure, score_of, solved_at, sparkline
from runs import lock
from tools import DARK, aligned

SECTIONS = "env", "vec", "policy", "rnn", "train"  # whose settings are compared
TAIL = 1 << 16  # bytes of metrics.jsonl in which the last score is looked for


# --------------------------------------------------------------------------------------------------
# A run


def age_of(folder):
    """Return the seconds since a run's last entry, or since it began."""
    log = folder / "metrics.jsonl"
    file = log if log.exists() else folder / "config.json"
    return max(0.0, time.time() - file.stat().st_mtime)  # a clock may jump


def is_running(folder):
    """Tell whether a process holds a run's folder; False on a disk without locks."""
    try:
        os.close(lock(folder))
    except BlockingIOError:
        return True
    return False


class Past(NamedTuple):
    """A run's folder and what its files say."""

    folder: Path
    saved: dict  # its config.json
    last: dict  # its last entry, and the last score before it if that has none

    @property
    def state(self):
        """Return running, done, or stopped (before its last step)."""
        if is_running(self.folder):
            return "running"
        is_done = self.last.get("step", 0) >= self.saved["train"].get("total_timesteps", 0)
        return "done" if is_done else "stopped"

    @property
    def score(self):
        return self.last.get("environment/score",
                             self.last.get("environment/episode_return", math.nan))


def read(folder, saved):
    """Return the Past of a run's folder; saved: its settings."""
    entries, last = diagnostics.read_metrics(folder / "metrics.jsonl", TAIL), {}
    while entries and "environment/score" not in last:
        last = {**entries.pop(), **last}
    return Past(folder, saved, last)


def list_runs(data_dir, env_name=None):
    """List the runs of a folder or an environment, the last start or resume first."""
    runs = [read(folder, saved) for folder, saved in configuration.saved_runs(data_dir)
            if env_name in (None, saved["env_name"], saved.get("config_name"),
                            stem_of(saved["env_name"]))]
    return sorted(runs, key=lambda run: (-run.saved["turn"], age_of(run.folder)))


def find(name, data_dir):
    """Find a run by its folder, its name, the end of it, `latest`, or its environment.

    Returns the Past that was started or resumed last. Raises ConfigError.
    """
    if (Path(name) / "config.json").exists():
        return read(Path(name), configuration.read_settings(name))
    runs = [read(*run) for run in configuration.saved_runs(data_dir, f"*{name}")]
    require(len(runs) < 2, f"{name}: this is the end of {len(runs)} runs: "
            f"{', '.join(run.folder.name for run in runs)}.")
    runs = runs or list_runs(data_dir, None if name == "latest" else name)
    require(runs, f"{name}: no folder, no run in {Path(data_dir).resolve()}, and no environment "
            f"with one there; {command('runs')} lists those that there are.")
    return runs[0]


def flatten_settings(saved):
    """Return {"train.gamma": 0.99, ...} of what a run was started with."""
    return {f"{section}.{key}": value for section in SECTIONS
            for key, value in saved.get(section, {}).items()}


def changes(saved):
    """Return {setting: value} of those that differ from the run's defaults.

    None if its config.json has no defaults. A custom network's keywords are among them. "auto"
    equals the number that it chose; a resumed run does not record who chose.
    """
    if "defaults" not in saved:
        return None
    defaults = flatten_settings(saved["defaults"])
    automatic = {"vec.num_envs", "policy.squash", *saved.get("auto", {})}
    is_unrecorded = saved.get("resume") or "auto" not in saved
    return {key: value for key, value in flatten_settings(saved).items()
            if (key in defaults or key.startswith("policy.")) and defaults.get(key, ...) != value
            and not (defaults.get(key) == "auto" and (key in automatic or is_unrecorded))}


def join_settings(settings):
    """Join settings into a line; those of `train` without the section's name."""
    return ", ".join(f"{key.removeprefix('train.')} {value}" for key, value in settings.items())


# --------------------------------------------------------------------------------------------------
# runs, runs show


def table(data_dir, env_name=None):
    """Print a line for each run."""
    rows = [("run", "age", "state", "steps", "score", "seconds", "changed settings")]
    for run in list_runs(data_dir, env_name):
        other = changes(run.saved)
        rows.append((run.folder.name, duration(age_of(run.folder)), run.state,
                     f"{run.last.get('step', 0):,}",
                     "-" if math.isnan(run.score) else figure(run.score),
                     f"{run.last.get('performance/uptime', 0):,.0f}",
                     "-  (it has no defaults: a script's, or older)" if other is None
                     else join_settings(other)))
    if len(rows) == 1:
        of = f" of {env_name}" if env_name else ""
        print(f"no run{of} in {Path(data_dir).resolve()}; "
              f"{command('train', env_name or 'breakout')} makes one")
        return
    for line in aligned(rows, right=("age", "steps", "score", "seconds")):
        print(line)
    newest = rows[1][0] if data_dir == Base.data_dir else str(Path(data_dir, rows[1][0]))
    print(f"\none of them  {command('runs', 'show', newest)}\nits curve    "
          f"{command('plot', newest)}")


def show(run):
    """Print what is known of a run, and what to type next."""
    warnings, entries = replay(run)
    scores = [entry.get("environment/score", math.nan) for entry in entries]
    files, other = [path for path in run.folder.rglob("*") if path.is_file()], changes(run.saved)
    print(f"run          {run.folder}   ({len(files)} files, "
          f"{sum(path.stat().st_size for path in files) / 2**20:,.1f} MiB)")
    print(f"environment  {run.saved['env_name']}")
    print(f"state        {run.state}, last entry {duration(age_of(run.folder))} ago")
    print(f"steps        {run.last.get('step', 0):,} of "
          f"{run.saved['train'].get('total_timesteps', 0):,} in "
          f"{duration(run.last.get('performance/uptime', 0))}")
    if not math.isnan(run.score):
        best = max((score for score in scores if math.isfinite(score)), default=run.score)
        print(f"score        {figure(run.score)}, best entry {figure(best)}   "
              f"{sparkline(scores, 40)}")
    engine = run.saved.get("engine", {})
    versions = [f"{name} {version}" for name, version in run.saved.get("versions", {}).items()]
    print(f"engine       {engine.get('name', '-')}; {', '.join(versions)}")
    print(f"settings     {'-' if other is None else join_settings(other) or 'as they ship'}")
    for step, sentence in sorted(warnings.reported.values()):
        print(f"warning      step {step:,}: {sentence}")
    name, folder = run.saved.get("config_name", run.saved["env_name"]), str(run.folder)
    page = [] if ".py:" in name else ["--eval.web"]  # a user's environment may draw nothing
    print()
    if run.saved["policy"]:  # the command line can make its network
        print(f"{'watch it' if page else 'play it':12} "
              f"{command('eval', name, '--load-model-path', folder, *page)}")
        if run.state == "stopped":
            print(f"resume       {command('train', name, '--resume', folder)}")
    print(f"its curve    {command('plot', folder)}\nits trouble  {command('diagnose', folder)}")


# --------------------------------------------------------------------------------------------------
# diagnose

CURVES = ("environment/score", "environment/episode_return", "environment/episode_length",
          "losses/entropy", "losses/approx_kl", "losses/clipfrac", "losses/value_loss",
          "losses/explained_variance", "losses/grad_norm", "losses/learning_rate",
          "vital/reward_max", "vital/observation_max")


def replay(run):
    """Return (diagnostics.Warnings, entries) of a run."""
    warnings = diagnostics.Warnings(run.saved["train"], run.saved.get("agents"))
    entries = diagnostics.read_metrics(run.folder / "metrics.jsonl")
    for entry in entries:
        warnings.update(entry["step"], entry)
    return warnings, entries


def diagnose(run):
    """Print why a run does not learn, and what it lacks to count as solved.

    Writes FOLDER/diagnosis.html.
    """
    warnings, entries = replay(run)
    reported = sorted(warnings.reported.values())
    for step, sentence in reported:
        print(f"step {step:,}: {sentence}")
    if (level := warnings.below_random_play()) is not None:
        print(f"the last returns are below random play ({level:.3g})")
    if not reported:
        end = "" if warnings.has_ended else ", but no episode has ended, so there is no score"
        print(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, no warnings{end}.")
    page = run.folder / "diagnosis.html"
    page.write_text(draw(run.folder.name, entries, reported, warnings.random_play))
    print(f"curves: {page}")
    metric, least = solved_at(run.saved)
    metrics = {name.removeprefix("environment/"): value for name, value in run.last.items()}
    value = score_of(metrics, metric)
    if least is not None and value < least:
        rising = "; it was still rising, so more steps may do" if warnings.returns_rise() else ""
        print(f"not solved: {metric or 'score'} {figure(value)}, {figure(least)} counts as solved"
              f"{rising}; changed settings: {join_settings(changes(run.saved)) or 'none'}")


def draw(name, entries, reported, random_play=None):
    """Return the page: curves, lines at warnings, a line at random play's return."""
    from plotly.subplots import make_subplots

    names = [metric for metric in CURVES if any(metric in entry for entry in entries)]
    count = max(1, -(-len(names) // 3))
    figure = make_subplots(rows=count, cols=3, subplot_titles=names)
    for i, metric in enumerate(names):
        place = {"row": i // 3 + 1, "col": i % 3 + 1}
        points = [(entry["step"], entry[metric]) for entry in entries if metric in entry]
        x, y = zip(*points, strict=True)
        figure.add_scatter(x=x, y=y, mode="lines", name=metric, **place)
        if metric == "environment/episode_return" and random_play is not None:
            figure.add_hline(y=random_play, line={"dash": "dash", "color": "#fabe3c"}, **place,
                             annotation_text="random play")
        for step, sentence in reported:
            figure.add_vline(x=step, line={"dash": "dot", "color": "#e25454"}, **place,
                             name=sentence)
    figure.update_layout(height=260 * count, showlegend=False, **DARK)
    items = "".join(f"<li>step {step:,}: {html.escape(sentence)}</li>"
                    for step, sentence in reported)
    title = html.escape(name)
    colours = f"background:{DARK['paper_bgcolor']};color:{DARK['font']['color']}"
    return (f"<!doctype html><meta charset='utf-8'><title>{title}</title>"
            f"<body style='font-family:sans-serif;{colours}'><h1>{title}</h1>"
            f"<ul>{items or '<li>No warnings.</li>'}</ul>"
            + figure.to_html(full_html=False, include_plotlyjs=True))


# --------------------------------------------------------------------------------------------------
# plot


class Curve(NamedTuple):
    """A metric of a run."""

    label: str
    x: np.ndarray
    y: np.ndarray


def metric_name(entries, metric):
    """Return the logged name of a metric as typed: "score" or "losses/entropy".

    None: the score. Raises ConfigError if no entry has it.
    """
    require(entries, "no run has an entry yet; the first comes after train.log_interval seconds.")
    known = dict.fromkeys(name for entry in entries for name in entry if name != "step")
    names = (["environment/score", "environment/episode_return"] if metric is None
             else [metric, *(name for name in known if name.partition("/")[2] == metric)])
    for name in names:
        if name in known:
            return name
    raise ConfigError(f"--metric {metric or 'score'}: no entry has it. There are: "
                      f"{', '.join(known)}.")


def curves(runs, metric=None, x="steps"):
    """Return the metric's logged name and a Curve of each run.

    The labels name the settings in which the runs differ.
    """
    logs = [diagnostics.read_metrics(run.folder / "metrics.jsonl") for run in runs]
    name = metric_name([entry for entries in logs for entry in entries], metric)
    over, result = {"steps": "step", "seconds": "performance/uptime"}[x], []
    for run, entries in zip(runs, logs, strict=True):
        points = [(entry[over], entry[name]) for entry in entries
                  if over in entry and math.isfinite(entry.get(name, math.nan))]
        if not points:
            print(f"{run.folder.name}: no entry has {name}")
            continue
        settings = flatten_settings(run.saved)
        others = [flatten_settings(other.saved) for other in runs
                  if other.saved["env_name"] == run.saved["env_name"]]
        different = join_settings({key: value for key, value in settings.items()
                                   if any(other.get(key) != value for other in others)})
        result.append(Curve(run.folder.name + (f": {different}" if different else ""),
                            *np.array(sorted(points)).T))
    return name, result


def plot(runs, metric=None, x="steps", output=None):
    """Print a metric's curve for each run; write a page of them to `output`."""
    require(output is None or str(output).endswith(".html"),
            f"--output {output}: must end in .html.")
    name, lines = curves(runs, metric, x)
    width = min(60, max(20, shutil.get_terminal_size().columns - 50))
    print(f"{name} over {x}")
    for curve in lines:
        print(f"{sparkline(curve.y, width)}  first {figure(curve.y[0])}, last {figure(curve.y[-1])}"
              f" at {figure(curve.x[-1])} {x}, most {figure(curve.y.max())}   {curve.label}")
    if output is not None:
        import plotly.graph_objects as go

        page = go.Figure([go.Scatter(x=curve.x, y=curve.y, name=curve.label) for curve in lines])
        page.update_layout(**DARK, xaxis_title=x, yaxis_title=name, legend={"y": -0.2})
        page.write_html(output)
        print(f"wrote {output}")


# --------------------------------------------------------------------------------------------------
# Command line


def main(argv, program="pufferl.py runs"):
    """Run `runs`, `plot` or `diagnose`; `program` is what errors begin with."""
    verb = program.split()[-1]
    parser = argparse.ArgumentParser(prog=program, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs={"runs": "*", "plot": "+", "diagnose": 1}[verb],
                        metavar="RUN", help="for runs: nothing, ENV or show RUN ...")
    parser.add_argument("--data-dir", default=Base.data_dir)
    if verb == "plot":
        parser.add_argument("--metric",
                            help="a name of docs/metrics.md, with or without its first part")
        parser.add_argument("--x", choices=("steps", "seconds"), default="steps")
        parser.add_argument("--output", help="write a page as well, FILE.html")
    options = parser.parse_intermixed_args(argv)
    names, act = options.runs, None
    # of a run's damaged files
    with exit_on_error(program, (OSError, ValueError, KeyError, TypeError)):
        if verb == "runs":
            act, *names = names or [None]
            require(bool(names) == (act == "show"), f"runs {act}: which run? {command('runs')} "
                    "lists them. Forms: runs, runs ENV, runs show RUN ...")
            if not names:
                return table(options.data_dir, act)
        runs = [find(name, options.data_dir) for name in names]
        if verb == "plot":
            plot(runs, options.metric, options.x, options.output)
        else:
            for run in runs:
                show(run) if act == "show" else diagnose(run)
