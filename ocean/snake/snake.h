/* Snake: many snakes in one walled field. Each step an agent heads up, down, left or right and
 * moves a cell. Agents move in the order of their numbers. A snake cannot turn back onto its own
 * neck; it goes straight on.
 *   - Food makes a snake a cell longer and pays reward_food. At max_length the snake grows no more.
 *   - A wall, a body or a head in the way kills, with reward_death. That ends the agent's episode.
 *     With `corpses` its body without the head becomes food. The snake begins again, one cell long,
 *     elsewhere.
 *   - The same happens to a snake that has not eaten for `patience` steps.
 *   - A tail that moves away in the same step is not in the way of its own head.
 *   - New food appears only while there is less than num_food, with corpses, so the field never
 *     fills up.
 * score is the length at death.
 * perf is the score over 100, at most 1.
 *
 *     observation: planes of (2 vision + 1)^2 cells around the head, 1 if there is
 *     0   food
 *     1   a wall or any body: what kills
 *     2   a part of the own body
 *     3   the head of another snake */
#pragma once

#define OBSERVATION uint8_t
#define SETTINGS(X) \
    X(int, num_agents, 64, "snakes in one field") \
    X(int, width, 96, "cells") \
    X(int, height, 64, "cells") \
    X(int, vision, 5, "cells that an agent sees in each direction") \
    X(int, num_food, 128, "pieces of food that are always there") \
    X(int, max_length, 256, "cells of the longest snake") \
    X(int, patience, 1000, "steps without food after which a snake dies; 0: none") \
    X(bool, corpses, true, "dead snakes become food") \
    X(float, reward_food, 0.1, "for a piece of food") \
    X(float, reward_corpse, 0.1, "for a piece of a corpse") \
    X(float, reward_death, -1.0, "for dying")
/* the field with a border of walls; a ring of max_length for each agent */
#define HEAP(X) \
    X(uint16_t, cells, env->stride * env->rows) \
    X(int32_t, bodies, env->num_agents * env->max_length)
#define FPS 8
#define BY_TURNS
#define KEYS(KEY) KEY(0, UP, 0) KEY(0, DOWN, 1) KEY(0, LEFT, 2) KEY(0, RIGHT, 3)
#include "env.h"
#include "draw.h"

enum { MAX_AGENTS = 1024, EMPTY = 0, FOOD, CORPSE, WALL, SNAKE, HEAD = 1 << 15, PLANES = 4 };
enum { PAR = 100 };

typedef struct {
    int head; /* the head's place in its ring */
    int length, heading, idle, tick;
    float total;
} Snake;

struct Env {
    ENV_COMMON
    int stride, rows; /* of cells, with the border */
    int food; /* pieces in the field, with corpses */
    Snake snakes[MAX_AGENTS];
};

static const char* c_init(Env* env) {
    if (env->num_agents < 1 || env->num_agents > MAX_AGENTS)
        return "num_agents must lie within 1..1024";
    if (env->vision < 1 || env->vision > 32) return "vision must lie within 1..32";
    if (env->width < 2 || env->width > 4096 || env->height < 2 || env->height > 4096)
        return "width and height must lie within 2..4096";
    if (env->num_food < 0 || env->patience < 0) return "num_food and patience must be 0 or more";
    if (env->max_length < 2 || env->max_length > 1 << 16)
        return "max_length must lie within 2..65536";
    if ((int64_t)env->num_agents + env->num_food > (int64_t)env->width * env->height / 2)
        return "num_agents + num_food must be no more than half of the cells";
    env->stride = env->width + 2 * env->vision;
    env->rows = env->height + 2 * env->vision;
    return NULL;
}

static int side_of(const Env* env) {
    return 2 * env->vision + 1;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {PLANES, side_of(env), side_of(env)},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {4},
    };
}

static int32_t* body_of(const Env* env, int i) {
    return env->bodies + (size_t)i * (size_t)env->max_length;
}

/* Plane after plane, with one comparison a cell, because the compiler then does 16 or 32 at a time.
 */
static void write_observation(const Env* env, int i, uint8_t* observation) {
    int side = side_of(env), plane = side * side, head = body_of(env, i)[env->snakes[i].head];
    uint16_t own = (uint16_t)(SNAKE + i), own_head = own | HEAD;
    const uint16_t* cells = env->cells + head - env->vision * env->stride - env->vision;
    for (int row = 0; row < side; row++, cells += env->stride, observation += side) {
        for (int column = 0; column < side; column++) {
            uint16_t cell = cells[column];
            observation[column] = (cell == FOOD) | (cell == CORPSE);
            observation[plane + column] = cell >= WALL;
            observation[2 * plane + column] = (cell == own) | (cell == own_head);
            observation[3 * plane + column] = (cell >= HEAD) & (cell != own_head);
        }
    }
}

/* Guesses a free cell. In a crowded field it takes the first one after a guess, or food if there is
 * no other. */
static int free_cell(Env* env) {
    int cell = 0, count = env->stride * env->rows;
    for (int try = 0; try < 64; try++) {
        int column = random_int(&env->rng, env->width), row = random_int(&env->rng, env->height);
        cell = (row + env->vision) * env->stride + column + env->vision;
        if (env->cells[cell] == EMPTY) return cell;
    }
    for (int worst = EMPTY; worst <= CORPSE; worst++) {
        for (int k = 0; k < count; k++)
            if (env->cells[(cell + k) % count] <= worst) return (cell + k) % count;
    }
    return -1;
}

