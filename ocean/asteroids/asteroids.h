/* Asteroids: a ship among drifting rocks, in a field of 1024 x 768 whose opposite edges are joined.
 *   - A shot breaks a large rock (20 points) into two middle ones (50 points), and a middle one
 *     into two small ones (100 points).
 *   - The first wave has 4 large rocks. When all rocks are gone, the next wave has two more, up to
 *     11.
 *   - Now and then a saucer crosses and shoots. The large one (200 points) shoots anywhere. The
 *     small one (1000 points) aims at the ship; it comes once the score is 10,000.
 *   - Whatever touches the ship breaks, and the ship is lost. There are three ships, and one more
 *     for every 10,000 points. A new ship appears in the middle after respawn_seconds, when that is
 *     clear.
 *   - Hyperspace puts the ship at a random place. One time in six the ship breaks there.
 *   - The loss of the last ship ends the episode.
 * The reward is the points over reward_points, plus reward_loss for each ship lost. score is the
 * points.
 * perf is the points over 10,000, at most 1.
 *
 *     observation; positions and velocities are in the ship's axes (ahead, right), cut to -1..1
 *     0, 1       velocity of the ship, over 600 pixels a second
 *     2, 3       1 while there is a ship; ships left over 5
 *     4, 5       share of the shots that can be fired; time until the next shot, over its length
 *     6 .. 10    saucer: 1 if there is one, position, size (0.5 small, 1 large), 1 if it has a shot
 *     11 .. 14   the saucer's shot: position, velocity less the ship's
 *     15 ..      each of the 10 nearest rocks: position (over half the field's width), velocity
 *                less the ship's (over 600 pixels a second), size (1/3, 2/3, 1); all 0 if there is
 *                no rock
 *
 * Actions: turn (none, left, right), drive (none, thrust, hyperspace), fire (no, yes). A tick is
 * 1/60 s. An action lasts frameskip ticks. Hyperspace happens once an action. */
#pragma once

#define OBSERVATION float
#define OWN_LOG(X) X(waves)
#define SETTINGS(X) \
    X(int, frameskip, 4, "ticks of 1/60 s that an action lasts") \
    X(int, ships, 3, "in the beginning") \
    X(int, first_rocks, 4, "large rocks of the first wave") \
    X(int, max_shots, 4, "of the ship at a time") \
    X(int, max_steps, 0, "steps after which an episode is truncated; 0: none") \
    X(float, turn, 4.5, "rad/s") \
    X(float, thrust, 360.0, "pixels/s^2") \
    X(float, drag, 0.4, "of the ship, 1/s") \
    X(float, shot_speed, 480.0, "pixels a second, more than the ship's own") \
    X(float, shot_seconds, 1.0, "that a shot lasts") \
    X(float, rock_speed, 60.0, \
      "of a large rock; middle ones fly half as fast again, small ones twice as fast") \
    X(float, respawn_seconds, 1.0, "without a ship after a loss, at least") \
    X(float, saucer_seconds, 15.0, "without a saucer, on average") \
    X(float, reward_points, 100.0, "points that give a reward of 1") \
    X(float, reward_loss, -1.0, "for a ship lost")
#define FPS 15
#define KEYS(KEY) KEY(0, LEFT, 1) KEY(0, RIGHT, 2) KEY(1, UP, 1) KEY(1, DOWN, 2) KEY(2, SPACE, 1)
#include "env.h"
#include "draw.h"

enum {
    MAX_ROCKS = 48, MAX_SHOTS = 16, MOST_LARGE = 11, SEEN = 10, OBSERVATIONS = 15 + 5 * SEEN,
    EXTRA_SHIP = 10000
};
#define WIDTH 1024.0f
#define HEIGHT 768.0f
#define SHIP 12.0f /* radius */
#define SPEED 600.0f /* the ship's highest */
#define COOLDOWN 8 /* ticks between two shots */
static const float rock_radius[4] = {0, 14, 28, 54}, saucer_radius[3] = {0, 12, 22};
static const int rock_points[4] = {0, 100, 50, 20}, saucer_points[3] = {0, 1000, 200};

typedef struct {
    float x, y, vx, vy; /* pixels, pixels a tick */
    /* of a shot: ticks left; of a rock: its size, 3 large to 1 small; 0: it is gone */
    int life;
} Body;

struct Env {
    ENV_COMMON
    /* life of the ship: 1; of the saucer: 1 if small, 2 if large */
    Body ship, saucer, saucer_shot;
    float cosine, sine; /* of the ship's heading */
    float turn_cosine, turn_sine;
    /* ticks until the ship can fire again; without a ship, until the next may come */
    int heat;
    int saucer_wait; /* ticks until it comes; once it is there, until it fires */
    Body shots[MAX_SHOTS];
    Body rocks[MAX_ROCKS];
    int num_rocks, wave, ships_left, points, next_ship, tick;
    bool thrusts;
    float total;
};

