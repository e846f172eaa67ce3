"""The mathematics of the trainer, written out once more: slow, plain, float64.

Tests compare every kernel with this file. Nothing here is shared with the kernels, so that an error
in one cannot hide in the other. One function a formula; gradients come from autograd alone.

Letters: T horizon, N agents, M segments of a minibatch, H hidden channels, L layers, A action
logits or dimensions. Everything is time-major, `(T, N, ...)`. Numbers are float64 tensors, all
finite; flags (`terminals`, `truncations`, `resets`, `valid`, `mask`) mean "nonzero".
"""

import math

import torch

LOG_RATIO_LIMIT = 20.0

# Newton-Schulz (a, b, c), one row a step: the design's, in place of Jordan's fixed (3.4445,
# -4.7750, 2.0315). It takes every singular value of 0.01 and more (of a Frobenius norm of 1) into
# 0.97 .. 1.04.
NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                 (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))

# Philox 4x32, 10 rounds: (counter, key, output) from tests/kat_vectors of Random123 (D. E. Shaw
# Research).
PHILOX_KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)


def philox4x32(counter, key, rounds=10):
    """Return four random 32-bit words of a counter (four words) and a key (two).

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = (int(c) & word for c in counter)
    k0, k1 = (int(k) & word for k in key)
    for _ in range(rounds):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & word, (product0 >> 32) ^ c3 ^ k1, product0 & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def advantage(values, rewards, terminals, truncations, bootstraps, ratios, valid, gamma, lam,
              rho_clip, c_clip, reward_clip=None, offset=0.0):
    """Generalised advantage estimate with V-trace weights: (T, N).

    values (T+1, N); rewards, terminals, truncations, bootstraps, ratios (T, N); valid (T+1, N) or
    (T, N): a row T is not looked at, the last row of values always bootstraps.

        rho_t = min(ratio_t, rho_clip)    c_t = min(ratio_t, c_clip)    n_t = 1 - done_t
        delta_t = rho_t (r_t + gamma (n_t V_{t+1} + bootstraps_t) - V_t)
        A_t = delta_t + gamma lam c_t n_t A_{t+1}

    An invalid step has A = 0 and passes (n_t A_{t+1}, r_t + n_t V_{t+1} + bootstraps_t) to the
    preceding step in place of (A_t, V_t): rewards of steps without an action count for the last
    action, as those of an option do (Sutton, Precup and Singh 1999).

    values and bootstraps are relative to `offset`: this adds it to each value that there is, and no
    value follows a terminal step.

    Source: Schulman et al. 2016 (GAE, equation 16), which it is where rho = c = 1; Espeholt et al.
    2018 (V-trace): A is vs - V of equation 1 with c_t = lambda min(ratio_t, c_clip) as in remark 2.
    """
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(values[0])
    values = values + offset
    bootstraps = bootstraps + offset * ((truncations != 0) & (terminals == 0))
    next_value = values[-1]
    for t in reversed(range(len(rewards))):
        is_valid = valid[t] != 0
        continues = 1.0 - ((terminals[t] != 0) | (truncations[t] != 0)).double()  # n_t
        reward = rewards[t] if reward_clip is None else rewards[t].clamp(-reward_clip, reward_clip)
        rho = ratios[t].clamp(max=rho_clip)
        c = ratios[t].clamp(max=c_clip)
        delta = rho * (reward + gamma * (continues * next_value + bootstraps[t]) - values[t])
        here = delta + gamma * lam * c * continues * next_advantage
        advantages[t] = torch.where(is_valid, here, 0.0)
        next_advantage = torch.where(is_valid, here, continues * next_advantage)
        next_value = torch.where(is_valid, values[t],
                                 reward + continues * next_value + bootstraps[t])
    return advantages


def priorities(advantages, valid, alpha):
    """Return the priority of each segment, (N,); 0 without a valid step before row T."""
    is_valid = valid[: len(advantages)] != 0
    s = torch.where(is_valid, advantages.abs(), 0.0).sum(0)
    return torch.where(is_valid.any(0), s**alpha + 1e-6, 0.0)


def probabilities(advantages, valid, alpha):
    """Return the probability of each segment to be drawn, (N,); NaN if none is valid.

    Source: Schaul et al. 2016 (PER, equation 1), on segments instead of transitions.
    """
    weight = priorities(advantages, valid, alpha)
    return weight / weight.sum()


def importance_weights(p, beta):
    """Return w_n = (K p_n)^(-beta), (N,), 0 where p_n = 0.

    Schaul et al. 2016, section 3.4, but not divided by its maximum. K segments can be drawn.
    """
    return torch.where(p > 0, ((p > 0).sum() * torch.where(p > 0, p, 1.0)) ** -beta, 0.0)


def draw_segments(p, M, seed, epoch, minibatch):
    """Return the M segments of a minibatch, (M,), one per equal stratum of p (N,).

        segment m: the first n with p_0 + ... + p_n > (m + place in the stratum) / M * sum(p)
        place in the stratum = (u + minibatch M / N) modulo 1
        u = philox4x32((m, epoch, minibatch M // N, 2)), a number in [0, 1), new after N draws

    Source: Schaul et al. 2016 (PER, appendix B.2.1); the rotation is Cranley and Patterson 1976.
    """
    passes, rest = divmod(minibatch * M, len(p))
    words = [philox4x32((m, epoch, passes, 2), (seed & 0xFFFFFFFF, seed >> 32)) for m in range(M)]
    u = torch.tensor([(w[0] * 2**32 + w[1]) * 2.0**-64 for w in words], dtype=torch.float64)
    places = (torch.arange(M) + (u + rest / len(p)) % 1) / M
    cdf, last = p.cumsum(0), (p > 0).nonzero().max()  # never a segment with p = 0
    return torch.searchsorted(cdf, places * cdf[-1], right=True).clamp(0, last)


def mingru_layer(x, hgp, state, resets, valid):
    """Return out (T, M, H) and states (T, M, H) of MinGRU with a highway gate.

    x (T, M, H) the layer's input; hgp (T, M, 3H) its linear map in the order h, g, p; state (M, H)
    at the start; resets, valid (T, M). An invalid step reads nothing.

    Source: Feng et al. 2024 ("Were RNNs all we needed?", minGRU, with h~ as in the log-space form
    of appendix B); Srivastava et al. 2015 (highway networks, equation 3).
    """
    h, g, p = hgp.chunk(3, dim=-1)
    z = torch.sigmoid(g)
    candidate = torch.where(h >= 0, h + 0.5, torch.sigmoid(h))
    keep = (resets == 0).double()[..., None]
    is_valid = (valid != 0)[..., None]
    states = []
    for t in range(len(x)):
        carried = state * keep[t]
        state = torch.where(is_valid[t], (1 - z[t]) * carried + z[t] * candidate[t], carried)
        states.append(state)
    states = torch.stack(states)
    gate = torch.sigmoid(p)
    return gate * states + (1 - gate) * x, states


def log_softmax_heads(logits, heads, mask=None):
    """Return log-probabilities of all heads' actions, (..., sum(heads)); -inf if masked."""
    if mask is not None:
        logits = logits.masked_fill(mask == 0, -math.inf)
    return torch.cat([torch.log_softmax(head, dim=-1) for head in logits.split(list(heads), dim=-1)], dim=-1)


def discrete_logprob_entropy(logits, actions, heads, mask=None):
    """Return joint log-probability of actions (..., len(heads)) and joint entropy."""
    logp = log_softmax_heads(logits, heads, mask)
    chosen = [head.gather(-1, actions[..., i, None].long())[..., 0]
              for i, head in enumerate(logp.split(list(heads), dim=-1))]
    # 0 log 0 = 0
    p_logp = logp.exp() * (logp if mask is None else logp.masked_fill(mask == 0, 0.0))
    return torch.stack(chosen).sum(0), -p_logp.sum(-1)


def gaussian_logprob_entropy(mean, log_std, actions):
    """Return joint log-density and entropy of a diagonal Gaussian, each (...)."""
    log_std = log_std.expand_as(mean)
    score = (actions - mean) / log_std.exp()
    logprob = -0.5 * score**2 - log_std - 0.5 * math.log(2 * math.pi)
    entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
    return logprob.sum(-1), entropy.sum(-1)


def squashed_logprob_entropy(mean, log_std, samples, squash):
    """Return joint log-density and entropy of squashed actions, each (...).

    a = middle + half tanh(u) with u from a diagonal Gaussian, or a = middle - half u where half <
    0. mean and samples u (..., A); log_std (A,); squash (3, A): middle, half and log |half|. The
    entropy has no formula: it is that of the Gaussian plus log da/du at these u = mean + std z,
    where z has no gradient. Source: Haarnoja et al. 2018 (SAC), appendix C.
    """
    affine, tanh = torch.distributions.AffineTransform, torch.distributions.TanhTransform()
    transform = torch.distributions.StackTransform(
        [torch.distributions.ComposeTransform([tanh, affine(middle, half)]) if half > 0 else affine(middle, -half)
         for middle, half in squash[:2].T], dim=-1)
    normal = torch.distributions.Normal(mean, log_std.exp().expand_as(mean))
    logprob = normal.log_prob(samples) - transform.log_abs_det_jacobian(samples, transform(samples))
    u = mean + normal.scale * ((samples - mean) / normal.scale).detach()
    return logprob.sum(-1), (normal.entropy() + transform.log_abs_det_jacobian(u, transform(u))).sum(-1)


def logprob_entropy(y, actions, heads=None, log_std=None, mask=None, squash=None):
    """Return joint log-probability or -density of actions, and joint entropy, each (...)."""
    if heads is not None:
        return discrete_logprob_entropy(y, actions, heads, mask)
    if squash is None:
        return gaussian_logprob_entropy(y, log_std, actions)
    return squashed_logprob_entropy(y, log_std, actions, squash)


def ppo_loss(logits_or_mean, values_new, actions, old_logprobs, old_values, advantages, weights,
             valid, clip_coef, vf_coef, vf_clip_coef, ent_coef, vf_error_bound=float("inf"),
             min_advantage_std=0.0, heads=None, log_std=None, mask=None, squash=None):
    """Return the clipped PPO objective over the valid steps of a minibatch.

    A dict of scalars, and "ratio" (T, M). logits_or_mean (T, M, sum(heads) or A), values_new (T,
    M): the network's output; gradients flow to them and to log_std (A,). actions (T, M, len(heads)
    or A); old_logprobs, old_values, advantages, valid (T, M); weights (M,) of the segments; mask
    (T, M, sum(heads)). Give heads for discrete actions, log_std for continuous ones; with squash
    too the actions are the samples of `squashed_logprob_entropy`. The formula is in
    kernels.ppo_loss.

    Without a gradient: old_approx_kl = mean -log ratio, approx_kl = mean (ratio - 1 - log ratio),
    clipfrac = mean [|ratio - 1| > clip_coef], importance = mean ratio, explained_variance = 1 -
    var(R - v) / var(R), NaN where var(R) = 0. "ratio" is 1 at invalid steps. All means are over
    valid steps, without weights.

    Source: Schulman et al. 2017 (PPO, equations 7 and 9); the value clip is that of OpenAI
    baselines' ppo2; approx_kl is Schulman 2020, "Approximating KL divergence"; the weights are
    Schaul et al. 2016.
    """
    assert (heads is None) != (log_std is None)
    # x[on] picks the valid steps as one long row: nothing else can leak into a mean or a gradient
    on = valid != 0
    assert on.any()
    y, v, a, old_logprob = logits_or_mean[on], values_new[on], actions[on], old_logprobs[on]
    old_v, adv, w = old_values[on], advantages[on], weights.expand_as(valid)[on]

    mask = None if mask is None else mask[on]
    logprob, entropy = logprob_entropy(y, a, heads, log_std, mask, squash)
    log_ratio = (logprob - old_logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()

    std = adv.std(correction=0)
    normalised = w * (adv - adv.mean()) / (std.clamp(min=min_advantage_std) + 1e-8)
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = torch.maximum(-normalised * ratio, -normalised * clipped_ratio).mean()

    returns = adv + old_v
    clipped_v = old_v + (v - old_v).clamp(-vf_clip_coef, vf_clip_coef)
    value_loss = 0.5 * torch.maximum((v - returns) ** 2, (clipped_v - returns) ** 2).mean()

    with torch.no_grad():
        var_returns = returns.var(correction=0)
        residual = (returns - v).var(correction=0)
        statistics = {
            "old_approx_kl": -log_ratio.mean(), "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": ((ratio - 1).abs() > clip_coef).double().mean(), "importance": ratio.mean(),
            "explained_variance": 1 - residual / torch.where(var_returns > 0, var_returns, math.nan),
            "ratio": torch.ones_like(old_logprobs).masked_scatter(on, ratio)}
    vf_coef = vf_coef / max(1.0, std / vf_error_bound) ** 1.5
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy.mean()
    return {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss,
            "entropy": entropy.mean(), **statistics}


def newton_schulz(matrix):
    """Return a matrix with the same singular vectors, and singular values near 1.

    Source: Jordan et al. 2024 (Muon); the coefficients are the design's.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


def clip_gradients(grads, max_norm):
    """Return the gradients, clipped, and their norm before (Pascanu et al. 2013)."""
    norm = torch.cat([g.flatten() for g in grads]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in grads], norm


def muon_step(params, grads, momenta, lr, momentum, weight_decay, max_grad_norm):
    """Return new params and new momenta of one step of Muon; arguments are unchanged.

    Source: Jordan et al. 2024 (Muon), weight decay as in Liu et al. 2025 (Moonlight).
    """
    new_params, new_momenta = [], []
    grads, _ = clip_gradients(grads, max_grad_norm)
    for w, g, m in zip(params, grads, momenta, strict=True):
        m = momentum * m + g
        u = g + momentum * m
        if u.ndim >= 2:
            matrix = u.flatten(1)
            rows, cols = matrix.shape
            u = (newton_schulz(matrix) * math.sqrt(max(1.0, rows / cols))).view_as(u)
        new_params.append(w * (1 - lr * weight_decay) - lr * u)
        new_momenta.append(m)
    return new_params, new_momenta


def cosine_lr(step, total, lr, min_ratio):
    """Return the rate after step of total (Loshchilov & Hutter 2017, equation 5)."""
    progress = min(max(step / total, 0.0), 1.0)
    return lr * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
