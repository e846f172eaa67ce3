"""The rules of the environments in C, as a player states them. What is written byte by byte is
held by test_ocean_golden.py; nmmo3 has a file of its own."""

import time

import gymnasium
import numpy as np
import ocean_players as players
import pytest
from ocean_vector import Vector

import ocean


def play(name, options, player, steps, num_envs=32, seed=0):
    """The log of a player's games."""
    vector, rng = Vector(name, num_envs, options, seed=seed), np.random.default_rng(1)
    for _ in range(steps):
        vector.step(player(vector, rng))
    return vector.envs.log()


# Who plays well wins, who does not does not: (name, settings, player, steps, {field: (least, most)}).
MOBA = {"demo": True, "frameskip": 8}
SKILL = [
    ("acrobot", {}, players.kick, 600, {"score": (-120, -60)}),
    ("asteroids", {}, players.shoot, 3000, {"score": (5000, 60000), "waves": (2, 30)}),
    ("bandit", {"good_arm": 0}, players.stand_still, 50, {"perf": (1, 1), "score": (0.87, 0.93)}),
    ("bandit", {"good_arm": 1}, players.stand_still, 50, {"perf": (0, 0), "score": (0.07, 0.13)}),
    ("boids", {"continuous": True, "num_agents": 32, "width": 500.0, "height": 500.0,
               "max_steps": 400}, players.steer, 801, {"score": (0.6, 1), "alignment": (0.8, 1)}),
    ("boids", {"continuous": True, "max_steps": 200}, players.at_random, 401, {"score": (-1, 0.15)}),
    ("breakout", {"continuous": True}, players.follow_ball, 6000,
     {"score": (700, 864), "perf": (0.8, 1), "episode_length": (1000, 6000)}),
    ("breakout", {}, players.stand_still, 1500, {"score": (0, 60), "episode_length": (100, 1500)}),
    ("cartpole", {}, players.balance, 500, {"perf": (1, 1), "score": (500, 500), "n": (32, 32)}),
    ("connect4", {"depth": 0}, players.at_random, 200, {"perf": (0.35, 0.65)}),
    ("connect4", {"depth": 4}, players.at_random, 60, {"perf": (0, 0.08)}),
    ("continuous", {}, players.go_there, 80, {"perf": (1, 1), "episode_length": (1, 20)}),
    ("cube", {"scramble_max": 1}, players.at_random, 100, {"perf": (0.06, 0.25), "scramble": (1, 1)}),
    ("double_pendulum", {"max_steps": 300}, players.regulate, 301, {"perf": (1, 1)}),
    ("drone", {}, players.pilot, 510, {"perf": (0.5, 1), "crashed": (0, 0.05)}),
    ("drone", {"num_agents": 1}, players.stand_still, 200, {"crashed": (1, 1), "perf": (0, 0.1)}),
    ("drone", {"race": True, "num_agents": 1, "ring_radius": 1.0, "max_steps": 1000}, players.pilot,
     1001, {"score": (2, 10), "perf": (0.2, 1)}),
    ("enduro", {"day": 60.0, "first_day": 30}, players.drive, 910, {"score": (25, 400)}),
    ("enduro", {"day": 12.0}, players.stand_still, 200, {"score": (0, 0), "days": (0, 0)}),
    ("freeway", {"level": 1, "hard": True}, players.look_out, 2040, {"score": (7, 45), "hits": (0, 25)}),
    ("freeway", {"level": 1, "hard": True}, players.go_up, 2040, {"score": (0, 6), "hits": (25, 99)}),
    ("g2048", {}, players.pile_up, 1000, {"score": (1500, 9000), "max_tile": (100, 600)}),
    ("g2048", {}, players.at_random, 600, {"score": (300, 2000), "max_tile": (30, 200)}),
    ("go", {"skill": 1.0}, players.at_random, 150, {"score": (-50, -10), "perf": (0, 0.05)}),
    ("lander", {}, players.land, 1000, {"perf": (0.8, 1), "score": (150, 320)}),
    ("lander", {"wind": True, "wind_power": 1.0, "turbulence_power": 0.3}, players.land, 1000,
     {"perf": (0.8, 1), "score": (150, 320)}),
    ("lander", {}, players.at_random, 300, {"perf": (0, 0.05), "score": (-400, -50)}),
    ("masked", {}, players.best_legal, 32, {"perf": (1, 1), "illegal": (0, 0), "n": (32, 32)}),
    ("maze", {"size": 2}, players.follow_marks, 100, {"perf": (1, 1)}),
    ("maze", {"size": 8, "vision": 1}, players.follow_marks, 1100, {"perf": (1, 1)}),
    ("maze", {"size": 6, "vision": 12, "loops": 0.2}, players.shortest_way, 100,
     {"perf": (1, 1), "score": (1, 1)}),
    ("minesweeper", {"mines": 8}, players.deduce, 100, {"perf": (0.5, 1), "score": (0.7, 1)}),
    ("minesweeper", {}, players.at_random, 60, {"perf": (0, 0.1)}),
    ("moba", {"frameskip": 4, "max_ticks": 2000}, players.attack, 700,
     {"score": (-1, -0.4), "perf": (0, 0.3), "kills": (0, 10), "deaths": (10, 99)}),
    ("mountaincar", {}, players.swing, 250, {"score": (-170, -80), "perf": (0.15, 1)}),
    ("mountaincar", {"continuous": True}, players.swing, 250, {"score": (85, 100)}),
    ("password", {}, players.at_random, 500, {"perf": (0.01, 0.06)}),
    ("pong", {"continuous": True, "max_score": 5, "frameskip": 4}, players.follow_pong, 4000,
     {"perf": (0.6, 1), "score": (1, 5)}),
    ("pong", {"continuous": True, "max_score": 5}, players.stand_still, 1500, {"perf": (0, 0.3)}),
    ("snake", {}, players.eat, 400, {"score": (15, 60)}),
    ("snake", {}, players.at_random, 200, {"score": (1, 4)}),
    ("spaces", {}, players.answer, 10, {"perf": (1, 1), "image": (1, 1), "category": (1, 1)}),
    ("squared", {}, players.walk_to_target, 50, {"perf": (1, 1), "score": (1, 1)}),
    ("stochastic", {}, players.mostly_zero, 50, {"perf": (0.85, 1)}),
    ("stochastic", {}, players.stand_still, 50, {"perf": (0.6666, 0.6667)}),
    ("target", {}, players.chase, 1024, {"perf": (0.3, 1), "score": (1, 9)}),
    ("target", {}, players.stand_still, 1024, {"perf": (0, 0.05)}),
    ("tetris", {"placements": True, "lines": 40}, players.place, 150, {"perf": (1, 1), "lines": (40, 43)}),
    ("trash_pickup", {}, players.collect, 300, {"score": (30, 40)}),
    ("trash_pickup", {}, players.at_random, 300, {"score": (0, 4)}),
]


