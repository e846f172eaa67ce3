"""The default network (models.MinGRUPolicy) and those without memory (models.FeedForward, models.Separate) on a CPU,
restated in few calls.

    python pufferl.py train breakout --train.engine compiled     # auto takes it, too
    python -m pytest tests/test_compiled.py tests/test_engines.py

Nobody needs to read this file to know the algorithm (ppo.py), or to change it (engines.py, for any
network). It can be deleted: everything then runs through `engines.Autograd`. From the bottom up it
has the network's step and a buffer's whole rollout, a worker's whole minibatch, each in one call
without the interpreter, and the engine (`Compiled`).

The products are those of fast/products.py: a call into torch costs more than such a small product itself. A
few segments at a time go through the whole network, forward and backward, so that the results between
the products stay in the second-level cache.

A tower is a chain of linear maps from the observation to some of the outputs. A network has one tower, or two if
policy and value are apart (models.Separate).
"""

import contextlib

import numpy as np
import torch
from torch import nn

import engines
import kernels
import models
from arena import (
    INT0,
    check_log_std,
    check_squash,
    clock,
    distinct_driver,
    driver,
    f32,
    host_array,
    optional_masks,
    prefetch,
    run,
    threads,
    u64,
)
from fast import products
from fast.products import BLOCK, accumulate_rows, add_bias_gradients, halved, multiply_rows, pack, packed_size
from vector import cycles, step_environments

if products.missing():
    raise RuntimeError(products.missing())
TOGETHER = 64  # steps that pass the network together: of one segment, or of several short ones
RELU, TANH = range(2)
ACTIVATIONS = {nn.ReLU: RELU, nn.Tanh: TANH}  # of networks without memory


@distinct_driver
def _activate(kind, rows):
    """max(rows, 0), where NaN stays NaN, or tanh(rows), in place."""
    numbers = rows.reshape(-1)
    if kind == RELU:
        for i in range(len(numbers)):
            numbers[i] = f32(0) if numbers[i] < f32(0) else numbers[i]
    else:
        for i in range(len(numbers)):
            numbers[i] = kernels.tanh_cell(numbers[i])


@distinct_driver
def _activate_grad(kind, grad, rows):
    """grad times the slope of `_activate` where it gave `rows`, in place."""
    numbers, results = grad.reshape(-1), rows.reshape(-1)
    if kind == RELU:
        for i in range(len(numbers)):
            numbers[i] = numbers[i] if results[i] > f32(0) else f32(0)
    else:
        for i in range(len(numbers)):
            numbers[i] *= f32(1) - results[i] * results[i]


@driver
def _move(begin, end, parts, outputs, join):
    """outputs[begin:end] = the towers' parts side by side, or the other way round. A single tower's part is outputs."""
    if len(parts) == 1:
        return
    first = 0
    for k in range(len(parts)):
        for r in range(begin, end):
            for c in range(parts[k].shape[1]):
                if join:
                    outputs[r, first + c] = parts[k][r, c]
                else:
                    parts[k][r, c] = outputs[r, first + c]
        first += parts[k].shape[1]


# --------------------------------------------------------------------------------------------------
# The whole network's step, a block of agents at a time: results between the layers stay in cache.
# A network without memory has a state of None, and numba leaves out what only one with memory needs.


@distinct_driver
def _read_observations(begin, end, observations, shift, scale, out):
    """out[:end - begin] = observations[begin:end], as floats, normalised if there is a shift."""
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
    """network: `Weights.arrays`; scratch: `Actor.scratch`, whose fifth array gets the outputs."""
    towers, shift, scale, activation = network
    seen, x, y, hgp, outputs, parts, _ = scratch
    for block in range(begin, end, BLOCK):
        stop = min(end, block + BLOCK)
        # begin, not block: each thread uses its own rows of the scratch, again for each block
        n, rows = stop - block, slice(begin, begin + stop - block)
        _read_observations(block, stop, observations, shift, scale, seen[rows])
        for k in range(len(towers)):
            encoder, layers, decoder = towers[k]
            now, then = x[rows], y[rows]
            multiply_rows(n, seen[rows], encoder[0], encoder[1], INT0, now)
            if state is None:
                _activate(activation, now)
            for i in range(len(layers)):
                if state is None:
                    multiply_rows(n, now, layers[i][0], layers[i][1], INT0, then)
                    _activate(activation, then)
                else:
                    multiply_rows(n, now, layers[i][0], layers[i][1], INT0, hgp[rows])
                    kernels._mingru_step_lanes(INT0, n, hgp[rows], now, state[i][block:stop],
                                               resets[block:stop], valid[block:stop], then)
                now, then = then, now
            multiply_rows(n, now, decoder[0], decoder[1], INT0, parts[k][block:stop])
    _move(begin, end, parts, outputs, True)


