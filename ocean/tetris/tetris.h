/* Tetris: a marathon of 150 lines by the guideline's rules. Seven pieces come from a shuffled bag.
 * They turn and kick by the Super Rotation System. They fall faster on each level; a level is ten
 * lines, and a row takes (0.8 - 0.007 (level - 1))^(level - 1) seconds. A piece locks half a second
 * after it came to rest. A move or a turn restarts that half second, up to 15 times. The player
 * may hold one piece, once for each that falls. The next five are shown.
 *
 *     points, times the level         1 line: 100, 2: 300, 3: 500, 4: 800, and half as much again
 *                                     for four lines right after four lines; 50 for each piece in a
 *                                     row that clears, after the first
 *     points                          1 for a row of soft drop, 2 for a row of hard drop
 *
 * T-spins pay as the lines they clear. The reward is 1, 3, 5 or 8 for lines, without the level, and
 * reward_over if a piece finds no place, which ends the episode. The last line ends it too.
 * reward_piece, reward_hole and reward_bump may be added.
 * perf is the lines over `lines`.
 *
 *     observation: bytes, 0 or 1 unless said; H rows of 10 cells, from the top
 *     0 ..         the filled cells
 *     10 H ..      F bytes: the falling piece, F = 10 H; with `placements` instead the outcome of
 *                  each of the 40, F = 160: lines cleared, holes more or less (empty cells below
 *                  filled ones), bumps more or less (steps between columns), rows below the piece
 *     10 H + F ..  the falling piece (7: I O T S Z J L), the held one (7, none: all 0), the next
 *                  five (5 x 7)
 *        .. + 49   1 if holding is possible
 *        .. + 50   1 if the piece rests
 *
 * Actions: none, left, right, turn right, turn left, soft drop, hard drop, hold. A step is `ticks`
 * of 1/60 s. With `placements` an action is all that is done with a piece, and no time passes
 * before: action 10 turns + column, the column of its leftmost cell, as far as the piece can go
 * there, then a hard drop. Action 40 holds, or drops the piece where it is if holding is not
 * possible. */
#pragma once

#define OBSERVATION int8_t
#define OWN_LOG(X) X(lines) X(tetrises)
#define SETTINGS(X) \
    X(int, height, 20, "rows of the field; two more are above it") \
    X(int, lines, 150, "that end the game") \
    X(int, ticks, 3, "of 1/60 s between two steps") \
    X(int, first_level, 1, "level of the first ten lines") \
    X(bool, placements, false, \
      "an action is a whole placement: 4 turns x 10 columns, and holding") \
    X(int, max_steps, 0, "steps after which an episode is truncated; 0: none") \
    X(float, lock_delay, 0.5, "seconds that a piece rests before it locks") \
    X(float, reward_over, -1.0, "for the end by a piece without a place") \
    X(float, reward_piece, 0.0, "for a piece that locks: random play never clears a line") \
    X(float, reward_hole, 0.0, \
      "for an empty cell under a filled one that a piece leaves, against one that goes") \
    X(float, reward_bump, 0.0, \
      "for a cell by which neighbouring columns differ more, against one less")
#define FPS 20
#define KEYS(KEY) \
    KEY(0, LEFT, LEFT) KEY(0, RIGHT, RIGHT) KEY(0, UP, TURN_RIGHT) KEY(0, Z, TURN_LEFT) \
    KEY(0, DOWN, SOFT) KEY(0, SPACE, HARD) KEY(0, C, HOLD)
#include "env.h"
#include "draw.h"

enum {
    WIDTH = 10, HIDDEN = 2, MAX_HEIGHT = 40, PIECES = 7, PREVIEWS = 5, RESETS = 15,
    FULL = (1 << WIDTH) - 1
};
enum {
    NONE, LEFT, RIGHT, TURN_RIGHT, TURN_LEFT, SOFT, HARD, HOLD, ACTIONS, PLACEMENTS = 4 * WIDTH
};
enum { I, O, T, S, Z, J, L };
enum { LINES, HOLES, BUMPS, BELOW, OUTCOMES }; /* of a placement */

/* Cells of each piece as it appears, in a box of 4 (I), 2 (O) or 3 (the others) cells. Each is a
 * bit, row after row of 4, the upper left one lowest. */
