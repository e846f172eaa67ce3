/* nmmo3: a massively multi-agent world. Agents forage for food and water, harvest, craft, fight
 * foes and each other, rise in eight skills, wear what they made or won, and trade in one market.
 * The land is random. It is more dangerous and more fruitful far from the villages. The world has
 * no end: an agent that dies is born again. docs/nmmo3.md has the rules, the market, the formulas
 * and the log.
 *
 *     observation: bytes; (2 vision + 1)^2 tiles of the window, row after row, 12 bytes each ...
 *     0, 1      water (with or without fish); rock, a spent node, or the border
 *     2 - 7     ripe berries, fish, herbs, tree, ore, crystal
 *     8, 9      a foe, an agent: its health in quarters, 1 to 4
 *     10        tier of the node, foe or agent
 *     11        its weapon: 1 sword, 2 bow, 3 staff
 *     ... then 84 bytes about the agent itself:
 *     0 - 2     health, food, water in fifths
 *     3 - 5     struck in the last step; a foe, an agent in reach of a blow
 *     6 - 10    tier of the land here, and `vision` tiles up, down, left, right
 *     11 - 14   how far the well of the nearest village is up, down, left, right: in 4 tiles,
 *               rounded up, at most 9
 *     15 - 17   weapon: sword, bow, staff
 *     18 - 20   tier of weapon, armour, tool
 *     21 - 23   gold (binary digits, up to 9), free places in the bag (up to 5), open offers
 *     24 - 31   levels beyond the first of fishing, herbalism, woodcutting, mining, carving, melee,
 *               archery, magic
 *     32 - 39   fifths of the way to the next level of each
 *     40 - 50   pieces of each kind in the bag, up to 5: fish, herb, wood, ore, crystal, hide,
 *               sword, bow, staff, armour, tool
 *     51 - 61   highest tier of each kind in the bag
 *     62 - 72   tier of what buying each kind would get at the highest price step, 0 nothing
 *     73 - 83   its price step, 1 to 8
 *
 *     actions: head 0: stay, up, down, left, right (into water to drink, into a node to harvest it)
 *              head 1: 0 nothing, 1 strike a foe, 2 strike an agent,
 *                      3 + kind use, 14 + kind sell, 25 + kind buy
 *              head 2: the price step of selling and buying; an item of tier t costs t (step + 1)
 *                      gold */
#pragma once

#define OBSERVATION uint8_t
#define OWN_LOG(X) \
    X(starved) X(slain_by_foes) X(slain_by_agents) X(aged) X(harvests) X(crafted) X(kills) \
    X(agent_kills) X(sold) X(bought) X(gold) X(combat_level) X(gather_level) X(gear)
#define SETTINGS(X) \
    X(int, num_agents, 1024, "agents in one world") \
    X(int, num_foes, 768, "foes in one world") \
    X(int, width, 256, "tiles") \
    X(int, height, 256, "tiles") \
    X(int, vision, 5, "tiles that an agent sees in each direction") \
    X(int, max_steps, 1000, "steps after which a life is cut off, at the latest") \
    X(float, spread, 0.25, "share of max_steps by which this may come earlier, at random") \
    X(float, water, 0.38, "noise below it is water") \
    X(float, rock, 0.66, "noise above it is rock") \
    X(float, berries, 0.05, "share of the land with berries") \
    X(float, fish, 0.4, "share of the water beside land with fish") \
    X(float, herbs, 0.12, "share of dry land with herbs") \
    X(float, trees, 0.18, "share of moist land with trees") \
    X(float, ores, 0.5, "share of dry land beside rock with ore") \
    X(float, crystals, 0.5, "share of moist land beside rock with crystals") \
    X(int, villages, 16, "villages") \
    X(int, home, 24, "steps from a village up to which land has tier 1") \
    X(int, tier_distance, 9, "steps further for each higher tier") \
    X(int, regrow, 15, "steps until a spent node is ripe again") \
    X(int, purse, 5, "gold at birth") \
    X(int, hunger, 4, "steps in which an agent loses a point of food and of water") \
    X(int, starving, 1, "health lost in a step without food or without water") \
    X(int, healing, 3, "steps for a point of health, with half of food and water at least") \
    X(int, berry_food, 40, "food of a berry") \
    X(int, fish_food, 25, "food of a fish, times its tier") \
    X(int, herb_health, 20, "health of a herb, times its tier") \
    X(int, xp_level, 3, "experience for level L: this times L (L - 1) / 2") \
    X(int, xp_harvest, 1, "experience of a harvest, times its tier") \
    X(int, xp_foe, 2, "experience of slaying a foe, times its tier") \
    X(int, xp_agent, 0, "experience of slaying an agent, times its tier") \
    X(int, bag, 12, "pieces that a bag holds") \
    X(int, craft_cost, 3, "pieces of material for a piece of equipment") \
    X(float, tool_luck, 0.1, "chance of a second piece at a harvest, times the tier of the tool") \
    X(int, sword_reach, 1, "tiles") \
    X(int, bow_reach, 3, "tiles") \
    X(int, staff_reach, 2, "tiles") \
    X(int, pvp_tier, 4, \
      "agents can be struck by agents on land of this tier and higher; 6: nowhere") \
    X(float, blow, 6, "strength of a blow at level 0 without a weapon") \
    X(float, tier_power, 3, "strength of a weapon and defence of armour, times its tier") \
    X(float, toughness, 20, "defence that halves a blow") \
    X(float, luck, 0.5, "a blow varies by this share either way") \
    X(float, advantage, 1.5, \
      "factor of sword against bow, bow against staff, staff against sword") \
    X(int, foe_health, 20, "of a foe of tier 1") \
    X(int, foe_health_tier, 15, "more for each higher tier") \
    X(int, foe_sight, 3, "tiles from which a foe goes for an agent") \
    X(int, foe_leash, 8, "tiles at which it gives up") \
    X(int, foe_pause, 3, "steps from one blow of a foe to the next") \
    X(int, drop_gold, 3, "a dead foe leaves 1 to this much gold, times its tier") \
    X(float, drop_tool, 0.1, "chance that a dead foe leaves a tool") \
    X(int, offers, 4, "offers that an agent may have in the market") \
    X(int, offer_steps, 256, \
      "steps after which an unsold offer comes back (looked at every 64 steps)") \
    X(float, fee, 0.1, "share of a price that is lost, rounded down") \
    X(bool, market_everywhere, true, "agents trade from anywhere, not in villages only") \
    X(float, reward_level, 0.5, "for each level gained, in parts as experience comes") \
    X(float, reward_vitals, 0.0, \
      "for 100 points of food or water won; helps training, not in score") \
    X(float, reward_death, -1.0, "for dying")
#define HAS_ACTION_MASKS
#define HEAP(X) \
    X(uint8_t, look, env->cells * TILE) \
    X(uint8_t, ground, env->cells) \
    X(uint8_t, land, env->cells) \
    X(uint16_t, who, env->cells) \
    X(uint16_t, nearest, env->cells) \
    X(Place, wells, env->villages) \
    X(int32_t, open, env->cells) \
    X(Spent, spent, env->cells) \
    X(Agent, agents, env->num_agents) \
    X(Foe, foes, env->num_foes) \
    X(Offer, stalls, env->num_agents * env->offers)
#define FPS 8
#define KEYS(KEY) \
    KEY(0, UP, 1) KEY(0, DOWN, 2) KEY(0, LEFT, 3) KEY(0, RIGHT, 4) \
    KEY(1, SPACE, 1) KEY(1, X, 2) \
    KEY(1, 1, 3) KEY(1, 2, 4) KEY(1, 3, 5) KEY(1, 4, 6) KEY(1, 5, 7) \
    KEY(1, 6, 8) KEY(1, 7, 9) KEY(1, 8, 10) KEY(1, 9, 11) KEY(1, 0, 12) KEY(1, N, 13) \
    KEY(1, Q, 14) KEY(1, W, 15) KEY(1, E, 16) KEY(1, T, 17) KEY(1, Y, 18) \
    KEY(1, U, 19) KEY(1, I, 20) KEY(1, O, 21) KEY(1, P, 22) KEY(1, L, 23) KEY(1, M, 24) \
    KEY(1, A, 25) KEY(1, S, 26) KEY(1, D, 27) KEY(1, F, 28) KEY(1, G, 29) \
    KEY(1, H, 30) KEY(1, J, 31) KEY(1, K, 32) KEY(1, Z, 33) KEY(1, C, 34) KEY(1, V, 35) \
    KEY(2, REST, 3) KEY(2, SHIFT, 7) KEY(2, CONTROL, 0)
#include "env.h"
#include "draw.h"

enum {
    FULL = 100, TIERS = 5, LEVELS = 10, GATHER = 5, SKILLS = 8, STEPS = 8, MAX_CREATURES = 1 << 14,
    MAX_OFFERS = 8
};
/* PACE: steps after which an agent looks at its own offers again */
enum { TILE = 12, OWN = 84, MAX_REACH = 8, PLAZA = 3, PACE = 64 };