@driver
def _act_cpu(begin, end, observations, network, state, resets, valid, heads, log_std, squash, masked, masks, seed,
             first_agent, counter, samples, actions, logprobs, values, scratch):
    """The network's step of the agents in [begin, end), and what `kernels.sample` draws from it:
    from observations to actions in one call. log_std is None for discrete actions, heads for continuous ones."""
    _policy_step_cpu(begin, end, observations, network, state, resets, valid, scratch)
    outputs, random, drawn = scratch[4], (seed, first_agent, counter, False), (actions, logprobs, values)
    if heads is not None:
        kernels._sample_discrete_lanes(begin, end, outputs, masked, masks, heads, *random, *drawn, scratch[6])
    if log_std is not None:  # not `else`: numba leaves out what is None, and would compile the other kind
        kernels._sample_continuous_lanes(begin, end, outputs, log_std, squash, *random, samples, *drawn)


# --------------------------------------------------------------------------------------------------
# The rollout of a range of environments in one call. With a call for each step, threads would wait
# for the interpreter's lock, and to wake a thread takes as long as a step of 256 agents.


@driver
def _final_values(begin, end, terminals, truncations, final_observations, network, state, kept,
                  scratch, bootstraps):
    """bootstraps = V of the final observations of the agents in [begin, end) that were truncated
    and not terminated."""
    outputs, first = scratch[4], begin
    while first < end:
        last = first
        while last < end and truncations[last] and not terminals[last]:
            last += 1
        if last > first:  # neighbours in one step
            n = last - first
            if state is not None:
                for layer in range(len(state)):
                    for i in range(n):
                        for j in range(kept[layer].shape[1]):
                            kept[layer][i, j] = state[layer][first - begin + i, j]
            # not reset, and alive, as these flags of theirs say
            _policy_step_cpu(INT0, n, final_observations[first:last], network, kept, terminals[first:last],
                             truncations[first:last], scratch)
            for i in range(n):
                bootstraps[first + i] = outputs[i, outputs.shape[1] - 1]
        first = last + 1


@driver
def _rollout_cpu(begin, end, environments, network, storage, state, kept, scratch, heads, log_std,
                 squash, masked,
                 masks, seed, first_agent, counter, samples, logprobs, values, bootstraps):
    """All T steps of the agents in [begin, end), from row 0 of the storage on: what
    Acting._rollout does step by step. Returns the share of the time that the environments took.

    environments: addresses of ocean_step and of the environments, the first and the last of them,
    int64 addresses of their rows (T,); network, state a layer (n, H), and scratch as in
    _policy_step_cpu, `kept` like state, to be overwritten; storage: observations (T + 1, N, D),
    resets, valid (T + 1, N), actions (T, N, ...), terminals, truncations (T, N),
    final_observations (N, D); counter (T,) int64, what `kernels.sample` takes for step; heads,
    log_std, squash, masks (T + 1, N, A), seed and first_agent as there; written: samples (T, N,
    ...), the actions themselves without squash, logprobs (T, N), values (T + 1, N), bootstraps (T,
    N), which are 0 before.
    """
    observations, resets, valid, actions, terminals, truncations, final_observations = storage
    outputs = scratch[4]
    n, horizon, inside, begun = end - begin, len(actions), 0, cycles()
    for t in range(horizon + 1):
        now, flags = observations[t, begin:end], (resets[t, begin:end], valid[t, begin:end])
        if t > 0:
            _final_values(begin, end, terminals[t - 1], truncations[t - 1], final_observations,
                          network, state, kept, scratch, bootstraps[t - 1])
        if t == horizon:
            break
        mask = masks[t, begin:end] if masked else masks[0]
        _act_cpu(INT0, n, now, network, state, flags[0], flags[1], heads, log_std, squash, masked, mask, seed,
                 u64(first_agent + begin), counter[t : t + 1], samples[t, begin:end], actions[t, begin:end],
                 logprobs[t, begin:end], values[t, begin:end], scratch)
        inside += step_environments(environments, t, begin, end, terminals, truncations, resets)
    if state is not None:  # the last row needs V alone: a copy keeps the state as it is
        for layer in range(len(state)):
            for i in range(n):
                for j in range(kept[layer].shape[1]):
                    kept[layer][i, j] = state[layer][i, j]
    _policy_step_cpu(INT0, n, now, network, kept, flags[0], flags[1], scratch)
    for i in range(n):
        values[horizon, begin + i] = outputs[i, outputs.shape[1] - 1]
    return inside / (cycles() - begun)


