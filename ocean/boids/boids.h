/* Boids: a flock without a leader (Reynolds 1987), as a task to learn. Boids fly on a plane whose
 * opposite edges are joined. Each step a boid turns by up to `max_turn` and changes its speed by up
 * to `acceleration`, within min_speed .. max_speed. It sees its nearest `neighbours` within
 * `vision`: seven by default, as many as starlings mind (Ballerini et al. 2008). Each boid is paid
 * by Reynolds's three rules for what it sees:
 *     alignment   the mean cosine between its own heading and theirs
 *     cohesion    1 - distance to their centre / vision
 *     crowding    1 - distance to the nearest / space, at least 0
 *     payment     share of `neighbours` in sight
 *                 * (alignment_weight * alignment + cohesion_weight * cohesion)
 *                 - separation_weight * crowding
 *     reward      reward_scale * payment
 * The highest payment is 1 by default. The flock starts at random. An episode is truncated after
 * max_steps. The first episode of an environment begins at a random step, so that environments do
 * not end together; it is not logged. score is the mean payment.
 * perf is the score, at least 0. Boids that follow Reynolds's rules have a score of about 0.77,
 * random ones 0.07.
 *
 *     observation, in the boid's axes (x forward, y right), within -1..1
 *     0        speed / max_speed
 *     1        share of `neighbours` in sight
 *     2, 3     way to their centre / vision
 *     4, 5     their mean velocity less its own / (2 max_speed)
 *     6 + 5 k  of the k-th nearest, all 0 if there is none:
 *              1 - distance / vision, way / vision (2), velocity less its own / (2 max_speed) (2)
 *
 * Actions: 5 turns, from left to right, and 3 changes of speed: slower, none, faster. With
 * `continuous`: two numbers in -1..1. */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(alignment) X(cohesion) X(crowding)
#define SETTINGS(X) \
    X(int, num_agents, 64, "boids on one plane") \
    X(int, neighbours, 7, "that a boid minds, the nearest ones") \
    X(bool, continuous, false, "two numbers instead of 5 turns and 3 changes of speed") \
    X(int, max_steps, 512, "steps after which the flock is truncated") \
    X(float, width, 1080.0, "of the plane") \
    X(float, height, 720.0, "of the plane") \
    X(float, vision, 100.0, \
      "distance at which boids see each other, at most a third of either side") \
    X(float, space, 24.0, "distance below which they crowd each other") \
    X(float, min_speed, 2.0, "distance flown in a step") \
    X(float, max_speed, 8.0, "distance flown in a step") \
    X(float, acceleration, 1.0, "change of speed in a step, at most") \
    X(float, max_turn, 0.2, "in a step, radians") \
    X(float, alignment_weight, 0.5, "of flying the same way in the reward") \
    X(float, cohesion_weight, 0.5, "of being in the midst of others") \
    X(float, separation_weight, 1.0, "of being too near") \
    X(float, reward_scale, 0.1, "of the reward; score is not touched")
#define KEYS(KEY) \
    KEY(0, REST, 2) KEY(0, LEFT, 0) KEY(0, RIGHT, 4) \
    KEY(1, REST, 1) KEY(1, DOWN, 0) KEY(1, UP, 2)
#include "env.h"
#include "draw.h"

enum {
    MAX_AGENTS = 1024, MAX_NEIGHBOURS = 16, MAX_SIDE = 32, HEAD = 6, EACH = 5, TURNS = 5, SPEEDS = 3
};

typedef struct {
    float x, y;
    float cosine, sine; /* of the heading; y points down */
    float speed;
} Boid;

struct Env {
    ENV_COMMON
    bool begun, whole; /* whole: the episode began at its first step */
    int tick;
    int columns, rows; /* cells, no smaller than vision */
    double total, alignment, cohesion, crowding; /* sums over the boids and steps of the episode */
    Boid boids[MAX_AGENTS];
    /* Sorts the boids by cell: those of cell c are sorted[first[c]] to sorted[first[c + 1] - 1]. */
    uint16_t cells[MAX_AGENTS], first[MAX_SIDE * MAX_SIDE + 1], sorted[MAX_AGENTS];
};

