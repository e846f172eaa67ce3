"""What must hold for every environment in ocean/, each with the settings under which a random agent sees all of it."""

import os
import subprocess
import threading

import numpy as np
import pytest
from test_ocean import VARIANTS, Vector, run_python

import ocean

# Settings that end episodes soon enough for a short test, and those that change what agents see or do.
SHORT = {
    "freeway": {"seconds": 20.0},
    "enduro": {"day": 20.0, "first_day": 1},
    "double_pendulum": {"max_steps": 4},
    "boids": {"max_steps": 64},
    "moba": {"max_ticks": 200},
    "nmmo3": {"num_agents": 32, "num_foes": 16, "width": 32, "height": 24, "villages": 2, "max_steps": 99},
}
MORE = [
    ("bandit", {"arms": 2, "good_arm": 0}),
    ("password", {"length": 2, "password": 1}),
    ("stochastic", {"length": 7, "share": 0.5}),
    ("continuous", {"dims": 1, "max_steps": 5}),
    ("continuous", {"dims": 16, "max_steps": 5}),
    ("multiagent", {"num_agents": 7}),
    ("masked", {"choices": 3, "length": 4}),
    ("pendulum", {"continuous": False, "max_steps": 5}),
    ("acrobot", {"continuous": True}),
    ("mountaincar", {"scaled": True, "max_steps": 9}),
    ("mountaincar", {"continuous": True, "max_steps": 500}),
    ("double_pendulum", {"continuous": False}),
    ("lander", {"wind": True, "max_steps": 30}),
    ("lander", {"continuous": True}),
    ("drone", {"race": True, "num_agents": 1, "max_steps": 20}),
    ("drone", {"race": True, "rings": 2}),
    ("pong", {"continuous": True, "max_score": 1, "max_steps": 20}),
    ("snake", {"num_agents": 3, "width": 5, "height": 4, "vision": 2, "num_food": 3, "max_length": 3}),
    ("snake", {"num_agents": 20, "width": 10, "height": 8, "num_food": 9, "corpses": False, "patience": 30}),
    ("freeway", {"seconds": 5.0, "level": 7, "hard": True, "frameskip": 1}),
    ("freeway", {"seconds": 9.0, "level": 2}),
    ("enduro", {"day": 2.0, "first_day": 1, "later_days": 1, "days": 1}),
    ("asteroids", {"first_rocks": 11, "saucer_seconds": 1.0, "max_steps": 20, "ships": 2}),
    ("tetris", {"height": 4, "lines": 1, "max_steps": 20}),
    ("tetris", {"first_level": 20, "reward_piece": 0.1, "reward_hole": -0.1, "reward_bump": -0.1}),
    ("tetris", {"placements": True}),
    ("g2048", {"max_steps": 50}),
    ("connect4", {"depth": 0}),
    ("connect4", {"depth": 6}),
    ("go", {"size": 5, "komi": 0.5}),
    ("go", {"size": 9, "skill": 0.0, "max_moves": 60}),
    ("minesweeper", {"width": 4, "height": 2, "mines": 2, "max_steps": 2}),
    ("minesweeper", {"width": 30, "height": 16, "mines": 99, "max_steps": 8}),
    ("maze", {"size": 2, "vision": 1, "trail": False}),
    ("maze", {"size": 9, "loops": 0.3, "max_steps": 60}),
    ("cube", {"size": 2, "max_steps": 3}),
    ("boids", {"num_agents": 2, "neighbours": 1, "max_steps": 7}),
    ("boids", {"num_agents": 40, "width": 900.0, "height": 90.0, "vision": 20.0, "continuous": True, "max_steps": 60}),
    ("trash_pickup", {"num_agents": 1, "num_trash": 7, "num_bins": 1, "width": 3, "height": 3, "vision": 1}),
    ("trash_pickup", {"num_agents": 30, "width": 30, "height": 10, "num_trash": 200, "vision": 8, "max_steps": 40}),
    ("moba", {"self_play": True, "frameskip": 3, "max_ticks": 500}),
    ("moba", {"bot_skill": 0.5, "bot_range": 0.4, "max_ticks": 600, "frameskip": 2}),
    ("moba", {"demo": True, "self_play": True, "frameskip": 8, "tower_health": 20.0, "ancient_health": 20.0}),
    ("nmmo3", {"num_agents": 3, "num_foes": 0, "width": 12, "height": 12, "villages": 1, "vision": 1, "max_steps": 20}),
    ("nmmo3", {"num_agents": 20, "num_foes": 30, "width": 24, "height": 20, "villages": 2, "home": 1,
               "tier_distance": 1, "vision": 7, "max_steps": 150, "market_everywhere": False, "hunger": 1}),
    ("performance", {"num_agents": 3, "observation_size": 5, "length": 4, "delay": 1.0}),
]
KNOWN = {name for name, _ in VARIANTS}
ALL = [(name, SHORT.get(name, {})) for name in ocean.names() if name not in KNOWN] + MORE
SEEDLESS = {"bandit", "password", "stochastic", "multiagent", "performance"}  # all episodes look the same


class Masked(Vector):
    """A vector whose random actions are legal nine times in ten, where the environment says which ones are."""

    def random_actions(self, rng):
        super().random_actions(rng)
        if self.masks is None:
            return
        first = 0
        for i, n in enumerate(self.envs.action_heads):
            mask = self.masks[:, first : first + n]
            legal = np.where(mask, rng.random(mask.shape), -1).argmax(axis=1)
            self.actions[:, i] = np.where(rng.random(len(mask)) < 0.9, legal, self.actions[:, i])
            first += n

    def outputs(self):
        masks = () if self.masks is None else (self.masks,)
        return (*super().outputs(), *masks)


