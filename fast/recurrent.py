"""Run torch's LSTM and GRU over segments, one call for all steps.

    out, memory = recurrent.scan(nn.LSTM(64, 64), x, (h, c), resets, valid)
    python -m pytest tests/test_recurrent.py          # against the layers' own calls

A reset clears an agent's memory. torch's layers cannot do that inside of a segment, so they are
called step by step, each time with a dozen small operations and their gradients. Here a step is
`gates += h · W` and a loop over the gates; products that do not depend on the step before, such as
the gradients of the weights, are one for the whole segment. A CPU takes all steps of a block of
agents in one kernel. A GPU takes two nodes for a step of all agents: cuBLAS, and a kernel with a
thread for each channel of an agent.
Formulas: Hochreiter and Schmidhuber 1997 and Cho et al. 2014, with torch's order and biases.
"""
import math

import torch
from torch import nn
from torch.nn.functional import linear

from arena import (
    INT0,
    ONE,
    ZERO,
    as_array,
    distinct_driver,
    driver,
    on_gpu,
    run,
    without_torch_function,
)
from fast import products
from fast.products import BLOCK, multiply_rows
from kernels import sigmoid_cell, tanh_cell

COST = 5  # nanoseconds that a gate takes


def is_supported(layer, x):
    """Return whether `scan` computes what layer(x) does, and is faster.

    The layer must be one of torch's without changes, in float32. On a CPU, which needs a compiler
    for fast/tile.c, x must have several steps, or one of many agents.
    """
    has_hooks = (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
                 or layer._backward_pre_hooks)
    has_options = (layer.bidirectional or layer.batch_first or layer.proj_size or not layer.bias
                   or (layer.dropout and layer.training))
    is_large = len(x) > 1 or x.shape[1] >= products.ROWS
    return (type(layer) in SCANS and x.dtype == torch.float32
            and not has_hooks and not has_options and "forward" not in vars(layer)
            and not products.is_traced() and not nn.utils.parametrize.is_parametrized(layer)
            and (on_gpu(x) or (is_large and x.device.type == "cpu"
                               and not products.find_problem())))


def scan(layer, x, memory, resets, valid):
    """Run an nn.LSTM or nn.GRU; return out (T, N, H) and the new memory.

    x (T, N, inputs); memory: a list of (layers, N, H). If resets (T, N) is 1, the memory is 0 in
    that step. If valid (T, N) is 0, the memory stays, and `out` repeats h. The gradient is not
    differentiable. Raises RuntimeError for a memory of another shape or dtype.
    """
    expected, layers = (layer.num_layers, x.shape[1], layer.hidden_size), []
    if any(tensor.shape != expected or tensor.dtype != torch.float32 for tensor in memory):
        shapes = [tuple(tensor.shape) for tensor in memory]
        raise RuntimeError(f"memory {shapes}: float32 {expected} is expected.")
    names = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
    for k in range(layer.num_layers):
        weights = [getattr(layer, f"{name}_l{k}") for name in names]
        x, *state = SCANS[type(layer)].apply(
            x, *weights, resets, valid, *(tensor[k] for tensor in memory))
        layers.append(state)
    return x, [torch.stack(tensors) for tensors in zip(*layers, strict=True)]


def _begin(x, resets, state):
    """Return states (T + 1, N, H), of which the first is set, and keep.

    keep (T + 1, N) is multiplied with them: 0 in a reset, else 1.
    """
    T, N = x.shape[:2]
    keep = x.new_ones(T + 1, N)
    torch.eq(resets, 0, out=keep[:T])
    states = [tensor.new_empty(T + 1, *tensor.shape) for tensor in state]
    for tensor, first in zip(states, state, strict=True):
        torch.mul(first, keep[0].unsqueeze(1), out=tensor[0])
    return states, keep


def _multiply(x, matrix, bias=None):
    return linear(x, matrix.t(), bias) if on_gpu(x) else products.multiply(x, matrix, bias)


def _gradients(grad, *inputs):
    """Return the gradients of the weight of each of `inputs`, and of the bias."""
    if on_gpu(grad):
        grad = grad.flatten(0, 1)
        return *(grad.t() @ x.flatten(0, 1) for x in inputs), grad.sum(0)
    weights, biases = zip(*(products.gradients(grad, x) for x in inputs), strict=True)
    return *weights, biases[0]


