"""What must hold for every environment in ocean/, each with the settings under which a
random agent sees all of it."""

import threading

import numpy as np
import pytest
from ocean_vector import VARIANTS, Vector, count, run_sanitized

import ocean
import ocean.__main__ as cli

SEEDLESS = {"password", "stochastic", "multiagent", "performance"}  # episodes look the same
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_the_check_finds_no_bug(name, options):
    """Also none of what it only notes and all environments shall have."""
    number = count(name, options, 5)
    agents = number * ocean.load(name).create(1, settings=options).num_agents
    problems, notes = cli.check(ocean.load(name), options, 600 * agents, number, seed=5)
    assert problems == [] and not any("WANTS_FINAL" in note for note in notes)
    assert any("another seed" in note for note in notes) == (name in SEEDLESS)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_ranges_of_environments_may_step_in_threads(name, options):
    """As two vectors, too; saved states fit no other vector."""
    number = count(name, options, 5)
    whole, split = (Vector(name, number, options, seed=5) for _ in range(2))
    parts = [Vector(name, 1, options, seed=5),
             Vector(name, number - 1, options, seed=5, first_env=1)]
    rng, first = np.random.default_rng(1), parts[0].envs.num_agents
    for step in range(150):
        whole.act(rng)
        actions = split.actions[:] = whole.actions.copy()
        whole.step()
        threads = [threading.Thread(target=split.envs.step, args=(split.rows, *span))
                   for span in ((0, 1), (1, number))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for part, rows in zip(parts, (actions[:first], actions[first:]), strict=True):
            part.step(rows)
        for field, array in whole.outputs.items():
            assert np.array_equal(array, split.outputs[field]), step
            assert np.array_equal(array, np.concatenate([part.outputs[field] for part in parts])), step
    with pytest.raises(ValueError, match=name):
        whole.envs.library.create(number + 1, settings=options).load(whole.envs.save())


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
