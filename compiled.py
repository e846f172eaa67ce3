"""The default network (models.MinGRUPolicy) on a CPU: what its forward and autograd would do, in few calls.

    python pufferl.py train breakout --train.engine compiled     # which auto takes by itself
    python -m pytest tests/test_compiled.py       # each product against numpy's float64
    python tests/bench_products.py                # GFLOP/s beside torch's

Nobody needs to read this file to know the algorithm (ppo.py), or to change it (engines.py, for any network). It can be
deleted: everything then runs through `engines.Autograd`. From the bottom up it has the matrix products, the network's
step and a buffer's whole rollout, each in one call without the interpreter, the network's forward and backward
(`Layers`), and the engine (`Compiled`).

torch's products are MKL's in float32, which leaves half of AVX-512 unused on some processors, and oneDNN's in bfloat16,
where each call costs 16 µs before it begins. Ours are one tile: a few rows times up to 64 columns, all of them in
registers while the inner dimension passes by, written in LLVM's language because numba has no vectors (Goto and van de
Geijn 2008 is the idea; the matrices here are small enough that no cache needs more than the order of the loops).
Without AVX-512 the products are torch's.
"""

import functools
import itertools
import math
import time
from types import SimpleNamespace

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

import engines
import kernels
import models
from kernels import bfloat_of_float, distinct_driver, driver, f32, host, narrow, run, u16, u32, u64, widen

LANES = 16  # float32 numbers in a vector
WIDTH = 4 * LANES  # columns of a panel
ROWS = {1: 16, 2: 8, 3: 4, 4: 4}  # of a tile, by its vectors a row: 12 to 16 sums, more than an FMA's latency
BLOCK = 64  # rows (of weights' gradients: steps) that a panel stays in the first-level cache for


@functools.cache
def fast():
    """Whether this processor can run the tile, AVX-512 with its bfloat16, and numba compiles for it."""
    features, another = llvm.get_host_cpu_features(), numba.config.CPU_NAME or numba.config.CPU_FEATURES
    return not another and all(features.get(feature) for feature in ("avx512f", "avx512bf16"))


# ---------------------------------------------------------------------------------------------------------------------
# The tile


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


_HALF, _WORD, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_HALVES, _WORDS, _FLOATS = (ir.VectorType(kind, LANES) for kind in (_HALF, _WORD, _FLOAT))
_BFLOATS, _PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)


class _Emitter:
    """Writes one panel: see `panel`. Addresses are integers, strides are in bytes."""

    def __init__(self, builder, pairs, init_half, out_half, arguments):
        self.b, self.pairs, self.init_half, self.out_half = builder, pairs, init_half, out_half
        (self.a, self.a_row, self.a_step, self.rows, self.w, self.w_step, self.steps, self.init, self.init_row,
         self.out, self.out_row, self.columns) = arguments  # fmt: skip

    def call(self, name, result, *arguments):
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), arguments)

    def pointer(self, address, offset, kind):
        return self.b.inttoptr(self.b.add(address, _LONG(offset)), kind.as_pointer())

    def splat(self, number, kind):
        vector = self.b.insert_element(ir.Constant(kind, ir.Undefined), number, _WORD(0))
        return self.b.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))

    def load(self, address, offset, kind, mask):
        pointer, align = self.pointer(address, offset, kind), kind.element.width // 8 if kind is not _FLOATS else 4
        if mask is None:
            return self.b.load(pointer, align=align)
        name = f"llvm.masked.load.v{LANES}{'f32' if kind is _FLOATS else f'i{kind.element.width}'}.p0"
        return self.call(name, kind, pointer, _WORD(align), mask, ir.Constant(kind, None))

    def store(self, vector, address, offset, mask):
        kind = vector.type
        pointer, align = self.pointer(address, offset, kind), 2 if kind.element == _HALF else 4
        if mask is None:
            self.b.store(vector, pointer, align=align)
            return
        name = f"llvm.masked.store.v{LANES}{'i16' if kind.element == _HALF else 'f32'}.p0"
        self.call(name, ir.VoidType(), vector, pointer, _WORD(align), mask)

    def first(self, address, c, mask):
        """The sums' first values."""
        if not self.init_half:
            return self.load(address, 4 * LANES * c, _FLOATS, mask)
        words = self.b.zext(self.load(address, 2 * LANES * c, _HALVES, mask), _WORDS)
        return self.b.bitcast(self.b.shl(words, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)

    def finish(self, total, address, c, mask):
        if not self.out_half:
            self.store(total, address, 4 * LANES * c, mask)
            return
        rounded = self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", _BFLOATS, total)
        self.store(self.b.bitcast(rounded, _HALVES), address, 2 * LANES * c, mask)

    def tile(self, row, rows, vectors, masks):
        """Rows [row, row + rows) of the panel."""
        b = self.b
        start, init, out = (b.add(base, b.mul(stride, row)) for base, stride in (
            (self.a, self.a_row), (self.init, self.init_row), (self.out, self.out_row)))  # fmt: skip
        places = [(r, c) for r in range(rows) for c in range(vectors)]
        ahead = [b.mul(_LONG(r), self.a_row) for r in range(rows)]
        first = [self.first(b.add(init, b.mul(_LONG(r), self.init_row)), c, masks[c]) for r, c in places]
        before, loop, after = b.block, b.append_basic_block("steps"), b.append_basic_block("stepped")
        b.branch(loop)
        b.position_at_end(loop)
        step, a, w = (b.phi(_LONG) for _ in range(3))
        sums = [b.phi(_FLOATS) for _ in places]
        columns = [self.load(w, 4 * LANES * c, _FLOATS, masks[c]) for c in range(vectors)]
        totals = []
        for r in range(rows):
            number = b.load(b.inttoptr(b.add(a, ahead[r]), (_WORD if self.pairs else _FLOAT).as_pointer()), align=2)
            number = self.splat(number, _WORDS if self.pairs else _FLOATS)
            for c in range(vectors):
                total = sums[r * vectors + c]
                if self.pairs:
                    both = b.bitcast(number, _PAIRS), b.bitcast(columns[c], _PAIRS)
                    totals.append(self.call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, *both))
                else:
                    totals.append(self.call("llvm.fma.v16f32", _FLOATS, number, columns[c], total))
        following = b.add(step, _LONG(1)), b.add(a, self.a_step), b.add(w, self.w_step)
        for phi, old, new in zip((step, a, w, *sums), (_LONG(0), start, self.w, *first), (*following, *totals),
                                 strict=True):  # fmt: skip
            phi.add_incoming(old, before)
            phi.add_incoming(new, b.block)
        b.cbranch(b.icmp_signed("<", following[0], self.steps), loop, after)
        b.position_at_end(after)
        for (r, c), total in zip(places, totals, strict=True):
            self.finish(total, b.add(out, b.mul(_LONG(r), self.out_row)), c, masks[c])

    def panel(self):
        b = self.b
        needed = b.sdiv(b.add(self.columns, _LONG(LANES - 1)), _LONG(LANES))
        for vectors, height in ROWS.items():
            with b.if_then(b.icmp_signed("==", needed, _LONG(vectors))):
                left = self.splat(b.trunc(b.sub(self.columns, _LONG(LANES * (vectors - 1))), _WORD), _WORDS)
                lanes = ir.Constant(_WORDS, list(range(LANES)))
                masks = [None] * (vectors - 1) + [b.icmp_signed("<", lanes, left)]
                whole = b.mul(b.sdiv(self.rows, _LONG(height)), _LONG(height))
                for begin, end, rows in ((_LONG(0), whole, height), (whole, self.rows, 1)):
                    with cgutils.for_range_slice(b, begin, end, _LONG(rows), intp=_LONG) as (row, _):
                        self.tile(row, rows, vectors, masks)


