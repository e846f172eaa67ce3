/* Drone: quadrotors in one room, each with a task of its own. The motors of a Crazyflie 2 (27 g)
 * follow the action with a lag. Thrust, torque and drag move a rigid body, whose attitude is a
 * quaternion. A drone crashes if it leaves the room or comes too near another one: its episode ends
 * with -1.
 *   - hover: fly to a goal and stay there. The reward is 0.1 (1 - distance / 4 m), at least 0, less
 *     a little for spinning. The episode is truncated after max_steps. perf is the share of
 *     max_steps within `radius` of the goal.
 *   - race: fly through a course of rings in order, each from the right side. A ring pays 1, and
 *     each metre towards its centre 0.1. The last ring ends the episode. perf is the share of the
 *     rings.
 * After an episode a drone starts at a random place, and the others continue. The course stays.
 *
 *     observation in the drone's axes (x forward, y left, z up), within -1..1
 *     0 .. 2    way to the goal or the ring, over 10 m
 *     3 .. 5    the same over 1 m, cut
 *     6 .. 8    way to the ring after that, over 10 m (hover: 0)
 *     9 .. 11   direction in which to pass the ring (hover: 0)
 *     12 .. 14  velocity, over 10 m/s
 *     15 .. 17  angular velocity, over 20 rad/s
 *     18 .. 20  up
 *     21 .. 24  thrust of the motors, 0..1
 *     25 .. 27  way to the nearest other drone, over 2 m, cut; 1, 1, 1 if there is no other
 *
 * Actions: four in -1..1, the thrust of each motor from none to all: front left, back left, back
 * right, front right. */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(crashed)
#define SETTINGS(X) \
    X(bool, race, false, "fly through rings instead of hovering at a goal") \
    X(int, num_agents, 8, "drones in one room") \
    X(int, max_steps, 500, "steps after which a drone's episode is truncated") \
    X(int, substeps, 4, "integration steps between two steps") \
    X(int, rings, 10, "of a course") \
    X(float, tau, 0.02, "seconds between two steps") \
    X(float, radius, 0.3, "distance that counts as at the goal, m") \
    X(float, ring_radius, 0.6, "m") \
    X(float, safe_distance, 0.15, "distance at which two drones crash, m") \
    X(float, mass, 0.027, "kg") \
    X(float, arm, 0.0397, "from the centre to a motor, m") \
    X(float, inertia_xy, 1.4e-5, "about the axes in the plane of the motors, kg m^2") \
    X(float, inertia_z, 2.17e-5, "about the axis across it, kg m^2") \
    X(float, thrust_to_weight, 2.25, "all motors at full thrust") \
    X(float, torque_to_thrust, 0.0251, "of a rotor about its axis, m") \
    X(float, motor_lag, 0.05, "time constant of a motor, s") \
    X(float, drag, 0.3, "of the air, 1/s") \
    X(float, spin_drag, 1.0, "of the air against turning, 1/s") \
    X(float, gravity, 9.81, "m/s^2")
#define FPS 50
#include "env.h"
#include "draw.h"

enum { MAX_AGENTS = 64, MAX_RINGS = 64, MOTORS = 4, OBSERVATIONS = 28 };
#define ROOM 6.0f    /* half its width and depth, m */
#define HEIGHT 6.0f
#define MAX_SPIN 40.0f

typedef struct { float x, y, z; } Vec;
typedef struct { Vec at, way; } Ring; /* way: the direction in which to pass it */

typedef struct {
    Vec at, velocity, spin; /* spin: angular velocity in its own axes */
    float q[4];             /* attitude: from its own axes to the room's; w first */
    float thrust[MOTORS];   /* 0..1 */
    Vec goal;
    float total;
    int tick, ring, near; /* ring: passed so far; near: steps at the goal */
} Drone;

struct Env {
    ENV_COMMON
    float motor_rate; /* share of the way to the commanded thrust in one substep */
    Ring course[MAX_RINGS];
    Drone drones[MAX_AGENTS];
};

static Vec add(Vec a, Vec b) {
    return (Vec){a.x + b.x, a.y + b.y, a.z + b.z};
}

static Vec subtract(Vec a, Vec b) {
    return (Vec){a.x - b.x, a.y - b.y, a.z - b.z};
}

static Vec scale(Vec a, float s) {
    return (Vec){a.x * s, a.y * s, a.z * s};
}

static float dot(Vec a, Vec b) {
    return a.x * b.x + a.y * b.y + a.z * b.z;
}

