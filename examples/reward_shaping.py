"""Shape the reward with a Gymnasium wrapper and log the true return.

    python -m examples.reward_shaping

The policy learns from the shaped reward. A number in the last `info` of an episode is logged.
"""

import gymnasium

import models
from pufferl import PuffeRL, make


class Upright(gymnasium.Wrapper):
    """Reward a small angle of CartPole's pole."""

    def reset(self, **options):
        self.true_return = 0.0
        return self.env.reset(**options)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.true_return += reward
        shaped = reward - 2.0 * abs(observation[2])
        return observation, shaped, terminated, truncated, {**info, "true_return": self.true_return}


if __name__ == "__main__":
    env = make(lambda: Upright(gymnasium.make("CartPole-v1")), num_envs=16)
    policy = models.MinGRUPolicy(env.driver_env, hidden_size=32)
    trainer = PuffeRL(env=env, policy=policy, batch_size=16 * 32, learning_rate=0.02,
                      total_timesteps=8_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()
        trainer.train()
    print({name: round(statistics[name], 2) for name in ("episode_return", "true_return")})
    trainer.close()
