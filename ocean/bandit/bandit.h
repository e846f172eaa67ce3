/* Bandit: one of several arms is good, always the same one. A pull pays 1 with probability `good`
 * or `bad` and ends the episode. There is nothing to see and nothing to remember. So a trainer that
 * fails here has the sign of its gradient wrong, or rewards an action that was not taken.
 * Observation: a constant 1.
 * Actions: the arm. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, arms, 4, "arms to choose from") \
    X(int, good_arm, 2, "the one that pays") \
    X(float, good, 0.9, "probability that the good arm pays") \
    X(float, bad, 0.1, "probability that another arm pays")
#define BY_TURNS
#define KEYS DIGIT_KEYS
#include "env.h"
#include "draw.h"

enum { MAX_ARMS = 64 };

struct Env {
    ENV_COMMON
    int pulls[MAX_ARMS], paid[MAX_ARMS]; /* of each arm since the start, for c_render */
    int last;
};

static const char* c_init(Env* env) {
    if (env->arms < 2 || env->arms > MAX_ARMS) return "arms must lie within 2..64";
    if (env->good_arm < 0 || env->good_arm >= env->arms)
        return "good_arm must be one of the arms, counted from 0";
    if (!(env->bad >= 0 && env->bad < env->good && env->good <= 1))
        return "0 <= bad < good <= 1 must hold";
    env->last = -1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {1},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {env->arms},
    };
}

static void c_reset(Env* env) {
    env->observations[0] = 1;
}

/* perf counts good pulls, not paid ones, so that the best policy has 1. */
static void c_step(Env* env) {
    int arm = env->actions[0];
    bool right = arm == env->good_arm;
    bool pays = random_float(&env->rng, 0, 1) < (right ? env->good : env->bad);
    env->pulls[arm]++;
    env->paid[arm] += pays;
    env->last = arm;
    env->rewards[0] = pays;
    env->terminals[0] = 1;
    env->truncations[0] = 0;
    if (WANTS_FINAL(env, false)) env->final_observations[0] = 1;
    LOG_EPISODE(env, right, pays, pays, 1);
    c_reset(env);
}

/* A column for each arm shows how often it was pulled, as a share of the most, and how often that
 * paid. */
static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 400, LEFT = 40, BOTTOM = 320, TALL = 260 };
    float width = (float)(WIDTH - 2 * LEFT) / (float)env->arms, all = 1;
    for (int i = 0; i < env->arms; i++)
        all = maxf(all, (float)env->pulls[i]);
    draw_begin(WIDTH, HEIGHT, "bandit");
    for (int i = 0; i < env->arms; i++) {
        float x = LEFT + width * (float)i + width * 0.15f;
        float pulled = TALL * (float)env->pulls[i] / all;
        float paid = TALL * (float)env->paid[i] / all;
        DrawRectangleRec((Rectangle){x, BOTTOM - TALL, width * 0.7f, TALL}, DRAW_PANEL);
        DrawRectangleRec((Rectangle){x, BOTTOM - pulled, width * 0.7f, pulled}, DRAW_GREY);
        DrawRectangleRec((Rectangle){x, BOTTOM - paid, width * 0.7f, paid}, DRAW_GOLD);
        float radius = minf(width * 0.2f, 18);
        DrawCircleV((Vector2){x + width * 0.35f, BOTTOM + 36}, radius,
                    i == env->good_arm ? DRAW_GREEN : DRAW_PANEL);
        if (i == env->last)
            DrawCircleV((Vector2){x + width * 0.35f, BOTTOM + 36}, radius * 0.5f, DRAW_CYAN);
    }
    draw_end();
}
