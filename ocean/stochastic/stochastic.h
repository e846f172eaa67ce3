/* Stochastic: the best policy is not one action but a given mixture of two. Only the end of an
 * episode pays: 1 - error^2. error is how far the share of action 0 is from `share`, over the
 * furthest it can be.
 * perf is 1 - error. A policy without memory does best with probability (share - 1 / 2n) / (1 - 1 /
 * n) of action 0 in n steps, nearly `share`. One that counts may hit `share` exactly. A policy that
 * collapses to one action, or stays at even odds, is wrong.
 * Observation: a constant 1.
 * Actions: 0 or 1. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, length, 50, "steps of an episode") \
    X(float, share, 0.75, "wanted share of action 0")
#define BY_TURNS
#define KEYS DIGIT_KEYS
#include "env.h"
#include "draw.h"

struct Env {
    ENV_COMMON
    int tick, zeros; /* zeros: number of actions 0 */
};

static const char* c_init(Env* env) {
    if (env->length < 1) return "length must be 1 or more";
    if (!(env->share > 0 && env->share < 1)) return "share must lie between 0 and 1";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {1},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {2},
    };
}

static void c_reset(Env* env) {
    env->tick = env->zeros = 0;
    env->observations[0] = 1;
}

static void c_step(Env* env) {
    env->tick++;
    env->zeros += env->actions[0] == 0;
    bool over = env->tick == env->length;
    env->rewards[0] = 0;
    env->terminals[0] = over;
    env->truncations[0] = 0;
    env->observations[0] = 1;
    if (!over) return;
    if (WANTS_FINAL(env, false)) env->final_observations[0] = 1;
    float off = fabsf((float)env->zeros / (float)env->length - env->share) /
                maxf(env->share, 1 - env->share);
    env->rewards[0] = 1 - off * off;
    LOG_EPISODE(env, maxf(1 - off, 0), env->rewards[0], env->rewards[0], env->length);
    c_reset(env);
}

/* The bar is the share of action 0 so far; it should end at the mark. */
static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 260, LEFT = 40, BAR = 70 };
    float wide = WIDTH - 2 * LEFT, share = env->tick ? (float)env->zeros / (float)env->tick : 0;
    draw_begin(WIDTH, HEIGHT, "stochastic");
    DrawRectangle(LEFT, BAR, (int)wide, 70, DRAW_PANEL);
    DrawRectangle(LEFT, BAR, (int)(wide * share), 70, DRAW_CYAN);
    DrawRectangle(LEFT + (int)(wide * env->share) - 3, BAR - 16, 6, 102, DRAW_GOLD);
    DrawRectangle(LEFT, 190, (int)wide, 14, DRAW_PANEL);
    DrawRectangle(LEFT, 190, (int)(wide * (float)env->tick / (float)env->length), 14, DRAW_GREEN);
    draw_end();
}
