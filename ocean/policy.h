/* Runs a trained default network (models.MinGRUPolicy: linear encoder, MinGRU layers with highway
 * gates, linear decoder) in plain C, from the file that `python pufferl.py export ENV --export.flat
 * policy.bin` writes. It needs libm only. A Policy has scratch memory, so it is for one thread.
 *
 *     Policy policy;
 *     const char* problem = policy_load(&policy, "policy.bin");     NULL, or what is wrong
 *     float* state = policy_new_state(&policy, agents);             zeros: an episode begins
 *     float* outputs = policy.outputs;     policy.width numbers, which each call overwrites
 *   and on every step, for agent i,
 *     policy_forward(&policy, observation, reset, state + i * policy.state_size);
 *     policy_act(&policy, mask, seed, i, step, deterministic, action);
 *   with observation an array of the type policy.type (double for float64), reset 1 if an episode
 *   begins here, and mask NULL or 0 for each forbidden action.
 *
 * The file is one row of little-endian float32, which numpy.fromfile(path, "<f4") reads:
 *     the bytes "PUFR"; format 1 to 8; observation type (PolicyType); inputs; hidden; layers;
 *         heads; dims; each head's size
 *     in formats 2, 4, 6 and 8 only: shift (inputs), scale (inputs), which normalise observations
 *     encoder: weight (hidden, inputs), bias (hidden)
 *     each layer: weight (3 * hidden, hidden), bias (3 * hidden), in the order h, g, p
 *     decoder: weight (actions + 1, hidden), bias (actions + 1); the last row is the value
 *     log_std (dims)
 *     in formats 3, 4, 7 and 8 only: middle (dims), half (dims): an action is
 *         middle + half * tanh(sample), or middle - half * sample where half is below 0
 *     in formats 5 to 8 only: the first action of each head, or low (dims), high (dims), to which
 *         actions are clipped
 * with actions = the sum of the heads' sizes (discrete), or dims (continuous). Matrices are row by
 * row, as in torch. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    POLICY_FLOAT32, POLICY_FLOAT64, POLICY_INT8, POLICY_UINT8, POLICY_INT16, POLICY_UINT16,
    POLICY_INT32, POLICY_UINT32, POLICY_INT64, POLICY_UINT64, POLICY_TYPES
} PolicyType;

enum { POLICY_HEADER = 8, POLICY_MAX_HEADS = 64, POLICY_MAX_SIZE = 1 << 20 };
typedef struct {
    int type, inputs, hidden, layers; /* inputs: numbers in one observation */
    int heads, head_sizes[POLICY_MAX_HEADS]; /* discrete actions, or ... */
    int dims; /* ... continuous ones */
    int width; /* numbers in the outputs: logits (or means), then the value */
    int state_size; /* floats of recurrent state for each agent */
    const float *shift, *scale; /* normalise observations; NULL if they are not normalised */
    const float *encoder, *layer, *decoder, *log_std; /* each matrix is followed by its bias */
    const float *middle, *half; /* the bounds of actions, if a tanh squashes them; else NULL */
    const float *starts, *low, *high; /* offset of actions, or their clipping bounds; else NULL */
    float *weights, *outputs, *scratch;
} Policy;

static void policy_free(Policy* policy) {
    free(policy->weights);
    free(policy->scratch);
    *policy = (Policy){0};
}

/* Makes a policy from the contents of a file: copies `count` floats. Returns NULL, or what is
 * wrong. */
