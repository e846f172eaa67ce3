"""Environments by name, as the command line and vector.make take them.

    gym/ID                      gym/CartPole-v1, gym/ALE/Breakout-v5; gym/package:ID imports a
                                package first
    pettingzoo/FAMILY/NAME      pettingzoo/butterfly/knights_archers_zombies_v11
    FAMILY/NAME                 crafter/reward, procgen/coinrun, dm_control/cartpole/swingup, ...:
                                packages without ids
    path/to/file.py:callable    a custom class or function

    creator = load_creator("gym/CartPole-v1")
    env = creator(max_episode_steps=200)        # creator.settings says what can be set

A creator can be pickled, so that other processes make the same environment. docs/environments.md
has the families with the install line of each.
"""

import contextlib
import functools
import importlib.util
import inspect
import pkgutil
import re
import sys
import zlib
from pathlib import Path
from typing import ClassVar

import gymnasium
from gymnasium.envs.registration import load_env_creator

import absolute_imports
import ocean
from emulation import (
    GymnasiumPufferEnv,
    GymnasiumVectorPufferEnv,
    PufferEnv,
    build,
    parameters_of,
    slice_rows,
    takes,
    within,
    wrap,
)
from errors import ConfigError
from families.adapters import FAMILIES

# {beginning of an id: the package that registers it}; "gym/package:ID" names any other one.
PACKAGES = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid",
            "MiniHack-": "minihack", "NetHack": "nle", "Vizdoom": "vizdoom.gymnasium_wrapper",
            "MinAtar/": "minatar.gym"}


def load_creator(name):
    """Return the creator that a name of one of these forms means, None for others.

    A creator can be pickled. It has `name`, `settings`, {keyword argument: default} of those that
    are plain numbers, flags or words, and `picture_settings`, the keyword arguments with which it
    draws.
    """
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
    """Return {parameter: default} of the defaults that are numbers, flags or words.

    They have Python's own types; 1 is a float if the parameter's annotation says so.
    """
    defaults = {}
    for p in (parameters_of(function) or {}).values():
        kind = next((kind for kind in (bool, int, float, str) if isinstance(p.default, kind)), None)
        if kind is int and p.annotation in (float, "float"):
            kind = float
        if kind is not None and p.name not in ("render_mode", "seed"):
            defaults[p.name] = kind(p.default)
    return defaults


@contextlib.contextmanager
def _naming(name):
    """Raise a missing package within as a ConfigError about the environment `name`."""
    try:
        yield
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ConfigError(f"{name}: {error}. docs/environments.md has its install line.") from error