# --------------------------------------------------------------------------------------------------
# A worker's share of a minibatch in one call


@driver
def _forward_cpu(n, T, observations, initial, resets, valid, index, start, network, scratch):
    """The segments index[start : start + n] through the network. scratch: `Learner.scratch`."""
    towers, shift, scale, activation = network
    inside, seen, outputs, parts, carry = scratch[:5]
    D, rows = seen.shape[1], T * n
    kernels._gather_lanes(INT0, n, observations, index, start, shift, scale, seen[:rows].reshape(T, n, D))
    for k in range(len(towers)):
        encoder, layers, decoder = towers[k]
        xs, hgps, states = inside[k]
        H = xs[0].shape[1]
        multiply_rows(rows, seen[:rows], encoder[0], encoder[1], INT0, xs[0])
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
                kernels._mingru_scan_lanes(INT0, n, hgp, xs[i][:rows].reshape(T, n, H), memory, resets,
                                           valid, index, start, xs[i + 1][:rows].reshape(T, n, H), hgp, carry)
        multiply_rows(rows, xs[len(layers)], decoder[0], decoder[1], INT0, parts[k])
    _move(INT0, rows, parts, outputs, True)


@driver
def _backward_cpu(n, T, initial, resets, valid, index, start, network, back, scratch, gradients):
    """Add the gradients of the weights over those segments, given those of the outputs; overwrites
    the activations. back: the packed weights of layers and decoder, for the gradients of their
    inputs."""
    activation = network[3]
    inside, seen, _, _, carry, grad_outputs, grad_parts, grad_log_std, grad_x, sums, zeros, _ = scratch
    into, log_std = gradients
    H, rows = grad_x.shape[1], T * n
    add_bias_gradients(grad_log_std[: rows if len(log_std) > 0 else 0], log_std)
    _move(INT0, rows, grad_parts, grad_outputs, False)
    for k in range(len(into)):
        encoder, inner, decoder = into[k]
        xs, hgps, states = inside[k]
        half = halved(network[0][k][0][0])
        grad, grad_out = grad_x[:rows], grad_parts[k][:rows]
        accumulate_rows(False, grad_out, xs[len(inner)][:rows], decoder[0])
        add_bias_gradients(grad_out, decoder[1])
        multiply_rows(rows, grad_out, back[k][1], zeros, INT0, grad)
        for i in range(len(inner) - 1, -1, -1):
            hgp, x = hgps[i][:rows], xs[i][:rows]
            if initial is None:
                _activate_grad(activation, grad, xs[i + 1][:rows])
                accumulate_rows(half, grad, x, inner[i][0])
                add_bias_gradients(grad, inner[i][1])
                multiply_rows(rows, grad, back[k][0][i], zeros, INT0, hgp)
                grad = hgp
            else:
                kernels._mingru_scan_grad_lanes(INT0, n, hgp.reshape(T, n, 3 * H), x.reshape(T, n, H),
                                                states[i][: rows + n].reshape(T + 1, n, H), resets,
                                                valid, index, start, grad.reshape(T, n, H), sums[:n], carry)
                accumulate_rows(half, hgp, x, inner[i][0])
                add_bias_gradients(sums[:n], inner[i][1])
                multiply_rows(rows, hgp, back[k][0][i], grad.reshape(-1), H, grad)
        if initial is None:
            _activate_grad(activation, grad, xs[0][:rows])
        accumulate_rows(half, grad, seen[:rows], encoder[0])
        add_bias_gradients(grad, encoder[1])


@driver
def _ask_ahead(observations, index, first, last, T, part):
    """Ask for a third of the steps (part 0, 1 or 2) of the segments index[first:last]. The memory takes no more
    requests at once, so the others are asked for later."""
    rows = T // 3 + 1
    for m in range(first, last):
        for t in range(part * rows, min(T, (part + 1) * rows)):
            prefetch(observations[t, index[m]])


