"""PufferLib's import names, so that its users' code runs here.

    from pufferlib import pufferl, PuffeRL, PufferEnv, make
    import pufferlib.vector, pufferlib.emulation, pufferlib.ocean
    from pufferlib.environments import atari
    python -m pufferlib.pufferl train breakout                  # as python pufferl.py train

Each of PufferLib's names leads to its equivalent here (ALIASES, MODULES, NAMES). A name without an
equivalent raises an AttributeError that names its replacement (GONE). A file is imported when one
of its names is used, so `import pufferlib` does not load torch. The classes and functions in this
file adapt PufferLib's conventions; edit them if your version has others.
docs/from_pufferlib.md has the table of names.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import operator
import re
import sys
import types
from pathlib import Path

import gymnasium
import numpy as np

import absolute_imports  # noqa: F401  first
from errors import EnvError

__path__ = []  # makes this file a package, whose modules the Finder below finds
ROOT = Path(__file__).resolve().parent

# Under other names, because `import pufferlib.ocean` sets the name `ocean` in here to a Module.
our_emulation = importlib.import_module("emulation")
our_environments = importlib.import_module("environments")
our_ocean = importlib.import_module("ocean")

# --------------------------------------------------------------------------------------------------
# Where names lead

ALIASES = {"vector": "vector", "emulation": "emulation", "models": "models", "pufferl": "pufferl",
           "sweep": "protein"}
MODULES = {  # PufferLib's other modules: the modules here that have their names
    "pytorch": ["flat_spaces", "models"], "cleanrl": ["models"],
    "spaces": ["gymnasium.spaces"], "wrappers": [], "postprocess": [], "exceptions": [],
    "utils": [],
    "ocean": ["ocean"], "ocean.environment": [], "ocean.sanity": [], "ocean.torch": ["models"],
    "environments": [], "ocean.squared.cy_squared": [],
}
NAMES = {  # one name of PufferLib: its equivalent here
    "PuffeRL": "pufferlib.pufferl.PuffeRL", "make": "vector.make", "Protein": "protein.Protein",
    "WandbLogger": "loggers.WandbLogger", "NoLogger": "loggers.NoLogger",
    "APIUsageError": "builtins.ValueError", "InvalidAgentError": "builtins.ValueError",
    "EnvironmentSetupError": "builtins.RuntimeError", "namespace": "types.SimpleNamespace",
    "ClipAction": "gymnasium.wrappers.ClipAction", "GymToGymnasium": "emulation.gymnasium_form",
    "unroll_nested_dict": "flat_spaces.unroll_nested_dict",
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
    "models.Default": "models.FeedForward",
    "ocean.torch.Policy": "models.FeedForward", "ocean.torch.Recurrent": "models.LSTMWrapper",
}
GONE = {  # a name without an equivalent: its replacement
    "__version__": "this project has no numbered versions; a run's folder keeps those "
    "of its libraries", "set_buffers": "PufferEnv.__init__(buf) makes the arrays",
    "PettingZooWrapper": "write a class with the same methods that holds the environment",
    "Suppress": "contextlib.redirect_stdout", "silence_warnings": "warnings.catch_warnings",
    "vector.reset": "vecenv.reset()", "vector.step": "vecenv.step(actions)",
    "vector.make_seeds": "environment i gets seed + i",
    "vector.autotune": "python pufferl.py autotune ENV",
    "emulation.GymnaxPufferEnv": "vector.make('gymnax/NAME'); families.adapters.gymnax makes it",
    "emulation.nativize": "emulation.FlatObservation(space).unflatten",
    "emulation.emulate": "emulation.FlatObservation(space).flatten",
    "emulation.dtype_from_space": "flat_spaces.space_dtype",
    "emulation.flatten_space": "emulation.FlatObservation",
    "models.Convolutional": "models.MultiInputPolicy, which reads images by convolutions",
    "models.ProcgenResnet": "models.Impala, which reads images by residual convolutions",
    "pytorch.log_prob": "models.act(logits, action)[1]", "pytorch.entropy": "models.act(logits)[2]",
    "sweep.Carbs": "protein.Protein", "sweep.Hyperparameters": "protein.Space",
    "pufferl.sweep": "protein.Protein(env_name).optimize(), or python protein.py ENV",
    "NeptuneLogger": "Neptune's service has ended; WandbLogger, or a class with NoLogger's methods",
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
MODULES |= {f"environments.{family}": [] for family in FAMILIES}
OTHER_FAMILIES = ("bsuite", "dm_lab", "gpudrive", "gvgai", "kinetix", "links_awaken",
                  "metta", "minerl", "nmmo", "slimevolley", "smac", "trade_sim")
GONE |= dict.fromkeys([f"environments.{family}" for family in OTHER_FAMILIES],
                      "PufferLib's adapter of this package is not here; a Gymnasium or PettingZoo "
                      "environment needs none: vector.make(a function that makes it)")


def find(path, name):
    """Return the equivalent of pufferlib.PATH.NAME.

    Raises AttributeError, which names a replacement or similar names.
    """
    full = f"{path}.{name}" if path else name
    if full in MODULES or full in ALIASES:
        return importlib.import_module(f"pufferlib.{full}")
    if full in NAMES:
        module, _, attribute = NAMES[full].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    # PufferLib 2 had these names in modules of their own; here they are defined in this file.
    if path in ("wrappers", "postprocess", "exceptions", "utils"):
        return getattr(sys.modules[__name__], name)
    if path.startswith("environments.") and name == "env_creator":
        return functools.partial(environment_creator, path.partition(".")[2])
    if path.startswith("ocean") and not name.startswith("_") and (known := ocean_name(name)):
        if name[0].isupper():
            return our_environments.OceanPufferEnv.of(known)
        return importlib.import_module(f"pufferlib.{full}")
    modules = [importlib.import_module(module)
               for module in MODULES.get(path, ALIASES.get(path, "").split())]
    for module in modules:
        if name in vars(module):
            return vars(module)[name]
    if full in GONE:
        raise AttributeError(f"pufferlib.{full} has no equivalent here: {GONE[full]}.")
    known = [*(key for module in modules for key in vars(module)),
             *(key.rpartition(".")[2] for key in {**NAMES, **MODULES}
               if key.rpartition(".")[0] == path)]
    raise AttributeError(f"pufferlib.{full}: there is no such name, "
                         f"{our_ocean.nearest(name, known, ())} (docs/from_pufferlib.md)")


def __getattr__(name):
    return find("", name)


class Module(types.ModuleType):
    """A module of PufferLib whose names are in several modules here."""

    def __getattr__(self, name):
        if name in ("__path__", "__file__", "__all__", "__wrapped__"):
            raise AttributeError(name)
        return find(self.__name__.partition(".")[2], name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a module of this project or a Module as `pufferlib.NAME`."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        if package != "pufferlib":
            return None
        if name in GONE:  # `from pufferlib import NAME` hides a ModuleNotFoundError
            raise ImportError(f"{fullname} has no equivalent here: {GONE[name]}.", name=fullname)
        first, *others = name.split(".")
        is_ocean = first == "ocean" and all(map(ocean_name, others))
        if name not in MODULES and name not in ALIASES and not is_ocean:
            return None
        origin = str(ROOT / f"{ALIASES[name]}.py") if name in ALIASES else None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=origin)
        if first == "ocean" or name == "environments":
            spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        name = spec.name.partition(".")[2]
        if name not in ALIASES:
            return Module(spec.name)
        module = importlib.import_module(ALIASES[name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        """Add PufferLib's names to a module of this project, which is already loaded."""
        if isinstance(module, Module):
            return
        name = module.__spec__.name.partition(".")[2]
        module.__spec__ = module.__spec__.loader_state
        if name == "pufferl":
            alias = property(operator.attrgetter("environment"))
            module.PuffeRL.stats = module.PuffeRL.last_stats = alias
        if "__getattr__" not in vars(module):
            module.__getattr__ = functools.partial(find, name)

    def get_code(self, fullname):
        """Return the code that `python -m pufferlib.NAME` runs."""
        spec = importlib.util.find_spec(ALIASES[fullname.partition(".")[2]])
        return spec.loader.get_code(spec.name)


