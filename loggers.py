"""Where metrics go: TensorBoard, Weights & Biases, Neptune, metrics.jsonl, and the progress on the
terminal.

    python pufferl.py train breakout                                  # TensorBoard, and metrics.jsonl always
    python pufferl.py train breakout --wandb --tag baseline           # both and Weights & Biases
    python pufferl.py train breakout --neptune --entity me --logger none

    from pufferl import PuffeRL, WandbLogger                          # or from a script
    trainer = PuffeRL(config, vecenv, policy, WandbLogger(project="pufferl", name="first try"))

A custom logger is a class with NoLogger's four methods. docs/metrics.md says what each number means.
Tokens are read by wandb and neptune themselves, from WANDB_API_KEY and NEPTUNE_API_TOKEN, and written
nowhere. WANDB_MODE=offline and NEPTUNE_MODE=offline keep a run on this machine, for `wandb sync` and
`neptune sync` later.
"""

import json
import math
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
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
from configuration import Base, command, resolve, solved
from errors import ConfigError

# --------------------------------------------------------------------------------------------------
# Loggers: log(metrics, step), config, artifact, close


class NoLogger:
    """Keeps nothing; the interface of the others."""

    def log(self, metrics, step):
        """metrics: {"losses/entropy": 1.3, ...}, floats; step: environment
        steps of all agents so far."""

    def config(self, settings):
        """The resolved configuration, nested dicts, once before the first log."""

    def artifact(self, path):
        """A model file was written to `path`; it may be removed when newer ones come."""

    def close(self): ...


def check_logger(logger):
    """The logger. ConfigError if it lacks one of the methods that are called in a run."""
    methods = [name for name in vars(NoLogger) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(logger, name, None))]
    if missing:
        raise ConfigError(f"logger: {type(logger).__name__} has no {' and no '.join(missing)}. Make it a subclass of "
                          "pufferl.NoLogger, which has all four methods, and override those that you need.")
    return logger


class Several(NoLogger):
    """Passes every call on to each of `loggers`."""

    def __init__(self, loggers):
        self.loggers = loggers

    def log(self, metrics, step):
        for logger in self.loggers:
            logger.log(metrics, step)

    def config(self, settings):
        for logger in self.loggers:
            logger.config(settings)

    def artifact(self, path):
        for logger in self.loggers:
            logger.artifact(path)

    def close(self):
        for logger in self.loggers:
            logger.close()


class JsonLines(NoLogger):
    """One line of JSON an entry, {"step": ..., name: value, ...}, appended to `path`.

    first_step: the step at which a resumed run goes on. Later entries and half lines, which a crash
    left, are removed, so no step stands there twice. While the disk is full, entries are lost, but
    never half a line is written.
    """

    def __init__(self, path, first_step=0):
        self.path, self.warned = Path(path), False
        if self.path.exists():
            before = [entry for entry in diagnostics.read_metrics(self.path) if entry["step"] <= first_step]
            text = "".join(json.dumps(entry) + "\n" for entry in before)
            processes.write_whole(self.path, lambda file: file.write(text.encode()))

    def log(self, metrics, step):
        line = (json.dumps({"step": step, **metrics}) + "\n").encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    if file.write(line) < len(line):
                        raise OSError("no space for the whole line")
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            self.warned = self.warned or warn(f"{self.path}: an entry could not be "
                                              f"written ({error})")


class TensorBoardLogger(NoLogger):
    """TensorBoard event files in `folder`: tensorboard --logdir experiments."""

    def __init__(self, folder, first_step=0):
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _thread_failed
        # a crash left it
        self.writer = SummaryWriter(str(folder), purge_step=first_step and first_step + 1)

    def _call(self, method, *arguments):
        """The writer's thread reports its errors, such as a full disk, at a later call."""
        try:
            if self.writer is not None:
                getattr(self.writer, method)(*arguments)
        except OSError as error:
            self.writer = None
            warn(f"TensorBoard: no more entries are written ({error})")

    def log(self, metrics, step):
        for name, value in metrics.items():
            self._call("add_scalar", name, value, step)

    def config(self, settings):
        self._call("add_text", "config",
                   f"```json\n{json.dumps(settings, indent=2, default=str)}\n```")

    def close(self):
        self._call("close")


def _thread_failed(uncaught, otherwise=threading.excepthook):
    """Keep quiet about an error of TensorBoard's thread: the writer's next call reports it."""
    if not (isinstance(uncaught.exc_value, OSError)
            and type(uncaught.thread).__module__.startswith("tensorboard")):
        otherwise(uncaught)


