"""Families without Gymnasium ids: each that is installed runs, repeats its episodes and keeps to its spaces."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import environments
import ocean.__main__ as ocean_main
import vector

ROOT = Path(__file__).resolve().parent.parent
# name, its package, settings, whether a seed repeats the episodes
FAMILIES = [
    ("crafter/reward", "crafter", {"length": 30}, False),  # its creatures come in the order of their addresses
    ("procgen/coinrun", "procgen", {"num_envs": 2}, True),
    ("open_spiel/tic_tac_toe", "shimmy", {}, True),
    ("griddly/Single-Player/GVGAI/sokoban", "griddly", {"max_episode_steps": 20}, True),
    ("magent2/battle_v4", "magent2", {"map_size": 16, "max_cycles": 20}, False),
    ("microrts/16x16/basesWorkers16x16", "gym_microrts", {"max_steps": 30}, False),
    ("retro/Airstriker-Genesis-v0", "stable_retro", {}, True),
    ("gym/NetHackScore-v0", "nle", {}, False),  # the hero's strength differs under the same seed
    ("gym/MiniHack-Room-5x5-v0", "minihack", {}, False),
]


def allowed_actions(vecenv, rng):
    """Random actions among those that the masks allow."""
    masks, columns, first = vecenv.storage.action_masks, [], 0
    for size in vecenv.action_heads:
        allowed = np.ones((vecenv.num_agents, size)) if masks is None else masks[-1][:, first : first + size]
        columns.append(np.argmax(rng.random((vecenv.num_agents, size)) * (allowed > 0), axis=1))
        first += size
    return np.stack(columns, axis=1)


def episodes(vecenv, steps):
    rng = np.random.default_rng(0)
    history = [vecenv.reset(seed=11)[0].copy()]
    for _ in range(steps):
        history.append(vecenv.step(allowed_actions(vecenv, rng))[0].copy())
    return history


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_a_family_runs(family):
    """In a process of its own: a JVM, an emulator and old Gym would stay in this one."""
    if importlib.util.find_spec(family[1]) is None:
        pytest.skip(f"needs {family[1]}: docs/environments.md has its install line")
    script = f"import sys; sys.path.insert(0, 'tests'); from test_environments import *; check_family{family}"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def check_family(name, package, settings, repeats):
    with vector.make(name, 1, env_kwargs=settings) as vecenv:
        assert vecenv.num_agents >= 1
        first = episodes(vecenv, 40)
        space = vecenv.single_observation_space
        assert all(observation in space for observation in first[-1][vecenv.storage.valid[-1].astype(bool)])
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
    with pytest.raises(ImportError, match=r"missing/thing: .*package_that_nobody_has.*install line"):
        vector.make("missing/thing")
    assert environments.load_creator("missing_too/thing") is None


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
    assert not environments.load_creator("procgen/coinrun").takes_copies  # env.num_envs says how many


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
    pytest.importorskip("pyboy", reason="needs pyboy (requirements-extras.txt)")
    (tmp_path / "tetris.gb").write_bytes(cartridge("TETRIS"))
    with pytest.raises(ValueError, match="'TETRIS', expected POKEMON RED"):
        vector.make("pyboy/pokemon_red", env_kwargs={"rom": str(tmp_path / "tetris.gb")})


def test_pokemon_red_is_rewarded_for_tiles_levels_and_badges(tmp_path):
    pytest.importorskip("pyboy", reason="needs pyboy (requirements-extras.txt)")
    (tmp_path / "red.gb").write_bytes(cartridge("POKEMON RED"))
    env = environments.PokemonRed("pokemon_red", rom=str(tmp_path / "red.gb"), max_steps=4)
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
        self.trouble = trouble

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if self.t == 7 and self.trouble == "nan":
            seen[1] = np.nan
        if self.t == 7 and self.trouble == "raise":
            raise ConnectionError("the simulator hung up")
        if self.trouble == "first" or (self.t == 7 and self.trouble == "range"):
            seen[0] = 9
        reward = np.inf if self.t == 7 and self.trouble == "reward" else float(action)
        return seen, reward, self.t == 20 and self.trouble != "endless", False, {}
"""
TROUBLES = {
    "none": r"^Sound_Sound: no problem found",
    "nan": r"PROBLEM: step 7: observation\[1\] of agent 0 is nan, which is not finite",
    "reward": r"PROBLEM: step 7: the reward of agent 0 is inf",
    "first": r"PROBLEM: .*the observation of the first step\(\) breaks its space: element \(0,\) is 9.0",
    "range": r"look at this: step 7: observation\[0\] of agent 0 is 9.0, which lies outside Box",
    "endless": r"look at this: no episode ended in \d+ steps",
    "raise": r"(?s)PROBLEM: it raised this in its own code:.*in step.*ConnectionError: the simulator hung up",
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_check_finds_what_is_wrong_with_an_environment_in_python(trouble, tmp_path, capsys, monkeypatch):
    (tmp_path / "Sound.py").write_text(SOUND)
    options = ["--check", "--steps", "60", "--set", f"trouble={trouble}"]
    monkeypatch.setattr("sys.argv", ["ocean", f"{tmp_path}/Sound.py:Sound", *options])
    status = ocean_main.main()
    said = capsys.readouterr().out
    assert re.search(TROUBLES[trouble], said, re.MULTILINE), said
    assert status == (trouble in ("nan", "reward", "raise", "first")), said


@pytest.mark.parametrize("name, message", [
    ("gym/CartPole-v7", "Gymnasium knows no environment|v7"),
    ("gym/CartPole-v1 --set limit=3", "no setting limit; it has"),
    ("nothing.py:Env", "there is no such file"), ("gym/CartPole-v1 --png out.png", "is an environment in Python"),
])  # fmt: skip
def test_check_says_what_it_cannot_look_at(name, message, monkeypatch):
    name, *options = name.split()
    monkeypatch.setattr("sys.argv", ["ocean", name, *options, *([] if "--png" in options else ["--check"])])
    with pytest.raises(SystemExit, match=message):
        ocean_main.main()


def test_check_takes_pettingzoo(capsys, monkeypatch):
    pytest.importorskip("pettingzoo")
    monkeypatch.setattr("sys.argv", ["ocean", "pettingzoo/classic/rps_v2", "--check", "--steps", "50"])
    try:
        status = ocean_main.main()
    except SystemExit as error:
        pytest.skip(str(error))
    assert status == 0 and "no problem found" in capsys.readouterr().out
