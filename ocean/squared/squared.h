/* Squared: the smallest complete environment. Copy this file to begin one of your own with a single agent.
 *
 * The agent stands in the middle of a square grid and the target somewhere on its edge. Each step the agent makes
 * one of five moves: stay, up, down, left, right. Reaching the target gives +1; leaving the grid, or not arriving
 * in 3 * distance steps, gives -1; each of the three ends the episode. The time limit is a rule of the game (the
 * agent is punished for it), hence a termination and not a truncation. */
#pragma once

/* What the binding needs to know before it can lay out the struct. One agent sees the whole grid as bytes. */
#define OBSERVATION uint8_t
#define SETTINGS(X) X(int, distance, 5, "cells between the centre of the grid and its edge")
#define BY_TURNS
#define KEYS(KEY) KEY(0, UP, 1) KEY(0, DOWN, 2) KEY(0, LEFT, 3) KEY(0, RIGHT, 4)
#include "env.h"
#include "draw.h"

enum { EMPTY, AGENT, TARGET };

struct Env {
    ENV_COMMON
    int side; /* of the grid, 2 * distance + 1 */
    int row, column; /* of the agent */
    int target; /* row * side + column */
    int tick;
};

/* Settings come from users: check them here, and derive what depends on them. */
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
        .action_heads = {5},
    };
}

/* The row of observations is another one on every step, so it is written in full and not just where it changed. */
static void write_observation(const Env* env, bool inside, uint8_t* observation) {
    memset(observation, EMPTY, (size_t)(env->side * env->side));
    observation[env->target] = TARGET;
    if (inside) observation[env->row * env->side + env->column] = AGENT;
}

static void c_reset(Env* env) {
    env->tick = 0;
    env->row = env->column = env->distance;
    /* The edge is four strips of side - 1 cells, each beginning in a corner. */
    int strip = env->side - 1, place = random_int(&env->rng, 4 * strip), along = place % strip;
    switch (place / strip) {
        case 0: env->target = along; break; /* top, to the right */
        case 1: env->target = along * env->side + strip; break; /* right, down */
        case 2: env->target = strip * env->side + strip - along; break; /* bottom, to the left */
        case 3: env->target = (strip - along) * env->side; break; /* left, up */
    }
    write_observation(env, true, env->observations);
}

static void end_episode(Env* env, float reward, bool inside) {
    /* A trainer has no use for what is seen after a termination, but other libraries ask for it. */
    if (WANTS_FINAL(env, false)) write_observation(env, inside, env->final_observations);
    env->rewards[0] = reward;
    env->terminals[0] = 1;
    LOG_EPISODE(env, reward > 0, reward, reward, env->tick);
    c_reset(env);
}

static void c_step(Env* env) {
    static const int row_moves[] = {0, -1, 1, 0, 0}, column_moves[] = {0, 0, 0, -1, 1};
    int action = env->actions[0];
    env->row += row_moves[action];
    env->column += column_moves[action];
    env->tick++;

    /* Every output is written on every step, also where nothing happened. */
    env->rewards[0] = 0;
    env->terminals[0] = 0;
    env->truncations[0] = 0;

    /* One unsigned comparison covers both ends of the range. */
    bool inside = (unsigned)env->row < (unsigned)env->side && (unsigned)env->column < (unsigned)env->side;
    if (!inside) end_episode(env, -1, false);
    else if (env->row * env->side + env->column == env->target)
        end_episode(env, 1, true);
    else if (env->tick >= 3 * env->distance)
        end_episode(env, -1, true);
    else
        write_observation(env, true, env->observations);
}

static void c_render(Env* env) {
    int cell = 720 / env->side > 0 ? 720 / env->side : 1, gap = cell / 16;
    draw_begin(env->side * cell, env->side * cell, "squared");
    for (int row = 0; row < env->side; row++) {
        for (int column = 0; column < env->side; column++) {
            Color color = row * env->side + column == env->target ? DRAW_GOLD : DRAW_PANEL;
            if (row == env->row && column == env->column) color = DRAW_CYAN;
            DrawRectangle(column * cell + gap, row * cell + gap, cell - 2 * gap, cell - 2 * gap, color);
        }
    }
    draw_end();
}
