"""Make environments of third-party families: `crafter/NAME`, `gymnax/NAME`, ...

    python pufferl.py train crafter/reward
    vecenv = vector.make("gymnax/CartPole-v1", num_envs=1024)

A package is imported when one of its environments is made. To change an adapter, copy it to a file
and train that: `python pufferl.py train my_file.py:Crafter`. docs/environments.md lists what each
one needs.
"""

import importlib
import io
import os
from typing import ClassVar

import gymnasium
import numpy as np

import ocean
from emulation import gymnasium_form
from errors import ConfigError


class Crafter(gymnasium.Env):
    """crafter/reward, crafter/noreward: open-world survival from pixels (Hafner 2021).

    Its logs have the success rate of each achievement; the paper's score is their geometric mean.
    """

    def __init__(self, name, size=64, length=10_000):
        import crafter

        if name not in ("reward", "noreward"):
            raise ConfigError(f"crafter/{name}: there are crafter/reward and crafter/noreward.")
        self.env = crafter.Env(size=(size, size), length=length, reward=name == "reward", seed=0)
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self.env.action_names))

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # the game draws its worlds from these two
            self.env._seed, self.env._episode = seed, 0
        return self.env.reset(), {}

    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        is_dead = info["discount"] == 0
        achievements = {name: count > 0 for name, count in info["achievements"].items()}
        return observation, reward, is_dead, done and not is_dead, {"achievements": achievements}

    def render(self):
        return self.env.render((512, 512))


class Procgen(gymnasium.vector.VectorEnv):
    """procgen/coinrun and the other fifteen games (Cobbe et al. 2020).

    num_levels 0 draws a new level each episode. A time limit counts as an end, because the package
    reports them alike.
    """

    metadata: ClassVar = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}

    def __init__(self, name, num_envs=1, num_levels=0, start_level=0, distribution_mode="hard",
                 seed=0):
        from procgen import ProcgenGym3Env

        self._make = lambda seed: ProcgenGym3Env(
            num=num_envs, env_name=name, num_levels=num_levels, start_level=start_level,
            rand_seed=seed,
            distribution_mode=distribution_mode, num_threads=0 if num_envs < 8 else 4)
        self.env = self._make(seed)
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(15)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.env.close()
            self.env = self._make(seed % 2**31)
        return self.env.observe()[1]["rgb"], {}

    def step(self, actions):
        self.env.act(actions.astype(np.int32))
        rewards, observations, first = self.env.observe()
        return observations["rgb"], rewards, first, np.zeros_like(first), {}

    def close(self):
        self.env.close()


class Craftax(gymnasium.vector.VectorEnv):
    """craftax/Craftax-Symbolic-v1, Craftax-Classic-Symbolic-v1 (Matthews et al. 2024).

    num_envs at once in JAX, which compiles for minutes first. Only ended episodes get a new world.
    """

    metadata: ClassVar = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}

    def __init__(self, name, num_envs=64, seed=0):
        import jax
        from craftax.craftax_env import make_craftax_env_from_name

        env = make_craftax_env_from_name(name, auto_reset=False)
        params, self._jax = env.default_params, jax
        space = env.observation_space(params)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, space.shape,
                                                             np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(int(env.action_space(params).n))
        self.num_envs = num_envs

        def fix_dtypes(tree):  # else the step is compiled twice, for the states of reset and step
            return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)

        def reset(key):
            return fix_dtypes(env.reset(key, params))

        def step(key, state, action):
            return fix_dtypes(env.step(key, state, action, params))

        def put(states, state, i):
            return jax.tree.map(lambda a, b: a.at[i].set(b), states, state)

        self._reset_one, self._reset_all = jax.jit(reset), jax.jit(jax.vmap(reset))
        self._step_all, self._put = jax.jit(jax.vmap(step)), jax.jit(put)
        self._key = jax.random.PRNGKey(seed)

    def _keys(self, count):
        self._key, *keys = self._jax.random.split(self._key, count + 1)
        return self._jax.numpy.stack(keys)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._key = self._jax.random.PRNGKey(seed)
        observations, self._state = self._reset_all(self._keys(self.num_envs))
        return np.array(observations), {}

    def step(self, actions):
        keys = self._keys(self.num_envs)
        observations, self._state, *results = self._step_all(keys, self._state, actions)
        observations, rewards, done, info = self._jax.tree.map(np.array, [observations, *results])
        for i in np.flatnonzero(done):
            observation, state = self._reset_one(self._keys(1)[0])
            observations[i], self._state = observation, self._put(self._state, state, i)
        return observations, rewards, done, np.zeros_like(done), {"final_info": info}


