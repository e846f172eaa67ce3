"""The matrix products of fast/tile.c against float64 for all kinds of shapes, and torch's linear maps through them.

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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import kernels
from fast import products

assert products.missing() is None

PRECISIONS = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
SIZES = st.integers(1, 150)
FEW = settings(max_examples=40)
CANARY = 7.0


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(array, half):
    """What a product reads, in float64: bfloat16 is the upper half of a float32, rounded."""
    if half:
        array = ((array.view(np.uint32) + np.uint32(0x8000))
                 & np.uint32(0xFFFF0000)).view(np.float32)
    return array.astype(np.float64)


def guarded(*shape):
    """An array of NaN, and what lies behind it in memory, which nobody may touch."""
    memory = np.full(math.prod(shape) + 64, CANARY, np.float32)
    array, behind = memory[:-64].reshape(shape), memory[-64:]
    array.fill(np.nan)
    return array, behind


def packed(matrix, half):
    """`matrix` packed, within memory that is NaN where it is not written."""
    target = np.full(products.packed_size(*matrix.shape, half), np.nan, np.float32)
    target = target.view(np.uint32) if half else target
    products.pack(matrix, target)
    return target


def close(actual, expected, inner):
    """Within the rounding of sums of `inner` products of standard normals."""
    assert (abs(actual - expected) <= 1e-6 * inner + 1e-6).all(), abs(actual - expected).max()


CHECKED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TILES = {  # what the same text is compiled for: (compiler, flags, what runs it)
    "the processor at hand": ("gcc", ["-march=native"], []),
    "AVX2": ("gcc", ["-march=haswell"], []),
    "AVX2 by clang": ("clang", ["-march=haswell"], []),
    "any x86-64": ("gcc", ["-march=x86-64"], []),
    "no byte beside": ("gcc", ["-march=native", *CHECKED], []),
    "NEON": ("aarch64-linux-gnu-gcc", ["-static"], ["qemu-aarch64-static"]),
}


@pytest.mark.parametrize("target", TILES)
def test_tile_on_every_processor(tmp_path, target):
    """fast/tile.c beside plain loops in double precision, at awkward sizes. Debian's
    gcc-aarch64-linux-gnu and qemu-user-static stand for a processor with NEON."""
    compiler, flags, runner = TILES[target]
    missing = [tool for tool in (compiler, *runner) if not shutil.which(tool)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if not runner and "native" not in flags[0] and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these flags are of another kind of processor")
    if "haswell" in flags[0] and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    source, program = Path(__file__).with_name("tile_main.c"), tmp_path / "tile"
    level = "-O1" if flags[-1] == CHECKED[-1] else "-O3"
    subprocess.run([compiler, level, "-fno-math-errno", *flags, "-o", program, source, "-lm"],
                   check=True)
    done = subprocess.run([*runner, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@PRECISIONS
@FEW
@given(rows=SIZES, inner=SIZES, columns=SIZES)
@example(rows=200, inner=1, columns=1)
@example(rows=64, inner=118, columns=64)
@example(rows=65, inner=65, columns=193)
def test_multiply_rows(half, rows, inner, columns):
    x, weight, bias = numbers(0, rows, inner), numbers(1, inner, columns), numbers(2, columns)
    expected = bias + rounded(x, half) @ rounded(weight, half)
    (out, behind), weight = guarded(rows, columns), packed(weight, half)
    products.multiply_rows(rows, x, weight, bias, 0, out)
    close(out, expected, inner)
    before = out.astype(np.float64)
    products.multiply_rows(rows, x, weight, out.reshape(-1), columns, out)  # adds to it
    close(out, before + expected - bias, inner)
    part = guarded(rows, columns)[0]
    products.multiply_rows(rows // 2, x, weight, bias, 0, part)
    close(part[: rows // 2], expected[: rows // 2], inner)
    assert np.isnan(part[rows // 2 :]).all()
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
@FEW
@given(rows=st.integers(0, 400), outputs=SIZES, inputs=SIZES)
@example(rows=129, outputs=192, inputs=64)
@example(rows=1, outputs=4, inputs=118)
def test_accumulate_rows(half, rows, outputs, inputs):
    grad, x = numbers(0, rows, outputs), numbers(1, rows, inputs)
    gradient, behind = guarded(outputs, inputs)
    gradient[:] = numbers(2, outputs, inputs)
    expected = gradient + rounded(grad, half).T @ rounded(x, half)
    products.accumulate_rows(half, grad, x, gradient)
    close(gradient, expected, rows)
    assert (behind == CANARY).all(), "written beyond the end"


@FEW
@given(rows=st.integers(0, 400), columns=SIZES)
def test_add_rows(rows, columns):
    x = numbers(0, rows, columns)
    total, behind = guarded(columns)
    total[:] = numbers(1, columns)
    expected = total.astype(np.float64) + x.sum(0, dtype=np.float64)
    products.add_rows(x, total)
    close(total, expected, rows)
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
def test_any_split_gives_the_same_bits(half):
    """Rows do not depend on how many there are beside them: a rollout's
    buffers may be of any size."""
    x, weight, bias = numbers(0, 300, 70), packed(numbers(2, 70, 130), half), numbers(3, 130)
    results = []
    for pieces in (1, 2, 5, 300):
        bounds = [300 * i // pieces for i in range(pieces + 1)]
        out = np.empty((300, 130), np.float32)
        with concurrent.futures.ThreadPoolExecutor(pieces) as pool:
            for first, last in itertools.pairwise(bounds):
                pool.submit(products.multiply_rows, last - first, x[first:], weight, bias, 0,
                            out[first:])
        results.append(out)
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


# --------------------------------------------------------------------------------------------------
# torch's linear map


def of_tiles(tensor):
    return type(tensor.grad_fn).__name__ == "LinearBackward"


def slopes(function, tensors, **options):
    """The result of function(*tensors), and the gradients of a random sum of it."""
    out = function(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return out, torch.autograd.grad(out, wanted, grad, **options)


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
    expected, expected_slopes = slopes(functional.linear, [t.double().detach().requires_grad_(t.requires_grad)
                                                           if t is not None else None for t in tensors])
    with products.Tiles():
        found, found_slopes = slopes(functional.linear, tensors)
    assert of_tiles(found)
    torch.testing.assert_close(found.double(), expected, atol=1e-6 * inputs, rtol=0)
    wanted = [i for i, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad]
    for i, one, other in zip(wanted, found_slopes, expected_slopes, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-6 * (math.prod(rows) if i else outputs), rtol=0)


def test_threads_do_not_change_a_bit():
    tensors, found = case((5000,), 64, 192), []
    for threads in (1, 2, 3):
        with kernels.threads(threads), products.Tiles():
            out, grads = slopes(functional.linear, tensors)
            found.append([out, *grads])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("lay", [lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x[::2],
                                 lambda x: x.expand(3, *x.shape)])
def test_any_layout(lay):
    x, weight, bias = case((600, 5), 64, 192)
    tensors = lay(x.detach()).requires_grad_(), weight.detach().t().contiguous().t().requires_grad_(), bias
    plain, plain_slopes = slopes(functional.linear, tensors)
    with products.Tiles():
        found, found_slopes = slopes(functional.linear, tensors)
    assert of_tiles(found)
    torch.testing.assert_close([found, *found_slopes], [plain, *plain_slopes], atol=5e-3, rtol=1e-5)


def test_a_gradient_of_the_gradient():
    """A gradient penalty, as train.loss may have, is that of torch's products."""
    layer, x = nn.Linear(64, 192), torch.randn(2000, 64, requires_grad=True)

    def penalty():
        slope, = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [*layer.parameters()])

    expected = penalty()
    with products.Tiles():
        torch.testing.assert_close(penalty(), expected, atol=1e-3, rtol=1e-4)