@intrinsic
def panel(typing, a, a_row, a_step, rows, w, w_step, steps, init, init_row, out, out_row, columns):
    """out[r, c] = init[r, c] + Σ over s of a[r, s] · w[s, c], for `rows` rows, `columns` <= WIDTH columns and `steps`
    >= 1 steps.

    a, w, init, out are one-dimensional arrays that begin at the first number in question; the strides between rows and
    between steps are int64, in bytes. a and w are float32, or both uint32 that hold pairs of bfloat16, two steps each;
    init and out float32 or bfloat16's bits (uint16); init_row 0 is a bias.
    """
    arrays, numbers = (a, w, init, out), (a_row, a_step, rows, w_step, steps, init_row, out_row, columns)
    if not all(isinstance(array, types.Array) and array.ndim == 1 for array in arrays):
        return None
    pairs, halves = w.dtype == types.uint32, [array.dtype == types.uint16 for array in (init, out)]
    signature = types.void(a, types.int64, types.int64, types.int64, w, types.int64, types.int64, init, types.int64,
                           out, types.int64, types.int64)  # fmt: skip

    def codegen(context, builder, signature, arguments):
        plain = [builder.ptrtoint(context.make_array(kind)(context, builder, value).data, _LONG)
                 if isinstance(kind, types.Array) else value
                 for kind, value in zip(signature.args, arguments, strict=True)]  # fmt: skip
        builder.function.attributes.add("noinline")  # once is enough to compile it
        _Emitter(builder, pairs, *halves, plain).panel()
        return context.get_dummy_value()

    return (signature, codegen) if all(isinstance(number, types.Integer) for number in numbers) else None


def halved(array):
    """Whether an array holds bfloat16: its bits, or pairs of them."""
    return array.dtype in (u16, u32)


@overload(halved, inline="always")
def _halved(array):
    return (lambda array: True) if array.dtype in (types.uint16, types.uint32) else (lambda array: False)


# ---------------------------------------------------------------------------------------------------------------------
# Packed weights: panels of up to WIDTH columns, one after the other, each step by step