@driver
def _learn_cpu(first, last, together, observations, initial, resets, index, network, back, scratch,
               gradients, log_std, squash, masked, masks, heads, rollout, written, statistics):
    """The gradients, statistics, new values and ratios of the segments index[first:last] of a
    minibatch, `together` at a time. rollout: (actions, logprobs, values, advantages, weights, valid,
    settings); these, log_std and squash are what `kernels.ppo_loss` takes. written: (new_values, new_ratios);
    statistics, float64, at least max(T, `together`) rows of SUMS, is added to."""
    T, valid = len(rollout[0]), rollout[5]
    _, _, outputs, _, _, grad_outputs, _, grad_log_std, _, _, _, loss_rows = scratch
    width = outputs.shape[1]
    for start in range(first, last, together):
        n = min(together, last - start)
        rows, following = T * n, (start + n, min(last, start + n + together))
        _ask_ahead(observations, index, *following, T, 0)
        _forward_cpu(n, T, observations, initial, resets, valid, index, start, network, scratch)
        _ask_ahead(observations, index, *following, T, 1)
        out, grad = outputs[:rows].reshape(T, n, width), grad_outputs[:rows].reshape(T, n, width)
        if heads is not None:
            kernels._ppo_loss_discrete_lanes(INT0, n, out, index, start, masked, masks, heads, *rollout, grad,
                                             *written, statistics, loss_rows)
        if log_std is not None:  # see _act_cpu
            spread = grad_log_std[:rows].reshape(T, n, width - 1)
            kernels._ppo_loss_continuous(INT0, T, out, index, start, log_std[:, :n], squash, *rollout, grad, spread,
                                         *written, statistics)
        _backward_cpu(n, T, initial, resets, valid, index, start, network, back, scratch, gradients)
        _ask_ahead(observations, index, *following, T, 2)


# --------------------------------------------------------------------------------------------------
# What these calls read and write, in the arena


@driver
def _pack_all_cpu(towers):
    for k in range(len(towers)):
        encoder, layers, decoder, packed, packed_layers, packed_decoder, back, back_decoder = towers[k]
        pack(encoder.T, packed)
        for i in range(len(layers)):
            pack(layers[i].T, packed_layers[i])
            pack(layers[i], back[i])
        pack(decoder.T, packed_decoder)
        pack(decoder, back_decoder)


def find_towers(policy):
    """([(the names of a tower's linear maps, which of the decoder's rows it ends in), ...], the decoder's name, the
    kind of activation after these maps). Raises ValueError if the activations differ, or are not among ACTIVATIONS."""
    if isinstance(policy, models.MinGRUPolicy):
        return [(["encoder", *(f"rnn.layers.{i}" for i in range(policy.num_layers))], slice(None))], "decoder", RELU
    inside = "policy." if isinstance(policy, models.Normalized) else ""
    apart = isinstance(policy.get_submodule(inside[:-1]), models.Separate)
    rows = {"actor": slice(-1), "critic": slice(-1, None)} if apart else {"encoder": slice(None)}
    chains = {name: policy.get_submodule(inside + name) for name in rows}
    kinds = {type(activation) for chain in chains.values() for activation in chain[1::2]}
    if len(kinds) != 1 or not kinds <= ACTIVATIONS.keys():
        raise ValueError(f"its activations are {', '.join(sorted(kind.__name__ for kind in kinds)) or 'none'}")
    return [([f"{inside}{name}.{i}" for i in range(0, len(chain), 2)], rows[name])
            for name, chain in chains.items()], f"{inside}decoder", ACTIVATIONS[kinds.pop()]


def _layers(state):
    """The recurrent state (layers, n, H) as the calls above take it; None without memory."""
    return None if state is None else tuple(map(host_array, state))


def _chain(maps):
    """The parts of a tower as the calls above take them: (encoder, layers, decoder)."""
    encoder, *layers, decoder = maps
    return encoder, tuple(layers), decoder


