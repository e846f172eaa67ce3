"""The runs so far: a table, one run in full, their curves, and how to remove some.

    python pufferl.py runs                              # the newest first: steps, score, what differs from the shipped
    python pufferl.py runs show latest                  # or a run's folder, its name, the end of its name, or ENV
    python pufferl.py runs rm breakout_20260101-120000-a1b2c3        # asks first; --yes does not
    python pufferl.py plot latest                         # the score over the steps, in the terminal
    python pufferl.py diagnose squared                  # why it did not learn, and a page of its curves
    python pufferl.py plot RUN RUN --metric entropy --x seconds --output curves.html

`--data-dir FOLDER` is where the runs lie if it is not experiments. A run that a process writes to
is running: its folder is locked for as long as that lives.
"""

import argparse
import contextlib
import functools
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import configuration
import diagnostics
from configuration import Base, command, stem_of
from errors import ConfigError, exit_on_error
from loggers import aligned, duration, figure, score_of, solved_at, sparkline
from runs import is_running

SECTIONS = "env", "vec", "policy", "rnn", "train"  # whose settings are compared
TAIL = 1 << 16  # bytes of metrics.jsonl in which the last score stands


# --------------------------------------------------------------------------------------------------
# A run


class Past(NamedTuple):
    """A run's folder and what its files say."""

    folder: Path
    saved: dict  # its config.json
    last: dict  # its last entry, and the last score before it if that has none

    @property
    def state(self):
        """running, done, or stopped before its last step."""
        if is_running(self.folder):
            return "running"
        return ("done" if self.last.get("step", 0) >= self.saved["train"]["total_timesteps"]
                else "stopped")

    @property
    def age(self):
        """Seconds since its last entry, or since it began."""
        path = self.folder / "metrics.jsonl"
        return time.time() - (path if path.exists() else self.folder / "config.json").stat().st_mtime

    @property
    def score(self):
        return self.last.get("environment/score",
                             self.last.get("environment/episode_return", math.nan))


def read(folder):
    """The Past of a folder; ConfigError if it is no run's."""
    try:
        saved = json.loads((folder / "config.json").read_text())
        saved["env_name"], saved["train"]["total_timesteps"] + 0  # no other JSON file has it
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder}: not a run's folder, or its config.json is damaged "
                          f"({type(error).__name__}: {error}).") from None
    entries, last = diagnostics.read_metrics(folder / "metrics.jsonl", TAIL), {}
    while entries and "environment/score" not in last:
        last = {**entries.pop(), **last}
    return Past(folder, saved, last)


def every(data_dir, env_name=None):
    """All runs in a folder, or those of an environment, the newest first."""
    found = []
    for path in Path(data_dir).glob("*/config.json"):
        with contextlib.suppress(ConfigError):
            found.append(read(path.parent))
    if env_name is not None:
        found = [run for run in found
                 if env_name in (run.saved["env_name"], run.saved.get("config_name"), stem_of(run.saved["env_name"]))]
    return sorted(found, key=lambda run: run.age)


def find(name, data_dir):
    """The Past of what was typed: a folder, a run's name or the end of it, latest, or an
    environment, whose newest run it then is."""
    folder = Path(data_dir)
    if Path(name).is_dir():
        return read(Path(name))
    if (folder / name).is_dir():
        return read(folder / name)
    ends = [path for path in folder.glob(f"*{name}") if (path / "config.json").exists()]
    if len(ends) > 1:
        raise ConfigError(f"{name}: this is the end of {len(ends)} runs: "
                          f"{', '.join(path.name for path in ends)}.")
    found = [read(path) for path in ends] or every(folder, None if name == "latest" else name)
    if not found:
        raise ConfigError(f"{name}: no folder, no run in {folder.resolve()}, and no environment "
                          f"with one there; {command('runs')} lists those that there are.")
    same = [run for run in found if run.saved["env_name"] == found[0].saved["env_name"]]
    # as --resume latest has it
    return max(same, key=lambda run: (configuration.turn_of(run.folder), -run.age))


def settings_of(saved):
    """{"train.gamma": 0.99, ...} of what a run was started with."""
    return {f"{section}.{key}": value for section in SECTIONS
            for key, value in saved.get(section, {}).items()}


@functools.cache
def shipped(name):
    """The settings of an environment as they ship today; None if it is gone, or is a user's file: a
    list of runs must not run that file."""
    if ".py" in name or name.endswith(".h"):
        return None
    try:
        values = configuration.resolve(name)[1]
    except (Exception, SystemExit):
        # for example a missing package, or a header that does not compile
        return None
    return settings_of(json.loads(json.dumps(values, default=str)))


def changes(saved):
    """{setting: value} of those that differ from the shipped ones, or that only a network of one's own has. Of a user's
    environment, or of one that cannot be made here, these are the defaults that the run began with; None if it has not
    kept them. "auto" equals the number that it chose, and 1 in vec.num_envs; a resumed run, or a script's, does not
    know who chose it."""
    ours = shipped(saved.get("config_name", saved["env_name"])) or settings_of(saved.get("defaults", {}))
    chosen = {"vec.num_envs", "policy.squash", *saved.get("auto", {})}
    if not ours:
        return None
    return {key: value for key, value in settings_of(saved).items()
            if (key in ours or key.startswith("policy.")) and ours.get(key, ...) != value
            and not (ours.get(key) == "auto" and (key in chosen or saved.get("resume") or "auto" not in saved))}