/* The ground of a tile. A node's number less FISH is the kind of item that it gives. */
enum { OPEN, WATER, ROCK, SPENT, BERRIES, FISH, HERB, TREE, ORE, CRYSTAL };
enum { WINDOW_WATER, WINDOW_ROCK, WINDOW_NODE, WINDOW_CREATURE = 8, WINDOW_TIER = 10 };
enum { VILLAGE = 0x80, TIER = 7 }; /* bits of a tile's land */

/* Kinds of items. A material that a node gives has the number of its skill. */
enum {
    ITEM_FISH, ITEM_HERB, ITEM_WOOD, ITEM_ORE, ITEM_CRYSTAL, ITEM_HIDE, ITEM_SWORD, ITEM_BOW,
    ITEM_STAFF, ITEM_ARMOUR, ITEM_TOOL, KINDS
};
enum {
    NOTHING, STRIKE_FOE, STRIKE_AGENT, USE, SELL = USE + KINDS, BUY = SELL + KINDS,
    ACTS = BUY + KINDS
};
enum { MOVES = 5 };
typedef enum { ALIVE, STARVED, SLAIN_BY_FOE, SLAIN_BY_AGENT, AGED } Fate;

/* Columns and rows count the border. */
typedef struct { int column, row; } Place;

typedef struct {
    int cell, kind;
    uint32_t due;
} Spent;

typedef struct {
    int cell, column, row;
    int age, span, health, food, water, gold;
    int hunger_clock, healing_clock;
    uint32_t life, struck; /* life: lives before this one; struck: when it was struck last */
    int gained; /* levels */
    float total; /* of rewards */
    /* tiers, 0 if there is none; fists are a sword of tier 0 */
    uint8_t alive, weapon_kind, weapon, armour, tool;
    uint8_t combat_level, gather_level;
    uint8_t bag_count, offer_count;
    uint8_t levels[SKILLS], progress[SKILLS];
    /* pieces, highest tier, whether use does something, tiers that it may use (a bit each) */
    uint8_t held[KINDS], top[KINDS], use[KINDS], may[KINDS];
    uint8_t bag[KINDS][TIERS];
    int xp[SKILLS];
    int harvests, crafted, kills, agent_kills, sold, bought;
} Agent;

typedef struct {
    int cell, column, row;
    int health, target; /* an agent, or -1 */
    uint32_t target_life;
    uint8_t tier, weapon_kind, pause;
} Foe;

/* Offer j of agent i has number i * offers + j. Those of one price form a list, the oldest first.
 */
typedef struct {
    int next, previous;
    uint32_t since;
    uint8_t is_open, kind, tier, step;
} Offer;

typedef struct { int first, last; } Queue;

struct Env {
    ENV_COMMON
    uint32_t tick;
    int border, stride, rows, cells;
    /* tiles that can be reached, nearest first; tiles on which agents are born */
    int open_count, home_count;
    int spent_first, spent_count;
    int need[LEVELS + 2]; /* experience for each level */
    Queue queues[KINDS][TIERS][STEPS];
    /* a bit for each price step with offers */
    uint8_t steps_offered[KINDS][TIERS], tiers_offered[KINDS];
    int64_t gold_made, gold_lost, items_made[KINDS], items_lost[KINDS]; /* the ledger */
};

static const char* c_init(Env* env) {
    if (env->num_agents < 1 || env->num_foes < 0 || env->num_agents + env->num_foes > MAX_CREATURES)
        return "num_agents must be 1 or more, num_foes 0 or more, and both together at most 16384";
    if (env->vision < 1 || env->vision > 16) return "vision must lie within 1..16";
    if (env->width < 8 || env->width > 2048 || env->height < 8 || env->height > 2048)
        return "width and height must lie within 8..2048";
    if (env->villages < 1 || env->villages > 1024) return "villages must lie within 1..1024";
    int village = (2 * PLAZA + 1) * (2 * PLAZA + 1);
    if (4 * (env->num_agents + env->num_foes) + 2 * village * env->villages >
        env->width * env->height)
        return "the world is too small: 4 tiles for each agent and foe, and 98 for each village, "
               "are the least";
    if (env->max_steps < 1 || env->hunger < 1 || env->healing < 1 || env->regrow < 1 ||
        env->offer_steps < 1)
        return "max_steps, hunger, healing, regrow and offer_steps must be 1 or more";
    if (env->home < 1 || env->tier_distance < 1) return "home and tier_distance must be 1 or more";
    float shares[] = {
        env->berries, env->fish, env->herbs, env->trees, env->ores, env->crystals, env->luck,
        env->drop_tool, env->fee, env->tool_luck, env->spread, env->berries + env->herbs,
        env->berries + env->trees
    };
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++)
        if (!(shares[i] >= 0 && shares[i] <= 1))
            return "shares and chances, luck and spread must lie within 0..1";
    if (!(env->water >= 0 && env->water < env->rock && env->rock <= 1))
        return "0 <= water < rock <= 1 must hold";
    int amounts[] = {env->purse,      env->starving,    env->berry_food,
                     env->fish_food,  env->herb_health, env->foe_health_tier,
                     env->xp_harvest, env->xp_foe,      env->xp_agent};
    for (size_t i = 0; i < sizeof(amounts) / sizeof(amounts[0]); i++)
        if (amounts[i] < 0 || amounts[i] > 100000)
            return "purse, starving, food, health, and experience must lie within 0..100000";
    if (env->foe_pause < 0 || env->foe_pause > 255) return "foe_pause must lie within 0..255";
    if (env->xp_level < 1 || env->xp_level > 100000) return "xp_level must lie within 1..100000";
    if (env->foe_health < 1 || env->foe_health > 100000)
        return "foe_health must lie within 1..100000";
    if (env->drop_gold < 1 || env->drop_gold > 1000) return "drop_gold must lie within 1..1000";
    if (env->bag < 1 || env->bag > 200) return "bag must lie within 1..200";
    if (env->craft_cost < 1 || env->craft_cost > env->bag)
        return "craft_cost must lie within 1..bag";
    if (env->offers < 1 || env->offers > MAX_OFFERS) return "offers must lie within 1..8";
    if (env->pvp_tier < 1 || env->pvp_tier > TIERS + 1) return "pvp_tier must lie within 1..6";
    int reaches[] = {env->sword_reach, env->bow_reach, env->staff_reach};
    env->border = env->vision > env->foe_sight ? env->vision : env->foe_sight;
    for (int i = 0; i < 3; i++) {
        if (reaches[i] < 1 || reaches[i] > MAX_REACH) return "reaches must lie within 1..8";
        if (reaches[i] > env->border) env->border = reaches[i];
    }
    if (env->foe_sight < 0 || env->foe_sight > 16 || env->foe_leash < 0)
        return "foe_sight must lie within 0..16, foe_leash must be 0 or more";
    if (!(env->blow >= 0 && env->tier_power >= 0 && env->toughness > 0 && env->advantage > 0))
        return "blow and tier_power must be 0 or more, toughness and advantage more than 0";

    env->stride = env->width + 2 * env->border;
    env->rows = env->height + 2 * env->border;
    env->cells = env->stride * env->rows;
    for (int level = 1; level <= LEVELS + 1; level++)
        env->need[level] = env->xp_level * level * (level - 1) / 2;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    int side = 2 * env->vision + 1;
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {side * side * TILE + OWN},
        .observation_low = 0,
        .observation_high = 9,
        .action_heads = {MOVES, ACTS, STEPS},
    };
}

/* Random numbers on a lattice, interpolated in between, in three octaves: 0..1 for any place. */
static float lattice(uint64_t seed, int x, int y) {
    uint64_t state = seed + (uint64_t)x * 0xD6E8FEB86659FD93u + (uint64_t)y * 0xA0761D6478BD642Fu;
    return (float)(random_word(&state) >> 40) * 0x1p-24f;
}

static float noise(uint64_t seed, int x, int y) {
    const float weights[] = {0.5f, 0.3f, 0.2f};
    float sum = 0;
    for (int octave = 0; octave < 3; octave++, seed++) {
        int size = 32 >> octave;
        int column = x / size, row = y / size;
        float u = (float)(x % size) / (float)size, v = (float)(y % size) / (float)size;
        u *= u * (3 - 2 * u), v *= v * (3 - 2 * v);
        float top = lattice(seed, column, row) * (1 - u) + lattice(seed, column + 1, row) * u;
        float bottom =
            lattice(seed, column, row + 1) * (1 - u) + lattice(seed, column + 1, row + 1) * u;
        sum += weights[octave] * (top * (1 - v) + bottom * v);
    }
    return sum;
}

static int cell_at(const Env* env, int column, int row) {
    return (row + env->border) * env->stride + column + env->border;
}

static int cell_of(const Env* env, Place place) {
    return place.row * env->stride + place.column;
}

