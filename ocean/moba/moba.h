/* Moba: two teams of five heroes, three lanes with towers, waves of creeps, and an ancient in each
 * base. The team that loses its ancient has lost. docs/moba.md has the design. In brief:
 *   - Heroes walk, attack and use three skills each (SKILLS). Deaths of enemies nearby give
 *     experience, which gives levels.
 *   - Creeps walk the lanes and fight whatever they meet. Towers shoot at enemies that come near.
 *     Neutral creeps camp in the jungle.
 *   - A building can be attacked when the one before it has fallen: towers from the outside in,
 *     then the two guards, then the ancient. A team cannot aim at what it does not see.
 *   - A game ends when an ancient falls. After max_ticks it is truncated. The first game of an
 *     environment begins at a random tick, so that environments do not end together; it is not
 *     logged.
 * score is 1 for a game that the first team wins, -1 for one that it loses, and else its lead in
 * buildings over 12.
 * perf is (1 + score) / 2. With self_play all ten heroes are agents, else the second team is
 * scripted.
 *
 *     observation: the game as seen by one hero, turned so that its own base is at the lower left;
 *     ways are over 12 tiles and cut, places over 32, shares within 0..1, all within -1..1; what is
 *     dead (but for levels) or not seen is 0
 *     0 .. 4     role: guardian, medic, rogue, mage, archer
 *     5 .. 27    itself: place (2), health (share; over 2,000), mana (share; over 1,000), level /
 *                15, share of the way to the next level, shield / 500, stunned, slowed, hasted
 *                (each over 40 ticks), time to the next attack / 10, to each skill / 100 (3), each
 *                skill ready and paid for (3), in reach of an enemy tower, dead, time to live again
 *                / 300, time that has gone
 *     28 .. 35   whether it can walk 1.5 tiles in each of the eight directions (order of the
 *                actions)
 *     36 .. 47   each lane: how far own and enemy creeps have come, seen or not (2, shares), towers
 *                left of each (2, / 3)
 *     48 .. 50   nearest own building: way (2), health share
 *     51 .. 60   the two nearest enemy buildings: there, way (2), health share, can be attacked
 *     61 .. 88   the four other heroes of the team, by role: alive, place (2), way (2), health
 *                share, level / 15
 *     89 .. 123  the five heroes of the enemy, by role: dead, seen, way (2), health share, level /
 *                15, stunned
 *     124 .. 143 the five nearest enemy creeps: there, way (2), health over four own blows
 *     144 .. 152 the three nearest own creeps: there, way (2)
 *     153 .. 160 the two nearest neutrals: there, way (2), health over four own blows
 *
 * Actions: move (stay, up, down, left, right, up left, up right, down left, down right), target
 * (heroes, creeps or buildings first), act (nothing, attack, skills 1 to 3). An act that can be
 * carried out replaces the move. */
#pragma once

#define OBSERVATION float
#define HAS_ACTION_MASKS
#define OWN_LOG(X) X(won) X(lost) X(towers) X(towers_lost) X(kills) X(deaths) X(level) X(last_hits)
#define SETTINGS(X) \
    X(bool, self_play, false, "both teams are agents; else the second is scripted") \
    X(bool, demo, false, "the script acts for the agents too") \
    X(float, bot_skill, 1.0, "share of ticks in which a scripted hero acts") \
    X(float, bot_range, 0.0, \
      "the script's skill is drawn for each game, from bot_skill - bot_range .. bot_skill") \
    X(int, bot_push, 1200, "tick at which scripted heroes gather in the middle lane") \
    X(int, frameskip, 1, "ticks of the game in a step") \
    X(int, max_ticks, 3000, "ticks after which a game is truncated") \
    X(float, reward_win, 2.0, "for each of the winners; the losers get as much less") \
    X(float, reward_tower, 0.5, \
      "for each of a team that takes a building; the others get as much less") \
    X(float, reward_siege, 1.0, "for blows at buildings, a whole one's health together") \
    X(float, reward_kill, 0.2, "for the last blow on a hero") \
    X(float, reward_death, -0.2, "for dying") \
    X(float, reward_xp, 0.001, "for a point of experience") \
    X(float, spread, 0.1, "chance in the damage of an attack, as a share of it") \
    X(int, wave_period, 150, "ticks between two waves of creeps") \
    X(float, wave_growth, 0.08, "strength that creeps gain from wave to wave") \
    X(float, creep_speed, 0.4, "tiles in a tick") \
    X(float, melee_health, 300.0, "of a melee creep in the first wave") \
    X(float, melee_damage, 12.0, "of its attack") \
    X(float, ranged_health, 200.0, "of a ranged creep in the first wave") \
    X(float, ranged_damage, 18.0, "of its attack") \
    X(float, tower_health, 600.0, "of a tower of the first row; a sixth more for each row behind") \
    X(float, tower_damage, 60.0, "of its attack") \
    X(float, ancient_health, 1200.0, "of the building that decides the game") \
    X(float, neutral_health, 350.0, \
      "of a small neutral creep; a large one has four times as much") \
    X(float, neutral_damage, 20.0, "of its attack; a large one three times as much") \
    X(int, neutral_respawn, 300, "ticks until a dead neutral creep comes back") \
    X(int, respawn, 40, "ticks until a dead hero comes back ...") \
    X(int, respawn_level, 15, "... and for each level") \
    X(float, creep_xp, 25.0, "experience from a creep") \
    X(float, hero_xp, 80.0, "from a hero of level 1; a fifth more for each level") \
    X(float, tower_xp, 60.0, "from a building, for each of the team") \
    X(float, last_hit, 0.5, "share that comes on top for the last blow") \
    X(float, level_xp, 60.0, \
      "experience that level 2 takes; each further level takes two thirds of this more")
#define FPS 10
#define KEYS(KEY) \
    KEY(0, UP, 1) KEY(0, DOWN, 2) KEY(0, LEFT, 3) KEY(0, RIGHT, 4) \
    KEY(1, C, 1) KEY(1, B, 2) \
    KEY(2, SPACE, 1) KEY(2, A, 2) KEY(2, S, 3) KEY(2, D, 4)
#include "env.h"
#include "draw.h"
#include <stddef.h>

/* slots */
enum {
    HEROES = 5, LANES = 3, ROWS = 3, BUILDING = 5, GUARD = 14, ANCIENT = 16, CREEP = 17, TEAM = 64
};
enum {
    BUILDINGS = CREEP - BUILDING, CREEPS = TEAM - CREEP, NEUTRAL = 2 * TEAM, NEUTRALS = 14,
    UNITS = NEUTRAL + 16
};
enum {
    SIDE = 64, HALF = SIDE / 2, MAX_LEVEL = 15, SKILLS_EACH = 3, OBSERVATIONS = 161, MAX_SIGHT = 9,
    NONE = -1
};
enum { MOVES = 9, TARGETS = 3, ACTS = 5, CHOICES = MOVES + TARGETS + ACTS };
#define FAR 1000.0f         /* the place of units that cannot be aimed at */
/* lanes run along x, y = +-EDGE; bases are at (-EDGE, EDGE) and (EDGE, -EDGE) */
#define EDGE 24.5f
#define BASE_RADIUS 8.0f
#define FOUNTAIN 5.0f       /* a hero this near its base is healed */
#define SHARE_REACH 10.0f   /* heroes this near a death gain experience */
#define CREEP_REACH 5.0f    /* a creep fights enemies this near */
#define OFF_LANE 4.5f       /* a creep this far from its lane gives up */
#define TOWER_REACH 6.5f
#define LEASH 7.0f          /* neutral creeps go no further from their camp */

typedef struct {
    float health, health_growth, mana, damage, damage_growth, range, speed;
    int period; /* ticks between two attacks */
    const char* letter;
} Role;

static const Role ROLES[HEROES] = {
    {700, 90, 300, 40, 4, 1.6f, 0.46f, 7, "G"},
    {460, 55, 400, 34, 3, 5.5f, 0.46f, 7, "M"},
    {500, 62, 300, 54, 6, 1.6f, 0.52f, 6, "R"},
    {430, 52, 450, 38, 3, 5.5f, 0.46f, 7, "W"},
    {450, 58, 300, 42, 7, 6.0f, 0.48f, 6, "A"},
};

/* what a skill needs: an enemy in range, one around, one of the team, nothing */
enum { ENEMY, AROUND, ALLY, SELF };
typedef struct {
    int kind;
    float range, radius, damage, heal, shield; /* radius: around the target, 0: the target alone */
    int stun, slow, haste;                     /* ticks */
    bool leap;                                 /* the hero leaps to the target */
    float mana;
    int cooldown;
} Skill;

