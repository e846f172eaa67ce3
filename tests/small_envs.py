"""Small environments of each kind, and rollouts, which several test files share."""

import copy
import ctypes
import functools
import os
import signal
import sys
import time
from types import SimpleNamespace

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import emulation
import vector

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import the tests
SAME_STEP = gymnasium.vector.AutoresetMode.SAME_STEP


def declares(space, action_space=None):
    """Return what a network reads of a wrapped environment with these spaces."""
    return SimpleNamespace(single_observation_space=emulation.FlatObservation(space).flat_space,
                           env_single_observation_space=space,
                           single_action_space=action_space or spaces.Discrete(3))


class Steps(gymnasium.Env):
    """Observation t, in one array, and reward 1 at step t.

    Terminated at `end`, truncated at `limit`. change(t) is {name: value} of what reset (t = 0) and
    step t return instead.
    """

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, end=None, limit=3, change=None, observation_space=None, action_space=None):
        self.end, self.limit, self.change = end, limit, change
        self.observation_space = observation_space or self.observation_space
        self.action_space = action_space or self.action_space

    def _parts(self):
        parts = {"observation": None, "reward": 1.0, "terminated": self.t == self.end,
                 "truncated": self.t == self.limit, "info": {"t": self.t}}
        if isinstance(self.observation_space, spaces.Box):
            self.array[:] = self.t
            parts["observation"] = self.array
        return parts | (self.change(self.t) if self.change else {})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, space = 0, self.observation_space
        self.array = np.zeros(space.shape or (), space.dtype)
        parts = self._parts()
        return parts["observation"], parts["info"]

    def step(self, action):
        self.t += 1
        return tuple(self._parts().values())


class Walk(gymnasium.Env):
    """A random walk in a Dict space, with trouble at step 3."""

    observation_space = spaces.Dict({"x": spaces.Box(-100, 100, (2,), np.float64),
                                     "t": spaces.Discrete(50)})
    action_space = spaces.Discrete(3)

    def __init__(self, trouble=None, limit=6):
        self.trouble, self.limit = trouble, limit

    def _observe(self):
        return {"x": self.x.copy(), "t": self.t}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.normal(size=2), 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        self.x += (action - 1) + 0.1 * self.np_random.normal(size=2)
        if self.trouble and self.t == 3:
            self._fail()
        ends = bool(self.x[1] > 4), self.t == self.limit
        return self._observe(), float(self.x[0]), *ends, {"height": self.x[1]}

    def _fail(self):
        if isinstance(self.trouble, type):
            raise self.trouble("the walker fell")
        if self.trouble == "hang":
            time.sleep(1000)
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "segfault":
            ctypes.string_at(0)
        if self.trouble == "shape":
            self.x = np.zeros(3)

    def render(self):
        return self.x.copy()


class Drawn(gymnasium.Env):
    """Any spaces; observations, rewards, ends and infos are drawn, masks too if masked is True."""

    def __init__(self, observation_space, action_space, masked=False, infos=False):
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = copy.deepcopy(action_space)
        self.masked, self.infos = masked, infos

    def _info(self):
        options = sum(emulation.FlatAction(self.action_space).heads)
        mask = self.np_random.integers(0, 2, options) if self.masked is True else self.masked
        mask = {} if mask is False else {"action_mask": mask}
        infos = {"height": self.np_random.normal(), "word": "no number",
                 "deep": {"n": np.int16(3)}, "nan": np.nan} if self.infos else {}
        return mask | infos

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), self._info()

    def step(self, action):
        assert self.action_space.contains(action)
        reward, ends = self.np_random.normal(), self.np_random.random(2) < 0.2
        return self.observation_space.sample(), reward, bool(ends[0]), ends[1], self._info()


class Leavers:
    """PettingZoo: agent i leaves after i + 2 steps, the last one by truncation."""

    render_mode = None

    def __init__(self):
        self.metadata, self.possible_agents = {"name": "leavers"}, ["a", "b", "c"]
        self._observation_space = spaces.Box(0, 100, (1,), np.float32)
        self._action_space = spaces.Discrete(4)

    unwrapped = property(lambda self: self)

    def observation_space(self, agent):
        return self._observation_space

    def action_space(self, agent):
        return self._action_space

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        infos = {a: {"action_mask": np.array([1, 0, 1, 1])} for a in self.agents}
        return {a: np.zeros(1, np.float32) for a in self.agents}, infos

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.t += 1
        acted, gone = self.agents, {a: self.t == i + 2 for i, a in enumerate(self.possible_agents)}
        self.agents = [a for a in acted if not gone[a]]
        ends = {a: gone[a] and a != "c" for a in acted}, {a: gone[a] and a == "c" for a in acted}
        infos = {a: {"t": self.t, "action_mask": np.array([1, 0, 1, 1])} for a in acted}
        observations = {a: np.full(1, self.t, np.float32) for a in acted}
        return observations, dict.fromkeys(acted, np.ones(1)), *ends, infos