static const uint16_t shapes[PIECES] = {0x00F0, 0x0033, 0x0072, 0x0036, 0x0063, 0x0071, 0x0074};
static const int boxes[PIECES] = {4, 2, 3, 3, 3, 3, 3};
/* Kicks for a turn to the right from each orientation, x right, y up. A turn back negates them. */
static const int8_t kicks[4][5][2] = {{{0, 0}, {-1, 0}, {-1, 1}, {0, -2}, {-1, -2}},
                                      {{0, 0}, {1, 0}, {1, -1}, {0, 2}, {1, 2}},
                                      {{0, 0}, {1, 0}, {1, 1}, {0, -2}, {1, -2}},
                                      {{0, 0}, {-1, 0}, {-1, -1}, {0, 2}, {-1, 2}}};
static const int8_t long_kicks[4][5][2] = {{{0, 0}, {-2, 0}, {1, 0}, {-2, -1}, {1, 2}},
                                           {{0, 0}, {-1, 0}, {2, 0}, {-1, 2}, {2, -1}},
                                           {{0, 0}, {2, 0}, {-1, 0}, {2, 1}, {-1, -2}},
                                           {{0, 0}, {1, 0}, {-2, 0}, {1, -2}, {-2, 1}}};
static const int line_points[5] = {0, 100, 300, 500, 800};

struct Env {
    ENV_COMMON
    uint16_t rows[MAX_HEIGHT + HIDDEN];         /* from the top, bit c: column c is filled */
    uint8_t kinds[MAX_HEIGHT + HIDDEN][WIDTH];  /* of the filled cells, for c_render */
    uint8_t cells[PIECES][4][4];                /* each piece's rows, for each orientation */
    uint8_t queue[2 * PIECES];                  /* pieces to come; at least seven */
    int queued;
    int piece, turned, x, y; /* the falling piece; x, y: its box's left column and upper row */
    int held; /* -1: none */
    bool can_hold;
    float fall;   /* part of a row that it has yet to fall */
    float speed;  /* rows a step */
    int rested, resets; /* rested: ticks at rest; resets: how often that restarted */
    int lowest; /* row that the piece has reached */
    int level, cleared, combo, points, tetrises, tick;
    bool after_tetris;
    float total;
    float shape; /* what reward_hole and reward_bump give for the field */
};

static const char* c_init(Env* env) {
    if (env->height < 4 || env->height > MAX_HEIGHT) return "height must lie within 4..40";
    if (env->lines < 1) return "lines must be 1 or more";
    if (env->ticks < 1 || env->ticks > 60) return "ticks must lie within 1..60";
    if (env->first_level < 1 || env->first_level > 20) return "first_level must lie within 1..20";
    if (env->max_steps < 0) return "max_steps must be 0 (no limit) or more";
    if (!(env->lock_delay >= 0 && env->lock_delay <= 60)) return "lock_delay must lie within 0..60";
    for (int piece = 0; piece < PIECES; piece++) {
        int box = boxes[piece];
        for (int y = 0; y < 4; y++)
            env->cells[piece][0][y] = shapes[piece] >> 4 * y & 15;
        /* a turn to the right takes (x, y) to (box - 1 - y, x) */
        for (int turn = 1; turn < 4; turn++)
            for (int y = 0; y < box; y++)
                for (int x = 0; x < box; x++)
                    if (env->cells[piece][turn - 1][y] >> x & 1)
                        env->cells[piece][turn][x] |= 1 << (box - 1 - y);
    }
    return NULL;
}

static int observation_size(const Env* env) {
    int falls = env->placements ? OUTCOMES * PLACEMENTS : WIDTH * env->height;
    return WIDTH * env->height + falls + (2 + PREVIEWS) * PIECES + 2;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {observation_size(env)},
        .observation_low = env->placements ? -128 : 0,
        .observation_high = env->placements ? 127 : 1,
        .action_heads = {env->placements ? PLACEMENTS + 1 : ACTIONS},
    };
}

/* The bits of one row of the falling piece's box, in the field's columns. Only bits inside the
 * field are set. */