/* Writes the window's bytes of a tile: its ground, and no creature. */
static void paint(Env* env, int cell) {
    uint8_t* look = env->look + (size_t)cell * TILE;
    int ground = env->ground[cell];
    memset(look, 0, TILE);
    look[WINDOW_WATER] = ground == WATER || ground == FISH;
    look[WINDOW_ROCK] = ground == ROCK || ground == SPENT;
    if (ground < BERRIES) return;
    look[WINDOW_NODE + ground - BERRIES] = 1;
    look[WINDOW_TIER] = env->land[cell] & TIER;
}

static bool is_beside(const Env* env, int cell, int ground) {
    return env->ground[cell - 1] == ground || env->ground[cell + 1] == ground ||
           env->ground[cell - env->stride] == ground || env->ground[cell + env->stride] == ground;
}

/* Founds villages. Of some random open tiles each takes the one farthest from those before. */
static void found_villages(Env* env) {
    for (int n = 0; n < env->villages; n++) {
        int farthest = -1;
        for (int try = 0; try < 16; try++) {
            int column = PLAZA + random_int(&env->rng, env->width - 2 * PLAZA);
            int row = PLAZA + random_int(&env->rng, env->height - 2 * PLAZA), nearest = 1 << 24;
            Place place = {column + env->border, row + env->border};
            for (int k = 0; k < n; k++) {
                int x = place.column - env->wells[k].column, y = place.row - env->wells[k].row;
                if (x * x + y * y < nearest) nearest = x * x + y * y;
            }
            if (env->ground[cell_of(env, place)] != OPEN) nearest = 0;
            if (nearest <= farthest) continue;
            farthest = nearest;
            env->wells[n] = place;
        }
        for (int y = -PLAZA; y <= PLAZA; y++) {
            for (int x = -PLAZA; x <= PLAZA; x++) {
                int cell = cell_of(env, env->wells[n]) + y * env->stride + x;
                if (env->land[cell] == 0) env->open[env->open_count++] = cell;
                env->ground[cell] = OPEN;
                env->land[cell] = VILLAGE | 1;
                env->nearest[cell] = (uint16_t)n;
            }
        }
    }
    int kept = 0;
    for (int n = 0; n < env->villages; n++)
        env->ground[cell_of(env, env->wells[n])] = WATER;
    for (int k = 0; k < env->open_count; k++)
        if (env->ground[env->open[k]] == OPEN) env->open[kept++] = env->open[k];
    env->open_count = kept;
}

/* Gives land its tiers by the steps from the nearest village, wave after wave. env->open begins
 * with the villages. */
static void measure_land(Env* env) {
    const int ways[4] = {-env->stride, env->stride, -1, 1};
    for (int begin = 0, distance = 1; begin < env->open_count; distance++) {
        int end = env->open_count, beyond = distance - env->home;
        int tier = beyond <= 0 ? 1 : 2 + (beyond - 1) / env->tier_distance;
        uint8_t land = (uint8_t)(tier < TIERS ? tier : TIERS);
        for (; begin < end; begin++) {
            for (int way = 0; way < 4; way++) {
                int cell = env->open[begin] + ways[way];
                if (env->land[cell]) continue;
                if (env->ground[cell] == OPEN) env->open[env->open_count++] = cell;
                if (env->ground[cell] == OPEN || env->ground[cell] >= BERRIES)
                    env->land[cell] = land;
                env->nearest[cell] = env->nearest[env->open[begin]];
            }
        }
        if (land == 1) env->home_count = env->open_count;
    }
}

/* Draws the land. Returns whether enough of it can be walked on. A smaller `rough` puts less in the
 * way, 0 nothing. */
static bool draw_land(Env* env, float rough) {
    float water = env->water * rough, rock = 1 - (1 - env->rock) * rough;
    uint64_t height_seed = random_word(&env->rng), moisture_seed = random_word(&env->rng);
    memset(env->land, 0, (size_t)env->cells);
    memset(env->ground, ROCK, (size_t)env->cells);
    env->open_count = 0;
    for (int row = 0; row < env->height; row++) {
        for (int column = 0; column < env->width; column++) {
            float height = noise(height_seed, column, row);
            env->ground[cell_at(env, column, row)] = height < water  ? WATER
                                                     : height > rock ? ROCK
                                                                     : OPEN;
        }
    }
    found_villages(env);
    for (int row = 0; row < env->height; row++) {
        for (int column = 0; column < env->width; column++) {
            int cell = cell_at(env, column, row), ground = env->ground[cell];
            if (ground == ROCK || env->land[cell]) continue; /* nothing grows in villages */
            float chance = random_float(&env->rng, 0, 1) / rough; /* infinite if rough is 0 */
            if (ground == WATER) {
                if (chance < env->fish && is_beside(env, cell, OPEN)) env->ground[cell] = FISH;
                continue;
            }
            bool is_moist = noise(moisture_seed, column, row) >= 0.5f;
            if (is_beside(env, cell, ROCK)) {
                if (chance < (is_moist ? env->crystals : env->ores))
                    env->ground[cell] = is_moist ? CRYSTAL : ORE;
            } else if (chance < env->berries) {
                env->ground[cell] = BERRIES;
            } else if (chance < env->berries + (is_moist ? env->trees : env->herbs)) {
                env->ground[cell] = is_moist ? TREE : HERB;
            }
        }
    }
    measure_land(env);
    int creatures = 2 * (env->num_agents + env->num_foes);
    if (env->home_count < creatures) env->home_count = creatures;
    return env->open_count >= creatures + (2 * PLAZA + 1) * (2 * PLAZA + 1) * env->villages;
}

/* A random free tile of the `count` nearest to villages. There is one, because there are more than
 * creatures. */
static int free_cell(Env* env, int count, bool in_villages) {
    int at = 0;
    for (int try = 0; try < 64 + count; try++) {
        at = try < 64 ? random_int(&env->rng, count) : at + 1 < count ? at + 1 : 0;
        int cell = env->open[at];
        if (!env->who[cell] && (in_villages || !(env->land[cell] & VILLAGE))) return cell;
    }
    return env->open[at];
}

static int tier_at(const Env* env, int cell) {
    return env->land[cell] & TIER;
}

/* Writes the window's bytes about the creature on a tile, all 0 if there is none. */
static void show(Env* env, int cell, int foe, int agent, int tier, int weapon) {
    uint8_t bytes[4] = {(uint8_t)foe, (uint8_t)agent, (uint8_t)tier, (uint8_t)weapon};
    memcpy(env->look + (size_t)cell * TILE + WINDOW_CREATURE, bytes, 4);
}

static void show_agent(Env* env, const Agent* agent) {
    int quarters = (4 * agent->health + FULL - 1) / FULL;
    show(env, agent->cell, 0, quarters, (agent->combat_level + 1) / 2,
         1 + agent->weapon_kind - ITEM_SWORD);
}

static int foe_full(const Env* env, int tier) {
    return env->foe_health + (tier - 1) * env->foe_health_tier;
}

static void show_foe(Env* env, const Foe* foe) {
    int full = foe_full(env, foe->tier);
    show(env, foe->cell, (4 * foe->health + full - 1) / full, 0, foe->tier,
         1 + foe->weapon_kind - ITEM_SWORD);
}

static void stand(Env* env, int* cell, int* column, int* row, int at) {
    *cell = at;
    *row = at / env->stride;
    *column = at - *row * env->stride;
}

/* --- Skills and the bag */

/* Updates what follows from the pieces of one kind, or from the levels. */
static void refresh(const Env* env, Agent* agent, int kind) {
    int held = 0, top = 0, use = 0, is_material = kind >= ITEM_WOOD && kind <= ITEM_HIDE, worn = 0;
    if (kind == ITEM_ARMOUR || kind == ITEM_TOOL)
        worn = kind == ITEM_ARMOUR ? agent->armour : agent->tool;
    else if (kind == agent->weapon_kind) worn = agent->weapon;
    for (int t = 0; t < TIERS; t++) {
        int n = agent->bag[kind][t];
        held += n;
        if (n) top = t + 1;
        use |= is_material ? n >= env->craft_cost : n && t >= worn && (agent->may[kind] >> t & 1);
    }
    agent->held[kind] = (uint8_t)held;
    agent->top[kind] = (uint8_t)top;
    agent->use[kind] = (uint8_t)use;
}

static void put(const Env* env, Agent* agent, int kind, int tier, int n) {
    agent->bag[kind][tier - 1] += (uint8_t)n;
    agent->bag_count += (uint8_t)n;
    refresh(env, agent, kind);
}

static void take(const Env* env, Agent* agent, int kind, int tier, int n) {
    agent->bag[kind][tier - 1] -= (uint8_t)n;
    agent->bag_count -= (uint8_t)n;
    refresh(env, agent, kind);
}

static bool has_room(const Env* env, const Agent* agent) {
    return agent->bag_count < env->bag;
}