static const char* c_init(Env* env) {
    if (env->num_agents < 2 || env->num_agents > MAX_AGENTS)
        return "num_agents must lie within 2..1024";
    if (env->neighbours < 1 || env->neighbours > MAX_NEIGHBOURS)
        return "neighbours must lie within 1..16";
    if (env->max_steps < 1) return "max_steps must be 1 or more";
    float side = minf(env->width, env->height);
    if (!(env->vision > 0) || !(env->vision <= side / 3) || isinf(maxf(env->width, env->height)))
        return "vision must be above 0 and at most a third of width and of height";
    if (!(env->space > 0)) return "space must be above 0";
    if (!(env->min_speed >= 0) || !(env->max_speed >= env->min_speed) || !(env->max_speed > 0) ||
        !(env->max_speed < side))
        return "speeds must obey 0 <= min_speed <= max_speed, 0 < max_speed < width and height";
    if (!(env->acceleration >= 0) || !(env->max_turn >= 0 && env->max_turn <= (float)M_PI))
        return "acceleration must be 0 or more, max_turn within 0..pi";
    if (!isfinite(env->alignment_weight) || !isfinite(env->cohesion_weight) ||
        !isfinite(env->separation_weight) || !isfinite(env->reward_scale) ||
        !isfinite(env->acceleration) || !isfinite(env->space))
        return "weights, acceleration, space and reward_scale must be finite";
    env->columns = (int)minf(env->width / env->vision, MAX_SIDE);
    env->rows = (int)minf(env->height / env->vision, MAX_SIDE);
    return NULL;
}

static int observation_size(const Env* env) {
    return HEAD + EACH * env->neighbours;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {observation_size(env)},
        .observation_low = -1,
        .observation_high = 1,
    };
    if (env->continuous) {
        spaces->action_dims = 2;
    } else {
        spaces->action_heads[0] = TURNS;
        spaces->action_heads[1] = SPEEDS;
    }
}

static void sort_into_cells(Env* env) {
    float per_x = (float)env->columns / env->width, per_y = (float)env->rows / env->height;
    memset(env->first, 0, sizeof(env->first));
    for (int i = 0; i < env->num_agents; i++) {
        int column = (int)minf(env->boids[i].x * per_x, (float)(env->columns - 1));
        int row = (int)minf(env->boids[i].y * per_y, (float)(env->rows - 1));
        env->cells[i] = (uint16_t)(row * env->columns + column);
        env->first[env->cells[i] + 1]++;
    }
    for (int c = 0; c < env->columns * env->rows; c++)
        env->first[c + 1] += env->first[c];
    /* This takes first[c + 1] down to the beginning of c ... */
    for (int i = env->num_agents - 1; i >= 0; i--)
        env->sorted[--env->first[env->cells[i] + 1]] = (uint16_t)i;
    for (int c = 0; c < env->columns * env->rows; c++) /* ... so all move up by one */
        env->first[c] = env->first[c + 1];
    env->first[env->columns * env->rows] = (uint16_t)env->num_agents;
}

typedef struct {
    float squared, x, y; /* of the way there */
    int who;
} Neighbour;

/* The shorter way around a joined edge. */
static inline float wrapped(float way, float side) {
    return way - side * (float)(way > 0.5f * side) + side * (float)(way < -0.5f * side);
}

/* A row or column at most one beside the plane is the one at its other end. */
static inline int around(int at, int count) {
    return at < 0 ? at + count : at >= count ? at - count : at;
}

/* Finds the nearest within vision, nearest first, and returns how many. A cell is no smaller than
 * vision, so they are in the nine cells around. */
static int find_neighbours(const Env* env, int i, Neighbour* found) {
    const Boid* boid = &env->boids[i];
    int row = env->cells[i] / env->columns, column = env->cells[i] % env->columns, count = 0;
    float reach = env->vision * env->vision;
    for (int r = -1; r <= 1; r++) {
        int base = around(row + r, env->rows) * env->columns;
        for (int c = -1; c <= 1; c++) {
            int at = around(column + c, env->columns);
            for (int k = env->first[base + at]; k < env->first[base + at + 1]; k++) {
                int who = env->sorted[k];
                float x = wrapped(env->boids[who].x - boid->x, env->width);
                float y = wrapped(env->boids[who].y - boid->y, env->height);
                float squared = x * x + y * y;
                if (squared >= reach || who == i) continue;
                int place = count < env->neighbours ? count++ : count - 1;
                for (; place > 0 && found[place - 1].squared > squared; place--)
                    found[place] = found[place - 1];
                found[place] = (Neighbour){squared, x, y, who};
                if (count == env->neighbours) reach = found[count - 1].squared;
            }
        }
    }
    return count;
}

