"""Compute everything in PPO that is not a matrix product, in fused kernels.

    from kernels import advantage, mingru_scan, ppo_loss    # their arrays come from arena.py
    python -m pytest tests/test_kernels.py        # every kernel against its float64 reference
    python bench/bench_kernels.py                 # nanoseconds per element, next to a plain copy

The file has the scalar mathematics first, then the kernels in the order of an epoch: sample,
advantage, priorities, gather, MinGRU, loss, optimizer (optim.py). A kernel has these parts:

    *_cell      the formula for one element, on float32 scalars. `_choose_rows` and `_head_rows`
                are a CPU's forms of choose_cell and of read_head in kernels.cu, for many agents or
                steps at once: edit both
    _*_lanes    the driver (some have no suffix): a numba loop without the GIL over a range of lanes
                (agents, segments, steps, or an array's numbers or matrices). The contiguous axis is
                innermost, so that the loop vectorises. A driver gets all arrays as arguments; one
                that allocates fails with "NRT required but not enabled". A GPU runs it too, unless
                the kernel also has a part `_*_cuda` or one in kernels.cu
    _*_cuda     the driver for a GPU: one lane per thread, neighbouring lanes contiguous in memory
    kernels.cu  the kernel in C++ for a GPU; fast/cuda_cpp.py translates the cells that it names
    function    the public name. It checks shapes and types, then runs the driver for the tensors'
                device: on a CPU with the threads of `with arena.threads(n)` (default 1), on a GPU
                on torch's current stream

To change a formula, edit its cell, its reference in tests/reference.py, and ppo.py; for a new term
.github/CONTRIBUTING.md lists the places. To add a kernel, copy `advantage`.

All data is time-major, (T, N, ...): T steps (the horizon) of N agents. Arrays are float32 unless a
docstring says otherwise; flags are uint8. "floats" are float32 or bfloat16, and the mathematics is
in float32. Constants in a cell are np.float32: a bare literal makes the whole loop float64.

hgp is the output of a MinGRU layer's one linear map, (T, M, 3H): the pre-activations of the
candidate state h, of the update gate g, and of the highway gate p, side by side.
"""

import math

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from arena import (
    FLOATS,
    HALF,
    ONE,
    ZERO,
    all_columns,
    as_array,
    cell,
    check_arrays,
    constant,
    distinct_driver,
    driver,
    expand_log_std,
    f32,
    f64,
    i32,
    i64,
    on_gpu,
    optional_masks,
    optional_squash,
    prefetch,
    reduction_driver,
    run,
    u8,
    u16,
    u32,
    u64,
)
from fast import cuda_cpp

CUDA = cuda_cpp.Module("kernels.cu", globals())  # the GPU kernels that are written in C++

# --------------------------------------------------------------------------------------------------
# Scalar mathematics


@njit(error_model="numpy")
def power_of_two(shifted):
    """Return 2^k for k + 1.5·2^23, by moving the bits of k into the exponent."""
    return i32(i32(f32(shifted).view(i32) + i32(127)) << i32(23)).view(f32)


@cell
def exp_cell(x):
    """Return e^x within 1e-7 relative, and 0 below -87. NaN stays NaN.

    2^k · p(r), p of degree 6 (constants of Cephes' expf, Moshier 1992).
    """
    x = f32(88.0) if x > f32(88.0) else x
    under = x < f32(-87.0)
    x = f32(-87.0) if under else x
    # adding 1.5·2^23 rounds to an integer k, left in the low bits
    shifted = x * f32(1.44269504) + f32(12582912.0)
    k = shifted - f32(12582912.0)
    r = x - k * f32(0.693359375)
    r = r - k * f32(-2.12194440e-4)
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    p = p * (r * r) + r + ONE
    return ZERO if under else p * power_of_two(shifted)


# bfloat16, the upper half of a float32: numba has no such type, so drivers see its bits as uint16.


@njit(error_model="numpy")
def float_of_bfloat(bits):
    """Return the float32 of bfloat16 bits."""
    return u32(u32(bits) << u32(16)).view(f32)


@njit(error_model="numpy")
def bfloat_of_float(x):
    """Round to the nearest bfloat16, halves away from zero. NaN stays NaN.

    Rounding halves to even takes five operations, not two, and slows the loops by a seventh.
    """
    bits = f32(x).view(u32)
    return u16((bits | u32(0x00400000) if x != x else u32(bits + u32(0x8000))) >> u32(16))


@njit(error_model="numpy")
def widen(x):
    """Return a number read from an array as float32."""
    return float_of_bfloat(x) if isinstance(x, u16) else x


def narrow(x, array):
    """Return a number as the array's dtype, float32 or bfloat16."""
    return bfloat_of_float(x) if array.dtype == u16 else x


@overload(narrow)
def _narrow(x, array):
    if array.dtype == types.uint16:
        return lambda x, array: bfloat_of_float(x)
    return lambda x, array: x


SIGMOID_END = f32(16.02)  # above this the sigmoid is 1 in float32


@cell
def half_tanh_cell(x):
    """Return ½ tanh(x / 2) by the rational minimax approximation of Eigen's ptanh.

    Numerator and denominator are independent, so a MinGRU scan takes a fifth less than with e^-x.
    """
    x = SIGMOID_END if x > SIGMOID_END else x
    x = -SIGMOID_END if x < -SIGMOID_END else x
    y = x * x
    n = f32(1.36186878e-11) * y + f32(8.21380297e-08)
    n = n * y + f32(5.50118239e-05)
    n = n * y + f32(8.37635063e-03)
    n = n * y + f32(0.25)
    d = f32(3.13116288e-09) * y + f32(5.19836158e-06)
    d = d * y + f32(1.62328407e-03)
    d = d * y + f32(1.16838709e-01)
    d = d * y + ONE
    return n * x / d


@cell
def sigmoid_cell(x):
    """Return 1/(1 + e^-x) within 2e-7. NaN stays NaN."""
    return half_tanh_cell(x) + HALF


@cell
def tanh_cell(x):
    """Return tanh x within 4e-7 (relative 3e-7 for |x| < 1). NaN stays NaN."""
    return f32(2.0) * half_tanh_cell(f32(2.0) * x)


@njit(error_model="numpy")
def exponent_and_mantissa(x):
    """Return floats (k, m) with x = m · 2^k, sqrt(½) <= m < sqrt(2).

    x is normal and above 0.
    """
    bits = f32(x).view(i32) - i32(0x3F3504F3)
    k = bits >> i32(23)
    return f32(k), i32((bits & i32(0x7FFFFF)) + i32(0x3F3504F3)).view(f32)


@cell
def log_cell(x):
    """Return log x within 1e-7 relative, for x normal and above 0.

    Constants of Cephes' logf (Moshier 1992).
    """
    k, m = exponent_and_mantissa(x)
    f = m - ONE
    z = f * f
    p = f32(7.0376836292e-2)
    p = p * f + f32(-1.1514610310e-1)
    p = p * f + f32(1.1676998740e-1)
    p = p * f + f32(-1.2420140846e-1)
    p = p * f + f32(1.4249322787e-1)
    p = p * f + f32(-1.6668057665e-1)
    p = p * f + f32(2.0000714765e-1)
    p = p * f + f32(-2.4999993993e-1)
    p = p * f + f32(3.3333331174e-1)
    p = p * f - HALF
    return k * f32(0.693359375) + (k * f32(-2.12194440e-4) + (p * z + f))


@cell
def cos_turn_cell(u):
    """Return cos(2 pi u) within 1e-6, for u in [0, 1).

    Minus the sine's Taylor series, at most a quarter turn from its zero.
    """
    w = f32(6.283185307179586) * (f32(0.25) - abs(u - HALF))
    z = w * w
    p = f32(-2.5052108e-8)
    p = p * z + f32(2.7557319e-6)
    p = p * z + f32(-1.9841270e-4)
    p = p * z + f32(8.3333333e-3)
    p = p * z + f32(-1.6666667e-1)
    p = p * z
    return -(p * w + w)


@cell
def philox_round(c0, c1, c2, c3, k0, k1):
    product0 = u64(c0) * u64(0xD2511F53)
    product1 = u64(c2) * u64(0xCD9E8D57)
    return (u32(product1 >> u64(32)) ^ c1 ^ k0, u32(product1 & u64(0xFFFFFFFF)),
            u32(product0 >> u64(32)) ^ c3 ^ k1, u32(product0 & u64(0xFFFFFFFF)))


@cell
def philox_cell(c0, c1, c2, c3, k0, k1):
    """Return four random 32-bit words of a counter and a key.

    Philox4x32-10 (Salmon et al. 2011).
    """
    for _ in range(10):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = u32((u64(k0) + u64(0x9E3779B9)) & u64(0xFFFFFFFF))
        k1 = u32((u64(k1) + u64(0xBB67AE85)) & u64(0xFFFFFFFF))
    return c0, c1, c2, c3


@cell
def uniform_cell(word):
    """Return a float32 in [0, 1) from the upper 24 bits of a word."""
    return f32(word >> u32(8)) * f32(5.9604644775390625e-08)


# The last 32-bit word of a Philox counter is the purpose of the random number, so that no two uses
# share a counter. An exact resume depends on these counters (runs.py).
PURPOSE_ACTION, PURPOSE_SEGMENT = u32(1), u32(2)


# --------------------------------------------------------------------------------------------------
# Sample: logits -> actions and their log-probabilities


@cell
def head_max_cell(row, mask, has_mask, first, last):
    """Return the largest allowed logit of a head, or NaN if one is NaN."""
    top = -f32(np.inf)
    for j in range(first, last):
        if not (has_mask and mask[j] == 0) and not (row[j] <= top):  # also true if NaN
            top = row[j]
    return top


