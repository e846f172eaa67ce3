"""Environments by name, as the command line and vector.make take them.

    gym/ID                      gym/CartPole-v1, gym/ALE/Breakout-v5; gym/package:ID imports a package first
    pettingzoo/FAMILY/NAME      pettingzoo/butterfly/knights_archers_zombies_v11
    path/to/file.py:callable    a class or function of yours

    creator = load_creator("gym/CartPole-v1")
    env = creator(max_episode_steps=200)        # creator.settings says what can be set

A creator can be pickled, so that other processes make the same environment. docs/environments.md has the families with
the install line of each.
"""

import difflib
import importlib.util
import inspect
import os
import sys
from typing import ClassVar

import gymnasium
import numpy as np

from emulation import GymnasiumVectorPufferEnv, PufferEnv

# The package that registers the ids with this beginning; "gym/package:ID" names any other one.
PACKAGES = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid", "Crafter": "crafter",
            "MiniHack-": "minihack", "NetHack": "nle", "Vizdoom": "vizdoom.gymnasium_wrapper"}  # fmt: skip


def load_creator(name):
    """The creator behind a name of the three forms, or None for another name. It can be pickled, and has `name`,
    `settings`, {keyword argument: default} of those that are plain numbers, flags or words, and `picture_settings`,
    the keyword arguments with which it draws."""
    if name.startswith("gym/"):
        return GymnasiumCreator(name)
    if name.startswith("pettingzoo/"):
        return PettingZooCreator(name)
    return FileCreator(name) if ".py:" in name else None


def _plain_defaults(function):
    """{parameter: default} of a function's parameters whose default is a number, a flag or a word."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters
            if isinstance(p.default, bool | int | float | str) and p.name not in ("render_mode", "seed")}  # fmt: skip


def _picture_settings(function):
    """{"render_mode": "rgb_array"} where a function takes that."""
    parameters = inspect.signature(function).parameters.values()
    takes = any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"render_mode": "rgb_array"} if takes else {}


class GymnasiumCreator:
    """gym/ID. Atari and MiniGrid get their fields' usual preprocessing: AtariPreprocessing, FrameStackObservation, and
    ImgObsWrapper. reward_scale multiplies the rewards that are learnt from; logs keep the true return. Raises
    ValueError where there is no such id, ImportError where its package is missing.
    """

    ATARI: ClassVar = {
        "frame_skip": 4,
        "noop_max": 30,
        "screen_size": 84,
        "terminal_on_life_loss": False,
        "frame_stack": 4,
    }

    picture_settings: ClassVar = {"render_mode": "rgb_array"}

    def __init__(self, name):
        self.name, self.id = name, name.removeprefix("gym/")

    def _register(self):
        package = next((package for start, package in PACKAGES.items() if self.id.startswith(start)), None)
        if package is None:
            return
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f"{self.name} needs the package {package.partition('.')[0]} ({error}); "
                              "docs/environments.md has its install line.") from error  # fmt: skip
        if package == "ale_py":
            gymnasium.register_envs(module)

    def _spec(self):
        self._register()
        try:
            return gymnasium.spec(self.id)
        except gymnasium.error.Error as error:
            near = difflib.get_close_matches(self.id, list(gymnasium.registry), n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{self.name}: Gymnasium knows no environment {self.id}.{hint} ({error})") from None

    @property
    def settings(self):
        spec = self._spec()
        entry = spec.entry_point
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(module), attribute)
        settings = _plain_defaults(entry) | {
            k: v for k, v in spec.kwargs.items() if isinstance(v, bool | int | float | str)
        }
        if spec.max_episode_steps is not None:
            settings["max_episode_steps"] = spec.max_episode_steps
        settings["reward_scale"] = 1.0
        if self.id.startswith("ALE/"):
            settings = {k: v for k, v in settings.items() if k not in ("obs_type", "frameskip")} | self.ATARI
        return settings

    @property
    def has_native(self):
        """Whether its package has a vector environment of its own, as ALE in C++ and CartPole in numpy."""
        return self._spec().vector_entry_point is not None

    @property
    def prefers_native(self):
        """Whether that one is the better choice where nothing else is asked for: ALE's does the preprocessing too."""
        return self.id.startswith("ALE/") and self.has_native

    def native(self, num_envs, num_threads=None, reward_scale=1.0, **kwargs):
        """num_envs of them in that vector environment, with the same settings."""
        self._spec()
        if self.id.startswith("ALE/"):
            if kwargs.pop("sound_obs", False):
                raise ValueError(f"{self.name}: ALE's vector environment has no sound; take vec.backend serial.")
            atari = {name: kwargs.pop(name, default) for name, default in self.ATARI.items()}
            kwargs |= {
                "frameskip": atari["frame_skip"],
                "noop_max": atari["noop_max"],
                "img_height": atari["screen_size"],
                "img_width": atari["screen_size"],
                "episodic_life": atari["terminal_on_life_loss"],
                "stack_num": atari["frame_stack"],
                "reward_clipping": False,
                "use_fire_reset": False,
                "num_threads": num_threads or 0,
                "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP,
            }
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        env = gymnasium.make_vec(self.id, num_envs, mode, **kwargs)
        return GymnasiumVectorPufferEnv(env, reward_scale=reward_scale)

    def __call__(self, reward_scale=1.0, **kwargs):
        self._spec()
        env = self._make(kwargs)
        if reward_scale != 1:
            env = gymnasium.wrappers.RecordEpisodeStatistics(env, buffer_length=1)  # the return that is logged
            env = gymnasium.wrappers.TransformReward(env, lambda reward: reward_scale * reward)
        return env

    def _make(self, kwargs):
        if not self.id.startswith("ALE/"):
            env = gymnasium.make(self.id, disable_env_checker=True, **kwargs)  # the first step is checked here
            if self.id.startswith(("MiniGrid-", "BabyAI-")):
                from minigrid.wrappers import ImgObsWrapper

                env = ImgObsWrapper(env)
            return env
        atari = {name: kwargs.pop(name, default) for name, default in self.ATARI.items()}
        frames = atari.pop("frame_stack")
        env = gymnasium.make(self.id, disable_env_checker=True, frameskip=1, **kwargs)  # the preprocessing skips them
        env = gymnasium.wrappers.AtariPreprocessing(env, **atari)
        return gymnasium.wrappers.FrameStackObservation(env, frames)


