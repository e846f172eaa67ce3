"""Run three networks of models.py on a CPU in few calls, without autograd.

    python pufferl.py train breakout --train.engine compiled     # auto chooses it, too
    python -m pytest tests/test_compiled.py tests/test_engines.py

They are MinGRUPolicy, the default, FeedForward and Separate. The algorithm is in ppo.py, the same
steps for any network in engines.py: this file can be deleted, and `engines.Autograd` runs
everything. First come the network's step, a buffer's rollout and a learner's share of a minibatch,
each a single call without the interpreter. Then comes `Compiled`, the engine. The calls of an epoch
(pufferl.py shows the same for advantages, draw and optimizer):

    PuffeRL.evaluate > Compiled.rollout > ThreadPool.run > _run_in_one_call, in each thread
        > _rollout_cpu, for each step
            > _bootstrap_cpu, the value of final observations of the step before
            > _act_cpu, the network and the draw of actions
            > c_calls.step_environments > ocean_step in ocean/binding.c > c_step of the header
        (environments in Python: ThreadPool.run > StepByStep.run > _act_cpu, vecenv.advance)
    PuffeRL.train > _minibatch_step > _compute_gradients > Compiled.backward > Engine.backward
        > _backward_share, in each thread > _learn_cpu, for some segments
            > _forward_cpu, kernels._ppo_loss_*, _backward_cpu

The matrix products are those of fast/products.py: a call into torch takes longer than such a small
product. A few segments at a time pass the whole network, forward and backward, so that the results
between the products stay in the second-level cache.

A tower is a chain of linear maps from the observation to some of the outputs. A network has one
tower, or two if policy and value are apart (models.Separate).
"""

import contextlib
import functools
import math

import numpy as np
import torch
from torch import nn

import engines
import kernels
import models
from arena import (
    INT0,
    as_array,
    clock,
    distinct_driver,
    driver,
    expand_log_std,
    f32,
    optional_masks,
    optional_squash,
    prefetch,
    run,
    threads,
    u32,
    u64,
)
from fast import products
from fast.c_calls import cycles, step_environments
from fast.products import (
    BLOCK,
    accumulate_rows,
    add_row_sums,
    is_half,
    multiply_rows,
    pack,
    packed_size,
)

if products.find_problem():
    raise RuntimeError(products.find_problem())
STEPS_AT_ONCE = 64  # steps that pass the network at once: of one segment, or of several short ones
RELU, TANH = range(2)
ACTIVATIONS = {nn.ReLU: RELU, nn.Tanh: TANH}  # of networks without memory


@distinct_driver
def _activate(kind, rows):
    """Write max(rows, 0), where NaN stays NaN, or tanh(rows), in place."""
    numbers = rows.reshape(-1)
    if kind == RELU:
        for i in range(len(numbers)):
            numbers[i] = f32(0) if numbers[i] < f32(0) else numbers[i]
    else:
        for i in range(len(numbers)):
            numbers[i] = kernels.tanh_cell(numbers[i])


@distinct_driver
def _activate_grad(kind, grad, rows):
    """Multiply grad by the slope of `_activate`, which returned `rows`, in place."""
    numbers, results = grad.reshape(-1), rows.reshape(-1)
    if kind == RELU:
        for i in range(len(numbers)):
            numbers[i] = numbers[i] if results[i] > f32(0) else f32(0)
    else:
        for i in range(len(numbers)):
            numbers[i] *= f32(1) - results[i] * results[i]


@driver
def _move(begin, end, parts, outputs, joins):
    """Copy the towers' parts to outputs[begin:end], side by side; back if not `joins`.

    The part of a single tower is `outputs` itself.
    """
    if len(parts) == 1:
        return
    first = 0
    for k in range(len(parts)):
        for r in range(begin, end):
            for c in range(parts[k].shape[1]):
                if joins:
                    outputs[r, first + c] = parts[k][r, c]
                else:
                    parts[k][r, c] = outputs[r, first + c]
        first += parts[k].shape[1]


# --------------------------------------------------------------------------------------------------
# The network's step, a block of agents at a time: results between the layers stay in cache.
# A network without memory has a state of None; numba compiles only the branch of its type.


