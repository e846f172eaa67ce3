"""Families without Gymnasium ids: each that is installed runs, repeats its episodes
and keeps to its spaces."""

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from conftest import slow_but

import configuration
import emulation
import environments
import ocean.__main__ as ocean_main
import vector
from families import adapters

ROOT = Path(__file__).resolve().parent.parent
# name, its package, settings, whether a seed repeats the episodes
FAMILIES = [
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


def allowed_actions(vecenv, rng):
    """Random actions among those that the masks allow."""
    if not vecenv.action_heads:
        return rng.uniform(-1, 1, (vecenv.num_agents, vecenv.action_dims)).astype(np.float32)
    masks, columns, first = vecenv.storage.action_masks, [], 0
    for size in vecenv.action_heads:
        allowed = (np.ones((vecenv.num_agents, size)) if masks is None
                   else masks[-1][:, first : first + size])
        columns.append(np.argmax(rng.random((vecenv.num_agents, size)) * (allowed > 0), axis=1))
        first += size
    return np.stack(columns, axis=1)


def episodes(vecenv, steps):
    rng = np.random.default_rng(0)
    history = [vecenv.reset(seed=11)[0].copy()]
    for _ in range(steps):
        history.append(vecenv.step(allowed_actions(vecenv, rng))[0].copy())
    return history


def summed(name):
    """Of rewards that are several, the sum: the way out that the Fault names."""
    return gymnasium.wrappers.TransformReward(gymnasium.make(name), sum)


# Packages that nobody had in mind here: module, id, how it is made, steps (2,000, fewer of those
# that take too long, or whose later episodes differ under one seed by themselves)
BARE = [
    ("flappy_bird_gymnasium", "FlappyBird-v0", gymnasium.make, 2000),
    ("highway_env", "highway-fast-v0", gymnasium.make, 100),
    ("highway_env", "parking-v0", gymnasium.make, 200),
    ("mo_gymnasium", "deep-sea-treasure-v0", summed, 2000),
    ("lbforaging", "Foraging-8x8-2p-3f-v3", summed, 2000),
    ("rware", "rware-tiny-2ag-v2", summed, 2000),
    ("popgym", "popgym-RepeatPreviousEasy-v0", gymnasium.make, 2000),
    ("gym_pusht", "gym_pusht/PushT-v0", gymnasium.make, 2000),
    ("gymnasium_robotics", "PointMaze_UMaze-v3", gymnasium.make, 2000),
    ("panda_gym", "PandaReach-v3", gymnasium.make, 49),
    ("PyFlyt.gym_envs", "PyFlyt/QuadX-Hover-v4", gymnasium.make, 300),
    ("ale_py", "ALE/Pong-v5", gymnasium.make, 2000),
]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name", "make", "steps"), BARE,
                         ids=[name for _, name, *_ in BARE])
