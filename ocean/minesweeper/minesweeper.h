/* Minesweeper: uncover all cells without a mine. A number tells how many of a cell's eight
 * neighbours have one. A cell with 0 uncovers its neighbours too, and so on. The first cell of a
 * game and its neighbours have no mine; with too many mines for that, only the first cell has none.
 * A mine ends the episode with reward_mine, the last safe cell with reward_win. Each safe cell pays
 * its share of 1. An action on an uncovered cell changes nothing and costs reward_wasted; the
 * action mask says what is covered. There are no flags, because they change nothing.
 * The standard fields are 9 x 9 with 10 mines, 16 x 16 with 40, 30 x 16 with 99.
 * Observation: ten planes of height x width bytes, covered, and each number 0 .. 8.
 * Actions: the cell, row after row.
 * perf is the share of games won. score is the share of safe cells uncovered. */
#pragma once

#define OBSERVATION uint8_t
#define SETTINGS(X) \
    X(int, width, 9, "cells") \
    X(int, height, 9, "cells") \
    X(int, mines, 10, "in the field") \
    X(int, max_steps, 0, "steps after which an episode is truncated; 0: none") \
    X(float, reward_win, 1.0, "for the last safe cell") \
    X(float, reward_mine, -1.0, "for a mine") \
    X(float, reward_wasted, -0.1, "for a cell that is uncovered already")
#define HAS_ACTION_MASKS
#define BY_TURNS
#define CLICK_COLUMNS env->width
#include "env.h"
#include "draw.h"

enum { MAX_SIDE = 32, STRIDE = MAX_SIDE + 2, MAX_CELLS = STRIDE * STRIDE, PLANES = 10 };
/* A cell holds its number, and bits for a mine and for covered. The border has neither bit. */
enum { NUMBER = 15, MINE = 16, COVERED = 32 };

struct Env {
    ENV_COMMON
    int tick, open; /* open: uncovered cells */
    float total;
    uint8_t cells[MAX_CELLS];
    int16_t stack[MAX_CELLS];
};

static const int neighbours[8] = {
    -STRIDE - 1, -STRIDE, -STRIDE + 1, -1, 1, STRIDE - 1, STRIDE, STRIDE + 1
};

static const char* c_init(Env* env) {
    if (env->width < 2 || env->width > MAX_SIDE || env->height < 2 || env->height > MAX_SIDE)
        return "width and height must lie within 2..32";
    if (env->mines < 1 || env->mines >= env->width * env->height)
        return "mines: at least 1, and one cell without";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {PLANES, env->height, env->width},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {env->width * env->height},
    };
}

static inline int place_of(const Env* env, int action) {
    return (action / env->width + 1) * STRIDE + action % env->width + 1;
}

/* Copies the field without its border, then writes plane after plane, because the compiler then
 * does 16 or 32 cells at once. */
static void write_observation(const Env* env, uint8_t* observation, uint8_t* masks) {
    int plane = env->width * env->height;
    uint8_t cells[MAX_SIDE * MAX_SIDE];
    for (int row = 0; row < env->height; row++)
        memcpy(cells + row * env->width, env->cells + (row + 1) * STRIDE + 1, (size_t)env->width);
    for (int i = 0; i < plane; i++)
        observation[i] = (cells[i] & COVERED) != 0;
    for (int k = 1; k < PLANES; k++)
        for (int i = 0; i < plane; i++)
            observation[k * plane + i] = (cells[i] & (COVERED | NUMBER)) == k - 1;
    if (masks) memcpy(masks, observation, (size_t)plane);
}

static void c_reset(Env* env) {
    env->tick = env->open = 0;
    env->total = 0;
    memset(env->cells, 0, sizeof(env->cells));
    for (int row = 1; row <= env->height; row++)
        memset(env->cells + row * STRIDE + 1, COVERED, (size_t)env->width);
    write_observation(env, env->observations, env->action_masks);
}

static bool near(int a, int b) {
    int rows = a / STRIDE - b / STRIDE, columns = a % STRIDE - b % STRIDE;
    return rows >= -1 && rows <= 1 && columns >= -1 && columns <= 1;
}

