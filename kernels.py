"""Fused kernels over one preallocated arena: everything in PPO that is not a matrix product.

    from kernels import Arena, advantage, mingru_scan, ppo_loss
    python -m pytest tests/test_kernels.py        # every kernel against its float64 reference
    python bench/bench_kernels.py                 # nanoseconds an element, and a plain copy's

Read from top to bottom: scalar mathematics, then the kernels in the order in which an epoch meets
them (sample, advantage, priorities, gather, MinGRU, loss, and what optim.py needs). A kernel has these parts:

    *_cell      the mathematics of one element, on float32 scalars; its formula stands nowhere else (but two that a CPU
                takes for many agents or steps at once: `_choose_rows` and `_head_rows`)
    _*_lanes    the driver: a numba loop, without the GIL, over a range of lanes (agents, segments or steps), the
                contiguous axis innermost so that it vectorises. What it works with is given to it: if it makes an
                array, numba says "NRT required but not enabled". A GPU runs it if it has none of the next two
    _*_cuda     the driver for a GPU: each of its threads has one lane, and neighbouring lanes are neighbours in memory
    kernels.cu  C++ for a GPU in place of the driver; the cells that it names are translated to C for it (fast/cuda_cpp)
    the public function: checks shapes and types and hands the arrays to the driver for the tensors' device. On a CPU
                it uses as many threads as `with kernels.threads(n)` allows the caller (1 by default, because the
                trainer's workers already run side by side), on a GPU torch's current stream

To change a formula, edit its cell, its reference in tests/reference.py, and ppo.py; to add a kernel, copy `advantage`.

All data is time-major, (T, N, ...): T the horizon, N agents. float32 unless a docstring says otherwise; flags are
uint8. An array that a docstring calls floats may be bfloat16 too; the mathematics is in float32 all the same. Every
constant in a cell is a np.float32, because one bare literal would make a whole loop compute in float64.
"""

import functools  # noqa: I001  (the names of arena on few lines)
import math

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from fast import cuda_cpp
from arena import (  # noqa: F401  (others import these names from kernels)
    FLOATS, HALF, INT0, ONE, ZERO, Arena, ask_ahead, cell, check_heads, check_index, check_log_std, check_numbers,
    check_rows, check_sizes, check_squash, checked, constant, device, distinct_driver, driver, f32, host, i32,
    numpy_dtype, on_gpu, optional_masks, reduction_driver, run, set_threads, threads, u16, u32, u64, unwatched,
)

CUDA = cuda_cpp.Module("kernels.cu", globals())  # the GPU kernels that are written in C++

# --------------------------------------------------------------------------------------------------
# Scalar mathematics


@njit(error_model="numpy")
def power_of_two(shifted):
    """2^k from k + 1.5·2^23, by moving k's bits into the exponent."""
    return i32(i32(f32(shifted).view(i32) + i32(127)) << i32(23)).view(f32)


@cell
def exp_cell(x):
    """e^x within 1e-7 relative: 2^k · p(r), p of degree 6 (constants of Cephes' expf, Moshier
    1992), and 0 below -87. NaN stays NaN."""
    x = f32(88.0) if x > f32(88.0) else x
    under = x < f32(-87.0)
    x = f32(-87.0) if under else x
    shifted = x * f32(1.44269504) + f32(12582912.0)  # adding 1.5·2^23 rounds to an integer k, left in the low bits
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
    return u32(u32(bits) << u32(16)).view(f32)


@njit(error_model="numpy")
def bfloat_of_float(x):
    """Rounded to the nearest, halves away from zero; NaN stays NaN. (To round halves to even takes
    five operations, not two, and made the loops a seventh slower.)"""
    bits = f32(x).view(u32)
    return u16((bits | u32(0x00400000) if x != x else u32(bits + u32(0x8000))) >> u32(16))


def widen(x):
    """A number read from an array, as a float32 if the array holds bfloat16."""
    return float_of_bfloat(x) if isinstance(x, u16) else x


def narrow(x, array):
    """A number to be written into an array, as bfloat16 if the array holds that."""
    return bfloat_of_float(x) if array.dtype == u16 else x


@overload(widen)
def _widen(x):
    return (lambda x: float_of_bfloat(x)) if x == types.uint16 else (lambda x: x)


@overload(narrow)
def _narrow(x, array):
    return (lambda x, array: bfloat_of_float(x)) if array.dtype == types.uint16 else (lambda x, array: x)


SIGMOID_END = f32(16.02)  # above this the sigmoid is 1 in float32


@cell
def half_tanh_cell(x):
    """½ tanh(x / 2) by the rational minimax approximation of Eigen's ptanh: numerator and denominator are
    worked out side by side, which makes a MinGRU scan a fifth faster than e^-x does."""
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
    """1/(1 + e^-x) within 2e-7. NaN stays NaN."""
    return half_tanh_cell(x) + HALF


@cell
def tanh_cell(x):
    """tanh x within 4e-7; the relative error is below 3e-7 for |x| < 1. NaN stays NaN."""
    return f32(2.0) * half_tanh_cell(f32(2.0) * x)


@njit(error_model="numpy")
def exponent_and_mantissa(x):
    """(k, m) as floats with x = m · 2^k, m within sqrt(½) and sqrt(2); x normal and above 0."""
    bits = f32(x).view(i32) - i32(0x3F3504F3)
    k = bits >> i32(23)
    return f32(k), i32((bits & i32(0x7FFFFF)) + i32(0x3F3504F3)).view(f32)


@cell
def log_cell(x):
    """log x within 1e-7 relative, x normal and above 0 (constants of Cephes' logf, Moshier 1992)."""
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
    """cos(2 pi u) within 1e-6 for u in [0, 1): minus the sine's Taylor series, at most a quarter turn from its zero."""
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
    """Philox4x32-10 (Salmon et al. 2011): four random 32-bit words from a counter and a key."""
    for _ in range(10):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = u32((u64(k0) + u64(0x9E3779B9)) & u64(0xFFFFFFFF))
        k1 = u32((u64(k1) + u64(0xBB67AE85)) & u64(0xFFFFFFFF))
    return c0, c1, c2, c3


@cell
def uniform_cell(word):
    """A float32 in [0, 1) from the upper 24 bits of a word."""
    return f32(word >> u32(8)) * f32(5.9604644775390625e-08)


# What a random word is for: the last word of its Philox counter. An exact resume rests on these counters (runs.py).
PURPOSE_ACTION, PURPOSE_DRAW = u32(1), u32(2)


# --------------------------------------------------------------------------------------------------
# Sample: logits -> actions and their log-probabilities


@cell
def head_max_cell(row, mask, masked, first, last):
    top = -f32(np.inf)
    for j in range(first, last):
        if not (masked and mask[j] == 0) and not (row[j] <= top):  # also true if NaN
            top = row[j]
    return top


@cell
def action_words_cell(seed, step, agent, part):
    """The random words of one part of an agent's action: a head, or a dimension."""
    return philox_cell(u32(agent), u32(step & u64(0xFFFFFFFF)), u32((step >> u64(32)) << u64(16)) | u32(part),
                       PURPOSE_ACTION, u32(seed & u64(0xFFFFFFFF)), u32(seed >> u64(32)))


@cell
def choose_cell(row, mask, masked, first, last, uniform, deterministic):
    """(action, its log-probability) of the head with the logits row[first:last], by a number in [0, 1), or the most
    likely one, for a GPU. `_choose_rows` is the same for a CPU: edit both. Equal logits give equal actions on every
    device: compilers may fuse a product and a sum, and here each product goes into one sum only, so that all of them
    fuse the same."""
    top, total = head_max_cell(row, mask, masked, first, last), ZERO
    for j in range(first, last):
        if not (masked and mask[j] == 0):
            total += exp_cell(row[j] - top)
    choice, running, target = first, ZERO, uniform * total
    for j in range(first, last):
        if masked and mask[j] == 0:
            continue
        choice = j  # the last allowed action stays if rounding, or a NaN, leaves the target beyond all
        running += exp_cell(row[j] - top)
        if row[j] == top if deterministic else running > target:
            break
    return choice - first, row[choice] - top - f32(math.log(total))


@driver
def _sample_discrete_cuda(begin, end, logits, masked, masks, heads, seed, first_agent, counter, deterministic, actions,
                          logprobs, values):
    width, step = logits.shape[1], u64(counter[0])
    for i in range(begin, end):
        row, mask = logits[i], masks[i if masked else 0]
        logprob, first = ZERO, 0
        for head in range(len(heads)):
            word, _, _, _ = action_words_cell(seed, step, first_agent + i, head)
            last = first + heads[head]
            actions[i, head], chosen = choose_cell(row, mask, masked, first, last, uniform_cell(word), deterministic)
            logprob += chosen
            first = last
        logprobs[i] = logprob
        values[i] = row[width - 1]


