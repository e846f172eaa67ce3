"""Environments as users write them, without an .ini in config/.

    python pufferl.py train tests/user_envs.py:Catch --train.total-timesteps 300_000
"""

import gymnasium
import numpy as np
from gymnasium import spaces


def cartpole():
    """Make Gymnasium's CartPole in a function that no config names."""
    return gymnasium.make("CartPole-v1")


class Catch(gymnasium.Env):
    """A ball falls down a 7 × 7 board; +1 if the paddle catches it, else -1."""

    def __init__(self, size=7):
        self.size = size
        self.observation_space = spaces.Box(0.0, 1.0, (size, size), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(self.size))
        self.paddle = int(self.np_random.integers(self.size))
        return self._board(), {}

    def _board(self):
        board = np.zeros((self.size, self.size), np.float32)
        board[self.row, self.column] = board[-1, self.paddle] = 1
        return board

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.size - 1))
        self.row += 1
        done = self.row == self.size - 1
        reward = (1.0 if self.paddle == self.column else -1.0) if done else 0.0
        return self._board(), reward, done, False, {}


class CatchImage(Catch):
    """Catch on an 84 × 84 image of one colour, twelve pixels a square by default."""

    def __init__(self, pixels=12):
        super().__init__(7)
        self.pixels = np.ones((pixels, pixels), np.uint8)
        self.observation_space = spaces.Box(0, 255, (7 * pixels, 7 * pixels, 1), np.uint8)

    def _board(self):
        return np.kron(255 * super()._board().astype(np.uint8), self.pixels)[..., None]


class PointMass(gymnasium.Env):
    """A mass is pushed to the origin; observations have no bounds."""

    def __init__(self, length=100):
        self.length = length
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform(-10, 10, 2), np.zeros(2)
        self.steps = 0
        return self._see(), {}

    def _see(self):
        return np.concatenate([self.position, self.velocity]).astype(np.float32)

    def step(self, action):
        self.velocity = 0.95 * self.velocity + 0.2 * np.clip(action, -1, 1)
        self.position = self.position + self.velocity
        self.steps += 1
        reward = -0.1 * float(np.linalg.norm(self.position))
        return self._see(), reward, False, self.steps == self.length, {}