@distinct_driver
def _read_observations(begin, end, observations, shift, scale, out):
    """Write observations[begin:end] as floats to `out`; a shift normalises them."""
    if len(shift) > 0:
        for i in range(begin, end):
            row, target = observations[i], out[i - begin]
            for j in range(len(row)):
                target[j] = kernels.normalise_cell(shift.dtype.type(row[j]), shift[j], scale[j])
        return
    source, target = observations.reshape(-1), out.reshape(-1)
    first, numbers = u64(begin) * u64(out.shape[1]), u64(end - begin) * u64(out.shape[1])
    for i in range(numbers):
        target[i] = f32(source[first + i])


@driver
def _policy_step_cpu(begin, end, observations, network, state, resets, valid, scratch):
    """Compute one step of the agents in [begin, end).

    network: `Weights.arrays`. scratch: `actor_scratch`, whose fifth array gets the outputs.
    """
    towers, shift, scale, activation = network
    inputs, x, y, hgp, outputs, parts, _ = scratch
    for block in range(begin, end, BLOCK):
        stop = min(end, block + BLOCK)
        # begin, not block: a thread reuses the scratch rows of its range for each block
        n, rows = stop - block, slice(begin, begin + stop - block)
        _read_observations(block, stop, observations, shift, scale, inputs[rows])
        for k in range(len(towers)):
            encoder, layers, decoder = towers[k]
            source, target = x[rows], y[rows]
            multiply_rows(n, inputs[rows], encoder[0], encoder[1], INT0, source)
            if state is None:
                _activate(activation, source)
            for i in range(len(layers)):
                if state is None:
                    multiply_rows(n, source, layers[i][0], layers[i][1], INT0, target)
                    _activate(activation, target)
                else:
                    multiply_rows(n, source, layers[i][0], layers[i][1], INT0, hgp[rows])
                    kernels._mingru_step_lanes(INT0, n, hgp[rows], source, state[i][block:stop],
                                               resets[block:stop], valid[block:stop], target)
                source, target = target, source
            multiply_rows(n, source, decoder[0], decoder[1], INT0, parts[k][block:stop])
    _move(begin, end, parts, outputs, True)


@driver
def _values_cpu(begin, end, observations, network, state, state_copy, resets, valid, scratch,
                values):
    """Write V of the agents in [begin, end) to `values`; the state stays."""
    if state is not None:
        for layer in range(len(state)):
            for i in range(begin, end):
                for j in range(state_copy[layer].shape[1]):
                    state_copy[layer][i, j] = state[layer][i, j]
    _policy_step_cpu(begin, end, observations, network, state_copy, resets, valid, scratch)
    outputs = scratch[4]
    for i in range(begin, end):
        values[i] = outputs[i, outputs.shape[1] - 1]


# --------------------------------------------------------------------------------------------------
# The rollout of a range of environments in one call. With a call for each step, threads would wait
# for the interpreter's lock, and to wake a thread takes as long as a step of 256 agents.
# The functions below take the step t as well, so that environments in Python call them for one step
# at a time. Their arguments:
#   first: the buffer's first agent, among this process's. The lanes [begin, end) count from there.
#   network, state (a layer (n, H)), scratch: as in _policy_step_cpu; state_copy: like state,
#   overwritten. storage: observations (T + 1, N, D), resets, valid (T + 1, N), actions (T, N, ...),
#   terminals, truncations (T, N), final_observations (N, D). heads (None for continuous actions),
#   log_std (None for discrete ones), squash, masks (T + 1, N, A), seed, first_agent and counter,
#   (T,) int64, the `step` of row t: as in `kernels.sample`. Written: samples (T, N, ...), which is
#   `actions` unless they are squashed, logprobs (T, N), values (T + 1, N), bootstraps (T, N), which
#   must be 0


