"""The rules of the environments in C, as a player states them. What is written byte by byte is
held by test_ocean_golden.py; nmmo3 has a file of its own."""

import gymnasium
import numpy as np
import ocean_players as players
import pytest
from ocean_vector import Vector

import ocean

# Who plays well wins, who does not does not: (name, settings, player, steps, {field: (least, most)}).
SKILL = [
    ("acrobot", {}, players.kick, 600, {"score": (-120, -60)}),
    ("asteroids", {}, players.shoot, 3000, {"score": (5000, 60000), "waves": (2, 30)}),
    ("bandit", {"good_arm": 0}, players.stand_still, 50, {"perf": (1, 1), "score": (0.87, 0.93)}),
    ("bandit", {"good_arm": 1}, players.stand_still, 50, {"perf": (0, 0), "score": (0.07, 0.13)}),
    ("boids", {"continuous": True, "num_agents": 32, "width": 500.0, "height": 500.0,
               "max_steps": 400}, players.steer, 801, {"score": (0.6, 1), "alignment": (0.8, 1)}),
    ("breakout", {"continuous": True}, players.follow_ball, 6000,
     {"score": (700, 864), "perf": (0.8, 1), "episode_length": (1000, 6000)}),
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
    ("freeway", {"level": 1, "hard": True}, players.look_out, 2040, {"score": (7, 45), "hits": (0, 25)}),
    ("freeway", {"level": 1, "hard": True}, players.go_up, 2040, {"score": (0, 6), "hits": (25, 99)}),
    ("g2048", {}, players.pile_up, 1000, {"score": (1500, 9000), "max_tile": (100, 600)}),
    ("go", {"skill": 1.0}, players.at_random, 150, {"score": (-50, -10), "perf": (0, 0.05)}),
    ("lander", {}, players.land, 1000, {"perf": (0.8, 1), "score": (150, 320)}),
    ("masked", {}, players.at_random, 300, {"perf": (0, 0.5), "illegal": (0.5, 1)}),
    ("maze", {"size": 8, "vision": 1}, players.follow_marks, 1100, {"perf": (1, 1)}),
    ("maze", {"size": 4, "loops": 0.3}, players.follow_marks, 300, {"perf": (0.95, 1), "score": (0.3, 0.95)}),
    ("minesweeper", {"mines": 8}, players.deduce, 40, {"perf": (0.5, 1), "score": (0.7, 1)}),
    ("moba", {"frameskip": 4, "max_ticks": 2000}, players.attack, 700,
     {"score": (-1, -0.4), "perf": (0, 0.3), "kills": (0, 10), "deaths": (10, 99)}),
    ("mountaincar", {}, players.swing, 250, {"score": (-170, -80), "perf": (0.15, 1)}),
    ("mountaincar", {"continuous": True}, players.swing, 250, {"score": (85, 100)}),
    ("password", {}, players.at_random, 500, {"perf": (0.01, 0.06)}),
    ("pong", {"continuous": True, "max_score": 5, "frameskip": 4}, players.follow_pong, 4000,
     {"perf": (0.6, 1), "score": (1, 5)}),
    ("snake", {}, players.eat, 400, {"score": (15, 60)}),
    ("spaces", {}, players.at_random, 200, {"perf": (0.4, 0.5), "category": (0.2, 0.3)}),
    ("squared", {}, players.walk_to_target, 50, {"perf": (1, 1), "score": (1, 1)}),
    ("stochastic", {}, players.mostly_zero, 50, {"perf": (0.85, 1)}),
    ("target", {}, players.chase, 1024, {"perf": (0.3, 1), "score": (1, 9)}),
    ("tetris", {"placements": True, "lines": 40}, players.place, 150, {"perf": (1, 1), "lines": (40, 43)}),
    ("trash_pickup", {}, players.collect, 300, {"score": (30, 40)}),
]


@pytest.mark.parametrize(("name", "options", "player", "steps", "bounds"), SKILL,
                         ids=[f"{row[0]}-{row[2].__name__}" for row in SKILL])
def test_skill_decides(name, options, player, steps, bounds):
    agents = ocean.load(name).create(1, settings=options).num_agents
    vector, rng = Vector(name, 32 if agents == 1 else 2, options), np.random.default_rng(1)
    for _ in range(steps):
        vector.step(player(vector, rng))
    log = vector.envs.log()
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
        vector.act(rng)
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


def test_masks_may_be_absent():
    envs = ocean.load("masked").create(2)
    arrays = [np.zeros((2, 8), np.float32), np.zeros((2, 1), np.int32), np.zeros(2, np.float32)]
    rows = ocean.rows(*arrays, np.zeros(2, np.uint8), np.zeros(2, np.uint8))
    envs.reset(rows)
    envs.step(rows)


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


@pytest.mark.parametrize("n", [5, 9])
def test_go(n):
    """No chain is without a liberty, captured stones go, and masks show the legal points."""
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
        assert (legal <= free).all() and np.array_equal(vector.action_masks[:, :-1].reshape(8, n, n), legal)
        assert vector.action_masks[:, -1].all() and (last <= other).all()
        before = own.sum(axis=(1, 2)) + 1
        vector.step(np.where(vector.action_masks == 1, rng.random(vector.action_masks.shape), -1).argmax(axis=1))
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
        assert np.array_equal(*game.action_masks.reshape(2, 2, 5, -1).swapaxes(0, 1))
        rewards = game.rewards.reshape(2, 2, 5)
        np.testing.assert_allclose(rewards[:, 0], rewards[:, 1], atol=1e-6)
        deaths = max(deaths, sides[..., 25].sum())
        fallen = max(fallen, (sides[..., 38:48:4] < 1).sum())
    assert deaths > 2 and fallen > 2


def test_moba_illegal_acts_do_nothing():
    game = Vector("moba", 4, {"self_play": True, "tower_damage": 1.0}, seed=11)
    rng, acted = np.random.default_rng(11), np.zeros(5, int)
    for t in range(400):
        players.attack(game, rng)
        if t % 5 == 0:
            saved, actions, mask = game.envs.save(), game.actions.copy(), game.action_masks[:, -5:] == 1
            acts = rng.integers(1, 5, 40)
            legal = mask[np.arange(40), acts]
            for act in (np.where(legal, 0, acts), 0 * acts):
                game.envs.load(saved)
                game.step(np.column_stack([actions[:, :2], act]))
                outputs = [array.copy() for array in game.outputs.values()]
                if act.any():
                    illegal = outputs
            assert all(map(np.array_equal, illegal, outputs))
            acted += np.bincount(acts[legal], minlength=5)
            game.envs.load(saved)
            game.actions[:] = actions
        game.step()
    assert (acted[1:] > 0).all()
