"""The rules of connect4, go, minesweeper, maze and cube."""

import itertools

import numpy as np
import pytest
from conftest import slow_but
from ocean_vector import Vector

import ocean


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("connect4", {"depth": 13}, "depth must lie within"),
        ("go", {"komi": 7.0}, "no integer"),
        ("go", {"size": 4}, "size must lie within"),
        ("minesweeper", {"mines": 81}, "one cell without"),
        ("maze", {"size": 65}, "size must lie within"),
        ("cube", {"size": 4}, "size must be 2 or 3"),
        ("cube", {"scramble_min": 9}, "scramble_min <= scramble_max"),
    ],
)
def test_wrong_settings(name, options, message):
    with pytest.raises(ValueError, match=message):
        ocean.load(name).create(1, settings=options)


def legal_actions(vector, rng):
    return np.where(vector.masks == 1, rng.random(vector.masks.shape), -1).argmax(axis=1)


# Connect Four


def has_four(board):
    for row, column in itertools.product(range(6), range(7)):
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            cells = [(row + k * down, column + k * right) for k in range(4)]
            if all(0 <= r < 6 and 0 <= c < 7 and board[r, c] for r, c in cells):
                return True
    return False


def drop(board, stones, column):
    row = int(np.flatnonzero(stones[:, column] == 0).max())
    after = board.copy()
    after[row, column] = 1
    return after


def winning_columns(mine, theirs):
    stones = mine | theirs
    return [c for c in range(7) if not stones[0, c] and has_four(drop(mine, stones, c))]


@pytest.mark.parametrize("depth", slow_but([0, 1, 2, 4], 0, 2))
def test_connect4_games(depth):
    vector, rng = Vector("connect4", 8, {"depth": depth}), np.random.default_rng(0)
    ends, taken, stopped = [], [0, 0], [0, 0]
    for _ in range(60):
        boards, masks = vector.observations.copy(), vector.masks.copy()
        assert np.array_equal(masks, 1 - boards.max(axis=1)[:, 0])
        vector.step(legal_actions(vector, rng))
        for i in range(8):
            own, other = boards[i]
            mine = drop(own, own | other, vector.actions[i, 0])
            if has_four(mine):
                assert vector.rewards[i] == 1 and vector.terminals[i] == 1
            else:
                wins = winning_columns(other, mine)
                if wins and not (mine | other)[0].all():
                    taken[int(vector.rewards[i] == -1)] += 1
                elif not vector.terminals[i]:
                    threats = winning_columns(mine, other)
                    after = vector.observations[i]
                    assert np.array_equal(after[0], mine) and (after[1] & ~other).sum() == 1
                    assert not has_four(after[1]) and (after[0] & after[1]).sum() == 0
                    if len(threats) == 1:
                        (cell,) = threats
                        covered = after[1][:, cell].sum() > other[:, cell].sum()
                        hopeless = winning_columns(mine, drop(other, mine | other, cell))
                        stopped[int(covered or bool(hopeless) or not winning_columns(mine, after[1]))] += 1
                else:
                    assert vector.rewards[i] in (0, -1)
            if vector.terminals[i]:
                ends.append(vector.rewards[i])
    assert len(ends) > 15 and sum(taken) > 5
    if depth >= 1:
        assert taken[0] == 0, "it takes a win"
    if depth >= 2:
        assert stopped[0] == 0 and stopped[1] > 3, "it stops a single threat"
        assert np.mean(ends) < -0.7
    log = vector.envs.log()
    assert log["perf"] == pytest.approx((np.mean(ends) + 1) / 2, abs=1e-6)