@driver
def _act_cpu(begin, end, t, first, network, storage, state, state_copy, scratch, heads, log_std,
             squash, masked, masks, seed, first_agent, counter, samples, logprobs, values,
             bootstraps):
    """Sample the actions of step t of agents begin to end; at t = T only values."""
    observations, resets, valid, actions, _, _, _ = storage
    rows, flags = observations[t, first:], (resets[t, first:], valid[t, first:])
    if t == len(actions):
        _values_cpu(begin, end, rows, network, state, state_copy, *flags, scratch,
                    values[t, first:])
        return
    _policy_step_cpu(begin, end, rows, network, state, *flags, scratch)
    outputs, choices = scratch[4], scratch[6]
    random = seed, u64(first_agent + first), counter[t : t + 1], False
    written = actions[t, first:], logprobs[t, first:], values[t, first:]
    if heads is not None:
        mask = masks[t, first:] if masked else masks[0]
        kernels._sample_discrete_lanes(begin, end, outputs, masked, mask, heads, *random, *written,
                                       choices)
    if log_std is not None:  # not `else`: numba compiles only what is not None
        kernels._sample_continuous_lanes(begin, end, outputs, log_std, squash, *random,
                                         samples[t, first:], *written)


@driver
def _bootstrap_cpu(begin, end, t, first, network, storage, state, state_copy, scratch, heads,
                   log_std, squash, masked, masks, seed, first_agent, counter, samples, logprobs,
                   values, bootstraps):
    """Write values of truncated agents' final observations to row t of bootstraps.

    These are the agents in [begin, end) that are truncated and not terminated.
    """
    _, _, _, _, terminals, truncations, final_observations = storage
    terminated, truncated = terminals[t, first:], truncations[t, first:]
    start = begin
    while start < end:
        stop = start
        while stop < end and truncated[stop] and not terminated[stop]:
            stop += 1
        if stop > start:  # neighbours in one step
            # no reset and all valid: of these agents, terminals are 0 and truncations are 1
            _values_cpu(start, stop, final_observations[first:], network, state, state_copy,
                        terminated, truncated, scratch, bootstraps[t, first:])
        start = stop + 1


@driver
def _rollout_cpu(environments, n, first, network, storage, *arguments):
    """Run all T steps of n agents, as StepByStep does step by step.

    Returns the share of the time that the environments took. environments: a tuple of the address
    of ocean_step, the address of the environments, the first one's number, the last one's + 1, and
    the addresses of the rows of each step, (T,) int64.
    """
    _, resets, _, actions, terminals, truncations, _ = storage
    in_environments, started = 0, cycles()
    for t in range(len(actions) + 1):
        if t > 0:
            _bootstrap_cpu(INT0, n, t - 1, first, network, storage, *arguments)
        _act_cpu(INT0, n, t, first, network, storage, *arguments)
        if t < len(actions):
            in_environments += step_environments(environments, t, first, first + n, terminals,
                                                 truncations, resets)
    return in_environments / (cycles() - started)


# --------------------------------------------------------------------------------------------------
# A learner's share of a minibatch in one call


@driver
def _forward_cpu(n, T, observations, initial, resets, valid, index, start, network, scratch):
    """Run the segments index[start : start + n] through the network.

    scratch: `Learner.scratch`. initial: a layer (N, H), or None without memory.
    """
    towers, shift, scale, activation = network
    activations, inputs, outputs, parts, carry = scratch[:5]
    D, rows = inputs.shape[1], T * n
    kernels._gather_lanes(INT0, n, observations, index, start, shift, scale,
                          inputs[:rows].reshape(T, n, D))
    for k in range(len(towers)):
        encoder, layers, decoder = towers[k]
        xs, hgps, states = activations[k]
        H = xs[0].shape[1]
        multiply_rows(rows, inputs[:rows], encoder[0], encoder[1], INT0, xs[0])
        if initial is None:
            _activate(activation, xs[0][:rows])
        for i in range(len(layers)):
            if initial is None:
                multiply_rows(rows, xs[i], layers[i][0], layers[i][1], INT0, xs[i + 1])
                _activate(activation, xs[i + 1][:rows])
            else:
                memory = states[i][: rows + n].reshape(T + 1, n, H)
                for m in range(n):
                    for j in range(H):
                        memory[0, m, j] = initial[i][index[start + m], j]
                multiply_rows(rows, xs[i], layers[i][0], layers[i][1], INT0, hgps[i])
                hgp = hgps[i][:rows].reshape(T, n, 3 * H)
                kernels._mingru_scan_lanes(
                    INT0, n, hgp, xs[i][:rows].reshape(T, n, H), memory, resets, valid, index,
                    start, xs[i + 1][:rows].reshape(T, n, H), hgp, carry)
        multiply_rows(rows, xs[len(layers)], decoder[0], decoder[1], INT0, parts[k])
    _move(INT0, rows, parts, outputs, True)


