/* Multiagent: each agent has to name its own index. An episode is one step. The reward is 1 for the
 * right name, else 0. An agent that gets another one's observation, action or reward cannot learn
 * this.
 * Observation: the agent's index, one-hot.
 * Actions: a name. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) X(int, num_agents, 2, "agents, and names")
#include "env.h"
#include "draw.h"

enum { MAX_AGENTS = 64 };

struct Env {
    ENV_COMMON
    int named[MAX_AGENTS]; /* in the last episode, for c_render; -1 before the first */
};

static const char* c_init(Env* env) {
    if (env->num_agents < 2 || env->num_agents > MAX_AGENTS)
        return "num_agents must lie within 2..64";
    for (int i = 0; i < MAX_AGENTS; i++)
        env->named[i] = -1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {env->num_agents},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {env->num_agents},
    };
}

static void c_reset(Env* env) {
    for (int i = 0; i < env->num_agents; i++)
        for (int k = 0; k < env->num_agents; k++)
            env->observations[i * env->num_agents + k] = i == k;
}

/* Each agent's episode counts in the log. */
static void c_step(Env* env) {
    for (int i = 0; i < env->num_agents; i++) {
        bool right = env->actions[i] == i;
        env->named[i] = env->actions[i];
        env->rewards[i] = right;
        env->terminals[i] = 1;
        env->truncations[i] = 0;
        LOG_EPISODE(env, right, right, right, 1);
    }
    for (int i = 0; WANTS_FINAL(env, false) && i < env->num_agents; i++)
        for (int k = 0; k < env->num_agents; k++)
            env->final_observations[i * env->num_agents + k] = i == k;
    c_reset(env);
}

/* A row for each agent, a column for each name. The diagonal is right. */
static void c_render(Env* env) {
    enum { SIDE = 560, EDGE = 30 };
    float cell = (float)(SIDE - 2 * EDGE) / (float)env->num_agents;
    draw_begin(SIDE, SIDE, "multiagent");
    for (int i = 0; i < env->num_agents; i++) {
        for (int k = 0; k < env->num_agents; k++) {
            Rectangle box = {EDGE + cell * (float)k + cell * 0.04f,
                             EDGE + cell * (float)i + cell * 0.04f, cell * 0.92f, cell * 0.92f};
            DrawRectangleRec(box, i == k ? (Color){34, 66, 62, 255} : DRAW_PANEL);
            Vector2 centre = {box.x + box.width / 2, box.y + box.height / 2};
            if (env->named[i] == k)
                DrawCircleV(centre, cell * 0.3f, i == k ? DRAW_GREEN : DRAW_RED);
        }
    }
    draw_end();
}