# CHOICE_ROWS: numbers that the choice needs for each agent, besides two for each logit. CHOOSING: agents that choose
# together.
CHOICE_ROWS, CHOOSING = 5, 64


@distinct_driver
def _uniform_rows(uniform, seed, step, first_agent, head):
    for i in range(len(uniform)):
        word, _, _, _ = action_words_cell(seed, step, first_agent + u64(i), head)
        uniform[i] = uniform_cell(word)


@distinct_driver
def _choose_rows(logits, powers, uniform, top, total, log_total, choice, deterministic):
    """choose_cell for n agents: logits (choices, n), -inf if forbidden. `choice` becomes how many choices come before
    the chosen one: all of them if there is none, because of a NaN or because all logits are -inf. The innermost axis is
    the agents, so that every loop vectorises."""
    agents = len(top)
    for i in range(agents):
        top[i], total[i], choice[i] = logits[0, i], ZERO, ZERO
    for j in range(1, len(logits)):
        row = logits[j]
        for i in range(agents):
            top[i] = top[i] if row[i] <= top[i] else row[i]
    for j in range(len(logits)):
        row, power = logits[j], powers[j]
        for i in range(agents):
            e, likeliest = exp_cell(row[i] - top[i]), row[i] == top[i] and top[i] > -f32(np.inf)
            power[i] = (ONE if likeliest else ZERO) if deterministic else e
            total[i] += e
    for i in range(agents):
        log_total[i] = log_cell(total[i]) + (total[i] - total[i])  # NaN stays NaN
        uniform[i] = ZERO if deterministic else uniform[i] * total[i]
        total[i] = ZERO
    for j in range(len(logits)):
        power = powers[j]
        for i in range(agents):
            total[i] += power[i]
            choice[i] += ZERO if total[i] > uniform[i] else ONE


@driver
def _sample_discrete_lanes(begin, end, logits, masked, masks, heads, seed, first_agent, counter, deterministic, actions,
                           logprobs, values, work):
    choices, step = logits.shape[1] - 1, u64(counter[0])
    for block in range(begin, end, CHOOSING):
        n = min(end - block, CHOOSING)
        rows = work[begin : begin + n].reshape(CHOICE_ROWS + 2 * choices, n)  # begin: each thread uses its own
        copied, powers = rows[CHOICE_ROWS : CHOICE_ROWS + choices], rows[CHOICE_ROWS + choices :]
        uniform, top, total, log_total, choice = rows[0], rows[1], rows[2], rows[3], rows[4]
        for i in range(n):
            logprobs[block + i], values[block + i] = ZERO, logits[block + i, choices]
            for j in range(choices):
                copied[j, i] = -f32(np.inf) if masked and masks[block + i, j] == 0 else logits[block + i, j]
        first = 0
        for head in range(len(heads)):
            last = first + heads[head]
            of_head = copied[first:last]
            _uniform_rows(uniform, seed, step, u64(first_agent) + u64(block), head)
            _choose_rows(of_head, powers[first:last], uniform, top, total, log_total, choice, deterministic)
            for i in range(n):
                chosen = int(choice[i])
                if chosen == last - first:  # there is none: the last allowed one
                    chosen -= 1
                    while chosen > 0 and masked and masks[block + i, first + chosen] == 0:
                        chosen -= 1
                actions[block + i, head] = chosen
                logprobs[block + i] += of_head[chosen, i] - top[i] - log_total[i]
            first = last


LOG_SQRT_2PI = f32(0.91893853320467274178)


@cell
def squash_cell(u, half):
    """(tanh u, log(1 - tanh² u)) without overflow; 1 - tanh² u itself would lose digits near 0. Zeros unless half is
    above 0 (the second row of models.squash): such a number is start - half · u."""
    x = abs(u)
    e = exp_cell(f32(-2) * x)
    size = (ONE - e) / (ONE + e)
    inside = -size if u < ZERO else size
    log_slope = f32(2) * (f32(0.69314718056) - x - log_cell(ONE + e))
    return (inside if half > ZERO else ZERO), (log_slope if half > ZERO else ZERO)


@cell
def gaussian_draw_cell(mean, log_std, a, b, deterministic):
    """(u, -log p(u)) by two random words (Box and Muller 1958), or the mean."""
    radius = f32(math.sqrt(f32(-2.0) * log_cell(ONE - uniform_cell(a))))
    noise = ZERO if deterministic else radius * cos_turn_cell(uniform_cell(b))
    return mean + exp_cell(log_std) * noise, HALF * noise * noise + log_std + LOG_SQRT_2PI


@driver
def _sample_continuous_lanes(begin, end, means, log_std, squash, seed, first_agent, counter, deterministic, samples,
                           actions, logprobs, values):
    width, step, squashed = means.shape[1], u64(counter[0]), squash[1, 0] != ZERO
    for i in range(begin, end):
        logprob = ZERO
        for j in range(width - 1):
            a, b, _, _ = action_words_cell(seed, step, first_agent + i, j)
            u, surprise = gaussian_draw_cell(means[i, j], log_std[i, j], a, b, deterministic)
            samples[i, j] = u  # without squash, samples is the array of actions itself
            logprob -= surprise
            if squashed:
                half = squash[1, j]
                inside, log_slope = squash_cell(u, half)
                actions[i, j] = squash[0, j] + (half * inside if half > ZERO else -half * u)
                logprob -= squash[2, j] + log_slope
        logprobs[i] = logprob
        values[i] = means[i, width - 1]


def sample(outputs, actions, logprobs, values, *, seed, step, first_agent=0, heads=None, log_std=None, masks=None,
           squash=None, samples=None, deterministic=False):
    """Draw one action an agent from the decoder's outputs.

    outputs (n, A + 1): A logits (or means), then the value. Discrete: `heads`, int64 (heads,) sizes that add up to A;
    actions (n, heads) int32; masks (n, A) uint8, 0 forbids. Continuous: `log_std` (A,) or (n, A); actions (n, A)
    float32, the unclipped sample. Written: actions, logprobs (n,) joint over heads or dimensions, values (n,).
    With `squash` (3, A) (middle, half and log half of the bounds; see models.squash) the sample u goes to `samples`
    (n, A), middle + half · tanh(u) to actions, logprobs are of these actions (Haarnoja et al. 2018, appendix C). A
    number whose half is below 0 has no tanh: its action is middle - half · u.

    Random words are Philox(key=seed, counter=(first_agent + row, step, head or dimension, PURPOSE_ACTION)): the same
    for any split of the agents over buffers, threads and devices. `step` is a number or an int64 tensor (1,), which
    a CUDA graph reads anew. `deterministic` takes the most likely action. `heads` stays on the CPU. Raises ValueError
    or TypeError for a wrong shape or dtype."""
    n, width = check_sizes("sample", "outputs", outputs, 2)
    outputs, like = checked("sample", "outputs", outputs, (n, width)), logprobs
    logprobs, values = checked("sample", "logprobs", logprobs, (n,)), checked("sample", "values", values, (n,))
    random = (u64(seed), u64(first_agent), check_numbers("sample", "step", step, 1, np.int64, like), deterministic)
    if heads is not None:
        heads = check_heads("sample", heads, check_sizes("sample", "actions", actions, 2)[1], width - 1, like)
        masks = None if masks is None else checked("sample", "masks", masks, (n, width - 1), np.uint8)
        actions = checked("sample", "actions", actions, (n, len(heads)), np.int32)
        arrays = (outputs, *optional_masks(masks, like, 2), heads, *random, actions, logprobs, values)
        if on_gpu(like):
            run(_sample_discrete_cuda, n, 1, *arrays)
        else:
            run(_sample_discrete_lanes, n, 4 * width, *arrays,
                np.empty((n, CHOICE_ROWS + 2 * (width - 1)), np.float32))
    else:
        log_std = check_log_std("sample", log_std, (n, width - 1))
        actions = checked("sample", "actions", actions, (n, width - 1))
        samples = actions if squash is None else checked("sample", "samples", samples, (n, width - 1))
        run(_sample_continuous_lanes, n, 12 * width, outputs, log_std, check_squash("sample", squash, width - 1, like),
            *random, samples, actions, logprobs, values)


# --------------------------------------------------------------------------------------------------
# Advantage: GAE with V-trace weights


@cell
def advantage_cell(value, reward, done, cut, truncated_value, ratio, valid, next_advantage, next_value, follows,
                   mean, gamma, gae_lambda, rho_clip, c_clip, reward_clip):
    """One step back in time: (advantage, next_value, follows) to hand to the step before; GAE
    (Schulman et al. 2016, eq. 16) with the clipped importance weights of V-trace (Espeholt et al.
    2018, eq. 1). Values are relative to `mean`; `follows` is 1 if a value follows, 0 after an
    episode's end; `cut` says that truncated_value does. An invalid step passes on unchanged what
    follows it, or 0 if it ends the episode."""
    reward = reward_clip if reward > reward_clip else reward
    reward = -reward_clip if reward < -reward_clip else reward
    going = ZERO if done else ONE
    bootstrapped = ONE if cut else going * follows
    rho = rho_clip if ratio > rho_clip else ratio
    c = c_clip if ratio > c_clip else ratio
    relative = reward - mean * (ONE - gamma * bootstrapped)
    delta = rho * (relative + gamma * (going * next_value + truncated_value) - value)
    advantage = delta + gamma * gae_lambda * c * going * next_advantage
    return ((advantage if valid else going * next_advantage), (value if valid else going * next_value),
            (ONE if valid else going * follows))


