/* Enduro: an endurance race. Overtake 200 cars on the first day and 300 on each later one.
 *   - The episode ends if the day ends before that, or if the last day ends.
 *   - The road winds. A bend drives the car outwards with the square of its speed. The road's edges
 *     slow the car down.
 *   - A car that runs into another falls back to half of that one's speed. If another car
 *     overtakes, one overtaken car is lost.
 *   - The day brings snow (half the grip), dusk, night (only near cars are seen, by their tail
 *     lights), fog (even shorter sight) and dawn.
 *   - Traffic is a ring of cars at one speed, in three lanes. A car draws a new lane each time it
 *     comes round. Cars from behind give way.
 * The reward is 1 for a car overtaken and -1 for one lost, plus reward_speed. Cars beyond the day's
 * number do not count.
 * perf is the share of the cars of all `days` that were overtaken.
 *
 *     observation
 *     0        place across the road, -1..1
 *     1        speed, 0..1
 *     2 .. 4   bend of the road (to the right) here, 60 m and 120 m ahead
 *     5        share of the day's cars that are left
 *     6        share of the day that is over
 *     7        grip, 0.5 or 1
 *     8        distance of sight, over 240 m
 *     9, 10    the nearest car behind: metres over 240 (1: none is seen), and how far to the right
 *              of us, over the width
 *     11 ..    the same for the eight cars ahead, the nearest first
 *
 * Actions: steer (none, left, right), pedal (none, gas, brake). A step is tau seconds. */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(days) X(crashes)
#define SETTINGS(X) \
    X(int, days, 4, "days that win") \
    X(int, first_day, 200, "cars to overtake on the first day") \
    X(int, later_days, 300, "cars to overtake on every later day") \
    X(float, day, 300.0, "seconds of a day") \
    X(float, tau, 0.0666667, "seconds between two steps") \
    X(float, max_speed, 65.0, "m/s") \
    X(float, traffic_speed, 25.0, "m/s") \
    X(float, gas, 12.0, "m/s^2") \
    X(float, brake, 30.0, "m/s^2") \
    X(float, coast, 3.0, "deceleration without gas, m/s^2") \
    X(float, steering, 1.4, "across half of the road at full speed, 1/s") \
    X(float, bend_force, 0.9, "outwards in the sharpest bend at full speed, half roads a second") \
    X(float, reward_speed, 0.0, \
      "for a second at full speed, a share of it below: random play overtakes no car")
#define FPS 15
#define KEYS(KEY) KEY(0, LEFT, 1) KEY(0, RIGHT, 2) KEY(1, UP, 1) KEY(1, DOWN, 2)
#include "env.h"
#include "draw.h"

enum { CARS = 8, BENDS = 64, OBSERVATIONS = 11 + 2 * CARS };
/* length of the ring of traffic, m: at full speed it brings 400 cars a day, and 300 are wanted */
#define LOOP 240.0f
#define BEHIND 40.0f /* m; a car this far behind moves to the front */
#define SIGHT 240.0f
#define BEND 80.0f   /* length of a piece of road with one bend, m */
#define LANE 0.6f    /* from the middle to the outer lanes */
#define CAR_LENGTH 4.5f
#define CAR_WIDTH 0.36f

typedef struct {
    float ahead; /* m */
    float x;
} Car;

struct Env {
    ENV_COMMON
    float x, speed;
    float along; /* m into the current bend */
    float bends[BENDS]; /* -1..1, a ring that begins at bend */
    int bend;
    Car cars[CARS]; /* a ring; from `nearest` on, each is further ahead than the one before */
    int nearest;
    float time; /* of the day, seconds */
    float sum;  /* rewards of the episode */
    /* left: cars of the day; total: cars of all days */
    int left, days_done, passed, crashes, tick, total;
    int steer, pedal; /* shown by c_render */
};

/* Light and grip, by the share of the day that is over. */
typedef struct {
    float until, sight, grip;
    Color sky, ground;
} Weather;
static const Weather weathers[] = {
    {0.35f, SIGHT, 1.0f, {96, 160, 220, 255}, {46, 110, 60, 255}},
    {0.50f, SIGHT, 0.5f, {150, 180, 205, 255}, {222, 230, 236, 255}},
    {0.60f, SIGHT, 1.0f, {230, 130, 80, 255}, {52, 72, 48, 255}},
    {0.78f, 90, 1.0f, {14, 16, 34, 255}, {16, 26, 26, 255}},
    {0.90f, 60, 1.0f, {140, 146, 150, 255}, {120, 128, 128, 255}},
    {1.00f, SIGHT, 1.0f, {200, 150, 170, 255}, {40, 80, 60, 255}},
};

static int weather_index(const Env* env) {
    float share = env->time / env->day;
    int i = 0;
    while (i < 5 && share >= weathers[i].until)
        i++;
    return i;
}