@driver
def _backward_cpu(n, T, initial, resets, valid, index, start, network, back, scratch, gradients):
    """Add the gradients of the weights over segments, given the outputs'.

    The arguments are those of `_forward_cpu`, whose activations are overwritten. back: the packed
    weights of layers and decoder, for the gradients of their inputs.
    """
    activation = network[3]
    (activations, inputs, _, _, carry, grad_outputs, grad_parts, grad_log_std, grad_x, sums, zeros,
     _) = scratch
    grad_towers, log_std = gradients
    H, rows = grad_x.shape[1], T * n
    add_row_sums(grad_log_std[: rows if len(log_std) > 0 else 0], log_std)
    _move(INT0, rows, grad_parts, grad_outputs, False)
    for k in range(len(grad_towers)):
        encoder, layers, decoder = grad_towers[k]
        xs, hgps, states = activations[k]
        half = is_half(network[0][k][0][0])
        grad, grad_out = grad_x[:rows], grad_parts[k][:rows]
        accumulate_rows(False, grad_out, xs[len(layers)][:rows], decoder[0])
        add_row_sums(grad_out, decoder[1])
        multiply_rows(rows, grad_out, back[k][1], zeros, INT0, grad)
        for i in range(len(layers) - 1, -1, -1):
            hgp, x = hgps[i][:rows], xs[i][:rows]
            if initial is None:
                _activate_grad(activation, grad, xs[i + 1][:rows])
                accumulate_rows(half, grad, x, layers[i][0])
                add_row_sums(grad, layers[i][1])
                multiply_rows(rows, grad, back[k][0][i], zeros, INT0, hgp)
                grad = hgp
            else:
                kernels._mingru_scan_grad_lanes(
                    INT0, n, hgp.reshape(T, n, 3 * H), x.reshape(T, n, H),
                    states[i][: rows + n].reshape(T + 1, n, H), resets, valid, index, start,
                    grad.reshape(T, n, H), sums[:n], carry)
                accumulate_rows(half, hgp, x, layers[i][0])
                add_row_sums(sums[:n], layers[i][1])
                multiply_rows(rows, hgp, back[k][0][i], grad.reshape(-1), H, grad)
        if initial is None:
            _activate_grad(activation, grad, xs[0][:rows])
        accumulate_rows(half, grad, inputs[:rows], encoder[0])
        add_row_sums(grad, encoder[1])


@driver
def _prefetch_segments(observations, index, first, last, T, third):
    """Prefetch a third (0, 1 or 2) of the steps of the segments index[first:last].

    Memory takes no more requests at once.
    """
    rows = T // 3 + 1
    for m in range(first, last):
        for t in range(third * rows, min(T, (third + 1) * rows)):
            prefetch(observations[t, index[m]])


@driver
def _learn_cpu(first, last, at_once, observations, initial, resets, index, network, back, scratch,
               gradients, log_std, squash, masked, masks, heads, rollout, written, statistics):
    """Compute the share index[first:last] of a minibatch, `at_once` at a time.

    Gradients and statistics are added to, new values and ratios written. rollout: (actions,
    logprobs, values, advantages, weights, valid, settings); these, log_std and squash are arguments
    of `kernels.ppo_loss`. written: (new_values, new_ratios). statistics: float64, at least
    max(T, at_once) rows of SUMS.
    """
    T, valid = len(rollout[0]), rollout[5]
    _, _, outputs, _, _, grad_outputs, _, grad_log_std, _, _, _, loss_rows = scratch
    width = outputs.shape[1]
    for start in range(first, last, at_once):
        n = min(at_once, last - start)
        rows, following = T * n, (start + n, min(last, start + n + at_once))
        _prefetch_segments(observations, index, *following, T, 0)
        _forward_cpu(n, T, observations, initial, resets, valid, index, start, network, scratch)
        _prefetch_segments(observations, index, *following, T, 1)
        out = outputs[:rows].reshape(T, n, width)
        grad = grad_outputs[:rows].reshape(T, n, width)
        if heads is not None:
            kernels._ppo_loss_discrete_lanes(INT0, n, out, index, start, masked, masks, heads,
                                             *rollout, grad, *written, statistics, loss_rows)
        if log_std is not None:  # see _act_cpu
            grad_std = grad_log_std[:rows].reshape(T, n, width - 1)
            kernels._ppo_loss_continuous(INT0, T, out, index, start, log_std[:, :n], squash,
                                         *rollout, grad, grad_std, *written, statistics)
        _backward_cpu(n, T, initial, resets, valid, index, start, network, back, scratch, gradients)
        _prefetch_segments(observations, index, *following, T, 2)