static const Skill SKILLS[HEROES][SKILLS_EACH] = {
    /* slam */
    {{.kind = AROUND, .radius = 3, .damage = 60, .stun = 6, .mana = 80, .cooldown = 60},
     /* bulwark */
     {.kind = SELF, .shield = 180, .mana = 60, .cooldown = 75},
     /* charge */
     {.kind = ENEMY, .range = 6, .damage = 40, .slow = 10, .leap = true, .mana = 70,
      .cooldown = 60}},
    /* repair */
    {{.kind = ALLY, .range = 7, .heal = 140, .mana = 70, .cooldown = 40},
     /* frost */
     {.kind = ENEMY, .range = 6, .radius = 2.5f, .damage = 50, .slow = 15, .mana = 80,
      .cooldown = 50},
     /* blessing */
     {.kind = ALLY, .range = 7, .shield = 100, .haste = 20, .mana = 80, .cooldown = 80}},
    /* ambush */
    {{.kind = ENEMY, .range = 6, .damage = 110, .leap = true, .mana = 70, .cooldown = 50},
     /* blades */
     {.kind = AROUND, .radius = 2.5f, .damage = 80, .mana = 60, .cooldown = 35},
     /* sprint */
     {.kind = SELF, .heal = 40, .haste = 25, .mana = 50, .cooldown = 90}},
    /* bolt */
    {{.kind = ENEMY, .range = 7, .damage = 150, .mana = 80, .cooldown = 40},
     /* blaze */
     {.kind = ENEMY, .range = 6, .radius = 3, .damage = 90, .mana = 100, .cooldown = 50},
     /* snare */
     {.kind = ENEMY, .range = 6, .damage = 30, .stun = 10, .mana = 90, .cooldown = 70}},
    /* volley */
    {{.kind = ENEMY, .range = 7, .radius = 2, .damage = 60, .mana = 60, .cooldown = 35},
     /* focus */
     {.kind = SELF, .haste = 40, .mana = 60, .cooldown = 90},
     /* trap */
     {.kind = ENEMY, .range = 6, .damage = 40, .slow = 20, .mana = 50, .cooldown = 50}},
};

static const int BOT_LANES[HEROES] = {0, 2, 1, 1, 2};

typedef struct {
    float mana, shield, xp, total, gain; /* total: rewards of the game; gain: of this tick */
    int level, cooldown[SKILLS_EACH], haste, dead; /* dead: ticks until it lives again */
    int provoked; /* ticks for which towers prefer it, because it hurt a hero */
    float heal, new_shield; /* of this tick */
    int new_haste;
    bool retreats; /* of a bot */
} Hero;

struct Env {
    ENV_COMMON
    bool begun, whole; /* whole: the game began with its first tick */
    int tick, steps, waves, winner; /* winner: NONE while the game continues, 2 if both fell */
    int kills[2], deaths[2], last_hits[2], standing[2]; /* standing: buildings */
    float skill; /* of the script in this game */
    Hero heroes[2 * HEROES];
    /* A team has TEAM slots: heroes, towers lane by lane from the outside, guards, the ancient,
     * creeps. Neutrals come after both teams. health is above 0 while a unit lives. aim_x is x, or
     * FAR if the other team cannot aim at it. */
    _Alignas(64) float x[UNITS], y[UNITS], aim_x[UNITS], health[UNITS],
        max_health[UNITS], damage[UNITS];
    float hurt[UNITS], step_x[UNITS], step_y[UNITS]; /* of this tick, applied at its end */
    int16_t wait[UNITS], stun[UNITS], slow[UNITS], new_stun[UNITS], new_slow[UNITS], victim[UNITS],
        hurter[UNITS];
    /* of creeps; leg: which straight part of the lane */
    uint8_t lane[UNITS], leg[UNITS], ranged[UNITS];
    float front[2][LANES]; /* share of a lane that its first creep has walked */
    /* a bit for each tile, a word for each row; outlook: what buildings see */
    uint64_t sight[2][SIDE], outlook[2][SIDE];
    uint64_t open[SIDE];
    /* rows of the discs of sight, centred on bit 31 */
    uint64_t disc[MAX_SIGHT + 1][2 * MAX_SIGHT + 1];
};

static inline int unit_of(int hero) {
    return hero < HEROES ? hero : TEAM + hero - HEROES;
}

static inline int hero_of(int unit) {
    return unit < TEAM ? unit : unit - TEAM + HEROES;
}

static inline bool is_building(int unit) {
    return unit < NEUTRAL && unit % TEAM >= BUILDING && unit % TEAM < CREEP;
}

static inline bool is_hero(int unit) {
    return unit < NEUTRAL && unit % TEAM < HEROES;
}

/* The second team sees the map after half a turn about its middle. */
static inline float turned(int team) {
    return team ? -1.0f : 1.0f;
}

static inline float squared_distance(const Env* env, int a, int b) {
    float dx = env->x[a] - env->x[b], dy = env->y[a] - env->y[b];
    return dx * dx + dy * dy;
}

static inline bool within(const Env* env, int a, int b, float reach) {
    return squared_distance(env, a, b) <= reach * reach;
}

/* Lanes, in a team's own view: from the own base to the other one. */

static float lane_length(int lane) {
    return lane == 1 ? 2 * EDGE * (float)M_SQRT2 : 4 * EDGE;
}

static void lane_point(int lane, float along, float* x, float* y) {
    along = clampf(along, 0, lane_length(lane));
    if (lane == 1) {
        *x = -EDGE + along * (float)M_SQRT1_2;
        *y = -*x;
        return;
    }
    bool second = along > 2 * EDGE;
    float first = second ? 2 * EDGE : along, rest = along - first;
    *x = lane == 0 ? -EDGE + rest : -EDGE + first;
    *y = lane == 0 ? EDGE - first : EDGE - rest;
}

/* How far along a lane its nearest point to a place is. */
static float lane_along(int lane, float x, float y) {
    if (lane == 1) return clampf((x - y + 2 * EDGE) * (float)M_SQRT1_2, 0, lane_length(1));
    float first = lane == 0 ? EDGE - y : x + EDGE, rest = lane == 0 ? x + EDGE : EDGE - y;
    float off_first = fabsf(rest), off_rest = fabsf(2 * EDGE - first);
    return off_first <= off_rest ? clampf(first, 0, 2 * EDGE)
                                 : 2 * EDGE + clampf(rest, 0, 2 * EDGE);
}

/* The map is made of straight roads and discs, once for all games. */

static void open_road(Env* env, float x0, float y0, float x1, float y1, float radius) {
    for (int row = 0; row < SIDE; row++) {
        for (int column = 0; column < SIDE; column++) {
            float x = (float)(column - HALF) + 0.5f, y = (float)(row - HALF) + 0.5f, dx = x1 - x0;
            float dy = y1 - y0;
            float squared = dx * dx + dy * dy;
            float share = squared > 0 ? clampf(((x - x0) * dx + (y - y0) * dy) / squared, 0, 1) : 0;
            float off_x = x - x0 - share * dx, off_y = y - y0 - share * dy;
            if (off_x * off_x + off_y * off_y <= radius * radius) env->open[row] |= 1ull << column;
        }
    }
}

/* The camps of the first team's half and their mirror images. The last two are large and on the
 * river. */
static void camp_of(int neutral, float* x, float* y) {
    static const float camps[3][2] = {{-16, 6.5f}, {-6.5f, 16}, {-14.5f, -14.5f}};
    int mirrored = neutral % 2, camp = neutral >= 12 ? 2 : neutral / 2 % 2, place = neutral / 4;
    *x = turned(mirrored) * (camps[camp][0] + (neutral < 12 ? (float)(place - 1) : 0));
    *y = turned(mirrored) * (camps[camp][1] + (neutral < 12 && place != 1 ? 0.8f : 0));
}

