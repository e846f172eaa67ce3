"""Multiply many rows by a small matrix on a CPU, by fast/tile.c.

    with Tiles():                  # F.linear goes through fast/tile.c where it is faster
        outputs = policy(x)
    python -m pytest tests/test_products.py       # against numpy's float64
    python bench/bench_products.py                # GFLOP/s beside torch's

The C compiler builds fast/tile.c for the processor at hand, and numba calls it: `multiply_rows` and
`accumulate_rows`. fast/compiled.py makes a whole network of these. Any other network reaches them
through `Tiles`: torch's products use no AVX-512 on some processors, and its threads spin after each
operation on the cores that kernels need. docs/findings.md has the figures.
"""

import ctypes
import functools
import subprocess
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

import ocean
from arena import INT0, distinct_driver, driver, run, u32, u64
from errors import ConfigError
from kernels import bfloat_of_float

WIDTH = 64  # columns of a panel of packed weights, see below (fast/tile.c's PANEL)
BLOCK = 64  # rows computed while a panel stays in the first-level cache (fast/tile.c's BLOCK)


# --------------------------------------------------------------------------------------------------
# The tile


@functools.cache
def find_problem():
    """Return why these products are not available, or None.

    Compiles tile.c once, and names its functions to LLVM. Call it before `multiply_rows` or
    `accumulate_rows`, which end the process without those names.
    """
    source = Path(__file__).with_name("tile.c")
    flags = [*ocean.FLAGS, "-shared", "-fPIC", "-Wall", "-Wextra"]
    try:
        path = ocean.compile_library(source, "tile-", flags, source)
        library = ctypes.CDLL(str(path))
    except (ConfigError, OSError, subprocess.CalledProcessError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    for name in ("tile_multiply", "tile_accumulate"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return None


_tile_multiply, _tile_accumulate = (
    types.ExternalFunction(name, types.void(*[types.int64] * arguments))
    for name, arguments in (("tile_multiply", 9), ("tile_accumulate", 7)))


def is_half(array):
    """Return whether a packed matrix holds pairs of bfloat16."""
    return array.dtype == u32


@overload(is_half, inline="always")
def _is_half(array):
    return (lambda array: True) if array.dtype == types.uint32 else (lambda array: False)


# --------------------------------------------------------------------------------------------------
# Packed weights: panels of up to WIDTH columns, one after the other, each step by step


def packed_size(inner, columns, half):
    """Return the words of a packed matrix: float32, or uint32 of two bfloat16."""
    return (-(-inner // 2) if half else inner) * columns


@driver
def pack(matrix, packed):
    """Lay an (inner, columns) matrix out for `multiply_rows`.

    packed: (packed_size(...),), float32, or uint32 to round it to bfloat16.
    """
    inner, columns = matrix.shape
    half = is_half(packed)
    steps = (inner + 1) // 2 if half else inner
    for first in range(0, columns, WIDTH):
        width = min(WIDTH, columns - first)
        target = packed[first * steps : (first + width) * steps]
        for s in range(steps):
            for c in range(width):
                if half:
                    low = u32(bfloat_of_float(matrix[2 * s, first + c]))
                    high = (u32(bfloat_of_float(matrix[2 * s + 1, first + c])) if 2 * s + 1 < inner
                            else u32(0))
                    target[s * width + c] = low | high << u32(16)
                else:
                    target[s * width + c] = matrix[s, first + c]


@driver
def multiply_rows(rows, a, packed, init, init_columns, out):
    """Write init + a[:rows] · the packed matrix to out[:rows], all float32.

    If the matrix holds pairs, a is rounded to bfloat16, halves to even (`pack` rounds them away
    from zero). init is flat: `init_columns` numbers for each row of out, or with 0 one row for all,
    a bias.
    """
    _tile_multiply(a.ctypes.data, rows, a.shape[1], packed.ctypes.data, is_half(packed),
                   init.ctypes.data, init_columns, out.ctypes.data, out.shape[1])


# --------------------------------------------------------------------------------------------------
# Gradients of weights: products whose sums go over the rows (steps and segments)


@driver
def accumulate_rows(half, grad, x, gradient):
    """Add grad (rows, outputs)^T · x (rows, inputs) to gradient (outputs, inputs).

    All are float32; `half` rounds grad and x to bfloat16.
    """
    _tile_accumulate(grad.ctypes.data, x.ctypes.data, len(x), grad.shape[1], x.shape[1], half,
                     gradient.ctypes.data)


@distinct_driver
def add_row_sums(rows, total):
    """Add the sum of rows (n, columns) over n to total (columns,)."""
    numbers, columns = rows.reshape(-1), u64(rows.shape[1])
    for r in range(rows.shape[0]):
        first = u64(r) * columns
        for c in range(columns):
            total[c] += numbers[first + c]


# --------------------------------------------------------------------------------------------------
# torch's linear map through these products

ROWS = 256  # with fewer rows, to pack the weights takes longer than it saves
PRODUCTS = 2**21  # fewer multiplications take less time than calls from Python
COLUMNS = 16  # fewer columns leave most of a vector empty
LARGEST = 2**17  # numbers in a weight; with more, torch is as fast on some processors
MIN_ROWS, MAX_LANES = 1024, 64  # rows of a lane of the weights' gradient, and lanes
RATE = 100  # multiplications in a nanosecond, which gives a lane's cost


@driver
def _multiply_lanes(begin, end, a, packed, init, out):
    first, last = begin * BLOCK, min(end * BLOCK, len(a))
    multiply_rows(last - first, a[first:last], packed, init, INT0, out[first:last])


@driver
def _gradient_lanes(begin, end, size, grad, x, grad_weight, grad_bias):
    for lane in range(begin, end):
        first, last = lane * size, min((lane + 1) * size, len(x))
        grad_weight[lane], grad_bias[lane] = 0, 0
        accumulate_rows(False, grad[first:last], x[first:last], grad_weight[lane])
        add_row_sums(grad[first:last], grad_bias[lane])


def to_array(tensor):
    """Return the contiguous numpy array of a CPU tensor."""
    return tensor.detach().contiguous().numpy()


def pack_tensor(matrix):
    """Return a float32 tensor (inner, columns), packed.

    Raises RuntimeError if fast/tile.c cannot be compiled.
    """
    if find_problem():
        raise RuntimeError(find_problem())
    words = np.empty(matrix.numel(), np.float32)
    pack(matrix.detach().numpy(), words)
    return words


def multiply(x, matrix, bias=None):
    """Return x (..., inner) · matrix (inner, columns) + bias, without a gradient.

    All are float32. Raises RuntimeError for shapes that do not match.
    """
    inner, columns = matrix.shape
    init = np.zeros(columns, np.float32) if bias is None else to_array(bias)
    if x.shape[-1] != inner or len(init) != columns:
        raise RuntimeError(
            f"inputs {tuple(x.shape)}, a bias of {len(init)} and a matrix {tuple(matrix.shape)} "
            f"cannot be multiplied: {inner} inputs and a bias of {columns} are expected.")
    out = torch.empty(*x.shape[:-1], columns, dtype=torch.float32, device="cpu")
    rows = to_array(x).reshape(-1, inner)
    run(_multiply_lanes, -(-len(rows) // BLOCK), BLOCK * matrix.numel() // RATE, rows,
        pack_tensor(matrix), init, out.numpy().reshape(-1, columns))
    return out


def gradients(grad, x):
    """Return the gradients of a linear map's weight (outputs, inputs) and bias.

    grad: of its outputs (..., outputs). x: its inputs (..., inputs). The result does not depend on
    the number of threads. Raises RuntimeError if fast/tile.c cannot be compiled.
    """
    if find_problem():
        raise RuntimeError(find_problem())
    grad, x = (to_array(tensor).reshape(-1, tensor.shape[-1]) for tensor in (grad, x))
    size = max(MIN_ROWS, -(-len(x) // MAX_LANES))
    lanes, outputs, inputs = -(-len(x) // size), grad.shape[1], x.shape[1]
    grad_weight = torch.empty(lanes, outputs, inputs, dtype=torch.float32, device="cpu")
    grad_bias = torch.empty(lanes, outputs, dtype=torch.float32, device="cpu")
    run(_gradient_lanes, lanes, size * outputs * inputs // RATE, size, grad, x,
        grad_weight.numpy(), grad_bias.numpy())
    return grad_weight.sum(0), grad_bias.sum(0)


class Linear(torch.autograd.Function):
    """Compute F.linear. A gradient of its gradient goes through torch's products."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t(), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_weight = grad_bias = None
        # create_graph, or vmap
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            flat = grad.flatten(0, -2)
            grad_weight = flat.t() @ x.flatten(0, -2)
            return grad @ weight, grad_weight, flat.sum(0) if needs_bias else None
        if needs_weight or needs_bias:
            grad_weight, grad_bias = gradients(grad, x)
        grad_x = multiply(grad, weight) if needs_x else None
        return grad_x, grad_weight, grad_bias if needs_bias else None


def is_traced():
    """Return whether torch follows or changes each operation.

    It does in torch.compile, an export, autocast, a transform of torch.func, and with forward-mode
    derivatives.
    """
    return (torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
            or torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0)


def is_worthwhile(x, weight, bias=None):
    """Return whether `Linear` is faster than F.linear(x, weight, bias), and equal.

    It computes float32 on a CPU, and no traced operations.
    """
    # a checkpoint runs the forward pass again
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if is_traced() or has_hooks:
        return False
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    is_large = (weight.dim() == 2 and x.dim() > 1 and len(weight) >= COLUMNS
                and weight.numel() <= LARGEST and x.numel() >= ROWS * weight.shape[1]
                and x.numel() * len(weight) >= PRODUCTS)
    return (is_large
            and all(type(tensor) in (torch.Tensor, torch.nn.Parameter)
                    and tensor.dtype == torch.float32 and tensor.layout is torch.strided
                    and not tensor.is_neg() and tensor.device.type == "cpu" for tensor in tensors)
            and x.shape[-1] == weight.shape[1]
            and (bias is None or bias.shape == weight.shape[:1]))


class Tiles(TorchFunctionMode):
    """Send this thread's F.linear through `Linear` where `is_worthwhile`.

    nn.Linear is F.linear. The sums are the same in another order. Hooks, parametrizations and
    custom forwards around it run unchanged.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear and not kwargs and is_worthwhile(*args):
            return Linear.apply(*args, *[None] * (3 - len(args)))
        return function(*args, **(kwargs or {}))