def packed_size(inner, columns, half):
    """Words (float32, or uint32 of two bfloat16) that a packed (inner, columns) matrix takes."""
    return (-(-inner // 2) if half else inner) * columns


@driver
def _pack_cpu(begin, end, matrix, packed):
    inner, columns = matrix.shape
    half = halved(packed)
    steps = (inner + 1) // 2 if half else inner
    for panel_of in range(begin, end):
        first = panel_of * WIDTH
        width = min(WIDTH, columns - first)
        target = packed[first * steps : (first + width) * steps]
        for s in range(steps):
            for c in range(width):
                if half:
                    low = u32(bfloat_of_float(matrix[2 * s, first + c]))
                    high = u32(bfloat_of_float(matrix[2 * s + 1, first + c])) if 2 * s + 1 < inner else u32(0)
                    target[s * width + c] = low | high << u32(16)
                else:
                    target[s * width + c] = matrix[s, first + c]


def pack(matrix, packed):
    """Lay a float32 (inner, columns) matrix out for `multiply`: packed (packed_size(...),), float32, or int32 to round
    it to bfloat16."""
    inner, columns = matrix.shape
    half = packed.dtype == torch.int32
    _expect("pack", "packed", packed, (packed_size(inner, columns, half),))
    target = host(packed)
    run(_pack_cpu, -(-columns // WIDTH), 1, matrix.detach().numpy(), target.view(u32) if half else target)


@driver
def multiply_rows(begin, end, a, packed, init, init_columns, out):
    """out[begin:end] = init + a[begin:end] · the packed matrix, for other drivers too. init is flat: a row of
    `init_columns` numbers for each of out's, or one for all (a bias) and init_columns 0."""
    inner, columns = a.shape[1], out.shape[1]
    half = halved(packed)
    steps = (inner + 1) // 2 if half else inner
    odd = half and inner % 2 == 1  # then the last pair of a row would end in the next one
    even = np.empty((BLOCK if odd else 0, inner + 1), a.dtype)
    for block in range(begin, end, BLOCK):
        rows = min(BLOCK, end - block)
        source, row_size = a.reshape(-1)[block * inner :], inner * a.itemsize
        if odd:
            for r in range(rows):
                for i in range(inner):
                    even[r, i] = a[block + r, i]
                even[r, inner] = 0
            source, row_size = even.reshape(-1), (inner + 1) * a.itemsize
        for first in range(0, columns, WIDTH):
            width = min(WIDTH, columns - first)
            panel(source, row_size, 4, rows, packed[first * steps :], width * 4, steps,
                  init[block * init_columns + first :], init_columns * init.itemsize,
                  out.reshape(-1)[block * columns + first :], columns * out.itemsize, width)


def multiply(a, packed, out, *, bias=None, add=False):
    """out (rows, columns) = bias (columns,) + a (rows, inner) · the packed matrix; with `add` that is added to out, and
    there is no bias. a is float32 where the matrix is, else bfloat16; out is either; sums are float32."""
    (rows, inner), columns = a.shape, out.shape[1]
    half = packed.dtype == torch.int32
    _expect("multiply", "a", a, (rows, inner))
    _expect("multiply", "packed", packed, (packed_size(inner, columns, half),))
    _expect("multiply", "out", out, (rows, columns))
    if (a.dtype == torch.bfloat16) != half:
        raise TypeError(f"compiled.multiply: a is {a.dtype}, the packed matrix {'bfloat16' if half else 'float32'}.")
    matrix = host(packed).view(u32) if half else host(packed)
    start = _zeros(columns) if bias is None else host(bias)
    init = (host(out).reshape(-1), columns) if add else (start, 0)
    run(multiply_rows, rows, BLOCK, host(a), matrix, *init, host(out))


@functools.cache
def _zeros(count):
    return np.zeros(count, f32)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of weights: the inner dimension is that of the rows


@distinct_driver
def _take_pairs(source, first, rows, begin, end, pairs):
    """pairs[s] = source[first + 2s, begin:end] beside source[first + 2s + 1, begin:end], 0 where there is no such row;
    one number after the other, with an index that cannot be negative: three times as fast as rows of arrays."""
    numbers, words = source.reshape(-1), pairs.reshape(-1)
    width, stride, columns = u64(source.shape[1]), u64(pairs.shape[1]), u64(end - begin)
    for s in range(0, rows, 2):
        low, target = u64(first + s) * width + u64(begin), u64(s // 2) * stride
        high, kept = (low + width, u32(0xFFFFFFFF)) if s + 1 < rows else (low, u32(0))
        for c in range(columns):
            words[target + c] = u32(numbers[low + c]) | u32(numbers[high + c]) << u32(16) & kept


@driver
def _accumulate_cpu(begin, end, grad, x, gradient):
    rows, inputs, outputs = x.shape[0], x.shape[1], end - begin
    for first in range(0, rows, BLOCK):
        count = min(BLOCK, rows - first)
        for column in range(0, inputs, WIDTH):
            target = gradient.reshape(-1)[begin * inputs + column :]
            panel(grad.reshape(-1)[first * grad.shape[1] + begin :], 4, grad.shape[1] * 4, outputs,
                  x.reshape(-1)[first * inputs + column :], inputs * 4, count, target, inputs * 4, target, inputs * 4,
                  min(WIDTH, inputs - column))


@driver
def _accumulate_pairs_cpu(begin, end, grad, x, gradient):
    rows, inputs, outputs = x.shape[0], x.shape[1], end - begin
    # Rows that are powers of two apart would all want the same few lines of the cache: a line more keeps them apart.
    lefts, rights = np.empty((BLOCK, outputs + LANES), u32), np.empty((BLOCK, inputs + LANES), u32)
    for first in range(0, rows, 2 * BLOCK):
        count = min(2 * BLOCK, rows - first)
        _take_pairs(grad, first, count, begin, end, lefts)
        _take_pairs(x, first, count, 0, inputs, rights)
        for column in range(0, inputs, WIDTH):
            target = gradient.reshape(-1)[begin * inputs + column :]
            panel(lefts.reshape(-1), 4, (outputs + LANES) * 4, outputs, rights.reshape(-1)[column:],
                  (inputs + LANES) * 4, (count + 1) // 2, target, inputs * 4, target, inputs * 4,
                  min(WIDTH, inputs - column))


def accumulate(grad, x, gradient):
    """gradient (outputs, inputs), float32, += grad (rows, outputs)^T · x (rows, inputs), both of one float type."""
    rows, outputs = grad.shape
    _expect("accumulate", "grad", grad, (rows, outputs))
    _expect("accumulate", "x", x, (rows, x.shape[1]))
    _expect("accumulate", "gradient", gradient, (outputs, x.shape[1]))
    if grad.dtype != x.dtype:
        raise TypeError(f"compiled.accumulate: grad is {grad.dtype} and x is {x.dtype}; expected one dtype for both.")
    if rows:
        function = _accumulate_pairs_cpu if grad.dtype == torch.bfloat16 else _accumulate_cpu
        run(function, outputs, 16, host(grad), host(x), host(gradient))


@distinct_driver
def _add_rows_cpu(begin, end, rows, total):
    numbers, columns = rows.reshape(-1), u64(rows.shape[1])
    for r in range(rows.shape[0]):
        first = u64(r) * columns
        for c in range(u64(begin), u64(end)):
            total[c] += widen(numbers[first + c])


def add_rows(rows, total):
    """total (columns,), float32, += the sum of rows (n, columns), float32 or bfloat16, over n."""
    _expect("add_rows", "rows", rows, rows.shape)
    _expect("add_rows", "total", total, (rows.shape[1],))
    run(_add_rows_cpu, rows.shape[1], 16, host(rows), host(total))


def _expect(product, name, tensor, shape):
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"compiled.{product}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}.")
    if not tensor.is_contiguous():
        raise ValueError(f"compiled.{product}: {name} is not contiguous; pass {name}.contiguous().")


# ---------------------------------------------------------------------------------------------------------------------
# The whole network's step, a block of agents after the other, so that what lies between the layers stays in cache


@distinct_driver
def _read_observations(begin, end, observations, shift, scale, out):
    """out[:end - begin] = observations[begin:end], as floats, normalised if there is a shift."""
    if len(shift) > 0:
        for i in range(begin, end):
            row, target = observations[i], out[i - begin]
            for j in range(len(row)):
                target[j] = narrow(kernels.normalise_cell(f32(row[j]), shift[j], scale[j]), target)
        return
    source, target = observations.reshape(-1), out.reshape(-1)
    first, numbers = u64(begin) * u64(out.shape[1]), u64(end - begin) * u64(out.shape[1])
    for i in range(numbers):
        target[i] = narrow(f32(source[first + i]), target)


@driver
def _policy_step_cpu(begin, end, observations, encoder, layers, decoder, state, resets, valid, seen, x, y, hgp, last,
                     outputs):
    """encoder is (packed weight, bias, shift, scale), each of `layers` and decoder (packed weight, bias); seen, x, y,
    hgp and last are scratch memory."""
    for block in range(begin, end, BLOCK):
        stop = min(end, block + BLOCK)
        n, rows = stop - block, slice(begin, begin + stop - block)  # another thread's rows are another range
        _read_observations(block, stop, observations, encoder[2], encoder[3], seen[rows])
        multiply_rows(0, n, seen[rows], encoder[0], encoder[1], 0, x[rows])
        now, then = x[rows], y[rows]
        for i in range(len(layers)):
            multiply_rows(0, n, now, layers[i][0], layers[i][1], 0, hgp[rows])
            flags = resets[block:stop], valid[block:stop]
            if i + 1 < len(layers):
                kernels._mingru_step_cpu(0, n, hgp[rows], now, state[i][block:stop], *flags, then)
                now, then = then, now
            else:
                kernels._mingru_step_cpu(0, n, hgp[rows], now, state[i][block:stop], *flags, last[rows])
        multiply_rows(0, n, last[rows], decoder[0], decoder[1], 0, outputs[block:stop])


def policy_step(observations, encoder, layers, decoder, state, resets, valid, scratch):
    """One step of n agents: observations (n, D) of any type; encoder, each of `layers` and decoder arrays (packed
    weight, bias), the encoder's with shift and scale (D,) of the observations, or two of length 0; state (n, H) a
    layer, updated in place; resets, valid (n,). Into the last of `scratch`, tensors of n rows: observations and two
    activations as the products read them, hgp, the last layer's output, the network's."""
    if observations.dtype == torch.bfloat16:
        raise TypeError("compiled.policy_step: observations are bfloat16, which numba cannot tell from uint16; pass "
                        "them as the environment gave them.")
    run(_policy_step_cpu, len(observations), BLOCK, host(observations), encoder, layers, decoder,
        tuple(host(layer) for layer in state), host(resets), host(valid), *map(host, scratch))


# ---------------------------------------------------------------------------------------------------------------------
# The rollout of a range of environments in one call: while a thread waits for the interpreter it sleeps, and to wake it
# takes as long as a step of 256 agents


def _call_address(builder, result, function, *numbers):
    """LLVM's call of a C function by its address; a pointer is passed as its address would be."""
    kind = ir.FunctionType(result, [_LONG] * len(numbers))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), numbers)


@intrinsic
def _call_step(typing, function, environments, first, last, rows):
    """ocean_step(environments, first, last, rows), all of them integers, function and pointers by their addresses."""

    def codegen(context, builder, signature, arguments):
        _call_address(builder, ir.VoidType(), *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def _cycles(typing):
    """The processor's clock."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(_LONG, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), codegen


@driver
def _step_environments(environments, t, begin, end, terminals, truncations, resets):
    """Step t of the environments, whose agents are [begin, end), and row t + 1 of the resets; the cycles it took."""
    function, address, first, last, rows = environments
    entered = _cycles()
    _call_step(function, address, first, last, rows[t])
    for i in range(begin, end):
        resets[t + 1, i] = terminals[t, i] | truncations[t, i]
    return _cycles() - entered


@driver
def _final_values(begin, end, terminals, truncations, final_observations, network, state, kept, scratch, bootstraps):
    """bootstraps = V of the final observations of the agents in [begin, end) that were truncated and not terminated."""
    encoder, layers, decoder = network
    seen, x, y, hgp, last, outputs = scratch
    chosen, count = np.empty(end - begin, np.int64), 0
    for i in range(end - begin):
        if truncations[begin + i] and not terminals[begin + i]:
            chosen[count] = i
            count += 1
    if count == 0:
        return
    observations = np.empty((count, final_observations.shape[1]), final_observations.dtype)
    resets, valid = np.empty(count, np.uint8), np.empty(count, np.uint8)
    for k in range(count):
        resets[k], valid[k] = 0, 1
        for j in range(observations.shape[1]):
            observations[k, j] = final_observations[begin + chosen[k], j]
        for layer in range(len(layers)):
            for j in range(hgp.shape[1] // 3):
                kept[layer][k, j] = state[layer][chosen[k], j]
    _policy_step_cpu(0, count, observations, encoder, layers, decoder, kept, resets, valid, seen, x, y, hgp, last,
                     outputs)
    for k in range(count):
        bootstraps[begin + chosen[k]] = outputs[k, outputs.shape[1] - 1]


@driver
def _rollout_cpu(begin, end, environments, network, storage, state, kept, scratch, heads, log_std, masked, masks, seed,
                 first_agent, clock, logprobs, values, bootstraps):
    encoder, layers, decoder = network
    observations, resets, valid, actions, terminals, truncations, final_observations = storage
    seen, x, y, hgp, hidden, outputs = scratch
    n, horizon, inside, begun = end - begin, len(actions), 0, _cycles()
    for t in range(horizon + 1):
        now, flags = observations[t, begin:end], (resets[t, begin:end], valid[t, begin:end])
        if t > 0:
            _final_values(begin, end, terminals[t - 1], truncations[t - 1], final_observations, network, state, kept,
                          scratch, bootstraps[t - 1])
        if t == horizon:
            break
        _policy_step_cpu(0, n, now, encoder, layers, decoder, state, *flags, seen, x, y, hgp, hidden, outputs)
        random = (seed, u64(first_agent + begin), clock[t : t + 1], False)
        drawn = (actions[t, begin:end], logprobs[t, begin:end], values[t, begin:end])
        if log_std is None:
            mask = masks[t, begin:end] if masked else masks[0]
            kernels._sample_discrete_cpu(0, n, outputs, masked, mask, heads, *random, *drawn)
        else:
            kernels._sample_continuous_cpu(0, n, outputs, log_std, *random, *drawn)
        inside += _step_environments(environments, t, begin, end, terminals, truncations, resets)
    for layer in range(len(layers)):  # the last row is for V alone, and nothing of it is committed
        for i in range(n):
            for j in range(hgp.shape[1] // 3):
                kept[layer][i, j] = state[layer][i, j]
    _policy_step_cpu(0, n, now, encoder, layers, decoder, kept, *flags, seen, x, y, hgp, hidden, outputs)
    for i in range(n):
        values[horizon, begin + i] = outputs[i, outputs.shape[1] - 1]
    return inside / (_cycles() - begun)


def rollout(agents, environments, network, storage, state, kept, scratch, *, heads, log_std, masks, seed, first_agent,
            clock, logprobs, values, bootstraps):
    """A rollout of T steps of the agents in the slice `agents`, from row 0 of the storage on: what
    Autograd._rollout does step by step. Returns the share of the time that the environments took.

    environments: addresses of ocean_step and of the environments, the first and the last of them, int64 addresses of
    their rows (T,); network, state a layer (n, H), and scratch as in policy_step, `kept` like state, to be overwritten;
    storage: observations (T + 1, N, D), resets, valid (T + 1, N), actions (T, N, ...), terminals, truncations (T, N),
    final_observations (N, D); clock (T,) int64, what `sample` takes for step; heads, log_std, masks (T + 1, N, A), seed
    and first_agent as there; written: logprobs (T, N), values (T + 1, N), bootstraps (T, N), which are 0 before.
    """
    n, width = agents.stop - agents.start, scratch[-1].shape[1] - 1
    masked, masks = kernels._masks(None if masks is None else host(masks), values, 3)
    return _rollout_cpu(
        agents.start, agents.stop, environments, network, tuple(map(host, storage)), tuple(map(host, state)),
        tuple(map(host, kept)), tuple(map(host, scratch)), np.empty(0, np.int64) if heads is None else host(heads),
        None if log_std is None else kernels._log_std("sample", log_std, (n, width)), masked, masks, u64(seed),
        first_agent, host(clock), host(logprobs), host(values), host(bootstraps))


# ---------------------------------------------------------------------------------------------------------------------
# What `Layers` multiply with: the same calls, through torch or through the above


class TorchProducts:
    """On any device. In bfloat16 it rounds the weights of encoder and layers, and the decoder's for its input's
    gradient; weights' gradients are rounded before they are added in float32."""

    def __init__(self, policy, arena, name, *, rows, learns, precision):
        self.arena, self.name, self.learns = arena, name, learns
        half = precision != torch.float32
        self.rounded = [key for key, _ in policy.named_parameters()
                        if half and key not in ("decoder.bias", "decoder.log_std")]  # fmt: skip
        for key in self.rounded:
            shape = policy.get_parameter(key).shape
            arena.register(f"{name}/weights/{key}", shape, precision)
            arena.register(f"{name}/products/{key}", shape, precision)
        if learns:
            arena.register(f"{name}/ones", (rows,))
            arena.register(f"{name}/rounded grad", (rows if half else 0, policy.decoder.out_features), precision)

    def bind(self, masters, gradients):
        """The weights by name and the gradients that are added to, once the arena is allocated."""
        self.masters, self.gradients = masters, gradients
        self.weights = masters | {key: self.arena[f"{self.name}/weights/{key}"] for key in self.rounded}
        self.products = {key: self.arena[f"{self.name}/products/{key}"] for key in self.rounded}
        if self.learns:
            self.ones = self.arena[f"{self.name}/ones"].fill_(1.0)

    def refresh(self):
        """Round the weights; due after every change of them."""
        for key in self.rounded:
            self.weights[key].copy_(self.masters[key])

    def linear(self, name, x, out):
        """out = x · W^T + b, all (rows, width); the decoder's in float32."""
        weights = self.masters if x.dtype == torch.float32 else self.weights
        torch.addmm(weights[f"{name}.bias"], x, weights[f"{name}.weight"].t(), out=out)

    def input_gradient(self, name, grad, out, *, add):
        """out (+)= grad · W."""
        if grad.dtype != out.dtype:
            grad = self.arena[f"{self.name}/rounded grad"][: len(grad)].copy_(grad)
        weight = self.weights[f"{name}.weight"]
        torch.addmm(out, grad, weight, out=out) if add else torch.mm(grad, weight, out=out)

    def weight_gradient(self, name, grad, x):
        """Add grad^T · x to the weight's gradient."""
        gradient = self.gradients[f"{name}.weight"]
        if grad.dtype == gradient.dtype:
            torch.addmm(gradient, grad.t(), x, out=gradient)
        else:
            gradient.add_(torch.mm(grad.t(), x, out=self.products[f"{name}.weight"]))

    def add_rows(self, name, rows):
        """Add the sum over rows (n, columns) to a gradient."""
        gradient = self.gradients[name]
        if rows.dtype == gradient.dtype:
            torch.addmv(gradient, rows.t(), self.ones[: len(rows)], out=gradient)
        else:
            gradient.add_(rows.sum(0, dtype=gradient.dtype))

    arrays = None  # of the network, for kernels: only tiles can be called from within them


class TileProducts:
    """With the tile. The weights are packed, those that rounded products read in bfloat16; the
    gradients of weights are summed in float32, and the decoder has no part in the rounding."""

    def __init__(self, policy, arena, name, *, rows, learns, precision):
        self.arena = arena
        self.layers = [f"rnn.layers.{i}" for i in range(policy.num_layers)]
        normalizer = policy.normalizer
        self.norm = (torch.zeros(0),) * 2 if normalizer is None else (normalizer.shift, normalizer.scale)
        keys = [(key, False) for key in ("encoder", *self.layers, "decoder")]
        if learns:
            keys += [(key, True) for key in (*self.layers, "decoder")]  # for the gradients of their inputs
        self.packed = {}
        for key, back in keys:
            half = precision != torch.float32 and key != "decoder"
            columns, inner = policy.get_parameter(f"{key}.weight").shape
            size = packed_size(columns, inner, half) if back else packed_size(inner, columns, half)
            self.packed[key, back] = f"{name}/packed/{key}{'/back' if back else ''}"
            arena.register(self.packed[key, back], (size,), torch.int32 if half else torch.float32)

    def bind(self, masters, gradients):
        self.masters, self.gradients = masters, gradients
        self.packed = {key: self.arena[place] for key, place in self.packed.items()}
        arrays = {key: host(packed).view(u32) if packed.dtype == torch.int32 else host(packed)
                  for (key, back), packed in self.packed.items() if not back}  # fmt: skip
        pairs = {key: (array, host(masters[f"{key}.bias"])) for key, array in arrays.items()}
        encoder = *pairs["encoder"], *map(host, self.norm)
        self.arrays = encoder, tuple(pairs[key] for key in self.layers), pairs["decoder"]

    def refresh(self):
        for (key, back), packed in self.packed.items():
            weight = self.masters[f"{key}.weight"]
            pack(weight if back else weight.t(), packed)

    def linear(self, name, x, out):
        multiply(x, self.packed[name, False], out, bias=self.masters[f"{name}.bias"])

    def input_gradient(self, name, grad, out, *, add):
        multiply(grad, self.packed[name, True], out, add=add)

    def weight_gradient(self, name, grad, x):
        accumulate(grad, x, self.gradients[f"{name}.weight"])

    def add_rows(self, name, rows):
        add_rows(rows, self.gradients[name])


def best(policy, arena, name, *, rows, learns, precision):
    """The products for up to `rows` rows on the policy's device. `learns`: gradients will be asked for. `name` is a
    prefix in the arena, where they register what they keep."""
    tiles = fast() and policy.decoder.weight.device.type == "cpu" and not kernels.SIMULATOR
    return (TileProducts if tiles else TorchProducts)(policy, arena, name, rows=rows, learns=learns,
                                                      precision=precision)


# ---------------------------------------------------------------------------------------------------------------------
# The default network without autograd: matrix products and fused kernels in preallocated buffers


class Layers:
    """The default network without autograd for up to `rows` agents, `steps` at a time, in buffers that live in the
    arena; each worker has its own.

        layers = Layers(policy, arena, "worker 0", steps=64, rows=16)     # before arena.allocate
        layers.bind("gradients")                                         # after
        chunk = layers.chunk(n)                                          # the buffers, cut to n <= rows segments
        layers.gather(chunk, observations, index, start)                 # and chunk.states[i][0], the initial states
        layers.forward(chunk, resets, valid, index, start)               # -> chunk.outputs
        layers.backward(chunk, resets, valid, index, start)              # from chunk.grad_outputs, into the gradients

    With steps=0 it holds what `step`, the rollout's form, needs.

    precision: torch.bfloat16 for the products of encoder and layers and what flows between them, forward and backward;
    weights, states, the decoder's product and the sums of gradients stay float32. `refresh` is due after every change
    of the weights: the products have them in a form of their own.
    """

    def __init__(self, policy, arena, name, *, steps, rows, precision=torch.float32):
        self.policy, self.arena, self.name, self.steps, self.rows = policy, arena, name, steps, rows
        inputs, width = policy.encoder.in_features, policy.decoder.out_features
        H, L, T = policy.hidden_size, policy.num_layers, max(steps, 1)
        # name -> the shape of its buffer for n segments
        rounded = {"observations": lambda n: (T, n, inputs)}
        rounded |= {f"hgp{i}": lambda n: (T, n, 3 * H) for i in range(L if steps else 1)}
        rounded |= {f"x{i}": lambda n: (T, n, H) for i in range(L if steps else 2)}
        exact = {"last": lambda n: (T, n, H), "outputs": lambda n: (T, n, width)}
        if steps:
            rounded |= {"grad_x": lambda n: (T, n, H)}
            exact |= {f"states{i}": lambda n: (T + 1, n, H) for i in range(L)} | {"sums": lambda n: (n, 3 * H)}
            exact |= {"grad_outputs": lambda n: (T, n, width), "grad_log_std": lambda n: (T, n, width - 1)}
        for shapes, dtype in ((rounded, precision), (exact, torch.float32)):
            for key, shape in shapes.items():
                arena.register(f"{name}/{key}", shape(rows), dtype)
        self._shapes, self._chunks = rounded | exact, {}
        self.products = best(policy, arena, name, rows=T * rows, learns=steps > 0, precision=precision)

    def bind(self, gradients="gradients"):
        """Take the views out of the allocated arena; `gradients` is the group that `backward` adds into."""
        weights = {key: parameter.data for key, parameter in self.policy.named_parameters()}
        self.products.bind(weights, {key: self.arena[f"{gradients}/policy.{key}"] for key in weights})
        self.refresh = self.products.refresh
        self.refresh()

    def chunk(self, n):
        """The buffers for n segments, each the contiguous beginning of the whole one; made once for each n."""
        if n not in self._chunks:
            views = {key: self.arena[f"{self.name}/{key}"].view(-1)[: math.prod(shape(n))].view(shape(n))
                     for key, shape in self._shapes.items()}
            # The same memory as (steps · n, width) matrices, for the products.
            flat = {f"flat_{key}": view.flatten(0, 1) for key, view in views.items() if view.dim() == 3}
            for stack in ("hgp", "x", "states"):
                names = [f"{stack}{i}" for i in range(self.policy.num_layers + 1) if f"{stack}{i}" in views]
                views[stack] = [views[name] for name in names]
                flat[f"flat_{stack}"] = [flat[f"flat_{name}"] for name in names]
            self._chunks[n] = SimpleNamespace(**views, **flat)
        return self._chunks[n]

    def step(self, observations, state, resets, valid):
        """One rollout step. observations (n, *obs) of any dtype, state (n, H) a layer, updated in place, resets and
        valid (n,) uint8 -> outputs (n, A + 1), overwritten by the next call."""
        chunk, observations = self.chunk(len(observations)), observations.view(len(observations), -1)
        norm = self.policy.normalizer
        if self.in_one_call:
            policy_step(observations, *self.products.arrays, state, resets, valid, self._scratch(chunk))
            return chunk.flat_outputs
        layers, linear = self.policy.num_layers, self.products.linear
        x, y, hgp = chunk.flat_x[0], chunk.flat_x[1], chunk.flat_hgp[0]
        if norm is not None:
            kernels.gather(observations.unsqueeze(0), None, chunk.observations, shift=norm.shift, scale=norm.scale)
            observations = chunk.flat_observations
        elif observations.dtype != chunk.observations.dtype:
            observations = chunk.flat_observations.copy_(observations)
        linear("encoder", observations, x)
        for i in range(layers):
            linear(f"rnn.layers.{i}", x, hgp)
            kernels.mingru_step(hgp, x, state[i], resets, valid, y if i + 1 < layers else chunk.flat_last)
            x, y = y, x
        linear("decoder", chunk.flat_last, chunk.flat_outputs)
        return chunk.flat_outputs

    @property
    def in_one_call(self):
        """Whether a step is one call without the interpreter, and so can `rollout` be."""
        return self.products.arrays is not None

    def _scratch(self, chunk):
        return (chunk.flat_observations, *chunk.flat_x[:2], chunk.flat_hgp[0], chunk.flat_last, chunk.flat_outputs)

    def rollout(self, agents, environments, storage, state, kept, **sampled):
        """All steps of the agents in a slice, environments included; see `rollout` above."""
        chunk = self.chunk(agents.stop - agents.start)
        return rollout(agents, environments, self.products.arrays, storage, state, kept, self._scratch(chunk),
                                **sampled)

    def gather(self, chunk, observations, index, start):
        """Put the segments index[start : start + n] of observations (>= steps, N, D) into the chunk, normalised if the
        policy has it so."""
        norm = self.policy.normalizer
        shift, scale = (None, None) if norm is None else (norm.shift, norm.scale)
        kernels.gather(observations, index, chunk.observations, start=start, shift=shift, scale=scale)

    def forward(self, chunk, resets, valid, index, start):
        """All steps of the segments index[start : start + n], from chunk.observations and chunk.states[i][0] into
        chunk.outputs (steps, n, A + 1); resets, valid (>= steps, N) uint8 of all agents."""
        linear = self.products.linear
        linear("encoder", chunk.flat_observations, chunk.flat_x[0])
        for i, out in enumerate([*chunk.x[1:], chunk.last]):
            linear(f"rnn.layers.{i}", chunk.flat_x[i], chunk.flat_hgp[i])
            kernels.mingru_scan(chunk.hgp[i], chunk.x[i], chunk.states[i], resets, valid, out, index=index, start=start)
        linear("decoder", chunk.flat_last, chunk.flat_outputs)

    def backward(self, chunk, resets, valid, index, start):
        """Add the gradients of all weights, given chunk.grad_outputs; consumes the activations."""
        products, grad_x = self.products, chunk.flat_grad_x
        products.weight_gradient("decoder", chunk.flat_grad_outputs, chunk.flat_last)
        products.add_rows("decoder.bias", chunk.flat_grad_outputs)
        if self.policy.decoder.log_std is not None:
            products.add_rows("decoder.log_std", chunk.flat_grad_log_std)
        products.input_gradient("decoder", chunk.flat_grad_outputs, grad_x, add=False)
        for i in reversed(range(self.policy.num_layers)):
            kernels.mingru_scan_grad(chunk.hgp[i], chunk.x[i], chunk.states[i], resets, valid, chunk.grad_x, chunk.sums,
                                     index=index, start=start)  # fmt: skip
            products.weight_gradient(f"rnn.layers.{i}", chunk.flat_hgp[i], chunk.flat_x[i])
            products.add_rows(f"rnn.layers.{i}.bias", chunk.sums)
            products.input_gradient(f"rnn.layers.{i}", chunk.flat_hgp[i], grad_x, add=True)
        products.weight_gradient("encoder", grad_x, chunk.flat_observations)
        products.add_rows("encoder.bias", grad_x)


# ---------------------------------------------------------------------------------------------------------------------
# Is it still the same network?

AT = 1.0, 30.0  # times its weights: a clamp or a squash that is far away shows at the second
NUDGE = 1e-6  # of the weights: what it does to the outputs is what rounding may do
STEPS, AGENTS = 16, 5  # that are compared


def difference(policy, vecenv, device="cpu"):
    """What `Layers` compute otherwise than the policy's own forward, forward_eval and autograd, in words; None if
    nothing was found. Some agents' steps with resets and dead rows, and a gradient, in float32; the weights are as they
    were afterwards."""
    parameters = dict(policy.named_parameters())
    kept = {name: (parameter.detach().clone(), parameter.grad) for name, parameter in parameters.items()}

    def weigh(scale, nudge=0.0):
        for name, parameter in parameters.items():
            waves = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape).cos()
            matrix = parameter.dim() > 1
            parameter.data.copy_(kept[name][0] * scale if matrix else kept[name][0] + waves * (scale - 1) / 10)
            parameter.data.mul_(1 + nudge * waves)
            parameter.grad = None

    try:
        pair = _Pair(policy, device)
        for scale in AT:
            given = _given(vecenv, device, scale)
            weigh(scale, NUDGE)
            nudged = _forward(policy, *given)[0].detach()
            weigh(scale)
            found = pair.compare(*given, nudged, gradients=scale == 1.0)
            if found is not None:
                return found if scale == 1 else f"{found} (at {scale:g} times its weights)"
    except Exception as error:  # forward takes or gives something else now
        return f"it does not run as the default network does: {type(error).__name__}: {error}"
    finally:
        for name, parameter in parameters.items():
            parameter.data.copy_(kept[name][0])
            parameter.grad = kept[name][1]
    return None


def _given(vecenv, device, scale):
    """Observations, resets and valid (STEPS, AGENTS, ...): observations near 1, or far away at the larger scale."""
    random = np.random.default_rng(0)
    shape, dtype = (STEPS, AGENTS, *vecenv.observation_shape), np.dtype(vecenv.observation_dtype)
    if dtype.kind == "f":
        seen = random.normal(size=shape) * (1 if scale == 1 else 100)
    else:
        space = vecenv.single_observation_space
        low, high = (1, 2) if scale == 1 else (max(-1000, int(space.low.min())), min(1000, int(space.high.max())))
        seen = random.integers(min(0, low), high, shape, endpoint=scale != 1)
    flags = [(random.random((STEPS, AGENTS)) < p).astype(np.uint8) for p in (0.2, 0.8)]
    return [torch.from_numpy(array).to(device) for array in (seen.astype(dtype), *flags)]


def _first_state(policy, device):
    """Not all zero, the same each time."""
    return {name: torch.linspace(-1, 1, tensor.numel(), device=device).view(tensor.shape)
            for name, tensor in policy.initial_state(AGENTS).items()}  # fmt: skip


def _forward(policy, seen, resets, valid):
    """outputs (STEPS, AGENTS, A + 1) and log_std of the policy's own forward."""
    state = {**_first_state(policy, seen.device), "resets": resets, "valid": valid}
    return models.join_outputs(*policy(seen, state))


@torch.no_grad()
def _step_by_step(policy, seen, resets, valid):
    """The same in the rollout's form, and the state after it."""
    state, outputs = _first_state(policy, seen.device), []
    for t in range(STEPS):
        state |= {"resets": resets[t], "valid": valid[t]}
        outputs.append(models.join_outputs(*models.one_step(policy, seen[t], state))[0])
    return torch.stack(outputs), state["mingru"]


class _Pair:
    """The network's own forward beside `Layers`, in both of their forms."""

    def __init__(self, policy, device):
        self.policy, self.arena = policy, kernels.Arena()
        self.layers = Layers(policy, self.arena, "all", steps=STEPS, rows=AGENTS)
        self.actor = Layers(policy, self.arena, "each", steps=0, rows=AGENTS)
        for name, parameter in policy.named_parameters():
            self.arena.register(f"gradients/policy.{name}", parameter.shape, group="gradients")
        self.arena.allocate(device)
        self.layers.bind()
        self.actor.bind()

    def compare(self, seen, resets, valid, nudged, *, gradients):
        """`difference` at the weights as they are. nudged: the outputs at weights that are next to these."""
        policy, layers, chunk = self.policy, self.layers, self.layers.chunk(AGENTS)
        index, first = torch.arange(AGENTS, device=seen.device), _first_state(policy, seen.device)["mingru"]
        layers.refresh()
        self.actor.refresh()
        layers.gather(chunk, seen.view(STEPS, AGENTS, -1), index, 0)
        for states, state in zip(chunk.states, first, strict=True):
            states[0].copy_(state)
        layers.forward(chunk, resets, valid, index, 0)
        each = torch.stack([self.actor.step(seen[t], first, resets[t], valid[t]).clone() for t in range(STEPS)])
        with torch.enable_grad():
            outputs, log_std = _forward(policy, seen, resets, valid)
        theirs, (stepped, state) = outputs.detach(), _step_by_step(policy, seen, resets, valid)
        rounding = _error(nudged, theirs, (0, 1))  # an output each: a clamp may be of few
        allowed = max(1e-3, min(0.5, 300 * rounding))  # chaos, as in many layers with large weights
        pairs = [("its outputs", chunk.outputs, theirs), ("a step's outputs", each, stepped)]
        if log_std is not None:
            pairs.append(("log_std", policy.decoder.log_std.detach().expand_as(log_std), log_std.detach()))
        for what, ours, own in pairs:
            if not (error := _error(ours, own, (0, 1))) < allowed:
                return f"{what} would differ by {100 * error:.2g}%"
        if not (error := _error(first, state)) < allowed:
            return f"the state after some steps would differ by {100 * error:.2g}%"
        return self._compare_gradients(outputs, log_std, resets, valid) if gradients else None

    def _compare_gradients(self, outputs, log_std, resets, valid):
        index, chunk = torch.arange(AGENTS, device=resets.device), self.layers.chunk(AGENTS)
        slope = torch.cos(torch.arange(outputs.numel(), device=outputs.device)).view(outputs.shape)
        with torch.enable_grad():
            ((outputs * slope).sum() + (0.0 if log_std is None else log_std.sum())).backward()
        self.arena.flat("gradients").zero_()
        chunk.grad_outputs.copy_(slope)
        chunk.grad_log_std.fill_(1.0)
        self.layers.backward(chunk, resets, valid, index, 0)
        for name, parameter in self.policy.named_parameters():
            theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not (error := _error(self.arena[f"gradients/policy.{name}"], theirs)) < 0.05:
                return f"the gradient of {name} would differ by {100 * error:.2g}%"
        return None


def _error(ours, theirs, dims=None):
    """The largest relative error of the norms over `dims`, or over all of them."""
    return float(((ours - theirs).norm(dim=dims) / (theirs.norm(dim=dims) + 1e-6)).max())


# ---------------------------------------------------------------------------------------------------------------------
# The engine

CHUNK_STEPS = 1024  # float32 steps that one worker takes through the network at once: what fits its caches


class Compiled(engines.Autograd):
    """The default network on a CPU. Each worker has buffers of its own, takes its environments' rollout in one call if
    the products are ours, and in learning its share of the minibatch's segments, chunk by chunk."""

    name = "compiled"

    def __init__(self, policy, vecenv, config, segments, first_agent=0):
        super().__init__(policy, vecenv, config, segments, first_agent)
        self.learners = vecenv.num_workers
        self._start_pool()

    difference = staticmethod(difference)

    def register(self, arena):
        super().register(arena)
        self._register_layers(max(1, CHUNK_STEPS * 4 // self.precision.itemsize // self.horizon))

    def _register_layers(self, rows):
        """The buffers of the rollout's workers and of as many learners, who take `rows` segments at once."""
        arena, M, T = self.arena, self.segments, self.horizon
        bounds = [M * worker // self.learners for worker in range(self.learners + 1)]
        self.chunks = [[(start, min(rows, last - start)) for start in range(first, last, rows)]
                       for first, last in itertools.pairwise(bounds)]
        self.actors = [Layers(self.policy, arena, f"actor {w}", steps=0, rows=self.largest, precision=self.precision)
                       for w in range(self.vecenv.num_workers)]  # fmt: skip
        self.layers = [Layers(self.policy, arena, f"learner {w}", steps=T, rows=min(rows, M), precision=self.precision)
                       for w in range(self.learners)]  # fmt: skip
        for w in range(1, self.learners):  # worker 0 adds into the gradients themselves
            for name, parameter in self.policy.named_parameters():
                arena.register(f"gradients {w}/policy.{name}", parameter.shape, group=f"gradients {w}")

    def bind(self):
        super().bind()
        self._bind_layers()

    def _bind_layers(self):
        for actor in self.actors:
            actor.bind()
        groups = ["gradients", *(f"gradients {w}" for w in range(1, self.learners))]
        for layers, group in zip(self.layers, groups, strict=True):
            layers.bind(group)
        self.gradients = [self.arena.flat(group) for group in groups]
        self.flat_observations = self.storage["observations"].view(self.horizon + 1, self.num_agents, -1)

    @property
    def rollout_name(self):
        """How the rollout runs: "compiled", all of a buffer's steps in one call, or "plain"."""
        one_call = self.vecenv.can_step_in_kernels and self.actors[0].in_one_call
        return "compiled" if one_call and self.config["rollout"] != "plain" else "plain"

    def _run_workers(self):
        with engines.torch_threads(self.vecenv.threads_per_worker):
            return self.in_parallel(self._rollout, range(self.vecenv.num_workers))

    @torch.no_grad()
    def _rollout(self, worker):
        self.actors[worker].refresh()
        if self.rollout_name == "plain":
            return super()._rollout(worker)
        buffers = range(worker, self.vecenv.num_buffers, self.vecenv.num_workers)
        return sum(self._rollout_in_one_call(worker, buffer) for buffer in buffers)

    def _rollout_in_one_call(self, worker, buffer):
        """All steps of one buffer without the interpreter: a step of few agents costs half as much."""
        begun, s, agents = time.perf_counter(), self.storage, self.vecenv.ranges[buffer]
        names, log_std = ("resets", "valid", "actions", "terminals", "truncations"), self.policy.decoder.log_std
        final_observations = s["final_observations"].view(self.num_agents, -1)
        share = self.actors[worker].rollout(
            agents, self.vecenv.addresses(buffer),
            (self.flat_observations, *(s[name] for name in names), final_observations),
            [state[agents] for state in self.state["mingru"]], self.scratch[worker]["mingru"], heads=self.heads,
            log_std=None if log_std is None else log_std.data, masks=s["action_masks"], seed=self.config["seed"],
            first_agent=self.first_agent, clock=self.arena["steps"], logprobs=self.logprobs, values=self.values,
            bootstraps=self.bootstraps)
        self.vecenv.finish(buffer)
        return share * (time.perf_counter() - begun)

    def _act(self, worker, observations, state, resets, valid):
        log_std = self.policy.decoder.log_std
        outputs = self.actors[worker].step(observations, state["mingru"], resets, valid)
        return outputs, None if log_std is None else log_std.data

    def _threads(self, rows):
        """The workers are the threads."""
        return self.vecenv.threads_per_worker

    def learn(self, index):
        self.in_parallel(self._learn, range(self.learners))
        for other in self.gradients[1:]:
            self.gradients[0].add_(other)

    def _learn(self, worker):
        """One worker's segments of the minibatch, chunk by chunk, so that a chunk's activations stay in cache."""
        s, layers, log_std = self.storage, self.layers[worker], self.policy.decoder.log_std
        self.gradients[worker].zero_()
        layers.refresh()
        for start, count in self.chunks[worker]:
            chunk = layers.chunk(count)
            layers.gather(chunk, self.flat_observations, self.index, start)
            for layer, states in enumerate(chunk.states):
                torch.index_select(self.initial_state["mingru"][layer], 0, self.index[start : start + count],
                                   out=states[0])  # fmt: skip
            flags = s["resets"], s["valid"], self.index, start
            layers.forward(chunk, *flags)
            self._loss(chunk.outputs, chunk.grad_outputs, start, self.sums[worker, : kernels.SUMS],
                       None if log_std is None else log_std.data, chunk.grad_log_std)  # fmt: skip
            layers.backward(chunk, *flags)

    def outdated(self, thoroughly=False):
        why = engines.edited(self.policy)
        return self.difference(self.policy, self.vecenv, self.torch_device) if thoroughly and why is None else why