static const char* c_init(Env* env) {
    if (!(env->bot_skill >= 0 && env->bot_skill <= 1)) return "bot_skill must lie within 0..1";
    if (!(env->bot_range >= 0 && env->bot_range <= env->bot_skill))
        return "bot_range must lie within 0..bot_skill";
    if (env->frameskip < 1 || env->frameskip > 60) return "frameskip must lie within 1..60";
    if (env->max_ticks < 1 || env->max_ticks > 1 << 20)
        return "max_ticks must lie within 1..1048576";
    if (env->wave_period < 1) return "wave_period must be 1 or more";
    if (!(env->spread >= 0 && env->spread <= 1)) return "spread must lie within 0..1";
    if (!(env->creep_speed >= 0 && env->creep_speed <= 1))
        return "creep_speed must lie within 0..1";
    if (env->neutral_respawn < 1 || env->neutral_respawn > 30000)
        return "neutral_respawn must lie within 1..30000";
    if (env->respawn < 1 || env->respawn_level < 0 || env->respawn > 10000 ||
        env->respawn_level > 1000)
        return "respawn must lie within 1..10000, respawn_level within 0..1000";
    if (!(env->melee_health > 0) || !(env->ranged_health > 0) || !(env->tower_health > 0) ||
        !(env->ancient_health > 0) || !(env->neutral_health > 0))
        return "health must be above 0";
    if (!(env->level_xp > 0)) return "level_xp must be above 0";
    for (float side = -1; side <= 1; side += 2) {
        open_road(env, -EDGE, EDGE, side * EDGE, side * EDGE, 3.5f);   /* lanes */
        open_road(env, EDGE, -EDGE, side * EDGE, side * EDGE, 3.5f);
        open_road(env, side * EDGE, side * EDGE, 0, 0, 2.5f);          /* river */
        open_road(env, side * EDGE, -side * EDGE, 0, 0, 3.5f);         /* middle lane */
        open_road(env, side * EDGE, -side * EDGE, side * EDGE, -side * EDGE, BASE_RADIUS);
        open_road(env, side * EDGE, -side * 6.5f, side * 6.5f, -side * 6.5f, 1.5f); /* paths */
        open_road(env, side * 6.5f, -side * EDGE, side * 6.5f, -side * 6.5f, 1.5f);
        open_road(env, side * 16, -side * 6.5f, side * 16, -side * 6.5f, 3);        /* camps */
        open_road(env, side * 6.5f, -side * 16, side * 6.5f, -side * 16, 3);
    }
    for (int radius = 0; radius <= MAX_SIGHT; radius++) {
        for (int row = -radius; row <= radius; row++) {
            int half = (int)sqrtf((float)(radius * radius - row * row) + 0.5f);
            env->disc[radius][row + MAX_SIGHT] = ((2ull << 2 * half) - 1) << (31 - half);
        }
    }
    return NULL;
}

static int num_agents(const Env* env) {
    return env->self_play ? 2 * HEROES : HEROES;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = num_agents(env),
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {MOVES, TARGETS, ACTS},
    };
}

/* Searches. Floats above 0 have the order of their bits. So the lower bits can hold the slot, and a
 * search is a minimum of integers, without a branch. */

typedef union {
    float number;
    uint32_t bits;
} Bits;

enum { SLOT_BITS = TEAM - 1 };
#define NO_KEY 0x7F800000u /* above every distance and health */

/* Finds the nearest of `count` slots from `first` on, within reach, whose key is above `after` (0:
 * the very nearest). `places` is env->aim_x or env->x. Returns the key, or NO_KEY; its lower bits
 * are the slot's number from `first`. */
static inline uint32_t nearest_at(const Env* env, const float* places, int first, int count,
                                  float x, float y, float reach, uint32_t after) {
    const float *aim_x = places + first, *aim_y = env->y + first;
    float most = reach * reach;
    uint32_t best = NO_KEY;
    for (int k = 0; k < count; k++) {
        float dx = aim_x[k] - x, dy = aim_y[k] - y;
        Bits squared = {dx * dx + dy * dy};
        uint32_t key = ((squared.bits & ~(uint32_t)SLOT_BITS) + TEAM) | (uint32_t)k; /* above 0 */
        key = (squared.number <= most) & (key > after) ? key : NO_KEY;
        best = key < best ? key : best;
    }
    return best;
}

static inline int slot(uint32_t key, int first) {
    return key == NO_KEY ? NONE : first + (int)(key & SLOT_BITS);
}

/* The nearest slot that can be aimed at within reach, or NONE. */
static inline int nearest(const Env* env, int first, int count, float x, float y, float reach) {
    return slot(nearest_at(env, env->aim_x, first, count, x, y, reach, 0), first);
}

/* The one of least health within reach, or NONE. */
static inline int weakest(const Env* env, int first, int count, float x, float y, float reach) {
    const float *aim_x = env->aim_x + first, *aim_y = env->y + first, *health = env->health + first;
    float most = reach * reach;
    uint32_t best = NO_KEY;
    for (int k = 0; k < count; k++) {
        float dx = aim_x[k] - x, dy = aim_y[k] - y;
        Bits weight = {health[k]};
        uint32_t key =
            dx * dx + dy * dy <= most ? (weight.bits & ~(uint32_t)SLOT_BITS) | (uint32_t)k : NO_KEY;
        best = key < best ? key : best;
    }
    return slot(best, first);
}

/* The target of a hero within reach. The target head says what comes first: heroes, creeps,
 * buildings. */
static int aim(const Env* env, int unit, int prefers, float reach, bool buildings) {
    enum { HERO, CREEP_, NEUTRAL_, BUILDING_ };
    static const int orders[TARGETS][4] = {
        {HERO, CREEP_, NEUTRAL_, BUILDING_}, {CREEP_, NEUTRAL_, BUILDING_, HERO},
        {BUILDING_, HERO, CREEP_, NEUTRAL_}
    };
    int base = unit < TEAM ? TEAM : 0;
    float x = env->x[unit], y = env->y[unit];
    for (int k = 0; k < 4; k++) {
        int kind = orders[prefers][k];
        if (kind == BUILDING_ && !buildings) continue;
        int first = kind == HERO       ? base
                    : kind == CREEP_   ? base + CREEP
                    : kind == NEUTRAL_ ? NEUTRAL
                                       : base + BUILDING;
        int count = kind == HERO       ? HEROES
                    : kind == CREEP_   ? CREEPS
                    : kind == NEUTRAL_ ? NEUTRALS
                                       : BUILDINGS;
        int found = weakest(env, first, count, x, y, reach);
        if (found != NONE) return found;
    }
    return NONE;
}

/* Sight, which also decides what can be aimed at. */

static bool can_fall(const Env* env, int team, int building) {
    const float* health = env->health + team * TEAM;
    if (building == ANCIENT) return health[GUARD] <= 0 && health[GUARD + 1] <= 0;
    if (building >= GUARD) {
        bool fallen = false;
        for (int lane = 0; lane < LANES; lane++)
            fallen |= health[BUILDING + lane * ROWS + ROWS - 1] <= 0;
        return fallen;
    }
    return (building - BUILDING) % ROWS == 0 || health[building - 1] <= 0;
}

static inline int tile(float x) {
    int at = (int)(x + HALF);
    return at < 0 ? 0 : at >= SIDE ? SIDE - 1 : at;
}

static void look(const Env* env, int unit, int radius, uint64_t* sight) {
    int column = tile(env->x[unit]) - 31, row = tile(env->y[unit]);
    int first = row - radius < 0 ? 0 : row - radius;
    int last = row + radius >= SIDE ? SIDE - 1 : row + radius;
    const uint64_t* disc = env->disc[radius] + MAX_SIGHT - row;
    if (column >= 0)
        for (int r = first; r <= last; r++)
            sight[r] |= disc[r] << column;
    else
        for (int r = first; r <= last; r++)
            sight[r] |= disc[r] >> -column;
}

static inline bool seen_by(const Env* env, int team, int unit) {
    return env->sight[team][tile(env->y[unit])] >> tile(env->x[unit]) & 1;
}

static void see_from_buildings(Env* env, int team) {
    memset(env->outlook[team], 0, sizeof(env->outlook[team]));
    for (int unit = team * TEAM + BUILDING; unit < team * TEAM + CREEP; unit++)
        if (env->health[unit] > 0) look(env, unit, MAX_SIGHT, env->outlook[team]);
}

static void see(Env* env) {
    memcpy(env->sight, env->outlook, sizeof(env->sight));
    for (int team = 0; team < 2; team++) {
        for (int k = 0; k < TEAM; k = k == HEROES - 1 ? CREEP : k + 1)
            if (env->health[team * TEAM + k] > 0)
                look(env, team * TEAM + k, k < CREEP ? MAX_SIGHT : 6, env->sight[team]);
    }
    for (int team = 0; team < 2; team++) {
        for (int k = 0; k < TEAM; k++) {
            int unit = team * TEAM + k;
            bool shown = env->health[unit] > 0 && seen_by(env, !team, unit);
            if (k >= BUILDING && k < CREEP) shown = env->health[unit] > 0 && can_fall(env, team, k);
            env->aim_x[unit] = shown ? env->x[unit] : FAR;
        }
    }
    for (int unit = NEUTRAL; unit < UNITS; unit++)
        env->aim_x[unit] = env->health[unit] > 0 ? env->x[unit] : FAR;
}

/* Fights. All effects go to hurt, new_stun and so on, and are applied when all have acted. */

static void hit(Env* env, int attacker, int victim, float damage) {
    env->hurt[victim] += damage;
    env->victim[attacker] = (int16_t)victim;
    if (is_hero(attacker)) {
        /* so that neither team comes first */
        if (env->hurter[victim] == NONE || env->tick % 2) env->hurter[victim] = (int16_t)attacker;
        if (is_hero(victim)) env->heroes[hero_of(attacker)].provoked = 10;
        else if (victim < NEUTRAL && victim % TEAM < CREEP)
            env->heroes[hero_of(attacker)].gain +=
                env->reward_siege * damage / env->max_health[victim];
    }
}