/* Writes what boid i sees and returns its payment. */
static float observe(Env* env, int i, float* observation) {
    const Boid* boid = &env->boids[i];
    Neighbour found[MAX_NEIGHBOURS];
    int count = find_neighbours(env, i, found);
    float far = 1 / env->vision, fast = 0.5f / env->max_speed;
    float x = 0, y = 0, velocity_x = 0, velocity_y = 0, aligned = 0;
    float* out = observation + HEAD;
    for (int k = 0; k < count; k++, out += EACH) {
        const Boid* other = &env->boids[found[k].who];
        /* Into the boid's own axes. */
        float ahead = boid->cosine * found[k].x + boid->sine * found[k].y;
        float beside = boid->cosine * found[k].y - boid->sine * found[k].x;
        float cosine = boid->cosine * other->cosine + boid->sine * other->sine;
        float sine = boid->cosine * other->sine - boid->sine * other->cosine;
        float faster_x = other->speed * cosine - boid->speed, faster_y = other->speed * sine;
        out[0] = 1 - sqrtf(found[k].squared) * far;
        out[1] = clampf(ahead * far, -1, 1);
        out[2] = clampf(beside * far, -1, 1);
        out[3] = clampf(faster_x * fast, -1, 1);
        out[4] = clampf(faster_y * fast, -1, 1);
        x += ahead;
        y += beside;
        velocity_x += faster_x;
        velocity_y += faster_y;
        aligned += cosine;
    }
    memset(out, 0, (size_t)(env->neighbours - count) * EACH * sizeof(float));
    float mean = count ? 1 / (float)count : 0, share = (float)count / (float)env->neighbours;
    x *= mean * far;
    y *= mean * far;
    observation[0] = boid->speed / env->max_speed;
    observation[1] = share;
    observation[2] = clampf(x, -1, 1);
    observation[3] = clampf(y, -1, 1);
    observation[4] = clampf(velocity_x * mean * fast, -1, 1);
    observation[5] = clampf(velocity_y * mean * fast, -1, 1);
    float alignment = share * aligned * mean, cohesion = share * maxf(1 - sqrtf(x * x + y * y), 0);
    float crowding = count ? maxf(1 - sqrtf(found[0].squared) / env->space, 0) : 0;
    env->alignment += alignment;
    env->cohesion += cohesion;
    env->crowding += crowding;
    return env->alignment_weight * alignment + env->cohesion_weight * cohesion -
           env->separation_weight * crowding;
}

static void observe_all(Env* env, float* observations, float* rewards) {
    int size = observation_size(env);
    sort_into_cells(env);
    for (int i = 0; i < env->num_agents; i++) {
        float payment = observe(env, i, observations + i * size);
        if (!rewards) continue;
        env->total += payment;
        rewards[i] = env->reward_scale * payment;
    }
}

static void c_reset(Env* env) {
    for (int i = 0; i < env->num_agents; i++) {
        float heading = random_float(&env->rng, 0, (float)(2 * M_PI));
        float x = random_float(&env->rng, 0, env->width);
        float y = random_float(&env->rng, 0, env->height);
        float speed = random_float(&env->rng, env->min_speed, env->max_speed);
        env->boids[i] =
            (Boid){.x = x, .y = y, .cosine = cosf(heading), .sine = sinf(heading), .speed = speed};
    }
    env->tick = env->begun ? 0 : random_int(&env->rng, env->max_steps);
    env->whole = env->tick == 0;
    env->begun = true;
    observe_all(env, env->observations, NULL);
    env->total = env->alignment = env->cohesion = env->crowding = 0;
}