@pytest.mark.parametrize(("name", "options", "player", "steps", "bounds"), SKILL,
                         ids=[f"{row[0]}-{row[2].__name__}" for row in SKILL])
def test_skill_decides(name, options, player, steps, bounds):
    agents = ocean.load(name).create(1, settings=options).num_agents
    log = play(name, options, player, steps, 32 if agents == 1 else 2)
    for field, (least, most) in bounds.items():
        assert least - 1e-6 <= log[field] <= most + 1e-6, log


def test_all_environments_have_a_rule():
    tested = {row[0] for row in SKILL} | {"memory", "multiagent", "nmmo3", "pendulum", "performance"}
    assert tested == set(ocean.names())


# Beside Gymnasium


def angle(cosine, sine):
    return np.arctan2(sine, cosine)


# name, Gymnasium's, settings, state of an observation, its action, steps, tolerance, least ends
PEERS = [
    ("cartpole", "CartPole-v1", {}, np.array, lambda a: int(a[0]), 60, 1e-5, 50),
    ("pendulum", "Pendulum-v1", {}, lambda o: np.array([angle(o[0], o[1]), o[2]]),
     lambda a: np.clip(a, -1, 1) * 2, 60, 2e-5, 0),
    ("acrobot", "Acrobot-v1", {},
     lambda o: np.array([angle(o[0], o[1]), angle(o[2], o[3]), o[4], o[5]]),
     lambda a: int(a[0]), 150, 5e-4, 0),
    ("mountaincar", "MountainCar-v0", {}, np.array, lambda a: int(a[0]), 220, 1e-6, 0),
    ("mountaincar", "MountainCarContinuous-v0", {"continuous": True}, np.array,
     lambda a: np.clip(a, -1, 1), 60, 1e-6, 0),
]


@pytest.mark.parametrize(("name", "peer", "options", "state", "action", "steps", "atol", "ends"), PEERS)
def test_a_peer_of_gymnasium_is_followed(name, peer, options, state, action, steps, atol, ends):
    """From the same states the same observations, rewards and ends."""
    vector, reference = Vector(name, 32, options), gymnasium.make(peer).unwrapped
    reference.reset(seed=0)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(steps):
        before = vector.observations.astype(np.float64)
        vector.random_actions(rng)
        vector.step()
        for i in range(32):
            reference.state, reference.steps_beyond_terminated = state(before[i]), None
            expected, reward, terminated, _, _ = reference.step(action(vector.actions[i]))
            # Float32 may decide differently within a rounding error of cartpole's limits.
            if name == "cartpole" and min(abs(abs(expected[0]) - 2.4),
                                          abs(abs(expected[2]) - np.radians(12))) < 1e-6:
                continue
            assert vector.terminals[i] == terminated
            np.testing.assert_allclose(vector.rewards[i], reward, atol=atol)
            ended += terminated
            if not terminated and not vector.truncations[i]:
                np.testing.assert_allclose(vector.observations[i], expected, rtol=1e-5, atol=atol)
    assert ended >= ends


