/* Compiled once for each environment with -DENV_HEADER='"squared/squared.h"'. It exports what
 * ocean/__init__.py calls. envs is an array of Env. rows holds the addresses of one step's arrays, at agent
 * 0 of the whole vector, in this order: observations, actions, rewards, terminals, truncations,
 * final_observations, valid, action_masks; 0 for an array that does not exist. Several threads may run
 * ocean_step and ocean_reset at the same time, on disjoint ranges of environments. */
#pragma GCC diagnostic ignored "-Wunused-parameter" /* a header's functions have fixed parameters, not all used */
#include ENV_HEADER

#ifndef OCEAN_DEVICE
#include <stdarg.h>
#include <stddef.h>
#endif

_Static_assert(offsetof(Env, observations) == 0, "struct Env must begin with ENV_COMMON");

#ifdef HAS_VALID
enum { has_valid = 1 };
#else
enum { has_valid = 0 };
#endif
#ifdef HAS_ACTION_MASKS
enum { has_action_masks = 1 };
#else
enum { has_action_masks = 0 };
#endif

static Spaces spaces_of(const Env* env) {
    Spaces spaces = {0};
    c_spaces(env, &spaces);
    return spaces;
}

/* What is wrong with what c_spaces gave; NULL if nothing is. A field that it leaves out is 0. */
static const char* spaces_problem(Spaces spaces) {
    bool heads = spaces.action_heads[0] != 0, dims = spaces.action_dims != 0;
    if (spaces.num_agents < 1) return "c_spaces gives no .num_agents; 1 or more is expected";
    if (spaces.observation_shape[0] == 0) return "c_spaces gives no .observation_shape, such as {4} or {3, 8, 8}";
    for (int i = 0; i < MAX_DIMS; i++)
        if (spaces.observation_shape[i] < 0) return "c_spaces gives a negative size in .observation_shape";
    if (heads == dims)
        return heads ? "c_spaces gives both .action_heads and .action_dims; one of them is expected"
                     : "c_spaces gives neither .action_heads, such as {5} for a choice of 5, nor .action_dims, "
                       "how many continuous numbers an action is";
    for (int i = 0; i < MAX_HEADS; i++)
        if (spaces.action_heads[i] < 0) return "c_spaces gives a negative number of choices in .action_heads";
    return spaces.action_dims < 0 ? "c_spaces gives a negative .action_dims" : NULL;
}

/* The arrays of one call as pointers, and the bytes that one agent has in those whose size settings change. */
typedef struct {
    char *observations, *actions, *final_observations, *action_masks;
    float* rewards;
    uint8_t *terminals, *truncations, *valid;
    size_t observation_bytes, action_bytes, final_bytes, mask_bytes;
} Rows;

#ifndef OCEAN_DEVICE
static Rows read_rows(const Env* env, const int64_t* rows) {
    Spaces spaces = spaces_of(env);
    size_t observation = sizeof(OBSERVATION), heads = 0, choices = 0;
    for (int i = 0; i < MAX_DIMS && spaces.observation_shape[i]; i++)
        observation *= (size_t)spaces.observation_shape[i];
    for (; heads < MAX_HEADS && spaces.action_heads[heads]; heads++)
        choices += (size_t)spaces.action_heads[heads];
    return (Rows){
        .observations = (char*)rows[0],
        .actions = (char*)rows[1],
        .rewards = (float*)rows[2],
        .terminals = (uint8_t*)rows[3],
        .truncations = (uint8_t*)rows[4],
        .final_observations = (char*)rows[5],
        .valid = (uint8_t*)rows[6],
        .action_masks = (char*)rows[7],
        .observation_bytes = observation,
        .action_bytes = 4 * (heads ? heads : (size_t)spaces.action_dims),
        .final_bytes = rows[5] ? observation : 0, /* 0, so that a missing array is NULL for every agent */
        .mask_bytes = rows[7] ? choices : 0,
    };
}
#endif

