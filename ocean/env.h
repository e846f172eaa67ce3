/* What all environments share: the pointers that Python sets, random numbers, spaces and log.
 *
 * An environment is one header, <name>/<name>.h, in this order:
 *
 *     #define OBSERVATION float          float, double, (u)int8_t, (u)int16_t or (u)int32_t
 *     #define OWN_LOG(X) X(hits)         optional: statistics besides those of LOG
 *     #define SETTINGS(X) X(int, size, 8, "what it means")     optional; int, float or bool
 *     #define KEYS(KEY) KEY(0, LEFT, 1) KEY(0, RIGHT, 2)       keys for a person, see below
 *     #include "env.h"
 *     struct Env { ENV_COMMON  ...its own plain data... };
 *
 *     static const char* c_init(Env* env)     checks settings; returns NULL or what is wrong
 *     static void c_spaces(const Env* env, Spaces* spaces)     what agents see and do
 *     static void c_reset(Env* env)           begins an episode, writes its first observation
 *     static void c_step(Env* env)            plays one step, see below
 *     static void c_render(Env* env)          draws one frame with raylib (draw.h)
 *
 * c_step reads the actions. It writes these for every agent on every step, even if nothing changed,
 * because the pointers lead to other memory on each step:
 *     observations     of the NEXT state
 *     rewards
 *     terminals        1 if the rules end the episode, else 0
 *     truncations      1 if a time limit cuts it off, else 0
 * It begins the next episode itself: after an episode's last step, observations hold the first
 * observation of the new episode. The old episode's last observation goes to final_observations, if
 * WANTS_FINAL says so: always after a truncation, because the trainer estimates from it what the
 * rest would have been worth; after a termination only for other libraries. LOG_EPISODE adds the
 * episode to the log.
 * c_step allocates nothing, and all state is in the struct and in the arrays of HEAP.
 *
 * Optional defines before the include:
 *     HAS_VALID            agents may be inactive: c_reset and c_step write 1 to valid if the agent
 *                          acts in the next step, else 0
 *     HAS_ACTION_MASKS     c_reset and c_step write action_masks, if that pointer is set: one byte
 *                          for each action (1 legal), the heads one after another. Illegal actions
 *                          come all the same, because an agent that acts at random ignores masks.
 *     HEAP(X)              X(type, name, count) for each array whose size depends on settings, for
 *                          example X(float, map, env->width * env->height). c_init sets the fields
 *                          that counts need. The arrays exist after it, zero at first: c_reset and
 *                          c_step use env->map. Elements are plain data, like the struct's.
 *     KEYS(KEY)            KEY(head, key, action) for each key with which a person plays. A key is
 *                          UP, DOWN, LEFT, RIGHT, SPACE, SHIFT, CONTROL, a letter or a digit; REST
 *                          is the head's action while no key is down (0 without a REST).
 *     CONTINUOUS_KEYS(KEY) KEY(dimension, key, value) if actions are continuous; if there are none,
 *                          the arrow keys move the first dimension and the last
 *     CLICK_COLUMNS        the number of a board's columns, for example env->width: a mouse click
 *                          on a cell is action row * columns + column
 *     BY_TURNS             the game waits for a person's key before each step
 *     FPS                  steps a second that look natural; by default 30, or 10 with BY_TURNS */
#pragma once

#ifdef OCEAN_DEVICE
/* A GPU's C++ compiler (ocean/device.py) has no system headers. It knows most of their functions;
 * the others follow. */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef decltype((char*)0 - (char*)0) int64_t, intptr_t;
typedef decltype(sizeof(0)) uint64_t, uintptr_t;
#define INT8_MAX 127
#define INT16_MAX 32767
#define INT32_MAX 2147483647
#define INT_MAX INT32_MAX
#define INT8_MIN (-INT8_MAX - 1)
#define INT16_MIN (-INT16_MAX - 1)
#define INT32_MIN (-INT32_MAX - 1)
#define INT_MIN INT32_MIN
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295u
#define UINT_MAX UINT32_MAX
#define INT64_MAX ((int64_t)9223372036854775807)
#define UINT64_MAX (~(uint64_t)0)
#define FLT_MAX 3.402823466e+38f
#define FLT_EPSILON 1.192092896e-07f
#define M_E 2.7182818284590452354
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#define _Bool bool
#define _Alignas alignas
#define _Static_assert static_assert
#define restrict __restrict__
#ifdef __CUDACC_RTC__  // NVRTC has no __builtin_offsetof before 13.5
#define offsetof(type, member) __INTADDR__(&((type *)0)->member)
#else
#define offsetof __builtin_offsetof
#endif
#define __builtin_ctz(word) (__ffs((int)(word)) - 1)
#define __builtin_ctzl(word) (__ffsll((long long)(word)) - 1)
#define __builtin_ctzll __builtin_ctzl
#define __builtin_clz(word) __clz((int)(word))
#define __builtin_clzl(word) __clzll((long long)(word))
#define __builtin_clzll __builtin_clzl
#define __builtin_popcount(word) __popc((unsigned)(word))
#define __builtin_popcountl(word) __popcll((unsigned long long)(word))
#define __builtin_popcountll __builtin_popcountl
#define snprintf(...) 0 /* only drawing uses it, and a GPU draws nothing */
#define vsnprintf(...) 0
/* C programs may use these words of C++ as names. */
#define catch catch_
#define class class_
#define delete delete_
#define explicit explicit_
#define friend friend_
#define mutable mutable_
#define namespace namespace_
#define new new_
#define operator operator_
#define private private_
#define protected protected_
#define public public_
#define this this_
#define throw throw_
#define try try_
#define using using_
#define virtual virtual_

