/* Acrobot: two links hang from a pivot, and a motor drives the joint between them. The task is to
 * swing the tip above a line, one link's length over the pivot (Sutton 1996). The equations, limits
 * and the fourth-order Runge-Kutta step are those of Gymnasium's Acrobot-v1. The reward is -1 a
 * step. The step that reaches the line gives 0 and ends the episode. After max_steps the episode is
 * truncated.
 *
 *     observation
 *     0, 1     cosine and sine of the first link's angle; at angle 0 it hangs down
 *     2, 3     cosine and sine of the second link's angle to the first
 *     4, 5     the two angular velocities, rad/s
 *
 * Actions: torque -1, 0, 1. With continuous: one torque in -1..1. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(bool, continuous, false, "a torque in -1..1 instead of -1, 0 or 1") \
    X(int, max_steps, 500, "steps after which the episode is truncated") \
    X(float, reward_scale, 1.0, \
      "factor of the rewards that the agent gets; the log keeps the true ones") \
    X(float, gravity, 9.8, "m/s^2") \
    X(float, length_1, 1.0, \
      "of the first link, m; the goal counts both links as 1 long, as Gymnasium's") \
    X(float, mass_1, 1.0, "of the first link, kg") \
    X(float, mass_2, 1.0, "of the second link, kg") \
    X(float, centre_1, 0.5, "from the pivot to the first link's centre of mass, m") \
    X(float, centre_2, 0.5, "from the joint to the second link's centre of mass, m") \
    X(float, inertia, 1.0, "of each link, kg m^2") \
    X(float, max_velocity_1, 12.566370614359172, "rad/s") \
    X(float, max_velocity_2, 28.274333882308138, "rad/s") \
    X(float, tau, 0.2, "seconds between two steps")
#define FPS 10
#define KEYS(KEY) KEY(0, REST, 1) KEY(0, LEFT, 0) KEY(0, RIGHT, 2)
#include "env.h"
#include "draw.h"

enum { SIZE = 4 };
typedef struct { float at[SIZE]; } State; /* both angles, both velocities */

struct Env {
    ENV_COMMON
    State state;
    float torque;
    int tick;
};

static const char* c_init(Env* env) {
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (!(env->mass_1 > 0 && env->mass_2 > 0 && env->length_1 > 0 && env->inertia > 0))
        return "masses, length_1 and inertia must be above 0";
    if (!(env->centre_1 > 0 && env->centre_2 > 0)) return "centre_1 and centre_2 must be above 0";
    if (!(env->tau > 0 && env->tau <= 1)) return "tau must lie within 0..1";
    if (!(env->max_velocity_1 > 0 && env->max_velocity_2 > 0))
        return "max_velocity_1 and _2 must be above 0";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    float bound = maxf(maxf(env->max_velocity_1, env->max_velocity_2), 1);
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {6},
        .observation_low = -bound,
        .observation_high = bound,
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = 3;
}

static void write_observation(const Env* env, float* observation) {
    const float* at = env->state.at;
    observation[0] = cosf(at[0]);
    observation[1] = sinf(at[0]);
    observation[2] = cosf(at[1]);
    observation[3] = sinf(at[1]);
    observation[4] = at[2];
    observation[5] = at[3];
}

static void c_reset(Env* env) {
    for (int i = 0; i < SIZE; i++)
        env->state.at[i] = random_float(&env->rng, -0.1f, 0.1f);
    env->torque = 0;
    env->tick = 0;
    write_observation(env, env->observations);
}

/* The equations are those of Sutton and Barto's book. The paper of 1996 lacks the term with
 * velocity_1^2. */
