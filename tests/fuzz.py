"""Tries random, mostly senseless commands, files and settings.

    python tests/fuzz.py                              # a hundred, another seed each day
    python tests/fuzz.py --cases 1000 --seed 3        # a thousand
    python tests/fuzz.py --seed 3 --only 17           # one of them again, with its output

A case is right if it ends by itself with 0, or with 1 or 2 and one to eight lines on the error
stream; with no traceback, no process left behind and no file harmed. Each runs in a process that is
forked from one that has imported everything, with 6 GB of memory at most. COUNTS are left out.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pufferl  # noqa: E402  before torch, for which it says how its threads wait

# isort: split
import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

import configuration  # noqa: E402
import ocean  # noqa: E402
from tools import export, watch  # noqa: E402, F401  not in each case

COUNTS = ("train.gpus", "vec.num_workers", "vec.num_threads", "eval.episodes", "vec.num_envs",
          "vec.total_agents", "vec.num_buffers", "vec.batch_size", "env.num_envs", "base.wandb")
# Settings that may make a right case long.
LONGER = ("total_timesteps", "replay_ratio", "horizon", "hidden_size", "num_layers", "max_steps",
          "input_size", "seconds", "minibatch_size", "compile", "timeout")
MEMORY = 6 << 30  # bytes more than the process begins with
SECONDS = 20.0  # of the processor; a machine with others on it may take longer
PATIENCE = 90.0  # seconds until a case hangs
LINES = 8

SMALL = ["--env.num-envs", "16", "--train.total-timesteps", "1024", "--train.minibatch-size", "256",
         "--train.horizon", "16", "--policy.hidden-size", "8", "--vec.num-threads", "1",
         "--logger", "none"]
PLAY = ["--env.num-envs", "4", "--eval.episodes", "4", "--eval.max-steps", "2000",
        "--policy.hidden-size", "8"]

WHOLE = ["-1", "0", "1", "2", "3", "7", "64", "2147483647", "2147483648", "9223372036854775807",
         "18446744073709551616", "-2147483649", "1" + "0" * 30, "1.5", "1e3", "0x10", "[1]",
         "9" * 5000]
FRACTIONS = ["0", "-0.0", "1", "-1", "0.5", "1e-300", "1e300", "-1e300", "5e-324", "1e400", "1,5"]
TEXTS = ["/", "/nowhere/at/all", ".", "a" * 5000, "\x1b[31m", "ä\udcff", "a b", "--help", "=",
         "no.py:Net", "own.py:Net", "own.py:missing", "own.py:", "latest", "best", "../..",
         "%(x)s", "{}"]
FLAGS = ["True", "False", "1", "0", "2", "yes"]
ANY = ["nan", "inf", "-inf", "none", "auto", "", "x", "True"]


# -- What is made up: each returns (name, command or function that runs in another process, files
# that must stay as they are)


def value_for(kind, draw):
    """Text for a setting of a type, most of it wrong."""
    options = getattr(kind, "__args__", (kind,))
    options = [name for option in options for name in getattr(option, "__args__", (option,))]
    words = [option for option in options if isinstance(option, str) and option != "ray"]
    pools = {int: WHOLE, float: FRACTIONS, str: TEXTS, bool: FLAGS}
    pool = [*words, *ANY, *(text for one, texts in pools.items() if one in options for text in texts)]
    return draw.choice(pool if draw.random() < 0.9 else WHOLE + FRACTIONS + TEXTS + FLAGS)


def settings_of(env_name):
    """{"train.gamma": type, ...} of an environment."""
    schema = configuration.resolve(env_name)[0]
    found = {f"{section}.{field.name}": field.type for section, cls in schema.items()
             for field in dataclasses.fields(cls)}
    return {name: kind for name, kind in found.items() if name not in COUNTS}


def command_line(draw, here):
    env = draw.choice(["squared", "cartpole", "squared", "gym/CartPole-v1"])
    verb = draw.choice(["train", "train", "eval"])
    argv = [verb, env, *(SMALL if verb == "train" else PLAY)]
    if "gym" in env:
        argv = [word for i, word in enumerate(argv)
                if "--env.num-envs" not in argv[max(0, i - 1) : i + 1]]
        argv += ["--vec.backend", "serial", "--vec.num-envs", "4"]
    named = settings_of(env)
    for name in draw.sample(sorted(named), draw.choice([1, 1, 2, 3])):
        if verb == "eval" and name in ("eval.web", "eval.terminal", "eval.window", "eval.open"):
            continue  # which end when somebody says so
        option = "--" + name.removeprefix("base.").replace("_", "-" if draw.random() < 0.9 else "_")
        text = value_for(named[name], draw)
        argv += [f"{option}={text}"] if draw.random() < 0.3 else [option, text]
    if draw.random() < 0.1:
        odd = draw.choice(["--help", "-x", "--", "", "--train.", "--no.such", "é"])
        argv.insert(draw.randrange(1, len(argv) + 1), odd)
    argv = [word.replace("\0", "") for word in argv]
    return " ".join(argv[:2] + argv[len(SMALL if verb == "train" else PLAY) + 2 :]), argv, {}


def ini_file(draw, here):
    """A file of config/ with changes, read from a copy of that folder."""
    folder = here / "config"
    shutil.copytree(ROOT / "config", folder)
    path = folder / "squared.ini"
    named, change = settings_of("squared"), draw.choice(["values", "values", "lines"])
    if change == "values":
        lines = []
        for name in draw.sample(sorted(named), draw.randrange(1, 4)):
            section, key = name.split(".")
            lines += [f"[{section}]", f"{key} = {value_for(named[name], draw)}"]
        text = "\n".join(lines).encode(errors="surrogateescape")
    else:
        pieces = ["[", "]", "[]", "[train", "[train]", "[sweep.train.gamma]", "min = x", "= 5",
                  "gamma", "gamma = ", "x = 1", "[base]", "env_name = squared nothing",
                  "env_name =", "\t gamma = 1", "; x", "\ufeff", "[DEFAULT]", "gamma = 0.9"]
        text = "\n".join(draw.choices(pieces, k=draw.randrange(1, 8))).encode()
    path.write_bytes(text)

    def run():
        configuration.ROOT = here
        pufferl.main(["train", "squared", *SMALL])

    return f"{change}: {text[:200]!r}", run, {path}


def checkpoint(draw, here):
    """The folder of a run in which one file is another; test_checkpoints.py damages bytes."""
    run = here / draw.base.name
    shutil.copytree(draw.base, run)
    names = ["trainer_state.pt", "model_squared_000004.pt", "config.json", "metrics.jsonl"]
    path = run / draw.choice(names + names[:1])
    if path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        change = swap(state, draw)
        torch.save(state, path)
    else:
        change = "lines"
        junk = ["5", "[]", "null", '"x"', "[" * 3000, '{"step": "x"}', '{"step": NaN, "train": 5}',
                '{"train": {}}', '{"step": 1e999, "environment/score": "x"}', "{", "\x00",
                '{"step": 1' + "0" * 400 + "}", '{"train": {"gamma": []}, "env_name": 5}',
                '{"env_name": "squared", "env": [1]}']
        lines = path.read_text().splitlines()
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(junk))
        path.write_text("\n".join(lines if draw.random() < 0.5 else [draw.choice(junk)]))
    more = ["--env.num-envs", "16", "--logger", "none"]
    argv = draw.choice([
        ["train", "squared", "--resume", str(run), "--train.total-timesteps", "2048", *more],
        ["eval", "squared", "--load-model-path", str(draw.choice([run, path])),
         "--eval.episodes", "4"],
        ["export", "squared", "--load-model-path", str(run), "--export.flat", str(here / "x.bin")],
        ["diagnose", str(run)],
        ["eval", "squared", "--load-model-path", "latest", "--data-dir", str(here),
         "--eval.episodes", "4"]])
    whole = set(run.glob("*.pt")) if argv[0] != "train" else {path}
    return f"{path.name} {change}, {argv[0]}", argv, whole


def swap(state, draw):
    """Put something else into a nested dict, somewhere; returns where."""
    names, place = [], state
    while True:
        key = draw.choice(list(place))
        names.append(str(key))
        deeper = place[key]
        if not (isinstance(deeper, dict) and deeper and draw.random() < 0.85):
            break
        place = deeper
    if names[0] == "environments":  # the memory of programs in C: SECURITY.md
        return "nothing"
    old = place[key]
    others = [None, "x", -1, 0, 10**30, math.nan, math.inf, [], {}, (), True, b"x", [[[]]],
              torch.zeros(3), torch.zeros(0), torch.tensor(math.nan), torch.zeros(2, 2).to_sparse(),
              torch.zeros(3, device="meta"), torch.zeros(1).expand(2**40)]
    if isinstance(old, torch.Tensor):
        others += [old * math.nan if old.is_floating_point() else old, old.double(), old.half(),
                   old.bool(), old[:1], old.flatten(), old.to(torch.complex64),
                   torch.zeros_like(old), torch.full(old.shape, 1e30)]
    new = draw.choice([..., *others])
    if new is ...:
        del place[key]
    else:
        place[key] = new
    if draw.random() < 0.2:
        place[draw.choice(["train", "__class__", "extra", "pop"])] = 5
    return f"{'.'.join(names)} = {str(new)[:60]!r}"


def in_c(draw, here):
    """An environment in C with settings of any size, stepped with random actions."""
    name = draw.choice(draw.environments)
    library = ocean.load(name)
    numbers = [0, -1, 1, 2, 1e300, -1e300, 2**31, -(2**31), 2**63, 1e-300, 0.5, math.nan, math.inf]
    settings = sorted(library.settings)
    chosen = {key: draw.choice(numbers)
              for key in draw.sample(settings, min(len(settings), draw.choice([1, 1, 2])))}

    def run():
        try:
            envs = pufferl.make(name, 2, num_threads=1, env_kwargs=chosen)
        except (ValueError, TypeError, MemoryError) as error:
            sys.exit(f"refused: {error}")
        storage, generator = envs.allocate(16), np.random.default_rng(0)
        for _ in range(3):
            envs.begin()
            for t in range(16):
                row = storage.actions[t]
                row[:] = (generator.uniform(-1, 1, row.shape) if envs.action_heads is None
                          else generator.integers(0, envs.action_heads, row.shape))
                envs.advance(0)
            assert np.isfinite(storage.rewards).all(), "rewards are not finite"
        envs.close()

    return f"{name} {chosen}", run, {}


KINDS = {"command line": (command_line, 4), "ini": (ini_file, 2), "checkpoint": (checkpoint, 4),
         "in C": (in_c, 4)}


# -- How a case runs, and what is wrong with how it ended -------------------------------------------


def enter(here, run):
    """In a process of its own: do as a command would, and exit as it would."""
    os.setsid()
    os.chdir(here)
    output = os.open(here / "stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(here / "stdout", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(output, 2)
    size = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                              for number in (1, 2))
    if isinstance(run, list):
        sys.argv, argv = ["pufferl.py", *run], run
        pufferl.main(argv)
    else:
        run()


def start(here, run, typed=False):
    """The number of a case's process; typed: as a command, not forked."""
    if typed:
        with open(here / "stdout", "wb") as output, open(here / "stderr", "wb") as errors:
            command = [sys.executable, str(ROOT / "pufferl.py"), *run]
            return subprocess.Popen(command, cwd=here, stdout=output, stderr=errors,
                                    stdin=subprocess.DEVNULL, start_new_session=True).pid
    sys.stdout.flush()
    number = os.fork()
    if number == 0:
        code = 1
        try:
            enter(here, run)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                import multiprocessing.util

                multiprocessing.util._exit_function()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return number


