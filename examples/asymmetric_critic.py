"""Give the critic observations that the actor does not see.

    python -m examples.asymmetric_critic

The environment returns a Dict. It arrives as one flat array; `nativize_tensor` gives its fields.
"""

import gymnasium
import numpy as np
import torch

from emulation import nativize_dtype, nativize_tensor
from pufferl import PuffeRL, make


class HiddenVelocities(gymnasium.ObservationWrapper):
    """Split CartPole's observation into what the actor sees and what it does not."""

    def __init__(self, env):
        super().__init__(env)
        box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(visible=box, hidden=box)

    def observation(self, observation):
        return {"visible": observation[[0, 2]], "hidden": observation[[1, 3]]}


def mlp(inputs, outputs, hidden_size=32):
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden_size), torch.nn.Tanh(),
                               torch.nn.Linear(hidden_size, outputs))


class AsymmetricPolicy(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.dtype = nativize_dtype(env)
        self.actor, self.critic = mlp(2, env.single_action_space.n), mlp(4, 1)

    def forward(self, observations):
        fields = nativize_tensor(observations, self.dtype)
        both = torch.cat([fields["visible"], fields["hidden"]], -1)
        return self.actor(fields["visible"]), self.critic(both)


if __name__ == "__main__":
    env = make(lambda: HiddenVelocities(gymnasium.make("CartPole-v1")), num_envs=8,
               backend="serial")
    policy = AsymmetricPolicy(env.driver_env)
    trainer = PuffeRL(env=env, policy=policy, batch_size=8 * 64, minibatch_size=256,
                      total_timesteps=8_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()
        losses = trainer.train()
    print(f"return {statistics['episode_return']:.0f}, "
          f"explained variance {losses['explained_variance']:.2f}")
    trainer.close()
