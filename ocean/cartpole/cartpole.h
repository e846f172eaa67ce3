/* Cartpole: balance a pole on a cart (Barto, Sutton and Anderson 1983). The equations, limits and
 * the explicit Euler step are those of Gymnasium's CartPole-v1. The reward is reward_scale on every
 * step. The episode terminates if the cart leaves the track or the pole leans too far. After
 * max_steps it is truncated.
 * Observation: position (m) and velocity of the cart, angle (rad) and angular velocity of the pole.
 * Actions: push left, push right. With continuous: one force in -1..1 of force_mag. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(bool, continuous, false, \
      "push with a force in -1..1 of force_mag instead of all of it left or right") \
    X(int, max_steps, 500, "steps after which the episode is truncated") \
    X(float, gravity, 9.8, "m/s^2") \
    X(float, masscart, 1.0, "kg") \
    X(float, masspole, 0.1, "kg") \
    X(float, length, 0.5, "half the length of the pole, m") \
    X(float, force_mag, 10.0, "force of a push, N") \
    X(float, tau, 0.02, "seconds between two steps") \
    X(float, x_threshold, 2.4, "half the length of the track, m") \
    X(float, theta_threshold, 12.0, "largest angle of the pole, degrees") \
    X(float, reward_scale, 1.0, \
      "factor of the rewards that the agent gets; the log keeps the true ones")
#define FPS 25
#define KEYS(KEY) KEY(0, RIGHT, 1)
#include "env.h"
#include "draw.h"

struct Env {
    ENV_COMMON
    float x, x_velocity, theta, theta_velocity;
    float theta_limit; /* theta_threshold in radians */
    int tick;
};

static const char* c_init(Env* env) {
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (!(env->masscart > 0 && env->masspole > 0 && env->length > 0))
        return "masscart, masspole and length must be above 0";
    if (!(env->tau > 0 && env->x_threshold > 0.05f))
        return "tau must be above 0 and x_threshold above 0.05";
    if (!(env->theta_threshold > 3 && env->theta_threshold <= 90))
        return "theta_threshold must lie within 3..90";
    env->theta_limit = env->theta_threshold * (float)(M_PI / 180);
    return NULL;
}

/* The velocities have no bound, as in Gymnasium, and the bounds hold for all four numbers. */
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {4},
        .observation_low = -INFINITY,
        .observation_high = INFINITY,
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = 2;
}

static void write_observation(const Env* env, float* observation) {
    observation[0] = env->x;
    observation[1] = env->x_velocity;
    observation[2] = env->theta;
    observation[3] = env->theta_velocity;
}

static void c_reset(Env* env) {
    env->x = random_float(&env->rng, -0.05f, 0.05f);
    env->x_velocity = random_float(&env->rng, -0.05f, 0.05f);
    env->theta = random_float(&env->rng, -0.05f, 0.05f);
    env->theta_velocity = random_float(&env->rng, -0.05f, 0.05f);
    env->tick = 0;
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    float force = env->force_mag * (env->continuous ? clampf(env->continuous_actions[0], -1, 1)
                                    : env->actions[0] == 1 ? 1.0f : -1.0f);
    float mass = env->masscart + env->masspole, pole = env->masspole * env->length;
    float sine = sinf(env->theta), cosine = cosf(env->theta);
    float push = (force + pole * env->theta_velocity * env->theta_velocity * sine) / mass;
    float theta_acceleration =
        (env->gravity * sine - cosine * push) /
        (env->length * (4.0f / 3.0f - env->masspole * cosine * cosine / mass));
    float x_acceleration = push - pole * theta_acceleration * cosine / mass;

    env->x += env->tau * env->x_velocity;
    env->x_velocity += env->tau * x_acceleration;
    env->theta += env->tau * env->theta_velocity;
    env->theta_velocity += env->tau * theta_acceleration;
    env->tick++;

    /* Written with "not", so that a NaN ends the episode too. */
    bool fell = !(fabsf(env->x) <= env->x_threshold && fabsf(env->theta) <= env->theta_limit);
    bool late = !fell && env->tick >= env->max_steps;
    env->rewards[0] = env->reward_scale;
    env->terminals[0] = fell;
    env->truncations[0] = late;
    if (!fell && !late) {
        write_observation(env, env->observations);
        return;
    }
    /* The pole is still upright, so the trainer values this observation. */
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, (float)env->tick / (float)env->max_steps, env->tick, env->tick, env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 360, TRACK = 270, CART_WIDTH = 84, CART_HEIGHT = 40 };
    /* pixels a metre */
    float scale = minf(WIDTH * 0.46f / env->x_threshold, 225 / (2 * env->length));
    float x = WIDTH / 2 + env->x * scale, pole = 2 * env->length * scale, top = TRACK - CART_HEIGHT;
    Vector2 pivot = {x, top + 6};
    Vector2 tip = {x + pole * sinf(env->theta), top + 6 - pole * cosf(env->theta)};
    draw_begin(WIDTH, HEIGHT, "cartpole");
    DrawRectangle(0, TRACK, WIDTH, HEIGHT - TRACK, DRAW_PANEL);
    DrawRectangle(0, TRACK, WIDTH, 3, DRAW_GREY);
    DrawRectangle(0, TRACK + 40, (int)(WIDTH * (float)env->tick / (float)env->max_steps), 6,
                  DRAW_GREEN);
    DrawRectangle((int)x - CART_WIDTH / 2, (int)top, CART_WIDTH, CART_HEIGHT - 6, DRAW_CYAN);
    DrawCircleV((Vector2){x - CART_WIDTH / 3, TRACK - 8}, 8, DRAW_GREY);
    DrawCircleV((Vector2){x + CART_WIDTH / 3, TRACK - 8}, 8, DRAW_GREY);
    DrawLineEx(pivot, tip, 12, DRAW_GOLD);
    DrawCircleV(tip, 6, DRAW_GOLD);
    DrawCircleV(pivot, 6, DRAW_GREY);
    draw_end();
}
