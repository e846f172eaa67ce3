"""Environments as flat arrays: your own in numpy, Gymnasium's and PettingZoo's.

    class Squares(PufferEnv):                                   # a vector of environments of your own, in place
    env = GymnasiumPufferEnv(gymnasium.make("CartPole-v1"))     # any Gymnasium environment, flat
    env = PettingZooPufferEnv(env_creator=knights_archers_zombies_v10.parallel_env)
    env = wrap(anything)                                        # the one of these that fits

    structure = observation.view(env.obs_dtype)                 # the fields of a Dict or Tuple space again, as views
    fields = nativize_tensor(observations, nativize_dtype(env)) # the same fields as torch tensors

flat_spaces.py says what becomes of spaces and observations.

workers.py steps all of them through three methods: `views(rows, first)` takes the environment's part of one row of the
rollout's arrays; `reset_into(view, seed)` and `step_into(view)` read the actions there and write everything else.
Episodes restart by themselves. Both return a list of dicts, one for each episode that ended.
"""

import ast
import functools
import hashlib
import inspect
import itertools
import math
import sys
import textwrap
import traceback
import warnings
from types import SimpleNamespace

import gymnasium
import numpy as np
from gymnasium import spaces

import absolute_imports  # noqa: F401  first
import flat_spaces
from errors import ConfigError, EnvError
from flat_spaces import (
    FlatAction,
    FlatObservation,
    check_returned,
    describe,
    find_mask,
    leaf_kind,
    nativize_dtype,  # noqa: F401  PufferLib has these two here
    nativize_tensor,  # noqa: F401
    numeric_scalars,
    store,
    warn_once,
)


class Checked:
    """An environment whose first reset and first step are checked; a later one after an error.

    Attributes: env; returned_space, of the observations that `reset` and `step` return, None for
    those that are not checked; returned_shape, () or (num_envs,), of rewards and flags. A method
    that handles what they returned calls it `returned`, for `explain`.
    """

    returned_space, returned_shape = None, ()
    _unchecked = frozenset(("reset", "step"))

    def check_first(self, call, returned):
        """Check what the first call of `reset` or of `step` returned."""
        if call in self._unchecked:
            self._unchecked = self._unchecked - {call}
            self.check_returned(call, returned)

    def check_returned(self, call, returned):
        """Raise a EnvError if what a reset or step returned is not what it must be."""
        check_returned(self.env, call, returned, self.returned_space, self.returned_shape)


def explain(error):
    """The EnvError for an error in this file or flat_spaces.py that an environment's return value caused; None for
    another error. Only the first step and reset are checked beforehand."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    inner = next((frame for frame in frames if "numpy" not in frame.f_code.co_filename), None)
    if inner is None or inner.f_code.co_filename not in (__file__, flat_spaces.__file__):  # the environment's own
        return None
    try:
        for frame in frames:
            env = frame.f_locals.get("self")
            if hasattr(env, "check_returned") and "returned" in frame.f_locals:
                env.check_returned("reset" if "reset" in frame.f_code.co_name else "step", frame.f_locals["returned"])
    except EnvError as fault:
        return fault
    return None


# --------------------------------------------------------------------------------------------------
# Custom environments in numpy, many in one object


class PufferEnv(Checked):
    """Base class of environments that write their arrays in place; copy this one to begin:

        class Guess(PufferEnv):
            def __init__(self, num_agents=8, buf=None, seed=0):
                self.single_observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
                self.single_action_space = gymnasium.spaces.Discrete(2)
                self.num_agents = num_agents
                super().__init__(buf)
                self.rng = np.random.default_rng(seed)

            def reset(self, seed=None):
                self.observations[:, 0] = self.bits = self.rng.integers(0, 2, self.num_agents)
                return self.observations, []

            def step(self, actions):
                self.rewards[:], self.terminals[:] = actions == self.bits, True
                self.reset()
                infos = [{"score": self.rewards.mean()}]
                return self.observations, self.rewards, self.terminals, self.truncations, infos

    `step` resets ended episodes by itself. Before each call a vectorizer hands over other rows of
    its arrays, so write all of `self.observations` every step, and keep no view of it. Rewards,
    terminals and truncations are 0 and masks are True before each step. Infos: a list of dicts
    whose numbers are averaged and logged; return [] when there are none, and let a key "n" say for
    how many episodes a dict speaks.

    Arrays: observations (num_agents, *shape), actions (num_agents,) for Discrete, (num_agents,
    heads) or (num_agents, *shape); rewards, terminals, truncations (num_agents,); masks
    (num_agents,), False for a dead agent; final_observations like observations: of an agent that
    you truncate, written before it is reset; action_masks (num_agents, options of all heads), or
    None unless the class sets `has_action_masks = True`.
    """

    has_action_masks = False
    closed = False

    def __init__(self, buf=None):
        for name in ("single_observation_space", "single_action_space", "num_agents"):
            if not hasattr(self, name):
                raise AttributeError(f"{self} must set self.{name} before super().__init__(buf).")
        if not isinstance(self.single_observation_space, spaces.Box):
            raise TypeError(f"{self}: single_observation_space = {self.single_observation_space}: must be a Box.")
        self.obs_dtype = FlatObservation(self.single_observation_space).dtype
        self._action = FlatAction(self.single_action_space)
        self._raw_actions = not self._action.starts.any() and self._action.heads
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, self.num_agents)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, self.num_agents)
        if buf is None:
            buf = new_rows(self)
        elif isinstance(buf, dict):
            buf = SimpleNamespace(**buf)
        self.returned_shape = (self.num_agents,)
        self.__dict__.update(self.views(buf, 0))

    def reset(self, seed=None):
        """Begin all episodes: (observations, infos)."""
        raise NotImplementedError(f"{self} must define reset(self, seed=None).")

    def step(self, actions):
        """(observations, rewards, terminals, truncations, infos) after these actions."""
        raise NotImplementedError(f"{self} must define step(self, actions).")

    def views(self, rows, first):
        part = slice(first, first + self.num_agents)
        names = ("observations", "rewards", "terminals", "truncations", "final_observations", "action_masks")
        views = {name: None if getattr(rows, name, None) is None else getattr(rows, name)[part] for name in names}
        for name in ("terminals", "truncations"):
            views[name] = views[name].view(bool)
        valid = getattr(rows, "valid", getattr(rows, "masks", None))
        views["masks"] = (np.ones(self.num_agents, np.uint8) if valid is None else valid[part]).view(bool)
        actions = getattr(rows, "actions", None)
        if actions is not None:
            actions = actions[part].reshape(self.num_agents, *self.single_action_space.shape)
        return {**views, "actions": actions}

    def reset_into(self, view, seed=None):
        return self._call("reset", view, lambda: self.reset(seed))[-1]

    def step_into(self, view):
        if "step" in self._unchecked:
            return self._call("step", view, lambda: self.step(self._env_actions(self.actions)))[-1]
        self.__dict__.update(view)
        return self.step(self._env_actions(self.actions))[4]

    def _call(self, call, view, function):
        """What `function` returned. Raises a EnvError if the first one writes elsewhere than into the arrays given."""
        self.__dict__.update(view)
        octets = view["observations"].reshape(-1).view(np.uint8)
        if call in self._unchecked:
            octets[:] = UNWRITTEN
        returned, unchecked = function(), call in self._unchecked
        self.check_first(call, returned)
        if unchecked and (octets == UNWRITTEN).all():
            raise EnvError(
                f"{self}: {call}() did not write its observations: write into self.observations[:] as it is at "
                "each call, and keep no view of it. Under pufferlib.PufferEnv these arrays stay the same.")
        return returned

    def check_returned(self, call, returned):
        """As Checked's; the infos are a list of dicts, and the observations lie in place."""
        infos = returned[-1] if isinstance(returned, tuple | list) and returned else None
        fine = isinstance(infos, tuple | list) and all(isinstance(info, dict) for info in infos)
        check_returned(self, call, [*returned[:-1], {}] if fine else returned, None, self.returned_shape)

    def __str__(self):
        return type(self).__name__

    def _env_actions(self, actions):
        """Discrete numbers counted from the space's start; floats clipped to its bounds."""
        if self._raw_actions:
            return actions
        if self._action.heads:
            return actions + self._action.starts.reshape(self.single_action_space.shape)
        space = self.single_action_space
        return np.minimum(np.maximum(actions, space.low), space.high)

    def render(self):
        return None

    def close(self):
        """Free what the environment holds."""

    @property
    def driver_env(self):
        return self


