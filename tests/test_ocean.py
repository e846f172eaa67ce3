"""The environments in C: loading and settings, the rules of the first five, headers
of one's own, drawing."""

import ctypes
import gc
import os
import stat
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ocean_vector import ROOT, Vector, run_python

import ocean
from vector import Native

NAMES = ["breakout", "cartpole", "memory", "squared", "target"]


# Loading and settings


def test_names_and_defaults():
    assert set(NAMES) <= set(ocean.names())
    assert ocean.load("squared").settings == {"distance": 5}
    breakout = ocean.load("breakout")
    assert breakout is ocean.load("breakout") is ocean.Breakout
    assert breakout.settings["frameskip"] == 4 and breakout.settings["continuous"] is False
    for name in NAMES:
        assert {"perf", "score", "episode_return", "episode_length", "n"} <= set(ocean.load(name).log_fields)


def test_unknown_environment_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean breakout"):
        ocean.load("breakot")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("breakout", {"framskip": 4}, ValueError, "did you mean frameskip"),
        ("breakout", {"frameskip": 4.5}, TypeError, "frameskip must be an integer"),
        ("breakout", {"frameskip": "4"}, TypeError, "frameskip must be an integer"),
        ("breakout", {"continuous": 2}, TypeError, "continuous must be true or false"),
        ("breakout", {"frameskip": 0}, ValueError, "frameskip must lie within"),
        ("breakout", {"max_ball_speed": 2000.0}, ValueError, "at most 512"),
        ("breakout", {"ball_speed": float("nan")}, TypeError, "ball_speed must be a finite number"),
        ("breakout", {"ball_speed": -1e300}, TypeError,
         "ball_speed must be a finite number of 32 bits"),
        ("cartpole", {"max_steps": 0}, ValueError, "max_steps"),
        ("memory", {"cues": 1}, ValueError, "cues must lie within"),
        ("squared", {"distance": 2**31}, TypeError, "32 bits"),
        ("target", {"num_agents": 65}, ValueError, "num_agents must lie within"),
    ],
)
def test_wrong_settings(name, options, error, message):
    with pytest.raises(error, match=message):
        ocean.load(name).create(2, settings=options)


def test_settings_for_each_environment():
    library = ocean.load("cartpole")
    vector = Vector("cartpole", 2, [{"max_steps": 2}, {"max_steps": 3}])
    assert [vector.step([0, 1]).truncations.tolist() for _ in range(3)] == [[0, 0], [1, 0], [0, 1]]
    with pytest.raises(ValueError, match="same spaces"):
        library.create(2, settings=[{}, {"continuous": True}])
    with pytest.raises(ValueError, match="list of 1"):
        library.create(2, settings=[{}])
    # Agents may differ in number, as long as each of them sees the same.
    options = [{"num_agents": 2, "num_goals": 2}, {"num_agents": 1, "num_goals": 3}]
    mixed = ocean.load("target").create(2, settings=options)
    assert mixed.agent_offsets.tolist() == [0, 2, 3] and mixed.observation_shape == (9,)


def test_spaces():
    def spaces(name, **options):
        envs = ocean.load(name).create(1, settings=options)
        return envs.single_observation_space, envs.single_action_space

    box, discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete
    assert spaces("squared", distance=2) == (box(0, 2, (5, 5), np.uint8), discrete(5))
    assert spaces("breakout") == (box(-1, 1, (118,), np.float32), discrete(3))
    assert spaces("breakout", continuous=1)[1] == box(-1, 1, (1,), np.float32)
    assert spaces("cartpole") == (box(-np.inf, np.inf, (4,), np.float32), discrete(2))
    assert spaces("target")[1] == gymnasium.spaces.MultiDiscrete([9, 5])
    assert spaces("memory", cues=3) == (box(0, 1, (4,), np.float32), discrete(3))


def test_rows_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        ocean.rows(np.zeros((4, 4))[:, ::2], None, None, None, None)


def test_addresses_are_those_of_step_and_reset():
    by_name, by_address = Vector("breakout", 3), Vector("breakout", 3, seed=1)
    by_address.envs.load(Vector("breakout", 3).envs.save())
    library, envs = by_name.envs.library, by_address.envs
    signature = ctypes.CFUNCTYPE(None, ocean.POINTER, ocean.INT, ocean.INT, ocean.POINTER)
    for address, call in ((library.reset_address, by_name.envs.reset),
                          (library.step_address, by_name.envs.step)):
        call(by_name.rows)
        signature(address)(envs.address, 0, 3, by_address.rows.ctypes.data)
        assert np.array_equal(by_name.observations, by_address.observations)


def test_index_errors():
    vector = Vector("squared", 3)
    for span in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(IndexError):
            vector.envs.step(vector.rows, *span)


