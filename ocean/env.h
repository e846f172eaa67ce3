/* What every environment shares: the pointers that Python sets, random numbers, spaces and log.
 *
 * An environment is one header, <name>/<name>.h, in this order:
 *
 *     #define OBSERVATION float          float, double, (u)int8_t, (u)int16_t or (u)int32_t
 *     #define OWN_LOG(X) X(hits)         optional: statistics besides those of LOG
 *     #define SETTINGS(X) X(int, size, 8, "what it means")     optional; int, float or bool
 *     #define KEYS(KEY) KEY(0, LEFT, 1) KEY(0, RIGHT, 2)       optional, see below
 *     #include "env.h"
 *     struct Env { ENV_COMMON  ...its own plain data... };
 *
 *     static const char* c_init(Env* env)     checks settings; returns NULL or what is wrong
 *     static void c_spaces(const Env* env, Spaces* spaces)     what agents see and do
 *     static void c_reset(Env* env)           begins an episode, writes its first observation
 *     static void c_step(Env* env)            plays one step, see below
 *     static void c_render(Env* env)          draws one frame with raylib (draw.h)
 *     static void c_close(Env* env)           frees what c_init allocated; with HEAP only
 *
 * c_step reads the actions. It writes for every agent on every step, because the pointers move:
 *     observations     of the NEXT state
 *     rewards
 *     terminals        1 if the rules end the episode, else 0
 *     truncations      1 if a time limit cuts it off, else 0
 * It begins the next episode itself: after an episode's last step, observations hold the first
 * observation of the new episode. What the agent would have seen goes to final_observations, if
 * WANTS_FINAL says so: always after a truncation, because the trainer values it, and after a
 * termination only for other libraries. LOG_EPISODE adds the episode to the log.
 * c_step allocates nothing, and all state is in the struct.
 *
 * Optional defines before the include:
 *     HAS_VALID            agents may be dead: c_reset and c_step write valid: 1 if it will act
 *     HAS_ACTION_MASKS     c_reset and c_step write action_masks, if that pointer is set: one byte
 *                          an action, the heads one after another. Illegal actions come all the
 *                          same, because an agent at random sees no mask.
 *     HEAP float* map;     pointers to memory that c_init allocates; needs c_close, and c_save and
 *                          c_load (binding.c says what these do)
 *     KEYS(KEY)            KEY(head, key, action) for each key with which a person plays. A key is
 *                          UP, DOWN, LEFT, RIGHT, SPACE, SHIFT, CONTROL, a letter or a digit; REST
 *                          is what the head does while no key is down. Without it that is 0.
 *     CONTINUOUS_KEYS(KEY) KEY(dimension, key, value) if actions are continuous; if there are none,
 *                          the arrow keys move the first dimension and the last
 *     CLICK_COLUMNS        env->width, say: a click on a board of so many columns is action
 *                          row * columns + column
 *     BY_TURNS             time waits for a person's key
 *     FPS                  steps a second that look natural: 30, or 10 with BY_TURNS */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Env Env;

/* KEYS of a header may be this: digit i is action i. */
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

/* Sums over episodes; n counts the episodes. */
#define LOG_FIELD(name) float name;
typedef struct { LOG(LOG_FIELD) } Log;

/* Adds one finished episode to the log: how well it went (0..1), its score in the game's own units,
 * the sum of its rewards, its steps. Fields of OWN_LOG need a line each: env->log.hits += hits. */
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

/* Every environment's struct begins with this. The pointers lead to this environment's part of the
 * current step, agent after agent. All from rng on is saved and restored byte for byte. */
#define SETTING_FIELD(type, name, value, help) type name;
#define ENV_COMMON \
    /* (agents, shape). Aligned, so that two threads never share a cache line. */ \
    _Alignas(64) OBSERVATION* observations; \
    union { \
        const int32_t* actions; /* (agents, heads) of discrete actions ... */ \
        const float* continuous_actions; /* ... or (agents, dims), meant to be in -1..1 */ \
    }; \
    float* rewards; \
    uint8_t* terminals; \
    uint8_t* truncations; \
    OBSERVATION* final_observations; \
    uint8_t* valid; /* (agents,), with HAS_VALID only */ \
    uint8_t* action_masks; /* (agents, sum of heads), with HAS_ACTION_MASKS only */ \
    uint32_t agent_offset; /* agents of the environments before this one */ \
    bool every_final; /* terminated agents get a final observation too */ \
    HEAP \
    uint64_t rng; \
    Log log; \
    SETTINGS(SETTING_FIELD)

/* Whether an agent whose episode ends gets a final observation. */
#define WANTS_FINAL(env, truncated) \
    ((env)->final_observations && ((truncated) || (env)->every_final))

/* Lists end at their first 0. Give either action_heads (discrete) or action_dims (continuous). */
enum { MAX_DIMS = 5, MAX_HEADS = 16 };
typedef struct {
    int num_agents;
    int observation_shape[MAX_DIMS];
    double observation_low, observation_high; /* hold for every element; may be infinite */
    int action_heads[MAX_HEADS];
    int action_dims;
} Spaces;

/* splitmix64 (Steele, Lea and Flood 2014): a counter and a function that mixes it. Any seed is
 * good. Draw one number a statement, because C does not fix the order of two calls in one
 * expression. */
static inline uint64_t random_word(uint64_t* rng) {
    uint64_t z = (*rng += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in 0 .. n-1 (Lemire 2019): the upper half of 32 random bits times n. The lower half is
 * looked at to reject 2^32 mod n of the 2^32 draws, so that each number has equally many. */
static inline int random_int(uint64_t* rng, int n) {
    uint32_t parts = (uint32_t)n;
    uint64_t product = (random_word(rng) >> 32) * parts;
    while ((uint32_t)product < parts && (uint32_t)product < -parts % parts)
        product = (random_word(rng) >> 32) * parts;
    return (int)(product >> 32);
}

/* Uniform from low to high, in 2^24 steps. Rounding may give high itself, unless low is 0: take
 * random_int for an index. */
static inline float random_float(uint64_t* rng, float low, float high) {
    return low + (high - low) * ((float)(random_word(rng) >> 40) * 0x1p-24f);
}

/* Normal, with mean 0 and standard deviation 1 (Box and Muller 1958). */
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

/* A NaN becomes low, so that a broken policy does not break the environment's state. */
static inline float clampf(float x, float low, float high) {
    return minf(maxf(x, low), high);
}
