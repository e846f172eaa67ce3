"""Step many CartPoles in torch, on a device.

    python pufferl.py train examples/torch_cartpole.py:make --env.num-envs 1024

Copy it for other environments; tensors.py lists what one must have. Physics and limits are those of
Gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983).
"""

import math

import numpy as np
import torch
from gymnasium import spaces


class CartPole:
    metadata = {"autoreset_mode": "same_step"}  # noqa: RUF012
    single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    single_action_space = spaces.Discrete(2, dtype=np.int32)  # the policy's dtype: no copy

    def __init__(self, num_envs, max_steps, device):
        self.num_envs, self.max_steps, self.device = num_envs, max_steps, device
        self.random = torch.Generator(device)

    def _begin(self):
        return torch.rand(self.num_envs, 4, generator=self.random, device=self.device) * 0.1 - 0.05

    def reset(self, seed=None):
        if seed is not None:
            self.random.manual_seed(seed)
        self.state = self._begin()
        self.steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        return self.state, {}

    def step(self, actions):
        _, speed, angle, turning = self.state.unbind(1)
        force = actions * 20.0 - 10.0
        cos, sin = angle.cos(), angle.sin()
        # the pole: 0.1 kg, half of it 0.5 m; with the cart 1.1 kg
        push = (force + 0.05 * turning**2 * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        change = torch.stack([speed, push - 0.05 * bend * cos / 1.1, turning, bend], 1)
        last, self.steps = self.state + 0.02 * change, self.steps + 1
        terminated = (last[:, 0].abs() > 2.4) | (last[:, 2].abs() > 12 * math.pi / 180)
        truncated = self.steps >= self.max_steps
        ended = terminated | truncated
        self.state = torch.where(ended[:, None], self._begin(), last)
        self.steps = self.steps.masked_fill(ended, 0)
        rewards = torch.ones(self.num_envs, device=self.device)
        return self.state, rewards, terminated, truncated, {"final_obs": last}


def make(num_envs=1024, max_steps=500, device="cpu"):
    """Make the environments: --env.num-envs 4096 --env.device cuda."""
    return CartPole(num_envs, max_steps, device)
