"""The rules of nmmo3, each in a scene of its own and all of them in a crowd.
docs/nmmo3.md says what they are.

The header is compiled once more with functions that look into a world, set a scene,
and add everything up.
"""

import ctypes
import hashlib
import re
from collections import deque

import numpy as np
import pytest
from ocean_vector import Vector

import ocean

OPEN, WATER, ROCK, SPENT, BERRIES, FISH, HERB, TREE, ORE, CRYSTAL = range(10)
KINDS = ("fish", "herb", "wood", "ore", "crystal", "hide", "sword", "bow", "staff",
         "armour", "tool")
SKILLS = ("fishing", "herbalism", "woodcutting", "mining", "carving", "melee", "archery", "magic")
STAY, UP, DOWN, LEFT, RIGHT = range(5)
STRIKE_FOE, STRIKE_AGENT = 1, 2
PLAIN = {"num_agents": 2, "num_foes": 0, "width": 40, "height": 40, "villages": 1, "water": 0.0,
         "rock": 1.0, "berries": 0.0, "fish": 0.0, "herbs": 0.0, "trees": 0.0, "ores": 0.0,
         "crystals": 0.0, "home": 5,
         "tier_distance": 5, "regrow": 100, "luck": 0.0, "vision": 3, "pvp_tier": 2,
         "max_steps": 100000, "spread": 0.0, "xp_level": 5, "foe_health": 30, "foe_pause": 2,
         "xp_foe": 4}
CROWD = {"num_agents": 40, "num_foes": 20, "width": 32, "height": 24, "villages": 2, "home": 4,
         "tier_distance": 3,
         "vision": 3, "max_steps": 150, "berries": 0.1, "herbs": 0.2, "trees": 0.3, "fish": 0.5,
         "regrow": 9,
         "hunger": 1, "starving": 5, "xp_level": 2, "xp_foe": 20, "xp_agent": 5, "drop_tool": 0.5,
         "foe_health": 12, "offer_steps": 40, "xp_harvest": 3, "pvp_tier": 2}