static inline unsigned piece_row(const Env* env, int turned, int row, int x) {
    unsigned bits = env->cells[env->piece][turned][row];
    return x >= 0 ? bits << x : bits >> -x;
}

/* Returns whether the piece fits there, inside the field and on empty cells. */
static bool fits(const Env* env, int turned, int x, int y) {
    for (int row = 0; row < 4; row++) {
        unsigned bits = env->cells[env->piece][turned][row];
        if (!bits) continue;
        int at = y + row;
        if (at < 0 || at >= env->height + HIDDEN) return false;
        if (x < 0 && bits & ((1u << -x) - 1)) return false;
        unsigned there = x >= 0 ? bits << x : bits >> -x;
        if (there & ~(unsigned)FULL || there & env->rows[at]) return false;
    }
    return true;
}

static bool shift(Env* env, int x, int y) {
    if (!fits(env, env->turned, env->x + x, env->y + y)) return false;
    env->x += x;
    env->y += y;
    return true;
}

static bool turn(Env* env, int direction) {
    int to = (env->turned + direction) & 3, from = direction > 0 ? env->turned : to;
    if (env->piece == O) return false;
    for (int i = 0; i < 5; i++) {
        const int8_t* kick = env->piece == I ? long_kicks[from][i] : kicks[from][i];
        int x = env->x + direction * kick[0], y = env->y - direction * kick[1];
        if (!fits(env, to, x, y)) continue;
        env->turned = to;
        env->x = x;
        env->y = y;
        return true;
    }
    return false;
}

/* Counts the empty cells below filled ones and the steps between neighbouring columns. */
static void measure(const uint16_t* rows, int count, int* holes, int* bumps) {
    int heights[WIDTH] = {0};
    unsigned covered = 0;
    *holes = *bumps = 0;
    for (int row = 0; row < count; row++) {
        unsigned bits = rows[row], tops = bits & ~covered;
        *holes += __builtin_popcount(covered & ~bits);
        covered |= bits;
        for (; tops; tops &= tops - 1)
            heights[__builtin_ctz(tops)] = count - row;
    }
    for (int column = 1; column < WIDTH; column++)
        *bumps += abs(heights[column] - heights[column - 1]);
}

static inline int8_t to_byte(int value) {
    return (int8_t)(value < -128 ? -128 : value > 127 ? 127 : value);
}

/* The outcome of a drop of the piece from where it is. holes and bumps are those of the field now.
 */
static void foresee(Env* env, int holes, int bumps, int8_t outcome[OUTCOMES]) {
    int count = env->height + HIDDEN, y = env->y, top = 0, to = count - 1, lines = 0;
    int new_holes, new_bumps;
    uint16_t rows[MAX_HEIGHT + HIDDEN], left[MAX_HEIGHT + HIDDEN];
    while (top < count && !env->rows[top])
        top++;
    if (y < top - 4) y = top - 4; /* nothing is in the way above */
    while (fits(env, env->turned, env->x, y + 1))
        y++;
    memcpy(rows, env->rows, sizeof(rows));
    for (int row = 0; row < 4; row++) {
        unsigned bits = piece_row(env, env->turned, row, env->x);
        if (bits) rows[y + row] |= (uint16_t)bits;
    }
    if (top > y) top = y > 0 ? y : 0;
    for (int row = count - 1; row >= top; row--) {
        if (rows[row] == FULL) lines++;
        else left[to--] = rows[row];
    }
    measure(left + to + 1, count - 1 - to, &new_holes, &new_bumps);
    int lowest = 3;
    while (!env->cells[env->piece][env->turned][lowest])
        lowest--;
    outcome[LINES] = (int8_t)lines;
    outcome[HOLES] = to_byte(new_holes - holes);
    outcome[BUMPS] = to_byte(new_bumps - bumps);
    outcome[BELOW] = (int8_t)(count - 1 - y - lowest);
}

static inline int leftmost(const Env* env) {
    unsigned bits = 0;
    for (int row = 0; row < 4; row++)
        bits |= env->cells[env->piece][env->turned][row];
    return __builtin_ctz(bits);
}

