"""The rules of nmmo3, each in a scene of its own and all of them in a crowd.
docs/nmmo3.md says what they are.

The header is compiled once more with functions that look into a world, set a scene,
and add everything up.
"""

import ctypes
import hashlib
import re

import numpy as np
import pytest
from ocean_vector import Vector
from test_ocean_golden import CROWD

import ocean

OPEN, WATER, ROCK, SPENT, BERRIES, FISH, HERB, TREE, ORE, CRYSTAL = range(10)
KINDS = ("fish", "herb", "wood", "ore", "crystal", "hide", "sword", "bow", "staff",
         "armour", "tool")
SKILLS = ("fishing", "herbalism", "woodcutting", "mining", "carving", "melee", "archery", "magic")
STAY, UP, DOWN, LEFT, RIGHT = range(5)
STRIKE_AGENT = 2
PLAIN = {"num_agents": 2, "num_foes": 0, "width": 40, "height": 40, "villages": 1, "water": 0.0,
         "rock": 1.0, "berries": 0.0, "fish": 0.0, "herbs": 0.0, "trees": 0.0, "ores": 0.0,
         "crystals": 0.0, "home": 5,
         "tier_distance": 5, "regrow": 100, "luck": 0.0, "vision": 3, "pvp_tier": 2,
         "max_steps": 100000, "spread": 0.0, "xp_level": 5, "foe_health": 30, "foe_pause": 2,
         "xp_foe": 4}
