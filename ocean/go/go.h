/* Go, on boards of 5 x 5 to 19 x 19, against a script. Black moves first; chance decides who is
 * Black. A group without liberties is taken off. Suicide is not allowed, nor is taking back a
 * single stone at once (ko). Two passes in a row, or max_moves moves, end the game. It is counted
 * by area: stones, and empty points that reach one colour only. White gets komi. Players do not
 * agree on dead stones, so they have to be taken. The reward is 1 for a win, -1 for a loss. An
 * illegal move loses at once; the action mask says which are legal.
 *
 * The script takes the largest group that it can take at once. Else it saves its largest group that
 * could be taken, if a stone gives it two liberties or joins it to a safe group. Else it plays near
 * the last move or anywhere at random, but never into its own eyes. It passes if it has no such
 * move, or, if it leads, after a pass. It follows each of the first two rules with probability
 * `skill`.
 *
 *     observation: planes of size x size bytes, 1 if there is
 *     0, 1   a stone of the agent, of the opponent
 *     2, 3   a stone of a group with a single liberty, of the agent, of the opponent
 *     4      a point where the agent may play
 *     5      the opponent's last stone
 *     6      1 everywhere if the agent is Black
 *
 * Actions: the point, row after row, and last the pass.
 * perf is the share of games won. score is the agent's lead in points, or -size^2 for an illegal
 * move. */
#pragma once

#define OBSERVATION uint8_t
#define OWN_LOG(X) X(illegal)
#define SETTINGS(X) \
    X(int, size, 7, "of the board, 5..19") \
    X(float, komi, 7.5, "points that White gets; a half, so that no game is drawn") \
    X(int, max_moves, 0, "of both, that end a game; 0: twice as many as points") \
    X(float, skill, 1.0, "chance that the script follows each of its rules")
#define HAS_ACTION_MASKS
#define BY_TURNS
#define KEYS(KEY) KEY(0, P, env->size * env->size) /* pass */
#define CLICK_COLUMNS env->size
#include "env.h"
#include "draw.h"

enum { MAX_SIZE = 19, MAX_CELLS = (MAX_SIZE + 2) * (MAX_SIZE + 2), PLANES = 7, PASS = 0 };
enum { EMPTY, BLACK, WHITE, EDGE };
/* The status of a point is a bit, so that the four around a point can be combined; the edge is 0. A
 * stone is in ATARI if its group has a single liberty, else SAFE. */
#define FREE 1
#define SAFE(color) (color == BLACK ? 2 : 8)
#define ATARI(color) (color == BLACK ? 4 : 16)

/* A liberty counts once for each stone that touches it. The count, the sum of the points and the
 * sum of their squares change in constant time. All liberties are one point if count * squares
 * equals sum * sum. */
typedef struct {
    uint16_t stones, count;
    uint32_t sum, squares;
} Group;

struct Env {
    ENV_COMMON
    int stride, limit, cells;
    int around[4], corners[4]; /* steps to the neighbours, straight and diagonal */
    /* with a border of EDGE; a point is an index, 0 is no point or a pass */
    uint8_t board[MAX_CELLS];
    uint8_t status[MAX_CELLS]; /* of each point; the same for all stones of a group */
    uint16_t head[MAX_CELLS];  /* of a stone: its group's number, one of its stones */
    uint16_t next[MAX_CELLS];  /* a ring through the stones of a group */
    Group groups[MAX_CELLS];
    uint16_t stack[MAX_CELLS];
    int own;  /* the agent's colour */
    int ko;   /* the next move may not go there */
    int last; /* the last move */
    int moves, passes, tick;
};