static void lay_mine(Env* env, int cell) {
    env->cells[cell] |= MINE;
    for (int k = 0; k < 8; k++)
        env->cells[cell + neighbours[k]]++;
}

/* Mines are placed when the first cell is known. Few mines are guessed one by one. With many, each
 * cell in turn takes one with the chance that gives the right number. */
static void lay_mines(Env* env, int first) {
    int size = env->width * env->height, kept = 0, mines = env->mines;
    for (int k = 0; k < 9; k++)
        kept += k == 8 || env->cells[first + neighbours[k]] & COVERED;
    bool wide = mines <= size - kept;
    int places = wide ? size - kept : size - 1;
    while (mines && wide && 2 * env->mines <= places) {
        int cell = place_of(env, random_int(&env->rng, size));
        if (near(cell, first) || env->cells[cell] & MINE) continue;
        lay_mine(env, cell);
        mines--;
    }
    for (int i = 0; i < size && mines; i++) {
        int cell = place_of(env, i);
        if (wide ? near(cell, first) : cell == first) continue;
        if (random_int(&env->rng, places--) >= mines) continue;
        lay_mine(env, cell);
        mines--;
    }
}

static void uncover(Env* env, int cell) {
    int waiting = 0;
    env->stack[waiting++] = (int16_t)cell;
    env->cells[cell] &= ~COVERED;
    while (waiting) {
        cell = env->stack[--waiting];
        env->open++;
        if (env->cells[cell] & NUMBER) continue;
        for (int k = 0; k < 8; k++) {
            int next = cell + neighbours[k];
            if (!(env->cells[next] & COVERED)) continue; /* the border is never covered */
            env->cells[next] &= ~COVERED;
            env->stack[waiting++] = (int16_t)next;
        }
    }
}

static void c_step(Env* env) {
    int cell = place_of(env, env->actions[0]), safe = env->width * env->height - env->mines;
    int before = env->open;
    float reward = env->reward_wasted;
    bool blown = false, won = false;
    if (env->cells[cell] & COVERED) {
        if (env->open == 0) lay_mines(env, cell);
        blown = env->cells[cell] & MINE;
        if (!blown) uncover(env, cell);
        won = env->open == safe;
        reward = (float)(env->open - before) / (float)safe + (blown ? env->reward_mine : 0);
        if (won) reward += env->reward_win;
    }
    env->tick++;
    bool over = blown || won, late = !over && env->max_steps && env->tick >= env->max_steps;
    env->rewards[0] = reward;
    env->terminals[0] = over;
    env->truncations[0] = late;
    env->total += reward;
    if (!over && !late) {
        write_observation(env, env->observations, env->action_masks);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations, NULL);
    LOG_EPISODE(env, won, (float)env->open / (float)safe, env->total, env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    static const Color colors[] = {
        {70, 90, 104, 255}, {0, 187, 204, 255}, {90, 200, 120, 255}, {226, 84, 84, 255},
        {170, 130, 240, 255}, {250, 190, 60, 255}, {240, 140, 190, 255}, {236, 242, 246, 255},
        {130, 146, 160, 255}
    };
    int longer = env->width > env->height ? env->width : env->height, side = 720 / longer;
    draw_begin(env->width * side, env->height * side, "minesweeper");
    for (int i = 0; i < env->width * env->height; i++) {
        int cell = env->cells[place_of(env, i)], x = i % env->width * side;
        int y = i / env->width * side;
        bool covered = cell & COVERED;
        DrawRectangle(x + 1, y + 1, side - 2, side - 2,
                      covered ? (Color){62, 86, 104, 255} : DRAW_PANEL);
        if (covered) DrawRectangle(x + 1, y + 1, side - 2, side / 10, (Color){84, 112, 132, 255});
        if (covered && cell & MINE)
            DrawCircleV((Vector2){(float)(x + side / 2), (float)(y + side / 2)},
                        (float)side * 0.12f, (Color){150, 70, 76, 255});
        if (covered || !(cell & NUMBER)) continue;
        char text[2] = {(char)('0' + (cell & NUMBER)), 0};
        draw_text_centred(text, x + side / 2, y + side / 2, side * 6 / 10, colors[cell & NUMBER]);
    }
    draw_end();
}