# --------------------------------------------------------------------------------------------------
# What these calls read and write, in the arena


@driver
def _pack_all_cpu(towers):
    for k in range(len(towers)):
        (encoder, layers, decoder, packed, packed_layers, packed_decoder, back,
         back_decoder) = towers[k]
        pack(encoder.T, packed)
        for i in range(len(layers)):
            pack(layers[i].T, packed_layers[i])
            pack(layers[i], back[i])
        pack(decoder.T, packed_decoder)
        pack(decoder, back_decoder)


def find_towers(policy):
    """Return how the linear maps of a network form towers.

    Returns ([(names of a tower's linear maps, rows of the decoder that it ends in), ...], name of
    the decoder, kind of activation). Raises ValueError if the activations differ, or are not among
    ACTIVATIONS.
    """
    if isinstance(policy, models.MinGRUPolicy):
        layers = [f"rnn.layers.{i}" for i in range(policy.num_layers)]
        return [(["encoder", *layers], slice(None))], "decoder", RELU
    prefix = "policy." if isinstance(policy, models.Normalized) else ""
    is_separate = isinstance(policy.get_submodule(prefix[:-1]), models.Separate)
    rows = ({"actor": slice(-1), "critic": slice(-1, None)} if is_separate
            else {"encoder": slice(None)})
    chains = {name: policy.get_submodule(prefix + name) for name in rows}
    kinds = {type(activation) for chain in chains.values() for activation in chain[1::2]}
    if len(kinds) != 1 or not kinds <= ACTIVATIONS.keys():
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise ValueError(f"its activations are {names}")
    towers = [([f"{prefix}{name}.{i}" for i in range(0, len(chain), 2)], rows[name])
              for name, chain in chains.items()]
    return towers, f"{prefix}decoder", ACTIVATIONS[kinds.pop()]


def _layers(state):
    """Return the recurrent state (layers, n, H) as a tuple of arrays, or None."""
    return None if state is None else tuple(map(as_array, state))


def _as_tower(maps):
    """Return a tower's maps as (encoder, layers, decoder)."""
    encoder, *layers, decoder = maps
    return encoder, tuple(layers), decoder


def _zeros(*shape):
    """Return a float32 array, aligned to 256 bytes."""
    size = math.prod(shape)
    memory = np.zeros(size + 64, f32)
    first = -memory.ctypes.data % 256 // 4
    return memory[first : first + size].reshape(shape)


class Weights:
    """Hold a network's weights, packed for the products.

    `_pack_all_cpu(masters)` packs them, after every change.

    precision: torch.bfloat16 rounds the operands of the products of encoder and layers, forward and
    backward. Sums, activations, states and the decoder are float32. Raises ValueError for a network
    of another form.
    """

    def __init__(self, policy, precision=torch.float32):
        self.policy = policy
        self.towers, self.decoder, self.activation = find_towers(policy)
        self.is_recurrent = isinstance(policy, models.MinGRUPolicy)
        towers = self.pairs(lambda name: as_array(policy.get_parameter(name).data))
        shapes = [[weight.shape for weight, _ in pairs] for pairs in towers]
        self.H, self.D = shapes[0][0]
        self.num_layers = len(shapes[0]) - 2
        self.inner = (3 if self.is_recurrent else 1) * self.H  # columns of a layer's product
        self.outputs = [tower[-1][0] for tower in shapes]  # columns of each tower
        self.width = sum(self.outputs)
        expected = [(self.H, self.D), *[(self.inner, self.H)] * self.num_layers]
        if not self.num_layers or any(
                tower != [*expected, (columns, self.H)]
                for tower, columns in zip(shapes, self.outputs, strict=True)):
            raise ValueError(f"its weights have the shapes {shapes}")
        # nanoseconds a row, about, for `run`
        self.cost = sum(weight.numel() for weight in policy.parameters()) // 40
        networks, back, masters = [], [], []
        for pairs in towers:
            weights, biases = zip(*pairs, strict=True)
            # pairs of bfloat16 in a number
            half = [precision != torch.float32 and i <= self.num_layers for i in range(len(pairs))]
            packed = list(map(_packed, (weight.T for weight in weights), half))
            turned = list(map(_packed, weights[1:], half[1:]))
            networks.append(_as_tower(zip(packed, biases, strict=True)))
            back.append((tuple(turned[:-1]), turned[-1]))
            masters.append((*_as_tower(weights), *_as_tower(packed), *back[-1]))
        is_normalized = isinstance(policy, (models.MinGRUPolicy, models.Normalized))
        norm = policy.normalizer if is_normalized else None
        norm = (torch.zeros(0),) * 2 if norm is None else (norm.shift, norm.scale)
        self.arrays = tuple(networks), *map(as_array, norm), self.activation
        self.back = tuple(back)
        self.masters = tuple(masters)

    def pairs(self, find):
        """Return [[(weight, bias) of each map of a tower], ...]; find: from a name."""
        def pair(key, rows=slice(None)):
            return find(f"{key}.weight")[rows], find(f"{key}.bias")[rows]

        return [[*map(pair, maps), pair(self.decoder, rows)] for maps, rows in self.towers]


