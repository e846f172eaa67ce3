"""Log metrics to TensorBoard, Weights & Biases, a file and the terminal.

    python pufferl.py train breakout                             # TensorBoard and metrics.jsonl
    python pufferl.py train breakout --wandb --tag baseline      # and Weights & Biases
    python pufferl.py train breakout --logger none               # metrics.jsonl

    from pufferl import PuffeRL, WandbLogger                     # or from a script
    trainer = PuffeRL(config, vecenv, policy, WandbLogger(project="pufferl", name="first try"))

A custom logger is a class with NoLogger's four methods. docs/metrics.md describes the metrics. The
package wandb reads its token from WANDB_API_KEY; no file contains it. With WANDB_MODE=offline a run
stays on this machine until `wandb sync`.
"""

import importlib
import json
import math
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import diagnostics
import environments
import processes
from arena import compile_timer
from auto import plural
from configuration import Base, command, solved
from errors import ConfigError, require

# --------------------------------------------------------------------------------------------------
# Loggers


class NoLogger:
    """Log nothing; the interface of the other loggers."""

    def log(self, metrics, step):
        """Log {"losses/entropy": 1.3, ...} at an environment step of all agents."""

    def config(self, settings):
        """Log the resolved configuration, nested dicts, once before the first metrics."""

    def artifact(self, path):
        """Log a model file, which may be removed when there are newer ones."""

    def close(self): ...


def check_logger(logger):
    """Return the logger. Raises ConfigError if it lacks one of NoLogger's methods."""
    missing = [name for name in vars(NoLogger)
               if not name.startswith("_") and not callable(getattr(logger, name, None))]
    require(not missing, f"logger: {type(logger).__name__} has no {' and no '.join(missing)}. "
            "Derive it from pufferl.NoLogger, which has all four methods.")
    return logger


class LoggerList(list):
    """Several loggers as one."""

    def __getattr__(self, method):
        return lambda *arguments: [getattr(logger, method)(*arguments) for logger in self]


class JsonLines(NoLogger):
    """One line of JSON per entry, {"step": ..., name: value, ...}, appended to a file.

    first_step: the step at which a resumed run continues. Later entries and torn lines, which a
    crash left, are removed. While the disk is full, entries are lost, but no line is torn.
    """

    def __init__(self, path, first_step=0):
        self.path = Path(path)
        if self.path.exists():
            text = "".join(json.dumps(entry) + "\n"
                           for entry in diagnostics.read_metrics(self.path)
                           if entry["step"] <= first_step)
            processes.write_whole(self.path, lambda file: file.write(text.encode()))

    def log(self, metrics, step):
        line, error = (json.dumps({"step": step, **metrics}) + "\n").encode(), "the disk is full"
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                if file.write(line) == len(line):
                    return
                file.truncate(size)
        except OSError as problem:
            error = problem
        processes.say_once(f"{self.path}: an entry is lost ({error}). Training continues.",
                           sys.stderr)


class TensorBoardLogger(NoLogger):
    """TensorBoard event files in a folder: tensorboard --logdir experiments."""

    def __init__(self, folder, first_step=0):
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _ignore_writer_errors
        # purges what a crash left
        self.writer = SummaryWriter(str(folder), purge_step=first_step and first_step + 1)

    def _call(self, method, *arguments):
        """Call the writer, which reports errors of its thread, such as a full disk, later."""
        try:
            if self.writer is not None:
                getattr(self.writer, method)(*arguments)
        except OSError as error:
            self.writer = None
            processes.say(f"TensorBoard: no more entries are written ({error}). Training "
                          "continues.", sys.stderr)

    def log(self, metrics, step):
        for name, value in metrics.items():
            self._call("add_scalar", name, value, step)

    def config(self, settings):
        text = json.dumps(settings, indent=2, default=str)
        self._call("add_text", "config", f"```json\n{text}\n```")

    def close(self):
        self._call("close")


def _ignore_writer_errors(info, hook=threading.excepthook):
    """Ignore errors of TensorBoard's thread, which the writer's next call reports."""
    is_writer = type(info.thread).__module__.startswith("tensorboard")
    if not (is_writer and isinstance(info.exc_value, OSError)):
        hook(info)


class WandbLogger(NoLogger):
    """Weights & Biases (pip install wandb); the x axis is `global_step`.

    project: its name, or all settings from load_config, with project, entity, group and tag.
    run_id: continue the run with that id, if there is one. folder: of wandb's files (default:
    ./wandb). Raises ConfigError without the package, or if it does not start, as without a key.
    """

    def __init__(self, project="pufferl", entity=None, name=None, config=None, *, group=None,
                 tag=None, run_id=None, folder=None):
        args = project if isinstance(project, dict) else {"project": project}
        tag = tag or args.get("tag")
        try:
            self.wandb = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError("--wandb: needs the package wandb. pip install wandb") from None
        try:
            self.run = self.wandb.init(
                project=args["project"], entity=entity or args.get("entity"),
                name=name or args.get("env_name"), group=group or args.get("group"),
                config=project if args is project and config is None else config, id=run_id,
                tags=[tag] if tag else None, dir=folder, resume="allow" if run_id else None)
        except self.wandb.errors.Error as error:
            raise ConfigError(f"Weights & Biases: {error} (WANDB_MODE=offline needs no "
                              "account)") from None
        # A resumed run may log steps again, but wandb's own counter cannot go back.
        self.run.define_metric("*", step_metric="global_step")

    def log(self, metrics, step):
        self.run.log({"global_step": step, **metrics})

    def config(self, settings):
        self.run.config.update(settings, allow_val_change=True)

    def artifact(self, path):
        model = self.wandb.Artifact(f"model-{self.run.id}", type="model")
        model.add_file(str(path))  # which copies it
        self.run.log_artifact(model)

    def close(self):
        self.run.finish()


