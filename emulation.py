"""Step environments of numpy, Gymnasium and PettingZoo as flat arrays.

    class Squares(PufferEnv): ...                               # many custom environments in one
    env = GymnasiumPufferEnv(gymnasium.make("CartPole-v1"))
    env = PettingZooPufferEnv(env_creator=knights_archers_zombies_v10.parallel_env)
    env = wrap(env)                                             # the wrapper that fits

    structure = observation.view(env.obs_dtype)                 # the fields of a Dict or Tuple
    fields = nativize_tensor(observations, nativize_dtype(env)) # the same as torch tensors

workers.py steps a process's GymnasiumPufferEnvs together, by `SyncStepper`, and other environments
by three methods: `views(rows, first)` takes the environment's part of one row of the rollout's
arrays, with zeros as results; `reset_into(view, seed)` and `step_into(view)` read the actions there
and write the rest except resets. Episodes restart by themselves. Both return a list of infos, of
the episodes that ended or, by a PufferEnv, its own.
flat_spaces.py converts the spaces.
"""

import inspect
import itertools
import math
import sys
import traceback
from types import SimpleNamespace

import gymnasium
import numpy as np
from gymnasium import spaces

import absolute_imports  # noqa: F401  first
from errors import ConfigError, EnvError
from flat_spaces import (
    FlatAction,
    FlatObservation,
    check_returned,
    describe,
    find_mask,
    nativize_dtype,  # noqa: F401  PufferLib has these two here
    nativize_tensor,  # noqa: F401
    numeric_scalars,
    store,
    warn_once,
)


class Checked:
    """An environment whose first reset and first step are checked.

    Attributes: env; returned_space, of the observations that `reset` and `step` return, None for
    those that are not checked; returned_shape, () or (num_envs,), of rewards and flags; to_array,
    which converts a returned observation, reward or flag to numpy. A method that reads a later
    result has it in a local variable `returned`: after an error `explain` looks for it in the
    frames of the traceback, and checks it.
    """

    returned_space, returned_shape = None, ()
    to_array = staticmethod(np.asarray)
    _unchecked = frozenset(("reset", "step"))

    def check_first(self, call, returned):
        """Check what the first call of `reset` or `step` returned."""
        if call in self._unchecked:
            self._unchecked = self._unchecked - {call}
            self.check_returned(call, returned)

    def check_returned(self, call, returned):
        """Raise an EnvError if a reset or step returned something else than declared."""
        check_returned(self.env, call, returned, self.returned_space, self.returned_shape,
                       self.to_array)


def explain(error):
    """Return the EnvError of a wrong result that may explain an error, else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        env = frame.f_locals.get("self")
        if hasattr(env, "check_returned") and "returned" in frame.f_locals:
            try:
                env.check_returned("reset" if "reset" in frame.f_code.co_name else "step",
                                   frame.f_locals["returned"])
            except EnvError as fault:
                return fault
    return None


def slice_rows(rows, first, count):
    """View the part of `count` agents of a row's arrays."""
    return SimpleNamespace(**{name: None if array is None else array[first : first + count]
                              for name, array in vars(rows).items()})


def new_rows(env, num_agents=None):
    """Make arrays for `num_agents` agents, as an environment's `views` takes them."""
    n = env.num_agents if num_agents is None else num_agents
    space, action = env.single_observation_space, FlatAction(env.single_action_space)
    return SimpleNamespace(
        observations=np.zeros((n, *space.shape), space.dtype),
        rewards=np.zeros(n, np.float32),
        actions=np.zeros((n, action.columns), np.int32 if action.heads else np.float32),
        terminals=np.zeros(n, np.uint8),
        truncations=np.zeros(n, np.uint8),
        resets=np.zeros(n, np.uint8),
        valid=np.ones(n, np.uint8),
        final_observations=np.zeros((n, *space.shape), space.dtype),
        action_masks=np.ones((n, sum(action.heads)), np.uint8) if env.has_action_masks else None,
    )


# --------------------------------------------------------------------------------------------------
# Custom environments in numpy, many in one object

UNWRITTEN = 0xA5  # each byte of the observations before the first reset and step