UNWRITTEN = 0xA5  # each byte of the observations before the first reset and step


def new_rows(env, num_agents=None):
    """Arrays for `num_agents` agents of an environment, as its `views` takes them."""
    n = env.num_agents if num_agents is None else num_agents
    space, action = env.single_observation_space, FlatAction(env.single_action_space)
    return SimpleNamespace(
        observations=np.zeros((n, *space.shape), space.dtype),
        rewards=np.zeros(n, np.float32),
        actions=np.zeros((n, action.columns), np.int32 if action.heads else np.float32),
        terminals=np.zeros(n, np.uint8),
        truncations=np.zeros(n, np.uint8),
        valid=np.ones(n, np.uint8),
        final_observations=np.zeros((n, *space.shape), space.dtype),
        action_masks=np.ones((n, sum(action.heads)), np.uint8) if env.has_action_masks else None,
    )


# --------------------------------------------------------------------------------------------------
# Gymnasium


def takes(function, keyword):
    """Whether a function, or a class when it is called, takes a keyword, also as one of its **keywords."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


def seen_space(env):
    """The observation space that an environment declares, before it was made flat."""
    own = getattr(env, "env_single_observation_space", None)
    return env.single_observation_space if own is None else own


def gymnasium_form(env):
    """The environment, one of Gymnasium; one of old Gym by Shimmy. Raises a EnvError for another."""
    gym = sys.modules.get("gym")
    if gym is not None and isinstance(env, gym.Env):
        try:
            import shimmy
        except ImportError:
            raise EnvError(f"{env} is an environment of old Gym, which needs Shimmy: pip install shimmy.") from None
        kind = shimmy.GymV26CompatibilityV0 if takes(env.reset, "seed") else shimmy.GymV21CompatibilityV0
        env = kind(env=env)
    if not isinstance(env, gymnasium.Env):
        raise EnvError(f"{describe(env)} is no gymnasium.Env; derive its class from that.")
    if missing := [name for name in ("observation_space", "action_space") if getattr(env, name, None) is None]:
        raise EnvError(
            f"{describe(env)} has no {' and no '.join(missing)}; declare both in __init__, as in "
            "self.observation_space = gymnasium.spaces.Box(...).")
    if not takes(env.reset, "seed"):
        raise EnvError(
            f"{describe(env)}: its reset takes no seed; write `def reset(self, *, seed=None, options=None)`.")
    return env


def within(env):
    """An environment and those within its wrappers, from the outermost to the innermost."""
    known = []
    while hasattr(env, "step") and not any(env is one for one in known):
        known.append(env)
        yield env
        env = getattr(env, "env", None)


def check_late_masks(env, masks):
    """EnvError if there is a mask at the first step of an environment that gave none at its first reset."""
    if any(mask is not None for mask in masks):
        raise EnvError(
            f"{env}: step() gives an action mask, and the first reset() gave none, so it would be ignored. "
            'Give one at both: reset returns observation, {"action_mask": ...}.')


def mask_method(env):
    """The method `action_masks` of an environment, or of one within its wrappers; None if there is none."""
    for layer in within(env):
        if callable(method := getattr(layer, "action_masks", None)):
            return method
    return None


def _create(env, env_creator, env_args, env_kwargs):
    if (env is None) == (env_creator is None):
        raise TypeError("give either env, an instance, or env_creator, a class or function that makes one.")
    return env if env is not None else env_creator(*env_args, **(env_kwargs or {}))


class GymnasiumPufferEnv(Checked, gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """A Gymnasium environment with a flat observation and action space; a
    Gymnasium environment itself.

    env: an instance; or env_creator with env_args and env_kwargs. Old Gym's are converted by
    Shimmy. The info of an episode's last step holds episode_return and episode_length too.
    Attributes: obs_dtype, so that `observation.view(env.obs_dtype)` has the fields;
    env_single_observation_space and env_single_action_space, the environment's own spaces.
    Raises TypeError for spaces that cannot be made flat, and ValueError at the first reset or step
    whose observation, reward or flags break what the environment declares.
    """

    num_agents = 1

    def __init__(self, env=None, env_creator=None, env_args=(), env_kwargs=None, buf=None, seed=0):
        env = _create(env, env_creator, env_args, env_kwargs)
        gymnasium.utils.RecordConstructorArgs.__init__(self)  # its spec can be made anew from the environment's
        super().__init__(gymnasium_form(env))
        self._observation, self._action = FlatObservation(self.env.observation_space), FlatAction(self.env.action_space)
        self.env_single_observation_space, self.env_single_action_space = (
            self.env.observation_space, self.env.action_space)
        self.obs_dtype = self._observation.dtype
        self.observation_space = self.single_observation_space = self._observation.flat_space
        self.action_space = self.single_action_space = self._action.flat_space
        self._structured = self._observation.structured or isinstance(self.env.observation_space, spaces.Text)
        self._flat = np.zeros((1, *self._observation.shape), self._observation.flat_dtype)
        self._fields = [view[0] if view.ndim > 1 else view.reshape(()) for view in self._observation.fields(self._flat)]
        self.returned_space = self.env.observation_space
        self._episode_return, self._episode_length = 0.0, 0
        self._mask_needed, self._ask = None, mask_method(self.env)

    @property
    def emulated(self):
        """PufferLib's name for what `nativize_dtype` takes."""
        return self

    @property
    def has_action_masks(self):
        """Whether the environment gives action masks; the first question costs one reset."""
        if self._mask_needed is None:
            self._reset_env(0, None)
        return self._mask_needed

    def _mask(self, observation, info):
        """The action mask that goes with an observation; None if there is none. A method goes first. It is asked only
        here, so never after an episode's last step."""
        return find_mask(observation, info) if self._ask is None else self._ask()

    def _reset_env(self, seed, options):
        # Without options the call is one that hand-made environments know too.
        returned = self.env.reset(seed=seed) if options is None else self.env.reset(seed=seed, options=options)
        if self._unchecked:
            self.check_first("reset", returned)
        self._episode_return, self._episode_length = 0.0, 0
        if self._mask_needed is None:
            self._mask_needed = self._action.check_masks(self.env, [self._mask(*returned)])
        return returned

    def _step_env(self, row):
        returned = self.env.step(self._action.unflatten(row))
        if self._unchecked:
            self.check_first("step", returned)
            if not self._mask_needed:
                check_late_masks(self.env, [find_mask(returned[0], returned[4])])
        observation, reward, terminated, truncated, info = returned
        if isinstance(reward, np.ndarray):
            reward = reward.item()
        self._episode_return += float(reward)
        self._episode_length += 1
        if terminated or truncated:
            info = self.last_info(info, self._episode_return, self._episode_length)
        return observation, reward, terminated, truncated, info

    def last_info(self, info, episode_return, episode_length):
        """The info of an episode's last step, with the episode's return and length."""
        info = {**info, "episode_return": episode_return, "episode_length": episode_length}
        # RecordEpisodeStatistics, which may be below a wrapper that changes rewards
        if isinstance(info.get("episode"), dict) and "r" in info["episode"]:
            info["episode_return"] = float(np.ravel(info["episode"]["r"])[0])
        info["episode_return"] = info.pop("_unscaled_return", info["episode_return"])  # ScaledReward's, likewise
        return info

    def _write(self, target, i, observation):
        """Row i of `target` becomes the flat observation."""
        if self._structured:
            self._observation.write(observation, self._fields)
            observation = self._flat[0]
        store(target[i], observation)

    def _flat_copy(self, observation):
        flat = np.zeros((1, *self._observation.shape), self._observation.flat_dtype)
        self._write(flat, 0, observation)
        return flat[0]

    def reset(self, *, seed=None, options=None):
        observation, info = self._reset_env(seed, options)
        return self._flat_copy(observation), info

    def step(self, action):
        """Gymnasium's five values; the observation is a new flat array."""
        action = np.reshape(action, self._action.columns)
        observation, reward, terminated, truncated, info = self._step_env(action)
        return self._flat_copy(observation), float(reward), bool(terminated), bool(truncated), info

    def views(self, rows, first):
        return rows.observations, rows.actions, rows.rewards, rows.action_masks, first, rows

    def reset_into(self, view, seed=None):
        observations, _, _, masks, i, _ = view
        returned = self._reset_env(seed, None)
        observation, info = returned
        self._write(observations, i, observation)
        if masks is not None:
            self._action.write_mask(masks[i], self._mask(observation, info))
        return []

    def step_into(self, view):
        observations, actions, rewards, masks, i, rows = view
        returned = self._step_env(actions[i])
        observation, reward, terminated, truncated, info = returned
        rewards[i] = reward
        if terminated or truncated:
            rows.terminals[i], rows.truncations[i] = bool(terminated), bool(truncated)
            if truncated:
                self._write(rows.final_observations, i, observation)
            self.reset_into(view)
            return [numeric_scalars(info)]
        self._write(observations, i, observation)
        if masks is not None:
            self._action.write_mask(masks[i], self._mask(observation, info))
        return ()


