"""PufferLib's import names, so that what its users already wrote runs here.

    from pufferlib import pufferl, PuffeRL, PufferEnv, make
    import pufferlib.vector, pufferlib.emulation, pufferlib.ocean
    from pufferlib.environments import atari
    python -m pufferlib.pufferl train breakout                  # the same as python pufferl.py train breakout

Each of PufferLib's names leads to its equivalent here (ALIASES, ROOMS, NAMES). A name without an
equivalent raises an AttributeError that says what took its place (GONE). A file is imported only
when one of its names is used, so `import pufferlib` does not load torch. The classes and functions
in this file adapt PufferLib's conventions; edit them if your version has others.
docs/from_pufferlib.md has the table of names.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from pathlib import Path

import gymnasium

import absolute_imports  # noqa: F401  first

__path__ = []  # makes this file count as a package; the Finder below finds what is in it
ROOT = Path(__file__).resolve().parent


# Under other names, because `import pufferlib.ocean` sets the name `ocean` in here to a Room.
our_emulation, our_environments, our_ocean = map(importlib.import_module, ("emulation", "environments", "ocean"))

# --------------------------------------------------------------------------------------------------
# Where names lead

ALIASES = {"vector": "vector", "emulation": "emulation", "models": "models", "pufferl": "pufferl",
           "sweep": "protein"}
ROOMS = {  # PufferLib's other modules: the modules here in which their names are looked up
    "pytorch": ["flat_spaces", "models"], "cleanrl": ["models"],
    "spaces": ["gymnasium.spaces"], "wrappers": [], "postprocess": [], "exceptions": [],
    "utils": [],
    "ocean": ["ocean"], "ocean.environment": [], "ocean.sanity": [], "ocean.torch": ["models"],
    "environments": [], "ocean.squared.cy_squared": [],
}
NAMES = {  # one name of PufferLib: its equivalent here
    "PuffeRL": "pufferl.PuffeRL", "make": "vector.make", "Protein": "protein.Protein",
    "WandbLogger": "loggers.WandbLogger", "NeptuneLogger": "loggers.NeptuneLogger",
    "NoLogger": "loggers.NoLogger",
    "APIUsageError": "builtins.ValueError", "InvalidAgentError": "builtins.ValueError",
    "EnvironmentSetupError": "builtins.RuntimeError", "namespace": "types.SimpleNamespace",
    "ClipAction": "gymnasium.wrappers.ClipAction", "GymToGymnasium": "emulation.gymnasium_form",
    "vector.PufferEnv": "pufferlib.PufferEnv",
    "vector.GymnasiumPufferEnv": "emulation.GymnasiumPufferEnv",
    "vector.PettingZooPufferEnv": "emulation.PettingZooPufferEnv",
    "pytorch.layer_init": "pufferlib.layer_init", "pytorch.sample_logits": "models.act",
    "pufferl.compute_puff_advantage": "pufferlib.compute_puff_advantage",
    "pufferl.eval": "tools.watch.play",
    "pufferl.profile": "tools.speed.profile",
    "pufferl.export": "tools.export.export",
    "cleanrl.Policy": "models.CleanRLAgent",
    "cleanrl.RecurrentPolicy": "models.RecurrentCleanRLAgent",
    "spaces.joint_space": "gymnasium.vector.utils.batch_space",
    "ocean.env_creator": "pufferlib.ocean_creator",
    "ocean.environment.env_creator": "pufferlib.ocean_creator",
    "ocean.squared.cy_squared.CySquared": "pufferlib.CySquared",
    "ocean.torch.Policy": "models.Default", "ocean.torch.Recurrent": "models.LSTMWrapper",
}
GONE = {  # what took the place of a name that has no equivalent
    "__version__": "this project has no numbered versions; a run's folder keeps those "
    "of its libraries", "set_buffers": "PufferEnv.__init__(buf) makes the arrays",
    "PettingZooWrapper": "write a class with the same methods that holds the environment",
    "Suppress": "contextlib.redirect_stdout", "silence_warnings": "warnings.catch_warnings",
    "vector.reset": "vecenv.reset()", "vector.step": "vecenv.step(actions)",
    "vector.make_seeds": "environment i gets seed + i",
    "vector.autotune": "python pufferl.py autotune ENV",
    "emulation.GymnaxPufferEnv": "vector.make('gymnax/NAME'), whose environment is families.adapters.gymnax, to copy",
    "emulation.nativize": "emulation.FlatObservation(space).unflatten",
    "emulation.emulate": "emulation.FlatObservation(space).flatten",
    "emulation.dtype_from_space": "flat_spaces.space_dtype",
    "emulation.flatten_space": "emulation.FlatObservation",
    "models.Convolutional": "models.Encoded, which reads images by convolutions",
    "models.ProcgenResnet": "models.Impala, which reads images by residual convolutions",
    "pytorch.log_prob": "models.act(logits, action)[1]", "pytorch.entropy": "models.act(logits)[2]",
    "sweep.Carbs": "protein.Protein", "sweep.Hyperparameters": "protein.Space",
    "pufferl.sweep": "protein.Protein(env_name).optimize(), or python protein.py ENV",
    "pufferl.autotune": "python pufferl.py autotune ENV",
    "pufferl.Profile": "python pufferl.py profile ENV",
    "pufferl.Utilization": "trainer.print_dashboard()",
    "ocean.MAKE_FUNCTIONS": "ocean.names()",
    "environments.try_import": "a missing package is named, with its install line, when an "
    "environment is made",
}

# pufferlib.environments.FAMILY: (the environment it makes by default, the form of its names here,
# names that PufferLib gave to some environments).
FAMILIES = {
    "atari": ("breakout", "gym/ALE/{}-v5", {}),
    "box2d": ("car-racing", "gym/{}", {"car-racing": "CarRacing-v3"}),
    "butterfly": ("cooperative_pong_v5", "pettingzoo/butterfly/{}", {}),
    "classic_control": ("cartpole", "gym/{}",
                        {"cartpole": "CartPole-v1", "mountaincar": "MountainCar-v0"}),
    "classic_control_continuous": ("MountainCarContinuous-v0", "gym/{}", {}),
    "craftax": ("Craftax-Symbolic-v1", "craftax/{}", {}),
    "crafter": ("crafter", "crafter/{}", {"crafter": "reward"}),
    "dm_control": ("walker", "dm_control/{}", {"walker": "walker/walk"}),
    "griddly": ("Single-Player/GVGAI/sokoban", "griddly/{}", {}),
    "magent": ("battle_v4", "magent2/{}", {}),
    "microrts": ("16x16/basesWorkers16x16", "microrts/{}", {}),
    "minigrid": ("minigrid", "gym/{}", {"minigrid": "MiniGrid-LavaGapS7-v0"}),
    "minihack": ("minihack", "gym/{}", {"minihack": "MiniHack-River-v0"}),
    "mujoco": ("HalfCheetah-v5", "gym/{}", {}),
    "nethack": ("nethack", "gym/{}", {"nethack": "NetHackScore-v0"}),
    "open_spiel": ("connect_four", "open_spiel/{}", {}),
    "pokemon_red": ("pokemon_red", "pyboy/{}", {}),
    "procgen": ("bigfish", "procgen/{}", {}),
    "stable_retro": ("Airstriker-Genesis-v0", "retro/{}", {}),
    "vizdoom": ("doom", "gym/{}", {"doom": "VizdoomHealthGatheringSupreme-v0"}),
}
ROOMS |= {f"environments.{family}": [] for family in FAMILIES}
OTHER_FAMILIES = ("bsuite", "dm_lab", "gpudrive", "gvgai", "kinetix", "links_awaken",
                  "metta", "minerl", "nmmo", "slimevolley", "smac", "trade_sim")
GONE |= dict.fromkeys([f"environments.{family}" for family in OTHER_FAMILIES],
                      "PufferLib's adapter of this package is not here; a Gymnasium or PettingZoo "
                      "environment needs none: vector.make(a function that makes it)")


def find(room, name):
    """What pufferlib.ROOM.NAME is here. Raises AttributeError, which says what took its place or
    which names are near."""
    full = f"{room}.{name}" if room else name
    if full in ROOMS or full in ALIASES:
        return importlib.import_module(f"pufferlib.{full}")
    if full in NAMES:
        module, _, attribute = NAMES[full].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    # PufferLib 2 had these names in modules of their own; here they are defined in this file.
    if room in ("wrappers", "postprocess", "exceptions", "utils"):
        return getattr(sys.modules[__name__], name)
    if room.startswith("environments.") and name == "env_creator":
        return functools.partial(environment_creator, room.partition(".")[2])
    if room.startswith("ocean") and not name.startswith("_"):
        environment = ocean_name(name)
        if environment and not name[0].isupper():
            return importlib.import_module(f"pufferlib.{full}")
        if environment:
            return our_environments.OceanPufferEnv.of(environment)
    modules = [importlib.import_module(module) for module in ROOMS.get(room, ALIASES.get(room, "").split())]
    for module in modules:
        if name in vars(module):
            return vars(module)[name]
    if full in GONE:
        raise AttributeError(f"pufferlib.{full} has no equivalent here: {GONE[full]}.")
    known = [*(key for module in modules for key in vars(module)),
             *(key.rpartition(".")[2] for key in {**NAMES, **ROOMS}
               if key.rpartition(".")[0] == room)]
    raise AttributeError(f"pufferlib.{full}: there is no such name, {our_ocean.nearest(name, known, ())} "
                         "(docs/from_pufferlib.md)")


def __getattr__(name):
    return find("", name)


class Room(types.ModuleType):
    """A module of PufferLib whose names lie in several modules here."""

    def __getattr__(self, name):
        if name in ("__path__", "__file__", "__all__", "__wrapped__"):
            raise AttributeError(name)
        return find(self.__name__.partition(".")[2], name)


TRAINER = {"stats": "environment", "last_stats": "environment"}  # names of PuffeRL there, and ours


class Alias:
    """Another name of an attribute, until something is assigned to it."""

    def __init__(self, name):
        self.name = name

    def __get__(self, owner, kind=None):
        return self if owner is None else getattr(owner, self.name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Lets `import pufferlib.NAME` give our module or a Room, and `python -m pufferlib.NAME` run
    our file."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, room = fullname.partition(".")
        if package != "pufferlib":
            return None
        if room in GONE:
            raise ModuleNotFoundError(f"{fullname} has no equivalent here: {GONE[room]}.",
                                      name=fullname)
        parts = room.split(".")
        known = room in ROOMS or room in ALIASES
        if not known and not (parts[0] == "ocean" and all(map(ocean_name, parts[1:]))):
            return None
        origin = str(ROOT / f"{ALIASES[room]}.py") if room in ALIASES else None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=origin)
        if parts[0] == "ocean" or room == "environments":
            spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        room = spec.name.partition(".")[2]
        if room not in ALIASES:
            return Room(spec.name)
        module = importlib.import_module(ALIASES[room])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """A Room looks its names up. A module of ours is already loaded; it only gets a __getattr__
        that says what took the place of PufferLib's old names."""
        if isinstance(module, Room):
            return
        room, module.__spec__ = module.__spec__.name.partition(".")[2], module.__spec__.loader_state
        for old, ours in TRAINER.items() if ALIASES[room] == "pufferl" else ():
            setattr(module.PuffeRL, old, Alias(ours))
        if "__getattr__" not in vars(module):
            module.__getattr__ = functools.partial(find, room)

    def get_source(self, fullname):
        return Path(importlib.util.find_spec(fullname).origin).read_text()

    def get_code(self, fullname):
        return compile(self.get_source(fullname), importlib.util.find_spec(fullname).origin, "exec")