@cell
def action_words_cell(seed, step, agent, place):
    """Return the random words for one head or dimension of an agent's action."""
    return philox_cell(u32(agent), u32(step & u64(0xFFFFFFFF)), u32((step >> u64(32)) << u64(16))
                       | u32(place), PURPOSE_ACTION, u32(seed & u64(0xFFFFFFFF)),
                       u32(seed >> u64(32)))


@cell
def choose_cell(row, mask, has_mask, first, last, uniform, deterministic):
    """Return (action, log-probability) of one head, on a GPU.

    The logits are row[first:last]; uniform is a number in [0, 1); deterministic takes the most
    likely action. `_choose_rows` is the same for a CPU: edit both. Equal logits give equal actions
    on every device: a compiler may fuse a product and a sum, so here each product goes into one sum
    only.
    """
    top, total = head_max_cell(row, mask, has_mask, first, last), ZERO
    for j in range(first, last):
        if not (has_mask and mask[j] == 0):
            total += exp_cell(row[j] - top)
    action, cumulative, threshold = first, ZERO, uniform * total
    for j in range(first, last):
        if has_mask and mask[j] == 0:
            continue
        # the last allowed action stays if rounding, or a NaN, leaves the target beyond all
        action = j
        cumulative += exp_cell(row[j] - top)
        if row[j] == top if deterministic else cumulative > threshold:
            break
    return action - first, row[action] - top - f32(math.log(total))


@driver
def _sample_discrete_cuda(begin, end, logits, has_masks, masks, heads, seed, first_agent, counter,
                          deterministic, actions, logprobs, values):
    width, step = logits.shape[1], u64(counter[0])
    for i in range(begin, end):
        row, mask = logits[i], masks[i if has_masks else 0]
        logprob, first = ZERO, 0
        for head in range(len(heads)):
            word, _, _, _ = action_words_cell(seed, step, first_agent + i, head)
            last = first + heads[head]
            actions[i, head], head_logprob = choose_cell(row, mask, has_masks, first, last,
                                                         uniform_cell(word), deterministic)
            logprob += head_logprob
            first = last
        logprobs[i] = logprob
        values[i] = row[width - 1]


# CHOICE_ROWS: scratch numbers per agent, besides two per logit. AGENTS_AT_ONCE: agents per block.
CHOICE_ROWS, AGENTS_AT_ONCE = 5, 64


@distinct_driver
def _uniform_rows(uniform, seed, step, first_agent, head):
    for i in range(len(uniform)):
        word, _, _, _ = action_words_cell(seed, step, first_agent + u64(i), head)
        uniform[i] = uniform_cell(word)


@distinct_driver
def _choose_rows(logits, likelihoods, uniform, top, total, log_total, choice, deterministic):
    """Compute choose_cell for n agents, in loops over agents that vectorise.

    logits (choices, n), -inf where forbidden. `choice` gets the number of choices that precede the
    chosen one: all of them if there is none, because of a NaN or because all logits are -inf.
    """
    agents = len(top)
    for i in range(agents):
        top[i], total[i], choice[i] = logits[0, i], ZERO, ZERO
    for j in range(1, len(logits)):
        row = logits[j]
        for i in range(agents):
            top[i] = top[i] if row[i] <= top[i] else row[i]
    for j in range(len(logits)):
        row, likelihood = logits[j], likelihoods[j]
        for i in range(agents):
            e, is_mode = exp_cell(row[i] - top[i]), row[i] == top[i] and top[i] > -f32(np.inf)
            likelihood[i] = (ONE if is_mode else ZERO) if deterministic else e
            total[i] += e
    for i in range(agents):
        log_total[i] = log_cell(total[i]) + (total[i] - total[i])  # NaN stays NaN
        uniform[i] = ZERO if deterministic else uniform[i] * total[i]
        total[i] = ZERO
    for j in range(len(logits)):
        likelihood = likelihoods[j]
        for i in range(agents):
            total[i] += likelihood[i]
            choice[i] += ZERO if total[i] > uniform[i] else ONE


@driver
def _sample_discrete_lanes(begin, end, logits, has_masks, masks, heads, seed, first_agent, counter,
                           deterministic, actions, logprobs, values, work):
    choices, step = logits.shape[1] - 1, u64(counter[0])
    for block in range(begin, end, AGENTS_AT_ONCE):
        n = min(end - block, AGENTS_AT_ONCE)
        # from `begin` on, so that threads use disjoint scratch
        rows = work[begin : begin + n].reshape(CHOICE_ROWS + 2 * choices, n)
        allowed_logits = rows[CHOICE_ROWS : CHOICE_ROWS + choices]
        likelihoods = rows[CHOICE_ROWS + choices :]
        uniform, top, total, log_total, choice = rows[0], rows[1], rows[2], rows[3], rows[4]
        for i in range(n):
            logprobs[block + i], values[block + i] = ZERO, logits[block + i, choices]
            for j in range(choices):
                is_forbidden = has_masks and masks[block + i, j] == 0
                allowed_logits[j, i] = -f32(np.inf) if is_forbidden else logits[block + i, j]
        first = 0
        for head in range(len(heads)):
            last = first + heads[head]
            head_logits = allowed_logits[first:last]
            _uniform_rows(uniform, seed, step, u64(first_agent) + u64(block), head)
            _choose_rows(head_logits, likelihoods[first:last], uniform, top, total, log_total,
                         choice, deterministic)
            for i in range(n):
                action = int(choice[i])
                if action == last - first:  # NaN logits choose nothing: take the last allowed action
                    action -= 1
                    while action > 0 and has_masks and masks[block + i, first + action] == 0:
                        action -= 1
                actions[block + i, head] = action
                logprobs[block + i] += head_logits[action, i] - top[i] - log_total[i]
            first = last


LOG_SQRT_2PI = f32(0.91893853320467274178)


@cell
def squash_cell(u, half):
    """Return (tanh u, log(1 - tanh² u)) without overflow.

    Computing 1 - tanh² u directly loses digits where it is near 0. half is the second row of
    models.squash: half the action's range. It is negative for an action without a tanh; both
    results are then 0.
    """
    x = abs(u)
    e = exp_cell(f32(-2) * x)
    magnitude = (ONE - e) / (ONE + e)
    squashed = -magnitude if u < ZERO else magnitude
    log_slope = f32(2) * (f32(0.69314718056) - x - log_cell(ONE + e))
    return (squashed if half > ZERO else ZERO), (log_slope if half > ZERO else ZERO)


@cell
def gaussian_draw_cell(mean, log_std, word_a, word_b, deterministic):
    """Return (u, -log p(u)) by two random words (Box and Muller 1958), or the mean."""
    radius = f32(math.sqrt(f32(-2.0) * log_cell(ONE - uniform_cell(word_a))))
    noise = ZERO if deterministic else radius * cos_turn_cell(uniform_cell(word_b))
    return mean + exp_cell(log_std) * noise, HALF * noise * noise + log_std + LOG_SQRT_2PI


@driver
def _sample_continuous_lanes(begin, end, means, log_std, squash, seed, first_agent, counter,
                             deterministic, samples, actions, logprobs, values):
    width, step, is_squashed = means.shape[1], u64(counter[0]), squash[1, 0] != ZERO
    for i in range(begin, end):
        logprob = ZERO
        for j in range(width - 1):
            word_a, word_b, _, _ = action_words_cell(seed, step, first_agent + i, j)
            u, neg_logprob = gaussian_draw_cell(means[i, j], log_std[i, j], word_a, word_b,
                                                deterministic)
            samples[i, j] = u  # without squash, samples is the array of actions itself
            logprob -= neg_logprob
            if is_squashed:
                half = squash[1, j]
                squashed, log_slope = squash_cell(u, half)
                actions[i, j] = squash[0, j] + (half * squashed if half > ZERO else -half * u)
                logprob -= squash[2, j] + log_slope
        logprobs[i] = logprob
        values[i] = means[i, width - 1]


def sample(outputs, actions, logprobs, values, *, seed, step, first_agent=0, heads=None,
           log_std=None, masks=None, squash=None, samples=None, deterministic=False):
    """Draw one action per agent from the decoder's outputs.

    outputs (n, A + 1): A logits (or means), then the value. Discrete: `heads`, int64 (heads,),
    sizes that add up to A; actions (n, heads) int32; masks (n, A) uint8, 0 forbids.
    Continuous: `log_std` (A,) or (n, A); actions (n, A) float32, the unclipped sample. Written:
    actions, logprobs (n,) joint over heads or dimensions, values (n,).

    `squash` (3, A) has middle, half and log half of the bounds (see models.squash). The sample u
    then goes to `samples` (n, A), middle + half · tanh(u) to actions, and logprobs are of these
    actions (Haarnoja et al. 2018, appendix C). A number whose half is below 0 has no tanh: its
    action is middle - half · u.

    Random words are Philox(key=seed, counter=(first_agent + row, step, head or dimension,
    PURPOSE_ACTION)): the same for any split of the agents over buffers, threads and devices. `step`
    is a number or an int64 tensor (1,), which a CUDA graph reads at each replay. `deterministic`
    takes the most likely action. Raises ValueError or TypeError for a wrong shape or dtype.
    """
    n, width = outputs.shape
    is_discrete, is_squashed, like = heads is not None, squash is not None, outputs
    parts = heads.shape[0] if is_discrete else width - 1
    has_masks, masks = optional_masks(masks, like, 2)
    outputs, actions_array, *written, counter, masks, heads, squash, samples, _ = check_arrays(
        "sample", outputs=(outputs, (n, width), f32),
        actions=(actions, (n, parts), i32 if is_discrete else f32),
        logprobs=(logprobs, (n,), f32), values=(values, (n,), f32), step=(step, (1,), i64),
        masks=(masks, (n, width - 1) if has_masks else (1, 1), u8), heads=(heads, (parts,), i64),
        squash=(optional_squash(squash, like), (3, parts if is_squashed else 1), f32),
        samples=(samples if is_squashed else None if is_discrete else actions, (n, parts), f32),
        log_std=(log_std, (n, parts) if log_std is not None and log_std.dim() > 1 else (parts,),
                 f32))
    random = u64(seed), u64(first_agent), counter, deterministic
    discrete = outputs, has_masks, masks, heads, *random, actions_array, *written
    if not is_discrete:
        run(_sample_continuous_lanes, n, 12 * width, outputs, expand_log_std(log_std, (n, parts)),
            squash, *random, samples, actions_array, *written)
    elif on_gpu(like):
        run(_sample_discrete_cuda, n, 1, *discrete)
    else:
        run(_sample_discrete_lanes, n, 4 * width, *discrete,
            np.empty((n, CHOICE_ROWS + 2 * (width - 1)), np.float32))