static const char* c_init(Env* env) {
    if (env->size < 5 || env->size > MAX_SIZE) return "size must lie within 5..19";
    if (env->max_moves < 0) return "max_moves must be 0 (twice as many as points) or more";
    if (!(fabsf(env->komi) <= 1000) || floorf(env->komi) == env->komi)
        return "komi must be within 1000 and no integer";
    if (!(env->skill >= 0 && env->skill <= 1)) return "skill must lie within 0..1";
    int s = env->stride = env->size + 2;
    env->cells = s * s;
    env->limit = env->max_moves ? env->max_moves : 2 * env->size * env->size;
    int around[4] = {-s, s, -1, 1}, corners[4] = {-s - 1, -s + 1, s - 1, s + 1};
    memcpy(env->around, around, sizeof(around));
    memcpy(env->corners, corners, sizeof(corners));
    return NULL;
}

static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = 1,
        .observation_shape = {PLANES, env->size, env->size},
        .observation_low = 0,
        .observation_high = 1,
        .action_heads = {env->size * env->size + 1},
    };
}

static inline Group* group_of(Env* env, int point) {
    return &env->groups[env->head[point]];
}

static inline void add_liberty(Group* group, int point) {
    group->count++;
    group->sum += (uint32_t)point;
    group->squares += (uint32_t)(point * point);
}

static inline void take_liberty(Group* group, int point) {
    group->count--;
    group->sum -= (uint32_t)point;
    group->squares -= (uint32_t)(point * point);
}

/* Returns whether all of its liberties are one point. */
static inline bool in_atari(const Group* group) {
    return (uint64_t)group->count * group->squares == (uint64_t)group->sum * group->sum;
}

static inline int other(int color) {
    return BLACK + WHITE - color;
}

/* Updates the status of a stone's group, if that has changed. */
static void renew_status(Env* env, int point) {
    int color = env->board[point];
    uint8_t status = in_atari(group_of(env, point)) ? ATARI(color) : SAFE(color);
    int stone = point;
    while (env->status[stone] != status) {
        env->status[stone] = status;
        stone = env->next[stone];
    }
}

/* The status of the four around a point, combined. */
static inline int around(const Env* env, int point) {
    const uint8_t* status = env->status + point;
    return status[-env->stride] | status[env->stride] | status[-1] | status[1];
}

/* A stone needs a liberty: an empty neighbour, a friend with another liberty, or an enemy that it
 * takes. */
static inline bool is_legal(const Env* env, int color, int point) {
    return env->status[point] == FREE && point != env->ko &&
           around(env, point) & (FREE | SAFE(color) | ATARI(other(color)));
}

/* Renames the smaller group and joins the two rings. */
static void merge(Env* env, int a, int b) {
    int to = env->head[a], from = env->head[b];
    if (to == from) return;
    if (env->groups[to].stones < env->groups[from].stones) {
        int swap = to;
        to = from;
        from = swap;
    }
    int stone = from;
    do {
        env->head[stone] = (uint16_t)to;
        env->status[stone] = env->status[to];
        stone = env->next[stone];
    } while (stone != from);
    uint16_t swap = env->next[to];
    env->next[to] = env->next[from];
    env->next[from] = swap;
    Group *into = &env->groups[to], *gone = &env->groups[from];
    into->stones += gone->stones;
    into->count += gone->count;
    into->sum += gone->sum;
    into->squares += gone->squares;
}

/* Takes a group off. Its points become liberties of the stones around. */
static void take(Env* env, int head) {
    int stone = head;
    do {
        env->board[stone] = EMPTY;
        env->status[stone] = FREE;
        stone = env->next[stone];
    } while (stone != head);
    do {
        for (int k = 0; k < 4; k++) {
            int neighbour = stone + env->around[k];
            if (env->board[neighbour] != BLACK && env->board[neighbour] != WHITE) continue;
            add_liberty(group_of(env, neighbour), stone);
            renew_status(env, neighbour);
        }
        stone = env->next[stone];
    } while (stone != head);
}

