/* Trash pickup: a team clears a field together. Each step an agent stays or moves a cell up, down,
 * left or right. Agents move in the order of their numbers.
 *   - An agent with empty hands that moves onto trash picks the piece up.
 *   - An agent with a piece that moves against a bin drops it in and stays where it is.
 *   - Walls, bins, other agents, and trash if the hands are full, are in the way.
 * A piece picked up pays reward_pickup, one dropped reward_drop: a share `team` of it in equal
 * parts to all agents, the rest to the one that did it. The episode ends for all when the last
 * piece is in a bin. After max_steps it is truncated. The first episode of an environment begins at
 * a random step, so that environments do not end together; it is not logged. Bins never touch each
 * other or a wall, so that they cut nothing off. score is the pieces in bins.
 * perf is their share of all. clear is the share of episodes in which the field was cleared.
 *
 *     observation, 0 or 1: planes of (2 vision + 1)^2 cells around the agent, then 26 more
 *     0          trash
 *     1          bins
 *     2          walls
 *     3          other agents
 *     4          other agents that carry a piece
 *     + 0        1 if it carries a piece itself
 *     + 1 .. 4   1 if the nearest bin is further up, down, left, right
 *     + 5 .. 11  how far down it is: the first 8 row / height of these are 1
 *     + 12 .. 18 how far to the right, likewise
 *     + 19 .. 25 time that has gone, likewise
 *
 * Actions: 0 stay, 1 up, 2 down, 3 left, 4 right. */
#pragma once

#define OBSERVATION uint8_t
#define OWN_LOG(X) X(clear)
#define SETTINGS(X) \
    X(int, num_agents, 8, "in one field") \
    X(int, num_trash, 40, "pieces to be cleared") \
    X(int, num_bins, 2, "where they go") \
    X(int, width, 20, "cells") \
    X(int, height, 20, "cells") \
    X(int, vision, 5, "cells that an agent sees in each direction") \
    X(int, max_steps, 150, "steps after which the episode is truncated") \
    X(float, team, 0.5, "part of each reward that goes to all agents in equal parts") \
    X(float, reward_pickup, 0.25, "for picking up a piece") \
    X(float, reward_drop, 1.0, "for dropping one into a bin")
#define FPS 8
#define KEYS(KEY) KEY(0, UP, 1) KEY(0, DOWN, 2) KEY(0, LEFT, 3) KEY(0, RIGHT, 4)
#include "env.h"
#include "draw.h"

enum {
    MAX_AGENTS = 64, MAX_BINS = 64, MAX_SIDE = 64, MAX_VISION = 8, PLANES = 5, LEVELS = 7,
    EXTRA = 5 + 3 * LEVELS
};
enum { EMPTY = 0, TRASH, BIN, WALL, AGENT, CARRIER };

typedef struct {
    int cell;
    bool carries;
    float total;
} Agent;

struct Env {
    ENV_COMMON
    bool begun, whole; /* whole: the episode began at its first step */
    /* stride: cells of a row, with the border; side: of a window; first: the field's first cell */
    int stride, side, first;
    int tick, dropped;
    int bins[MAX_BINS];
    Agent agents[MAX_AGENTS];
    /* with a border of walls */
    uint8_t cells[(MAX_SIDE + 2 * MAX_VISION) * (MAX_SIDE + 2 * MAX_VISION)];
};

static const char* c_init(Env* env) {
    if (env->num_agents < 1 || env->num_agents > MAX_AGENTS)
        return "num_agents must lie within 1..64";
    if (env->width < 3 || env->width > MAX_SIDE || env->height < 3 || env->height > MAX_SIDE)
        return "width and height must lie within 3..64";
    if (env->vision < 1 || env->vision > MAX_VISION) return "vision must lie within 1..8";
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (env->num_trash < 1) return "num_trash must be 1 or more";
    int places = (env->width - 1) / 2 * ((env->height - 1) / 2);
    if (env->num_bins < 1 || env->num_bins > MAX_BINS || env->num_bins > places)
        return "num_bins must lie within 1..64, and bins take every second cell of every second "
               "row at most";
    if (env->num_trash > env->width * env->height - env->num_bins - env->num_agents)
        return "num_agents + num_trash + num_bins must be no more than the cells";
    if (!(env->team >= 0 && env->team <= 1)) return "team must lie within 0..1";
    if (!isfinite(env->reward_pickup) || !isfinite(env->reward_drop))
        return "rewards must be finite";
    env->side = 2 * env->vision + 1;
    env->stride = env->width + 2 * env->vision;
    env->first = env->vision * env->stride + env->vision;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {PLANES * env->side * env->side + EXTRA},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {5},
    };
}

