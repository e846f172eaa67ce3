"""The kernels of a GPU, through the tests of the CPU's. Without a GPU, CUDA C++ runs behind
tests/cuda_shim.h, and numba's drivers in its simulator and through tests/ptx.py.

    NUMBA_ENABLE_CUDASIM=1 NUMBA_DISABLE_JIT=1 python -m pytest tests/test_cuda.py -m cudasim
    python -m pytest tests/test_cuda.py -m gpu
    python -m pytest tests/test_cuda.py             # PTX, with every access to memory looked at
"""

import functools
import inspect

import cuda_on_a_cpu
import kernel_cases
import ptx
import pytest
import test_kernels
import test_optim
import test_recurrent
import torch

import arena
import kernels
from fast import recurrent

WHERE = ([pytest.param("simulator", marks=pytest.mark.cudasim)] if arena.SIMULATOR else
         ["ptx", pytest.param("gpu", marks=pytest.mark.gpu)])

KERNELS = ("sample", "advantage", "priorities", "draw_segments", "gather", "mingru_step", "mingru_scan",
           "mingru_scan_grad", "masked_moments", "normalisation", "ppo_loss", "write_back", "gradient_norm",
           "add_bias_gradients")


def on_the_gpu(function):
    """The kernel with every tensor on the GPU; what it wrote comes back into the caller's own."""

    def there(value):
        if isinstance(value, list):
            return [tuple(map(there, pair)) for pair in value]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype,
                                   device="cuda").copy_(value)

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
    return request.param


def borrowed(name, where):
    """A test of a CPU's kernels or of Muon, on the GPU."""
    test = (vars(test_kernels) | vars(test_optim))[f"test_{name}"]

    @functools.wraps(test)
    def call(*args, through_the_gpu, **kwargs):
        test(*args, **kwargs)

    parameters = list(inspect.signature(test).parameters.values())
    parameters.append(inspect.Parameter("through_the_gpu", inspect.Parameter.KEYWORD_ONLY))
    call.__signature__ = inspect.Signature(parameters)
    return pytest.mark.parametrize("through_the_gpu", where, indirect=True)(call)


SIMULATED = ("values", "nan_is_never_lost", "a_masked_action_is_never_taken_for_a_nan")
for name in SIMULATED if arena.SIMULATOR else (
        *SIMULATED, "bfloat16_rounds_only_what_is_written", "loss_in_chunks",
        "explained_variance", "a_wrong_argument_is_refused"):
    globals()[f"test_{name}"] = borrowed(name, WHERE)
# On a GPU Muon is for bench/bench_kernels.py and the tests of the trainer.
for name in ("muon", "a_zero_gradient_is_a_zero_step_and_gaps_stay_zero",
             "a_gradient_that_is_not_finite_changes_nothing"):
    globals()[f"test_{name}"] = borrowed(name, WHERE[:1])


@test_recurrent.KINDS
@pytest.mark.parametrize("sizes", [(5, 7, 3, 33, 2), (1, 129, 2, 1)], ids=str)
@pytest.mark.parametrize("through_the_gpu", WHERE, indirect=True)
def test_a_recurrent_layer(kind, sizes, through_the_gpu):
    """Against torch's layer in float64, with resets and inactive agents: outputs, memory, gradients.

    sizes: T, N, inputs, hidden, layers; N · hidden is no multiple of a block.
    """
    case = test_recurrent.case(kind, *sizes)
    here = test_recurrent.moved("cuda" if through_the_gpu == "gpu" else "cpu", *case)
    assert recurrent.is_supported(*here[:2])
    found = test_recurrent.results(recurrent.scan, *here)
    expected = test_recurrent.results(test_recurrent.by_steps,
                                      *test_recurrent.moved(torch.float64, *case))
    test_recurrent.close([tensor.cpu() for tensor in found],
                         [tensor.float() for tensor in expected])


# -- PTX, for machines without a GPU

SINGLE = {"_sample_discrete_cuda", "_sample_continuous_lanes", "_gather_cuda", "_mingru_step_cuda", "_write_back",
          "_nesterov_lanes", "_apply_lanes", "_lstm_cuda", "_lstm_grad_cuda", "_gru_cuda", "_gru_grad_cuda"}


@pytest.fixture(scope="module")
def launches():
    """name -> (driver, arguments) of every launch that the kernels make on a GPU."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_a_cpu.install(patch)
        patch.setattr(arena, "SIMULATOR", True)
        patch.setattr(arena, "_launch", lambda driver, lanes, arguments: seen.setdefault(
            driver.__name__, (driver, arguments)))
        for make in kernel_cases.SMALL.values():
            make().run()
        test_optim.made([(3, 2), (2,)], batched=True)[2].step(torch.tensor(0.1), torch.zeros(()))
        for kind in recurrent.SCANS:
            test_recurrent.results(recurrent.scan, *test_recurrent.case(kind, 2, 3, 4, 5))
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