class WandbLogger(NoLogger):
    """Weights & Biases (pip install wandb). The x axis is the step of all agents, `global_step`.

    project: its name; or all settings, as load_config gives them, which hold project, entity, group
    and tag. run_id: if a run has that id, go on with it. folder: where wandb keeps its
    files (default: ./wandb). Raises ImportError without the package and ValueError if it refuses to
    start, as it does without a key.
    """

    def __init__(self, project="pufferl", entity=None, name=None, config=None, *, group=None,
                 tag=None, run_id=None, folder=None):
        try:
            import wandb
        except ImportError:
            raise ConfigError("logging to Weights & Biases needs the package wandb: pip install wandb") from None
        if isinstance(project, dict):
            args, project, config = project, project["project"], project if config is None else config
            entity, name, group, tag = (entity or args["entity"], name or args["env_name"],
                                        group or args["group"], tag or args["tag"])
        self.wandb = wandb
        try:
            self.run = wandb.init(project=project, entity=entity, name=name, config=config,
                                  group=group, id=run_id, tags=[tag] if tag else None, dir=folder,
                                  resume="allow" if run_id else None)
        except wandb.errors.Error as error:
            raise ConfigError(f"Weights & Biases: {error} (WANDB_MODE=offline needs no account)") from None
        # A resumed run may log steps again that a crash had lost; wandb's own
        # counter cannot go back.
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


class NeptuneLogger(NoLogger):
    """Neptune (pip install neptune), project "workspace/project", or all settings, as load_config
    gives them; without api_token it is NEPTUNE_API_TOKEN.

    run_id: goes on with the run of that custom id if there is one. Raises ImportError without the
    package and ValueError if it refuses to start. The hosted service was announced to end in
    March 2026; servers of one's own and the offline mode go on.
    """

    def __init__(self, project=None, name=None, api_token=None, *, group=None, tag=None,
                 run_id=None):
        try:
            import neptune
        except ImportError:
            raise ConfigError("logging to Neptune needs the package neptune: pip install neptune") from None
        if isinstance(project, dict):
            args, project = project, f"{project['entity']}/{project['project']}" if project["entity"] else None
            name, group, tag = name or args["env_name"], group or args["group"], tag or args["tag"]
        tags = [text for text in (tag, group) if text]
        # an offline run of Neptune takes no custom_run_id
        offline = os.environ.get("NEPTUNE_MODE") == "offline"
        try:
            self.run = neptune.init_run(project=project, name=name, api_token=api_token, tags=tags,
                                        source_files=[], capture_stdout=False, capture_stderr=False,
                                        capture_traceback=False,
                                        custom_run_id=None if offline else run_id)
        except neptune.exceptions.NeptuneException as error:
            text = re.sub(r"\x1b\[\d+m|^-.*$", "", str(error), flags=re.MULTILINE).strip()  # no colours, no headings
            raise ConfigError(
                f"Neptune: {text.partition(chr(10))[0]} (NEPTUNE_API_TOKEN; NEPTUNE_MODE=offline needs no "
                "account)") from None
        self.model = None

    def log(self, metrics, step):
        for name, value in metrics.items():
            if math.isfinite(value):  # Neptune refuses the others
                self.run[name].append(value, step=step)

    def config(self, settings):
        from neptune.utils import stringify_unsupported

        self.run["config"] = stringify_unsupported(settings)

    def artifact(self, path):
        # uploaded at the end: an upload takes time, and older files are removed meanwhile
        self.model = path

    def close(self):
        if self.model and os.path.exists(self.model):
            self.run["model"].upload(str(self.model), wait=True)
        self.run.stop()


def make_logger(args, folder, first_step=0):
    """The loggers that the base section asks for, as one. folder: the run's, whose name ends in the
    run's id; None: nothing is written there. Raises ImportError and ValueError as the loggers
    do."""
    loggers, name = [], folder and Path(folder).name
    common = {"name": name, "group": args["group"], "tag": args["tag"], "run_id": name}
    if args["wandb"]:
        loggers.append(WandbLogger(args["project"], args["entity"],
                                   folder=folder and str(folder), **common))
    if args["neptune"]:
        loggers.append(NeptuneLogger(f"{args['entity']}/{args['project']}" if args["entity"]
                                     else None, **common))
    if args["logger"] == "tensorboard" and folder is not None:  # last: it leaves a folder if another one fails
        loggers.insert(0, TensorBoardLogger(Path(folder) / "tensorboard", first_step))
    return Several(loggers)


def warn(text):
    """Say on the error stream what is lost while the training goes on; returns True."""
    processes.say(f"{text}. Training goes on.", sys.stderr)
    return True


# --------------------------------------------------------------------------------------------------
# What a terminal shows: compiling, training, and what to do next


COMPILING = "compiling kernels, once for each kind of network: up to a minute or two; the next start takes seconds"


