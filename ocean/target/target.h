/* Target: the smallest complete environment with several agents. Copy this file to begin a
 * custom one with several. squared.h lists what a header holds.
 *
 * Agents fly about a plane and collect goals. Each step an agent chooses a turn (9 of them, up to
 * 0.2 rad to either side) and a speed (0, 1/4 ... 4/4 of `max_speed`). Within `radius` of a goal it
 * gets a reward of 1, and the goal moves to a random place. All agents share the goals; the first
 * agent in order takes one. Walls stop an agent.
 *
 * The task has no end. An agent that has not scored for `patience` steps is put somewhere else.
 * What it did until then keeps its worth, so this is a truncation and not a termination: the
 * trainer adds the value of the final observation and clears the agent's recurrent state. There are
 * no episodes, so the log covers windows of 128 steps. score is the goals collected in a window,
 * per agent.
 * perf is the score over that of agents that split the goals and always fly straight at full speed;
 * this is an estimate, so perf is cut at 1.
 *
 *     observation of one agent; places are relative to it, over the longer side
 *     2 for each goal             where it is, the nearest first
 *     2 for each other agent      where it is
 *     3                           cosine and sine of its heading, its last reward
 *
 *     actions: turn, 4 is straight on; speed */
#pragma once

#define OBSERVATION float
#define SETTINGS(X) \
    X(int, num_agents, 8, "agents in one plane") \
    X(int, num_goals, 4, "goals in one plane") \
    X(int, width, 1080, "of the plane") \
    X(int, height, 720, "of the plane") \
    X(float, radius, 32.0, "distance at which an agent reaches a goal") \
    X(float, max_speed, 20.0, "distance an agent moves in a step at full speed") \
    X(int, patience, 512, "steps without a goal after which an agent is put somewhere else")
#define KEYS(KEY) KEY(0, REST, 4) KEY(0, LEFT, 0) KEY(0, RIGHT, 8) KEY(1, REST, 1) KEY(1, UP, 4)
#include "env.h"
#include "draw.h"

/* Arrays of a fixed size keep the struct plain data, so nothing is allocated.
 */
enum { MAX_AGENTS = 64, MAX_GOALS = 64, TURNS = 9, SPEEDS = 5, WINDOW = 128 };

typedef struct {
    float x, y;
} Goal;

typedef struct {
    float x, y;
    float cosine, sine; /* of the heading */
    int idle; /* steps since its last goal */
} Agent;

struct Env {
    ENV_COMMON
    float turn_cosine[TURNS], turn_sine[TURNS];
    float scale; /* of observed distances: 1 / the longer side */
    float par;   /* the score of a window that counts as perf 1 */
    int tick, goals_taken; /* of the window */
    Agent agents[MAX_AGENTS];
    Goal goals[MAX_GOALS];
};

static const char* c_init(Env* env) {
    if (env->num_agents < 1 || env->num_agents > MAX_AGENTS)
        return "num_agents must lie within 1..64";
    if (env->num_goals < 1 || env->num_goals > MAX_GOALS) return "num_goals must lie within 1..64";
    if (env->width < 1 || env->height < 1) return "width and height must be 1 or more";
    if (!(env->radius > 0)) return "radius must be above 0";
    if (!(env->max_speed > 0)) return "max_speed must be above 0";
    if (env->patience < 1) return "patience must be 1 or more";
    for (int i = 0; i < TURNS; i++) {
        float angle = 0.05f * (float)(i - TURNS / 2);
        env->turn_cosine[i] = cosf(angle);
        env->turn_sine[i] = sinf(angle);
    }
    env->scale = 1 / (float)(env->width > env->height ? env->width : env->height);
    /* The nearest of m random points in an area A is about sqrt(A / m) / 2 away. An agent's share
     * of the m goals is m / num_agents. */
    float area = (float)env->width * (float)env->height;
    float share = (float)env->num_goals / (float)env->num_agents;
    float distance = sqrtf(area / share) / 2 - env->radius;
    env->par = WINDOW / maxf(distance / env->max_speed, 1);
    return NULL;
}

static int observation_size(const Env* env) {
    return 2 * env->num_goals + 2 * (env->num_agents - 1) + 3;
}

/* All agents have the same spaces. These are one agent's. */
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){
        .num_agents = env->num_agents,
        .observation_shape = {observation_size(env)},
        .observation_low = -1,
        .observation_high = 1,
        .action_heads = {TURNS, SPEEDS},
    };
}

static float squared_length(Goal goal) {
    return goal.x * goal.x + goal.y * goal.y;
}

/* Goals come nearest first, because in any other order agents collect half as many. */
static void write_observation(const Env* env, int i, float reward, float* observation) {
    const Agent* agent = &env->agents[i];
    Goal nearest[MAX_GOALS];
    for (int k = 0; k < env->num_goals; k++) {
        Goal goal = {(env->goals[k].x - agent->x) * env->scale,
                     (env->goals[k].y - agent->y) * env->scale};
        int place = k;
        for (; place > 0 && squared_length(goal) < squared_length(nearest[place - 1]); place--)
            nearest[place] = nearest[place - 1];
        nearest[place] = goal;
    }
    for (int k = 0; k < env->num_goals; k++) {
        *observation++ = nearest[k].x;
        *observation++ = nearest[k].y;
    }
    for (int k = 0; k < env->num_agents; k++) {
        if (k == i) continue;
        *observation++ = (env->agents[k].x - agent->x) * env->scale;
        *observation++ = (env->agents[k].y - agent->y) * env->scale;
    }
    *observation++ = agent->cosine;
    *observation++ = agent->sine;
    *observation++ = reward;
}

