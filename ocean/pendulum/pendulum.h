/* Pendulum: a motor swings a rod up and holds it upright, but is too weak to lift it at once. The
 * equations are those of Gymnasium's Pendulum-v1. The reward is -(angle^2 + 0.1 velocity^2 + 0.001
 * torque^2) of the state before the step. Angle 0 is upright. Only time ends an episode: it is
 * truncated after max_steps.
 * Observation: cosine and sine of the angle, and the angular velocity (rad/s).
 * Action: the torque, -1..1 of max_torque. With continuous off: one of five torques from
 * -max_torque to max_torque. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(bool, continuous, true, "a torque in -1..1 of max_torque instead of one of five") \
    X(int, max_steps, 200, "steps after which the episode is truncated") \
    X(float, reward_scale, 1.0, \
      "factor of the rewards that the agent gets; the log keeps the true ones") \
    X(float, gravity, 10.0, "m/s^2") \
    X(float, mass, 1.0, "kg") \
    X(float, length, 1.0, "m") \
    X(float, max_torque, 2.0, "N m") \
    X(float, max_speed, 8.0, "rad/s, at which the velocity is cut") \
    X(float, tau, 0.05, "seconds between two steps")
#define FPS 20
#include "env.h"
#include "draw.h"

enum { TORQUES = 5 };

struct Env {
    ENV_COMMON
    float theta, velocity; /* theta in -pi..pi, 0 upright */
    float torque;          /* the last one, shown by c_render */
    float total;
    float worst; /* the least reward of a step */
    int tick;
};

static const char* c_init(Env* env) {
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (!(env->mass > 0 && env->length > 0 && env->tau > 0))
        return "mass, length and tau must be above 0";
    if (!(env->max_speed > 0 && env->max_torque > 0))
        return "max_speed and max_torque must be above 0";
    if (!(env->max_speed * env->tau < (float)M_PI))
        return "max_speed * tau must be less than half a turn";
    env->worst = (float)(M_PI * M_PI) + 0.1f * env->max_speed * env->max_speed +
                 0.001f * env->max_torque * env->max_torque;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    float bound = maxf(env->max_speed, 1);
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {3},
        .observation_low = -bound,
        .observation_high = bound,
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = TORQUES;
}

static void write_observation(const Env* env, float* observation) {
    observation[0] = cosf(env->theta);
    observation[1] = sinf(env->theta);
    observation[2] = env->velocity;
}

static void c_reset(Env* env) {
    env->theta = random_float(&env->rng, (float)-M_PI, (float)M_PI);
    env->velocity = random_float(&env->rng, -1, 1);
    env->torque = env->total = 0;
    env->tick = 0;
    write_observation(env, env->observations);
}

/* perf is 1 if no reward is lost, and 0 if each step loses as much as the bottom at full speed. */
static void c_step(Env* env) {
    float push = env->continuous ? clampf(env->continuous_actions[0], -1, 1)
                                 : (float)(2 * env->actions[0]) / (TORQUES - 1) - 1;
    env->torque = env->max_torque * push;
    float cost = env->theta * env->theta + 0.1f * env->velocity * env->velocity +
                 0.001f * env->torque * env->torque;
    float acceleration = 1.5f * env->gravity / env->length * sinf(env->theta) +
                         3 / (env->mass * env->length * env->length) * env->torque;
    env->velocity =
        clampf(env->velocity + acceleration * env->tau, -env->max_speed, env->max_speed);
    env->theta += env->velocity * env->tau;
    if (env->theta > (float)M_PI) env->theta -= (float)(2 * M_PI);
    if (env->theta < (float)-M_PI) env->theta += (float)(2 * M_PI);
    env->tick++;
    env->total -= cost;
    bool late = env->tick >= env->max_steps;
    env->rewards[0] = -cost * env->reward_scale;
    env->terminals[0] = 0;
    env->truncations[0] = late;
    if (!late) {
        write_observation(env, env->observations);
        return;
    }
    if (env->final_observations) write_observation(env, env->final_observations);
    LOG_EPISODE(env, clampf(1 + env->total / (env->worst * (float)env->tick), 0, 1), env->total,
                env->total, env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { SIDE = 560, MIDDLE = SIDE / 2, ROD = 200 };
    Vector2 pivot = {MIDDLE, MIDDLE};
    Vector2 tip = {MIDDLE - ROD * sinf(env->theta), MIDDLE - ROD * cosf(env->theta)};
    float share = env->torque / env->max_torque;
    draw_begin(SIDE, SIDE, "pendulum");
    DrawCircleV(pivot, ROD + 46, DRAW_PANEL);
    DrawCircleV(pivot, ROD + 40, DRAW_BACKGROUND);
    DrawRectangle(MIDDLE - 2, 20, 4, 30, DRAW_GREEN);
    /* The torque is an arc from the top, to the side to which it turns. */
    if (share > 0) DrawRing(pivot, ROD + 20, ROD + 30, 270 - 90 * share, 270, 32, DRAW_RED);
    if (share < 0) DrawRing(pivot, ROD + 20, ROD + 30, 270, 270 - 90 * share, 32, DRAW_RED);
    DrawLineEx(pivot, tip, 22, DRAW_GOLD);
    DrawCircleV(tip, 11, DRAW_GOLD);
    DrawCircleV(pivot, 11, DRAW_GOLD);
    DrawCircleV(pivot, 6, DRAW_BACKGROUND);
    draw_end();
}