def test_discrete_torques_of_pendulum():
    discrete, twin = Vector("pendulum", 5, {"continuous": False}), Vector("pendulum", 5)
    discrete.step([0, 1, 2, 3, 4])
    twin.step([-1, -0.5, 0, 0.5, 1])
    assert np.array_equal(discrete.observations, twin.observations)


@pytest.mark.parametrize(("name", "options", "limit", "player"), [
    ("cartpole", {}, 500, players.balance),
    ("breakout", {"max_steps": 20, "paddle_width": 576.0}, 20, players.stand_still),
    ("mountaincar", {"max_steps": 9}, 9, players.stand_still),
])
def test_a_limit_truncates_with_the_last_observation(name, options, limit, player):
    """A twin without the limit sees what those that are cut would have seen."""
    vector = Vector(name, 8, options)
    twin = Vector(name, 8, {**options, "max_steps": 2 * limit})
    for t in range(limit):
        action = player(vector, None)
        vector.step(action)
        twin.step(action)
        assert not vector.terminals.any() and (vector.truncations == (t == limit - 1)).all()
    assert np.array_equal(vector.final_observations, twin.observations)
    assert not np.array_equal(vector.observations, twin.observations)
    assert vector.envs.log()["episode_length"] == limit


# The sanity suite


@pytest.mark.parametrize(("length", "cues"), [(1, 2), (5, 2), (16, 6)])
def test_memory(length, cues):
    vector = Vector("memory", 500, {"length": length, "cues": cues})
    seen, rng = vector.observations.copy(), np.random.default_rng(0)
    assert (seen.sum(axis=1) == 1).all() and not seen[:, -1].any()
    assert (np.abs(seen[:, :-1].sum(axis=0) - 500 / cues) < 100).all()
    for t in range(1, length + 1):
        vector.step(rng.integers(0, cues, 500))
        assert not vector.observations[:, :-1].any() and not vector.rewards.any()
        assert (vector.observations[:, -1] == (t == length)).all() and not vector.terminals.any()
    right = np.arange(500) % 2 == 0
    vector.step((seen.argmax(axis=1) + ~right) % cues)
    assert np.array_equal(vector.rewards, np.where(right, 1, -1)) and vector.terminals.all()
    log = vector.envs.log()
    assert (log["perf"], log["episode_length"], log["n"]) == (0.5, length + 1, 500)


def test_multiagent_names():
    vector = Vector("multiagent", 3, {"num_agents": 3})
    assert np.array_equal(vector.observations, np.tile(np.eye(3), (3, 1)))
    vector.step([0, 1, 2, 2, 1, 0, 1, 2, 0])
    assert vector.rewards.tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 0] and vector.terminals.all()


def test_masked_ends_with_an_illegal_action():
    vector, rng = Vector("masked", 100), np.random.default_rng(3)
    assert (vector.masks.sum(axis=1) == 4).all() and vector.masks.mean(axis=0).min() > 0.4
    worth, masks = vector.observations.copy(), vector.masks == 1
    vector.random_actions(rng)
    rows, action = np.arange(100), vector.actions[:, 0].copy()
    vector.step()
    legal = masks[rows, action]
    assert np.array_equal(vector.rewards, np.where(legal, worth[rows, action], -1))
    assert np.array_equal(vector.terminals == 1, ~legal) and 0 < legal.sum() < 100


def test_masks_may_be_absent():
    envs = ocean.load("masked").create(2)
    arrays = [np.zeros((2, 8), np.float32), np.zeros((2, 1), np.int32), np.zeros(2, np.float32)]
    rows = ocean.rows(*arrays, np.zeros(2, np.uint8), np.zeros(2, np.uint8))
    envs.reset(rows)
    envs.step(rows)


def test_performance_takes_its_time():
    vector = Vector("performance", 10, {"delay": 500.0, "length": 3, "observation_size": 7})
    start = time.perf_counter()
    for t in range(1, 7):
        vector.step()
        assert (vector.observations == t % 3).all() and (vector.terminals == (t % 3 == 0)).all()
    assert time.perf_counter() - start >= 6 * 10 * 500e-6


# Ball games