class Weights:
    """A network's weights, packed for the products; call `refresh` after every change.

    precision: torch.bfloat16 rounds the operands of the products of encoder and layers, forward and
    backward; sums, what flows between them, states and the decoder stay float32.
    """

    def __init__(self, policy, arena, name, precision=torch.float32):
        self.policy, self.arena, self.name = policy, arena, name
        self.towers, self.decoder, self.activation = find_towers(policy)
        shape = lambda key: tuple(policy.get_parameter(f"{key}.weight").shape)  # noqa: E731
        shapes = [[*map(shape, maps), shape(self.decoder)] for maps, _ in self.towers]
        (self.H, self.D), (self.width, _) = shapes[0][0], shapes[0][-1]
        self.num_layers, self.recurrent = len(shapes[0]) - 2, isinstance(policy, models.MinGRUPolicy)
        self.inner = (3 if self.recurrent else 1) * self.H  # columns of a layer's product
        if not self.num_layers:
            raise ValueError("it has no layer between its first and its last one")
        expected = [(self.H, self.D), *[(self.inner, self.H)] * self.num_layers, (self.width, self.H)]
        if any(one != expected for one in shapes):
            raise ValueError(f"its weights have the shapes {shapes}")
        self.outputs = [len(range(self.width)[rows]) for _, rows in self.towers]  # of each tower
        for t, outputs in enumerate(self.outputs):
            for i, (columns, inner) in enumerate([*expected[:-1], (outputs, self.H)]):
                half = precision != torch.float32 and i <= self.num_layers
                places = {f"{t}/{i}": (inner, columns), **({f"{t}/{i}/back": (columns, inner)} if i > 0 else {})}
                for place, size in places.items():
                    arena.register(f"{name}/packed/{place}", (packed_size(*size, half),),
                                   torch.uint32 if half else torch.float32)  # pairs of bfloat16 in a number

    def bind(self):
        """Take the views out of the allocated arena."""
        norm = (self.policy.normalizer if isinstance(self.policy, (models.MinGRUPolicy, models.Normalized))
                else None)
        norm = (torch.zeros(0),) * 2 if norm is None else (norm.shift, norm.scale)
        towers, back, masters = [], [], []
        for t, pairs in enumerate(self.pairs(lambda key: host_array(self.policy.get_parameter(key).data))):
            weights, biases = zip(*pairs, strict=True)
            packed = [host_array(self.arena[f"{self.name}/packed/{t}/{i}"]) for i in range(len(pairs))]
            turned = [host_array(self.arena[f"{self.name}/packed/{t}/{i}/back"]) for i in range(1, len(pairs))]
            towers.append(_chain(zip(packed, biases, strict=True)))
            back.append((tuple(turned[:-1]), turned[-1]))
            masters.append((*_chain(weights), *_chain(packed), *back[-1]))
        self.arrays, self.back, self._masters = (
            (tuple(towers), *map(host_array, norm), self.activation), tuple(back), tuple(masters))
        self.refresh()

    def pairs(self, of):
        """[[(weight, bias) of each map of a tower], ...], from of(a parameter's name)."""
        pair = lambda key, rows: (of(f"{key}.weight")[rows], of(f"{key}.bias")[rows])  # noqa: E731
        return [[*(pair(key, slice(None)) for key in maps), pair(self.decoder, rows)] for maps, rows in self.towers]

    def refresh(self):
        _pack_all_cpu(self._masters)


def _parts(weights, name, rows):
    """{name: shape} of the towers' parts of the outputs or their gradients; a single tower's part is all of them."""
    names = [f"{name} {t}" for t in range(len(weights.towers))] if len(weights.towers) > 1 else [name]
    return {key: (rows, width) for key, width in zip(names, weights.outputs, strict=True)}


class Actor:
    """One worker's rollout of up to `rows` agents."""

    def __init__(self, weights, name, rows):
        self.weights, self.name, H = weights, name, weights.H
        self.cost = sum(weight.numel() for weight in weights.policy.parameters()) // 40  # for `run`
        self.shapes = {"seen": (rows, weights.D), "x": (rows, H), "y": (rows, H),
                       "hgp": (rows if weights.recurrent else 0, 3 * H), "outputs": (rows, weights.width)}
        self.parts = _parts(weights, "outputs", rows)
        chooses = weights.policy.decoder.log_std is None
        chosen = {"chosen": (rows if chooses else 0, kernels.CHOICE_ROWS + 2 * (weights.width - 1))}
        for key, shape in {**self.shapes, **self.parts, **chosen}.items():
            weights.arena.register(f"{name}/{key}", shape)

    def bind(self):
        of = lambda key: host_array(self.weights.arena[f"{self.name}/{key}"])  # noqa: E731
        self.outputs = self.weights.arena[f"{self.name}/outputs"]
        self.scratch = *map(of, self.shapes), tuple(map(of, self.parts)), of("chosen")

    def step(self, observations, state, resets, valid):
        """One step. observations (n, *obs) of any dtype but 16-bit floats, state (n, H) a
        layer, updated in place, or None without memory, resets and valid (n,) uint8 -> outputs
        (n, A + 1), overwritten by the next call."""
        n = len(observations)
        run(_policy_step_cpu, n, self.cost, host_array(observations.view(n, -1)), self.weights.arrays,
            _layers(state), host_array(resets), host_array(valid), self.scratch)
        return self.outputs[:n]