def column_of(index, lane):
    """The segment of a lane: its place in `index`, or the lane itself if that is None."""
    return u64(lane) if index is None else u64(index[lane])


@overload(column_of)
def _column_of(index, lane):
    if isinstance(index, types.NoneType):
        return lambda index, lane: u64(lane)
    return lambda index, lane: u64(index[lane])


@distinct_driver
def _advantage_lanes(begin, end, index, values, rewards, terminals, truncations, bootstraps, ratios, valid, mean,
                     gamma, gae_lambda, rho_clip, c_clip, reward_clip, advantages, following):
    # all segments, or those in `index` (sorted, or None); 256 at a time, so that what follows them stays in cache
    T, size = len(rewards), 256
    for first in range(begin, end, size):
        last = min(end, first + size)
        next_advantage, next_value, follows = (following[0, first:last], following[1, first:last],
                                               following[2, first:last])
        for i in range(last - first):
            next_advantage[i], next_value[i], follows[i] = ZERO, values[T, column_of(index, first + i)], ONE
        for t in range(T - 1, -1, -1):
            for i in range(last - first):
                n = column_of(index, first + i)
                live, done = valid[t, n] != 0, (terminals[t, n] | truncations[t, n]) != 0
                cut = done & (terminals[t, n] == 0)
                a, v, f = advantage_cell(
                    values[t, n], rewards[t, n], done, cut, bootstraps[t, n], ratios[t, n], live,
                    next_advantage[i], next_value[i], follows[i], mean[0], gamma, gae_lambda, rho_clip, c_clip,
                    reward_clip)
                next_advantage[i], next_value[i], follows[i] = a, v, f
                advantages[t, n] = a if live else ZERO


