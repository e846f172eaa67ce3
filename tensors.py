"""Environments of torch, JAX and others: one object steps many as tensors.

    vecenv = vector.make("examples/torch_cartpole.py:make", env_kwargs={"num_envs": 1024})
    vecenv = vector.make("gymnax/CartPole-v1", num_envs=1024)   # by families/adapters.py
    vecenv = vector.make(tensors.IsaacLab(env))                 # by those at the end of this file

Such an environment has what Gymnasium's vector environments have:

    num_envs, single_observation_space, single_action_space
    metadata["autoreset_mode"]: "next_step", "same_step", "disabled", or Gymnasium's AutoresetMode
    reset(seed=None) -> (observations, info)
    step(actions) -> (observations, rewards, terminated, truncated, info)
    close() and render(), if it has something to close or to draw

Each array is a torch tensor, or has `__dlpack__` and `__array_namespace__` as JAX's arrays do.
Observations are (num_envs, *shape), or Dicts and Tuples of such arrays as their space is; rewards
(num_envs,) numbers; terminated and truncated (num_envs,) bools. Actions arrive as the kind of array
that the observations are, on their device, in the dtype and the shape of single_action_space:
(num_envs,) for a Discrete. An info may hold "action_mask" (num_envs, options).

The modes of autoreset, for episodes that end:
    same_step: the returned observation is the next episode's first. info["final_obs"] has the last
        one of those that ended, (num_envs, ...), and info["final_info"] their numbers. Without
        "final_obs" a truncated episode is valued by the observation before its last action.
    next_step: the returned observation is the last one. The next step ignores the action and
        returns the next episode's first.
    disabled: it is the last one, and reset(options={"reset_mask": ended}) begins the next ones.

Each observation, reward and flag is copied once, into its row of the rollout. An array of JAX is
read where it lies (dlpack). Actions are copied, too, so that an environment may write into them.
Only JAX, whose arrays are read-only, gets the row itself, if its dtype is int32 or float32 and
nothing is added (Discrete's start) or clipped to bounds.
"""

import functools
import operator
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium import spaces

import emulation
import flat_spaces
from errors import EnvError


def as_tensor(array):
    """Return an array as a torch tensor, not copied if it has `__dlpack__`."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return torch.as_tensor(array)
    if not hasattr(array, "__dlpack__"):
        raise EnvError("expected a torch tensor or an array with __dlpack__, got "
                       f"{type(array).__name__}.")
    return torch.from_dlpack(array)


def to_numpy(array):
    """Return an array on the host."""
    return as_tensor(array).detach().cpu().numpy()


def as_tensors(storage):
    """Return {name: tensor or None} of a namespace's numpy arrays, not copied."""
    return {name: None if array is None else torch.from_numpy(array)
            for name, array in vars(storage).items()}


def _first_leaf(tree):
    while isinstance(tree, dict | tuple):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree), None)
    return tree


def wrap(env, seed):
    """Return the TensorEnv of an environment, None if its `reset` returns no tensors.

    It is reset to find out, but only if it has num_envs and single_observation_space.
    """
    if hasattr(env, "step_into") or not all(hasattr(env, name)
                                            for name in ("num_envs", "single_observation_space")):
        return None
    first = env.reset(seed=seed)
    leaf = _first_leaf(first)
    if isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "__dlpack__"):
        return None
    return TensorEnv(env, first)


