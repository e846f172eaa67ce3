/* 2048: tiles slide on a board of 4 x 4 as far as they can; two equal ones that meet become their sum, each tile once
 * a move. After a move that changes something a 2 comes up (or, one time in ten, a 4) in a random free cell. A move
 * that changes nothing is illegal: the mask says so, and nothing happens. When no move is left the game is over.
 * The score is the sum of all merged tiles. The reward for a merge to 2^k is k / 11: rewards of points would span
 * three powers of ten. perf is the share of games that reach 2048 (the game goes on).
 * Observation: (16, 18) bytes, one-hot: what stands in each cell, empty, 2, 4 ... 131072. Actions: up, down, left,
 * right. */
#pragma once

#define OBSERVATION uint8_t
#define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n) X(max_tile)
#define SETTINGS(X) \
    X(float, fours, 0.1, "chance that a new tile is a 4") \
    X(int, max_steps, 0, "steps after which an episode is truncated; 0: none")
#define HAS_ACTION_MASKS
#include "env.h"
#include "draw.h"

enum { SIDE = 4, CELLS = SIDE * SIDE, KINDS = 18, WON = 11 };

struct Env {
    ENV_COMMON
    uint8_t tiles[CELLS]; /* the power of two, 0 where empty */
    uint8_t legal[4];
    int tick, points, highest;
    float total;
};

static const char* c_init(Env* env) {
    if (!(env->fours >= 0 && env->fours <= 1)) return "fours must lie within 0..1";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    (void)env;
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {CELLS, KINDS},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {4},
    };
}

static void write_observation(const Env* env, uint8_t* observation) {
    memset(observation, 0, CELLS * KINDS);
    for (int i = 0; i < CELLS; i++)
        observation[i * KINDS + env->tiles[i]] = 1;
}

/* A line of four cells, the one first that tiles slide to: the cell that a move begins in and its step. */
static const struct { int first, line, step; } moves[4] = {{0, 1, 4}, {12, 1, -4}, {0, 4, 1}, {3, 4, -1}};

/* Whether a move changes something: an empty cell before a tile, or two equal neighbours. */
static bool can_move(const Env* env, int action) {
    for (int k = 0; k < SIDE; k++) {
        int at = moves[action].first + k * moves[action].line, step = moves[action].step;
        for (int i = 0; i + 1 < SIDE; i++) {
            int one = env->tiles[at + i * step], next = env->tiles[at + (i + 1) * step];
            if (next && (!one || (one == next && one < KINDS - 1))) return true;
        }
    }
    return false;
}

static bool find_legal(Env* env) {
    bool any = false;
    for (int action = 0; action < 4; action++)
        any |= env->legal[action] = can_move(env, action);
    return any;
}

static void slide(Env* env, int action, float* reward) {
    for (int k = 0; k < SIDE; k++) {
        int at = moves[action].first + k * moves[action].line, step = moves[action].step, filled = 0, waiting = 0;
        uint8_t line[SIDE] = {0};
        for (int i = 0; i < SIDE; i++) {
            uint8_t tile = env->tiles[at + i * step];
            if (!tile) continue;
            if (tile == waiting && tile < KINDS - 1) {
                line[filled - 1] = ++tile;
                waiting = 0; /* a tile merges once */
                env->points += 1 << tile;
                *reward += (float)tile / WON;
                if (tile > env->highest) env->highest = tile;
            } else {
                line[filled++] = tile;
                waiting = tile;
            }
        }
        for (int i = 0; i < SIDE; i++)
            env->tiles[at + i * step] = line[i];
    }
}

static void add_tile(Env* env) {
    int empty[CELLS], count = 0;
    for (int i = 0; i < CELLS; i++)
        if (!env->tiles[i]) empty[count++] = i;
    if (count == 0) return;
    int tile = random_float(&env->rng, 0, 1) < env->fours ? 2 : 1;
    env->tiles[empty[random_int(&env->rng, count)]] = (uint8_t)tile;
}

static void write_all(Env* env) {
    write_observation(env, env->observations);
    if (env->action_masks) memcpy(env->action_masks, env->legal, sizeof(env->legal));
}

static void c_reset(Env* env) {
    memset(env->tiles, 0, sizeof(env->tiles));
    add_tile(env);
    add_tile(env);
    env->tick = env->points = env->highest = 0;
    env->total = 0;
    find_legal(env);
    write_all(env);
}

static void c_step(Env* env) {
    int action = env->actions[0];
    float reward = 0;
    bool over = false;
    if (env->legal[action]) {
        slide(env, action, &reward);
        add_tile(env);
        over = !find_legal(env);
    }
    env->tick++;
    bool late = !over && env->max_steps && env->tick >= env->max_steps;
    env->total += reward;
    env->rewards[0] = reward;
    env->terminals[0] = over;
    env->truncations[0] = late;
    if (!over && !late) {
        write_all(env);
        return;
    }
    if (late && env->final_observations) write_observation(env, env->final_observations);
    env->log.perf += env->highest >= WON;
    env->log.score += (float)env->points;
    env->log.episode_return += env->total;
    env->log.episode_length += (float)env->tick;
    env->log.max_tile += (float)(1 << env->highest);
    env->log.n += 1;
    c_reset(env);
}

static void c_render(Env* env) {
    enum { CELL = 150, GAP = 10, TOP = 70 };
    static const Color colors[] = {{40, 58, 72, 255},   {54, 88, 104, 255}, {30, 116, 134, 255}, {0, 150, 168, 255},
                                   {0, 187, 204, 255},  {70, 194, 160, 255}, {90, 200, 120, 255}, {150, 200, 90, 255},
                                   {210, 196, 70, 255}, {250, 190, 60, 255}, {244, 150, 60, 255}, {236, 112, 64, 255},
                                   {226, 84, 84, 255}};
    char text[32];
    draw_begin(SIDE * CELL + GAP, SIDE * CELL + GAP + TOP, "2048");
    snprintf(text, sizeof(text), "%d", env->points);
    draw_text_centred(text, (SIDE * CELL + GAP) / 2, TOP / 2 + 4, 48, DRAW_WHITE);
    for (int i = 0; i < CELLS; i++) {
        int tile = env->tiles[i], x = i % SIDE * CELL + GAP, y = i / SIDE * CELL + GAP + TOP;
        Color color = tile == 0 ? DRAW_PANEL : tile < 14 ? colors[tile - 1] : DRAW_WHITE;
        DrawRectangle(x, y, CELL - GAP, CELL - GAP, color);
        if (!tile) continue;
        snprintf(text, sizeof(text), "%d", 1 << tile);
        int size = tile < 7 ? 64 : tile < 10 ? 52 : tile < 14 ? 40 : 32;
        draw_text_centred(text, x + (CELL - GAP) / 2, y + (CELL - GAP) / 2, size,
                          tile < 4 ? DRAW_WHITE : DRAW_BACKGROUND);
    }
    draw_end();
}

static void c_close(Env* env) {
    (void)env;
}