class Breakout(Vector):
    """Breakout with its observation taken apart."""

    def __init__(self, num_envs, **options):
        super().__init__("breakout", num_envs, options, seed=9)

    def column(self, i, scale):
        return self.observations[:, i].astype(np.float64) * scale

    x = property(lambda self: self.column(2, 576))
    y = property(lambda self: self.column(3, 330))
    vy = property(lambda self: self.column(5, 512))
    speed = property(lambda self: np.hypot(self.column(4, 512), self.vy))
    score = property(lambda self: np.rint(self.column(7, 864)))
    reserve = property(lambda self: self.observations[:, 8].copy())
    bricks = property(lambda self: self.observations[:, 10:] == 1)

    def depth_in_bricks(self):
        """How deep the ball is inside any standing brick, in pixels."""
        rows, columns = np.divmod(np.arange(108), 18)
        left, top = columns * 32.0, 50 + rows * 12.0
        x, y = self.x[:, None], self.y[:, None]
        over_x = np.minimum(x + 32, left + 32) - np.maximum(x, left)
        over_y = np.minimum(y + 32, top + 12) - np.maximum(y, top)
        return np.where(self.bricks, np.minimum(over_x, over_y), 0).max()


def test_breakout_pays_for_bricks_and_speeds_up():
    """A whole game: points, speeds, the halved paddle and the second wall."""
    game, rng = Breakout(16, continuous=True), np.random.default_rng(7)
    points, speeds, walls, halved = np.repeat([7, 7, 4, 4, 1, 1], 18), set(), 0, 0
    for _ in range(4000):
        bricks, score, width, reserve = game.bricks, game.score, game.column(9, 62), game.reserve
        game.step(players.follow_ball(game, rng))
        same = (game.terminals == 0) & (reserve == game.reserve) & (game.observations[:, 6] == 1)
        refilled = same & (game.bricks & ~bricks).any(axis=1)
        fallen = ((bricks & ~game.bricks) * points).sum(axis=1)
        assert (game.rewards == fallen)[same & ~refilled].all()
        assert (game.score - score == game.rewards)[same].all()
        assert (score[refilled] == 432).all() and (game.vy[refilled] < 0).all()
        speeds |= set(np.rint(game.speed[same]).tolist())
        walls += refilled.sum()
        halved += (same & (game.column(9, 62) == 31) & (width == 62)).sum()
        assert (game.score + game.rewards)[game.terminals == 1].max(initial=0) <= 864
    assert speeds == {256, 320, 384, 448} and walls >= 10 and halved >= 10


@pytest.mark.parametrize(("frameskip", "speed", "paddle_speed"),
                         [(1, 32.0, 0.0), (4, 256.0, 620.0), (7, 511.5, 1e5), (60, 512.0, 620.0)])
def test_breakout_ball_stays_in_the_field_and_out_of_bricks(frameskip, speed, paddle_speed):
    """A paddle as wide as the field misses nothing, until the back wall halves it."""
    game = Breakout(16, frameskip=frameskip, ball_speed=speed, max_ball_speed=512.0,
                    paddle_speed=paddle_speed, paddle_width=576.0)
    rng = np.random.default_rng(0)
    for _ in range(300):
        game.random_actions(rng)
        game.step()
        assert game.depth_in_bricks() < 1e-2
        assert (game.x >= 0).all() and (game.x <= 544 + 1e-3).all() and (game.y >= 0).all()
        assert (game.y[game.observations[:, 9] == 1] <= 280 + 1e-2).all()


def test_a_long_step_of_breakout_misses_no_brick():
    """One step of 60 ticks breaks the bricks that 60 steps of one tick break, until rounding parts the
    two; where it does, it gives as many points as it takes."""
    number, options = 2000, {"ball_speed": 512.0, "max_ball_speed": 512.0, "paddle_width": 576.0}
    coarse, fine = (Vector("breakout", number, {**options, "frameskip": ticks}) for ticks in (60, 1))
    same, fewer, more, equal = np.ones(number, bool), 0, 0, 0
    for _ in range(16):
        coarse.step(0)
        total = np.zeros(number)
        for _ in range(60):
            fine.step(0)
            total += fine.rewards
            same &= fine.observations[:, 6] == 1
        same &= coarse.observations[:, 6] == 1
        fewer += (coarse.rewards < total)[same].sum()
        more += (coarse.rewards > total)[same].sum()
        same &= (coarse.observations[:, 10:] == fine.observations[:, 10:]).all(axis=1)
        equal += same.sum()
    assert equal > 4000 and more > 200 and fewer < 1.5 * more