static void log_episode(Env* env) {
    double count = (double)env->max_steps * env->num_agents, score = env->total / count;
    LOG_EPISODE(env, clampf((float)score, 0, 1), (float)score,
                (float)(env->reward_scale * score * env->max_steps), env->max_steps);
    env->log.alignment += (float)(env->alignment / count);
    env->log.cohesion += (float)(env->cohesion / count);
    env->log.crowding += (float)(env->crowding / count);
}

/* turn and push lie within -1..1. */
static void fly(const Env* env, Boid* boid, float turn, float push) {
    float turn_cosine = cosf(turn * env->max_turn), turn_sine = sinf(turn * env->max_turn);
    float cosine = boid->cosine * turn_cosine - boid->sine * turn_sine;
    float sine = boid->sine * turn_cosine + boid->cosine * turn_sine;
    /* One Newton step towards length 1, so that rounding errors do not add up. */
    float shrink = 1.5f - 0.5f * (cosine * cosine + sine * sine);
    boid->cosine = cosine * shrink;
    boid->sine = sine * shrink;
    boid->speed = clampf(boid->speed + push * env->acceleration, env->min_speed, env->max_speed);
    float x = boid->x + boid->cosine * boid->speed, y = boid->y + boid->sine * boid->speed;
    boid->x = x < 0 ? x + env->width : x >= env->width ? x - env->width : x;
    boid->y = y < 0 ? y + env->height : y >= env->height ? y - env->height : y;
}

static void c_step(Env* env) {
    for (int i = 0; i < env->num_agents; i++) {
        if (env->continuous) {
            const float* action = env->continuous_actions + 2 * i;
            fly(env, &env->boids[i], clampf(action[0], -1, 1), clampf(action[1], -1, 1));
        } else {
            const int32_t* action = env->actions + 2 * i;
            fly(env, &env->boids[i], 0.5f * (float)(action[0] - TURNS / 2),
                (float)(action[1] - SPEEDS / 2));
        }
    }
    bool over = ++env->tick >= env->max_steps;
    /* The last state of an episode is paid too. It is written as the final observation, or, if
     * no caller wants that, to the row that is overwritten next. */
    float* seen = over && env->final_observations ? env->final_observations : env->observations;
    observe_all(env, seen, env->rewards);
    memset(env->terminals, 0, (uint32_t)env->num_agents);
    memset(env->truncations, over, (uint32_t)env->num_agents);
    if (!over) return;
    if (env->whole) log_episode(env);
    c_reset(env);
}

/* The colour is the heading's, so that a flock that flies one way has one colour. */
static Color heading_color(const Boid* boid) {
    float third = 0.8660254f, red = boid->cosine, green = -0.5f * boid->cosine + third * boid->sine;
    float blue = -0.5f * boid->cosine - third * boid->sine;
    return (Color){(unsigned char)(160 + 80 * red), (unsigned char)(160 + 80 * green),
                   (unsigned char)(160 + 80 * blue), 255};
}

static void c_render(Env* env) {
    float scale = minf(1080 / env->width, 720 / env->height);
    float size = maxf(0.4f * env->space * scale, 5);
    draw_begin((int)(env->width * scale), (int)(env->height * scale), "boids");
    for (int i = 0; i < env->num_agents; i++) {
        const Boid* boid = &env->boids[i];
        float x = boid->x * scale, y = boid->y * scale;
        float ahead_x = size * boid->cosine, ahead_y = size * boid->sine;
        if (i == 0) { /* the player's, and what it sees */
            DrawCircleV((Vector2){x, y}, env->vision * scale, DRAW_PANEL);
            DrawCircleLinesV((Vector2){x, y}, env->space * scale, DRAW_GREY);
        }
        Vector2 nose = {x + ahead_x, y + ahead_y}, tail = {x - 0.5f * ahead_x, y - 0.5f * ahead_y};
        Vector2 left = {x - ahead_x + 0.6f * ahead_y, y - ahead_y - 0.6f * ahead_x};
        Vector2 right = {x - ahead_x - 0.6f * ahead_y, y - ahead_y + 0.6f * ahead_x};
        Color color = i ? heading_color(boid) : DRAW_WHITE;
        draw_triangle(nose, left, tail, color);
        draw_triangle(nose, tail, right, color);
    }
    draw_end();
}
