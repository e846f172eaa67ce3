"""Compare what this tree computes and prints with what a commit does.

    python bench/same_bits.py                       # with HEAD
    python bench/same_bits.py c23df8b               # with another commit
    python bench/same_bits.py v1.2 --only masks LSTM "help "    # what has one of these in its name
    python bench/same_bits.py --list

Each run trains three epochs or so, in both trees at the same time and on this machine. Everything
in the two checkpoints (weights, the optimizer's state, statistics, environments) and in
metrics.jsonl is compared bit for bit, by name, but for times. A name that only one tree has is
matched with one that only the other has if the contents are the same, and is listed as renamed.
Each text is what a command prints, compared as text. Only the command line and the names that
scripts import are used, so modules may have moved. Exit status 1 if anything differs or fails.

The runs of "recorder" are an exception: they are those of tests/test_devices.py, which has a
stand-in for a GPU, and need its `install`, `on_a_cpu`, `make_trainer` and `CASES`.
"""

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import checkout  # noqa: E402

SECONDS = 600  # that a command may take
PUFFERL = "TREE/pufferl.py"
SHARED = ["--train.horizon", "32", "--train.replay-ratio", "2", "--train.seed", "3",
          "--train.log-interval", "0", "--vec.num-threads", "2", "--logger", "none",
          "--data-dir", "runs"]


def train(env, *options, agents=64, epochs=3):
    return [PUFFERL, "train", env, *SHARED, "--train.total-timesteps", str(epochs * 32 * agents),
            *options]


def in_c(env, *options, **sizes):
    return train(env, "--env.num-envs", "64", "--train.minibatch-size", "512", *options, **sizes)


def in_python(env, *options, agents=16, **sizes):
    return train(env, "--vec.num-envs", "16", "--vec.backend", "serial", "--train.minibatch-size",
                 "256", "--train.learning-rate", "0.01", "--train.gamma", "0.9",
                 "--train.prio-alpha", "0.4", *options, agents=agents, **sizes)


WORKERS = ["--vec.backend", "multiprocessing", "--vec.num-workers", "2"]
RUNS = {  # {name: commands}, after the name of the Python; TREE: the project's folder
    "float32": [in_c("breakout")],
    "bfloat16": [in_c("breakout", "--train.precision", "bfloat16")],
    "autograd": [in_c("breakout", "--train.engine", "autograd")],
    "adam": [in_c("breakout", "--train.optimizer", "adam", "--train.learning-rate", "0.001")],
    "drawn steps": [in_c("breakout", "--policy.name", "feed-forward", "--train.draw", "steps")],
    "state zero": [in_c("breakout", "--train.state", "zero", "--train.reward-clip", "0.5",
                        "--train.weight-decay", "0.01", "--train.anneal-ent-coef", "True")],
    "feed-forward": [in_c("squared", "--policy.name", "feed-forward")],
    "separate": [in_c("pendulum", "--policy.name", "separate")],
    "MinGRU, two layers": [in_c("squared", "--policy.name", "feed-forward", "--rnn.name", "mingru",
                                "--rnn.num-layers", "2")],
    "LSTM": [in_c("squared", "--policy.name", "default", "--rnn.name", "lstm")],
    "GRU": [in_c("squared", "--policy.name", "default", "--rnn.name", "gru")],
    "board": [in_c("minesweeper", "--policy.hidden-size", "16", epochs=2)],
    "pictures": [in_python("envs.py:Pictures", "--policy.hidden-size", "32")],
    "impala": [in_python("envs.py:Pictures", "--policy.name", "impala", "--policy.hidden-size",
                         "32", epochs=2)],
    "fields, MultiDiscrete": [in_python("envs.py:Fields")],
    "MultiDiscrete in C": [in_c("spaces")],
    "masks": [in_c("masked")],
    "masks in Python": [in_python("envs.py:Masked")],
    "continuous": [in_c("continuous")],
    "squashed": [in_c("pendulum", "--policy.squash", "tanh")],
    "continuous in Python": [in_python("envs.py:Push", "--policy.squash", "none")],
    "normalised": [in_c("pendulum", "--train.norm-obs", "True", "--train.norm-reward", "True",
                        "--train.target-kl", "0.01", epochs=5)],
    "several agents": [in_c("multiagent", agents=128)],
    "inactive agents": [in_python("envs.py:Leaving", agents=64)],
    "serial": [in_python("gym/CartPole-v1")],
    "multiprocessing": [in_python("gym/CartPole-v1", *WORKERS)],
    "multiprocessing, half": [in_python("gym/CartPole-v1", *WORKERS, "--vec.batch-size", "8")],
    "inactive, workers": [in_python("envs.py:Leaving", *WORKERS, agents=64)],
    "package": [in_python("gym/CartPole-v1", "--vec.backend", "package")],
    "vector environment": [in_python("envs.py:vectorized", "--env.num-envs", "16",
                                     "--vec.num-envs", "1")],
    "tensors": [in_python("torch_cartpole.py:make", "--env.num-envs", "16", "--vec.num-envs", "1",
                          "--vec.backend", "tensors")],
    "PufferEnv": [in_python("envs.py:Guess", "--vec.num-envs", "2")],
    "custom network": [in_c("squared", "--policy.name", "nets.py:Net")],
    "custom network, threads": [in_c("squared", "--policy.name", "nets.py:Threaded",
                                     "--policy.hidden-size", "256")],
    "custom network, LSTM": [in_c("squared", "--policy.name", "nets.py:Net", "--rnn.name", "lstm")],
    "custom loss": [in_c("squared", "--train.loss", "nets.py:calm")],
    "custom optimizer": [in_c("squared", "--train.optimizer", "nets.py:Slow",
                              "--train.learning-rate", "0.001")],
    "two ranks": [in_c("cartpole", "--train.gpus", "2", agents=128)],
    "two ranks, torchrun": [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                             *in_c("pendulum", "--train.norm-obs", "True", agents=128)]],
    "resumed": [in_c("cartpole", epochs=2), in_c("cartpole", "--resume", "latest", epochs=5)],
    "resumed, adam": [in_c("pendulum", "--train.optimizer", "adam", "--train.norm-reward", "True",
                           epochs=2),
                      in_c("pendulum", "--resume", "latest", epochs=4)],
    "loaded": [in_python("gym/CartPole-v1", epochs=1),
               in_python("gym/CartPole-v1", "--load-model-path", "latest")],
    "script": [["script.py"]],
    "recorder": [["recorder.py", "breakout"]],
    "recorder, masks": [["recorder.py", "masks"]],
    "recorder, squashed LSTM": [["recorder.py", "squashed, lstm"]],
    "recorder, fields": [["recorder.py", "encoded"]],
}