def _run_step(function, t, *tensors):
    """Call function(first, last, t, *arrays) on a GPU; the last array is (..., N, H).

    Each of the N · H lanes is one channel of an agent.
    """
    run(function, math.prod(tensors[-1].shape[-2:]), COST, t, *map(as_array, tensors))


def _run(function, matrix, *arrays):
    """Call function(first, last, packed matrix, *arrays) over the agents on a CPU.

    These are the second axis of arrays[0]. Arrays that are written to must be contiguous: others
    are copied.
    """
    T, N, G = arrays[0].shape
    run(function, N, T * (matrix.numel() // products.RATE + COST * G), products.pack_tensor(matrix),
        *map(products.to_array, arrays))


# --------------------------------------------------------------------------------------------------
# LSTM: gates i, f, g, o


@distinct_driver
def _lstm_lanes(begin, end, gates, h, c, valid, keep, out, next_h, next_c):
    H = h.shape[1]
    for n in range(begin, end):
        i, f = gates[n, :H], gates[n, H : 2 * H]
        g, o = gates[n, 2 * H : 3 * H], gates[n, 3 * H :]
        is_valid = valid[n] != 0
        for j in range(H):
            i[j], f[j] = sigmoid_cell(i[j]), sigmoid_cell(f[j])
            g[j], o[j] = tanh_cell(g[j]), sigmoid_cell(o[j])
            cell = f[j] * c[n, j] + i[j] * g[j]
            new = o[j] * tanh_cell(cell) if is_valid else h[n, j]
            cell = cell if is_valid else c[n, j]
            out[n, j], next_h[n, j], next_c[n, j] = new, new * keep[n], cell * keep[n]


@distinct_driver
def _lstm_grad_lanes(begin, end, gates, c, valid, keep, grad_out, grad_h, grad_c):
    # gates become their inputs' gradients; grad_h and grad_c those of this step's h and c, less
    # h's part in the gates
    H = c.shape[1]
    for n in range(begin, end):
        i, f = gates[n, :H], gates[n, H : 2 * H]
        g, o = gates[n, 2 * H : 3 * H], gates[n, 3 * H :]
        is_valid = valid[n] != 0
        for j in range(H):
            tanh_c = tanh_cell(f[j] * c[n, j] + i[j] * g[j])
            dh = grad_out[n, j] + keep[n] * grad_h[n, j]
            before = keep[n] * grad_c[n, j]
            dc = before + dh * o[j] * (ONE - tanh_c * tanh_c)
            di, df = dc * g[j] * i[j] * (ONE - i[j]), dc * c[n, j] * f[j] * (ONE - f[j])
            dg, do = dc * i[j] * (ONE - g[j] * g[j]), dh * tanh_c * o[j] * (ONE - o[j])
            grad_h[n, j], grad_c[n, j] = ZERO if is_valid else dh, dc * f[j] if is_valid else before
            i[j], f[j] = di if is_valid else ZERO, df if is_valid else ZERO
            g[j], o[j] = dg if is_valid else ZERO, do if is_valid else ZERO


@driver
def _lstm_scan(begin, end, packed, gates, hs, cs, valid, keep, out):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        for t in range(len(gates)):
            rows = gates[t, first:last]
            multiply_rows(last - first, hs[t, first:last], packed, rows.reshape(-1), rows.shape[1],
                          rows)
            _lstm_lanes(first, last, gates[t], hs[t], cs[t], valid[t], keep[t + 1], out[t],
                        hs[t + 1], cs[t + 1])


@driver
def _lstm_scan_grad(begin, end, packed, gates, cs, valid, keep, grad_out, grad_h, grad_c):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        rows = grad_h[first:last]
        for t in range(len(gates) - 1, -1, -1):
            _lstm_grad_lanes(first, last, gates[t], cs[t], valid[t], keep[t + 1], grad_out[t],
                             grad_h, grad_c)
            multiply_rows(last - first, gates[t, first:last], packed, rows.reshape(-1),
                          rows.shape[1], rows)


@driver
def _lstm_cuda(begin, end, t, gates, hs, cs, valid, keep, out):
    # a lane is a channel j of agent n: the CPU's driver gets arrays of that channel alone
    H = out.shape[2]
    for lane in range(begin, end):
        n, j = lane // H, lane % H
        channel = slice(j, j + 1)
        _lstm_lanes(n, n + 1, gates[t, :, j::H], hs[t, :, channel], cs[t, :, channel], valid[t],
                    keep[t + 1], out[t, :, channel], hs[t + 1, :, channel], cs[t + 1, :, channel])


@driver
def _lstm_grad_cuda(begin, end, t, gates, cs, valid, keep, grad_out, grad_h, grad_c):
    H = grad_h.shape[1]
    for lane in range(begin, end):
        n, j = lane // H, lane % H
        channel = slice(j, j + 1)
        _lstm_grad_lanes(n, n + 1, gates[t, :, j::H], cs[t, :, channel], valid[t], keep[t + 1],
                         grad_out[t, :, channel], grad_h[:, channel], grad_c[:, channel])


class _LSTM(torch.autograd.Function):

    @staticmethod
    @without_torch_function
    def forward(ctx, x, weight_ih, weight_hh, bias_ih, bias_hh, resets, valid, h, c):
        (hs, cs), keep = _begin(x, resets, (h, c))
        gates = _multiply(x, weight_ih.t(), bias_ih + bias_hh)
        tensors = gates, hs, cs, valid, keep, torch.empty_like(hs[1:])
        if on_gpu(x):
            for t in range(len(x)):
                gates[t].addmm_(hs[t], weight_hh.t())
                _run_step(_lstm_cuda, t, *tensors)
        else:
            _run(_lstm_scan, weight_hh.t(), *tensors)
        ctx.save_for_backward(x, weight_ih, weight_hh, valid, keep, hs, cs, gates)
        return tensors[-1], hs[-1], cs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_h, grad_c):
        x, weight_ih, weight_hh, valid, keep, hs, cs, gates = ctx.saved_tensors
        gates, grad_out = gates.clone(), grad_out.contiguous()
        grad_h, grad_c = (grad.clone(memory_format=torch.contiguous_format)
                          for grad in (grad_h, grad_c))
        tensors = gates, cs, valid, keep, grad_out, grad_h, grad_c
        if on_gpu(x):
            for t in reversed(range(len(x))):
                _run_step(_lstm_grad_cuda, t, *tensors)
                grad_h.addmm_(gates[t], weight_hh)
        else:
            _run(_lstm_scan_grad, weight_hh, *tensors)
        first = keep[0].unsqueeze(1)
        grad_weight, grad_state_weight, bias = _gradients(gates, x, hs[:-1])
        # both biases are added to all gates
        return (_multiply(gates, weight_ih), grad_weight, grad_state_weight, bias, bias,
                None, None, grad_h * first, grad_c * first)


