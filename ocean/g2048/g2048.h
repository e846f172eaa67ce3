/* 2048: tiles slide on a board of 4 x 4 as far as they can. Two equal tiles that meet become their
 * sum; a tile merges once a move. After a move that changes something, a 2 (one time in ten a 4)
 * appears in a random free cell. A move that changes nothing is illegal: the mask says so, and
 * nothing happens. The game is over when no move is left. The score is the sum of all merged tiles.
 * The reward for a merge to 2^k is k / 11, because points would span three powers of ten.
 * perf is the share of games that reach 2048; the game then continues.
 * Actions: up, down, left, right.
 * Observation: 648 bytes of 0 and 1,
 *     0 .. 287    (16, 18) the tile in each cell, one-hot: empty, 2, 4 ... 131072
 *     288 .. 647  (5, 24, 3) how two neighbours compare: they are the same tile, the first is
 *                 greater, the second is greater (an empty cell is the least). First the 12 pairs
 *                 side by side, then the 12 one above the other. First of the board as it is, then
 *                 of what each action leaves, before the new tile appears. All 0 if the action is
 *                 illegal.
 * The comparisons are there because from the cells alone a network has to learn for each place and
 * each tile again what equal tiles are and what a move does. */
#pragma once

#define OBSERVATION uint8_t
#define OWN_LOG(X) X(max_tile)
#define SETTINGS(X) \
    X(float, fours, 0.1, "chance that a new tile is a 4") \
    X(int, max_steps, 0, "steps after which an episode is truncated; 0: none")
#define HAS_ACTION_MASKS
#define BY_TURNS
#define KEYS(KEY) KEY(0, UP, 0) KEY(0, DOWN, 1) KEY(0, LEFT, 2) KEY(0, RIGHT, 3)
#include "env.h"
#include "draw.h"

enum {
    SIDE = 4, CELLS = SIDE * SIDE, KINDS = 18, WON = 11, PAIRS = 24,
    INPUTS = CELLS * KINDS + 5 * PAIRS * 3
};

struct Env {
    ENV_COMMON
    uint8_t tiles[CELLS]; /* the power of two, 0 if empty */
    uint8_t after[4][CELLS]; /* what each action leaves, before the new tile appears */
    uint8_t legal[4];        /* whether that is something else */
    int tick, points;
    float total;
};

static const char* c_init(Env* env) {
    if (!(env->fours >= 0 && env->fours <= 1)) return "fours must lie within 0..1";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {INPUTS},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {4},
    };
}

static uint8_t* write_pairs(const uint8_t* tiles, uint8_t* out) {
    for (int down = 0; down < 2; down++)
        for (int i = 0; i < CELLS; i++) {
            if (down ? i / SIDE == SIDE - 1 : i % SIDE == SIDE - 1) continue;
            uint8_t one = tiles[i], next = tiles[i + (down ? SIDE : 1)];
            *out++ = one && one == next;
            *out++ = one > next;
            *out++ = one < next;
        }
    return out;
}

static void write_observation(const Env* env, uint8_t* observation) {
    memset(observation, 0, INPUTS);
    for (int i = 0; i < CELLS; i++)
        observation[i * KINDS + env->tiles[i]] = 1;
    uint8_t* out = write_pairs(env->tiles, observation + CELLS * KINDS);
    for (int action = 0; action < 4; action++, out += PAIRS * 3)
        if (env->legal[action]) write_pairs(env->after[action], out);
}

/* A line of four cells begins with the one that tiles slide to. `first` is that of the first line;
 * `line` leads to the next line, `step` to the next cell. */
static const struct { int first, line, step; } moves[4] = {
    {0, 1, 4}, {12, 1, -4}, {0, 4, 1}, {3, 4, -1}
};

/* Makes a move on a board, adds to the points and returns the reward. */
static float slide(uint8_t* tiles, int action, int* points) {
    float reward = 0;
    for (int k = 0; k < SIDE; k++) {
        int at = moves[action].first + k * moves[action].line, step = moves[action].step;
        int filled = 0, waiting = 0;
        uint8_t line[SIDE] = {0};
        for (int i = 0; i < SIDE; i++) {
            uint8_t tile = tiles[at + i * step];
            if (!tile) continue;
            if (tile == waiting && tile < KINDS - 1) {
                line[filled - 1] = ++tile;
                waiting = 0; /* a tile merges once */
                *points += 1 << tile;
                reward += (float)tile / WON;
            } else {
                line[filled++] = tile;
                waiting = tile;
            }
        }
        for (int i = 0; i < SIDE; i++)
            tiles[at + i * step] = line[i];
    }
    return reward;
}

/* Tries all moves. Returns whether one of them changes something. */
static bool look_ahead(Env* env) {
    bool any = false;
    for (int action = 0; action < 4; action++) {
        int points = 0;
        memcpy(env->after[action], env->tiles, CELLS);
        slide(env->after[action], action, &points);
        any |= env->legal[action] = memcmp(env->after[action], env->tiles, CELLS) != 0;
    }
    return any;
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
    env->tick = env->points = 0;
    env->total = 0;
    look_ahead(env);
    write_all(env);
}

static void c_step(Env* env) {
    int action = env->actions[0];
    float reward = 0;
    bool over = false;
    if (env->legal[action]) {
        reward = slide(env->tiles, action, &env->points);
        add_tile(env);
        over = !look_ahead(env);
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
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    int highest = 0;
    for (int i = 0; i < CELLS; i++)
        if (env->tiles[i] > highest) highest = env->tiles[i];
    LOG_EPISODE(env, highest >= WON, env->points, env->total, env->tick);
    env->log.max_tile += (float)(1 << highest);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { CELL = 150, GAP = 10, TOP = 70 };
    static const Color colors[] = {
        {40, 58, 72, 255}, {54, 88, 104, 255}, {30, 116, 134, 255}, {0, 150, 168, 255},
        {0, 187, 204, 255}, {70, 194, 160, 255}, {90, 200, 120, 255}, {150, 200, 90, 255},
        {210, 196, 70, 255}, {250, 190, 60, 255}, {244, 150, 60, 255}, {236, 112, 64, 255},
        {226, 84, 84, 255}
    };
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
