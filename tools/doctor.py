"""Print what this machine has, how fast it trains, and what is missing.

    python pufferl.py doctor                   # with ten seconds of training
    python pufferl.py doctor --seconds 0       # without
    python tools/doctor.py                     # the same, also where torch cannot be imported

Put the output into a bug report. Each line has a function. If it raises an error, the error is its
line and is repeated at the end, and the exit status is 1. Nothing is sent anywhere.
"""

import argparse
import contextlib
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
from errors import ConfigError, require  # noqa: E402

PYTHON = (3, 11), (3, 13)  # the first and the last tested version
LEAST_MEMORY, LEAST_DISK = 2 * 2**30, 2**30
PACKAGES = ("torch", "numba", "numpy", "scipy", "gymnasium", "rich", "tyro", "plotly", "pillow",
            "raylib_software")


def output(*command):
    """Return what a program prints. Raises FileNotFoundError."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return result.stdout.strip()


def size(count):
    return f"{count / 2**30:.1f} GiB"


def check_free(free, least, advice):
    """Return the free bytes as text. Raises ConfigError if they are too few."""
    require(free >= least, f"{size(free)} free: {advice}.")
    return f"{size(free)} free"


def look_project():
    """Return the commit, and the number of changed files."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return "no git repository"
    commit = output("git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs")
    changed = len(output("git", "-C", str(ROOT), "status", "--porcelain").splitlines())
    return f"commit {commit}, {changed} changed files"


def look_system():
    version = (f"{platform.system()} {platform.release()} {platform.machine()}, Python "
               f"{platform.python_version()}")
    require(PYTHON[0] <= sys.version_info[:2] <= PYTHON[1], f"{version}: tested are 3.11 to 3.13. "
            "Install one of these (make PYTHON=python3.12).")
    return version


def look_processor():
    """Return its name, the cores that this process may use, and how busy they are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        lines = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)", text, re.MULTILINE))
        if len(lines) == 3:  # an ARM has other lines
            name = "{model name}, family {cpu family} model {model}".format_map(lines)
    return f"{name}; {processes.cores()} cores, {os.getloadavg()[0]:.1f} busy"


def look_memory():
    return check_free(processes.available_memory(), LEAST_MEMORY,
                      f"training takes about {size(LEAST_MEMORY)}. End other programs")


def look_disk():
    return check_free(shutil.disk_usage(".").free, LEAST_DISK,
                      f"checkpoints in {Path.cwd()} need more. --data-dir names another disk")


def look_compiler():
    import ocean

    compiler = ocean.find_compiler()
    return f"{compiler}: {output(compiler, '--version').splitlines()[0]}"


def look_packages():
    """Return their versions. Raises ConfigError for those that are not installed."""
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    require(not missing, f"{', '.join(missing)} not installed (there are "
            f"{', '.join(versions) or 'none'}): make .venv/ready, or pip install -r "
            "requirements.txt")
    return ", ".join(versions)


def look_torch():
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs alone"
    return f"built {cuda}, {torch.get_num_threads()} threads"


def look_numba():
    """Import the kernels; returns what compiles them."""
    import llvmlite.binding

    import kernels  # noqa: F401

    return f"LLVM {'.'.join(map(str, llvmlite.binding.llvm_version_info))}"


def look_gpu():
    """Return the GPUs that torch finds, and the driver's version."""
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
    require(not driver, f"the driver knows {driver}, but torch does not: pip install -r "
            "requirements/cuda.txt, and a torch that is built for CUDA.")
    return "none; training runs on the CPU"


def look_drawing():
    """Load raylib; returns whether a window can be shown."""
    import ocean

    ocean._raylib()
    window = ("a window can be shown" if ocean.has_display()
              else "no display: --eval.web shows a page")
    return f"raylib draws; {window}"


LOOKS = (look_project, look_system, look_processor, look_memory, look_disk, look_compiler,
         look_packages, look_torch, look_numba, look_gpu, look_drawing)


def train(seconds):
    """Train Breakout as bench_train.py does; returns its speed."""
    import pufferl
    from arena import compile_timer

    args = pufferl.load_config("breakout", [
        "--train.horizon", "64", "--train.minibatch-size", "65536", "--train.total-timesteps",
        "1e12", "--train.log-interval", "1e9", "--data-dir", "none"])
    trainer = pufferl.make_trainer("breakout", args)
    with contextlib.closing(trainer):
        for _ in range(2):  # compiles
            trainer.evaluate()
            trainer.train()
        begin, before = time.perf_counter(), trainer.global_step
        while time.perf_counter() - begin < seconds:
            trainer.evaluate()
            trainer.train()
        speed = (trainer.global_step - before) / (time.perf_counter() - begin)
        return (f"{speed:,.0f} steps a second of Breakout, float32, {trainer.vecenv.num_threads} "
                f"threads, engine {trainer.engine.name}; {compile_timer.duration:.0f} s of "
                "compiling")


def examine(seconds):
    """Print a line for each of LOOKS, and the speed; returns the problems."""
    problems = []

    def report(title, look):
        try:
            print(f"{title:12} {look()}", flush=True)
        except Exception as error:  # any error is a finding
            is_explained = isinstance(error, ConfigError)
            problem = str(error) if is_explained else f"{type(error).__name__}: {error}"
            print(f"{title:12} PROBLEM: {problem}", flush=True)
            problems.append(f"{title}: {problem}")

    for look in LOOKS:
        report(look.__name__.removeprefix("look_"), look)
    if seconds > 0 and not problems:
        print(f"{'training':12} {seconds:g} seconds; the first time kernels are compiled before, "
              "which takes a minute or two", flush=True)
        report("speed", lambda: train(seconds))
        print(f"{'compare':12} docs/speed.md lists other processors")
    return problems


def main(argv=None, program="tools/doctor.py"):
    """Run `doctor`; `program` is what errors begin with."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0,
                        help="of training, default 10; 0: none")
    problems = examine(parser.parse_args(argv).seconds)
    if problems:
        print("\nwhat is missing:\n  " + "\n  ".join(problems))
        sys.exit(1)
    print("\nnothing is missing")


if __name__ == "__main__":
    processes.run_command(main)
