/* Compiled once for each environment with -DENV_HEADER='"squared/squared.h"'; exports what ocean/__init__.py calls.
 * envs is an array of Env. rows holds the addresses of agent 0 of the whole vector in the rows in question, in the
 * order of the leading block: observations, actions, rewards, terminals, truncations, final_observations, valid,
 * action_masks; 0 where there is none. ocean_step and ocean_reset may run in several threads on disjoint ranges. */
#include ENV_HEADER

#include <stddef.h>

enum { NUM_ROWS = 8 };
_Static_assert(offsetof(Env, agent_offset) == NUM_ROWS * sizeof(int64_t), "the struct must begin with ENV_COMMON");

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

/* Bytes that one agent takes in each row; 0 for an absent row, whose pointer so stays NULL. */
typedef struct {
    uint32_t bytes[NUM_ROWS];
} Strides;

static Strides strides_of(const Env* env, const int64_t* rows) {
    Spaces spaces = spaces_of(env);
    uint32_t observation = sizeof(OBSERVATION), heads = 0, actions = 0;
    for (int i = 0; i < MAX_DIMS && spaces.observation_shape[i]; i++)
        observation *= (uint32_t)spaces.observation_shape[i];
    for (; heads < MAX_HEADS && spaces.action_heads[heads]; heads++)
        actions += (uint32_t)spaces.action_heads[heads];
    uint32_t action = 4 * (heads ? heads : (uint32_t)spaces.action_dims);
    Strides strides = {{observation, action, sizeof(float), 1, 1, observation, 1, actions}};
    for (int i = 0; i < NUM_ROWS; i++)
        if (!rows[i]) strides.bytes[i] = 0;
    return strides;
}

/* Eight multiply-adds and one store of a cache line: cheap enough to do on every step. */
static inline void bind_rows(Env* env, const int64_t* rows, const Strides* strides) {
    int64_t pointers[NUM_ROWS];
    for (int i = 0; i < NUM_ROWS; i++)
        pointers[i] = rows[i] + (int64_t)((uint64_t)env->agent_offset * strides->bytes[i]);
    memcpy(env, pointers, sizeof(pointers));
}

void ocean_step(char* envs, int64_t start, int64_t end, const int64_t* rows) {
    Strides strides = strides_of((Env*)envs + start, rows);
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++) {
        bind_rows(env, rows, &strides);
        c_step(env);
    }
}

/* Begins an episode in each environment, from where its random numbers stand: nothing is seeded here. */
void ocean_reset(char* envs, int64_t start, int64_t end, const int64_t* rows) {
    Strides strides = strides_of((Env*)envs + start, rows);
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++) {
        size_t agents = (size_t)spaces_of(env).num_agents;
        bind_rows(env, rows, &strides);
        memset(env->rewards, 0, agents * sizeof(float));
        memset(env->terminals, 0, agents);
        memset(env->truncations, 0, agents);
        if (env->valid) memset(env->valid, 1, agents);
        if (env->action_masks) memset(env->action_masks, 1, agents * strides.bytes[7]);
        c_reset(env);
    }
}

/* Readies environments [start, end) and continues the prefix sum agent_offsets (one element more than environments).
 * Environment i draws from its own stream, number first_env + i of the seed. Returns NULL or what is wrong. */
const char* ocean_init(char* envs, int64_t start, int64_t end, int64_t first_env, uint64_t seed, const double* settings,
                       int64_t* agent_offsets) {
    for (int64_t i = start; i < end; i++) {
        Env* env = (Env*)envs + i;
        memset(env, 0, sizeof(Env));
        uint64_t stream = (uint64_t)(first_env + i);
        env->rng = seed ^ random_word(&stream);
        env->rng = random_word(&env->rng);
        env->agent_offset = (uint32_t)agent_offsets[i];
        const double* setting = settings;
#define SETTING_READ(type, name, value, help) env->name = (type)*setting++;
        SETTINGS(SETTING_READ)
        const char* problem = c_init(env);
        agent_offsets[i + 1] = agent_offsets[i] + (problem ? 0 : spaces_of(env).num_agents);
        if (!problem && agent_offsets[i + 1] > INT32_MAX) problem = "more than 2^31 agents";
        if (problem) {
            for (int64_t k = start; k < i; k++)
                c_close((Env*)envs + k);
            return problem;
        }
    }
    return NULL;
}

/* Sums the statistics of finished episodes over a range into sums (in the order of LOG) and starts them afresh. */
void ocean_log(char* envs, int64_t start, int64_t end, double* sums) {
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++) {
        double* sum = sums;
#define LOG_SUM(name) *sum++ += env->log.name;
        LOG(LOG_SUM)
        env->log = (Log){0};
    }
}