def verb(*words):
    return [PUFFERL, *words]


def bad(*options):
    return in_c("squared", "--data-dir", "none", *options)


def bad_env(env, *options):
    return in_python(env, "--data-dir", "none", *options)


TEXTS = {  # {name: the command}
    "help": verb("--help"),
    "help breakout": verb("train", "breakout", "--help"),
    "help gym": verb("train", "gym/CartPole-v1", "--help"),
    "help custom": verb("train", "envs.py:Signs", "--policy.name", "nets.py:Net", "--help"),
    "list": verb("list"),
    "eval": verb("eval", "squared", "--baseline", "--eval.episodes", "16", "--train.seed", "3",
                 "--eval.window", "False"),
    "error: verb": verb("trian", "breakout"),
    "error: no environment": verb("train"),
    "error: unknown environment": verb("train", "breakuot"),
    "error: unknown option": bad("--train.learnin-rate", "1"),
    "error: unknown section": bad("--trian.gamma", "1"),
    "error: option without section": bad("--lr", "1"),
    "error: option of others": bad("--train.batch-size", "64"),
    "error: no value": bad("--train.gamma"),
    "error: type": bad("--train.gamma", "high"),
    "error: bound": bad("--train.gamma", "1.5"),
    "error: choice": bad("--train.optimizer", "sgd"),
    "error: sizes": bad("--train.minibatch-size", "100"),
    "error: environment's setting": bad("--env.distance", "0"),
    "error: backend": bad("--vec.backend", "nativ"),
    "error: no GPU": bad("--train.device", "cuda"),
    "error: unused option": bad("--train.beta2", "0.9"),
    "error: no network": bad("--policy.name", "missing.py:Net"),
    "error: no class": bad("--policy.name", "nets.py:Missing"),
    "error: few logits": bad("--policy.name", "nets.py:TooFewLogits"),
    "error: forward": bad("--policy.name", "nets.py:RaisesInForward"),
    "error: detached": bad("--policy.name", "nets.py:Detached"),
    "error: loss": bad("--train.loss", "nets.py:no_tensor"),
    "error: no checkpoint": bad("--load-model-path", "missing.pt"),
    "error: damaged checkpoint": bad("--load-model-path", "cut.pt"),
    "error: no such file as a checkpoint": bad("--load-model-path", "nets.py"),
    "error: other network": bad("--load-model-path", "other.pt"),
    "error: nothing to resume": verb("train", "squared", "--data-dir", "runs", "--resume", "latest"),
    "error: data-dir": bad("--data-dir", "nets.py/runs"),
    "error: no file": bad_env("missing.py:make"),
    "error: broken file": bad_env("broken.py:make"),
    "error: header": verb("train", "broken.h"),
    "error: no Gymnasium id": bad_env("gym/CartPole-v99"),
    "error: spaceless": bad_env("envs.py:Spaceless"),
    "error: reset raises": bad_env("envs.py:RaisesInReset"),
    "error: step raises": bad_env("envs.py:RaisesInStep"),
    "error: step raises in a worker": bad_env("envs.py:RaisesInStep", *WORKERS),
    "error: not finite": bad_env("envs.py:NotFinite"),
    "error: out of its space": bad_env("envs.py:OutOfItsSpace"),
    "error: two rewards": bad_env("envs.py:TwoRewards"),
    "error: eval": verb("eval", "squared", "--data-dir", "runs", "--load-model-path", "latest"),
    "error: export": verb("export", "squared", "--data-dir", "runs"),
    "error: plot": verb("plot", "latest", "--data-dir", "runs"),
    "error: sweep": verb("sweep", "squared", "--sweep.num-trials", "many"),
}