static int row_of(const Env* env, int cell) {
    return (cell - env->first) / env->stride;
}

static int column_of(const Env* env, int cell) {
    return (cell - env->first) % env->stride;
}

/* LEVELS elements. The share value / count of them is 1, the others 0. */
static void write_level(uint8_t* out, int value, int count) {
    int level = (int)((int64_t)value * (LEVELS + 1) / count);
    for (int k = 0; k < LEVELS; k++)
        out[k] = k < level;
}

/* Plane after plane, with one comparison a cell, because the compiler then does 16 or 32 at a time.
 */
static void write_observation(const Env* env, int i, uint8_t* out) {
    int side = env->side, plane = side * side, centre = env->agents[i].cell;
    const uint8_t* cells = env->cells + centre - env->vision * env->stride - env->vision;
    uint8_t* row = out;
    for (int r = 0; r < side; r++, cells += env->stride, row += side) {
        for (int c = 0; c < side; c++) {
            uint8_t cell = cells[c];
            row[c] = cell == TRASH;
            row[plane + c] = cell == BIN;
            row[2 * plane + c] = cell == WALL;
            row[3 * plane + c] = cell >= AGENT;
            row[4 * plane + c] = cell == CARRIER;
        }
    }
    int middle = env->vision * side + env->vision;
    out[3 * plane + middle] = out[4 * plane + middle] = 0;
    out += PLANES * plane;
    int y = row_of(env, centre), x = column_of(env, centre), best = 2 * MAX_SIDE, down = 0;
    int right = 0;
    for (int k = 0; k < env->num_bins; k++) {
        int dy = row_of(env, env->bins[k]) - y, dx = column_of(env, env->bins[k]) - x;
        int distance = abs(dx) + abs(dy);
        if (distance >= best) continue;
        best = distance;
        down = dy;
        right = dx;
    }
    out[0] = env->agents[i].carries;
    out[1] = down < 0;
    out[2] = down > 0;
    out[3] = right < 0;
    out[4] = right > 0;
    write_level(out + 5, y, env->height);
    write_level(out + 5 + LEVELS, x, env->width);
    write_level(out + 5 + 2 * LEVELS, env->tick < env->max_steps ? env->tick : env->max_steps - 1,
                env->max_steps);
}

static void write_observations(const Env* env, uint8_t* out) {
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, out + i * (PLANES * env->side * env->side + EXTRA));
}

/* Guesses an empty cell. In a crowded field it takes the first one after a guess. */
static int free_cell(Env* env) {
    int cells = env->width * env->height, guess = 0;
    for (int try = 0; try < 32 + cells; try++) {
        guess = try < 32 ? random_int(&env->rng, cells) : (guess + 1) % cells;
        int cell = env->first + guess / env->width * env->stride + guess % env->width;
        if (env->cells[cell] == EMPTY) return cell;
    }
    return -1; /* c_init has made sure that there is one */
}

static void c_reset(Env* env) {
    memset(env->cells, WALL, sizeof(env->cells));
    for (int row = 0; row < env->height; row++)
        memset(env->cells + env->first + row * env->stride, EMPTY, (size_t)env->width);
    for (int k = 0; k < env->num_bins;) {
        int row = 1 + 2 * random_int(&env->rng, (env->height - 1) / 2);
        int column = 1 + 2 * random_int(&env->rng, (env->width - 1) / 2);
        int cell = env->first + row * env->stride + column;
        if (env->cells[cell] != EMPTY) continue;
        env->cells[cell] = BIN;
        env->bins[k++] = cell;
    }
    for (int i = 0; i < env->num_agents; i++) {
        env->agents[i] = (Agent){.cell = free_cell(env)};
        env->cells[env->agents[i].cell] = AGENT;
    }
    for (int k = 0; k < env->num_trash; k++)
        env->cells[free_cell(env)] = TRASH;
    env->tick = env->begun ? 0 : random_int(&env->rng, env->max_steps);
    env->whole = env->tick == 0;
    env->begun = true;
    env->dropped = 0;
    write_observations(env, env->observations);
}

