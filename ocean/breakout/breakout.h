/* Breakout: a paddle keeps a ball in play that knocks bricks out of a wall. There are two walls of
 * 432 points, 864 in all.
 *
 * The field is 576 x 330 pixels. Its origin is the upper left corner, and y points down. The
 * position of a box is that of its upper left corner. The ball collides as a box of 32 x 32.
 *   - A ball waits below the wall. The next step serves it downwards, at a random angle of up to 45
 *     degrees.
 *   - The ball leaves the paddle at up to 45 degrees; the angle depends on where it strikes. Every
 *     fourth strike adds 64 to its speed, until 448. A brick of the three upper rows sets 448 at
 *     once.
 *   - The back wall (the upper edge) halves the paddle until the ball is lost.
 *   - There are five balls in reserve. Losing the last ball ends the episode, and so do 864 points.
 *   - When the first wall is cleared, the paddle's next strike brings the second.
 *   - After max_steps the episode is truncated, because a ball can circle for ever. By default that
 *     is half an hour at a frameskip of 4, as in Atari's games (Machado et al. 2018, section 4.1).
 * The reward is the points of the bricks hit.
 * Actions: none, left, right. With continuous: one speed in -1..1. A tick is 1/60 s. An action
 * lasts frameskip ticks.
 *
 * The step does not move tick by tick. Between two collisions everything moves in straight lines,
 * so the step jumps from one collision to the next, at its exact time. So the ball passes through
 * nothing at any speed, and a step without a collision is cheap for any frameskip.
 *
 *     observation; positions are shares of the field's width or height
 *     0, 1     the paddle
 *     2, 3     the ball
 *     4, 5     velocity of the ball, over 512 pixels a second
 *     6        1 while the ball is in play, 0 while it waits
 *     7        score over 864
 *     8        share of the balls that are in reserve
 *     9        width of the paddle: 1, or 0.5 while it is halved
 *     10 ..    1 for each brick that is left, row after row from the top */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, frameskip, 4, "ticks of 1/60 s that an action lasts") \
    X(bool, continuous, false, \
      "one action in -1..1, the speed of the paddle, instead of none, left, right") \
    X(int, max_steps, 27000, "steps after which an episode is truncated; 0: none") \
    X(int, balls, 5, "balls in reserve") \
    X(float, paddle_width, 62.0, "pixels") \
    X(float, paddle_speed, 620.0, "pixels a second") \
    X(float, ball_speed, 256.0, "speed of a served ball, pixels a second") \
    X(float, max_ball_speed, 448.0, "fastest speed of the ball, pixels a second, at most 512")
#define FPS 15
#define KEYS(KEY) KEY(0, LEFT, 1) KEY(0, RIGHT, 2)
#include "env.h"
#include "draw.h"

enum {
    ROWS = 6, COLUMNS = 18, BRICKS = ROWS * COLUMNS, BRICK_WORDS = (BRICKS + 31) / 32,
    OBSERVATIONS = 10 + BRICKS
};
enum { WALL_SCORE = 432, MAX_SCORE = 2 * WALL_SCORE };
static const int row_points[ROWS] = {7, 7, 4, 4, 1, 1};

#define WIDTH 576.0f
#define HEIGHT 330.0f
#define BRICK_WIDTH 32.0f
#define BRICK_HEIGHT 12.0f
#define WALL_TOP 50.0f
#define WALL_BOTTOM (WALL_TOP + ROWS * BRICK_HEIGHT)
#define PADDLE_Y 312.0f
#define PADDLE_HEIGHT 8.0f
#define BALL 32.0f
#define SERVE_Y 135.0f /* where a ball waits */
#define SPEED_STEP 64.0f
#define SPEED_SCALE 512.0f /* of the observed velocities */
#define MAX_ANGLE 0.785398163f /* of a struck or served ball: 45 degrees */

struct Env {
    ENV_COMMON
    float paddle_x, paddle_now; /* paddle_now: its present width */
    float ball_x, ball_y, ball_vx, ball_vy;
    float speed; /* of the ball */
    int strikes; /* of the paddle in this round */
    bool in_play;
    bool missed; /* the ball is past the paddle and can only fall */
    int score, reserve, tick;
    uint32_t bricks[BRICK_WORDS]; /* bit row * COLUMNS + column: that brick is left */
};

