"""Stack frames and repeat actions with Gymnasium wrappers.

    python -m examples.wrappers
"""

import gymnasium

import models
from pufferl import PuffeRL, make


class Repeat(gymnasium.Wrapper):
    """Repeat each action `times` times and add up the rewards."""

    def __init__(self, env, times=2):
        super().__init__(env)
        self.times = times

    def step(self, action):
        total = 0.0
        for _ in range(self.times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def make_env():
    return gymnasium.wrappers.FrameStackObservation(Repeat(gymnasium.make("CartPole-v1")), 3)


if __name__ == "__main__":
    env = make(make_env, num_envs=8, backend="serial")
    policy = models.MinGRUPolicy(env.driver_env, hidden_size=32)
    trainer = PuffeRL(env=env, policy=policy, batch_size=8 * 32, minibatch_size=256,
                      total_timesteps=4_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()
        trainer.train()
    print({name: round(statistics[name], 1) for name in ("episode_return", "episode_length")})
    trainer.close()