/* One store for each pointer. The compiler keeps the values in registers for the inlined c_step. */
static inline void bind_rows(Env* env, const Rows* rows) {
    size_t agent = env->agent_offset;
    env->observations = (OBSERVATION*)(rows->observations + agent * rows->observation_bytes);
    env->actions = (const int32_t*)(rows->actions + agent * rows->action_bytes);
    env->rewards = rows->rewards + agent;
    env->terminals = rows->terminals + agent;
    env->truncations = rows->truncations + agent;
    env->final_observations = (OBSERVATION*)(rows->final_observations + agent * rows->final_bytes);
#ifdef HAS_VALID
    env->valid = rows->valid + agent;
#endif
#ifdef HAS_ACTION_MASKS
    env->action_masks = (uint8_t*)rows->action_masks + agent * rows->mask_bytes;
#endif
}

/* One environment of ocean_reset. */
static inline void reset_env(Env* env, const Rows* rows) {
    size_t agent = env->agent_offset, agents = (size_t)spaces_of(env).num_agents;
    memset(rows->rewards + agent, 0, agents * sizeof(float));
    memset(rows->terminals + agent, 0, agents);
    memset(rows->truncations + agent, 0, agents);
    if (rows->valid) memset(rows->valid + agent, 1, agents);
    if (rows->action_masks) memset(rows->action_masks + agent * rows->mask_bytes, 1, agents * rows->mask_bytes);
    bind_rows(env, rows);
    c_reset(env);
}

#ifdef OCEAN_DEVICE
/* ocean_step and ocean_reset on a GPU, one thread for each environment (device.py). rows: from ocean_rows, with
 * addresses on the GPU. resets: whether each agent's next observation begins an episode. */
static_assert(sizeof(Env) == STRUCT_SIZE && offsetof(Env, rng) == PLAIN_START && offsetof(Env, log) == LOG_OFFSET,
              "struct Env is laid out otherwise than by the C compiler");

/* A struct up to so many bytes steps as a copy. Nothing else points to that, so the compiler keeps its numbers in
 * registers while c_step writes observations. A larger one would be moved from and to the memory as a whole. */
enum { COPIED = 640 };

static inline void step_env(Env* env, const Rows* rows, uint8_t* resets) {
    bind_rows(env, rows);
    c_step(env);
    size_t agent = env->agent_offset, agents = (size_t)spaces_of(env).num_agents;
    for (size_t k = 0; k < agents; k++) resets[agent + k] = rows->terminals[agent + k] | rows->truncations[agent + k];
}

/* Steps environment i with the arrays of `rows`, by one thread. */
static inline void step_one(Env* envs, int64_t i, const Rows* rows, uint8_t* resets) {
    if (sizeof(Env) > COPIED) {
        step_env(envs + i, rows, resets);
        return;
    }
    Env env = envs[i];
    step_env(&env, rows, resets);
    envs[i] = env;
}

extern "C" __global__ void device_step(Env* envs, int64_t num_envs, const Rows* rows, uint8_t* resets) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_envs) step_one(envs, i, rows, resets);
}

extern "C" __global__ void device_reset(Env* envs, int64_t num_envs, const Rows* rows) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_envs) reset_env(envs + i, rows);
}

/* Moves the statistics of finished episodes out: for each environment a row of floats in the order of LOG. */
extern "C" __global__ void device_log(Env* envs, int64_t num_envs, Log* logs) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= num_envs) return;
    logs[i] = envs[i].log;
    envs[i].log = (Log){0};
}
#else
void ocean_step(char* envs, int64_t start, int64_t end, const int64_t* addresses) {
    Rows rows = read_rows((Env*)envs + start, addresses);
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++) {
        bind_rows(env, &rows);
        c_step(env);
    }
}

/* Begins an episode in each environment. This does not seed the random numbers; they continue. */
void ocean_reset(char* envs, int64_t start, int64_t end, const int64_t* addresses) {
    Rows rows = read_rows((Env*)envs + start, addresses);
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++)
        reset_env(env, &rows);
}

/* Writes the form of a call's arrays that device_step and device_reset read: sizeof(Rows) bytes. */
void ocean_rows(char* envs, const int64_t* addresses, char* out) {
    Rows rows = read_rows((Env*)envs, addresses);
    memcpy(out, &rows, sizeof(Rows));
}