/* Plays a legal move, which may be PASS. */
static void play(Env* env, int color, int point) {
    env->moves++;
    env->last = point;
    env->ko = 0;
    env->passes = point == PASS ? env->passes + 1 : 0;
    if (point == PASS) return;
    env->board[point] = (uint8_t)color;
    env->status[point] = SAFE(color);
    env->head[point] = env->next[point] = (uint16_t)point;
    env->groups[point] = (Group){.stones = 1};
    for (int k = 0; k < 4; k++) {
        int neighbour = point + env->around[k], there = env->board[neighbour];
        if (there == EMPTY) add_liberty(&env->groups[point], neighbour);
        else if (there != EDGE) take_liberty(group_of(env, neighbour), point);
    }
    int taken = 0, where = 0;
    for (int k = 0; k < 4; k++) {
        int neighbour = point + env->around[k];
        if (env->board[neighbour] == color) merge(env, point, neighbour);
    }
    for (int k = 0; k < 4; k++) {
        int neighbour = point + env->around[k];
        if (env->board[neighbour] != other(color)) continue;
        if (group_of(env, neighbour)->count) {
            renew_status(env, neighbour);
            continue;
        }
        taken += group_of(env, neighbour)->stones;
        where = neighbour;
        take(env, env->head[neighbour]);
    }
    renew_status(env, point);
    const Group* group = group_of(env, point);
    if (taken == 1 && group->stones == 1 && in_atari(group)) env->ko = where;
}

/* An eye is surrounded by own stones, and the enemy has at most one diagonal point (none at the
 * edge). */
static bool is_eye(const Env* env, int color, int point) {
    int enemies = 0, edges = 0;
    for (int k = 0; k < 4; k++)
        if (env->board[point + env->around[k]] != color &&
            env->board[point + env->around[k]] != EDGE)
            return false;
    for (int k = 0; k < 4; k++) {
        enemies += env->board[point + env->corners[k]] == other(color);
        edges += env->board[point + env->corners[k]] == EDGE;
    }
    return enemies + (edges > 0) < 2;
}

static inline int point_of(const Env* env, int action) {
    return action == env->size * env->size
               ? PASS
               : (action / env->size + 1) * env->stride + action % env->size + 1;
}

/* Black's area less White's and less komi. */
static float count_board(Env* env) {
    uint8_t* board = env->board;
    int area[3] = {0, 0, 0};
    for (int first = 0; first < env->cells; first++) {
        if (board[first] == BLACK || board[first] == WHITE) area[board[first]]++;
        if (board[first] != EMPTY) continue;
        int waiting = 0, size = 0, reached = 0;
        env->stack[waiting++] = (uint16_t)first;
        board[first] = EDGE + 1; /* a mark: already counted */
        while (waiting) {
            int point = env->stack[--waiting];
            size++;
            for (int k = 0; k < 4; k++) {
                int neighbour = point + env->around[k];
                if (board[neighbour] == BLACK || board[neighbour] == WHITE)
                    reached |= board[neighbour];
                if (board[neighbour] != EMPTY) continue;
                board[neighbour] = EDGE + 1;
                env->stack[waiting++] = (uint16_t)neighbour;
            }
        }
        if (reached == BLACK || reached == WHITE) area[reached] += size;
    }
    for (int point = 0; point < env->cells; point++)
        if (board[point] == EDGE + 1) board[point] = EMPTY;
    return (float)(area[BLACK] - area[WHITE]) - env->komi;
}

/* Finds the liberty of the largest group of a colour in atari where a stone of the script pays; 0:
 * none. */
static int find_atari(Env* env, int color, bool save) {
    int best = 0, most = 0;
    const uint8_t *at = env->status, *end = env->status + env->cells;
    for (; (at = memchr(at, ATARI(color), (size_t)(end - at))); at++) {
        int point = (int)(at - env->status);
        if (env->head[point] != point) continue;
        const Group* group = &env->groups[point];
        if (group->stones <= most) continue;
        int liberty = (int)(group->sum / group->count);
        if (!is_legal(env, save ? color : other(color), liberty)) continue;
        if (save) {
            int safe = 0;
            for (int k = 0; k < 4; k++) {
                int neighbour = liberty + env->around[k], there = env->board[neighbour];
                safe += there == EMPTY;
                if (there == color && !in_atari(group_of(env, neighbour))) safe += 2;
            }
            if (safe < 2) continue;
        }
        best = liberty;
        most = group->stones;
    }
    return best;
}