static void attack(Env* env, int attacker, int victim, int period) {
    float spread = env->spread > 0 ? 1 + random_float(&env->rng, -env->spread, env->spread) : 1;
    hit(env, attacker, victim, env->damage[attacker] * spread);
    env->wait[attacker] = (int16_t)period;
}

static float skill_power(const Hero* hero) {
    return 1 + 0.1f * (float)(hero->level - 1);
}

static void strike(Env* env, int unit, int victim, const Skill* skill, float power) {
    hit(env, unit, victim, skill->damage * power);
    if (skill->stun > env->new_stun[victim]) env->new_stun[victim] = (int16_t)skill->stun;
    if (skill->slow > env->new_slow[victim]) env->new_slow[victim] = (int16_t)skill->slow;
}

/* Strikes every enemy and neutral within radius of a place. Returns how many. */
static int strike_all(Env* env, int unit, float x, float y, float radius, const Skill* skill,
                      float power) {
    int base = unit < TEAM ? TEAM : 0, count = 0;
    for (int part = 0; part < 3; part++) {
        int first = part == 0 ? base : part == 1 ? base + CREEP : NEUTRAL;
        int last = part == 0 ? base + HEROES : part == 1 ? base + TEAM : NEUTRAL + NEUTRALS;
        for (int k = first; k < last; k++) {
            float dx = env->aim_x[k] - x, dy = env->y[k] - y;
            if (dx * dx + dy * dy > radius * radius) continue;
            strike(env, unit, k, skill, power);
            count++;
        }
    }
    return count;
}

/* The ally within range, or itself, with the smallest share of health. */
static int most_hurt_ally(const Env* env, int unit, float range) {
    int best = unit, base = unit - unit % TEAM;
    for (int k = base; k < base + HEROES; k++)
        if (env->health[k] > 0 && within(env, unit, k, range) &&
            env->health[k] * env->max_health[best] < env->health[best] * env->max_health[k])
            best = k;
    return best;
}

static bool is_ready(const Env* env, int unit, int k) {
    const Hero* hero = &env->heroes[hero_of(unit)];
    return hero->cooldown[k] == 0 && hero->mana >= SKILLS[unit % TEAM][k].mana;
}

/* Uses a skill if that is possible. Returns whether it was. */
static bool cast(Env* env, int unit, int k, int prefers) {
    const Skill* skill = &SKILLS[unit % TEAM][k];
    Hero* hero = &env->heroes[hero_of(unit)];
    if (!is_ready(env, unit, k)) return false;
    float power = skill_power(hero);
    int target = unit;
    if (skill->kind == ENEMY) {
        target = aim(env, unit, prefers, skill->range, false);
        if (target == NONE) return false;
        if (skill->radius > 0) {
            strike_all(env, unit, env->x[target], env->y[target], skill->radius, skill, power);
            env->victim[unit] = (int16_t)target;
        } else {
            strike(env, unit, target, skill, power);
        }
        if (skill->leap) {
            env->step_x[unit] = 0.85f * (env->x[target] - env->x[unit]);
            env->step_y[unit] = 0.85f * (env->y[target] - env->y[unit]);
        }
    } else if (skill->kind == AROUND) {
        if (!strike_all(env, unit, env->x[unit], env->y[unit], skill->radius, skill, power))
            return false;
    } else {
        if (skill->kind == ALLY) target = most_hurt_ally(env, unit, skill->range);
        Hero* helped = &env->heroes[hero_of(target)];
        helped->heal += skill->heal * power;
        helped->new_shield = maxf(helped->new_shield, skill->shield * power);
        if (skill->haste > helped->new_haste) helped->new_haste = skill->haste;
    }
    hero->mana -= skill->mana;
    hero->cooldown[k] = skill->cooldown;
    return true;
}

static const float WAYS[MOVES][2] = {
    {0, 0}, {0, -1}, {0, 1}, {-1, 0}, {1, 0}, {-(float)M_SQRT1_2, -(float)M_SQRT1_2},
    {(float)M_SQRT1_2, -(float)M_SQRT1_2}, {-(float)M_SQRT1_2, (float)M_SQRT1_2},
    {(float)M_SQRT1_2, (float)M_SQRT1_2}
};

static bool is_open(const Env* env, float x, float y) {
    return fabsf(x) < HALF && fabsf(y) < HALF && env->open[tile(y)] >> tile(x) & 1;
}

static float speed_of(const Env* env, int unit) {
    float speed = ROLES[unit % TEAM].speed;
    if (env->heroes[hero_of(unit)].haste) speed *= 1.4f;
    return env->slow[unit] ? 0.5f * speed : speed;
}

/* An order is (move, target, act) in the hero's own view. */
static void obey(Env* env, int unit, const int32_t* order) {
    Hero* hero = &env->heroes[hero_of(unit)];
    const Role* role = &ROLES[unit % TEAM];
    if (hero->dead || env->stun[unit]) return;
    if (order[2] == 1 && env->wait[unit] == 0) {
        int target = aim(env, unit, order[1], role->range, true);
        if (target != NONE) {
            attack(env, unit, target, hero->haste ? role->period * 2 / 3 : role->period);
            return;
        }
    } else if (order[2] >= 2 && cast(env, unit, order[2] - 2, order[1])) {
        return;
    }
    float length = turned(unit >= TEAM) * speed_of(env, unit);
    env->step_x[unit] = length * WAYS[order[0]][0];
    env->step_y[unit] = length * WAYS[order[0]][1];
}

/* A creep whose target is dead, hidden or out of reach looks for the nearest, every fourth tick.
 * Without one it walks along its lane, on a line of its own a little aside. It gives up a target
 * that leads it off its lane. */
static void creep_act(Env* env, int unit) {
    int team = unit / TEAM, base = team ? 0 : TEAM, lane = env->lane[unit];
    int target = env->victim[unit];
    float x = env->x[unit], y = env->y[unit], sign = turned(team), own_x = sign * x;
    float own_y = sign * y;
    /* aside: from the middle of the lane; left: tiles to walk on this part of it */
    float aside, left;
    bool up = (lane == 0) == (env->leg[unit] == 0);
    if (lane == 1) {
        aside = (own_x + own_y) * (float)M_SQRT1_2;
        left = (2 * EDGE - own_x + own_y) * (float)M_SQRT1_2;
    } else {
        float middle = lane == 0 ? -EDGE : EDGE;
        aside = (up ? own_x : own_y) - middle;
        left = up ? own_y + EDGE : EDGE - own_x;
    }
    float share = 1 - (env->leg[unit] || lane == 1 ? left : left + 2 * EDGE) / lane_length(lane);
    env->front[team][lane] = maxf(env->front[team][lane], minf(share, 1));
    if (env->stun[unit]) return;
    float dx = 0, dy = 0, squared = 0;
    if (target == NONE && (env->tick + unit) % 4 == 0)
        target = nearest(env, base, TEAM, x, y, CREEP_REACH);
    if (target != NONE) {
        dx = env->aim_x[target] - x;
        dy = env->y[target] - y;
        squared = dx * dx + dy * dy;
        if (squared > CREEP_REACH * CREEP_REACH || fabsf(aside) > OFF_LANE) target = NONE;
    }
    env->victim[unit] = (int16_t)target;
    float speed = env->slow[unit] ? 0.5f * env->creep_speed : env->creep_speed;
    if (target != NONE) {
        float range = env->ranged[unit] ? 4.5f : 1.4f;
        if (squared <= range * range) {
            if (env->wait[unit] == 0) attack(env, unit, target, 5);
            return;
        }
        float scale = speed / sqrtf(squared);
        env->step_x[unit] = dx * scale;
        env->step_y[unit] = dy * scale;
        return;
    }
    if (left < 1 && (lane == 1 || env->leg[unit])) return; /* in the other base */
    if (left < 1) env->leg[unit] = 1;
    float back = clampf(0.2f * ((float)(unit % TEAM % 3 - 1) - aside), -0.5f, 0.5f);
    dx = lane == 1 ? (float)M_SQRT1_2 * (1 + back) : up ? back : 1;
    dy = lane == 1 ? (float)M_SQRT1_2 * (back - 1) : up ? -1 : back;
    env->step_x[unit] = sign * dx * speed;
    env->step_y[unit] = sign * dy * speed;
}

static void tower_act(Env* env, int unit) {
    int base = unit < TEAM ? TEAM : 0, own = unit < TEAM ? 0 : HEROES, target = NONE;
    float x = env->x[unit], y = env->y[unit];
    /* an enemy that hurt a hero of the team lately */
    for (int k = 0; k < HEROES && target == NONE; k++) {
        if (!env->heroes[HEROES - own + k].provoked) continue;
        float dx = env->aim_x[base + k] - x, dy = env->y[base + k] - y;
        if (dx * dx + dy * dy <= TOWER_REACH * TOWER_REACH) target = base + k;
    }
    if (target == NONE) target = nearest(env, base + CREEP, CREEPS, x, y, TOWER_REACH);
    if (target == NONE) target = nearest(env, base, HEROES, x, y, TOWER_REACH);
    env->victim[unit] = (int16_t)target;
    if (target != NONE) attack(env, unit, target, 5);
}