/* Prepares num_envs environments. Writes agent_offsets: the number of agents before each environment, and after the
 * last. Environment i has random numbers of its own, stream first_env + i of the seed. settings: those of all; or, if
 * `several`, those of each, one after another. Returns NULL, or what is wrong with the first
 * environment whose number of agents is not written. ocean_place follows. */
const char* ocean_init(char* envs, int64_t num_envs, int64_t first_env, uint64_t seed, const double* settings,
                       int64_t several, int64_t* agent_offsets) {
    const double* setting = settings;
    for (int64_t i = 0; i < num_envs; i++) {
        Env* env = (Env*)envs + i;
        memset(env, 0, sizeof(Env));
        uint64_t stream = (uint64_t)(first_env + i);
        env->rng = seed ^ random_word(&stream);
        env->rng = random_word(&env->rng);
        env->agent_offset = (uint32_t)agent_offsets[i];
        if (!several) setting = settings;
#define SETTING_READ(type, name, value, help) env->name = (type)*setting++;
        SETTINGS(SETTING_READ)
        (void)setting;
        const char* problem = c_init(env);
        if (problem) return problem;
        Spaces spaces = spaces_of(env);
        int64_t agents = agent_offsets[i] + spaces.num_agents;
        problem = agents > INT32_MAX ? "more than 2^31 agents" : spaces_problem(spaces);
        if (problem) return problem;
        agent_offsets[i + 1] = agents;
    }
    return NULL;
}

/* Points the arrays of HEAP into one block of memory, each at a multiple of 64 bytes, so that two
 * threads never share a cache line. Returns the block's size. */
int64_t ocean_place(char* envs, int64_t num_envs, int64_t address) {
    int64_t size = 0;
    for (Env* env = (Env*)envs; env < (Env*)envs + num_envs; env++) {
#define HEAP_PLACE(type, name, count) \
    env->name = (type*)(intptr_t)(address + size); \
    size += ((int64_t)(count) * (int64_t)sizeof(type) + 63) / 64 * 64;
        HEAP(HEAP_PLACE)
    }
    return size;
}

/* From now on terminated agents get a final observation too, and not only truncated ones. */
void ocean_every_final(char* envs, int64_t num_envs) {
    for (Env* env = (Env*)envs; env < (Env*)envs + num_envs; env++)
        env->every_final = true;
}

/* Adds the logs of a range of environments to sums, in the order of LOG, and clears them. */
void ocean_log(char* envs, int64_t start, int64_t end, double* sums) {
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++) {
        double* sum = sums;
#define LOG_SUM(name) *sum++ += env->log.name;
        LOG(LOG_SUM)
        env->log = (Log){0};
    }
}

#ifndef WITHOUT_DRAWING /* main.c defines it for a program that is linked without raylib */
void ocean_render(char* envs, int64_t index) {
    c_render((Env*)envs + index);
}
#endif

#ifdef RAYLIB_POINTERS
#include <dlfcn.h>