@pytest.mark.slow
def test_connect4_deeper_is_better_and_a_full_column_loses():
    """Two searches of Python's own: one move ahead, against each depth."""
    rng, perf = np.random.default_rng(1), []
    for depth in (0, 2, 6):
        vector = Vector("connect4", 8, {"depth": depth})
        for _ in range(60):
            action = legal_actions(vector, rng)
            for i, (own, other) in enumerate(vector.observations):
                wins = winning_columns(own, other) or winning_columns(other, own)
                action[i] = wins[0] if wins else action[i]
            vector.step(action)
        perf.append(vector.envs.log()["perf"])
    assert perf[0] > 0.85 > perf[1] > perf[2]
    vector = Vector("connect4", 1, {"depth": 0})
    for _ in range(50):
        full = vector.observations[0, :, 0, 0].any()
        vector.step(0)
        if full:
            assert (vector.rewards[0], vector.terminals[0]) == (-1, 1)
            return
    raise AssertionError("the column never filled")


# Go


def neighbours(n, row, column):
    cells = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [(r, c) for r, c in cells if 0 <= r < n and 0 <= c < n]


def group_and_liberties(board, start):
    n, group, liberties, stack = len(board), {start}, set(), [start]
    while stack:
        for cell in neighbours(n, *stack.pop()):
            if board[cell] == 0:
                liberties.add(cell)
            elif board[cell] == board[start] and cell not in group:
                group.add(cell)
                stack.append(cell)
    return group, liberties


def put(board, color, cell):
    """The board after a move, and the stones that it takes; None where it
    is suicide or not free."""
    if board[cell]:
        return None, 0
    after, taken = board.copy(), set()
    after[cell] = color
    for near in neighbours(len(board), *cell):
        if after[near] == -color:
            group, liberties = group_and_liberties(after, near)
            if not liberties:
                taken |= group
    for stone in taken:
        after[stone] = 0
    return (after, taken) if group_and_liberties(after, cell)[1] else (None, 0)


def area(board, color):
    n, total, seen = len(board), int((board == color).sum()), set()
    for cell in zip(*np.nonzero(board == 0), strict=True):
        cell = (int(cell[0]), int(cell[1]))
        if cell in seen:
            continue
        region, touches, stack = {cell}, set(), [cell]
        while stack:
            for near in neighbours(n, *stack.pop()):
                if board[near]:
                    touches.add(int(board[near]))
                elif near not in region:
                    region.add(near)
                    stack.append(near)
        seen |= region
        total += len(region) if touches == {color} else 0
    return total