/* A new item. It is not made if there is no room for it. */
static void make(Env* env, Agent* agent, int kind, int tier) {
    if (!has_room(env, agent)) return;
    put(env, agent, kind, tier, 1);
    env->items_made[kind]++;
}

static uint8_t tiers_up_to(int level) {
    return (uint8_t)((1 << (level + 1) / 2) - 1);
}

/* Updates what follows from an agent's levels. */
static void know(Env* env, Agent* agent) {
    agent->combat_level = agent->gather_level = 1;
    for (int skill = 0; skill < SKILLS; skill++) {
        uint8_t* best = skill < GATHER ? &agent->gather_level : &agent->combat_level;
        if (agent->levels[skill] > *best) *best = agent->levels[skill];
    }
    for (int kind = 0; kind < ITEM_SWORD; kind++)
        agent->may[kind] = (1 << TIERS) - 1;
    for (int weapon = 0; weapon < SKILLS - GATHER; weapon++)
        agent->may[ITEM_SWORD + weapon] = tiers_up_to(agent->levels[GATHER + weapon]);
    agent->may[ITEM_ARMOUR] = tiers_up_to(agent->combat_level);
    agent->may[ITEM_TOOL] = tiers_up_to(agent->gather_level);
    for (int kind = ITEM_SWORD; kind < KINDS; kind++)
        refresh(env, agent, kind);
    show_agent(env, agent);
}

/* The share of the way to the next level. */
static float part_done(const Env* env, int level, int experience) {
    if (level == LEVELS) return 0;
    return (float)(experience - env->need[level]) /
           (float)(env->need[level + 1] - env->need[level]);
}

static void gain(Env* env, int i, int skill, int experience) {
    Agent* agent = &env->agents[i];
    int level = agent->levels[skill], before = level;
    if (level == LEVELS) return;
    float share = part_done(env, level, agent->xp[skill]);
    agent->xp[skill] += experience;
    while (level < LEVELS && agent->xp[skill] >= env->need[level + 1])
        level++;
    float new_share = part_done(env, level, agent->xp[skill]);
    agent->progress[skill] = (uint8_t)(5 * new_share);
    env->rewards[i] += env->reward_level * ((float)(level - before) + new_share - share);
    if (level == before) return;
    agent->levels[skill] = (uint8_t)level;
    agent->gained += level - before;
    know(env, agent);
}

/* --- The market */

static int price_of(int tier, int step) {
    return tier * (step + 1);
}

/* Puts an offer at the end of the list of its price. */
static void open_offer(Env* env, int i, int kind, int tier, int step) {
    int number = i * env->offers;
    while (env->stalls[number].is_open)
        number++;
    Queue* queue = &env->queues[kind][tier - 1][step];
    env->stalls[number] = (Offer){.next = -1,
                                  .previous = queue->last,
                                  .since = env->tick,
                                  .is_open = true,
                                  .kind = (uint8_t)kind,
                                  .tier = (uint8_t)tier,
                                  .step = (uint8_t)step};
    if (queue->last < 0) queue->first = number;
    else env->stalls[queue->last].next = number;
    queue->last = number;
    env->steps_offered[kind][tier - 1] |= (uint8_t)(1 << step);
    env->tiers_offered[kind] |= (uint8_t)(1 << (tier - 1));
    env->agents[i].offer_count++;
}

static void close_offer(Env* env, int number) {
    Offer* offer = &env->stalls[number];
    int kind = offer->kind, t = offer->tier - 1;
    Queue* queue = &env->queues[kind][t][offer->step];
    *(offer->previous < 0 ? &queue->first : &env->stalls[offer->previous].next) = offer->next;
    *(offer->next < 0 ? &queue->last : &env->stalls[offer->next].previous) = offer->previous;
    if (queue->first < 0) env->steps_offered[kind][t] &= (uint8_t)~(1 << offer->step);
    if (!env->steps_offered[kind][t]) env->tiers_offered[kind] &= (uint8_t)~(1 << t);
    offer->is_open = false;
    env->agents[number / env->offers].offer_count--;
}

static bool may_trade(const Env* env, const Agent* agent) {
    return env->market_everywhere || (env->land[agent->cell] & VILLAGE);
}

/* What an agent gets if it buys a kind for at most tier * (limit + 1): the tier, or 0, and the
 * price step. */
static int best_offer(const Env* env, const Agent* agent, int kind, int limit, int* step) {
    int tiers = env->tiers_offered[kind] & agent->may[kind];
    for (int tier = TIERS; tiers && tier > 0; tier--) {
        if (!(tiers >> (tier - 1) & 1)) continue;
        *step = __builtin_ctz(env->steps_offered[kind][tier - 1]);
        if (*step <= limit && price_of(tier, *step) <= agent->gold) return tier;
    }
    return 0;
}

static void buy(Env* env, Agent* agent, int kind, int limit) {
    int step = 0, tier = 0;
    if (has_room(env, agent) && may_trade(env, agent))
        tier = best_offer(env, agent, kind, limit, &step);
    if (!tier) return;
    int number = env->queues[kind][tier - 1][step].first, price = price_of(tier, step);
    int fee = (int)(env->fee * (float)price);
    Agent* seller = &env->agents[number / env->offers];
    close_offer(env, number);
    put(env, agent, kind, tier, 1);
    agent->gold -= price;
    agent->bought++;
    seller->gold += price - fee;
    seller->sold++;
    env->gold_lost += fee;
}

static void sell(Env* env, int i, int kind, int step) {
    Agent* agent = &env->agents[i];
    if (!agent->held[kind] || agent->offer_count == env->offers || !may_trade(env, agent)) return;
    int tier = 1;
    while (!agent->bag[kind][tier - 1])
        tier++;
    take(env, agent, kind, tier, 1);
    open_offer(env, i, kind, tier, step);
}

/* Old offers come back if the bag has room. */
static void look_after_stall(Env* env, int i) {
    Agent* agent = &env->agents[i];
    for (int number = i * env->offers; number < (i + 1) * env->offers; number++) {
        Offer* offer = &env->stalls[number];
        if (!offer->is_open || env->tick - offer->since < (uint32_t)env->offer_steps ||
            !has_room(env, agent))
            continue;
        put(env, agent, offer->kind, offer->tier, 1);
        close_offer(env, number);
    }
}

/* --- Birth and death */

static void be_born(Env* env, int i) {
    Agent* agent = &env->agents[i];
    *agent = (Agent){.health = FULL,
                     .food = FULL,
                     .water = FULL,
                     .gold = env->purse,
                     .life = agent->life + 1,
                     .struck = env->tick - 1,
                     .alive = true,
                     .weapon = 1};
    stand(env, &agent->cell, &agent->column, &agent->row, free_cell(env, env->home_count, true));
    env->who[agent->cell] = (uint16_t)(1 + i);
    agent->weapon_kind = (uint8_t)(ITEM_SWORD + random_int(&env->rng, SKILLS - GATHER));
    agent->span = env->max_steps -
                  random_int(&env->rng, 1 + (int)(env->spread * (float)(env->max_steps - 1)));
    agent->hunger_clock = 1 + random_int(&env->rng, env->hunger);
    agent->healing_clock = env->healing;
    memset(agent->levels, 1, SKILLS);
    env->items_made[agent->weapon_kind]++;
    env->gold_made += env->purse;
    know(env, agent);
}

/* The slayer gets one piece of the dead, if it has room; else the piece is lost. */
static void leave_piece(Env* env, Agent* slayer, int kind, int tier) {
    if (slayer && has_room(env, slayer)) put(env, slayer, kind, tier, 1);
    else env->items_lost[kind]++;
}

static void end_life(Env* env, int i, Fate fate, Agent* slayer) {
    Agent* agent = &env->agents[i];
    agent->alive = false;
    agent->total += env->rewards[i] + (fate == AGED ? 0 : env->reward_death);
    if (fate == AGED) env->truncations[i] = 1;
    else env->terminals[i] = 1, env->rewards[i] += env->reward_death;

    LOG_EPISODE(env, (float)agent->gained / (SKILLS * (LEVELS - 1)), agent->gained, agent->total,
                agent->age);
    env->log.starved += fate == STARVED;
    env->log.slain_by_foes += fate == SLAIN_BY_FOE;
    env->log.slain_by_agents += fate == SLAIN_BY_AGENT;
    env->log.aged += fate == AGED;
    env->log.harvests += (float)agent->harvests;
    env->log.crafted += (float)agent->crafted;
    env->log.kills += (float)agent->kills;
    env->log.agent_kills += (float)agent->agent_kills;
    env->log.sold += (float)agent->sold;
    env->log.bought += (float)agent->bought;
    env->log.gold += (float)agent->gold;
    env->log.combat_level += (float)agent->combat_level;
    env->log.gather_level += (float)agent->gather_level;
    env->log.gear += (float)(agent->weapon + agent->armour + agent->tool);

    if (slayer) slayer->gold += agent->gold;
    else env->gold_lost += agent->gold;
    if (agent->weapon) leave_piece(env, slayer, agent->weapon_kind, agent->weapon);
    if (agent->armour) leave_piece(env, slayer, ITEM_ARMOUR, agent->armour);
    if (agent->tool) leave_piece(env, slayer, ITEM_TOOL, agent->tool);
    for (int kind = KINDS - 1; kind >= 0; kind--) {
        for (int tier = TIERS; tier > 0 && agent->held[kind]; tier--)
            for (int n = 0; n < agent->bag[kind][tier - 1]; n++)
                leave_piece(env, slayer, kind, tier);
    }
    for (int number = i * env->offers; agent->offer_count && number < (i + 1) * env->offers;
         number++) {
        if (!env->stalls[number].is_open) continue;
        env->items_lost[env->stalls[number].kind]++;
        close_offer(env, number);
    }
    env->who[agent->cell] = 0;
    show(env, agent->cell, 0, 0, 0, 0);
}