def advantage(values, rewards, terminals, truncations, bootstraps, ratios, valid, advantages, *, gamma, gae_lambda,
              rho_clip=1.0, c_clip=1.0, reward_clip=math.inf, index=None, mean=None):
    """Advantages of all segments, or of the columns in `index` (sorted int64 (M,)), written into `advantages`.

    values (T+1, N), row T bootstraps; rewards, bootstraps (V of a truncated step's final observation, else 0), ratios,
    advantages (T, N); terminals, truncations (T, N) uint8; valid (T+1, N) uint8. With n_t = 1 - done_t and
    f_t = 1 if a value follows (V_{t+1} or bootstraps_t), else 0:
        R_t = r_t - mean · (1 - gamma · f_t) + gamma · (n_t · V_{t+1} + bootstraps_t)
        delta_t = min(ratio_t, rho_clip) · (R_t - V_t)
        A_t = delta_t + gamma · gae_lambda · min(ratio_t, c_clip) · n_t · A_{t+1}
    values and bootstraps are relative to `mean`, float32 (1,) (0 by default): these are the advantages of
    mean + values (a shift as in van Hasselt et al. 2016, here without its rounding).
    An invalid step gets 0 and passes the A and V that follow it to the step before. `reward_clip`
    clamps r alone. Raises ValueError or TypeError for a wrong shape or dtype.
    """
    T, N = check_sizes("advantage", "rewards", rewards, 2)
    arrays = (
        checked("advantage", "values", values, (T + 1, N)),
        checked("advantage", "rewards", rewards, (T, N)),
        checked("advantage", "terminals", terminals, (T, N), np.uint8),
        checked("advantage", "truncations", truncations, (T, N), np.uint8),
        checked("advantage", "bootstraps", bootstraps, (T, N)),
        checked("advantage", "ratios", ratios, (T, N)),
        checked("advantage", "valid", valid, (T + 1, N), np.uint8),
        check_numbers("advantage", "mean", 0.0 if mean is None else mean, 1, np.float32, values),
        f32(gamma), f32(gae_lambda), f32(rho_clip), f32(c_clip), f32(reward_clip),
        checked("advantage", "advantages", advantages, (T, N)))
    if on_gpu(values):
        index = check_index("advantage", index, 0, 0, N, values)
        CUDA.launch("advantage", -(-len(index) // 8), 256, T, N, len(index), index, *arrays)
        return
    index = None if index is None else check_index("advantage", index, 0, 0, N, values)
    lanes = N if index is None else len(index)
    run(_advantage_lanes, lanes, (1 if index is None else 4) * T, index, *arrays, np.empty((3, lanes), np.float32))


@driver
def return_range(rewards, valid, resets, running, low, high):
    """(low, high), widened by the returns of the episodes that end within a rollout. All arrays are numpy's: rewards
    (T, N), valid and resets (T+1, N) uint8, running (N,) the returns of unfinished episodes, updated in place."""
    T, N = rewards.shape
    for t in range(T):
        for n in range(N):
            total = running[n] + rewards[t, n] * f32(valid[t, n])
            running[n] = total
            if resets[t + 1, n] != 0 and (valid[t, n] != 0 or total != ZERO):  # else it was dead all along
                low = total if total < low else low
                high = total if total > high else high
                running[n] = ZERO
    return low, high


@driver
def return_moments(rewards, valid, resets, returns, gamma, around):
    """(count, sum, sum of squares) in float64 of the discounted returns minus `around`, over the valid steps of a
    rollout on a CPU, one after the other: rewards (T, N), valid, resets (>= T, N) uint8; `returns` (N,) float64 holds
    the agents' discounted returns before the rollout, and is updated to those after it."""
    count, total, squares = 0.0, 0.0, 0.0
    for t in range(len(rewards)):
        for i in range(len(returns)):
            if resets[t, i] != 0:
                returns[i] = 0.0
            if valid[t, i] != 0:
                returns[i] = gamma * returns[i] + rewards[t, i]
                deviation = returns[i] - around
                count += 1.0
                total += deviation
                squares += deviation * deviation
    return count, total, squares


# --------------------------------------------------------------------------------------------------
# Priorities: which segments to learn from, and how much each counts


@distinct_driver
def _priorities_lanes(begin, end, advantages, valid, alpha, index, masses, work):
    size = 256  # as in _advantage_lanes
    for first in range(begin, end, size):
        last = min(end, first + size)
        columns, totals, lives = index[first:last], work[0, first:last], work[1, first:last]
        totals[:], lives[:] = 0.0, 0.0
        for t in range(len(advantages)):
            for i in range(last - first):
                n = u64(columns[i])
                live = valid[t, n] != 0
                totals[i] += np.float64(abs(advantages[t, n])) if live else 0.0
                lives[i] = 1.0 if live else lives[i]
        for i in range(last - first):
            masses[columns[i]] = totals[i]**alpha + 1e-6 if lives[i] != 0.0 else 0.0


def priorities(advantages, valid, masses, *, alpha, index=None):
    """The unnormalised priority of all segments, or of those in `index`: (sum over t of |A|)^alpha + 1e-6.

    advantages (T, N), valid (>= T, N) uint8; written: masses (N,) float64, 0 for a segment with no
    valid step. Prioritized replay, Schaul et al. 2016, eq. 1, over segments.
    """
    T, N = check_sizes("priorities", "advantages", advantages, 2)
    index = check_index("priorities", index, 0, 0, N, masses)
    arrays = (checked("priorities", "advantages", advantages, (T, N)),
              check_rows("priorities", "valid", valid, T, (N,), np.uint8), float(alpha), index,
              checked("priorities", "masses", masses, (N,), np.float64))
    if on_gpu(masses):
        CUDA.launch("priorities", -(-len(index) // 8), 256, T, N, len(index), *arrays)
    else:
        run(_priorities_lanes, len(index), T, *arrays, np.empty((2, len(index))))


@cell
def search_cell(sorted_values, value, inclusive):
    """How many of the sorted values are below `value` (or equal to it, if inclusive)."""
    low, high = 0, len(sorted_values)
    while low < high:
        middle = (low + high) // 2
        if sorted_values[middle] < value or (inclusive and sorted_values[middle] == value):
            low = middle + 1
        else:
            high = middle
    return low


@driver
def _draw_lanes(begin, end, masses, cumulative, seed, counter, beta, first, index, weights):
    key0, key1 = u32(seed & u64(0xFFFFFFFF)), u32(seed >> u64(32))
    N, M = len(cumulative), len(index)
    total = cumulative[N - 1]
    live = min(search_cell(cumulative, total, False), N - 1)  # the last segment with a mass
    begun = counter[1] * M  # draws of the minibatches before
    for m in range(begin, end):
        high, low, _, _ = philox_cell(u32(first + m), u32(counter[0]), u32(begun // N), PURPOSE_DRAW, key0, key1)
        u = (np.float64(high) * 4294967296.0 + np.float64(low)) * 2.0**-64 + (begun % N) / N
        found = min(search_cell(cumulative, (m + (u - math.floor(u))) / M * total, True), live)
        relative = N * (masses[found] / total)
        index[m] = found
        weights[m] = relative ** -np.float64(beta[0]) if relative > 0.0 else np.nan  # NaN ** 0 is 1


def draw(masses, cumulative, index, weights, *, seed, counter, beta, first=0):
    """Draw M segments, each with p_n = masses_n / sum, and their importance weights (N · p_n)^-beta.

    The masses lie side by side and are cut into M equal strata; one segment comes from each (Schaul et al.
    2016, appendix B.2.1), so `index` is sorted. Its place u in the stratum is a random number that moves on by
    M / N from minibatch to minibatch, modulo 1 (a rotation, Cranley and Patterson 1976), and is drawn anew
    after each pass, N draws. So a pass takes each segment once if all masses are equal and M divides N.

    masses, cumulative (scratch) (N,) float64; written: index (M,) int64, weights (M,) float32.
    `counter` is (epoch, minibatch), numbers or an int64 tensor (2,); beta a number or a tensor (1,).
    Random words are Philox(key=seed, counter=(first + m, epoch, minibatch · M // N, PURPOSE_DRAW)); `first`: how
    many draws other ranks make before these. Indices are within bounds, even if the masses are NaN.
    """
    N, M = check_sizes("draw", "masses", masses, 1)[0], check_sizes("draw", "index", index, 1)[0]
    arrays = (checked("draw", "masses", masses, (N,), np.float64),
              checked("draw", "cumulative", cumulative, (N,), np.float64),
              checked("draw", "index", index, (M,), np.int64))
    weights = checked("draw", "weights", weights, (M,))
    counter = check_numbers("draw", "counter", counter, 2, np.int64, masses)
    beta = check_numbers("draw", "beta", beta, 1, np.float32, masses)
    if on_gpu(masses):
        CUDA.launch("draw", 1, 1024, N, M, first, u64(seed), counter, beta, *arrays, weights)
        return
    torch.cumsum(masses, 0, out=cumulative)
    run(_draw_lanes, M, 80, *arrays[:2], u64(seed), counter, beta, first, arrays[2], weights)


# --------------------------------------------------------------------------------------------------
# Observations: their moments, and the drawn segments copied side by side and normalised

STRIDE = 8  # steps that a thread of a GPU copies, so that it looks up its column only once
OBSERVATION_CLIP = f32(10)  # standard deviations at which normalised observations are clipped


@cell
def normalise_cell(x, shift, scale):
    """An observation's element, in standard deviations from its mean; NaN stays NaN. x is of the shift's type."""
    x = f32(x - shift) * scale
    x = OBSERVATION_CLIP if x > OBSERVATION_CLIP else x
    return -OBSERVATION_CLIP if x < -OBSERVATION_CLIP else x


@distinct_driver
def _gather_lanes(begin, end, source, index, start, shift, scale, out):
    # Segment by segment: row by row, the CPU would prefetch segments that were not drawn.
    for m in range(begin, end):
        column = index[start + m]
        for t in range(len(out)):
            row, target = source[t, column], out[t, m]
            if len(shift) > 0:
                for j in range(len(row)):
                    target[j] = narrow(normalise_cell(shift.dtype.type(row[j]), shift[j], scale[j]), target)
            else:
                for j in range(len(row)):
                    target[j] = narrow(row[j], target)


@driver
def _gather_cuda(begin, end, T, M, N, width, source, index, start, shift, scale, out):
    for lane in range(u64(begin), u64(end)):
        row, j = lane // width, lane % width
        m, first = row % M, row // M * u64(STRIDE)
        at, there = (first * M + m) * width + j, (first * N + u64(index[start + m])) * width + j
        for _ in range(first, min(first + u64(STRIDE), T)):
            if len(shift) > 0:
                out[at] = narrow(normalise_cell(shift.dtype.type(source[there]), shift[j], scale[j]), out)
            else:
                out[at] = narrow(source[there], out)
            at, there = at + M * width, there + N * width


def gather(source, index, out, *, start=0, shift=None, scale=None):
    """out[t, m] = source[t, index[start + m]], cast to out's dtype; `source` may have more rows than `out`. With shift
    and scale of the trailing shape, float32 or the shift float64, it is clip((source - shift) · scale, ±10) an element.

    source (>= T, N, ...) of any dtype but 16-bit floats, index int64 or None for all columns in
    order, out (T, M, ...) with the same trailing shape.
    """
    T, M = out.shape[:2]
    if source.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(f"kernels.gather: source is {source.dtype}; expected integers, bool, float32 or float64.")
    if len(source) < T or source.shape[2:] != out.shape[2:]:
        raise ValueError(f"kernels.gather: source {tuple(source.shape)} cannot fill out {tuple(out.shape)}.")
    columns = check_index("gather", index, start, M, source.shape[1], source)
    width = math.prod(out.shape[2:])
    arrays = [checked("gather", name, tensor, tuple(tensor.shape), numpy_dtype(tensor))
              .reshape(*tensor.shape[:2], width) for name, tensor in (("source", source), ("out", out))]
    norm = [constant(("no normalisation",), source, lambda: torch.zeros(0))] * 2
    if shift is not None:
        norm = [checked("gather", name, tensor, tuple(out.shape[2:]), numpy_dtype(tensor)).reshape(-1)
                for name, tensor in (("shift", shift), ("scale", scale))]
    if on_gpu(out):  # flat and unsigned: indices of several dimensions cost more there, signed ones most of all
        run(_gather_cuda, -(-T // STRIDE) * M * width, 1, *map(u64, (T, M, source.shape[1], width)),
            arrays[0].reshape(-1), columns, u64(start), *norm, arrays[1].reshape(-1))
    else:
        run(_gather_lanes, M, T * width // 3, arrays[0], columns, start, *norm, arrays[1])


@distinct_driver
def _observation_moments(begin, end, observations, valid, around, sums):
    for row in range(len(observations)):
        if valid[row] != 0:
            for j in range(begin, end):
                deviation = np.float64(observations[row, j]) - around[j]
                sums[0, j] += deviation
                sums[1, j] += deviation * deviation


def observation_moments(observations, valid, around):
    """(2, D) float64: the sums over the valid rows of observations - around and of its square. observations (rows, D)
    of any dtype but 16-bit floats, valid (rows,) uint8, around (D,) float64, near the mean so that nothing cancels."""
    rows, width = check_sizes("observation_moments", "observations", observations, 2)
    if observations.is_cuda:  # a thread for each number, and not only one for each column
        live, sums = valid.bool().unsqueeze(1), torch.zeros(2, width, dtype=torch.float64, device=observations.device)
        for part, there in zip(observations.split(1 << 16), live.split(1 << 16), strict=True):
            deviation = torch.where(there, part.double() - around, 0.0)
            sums[0] += deviation.sum(0)
            sums[1] += deviation.square().sum(0)
        return sums
    sums = np.zeros((2, width))
    run(_observation_moments, width, rows,
        checked("observation_moments", "observations", observations, (rows, width), numpy_dtype(observations)),
        checked("observation_moments", "valid", valid, (rows,), np.uint8),
        checked("observation_moments", "around", around, (width,), np.float64), sums)
    return torch.as_tensor(sums)


# --------------------------------------------------------------------------------------------------
# MinGRU with highway gate: one step for the rollout, a scan forward and backward for the update


@cell
def mingru_gates_cell(h, g, p):
    """(h~, z, q) of mingru_cell from the linear map's output (h, g, p). h~ is h + ½ if h >= 0, else sigmoid(h); as
    a sum it has no branch, which would double the loop's time."""
    above, below = h if h >= ZERO else ZERO, ZERO if h >= ZERO else h
    return sigmoid_cell(below) + above, sigmoid_cell(g), sigmoid_cell(p)


@cell
def mingru_cell(x, candidate, z, q, state, live):
    """(new state, output) of one channel; MinGRU (Feng et al. 2024, section 3.1) in linear space
    with a highway gate (Srivastava et al. 2015, eq. 3): s' = (1-z)·s + z·h~, out = q·s' + (1-q)·x,
    z = sigmoid(g), q = sigmoid(p). A dead agent's state stays."""
    new_state = state + z * (candidate - state)
    state = new_state if live else state
    return state, x + q * (state - x)


@cell
def mingru_cell_grad(x, candidate, z, q, state, live, grad_out, grad_state):
    """(dh, dg, dp, dx, dstate) of the two cells above; h~ is ½ or more where h is not negative."""
    slope = ONE if candidate >= HALF else candidate * (ONE - candidate)
    new_state = state + z * (candidate - state) if live else state
    ds = grad_state + grad_out * q
    dz, dx = ds * z, grad_out * (ONE - q)
    return (dz * slope if live else ZERO, dz * (candidate - state) * (ONE - z) if live else ZERO,
            dx * (new_state - x) * q, dx, ds * (ONE - z) if live else ds)


@distinct_driver
def _mingru_step_lanes(begin, end, hgp, x, state, resets, valid, out):
    H = x.shape[1]
    for m in range(begin, end):
        row, xs, s, o = hgp[m], x[m], state[m], out[m]
        h, g, p = row[:H], row[H : 2 * H], row[2 * H :]
        keep, live = ZERO if resets[m] else ONE, valid[m] != 0
        for j in range(H):
            candidate, z, q = mingru_gates_cell(widen(h[j]), widen(g[j]), widen(p[j]))
            new, y = mingru_cell(widen(xs[j]), candidate, z, q, s[j] * keep, live)
            s[j] = new
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
    """One step of M agents, state (M, H) updated in place. hgp (M, 3H) the linear map's output; x, out (M, H), floats;
    resets, valid (M,) uint8: a reset zeroes the state first; an invalid step passes it on unchanged."""
    M, H = check_sizes("mingru_step", "x", x, 2)
    driver, lanes = (_mingru_step_cuda, M * H) if on_gpu(x) else (_mingru_step_lanes, M)
    run(driver, lanes, H,
        checked("mingru_step", "hgp", hgp, (M, 3 * H), FLOATS), checked("mingru_step", "x", x, (M, H), FLOATS),
        checked("mingru_step", "state", state, (M, H)), checked("mingru_step", "resets", resets, (M,), np.uint8),
        checked("mingru_step", "valid", valid, (M,), np.uint8), checked("mingru_step", "out", out, (M, H), FLOATS))


def kept_gate(gate, before):
    """What the scan keeps for its gradient: the gate, or hgp if bfloat16 would round the gate."""
    return before if isinstance(before, u16) else gate


def gates_again(h, g, p):
    """The gates for the backward pass, from what the scan kept (see kept_gate)."""
    return mingru_gates_cell(widen(h), widen(g), widen(p)) if isinstance(h, u16) else (h, g, p)


@overload(kept_gate)
def _kept_gate(gate, before):
    return (lambda gate, before: before) if before == types.uint16 else (lambda gate, before: gate)


@overload(gates_again)
def _gates_again(h, g, p):
    if h == types.uint16:
        return lambda h, g, p: mingru_gates_cell(widen(h), widen(g), widen(p))
    return lambda h, g, p: (h, g, p)


AHEAD = 8  # steps by which a scan on a CPU asks for what it reads and writes


@distinct_driver
def _mingru_scan_lanes(begin, end, hgp, x, states, resets, valid, index, start, out, gates, carry):
    T, M, H = x.shape
    for m in range(begin, end):
        column, s = index[start + m], carry[m]
        for j in range(H):  # a copy: a loop that reads states[t] and writes states[t + 1] is slow
            s[j] = states[0, m, j]
        for t in range(T):
            row, kept, xs, new, o = hgp[t, m], gates[t, m], x[t, m], states[t + 1, m], out[t, m]
            if M > 1:  # else the steps lie side by side
                soon = min(t + AHEAD, T - 1)
                ask_ahead(hgp[soon, m])
                ask_ahead(gates[soon, m])
                ask_ahead(x[soon, m])
                ask_ahead(states[soon + 1, m])
                ask_ahead(out[soon, m])
            h, g, p = row[:H], row[H : 2 * H], row[2 * H :]
            kept_h, kept_g, kept_p = kept[:H], kept[H : 2 * H], kept[2 * H :]
            keep, live = ZERO if resets[t, column] else ONE, valid[t, column] != 0
            for j in range(H):
                candidate, z, q = mingru_gates_cell(widen(h[j]), widen(g[j]), widen(p[j]))
                state, y = mingru_cell(widen(xs[j]), candidate, z, q, s[j] * keep, live)
                kept_h[j], kept_g[j], kept_p[j] = kept_gate(candidate, h[j]), kept_gate(z, g[j]), kept_gate(q, p[j])
                s[j] = state
                new[j] = state
                o[j] = narrow(y, o)


def mingru_scan(hgp, x, states, resets, valid, out, *, gates=None, index=None, start=0, initial=None):
    """T steps of M segments. hgp (T, M, 3H); x, out (T, M, H), floats; states (T+1, M, H): row 0 is read, the rest
    written. resets, valid (>= T, N) uint8 are of all agents; the segments are their columns index[start : start + M]
    (int64; all in order without an index). initial (N, H), if given, is where row 0 of the states is taken from. gates
    (T, M, 3H), by default hgp itself, gets what mingru_scan_grad needs: on a CPU the gates (h~, z, q) of a float32 hgp;
    on a GPU hgp, because computing gates again is quicker than reading them. Other arrays must be distinct."""
    T, M, H = check_sizes("mingru_scan", "x", x, 3)
    N = check_sizes("mingru_scan", "resets", resets, 2)[1]
    index = check_index("mingru_scan", index, start, M, N, x)
    arrays = (
        checked("mingru_scan", "hgp", hgp, (T, M, 3 * H), FLOATS), checked("mingru_scan", "x", x, (T, M, H), FLOATS),
        checked("mingru_scan", "states", states, (T + 1, M, H)),
        check_rows("mingru_scan", "resets", resets, T, (N,), np.uint8),
        check_rows("mingru_scan", "valid", valid, T, (N,), np.uint8), index, start,
        checked("mingru_scan", "out", out, (T, M, H), FLOATS))
    kept = arrays[0] if gates is None else checked("mingru_scan", "gates", gates, (T, M, 3 * H), arrays[0].dtype)
    if initial is not None:
        initial = checked("mingru_scan", "initial", initial, (N, H))
    if not on_gpu(x):
        if initial is not None:
            np.take(initial, index[start : start + M], axis=0, out=arrays[2][0])
        run(_mingru_scan_lanes, M, T * H, *arrays, kept, np.empty((M, H), np.float32))
        return
    if gates is not None:
        gates.copy_(hgp)
    states = initial is None
    _launch_scan("mingru_scan", T, M, N, H, (*arrays[:7], arrays[2] if states else initial, not states, arrays[7]))


MANY = 1 << 16  # with so many channels of all segments together, or more, a thread of a GPU has two
SCANS = {"ff": "", "bb": "_half", "bf": "_half_last"}  # read, written (f: float32, b: bfloat16)


def _launch_scan(name, T, M, N, H, arrays, out=9):
    """Launch a scan of kernels.cu; each thread has two channels if these are many, and their number is even."""
    gates, inputs, out = ("b" if arrays[i].dtype == u16 else "f" for i in (0, 1, out))
    kind = SCANS.get(gates + out)
    if gates != inputs or kind is None or f"{name}{kind}" not in CUDA.signatures:
        raise TypeError(f"kernels.{name}: hgp, x and the output are {gates}, {inputs} and {out} (f: float32, b: "
                        "bfloat16); on a GPU all have one type, but the scan's output may always be float32.")
    lanes = M * H // (1 if H % 2 or M * H < MANY else 2)
    CUDA.launch(f"{name}{kind}", -(-lanes // 64), 64, T, M, N, H, *arrays)


@distinct_driver
def _mingru_scan_grad_lanes(begin, end, hgp, x, states, resets, valid, index, start, grad_out, sums, carry):
    T, M, H = x.shape
    for m in range(begin, end):
        column, grad_state = index[start + m], carry[m]
        grad_state[:], sums[m] = ZERO, ZERO
        sum_h, sum_g, sum_p = sums[m, :H], sums[m, H : 2 * H], sums[m, 2 * H :]
        for t in range(T - 1, -1, -1):
            row, xs, s, dy = hgp[t, m], x[t, m], states[t, m], grad_out[t, m]
            if M > 1:
                soon = max(t - AHEAD, 0)
                ask_ahead(hgp[soon, m])
                ask_ahead(x[soon, m])
                ask_ahead(states[soon, m])
                ask_ahead(grad_out[soon, m])
            h, g, p = row[:H], row[H : 2 * H], row[2 * H :]
            keep, live = ZERO if resets[t, column] else ONE, valid[t, column] != 0
            for j in range(H):
                candidate, z, q = gates_again(h[j], g[j], p[j])
                dh, dg, dp, dx, ds = mingru_cell_grad(widen(xs[j]), candidate, z, q, s[j] * keep, live, widen(dy[j]),
                                                      grad_state[j])
                h[j], g[j], p[j], dy[j] = narrow(dh, h), narrow(dg, g), narrow(dp, p), narrow(dx, dy)
                sum_h[j] += dh
                sum_g[j] += dg
                sum_p[j] += dp
                grad_state[j] = ds * keep


def mingru_scan_grad(hgp, x, states, resets, valid, grad_out, sums, *, index=None, start=0):
    """Gradients of mingru_scan, in place, floats: hgp (T, M, 3H), as mingru_scan left it, becomes d
    loss/d hgp, grad_out (T, M, H) becomes the highway's share of d loss/d x (the caller adds d hgp
    @ W). The gradient of states[0] is not propagated. sums (M, 3H) is written with each segment's
    sum of d hgp over t, which add up to the bias's gradient."""
    T, M, H = check_sizes("mingru_scan_grad", "x", x, 3)
    N = check_sizes("mingru_scan_grad", "resets", resets, 2)[1]
    index = check_index("mingru_scan_grad", index, start, M, N, x)
    arrays = (
        checked("mingru_scan_grad", "hgp", hgp, (T, M, 3 * H), FLOATS),
        checked("mingru_scan_grad", "x", x, (T, M, H), FLOATS),
        checked("mingru_scan_grad", "states", states, (T + 1, M, H)),
        check_rows("mingru_scan_grad", "resets", resets, T, (N,), np.uint8),
        check_rows("mingru_scan_grad", "valid", valid, T, (N,), np.uint8), index, start,
        checked("mingru_scan_grad", "grad_out", grad_out, (T, M, H), FLOATS),
        checked("mingru_scan_grad", "sums", sums, (M, 3 * H)))
    if on_gpu(x):
        _launch_scan("mingru_scan_grad", T, M, N, H, arrays, 7)
    else:
        run(_mingru_scan_grad_lanes, M, T * H, *arrays, np.empty((M, H), np.float32))


# --------------------------------------------------------------------------------------------------
# PPO loss: forward, gradient and statistics in one pass

# Settings that may change between updates lie in one array, which a captured CUDA graph can read.
LOSS_SETTINGS = ("advantage_mean", "advantage_scale", "row_scale", "clip_coef", "vf_coef", "vf_clip_coef", "ent_coef",
                 "advantage_floor")
LOSS_SUMS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "importance",
             "return", "return_squared", "residual", "residual_squared", "valid")
SUMS = len(LOSS_SUMS)
(ADVANTAGE_MEAN, ADVANTAGE_SCALE, ROW_SCALE, CLIP_COEF, VF_COEF, VF_CLIP_COEF, ENT_COEF,
 ADVANTAGE_FLOOR) = range(len(LOSS_SETTINGS))
(POLICY_LOSS, VALUE_LOSS, ENTROPY, OLD_APPROX_KL, APPROX_KL, CLIPFRAC, IMPORTANCE, RETURN, RETURN_SQUARED, RESIDUAL,
 RESIDUAL_SQUARED, VALID) = range(SUMS)


@reduction_driver
def _advantage_moments(begin, end, advantages, valid, index, parts):
    for t in range(begin, end):
        count, total, squares = 0.0, 0.0, 0.0
        for m in range(len(index)):
            n = u64(index[m])
            live = valid[t, n] != 0
            a = np.float64(advantages[t, n]) if live else 0.0
            count += 1.0 if live else 0.0
            total += a
            squares += a * a
        parts[t, 0], parts[t, 1], parts[t, 2] = count, total, squares


def _launch_sum(name, steps, count, like, sizes, written, *arrays):
    """Launch a kernel of kernels.cu over `steps` that adds up `count` numbers into `written`; sizes
    and arrays are its other arguments."""
    blocks = max(1, min(-(-steps // 128), 1024))
    CUDA.launch(name, blocks, 128, *sizes, *arrays, *_sums_of_blocks(like, blocks * count), *written)


def _sums_of_blocks(like, count, tickets=1):
    """(parts, tickets): scratch for sums in kernels.cu, one per stream, as streams may overlap."""
    stream = torch.cuda.current_stream().cuda_stream
    parts = constant(("sums", stream, 1 << (count - 1).bit_length()), like,
                     lambda: torch.zeros(1 << (count - 1).bit_length(), dtype=torch.float64))
    return parts, constant(("tickets", stream, tickets), like, lambda: torch.zeros(tickets, dtype=torch.int32))


def advantage_moments(advantages, valid, index, moments=None):
    """moments (3,) float64, written and returned: count, sum and sum of squares of the advantages at the valid steps
    of the drawn segments (of all, if `index` is None). The loss normalises advantages by them; several ranks add
    theirs up before that."""
    name = "advantage_moments"
    T, N = check_sizes(name, "advantages", advantages, 2)
    index = check_index(name, index, 0, 0, N, advantages)
    M = len(index)
    arrays = (checked(name, "advantages", advantages, (T, N)), check_rows(name, "valid", valid, T, (N,), np.uint8),
              index)
    if moments is None:
        moments = torch.empty(3, dtype=torch.float64, device=advantages.device)
    result = checked(name, "moments", moments, (3,), np.float64)
    if on_gpu(advantages):
        _launch_sum(name, T * M, 3, advantages, (T, M, N), (result,), *arrays)
        return moments
    parts = np.zeros((T, 3))
    run(_advantage_moments, T, 3 * M, *arrays, parts)
    result[:] = parts.sum(0)
    return moments


@driver
def _normalisation(begin, end, moments, settings):
    for _ in range(begin, end):  # one lane; on a GPU it is one launch in place of torch's thirteen
        count = max(moments[0], 1.0)
        mean = moments[1] / count
        variance = moments[2] / count - mean * mean
        spread, floor = math.sqrt(0.0 if variance < 0.0 else variance), settings[ADVANTAGE_FLOOR]
        spread = floor if spread < floor else spread  # NaN stays NaN
        settings[0], settings[1], settings[2] = mean, 1.0 / (spread + 1e-8), 1.0 / count


def normalisation(moments, settings):
    """advantage_moments' (count, sum, squares) -> the first three of settings (LOSS_SETTINGS,): the
    mean, 1/(max(std, advantage_floor) + 1e-8) and 1/count."""
    run(_normalisation, 1, 1, checked("normalisation", "moments", moments, (3,), np.float64),
        checked("normalisation", "settings", settings, (len(LOSS_SETTINGS),)))


@cell
def ppo_cell(logprob, old_logprob, scaled_advantage, clip_coef):
    """(loss, d loss/d logprob, ratio, logratio) of the clipped objective (Schulman et al. 2017, eq.
    7); outside ±20 the log-ratio is clamped and its gradient zero."""
    raw = logprob - old_logprob
    logratio = f32(20) if raw > f32(20) else raw
    logratio = f32(-20) if logratio < f32(-20) else logratio
    ratio = exp_cell(logratio)
    clipped = ONE + clip_coef if ratio > ONE + clip_coef else ratio
    clipped = ONE - clip_coef if clipped < ONE - clip_coef else clipped
    plain, other = -scaled_advantage * ratio, -scaled_advantage * clipped
    outside = raw > f32(20) or raw < f32(-20)
    if other > plain:
        return other, ZERO, ratio, logratio
    return plain, (ZERO if outside else plain), ratio, logratio


@cell
def value_cell(value, old_value, target, vf_clip_coef):
    """(loss, d loss/d value) of ½ max((v-R)², (V + clip(v-V) - R)²) (Schulman's PPO2 value clipping)."""
    change = value - old_value
    clipped = vf_clip_coef if change > vf_clip_coef else change
    clipped = -vf_clip_coef if clipped < -vf_clip_coef else clipped
    plain, other = value - target, old_value + clipped - target
    if other * other > plain * plain:
        return HALF * other * other, (other if clipped == change else ZERO)
    return HALF * plain * plain, plain


@cell
def objective_cell(logprob, old_logprob, value, old_value, advantage, weight, settings):
    """(policy loss, value loss, ratio, log-ratio, d loss/d logprob, d loss/d value) of one step;
    the derivatives are of the minibatch's mean loss, so they are divided by its valid steps."""
    a = weight * (advantage - settings[ADVANTAGE_MEAN]) * settings[ADVANTAGE_SCALE]
    policy, dlogprob, ratio, logratio = ppo_cell(logprob, old_logprob, a, settings[CLIP_COEF])
    value_loss, dvalue = value_cell(value, old_value, advantage + old_value, settings[VF_CLIP_COEF])
    scale = settings[ROW_SCALE]
    return policy, value_loss, ratio, logratio, scale * dlogprob, scale * settings[VF_COEF] * dvalue


@cell
def statistics_cell(sums, policy, value_loss, entropy, ratio, logratio, clip_coef, target, residual):
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
    """-p log p, a choice's share of its head's entropy: 0 for a choice that a mask or the network rules out."""
    return ZERO if p == ZERO else -p * log_p


@cell
def entropy_grad_cell(p, log_p, entropy):
    """- d entropy/d logit of a choice."""
    return ZERO if p == ZERO else p * (log_p + entropy)


@cell
def logit_grad_cell(entropy_grad, p, chosen, dlogprob, ent_coef):
    """d loss/d logit of a choice; d logprob/d logit = [chosen] - p."""
    return ent_coef * entropy_grad + dlogprob * ((ONE if chosen else ZERO) - p)


@distinct_driver
def _head_rows(log_p, p, top, total, entropy):
    """Logits (choices, T), -inf if forbidden, to log-probabilities, in place, and probabilities; entropy
    (T,). top and total (T,) are scratch. The innermost axis is the steps, so that every loop vectorises."""
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
def _logit_grad_rows(log_p, p, entropy, chosen, dlogprob, ent_coef):
    """The log-probabilities (choices, T) of one head become d loss/d logit."""
    for j in range(len(log_p)):
        row, chance = log_p[j], p[j]
        for t in range(len(chosen)):
            slope = entropy_grad_cell(chance[t], row[t], entropy[t])
            row[t] = logit_grad_cell(slope, chance[t], chosen[t] == f32(j), dlogprob[t], ent_coef)


@distinct_driver
def _objective_rows(logprob, old_logprob, value, old_value, advantage, weight, settings, policy, value_loss, ratio,
                    logratio, dlogprob, dvalue):
    """objective_cell for the steps of a segment."""
    for t in range(len(logprob)):
        policy[t], value_loss[t], ratio[t], logratio[t], dlogprob[t], dvalue[t] = objective_cell(
            logprob[t], old_logprob[t], value[t], old_value[t], advantage[t], weight, settings)


# Numbers of a step that the loss of discrete actions works with, beside two for each choice and one for each head (of
# which there are no more than choices).
LOSS_ROWS = 14


@driver
def _ppo_loss_discrete_lanes(begin, end, outputs, index, start, masked, masks, heads, actions, logprobs, values,
                             advantages, weights, valid, settings, grad, new_values, ratios, parts, work):
    T, _, width = outputs.shape
    choices, clip_coef, ent_coef = width - 1, settings[CLIP_COEF], settings[ENT_COEF] * settings[ROW_SCALE]
    rows, log_p = work[begin, :LOSS_ROWS], work[begin, LOSS_ROWS : LOSS_ROWS + choices]
    p, entropies = work[begin, LOSS_ROWS + choices : LOSS_ROWS + 2 * choices], work[begin, LOSS_ROWS + 2 * choices :]
    # Row by row: what numba unpacks has a stride that it does not know, and then no loop vectorises.
    logprob, old_logprob, value, old_value, advantage = rows[0], rows[1], rows[2], rows[3], rows[4]
    policy, value_loss, ratio, logratio, dlogprob, dvalue = rows[5], rows[6], rows[7], rows[8], rows[9], rows[10]
    top, total, chosen = rows[11], rows[12], rows[13]
    for m in range(begin, end):
        n, column = index[start + m], start + m
        for t in range(T):  # copied side by side: in memory a row of agents lies between two steps
            value[t], old_value[t], advantage[t] = outputs[t, m, choices], values[t, n], advantages[t, n]
            old_logprob[t], logprob[t] = logprobs[t, n], ZERO
            for j in range(choices):
                log_p[j, t] = -np.inf if masked and masks[t, n, j] == 0 else outputs[t, m, j]
        first = 0
        for head in range(len(heads)):
            last = first + heads[head]
            _head_rows(log_p[first:last], p[first:last], top, total, entropies[head])
            for t in range(T):
                logprob[t] += log_p[first + actions[t, n, head], t]
            first = last
        _objective_rows(logprob, old_logprob, value, old_value, advantage, weights[column], settings, policy,
                        value_loss, ratio, logratio, dlogprob, dvalue)
        first = 0
        for head in range(len(heads)):
            last = first + heads[head]
            for t in range(T):
                chosen[t] = f32(actions[t, n, head])
            _logit_grad_rows(log_p[first:last], p[first:last], entropies[head], chosen, dlogprob, ent_coef)
            first = last
        for t in range(T):
            live = valid[t, n] != 0
            for j in range(choices):
                grad[t, m, j] = log_p[j, t] if live else ZERO
            grad[t, m, choices] = dvalue[t] if live else ZERO
            new_values[t, column] = value[t] if live else old_value[t]
            ratios[t, column] = ratio[t] if live else ONE
            if live:
                entropy, target = ZERO, advantage[t] + old_value[t]
                for head in range(len(heads)):
                    entropy += entropies[head, t]
                statistics_cell(parts[m], policy[t], value_loss[t], entropy, ratio[t], logratio[t], clip_coef, target,
                                target - value[t])


@cell
def gaussian_cell(u, mean, log_std, log_slope):
    """(-log p, entropy) of one dimension; log_slope: log da/du if a tanh squashes u, else 0."""
    z = (u - mean) * exp_cell(-log_std)
    return HALF * z * z + log_std + LOG_SQRT_2PI + log_slope, log_std + HALF + LOG_SQRT_2PI + log_slope


@cell
def gaussian_grad_cell(u, mean, log_std, inside, dlogprob, ent_coef):
    """d loss/d (mean, log_std) of dlogprob · log p - ent_coef · entropy; inside: tanh u if that squashes u, else 0."""
    inverse, inward = exp_cell(-log_std), ent_coef * f32(2) * inside
    z = (u - mean) * inverse
    return dlogprob * z * inverse + inward, dlogprob * (z * z - ONE) - ent_coef + inward * (u - mean)


@driver
def _ppo_loss_continuous(begin, end, outputs, index, start, log_std, squash, actions, logprobs, values,
                         advantages, weights, valid, settings, grad, grad_log_std, new_values, ratios, parts):
    (_, M, width), squashed = outputs.shape, squash[1, 0] != ZERO
    clip_coef, ent_coef = settings[CLIP_COEF], settings[ENT_COEF] * settings[ROW_SCALE]
    for t in range(begin, end):
        for m in range(M):
            n, column = index[start + m], start + m
            row, drow, spread, dspread = outputs[t, m], grad[t, m], log_std[t, m], grad_log_std[t, m]
            value = row[width - 1]
            new_values[t, column] = value
            if valid[t, n] == 0:
                new_values[t, column] = values[t, n]
                drow[:] = ZERO
                dspread[:] = ZERO
                ratios[t, column] = ONE
                continue
            logprob, entropy = ZERO, ZERO
            for j in range(width - 1):
                log_slope = squash[2, j] + squash_cell(actions[t, n, j], squash[1, j])[1] if squashed else ZERO
                surprise, uncertainty = gaussian_cell(actions[t, n, j], row[j], spread[j], log_slope)
                logprob -= surprise
                entropy += uncertainty
            target = advantages[t, n] + values[t, n]
            policy, value_loss, ratio, logratio, dlogprob, dvalue = objective_cell(
                logprob, logprobs[t, n], value, values[t, n], advantages[t, n], weights[column], settings)
            for j in range(width - 1):
                inside = squash_cell(actions[t, n, j], squash[1, j])[0] if squashed else ZERO
                drow[j], dspread[j] = gaussian_grad_cell(
                    actions[t, n, j], row[j], spread[j], inside, dlogprob, ent_coef)
            drow[width - 1] = dvalue
            ratios[t, column] = ratio
            statistics_cell(parts[t], policy, value_loss, entropy, ratio, logratio, clip_coef, target, target - value)


def ppo_loss(outputs, actions, logprobs, values, advantages, weights, valid, settings, grad, new_values, ratios, sums,
             *, heads=None, log_std=None, grad_log_std=None, squash=None, masks=None, index=None, start=0):
    """Clipped PPO loss of a chunk of M segments, its gradient and its statistics, in one pass.

    outputs, grad (T, M, A + 1): logits or means, then the value; grad is written with d loss/d outputs. The chunk is
    segments start to start + M of a minibatch of B, which are the columns `index` (B,) int64 of the rollout's arrays:
    actions (T, N, heads) int32 or (T, N, A) float32; logprobs (T, N); values (>= T, N) and advantages (T, N) as the
    rollout or the last write-back left them; valid (>= T, N) uint8; masks (>= T, N, A) uint8 or None. Of the minibatch:
    weights (B,); settings (LOSS_SETTINGS), float32, `row_scale` = 1/(valid steps in the minibatch). Written:
    new_values, ratios (T, B), and for continuous actions, with log_std (A,) or (T, M, A), grad_log_std (T, M, A).
    Added to: sums (LOSS_SUMS) float64.

        policy: mean max(-A'·ratio, -A'·clip(ratio, 1 ± clip_coef)),  A' = weight · (A - mean) · scale
        value:  ½ mean max((v-R)², (V + clip(v-V, ± vf_clip_coef) - R)²),  R = A + V
        total = policy + vf_coef · value - ent_coef · entropy
    With `squash` (3, A) the actions are `sample`'s samples u = mean + std·z, and the entropy, which
    has no closed form, is the Gaussian's plus log da/du at these u; its gradient keeps z.
    Raises ValueError or TypeError for a wrong shape or dtype.
    """
    name = "ppo_loss"
    T, M, width = check_sizes(name, "outputs", outputs, 3)
    N, B = check_sizes(name, "logprobs", logprobs, 2)[1], check_sizes(name, "weights", weights, 1)[0]
    index = check_index(name, index, start, M, N, outputs)
    if start + M > B:
        raise ValueError(f"kernels.ppo_loss: segments {start} to {start + M} of a minibatch of {B}.")
    like, gpu = outputs, on_gpu(outputs)
    parts = None if gpu else np.zeros((T if heads is None else M, SUMS))
    outputs, grad = checked(name, "outputs", outputs, (T, M, width)), checked(name, "grad", grad, (T, M, width))
    rollout = (checked(name, "logprobs", logprobs, (T, N)), check_rows(name, "values", values, T, (N,)),
               checked(name, "advantages", advantages, (T, N)), checked(name, "weights", weights, (B,)),
               check_rows(name, "valid", valid, T, (N,), np.uint8),
               checked(name, "settings", settings, (len(LOSS_SETTINGS),)))
    written = (checked(name, "new_values", new_values, (T, B)), checked(name, "ratios", ratios, (T, B)))
    sum_array = checked(name, "sums", sums, (SUMS,), np.float64)
    launch = functools.partial(_launch_sum, "ppo_loss_discrete" if heads is not None else "ppo_loss_continuous", T * M,
                               SUMS, like, (T, M, N, B, width, start), (sum_array,))
    if heads is not None:
        heads = check_heads(name, heads, check_sizes(name, "actions", actions, 3)[2], width - 1, like)
        masks = None if masks is None else check_rows(name, "masks", masks, T, (N, width - 1), np.uint8)
        actions = checked(name, "actions", actions, (T, N, len(heads)), np.int32)
        masked, masks = optional_masks(masks, like, 3)
        if gpu:
            launch(len(heads), masked, outputs, index, masks, heads, actions, *rollout, grad, *written)
            return
        run(_ppo_loss_discrete_lanes, M, 16 * T * width, outputs, index, start, masked, masks, heads, actions, *rollout,
            grad, *written, parts, np.empty((M, LOSS_ROWS + 3 * (width - 1), T), np.float32))  # a thread uses one of M
    else:
        spread_row = width - 1 if log_std.dim() > 1 else 0
        log_std = check_log_std(name, log_std, (T, M, width - 1))
        grad_log_std = checked(name, "grad_log_std", grad_log_std, (T, M, width - 1))
        actions = checked(name, "actions", actions, (T, N, width - 1))
        squash = check_squash(name, squash, width - 1, like)
        if gpu:
            launch(spread_row, squash.shape[1], outputs, index, log_std, squash, actions, *rollout, grad, grad_log_std,
                   *written)
            return
        run(_ppo_loss_continuous, T, 30 * M * width, outputs, index, start, log_std, squash, actions, *rollout, grad,
            grad_log_std, *written, parts)
    sums += torch.as_tensor(parts.sum(0))


def add_rows(pairs, add=True):
    """Of each pair (rows, gradient), a bias's gradient (columns,) += the sum over n of rows (n, columns), floats; = if
    not add. On a GPU they are one launch."""
    table, blocks, parts, like = [], 0, 0, None
    for rows, gradient in pairs:
        n, columns = check_sizes("add_rows", "rows", rows, 2)
        if not on_gpu(rows):
            total = rows.sum(0, dtype=gradient.dtype)
            gradient.copy_(gradient + total if add else total)
            continue
        values = checked("add_rows", "rows", rows, (n, columns), FLOATS)
        checked("add_rows", "gradient", gradient, (columns,))
        side_by_side = 256 // min(columns, 256)
        chunk = -(-max(math.isqrt(n), 1) // side_by_side) * side_by_side  # the last block then has as much to add up
        pieces = max(1, -(-n // chunk))
        table.append((rows.data_ptr(), values.dtype == u16, n, columns, chunk, blocks, parts, gradient.data_ptr()))
        blocks, parts, like = blocks + -(-columns // 256) * pieces, parts + pieces * columns, rows
    if table:
        sums = constant(("add_rows", *table), like, lambda: torch.tensor(table, dtype=torch.int64).view(-1))
        CUDA.launch("add_rows", blocks, 256, len(table), sums, add, *_sums_of_blocks(like, parts, len(table)))


def loss_statistics(sums):
    """LOSS_SUMS, added over all chunks of one or more minibatches -> the logged means, as a dict of floats."""
    mean = {name: float(total) / max(float(sums[VALID]), 1.0) for name, total in zip(LOSS_SUMS, sums, strict=True)}
    returns = max(mean["return_squared"] - mean["return"] ** 2, 0.0)
    residuals = max(mean["residual_squared"] - mean["residual"] ** 2, 0.0)
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "importance")
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
    """values[t, index[m]] = new_values[t, m] and the same for the ratios; index (M,) int64, new_* (T, M),
    values (T+1, N) (row T is not written), ratios (T, N). A segment that was drawn twice has equal columns.
    A minibatch's last kernel: it adds 1 to the second of counter (2,) int64, (epoch, minibatch)."""
    T, N = check_sizes("write_back", "ratios", ratios, 2)
    columns = check_index("write_back", index, 0, 0, N, ratios)
    M = len(columns)
    lanes, size = (T * M, 1) if on_gpu(ratios) else (T, M)  # a CPU's lane is a row
    run(_write_back, lanes, 2 * M, size, columns, checked("write_back", "new_values", new_values, (T, M)),
        checked("write_back", "new_ratios", new_ratios, (T, M)),
        checked("write_back", "counter", counter, (2,), np.int64),
        checked("write_back", "values", values, (T + 1, N)), checked("write_back", "ratios", ratios, (T, N)))


# --------------------------------------------------------------------------------------------------
# The optimizer's kernels (optim.py): the gradients' norm, momentum, and the step, on the arena's flat ranges

BLOCK = 4096
SCALE, MOMENTUM, DECAY, RATE = range(4)  # places in `scalars`; gradients are clipped by SCALE


@reduction_driver
def _squares_lanes(begin, end, flat, parts):
    for block in range(begin, end):
        part, piece = 0.0, flat[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(piece)):
            part += np.float64(piece[i]) * np.float64(piece[i])
        parts[block] = part


@cell
def nesterov_cell(gradient, momentum_buffer, momentum):
    """(new buffer, update): m = mu·m + g, u = g + mu·m."""
    buffer = momentum * momentum_buffer + gradient
    return buffer, gradient + momentum * buffer


@driver
def _nesterov_lanes(begin, end, gradients, buffers, updates, scalars):
    scale, momentum = scalars[SCALE], scalars[MOMENTUM]
    if scale == scale:  # false for NaN: then a gradient is not finite, and nothing changes
        g, m, u = gradients[begin:end], buffers[begin:end], updates[begin:end]
        for i in range(len(g)):
            buffer, update = nesterov_cell(g[i] * scale, m[i], momentum)
            m[i] = buffer
            u[i] = update


@driver
def _nesterov_cuda(begin, end, gradients, buffers, updates, scalars, places, work):
    scale, momentum = scalars[SCALE], scalars[MOMENTUM]
    if scale == scale:
        for i in range(begin, end):
            buffers[i], update = nesterov_cell(gradients[i] * scale, buffers[i], momentum)
            if places[i] < 0:
                updates[i] = update
            else:
                work[places[i]] = update


CREW = 256  # a block's threads in policy_step and newton_schulz
STRIP, ACROSS = 16, 32  # rows and columns of what a block of newton_schulz works out at once


@driver
def _apply_cuda(begin, end, weights, updates, scalars, places, scales, work):
    scale, decay, learning_rate = scalars[SCALE], scalars[DECAY], scalars[RATE]
    if scale == scale:
        for i in range(begin, end):
            update = updates[i] if places[i] < 0 else work[places[i]] * scales[i]
            weights[i] = weights[i] * decay - learning_rate * update


@driver
def _apply_lanes(begin, end, weights, updates, scalars):
    scale, decay, learning_rate = scalars[SCALE], scalars[DECAY], scalars[RATE]
    if scale == scale:
        w, u = weights[begin:end], updates[begin:end]
        for i in range(len(w)):
            w[i] = w[i] * decay - learning_rate * u[i]


def gradient_norm(flat):
    """Euclidean norm of a flat float32 range: on a CPU a float, summed in float64 by fixed blocks
    in block order; on a GPU a float64 tensor."""
    array = checked("gradient_norm", "flat", flat, tuple(flat.shape))
    if on_gpu(flat):
        norm = torch.empty((), dtype=torch.float64, device=flat.device)
        written = checked("gradient_norm", "norm", norm.view(1), (1,), np.float64)
        _launch_sum("gradient_norm", -(-len(array) // 8), 1, flat, (len(array),), (written,), array)
        return norm
    parts = np.zeros(-(-len(array) // BLOCK))
    run(_squares_lanes, len(parts), BLOCK // 5, array, parts)
    return math.sqrt(parts.sum())
