"""The environments in C against tests/golden_ocean.json, which golden_ocean.py writes: games,
pictures, bounds of the settings."""

import json

import golden_ocean as golden
import numpy as np
import pytest
from ocean_vector import run_python

import ocean

STORED = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("case", golden.cases())
def test_a_game_goes_as_it_did(case):
    game, (parts, sums) = golden.cases()[case], STORED["games"][case]
    new_parts, new_sums = golden.record(*game)
    assert new_parts[0] == parts[0], "spaces, settings, log fields or keys"
    if game[0] in golden.USE_LIBM and golden.libm() != STORED["libm"]:
        np.testing.assert_allclose(new_sums, sums, atol=golden.TOLERANCE)
        return
    different = {(part, field) for part in range(golden.PARTS)
                 for k, field in enumerate(golden.RECORDED)
                 if new_parts[part + 1][8 * k : 8 * k + 8] != parts[part + 1][8 * k : 8 * k + 8]}
    assert not different


def test_the_stored_games_are_those_that_are_played():
    assert STORED["games"].keys() == golden.cases().keys()


def test_pictures():
    """Without a display."""
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    code = ("import sys, json; sys.path[:0] = ['tests', '.']; import golden_ocean as golden; "
            "print(json.dumps({case: golden.draw(*game)"
            " for case, game in golden.drawn_cases().items()}))")
    drawn = json.loads(run_python(code, SDL_VIDEODRIVER="dummy").splitlines()[-1])
    for case, (digest, colors) in STORED["pictures"].items():
        if golden.renderer() == STORED["renderer"]:
            assert drawn[case][0] == digest, case
        else:
            np.testing.assert_allclose(drawn[case][1], colors, atol=16, err_msg=case)


@pytest.mark.parametrize("name", ocean.names())
def test_settings_at_their_bounds(name):
    """What lies just within is accepted, what lies just outside is refused."""
    for setting, ends in STORED["bounds"][name].items():
        limits = golden.limits(ocean.load(name).settings[setting])
        for value, end in zip(ends, limits, strict=True):
            if value is None:
                assert golden.accepts(name, setting, end), setting
                continue
            assert golden.accepts(name, setting, value), setting
            with pytest.raises(ValueError, match=f"^{name}: "):
                ocean.load(name).create(1, settings={setting: golden.neighbour(value, end)})
    numbers = {key for key, value in ocean.load(name).settings.items() if not isinstance(value, bool)}
    assert STORED["bounds"][name].keys() == numbers