class JaxEnvs:
    """Environments of a functional JAX package, compiled together for tensors.py.

    reset(key) -> (observation, state) and step(key, state, action) -> (observation, state, reward,
    terminated, truncated) are of one environment; step returns the last observation of an episode
    that ends. New episodes begin here. If one episode has ended, a reset is computed for all.
    """

    metadata: ClassVar = {"autoreset_mode": "same_step"}

    def __init__(self, name, reset, step, observation_space, action_space, num_envs):
        import jax

        self.name, self.num_envs, self._key_of, self._key = name, num_envs, jax.random.PRNGKey, None
        self.single_observation_space, self.single_action_space = observation_space, action_space
        jnp = jax.numpy

        def begin(key):
            keys = jax.random.split(key, num_envs + 1)
            return keys[0], *jax.vmap(reset)(keys[1:])

        def advance(key, states, actions):
            keys = jax.random.split(key, num_envs + 1)
            last, states, rewards, terminated, truncated = jax.vmap(step)(keys[1:], states, actions)
            ended = terminated | truncated

            def choose(fresh, old):
                return jnp.where(ended.reshape(num_envs, *[1] * (old.ndim - 1)),
                                 fresh.astype(old.dtype), old)

            def renew(key):
                key, *fresh = begin(key)
                return key, *jax.tree.map(choose, tuple(fresh), (last, states))

            key, observations, states = jax.lax.cond(ended.any(), renew,
                                                     lambda key: (key, last, states), keys[0])
            return key, states, observations, rewards, terminated, truncated, last

        self._begin, self._advance = jax.jit(begin), jax.jit(advance)

    def __str__(self):
        return self.name

    def reset(self, seed=None):
        if seed is not None or self._key is None:
            self._key = self._key_of(0 if seed is None else seed)
        self._key, observations, self._states = self._begin(self._key)
        return observations, {}

    def step(self, actions):
        result = self._advance(self._key, self._states, actions)
        self._key, self._states, observations, rewards, terminated, truncated, last = result
        return observations, rewards, terminated, truncated, {"final_obs": last}


def gymnax(name, num_envs=1024, max_steps_in_episode=0):
    """Make gymnax/CartPole-v1, gymnax/Breakout-MinAtar, ... (Lange 2022) in JAX.

    The package has classic control, MinAtar and bsuite. max_steps_in_episode: 0 keeps its limit.
    """
    import jax
    from gymnax import make
    from gymnax.environments.spaces import gymnax_space_to_gym_space

    env, params = make(name)
    if max_steps_in_episode:
        params = params.replace(max_steps_in_episode=max_steps_in_episode)
    observation_space, action_space = (gymnax_space_to_gym_space(space(params))
                                       for space in (env.observation_space, env.action_space))
    if isinstance(action_space, gymnasium.spaces.Discrete):
        action_space = gymnasium.spaces.Discrete(int(action_space.n), dtype=np.int32)

    def cast(observation):  # MinAtar's are flags, though its space has floats
        is_box = isinstance(observation_space, gymnasium.spaces.Box)
        return observation.astype(observation_space.dtype) if is_box else observation

    def reset(key):
        observation, state = env.reset(key, params)
        return cast(observation), state

    def step(key, state, action):
        # env.step would also reset
        observation, state, reward, terminated, _ = env.step_env(key, state, action, params)
        reward = jax.numpy.asarray(reward, np.float32).reshape(())
        ends = [jax.numpy.asarray(flag, bool)
                for flag in (terminated, env.is_truncated(state, params))]
        return cast(observation), state, reward, *ends

    return JaxEnvs(f"gymnax/{name}", reset, step, observation_space, action_space, num_envs)


def brax(name, num_envs=1024, episode_length=1000, backend=""):
    """Make brax/ant, brax/halfcheetah, ... (Freeman et al. 2021): robots in JAX.

    episode_length: the time limit. backend: of its physics, generalized, positional, spring or
    mjx; "" is the environment's default.
    """
    import jax
    from brax import envs

    env = envs.create(name, episode_length, auto_reset=False,
                      **({"backend": backend} if backend else {}))
    sample = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, sample.shape, sample.dtype)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)

    def reset(key):
        state = env.reset(key)
        return state.obs, state

    def step(key, state, action):
        state = env.step(state, action)
        ended, truncated = state.done > 0, state.info["truncation"] > 0
        return state.obs, state, state.reward, ended & ~truncated, truncated

    return JaxEnvs(f"brax/{name}", reset, step, observation_space, action_space, num_envs)