/* Neutrals fight only a hero that hurt them, while it is near their camp. */
static void neutral_act(Env* env, int unit) {
    float home_x, home_y;
    camp_of(unit - NEUTRAL, &home_x, &home_y);
    int target = env->victim[unit];
    if (env->hurter[unit] != NONE) target = env->hurter[unit];
    if (target != NONE) {
        float dx = env->x[target] - home_x, dy = env->y[target] - home_y;
        if (env->health[target] <= 0 || dx * dx + dy * dy > LEASH * LEASH) target = NONE;
    }
    env->victim[unit] = (int16_t)target;
    if (env->stun[unit]) return;
    float to_x = target == NONE ? home_x : env->x[target];
    float to_y = target == NONE ? home_y : env->y[target];
    float dx = to_x - env->x[unit], dy = to_y - env->y[unit], distance = sqrtf(dx * dx + dy * dy);
    if (target != NONE && distance <= 1.6f) {
        if (env->wait[unit] == 0) attack(env, unit, target, 6);
        return;
    }
    float step = minf(env->slow[unit] ? 0.2f : 0.4f, distance);
    if (step <= 0) return;
    env->step_x[unit] = dx / distance * step;
    env->step_y[unit] = dy / distance * step;
}

/* Bots: docs/moba.md says what they try. */

static int way_to(float dx, float dy) {
    if (dx * dx + dy * dy < 0.05f) return 0;
    float flat = 0.4142136f; /* tan of 22.5 degrees */
    if (fabsf(dy) < flat * fabsf(dx)) return dx < 0 ? 3 : 4;
    if (fabsf(dx) < flat * fabsf(dy)) return dy < 0 ? 1 : 2;
    return dy < 0 ? (dx < 0 ? 5 : 6) : dx < 0 ? 7 : 8;
}

static void bot_order(Env* env, int unit, int32_t* order) {
    int team = unit / TEAM, base = team ? 0 : TEAM, own = team * TEAM, role = unit % TEAM;
    Hero* hero = &env->heroes[hero_of(unit)];
    float sign = turned(team), x = env->x[unit], y = env->y[unit];
    float share = env->health[unit] / env->max_health[unit];
    order[0] = order[1] = order[2] = 0;
    if (hero->dead || (env->skill < 1 && random_float(&env->rng, 0, 1) >= env->skill)) return;
    int lane = env->tick >= env->bot_push ? 1 : BOT_LANES[role];
    float along = lane_along(lane, sign * x, sign * y), length = lane_length(lane);
    float range = ROLES[role].range;

    float theirs = 0, ours = 0;
    for (int k = 0; k < HEROES; k++) {
        if (env->aim_x[base + k] != FAR && within(env, unit, base + k, 9))
            theirs += env->health[base + k];
        if (env->health[own + k] > 0 && within(env, unit, own + k, 9)) ours += env->health[own + k];
    }
    bool brave = ours >= 0.8f * theirs;
    int enemy = nearest(env, base, HEROES, x, y, 7), tower = NONE, cover = 0;
    for (int k = base + BUILDING; k < base + ANCIENT; k++)
        if (env->health[k] > 0 && within(env, unit, k, TOWER_REACH + 1)) tower = k;
    for (int k = own + CREEP; tower != NONE && k < own + TEAM; k++)
        cover += env->health[k] > 0 && within(env, tower, k, TOWER_REACH);
    bool exposed = tower != NONE && cover == 0;
    int more = 0; /* how many more heroes live than theirs */
    for (int k = 0; k < HEROES; k++)
        more += (env->health[own + k] > 0) - (env->health[base + k] > 0);
    hero->retreats = hero->retreats ? share < 0.9f : share < (more >= 2 ? 0.15f : 0.3f);

    /* Where to go: home, away from what is too strong, to a hero that can be beaten, or to the own
     * creeps. */
    float front = env->front[team][lane] * length, goal;
    if (env->front[team][lane] <= 0) { /* without creeps: to the outermost building */
        front = 0;
        for (int row = 0; row < ROWS; row++) {
            int k = own + BUILDING + lane * ROWS + row;
            if (env->health[k] > 0 && front == 0)
                front = lane_along(lane, sign * env->x[k], sign * env->y[k]);
        }
    }
    goal = front - (range > 2 ? 2.5f : 0);
    float goal_x, goal_y;
    lane_point(lane, along + clampf(goal - along, -3, 3), &goal_x, &goal_y);
    float dx = goal_x - sign * x, dy = goal_y - sign * y;
    bool away = hero->retreats || exposed || (theirs > 0 && !brave);
    if (away) {
        lane_point(lane, along - 3, &goal_x, &goal_y);
        if (along < 4) goal_x = -EDGE - 1, goal_y = EDGE + 1;
        dx = goal_x - sign * x;
        dy = goal_y - sign * y;
    } else if (enemy != NONE && brave && tower == NONE) {
        dx = sign * (env->x[enemy] - x);
        dy = sign * (env->y[enemy] - y);
    }
    order[0] = way_to(dx, dy);

    bool fights = enemy != NONE && (brave || !away);
    for (int k = 0; k < SKILLS_EACH; k++) {
        const Skill* skill = &SKILLS[role][k];
        if (!is_ready(env, unit, k)) continue;
        bool useful = false;
        float reach = skill->kind == AROUND ? skill->radius : skill->range;
        if (skill->kind == ENEMY || skill->kind == AROUND)
            useful = enemy != NONE && within(env, unit, enemy, reach) &&
                     (!skill->leap || (fights && !away));
        else if (skill->kind == ALLY) {
            int ally = most_hurt_ally(env, unit, reach);
            useful = env->health[ally] < 0.7f * env->max_health[ally];
        } else {
            useful = enemy != NONE && (fights || share < 0.5f);
        }
        /* on creeps, if there are several */
        if (!useful && !away && skill->radius > 0 && hero->mana > 200)
            useful = nearest(env, base + CREEP, CREEPS, x, y, reach) != NONE;
        if (useful) {
            order[2] = 2 + k;
            return;
        }
    }
    if (away || env->wait[unit]) return;
    int creep = weakest(env, base + CREEP, CREEPS, x, y, range);
    bool last_blow = creep != NONE && env->health[creep] <= env->damage[unit];
    bool building = nearest(env, base + BUILDING, BUILDINGS, x, y, range) != NONE;
    order[2] = 1;
    order[1] = last_blow                                          ? 1
               : enemy != NONE && within(env, unit, enemy, range) ? 0
               : building                                         ? 2
                                                                  : 1;
}

/* The tick's end. */

static void move_all(Env* env) {
    for (int unit = 0; unit < UNITS; unit++) {
        if (env->step_x[unit] == 0 && env->step_y[unit] == 0) continue;
        float x = env->x[unit] + env->step_x[unit], y = env->y[unit] + env->step_y[unit];
        bool walks = is_hero(unit) || unit >= NEUTRAL; /* the others keep to their lanes */
        if (!walks || is_open(env, x, y)) {
            env->x[unit] = x;
            env->y[unit] = y;
        } else if (is_open(env, x, env->y[unit])) {
            env->x[unit] = x;
        } else if (is_open(env, env->x[unit], y)) {
            env->y[unit] = y;
        }
        env->step_x[unit] = env->step_y[unit] = 0;
    }
}

static float next_level(const Env* env, int level) {
    return env->level_xp * (1 + (float)(level - 1) * (2.0f / 3));
}

static void set_strength(Env* env, int unit) {
    const Role* role = &ROLES[unit % TEAM];
    float levels = (float)(env->heroes[hero_of(unit)].level - 1);
    env->max_health[unit] = role->health + levels * role->health_growth;
    env->damage[unit] = role->damage + levels * role->damage_growth;
}

static void learn(Env* env, int unit, float xp) {
    Hero* hero = &env->heroes[hero_of(unit)];
    hero->gain += env->reward_xp * xp;
    hero->xp += xp;
    while (hero->level < MAX_LEVEL && hero->xp >= next_level(env, hero->level)) {
        hero->xp -= next_level(env, hero->level++);
        set_strength(env, unit);
        if (!hero->dead) env->health[unit] += ROLES[unit % TEAM].health_growth;
    }
    if (hero->level == MAX_LEVEL) hero->xp = 0;
}

/* Heroes near the dead get equal shares; the last blow gets more. */
static void share_xp(Env* env, int team, int dead, float xp) {
    int near[HEROES], count = 0, killer = env->hurter[dead];
    for (int k = team * TEAM; k < team * TEAM + HEROES; k++)
        if (env->health[k] > 0 && within(env, k, dead, SHARE_REACH)) near[count++] = k;
    for (int k = 0; k < count; k++)
        learn(env, near[k], xp / (float)count);
    if (killer != NONE && killer / TEAM == team && env->health[killer] > 0)
        learn(env, killer, env->last_hit * xp);
}

