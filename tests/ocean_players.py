"""Simple players, one for each game that random play does not see the end of.

`PLAYERS[name](vector, rng)` gives the next actions, (agents, heads or dimensions). They add,
multiply and compare only, so that all machines play the same game.
"""

import numpy as np

# Of double_pendulum: cart, two angles and their velocities (linear-quadratic, for 0.05 s).
REGULATOR = 34.1, -1446.6, 1788.3, 69.5, -21.3, 255.3


def at_random(vector, rng):
    vector.act(rng)
    return vector.actions


def follow_ball(vector, rng):
    """Breakout: strikes with any part of the paddle."""
    o = vector.observations.astype(np.float64)
    aim = rng.random(len(o)) - 0.5
    way = o[:, 2] * 576 + 16 - o[:, 0] * 576 - o[:, 9] * 62 * (0.5 + 0.6 * aim)
    if vector.envs.action_heads:
        return np.where(way > 20, 2, np.where(way < -20, 1, 0))
    return np.clip(way / 41, -1, 1)


def follow_pong(vector, rng):
    """Pong: strikes with the paddle's edges."""
    o = vector.observations.astype(np.float64)
    edge = 38 * np.where(np.arange(len(o)) % 2, 1, -1)
    way = (o[:, 3] + 1) / 2 * 466 + 7 - (o[:, 0] + 1) / 2 * 408 - 36 + edge
    if vector.envs.action_heads:
        return np.where(way > 20, 2, np.where(way < -20, 1, 0))
    return np.clip(way / 32, -1, 1)


def swing(vector, rng):
    """Mountaincar: pushes the way it goes."""
    speed = vector.observations[:, 1]
    return np.where(speed < 0, 0, 2) if vector.envs.action_heads else np.where(speed < 0, -1.0, 1.0)


def kick(vector, rng):
    """Acrobot: bends as the upper rod swings."""
    return np.where(vector.observations[:, 4] < 0, 2, 0)


def regulate(vector, rng):
    """Double pendulum: keeps both rods up."""
    o = vector.observations.astype(np.float64)
    state = (o[:, 0], o[:, 1], o[:, 1] + o[:, 2], o[:, 5], o[:, 6], o[:, 6] + o[:, 7])
    push = -sum(gain * value for gain, value in zip(REGULATOR, state, strict=True)) / 500
    return push


def land(vector, rng):
    """Lander: an angle by position and speed, a descent by height."""
    o = vector.observations.astype(np.float64)
    aim = np.clip(0.5 * o[:, 0] + o[:, 2], -0.4, 0.4)
    turn = 0.5 * (aim - o[:, 4]) - o[:, 5]
    lift = 0.5 * (0.55 * np.abs(o[:, 0]) - o[:, 1]) - 0.5 * o[:, 3]
    down = o[:, 6] + o[:, 7] > 0
    turn, lift = np.where(down, 0, turn), np.where(down, -0.5 * o[:, 3], lift)
    if not vector.envs.action_heads:
        side = np.where(turn < -0.05, 1, np.where(turn > 0.05, -1, 0))
        return np.column_stack([np.where(lift > 0.05, lift, -1), side])
    side = np.where(turn < -0.05, 3, np.where(turn > 0.05, 1, 0))
    return np.where((lift > np.abs(turn)) & (lift > 0.05), 2, side)


def norm(way):
    return np.sqrt(way[:, 0] ** 2 + way[:, 1] ** 2 + way[:, 2] ** 2)[:, None]


