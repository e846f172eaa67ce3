"""What this machine has, how fast it trains, and what is missing: put it into a report of a bug.

    python pufferl.py doctor                   # with ten seconds of training; the first time kernels are compiled
    python pufferl.py doctor --seconds 0       # without
    python tools/doctor.py                           # the same, also where torch cannot be imported

Each line has a function of its own. If it raises an error, the error is its line and stands again
at the end, and the exit status is 1. Nothing is sent anywhere.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script, which needs no torch

import processes  # noqa: E402
from errors import ConfigError  # noqa: E402

SECONDS = 10.0
PYTHON = (3, 11), (3, 13)  # the first and the last that it is tried with
LEAST_MEMORY, LEAST_DISK = 2 * 2**30, 2**30
PACKAGES = "torch", "numba", "numpy", "scipy", "gymnasium", "rich", "tyro", "plotly", "pillow", "raylib_software"


def output(*command):
    """What a program prints; FileNotFoundError if there is none of that name."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def size(count):
    return f"{count / 2**30:.1f} GiB"


def look_project():
    """The commit, and whether files were changed since."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return "no git repository"
    commit = output("git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs")
    changed = len(output("git", "-C", str(ROOT), "status", "--porcelain").splitlines())
    return f"commit {commit}, {changed} changed files"


def look_system():
    version = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    if not PYTHON[0] <= sys.version_info[:2] <= PYTHON[1]:
        raise ConfigError(f"{version}: it is tried with Python 3.11 to 3.13; take one of these (make "
                      "PYTHON=python3.12).")
    return version


def look_processor():
    """Its name, the cores that this process may use, and how busy they are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        said = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)", text, re.MULTILINE))
        if len(said) == 3:  # an ARM has other lines
            name = "{model name}, family {cpu family} model {model}".format_map(said)
    busy = f", {os.getloadavg()[0]:.1f} busy" if hasattr(os, "getloadavg") else ""
    return f"{name}; {processes.cores()} cores{busy}"


def look_memory():
    free = processes.available_memory()
    if free < LEAST_MEMORY:
        raise ConfigError(f"{size(free)} free: a training takes about {size(LEAST_MEMORY)}; end "
                      "other programs.")
    return f"{size(free)} free"


def look_disk():
    """Of the folder in which runs would lie."""
    free = shutil.disk_usage(".").free
    if free < LEAST_DISK:
        raise ConfigError(f"{size(free)} free in {Path.cwd()}: checkpoints need room; --data-dir "
                      "names another disk.")
    return f"{size(free)} free"


def look_compiler():
    import ocean

    compiler = ocean.find_compiler()
    return f"{compiler}: {output(compiler, '--version').splitlines()[0]}"


def look_packages():
    """Their versions; a ConfigError for those that are not installed."""
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed (there are "
                      f"{', '.join(versions) or 'none'}): make .venv/ready, or pip install -r "
                      "requirements.txt")
    return ", ".join(versions)


def look_torch():
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs alone"
    return f"built {cuda}, {torch.get_num_threads()} threads"


def look_numba():
    """Whether the kernels can be imported, and what compiles them."""
    import llvmlite.binding

    import kernels  # noqa: F401

    return f"LLVM {'.'.join(map(str, llvmlite.binding.llvm_version_info))}"


def look_gpu():
    """The GPUs that torch sees, and the driver's version if there is one."""
    import torch

    driver = ""
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(subprocess.SubprocessError):
            driver = output("nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                            "--format=csv,noheader")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, {size(free)} of "
                f"{size(total)} free; driver: {driver or '?'}")
    if driver:
        raise ConfigError(f"the driver knows {driver}, but torch does not: pip install -r "
                      "requirements/cuda.txt, and a torch that is built for CUDA.")
    return "none; training runs on the CPU"


def look_drawing():
    """Whether pictures can be drawn, and windows shown."""
    import ocean

    ocean._raylib()
    window = ("a window can be shown" if ocean.has_display()
              else "no display: --eval.web shows a page")
    return f"raylib draws; {window}"


LOOKS = (look_project, look_system, look_processor, look_memory, look_disk, look_compiler,
         look_packages, look_torch, look_numba, look_gpu, look_drawing)


def train(seconds):
    """(what was trained and how fast, in words; the seconds of compiling): Breakout as
    bench/bench_train.py has it."""
    import pufferl
    from arena import compile_timer

    args = pufferl.load_config("breakout",
                               ["--train.horizon", "64", "--train.minibatch-size", "65536"])
    vecenv = pufferl.load_env("breakout", args)
    trainer = pufferl.PuffeRL({**args["train"], "total_timesteps": 10**12, "log_interval": 1e9, "env": "breakout",
                               "data_dir": None}, vecenv,
                              pufferl.load_policy(args, vecenv, "breakout"))
    with contextlib.closing(trainer):
        for _ in range(2):  # compiles
            trainer.evaluate()
            trainer.train()
        begun, before = time.perf_counter(), trainer.global_step
        while time.perf_counter() - begun < seconds:
            trainer.evaluate()
            trainer.train()
        speed = (trainer.global_step - before) / (time.perf_counter() - begun)
        return (f"{speed:,.0f} steps a second of Breakout, float32, {vecenv.num_threads} threads, engine "
                f"{trainer.engine.name}"), compile_timer.seconds


def speeds():
    """[(processor, steps a second in float32)] of the table in docs/speed.md."""
    page = ROOT / "docs" / "speed.md"
    table = (page.read_text().partition("| processor, ")[2].partition("\n\n")[0] if page.exists()
             else "")
    return [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in table.splitlines()[2:]]


def examine(seconds):
    """Print a line for each thing that is looked for; returns the problems."""
    problems, say = [], functools.partial(print, flush=True)
    for look in LOOKS:
        title = look.__name__.removeprefix("look_")
        try:
            say(f"{title:12} {look()}")
        except Exception as error:  # any error is a finding
            what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            say(f"{title:12} PROBLEM: {what}")
            problems.append(f"{title}: {what}")
    if seconds > 0 and not problems:
        say(f"{'training':12} {seconds:g} seconds; the first time kernels are compiled before, "
            "a minute or two")
        try:
            fast, compiled = train(seconds)
        except Exception as error:
            problems.append(f"training: {type(error).__name__}: {error}")
        else:
            say(f"{'speed':12} {fast}" + (f"; {compiled:.0f} s of compiling"
                                          if compiled > 1 else ""))
            here = re.search(r"family \d+ model \d+\b", look_processor())
            for number, (processor, speed) in enumerate(speeds()):
                alike = "   <- this kind of processor" if here and re.search(rf"{here[0]}\b", processor) else ""
                say(f"{'' if number else 'docs/speed.md':13} {speed}: {processor}{alike}")
    return problems


def main(argv=None, program="tools/doctor.py"):
    """The command line; program: what errors begin with."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS,
                        help="of training, default 10; 0: none")
    problems = examine(parser.parse_args(argv).seconds)
    if problems:
        print("\nwhat is missing:\n  " + "\n  ".join(problems))
        sys.exit(1)
    print("\nnothing is missing")


if __name__ == "__main__":
    processes.run_command(main)