def test_closed_environments_cannot_be_used():
    envs = (vector := Vector("snake", 2)).envs
    saved = envs.save()
    envs.close()
    for call in (lambda: envs.step(vector.rows), envs.save, lambda: envs.load(saved),
                 envs.render, envs.log):
        with pytest.raises(RuntimeError, match="snake: these environments are closed"):
            call()


def test_forgotten_environments_are_freed(monkeypatch):
    gc.collect()  # those of other tests
    closed, free = [], ocean.load("snake").functions.ocean_close
    monkeypatch.setattr(ocean.load("snake").functions, "ocean_close",
                        lambda *arguments: closed.append(arguments[1:]) or free(*arguments))
    Native("snake", 2, num_buffers=1)
    with pytest.raises(ValueError, match="num_buffers can be 1, 3"):
        Native("snake", 3, num_buffers=2)
    gc.collect()
    assert closed == [(0, 2), (0, 3)]


# Squared


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(0, 2**32),
       st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_squared_rules(distance, seed, moves):
    vector = Vector("squared", 1, {"distance": distance}, seed=seed)
    side, tick, at = 2 * distance + 1, 0, None
    for move in [None, *moves]:
        grid = vector.observations[0]
        if at is None:  # a new episode
            assert np.argwhere(grid == 1).tolist() == [[distance, distance]]
            (target,) = np.argwhere(grid == 2).tolist()
            assert 0 in target or side - 1 in target
            at, tick = [distance, distance], 0
        else:
            assert (np.argwhere(grid == 1).tolist() == [at]
                    and np.argwhere(grid == 2).tolist() == [target])
        assert np.count_nonzero(grid) == 2
        if move is None:
            continue
        tick += 1
        step = {0: (0, 0), 1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}[move]
        at = [at[0] + step[0], at[1] + step[1]]
        outside = min(at) < 0 or max(at) >= side
        won = at == target
        over = outside or won or tick == 3 * distance
        vector.step(move)
        assert vector.rewards[0] == (1 if won else -1 if over else 0)
        assert (vector.terminals[0], vector.truncations[0]) == (over, 0)
        if over:
            log = vector.envs.log()
            assert log == {"perf": won, "score": 1 if won else -1,
                           "episode_return": 1 if won else -1,
                           "episode_length": tick, "n": 1}
            at = None


def test_squared_targets_cover_the_edge_evenly():
    vector = Vector("squared", 8000, {"distance": 2})
    counts = (vector.observations == 2).sum(axis=0)
    edge = np.ones((5, 5), bool)
    edge[1:-1, 1:-1] = False
    assert counts[~edge].sum() == 0 and counts[edge].min() > 400 and counts[edge].max() < 600


# Cartpole


def test_cartpole_follows_gymnasium():
    vector, reference = Vector("cartpole", 64), gymnasium.make("CartPole-v1").unwrapped
    reference.reset(seed=0)
    rng, ended = np.random.default_rng(4), 0
    assert np.abs(vector.observations).max() <= 0.05
    for _ in range(60):
        before = vector.observations.astype(np.float64)
        vector.random_actions(rng)
        vector.step()
        for i in range(64):
            reference.state, reference.steps_beyond_terminated = before[i], None
            expected, _, terminated, _, _ = reference.step(int(vector.actions[i, 0]))
            # Float32 may decide differently within a rounding error of the limit.
            near = min(abs(abs(expected[0]) - 2.4), abs(abs(expected[2]) - np.radians(12))) < 1e-6
            assert vector.terminals[i] == terminated or near
            ended += terminated
            if not terminated and not near:
                np.testing.assert_allclose(vector.observations[i], expected, rtol=1e-5, atol=1e-6)
    assert ended > 50 and (vector.rewards == 1).all()


def balance(vector):
    """A push towards where the pole falls: it stands for ever."""
    x, x_velocity, theta, theta_velocity = vector.observations.T
    return (theta + 0.3 * theta_velocity + 0.05 * x + 0.1 * x_velocity > 0).astype(np.int32)


def test_cartpole_truncates_at_500_with_the_final_observation():
    vector, twin = Vector("cartpole", 8), Vector("cartpole", 8, {"max_steps": 1000})
    for t in range(500):
        action = balance(vector)
        vector.step(action)
        twin.step(action)
        assert not vector.terminals.any()
        assert (vector.truncations == (t == 499)).all()
    # The twin has no limit: what it sees now is what the truncated ones would have seen.
    assert np.array_equal(vector.final_observations, twin.observations)
    assert np.abs(vector.observations).max() <= 0.05
    log = vector.envs.log()
    assert log == {"perf": 1, "score": 500, "episode_return": 500, "episode_length": 500, "n": 8}


# Memory


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(2, 6), st.integers(0, 2**32),
       st.randoms(use_true_random=False))
