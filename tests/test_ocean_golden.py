"""The environments in C against golden_ocean.json: hashes of all that some seeded games write.

    python tests/test_ocean_golden.py            # writes golden_ocean.json again
    python tests/test_ocean_golden.py snake moba # of these alone; says what has changed

games: what a player with some settings sees, in PARTS parts; a part has eight hexadecimal digits
for each array of RECORDED. Environments with fractions are compiled without
fused products, so that all machines round alike. Where sine, cosine and so on round in another way
than where the file was written (`libm`), only the first steps' sums are compared, to 1e-3.
pictures: a hash of two pictures, and mean colours, for another raylib or processor.
bounds: of each setting that is a number, the lowest and the highest value; null: all that fit. They
are written by hand.
"""

import collections
import ctypes
import functools
import hashlib
import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ocean_vector import VARIANTS, Vector, count, run_python

import ocean

FILE = Path(__file__).resolve().with_name("golden_ocean.json")
STORED = json.loads(FILE.read_text())
PARTS, FIRST_STEPS, TOLERANCE = 4, 8, 1e-3
RECORDED = ("observations", "rewards", "terminals", "truncations", "final_observations", "valid",
            "action_masks", "log")
USE_LIBM = {"acrobot", "asteroids", "boids", "breakout", "cartpole", "double_pendulum", "drone",
            "lander", "mountaincar", "pendulum", "pong", "target", "tetris"}
FRACTIONS = USE_LIBM | {"continuous", "enduro", "freeway", "moba", "stochastic"}
LEVELS = [{"level": i, "hard": i % 2 == 1, "seconds": 25.0, "frameskip": 1 + i} for i in range(8)]
CROWD = {"num_agents": 40, "num_foes": 20, "width": 32, "height": 24, "villages": 2, "home": 4,
         "tier_distance": 3, "vision": 3, "max_steps": 150, "berries": 0.1, "herbs": 0.2,
         "trees": 0.3, "fish": 0.5, "regrow": 9, "hunger": 1, "starving": 5, "xp_level": 2,
         "xp_foe": 20, "xp_agent": 5, "drop_tool": 0.5, "foe_health": 12, "offer_steps": 40,
         "xp_harvest": 3, "pvp_tier": 2}

# Players: from a vector and a generator to the next actions, (agents, heads or dimensions). They
# add, multiply and compare only, so that all machines play the same game.


def at_random(vector, rng):
    vector.act(rng)
    return vector.actions


def fall(vector, rng):
    """Lander: the main engine once in 20 steps."""
    return np.where(rng.random(len(vector.actions)) < 0.05, 2, 0)


def hold_gas(vector, rng):
    """Enduro: straight on, whatever comes."""
    return np.tile([0, 1], (len(vector.actions), 1))


def shoot(vector, rng):
    """Asteroids: turns to where the nearest rock will be, and shoots."""
    rock = vector.observations[:, 15:20].astype(np.float64)
    distance = np.sqrt(rock[:, 0] ** 2 + rock[:, 1] ** 2) * 512
    time = np.minimum(distance / 8, 60)
    x, y = rock[:, 0] * 512 + rock[:, 2] * 10 * time, rock[:, 1] * 512 + rock[:, 3] * 10 * time
    turn = np.where(y > 0.15 * np.maximum(x, 0), 2, np.where(y < -0.15 * np.maximum(x, 0), 1, 0))
    fire = (x > 0) & (np.abs(y) < 0.25 * x) & (distance < 400)
    return np.column_stack([turn, np.zeros(len(turn)), fire])


def place(vector, rng):
    """Tetris with placements: lines, and neither holes nor bumps."""
    rows = vector.observations[:, -211:-51].reshape(-1, 4, 40).astype(int)
    worth = 6 * rows[:, 0] - 4 * rows[:, 1] - rows[:, 2] - 2 * rows[:, 3]
    return np.where(rng.random(len(worth)) < 0.05, 40, worth.argmax(axis=1))


def attack(vector, rng):
    """Moba: half of the time towards the other base."""
    actions = at_random(vector, rng)
    actions[:, 0] = np.where(rng.random(len(actions)) < 0.5, 6, actions[:, 0])
    return actions


def go_up(vector, rng):
    """Freeway: blindly."""
    return np.ones(len(vector.actions))


