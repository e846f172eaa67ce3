"""Step an environment's device form beside its C library on a CPU; every byte must be the same.

    episodes = compare("breakout", steps=10_000)     # AssertionError with the first difference
    python tests/device_steps.py STEPS NAME...       # under the address sanitizer
"""

import sys
from pathlib import Path

import cuda_on_a_cpu
import numpy as np
import pytest

import ocean
import vector


def library(name):
    """Of an environment's name, or of a header's path."""
    header = Path(name) if str(name).endswith(".h") else ocean.FOLDER / name / f"{name}.h"
    # With products and sums apart, as OPTIONS say for the GPU. The C library of every day may join them.
    return ocean.Library(header, ocean.build(header, extra_flags=(cuda_on_a_cpu.APART, cuda_on_a_cpu.FLAGS[0])))


def act(vecenv, random):
    if vecenv.action_heads:
        return random.integers(0, vecenv.action_heads, (vecenv.num_agents, vecenv.action_dims))
    return random.uniform(-1, 1, (vecenv.num_agents, vecenv.action_dims))


def both(name, num_envs=6, seed=3, device="cpu", **settings):
    return [vector.make(library(name), num_envs, num_threads=1, seed=seed, **settings, **place)
            for place in ({"num_buffers": 1}, {"device": device})]


def step_both(host, other, random):
    """Step both with the same random actions; return the episodes that ended."""
    actions = act(host, random)
    logs = [vecenv.step(actions)[4] for vecenv in (host, other)]
    for name, array in vars(host.storage).items():
        assert array is None or array.tobytes() == getattr(other.storage, name).tobytes(), name
    assert logs[0] == logs[1]
    return sum(log["n"] for log in logs[0])


def compare(name, steps, num_envs=3, seed=0):
    """Step both from a reset on; return the episodes that ended."""
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_a_cpu.install(patch)
        host, other = both(name, num_envs, seed)
        with host, other:
            for vecenv in (host, other):
                vecenv.reset(seed=seed)
            random = np.random.default_rng(seed)
            return sum(step_both(host, other, random) for _ in range(steps))


if __name__ == "__main__":
    cuda_on_a_cpu.FLAGS += ["-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    for name in sys.argv[2:]:
        print(name, compare(name, int(sys.argv[1])))
