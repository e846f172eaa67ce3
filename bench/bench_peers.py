"""Measure trained steps per second next to Stable-Baselines3's PPO.

    make bench                              # sets up .venv-bench, where the peer is installed
    python bench/bench_peers.py --peer-python .venv-bench/bin/python --env CartPole-v1 --num-envs 64

Both sides have the same environment through Gymnasium, the same network (two layers that policy and
value share), batch, minibatch and number of passes. Each side runs in a process with all cores,
interleaved, and the medians count. Timed are rollouts and updates after a warm-up, without imports
and compilation. `package` is the vector environment of the id's package, if it has one; `tensors`
is gymnax's environment of that id in JAX, if both are installed; the peer steps its environments in
sequence. The last line of the output is one JSON object.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2  # rollouts that are not timed


@dataclass
class Arguments:
    peer_python: str = str(ROOT / ".venv-bench" / "bin" / "python")
    """The interpreter that has stable_baselines3."""
    env: str = "CartPole-v1"
    """A Gymnasium id."""
    num_envs: int = 64
    """Environments."""
    horizon: int = 64
    """Steps of a rollout in each of them."""
    minibatch_size: int = 1024
    """Steps of an update."""
    passes: int = 4
    """How often each step is learnt from."""
    hidden_size: int = 64
    """Width of the two layers."""
    rollouts: int = 20
    """Timed in one repeat."""
    repeats: int = 5
    """Of each side, in turn."""


def ours(a, backend):
    sys.path.insert(0, str(ROOT))
    import pufferl

    name, copies = (f"gymnax/{a['env']}", "--env.num-envs") if backend == "tensors" else (
        f"gym/{a['env']}", "--vec.num-envs")
    batch = a["num_envs"] * a["horizon"]
    options = {"--vec.backend": backend, copies: a["num_envs"], "--policy.name": "feed-forward",
               "--policy.hidden-size": a["hidden_size"], "--rnn.name": "none",
               "--train.horizon": a["horizon"],
               "--train.minibatch-size": a["minibatch_size"], "--train.replay-ratio": a["passes"],
               "--train.total-timesteps": batch * 10**6, "--train.log-interval": 10**9}
    args = pufferl.load_config(name, [str(part) for pair in options.items() for part in pair])
    vecenv = pufferl.load_env(name, args)
    trainer = pufferl.PuffeRL({**args["train"], "env": name, "data_dir": None}, vecenv,
                              pufferl.load_policy(args, vecenv, name))
    for rollout in range(WARM_UP + a["rollouts"]):
        if rollout == WARM_UP:
            begun = time.perf_counter()
        trainer.evaluate()
        trainer.train()
    seconds = time.perf_counter() - begun
    trainer.release()
    return batch * a["rollouts"] / seconds


def stable_baselines3(a):
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    class Clock(BaseCallback):
        def _on_rollout_start(self):
            self.starts = [*getattr(self, "starts", []), time.perf_counter()]

        def _on_step(self):
            return True

    hidden = a["hidden_size"]

    class Trunk(BaseFeaturesExtractor):
        """Shared by policy and value, as in models.FeedForward."""

        def __init__(self, space):
            super().__init__(space, hidden)
            layers = nn.Linear(space.shape[0], hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
            self.layers = nn.Sequential(*layers)

        def forward(self, observations):
            return self.layers(observations)

    network = {"features_extractor_class": Trunk, "net_arch": []}
    model = PPO("MlpPolicy", make_vec_env(a["env"], a["num_envs"]), n_steps=a["horizon"],
                device="cpu",
                batch_size=a["minibatch_size"], n_epochs=a["passes"], policy_kwargs=network)
    clock, batch = Clock(), a["num_envs"] * a["horizon"]
    model.learn(batch * (WARM_UP + a["rollouts"] + 1), callback=clock)
    return batch * a["rollouts"] / (clock.starts[WARM_UP + a["rollouts"]] - clock.starts[WARM_UP])


SIDES = {"serial": lambda a: ours(a, "serial"),
         "multiprocessing": lambda a: ours(a, "multiprocessing"),
         "package": lambda a: ours(a, "package"), "tensors": lambda a: ours(a, "tensors"),
         "Stable-Baselines3": stable_baselines3}


def in_gymnax(name):
    if importlib.util.find_spec("gymnax") is None:
        return False
    from gymnax import registered_envs

    return name in registered_envs


def main():
    import gymnasium
    import tyro

    a = tyro.cli(Arguments, description=__doc__)
    if not Path(a.peer_python).exists():
        sys.exit(f"{a.peer_python}: there is no such interpreter; `make .venv-bench/ready` "
                 "installs the peer.")
    there = {"package": gymnasium.spec(a.env).vector_entry_point, "tensors": in_gymnax(a.env)}
    speeds = {side: [] for side in SIDES if there.get(side, True)}
    for _ in range(a.repeats):
        for side, measured in speeds.items():
            python = a.peer_python if side == "Stable-Baselines3" else sys.executable
            child = subprocess.run([python, __file__, "--child", side, json.dumps(vars(a))],
                                   capture_output=True, text=True, cwd=ROOT)
            if child.returncode:
                sys.exit(f"{side} failed:\n{child.stderr}")
            measured.append(float(child.stdout.splitlines()[-1]))
    peer = statistics.median(speeds["Stable-Baselines3"])
    print(f"{a.env}: {a.num_envs} environments × horizon {a.horizon}, minibatch "
          f"{a.minibatch_size:,}, {a.passes} passes, 2 × {a.hidden_size}; median of {a.repeats}")
    for side, measured in speeds.items():
        middle = statistics.median(measured)
        print(f"  {side:20} {middle:10,.0f} trained steps a second   {middle / peer:6.2f} x")
    print(json.dumps({**vars(a), "steps_a_second": speeds}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(SIDES[sys.argv[2]](json.loads(sys.argv[3])))
    else:
        main()
