/* Lander: bring a spacecraft with a main engine and two side engines down between the flags. Size,
 * engines, rewards and observations are those of Gymnasium's LunarLander-v3, as far as that goes
 * without Box2D: here the craft is one rigid body with two feet. The feet touch the ground with
 * friction and without a bounce (impulses, a few rounds a step). The craft is lost if its hull
 * touches the ground, if a foot strikes harder than max_impact, or if it leaves the view at a side.
 * It has landed if both feet stand still for half a second. Both end the episode, with -100 and
 * +100. After max_steps it is truncated.
 *
 * The rest of the reward is the change of
 *     -100 distance to the pad - 100 speed - 100 |angle| + 10 for each foot on the ground
 * all as observed, less fuel: 0.3 a step of the main engine, 0.03 of a side engine.
 *
 *     observation
 *     0, 1   position from the pad, over half the width and half the height of the view
 *     2, 3   velocity, over 5 and 7.5 m/s
 *     4, 5   angle (rad, positive to the left) and angular velocity (over 2.5 rad/s)
 *     6, 7   1 if the left, the right foot touches the ground
 *
 * Actions: none, push to the left (which also turns to the left), main engine, push to the right.
 * With continuous: two in -1..1, the main engine (above 0: from half to all of its power) and the
 * push to the side (below -0.5 left, above 0.5 right). */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(bool, continuous, false, "two throttles in -1..1 instead of none, left, main, right") \
    X(bool, wind, false, "wind and turbulence") \
    X(int, max_steps, 1000, "steps after which the episode is truncated") \
    X(float, reward_scale, 1.0, \
      "factor of the rewards that the agent gets; the log keeps the true ones") \
    X(float, gravity, 10.0, "m/s^2") \
    X(float, main_engine, 17.5, "acceleration by the main engine, m/s^2") \
    X(float, side_engine, 2.4, "acceleration by a side engine, m/s^2") \
    X(float, side_torque, 6.7, "angular acceleration by a side engine, rad/s^2") \
    X(float, wind_power, 3.0, "largest acceleration by the wind, m/s^2") \
    X(float, turbulence_power, 1.5, "largest angular acceleration by the turbulence, rad/s^2") \
    X(float, start_speed, 4.0, "largest speed in each direction in the beginning, m/s") \
    X(float, max_impact, 3.0, "speed towards the ground that a foot bears, m/s") \
    X(float, friction, 0.6, "of the feet on the ground")
#define FPS 50
#define KEYS(KEY) KEY(0, LEFT, 1) KEY(0, UP, 2) KEY(0, RIGHT, 3)
#include "env.h"
#include "draw.h"

enum { CHUNKS = 11, FEET = 2, HULL = 6, ROUNDS = 6, STILL = 25 };
#define HALF_WIDTH 10.0f      /* of the view, m */
#define HALF_HEIGHT 6.6666667f
#define CHUNK 2.0f            /* between two points of the ground, m */
#define STEP 0.02f            /* seconds */
#define GYRATION 0.2f         /* moment of inertia over mass, m^2 */
#define FOOT_X 0.75f
#define FOOT_Y 0.85f          /* below the centre */
/* The hull's corners around its centre, m. */
static const float hull_x[HULL] = {-0.467f, -0.567f, -0.567f, 0.567f, 0.567f, 0.467f};
static const float hull_y[HULL] = {0.567f, 0, -0.333f, -0.333f, 0, 0.567f};

struct Env {
    ENV_COMMON
    float x, y, vx, vy, angle, omega; /* the origin is the pad's middle, y points up */
    float ground[CHUNKS + 1];         /* heights, every CHUNK from -HALF_WIDTH */
    bool touches[FEET];
    float shaping, total;
    float main, side; /* the engines, 0..1 and -1..1, shown by c_render */
    int still;        /* steps for which it has stood still on both feet */
    int tick, wind_tick, twist_tick;
};