class MicroRTS(gymnasium.Env):
    """microrts/16x16/basesWorkers16x16: real-time strategy (Huang et al. 2021).

    The opponent is a script. Each cell of the map has an action. ai: a name in
    gym_microrts.microrts_ai. It needs Java; a process has one Java machine until it ends.
    """

    # kind of action, four directions, what to produce, where to attack
    CELL = (6, 4, 4, 4, 4, 7, 49)

    def __init__(self, name, ai="coacAI", max_steps=2000):
        from types import SimpleNamespace

        from gym_microrts import microrts_ai
        from gym_microrts.envs import vec_env

        # numpy 1.24 removed np.int, which the package uses
        vec_env.np = SimpleNamespace(**vars(np), int=int)
        self.env = vec_env.MicroRTSGridModeVecEnv(
            num_selfplay_envs=0, num_bot_envs=1, max_steps=max_steps,
            ai2s=[getattr(microrts_ai, ai)],
            map_path=f"maps/{name}.xml", reward_weight=np.array([10.0, 1.0, 1.0, 0.2, 1.0, 4.0]))
        self.cells = self.env.height * self.env.width
        self.observation_space = gymnasium.spaces.Box(0, 1, self.env.observation_space.shape,
                                                      np.uint8)
        self.action_space = gymnasium.spaces.MultiDiscrete(self.CELL * self.cells)
        self._firsts = np.cumsum((0, *self.CELL[:-1]))

    def _info(self):
        masks = np.array(self.env.vec_client.getMasks(0)).reshape(self.cells, 1 + sum(self.CELL))
        self._movable, masks = masks[:, 0] != 0, masks[:, 1:].astype(bool)
        masks[~self._movable] = False
        # A head without options gets the first: a forced choice changes neither probability nor
        # entropy.
        for first, size in zip(self._firsts, self.CELL, strict=True):
            masks[~masks[:, first : first + size].any(1), first] = True
        return {"action_mask": masks.ravel()}

    def reset(self, *, seed=None, options=None):
        observation = self.env.reset()[0]
        return observation.astype(np.uint8), self._info()

    def step(self, action):
        from jpype.types import JArray, JInt

        cells = np.flatnonzero(self._movable)
        rows = np.column_stack([cells, np.reshape(action, (self.cells, len(self.CELL)))[cells]])
        moves = JArray(JArray(JInt))([JArray(JInt)(row.tolist()) for row in rows])
        observations, rewards, done, infos = self.env.step(JArray(JArray(JArray(JInt)))([moves]))
        info = self._info() | {"win": float(infos[0]["raw_rewards"][0])}
        return observations[0].astype(np.uint8), float(rewards[0]), bool(done[0]), False, info

    def close(self):
        """Close the game only: a Java machine that env.close() ends cannot restart."""
        self.env.vec_client.close()


class PokemonRed(gymnasium.Env):
    """pyboy/pokemon_red: Pokémon Red in the emulator PyBoy.

    rom: a ROM file, which is not shipped. state: a PyBoy save state to begin episodes from
    (default: the machine's start, before the title). An episode is max_steps button presses of
    frame_skip frames each. The reward is 0.02 for a new tile, 0.5 for a level of the party, and 5
    for a badge. Addresses of the game's memory: github.com/pret/pokered.
    """

    BUTTONS = ("down", "left", "right", "up", "a", "b", "start")
    LEVELS = (0xD18C, 0xD1B8, 0xD1E4, 0xD210, 0xD23C, 0xD268)
    BADGES, MAP, Y, X = 0xD356, 0xD35E, 0xD361, 0xD362

    def __init__(self, name, rom="", state="", max_steps=4096, frame_skip=24):
        if not os.path.isfile(rom):
            raise ConfigError(f"env.rom = {rom!r}: no such file. pyboy/pokemon_red needs a ROM, "
                              "which is not shipped: --env.rom pokemon_red.gb.")
        from pyboy import PyBoy

        self.game = PyBoy(rom, window="null", sound_emulated=False)
        if not self.game.cartridge_title.startswith("POKEMON RED"):
            title = self.game.cartridge_title
            self.game.stop(save=False)
            raise ConfigError(f"{rom} is {title!r}, expected POKEMON RED: memory addresses differ "
                              "between games.")
        start = io.BytesIO()
        if state:
            with open(state, "rb") as file:
                self.game.load_state(file)
        self.game.save_state(start)
        self.start, self.max_steps, self.frame_skip = start.getvalue(), max_steps, frame_skip
        self.observation_space = gymnasium.spaces.Box(0, 255, (72, 80, 1), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self.BUTTONS))

    def _observe(self):
        return self.game.screen.ndarray[::2, ::2, :1].copy()  # the screen has four greys

    def _progress(self):
        """Return (number of tiles visited, sum of levels, number of badges)."""
        memory = self.game.memory
        self.tiles.add((memory[self.MAP], memory[self.X], memory[self.Y]))
        levels = sum(memory[address] for address in self.LEVELS)
        return len(self.tiles), levels, memory[self.BADGES].bit_count()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game.load_state(io.BytesIO(self.start))
        self.steps, self.tiles = 0, set()
        self.progress = self._progress()
        return self._observe(), {}

    def step(self, action):
        self.game.button(self.BUTTONS[action], delay=8)
        self.game.tick(self.frame_skip, True)
        self.steps += 1
        before, self.progress = self.progress, self._progress()
        tiles, levels, badges = np.subtract(self.progress, before).tolist()
        reward = 0.02 * tiles + 0.5 * levels + 5.0 * badges
        info = dict(zip(("tiles", "levels", "badges"), self.progress, strict=True))
        return self._observe(), reward, False, self.steps >= self.max_steps, info

    def render(self):
        return self.game.screen.ndarray[:, :, :3].copy()

    def close(self):
        self.game.stop(save=False)


