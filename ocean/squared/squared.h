/* Squared: the smallest complete environment. Copy this file to begin a custom one with one
 * agent.
 *
 * The agent starts in the middle of a square grid. The target lies somewhere on the grid's edge.
 * Each step the agent stays or moves one cell up, down, left or right. An episode ends
 *     with +1 if the agent reaches the target,
 *     with -1 if it leaves the grid,
 *     with -1 after 3 * distance steps. This limit is a rule of the game, so it is a termination.
 *
 *     observation    one byte a cell, row after row: 0 empty, 1 the agent, 2 the target
 *     action         STAY, UP, DOWN, LEFT or RIGHT
 *
 * What a header holds, in this order. env.h says more about each.
 *     OBSERVATION    required   the type of the observation's elements
 *     OWN_LOG        optional   statistics besides perf, score, episode_return, episode_length, n
 *     SETTINGS       optional   what a user may change: type, name, default, what it means
 *     KEYS           optional   the keys with which a person plays; also BY_TURNS, FPS
 *     struct Env     required   ENV_COMMON and the state of one environment
 *     c_init         required   checks the settings and derives what depends on them
 *     c_spaces       required   what an agent sees and does
 *     c_reset        required   begins an episode
 *     c_step         required   plays one step
 *     c_render       required   draws one frame */
#pragma once

#define OBSERVATION uint8_t
#define SETTINGS(X) X(int, distance, 5, "cells between the centre of the grid and its edge")
#define KEYS(KEY) KEY(0, UP, UP) KEY(0, DOWN, DOWN) KEY(0, LEFT, LEFT) KEY(0, RIGHT, RIGHT)
#define BY_TURNS
#include "env.h"
#include "draw.h"

enum { EMPTY, AGENT, TARGET };
enum { STAY, UP, DOWN, LEFT, RIGHT, ACTIONS };

struct Env {
    ENV_COMMON
    int side; /* of the grid, 2 * distance + 1 */
    int row, column; /* of the agent */
    int target_row, target_column;
    int tick;
};

/* Settings come from users, so they are checked. The result is NULL or says what is wrong. */
static const char* c_init(Env* env) {
    if (env->distance < 1 || env->distance > 256) return "distance must lie within 1..256";
    env->side = 2 * env->distance + 1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {env->side, env->side},
        .observation_low = EMPTY,
        .observation_high = TARGET,
        .action_heads = {ACTIONS},
    };
}

static bool is_inside(const Env* env) {
    return env->row >= 0 && env->row < env->side && env->column >= 0 && env->column < env->side;
}

/* Every step writes to another row of memory, so an observation is written in full. */
static void write_observation(const Env* env, uint8_t* observation) {
    memset(observation, EMPTY, (size_t)(env->side * env->side));
    observation[env->target_row * env->side + env->target_column] = TARGET;
    if (is_inside(env)) observation[env->row * env->side + env->column] = AGENT;
}

/* The edge is four strips of side - 1 cells. Each strip begins in a corner. */
static void place_target(Env* env) {
    int last = env->side - 1;
    int place = random_int(&env->rng, 4 * last); /* each cell of the edge is equally likely */
    int along = place % last;
    switch (place / last) {
        case 0: env->target_row = 0; env->target_column = along; break; /* top */
        case 1: env->target_row = along; env->target_column = last; break; /* right */
        case 2: env->target_row = last; env->target_column = last - along; break; /* bottom */
        case 3: env->target_row = last - along; env->target_column = 0; break; /* left */
    }
}

static void c_reset(Env* env) {
    env->tick = 0;
    env->row = env->column = env->distance;
    place_target(env);
    write_observation(env, env->observations);
}

static void end_episode(Env* env, float reward) {
    env->rewards[0] = reward;
    env->terminals[0] = 1;
    /* The trainer does not need the last observation of a terminated episode. Gymnasium does. */
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, reward > 0, reward, reward, env->tick);
    c_reset(env);
}

static void c_step(Env* env) {
    int action = env->actions[0];
    env->row += (action == DOWN) - (action == UP); /* a comparison is 1 or 0 */
    env->column += (action == RIGHT) - (action == LEFT);
    env->tick++;

    /* Every step writes every output, also if nothing happens. */
    env->rewards[0] = 0;
    env->terminals[0] = 0;
    env->truncations[0] = 0;

    bool reached = env->row == env->target_row && env->column == env->target_column;
    if (reached) end_episode(env, 1);
    else if (!is_inside(env) || env->tick >= 3 * env->distance) end_episode(env, -1);
    else write_observation(env, env->observations);
}

static void c_render(Env* env) {
    int cell = 720 / env->side > 0 ? 720 / env->side : 1; /* pixels; the grid may be large */
    int gap = cell / 16;
    draw_begin(env->side * cell, env->side * cell, "squared");
    for (int row = 0; row < env->side; row++) {
        for (int column = 0; column < env->side; column++) {
            Color color = DRAW_PANEL;
            if (row == env->target_row && column == env->target_column) color = DRAW_GOLD;
            if (row == env->row && column == env->column) color = DRAW_CYAN;
            int left = column * cell + gap, top = row * cell + gap;
            DrawRectangle(left, top, cell - 2 * gap, cell - 2 * gap, color);
        }
    }
    draw_end();
}