/* Finds a random point around the last move, or anywhere, that makes sense; 0: none. */
static int find_random(Env* env, int color, bool close) {
    int found = 0, count = 0;
    for (int k = 0; close && env->last && k < 8; k++) {
        int point = env->last + (k < 4 ? env->around[k] : env->corners[k - 4]);
        if (!is_legal(env, color, point) || is_eye(env, color, point)) continue;
        if (random_int(&env->rng, ++count) == 0) found = point;
    }
    if (found) return found;
    /* The first good point from a random one on. That is nearly uniform, and cheap. */
    int size = env->size * env->size, first = random_int(&env->rng, size);
    int left = env->size - first % env->size;
    int point = point_of(env, first), last = point_of(env, size - 1);
    for (int k = 0; k < size; k++) {
        if (is_legal(env, color, point) && !is_eye(env, color, point)) return point;
        if (point == last) point = point_of(env, 0);
        else point += left == 1 ? 3 : 1; /* skips the border, into the next row */
        left = left == 1 ? env->size : left - 1;
    }
    return 0;
}

static void move_script(Env* env) {
    int color = other(env->own), point = 0;
    if (env->passes) {
        float lead = count_board(env);
        if ((color == BLACK ? lead : -lead) > 0) {
            play(env, color, PASS);
            return;
        }
    }
    if (random_float(&env->rng, 0, 1) < env->skill) point = find_atari(env, env->own, false);
    if (!point && random_float(&env->rng, 0, 1) < env->skill) point = find_atari(env, color, true);
    if (!point) point = find_random(env, color, random_int(&env->rng, 2));
    play(env, color, point);
}

/* Simple loops over all points, because the compiler turns them into 16 to 64 points at once. */
static void write_observation(Env* env, uint8_t* observation) {
    /* a row is copied with a few bytes too many, which the next row overwrites */
    enum { SLACK = 32 };
    int size = env->size, plane = size * size, first = env->stride + 1, last = env->cells - first;
    uint8_t wide[MAX_CELLS + SLACK], legal[MAX_SIZE * MAX_SIZE + SLACK],
        status[MAX_SIZE * MAX_SIZE + SLACK];
    uint8_t liberty = (uint8_t)(FREE | SAFE(env->own) | ATARI(other(env->own)));
    const uint8_t *here = env->status, *above = here - env->stride, *below = here + env->stride;
    for (int point = first; point < last; point++)
        wide[point] =
            here[point] == FREE &&
            ((above[point] | below[point] | here[point - 1] | here[point + 1]) & liberty) != 0;
    wide[env->ko] = 0;
    for (int row = 0, point = first; row < size; row++, point += env->stride) {
        memcpy(legal + row * size, wide + point, SLACK);
        memcpy(status + row * size, here + point, SLACK);
    }
    uint8_t safe = SAFE(env->own), atari = ATARI(env->own);
    uint8_t enemy_safe = SAFE(other(env->own)), enemy_atari = ATARI(other(env->own));
    for (int i = 0; i < plane; i++)
        observation[i] = (status[i] & (safe | atari)) != 0;
    for (int i = 0; i < plane; i++)
        observation[plane + i] = (status[i] & (enemy_safe | enemy_atari)) != 0;
    for (int i = 0; i < plane; i++)
        observation[2 * plane + i] = (status[i] & atari) != 0;
    for (int i = 0; i < plane; i++)
        observation[3 * plane + i] = (status[i] & enemy_atari) != 0;
    memcpy(observation + 4 * plane, legal, (size_t)plane);
    memset(observation + 5 * plane, 0, (size_t)plane);
    if (env->last)
        observation[5 * plane + (env->last / env->stride - 1) * size + env->last % env->stride -
                    1] = 1;
    memset(observation + 6 * plane, env->own == BLACK, (size_t)plane);
    if (!env->action_masks) return;
    memcpy(env->action_masks, legal, (size_t)plane);
    env->action_masks[plane] = 1;
}