# (name, settings, player, environments, steps); settings may be one for each environment.
PLAYED = [
    ("asteroids", {"saucer_seconds": 2.0, "ships": 20, "respawn_seconds": 0.1}, shoot, 8, 2500),
    ("asteroids", {"saucer_seconds": 1.0, "thrust": 3000.0, "drag": 0.0}, at_random, 8, 400),
    ("breakout", {"frameskip": 60, "ball_speed": 448.0, "paddle_width": 576.0, "balls": 200},
     at_random, 4, 400),
    ("connect4", {"depth": 0}, at_random, 512, 60),
    ("enduro", {"day": 20.0, "first_day": 12, "gas": 2.0}, at_random, 8, 900),
    ("enduro", [{"day": 20.0, "first_day": 2, "later_days": 1, "days": 1 + i, "reward_speed": 0.1}
                for i in range(4)], hold_gas, 4, 700),
    ("freeway", LEVELS, go_up, 8, 1600),
    ("lander", [{"max_impact": 20.0}, {"max_impact": 20.0, "wind": True}] * 4, fall, 8, 500),
    ("moba", {"tower_health": 60.0, "creep_speed": 0.6}, attack, 2, 1500),
    ("nmmo3", CROWD, at_random, 1, 1500),
    ("nmmo3", {**CROWD, "water": 0.95, "rock": 0.96, "trees": 0.8}, at_random, 1, 100),
    ("nmmo3", {**CROWD, "reward_vitals": 2.0, "vision": 16, "bow_reach": 8, "foe_sight": 16},
     at_random, 1, 200),
    ("nmmo3", {}, at_random, 1, 20),
    ("pendulum", {"reward_scale": 0.1, "mass": 1.2, "length": 0.9}, at_random, 4, 220),
    ("tetris", {"placements": True, "lines": 40}, place, 4, 500),
    ("tetris", {"placements": True, "height": 8}, at_random, 4, 200),
]


def cases():
    """{"name-number": (name, settings, player, environments, steps)}."""
    numbers = collections.Counter()
    games = {}
    for name, options in VARIANTS:
        game = name, options, at_random, count(name, options, 6), 240
        games[f"{name}-{numbers[name]}"] = game
        numbers[name] += 1
    for game in PLAYED:
        games[f"{game[0]}-{numbers[game[0]]}"] = game
        numbers[game[0]] += 1
    return games


@functools.cache
def library(name):
    header = ocean.FOLDER / name / f"{name}.h"
    flags = ("-ffp-contract=off", "-O1") if name in FRACTIONS else ()
    return ocean.Library(header, ocean.build(header, extra_flags=flags))


def describe(envs):
    one = envs.library
    return repr((one.settings, one.log_fields, one.fps, one.by_turns, envs.num_agents,
                 envs.observation_shape, str(envs.observation_dtype), envs.action_heads,
                 envs.action_dims, str(envs.single_observation_space), envs.has_valid,
                 [tuple(key) for key in envs.keys()[0]], envs.keys()[1]))


def libm():
    """A hash of how this machine's C library rounds."""
    functions, digest = ctypes.CDLL(None), hashlib.blake2b(digest_size=4)
    for name in ("sinf", "cosf", "expf", "logf", "tanhf"):
        function = getattr(functions, name)
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
        digest.update(np.array([function(0.37 * i) for i in range(1, 100)], np.float32).tobytes())
    return digest.hexdigest()


def begin(name, options, num_envs):
    vector = Vector(name, num_envs, options, seed=7, library=library(name))
    return vector, np.random.RandomState(0)