def test_an_environment_is_what_it_is_without_us(package, name, make, steps):
    """In a process of its own, as what a package registers stays."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}: docs/environments.md has its install line")
    how = "summed" if make is summed else "gymnasium.make"
    script = ("import sys; sys.path.insert(0, 'tests'); from test_environments import *; "
              f"import {package}; same_as_bare(lambda: {how}({name!r}), {steps})")
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                            text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def same_as_bare(make, steps=2000, seed=5):
    """Hold what the trainer sees of an environment of Gymnasium's, step by step, to what it gives
    by itself under the same seed and actions: observations unflattened, rewards, ends, final
    observations. Returns the episodes seen."""
    rng, episodes = np.random.default_rng(seed), 0
    with contextlib.closing(make()) as bare, vector.make(make, 1, backend="serial") as vecenv:
        observation, action = emulation.FlatObservation(bare.observation_space), emulation.FlatAction(bare.action_space)
        flat = emulation.FlatAction(bare.action_space).flat_space
        flat.seed(seed)

        def equal(seen, expected, t):
            ours, theirs = observation.flatten(observation.unflatten(seen)), observation.flatten(expected)
            np.testing.assert_array_equal(seen.reshape(ours.shape), ours,
                                          f"step {t}: flat and back")
            np.testing.assert_array_equal(ours, theirs, f"step {t}")

        bare.reset()  # as the question whether there are masks does
        equal(vecenv.reset(seed=seed)[0][0], bare.reset(seed=seed)[0], 0)
        masked = vecenv.storage.action_masks is not None
        for t in range(1, steps + 1):
            row = allowed_actions(vecenv, rng) if masked else np.reshape(flat.sample(), (1, -1))
            actions = np.reshape(row, (1, *vecenv.single_action_space.shape))
            seen, rewards, terminals, truncations, _ = vecenv.step(actions)
            expected, reward, terminated, truncated, _ = bare.step(action.unflatten(row[0]))
            assert rewards[0] == np.float32(np.ravel(reward)[0]), (
                f"step {t}: reward {rewards[0]}, not {reward}")
            assert (bool(terminals[0]), bool(truncations[0])) == (bool(terminated), bool(truncated)), f"step {t}"
            if terminated or truncated:
                if truncated:
                    equal(vecenv.storage.final_observations[0], expected, t)
                expected, episodes = bare.reset()[0], episodes + 1
            equal(seen[0], expected, t)
    return episodes


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_a_family_runs(family):
    """In a process of its own: a JVM, an emulator and old Gym would stay in this one."""
    if importlib.util.find_spec(family[1]) is None:
        pytest.skip(f"needs {family[1]}: docs/environments.md has its install line")
    script = f"import sys; sys.path.insert(0, 'tests'); from test_environments import *; check_family{family}"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True,
                            text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def check_family(name, package, settings, repeats):
    with vector.make(name, 1, env_kwargs=settings) as vecenv:
        assert vecenv.num_agents >= 1
        first = episodes(vecenv, 40)
        space = vecenv.single_observation_space
        assert all(observation in space
                   for observation in first[-1][vecenv.storage.valid[-1].astype(bool)])
        log = vecenv.log()
        if {"length", "max_episode_steps", "max_cycles", "max_steps"} & settings.keys():
            assert log["n"] >= 1 and log["episode_length"] <= 40
        if repeats:
            for a, b in zip(first, episodes(vecenv, 40), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_missing_package_is_named(monkeypatch):
    def missing(name, size=3, render_mode="human"):
        importlib.import_module("package_that_nobody_has")

    monkeypatch.setitem(environments.FAMILIES, "missing", missing)
    assert environments.load_creator("missing/thing").settings == {"size": 3}
    with pytest.raises(ImportError,
                       match=r"missing/thing: .*package_that_nobody_has.*install line"):
        vector.make("missing/thing")
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
gymnasium.register("somebody/Mine-v3", entry_point=Mine, max_episode_steps=9)
gymnasium.register("Two-v0", entry_point=Two)
"""