def test_memory_rules(length, cues, seed, random):
    vector = Vector("memory", 1, {"length": length, "cues": cues}, seed=seed)
    for _ in range(3):
        cue = int(vector.observations[0, :cues].argmax())
        assert vector.observations[0].tolist() == [float(i == cue) for i in range(cues)] + [0]
        for t in range(1, length + 1):
            vector.step(random.randrange(cues))
            assert vector.observations[0].tolist() == [0] * cues + [float(t == length)]
            assert vector.rewards[0] == vector.terminals[0] == vector.truncations[0] == 0
        answer = random.randrange(cues)
        vector.step(answer)
        assert vector.rewards[0] == (1 if answer == cue else -1) and vector.terminals[0] == 1
        log = vector.envs.log()
        assert (log["perf"], log["episode_length"], log["n"]) == (answer == cue, length + 1, 1)


def test_memory_cues_are_even():
    vector = Vector("memory", 4000)
    assert 1850 < vector.observations[:, 0].sum() < 2150


# Target


def test_target_rules():
    """Positions are recovered from the differences that are observed; rewards
    follow from distances."""
    radius, patience, agents, goals = 60.0, 40, 3, 2
    vector = Vector("target", 16, {"num_agents": agents, "num_goals": goals, "radius": radius,
                                   "patience": patience,
                                    "max_speed": 4.0})
    rng, idle = np.random.default_rng(5), np.zeros(48, int)
    moved_as_told, scored, respawned = [], 0, 0
    for _ in range(400):
        before = vector.observations.copy()
        vector.random_actions(rng)
        vector.step()
        hit, cut = vector.rewards == 1, vector.truncations == 1
        assert set(np.unique(vector.rewards)) <= {0, 1} and not vector.terminals.any()
        idle = np.where(hit, 0, idle + 1)
        assert np.array_equal(cut, idle >= patience)
        assert np.array_equal(vector.observations[:, -1], vector.rewards)
        idle[cut] = 0
        heading = vector.observations[:, -3:-1]
        np.testing.assert_allclose(np.hypot(*heading.T), 1, atol=1e-5)
        was, now, final = (seen[:, : 2 * goals].reshape(-1, goals, 2) * 1080
                           for seen in (before, vector.observations, vector.final_observations))
        assert (np.diff(np.hypot(*np.moveaxis(now, -1, 0))) >= -1e-3).all(), (
            "the nearest goal comes first")
        # Where no goal of the plane moved, an agent's motion shows in the middle of the goals:
        # speed along the heading.
        unmoved = ~hit.reshape(-1, agents).any(axis=1).repeat(agents)
        still = unmoved & ~cut
        delta, wanted = (was - now).mean(axis=1)[still], vector.actions[still, 1]
        assert (np.hypot(*delta.T) <= wanted + 1e-2).all()
        right = np.abs(delta - heading[still] * wanted[:, None]).max(axis=1) < 1e-2
        moved_as_told.append(right.mean())  # all but those that a wall stops
        # The final observation comes from before an agent was put elsewhere.
        assert (np.abs((final - was).mean(axis=1)[unmoved & cut]) <= 4.01).all()
        assert (np.hypot(now[still, 0, 0], now[still, 0, 1]) > radius - 1e-2).all()
        scored, respawned = scored + hit.sum(), respawned + cut.sum()
    assert scored > 20 and respawned > 50 and np.mean(moved_as_told) > 0.9
    log = vector.envs.log()
    assert log["n"] == 16 * 3 and log["episode_length"] == 128


def test_target_log_rises_with_skill():
    def play(policy):
        vector = Vector("target", 32)
        rng = np.random.default_rng(6)
        for _ in range(1024):
            vector.random_actions(rng)
            if policy == "greedy":
                goal = vector.observations[:, :2]
                cosine, sine = vector.observations[:, -3:-1].T
                angle = np.arctan2(cosine * goal[:, 1] - sine * goal[:, 0],
                                   cosine * goal[:, 0] + sine * goal[:, 1])
                vector.actions[:, 0] = np.clip(np.round(angle / 0.05), -4, 4) + 4
                vector.actions[:, 1] = np.where(np.abs(angle) < 0.6, 4, 1)
            elif policy == "still":
                vector.actions[:, 1] = 0
            vector.step()
        return vector.envs.log()

    still, random, greedy = play("still"), play("random"), play("greedy")
    assert still["perf"] < random["perf"] < 0.1 < 0.3 < greedy["perf"] < 1
    assert still["score"] < random["score"] < 0.4 < 1 < greedy["score"]


# Breakout

POINTS = np.repeat([7, 7, 4, 4, 1, 1], 18)
WIDTH, HEIGHT, BALL, PADDLE_Y = 576, 330, 32, 312


