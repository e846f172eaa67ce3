"""Environments whose arrays are tensors of torch, JAX or others: one object steps many on its
device.

    vecenv = vector.make("examples/torch_cartpole.py:make", env_kwargs={"num_envs": 1024})
    vecenv = vector.make("gymnax/CartPole-v1", num_envs=1024)           # by families/adapters.py
    vecenv = vector.make(tensors.IsaacLab(env))                         # and by those at the end of this file

Such an environment has what Gymnasium's vector environments have:

    num_envs, single_observation_space, single_action_space
    metadata["autoreset_mode"]: "next_step", "same_step" or "disabled", or Gymnasium's AutoresetMode
    reset(seed=None) -> (observations, info)
    step(actions) -> (observations, rewards, terminated, truncated, info)
    close() and render(), if it has something to close or to draw

Each array is a torch tensor, or has `__dlpack__` and `__array_namespace__` as JAX's arrays do.
Observations are (num_envs, *shape), or Dicts and Tuples of such arrays as their space is; rewards
(num_envs,) numbers; terminated and truncated (num_envs,) bools. Actions arrive as the kind of array
that the observations are, on their device, in the dtype and the shape of single_action_space:
(num_envs,) for a Discrete. An info may hold "action_mask" (num_envs, options).

The modes of autoreset, for episodes that end:
    same_step: the observation that is returned is the next episode's first. info["final_obs"] has the last one of those
        that ended, (num_envs, ...), and info["final_info"] their numbers. Without "final_obs" the observation before
        stands for it, so that a truncated episode is valued by the state from which its last action was taken.
    next_step: it is the last one; the step after that ignores the action and returns the next episode's first.
    disabled: it is the last one, and reset(options={"reset_mask": ended}) is called for those that ended.

What is copied: each observation, reward and flag once, into its row of the rollout, which is kept
to learn from. An array of JAX is seen as a tensor where it lies (dlpack). Actions are copied too,
so that an environment may write into them: the rollout keeps those that the policy chose. Only JAX,
whose arrays cannot be written to, is given the row itself, if their dtype is int32 or float32,
nothing is added (Discrete's start) and nothing is clipped to bounds.
"""

from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import emulation
import flat_spaces
from errors import EnvError