static void place_hero(Env* env, int unit) {
    float sign = turned(unit >= TEAM), role = (float)(unit % TEAM);
    Hero* hero = &env->heroes[hero_of(unit)];
    env->x[unit] = sign * (-EDGE - 1 + 0.7f * (role - 2));
    env->y[unit] = sign * (EDGE + 1 + 0.7f * (role - 2));
    env->health[unit] = env->max_health[unit];
    env->wait[unit] = env->stun[unit] = env->slow[unit] = 0;
    hero->mana = ROLES[unit % TEAM].mana;
    hero->shield = 0;
    hero->haste = hero->provoked = hero->dead = 0;
    hero->retreats = false;
}

static void place_neutral(Env* env, int unit) {
    bool large = unit - NEUTRAL >= 12;
    camp_of(unit - NEUTRAL, &env->x[unit], &env->y[unit]);
    env->health[unit] = env->max_health[unit] = env->neutral_health * (large ? 4 : 1);
    env->damage[unit] = env->neutral_damage * (large ? 3 : 1);
    env->wait[unit] = env->stun[unit] = env->slow[unit] = 0;
    env->victim[unit] = NONE;
}

static void die(Env* env, int unit) {
    int killer = env->hurter[unit];
    if (unit >= NEUTRAL) {
        float xp = env->creep_xp * (unit - NEUTRAL >= 12 ? 6.0f : 1.5f);
        if (killer != NONE) share_xp(env, killer / TEAM, unit, xp);
        env->wait[unit] = (int16_t)env->neutral_respawn;
        return;
    }
    int team = unit / TEAM, other = !team, k = unit % TEAM;
    if (k < HEROES) {
        Hero* hero = &env->heroes[hero_of(unit)];
        hero->dead = env->respawn + env->respawn_level * hero->level;
        hero->gain += env->reward_death;
        if (killer != NONE) env->heroes[hero_of(killer)].gain += env->reward_kill;
        env->deaths[team]++;
        env->kills[other]++;
        share_xp(env, other, unit, env->hero_xp * (1 + 0.2f * (float)(hero->level - 1)));
    } else if (k < CREEP) {
        env->standing[team]--;
        see_from_buildings(env, team);
        for (int h = 0; h < HEROES; h++) {
            env->heroes[other * HEROES + h].gain += env->reward_tower;
            env->heroes[team * HEROES + h].gain -= env->reward_tower;
            learn(env, other * TEAM + h, env->tower_xp);
        }
        if (k == ANCIENT) env->winner = env->winner == NONE ? other : 2; /* 2: both at once */
    } else {
        env->last_hits[other] += killer != NONE;
        share_xp(env, other, unit, env->creep_xp);
    }
}

/* No search finds a dead unit. A dead hero waits at home. */
static void bury(Env* env, int unit) {
    env->health[unit] = 0;
    env->x[unit] = FAR;
    if (!is_hero(unit)) return;
    env->x[unit] = turned(unit >= TEAM) * -EDGE;
    env->y[unit] = turned(unit >= TEAM) * EDGE;
}

static void hurt_all(Env* env) {
    int dying[UNITS], count = 0;
    for (int h = 0; h < 2 * HEROES; h++) {
        Hero* hero = &env->heroes[h];
        int unit = unit_of(h);
        if (hero->dead) continue;
        env->health[unit] = minf(env->health[unit] + hero->heal, env->max_health[unit]);
        hero->shield = maxf(hero->shield, hero->new_shield);
        if (hero->new_haste > hero->haste) hero->haste = hero->new_haste;
        hero->heal = hero->new_shield = 0;
        hero->new_haste = 0;
        float held = minf(hero->shield, env->hurt[unit]);
        hero->shield -= held;
        env->hurt[unit] -= held;
    }
    for (int unit = 0; unit < UNITS; unit++) {
        bool lives = env->health[unit] > 0;
        env->health[unit] -= lives ? env->hurt[unit] : 0;
        if (lives && env->health[unit] <= 0) dying[count++] = unit;
        env->stun[unit] =
            env->new_stun[unit] > env->stun[unit] ? env->new_stun[unit] : env->stun[unit];
        env->slow[unit] =
            env->new_slow[unit] > env->slow[unit] ? env->new_slow[unit] : env->slow[unit];
    }
    for (int k = 0; k < count; k++)
        env->health[dying[k]] = 0;
    /* comes last, so that their experience does not lift a hero that dies beside them */
    for (int buildings = 0; buildings < 2; buildings++)
        for (int k = 0; k < count; k++)
            if (is_building(dying[k]) == buildings) die(env, dying[k]);
    for (int k = 0; k < count; k++)
        bury(env, dying[k]);
    memset(env->hurt, 0, sizeof(env->hurt));
    memset(env->new_stun, 0, sizeof(env->new_stun));
    memset(env->new_slow, 0, sizeof(env->new_slow));
}

static void send_wave(Env* env) {
    float strength = 1 + env->wave_growth * (float)env->waves++;
    for (int team = 0; team < 2; team++) {
        for (int k = 0, unit = team * TEAM + CREEP; k < 4 * LANES; k++) {
            while (unit < team * TEAM + TEAM && env->health[unit] > 0)
                unit++;
            /* there is no slot left for this creep */
            if (unit == team * TEAM + TEAM) break;
            bool ranged = k % 4 == 3;
            env->lane[unit] = (uint8_t)(k / 4);
            env->leg[unit] = 0;
            env->ranged[unit] = ranged;
            float x, y;
            lane_point(k / 4, ranged ? 1.5f : 3.0f, &x, &y);
            env->x[unit] = turned(team) * x;
            env->y[unit] = turned(team) * y;
            env->health[unit] = env->max_health[unit] =
                strength * (ranged ? env->ranged_health : env->melee_health);
            env->damage[unit] = strength * (ranged ? env->ranged_damage : env->melee_damage);
            env->wait[unit] = env->stun[unit] = env->slow[unit] = 0;
            env->victim[unit] = NONE;
        }
    }
}

static void pass_time(Env* env) {
    for (int unit = 0; unit < UNITS; unit++) {
        env->wait[unit] -= env->wait[unit] > 0;
        env->stun[unit] -= env->stun[unit] > 0;
        env->slow[unit] -= env->slow[unit] > 0;
        env->hurter[unit] = NONE;
    }
    for (int h = 0; h < 2 * HEROES; h++) {
        Hero* hero = &env->heroes[h];
        int unit = unit_of(h);
        hero->haste -= hero->haste > 0;
        hero->provoked -= hero->provoked > 0;
        for (int k = 0; k < SKILLS_EACH; k++)
            hero->cooldown[k] -= hero->cooldown[k] > 0;
        if (hero->dead) {
            if (--hero->dead == 0) place_hero(env, unit);
            continue;
        }
        float sign = turned(h >= HEROES), dx = sign * env->x[unit] + EDGE;
        float dy = sign * env->y[unit] - EDGE;
        bool home = dx * dx + dy * dy <= FOUNTAIN * FOUNTAIN;
        float mana = ROLES[unit % TEAM].mana * (home ? 0.05f : 0.002f);
        env->health[unit] =
            minf(env->health[unit] + env->max_health[unit] * (home ? 0.03f : 0.001f),
                 env->max_health[unit]);
        hero->mana = minf(hero->mana + mana, ROLES[unit % TEAM].mana);
    }
    for (int unit = NEUTRAL; unit < NEUTRAL + NEUTRALS; unit++) {
        if (env->health[unit] <= 0 && env->wait[unit] == 0) place_neutral(env, unit);
        else if (env->health[unit] > 0 && env->victim[unit] == NONE)
            env->health[unit] = env->max_health[unit];
    }
    if (env->tick % env->wave_period == 0) send_wave(env);
}

/* Observations. */

static inline float cut(float x) {
    return clampf(x, -1, 1);
}

/* Writes 1 and the way, or zeros if there is no one. */
static float* write_way(const Env* env, float* out, int unit, int other, float sign) {
    bool there = other != NONE;
    out[0] = there;
    out[1] = there ? cut(sign * (env->x[other] - env->x[unit]) / 12) : 0;
    out[2] = there ? cut(sign * (env->y[other] - env->y[unit]) / 12) : 0;
    return out + 3;
}

static float towers_left(const Env* env, int team, int lane) {
    const float* health = env->health + team * TEAM + BUILDING + lane * ROWS;
    return (float)((health[0] > 0) + (health[1] > 0) + (health[2] > 0)) / ROWS;
}

/* Writes the `count` nearest of a kind, nearest first: 1, the way, and, if `blows` is not 0, health
 * times blows. */
