/* Memory: the first step shows a cue. The agent must name it `length` steps later, when it sees
 * only a bell. All observations in between are the same, so only the agent's own state can carry
 * the cue. A policy without memory guesses and has a perf of 1 / cues.
 * Observation: the cue, one-hot, on the first step, else zeros; then the bell, 1 on the step whose
 * action is the answer. Earlier actions have no effect.
 * Reward: 1 for the right answer, -1 for a wrong one. Both end the episode. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, length, 16, "steps from the cue to the answer") \
    X(int, cues, 2, "different cues")
#define BY_TURNS
#define KEYS DIGIT_KEYS
#include "env.h"
#include "draw.h"

enum { MAX_CUES = 64 };

struct Env {
    ENV_COMMON
    int cue, tick;
    int answer, answered_cue; /* of the last episode, for c_render; answer is -1 before the first */
};

static const char* c_init(Env* env) {
    if (env->length < 1) return "length must be 1 or more";
    if (env->cues < 2 || env->cues > MAX_CUES) return "cues must lie within 2..64";
    env->answer = -1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {env->cues + 1},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {env->cues},
    };
}

static void write_observation(const Env* env, float* observation) {
    for (int i = 0; i < env->cues; i++)
        observation[i] = env->tick == 0 && i == env->cue;
    observation[env->cues] = env->tick == env->length;
}

static void c_reset(Env* env) {
    env->tick = 0;
    env->cue = random_int(&env->rng, env->cues);
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    env->terminals[0] = 0;
    env->truncations[0] = 0;
    env->rewards[0] = 0;
    if (env->tick < env->length) {
        env->tick++;
        write_observation(env, env->observations);
        return;
    }
    /* as before the answer */
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    env->answer = env->actions[0];
    env->answered_cue = env->cue;
    bool right = env->answer == env->cue;
    env->rewards[0] = right ? 1 : -1;
    env->terminals[0] = 1;
    LOG_EPISODE(env, right, right, env->rewards[0], (float)(env->length + 1));
    c_reset(env);
}

/* A lamp for each cue; the cue's is lit. Below are the time until the bell and the last answer
 * (green if right). */
static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 300, LEFT = 40, BAR = 190 };
    float lamp = (float)(WIDTH - 2 * LEFT) / (float)env->cues, radius = minf(lamp * 0.36f, 60);
    draw_begin(WIDTH, HEIGHT, "memory");
    for (int i = 0; i < env->cues; i++) {
        bool lit = env->tick == 0 && i == env->cue, answered = env->tick == 0 && i == env->answer;
        Vector2 centre = {LEFT + lamp * ((float)i + 0.5f), 95};
        if (answered)
            DrawCircleV(centre, radius + 8,
                        env->answer == env->answered_cue ? DRAW_GREEN : DRAW_RED);
        if (answered) DrawCircleV(centre, radius + 3, DRAW_BACKGROUND);
        DrawCircleV(centre, radius, lit ? DRAW_GOLD : DRAW_PANEL);
    }
    int width = (int)((int64_t)(WIDTH - 2 * LEFT) * env->tick / env->length);
    DrawRectangle(LEFT, BAR, WIDTH - 2 * LEFT, 14, DRAW_PANEL);
    DrawRectangle(LEFT, BAR, width, 14, DRAW_CYAN);
    const char* text = env->tick == 0 ? "remember" : env->tick == env->length ? "answer!" : "wait";
    DrawText(text, (WIDTH - MeasureText(text, 40)) / 2, 230, 40,
             env->tick == env->length ? DRAW_GOLD : DRAW_GREY);
    draw_end();
}