class ScaledReward(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """scale · the environment's rewards. The info of an episode's last step has the _unscaled_return."""

    def __init__(self, env, scale):
        gymnasium.utils.RecordConstructorArgs.__init__(self, scale=scale)
        super().__init__(env)
        self.scale, self.true_return = scale, 0.0

    def reset(self, **kwargs):
        self.true_return = 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.true_return += float(reward)
        if terminated or truncated:
            info = {**info, "_unscaled_return": self.true_return}
        return observation, self.scale * float(reward), terminated, truncated, info


def _quickest_step(env):
    """(step, steps to the time limit, what its rewards must be multiplied by) of a Gymnasium
    environment that has been stepped: the outermost wrappers that gymnasium.make adds check what
    is checked here, and count what is counted here."""
    wrappers, left, scale = gymnasium.wrappers, math.inf, 1.0
    while type(env) in (wrappers.TimeLimit, wrappers.OrderEnforcing, wrappers.PassiveEnvChecker, ScaledReward):
        if type(env) is wrappers.TimeLimit:
            left = min(left, env._max_episode_steps - env._elapsed_steps)
        scale *= env.scale if type(env) is ScaledReward else 1.0
        env = env.env
    return env.step, left, scale


def note_moments(env):
    """Say that what a wrapper measures of its environment is forgotten, if one does."""
    ours = {"NormalizeObservation": "--train.norm-obs True (models.Normalized around a network of your own)",
            "NormalizeReward": "--train.norm-reward True"}
    kinds = {getattr(module, name): name for module in (gymnasium.wrappers, gymnasium.wrappers.vector) for name in ours}
    for layer, kind in itertools.product(within(env), kinds):
        if isinstance(layer, kind):
            for_itself = "" if kind.__module__.startswith("gymnasium.wrappers.vector") else (
                "each environment measures for itself, and ")
            warn_once(f"{type(layer).__name__}: {for_itself}a resume, an evaluation and an export begin anew. Leave it "
                      f"out: {ours[kinds[kind]]} measures for all of them, and is saved with the run.")


class GymnasiumTogether:
    """GymnasiumPufferEnvs of one vector, stepped together: it does to each what step_into does,
    without the calls and attributes that are a third of the 5 us of a CartPole's step.

    It states a second time what the methods in RESTATED say. So it is taken only as long as their
    source has the digest CHECKED, and a test holds both to the same results. After an edit of one
    of them each environment is stepped by its own step_into. To have both again, make the same edit
    here, run tests/test_workers.py, and write the digest that it names.
    """

    RESTATED = ("views", "reset_into", "step_into", "_reset_env", "_step_env", "_write")
    CHECKED = "9080f663d2863983"

    @classmethod
    def of(cls, envs, numbers, rows):
        """Of environments that have been reset and stepped, or None if they must be stepped one by one: if one is no
        plain GymnasiumPufferEnv, does not return just what Gymnasium's should, or steps in an edited way. numbers: of
        the environments, for infos and errors; rows: those that step takes, each with the views' arrays."""
        if not all(type(env) is GymnasiumPufferEnv and not env._unchecked
                   and not vars(env).keys() & set(cls.RESTATED) for env in envs):
            return None
        if cls.digest() != cls.CHECKED:
            if numbers[0] == 0:  # one process says it for all workers
                warnings.warn("GymnasiumPufferEnv was edited, so each environment is stepped by its own step_into, "
                              "which takes longer: see emulation.GymnasiumTogether.", stacklevel=2)
            return None
        return cls(envs, numbers, rows)

    @classmethod
    def digest(cls):
        """The digest of the methods that `step` restates."""
        return digest(*(getattr(GymnasiumPufferEnv, name) for name in cls.RESTATED), FlatAction.unflatten)

    def __init__(self, envs, numbers, rows):
        self._envs, self._numbers, first = envs, numbers, envs[0]
        shape = first._observation.space.shape
        self._start, self._structured, self._scalar = first._action.start, first._structured, shape == ()
        for row in rows:
            row.valid[:], row.flagged = 1, True
            row.joined = row.observations[:, 0] if self._scalar or self._structured \
                else row.observations.reshape(len(row.observations) * shape[0], *shape[1:])
        self._casting = "same_kind"
        self._steps, left, scales = zip(*(_quickest_step(env.env) for env in envs), strict=True)
        self._resets, self._scales = [env.env.reset for env in envs], np.array(scales)
        self._returns = np.array([env.env.true_return if type(env.env) is ScaledReward else env._episode_return
                                  for env in envs], np.float64)
        self._steps_taken, self._begun, self._next_limit = 0, [-env._episode_length for env in envs], min(left)
        self._limits = [env._episode_length + more for env, more in zip(envs, left, strict=True)]

    def step(self, row):
        """Step all with the actions of a row, and write all else there: [(number, info)] of the episodes that ended."""
        if self._start is not None:
            actions = row.actions[:, 0].astype(np.int64)
            if self._start:
                actions += self._start
        else:
            actions = [env._action.unflatten(action) for env, action in zip(self._envs, row.actions, strict=True)]
        returned = [step(action) for step, action in zip(self._steps, actions)]  # noqa: B905
        seen, rewards, terminated, truncated, infos = map(list, zip(*returned))  # noqa: B905
        try:
            rewards = np.array(rewards, np.float64)
            self._returns += rewards
        except ValueError:  # arrays of one, which the first step may return as well
            rewards = np.array([np.reshape(reward, ()) for reward in rewards], np.float64)
            self._returns += rewards
        row.rewards[:] = self._scales * rewards
        self._steps_taken += 1
        if self._steps_taken >= self._next_limit:
            truncated = [cut or self._steps_taken >= begun + limit
                         for cut, begun, limit in zip(truncated, self._begun, self._limits, strict=True)]
        if row.flagged:  # left from the last time that this row was written
            row.terminals[:], row.truncations[:], row.resets[:] = 0, 0, 0
        row.flagged, ended = any(terminated) or any(truncated), []
        if row.flagged:
            for i in [i for i, over in enumerate(map(any, zip(terminated, truncated, strict=True))) if over]:
                row.terminals[i], row.truncations[i], row.resets[i] = bool(terminated[i]), bool(truncated[i]), 1
                if truncated[i]:
                    self._envs[i]._write(row.final_observations, i, seen[i])
                info = self._envs[i].last_info(infos[i], self._returns.item(i), self._steps_taken - self._begun[i])
                ended.append((self._numbers[i], numeric_scalars(info)))
                self._returns[i], self._begun[i] = 0, self._steps_taken
                seen[i], infos[i] = self._resets[i]()
                returned[i] = seen[i], *returned[i][1:]
            self._next_limit = min(map(sum, zip(self._begun, self._limits, strict=True)))
        if self._structured:
            for i, (env, observation) in enumerate(zip(self._envs, seen, strict=True)):
                env._write(row.observations, i, observation)
        elif self._scalar:
            store(row.joined, seen)
        else:
            try:
                np.concatenate(seen, out=row.joined, casting=self._casting)
            except TypeError:  # of another kind than the space's, which is said once
                self._casting = "unsafe"
                for target, observation in zip(row.observations, seen, strict=True):
                    store(target, observation)
        if row.action_masks is not None:
            for env, target, observation, info in zip(self._envs, row.action_masks, seen, infos, strict=True):
                env._action.write_mask(target, env._mask(observation, info))
        return ended

    def check_returned(self, call, returned):
        """Raise a EnvError if what one of the steps returned is not what it must be."""
        for env, one in zip(self._envs, returned, strict=True):
            env.check_returned(call, one)


@functools.cache
def digest(*functions):
    """A digest of functions without docstrings and comments; None without their source."""
    trees = []
    for function in functions:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError):
            return None
        if isinstance(tree, ast.FunctionDef) and ast.get_docstring(tree) is not None:
            del tree.body[0]
        trees.append(_plain(tree))
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:16]


