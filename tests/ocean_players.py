"""Simple players, one for each game that random play does not see the end of.

A player gets a vector and a generator, and returns the next actions, (agents, heads or dimensions).
They add, multiply and compare only, so that all machines play the same game.
"""

import numpy as np


def at_random(vector, rng):
    vector.act(rng)
    return vector.actions


def fall(vector, rng):
    """Lander: the main engine once in 20 steps."""
    return np.where(rng.random(len(vector.actions)) < 0.05, 2, 0)


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


def place(vector, rng):
    """Tetris with placements: lines, and neither holes nor bumps."""
    rows = vector.observations[:, -211:-51].reshape(-1, 4, 40).astype(int)
    worth = 6 * rows[:, 0] - 4 * rows[:, 1] - rows[:, 2] - 2 * rows[:, 3]
    return np.where(rng.random(len(worth)) < 0.05, 40, worth.argmax(axis=1))


def attack(vector, rng):
    """Moba: half of the time towards the other base."""
    actions = at_random(vector, rng)
    actions[:, 0] = np.where(rng.random(len(actions)) < 0.5, 6, actions[:, 0])
    return actions


def go_up(vector, rng):
    """Freeway: blindly."""
    return np.ones(len(vector.actions))
