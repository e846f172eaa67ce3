/* Pong: the agent has the right paddle, a script the left one. If one misses the ball, the other
 * gets a point. 21 points win. The field is 640 x 480 pixels. Its origin is the upper left corner,
 * and y points down.
 *   - A ball is served from the middle towards the side that lost the last point, at up to 45
 *     degrees.
 *   - It leaves a paddle at up to 60 degrees, which depends on where it strikes, and a little
 *     faster each time.
 *   - The script follows the ball's height while the ball comes, and moves to the middle while it
 *     goes. It is no faster than opponent_speed, so steep balls beat it.
 *   - After max_steps the episode is truncated, because a rally can last for ever. By default that is
 *     an hour, in steps of 8 ticks.
 * The reward is 1 for a point won, -1 for a point lost. 21 points of either end the episode.
 *
 *     observation, each within -1..1
 *     0, 1   height of the own paddle, of the other
 *     2, 3   position of the ball
 *     4, 5   velocity of the ball over max_ball_speed
 *     6, 7   own points, the other's, over 21 (max_score)
 *
 * Actions: none, up, down. With continuous: one speed in -1..1 (downwards). A tick is 1/60 s. An
 * action lasts frameskip ticks. */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, frameskip, 8, "ticks of 1/60 s that an action lasts") \
    X(bool, continuous, false, \
      "one action in -1..1, the speed of the paddle, instead of none, up, down") \
    X(int, max_score, 21, "points that win") \
    X(int, max_steps, 27000, "steps after which an episode is truncated; 0: none") \
    X(float, paddle_height, 72.0, "pixels") \
    X(float, paddle_speed, 480.0, "pixels a second") \
    X(float, opponent_speed, 300.0, "pixels a second") \
    X(float, ball_speed, 420.0, "of a served ball, pixels a second") \
    X(float, ball_gain, 30.0, "by which a strike speeds it up, pixels a second") \
    X(float, max_ball_speed, 840.0, "pixels a second, at most 1200")
#define FPS 15
#define KEYS(KEY) KEY(0, UP, 1) KEY(0, DOWN, 2)
#define CONTINUOUS_KEYS(KEY) KEY(0, UP, -1) KEY(0, DOWN, 1)
#include "env.h"
#include "draw.h"

#define WIDTH 640.0f
#define HEIGHT 480.0f
#define BALL 14.0f
#define PADDLE_WIDTH 14.0f
#define EDGE 28.0f /* between a paddle and its side of the field */
#define LEFT_FACE (EDGE + PADDLE_WIDTH)
#define RIGHT_FACE (WIDTH - EDGE - PADDLE_WIDTH)
#define SERVE_ANGLE 0.785398163f
#define MAX_ANGLE 1.04719755f

struct Env {
    ENV_COMMON
    float own_y, other_y; /* upper ends of the paddles */
    float ball_x, ball_y, ball_vx, ball_vy; /* a tick */
    float speed; /* of the ball */
    int own_score, other_score, tick;
};

static const char* c_init(Env* env) {
    if (env->frameskip < 1 || env->frameskip > 60) return "frameskip must lie within 1..60";
    if (env->max_score < 1) return "max_score must be 1 or more";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    if (!(env->paddle_height >= 8 && env->paddle_height < HEIGHT))
        return "paddle_height must lie within 8..480";
    if (!(env->paddle_speed >= 0 && env->opponent_speed >= 0))
        return "paddle speeds must be 0 or more";
    if (!(env->ball_speed >= 60 && env->ball_speed <= env->max_ball_speed &&
          env->max_ball_speed <= 1200))
        return "ball_speed must be at least 60 and at most max_ball_speed, which must be at most "
               "1200";
    if (!(env->ball_gain >= 0)) return "ball_gain must be 0 or more";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {8},
        .observation_low = -1,
        .observation_high = 1,
    };
    if (env->continuous) spaces->action_dims = 1;
    else spaces->action_heads[0] = 3;
}

static void write_observation(const Env* env, float* observation) {
    float room = HEIGHT - env->paddle_height, velocity = 60 / env->max_ball_speed;
    observation[0] = 2 * env->own_y / room - 1;
    observation[1] = 2 * env->other_y / room - 1;
    observation[2] = clampf(2 * env->ball_x / (WIDTH - BALL) - 1, -1, 1);
    observation[3] = 2 * env->ball_y / (HEIGHT - BALL) - 1;
    observation[4] = clampf(env->ball_vx * velocity, -1, 1);
    observation[5] = clampf(env->ball_vy * velocity, -1, 1);
    observation[6] = (float)env->own_score / (float)env->max_score;
    observation[7] = (float)env->other_score / (float)env->max_score;
}

static void send_ball(Env* env, float angle, float direction) {
    env->ball_vx = direction * env->speed * cosf(angle);
    env->ball_vy = env->speed * sinf(angle);
}

static void serve(Env* env, float direction) {
    env->speed = env->ball_speed / 60;
    env->ball_x = (WIDTH - BALL) / 2;
    env->ball_y = random_float(&env->rng, HEIGHT * 0.25f, HEIGHT * 0.75f - BALL);
    send_ball(env, random_float(&env->rng, -SERVE_ANGLE, SERVE_ANGLE), direction);
}