static void place_goal(Env* env, Goal* goal) {
    goal->x = random_float(&env->rng, 0, (float)env->width);
    goal->y = random_float(&env->rng, 0, (float)env->height);
}

static void place_agent(Env* env, Agent* agent) {
    float heading = random_float(&env->rng, 0, (float)(2 * M_PI));
    agent->x = random_float(&env->rng, 0, (float)env->width);
    agent->y = random_float(&env->rng, 0, (float)env->height);
    agent->cosine = clampf(cosf(heading), -1, 1);
    agent->sine = clampf(sinf(heading), -1, 1);
    agent->idle = 0;
}

static void c_reset(Env* env) {
    int size = observation_size(env);
    env->tick = env->goals_taken = 0;
    for (int k = 0; k < env->num_goals; k++)
        place_goal(env, &env->goals[k]);
    for (int i = 0; i < env->num_agents; i++)
        place_agent(env, &env->agents[i]);
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, 0, env->observations + i * size);
}

static void move_agent(Env* env, Agent* agent, int turn, int speed) {
    float cosine = agent->cosine * env->turn_cosine[turn] - agent->sine * env->turn_sine[turn];
    float sine = agent->sine * env->turn_cosine[turn] + agent->cosine * env->turn_sine[turn];
    /* One Newton step towards length 1, so that rounding errors do not add up. */
    float shrink = 1.5f - 0.5f * (cosine * cosine + sine * sine);
    agent->cosine = clampf(cosine * shrink, -1, 1);
    agent->sine = clampf(sine * shrink, -1, 1);
    float distance = env->max_speed * (float)speed / (SPEEDS - 1);
    agent->x = clampf(agent->x + agent->cosine * distance, 0, (float)env->width);
    agent->y = clampf(agent->y + agent->sine * distance, 0, (float)env->height);
}

/* Returns whether the agent reaches a goal, and moves that goal. */
static bool take_goal(Env* env, const Agent* agent) {
    for (int k = 0; k < env->num_goals; k++) {
        float dx = env->goals[k].x - agent->x, dy = env->goals[k].y - agent->y;
        if (dx * dx + dy * dy <= env->radius * env->radius) {
            place_goal(env, &env->goals[k]);
            return true;
        }
    }
    return false;
}

static void log_window(Env* env) {
    float score = (float)env->goals_taken / (float)env->num_agents;
    LOG_EPISODE(env, minf(score / env->par, 1), score, score, WINDOW);
    env->tick = env->goals_taken = 0;
}

/* Every array is laid out agent after agent: 2 actions, `size` observations, 1 of the others. */
static void c_step(Env* env) {
    int size = observation_size(env);
    bool late = false;
    for (int i = 0; i < env->num_agents; i++) {
        Agent* agent = &env->agents[i];
        move_agent(env, agent, env->actions[2 * i], env->actions[2 * i + 1]);
        bool scored = take_goal(env, agent);
        env->goals_taken += scored;
        agent->idle = scored ? 0 : agent->idle + 1;
        env->rewards[i] = scored;
        env->terminals[i] = 0;
        env->truncations[i] = agent->idle >= env->patience;
        late |= env->truncations[i];
    }
    /* The next state is there when all have moved. Agents that are put elsewhere get their final
     * observation first. */
    if (late) {
        for (int i = 0; i < env->num_agents && env->final_observations; i++)
            if (env->truncations[i])
                write_observation(env, i, env->rewards[i], env->final_observations + i * size);
        for (int i = 0; i < env->num_agents; i++)
            if (env->truncations[i]) place_agent(env, &env->agents[i]);
    }
    for (int i = 0; i < env->num_agents; i++)
        write_observation(env, i, env->rewards[i], env->observations + i * size);
    if (++env->tick == WINDOW) log_window(env);
}

static void c_render(Env* env) {
    /* pixels a unit */
    float scale = 1080 / (float)(env->width > env->height ? env->width : env->height);
    draw_begin((int)((float)env->width * scale), (int)((float)env->height * scale), "target");
    for (int k = 0; k < env->num_goals; k++) {
        Vector2 centre = {env->goals[k].x * scale, env->goals[k].y * scale};
        DrawCircleV(centre, env->radius * scale, DRAW_PANEL);
        DrawCircleV(centre, env->radius * scale / 3, DRAW_GOLD);
    }
    for (int i = 0; i < env->num_agents; i++) {
        const Agent* agent = &env->agents[i];
        float ahead_x = 18 * agent->cosine, ahead_y = 18 * agent->sine;
        Vector2 nose = {agent->x + ahead_x, agent->y + ahead_y};
        Vector2 left = {agent->x - ahead_x + ahead_y * 0.7f, agent->y - ahead_y - ahead_x * 0.7f};
        Vector2 right = {agent->x - ahead_x - ahead_y * 0.7f, agent->y - ahead_y + ahead_x * 0.7f};
        DrawTriangle(nose, left, right, DRAW_CYAN);
    }
    draw_end();
}