def test_pong_points_and_strikes():
    vector, rng = Vector("pong", 64, {"frameskip": 1}), np.random.default_rng(1)
    points = strikes = 0
    for _ in range(900):
        before = vector.observations.astype(np.float64)
        vector.random_actions(rng)
        vector.step()
        after, point = vector.observations.astype(np.float64), vector.rewards != 0
        gained = np.rint((after - before)[point, 6:8] * 21)
        assert np.array_equal(gained[:, 0] - gained[:, 1], vector.rewards[point])
        # A new ball flies from the middle towards who lost the point.
        assert np.array_equal(np.sign(after[point, 4]), -vector.rewards[point])
        np.testing.assert_allclose(after[point, 2], 0, atol=1e-5)
        speed, new_speed = np.hypot(*before[:, 4:6].T) * 14, np.hypot(*after[:, 4:6].T) * 14
        turned = np.sign(after[:, 4]) != np.sign(before[:, 4])
        np.testing.assert_allclose(new_speed[~point & ~turned], speed[~point & ~turned], atol=1e-4)
        struck = ~point & turned
        np.testing.assert_allclose(new_speed[struck], np.minimum(speed[struck] + 0.5, 14), atol=1e-4)
        steep = np.abs(after[struck, 5]) / np.abs(after[struck, 4])
        assert (steep <= np.tan(np.pi / 3) * 1.001).all()
        assert (np.abs(after[:, :6]) <= 1).all()
        points, strikes = points + point.sum(), strikes + struck.sum()
    assert points > 200 and strikes > 200


# Control


def energy(o, m=4.2, cart=10.47, length=0.6, g=9.81):
    """Of double_pendulum's cart and two rods, from an observation."""
    a1 = angle(o[:, 3], o[:, 1])
    angles, spins = (a1, a1 + angle(o[:, 4], o[:, 2])), (o[:, 6], o[:, 6] + o[:, 7])
    vx, vy, height, total = o[:, 5], 0.0, 0.0, cart / 2 * o[:, 5] ** 2
    for a, w in zip(angles, spins, strict=True):
        x, y = length / 2 * np.cos(a) * w, -length / 2 * np.sin(a) * w
        total = total + m / 2 * ((vx + x) ** 2 + (vy + y) ** 2) + m * length**2 / 24 * w**2
        total = total + m * g * (height + length / 2 * np.cos(a))
        vx, vy, height = vx + 2 * x, vy + 2 * y, height + length * np.cos(a)
    return total


def test_double_pendulum_keeps_its_energy():
    vector = Vector("double_pendulum", 64, {"damping": 0.0, "tau": 0.02, "track": 5.0})
    start, alive = energy(vector.observations.astype(np.float64)), np.ones(64, bool)
    for _ in range(25):
        vector.step(np.zeros(64))
        alive &= vector.terminals == 0
        now = energy(vector.observations.astype(np.float64))
        np.testing.assert_allclose(now[alive], start[alive], rtol=2e-4)
    assert alive.sum() > 5


def test_lander_engines_and_feet():
    vector = Vector("lander", 8)
    o = vector.observations.copy()
    assert (o[:, 0] == 0).all() and not o[:, 4:].any()
    for action, ax, ay, turn in ((0, 0, -10, 0), (1, -2.4, -10, 6.7), (2, 0, 7.5, 0), (3, 2.4, -10, -6.7)):
        vector.envs.reset(vector.rows)
        o = vector.observations.copy()
        vector.step(np.full(8, action))
        delta = (vector.observations - o)[:, [2, 3, 5]] / 0.02 * [5, 7.5, 2.5]
        np.testing.assert_allclose(delta, np.tile([ax, ay, turn], (8, 1)), atol=5e-3)
    vector, heights = Vector("lander", 32, {"start_speed": 0.0}), []
    for _ in range(500):
        vector.step(players.land(vector, None))
        standing = (vector.observations[:, 6:] == 1).all(axis=1)
        heights.append(np.abs(vector.observations[standing, 1] * 20 / 3))
    assert np.concatenate(heights).max() < 0.25, "feet neither sink in nor hover"


HOVER = 2 / 2.25 - 1


def test_drone_hangs_and_falls():
    vector = Vector("drone", 4, {"num_agents": 1})
    o = vector.observations.copy()
    for _ in range(20):
        vector.step(np.full((4, 4), HOVER))
    np.testing.assert_allclose(vector.observations, o, atol=1e-4)
    vector = Vector("drone", 4, {"num_agents": 1, "motor_lag": 0.0, "drag": 0.0})
    vector.step(np.full((4, 4), -1))
    np.testing.assert_allclose(vector.observations[:, 14] * 10, -9.81 * 0.02, atol=1e-5)
    vector.step(np.full((4, 4), 1))
    np.testing.assert_allclose(vector.observations[:, 14] * 10, 9.81 * 0.02 * 0.25, atol=1e-5)


@pytest.mark.parametrize(("motors", "axis", "tilt"), [
    ([1, 1, -1, -1], 0, [0, 1, 0]),  # the left ones: it rolls to the right, "up" leans to its left
    ([-1, 1, 1, -1], 1, [-1, 0, 0]),  # the back ones: the nose goes down
    ([1, -1, 1, -1], 2, [0, 0, 0]),  # one diagonal: it turns
])
def test_drone_turns_about_each_axis(motors, axis, tilt):
    vector = Vector("drone", 1, {"num_agents": 1, "motor_lag": 0.0})
    for _ in range(2):
        vector.step(HOVER + 0.02 * np.array(motors))
    spin, up = vector.observations[0, 15:18], vector.observations[0, 18:21]
    assert spin[axis] > 1e-4 and np.abs(np.delete(spin, axis)).max() < 1e-6
    assert np.array_equal(np.sign(np.where(np.abs(up[:2]) < 1e-5, 0, up[:2])), tilt[:2])


