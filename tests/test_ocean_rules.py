"""The rules of the environments in C, as a player states them. What is written byte by byte is
held by test_ocean_golden.py."""

import re

import gymnasium
import numpy as np
import ocean_players as players
import pytest
from ocean_vector import Vector
from test_ocean_golden import CROWD

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
    ("nmmo3", CROWD, players.at_random, 600, {"perf": (0.01, 0.2), "gear": (1, 15), "aged": (0.1, 0.9)}),
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
    tested = {row[0] for row in SKILL} | {"memory", "multiagent", "pendulum", "performance"}
    assert tested == set(ocean.names())


def test_the_page_of_nmmo3_names_the_defaults():
    """docs/nmmo3.md says `setting`=default for each setting."""
    page = (ocean.FOLDER.parent / "docs" / "nmmo3.md").read_text()
    written = dict(re.findall(r"`(\w+)`=(−?\d[\d.]*\d|−?\d)", page))
    defaults = {name: float(value) for name, value in ocean.load("nmmo3").settings.items()}
    assert {name: float(value.replace("−", "-")) for name, value in written.items()} == pytest.approx(defaults)


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