static const char* policy_read(Policy* policy, const float* file, size_t count) {
    *policy = (Policy){0};
    if (count < POLICY_HEADER || memcmp(file, "PUFR", 4))
        return "this is no policy file: it does not begin with PUFR";
    if (!(file[1] >= 1 && file[1] <= 8 && file[1] == (float)(int)file[1]))
        return "the file has another format than 1 to 8, which this policy.h reads";
    for (int i = 2; i < POLICY_HEADER; i++)
        if (!(file[i] >= 0 && file[i] <= POLICY_MAX_SIZE)) return "the file's sizes are damaged";
    Policy p = {.type = (int)file[2],
                .inputs = (int)file[3],
                .hidden = (int)file[4],
                .layers = (int)file[5],
                .heads = (int)file[6],
                .dims = (int)file[7]};
    bool empty = !p.inputs || !p.hidden || !p.layers || (p.heads > 0) == (p.dims > 0);
    if (p.type >= POLICY_TYPES || p.heads > POLICY_MAX_HEADS || empty)
        return "the file's sizes are damaged";
    if (count < POLICY_HEADER + (size_t)p.heads) return "the file is cut off";
    p.width = p.dims + 1;
    for (int i = 0; i < p.heads; i++) {
        float size = file[POLICY_HEADER + i];
        if (!(size >= 1 && size <= POLICY_MAX_SIZE)) return "the file's sizes are damaged";
        p.width += p.head_sizes[i] = (int)size;
    }

    uint64_t inputs = (uint64_t)p.inputs, hidden = (uint64_t)p.hidden, width = (uint64_t)p.width;
    uint64_t encoder = hidden * (inputs + 1), layer = 3 * hidden * (hidden + 1);
    int has = (int)file[1] - 1; /* one bit for each of the parts that a file may have */
    uint64_t decoder = width * (hidden + 1), norm = has & 1 ? 2 * inputs : 0;
    uint64_t dims = (uint64_t)p.dims, squash = has & 2 ? 2 * dims : 0;
    uint64_t limits = has & 4 ? (uint64_t)p.heads + 2 * dims : 0;
    uint64_t total = norm + encoder + (uint64_t)p.layers * layer + decoder + dims + squash + limits;
    if (count - POLICY_HEADER - (size_t)p.heads != total)
        return "the file is cut off, or has bytes that do not belong";
    for (size_t i = count - total; i < count; i++)
        if (isnan(file[i])) return "the file's weights are damaged"; /* a bound may be infinite */
    p.state_size = p.layers * p.hidden;
    p.weights = (float*)malloc((size_t)total * sizeof(float));
    /* observation, x, hgp, outputs */
    p.scratch = (float*)malloc((size_t)(inputs + 4 * hidden + width) * sizeof(float));
    if (!p.weights || !p.scratch) {
        policy_free(&p);
        return "there is not enough memory";
    }
    memcpy(p.weights, file + POLICY_HEADER + p.heads, (size_t)total * sizeof(float));
    if (norm) {
        p.shift = p.weights;
        p.scale = p.shift + inputs;
    }
    p.encoder = p.weights + norm;
    p.layer = p.encoder + encoder;
    p.decoder = p.layer + (uint64_t)p.layers * layer;
    p.log_std = p.decoder + decoder;
    if (squash) {
        p.middle = p.log_std + dims;
        p.half = p.middle + dims;
    }
    if (limits) {
        p.starts = p.low = p.log_std + dims + squash; /* there are heads or dims */
        p.high = p.low + dims;
    }
    p.outputs = p.scratch + inputs + 4 * hidden;
    *policy = p;
    return NULL;
}

static const char* policy_load(Policy* policy, const char* path) {
    *policy = (Policy){0};
    FILE* file = fopen(path, "rb");
    if (!file) return "the policy file cannot be opened";
    const char* problem = "the policy file cannot be read";
    if (!fseek(file, 0, SEEK_END)) {
        long size = ftell(file);
        float* contents = size > 0 && size % 4 == 0 ? (float*)malloc((size_t)size) : NULL;
        if (contents && !fseek(file, 0, SEEK_SET) &&
            fread(contents, 1, (size_t)size, file) == (size_t)size)
            problem = policy_read(policy, contents, (size_t)size / sizeof(float));
        free(contents);
    }
    fclose(file);
    return problem;
}

/* The recurrent state of `agents` agents, all zeros. The caller frees it. */
static float* policy_new_state(const Policy* policy, int agents) {
    return (float*)calloc((size_t)agents * (size_t)policy->state_size, sizeof(float));
}

static inline float policy_sigmoid(float x) {
    return 1 / (1 + expf(-x));
}

/* y = weight x + bias. Eight sums side by side, so that the compiler may use SIMD without
 * reordering anything. */
static void policy_linear(const float* weight, int outputs, int inputs, const float* x, float* y) {
    const float* bias = weight + (size_t)outputs * (size_t)inputs;
    for (int o = 0; o < outputs; o++, weight += inputs) {
        float sums[8] = {0}, sum = bias[o];
        int i = 0;
        for (; i + 8 <= inputs; i += 8)
            for (int k = 0; k < 8; k++)
                sums[k] += weight[i + k] * x[i + k];
        for (; i < inputs; i++)
            sum += weight[i] * x[i];
        for (int k = 0; k < 8; k++)
            sum += sums[k];
        y[o] = sum;
    }
}

/* Turns an observation of the policy's type into floats. */
static void policy_floats(const Policy* policy, const void* observation, float* x) {
#define POLICY_CASE(name, type) \
    case name: \
        for (int i = 0; i < policy->inputs; i++) \
            x[i] = (float)((const type*)observation)[i]; \
        break;
    switch (policy->type) {
        POLICY_CASE(POLICY_FLOAT32, float)
        POLICY_CASE(POLICY_FLOAT64, double)
        POLICY_CASE(POLICY_INT8, int8_t)
        POLICY_CASE(POLICY_UINT8, uint8_t)
        POLICY_CASE(POLICY_INT16, int16_t)
        POLICY_CASE(POLICY_UINT16, uint16_t)
        POLICY_CASE(POLICY_INT32, int32_t)
        POLICY_CASE(POLICY_UINT32, uint32_t)
        POLICY_CASE(POLICY_INT64, int64_t)
        POLICY_CASE(POLICY_UINT64, uint64_t)
    }
#undef POLICY_CASE
}