/* Puts a new foe somewhere, on land of the given tier if that is soon found; 0: of any tier. */
static void raise_foe(Env* env, int f, int tier) {
    Foe* foe = &env->foes[f];
    int cell = free_cell(env, env->open_count, false);
    for (int try = 0; tier && tier_at(env, cell) != tier && try < 64; try++)
        cell = free_cell(env, env->open_count, false);
    *foe = (Foe){.target = -1};
    stand(env, &foe->cell, &foe->column, &foe->row, cell);
    env->who[foe->cell] = (uint16_t)(1 + env->num_agents + f);
    foe->tier = (uint8_t)tier_at(env, foe->cell);
    foe->weapon_kind = (uint8_t)(ITEM_SWORD + random_int(&env->rng, SKILLS - GATHER));
    foe->health = foe_full(env, foe->tier);
    show_foe(env, foe);
}

/* --- Combat */

static int reach_of(const Env* env, int weapon_kind) {
    return weapon_kind == ITEM_SWORD ? env->sword_reach
           : weapon_kind == ITEM_BOW ? env->bow_reach
                                     : env->staff_reach;
}

static int roll_damage(Env* env, int level, int weapon, int weapon_kind, int defender_level,
                       int armour, int against) {
    float strength = env->blow + (float)level + env->tier_power * (float)weapon;
    float defence = (float)defender_level + env->tier_power * (float)armour;
    int lead = (against - weapon_kind + 3) % 3; /* sword, bow, staff: each beats the next */
    float factor = lead == 0 ? 1 : lead == 1 ? env->advantage : 1 / env->advantage;
    factor *= random_float(&env->rng, 1 - env->luck, 1 + env->luck);
    float damage = strength * factor * env->toughness / (env->toughness + defence);
    return damage < 1 ? 1 : (int)(minf(damage, 1e6f) + 0.5f);
}

static bool can_strike(const Env* env, const Agent* agent, int who, bool at_foes) {
    if (at_foes) return who > env->num_agents;
    if (who == 0 || who > env->num_agents) return false;
    const Agent* other = &env->agents[who - 1];
    return other != agent && tier_at(env, other->cell) >= env->pvp_tier;
}

/* The nearest foe, or agent, that an agent's weapon reaches, as in env->who; 0 if there is none. */
static int find_target(const Env* env, const Agent* agent, bool at_foes) {
    int reach = reach_of(env, agent->weapon_kind);
    if (!at_foes && tier_at(env, agent->cell) < env->pvp_tier) return 0;
    for (int r = 1; r <= reach; r++) {
        for (int y = -r; y <= r; y++) {
            const uint16_t* row = env->who + agent->cell + y * env->stride;
            for (int x = -r; x <= r; x += y == -r || y == r ? 1 : 2 * r)
                if (can_strike(env, agent, row[x], at_foes)) return row[x];
        }
    }
    return 0;
}

static void strike_foe(Env* env, int i) {
    Agent* agent = &env->agents[i];
    int who = find_target(env, agent, true);
    if (!who) return;
    Foe* foe = &env->foes[who - 1 - env->num_agents];
    int skill = GATHER + agent->weapon_kind - ITEM_SWORD, tier = foe->tier;
    foe->health -= roll_damage(env, agent->levels[skill], agent->weapon, agent->weapon_kind,
                               2 * tier - 1, tier - 1, foe->weapon_kind);
    foe->target = i;
    foe->target_life = agent->life;
    if (foe->health > 0) {
        show_foe(env, foe);
        return;
    }
    int gold = tier * (1 + random_int(&env->rng, env->drop_gold));
    agent->gold += gold;
    env->gold_made += gold;
    make(env, agent, ITEM_HIDE, tier);
    if (random_float(&env->rng, 0, 1) < env->drop_tool) make(env, agent, ITEM_TOOL, tier);
    agent->kills++;
    env->who[foe->cell] = 0;
    show(env, foe->cell, 0, 0, 0, 0);
    raise_foe(env, (int)(foe - env->foes), tier);
    gain(env, i, skill, env->xp_foe * tier);
}

/* Takes health from an agent. Returns whether it dies. */
static bool wound(Env* env, int i, int damage, Fate fate, Agent* slayer) {
    Agent* agent = &env->agents[i];
    agent->health -= damage;
    agent->struck = env->tick;
    if (agent->health > 0) show_agent(env, agent);
    else end_life(env, i, fate, slayer);
    return agent->health <= 0;
}

static void strike_agent(Env* env, int i) {
    Agent* agent = &env->agents[i];
    int who = find_target(env, agent, false);
    if (!who) return;
    const Agent* other = &env->agents[who - 1];
    int skill = GATHER + agent->weapon_kind - ITEM_SWORD, tier = (other->combat_level + 1) / 2;
    int damage = roll_damage(env, agent->levels[skill], agent->weapon, agent->weapon_kind,
                             other->combat_level, other->armour, other->weapon_kind);
    if (!wound(env, who - 1, damage, SLAIN_BY_AGENT, agent)) return;
    agent->agent_kills++;
    gain(env, i, skill, env->xp_agent * tier);
}

/* --- What agents do */

static int fill(int value, int more) {
    return value + more < FULL ? value + more : FULL;
}

static void feed(Env* env, int i, int* vital, int more) {
    int before = *vital;
    *vital = fill(before, more);
    env->rewards[i] += env->reward_vitals * (float)(*vital - before) / FULL;
}

static void consume(Env* env, Agent* agent, int kind, int tier, int n) {
    take(env, agent, kind, tier, n);
    env->items_lost[kind] += n;
}

static void use(Env* env, int i, int kind) {
    /* of wood, ore, crystal, hide */
    static const uint8_t products[] = {ITEM_BOW, ITEM_SWORD, ITEM_STAFF, ITEM_ARMOUR};
    Agent* agent = &env->agents[i];
    if (!agent->use[kind]) return;
    int tier = 1;
    if (kind == ITEM_FISH || kind == ITEM_HERB) {
        while (!agent->bag[kind][tier - 1])
            tier++;
        consume(env, agent, kind, tier, 1);
        if (kind == ITEM_FISH) feed(env, i, &agent->food, env->fish_food * tier);
        else agent->health = fill(agent->health, env->herb_health * tier);
    } else if (kind <= ITEM_HIDE) {
        for (tier = TIERS; agent->bag[kind][tier - 1] < env->craft_cost;)
            tier--;
        consume(env, agent, kind, tier, env->craft_cost);
        make(env, agent, products[kind - ITEM_WOOD], tier);
        agent->crafted++;
        return;
    } else {
        for (tier = TIERS; !agent->bag[kind][tier - 1] || !(agent->may[kind] >> (tier - 1) & 1);)
            tier--;
        bool is_weapon = kind < ITEM_ARMOUR;
        uint8_t* worn = is_weapon             ? &agent->weapon
                        : kind == ITEM_ARMOUR ? &agent->armour
                                              : &agent->tool;
        take(env, agent, kind, tier, 1);
        if (*worn) put(env, agent, is_weapon ? agent->weapon_kind : kind, *worn, 1);
        *worn = (uint8_t)tier;
        if (is_weapon) agent->weapon_kind = (uint8_t)kind;
        for (int other = ITEM_SWORD; other < KINDS; other++)
            refresh(env, agent, other);
    }
    show_agent(env, agent);
}

/* An agent walks into a node and takes it, if it has room and skill enough. */
static void harvest(Env* env, int i, int cell) {
    Agent* agent = &env->agents[i];
    int kind = env->ground[cell] - FISH, tier = tier_at(env, cell);
    if (kind < 0) {
        feed(env, i, &agent->food, env->berry_food);
    } else {
        if (!has_room(env, agent) || agent->levels[kind] + agent->tool < 2 * tier - 1) return;
        make(env, agent, kind, tier);
        if (random_float(&env->rng, 0, 1) < env->tool_luck * (float)agent->tool)
            make(env, agent, kind, tier);
        agent->harvests++;
        gain(env, i, kind, env->xp_harvest * tier);
    }
    int at = env->spent_first + env->spent_count++;
    env->spent[at < env->cells ? at : at - env->cells] =
        (Spent){.cell = cell, .kind = env->ground[cell], .due = env->tick + (uint32_t)env->regrow};
    env->ground[cell] = kind == ITEM_FISH ? WATER : SPENT;
    paint(env, cell);
}