static float* write_nearest(const Env* env, float* out, int unit, const float* places, int first,
                            int slots, float reach, int count, float blows, float sign) {
    uint32_t key = 0;
    for (int k = 0; k < count; k++) {
        if (key != NO_KEY)
            key = nearest_at(env, places, first, slots, env->x[unit], env->y[unit], reach, key);
        int found = slot(key, first);
        out = write_way(env, out, unit, found, sign);
        if (blows > 0) *out++ = found == NONE ? 0 : minf(env->health[found] * blows, 1);
    }
    return out;
}

static void write_observation(const Env* env, int h, float* out) {
    const Hero* hero = &env->heroes[h];
    int unit = unit_of(h), team = h >= HEROES, role = unit % TEAM, own = team * TEAM;
    int base = team ? 0 : TEAM;
    float sign = turned(team), x = env->x[unit], y = env->y[unit];
    bool dead = hero->dead > 0;
    for (int k = 0; k < HEROES; k++)
        *out++ = k == role;
    *out++ = sign * x / HALF;
    *out++ = sign * y / HALF;
    *out++ = env->health[unit] / env->max_health[unit];
    *out++ = minf(env->health[unit] / 2000, 1);
    *out++ = hero->mana / ROLES[role].mana;
    *out++ = hero->mana / 1000;
    *out++ = (float)hero->level / MAX_LEVEL;
    *out++ = minf(hero->xp / next_level(env, hero->level), 1);
    *out++ = minf(hero->shield / 500, 1);
    *out++ = minf((float)env->stun[unit] / 40, 1);
    *out++ = minf((float)env->slow[unit] / 40, 1);
    *out++ = minf((float)hero->haste / 40, 1);
    *out++ = (float)env->wait[unit] / 10;
    for (int k = 0; k < SKILLS_EACH; k++)
        *out++ = (float)hero->cooldown[k] / 100;
    for (int k = 0; k < SKILLS_EACH; k++)
        *out++ = !dead && is_ready(env, unit, k);
    float* in_reach = out++;
    *out++ = dead;
    *out++ = minf((float)hero->dead / 300, 1);
    *out++ = (float)env->tick / (float)env->max_ticks;
    for (int k = 1; k < MOVES; k++)
        *out++ = is_open(env, x + sign * 1.5f * WAYS[k][0], y + sign * 1.5f * WAYS[k][1]);
    for (int lane = 0; lane < LANES; lane++) {
        *out++ = env->front[team][lane];
        *out++ = env->front[!team][LANES - 1 - lane];
        *out++ = towers_left(env, team, lane);
        *out++ = towers_left(env, !team, LANES - 1 - lane);
    }
    int building =
        slot(nearest_at(env, env->x, own + BUILDING, BUILDINGS, x, y, SIDE * 2, 0), own + BUILDING);
    bool is_left = building != NONE; /* the ancient at least, but for what a lost game ends with */
    *out++ = is_left ? cut(sign * (env->x[building] - x) / 12) : 0;
    *out++ = is_left ? cut(sign * (env->y[building] - y) / 12) : 0;
    *out++ = is_left ? env->health[building] / env->max_health[building] : 0;
    uint32_t key = 0;
    for (int k = 0; k < 2; k++) {
        if (key != NO_KEY)
            key = nearest_at(env, env->x, base + BUILDING, BUILDINGS, x, y, SIDE * 2, key);
        int found = slot(key, base + BUILDING);
        out = write_way(env, out, unit, found, sign);
        *out++ = found == NONE ? 0 : env->health[found] / env->max_health[found];
        *out++ = found != NONE && env->aim_x[found] != FAR;
        bool shoots =
            found != NONE && found % TEAM != ANCIENT && within(env, unit, found, TOWER_REACH);
        *in_reach = k == 0 ? shoots : maxf(*in_reach, shoots);
    }
    for (int k = 0; k < HEROES; k++) {
        int ally = own + k;
        if (ally == unit) continue;
        if (env->health[ally] <= 0) {
            memset(out, 0, 6 * sizeof(float));
            out += 6;
        } else {
            *out++ = 1;
            *out++ = sign * env->x[ally] / HALF;
            *out++ = sign * env->y[ally] / HALF;
            *out++ = cut(sign * (env->x[ally] - x) / 12);
            *out++ = cut(sign * (env->y[ally] - y) / 12);
            *out++ = env->health[ally] / env->max_health[ally];
        }
        *out++ = (float)env->heroes[hero_of(ally)].level / MAX_LEVEL;
    }
    for (int k = 0; k < HEROES; k++) {
        int enemy = base + k;
        const Hero* other = &env->heroes[hero_of(enemy)];
        *out++ = other->dead > 0;
        if (env->aim_x[enemy] == FAR) {
            memset(out, 0, 6 * sizeof(float));
            out += 6;
            continue;
        }
        out = write_way(env, out, unit, enemy, sign);
        *out++ = env->health[enemy] / env->max_health[enemy];
        *out++ = (float)other->level / MAX_LEVEL;
        *out++ = env->stun[enemy] > 0;
    }
    float blows = 0.25f / env->damage[unit];
    out = write_nearest(env, out, unit, env->aim_x, base + CREEP, CREEPS, 12, 5, blows, sign);
    out = write_nearest(env, out, unit, env->x, own + CREEP, CREEPS, 12, 3, 0, sign);
    write_nearest(env, out, unit, env->aim_x, NEUTRAL, NEUTRALS, MAX_SIGHT, 2, blows, sign);
}

/* The legal actions. A hero that is dead or stunned can do nothing. */
static void write_mask(const Env* env, int h, uint8_t* mask) {
    int unit = unit_of(h), role = unit % TEAM, base = h >= HEROES ? 0 : TEAM;
    bool acts = !env->heroes[h].dead && !env->stun[unit];
    memset(mask, acts, MOVES + TARGETS);
    memset(mask + MOVES + TARGETS, 0, ACTS);
    mask[0] = mask[MOVES] = mask[MOVES + TARGETS] = 1;
    if (!acts) return;
    float x = env->x[unit], y = env->y[unit];
    Bits distance = {.bits = nearest_at(env, env->aim_x, base, HEROES, x, y, 8, 0)};
    uint32_t creep = nearest_at(env, env->aim_x, base + CREEP, CREEPS, x, y, 8, 0);
    uint32_t neutral = nearest_at(env, env->aim_x, NEUTRAL, NEUTRALS, x, y, 8, 0);
    distance.bits = creep < distance.bits ? creep : distance.bits;
    distance.bits = neutral < distance.bits ? neutral : distance.bits;
    float range = ROLES[role].range;
    bool there = distance.number <= range * range;
    mask += MOVES + TARGETS;
    mask[1] = env->wait[unit] == 0 &&
              (there || nearest(env, base + BUILDING, BUILDINGS, x, y, range) != NONE);
    for (int k = 0; k < SKILLS_EACH; k++) {
        const Skill* skill = &SKILLS[role][k];
        float reach = skill->kind == ENEMY    ? skill->range
                      : skill->kind == AROUND ? skill->radius
                                              : FAR * FAR;
        mask[2 + k] =
            is_ready(env, unit, k) && (skill->kind >= ALLY || distance.number <= reach * reach);
    }
}

static void write_all(const Env* env, float* observations, uint8_t* masks) {
    for (int i = 0; i < num_agents(env); i++) {
        write_observation(env, i, observations + i * OBSERVATIONS);
        if (masks) write_mask(env, i, masks + i * CHOICES);
    }
}

static void place_building(Env* env, int team, int building, float x, float y, float health) {
    int unit = team * TEAM + building;
    env->x[unit] = turned(team) * x;
    env->y[unit] = turned(team) * y;
    env->health[unit] = env->max_health[unit] = health;
    env->damage[unit] = building == ANCIENT ? 0 : env->tower_damage;
}

static void c_reset(Env* env) {
    static const float along[LANES][ROWS] = {{36, 23, 10}, {26.87f, 18.38f, 9.9f}, {36, 23, 10}};
    /* All of the state begins at kills and ends before the map. */
    memset(env->kills, 0, offsetof(Env, open) - offsetof(Env, kills));
    for (int unit = 0; unit < UNITS; unit++) {
        env->x[unit] = FAR;
        env->victim[unit] = env->hurter[unit] = NONE;
    }
    for (int team = 0; team < 2; team++) {
        for (int lane = 0; lane < LANES; lane++) {
            for (int row = 0; row < ROWS; row++) {
                float x, y;
                lane_point(lane, along[lane][row], &x, &y);
                place_building(env, team, BUILDING + lane * ROWS + row, x, y,
                               env->tower_health * (1 + (float)row / 6));
            }
        }
        place_building(env, team, GUARD, -EDGE - 1, EDGE - 3, env->tower_health * 4 / 3);
        place_building(env, team, GUARD + 1, -EDGE + 3, EDGE + 1, env->tower_health * 4 / 3);
        place_building(env, team, ANCIENT, -EDGE - 2, EDGE + 2, env->ancient_health);
        env->standing[team] = BUILDINGS;
        see_from_buildings(env, team);
    }
    for (int h = 0; h < 2 * HEROES; h++) {
        env->heroes[h].level = 1;
        set_strength(env, unit_of(h));
        place_hero(env, unit_of(h));
    }
    for (int unit = NEUTRAL; unit < NEUTRAL + NEUTRALS; unit++)
        place_neutral(env, unit);
    env->tick = env->begun ? 0 : random_int(&env->rng, env->max_ticks);
    env->skill =
        env->bot_skill - (env->bot_range > 0 ? random_float(&env->rng, 0, env->bot_range) : 0);
    env->whole = env->tick == 0;
    env->begun = true;
    env->steps = env->waves = 0;
    env->winner = NONE;
    send_wave(env);
    see(env);
    write_all(env, env->observations, env->action_masks);
}