/* The columns of the rotation: the drone's axes in the room. */
typedef struct { Vec forward, left, up; } Axes;

static Axes axes_of(const float* q) {
    float w = q[0], x = q[1], y = q[2], z = q[3];
    return (Axes){
        .forward = {1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)},
        .left = {2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)},
        .up = {2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)},
    };
}

static const char* c_init(Env* env) {
    if (env->num_agents < 1 || env->num_agents > MAX_AGENTS)
        return "num_agents must lie within 1..64";
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    if (env->substeps < 1 || env->substeps > 64) return "substeps must lie within 1..64";
    if (env->rings < 1 || env->rings > MAX_RINGS) return "rings must lie within 1..64";
    if (!(env->tau > 0 && env->tau <= 0.1f)) return "tau must lie within 0..0.1";
    if (!(env->mass > 0 && env->arm > 0 && env->inertia_xy > 0 && env->inertia_z > 0))
        return "mass, arm and inertias must be above 0";
    if (!(env->thrust_to_weight > 1)) return "thrust_to_weight must be above 1";
    if (!(env->motor_lag >= 0 && env->drag >= 0 && env->spin_drag >= 0))
        return "motor_lag and drags: 0 or more";
    if (!(env->safe_distance >= 0 && env->safe_distance < 1))
        return "safe_distance must lie within 0..1";
    float time = env->tau / (float)env->substeps;
    if (!(time * env->drag < 1 && time * env->spin_drag < 1))
        return "a substep must be shorter than 1 / drag";
    env->motor_rate = env->motor_lag > 0 ? 1 - expf(-time / env->motor_lag) : 1;
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1,
        .observation_high = 1,
        .action_dims = MOTORS,
    };
}

static float* write_vector(const Axes* axes, Vec v, float over, float* observation) {
    observation[0] = clampf(dot(v, axes->forward) / over, -1, 1);
    observation[1] = clampf(dot(v, axes->left) / over, -1, 1);
    observation[2] = clampf(dot(v, axes->up) / over, -1, 1);
    return observation + 3;
}

static Vec target_of(const Env* env, const Drone* drone, int ahead) {
    if (!env->race) return drone->goal;
    int ring = drone->ring + ahead;
    return env->course[ring < env->rings ? ring : env->rings - 1].at;
}

static void write_observation(const Env* env, int i, float* o) {
    const Drone* drone = &env->drones[i];
    Axes axes = axes_of(drone->q);
    Vec way = subtract(target_of(env, drone, 0), drone->at), none = {0, 0, 0};
    o = write_vector(&axes, way, 10, o);
    o = write_vector(&axes, way, 1, o);
    o = write_vector(&axes, env->race ? subtract(target_of(env, drone, 1), drone->at) : none, 10,
                     o);
    int ring = drone->ring < env->rings ? drone->ring : env->rings - 1;
    o = write_vector(&axes, env->race ? env->course[ring].way : none, 1, o);
    o = write_vector(&axes, drone->velocity, 10, o);
    *o++ = clampf(drone->spin.x / 20, -1, 1);
    *o++ = clampf(drone->spin.y / 20, -1, 1);
    *o++ = clampf(drone->spin.z / 20, -1, 1);
    o = write_vector(&axes, (Vec){0, 0, 1}, 1, o);
    for (int k = 0; k < MOTORS; k++)
        *o++ = drone->thrust[k];
    float nearest = INFINITY;
    Vec other = {0, 0, 0};
    for (int k = 0; k < env->num_agents; k++) {
        Vec apart = subtract(env->drones[k].at, drone->at);
        float square = dot(apart, apart);
        if (k == i || square >= nearest) continue;
        nearest = square;
        other = apart;
    }
    if (env->num_agents > 1) write_vector(&axes, other, 2, o);
    else o[0] = o[1] = o[2] = 1;
}

static Vec random_place(Env* env, float margin) {
    float x = random_float(&env->rng, margin - ROOM, ROOM - margin);
    float y = random_float(&env->rng, margin - ROOM, ROOM - margin);
    return (Vec){x, y, random_float(&env->rng, margin, HEIGHT - margin)};
}

/* Upright rings at random heights form a closed course around the room. Each is turned along the
 * way. */
