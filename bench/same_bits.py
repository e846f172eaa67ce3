"""Checks that the working tree trains to the same bits as a commit. Run it after each step of a change
that should not change any result.

    python tests/same_bits.py                    # beside HEAD
    python tests/same_bits.py v1.2 --only masks  # beside another commit, one kind of run

Each kind of run trains three epochs from the command line, in a clone of the commit and in
this tree, on this machine, and the weights and the states at the end are compared bit for
bit. The clone is kept in the folder for temporary files, with what was compiled in it. Ends
with 1 if anything differs.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
NET = '''
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, env, hidden_size=32):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(hidden_size), nn.Tanh())
        self.body(torch.zeros(2, *env.single_observation_space.shape))
        self.head = nn.Linear(hidden_size, int(env.single_action_space.n) + 1)
    def forward(self, observations):
        y = self.head(self.body(observations.float()))
        return y[..., :-1], y[..., -1:]
'''
C = ["--env.num-envs", "64", "--train.horizon", "32", "--train.minibatch-size", "512",
     "--train.replay-ratio", "2"]
PYTHON = ["--vec.num-envs", "16", "--train.horizon", "32", "--train.minibatch-size", "256",
          "--train.replay-ratio", "2", "--train.learning-rate", "0.01", "--train.prio-alpha", "0.4"]
TWO = ["--vec.backend", "multiprocessing", "--vec.num-workers", "2"]
KINDS = {  # (environment, options); FILES stands for the folder with the network above
    "float32": ("breakout", C),
    "bfloat16": ("breakout", [*C, "--train.precision", "bfloat16"]),
    "adam": ("breakout", [*C, "--train.optimizer", "adam", "--train.learning-rate", "0.001"]),
    "serial": ("gym/CartPole-v1", [*PYTHON, "--vec.backend", "serial"]),
    "multiprocessing": ("gym/CartPole-v1", [*PYTHON, *TWO]),
    "LSTM": ("squared", [*C, "--policy.name", "default", "--rnn.name", "lstm"]),
    "own network": ("squared", [*C, "--policy.name", "FILES/net.py:Net"]),
    "masks": ("masked", C),
    "board": ("minesweeper", C),
    "continuous": ("pendulum", C),
    "normalised": ("pendulum",
                   [*C, "--train.norm-obs", "--train.norm-reward", "--train.target-kl", "0.01"]),
    "dead agents": (f"{ROOT}/tests/brought.py:Dying", [*PYTHON, "--vec.backend", "serial"]),
    "two ranks": ("cartpole", [*C, "--train.gpus", "2"]),
    "resumed": ("cartpole", C),
}


def train(root, name, options, folder, epochs, *more):
    """Trains in the project at `root`; returns the run's folder."""
    agents = 64
    if options[0] == "--vec.num-envs":
        agents = 64 if "Dying" in name else 16
    steps = epochs * 32 * agents * (2 if "--train.gpus" in options else 1)
    command = [sys.executable, f"{root}/pufferl.py", "train", name, *options,
               "--train.total-timesteps", str(steps),
               "--train.seed", "3", "--vec.num-threads", "2", "--logger", "none", "--data-dir",
               f"{folder}/runs", *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                          env={**os.environ, "COLUMNS": "120"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return max((Path(folder) / "runs").iterdir(), key=lambda run: run.stat().st_mtime)


def digest(value, found=None):
    """A hash of all tensors in a checkpoint, and of their names, in order."""
    found = hashlib.sha256() if found is None else found
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            digest(value[key], found)
    elif isinstance(value, list | tuple):
        for part in value:
            digest(part, found)
    elif isinstance(value, torch.Tensor):
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def bits(root, kind):
    """Hashes of what a kind of run leaves: (weights, the optimizer's, the statistics' and the
    environments' state)."""
    name, options = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(NET)
        name, options = name.replace("FILES", folder), [option.replace("FILES", folder)
                                                        for option in options]
        if kind == "resumed":
            run = train(root, name, options, folder, 2)
            run = train(root, name, options, folder, 5, "--resume", str(run))
        else:
            run = train(root, name, options, folder, 3)
        state = torch.load(run / "trainer_state.pt", weights_only=True)
        # behind the name of the library, which tells folders apart
        environments = state["environments"][32:]
        return digest(state["model"]), digest([state["tensors"], state["adam"], environments])


def clone(commit):
    """The project at a commit, in a folder of its own."""
    found = subprocess.run(["git", "rev-parse", commit], capture_output=True, text=True,
                           cwd=ROOT, check=True)
    name = found.stdout.strip()
    folder = Path(tempfile.gettempdir()) / f"same_bits_{os.getuid()}_{name[:12]}"
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(folder)],
                       check=True)
        subprocess.run(["git", "checkout", "--quiet", name], cwd=folder, check=True)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=list(KINDS),
                        metavar="KIND")
    a = parser.parse_args()
    before, different = clone(a.commit), 0
    for kind in a.only:
        then, now = bits(before, kind), bits(ROOT, kind)
        different += then != now
        print(f"{kind:16} {then[0]}  {now[0]}  {'the same' if then == now else 'DIFFERENT'}",
              flush=True)
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
