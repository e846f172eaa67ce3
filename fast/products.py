"""Matrix products of many rows with a small matrix on a CPU, by fast/tile.c.

    with Tiles():                  # nn.Linear and F.linear go through fast/tile.c, if that is worth it
        outputs = policy(x)
    python -m pytest tests/test_products.py       # against numpy's float64
    python bench/bench_products.py                # GFLOP/s beside torch's

The C compiler makes fast/tile.c for the processor at hand, and numba calls it: `multiply_rows` and
`accumulate_rows`. fast/compiled.py puts these together to a whole network. Any other network reaches them
through `Tiles`, because torch's products use no AVX-512 on some processors, and its threads spin after
each operation on the cores that kernels want. docs/LOG.md has the figures.
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

WIDTH = 64  # columns of a panel: packed weights are stored in panels, see below (fast/tile.c's PANEL)
BLOCK = 64  # rows computed while a panel stays in the first-level cache (fast/tile.c's BLOCK)


# --------------------------------------------------------------------------------------------------
# The tile


@functools.cache
def missing():
    """Why these products are not to be had, None if they are: compiles tile.c, once, and names its functions to LLVM.
    Call it before `multiply_rows` or `accumulate_rows`, which end the process without those names."""
    source = Path(__file__).with_name("tile.c")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra"]
    try:
        library = ctypes.CDLL(str(ocean.compile_library(source, "tile-", ocean.FLAGS, flags, [source])))
    except (ConfigError, OSError, subprocess.CalledProcessError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    for name in ("tile_multiply", "tile_accumulate"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return None


_tile_multiply, _tile_accumulate = (types.ExternalFunction(name, types.void(*[types.int64] * arguments))
                                    for name, arguments in (("tile_multiply", 9), ("tile_accumulate", 7)))


def halved(array):
    """Whether a packed matrix holds pairs of bfloat16."""
    return array.dtype == u32


@overload(halved, inline="always")
def _halved(array):
    return (lambda array: True) if array.dtype == types.uint32 else (lambda array: False)


# --------------------------------------------------------------------------------------------------
# Packed weights: panels of up to WIDTH columns, one after the other, each step by step


def packed_size(inner, columns, half):
    """Words (float32, or uint32 of two bfloat16) that a packed (inner, columns) matrix takes."""
    return (-(-inner // 2) if half else inner) * columns


@driver
def pack(matrix, packed):
    """Lay an (inner, columns) matrix out for `multiply_rows`: packed (packed_size(...),), float32,
    or uint32 to round it to bfloat16."""
    inner, columns = matrix.shape
    half = halved(packed)
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
    """out[:rows] = init + a[:rows] · the packed matrix, all float32; if that holds pairs, a is
    rounded to bfloat16 (halves to even; `pack` rounds them away from zero). init is flat: a row of
    `init_columns` numbers for each of out's, or one for all (a bias) and 0."""
    _tile_multiply(a.ctypes.data, rows, a.shape[1], packed.ctypes.data, halved(packed), init.ctypes.data, init_columns,
                   out.ctypes.data, out.shape[1])


# --------------------------------------------------------------------------------------------------
# Gradients of weights: products whose sums go over the rows (steps and segments)


@driver
def accumulate_rows(half, grad, x, gradient):
    """gradient (outputs, inputs) += grad (rows, outputs)^T · x (rows, inputs), float32; `half`
    rounds grad and x to bfloat16."""
    _tile_accumulate(grad.ctypes.data, x.ctypes.data, len(x), grad.shape[1], x.shape[1], half, gradient.ctypes.data)


@distinct_driver
def add_bias_gradients(rows, total):
    """total (columns,) += the sum of rows (n, columns) over n."""
    numbers, columns = rows.reshape(-1), u64(rows.shape[1])
    for r in range(rows.shape[0]):
        first = u64(r) * columns
        for c in range(columns):
            total[c] += numbers[first + c]


# --------------------------------------------------------------------------------------------------
# torch's linear map through these products

ROWS = 256  # fewer rows are not worth packing the weights
PRODUCTS = 2**21  # fewer multiplications take less time than calls from Python
COLUMNS = 16  # fewer columns leave most of a vector empty
LARGEST = 2**17  # numbers in a weight; with more torch is as fast or faster on some processors
PART, PARTS = 1024, 64  # rows that a lane of the weights' gradient adds up, at least; lanes, at most
RATE = 100  # multiplications in a nanosecond, to tell what a lane costs


@driver
def _multiply_lanes(begin, end, a, packed, init, out):
    first, last = begin * BLOCK, min(end * BLOCK, len(a))
    multiply_rows(last - first, a[first:last], packed, init, INT0, out[first:last])