static inline void* device_memmove(void* to, const void* from, size_t size) {
    unsigned char* out = (unsigned char*)to;
    const unsigned char* in = (const unsigned char*)from;
    if (out < in)
        for (size_t i = 0; i < size; i++)
            out[i] = in[i];
    else
        for (size_t i = size; i-- > 0;)
            out[i] = in[i];
    return to;
}

static inline int device_memcmp(const void* one, const void* other, size_t size) {
    const unsigned char *a = (const unsigned char*)one, *b = (const unsigned char*)other;
    for (size_t i = 0; i < size; i++)
        if (a[i] != b[i]) return a[i] - b[i];
    return 0;
}

/* A template, because C++ does not turn void* into other pointers by itself. */
template <typename T>
static inline T* device_memchr(T* at, int byte, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const unsigned char*)at)[i] == (unsigned char)byte)
            return (T*)((unsigned char*)at + i);
    return NULL;
}

#define memchr device_memchr
#define memmove device_memmove
#define memcmp device_memcmp
#else
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#endif

typedef struct Env Env;

/* A header may define KEYS as this: the key of digit i is action i. */
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
 * the sum of its rewards, its steps. Each field of OWN_LOG needs a separate line, such as
 * env->log.hits += hits. */
#define LOG_EPISODE(env, how_well, points, reward_sum, steps) \
    do { \
        (env)->log.perf += (how_well); \
        (env)->log.score += (points); \
        (env)->log.episode_return += (reward_sum); \
        (env)->log.episode_length += (steps); \
        (env)->log.n += 1; \
    } while (0)

#ifndef HEAP
#define HEAP(X)
#endif

/* Every environment's struct begins with this. The pointers lead to this environment's part of the
 * current step's arrays, one agent after another. All fields from rng on, and the arrays of HEAP,
 * are saved and restored byte for byte. */
#define SETTING_FIELD(type, name, value, help) type name;
#define HEAP_POINTER(type, name, count) type* name;
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
    uint32_t agent_offset; /* agents of the preceding environments */ \
    bool every_final; /* terminated agents get a final observation too */ \
    HEAP(HEAP_POINTER) \
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
    double observation_low, observation_high; /* bounds of every element; may be infinite */
    int action_heads[MAX_HEADS];
    int action_dims;
} Spaces;

/* splitmix64 (Steele, Lea and Flood 2014): a counter and a function that mixes it. Any seed is
 * good. Draw only one number in a statement, because C does not fix the order of two calls in one
 * expression. */
static inline uint64_t random_word(uint64_t* rng) {
    uint64_t z = (*rng += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in 0 .. n-1 (Lemire 2019): the upper half of 32 random bits times n. By the lower half
 * 2^32 mod n of the 2^32 draws are rejected, so that equally many are left for each number. */
static inline int random_int(uint64_t* rng, int n) {
    uint32_t parts = (uint32_t)n;
    uint64_t product = (random_word(rng) >> 32) * parts;
    while ((uint32_t)product < parts && (uint32_t)product < -parts % parts)
        product = (random_word(rng) >> 32) * parts;
    return (int)(product >> 32);
}

/* Uniform from low to high, in 2^24 steps. Rounding may give high itself, unless low is 0. So for
 * an index take random_int. */
static inline float random_float(uint64_t* rng, float low, float high) {
    return low + (high - low) * ((float)(random_word(rng) >> 40) * 0x1p-24f);
}

/* Normal, with mean 0 and standard deviation 1 (Box and Muller 1958). */
static inline float random_normal(uint64_t* rng) {
    float radius = sqrtf(-2 * logf(1 - random_float(rng, 0, 1)));
    return radius * cosf(random_float(rng, 0, (float)(2 * M_PI)));
}

/* Each of these is one instruction, unlike fminf and fmaxf. */
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
