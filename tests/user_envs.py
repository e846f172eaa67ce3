"""Environments as users write them, without an .ini in config/.

For bench/bench_defaults.py and the tests of the automatic settings.

    python pufferl.py train tests/user_envs.py:Catch --train.total-timesteps 300_000
"""

from typing import ClassVar

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces


def cartpole():
    """Make Gymnasium's CartPole in a function that no config names."""
    return gymnasium.make("CartPole-v1")


class Catch(gymnasium.Env):
    """A ball falls down a 7 × 7 board; +1 if the paddle catches it, else -1.

    The paddle moves in the last row.
    """

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
    """A mass in a plane, some ten units from the origin, is pushed there.

    Observations have no bounds.
    """

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


class Colour(gymnasium.Env):
    """One of two colours is shown, then nothing for eight steps.

    +1 for naming it at the end, else -1.
    """

    def __init__(self, delay=8):
        self.delay = delay
        self.observation_space = spaces.Dict(
            colour=spaces.Discrete(3), clock=spaces.Box(0.0, 1.0, (1,), np.float32))  # 2: none
        self.action_space = spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.colour, self.steps = int(self.np_random.integers(2)), 0
        return self._see(), {}

    def _see(self):
        shown = self.colour if self.steps == 0 else 2
        return {"colour": shown, "clock": np.array([self.steps / (self.delay + 1)], np.float32)}

    def step(self, action):
        self.steps += 1
        done = self.steps > self.delay
        reward = (1.0 if action == self.colour else -1.0) if done else 0.0
        return self._see(), reward, done, False, {}


class Sokoban(gymnasium.Env):
    """A box is pushed to a goal on a 6 × 6 board of integers.

    0 empty, 1 wall, 2 goal, 3 box, 4 player. +1 at the goal, -0.01 a step, 40 steps.
    """

    MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))

    def __init__(self, length=40):
        self.length = length
        self.observation_space = spaces.Box(0, 4, (6, 6), np.int64)
        self.action_space = spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        places = [(row, column) for row in range(1, 5) for column in range(1, 5)]
        # a box at the edge may be lost
        inner = [(row, column) for row in (2, 3) for column in (2, 3)]
        self.box = inner[self.np_random.integers(4)]
        free = [place for place in places if place != self.box]
        self.goal, self.player = (free[i]
                                  for i in self.np_random.choice(len(free), 2, replace=False))
        self.steps = 0
        return self._board(), {}

    def _board(self):
        board = np.ones((6, 6), np.int64)
        board[1:5, 1:5] = 0
        board[self.goal] = 2
        board[self.box] = 3
        board[self.player] = 4
        return board

    def step(self, action):
        def beyond(place):
            return place[0] + self.MOVES[action][0], place[1] + self.MOVES[action][1]

        def inside(place):
            return 1 <= place[0] <= 4 and 1 <= place[1] <= 4

        target = beyond(self.player)
        if target == self.box and inside(beyond(self.box)):
            self.box = beyond(self.box)
        if inside(target) and target != self.box:
            self.player = target
        self.steps += 1
        done = self.box == self.goal
        return self._board(), float(done) - 0.01, done, not done and self.steps == self.length, {}


class Thousands(gymnasium.Env):
    """Two columns say which of five actions brings 1,000; thirty are noise. Ten steps."""

    def __init__(self, noise=30):
        self.noise = noise
        self.observation_space = spaces.Box(-np.inf, np.inf, (2 + noise,), np.float32)
        self.action_space = spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._see(), {}

    def _see(self):
        self.angle = self.np_random.uniform(-np.pi, np.pi)
        signal = [np.cos(self.angle), np.sin(self.angle)]
        return np.concatenate([signal, self.np_random.normal(size=self.noise)]).astype(np.float32)

    def step(self, action):
        right = int((self.angle + np.pi) / (2 * np.pi) * 5) % 5
        self.steps += 1
        return self._see(), 1000.0 * (action == right), self.steps == 10, False, {}


class TicTacToe(gymnasium.Env):
    """PettingZoo's tic-tac-toe against a random player, who begins half of the games.

    An illegal move loses.
    """

    def __init__(self):
        from pettingzoo.classic import tictactoe_v3

        self.game = tictactoe_v3.raw_env()
        self.observation_space = spaces.Box(0, 1, (3, 3, 2), np.int8)
        self.action_space = spaces.Discrete(9)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.game.reset()
        self.player = self.game.agents[self.np_random.integers(2)]
        if self.player != self.game.agent_selection:
            self._answer()
        return self._see(), {}

    def _see(self):
        return np.asarray(self.game.observe(self.player)["observation"], np.int8)

    def _answer(self):
        mask = self.game.observe(self.game.agent_selection)["action_mask"]
        self.game.step(int(self.np_random.choice(np.flatnonzero(mask))))

    def step(self, action):
        if not self.game.observe(self.player)["action_mask"][action]:
            return self._see(), -1.0, True, False, {}
        self.game.step(int(action))
        if not any(self.game.terminations.values()):
            self._answer()
        done = any(self.game.terminations.values())
        return self._see(), float(self.game.rewards[self.player]) if done else 0.0, done, False, {}


class Dying(pettingzoo.ParallelEnv):
    """Four agents, the first of which leaves every three steps, name a sign.

    The last one ends the episode.
    """

    metadata: ClassVar = {"name": "dying"}
    possible_agents: ClassVar = [f"agent_{i}" for i in range(4)]
    random = np.random.default_rng(0)

    def observation_space(self, agent):
        return gymnasium.spaces.Box(-1, 1, (3,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents), 0
        return self.see(), {agent: {} for agent in self.agents}

    def see(self):
        self.seen = {agent: self.random.uniform(-1, 1, 3).astype(np.float32)
                     for agent in self.agents}
        return dict(self.seen)

    def step(self, actions):
        self.steps += 1
        leaves = self.agents[0] if self.steps % 3 == 0 else None
        rewards = {agent: float((self.seen[agent][0] > 0) == actions[agent])
                   for agent in self.agents}
        ends = {agent: agent == leaves for agent in self.agents}
        cuts = dict.fromkeys(self.agents, False)
        observations, infos = self.see(), {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if agent != leaves]
        return observations, rewards, ends, cuts, infos