static void make_course(Env* env) {
    float first = random_float(&env->rng, 0, (float)(2 * M_PI));
    for (int i = 0; i < env->rings; i++) {
        float angle =
            first + (float)(2 * M_PI) * (float)i / (float)(env->rings < 6 ? 6 : env->rings);
        float out = random_float(&env->rng, 0.5f, 0.8f) * ROOM;
        float turn = angle + random_float(&env->rng, -0.4f, 0.4f);
        env->course[i].at = (Vec){out * cosf(angle), out * sinf(angle),
                                  random_float(&env->rng, 1.2f, HEIGHT - 1.2f)};
        env->course[i].way = (Vec){-sinf(turn), cosf(turn), 0};
    }
}

/* Finds a place that is clear of the others in a few tries. In a full room the last try counts. */
static void place_drone(Env* env, int i) {
    Drone* drone = &env->drones[i];
    float clear_squared = maxf(0.5f, 2 * env->safe_distance * env->safe_distance);
    for (int try = 0; try < 8; try++) {
        drone->at = random_place(env, 1);
        bool clear = true;
        for (int k = 0; k < env->num_agents; k++) {
            Vec apart = subtract(env->drones[k].at, drone->at);
            if (k != i && dot(apart, apart) < clear_squared) clear = false;
        }
        if (clear) break;
    }
    float heading = random_float(&env->rng, (float)-M_PI, (float)M_PI);
    drone->q[0] = cosf(heading / 2);
    drone->q[1] = drone->q[2] = 0;
    drone->q[3] = sinf(heading / 2);
    drone->velocity = drone->spin = (Vec){0, 0, 0};
    for (int k = 0; k < MOTORS; k++)
        drone->thrust[k] = 1 / env->thrust_to_weight;
    drone->goal = random_place(env, 1);
    drone->total = 0;
    drone->tick = drone->ring = drone->near = 0;
}

static void c_reset(Env* env) {
    make_course(env);
    for (int i = 0; i < env->num_agents; i++)
        env->drones[i].at = (Vec){INFINITY, 0, 0}; /* its old place is free */
    for (int i = 0; i < env->num_agents; i++)
        place_drone(env, i);
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, env->observations + i * OBSERVATIONS);
}

static void fly(const Env* env, Drone* drone, const float* action) {
    float time = env->tau / (float)env->substeps;
    float most = env->thrust_to_weight * env->gravity * env->mass / MOTORS;
    float lever = env->arm * 0.70710678f;
    float uneven = (env->inertia_xy - env->inertia_z) / env->inertia_xy;
    float wanted[MOTORS], *f = drone->thrust, *q = drone->q;
    for (int k = 0; k < MOTORS; k++)
        wanted[k] = 0.5f + 0.5f * clampf(action[k], -1, 1);
    for (int step = 0; step < env->substeps; step++) {
        for (int k = 0; k < MOTORS; k++)
            f[k] += (wanted[k] - f[k]) * env->motor_rate;
        /* Motors are on the diagonals. Front left and back right turn one way, the others the other
         * way. */
        float lift = most * (f[0] + f[1] + f[2] + f[3]) / env->mass;
        float roll = most * lever * (f[0] + f[1] - f[2] - f[3]) / env->inertia_xy;
        float pitch = most * lever * (f[1] + f[2] - f[0] - f[3]) / env->inertia_xy;
        float yaw = most * env->torque_to_thrust * (f[0] - f[1] + f[2] - f[3]) / env->inertia_z;
        Vec w = drone->spin;
        w.x += time * (roll + uneven * drone->spin.y * drone->spin.z - env->spin_drag * w.x);
        w.y += time * (pitch - uneven * drone->spin.x * drone->spin.z - env->spin_drag * w.y);
        w.z += time * (yaw - env->spin_drag * w.z);
        drone->spin = w = (Vec){clampf(w.x, -MAX_SPIN, MAX_SPIN), clampf(w.y, -MAX_SPIN, MAX_SPIN),
                                clampf(w.z, -MAX_SPIN, MAX_SPIN)};
        float h = 0.5f * time, a = q[0], b = q[1], c = q[2], d = q[3];
        q[0] = a - h * (b * w.x + c * w.y + d * w.z);
        q[1] = b + h * (a * w.x + c * w.z - d * w.y);
        q[2] = c + h * (a * w.y - b * w.z + d * w.x);
        q[3] = d + h * (a * w.z + b * w.y - c * w.x);
        float norm = 1 / sqrtf(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3]);
        for (int k = 0; k < 4; k++)
            q[k] *= norm;
        Vec up = {2 * (q[1] * q[3] + q[0] * q[2]), 2 * (q[2] * q[3] - q[0] * q[1]),
                  1 - 2 * (q[1] * q[1] + q[2] * q[2])};
        Vec acceleration = subtract(scale(up, lift), scale(drone->velocity, env->drag));
        acceleration.z -= env->gravity;
        drone->velocity = add(drone->velocity, scale(acceleration, time));
        drone->at = add(drone->at, scale(drone->velocity, time));
    }
}

