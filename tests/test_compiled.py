"""The matrix products of the default policy against float64, whatever the shapes, on any number of threads.

    python -m pytest tests/test_compiled.py -k accumulate
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import compiled
import kernels

ROUNDED = pytest.param(True, marks=pytest.mark.skipif(not compiled.fast(), reason="no AVX-512 BF16"))
PRECISIONS = pytest.mark.parametrize("half", [False, ROUNDED], ids=["float32", "bfloat16"])
SIZES = st.integers(1, 150)
FEW = settings(max_examples=40)
CANARY = 7.0


def numbers(seed, *shape, half=False):
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))
    return drawn.bfloat16() if half else drawn


def guarded(*shape, dtype=torch.float32):
    """A tensor of NaN, and what lies behind it in memory, which nobody may touch."""
    memory = torch.full((math.prod(shape) + 64,), CANARY, dtype=dtype)
    tensor, behind = memory[:-64].view(shape), memory[-64:]
    return tensor.fill_(math.nan), behind


def packed(matrix, half):
    """`matrix` packed, within memory that is NaN where it is not written."""
    size = compiled.packed_size(*matrix.shape, half)
    target = torch.full((size,), math.nan).view(torch.int32) if half else torch.full((size,), math.nan)
    compiled.pack(matrix, target)
    return target


def close(actual, expected, inner, half):
    """Within the rounding of sums of `inner` products of standard normals, and of a bfloat16 result."""
    tolerance = 1e-6 * inner + (2**-8 * expected.abs() if half else 1e-6)
    assert ((actual.double() - expected).abs() <= tolerance).all(), (actual.double() - expected).abs().max()


@PRECISIONS
@FEW
@given(rows=SIZES, inner=SIZES, columns=SIZES, narrow=st.booleans(), threads=st.sampled_from([1, 3]))
@example(rows=200, inner=1, columns=1, narrow=False, threads=3)
@example(rows=64, inner=118, columns=64, narrow=True, threads=1)
@example(rows=65, inner=65, columns=193, narrow=True, threads=1)
def test_multiply(half, rows, inner, columns, narrow, threads):
    if narrow and not half:
        narrow = False  # rounded results are asked for where the processor rounds by itself
    x, weight, bias = numbers(0, rows, inner, half=half), numbers(1, inner, columns), numbers(2, columns)
    rounded = weight.bfloat16().double() if half else weight.double()
    expected = bias.double() + x.double() @ rounded
    out, behind = guarded(rows, columns, dtype=torch.bfloat16 if narrow else torch.float32)
    with kernels.threads(threads):
        compiled.multiply(x, packed(weight, half), out, bias=bias)
        close(out, expected, inner, narrow)
        before = out.double()
        compiled.multiply(x, packed(weight, half), out, add=True)
    close(out, before + expected - bias.double(), inner, narrow)
    compiled.multiply(x, packed(weight, half), out)
    close(out, expected - bias.double(), inner, narrow)
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
@FEW
@given(rows=st.integers(1, 400), outputs=SIZES, inputs=SIZES, threads=st.sampled_from([1, 3]))
@example(rows=129, outputs=192, inputs=64, threads=1)
@example(rows=1, outputs=4, inputs=118, threads=3)
def test_accumulate(half, rows, outputs, inputs, threads):
    grad, x = numbers(0, rows, outputs, half=half), numbers(1, rows, inputs, half=half)
    gradient, behind = guarded(outputs, inputs)
    gradient.copy_(numbers(2, outputs, inputs))
    expected = gradient.double() + grad.double().t() @ x.double()
    with kernels.threads(threads):
        compiled.accumulate(grad, x, gradient)
    close(gradient, expected, rows, False)
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
@FEW
@given(rows=st.integers(0, 400), columns=SIZES, threads=st.sampled_from([1, 3]))
def test_add_rows(half, rows, columns, threads):
    x = numbers(0, rows, columns, half=half)
    total, behind = guarded(columns)
    total.copy_(numbers(1, columns))
    expected = total.double() + x.double().sum(0)
    with kernels.threads(threads):
        compiled.add_rows(x, total)
    close(total, expected, rows, False)
    assert (behind == CANARY).all(), "written beyond the end"


@PRECISIONS
def test_any_number_of_threads_gives_the_same_bits(half):
    x, grad, weight = numbers(0, 300, 70, half=half), numbers(1, 300, 130, half=half), numbers(2, 70, 130)
    results = []
    for threads in (1, 2, 5):
        out, gradient = torch.empty(300, 130), torch.zeros(130, 70)
        with kernels.threads(threads):
            compiled.multiply(x, packed(weight, half), out)
            compiled.accumulate(grad, x, gradient)
        results.append((out, gradient))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@PRECISIONS
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(half, poison):
    """The odd step of a pair, the rows beside and the columns beyond must not take part."""
    x, weight = numbers(0, 7, 5, half=half), numbers(1, 5, 20)
    x[3, 4] = poison
    out = torch.empty(7, 20)
    compiled.multiply(x, packed(weight, half), out)
    assert not out[3].isfinite().any()
    assert torch.cat([out[:3], out[4:]]).isfinite().all()
    gradient = torch.zeros(20, 5)
    compiled.accumulate(numbers(2, 7, 20, half=half), x, gradient)
    assert not gradient[:, 4].isfinite().any() and gradient[:, :4].isfinite().all()


def test_errors_name_the_tensor():
    x, target, out = torch.zeros(4, 6), torch.zeros(compiled.packed_size(6, 8, False)), torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"packed has shape \(48,\), expected \(54,\)"):
        compiled.pack(torch.zeros(6, 9), target)
    with pytest.raises(ValueError, match=r"out has shape \(5, 8\), expected \(4, 8\)"):
        compiled.multiply(x, target, torch.zeros(5, 8))
    with pytest.raises(ValueError, match=r"a is not contiguous; pass a.contiguous\(\)"):
        compiled.multiply(torch.zeros(6, 4).t(), target, out)
    with pytest.raises(TypeError, match=r"a is torch\.bfloat16, the packed matrix float32"):
        compiled.multiply(x.bfloat16(), target, out)
    with pytest.raises(ValueError, match=r"gradient has shape \(8, 5\), expected \(8, 6\)"):
        compiled.accumulate(out, x, torch.zeros(8, 5))
    with pytest.raises(TypeError, match=r"grad is torch\.float32 and x is torch\.bfloat16"):
        compiled.accumulate(out, x.bfloat16(), torch.zeros(8, 6))