class Breakout(Vector):
    """Breakout with its observation taken apart, and a policy that follows the ball."""

    def __init__(self, num_envs=1, **options):
        super().__init__("breakout", num_envs, options, seed=9)
        self.paddle = options.get("paddle_width", 62.0)

    def column(self, i, scale):
        return self.observations[:, i].astype(np.float64) * scale

    paddle_x = property(lambda self: self.column(0, WIDTH))
    x = property(lambda self: self.column(2, WIDTH))
    y = property(lambda self: self.column(3, HEIGHT))
    vx = property(lambda self: self.column(4, 512))
    vy = property(lambda self: self.column(5, 512))
    speed = property(lambda self: np.hypot(self.vx, self.vy))
    in_play = property(lambda self: self.observations[:, 6] == 1)
    score = property(lambda self: np.rint(self.column(7, 864)))
    reserve = property(lambda self: np.rint(self.column(8, 5)))
    paddle_width = property(lambda self: self.column(9, self.paddle))
    bricks = property(lambda self: self.observations[:, 10:] == 1)

    def follow(self, aim=0.0):
        """Moves the middle of the paddle to the ball; aim, in paddle halves, is
        where it shall be struck."""
        away = self.x + BALL / 2 + aim * self.paddle_width / 2 - self.paddle_x - self.paddle_width / 2
        self.step(np.clip(away / (620 * 4 / 60), -1, 1))

    def depth_in_bricks(self):
        """How deep the ball is inside any standing brick, in pixels."""
        rows, columns = np.divmod(np.arange(108), 18)
        left, top = columns * 32.0, 50 + rows * 12.0
        x, y = self.x[:, None], self.y[:, None]
        over_x = np.minimum(x + BALL, left + 32) - np.maximum(x, left)
        over_y = np.minimum(y + BALL, top + 12) - np.maximum(y, top)
        return np.where(self.bricks, np.minimum(over_x, over_y), 0).max()


def test_breakout_starts_as_told():
    game = Breakout()
    assert game.observations.shape == (1, 118)
    assert game.bricks.all() and not game.in_play.any()
    assert (game.score[0], game.reserve[0], game.paddle_width[0]) == (0, 5, 62)
    np.testing.assert_allclose(game.paddle_x, (WIDTH - 62) / 2, rtol=1e-6)
    game.step(0)
    assert game.in_play.all() and game.vy[0] > 0
    np.testing.assert_allclose(game.speed, 256, rtol=1e-5)
    game.step(1)
    np.testing.assert_allclose(game.paddle_x, (WIDTH - 62) / 2 - 620 * 4 / 60, rtol=1e-5)
    for _ in range(30):
        game.step(2)
    np.testing.assert_allclose(game.paddle_x + game.paddle_width, WIDTH, rtol=1e-6)


def test_breakout_is_won_by_following_the_ball():
    """A whole game: points, speeds, the halved paddle and the second wall,
    each as the rules have it."""
    game = Breakout(16, continuous=True)
    rng = np.random.default_rng(7)
    aim = rng.uniform(-0.6, 0.6, 16)
    seen_second_wall, seen_halved, speeds, wins = 0, 0, set(), 0
    for _ in range(6000):
        bricks, score, vy, y, width, reserve = game.bricks, game.score, game.vy, game.y, game.paddle_width, game.reserve
        game.follow(aim)
        over = game.terminals == 1
        same = ~over & game.in_play & (reserve == game.reserve)
        refilled = same & (game.bricks & ~bricks).any(axis=1)
        fallen = ((bricks & ~game.bricks) * POINTS).sum(axis=1)
        assert (game.rewards == fallen)[same & ~refilled].all()
        assert (game.score - score == game.rewards)[same].all()
        assert game.depth_in_bricks() < 1e-2
        # The second wall comes with a strike of the paddle, when the first is cleared.
        assert ((score[refilled] == 432).all() and (vy[refilled] > 0).all()
                and (game.vy[refilled] < 0).all())
        seen_second_wall += refilled.sum()
        # The ball comes off the paddle at no more than 45 degrees.
        struck = same & (vy > 0) & (game.vy < 0) & (y > 200)
        assert (np.abs(game.vx[struck]) <= np.abs(game.vy[struck]) * 1.0001).all()
        # Upper rows bring full speed at once.
        upper = same & ~refilled & (bricks & ~game.bricks)[:, :54].any(axis=1)
        np.testing.assert_allclose(game.speed[upper], 448, rtol=1e-4)
        speeds |= set(np.rint(game.speed[same]).tolist())
        halved = same & (game.paddle_width < width)
        assert (game.paddle_width[halved] == 31).all() and (vy[halved] < 0).all()
        assert (game.paddle_width >= width)[same & ~halved].all()
        seen_halved += halved.sum()
        aim = np.where(vy < 0, aim, rng.uniform(-0.6, 0.6, 16))
        wins += (over & (score + game.rewards == 864)).sum()
    assert speeds <= {256, 320, 384, 448} and len(speeds) == 4
    assert wins >= 16 and seen_second_wall >= 16 and seen_halved >= 16
    log = game.envs.log()
    assert log["score"] > 800 and log["perf"] == pytest.approx(log["score"] / 864)
    assert log["episode_return"] == log["score"] and 1000 < log["episode_length"] < 6000