def _plain(node):
    """A syntax tree as lists and strings that are equal in all versions of Python."""
    if isinstance(node, list):
        return [_plain(child) for child in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


MODES = {"nextstep": "next_step", "samestep": "same_step", "disabled": "disabled"}


def autoreset_mode(env):
    """A vector environment's "next_step", "same_step" or "disabled". Raises a EnvError if its metadata does not say."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    name = str(getattr(mode, "value", mode)).lower().replace("_", "")
    if name not in MODES:
        raise EnvError(
            f'{env}: metadata["autoreset_mode"] = {mode!r}: must be "same_step" (a step that ends an episode '
            'returns the next one\'s first observation), "next_step" (the step after it does) or "disabled" '
            '(reset(options={"reset_mask": ended}) does). For Isaac Lab and ManiSkill there are '
            "tensors.IsaacLab and tensors.ManiSkill.")
    return MODES[name]


class GymnasiumVectorPufferEnv(Checked):
    """A gymnasium.vector.VectorEnv as one environment of num_envs agents,
    whatever its autoreset mode.

    NEXT_STEP (after a step that ends an episode comes one whose action is ignored): the agent is
    dead for that step. SAME_STEP: the final observation comes from the info. DISABLED: ended
    episodes are reset here. reward_scale multiplies the rewards that are learnt from;
    episode_return stays the true one.
    Attributes: copies, the environments in it; ended, the numbers of those that the last step's
    infos are about.
    """

    def __init__(self, env, reward_scale=1.0):
        note_moments(env)
        self.env, self.num_agents, self.copies, self.reward_scale = env, env.num_envs, env.num_envs, reward_scale
        self.mode = autoreset_mode(env)
        self.env_single_observation_space = env.single_observation_space
        self._observation, self._action = (
            FlatObservation(env.single_observation_space),
            FlatAction(env.single_action_space),
        )
        self.obs_dtype = self._observation.dtype
        self.single_observation_space, self.single_action_space = self._observation.flat_space, self._action.flat_space
        self._flat = np.zeros((self.num_agents, *self._observation.shape),
                              self._observation.flat_dtype)
        self._fields = self._observation.fields(self._flat)
        self._returns, self._lengths = np.zeros(self.num_agents), np.zeros(self.num_agents, np.int64)
        self._ending = np.zeros(self.num_agents, bool)  # NEXT_STEP: ended at the last step
        self._mask_needed = None
        self.returned_space = gymnasium.vector.utils.batch_space(env.single_observation_space, self.num_agents)
        self.returned_shape = (self.num_agents,)

    last_info = GymnasiumPufferEnv.last_info

    @property
    def has_action_masks(self):
        if self._mask_needed is None:
            returned = self.env.reset()
            self.check_first("reset", returned)
            self._mask_needed = "action_mask" in returned[1]
            if not self._mask_needed and any(map(mask_method, getattr(self.env, "envs", ()))):
                raise EnvError(f"{self.env}: the method action_masks() is called of single environments only. "
                               "Give what makes one of them, and --vec.num-envs.")
        return self._mask_needed

    def views(self, rows, first):
        part = slice(first, first + self.num_agents)
        return SimpleNamespace(**{name: None if array is None else array[part]
                                  for name, array in vars(rows).items()})

    def _write(self, view, observations, info):
        if self._observation.structured:
            self._observation.write(observations, self._fields)
            observations = self._flat
        store(view.observations, observations.reshape(view.observations.shape))
        if view.action_masks is not None:
            masks = info.get("action_mask")
            for i, target in enumerate(view.action_masks):
                self._action.write_mask(target, None if masks is None else _at(masks, i))

    def reset_into(self, view, seed=None):
        returned = self.env.reset(seed=seed)
        observations, info = returned
        self.check_first("reset", returned)
        self._write(view, observations, info)
        self._returns[:], self._lengths[:], self._ending[:] = 0, 0, False
        return []

    def step_into(self, view):
        space = self.env.single_action_space
        if self._action.start is not None:
            actions = view.actions[:, 0].astype(space.dtype) + self._action.start
        else:
            actions = gymnasium.vector.utils.concatenate(
                space,
                [self._action.unflatten(row) for row in view.actions],
                gymnasium.vector.utils.create_empty_array(space, self.num_agents),
            )
        returned = self.env.step(actions)
        self.check_first("step", returned)
        observations, rewards, terminated, truncated, info = returned
        done = terminated | truncated
        inactive, self._ending = self._ending, done if self.mode == "next_step" else self._ending
        rewards = np.where(inactive, 0, rewards)
        self._returns += rewards
        self._lengths += ~inactive
        view.rewards[:], view.terminals[:], view.truncations[:] = rewards * self.reward_scale, terminated, truncated
        ended, self.ended = [], np.flatnonzero(done).tolist()
        if self.ended:
            # Under same_step the info is the next episode's, but for what RecordEpisodeStatistics adds.
            recorded = {key: info[key] for key in ("episode", "_episode") if key in info}
            final = recorded | info.get("final_info", {}) if self.mode == "same_step" else info
            for i in self.ended:
                ended.append(numeric_scalars(
                    self.last_info(_of_copy(final, i, done), float(self._returns[i]), int(self._lengths[i]))))
                if self.mode == "same_step" and truncated[i]:
                    if "final_obs" not in info:
                        raise EnvError(
                            f"{self.env}: its mode of autoreset is same_step, so the info of a step that ends "
                            'an episode must have the last observations: info["final_obs"][i], of copy i.')
                    self._observation.flatten(_at(info["final_obs"], i), view.final_observations[i])
            if self.mode != "same_step":
                self._write(view, observations, info)
                view.final_observations[truncated] = view.observations[truncated]
            if self.mode == "next_step":  # this observation is the old episode's last: nothing to act on
                view.valid[done] = 0
            if self.mode == "disabled":
                observations, info = self.env.reset(options={"reset_mask": done})
            self._returns[done], self._lengths[done] = 0, 0
        self._write(view, observations, info)
        return ended

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()


def _of_copy(info, i, given):
    """What a dict of arrays, one entry a copy, has of copy i; given (copies,): where it has a key without a mask."""
    return {key: _of_copy(value, i, given) if isinstance(value, dict) else value[i] for key, value in info.items()
            if isinstance(value, dict) or (isinstance(value, np.ndarray) and len(value) == len(given))
            if not key.startswith("_") and info.get(f"_{key}", given)[i]}


def _at(batch, i):
    """Entry i of a batch, which may be a dict or tuple of batches."""
    if isinstance(batch, dict):
        return {key: _at(part, i) for key, part in batch.items()}
    return tuple(_at(part, i) for part in batch) if isinstance(batch, tuple) else batch[i]


# --------------------------------------------------------------------------------------------------
# PettingZoo


class PettingZooPufferEnv(Checked):
    """A PettingZoo environment with flat spaces; a PettingZoo parallel environment itself.

    env: an instance, parallel or AEC (which is converted); or env_creator with env_args and
    env_kwargs. Under a vectorizer each of `possible_agents` has a fixed slot; one that does not act
    is not valid. obs_dtype as for GymnasiumPufferEnv.
    Raises TypeError if agents have different spaces, and as GymnasiumPufferEnv does.
    """

    def __init__(self, env=None, env_creator=None, env_args=(), env_kwargs=None, buf=None, seed=0):
        env = _create(env, env_creator, env_args, env_kwargs)
        self.env = env = _parallel(env)
        self._quick = _quickest_parallel(env)
        self.possible_agents = list(env.possible_agents)
        self.agents = list(self.possible_agents)
        self.metadata, self.render_mode = getattr(env, "metadata", {}), getattr(env, "render_mode", None)
        first = self.possible_agents[0]
        expected = env.observation_space(first), env.action_space(first)
        self.env_single_observation_space, self.env_single_action_space = expected
        for agent in self.possible_agents:
            got = env.observation_space(agent), env.action_space(agent)
            if got != expected:
                raise TypeError(
                    f"{env}: {agent} has the spaces {got}, {first} has {expected}; one policy "
                    "needs one space: pad them with supersuit.pad_observations_v0 and "
                    "supersuit.pad_action_space_v0."
                )
        self._observation = FlatObservation(self.env_single_observation_space)
        self._action = FlatAction(self.env_single_action_space)
        self.obs_dtype = self._observation.dtype
        self.single_observation_space, self.single_action_space = self._observation.flat_space, self._action.flat_space
        self._slots = {agent: i for i, agent in enumerate(self.possible_agents)}
        self._mask_needed = None
        self._valid = []

    emulated = GymnasiumPufferEnv.emulated

    @property
    def num_agents(self):
        """Agents that act, as PettingZoo has it; max_num_agents is the number of slots."""
        return len(self.agents)

    @property
    def max_num_agents(self):
        return len(self.possible_agents)

    @property
    def unwrapped(self):
        return self.env.unwrapped

    @property
    def has_action_masks(self):
        """Whether the environment gives action masks; the first question costs one reset."""
        if self._mask_needed is None:
            self._reset_env(None, None)
        return self._mask_needed

    def observation_space(self, agent):
        return self.single_observation_space

    def action_space(self, agent):
        """The flat action space; each agent has one, and its random generator, of its own."""
        if agent not in self.__dict__.setdefault("_action_spaces", {}):
            self._action_spaces[agent] = FlatAction(self.env_single_action_space).flat_space
        return self._action_spaces[agent]

    def state(self):
        return self.env.state()

    def render(self):
        return self.env.render()

    def close(self):
        getattr(self.env, "close", lambda: None)()  # hand-made ones may have none

    def _reset_env(self, seed, options):
        # Without options the call is one that hand-made environments know too.
        more = {} if options is None else {"options": options}
        returned = self.env.reset(seed=seed, **more)
        self.check_first("reset", returned)
        self.agents = list(self.env.agents)
        self._returns = dict.fromkeys(self.agents, 0.0)
        self._length = 0
        if self._mask_needed is None:
            self._mask_needed = self._action.check_masks(self.env, _masks(*returned))
        return returned

    def _step_env(self, env, actions):
        returned = env.step(actions)
        if "step" in self._unchecked:
            self.check_first("step", returned)
            if not self._mask_needed:
                check_late_masks(self.env, _masks(returned[0], returned[-1]))
        self.agents = list(env.agents)
        return returned

    def check_returned(self, call, returned):
        """As Checked's, of each agent that has an observation, or an entry in another dict."""
        names = PARALLEL if call == "step" else ("observations", "infos")
        if (not isinstance(returned, tuple | list) or len(returned) != len(names)
                or not all(isinstance(part, dict) for part in returned)):
            raise EnvError(
                f"{self.env}: {call}() of a parallel environment must return {len(names)} dicts with an entry "
                f"for each agent: {', '.join(names)}, got {describe(returned)}.")
        defaults = (None, 0.0, False, False, {}) if call == "step" else (None, {})
        for agent in dict.fromkeys(itertools.chain(*returned)):
            if agent not in self._slots:
                raise EnvError(
                    f"{self.env}: {call}() returned something of {agent}, which is not in possible_agents "
                    f"({', '.join(map(str, self._slots))}); name all that may ever act there.")
            parts = [part.get(agent, default) for part, default in zip(returned, defaults, strict=True)]
            space = self.env_single_observation_space if agent in returned[0] else None
            check_returned(f"{self.env}, {agent}", call, parts, space)

    def reset(self, seed=None, options=None):
        observations, infos = self._reset_env(seed, options)
        return {agent: self._observation.flatten(observation) for agent, observation in observations.items()}, infos

    def step(self, actions):
        """PettingZoo's five dicts; observations are new flat arrays."""
        returned = self._step_env(self.env, {
            agent: self._action.unflatten(np.reshape(action, self._action.columns))
            for agent, action in actions.items()})
        observations, *rest = returned
        return {agent: self._observation.flatten(observation) for agent, observation in observations.items()}, *rest

    def views(self, rows, first):
        part = slice(first, first + self.max_num_agents)
        return SimpleNamespace(**{name: None if array is None else array[part]
                                  for name, array in vars(rows).items()})

    def _write(self, view, observations, infos, valid):
        """The observations of the valid agents into their slots."""
        view.valid[:] = 0
        self._valid = [agent for agent in valid if agent in observations]
        for agent in self._valid:
            slot, observation = self._slots[agent], observations[agent]
            self._observation.flatten(observation, view.observations[slot])
            view.valid[slot] = 1
            if view.action_masks is not None:
                self._action.write_mask(view.action_masks[slot], find_mask(observation, infos.get(agent, {})))
        for slot in np.flatnonzero(view.valid == 0):
            view.observations[slot] = 0
            if view.action_masks is not None:
                view.action_masks[slot] = 1

    def reset_into(self, view, seed=None):
        returned = self._reset_env(seed, None)
        observations, infos = returned
        self._write(view, observations, infos, self.agents)
        if not self._valid:
            raise EnvError(
                f"{self.env}: no agent acts after reset(): its `agents` are {describe(self.agents)}, and there "
                f"are observations of {describe(list(observations))}; one at least must be in both.")
        return []

    def step_into(self, view):
        slots = self._slots
        actions = {agent: self._action.unflatten(view.actions[slots[agent]])
                   for agent in self._valid}
        returned = self._step_env(self._quick, actions)
        observations, rewards, terminated, truncated, infos = returned
        self._length += 1
        for agent in self._valid:
            slot, reward = slots[agent], float(rewards.get(agent, 0.0))
            view.rewards[slot] = reward
            self._returns[agent] = self._returns.get(agent, 0.0) + reward
            view.terminals[slot], view.truncations[slot] = terminated.get(agent, False), truncated.get(agent, False)
            if view.truncations[slot] and agent in observations:
                self._observation.flatten(observations[agent], view.final_observations[slot])
        valid = [agent for agent in self.agents
                 if not (terminated.get(agent) or truncated.get(agent))]
        if valid:
            self._write(view, observations, infos, valid)
            return ()
        numbers = {}
        for info in infos.values():
            for name, value in numeric_scalars(info).items():
                numbers.setdefault(name, []).append(value)
        ended = {name: float(np.mean(values)) for name, values in numbers.items()}
        ended |= {"episode_return": float(np.mean(list(self._returns.values()))),
                  "episode_length": self._length}
        self.reset_into(view)
        return [ended]


PARALLEL = "observations", "rewards", "terminations", "truncations", "infos"


def _masks(observations, infos):
    """The agents' action masks, None for none."""
    return [find_mask(observation, infos.get(agent, {})) for agent, observation in observations.items()]


def _parallel(env):
    """A PettingZoo environment in its parallel form."""
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel

    # In a game of turns all act at every step, and only the choice of the player to move counts.
    return (aec_to_parallel if env.metadata.get("is_parallelizable") else turn_based_aec_to_parallel)(env)


def _quickest_parallel(env):
    """The same parallel environment without the wrappers that check order and actions, which a vectorizer keeps; they
    are a third of simple_spread's step. Use it for steps only: reset and draw `env` itself."""
    conversions = sys.modules.get("pettingzoo.utils.conversions")
    if conversions is None or type(env) is not conversions.aec_to_parallel_wrapper:
        return env
    from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

    inner = env.aec_env
    while type(inner) in (AssertOutOfBoundsWrapper, OrderEnforcingWrapper):
        inner = inner.env
    return conversions.aec_to_parallel_wrapper(inner)


# --------------------------------------------------------------------------------------------------
# Whatever it is


def wrap(env):
    """An environment as workers.py steps it: PufferEnvs and wrapped ones as they are, Gymnasium's (single, vector, and
    old Gym's) and PettingZoo's (parallel, AEC) wrapped. Raises TypeError for anything else."""
    if hasattr(env, "step_into"):
        return env
    if isinstance(env, gymnasium.vector.VectorEnv):
        return GymnasiumVectorPufferEnv(env)
    inner = getattr(env, "unwrapped", env)
    if hasattr(inner, "num_envs") and hasattr(inner, "single_observation_space"):
        raise TypeError(f"{describe(env)} holds {inner.num_envs} environments itself; vec.backend "
                        "tensors takes such ones, if their arrays are tensors (for Isaac Lab: "
                        "tensors.IsaacLab).")
    if hasattr(env, "possible_agents"):
        return PettingZooPufferEnv(env)
    if hasattr(env, "step"):
        return GymnasiumPufferEnv(env)
    raise TypeError(f"{describe(env)} is no environment: expected a PufferEnv, a Gymnasium environment "
                    "(observation_space, action_space, reset, step) or a PettingZoo one (possible_agents).")


def slots(env):
    """The number of agents that an environment has room for."""
    return getattr(env, "max_num_agents", None) or env.num_agents


def copies(env):
    """The number of environments in it: more than 1 for a vector environment of Gymnasium."""
    return env.copies if isinstance(env, GymnasiumVectorPufferEnv) else 1


def signature(env):
    """What all environments of a vector have in common: observation space, action space, number of agents."""
    return seen_space(env), getattr(env, "env_single_action_space", env.single_action_space), slots(env)


WRAPPERS = GymnasiumPufferEnv, GymnasiumVectorPufferEnv, PettingZooPufferEnv


def create(creator, args, kwargs, seed):
    """One wrapped environment; see build."""
    return wrap(build(creator, args, kwargs, seed))


def build(creator, args, kwargs, seed):
    """Call a creator, with the seed if it has such a parameter; an instance is returned as it is."""
    if not callable(creator):
        return creator
    try:
        takes_seed = "seed" in inspect.signature(creator).parameters
    except (TypeError, ValueError):  # a class written in C
        takes_seed = False
    if takes_seed and "seed" not in kwargs:
        kwargs = {**kwargs, "seed": seed}
    try:
        return creator(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__.tb_next is not None or "required" not in str(error):  # in its code
            raise
        raise ConfigError(f"{error}; arguments with a plain default are settings (--env.NAME), others a function of "
                          "yours must give") from None


def seen_spaces(vecenv):
    """The spaces of the fields that an agent of a vectorized environment sees."""
    return [leaf for _, _, leaf in FlatObservation(seen_space(vecenv.driver_env)).leaves]


def sees_choices(vecenv):
    """Whether an agent sees choices."""
    return any(leaf_kind(space) == "choices" for space in seen_spaces(vecenv))