static State derivative(const Env* env, State s) {
    float m1 = env->mass_1, m2 = env->mass_2, l1 = env->length_1, c1 = env->centre_1;
    float c2 = env->centre_2;
    float sine = sinf(s.at[1]), cosine = cosf(s.at[1]), g = env->gravity;
    float d1 = m1 * c1 * c1 + m2 * (l1 * l1 + c2 * c2 + 2 * l1 * c2 * cosine) + 2 * env->inertia;
    float d2 = m2 * (c2 * c2 + l1 * c2 * cosine) + env->inertia;
    float phi2 = m2 * c2 * g * sinf(s.at[0] + s.at[1]); /* cos(x - pi/2) = sin(x) */
    float phi1 = -m2 * l1 * c2 * s.at[3] * s.at[3] * sine -
                 2 * m2 * l1 * c2 * s.at[3] * s.at[2] * sine +
                 (m1 * c1 + m2 * l1) * g * sinf(s.at[0]) + phi2;
    float second = (env->torque + d2 / d1 * phi1 - m2 * l1 * c2 * s.at[2] * s.at[2] * sine - phi2) /
                   (m2 * c2 * c2 + env->inertia - d2 * d2 / d1);
    return (State){{s.at[2], s.at[3], -(d2 * second + phi1) / d1, second}};
}

static State move(State s, State slope, float time) {
    for (int i = 0; i < SIZE; i++)
        s.at[i] += time * slope.at[i];
    return s;
}

static float wrap(float angle) {
    return angle - (float)(2 * M_PI) * rintf(angle / (float)(2 * M_PI));
}

static void c_step(Env* env) {
    env->torque =
        env->continuous ? clampf(env->continuous_actions[0], -1, 1) : (float)(env->actions[0] - 1);
    State s = env->state;
    State k1 = derivative(env, s), k2 = derivative(env, move(s, k1, env->tau / 2));
    State k3 = derivative(env, move(s, k2, env->tau / 2)),
          k4 = derivative(env, move(s, k3, env->tau));
    for (int i = 0; i < SIZE; i++)
        s.at[i] += env->tau / 6 * (k1.at[i] + 2 * k2.at[i] + 2 * k3.at[i] + k4.at[i]);
    s.at[0] = wrap(s.at[0]);
    s.at[1] = wrap(s.at[1]);
    s.at[2] = clampf(s.at[2], -env->max_velocity_1, env->max_velocity_1);
    s.at[3] = clampf(s.at[3], -env->max_velocity_2, env->max_velocity_2);
    env->state = s;
    env->tick++;

    bool there = -cosf(s.at[0]) - cosf(s.at[0] + s.at[1]) > 1;
    bool late = !there && env->tick >= env->max_steps;
    env->rewards[0] = there ? 0 : -env->reward_scale;
    env->terminals[0] = there;
    env->truncations[0] = late;
    if (!there && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    float score = (float)(there - env->tick);
    LOG_EPISODE(env, 1 - (float)(env->tick - there) / (float)env->max_steps, score, score,
                env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { SIDE = 600, MIDDLE = SIDE / 2, LINK = 125 };
    float first = env->state.at[0], second = first + env->state.at[1];
    Vector2 pivot = {MIDDLE, MIDDLE};
    Vector2 joint = {pivot.x + LINK * sinf(first), pivot.y + LINK * cosf(first)};
    Vector2 tip = {joint.x + LINK * sinf(second), joint.y + LINK * cosf(second)};
    draw_begin(SIDE, SIDE, "acrobot");
    DrawRectangle(0, 0, SIDE, MIDDLE - LINK, (Color){20, 44, 44, 255});
    DrawRectangle(0, MIDDLE - LINK - 1, SIDE, 3, DRAW_GREEN);
    DrawLineEx(pivot, joint, 22, DRAW_CYAN);
    DrawCircleV(joint, 11, DRAW_CYAN);
    DrawLineEx(joint, tip, 22, DRAW_GOLD);
    DrawCircleV(tip, 11, DRAW_GOLD);
    DrawCircleV(pivot, 13, DRAW_GREY);
    DrawCircleV(joint, 10, env->torque == 0 ? DRAW_GREY : DRAW_RED);
    draw_end();
}
