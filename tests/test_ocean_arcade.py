"""The rules of pong, snake, freeway, enduro, asteroids, tetris and g2048."""

import numpy as np
import pytest
from ocean_vector import Vector

import ocean


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pong", {"ball_speed": 900.0}, "at most max_ball_speed"),
        ("snake", {"width": 4, "height": 4}, "half of the cells"),
        ("freeway", {"level": 8}, "level must lie within"),
        ("enduro", {"traffic_speed": 65.0}, "traffic_speed"),
        ("asteroids", {"first_rocks": 12}, "first_rocks must lie within"),
        ("tetris", {"height": 3}, "height must lie within"),
        ("g2048", {"fours": 1.5}, "fours must lie within"),
    ],
)
def test_wrong_settings(name, options, message):
    with pytest.raises(ValueError, match=message):
        ocean.load(name).create(1, settings=options)


# Pong


def pong_positions(o, paddle=72.0):
    own, other = (o[:, 0] + 1) / 2 * (480 - paddle), (o[:, 1] + 1) / 2 * (480 - paddle)
    return own, other, (o[:, 2] + 1) / 2 * 626, (o[:, 3] + 1) / 2 * 466


def test_pong_is_won_by_following_and_lost_by_waiting():
    scores = []
    for policy in ("follow", "wait"):
        vector = Vector("pong", 32, {"continuous": True, "max_score": 5, "frameskip": 4})
        for _ in range(4000):
            own, _, _, y = pong_positions(vector.observations.astype(np.float64))
            aim = y + 7 - own - 36 + 38 * np.where(np.arange(32) % 2, 1, -1)
            vector.step(np.clip(aim / 32, -1, 1) if policy == "follow" else np.zeros(32))
        scores.append(vector.envs.log())
    assert scores[0]["perf"] > 0.6 and scores[1]["perf"] < 0.3
    assert scores[0]["score"] == pytest.approx(scores[0]["perf"] * 10 - 5)


def test_pong_ball_and_points():
    vector = Vector("pong", 64, {"frameskip": 1})
    rng, points, bounces, strikes = np.random.default_rng(1), 0, 0, 0
    for _ in range(900):
        before = vector.observations.astype(np.float64)
        _, _, x, _ = pong_positions(before)
        vector.random_actions(rng)
        vector.step()
        after = vector.observations.astype(np.float64)
        _, _, new_x, new_y = pong_positions(after)
        point = vector.rewards != 0
        assert np.array_equal(np.rint((after - before)[:, 6] * 21)[point],
                              vector.rewards[point] == 1)
        assert np.array_equal(np.rint((after - before)[:, 7] * 21)[point],
                              vector.rewards[point] == -1)
        # A new ball flies towards who lost the point, from the middle.
        assert np.array_equal(np.sign(after[point, 4]), -vector.rewards[point])
        np.testing.assert_allclose(new_x[point], 313, atol=1e-3)
        speed = np.hypot(before[:, 4], before[:, 5]) * 840 / 60
        turned = np.sign(after[:, 4]) != np.sign(before[:, 4])
        flies = ~point & ~turned
        np.testing.assert_allclose((new_x - x)[flies & (new_x < 626) & (new_x > 0) & (x > 0) & (x < 626)],
                                   (before[:, 4] * 14)[flies & (new_x < 626) & (new_x > 0) & (x > 0) & (x < 626)],
                                   atol=1e-3)
        np.testing.assert_allclose(np.hypot(after[:, 4], after[:, 5])[flies] * 14,
                                   speed[flies], atol=1e-4)
        struck = ~point & turned
        np.testing.assert_allclose(np.hypot(after[:, 4], after[:, 5])[struck] * 14,
                                   np.minimum(speed[struck] + 0.5, 14), atol=1e-4)
        assert (np.abs(after[struck, 5]) <= np.abs(after[struck, 4]) * np.tan(np.pi / 3)
                * 1.001).all()
        assert (new_y >= 0).all() and (new_y <= 466).all()
        points, strikes = points + point.sum(), strikes + struck.sum()
        bounces += (flies & (np.sign(after[:, 5]) != np.sign(before[:, 5]))).sum()
    assert points > 200 and strikes > 200 and bounces > 200