static const char* c_init(Env* env) {
    if (env->days < 1 || env->days > 1000) return "days must lie within 1..1000";
    if (env->first_day < 1 || env->later_days < 1 || env->first_day > 100000 ||
        env->later_days > 100000)
        return "first_day and later_days must lie within 1..100000";
    if (!(env->tau > 0 && env->tau <= 0.25f)) return "tau must lie within 0..0.25";
    if (!(env->day > env->tau)) return "day must be longer than tau";
    if (!(env->max_speed > 0 && env->max_speed <= 100)) return "max_speed must lie within 0..100";
    if (!(env->traffic_speed > 0 && env->traffic_speed < env->max_speed))
        return "traffic_speed: 0..max_speed";
    if (!(env->gas > 0 && env->brake >= 0 && env->coast >= 0))
        return "gas must be above 0, brake and coast 0 or more";
    env->total = env->first_day + (env->days - 1) * env->later_days;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {3, 3},
    };
}

/* The bend some metres ahead. Between the middles of two pieces of road it changes smoothly. */
static float bend_at(const Env* env, float ahead) {
    float at = (env->along + ahead) / BEND;
    int i = (int)at;
    float now = env->bends[(env->bend + i) % BENDS], next = env->bends[(env->bend + i + 1) % BENDS];
    return now + (next - now) * (at - (float)i);
}

static int quota(const Env* env) {
    return env->days_done == 0 ? env->first_day : env->later_days;
}

static void write_car(const Env* env, const Car* car, float sight, float* observation) {
    bool seen = car && fabsf(car->ahead) <= sight;
    observation[0] = seen ? clampf(car->ahead / SIGHT, -1, 1) : 1;
    observation[1] = seen ? (car->x - env->x) / 2 : 0;
}

static void write_observation(const Env* env, float* observation) {
    const Weather* weather = &weathers[weather_index(env)];
    observation[0] = env->x;
    observation[1] = env->speed / env->max_speed;
    observation[2] = bend_at(env, 0);
    observation[3] = bend_at(env, 60);
    observation[4] = bend_at(env, 120);
    observation[5] = (float)env->left / (float)quota(env);
    observation[6] = minf(env->time / env->day, 1);
    observation[7] = weather->grip;
    observation[8] = weather->sight / SIGHT;
    const Car* behind = NULL;
    float* ahead = observation + 11;
    for (int k = 0; k < CARS; k++) {
        const Car* car = &env->cars[(env->nearest + k) % CARS];
        if (car->ahead < 0) behind = car; /* the last one of these is the nearest */
        else {
            write_car(env, car, weather->sight, ahead);
            ahead += 2;
        }
    }
    write_car(env, behind, weather->sight, observation + 9);
    for (; ahead < observation + OBSERVATIONS; ahead += 2)
        write_car(env, NULL, weather->sight, ahead);
}

static float draw_lane(Env* env) {
    return LANE * (float)(random_int(&env->rng, 3) - 1);
}

/* Half of the road is straight, the rest bends to either side. */
static float draw_bend(Env* env) {
    float bend = random_float(&env->rng, -1, 1);
    return random_int(&env->rng, 2) ? bend : 0;
}

static void c_reset(Env* env) {
    env->x = env->speed = env->along = env->time = env->sum = 0;
    for (int i = 0; i < BENDS; i++)
        env->bends[i] = i < 2 ? 0 : draw_bend(env);
    env->bend = env->nearest = 0;
    for (int k = 0; k < CARS; k++) {
        env->cars[k].ahead = -25 + (LOOP / CARS) * (float)k + random_float(&env->rng, -6, 6);
        env->cars[k].x = draw_lane(env);
    }
    env->days_done = env->passed = env->crashes = env->tick = 0;
    env->left = env->first_day;
    env->steer = env->pedal = 0;
    write_observation(env, env->observations);
}

static void drive(Env* env) {
    float time = env->tau, grip = weathers[weather_index(env)].grip;
    env->steer = (env->actions[0] == 2) - (env->actions[0] == 1);
    env->pedal = (env->actions[1] == 1) - (env->actions[1] == 2);
    float push = env->pedal > 0 ? env->gas * (1 - env->speed / env->max_speed * 0.5f) :
                 env->pedal < 0 ? -env->brake * grip : -env->coast;
    env->speed = clampf(env->speed + push * time, 0, env->max_speed);
    float share = env->speed / env->max_speed;
    env->x += time * grip * env->steering * (float)env->steer * minf(2 * share, 1);
    env->x -= time * env->bend_force * bend_at(env, 0) * share * share;
    if (fabsf(env->x) > 1) { /* the edge of the road */
        env->x = clampf(env->x, -1, 1);
        env->speed *= 1 - minf(1.5f * time, 1);
    }
    env->along += env->speed * time;
    while (env->along >= BEND) {
        env->along -= BEND;
        env->bends[env->bend] = draw_bend(env);
        env->bend = (env->bend + 1) % BENDS;
    }
}

