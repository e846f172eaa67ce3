/* One environment as a program of its own, played by a trained policy (policy.h), at random or by keyboard.
 *
 *     cc -O3 -I ocean -DENV_HEADER='"breakout/breakout.h"' ocean/main.c -o breakout -lm
 *     ./breakout policy.bin --episodes 100 --seed 7 --deterministic
 *     ./breakout frameskip=2 balls=0                                 settings by name; without a policy, at random
 *
 * It prints the means of the log over some episodes. With -DDRAW and raylib (or tools/export.py's canvas.js, in a browser) it
 * shows the game: press a key of the game (the header's KEYS) to play the first agent, and Enter to stop playing it. */
#ifndef DRAW
#define WITHOUT_DRAWING
#endif
#include "binding.c"
#include "policy.h"

enum { DEMO_MAX_ACTION = 64 };
static struct {
    Env* env;
    Spaces spaces;
    int heads; /* numbers in an action */
    size_t observation_bytes, mask_bytes; /* of one agent */
    int64_t rows[8];
    void* actions; /* (agents, heads) int32 or float: both have four bytes */
    uint8_t* ended; /* (agents,): 1 if the last step ended an episode */
    Policy policy;
    float* state; /* (agents, policy.state_size); NULL: act at random */
    uint64_t seed, step, random;
    bool deterministic, by_player;
    Log sum;
    float episode_return; /* agent 0's rewards in this episode so far */
} demo;

static void demo_fail(const char* problem, const char* detail) {
    fprintf(stderr, "%s: %s %s\n", ENV_HEADER, problem, detail);
    exit(1);
}

static void* demo_new(size_t count, size_t size) {
    void* memory = calloc(count, size);
    if (!memory) demo_fail("there is not enough memory", "");
    return memory;
}