PROBE = r"""
#include "nmmo3/nmmo3.h"
#define FIELD(name) \
    int get_##name(Env* env, int i) { return (int)env->agents[i].name; } \
    void set_##name(Env* env, int i, int value) { env->agents[i].name = value; know(env, &env->agents[i]); }
FIELD(health) FIELD(food) FIELD(water) FIELD(gold) FIELD(hunger_clock) FIELD(bag_count) FIELD(offer_count) FIELD(life)
int get_column(Env* env, int i) { return env->agents[i].column - env->border; }
int get_row(Env* env, int i) { return env->agents[i].row - env->border; }
int get_xp(Env* env, int i, int skill) { return env->agents[i].xp[skill]; }
int get_bag(Env* env, int i, int kind, int tier) { return env->agents[i].bag[kind][tier - 1]; }
int get_ground(Env* env, int column, int row) { return env->ground[cell_at(env, column, row)]; }
void set_ground(Env* env, int column, int row, int ground, int tier) {
    int cell = cell_at(env, column, row);
    env->ground[cell] = (uint8_t)ground;
    env->land[cell] = (uint8_t)(tier | (env->land[cell] & VILLAGE));
    if (!env->who[cell]) paint(env, cell);
}
void teleport(Env* env, int i, int column, int row) {
    Agent* agent = &env->agents[i];
    env->who[agent->cell] = 0;
    show(env, agent->cell, 0, 0, 0, 0);
    stand(env, &agent->cell, &agent->column, &agent->row, cell_at(env, column, row));
    env->who[agent->cell] = (uint16_t)(1 + i);
    show_agent(env, agent);
}
void arm(Env* env, int i, int kind, int tier) {
    env->items_lost[env->agents[i].weapon_kind]++;
    env->items_made[kind] += tier > 0;
    env->agents[i].weapon_kind = (uint8_t)kind;
    env->agents[i].weapon = (uint8_t)tier;
    show_agent(env, &env->agents[i]);
}
void give(Env* env, int i, int kind, int tier, int n) { /* or take, where n is below 0 */
    put(env, &env->agents[i], kind, tier, n);
    env->items_made[kind] += n;
}
void pay(Env* env, int i, int gold) {
    env->agents[i].gold += gold;
    env->gold_made += gold;
}
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
    """One world with the probe's functions as methods: world.get_health(0),
    world.give(0, "wood", 1, 3), ..."""

    def __init__(self, options, seed=0):
        super().__init__(self.header, 1, options, seed=seed)

    def __getattr__(self, name):
        function = getattr(self.envs.functions, name)
        function.restype = (ctypes.c_char_p if name == "check"
                            else None if name.startswith("set") else ctypes.c_int)

        def call(*arguments):
            numbers = [KINDS.index(a) if a in KINDS else SKILLS.index(a)
                       if isinstance(a, str) else a
                       for a in arguments]
            return function(ctypes.c_void_p(self.envs.address), *numbers)

        return call

    def act(self, *actions):
        """One step; (move, what, price step) of the first agents, the others do nothing."""
        self.actions[:] = 0
        for i, action in enumerate(actions):
            self.actions[i, : len(action)] = action
        self.envs.step(self.rows)
        assert self.check() is None, self.check()
        return self

    def own(self, i=0):
        return self.observations[i, -84:].astype(int)

    def mask(self, i=0):
        return self.masks[i, 5:41].astype(bool)


@pytest.fixture(scope="module", autouse=True)
def probe(tmp_path_factory):
    """The header with the probe, named by its contents, so that no older build is found."""
    source = (ocean.FOLDER / "nmmo3" / "nmmo3.h").read_bytes()
    World.header = tmp_path_factory.mktemp("nmmo3") / f"probe_{hashlib.sha256(source).hexdigest()[:12]}.h"
    World.header.write_text(PROBE)


def scene(seed=0, **options):
    """A plain with the village somewhere, agent 0 eight and agent 1 eleven steps from
    it, on land of tier 2."""
    world = World({**PLAIN, **options}, seed)
    for row in range(40):
        for column in range(40):
            world.set_ground(column, row, OPEN, 2)
    for i in range(2):
        world.teleport(i, 20 + 3 * i, 20)
        world.arm(i, "sword", 1)
        world.set_hunger_clock(i, 4)
    return world


def use(kind):
    return 3 + KINDS.index(kind)


def sell(kind):
    return 14 + KINDS.index(kind)


def buy(kind):
    return 25 + KINDS.index(kind)


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
        world.random_actions(rng)
        world.step()
        assert world.check() is None, world.check()
        ends += world.terminals.sum(dtype=int), world.truncations.sum(dtype=int)
    log = world.envs.log()
    assert log["n"] == ends.sum() and (ends > 20).all()
    assert all(value > 0 for value in log.values())
    deaths = sum(log[field] for field in ("starved", "slain_by_foes", "slain_by_agents", "aged"))
    assert deaths == pytest.approx(1, rel=1e-5)
    assert log["perf"] == pytest.approx(log["score"] / 72, rel=1e-4) and 1 < log["gear"] < 15


def test_what_the_mask_forbids_does_nothing():
    """From a saved state an illegal action leaves exactly what doing nothing leaves, a
    legal one something else."""
    world, rng, counts = World({**CROWD, "num_foes": 10}, 3), np.random.default_rng(0), np.zeros(2, int)
    for t in range(400):
        world.random_actions(rng)
        world.step()
        if t % 8:
            continue
        saved, masks, i = world.envs.save(), world.masks[:, 5:41].copy(), int(rng.integers(40))
        nothing = world.act().envs.save()
        for what in range(1, 36):
            world.envs.load(saved)
            world.actions[:] = 0
            world.actions[i] = 0, what, 7
            world.step()
            assert np.array_equal(world.envs.save(), nothing) == (masks[i, what] == 0), what
            counts[masks[i, what]] += 1
        world.envs.load(saved)
    assert (counts > [600, 80]).all()


def test_drinking_eating_and_harvesting():
    world = scene()
    for column, row, ground in ((20, 19, WATER), (20, 21, BERRIES), (19, 20, TREE), (21, 20, FISH)):
        world.set_ground(column, row, ground, 1)
    world.set_food(0, 30), world.set_water(0, 30)
    world.act((UP,))
    assert (world.get_water(0), world.get_food(0), world.get_row(0)) == (100, 30, 20)
    world.act((DOWN,))
    assert world.get_food(0) == 70 and world.get_ground(20, 21) == SPENT and world.rewards[0] == 0
    world.act((LEFT,))
    assert world.get_bag(0, "wood", 1) == 1 and world.get_xp(0, "woodcutting") == 1
    assert world.rewards[0] == pytest.approx(0.5 / 5), "a fifth of the way to level 2"
    world.act((LEFT,))
    assert world.get_bag(0, "wood", 1) == 1 and world.get_column(0) == 20, "spent, and in the way"
    world.act((RIGHT,))
    assert world.get_bag(0, "fish", 1) == 1 and world.get_ground(21, 20) == WATER
    states = []
    for _ in range(100):
        world.act()
        states.append([world.get_ground(*at) for at in ((20, 21), (19, 20), (21, 20))])
    assert states[95:97] == [[SPENT, SPENT, WATER], [BERRIES, SPENT, WATER]], "after 100 steps"
    assert states[99] == [BERRIES, TREE, FISH]


def test_a_kill_ends_a_life_and_pays():
    world = scene(xp_agent=4)
    world.set_health(1, 3), world.pay(1, 20)
    world.give(1, "fish", 1, 3), world.give(1, "armour", 2, 1), world.give(1, "wood", 3, 2)
    world.give(0, "ore", 1, 8)
    world.act((), (STAY, sell("fish"), 2))
    assert world.get_offer_count(1) == 1
    world.teleport(1, 21, 20)
    life, gold = world.get_life(1), world.get_gold(0) + world.get_gold(1)
    world.act((STAY, STRIKE_AGENT), (UP, 0))
    assert world.terminals.tolist() == [0, 1] and world.truncations.tolist() == [0, 0]
    assert world.rewards[1] == -1 and world.rewards[0] == pytest.approx(0.5 * 4 / 5)
    assert world.get_xp(0, "melee") == 4 and world.get_gold(0) == gold
    loot = [world.get_bag(0, *item) for item in (("sword", 1), ("armour", 2), ("wood", 3), ("fish", 1))]
    assert loot == [1, 1, 2, 0] and world.get_bag_count(0) == 12, "no room for the fish"
    assert (world.get_life(1), world.get_health(1), world.get_gold(1)) == (life + 1, 100, 5)
    assert world.get_offer_count(1) == 0 and world.own(0)[62] == 0, "its offers are gone"
    log = world.envs.log()
    assert log["n"] == 1 and log["slain_by_agents"] == 1 and log["score"] == 0


def test_the_cheapest_then_the_oldest_offer_is_bought():
    world = scene(num_agents=5)
    for i in range(5):
        world.pay(i, 100)
        world.give(i, "wood", 1 + (i == 3), i < 4)
    gold = [world.get_gold(i) for i in range(5)]
    for i, step in ((0, 5), (1, 3), (2, 3)):
        world.act(*[(0,)] * i, (0, sell("wood"), step))
    assert world.own(4)[[64, 75]].tolist() == [1, 4] and world.mask(4)[buy("wood")]
    wait = [(0,)] * 4
    world.act(*wait, (0, buy("wood"), 2))
    assert world.get_bag(4, "wood", 1) == 0, "3 gold are not enough"
    for seller, price in ((1, 4), (2, 4), (0, 6)):
        world.act(*wait, (0, buy("wood"), 7))
        gold[4] -= price
        gold[seller] += price  # a tenth of it is nothing yet
        assert [world.get_gold(i) for i in range(5)] == gold
    assert world.get_bag(4, "wood", 1) == 3 and not world.mask(4)[buy("wood")]
    world.act(*wait[1:], (0, sell("wood"), 7))
    world.act(*wait, (0, buy("wood"), 7))
    assert world.get_bag(4, "wood", 2) == 1
    assert (world.get_gold(4), world.get_gold(3)) == (gold[4] - 16, gold[3] + 15), "a fee of 1.6"
