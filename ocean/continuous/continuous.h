/* Continuous: a point flies to a goal in a box of -1..1 in every dimension. The action is its
 * velocity, one number for each dimension, cut to -1..1. A step moves it by speed times that. Walls
 * stop it. The reward is how much nearer it came, plus 1 within `radius` of the goal, which ends
 * the episode. After max_steps the episode is truncated.
 * Observation: the point's position, then half the way to the goal.
 * perf is the share of episodes that reach the goal. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, dims, 2, "dimensions of the box, and of an action") \
    X(int, max_steps, 40, "steps after which an episode is truncated") \
    X(float, speed, 0.1, "distance of one step in one dimension at full speed") \
    X(float, radius, 0.1, "distance at which the goal is reached")
#include "env.h"
#include "draw.h"

enum { MAX_BOX = 16 };

struct Env {
    ENV_COMMON
    float position[MAX_BOX], goal[MAX_BOX];
    float start[MAX_BOX]; /* for c_render */
    float total;          /* reward of the episode */
    int tick;
};

static const char* c_init(Env* env) {
    if (env->dims < 1 || env->dims > MAX_BOX) return "dims must lie within 1..16";
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (!(env->speed > 0 && env->radius > 0 && env->radius < 1))
        return "speed must be above 0, radius within 0..1";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {2 * env->dims},
        .observation_low = -1,
        .observation_high = 1,
        .action_dims = env->dims,
    };
}

static void write_observation(const Env* env, float* observation) {
    for (int i = 0; i < env->dims; i++) {
        observation[i] = env->position[i];
        observation[env->dims + i] = (env->goal[i] - env->position[i]) / 2;
    }
}

static float distance(const Env* env) {
    float sum = 0;
    for (int i = 0; i < env->dims; i++)
        sum += (env->goal[i] - env->position[i]) * (env->goal[i] - env->position[i]);
    return sqrtf(sum);
}

static void c_reset(Env* env) {
    env->tick = 0;
    env->total = 0;
    for (int i = 0; i < env->dims; i++) {
        env->position[i] = env->start[i] = random_float(&env->rng, -1, 1);
        env->goal[i] = random_float(&env->rng, -1, 1);
    }
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    float before = distance(env);
    for (int i = 0; i < env->dims; i++)
        env->position[i] = clampf(
            env->position[i] + env->speed * clampf(env->continuous_actions[i], -1, 1), -1, 1);
    float after = distance(env);
    env->tick++;
    bool there = after <= env->radius, late = !there && env->tick >= env->max_steps;
    env->rewards[0] = before - after + (float)there;
    env->terminals[0] = there;
    env->truncations[0] = late;
    env->total += env->rewards[0];
    if (!there && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, there, env->total, env->total, env->tick);
    c_reset(env);
}

/* Shows the first two dimensions. If there is only one, the point flies along the middle. */
static void c_render(Env* env) {
    enum { SIDE = 640, EDGE = 20 };
    float half = SIDE / 2 - EDGE, middle = SIDE / 2;
    bool flat = env->dims == 1;
    Vector2 goal = {middle + half * env->goal[0], middle + (flat ? 0 : half * env->goal[1])};
    Vector2 point = {middle + half * env->position[0],
                     middle + (flat ? 0 : half * env->position[1])};
    Vector2 start = {middle + half * env->start[0], middle + (flat ? 0 : half * env->start[1])};
    draw_begin(SIDE, SIDE, "continuous");
    DrawRectangle(EDGE, EDGE, SIDE - 2 * EDGE, SIDE - 2 * EDGE, DRAW_PANEL);
    DrawCircleV(goal, half * env->radius, (Color){92, 84, 50, 255});
    DrawCircleV(goal, 6, DRAW_GOLD);
    DrawLineEx(start, point, 3, DRAW_GREY);
    DrawCircleV(start, 5, DRAW_GREY);
    DrawCircleV(point, 11, DRAW_CYAN);
    draw_end();
}