# --------------------------------------------------------------------------------------------------
# Advantage: GAE with V-trace weights


@cell
def advantage_cell(value, reward, done, truncated, truncated_value, ratio, valid, next_advantage,
                   next_value, has_next, offset, gamma, gae_lambda, rho_clip, c_clip, reward_clip):
    """Go one step back in time: return (advantage, next_value, has_next).

    GAE (Schulman et al. 2016, eq. 16) with the clipped importance weights of V-trace (Espeholt et
    al. 2018, eq. 1). Values are relative to `offset`. has_next is 1 if a value follows, 0 after an
    episode's end; `truncated`: truncated_value follows. An invalid step has no action: it passes
    on what follows, and its reward counts for the agent's last valid step.
    """
    reward = reward_clip if reward > reward_clip else reward
    reward = -reward_clip if reward < -reward_clip else reward
    continues = ZERO if done else ONE
    is_bootstrapped = ONE if truncated else continues * has_next
    rho = rho_clip if ratio > rho_clip else ratio
    c = c_clip if ratio > c_clip else ratio
    offset_reward = reward - offset * (ONE - gamma * is_bootstrapped)
    delta = rho * (offset_reward + gamma * (continues * next_value + truncated_value) - value)
    advantage = delta + gamma * gae_lambda * c * continues * next_advantage
    passed_value = reward + continues * next_value + truncated_value
    return ((advantage if valid else continues * next_advantage),
            (value if valid else passed_value), (ONE if valid else is_bootstrapped))


@njit(error_model="numpy")
def column_of(index, lane):
    """Return the segment of a lane: its entry in `index`, or the lane if that is None."""
    if index is None:  # numba compiles one branch only
        return u64(lane)
    return u64(index[lane])


@distinct_driver
def _advantage_lanes(begin, end, index, values, rewards, terminals, truncations, bootstraps, ratios,
                     valid, offset, gamma, gae_lambda, rho_clip, c_clip, reward_clip, advantages,
                     scratch):
    # all segments, or those in `index` (sorted, or None); 256 at a time, so that what follows them
    # stays in cache
    T, chunk = len(rewards), 256
    for first in range(begin, end, chunk):
        last = min(end, first + chunk)
        next_advantage, next_value, has_next = (scratch[0, first:last], scratch[1, first:last],
                                                scratch[2, first:last])
        for i in range(last - first):
            next_advantage[i], has_next[i] = ZERO, ONE
            next_value[i] = values[T, column_of(index, first + i)]
        for t in range(T - 1, -1, -1):
            for i in range(last - first):
                n = column_of(index, first + i)
                is_valid, is_done = valid[t, n] != 0, (terminals[t, n] | truncations[t, n]) != 0
                is_truncated = is_done & (terminals[t, n] == 0)
                a, v, f = advantage_cell(values[t, n], rewards[t, n], is_done, is_truncated,
                                         bootstraps[t, n], ratios[t, n], is_valid,
                                         next_advantage[i], next_value[i], has_next[i], offset[0],
                                         gamma, gae_lambda, rho_clip, c_clip, reward_clip)
                next_advantage[i], next_value[i], has_next[i] = a, v, f
                advantages[t, n] = a if is_valid else ZERO