class Counters(emulation.PufferEnv):
    """Agents that add up their actions; agent i is cut after 4 + i steps."""

    def __init__(self, num_agents=4, buf=None, seed=0):
        self.single_observation_space = spaces.Box(0, 99, (2,), np.float32)
        self.single_action_space = spaces.Discrete(4)
        self.num_agents = num_agents
        super().__init__(buf)

    def reset(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.count, self.age = np.zeros((2, self.num_agents), int)
        self._begin(np.arange(self.num_agents))
        return self.observations, []

    def _begin(self, agents):
        self.count[agents], self.age[agents] = self.rng.integers(0, 5, len(agents)), 0
        self._observe()

    def _observe(self):
        self.observations[:] = np.stack([self.count, self.age], 1)

    def step(self, actions):
        self.count += actions
        self.age += 1
        self._observe()
        self.rewards[:], self.terminals[:] = actions, self.count > 9
        self.truncations[:] = (self.age == 4 + np.arange(self.num_agents)) & (self.count <= 9)
        self.final_observations[:] = self.observations
        ended = np.flatnonzero(self.terminals | self.truncations)
        infos = [{"count": self.count[ended].mean(), "n": len(ended)}] if len(ended) else []
        self._begin(ended)
        return self.observations, self.rewards, self.terminals, self.truncations, infos


def in_wrappers(env, *limits):
    env = gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.PassiveEnvChecker(env))
    for limit in limits:
        env = gymnasium.wrappers.TimeLimit(env, limit)
    return env


def several(autoreset):
    return gymnasium.vector.SyncVectorEnv([Steps, lambda: Steps(2)], autoreset_mode=autoreset)


def flatten_action(layout, action):
    """Return the row that FlatAction.unflatten turns into this action."""
    parts = [functools.reduce(lambda part, key: part[key], keys, action)
             for keys, _, _ in layout.leaves]
    row = np.concatenate([np.ravel(part) for part in parts])
    return row - layout.starts if layout.heads else row.astype(np.float32)