class TensorEnv(emulation.GymnasiumVectorPufferEnv):
    """Such an environment, as flat tensors; vector.Tensors steps it.

    env: the environment. first: what its reset returned; it shows the kind of array and the device.
    Attributes, beside those of GymnasiumVectorPufferEnv: device; has_valid, whether agents may be
    inactive. Raises TypeError for spaces that cannot be made flat, and EnvError for an unknown mode
    of autoreset and for what breaks its space or shape at the first reset or the first step.
    """

    gives_tensors = True
    to_array = staticmethod(to_numpy)

    def __init__(self, env, first):
        leaf = _first_leaf(first)
        self.device = as_tensor(leaf).device
        super().__init__(env)
        if isinstance(env.single_action_space, spaces.Dict | spaces.Tuple):
            raise EnvError(f"{env}: environments of tensors act in a Discrete, MultiDiscrete, "
                           "MultiBinary or Box. Use another space.")
        self.check_first("reset", first)
        self.has_valid = self.mode == "next_step"
        self._plan_actions(leaf)
        # only for ended episodes: reading it waits for a GPU
        self._is_on_host = self.device.type == "cpu"

    def _make_arrays(self):
        zeros = torch.zeros(self.num_agents, dtype=torch.float64, device=self.device)
        self._returns, self._lengths, self._is_inactive = zeros, zeros.clone(), zeros.bool()
        self._sums = {}  # {name: (2, num_agents)}: sums over episodes, and how many of them

    def _plan_actions(self, leaf):
        space, action = self.env_single_action_space, self._action
        self._from_dlpack = (None if isinstance(leaf, torch.Tensor) else
                             leaf.__array_namespace__().from_dlpack)
        self._action_dtype = torch.from_numpy(np.zeros(1, space.dtype)).dtype
        self._starts = self._bounds = None
        if action.heads and action.starts.any():
            self._starts = torch.from_numpy(action.starts.astype(np.int32)).to(self.device)
        if not action.heads and not (np.isinf(action.low).all() and np.isinf(action.high).all()):
            self._bounds = [torch.from_numpy(bound.astype(np.float32)).to(self.device)
                            for bound in (action.low, action.high)]
        self._firsts = [(int(first), int(first) + size)
                        for first, size in zip(action.firsts, action.heads, strict=False)]

    # -- rows of a rollout
    # -----------------------------------------------------------------------------------------

    def view(self, row):
        """Return a view of a row, {name: tensor (num_agents, ...)}, for `step_into`.

        The row has before (the observations that are acted on), actions, rewards, terminals,
        truncations and final_observations, and of the row after it observations, resets, valid and
        action_masks.
        """
        view = SimpleNamespace(**row)
        view.fields, view.final_fields = (self._fields(row[name])
                                          for name in ("observations", "final_observations"))
        return view

    def _fields(self, flat):
        """Return views of the leaves of flat observations, (num_agents, *leaf's shape)."""
        if not self._observation.structured:
            return [flat.view(self.num_agents, *(self.env_single_observation_space.shape or ()))]
        tree = flat_spaces.nativize_tensor(flat, flat_spaces.nativize_dtype(self))
        return [functools.reduce(operator.getitem, names, tree)
                for _, names, _ in self._observation.leaves]

    def _copy(self, observations, fields):
        """Copy an observation into its row, the only copy."""
        for (keys, _, _), field in zip(self._observation.leaves, fields, strict=True):
            field.copy_(as_tensor(functools.reduce(operator.getitem, keys, observations)))

    def _masks(self, observation, info):
        mask = info.get("action_mask")
        return [] if mask is None else [to_numpy(mask)]

    def _write(self, view, observations, info):
        """Write observations and action masks.

        A mask that forbids a whole head allows all of it, as in flat_spaces.FlatAction.write_mask.
        """
        self._copy(observations, view.fields)
        target, mask = view.action_masks, info.get("action_mask")
        if target is None:
            return
        target.copy_(torch.ones_like(target) if mask is None else
                     as_tensor(mask).reshape(target.shape) != 0)
        for first, last in self._firsts:
            part = target[:, first:last]
            part.bitwise_or_((part.amax(1, keepdim=True) == 0).to(part.dtype))

    @torch.no_grad()
    def reset_into(self, view, seed=None):
        """Begin new episodes in all environments."""
        super().reset_into(view, seed)
        for results in (view.rewards, view.terminals, view.truncations):
            results.zero_()
        view.resets[:], view.valid[:] = 1, 1

    @torch.no_grad()
    def step_into(self, view):
        """Step all environments with a row's actions, and write everything else."""
        returned = self.env.step(self._actions(view.actions))
        self.check_first("step", returned)
        observations, rewards, terminated, truncated, info = returned
        terminated, truncated = (as_tensor(flag).bool() for flag in (terminated, truncated))
        ended = self._count_step(view, as_tensor(rewards), terminated, truncated)
        view.resets[:] = ended
        is_counted = not self._is_on_host or bool(ended.any())
        if is_counted:  # under same_step the info itself belongs to the next episodes
            last = (info.get("final_info") or {}) if self.mode == "same_step" else info
            numbers = self._numbers(last)
        if not self._is_on_host or truncated.any():
            self._write_final(view, observations, info)
        if self.mode == "disabled" and ended.any():
            mask = ended if self._from_dlpack is None else self._from_dlpack(ended)
            observations, info = self.env.reset(options={"reset_mask": mask})
        if is_counted:  # Isaac Lab and mjlab write "log" at the reset, of those that have ended
            log = info.get("log")
            self._count(ended, numbers | self._numbers(log if isinstance(log, dict) else {}))
        self._write(view, observations, info)

    def _actions(self, actions):
        """Return the policy's actions (num_agents, columns) as the environment takes them.

        A torch environment gets a copy: if it clamps them in place, the network still learns from
        what the policy chose.
        """
        row, actions = actions, actions.to(self.device)
        if self._starts is not None:
            actions = actions + self._starts
        if self._bounds is not None:
            actions = torch.clamp(actions, *self._bounds)
        shape = self.env_single_action_space.shape
        actions = actions.reshape(self.num_agents, *shape).to(self._action_dtype)
        if self._from_dlpack is not None:
            return self._from_dlpack(actions)
        return actions.clone() if actions.data_ptr() == row.data_ptr() else actions

    def _write_final(self, view, observations, info):
        """Write the last observations of the episodes that ended."""
        final = (info.get("final_obs", info.get("final_observation"))
                 if self.mode == "same_step" else observations)
        if final is None:
            view.final_observations.copy_(view.before)
        else:
            self._copy(final, view.final_fields)

    # -- statistics
    # ----------------------------------------------------------------------------------------------

    def _count(self, ended, numbers):
        """Add the episodes that have ended to the sums, without waiting for the device."""
        count = ended.double()
        numbers = {"episode_return": self._returns, "episode_length": self._lengths} | numbers
        for name, value in numbers.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(count).repeat(2, 1)
            total, episodes = self._sums[name]
            total += torch.where(ended, value, 0.0)  # the numbers of other episodes may be NaN
            episodes += count
        self._returns.masked_fill_(ended, 0)
        self._lengths.masked_fill_(ended, 0)

    def _numbers(self, info):
        """Return {"a/b": number, or tensor (num_agents,)} of an info and its dicts."""
        numbers = {}
        for name, value in flat_spaces.unroll_nested_dict(info):
            if "/_" in f"/{name}" or name.split("/")[0] in ("log", "action_mask", "final_info"):
                continue
            if isinstance(value, bool | int | float):
                numbers[name] = float(value)
            elif hasattr(value, "__dlpack__") and value.shape in ((), (1,), (self.num_agents,)):
                value = as_tensor(value)
                if not value.is_complex():
                    numbers[name] = value.to(self.device, torch.float64)
        return numbers

    def log(self, env=None):
        """Return {name: mean} over the episodes since the last call, and n.

        n: their number, of all environments or of one; {} if none ended. Waits for the device once.
        """
        if not self._sums:
            return {}
        part = slice(None) if env is None else slice(env, env + 1)
        sums = torch.stack(list(self._sums.values()))[:, :, part].sum(-1).tolist()
        for tensor in self._sums.values():
            tensor[:, part] = 0
        return flat_spaces.episode_means(dict(zip(self._sums, sums, strict=True)), sums[0][1])

    # -- the rest
    # ----------------------------------------------------------------------------------------------

    def render(self):
        """Return what the environment draws, on the host; None if it cannot."""
        frames = self.env.render() if hasattr(self.env, "render") else None
        return to_numpy(frames) if isinstance(frames, torch.Tensor) else frames