static const char* c_init(Env* env) {
    if (env->frameskip < 1 || env->frameskip > 60) return "frameskip must lie within 1..60";
    if (env->ships < 1 || env->ships > 1000) return "ships must lie within 1..1000";
    if (env->first_rocks < 1 || env->first_rocks > MOST_LARGE)
        return "first_rocks must lie within 1..11";
    if (env->max_shots < 1 || env->max_shots > MAX_SHOTS) return "max_shots must lie within 1..16";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    if (!(env->turn > 0 && env->turn <= 60)) return "turn must lie within 0..60";
    if (!(env->thrust >= 0 && env->thrust <= 10000)) return "thrust must lie within 0..10000";
    if (!(env->drag >= 0 && env->drag < 60)) return "drag must lie within 0..60";
    if (!(env->shot_speed > 0 && env->shot_speed <= 1200))
        return "shot_speed must lie within 0..1200";
    if (!(env->shot_seconds > 0 && env->shot_seconds <= 60))
        return "shot_seconds must lie within 0..60";
    if (!(env->rock_speed > 0 && env->rock_speed <= 600))
        return "rock_speed must lie within 0..600";
    if (!(env->respawn_seconds >= 0 && env->respawn_seconds <= 60))
        return "respawn_seconds must lie within 0..60";
    if (!(env->saucer_seconds >= 1 && env->saucer_seconds <= 1e6f))
        return "saucer_seconds: 1..1000000";
    if (!(env->reward_points > 0)) return "reward_points must be above 0";
    env->turn_cosine = cosf(env->turn / 60);
    env->turn_sine = sinf(env->turn / 60);
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {3, 3, 2},
    };
}

/* The shorter way around a joined edge. */
static inline float around(float way, float size) {
    return way > size / 2 ? way - size : way < -size / 2 ? way + size : way;
}

static inline float square_distance(const Body* a, const Body* b) {
    float x = around(a->x - b->x, WIDTH), y = around(a->y - b->y, HEIGHT);
    return x * x + y * y;
}

static inline void move(Body* body) {
    body->x += body->vx;
    body->y += body->vy;
    body->x += body->x < 0 ? WIDTH : body->x >= WIDTH ? -WIDTH : 0;
    body->y += body->y < 0 ? HEIGHT : body->y >= HEIGHT ? -HEIGHT : 0;
}

/* Turns a vector into the ship's axes and cuts it. */
static void write_pair(const Env* env, float x, float y, float over, float* observation) {
    observation[0] = clampf((x * env->cosine + y * env->sine) / over, -1, 1);
    observation[1] = clampf((y * env->cosine - x * env->sine) / over, -1, 1);
}

static void write_place(const Env* env, const Body* body, float* observation) {
    float x = around(body->x - env->ship.x, WIDTH), y = around(body->y - env->ship.y, HEIGHT);
    write_pair(env, x, y, WIDTH / 2, observation);
}

static void write_velocity(const Env* env, const Body* body, float* observation) {
    write_pair(env, body->vx - env->ship.vx, body->vy - env->ship.vy, SPEED / 60, observation);
}

static void write_observation(const Env* env, float* o) {
    int flying = 0;
    for (int i = 0; i < env->max_shots; i++)
        flying += env->shots[i].life > 0;
    write_pair(env, env->ship.vx, env->ship.vy, SPEED / 60, o);
    o[2] = env->ship.life > 0;
    o[3] = minf((float)env->ships_left / 5, 1);
    o[4] = 1 - (float)flying / (float)env->max_shots;
    o[5] = minf((float)env->heat / COOLDOWN, 1);
    o[6] = env->saucer.life > 0;
    o[7] = o[8] = 0;
    if (env->saucer.life) write_place(env, &env->saucer, o + 7);
    o[9] = 0.5f * (float)env->saucer.life;
    o[10] = env->saucer_shot.life > 0;
    memset(o + 11, 0, 4 * sizeof(float));
    if (env->saucer_shot.life) {
        write_place(env, &env->saucer_shot, o + 11);
        write_velocity(env, &env->saucer_shot, o + 13);
    }
    /* Finds the nearest rocks, nearest first, by insertion. */
    float near[SEEN];
    int which[SEEN], seen = 0;
    for (int i = 0; i < env->num_rocks; i++) {
        float apart = square_distance(&env->rocks[i], &env->ship);
        if (seen == SEEN && apart >= near[SEEN - 1]) continue;
        int at = seen < SEEN ? seen++ : SEEN - 1;
        for (; at > 0 && near[at - 1] > apart; at--) {
            near[at] = near[at - 1];
            which[at] = which[at - 1];
        }
        near[at] = apart;
        which[at] = i;
    }
    o += 15;
    for (int i = 0; i < seen; i++, o += 5) {
        const Body* rock = &env->rocks[which[i]];
        write_place(env, rock, o);
        write_velocity(env, rock, o + 2);
        o[4] = (float)rock->life / 3;
    }
    memset(o, 0, sizeof(float) * (size_t)(5 * (SEEN - seen)));
}