static void move(Env* env, int i, int way) {
    const int steps[MOVES] = {0, -env->stride, env->stride, -1, 1}, rows[MOVES] = {0, -1, 1, 0, 0};
    Agent* agent = &env->agents[i];
    int next = agent->cell + steps[way], ground = env->ground[next];
    if (ground == OPEN) {
        if (env->who[next]) return;
        uint8_t* look = env->look + WINDOW_CREATURE;
        memcpy(look + (size_t)next * TILE, look + (size_t)agent->cell * TILE, 4);
        show(env, agent->cell, 0, 0, 0, 0);
        env->who[agent->cell] = 0;
        env->who[next] = (uint16_t)(1 + i);
        agent->cell = next;
        agent->row += rows[way];
        agent->column += steps[way] - rows[way] * env->stride;
        return;
    }
    if (ground == WATER || ground == FISH) feed(env, i, &agent->water, FULL);
    if (ground >= BERRIES) harvest(env, i, next);
}

static void act(Env* env, int i) {
    const int32_t* action = env->actions + 3 * i;
    Agent* agent = &env->agents[i];
    int what = action[1];
    if (what == STRIKE_FOE) strike_foe(env, i);
    else if (what == STRIKE_AGENT) strike_agent(env, i);
    else if (what >= BUY) buy(env, agent, what - BUY, action[2]);
    else if (what >= SELL) sell(env, i, what - SELL, action[2]);
    else if (what >= USE) use(env, i, what - USE);
    if (action[0]) move(env, i, action[0]);
    if (((env->tick + (uint32_t)i) & (PACE - 1)) == 0 && agent->offer_count)
        look_after_stall(env, i);
}

/* Hunger, thirst, healing, age. */
static void grow_older(Env* env, int i) {
    Agent* agent = &env->agents[i];
    agent->age++;
    if (--agent->hunger_clock == 0) {
        agent->hunger_clock = env->hunger;
        agent->food -= agent->food > 0;
        agent->water -= agent->water > 0;
    }
    int before = agent->health;
    if (agent->food >= FULL / 2 && agent->water >= FULL / 2) {
        if (--agent->healing_clock <= 0) {
            agent->healing_clock = env->healing;
            agent->health = fill(agent->health, 1);
        }
    } else {
        agent->health -= env->starving * ((agent->food == 0) + (agent->water == 0));
    }
    if (agent->health <= 0) end_life(env, i, STARVED, NULL);
    else if (agent->health != before) show_agent(env, agent);
}

/* --- Foes */

static int distance(int columns, int rows) {
    columns = columns < 0 ? -columns : columns;
    rows = rows < 0 ? -rows : rows;
    return columns > rows ? columns : rows;
}

static bool move_foe(Env* env, int f, int columns, int rows) {
    Foe* foe = &env->foes[f];
    int next = foe->cell + columns + rows * env->stride;
    if (next == foe->cell || env->ground[next] != OPEN || env->who[next]) return false;
    if ((env->land[next] & VILLAGE) || tier_at(env, next) < foe->tier) return false;
    env->who[foe->cell] = 0;
    show(env, foe->cell, 0, 0, 0, 0);
    foe->cell = next;
    foe->column += columns;
    foe->row += rows;
    env->who[next] = (uint16_t)(1 + env->num_agents + f);
    show_foe(env, foe);
    return true;
}

static int sign(int x) {
    return (x > 0) - (x < 0);
}

/* The nearest agent in sight of a foe, or -1. */
static int look_for_agent(const Env* env, const Foe* foe) {
    int found = -1, nearest = env->foe_sight + 1;
    for (int y = -env->foe_sight; y <= env->foe_sight; y++) {
        const uint16_t* row = env->who + foe->cell + y * env->stride;
        for (int x = -env->foe_sight; x <= env->foe_sight; x++) {
            int who = row[x];
            if (who == 0 || who > env->num_agents || distance(x, y) >= nearest) continue;
            nearest = distance(x, y);
            found = who - 1;
        }
    }
    return found;
}

static void act_foe(Env* env, int f) {
    static const int ways[4][2] = {{0, -1}, {0, 1}, {-1, 0}, {1, 0}};
    Foe* foe = &env->foes[f];
    foe->pause -= foe->pause > 0;
    if (foe->target < 0) {
        if (foe->tier > 1 && ((env->tick + (uint32_t)f) & 3) == 0) {
            foe->target = look_for_agent(env, foe);
            if (foe->target >= 0) foe->target_life = env->agents[foe->target].life;
        }
        int way = random_int(&env->rng, 32);
        if (foe->target < 0 && way < 4) move_foe(env, f, ways[way][0], ways[way][1]);
        return;
    }
    const Agent* agent = &env->agents[foe->target];
    int columns = agent->column - foe->column, rows = agent->row - foe->row;
    int away = distance(columns, rows);
    if (!agent->alive || agent->life != foe->target_life || away >= env->foe_leash) {
        foe->target = -1;
    } else if (away <= reach_of(env, foe->weapon_kind)) {
        if (foe->pause) return;
        foe->pause = (uint8_t)env->foe_pause;
        int damage = roll_damage(env, 2 * foe->tier - 1, foe->tier - 1, foe->weapon_kind,
                                 agent->combat_level, agent->armour, agent->weapon_kind);
        wound(env, foe->target, damage, SLAIN_BY_FOE, NULL);
    } else {
        bool sideways = abs(columns) > abs(rows);
        if (!move_foe(env, f, sideways ? sign(columns) : 0, sideways ? 0 : sign(rows)))
            move_foe(env, f, sideways ? 0 : sign(columns), sideways ? sign(rows) : 0);
    }
}

/* --- What agents see */

static void write_observation(const Env* env, int i, uint8_t* out, uint8_t* masks) {
    const Agent* agent = &env->agents[i];
    int side = 2 * env->vision + 1, cell = agent->cell, far = env->vision;
    const uint8_t* look = env->look + (size_t)(cell - far * env->stride - far) * TILE;
    for (int row = 0; row < side; row++, look += (size_t)env->stride * TILE, out += side * TILE)
        memcpy(out, look, (size_t)(side * TILE));

    int reach = reach_of(env, agent->weapon_kind), foes = 0, others = 0;
    for (int y = -reach; y <= reach; y++) {
        const uint16_t* row = env->who + cell + y * env->stride;
        for (int x = -reach; x <= reach; x++) {
            foes |= row[x] > env->num_agents;
            others += row[x] != 0;
        }
    }
    others = others > 1 && tier_at(env, cell) >= env->pvp_tier && find_target(env, agent, false);

    int health = agent->health > 0 ? agent->health : 0; /* a slain agent's may be below 0 */
    *out++ = (uint8_t)((health * 5 + FULL - 1) / FULL);
    *out++ = (uint8_t)((agent->food * 5 + FULL - 1) / FULL);
    *out++ = (uint8_t)((agent->water * 5 + FULL - 1) / FULL);
    *out++ = agent->struck == env->tick;
    *out++ = (uint8_t)foes;
    *out++ = (uint8_t)others;
    *out++ = (uint8_t)tier_at(env, cell);
    *out++ = (uint8_t)tier_at(env, cell - far * env->stride);
    *out++ = (uint8_t)tier_at(env, cell + far * env->stride);
    *out++ = (uint8_t)tier_at(env, cell - far);
    *out++ = (uint8_t)tier_at(env, cell + far);
    Place well = env->wells[env->nearest[cell]];
    int columns = well.column - agent->column, rows = well.row - agent->row;
    const int ways[] = {-rows, rows, -columns, columns};
    for (int way = 0; way < 4; way++) {
        int away = (ways[way] + 3) / 4;
        *out++ = (uint8_t)(away < 0 ? 0 : away < 9 ? away : 9);
    }
    for (int kind = ITEM_SWORD; kind <= ITEM_STAFF; kind++)
        *out++ = agent->weapon_kind == kind;
    *out++ = agent->weapon;
    *out++ = agent->armour;
    *out++ = agent->tool;
    int digits = agent->gold ? 32 - __builtin_clz((unsigned)agent->gold) : 0;
    int room = env->bag - agent->bag_count;
    *out++ = (uint8_t)(digits < 9 ? digits : 9);
    *out++ = (uint8_t)(room < 5 ? room : 5);
    *out++ = agent->offer_count;
    for (int skill = 0; skill < SKILLS; skill++)
        out[skill] = agent->levels[skill] - 1;
    memcpy(out + SKILLS, agent->progress, SKILLS);
    out += 2 * SKILLS;
    for (int kind = 0; kind < KINDS; kind++)
        out[kind] = agent->held[kind] < 5 ? agent->held[kind] : 5;
    memcpy(out + KINDS, agent->top, KINDS);
    out += 2 * KINDS;
    bool trades = may_trade(env, agent);
    for (int kind = 0; kind < KINDS; kind++) {
        int step = 0, tier = trades && room ? best_offer(env, agent, kind, STEPS - 1, &step) : 0;
        out[kind] = (uint8_t)tier;
        out[KINDS + kind] = (uint8_t)(tier ? step + 1 : 0);
    }
    if (!masks) return;
    memset(masks, 1, MOVES + ACTS + STEPS);
    masks += MOVES;
    masks[STRIKE_FOE] = (uint8_t)foes;
    masks[STRIKE_AGENT] = (uint8_t)others;
    memcpy(masks + USE, agent->use, KINDS);
    bool may_sell = trades && agent->offer_count < env->offers;
    for (int kind = 0; kind < KINDS; kind++) {
        masks[SELL + kind] = may_sell & (agent->held[kind] > 0);
        masks[BUY + kind] = out[kind] > 0;
    }
}