# Roads and space


def test_freeway_hits_and_crossings():
    for level in range(8):
        hard = level % 2 == 1
        vector = Vector("freeway", 16, {"level": level, "seconds": 40.0, "hard": hard}, seed=4)
        crossed = hits = 0
        for t in range(600):
            before = vector.observations.astype(np.float64)
            vector.step(np.ones(16))
            after, over = vector.observations.astype(np.float64), vector.terminals == 1
            assert (over == (t == 599)).all()
            up, arrived = (after - before)[:, 0] * 11, vector.rewards == 1
            hit = (after[:, 1] == 1) & (before[:, 1] == 0)
            walks = ~arrived & ~over & (before[:, 1] == 0) & (after[:, 1] == 0)
            np.testing.assert_allclose(up[walks], 3.6 * 4 / 60, atol=1e-4)
            assert (after[hit, 0] == 0).all() if hard else (up[hit] < 0).all()
            assert (after[arrived & ~hit, 0] * 11 < 0.25).all()
            crossed, hits = crossed + arrived.sum(), hits + hit.sum()
        log = vector.envs.log()
        assert log["score"] * 16 == crossed and hits > 10
        assert log["perf"] == pytest.approx(log["score"] / (40 * 3.6 / 11), rel=1e-5)


def test_enduro_days_bends_and_edges():
    """Snow halves the grip; night and fog shorten the sight. Hands off the wheel, a bend to the right
    carries the car to the left, and the edge slows it."""
    options = {"day": 12.0, "tau": 0.1, "first_day": 1, "later_days": 1, "days": 2}
    vector, grip, sight = Vector("enduro", 8, options, seed=6), set(), set()
    for _ in range(300):
        vector.step(players.hold_gas(vector, None))
        grip |= set(np.unique(vector.observations[:, 7]).tolist())
        sight |= set(np.unique(np.rint(vector.observations[:, 8] * 240)).tolist())
    assert grip == {0.5, 1.0} and sight == {60, 90, 240} and vector.envs.log()["days"] > 0
    vector, slowed = Vector("enduro", 64, seed=7), 0
    for _ in range(300):
        before = vector.observations.astype(np.float64)
        vector.step(players.hold_gas(vector, None))
        after = vector.observations.astype(np.float64)
        drift = -0.0666667 * 0.9 * before[:, 2] * after[:, 1] ** 2
        inside = (np.abs(after[:, 0]) < 1) & (after[:, 1] >= before[:, 1])  # no crash
        np.testing.assert_allclose((after - before)[inside, 0], drift[inside], atol=2e-3)
        edge = ~inside & (np.abs(before[:, 0]) == 1)
        slowed += (after[edge, 1] < before[edge, 1]).sum()
    assert slowed > 50


def test_asteroids():
    """A rock pays by its size and breaks into two; thrust, turns and hyperspace."""
    game = Vector("asteroids", 32, {"saucer_seconds": 1e6, "reward_loss": 0.0}, seed=8)

    def sizes():
        rocks = np.rint(3 * game.observations[:, 19::5]).astype(int)
        return np.stack([(rocks == size).sum(axis=1) for size in range(4)], axis=1)

    assert (sizes()[:, 3] == 4).all() and (sizes()[:, :3] == [6, 0, 0]).all()
    seen, splits = set(), 0
    for _ in range(1200):
        before, there = sizes(), game.observations[:, 2] == 1
        game.step(players.shoot(game, None))
        points = np.rint(game.rewards * 100).astype(int)
        seen |= set(points.tolist())
        one = (points == 20) & (before[:, 0] >= 2) & (game.terminals == 0) & there
        assert ((sizes() - before)[one, 2:] == [2, -1]).all()
        splits += one.sum()
    assert {0, 20, 50, 100} <= seen and splits > 50
    game = Vector("asteroids", 600, {"saucer_seconds": 1e6}, seed=8)
    game.step(np.tile([0, 1, 0], (600, 1)))
    drag = 1 - 0.4 / 60
    expected = 0.1 * (1 + drag + drag**2 + drag**3) / 10
    np.testing.assert_allclose(game.observations[:, :2], np.tile([expected, 0], (600, 1)), atol=1e-6)
    game.step(np.tile([0, 2, 0], (600, 1)))
    assert 50 < (game.observations[:, 2] == 0).sum() < 250  # one in six breaks, and some in a rock


# Boards


SHAPES = {"I": ["1111"], "O": ["11", "11"], "T": ["010", "111"], "S": ["011", "110"],
          "Z": ["110", "011"], "J": ["100", "111"], "L": ["001", "111"]}