/* Moves one agent. Returns its reward. */
static float move(Env* env, Agent* agent, int action) {
    const int steps[5] = {0, -env->stride, env->stride, -1, 1};
    int next = agent->cell + steps[action], found = env->cells[next];
    if (found == BIN && agent->carries) {
        agent->carries = false;
        env->cells[agent->cell] = AGENT;
        env->dropped++;
        return env->reward_drop;
    }
    bool picks = found == TRASH && !agent->carries;
    if (found != EMPTY && !picks) return 0;
    agent->carries |= picks;
    env->cells[agent->cell] = EMPTY;
    env->cells[next] = agent->carries ? CARRIER : AGENT;
    agent->cell = next;
    return picks ? env->reward_pickup : 0;
}

static void log_episode(Env* env, bool clear) {
    float total = 0;
    for (int i = 0; i < env->num_agents; i++)
        total += env->agents[i].total;
    LOG_EPISODE(env, (float)env->dropped / (float)env->num_trash, env->dropped,
                total / (float)env->num_agents, env->tick);
    env->log.clear += clear;
}

static void c_step(Env* env) {
    float earned = 0;
    for (int i = 0; i < env->num_agents; i++) {
        env->rewards[i] = move(env, &env->agents[i], env->actions[i]);
        earned += env->rewards[i];
    }
    bool clear = env->dropped == env->num_trash, late = ++env->tick >= env->max_steps && !clear;
    for (int i = 0; i < env->num_agents; i++) {
        env->rewards[i] =
            (1 - env->team) * env->rewards[i] + env->team * earned / (float)env->num_agents;
        env->agents[i].total += env->rewards[i];
        env->terminals[i] = clear;
        env->truncations[i] = late;
    }
    if (!clear && !late) {
        write_observations(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observations(env, env->final_observations);
    if (env->whole) log_episode(env, clear);
    c_reset(env);
}

static void c_render(Env* env) {
    int cell = 1080 / env->width < 760 / env->height ? 1080 / env->width : 760 / env->height;
    float size = (float)cell, half = size / 2;
    draw_begin(env->width * cell, env->height * cell, "trash_pickup");
    const Agent* player = &env->agents[0];
    int seen_x = column_of(env, player->cell) - env->vision;
    int seen_y = row_of(env, player->cell) - env->vision;
    DrawRectangle(seen_x * cell, seen_y * cell, env->side * cell, env->side * cell,
                  (Color){20, 31, 41, 255});
    for (int row = 0; row < env->height; row++) {
        for (int column = 0; column < env->width; column++) {
            int found = env->cells[env->first + row * env->stride + column];
            float x = (float)column * size, y = (float)row * size;
            Vector2 centre = {x + half, y + half};
            if (found == TRASH) {
                DrawRectangleRec(
                    (Rectangle){x + 0.32f * size, y + 0.32f * size, 0.36f * size, 0.36f * size},
                    DRAW_GOLD);
            } else if (found == BIN) {
                DrawRectangleRec(
                    (Rectangle){x + 0.06f * size, y + 0.06f * size, 0.88f * size, 0.88f * size},
                    DRAW_GREEN);
                DrawRectangleRec(
                    (Rectangle){x + 0.2f * size, y + 0.2f * size, 0.6f * size, 0.6f * size},
                    (Color){24, 66, 38, 255});
            } else if (found >= AGENT) {
                int cell_at = env->first + row * env->stride + column;
                DrawCircleV(centre, 0.42f * size, cell_at == player->cell ? DRAW_WHITE : DRAW_CYAN);
                if (found == CARRIER)
                    DrawRectangleRec(
                        (Rectangle){x + 0.34f * size, y + 0.34f * size, 0.32f * size, 0.32f * size},
                        (Color){200, 130, 20, 255});
            }
        }
    }
    draw_format(8, 8, 20, DRAW_WHITE, "%d of %d", env->dropped, env->num_trash);
    draw_end();
}