def test_breakout_ends_after_the_balls_in_reserve():
    """The paddle hides in a corner, under balls that fall elsewhere: one in
    play and five in reserve."""
    game, reserves, episodes = Breakout(8), [], 0
    for _ in range(2000):
        reserve, score = game.reserve, game.score
        game.step(1)
        over = game.terminals == 1
        lost = (game.reserve < reserve) & ~over
        assert (game.reserve == reserve - 1)[lost].all() and not game.in_play[lost | over].any()
        assert (reserve[over] == 0).all() or (score + game.rewards)[over].max() == 864
        assert (game.paddle_width[lost] == 62).all() and (game.speed[lost] == 0).all()
        reserves += reserve[over].tolist()
        episodes += over.sum()
        assert ((game.score[over] == 0).all() and game.bricks[over].all()
                and (game.reserve[over] == 5).all())
    assert episodes > 8 and set(reserves) == {0}
    assert game.envs.log()["n"] == episodes


def test_breakout_time_does_not_depend_on_ticks():
    """One step of 60 ticks gives what 60 steps of one tick give: nothing is
    passed through at any speed.

    Rounding errors grow with every bounce, and a brick touched at its very corner may fall in
    one game only; from there on the two are different games. So each pair is compared until it
    parts, and few may part.
    """
    rng = np.random.default_rng(0)
    steps = parted = 0
    for seed in range(100):
        options = {"ball_speed": rng.uniform(64, 512), "max_ball_speed": 512.0,
                   "paddle_width": rng.uniform(100, 576)}
        coarse = Vector("breakout", 1, {**options, "frameskip": 60}, seed=seed)
        fine = Vector("breakout", 1, {**options, "frameskip": 1}, seed=seed)
        for action in rng.integers(0, 3, 6):
            coarse.step(action)
            total, in_play = 0, True
            for _ in range(60):
                fine.step(action)
                total += fine.rewards[0]
                in_play &= fine.observations[0, 6] == 1
            if not in_play or coarse.observations[0, 6] == 0:
                # a lost ball: the rest of the step is dropped, which is another time in either
                break
            steps += 1
            if not np.array_equal(coarse.observations[0, 10:], fine.observations[0, 10:]):
                parted += 1
                break
            assert coarse.rewards[0] == total
            np.testing.assert_allclose(coarse.observations[0], fine.observations[0], atol=2e-3)
    assert steps > 200 and parted <= 0.03 * steps, f"{parted} of {steps} steps parted"


def test_a_long_step_of_breakout_misses_no_brick():
    """Where the ball comes back from behind the wall within a step: rounding gives as
    many points as it takes."""
    count, options = 2000, {"ball_speed": 512.0, "max_ball_speed": 512.0, "paddle_width": 576.0}
    coarse, fine = (Vector("breakout", count, {**options, "frameskip": ticks}) for ticks in (60, 1))
    same, fewer, more = np.ones(count, bool), 0, 0
    for _ in range(16):
        coarse.step(0)
        total = np.zeros(count)
        for _ in range(60):
            fine.step(0)
            total += fine.rewards
            same &= fine.observations[:, 6] == 1
        same &= coarse.observations[:, 6] == 1
        fewer += (coarse.rewards < total)[same].sum()
        more += (coarse.rewards > total)[same].sum()
        same &= (coarse.observations[:, 10:] == fine.observations[:, 10:]).all(axis=1)
    assert more > 200 and fewer < 1.5 * more, (
        f"{fewer} steps brought less in one piece, {more} more")


@settings(max_examples=25)
@given(
    frameskip=st.integers(1, 60), speed=st.floats(32, 512), paddle_speed=st.floats(0, 100000),
    seed=st.integers(0, 99)
)
def test_breakout_ball_stays_in_the_field_and_out_of_bricks(frameskip, speed, paddle_speed, seed):
    game = Breakout(8, frameskip=frameskip, ball_speed=speed, max_ball_speed=512.0,
                    paddle_speed=paddle_speed, paddle_width=576.0)
    rng = np.random.default_rng(seed)
    for _ in range(150):
        game.random_actions(rng)
        game.step()
        assert game.depth_in_bricks() < 1e-2
        assert (game.x >= 0).all() and (game.x <= WIDTH - BALL + 1e-3).all() and (game.y >= 0).all()
        # A paddle as wide as the field misses nothing, until the back wall halves it.
        assert (game.y[game.paddle_width == 576] <= PADDLE_Y - BALL + 1e-2).all()
        assert np.isfinite(game.observations).all()


def test_breakout_steps_can_be_limited():
    vector = Vector("breakout", 3, {"max_steps": 20, "paddle_width": 576.0})
    unlimited = Vector("breakout", 3, {"paddle_width": 576.0})
    for t in range(20):
        vector.step([0, 0, 0])
        unlimited.step([0, 0, 0])
        assert (vector.truncations == (t == 19)).all() and not vector.terminals.any()
    assert np.array_equal(vector.final_observations, unlimited.observations)


