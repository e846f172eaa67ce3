"""The kernels of a GPU, through the tests of the CPU's: on a GPU, or without one. Then numba's
drivers run in its simulator and, as a GPU's compiler leaves them, through tests/ptx.py; CUDA C++
runs behind tests/cuda_shim.h.

    NUMBA_ENABLE_CUDASIM=1 NUMBA_DISABLE_JIT=1 python -m pytest tests/test_cuda.py -m cudasim
    python -m pytest tests/test_cuda.py -m gpu
    python -m pytest tests/test_cuda.py             # PTX, with every access to memory looked at

and each of them compiled to PTX for three generations of GPUs.
"""

import functools
import inspect

import cuda_on_a_cpu
import ptx
import pytest
import test_kernel_promises
import test_kernels
import torch

import arena
import kernels
import optim

WHERE = ([pytest.param("simulator", marks=pytest.mark.cudasim)] if arena.SIMULATOR else
         ["ptx", pytest.param("gpu", marks=pytest.mark.gpu)])

KERNELS = ("sample", "advantage", "priorities", "draw", "gather", "mingru_step", "mingru_scan",
           "mingru_scan_grad",
           "advantage_moments", "normalisation", "ppo_loss", "write_back", "gradient_norm",
           "add_rows")


def on_the_gpu(function):
    """The kernel with every tensor on the GPU; what it wrote comes back into the caller's own."""

    def there(value):
        if isinstance(value, list):
            return [tuple(map(there, pair)) for pair in value]
        return value.cuda() if isinstance(value, torch.Tensor) else value

    def back(value, moved):
        if isinstance(value, list):
            for pair, other in zip(value, moved, strict=True):
                list(map(back, pair, other))
        elif isinstance(value, torch.Tensor):
            value.copy_(moved)

    @functools.wraps(function)
    def call(*args, **kwargs):
        names = inspect.signature(function).bind(*args, **kwargs).arguments
        moved = {name: value if name == "heads" else there(value) for name, value in names.items()}
        positional = [moved[name] for name in list(moved)[: len(args)]]
        result = function(*positional, **{name: moved[name] for name in kwargs})
        for name, value in names.items():
            back(value, moved[name])
        return result.cpu() if isinstance(result, torch.Tensor) else result

    return call


@pytest.fixture
def through_the_gpu(request, monkeypatch):
    if request.param != "gpu":
        cuda_on_a_cpu.install(monkeypatch)
    if request.param == "ptx":
        monkeypatch.setattr(arena, "SIMULATOR", True)
        monkeypatch.setattr(arena, "_launch", request.getfixturevalue("launcher"))
    elif request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        for name in KERNELS:
            monkeypatch.setattr(kernels, name, on_the_gpu(getattr(kernels, name)))


def borrowed(name, where=WHERE):
    """A test of tests/test_kernels.py or tests/test_kernel_promises.py, on the GPU."""
    test = (vars(test_kernels) | vars(test_kernel_promises))[f"test_{name}"]

    @functools.wraps(test)
    def call(*args, through_the_gpu, **kwargs):
        test(*args, **kwargs)

    parameters = list(inspect.signature(test).parameters.values())
    parameters.append(inspect.Parameter("through_the_gpu", inspect.Parameter.KEYWORD_ONLY))
    call.__signature__ = inspect.Signature(parameters)
    return pytest.mark.parametrize("through_the_gpu", where, indirect=True)(call)


for name in (
    "sample_discrete", "sample_continuous", "sample_deterministic_is_argmax_or_mean", "nan_sample",
    "nan_sample_masked_action_is_never_taken", "advantage",
    "advantage_of_values_relative_to_a_mean", "advantage_of_drawn_segments_equals_the_full_pass",
    "nan_advantage", "priorities", "draw", "draw_takes_no_segment_without_a_mass",
    "add_rows", "gather", "gather_normalises", "write_back",
    "mingru_scan_and_every_gradient", "mingru_scan_equals_the_step_by_step_rollout", "mingru_step",
    "nan_mingru", "mingru_in_bfloat16", "mingru_extreme_gates_stay_finite",
    "ppo_loss_and_every_gradient", "ppo_loss_of_drawn_segments", "ppo_loss_at_ratio_one",
    "ppo_loss_clamps_the_log_ratio", "ppo_loss_in_chunks_equals_the_whole",
    "ppo_loss_writes_only_its_chunk",
    "nan_ppo_loss", "advantage_moments_and_normalisation", "gradient_norm", "good_calls_are_good",
    "wrong_size_is_refused_by_name", "wrong_dtype_is_refused_by_name",
):
    globals()[f"test_{name}"] = borrowed(name)

# Too large for the simulator; on a GPU these are for bench/bench_kernels.py and
# the tests of the trainer.
for name in ("muon", "muon_zero_gradient_gives_a_zero_step_and_gaps_stay_zero",
             "nan_moments_norm_and_muon"):
    if not arena.SIMULATOR:
        globals()[f"test_{name}"] = borrowed(name, ["ptx"])


# --------------------------------------------------------------------------------------------------
# PTX, for machines without a GPU

SINGLE = {"_sample_discrete_cuda", "_sample_continuous_lanes", "_gather_cuda", "_mingru_step_cuda", "_write_back",
          "_nesterov_cuda", "_apply_cuda"}


@pytest.fixture(scope="module")
def launches():
    """name -> (driver, arguments) of every launch that the kernels make on a GPU."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_a_cpu.install(patch)
        patch.setattr(arena, "SIMULATOR", True)
        patch.setattr(arena, "_launch", lambda driver, lanes, arguments: seen.setdefault(
            driver.__name__, (driver, arguments)))
        for function, tensors, options in test_kernel_promises.good_calls().values():
            function(**tensors, **options)
        memory = kernels.Arena()
        memory.adopt(torch.nn.Linear(3, 2))
        optimizer = optim.Muon(memory, together=True)
        memory.allocate()
        optimizer.step(0.1)
    return seen


@pytest.mark.skipif(arena.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)],
                         ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_every_driver_compiles_to_ptx(launches, capability):
    pytest.importorskip("numba_cuda", reason="pip install -r requirements/test.txt")
    launcher = ptx.Launcher(capability)
    assert launches.keys() >= SINGLE and len(launches) >= len(SINGLE) + 1
    for name, (driver, arguments) in launches.items():
        code = launcher.compile(driver, arguments)
        assert f".target sm_{capability[0]}{capability[1]}" in code
        assert (".f64" in code) == (name not in SINGLE), (
            f"{name} computes in another precision than it should")