def pilot(vector, rng):
    """Drone: cascaded control of velocity, tilt and turn; through rings from the right side."""
    o = vector.observations.astype(np.float64)
    way, velocity, spin, up = 10 * o[:, :3], 10 * o[:, 12:15], 20 * o[:, 15:18], o[:, 18:21]
    ring = o[:, 9:12]
    ahead = (way[:, 0] * ring[:, 0] + way[:, 1] * ring[:, 1] + way[:, 2] * ring[:, 2])[:, None]
    off = (norm(way - ahead * ring) > 0.5) | (ahead < 0)
    way = way + np.where(off, -1.2, 1.0) * ring
    push = 3.0 * (1.5 * way * np.minimum(1, 1.2 / np.maximum(norm(way), 1e-6)) - velocity)
    force = np.clip(push, -4, 4) + 9.81 * up  # that shall act, in the drone's axes
    lift = np.clip(force[:, 2] / 9.81 / np.maximum(up[:, 2], 0.5) * 0.9, 0.3, 2.0) / 2.25
    roll = 0.025 * (-4 * force[:, 1] / 9.81 - spin[:, 0])
    pitch = 0.025 * (4 * force[:, 0] / 9.81 - spin[:, 1])
    yaw = -0.05 * spin[:, 2]
    motors = (lift + roll - pitch + yaw, lift + roll + pitch - yaw,
              lift - roll + pitch + yaw, lift - roll - pitch - yaw)
    return 2 * np.column_stack(motors) - 1


def look_out(vector, rng):
    """Freeway: waits while a car of the next lane is near."""
    o = vector.observations.astype(np.float64)
    now = np.floor(o[:, 0] * 11 - 0.5).astype(int)

    def danger(lane, times):
        cars = o[:, 4:].reshape(-1, 6, 4)[np.arange(len(o)), lane - now + 1]
        ahead = cars[:, 1:] / 2 + np.array(times)[:, None, None] * cars[:, :1]
        return (np.abs(ahead) < 0.06).any(axis=(0, 2)) & (lane >= 0) & (lane <= 9)

    here = danger(now, (0, 0.1))
    there = danger(np.floor(o[:, 0] * 11 - 0.1).astype(int), (0, 0.1, 0.2, 0.3))
    return np.where(~there, 1, np.where(here, 2, 0))


def drive(vector, rng):
    """Enduro: gas, and a lane without a near car."""
    o = vector.observations.astype(np.float64)
    lanes, cars = np.array([-0.6, 0.0, 0.6]), o[:, 11:].reshape(len(o), 8, 2)
    ahead, x = cars[..., 0] * 240, o[:, :1] + 2 * cars[..., 1]
    free = np.column_stack([np.where(np.abs(x - lane) < 0.45, ahead, 240).min(axis=1)
                            for lane in lanes])
    best = (free.clip(0, 90) - 30 * np.abs(lanes - o[:, :1])).argmax(axis=1)
    way = lanes[best] + 0.25 * o[:, 2] * o[:, 1] ** 2 - o[:, 0]
    near = ((np.abs(cars[..., 1]) * 2 < 0.4) & (ahead < 18)).any(axis=1)
    steer = np.where(way > 0.05, 2, np.where(way < -0.05, 1, 0))
    return np.column_stack([steer, np.where(near & (o[:, 1] > 0.5), 2, 1)])


def hold_gas(vector, rng):
    """Enduro: straight on, whatever comes."""
    return np.tile([0, 1], (len(vector.actions), 1))


def shoot(vector, rng):
    """Asteroids: turns to where the nearest rock will be, and shoots."""
    rock = vector.observations[:, 15:20].astype(np.float64)
    distance = np.sqrt(rock[:, 0] ** 2 + rock[:, 1] ** 2) * 512
    time = np.minimum(distance / 8, 60)
    x, y = rock[:, 0] * 512 + rock[:, 2] * 10 * time, rock[:, 1] * 512 + rock[:, 3] * 10 * time
    turn = np.where(y > 0.15 * np.maximum(x, 0), 2, np.where(y < -0.15 * np.maximum(x, 0), 1, 0))
    fire = (x > 0) & (np.abs(y) < 0.25 * x) & (distance < 400)
    return np.column_stack([turn, np.zeros(len(turn)), fire])


def chase(vector, rng):
    """Target: to the nearest goal."""
    o = vector.observations.astype(np.float64)
    ahead = o[:, 0] * o[:, -3] + o[:, 1] * o[:, -2]
    aside = o[:, 1] * o[:, -3] - o[:, 0] * o[:, -2]
    angle = np.where(ahead > 0, aside / np.maximum(ahead, 1e-6), 9 * np.sign(aside))
    speed = np.where(np.abs(angle) < 0.6, 4, 1)
    return np.column_stack([np.clip(np.round(angle / 0.05), -4, 4) + 4, speed])