static void throw_back(Env* env) {
    env->crashes += env->speed > env->traffic_speed / 2;
    env->speed = minf(env->speed, env->traffic_speed / 2);
}

/* Moves the cars towards us or away. Returns how many more cars are overtaken. */
static int move_traffic(Env* env) {
    float closing = (env->speed - env->traffic_speed) * env->tau;
    int passed = 0;
    for (int k = 0; k < CARS; k++) {
        Car* car = &env->cars[k];
        float before = car->ahead;
        car->ahead -= closing;
        if (fabsf(car->x - env->x) < CAR_WIDTH) {
            /* we ran into it and stay behind */
            if (before >= CAR_LENGTH && car->ahead < CAR_LENGTH) {
                float back = CAR_LENGTH - car->ahead;
                for (int i = 0; i <= k; i++)
                    env->cars[i].ahead += back;
                closing -= back; /* of those that have not moved yet */
                throw_back(env);
            } else if (fabsf(car->ahead) < CAR_LENGTH) { /* touched from the side */
                throw_back(env);
            } else if (car->ahead < 0 && car->ahead > -4 * CAR_LENGTH) {
                /* it comes from behind and gives way */
                car->x = env->x > 0 ? -LANE : LANE;
            }
        }
        passed += (before >= 0 && car->ahead < 0) - (before < 0 && car->ahead >= 0);
    }
    return passed;
}

/* A car far behind moves to the front, in a new lane, and a car far ahead moves to the back. */
static void turn_ring(Env* env) {
    for (int k = 0; k < CARS; k++) {
        Car* car = &env->cars[env->nearest];
        if (car->ahead >= -BEHIND) break;
        car->ahead += LOOP;
        car->x = draw_lane(env);
        env->nearest = (env->nearest + 1) % CARS;
    }
    for (int k = 0; k < CARS; k++) {
        int last = (env->nearest + CARS - 1) % CARS;
        Car* car = &env->cars[last];
        if (car->ahead < LOOP - BEHIND) break;
        car->ahead -= LOOP;
        car->x = draw_lane(env);
        env->nearest = last;
    }
}