def test_nan_actions_do_not_break_an_environment():
    for name in ("breakout", "cartpole"):
        vector = Vector(name, 2, {"continuous": True})
        for _ in range(100):
            vector.step([np.nan, np.nan])
            assert np.isfinite(vector.observations).all()


# Environments of one's own: dead agents, action masks, heap memory

OWN = """
#define OBSERVATION int16_t
#define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n) X(own)
#define SETTINGS(X) X(int, agents, 2, "agents") X(float, step, 0.5, "size")
#define HAS_VALID
#define HAS_ACTION_MASKS
#define HEAP int* counts;
#include "env.h"
struct Env { ENV_COMMON int tick; };
static const char* c_init(Env* env) {
    if (env->agents < 1) return "agents must be 1 or more";
    env->counts = calloc((size_t)env->agents, sizeof(int));
    return NULL;
}
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){.num_agents = env->agents, .observation_shape = {2, 1}, .observation_low = -300,
                       .observation_high = 300, .action_heads = {3, 2}};
}
static void write(Env* env) {
    for (int i = 0; i < env->agents; i++) {
        env->observations[2 * i] = (int16_t)env->counts[i];
        env->observations[2 * i + 1] = (int16_t)env->tick;
        env->valid[i] = (env->tick + i) % 2;
        for (int k = 0; k < 5; k++) env->action_masks[5 * i + k] = (k + env->tick) % 2;
    }
}
static void c_reset(Env* env) { env->tick = 0; write(env); }
static void c_step(Env* env) {
    env->tick++;
    for (int i = 0; i < env->agents; i++) {
        env->counts[i] += env->actions[2 * i] - env->actions[2 * i + 1];
        env->rewards[i] = env->step; env->terminals[i] = env->truncations[i] = 0;
    }
    env->log.own += 3; env->log.n += 1;
    write(env);
}
static int64_t c_save(Env* env, char* out) {
    size_t size = (size_t)env->agents * sizeof(int);
    if (out) memcpy(out, env->counts, size);
    return (int64_t)size;
}
static void c_load(Env* env, const char* in) { memcpy(env->counts, in, (size_t)env->agents * sizeof(int)); }
static void c_render(Env* env) { (void)env; }
static void c_close(Env* env) { free(env->counts); }
"""


def test_own_environment_with_dead_agents_masks_and_heap(tmp_path):
    header = tmp_path / "own.h"
    header.write_text(OWN)
    vector = Vector(str(header), 2, [{"agents": 1}, {"agents": 3}])
    envs = vector.envs
    assert envs.has_valid and envs.has_action_masks and envs.action_heads == [3, 2]
    assert envs.observation_dtype == np.int16 and envs.observation_shape == (2, 1)
    assert vector.valid.tolist() == [0, 0, 1, 0] and vector.masks.tolist() == [[0, 1, 0, 1, 0]] * 4
    vector.step([[2, 0], [0, 1], [1, 0], [2, 1]])
    assert (vector.observations[:, 0, 0].tolist() == [2, -1, 1, 1]
            and vector.observations[:, 1, 0].tolist() == [1] * 4)
    assert vector.valid.tolist() == [1, 1, 0, 1] and vector.masks.tolist() == [[1, 0, 1, 0, 1]] * 4
    assert (vector.rewards == 0.5).all()
    saved = envs.save()
    vector.step()
    envs.load(saved)
    vector.step([[0, 0]] * 4)
    assert (vector.observations[:, 0, 0].tolist() == [2, -1, 1, 1]
            and vector.observations[:, 1, 0].tolist() == [2] * 4)
    # The log is part of the saved state: two steps of two environments remain of three.
    assert envs.log() == {"perf": 0, "score": 0, "episode_return": 0, "episode_length": 0,
                          "own": 3, "n": 4}
    vector.check_guards()
    envs.close()
    with pytest.raises(ValueError, match=r"own \(environment 1\): agents must be 1 or more"):
        ocean.load(str(header)).create(2, settings=[{}, {"agents": 0}])


SMALL = """
#define OBSERVATION int32_t
#include "env.h"
enum { HOLD, FIRE };
enum { RANGE = 3 << 29 };
struct Env { ENV_COMMON int tick; };
static const char* c_init(Env* env) { return NULL; }
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){.num_agents = 1, .observation_shape = {1}, .observation_high = RANGE, .action_heads = {2}};
}
static void c_reset(Env* env) { env->tick = 0; env->observations[0] = random_int(&env->rng, RANGE); }
static void c_step(Env* env) {
    env->tick++;
    env->rewards[0] = env->actions[0] == FIRE;
    env->terminals[0] = env->tick == 2;
    env->truncations[0] = 0;
    if (env->terminals[0]) LOG_EPISODE(env, 0.25f, 7, 3 + 1, env->tick);
    if (env->terminals[0]) c_reset(env);
    else env->observations[0] = random_int(&env->rng, RANGE);
}
static void c_render(Env* env) {}
"""