static void c_reset(Env* env) {
    env->own_y = env->other_y = (HEIGHT - env->paddle_height) / 2;
    env->own_score = env->other_score = env->tick = 0;
    serve(env, random_int(&env->rng, 2) ? 1 : -1);
    write_observation(env, env->observations);
}

static void move_other(Env* env) {
    float most = env->opponent_speed / 60, room = HEIGHT - env->paddle_height;
    float wanted = env->ball_vx < 0 ? env->ball_y + BALL / 2 - env->paddle_height / 2 : room / 2;
    if (env->ball_vx > 0) most /= 2;
    env->other_y = clampf(env->other_y + clampf(wanted - env->other_y, -most, most), 0, room);
}

/* The ball passed the plane of a paddle's face in this tick. It comes back if the paddle is there.
 */
static void strike(Env* env, float paddle_y, float face, float direction) {
    float late = (face - env->ball_x) / env->ball_vx; /* ticks since it was at the face, below 0 */
    float y = fabsf(env->ball_y + late * env->ball_vy); /* a wall may have sent it back since */
    if (y > HEIGHT - BALL) y = 2 * (HEIGHT - BALL) - y;
    if (y + BALL < paddle_y || y > paddle_y + env->paddle_height) return;
    float offset =
        (y + BALL / 2 - paddle_y - env->paddle_height / 2) / ((env->paddle_height + BALL) / 2);
    env->speed = minf(env->speed + env->ball_gain / 60, env->max_ball_speed / 60);
    send_ball(env, MAX_ANGLE * clampf(offset, -1, 1), direction);
    env->ball_x = face;
    env->ball_y = y;
}

/* One tick. Returns the point that it brings: 1, -1 or 0. */
static int tick(Env* env, float push) {
    env->own_y = clampf(env->own_y + push * env->paddle_speed / 60, 0, HEIGHT - env->paddle_height);
    move_other(env);
    float before = env->ball_x;
    env->ball_x += env->ball_vx;
    env->ball_y += env->ball_vy;
    if (env->ball_y < 0 || env->ball_y > HEIGHT - BALL) {
        env->ball_y = env->ball_y < 0 ? -env->ball_y : 2 * (HEIGHT - BALL) - env->ball_y;
        env->ball_vy = -env->ball_vy;
    }
    if (before <= RIGHT_FACE - BALL && env->ball_x > RIGHT_FACE - BALL)
        strike(env, env->own_y, RIGHT_FACE - BALL, -1);
    else if (before >= LEFT_FACE && env->ball_x < LEFT_FACE)
        strike(env, env->other_y, LEFT_FACE, 1);
    if (env->ball_x > WIDTH) return -1;
    return env->ball_x < -BALL;
}

static void c_step(Env* env) {
    float push = env->continuous ? clampf(env->continuous_actions[0], -1, 1)
                                 : (float)((env->actions[0] == 2) - (env->actions[0] == 1));
    float reward = 0;
    bool over = false;
    for (int i = 0; i < env->frameskip && !over; i++) {
        int point = tick(env, push);
        if (point == 0) continue;
        env->own_score += point > 0;
        env->other_score += point < 0;
        reward += (float)point;
        over = env->own_score == env->max_score || env->other_score == env->max_score;
        serve(env, (float)-point); /* towards the loser of the point */
    }
    env->tick++;
    bool late = !over && env->max_steps && env->tick >= env->max_steps;
    env->rewards[0] = reward;
    env->terminals[0] = over;
    env->truncations[0] = late;
    if (!over && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    float score = (float)(env->own_score - env->other_score);
    LOG_EPISODE(env, (score + (float)env->max_score) / (float)(2 * env->max_score), score, score,
                env->tick);
    c_reset(env);
}

static void c_render(Env* env) {
    enum { SCALE = 2 };
    char text[16];
    draw_begin((int)WIDTH * SCALE, (int)HEIGHT * SCALE, "pong");
    for (int y = 8; y < (int)HEIGHT; y += 32)
        DrawRectangle((int)(WIDTH / 2 - 2) * SCALE, y * SCALE, 4 * SCALE, 16 * SCALE, DRAW_PANEL);
    snprintf(text, sizeof(text), "%d", env->other_score);
    draw_text_centred(text, (int)(WIDTH * 0.25f) * SCALE, 40 * SCALE, 96, DRAW_GREY);
    snprintf(text, sizeof(text), "%d", env->own_score);
    draw_text_centred(text, (int)(WIDTH * 0.75f) * SCALE, 40 * SCALE, 96, DRAW_CYAN);
    DrawRectangleRec((Rectangle){EDGE * SCALE, env->other_y * SCALE, PADDLE_WIDTH * SCALE,
                                 env->paddle_height * SCALE}, DRAW_GREY);
    DrawRectangleRec((Rectangle){RIGHT_FACE * SCALE, env->own_y * SCALE, PADDLE_WIDTH * SCALE,
                                 env->paddle_height * SCALE}, DRAW_CYAN);
    DrawRectangleRec(
        (Rectangle){env->ball_x * SCALE, env->ball_y * SCALE, BALL * SCALE, BALL * SCALE},
        DRAW_GOLD);
    draw_end();
}
