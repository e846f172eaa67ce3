/* Double pendulum: two poles, one on the other, balanced by a cart below them. Masses, lengths,
 * reward and limits are those of Gymnasium's InvertedDoublePendulum-v5. The poles are thin rods.
 * Fourth-order Runge-Kutta steps integrate Lagrange's equations of motion. The episode terminates
 * if the tip falls to height 1 or below (upright it is 1.2), or if the cart leaves its track. After
 * max_steps it is truncated. The reward is 10 while the poles stand, less
 *     0.01 x^2 + (y - 2)^2 of the tip, with heights as if the poles were 0.6 m for any `length`,
 *     and 0.001 and 0.005 times the squared angular velocities.
 *
 *     observation
 *     0        position of the cart, m
 *     1, 2     sine of the lower pole's angle, and of the upper's to the lower
 *     3, 4     their cosines
 *     5 .. 7   velocity of the cart, m/s, and of the two angles, rad/s, cut at +-10
 *
 * Action: the force on the cart, -1..1 of force_mag. With continuous off: one of five forces. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(bool, continuous, true, "a force in -1..1 of force_mag instead of one of five") \
    X(int, max_steps, 1000, "steps after which the episode is truncated") \
    X(int, substeps, 2, "Runge-Kutta steps between two steps") \
    X(float, reward_scale, 1.0, \
      "factor of the rewards that the agent gets; the log keeps the true ones") \
    X(float, gravity, 9.81, "m/s^2") \
    X(float, mass_cart, 10.47, "kg") \
    X(float, mass_pole, 4.2, "of each pole, kg") \
    X(float, length, 0.6, "of each pole, m") \
    X(float, force_mag, 500.0, "N") \
    X(float, damping, 0.05, "of the track, N s/m, and of each joint, N m s") \
    X(float, tau, 0.05, "seconds between two steps") \
    X(float, track, 1.0, "half the length of the track, m")
#define FPS 20
#include "env.h"
#include "draw.h"

enum { SIZE = 6, FORCES = 5 };
typedef struct { float at[SIZE]; } State; /* x, both angles from the vertical, their velocities */

struct Env {
    ENV_COMMON
    State state;
    float force, total;
    int tick;
};

static const char* c_init(Env* env) {
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (env->substeps < 1 || env->substeps > 64) return "substeps must lie within 1..64";
    if (!(env->mass_cart > 0 && env->mass_pole > 0 && env->length > 0))
        return "masses and length must be above 0";
    if (!(env->damping >= 0)) return "damping must be 0 or more";
    if (!(env->tau > 0 && env->track > 0.2f)) return "tau must be above 0, track above 0.2";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    float bound = maxf(env->track, 10);
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {8},
        .observation_low = -bound,
        .observation_high = bound,
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = FORCES;
}

static void write_observation(const Env* env, float* observation) {
    const float* at = env->state.at;
    observation[0] = clampf(at[0], -env->track, env->track);
    observation[1] = sinf(at[1]);
    observation[2] = sinf(at[2] - at[1]);
    observation[3] = cosf(at[1]);
    observation[4] = cosf(at[2] - at[1]);
    observation[5] = clampf(at[3], -10, 10);
    observation[6] = clampf(at[4], -10, 10);
    observation[7] = clampf(at[5] - at[4], -10, 10);
}

static void c_reset(Env* env) {
    float noise[3];
    for (int i = 0; i < 3; i++)
        noise[i] = random_float(&env->rng, -0.1f, 0.1f);
    env->state = (State){{noise[0], noise[1], noise[1] + noise[2]}};
    for (int i = 0; i < 3; i++)
        noise[i] = 0.1f * random_normal(&env->rng);
    env->state.at[3] = noise[0];
    env->state.at[4] = noise[1];
    env->state.at[5] = noise[1] + noise[2];
    env->force = env->total = 0;
    env->tick = 0;
    write_observation(env, env->observations);
}

/* Solves M(q) q'' = f by elimination, for q = (x, lower angle, upper angle) and a symmetric M. */
static State derivative(const Env* env, State s) {
    float m = env->mass_pole, l = env->length, w1 = s.at[4], w2 = s.at[5], b = env->damping;
    float sin1 = sinf(s.at[1]), cos1 = cosf(s.at[1]), sin2 = sinf(s.at[2]), cos2 = cosf(s.at[2]);
    /* of the difference */
    float sine = sin1 * cos2 - cos1 * sin2, cosine = cos1 * cos2 + sin1 * sin2;
    float m00 = env->mass_cart + 2 * m, m01 = 1.5f * m * l * cos1, m02 = 0.5f * m * l * cos2;
    float m11 = 4.0f / 3.0f * m * l * l, m12 = 0.5f * m * l * l * cosine, m22 = m * l * l / 3;
    float f0 =
        env->force - b * s.at[3] + 1.5f * m * l * sin1 * w1 * w1 + 0.5f * m * l * sin2 * w2 * w2;
    float f1 = 1.5f * m * env->gravity * l * sin1 - 0.5f * m * l * l * sine * w2 * w2 - b * w1 +
               b * (w2 - w1);
    float f2 =
        0.5f * m * env->gravity * l * sin2 + 0.5f * m * l * l * sine * w1 * w1 - b * (w2 - w1);
    float over = 1 / m22;
    m00 -= m02 * m02 * over;
    m01 -= m02 * m12 * over;
    m11 -= m12 * m12 * over;
    f0 -= m02 * f2 * over;
    f1 -= m12 * f2 * over;
    float a0 = (f0 * m11 - f1 * m01) / (m00 * m11 - m01 * m01), a1 = (f1 - m01 * a0) / m11;
    return (State){{s.at[3], w1, w2, a0, a1, (f2 - m02 * a0 - m12 * a1) * over}};
}