def count(name, options, large):
    """Fewer environments of those with many agents."""
    return max(2, large // ocean.load(name).create(1, settings=options).num_agents)


@pytest.mark.parametrize(("name", "options"), ALL)
def test_all_is_written_and_nothing_else(name, options):
    """Twins on buffers with different garbage see the same, so every element is written; guards stay whole."""
    num_envs = count(name, options, 5)
    twins = [Masked(name, num_envs, options), Masked(name, num_envs, options)]
    rng = np.random.default_rng(1)
    space, truncated = twins[0].envs.single_observation_space, 0
    for step in range(600):
        twins[0].random_actions(rng)
        twins[1].actions[:] = twins[0].actions
        for twin, byte in zip(twins, (0xFF, 0x7F), strict=True):
            twin.poison(byte)
            twin.step()
        for one, other in zip(twins[0].outputs(), twins[1].outputs(), strict=True):
            assert np.array_equal(one, other), step
        vector = twins[0]
        seen = vector.observations
        assert ((seen >= space.low) & (seen <= space.high)).all(), step
        assert np.isfinite(vector.rewards).all()
        assert set(np.unique(vector.terminals)) | set(np.unique(vector.truncations)) <= {0, 1}
        assert not (vector.terminals & vector.truncations).any()
        cut = vector.truncations == 1
        truncated += cut.sum()
        finals = vector.final_observations
        assert ((finals[cut] >= space.low) & (finals[cut] <= space.high)).all()
        assert (finals[~cut].view(np.uint8) == 0xFF).all(), "a final observation without a truncation"
        if vector.masks is not None:
            first = 0
            for n in vector.envs.action_heads:
                assert vector.masks[:, first : first + n].any(axis=1).all(), "no action is legal"
                first += n
    assert truncated > 0 or "max_steps" not in options
    for twin in twins:
        twin.check_guards()
    log = twins[0].envs.log()
    assert log["n"] > 0 and 0 <= log["perf"] <= 1
    assert twins[0].envs.log() == {}


@pytest.mark.parametrize(("name", "options"), ALL)
def test_same_trajectories_however_split(name, options):
    """Environments at once, by ranges in two threads, or as two vectors: the same bits."""
    more = count(name, options, 4)
    whole, ranged = Masked(name, more + 1, options, seed=5), Masked(name, more + 1, options, seed=5)
    parts = [Masked(name, 1, options, seed=5), Masked(name, more, options, seed=5, first_env=1)]
    other = Masked(name, more + 1, options, seed=6)
    agents = parts[0].envs.num_agents
    rng, differs = np.random.default_rng(2), not np.array_equal(whole.observations, other.observations)
    for _ in range(200):
        whole.random_actions(rng)
        ranged.actions[:] = other.actions[:] = whole.actions
        parts[0].actions[:], parts[1].actions[:] = whole.actions[:agents], whole.actions[agents:]
        for vector in (whole, other, *parts):
            vector.step()
        spans = ((0, 1), (1, more + 1))
        threads = [threading.Thread(target=ranged.envs.step, args=(ranged.rows, *span)) for span in spans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, output in enumerate(whole.outputs()):
            assert np.array_equal(output, ranged.outputs()[i])
            assert np.array_equal(output, np.concatenate([part.outputs()[i] for part in parts]))
        differs |= not np.array_equal(whole.observations, other.observations)
    assert differs or name in SEEDLESS


@pytest.mark.parametrize(("name", "options"), ALL)
def test_saved_state_continues_bit_for_bit(name, options):
    vector, rng = Masked(name, count(name, options, 3), options), np.random.default_rng(3)

    def play(actions):
        return [[array.copy() for array in vector.step(action).outputs()] for action in actions]

    play(np.stack([(vector.random_actions(rng), vector.actions.copy())[1] for _ in range(50)]))
    saved = vector.envs.save()
    actions = np.stack([(vector.random_actions(rng), vector.actions.copy())[1] for _ in range(150)])
    first = play(actions)
    vector.envs.load(saved)
    for one, other in zip(first, play(actions), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_nan_actions_do_not_break_an_environment():
    for name in ocean.names():
        options = {"continuous": True} if "continuous" in ocean.load(name).settings else {}
        vector = Vector(name, 2, options)
        if vector.envs.action_heads:
            continue
        for _ in range(300):
            vector.step(np.full(vector.actions.shape, np.nan))
            assert np.isfinite(vector.observations).all(), name
            assert np.isfinite(vector.rewards).all(), name


SANITIZED = """
import sys
import numpy as np
sys.path[:0] = ["tests", "."]
import test_ocean_all
for name, options in test_ocean_all.ALL:
    vector = test_ocean_all.Masked(name, test_ocean_all.count(name, options, 64), options, debug=True)
    space, rng = vector.envs.single_observation_space, np.random.default_rng(0)
    for _ in range(4000):
        vector.random_actions(rng)
        vector.step()
        assert vector.observations.min() >= space.low.min() and vector.observations.max() <= space.high.max(), name
    vector.check_guards()
    vector.envs.load(vector.envs.save())
    vector.envs.close()
print("clean")
"""


@pytest.mark.slow
def test_all_under_sanitizers():
    compiler = os.environ.get("CC") or "gcc"
    libraries = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
                 for name in ("libasan.so", "libubsan.so")]  # fmt: skip
    assert "clean" in run_python(SANITIZED, LD_PRELOAD=" ".join(libraries), ASAN_OPTIONS="detect_leaks=0",
                                 UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1")  # fmt: skip