def as_tensor(array):
    """The array as a torch tensor, not copied if it has `__dlpack__`. Raises a EnvError if it is no
    array."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return torch.as_tensor(array)
    if not hasattr(array, "__dlpack__"):
        raise EnvError(
            "expected a torch tensor or an array with __dlpack__, got "
            f"{type(array).__name__}.")
    return torch.from_dlpack(array)


def _first_leaf(tree):
    while isinstance(tree, dict | tuple):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree), None)
    return tree


def look(env, seed):
    """The TensorEnv of an environment, if its `reset` returns tensors, else None. It is reset to
    find out, but only if it has num_envs and single_observation_space."""
    if isinstance(env, TensorEnv):
        return env
    if hasattr(env, "step_into") or not all(hasattr(env, name)
                                            for name in ("num_envs", "single_observation_space")):
        return None
    result = env.reset(seed=seed)
    leaf = _first_leaf(result[0] if isinstance(result, tuple) else result)
    if isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "__dlpack__"):
        return None
    return TensorEnv(env, result)


class TensorEnv(emulation.Checked):
    """Such an environment, as flat tensors; vector.Tensors steps it.

    env: the environment. begun: what its reset returned; it shows the kind of array and the device.
    Attributes: num_agents, one an environment; device; mode, of autoreset; single_observation_space
    and single_action_space, flat; env_single_observation_space, env_single_action_space and
    obs_dtype as those of emulation.GymnasiumPufferEnv;
    has_action_masks; has_valid, whether agents may be dead. Raises TypeError for spaces that cannot
    be made flat, a EnvError for an unknown mode of autoreset and for what breaks its space or shape at
    the first reset or the first step.
    """

    gives_tensors = True

    def __init__(self, env, begun):
        self.env, self.num_agents, self.mode = env, int(env.num_envs), emulation.autoreset_mode(env)
        self.env_single_observation_space = env.single_observation_space
        self.env_single_action_space = env.single_action_space
        self._observation = flat_spaces.FlatObservation(env.single_observation_space)
        self._action = flat_spaces.FlatAction(env.single_action_space)
        if isinstance(env.single_action_space, spaces.Dict | spaces.Tuple):
            raise EnvError(
                f"{env}: its actions are {env.single_action_space}; an environment of "
                "tensors acts in a Discrete, MultiDiscrete, MultiBinary or Box. "
                "Take its parts from one of these.")
        if any(isinstance(leaf, spaces.Text) for _, _, leaf in self._observation.leaves):
            raise EnvError(f"{env}: its observations hold Text, which no tensor has.")
        self.obs_dtype = self._observation.dtype
        self.single_observation_space, self.single_action_space = self._observation.flat_space, self._action.flat_space
        self.returned_space = gymnasium.vector.utils.batch_space(env.single_observation_space, self.num_agents)
        self.returned_shape = (self.num_agents,)
        self.check_first("reset", begun)
        leaf, info = _first_leaf(begun[0]), begun[1]
        self.device, self.has_action_masks = as_tensor(leaf).device, "action_mask" in info
        self.has_valid = self.mode == "next_step"
        self._plan_actions(leaf)
        # only for ended episodes: reading it waits for a GPU
        self._quick_to_ask = self.device.type == "cpu"
        zeros = torch.zeros(self.num_agents, dtype=torch.float64, device=self.device)
        self._returns, self._lengths, self._ending = zeros, zeros.clone(), zeros.bool()
        self._sums = {}  # {name: (2, num_agents)}: sums over episodes, and how many of them

    def _plan_actions(self, leaf):
        space, action = self.env_single_action_space, self._action
        self._from_dlpack = None
        if not isinstance(leaf, torch.Tensor):
            self._from_dlpack = leaf.__array_namespace__().from_dlpack
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
        """What `reset_into` and `step_into` want of a row, {name: tensor (num_agents, ...)}:
        before (the observations that are acted on), actions, rewards, terminals,
        truncations, final_observations; and, of the row after it, observations, resets,
        valid and action_masks."""
        view = SimpleNamespace(**row)
        view.fields, view.final_fields = (self._fields(row[name])
                                          for name in ("observations", "final_observations"))
        return view

    def _fields(self, flat):
        """Views of the leaves of flat observations, (num_agents, *shape of the leaf)."""
        if not self._observation.structured:
            return [flat.view(self.num_agents, *(self.env_single_observation_space.shape or ()))]
        tree, views = flat_spaces.nativize_tensor(flat, flat_spaces.nativize_dtype(self)), []
        for _, names, _ in self._observation.leaves:
            part = tree
            for name in names:
                part = part[name]
            views.append(part)
        return views

    def _write(self, observations, fields):
        """Copy an observation into its row, the only copy."""
        for (keys, _, _), field in zip(self._observation.leaves, fields, strict=True):
            part = observations
            for key in keys:
                part = part[key]
            field.copy_(as_tensor(part))

    def _write_masks(self, target, info):
        """Write action masks. One that forbids a whole head allows all of it, as in
        flat_spaces.FlatAction.write_mask."""
        if target is None:
            return
        mask = info.get("action_mask")
        if mask is None:
            target.fill_(1)
            return
        target.copy_(as_tensor(mask).reshape(target.shape) != 0)
        for first, last in self._firsts:
            part = target[:, first:last]
            part.bitwise_or_((part.amax(1, keepdim=True) == 0).to(part.dtype))

    @torch.no_grad()
    def reset_into(self, view, seed=None):
        """Begin new episodes in all environments."""
        observations, info = self.env.reset(seed=seed)
        self._write(observations, view.fields)
        self._write_masks(view.action_masks, info)
        view.resets.fill_(1)
        view.valid.fill_(1)
        for tensor in (self._returns, self._lengths, self._ending):
            tensor.zero_()

    @torch.no_grad()
    def step_into(self, view):
        """Step all environments with the actions there, and write everything else."""
        returned = self.env.step(self._actions(view.actions))
        self.check_first("step", returned)
        observations, rewards, terminated, truncated, info = returned
        terminated, truncated = (as_tensor(flag).bool() for flag in (terminated, truncated))
        rewards, ended = as_tensor(rewards), terminated | truncated
        view.terminals.copy_(terminated)
        view.truncations.copy_(truncated)
        view.resets.copy_(ended)
        # those that had ended before do not act now and see a first observation
        if self.mode == "next_step":
            rewards = rewards.masked_fill(self._ending, 0)
            view.resets.bitwise_or_(self._ending.to(view.resets.dtype))
            view.valid.copy_(~ended)
        view.rewards.copy_(rewards)
        self._returns += rewards
        self._lengths += ~self._ending
        if self.mode == "next_step":
            self._ending = ended
        counts = not self._quick_to_ask or bool(ended.any())
        # under same_step the info itself belongs to the next episodes
        numbers = self._numbers((info.get("final_info") or {}) if self.mode == "same_step" else info) if counts else {}
        if not self._quick_to_ask or truncated.any():
            self._write_final(view, observations, info)
        if self.mode == "disabled" and ended.any():
            mask = ended if self._from_dlpack is None else self._from_dlpack(ended)
            observations, info = self.env.reset(options={"reset_mask": mask})
        if counts:  # "log" is of those that ended at this step, in Isaac Lab and mjlab, which write it at the reset
            log = info.get("log")
            self._count(ended, numbers | self._numbers(log if isinstance(log, dict) else {}))
        self._write(observations, view.fields)
        self._write_masks(view.action_masks, info)

    def _actions(self, actions):
        """Actions (num_agents, columns) of the policy as the environment takes them. A torch
        environment gets its own copy: if it clamps them in place, the network still learns from
        what the policy chose."""
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
        """The last observations of the episodes that ended."""
        final = observations
        if self.mode == "same_step":
            final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            view.final_observations.copy_(view.before)
        else:
            self._write(final, view.final_fields)

    # -- statistics
    # ----------------------------------------------------------------------------------------------

    def _count(self, ended, numbers):
        """Add the episodes that have ended to the sums, without waiting for the device."""
        count = ended.double()
        numbers = {"episode_return": self._returns, "episode_length": self._lengths} | numbers
        for name, value in numbers.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros(2, self.num_agents, dtype=torch.float64,
                                               device=self.device)
            total, episodes = self._sums[name]
            total += torch.where(ended, value, 0.0)  # the numbers of episodes that go on may be NaN
            episodes += count
        self._returns.masked_fill_(ended, 0)
        self._lengths.masked_fill_(ended, 0)

    def _numbers(self, info, prefix=""):
        """{"a/b": number, or tensor (num_agents,)} of those in an info and
        in the dicts within it."""
        numbers = {}
        for key, value in info.items():
            if key.startswith("_") or (key in ("log", "action_mask", "final_info") and not prefix):
                continue
            if isinstance(value, dict):
                numbers |= self._numbers(value, f"{prefix}{key}/")
            elif isinstance(value, bool | int | float):
                numbers[prefix + key] = float(value)
            elif (hasattr(value, "__dlpack__")
                  and tuple(value.shape) in ((), (1,), (self.num_agents,))):
                value = as_tensor(value)
                if not value.is_complex():
                    numbers[prefix + key] = value.to(self.device, torch.float64)
        return numbers

    def log(self, env=None):
        """Means of the numbers of the episodes that ended since the last call, and "n" of them, of
        all environments or of one; {} if none ended. It waits for the device, once."""
        if not self._sums:
            return {}
        part = slice(None) if env is None else slice(env, env + 1)
        sums = torch.stack(list(self._sums.values()))[:, :, part].sum(-1).tolist()
        for tensor in self._sums.values():
            tensor[:, part] = 0
        return flat_spaces.episode_means(dict(zip(self._sums, sums, strict=True)), sums[0][1])

    def check_returned(self, call, returned):
        """As Checked's, of the arrays on the host."""
        def on_host(tree):
            if isinstance(tree, dict):
                return {key: on_host(part) for key, part in tree.items()}
            return tuple(map(on_host, tree)) if isinstance(tree, tuple) else as_tensor(tree).detach().cpu().numpy()

        if isinstance(returned, tuple):
            returned = *map(on_host, returned[:-1]), returned[-1]
        super().check_returned(call, returned)

    # -- the rest
    # ----------------------------------------------------------------------------------------------

    def render(self):
        """What the environment draws, on the host; None if it cannot."""
        frames = self.env.render() if hasattr(self.env, "render") else None
        return frames.detach().cpu().numpy() if isinstance(frames, torch.Tensor) else frames

    def close(self):
        if hasattr(self.env, "close"):
            self.env.close()