def load_small(tmp_path, *lines):
    (tmp_path / "small.h").write_text("\n".join(lines) + SMALL)
    return ocean.load(str(tmp_path / "small.h"))


def test_a_header_may_leave_out_all_that_is_optional(tmp_path):
    library = load_small(tmp_path)
    assert library.settings == {} and not library.has_valid and not library.has_action_masks
    assert library.log_fields == ["perf", "score", "episode_return", "episode_length", "n"]
    assert library.fps == 30 and not library.by_turns and library.create(1).keys() == ([], 0)
    vector = Vector(library.header, 1)
    for _ in range(4):
        vector.step([1])
    assert vector.envs.log() == {"perf": 0.25, "score": 7, "episode_return": 4,
                                 "episode_length": 2, "n": 2}
    vector.envs.close()


@pytest.mark.parametrize("field, wrong, text", [
    (".num_agents = 1", ".num_agents = 0", "no .num_agents"),
    (".observation_shape = {1}", ".observation_shape = {0}", "no .observation_shape"),
    (".observation_shape = {1}", ".observation_shape = {1, -2}", "a negative size in .observation_shape"),
    (".action_heads = {2}", "", "neither .action_heads, .* nor .action_dims"),
    (".action_heads = {2}", ".action_heads = {2}, .action_dims = 1", "both .action_heads and .action_dims"),
    (".action_heads = {2}", ".action_heads = {2, -2}", "a negative number of choices in .action_heads"),
    (".action_heads = {2}", ".action_dims = -1", "a negative .action_dims")])
def test_wrong_spaces_of_a_header_are_named(field, wrong, text, tmp_path):
    (tmp_path / "small.h").write_text(SMALL.replace(field, wrong))
    with pytest.raises(ValueError, match=f"^small: c_spaces gives {text}"):
        ocean.load(str(tmp_path / "small.h")).create(2)


def test_a_header_declares_its_keys_and_its_speed(tmp_path):
    library = load_small(tmp_path, "#define OWN_LOG(X) X(hits)", "#define BY_TURNS",
                         "#define CLICK_COLUMNS 3",
                         "#define KEYS(KEY) KEY(0, X, FIRE) KEY(0, 7, HOLD) \\",
                         "    KEY(0, REST, HOLD) KEY(0, LEFT, 2) KEY(1, A, 0)")
    assert library.by_turns and library.fps == 10 and library.log_fields[-1] == "hits"
    keys, columns = library.create(1).keys()
    assert columns == 3 and keys == [(0, 0, "REST", 0), (0, ord("X"), "X", 1),
                                     (0, ord("7"), "7", 0)]
    assert load_small(tmp_path, "#define FPS 50").fps == 50


def test_keys_of_our_environments():
    def keys(name, **settings):
        return [(head, name, value)
                for head, _, name, value in ocean.load(name).create(1, settings=settings).keys()[0]]

    assert keys("breakout") == [(0, "LEFT", 1), (0, "RIGHT", 2)]
    assert keys("breakout", continuous=True)[:2] == [(0, "LEFT", -1), (0, "RIGHT", 1)]
    assert keys("target")[:2] == [(0, "REST", 4), (1, "REST", 1)], "what holds at rest comes first"
    assert keys("drone")[0] == (3, "LEFT", -1)
    assert keys("memory", cues=3) == [(0, "0", 0), (0, "1", 1), (0, "2", 2)], (
        "there are no more actions")
    assert (keys("go", size=9) == [(0, "P", 81)]
            and ocean.load("go").create(1, settings={"size": 9}).keys()[1] == 9)
    assert (len(keys("nmmo3")) == 42 and ocean.load("squared").by_turns
            and ocean.load("snake").fps == 8)


def test_random_integers_have_no_bias(tmp_path):
    """The upper half of a draw times 3 << 29 alone is two thirds of the numbers 3 times in
    8, the others 2 times."""
    vector, counts = Vector(load_small(tmp_path).header, 64), np.zeros(3)
    for _ in range(500):
        vector.step(np.zeros(64))
        counts += np.bincount(vector.observations.ravel() % 3, minlength=3)
    # 4 deviations; with the bias 0.08
    assert np.abs(counts / counts.sum() - 1 / 3).max() < 0.01, counts


def test_an_edited_header_is_loaded_anew(tmp_path):
    header = tmp_path / "own.h"
    header.write_text(OWN)
    before = ocean.load(str(header))
    assert ocean.load(str(header)) is before and stat.S_IMODE(before.path.stat().st_mode) == 0o755
    header.write_text(OWN.replace('"size")', r'"a \"size\", C:\\,\n" "or two")'))
    after = ocean.load(str(header))
    assert (after.settings_help["step"] == 'a "size", C:\\,\nor two'
            and before.settings_help["step"] == "size")


