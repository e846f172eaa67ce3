/* Freeway: a chicken crosses ten lanes of traffic, again and again, for two minutes and sixteen
 * seconds. Each time it reaches the other side it scores 1 and begins again below. That is the
 * reward; reward_lane may be added. A car that hits the chicken carries it a lane back or, with
 * `hard`, all the way; it cannot move for a moment. The five lower lanes drive to the right, the
 * five upper ones to the left. The end of the time is a rule of the game, so it is a termination.
 *
 *     level   traffic
 *     0       one car in each lane
 *     1       two cars, a quarter faster
 *     2       a truck, half as fast again
 *     3       three cars, three quarters faster
 *     4 .. 7  the same, but each lane changes its speed when its first car comes round, to 0.6 ..
 *             1.6 of its own
 *
 *     observation
 *     0               height of the chicken, 0..1
 *     1               1 while it was hit and cannot move
 *     2               time left, 0..1
 *     3               how far it is through its lane, 0..1
 *     4 + 4 k ..      six lanes, from the one below the chicken's to four above it: the lane's
 *                     speed (to the right, over 1 width a second), and how far its three cars are
 *                     to the right of the chicken, in half widths, -1..1 around. A missing car is
 *                     the first one again. Beside the road the speed is 0, and the cars are 1.
 *
 * Actions: none, up, down. A tick is 1/60 s. An action lasts frameskip ticks.
 * perf is the score as a share of the crossings that the time allows without traffic. */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(hits)
#define SETTINGS(X) \
    X(int, frameskip, 4, "ticks of 1/60 s that an action lasts") \
    X(int, level, 0, "traffic, 0..7") \
    X(bool, hard, false, "a hit carries back all the way") \
    X(float, seconds, 136.0, "of an episode") \
    X(float, chicken_speed, 3.6, "lanes a second") \
    X(float, stun, 0.5, "seconds after a hit in which the chicken cannot move") \
    X(float, reward_lane, 0.0, \
      "for a lane upwards, and against one downwards: random play never arrives")
#define FPS 15
#define KEYS(KEY) KEY(0, UP, 1) KEY(0, DOWN, 2)
#include "env.h"
#include "draw.h"

enum { LANES = 10, CARS = 3, BELOW = 1, SEEN = 6, OBSERVATIONS = 4 + SEEN * (1 + CARS) };
#define GOAL 11.0f      /* the chicken walks from 0 to here; lane k is around 1 + k */
#define CHICKEN_X 0.33f /* widths */
#define CHICKEN 0.025f  /* its width */
#define CAR 0.06f
#define TRUCK 0.14f
static const float lane_speed[LANES] = {
    0.12f, 0.15f, 0.19f, 0.24f, 0.32f, 0.32f, 0.24f, 0.19f, 0.15f, 0.12f
};

struct Env {
    ENV_COMMON
    int cars; /* in a lane */
    float length; /* of a car, widths */
    float factor, reach; /* factor: of the speeds; reach: how near a car's middle hits */
    float at[LANES];    /* the middle of each lane's first car, 0..1 */
    float speed[LANES]; /* widths a tick, below 0 to the left */
    float y, sum; /* sum: rewards of the episode */
    int stunned; /* ticks left */
    int tick, ticks; /* so far, and of an episode */
    int steps, score, hits;
};

static const char* c_init(Env* env) {
    if (env->frameskip < 1 || env->frameskip > 60) return "frameskip must lie within 1..60";
    if (env->level < 0 || env->level > 7) return "level must lie within 0..7";
    if (!(env->seconds > 0 && env->seconds <= 100000)) return "seconds must lie within 0..100000";
    if (!(env->chicken_speed > 0 && env->chicken_speed <= 30))
        return "chicken_speed must lie within 0..30";
    if (!(env->stun >= 0 && env->stun <= 60)) return "stun must lie within 0..60";
    static const int cars[4] = {1, 2, 1, 3};
    env->cars = cars[env->level % 4];
    env->length = env->level % 4 == 2 ? TRUCK : CAR;
    env->factor = 1 + 0.25f * (float)(env->level % 4);
    env->reach = (env->length + CHICKEN) / 2;
    env->ticks = (int)ceilf(env->seconds * 60);
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {3},
    };
}

/* From the chicken to the k-th car of a lane, -0.5..0.5 around the screen. */
static inline float way_to(const Env* env, int lane, int k) {
    float way = env->at[lane] + 0.25f * (float)k - CHICKEN_X;
    way -= way >= 1 ? 1.0f : 0.0f;
    return way >= 0.5f ? way - 1 : way < -0.5f ? way + 1 : way;
}

static void write_observation(const Env* env, float* observation) {
    *observation++ = env->y / GOAL;
    *observation++ = env->stunned > 0;
    *observation++ = 1 - (float)env->tick / (float)env->ticks;
    int own = (int)(env->y + 0.5f) - 1; /* -1 below the road */
    *observation++ = env->y - 0.5f - (float)own;
    for (int lane = own - BELOW; lane < own - BELOW + SEEN; lane++) {
        bool road = lane >= 0 && lane < LANES;
        *observation++ = road ? clampf(env->speed[lane] * 60, -1, 1) : 0;
        for (int k = 0; k < CARS; k++)
            *observation++ = road ? 2 * way_to(env, lane, k < env->cars ? k : 0) : 1;
    }
}