/* Sets a setting from text of the form name=value. */
static void demo_set(double* settings, const char* text) {
    const char* equals = strchr(text, '=');
    size_t length = (size_t)(equals - text);
    double* setting = settings;
#define SETTING_SET(type, name, value, help) \
    if (strlen(#name) == length && !strncmp(text, #name, length)) { \
        char* end = NULL; \
        *setting = !strcmp(equals, "=true") ? 1 : !strcmp(equals, "=false") ? 0 : strtod(equals + 1, &end); \
        if (end && (*end || end == equals + 1)) demo_fail("a setting wants a number, true or false, got", text); \
        return; \
    } \
    setting++;
    SETTINGS(SETTING_SET)
    (void)setting, (void)length;
    demo_fail("there is no such setting:", text);
}

static uint64_t demo_number(const char* option, const char* text) {
    if (!*text || text[strspn(text, "0123456789")]) demo_fail("a whole number must follow", option);
    return strtoull(text, NULL, 10);
}

static void demo_start(const double* settings) {
    int64_t offsets[2] = {0};
    demo.env = aligned_alloc(64, (sizeof(Env) + 63) / 64 * 64);
    if (!demo.env) demo_fail("there is not enough memory", "");
    const char* problem = ocean_init((char*)demo.env, 1, 0, demo.seed, settings, 0, offsets);
    if (problem) demo_fail(problem, "");
    size_t heap = (size_t)ocean_place((char*)demo.env, 1, 0);
    void* block = heap ? demo_new(heap, 1) : NULL;
    ocean_place((char*)demo.env, 1, (int64_t)(intptr_t)block);
    demo.spaces = spaces_of(demo.env);
    demo.random = demo.seed + 1;

    size_t agents = (size_t)demo.spaces.num_agents;
    demo.observation_bytes = sizeof(OBSERVATION);
    for (int i = 0; i < MAX_DIMS && demo.spaces.observation_shape[i]; i++)
        demo.observation_bytes *= (size_t)demo.spaces.observation_shape[i];
    for (int i = 0; i < MAX_HEADS && demo.spaces.action_heads[i]; i++, demo.heads++)
        demo.mask_bytes += (size_t)demo.spaces.action_heads[i];
    if (!demo.heads) demo.heads = demo.spaces.action_dims;
    if (demo.heads > DEMO_MAX_ACTION) demo_fail("an action has more numbers than DEMO_MAX_ACTION", "");
    demo.actions = demo_new(agents * (size_t)demo.heads, 4);
    demo.ended = demo_new(agents, 1);
    memset(demo.ended, 1, agents);
    void* rows[8] = {demo_new(agents, demo.observation_bytes), demo.actions, demo_new(agents, sizeof(float)),
                     demo_new(agents, 1), demo_new(agents, 1), NULL, has_valid ? demo_new(agents, 1) : NULL,
                     has_action_masks ? demo_new(agents, demo.mask_bytes) : NULL};
    for (int i = 0; i < 8; i++)
        demo.rows[i] = (int64_t)(intptr_t)rows[i];
    ocean_reset((char*)demo.env, 0, 1, demo.rows);
}

/* Loads a policy's file. It has to fit this environment. */
static void demo_load(const char* path) {
    Policy* policy = &demo.policy;
    const char* problem = policy_load(policy, path);
    if (problem) demo_fail(problem, path);
    const PolicyType type = _Generic((OBSERVATION)0, float: POLICY_FLOAT32, double: POLICY_FLOAT64, int8_t: POLICY_INT8,
        uint8_t: POLICY_UINT8, int16_t: POLICY_INT16, uint16_t: POLICY_UINT16, int32_t: POLICY_INT32,
        uint32_t: POLICY_UINT32);
    bool fits = policy->type == (int)type && demo.observation_bytes == (size_t)policy->inputs * sizeof(OBSERVATION) &&
                policy->dims == demo.spaces.action_dims && (policy->dims || policy->heads == demo.heads);
    for (int i = 0; i < policy->heads && fits; i++)
        fits = policy->head_sizes[i] == demo.spaces.action_heads[i];
    if (!fits) demo_fail("with these settings the environment has other observations or actions than", path);
    demo.state = policy_new_state(policy, demo.spaces.num_agents);
    if (!demo.state) demo_fail("there is not enough memory", "");
}

static void demo_act(void) {
    for (int i = 0; i < demo.spaces.num_agents; i++) {
        int32_t* action = (int32_t*)demo.actions + i * demo.heads;
        const char* observation = (char*)(intptr_t)demo.rows[0] + (size_t)i * demo.observation_bytes;
        const uint8_t* mask = has_action_masks ? (uint8_t*)(intptr_t)demo.rows[7] + (size_t)i * demo.mask_bytes : NULL;
        if (has_valid && !((uint8_t*)(intptr_t)demo.rows[6])[i]) continue; /* an inactive agent keeps its state and its action */
        if (demo.state) {
            policy_forward(&demo.policy, observation, demo.ended[i], demo.state + i * demo.policy.state_size);
            policy_act(&demo.policy, mask, demo.seed, (uint32_t)i, demo.step, demo.deterministic, action);
        } else if (demo.spaces.action_dims) {
            for (int k = 0; k < demo.heads; k++)
                ((float*)action)[k] = random_float(&demo.random, -1, 1);
        } else {
            for (int k = 0; k < demo.heads; k++) {
                int size = demo.spaces.action_heads[k];
                do action[k] = random_int(&demo.random, size);
                while (mask && !mask[action[k]] && random_int(&demo.random, 64)); /* about 64 tries, as a mask may forbid all */
                if (mask) mask += size;
            }
        }
    }
}

static void demo_step(void) {
    ocean_step((char*)demo.env, 0, 1, demo.rows);
    demo.step++;
    const uint8_t *terminals = (uint8_t*)(intptr_t)demo.rows[3], *truncations = (uint8_t*)(intptr_t)demo.rows[4];
    demo.episode_return = (demo.ended[0] ? 0 : demo.episode_return) + ((float*)(intptr_t)demo.rows[2])[0];
    for (int i = 0; i < demo.spaces.num_agents; i++)
        demo.ended[i] = terminals[i] | truncations[i];
#define DEMO_SUM(name) demo.sum.name += demo.env->log.name;
    LOG(DEMO_SUM)
    demo.env->log = (Log){0};
}

#ifdef DRAW
_Bool WindowShouldClose(void);
void SetTargetFPS(int fps);
_Bool IsKeyDown(int key);
_Bool IsKeyPressed(int key);
_Bool IsMouseButtonPressed(int button);
int GetMouseX(void);
int GetMouseY(void);

enum { DEMO_ENTER = 257 };

/* The player's action; false if no key of the game is down. */
static bool demo_player(int32_t* action) {
    bool pressed = false;
    Key keys[MAX_KEYS];
    int count = keys_of(demo.env, keys), columns = click_columns(demo.env);
    for (const Key* key = keys; key < keys + count; key++) {
        if (key->code != OCEAN_KEY_REST && !(by_turns ? IsKeyPressed(key->code) : IsKeyDown(key->code))) continue;
        if (demo.spaces.action_dims) memcpy(&action[key->head], &key->value, sizeof(float));
        else action[key->head] = (int32_t)key->value;
        pressed |= key->code != OCEAN_KEY_REST;
    }
    int side = columns ? GetScreenWidth() / columns : 0;
    if (side && IsMouseButtonPressed(0) && GetMouseX() / side < columns) {
        int cell = GetMouseY() / side * columns + GetMouseX() / side;
        pressed = cell < demo.spaces.action_heads[0];
        if (pressed) action[0] = cell;
    }
    return pressed;
}

/* One step and its picture. There is no step while the game waits for the player's key. */
void demo_frame(void) {
    int32_t action[DEMO_MAX_ACTION] = {0};
    if (IsKeyPressed(DEMO_ENTER)) demo.by_player = false;
    bool pressed = demo_player(action);
    demo.by_player |= pressed;
    if (pressed || !(demo.by_player && by_turns)) {
        demo_act();
        if (demo.by_player) memcpy(demo.actions, action, (size_t)demo.heads * 4);
        demo_step();
    }
    c_render(demo.env);
}

/* JavaScript on a page calls these too. */
int demo_fps(void) { return FPS; }
int demo_steps(void) { return (int)demo.step; }
int demo_episodes(void) { return (int)demo.sum.n; }
float demo_score(void) { return demo.sum.n > 0 ? demo.sum.score / demo.sum.n : 0; }
float demo_return(void) { return demo.episode_return; }
int demo_by_player(void) { return demo.by_player; }
void demo_give_back(void) { demo.by_player = false; }
void demo_restart(void) {
    ocean_reset((char*)demo.env, 0, 1, demo.rows);
    memset(demo.ended, 1, (size_t)demo.spaces.num_agents);
    demo.episode_return = 0;
}
#endif

int main(int argc, char** argv) {
    double settings[] = {
#define SETTING_DEFAULT(type, name, value, help) (double)(value),
        SETTINGS(SETTING_DEFAULT) 0};
    const char* path = NULL;
    uint64_t episodes = 100, limit = 10000000;
#ifdef TRAINED /* "name=value", ...: what an exported policy was trained with, unlike the header's defaults */
    const char* trained[] = {TRAINED};
    for (size_t i = 0; i < sizeof trained / sizeof *trained; i++) demo_set(settings, trained[i]);
#endif
    for (int i = 1; i < argc; i++) {
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--deterministic")) demo.deterministic = true;
        else if (!strcmp(argv[i], "--seed")) demo.seed = demo_number(argv[i], value), i++;
        else if (!strcmp(argv[i], "--episodes")) episodes = demo_number(argv[i], value), i++;
        else if (!strcmp(argv[i], "--steps")) limit = demo_number(argv[i], value), i++;
        else if (strchr(argv[i], '=')) demo_set(settings, argv[i]);
        else if (argv[i][0] != '-' && !path) path = argv[i];
        else demo_fail("options: --episodes N --steps N --seed N --deterministic name=value policy.bin; got", argv[i]);
    }
    demo_start(settings);
    if (path) demo_load(path);
#ifndef DRAW
    while (demo.sum.n < (float)episodes && demo.step < limit) {
        demo_act();
        demo_step();
    }
    if (demo.sum.n == 0) demo_fail("no episode ended; give more --steps", "");
    if (demo.sum.n < (float)episodes) fprintf(stderr, "ended after %llu steps; for all episodes give more --steps\n",
                                              (unsigned long long)limit);
#define DEMO_PRINT(name) printf("%-20s %g\n", #name, demo.sum.name / (strcmp(#name, "n") ? demo.sum.n : 1));
    LOG(DEMO_PRINT)
    printf("%-20s %llu\n", "steps", (unsigned long long)demo.step);
#elif !defined(__EMSCRIPTEN__) /* a browser calls demo_frame by itself */
    (void)episodes, (void)limit;
    c_render(demo.env); /* the first frame opens the window */
    SetTargetFPS(FPS);
    float shown = 0;
    while (!WindowShouldClose()) {
        demo_frame();
        if (demo.sum.n != shown) printf("%d episodes, mean score %g\n", demo_episodes(), demo_score());
        shown = demo.sum.n;
    }
    CloseWindow();
#endif
    return 0;
}
