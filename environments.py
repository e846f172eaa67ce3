"""Environments by name, as the command line and vector.make take them.

    gym/ID                      gym/CartPole-v1, gym/ALE/Breakout-v5; gym/package:ID imports a package first
    pettingzoo/FAMILY/NAME      pettingzoo/butterfly/knights_archers_zombies_v11
    FAMILY/NAME                 crafter/reward, procgen/coinrun, dm_control/cartpole/swingup, ...: packages without ids
    path/to/file.py:callable    a class or function of yours

    creator = load_creator("gym/CartPole-v1")
    env = creator(max_episode_steps=200)        # creator.settings says what can be set

A creator can be pickled, so that other processes make the same environment. docs/environments.md
has the families with the install line of each.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import zlib
from typing import ClassVar

import gymnasium
import numpy as np

import absolute_imports
import ocean
from emulation import (
    GymnasiumVectorPufferEnv,
    PufferEnv,
    ScaledReward,
    build,
    takes,
    within,
    wrap,
)
from errors import ConfigError
from families.adapters import FAMILIES

# The package that registers the ids with this beginning; "gym/package:ID" names any other one.
PACKAGES = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid",
            "MiniHack-": "minihack", "NetHack": "nle", "Vizdoom": "vizdoom.gymnasium_wrapper",
            "MinAtar/": "minatar.gym"}


def load_creator(name):
    """The creator behind a name of one of these forms, or None for another name. It can be pickled,
    and has `name`, `settings`, {keyword argument: default} of those that are plain numbers, flags
    or words, and `picture_settings`, the keyword arguments with which it draws."""
    if name.startswith("gym/"):
        return GymnasiumCreator(name)
    if name.startswith("pettingzoo/"):
        return PettingZooCreator(name)
    if name.partition("/")[0] in FAMILIES and ".py:" not in name:
        return FamilyCreator(name)
    if name.endswith(".py"):
        name += ":"  # FileCreator's error then lists what the file has
    return FileCreator(name) if ".py:" in name else None


def plain_defaults(function):
    """{parameter: default} of those defaults that are numbers, flags or words, as Python's own types; 1 is a float if
    the parameter says so."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    plain = {p.name: next((kind for kind in (bool, int, float, str) if isinstance(p.default, kind)), None)
             for p in parameters if p.name not in ("render_mode", "seed")}
    asked = {p.name: float for p in parameters if plain.get(p.name) is int and p.annotation in (float, "float")}
    return {p.name: (plain | asked)[p.name](p.default) for p in parameters if plain.get(p.name)}


def _picture_settings(function):
    """{"render_mode": "rgb_array"} if a function takes that."""
    return {"render_mode": "rgb_array"} if takes(function, "render_mode") else {}