/* With heap memory an environment supplies
 *     static int64_t c_save(Env* env, char* out)    its bytes, also written to out unless that is NULL
 *     static void c_load(Env* env, const char* in)
 * for what its HEAP pointers point to; everything from rng on is plain data and handled here. */
static const size_t plain_start = offsetof(Env, rng), plain_size = sizeof(Env) - offsetof(Env, rng);

int64_t ocean_save(char* envs, int64_t index, char* out) {
    Env* env = (Env*)envs + index;
    int64_t size = (int64_t)plain_size;
    if (out) memcpy(out, (char*)env + plain_start, plain_size);
#ifdef HAS_HEAP
    size += c_save(env, out ? out + plain_size : NULL);
#endif
    return size;
}

void ocean_load(char* envs, int64_t index, const char* in) {
    Env* env = (Env*)envs + index;
    memcpy((char*)env + plain_start, in, plain_size);
#ifdef HAS_HEAP
    c_load(env, in + plain_size);
#endif
}

void ocean_render(char* envs, int64_t index) {
    c_render((Env*)envs + index);
}

void ocean_close(char* envs, int64_t start, int64_t end) {
    for (Env* env = (Env*)envs + start; env < (Env*)envs + end; env++)
        c_close(env);
}

/* The two descriptions are JSON, so that Python reads what the header declares and nothing is declared twice. */
typedef struct {
    char* text;
    size_t size, used;
} Writer;

#define WRITE(writer, ...) \
    do { \
        int length = snprintf((writer)->text + (writer)->used, (writer)->size - (writer)->used, __VA_ARGS__); \
        (writer)->used += (size_t)length; \
        if ((writer)->used >= (writer)->size) return -1; \
    } while (0)

/* What holds for the environment whatever its settings are. Returns -1 where the buffer is too small. */
int ocean_describe(char* text, int64_t size) {
    Writer w = {text, (size_t)size, 0};
    const char* dtype = _Generic((OBSERVATION)0, float: "float32", double: "float64", int8_t: "int8", uint8_t: "uint8",
        int16_t: "int16", uint16_t: "uint16", int32_t: "int32", uint32_t: "uint32");
    WRITE(&w, "{\"struct_size\": %zu, \"observation_dtype\": \"%s\"", sizeof(Env), dtype);
    WRITE(&w, ", \"has_valid\": %d, \"has_action_masks\": %d, \"settings\": [", has_valid, has_action_masks);
    const char* comma = "";
    (void)comma;
#define SETTING_DESCRIBE(type, name, value, help) \
    WRITE(&w, "%s[\"%s\", \"%s\", %.17g, \"%s\"]", comma, #name, #type, (double)(value), help); \
    comma = ", ";
    SETTINGS(SETTING_DESCRIBE)
    WRITE(&w, "], \"log_fields\": [");
    comma = "";
#define LOG_DESCRIBE(name) \
    WRITE(&w, "%s\"%s\"", comma, #name); \
    comma = ", ";
    LOG(LOG_DESCRIBE)
    WRITE(&w, "]}");
    return 0;
}

/* What depends on the settings of one initialised environment. */
int ocean_spaces(char* envs, int64_t index, char* text, int64_t size) {
    Writer w = {text, (size_t)size, 0};
    Spaces spaces = spaces_of((Env*)envs + index);
    WRITE(&w, "{\"observation_low\": \"%.17g\", \"observation_high\": \"%.17g\", \"action_dims\": %d",
          spaces.observation_low, spaces.observation_high, spaces.action_dims);
    WRITE(&w, ", \"observation_shape\": [");
    for (int i = 0; i < MAX_DIMS && spaces.observation_shape[i]; i++)
        WRITE(&w, "%s%d", i ? ", " : "", spaces.observation_shape[i]);
    WRITE(&w, "], \"action_heads\": [");
    for (int i = 0; i < MAX_HEADS && spaces.action_heads[i]; i++)
        WRITE(&w, "%s%d", i ? ", " : "", spaces.action_heads[i]);
    WRITE(&w, "]}");
    return 0;
}

#ifdef OCEAN_BENCH
/* The plain C loop that tests/bench_env.py compares with: pointers are set once, only the action row moves on.
 * row and agent are the 4-byte elements that all agents and one agent take in a row of actions. */
void ocean_bench(char* envs, int64_t num_envs, int64_t steps, const int32_t* actions, int64_t horizon, int64_t row,
                 int64_t agent) {
    for (int64_t t = 0; t < steps; t++) {
        for (Env* env = (Env*)envs; env < (Env*)envs + num_envs; env++) {
            env->actions = actions + (t % horizon) * row + env->agent_offset * agent;
            c_step(env);
        }
    }
}
#endif
