"""torch's LSTM and GRU over segments, on a CPU: one call for all steps, each way.

    out, memory = recurrent.scan(nn.LSTM(64, 64), x, (h, c), resets, valid)    # if recurrent.fits(layer, x)
    python -m pytest tests/test_recurrent.py                                   # against the layers' own calls

An agent's memory is cut where an episode begins. torch's layers cannot do that inside of a segment, so
they would be called step by step, each time with a dozen small operations and their gradients. Here a
step is `gates += h · W`, and a loop over the gates, for a block of agents at a time; what does not wait for
the step before, as the gradients of the weights, is one product for the whole segment.
Formulas: Hochreiter and Schmidhuber 1997 and Cho et al. 2014, in the order and with the biases of torch.
"""

import torch
from torch import nn

from arena import INT0, ONE, ZERO, distinct_driver, driver, run, without_torch_function
from fast import products
from fast.products import BLOCK, multiply_rows
from kernels import sigmoid_cell, tanh_cell

COST = 5  # nanoseconds that a gate takes


def fits(layer, x):
    """Whether `scan` computes what layer(x) would, and is worth packing the weights: one of torch's own layers as torch
    made it, in float32 on a CPU that has a compiler for fast/tile.c; several steps, or one of many agents."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return (type(layer) in SCANS and (len(x) > 1 or x.shape[1] >= products.ROWS)
            and x.device.type == "cpu" and x.dtype == torch.float32
            and not (layer.bidirectional or layer.batch_first or layer.proj_size or not layer.bias or any(hooks))
            and not (layer.dropout and layer.training) and "forward" not in vars(layer)
            and not products.watched() and not nn.utils.parametrize.is_parametrized(layer)
            and not products.missing())


def scan(layer, x, memory, resets, valid):
    """x (T, N, inputs) and memory, a list of (layers, N, H), through an nn.LSTM or nn.GRU -> out (T, N, H), new memory.
    If resets (T, N) is 1, the memory is 0 before that step. If valid (T, N) is 0, the memory stays, and `out` repeats
    h. The gradient has none of its own: create_graph raises a RuntimeError."""
    expected, after = (layer.num_layers, x.shape[1], layer.hidden_size), []
    if any(tensor.shape != expected or tensor.dtype != torch.float32 for tensor in memory):
        raise RuntimeError(f"memory {[tuple(tensor.shape) for tensor in memory]}: float32 {expected} is expected.")
    for k in range(layer.num_layers):
        weights = [getattr(layer, f"{name}_l{k}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        x, *new = SCANS[type(layer)].apply(x, *weights, resets, valid, *(tensor[k] for tensor in memory))
        after.append(new)
    return x, [torch.stack(tensors) for tensors in zip(*after, strict=True)]


def _begin(x, resets, state):
    """The states before each step, (T + 1, N, H), of which the first is there, and keep (T + 1, N), with which they
    are multiplied: 0 where an episode begins, else 1."""
    T, N = x.shape[:2]
    keep = torch.ones(T + 1, N, dtype=x.dtype)
    keep[:T] -= resets.to(x.dtype)
    before = [tensor.new_empty(T + 1, *tensor.shape) for tensor in state]
    for tensor, first in zip(before, state, strict=True):
        torch.mul(first, keep[0].unsqueeze(1), out=tensor[0])
    return before, keep


def _run(function, matrix, *arrays):
    """function(first, last, the matrix packed, *arrays) over the agents, the second axis of `arrays[0]`. What it writes
    to must be contiguous, because of anything else it gets a copy."""
    T, N, G = arrays[0].shape
    run(function, N, T * (matrix.numel() // products.RATE + COST * G), products.packed(matrix),
                *map(products.array, arrays))


# --------------------------------------------------------------------------------------------------
# LSTM: gates i, f, g, o


@distinct_driver
def _lstm_lanes(begin, end, gates, h, c, valid, keep, out, next_h, next_c):
    H = h.shape[1]
    for n in range(begin, end):
        i, f, g, o = gates[n, :H], gates[n, H : 2 * H], gates[n, 2 * H : 3 * H], gates[n, 3 * H :]
        live = valid[n] != 0
        for j in range(H):
            i[j], f[j], g[j], o[j] = sigmoid_cell(i[j]), sigmoid_cell(f[j]), tanh_cell(g[j]), sigmoid_cell(o[j])
            cell = f[j] * c[n, j] + i[j] * g[j]
            new = o[j] * tanh_cell(cell) if live else h[n, j]
            cell = cell if live else c[n, j]
            out[n, j], next_h[n, j], next_c[n, j] = new, new * keep[n], cell * keep[n]


@distinct_driver
def _lstm_grad_lanes(begin, end, gates, c, valid, keep, grad_out, grad_h, grad_c):
    # gates become their inputs' gradients; grad_h and grad_c those of this step's h and c, less h's part in the gates
    H = c.shape[1]
    for n in range(begin, end):
        i, f, g, o = gates[n, :H], gates[n, H : 2 * H], gates[n, 2 * H : 3 * H], gates[n, 3 * H :]
        live = valid[n] != 0
        for j in range(H):
            top = tanh_cell(f[j] * c[n, j] + i[j] * g[j])
            dh = grad_out[n, j] + keep[n] * grad_h[n, j]
            before = keep[n] * grad_c[n, j]
            dc = before + dh * o[j] * (ONE - top * top)
            di, df = dc * g[j] * i[j] * (ONE - i[j]), dc * c[n, j] * f[j] * (ONE - f[j])
            dg, do = dc * i[j] * (ONE - g[j] * g[j]), dh * top * o[j] * (ONE - o[j])
            grad_h[n, j], grad_c[n, j] = ZERO if live else dh, dc * f[j] if live else before
            i[j], f[j] = di if live else ZERO, df if live else ZERO
            g[j], o[j] = dg if live else ZERO, do if live else ZERO


@driver
def _lstm_scan(begin, end, packed, gates, hs, cs, valid, keep, out):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        for t in range(len(gates)):
            rows = gates[t, first:last]
            multiply_rows(last - first, hs[t, first:last], packed, rows.reshape(-1), rows.shape[1], rows)
            _lstm_lanes(first, last, gates[t], hs[t], cs[t], valid[t], keep[t + 1], out[t], hs[t + 1], cs[t + 1])


@driver
def _lstm_scan_grad(begin, end, packed, gates, cs, valid, keep, grad_out, grad_h, grad_c):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        rows = grad_h[first:last]
        for t in range(len(gates) - 1, -1, -1):
            _lstm_grad_lanes(first, last, gates[t], cs[t], valid[t], keep[t + 1], grad_out[t], grad_h, grad_c)
            multiply_rows(last - first, gates[t, first:last], packed, rows.reshape(-1), rows.shape[1], rows)


class _LSTM(torch.autograd.Function):

    @staticmethod
    @without_torch_function
    def forward(ctx, x, weight_ih, weight_hh, bias_ih, bias_hh, resets, valid, h, c):
        (hs, cs), keep = _begin(x, resets, (h, c))
        gates, out = products.multiply(x, weight_ih.t(), bias_ih + bias_hh), torch.empty_like(hs[1:])
        _run(_lstm_scan, weight_hh.t(), gates, hs, cs, valid, keep, out)
        ctx.save_for_backward(x, weight_ih, weight_hh, valid, keep, hs, cs, gates)
        return out, hs[-1].clone(), cs[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_h, grad_c):
        x, weight_ih, weight_hh, valid, keep, hs, cs, gates = ctx.saved_tensors
        gates, grad_out = gates.clone(), grad_out.contiguous()
        grad_h, grad_c = (grad.clone(memory_format=torch.contiguous_format) for grad in (grad_h, grad_c))
        _run(_lstm_scan_grad, weight_hh, gates, cs, valid, keep, grad_out, grad_h, grad_c)
        first, (of_input, bias) = keep[0].unsqueeze(1), products.gradients(gates, x)
        of_state, _ = products.gradients(gates, hs[:-1])
        return (products.multiply(gates, weight_ih), of_input, of_state, bias, bias, None, None,
                grad_h * first, grad_c * first)  # both biases are added to all gates


# --------------------------------------------------------------------------------------------------
# GRU: gates r, z, n; what the memory gives n is multiplied by r


@distinct_driver
def _gru_lanes(begin, end, gates, inner, h, valid, keep, out, next_h):
    H = h.shape[1]
    for k in range(begin, end):
        r, z, n = gates[k, :H], gates[k, H : 2 * H], gates[k, 2 * H :]
        of_r, of_z, of_n, live = inner[k, :H], inner[k, H : 2 * H], inner[k, 2 * H :], valid[k] != 0
        for j in range(H):
            r[j], z[j] = sigmoid_cell(r[j] + of_r[j]), sigmoid_cell(z[j] + of_z[j])
            n[j] = tanh_cell(n[j] + r[j] * of_n[j])
            new = n[j] + z[j] * (h[k, j] - n[j]) if live else h[k, j]
            out[k, j], next_h[k, j] = new, new * keep[k]


@distinct_driver
def _gru_grad_lanes(begin, end, gates, inner, h, valid, keep, grad_out, grad_h):
    # gates and inner become the gradients of what the input and the memory gave them
    H = h.shape[1]
    for k in range(begin, end):
        r, z, n = gates[k, :H], gates[k, H : 2 * H], gates[k, 2 * H :]
        of_r, of_z, of_n, live = inner[k, :H], inner[k, H : 2 * H], inner[k, 2 * H :], valid[k] != 0
        for j in range(H):
            dh = grad_out[k, j] + keep[k] * grad_h[k, j]
            dn = dh * (ONE - z[j]) * (ONE - n[j] * n[j])
            dz, dr = dh * (h[k, j] - n[j]) * z[j] * (ONE - z[j]), dn * of_n[j] * r[j] * (ONE - r[j])
            grad_h[k, j] = dh * z[j] if live else dh
            of_r[j], of_z[j], of_n[j] = dr if live else ZERO, dz if live else ZERO, dn * r[j] if live else ZERO
            r[j], z[j], n[j] = of_r[j], of_z[j], dn if live else ZERO


@driver
def _gru_scan(begin, end, packed, gates, inner, bias, hs, valid, keep, out):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        for t in range(len(gates)):
            multiply_rows(last - first, hs[t, first:last], packed, bias, INT0, inner[t, first:last])
            _gru_lanes(first, last, gates[t], inner[t], hs[t], valid[t], keep[t + 1], out[t], hs[t + 1])


@driver
def _gru_scan_grad(begin, end, packed, gates, inner, hs, valid, keep, grad_out, grad_h):
    for first in range(begin, end, BLOCK):
        last = min(first + BLOCK, end)
        rows = grad_h[first:last]
        for t in range(len(gates) - 1, -1, -1):
            _gru_grad_lanes(first, last, gates[t], inner[t], hs[t], valid[t], keep[t + 1], grad_out[t], grad_h)
            multiply_rows(last - first, inner[t, first:last], packed, rows.reshape(-1), rows.shape[1], rows)


class _GRU(torch.autograd.Function):

    @staticmethod
    @without_torch_function
    def forward(ctx, x, weight_ih, weight_hh, bias_ih, bias_hh, resets, valid, h):
        (hs,), keep = _begin(x, resets, (h,))
        gates, out = products.multiply(x, weight_ih.t(), bias_ih), torch.empty_like(hs[1:])
        inner = torch.empty_like(gates)
        _run(_gru_scan, weight_hh.t(), gates, inner, bias_hh, hs, valid, keep, out)
        ctx.save_for_backward(x, weight_ih, weight_hh, valid, keep, hs, gates, inner)
        return out, hs[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_h):
        x, weight_ih, weight_hh, valid, keep, hs, gates, inner = ctx.saved_tensors
        gates, inner, grad_out = gates.clone(), inner.clone(), grad_out.contiguous()
        grad_h = grad_h.clone(memory_format=torch.contiguous_format)
        _run(_gru_scan_grad, weight_hh, gates, inner, hs, valid, keep, grad_out, grad_h)
        (of_input, bias), (of_state, state_bias) = products.gradients(gates, x), products.gradients(inner, hs[:-1])
        return (products.multiply(gates, weight_ih), of_input, of_state, bias, state_bias, None, None,
                grad_h * keep[0].unsqueeze(1))


SCANS = {nn.LSTM: _LSTM, nn.GRU: _GRU}