sys.meta_path.append(Finder())


# --------------------------------------------------------------------------------------------------
# Environments


class PufferEnv(our_emulation.PufferEnv):
    """emulation.PufferEnv with PufferLib's contract.

    `observations`, `rewards` and all other arrays stay the same from __init__ on, so C may keep
    their addresses. Nothing is set to 0 before a step. The values that `step` returns count, five
    or old Gym's four, even if the arrays differ. A truncation without a `final_observations` counts
    as a terminal. Each step copies the arrays, which emulation.PufferEnv does not.

    `buf` may also be another environment, as an instance or the name of one in C. A subclass then
    changes its steps:

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
            raise TypeError(f"PufferEnv got {', '.join(settings)}: settings need the name of an "
                            "environment in C.")
        if hasattr(buf, "single_observation_space"):
            self.inner, buf = our_emulation.wrap(buf), None
            self.single_observation_space = self.inner.single_observation_space
            self.single_action_space = self.inner.single_action_space
            self.num_agents = our_emulation.slots(self.inner)
            self.has_action_masks = self.inner.has_action_masks
        super().__init__(buf)
        self.agent_ids = range(self.num_agents)
        vars(self).update(self._row)  # the first arrays become self.observations and so on
        self._inner_view = None if self.inner is None else self.inner.views(self._rows, 0)

    def views(self, rows, first):
        return {"_rows": rows, "_row": super().views(rows, first)}

    def reset(self, seed=None):
        """Reset the inner environment; return (observations, infos)."""
        if self.inner is None:
            return super().reset(seed)
        self._clear()
        return self.observations, list(self.inner.reset_into(self._inner_view, seed))

    def step(self, actions):
        """Step the inner environment; return (observations, rewards, dones, infos)."""
        if self.inner is None:
            return super().step(actions)
        self._clear()
        self.actions[:] = actions
        infos = self.inner.step_into(self._inner_view)
        return self.observations, self.rewards, self.terminals | self.truncations, list(infos)

    def _clear(self):
        self.rewards[:], self.masks[:] = 0, True
        self.terminals[:], self.truncations[:] = False, False

    def check_returned(self, call, returned):
        """Check as PufferEnv does; observations may be another array."""
        if call == "step" and isinstance(returned, tuple | list) and len(returned) == 4:
            returned = [*returned[:2], returned[2], returned[2], returned[3]]
        self.check_values(call, returned)
        if np.shape(returned[0]) != self.observations.shape:
            raise EnvError(f"{self}: the observations of {call}() have the shape "
                           f"{np.shape(returned[0])}, expected {self.observations.shape}.")

    def reset_into(self, view, seed=None):
        returned = self.reset(seed)
        self.check_first("reset", returned)
        observations, infos = returned
        self._copy_to(view["_row"], observations)
        return infos

    def step_into(self, view):
        row = view["_row"]
        finals = self.final_observations.reshape(self.num_agents, -1).view(np.uint8)
        finals[:] = our_emulation.UNWRITTEN
        returned = self.step(self._env_actions(row["actions"]))
        self.check_first("step", returned)
        observations, rewards, *ends, infos = returned
        if len(ends) == 1:  # old Gym's `done` is true for a truncated step too
            ends = [ends[0] & ~self.truncations, self.truncations]
        terminals, truncations = ends
        # The rest of a truncated episode is estimated from its last observation; without one the
        # step counts as a terminal.
        if truncations.any():
            is_written = (finals != our_emulation.UNWRITTEN).any(1)
            terminals = terminals | (truncations & ~is_written)
            truncations = truncations & is_written
        finals[~truncations] = 0
        self._copy_to(row, observations, rewards=rewards, terminals=terminals,
                      truncations=truncations)
        return infos

    def _copy_to(self, row, observations, **others):
        arrays = {"observations": observations, "masks": self.masks,
                  "final_observations": self.final_observations,
                  "action_masks": self.action_masks, **others}
        for name, array in arrays.items():
            if row[name] is not None and array is not None:
                row[name][:] = array

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
        """Return (observations, rewards, terminals, truncations, infos, agent_ids, masks)."""
        return (self.observations, self.rewards, self.terminals, self.truncations, self.infos,
                self.agent_ids, self.masks)


def CySquared(observations, actions, rewards, terminals, num_envs, size):
    """Return the binding in PufferLib's template for environments in C.

    It steps in the environment's arrays: observations (num_envs, size · size) uint8, actions int32,
    rewards float32 and terminals bool (num_envs,). For a custom header
    `ocean.load("my_header.h").create(num_envs)` and `ocean.rows` do the same.
    """
    if size % 2 == 0:
        raise ValueError(f"size = {size}: must be odd, with the agent's start in the middle.")
    truncations = terminals.view("uint8") * 0
    arrays = observations, actions, rewards, terminals.view("uint8"), truncations
    envs = our_ocean.load("squared").create(num_envs, settings={"distance": size // 2})
    rows = our_ocean.rows(*arrays)
    return types.SimpleNamespace(
        arrays=arrays, reset=functools.partial(envs.reset, rows),
        step=functools.partial(envs.step, rows), render=envs.render, close=envs.close)


class EpisodeStats(gymnasium.Wrapper):
    """Add the sums of the numbers in all infos of an episode to its last info.

    The episode's return and length are logged without this wrapper.
    """

    def __init__(self, env):
        super().__init__(env)
        self.sums = {}

    def reset(self, *, seed=None, options=None):
        self.sums = {}
        arguments = {"seed": seed, "options": options}  # PufferLib's examples take neither
        return self.env.reset(**{name: value for name, value in arguments.items()
                                 if our_emulation.takes(self.env.reset, name)})

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        for name, value in importlib.import_module("flat_spaces").numeric_scalars(info).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if terminated or truncated:
            info = {**info, **self.sums}
        return observation, reward, terminated, truncated, info


def _as_it_is(env):
    """Return the environment: PettingZooPufferEnv does what these wrappers do.

    It masks agents that have left, averages infos over agents, and logs return and length.
    """
    return env


PettingZooTruncatedWrapper = MeanOverAgents = MultiagentEpisodeStats = _as_it_is


def ResizeObservation(env, downscale=2):
    """Keep every `downscale`-th row and column of pictures (height, width)."""
    space = env.observation_space
    small = gymnasium.spaces.Box(space.low[::downscale, ::downscale],
                                 space.high[::downscale, ::downscale],
                                 dtype=space.dtype.type)
    return gymnasium.wrappers.TransformObservation(
        env, lambda picture: picture[::downscale, ::downscale], small)


def ocean_name(name):
    """Return the environment in C of PufferLib's class or module, else None.

    Such names are NMMO3, TrashPickupEnv and puffer_breakout.
    """
    flat = name.lower().removeprefix("puffer_").replace("_", "")
    known = {known.replace("_", ""): known for known in our_ocean.names()}
    return known.get(flat) or known.get(flat.removesuffix("env"))


def ocean_creator(name="squared"):
    """Return the class of an environment in C, which raises for an unknown name."""
    return our_environments.OceanPufferEnv.of(ocean_name(name) or name)


def environment_creator(family, name=None):
    """Return the creator of an environment of one of FAMILIES, for vector.make."""
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
    """Compute kernels.advantage in PufferLib's layout.

    Arrays are (segments, T); rewards[:, t + 1] and terminals[:, t + 1] follow the action at t, and
    the last step has no advantage. Writes to `advantages` and returns it.
    """
    import torch

    def steps(tensor, dtype=torch.float32, first=0):
        return tensor[:, first : first + values.shape[1] - 1].T.to(dtype).contiguous()

    done = steps(terminals, torch.uint8, 1)
    flags, result = torch.zeros_like(done), torch.empty_like(steps(values))
    importlib.import_module("kernels").advantage(
        values.T.float().contiguous(), steps(rewards, first=1), done, flags,
        torch.zeros_like(result), steps(ratio),
        torch.ones(values.T.shape, dtype=torch.uint8), result, gamma=gamma, gae_lambda=gae_lambda,
        offset=torch.zeros(1), rho_clip=vtrace_rho_clip, c_clip=vtrace_c_clip)
    advantages[:, :-1], advantages[:, -1] = result.T, 0
    return advantages