/* Writes the outcomes of all placements, plane after plane. The piece stays where it is. */
static void foresee_all(Env* env, int8_t* outcomes) {
    int holes, bumps, turned = env->turned, x = env->x, y = env->y;
    measure(env->rows, env->height + HIDDEN, &holes, &bumps);
    for (int turns = 0; turns < 4; turns++) {
        if (turns) turn(env, 1);
        int8_t outcome[OUTCOMES];
        int start = env->x, first = leftmost(env);
        while (shift(env, -1, 0)) {}
        foresee(env, holes, bumps, outcome);
        for (int column = 0; column < WIDTH; column++) {
            if (column > env->x + first && shift(env, 1, 0)) foresee(env, holes, bumps, outcome);
            for (int k = 0; k < OUTCOMES; k++)
                outcomes[PLACEMENTS * k + WIDTH * turns + column] = outcome[k];
        }
        env->x = start;
    }
    env->turned = turned;
    env->x = x;
    env->y = y;
}

/* This moves the falling piece and brings it back. */
static void write_observation(Env* env, int8_t* observation) {
    int8_t *lies = observation, *falls = observation + WIDTH * env->height;
    int8_t* rest = observation + observation_size(env) - (2 + PREVIEWS) * PIECES - 2;
    for (int row = 0; row < env->height; row++) {
        unsigned bits = env->rows[row + HIDDEN];
        for (int column = 0; column < WIDTH; column++)
            lies[row * WIDTH + column] = bits >> column & 1;
    }
    memset(falls, 0, (size_t)(rest - falls + (2 + PREVIEWS) * PIECES));
    if (env->placements) foresee_all(env, falls);
    for (int row = 0; !env->placements && row < 4; row++) {
        int at = env->y + row - HIDDEN;
        if (at < 0 || at >= env->height) continue;
        unsigned bits = piece_row(env, env->turned, row, env->x);
        for (int column = 0; column < WIDTH; column++)
            falls[at * WIDTH + column] = bits >> column & 1;
    }
    rest[env->piece] = 1;
    if (env->held >= 0) rest[PIECES + env->held] = 1;
    for (int i = 0; i < PREVIEWS; i++)
        rest[(2 + i) * PIECES + env->queue[i]] = 1;
    rest[(2 + PREVIEWS) * PIECES] = env->can_hold;
    rest[(2 + PREVIEWS) * PIECES + 1] = !fits(env, env->turned, env->x, env->y + 1);
}

static void fill_queue(Env* env) {
    while (env->queued <= PIECES) {
        uint8_t* bag = env->queue + env->queued;
        for (int i = 0; i < PIECES; i++) {
            int k = random_int(&env->rng, i + 1);
            bag[i] = bag[k];
            bag[k] = (uint8_t)i;
        }
        env->queued += PIECES;
    }
}

/* Puts a piece above the field, in the middle. Returns false if it does not fit. */
static bool place(Env* env, int piece) {
    env->piece = piece;
    env->turned = 0;
    env->x = piece == O ? 4 : 3;
    env->y = env->lowest = 0; /* in the hidden rows */
    env->fall = 0;
    env->rested = env->resets = 0;
    return fits(env, 0, env->x, env->y);
}

static bool place_next(Env* env) {
    int piece = env->queue[0];
    memmove(env->queue, env->queue + 1, (size_t)--env->queued);
    if (env->queued < PIECES) fill_queue(env);
    return place(env, piece);
}

static void set_level(Env* env) {
    env->level = env->first_level + env->cleared / 10;
    float above = (float)((env->level < 20 ? env->level : 20) - 1);
    env->speed = (float)env->ticks / 60 / powf(0.8f - 0.007f * above, above);
}

static void c_reset(Env* env) {
    memset(env->rows, 0, sizeof(env->rows));
    memset(env->kinds, 0, sizeof(env->kinds));
    env->queued = 0;
    env->held = -1;
    env->can_hold = true;
    env->cleared = env->points = env->tetrises = env->tick = 0;
    env->combo = -1;
    env->after_tetris = false;
    env->total = env->shape = 0;
    fill_queue(env);
    set_level(env);
    place_next(env);
    write_observation(env, env->observations);
}