class PufferEnv(Checked):
    """Base class of environments that write their arrays in place.

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

    `step` resets ended episodes itself. Before each call `self.observations` and the other arrays
    are set to other rows of the backend's, so write all of `self.observations` every step, and
    keep no view. Rewards, terminals and truncations are 0 and masks are True before each step.
    infos: a list of dicts whose numbers are averaged and logged, [] for none; a key "n" is the
    number of episodes in a dict.

    Arrays: observations (num_agents, *shape), actions (num_agents,) for Discrete, (num_agents,
    heads) or (num_agents, *shape); rewards, terminals, truncations (num_agents,); masks
    (num_agents,), False for an inactive agent; final_observations, like observations, of agents
    that are truncated, written before their reset; action_masks (num_agents, options of all heads),
    None unless the class sets `has_action_masks = True`.
    """

    has_action_masks = False

    def __init__(self, buf=None):
        if not isinstance(self.single_observation_space, spaces.Box):
            raise EnvError(f"{self}: single_observation_space = {self.single_observation_space}: "
                           "must be a Box.")
        self.obs_dtype = FlatObservation(self.single_observation_space).dtype
        self._action = FlatAction(self.single_action_space)
        batch_space = gymnasium.vector.utils.batch_space
        self.observation_space = batch_space(self.single_observation_space, self.num_agents)
        self.action_space = batch_space(self.single_action_space, self.num_agents)
        self.returned_shape = (self.num_agents,)
        self.__dict__.update(self.views(new_rows(self) if buf is None else buf, 0))

    def reset(self, seed=None):
        """Begin all episodes; return (observations, infos)."""
        raise NotImplementedError(f"{self} must define reset(self, seed=None).")

    def step(self, actions):
        """Step all; return (observations, rewards, terminals, truncations, infos)."""
        raise NotImplementedError(f"{self} must define step(self, actions).")

    def views(self, rows, first):
        row = slice_rows(rows, first, self.num_agents)
        return {"observations": row.observations, "rewards": row.rewards,
                "actions": row.actions.reshape(self.num_agents, *self.single_action_space.shape),
                "terminals": row.terminals.view(bool), "truncations": row.truncations.view(bool),
                "masks": row.valid.view(bool), "final_observations": row.final_observations,
                "action_masks": row.action_masks}

    def reset_into(self, view, seed=None):
        self._take_arrays("reset", view)
        returned = self.reset(seed)
        self.check_first("reset", returned)
        return returned[-1]

    def step_into(self, view):
        self._take_arrays("step", view)
        returned = self.step(self._env_actions(self.actions))
        self.check_first("step", returned)
        return returned[-1]

    def _take_arrays(self, call, view):
        self.__dict__.update(view)
        if call in self._unchecked:
            self._octets = self.observations.reshape(-1).view(np.uint8)
            self._octets[:] = UNWRITTEN

    def check_values(self, call, returned):
        """Check what a call returned, but for the observations; infos are a list of dicts."""
        if isinstance(returned, tuple | list) and returned:
            *others, infos = returned
            is_list = isinstance(infos, tuple | list)
            if not is_list or not all(isinstance(info, dict) for info in infos):
                raise EnvError(f"{self}: the infos of {call}() must be a list of dicts, got "
                               f"{describe(infos)}.")
            returned = [*others, {}]
        check_returned(self, call, returned, None, self.returned_shape)

    def check_returned(self, call, returned):
        """Check as Checked does, and that observations lie in place."""
        self.check_values(call, returned)
        if (self._octets == UNWRITTEN).all():
            raise EnvError(
                f"{self}: {call}() did not write its observations. Write to self.observations[:] "
                "at each call and keep no view of it, or derive from pufferlib.PufferEnv.")

    def __str__(self):
        return type(self).__name__

    def _env_actions(self, actions):
        """Add a discrete space's start to actions; clip continuous ones to the bounds."""
        space, starts = self.single_action_space, self._action.starts
        if not self._action.heads:
            return np.minimum(np.maximum(actions, space.low), space.high)
        return actions + starts.reshape(space.shape) if starts.any() else actions

    def render(self):
        return None

    def close(self):
        """Free what the environment holds."""

    @property
    def driver_env(self):
        return self


# --------------------------------------------------------------------------------------------------
# What the wrappers share


def parameters_of(function):
    """Return {name: inspect.Parameter}; None of a class in C, without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def takes(function, keyword):
    """Tell whether a function or class takes a keyword, also in its **keywords."""
    parameters = (parameters_of(function) or {}).values()
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


def wrapped_space(env):
    """Return the space of what `env` or a vector's driver_env wraps, or None."""
    return getattr(getattr(env, "driver_env", env), "env_single_observation_space", None)


def declared_space(env):
    """Return the observation space that an environment declares; it may be nested."""
    return wrapped_space(env) or env.single_observation_space


def within(env):
    """Yield an environment and those within its wrappers, the outermost first."""
    known = []
    while hasattr(env, "step") and not any(env is one for one in known):
        known.append(env)
        yield env
        env = getattr(env, "env", None)


def episode_info(info, episode_return, episode_length, has_inner=False):
    """Add the episode's return and length to the info of its last step.

    has_inner: whether an inner wrapper may have added the return, before rewards were changed.
    """
    if has_inner:
        episode_return = info.get("episode_return", episode_return)
    info = {**info, "episode_return": episode_return, "episode_length": episode_length}
    # RecordEpisodeStatistics may be below a wrapper that changes rewards.
    if isinstance(info.get("episode"), dict) and "r" in info["episode"]:
        info["episode_return"] = float(np.ravel(info["episode"]["r"])[0])
    return info