@driver
def _gradient_lanes(begin, end, size, grad, x, of_weight, of_bias):
    for part in range(begin, end):
        first, last = part * size, min((part + 1) * size, len(x))
        of_weight[part], of_bias[part] = 0, 0
        accumulate_rows(False, grad[first:last], x[first:last], of_weight[part])
        add_bias_gradients(grad[first:last], of_bias[part])


def array(tensor):
    """The numpy array of a CPU tensor, row by row."""
    return tensor.detach().contiguous().numpy()


def packed(matrix):
    """A float32 tensor (inner, columns), packed. Raises RuntimeError if fast/tile.c cannot be compiled."""
    if missing():
        raise RuntimeError(missing())
    words = np.empty(matrix.numel(), np.float32)
    pack(matrix.detach().numpy(), words)
    return words


def multiply(x, matrix, bias=None):
    """x (..., inner) · matrix (inner, columns) + bias, float32 tensors; no gradient."""
    inner, columns = matrix.shape
    init = np.zeros(columns, np.float32) if bias is None else array(bias)
    if x.shape[-1] != inner or len(init) != columns:
        raise RuntimeError(f"inputs {tuple(x.shape)}, a bias of {len(init)} and a matrix {tuple(matrix.shape)} cannot "
                           f"be multiplied: {inner} inputs and a bias of {columns} are expected.")
    out = torch.empty(*x.shape[:-1], columns, dtype=torch.float32, device="cpu")
    rows = array(x).reshape(-1, inner)
    run(_multiply_lanes, -(-len(rows) // BLOCK), BLOCK * matrix.numel() // RATE, rows, packed(matrix), init,
        out.numpy().reshape(-1, columns))
    return out


def gradients(grad, x):
    """The gradients of the weight (outputs, inputs) and the bias of a linear map, from those of its outputs
    (..., outputs) and its inputs (..., inputs). They do not depend on the number of threads.
    Raises RuntimeError if fast/tile.c cannot be compiled."""
    if missing():
        raise RuntimeError(missing())
    grad, x = (array(tensor).reshape(-1, tensor.shape[-1]) for tensor in (grad, x))
    size = max(PART, -(-len(x) // PARTS))
    parts, outputs, inputs = -(-len(x) // size), grad.shape[1], x.shape[1]
    of_weight, of_bias = (torch.empty(parts, *shape, dtype=torch.float32, device="cpu")
                          for shape in ((outputs, inputs), (outputs,)))
    run(_gradient_lanes, parts, size * outputs * inputs // RATE, size, grad, x, of_weight.numpy(), of_bias.numpy())
    return of_weight.sum(0), of_bias.sum(0)


class Linear(torch.autograd.Function):
    """F.linear. A gradient of its gradient goes through torch's products."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t(), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        to_x, *to_map = ctx.needs_input_grad
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():  # create_graph, or vmap
            flat = grad.flatten(0, -2)
            of_weight, of_bias = flat.t() @ x.flatten(0, -2), flat.sum(0)
            return grad @ weight, of_weight, of_bias if to_map[1] else None
        of_weight, of_bias = gradients(grad, x) if any(to_map) else (None, None)
        return multiply(grad, weight) if to_x else None, of_weight, of_bias if to_map[1] else None


def watched():
    """Whether torch follows or changes each operation: torch.compile, an export, autocast, a transform of torch.func,
    forward-mode derivatives."""
    return (torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export() or torch.is_autocast_enabled("cpu")
            or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def worthwhile(x, weight, bias=None):
    """Whether `Linear` computes F.linear(x, weight, bias), and faster than torch does: float32 on a CPU,
    not `watched`."""
    if watched() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # a checkpoint runs it anew
        return False
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    return (weight.dim() == 2 and x.dim() > 1 and len(weight) >= COLUMNS and weight.numel() <= LARGEST
            and x.numel() >= ROWS * weight.shape[1] and x.numel() * len(weight) >= PRODUCTS
            and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32
                    and tensor.layout is torch.strided and not tensor.is_neg()
                    and tensor.device.type == "cpu" for tensor in tensors)
            and x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1]))


class Tiles(TorchFunctionMode):
    """Within it, on this thread, F.linear and so nn.Linear are `Linear` if that is `worthwhile`: the same
    sums in another order. Whatever surrounds them (hooks, parametrizations, a forward of one's own) runs as
    it stands."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear and not kwargs and worthwhile(*args):
            return Linear.apply(*args, *[None] * (3 - len(args)))
        return function(*args, **(kwargs or {}))