static const char* c_init(Env* env) {
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (!(env->gravity >= 0 && env->gravity <= 100)) return "gravity must lie within 0..100";
    if (!(env->main_engine > 0 && env->main_engine <= 500 && env->side_engine >= 0 &&
          env->side_engine <= 500))
        return "main_engine and side_engine must lie within 0..500";
    if (!(env->friction >= 0 && env->max_impact > 0))
        return "friction must be 0 or more, max_impact above 0";
    return NULL;
}

/* No element is cut, as in Gymnasium. */
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {8},
        .observation_low = -INFINITY,
        .observation_high = INFINITY,
    };
    if (env->continuous) spaces->action_dims = 2;
    else spaces->action_heads[0] = 4;
}

static void write_observation(const Env* env, float* observation) {
    observation[0] = env->x / HALF_WIDTH;
    observation[1] = (env->y - FOOT_Y) / HALF_HEIGHT;
    observation[2] = env->vx * (HALF_WIDTH / 50);
    observation[3] = env->vy * (HALF_HEIGHT / 50);
    observation[4] = env->angle;
    observation[5] = env->omega * (20.0f / 50);
    observation[6] = env->touches[0];
    observation[7] = env->touches[1];
}

static float shape(const Env* env) {
    float o[8];
    write_observation(env, o);
    return -100 *
               (sqrtf(o[0] * o[0] + o[1] * o[1]) + sqrtf(o[2] * o[2] + o[3] * o[3]) + fabsf(o[4])) +
           10 * (o[6] + o[7]);
}

/* Random heights, each the mean of three. The pad's five are 0. */
static void make_ground(Env* env) {
    float height[CHUNKS + 2];
    for (int i = 0; i < CHUNKS + 2; i++)
        height[i] =
            i >= 4 && i <= 8 ? 0 : random_float(&env->rng, -HALF_HEIGHT / 2, HALF_HEIGHT / 2);
    for (int i = 0; i < CHUNKS; i++)
        env->ground[i] = (height[i] + height[i + 1] + height[i + 2]) / 3;
    env->ground[CHUNKS] = env->ground[CHUNKS - 1];
}

static float ground_at(const Env* env, float x, float* slope) {
    float along = clampf((x + HALF_WIDTH) / CHUNK, 0, CHUNKS - 1);
    int i = (int)along;
    *slope = (env->ground[i + 1] - env->ground[i]) / CHUNK;
    return env->ground[i] + (along - (float)i) * CHUNK * *slope;
}

static void c_reset(Env* env) {
    make_ground(env);
    env->x = 0;
    env->y = 1.5f * HALF_HEIGHT;
    env->vx = random_float(&env->rng, -env->start_speed, env->start_speed);
    env->vy = random_float(&env->rng, -env->start_speed, env->start_speed);
    env->angle = env->omega = env->total = env->main = env->side = 0;
    env->touches[0] = env->touches[1] = false;
    env->tick = env->still = 0;
    env->wind_tick = random_int(&env->rng, 9999);
    env->twist_tick = random_int(&env->rng, 9999);
    env->shaping = shape(env);
    write_observation(env, env->observations);
}

/* A smooth gust that does not repeat: two sines without a common period. */
static float gust(int tick) {
    return tanhf(sinf(0.02f * (float)tick) + sinf((float)(0.01 * M_PI) * (float)tick));
}

static void run_engines(Env* env) {
    if (env->continuous) {
        float throttle = clampf(env->continuous_actions[0], -1, 1);
        float side = clampf(env->continuous_actions[1], -1, 1);
        env->main = throttle > 0 ? 0.5f + 0.5f * throttle : 0;
        env->side = fabsf(side) > 0.5f ? side : 0;
    } else {
        env->main = env->actions[0] == 2;
        env->side = (float)((env->actions[0] == 3) - (env->actions[0] == 1));
    }
    float sine = sinf(env->angle), cosine = cosf(env->angle);
    float up = env->main * env->main_engine, across = env->side * env->side_engine;
    env->vx += STEP * (across * cosine - up * sine);
    env->vy += STEP * (up * cosine + across * sine - env->gravity);
    env->omega -= STEP * env->side * env->side_torque;
    if (env->wind && !env->touches[0] && !env->touches[1]) {
        env->vx += STEP * env->wind_power * gust(env->wind_tick++);
        env->omega += STEP * env->turbulence_power * gust(env->twist_tick++);
    }
}