class Dashboard:
    """Shows a training's progress, as a live panel on a terminal and as one line a call elsewhere, and
    at last what it reached."""

    def __init__(self, solved_at=(None, None)):
        """solved_at: what `solved_at` gives."""
        self.console = Console()
        self.live = None
        self.first = None  # seconds and steps at the first call; what came before includes the start
        self.scores = []  # one for each call
        self.solved_at = solved_at
        self.means = None  # of the last call

    def show(self, trainer):
        if self.first is None:
            self.first = trainer.uptime, trainer.global_step
            if compile_timer.seconds > 1:
                processes.say(f"kernels were compiled for {duration(compile_timer.seconds)}, which counts as "
                              "no time of training")
        self.scores.append(score_of(trainer.environment, self.solved_at[0]))
        if not self.console.is_terminal:
            done = 100 * trainer.epoch / max(1, trainer.total_epochs)
            sps = getattr(trainer, "last_sps", trainer.sps)
            again = " (no episode has ended since)" if trainer.environment is self.means else ""
            score = f"score {self.scores[-1]:.3f}{again}  " if math.isfinite(self.scores[-1]) else ""
            self.means = trainer.environment
            processes.say(f"{done:5.1f}% steps {trainer.global_step:,}  sps {sps:,.0f}  {score}"
                          f"{self.time_left(trainer)}")
            return
        if self.live is None:
            self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self.live.start()
        try:
            self.live.update(self.panel(trainer), refresh=True)
        except OSError:  # the terminal was closed
            processes.discard_output()

    def close(self):
        if self.live is not None:
            self.live.stop()
            self.live = None

    def time_left(self, trainer):
        """The time gone and left, in words. The pace is measured from the first call on."""
        seconds, step = self.first
        gone, steps = f"{duration(trainer.uptime)} gone", trainer.global_step - step
        if steps <= 0:
            return gone
        rest = max(0, trainer.config["total_timesteps"] - trainer.global_step) / steps
        return f"{gone}, {duration(rest * (trainer.uptime - seconds))} left"

    def panel(self, trainer):
        """The live panel, as a rich renderable for the size of the console. Green is reached, yellow
        is worth a look."""

        metric, least = self.solved_at
        name, width, score = metric or "score", self.console.width - 4, self.scores[-1]  # within the frame
        solved = "" if least is None else f"  {figure(least)} counts as solved"
        style = "bold green" if least is not None and score >= least else "bold"
        curve = sparkline(self.scores, max(4, min(40, width - len(f" {name} {'':10} {solved}"))))
        grid = Table.grid(expand=True)
        grid.add_row(Text.assemble(f" {name} ", (f"{figure(score):>10} ", style), (curve, "cyan"), solved))
        grid.add_row(Text(f" {self.time_left(trainer)}"))
        grid.add_row(ProgressBar(total=max(1, trainer.total_epochs), completed=trainer.epoch))
        for _, sentence in sorted(trainer.signs.said.values()):
            grid.add_row(Text(sentence, "yellow"))
        lines = self.console.height - 2 - len(self.console.render_lines(grid, self.console.options.update(width=width)))
        tables, columns = [*self._tables(trainer).items()], 4 if width >= 108 else 2 if width >= 54 else 1
        for first in range(0, 4, columns):
            row, side_by_side = tables[first : first + columns], Table.grid()
            side_by_side.add_row(*(table(title, rows, lines) for title, rows in row))
            if lines > 1:
                grid.add_row(side_by_side)
            lines -= 1 + max(len(rows) for _, rows in row)
        return Panel(grid, title=f"[bold]PuffeRL[/] {trainer.env_name}", border_style="cyan",
                     subtitle="[dim]docs/metrics.md explains these words")

    def _tables(self, trainer):
        """{title: [(name, value)]} of the panel's tables."""
        stages = trainer.statistics.stages
        total = max(sum(stages.values()), 1e-9)
        return {
            "losses": [(name, float(value)) for name, value in trainer.losses.items()],
            "environment": [(name, float(value)) for name, value in trainer.environment.items()],
            "run": [
                ("engine", trainer.engine.name), ("agents", f"{trainer.num_agents:,}"),
                ("parameters", f"{sum(p.numel() for p in trainer.policy.parameters()):,}"),
                ("steps", f"{trainer.global_step:,}"),
                ("steps/s", f"{getattr(trainer, 'last_sps', trainer.sps):,.0f}"),
                ("epoch", f"{trainer.epoch} of {trainer.total_epochs}"),
                ("CPU", f"{psutil.cpu_percent():.0f}%"),
                ("memory", f"{psutil.Process().memory_info().rss / 2**20:,.0f} MiB"),
                *trainer.buffers.usage().items()],
            "time": [(name, f"{100 * seconds / total:.0f}%") for name, seconds in stages.items()],
        }

    def closing(self, trainer, args, model):
        """Lines that say what a training reached and what to type next. model: the path of its last model."""
        name, folder, (metric, least) = args["config_name"], trainer.run_folder, self.solved_at
        speed, value = trainer.global_step / max(trainer.uptime, 1e-9), score_of(trainer.environment, metric)
        yield f"{trainer.global_step:,} steps in {duration(trainer.uptime)} ({speed:,.0f} steps/s)"
        if math.isfinite(value):
            episodes = f"in the last {plural(round(trainer.environment.get('n', 0)), 'episode')}"
            reached = "solved" if least is not None and value >= least else "not solved yet"
            how = "" if least is None else f": {reached} ({figure(least)} counts as solved)"
            yield f"{metric or 'score':12} {figure(value)} {episodes}{how}"
            if (level := trainer.signs.below_random_play()) is not None:
                yield f"{'':12} below random play ({figure(level)})"
        elif not trainer.signs.has_ended:
            steps = trainer.global_step // trainer.signs.agents
            yield f"score        none: no episode has ended in {steps:,} steps of each agent"
        for step, sentence in sorted(trainer.signs.said.values()):
            yield f"sign         step {step:,}: {sentence}"
        if folder is None:
            return
        yield f"checkpoint   {model}"
        if args["logger"] == "tensorboard":
            yield f"tensorboard  {folder / 'tensorboard'}   (tensorboard --logdir {args['data_dir']})"
        run = "latest" if args["data_dir"] == Base.data_dir else str(folder)
        if trainer.epoch < trainer.total_epochs:
            yield f"go on        {command('train', name, '--resume', run)}"
        creator = environments.load_creator(args["env_name"])
        draws = creator is None or environments.can_draw(trainer.vecenv.driver_env, creator.picture_settings)
        yield (f"{'watch it' if draws else 'play it':12} "
               + command("eval", name, "--load-model-path", run, *["--eval.web"] * draws))
        yield f"tune it      {command(name, script='protein.py')}"
        if not Path(name.partition(":")[0]).suffix:  # else it is
            yield (f"your own     {command('train', 'my_file.py:make_env')}   (or one in C: "
                   "docs/write_an_environment.md)")