def listed(settings):
    """Settings in a line; those of `train` without the section's name."""
    return ", ".join(f"{key.removeprefix('train.')} {value}" for key, value in settings.items())


# --------------------------------------------------------------------------------------------------
# runs, runs show, runs rm


def table(data_dir, env_name=None):
    """Print a line for each run."""
    rows = [("run", "age", "state", "steps", "score", "seconds", "other than shipped")]
    for run in every(data_dir, env_name):
        other = changes(run.saved)
        rows.append((run.folder.name, duration(run.age), run.state, f"{run.last.get('step', 0):,}",
                     "-" if math.isnan(run.score) else figure(run.score),
                     f"{run.last.get('performance/uptime', 0):,.0f}",
                     "-  (a script's, or older: its defaults were not kept)" if other is None else listed(other)))
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
    """Print all that is known of a run, and what to type next."""
    spoken, entries = (diagnostics.read(run.folder) if (run.folder / "metrics.jsonl").exists()
                       else (None, []))
    scores = [entry.get("environment/score", math.nan) for entry in entries]
    files, other = [path for path in run.folder.rglob("*") if path.is_file()], changes(run.saved)
    print(f"run          {run.folder}   ({len(files)} files, "
          f"{sum(p.stat().st_size for p in files) / 2**20:,.1f} MiB)")
    print(f"environment  {run.saved['env_name']}")
    print(f"state        {run.state}, last entry {duration(run.age)} ago")
    print(f"steps        {run.last.get('step', 0):,} of "
          f"{run.saved['train']['total_timesteps']:,} in "
          f"{duration(run.last.get('performance/uptime', 0))}")
    if not math.isnan(run.score):
        best = max((score for score in scores if math.isfinite(score)), default=run.score)
        print(f"score        {figure(run.score)}, best entry {figure(best)}   "
              f"{sparkline(scores, 40)}")
    engine = run.saved.get("engine", {})
    print(f"engine       {engine.get('name', '-')}; "
          + ", ".join(f"{name} {version}"
                      for name, version in run.saved.get("versions", {}).items()))
    print(f"settings     {'-' if other is None else listed(other) or 'as they ship'}")
    for entry in entries:
        spoken.update(entry["step"], entry)
    for step, sentence in sorted(spoken.reported.values()) if spoken else ():
        print(f"warning      step {step:,}: {sentence}")
    name, folder = run.saved.get("config_name", run.saved["env_name"]), str(run.folder)
    page = [] if ".py:" in name else ["--eval.web"]  # a user's file, of which it is not known whether it draws
    print(f"\n{'watch it' if page else 'play it':12} {command('eval', name, '--load-model-path', folder, *page)}")
    if run.state == "stopped":
        print(f"resume       {command('train', name, '--resume', folder)}")
    print(f"its curve    {command('plot', folder)}\nits trouble  {command('diagnose', folder)}")


def unsolved(run, rises):
    """A line that says how far a run is from what counts as solved, and with which settings of one's own; nothing if it
    is solved, or nobody knows what counts. rises: whether its score still rose."""
    other = changes(run.saved)
    metric, least = (None, None) if other is None else solved_at(run.saved)
    value = score_of({name.removeprefix("environment/"): value for name, value in run.last.items()}, metric)
    if least is None or not value < least:
        return ""
    return (f"not solved: {metric or 'score'} {figure(value)}, {figure(least)} counts as solved"
            f"{'; it was still rising, so more steps may do' if rises else ''}; settings other than shipped: "
            f"{listed(other) or 'none'}\n")


def remove(found, yes):
    """Remove runs' folders, each after a question unless `yes`. ConfigError, and nothing is
    removed, if one of them is running or has other runs in it."""
    found = list({run.folder.resolve(): run for run in found}.values())
    for run in found:
        if run.folder.is_symlink():
            raise ConfigError(f"{run.folder}: a link to a run; name the run itself.")
        if is_running(run.folder):
            raise ConfigError(f"{run.folder}: this run is running. Stop it first (Ctrl-C "
                              "where it runs).")
        if others := [path.parent.name for path in run.folder.glob("*/config.json")]:
            raise ConfigError(f"{run.folder}: other runs are in it ({', '.join(others[:3])}). Name these.")
    for run in found:
        what = f"{run.folder}: {run.last.get('step', 0):,} steps, score {figure(run.score)}"
        if not yes:
            try:
                wanted = input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")
            except EOFError:
                raise ConfigError("nobody answers; --yes removes without a question.") from None
            if not wanted:
                print("kept")
                continue
        shutil.rmtree(run.folder)
        print(f"removed {what}")


# --------------------------------------------------------------------------------------------------
# plot

