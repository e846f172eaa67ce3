"""Environments in C beside Gymnasium's. test_ocean_golden.py holds what each of them writes."""

import re

import gymnasium
import numpy as np
import pytest
from ocean_vector import Vector

import ocean


def test_the_page_of_nmmo3_names_the_defaults():
    """docs/nmmo3.md says `setting`=default for each setting."""
    page = (ocean.FOLDER.parent / "docs" / "nmmo3.md").read_text()
    written = dict(re.findall(r"`(\w+)`=(−?\d[\d.]*\d|−?\d)", page))
    defaults = {name: float(value) for name, value in ocean.load("nmmo3").settings.items()}
    assert {name: float(value.replace("−", "-")) for name, value in written.items()} == pytest.approx(defaults)


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