def place(vector, rng):
    """Tetris with placements: lines, and neither holes nor bumps."""
    rows = vector.observations[:, -211:-51].reshape(-1, 4, 40).astype(int)
    worth = 6 * rows[:, 0] - 4 * rows[:, 1] - rows[:, 2] - 2 * rows[:, 3]
    return np.where(rng.random(len(worth)) < 0.05, 40, worth.argmax(axis=1))


def pile_up(vector, rng):
    """2048: into one corner, as long as that moves anything."""
    return (vector.action_masks * [4, 2, 3, 1]).argmax(axis=1)


def deduce(vector, rng):
    """Minesweeper: a cell that one number proves safe, else one that is not proved a mine."""
    legal = np.where(vector.action_masks == 1, rng.random(vector.action_masks.shape), -1)
    actions = legal.argmax(axis=1)
    for i, planes in enumerate(vector.observations):
        number, covered = planes.argmax(axis=0).astype(int) - 1, planes[0] == 1
        mine, safe = np.zeros_like(covered), np.zeros_like(covered)
        for _ in range(3):
            for r, c in np.argwhere(number > 0):
                near = slice(max(r - 1, 0), r + 2), slice(max(c - 1, 0), c + 2)
                if covered[near].sum() == number[r, c]:
                    mine[near] |= covered[near]
                if mine[near].sum() == number[r, c]:
                    safe[near] |= covered[near] & ~mine[near]
        if not covered.all() and (covered & ~mine).any():
            good = safe if safe.any() else covered & ~mine
            actions[i] = np.where(good.ravel(), legal[i], -1).argmax()
    return actions


def follow_marks(vector, rng):
    """Maze: to new cells, or else back along the trail."""
    middle = vector.observations.shape[2] // 2
    beside = (middle + np.array([-1, 1, 0, 0]), middle + np.array([0, 0, -1, 1]))
    wall, _, trail, done = (vector.observations[:, k][:, *beside].astype(float) for k in range(4))
    return (10 * wall + trail + done + 0.5 * rng.random(wall.shape)).argmin(axis=1)


def eat(vector, rng):
    """Snake: to the nearest food, around what kills."""
    size = vector.observations.shape[2]
    rows, columns = np.indices((size, size)) - size // 2
    moves = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
    away = np.abs(rows - moves[:, 0, None, None]) + np.abs(columns - moves[:, 1, None, None])
    food = np.where(vector.observations[:, 0, None] == 1, away, 99).min(axis=(2, 3))
    wall = vector.observations[:, 1][:, *(size // 2 + moves).T].astype(int)
    return (200 * wall + food + 0.5 * rng.random(food.shape)).argmin(axis=1)


def collect(vector, rng):
    """Trash pickup: to the nearest piece in sight; with one to the bin."""
    size = round(((vector.observations.shape[1] - 26) / 5) ** 0.5)
    actions = (1 + 4 * rng.random(len(vector.actions))).astype(int)
    draws = rng.random((len(actions), 2))
    for i, row in enumerate(vector.observations):
        pieces = np.argwhere(row[: size * size].reshape(size, size)) - size // 2
        flags = row[5 * size * size + 1 : 5 * size * size + 5] > 0
        if not row[5 * size * size]:
            if not len(pieces):
                continue
            down, right = pieces[np.abs(pieces).sum(axis=1).argmin()]
            flags = np.array([down < 0, down > 0, right < 0, right > 0])
        ways = 1 + np.flatnonzero(flags)
        if draws[i, 0] < 0.9 and len(ways):
            actions[i] = ways[int(draws[i, 1] * len(ways))]
    return actions


def attack(vector, rng):
    """Moba: half of the time towards the other base."""
    actions = at_random(vector, rng)
    actions[:, 0] = np.where(rng.random(len(actions)) < 0.5, 6, actions[:, 0])
    return actions


def go_up(vector, rng):
    """Freeway: blindly."""
    return np.ones(len(vector.actions))


def mostly_zero(vector, rng):
    """Stochastic: 0 three times in four."""
    return rng.random(len(vector.actions)) > 0.75