static void send(Env* env, Body* body, float speed) {
    float angle = random_float(&env->rng, 0, (float)(2 * M_PI));
    body->vx = speed / 60 * cosf(angle);
    body->vy = speed / 60 * sinf(angle);
}

static void add_rock(Env* env, float x, float y, int size) {
    static const float faster[4] = {0, 2, 1.5f, 1};
    if (env->num_rocks == MAX_ROCKS) return;
    Body* rock = &env->rocks[env->num_rocks++];
    *rock = (Body){.x = x, .y = y, .life = size};
    send(env, rock, env->rock_speed * faster[size] * random_float(&env->rng, 0.7f, 1.3f));
}

/* Large rocks begin on an edge of the field. */
static void begin_wave(Env* env) {
    int count = env->first_rocks + 2 * env->wave++;
    env->num_rocks = 0;
    for (int i = 0; i < count && i < MOST_LARGE; i++) {
        bool side = random_int(&env->rng, 2);
        float along = random_float(&env->rng, 0, side ? HEIGHT : WIDTH);
        add_rock(env, side ? 0 : along, side ? along : 0, 3);
    }
}

static void wait_for_saucer(Env* env) {
    env->saucer.life = 0;
    env->saucer_wait = (int)(60 * env->saucer_seconds * random_float(&env->rng, 0.5f, 1.5f));
}

static void place_ship(Env* env) {
    env->ship = (Body){.x = WIDTH / 2, .y = HEIGHT / 2, .life = 1};
    env->cosine = 0;
    env->sine = -1;
    env->heat = 0;
}

static void c_reset(Env* env) {
    memset(env->shots, 0, sizeof(env->shots));
    env->saucer_shot.life = 0;
    env->wave = env->points = env->tick = 0;
    env->ships_left = env->ships - 1;
    env->next_ship = EXTRA_SHIP;
    env->total = 0;
    env->thrusts = false;
    place_ship(env);
    begin_wave(env);
    wait_for_saucer(env);
    write_observation(env, env->observations);
}

static void score(Env* env, int points) {
    env->points += points;
    if (env->points >= env->next_ship) {
        env->ships_left++;
        env->next_ship += EXTRA_SHIP;
    }
}

static void break_rock(Env* env, int i) {
    Body rock = env->rocks[i];
    env->rocks[i] = env->rocks[--env->num_rocks];
    for (int k = 0; k < 2 && rock.life > 1; k++)
        add_rock(env, rock.x, rock.y, rock.life - 1);
}

/* Returns the rock that a body of some radius touches, or -1. */
static int touched_rock(const Env* env, const Body* body, float radius) {
    for (int i = 0; i < env->num_rocks; i++) {
        float reach = rock_radius[env->rocks[i].life] + radius;
        if (square_distance(&env->rocks[i], body) < reach * reach) return i;
    }
    return -1;
}

static bool touch(const Body* a, const Body* b, float reach) {
    return a->life && b->life && square_distance(a, b) < reach * reach;
}

static void fire(Env* env) {
    if (env->heat > 0 || !env->ship.life) return;
    for (int i = 0; i < env->max_shots; i++) {
        Body* shot = &env->shots[i];
        if (shot->life) continue;
        *shot = (Body){env->ship.x, env->ship.y, env->ship.vx + env->cosine * env->shot_speed / 60,
                       env->ship.vy + env->sine * env->shot_speed / 60,
                       (int)ceilf(env->shot_seconds * 60)};
        env->heat = COOLDOWN;
        return;
    }
}

