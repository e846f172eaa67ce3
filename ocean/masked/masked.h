/* Masked: each step shows what each action is worth. Half of the actions, drawn again, are illegal,
 * and only the action mask says which. A legal action pays its worth. An illegal one pays -1 and
 * ends the episode. So does the last of `length` steps, without the -1. A trainer that forgets the
 * mask in the rollout ends its episodes at once. One that forgets it in the update learns from
 * wrong probabilities.
 * Observation: the worth of each action, 0..1.
 * perf is the episode's reward over that of the best legal actions in all `length` steps, at least
 * 0. */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(illegal)
#define SETTINGS(X) \
    X(int, choices, 8, "actions, of which half are legal") \
    X(int, length, 32, "steps of an episode")
#define HAS_ACTION_MASKS
#define BY_TURNS
#define KEYS DIGIT_KEYS
#include "env.h"
#include "draw.h"

enum { MAX_CHOICES = 64 };

struct Env {
    ENV_COMMON
    float worth[MAX_CHOICES];
    bool legal[MAX_CHOICES];
    int tick, last; /* last: the last action, -1 at first */
    float total, best; /* rewards of the episode, and those of the best legal actions so far */
};

static const char* c_init(Env* env) {
    if (env->choices < 2 || env->choices > MAX_CHOICES) return "choices must lie within 2..64";
    if (env->length < 1) return "length must be 1 or more";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {env->choices},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {env->choices},
    };
}

/* Draws worths and legal actions. The chance of each action makes exactly half of them legal. */
static void draw_hand(Env* env) {
    int wanted = (env->choices + 1) / 2;
    for (int i = 0; i < env->choices; i++) {
        env->worth[i] = env->observations[i] = random_float(&env->rng, 0, 1);
        env->legal[i] = random_int(&env->rng, env->choices - i) < wanted;
        wanted -= env->legal[i];
        if (env->action_masks) env->action_masks[i] = env->legal[i];
    }
}

static void c_reset(Env* env) {
    env->tick = 0;
    env->last = -1;
    env->total = env->best = 0;
    draw_hand(env);
}

static void c_step(Env* env) {
    int action = env->actions[0];
    float best = 0;
    for (int i = 0; i < env->choices; i++)
        if (env->legal[i]) best = maxf(best, env->worth[i]);
    bool legal = env->legal[action];
    env->tick++;
    env->last = action;
    env->best += best;
    env->rewards[0] = legal ? env->worth[action] : -1;
    env->total += env->rewards[0];
    bool over = !legal || env->tick == env->length;
    env->terminals[0] = over;
    env->truncations[0] = 0;
    if (!over) {
        draw_hand(env);
        return;
    }
    /* The final observation is the last hand, because no other follows. */
    if (WANTS_FINAL(env, false))
        memcpy(env->final_observations, env->worth, sizeof(float) * (size_t)env->choices);
    /* The steps that an illegal action cost count as much as those before it. */
    float possible = env->best * (float)env->length / (float)env->tick;
    LOG_EPISODE(env, possible > 0 ? maxf(env->total / possible, 0) : 1, env->total, env->total,
                env->tick);
    env->log.illegal += !legal;
    c_reset(env);
}

/* A column for each action, as high as its worth: gold is legal, grey is not. The bar shows the
 * time. */
static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 380, LEFT = 40, BOTTOM = 300, TALL = 250 };
    float width = (float)(WIDTH - 2 * LEFT) / (float)env->choices;
    draw_begin(WIDTH, HEIGHT, "masked");
    for (int i = 0; i < env->choices; i++) {
        float x = LEFT + width * (float)i + width * 0.1f, high = TALL * env->worth[i];
        DrawRectangleRec((Rectangle){x, BOTTOM - TALL, width * 0.8f, TALL}, DRAW_PANEL);
        DrawRectangleRec((Rectangle){x, BOTTOM - high, width * 0.8f, high},
                         env->legal[i] ? DRAW_GOLD : DRAW_GREY);
        if (!env->legal[i]) DrawRectangleRec((Rectangle){x, BOTTOM + 6, width * 0.8f, 8}, DRAW_RED);
        if (i == env->last)
            DrawRectangleRec((Rectangle){x, BOTTOM + 20, width * 0.8f, 8}, DRAW_CYAN);
    }
    DrawRectangle(LEFT, 345, WIDTH - 2 * LEFT, 12, DRAW_PANEL);
    DrawRectangle(LEFT, 345, (int)((int64_t)(WIDTH - 2 * LEFT) * env->tick / env->length), 12,
                  DRAW_GREEN);
    draw_end();
}