static void c_step(Env* env) {
    drive(env);
    int change = move_traffic(env);
    turn_ring(env);
    int before = env->left, most = quota(env);
    env->left -= change;
    if (env->left < 0) env->left = 0;
    if (env->left > most) env->left = most;
    env->passed += before - env->left;
    env->rewards[0] =
        (float)(before - env->left) + env->reward_speed * env->tau * env->speed / env->max_speed;
    env->sum += env->rewards[0];
    env->time += env->tau;
    env->tick++;
    bool over = false;
    if (env->time >= env->day) {
        if (env->left == 0) env->days_done++;
        over = env->left > 0 || env->days_done == env->days;
        /* in the evening */
        if (over && WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
        env->time = 0;
        env->left = quota(env);
    }
    env->terminals[0] = over;
    env->truncations[0] = 0;
    if (!over) {
        write_observation(env, env->observations);
        return;
    }
    LOG_EPISODE(env, (float)env->passed / (float)env->total, env->passed, env->sum, env->tick);
    env->log.days += (float)env->days_done;
    env->log.crashes += (float)env->crashes;
    c_reset(env);
}

enum { VIEW_WIDTH = 960, VIEW_HEIGHT = 600, HORIZON = 210, ROAD_BOTTOM = 500, NEAR = 6 };

/* Where a point of the road is on the screen: metres ahead, x across. Bends add up over the
 * distance. */
static Vector2 on_road(const Env* env, float ahead, float x, float* scale) {
    float nearness = NEAR / (NEAR + maxf(ahead, -NEAR * 0.6f)), shift = 0;
    for (float at = 0; at < ahead; at += 20)
        shift += bend_at(env, at) * (ahead - at) * 0.0011f;
    *scale = nearness;
    float middle = VIEW_WIDTH / 2 + shift * 140 * (1 - nearness) - env->x * 400 * nearness;
    return (Vector2){middle + x * 400 * nearness, HORIZON + (ROAD_BOTTOM - HORIZON) * nearness};
}

static void draw_stripe(const Env* env, float far, float near, float left, float right,
                        Color color) {
    float scale;
    draw_quad(on_road(env, far, left, &scale), on_road(env, far, right, &scale),
              on_road(env, near, right, &scale), on_road(env, near, left, &scale), color);
}

static void draw_car(Vector2 foot, float scale, Color color, bool lights_only) {
    float wide = 130 * scale, tall = 62 * scale;
    if (!lights_only) {
        DrawRectangleRec((Rectangle){foot.x - wide / 2, foot.y - tall, wide, tall * 0.8f}, color);
        DrawRectangleRec(
            (Rectangle){foot.x - wide * 0.32f, foot.y - tall * 1.35f, wide * 0.64f, tall * 0.4f},
            draw_mix(color, DRAW_BACKGROUND, 0.5f));
        DrawRectangleRec(
            (Rectangle){foot.x - wide / 2, foot.y - tall * 0.35f, wide * 0.2f, tall * 0.4f},
            (Color){20, 20, 22, 255});
        DrawRectangleRec(
            (Rectangle){foot.x + wide * 0.3f, foot.y - tall * 0.35f, wide * 0.2f, tall * 0.4f},
            (Color){20, 20, 22, 255});
    }
    for (int side = -1; side <= 1; side += 2)
        DrawRectangleRec((Rectangle){foot.x + (float)side * wide * 0.36f - wide * 0.08f,
                                     foot.y - tall * 0.72f, wide * 0.16f, tall * 0.2f},
                         DRAW_RED);
}

static void c_render(Env* env) {
    static const Color colors[] = {
        {250, 190, 60, 255}, {90, 200, 120, 255}, {170, 130, 240, 255}, {240, 140, 190, 255},
        {150, 200, 255, 255}, {238, 126, 72, 255}, {226, 84, 84, 255}, {200, 200, 210, 255}
    };
    int index = weather_index(env);
    const Weather* weather = &weathers[index];
    bool night = index == 3;
    draw_begin(VIEW_WIDTH, VIEW_HEIGHT, "enduro");
    DrawRectangle(0, 0, VIEW_WIDTH, HORIZON, weather->sky);
    DrawRectangle(0, HORIZON, VIEW_WIDTH, VIEW_HEIGHT - HORIZON, weather->ground);
    for (int i = 0; i < 5; i++) { /* mountains, which move with the bend of the road */
        float x = (float)(i * 260 - 80) - bend_at(env, 60) * 60;
        draw_triangle((Vector2){x, HORIZON}, (Vector2){x + 110, HORIZON - 50 - 22 * (float)(i % 3)},
                      (Vector2){x + 230, HORIZON}, draw_mix(weather->ground, weather->sky, 0.4f));
    }
    Color road = night ? (Color){30, 32, 40, 255} : (Color){74, 78, 86, 255};
    float scale;
    for (float ahead = 240; ahead > -3; ahead -= ahead > 60 ? 8 : ahead > 12 ? 2 : 0.5f) {
        float next = ahead - (ahead > 60 ? 8 : ahead > 12 ? 2 : 0.5f);
        draw_stripe(env, ahead, next, -1.25f, 1.25f, road);
        bool stripe = (int)floorf((ahead + env->along) / 8) % 2 == 0;
        for (int side = -1; side <= 1; side += 2) {
            Color edge = stripe ? DRAW_WHITE : DRAW_RED;
            draw_stripe(env, ahead, next, 1.25f * (float)side, 1.32f * (float)side,
                        night ? draw_mix(edge, road, 0.6f) : edge);
            if (stripe)
                draw_stripe(env, ahead, next, 0.29f * (float)side, 0.31f * (float)side, DRAW_GREY);
        }
    }
    for (int k = CARS - 1; k >= 0; k--) {
        int which = (env->nearest + k) % CARS;
        const Car* car = &env->cars[which];
        if (car->ahead < -2.5f || car->ahead > weather->sight) continue;
        Vector2 foot = on_road(env, car->ahead, car->x, &scale);
        Color color = index == 4 ? draw_mix(colors[which], weather->sky, maxf(car->ahead, 0) / 80)
                                 : colors[which];
        draw_car(foot, scale, color, night);
    }
    draw_car((Vector2){VIEW_WIDTH / 2 + 8 * (float)env->steer, ROAD_BOTTOM + 20}, 1, DRAW_CYAN,
             false);
    if (index == 4) DrawRectangle(0, HORIZON - 30, VIEW_WIDTH, 70, (Color){140, 146, 150, 150});
    DrawRectangle(0, VIEW_HEIGHT - 60, VIEW_WIDTH, 60, DRAW_BACKGROUND);
    draw_format(24, VIEW_HEIGHT - 46, 30, DRAW_WHITE, "day %d   %d cars   %d km/h",
                env->days_done + 1, env->left, (int)(env->speed * 3.6f));
    DrawRectangle(640, VIEW_HEIGHT - 38, 290, 14, DRAW_PANEL);
    DrawRectangle(640, VIEW_HEIGHT - 38, (int)(290 * env->time / env->day), 14, DRAW_GOLD);
    draw_end();
}