/* Lays the piece down, clears lines and counts. Returns the lines. */
static int lock_piece(Env* env) {
    int count = 0, bottom = env->height + HIDDEN - 1;
    for (int row = 0; row < 4; row++) {
        unsigned bits = piece_row(env, env->turned, row, env->x);
        if (!bits) continue;
        env->rows[env->y + row] |= (uint16_t)bits;
        for (int column = 0; column < WIDTH; column++)
            if (bits >> column & 1) env->kinds[env->y + row][column] = (uint8_t)env->piece;
        count += env->rows[env->y + row] == FULL;
    }
    if (count) {
        int to = bottom;
        for (int row = bottom; row >= 0; row--) {
            if (env->rows[row] == FULL) continue;
            env->rows[to] = env->rows[row];
            memcpy(env->kinds[to], env->kinds[row], WIDTH);
            to--;
        }
        for (; to >= 0; to--)
            env->rows[to] = 0;
    }
    env->combo = count ? env->combo + 1 : -1;
    if (!count) return 0;
    int points = line_points[count];
    if (count == 4 && env->after_tetris) points += points / 2;
    env->after_tetris = count == 4;
    env->points += (points + 50 * env->combo) * env->level;
    env->tetrises += count == 4;
    env->cleared += count;
    set_level(env);
    return count;
}

/* A row down. The half second restarts only at a new lowest row, or up and down turns would last
 * for ever. */
static bool sink(Env* env) {
    if (!shift(env, 0, 1)) return false;
    if (env->y > env->lowest) {
        env->lowest = env->y;
        env->rested = 0;
    }
    return true;
}

/* The piece falls and locks if it has rested long enough. Returns whether it locked. */
static bool fall(Env* env) {
    env->fall += env->speed;
    while (env->fall > 0.9999f) { /* sixty times a sixtieth is a row */
        env->fall -= 1;
        if (!sink(env)) env->fall = 0;
    }
    if (fits(env, env->turned, env->x, env->y + 1)) return false;
    env->rested += env->ticks;
    return (float)env->rested >= env->lock_delay * 60;
}

/* Turns the falling piece and brings its leftmost cell as near to the column as it can go. */
static void aim(Env* env, int turns, int column) {
    for (int k = 0; k < turns; k++)
        turn(env, 1);
    int x = column - leftmost(env);
    while (env->x != x && shift(env, env->x > x ? -1 : 1, 0)) {}
}

static void c_step(Env* env) {
    bool moved = false, locks = false, over = false;
    int action = env->actions[0];
    if (env->placements) {
        if (action < PLACEMENTS) aim(env, action / WIDTH, action % WIDTH);
        action = action < PLACEMENTS || !env->can_hold ? HARD : HOLD;
    }
    switch (action) {
        case LEFT: moved = shift(env, -1, 0); break;
        case RIGHT: moved = shift(env, 1, 0); break;
        case TURN_RIGHT: moved = turn(env, 1); break;
        case TURN_LEFT: moved = turn(env, -1); break;
        case SOFT:
            if (sink(env)) {
                env->points++;
                env->fall = 0;
            }
            break;
        case HARD:
            while (shift(env, 0, 1))
                env->points += 2;
            locks = true;
            break;
        case HOLD:
            if (!env->can_hold) break;
            int held = env->held;
            env->held = env->piece;
            over = held < 0 ? !place_next(env) : !place(env, held);
            env->can_hold = false;
            break;
    }
    if (moved && env->resets < RESETS && env->rested) {
        env->resets++;
        env->rested = 0;
    }
    if (!locks && !over && !env->placements) locks = fall(env);
    int count = 0;
    float shaped = 0;
    if (locks) {
        count = lock_piece(env);
        if (env->reward_hole != 0 || env->reward_bump != 0) {
            float before = env->shape;
            int holes, bumps;
            measure(env->rows, env->height + HIDDEN, &holes, &bumps);
            env->shape = env->reward_hole * (float)holes + env->reward_bump * (float)bumps;
            shaped = env->shape - before;
        }
        shaped += env->reward_piece;
        env->can_hold = true;
        over = env->cleared < env->lines && !place_next(env);
    }
    env->tick++;
    bool won = env->cleared >= env->lines;
    bool late = !over && !won && env->max_steps && env->tick >= env->max_steps;
    env->rewards[0] = (float)line_points[count] / 100 + shaped + (over ? env->reward_over : 0);
    env->terminals[0] = over || won;
    env->truncations[0] = late;
    env->total += env->rewards[0];
    if (!over && !won && !late) {
        write_observation(env, env->observations);
        return;
    }
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    LOG_EPISODE(env, minf((float)env->cleared / (float)env->lines, 1), env->points, env->total,
                env->tick);
    env->log.lines += (float)env->cleared;
    env->log.tetrises += (float)env->tetrises;
    c_reset(env);
}