static void draw_speed(Env* env, int lane) {
    float speed = lane_speed[lane] * env->factor / 60 * (lane < LANES / 2 ? 1.0f : -1.0f);
    env->speed[lane] = env->level < 4 ? speed : speed * random_float(&env->rng, 0.6f, 1.6f);
}

static void c_reset(Env* env) {
    for (int lane = 0; lane < LANES; lane++) {
        env->at[lane] = random_float(&env->rng, 0, 1);
        draw_speed(env, lane);
    }
    env->y = env->sum = 0;
    env->stunned = env->tick = env->steps = env->score = env->hits = 0;
    write_observation(env, env->observations);
}

/* One tick; returns whether the chicken arrived. */
static bool tick(Env* env, float push) {
    for (int lane = 0; lane < LANES; lane++) {
        env->at[lane] += env->speed[lane];
        if (env->at[lane] >= 1 || env->at[lane] < 0) {
            env->at[lane] -= env->at[lane] >= 1 ? 1.0f : -1.0f;
            if (env->at[lane] >= 1) env->at[lane] = 0; /* 1 minus very little rounds to 1 */
            if (env->level >= 4) draw_speed(env, lane);
        }
    }
    if (env->stunned > 0) env->stunned--;
    else env->y = maxf(env->y + push * env->chicken_speed / 60, 0);
    int lane = (int)(env->y - 0.5f);
    if (env->y < 0.5f || lane >= LANES) {
        if (env->y < GOAL) return false;
        env->y = 0;
        return true;
    }
    for (int k = 0; k < env->cars; k++) {
        if (env->stunned > 0 || fabsf(way_to(env, lane, k)) >= env->reach) continue;
        env->y = env->hard ? 0 : maxf(env->y - 1, 0);
        env->stunned = (int)(env->stun * 60);
        env->hits++;
    }
    return false;
}

static void c_step(Env* env) {
    float push = (float)((env->actions[0] == 1) - (env->actions[0] == 2));
    int arrived = 0;
    float before = env->y;
    bool over = false;
    for (int i = 0; i < env->frameskip && !over; i++) {
        arrived += tick(env, push);
        over = ++env->tick == env->ticks;
    }
    env->steps++;
    env->score += arrived;
    env->rewards[0] = (float)arrived + env->reward_lane * (env->y - before + GOAL * (float)arrived);
    env->sum += env->rewards[0];
    env->terminals[0] = over;
    env->truncations[0] = 0;
    if (!over) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    float most = maxf((float)env->ticks / 60 * env->chicken_speed / GOAL, 1);
    LOG_EPISODE(env, minf((float)env->score / most, 1), env->score, env->sum, env->steps);
    env->log.hits += (float)env->hits;
    c_reset(env);
}

static void c_render(Env* env) {
    enum { WIDTH = 960, LANE = 56, TOP = 40, HEIGHT = TOP + 12 * LANE };
    static const Color colors[] = {
        {226, 84, 84, 255}, {250, 190, 60, 255}, {90, 200, 120, 255}, {0, 187, 204, 255},
        {170, 130, 240, 255}, {240, 140, 190, 255}, {150, 200, 255, 255}
    };
    draw_begin(WIDTH, HEIGHT, "freeway");
    DrawRectangle(0, TOP + LANE, WIDTH, LANES * LANE, DRAW_PANEL);
    for (int lane = 1; lane < LANES; lane++) {
        int y = TOP + (LANES + 1 - lane) * LANE - 1;
        bool middle = lane == LANES / 2;
        for (int x = 0; x < WIDTH; x += middle ? WIDTH : 48)
            DrawRectangle(x, y, middle ? WIDTH : 24, middle ? 4 : 2,
                          middle ? DRAW_GOLD : DRAW_GREY);
    }
    for (int lane = 0; lane < LANES; lane++) {
        float y = TOP + LANE * (float)(LANES - lane) + LANE * 0.2f, length = env->length * WIDTH;
        for (int k = 0; k < env->cars; k++) {
            float x = (CHICKEN_X + way_to(env, lane, k)) * WIDTH - length / 2;
            bool right = env->speed[lane] > 0;
            for (int turn = -1; turn <= 1; turn++) { /* a car at the edge shows on both sides */
                float left = x + (float)(turn * WIDTH);
                DrawRectangleRec((Rectangle){left, y, length, LANE * 0.6f}, colors[(lane + k) % 7]);
                float glass = right ? left + length * 0.62f : left + length * 0.2f;
                DrawRectangleRec((Rectangle){glass, y + 5, length * 0.18f, LANE * 0.6f - 10},
                                 DRAW_BACKGROUND);
            }
        }
    }
    Vector2 chicken = {CHICKEN_X * WIDTH, TOP + LANE * (LANES + 1.5f) - env->y * LANE};
    DrawCircleV(chicken, 14, env->stunned > 0 ? DRAW_RED : DRAW_WHITE);
    DrawCircleV((Vector2){chicken.x, chicken.y - 13}, 8, env->stunned > 0 ? DRAW_RED : DRAW_WHITE);
    draw_triangle((Vector2){chicken.x - 4, chicken.y - 19},
                  (Vector2){chicken.x + 4, chicken.y - 19}, (Vector2){chicken.x, chicken.y - 27},
                  DRAW_GOLD);
    draw_format(16, 8, 40, DRAW_GOLD, "%d", env->score);
    DrawRectangle(120, 20, (int)(800 * (1 - (float)env->tick / (float)env->ticks)), 12, DRAW_GREEN);
    draw_end();
}