# --------------------------------------------------------------------------------------------------
# Simulators whose environments need a small adapter


def gymnasium_space(space):
    """A Box or Dict of mjlab as Gymnasium's."""
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "spaces"):
        return spaces.Dict({key: gymnasium_space(part) for key, part in space.spaces.items()})
    return spaces.Box(space.low, space.high, space.shape, np.dtype(space.dtype).type)


class IsaacLab:
    """An environment of Isaac Lab or mjlab: a dict of groups of observations, of
    which the policy sees one.

    env: as gymnasium.make("Isaac-...", cfg=cfg) gives it, or mjlab's ManagerBasedRlEnv. group:
    "policy" in Isaac Lab, "actor" in mjlab; None: all groups, as a Dict. It begins ended episodes
    anew within the step and does not give their last observation, unless it is mjlab's with
    auto_reset=False in its configuration. What extras["log"] holds is logged.
    """

    def __init__(self, env, group="policy"):
        self.env, self.group = env, group
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

    def _seen(self, observations):
        return observations if self.group is None else observations[self.group]

    def reset(self, seed=None, options=None):
        some = {"env_ids": options["reset_mask"].nonzero()[:, 0]} if options else {}
        observations, extras = self.env.reset(seed=seed, **some)
        return self._seen(observations), extras

    def step(self, actions):
        observations, rewards, terminated, truncated, extras = self.env.step(actions)
        return self._seen(observations), rewards, terminated, truncated, extras

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()


class ManiSkill:
    """mani_skill's ManiSkillVectorEnv. With its record_metrics,
    episode/success_once and so on are logged."""

    metadata = {"autoreset_mode": "same_step"}  # noqa: RUF012

    def __init__(self, env):
        self.env, self.num_envs = env, env.num_envs
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.reset, self.step, self.render, self.close = env.reset, env.step, env.render, env.close