class Learner:
    """One worker's share of the minibatches: segments of T steps, `together` at a time."""

    def __init__(self, weights, name, steps, together, gradients="gradients"):
        self.weights, self.name, self.T, self.together, self.gradients = weights, name, steps, together, gradients
        rows, H, L, width = steps * together, weights.H, weights.num_layers, weights.width
        inside = {"x": [(rows, H)] * (L + 1), "hgp": [(rows, weights.inner)] * L,
                  "states": [(rows + together if weights.recurrent else 0, H)] * L}
        self.inside = {key: len(shapes) for key, shapes in inside.items()}
        self.parts = [_parts(weights, key, rows) for key in ("outputs", "grad_outputs")]
        shapes = {"seen": (rows, weights.D), "outputs": (rows, width), "grad_outputs": (rows, width),
                  "grad_log_std": (rows, width - 1), "grad_x": (rows, H), "sums": (together, 3 * H),
                  "carry": (together, H), "zeros": (H,), "loss": (1, kernels.LOSS_ROWS + 3 * (width - 1), steps),
                  **self.parts[0], **self.parts[1],
                  **{f"{key} {t} {i}": shape for t in range(len(weights.towers))
                     for key, shapes in inside.items() for i, shape in enumerate(shapes)}}
        for key, shape in shapes.items():
            weights.arena.register(f"{name}/{key}", shape)
        weights.arena.register(f"{name}/statistics", (max(steps, together), kernels.SUMS), torch.float64)

    def bind(self):
        weights = self.weights
        of = lambda key: host_array(weights.arena[f"{self.name}/{key}"])  # noqa: E731
        own = lambda key: host_array(weights.arena[f"{self.gradients}/policy.{key}"])  # noqa: E731
        towers = tuple(tuple(tuple(of(f"{key} {t} {i}") for i in range(count)) for key, count in self.inside.items())
                       for t in range(len(weights.towers)))
        self.outputs, self.grad_outputs, self.grad_log_std = map(of, ("outputs", "grad_outputs", "grad_log_std"))
        parts, grad_parts = (tuple(map(of, parts)) for parts in self.parts)
        self.scratch = (towers, of("seen"), self.outputs, parts, of("carry"), self.grad_outputs, grad_parts,
                        self.grad_log_std, *map(of, ("grad_x", "sums", "zeros", "loss")))
        self.statistics = of("statistics")
        log_std = (np.zeros(0, f32) if weights.policy.decoder.log_std is None
                   else own(f"{weights.decoder}.log_std"))
        self.added = tuple(map(_chain, weights.pairs(own))), log_std

    def forward(self, observations, initial, resets, valid):
        """All steps of the n <= `together` segments of observations (T, n, D): outputs (T, n, A +
        1), overwritten by the next call; initial (n, H) a layer, or None without memory."""
        n = observations.shape[1]
        self.seen = _layers(initial), host_array(resets), host_array(valid), np.arange(n), 0
        _forward_cpu(n, self.T, host_array(observations), *self.seen, self.weights.arrays, self.scratch)
        return torch.from_numpy(self.outputs[: self.T * n].reshape(self.T, n, -1))

    def backward(self, grad_outputs, grad_log_std=None):
        """Add the gradients of all weights, after `forward`, from (T, n, A + 1) and (T, n, A)."""
        n = grad_outputs.shape[1]
        self.grad_outputs[: self.T * n] = grad_outputs.flatten(0, 1)
        if grad_log_std is not None:
            self.grad_log_std[: self.T * n] = grad_log_std.flatten(0, 1)
        _backward_cpu(n, self.T, *self.seen, self.weights.arrays, self.weights.back,
                      self.scratch, self.added)


