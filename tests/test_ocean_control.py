"""The rules of pendulum, acrobot, mountaincar, double_pendulum, lander and drone."""

import gymnasium
import numpy as np
import pytest
from ocean_vector import Vector

import ocean


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pendulum", {"max_speed": 100.0}, "half a turn"),
        ("acrobot", {"tau": 0.0}, "tau must lie within"),
        ("mountaincar", {"goal": -0.5}, "goal must lie within"),
        ("double_pendulum", {"substeps": 0}, "substeps must lie within"),
        ("lander", {"max_impact": 0.0}, "max_impact above 0"),
        ("drone", {"thrust_to_weight": 1.0}, "thrust_to_weight must be above 1"),
        ("drone", {"drag": 1000.0}, "shorter than 1 / drag"),
    ],
)
def test_wrong_settings(name, options, message):
    with pytest.raises(ValueError, match=message):
        ocean.load(name).create(1, settings=options)


def follow(name, environment_id, options, to_state, to_action, steps, atol):
    """Steps ours and Gymnasium's environment from the same states: same
    observations, rewards and ends."""
    vector, reference = Vector(name, 32, options), gymnasium.make(environment_id).unwrapped
    reference.reset(seed=0)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(steps):
        before = vector.observations.astype(np.float64)
        vector.random_actions(rng)
        vector.step()
        for i in range(32):
            reference.state = to_state(before[i])
            expected, reward, terminated, _, _ = reference.step(to_action(vector.actions[i]))
            assert vector.terminals[i] == terminated
            np.testing.assert_allclose(vector.rewards[i], reward, atol=atol)
            ended += terminated
            if not terminated and not vector.truncations[i]:
                np.testing.assert_allclose(vector.observations[i], expected, atol=atol)
    return ended


def angles(cosine, sine):
    return np.arctan2(sine, cosine)


def test_pendulum_follows_gymnasium():
    def clipped(action):
        return np.clip(action, -1, 1) * 2

    follow("pendulum", "Pendulum-v1", {}, lambda o: np.array([angles(o[0], o[1]), o[2]]),
           clipped, 60, 2e-5)
    discrete = Vector("pendulum", 5, {"continuous": False})
    twin = Vector("pendulum", 5)
    discrete.step([0, 1, 2, 3, 4])
    twin.step([-1, -0.5, 0, 0.5, 1])
    assert np.array_equal(discrete.observations, twin.observations)


def test_acrobot_follows_gymnasium():
    def state(o):
        return np.array([angles(o[0], o[1]), angles(o[2], o[3]), o[4], o[5]])

    follow("acrobot", "Acrobot-v1", {}, state, lambda a: int(a[0]), 150, 5e-4)


def test_mountaincar_follows_gymnasium():
    follow("mountaincar", "MountainCar-v0", {}, np.array, lambda a: int(a[0]), 220, 1e-6)
    options = {"continuous": True}
    follow("mountaincar", "MountainCarContinuous-v0", options, np.array,
           lambda a: np.clip(a, -1, 1), 60, 1e-6)


@pytest.mark.parametrize("continuous", [False, True])
def test_mountaincar_is_won_by_swinging(continuous):
    vector = Vector("mountaincar", 16, {"continuous": continuous, "scaled": True})
    for _ in range(200):
        velocity = vector.observations[:, 1]
        vector.step(np.where(velocity < 0, -1.0, 1.0) if continuous
                    else np.where(velocity < 0, 0, 2))
    log = vector.envs.log()
    assert log["perf"] > 0.15 and (log["score"] > 85 if continuous else log["score"] > -170)


def energy(o, m=4.2, cart=10.47, length=0.6, g=9.81):
    """Of the cart and two rods, from an observation."""
    a1 = angles(o[:, 3], o[:, 1])
    a2 = a1 + angles(o[:, 4], o[:, 2])
    v, w1 = o[:, 5], o[:, 6]
    w2 = w1 + o[:, 7]
    total = cart / 2 * v**2
    tip_x, tip_y, height = v, np.zeros_like(v), 0.0
    for a, w in ((a1, w1), (a2, w2)):
        half_x, half_y = length / 2 * np.cos(a) * w, -length / 2 * np.sin(a) * w
        total = total + m / 2 * ((tip_x + half_x) ** 2 + (tip_y + half_y) ** 2) + m * length**2 / 24 * w**2
        total = total + m * g * (height + length / 2 * np.cos(a))
        tip_x, tip_y, height = tip_x + 2 * half_x, tip_y + 2 * half_y, height + length * np.cos(a)
    return total


