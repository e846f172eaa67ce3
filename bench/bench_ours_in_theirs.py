"""Measure other libraries' PPO on our Breakout, through ocean.gymnasium.

    PYTHON bench/bench_ours_in_theirs.py sb3               # an interpreter that has the library
    PYTHON bench/bench_ours_in_theirs.py skrl --num-envs 1024 --horizon 64 --minibatch-size 8192
    PYTHON bench/bench_ours_in_theirs.py cleanrl --script path/to/cleanrl/ppo.py

Each runs twice: environments in sequence, as gymnasium.make makes them, and all in one call, as
gymnasium.make_vec does. `OneCall` adapts to Stable-Baselines3's vector interface; CleanRL's script
is unchanged, the second time with its SyncVectorEnv replaced. Figures are trained steps per second
and the mean score of the last training episodes.
"""

import argparse
import collections
import importlib.util
import runpy
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ocean.gymnasium

NAME = ocean.gymnasium.environment_id("breakout")
SCORES = collections.deque(maxlen=100)  # of the episodes that ended last


class Scores(gymnasium.Wrapper):
    """Keeps the score of each episode."""

    def step(self, action):
        result = super().step(action)
        if "score" in result[4]:
            SCORES.append(result[4]["score"])
        return result


class VectorScores(gymnasium.vector.VectorWrapper):
    """The same for a vector.

    CleanRL expects final_info as the list of Gymnasium before 1.0.
    """

    def step(self, actions):
        result = super().step(actions)
        if "final_info" in result[4]:
            SCORES.extend(result[4].pop("final_info")["score"][result[4].pop("_final_info")])
        return result


def one():
    return Scores(gymnasium.make(NAME))


def many(num_envs):
    return VectorScores(gymnasium.make_vec(NAME, num_envs=num_envs))


def sb3(a, at_once):
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

    class OneCall(VecEnv):
        """A Gymnasium vector with SAME_STEP autoreset as Stable-Baselines3's VecEnv."""

        def __init__(self, envs):
            self.envs = envs
            super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

        def reset(self):
            return self.envs.reset(seed=self._seeds[0])[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            observations, rewards, terminals, truncations, infos = self.envs.step(self.actions)
            each = [{} for _ in range(self.num_envs)]
            for i in np.flatnonzero(terminals | truncations):
                each[i] = {"terminal_observation": infos["final_obs"][i],
                           "TimeLimit.truncated": bool(truncations[i] and not terminals[i])}
            return observations, rewards, terminals | truncations, each

        def close(self):
            self.envs.close()

        def get_attr(self, name, indices=None):
            return [getattr(self.envs, name)] * self.num_envs

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError("all environments are one object")

        def env_method(self, name, *args, indices=None, **kwargs):
            raise NotImplementedError("all environments are one object")

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * self.num_envs

    envs = OneCall(many(a.num_envs)) if at_once else DummyVecEnv([one] * a.num_envs)
    model = PPO("MlpPolicy", envs, n_steps=a.horizon, batch_size=a.minibatch_size, n_epochs=4,
                learning_rate=1e-3, ent_coef=0.01, device="cpu", seed=0)
    model.learn(a.steps)


def skrl(a, at_once):
    import torch
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.trainers.torch import SequentialTrainer
    from torch import nn

    def net(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                             nn.Linear(64, outputs))

    class Policy(CategoricalMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.net = net(self.num_observations, self.num_actions)

        def compute(self, inputs, role=""):
            return self.net(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = net(self.num_observations, 1)

        def compute(self, inputs, role=""):
            return self.net(inputs["observations"]), {}

    torch.manual_seed(0)
    envs = many(a.num_envs) if at_once else gymnasium.vector.SyncVectorEnv([one] * a.num_envs)
    envs = wrap_env(envs, wrapper="gymnasium")
    spaces = {"observation_space": envs.observation_space, "action_space": envs.action_space,
              "device": envs.device}
    settings = PPO_CFG(rollouts=a.horizon, learning_epochs=4, learning_rate=1e-3,
                       entropy_loss_scale=0.01,
                       mini_batches=a.num_envs * a.horizon // a.minibatch_size)
    settings.experiment.write_interval = settings.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=a.horizon, num_envs=a.num_envs, device=envs.device)
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    agent = PPO(models=models, memory=memory, cfg=settings, **spaces)
    cfg = {"timesteps": a.steps // a.num_envs, "headless": True, "disable_progressbar": True}
    SequentialTrainer(cfg=cfg, env=envs, agents=agent).train()


def cleanrl(a, at_once):
    if at_once:
        gymnasium.vector.SyncVectorEnv = lambda creators: many(len(creators))
    else:
        # the wrapper of the library, whose results are not needed
        gymnasium.wrappers.RecordEpisodeStatistics = Scores
    sys.argv = [a.script, "--env-id", NAME, "--num-envs", str(a.num_envs), "--num-steps",
                str(a.horizon),
                "--num-minibatches", str(a.num_envs * a.horizon // a.minibatch_size),
                "--learning-rate", "0.001", "--total-timesteps", str(a.steps), "--no-cuda"]
    runpy.run_path(a.script, run_name="__main__")


SIDES = {"sb3": (sb3, "stable_baselines3"), "skrl": (skrl, "skrl"), "cleanrl": (cleanrl, "tyro")}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=SIDES)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--minibatch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=500_000, help="of all environments together")
    parser.add_argument("--script", help="CleanRL's ppo.py")
    parser.add_argument("--at-once", choices=["yes", "no"], help="one of the two only")
    a = parser.parse_args()
    train, package = SIDES[a.library]
    if importlib.util.find_spec(package) is None or (a.library == "cleanrl" and not a.script):
        sys.exit(f"{sys.executable} has no {package}, or --script with CleanRL's ppo.py is missing")
    results = []
    for at_once in [False, True] if a.at_once is None else [a.at_once == "yes"]:
        SCORES.clear()
        begun = time.perf_counter()
        train(a, at_once)
        results.append((at_once, a.steps / (time.perf_counter() - begun), np.mean(SCORES)))
    for at_once, speed, score in results:
        how = "all by one call" if at_once else "one after the other"
        print(f"{a.library}: {NAME}, {a.num_envs} environments, {how}: {speed:,.0f} steps a second "
              f"with learning; score {score:.1f} at the end")


if __name__ == "__main__":
    main()