static State move(State s, State slope, float time) {
    for (int i = 0; i < SIZE; i++)
        s.at[i] += time * slope.at[i];
    return s;
}

static void c_step(Env* env) {
    env->force =
        env->force_mag * (env->continuous ? clampf(env->continuous_actions[0], -1, 1)
                                          : (float)(2 * env->actions[0]) / (FORCES - 1) - 1);
    State s = env->state;
    float time = env->tau / (float)env->substeps;
    for (int k = 0; k < env->substeps; k++) {
        State k1 = derivative(env, s), k2 = derivative(env, move(s, k1, time / 2));
        State k3 = derivative(env, move(s, k2, time / 2)), k4 = derivative(env, move(s, k3, time));
        for (int i = 0; i < SIZE; i++)
            s.at[i] += time / 6 * (k1.at[i] + 2 * k2.at[i] + 2 * k3.at[i] + k4.at[i]);
    }
    env->state = s;
    env->tick++;

    float l = env->length, x = s.at[0] + l * (sinf(s.at[1]) + sinf(s.at[2]));
    float y = 0.6f * (cosf(s.at[1]) + cosf(s.at[2]));
    /* written with "not", so that a NaN ends the episode too */
    bool fell = !(y > 1 && fabsf(s.at[0]) <= env->track);
    bool late = !fell && env->tick >= env->max_steps;
    float w1 = clampf(s.at[4], -10, 10), w2 = clampf(s.at[5] - s.at[4], -10, 10);
    y = clampf(y, -1.2f, 1.2f);
    x = clampf(x, -env->track - 2 * l, env->track + 2 * l);
    float reward = (fell ? 0.0f : 10.0f) - 0.01f * x * x - (y - 2) * (y - 2) - 1e-3f * w1 * w1 -
                   5e-3f * w2 * w2;
    env->rewards[0] = reward * env->reward_scale;
    env->terminals[0] = fell;
    env->truncations[0] = late;
    env->total += reward;
    if (!fell && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, (float)(env->tick - fell) / (float)env->max_steps, env->total, env->total,
                env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { WIDTH = 760, HEIGHT = 480, RAIL = 400, CART_WIDTH = 90, CART_HEIGHT = 36 };
    float scale = minf(WIDTH * 0.44f / env->track, 330 / (2 * env->length));
    float l = env->length * scale;
    const float* at = env->state.at;
    Vector2 pivot = {WIDTH / 2 + at[0] * scale, RAIL};
    Vector2 joint = {pivot.x + l * sinf(at[1]), pivot.y - l * cosf(at[1])};
    Vector2 tip = {joint.x + l * sinf(at[2]), joint.y - l * cosf(at[2])};
    float line = RAIL - l / 0.6f, reach = env->track * scale;
    draw_begin(WIDTH, HEIGHT, "double_pendulum");
    DrawRectangle(0, 0, WIDTH, (int)line, (Color){20, 44, 44, 255});
    DrawRectangle(0, (int)line, WIDTH, 2, DRAW_GREEN);
    DrawLineEx((Vector2){WIDTH / 2 - reach, RAIL}, (Vector2){WIDTH / 2 + reach, RAIL}, 6,
               DRAW_GREY);
    DrawRectangleRec(
        (Rectangle){pivot.x - CART_WIDTH / 2, RAIL - CART_HEIGHT / 2, CART_WIDTH, CART_HEIGHT},
        DRAW_CYAN);
    float push = 70 * env->force / env->force_mag;
    DrawLineEx((Vector2){pivot.x, RAIL + 40}, (Vector2){pivot.x + push, RAIL + 40}, 8, DRAW_RED);
    DrawLineEx(pivot, joint, 16, DRAW_GOLD);
    DrawLineEx(joint, tip, 16, DRAW_WHITE);
    DrawCircleV(joint, 9, DRAW_GOLD);
    DrawCircleV(tip, 8, DRAW_WHITE);
    DrawCircleV(pivot, 9, DRAW_GREY);
    draw_end();
}