class Wrapper(Checked):
    """Base class of the wrappers below: flat spaces, action masks.

    Attributes: single_observation_space, single_action_space, the flat ones; obs_dtype, so that
    `observation.view(env.obs_dtype)` has the fields; env_single_observation_space and
    env_single_action_space, the environment's spaces.
    """

    _has_masks = None

    def _set_spaces(self, observation_space, action_space):
        self.env_single_observation_space = observation_space
        self.env_single_action_space = action_space
        self._observation = FlatObservation(observation_space)
        self._action = FlatAction(action_space)
        self.obs_dtype = self._observation.dtype
        self.single_observation_space = self._observation.flat_space
        self.single_action_space = self._action.flat_space

    @property
    def emulated(self):
        """Return what `nativize_dtype` takes, under PufferLib's name."""
        return self

    @property
    def has_action_masks(self):
        """Tell whether the environment gives action masks; the first call resets it."""
        if self._has_masks is None:
            self.reset_env(0)
        return self._has_masks

    def check_first(self, call, returned):
        """Check as Checked does, and that the first reset and step agree on masks."""
        if call not in self._unchecked:
            return
        super().check_first(call, returned)
        has_masks = self._action.check_masks(self.env, self._masks(returned[0], returned[-1]))
        if call == "reset":
            self._has_masks = has_masks
        elif has_masks and not self._has_masks:
            raise EnvError(
                f"{self.env}: step() gives an action mask, and the first reset() gave none. Give "
                'one at both: reset returns observation, {"action_mask": ...}.')

    def _masks(self, observation, info):
        """List the action masks that a reset or step gives, None for none."""
        return [find_mask(observation, info)]

    def views(self, rows, first):
        return slice_rows(rows, first, slots(self))

    def render(self):
        return self.env.render()

    def close(self):
        if hasattr(self.env, "close"):  # hand-made environments may have none
            self.env.close()


# --------------------------------------------------------------------------------------------------
# Gymnasium


def gymnasium_form(env):
    """Return an environment of Gymnasium; Shimmy converts one of old Gym."""
    gym = sys.modules.get("gym")
    if gym is not None and isinstance(env, gym.Env):
        try:
            import shimmy
        except ImportError:
            raise EnvError(f"{env} is an environment of old Gym, which needs Shimmy: "
                           "pip install shimmy.") from None
        has_seed = takes(env.reset, "seed")
        env = (shimmy.GymV26CompatibilityV0 if has_seed else shimmy.GymV21CompatibilityV0)(env=env)
    problem = ("is not a gymnasium.Env" if not isinstance(env, gymnasium.Env)
               else "has no observation_space" if getattr(env, "observation_space", None) is None
               else "has no action_space" if getattr(env, "action_space", None) is None
               else "has a reset without seed" if not takes(env.reset, "seed") else None)
    if problem:
        raise EnvError(
            f"{describe(env)} {problem}. Derive from gymnasium.Env, set both spaces in __init__, "
            "and define reset(self, *, seed=None, options=None).")
    return env


