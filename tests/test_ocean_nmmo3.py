"""The rules of nmmo3 (docs/nmmo3.md) in a crowd; test_ocean_golden.py holds each of them.

The header is compiled once more with a function that adds up a world.
"""

import ctypes
import hashlib
import re

import numpy as np
import pytest
from ocean_vector import Vector
from test_ocean_golden import CROWD

import ocean

PROBE = r"""
#include "nmmo3/nmmo3.h"
#define CHECK(condition) if (!(condition)) return #condition
/* Adds up the whole world; NULL or what does not hold. */
const char* check(Env* env) {
    int64_t gold = 0, items[KINDS] = {0};
    int creatures = 0;
    uint8_t seen[TILE];
    for (int i = 0; i < env->num_agents; i++) {
        const Agent* agent = &env->agents[i];
        CHECK(agent->alive && agent->health > 0 && agent->health <= FULL && agent->gold >= 0);
        CHECK(env->who[agent->cell] == 1 + i && env->ground[agent->cell] == OPEN && env->land[agent->cell]);
        int count = 0;
        for (int kind = 0; kind < KINDS; kind++) {
            items[kind] += agent->held[kind];
            count += agent->held[kind];
        }
        CHECK(count == agent->bag_count && count <= env->bag);
        items[agent->weapon_kind] += agent->weapon > 0;
        items[ITEM_ARMOUR] += agent->armour > 0;
        items[ITEM_TOOL] += agent->tool > 0;
        gold += agent->gold;
    }
    for (int j = 0; j < env->num_agents * env->offers; j++)
        items[env->stalls[j].kind] += env->stalls[j].is_open;
    for (int f = 0; f < env->num_foes; f++) {
        const Foe* foe = &env->foes[f];
        CHECK(env->who[foe->cell] == 1 + env->num_agents + f && env->ground[foe->cell] == OPEN && foe->health > 0);
        CHECK(!(env->land[foe->cell] & VILLAGE) && tier_at(env, foe->cell) >= foe->tier);
    }
    for (int cell = 0; cell < env->cells; cell++) {
        creatures += env->who[cell] != 0;
        if (env->who[cell]) continue;
        memcpy(seen, env->look + (size_t)cell * TILE, TILE);
        paint(env, cell);
        CHECK(memcmp(seen, env->look + (size_t)cell * TILE, TILE) == 0);
    }
    CHECK(creatures == env->num_agents + env->num_foes);
    for (int kind = 0; kind < KINDS; kind++)
        CHECK(items[kind] == env->items_made[kind] - env->items_lost[kind]);
    CHECK(gold == env->gold_made - env->gold_lost);
    return NULL;
}
"""


class World(Vector):
    """One world, compiled with the probe."""

    def __init__(self, options, seed=0):
        super().__init__(self.header, 1, options, seed=seed)

    def check(self):
        """Return what does not hold in the world, or None."""
        function = self.envs.functions.check
        function.restype = ctypes.c_char_p
        return function(ctypes.c_void_p(self.envs.address))


@pytest.fixture(scope="module", autouse=True)
def probe(tmp_path_factory):
    """The header with the probe, named by its contents, so that no older build is found."""
    source = (ocean.FOLDER / "nmmo3" / "nmmo3.h").read_bytes()
    World.header = tmp_path_factory.mktemp("nmmo3") / f"probe_{hashlib.sha256(source).hexdigest()[:12]}.h"
    World.header.write_text(PROBE)


def test_the_page_names_the_defaults():
    """docs/nmmo3.md says `setting`=default for each setting."""
    page = (ocean.FOLDER.parent / "docs" / "nmmo3.md").read_text()
    said = dict(re.findall(r"`(\w+)`=(−?\d[\d.]*\d|−?\d)", page))
    defaults = {name: float(value) for name, value in ocean.load("nmmo3").settings.items()}
    assert {name: float(value.replace("−", "-")) for name, value in said.items()} == pytest.approx(defaults)


def test_a_crowd_keeps_the_world_whole():
    """No two on a tile, what is seen is what there is, gold and items add up, whatever is done."""
    world, rng, ends = World(CROWD), np.random.default_rng(0), np.zeros(2, int)
    for _ in range(1000):
        world.act(rng)
        world.step()
        assert world.check() is None, world.check()
        ends += world.terminals.sum(dtype=int), world.truncations.sum(dtype=int)
    log = world.envs.log()
    assert log["n"] == ends.sum() and (ends > 20).all()
    assert all(value > 0 for value in log.values())
    deaths = sum(log[field] for field in ("starved", "slain_by_foes", "slain_by_agents", "aged"))
    assert deaths == pytest.approx(1, rel=1e-5)
    assert log["perf"] == pytest.approx(log["score"] / 72, rel=1e-4) and 1 < log["gear"] < 15