class PettingZooCreator:
    """pettingzoo/FAMILY/NAME: the parallel_env, or where there is none the env, of pettingzoo.FAMILY.NAME (mpe2.NAME
    for mpe). Raises ValueError and ImportError as GymnasiumCreator does."""

    def __init__(self, name):
        self.name, self.path = name, name.split("/")[1:]
        if len(self.path) != 2:
            raise ValueError(
                f"{name}: expected pettingzoo/FAMILY/NAME, e.g. pettingzoo/butterfly/knights_archers_zombies_v11."
            )

    def _module(self):
        family, name = self.path
        packages = ["mpe2", "pettingzoo.mpe"] if family == "mpe" else [f"pettingzoo.{family}"]
        problem = None
        for package in packages:
            try:
                return importlib.import_module(f"{package}.{name}")
            except ImportError as error:
                problem = problem or error
        raise ImportError(f"{self.name}: {problem}; docs/environments.md has the install line of each family.")

    @property
    def settings(self):
        return _plain_defaults(getattr(self._module(), "raw_env", None))

    @property
    def picture_settings(self):
        return _picture_settings(getattr(self._module(), "raw_env", None) or self._module().env)

    def __call__(self, **kwargs):
        module = self._module()
        return (
            getattr(module, "parallel_env", None)(**kwargs) if hasattr(module, "parallel_env") else module.env(**kwargs)
        )


class FileCreator:
    """path/to/file.py:callable, a class or function that makes an environment. ValueError where it is not there."""

    def __init__(self, name):
        path, _, self.attribute = name.rpartition(":")
        self.path = os.path.abspath(path)
        self.name = f"{os.path.basename(path).removesuffix('.py')}_{self.attribute}"
        self._callable()

    def _callable(self):
        if not os.path.exists(self.path):
            raise ValueError(f"{self.path}: there is no such file.")
        module = sys.modules.get(self.name)
        if module is None:
            specification = importlib.util.spec_from_file_location(self.name, self.path)
            module = importlib.util.module_from_spec(specification)
            sys.modules[self.name] = module
            try:
                specification.loader.exec_module(module)
            except BaseException:
                del sys.modules[self.name]
                raise
        if not callable(getattr(module, self.attribute, None)):
            names = [key for key, value in vars(module).items() if callable(value) and value.__module__ == self.name]
            raise ValueError(f"{self.path} has no callable {self.attribute}; it has {', '.join(names) or 'none'}.")
        return getattr(module, self.attribute)

    @property
    def settings(self):
        return {name: value for name, value in _plain_defaults(self._callable()).items() if name != "buf"}

    @property
    def picture_settings(self):
        return _picture_settings(self._callable())

    def __call__(self, **kwargs):
        return self._callable()(**kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Environments in C, one process's share of them


class OceanPufferEnv(PufferEnv):
    """`num_envs` copies of an environment in C as one PufferEnv, for backends that know nothing of C.

    name: of the environment, or its header's path; settings are the environment's. Copy i draws the random numbers of
    stream first_env + i of the seed, as the i-th environment of the native backend does.
    """

    same_seed = True  # its copies have streams of their own, so all of them get one seed

    def __init__(self, name, num_envs=1, first_env=0, seed=0, buf=None, **settings):
        import ocean

        self._library, self._arguments = ocean.load(name), (num_envs, settings, first_env)
        self.seed, self._fresh = seed, True
        self._build(seed)
        envs = self._envs
        self.single_observation_space, self.single_action_space = (
            envs.single_observation_space,
            envs.single_action_space,
        )
        self.num_agents, self.has_action_masks = envs.num_agents, envs.has_action_masks
        super().__init__(buf)

    def _build(self, seed):
        num_envs, settings, first_env = self._arguments
        self._envs = self._library.create(num_envs, seed=seed, settings=settings, first_env=first_env)

    def views(self, rows, first):
        import ocean

        views = super().views(rows, first)
        final = self._envs.single_observation_space
        views["final_observations"] = np.zeros((self.num_agents, *final.shape), final.dtype) \
            if views["final_observations"] is None else views["final_observations"]  # fmt: skip
        octets = [views[name].view(np.uint8) for name in ("terminals", "truncations", "masks")]
        views["_rows"] = ocean.rows(
            views["observations"], views["actions"], views["rewards"], *octets[:2], views["final_observations"],
            octets[2] if self._envs.has_valid else None, views["action_masks"])  # fmt: skip
        return views

    def reset(self, seed=None):
        if seed is not None and not (self._fresh and seed == self.seed):
            self._envs.close()
            self._build(seed)
            self.seed = seed
        self._fresh = False
        self._envs.reset(self._rows)
        return self.observations, []

    def step(self, actions):
        if actions is not self.actions:
            self.actions[:] = actions
        self._envs.step(self._rows)
        log = self._envs.log() if (self.terminals | self.truncations).any() else None
        return self.observations, self.rewards, self.terminals, self.truncations, [log] if log else []

    def _env_actions(self, actions):
        return actions

    def render(self):
        return self._envs.render()

    def close(self):
        self._envs.close()