/* Returns whether the way from one place to another passes through the ring, forwards. */
static bool passes(const Env* env, const Ring* ring, Vec from, Vec to) {
    float before = dot(subtract(from, ring->at), ring->way);
    float after = dot(subtract(to, ring->at), ring->way);
    if (!(before < 0 && after >= 0)) return false;
    Vec at = subtract(add(from, scale(subtract(to, from), before / (before - after))), ring->at);
    return dot(at, at) <= env->ring_radius * env->ring_radius;
}

static float distance(Vec a, Vec b) {
    Vec apart = subtract(a, b);
    return sqrtf(dot(apart, apart));
}

static void log_episode(Env* env, const Drone* drone, bool crashed) {
    LOG_EPISODE(env,
                env->race ? (float)drone->ring / (float)env->rings
                          : (float)drone->near / (float)env->max_steps,
                env->race ? (float)drone->ring : drone->total, drone->total, drone->tick);
    env->log.crashed += crashed;
}

static void c_step(Env* env) {
    bool crashed[MAX_AGENTS], ended = false;
    for (int i = 0; i < env->num_agents; i++) {
        Drone* drone = &env->drones[i];
        Vec from = drone->at, target = target_of(env, drone, 0);
        fly(env, drone, env->continuous_actions + i * MOTORS);
        drone->tick++;
        float apart = distance(drone->at, target), reward;
        if (env->race) {
            reward = 0.1f * (distance(from, target) - apart);
            if (passes(env, &env->course[drone->ring], from, drone->at)) {
                drone->ring++;
                reward += 1;
            }
        } else {
            Vec w = drone->spin;
            reward = 0.1f * maxf(1 - apart / 4, 0) - 0.001f * sqrtf(dot(w, w));
            drone->near += apart <= env->radius;
        }
        env->rewards[i] = reward;
        Vec at = drone->at; /* written with "not", so that a NaN is a crash too */
        crashed[i] = !(fabsf(at.x) <= ROOM && fabsf(at.y) <= ROOM && at.z >= 0 && at.z <= HEIGHT);
    }
    float safe = env->safe_distance * env->safe_distance;
    for (int i = 0; i < env->num_agents; i++) {
        for (int k = 0; k < i; k++) {
            Vec apart = subtract(env->drones[i].at, env->drones[k].at);
            if (dot(apart, apart) < safe) crashed[i] = crashed[k] = true;
        }
    }
    for (int i = 0; i < env->num_agents; i++) {
        Drone* drone = &env->drones[i];
        bool done = crashed[i] || drone->ring == env->rings;
        if (crashed[i]) env->rewards[i] = -1;
        env->terminals[i] = done;
        env->truncations[i] = !done && drone->tick >= env->max_steps;
        drone->total += env->rewards[i];
        ended |= env->terminals[i] || env->truncations[i];
    }
    /* Final observations come first, before any drone is moved elsewhere. */
    for (int i = 0; ended && i < env->num_agents; i++)
        if ((env->terminals[i] || env->truncations[i]) && WANTS_FINAL(env, env->truncations[i]))
            write_observation(env, i, env->final_observations + i * OBSERVATIONS);
    for (int i = 0; ended && i < env->num_agents; i++) {
        if (!env->terminals[i] && !env->truncations[i]) continue;
        log_episode(env, &env->drones[i], crashed[i]);
        place_drone(env, i);
    }
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, env->observations + i * OBSERVATIONS);
}

/* A camera outside a corner of the room looks at its middle. */
static Vector2 project(Vec v) {
    enum { WIDTH = 960, TALL = 720 };
    const Vec eye = {-13, -9, 9.5f}, middle = {0, 0, 2.6f};
    Vec ahead = subtract(middle, eye);
    ahead = scale(ahead, 1 / sqrtf(dot(ahead, ahead)));
    Vec right = {ahead.y, -ahead.x, 0};
    right = scale(right, 1 / sqrtf(dot(right, right)));
    Vec up = {right.y * ahead.z - right.z * ahead.y, right.z * ahead.x - right.x * ahead.z,
              right.x * ahead.y - right.y * ahead.x};
    Vec to = subtract(v, eye);
    float depth = maxf(dot(to, ahead), 0.1f);
    return (Vector2){WIDTH / 2 + 900 * dot(to, right) / depth,
                     TALL / 2 - 900 * dot(to, up) / depth};
}