def make_logger(args, folder, first_step=0):
    """Return the loggers of the base section as one.

    folder: the run's; None: no files. Raises ConfigError.
    """
    loggers, name = LoggerList(), folder and Path(folder).name
    if args["wandb"]:
        loggers.append(WandbLogger(args, name=name, run_id=name, folder=folder and str(folder)))
    if args["logger"] == "tensorboard" and folder is not None:
        # made last, because it leaves a folder if another one fails
        try:
            loggers.append(TensorBoardLogger(Path(folder) / "tensorboard", first_step))
        except OSError as error:
            raise ConfigError(f"cannot write {folder}: {error}. Set --data-dir to a folder on a "
                              "disk with room for checkpoints.") from None
    return loggers


# --------------------------------------------------------------------------------------------------
# The terminal: compilation, progress, results

COMPILING = ("compiling kernels, once for each kind of network: up to a minute or two; the next "
             "start takes seconds")


class Dashboard:
    """Show progress, as a live panel or lines, and the result.

    solved_at: from the function `solved_at`.
    """

    def __init__(self, solved_at=(None, None)):
        self.console = Console()
        self.live = None
        self.first = None  # seconds and epochs at the first call, which leaves out the start
        self.scores = []  # one per call
        self.solved_at = solved_at

    def show(self, trainer):
        """Show a trainer's progress."""
        if self.first is None:
            self.first = trainer.uptime, trainer.epoch
            if compile_timer.duration > 1:
                processes.say(f"kernels were compiled for {duration(compile_timer.duration)}, which "
                              "does not count as training time")
        self.scores.append(score_of(trainer.environment, self.solved_at[0]))
        if not self.console.is_terminal:
            done = 100 * trainer.epoch / max(1, trainer.total_epochs)
            score = f"score {self.scores[-1]:.3f}  " if math.isfinite(self.scores[-1]) else ""
            processes.say(f"{done:5.1f}% steps {trainer.global_step:,}  "
                          f"sps {trainer.last_sps:,.0f}  {score}{self.time_left(trainer)}")
            return
        try:
            if self.live is None:
                self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
                self.live.start()
            self.live.update(self.panel(trainer), refresh=True)
        except OSError:  # the terminal was closed
            processes.discard_output()

    def close(self):
        """Leave the live panel as it is."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def time_left(self, trainer):
        """Return the time gone and left, in words, at the pace since the first call."""
        seconds, epoch = self.first
        gone = f"{duration(trainer.uptime)} gone"
        if trainer.epoch <= epoch:
            return gone
        pace = (trainer.uptime - seconds) / (trainer.epoch - epoch)
        return f"{gone}, {duration((trainer.total_epochs - trainer.epoch) * pace)} left"

    def panel(self, trainer):
        """Return the live panel, as a rich renderable that fits the console.

        Green is solved, yellow is a warning.
        """
        metric, threshold = self.solved_at
        name, width, score = metric or "score", self.console.width - 4, self.scores[-1]
        goal = "" if threshold is None else f"  {figure(threshold)} counts as solved"
        style = "bold green" if threshold is not None and score >= threshold else "bold"
        curve = sparkline(self.scores, max(4, min(40, width - len(f" {name} {'':10} {goal}"))))
        grid = Table.grid(expand=True)
        grid.add_row(Text.assemble(f" {name} ", (f"{figure(score):>10} ", style), (curve, "cyan"),
                                   goal))
        grid.add_row(Text(f" {self.time_left(trainer)}"))
        grid.add_row(ProgressBar(total=max(1, trainer.total_epochs), completed=trainer.epoch))
        for _, sentence in sorted(trainer.warnings.reported.values()):
            grid.add_row(Text(sentence, "yellow"))
        grid.add_row(Columns([table(title, rows) for title, rows in tables_of(trainer)]))
        lines = self.console.render_lines(grid, self.console.options.update(width=width))
        return Panel(grid, title=f"[bold]PuffeRL[/] {trainer.env_name}", border_style="cyan",
                     subtitle="[dim]docs/metrics.md explains these words",
                     height=min(self.console.height, len(lines) + 2))

    def closing(self, trainer, args, model):
        """Yield lines with the result of a training and what to type next.

        model: the path of its last model.
        """
        name, folder, (metric, threshold) = args["config_name"], trainer.run_folder, self.solved_at
        score = score_of(trainer.environment, metric)
        seconds = trainer.statistics.entry.get("performance/uptime", trainer.uptime)
        yield (f"{trainer.global_step:,} steps in {duration(seconds)} "
               f"({trainer.global_step / max(seconds, 1e-9):,.0f} steps/s)")
        if math.isfinite(score):
            episodes = plural(round(trainer.environment.get("n", 0)), "episode")
            if threshold is not None:
                verdict = "solved" if score >= threshold else "not solved yet"
                episodes += f": {verdict} ({figure(threshold)} counts as solved)"
            yield f"{metric or 'score':12} {figure(score)} in the last {episodes}"
            if (level := trainer.warnings.below_random_play()) is not None:
                yield f"{'':12} below random play ({figure(level)})"
        elif trainer.warnings.has_ended:
            source = ("log does not have it: LOG_EPISODE counts an episode"
                      if hasattr(trainer.vecenv, "library") else "infos do not have it")
            yield f"{metric or 'score':12} none: the environment's {source}"
        elif trainer.warnings.first and not trainer.warnings.is_late_start:
            steps = trainer.global_step // trainer.warnings.agents
            yield f"score        none: no episode has ended in {steps:,} steps of each agent"
        for step, sentence in sorted(trainer.warnings.reported.values()):
            yield f"warning      step {step:,}: {sentence}"
        if folder is None:
            return
        yield f"checkpoint   {model}"
        if args["logger"] == "tensorboard":
            yield (f"tensorboard  {folder / 'tensorboard'}   "
                   f"(tensorboard --logdir {args['data_dir']})")
        run = "latest" if args["data_dir"] == Base.data_dir else str(folder)
        if trainer.epoch < trainer.total_epochs:
            yield f"resume       {command('train', name, '--resume', run)}"
        creator = environments.load_creator(args["env_name"])
        draws = creator is None or environments.can_draw(trainer.vecenv.driver_env,
                                                         creator.picture_settings)
        words = command("eval", name, "--load-model-path", run, *["--eval.web"] * draws)
        yield f"{'watch it' if draws else 'play it':12} {words}"
        yield f"tune it      {command(name, script='protein.py')}"
        if not Path(name.partition(":")[0]).suffix:  # an environment of this project
            yield (f"custom       {command('train', 'my_file.py:make_env')}   (or one in C: "
                   "docs/write_an_environment.md)")


def tables_of(trainer):
    """Return [(title, [(name, value)])] of the panel's tables."""
    stages = trainer.statistics.stages
    total = max(sum(stages.values()), 1e-9)
    return [
        ("losses", [(name, float(value)) for name, value in trainer.losses.items()]),
        ("environment", [(name, float(value)) for name, value in trainer.environment.items()]),
        ("run", [
            ("engine", trainer.engine.name), ("agents", f"{trainer.num_agents:,}"),
            ("parameters", f"{sum(p.numel() for p in trainer.policy.parameters()):,}"),
            ("steps", f"{trainer.global_step:,}"), ("steps/s", f"{trainer.last_sps:,.0f}"),
            ("epoch", f"{trainer.epoch} of {trainer.total_epochs}"),
            ("CPU", f"{psutil.cpu_percent():.0f}%"),
            ("memory", f"{psutil.Process().memory_info().rss / 2**20:,.0f} MiB"),
            *trainer.buffers.usage().items()]),
        ("time", [(name, f"{100 * seconds / total:.0f}%") for name, seconds in stages.items()])]