def retro(name, state="", frame_skip=4, screen_size=84, frame_stack=4):
    """Make retro/GAME: console games through stable-retro, preprocessed as Atari's.

    All but Airstriker-Genesis-v0 need a ROM: `python -m stable_retro.import FOLDER` imports them.
    """
    import stable_retro

    try:
        env = stable_retro.make(name, render_mode="rgb_array",
                                **({"state": state} if state else {}))
    except RuntimeError as error:  # a second emulator in the process
        raise ConfigError(f"retro/{name}: {error} Give vec.backend multiprocessing and "
                          "vec.num_workers = vec.num_envs.") from None
    env = gymnasium.wrappers.MaxAndSkipObservation(env, frame_skip)
    env = gymnasium.wrappers.ResizeObservation(
        gymnasium.wrappers.GrayscaleObservation(env), (screen_size, screen_size)
    )
    return gymnasium.wrappers.FrameStackObservation(env, frame_stack)


def open_spiel(name):
    """Make open_spiel/GAME: an agent for each player; one choice while others move."""
    from shimmy.openspiel_compatibility import OpenSpielCompatibilityV0

    return OpenSpielCompatibilityV0(game_name=name)


def dm_control(name, time_limit=0.0, render_mode=None):
    """Make a task of the DeepMind Control Suite (Tassa et al. 2018).

    Observations are one vector of all fields in the order of their names. time_limit: in seconds
    (0: the task's), after which an episode is truncated.
    """
    from dm_control import suite
    from shimmy.dm_control_compatibility import DmControlCompatibilityV0

    tasks = {f"{domain}/{task}": (domain, task) for domain, task in suite.ALL_TASKS}
    if name not in tasks:
        raise ConfigError(f"dm_control/{name}: expected dm_control/DOMAIN/TASK; "
                          f"{ocean.nearest(name, tasks)}.")
    env = suite.load(*tasks[name], task_kwargs={"time_limit": time_limit} if time_limit else None)
    env = gymnasium.wrappers.FlattenObservation(DmControlCompatibilityV0(env, render_mode))
    return gymnasium.wrappers.DtypeObservation(env, np.float32)


def griddly(name, level=0, max_episode_steps=1000):
    """Make griddly/Single-Player/GVGAI/sokoban, ..., observed as its grid of objects."""
    from griddly import gd
    from griddly.GymWrapper import GymWrapper

    kind = gd.ObserverType.VECTOR
    env = GymWrapper(f"{name}.yaml", player_observer_type=kind, global_observer_type=kind,
                     level=level)
    env.reset()  # the spaces are unknown before the first reset
    return gymnasium.wrappers.TimeLimit(gymnasium_form(env), max_episode_steps)


def magent2(name, map_size=45, max_cycles=1000):
    """Make magent2/battle_v4, ...: armies of agents on a grid."""
    module = importlib.import_module(f"magent2.environments.{name}")
    return module.parallel_env(map_size=map_size, max_cycles=max_cycles)


FAMILIES = {"crafter": Crafter, "procgen": Procgen, "craftax": Craftax, "microrts": MicroRTS,
            "pyboy": PokemonRed, "retro": retro, "open_spiel": open_spiel, "griddly": griddly,
            "magent2": magent2, "dm_control": dm_control, "gymnax": gymnax, "brax": brax}

gymnax.gives_tensors = brax.gives_tensors = True
