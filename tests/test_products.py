"""The matrix products of fast/tile.c against float64, and torch's linear maps through them.

    python -m pytest tests/test_products.py -k accumulate
"""

import concurrent.futures
import itertools
import math
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from conftest import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from arena import threads
from errors import ConfigError
from fast import products

assert products.find_problem() is None
PRECISIONS = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
SIZES = pytest.mark.parametrize("rows, inner, columns", [  # tile_main.c has many more
    (1, 1, 1), (7, 3, 5), (200, 1, 1), (64, 118, 64), (129, 64, 192), (65, 65, 193)])
CANARY = 7.0


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(array, half):
    """What a product reads, in float64: bfloat16 is the upper half of a float32, rounded."""
    if half:
        array = ((array.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
    return array.astype(np.float64)


def guarded(*shape):
    """An array of NaN, and what follows it in memory, which nobody may touch."""
    memory = np.full(math.prod(shape) + 64, CANARY, np.float32)
    array = memory[:-64].reshape(shape)
    array.fill(np.nan)
    return array, memory[-64:]


def packed(matrix, half):
    """`matrix` packed, within memory that is NaN where it is not written."""
    target = np.full(products.packed_size(*matrix.shape, half), np.nan, np.float32)
    target = target.view(np.uint32) if half else target
    products.pack(matrix, target)
    return target


def close(actual, expected, inner, behind=CANARY):
    """Within the rounding of sums of `inner` products of standard normals, nothing beyond the end."""
    assert (abs(actual - expected) <= 1e-6 * inner + 1e-6).all(), abs(actual - expected).max()
    assert (behind == np.float32(CANARY)).all(), "written beyond the end"


CHECKED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TILES = {  # what the same text is compiled for: (compiler, flags, what runs it)
    "the processor at hand": ("gcc", ["-march=native"], []),
    "AVX2": ("gcc", ["-march=haswell"], []),
    "AVX2 by clang": ("clang", ["-march=haswell"], []),
    "any x86-64": ("gcc", ["-march=x86-64"], []),
    "no byte beside": ("gcc", ["-march=native", *CHECKED], []),
    "NEON": ("aarch64-linux-gnu-gcc", ["-static"], ["qemu-aarch64-static"]),
}


@pytest.mark.parametrize("target", slow_but(TILES, "AVX2", "AVX2 by clang", "any x86-64", "NEON"))
def test_tile_on_every_processor(tmp_path, target):
    """Beside plain loops in double precision, at odd sizes (Debian: gcc-aarch64-linux-gnu, qemu-user-static)."""
    compiler, flags, runner = TILES[target]
    if not all(map(shutil.which, (compiler, *runner))):
        pytest.skip("its tools are not installed")
    if not runner and "native" not in flags[0] and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these flags are of another kind of processor")
    if "haswell" in flags[0] and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    source, program = Path(__file__).with_name("tile_main.c"), tmp_path / "tile"
    level = "-O1" if flags[-1] == CHECKED[-1] or target == "any x86-64" else "-O3"
    subprocess.run([compiler, level, "-fno-math-errno", *flags, "-o", program, source, "-lm"], check=True)
    done = subprocess.run([*runner, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@PRECISIONS
@SIZES
def test_multiply_rows(half, rows, inner, columns):
    x, weight, bias = numbers(0, rows, inner), numbers(1, inner, columns), numbers(2, columns)
    expected = bias + rounded(x, half) @ rounded(weight, half)
    (out, behind), weight = guarded(rows, columns), packed(weight, half)
    products.multiply_rows(rows, x, weight, bias, 0, out)
    close(out, expected, inner)
    before = out.astype(np.float64)
    products.multiply_rows(rows, x, weight, out.reshape(-1), columns, out)  # adds to it
    close(out, before + expected - bias, inner, behind)


@PRECISIONS
@SIZES
def test_accumulate_and_add_rows(half, rows, inner, columns):
    grad, x, gradient, total = (numbers(i, *shape) for i, shape in enumerate((
        (rows, columns), (rows, inner), (columns, inner), (columns,))))
    (of_weight, behind), (of_bias, beyond) = guarded(columns, inner), guarded(columns)
    of_weight[:], of_bias[:] = gradient, total
    products.accumulate_rows(half, grad, x, of_weight)
    close(of_weight, gradient + rounded(grad, half).T @ rounded(x, half), rows, behind)
    products.add_row_sums(grad, of_bias)
    close(of_bias, total + grad.sum(0, dtype=np.float64), rows, beyond)


@PRECISIONS
def test_any_split_gives_the_same_bits(half):
    """Rows do not depend on how many there are beside them: a rollout's buffers may be of any size."""
    x, weight, bias, results = numbers(0, 300, 70), packed(numbers(2, 70, 130), half), numbers(3, 130), []
    for pieces in (1, 2, 5, 300):
        bounds = [300 * i // pieces for i in range(pieces + 1)]
        results.append(np.empty((300, 130), np.float32))
        with concurrent.futures.ThreadPoolExecutor(pieces) as pool:
            for first, last in itertools.pairwise(bounds):
                pool.submit(products.multiply_rows, last - first, x[first:], weight, bias, 0, results[-1][first:])
    assert all(np.array_equal(result, results[0]) for result in results)


@PRECISIONS
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(half, poison):
    """The odd step of a pair, the rows beside and the columns beyond must not take part."""
    x, weight = numbers(0, 7, 5), numbers(1, 5, 20)
    x[3, 4] = poison
    out = np.empty((7, 20), np.float32)
    products.multiply_rows(7, x, packed(weight, half), np.zeros(20, np.float32), 0, out)
    assert not np.isfinite(out[3]).any() and np.isfinite(np.delete(out, 3, 0)).all()
    gradient = np.zeros((20, 5), np.float32)
    products.accumulate_rows(half, numbers(2, 7, 20), x, gradient)
    assert not np.isfinite(gradient[:, 4]).any() and np.isfinite(gradient[:, :4]).all()


# -- torch's linear map


def slopes(tensors):
    """The linear map of the tensors, and the gradients of a random sum of it."""
    out = functional.linear(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return out, torch.autograd.grad(out, wanted, grad)


def case(rows, inputs, outputs, bias=True, frozen=()):
    torch.manual_seed(0)
    shapes = (*rows, inputs), (outputs, inputs), (outputs,)
    return [None if i == 2 and not bias else torch.randn(shape, requires_grad=i not in frozen)
            for i, shape in enumerate(shapes)]


@settings(max_examples=30, deadline=None)
@given(rows=st.sampled_from([(256,), (2500,), (7, 300), (2, 3, 500)]), inputs=st.integers(150, 400),
       outputs=st.integers(60, 200), bias=st.booleans(), frozen=st.sets(st.integers(0, 2), max_size=2))
def test_a_linear_map_is_torchs(rows, inputs, outputs, bias, frozen):
    if not bias and frozen == {0, 1}:
        frozen = {0}  # something must have a gradient
    tensors = case(rows, inputs, outputs, bias, frozen)
    expected, expected_slopes = slopes([t if t is None else t.double().detach().requires_grad_(t.requires_grad)
                                        for t in tensors])
    with products.Tiles():
        out, found = slopes(tensors)
    assert type(out.grad_fn).__name__ == "LinearBackward"
    torch.testing.assert_close(out.double(), expected, atol=1e-6 * inputs, rtol=0)
    inner = [outputs if i == 0 else math.prod(rows) for i, tensor in enumerate(tensors)
             if tensor is not None and tensor.requires_grad]
    for size, one, other in zip(inner, found, expected_slopes, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-6 * size, rtol=0)


def test_threads_do_not_change_a_bit():
    tensors, found = case((5000,), 64, 192), []
    for count in (1, 2, 3):
        with threads(count), products.Tiles():
            out, grads = slopes(tensors)
            found.append([out, *grads])
    assert all(all(map(torch.equal, found[0], others)) for others in found[1:])


@pytest.mark.parametrize("lay", [lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x[::2],
                                 lambda x: x.expand(3, *x.shape)])
def test_any_layout(lay):
    x, weight, bias = case((600, 5), 64, 192)
    tensors = lay(x.detach()).requires_grad_(), weight.detach().t().contiguous().t().requires_grad_(), bias
    plain, plain_slopes = slopes(tensors)
    with products.Tiles():
        found, found_slopes = slopes(tensors)
    assert type(found.grad_fn).__name__ == "LinearBackward"
    torch.testing.assert_close([found, *found_slopes], [plain, *plain_slopes], atol=5e-3, rtol=1e-5)


LAYER, SQUARE, X = nn.Linear(64, 192), nn.Linear(64, 64), torch.randn(3000, 64)


def gradient_penalty():
    x = X.clone().requires_grad_()
    slope, = torch.autograd.grad(LAYER(x).tanh().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), [*LAYER.parameters()])


def checkpointed():  # square: transposed it would pass unnoticed
    x = X.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x: SQUARE(x).relu(), x, use_reentrant=False)
    return [out, *torch.autograd.grad(out, [x, *SQUARE.parameters()], out.detach())]


def forward_derivative():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X.flip(0))
        return [torch.autograd.forward_ad.unpack_dual(functional.linear(dual, LAYER.weight)).tangent]


def mapped():
    weights = torch.stack([LAYER.weight, -LAYER.weight, LAYER.weight + 1])
    return [torch.func.vmap(lambda weight: functional.linear(X, weight))(weights)]


@pytest.mark.parametrize("function", [gradient_penalty, checkpointed, forward_derivative, mapped])
def test_what_surrounds_a_linear_map_is_as_without(function):
    expected = function()
    with products.Tiles():
        found = function()
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (), (3000, 1)])
def test_a_bias_of_another_shape_and_autocast_are_torchs(shape):
    bias = torch.randn(shape)
    expected = functional.linear(X, LAYER.weight, bias)
    with products.Tiles():
        assert torch.equal(functional.linear(X, LAYER.weight, bias), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert LAYER(X).dtype == torch.bfloat16
        with pytest.raises(RuntimeError):
            functional.linear(torch.randn(3000, 63), torch.randn(192, 64))


@pytest.mark.parametrize("tensors", [
    (torch.randn(200, 64), torch.randn(192, 64)), (torch.randn(3000, 64), torch.randn(4, 64)),
    (torch.randn(300, 20), torch.randn(20, 20)), (torch.randn(300, 512), torch.randn(512, 512)),
    (torch.randn(3000, 64).double(), torch.randn(192, 64).double()),
    (torch.randn(3000, 64).bfloat16(), torch.randn(192, 64).bfloat16()),
    (torch.randn(192 * 64, device="meta").expand(3000, -1)[:, :64], torch.randn(192, 64, device="meta"))])
def test_what_is_not_worthwhile_is_torchs(tensors):
    assert not products.is_worthwhile(*tensors)
    with products.Tiles():
        functional.linear(*tensors)


@pytest.mark.parametrize("rows", [0, 50_000])
def test_gradients_of_any_number_of_rows(rows, monkeypatch):
    """Many take a bounded number of lanes."""
    grad, x = torch.randn(rows, 3), torch.randn(rows, 5)
    monkeypatch.setattr(products, "MAX_LANES", 7)
    of_weight, of_bias = products.gradients(grad, x)
    torch.testing.assert_close(of_weight, grad.t() @ x, atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(of_bias, grad.sum(0), atol=1e-2, rtol=1e-4)


def test_wrong_sizes_and_no_compiler(monkeypatch):
    def fails(*_):
        raise ConfigError("no compiler\nat all")

    with pytest.raises(RuntimeError):
        products.multiply(torch.ones(4, 4), torch.ones(4, 3), torch.ones(2))
    monkeypatch.setattr(products.ocean, "compile_library", fails)
    assert products.find_problem.__wrapped__() == "no compiler"
    monkeypatch.setattr(products, "find_problem", lambda: "compiler")
    with pytest.raises(RuntimeError, match="compiler"):
        products.multiply(torch.ones(2, 2), torch.ones(2, 2))