def record(name, options, player, num_envs, steps):
    """[[a description and the parts' hashes], the first steps' sums]."""
    vector, rng = begin(name, options, num_envs)
    vector.envs.every_final()
    description = hashlib.blake2b(describe(vector.envs).encode(), digest_size=4).hexdigest()
    parts, sums = [description], []
    for part in range(PARTS):
        digests = [hashlib.blake2b(digest_size=4) for _ in RECORDED]
        for step in range(part * steps // PARTS, (part + 1) * steps // PARTS):
            if part + step:
                actions = player(vector, rng)
                vector.poison(0xA5)
                vector.step(actions)
            if step < FIRST_STEPS:
                sums.append([float(np.abs(vector.observations).mean()), float(vector.rewards.mean())])
            for digest, field in zip(digests, RECORDED[:-1], strict=False):
                array = getattr(vector, field)
                if array is not None:
                    digest.update(array)
        digests[-1].update(repr(list(vector.envs.log().items())).encode())
        parts.append("".join(digest.hexdigest() for digest in digests))
    return [parts, np.round(sums, 5).tolist() if name in USE_LIBM else None]


def draw(name, options, player, num_envs, _):
    """[a hash of pictures after 10 and 90 steps, mean colours of 4 x 4 parts]."""
    vector, rng = begin(name, options, num_envs)
    digest = hashlib.blake2b(digest_size=4)
    for steps in (10, 80):
        for _ in range(steps):
            vector.step(player(vector, rng))
        picture = vector.envs.render(num_envs - 1)
        digest.update(repr(picture.shape).encode() + picture.tobytes())
    height, width = picture.shape[0] // 4, picture.shape[1] // 4
    parts = picture[: 4 * height, : 4 * width].reshape(4, height, 4, width, 3).mean(axis=(1, 3))
    return [digest.hexdigest(), parts.round().astype(int).ravel().tolist()]


def renderer():
    from importlib.metadata import version

    return [version("raylib_software"), platform.machine()]


def accepts(name, setting, value):
    try:
        ocean.load(name).create(1, settings={setting: value}).close()
    except ValueError:
        return False
    return True


def neighbour(value, end):
    """The next number of 32 bits towards `end`."""
    if isinstance(value, int):
        return value + (1 if end > value else -1)
    return float(np.nextafter(np.float32(value), np.float32(end)))


def limits(default):
    if isinstance(default, float):
        return -ocean.FLOAT_MAX, ocean.FLOAT_MAX
    return -(2**31), 2**31 - 1


@pytest.mark.parametrize("case", cases())
def test_a_game_goes_as_it_did(case):
    game, (parts, sums) = cases()[case], STORED["games"][case]
    new_parts, new_sums = record(*game)
    assert new_parts[0] == parts[0], "spaces, settings, log fields or keys"
    if game[0] in USE_LIBM and libm() != STORED["libm"]:
        np.testing.assert_allclose(new_sums, sums, atol=TOLERANCE)
        return
    different = {(part, field) for part in range(PARTS)
                 for k, field in enumerate(RECORDED)
                 if new_parts[part + 1][8 * k : 8 * k + 8] != parts[part + 1][8 * k : 8 * k + 8]}
    assert not different


def test_the_stored_games_are_those_that_are_played():
    assert STORED["games"].keys() == STORED["pictures"].keys() == cases().keys()


def test_pictures():
    """Without a display."""
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    code = ("import sys, json; sys.path[:0] = ['tests', '.']; import test_ocean_golden as golden; "
            "print('\\n' + json.dumps({case: golden.draw(*game)"
            " for case, game in golden.cases().items()}))")
    lines = run_python(code, SDL_VIDEODRIVER="dummy").splitlines()
    drawn = json.loads(next(line for line in lines if line[:1] == "{"))  # raylib logs before or after
    for case, (digest, colors) in STORED["pictures"].items():
        if renderer() == STORED["renderer"]:
            assert drawn[case][0] == digest, case
        else:
            np.testing.assert_allclose(drawn[case][1], colors, atol=16, err_msg=case)


@pytest.mark.parametrize("name", ocean.names())
def test_settings_at_their_bounds(name):
    """What lies just within is accepted, what lies just outside is refused."""
    for setting, ends in STORED["bounds"][name].items():
        default = ocean.load(name).settings[setting]
        for value, end in zip(ends, limits(default), strict=True):
            if value is None:
                assert accepts(name, setting, end), setting
                continue
            assert accepts(name, setting, value), setting
            with pytest.raises(ValueError, match=f"^{name}:"):
                ocean.load(name).create(1, settings={setting: neighbour(value, end)})
    numbers = {key for key, value in ocean.load(name).settings.items() if not isinstance(value, bool)}
    assert STORED["bounds"][name].keys() == numbers


def main(names):
    lines = []
    for kind, play in (("games", record), ("pictures", draw), ("bounds", None)):
        entries = dict(STORED[kind])
        if play:
            new = {case: play(*game) for case, game in cases().items() if game[0] in names}
            print(f"{kind} that have changed:", *(case for case in new if new[case] != entries.get(case)))
            entries = {case: (entries | new)[case] for case in cases()}
        rows = [f"{json.dumps(case)}: {json.dumps(entry)}" for case, entry in sorted(entries.items())]
        lines.append(f'"{kind}": {{\n' + ",\n".join(rows) + "}")
    lines += [f'"libm": "{libm()}"', f'"renderer": {json.dumps(renderer())}']
    FILE.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1:] or ocean.names())