sys.meta_path.append(Finder())


# --------------------------------------------------------------------------------------------------
# Environments


class PufferEnv(our_emulation.PufferEnv):
    """emulation.PufferEnv with PufferLib's contract. `observations`, `rewards` and all other arrays
    stay the same from __init__ on, so code in C may keep their addresses. Nothing is set to 0
    before a step. The values that `step` returns count, five or old Gym's four, even if the arrays
    differ from them. A truncation for which `final_observations` was not written counts as a
    terminal. Each step copies these arrays, which emulation.PufferEnv does not need to do.

    `buf` may also be another environment, as an instance or the name of one in C. A subclass then
    changes what its steps do:

        class Shaped(pufferlib.PufferEnv):
            def step(self, actions):
                observations, rewards, dones, infos = super().step(actions)
                return observations, rewards - 0.01, dones, infos

        vecenv = pufferlib.make(Shaped, env_args=["breakout"], num_envs=64)
    """

    inner = None
    emulated = done = False

    def __init__(self, buf=None, **settings):
        if isinstance(buf, str):
            buf = our_environments.OceanPufferEnv(buf.removeprefix("puffer_"), **settings)
        elif settings:
            raise TypeError(f"PufferEnv got {', '.join(settings)}: settings are for an environment "
                            "that is named.")
        if hasattr(buf, "single_observation_space"):
            self.inner, buf = our_emulation.wrap(buf), None
            self.single_observation_space = self.inner.single_observation_space
            self.single_action_space = self.inner.single_action_space
            self.num_agents, self.has_action_masks = our_emulation.slots(self.inner), self.inner.has_action_masks
        super().__init__(buf)
        self.agent_ids = range(self.num_agents)
        vars(self).update(self._given)  # these first arrays are kept as self.observations and so on
        self._inner_view = None if self.inner is None else self.inner.views(self._rows, 0)

    def views(self, rows, first):
        return {"_rows": rows, "_given": super().views(rows, first)}

    def reset(self, seed=None):
        """(observations, infos) of the environment inside."""
        if self.inner is None:
            return super().reset(seed)
        self._clear()
        return self.observations, list(self.inner.reset_into(self._inner_view, seed))

    def step(self, actions):
        """(observations, rewards, dones, infos) of the environment inside."""
        if self.inner is None:
            return super().step(actions)
        self._clear()
        self.actions[:] = actions
        infos = self.inner.step_into(self._inner_view)
        return self.observations, self.rewards, self.terminals | self.truncations, list(infos)

    def _clear(self):
        self.rewards[:], self.terminals[:], self.truncations[:], self.masks[:] = 0, False, False, True

    def reset_into(self, view, seed=None):
        observations, infos = self.reset(seed)
        self._hand_over(view["_given"], observations)
        return infos

    def step_into(self, view):
        observations, rewards, *ends, infos = self.step(self._env_actions(view["_given"]["actions"]))
        if len(ends) == 1:  # old Gym's `done` is true for a truncated step too
            ends = [ends[0] & ~self.truncations, self.truncations]
        terminals, truncations = ends
        # The rest of a truncated episode is estimated from its last observation. Without that
        # observation there is no estimate, so the step counts as a terminal.
        if truncations.any():
            known = self.final_observations.reshape(self.num_agents, -1).any(1)
            terminals, truncations = terminals | (truncations & ~known), truncations & known
        self._hand_over(view["_given"], observations, rewards=rewards, terminals=terminals,
                        truncations=truncations)
        self.final_observations[truncations] = 0
        return infos

    def _hand_over(self, given, observations, **others):
        mine = {"masks": self.masks, "final_observations": self.final_observations,
                "action_masks": self.action_masks}
        for name, array in {"observations": observations, **mine, **others}.items():
            if given[name] is not None and array is not None:
                given[name][:] = array

    def render(self):
        return None if self.inner is None else self.inner.render()

    def close(self):
        if self.inner is not None:
            self.inner.close()

    def async_reset(self, seed=None):
        self.infos = self.reset(seed)[1]

    def send(self, actions):
        self.infos = self.step(actions)[-1]

    def recv(self):
        """(observations, rewards, terminals, truncations, infos, agent_ids, masks)."""
        return (self.observations, self.rewards, self.terminals, self.truncations, self.infos,
                self.agent_ids, self.masks)


