/* Mountain car: a car in a valley has an engine too weak for the slope and must swing up to the
 * flag (Moore 1990). The equations are those of Gymnasium's MountainCar-v0 and, with continuous, of
 * MountainCarContinuous-v0.
 *
 *                 actions             engine   goal   reward                        truncated after
 *     discrete    left, none, right   0.001    0.5    -1 a step                     200
 *     continuous  force in -1..1      0.0015   0.45   100 at the goal,              999
 *                                                     -0.1 force^2 a step
 *
 * The goal ends the episode.
 * Observation: position (-1.2..0.6) and velocity (-0.07..0.07). With `scaled` the velocity is times
 * 10, so that both have one scale. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(bool, continuous, false, "a force in -1..1 instead of left, none, right") \
    X(bool, scaled, false, "observe 10 times the velocity") \
    X(int, max_steps, 0, \
      "steps after which the episode is truncated; 0: 200 or, with continuous, 999") \
    X(float, power, 0.0, "of the engine; 0: 0.001 or, with continuous, 0.0015") \
    X(float, goal, 0.0, "position of the flag; 0: 0.5 or, with continuous, 0.45") \
    X(float, reward_scale, 1.0, \
      "factor of the rewards that the agent gets; the log keeps the true ones") \
    X(float, gravity, 0.0025, "of the slope") \
    X(float, max_speed, 0.07, "at which the velocity is cut")
#define KEYS(KEY) KEY(0, REST, 1) KEY(0, LEFT, 0) KEY(0, RIGHT, 2)
#include "env.h"
#include "draw.h"

#define LEFT -1.2f
#define RIGHT 0.6f

struct Env {
    ENV_COMMON
    float position, velocity, total;
    float force; /* the last one, shown by c_render */
    int tick;
};

static const char* c_init(Env* env) {
    if (env->max_steps < 0) return "max_steps must be 0 (the standard) or more";
    if (!(env->power >= 0 && env->max_speed > 0 && env->max_speed <= 0.1f))
        return "power must be 0 (the standard) or more, max_speed within 0..0.1";
    if (!(env->goal > -0.4f && env->goal <= RIGHT)) return "goal must lie within -0.4..0.6";
    if (env->max_steps == 0) env->max_steps = env->continuous ? 999 : 200;
    if (env->power == 0) env->power = env->continuous ? 0.0015f : 0.001f;
    if (env->goal == 0) env->goal = env->continuous ? 0.45f : 0.5f;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {2},
        .observation_low = LEFT,
        .observation_high = maxf(RIGHT, 10 * env->max_speed),
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = 3;
}

static void write_observation(const Env* env, float* observation) {
    observation[0] = env->position;
    observation[1] = env->velocity * (env->scaled ? 10 : 1);
}

static void c_reset(Env* env) {
    env->position = random_float(&env->rng, -0.6f, -0.4f);
    env->velocity = env->total = env->force = 0;
    env->tick = 0;
    write_observation(env, env->observations);
}

/* perf is the share of time left at the goal, 0 if the car never arrives. */
static void c_step(Env* env) {
    env->force =
        env->continuous ? clampf(env->continuous_actions[0], -1, 1) : (float)(env->actions[0] - 1);
    env->velocity += env->force * env->power - env->gravity * cosf(3 * env->position);
    env->velocity = clampf(env->velocity, -env->max_speed, env->max_speed);
    env->position = clampf(env->position + env->velocity, LEFT, RIGHT);
    if (env->position == LEFT && env->velocity < 0) env->velocity = 0;
    env->tick++;
    bool there = env->position >= env->goal && env->velocity >= 0;
    bool late = !there && env->tick >= env->max_steps;
    float reward = env->continuous ? (there ? 100.0f : 0.0f) - 0.1f * env->force * env->force : -1;
    env->rewards[0] = reward * env->reward_scale;
    env->terminals[0] = there;
    env->truncations[0] = late;
    env->total += reward;
    if (!there && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, there ? 1 - (float)env->tick / ((float)env->max_steps + 1) : 0, env->total,
                env->total, env->tick);
    c_reset(env);
}

static Vector2 on_hill(float position, float lift) {
    float height = sinf(3 * position) * 0.45f + 0.55f;
    Vector2 foot = {20 + (position - LEFT) / (RIGHT - LEFT) * 720, 400 - height * 280};
    float slope = 1.35f * cosf(3 * position) * 280 / 400, norm = sqrtf(1 + slope * slope);
    return (Vector2){foot.x - lift * slope / norm, foot.y - lift / norm};
}

static void c_render(Env* env) {
    enum { WIDTH = 760, HEIGHT = 440, PIECES = 120 };
    draw_begin(WIDTH, HEIGHT, "mountaincar");
    for (int i = 0; i < PIECES; i++) {
        float from = LEFT + (RIGHT - LEFT) * (float)i / PIECES;
        float to = LEFT + (RIGHT - LEFT) * (float)(i + 1) / PIECES;
        Vector2 a = on_hill(from, 0), b = on_hill(to, 0);
        draw_quad(a, b, (Vector2){b.x, HEIGHT}, (Vector2){a.x, HEIGHT}, DRAW_PANEL);
        DrawLineEx(a, b, 4, DRAW_GREY);
    }
    Vector2 foot = on_hill(env->goal, 0);
    DrawLineEx(foot, (Vector2){foot.x, foot.y - 60}, 3, DRAW_WHITE);
    draw_triangle((Vector2){foot.x, foot.y - 60}, (Vector2){foot.x, foot.y - 36},
                  (Vector2){foot.x + 30, foot.y - 48}, DRAW_GREEN);
    float p = env->position, half = 0.045f;
    draw_quad(on_hill(p - half, 10), on_hill(p + half, 10), on_hill(p + half, 26),
              on_hill(p - half, 26), DRAW_CYAN);
    draw_quad(on_hill(p - half / 2, 24), on_hill(p + half / 2, 24), on_hill(p + half / 3, 38),
              on_hill(p - half / 3, 38), DRAW_CYAN);
    DrawCircleV(on_hill(p - half * 0.6f, 9), 8, DRAW_WHITE);
    DrawCircleV(on_hill(p + half * 0.6f, 9), 8, DRAW_WHITE);
    if (env->force != 0) {
        Vector2 from = on_hill(p - half * (env->force > 0 ? 1.1f : -1.1f), 16);
        Vector2 to = on_hill(p - half * (env->force > 0 ? 1.1f : -1.1f) - 0.06f * env->force, 16);
        DrawLineEx(from, to, 7, DRAW_GOLD);
    }
    draw_end();
}