static const char* c_init(Env* env) {
    if (env->frameskip < 1 || env->frameskip > 60) return "frameskip must lie within 1..60";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    if (env->balls < 0) return "balls must be 0 or more";
    if (!(env->paddle_width >= 4 && env->paddle_width <= WIDTH))
        return "paddle_width must lie within 4..576";
    if (!(env->paddle_speed >= 0 && env->paddle_speed <= 100000))
        return "paddle_speed must lie within 0..100000";
    if (!(env->ball_speed >= 32 && env->ball_speed <= env->max_ball_speed &&
          env->max_ball_speed <= SPEED_SCALE))
        return "ball_speed must be at least 32 and at most max_ball_speed, which must be at most "
               "512";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {OBSERVATIONS},
        .observation_low = -1, /* the velocities; everything else is 0..1 */
        .observation_high = 1,
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = 3;
}

static void write_observation(const Env* env, float* observation) {
    observation[0] = env->paddle_x / WIDTH;
    observation[1] = PADDLE_Y / HEIGHT;
    observation[2] = env->ball_x / WIDTH;
    observation[3] = env->ball_y / HEIGHT;
    observation[4] = env->ball_vx / SPEED_SCALE;
    observation[5] = env->ball_vy / SPEED_SCALE;
    observation[6] = env->in_play;
    observation[7] = (float)env->score / MAX_SCORE;
    observation[8] = env->balls ? (float)env->reserve / (float)env->balls : 0;
    observation[9] = env->paddle_now / env->paddle_width;
    /* This turns 8 or 16 bits into floats at a time, which is faster than a copy of floats. */
    for (int i = 0; i < BRICKS; i++)
        observation[10 + i] = (float)(env->bricks[i / 32] >> i % 32 & 1);
}

static void fill_wall(Env* env) {
    for (int i = 0; i < BRICKS; i++)
        env->bricks[i / 32] |= 1u << i % 32;
}

static void begin_round(Env* env) {
    env->in_play = env->missed = false;
    env->paddle_now = env->paddle_width;
    env->paddle_x = (WIDTH - env->paddle_now) / 2;
    env->ball_x = (WIDTH - BALL) / 2;
    env->ball_y = SERVE_Y;
    env->ball_vx = env->ball_vy = 0;
    env->speed = env->ball_speed;
    env->strikes = 0;
}

static void c_reset(Env* env) {
    env->score = env->tick = 0;
    env->reserve = env->balls;
    fill_wall(env);
    begin_round(env);
    write_observation(env, env->observations);
}

/* What the ball meets next. The back wall is the upper edge; the line is the height of the paddle.
 */
typedef enum { NOTHING, SIDE, BACK, LINE, GROUND, BRICK } Obstacle;
typedef struct {
    Obstacle obstacle;
    float time; /* seconds from now */
    int brick;
    bool flat; /* a brick's upper or lower face, not its left or right one */
} Collision;

/* The time span in which a moving box of size BALL overlaps low..high along one axis. */
static inline void overlap(float position, float velocity, float low, float high, float* enter,
                           float* leave) {
    if (velocity == 0) {
        bool inside = position < high && position + BALL > low;
        *enter = inside ? -INFINITY : INFINITY;
        *leave = INFINITY;
        return;
    }
    float at_low = (low - BALL - position) / velocity, at_high = (high - position) / velocity;
    *enter = minf(at_low, at_high);
    *leave = maxf(at_low, at_high);
}

/* Finds the first brick that the ball meets before `next`. If it meets two at once, it hits the one
 * nearer to its centre. */
