"""What must hold for every environment in ocean/, each with the settings under which a
random agent sees all of it."""

import threading

import numpy as np
import pytest
from ocean_vector import VARIANTS, Vector, count, run_sanitized

import ocean

# all episodes look the same
SEEDLESS = {"bandit", "password", "stochastic", "multiagent", "performance"}


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_all_is_written_and_nothing_else(name, options):
    """Twins on buffers with different garbage see the same, so every element is
    written; guards stay whole."""
    num_envs = count(name, options, 5)
    twins = [Vector(name, num_envs, options), Vector(name, num_envs, options)]
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
        assert (finals[~cut].view(np.uint8) == 0xFF).all(), (
            "a final observation without a truncation")
        assert (vector.valid == 1).all() or vector.envs.has_valid
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


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_same_trajectories_however_split(name, options):
    """Environments at once, by ranges in two threads, or as two vectors: the same bits."""
    more = count(name, options, 4)
    whole, ranged = Vector(name, more + 1, options, seed=5), Vector(name, more + 1, options, seed=5)
    parts = [Vector(name, 1, options, seed=5), Vector(name, more, options, seed=5, first_env=1)]
    other = Vector(name, more + 1, options, seed=6)
    agents = parts[0].envs.num_agents
    rng, differs = np.random.default_rng(2), not np.array_equal(whole.observations,
                                                                other.observations)
    for _ in range(200):
        whole.random_actions(rng)
        ranged.actions[:] = other.actions[:] = whole.actions
        parts[0].actions[:], parts[1].actions[:] = whole.actions[:agents], whole.actions[agents:]
        for vector in (whole, other, *parts):
            vector.step()
        spans = ((0, 1), (1, more + 1))
        threads = [threading.Thread(target=ranged.envs.step, args=(ranged.rows, *span))
                   for span in spans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, output in enumerate(whole.outputs()):
            assert np.array_equal(output, ranged.outputs()[i])
            assert np.array_equal(output, np.concatenate([part.outputs()[i] for part in parts]))
        differs |= not np.array_equal(whole.observations, other.observations)
    assert differs or name in SEEDLESS


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_saved_state_continues_bit_for_bit(name, options):
    vector, rng = Vector(name, count(name, options, 3), options), np.random.default_rng(3)

    def play(actions):
        return [[array.copy() for array in vector.step(action).outputs()] for action in actions]

    play(np.stack([(vector.random_actions(rng), vector.actions.copy())[1] for _ in range(50)]))
    saved = vector.envs.save()
    actions = np.stack([(vector.random_actions(rng), vector.actions.copy())[1] for _ in range(150)])
    first = play(actions)
    vector.envs.load(saved)
    for one, other in zip(first, play(actions), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(ValueError, match="was not saved from"):
        ocean.load(name).create(1, settings=options).load(saved)


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
from ocean_vector import VARIANTS, Vector, count
for name, options in VARIANTS:
    vector = Vector(name, count(name, options, 64), options, debug=True)
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
    assert "clean" in run_sanitized(SANITIZED)
