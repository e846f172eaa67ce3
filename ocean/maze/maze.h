/* Maze: find the goal in a maze that is new in each episode, while seeing only what is near. size x
 * size rooms are joined by a random walk. It continues from the newest room that has an unseen
 * neighbour (depth first), so there is exactly one way between two rooms. Then `loops` opens that
 * share of the walls that are left. The agent starts in a random room. The goal is in another, at
 * least half of the size away. Each step the agent moves a cell, which is half a way to the next
 * room, unless there is a wall. The goal pays 1 and ends the episode. Every step costs reward_step.
 * After max_steps the episode is truncated.
 *
 *     observation: planes of (2 vision + 1)^2 cells around the agent, 1 if there is
 *     0   a wall, or the outside
 *     1   the goal
 *     2   with `trail`, a cell where the agent was in this episode
 *     3   with `trail`, a cell that it left for one where it had been. Without loops there is
 *         nothing new behind it, and the trail's other cells are the way back.
 *
 * Actions: up, down, left, right.
 * perf is the share of mazes solved. score is the shortest way over the steps taken, 0 if the goal
 * was not reached. */
#pragma once

#define OBSERVATION uint8_t
#define SETTINGS(X) \
    X(int, size, 8, "rooms on a side, 2..64") \
    X(int, vision, 3, "cells that the agent sees in each direction") \
    X(bool, trail, true, "the agent sees where it was") \
    X(int, max_steps, 0, "steps after which an episode is truncated; 0: 4 for each room") \
    X(float, loops, 0.0, "share of inner walls that are opened besides") \
    X(float, reward_step, 0.0, "of every step")
/* the maze with a border of walls; a list with room for all cells */
#define HEAP(X) \
    X(uint8_t, cells, env->stride * env->stride) \
    X(uint16_t, queue, env->stride * env->stride)
#define BY_TURNS
#define KEYS(KEY) KEY(0, UP, 0) KEY(0, DOWN, 1) KEY(0, LEFT, 2) KEY(0, RIGHT, 3)
#include "env.h"
#include "draw.h"

enum { MAX_SIZE = 64, MAX_VISION = 16, WALL = 1, GOAL = 2, TRAIL = 4, SEEN = 8, DONE = 16 };

struct Env {
    ENV_COMMON
    /* border: cells before the first room; stride: cells of a row; limit: of steps */
    int border, stride, limit;
    int at, goal, way; /* way: steps of the shortest way from the start */
    int tick;
};

static const char* c_init(Env* env) {
    if (env->size < 2 || env->size > MAX_SIZE) return "size must lie within 2..64";
    if (env->vision < 1 || env->vision > MAX_VISION) return "vision must lie within 1..16";
    if (env->max_steps < 0) return "max_steps must be 0 (4 for each room) or more";
    if (!(env->loops >= 0 && env->loops <= 1)) return "loops must lie within 0..1";
    /* so that two cells beyond any room are inside the array */
    env->border = env->vision < 2 ? 2 : env->vision;
    env->stride = 2 * env->size - 1 + 2 * env->border;
    env->limit = env->max_steps ? env->max_steps : 4 * env->size * env->size;
    return NULL;
}

static int side_of(const Env* env) {
    return 2 * env->vision + 1;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {env->trail ? 4 : 2, side_of(env), side_of(env)},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {4},
    };
}

static void write_observation(const Env* env, uint8_t* observation) {
    int side = side_of(env), plane = side * side;
    const uint8_t* cells = env->cells + env->at - env->vision * env->stride - env->vision;
    for (int row = 0; row < side; row++, cells += env->stride, observation += side) {
        for (int column = 0; column < side; column++) {
            observation[column] = (cells[column] & WALL) != 0;
            observation[plane + column] = (cells[column] & GOAL) != 0;
        }
        for (int column = 0; env->trail && column < side; column++) {
            observation[2 * plane + column] = (cells[column] & TRAIL) != 0;
            observation[3 * plane + column] = (cells[column] & DONE) != 0;
        }
    }
}

static int room(const Env* env, int row, int column) {
    return (2 * row + env->border) * env->stride + 2 * column + env->border;
}

