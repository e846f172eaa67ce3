"""The environments in C for other libraries, as Gymnasium's and PettingZoo's.

    import gymnasium
    import ocean.gymnasium                                          # registers their ids

    env = gymnasium.make("puffer/Breakout-v0", frameskip=2)         # settings are keywords
    envs = gymnasium.make_vec("puffer/Breakout-v0", num_envs=1024)  # one call in C steps all
    world = ocean.gymnasium.parallel_env("target")                  # PettingZoo's ParallelEnv

The id of `double_pendulum` is puffer/DoublePendulum-v0. If a library takes only an id, give it
"ocean.gymnasium:puffer/Breakout-v0": Gymnasium then imports this file.

Environments in C begin the next episode within the step that ends one, and write the old episode's
last observation beside the new one's first (env.h). An Env's last step returns the old one, and its
reset() the new one. A VectorEnv (SAME_STEP) returns the new one at once and has the old one in
infos["final_obs"]. Pictures show the state in C: after an episode's last step, the next episode's
beginning.

The info of an episode's last step has the environment's log: perf, score, episode_return,
episode_length and its other fields. info["action_mask"] has the legal actions (1), one head after
another, in environments that have a mask.
"""

import copy

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

import ocean

try:
    from pettingzoo import ParallelEnv
except ImportError:
    ParallelEnv = object

UNWRITTEN = 0xA5  # each byte of a final observation before C writes it


class Envs:
    """Environments of one kind and the arrays of one step, for the classes below.

    is_single: whether an environment has one agent, as Gymnasium's have.
    Attributes: library; envs; num_agents, of all environments; metadata, Gymnasium's; spaces, the
    observation space and the action space of an agent; heads (1, action dims), the choices of each
    action, None if actions are continuous; state: "new", "running" or "over" (the next episodes
    wait for reset). Of the last step: observations and action_masks (or None), new arrays each
    time; rewards (num_agents,) float32, terminals and truncations (num_agents,) bool, which the
    next step overwrites.
    """

    def __init__(self, name, num_envs, render_mode, settings, is_single=True):
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode = {render_mode!r}: must be None or "rgb_array".')
        self.library, self.num_envs, self.settings = ocean.load(name), num_envs, settings
        if self.library.has_valid:
            raise NotImplementedError(f"{name} has inactive agents (HAS_VALID), which neither "
                                      "Gymnasium nor PettingZoo has.")
        self.envs = envs = self.library.create(num_envs, 0, settings)
        self.num_agents = agents = envs.num_agents
        if is_single and agents != num_envs:
            raise ValueError(f"{name} has {agents // num_envs} agents, a Gymnasium environment "
                             f"one. ocean.gymnasium.parallel_env({str(name)!r}) is for PettingZoo.")
        self.render_mode, self.state = render_mode, "new"
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": self.library.fps}
        self.spaces = envs.single_observation_space, envs.single_action_space
        self.heads = np.array([envs.action_heads]) if envs.action_heads else None
        self.actions = np.zeros((agents, envs.action_dims), envs.action_dtype)
        self.rewards = np.zeros(agents, np.float32)
        self.terminals, self.truncations = np.zeros(agents, bool), np.zeros(agents, bool)
        self._finals = np.zeros((agents, *envs.observation_shape), envs.observation_dtype)
        self._final_bytes = self._finals.reshape(agents, -1).view(np.uint8)
        self._final_bytes[:] = UNWRITTEN
        self.observations, self.action_masks = self._finals, None
        self._rows = ocean.rows(self.observations, self.actions, self.rewards,
                                self.terminals.view(np.uint8),
                                self.truncations.view(np.uint8), self._finals)

    def _new_arrays(self):
        envs, rows = self.envs, self._rows
        self.observations = np.empty(self._finals.shape, self._finals.dtype)
        rows[0] = self.observations.__array_interface__["data"][0]
        if envs.has_action_masks:
            self.action_masks = np.empty((self.num_agents, self.heads.sum()), np.uint8)
            rows[7] = self.action_masks.__array_interface__["data"][0]

    def reset(self, seed=None, options=None):
        """Begin an episode everywhere, unless one has just begun ("over").

        A seed restarts the random numbers. Raises ValueError for options.
        """
        if options:
            raise ValueError(f"reset(options={options}): there are none. Settings are keywords of "
                             "make.")
        if seed is not None or self.state == "new":
            seed = np.random.SeedSequence().entropy if seed is None else seed
            self.envs.close()
            self.envs = self.library.create(self.num_envs, seed, self.settings)
            self.envs.every_final()
            self.state = "new"
        if self.state != "over":
            self._new_arrays()
            self.envs.reset(self._rows)
            self.envs.logs[:] = 0
        self.state = "running"

    def step(self, actions, shape):
        """Step with actions of this shape; return (num_agents,) bool: ended, or None.

        None if no episode ended. Raises ValueError for another shape, for a choice that does not
        exist and for NaN, TypeError for floats instead of integers, gymnasium.error.ResetNeeded if
        no episode is running. The environment clips floats to their bounds.
        """
        if self.state != "running":
            raise gymnasium.error.ResetNeeded("reset() comes first: no episode is running.")
        rows = np.reshape(actions, (self.num_agents, -1))
        wrong = rows != rows if self.heads is None else (rows < 0) | (rows >= self.heads)
        if np.shape(actions) != shape or wrong.any():
            raise ValueError(
                f"{self.library.name}: actions must have the shape {shape} and be in "
                f"{self.spaces[1]}, got {np.shape(actions)}, {rows.min()} to {rows.max()}.")
        np.copyto(self.actions, rows, "same_kind")
        self._new_arrays()
        self.envs.step(self._rows)
        done = self.terminals | self.truncations
        return done if done.any() else None

    def final_observations(self, agents):
        """Return and clear the last observations (len(agents), ...) of ended episodes.

        Raises RuntimeError if the header writes none.
        """
        if (self._final_bytes[agents] == UNWRITTEN).all(axis=1).any():
            raise RuntimeError(f"{self.library.header.name} writes no final observation when an "
                               "episode ends. Write it `if (WANTS_FINAL(env, truncated))` (env.h).")
        last = self._finals[agents]
        self._final_bytes[agents] = UNWRITTEN
        return last

    def statistics(self, envs):
        """Return ({field: means (len(envs),)} of ended episodes, whether there are any).

        Of the episodes since the last call; (len(envs),) bool.
        """
        fields = self.library.log_fields
        sums = self.envs.logs[envs]
        self.envs.logs[envs] = 0
        n = sums[:, fields.index("n")]
        means = sums / np.maximum(n, 1)[:, None]
        return {field: means[:, i] for i, field in enumerate(fields) if field != "n"}, n > 0

    def means(self):
        """Return the first environment's statistics; {} if no episode ended."""
        means, has_ended = self.statistics([0])
        return {field: float(values[0]) for field, values in means.items() if has_ended[0]}

    def render(self):
        """Draw all environments, (height, width, 3) uint8; None without a render mode."""
        if self.render_mode is not None:
            return tuple(self.envs.render(i) for i in range(self.num_envs))
        gymnasium.logger.warn('render() draws nothing unless the environment is made with '
                              'render_mode="rgb_array"')
        return None