static void c_reset(Env* env) {
    memset(env->board, EDGE, sizeof(env->board));
    memset(env->status, 0, sizeof(env->status));
    for (int row = 1; row <= env->size; row++) {
        memset(env->board + row * env->stride + 1, EMPTY, (size_t)env->size);
        memset(env->status + row * env->stride + 1, FREE, (size_t)env->size);
    }
    env->own = random_int(&env->rng, 2) ? BLACK : WHITE;
    env->ko = env->last = env->moves = env->passes = env->tick = 0;
    if (env->own == WHITE) move_script(env);
    write_observation(env, env->observations);
}

static void end_episode(Env* env, float lead, bool illegal) {
    float reward = lead > 0 ? 1 : -1;
    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);
    env->rewards[0] = reward;
    env->terminals[0] = 1;
    LOG_EPISODE(env, lead > 0, lead, reward, env->tick);
    env->log.illegal += illegal;
    c_reset(env);
}

static void c_step(Env* env) {
    int point = point_of(env, env->actions[0]);
    env->rewards[0] = 0;
    env->terminals[0] = 0;
    env->truncations[0] = 0;
    env->tick++;
    if (point != PASS && !is_legal(env, env->own, point)) {
        end_episode(env, (float)(-env->size * env->size), true);
        return;
    }
    play(env, env->own, point);
    if (env->passes < 2 && env->moves < env->limit) move_script(env);
    if (env->passes >= 2 || env->moves >= env->limit) {
        float lead = count_board(env);
        end_episode(env, env->own == BLACK ? lead : -lead, false);
    } else {
        write_observation(env, env->observations);
    }
}

static void c_render(Env* env) {
    int cell = 760 / env->size, side = cell * env->size, half = cell / 2;
    draw_begin(side, side, "go");
    DrawRectangle(0, 0, side, side, (Color){150, 110, 62, 255});
    DrawRectangle(6, 6, side - 12, side - 12, (Color){196, 152, 92, 255});
    for (int i = 0; i < env->size; i++) {
        DrawRectangle(half, half + i * cell, side - cell + 1, 2, (Color){90, 64, 36, 255});
        DrawRectangle(half + i * cell, half, 2, side - cell + 1, (Color){90, 64, 36, 255});
    }
    int edge = env->size >= 13 ? 3 : 2, middle = env->size / 2;
    for (int row = 0; row < env->size; row++) {
        for (int column = 0; column < env->size; column++) {
            int point = (row + 1) * env->stride + column + 1, there = env->board[point];
            Vector2 centre = {(float)(column * cell + half), (float)(row * cell + half)};
            bool star = (row == edge || row == env->size - 1 - edge || row == middle) &&
                        (column == edge || column == env->size - 1 - edge || column == middle);
            if (env->size < 9) star = row == middle && column == middle;
            if (star && env->size % 2) DrawCircleV(centre, 5, (Color){90, 64, 36, 255});
            if (there == EMPTY) continue;
            Color color = there == BLACK ? (Color){24, 26, 30, 255} : (Color){240, 240, 236, 255};
            DrawCircleV((Vector2){centre.x + 2, centre.y + 3}, (float)cell * 0.46f,
                        (Color){120, 90, 52, 255});
            DrawCircleV(centre, (float)cell * 0.46f, color);
            if (there == env->own) DrawCircleV(centre, (float)cell * 0.1f, DRAW_CYAN);
            if (point == env->last)
                DrawRing(centre, (float)cell * 0.2f, (float)cell * 0.26f, 0, 360, 32, DRAW_RED);
        }
    }
    draw_end();
}