ACTIONS = spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 4])])
NESTED = spaces.Dict({
    "step": spaces.Discrete(100), "grid": spaces.Box(0, 9, (2, 3), np.uint8),
    "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-5, 5, (2,), np.float32)])})
MASK = np.array([1, 0, 1, 1, 1, 0, 0, 0, 1])
FIELDS = spaces.Dict({"n": spaces.MultiDiscrete([2, 3]), "many": spaces.Box(0, 9, (3,), np.int32),
                      "bits": spaces.MultiBinary(3), "x": spaces.Box(-1, 1, (), np.float64)})
KINDS = {  # creator of environment i
    "CartPole": lambda i: gymnasium.make("CartPole-v1", max_episode_steps=5 + i),
    "Pendulum": lambda i: gymnasium.make("Pendulum-v1", max_episode_steps=7),
    "Blackjack": lambda i: gymnasium.make("Blackjack-v1"),
    "Dict": lambda i: Walk(limit=4 + i),
    "nested": lambda i: Drawn(NESTED, ACTIONS),
    "masked": lambda i: Drawn(NESTED, ACTIONS, masked=MASK),
    "drawn": lambda i: Drawn(FIELDS, spaces.MultiBinary(2), infos=True),
    "time limits": lambda i: in_wrappers(Steps(limit=None), *((3, 9), (9, 4), (7, 7))[i % 3]),
    "both ends": lambda i: Steps(2 + i),
    "reward in array": lambda i: Steps(change=lambda t: {"reward": np.ones(1)}),
    "PufferEnv": lambda i: Counters(num_agents=2),
    "PettingZoo": lambda i: Leavers(),
    "next step": lambda i: several(gymnasium.vector.AutoresetMode.NEXT_STEP),
    "same step": lambda i: several(SAME_STEP),
}


def creators_of(kind, number):
    return [lambda i=i: KINDS[kind](i) for i in range(number)]


def rollout(vecenv, horizon=6, count=4):
    """Run fixed actions; return ([{name: array}], last observations, log); close it."""
    history, finals, draw = [], [], np.random.default_rng(1)
    with vecenv:
        storage = vecenv.allocate(horizon)
        for epoch in range(count):
            shape, last = storage.actions.shape, storage.observations[-1].copy()
            actions = (draw.normal(size=shape) if vecenv.action_heads is None
                       else draw.integers(0, vecenv.action_heads, shape))
            vecenv.begin()
            np.testing.assert_array_equal(storage.observations[0], last)
            ends = 0
            while (ready := vecenv.wait()) is not None:
                buffer, t = ready
                agents = vecenv.ranges[buffer]
                for agent in range(*agents.indices(vecenv.num_agents)):
                    if t > 0 and storage.truncations[t - 1, agent]:
                        finals.append((epoch, t, agent, storage.final_observations[agent].tolist()))
                ends += t == horizon
                if t < horizon:
                    storage.actions[t, agents] = actions[t, agents]
                    vecenv.advance(buffer)
            assert ends == vecenv.num_buffers
            np.testing.assert_array_equal(storage.resets[1:],
                                          storage.terminals | storage.truncations)
            history.append({name: array.copy() for name, array in vars(storage).items()
                            if array is not None and name != "final_observations"})
        return history, sorted(finals), vecenv.log()


def assert_same(ours, theirs):
    for row, expected in zip(ours[0], theirs[0], strict=True):
        assert row.keys() == expected.keys()
        for name, array in row.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
            assert array.dtype == expected[name].dtype
    assert ours[1] == theirs[1] and ours[1]
    assert ours[2] == pytest.approx(theirs[2]) and ours[2]["n"] > 0


def allowed_actions(vecenv, rng):
    if not vecenv.action_heads:
        return rng.uniform(-1, 1, (vecenv.num_agents, vecenv.action_dims)).astype(np.float32)
    masks, columns, first = vecenv.storage.action_masks, [], 0
    for size in vecenv.action_heads:
        allowed = (np.ones((vecenv.num_agents, size)) if masks is None
                   else masks[-1][:, first : first + size])
        columns.append(np.argmax(rng.random((vecenv.num_agents, size)) * (allowed > 0), axis=1))
        first += size
    return np.stack(columns, axis=1)


def same_as_bare(creators, steps=2000, seed=5, reset_at=None):
    """Compare a vector with single environments; return (*returns and lengths, log)."""
    creators = creators if isinstance(creators, list) else [creators]
    bare, rng = [creator() for creator in creators], np.random.default_rng(seed)
    observation = emulation.FlatObservation(bare[0].observation_space)
    action = emulation.FlatAction(bare[0].action_space)
    ended = [], []

    def compare(i, expected, info):
        flat, masks = observation.flatten(expected), vecenv.storage.action_masks
        np.testing.assert_array_equal(rows[i].reshape(observation.shape), flat)
        if masks is not None and "action_mask" in info:
            mask = np.concatenate([*map(np.ravel, info["action_mask"])])
            np.testing.assert_array_equal(masks[-1][i] != 0, mask != 0)

    with vector.make(list(creators), len(bare), "serial") as vecenv:
        for env in bare:
            env.reset()  # as the question whether there are masks does
        for t in range(steps + 1):
            if t in (0, reset_at):
                first = seed if t == 0 else None
                rows, sums = vecenv.reset(seed=first)[0], np.zeros((2, len(bare)))
                for i, env in enumerate(bare):
                    compare(i, *env.reset(seed=seed + i if t == 0 else None))
                continue
            actions = allowed_actions(vecenv, rng)
            shape = len(bare), *vecenv.single_action_space.shape
            rows, rewards, *flags, _ = vecenv.step(np.reshape(actions, shape))
            for i, env in enumerate(bare):
                expected, reward, *ends, info = env.step(action.unflatten(actions[i]))
                assert rewards[i] == np.float32(np.ravel(reward)[0]), f"step {t}: {reward}"
                assert [flag[i] for flag in flags] == [bool(end) for end in ends], f"step {t}"
                sums[:, i] += rewards[i], 1
                if ends[1]:
                    final = vecenv.storage.final_observations[i].reshape(observation.shape)
                    np.testing.assert_array_equal(final, observation.flatten(expected))
                if any(ends):
                    for values, value in zip(ended, sums[:, i].tolist(), strict=True):
                        values.append(value)
                    sums[:, i] = 0
                    expected, info = env.reset()
                compare(i, expected, info)
        for env in bare:
            env.close()
        return *ended, vecenv.log()