def _packed(matrix, half):
    """Return memory for a packed matrix (inner, columns)."""
    array = _zeros(packed_size(*matrix.shape, half))
    return array.view(u32) if half else array


def _outputs(weights, rows):
    """Return an array of outputs, and its part of each tower, for `_move`."""
    outputs = _zeros(rows, weights.width)
    parts = (outputs,)
    if len(weights.outputs) > 1:
        parts = tuple(_zeros(rows, columns) for columns in weights.outputs)
    return outputs, parts


def actor_scratch(weights, rows):
    """Return the scratch of an actor for up to `rows` agents."""
    H = weights.H
    is_discrete = weights.policy.decoder.log_std is None
    choices = _zeros(rows if is_discrete else 0, kernels.CHOICE_ROWS + 2 * (weights.width - 1))
    hgp = _zeros(rows if weights.is_recurrent else 0, 3 * H)
    return (_zeros(rows, weights.D), _zeros(rows, H), _zeros(rows, H), hgp,
            *_outputs(weights, rows), choices)


class Learner:
    """Hold the memory of a learner of `at_once` segments at a time.

    gradient: from a parameter's name to the array that its gradient is added to.
    """

    def __init__(self, weights, steps, at_once, gradient):
        self.at_once = at_once
        rows, H, layers, width = steps * at_once, weights.H, weights.num_layers, weights.width
        states = rows + at_once if weights.is_recurrent else 0
        activations = tuple(
            (tuple(_zeros(rows, H) for _ in range(layers + 1)),
             tuple(_zeros(rows, weights.inner) for _ in range(layers)),
             tuple(_zeros(states, H) for _ in range(layers))) for _ in weights.towers)
        self.outputs, parts = _outputs(weights, rows)
        self.grad_outputs, grad_parts = _outputs(weights, rows)
        self.grad_log_std = _zeros(rows, width - 1)
        self.scratch = (
            activations, _zeros(rows, weights.D), self.outputs, parts, _zeros(at_once, H),
            self.grad_outputs, grad_parts, self.grad_log_std, _zeros(rows, H),
            _zeros(at_once, 3 * H), _zeros(H),
            _zeros(1, kernels.LOSS_ROWS + 3 * (width - 1), steps))
        self.statistics = np.zeros((max(steps, at_once), kernels.SUMS))
        log_std = (np.zeros(0, f32) if weights.policy.decoder.log_std is None
                   else gradient(f"{weights.decoder}.log_std"))
        self.totals = tuple(map(_as_tower, weights.pairs(gradient))), log_std


