/* Cube: Rubik's cube, 3 x 3 x 3 or 2 x 2 x 2. An episode begins with scramble_min to scramble_max
 * random quarter turns of a solved cube; none of them undoes the one before. It ends with a reward
 * of 1 when every side shows one colour, however the cube is held. After max_steps it is truncated.
 * Observation: bytes of 0 and 1.
 *   - The one-hot colours of all stickers, (stickers, 6). The sides are in the order up, right,
 *     front, down, left, back.
 *   - For each two stickers that are neighbours on a side, now or after one or two turns: 1 if they
 *     have one colour. These are 480 pairs, or 156 of the small cube.
 * Actions: a quarter turn of each side in that order, clockwise, then of each counter-clockwise.
 * perf is the share of cubes solved. scramble is the mean length of the scrambles. */
#pragma once

#define OBSERVATION uint8_t
#define OWN_LOG(X) X(scramble)
#define SETTINGS(X) \
    X(int, size, 3, "stickers on an edge, 2 or 3") \
    X(int, scramble_min, 1, "quarter turns of the shortest scramble") \
    X(int, scramble_max, 8, "quarter turns of the longest scramble") \
    X(int, max_steps, 0, \
      "steps after which an episode is truncated; 0: 2 for each turn of the longest scramble") \
    X(float, reward_step, 0.0, "of every step")
#define BY_TURNS
#define KEYS(KEY) \
    KEY(0, U, 0) KEY(0, J, 1) KEY(0, R, 2) KEY(0, F, 3) KEY(0, D, 4) KEY(0, C, 5) \
    KEY(0, I, 6) KEY(0, L, 7) KEY(0, K, 8) KEY(0, O, 9) KEY(0, B, 10) KEY(0, N, 11)
#include "env.h"
#include "draw.h"

enum { SIDES = 6, TURNS = 2 * SIDES, MAX_STICKERS = 54, MAX_PAIRS = 480 };
typedef struct { int x, y, z; } Axis; /* x to the right, y up, z to the front */
static const Axis normals[SIDES] = {
    {0, 1, 0}, {1, 0, 0}, {0, 0, 1}, {0, -1, 0}, {-1, 0, 0}, {0, 0, -1}
};
/* The directions of columns and rows, seen from outside. */
static const Axis columns[SIDES] = {
    {1, 0, 0}, {0, 0, -1}, {1, 0, 0}, {1, 0, 0}, {0, 0, 1}, {-1, 0, 0}
};
static const Axis rows[SIDES] = {
    {0, 0, 1}, {0, -1, 0}, {0, -1, 0}, {0, 0, -1}, {0, -1, 0}, {0, -1, 0}
};

struct Env {
    ENV_COMMON
    int stickers, pairs, limit;
    uint8_t from[TURNS][MAX_STICKERS]; /* where each sticker's colour comes from in a turn */
    uint8_t pair[MAX_PAIRS][2]; /* stickers that are neighbours, now or after one or two turns */
    uint8_t colors[MAX_STICKERS];
    int scrambled, tick;
};

static Axis add(Axis a, Axis b, int times) {
    return (Axis){a.x + times * b.x, a.y + times * b.y, a.z + times * b.z};
}

static int dot(Axis a, Axis b) {
    return a.x * b.x + a.y * b.y + a.z * b.z;
}

/* A quarter turn about an axis, clockwise as seen from its tip: v -> (v . n) n - n x v. */
static Axis quarter(Axis v, Axis n) {
    Axis cross = {n.y * v.z - n.z * v.y, n.z * v.x - n.x * v.z, n.x * v.y - n.y * v.x};
    return add((Axis){-cross.x, -cross.y, -cross.z}, n, dot(v, n));
}

/* A sticker's place, in half cells from the cube's middle. Its side's plane is `size` away. */
static Axis place_of(const Env* env, int sticker) {
    int area = env->size * env->size, side = sticker / area, row = sticker % area / env->size;
    int column = sticker % env->size;
    Axis at = add((Axis){0, 0, 0}, normals[side], env->size);
    return add(add(at, columns[side], 2 * column + 1 - env->size), rows[side],
               2 * row + 1 - env->size);
}

static int sticker_at(const Env* env, Axis place) {
    for (int i = 0; i < env->stickers; i++) {
        Axis at = place_of(env, i);
        if (at.x == place.x && at.y == place.y && at.z == place.z) return i;
    }
    return -1;
}

static void add_pair(Env* env, int a, int b) {
    int one = a < b ? a : b, other = a < b ? b : a;
    for (int i = 0; i < env->pairs; i++)
        if (env->pair[i][0] == one && env->pair[i][1] == other) return;
    env->pair[env->pairs][0] = (uint8_t)one;
    env->pair[env->pairs++][1] = (uint8_t)other;
}

