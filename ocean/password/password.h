/* Password: one sequence of bits pays 1 when its last bit is typed. Every other pays nothing. Only
 * the last step gives a hint, so only exploration finds the password, and only credit over the
 * whole episode keeps it.
 * Observation: for each position -1 or 1 for a typed bit 0 or 1, and 0 if none was typed yet.
 * Actions: the bit. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, length, 5, "bits of the password") \
    X(int, password, 22, "the password as a number; its lowest bit is typed first")
#define BY_TURNS
#define KEYS DIGIT_KEYS
#include "env.h"
#include "draw.h"

enum { MAX_LENGTH = 30 };

struct Env {
    ENV_COMMON
    int typed, tick; /* typed: the bits so far, the first one lowest */
    int last;        /* typed in the last episode, for c_render; -1 before the first */
};

static const char* c_init(Env* env) {
    if (env->length < 1 || env->length > MAX_LENGTH) return "length must lie within 1..30";
    if (env->password < 0 || env->password >> env->length)
        return "password must have no more than length bits";
    env->last = -1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {env->length},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {2},
    };
}

static void write_observation(const Env* env, float* observation) {
    for (int i = 0; i < env->length; i++)
        observation[i] = i < env->tick ? (env->typed >> i & 1 ? 1.0f : -1.0f) : 0.0f;
}

static void c_reset(Env* env) {
    env->typed = env->tick = 0;
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    env->typed |= env->actions[0] << env->tick;
    env->tick++;
    bool over = env->tick == env->length, right = over && env->typed == env->password;
    env->rewards[0] = right;
    env->terminals[0] = over;
    env->truncations[0] = 0;
    if (!over) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, right, right, right, env->length);
    env->last = env->typed;
    c_reset(env);
}

/* Shows the password, the present attempt, and the last one, with its right bits in green. */
static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 330, LEFT = 40 };
    float cell = (float)(WIDTH - 2 * LEFT) / (float)env->length, side = minf(cell * 0.8f, 84);
    draw_begin(WIDTH, HEIGHT, "password");
    for (int row = 0; row < 3; row++) {
        for (int i = 0; i < env->length; i++) {
            int bits = row == 0 ? env->password : row == 1 ? env->typed : env->last;
            int bit = bits >> i & 1;
            bool known = row == 0 || (row == 1 ? i < env->tick : env->last >= 0);
            bool right = bit == (env->password >> i & 1);
            Color color = row == 0 ? DRAW_GOLD : right ? DRAW_GREEN : DRAW_RED;
            float x = LEFT + cell * ((float)i + 0.5f), y = 60 + 105 * (float)row;
            DrawRectangleRec((Rectangle){x - side / 2, y - side / 2, side, side},
                             known ? color : DRAW_PANEL);
            if (known)
                draw_text_centred(bit ? "1" : "0", (int)x, (int)y, (int)(side * 0.6f),
                                  DRAW_BACKGROUND);
        }
    }
    draw_end();
}