class Sample:
    """Run the network as `verify.compare` does: forward, backward and step.

    A call overwrites what the call before returned.
    """

    def __init__(self, policy, arena, steps, rows, precision=torch.float32):
        self.policy = policy
        self.arena = arena
        self.T = steps
        self.rows = rows
        self.precision = precision

    def bind(self):
        """Make the views of the allocated arena."""
        self.weights = Weights(self.policy, self.precision)
        self.learner = Learner(self.weights, self.T, self.rows, lambda name: as_array(
            self.arena[f"gradients/policy.{name}"]))
        self.scratch = actor_scratch(self.weights, self.rows)

    def refresh(self):
        """Pack the weights."""
        _pack_all_cpu(self.weights.masters)

    def step(self, observations, state, resets, valid):
        """Compute one step; return outputs (n, A + 1).

        observations (n, *obs); state (n, H) a layer, updated in place, or None without memory;
        resets and valid (n,) uint8.
        """
        n = len(observations)
        _policy_step_cpu(INT0, n, as_array(observations.view(n, -1)), self.weights.arrays,
                         _layers(state), as_array(resets), as_array(valid), self.scratch)
        return torch.from_numpy(self.scratch[4][:n])

    def forward(self, observations, initial, resets, valid):
        """Run all steps of n segments; return outputs (T, n, A + 1).

        observations (T, n, D); initial (n, H) a layer, or None without memory.
        """
        n = observations.shape[1]
        self.arguments = _layers(initial), as_array(resets), as_array(valid), np.arange(n), 0
        _forward_cpu(n, self.T, as_array(observations), *self.arguments, self.weights.arrays,
                     self.learner.scratch)
        return torch.from_numpy(self.learner.outputs.reshape(self.T, n, -1))

    def backward(self, grad_outputs, grad_log_std=None):
        """Add the gradients of all weights, given those of `forward`'s outputs.

        grad_outputs (T, n, A + 1), grad_log_std (T, n, A).
        """
        self.learner.grad_outputs[:] = grad_outputs.flatten(0, 1)
        if grad_log_std is not None:
            self.learner.grad_log_std[:] = grad_log_std.flatten(0, 1)
        _backward_cpu(grad_outputs.shape[1], self.T, *self.arguments, self.weights.arrays,
                      self.weights.back, self.learner.scratch, self.learner.totals)


# --------------------------------------------------------------------------------------------------
# The engine


# FLOPs of a minibatch for each thread that learns: with fewer, to wake a thread takes longer.
MIN_FLOPS_FOR_LEARNER = 5e7