# Snake


def test_snake_alone_eats_grows_and_dies():
    """One snake in a small field, its body followed cell by cell."""
    options = {"num_agents": 1, "width": 8, "height": 6, "vision": 8, "num_food": 4,
               "max_length": 4, "corpses": False}
    vector, rng = Vector("snake", 1, options, seed=3), np.random.default_rng(2)
    steps = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}
    deaths = eaten = full = 0
    body = heading = None
    for _ in range(3000):
        planes = vector.observations[0]
        assert planes[0].sum() == 4 and planes[3].sum() == 0
        if body is None:
            assert planes[2].sum() == 1
            body = [(0, 0)]  # relative to the head where the episode began
            origin = (0, 0)
        action = int(rng.integers(4))
        head = body[0]
        way = steps[action]
        if len(body) > 1 and (head[0] + way[0], head[1] + way[1]) == body[1]:
            way = heading
        heading = way
        row, column = 8 + way[0], 8 + way[1]
        food = planes[0][row, column] == 1
        tail = body[-1]
        next_cell = (head[0] + way[0], head[1] + way[1])
        grows = food and len(body) < 4
        blocked = planes[1][row, column] == 1 and not (next_cell == tail and not grows
                                                       and len(body) > 1)
        vector.step(action)
        assert vector.terminals[0] == blocked
        if blocked:
            assert vector.rewards[0] == -1
            log = vector.envs.log()
            assert log["score"] == len(body)
            deaths += 1
            body = None
            continue
        assert vector.rewards[0] == pytest.approx(0.1 if food else 0)
        body = [next_cell, *body] if grows else [next_cell, *body[:-1]]
        eaten, full = eaten + food, full + (len(body) == 4)
        own = {(r - 8 + body[0][0], c - 8 + body[0][1])
               for r, c in np.argwhere(vector.observations[0][2])}
        assert own == set(body) and origin == (0, 0)
    assert deaths > 100 and eaten > 100 and full > 0


def test_snakes_leave_corpses():
    options = {"num_agents": 20, "width": 24, "height": 20, "vision": 24, "num_food": 30,
               "reward_corpse": 0.5}
    vector, rng = Vector("snake", 1, options), np.random.default_rng(3)
    starved, most, rewards = Vector("snake", 4, {**options, "patience": 10}), 0, set()
    for _ in range(1500):
        vector.random_actions(rng)
        vector.step()
        starved.random_actions(rng)
        starved.step()
        planes = vector.observations
        food = planes[0, 0].sum()
        assert food >= 30
        most = max(most, food)
        rewards |= set(vector.rewards.tolist())
        assert (planes[:, 0].sum(axis=(1, 2)) == food).all(), "all see the same field"
        assert ((planes[:, 3].sum(axis=(1, 2)) == 19).all()
                and (planes[:, 1] & planes[:, 0]).sum() == 0)
        assert ((vector.rewards == -1) == (vector.terminals == 1)).all()
    assert 30 < most < 100 and rewards == {-1, 0, np.float32(0.1), 0.5}
    assert vector.envs.log()["score"] < starved.envs.log()["score"] * 2


# Freeway