# --------------------------------------------------------------------------------------------------
# GRU: gates r, z, n; the memory's part of n is multiplied by r


@distinct_driver
def _gru_lanes(begin, end, gates, inner, h, valid, keep, out, next_h):
    H = h.shape[1]
    for k in range(begin, end):
        r, z, n = gates[k, :H], gates[k, H : 2 * H], gates[k, 2 * H :]
        of_r, of_z, of_n = inner[k, :H], inner[k, H : 2 * H], inner[k, 2 * H :]
        is_valid = valid[k] != 0
        for j in range(H):
            r[j], z[j] = sigmoid_cell(r[j] + of_r[j]), sigmoid_cell(z[j] + of_z[j])
            n[j] = tanh_cell(n[j] + r[j] * of_n[j])
            new = n[j] + z[j] * (h[k, j] - n[j]) if is_valid else h[k, j]
            out[k, j], next_h[k, j] = new, new * keep[k]


@distinct_driver
def _gru_grad_lanes(begin, end, gates, inner, h, valid, keep, grad_out, grad_h):
    # gates and inner become the gradients of the input's and the memory's part
    H = h.shape[1]
    for k in range(begin, end):
        r, z, n = gates[k, :H], gates[k, H : 2 * H], gates[k, 2 * H :]
        of_r, of_z, of_n = inner[k, :H], inner[k, H : 2 * H], inner[k, 2 * H :]
        is_valid = valid[k] != 0
        for j in range(H):
            dh = grad_out[k, j] + keep[k] * grad_h[k, j]
            dn = dh * (ONE - z[j]) * (ONE - n[j] * n[j])
            dz = dh * (h[k, j] - n[j]) * z[j] * (ONE - z[j])
            dr = dn * of_n[j] * r[j] * (ONE - r[j])
            grad_h[k, j] = dh * z[j] if is_valid else dh
            of_r[j], of_z[j] = dr if is_valid else ZERO, dz if is_valid else ZERO
            of_n[j] = dn * r[j] if is_valid else ZERO
            r[j], z[j], n[j] = of_r[j], of_z[j], dn if is_valid else ZERO