class GymnasiumCreator:
    """gym/ID. Atari and MiniGrid get their fields' usual preprocessing: AtariPreprocessing,
    FrameStackObservation, and ImgObsWrapper. reward_scale multiplies the rewards that are learnt
    from; logs keep the true return. Raises ValueError if there is no such id, ImportError if
    its package is missing.
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
        self.name, (self.package, _, self.id) = name, name.removeprefix("gym/").rpartition(":")

    def _register(self):
        package = (self.package
                   or next((p for start, p in PACKAGES.items() if self.id.startswith(start)), None))
        if package is None:
            return
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"{self.name} needs the package {package.partition('.')[0]} ({error}); "
                              "docs/environments.md has its install line.") from error
        if package == "ale_py":
            gymnasium.register_envs(module)
        elif package == "minatar.gym" and self.id not in gymnasium.registry:
            module.register_envs()

    def _spec(self):
        self._register()
        try:
            return gymnasium.spec(self.id)
        except gymnasium.error.Error as error:
            raise ConfigError(
                f"{self.name}: Gymnasium knows no environment {self.id} ({error}); one that a package "
                "registers when it is imported is gym/package:ID. "
                f"{ocean.nearest(self.id, gymnasium.registry, ())}") from None

    @property
    def settings(self):
        spec = self._spec()
        entry = spec.entry_point
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            try:
                entry = getattr(importlib.import_module(module), attribute)
            except gymnasium.error.DependencyNotInstalled as error:
                raise ConfigError(f"{self.name}: {error} (docs/environments.md)") from None
        settings = plain_defaults(entry) | {
            k: v for k, v in spec.kwargs.items() if isinstance(v, bool | int | float | str)
        }
        if spec.max_episode_steps is not None:
            settings["max_episode_steps"] = spec.max_episode_steps
        elif spec.vector_entry_point is None:
            settings["max_episode_steps"] = -1  # Gymnasium's word for no limit
        settings["reward_scale"] = 1.0
        if self.id.startswith("ALE/"):
            settings = {k: v for k, v in settings.items() if k not in ("obs_type", "frameskip")} | self.ATARI
        return settings

    @property
    def has_vector(self):
        """Whether its package has a vector environment of its own, as ALE and CartPole have."""
        return self._spec().vector_entry_point is not None

    @property
    def prefers_vector(self):
        """Whether that one is the default: ALE's, which does the preprocessing too, and CartPole's,
        which gives the same episodes."""
        return self.id.startswith("ALE/") or self.id in ("CartPole-v0", "CartPole-v1")

    def vector(self, num_envs, num_threads=None, reward_scale=1.0, **kwargs):
        """That vector environment, with num_envs environments and the same settings."""
        self._spec()
        if self.id.startswith("ALE/"):
            if kwargs.pop("sound_obs", False):
                raise ConfigError(f"{self.name}: ALE's vector environment has no sound; take "
                                  "vec.backend serial.")
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
        return env if reward_scale == 1 else ScaledReward(env, reward_scale)

    def _make(self, kwargs):
        if not self.id.startswith("ALE/"):
            # the first step is checked here
            env = gymnasium.make(self.id, disable_env_checker=True, **kwargs)
            if self.id.startswith(("MiniGrid-", "BabyAI-")):
                from minigrid.wrappers import ImgObsWrapper

                env = ImgObsWrapper(env)
            return env
        atari = {name: kwargs.pop(name, default) for name, default in self.ATARI.items()}
        frames = atari.pop("frame_stack")
        # the preprocessing skips them
        env = gymnasium.make(self.id, disable_env_checker=True, frameskip=1, **kwargs)
        env = gymnasium.wrappers.AtariPreprocessing(env, **atari)
        return gymnasium.wrappers.FrameStackObservation(env, frames)


class PettingZooCreator:
    """pettingzoo/FAMILY/NAME: the parallel_env, or if there is none the env, of
    pettingzoo.FAMILY.NAME (mpe2.NAME for mpe). Raises ValueError and ImportError as
    GymnasiumCreator does."""

    def __init__(self, name):
        self.name, self.path = name, name.split("/")[1:]
        if len(self.path) != 2:
            raise ConfigError(
                f"{name}: expected pettingzoo/FAMILY/NAME, e.g. "
                "pettingzoo/butterfly/knights_archers_zombies_v11."
            )

    def _module(self):
        family, name = self.path
        packages = ["mpe2", "pettingzoo.mpe"] if family == "mpe" else [f"pettingzoo.{family}"]
        problem, versions = None, []
        for package in packages:
            try:
                return importlib.import_module(f"{package}.{name}")
            except ImportError as error:
                problem = problem or error
            # the family may have this environment in another version
            with contextlib.suppress(ImportError):
                modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
                versions += [module.name for module in modules if re.search(r"_v\d+$", module.name)]
        hint = "" if name in versions else ocean.nearest(name, versions, ())
        raise ConfigError(f"{self.name}: {problem}; docs/environments.md has the install line of each family. {hint}")

    @property
    def settings(self):
        return plain_defaults(getattr(self._module(), "raw_env", None))

    @property
    def picture_settings(self):
        return _picture_settings(getattr(self._module(), "raw_env", None) or self._module().env)

    def __call__(self, **kwargs):
        module = self._module()
        make = getattr(module, "parallel_env", None) or module.env
        return make(**kwargs)


def can_draw(env, picture_settings):
    """Whether an environment, or that within its wrappers, draws: it has a render() besides that of its base class, and
    if it keeps a render_mode, that was given or is one of the `picture_settings` of its creator."""
    inner = [env, *within(env)][-1]
    module = next((cls.__module__ for cls in type(inner).__mro__ if "render" in vars(cls)), None)
    return bool(picture_settings or getattr(inner, "__dict__", {}).get("render_mode", True)) and module not in (
        None, "gymnasium.core", "gymnasium.vector.vector_env", "gym.core", "pettingzoo.utils.env", "emulation",
        "pufferlib")


def run_file(path, name):
    """The module of a Python file, run once under `name`. It can import what lies beside it, as with `python FILE`."""
    if name not in sys.modules:
        absolute_imports.check(path)
        specification = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(specification)  # dataclasses look for theirs there
        folder = os.path.dirname(os.path.abspath(path))
        if folder not in sys.path:
            sys.path.append(folder)
        try:
            specification.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class FileCreator:
    """path/to/file.py:callable, a class or function that makes an environment. ValueError
    if it is not there."""

    def __init__(self, name):
        self._given, _, self.attribute = name.rpartition(":")
        path = self._given
        self.path = os.path.abspath(path)
        self.name = f"{os.path.basename(path).removesuffix('.py')}_{self.attribute}"
        # two files may have one name
        self._module = f"{self.name}_{zlib.crc32(os.fsencode(self.path)):08x}"
        self._callable()

    def _callable(self):
        if not os.path.exists(self.path):
            raise ConfigError(f"{self.path}: there is no such file.")
        module = run_file(self.path, self._module)
        if not callable(getattr(module, self.attribute, None)):
            names = [key for key, value in vars(module).items() if callable(value)
                     and value.__module__ == self._module]
            if not self.attribute:
                raise ConfigError(f"{self._given}: say what in it makes the environment, {self._given}:"
                                  f"{' or '.join(names) or 'NAME (there is no class or function in it)'}.")
            raise ConfigError(f"{self.path} has no callable {self.attribute}; it has "
                              f"{', '.join(names) or 'none'}.")
        return getattr(module, self.attribute)

    @property
    def settings(self):
        return {name: value for name, value in plain_defaults(self._callable()).items()
                if name != "buf"}

    @property
    def takes_copies(self):
        """Whether it is called once for each environment; False if it makes num_envs of them
        itself."""
        return "num_envs" not in self.settings

    @property
    def picture_settings(self):
        return _picture_settings(self._callable())

    def __call__(self, **kwargs):
        return self._callable()(**kwargs)


# --------------------------------------------------------------------------------------------------
# FAMILY/NAME for packages that register no Gymnasium ids. NAME is a function or class of the package;
# its keyword arguments are the environment's settings


class FamilyCreator:
    """FAMILY/NAME of FAMILIES. Raises ImportError if the family's package is missing, and
    ValueError as it does."""

    def __init__(self, name):
        self.name = name
        self.family, _, self.member = name.partition("/")
        self._make = FAMILIES[self.family]
        self.settings, self.picture_settings = plain_defaults(self._make), _picture_settings(self._make)
        self.gives_tensors = getattr(self._make, "gives_tensors", False)
        # False, so vec.num_envs is 1 unless it is set: these make num_envs environments themselves,
        # or (retro) a process can hold only one.
        self.takes_copies = "num_envs" not in self.settings and self.family != "retro"

    def __call__(self, **kwargs):
        try:
            return self._make(self.member, **kwargs)
        except ImportError as error:
            raise ConfigError(f"{self.name}: {error}; docs/environments.md has its install line.") from error


# --------------------------------------------------------------------------------------------------
# Environments in C, one process's share of them


class OceanPufferEnv(PufferEnv):
    """`num_envs` copies of an environment in C as one PufferEnv, for backends of environments in
    Python.

    name: of the environment, or its header's path; settings are the environment's. Copy i
    draws the random numbers of stream first_env + i of the seed, as the i-th environment of
    the native backend does.
    """

    same_seed = True  # its copies have random streams of their own, so one seed serves all

    def __init__(self, name, num_envs=1, first_env=0, seed=0, buf=None, **settings):
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

    @classmethod
    @functools.cache
    def of(cls, name):
        """The class of an environment in C: of("breakout")(num_envs=64, frameskip=4). A subclass
        may change its steps. vector.make steps the class itself in C, as it does its name."""

        def __init__(self, num_envs=1, *, buf=None, seed=0, **settings):
            cls.__init__(self, name, num_envs, seed=seed, buf=buf, **settings)

        title = "".join(word.capitalize() for word in name.split("_"))
        return type(title, (cls,), {"__init__": __init__, "ocean_name": name, "same_seed": False})

    def _build(self, seed):
        num_envs, settings, first_env = self._arguments
        self._envs = self._library.create(num_envs, seed=seed, settings=settings,
                                          first_env=first_env)

    def views(self, rows, first):
        views = super().views(rows, first)
        final = self._envs.single_observation_space
        views["final_observations"] = np.zeros((self.num_agents, *final.shape), final.dtype) \
            if views["final_observations"] is None else views["final_observations"]
        octets = [views[name].view(np.uint8) for name in ("terminals", "truncations", "masks")]
        views["_rows"] = ocean.rows(
            views["observations"], views["actions"], views["rewards"], *octets[:2],
            views["final_observations"],
            octets[2] if self._envs.has_valid else None, views["action_masks"])
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


# --------------------------------------------------------------------------------------------------
# What vector.make was asked for, as creators


def in_c(env):
    return isinstance(env, (str, ocean.Library)) or hasattr(env, "__fspath__")


def named(env):
    """The thing that makes the environments `make` was asked for: an ocean.Library for the name or
    the class of an environment in C, a creator for another name, else `env` itself."""
    if isinstance(env, str):
        return load_creator(env) or ocean.load(env.removeprefix("puffer_"))
    if hasattr(env, "__fspath__"):
        return ocean.load(env)
    # a subclass that changes what a step does has no name of its own
    own = vars(env) if isinstance(env, type) else {}
    return ocean.load(own["ocean_name"]) if "ocean_name" in own else env


def with_settings(env, env_kwargs, settings, keywords):
    """env_kwargs with `settings` for all environments. Raises ValueError for one that the
    environment does not have."""
    known = settings_of(env)
    for key in settings:
        if known is not None and key not in known:
            near = ocean.nearest(key, [*known, *keywords], known)
            raise ConfigError(f"{name_of(env)} has no setting {key!r}: {near}; "
                              f"make itself takes {', '.join(keywords)}")
    if not settings:
        return env_kwargs
    if isinstance(env_kwargs, list | tuple):
        return [{**(one or {}), **settings} for one in env_kwargs]
    return {**(env_kwargs or {}), **settings}


def settings_of(env):
    """The names of the settings that an environment, or the first of a list, is made with; None if
    it takes any, or checks them itself."""
    env = next(iter(env), None) if isinstance(env, (list, tuple)) else env
    if isinstance(env, ocean.Library) or hasattr(env, "picture_settings"):  # a name
        return [*env.settings, *getattr(env, "picture_settings", ())]
    try:
        parameters = inspect.signature(env).parameters
    except (TypeError, ValueError):  # an instance, or a class written in C
        return None if callable(env) else []
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def count_copies(num_envs, env_kwargs):
    """Multiply num_envs by the num_envs in env_kwargs: environments in C lie in one block
    anyway."""
    if isinstance(env_kwargs, dict) and "num_envs" in env_kwargs:
        return num_envs * env_kwargs["num_envs"], {k: v for k, v in env_kwargs.items()
                                                   if k != "num_envs"}
    return num_envs, env_kwargs


def _one_each(values, num_envs, what):
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ConfigError(f"{what} is a list of {len(values)}, but there are "
                          f"{num_envs} environments.")
    return list(values)


def creators_of(env, num_envs, env_args, env_kwargs):
    """([(creator, args, kwargs)] an environment, name)."""
    if num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs}; it must be 1 or more.")
    creators = _one_each(env, num_envs, "env")
    if not callable(creators[0]) and num_envs > 1 and not isinstance(env, (list, tuple)):
        raise ConfigError(f"num_envs is {num_envs}, but env is one instance ({type(env).__name__}); "
                          "give a class or function that makes one.")
    kwargs = _one_each(env_kwargs, num_envs, "env_kwargs")
    several = isinstance(env, (list, tuple)) and env_args and all(isinstance(one, (list, tuple))
                                                                  for one in env_args)
    args = _one_each(env_args, num_envs, "env_args") if several else [env_args or ()] * num_envs
    return [(creator, tuple(own), dict(one or {})) for creator, own, one in zip(creators, args, kwargs, strict=True)], \
        name_of(creators[0])


def ocean_creators(header, num_envs, env_kwargs):
    creators, first = [], 0
    for one in _one_each(env_kwargs, num_envs, "env_kwargs"):
        settings = {"num_envs": 1, **(one or {})}
        creators.append((OceanPufferEnv, (header,), {**settings, "first_env": first}))
        first += settings["num_envs"]
    return creators


def name_of(creator):
    return getattr(creator, "name", None) or getattr(creator, "__name__", type(creator).__name__)


def split_copies(maker, section):
    """(environments side by side, the settings of each) of an env section. num_envs says how many,
    unless the environment has a setting of that name: then there is one, which gets it."""
    settings = dict(section)
    return 1 if "num_envs" in maker.settings else settings.pop("num_envs", 1), settings


@contextlib.contextmanager
def sample(maker, section):
    """One environment of a creator or an ocean.Library, to read its spaces and agents; then it is closed."""
    settings = split_copies(maker, section)[1]
    if isinstance(maker, ocean.Library):
        probe = maker.create(1, settings=settings)
    else:
        import tensors

        made = build(maker, (), settings, 0)
        probe = tensors.look(made, 0) or wrap(made)
    with contextlib.closing(probe):
        yield probe