def test_what_surrounds_a_layer_runs_as_it_stands():
    x, seen = torch.randn(3000, 64), []
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 192))
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out) or 2 * out)
    expected = layer(x)
    with products.Tiles():
        found = layer(x)
    assert of_tiles(seen[1]) and not of_tiles(seen[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    expected, = torch.autograd.grad(expected.square().sum(), layer.parametrizations.weight.original0)
    found, = torch.autograd.grad(found.square().sum(), layer.parametrizations.weight.original0)
    torch.testing.assert_close(found, expected, atol=1e-1, rtol=1e-3)


@pytest.mark.parametrize("tensors", [
    (torch.randn(200, 64), torch.randn(192, 64)), (torch.randn(3000, 64), torch.randn(4, 64)),
    (torch.randn(300, 20), torch.randn(20, 20)), (torch.randn(300, 512), torch.randn(512, 512)),
    (torch.randn(3000, 64).double(), torch.randn(192, 64).double()),
    (torch.randn(3000, 64).bfloat16(), torch.randn(192, 64).bfloat16()),
    (torch.randn(192 * 64, device="meta").expand(3000, -1)[:, :64], torch.randn(192, 64, device="meta"))])
def test_what_is_not_worthwhile_is_torchs(tensors):
    assert not products.worthwhile(*tensors)
    with products.Tiles():
        functional.linear(*tensors)


def test_transforms_of_torch_func_are_torchs():
    x, weights = torch.randn(3000, 64), torch.randn(3, 192, 64)
    expected = torch.stack([functional.linear(x, weight) for weight in weights])
    with products.Tiles():
        found = torch.func.vmap(lambda weight: functional.linear(x, weight))(weights)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_forward_derivatives_are_torchs():
    x, weight, slope = torch.randn(3000, 64), torch.randn(192, 64), torch.randn(3000, 64)
    with products.Tiles(), torch.autograd.forward_ad.dual_level():
        out = functional.linear(torch.autograd.forward_ad.make_dual(x, slope), weight)
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(found, functional.linear(slope, weight), atol=1e-4, rtol=1e-4)


def test_many_rows_take_a_bounded_number_of_lanes(monkeypatch):
    grad, x = torch.randn(50_000, 3), torch.randn(50_000, 5)
    monkeypatch.setattr(products, "PARTS", 7)
    of_weight, of_bias = products.gradients(grad, x)
    torch.testing.assert_close(of_weight, grad.t() @ x, atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(of_bias, grad.sum(0), atol=1e-2, rtol=1e-4)


def test_a_forward_that_is_checkpointed_runs_anew_through_the_same():
    layer, x = nn.Linear(64, 64), torch.randn(3000, 64, requires_grad=True)  # square: transposed it would pass unseen

    def found():
        out = torch.utils.checkpoint.checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False)
        layer.zero_grad()
        torch.autograd.backward([out], [out.detach()])
        return [parameter.grad.clone() for parameter in layer.parameters()]

    expected = found()
    with products.Tiles():
        torch.testing.assert_close(found(), expected, atol=1e-2, rtol=1e-4)


def test_autocast_is_torchs():
    layer, x = nn.Linear(64, 192), torch.randn(3000, 64)
    with products.Tiles(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(1,), (), (3000, 1)])
def test_a_bias_of_another_shape_is_torchs(shape):
    x, weight, bias = torch.randn(3000, 64), torch.randn(192, 64), torch.randn(shape)
    expected = functional.linear(x, weight, bias)
    with products.Tiles():
        assert torch.equal(functional.linear(x, weight, bias), expected)


def test_no_rows_and_wrong_sizes():
    of_weight, of_bias = products.gradients(torch.ones(0, 3), torch.ones(0, 2))
    assert not of_weight.any() and not of_bias.any() and of_weight.shape == (3, 2)
    for x, bias in ((torch.ones(4, 8), None), (torch.ones(4, 4), torch.ones(2))):
        with pytest.raises(RuntimeError, match="4 inputs and a bias of 3 are expected"):
            products.multiply(x, torch.ones(4, 3), bias)


def test_wrong_shapes_get_torchs_error():
    with products.Tiles(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional.linear(torch.randn(3000, 63), torch.randn(192, 64))


def test_without_a_compiler_there_is_a_reason(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(products.ocean, "compile_library", fails)
    assert products.missing.__wrapped__() == "no compiler"
    monkeypatch.setattr(products, "missing", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="no compiler"):
        products.multiply(torch.ones(2, 2), torch.ones(2, 2))
