"""The rules of the sanity suite: bandit, password, stochastic, continuous, multiagent, spaces,
masked, performance."""

import time

import numpy as np
import pytest
from ocean_vector import Vector

import ocean


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bandit", {"good_arm": 4}, "good_arm must be one of the arms"),
        ("bandit", {"good": 0.1}, "bad < good"),
        ("password", {"length": 3, "password": 8}, "no more than length bits"),
        ("stochastic", {"share": 1.0}, "share must lie between"),
        ("continuous", {"dims": 17}, "dims must lie within"),
        ("masked", {"choices": 1}, "choices must lie within"),
    ],
)
def test_wrong_settings(name, options, message):
    with pytest.raises(ValueError, match=message):
        ocean.load(name).create(1, settings=options)


def test_bandit_pays_by_arm():
    vector = Vector("bandit", 4000, {"good": 0.8, "bad": 0.3})
    for arm in range(4):
        vector.step(np.full(4000, arm))
        assert vector.terminals.all()
        assert vector.rewards.mean() == pytest.approx(0.8 if arm == 2 else 0.3, abs=0.03)
        assert vector.envs.log()["perf"] == (arm == 2)


def test_password_pays_for_one_sequence():
    vector = Vector("password", 32, {"length": 5, "password": 22})
    for i in range(5):
        assert (vector.observations[:, i:] == 0).all() and not vector.terminals.any()
        bits = np.arange(32) >> i & 1
        vector.step(bits)
        if i < 4:
            assert (np.array_equal(vector.observations[:, i], 2 * bits - 1)
                    and not vector.rewards.any())
    assert vector.terminals.all() and np.flatnonzero(vector.rewards).tolist() == [22]
    assert vector.envs.log()["perf"] == 1 / 32


def test_stochastic_is_best_as_the_mixture():
    vector, rng, score = Vector("stochastic", 1000), np.random.default_rng(0), {}
    for q in (0.0, 0.5, 0.65, 0.75, 0.85, 1.0):
        zeros = np.zeros(1000)
        for t in range(50):
            action = rng.random(1000) >= q
            zeros += ~action
            vector.step(action)
            assert (vector.terminals == (t == 49)).all() and (t == 49 or not vector.rewards.any())
        np.testing.assert_allclose(vector.rewards, 1 - ((zeros / 50 - 0.75) / 0.75) ** 2, atol=1e-6)
        score[q] = vector.envs.log()
    for field in ("score", "perf"):
        assert max(score, key=lambda q: score[q][field]) == 0.75
    assert (score[0.75]["perf"] > 0.92 and score[0.0]["perf"] == 0
            and score[1.0]["perf"] == pytest.approx(2 / 3))


@pytest.mark.parametrize("dims", [1, 2, 5])
def test_continuous_follows_the_action(dims):
    vector, rng = Vector("continuous", 64, {"dims": dims}), np.random.default_rng(1)
    for t in range(120):
        position, way = np.split(vector.observations.astype(np.float64), 2, axis=1)
        goal = position + 2 * way
        action = np.clip(20 * way, -3, 3) if t > 40 else rng.uniform(-2, 2, way.shape)
        vector.step(action)
        moved = np.clip(position + 0.1 * np.clip(action, -1, 1), -1, 1)
        before, after = np.linalg.norm(goal - position, axis=1), np.linalg.norm(goal - moved, axis=1)
        there = vector.terminals == 1
        unclear = np.abs(after - 0.1) < 1e-4
        assert ((after <= 0.1) == there)[~unclear].all()
        np.testing.assert_allclose(vector.rewards, before - after + there, atol=1e-4)
        cut = vector.truncations == 1
        np.testing.assert_allclose(vector.final_observations[cut, :dims], moved[cut], atol=1e-5)
        going = ~there & ~cut
        np.testing.assert_allclose(vector.observations[going, :dims], moved[going], atol=1e-5)
    assert vector.envs.log()["perf"] > 0.8


def test_multiagent_names():
    vector = Vector("multiagent", 3, {"num_agents": 3})
    assert np.array_equal(vector.observations, np.tile(np.eye(3), (3, 1)))
    vector.step([0, 1, 2, 2, 1, 0, 1, 2, 0])
    assert vector.rewards.tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 0] and vector.terminals.all()


def test_spaces_heads_answer_their_parts():
    vector, rng = Vector("spaces", 200), np.random.default_rng(2)
    for _ in range(5):
        image, flags, category = np.split(vector.observations, [25, 30], axis=1)
        wanted = np.column_stack([image.sum(1) > 0, flags.sum(1) > 2, np.rint(3 * category[:, 0])])
        vector.random_actions(rng)
        right = vector.actions == wanted
        vector.step()
        np.testing.assert_allclose(vector.rewards, right.mean(axis=1), rtol=1e-6)
    vector.step(wanted := np.column_stack([vector.observations[:, :25].sum(1) > 0,
                                           vector.observations[:, 25:30].sum(1) > 2,
                                           np.rint(3 * vector.observations[:, 30])]))
    assert vector.rewards.all() and len(np.unique(wanted[:, 2])) == 4


def test_masked_ends_with_an_illegal_action():
    vector, rng = Vector("masked", 100), np.random.default_rng(3)
    assert (vector.masks.sum(axis=1) == 4).all() and vector.masks.mean(axis=0).min() > 0.4
    ticks = np.zeros(100)
    for _ in range(80):
        worth, masks = vector.observations.copy(), vector.masks == 1
        vector.random_actions(rng)
        action = vector.actions[:, 0].copy()
        vector.step()
        legal = masks[np.arange(100), action]
        ticks += 1
        assert np.array_equal(vector.rewards, np.where(legal, worth[np.arange(100), action], -1))
        assert np.array_equal(vector.terminals == 1, ~legal | (ticks == 32))
        ticks[vector.terminals == 1] = 0
    vector.envs.log()
    vector.envs.reset(vector.rows)
    for _ in range(32):
        vector.step(np.where(vector.masks == 1, vector.observations, -1).argmax(axis=1))
    log = vector.envs.log()
    assert log["perf"] == pytest.approx(1) and log["illegal"] == 0 and log["n"] == 100


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