@pytest.mark.parametrize("n", [5, 7, 9])
def test_go_follows_the_rules(n):
    """Every move of both sides is replayed on a slow board: stones, captures, ko, legal points,
    atari and the count."""
    vector, rng = Vector("go", 6, {"size": n, "komi": 0.5}, seed=n), np.random.default_rng(n)
    ends = captures = kos = 0
    for _ in range(250):
        planes = vector.observations.reshape(6, 7, n, n).astype(int)
        boards, masks = planes[:, 0] - planes[:, 1], vector.masks.copy()
        action = legal_actions(vector, rng)
        action[rng.random(6) < 0.03] = n * n
        vector.step(action)
        after_planes = vector.observations.reshape(6, 7, n, n).astype(int)
        for i in range(6):
            mine, black = boards[i], planes[i, 6, 0, 0]
            if action[i] < n * n:
                mine, taken = put(boards[i], 1, (action[i] // n, action[i] % n))
                captures += len(taken)
            if vector.terminals[i]:
                ends += 1
                continue
            board = after_planes[i, 0] - after_planes[i, 1]
            last = np.argwhere(after_planes[i, 5])
            ko = None
            if len(last):
                cell = tuple(last[0].tolist())
                expected, taken = put(mine, -1, cell)
                assert expected is not None and np.array_equal(board, expected)
                captures += len(taken)
                group, liberties = group_and_liberties(board, cell)
                if len(taken) == 1 and len(group) == 1 and len(liberties) == 1:
                    ko = next(iter(taken))
                    kos += 1
            else:
                assert np.array_equal(board, mine)
            for row, column in itertools.product(range(n), range(n)):
                cell = (row, column)
                legal = put(board, 1, cell)[0] is not None and cell != ko
                assert vector.masks[i, row * n + column] == legal == after_planes[i, 4, row, column]
                if board[cell]:
                    atari = len(group_and_liberties(board, cell)[1]) == 1
                    assert after_planes[i, 2 if board[cell] > 0 else 3, row, column] == atari
            assert after_planes[i, 6].all() == black
        assert masks[:, -1].all()
    assert ends > 5 and captures > 50 and (kos > 0 or n > 5)


def test_go_is_counted_by_area():
    """Two passes on an almost empty board: the script, ahead by its one stone
    or the komi, passes too."""
    vector, ends, n = Vector("go", 40, {"komi": 5.5}), 0, 7
    for _ in range(3):
        planes = vector.observations.reshape(40, 7, n, n).astype(int)
        boards, black = planes[:, 0] - planes[:, 1], planes[:, 6, 0, 0]
        vector.step(np.full(40, n * n))
        for i in np.flatnonzero(vector.terminals):
            lead = area(boards[i], 1) - area(boards[i], -1) + (-5.5 if black[i] else 5.5)
            assert vector.rewards[i] == np.sign(lead)
            ends += 1
    assert ends > 40


def test_go_script_is_better_with_skill():
    rng, scores = np.random.default_rng(3), []
    for skill in (0.0, 1.0):
        vector = Vector("go", 64, {"skill": skill})
        for _ in range(300):
            vector.step(legal_actions(vector, rng))
        log = vector.envs.log()
        assert log["illegal"] == 0 and log["episode_length"] > 10
        scores.append(log["score"])
    assert scores[1] < scores[0] - 3
    vector = Vector("go", 1)
    vector.step(0)
    while not vector.terminals[0]:
        vector.step(0)
    log = vector.envs.log()
    assert vector.rewards[0] == -1 and (log["illegal"] == 1 or log["score"] < 0)


# Minesweeper


@pytest.mark.parametrize(("width", "height", "mines"),
                         [(9, 9, 10), (16, 16, 40), (30, 16, 99), (4, 3, 9)])
def test_minesweeper_rules(width, height, mines):
    options = {"width": width, "height": height, "mines": mines}
    vector, rng = Vector("minesweeper", 8, options), np.random.default_rng(4)
    safe = width * height - mines
    wins = blown = 0
    for _ in range(120):
        before = vector.observations.copy()
        assert (before.sum(axis=1) == 1).all()
        assert np.array_equal(vector.masks.reshape(before[:, 0].shape), before[:, 0])
        action = legal_actions(vector, rng)
        vector.step(action)
        for i in range(8):
            covered = before[i, 0]
            first = covered.all()
            if vector.terminals[i]:
                wins, blown = wins + (vector.rewards[i] > 0), blown + (vector.rewards[i] < 0)
                assert vector.observations[i, 0].all()
                assert not first or vector.rewards[i] > 0
                continue
            after = vector.observations[i]
            opened = covered - after[0]
            assert vector.rewards[i] == pytest.approx(opened.sum() / safe)
            row, column = divmod(int(action[i]), width)
            assert opened[row, column] == 1
            number = after.argmax(axis=0) - 1
            if first and mines <= width * height - 9:
                assert number[row, column] == 0
            # A zero's neighbours are all uncovered, and no number is above that of
            # its covered neighbours.
            for r, c in np.argwhere(after[0] == 0):
                around = after[0, max(r - 1, 0) : r + 2, max(c - 1, 0) : c + 2].sum()
                assert number[r, c] <= around and (number[r, c] > 0 or around == 0)
    assert blown > 10 or wins > 10
    vector.envs.reset(vector.rows)
    vector.step(np.zeros(8))
    vector.step(np.zeros(8))
    going = vector.terminals == 0
    assert np.allclose(vector.rewards[going & ~vector.observations[:, 0].all(axis=(1, 2))], -0.1)


def test_minesweeper_is_won_by_deduction():
    """Cells that a single number proves safe; a guess where there is none. One game
    in two or more is won."""
    vector, rng = Vector("minesweeper", 16, {"mines": 8}), np.random.default_rng(5)
    for _ in range(150):
        action = legal_actions(vector, rng)
        for i, planes in enumerate(vector.observations):
            number, covered = planes.argmax(axis=0) - 1, planes[0] == 1
            mine, safe = np.zeros((9, 9), bool), np.zeros((9, 9), bool)
            for _ in range(3):
                for r, c in np.argwhere(number > 0):
                    window = slice(max(r - 1, 0), r + 2), slice(max(c - 1, 0), c + 2)
                    if covered[window].sum() == number[r, c]:
                        mine[window] |= covered[window]
                    if mine[window].sum() == number[r, c]:
                        safe[window] |= covered[window] & ~mine[window]
            if safe.any():
                action[i] = np.flatnonzero(safe.ravel())[0]
            elif (covered & ~mine).any() and not covered.all():
                action[i] = rng.choice(np.flatnonzero((covered & ~mine).ravel()))
        vector.step(action)
    log = vector.envs.log()
    assert log["perf"] > 0.5 and log["n"] > 50 and log["score"] > 0.7


# Maze


@pytest.mark.parametrize(("size", "vision"), [(2, 1), (5, 10), (8, 16)])
def test_maze_has_one_way_and_walls_hold(size, vision):
    vector, rng = Vector("maze", 8, {"size": size, "vision": vision, "loops": 0.0}), np.random.default_rng(6)
    steps = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    ends, moves = 0, 0
    for _ in range(400):
        before = vector.observations.astype(int)
        vector.random_actions(rng)
        vector.step()
        for i in range(8):
            dy, dx = steps[vector.actions[i, 0]]
            wall, goal = before[i, :2, vision + dy, vision + dx]
            assert before[i, 0, vision, vision] == 0 and before[i, 2, vision, vision] == 1
            assert vector.rewards[i] == vector.terminals[i] == goal
            ends += goal
            if goal or vector.truncations[i]:
                continue
            after = vector.observations[i].astype(int)
            if wall:
                assert np.array_equal(after, before[i])
            else:
                moves += 1
                ys = slice(max(dy, 0), 2 * vision + 1 + min(dy, 0)), slice(max(dx, 0), 2 * vision + 1 + min(dx, 0))
                old = before[i, :2, ys[0], ys[1]]
                ys = slice(max(-dy, 0), 2 * vision + 1 + min(-dy, 0)), slice(max(-dx, 0), 2 * vision + 1 + min(-dx, 0))
                assert np.array_equal(after[:2, ys[0], ys[1]], old)
    assert (ends > 0 or size > 5) and moves > 300
    if vision >= 2 * size:  # the whole maze is seen: a tree has one passage less than rooms
        for maze in vector.observations[:, 0]:
            free = int((maze == 0).sum())
            assert free == 2 * size * size - 1


@pytest.mark.parametrize("size", [2, 5, 8])
def test_maze_marks_lead_through_every_maze(size):
    """On to new cells, or else back along the trail: all mazes without loops are solved in
    time, by what is near."""
    vector, rng = Vector("maze", 64, {"size": size, "vision": 1}), np.random.default_rng(8)
    beside = ([0, 2, 1, 1], [1, 1, 0, 2])
    for _ in range(4 * 4 * size * size):
        wall, _, trail, done = (vector.observations[:, k][:, *beside].astype(float)
                                for k in range(4))
        assert (done <= trail).all()
        vector.step((10 * wall + trail + done + 0.5 * rng.random(wall.shape)).argmin(axis=1))
    log = vector.envs.log()
    assert log["perf"] == 1 and log["n"] > 64


def test_maze_score_is_one_on_the_shortest_way():
    size, vision = 6, 12
    vector = Vector("maze", 16, {"size": size, "vision": vision, "loops": 0.2, "trail": False})
    for _ in range(200):
        actions = np.zeros(16, int)
        for i, (wall, goal) in enumerate(vector.observations):
            (target,) = [tuple(cell) for cell in np.argwhere(goal).tolist()]
            distance, queue = {target: 0}, [target]
            for cell in queue:
                for k, (dy, dx) in enumerate([(1, 0), (-1, 0), (0, 1), (0, -1)]):
                    near = (cell[0] + dy, cell[1] + dx)
                    if (min(near) >= 0 and max(near) <= 2 * vision and not wall[near]
                            and near not in distance):
                        distance[near] = distance[cell] + 1
                        queue.append(near)
                        if near == (vision, vision):
                            actions[i] = k
        vector.step(actions)
    log = vector.envs.log()
    assert log["perf"] == 1 and log["score"] == pytest.approx(1) and log["n"] > 100


# Cube


@pytest.mark.parametrize("size", [2, 3])
def test_cube_turns_are_those_of_the_group(size):
    vector = Vector("cube", 1,
                    {"size": size, "scramble_min": 50, "scramble_max": 50, "max_steps": 10**6})
    stickers = 6 * size * size

    def colors():
        return vector.observations[0, : stickers * 6].reshape(stickers, 6).argmax(axis=1)

    def apply(actions):
        for action in actions:
            vector.step(action)
            assert vector.terminals[0] == 0
        return colors()

    start = colors()
    assert (np.bincount(start, minlength=6) == size * size).all()
    if size == 3:
        assert (start.reshape(6, 9)[:, 4] == np.arange(6)).all(), "the middles stay"
    for side in range(6):
        assert not np.array_equal(apply([2 * side]), start)
        assert np.array_equal(apply([2 * side + 1]), start)
        assert np.array_equal(apply([2 * side] * 4), start)
        moved = apply([2 * side]) != start
        assert moved.sum() <= (20 if size == 3 else 12)
        apply([2 * side + 1])
    # A commutator of neighbours has order 6, (right, up) one of 105; turns of
    # opposite sides commute.
    up, right, down = 0, 2, 6
    assert np.array_equal(apply([right, up, right + 1, up + 1] * 6), start)
    order = next(k for k in range(1, 200) if np.array_equal(apply([right, up]), start))
    assert order == (105 if size == 3 else 15)
    one = apply([up, down])
    apply([down + 1, up + 1])
    assert np.array_equal(apply([down, up]), one)


@pytest.mark.parametrize(("size", "count"), [(2, 156), (3, 480)])
def test_cube_tells_which_stickers_are_of_one_colour(size, count):
    """Of neighbours as they are, in the order of the stickers; what is seen after a turn
    could be read before it."""
    vector = Vector("cube", 300,
                    {"size": size, "scramble_min": 20, "scramble_max": 20, "max_steps": 100})
    stickers, pairs = 6 * size * size, []
    for i in range(stickers):
        pairs += [(i, i + step) for step, place in ((1, i), (size, i // size))
                  if place % size < size - 1]
    ones, others = np.array(pairs).T
    assert (vector.observations.shape[1] == stickers * 6 + count
            and len(pairs) == 12 * size * (size - 1))
    known = None
    for action in [*range(12), 3, 8, 1]:
        cells, same = np.split(vector.observations.copy(), [stickers * 6], axis=1)
        assert (cells.reshape(300, stickers, 6).sum(axis=2) == 1).all()
        colors = cells.reshape(300, stickers, 6).argmax(axis=2)
        now = colors[:, ones] == colors[:, others]
        assert np.array_equal(same[:, : len(pairs)], now)
        if known is not None:
            going = vector.terminals == 0
            assert going.sum() > 250
            assert {column.tobytes() for column in now[going].T} <= {column.tobytes()
                                                                     for column in known[going].T}
        known = same.astype(bool)
        vector.step(np.full(300, action))


def test_cube_is_solved_by_taking_back():
    vector, rng = Vector("cube", 400, {"scramble_max": 1}), np.random.default_rng(7)
    solved = 0
    for _ in range(12):
        vector.random_actions(rng)
        vector.step()
        assert np.array_equal(vector.rewards, vector.terminals)
        solved += vector.terminals.sum()
    log = vector.envs.log()
    assert log["perf"] * log["n"] == pytest.approx(solved) and solved > 100
    assert log["scramble"] == 1
    first = Vector("cube", 12, {"scramble_max": 1}, seed=1)
    found = np.zeros(12, bool)
    for action in range(12):
        saved = first.envs.save()
        first.step(np.full(12, action))
        found |= first.terminals == 1
        first.envs.load(saved)
    assert found.all(), "each scramble of one turn is taken back by one turn"