static void write_observations(Env* env) {
    int side = 2 * env->vision + 1, size = side * side * TILE + OWN;
    for (int i = 0; i < env->num_agents; i++) {
        uint8_t* masks = env->action_masks ? env->action_masks + i * (MOVES + ACTS + STEPS) : NULL;
        write_observation(env, i, env->observations + (size_t)i * (size_t)size, masks);
    }
}

static void c_reset(Env* env) {
    for (int rough = 7; !draw_land(env, (float)rough / 7) && rough > 0;)
        rough--;
    memset(env->who, 0, (size_t)env->cells * sizeof(uint16_t));
    memset(env->stalls, 0, (size_t)(env->num_agents * env->offers) * sizeof(Offer));
    memset(env->queues, 0xFF, sizeof(env->queues)); /* -1 */
    memset(env->steps_offered, 0, sizeof(env->steps_offered));
    memset(env->tiers_offered, 0, sizeof(env->tiers_offered));
    env->spent_first = env->spent_count = 0;
    env->gold_made = env->gold_lost = 0;
    memset(env->items_made, 0, sizeof(env->items_made));
    memset(env->items_lost, 0, sizeof(env->items_lost));
    env->tick = 1;
    for (int cell = 0; cell < env->cells; cell++)
        paint(env, cell);
    for (int i = 0; i < env->num_agents; i++) {
        env->agents[i].life = 0;
        be_born(env, i);
    }
    for (int f = 0; f < env->num_foes; f++)
        raise_foe(env, f, 0);
    write_observations(env);
}

static void ripen(Env* env) {
    while (env->spent_count && env->spent[env->spent_first].due == env->tick) {
        const Spent* spent = &env->spent[env->spent_first];
        env->ground[spent->cell] = (uint8_t)spent->kind;
        paint(env, spent->cell);
        env->spent_first = env->spent_first + 1 == env->cells ? 0 : env->spent_first + 1;
        env->spent_count--;
    }
}

static bool is_old(const Agent* agent) {
    return agent->alive && agent->age >= agent->span;
}

static void c_step(Env* env) {
    int n = env->num_agents;
    memset(env->rewards, 0, (size_t)n * sizeof(float));
    memset(env->terminals, 0, (size_t)n);
    memset(env->truncations, 0, (size_t)n);
    env->tick++;
    ripen(env);
    for (int k = 0; k < n; k++) {
        int i = env->tick & 1 ? n - 1 - k : k;
        if (env->agents[i].alive) act(env, i);
    }
    for (int f = 0; f < env->num_foes; f++)
        act_foe(env, f);
    bool is_cut = false;
    for (int i = 0; i < n; i++) {
        if (env->agents[i].alive) grow_older(env, i);
        is_cut |= is_old(&env->agents[i]);
    }
    int side = 2 * env->vision + 1, size = side * side * TILE + OWN;
    if (is_cut) {
        for (int i = 0; i < n && env->final_observations; i++)
            if (is_old(&env->agents[i]))
                write_observation(env, i, env->final_observations + (size_t)i * (size_t)size, NULL);
        for (int i = 0; i < n; i++)
            if (is_old(&env->agents[i])) end_life(env, i, AGED, NULL);
    }
    /* The dead see from where they fell, without what they left. */
    for (int i = 0; WANTS_FINAL(env, false) && i < n; i++)
        if (env->terminals[i])
            write_observation(env, i, env->final_observations + (size_t)i * (size_t)size, NULL);
    for (int i = 0; i < n; i++) {
        if (env->agents[i].alive) env->agents[i].total += env->rewards[i];
        else be_born(env, i);
    }
    write_observations(env);
}

/* --- Drawing: the whole map, and beside it the surroundings of agent 0, its state and the market
 */

enum { MAP = 768, PANEL = 384, ZOOM = 24 };

static const Color land_colors[] = {{52, 64, 60, 255},  {82, 132, 74, 255}, {122, 140, 70, 255},
                                    {158, 130, 66, 255}, {156, 98, 62, 255}, {124, 62, 66, 255}};
static const Color node_colors[] = {
    {226, 74, 128, 255}, {142, 212, 240, 255}, {178, 236, 122, 255}, {30, 84, 48, 255},
    {232, 152, 72, 255}, {186, 146, 255, 255}
};
static const Color weapon_colors[] = {
    {236, 242, 246, 255}, {250, 214, 90, 255}, {110, 214, 240, 255}
};
static const Color water_color = {36, 78, 122, 255}, rock_color = {92, 94, 102, 255},
    spent_color = {70, 72, 66, 255}, village_color = {206, 188, 150, 255},
    foe_color = {200, 40, 44, 255};

static Color ground_color(const Env* env, int cell) {
    int ground = env->ground[cell], land = env->land[cell];
    if (ground == WATER || ground == FISH) return water_color;
    if (ground == ROCK) return rock_color;
    return land & VILLAGE ? village_color : land_colors[land & TIER];
}

static void draw_map(const Env* env) {
    int longer = env->width > env->height ? env->width : env->height;
    int size = MAP / longer, skip = (longer + MAP - 1) / MAP; /* pixels a tile, or tiles a pixel */
    if (size < 1) size = 1;
    for (int row = 0; row < env->height; row += skip) {
        for (int column = 0, begin = 0; column < env->width; column = begin) {
            Color color = ground_color(env, cell_at(env, column, row));
            /* tiles of one colour in one go */
            for (begin = column; begin < env->width; begin += skip) {
                Color other = ground_color(env, cell_at(env, begin, row));
                if (memcmp(&color, &other, sizeof(color)) != 0) break;
            }
            DrawRectangle(column / skip * size, row / skip * size, (begin - column) / skip * size,
                          size, color);
        }
    }
    for (int row = 0; row < env->height; row += skip) {
        for (int column = 0; column < env->width; column += skip) {
            int cell = cell_at(env, column, row), ground = env->ground[cell], who = env->who[cell];
            if (ground < SPENT && !who) continue;
            Color color = ground == SPENT ? spent_color
                                          : node_colors[ground >= BERRIES ? ground - BERRIES : 0];
            if (who) color = who > env->num_agents ? foe_color : DRAW_WHITE;
            DrawRectangle(column / skip * size, row / skip * size, size, size, color);
        }
    }
    int side = PANEL / ZOOM * size / skip;
    int x = (env->agents[0].column - env->border) * size / skip - side / 2;
    int y = (env->agents[0].row - env->border) * size / skip - side / 2;
    DrawRectangle(x, y, side, 2, DRAW_GOLD);
    DrawRectangle(x, y + side, side, 2, DRAW_GOLD);
    DrawRectangle(x, y, 2, side, DRAW_GOLD);
    DrawRectangle(x + side, y, 2, side + 2, DRAW_GOLD);
}

static Vector2 point(float x, float y) {
    return (Vector2){x, y};
}