def test_double_pendulum_keeps_its_energy():
    vector = Vector("double_pendulum", 64, {"damping": 0.0, "tau": 0.02, "track": 5.0})
    start, alive = energy(vector.observations.astype(np.float64)), np.ones(64, bool)
    for _ in range(25):
        before = vector.observations.copy()
        vector.step(np.zeros(64))
        alive &= vector.terminals == 0
        now = energy(vector.observations.astype(np.float64))
        np.testing.assert_allclose(now[alive], start[alive], rtol=2e-4)
        # Nobody pushes from outside: the momentum along the track stays too, which shows as
        # small velocities only.
        assert (np.abs(vector.observations - before)[alive, 5] < 0.5).all()
    assert alive.sum() > 5


def test_double_pendulum_rewards_and_ends():
    vector, rng = Vector("double_pendulum", 64), np.random.default_rng(1)
    fell = 0
    for _ in range(60):
        vector.random_actions(rng)
        vector.step()
        o = vector.observations.astype(np.float64)
        a1 = angles(o[:, 3], o[:, 1])
        a2 = a1 + angles(o[:, 4], o[:, 2])
        y, x = 0.6 * (np.cos(a1) + np.cos(a2)), o[:, 0] + 0.6 * (np.sin(a1) + np.sin(a2))
        alive = vector.terminals == 0
        reward = 10 - 0.01 * x**2 - (y - 2) ** 2 - 1e-3 * o[:, 6] ** 2 - 5e-3 * o[:, 7] ** 2
        np.testing.assert_allclose(vector.rewards[alive], reward[alive], atol=1e-4)
        assert (y[alive] > 1 - 1e-5).all() and (vector.rewards[~alive] < 0).all()
        fell += (~alive).sum()
    assert fell > 50
    # A linear regulator (found by solving Riccati's equation for the rods) keeps them up.
    vector = Vector("double_pendulum", 16)
    gain = regulator()
    for _ in range(300):
        o = vector.observations.astype(np.float64)
        a1 = angles(o[:, 3], o[:, 1])
        a2 = a1 + angles(o[:, 4], o[:, 2])
        state = np.column_stack([o[:, 0], a1, a2, o[:, 5], o[:, 6], o[:, 6] + o[:, 7]])
        vector.step(-(state @ gain) / 500)
    assert vector.envs.log() == {}


def regulator(m=4.2, cart=10.47, length=0.6, g=9.81, tau=0.05):
    mass = np.array([[cart + 2 * m, 1.5 * m * length, 0.5 * m * length],
                     [1.5 * m * length, 4 / 3 * m * length**2, 0.5 * m * length**2],
                     [0.5 * m * length, 0.5 * m * length**2, m * length**2 / 3]])
    falls = np.diag([0, 1.5 * m * g * length, 0.5 * m * g * length])
    A, B = np.zeros((6, 6)), np.zeros((6, 1))
    A[:3, 3:], A[3:, :3] = np.eye(3), np.linalg.solve(mass, falls)
    B[3:, 0] = np.linalg.solve(mass, [1, 0, 0])
    step, scale = np.eye(7), np.zeros((7, 7))
    scale[:6, :6], scale[:6, 6:] = A * tau, B * tau
    power = np.eye(7)
    for k in range(1, 12):  # the exponential
        power = power @ scale / k
        step = step + power
    A, B = step[:6, :6], step[:6, 6:]
    P = np.eye(6)
    for _ in range(2000):
        gain = np.linalg.solve(1e-4 + B.T @ P @ B, B.T @ P @ A)
        P = np.eye(6) + A.T @ P @ (A - B @ gain)
    return gain[0]


def land(o):
    """Steers to the pad: an angle by position and speed, a descent by height."""
    aim = np.clip(0.5 * o[:, 0] + o[:, 2], -0.4, 0.4)
    turn = 0.5 * (aim - o[:, 4]) - o[:, 5]
    lift = 0.5 * (0.55 * np.abs(o[:, 0]) - o[:, 1]) - 0.5 * o[:, 3]
    down = (o[:, 6] + o[:, 7]) > 0
    turn, lift = np.where(down, 0, turn), np.where(down, -0.5 * o[:, 3], lift)
    return np.where((lift > np.abs(turn)) & (lift > 0.05), 2,
                    np.where(turn < -0.05, 3, np.where(turn > 0.05, 1, 0)))