# --------------------------------------------------------------------------------------------------
# Simulators whose environments need a small adapter


def gymnasium_space(space):
    """Convert a Box or Dict of mjlab to Gymnasium's."""
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "spaces"):
        return spaces.Dict({key: gymnasium_space(part) for key, part in space.spaces.items()})
    return spaces.Box(space.low, space.high, space.shape, np.dtype(space.dtype).type)


class Adapter:
    """An environment with the attributes of another one that it does not have itself."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name == "env":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self.env, name)


class IsaacLab(Adapter):
    """An environment of Isaac Lab or mjlab, with one of its groups of observations.

    env: what gymnasium.make("Isaac-...", cfg=cfg) returns, or mjlab's ManagerBasedRlEnv. group:
    "policy" in Isaac Lab, "actor" in mjlab; None: all groups, as a Dict. It resets ended episodes
    within the step and does not return their last observation, unless it is mjlab's with
    auto_reset=False in its configuration. extras["log"] is logged.
    """

    def __init__(self, env, group="policy"):
        super().__init__(env)
        self.group = group
        env = getattr(env, "unwrapped", env)  # wrappers have `step`, but not this
        resets_itself = getattr(getattr(env, "cfg", None), "auto_reset", True)
        self.metadata = {"autoreset_mode": "same_step" if resets_itself else "disabled"}
        self.num_envs = env.num_envs
        space = gymnasium_space(env.single_observation_space)
        if group is not None and group not in getattr(space, "spaces", {}):
            groups = ", ".join(map(repr, getattr(space, "spaces", {}))) or "none"
            raise EnvError(f"{env} has no group {group!r} of observations; it has {groups}.")
        self.single_observation_space = space if group is None else space[group]
        self.single_action_space = gymnasium_space(env.single_action_space)

    def _select(self, observations):
        return observations if self.group is None else observations[self.group]

    def reset(self, seed=None, options=None):
        which = {"env_ids": options["reset_mask"].nonzero()[:, 0]} if options else {}
        observations, extras = self.env.reset(seed=seed, **which)
        return self._select(observations), extras

    def step(self, actions):
        observations, rewards, terminated, truncated, extras = self.env.step(actions)
        return self._select(observations), rewards, terminated, truncated, extras


class ManiSkill(Adapter):
    """mani_skill's ManiSkillVectorEnv.

    With its record_metrics, episode/success_once and so on are logged.
    """

    metadata = {"autoreset_mode": "same_step"}  # noqa: RUF012