@driver
def _gru_scan(begin, end, packed, gates, inner, bias, hs, valid, keep, out):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        for t in range(len(gates)):
            multiply_rows(last - first, hs[t, first:last], packed, bias, INT0, inner[t, first:last])
            _gru_lanes(first, last, gates[t], inner[t], hs[t], valid[t], keep[t + 1], out[t],
                       hs[t + 1])


@driver
def _gru_scan_grad(begin, end, packed, gates, inner, hs, valid, keep, grad_out, grad_h):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        rows = grad_h[first:last]
        for t in range(len(gates) - 1, -1, -1):
            _gru_grad_lanes(first, last, gates[t], inner[t], hs[t], valid[t], keep[t + 1],
                            grad_out[t], grad_h)
            multiply_rows(last - first, inner[t, first:last], packed, rows.reshape(-1),
                          rows.shape[1], rows)


@driver
def _gru_cuda(begin, end, t, gates, inner, hs, valid, keep, out):
    H = out.shape[2]
    for lane in range(begin, end):
        n, j = lane // H, lane % H
        channel = slice(j, j + 1)
        _gru_lanes(n, n + 1, gates[t, :, j::H], inner[t, :, j::H], hs[t, :, channel], valid[t],
                   keep[t + 1], out[t, :, channel], hs[t + 1, :, channel])


@driver
def _gru_grad_cuda(begin, end, t, gates, inner, hs, valid, keep, grad_out, grad_h):
    H = grad_h.shape[1]
    for lane in range(begin, end):
        n, j = lane // H, lane % H
        channel = slice(j, j + 1)
        _gru_grad_lanes(n, n + 1, gates[t, :, j::H], inner[t, :, j::H], hs[t, :, channel], valid[t],
                        keep[t + 1], grad_out[t, :, channel], grad_h[:, channel])


class _GRU(torch.autograd.Function):

    @staticmethod
    @without_torch_function
    def forward(ctx, x, weight_ih, weight_hh, bias_ih, bias_hh, resets, valid, h):
        (hs,), keep = _begin(x, resets, (h,))
        gates, out = _multiply(x, weight_ih.t(), bias_ih), torch.empty_like(hs[1:])
        inner = torch.empty_like(gates)
        if on_gpu(x):
            for t in range(len(x)):
                torch.addmm(bias_hh, hs[t], weight_hh.t(), out=inner[t])
                _run_step(_gru_cuda, t, gates, inner, hs, valid, keep, out)
        else:
            _run(_gru_scan, weight_hh.t(), gates, inner, bias_hh, hs, valid, keep, out)
        ctx.save_for_backward(x, weight_ih, weight_hh, valid, keep, hs, gates, inner)
        return out, hs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_h):
        x, weight_ih, weight_hh, valid, keep, hs, gates, inner = ctx.saved_tensors
        gates, inner, grad_out = gates.clone(), inner.clone(), grad_out.contiguous()
        grad_h = grad_h.clone(memory_format=torch.contiguous_format)
        tensors = gates, inner, hs, valid, keep, grad_out, grad_h
        if on_gpu(x):
            for t in reversed(range(len(x))):
                _run_step(_gru_grad_cuda, t, *tensors)
                grad_h.addmm_(inner[t], weight_hh)
        else:
            _run(_gru_scan_grad, weight_hh, *tensors)
        grad_weight, bias = _gradients(gates, x)
        grad_state_weight, state_bias = _gradients(inner, hs[:-1])
        return (_multiply(gates, weight_ih), grad_weight, grad_state_weight, bias,
                state_bias, None, None, grad_h * keep[0].unsqueeze(1))


SCANS = {nn.LSTM: _LSTM, nn.GRU: _GRU}