@pytest.fixture
def somebodys_package(tmp_path, monkeypatch):
    (tmp_path / "somebodys_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in ("somebody/Mine-v3", "Two-v0"):
        gymnasium.registry.pop(name, None)
    sys.modules.pop("somebodys_package", None)


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
def test_an_id_may_name_the_package_that_registers_it(somebodys_package, backend):
    name = "gym/somebodys_package:somebody/Mine-v3"
    assert environments.load_creator(name).settings == {"wind": 0.5, "max_episode_steps": 9,
                                                        "reward_scale": 1.0}
    with vector.make(name, 2, backend=backend, env_kwargs={"wind": 2.0}) as vecenv:
        vecenv.reset(seed=1)
        for _ in range(20):
            vecenv.step(np.array([0, 1]))
        assert vecenv.log()["episode_length"] <= 9
    with pytest.raises(ValueError, match=r"knows no environment Mine-v4"):
        vector.make("gym/somebodys_package:Mine-v4")


def test_an_id_without_a_time_limit_takes_one(somebodys_package):
    creator = environments.load_creator("gym/somebodys_package:Two-v0")
    for limit, last in ((creator.settings["max_episode_steps"], False), (3, True)):
        env = creator(max_episode_steps=limit)
        env.reset(seed=0)
        assert [env.step(0)[3] for _ in range(3)] == [False, False, last]
    with pytest.raises(ValueError, match=r"gym/package:ID"):
        vector.make("gym/SomethingElse-v4")
    with pytest.raises(ImportError, match=r"needs the package no_such_package"):
        vector.make("gym/no_such_package:Mine-v4")


@pytest.mark.parametrize("backend", slow_but(["serial", "multiprocessing"], "serial"))
def test_what_an_environment_breaks_is_told_without_a_traceback(somebodys_package, backend):
    options = ["--vec.backend", backend, "--env.num-envs", "2", "--train.total-timesteps", "2000"]
    command = [sys.executable, "pufferl.py", "train", "gym/somebodys_package:Two-v0", *options,
               "--data-dir"]
    result = subprocess.run([*command, str(somebodys_package)], cwd=ROOT, capture_output=True,
                            text=True, timeout=300)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    *_, words, where = result.stderr.splitlines()
    assert ("TransformReward(env, sum)" in words
            and "environment 0 of gym/somebodys_package" in where)


BROUGHT = """
import gymnasium, numpy as np
from beside import SIZE

class Old:
    observation_space = gymnasium.spaces.Box(-1, 1, (SIZE,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def seed(self, seed=None):
        self.random = np.random.default_rng(seed)
    def reset(self):
        return self.random.uniform(-1, 1, SIZE).astype(np.float32)
    def step(self, action):
        return self.reset(), 1.0, self.random.random() < 0.1, {}

class Masked(gymnasium.Env):
    observation_space, action_space = Old.observation_space, Old.action_space
    def reset(self, seed=None, options=None):
        return np.zeros(SIZE, np.float32), {"action_mask": np.ones(3)}

def broken():
    import no_such_package
"""


def test_a_file_has_what_lies_beside_it_and_its_errors_have_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("SIZE = 3\n")
    (tmp_path / "brought.py").write_text(BROUGHT)
    vecenv = vector.make(f"{tmp_path}/brought.py:Old", 2)  # its reset draws from what seed() has made
    vecenv.reset(seed=1)
    assert vecenv.observation_shape == (3,)
    vecenv.close()
    with pytest.raises(emulation.Fault, match="an action mask has 3 entries, the action space has 2"):
        vector.make(f"{tmp_path}/brought.py:Masked", 1).reset()
    assert configuration.load_attribute("policy.name", f"{tmp_path}/brought.py:SIZE") == 3  # a network's file, too
    with pytest.raises(ModuleNotFoundError) as error:
        name = f"{tmp_path}/brought.py:broken"
        configuration.load_env(name, configuration.load_config(name))
    assert "brought.py" in configuration.error_text(error.value)


def test_two_files_may_have_one_name(tmp_path):
    creators = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(f"def make():\n    return {folder!r}")
        creators.append(environments.load_creator(f"{tmp_path / folder / 'env.py'}:make"))
    assert [creator() for creator in creators] == ["first", "second"]


def test_settings_and_default_counts():
    assert environments.load_creator("crafter/reward").settings == {"size": 64, "length": 10_000}
    assert environments.load_creator("crafter/reward").takes_copies
    # env.num_envs says how many
    assert not environments.load_creator("procgen/coinrun").takes_copies


def test_dm_control_is_the_bare_environment():
    """Step by step and over episodes: the fields side by side, the limit as a truncation, the
    bounds of the actions."""
    pytest.importorskip("dm_control", reason="needs dm_control (requirements/extras.txt)")
    pytest.importorskip("shimmy", reason="needs shimmy (requirements/extras.txt)")
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
    with pytest.raises(ValueError, match="did you mean cartpole/swingup"):
        vector.make("dm_control/cartpole/swingupp")
    with pytest.raises(ValueError, match="there are acrobot/swingup, "):
        vector.make("dm_control/tetris")


def cartridge(title):
    """A Game Boy ROM of 32 KiB that does nothing for ever."""
    rom = bytearray(0x8000)
    rom[0x100:0x104] = bytes([0x00, 0xC3, 0x50, 0x01])  # nop; jump to 0x150
    rom[0x134 : 0x134 + len(title)] = title.encode()
    rom[0x147], rom[0x149] = 0x13, 3  # the kind of cartridge, and its memory
    rom[0x14D] = sum(-byte - 1 for byte in rom[0x134:0x14D]) & 0xFF
    rom[0x150:0x153] = bytes([0xC3, 0x50, 0x01])  # jump to itself
    return bytes(rom)


def test_pokemon_red_wants_a_rom_of_ones_own(tmp_path):
    with pytest.raises(ValueError, match=r"ROM of your own.*--env.rom"):
        vector.make("pyboy/pokemon_red")
    pytest.importorskip("pyboy", reason="needs pyboy (requirements/extras.txt)")
    (tmp_path / "tetris.gb").write_bytes(cartridge("TETRIS"))
    with pytest.raises(ValueError, match="'TETRIS', expected POKEMON RED"):
        vector.make("pyboy/pokemon_red", env_kwargs={"rom": str(tmp_path / "tetris.gb")})


def test_pokemon_red_is_rewarded_for_tiles_levels_and_badges(tmp_path):
    pytest.importorskip("pyboy", reason="needs pyboy (requirements/extras.txt)")
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

class Sound(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-5, 5, (2,), np.float32), gymnasium.spaces.Discrete(2)

    def __init__(self, trouble="none"):
        self.trouble, self.sum = trouble, 0.0
        if trouble == "large":
            self.observation_space = gymnasium.spaces.Box(-1e301, 1e301, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 2).astype(self.observation_space.dtype), {}

    def step(self, action):
        self.t += 1
        seen = self.np_random.uniform(-1, 1, 2).astype(self.observation_space.dtype)
        if self.t == 7 and self.trouble == "nan":
            seen[1] = np.nan
        if self.t == 7 and self.trouble == "large":
            seen[0] = 1e300
        if self.t == 7 and self.trouble == "raise":
            raise ConnectionError("the simulator hung up")
        if self.trouble == "first" or (self.t == 7 and self.trouble == "range"):
            seen[0] = 9
        self.sum = (self.sum if self.trouble == "sum" else 0.0) + float(action)
        reward = np.inf if self.t == 7 and self.trouble == "reward" else self.sum
        return seen, reward, self.t == 20 and self.trouble != "endless", False, {}
"""
TROUBLES = {
    "none": r"^Sound_Sound: no problem found",
    "nan": r"PROBLEM: step 7: observation\[1\] of agent 0 is nan, which is not finite",
    "large": r"PROBLEM: step 7: observation\[0\] of agent 0 is 1e\+300, which is too large for a float32",
    "reward": r"PROBLEM: step 7: the reward of agent 0 is inf",
    "first": r"PROBLEM: .*the observation of the first step\(\) breaks its space: "
    r"element \(0,\) is 9.0",
    "range": r"look at this: step 7: observation\[0\] of agent 0 is 9.0, which lies outside Box",
    "endless": r"look at this: no episode ended in \d+ steps",
    "sum": r"look at this: the return of random play moves from [\d.]+ in the earlier episodes to [\d.]+ in the later",
    "raise": r"(?s)PROBLEM: it raised this in its own code:.*in step.*ConnectionError: the "
    r"simulator hung up",
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_check_finds_what_is_wrong_with_an_environment_in_python(trouble, tmp_path, capsys,
                                                                 monkeypatch):
    (tmp_path / "Sound.py").write_text(SOUND)
    options = ["--check", "--steps", "60" if trouble != "sum" else "1000", "--set", f"trouble={trouble}"]
    monkeypatch.setattr("sys.argv", ["ocean", f"{tmp_path}/Sound.py:Sound", *options])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status = ocean_main.main()
    said, shown = capsys.readouterr()
    assert "step 0 of " in shown or trouble == "first"
    assert re.search(TROUBLES[trouble], said, re.MULTILINE), said
    assert status == (trouble in ("nan", "large", "reward", "raise", "first")), said


@pytest.mark.parametrize("name, message", [
    ("gym/CartPole-v7", "Gymnasium knows no environment|v7"),
    ("gym/CartPole-v1 --set limit=3", "no setting limit; it has"),
    ("nothing.py:Env", "there is no such file"),
    ("gym/CartPole-v1 --png out.png", "is an environment in Python"),
])
def test_check_says_what_it_cannot_look_at(name, message, monkeypatch):
    name, *options = name.split()
    monkeypatch.setattr("sys.argv",
                        ["ocean", name, *options, *([] if "--png" in options else ["--check"])])
    with pytest.raises(SystemExit, match=message):
        ocean_main.main()


def test_check_takes_pettingzoo(capsys, monkeypatch):
    pytest.importorskip("pettingzoo")
    monkeypatch.setattr("sys.argv",
                        ["ocean", "pettingzoo/classic/rps_v2", "--check", "--steps", "50"])
    try:
        status = ocean_main.main()
    except SystemExit as error:
        pytest.skip(str(error))
    assert status == 0 and "no problem found" in capsys.readouterr().out


def test_a_file_alone_says_what_is_in_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import gymnasium\nfrom os.path import join\ndef walk(): ...\nclass "
                    "Walk(gymnasium.Env): ...\n")
    for name in (str(path), f"{path}:"):
        with pytest.raises(ValueError,
                           match=r"say what in it makes the environment, .*mine.py:walk or Walk\."):
            environments.load_creator(name)
    with pytest.raises(ValueError, match="has no callable wolk; it has walk, Walk"):
        environments.load_creator(f"{path}:wolk")
    with pytest.raises(ValueError, match="no such file"):
        environments.load_creator("missing.py")


@pytest.mark.parametrize("within", [lambda env: env,
                                    lambda env: gymnasium.wrappers.TransformObservation(env, np.negative, None)],
                         ids=["outermost", "in a wrapper"])
def test_a_scale_of_rewards_leaves_the_return_and_the_spaces(within):
    """What is learnt from is scaled, what is logged is not, also if a wrapper stands around it, and in what is made
    from the spec."""
    creator = environments.load_creator("gym/CartPole-v1")
    plain, made = creator(), creator(reward_scale=0.25)
    assert (made.observation_space, made.action_space) == (plain.observation_space, plain.action_space)
    again = gymnasium.make(made.spec)
    for env in (made, again):
        env.reset(seed=0)
        assert env.step(0)[1] == 0.25
    with vector.make([lambda: within(creator(reward_scale=0.25, max_episode_steps=4))], 1, "serial") as vecenv:
        vecenv.reset(seed=0)
        rewards = [vecenv.step(np.zeros((1, 1), np.int32))[1].item() for _ in range(9)]
        log = vecenv.log()
    assert set(rewards) == {0.25}
    assert log["n"] == 2 and log["episode_return"] == log["episode_length"] == 4
