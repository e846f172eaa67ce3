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

#ifdef OCEAN_DEVICE
/* A GPU's C++ compiler (device.py) has no system headers, but most of their functions. What it lacks stands here. */
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
#define offsetof __builtin_offsetof
#define __builtin_ctz(word) (__ffs((int)(word)) - 1)
#define __builtin_ctzl(word) (__ffsll((long long)(word)) - 1)
#define __builtin_ctzll __builtin_ctzl
#define __builtin_clz(word) __clz((int)(word))
#define __builtin_clzl(word) __clzll((long long)(word))
#define __builtin_clzll __builtin_clzl
#define __builtin_popcount(word) __popc((unsigned)(word))
#define __builtin_popcountl(word) __popcll((unsigned long long)(word))
#define __builtin_popcountll __builtin_popcountl
#define snprintf(...) 0 /* of what is drawn */
#define vsnprintf(...) 0
/* Words of C++ that are names in C. */
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

/* C++ lets no void* become another pointer. */
template <typename T>
static inline T* device_memchr(T* at, int byte, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const unsigned char*)at)[i] == (unsigned char)byte) return (T*)((unsigned char*)at + i);
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

/* Episode statistics, summed; n counts the episodes, so that a sum / n is a mean. */
#define LOG_FIELD(name) float name;
typedef struct { LOG(LOG_FIELD) } Log;

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

/* Uniform in 0 .. n-1, by multiplication instead of the slower remainder; the bias is below n / 2^32. */
static inline int random_int(uint64_t* rng, int n) {
    return (int)(((random_word(rng) >> 32) * (uint64_t)n) >> 32);
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