static void find_brick(const Env* env, Collision* next) {
    float x = env->ball_x, y = env->ball_y, vx = env->ball_vx, vy = env->ball_vy;
    float dx = vx * next->time, dy = vy * next->time;
    int left = (int)((x + minf(dx, 0)) / BRICK_WIDTH);
    int right = (int)((x + maxf(dx, 0) + BALL) / BRICK_WIDTH);
    int top = (int)floorf((y + minf(dy, 0) - WALL_TOP) / BRICK_HEIGHT);
    int bottom = (int)floorf((y + maxf(dy, 0) + BALL - WALL_TOP) / BRICK_HEIGHT);
    left = left < 0 ? 0 : left;
    right = right >= COLUMNS ? COLUMNS - 1 : right;
    top = top < 0 ? 0 : top;
    bottom = bottom >= ROWS ? ROWS - 1 : bottom;

    /* how far the ball's centre is from that brick's, along the face that is hit */
    float offset = INFINITY;
    for (int row = top; row <= bottom; row++) {
        float y_enter, y_leave, brick_y = WALL_TOP + (float)row * BRICK_HEIGHT;
        overlap(y, vy, brick_y, brick_y + BRICK_HEIGHT, &y_enter, &y_leave);
        for (int column = left; column <= right; column++) {
            int brick = row * COLUMNS + column;
            if (!(env->bricks[brick / 32] >> brick % 32 & 1)) continue;
            float x_enter, x_leave, brick_x = (float)column * BRICK_WIDTH;
            overlap(x, vx, brick_x, brick_x + BRICK_WIDTH, &x_enter, &x_leave);
            float enter = maxf(x_enter, y_enter), leave = minf(x_leave, y_leave);
            /* If leave is 0, they touch and part. Rounding may put a contact into the past; it
             * counts as now. */
            if (enter >= leave || leave <= 0) continue;
            bool flat = y_enter >= x_enter;
            float time = maxf(enter, 0);
            float off = flat ? fabsf(x + vx * time + BALL / 2 - brick_x - BRICK_WIDTH / 2)
                             : fabsf(y + vy * time + BALL / 2 - brick_y - BRICK_HEIGHT / 2);
            if (time < next->time ||
                (time == next->time && next->obstacle == BRICK && off < offset)) {
                *next = (Collision){BRICK, time, brick, flat};
                offset = off;
            }
        }
    }
}

/* The first collision within `time` seconds. */
static inline Collision find_collision(const Env* env, float time) {
    float x = env->ball_x, y = env->ball_y, vx = env->ball_vx, vy = env->ball_vy;
    float end_x = x + vx * time, end_y = y + vy * time;
    Collision next = {NOTHING, time, 0, false};
    if (end_x < 0) next = (Collision){SIDE, -x / vx, 0, false};
    else if (end_x > WIDTH - BALL) next = (Collision){SIDE, (WIDTH - BALL - x) / vx, 0, false};

    float stop = env->missed ? HEIGHT - BALL : PADDLE_Y - BALL;
    if (end_y >= stop && vy > 0) {
        float arrival = maxf((stop - y) / vy, 0);
        if (arrival <= next.time)
            next = (Collision){env->missed ? GROUND : LINE, arrival, 0, false};
    }
    if (end_y < WALL_BOTTOM || y < WALL_BOTTOM) {
        if (end_y < 0 && -y / vy < next.time) next = (Collision){BACK, -y / vy, 0, false};
        if (maxf(y, end_y) + BALL > WALL_TOP) find_brick(env, &next);
    }
    return next;
}

static void set_speed(Env* env, float speed) {
    env->ball_vx *= speed / env->speed;
    env->ball_vy *= speed / env->speed;
    env->speed = speed;
}

static void send_ball(Env* env, float angle, float direction) {
    env->ball_vx = env->speed * sinf(angle);
    env->ball_vy = env->speed * cosf(angle) * direction;
}

static void hit_brick(Env* env, Collision hit) {
    int row = hit.brick / COLUMNS, column = hit.brick % COLUMNS;
    env->bricks[hit.brick / 32] &= ~(1u << hit.brick % 32);
    env->score += row_points[row];
    /* The ball is put exactly at the face, so that rounding never leaves it inside a brick. */
    if (hit.flat) {
        float brick_y = WALL_TOP + (float)row * BRICK_HEIGHT;
        env->ball_y = env->ball_vy > 0 ? brick_y - BALL : brick_y + BRICK_HEIGHT;
        env->ball_vy = -env->ball_vy;
    } else {
        float brick_x = (float)column * BRICK_WIDTH;
        env->ball_x = env->ball_vx > 0 ? brick_x - BALL : brick_x + BRICK_WIDTH;
        env->ball_vx = -env->ball_vx;
    }
    if (row < 3) set_speed(env, env->max_ball_speed);
}

