"""Environments by name: families, packages, files, and the command that checks one."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from small_envs import allowed_actions, same_as_bare

import configuration
import emulation
import environments
import ocean.__main__ as ocean_main
import vector
from errors import ConfigError, EnvError, error_text
from families import adapters

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = [  # name, its package, settings, whether a seed repeats the episodes
    # its creatures come in the order of their addresses
    ("crafter/reward", "crafter", {"length": 30}, False),
    ("procgen/coinrun", "procgen", {"num_envs": 2}, True),
    ("open_spiel/tic_tac_toe", "shimmy", {}, True),
    ("dm_control/hopper/hop", "dm_control", {"time_limit": 0.2}, True),
    ("griddly/Single-Player/GVGAI/sokoban", "griddly", {"max_episode_steps": 20}, True),
    ("magent2/battle_v4", "magent2", {"map_size": 16, "max_cycles": 20}, False),
    ("microrts/16x16/basesWorkers16x16", "gym_microrts", {"max_steps": 30}, False),
    ("retro/Airstriker-Genesis-v0", "stable_retro", {}, True),
    ("gym/NetHackScore-v0", "nle", {}, False),  # the hero's strength differs under the same seed
    ("gym/MiniHack-Room-5x5-v0", "minihack", {}, False),
]


def summed(name):
    """Of rewards that are several, the sum: the remedy that the error names."""
    return gymnasium.wrappers.TransformReward(gymnasium.make(name), sum)


# Other packages: module, id, how it is made, steps (2,000, fewer of those that take too long, or
# whose later episodes differ under one seed by themselves)
BARE = [
    ("flappy_bird_gymnasium", "FlappyBird-v0", "gymnasium.make", 2000),
    ("highway_env", "highway-fast-v0", "gymnasium.make", 100),
    ("highway_env", "parking-v0", "gymnasium.make", 200),
    ("mo_gymnasium", "deep-sea-treasure-v0", "summed", 2000),
    ("lbforaging", "Foraging-8x8-2p-3f-v3", "summed", 2000),
    ("rware", "rware-tiny-2ag-v2", "summed", 2000),
    ("popgym", "popgym-RepeatPreviousEasy-v0", "gymnasium.make", 2000),
    ("gym_pusht", "gym_pusht/PushT-v0", "gymnasium.make", 2000),
    ("gymnasium_robotics", "PointMaze_UMaze-v3", "gymnasium.make", 2000),
    ("panda_gym", "PandaReach-v3", "gymnasium.make", 49),
    ("PyFlyt.gym_envs", "PyFlyt/QuadX-Hover-v4", "gymnasium.make", 300),
    ("ale_py", "ALE/Pong-v5", "gymnasium.make", 2000),
]


def run_apart(package, script):
    """In another process, as a JVM, an emulator and what a package registers stay in it."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}: docs/environments.md has its install line")
    script = f"import sys; sys.path.insert(0, 'tests'); from test_environments import *; {script}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name", "make", "steps"), BARE, ids=[row[1] for row in BARE])
def test_an_environment_of_another_package_is_as_it_is_bare(package, name, make, steps):
    run_apart(package, f"import {package}; same_as_bare(lambda: {make}({name!r}), {steps})")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_a_family_runs(family):
    run_apart(family[1], f"check_family{family}")


def check_family(name, package, settings, repeats):
    def episodes():
        rng = np.random.default_rng(0)
        return [vecenv.reset(seed=11)[0].copy(), *(
            vecenv.step(allowed_actions(vecenv, rng))[0].copy() for _ in range(40))]

    with vector.make(name, 1, env_kwargs=settings) as vecenv:
        first, space = episodes(), vecenv.single_observation_space
        assert all(row in space for row in first[-1][vecenv.storage.valid[-1].astype(bool)])
        log = vecenv.log()
        if {"length", "max_episode_steps", "max_cycles", "max_steps"} & settings.keys():
            assert log["n"] >= 1 and log["episode_length"] <= 40
        if repeats:
            np.testing.assert_array_equal(first, episodes())


assert same_as_bare  # for run_apart, and for the script in docs/environments.md


def test_a_missing_package_is_named(monkeypatch):
    def missing(name, size=3, render_mode="human"):
        importlib.import_module("package_that_nobody_has")

    monkeypatch.setitem(environments.FAMILIES, "missing", missing)
    assert environments.load_creator("missing/thing").settings == {"size": 3}
    for name, package in (("missing/thing", "package_that_nobody_has"),
                          ("gym/no_such_package:Mine-v4", "no_such_package"),
                          ("pettingzoo/butterfly/nothing_v0", "nothing_v0")):
        with pytest.raises(ConfigError, match=package):
            vector.make(name)
    assert environments.load_creator("missing_too/thing") is None


