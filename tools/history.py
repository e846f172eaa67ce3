"""The runs so far: a table, one run in full, their curves, and how to remove some.

    python pufferl.py runs                              # the newest first: steps, score, what differs from the shipped
    python pufferl.py runs show latest                  # or a run's folder, its name, the end of its name, or ENV
    python pufferl.py runs rm breakout_20260101-120000-a1b2c3        # asks first; --yes does not
    python pufferl.py plot latest                         # the score over the steps, in the terminal
    python pufferl.py diagnose squared                  # why it did not learn, and a page of its curves
    python pufferl.py plot RUN RUN --metric entropy --x seconds --output curves.html      # or .png, .svg, .pdf

`--data-dir FOLDER` is where the runs lie if it is not experiments. A run that a process writes to
is running: its folder is locked for as long as that lives.
"""

import argparse
import contextlib
import functools
import json
import math
import shutil
import string
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
    last = {}
    with contextlib.suppress(OSError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        for line in reversed(file.read().splitlines()):
            # cut off by a crash, or by the seek
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                last = {**json.loads(line), **last}
                if "environment/score" in last:
                    break
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
        spoken.see(entry["step"], entry)
    for step, sentence in sorted(spoken.said.values()) if spoken else ():
        print(f"sign         step {step:,}: {sentence}")
    name, folder = run.saved.get("config_name", run.saved["env_name"]), str(run.folder)
    page = [] if ".py:" in name else ["--eval.web"]  # a user's file, of which it is not known whether it draws
    print(f"\n{'watch it' if page else 'play it':12} {command('eval', name, '--load-model-path', folder, *page)}")
    if run.state == "stopped":
        print(f"go on        {command('train', name, '--resume', folder)}")
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
    removed, if one of them is running or no folder of its own."""
    found = list({run.folder.resolve(): run for run in found}.values())
    for run in found:
        if run.folder.is_symlink():
            raise ConfigError(f"{run.folder}: a link to a run; name the run itself.")
        if is_running(run.folder):
            raise ConfigError(f"{run.folder}: this run is running. Stop it first (Ctrl-C "
                              "where it runs).")
        others = [path.parent.name for path in run.folder.glob("*/config.json")]
        if others:
            raise ConfigError(f"{run.folder}: other runs lie in it "
                              f"({', '.join(others[:3])}); name these.")
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

COLORS = "cyan", "magenta", "yellow", "green", "red", "blue", "white"
LETTERS = string.ascii_lowercase  # at the end of each curve
# of a Braille character, 4 × 2
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
SIZE = 72, 16  # characters of the picture, if the terminal is not smaller


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
    for run in found:
        if not (run.folder / "metrics.jsonl").exists():
            raise ConfigError(f"{run.folder}: nothing was logged yet.")
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


def draw(drawn, width, height):
    """Curves in Braille: (rows of (character, number of the curve or None), low y,
    high y, low x, high x)."""
    x = np.concatenate([curve.x for curve in drawn])
    y = np.concatenate([curve.y for curve in drawn])
    (left, right), (low, high) = (x.min(), x.max()), (y.min(), y.max())
    dots, owner, ends = np.zeros((height, width), int), np.full((height, width), -1), []
    columns = np.linspace(left, right, 2 * width)
    for number, curve in enumerate(drawn):
        inside = (columns >= curve.x[0]) & (columns <= curve.x[-1])
        inside[np.searchsorted(columns, curve.x).clip(0, 2 * width - 1)] = True
        values = np.interp(columns, curve.x, curve.y)
        rows = np.round((4 * height - 1) * (high - values) / ((high - low) or 1)).astype(int)
        before = None
        for column in np.flatnonzero(inside):
            first, last = sorted((rows[column], rows[column] if before is None else before))
            for row in range(first, last + 1):
                dots[row // 4, column // 2] |= DOTS[row % 4, column % 2]
                owner[row // 4, column // 2] = number
            before = rows[column]
        ends.append((rows[column] // 4, column // 2))
    lines = [[(chr(0x2800 + bits) if bits else " ", None if number < 0 else number)
              for bits, number in zip(*line, strict=True)]
             for line in zip(dots.tolist(), owner.tolist(), strict=True)]
    if len(drawn) > 1:  # which is which, if there are no colours
        for number, (row, column) in enumerate(ends):
            lines[row][column] = LETTERS[number % len(LETTERS)], number
    return lines, low, high, left, right


def print_curves(name, drawn, x):
    """The curves in the terminal, a colour each."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width, height = min(SIZE[0], max(20, shutil.get_terminal_size().columns - 13)), SIZE[1]
    lines, low, high, left, right = draw(drawn, width, height)
    ticks = {0: figure(high), height // 2: figure((low + high) / 2), height - 1: figure(low)}
    console.print(f"{name} over {x}")
    for number, line in enumerate(lines):
        text = Text(f"{ticks.get(number, ''):>10} │")
        for character, curve in line:
            text.append(character, None if curve is None else COLORS[curve % len(COLORS)])
        console.print(text)
    console.print(f"{'':>10} └{'─' * width}\n{'':>12}{figure(left)}{figure(right):>{width - len(figure(left))}}")
    for number, curve in enumerate(drawn):
        letter = LETTERS[number % len(LETTERS)] if len(drawn) > 1 else "━"
        console.print(Text(f"  {letter} {curve.label}   (last {figure(curve.y[-1])}, most "
                           f"{figure(curve.y.max())})", COLORS[number % len(COLORS)]))


def write_curves(name, drawn, x, path):
    """The curves as a picture, or as an .html that a browser shows."""
    if path.suffix == ".html":
        import plotly.graph_objects as go

        figure = go.Figure([go.Scatter(x=curve.x, y=curve.y, name=curve.label) for curve in drawn])
        figure.update_layout(**diagnostics.DARK, xaxis_title=x, yaxis_title=name, legend={"y": -0.2})
        figure.write_html(path)
        return
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"--output {path}: a picture needs the package matplotlib: pip install matplotlib "
                          "(.html needs nothing).") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(9, 5))
    for curve in drawn:
        axes.plot(curve.x, curve.y, label=curve.label)
    axes.set(xlabel=x, ylabel=name)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    picture.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(picture)


def plot(found, metric=None, x="steps", output=None):
    """Draw a metric of some runs in the terminal, and to a file."""
    endings = ".html", ".png", ".svg", ".pdf"
    if output is not None and Path(output).suffix not in endings:
        raise ConfigError(f"--output {output}: must end in {', '.join(endings)}.")
    name, drawn = curves(found, metric, x)
    print_curves(name, drawn, x)
    if output is not None:
        write_curves(name, drawn, x, Path(output))
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
        parser.add_argument("--output", help="write a picture as well: .html, or .png, .svg and "
                            ".pdf with matplotlib")
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