static void draw_node(int ground, float x, float y) {
    Color color = node_colors[ground - BERRIES];
    if (ground == TREE) {
        DrawRectangle((int)x - 2, (int)y + 3, 4, 8, (Color){94, 66, 44, 255});
        draw_triangle(point(x - 10, y + 5), point(x + 10, y + 5), point(x, y - 11), color);
        draw_triangle(point(x - 8, y - 1), point(x + 8, y - 1), point(x, y - 11),
                      (Color){44, 112, 62, 255});
    } else if (ground == FISH) {
        draw_triangle(point(x + 3, y), point(x + 9, y - 5), point(x + 9, y + 5), color);
        draw_quad(point(x - 8, y), point(x - 2, y - 5), point(x + 5, y), point(x - 2, y + 5),
                  color);
    } else if (ground == CRYSTAL || ground == ORE) {
        draw_quad(point(x - 10, y + 9), point(x - 5, y - 5), point(x + 6, y - 7),
                  point(x + 10, y + 9), rock_color);
        if (ground == CRYSTAL) {
            draw_quad(point(x - 6, y), point(x - 3, y - 10), point(x, y), point(x - 3, y + 6),
                      color);
            draw_quad(point(x + 1, y + 2), point(x + 4, y - 6), point(x + 7, y + 2),
                      point(x + 4, y + 7), color);
        } else {
            for (int k = 0; k < 4; k++)
                DrawRectangle((int)x - 6 + 4 * k, (int)y + (k & 1 ? -3 : 3), 4, 4, color);
        }
    } else {
        DrawCircleV(point(x, y + 1), 9, (Color){56, 110, 60, 255});
        for (int k = 0; k < 4; k++)
            DrawCircleV(point(x - 4 + (float)(k % 2 * 8), y - 3 + (float)(k / 2 * 7)), 2.5f, color);
    }
}

/* A creature with its weapon and a bar of health, of which `share` is left. */
static void draw_creature(float x, float y, Color color, int weapon_kind, float share,
                          bool is_player) {
    Color metal = weapon_colors[weapon_kind - ITEM_SWORD];
    if (is_player) DrawCircleV(point(x, y), 11.5f, DRAW_GOLD);
    DrawCircleV(point(x, y), 9, (Color){14, 20, 26, 255});
    DrawCircleV(point(x, y), 8, color);
    if (weapon_kind == ITEM_SWORD) {
        DrawLineEx(point(x - 3, y + 5), point(x + 6, y - 6), 2.5f, metal);
        DrawLineEx(point(x - 4, y), point(x + 1, y + 5), 2, metal);
    } else if (weapon_kind == ITEM_BOW) {
        DrawRing(point(x - 2, y), 5, 7, -80, 80, 16, metal);
        DrawLineEx(point(x - 1, y - 6), point(x - 1, y + 6), 1, metal);
    } else {
        DrawLineEx(point(x - 4, y + 6), point(x + 3, y - 4), 2.5f, metal);
        DrawCircleV(point(x + 4, y - 5), 2.5f, metal);
    }
    DrawRectangle((int)x - 9, (int)y - 12, 18, 3, (Color){14, 20, 26, 255});
    DrawRectangle((int)x - 9, (int)y - 12, (int)(18 * share), 3,
                  share > 0.5f ? DRAW_GREEN : DRAW_RED);
}

static void draw_surroundings(const Env* env) {
    const Agent* player = &env->agents[0];
    int tiles = PANEL / ZOOM;
    for (int layer = 0; layer < 2; layer++) {
        for (int y = 0; y < tiles; y++) {
            for (int x = 0; x < tiles; x++) {
                int column = player->column - tiles / 2 + x, row = player->row - tiles / 2 + y;
                if (column < 0 || row < 0 || column >= env->stride || row >= env->rows) continue;
                int cell = row * env->stride + column, ground = env->ground[cell];
                int who = env->who[cell];
                int left = MAP + x * ZOOM, top = y * ZOOM, middle = ZOOM / 2;
                if (layer == 0) {
                    Color color = ground_color(env, cell);
                    DrawRectangle(left, top, ZOOM, ZOOM, color);
                    if (ground != ROCK)
                        DrawRectangle(left, top, ZOOM - 1, ZOOM - 1,
                                      draw_mix(color, DRAW_BACKGROUND, 0.08f));
                    else if (row == 0 || env->ground[cell - env->stride] != ROCK)
                        DrawRectangle(left, top, ZOOM, 5, draw_mix(color, DRAW_WHITE, 0.2f));
                    if (ground == SPENT)
                        DrawCircleV(point((float)(left + middle), (float)(top + middle)), 5,
                                    spent_color);
                    if (ground >= BERRIES)
                        draw_node(ground, (float)(left + middle), (float)(top + middle));
                } else if (who > env->num_agents) {
                    const Foe* foe = &env->foes[who - 1 - env->num_agents];
                    draw_creature(
                        (float)(left + middle), (float)(top + middle),
                        draw_mix(foe_color, DRAW_BACKGROUND, 0.12f * (float)(foe->tier - 1)),
                        foe->weapon_kind, (float)foe->health / (float)foe_full(env, foe->tier),
                        false);
                } else if (who) {
                    const Agent* agent = &env->agents[who - 1];
                    draw_creature((float)(left + middle), (float)(top + middle),
                                  (Color){52, 92, 170, 255}, agent->weapon_kind,
                                  (float)agent->health / FULL, agent == player);
                }
            }
        }
    }
}

static void draw_bar(const char* name, int x, int y, int width, float share, Color color,
                     const char* value) {
    DrawText(name, x, y, 10, DRAW_GREY);
    DrawRectangle(x + 66, y, width, 9, DRAW_BACKGROUND);
    DrawRectangle(x + 66, y, (int)((float)width * share), 9, color);
    DrawText(value, x + 72 + width, y, 10, DRAW_WHITE);
}

static void draw_panel(const Env* env) {
    static const char* const skills[] = {"fishing", "herbalism", "woodcutting", "mining",
                                         "carving", "melee",     "archery",     "magic"};
    static const char* const kinds[] = {"fish",  "herb", "wood",  "ore",    "crystal", "hide",
                                        "sword", "bow",  "staff", "armour", "tool"};
    const Agent* agent = &env->agents[0];
    const int left = MAP + 14, right = MAP + 206;
    char text[64];
    DrawRectangle(MAP, PANEL, PANEL, MAP - PANEL, DRAW_PANEL);
    const int vitals[] = {agent->health, agent->food, agent->water};
    const Color colors[] = {DRAW_RED, DRAW_GOLD, DRAW_CYAN};
    for (int k = 0; k < 3; k++) {
        snprintf(text, sizeof(text), "%d", vitals[k]);
        draw_bar(k == 0   ? "health"
                 : k == 1 ? "food"
                          : "water",
                 left, PANEL + 14 + 15 * k, 80, (float)vitals[k] / FULL, colors[k], text);
    }
    draw_format(right, PANEL + 14, 10, DRAW_WHITE, "step %d of %d", agent->age, agent->span);
    draw_format(right, PANEL + 29, 10, DRAW_WHITE, "%d gold, %d of %d in the bag", agent->gold,
                agent->bag_count, env->bag);
    draw_format(right, PANEL + 44, 10, DRAW_WHITE, "%s %d, armour %d, tool %d",
                agent->weapon ? kinds[agent->weapon_kind] : "fists", agent->weapon, agent->armour,
                agent->tool);
    for (int skill = 0; skill < SKILLS; skill++) {
        int column = skill < GATHER ? left : right, y = PANEL + 70 + 15 * (skill % GATHER);
        float share = part_done(env, agent->levels[skill], agent->xp[skill]);
        snprintf(text, sizeof(text), "%d", agent->levels[skill]);
        draw_bar(skills[skill], column, y, 70, share, skill < GATHER ? DRAW_GREEN : DRAW_RED, text);
    }

    /* The market: pieces on offer of each kind and tier, at the lowest price. */
    int top = PANEL + 158;
    DrawText("market: lowest price", left, top, 10, DRAW_GOLD);
    for (int t = 0; t < TIERS; t++) {
        draw_format(left + 122 + 38 * t, top, 10, DRAW_GREY, "tier %d", t + 1);
    }
    DrawText("bag", left + 316, top, 10, DRAW_GREY);
    for (int kind = 0; kind < KINDS; kind++) {
        int y = top + 16 + 14 * kind;
        DrawText(kinds[kind], left, y, 10, DRAW_GREY);
        for (int t = 0; t < TIERS; t++) {
            if (!env->steps_offered[kind][t]) continue;
            draw_format(left + 130 + 38 * t, y, 10, DRAW_WHITE, "%d",
                        price_of(t + 1, __builtin_ctz(env->steps_offered[kind][t])));
        }
        if (!agent->held[kind]) continue;
        draw_format(left + 322, y, 10, DRAW_GOLD, "%d", agent->held[kind]);
    }

    int tiers[TIERS] = {0};
    for (int i = 0; i < env->num_agents; i++)
        tiers[tier_at(env, env->agents[i].cell) - 1]++;
    DrawText("agents by land", left, top + 186, 10, DRAW_GREY);
    for (int t = 0; t < TIERS; t++) {
        DrawRectangle(left + 116 + 38 * t, top + 187, 8, 8, land_colors[t + 1]);
        draw_format(left + 130 + 38 * t, top + 186, 10, DRAW_WHITE, "%d", tiers[t]);
    }
    draw_format(left, top + 202, 10, DRAW_GREY, "gold there is: %lld",
                (long long)(env->gold_made - env->gold_lost));
}

static void c_render(Env* env) {
    draw_begin(MAP + PANEL, MAP, "nmmo3");
    draw_map(env);
    draw_surroundings(env);
    draw_panel(env);
    draw_end();
}