/* One step of one agent. Computes policy->outputs and the agent's new state from an observation of
 * policy->inputs numbers of the policy's type. `reset`: the observation is the first of an episode.
 */
static void policy_forward(const Policy* policy, const void* observation, bool reset,
                           float* state) {
    int H = policy->hidden;
    float *floats = policy->scratch, *x = floats + policy->inputs, *hgp = x + H;
    const float* weight = policy->layer;
    policy_floats(policy, observation, floats);
    for (int i = 0; policy->shift && i < policy->inputs; i++)
        floats[i] = fminf(fmaxf((floats[i] - policy->shift[i]) * policy->scale[i], -10), 10);
    policy_linear(policy->encoder, H, policy->inputs, floats, x);
    for (int i = 0; i < policy->layers;
         i++, state += H, weight += 3 * (size_t)H * ((size_t)H + 1)) {
        policy_linear(weight, 3 * H, H, x, hgp);
        for (int j = 0; j < H; j++) {
            float h = hgp[j], g = hgp[H + j], p = hgp[2 * H + j], s = reset ? 0 : state[j];
            float candidate = h >= 0 ? h + 0.5f : policy_sigmoid(h);
            state[j] = s + policy_sigmoid(g) * (candidate - s);
            x[j] += policy_sigmoid(p) * (state[j] - x[j]);
        }
    }
    policy_linear(policy->decoder, policy->width, H, x, policy->outputs);
}

/* The first two of Philox4x32-10's four random words (Salmon et al. 2011). */
static void policy_random(uint64_t seed, uint32_t agent, uint64_t step, int head,
                          uint32_t words[2]) {
    enum { ACTION = 1 }; /* the counter's last word is the purpose, as in kernels.py */
    uint32_t c[4] = {agent, (uint32_t)step, (uint32_t)(step >> 32) << 16 | (uint32_t)head, ACTION};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ key[0];
        c[1] = (uint32_t)b;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ key[1];
        c[3] = (uint32_t)a;
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    words[0] = c[0];
    words[1] = c[1];
}

static inline float policy_uniform(uint32_t word) {
    return (float)(word >> 8) * 0x1p-24f;
}

/* Chooses the environment's action from policy->outputs: int32_t[heads], or float[dims] (without a
 * tanh these may be outside -1..1, to which an environment in C clips them). The random words are
 * those of kernels.sample: the same seed, agent and step give its action. `deterministic`: the most
 * likely one. */
static void policy_act(const Policy* policy, const uint8_t* mask, uint64_t seed, uint32_t agent,
                       uint64_t step, bool deterministic, void* action) {
    const float* logits = policy->outputs;
    uint32_t words[2];
    for (int head = 0; head < policy->heads; head++) {
        int size = policy->head_sizes[head], choice = 0;
        float top = -INFINITY, total = 0, sum = 0;
        for (int i = 0; i < size; i++)
            if (!mask || mask[i]) top = logits[i] > top ? logits[i] : top;
        for (int i = 0; i < size; i++)
            if (!mask || mask[i]) total += expf(logits[i] - top);
        policy_random(seed, agent, step, head, words);
        for (int i = 0; i < size; i++) {
            if (mask && !mask[i]) continue;
            choice = i; /* the last allowed one, if rounding puts the target beyond all */
            sum += expf(logits[i] - top);
            if (deterministic ? logits[i] == top : sum > policy_uniform(words[0]) * total) break;
        }
        ((int32_t*)action)[head] = choice + (policy->starts ? (int)policy->starts[head] : 0);
        logits += size;
        mask = mask ? mask + size : NULL;
    }
    for (int i = 0; i < policy->dims; i++) {
        float noise = 0;
        policy_random(seed, agent, step, i, words);
        if (!deterministic)
            noise = sqrtf(-2 * logf(1 - policy_uniform(words[0]))) *
                    cosf(6.283185307f * policy_uniform(words[1]));
        float sample = logits[i] + expf(policy->log_std[i]) * noise;
        if (policy->half)
            sample = policy->half[i] > 0 ? policy->middle[i] + policy->half[i] * tanhf(sample)
                                         : policy->middle[i] - policy->half[i] * sample;
        if (policy->low) sample = fminf(fmaxf(sample, policy->low[i]), policy->high[i]);
        ((float*)action)[i] = sample;
    }
}