def test_lander_falls_and_turns_as_told():
    vector = Vector("lander", 8)
    o = vector.observations.copy()
    assert ((o[:, 0] == 0).all() and np.allclose(o[:, 1], (10 - 0.85) / (20 / 3))
            and not o[:, 4:].any())
    for action, ax, ay, turn in ((0, 0, -10, 0), (1, -2.4, -10, 6.7), (2, 0, 7.5, 0),
                                 (3, 2.4, -10, -6.7)):
        vector.envs.reset(vector.rows)
        o = vector.observations.copy()
        vector.step(np.full(8, action))
        delta = (vector.observations - o)[:, 2:6] / 0.02
        np.testing.assert_allclose(delta[:, 0] / 0.2, ax, atol=1e-3)
        np.testing.assert_allclose(delta[:, 1] * 7.5, ay, atol=1e-3)
        np.testing.assert_allclose(delta[:, 3] * 2.5, turn, atol=1e-3)


def test_lander_rewards_are_the_change_of_shape():
    vector, rng = Vector("lander", 64, seed=2), np.random.default_rng(2)

    def shape(o):
        return -100 * (np.hypot(o[:, 0], o[:, 1]) + np.hypot(o[:, 2], o[:, 3]) + np.abs(o[:, 4])) + 10 * o[:, 6:].sum(1)

    crashes = 0
    for _ in range(300):
        before = shape(vector.observations.astype(np.float64))
        vector.random_actions(rng)
        fuel = np.array([0, 0.03, 0.3, 0.03])[vector.actions[:, 0]]
        vector.step()
        over = vector.terminals == 1
        expected = shape(vector.observations.astype(np.float64)) - before - fuel
        np.testing.assert_allclose(vector.rewards[~over], expected[~over], atol=1e-2)
        assert (np.abs(vector.rewards[over]) == 100).all()
        crashes += over.sum()
    assert crashes > 64 and vector.envs.log()["perf"] < 0.05


@pytest.mark.parametrize("options",
                         [{}, {"wind": True, "wind_power": 1.0, "turbulence_power": 0.3}])
def test_lander_is_landed_by_a_simple_pilot(options):
    vector = Vector("lander", 64, options)
    for _ in range(1000):
        vector.step(land(vector.observations))
    log = vector.envs.log()
    assert log["perf"] > 0.8 and log["score"] > 150


def test_lander_stands_on_its_feet():
    vector = Vector("lander", 32, {"start_speed": 0.0})
    quiet = []
    for _ in range(800):
        vector.step(land(vector.observations))
        standing = (vector.observations[:, 6:] == 1).all(axis=1)
        quiet.append(np.abs(vector.observations[standing, 1] * 20 / 3))
    assert np.concatenate(quiet).max() < 0.25, "feet neither sink in nor hover"


def hover_action():
    return 2 / 2.25 - 1


def test_drone_hangs_in_the_air_and_falls():
    vector = Vector("drone", 4, {"num_agents": 1})
    o = vector.observations.copy()
    for _ in range(20):
        vector.step(np.full((4, 4), hover_action()))
    np.testing.assert_allclose(vector.observations, o, atol=1e-4)
    vector = Vector("drone", 4, {"num_agents": 1, "motor_lag": 0.0, "drag": 0.0})
    vector.step(np.full((4, 4), -1))
    np.testing.assert_allclose(vector.observations[:, 14] * 10, -9.81 * 0.02, atol=1e-5)
    np.testing.assert_allclose(vector.observations[:, 21:25], 0)
    vector.step(np.full((4, 4), 1))
    np.testing.assert_allclose(vector.observations[:, 14] * 10, 9.81 * 0.02 * 0.25, atol=1e-5)


