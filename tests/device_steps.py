"""An environment's device form beside its C library, step by step, on a CPU; every
byte must be the same.

    episodes = compare("breakout", steps=10_000)        # AssertionError with the first difference
    python tests/device_steps.py STEPS NAME...          # under the address sanitizer, see test_ocean_device.py
"""

import sys
from pathlib import Path

import cuda_on_a_cpu
import numpy as np
import pytest

import ocean
from fast import cuda_cpp
from ocean import device

NAMES = ("observations", "actions", "rewards", "terminals", "truncations",
         "final_observations", "valid", "action_masks")
POISON = 0xA5


def library(name):
    """Of an environment's name, or of a header's path."""
    header = Path(name) if str(name).endswith(".h") else ocean.FOLDER / name / f"{name}.h"
    # With products and sums apart, as OPTIONS say for the GPU. The C library of every day may join them.
    return ocean.Library(header, ocean.build(header, extra_flags=(cuda_on_a_cpu.APART, cuda_on_a_cpu.FLAGS[0])))


def arrays_for(envs):
    """The rows of one step, by name."""
    n, dtype = envs.num_agents, envs.observation_dtype
    seen = (n, *envs.observation_shape)
    return dict(zip(NAMES, (
        np.zeros(seen, dtype), np.zeros((n, envs.action_dims), envs.action_dtype),
        np.zeros(n, np.float32),
        np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros(seen, dtype),
        np.zeros(n, np.uint8) if envs.has_valid else None,
        np.zeros((n, sum(envs.action_heads)), np.uint8) if envs.has_action_masks else None),
                    strict=True))


def compare(name, steps, num_envs=3, seed=0):
    """Step both with the same random actions; returns the episodes that ended."""
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_a_cpu.install(patch)
        kernels = device.Kernels(library(name))
        with cuda_cpp.on_stream(cuda_on_a_cpu.STREAM):
            return same_steps(kernels, name, steps, num_envs, seed)


def same_steps(kernels, name, steps, num_envs, seed):
    host, other = (library(name).create(num_envs, seed) for _ in range(2))
    ours, theirs = arrays_for(host), arrays_for(other)
    rows = ocean.rows(*ours.values())
    table = other.rows_for_a_gpu(ocean.rows(*theirs.values()))
    random, episodes, resets = np.random.default_rng(seed), 0.0, np.empty(other.num_agents, np.uint8)
    for step in range(steps + 1):
        for arrays in (ours, theirs):  # whatever is not written stays as it is in both
            for key, array in arrays.items():
                if array is not None and key != "actions":
                    array.view(np.uint8).fill(POISON)
        if step == 0:
            host.reset(rows)
            kernels.launch("reset", num_envs, (other.address, table.ctypes.data))
        else:
            if host.action_heads:
                ours["actions"][:] = random.integers(0, host.action_heads, ours["actions"].shape)
            else:
                ours["actions"][:] = random.uniform(-1.2, 1.2, ours["actions"].shape)
            theirs["actions"][:] = ours["actions"]
            host.step(rows)
            kernels.launch("step", num_envs, (other.address, table.ctypes.data, resets.ctypes.data))
            assert np.array_equal(resets, theirs["terminals"] | theirs["truncations"])
        for key in NAMES:
            if ours[key] is not None:
                assert ours[key].tobytes() == theirs[key].tobytes(), f"{name}: {key} of step {step}"
        assert host.logs.tobytes() == other.logs.tobytes(), f"{name}: the log of step {step}"
        if step % 100 == 0 or step == steps:
            logs = np.empty(host.logs.shape, np.float32)
            before = other.logs.copy()
            kernels.launch("log", num_envs, (other.address, logs.ctypes.data))
            assert logs.tobytes() == before.tobytes() and not other.logs.any()
            means = host.log()
            assert means == other.log(sums=logs.astype(np.float64).sum(0).tolist())
            episodes += means.get("n", 0.0)
    host.close()
    other.close()
    return episodes


if __name__ == "__main__":
    cuda_on_a_cpu.FLAGS += ["-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    for name in sys.argv[2:]:
        print(name, compare(name, int(sys.argv[1])))