static void log_game(Env* env) {
    float total = 0, levels = 0;
    for (int i = 0; i < num_agents(env); i++)
        total += env->heroes[i].total / (float)num_agents(env);
    for (int h = 0; h < HEROES; h++)
        levels += (float)env->heroes[h].level / HEROES;
    float lead = (float)(env->standing[0] - env->standing[1]) / BUILDINGS;
    float score = env->winner == 0 ? 1 : env->winner == 1 ? -1 : lead;
    LOG_EPISODE(env, 0.5f * (1 + score), score, total, env->steps);
    env->log.won += env->winner == 0;
    env->log.lost += env->winner == 1;
    env->log.towers += (float)(BUILDINGS - env->standing[1]);
    env->log.towers_lost += (float)(BUILDINGS - env->standing[0]);
    env->log.kills += (float)env->kills[0];
    env->log.deaths += (float)env->deaths[0];
    env->log.level += levels;
    env->log.last_hits += (float)env->last_hits[0];
}

static void play_tick(Env* env) {
    for (int h = 0; h < 2 * HEROES; h++) {
        int32_t order[3];
        bool bot = env->demo || h >= num_agents(env);
        if (bot) bot_order(env, unit_of(h), order);
        env->victim[unit_of(h)] = NONE;
        obey(env, unit_of(h), bot ? order : env->actions + 3 * h);
    }
    memset(env->front, 0, sizeof(env->front));
    for (int unit = 0; unit < 2 * TEAM; unit++) {
        if (env->health[unit] <= 0 || unit % TEAM < BUILDING || unit % TEAM == ANCIENT) continue;
        if (unit % TEAM >= CREEP) creep_act(env, unit);
        else if (env->wait[unit] == 0) tower_act(env, unit);
    }
    for (int unit = NEUTRAL; unit < NEUTRAL + NEUTRALS; unit++)
        if (env->health[unit] > 0) neutral_act(env, unit);
    move_all(env);
    hurt_all(env);
    env->tick++;
    pass_time(env);
    see(env);
}

static void c_step(Env* env) {
    for (int h = 0; h < 2 * HEROES; h++)
        env->heroes[h].gain = 0;
    for (int k = 0; k < env->frameskip && env->winner == NONE && env->tick < env->max_ticks; k++)
        play_tick(env);
    env->steps++;
    bool over = env->winner != NONE, late = !over && env->tick >= env->max_ticks;
    for (int i = 0; i < num_agents(env); i++) {
        Hero* hero = &env->heroes[i];
        if (env->winner == 0 || env->winner == 1)
            hero->gain += env->winner == (i >= HEROES) ? env->reward_win : -env->reward_win;
        hero->total += hero->gain;
        env->rewards[i] = hero->gain;
        env->terminals[i] = over;
        env->truncations[i] = late;
    }
    if (!over && !late) {
        write_all(env, env->observations, env->action_masks);
        return;
    }
    if (WANTS_FINAL(env, late)) write_all(env, env->final_observations, NULL);
    if (env->whole) log_game(env);
    c_reset(env);
}

static void draw_bar(float x, float y, float width, float share, Color color) {
    DrawRectangleRec((Rectangle){x - width / 2, y, width, 3}, (Color){40, 20, 20, 255});
    DrawRectangleRec((Rectangle){x - width / 2, y, width * share, 3}, color);
}

static void c_render(Env* env) {
    enum { TILE = 12, PANEL = 250, MAP = SIDE * TILE };
    static const Color colors[3] = {{0, 187, 204, 255}, {236, 110, 80, 255}, {214, 190, 120, 255}};
    draw_begin(MAP + PANEL, MAP, "moba");
    DrawRectangle(0, 0, MAP, MAP, (Color){16, 34, 26, 255});
    for (int row = 0; row < SIDE; row++) {
        for (int column = 0; column < SIDE; column++) {
            if (!(env->open[row] >> column & 1)) continue;
            float x = (float)(column - HALF) + 0.5f, y = (float)(row - HALF) + 0.5f;
            bool river = fabsf(x - y) < 4 && fabsf(x + y) > 5 && fabsf(x) < 21;
            Color color = river ? (Color){38, 62, 88, 255} : (Color){66, 62, 50, 255};
            bool seen = env->sight[0][row] >> column & 1;
            DrawRectangle(column * TILE, row * TILE, TILE, TILE,
                          seen ? color : draw_mix(color, DRAW_BACKGROUND, 0.55f));
        }
    }
    for (int unit = 0; unit < NEUTRAL + NEUTRALS; unit++) {
        if (env->health[unit] <= 0) continue;
        int k = unit < NEUTRAL ? unit % TEAM : CREEP, victim = env->victim[unit];
        float x = (env->x[unit] + HALF) * TILE, y = (env->y[unit] + HALF) * TILE;
        float share = env->health[unit] / env->max_health[unit];
        Color color = colors[unit / TEAM];
        if (victim != NONE && env->health[victim] > 0 && env->wait[unit] >= 4)
            DrawLineEx((Vector2){x, y},
                       (Vector2){(env->x[victim] + HALF) * TILE, (env->y[victim] + HALF) * TILE},
                       1.5f, color);
        if (k < HEROES) {
            DrawCircleV((Vector2){x, y}, 10, unit == 0 ? DRAW_WHITE : color);
            draw_text_centred(ROLES[k].letter, (int)x, (int)y, 14, DRAW_BACKGROUND);
            draw_bar(x, y - 16, 24, share, DRAW_GREEN);
        } else if (k < CREEP) {
            float half = k == ANCIENT ? 16 : 9;
            DrawRectangleRec((Rectangle){x - half, y - half, 2 * half, 2 * half}, color);
            DrawRectangleRec((Rectangle){x - half + 4, y - half + 4, 2 * half - 8, 2 * half - 8},
                             DRAW_BACKGROUND);
            if (can_fall(env, unit / TEAM, k))
                draw_bar(x, y - half - 6, 2 * half, share, DRAW_GREEN);
        } else {
            bool small = unit < NEUTRAL + 12;
            DrawCircleV((Vector2){x, y}, small ? env->ranged[unit] ? 2.5f : 3.5f : 7, color);
            if (share < 1) draw_bar(x, y - 7, 9, share, DRAW_GREEN);
        }
    }
    char text[64];
    snprintf(text, sizeof(text), "%d:%02d", env->tick / 300, env->tick / 5 % 60);
    draw_text_centred(text, MAP + PANEL / 2, 30, 30, DRAW_WHITE);
    for (int team = 0; team < 2; team++) {
        int y = 70 + 340 * team;
        draw_format(MAP + 20, y, 18, colors[team], "kills %d  buildings %d", env->kills[team],
                    env->standing[team]);
        for (int k = 0; k < HEROES; k++) {
            const Hero* hero = &env->heroes[team * HEROES + k];
            int unit = team * TEAM + k, at = y + 36 + 54 * k;
            DrawCircleV((Vector2){MAP + 34, (float)at + 12}, 13,
                        hero->dead ? DRAW_PANEL : colors[team]);
            draw_text_centred(ROLES[k].letter, MAP + 34, at + 12, 18,
                              hero->dead ? DRAW_GREY : DRAW_BACKGROUND);
            draw_format(MAP + 60, at - 2, 16, hero->dead ? DRAW_GREY : DRAW_WHITE,
                        hero->dead ? "dead %d" : "level %d", hero->dead ? hero->dead : hero->level);
            DrawRectangle(MAP + 60, at + 18, 160, 5, DRAW_PANEL);
            DrawRectangle(MAP + 60, at + 18, (int)(160 * env->health[unit] / env->max_health[unit]),
                          5, DRAW_GREEN);
            DrawRectangle(MAP + 60, at + 26, 160, 4, DRAW_PANEL);
            DrawRectangle(MAP + 60, at + 26, (int)(160 * hero->mana / ROLES[k].mana), 4,
                          (Color){90, 140, 240, 255});
        }
    }
    draw_end();
}
