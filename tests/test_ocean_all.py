"""What must hold for every environment in ocean/, each with the settings under which a
random agent sees all of it."""

import threading

import numpy as np
import pytest
from ocean_vector import VARIANTS, Vector, count, run_sanitized

import ocean

# all episodes look the same
SEEDLESS = {"bandit", "password", "stochastic", "multiagent", "performance"}
SPLIT_STEPS, SAVE_AT, STEPS = 150, 60, 600
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)]


def check_step(vector, byte):
    """What a step has written, over buffers full of `byte`."""
    space, envs = vector.envs.single_observation_space, vector.envs
    seen, finals = vector.observations, vector.final_observations
    assert ((seen >= space.low) & (seen <= space.high)).all()
    assert np.isfinite(vector.rewards).all()
    assert set(np.unique(vector.terminals)) | set(np.unique(vector.truncations)) <= {0, 1}
    assert not (vector.terminals & vector.truncations).any()
    assert (vector.valid == 1).all() or envs.has_valid
    cut = vector.truncations == 1
    assert ((finals[cut] >= space.low) & (finals[cut] <= space.high)).all()
    assert (finals[~cut].view(np.uint8) == byte).all(), "a final observation without a truncation"
    if vector.action_masks is not None:
        heads = np.cumsum([0, *envs.action_heads[:-1]])
        assert np.add.reduceat(vector.action_masks, heads, axis=1, dtype=int).all(), "no action is legal"
    return cut.sum()


def check_finals(full, plain, byte):
    """With every_final each episode's end has one, within bounds, and those of cut ones are as
    without it."""
    space, cut = full.envs.single_observation_space, full.truncations == 1
    ended = (full.truncations | full.terminals) == 1
    assert np.array_equal(full.final_observations[cut], plain.final_observations[cut])
    finals = full.final_observations.view(np.uint8).reshape(len(ended), -1)
    assert not (finals[ended] == byte).all(axis=1).any() and (finals[~ended] == byte).all()
    last = full.final_observations[ended]
    assert ((last >= space.low) & (last <= space.high)).all()


def step_in_threads(vector, *spans):
    threads = [threading.Thread(target=vector.envs.step, args=(vector.rows, *span)) for span in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_the_contract(name, options):
    """Twins over different garbage write the same, so all is written; guards stay whole. The same
    bits by ranges in two threads, as two vectors, with every_final, and after load(save())."""
    number = count(name, options, 5)
    plain, full, other = (Vector(name, number, options, seed=seed) for seed in (5, 5, 6))
    full.envs.every_final()
    parts = [Vector(name, 1, options, seed=5),
             Vector(name, number - 1, options, seed=5, first_env=1)]
    first = parts[0].envs.num_agents
    rng, truncated, differs, played = np.random.default_rng(1), 0, False, []
    for step in range(STEPS):
        if step == SAVE_AT:
            saved = plain.envs.save()
        differs |= not np.array_equal(plain.observations, other.observations)
        plain.act(rng)
        actions = plain.actions.copy()
        plain.poison(0xFF)
        full.poison(0x7F)
        plain.step()
        full.actions[:] = actions
        if step < SPLIT_STEPS:
            step_in_threads(full, (0, 1), (1, number))
            for part, rows in zip(parts, (actions[:first], actions[first:]), strict=True):
                part.step(rows)
            other.step(actions)
            for whole, *pieces in zip(plain.outputs.values(), *(part.outputs.values() for part in parts), strict=True):
                assert np.array_equal(whole, np.concatenate(pieces)), step
            if step >= SAVE_AT:
                played.append((actions, [array.copy() for array in plain.outputs.values()]))
        else:
            full.step()
        for one, two in zip(plain.outputs.values(), full.outputs.values(), strict=True):
            assert np.array_equal(one, two), step
        truncated += check_step(plain, 0xFF)
        check_finals(full, plain, 0x7F)
    assert differs or name in SEEDLESS
    assert truncated > 0 or "max_steps" not in options
    log = plain.envs.log()
    assert log["n"] > 0 and 0 <= log["perf"] <= 1
    assert plain.envs.log() == {}
    assert {"perf", "score", "episode_return", "episode_length", "n"} <= log.keys()

    plain.envs.load(saved)
    for actions, outputs in played:
        plain.step(actions)
        for one, two in zip(outputs, plain.outputs.values(), strict=True):
            assert np.array_equal(one, two)
    for vector in (plain, full, other, *parts):
        assert vector.guards_are_whole()
    with pytest.raises(ValueError, match=name):
        other.envs.library.create(number + 1, settings=options).load(saved)


@pytest.mark.parametrize("name", ocean.names())
def test_nan_actions_do_no_harm(name):
    options = {"continuous": True} if "continuous" in ocean.load(name).settings else {}
    vector = Vector(name, 2, options)
    if vector.envs.action_heads:
        return
    for _ in range(300):
        vector.step(np.full(vector.actions.shape, np.nan))
        assert np.isfinite(vector.observations).all()
        assert np.isfinite(vector.rewards).all()


SANITIZED = """
import sys
import numpy as np
sys.path[:0] = ["tests", "."]
from ocean_vector import VARIANTS, Vector, count
for name, options in VARIANTS:
    vector = Vector(name, count(name, options, 64), options, debug=True)
    rng = np.random.default_rng(0)
    for _ in range(4000):
        vector.act(rng)
        vector.step()
    assert vector.guards_are_whole()
    vector.envs.load(vector.envs.save())
    vector.envs.close()
print("clean")
"""


@pytest.mark.slow
def test_all_under_sanitizers():
    assert "clean" in run_sanitized(SANITIZED)