/* Rooms are every second cell. The walk opens the walls between them. */
static void dig(Env* env) {
    const int steps[4] = {-env->stride, env->stride, -1, 1};
    memset(env->cells, WALL, (size_t)env->stride * (size_t)env->stride);
    for (int row = 0; row < env->size; row++)
        for (int column = 0; column < env->size; column++)
            env->cells[room(env, row, column)] = SEEN; /* here: not yet reached */
    int column = random_int(&env->rng, env->size), row = random_int(&env->rng, env->size);
    int at = room(env, row, column), waiting = 0;
    env->cells[at] = 0;
    env->queue[waiting++] = (uint16_t)at;
    while (waiting) {
        at = env->queue[waiting - 1];
        int open[4], count = 0;
        for (int k = 0; k < 4; k++)
            if (env->cells[at + steps[k]] & WALL && env->cells[at + 2 * steps[k]] == SEEN)
                open[count++] = steps[k];
        if (count == 0) {
            waiting--;
            continue;
        }
        int step = open[random_int(&env->rng, count)];
        env->cells[at + step] = env->cells[at + 2 * step] = 0;
        env->queue[waiting++] = (uint16_t)(at + 2 * step);
    }
    for (int row = 0; env->loops > 0 && row < env->size; row++) {
        for (int column = 0; column < env->size; column++) {
            int here = room(env, row, column);
            if (column + 1 < env->size && random_float(&env->rng, 0, 1) < env->loops)
                env->cells[here + 1] = 0;
            if (row + 1 < env->size && random_float(&env->rng, 0, 1) < env->loops)
                env->cells[here + env->stride] = 0;
        }
    }
}

/* Steps of the shortest way from start to goal, breadth first. It removes its marks. */
static int shortest(Env* env) {
    const int steps[4] = {-env->stride, env->stride, -1, 1};
    int first = 0, last = 0, way = 0, found = -1;
    env->queue[last++] = (uint16_t)env->at;
    env->cells[env->at] |= SEEN;
    while (first < last && found < 0) {
        int end = last;
        for (; first < end && found < 0; first++) {
            int at = env->queue[first];
            if (at == env->goal) found = way;
            for (int k = 0; k < 4; k++) {
                int next = at + steps[k];
                if (env->cells[next] & (WALL | SEEN)) continue;
                env->cells[next] |= SEEN;
                env->queue[last++] = (uint16_t)next;
            }
        }
        way++;
    }
    for (int i = 0; i < last; i++)
        env->cells[env->queue[i]] &= ~SEEN;
    return found;
}

static void c_reset(Env* env) {
    dig(env);
    env->tick = 0;
    int row = random_int(&env->rng, env->size), column = random_int(&env->rng, env->size);
    int to_row, to_column, apart;
    do { /* this ends, because some corner is always far enough away */
        to_row = random_int(&env->rng, env->size);
        to_column = random_int(&env->rng, env->size);
        apart = abs(to_row - row) + abs(to_column - column);
    } while (apart < (env->size + 1) / 2);
    env->at = room(env, row, column);
    env->goal = room(env, to_row, to_column);
    env->cells[env->goal] |= GOAL;
    env->way = shortest(env);
    env->cells[env->at] |= TRAIL;
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    const int steps[4] = {-env->stride, env->stride, -1, 1};
    int next = env->at + steps[env->actions[0]];
    if (!(env->cells[next] & WALL)) {
        if (env->cells[next] & TRAIL) env->cells[env->at] |= DONE;
        env->cells[next] |= TRAIL;
        env->at = next;
    }
    env->tick++;
    bool there = env->at == env->goal, late = !there && env->tick >= env->limit;
    env->rewards[0] = (float)there + env->reward_step;
    env->terminals[0] = there;
    env->truncations[0] = late;
    if (!there && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, there, there ? (float)env->way / (float)env->tick : 0,
                (float)there + (float)env->tick * env->reward_step, env->tick);
    c_reset(env);
}

/* What the agent sees is lit; the rest of the maze is dim. */
static void c_render(Env* env) {
    int cells = 2 * env->size + 1, side = 760 / cells > 1 ? 760 / cells : 1;
    int border = env->border - 1;
    int row = env->at / env->stride - border, column = env->at % env->stride - border;
    draw_begin(cells * side, cells * side, "maze");
    for (int y = 0; y < cells; y++) {
        for (int x = 0; x < cells; x++) {
            int cell = env->cells[(y + border) * env->stride + x + border];
            bool lit = abs(y - row) <= env->vision && abs(x - column) <= env->vision;
            Color color = cell & WALL
                              ? (lit ? (Color){92, 118, 138, 255} : (Color){44, 60, 74, 255})
                              : (lit ? DRAW_PANEL : DRAW_BACKGROUND);
            if (cell & TRAIL) color = draw_mix(color, DRAW_CYAN, cell & DONE ? 0.12f : 0.35f);
            DrawRectangle(x * side, y * side, side, side, color);
            Vector2 centre = {((float)x + 0.5f) * (float)side, ((float)y + 0.5f) * (float)side};
            if (cell & GOAL) DrawCircleV(centre, (float)side * 0.42f, DRAW_GOLD);
            if (y == row && x == column) DrawCircleV(centre, (float)side * 0.42f, DRAW_CYAN);
        }
    }
    draw_end();
}