def test_compiler_message_is_shown(tmp_path):
    header = tmp_path / "broken.h"
    header.write_text(OWN.replace("env->tick++;", "env->tock++;"))
    with pytest.raises(RuntimeError, match=r"no member named .tock"):
        ocean.load(str(header))
    for name, misspelt in (("c_render(", "c_rendr("), ("env->tick++;", "env->tick = next(env->tick);")):
        header.write_text(SMALL.replace(name, misspelt))
        with pytest.raises(RuntimeError, match=r"error: .*(c_render|next)"):
            ocean.load(str(header))


# Processes of their own


def copy_ocean(folder):
    for path in (ROOT / "ocean").rglob("*.*"):
        if path.suffix in (".py", ".h", ".c") and path.is_file():
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(ROOT)).write_bytes(path.read_bytes())


def test_two_processes_compile_at_once(tmp_path):
    copy_ocean(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ocean; ocean.load('squared').create(3)"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(list((tmp_path / "ocean" / ".build").iterdir())) == 1


def test_cache_elsewhere_and_no_compiler(tmp_path):
    copy_ocean(tmp_path)
    (tmp_path / "ocean" / ".build").write_text("a file in the way stands for a tree that "
                                               "cannot be written")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ocean; print(ocean.load('squared').path)"
    path = run_python(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert path.startswith(str(tmp_path / "cache" / "ocean" / "squared-"))
    message = code.replace("print(", "\ntry: print(").replace(".path)", ".path)\nexcept "
                                                              "RuntimeError as e: print(e)")
    assert "install gcc or clang" in run_python(message, PATH=str(tmp_path), CC="")
    assert "CC = 'no-such-compiler': there is no such program" in run_python(message, CC="no-such-compiler")
    with_words = code.replace("import sys;", "import sys, warnings; warnings.showwarning = lambda t, *_: print(t);")
    assert "CC = 'ccache gcc' is not used" in run_python(with_words, CC="ccache gcc")


RENDER = """
import numpy as np, ocean
for name in ocean.names():
    envs = ocean.load(name).create(2)
    agents = envs.num_agents
    observations = np.zeros((agents, *envs.observation_shape), envs.observation_dtype)
    actions = np.zeros((agents, envs.action_dims), np.int32)
    small = [np.zeros(agents, kind) for kind in (np.float32, np.uint8, np.uint8)]
    rows = ocean.rows(observations, actions, *small)
    envs.reset(rows)
    picture = envs.render(1)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    assert len(np.unique(picture @ np.array([1, 256, 65536]))) >= 3, name
    if name == "breakout":
        assert picture.shape == (660, 1152, 3)
        assert picture[112, 32].tolist() == [226, 84, 84], "the upper row of bricks is red"
        assert picture[632, 576].tolist() == [0, 187, 204], "the paddle is below"
    if name == "squared":
        target = np.argwhere(observations[1] == 2)[0] * 65 + 32
        assert picture[tuple(target)].tolist() == [250, 190, 60]
try:
    envs.render(2)
except IndexError:
    print("drawn")
"""


def test_render_without_a_display():
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    assert "drawn" in run_python(RENDER, SDL_VIDEODRIVER="dummy")


BESIDE_PYGAME = """
import sys
sys.path[:0] = ["tests", "."]
from ocean_vector import Vector
def use_pygame():
    import pygame
    pygame.init()
    surface = pygame.display.set_mode((64, 48))
    surface.fill((255, 0, 0))
    pygame.display.flip()
    assert pygame.image.tobytes(surface, "RGB")[:3] == bytes([255, 0, 0])
vector = Vector("squared", 1)
pictures = []
for step in sys.argv[1:]:
    use_pygame() if step == "pygame" else pictures.append(vector.envs.render(0))
assert (pictures[0] == pictures[-1]).all() and pictures[0].max() > 200
print("both")
"""


@pytest.mark.parametrize("order", ["raylib pygame raylib", "pygame raylib pygame raylib"])
def test_drawing_beside_pygame(order):
    """Both wheels bring an SDL of their own, which must not take the other's functions."""
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    pytest.importorskip("pygame", reason="needs pygame, of the extras")
    assert "both" in run_python(BESIDE_PYGAME, *order.split(), SDL_VIDEODRIVER="dummy",
                                SDL_AUDIODRIVER="dummy")


def test_training_needs_no_raylib():
    code = "import sys; sys.modules['raylib'] = None\n" + RENDER.replace("IndexError", "ImportError")
    code = code.replace("picture = envs.render(1)", "envs.step(rows); continue").replace("render(2)", "render(1)")
    assert "drawn" in run_python(code)


def test_sanitizers_must_be_loaded_first():
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        with pytest.raises(RuntimeError, match="LD_PRELOAD"):
            ocean.load("squared", debug=True)