@pytest.mark.parametrize(
    ("motors", "axis", "tilt"),
    [
        # the left ones: rolls to the right, so that "up" leans to its left
        ([1, 1, -1, -1], 0, [0, 1, 0]),
        # the back ones: the nose goes down, "up" leans to its back
        ([-1, 1, 1, -1], 1, [-1, 0, 0]),
        ([1, -1, 1, -1], 2, [0, 0, 0]),  # one diagonal: turns
    ],
)
def test_drone_turns_about_each_axis(motors, axis, tilt):
    vector = Vector("drone", 1, {"num_agents": 1, "motor_lag": 0.0})
    for _ in range(2):
        vector.step(hover_action() + 0.02 * np.array(motors))
    spin, up = vector.observations[0, 15:18], vector.observations[0, 18:21]
    assert spin[axis] > 1e-4 and np.abs(np.delete(spin, axis)).max() < 1e-6
    assert np.array_equal(np.sign(np.where(np.abs(up[:2]) < 1e-5, 0, up[:2])), tilt[:2])
    np.testing.assert_allclose(np.linalg.norm(up), 1, atol=1e-5)


def pilot(o, speed=1.2):
    """Cascaded control of the wanted velocity, tilt and turn, for the default drone."""
    way, velocity, spin, up = 10 * o[:, 0:3], 10 * o[:, 12:15], 20 * o[:, 15:18], o[:, 18:21]
    near = np.minimum(1, speed / np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-6))
    push = 3.0 * (way * near * 1.5 - velocity)
    wanted = np.clip(push, -4, 4) + 9.81 * up  # the force that shall act, in its own axes
    tilt_y, tilt_x = wanted[:, 0] / 9.81, -wanted[:, 1] / 9.81
    lift = np.clip(wanted[:, 2] / 9.81 / np.maximum(up[:, 2], 0.5) * 0.9, 0.3, 2.0) / 2.25
    roll, pitch = 0.05 * (4 * tilt_x - spin[:, 0]), 0.05 * (4 * tilt_y - spin[:, 1])
    yaw = -0.1 * spin[:, 2]
    thrust = lift[:, None] + np.column_stack([roll - pitch, roll + pitch, -roll + pitch, -roll - pitch]) * 0.5
    return 2 * (thrust + yaw[:, None] * np.array([1, -1, 1, -1]) * 0.5) - 1


def test_drone_hovers_with_a_simple_pilot():
    vector = Vector("drone", 64, {"num_agents": 1})
    for _ in range(500):
        o = vector.observations.astype(np.float64)
        vector.step(pilot(o))
        distance = np.linalg.norm(10 * vector.observations[:, :3], axis=1)
        spin = np.linalg.norm(20 * vector.observations[:, 15:18], axis=1)
        going = (vector.terminals == 0) & (vector.truncations == 0)
        expected = 0.1 * np.maximum(1 - distance / 4, 0) - 0.001 * spin
        np.testing.assert_allclose(vector.rewards[going], expected[going], atol=1e-3)
    log = vector.envs.log()
    assert log["perf"] > 0.3 and log["crashed"] < 0.2


def test_drone_race_counts_rings():
    vector = Vector("drone", 64,
                    {"num_agents": 1, "race": True, "max_steps": 1000, "ring_radius": 1.0})
    passed = 0
    for _ in range(1000):
        o = vector.observations.astype(np.float64)
        way, direction = 10 * o[:, :3], o[:, 9:12]
        # First to a place before the ring, then through it.
        ahead = (way * direction).sum(1, keepdims=True)
        aside = np.linalg.norm(way - ahead * direction, axis=1, keepdims=True)
        o[:, :3] = np.where((aside > 0.5) | (ahead < 0), way - 1.2 * direction, way + 1.0 * direction) / 10
        vector.step(pilot(o))
        ring = vector.rewards > 0.5
        assert (vector.rewards[ring] < 1.1).all()
        passed += ring.sum()
    log = vector.envs.log()
    assert passed > 64 and log["score"] > 1 and log["perf"] == pytest.approx(log["score"] / 10)


def test_drone_crashes():
    vector = Vector("drone", 8, {"num_agents": 1})
    for _ in range(200):
        vector.step(np.full((8, 4), -1.0))
        done = vector.terminals == 1
        assert (vector.rewards[done] == -1).all()
    assert vector.envs.log()["crashed"] == 1
    vector = Vector("drone", 64, {"num_agents": 8, "safe_distance": 0.99})
    vector.step(np.full((512, 4), hover_action()))
    assert not vector.terminals.any(), "nobody starts too near another one"
    vector = Vector("drone", 8, {"num_agents": 64, "safe_distance": 0.9})
    vector.step(np.full((512, 4), hover_action()))
    near = np.linalg.norm(2 * vector.observations[:, 25:28], axis=1)
    assert (near[vector.terminals == 0] >= 0.9 - 1e-4).sum() > 0 and vector.terminals.any()