def solved_at(args):
    """Return (metric, threshold) from config/ENV.ini, or (None, None).

    None if the file has no [solved], or if a setting of the environment differs from the shipped
    one, for which the threshold was measured.
    """
    known = solved(args["config_name"]) if "defaults" in args else None  # not in a script
    is_shipped = known is not None and all(
        args["env"].get(key) == value for key, value in args["defaults"]["env"].items()
        if key != "num_envs")
    return known.metric if is_shipped else (None, None)


def score_of(environment, metric=None):
    """Return `metric`, or the score, or the return; NaN before an episode has ended."""
    score = environment.get("score", environment.get("episode_return", math.nan))
    return environment.get(metric, score)


def duration(seconds):
    """Return seconds in words, such as 2m 05s."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def figure(value):
    """Format a number for people: 4,096 and not 4.1e+03."""
    if not 1000 <= abs(value) < 1e15:  # or not finite
        return f"{value:.2g}" if 0 < abs(value) < 0.001 else f"{value:.4g}"
    return f"{value:,.0f}"


def sparkline(values, width):
    """Return a curve of up to `width` characters, means of neighbouring values."""
    values = np.array([value for value in values if math.isfinite(value)])
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    low, high = means.min(), means.max()
    heights = np.round(7 * (means - low) / (high - low)) if high > low else np.zeros(len(means))
    return "".join("▁▂▃▄▅▆▇█"[int(height)] for height in heights)


def table(title, rows):
    """Return a table of the panel, a rich renderable."""
    grid = Table(title=title, title_style="bold cyan", box=None, show_header=False,
                 title_justify="left", padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right", min_width=9)
    for name, value in rows:
        grid.add_row(name, Text(figure(value) if isinstance(value, float) else value, "bold"))
    return grid