def test_freeway_shows_the_lanes_around_the_chicken():
    """The six lanes shift by one when the chicken enters the next lane, and what is
    beside the road is empty."""
    vector, rng = Vector("freeway", 8, {"stun": 0.0}), np.random.default_rng(1)
    order = [0.12, 0.15, 0.19, 0.24, 0.32, -0.32, -0.24, -0.19, -0.15, -0.12]
    seen = set()
    for _ in range(1500):
        height = vector.observations[:, 0].astype(np.float64) * 11
        lanes, own = vector.observations[:, 4:].reshape(8, 6, 4), np.floor(height - 0.5 + 1e-6).astype(int)
        for i in range(8):
            if abs(height[i] - 0.5 - round(height[i] - 0.5)) < 1e-4:
                continue  # on the line: rounding decides
            assert vector.observations[i, 3] == pytest.approx(height[i] - 0.5 - own[i], abs=1e-4)
            for k, lane in enumerate(range(own[i] - 1, own[i] + 5)):
                if 0 <= lane < 10:
                    assert lanes[i, k, 0] == pytest.approx(order[lane])
                else:
                    assert lanes[i, k].tolist() == [0, 1, 1, 1]
            seen.add(own[i])
        vector.step(rng.choice(3, size=8, p=[0.1, 0.8, 0.1]))
    assert seen == set(range(-1, 11))


@pytest.mark.parametrize("level", range(8))
def test_freeway_crossings_and_hits(level):
    vector = Vector("freeway", 16,
                    {"level": level, "seconds": 40.0, "hard": level % 2 == 1}, seed=4)
    crossed = hits = 0
    for t in range(600):
        before = vector.observations.astype(np.float64)
        vector.step(np.ones(16))
        after = vector.observations.astype(np.float64)
        up, over = (after - before)[:, 0] * 11, vector.terminals == 1
        assert over.all() if t == 599 else not over.any()
        arrived, hit = vector.rewards == 1, (after[:, 1] == 1) & (before[:, 1] == 0)
        walks = ~arrived & ~hit & (before[:, 1] == 0) & (after[:, 1] == 0) & ~over
        np.testing.assert_allclose(up[walks], 3.6 * 4 / 60, atol=1e-4)
        assert (up[hit] < (0.01 if level % 2 else 0)).all() and (after[arrived & ~hit, 0] * 11
                                                                 < 0.25).all()
        if level % 2:
            assert (after[hit, 0] == 0).all()
        crossed, hits = crossed + arrived.sum(), hits + hit.sum()
    log = vector.envs.log()
    assert log["score"] * 16 == crossed and hits > 10
    assert log["perf"] == pytest.approx(log["score"] / (40 * 3.6 / 11), rel=1e-5)


def test_freeway_looking_out_pays():
    """Waits where a car of the next lane is near: more crossings and fewer
    hits than running blindly."""
    logs = []
    for careful in (False, True):
        vector = Vector("freeway", 32, {"level": 1, "hard": True})
        for _ in range(2040):
            o = vector.observations.astype(np.float64)
            now = np.floor(o[:, 0] * 11 - 0.5).astype(int)

            def danger(lane, times, o=o, now=now):
                cars = o[:, 4:].reshape(32, 6, 4)[np.arange(32), lane - now + 1]
                ahead = cars[:, 1:] / 2 + np.array(times)[:, None, None] * cars[:, :1]
                return (np.abs(ahead) < 0.06).any(axis=(0, 2)) & (lane >= 0) & (lane <= 9)

            here, there = danger(now, (0, 0.1)), danger(np.floor(o[:, 0] * 11 - 0.1).astype(int),
                                                        (0, 0.1, 0.2, 0.3))
            vector.step(np.where(~there if careful else True, 1, np.where(here, 2, 0)))
        logs.append(vector.envs.log())
    assert logs[1]["hits"] < logs[0]["hits"] / 2 and logs[1]["score"] > logs[0]["score"] + 3


# Enduro


def drive(o):
    """Gas, and a lane without a near car."""
    lanes = np.array([-0.6, 0.0, 0.6])
    cars = o[:, 11:].reshape(len(o), 8, 2)
    ahead, x = cars[..., 0] * 240, o[:, :1] + 2 * cars[..., 1]
    free = np.full((len(o), 3), 240.0)
    for k, lane in enumerate(lanes):
        free[:, k] = np.where(np.abs(x - lane) < 0.45, ahead, 240).min(axis=1)
    away = np.abs(lanes - o[:, :1])
    want = lanes[(free.clip(0, 90) - 30 * away).argmax(axis=1)] + 0.25 * o[:, 2] * o[:, 1] ** 2
    steer = np.where(want > o[:, 0] + 0.05, 2, np.where(want < o[:, 0] - 0.05, 1, 0))
    near = np.where((np.abs(cars[..., 1]) * 2 < 0.4) & (ahead < 18), 1, 0).any(axis=1)
    return np.column_stack([steer, np.where(near & (o[:, 1] > 0.5), 2, 1)])


