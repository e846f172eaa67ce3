/* Performance: not a game but a load, to measure all that surrounds an environment. Each agent sees
 * a chosen number of bytes, all equal to the episode's tick (modulo 256). A step takes a chosen
 * time, on the processor and not asleep. The reward is 1 on every step, and an episode has a chosen
 * length, so all that a trainer gets is known beforehand. Delays are wall-clock time and change no
 * result. */
#pragma once

#define OBSERVATION uint8_t
#define SETTINGS(X) \
    X(int, num_agents, 1, "agents in one environment") \
    X(int, observation_size, 64, "bytes that an agent sees") \
    X(int, actions_size, 4, "choices of an agent") \
    X(int, length, 128, "steps of an episode") \
    X(float, delay, 0.0, "microseconds that a step takes") \
    X(float, delay_deviation, 0.0, "standard deviation of the delay, microseconds")
#include "env.h"
#include "draw.h"

#include <time.h>

struct Env {
    ENV_COMMON
    int tick;
};

static const char* c_init(Env* env) {
    if (env->num_agents < 1 || env->num_agents > 1 << 16)
        return "num_agents must lie within 1..65536";
    if (env->observation_size < 1 || env->observation_size > 1 << 20)
        return "observation_size: 1..1048576";
    if (env->actions_size < 1) return "actions_size must be 1 or more";
    if (env->length < 1) return "length must be 1 or more";
    if (!(env->delay >= 0 && env->delay <= 1e6f))
        return "delay must lie within 0..1000000 microseconds";
    if (!(env->delay_deviation >= 0 && env->delay_deviation <= 1e6f))
        return "delay_deviation: 0..1000000";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {env->observation_size},
        .observation_low = 0,
        .observation_high = 255,
        .action_heads = {env->actions_size},
    };
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void spend_time(Env* env) {
    float delay = env->delay;
    if (env->delay_deviation > 0) delay += env->delay_deviation * random_normal(&env->rng);
    double end = seconds() + 1e-6 * (double)delay;
    while (seconds() < end) {}
}

static inline void write_observation(const Env* env, uint8_t* observations) {
    memset(observations, env->tick & 255, (size_t)env->num_agents * (size_t)env->observation_size);
}

static void c_reset(Env* env) {
    env->tick = 0;
    write_observation(env, env->observations);
}

static void c_step(Env* env) {
    if (env->delay > 0 || env->delay_deviation > 0) spend_time(env);
    bool over = ++env->tick == env->length;
    for (int i = 0; i < env->num_agents; i++) {
        env->rewards[i] = 1;
        env->terminals[i] = over;
        env->truncations[i] = 0;
    }
    if (!over) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, 1, env->length, env->length, env->length);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { WIDTH = 720, HEIGHT = 240, LEFT = 40 };
    char text[96];
    snprintf(text, sizeof(text), "%d agents  %d bytes  %g us", env->num_agents,
             env->observation_size, (double)env->delay);
    draw_begin(WIDTH, HEIGHT, "performance");
    draw_text_centred(text, WIDTH / 2, 70, 30, DRAW_GREY);
    DrawRectangle(LEFT, 130, WIDTH - 2 * LEFT, 40, DRAW_PANEL);
    DrawRectangle(LEFT, 130, (int)((int64_t)(WIDTH - 2 * LEFT) * env->tick / env->length), 40,
                  DRAW_CYAN);
    draw_end();
}