/* Impulses at the feet keep them from sinking in; friction holds up to a limit. Returns the hardest
 * strike. */
static float stand(Env* env) {
    float sine = sinf(env->angle), cosine = cosf(env->angle), hardest = 0;
    float arm_x[FEET], arm_y[FEET], normal_x[FEET], normal_y[FEET], bias[FEET], pressed[FEET] = {0},
                                                                                held[FEET] = {0};
    for (int i = 0; i < FEET; i++) {
        float side = i ? FOOT_X : -FOOT_X, slope;
        arm_x[i] = cosine * side + sine * FOOT_Y;
        arm_y[i] = sine * side - cosine * FOOT_Y;
        float above = env->y + arm_y[i] - ground_at(env, env->x + arm_x[i], &slope);
        float norm = 1 / sqrtf(1 + slope * slope);
        normal_x[i] = -slope * norm;
        normal_y[i] = norm;
        env->touches[i] = above <= 0.01f;
        /* moves slowly out of the ground */
        bias[i] = minf(maxf(-above * norm - 0.005f, 0) * 0.2f / STEP, 2);
    }
    if (!env->touches[0] && !env->touches[1]) return 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < FEET; i++) {
            if (!env->touches[i]) continue;
            float nx = normal_x[i], ny = normal_y[i], ax = arm_x[i], ay = arm_y[i];
            float toward = (env->vx - env->omega * ay) * nx + (env->vy + env->omega * ax) * ny;
            float turn = ax * ny - ay * nx;
            if (round == 0) hardest = maxf(hardest, -toward);
            float push = maxf(pressed[i] + (bias[i] - toward) / (1 + turn * turn / GYRATION), 0) -
                         pressed[i];
            pressed[i] += push;
            env->vx += push * nx;
            env->vy += push * ny;
            env->omega += push * turn / GYRATION;

            float sliding = (env->vx - env->omega * ay) * ny - (env->vy + env->omega * ax) * nx;
            float twist = -ax * nx - ay * ny, limit = env->friction * pressed[i];
            float hold =
                clampf(held[i] - sliding / (1 + twist * twist / GYRATION), -limit, limit) - held[i];
            held[i] += hold;
            env->vx += hold * ny;
            env->vy -= hold * nx;
            env->omega += hold * twist / GYRATION;
        }
    }
    return hardest;
}

static bool hull_touches(const Env* env) {
    float sine = sinf(env->angle), cosine = cosf(env->angle), slope;
    if (env->y > HALF_HEIGHT / 2 + 1) return false; /* above every mountain */
    for (int i = 0; i < HULL; i++) {
        float x = env->x + cosine * hull_x[i] - sine * hull_y[i];
        float y = env->y + sine * hull_x[i] + cosine * hull_y[i];
        if (y < ground_at(env, x, &slope)) return true;
    }
    return false;
}

static void c_step(Env* env) {
    run_engines(env);
    float strike = stand(env);
    env->x += STEP * env->vx;
    env->y += STEP * env->vy;
    env->angle += STEP * env->omega;
    env->tick++;

    bool quiet = env->touches[0] && env->touches[1] && env->main == 0 && fabsf(env->vx) < 0.05f &&
                 fabsf(env->vy) < 0.05f && fabsf(env->omega) < 0.05f;
    env->still = quiet ? env->still + 1 : 0;
    bool lost = strike > env->max_impact || hull_touches(env) || !(fabsf(env->x) < HALF_WIDTH);
    bool landed = !lost && env->still >= STILL, over = lost || landed;
    bool late = !over && env->tick >= env->max_steps;
    float before = env->shaping;
    env->shaping = shape(env);
    float reward = env->shaping - before - 0.3f * env->main - 0.03f * fabsf(env->side);
    if (over) reward = landed ? 100 : -100;
    env->rewards[0] = reward * env->reward_scale;
    env->terminals[0] = over;
    env->truncations[0] = late;
    env->total += reward;
    if (!over && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, landed, env->total, env->total, env->tick);
    c_reset(env);
}