/* Geometry gives the turns: each sticker of the turned layer goes to its turned place. */
static const char* c_init(Env* env) {
    if (env->size != 2 && env->size != 3) return "size must be 2 or 3";
    if (env->scramble_min < 1 || env->scramble_max < env->scramble_min || env->scramble_max > 1000)
        return "1 <= scramble_min <= scramble_max <= 1000 must hold";
    if (env->max_steps < 0) return "max_steps must be 0 (2 for each turn) or more";
    env->stickers = SIDES * env->size * env->size;
    env->limit = env->max_steps ? env->max_steps : 2 * env->scramble_max;
    for (int side = 0; side < SIDES; side++) {
        for (int i = 0; i < env->stickers; i++) {
            Axis at = place_of(env, i);
            int to = dot(at, normals[side]) >= env->size - 1
                         ? sticker_at(env, quarter(at, normals[side]))
                         : i;
            env->from[2 * side][to] = (uint8_t)i;
            env->from[2 * side + 1][i] = (uint8_t)to;
        }
    }
    env->pairs = 0;
    for (int i = 0; i < env->stickers; i++) {
        if (i % env->size < env->size - 1) add_pair(env, i, i + 1);
        if (i / env->size % env->size < env->size - 1) add_pair(env, i, i + env->size);
    }
    for (int first = 0, turns = 0; turns < 2; turns++)
        for (int last = env->pairs; first < last; first++)
            for (int action = 0; action < TURNS; action++)
                add_pair(env, env->from[action][env->pair[first][0]],
                         env->from[action][env->pair[first][1]]);
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {env->stickers * SIDES + env->pairs},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {TURNS},
    };
}

static void write_observation(const Env* env, uint8_t* observation) {
    memset(observation, 0, (size_t)(env->stickers * SIDES));
    uint8_t* same = observation + env->stickers * SIDES;
    for (int i = 0; i < env->pairs; i++)
        same[i] = env->colors[env->pair[i][0]] == env->colors[env->pair[i][1]];
    for (int i = 0; i < env->stickers; i++)
        observation[i * SIDES + env->colors[i]] = 1;
}

static void turn(Env* env, int action) {
    uint8_t before[MAX_STICKERS];
    memcpy(before, env->colors, sizeof(before));
    for (int i = 0; i < env->stickers; i++)
        env->colors[i] = before[env->from[action][i]];
}

static bool is_solved(const Env* env) {
    int area = env->size * env->size;
    for (int i = 0; i < env->stickers; i++)
        if (env->colors[i] != env->colors[i / area * area]) return false;
    return true;
}

static void c_reset(Env* env) {
    int area = env->size * env->size;
    env->tick = 0;
    env->scrambled =
        env->scramble_min + random_int(&env->rng, env->scramble_max - env->scramble_min + 1);
    do { /* a scramble may end in a solved cube */
        for (int i = 0; i < env->stickers; i++)
            env->colors[i] = (uint8_t)(i / area);
        int last = -1;
        for (int k = 0; k < env->scrambled; k++) {
            int action = random_int(&env->rng, last < 0 ? TURNS : TURNS - 1);
            /* skips the inverse of the last turn */
            if (last >= 0 && action >= (last ^ 1)) action++;
            turn(env, action);
            last = action;
        }
    } while (is_solved(env));
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    turn(env, env->actions[0]);
    env->tick++;
    bool solved = is_solved(env), late = !solved && env->tick >= env->limit;
    env->rewards[0] = (float)solved + env->reward_step;
    env->terminals[0] = solved;
    env->truncations[0] = late;
    if (!solved && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, solved, solved, (float)solved + (float)env->tick * env->reward_step,
                env->tick);
    env->log.scramble += (float)env->scrambled;
    c_reset(env);
}

/* Seen from the front, above and the right. The second view shows the other three sides. */
static Vector2 project(float x, float y, float z, float middle) {
    return (Vector2){middle + (x - z) * 92, 250 + (x + z) * 53 - y * 106};
}

static void c_render(Env* env) {
    static const Color paints[SIDES] = {
        {236, 242, 246, 255}, {226, 84, 84, 255}, {90, 200, 120, 255}, {250, 200, 60, 255},
        {238, 126, 50, 255}, {60, 120, 226, 255}
    };
    int area = env->size * env->size;
    float size = (float)env->size;
    draw_begin(860, 500, "cube");
    for (int i = 0; i < env->stickers; i++) {
        int side = i / area;
        bool hidden = side >= 3;
        Axis at = place_of(env, i), c = columns[side], r = rows[side];
        Vector2 corner[4];
        for (int k = 0; k < 4; k++) {
            float u = k == 1 || k == 2 ? 0.9f : -0.9f, v = k >= 2 ? 0.9f : -0.9f;
            float x = ((float)at.x + u * (float)c.x + v * (float)r.x) / size;
            float y = ((float)at.y + u * (float)c.y + v * (float)r.y) / size;
            float z = ((float)at.z + u * (float)c.z + v * (float)r.z) / size;
            /* a half turn, not a mirror image */
            corner[k] = hidden ? project(-z, -y, -x, 640) : project(x, y, z, 220);
        }
        draw_quad(corner[0], corner[1], corner[2], corner[3], paints[env->colors[i]]);
    }
    draw_text_centred("up  front  right", 220, 485, 20, DRAW_GREY);
    draw_text_centred("down  left  back", 640, 485, 20, DRAW_GREY);
    draw_end();
}