class CySquared:
    """The binding that PufferLib's template for environments in C shows, over arrays that the
    environment keeps: observations (num_envs, size · size) uint8, actions int32, rewards float32
    and terminals bool (num_envs,). For one of your own,
    `ocean.load("my_header.h").create(num_envs)` and `ocean.rows` do the same."""

    def __init__(self, observations, actions, rewards, terminals, num_envs, size):
        if size % 2 == 0:
            raise ValueError(f"size is {size}; it must be odd, with the agent's start "
                             "in the middle.")
        truncations = terminals.view("uint8") * 0
        self.arrays = observations, actions, rewards, terminals.view("uint8"), truncations
        self.envs = our_ocean.load("squared").create(num_envs, settings={"distance": size // 2})
        self.rows = our_ocean.rows(*self.arrays)

    def reset(self):
        self.envs.reset(self.rows)

    def step(self):
        self.envs.step(self.rows)

    def render(self):
        return self.envs.render()

    def close(self):
        self.envs.close()


class EpisodeStats(gymnasium.Wrapper):
    """Puts the sums of the numbers in all infos of an episode into its last info. The episode's
    return and length are logged without this wrapper."""

    def __init__(self, env):
        super().__init__(env)
        self.sums = {}

    def reset(self, *, seed=None, options=None):
        self.sums, given = {}, {"seed": seed, "options": options}  # PufferLib's examples take neither
        return self.env.reset(**{name: value for name, value in given.items()
                                 if our_emulation.takes(self.env.reset, name)})

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        for name, value in importlib.import_module("flat_spaces").numeric_scalars(info).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        return observation, reward, terminated, truncated, {**info, **self.sums} if terminated or truncated else info


def _as_it_is(env):
    """The environment itself, because PettingZooPufferEnv already does what these wrappers did: it
    masks agents that are gone, averages infos over agents, and logs return and length."""
    return env


PettingZooTruncatedWrapper = MeanOverAgents = MultiagentEpisodeStats = _as_it_is


def ResizeObservation(env, downscale=2):
    """The environment with every `downscale`-th row and column of its pictures (height, width)."""
    space = env.observation_space
    small = gymnasium.spaces.Box(space.low[::downscale, ::downscale],
                                 space.high[::downscale, ::downscale],
                                 dtype=space.dtype.type)
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen[::downscale, ::downscale],
                                                   small)


def unroll_nested_dict(nested):
    """("a/b", value) of all leaves."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{inner}", leaf) for inner, leaf in unroll_nested_dict(value))
        else:
            yield key, value


def ocean_name(name):
    """The environment in C of a class or a module of PufferLib's: NMMO3, TrashPickupEnv,
    puffer_breakout; else None."""
    flat = name.lower().removeprefix("puffer_").replace("_", "")
    known = {known.replace("_", ""): known for known in our_ocean.names()}
    return known.get(flat) or known.get(flat.removesuffix("env"))


def ocean_creator(name="squared"):
    """The class of an environment in C, for an unknown name too: making one then raises an error
    that says which names are near."""
    return our_environments.OceanPufferEnv.of(ocean_name(name) or name)


def environment_creator(family, name=None):
    """The creator (as vector.make takes it) of an environment of one of FAMILIES."""
    default, form, special = FAMILIES[family]
    name = name or default
    if family == "atari":
        name = "".join(word[:1].upper() + word[1:] for word in re.split("[_-]", name))
    return our_environments.load_creator(form.format(special.get(name, name)))


# --------------------------------------------------------------------------------------------------
# Functions of torch


def layer_init(layer, std=2**0.5, bias_const=0.0):
    """Orthogonal weights, constant bias, in place; returns the layer."""
    importlib.import_module("models").orthogonal(layer, std)
    if layer.bias is not None:
        layer.bias.data.fill_(bias_const)
    return layer


def compute_puff_advantage(values, rewards, terminals, ratio, advantages, gamma, gae_lambda,
                           vtrace_rho_clip, vtrace_c_clip):
    """kernels.advantage in PufferLib's layout: arrays (segments, T), rewards[:, t + 1] and
    terminals[:, t + 1] follow the action at t, and the last step has no advantage. Writes into
    `advantages` and returns it."""
    import torch

    def steps(tensor, dtype=torch.float32, first=0):
        return tensor[:, first : first + values.shape[1] - 1].T.to(dtype).contiguous()

    done = steps(terminals, torch.uint8, 1)
    flags, result = torch.zeros_like(done), torch.empty_like(steps(values))
    importlib.import_module("kernels").advantage(
        values.T.float().contiguous(), steps(rewards, first=1), done, flags,
        torch.zeros_like(result), steps(ratio),
        torch.ones(values.T.shape, dtype=torch.uint8), result, gamma=gamma, gae_lambda=gae_lambda,
        rho_clip=vtrace_rho_clip, c_clip=vtrace_c_clip)
    advantages[:, :-1], advantages[:, -1] = result.T, 0
    return advantages
