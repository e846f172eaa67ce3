/* Connect Four: two players in turn drop a stone into one of seven columns of six cells. Four in a
 * line win: in a row, a column or a diagonal. A full board is a draw. Chance decides who begins.
 * The opponent searches `depth` moves ahead (alpha-beta) and takes one of the best moves at random.
 * With depth 1 it wins if it can. With depth 2 it also stops a line of the agent's. With depth 0 it
 * plays at random. The reward is 1 for a win, -1 for a loss, 0 for a draw. A stone for a full
 * column loses at once; the action mask says which columns are free.
 * perf is 1 for a win and 0.5 for a draw.
 * Observation: two planes of 6 x 7 bytes, own stones and the opponent's, the upper row first.
 * Actions: the column. */
#pragma once

#define OBSERVATION uint8_t
#define OWN_LOG(X) X(draws)
#define SETTINGS(X) X(int, depth, 3, "moves that the opponent looks ahead, 0..12")
#define HAS_ACTION_MASKS
#define BY_TURNS
#define KEYS(KEY) \
    KEY(0, 1, 0) KEY(0, 2, 1) KEY(0, 3, 2) KEY(0, 4, 3) KEY(0, 5, 4) KEY(0, 6, 5) KEY(0, 7, 6)
#include "env.h"
#include "draw.h"

/* A board is a set of bits, seven for each column, from the bottom up. The seventh is always empty,
 * so that no line wraps. */
enum { COLUMNS = 7, ROWS = 6, TALL = ROWS + 1, CELLS = ROWS * COLUMNS, WIN = 100, DEEPEST = 12 };
typedef uint64_t Stones;
#define BOTTOM 0x0000040810204081u /* the lowest cell of each column: bits 0, 7, 14 .. 42 */
#define BOARD (BOTTOM * 63)

struct Env {
    ENV_COMMON
    Stones own, other;
    int last; /* bit of the opponent's last stone, for c_render; -1 before it */
    int tick;
};

static const char* c_init(Env* env) {
    if (env->depth < 0 || env->depth > DEEPEST) return "depth must lie within 0..12";
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {2, ROWS, COLUMNS},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {COLUMNS},
    };
}

/* The cell of each column in which the next stone would lie. */
static inline Stones next_cells(Stones all) {
    return (all + BOTTOM) & BOARD;
}

static inline Stones column_cells(int column) {
    return (Stones)63 << column * TALL;
}

/* Cells that make a line of four with three of these stones, whether they are empty or not. */
static Stones line_cells(Stones s) {
    Stones found = s << 1 & s << 2 & s << 3; /* up a column */
    static const int steps[] = {TALL, TALL - 1, TALL + 1};
    for (int i = 0; i < 3; i++) {
        int d = steps[i];
        /* two neighbours to one side */
        Stones up = s << d & s << 2 * d, down = s >> d & s >> 2 * d;
        found |= up & (s << 3 * d | s >> d);
        found |= down & (s >> 3 * d | s << d);
    }
    return found & BOARD;
}

/* From the middle outwards, because the better moves come first. */
static const int order[COLUMNS] = {3, 2, 4, 1, 5, 0, 6};

/* A position of the search: the mover's stones, the other player's, its line_cells, the moves worth
 * a look, the window, and the column that is next. */
typedef struct {
    Stones own, other, threats, moves;
    int alpha, beta, next;
} Node;

/* Looks at a position from which the mover looks `depth` moves ahead. Returns whether its value is
 * known at once. A win is WIN + moves left, so that a sooner one counts more. `lines` are the
 * mover's line_cells; the other player's stone has not changed them. The last two moves need no
 * search: the mover wins if it can, and loses only if each move leaves the other player a cell to
 * win at. */
static inline bool settled(Node* node, Stones own, Stones other, Stones lines, int depth,
                           int alpha, int beta, int* value) {
    Stones free = next_cells(own | other);
    *value = 0;
    if (!free || depth == 0) return true;
    *value = WIN + depth;
    if (lines & free) return true;
    *value = 0;
    if (depth == 1) return true;
    Stones threats = line_cells(other), must = threats & free;
    *value = -(WIN + depth - 1);
    if (must & (must - 1)) return true; /* two cannot be stopped at once */
    /* a stone below a threat lets the other player use it */
    Stones moves = (must ? must : free) & ~(threats >> 1);
    if (!moves) return true;
    *value = 0;
    if (depth == 2) return true;
    *node = (Node){own, other, threats, moves, alpha, beta, 0};
    return false;
}

/* The value for the player to move, who looks `depth` moves ahead: alpha-beta. The nodes replace
 * calls of itself, because a GPU's thread has little memory for calls. */