static void place_food(Env* env) {
    int cell = free_cell(env);
    if (cell < 0 || env->cells[cell] != EMPTY) return;
    env->cells[cell] = FOOD;
    env->food++;
}

static void place_snake(Env* env, int i) {
    Snake* snake = &env->snakes[i];
    *snake = (Snake){.length = 1, .heading = random_int(&env->rng, 4)};
    int cell = free_cell(env); /* there is one, because this snake's own cells were just freed */
    env->food -= env->cells[cell] != EMPTY;
    env->cells[cell] = (uint16_t)(SNAKE + i) | HEAD;
    body_of(env, i)[0] = cell;
}

static void c_reset(Env* env) {
    int size = PLANES * side_of(env) * side_of(env);
    for (int row = 0; row < env->rows; row++) {
        for (int column = 0; column < env->stride; column++) {
            bool inside = row >= env->vision && row < env->rows - env->vision &&
                          column >= env->vision && column < env->stride - env->vision;
            env->cells[row * env->stride + column] = inside ? EMPTY : WALL;
        }
    }
    env->food = 0;
    for (int i = 0; i < env->num_agents; i++)
        place_snake(env, i);
    for (int k = 0; k < env->num_food; k++)
        place_food(env);
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, env->observations + i * size);
}

/* The cell of the body k steps behind the head. */
static int part(const Env* env, int i, int k) {
    int at = env->snakes[i].head - k;
    return body_of(env, i)[at < 0 ? at + env->max_length : at];
}

static void die(Env* env, int i) {
    Snake* snake = &env->snakes[i];
    for (int k = 0; k < snake->length; k++)
        env->cells[part(env, i, k)] = env->corpses && k ? CORPSE : EMPTY;
    if (env->corpses) env->food += snake->length - 1;
    LOG_EPISODE(env, minf((float)snake->length / PAR, 1), snake->length, snake->total, snake->tick);
    place_snake(env, i);
}

/* Moves one snake. Returns its reward, and whether it died. */
static float move(Env* env, int i, int action, bool* died) {
    const int steps[4] = {-env->stride, env->stride, -1, 1};
    Snake* snake = &env->snakes[i];
    int head = part(env, i, 0);
    if (snake->length == 1 || head + steps[action] != part(env, i, 1)) snake->heading = action;
    int next = head + steps[snake->heading], found = env->cells[next];
    bool eats = found == FOOD || found == CORPSE;
    snake->tick++;
    snake->idle = eats ? 0 : snake->idle + 1;
    bool grows = eats && snake->length < env->max_length;
    if (!grows) env->cells[part(env, i, snake->length - 1)] = EMPTY;
    if ((!eats && env->cells[next] != EMPTY) || (env->patience && snake->idle >= env->patience)) {
        snake->total += env->reward_death;
        *died = true;
        return env->reward_death;
    }
    if (snake->length > 1 || grows) env->cells[head] = (uint16_t)(SNAKE + i);
    snake->length += grows;
    snake->head = snake->head + 1 == env->max_length ? 0 : snake->head + 1;
    body_of(env, i)[snake->head] = next;
    env->cells[next] = (uint16_t)(SNAKE + i) | HEAD;
    env->food -= eats;
    if (env->food < env->num_food) place_food(env);
    float reward = found == FOOD ? env->reward_food : found == CORPSE ? env->reward_corpse : 0;
    snake->total += reward;
    return reward;
}

static void c_step(Env* env) {
    int size = PLANES * side_of(env) * side_of(env);
    for (int i = 0; i < env->num_agents; i++) {
        bool died = false;
        env->rewards[i] = move(env, i, env->actions[i], &died);
        env->terminals[i] = died;
        env->truncations[i] = 0;
        /* The final observation comes before its body is gone. */
        if (died && WANTS_FINAL(env, false))
            write_observation(env, i, env->final_observations + i * size);
        if (died) die(env, i);
    }
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, env->observations + i * size);
}

static void c_render(Env* env) {
    static const Color colors[] = {
        {0, 187, 204, 255}, {90, 200, 120, 255}, {226, 84, 84, 255}, {170, 130, 240, 255},
        {240, 140, 190, 255}, {150, 200, 255, 255}, {238, 126, 72, 255}
    };
    int cell = 1200 / env->width < 760 / env->height ? 1200 / env->width : 760 / env->height;
    if (cell < 1) cell = 1;
    int gap = cell >= 6, half = cell / 2;
    draw_begin(env->width * cell, env->height * cell, "snake");
    for (int row = 0; row < env->height; row++) {
        for (int column = 0; column < env->width; column++) {
            int at = env->cells[(row + env->vision) * env->stride + column + env->vision];
            int x = column * cell;
            int y = row * cell, who = (at & ~HEAD) - SNAKE;
            if (at == FOOD || at == CORPSE)
                DrawCircleV((Vector2){(float)(x + half), (float)(y + half)}, (float)cell * 0.3f,
                            at == FOOD ? DRAW_GOLD : DRAW_GREY);
            else if (at >= SNAKE)
                DrawRectangle(x + gap, y + gap, cell - gap, cell - gap,
                              at & HEAD ? DRAW_WHITE
                                        : colors[who % (int)(sizeof(colors) / sizeof(colors[0]))]);
        }
    }
    draw_end();
}