def solved_at(args):
    """(metric, how much of it counts as solved) from config/ENV.ini; (None, None) if it has none,
    or if the environment's settings are not those that ship: it was measured with these."""
    known = solved(args["config_name"]) if "config_name" in args else None  # a trainer in a script has none
    if known is None:
        return None, None
    shipped = resolve(args["config_name"])[1]["env"]
    same = all(args["env"].get(key) == value for key, value in shipped.items() if key != "num_envs")
    return known.metric if same else (None, None)


def score_of(environment, metric=None):
    """What counts as doing well: `metric`, else the score, or the return if there is none; NaN
    before an episode has ended."""
    return environment.get(metric,
                           environment.get("score", environment.get("episode_return", math.nan)))


def duration(seconds):
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h {minutes:02d}m" if hours
            else f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s")


def figure(value):
    """A number for people: 4,096 and not 4.1e+03."""
    if not 1000 <= abs(value) < 1e15:  # or not finite
        return f"{value:.2g}" if 0 < abs(value) < 0.001 else f"{value:.4g}"
    return f"{value:,.0f}"


def aligned(rows, right=()):
    """Lines of a table, the first of `rows` its titles, cut where a terminal ends. right: the
    titles of those columns that end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        cells = [cell.rjust(width) if title in right else cell.ljust(width)
                 for cell, width, title in zip(row, widths, rows[0], strict=True)]
        line = "  ".join(cells).rstrip()
        yield line if columns is None or len(line) <= columns else line[: columns - 1] + "…"


def sparkline(values, width):
    """A curve of at most `width` characters; each is a mean of neighbouring values."""
    values = np.array([value for value in values if math.isfinite(value)])
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    low, high = means.min(), means.max()
    heights = np.round(7 * (means - low) / (high - low)) if high > low else np.zeros(len(means))
    return "".join("▁▂▃▄▅▆▇█"[int(height)] for height in heights)


# docs/troubleshooting.md
WORTH_A_LOOK = {"approx_kl": (0, 0.05), "clipfrac": (0, 0.3), "explained_variance": (0, 1)}


def table(title, rows, lines):
    """A table of the panel, as a rich renderable of at most `lines` lines, the title's among them."""

    grid = Table(title=title, title_style="bold cyan", box=None, show_header=False,
                 title_justify="left", padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right", min_width=9)
    fitting = len(rows) if len(rows) < lines else max(0, lines - 2)
    for name, value in rows[:fitting]:
        low, high = WORTH_A_LOOK.get(name, (-math.inf, math.inf))
        is_odd = isinstance(value, float) and not low <= value <= high
        grid.add_row(name, Text(figure(value) if isinstance(value, float) else value, "yellow" if is_odd else "bold"))
    if len(rows) > fitting:
        grid.add_row(f"and {len(rows) - fitting} more", "")
    return grid
