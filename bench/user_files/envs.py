"""Environments as users write them, for bench/same_bits.py: small, seeded, of every kind of space."""

import gymnasium
import numpy as np
import pettingzoo
from gymnasium import spaces

import pufferlib


class Signs(gymnasium.Env):
    """Tell which of the numbers are above 0; an episode has `length` steps. Subclasses have other
    spaces, and `see` and `score` that fit them."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=12):
        self.length = length

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.draw(), {}

    def draw(self):
        self.numbers = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.see()

    def see(self):
        return self.numbers

    def score(self, action):
        return float(action == (self.numbers[0] > 0))

    def step(self, action):
        reward = self.score(action)
        self.count += 1
        ended = self.count == self.length
        return self.draw(), reward, ended and reward > 0, ended, {}


class Pictures(Signs):
    """The numbers as three stripes of grey."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def see(self):
        stripes = (127 * (self.numbers + 1)).astype(np.uint8)
        return np.repeat(np.repeat(stripes, 12)[:, None], 36, 1)[..., None]


class Fields(Signs):
    """A Dict of kinds of spaces, and two choices at once."""

    observation_space = spaces.Dict(
        numbers=Signs.observation_space, clock=spaces.Discrete(13),
        pair=spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]))
    action_space = spaces.MultiDiscrete([2, 3])

    def see(self):
        above = (self.numbers > 0).astype(np.int8)
        return {"numbers": self.numbers, "clock": self.count,
                "pair": (above[:2], above[1:].astype(np.int64))}

    def score(self, action):
        return float(action[0] == (self.numbers[0] > 0)) - 0.5 * float(action[1] == 2)


class Masked(Signs):
    """Two of four choices are allowed at a step."""

    action_space = spaces.Discrete(4)

    def action_masks(self):
        allowed = np.zeros(4, bool)
        allowed[[self.count % 4, (self.count + 1) % 4]] = True
        return allowed

    def score(self, action):
        assert self.action_masks()[action]
        return float(action % 2 == (self.numbers[0] > 0))


class Push(Signs):
    """Continuous: be near twice the first two numbers."""

    action_space = spaces.Box(-2, 2, (2,), np.float32)

    def score(self, action):
        return -float(np.abs(action - 2 * self.numbers[:2]).sum())


class Leaving(pettingzoo.ParallelEnv):
    """Four agents; the first of those that are left leaves after each three steps."""

    metadata = {"name": "leaving"}  # noqa: RUF012
    possible_agents = ["a", "b", "c", "d"]  # noqa: RUF012

    def observation_space(self, agent):
        return Signs.observation_space

    def action_space(self, agent):
        return Signs.action_space

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.agents, self.count = list(self.possible_agents), 0
        return self.see(), {agent: {} for agent in self.agents}

    def see(self):
        self.numbers = {agent: self.random.uniform(-1, 1, 3).astype(np.float32)
                        for agent in self.agents}
        return dict(self.numbers)

    def step(self, actions):
        self.count += 1
        agents, leaver = self.agents, self.agents[0] if self.count % 3 == 0 else None
        rewards = {agent: float((self.numbers[agent][0] > 0) == actions[agent]) for agent in agents}
        observations = self.see()
        self.agents = [agent for agent in agents if agent != leaver]
        return (observations, rewards, {agent: agent == leaver for agent in agents},
                dict.fromkeys(agents, False), {agent: {} for agent in agents})


class Guess(pufferlib.PufferEnv):
    """PufferLib's contract: arrays that stay in their place."""

    def __init__(self, num_agents=8, buf=None, seed=0):
        self.single_observation_space = Signs.observation_space
        self.single_action_space = Signs.action_space
        self.num_agents = num_agents
        super().__init__(buf)
        self.random = np.random.default_rng(seed)

    def reset(self, seed=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.observations[:] = self.random.uniform(-1, 1, self.observations.shape)
        return self.observations, []

    def step(self, actions):
        self.rewards[:] = actions == (self.observations[:, 0] > 0)
        self.terminals[:] = self.random.random(self.num_agents) < 0.1
        self.reset()
        infos = [{"score": float(self.rewards.mean())}]
        return self.observations, self.rewards, self.terminals, self.truncations, infos


def vectorized(num_envs=16):
    """Gymnasium's own vector environment."""
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs,
                              vectorization_mode="vector_entry_point")


class RaisesInReset(Signs):
    def draw(self):
        raise RuntimeError("no level to begin")


class RaisesInStep(Signs):
    def score(self, action):
        return {}["missing"]


class NotFinite(Signs):
    def see(self):
        return self.numbers * np.float32("nan")


class OutOfItsSpace(Signs):
    def see(self):
        return np.zeros(5, np.float32)


class TwoRewards(Signs):
    def score(self, action):
        return np.zeros(2)


class Spaceless:
    def reset(self, seed=None):
        return np.zeros(3), {}