static void steer(Env* env) {
    float turn = (float)((env->actions[0] == 2) - (env->actions[0] == 1)) * env->turn_sine;
    if (turn != 0) {
        float cosine = env->cosine * env->turn_cosine - env->sine * turn;
        float sine = env->sine * env->turn_cosine + env->cosine * turn;
        /* keeps the length at 1 against rounding */
        float shrink = 1.5f - 0.5f * (cosine * cosine + sine * sine);
        env->cosine = cosine * shrink;
        env->sine = sine * shrink;
    }
    Body* ship = &env->ship;
    env->thrusts = env->actions[1] == 1;
    float push = env->thrusts ? env->thrust / 3600 : 0, keep = 1 - env->drag / 60;
    ship->vx = ship->vx * keep + push * env->cosine;
    ship->vy = ship->vy * keep + push * env->sine;
    float speed = sqrtf(ship->vx * ship->vx + ship->vy * ship->vy);
    if (speed > SPEED / 60) {
        ship->vx *= SPEED / 60 / speed;
        ship->vy *= SPEED / 60 / speed;
    }
}

static void move_saucer(Env* env) {
    Body* saucer = &env->saucer;
    if (!saucer->life) {
        if (--env->saucer_wait > 0) return;
        bool right = random_int(&env->rng, 2);
        *saucer = (Body){right ? 0 : WIDTH - 1, random_float(&env->rng, 0, HEIGHT),
                         right ? 2.0f : -2.0f, 0, 2};
        if (env->points >= EXTRA_SHIP) saucer->life = 1;
        env->saucer_wait = 60;
        return;
    }
    float before = saucer->x;
    move(saucer);
    if (fabsf(saucer->x - before) > WIDTH / 2) { /* it has crossed the field */
        wait_for_saucer(env);
        return;
    }
    if (--env->saucer_wait > 0) return;
    saucer->vy = (float)(random_int(&env->rng, 3) - 1) * 1.5f;
    env->saucer_wait = 60;
    Body* shot = &env->saucer_shot;
    *shot = (Body){saucer->x, saucer->y, 0, 0, 72};
    send(env, shot, 360);
    /* the small one aims, with an error of up to 0.15 rad */
    if (saucer->life == 1 && env->ship.life) {
        float x = around(env->ship.x - saucer->x, WIDTH);
        float y = around(env->ship.y - saucer->y, HEIGHT);
        float angle = atan2f(y, x) + random_float(&env->rng, -0.15f, 0.15f);
        shot->vx = 6 * cosf(angle);
        shot->vy = 6 * sinf(angle);
    }
}

static void move_shots(Env* env) {
    for (int i = 0; i < env->max_shots; i++) {
        Body* shot = &env->shots[i];
        if (!shot->life) continue;
        shot->life--;
        move(shot);
        int rock = touched_rock(env, shot, 2);
        if (rock >= 0) {
            score(env, rock_points[env->rocks[rock].life]);
            break_rock(env, rock);
            shot->life = 0;
        } else if (touch(&env->saucer, shot, saucer_radius[env->saucer.life])) {
            score(env, saucer_points[env->saucer.life]);
            wait_for_saucer(env);
            shot->life = 0;
        }
    }
    if (env->saucer_shot.life) {
        env->saucer_shot.life--;
        move(&env->saucer_shot);
        int rock = touched_rock(env, &env->saucer_shot, 2);
        if (rock >= 0) {
            break_rock(env, rock);
            env->saucer_shot.life = 0;
        }
    }
}

/* Returns whether something hit the ship in this tick. What it hit breaks and scores. */
static bool collide(Env* env) {
    Body* ship = &env->ship;
    int rock = touched_rock(env, ship, SHIP);
    if (rock >= 0) {
        score(env, rock_points[env->rocks[rock].life]);
        break_rock(env, rock);
        return true;
    }
    if (touch(&env->saucer_shot, ship, SHIP)) {
        env->saucer_shot.life = 0;
        return true;
    }
    if (touch(&env->saucer, ship, SHIP + saucer_radius[env->saucer.life])) {
        score(env, saucer_points[env->saucer.life]);
        wait_for_saucer(env);
        return true;
    }
    return false;
}

/* One tick; returns whether the ship was lost. */
static bool tick(Env* env) {
    Body* ship = &env->ship;
    bool lost = false;
    for (int i = 0; i < env->num_rocks; i++)
        move(&env->rocks[i]);
    if (env->heat > 0) env->heat--;
    if (ship->life) {
        steer(env);
        move(ship);
        if (env->actions[2]) fire(env);
    } else if (env->heat == 0) {
        Body middle = {.x = WIDTH / 2, .y = HEIGHT / 2};
        if (touched_rock(env, &middle, 80) < 0) place_ship(env);
    }
    move_saucer(env);
    move_shots(env);
    if (ship->life) lost = collide(env);
    if (env->num_rocks == 0) begin_wave(env);
    return lost;
}