def wait(number, seconds):
    """(exit status or None for one that hangs and was killed, its seconds of the processor)."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while time.monotonic() < deadline:
        done, status, used = os.wait4(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
    _, _, used = os.wait4(number, 0)
    return None, used.ru_utime + used.ru_stime


def left_behind(session):
    """The commands of processes of a session that still run, which are ended."""
    for _ in range(20):  # they may need a moment
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        if not found:
            return []
        time.sleep(0.1)
    names = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[-80:])
            process.kill()
    return names


def digest(files):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def judge(kind, name, status, used, here):
    """What is wrong with how a case ended; None if nothing is."""
    texts = [(here / stream).read_text(errors="replace") for stream in ("stdout", "stderr")]
    errors = [line for line in texts[1].splitlines() if line.strip()]
    longer = any(word in name.replace("-", "_") for word in LONGER)
    if "Traceback" in texts[0] + texts[1]:
        return f"a traceback: {errors[-1][:200] if errors else ''}"
    if status is None:
        return None if longer or "run folder" in texts[0] else "it hangs"
    if status not in (0, 1, 2):
        return f"it ended with {status}"
    if status and not 1 <= len(errors) <= LINES:
        return f"{len(errors)} lines for an error"
    if status == 0 and kind == "in C" and errors:
        return errors[-1][:200]
    compiled = "compiling kernels, once" in texts[0] + texts[1]  # of a kind that is new
    if used > SECONDS and not compiled and not longer:
        return f"it took {used:.0f} s"
    return None


def case(seed, number, base, show=False, environments=None):
    """Make up and run a case; returns (kind, name, exit status, what is wrong or None)."""
    draw = random.Random(f"{seed} {number}")
    draw.base, draw.environments = base, environments or ocean.names()
    kind = draw.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        here = Path(folder)
        name, run, files = KINDS[kind][0](draw, here)
        words = " ".join(run) if isinstance(run, list) else ""
        before = digest(files)
        process = start(here, run)
        status, used = wait(process, PATIENCE)
        wrong = judge(kind, name, status, used, here)
        others, after = left_behind(process), digest(files)
        if others:
            wrong = wrong or f"left behind: {others}"
        if before != after and "--resume" not in words:
            wrong = wrong or f"harmed: {before.keys()}"
        if show:
            print(f"{kind}: {name}\n{words}\nended with {status} after {used:.1f} s of the "
                  f"processor: {wrong}")
            for stream in ("stdout", "stderr"):
                print(f"-- {stream}\n{(here / stream).read_text(errors='replace')}")
    return kind, name, status, wrong


def whole_run(folder):
    """A run to do harm to."""
    here, runs = Path(folder) / "first", Path(folder) / "runs"
    here.mkdir()
    status, _ = wait(start(here, ["train", "squared", *SMALL, "--data-dir", str(runs)]), 300)
    assert status == 0, (here / "stderr").read_text()
    return next(runs.iterdir())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400))
    parser.add_argument("--only", type=int, help="the number of a case")
    parser.add_argument("--environments", nargs="*", help="those in C that are taken")
    args = parser.parse_args()
    faults, counts = 0, collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory(prefix="fuzz-base-") as folder:
        base = whole_run(folder)
        for number in range(args.cases) if args.only is None else [args.only]:
            kind, name, status, wrong = case(args.seed, number, base, args.only is not None,
                                             args.environments)
            counts[kind]["hung" if status is None else status] += 1
            if wrong:
                faults += 1
                print(f"{number} {kind}: {wrong}\n    {name[:300]}", flush=True)
    for kind, exits in sorted(counts.items()):
        print(f"{kind:14} {sum(exits.values()):5} cases, exits {dict(exits)}")
    print(json.dumps({"seed": args.seed, "faults": faults,
                      "cases": sum(sum(exits.values()) for exits in counts.values())}))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
