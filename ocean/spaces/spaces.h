/* Spaces: an observation of three parts and an action of three heads, one for each part. An episode
 * is one step. Each right head gives a third of the reward of 1. A trainer that cuts parts or heads
 * apart in the wrong places cannot learn this.
 *
 *     observation  part      values             head that it decides
 *     0 .. 24      image     -1..1              0 (2 choices): is their sum above 0?
 *     25 .. 29     flags     0 or 1             1 (2 choices): are more than half of them set?
 *     30           category  0, 1/3, 2/3, 1     2 (4 choices): which one is it? */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(image) X(flags) X(category)
#define SETTINGS(X)
#include "env.h"
#include "draw.h"

enum { IMAGE = 25, FLAGS = 5, CATEGORIES = 4, OBSERVATIONS = IMAGE + FLAGS + 1, HEADS = 3 };

struct Env {
    ENV_COMMON
    float image[IMAGE];
    int flags, category;
    int wanted[HEADS];
    int right; /* in the last episode, a bit for each head, for c_render; -1 before the first */
};

static const char* c_init(Env* env) {
    env->right = -1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {2, 2, CATEGORIES},
    };
}

static void c_reset(Env* env) {
    float sum = 0;
    int set = 0;
    for (int i = 0; i < IMAGE; i++) {
        env->observations[i] = env->image[i] = random_float(&env->rng, -1, 1);
        sum += env->image[i];
    }
    env->flags = random_int(&env->rng, 1 << FLAGS);
    for (int i = 0; i < FLAGS; i++) {
        env->observations[IMAGE + i] = (float)(env->flags >> i & 1);
        set += env->flags >> i & 1;
    }
    env->category = random_int(&env->rng, CATEGORIES);
    env->observations[IMAGE + FLAGS] = (float)env->category / (CATEGORIES - 1);
    env->wanted[0] = sum > 0;
    env->wanted[1] = set > FLAGS / 2;
    env->wanted[2] = env->category;
}

/* What an agent sees in its one step. */
static void write_final(const Env* env) {
    memcpy(env->final_observations, env->image, sizeof(env->image));
    for (int i = 0; i < FLAGS; i++)
        env->final_observations[IMAGE + i] = (float)(env->flags >> i & 1);
    env->final_observations[IMAGE + FLAGS] = (float)env->category / (CATEGORIES - 1);
}

static void c_step(Env* env) {
    bool image = env->actions[0] == env->wanted[0], flags = env->actions[1] == env->wanted[1];
    bool category = env->actions[2] == env->wanted[2];
    float reward = (float)(image + flags + category) / HEADS;
    env->right = image | flags << 1 | category << 2;
    env->rewards[0] = reward;
    env->terminals[0] = 1;
    env->truncations[0] = 0;
    LOG_EPISODE(env, reward, reward, reward, 1);
    env->log.image += image;
    env->log.flags += flags;
    env->log.category += category;
    if (WANTS_FINAL(env, false)) write_final(env);
    c_reset(env);
}

/* Shows the three parts, and below each a lamp for its head's last answer. */
static void c_render(Env* env) {
    enum { WIDTH = 760, HEIGHT = 380, CELL = 44, TOP = 40 };
    draw_begin(WIDTH, HEIGHT, "spaces");
    for (int i = 0; i < IMAGE; i++) {
        float value = env->image[i];
        Color color = draw_mix(DRAW_PANEL, value > 0 ? DRAW_CYAN : DRAW_RED, fabsf(value));
        DrawRectangle(50 + i % 5 * CELL, TOP + i / 5 * CELL, CELL - 4, CELL - 4, color);
    }
    for (int i = 0; i < FLAGS; i++)
        DrawRectangle(390, TOP + i * CELL, CELL - 4, CELL - 4,
                      env->flags >> i & 1 ? DRAW_GOLD : DRAW_PANEL);
    for (int i = 0; i < CATEGORIES; i++) {
        Vector2 centre = {620, TOP + 30 + 52 * (float)i};
        DrawCircleV(centre, 22, i == env->category ? DRAW_WHITE : DRAW_PANEL);
    }
    static const int lamp_x[HEADS] = {158, 410, 620};
    for (int i = 0; i < HEADS; i++) {
        Color color = env->right < 0 ? DRAW_PANEL : env->right >> i & 1 ? DRAW_GREEN : DRAW_RED;
        DrawCircleV((Vector2){(float)lamp_x[i], 320}, 18, color);
    }
    draw_end();
}