def test_enduro_is_driven():
    vector = Vector("enduro", 16, seed=5)
    left, passed = np.ones(16), np.zeros(16)
    first = vector.observations.copy()
    assert (first[:, 1] == 0).all() and (first[:, 5] == 1).all() and (first[:, 6] == 0).all()
    for _ in range(4500):
        vector.step(drive(vector.observations.astype(np.float64)))
        if vector.terminals.any():
            break
        passed += vector.rewards
        left = vector.observations[:, 5]
    # Nearly all 16 have their 200 cars when the first day ends, and go on.
    assert passed.mean() > 190
    assert np.median(left) == 0 or np.median(left) == 1


def test_enduro_days_and_weather():
    options = {"day": 12.0, "tau": 0.1, "first_day": 1, "later_days": 1, "days": 2}
    vector = Vector("enduro", 8, options, seed=6)
    grip, sight, ends = set(), set(), []
    for t in range(1, 300):
        vector.step(np.tile([0, 1], (8, 1)))
        grip |= set(np.unique(vector.observations[:, 7]).tolist())
        sight |= set(np.unique(np.rint(vector.observations[:, 8] * 240)).tolist())
        ends += [t] * int(vector.terminals.sum())
    assert grip == {0.5, 1.0} and sight == {60, 90, 240}
    assert {(e % 120) // 2 for e in ends} <= {0, 1, 2} and vector.envs.log()["days"] > 0
    parked = Vector("enduro", 8, options)
    for _ in range(125):
        parked.step(np.zeros((8, 2)))
        assert not parked.rewards.any()
    log = parked.envs.log()
    assert (log["n"], log["score"], log["perf"], log["days"]) == (8, 0, 0, 0)


def test_enduro_bends_and_edges():
    """Hands off the wheel, a bend to the right carries the car to the left; the edge slows it."""
    vector, slowed = Vector("enduro", 64, seed=7), 0
    for _ in range(400):
        before = vector.observations.astype(np.float64)
        vector.step(np.tile([0, 1], (64, 1)))
        after = vector.observations.astype(np.float64)
        drift = after[:, 0] - before[:, 0]
        expected = -0.0666667 * 0.9 * before[:, 2] * after[:, 1] ** 2
        inside = (np.abs(after[:, 0]) < 1) & (after[:, 1] >= before[:, 1])  # no crash
        np.testing.assert_allclose(drift[inside], expected[inside], atol=2e-3)
        edge = ~inside & (np.abs(before[:, 0]) == 1)
        slowed += (after[edge, 1] < before[edge, 1]).sum()
    assert slowed > 50


# Asteroids


class Asteroids(Vector):
    def __init__(self, num_envs=1, **options):
        super().__init__("asteroids", num_envs, options, seed=8)

    rocks = property(lambda self: self.observations[:, 15:].reshape(-1, 10, 5))
    there = property(lambda self: self.observations[:, 2] == 1)


def test_asteroids_start_and_flight():
    game = Asteroids(8, saucer_seconds=1e6)
    assert ((np.count_nonzero(game.rocks[..., 4], axis=1) == 4).all()
            and (game.rocks[:, :4, 4] == 1).all())
    assert game.there.all() and not game.observations[:, :2].any()
    game.step(np.tile([0, 1, 0], (8, 1)))
    drag = 1 - 0.4 / 60
    expected = 0.1 * (1 + drag + drag**2 + drag**3) / 10
    np.testing.assert_allclose(game.observations[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(game.observations[:, 1], 0, atol=1e-6)
    for _ in range(5):
        # to the right by 20 * 0.075 rad: the speed shows on the left
        game.step(np.tile([2, 0, 0], (8, 1)))
    heading = game.observations[:, :2] / np.linalg.norm(game.observations[:, :2], axis=1,
                                                        keepdims=True)
    np.testing.assert_allclose(np.arctan2(heading[:, 1], heading[:, 0]), -20 * 4.5 / 60, atol=1e-3)


def aim(game):
    """Turns to where the nearest rock will be, and shoots."""
    rock = game.rocks[:, 0].astype(np.float64)
    way, velocity = rock[:, :2] * 512, rock[:, 2:4] * 10
    time = np.linalg.norm(way, axis=1, keepdims=True) / 8
    way = way + velocity * np.minimum(time, 60)
    angle = np.arctan2(way[:, 1], way[:, 0])
    turn = np.where(angle > 0.15, 2, np.where(angle < -0.15, 1, 0))
    return np.column_stack([turn, np.zeros(len(turn)), (np.abs(angle) < 0.25) & (time[:, 0] < 50)])


def test_asteroids_points_and_splits():
    game = Asteroids(32, saucer_seconds=1e6, reward_loss=0.0)
    seen, total, splits = set(), np.zeros(32), 0
    for _ in range(1500):
        before, there = game.rocks[..., 4].copy(), game.there
        game.step(aim(game))
        points = np.rint(game.rewards * 100).astype(int)
        seen |= set(points.tolist())
        total += points
        # A large rock that breaks leaves two of middle size, as far as the ten nearest show it.
        one = (points == 20) & ((before > 0).sum(axis=1) <= 8) & (game.terminals == 0) & there
        large = (np.abs(before - 1) < 0.01).sum(axis=1) - (np.abs(game.rocks[..., 4] - 1)
                                                           < 0.01).sum(axis=1)
        middle = (np.abs(game.rocks[..., 4] - 2 / 3) < 0.01).sum(axis=1) - (np.abs(before - 2 / 3) < 0.01).sum(axis=1)
        assert (large[one] == 1).all() and (middle[one] == 2).all()
        splits += one.sum()
    assert {0, 20, 50, 100} <= seen and splits > 50
    assert total.mean() > 2000


def test_asteroids_saucers_ships_and_hyperspace():
    game, rng = Asteroids(64, saucer_seconds=1.0, reward_loss=-5.0), np.random.default_rng(4)
    saucers = shots = lost = 0
    ships = game.observations[:, 3].copy()
    for _ in range(400):
        game.random_actions(rng)
        game.actions[:, 1] = 0
        game.step()
        loss = (game.rewards < -1) & (game.terminals == 0)
        now = game.observations[:, 3].copy()
        assert (now[loss] < ships[loss]).all()
        lost += loss.sum()
        ships = now
        saucers, shots = saucers + game.observations[:, 6].sum(), shots + game.observations[:, 10].sum()
        # the large one at first
        assert set(np.unique(game.observations[:, 9]).tolist()) <= {0.0, 1.0}
    assert saucers > 100 and shots > 100 and lost > 20
    game = Asteroids(600, saucer_seconds=1e6)
    game.step(np.tile([0, 2, 0], (600, 1)))
    assert 50 < (~game.there).sum() < 250  # one in six breaks; some come out in a rock


# Tetris

SHAPES = {
    "I": ["1111"], "O": ["11", "11"], "T": ["010", "111"], "S": ["011", "110"],
    "Z": ["110", "011"], "J": ["100", "111"], "L": ["001", "111"],
}


class Tetris(Vector):
    def __init__(self, num_envs=1, seed=9, **options):
        super().__init__("tetris", num_envs, options, seed=seed)
        self.height = options.get("height", 20)

    @property
    def parts(self):
        cells = 10 * self.height
        lies, falls, rest = np.split(self.observations[0], [cells, -51])
        return lies.reshape(-1, 10), falls.reshape(-1, 10), rest[:49].reshape(7, 7), rest[49:]


def test_tetris_pieces_bags_and_shapes():
    game = Tetris(first_level=1, ticks=60)
    pieces = []
    for _ in range(300):
        lies, falls, which, _ = game.parts
        if falls.sum() == 4 and lies[:4].sum() == 0:
            name = "IOTSZJL"[which[0].argmax()]
            if len(pieces) == 0 or pieces[-1][1] != len(pieces):
                rows, columns = np.nonzero(falls)
                shape = falls[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
                assert ["".join(map(str, row)) for row in shape] == SHAPES[name]
                assert columns.min() == (4 if name == "O" else 3)
        game.step(0)
    # The queue: each run of seven pieces from the beginning is a whole bag.
    game = Tetris(height=40)
    order = [int(game.parts[2][0].argmax())]
    for _ in range(12):
        upcoming = [int(row.argmax()) for row in game.parts[2][2:]]
        game.step(6)
        assert game.terminals[0] == 0 and int(game.parts[2][0].argmax()) == upcoming[0]
        order.append(upcoming[0])
    assert sorted(order[:7]) == list(range(7)) and len(set(order[7:])) == len(order[7:])


def test_tetris_moves_turns_holds_and_drops():
    game = Tetris(ticks=1, seed=11)
    while game.parts[1].sum() < 4:
        game.step(0)
    _, falls, which, flags = game.parts
    assert flags[0] == 1 and which[1].sum() == 0
    left = falls.copy()
    for _ in range(12):
        game.step(1)
    moved = game.parts[1]
    assert (moved[:, 0].any() and moved.sum() == 4
            and moved.any(axis=0).sum() == left.any(axis=0).sum())
    piece = which[0].argmax()
    game.step(7)
    _, _, which, flags = game.parts
    assert which[1].argmax() == piece and which[1].sum() == 1 and flags[0] == 0
    second = which[0].argmax()
    game.step(7)  # not twice
    assert game.parts[2][0].argmax() == second
    game.step(6)
    lies, _, _, flags = game.parts
    assert lies.sum() == 4 and lies[-1].any() and flags[0] == 1
    # Four turns to one side bring it back, in free air.
    while game.parts[1].sum() < 4 or not game.parts[1][2:].any():
        game.step(0)
    game = Tetris(ticks=1, seed=12, first_level=1)
    for _ in range(200):
        game.step(0)
    one = game.parts[1]
    for action in (3, 3, 3, 3, 4, 4, 4, 4):
        game.step(action)
    assert np.array_equal(game.parts[1].any(axis=0), one.any(axis=0))


def test_tetris_gravity_and_lock():
    game = Tetris(ticks=1)
    rows = []
    for _ in range(60 * 3):
        game.step(0)
        falls = game.parts[1]
        rows.append(np.nonzero(falls.any(axis=1))[0].max() if falls.any() else -1)
    assert rows[-1] - rows[60] == 2  # one row a second on the first level
    game = Tetris(ticks=1, first_level=20)
    locked = next(t for t in range(1000) if game.step(0).observations[0, :200].any())
    assert 28 <= locked <= 33  # down at once, and half a second until it locks
    game = Tetris(ticks=1, first_level=20)
    locked = next(t for t in range(2000) if game.step(1 + t // 3 % 2).observations[0, :200].any())
    assert locked > 40, "moving puts the lock off"


def tetris_shape(lies):
    """(holes, bumps) of a field."""
    tops = np.where(lies.any(axis=0), len(lies) - lies.argmax(axis=0), 0)
    return (np.cumsum(lies, axis=0).astype(bool) & (lies == 0)).sum(), np.abs(np.diff(tops)).sum()


@pytest.mark.parametrize("cycle", [(3, 4, 5), (3, 5, 4, 5), (3, 4)])
def test_tetris_piece_cannot_be_kept_alive(cycle):
    vector = Vector("tetris", 8, {"max_steps": 0}, seed=1)
    for t in range(4000):
        vector.step(cycle[t % len(cycle)])
        if vector.terminals.any():
            return
    raise AssertionError("turned to and fro a piece never locks")


def test_tetris_placements():
    """Every action brings the piece's leftmost cell to its column, or as far as the wall lets it,
    and drops it; what it leads to was seen before."""
    game, seen, pieces, lines = Tetris(placements=True, seed=16, height=40), set(), 0, 0
    turned = {name: [np.rot90(np.array([list(map(int, row)) for row in rows]), -k)
                     for k in range(4)]
              for name, rows in SHAPES.items()}
    rng = np.random.default_rng(2)
    for _ in range(3000):
        lies, outcomes, which, can_hold = *(part.copy() for part in game.parts[:3]), game.parts[3][0]
        # lines, holes, bumps, rows below
        good = np.tensordot([3.0, -2.0, -0.5, -1.0], outcomes.reshape(4, 40), 1)
        action = int(good.argmax() if rng.random() < 0.5 else rng.integers(41))
        game.step(action)
        if game.terminals[0]:
            continue
        if action == 40:
            assert (game.parts[0].sum() == lies.sum()) == bool(can_hold) or game.rewards[0]
            continue
        if lies[:12].any():
            continue  # near the top there may be no room to turn
        gone, holes, bumps, below = outcomes.reshape(4, 4, 10)[:, action // 10, action % 10]
        before, after = tetris_shape(lies), tetris_shape(game.parts[0])
        assert (holes, bumps) == (after[0] - before[0], after[1] - before[1])
        assert game.rewards[0] == (0, 1, 3, 5, 8)[gone]
        lines += gone
        if gone:
            continue  # what lies has moved
        new = game.parts[0].astype(int) - lies
        rows, columns = np.nonzero(new)
        shape = turned["IOTSZJL"[which[0].argmax()]][action // 10]
        assert np.array_equal(new[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1],
                              shape)
        assert columns.min() == min(action % 10, 10 - shape.shape[1])
        assert (rows == 39).any() or lies[np.minimum(rows + 1, 39), columns].any(), (
            "it lies on something")
        assert below == 39 - rows.max()
        seen.add(action)
        pieces += 1
    assert len(seen) == 40 and pieces > 500 and lines > 20


def test_tetris_rewards_of_shape():
    """Each piece pays reward_piece and what the field's holes and bumps changed by."""
    options = {"reward_piece": 0.5, "reward_hole": -0.25, "reward_bump": -0.0625,
               "reward_over": 0.0, "height": 40}
    game, pieces, rng = Tetris(ticks=1, seed=15, **options), 0, np.random.default_rng(1)

    def shape(lies):
        holes, bumps = tetris_shape(lies)
        return -0.25 * holes - 0.0625 * bumps

    for action in rng.integers(8, size=400):
        before = game.parts[0].copy()
        game.step(action)
        after = game.parts[0]
        if game.terminals[0]:
            break
        locked = int(after.sum() != before.sum())
        pieces += locked
        assert game.rewards[0] == 0.5 * locked + shape(after) - shape(before)
    assert pieces > 20


def test_tetris_lines_by_search():
    """A greedy player (heights, holes, bumps) clears lines; each reward is that
    of the lines that went."""
    game = Tetris(ticks=1, seed=13, max_steps=0)
    rewards, cleared, points = [], 0, {1: 1, 2: 3, 3: 5, 4: 8}
    envs = game.envs

    def cost(lies):
        filled = lies.any(axis=0)
        top = np.where(filled, lies.argmax(axis=0), len(lies))
        holes = (np.cumsum(lies, axis=0).astype(bool) & (lies == 0)).sum()
        return 0.5 * (len(lies) - top).sum() + 3 * holes + 0.4 * np.abs(np.diff(top)).sum()

    for _ in range(45):
        saved, best, before = envs.save(), (np.inf, None), game.parts[0].sum()
        for turns in range(4):
            for shift in range(-5, 6):
                plan = [3] * turns + [1 if shift < 0 else 2] * abs(shift) + [6]
                envs.load(saved)
                for action in plan:
                    game.step(action)
                    if game.terminals[0]:
                        break
                if not game.terminals[0]:
                    best = min(best, (cost(game.parts[0]) - 6 * game.rewards[0], plan))
        envs.load(saved)
        for action in best[1]:
            game.step(action)
        lines = (before + 4 - game.parts[0].sum()) / 10
        assert lines == int(lines) and game.rewards[0] == points.get(int(lines), 0)
        cleared += int(lines)
        rewards.append(game.rewards[0])
    assert cleared >= 10
    while not game.terminals[0]:
        game.step(6)
    assert game.rewards[0] <= -1 + 8
    log = envs.log()
    assert log["lines"] >= cleared and log["perf"] == pytest.approx(log["lines"] / 150)
    assert log["score"] > 100 * cleared


# 2048


def slid(line):
    tiles, out = [t for t in line if t], []
    gained = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tiles.pop(0)
            tile += 1
            gained += tile
        out.append(tile)
    return out + [0] * (len(line) - len(out)), gained


def compared(board):
    """(72,): of each two neighbours, side by side and then one above the other: equal
    tiles, more than, less than."""
    ones = np.concatenate([board[:, :-1].ravel(), board[:-1].ravel()])
    others = np.concatenate([board[:, 1:].ravel(), board[1:].ravel()])
    return np.stack([(ones == others) & (ones > 0), ones > others, ones < others],
                    axis=1).ravel().astype(int)


def test_g2048_follows_the_rules():
    vector, rng = Vector("g2048", 8), np.random.default_rng(5)
    games = fours = tiles = 0
    for _ in range(1500):
        cells, pairs = np.split(vector.observations.copy(), [16 * 18], axis=1)
        boards = cells.reshape(8, 4, 4, 18).argmax(axis=-1)
        assert (cells.reshape(8, 16, 18).sum(axis=2) == 1).all()
        masks = vector.masks.copy()
        vector.random_actions(rng)
        actions = vector.actions[:, 0].copy()
        vector.step()
        after = vector.observations[:, : 16 * 18].reshape(8, 4, 4, 18).argmax(axis=-1)
        for i in range(8):
            results = []
            for action in range(4):
                board = boards[i].T if action < 2 else boards[i]
                board = board[:, ::-1] if action % 2 else board
                lines = [slid(row.tolist()) for row in board]
                moved = np.array([line for line, _ in lines])
                moved = moved[:, ::-1] if action % 2 else moved
                results.append((moved.T if action < 2 else moved, sum(gain for _, gain in lines)))
            legal = [not np.array_equal(board, boards[i]) for board, _ in results]
            assert masks[i].tolist() == legal
            leads = zip([board for board, _ in results], legal, strict=True)
            seen = [compared(board) * fair for board, fair in ((boards[i], True), *leads)]
            assert np.array_equal(pairs[i], np.concatenate(seen))
            wanted, gained = results[actions[i]]
            np.testing.assert_allclose(vector.rewards[i], gained / 11, rtol=1e-5)
            if vector.terminals[i]:
                games += 1
                assert legal[actions[i]] and (after[i] > 0).sum() == 2
                continue
            if not legal[actions[i]]:
                assert np.array_equal(after[i], boards[i])
                continue
            new = np.argwhere(after[i] != wanted)
            assert (len(new) == 1 and wanted[tuple(new[0])] == 0
                    and after[i][tuple(new[0])] in (1, 2))
            tiles, fours = tiles + 1, fours + (after[i][tuple(new[0])] == 2)
    assert games > 30 and 0.07 < fours / tiles < 0.13
    log = vector.envs.log()
    assert log["n"] == games and 300 < log["score"] < 3000 and 30 < log["max_tile"] < 300