class GymnasiumCreator:
    """Make gym/ID, with the usual preprocessing of Atari and MiniGrid.

    That is AtariPreprocessing and FrameStackObservation, and ImgObsWrapper. reward_scale multiplies
    the rewards that are learnt from; logs keep the true return. Raises ConfigError if there is no
    such id or its package is missing.
    """

    ATARI: ClassVar = {
        "frame_skip": 4,
        "noop_max": 30,
        "screen_size": 84,
        "terminal_on_life_loss": False,
        "frame_stack": 4,
    }

    picture_settings: ClassVar = {"render_mode": "rgb_array"}
    takes_copies = True

    def __init__(self, name):
        self.name, (self.package, _, self.id) = name, name.removeprefix("gym/").rpartition(":")

    def _spec(self):
        package = self.package or next(
            (package for start, package in PACKAGES.items() if self.id.startswith(start)), None)
        if package is not None:
            with _naming(self.name):
                module = importlib.import_module(package)
            if package == "minatar.gym" and self.id not in gymnasium.registry:
                module.register_envs()
        try:
            return gymnasium.spec(self.id)
        except gymnasium.error.Error as error:
            raise ConfigError(
                f"{self.name}: {error} An id that a package registers when it is imported is "
                f"gym/package:ID. {ocean.nearest(self.id, gymnasium.registry, ())}") from None

    @property
    def settings(self):
        spec = self._spec()
        entry = spec.entry_point
        with _naming(self.name):
            entry = load_env_creator(entry) if isinstance(entry, str) else entry
        settings = plain_defaults(entry) | {
            name: value for name, value in spec.kwargs.items()
            if isinstance(value, bool | int | float | str)}
        if spec.max_episode_steps is not None:
            settings["max_episode_steps"] = spec.max_episode_steps
        elif spec.vector_entry_point is None:
            settings["max_episode_steps"] = -1  # Gymnasium's word for no limit
        settings["reward_scale"] = 1.0
        if self.id.startswith("ALE/"):
            settings = {name: value for name, value in settings.items()
                        if name not in ("obs_type", "frameskip")} | self.ATARI
        return settings

    def _check_limit(self, max_episode_steps=None, **_):
        """Raise ConfigError for a limit below 1: -1 is no limit to gymnasium.make alone."""
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(f"{self.name}: env.max_episode_steps is {max_episode_steps}; it must be "
                              "1 or more, or -1 for no limit with vec.backend serial or "
                              "multiprocessing.")

    @property
    def has_vector(self):
        """Return whether the package has a vector environment, as ALE's has."""
        return self._spec().vector_entry_point is not None

    @property
    def prefers_vector(self):
        """Return whether the package's vector environment is the default.

        It is for ALE (it preprocesses, too) and for CartPole (the same rules).
        """
        return self.id.startswith("ALE/") or self.id in ("CartPole-v0", "CartPole-v1")

    def vector(self, num_envs, num_threads=None, reward_scale=1.0, **kwargs):
        """Make the package's vector environment, with the settings of `__call__`."""
        self._spec()
        self._check_limit(**kwargs)
        if self.id.startswith("ALE/"):
            if kwargs.pop("sound_obs", False):
                raise ConfigError(f"{self.name}: ALE's vector environment has no sound. Set "
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
        if kwargs.get("max_episode_steps") != -1:
            self._check_limit(**kwargs)
        is_atari = self.id.startswith("ALE/")
        if is_atari:
            atari = {name: kwargs.pop(name, default) for name, default in self.ATARI.items()}
            frames = atari.pop("frame_stack")
            kwargs["frameskip"] = 1  # the preprocessing skips frames
        # emulation.py checks the first step
        env = gymnasium.make(self.id, disable_env_checker=True, **kwargs)
        if is_atari:
            env = gymnasium.wrappers.AtariPreprocessing(env, **atari)
            env = gymnasium.wrappers.FrameStackObservation(env, frames)
        if self.id.startswith(("MiniGrid-", "BabyAI-")):
            from minigrid.wrappers import ImgObsWrapper

            env = ImgObsWrapper(env)
        return env if reward_scale == 1 else GymnasiumPufferEnv(env, reward_scale=reward_scale)


class Creator:
    """Base class of creators that call a function of a file or a package.

    _find() returns the function, whose signature has the settings.
    """

    def __init__(self, name):
        self.name = name

    @property
    def takes_copies(self):
        """Return whether one call makes one environment, not as many as its num_envs says."""
        return "num_envs" not in self.settings

    @property
    def settings(self):
        return plain_defaults(self._find())

    @property
    def picture_settings(self):
        return {"render_mode": "rgb_array"} if takes(self._find(), "render_mode") else {}

    @property
    def __signature__(self):  # what inspect.signature returns: emulation.build looks for `seed`
        return inspect.signature(self._find())

    def __call__(self, **kwargs):
        return self._find()(**kwargs)


class PettingZooCreator(Creator):
    """Make pettingzoo/FAMILY/NAME: its parallel_env, or if there is none its env.

    It is in pettingzoo.FAMILY.NAME, in mpe2.NAME for mpe. Raises ConfigError if it is missing.
    """

    def _module(self):
        family, _, name = self.name.removeprefix("pettingzoo/").partition("/")
        has_mpe2 = family == "mpe" and importlib.util.find_spec("mpe2")
        with _naming(self.name):
            package = importlib.import_module("mpe2" if has_mpe2 else f"pettingzoo.{family}")
            names = [module.name for module in pkgutil.iter_modules(package.__path__)
                     if re.search(r"_v\d+$", module.name)]
            if name in names:
                return importlib.import_module(f"{package.__name__}.{name}")
        raise ConfigError(f"{self.name}: {package.__name__} has no {name}. "
                          f"{ocean.nearest(name, names)}")

    def _find(self):
        module = self._module()
        return getattr(module, "raw_env", None) or module.env

    def __call__(self, **kwargs):
        module = self._module()
        return (getattr(module, "parallel_env", None) or module.env)(**kwargs)


def can_draw(env, picture_settings):
    """Tell whether an environment, or that within its wrappers, draws.

    It does if it has a render() besides that of its base class. If it keeps a render_mode, that
    must be set, or be one of the `picture_settings` of its creator.
    """
    inner = [env, *within(env)][-1]
    module = next((cls.__module__ for cls in type(inner).__mro__ if "render" in vars(cls)), None)
    has_mode = picture_settings or getattr(inner, "__dict__", {}).get("render_mode", True)
    return bool(has_mode) and module not in (
        None, "gymnasium.core", "gymnasium.vector.vector_env", "gym.core", "pettingzoo.utils.env",
        "emulation", "pufferlib")


def run_file(path, name):
    """Return the module of a Python file, run once under `name`.

    It can import what is beside it, as with `python FILE`.
    """
    if name not in sys.modules:
        absolute_imports.check(path)
        specification = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # where its dataclasses look for their types
        folder = str(Path(path).resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def find_callable(path, attribute, module_name, setting=""):
    """Return a class or function of a file, which runs once as `module_name`."""
    module = run_file(path, module_name)
    if not callable(getattr(module, attribute, None)):
        names = [name for name, value in vars(module).items()
                 if callable(value) and getattr(value, "__module__", None) == module_name]
        raise ConfigError(f"{setting}expected {path}:NAME, a class or function of that file, got "
                          f"{attribute!r}. It has {', '.join(names) or 'none'}.")
    return getattr(module, attribute)


class FileCreator(Creator):
    """Make path/to/file.py:callable. Raises ConfigError if it is missing."""

    def __init__(self, name):
        path, _, self._attribute = name.rpartition(":")
        self._path = Path(path).resolve()
        super().__init__(f"{self._path.stem}_{self._attribute}")
        if not self._path.exists():
            raise ConfigError(f"{self._path}: there is no such file.")
        # two files may have one name, and a notebook's user edits one between two trainings
        edited = str(self._path.stat().st_mtime_ns)
        self._module = f"{self.name}_{zlib.crc32(bytes(self._path) + edited.encode()):08x}"
        self._find()

    def _find(self):
        return find_callable(self._path, self._attribute, self._module)


class FamilyCreator(Creator):
    """Make FAMILY/NAME by a function or class of FAMILIES.

    For packages without ids. Raises ConfigError for a missing package.
    """

    def __init__(self, name):
        super().__init__(name)
        self.family, _, self.member = name.partition("/")
        self.gives_tensors = getattr(FAMILIES[self.family], "gives_tensors", False)

    @property
    def takes_copies(self):
        return super().takes_copies and self.family != "retro"  # a process can hold only one

    def _find(self):
        return functools.partial(FAMILIES[self.family], self.member)

    def __call__(self, **kwargs):
        with _naming(self.name):
            return super().__call__(**kwargs)


# --------------------------------------------------------------------------------------------------
# Environments in C, one process's share of them


class OceanPufferEnv(PufferEnv):
    """Hold copies of an environment in C as one PufferEnv, for backends in Python.

    name: of the environment, or its header's path; settings are the environment's. Copy i
    draws the random numbers of stream first_env + i of the seed, as the i-th environment of
    the native backend does.
    """

    same_seed = True  # each copy has its random stream, so one seed serves all

    def __init__(self, name, num_envs=1, first_env=0, seed=0, buf=None, **settings):
        self._create = functools.partial(ocean.load(name).create, num_envs, settings=settings,
                                         first_env=first_env)
        self._envs = envs = self._create(seed=seed)
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        self.num_agents = envs.num_agents
        self.has_action_masks = envs.has_action_masks
        super().__init__(buf)

    @classmethod
    @functools.cache
    def of(cls, name):
        """Return the class of an environment in C: of("breakout")(num_envs=64).

        vector.make steps this class in C, as it does the name; a subclass steps in Python.
        """

        def __init__(self, num_envs=1, *, buf=None, seed=0, **settings):
            cls.__init__(self, name, num_envs, seed=seed, buf=buf, **settings)

        title = "".join(word.capitalize() for word in name.split("_"))
        return type(title, (cls,), {"__init__": __init__, "ocean_name": name, "same_seed": False})

    def views(self, rows, first):
        row = slice_rows(rows, first, self.num_agents)
        addresses = ocean.rows(
            row.observations, row.actions, row.rewards, row.terminals, row.truncations,
            row.final_observations, row.valid if self._envs.has_valid else None, row.action_masks)
        return {**super().views(rows, first), "_rows": addresses}

    def reset(self, seed=None):
        if seed is not None:
            self._envs.close()
            self._envs = self._create(seed=seed)
        self._envs.reset(self._rows)
        return self.observations, []

    def step(self, actions):
        self.actions[:] = actions
        self._envs.step(self._rows)
        log = self._envs.log() if (self.terminals | self.truncations).any() else None
        infos = [log] if log else []
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def _env_actions(self, actions):
        return actions

    def render(self):
        return self._envs.render()

    def close(self):
        self._envs.close()


# --------------------------------------------------------------------------------------------------
# The arguments of vector.make, as creators


def find_maker(env):
    """Return what makes the environments that `make` is called with.

    It is an ocean.Library for the name or the class of an environment in C, a creator for another
    name, else `env` itself.
    """
    if isinstance(env, str):
        return load_creator(env) or ocean.load(env.removeprefix("puffer_"))
    if hasattr(env, "__fspath__"):
        return ocean.load(env)
    # a subclass that changes what a step does is not the environment in C
    attributes = vars(env) if isinstance(env, type) else {}
    return ocean.load(attributes["ocean_name"]) if "ocean_name" in attributes else env


def with_settings(env, env_kwargs, settings, keywords):
    """Return env_kwargs with `settings` for all environments.

    Raises ConfigError for a setting that the environment does not have. keywords: of make.
    """
    known = settings_of(env)
    for key in settings:
        if known is not None and key not in known:
            near = ocean.nearest(key, [*known, *keywords], known)
            others = f"; make itself takes {', '.join(keywords)}" if keywords else ""
            raise ConfigError(f"{name_of(env)} has no setting {key!r}: {near}{others}")
    if isinstance(env_kwargs, list | tuple):
        return [{**(kwargs or {}), **settings} for kwargs in env_kwargs]
    return {**(env_kwargs or {}), **settings}


def settings_of(env):
    """Return the names of the settings that an environment is made with.

    env: also a list, of which the first counts. Returns None if any keyword is accepted, or if the
    names are unknown.
    """
    env = next(iter(env), None) if isinstance(env, (list, tuple)) else env
    if isinstance(env, ocean.Library) or hasattr(env, "picture_settings"):  # a creator's
        return [*env.settings, *getattr(env, "picture_settings", ())]
    parameters = parameters_of(env)
    if parameters is None:
        return None if callable(env) else []
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def count_copies(num_envs, env_kwargs):
    """Multiply num_envs by that in env_kwargs; returns it and the other keywords."""
    if isinstance(env_kwargs, dict) and "num_envs" in env_kwargs:
        others = {key: value for key, value in env_kwargs.items() if key != "num_envs"}
        return num_envs * env_kwargs["num_envs"], others
    return num_envs, env_kwargs


def _one_each(values, num_envs, name):
    """Return a list of one value an environment."""
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ConfigError(f"{name} is a list of {len(values)}, but there are {num_envs} "
                          "environments.")
    return list(values)


def creators_of(env, num_envs, env_args, env_kwargs):
    """Return ([(creator, args, kwargs)] with one an environment, name)."""
    if num_envs < 1:
        raise ConfigError(f"num_envs = {num_envs}: must be 1 or more.")
    creators = _one_each(env, num_envs, "env")
    if not callable(creators[0]) and num_envs > 1 and not isinstance(env, (list, tuple)):
        raise ConfigError(f"num_envs = {num_envs}: env is one instance ({type(env).__name__}). "
                          "Give a class or function that makes one.")
    kwargs = [dict(one or {}) for one in _one_each(env_kwargs, num_envs, "env_kwargs")]
    has_lists = isinstance(env, (list, tuple)) and env_args and all(
        isinstance(args, (list, tuple)) for args in env_args)
    args = _one_each(env_args, num_envs, "env_args") if has_lists else [env_args or ()] * num_envs
    return list(zip(creators, map(tuple, args), kwargs, strict=True)), name_of(creators[0])


def ocean_creators(header, num_envs, env_kwargs):
    """Return the creators of an environment in C for a backend in Python."""
    creators, first = [], 0
    for kwargs in _one_each(env_kwargs, num_envs, "env_kwargs"):
        settings = {"num_envs": 1, **(kwargs or {})}
        creators.append((OceanPufferEnv, (header,), {**settings, "first_env": first}))
        first += settings["num_envs"]
    return creators


def name_of(creator):
    """Return a creator's name, or that of its class."""
    return getattr(creator, "name", None) or getattr(creator, "__name__", type(creator).__name__)


def split_copies(maker, section):
    """Return (environments side by side, the settings of each) of an env section.

    num_envs is their number, unless the environment has a setting of that name.
    """
    settings = dict(section)
    return 1 if "num_envs" in maker.settings else settings.pop("num_envs", 1), settings


@contextlib.contextmanager
def sample(maker, section):
    """Make one environment, to read its spaces and agents, and close it afterwards."""
    settings = split_copies(maker, section)[1]
    if isinstance(maker, ocean.Library):
        probe = maker.create(1, settings=settings)
    else:
        import tensors

        env = build(maker, (), settings, 0)
        probe = tensors.wrap(env, 0) or wrap(env)
    with contextlib.closing(probe):
        yield probe