PACKAGE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Mine(CartPoleEnv):
    def __init__(self, wind=0.5, render_mode=None):
        super().__init__()
        self.wind = wind
class Two(CartPoleEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, [reward, reward], *rest
gymnasium.register("mine/Mine-v3", entry_point=Mine, max_episode_steps=9)
gymnasium.register("Two-v0", entry_point=Two)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "some_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in ("mine/Mine-v3", "Two-v0"):
        gymnasium.registry.pop(name, None)
    sys.modules.pop("some_package", None)


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_an_id_may_name_the_package_that_registers_it(package, backend):
    name = "gym/some_package:mine/Mine-v3"
    settings = {"wind": 0.5, "max_episode_steps": 9, "reward_scale": 1.0}
    assert environments.load_creator(name).settings == settings
    with vector.make(name, 2, backend=backend, env_kwargs={"wind": 2.0}) as vecenv:
        vecenv.reset(seed=1)
        for _ in range(20):
            vecenv.step(np.array([0, 1]))
        assert vecenv.log()["episode_length"] <= 9


def test_an_id_without_a_time_limit_takes_one(package):
    creator = environments.load_creator("gym/some_package:Two-v0")
    for limit, last in ((creator.settings["max_episode_steps"], False), (3, True)):
        env = creator(max_episode_steps=limit)
        env.reset(seed=0)
        assert [env.step(0)[3] for _ in range(3)] == [False, False, last]


@pytest.mark.parametrize("backend, limits", [("package", (-1, 0)), ("serial", (-5, 0))])
def test_a_time_limit_that_would_end_each_episode_at_once_is_refused(backend, limits):
    for limit in limits:
        with pytest.raises(ConfigError, match=f"max_episode_steps is {limit}"):
            vector.make("gym/CartPole-v1", 2, backend, max_episode_steps=limit)


@pytest.mark.parametrize("limit", [None, -1])
def test_no_time_limit_of_ones_own(limit):
    with vector.make("gym/CartPole-v1", 1, "serial", max_episode_steps=limit) as vecenv:
        assert vecenv.reset(seed=0)[0].shape == (1, 4)


def test_a_step_may_take_forever():
    with vector.make("gym/CartPole-v1", 2, backend="serial", timeout=math.inf) as vecenv:
        vecenv.allocate(4)
        with vecenv._watchdog(0):
            pass


USER_FILE = """
import gymnasium, numpy as np
from beside import SIZE

class Plain(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (SIZE,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return np.zeros(SIZE, np.float32), {}
    def step(self, action):
        return np.zeros(SIZE, np.float32), 1.0, False, False, {}

class Masked(gymnasium.Env):
    observation_space, action_space = Plain.observation_space, Plain.action_space
    def reset(self, seed=None, options=None):
        return np.zeros(SIZE, np.float32), {"action_mask": np.ones(3)}

def broken():
    import no_such_package
"""


def test_a_file_has_what_lies_beside_it_and_its_errors_have_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("SIZE = 3\n")
    (tmp_path / "mine.py").write_text(USER_FILE)
    name = f"{tmp_path}/mine.py"
    with vector.make(f"{name}:Plain", 2) as vecenv:
        assert vecenv.reset(seed=1)[0].shape == (2, 3)
    with pytest.raises(EnvError, match="3"):
        vector.make(f"{name}:Masked", 1).reset()
    network = configuration.load_attribute("policy.name", f"{name}:Plain")  # a network's file, too
    assert network.__name__ == "Plain"
    with pytest.raises(ModuleNotFoundError) as error:
        vector.load_env(f"{name}:broken", configuration.load_config(f"{name}:broken"))
    assert "mine.py" in error_text(error.value)
    for wrong in (name, f"{name}:", f"{name}:brokn"):
        with pytest.raises(ValueError, match=r"Plain.*Masked|broken"):
            environments.load_creator(wrong)


def test_a_function_of_a_file_gets_the_seed_of_each_environment(tmp_path):
    (tmp_path / "env.py").write_text("def make(size=3, seed=0):\n    return size, seed")
    creator = environments.load_creator(f"{tmp_path / 'env.py'}:make")
    assert creator.settings == {"size": 3}
    assert emulation.build(creator, (), {"size": 4}, 7) == (4, 7)


def test_two_files_may_have_one_name(tmp_path):
    creators = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(f"def make():\n    return {folder!r}")
        creators.append(environments.load_creator(f"{tmp_path / folder / 'env.py'}:make"))
    assert [creator() for creator in creators] == ["first", "second"]


def test_a_file_runs_again_after_an_edit(tmp_path):
    path, made = tmp_path / "env.py", []
    for i, text in enumerate(("first", "second")):
        path.write_text(f"def make():\n    return {text!r}")
        os.utime(path, ns=(i, i))
        made.append(environments.load_creator(f"{path}:make")())
    assert made == ["first", "second"]


def test_dm_control_is_the_bare_environment():
    """Step by step and over episodes: the fields side by side, the limit as a truncation, the
    bounds of the actions."""
    pytest.importorskip("dm_control", reason="requirements/extras.txt")
    pytest.importorskip("shimmy", reason="requirements/extras.txt")
    from dm_control import suite

    name, rng, steps = "dm_control/cartpole/swingup", np.random.default_rng(0), 0
    assert environments.load_creator(name).settings == {"time_limit": 0.0}
    bare = suite.load("cartpole", "swingup", task_kwargs={"random": 7, "time_limit": 0.3})
    with vector.make(name, 1, backend="serial", env_kwargs={"time_limit": 0.3}) as vecenv:
        seen = vecenv.reset(seed=7)[0]
        for _ in range(3):
            expected = bare.reset()
            while not expected.last():
                fields = [expected.observation[field] for field in ("position", "velocity")]
                np.testing.assert_array_equal(seen[0], np.concatenate(fields).astype(np.float32))
                action = rng.uniform(-1, 1, (1, 1)).astype(np.float32)
                seen, rewards, terminals, truncations, _ = vecenv.step(action)
                expected = bare.step(action[0])
                assert rewards[0] == np.float32(expected.reward) and not terminals[0]
                assert truncations[0] == expected.last()
                steps += 1
            last = np.concatenate(list(expected.observation.values())).astype(np.float32)
            np.testing.assert_array_equal(vecenv.storage.final_observations[0], last)
    assert steps == 90
    for wrong, name in (("cartpole/swingupp", "cartpole/swingup"), ("tetris", "acrobot/swingup")):
        with pytest.raises(ValueError, match=name):
            vector.make(f"dm_control/{wrong}")


def cartridge(title):
    """A Game Boy ROM of 32 KiB that does nothing for ever."""
    rom = bytearray(0x8000)
    rom[0x100:0x104] = bytes([0x00, 0xC3, 0x50, 0x01])  # nop; jump to 0x150
    rom[0x134 : 0x134 + len(title)] = title.encode()
    rom[0x147], rom[0x149] = 0x13, 3  # the kind of cartridge, and its memory
    rom[0x14D] = sum(-byte - 1 for byte in rom[0x134:0x14D]) & 0xFF
    rom[0x150:0x153] = bytes([0xC3, 0x50, 0x01])  # jump to itself
    return bytes(rom)


def test_pokemon_red_wants_a_rom_and_is_rewarded_for_tiles_levels_and_badges(tmp_path):
    with pytest.raises(ValueError, match=r"env\.rom"):
        vector.make("pyboy/pokemon_red")
    pytest.importorskip("pyboy", reason="requirements/extras.txt")
    (tmp_path / "tetris.gb").write_bytes(cartridge("TETRIS"))
    with pytest.raises(ValueError, match="TETRIS"):
        vector.make("pyboy/pokemon_red", env_kwargs={"rom": str(tmp_path / "tetris.gb")})
    (tmp_path / "red.gb").write_bytes(cartridge("POKEMON RED"))
    env = adapters.PokemonRed("pokemon_red", rom=str(tmp_path / "red.gb"), max_steps=4)
    first, _ = env.reset(seed=0)
    assert first in env.observation_space
    memory, rewards = env.game.memory, []
    for address, value in ((env.X, 5), (env.LEVELS[0], 3), (env.BADGES, 0b101), (env.X, 0)):
        memory[address] = value
        _, reward, terminated, truncated, info = env.step(0)
        rewards.append(reward)
    assert rewards == pytest.approx([0.02, 1.5, 10.0, 0.0])  # x = 0 had been seen at the beginning
    assert truncated and not terminated and info == {"tiles": 2, "levels": 3, "badges": 2}
    env.reset()
    assert env.step(1)[4] == {"tiles": 1, "levels": 0, "badges": 0}
    env.close()


SOUND = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Sound(gymnasium.Env):
    def __init__(self, trouble="none"):
        self.trouble, self.sum = trouble, 0.0
        high, dtype = (1e301, np.float64) if trouble == "large" else (5, np.float32)
        self.observation_space, self.action_space = Box(-high, high, (2,), dtype), Discrete(2)

    def _see(self):
        return self.np_random.uniform(-1, 1, 2).astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        seen, reward = self._see(), float(action)
        if self.t == 7 or self.trouble == "first":
            values = {"nan": np.nan, "large": 1e300, "range": 9, "first": 9}
            seen[0] = values.get(self.trouble, seen[0])
            reward = np.inf if self.trouble == "reward" else reward
            if self.trouble == "raise":
                raise ConnectionError("the simulator hung up")
        self.sum += reward
        reward = self.sum if self.trouble == "sum" else reward
        return seen, reward, self.t == 20 and self.trouble != "endless", False, {}
"""
TROUBLES = {  # the words of the report, whether it is a problem
    "none": ("Sound_Sound", False),
    "nan": (r"7: observation\[0\].*nan", True),
    "large": (r"7: observation\[0\].*1e\+300", True),
    "reward": ("7: .*reward.*inf", True),
    "first": (r"\(0,\).*9\.0", True),
    "range": (r"7: observation\[0\].*9\.0.*5\.0", False),
    "endless": (r"episode.*\d+", False),
    "sum": (r"return.*[\d.]+.*[\d.]+", False),
    "raise": (r"(?s)step.*ConnectionError", True),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_check_finds_what_is_wrong_with_an_environment_in_python(trouble, tmp_path, capsys,
                                                                 monkeypatch):
    (tmp_path / "Sound.py").write_text(SOUND)
    steps = "60" if trouble != "sum" else "1000"
    monkeypatch.setattr("sys.argv", ["ocean", f"{tmp_path}/Sound.py:Sound", "--check", "--steps",
                                     steps, "--set", f"trouble={trouble}"])
    status, output = ocean_main.main(), capsys.readouterr().out
    words, problem = TROUBLES[trouble]
    assert re.search(words, output) and status == problem == ("PROBLEM" in output), output
    assert ("look at this" in output) == (trouble in ("range", "endless", "sum")), output


@pytest.mark.parametrize(("name", "words"), [
    ("gym/CartPole-v7", "v7"), ("gym/CartPole-v1 --set limit=3", "limit"),
    ("nothing.py:Env", "nothing.py"), ("gym/CartPole-v1 --png out.png", "Python")])
def test_check_refuses_what_it_cannot_look_at(name, words, monkeypatch):
    check = [] if "--png" in name else ["--check"]
    monkeypatch.setattr("sys.argv", ["ocean", *name.split(), *check])
    with pytest.raises(SystemExit, match=words):
        ocean_main.main()


def test_check_takes_pettingzoo(capsys, monkeypatch):
    pytest.importorskip("pettingzoo")
    monkeypatch.setattr("sys.argv",
                        ["ocean", "pettingzoo/classic/rps_v2", "--check", "--steps", "50"])
    try:
        status = ocean_main.main()
    except SystemExit as error:
        pytest.skip(str(error))
    assert status == 0 and "PROBLEM" not in capsys.readouterr().out


@pytest.mark.parametrize("within", [
    lambda env: env,
    lambda env: gymnasium.wrappers.TransformObservation(env, np.negative, None)])
def test_a_scale_of_rewards_leaves_the_return_and_the_spaces(within):
    """What is learnt from is scaled, what is logged is not, also within a wrapper, and in what is
    made from the spec."""
    creator = environments.load_creator("gym/CartPole-v1")
    plain, made = creator(), creator(reward_scale=0.25)
    assert made.observation_space == plain.observation_space
    assert made.action_space == plain.action_space
    for env in (made, gymnasium.make(made.spec)):
        env.reset(seed=0)
        assert env.step(0)[1] == 0.25
    creators = [lambda: within(creator(reward_scale=0.25, max_episode_steps=4))]
    with vector.make(creators, 1, "serial") as vecenv:
        vecenv.reset(seed=0)
        rewards = {vecenv.step(np.zeros((1, 1), np.int32))[1].item() for _ in range(9)}
        log = vecenv.log()
    assert rewards == {0.25} and log["n"] == 2
    assert log["episode_return"] == log["episode_length"] == 4