class Compiled(engines.Engine):
    """Run the default networks on a CPU.

    Each actor takes its environments' rollout in one call, and each learner its share of the
    minibatch's segments.
    """

    name = "compiled"
    Sample = Sample

    def __init__(self, buffers):
        super().__init__(buffers)
        self.num_learners = engines.count_learners(buffers, MIN_FLOPS_FOR_LEARNER)
        self.pool = engines.ThreadPool(self.vecenv, self.num_learners)
        self.loop = engines.StepByStep(
            buffers, None, functools.partial(self._step, _act_cpu),
            functools.partial(self._step, _bootstrap_cpu))

    def bind(self):
        """Make the views of the allocated arena, and what the calls write.

        Views take longer to make than a small step, so calls get those made here.
        """
        buffers = self.buffers
        self.inspected = engines.inspect_modules(self.policy)
        self.weights = Weights(self.policy, self.precision)
        observations = buffers.storage["observations"]
        self.observations = observations.view(buffers.horizon + 1, buffers.num_agents, -1)
        scratch = [actor_scratch(self.weights, buffers.max_agents)
                   for _ in range(self.vecenv.num_actors)]
        self.rollout_arguments = [
            self._make_rollout_arguments(buffer, scratch[buffer % len(scratch)])
            for buffer in range(self.vecenv.num_buffers)]
        at_once = max(1, STEPS_AT_ONCE // buffers.span)
        self.learners = [
            Learner(self.weights, buffers.span, at_once, lambda name, group=group: as_array(
                buffers.arena[f"{group}/policy.{name}"])) for group in buffers.gradient_groups]
        self.learner_arguments = list(map(self._make_learner_arguments, range(self.num_learners)))

    def rollout(self, number):
        """Roll out all agents for `horizon` steps; return the seconds in environments.

        Each actor goes through `_run_in_one_call`, which calls `_rollout_cpu`.
        """
        vecenv = self.vecenv
        _pack_all_cpu(self.weights.masters)
        with engines.torch_threads(vecenv.threads_per_actor):
            self.buffers.begin_rollout(number)
            run_actor = self._run_in_one_call if vecenv.can_step_in_kernels else self.loop.run
            return max(self.pool.run(run_actor, range(vecenv.num_actors)))

    @contextlib.contextmanager
    def learning(self):
        """Set the threads of learning."""
        vecenv = self.vecenv
        with threads(vecenv.num_threads), engines.torch_threads(vecenv.threads_per_actor):
            yield

    def backward(self):
        """Compute the gradients and the loss of the segments `buffers.index`.

        `_backward_share` does so for each learner. New values, new ratios and the sums of the loss
        are in `buffers`.
        """
        _pack_all_cpu(self.weights.masters)
        super().backward()

    # -- acting

    def _step(self, function, actor, buffer, t):
        """Call _act_cpu or _bootstrap_cpu for row t of a buffer."""
        n, *arguments = self.rollout_arguments[buffer]
        run(function, n, self.weights.cost, t, *arguments)

    def _run_in_one_call(self, actor):
        """Run all steps of an actor's buffers without the interpreter.

        It halves the time of a small step.
        """
        seconds = 0.0
        for buffer in range(actor, len(self.rollout_arguments), self.vecenv.num_actors):
            begin = clock()
            environment_share = _rollout_cpu(self.vecenv.addresses(buffer),
                                             *self.rollout_arguments[buffer])
            seconds += environment_share * (clock() - begin)
        return seconds

    def _make_rollout_arguments(self, buffer, scratch):
        """Return the arguments of _rollout_cpu for a buffer, but for the environments."""
        buffers, agents = self.buffers, self.vecenv.ranges[buffer]
        n, actor = agents.stop - agents.start, buffer % self.vecenv.num_actors
        names = ("resets", "valid", "actions", "terminals", "truncations")
        storage = (self.observations, *(buffers.storage[name] for name in names),
                   buffers.storage["final_observations"].view(buffers.num_agents, -1))
        state = buffers.state.get("mingru")
        written = (buffers.steps, buffers.samples, buffers.logprobs, buffers.values,
                   buffers.bootstraps)
        return (n, agents.start, self.weights.arrays, tuple(map(as_array, storage)),
                _layers(None if state is None else state[:, agents]),
                _layers(buffers.scratch[actor].get("mingru")), scratch, *self._distribution(n),
                *self._masks(buffers.storage["action_masks"]), u64(self.config["seed"]),
                buffers.first_agent, *map(as_array, written))

    def _distribution(self, *rows):
        """Return heads, log_std (*rows, A) and squash, as the arguments of kernels."""
        buffers, log_std = self.buffers, self.policy.decoder.log_std
        if log_std is not None:
            log_std = expand_log_std(log_std.data, (*rows, len(log_std)))
        heads = None if buffers.heads is None else as_array(buffers.heads)
        return heads, log_std, as_array(optional_squash(buffers.squash, buffers.values))

    def _masks(self, masks):
        """Return whether there are masks, and their array."""
        has_masks, masks = optional_masks(masks, self.buffers.values, 3)
        return has_masks, as_array(masks)

    # -- learning

    def _backward_share(self, number):
        """Run forward, loss and backward of one learner's share, by `_learn_cpu`."""
        statistics = self.learners[number].statistics
        self.buffers.gradients[number].zero_()
        statistics.fill(0)
        _learn_cpu(*self.learner_arguments[number])
        self.buffers.sums[number, : kernels.SUMS] += torch.from_numpy(statistics.sum(0))

    def _make_learner_arguments(self, number):
        """Return the arguments of _learn_cpu."""
        buffers, columns, weights = self.buffers, self.buffers.columns, self.weights
        learner = self.learners[number]
        heads, log_std, squash = self._distribution(buffers.span, learner.at_once)
        rollout = (columns.samples, columns.logprobs, columns.values, columns.advantages,
                   buffers.segment_weights, columns.valid, buffers.settings)
        written = buffers.new_values, buffers.new_ratios
        return (*engines.share(number, self.num_learners, buffers.segments), learner.at_once,
                as_array(buffers.as_columns(self.observations)),
                _layers(buffers.initial_state.get("mingru")), as_array(columns.resets),
                as_array(buffers.index), weights.arrays, weights.back, learner.scratch,
                learner.totals, log_std, squash, *self._masks(columns.action_masks), heads,
                tuple(map(as_array, rollout)), tuple(map(as_array, written)), learner.statistics)