def advantage(values, rewards, terminals, truncations, bootstraps, ratios, valid, advantages, *,
              gamma, gae_lambda, offset, rho_clip=1.0, c_clip=1.0, reward_clip=math.inf,
              index=None):
    """Write the advantages of all segments, or of the columns `index`.

    values (T+1, N), row T bootstraps; rewards, bootstraps (V of a truncated step's final
    observation, else 0), ratios, advantages (T, N); terminals, truncations (T, N) uint8; valid
    (T+1, N) uint8; index (M,) int64, sorted. With n_t = 1 - done_t and f_t = 1 if a value follows
    (V_{t+1} or bootstraps_t), else 0:

        R_t = r_t - offset · (1 - gamma · f_t) + gamma · (n_t · V_{t+1} + bootstraps_t)
        delta_t = min(ratio_t, rho_clip) · (R_t - V_t)
        A_t = delta_t + gamma · gae_lambda · min(ratio_t, c_clip) · n_t · A_{t+1}

    values and bootstraps are relative to `offset`, float32 (1,): the result is the advantages of
    offset + values without their rounding (a shift as in van Hasselt et al. 2016). An invalid step
    gets 0 and passes the A and V that follow it to the preceding step. `reward_clip` clamps r
    alone. Raises ValueError or TypeError for a wrong shape or dtype.
    """
    (T, N), is_cuda = rewards.shape, on_gpu(values)
    index = all_columns(N, values) if index is None and is_cuda else index
    lanes = N if index is None else index.shape[0]
    index, *rollout, advantages = check_arrays(
        "advantage", index=(index, (lanes,), i64), values=(values, (T + 1, N), f32),
        rewards=(rewards, (T, N), f32), terminals=(terminals, (T, N), u8),
        truncations=(truncations, (T, N), u8), bootstraps=(bootstraps, (T, N), f32),
        ratios=(ratios, (T, N), f32), valid=(valid, (T + 1, N), u8), offset=(offset, (1,), f32),
        advantages=(advantages, (T, N), f32))
    arrays = (index, *rollout, *map(f32, (gamma, gae_lambda, rho_clip, c_clip, reward_clip)),
              advantages)
    if is_cuda:
        CUDA.launch("advantage", -(-lanes // 8), 256, T, N, lanes, *arrays)
    else:
        run(_advantage_lanes, lanes, (1 if index is None else 4) * T, *arrays,
            np.empty((3, lanes), np.float32))


@driver
def return_moments(rewards, valid, resets, returns, gamma, center):
    """Return (count, sum, sum of squares) of discounted returns minus `center`.

    In float64, in order, over the valid steps of a rollout on a CPU: rewards (T, N); valid, resets
    (>= T, N) uint8. `returns` (N,) float64 holds the agents' discounted returns, updated in place.
    """
    count, total, squares = 0.0, 0.0, 0.0
    for t in range(len(rewards)):
        for i in range(len(returns)):
            if resets[t, i] != 0:
                returns[i] = 0.0
            returns[i] = (gamma if valid[t, i] != 0 else 1.0) * returns[i] + rewards[t, i]
            if valid[t, i] != 0:
                deviation = returns[i] - center
                count += 1.0
                total += deviation
                squares += deviation * deviation
    return count, total, squares


# --------------------------------------------------------------------------------------------------
# Priorities: which segments to learn from, and how much each counts


@distinct_driver
def _priorities_lanes(begin, end, advantages, valid, alpha, index, priorities, work):
    chunk = 256  # as in _advantage_lanes
    for first in range(begin, end, chunk):
        last = min(end, first + chunk)
        totals, any_valid = work[0, first:last], work[1, first:last]
        totals[:], any_valid[:] = 0.0, 0.0
        for t in range(len(advantages)):
            for i in range(last - first):
                n = column_of(index, first + i)
                is_valid = valid[t, n] != 0
                totals[i] += np.float64(abs(advantages[t, n])) if is_valid else 0.0
                any_valid[i] = 1.0 if is_valid else any_valid[i]
        for i in range(last - first):
            priority = totals[i]**alpha + 1e-6 if any_valid[i] != 0.0 else 0.0
            priorities[column_of(index, first + i)] = priority


def priorities(advantages, valid, priorities, *, alpha, index=None):
    """Write the unnormalised priorities of all segments, or of those in `index`.

    (sum over t of |A|)^alpha + 1e-6 (prioritized replay, Schaul et al. 2016, eq. 1, over segments).
    advantages (T, N), valid (>= T, N) uint8. Written: priorities (N,) float64, 0 for a segment
    without a valid step.
    """
    (T, N), is_cuda = advantages.shape, on_gpu(priorities)
    index = all_columns(N, advantages) if index is None and is_cuda else index
    lanes = N if index is None else index.shape[0]
    advantages, valid, index, result = check_arrays(
        "priorities", advantages=(advantages, (T, N), f32), valid=(valid, (-T, N), u8),
        index=(index, (lanes,), i64), priorities=(priorities, (N,), f64))
    arrays = advantages, valid, float(alpha), index, result
    if is_cuda:
        CUDA.launch("priorities", -(-lanes // 8), 256, T, N, lanes, *arrays)
    else:
        run(_priorities_lanes, lanes, T, *arrays, np.empty((2, lanes)))


@cell
def search_cell(sorted_values, value, is_inclusive):
    """Count the sorted values below `value`, or equal to it if is_inclusive."""
    low, high = 0, len(sorted_values)
    while low < high:
        middle = (low + high) // 2
        if sorted_values[middle] < value or (is_inclusive and sorted_values[middle] == value):
            low = middle + 1
        else:
            high = middle
    return low


@driver
def _draw_segments_lanes(begin, end, priorities, cumulative, seed, counter, beta, first, index,
                         weights):
    key0, key1 = u32(seed & u64(0xFFFFFFFF)), u32(seed >> u64(32))
    N, M = len(cumulative), len(index)
    total, num_drawable = cumulative[N - 1], 0
    for n in range(N):
        num_drawable += priorities[n] > 0.0
    # the last segment with a priority
    last_valid = min(search_cell(cumulative, total, False), N - 1)
    num_drawn = counter[1] * M  # in earlier minibatches of this epoch
    for m in range(begin, end):
        high, low, _, _ = philox_cell(u32(first + m), u32(counter[0]), u32(num_drawn // N),
                                      PURPOSE_SEGMENT, key0, key1)
        u = (np.float64(high) * 4294967296.0 + np.float64(low)) * 2.0**-64 + (num_drawn % N) / N
        segment = min(search_cell(cumulative, (m + (u - math.floor(u))) / M * total, True),
                      last_valid)
        scaled_probability = num_drawable * (priorities[segment] / total)
        index[m] = segment
        # NaN, because NaN ** 0 is 1
        weights[m] = (scaled_probability ** -np.float64(beta[0]) if scaled_probability > 0.0
                      else np.nan)


def draw_segments(priorities, cumulative, index, weights, *, seed, counter, beta, first=0):
    """Draw M segments with p_n = priority_n / sum, and their importance weights.

    weights = (K · p_n)^-beta for K segments with a priority. The cumulative priorities are cut into
    M equal strata, and one segment comes from each (Schaul et al. 2016, appendix B.2.1), so `index`
    is sorted. The place u in the stratum is one random number per pass of N draws; each minibatch
    adds M / N to it, modulo 1 (a rotation, Cranley and Patterson 1976). So a pass takes each
    segment once if all priorities are equal and M divides N.

    priorities, cumulative (scratch) (N,) float64; written: index (M,) int64, weights (M,) float32.
    `counter` is (epoch, minibatch), numbers or an int64 tensor (2,); beta a number or a tensor
    (1,). `first`: how many segments lower ranks draw. Random words are
    Philox(key=seed, counter=(first + m, epoch, minibatch · M // N, PURPOSE_SEGMENT)). Indices are
    within bounds even if priorities are NaN.
    """
    N, M = priorities.shape[0], index.shape[0]
    *arrays, index, weights, counter, beta = check_arrays(
        "draw_segments", priorities=(priorities, (N,), f64), cumulative=(cumulative, (N,), f64),
        index=(index, (M,), i64), weights=(weights, (M,), f32), counter=(counter, (2,), i64),
        beta=(beta, (1,), f32))
    if on_gpu(priorities):
        CUDA.launch("draw_segments", 1, 1024, N, M, first, u64(seed), counter, beta, *arrays,
                    index, weights)
        return
    torch.cumsum(priorities, 0, out=cumulative)
    run(_draw_segments_lanes, M, 80, *arrays, u64(seed), counter, beta, first, index, weights)


# --------------------------------------------------------------------------------------------------
# Observations: their moments, and the drawn segments copied side by side and normalised

STRIDE = 8  # steps that a GPU thread copies, so that it looks up its column once
OBSERVATION_CLIP = f32(10)  # standard deviations at which normalised observations are clipped


@cell
def normalise_cell(x, shift, scale):
    """Return x in standard deviations from the mean, clipped. NaN stays NaN.

    x has the type of shift.
    """
    x = f32(x - shift) * scale
    x = OBSERVATION_CLIP if x > OBSERVATION_CLIP else x
    return -OBSERVATION_CLIP if x < -OBSERVATION_CLIP else x


@distinct_driver
def _gather_lanes(begin, end, source, index, start, shift, scale, out):
    # Segment by segment: row by row, the CPU would prefetch segments outside the minibatch.
    for m in range(begin, end):
        segment = index[start + m]
        for t in range(len(out)):
            row, target = source[t, segment], out[t, m]
            if len(shift) > 0:
                for j in range(len(row)):
                    target[j] = narrow(normalise_cell(shift.dtype.type(row[j]), shift[j], scale[j]),
                                       target)
            else:
                for j in range(len(row)):
                    target[j] = narrow(row[j], target)


@driver
def _gather_cuda(begin, end, T, M, N, width, source, index, start, shift, scale, out):
    for lane in range(u64(begin), u64(end)):
        row, j = lane // width, lane % width
        m, first = row % M, row // M * u64(STRIDE)
        out_at = (first * M + m) * width + j
        source_at = (first * N + u64(index[start + m])) * width + j
        for _ in range(first, min(first + u64(STRIDE), T)):
            if len(shift) > 0:
                out[out_at] = narrow(normalise_cell(shift.dtype.type(source[source_at]), shift[j],
                                                    scale[j]), out)
            else:
                out[out_at] = narrow(source[source_at], out)
            out_at, source_at = out_at + M * width, source_at + N * width


def gather(source, index, out, *, start=0, shift=None, scale=None):
    """Copy segments: out[t, m] = source[t, index[start + m]], cast to out's dtype.

    source (>= T, N, ...) of any dtype but 16-bit floats, index int64 or None for all columns in
    order, out (T, M, ...) with the same trailing shape. With shift and scale of the trailing shape
    (float32, or float64 for shift) each element becomes clip((source - shift) · scale, ±10).
    """
    (T, M), tail = out.shape[:2], tuple(out.shape[2:])
    N, width = source.shape[1], math.prod(tail)
    index = all_columns(N, source) if index is None else index
    columns, source_array, out_array = check_arrays(
        "gather", index=(index, (-(start + M),), i64),
        source=(source, (-T, N, *tail), None), out=(out, (T, M, *tail), None))
    source_array, out_array = source_array.reshape(-1, N, width), out_array.reshape(T, M, width)
    moments = [as_array(constant(("no normalisation",), source, lambda: torch.zeros(0)))] * 2
    if shift is not None:
        moments = check_arrays("gather", shift=(shift, tail, None), scale=(scale, tail, None))
        moments = [moment.reshape(-1) for moment in moments]
    # flat and unsigned, because multidimensional and signed indices are slow on a GPU
    if on_gpu(out):
        run(_gather_cuda, -(-T // STRIDE) * M * width, 1, *map(u64, (T, M, N, width)),
            source_array.reshape(-1), columns, u64(start), *moments, out_array.reshape(-1))
    else:
        run(_gather_lanes, M, T * width // 3, source_array, columns, start, *moments, out_array)


@distinct_driver
def _observation_moments(begin, end, observations, valid, center, sums):
    for row in range(len(observations)):
        if valid[row] != 0:
            for j in range(begin, end):
                deviation = np.float64(observations[row, j]) - center[j]
                sums[0, j] += deviation
                sums[1, j] += deviation * deviation


def observation_moments(observations, valid, center):
    """Return the first and second moment sums of observations - center.

    (2, D) float64: over the valid rows, the sum of the differences and that of their squares.
    observations (rows, D) of any dtype but 16-bit floats, valid (rows,) uint8, center (D,) float64,
    near the mean so that nothing cancels.
    """
    rows, width = observations.shape
    if observations.is_cuda:  # a thread per number instead of one per column
        is_valid = valid.bool().unsqueeze(1)
        sums = torch.zeros(2, width, dtype=torch.float64, device=observations.device)
        for rows_chunk, valid_chunk in zip(observations.split(1 << 16), is_valid.split(1 << 16),
                                           strict=True):
            deviation = torch.where(valid_chunk, rows_chunk.double() - center, 0.0)
            sums[0] += deviation.sum(0)
            sums[1] += deviation.square().sum(0)
        return sums
    sums = np.zeros((2, width))
    run(_observation_moments, width, rows, *check_arrays(
        "observation_moments", observations=(observations, (rows, width), None),
        valid=(valid, (rows,), u8), center=(center, (width,), f64)), sums)
    return torch.as_tensor(sums)


# --------------------------------------------------------------------------------------------------
# MinGRU with highway gate: one step for the rollout, a scan forward and backward for the update


@cell
def mingru_gates_cell(h, g, p):
    """Return (h~, z, q) of mingru_cell from hgp.

    h~ is h + ½ if h >= 0, else sigmoid(h): written as a sum, because a branch doubles the loop's
    time.
    """
    positive, negative = h if h >= ZERO else ZERO, ZERO if h >= ZERO else h
    return sigmoid_cell(negative) + positive, sigmoid_cell(g), sigmoid_cell(p)


@cell
def mingru_cell(x, candidate, z, q, state, valid):
    """Return (new state, output) of one channel.

    MinGRU (Feng et al. 2024, section 3.1) in linear space with a highway gate (Srivastava et al.
    2015, eq. 3): s' = (1-z)·s + z·h~, out = q·s' + (1-q)·x, z = sigmoid(g), q = sigmoid(p). An
    inactive agent's state stays.
    """
    new_state = state + z * (candidate - state)
    state = new_state if valid else state
    return state, x + q * (state - x)


@cell
def mingru_cell_grad(x, candidate, z, q, state, valid, grad_out, grad_state):
    """Return (dh, dg, dp, dx, dstate) of the two cells above.

    h~ is ½ or more exactly where h is not negative.
    """
    candidate_slope = ONE if candidate >= HALF else candidate * (ONE - candidate)
    new_state = state + z * (candidate - state) if valid else state
    ds = grad_state + grad_out * q
    dz, dx = ds * z, grad_out * (ONE - q)
    return (dz * candidate_slope if valid else ZERO, dz * (candidate - state) * (ONE - z) if valid
            else ZERO, dx * (new_state - x) * q, dx, ds * (ONE - z) if valid else ds)


@distinct_driver
def _mingru_step_lanes(begin, end, hgp, x, state, resets, valid, out):
    H = x.shape[1]
    for m in range(begin, end):
        row, xs, s, o = hgp[m], x[m], state[m], out[m]
        h, g, p = row[:H], row[H : 2 * H], row[2 * H :]
        keep_state, is_valid = ZERO if resets[m] else ONE, valid[m] != 0
        for j in range(H):
            candidate, z, q = mingru_gates_cell(widen(h[j]), widen(g[j]), widen(p[j]))
            new_state, y = mingru_cell(widen(xs[j]), candidate, z, q, s[j] * keep_state, is_valid)
            s[j] = new_state
            o[j] = narrow(y, o)


@driver
def _mingru_step_cuda(begin, end, hgp, x, state, resets, valid, out):
    H = x.shape[1]
    for lane in range(begin, end):
        m, j = lane // H, lane % H
        h, g, p = widen(hgp[m, j]), widen(hgp[m, H + j]), widen(hgp[m, 2 * H + j])
        s = state[m, j] * (ZERO if resets[m] else ONE)
        candidate, z, q = mingru_gates_cell(h, g, p)
        state[m, j], y = mingru_cell(widen(x[m, j]), candidate, z, q, s, valid[m] != 0)
        out[m, j] = narrow(y, out)


def mingru_step(hgp, x, state, resets, valid, out):
    """Compute one MinGRU step of M agents, and update their state in place.

    hgp (M, 3H); x, out (M, H), floats; state (M, H); resets, valid (M,) uint8: a reset zeroes the
    state first, an invalid step leaves it as it is.
    """
    M, H = x.shape
    driver, lanes = (_mingru_step_cuda, M * H) if on_gpu(x) else (_mingru_step_lanes, M)
    run(driver, lanes, H, *check_arrays(
        "mingru_step", hgp=(hgp, (M, 3 * H), FLOATS), x=(x, (M, H), FLOATS),
        state=(state, (M, H), f32), resets=(resets, (M,), u8), valid=(valid, (M,), u8),
        out=(out, (M, H), FLOATS)))


@njit(error_model="numpy")
def gate_to_save(gate, preactivation):
    """Return what the scan saves for its gradient.

    The gate, or its pre-activation if bfloat16 would round the gate.
    """
    return preactivation if isinstance(preactivation, u16) else gate


@njit(error_model="numpy")
def load_gates(h, g, p):
    """Return the gates for the backward pass, from what gate_to_save saved."""
    return mingru_gates_cell(widen(h), widen(g), widen(p)) if isinstance(h, u16) else (h, g, p)


PREFETCH_STEPS = 8  # how many steps ahead a scan on a CPU prefetches


@distinct_driver
def _mingru_scan_lanes(begin, end, hgp, x, states, resets, valid, index, start, out, gates, carry):
    T, M, H = x.shape
    for m in range(begin, end):
        column, s = index[start + m], carry[m]
        for j in range(H):  # a loop that reads states[t] and writes states[t + 1] is slow
            s[j] = states[0, m, j]
        for t in range(T):
            row, gate_row, xs = hgp[t, m], gates[t, m], x[t, m]
            new_state, o = states[t + 1, m], out[t, m]
            if M > 1:  # else the steps lie side by side
                ahead = min(t + PREFETCH_STEPS, T - 1)
                prefetch(hgp[ahead, m])
                prefetch(gates[ahead, m])
                prefetch(x[ahead, m])
                prefetch(states[ahead + 1, m])
                prefetch(out[ahead, m])
            h, g, p = row[:H], row[H : 2 * H], row[2 * H :]
            saved_h, saved_g, saved_p = gate_row[:H], gate_row[H : 2 * H], gate_row[2 * H :]
            keep_state, is_valid = ZERO if resets[t, column] else ONE, valid[t, column] != 0
            for j in range(H):
                candidate, z, q = mingru_gates_cell(widen(h[j]), widen(g[j]), widen(p[j]))
                state, y = mingru_cell(widen(xs[j]), candidate, z, q, s[j] * keep_state, is_valid)
                saved_h[j] = gate_to_save(candidate, h[j])
                saved_g[j] = gate_to_save(z, g[j])
                saved_p[j] = gate_to_save(q, p[j])
                s[j] = state
                new_state[j] = state
                o[j] = narrow(y, o)


def mingru_scan(hgp, x, states, resets, valid, out, *, gates=None, index=None, start=0,
                initial=None):
    """Compute T MinGRU steps of M segments.

    hgp (T, M, 3H); x, out (T, M, H), floats; states (T+1, M, H): row 0 is read, the rest written.
    resets, valid (>= T, N) uint8 are of all agents; the segments are their columns index[start :
    start + M] (int64; all in order without an index). initial (N, H), if given, provides row 0 of
    states. gates (T, M, 3H), by default hgp itself, gets what mingru_scan_grad needs: on a CPU the
    gates (h~, z, q) of a float32 hgp; on a GPU hgp, because recomputing gates is faster than
    reading them. Other arrays must be distinct.
    """
    (T, M, H), N, like = x.shape, resets.shape[1], x
    index = all_columns(N, x) if index is None else index
    kind = u16 if hgp.dtype == torch.bfloat16 else f32
    *arrays, gate_array, initial = check_arrays(
        "mingru_scan", hgp=(hgp, (T, M, 3 * H), FLOATS), x=(x, (T, M, H), FLOATS),
        states=(states, (T + 1, M, H), f32), resets=(resets, (-T, N), u8),
        valid=(valid, (-T, N), u8), index=(index, (-(start + M),), i64),
        out=(out, (T, M, H), FLOATS), gates=(hgp if gates is None else gates, (T, M, 3 * H), kind),
        initial=(initial, (N, H), f32))
    arrays.insert(6, start)
    has_initial = initial is not None
    if on_gpu(like):
        if gates is not None:
            gates.copy_(hgp)
        _launch_scan("mingru_scan", T, M, N, H, (*arrays[:7], initial if has_initial else arrays[2],
                                                 has_initial, arrays[7]))
        return
    if has_initial:
        np.take(initial, arrays[5][start : start + M], axis=0, out=arrays[2][0])
    run(_mingru_scan_lanes, M, T * H, *arrays, gate_array, np.empty((M, H), np.float32))


# from this many channels (segments × H) on, a GPU thread has two
MIN_CHANNELS_FOR_PAIRS = 1 << 16
# read, written (f: float32, b: bfloat16)
SCAN_SUFFIXES = {"ff": "", "bb": "_half", "bf": "_half_last"}


def _launch_scan(name, T, M, N, H, arrays, out=9):
    """Launch a scan of kernels.cu.

    A thread has two channels if there are many and their number is even.
    """
    gates, inputs, out = ("b" if arrays[i].dtype == u16 else "f" for i in (0, 1, out))
    suffix = SCAN_SUFFIXES.get(gates + out)
    if gates != inputs or suffix is None or f"{name}{suffix}" not in CUDA.signatures:
        raise TypeError(f"kernels.{name}: hgp, x, output are {gates}, {inputs}, {out} (f: "
                        "float32, b: bfloat16), expected one type, or a scan's float32 output.")
    lanes = M * H // (1 if H % 2 or M * H < MIN_CHANNELS_FOR_PAIRS else 2)
    CUDA.launch(f"{name}{suffix}", -(-lanes // 64), 64, T, M, N, H, *arrays)


@distinct_driver
def _mingru_scan_grad_lanes(begin, end, hgp, x, states, resets, valid, index, start, grad_out, sums,
                            carry):
    T, M, H = x.shape
    for m in range(begin, end):
        column, grad_state = index[start + m], carry[m]
        grad_state[:], sums[m] = ZERO, ZERO
        sum_h, sum_g, sum_p = sums[m, :H], sums[m, H : 2 * H], sums[m, 2 * H :]
        for t in range(T - 1, -1, -1):
            row, xs, s, dy = hgp[t, m], x[t, m], states[t, m], grad_out[t, m]
            if M > 1:
                ahead = max(t - PREFETCH_STEPS, 0)
                prefetch(hgp[ahead, m])
                prefetch(x[ahead, m])
                prefetch(states[ahead, m])
                prefetch(grad_out[ahead, m])
            h, g, p = row[:H], row[H : 2 * H], row[2 * H :]
            keep_state, is_valid = ZERO if resets[t, column] else ONE, valid[t, column] != 0
            for j in range(H):
                candidate, z, q = load_gates(h[j], g[j], p[j])
                dh, dg, dp, dx, ds = mingru_cell_grad(widen(xs[j]), candidate, z, q,
                                                      s[j] * keep_state, is_valid, widen(dy[j]),
                                                      grad_state[j])
                h[j], g[j] = narrow(dh, h), narrow(dg, g)
                p[j], dy[j] = narrow(dp, p), narrow(dx, dy)
                sum_h[j] += dh
                sum_g[j] += dg
                sum_p[j] += dp
                grad_state[j] = ds * keep_state


def mingru_scan_grad(hgp, x, states, resets, valid, grad_out, sums, *, index=None, start=0):
    """Compute the gradients of mingru_scan in place.

    floats: hgp (T, M, 3H), as mingru_scan left it, becomes d loss/d hgp; grad_out (T, M, H) becomes
    the highway's share of d loss/d x (the caller adds d hgp @ W). The gradient of states[0] is not
    propagated. sums (M, 3H) gets each segment's sum of d hgp over t; these add up to the bias's
    gradient.
    """
    (T, M, H), N = x.shape, resets.shape[1]
    index = all_columns(N, x) if index is None else index
    arrays = check_arrays(
        "mingru_scan_grad", hgp=(hgp, (T, M, 3 * H), FLOATS), x=(x, (T, M, H), FLOATS),
        states=(states, (T + 1, M, H), f32), resets=(resets, (-T, N), u8),
        valid=(valid, (-T, N), u8), index=(index, (-(start + M),), i64),
        grad_out=(grad_out, (T, M, H), FLOATS), sums=(sums, (M, 3 * H), f32))
    arrays.insert(6, start)
    if on_gpu(x):
        _launch_scan("mingru_scan_grad", T, M, N, H, arrays, 7)
    else:
        run(_mingru_scan_grad_lanes, M, T * H, *arrays, np.empty((M, H), np.float32))


# --------------------------------------------------------------------------------------------------
# PPO loss: forward, gradient and statistics in one pass

# Settings that may change between updates are one array, which a captured CUDA graph reads.
LOSS_SETTINGS = ("advantage_mean", "advantage_scale", "row_scale", "value_scale", "clip_coef",
                 "min_advantage_std", "vf_coef", "vf_clip_coef", "vf_error_bound", "ent_coef")
LOSS_SUMS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac",
             "importance", "return", "return_squared", "residual", "residual_squared", "valid")
SUMS = len(LOSS_SUMS)
(ADVANTAGE_MEAN, ADVANTAGE_SCALE, ROW_SCALE, VALUE_SCALE, CLIP_COEF, MIN_ADVANTAGE_STD, VF_COEF,
 VF_CLIP_COEF, VF_ERROR_BOUND, ENT_COEF) = range(len(LOSS_SETTINGS))
(POLICY_LOSS, VALUE_LOSS, ENTROPY, OLD_APPROX_KL, APPROX_KL, CLIPFRAC, IMPORTANCE, RETURN,
 RETURN_SQUARED, RESIDUAL, RESIDUAL_SQUARED, VALID) = range(SUMS)


@reduction_driver
def _masked_moments(begin, end, numbers, valid, index, row_sums):
    for t in range(begin, end):
        count, total, squares = 0.0, 0.0, 0.0
        for m in range(len(index)):
            n = u64(index[m])
            is_valid = valid[t, n] != 0
            x = np.float64(numbers[t, n]) if is_valid else 0.0
            count += 1.0 if is_valid else 0.0
            total += x
            squares += x * x
        row_sums[t, 0], row_sums[t, 1], row_sums[t, 2] = count, total, squares


def _launch_sum(name, steps, count, like, sizes, written, *arrays):
    """Launch a kernel of kernels.cu that adds up `count` numbers over `steps`.

    The sums go to `written`; sizes and arrays are its other arguments.
    """
    blocks = max(1, min(-(-steps // 128), 1024))
    CUDA.launch(name, blocks, 128, *sizes, *arrays, *_sums_of_blocks(like, blocks * count),
                *written)


def _sums_of_blocks(like, count, tickets=1):
    """Return (block sums, tickets): scratch for sums in kernels.cu.

    One per stream, because streams may overlap.
    """
    stream = torch.cuda.current_stream().cuda_stream
    size = 1 << (count - 1).bit_length()
    sums = constant(("sums", stream, size), like, lambda: torch.zeros(size, dtype=torch.float64))
    tickets = constant(("tickets", stream, tickets), like,
                       lambda: torch.zeros(tickets, dtype=torch.int32))
    return as_array(sums), as_array(tickets)


def masked_moments(numbers, valid, index, moments=None):
    """Write and return the count, sum and sum of squares of numbers (T, N).

    moments (3,) float64, over the valid steps of the segments `index` (of all if None). The loss
    normalises advantages by theirs, which several ranks add up first.
    """
    T, N = numbers.shape
    index = all_columns(N, numbers) if index is None else index
    if moments is None:
        moments = torch.empty(3, dtype=torch.float64, device=numbers.device)
    M = index.shape[0]
    *arrays, result = check_arrays(
        "masked_moments", numbers=(numbers, (T, N), f32), valid=(valid, (-T, N), u8),
        index=(index, (M,), i64), moments=(moments, (3,), f64))
    if on_gpu(numbers):
        _launch_sum("masked_moments", T * M, 3, numbers, (T, M, N), (result,), *arrays)
        return moments
    row_sums = np.zeros((T, 3))
    run(_masked_moments, T, 3 * M, *arrays, row_sums)
    result[:] = row_sums.sum(0)
    return moments


@driver
def _normalisation(begin, end, moments, settings):
    for _ in range(begin, end):  # one lane, so that a GPU needs one launch and not torch's thirteen
        count = max(moments[0], 1.0)
        mean = moments[1] / count
        variance = moments[2] / count - mean * mean
        std = math.sqrt(0.0 if variance < 0.0 else variance)
        excess = std / settings[VF_ERROR_BOUND]
        excess = 1.0 if excess < 1.0 else excess  # NaN stays NaN
        divisor = settings[MIN_ADVANTAGE_STD] if std < settings[MIN_ADVANTAGE_STD] else std
        settings[ADVANTAGE_MEAN], settings[ADVANTAGE_SCALE] = mean, 1.0 / (divisor + 1e-8)
        settings[ROW_SCALE] = 1.0 / count
        settings[VALUE_SCALE] = settings[VF_COEF] / (excess * math.sqrt(excess))


def normalisation(moments, settings):
    """Write what normalises a minibatch's losses into settings.

    moments: masked_moments' (count, sum, squares). The first four of settings (LOSS_SETTINGS,)
    become the mean, 1/(max(std, min_advantage_std) + 1e-8), 1/count and
    vf_coef / max(1, std / vf_error_bound)^1.5. An advantage is the value target minus the old
    value, so std is also that of the value errors.
    """
    run(_normalisation, 1, 1, *check_arrays(
        "normalisation", moments=(moments, (3,), f64),
        settings=(settings, (len(LOSS_SETTINGS),), f32)))


@cell
def ppo_cell(logprob, old_logprob, scaled_advantage, clip_coef):
    """Return (loss, d loss/d logprob, ratio, logratio) of the clipped objective.

    Schulman et al. 2017, eq. 7. Outside ±20 the log-ratio is clamped and its gradient is zero.
    """
    raw_logratio = logprob - old_logprob
    logratio = f32(20) if raw_logratio > f32(20) else raw_logratio
    logratio = f32(-20) if logratio < f32(-20) else logratio
    ratio = exp_cell(logratio)
    clipped = ONE + clip_coef if ratio > ONE + clip_coef else ratio
    clipped = ONE - clip_coef if clipped < ONE - clip_coef else clipped
    unclipped_loss, clipped_loss = -scaled_advantage * ratio, -scaled_advantage * clipped
    is_clamped = raw_logratio > f32(20) or raw_logratio < f32(-20)
    if clipped_loss > unclipped_loss:
        return clipped_loss, ZERO, ratio, logratio
    return unclipped_loss, (ZERO if is_clamped else unclipped_loss), ratio, logratio


@cell
def value_cell(value, old_value, target, vf_clip_coef):
    """Return (loss, d loss/d value) of the clipped value loss.

    ½ max((v-R)², (V + clip(v-V) - R)²) (Schulman's PPO2), with the value v, the old value V and
    the target R.
    """
    change = value - old_value
    clipped = vf_clip_coef if change > vf_clip_coef else change
    clipped = -vf_clip_coef if clipped < -vf_clip_coef else clipped
    error, clipped_error = value - target, old_value + clipped - target
    if clipped_error * clipped_error > error * error:
        return HALF * clipped_error * clipped_error, (clipped_error if clipped == change else ZERO)
    return HALF * error * error, error


@cell
def objective_cell(logprob, old_logprob, value, old_value, advantage, weight, settings):
    """Return the losses of one step and their derivatives.

    (policy loss, value loss, ratio, log-ratio, d loss/d logprob, d loss/d value). The losses are of
    this step, without coefficients. The derivatives are of the minibatch's whole loss: with the
    coefficients, divided by its number of valid steps.
    """
    scaled_advantage = weight * (advantage - settings[ADVANTAGE_MEAN]) * settings[ADVANTAGE_SCALE]
    policy, dlogprob, ratio, logratio = ppo_cell(logprob, old_logprob, scaled_advantage,
                                                 settings[CLIP_COEF])
    value_loss, dvalue = value_cell(value, old_value, advantage + old_value, settings[VF_CLIP_COEF])
    scale = settings[ROW_SCALE]
    return (policy, value_loss, ratio, logratio, scale * dlogprob,
            scale * settings[VALUE_SCALE] * dvalue)


@cell
def statistics_cell(sums, policy, value_loss, entropy, ratio, logratio, clip_coef, target,
                    residual):
    """Add the statistics of one step to `sums` (LOSS_SUMS,)."""
    sums[POLICY_LOSS] += policy
    sums[VALUE_LOSS] += value_loss
    sums[ENTROPY] += entropy
    sums[OLD_APPROX_KL] -= logratio
    sums[APPROX_KL] += ratio - ONE - logratio
    sums[CLIPFRAC] += ONE if abs(ratio - ONE) > clip_coef else ZERO
    sums[IMPORTANCE] += ratio
    sums[RETURN] += target
    sums[RETURN_SQUARED] += target * target
    sums[RESIDUAL] += residual
    sums[RESIDUAL_SQUARED] += residual * residual
    sums[VALID] += ONE


@cell
def entropy_cell(p, log_p):
    """Return -p log p, the share of one choice in its head's entropy; 0 if p is 0."""
    return ZERO if p == ZERO else -p * log_p


@cell
def entropy_grad_cell(p, log_p, entropy):
    """Return - d entropy/d logit of a choice."""
    return ZERO if p == ZERO else p * (log_p + entropy)


@cell
def logit_grad_cell(logit, p, log_p, entropy, is_chosen, dlogprob, settings):
    """Return d loss/d logit of a choice, from d loss/d logprob.

    d logprob/d logit = [is_chosen] - p. Every loss of discrete actions calls this. A further term
    of the logits adds its derivative here, times settings[ROW_SCALE]; `logit` is an argument for
    such terms. log_p and entropy are of the choice's head.
    """
    ent_coef = settings[ENT_COEF] * settings[ROW_SCALE]
    return (ent_coef * entropy_grad_cell(p, log_p, entropy)
            + dlogprob * ((ONE if is_chosen else ZERO) - p))


@distinct_driver
def _head_rows(log_p, p, top, total, entropy):
    """Turn logits into log-probabilities, in place, and probabilities.

    log_p (choices, T): logits, -inf where forbidden. p (choices, T), entropy (T,) are written; top
    and total (T,) are scratch. The innermost axis is the steps, so that every loop vectorises.
    """
    steps, choices = len(top), len(log_p)
    for t in range(steps):
        top[t], total[t], entropy[t] = log_p[0, t], ZERO, ZERO
    for j in range(1, choices):
        row = log_p[j]
        for t in range(steps):
            top[t] = top[t] if row[t] <= top[t] else row[t]
    for j in range(choices):
        row, chance = log_p[j], p[j]
        for t in range(steps):
            x = row[t] - top[t]
            e = exp_cell(x)
            row[t], chance[t] = x, e
            total[t] += e
    for t in range(steps):
        top[t] = log_cell(total[t]) + (total[t] - total[t])  # NaN stays NaN
        total[t] = ONE / total[t]
    for j in range(choices):
        row, chance = log_p[j], p[j]
        for t in range(steps):
            chance[t] *= total[t]
            row[t] -= top[t]
            entropy[t] += entropy_cell(chance[t], row[t])


@distinct_driver
def _logit_grad_rows(outputs, m, first, log_p, p, entropy, action, dlogprob, settings):
    """Turn the log-probabilities (choices, T) of one head into d loss/d logit.

    The head's logits are outputs[:, m, first:].
    """
    for j in range(len(log_p)):
        row, chance = log_p[j], p[j]
        for t in range(len(action)):
            row[t] = logit_grad_cell(outputs[t, m, first + j], chance[t], row[t], entropy[t],
                                     action[t] == f32(j), dlogprob[t], settings)


@distinct_driver
def _objective_rows(logprob, old_logprob, value, old_value, advantage, weight, settings, policy,
                    value_loss, ratio, logratio, dlogprob, dvalue):
    """Compute objective_cell for the steps of a segment."""
    for t in range(len(logprob)):
        policy[t], value_loss[t], ratio[t], logratio[t], dlogprob[t], dvalue[t] = objective_cell(
            logprob[t], old_logprob[t], value[t], old_value[t], advantage[t], weight, settings)


# Scratch numbers per step for the loss of discrete actions, besides two per choice and one per head
# (heads are no more than choices).
LOSS_ROWS = 14


@driver
def _ppo_loss_discrete_lanes(begin, end, outputs, index, start, has_masks, masks, heads, actions,
                             logprobs, values, advantages, weights, valid, settings, grad,
                             new_values, ratios, parts, work):
    T, _, width = outputs.shape
    choices, clip_coef = width - 1, settings[CLIP_COEF]
    rows, log_p = work[begin, :LOSS_ROWS], work[begin, LOSS_ROWS : LOSS_ROWS + choices]
    p = work[begin, LOSS_ROWS + choices : LOSS_ROWS + 2 * choices]
    entropies = work[begin, LOSS_ROWS + 2 * choices :]
    # Row by row: numba does not know the stride of unpacked rows, and then no loop vectorises.
    logprob, old_logprob, value, old_value, advantage = rows[0], rows[1], rows[2], rows[3], rows[4]
    policy, value_loss, ratio, logratio = rows[5], rows[6], rows[7], rows[8]
    dlogprob, dvalue = rows[9], rows[10]
    top, total, action = rows[11], rows[12], rows[13]
    for m in range(begin, end):
        n, column = index[start + m], start + m
        for t in range(T):  # a contiguous copy: in memory all agents lie between two steps
            value[t], old_value[t] = outputs[t, m, choices], values[t, n]
            advantage[t] = advantages[t, n]
            old_logprob[t], logprob[t] = logprobs[t, n], ZERO
            for j in range(choices):
                log_p[j, t] = -np.inf if has_masks and masks[t, n, j] == 0 else outputs[t, m, j]
        first = 0
        for head in range(len(heads)):
            last = first + heads[head]
            _head_rows(log_p[first:last], p[first:last], top, total, entropies[head])
            for t in range(T):
                logprob[t] += log_p[first + actions[t, n, head], t]
            first = last
        _objective_rows(logprob, old_logprob, value, old_value, advantage, weights[column],
                        settings, policy, value_loss, ratio, logratio, dlogprob, dvalue)
        first = 0
        for head in range(len(heads)):
            last = first + heads[head]
            for t in range(T):
                action[t] = f32(actions[t, n, head])
            _logit_grad_rows(outputs, m, first, log_p[first:last], p[first:last], entropies[head],
                             action, dlogprob, settings)
            first = last
        for t in range(T):
            is_valid = valid[t, n] != 0
            for j in range(choices):
                grad[t, m, j] = log_p[j, t] if is_valid else ZERO
            grad[t, m, choices] = dvalue[t] if is_valid else ZERO
            new_values[t, column] = value[t] if is_valid else old_value[t]
            ratios[t, column] = ratio[t] if is_valid else ONE
            if is_valid:
                entropy, target = ZERO, advantage[t] + old_value[t]
                for head in range(len(heads)):
                    entropy += entropies[head, t]
                statistics_cell(parts[m], policy[t], value_loss[t], entropy, ratio[t], logratio[t],
                                clip_coef, target, target - value[t])


@cell
def gaussian_cell(u, mean, log_std, log_slope):
    """Return (-log p, entropy) of one dimension.

    log_slope: log da/du if a tanh squashes u, else 0.
    """
    z = (u - mean) * exp_cell(-log_std)
    return (HALF * z * z + log_std + LOG_SQRT_2PI + log_slope,
            log_std + HALF + LOG_SQRT_2PI + log_slope)


@cell
def gaussian_grad_cell(u, mean, log_std, squashed, dlogprob, settings):
    """Return the derivatives of a loss by (mean, log_std).

    The loss is dlogprob · log p - ent_coef · entropy. squashed: tanh u if a tanh squashes u, else
    0. Every loss of continuous actions calls this: further terms of the means add their derivative
    here, times settings[ROW_SCALE].
    """
    ent_coef = settings[ENT_COEF] * settings[ROW_SCALE]
    inverse, entropy_pull = exp_cell(-log_std), ent_coef * f32(2) * squashed
    z = (u - mean) * inverse
    return (dlogprob * z * inverse + entropy_pull,
            dlogprob * (z * z - ONE) - ent_coef + entropy_pull * (u - mean))


@driver
def _ppo_loss_continuous(begin, end, outputs, index, start, log_std, squash, actions, logprobs,
                         values, advantages, weights, valid, settings, grad, grad_log_std,
                         new_values, ratios, parts):
    (_, M, width), is_squashed = outputs.shape, squash[1, 0] != ZERO
    clip_coef = settings[CLIP_COEF]
    for t in range(begin, end):
        for m in range(M):
            n, column = index[start + m], start + m
            row, grad_row = outputs[t, m], grad[t, m]
            log_std_row, grad_log_std_row = log_std[t, m], grad_log_std[t, m]
            value = row[width - 1]
            new_values[t, column] = value
            if valid[t, n] == 0:
                new_values[t, column] = values[t, n]
                grad_row[:] = ZERO
                grad_log_std_row[:] = ZERO
                ratios[t, column] = ONE
                continue
            logprob, entropy = ZERO, ZERO
            for j in range(width - 1):
                log_slope = squash[2, j] + squash_cell(actions[t, n, j],
                                                       squash[1, j])[1] if is_squashed else ZERO
                neg_logprob, dim_entropy = gaussian_cell(actions[t, n, j], row[j], log_std_row[j],
                                                         log_slope)
                logprob -= neg_logprob
                entropy += dim_entropy
            target = advantages[t, n] + values[t, n]
            policy, value_loss, ratio, logratio, dlogprob, dvalue = objective_cell(
                logprob, logprobs[t, n], value, values[t, n], advantages[t, n], weights[column],
                settings)
            for j in range(width - 1):
                squashed = squash_cell(actions[t, n, j], squash[1, j])[0] if is_squashed else ZERO
                grad_row[j], grad_log_std_row[j] = gaussian_grad_cell(
                    actions[t, n, j], row[j], log_std_row[j], squashed, dlogprob, settings)
            grad_row[width - 1] = dvalue
            ratios[t, column] = ratio
            statistics_cell(parts[t], policy, value_loss, entropy, ratio, logratio, clip_coef,
                            target, target - value)


def ppo_loss(outputs, actions, logprobs, values, advantages, weights, valid, settings, grad,
             new_values, ratios, sums, *, heads=None, log_std=None, grad_log_std=None, squash=None,
             masks=None, index=None, start=0):
    """Compute the clipped PPO loss of M segments, its gradient and its statistics.

    outputs, grad (T, M, A + 1): logits or means, then the value; grad is written with d loss/d
    outputs. The chunk is segments start to start + M of a minibatch of B, which are the columns
    `index` (B,) int64 of the rollout's arrays: actions (T, N, heads) int32 or (T, N, A) float32;
    logprobs (T, N); values (>= T, N) and advantages (T, N) as the rollout or the last write_back
    left them; valid (>= T, N) uint8; masks (>= T, N, A) uint8 or None. Of the minibatch: weights
    (B,); settings (LOSS_SETTINGS,) float32, `row_scale` = 1/(valid steps in the minibatch).
    Written: new_values, ratios (T, B), and for continuous actions, with log_std (A,) or (T, M, A),
    grad_log_std (T, M, A). Added to: sums (LOSS_SUMS,) float64.

        policy: mean max(-A'·ratio, -A'·clip(ratio, 1 ± clip_coef)),
                A' = weight · (A - advantage_mean) · advantage_scale
        value:  ½ mean max((v-R)², (V + clip(v-V, ± vf_clip_coef) - R)²),  R = A + V
        total = policy + value_scale · value - ent_coef · entropy  (see `normalisation`)

    With `squash` (3, A) the actions are the samples u = mean + std·z of `sample`. The entropy then
    has no closed form: it is the Gaussian's plus log da/du at these u, and its gradient is that
    for a fixed z. Raises ValueError or TypeError for a wrong shape or dtype.
    """
    (T, M, width), N, B = outputs.shape, logprobs.shape[1], weights.shape[0]
    is_discrete, is_squashed, like = heads is not None, squash is not None, outputs
    is_wide = log_std is not None and log_std.dim() > 1
    count, shape = heads.shape[0] if is_discrete else width - 1, (T, M, width - 1)
    index = all_columns(N, outputs) if index is None else index
    has_masks, masks = optional_masks(masks, like, 3)
    outputs, index, masks, heads, squash, _, *rollout, grad, grad_log_std, new, ratios, sums_array = (
        check_arrays(
            "ppo_loss", outputs=(outputs, (T, M, width), f32),
            index=(index, (-(start + M),), i64),
            masks=(masks, (-T, N, width - 1) if has_masks else (1, 1, 1), u8),
            heads=(heads, (count,), i64),
            squash=(optional_squash(squash, like), (3, width - 1 if is_squashed else 1), f32),
            log_std=(log_std, shape if is_wide else shape[-1:], f32),
            actions=(actions, (T, N, count), i32 if is_discrete else f32),
            logprobs=(logprobs, (T, N), f32), values=(values, (-T, N), f32),
            advantages=(advantages, (T, N), f32), weights=(weights, (-(start + M),), f32),
            valid=(valid, (-T, N), u8), settings=(settings, (len(LOSS_SETTINGS),), f32),
            grad=(grad, (T, M, width), f32), grad_log_std=(grad_log_std, shape, f32),
            new_values=(new_values, (T, B), f32), ratios=(ratios, (T, B), f32),
            sums=(sums, (SUMS,), f64)))
    if is_discrete:
        name, numbers = "ppo_loss_discrete", (count, has_masks)
        arrays = masks, heads, *rollout, grad, new, ratios
    else:
        name, numbers = "ppo_loss_continuous", (width - 1 if is_wide else 0, squash.shape[1])
        arrays = (expand_log_std(log_std, shape), squash, *rollout, grad, grad_log_std, new, ratios)
    if on_gpu(like):
        _launch_sum(name, T * M, SUMS, like, (T, M, N, B, width, start, *numbers), (sums_array,),
                    outputs, index, *arrays)
        return
    parts = np.zeros((M if is_discrete else T, SUMS))
    if is_discrete:
        work = np.empty((M, LOSS_ROWS + 3 * (width - 1), T), np.float32)  # a thread uses one of M
        run(_ppo_loss_discrete_lanes, M, 16 * T * width, outputs, index, start, has_masks, *arrays,
            parts, work)
    else:
        run(_ppo_loss_continuous, T, 30 * M * width, outputs, index, start, *arrays, parts)
    sums += torch.as_tensor(parts.sum(0))


def add_bias_gradients(pairs, accumulate=True):
    """Add the sum of rows to a bias's gradient, for each pair (rows, gradient).

    rows (n, columns), floats; gradient (columns,). Without accumulate the sum replaces the
    gradient. On a GPU all pairs are one launch.
    """
    table, blocks, parts, like = [], 0, 0, None
    for rows, gradient in pairs:
        n, columns = rows.shape
        if not on_gpu(rows):
            total = rows.sum(0, dtype=gradient.dtype)
            gradient.copy_(gradient + total if accumulate else total)
            continue
        check_arrays("add_bias_gradients", rows=(rows, (n, columns), FLOATS),
                     gradient=(gradient, (columns,), f32))
        side_by_side = 256 // min(columns, 256)
        # the last block then has as much to add up
        chunk = -(-max(math.isqrt(n), 1) // side_by_side) * side_by_side
        pieces = max(1, -(-n // chunk))
        is_half = rows.dtype == torch.bfloat16
        table.append((rows.data_ptr(), is_half, n, columns, chunk, blocks, parts,
                      gradient.data_ptr()))
        blocks, parts, like = blocks + -(-columns // 256) * pieces, parts + pieces * columns, rows
    if table:
        addresses = constant(("add_bias_gradients", *table), like,
                             lambda: torch.tensor(table, dtype=torch.int64).view(-1))
        CUDA.launch("add_bias_gradients", blocks, 256, len(table), as_array(addresses), accumulate,
                    *_sums_of_blocks(like, parts, len(table)))


def loss_statistics(sums):
    """Return the logged means of LOSS_SUMS as a dict of floats.

    sums: added over all chunks of one or more minibatches.
    """
    mean = {name: float(total) / max(float(sums[VALID]), 1.0) for name,
            total in zip(LOSS_SUMS, sums, strict=True)}
    returns = max(mean["return_squared"] - mean["return"] ** 2, 0.0)
    residuals = max(mean["residual_squared"] - mean["residual"] ** 2, 0.0)
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac",
             "importance")
    explained = 1.0 - residuals / returns if returns > 0 else math.nan
    return {**{name: mean[name] for name in names}, "explained_variance": explained}


@driver
def _write_back(begin, end, size, index, new_values, new_ratios, counter, values, ratios):
    M = len(index)
    if begin == 0:
        counter[1] += 1
    for lane in range(begin, end):
        t, first = lane * size // M, lane * size % M
        for m in range(first, first + size):
            values[t, index[m]] = new_values[t, m]
            ratios[t, index[m]] = new_ratios[t, m]


def write_back(index, new_values, new_ratios, counter, values, ratios):
    """Write a minibatch's new values and ratios into the rollout.

    values[t, index[m]] = new_values[t, m], and the same for the ratios; index (M,) int64, new_* (T,
    M), values (T+1, N) (row T is not written), ratios (T, N). A segment that is drawn twice has
    equal columns. As the last one to use the counter it adds 1 to counter[1]; counter (2,) int64 is
    (epoch, minibatch).
    """
    (T, N), M = ratios.shape, index.shape[0]
    lanes, size = (T * M, 1) if on_gpu(ratios) else (T, M)  # a CPU's lane is a row
    run(_write_back, lanes, 2 * M, size, *check_arrays(
        "write_back", index=(index, (M,), i64), new_values=(new_values, (T, M), f32),
        new_ratios=(new_ratios, (T, M), f32), counter=(counter, (2,), i64),
        values=(values, (T + 1, N), f32), ratios=(ratios, (T, N), f32)))


# --------------------------------------------------------------------------------------------------
# Optimizer (optim.py): the gradients' norm, momentum, and the step, on the arena's flat ranges

BLOCK = 4096
SCALE, MOMENTUM, DECAY, RATE = range(4)  # places in `scalars`; gradients are clipped by SCALE


@reduction_driver
def _squares_lanes(begin, end, flat, block_sums):
    for block in range(begin, end):
        total, block_values = 0.0, flat[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(block_values)):
            total += np.float64(block_values[i]) * np.float64(block_values[i])
        block_sums[block] = total


@cell
def nesterov_cell(gradient, momentum_buffer, momentum):
    """Return (new buffer m', update u): m' = mu·m + g, u = g + mu·m'."""
    buffer = momentum * momentum_buffer + gradient
    return buffer, gradient + momentum * buffer


# A GPU multiplies small matrices in a padded copy, `work`: places[i] is the place there of element
# i of the flat update, negative if it stays in `updates`. On a CPU places is None, and numba leaves
# out the code that reads it.


@driver
def _nesterov_lanes(begin, end, gradients, buffers, updates, scalars, places, work):
    scale, momentum = scalars[SCALE], scalars[MOMENTUM]
    if scale == scale:  # not NaN, which is the scale of a gradient that is not finite
        g, m, u = gradients[begin:end], buffers[begin:end], updates[begin:end]
        for i in range(len(g)):
            m[i], update = nesterov_cell(g[i] * scale, m[i], momentum)
            if places is None or places[begin + i] < 0:
                u[i] = update
            else:
                work[places[begin + i]] = update


@driver
def _apply_lanes(begin, end, weights, updates, scalars, places, scales, work):
    scale, decay, learning_rate = scalars[SCALE], scalars[DECAY], scalars[RATE]
    if scale == scale:
        w, u = weights[begin:end], updates[begin:end]
        for i in range(len(w)):
            update = u[i]
            if places is not None and places[begin + i] >= 0:
                update = work[places[begin + i]] * scales[begin + i]
            w[i] = w[i] * decay - learning_rate * update


CREW = 256  # threads of a block of policy_step and newton_schulz
STRIP, ACROSS = 16, 32  # rows and columns of a tile of newton_schulz


def gradient_norm(flat):
    """Return the Euclidean norm of a flat float32 range.

    On a CPU a float, summed in float64 by fixed blocks in block order; on a GPU a float64 tensor.
    """
    array, = check_arrays("gradient_norm", flat=(flat, tuple(flat.shape), f32))
    if on_gpu(flat):
        norm = torch.empty((), dtype=torch.float64, device=flat.device)
        _launch_sum("gradient_norm", -(-len(array) // 8), 1, flat, (len(array),),
                    (as_array(norm.view(1)),), array)
        return norm
    block_sums = np.zeros(-(-len(array) // BLOCK))
    run(_squares_lanes, len(block_sums), BLOCK // 5, array, block_sums)
    return math.sqrt(block_sums.sum())
