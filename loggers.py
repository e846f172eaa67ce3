"""Where a run's numbers go: TensorBoard, nowhere, or the terminal. docs/metrics.md says what each one means.

    from loggers import NoLogger, TensorBoardLogger         # or from pufferl, where they are used
    trainer = PuffeRL(config, vecenv, policy, TensorBoardLogger("runs/one"))

A logger of your own is a class with NoLogger's four methods.
"""

import json
import math

import psutil

# ---------------------------------------------------------------------------------------------------------------------
# Loggers: log(metrics, step), config, artifact, close


class NoLogger:
    """Keeps nothing; the interface of the others."""

    def log(self, metrics, step): ...

    def config(self, settings): ...

    def artifact(self, path): ...

    def close(self): ...


class TensorBoardLogger(NoLogger):
    """TensorBoard event files in `folder`: tensorboard --logdir experiments."""

    def __init__(self, folder, first_step=0):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=first_step)  # what a crash left beyond the checkpoint goes

    def log(self, metrics, step):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def config(self, settings):
        self.writer.add_text("config", f"```json\n{json.dumps(settings, indent=2, default=str)}\n```")

    def close(self):
        self.writer.close()


# ---------------------------------------------------------------------------------------------------------------------
# Dashboard


class Dashboard:
    """Progress of a trainer: a live panel on a terminal, one line a call elsewhere."""

    def __init__(self):
        from rich.console import Console

        self.console, self.live = Console(), None

    def show(self, trainer):
        if not self.console.is_terminal:
            done = 100 * trainer.epoch / max(1, trainer.total_epochs)
            sps, score = getattr(trainer, "last_sps", trainer.sps), trainer.environment.get("score", math.nan)
            self.console.print(f"{done:5.1f}% steps {trainer.global_step:,}  sps {sps:,.0f}  score {score:.3f}  "
                               f"{time_left(trainer)}", highlight=False, soft_wrap=True)
            return
        if self.live is None:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        self.live.update(panel(trainer), refresh=True)

    def close(self):
        if self.live is not None:
            self.live.stop()


def time_left(trainer):
    done = trainer.global_step / max(1, trainer.total_epochs * trainer.batch_size)
    seconds = trainer.uptime * (1 - done) / done if done > 0 else math.inf
    return f"{duration(trainer.uptime)} gone, {duration(seconds)} left"


def duration(seconds):
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def panel(trainer):
    """The live panel, as a rich renderable."""
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def table(title, rows):
        grid = Table(
            title=title, title_style="bold cyan", box=None, show_header=False, title_justify="left", padding=(0, 1)
        )
        for name, value in rows:
            grid.add_row(str(name), f"[bold]{value}[/]")
        return grid

    process = psutil.Process()
    summary = table("run", [
        ("environment", trainer.env_name), ("agents", f"{trainer.num_agents:,}"),
        ("steps", f"{trainer.global_step:,}"), ("steps/s", f"{getattr(trainer, 'last_sps', trainer.sps):,.0f}"),
        ("epoch", f"{trainer.epoch} of {trainer.total_epochs}"), ("time", time_left(trainer)),
        ("parameters", f"{sum(p.numel() for p in trainer.policy.parameters()):,}"),
        ("CPU", f"{psutil.cpu_percent():.0f}%"), ("memory", f"{process.memory_info().rss / 2**20:,.0f} MiB")])
    stages = getattr(trainer, "stages", trainer._stage_seconds)
    total = max(sum(stages.values()), 1e-9)
    parts = table("time", [(name, f"{100 * seconds / total:.0f}%") for name, seconds in stages.items()])
    losses = table("losses", [(name, f"{value:.4g}") for name, value in trainer.losses.items()])
    environment = table("environment", [(name, f"{value:,.4g}") for name, value in trainer.environment.items()])
    bar = ProgressBar(total=max(1, trainer.total_epochs), completed=trainer.epoch)
    grid = Table.grid()
    grid.add_row(Columns([summary, parts, losses, environment]))
    grid.add_row(bar)
    return Panel(grid, title="[bold]PuffeRL[/]", border_style="cyan")
