"""Small games whose reward random play reaches in 0.2% to 5% of the episodes.

    python pufferl.py train bench/rare_rewards.py:push_box      # any of GAMES
    python bench/bench_rare.py                                  # all of them, with figures

Each game is a finite Markov decision process. Its tables are built once and an environment steps by
lookup, so the scores of random play and of the best policy are exact (`Tables.values`, dynamic
programming over the steps that are left). An observation is what a user's environment would give: a
board of small integers, or a few numbers with names.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
from gymnasium import spaces

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))


@dataclass
class Tables:
    """A deterministic game with S states and A actions.

    Success is an end with a reward of at least half.
    """

    following: np.ndarray  # (S, A) the next state
    rewards: np.ndarray  # (S, A)
    ends: np.ndarray  # (S, A) whether the episode ends there
    observations: np.ndarray  # (S, ...)
    starts: np.ndarray  # states that an episode begins with, all equally likely
    length: int  # steps after which an episode is cut off
    space: spaces.Space
    distractors: int = 0  # random numbers of 0 to 3 behind the observation, new in each step

    @property
    def successes(self):
        return self.ends & (self.rewards >= 0.5)

    def values(self, rewards, choose):
        """Return the mean return over `starts`, for rewards (S, A).

        choose: (S, A) -> (S,), a mean over the actions for random play, a maximum for the best.
        """
        value = np.zeros(len(rewards))
        for _ in range(self.length):
            value = choose(rewards + np.where(self.ends, 0.0, value[self.following]))
        return float(value[self.starts].mean())

    @functools.cached_property
    def facts(self):
        """Score and success of random play, and the best score."""
        mean, best = functools.partial(np.mean, axis=1), functools.partial(np.max, axis=1)
        return {"random": self.values(self.rewards, mean), "success": self.values(self.successes * 1.0, mean),
                "best": self.values(self.rewards, best)}


class Game(gymnasium.Env):
    """An environment that steps through the tables."""

    def __init__(self, tables):
        self.tables, self.observation_space = tables, tables.space
        self.action_space = spaces.Discrete(tables.following.shape[1])

    def _observe(self):
        observed, more = self.tables.observations[self.state], self.tables.distractors
        return np.concatenate([observed, self.np_random.integers(0, 4, more)]) if more else observed

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.steps = self.np_random.choice(self.tables.starts), 0
        return self._observe(), {}

    def step(self, action):
        tables, state = self.tables, self.state
        reward, end = float(tables.rewards[state, action]), bool(tables.ends[state, action])
        self.state, self.steps = tables.following[state, action], self.steps + 1
        return self._observe(), reward, end, not end and self.steps == tables.length, {}


def enumerate_game(states, move, observe, space, starts, actions, length, distractors=0):
    """Make the Tables of a game from its rules.

    states: all of them, hashable. move(state, action) -> (next state, reward, end). observe(state)
    -> an observation of `space`, without the distractors. starts: a list of states.
    """
    number = {state: i for i, state in enumerate(states)}
    following = np.zeros((len(states), actions), np.int64)
    rewards, ends = np.zeros(following.shape), np.zeros(following.shape, bool)
    for (i, state), action in itertools.product(enumerate(states), range(actions)):
        after, rewards[i, action], ends[i, action] = move(state, action)
        following[i, action] = number[after]
    dtype = np.int8 if isinstance(space, spaces.Box) else np.int64
    return Tables(following, rewards, ends, np.array([observe(state) for state in states], dtype),
                  np.array([number[state] for state in starts]), length, space, distractors)


def board_space(rows, columns, kinds):
    return spaces.Box(0, kinds - 1, (rows, columns), np.int8)


def push_box(size=6, length=40):
    """Push a box, which begins off the edge, to a mark; -0.01 a step."""
    cells = list(itertools.product(range(size), repeat=2))
    states = [state for state in itertools.product(cells, repeat=3) if state[0] != state[1]]

    def move(state, action):
        (row, column), box, goal = state
        (down, right), cost = MOVES[action], -0.01
        target, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
        if not all(0 <= x < size for x in target):
            return state, cost, False
        if target == box:
            if not all(0 <= x < size for x in behind):
                return state, cost, False
            box = behind
        return (target, box, goal), (1.0 if box == goal else cost), box == goal

    def observe(state):
        board = np.zeros((size, size), np.int8)
        agent, box, goal = state
        board[goal], board[box], board[agent] = 3, 2, 1
        return board

    starts = [(agent, box, goal) for agent, box, goal in states
              if box != goal and agent != goal and all(0 < x < size - 1 for x in box)]
    return enumerate_game(states, move, observe, board_space(size, size, 4), starts, 4, length)


def key_and_door(height=5, room=3, length=50):
    """Take the key in the left room, open the door, reach the goal in the right room."""
    wall, door = room, (height // 2, room)
    left = [(r, c) for r in range(height) for c in range(room)]
    right = [(r, c) for r in range(height) for c in range(room + 1, 2 * room + 1)]
    goal = (height - 1, 2 * room)
    states = list(itertools.product([*left, door, *right], [None, *left]))  # the agent; the key, None if it has it
    free = {*left, *right}

    def move(state, action):
        agent, key = state
        target = agent[0] + MOVES[action][0], agent[1] + MOVES[action][1]
        if target not in free and not (target == door and key is None):
            target = agent
        end = target == goal
        return (target, None if target == key else key), (1.0 if end else 0.0), end

    def observe(state):
        agent, key = state
        board = np.zeros((height, 2 * room + 1), np.int8)
        board[:, wall], board[door], board[goal] = 1, 2, 3
        if key is not None:
            board[key] = 4
        board[agent] = 5 if key is not None else 6
        return board

    starts = [(agent, key) for agent, key in itertools.product(left, left) if agent != key]
    return enumerate_game(states, move, observe, board_space(height, 2 * room + 1, 7), starts, 4, length)


def deep_sea(depth):
    """Make a deep sea (Osband et al. 2020).

    A row down in each step, to the right at a cost, +1 in the last corner. Which of the two actions
    goes right differs from cell to cell.
    """
    right = np.random.default_rng(depth).integers(0, 2, (depth, depth))
    states = list(itertools.product(range(depth + 1), range(depth)))

    def move(state, action):
        row, column = state
        if row == depth:
            return state, 0.0, True
        goes = action == right[row, column]
        after = row + 1, min(depth - 1, max(0, column + (1 if goes else -1)))
        won = goes and column == row == depth - 1
        return after, (1.0 if won else 0.0) - (0.01 / depth if goes else 0.0), row == depth - 1

    return enumerate_game(states, move, lambda state: state, spaces.MultiDiscrete([depth + 1, depth]), [(0, 0)], 2,
                          depth + 1)


def lock(digits=4, values=4):
    """Enter digits one after the other; +1 if all are right. An episode is one try."""
    code = np.random.default_rng(1).integers(0, values, digits) + 1
    states = list(itertools.product(range(values + 1), repeat=digits))  # 0: not yet entered

    def move(state, action):
        place = next((i for i, digit in enumerate(state) if digit == 0), None)
        if place is None:
            return state, 0.0, True
        after = (*state[:place], action + 1, *state[place + 1 :])
        end = place == digits - 1
        return after, (1.0 if end and after == tuple(code) else 0.0), end

    return enumerate_game(states, move, lambda state: state, spaces.MultiDiscrete([values + 1] * digits),
                          [(0,) * digits], values, digits + 1)


MAZE = ("########",
        "#A.#...#",
        "##.#.#.#",
        "#....#.#",
        "#.####.#",
        "#.#....#",
        "#...##E#",
        "########")


def maze(length=60):
    """Leave a maze with one way in and one exit; -0.01 a step."""
    cells = {(r, c): kind for r, row in enumerate(MAZE) for c, kind in enumerate(row) if kind != "#"}
    begin = next(cell for cell, kind in cells.items() if kind == "A")

    def move(state, action):
        after = state[0] + MOVES[action][0], state[1] + MOVES[action][1]
        after = after if after in cells else state
        end = cells[after] == "E"
        return after, (1.0 if end else -0.01), end

    return enumerate_game(list(cells), move, lambda state: state,
                          spaces.MultiDiscrete([len(MAZE), len(MAZE[0])]), [begin], 4, length)


def corridor(cells=8, begin=3, length=100):
    """Walk a corridor whose near end pays 0.05 and whose far end pays 1.

    One of four actions leads forward, another one in each cell; the others lead back. Six more
    numbers are random.
    """
    on = np.random.default_rng(2).integers(0, 4, cells)

    def move(state, action):
        after = state + (1 if action == on[state] else -1)
        after = min(cells - 1, max(0, after))
        end = after in (0, cells - 1)
        return after, ((1.0 if after else 0.05) if end else 0.0), end

    return enumerate_game(list(range(cells)), move, lambda state: [state], spaces.MultiDiscrete([cells] + [4] * 6),
                          [begin], 4, length, distractors=6)


@functools.cache
def tables_of(name):
    return GAMES[name]()


GAMES: dict[str, Callable[[], Tables]] = {
    "push_box": push_box, "key_and_door": key_and_door, "key_and_door_far": functools.partial(key_and_door, 6, 4),
    "maze": maze, "corridor": corridor, "lock": lock,
    **{f"deep_sea_{depth}": functools.partial(deep_sea, depth) for depth in range(5, 9)}}


def __getattr__(name):
    """Return make_NAME, which makes the environment of a game."""
    if name.removeprefix("make_") in GAMES and name.startswith("make_"):
        return lambda: Game(tables_of(name.removeprefix("make_")))
    raise AttributeError(name)


if __name__ == "__main__":
    for name in GAMES:
        facts, states = tables_of(name).facts, len(tables_of(name).following)
        print(f"{name:14} {states:7,} states  " + "  ".join(f"{k} {v:.4f}" for k, v in facts.items()))