/* The ball is at the height of the paddle: the paddle strikes it, or it is lost. */
static void strike(Env* env) {
    env->ball_y = PADDLE_Y - BALL;
    if (env->ball_x + BALL <= env->paddle_x || env->ball_x >= env->paddle_x + env->paddle_now) {
        env->missed = true;
        return;
    }
    env->strikes++;
    if (env->strikes % 4 == 0) env->speed = minf(env->speed + SPEED_STEP, env->max_ball_speed);
    float offset = env->ball_x + BALL / 2 - (env->paddle_x + env->paddle_now / 2);
    send_ball(env, MAX_ANGLE * clampf(offset / (env->paddle_now / 2), -1, 1), -1);
    if (env->score == WALL_SCORE) fill_wall(env);
}

/* Moves paddle and ball from collision to collision. Returns false if the ball is lost. */
static bool advance(Env* env, float time, float paddle_velocity) {
    while (true) {
        Collision next = find_collision(env, time);
        env->ball_x = clampf(env->ball_x + env->ball_vx * next.time, 0, WIDTH - BALL);
        env->ball_y = maxf(env->ball_y + env->ball_vy * next.time, 0);
        env->paddle_x =
            clampf(env->paddle_x + paddle_velocity * next.time, 0, WIDTH - env->paddle_now);
        time -= next.time;
        switch (next.obstacle) {
            case NOTHING: return true;
            case GROUND: return false;
            case SIDE: env->ball_vx = -env->ball_vx; break;
            case LINE: strike(env); break;
            case BRICK:
                hit_brick(env, next);
                if (env->score == MAX_SCORE) return true;
                break;
            case BACK:
                env->ball_vy = -env->ball_vy;
                if (env->paddle_now == env->paddle_width) {
                    env->paddle_now /= 2;
                    env->paddle_x += env->paddle_now / 2; /* it shrinks towards its middle */
                }
                break;
        }
    }
}

static void c_step(Env* env) {
    float push = env->continuous ? clampf(env->continuous_actions[0], -1, 1)
                                 : (float)((env->actions[0] == 2) - (env->actions[0] == 1));
    if (!env->in_play) {
        env->in_play = true;
        send_ball(env, random_float(&env->rng, -MAX_ANGLE, MAX_ANGLE), 1);
    }
    int before = env->score;
    bool lost = !advance(env, (float)env->frameskip / 60, push * env->paddle_speed);
    env->tick++;

    bool over = env->score == MAX_SCORE || (lost && env->reserve == 0);
    bool late = !over && env->max_steps && env->tick >= env->max_steps;
    env->rewards[0] = (float)(env->score - before);
    env->terminals[0] = over;
    env->truncations[0] = late;
    if (lost && !over) {
        env->reserve--;
        begin_round(env);
    }
    if (!over && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, (float)env->score / MAX_SCORE, env->score, env->score, env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    static const Color colors[ROWS] = {
        {226, 84, 84, 255}, {238, 126, 72, 255}, {250, 190, 60, 255}, {90, 200, 120, 255},
        {0, 187, 204, 255}, {92, 124, 226, 255}
    };
    enum { SCALE = 2 };
    draw_begin((int)WIDTH * SCALE, (int)HEIGHT * SCALE, "breakout");
    for (int i = 0; i < BRICKS; i++) {
        if (!(env->bricks[i / 32] >> i % 32 & 1)) continue;
        int x = i % COLUMNS * (int)BRICK_WIDTH, y = (int)WALL_TOP + i / COLUMNS * (int)BRICK_HEIGHT;
        DrawRectangle(x * SCALE + 1, y * SCALE + 1, (int)BRICK_WIDTH * SCALE - 2,
                      (int)BRICK_HEIGHT * SCALE - 2, colors[i / COLUMNS]);
    }
    DrawRectangleRec((Rectangle){env->paddle_x * SCALE, PADDLE_Y * SCALE, env->paddle_now * SCALE,
                                 PADDLE_HEIGHT * SCALE}, DRAW_CYAN);
    Vector2 centre = {(env->ball_x + BALL / 2) * SCALE, (env->ball_y + BALL / 2) * SCALE};
    DrawCircleV(centre, BALL / 2 * SCALE, DRAW_WHITE);
    draw_format(16, 14, 40, DRAW_WHITE, "%d", env->score);
    for (int i = 0; i < env->reserve; i++)
        DrawCircleV((Vector2){WIDTH * SCALE - 28 - 36 * (float)i, 34}, 12, DRAW_GREY);
    draw_end();
}