class GymnasiumPufferEnv(Wrapper, gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """A Gymnasium environment with flat observation and action spaces.

    It is a Gymnasium environment itself. env: an instance; or env_creator with env_args and
    env_kwargs. reward_scale multiplies the rewards that are learned from. The info of an episode's
    last step holds episode_return, which is not scaled, and episode_length too. Raises EnvError
    for spaces that cannot be made flat, and EnvError at the first reset or step that breaks what
    the environment declares.
    """

    num_agents = 1

    def __init__(self, env=None, env_creator=None, env_args=(), env_kwargs=None, buf=None, seed=0,
                 reward_scale=1.0):
        env = env_creator(*env_args, **(env_kwargs or {})) if env is None else env
        # so that its spec can be made again
        gymnasium.utils.RecordConstructorArgs.__init__(self, reward_scale=reward_scale)
        gymnasium.Wrapper.__init__(self, gymnasium_form(env))
        self._set_spaces(self.env.observation_space, self.env.action_space)
        self.returned_space = self.env.observation_space
        self.reward_scale = reward_scale
        self.observation_space = self.single_observation_space
        self.action_space = self.single_action_space
        self._episode_return, self._episode_length = 0.0, 0
        self._mask_method = (self.env.get_wrapper_attr("action_masks")
                             if self.env.has_wrapper_attr("action_masks") else None)
        # A GymnasiumPufferEnv inside other wrappers has the return before they change rewards.
        self.has_inner = any(isinstance(one, GymnasiumPufferEnv) for one in within(self.env))
        self._stepper = SyncStepper([self])

    # Methods for a backend

    def views(self, rows, first):
        return self._stepper.prepare(super().views(rows, first))

    def reset_into(self, view, seed=None):
        self._stepper.reset(view, [seed])
        return []

    def step_into(self, view):
        return [info for _, info in self._stepper.step(view)]

    def mask(self, observation, info):
        """Return an observation's mask; a method action_masks() comes first."""
        return self._mask_method() if self._mask_method else find_mask(observation, info)

    def reset_env(self, seed, options=None):
        # The reset of a custom environment may lack the argument `options`.
        returned = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        self.check_first("reset", returned)
        self._has_masks = self._has_masks or self._mask_method is not None
        self._episode_return, self._episode_length = 0.0, 0
        return returned

    # Gymnasium's methods

    def reset(self, *, seed=None, options=None):
        observation, info = self.reset_env(seed, options)
        return self._observation.flatten(observation), info

    def step(self, action):
        """Return Gymnasium's five values; the observation is a new flat array."""
        row = np.reshape(action, self._action.columns)
        returned = self.env.step(self._action.unflatten(row))
        self.check_first("step", returned)
        observation, reward, terminated, truncated, info = returned
        reward = float(reward.item() if isinstance(reward, np.ndarray) else reward)
        self._episode_return += reward
        self._episode_length += 1
        if terminated or truncated:
            info = episode_info(info, self._episode_return, self._episode_length, self.has_inner)
        return (self._observation.flatten(observation), self.reward_scale * reward,
                bool(terminated), bool(truncated), info)


def warn_of_moments(env):
    """Warn of a wrapper whose running moments are lost when the run ends."""
    advice = {"NormalizeObservation": "--train.norm-obs True (models.Normalized around a network)",
              "NormalizeReward": "--train.norm-reward True"}
    for layer, (name, replacement) in itertools.product(within(env), advice.items()):
        if isinstance(layer, (getattr(gymnasium.wrappers, name),
                              getattr(gymnasium.wrappers.vector, name))):
            warn_once(f"{name}: a resume, an evaluation and an export begin without its moments. "
                      f"Replace it by {replacement}, which is shared and saved with the run.")


# --------------------------------------------------------------------------------------------------
# Many GymnasiumPufferEnvs of one process, stepped in one loop


def _unwrap_step(env):
    """Return (step, time limit) of an environment.

    The outermost wrappers of gymnasium.make check and count what SyncStepper does too.
    """
    wrappers, limit = gymnasium.wrappers, math.inf
    while type(env) in (wrappers.TimeLimit, wrappers.OrderEnforcing, wrappers.PassiveEnvChecker):
        limit = min(limit, getattr(env, "_max_episode_steps", math.inf))
        env = env.env
    return env.step, limit


class SyncStepper:
    """Step GymnasiumPufferEnvs of one process in one loop, as a SyncVectorEnv.

    A call of a method of each would take a third of the 5 us of a CartPole's step. numbers: of the
    environments, for infos.
    """

    def __init__(self, envs, numbers=(0,)):
        self._envs, self._numbers, self._casting = envs, numbers, "same_kind"
        self._start, observation = envs[0]._action.start, envs[0]._observation
        self._shape, self._is_structured = observation.space.shape, observation.structured
        self._is_scalar = self._shape == ()
        self._scales = np.array([env.reward_scale for env in envs])

    def prepare(self, row):
        """Return a row with what `reset` and `step` need beside its arrays."""
        row.valid[:] = 1
        row.joined = (row.observations[:, 0] if self._is_scalar or self._is_structured
                      else row.observations.reshape(-1, *self._shape[1:]))
        return row

    def reset(self, row, seeds):
        """Begin new episodes and write a row."""
        returned = [env.reset_env(seed) for env, seed in zip(self._envs, seeds, strict=True)]
        self._steps, self._limits = zip(*(_unwrap_step(env.env) for env in self._envs), strict=True)
        self._resets = [env.env.reset for env in self._envs]
        self._returns, self._num_steps = np.zeros(len(returned)), 0
        self._starts = [0] * len(returned)  # in steps, of each episode
        self._next_limit = min(self._limits)
        row.rewards[:], row.terminals[:], row.truncations[:], row.resets[:] = 0, 0, 0, 1
        self._write(row, *map(list, zip(*returned, strict=True)))

    def step(self, row):
        """Step all with the actions of a row, and write the results there.

        Returns [(number, info)] of the episodes that ended.
        """
        if self._start is None:
            actions = [env._action.unflatten(action)
                       for env, action in zip(self._envs, row.actions, strict=True)]
        else:
            actions = row.actions[:, 0].astype(np.int64)
            if self._start:
                actions += self._start
        returned = [step(action) for step, action in zip(self._steps, actions)]  # noqa: B905
        if self._num_steps == 0:
            for env, result in zip(self._envs, returned, strict=True):
                env.check_first("step", result)
        columns = map(list, zip(*returned))  # noqa: B905
        observations, rewards, terminated, truncated, infos = columns
        try:
            rewards = np.array(rewards, np.float64).reshape(len(rewards))
        except ValueError:  # some are arrays of one, which the first step may return too
            rewards = np.array([np.reshape(reward, ()) for reward in rewards], np.float64)
        self._returns += rewards
        row.rewards[:] = self._scales * rewards
        self._num_steps += 1
        if self._num_steps >= self._next_limit:
            truncated = [flag or self._num_steps >= start + limit for flag, start, limit
                         in zip(truncated, self._starts, self._limits, strict=True)]
        row.terminals[:], row.truncations[:], row.resets[:] = 0, 0, 0
        ended = []
        if any(terminated) or any(truncated):
            for i in range(len(returned)):
                if not (terminated[i] or truncated[i]):
                    continue
                row.terminals[i], row.truncations[i] = bool(terminated[i]), bool(truncated[i])
                row.resets[i] = 1
                if truncated[i]:
                    self._envs[i]._observation.flatten(observations[i], row.final_observations[i])
                info = episode_info(infos[i], self._returns.item(i),
                                    self._num_steps - self._starts[i], self._envs[i].has_inner)
                ended.append((self._numbers[i], numeric_scalars(info)))
                self._returns[i], self._starts[i] = 0, self._num_steps
                observations[i], infos[i] = self._resets[i]()
                returned[i] = observations[i], *returned[i][1:]
            self._next_limit = min(map(sum, zip(self._starts, self._limits, strict=True)))
        self._write(row, observations, infos)
        return ended

    def _write(self, row, observations, infos):
        """Write observations and action masks to a row."""
        if self._is_structured:
            for env, target, observation in zip(self._envs, row.observations, observations,
                                                strict=True):
                env._observation.flatten(observation, target)
        elif self._is_scalar:
            store(row.joined, observations)
        else:
            try:
                np.concatenate(observations, out=row.joined, casting=self._casting)
            except TypeError:  # another kind of dtype than the space's, of which `store` warns
                self._casting = "unsafe"
                for target, observation in zip(row.observations, observations, strict=True):
                    store(target, observation)
        if row.action_masks is not None:
            for env, target, observation, info in zip(self._envs, row.action_masks, observations,
                                                      infos, strict=True):
                env._action.write_mask(target, env.mask(observation, info))

    def check_returned(self, call, returned):
        """Raise an EnvError if one of the calls returned something else than declared."""
        for env, result in zip(self._envs, returned, strict=True):
            env.check_returned(call, result)


# --------------------------------------------------------------------------------------------------
# Gymnasium's vector environments


def autoreset_mode(env):
    """Return an autoreset mode: "next_step", "same_step" or "disabled"."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    name = getattr(mode, "name", str(mode)).lower()  # Gymnasium's or a word
    if name not in ("next_step", "same_step", "disabled"):
        raise EnvError(
            f'{env}: metadata["autoreset_mode"] = {mode!r}: must be "next_step", "same_step" or '
            '"disabled", as Gymnasium defines them. For Isaac Lab and ManiSkill there are '
            "tensors.IsaacLab and tensors.ManiSkill.")
    return name


class GymnasiumVectorPufferEnv(Wrapper):
    """A gymnasium.vector.VectorEnv of any autoreset mode, as num_envs agents.

    NEXT_STEP (the step after an episode's end ignores the action): the agent is inactive for that
    step. SAME_STEP: the final observation comes from the info. DISABLED: ended episodes are reset
    here. reward_scale multiplies the rewards that are learned from, not episode_return.
    Attributes: copies, the environments in it; ended, the numbers of those that the last step's
    infos are about.
    """

    def __init__(self, env, reward_scale=1.0):
        warn_of_moments(env)
        self.env, self.reward_scale = env, reward_scale
        self.num_agents = self.copies = env.num_envs
        self.mode = autoreset_mode(env)
        self._set_spaces(env.single_observation_space, env.single_action_space)
        self.returned_space = gymnasium.vector.utils.batch_space(env.single_observation_space,
                                                                 self.num_agents)
        self.returned_shape = (self.num_agents,)
        self._make_arrays()

    def _make_arrays(self):
        """Make the arrays of flat observations and of the episodes' sums."""
        self._flat = np.zeros((self.num_agents, *self._observation.shape),
                              self._observation.flat_dtype)
        self._fields = self._observation.fields(self._flat)
        self._returns = np.zeros(self.num_agents)
        self._lengths = np.zeros(self.num_agents, np.int64)
        self._is_inactive = np.zeros(self.num_agents, bool)  # NEXT_STEP: ended at the last step

    def _masks(self, observation, info):
        masks = find_mask(observation, info)
        return [None if masks is None else _at(masks, i) for i in range(self.num_agents)]

    def _write(self, view, observations, info, begun=None):
        """Write observations and masks; begun: flags of the copies that the info is about."""
        if view.action_masks is not None:
            for i, mask in enumerate(self._masks(observations, info)):
                if begun is None or begun[i]:
                    self._action.write_mask(view.action_masks[i], mask)
        if self._observation.structured:
            self._observation.write(observations, self._fields)
            observations = self._flat
        store(view.observations, observations.reshape(view.observations.shape))

    def reset_env(self, seed):
        returned = self.env.reset(seed=seed)
        self.check_first("reset", returned)
        if not self._has_masks and any(env.has_wrapper_attr("action_masks")
                                       for env in getattr(self.env, "envs", ())):
            raise EnvError(f"{self.env}: a method action_masks() works with single environments, "
                           "not in a VectorEnv. Name what makes one, and set --vec.num-envs.")
        return returned

    def reset_into(self, view, seed=None):
        returned = self.reset_env(seed)
        self._write(view, *returned)
        self._returns[:], self._lengths[:], self._is_inactive[:] = 0, 0, False
        return []

    def step_into(self, view):
        space, utils = self.env.single_action_space, gymnasium.vector.utils
        if self._action.start is not None:
            actions = view.actions[:, 0].astype(space.dtype) + self._action.start
        else:
            actions = [self._action.unflatten(row) for row in view.actions]
            actions = utils.concatenate(space, actions,
                                        utils.create_empty_array(space, self.num_agents))
        returned = self.env.step(actions)
        self.check_first("step", returned)
        observations, rewards, terminated, truncated, info = returned
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        done = self._count_step(view, rewards, terminated, truncated)
        self._write(view, observations, info)
        self.ended, infos = np.flatnonzero(done).tolist(), []
        if self.ended:
            infos = self._end_episodes(view, truncated, info, done)
            if self.mode == "disabled":
                self._write(view, *self.env.reset(options={"reset_mask": done}), begun=done)
        return infos

    def _count_step(self, view, rewards, terminated, truncated):
        """Write rewards and ends, add to the episodes' sums; return who ended (copies,)."""
        done = terminated | truncated
        if self.mode == "next_step":
            rewards = rewards * ~self._is_inactive
        self._returns += rewards
        self._lengths += ~self._is_inactive
        view.rewards[:] = rewards if self.reward_scale == 1 else rewards * self.reward_scale
        view.terminals[:], view.truncations[:] = terminated, truncated
        if self.mode == "next_step":  # an old episode's last observation is not acted on
            self._is_inactive = done
            view.valid[:] = ~done
        return done

    def _end_episodes(self, view, truncated, info, done):
        """Write the final observations; return the infos of the episodes that ended."""
        final = info
        if self.mode == "same_step":
            # The info is the next episode's, but for what RecordEpisodeStatistics adds.
            final = {key: info[key] for key in ("episode", "_episode") if key in info}
            final |= info.get("final_info", {})
            for i in np.flatnonzero(truncated):
                self._observation.flatten(_at(info["final_obs"], i), view.final_observations[i])
        else:
            view.final_observations[truncated] = view.observations[truncated]
            if self.mode == "disabled":  # RecordEpisodeStatistics clears all counters at a reset
                final = {key: value for key, value in info.items() if key != "episode"}
        infos = [numeric_scalars(episode_info(
            _info_at(final, i, done), float(self._returns[i]), int(self._lengths[i])))
            for i in self.ended]
        self._returns[done], self._lengths[done] = 0, 0
        return infos


def _info_at(info, i, is_known):
    """Return the entries of copy i in a vector environment's info.

    Key "x" has entries where its mask "_x" is true, and where `is_known` is, if it has no mask.
    """
    return {key: _info_at(value, i, is_known) if isinstance(value, dict) else value[i]
            for key, value in info.items()
            if isinstance(value, dict) or (isinstance(value, np.ndarray)
                                           and len(value) == len(is_known))
            if not key.startswith("_") and info.get(f"_{key}", is_known)[i]}


def _at(batch, i):
    """Return entry i of a batch, which may be a dict or tuple of batches."""
    if isinstance(batch, dict):
        return {key: _at(part, i) for key, part in batch.items()}
    return tuple(_at(part, i) for part in batch) if isinstance(batch, tuple) else batch[i]


# --------------------------------------------------------------------------------------------------
# PettingZoo

PARALLEL = "observations", "rewards", "terminations", "truncations", "infos"
MAX_NAMED_AGENTS = 8  # with a metric each


class PettingZooPufferEnv(Wrapper):
    """A PettingZoo environment with flat spaces.

    It is a PettingZoo parallel environment itself. env: an instance, parallel or AEC (which is
    converted); or env_creator with env_args and env_kwargs. Under a backend each of
    `possible_agents` has a fixed slot; one that does not act is not valid. Raises EnvError if
    agents have different spaces, else as GymnasiumPufferEnv. The info of an episode has the mean of
    the agents' returns, episode_return, and with at most MAX_NAMED_AGENTS agents each one's.
    """

    def __init__(self, env=None, env_creator=None, env_args=(), env_kwargs=None, buf=None, seed=0):
        env = env_creator(*env_args, **(env_kwargs or {})) if env is None else env
        self.env = env = _parallel(env)
        self._unguarded_env = _without_checks(env)
        self.possible_agents = list(env.possible_agents)
        self.agents = list(self.possible_agents)
        self.metadata = getattr(env, "metadata", {})
        self.render_mode = getattr(env, "render_mode", None)
        pairs = {agent: (env.observation_space(agent), env.action_space(agent))
                 for agent in self.possible_agents}
        first, expected = next(iter(pairs.items()))
        for agent, pair in pairs.items():
            if pair != expected:
                raise EnvError(
                    f"{env}: {agent} has the spaces {pair}, {first} has {expected}. Pad them with "
                    "supersuit.pad_observations_v0 and pad_action_space_v0.")
        self._set_spaces(*expected)
        self._action_spaces = {agent: FlatAction(expected[1]).flat_space
                               for agent in self.possible_agents}  # each has its random generator
        self._slots = {agent: i for i, agent in enumerate(self.possible_agents)}
        self._valid = []

    @property
    def num_agents(self):
        """Return the number of agents that act; max_num_agents is the number of slots."""
        return len(self.agents)

    @property
    def max_num_agents(self):
        return len(self.possible_agents)

    @property
    def unwrapped(self):
        return self.env.unwrapped

    def observation_space(self, agent):
        return self.single_observation_space

    def action_space(self, agent):
        return self._action_spaces[agent]

    def state(self):
        return self.env.state()

    def _masks(self, observations, infos):
        return [find_mask(observation, infos.get(agent, {}))
                for agent, observation in observations.items()]

    def reset_env(self, seed, options=None):
        # The reset of a custom environment may lack the argument `options`.
        returned = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        self.check_first("reset", returned)
        self.agents = list(self.env.agents)
        self._returns = dict.fromkeys(self.agents, 0.0)
        self._last_infos = {}  # the infos of agents whose episode ended before the others
        self._length = 0
        return returned

    def _step_env(self, env, actions):
        returned = env.step(actions)
        self.check_first("step", returned)
        if not self._slots.keys() >= {*returned[0], *returned[1]}:  # an unknown agent
            self.check_returned("step", returned)
        self.agents = list(env.agents)
        return returned

    def check_returned(self, call, returned):
        """Check the parts of each agent that any of the dicts names."""
        names = PARALLEL if call == "step" else ("observations", "infos")
        if (not isinstance(returned, tuple | list) or len(returned) != len(names)
                or not all(isinstance(part, dict) for part in returned)):
            raise EnvError(
                f"{self.env}: {call}() must return {len(names)} dicts of agents: "
                f"{', '.join(names)}, got {describe(returned)}.")
        defaults = (None, 0.0, False, False, {}) if call == "step" else (None, {})
        for agent in dict.fromkeys(itertools.chain(*returned)):
            if agent not in self._slots:
                raise EnvError(f"{self.env}: {call}() returned {agent}, which is not in "
                               f"possible_agents {self.possible_agents}. Add it there.")
            parts = [part.get(agent, default)
                     for part, default in zip(returned, defaults, strict=True)]
            space = self.env_single_observation_space if agent in returned[0] else None
            check_returned(f"{self.env}, {agent}", call, parts, space)

    def reset(self, seed=None, options=None):
        observations, infos = self.reset_env(seed, options)
        return self._flatten(observations), infos

    def step(self, actions):
        """Return PettingZoo's five dicts; observations are new flat arrays."""
        observations, *others = self._step_env(self.env, {
            agent: self._action.unflatten(np.reshape(action, self._action.columns))
            for agent, action in actions.items()})
        return self._flatten(observations), *others

    def _flatten(self, observations):
        return {agent: self._observation.flatten(observation)
                for agent, observation in observations.items()}

    def _write(self, view, observations, infos, agents):
        """Write the observations and masks of these agents; the others are not valid."""
        view.valid[:], view.observations[:] = 0, 0
        if view.action_masks is not None:
            view.action_masks[:] = 1
        self._valid = [agent for agent in agents if agent in observations]
        for agent in self._valid:
            slot, observation = self._slots[agent], observations[agent]
            view.valid[slot] = 1
            self._observation.flatten(observation, view.observations[slot])
            if view.action_masks is not None:
                mask = find_mask(observation, infos.get(agent, {}))
                self._action.write_mask(view.action_masks[slot], mask)

    def reset_into(self, view, seed=None):
        returned = self.reset_env(seed)
        observations, infos = returned
        self._write(view, observations, infos, self.agents)
        if not self._valid:
            raise EnvError(
                f"{self.env}: no agent acts after reset(). One at least must be in `agents` "
                f"{self.agents} and in the observations {list(observations)}.")
        return []

    def step_into(self, view):
        slots = self._slots
        returned = self._step_env(self._unguarded_env, {
            agent: self._action.unflatten(view.actions[slots[agent]]) for agent in self._valid})
        observations, rewards, terminated, truncated, infos = returned
        self._length += 1
        for agent in dict.fromkeys((*self._valid, *rewards)):
            slot, reward = slots[agent], np.asarray(rewards.get(agent, 0.0)).item()
            view.rewards[slot] = reward
            self._returns[agent] = self._returns.get(agent, 0.0) + reward
            view.terminals[slot] = terminated.get(agent, False)
            if truncated.get(agent, False):
                if agent in observations:
                    view.truncations[slot] = True
                    self._observation.flatten(observations[agent], view.final_observations[slot])
                else:  # without a value to bootstrap from
                    view.terminals[slot] = True
            if view.terminals[slot] or view.truncations[slot]:
                self._last_infos.setdefault(agent, infos.get(agent, {}))
        acting = [agent for agent in self.agents
                  if not (terminated.get(agent) or truncated.get(agent))]
        if acting:
            self._write(view, observations, infos, acting)
            return ()
        view.terminals[view.truncations == 0] = True  # agents that left without a flag, too
        values = {}
        for info in (infos | self._last_infos).values():
            for name, value in numeric_scalars(info).items():
                values.setdefault(name, []).append(value)
        values["episode_return"] = list(self._returns.values())
        values["episode_length"] = [self._length]
        if 1 < len(self.possible_agents) <= MAX_NAMED_AGENTS:
            values |= {f"episode_return_{agent}": [number]
                       for agent, number in self._returns.items()}
        self.reset_into(view)
        return [{name: float(np.mean(numbers)) for name, numbers in values.items()}]


def _parallel(env):
    """Return a PettingZoo environment in its parallel form."""
    if not hasattr(env, "agent_iter"):
        return env
    from pettingzoo.utils import conversions

    # In a game of turns all act at each step, and only the choice of the player to move counts.
    return (conversions.aec_to_parallel if env.metadata.get("is_parallelizable")
            else conversions.turn_based_aec_to_parallel)(env)


def _without_checks(env):
    """Return a parallel environment without the wrappers that check calls.

    They check the order and the actions, which a backend keeps, and take a third of
    simple_spread's step. For steps only: reset and draw `env` itself.
    """
    conversions = sys.modules.get("pettingzoo.utils.conversions")
    if conversions is None or type(env) is not conversions.aec_to_parallel_wrapper:
        return env
    from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, OrderEnforcingWrapper

    inner = env.aec_env
    while type(inner) in (AssertOutOfBoundsWrapper, OrderEnforcingWrapper):
        inner = inner.env
    return conversions.aec_to_parallel_wrapper(inner)


# --------------------------------------------------------------------------------------------------
# Any environment

WRAPPERS = GymnasiumPufferEnv, GymnasiumVectorPufferEnv, PettingZooPufferEnv


def wrap(env):
    """Return an environment as workers.py steps it.

    PufferEnvs and wrapped ones are returned as they are, Gymnasium's (single, vector, old Gym's)
    and PettingZoo's (parallel, AEC) wrapped. Raises EnvError for anything else.
    """
    if hasattr(env, "step_into"):
        return env
    if isinstance(env, gymnasium.vector.VectorEnv):
        return GymnasiumVectorPufferEnv(env)
    inner = getattr(env, "unwrapped", env)
    if hasattr(inner, "num_envs") and hasattr(inner, "single_observation_space"):
        raise EnvError(f"{describe(env)} holds {inner.num_envs} environments. vec.backend tensors "
                       "takes it if its arrays are tensors (for Isaac Lab: tensors.IsaacLab).")
    if hasattr(env, "possible_agents") or callable(getattr(env, "action_space", None)):
        return PettingZooPufferEnv(env)
    return GymnasiumPufferEnv(env)


def slots(env):
    """Return the most agents that an environment may have."""
    return getattr(env, "max_num_agents", None) or env.num_agents


def copies(env):
    """Return the number of environments in it: over 1 for a vector environment."""
    return env.copies if isinstance(env, GymnasiumVectorPufferEnv) else 1


def signature(env):
    """Return what the environments of a vector must share: spaces, number of agents."""
    action_space = getattr(env, "env_single_action_space", env.single_action_space)
    return declared_space(env), action_space, slots(env)


def create(creator, args, kwargs, seed):
    """Make one wrapped environment; see build."""
    return wrap(build(creator, args, kwargs, seed))


def build(creator, args, kwargs, seed):
    """Call a creator, with the seed if it takes one; an instance is returned as it is."""
    if not callable(creator):
        return creator
    if "seed" in (parameters_of(creator) or ()) and "seed" not in kwargs:
        kwargs = {**kwargs, "seed": seed}
    try:
        return creator(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__.tb_next is not None or "required" not in str(error):
            raise  # in its code
        raise ConfigError(f"{error}. Give the argument a default, so that --env.NAME can set it, "
                          "or name a function that makes the environment.") from None