class Sample:
    """The network in both of its forms, for `verify.compare`: forward, backward and step."""

    def __init__(self, policy, arena, steps, rows, precision=torch.float32):
        self.weights = Weights(policy, arena, "sample", precision)
        self.learner = Learner(self.weights, "sample", steps, rows)
        self.actor = Actor(self.weights, "sample actor", rows)
        self.forward, self.backward, self.step = self.learner.forward, self.learner.backward, self.actor.step

    def bind(self):
        for part in (self.weights, self.learner, self.actor):
            part.bind()

    def refresh(self):
        self.weights.refresh()


# --------------------------------------------------------------------------------------------------
# The engine


MIN_FLOPS_FOR_LEARNER = 5e7  # for fewer operations of a minibatch, to wake a thread takes longer than it saves


class Compiled:
    """An engine of these networks on a CPU. Each worker takes its environments' rollout in one call, and
    in learning its share of the minibatch's segments."""

    name, Sample = "compiled", Sample
    whole_minibatches = True
    blocking_classes = ()
    Buffers = engines.Buffers

    def __init__(self, policy, vecenv, config, buffers):
        self.policy, self.vecenv, self.config, self.buffers = policy, vecenv, config, buffers
        self.precision = getattr(torch, config["precision"])
        self.num_learners = engines.count_learners(policy, vecenv, buffers, MIN_FLOPS_FOR_LEARNER)
        self.workers = engines.Workers(max(vecenv.num_workers, self.num_learners), vecenv.threads_per_worker)
        self.steps = engines.StepByStep(vecenv, buffers, self._act, self._step)

    # -- memory

    def register(self, arena):
        """Ask the arena for everything that lives as long as the engine."""
        engines.register_learners(arena, self.policy, self.num_learners)
        span, largest = self.buffers.span, self.buffers.largest
        self.products = Weights(self.policy, arena, "products", self.precision)
        self.actors = [Actor(self.products, f"actor {w}", largest) for w in range(self.vecenv.num_workers)]
        self.learners = [Learner(self.products, f"learner {i}", span, max(1, TOGETHER // span), group)
                         for i, group in enumerate(engines.learner_groups(self.num_learners))]

    def bind(self, arena):
        """Take the views out of the allocated arena."""
        buffers = self.buffers
        self.gradients = [arena.flat(group) for group in engines.learner_groups(self.num_learners)]
        for part in (self.products, *self.actors, *self.learners):
            part.bind()
        self.observations = buffers.storage["observations"].view(buffers.horizon + 1, buffers.num_agents, -1)
        self.observation_columns = buffers.as_columns(self.observations)
        self.modules = list(self.policy.named_modules())
        log_std = self.policy.decoder.log_std
        self.log_std = None if log_std is None else log_std.data  # (A,); None for discrete actions
        shape = buffers.span, self.learners[0].together, buffers.width - 1
        self.spread = None if log_std is None else check_log_std("ppo_loss", self.log_std, shape)
        self.initial = _layers(buffers.initial_state.get("mingru"))
        self.step_arguments = {}  # (buffer, t) -> what _act_cpu takes

    # -- the engine's four methods

    def rollout(self, number):
        """Fill the buffers with `horizon` steps of all agents; return the seconds spent in environments."""
        vecenv = self.vecenv
        self.products.refresh()
        with engines.torch_threads(vecenv.threads_per_worker):
            self.buffers.begin_rollout(number)
            rollout = self._rollout_in_one_call if vecenv.can_step_in_kernels else self.steps.rollout
            return engines.mean_of_workers(self.workers.run(rollout, range(vecenv.num_workers)))

    @contextlib.contextmanager
    def learning(self):
        """Within it, the threads are those of learning."""
        with threads(self.vecenv.num_threads), engines.torch_threads(self.vecenv.threads_per_worker):
            yield

    def backward(self, index):
        """Compute the gradients, new values and ratios, and loss sums of the minibatch's segments `index` (M,)."""
        self.products.refresh()
        self.workers.run(lambda learner: self._learn(index, learner), range(self.num_learners))
        for gradient in self.gradients[1:]:  # in this order: an exact resume rests on it (runs.py)
            self.gradients[0].add_(gradient)

    def capture(self, function):
        """Return the function itself; on a GPU it becomes a CUDA graph."""
        return function

    def refresh(self):
        """Follow weights that were loaded or replaced: they are packed before each use."""

    def release(self):
        """Stop the threads."""
        self.workers.release()

    # -- acting

    def _act(self, worker, observations, state, resets, valid):
        return self.actors[worker].step(observations, state.get("mingru"), resets, valid), self.log_std

    def _step(self, worker, buffer, t):
        if t == self.buffers.horizon:
            self.steps.act_on_row(worker, buffer, t)
            return
        agents, actor = self.vecenv.ranges[buffer], self.actors[worker]
        if (buffer, t) not in self.step_arguments:
            self.step_arguments[buffer, t] = self._arguments_of_step(agents, self.buffers.rows[buffer][t], t)
        run(_act_cpu, agents.stop - agents.start, actor.cost, *self.step_arguments[buffer, t], actor.scratch)

    def _arguments_of_step(self, agents, row, t):
        """Return what _act_cpu takes at step t of a buffer. It is kept, because to make these views takes
        longer than the step; the arrays behind them live as long as the engine."""
        buffers = self.buffers
        state, (masked, masks) = buffers.state.get("mingru"), self._masks(buffers.storage["action_masks"])
        arrays = (host_array(row[name]) for name in ("samples", "actions", "logprobs", "values"))
        return (host_array(self.observations[t, agents]), self.products.arrays,
                _layers(state if state is None else state[:, agents]), host_array(row["resets"]),
                host_array(row["valid"]), *self._distribution(agents), masked, masks[t, agents] if masked else masks[0],
                u64(self.config["seed"]), u64(buffers.first_agent + agents.start), host_array(row["step"]), *arrays)

    def _distribution(self, agents):
        """Return heads, log_std and squash of these agents' actions, as the kernels take them."""
        shape, heads = (agents.stop - agents.start, self.buffers.width - 1), self.buffers.heads
        return (None if heads is None else host_array(heads),
                None if self.log_std is None else check_log_std("sample", self.log_std, shape),
                self._squash())

    def _squash(self):
        buffers = self.buffers
        return check_squash("sample", buffers.squash, buffers.width - 1, buffers.values)

    def _masks(self, masks):
        return optional_masks(None if masks is None else host_array(masks), self.buffers.values, 3)

    def _rollout_in_one_call(self, worker):
        """Run all steps of a worker's buffers without the interpreter: it halves the cost of a small step."""
        buffers, seconds = self.buffers, 0.0
        storage, state = buffers.storage, buffers.state.get("mingru")
        names = ("resets", "valid", "actions", "terminals", "truncations")
        arrays = (self.observations, *(storage[name] for name in names),
                  storage["final_observations"].view(buffers.num_agents, -1))
        for buffer in range(worker, self.vecenv.num_buffers, self.vecenv.num_workers):
            begun, agents = clock(), self.vecenv.ranges[buffer]
            in_environments = _rollout_cpu(
                agents.start, agents.stop, self.vecenv.addresses(buffer), self.products.arrays,
                tuple(map(host_array, arrays)), _layers(state if state is None else state[:, agents]),
                _layers(buffers.scratch[worker].get("mingru")), self.actors[worker].scratch,
                *self._distribution(agents), *self._masks(storage["action_masks"]), u64(self.config["seed"]),
                buffers.first_agent, host_array(buffers.steps), host_array(buffers.samples),
                host_array(buffers.logprobs), host_array(buffers.values), host_array(buffers.bootstraps))
            self.vecenv.finish(buffer)
            seconds += in_environments * (clock() - begun)
        return seconds

    # -- learning

    def _learn(self, index, worker):
        """Learn from one learner's share of the minibatch."""
        buffers, learner = self.buffers, self.learners[worker]
        columns = buffers.columns
        self.gradients[worker].zero_()
        learner.statistics.fill(0)
        rollout = (columns.samples, columns.logprobs, columns.values, columns.advantages, buffers.segment_weights,
                   columns.valid, buffers.settings)
        _learn_cpu(
            *engines.share(worker, self.num_learners, len(index)), learner.together,
            host_array(self.observation_columns), self.initial, host_array(columns.resets),
            host_array(index), self.products.arrays, self.products.back, learner.scratch,
            learner.added, self.spread, self._squash(), *self._masks(columns.action_masks),
            None if buffers.heads is None else host_array(buffers.heads), tuple(map(host_array, rollout)),
            (host_array(buffers.new_values), host_array(buffers.new_ratios)), learner.statistics)
        buffers.sums[worker, : kernels.SUMS] += torch.from_numpy(learner.statistics.sum(0))