/* Finds raylib's functions in a library that dlopen opened. Returns NULL, or the name of a missing one. */
const char* ocean_raylib(void* library) {
    (void)library;
#ifdef RAYLIB /* not defined if the header draws nothing and does not include draw.h */
#define RAYLIB_FIND(result, name, arguments) \
    if (!(name = (result(*) arguments)dlsym(library, #name))) return #name;
    RAYLIB(RAYLIB_FIND)
#endif
    return NULL;
}
#endif

#ifdef BY_TURNS
enum { by_turns = 1 };
#else
enum { by_turns = 0 };
#endif
#ifndef FPS
#define FPS (by_turns ? 10 : 30)
#endif
#ifndef KEYS
#define KEYS(KEY)
#endif
#ifndef CONTINUOUS_KEYS
#define CONTINUOUS_KEYS(KEY) KEY(dims - 1, LEFT, -1) KEY(dims - 1, RIGHT, 1) KEY(0, UP, 1) KEY(0, DOWN, -1)
#endif
#ifndef CLICK_COLUMNS
#define CLICK_COLUMNS 0
#endif

/* The keys that KEYS may name, with raylib's numbers. REST is for no key. */
enum {
    OCEAN_KEY_REST = 0, OCEAN_KEY_SPACE = 32, OCEAN_KEY_RIGHT = 262, OCEAN_KEY_LEFT, OCEAN_KEY_DOWN, OCEAN_KEY_UP, OCEAN_KEY_SHIFT = 340, OCEAN_KEY_CONTROL,
    OCEAN_KEY_0 = '0', OCEAN_KEY_1, OCEAN_KEY_2, OCEAN_KEY_3, OCEAN_KEY_4, OCEAN_KEY_5, OCEAN_KEY_6, OCEAN_KEY_7, OCEAN_KEY_8, OCEAN_KEY_9,
    OCEAN_KEY_A = 'A', OCEAN_KEY_B, OCEAN_KEY_C, OCEAN_KEY_D, OCEAN_KEY_E, OCEAN_KEY_F, OCEAN_KEY_G, OCEAN_KEY_H, OCEAN_KEY_I, OCEAN_KEY_J, OCEAN_KEY_K, OCEAN_KEY_L, OCEAN_KEY_M,
    OCEAN_KEY_N, OCEAN_KEY_O, OCEAN_KEY_P, OCEAN_KEY_Q, OCEAN_KEY_R, OCEAN_KEY_S, OCEAN_KEY_T, OCEAN_KEY_U, OCEAN_KEY_V, OCEAN_KEY_W, OCEAN_KEY_X, OCEAN_KEY_Y, OCEAN_KEY_Z,
};

typedef struct {
    int head; /* a discrete action's head, or a continuous action's dimension */
    int code;
    const char* name;
    float value;
} Key;

#define KEY_COUNT(head, key, value) +1
enum { MAX_KEYS = 1 KEYS(KEY_COUNT) CONTINUOUS_KEYS(KEY_COUNT) };

/* Writes the keys of one environment to `keys` and returns their number. REST comes first, so that any key that is
 * down overrides it. Keys for actions that do not exist with these settings are left out. */
static int keys_of(const Env* env, Key* keys) {
    const Spaces spaces = spaces_of(env);
    const int dims = spaces.action_dims;
#define KEY_ENTRY(head, key, value) {head, OCEAN_KEY_##key, #key, (float)(value)},
    const Key discrete[] = {KEYS(KEY_ENTRY) {0}}, continuous[] = {CONTINUOUS_KEYS(KEY_ENTRY) {0}};
    int count = 0;
    for (int with_key = 0; with_key < 2; with_key++) {
        for (const Key* key = dims ? continuous : discrete; key->name; key++) {
            if ((key->code != OCEAN_KEY_REST) != with_key || key->head < 0) continue;
            if (dims ? key->head < dims : key->head < MAX_HEADS && key->value < (float)spaces.action_heads[key->head])
                keys[count++] = *key;
        }
    }
    return count;
}

/* The columns of the board on which a click plays, or 0. */
static int click_columns(const Env* env) {
    return CLICK_COLUMNS;
}

/* Descriptions are JSON. Python reads them, so that nothing is declared twice. A text is valid until this thread's
 * next one. */
static _Thread_local char* json_text;
static _Thread_local size_t json_size;

static void json_add(const char* format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    size_t length = (size_t)vsnprintf(NULL, 0, format, arguments);
    json_text = realloc(json_text, json_size + length + 1);
    vsnprintf(json_text + json_size, length + 1, format, again);
    json_size += length;
    va_end(again);
    va_end(arguments);
}

/* A string with its quotes and backslashes escaped. */
static void json_string(const char* string) {
    json_add("\"");
    for (; *string; string++)
        json_add(strchr("\"\\", *string) ? "\\%c" : "%c", *string);
    json_add("\"");
}

static void json_list(const char* name, const int* numbers, int count) {
    json_add("\"%s\": [", name);
    for (int i = 0; i < count && numbers[i]; i++)
        json_add("%s%d", i ? ", " : "", numbers[i]);
    json_add("]");
}

static const char* json_bool(bool value) {
    return value ? "true" : "false";
}

/* Describes what does not depend on settings: attributes of Python's Library. */
const char* ocean_describe(void) {
    const char *comma = "", *dtype = _Generic((OBSERVATION)0, float: "float32", double: "float64", int8_t: "int8",
        uint8_t: "uint8", int16_t: "int16", uint16_t: "uint16", int32_t: "int32", uint32_t: "uint32");
    json_size = 0;
    json_add("{\"struct_size\": %zu, \"log_offset\": %zu, \"plain_start\": %zu, \"rows_size\": %zu", sizeof(Env),
        offsetof(Env, log), offsetof(Env, rng), sizeof(Rows));
    json_add(", \"observation_dtype\": \"%s\", \"fps\": %d, \"by_turns\": %s", dtype, FPS, json_bool(by_turns));
    json_add(", \"has_valid\": %s, \"has_action_masks\": %s", json_bool(has_valid),
        json_bool(has_action_masks));
    json_add(", \"settings\": {");
#define SETTING_DESCRIBE(type, name, value, help) \
    json_add("%s\"%s\": ", comma, #name); \
    json_add(_Generic((type)0, int: "%.0f", float: "%.16e", bool: json_bool((value) != 0)), (double)(value)); \
    comma = ", ";
    SETTINGS(SETTING_DESCRIBE)
    json_add("}, \"settings_help\": {");
    comma = "";
#define SETTING_HELP(type, name, value, help) \
    json_add("%s\"%s\": ", comma, #name); \
    json_string(help); \
    comma = ", ";
    SETTINGS(SETTING_HELP)
    json_add("}, \"log_fields\": [");
    comma = "";
#define LOG_DESCRIBE(name) \
    json_add("%s\"%s\"", comma, #name); \
    comma = ", ";
    LOG(LOG_DESCRIBE)
    json_add("]}");
    return json_text;
}

/* Describes what depends on the settings, for one initialised environment. */
const char* ocean_spaces(char* envs, int64_t index) {
    Spaces spaces = spaces_of((Env*)envs + index);
    json_size = 0;
    json_add("{\"observation_low\": \"%.17g\", \"observation_high\": \"%.17g\", \"action_dims\": %d, ",
        spaces.observation_low, spaces.observation_high, spaces.action_dims);
    json_list("observation_shape", spaces.observation_shape, MAX_DIMS);
    json_add(", ");
    json_list("action_heads", spaces.action_heads, MAX_HEADS);
    json_add("}");
    return json_text;
}

/* Describes the keys that a person can press in one environment. */
const char* ocean_keys(char* envs, int64_t index) {
    Key keys[MAX_KEYS];
    int count = keys_of((Env*)envs + index, keys);
    json_size = 0;
    json_add("{\"click_columns\": %d, \"keys\": [", click_columns((Env*)envs + index));
    for (int i = 0; i < count; i++)
        json_add("%s[%d, %d, \"%s\", %g]", i ? ", " : "", keys[i].head, keys[i].code, keys[i].name, keys[i].value);
    json_add("]}");
    return json_text;
}

#ifdef OCEAN_BENCH
/* The plain C loop with which bench/bench_env.py compares Python. rows holds eight addresses for each of `horizon`
 * steps. With bind each step has arrays of its own; without it only the actions are others. */
void ocean_bench(char* envs, int64_t num_envs, int64_t steps, const int64_t* rows, int64_t horizon, int64_t bind) {
    Rows first = read_rows((Env*)envs, rows);
    for (Env* env = (Env*)envs; env < (Env*)envs + num_envs; env++)
        bind_rows(env, &first);
    for (int64_t t = 0; t < steps; t++) {
        const int64_t* row = rows + t % horizon * 8;
        if (bind) {
            ocean_step(envs, 0, num_envs, row);
            continue;
        }
        for (Env* env = (Env*)envs; env < (Env*)envs + num_envs; env++) {
            env->actions = (const int32_t*)((const char*)row[1] + env->agent_offset * first.action_bytes);
            c_step(env);
        }
    }
}
#endif
#endif /* OCEAN_DEVICE */