class Tetris(Vector):
    def __init__(self, seed=9, **options):
        super().__init__("tetris", 1, options, seed=seed)
        self.height = options.get("height", 20)

    @property
    def parts(self):
        lies, falls, rest = np.split(self.observations[0], [10 * self.height, -51])
        return lies.reshape(-1, 10), falls.reshape(-1, 10), rest[:49].reshape(7, 7), rest[49:]


def shape_of(cells):
    rows, columns = np.nonzero(cells)
    return cells[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def holes_and_bumps(lies):
    tops = np.where(lies.any(axis=0), len(lies) - lies.argmax(axis=0), 0)
    return (np.cumsum(lies, axis=0).astype(bool) & (lies == 0)).sum(), np.abs(np.diff(tops)).sum()


def test_tetris_gravity_and_lock():
    game, rows = Tetris(ticks=1), []
    for _ in range(180):
        game.step(0)
        rows.append(np.nonzero(game.parts[1].any(axis=1))[0].max(initial=-1))
    assert rows[-1] - rows[60] == 2, "one row a second on the first level"
    game = Tetris(ticks=1, first_level=20)
    locked = next(t for t in range(1000) if game.step(0).observations[0, :200].any())
    assert 28 <= locked <= 33, "down at once, and half a second until it locks"
    game = Tetris(ticks=1, first_level=20)
    locked = next(t for t in range(2000) if game.step(1 + t // 3 % 2).observations[0, :200].any())
    assert locked > 40, "moving puts the lock off"
    for cycle in ((3, 4, 5), (3, 5, 4, 5), (3, 4)):  # but not for ever
        vector = Vector("tetris", 8, {"max_steps": 0}, seed=1)
        assert any(vector.step(cycle[t % len(cycle)]).terminals.any() for t in range(4000))


def test_tetris_placements_and_rewards():
    """An action brings the leftmost cell to its column, or as far as the wall lets it, and drops the
    piece; what it leads to was seen before, and is paid."""
    options = {"reward_piece": 0.5, "reward_hole": -0.25, "reward_bump": -0.0625}
    game, rng, seen, lines = Tetris(placements=True, seed=16, height=40, **options), np.random.default_rng(2), set(), 0
    for _ in range(1500):
        lies, outcomes, queue = (part.copy() for part in game.parts[:3])
        good = players.place(game, np.random.default_rng(0))[0]
        action = int(good if rng.random() < 0.5 else rng.integers(40))
        game.step(action)
        if game.terminals[0] or action == 40 or lies[:12].any():
            continue
        gone, holes, bumps, below = outcomes.reshape(4, 4, 10)[:, action // 10, action % 10]
        before, after = holes_and_bumps(lies), holes_and_bumps(game.parts[0])
        assert (holes, bumps) == (after[0] - before[0], after[1] - before[1])
        paid = (0, 1, 3, 5, 8)[gone] + 0.5 - 0.25 * holes - 0.0625 * bumps
        assert game.rewards[0] == pytest.approx(paid, abs=1e-5)
        lines += gone
        if gone:
            continue  # what lies has moved
        new = game.parts[0].astype(int) - lies
        rows, columns = np.nonzero(new)
        piece = np.array([list(map(int, row)) for row in SHAPES["IOTSZJL"[queue[0].argmax()]]])
        turned = np.rot90(piece, -(action // 10))
        assert np.array_equal(shape_of(new), turned)
        assert columns.min() == min(action % 10, 10 - turned.shape[1]) and below == 39 - rows.max()
        assert (rows == 39).any() or lies[np.minimum(rows + 1, 39), columns].any()
        seen.add(action)
    assert len(seen) > 35 and lines > 10


@pytest.mark.parametrize("n", [5, 9])
def test_go(n):
    """No chain is without a liberty, those with one are in atari, captured stones go, and a pass on
    an empty board is counted by the komi."""
    vector, rng = Vector("go", 8, {"size": n, "komi": 0.5}, seed=n), np.random.default_rng(n)
    captures = 0
    for _ in range(150):
        planes = vector.observations.reshape(8, 7, n, n).swapaxes(0, 1).astype(int)
        own, other, own_atari, other_atari, legal, last, _ = planes
        free = (own + other) == 0
        for stones, atari in ((own, own_atari), (other, other_atari)):
            reach = free
            for _ in range(n * n):
                padded = np.pad(reach, ((0, 0), (1, 1), (1, 1)))
                near = padded[:, :-2, 1:-1] | padded[:, 2:, 1:-1] | padded[:, 1:-1, :-2] | padded[:, 1:-1, 2:]
                reach = free | (near & (stones == 1))
            assert (reach | (stones == 0)).all(), "stones without a liberty"
            assert (stones >= atari).all()
        assert (legal <= free).all() and np.array_equal(vector.masks[:, :-1].reshape(8, n, n), legal)
        assert vector.masks[:, -1].all() and (last <= other).all()
        before = own.sum(axis=(1, 2)) + 1
        vector.step(np.where(vector.masks == 1, rng.random(vector.masks.shape), -1).argmax(axis=1))
        now = vector.observations.reshape(8, 7, n, n)[:, 0].sum(axis=(1, 2))
        captures += (now < before)[vector.terminals == 0].sum()
    assert captures > 20


@pytest.mark.parametrize("size", [2, 3])
def test_cube_turns_are_those_of_the_group(size):
    vector = Vector("cube", 1, {"size": size, "scramble_min": 50, "scramble_max": 50, "max_steps": 10**6})
    stickers = 6 * size * size

    def apply(actions):
        for action in actions:
            vector.step(action)
        return vector.observations[0, : stickers * 6].reshape(stickers, 6).argmax(axis=1)

    start = apply([])
    assert (np.bincount(start, minlength=6) == size * size).all()
    for side in range(6):
        assert not np.array_equal(apply([2 * side]), start)
        assert np.array_equal(apply([2 * side + 1]), start)
        assert np.array_equal(apply([2 * side] * 4), start)
        moved = apply([2 * side]) != start
        assert moved.sum() <= (20 if size == 3 else 12)
        apply([2 * side + 1])
    # A commutator of neighbours has order 6, (right, up) one of 105; opposite sides commute.
    up, right, down = 0, 2, 6
    assert np.array_equal(apply([right, up, right + 1, up + 1] * 6), start)
    order = next(k for k in range(1, 200) if np.array_equal(apply([right, up]), start))
    assert order == (105 if size == 3 else 15)
    one = apply([up, down])
    apply([down + 1, up + 1])
    assert np.array_equal(apply([down, up]), one)
    pairs = vector.observations.shape[1] - 6 * stickers
    assert pairs == (480 if size == 3 else 156)


# Many agents


# Moba

DEAD, LEVEL, XP = 25, 11, 12


def test_moba_teams_are_mirror_images():
    """Without chance in the damage two teams that act alike see the same, to the last bit, and earn
    as much."""
    game = Vector("moba", 2, {"self_play": True, "spread": 0.0, "max_ticks": 1500, "tower_health": 60.0,
                              "creep_speed": 0.6}, seed=11)
    rng, deaths, fallen = np.random.default_rng(11), 0, 0
    for _ in range(2000):
        actions = players.attack(game, rng).reshape(2, 2, 5, 3)
        actions[:, 1] = actions[:, 0]
        game.step(actions)
        sides = game.observations.reshape(2, 2, 5, -1)
        assert np.array_equal(sides[:, 0], sides[:, 1])
        assert np.array_equal(*game.masks.reshape(2, 2, 5, -1).swapaxes(0, 1))
        rewards = game.rewards.reshape(2, 2, 5)
        np.testing.assert_allclose(rewards[:, 0], rewards[:, 1], atol=1e-6)
        deaths = max(deaths, sides[..., DEAD].sum())
        fallen = max(fallen, (sides[..., 38:48:4] < 1).sum())
    assert deaths > 2 and fallen > 2


def test_moba_illegal_acts_do_nothing():
    game = Vector("moba", 4, {"self_play": True, "tower_damage": 1.0}, seed=11)
    rng, acted = np.random.default_rng(11), np.zeros(5, int)
    for t in range(400):
        players.attack(game, rng)
        if t % 5 == 0:
            saved, actions, mask = game.envs.save(), game.actions.copy(), game.masks[:, -5:] == 1
            acts = rng.integers(1, 5, 40)
            legal = mask[np.arange(40), acts]
            for act in (np.where(legal, 0, acts), 0 * acts):
                game.envs.load(saved)
                game.step(np.column_stack([actions[:, :2], act]))
                outputs = [array.copy() for array in game.outputs()]
                if act.any():
                    illegal = outputs
            assert all(map(np.array_equal, illegal, outputs))
            acted += np.bincount(acts[legal], minlength=5)
            game.envs.load(saved)
            game.actions[:] = actions
        game.step()
    assert (acted[1:] > 0).all()


def test_moba_frameskip_is_as_many_ticks():
    fast, slow = (Vector("moba", 3, {"frameskip": k, "max_ticks": 500}, seed=11) for k in (5, 1))
    rng = np.random.default_rng(11)
    for _ in range(100):
        fast.random_actions(rng)
        slow.actions[:] = fast.actions
        fast.step()
        earned, over = np.zeros(15), np.zeros(15, bool)
        for _ in range(5):
            slow.step()
            earned += slow.rewards
            over |= slow.terminals + slow.truncations > 0
        if over.any():
            return  # from here on they are not in step
        assert np.array_equal(fast.observations, slow.observations)
        np.testing.assert_allclose(fast.rewards, earned, atol=1e-5)
    raise AssertionError("no game ended")