static const Color piece_colors[PIECES] = {
    {0, 187, 204, 255}, {250, 190, 60, 255}, {170, 110, 230, 255}, {90, 200, 120, 255},
    {226, 84, 84, 255}, {80, 120, 230, 255}, {238, 138, 60, 255}
};

static void draw_cell(int x, int y, int side, Color color) {
    DrawRectangle(x + 1, y + 1, side - 2, side - 2, color);
    DrawRectangle(x + 1, y + 1, side - 2, side / 6, draw_mix(color, DRAW_WHITE, 0.35f));
}

static void draw_small(const Env* env, int piece, int x, int y) {
    enum { SIDE = 20 };
    for (int row = 0; row < 4; row++)
        for (int column = 0; column < 4; column++)
            if (env->cells[piece][0][row] >> column & 1)
                draw_cell(x + column * SIDE, y + row * SIDE, SIDE, piece_colors[piece]);
}

static void c_render(Env* env) {
    int side = env->height <= 20 ? 36 : 720 / env->height, left = 150, top = 20, rows = env->height;
    int ghost = env->y;
    while (fits(env, env->turned, env->x, ghost + 1))
        ghost++;
    int tall = rows * side + 2 * top;
    /* the panels beside it take 470 */
    draw_begin(left * 2 + WIDTH * side, tall < 470 ? 470 : tall, "tetris");
    DrawRectangle(left - 3, top - 3, WIDTH * side + 6, rows * side + 6, DRAW_GREY);
    DrawRectangle(left, top, WIDTH * side, rows * side, DRAW_BACKGROUND);
    for (int row = 0; row < rows; row++) {
        for (int column = 0; column < WIDTH; column++) {
            int x = left + column * side, y = top + row * side;
            if (env->rows[row + HIDDEN] >> column & 1)
                draw_cell(x, y, side, piece_colors[env->kinds[row + HIDDEN][column]]);
            else
                DrawRectangle(x + 1, y + 1, side - 2, side - 2, (Color){18, 28, 38, 255});
        }
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int row = 0; row < 4; row++) {
            int at = (pass ? env->y : ghost) + row - HIDDEN;
            unsigned bits = piece_row(env, env->turned, row, env->x);
            for (int column = 0; at >= 0 && column < WIDTH; column++) {
                int x = left + column * side, y = top + at * side;
                Color color = piece_colors[env->piece];
                if (!(bits >> column & 1)) continue;
                if (pass) draw_cell(x, y, side, color);
                else
                    DrawRectangle(x + 1, y + 1, side - 2, side - 2,
                                  draw_mix(color, DRAW_PANEL, 0.7f));
            }
        }
    }
    DrawText("hold", 20, top, 24, DRAW_GREY);
    if (env->held >= 0) draw_small(env, env->held, 30, top + 40);
    DrawText("points", 20, top + 170, 24, DRAW_GREY);
    draw_format(20, top + 200, 30, DRAW_WHITE, "%d", env->points);
    DrawText("lines", 20, top + 260, 24, DRAW_GREY);
    draw_format(20, top + 290, 30, DRAW_WHITE, "%d", env->cleared);
    DrawText("level", 20, top + 350, 24, DRAW_GREY);
    draw_format(20, top + 380, 30, DRAW_WHITE, "%d", env->level);
    DrawText("next", left + WIDTH * side + 24, top, 24, DRAW_GREY);
    for (int i = 0; i < PREVIEWS; i++)
        draw_small(env, env->queue[i], left + WIDTH * side + 30, top + 40 + 80 * i);
    draw_end();
}