class Failed(Exception):
    """A command ended with an error, or left nothing to compare."""


class Tree:
    """A project's folder, and a process that has imported it.

    Most commands run in a fork of it, as a new process without two seconds of imports.
    """

    FORKS = """
import json, os, runpy, signal, sys
import pufferl
for line in sys.stdin:
    script, words, folder, seconds = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder)
for number, name in enumerate((os.devnull, "stdout", "stderr")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
signal.alarm(seconds)
runpy.run_path(script, run_name="__main__")
"""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder}/tests",
                            "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
        self.server = subprocess.Popen([sys.executable, "-c", self.FORKS], text=True, cwd=folder,
                                       env=self.environment, stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE)

    def run(self, command, folder):
        """Return (exit status, output, errors) of a command of RUNS or TEXTS."""
        words = [word.replace("TREE", str(self.folder)) for word in command]
        if command[:2] == [PUFFERL, "train"] and "--help" not in command:
            job = json.dumps([words[0], words[1:], str(folder), SECONDS])
            print(job, file=self.server.stdin, flush=True)
            status = self.server.stdout.readline()
            if not status:
                raise Failed(f"import pufferl fails in {self.folder}")
            return int(status), *((folder / name).read_text(errors="replace")
                                  for name in ("stdout", "stderr"))
        process = subprocess.run([sys.executable, *words], cwd=folder, env=self.environment,
                                 stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                 errors="replace", timeout=SECONDS)
        return process.returncode, process.stdout, process.stderr

    def close(self):
        self.server.stdin.close()
        self.server.wait()


def prepare(folder):
    """Put the files that commands name into a new folder."""
    shutil.copytree(ROOT / "bench/user_files", folder)
    shutil.copy(ROOT / "examples/torch_cartpole.py", folder)
    torch.save({"other.weight": torch.zeros(3)}, folder / "other.pt")
    whole = (folder / "other.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])


def leaves(value, name=""):
    """Yield (name, tensor) of all tensors and numbers in nested dicts and lists.

    In a fixed order.
    """
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from leaves(part, f"{name}/{i}" if name else str(i))
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, int | float):
        yield name, torch.tensor(value, dtype=torch.float64)


