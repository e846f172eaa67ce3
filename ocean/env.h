/* What every environment shares: the block of pointers that Python binds, the random numbers, the
 * declaration of spaces. An environment is one header, <name>/<name>.h, which reads in this order:
 *
 *     #define OBSERVATION float                     element type: float, double, (u)int8/16/32_t
 *     #define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n)      and fields of its own
 *     #define SETTINGS(X) X(int, size, 8, "what it means")                          int, float or bool
 *     #include "env.h"
 *     struct Env { ENV_COMMON  ...its own plain data... };
 *
 *     static const char* c_init(Env* env)           after the settings are in: derive values; NULL or what is wrong
 *     static void c_spaces(const Env* env, Spaces* spaces)      what agents see and do, may depend on settings
 *     static void c_reset(Env* env)                 begin an episode, write its first observation
 *     static void c_step(Env* env)                  see below
 *     static void c_render(Env* env)                draw one frame with raylib (draw.h)
 *     static void c_close(Env* env)                 free what c_init allocated
 *
 * c_step reads the actions and writes, for every agent on every step and in full (the pointers move to a
 * new row each time): the observation of the NEXT state, the reward, terminals and truncations (0 or 1).
 * The environment resets itself: after an episode's last step that next observation is the first of a new
 * episode. An agent that is truncated (cut off by time, not by the rules) also gets the observation it would
 * have seen next in final_observations, if that pointer is set. One that is terminated gets it only if every_final is
 * set too: other libraries show it, trainers have no use for it. WANTS_FINAL asks for both. When an episode ends, its
 * statistics are added to env->log. Nothing is allocated while stepping, and no state lives outside the struct.
 *
 * Optional, by a #define before the include:
 *     HAS_VALID            agents may be dead: c_reset and c_step write valid (1: will act on this observation)
 *     HAS_ACTION_MASKS     c_reset and c_step write action_masks, one byte an action, the heads one after another, if
 *                          that pointer is set; actions may be illegal all the same, for a random agent sees no mask
 *     HEAP float* map;     pointers to memory that c_init allocates; needs c_save and c_load (see binding.c) */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Env Env;

/* For KEYS of a header: digit i takes action i. */
#define DIGIT_KEYS(KEY) \
    KEY(0, 0, 0) KEY(0, 1, 1) KEY(0, 2, 2) KEY(0, 3, 3) KEY(0, 4, 4) \
    KEY(0, 5, 5) KEY(0, 6, 6) KEY(0, 7, 7) KEY(0, 8, 8) KEY(0, 9, 9)

#ifndef OWN_LOG
#define OWN_LOG(X)
#endif
#ifndef LOG /* older headers list all fields themselves */
#define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n) OWN_LOG(X)
#endif
#ifndef SETTINGS
#define SETTINGS(X)
#endif

/* Episode statistics, summed; n counts the episodes, so that a sum / n is a mean. */
#define LOG_FIELD(name) float name;
typedef struct { LOG(LOG_FIELD) } Log;

/* Adds one finished episode to the log: how well it went (0..1), its score in the game's own units, the sum of its
 * rewards, its steps. Fields of OWN_LOG are added beside it: env->log.crashes += crashes. */
#define LOG_EPISODE(env, how_well, points, reward_sum, steps) \
    do { \
        (env)->log.perf += (how_well); \
        (env)->log.score += (points); \
        (env)->log.episode_return += (reward_sum); \
        (env)->log.episode_length += (steps); \
        (env)->log.n += 1; \
    } while (0)

#ifdef HEAP
#define HAS_HEAP
#else
#define HEAP
#endif

/* The beginning of every environment's struct. The pointers are this environment's part of the current row,
 * agent after agent. All that follows rng is plain data: it is saved and restored byte for byte. */
#define SETTING_FIELD(type, name, value, help) type name;
#define ENV_COMMON \
    _Alignas(64) OBSERVATION* observations; /* (agents, shape); 64: threads never share a cache line */ \
    union { \
        const int32_t* actions; /* (agents, heads) of discrete actions ... */ \
        const float* continuous_actions; /* ... or (agents, dims), meant to lie within -1..1 */ \
    }; \
    float* rewards; \
    uint8_t* terminals; \
    uint8_t* truncations; \
    OBSERVATION* final_observations; \
    uint8_t* valid; /* set with HAS_VALID only */ \
    uint8_t* action_masks; /* (agents, sum of heads), set with HAS_ACTION_MASKS only */ \
    uint32_t agent_offset; /* agents of the environments before this one */ \
    bool every_final; /* the terminated get a final observation too */ \
    HEAP \
    uint64_t rng; \
    Log log; \
    SETTINGS(SETTING_FIELD)

/* Whether an agent whose episode ends shall get a final observation. */
#define WANTS_FINAL(env, truncated) ((env)->final_observations && ((truncated) || (env)->every_final))

/* Lists end at their first 0. Give action_heads (discrete) or action_dims (continuous), not both. */
enum { MAX_DIMS = 5, MAX_HEADS = 16 };
typedef struct {
    int num_agents;
    int observation_shape[MAX_DIMS];
    double observation_low, observation_high; /* hold for every element; may be infinite */
    int action_heads[MAX_HEADS];
    int action_dims;
} Spaces;

/* splitmix64 (Steele, Lea and Flood 2014): a counter and a mixing function, one word of state, any seed good. Draw one
 * number a statement: C leaves the order of two calls in one expression to the compiler. */
static inline uint64_t random_word(uint64_t* rng) {
    uint64_t z = (*rng += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in 0 .. n-1, without a bias (Lemire 2019). The upper half of 32 random bits times n is the number. Some numbers
 * would come once more often in 2^32 draws than others, so 2^32 mod n of the draws are rejected. */
static inline int random_int(uint64_t* rng, int n) {
    uint32_t parts = (uint32_t)n;
    uint64_t product = (random_word(rng) >> 32) * parts;
    while ((uint32_t)product < parts && (uint32_t)product < -parts % parts)
        product = (random_word(rng) >> 32) * parts;
    return (int)(product >> 32);
}

/* Uniform from low to high, 24 bits; high itself comes only by rounding, and never where low is 0. For an index take
 * random_int. */
static inline float random_float(uint64_t* rng, float low, float high) {
    return low + (high - low) * ((float)(random_word(rng) >> 40) * 0x1p-24f);
}

/* Normal with mean 0 and deviation 1 (Box and Muller 1958). */
static inline float random_normal(uint64_t* rng) {
    float radius = sqrtf(-2 * logf(1 - random_float(rng, 0, 1)));
    return radius * cosf(random_float(rng, 0, (float)(2 * M_PI)));
}

/* Unlike fminf and fmaxf these are one instruction each. */
static inline float minf(float a, float b) {
    return a < b ? a : b;
}

static inline float maxf(float a, float b) {
    return a > b ? a : b;
}

/* A NaN becomes low: a broken policy shall not break the environment's own state. */
static inline float clampf(float x, float low, float high) {
    return minf(maxf(x, low), high);
}