#define SCALE 45.0f

static Vector2 on_screen(float x, float y) {
    return (Vector2){450 + SCALE * x, 430 - SCALE * y};
}

/* A point of the craft, in its own axes. */
static Vector2 on_craft(const Env* env, float x, float y) {
    float sine = sinf(env->angle), cosine = cosf(env->angle);
    return on_screen(env->x + cosine * x - sine * y, env->y + sine * x + cosine * y);
}

static void c_render(Env* env) {
    enum { WIDTH = 900, HEIGHT = 600 };
    draw_begin(WIDTH, HEIGHT, "lander");
    for (int i = 0; i < 90; i++) { /* the same stars in every frame */
        uint64_t star = (uint64_t)i;
        int x = random_int(&star, WIDTH), y = random_int(&star, 400);
        DrawRectangle(x, y, 2, 2, i % 3 ? (Color){60, 74, 88, 255} : DRAW_GREY);
    }
    for (int i = 0; i + 1 < CHUNKS; i++) {
        Vector2 a = on_screen(CHUNK * (float)i - HALF_WIDTH, env->ground[i]);
        Vector2 b = on_screen(CHUNK * (float)(i + 1) - HALF_WIDTH, env->ground[i + 1]);
        draw_quad(a, b, (Vector2){b.x, HEIGHT}, (Vector2){a.x, HEIGHT}, DRAW_PANEL);
        DrawLineEx(a, b, 4, DRAW_GREY);
    }
    for (int side = -1; side <= 1; side += 2) {
        Vector2 foot = on_screen(2 * (float)side, 0);
        DrawLineEx(foot, (Vector2){foot.x, foot.y - 46}, 3, DRAW_WHITE);
        draw_triangle((Vector2){foot.x, foot.y - 46}, (Vector2){foot.x, foot.y - 28},
                      (Vector2){foot.x + 24, foot.y - 37}, DRAW_GREEN);
    }
    if (env->main > 0)
        draw_triangle(on_craft(env, -0.22f, -0.33f), on_craft(env, 0.22f, -0.33f),
                      on_craft(env, 0, -0.5f - 0.7f * env->main), DRAW_GOLD);
    if (env->side != 0) {
        float edge = env->side > 0 ? -0.56f : 0.56f;
        draw_triangle(on_craft(env, edge, 0.32f), on_craft(env, edge, 0.52f),
                      on_craft(env, edge - 0.5f * env->side, 0.42f), DRAW_GOLD);
    }
    for (int i = 0; i < FEET; i++) {
        float side = i ? 1.0f : -1.0f;
        Vector2 hip = on_craft(env, 0.45f * side, -0.2f);
        Vector2 foot = on_craft(env, FOOT_X * side, -FOOT_Y);
        DrawLineEx(hip, foot, 6, env->touches[i] ? DRAW_GREEN : DRAW_GREY);
        DrawLineEx(on_craft(env, (FOOT_X - 0.14f) * side, -FOOT_Y),
                   on_craft(env, (FOOT_X + 0.14f) * side, -FOOT_Y), 6,
                   env->touches[i] ? DRAW_GREEN : DRAW_GREY);
    }
    Vector2 corner[HULL];
    for (int i = 0; i < HULL; i++)
        corner[i] = on_craft(env, hull_x[i], hull_y[i]);
    for (int i = 1; i + 1 < HULL; i++)
        draw_triangle(corner[0], corner[i], corner[i + 1], DRAW_CYAN);
    DrawCircleV(on_craft(env, 0, 0.22f), 9, DRAW_BACKGROUND);
    draw_end();
}