class OneEnv:
    """What Gymnasium's Env and PettingZoo's ParallelEnv have in common."""

    def render(self):
        pictures = self._envs.render()
        return pictures and pictures[0]

    def close(self):
        self._envs.envs.close()


class OceanEnv(OneEnv, gymnasium.Env):
    """One environment in C with one agent, as gymnasium.make returns it.

    `name` is one of ocean.names(), or the path of a header. Raises ValueError if it has several
    agents, and for a wrong setting.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, name, render_mode=None, **settings):
        self._envs = Envs(name, 1, render_mode, settings)
        self.metadata, self.render_mode = self._envs.metadata, render_mode
        self.observation_space, self.action_space = self._envs.spaces

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._envs.reset(seed, options)
        return self._envs.observations[0], self._info()

    def _info(self):
        masks = self._envs.action_masks
        return {} if masks is None else {"action_mask": masks[0]}

    def step(self, action):
        """Step; raises as Envs.step."""
        envs = self._envs
        done = envs.step(action, self.action_space.shape)
        reward = float(envs.rewards[0])
        if done is None:
            return envs.observations[0], reward, False, False, self._info()
        envs.state = "over"
        ends = bool(envs.terminals[0]), bool(envs.truncations[0])
        return envs.final_observations([0])[0], reward, *ends, envs.means()


class OceanVectorEnv(gymnasium.vector.VectorEnv):
    """Many environments, stepped by one call, as gymnasium.make_vec returns them.

    The first has the random numbers of an OceanEnv with the same seed, each other one different
    ones. Arguments and errors are OceanEnv's.
    """

    metadata = {**OceanEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, name, num_envs=1, render_mode=None, **settings):
        self._envs = Envs(name, num_envs, render_mode, settings)
        self.metadata = {**self.metadata, **self._envs.metadata}
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space, self.single_action_space = self._envs.spaces
        batch_space = gymnasium.vector.utils.batch_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._envs.reset(seed, options)
        return self._envs.observations, self._info()

    def _info(self):
        masks = self._envs.action_masks
        return {} if masks is None else {"action_mask": masks,
                                         "_action_mask": np.ones(self.num_envs, bool)}

    def step(self, actions):
        """Step all; raises as Envs.step."""
        envs = self._envs
        done, infos = envs.step(actions, self.action_space.shape), self._info()
        if done is not None:
            infos |= self._last_infos(done)
        flags = envs.terminals.copy(), envs.truncations.copy()
        return envs.observations, envs.rewards.copy(), *flags, infos

    def _last_infos(self, done):
        indices = np.flatnonzero(done)
        last = np.full(self.num_envs, None, object)
        for i, observation in zip(indices, self._envs.final_observations(indices), strict=True):
            last[i] = observation
        means, has_ended = self._envs.statistics(indices)
        final_info = {}
        for field, values in means.items():
            final_info[field] = np.zeros(self.num_envs)
            final_info[f"_{field}"] = np.zeros(self.num_envs, bool)
            final_info[field][indices], final_info[f"_{field}"][indices] = values, has_ended
        return {"final_obs": last, "_final_obs": done, "final_info": final_info,
                "_final_info": done.copy()}

    def render(self):
        return self._envs.render()

    def close_extras(self, **_):
        self._envs.envs.close()


class OceanParallelEnv(OneEnv, ParallelEnv):
    """An environment in C as PettingZoo's ParallelEnv of agent_0, agent_1, ...

    An agent whose episode ends leaves `agents` until reset(), as PettingZoo demands. In C its next
    episode begins at once; while the others continue, its action is 0 (0.0). When all have left,
    reset() continues these next episodes if all agents ended in the same step; if not, it begins
    new ones. reset() has no options.
    """

    def __init__(self, name, render_mode=None, **settings):
        self._envs = Envs(name, 1, render_mode, settings, is_single=False)
        self.render_mode = render_mode
        self.metadata = {**self._envs.metadata, "name": self.__class__.__name__,
                         "is_parallelizable": True}
        self.possible_agents = [f"agent_{i}" for i in range(self._envs.num_agents)]
        self.agents, self._numbers = [], {agent: i for i, agent in enumerate(self.possible_agents)}
        self.observation_spaces, self.action_spaces = (
            {agent: copy.deepcopy(space) for agent in self.possible_agents}
            for space in self._envs.spaces)

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def _each(self, values):
        """Return {agent: value} of the agents that have not left."""
        return {agent: values[self._numbers[agent]] for agent in self.agents}

    def _infos(self):
        masks = self._envs.action_masks
        return {agent: {} if masks is None else {"action_mask": masks[self._numbers[agent]]}
                for agent in self.agents}

    def reset(self, seed=None, options=None):
        self._envs.reset(seed)
        self.agents = list(self.possible_agents)
        return self._each(self._envs.observations), self._infos()

    def step(self, actions):
        """Step with {agent: action} of all `agents`.

        Agents whose episodes end in the same step get the means over these episodes in their last
        infos. Raises as Envs.step, and KeyError for an agent without an action.
        """
        envs = self._envs
        if not self.agents:
            raise gymnasium.error.ResetNeeded("reset() comes first: all agents have left.")
        rows = np.zeros(envs.actions.shape, np.float32 if envs.heads is None else np.int64)
        for agent in self.agents:
            rows[self._numbers[agent]] = actions[agent]
        done = envs.step(rows, rows.shape)
        observations, infos = self._each(envs.observations), self._infos()
        rewards, terminations, truncations = (
            self._each(array.tolist()) for array in (envs.rewards, envs.terminals, envs.truncations)
        )
        if done is not None:
            indices, info = np.flatnonzero(done), envs.means()
            for i, observation in zip(indices, envs.final_observations(indices), strict=True):
                agent = self.possible_agents[i]
                if agent in observations:
                    observations[agent], infos[agent] = observation, dict(info)
            self.agents = [agent for agent in self.agents if not done[self._numbers[agent]]]
            if not self.agents and done.all():
                envs.state = "over"
        return observations, rewards, terminations, truncations, infos


parallel_env = OceanParallelEnv  # as PettingZoo's packages name it


def environment_id(name):
    """Return a Gymnasium id: puffer/DoublePendulum-v0 for double_pendulum."""
    return f"puffer/{''.join(word.capitalize() for word in name.split('_'))}-v0"


for _name in ocean.names():
    gymnasium.register(environment_id(_name), f"{__name__}:OceanEnv", kwargs={"name": _name},
                       vector_entry_point=f"{__name__}:OceanVectorEnv")