static int search(Stones own, Stones other, Stones lines, int depth, int alpha, int beta) {
    Node nodes[DEEPEST], *top = nodes, now, next;
    int value;
    if (settled(&now, own, other, lines, depth, alpha, beta, &value)) return value;
    for (;;) {
        Stones stone = 0;
        while (!stone && now.next < COLUMNS && now.alpha < now.beta)
            stone = now.moves & column_cells(order[now.next++]);
        if (!stone) {
            value = now.alpha;
            if (top == nodes) return value;
            now = *--top, depth++;
        } else if (!settled(&next, now.other, now.own | stone, now.threats, depth - 1, -now.beta,
                            -now.alpha, &value)) {
            *top++ = now, now = next, depth--;
            continue;
        }
        if (-value > now.alpha) now.alpha = -value;
    }
}

/* Makes one of the best moves, at random. The search window begins one below the best value, so
 * that equal values count as equal. */
static Stones choose(Env* env) {
    Stones free = next_cells(env->own | env->other), best = 0;
    int value = -2 * WIN, count = 0;
    Stones wins = env->depth ? line_cells(env->other) & free : 0, lines = line_cells(env->own);
    for (int i = 0; i < COLUMNS; i++) {
        Stones stone = free & column_cells(order[i]);
        if (!stone) continue;
        int now = 0;
        if (wins) now = stone & wins ? WIN : 0;
        else if (env->depth > 1)
            now = -search(env->own, env->other | stone, lines, env->depth - 1, -2 * WIN, 1 - value);
        if (now > value) count = 0;
        if (now >= value && random_int(&env->rng, ++count) == 0) best = stone;
        if (now > value) value = now;
    }
    return best;
}

static void write_observation(Env* env, uint8_t* observation) {
    Stones free = next_cells(env->own | env->other);
    for (int row = 0; row < ROWS; row++) {
        for (int column = 0; column < COLUMNS; column++) {
            int bit = column * TALL + ROWS - 1 - row;
            observation[row * COLUMNS + column] = env->own >> bit & 1;
            observation[CELLS + row * COLUMNS + column] = env->other >> bit & 1;
        }
    }
    for (int column = 0; env->action_masks && column < COLUMNS; column++)
        env->action_masks[column] = (free & column_cells(column)) != 0;
}

static void move_other(Env* env) {
    Stones stone = choose(env);
    env->other |= stone;
    env->last = __builtin_ctzll(stone);
}

static void c_reset(Env* env) {
    env->own = env->other = 0;
    env->last = -1;
    env->tick = 0;
    if (random_int(&env->rng, 2)) move_other(env);
    write_observation(env, env->observations);
}

static void end_episode(Env* env, float reward) {
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    env->rewards[0] = reward;
    env->terminals[0] = 1;
    LOG_EPISODE(env, (reward + 1) / 2, reward, reward, env->tick);
    env->log.draws += reward == 0;
    c_reset(env);
}

static void c_step(Env* env) {
    Stones free = next_cells(env->own | env->other), stone = free & column_cells(env->actions[0]);
    env->rewards[0] = 0;
    env->terminals[0] = 0;
    env->truncations[0] = 0;
    env->tick++;
    bool wins = (stone & line_cells(env->own)) != 0;
    env->own |= stone;
    if (!stone || wins) {
        end_episode(env, wins ? 1 : -1);
        return;
    }
    free = next_cells(env->own | env->other);
    if (!free) {
        end_episode(env, 0);
        return;
    }
    Stones lines = line_cells(env->other);
    move_other(env);
    bool loses = (lines >> env->last & 1) != 0;
    if (loses || !next_cells(env->own | env->other)) end_episode(env, loses ? -1 : 0);
    else write_observation(env, env->observations);
}

static void c_render(Env* env) {
    enum { CELL = 100, EDGE = 20 };
    draw_begin(COLUMNS * CELL + 2 * EDGE, ROWS * CELL + 2 * EDGE, "connect4");
    DrawRectangle(EDGE / 2, EDGE / 2, COLUMNS * CELL + EDGE, ROWS * CELL + EDGE,
                  (Color){34, 66, 120, 255});
    for (int column = 0; column < COLUMNS; column++) {
        for (int row = 0; row < ROWS; row++) {
            int bit = column * TALL + row;
            Vector2 centre = {EDGE + CELL * ((float)column + 0.5f),
                              EDGE + CELL * ((float)(ROWS - 1 - row) + 0.5f)};
            bool own = env->own >> bit & 1, other = env->other >> bit & 1;
            Color color = own ? DRAW_CYAN : other ? DRAW_GOLD : DRAW_BACKGROUND;
            DrawCircleV(centre, CELL * 0.41f, color);
            if (own || other)
                DrawCircleV(centre, CELL * 0.31f, draw_mix(color, DRAW_BACKGROUND, 0.15f));
            if (bit == env->last) DrawCircleV(centre, CELL * 0.08f, DRAW_BACKGROUND);
        }
    }
    draw_end();
}