PROBE = r"""
#include "nmmo3/nmmo3.h"
#define FIELD(name) \
    int get_##name(Env* env, int i) { return (int)env->agents[i].name; } \
    void set_##name(Env* env, int i, int value) { env->agents[i].name = value; know(env, &env->agents[i]); }
FIELD(health) FIELD(food) FIELD(water) FIELD(gold) FIELD(age) FIELD(weapon) FIELD(weapon_kind) FIELD(armour) FIELD(tool)
FIELD(hunger_clock) FIELD(bag_count) FIELD(offer_count) FIELD(gained) FIELD(combat_level) FIELD(gather_level)
FIELD(life) FIELD(struck)
int get_column(Env* env, int i) { return env->agents[i].column - env->border; }
int get_row(Env* env, int i) { return env->agents[i].row - env->border; }
int get_level(Env* env, int i, int skill) { return env->agents[i].levels[skill]; }
int get_xp(Env* env, int i, int skill) { return env->agents[i].xp[skill]; }
int get_bag(Env* env, int i, int kind, int tier) { return env->agents[i].bag[kind][tier - 1]; }
int get_ground(Env* env, int column, int row) { return env->ground[cell_at(env, column, row)]; }
int get_land(Env* env, int column, int row) { return env->land[cell_at(env, column, row)]; }
int get_who(Env* env, int column, int row) { return env->who[cell_at(env, column, row)]; }
int get_well(Env* env, int i, int is_row) {
    Place well = env->wells[env->nearest[env->agents[i].cell]];
    return (is_row ? well.row : well.column) - env->border;
}
int get_tick(Env* env) { return (int)env->tick; }
void set_ground(Env* env, int column, int row, int ground, int tier) {
    int cell = cell_at(env, column, row);
    env->ground[cell] = (uint8_t)ground;
    env->land[cell] = (uint8_t)(tier | (env->land[cell] & VILLAGE));
    if (!env->who[cell]) paint(env, cell);
}
void set_level(Env* env, int i, int skill, int level) {
    env->agents[i].gained += level - env->agents[i].levels[skill];
    env->agents[i].levels[skill] = (uint8_t)level;
    env->agents[i].xp[skill] = env->need[level];
    know(env, &env->agents[i]);
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
int foe_field(Env* env, int f, int field) {
    const Foe* foe = &env->foes[f];
    const int fields[] = {foe->column - env->border, foe->row - env->border, foe->health, foe->tier, foe->weapon_kind,
                          foe->target, foe->pause};
    return fields[field];
}
void place_foe(Env* env, int f, int column, int row, int tier, int kind) {
    Foe* foe = &env->foes[f];
    env->who[foe->cell] = 0;
    show(env, foe->cell, 0, 0, 0, 0);
    *foe = (Foe){.target = -1, .tier = (uint8_t)tier, .weapon_kind = (uint8_t)kind, .health = foe_full(env, tier)};
    stand(env, &foe->cell, &foe->column, &foe->row, cell_at(env, column, row));
    env->who[foe->cell] = (uint16_t)(1 + env->num_agents + f);
    show_foe(env, foe);
}
#define CHECK(condition) if (!(condition)) return #condition
/* Adds up the whole world; NULL or what does not hold. */
const char* check(Env* env) {
    int64_t gold = 0, items[KINDS] = {0};
    int creatures = 0, offers = 0, listed = 0, nodes = 0;
    uint8_t seen[TILE];
    for (int i = 0; i < env->num_agents; i++) {
        const Agent* agent = &env->agents[i];
        CHECK(agent->alive && agent->health > 0 && agent->health <= FULL && agent->gold >= 0);
        CHECK(agent->food >= 0 && agent->food <= FULL && agent->water >= 0 && agent->water <= FULL);
        CHECK(env->who[agent->cell] == 1 + i && env->ground[agent->cell] == OPEN && env->land[agent->cell]);
        CHECK(agent->cell == agent->row * env->stride + agent->column);
        int count = 0, mine = 0, levels = 0;
        for (int kind = 0; kind < KINDS; kind++) {
            int held = 0;
            for (int t = 0; t < TIERS; t++)
                held += agent->bag[kind][t];
            CHECK(held == agent->held[kind]);
            items[kind] += held;
            count += held;
        }
        CHECK(count == agent->bag_count && count <= env->bag);
        items[agent->weapon_kind] += agent->weapon > 0;
        items[ITEM_ARMOUR] += agent->armour > 0;
        items[ITEM_TOOL] += agent->tool > 0;
        for (int j = i * env->offers; j < (i + 1) * env->offers; j++) {
            if (!env->stalls[j].is_open) continue;
            mine++;
            items[env->stalls[j].kind]++;
        }
        CHECK(mine == agent->offer_count);
        offers += mine;
        for (int skill = 0; skill < SKILLS; skill++) {
            int level = agent->levels[skill];
            CHECK(agent->xp[skill] >= env->need[level] && (level == LEVELS || agent->xp[skill] < env->need[level + 1]));
            levels += level - 1;
        }
        CHECK(levels == agent->gained);
        gold += agent->gold;
        memcpy(seen, env->look + (size_t)agent->cell * TILE, TILE);
        show_agent(env, agent);
        CHECK(memcmp(seen, env->look + (size_t)agent->cell * TILE, TILE) == 0);
    }
    for (int f = 0; f < env->num_foes; f++) {
        const Foe* foe = &env->foes[f];
        CHECK(env->who[foe->cell] == 1 + env->num_agents + f && env->ground[foe->cell] == OPEN && foe->health > 0);
        CHECK(!(env->land[foe->cell] & VILLAGE) && tier_at(env, foe->cell) >= foe->tier);
    }
    for (int cell = 0; cell < env->cells; cell++) {
        creatures += env->who[cell] != 0;
        nodes += env->ground[cell] == SPENT;
        if (env->who[cell]) continue;
        memcpy(seen, env->look + (size_t)cell * TILE, TILE);
        paint(env, cell);
        CHECK(memcmp(seen, env->look + (size_t)cell * TILE, TILE) == 0);
    }
    CHECK(creatures == env->num_agents + env->num_foes);
    CHECK(nodes <= env->spent_count);
    for (int kind = 0; kind < KINDS; kind++) {
        for (int t = 0; t < TIERS; t++) {
            for (int step = 0; step < STEPS; step++) {
                uint32_t since = 0;
                int previous = -1;
                for (int j = env->queues[kind][t][step].first; j >= 0; j = env->stalls[j].next) {
                    const Offer* offer = &env->stalls[j];
                    CHECK(offer->is_open && offer->kind == kind && offer->tier == t + 1 && offer->step == step);
                    CHECK(offer->since >= since && offer->previous == previous);
                    since = offer->since;
                    previous = j;
                    listed++;
                }
                CHECK(env->queues[kind][t][step].last == previous);
                CHECK((env->steps_offered[kind][t] >> step & 1) == (previous >= 0));
            }
            CHECK((env->tiers_offered[kind] >> t & 1) == (env->steps_offered[kind][t] != 0));
        }
        CHECK(items[kind] == env->items_made[kind] - env->items_lost[kind]);
    }
    CHECK(listed == offers);
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
    """The header with the probe, named by its contents so that no older
    build of it is found again."""
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 60, "height": 60}, "world is too small"),
        ({"num_agents": 16000}, "at most 16384"),
        ({"vision": 0}, "vision must lie within"),
        ({"water": 0.7}, "water < rock"),
        ({"trees": 0.99}, "shares and chances"),
        ({"craft_cost": 13}, "craft_cost must lie within"),
        ({"offers": 9}, "offers must lie within"),
        ({"pvp_tier": 0}, "pvp_tier"),
        ({"bow_reach": 9}, "reaches must lie within"),
        ({"toughness": 0.0}, "toughness"),
        ({"regrow": 0}, "must be 1 or more"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        ocean.load("nmmo3").create(1, settings=options)


def test_the_page_names_the_defaults():
    """docs/nmmo3.md says `setting`=default for each setting."""
    page = (ocean.FOLDER.parent / "docs" / "nmmo3.md").read_text()
    said = dict(re.findall(r"`(\w+)`=(−?\d[\d.]*\d|−?\d)", page))
    defaults = {name: float(value) for name, value in ocean.load("nmmo3").settings.items()}
    assert {name: float(value.replace("−", "-")) for name, value in said.items()} == pytest.approx(defaults)


# The land


@pytest.mark.parametrize("seed", range(3))
def test_land_has_the_tiers_of_its_distance(seed):
    """Tiers by a breadth-first search of our own; nodes where they belong; agents at home,
    foes outside villages."""
    world = World({"num_agents": 100, "num_foes": 60, "width": 96, "height": 80, "villages": 5, "home": 9}, seed)
    size = [(column, row) for row in range(80) for column in range(96)]
    ground = {at: world.get_ground(*at) for at in size}
    land = {at: world.get_land(*at) for at in size}
    village = {at for at in size if land[at] & 0x80}
    wells = {at for at in village if ground[at] == WATER}
    assert len(wells) == 5 and 49 <= len(village) <= 5 * 49 and all(ground[at] == OPEN
                                                                    for at in village - wells)
    distance, queue = dict.fromkeys(village - wells, 0), deque(sorted(village - wells))

    def beside(at):
        around = [(at[0] + x, at[1] + y) for x, y in ((0, -1), (0, 1), (-1, 0), (1, 0))]
        return [other for other in around if other in ground]

    while queue:
        at = queue.popleft()
        for other in beside(at):
            if ground[other] == OPEN and other not in distance:
                distance[other] = distance[at] + 1
                queue.append(other)
    for at in size:
        if ground[at] == OPEN and at not in distance:
            assert land[at] == 0
            continue
        near = [distance[other] + 1 for other in beside(at) if other in distance]
        steps = distance.get(at, min(near, default=None))
        if at in wells:
            assert land[at] == 0x81
        elif ground[at] in (ROCK, WATER) or steps is None:
            assert land[at] == 0
        else:
            assert land[at] & 7 == min(5, 1 if steps <= 9 else 2 + (steps - 10) // 9)
    kinds = list(ground.values())
    assert all(kinds.count(kind) > 3 for kind in (WATER, ROCK, BERRIES, FISH, HERB, TREE)), (
        "something is missing")
    for i in range(100):
        at = world.get_column(i), world.get_row(i)
        assert land[at] & 7 == 1 and (world.get_well(i, 0), world.get_well(i, 1)) in wells
    assert world.check() is None


def test_a_world_in_which_little_can_be_walked_on():
    """Water and trees everywhere: the land is drawn anew with less of both until there is room."""
    world = World({**CROWD, "water": 0.95, "rock": 0.96, "trees": 0.8}, 1)
    assert world.check() is None
    world.act()


# All rules at once


@pytest.mark.parametrize("seed", range(2))
def test_a_crowd_keeps_the_world_whole(seed):
    """No two on a tile, what is seen is what there is, gold and items add up, whatever is done."""
    world = World(CROWD, seed)
    rng = np.random.default_rng(seed)
    ends = np.zeros(2, int)
    for _ in range(1500):
        world.random_actions(rng)
        world.step()
        assert world.check() is None, world.check()
        ends += world.terminals.sum(dtype=int), world.truncations.sum(dtype=int)
    log = world.envs.log()
    assert log["n"] == ends.sum() and (ends > 20).all()
    for field in ("starved", "slain_by_foes", "slain_by_agents", "aged", "harvests", "crafted",
                  "kills", "agent_kills", "sold", "bought"):
        assert log[field] > 0, field
    assert log["starved"] + log["slain_by_foes"] + log["slain_by_agents"] + log["aged"] == pytest.approx(1, rel=1e-5)
    assert log["perf"] == pytest.approx(log["score"] / 72, rel=1e-4) and 1 < log["gear"] < 15


def test_what_the_mask_forbids_does_nothing():
    """From a saved state an illegal action leaves exactly what doing nothing leaves, a
    legal one something else."""
    world, rng = World({**CROWD, "num_foes": 10}, 3), np.random.default_rng(0)
    illegal = legal = 0
    for t in range(600):
        world.random_actions(rng)
        world.step()
        if t % 6:
            continue
        saved, masks, i = world.envs.save(), world.masks[:, 5:41].copy(), int(rng.integers(40))
        world.act()
        nothing = world.envs.save()
        for what in range(1, 36):
            world.envs.load(saved)
            world.actions[:] = 0
            world.actions[i] = 0, what, 7
            world.step()
            same = np.array_equal(world.envs.save(), nothing)
            if masks[i, what]:
                legal += 1
                assert not same, what
            else:
                illegal += 1
                assert same, what
        world.envs.load(saved)
    assert illegal > 1000 and legal > 150


def test_what_an_agent_sees():
    """The window and the agent's own bytes, put together again from the state."""
    world, rng = World(CROWD, 5), np.random.default_rng(1)
    for t in range(400):
        world.random_actions(rng)
        world.step()
        if t % 10:
            continue
        i = int(rng.integers(40))
        column, row, tick = world.get_column(i), world.get_row(i), world.get_tick()
        window = world.observations[i, :-84].reshape(7, 7, 12).astype(int)
        for y in range(7):
            for x in range(7):
                at, wanted = (column + x - 3, row + y - 3), np.zeros(12, int)
                inside = 0 <= at[0] < 32 and 0 <= at[1] < 24
                ground, who = (world.get_ground(*at), world.get_who(*at)) if inside else (ROCK, 0)
                wanted[0], wanted[1] = ground in (WATER, FISH), ground in (ROCK, SPENT)
                if ground >= BERRIES:
                    wanted[2 + ground - BERRIES], wanted[10] = 1, world.get_land(*at) & 7
                if who > 40:
                    _, _, health, tier, kind, _, _ = (world.foe_field(who - 41, field)
                                                      for field in range(7))
                    wanted[[8, 10, 11]] = -(-4 * health // (12 + 15 * (tier - 1))), tier, kind - 5
                elif who:
                    level = max(world.get_level(who - 1, skill) for skill in SKILLS[5:])
                    wanted[9] = -(-4 * world.get_health(who - 1) // 100)
                    wanted[10:] = (level + 1) // 2, world.get_weapon_kind(who - 1) - 5
                assert window[y, x].tolist() == wanted.tolist(), (at, ground, who)
        own = world.own(i)

        def tier(x, y, column=column, row=row):
            x, y = column + x, row + y
            return world.get_land(x, y) & 7 if 0 <= x < 32 and 0 <= y < 24 else 0

        assert own[:3].tolist() == [-(-5 * v(i) // 100)
                                    for v in (world.get_health, world.get_food, world.get_water)]
        assert own[3] == (world.get_struck(i) == tick)
        assert own[6:11].tolist() == [tier(*way)
                                      for way in ((0, 0), (0, -3), (0, 3), (-3, 0), (3, 0))]
        up, left = row - world.get_well(i, 1), column - world.get_well(i, 0)
        assert own[11:15].tolist() == [min(9, -(-max(0, way) // 4))
                                       for way in (up, -up, left, -left)]
        assert own[15:18].tolist() == [world.get_weapon_kind(i) == 6 + k for k in range(3)]
        assert own[18:21].tolist() == [world.get_weapon(i), world.get_armour(i), world.get_tool(i)]
        assert own[21:24].tolist() == [min(9, world.get_gold(i).bit_length()),
                                       min(5, 12 - world.get_bag_count(i)),
                                       world.get_offer_count(i)]
        levels = [world.get_level(i, skill) for skill in SKILLS]
        assert own[24:32].tolist() == [level - 1 for level in levels]
        need = [2 * level * (level - 1) // 2 for level in range(12)]
        done = [world.get_xp(i, skill) - need[level]
                for skill, level in zip(SKILLS, levels, strict=True)]
        assert own[32:40].tolist() == [0 if level == 10
                                       else 5 * d // (need[level + 1] - need[level])
                                       for d, level in zip(done, levels, strict=True)]
        bag = np.array([[world.get_bag(i, kind, t) for t in range(1, 6)] for kind in KINDS])
        assert own[40:51].tolist() == np.minimum(bag.sum(axis=1), 5).tolist()
        assert own[51:62].tolist() == [max(np.flatnonzero(row) + 1, default=0) for row in bag]


# Foraging


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
    for _ in range(96):
        world.act()
    assert [world.get_ground(*at) for at in ((20, 21), (19, 20), (21, 20))] == [SPENT, SPENT, WATER]
    world.act()  # 100 steps after the berries
    assert [world.get_ground(*at) for at in ((20, 21), (19, 20), (21, 20))] == [BERRIES, SPENT, WATER]
    world.act(), world.act(), world.act()
    assert [world.get_ground(*at) for at in ((20, 21), (19, 20), (21, 20))] == [BERRIES, TREE, FISH]


@pytest.mark.parametrize("tier", range(1, 6))
def test_harvests_want_levels_tools_count_and_bags_fill(tier):
    world = scene()
    world.set_ground(20, 19, ORE, tier)
    for level, tool, works in ((2 * tier - 2, 0, False), (2 * tier - 1, 0, True),
                               (2 * tier - 1 - tier, tier, True)):
        if level < 1:
            continue
        world.set_ground(20, 19, ORE, tier)
        world.set_level(0, "mining", level)
        had = sum(world.get_bag(0, "ore", t) for t in range(1, 6))
        if tool:
            world.give(0, "tool", tool, 1)
            world.set_level(0, "fishing", 10)
            world.act((STAY, use("tool")))
            assert world.get_tool(0) == tool
        world.act((UP,))
        assert (world.get_ground(20, 19) == SPENT) == works
        assert (world.get_bag(0, "ore", tier) > had) == works
        assert world.get_xp(0, "mining") == 5 * level * (level - 1) // 2 + works * tier
    world.give(0, "hide", 1, 12 - world.get_bag_count(0))
    world.set_ground(20, 19, ORE, tier)
    world.set_level(0, "mining", 10)
    world.act((UP,))
    assert world.get_ground(20, 19) == ORE, "a full bag"


def test_food_and_water_pay_where_that_is_set():
    world = scene(reward_vitals=2.0)
    world.set_ground(20, 19, WATER, 0), world.set_ground(20, 21, BERRIES, 1)
    world.set_water(0, 70), world.set_food(0, 90), world.give(0, "fish", 1, 1)
    assert world.act((UP,)).rewards[0] == pytest.approx(0.6)
    assert world.act((UP,)).rewards[0] <= 0.02
    assert world.act((STAY, use("fish"))).rewards[0] == pytest.approx(0.2, abs=0.021)
    assert world.act((DOWN,)).rewards[0] <= 0.021 and world.get_ground(20, 21) == SPENT


def test_levels_and_their_reward():
    world = scene(xp_harvest=4)
    total, xp = 0.0, 0
    for _ in range(60):
        world.set_ground(20, 19, HERB, 1)
        world.act((UP, use("herb")))
        total, xp = total + world.rewards[0], xp + 4
        level = max(n for n in range(1, 11) if 5 * n * (n - 1) // 2 <= xp)
        assert world.get_level(0, "herbalism") == level == world.get_gained(0) + 1
        part = 0 if level == 10 else (xp - 5 * level * (level - 1) // 2) / (5 * level)
        assert total == pytest.approx(0.5 * (level - 1 + part), abs=1e-4)
    assert level == 10 and total == pytest.approx(4.5, abs=1e-4)


def test_crafting_and_wearing():
    world = scene()
    for material, product in (("wood", "bow"), ("ore", "sword"), ("crystal", "staff"),
                              ("hide", "armour")):
        world.give(0, material, 2, 2), world.give(0, material, 1, 3)
        world.act((STAY, use(material)))  # of the highest tier of which there are three
        assert (world.get_bag(0, material, 1), world.get_bag(0, material, 2)) == (0, 2)
        assert world.get_bag(0, product, 1) == 1
        world.give(0, material, 2, -2), world.give(0, product, 1, -1)
    world.give(0, "bow", 2, 1), world.give(0, "bow", 1, 1)
    world.act((STAY, use("bow")))
    assert ((world.get_weapon_kind(0), world.get_weapon(0)) == (7, 1)
            and world.get_bag(0, "sword", 1) == 1)
    world.act((STAY, use("bow")))
    assert world.get_weapon(0) == 1 and not world.mask()[use("bow")], "tier 2 wants archery of 3"
    world.set_level(0, "archery", 3)
    world.act((STAY, use("bow")))
    assert world.get_weapon(0) == 2 and world.get_bag(0, "bow", 1) == 1
    world.give(0, "armour", 2, 1)
    world.act((STAY, use("armour")))
    assert world.get_armour(0) == 2 and world.get_combat_level(0) == 3
    world.set_health(0, 10), world.set_food(0, 10), world.give(0, "herb", 3, 1), world.give(0, "herb", 1, 1)
    world.act((STAY, use("herb")))
    assert world.get_health(0) == 30 and world.get_bag(0, "herb", 1) == 0, "the lowest tier first"
    world.act((STAY, use("herb")))
    assert world.get_health(0) == 90
    world.give(0, "fish", 2, 1)
    food = world.get_food(0)
    world.act((STAY, use("fish")))
    assert food + 49 <= world.get_food(0) <= food + 50


# Combat


def blow(level, weapon, defence_level, armour, lead):
    factor = {0: 1, 1: 1.5, -1: 1 / 1.5}[lead]
    return max(1,
               int((6 + level + 3 * weapon) * factor * 20
                   / (20 + defence_level + 3 * armour) + 0.5))


@pytest.mark.parametrize(("mine", "other"), [(a, b) for a in range(3) for b in range(3)])
def test_blows_between_agents(mine, other):
    world, reach = scene(healing=10**6), (1, 3, 2)[mine]
    lead = {0: 0, 1: 1, 2: -1}[(other - mine) % 3]
    world.arm(0, KINDS[6 + mine], 2), world.arm(1, KINDS[6 + other], 0)
    world.set_level(0, SKILLS[5 + mine], 4), world.set_level(1, "magic", 7)
    world.set_armour(1, 1)
    damage = blow(4, 2, 7, 1, lead)
    for away in range(1, 6):
        world.teleport(1, 20 + away, 20 - away // 2)
        world.set_health(1, 100)
        world.actions[:] = ((0, STRIKE_AGENT, 0), (0, 0, 0))
        world.step()
        assert world.get_health(1) == (100 - damage if away <= reach else 100)
        assert world.own(1)[3] == (away <= reach) and world.own(0)[5] == (away <= reach)
    world.teleport(1, 20, 21)
    for mine_tier, other_tier in ((1, 2), (2, 1)):
        world.set_ground(20, 20, OPEN, mine_tier), world.set_ground(20, 21, OPEN, other_tier)
        world.set_health(1, 100)
        world.step()
        assert world.get_health(1) == 100 and not world.mask(0)[STRIKE_AGENT], "no fighting at home"


def test_a_kill_ends_a_life_and_pays():
    world = scene(xp_agent=4)
    world.set_health(1, 3), world.pay(1, 20)
    world.give(1, "fish", 1, 3), world.give(1, "armour", 2, 1), world.give(1, "wood", 3, 2)
    world.give(0, "ore", 1, 8)
    world.act((), (STAY, sell("fish"), 2))
    assert world.get_offer_count(1) == 1
    world.teleport(1, 21, 20)
    life, gold = world.get_life(1), (world.get_gold(0), world.get_gold(1))
    world.act((STAY, STRIKE_AGENT), (UP, 0))
    assert world.terminals.tolist() == [0, 1] and world.truncations.tolist() == [0, 0]
    assert world.rewards[1] == -1 and world.rewards[0] == pytest.approx(0.5 * 4 / 5)
    assert world.get_xp(0, "melee") == 4
    assert world.get_gold(0) == gold[0] + gold[1]
    assert (world.get_bag(0, "sword", 1), world.get_bag(0, "armour", 2), world.get_bag(0, "wood", 3)) == (1, 1, 2)
    assert world.get_bag_count(0) == 12 and world.get_bag(0, "fish", 1) == 0, "no room for the fish"
    assert (world.get_life(1), world.get_health(1), world.get_gold(1)) == (life + 1, 100, 5)
    assert world.get_offer_count(1) == 0 and world.own(0)[62] == 0, "its offers are gone"
    log = world.envs.log()
    assert log["n"] == 1 and log["slain_by_agents"] == 1 and log["score"] == 0


@pytest.mark.parametrize("tier", range(1, 6))
def test_a_foe_is_slain(tier):
    world = scene(num_foes=1, drop_tool=1.0, foe_pause=100)
    world.set_ground(20, 19, OPEN, tier)
    for row in range(17, 20):
        for column in range(15, 25):
            world.set_ground(column, row, OPEN, 5)
    world.place_foe(0, 20, 19, tier, 6)
    full = 30 + 15 * (tier - 1)
    assert world.foe_field(0, 2) == full
    world.set_level(0, "melee", 5)
    damage, strikes = blow(5, 1, 2 * tier - 1, tier - 1, 0), 0
    gold = world.get_gold(0)
    while world.get_xp(0, "melee") == 50:
        world.teleport(0, world.foe_field(0, 0), world.foe_field(0, 1) + 1)
        world.set_health(0, 100)
        world.act((STAY, STRIKE_FOE))
        strikes += 1
        if world.get_xp(0, "melee") == 50:
            assert world.foe_field(0, 2) == full - strikes * damage
            assert world.foe_field(0, 5) == 0, "it goes for who struck it"
    assert strikes == -(-full // damage)
    assert world.get_xp(0, "melee") == 50 + 4 * tier
    assert tier <= world.get_gold(0) - gold <= 3 * tier and (world.get_gold(0) - gold) % tier == 0
    assert world.get_bag(0, "hide", tier) == world.get_bag(0, "tool", tier) == 1


def test_foes_of_tier_one_are_peaceful_and_others_hunt():
    for tier in (1, 3):
        world = scene(num_foes=1, foe_leash=6)
        for row in range(40):
            for column in range(40):
                world.set_ground(column, row, OPEN, 3 if column < 30 else 2)
        world.teleport(0, 20, 20)
        world.teleport(1, 39, 39)
        world.place_foe(0, 22, 20, tier, 6)
        for _ in range(12):
            world.act()
        assert (world.foe_field(0, 5) == 0) == (tier == 3)
        if tier == 1:
            assert world.get_health(0) == 100
            continue
        assert world.get_health(0) < 100
        # It strikes every second step, follows, does not leave land of its tier, and
        # gives up behind the leash.
        world.set_health(0, 100)
        before = world.get_health(0)
        for _ in range(8):
            world.act()
        damage = blow(5, 2, 1, 0, 0)
        assert before - world.get_health(0) in (4 * damage - 3, 4 * damage - 2, 4 * damage)
        for column in range(21, 36):
            world.set_health(0, 100)
            world.teleport(0, column, world.foe_field(0, 1) - 2)
            world.act()
            assert world.foe_field(0, 0) < 30
        assert world.foe_field(0, 5) == -1


def test_no_foe_in_a_village():
    """Hunted into a village, an agent is followed to its edge and no further."""
    world, rng = World({**CROWD, "foe_sight": 6, "foe_leash": 20, "num_foes": 60, "num_agents": 10}, 2), None
    rng = np.random.default_rng(4)
    for _ in range(500):
        world.random_actions(rng)
        world.step()
        # among others: no foe in a village or below its tier
        assert world.check() is None, world.check()


# The market


def test_the_cheapest_then_the_oldest_offer_is_bought():
    world = scene(num_agents=5)
    for i in range(5):
        world.pay(i, 100)
    for i in (0, 1, 2):
        world.give(i, "wood", 1, 1)
    world.give(3, "wood", 2, 1)
    gold = [world.get_gold(i) for i in range(5)]
    world.act((0, sell("wood"), 5))
    world.act((0,), (0, sell("wood"), 3))
    world.act((0,), (0,), (0, sell("wood"), 3))
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
    world.act((0,), (0,), (0,), (0, sell("wood"), 7))
    world.act(*wait, (0, buy("wood"), 7))
    assert world.get_bag(4, "wood", 2) == 1
    assert world.get_gold(4) == gold[4] - 16 and world.get_gold(3) == gold[3] + 15, (
        "the fee of 1.6, rounded down")


def test_what_one_cannot_use_or_pay_is_not_bought():
    world = scene()
    world.give(0, "bow", 2, 1), world.give(0, "bow", 1, 1)
    world.act((0, sell("bow"), 0))
    assert (world.get_bag(0, "bow", 1), world.get_bag(0, "bow", 2)) == (0, 1), (
        "the lowest tier is sold first")
    world.act((0, sell("bow"), 0))
    assert world.own(1)[[69, 80]].tolist() == [1, 1], "tier 2 wants archery of 3"
    world.set_level(1, "archery", 3)
    world.act()
    assert world.own(1)[69] == 2
    world.pay(1, 1 - world.get_gold(1))
    world.act()
    assert world.own(1)[69] == 1, "two gold for tier 2"
    world.pay(1, -1)
    world.act((0,), (0, buy("bow"), 7))
    assert world.get_bag(1, "bow", 1) == 0 and not world.mask(1)[buy("bow")]
    world.pay(1, 9)
    world.give(1, "hide", 1, 12)
    world.act((0,), (0, buy("bow"), 7))
    assert world.get_bag(1, "bow", 2) == 0, "a full bag"
    world.give(1, "hide", 1, -1)
    world.act((0,), (0, buy("bow"), 7))
    assert world.get_bag(1, "bow", 2) == 1


def test_offers_are_limited_and_come_back():
    world = scene(offer_steps=70)
    world.give(0, "herb", 1, 6)
    for step in range(6):
        world.act((0, sell("herb"), step))
    assert world.get_offer_count(0) == 4 and world.get_bag(0, "herb", 1) == 2
    world.give(0, "hide", 1, 9)
    for _ in range(140):
        world.act()
    assert world.get_offer_count(0) == 3 and world.get_bag(0, "herb", 1) == 3, "one had room"
    world.give(0, "hide", 1, -9)
    for _ in range(65):
        world.act()
    assert world.get_offer_count(0) == 0 and world.get_bag(0, "herb", 1) == 6


def test_a_market_in_villages_only():
    world = World({**CROWD, "market_everywhere": False, "home": 2}, 1)
    rng, trades = np.random.default_rng(2), 0
    for _ in range(400):
        before = [world.get_land(world.get_column(i), world.get_row(i)) & 0x80 for i in range(40)]
        for i in np.flatnonzero(np.array(before) == 0):
            assert not world.mask(i)[14:].any()
        trades += sum(world.mask(i)[14:].any() for i in np.flatnonzero(before))
        world.random_actions(rng)
        world.step()
        assert world.check() is None
    assert trades > 20


# Lives


def test_hunger_thirst_and_healing():
    world = scene()
    world.set_health(0, 50)
    food = [(world.act(), world.get_food(0))[1] for _ in range(200)]
    assert food[-1] == 50 and all(food[t] - food[t + 4] == 1 for t in range(196))
    assert world.get_health(0) == 100
    health = [(world.act(), world.get_health(0))[1] for _ in range(200)]
    assert food and health[-1] in (98, 99, 100) and world.get_food(0) == 0 == world.get_water(0)
    world.set_food(0, 100)
    health = [(world.act(), world.get_health(0))[1] for _ in range(10)]
    assert np.diff(health).tolist() == [-1] * 9
    world.set_food(0, 0), world.set_food(1, 100), world.set_water(1, 100)
    steps = 0
    while not world.terminals[0]:
        left = world.get_health(0)
        world.act()
        steps += 1
    assert left <= 2 and steps == pytest.approx(health[-1] / 2, abs=1)
    assert (world.get_health(0), world.get_food(0), world.get_water(0), world.get_gold(0)) == (100, 100, 100, 5)
    assert world.rewards[0] == -1 and world.envs.log()["starved"] == 1


def test_old_age_is_a_truncation_with_its_last_view():
    world = scene(max_steps=50)
    world.set_age(0, 48), world.set_age(1, 10)
    world.act()
    world.set_ground(20, 19, TREE, 1)
    saved, life = world.envs.save(), world.get_life(0)
    world.set_age(0, 0)
    world.act((UP,))
    seen = world.observations[0].copy()
    world.envs.load(saved)
    world.poison(0x7F)
    world.act((UP,))
    assert world.truncations.tolist() == [1, 0] and world.terminals.tolist() == [0, 0]
    assert np.array_equal(world.final_observations[0], seen), (
        "what it would have seen had it lived on")
    assert (world.final_observations[1] == 0x7F).all()
    assert world.rewards[0] == pytest.approx(0.1) and world.get_life(0) == life + 1
    log = world.envs.log()
    assert (log["aged"] == 1 and log["episode_length"] == 50
            and log["episode_return"] == pytest.approx(0.1))


def test_the_default_world_is_full_of_life():
    """1,024 agents and 768 foes on 256 x 256 tiles; births anywhere at home,
    in all three callings."""
    world, rng = World({}), np.random.default_rng(0)
    assert world.envs.num_agents == 1024 and world.observations.shape == (1024, 1536)
    for _ in range(60):
        world.random_actions(rng)
        world.step()
    assert world.check() is None, world.check()
    weapons = np.bincount([world.get_weapon_kind(i) for i in range(1024)])[6:]
    assert len(weapons) == 3 and weapons.min() > 250
    assert world.envs.log()["n"] > 3


def test_agents_take_turns_in_going_first():
    """Two walk onto one tile, or into one tree: first the one, then the other wins."""
    wins = []
    for _ in range(2):
        world = scene()
        world.teleport(0, 20, 20), world.teleport(1, 22, 20)
        if wins:
            world.act()
        world.act((RIGHT,), (LEFT,))
        wins.append(world.get_who(21, 20))
    assert sorted(wins) == [1, 2]


def test_other_vision_and_reach_stay_within_the_border():
    for options in ({"vision": 1, "bow_reach": 8}, {"vision": 16, "foe_sight": 0},
                    {"vision": 2, "foe_sight": 16}):
        vector, rng = Vector("nmmo3", 1, {**CROWD, **options}), np.random.default_rng(0)
        for _ in range(200):
            vector.random_actions(rng)
            vector.step()
        vector.check_guards()