def contents(tensor):
    """Return a value that two tensors share if they are equal bit for bit."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), data


def digest(value):
    """Return a hash of all tensors and numbers in nested dicts and lists, with names."""
    hashed = hashlib.sha256()
    for name, tensor in leaves(value):
        hashed.update(repr((name, *contents(tensor))).encode())
    return hashed.hexdigest()[:12]


def without_hash(name, tensor):
    """Return the states of environments without their first 32 bytes.

    These contain a hash of the folder.
    """
    states = tensor.dtype == torch.uint8 and tensor.ndim == 1 and not name.startswith("model/")
    return tensor[32:] if states else tensor


def results(commands, tree, folder):
    """Return {name: tensor} of a run's results."""
    prepare(folder)
    for command in commands:
        status, output, errors = tree.run(command, folder)
        if status:
            last = "".join((errors or output).strip().splitlines()[-1:])
            raise Failed(f"exit status {status} (-14: took over {SECONDS} s): {last}")
    paths = sorted(folder.rglob("trainer_state.pt"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise Failed("no checkpoint was written")
    state = torch.load(paths[-1], weights_only=True)
    state.pop("uptime")
    parts = [(name, without_hash(name, tensor)) for name, tensor in leaves(state)]
    metrics = paths[-1].with_name("metrics.jsonl")
    for i, line in enumerate(metrics.read_text().splitlines() if metrics.exists() else ()):
        entry = {name: value for name, value in json.loads(line).items()
                 if not name.startswith("performance/")}
        parts += leaves(entry, f"metrics/{i}")
    return dict(parts)


def compare(before, now):
    """Return ("same" or "differs", details) of two {name: tensor}."""
    gone, new = before.keys() - now.keys(), now.keys() - before.keys()
    renamed = {}
    for name in sorted(gone):
        twin = next((other for other in sorted(new)
                     if contents(before[name]) == contents(now[other])), None)
        if twin is not None:
            renamed[name] = twin
            new.remove(twin)
    lost = [f"{name} is missing" for name in sorted(gone - renamed.keys())]
    lost += [f"{name} is new" for name in sorted(new)]
    different = [name for name in before if name in now
                 and contents(before[name]) != contents(now[name])]
    names = ", ".join(f"{old} -> {name}" for old, name in renamed.items())
    note = f"; renamed: {names}" if renamed else ""
    if not lost and not different:
        return "same", f"{len(before)} tensors and numbers{note}"
    texts = [*lost[:3], *([f"... {len(lost)} in all"] if len(lost) > 3 else [])]
    if different:
        first = different[0]
        old, tensor = before[first], now[first]
        if (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
            gap = (old.double() - tensor.double()).abs()
            text = f"{first} by {gap.nan_to_num(torch.inf).max().item():.3g} at most"
        else:
            text = f"{first}, {old.dtype} {tuple(old.shape)}, is {tensor.dtype} {tuple(tensor.shape)}"
        texts.append(f"{text}; {len(different)} of {len(before)} differ")
    return "differs", "; ".join(texts) + note


def text_of(command, tree, folder):
    """Return a command's output without what depends on the folders and the time."""
    prepare(folder)
    status, output, errors = tree.run(command, folder)
    text = f"exit status {status}\n{output}--- stderr\n{errors}"
    for path, name in ((os.path.relpath(tree.folder, folder), "TREE"), (str(tree.folder), "TREE"),
                       (str(folder), "FOLDER"), (sys.executable, "PYTHON")):
        text = text.replace(path, name)
    text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}", "RUN", text)
    return re.sub(r"(TREE/[\w/]+\.py\", line) \d+", r"\1 N", text)


def compare_texts(before, now):
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now",
                                 lineterm="", n=1)
    diff = "".join(f"\n    {line}" for line in lines)
    return ("differs", diff) if diff else ("same", f"{len(now.splitlines())} lines")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="what has TEXT in its name")
    parser.add_argument("--list", action="store_true", help="print the names of runs and texts")
    args = parser.parse_args()
    chosen = [name for name in (*RUNS, *TEXTS)
              if not args.only or any(part in name for part in args.only)]
    if not chosen:
        sys.exit(f"--only {' '.join(args.only)}: no run or text has it in its name; --list has all")
    if args.list:
        print("\n".join(chosen))
        return
    trees = Tree(checkout(args.commit)[1]), Tree(ROOT)
    begun, differing = time.perf_counter(), 0
    with (contextlib.closing(trees[0]), contextlib.closing(trees[1]), ThreadPoolExecutor(2) as pool,
          tempfile.TemporaryDirectory() as temporary):
        for i, name in enumerate(chosen):
            work, commands = (results, RUNS[name]) if name in RUNS else (text_of, TEXTS[name])
            folders = [Path(temporary) / side / str(i) for side in ("a", "b")]
            jobs = [pool.submit(work, commands, tree, folder)
                    for tree, folder in zip(trees, folders, strict=True)]
            errors = [(side, job.exception()) for side, job in zip(("before", "now"), jobs, strict=True)
                      if job.exception()]
            if errors:
                verdict = "error", "; ".join(f"{side}: {type(error).__name__}: {error}"
                                             for side, error in errors)
            else:
                verdict = (compare if name in RUNS else compare_texts)(*(job.result() for job in jobs))
            differing += verdict[0] != "same"
            print(f"{name:36} {verdict[0]:8} {verdict[1]}", flush=True)
    print(f"{len(chosen) - differing} of {len(chosen)} are the same; "
          f"{time.perf_counter() - begun:.0f} s")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