class Curve(NamedTuple):
    """A metric of a run."""

    label: str
    x: np.ndarray
    y: np.ndarray


def metric_name(entries, metric):
    """The logged name of a metric as it was typed, "score" or "losses/entropy"; None takes the
    score. ConfigError if none has it, with those that there are."""
    known = dict.fromkeys(name for entry in entries for name in entry if name != "step")
    wanted = ([f"environment/{name}" for name in ("score", "episode_return")] if metric is None
              else [metric])
    for name in wanted:
        found = [one for one in known if name in (one, one.partition("/")[2])]
        if found:
            return found[0]
    raise ConfigError(f"--metric {metric or 'score'}: no entry has it. There are: "
                      f"{', '.join(known) or 'none'}.")


def curves(found, metric=None, x="steps"):
    """(the metric's logged name, [Curve]) of some runs, labelled with the
    settings in which they differ."""
    logs = [diagnostics.read(run.folder)[1] for run in found]
    name = metric_name([entry for entries in logs for entry in entries], metric)
    over, result = {"steps": "step", "seconds": "performance/uptime"}[x], []
    for run, entries in zip(found, logs, strict=True):
        points = [(entry[over], entry[name]) for entry in entries
                  if over in entry and math.isfinite(entry.get(name, math.nan))]
        if not points:
            raise ConfigError(f"{run.folder}: no entry has {name}.")
        own = settings_of(run.saved)
        others = [settings_of(other.saved) for other in found
                  if other.saved["env_name"] == run.saved["env_name"]]
        different = listed({key: own[key] for key in own
                            if any(other.get(key) != own[key] for other in others)})
        result.append(Curve(run.folder.name + (f": {different}" if different else ""),
                            *np.array(sorted(points)).T))
    return name, result


def plot(found, metric=None, x="steps", output=None):
    """Print a metric's curve for each of some runs; write a page of them to `output`."""
    if output is not None and Path(output).suffix != ".html":
        raise ConfigError(f"--output {output}: must end in .html.")
    name, drawn = curves(found, metric, x)
    width = min(60, max(20, shutil.get_terminal_size().columns - 50))
    print(f"{name} over {x}")
    for curve in drawn:
        print(f"{sparkline(curve.y, width)}  first {figure(curve.y[0])}, last {figure(curve.y[-1])} at "
              f"{figure(curve.x[-1])} {x}, most {figure(curve.y.max())}   {curve.label}")
    if output is not None:
        import plotly.graph_objects as go

        page = go.Figure([go.Scatter(x=curve.x, y=curve.y, name=curve.label) for curve in drawn])
        page.update_layout(**diagnostics.DARK, xaxis_title=x, yaxis_title=name, legend={"y": -0.2})
        page.write_html(output)
        print(f"wrote {output}")


# --------------------------------------------------------------------------------------------------
# Command line


def parse(verb, argv, program):
    """The options of `runs`, `plot` or `diagnose`."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    count = {"runs": "*", "plot": "+", "diagnose": 1}[verb]
    parser.add_argument("runs", nargs=count, metavar="RUN",
                        help="for runs: nothing, ENV, show RUN or rm RUN ...")
    parser.add_argument("--data-dir", default=Base.data_dir)
    if verb == "runs":
        parser.add_argument("--yes", action="store_true", help="rm asks nothing")
    elif verb == "plot":
        parser.add_argument("--metric",
                            help="a name of docs/metrics.md, with or without its first part")
        parser.add_argument("--x", choices=("steps", "seconds"), default="steps")
        parser.add_argument("--output", help="write a page as well, FILE.html")
    return parser.parse_intermixed_args(argv)  # rm --yes RUN, rm RUN --yes


def main(argv=None, program="pufferl.py runs"):
    """The command line: runs, plot or diagnose; program: what errors begin with."""
    verb, *argv = list(sys.argv[1:] if argv is None else argv) or ["runs"]
    if verb not in ("runs", "plot", "diagnose"):
        sys.exit(f"{program}: runs, plot or diagnose? See {program} runs --help")
    options = parse(verb, argv, program)
    with exit_on_error(program, (OSError, ValueError, KeyError)):  # a run's damaged files
        if verb == "diagnose":
            name, = options.runs
            folder = name if Path(name).is_dir() else find(name, options.data_dir).folder
            rises = diagnostics.diagnose(folder).score_rises()
            with contextlib.suppress(ConfigError):  # its config.json may be of another version
                print(end=unsolved(read(Path(folder)), rises))
            return None
        if verb == "plot":
            return plot([find(name, options.data_dir) for name in options.runs],
                        options.metric, options.x, options.output)
        what, *rest = options.runs or [None]
        if what in ("show", "rm"):
            if not rest or (what == "show" and len(rest) > 1):
                raise ConfigError(f"runs {what}: which run? {command('runs')} lists them.")
            found = [find(name, options.data_dir) for name in rest]
            return show(found[0]) if what == "show" else remove(found, options.yes)
        if rest:
            raise ConfigError(f"runs {what}: expected nothing, an environment, show RUN or rm RUN.")
        table(options.data_dir, what)