static void draw_ring(Ring ring, float radius, Color color) {
    enum { PIECES = 28 };
    Vec side = {-ring.way.y, ring.way.x, 0};
    Vector2 last = {0, 0};
    for (int k = 0; k <= PIECES; k++) {
        float angle = (float)(2 * M_PI) * (float)k / PIECES;
        Vec rim =
            add(ring.at, add(scale(side, radius * cosf(angle)), (Vec){0, 0, radius * sinf(angle)}));
        Vector2 now = project(rim);
        if (k) DrawLineEx(last, now, 5, color);
        last = now;
    }
}

static void c_render(Env* env) {
    static const Color colors[] = {{0, 187, 204, 255},   {250, 190, 60, 255},  {90, 200, 120, 255},
                                   {226, 84, 84, 255},   {170, 130, 240, 255}, {240, 140, 190, 255},
                                   {150, 200, 255, 255}, {220, 220, 120, 255}};
    draw_begin(960, 720, "drone");
    draw_quad(project((Vec){-ROOM, -ROOM, 0}), project((Vec){ROOM, -ROOM, 0}),
              project((Vec){ROOM, ROOM, 0}), project((Vec){-ROOM, ROOM, 0}), DRAW_PANEL);
    for (int k = -6; k <= 6; k += 2) {
        float at = (float)k;
        DrawLineEx(project((Vec){at, -ROOM, 0}), project((Vec){at, ROOM, 0}), 1,
                   (Color){52, 70, 84, 255});
        DrawLineEx(project((Vec){-ROOM, at, 0}), project((Vec){ROOM, at, 0}), 1,
                   (Color){52, 70, 84, 255});
    }
    for (int k = 0; k < 4; k++) {
        Vec corner = {k & 1 ? ROOM : -ROOM, k & 2 ? ROOM : -ROOM, 0}, next = corner;
        if (k == 0 || k == 3) next.x = -next.x;
        else next.y = -next.y;
        Vec top = corner, next_top = next;
        top.z = next_top.z = HEIGHT;
        DrawLineEx(project(corner), project(top), 1, (Color){52, 70, 84, 255});
        DrawLineEx(project(top), project(next_top), 1, (Color){52, 70, 84, 255});
    }
    for (int i = 0; env->race && i < env->rings; i++)
        draw_ring(env->course[i], env->ring_radius,
                  draw_mix(DRAW_GOLD, DRAW_RED, (float)i / (float)env->rings));
    for (int i = 0; i < env->num_agents; i++) {
        const Drone* drone = &env->drones[i];
        Color color = colors[i % 8], dim = draw_mix(color, DRAW_PANEL, 0.55f);
        Axes axes = axes_of(drone->q);
        Vec shadow = {drone->at.x, drone->at.y, 0};
        DrawLineEx(project(shadow), project(drone->at), 1, dim);
        DrawCircleV(project(shadow), 4, DRAW_BACKGROUND);
        if (!env->race) {
            DrawCircleLinesV(project(drone->goal), 11, color);
            DrawCircleV(project(drone->goal), 4, color);
            DrawLineEx(project(drone->at), project(drone->goal), 1, dim);
        }
        for (int k = 0; k < MOTORS; k++) { /* five times its real size */
            float ahead = k == 0 || k == 3 ? 0.2f : -0.2f, left = k < 2 ? 0.2f : -0.2f;
            Vec motor = add(drone->at, add(scale(axes.forward, ahead), scale(axes.left, left)));
            DrawLineEx(project(drone->at), project(motor), 4, DRAW_GREY);
            Vector2 last = {0, 0};
            for (int piece = 0; piece <= 14; piece++) {
                float angle = (float)(2 * M_PI) * (float)piece / 14;
                Vec out = add(scale(axes.forward, 0.15f * cosf(angle)),
                              scale(axes.left, 0.15f * sinf(angle)));
                Vector2 now = project(add(motor, out));
                if (piece) DrawLineEx(last, now, 3, k == 0 || k == 3 ? DRAW_WHITE : color);
                last = now;
            }
        }
        DrawCircleV(project(drone->at), 6, color);
    }
    draw_end();
}