static void c_step(Env* env) {
    int points = env->points, losses = 0;
    bool lost = false, over = false;
    if (env->actions[1] == 2 && env->ship.life) {
        env->ship.x = random_float(&env->rng, 0, WIDTH);
        env->ship.y = random_float(&env->rng, 0, HEIGHT);
        env->ship.vx = env->ship.vy = 0;
        lost = random_int(&env->rng, 6) == 0;
    }
    for (int i = 0; i < env->frameskip && !over; i++) {
        if (!lost) lost = tick(env);
        if (lost) {
            env->ship.life = 0;
            env->ship.vx = env->ship.vy = 0;
            env->heat = (int)(env->respawn_seconds * 60);
            losses++;
            over = env->ships_left == 0;
            env->ships_left -= !over;
            lost = false;
        }
    }
    env->tick++;
    bool late = !over && env->max_steps && env->tick >= env->max_steps;
    env->rewards[0] =
        (float)(env->points - points) / env->reward_points + (float)losses * env->reward_loss;
    env->terminals[0] = over;
    env->truncations[0] = late;
    env->total += env->rewards[0];
    if (!over && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, minf((float)env->points / EXTRA_SHIP, 1), env->points, env->total, env->tick);
    env->log.waves += (float)(env->wave - 1);
    c_reset(env);
}

/* Each rock has an outline of its own: the distances of its corners follow from its number. */
static void draw_rock(const Body* rock, int number) {
    enum { CORNERS = 11 };
    uint64_t shape = (uint64_t)(number * 4 + rock->life);
    Vector2 first = {0, 0}, last = {0, 0}, centre = {rock->x, rock->y};
    for (int k = 0; k <= CORNERS; k++) {
        float out = rock_radius[rock->life] * random_float(&shape, 0.82f, 1.14f);
        float angle = (float)(2 * M_PI) * (float)k / CORNERS;
        Vector2 now = {centre.x + out * cosf(angle), centre.y + out * sinf(angle)};
        if (k == CORNERS) now = first;
        if (k == 0) first = now;
        else {
            draw_triangle(centre, last, now, DRAW_PANEL);
            DrawLineEx(last, now, 3, DRAW_GREY);
        }
        last = now;
    }
}

static void c_render(Env* env) {
    draw_begin((int)WIDTH, (int)HEIGHT, "asteroids");
    for (int i = 0; i < env->num_rocks; i++)
        draw_rock(&env->rocks[i], i);
    for (int i = 0; i < env->max_shots; i++)
        if (env->shots[i].life)
            DrawCircleV((Vector2){env->shots[i].x, env->shots[i].y}, 4, DRAW_GOLD);
    if (env->saucer_shot.life)
        DrawCircleV((Vector2){env->saucer_shot.x, env->saucer_shot.y}, 4, DRAW_RED);
    if (env->saucer.life) {
        float radius = saucer_radius[env->saucer.life], x = env->saucer.x, y = env->saucer.y;
        DrawCircleV((Vector2){x, y - radius * 0.2f}, radius * 0.5f, DRAW_GREY);
        draw_quad((Vector2){x - radius, y}, (Vector2){x - radius * 0.4f, y - radius * 0.4f},
                  (Vector2){x + radius * 0.4f, y - radius * 0.4f}, (Vector2){x + radius, y},
                  DRAW_RED);
        draw_quad((Vector2){x - radius, y}, (Vector2){x - radius * 0.4f, y + radius * 0.4f},
                  (Vector2){x + radius * 0.4f, y + radius * 0.4f}, (Vector2){x + radius, y},
                  DRAW_RED);
    }
    if (env->ship.life) {
        float x = env->ship.x, y = env->ship.y, c = env->cosine, s = env->sine;
        Vector2 left = {x - 14 * c - 11 * s, y - 14 * s + 11 * c};
        Vector2 right = {x - 14 * c + 11 * s, y - 14 * s - 11 * c};
        if (env->thrusts)
            draw_triangle((Vector2){x - 10 * c - 6 * s, y - 10 * s + 6 * c},
                          (Vector2){x - 10 * c + 6 * s, y - 10 * s - 6 * c},
                          (Vector2){x - 28 * c, y - 28 * s}, DRAW_GOLD);
        draw_triangle((Vector2){x + 18 * c, y + 18 * s}, left, right, DRAW_CYAN);
    }
    draw_format(20, 16, 40, DRAW_WHITE, "%d", env->points);
    for (int i = 0; i < env->ships_left; i++) {
        float x = 30 + 30 * (float)i;
        draw_triangle((Vector2){x, 66}, (Vector2){x - 9, 90}, (Vector2){x + 9, 90}, DRAW_CYAN);
    }
    draw_end();
}
