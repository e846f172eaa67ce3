"""Evaluate while training, stop early, play in a bare environment.

    python -m examples.early_stopping      # writes best.pt

`models.one_step` runs any network for one step, with a memory or without. `models.sample_logits`
draws actions of any kind or, if deterministic, takes the most likely ones; give it the masks if the
environment has them. Unless data_dir is None, a run also saves the weights of its best mean score
as best_NAME.pt in its folder.
"""

import gymnasium
import numpy as np
import torch

import models
from emulation import GymnasiumPufferEnv
from pufferl import PuffeRL, make


def make_env():
    return gymnasium.make("CartPole-v1")


@torch.no_grad()
def play(policy, episodes):
    """Play the most likely actions; returns the episode returns."""
    env, returns = GymnasiumPufferEnv(make_env()), []  # flattens Dict and Tuple spaces as well
    policy.eval()
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        state = models.initial_state(policy, 1)
        done, total = False, 0.0
        while not done:
            outputs = models.one_step(policy, torch.from_numpy(observation)[None], state)
            actions, *_ = models.sample_logits(*outputs, seed=seed, step=0, deterministic=True,
                                               squash=models.squash_of(policy))
            observation, reward, terminated, truncated, _ = env.step(actions[0].numpy())
            done, total = terminated or truncated, total + reward
        returns.append(total)
    policy.train()
    return np.array(returns)


if __name__ == "__main__":
    env = make(make_env, num_envs=32)
    policy, best = models.MinGRUPolicy(env, hidden_size=64), -np.inf
    trainer = PuffeRL(env=env, policy=policy, total_timesteps=200_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs and best < 475:
        trainer.evaluate()
        trainer.train()
        if trainer.epoch % 10 == 0 and (mean := play(policy, 5).mean()) > best:
            best = mean
            torch.save(policy.state_dict(), "best.pt")
            print(f"{trainer.global_step:7,} steps: {best:.1f}")
    trainer.close()

    trained = models.MinGRUPolicy(env, hidden_size=64)
    trained.load_state_dict(torch.load("best.pt", weights_only=True))
    print(play(trained, 5))
