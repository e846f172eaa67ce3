"""The networks: the default MinGRU policy, a feed-forward one, and wrappers that make your own
network recurrent.

    policy = MinGRUPolicy(env, hidden_size=64, num_layers=2)          # linear, MinGRU layers, linear
    policy = FeedForward(env, hidden_size=128)                  # no memory; PufferLib calls it Default
    policy = Separate(env, hidden_size=64)                      # policy and value apart, no memory
    policy = Board(env, hidden_size=32)                         # convolutions over the planes of a board
    policy = Impala(env, hidden_size=256)                       # residual convolutions of images
    policy = LSTMWrapper(env, MyPolicy(env), hidden_size=128)   # your encode_observations / decode_actions, recurrent;
                                                                # GRUWrapper and MinGRUWrapper alike
    agent = CleanRLAgent(FeedForward(env))                      # for CleanRL's ppo.py; RecurrentCleanRLAgent(policy)
    python pufferl.py train breakout --policy.name my_file.py:MyPolicy --rnn.name lstm

`env` is anything with `single_observation_space` and `single_action_space`. To write your own
network, copy `FeedForward` and edit it. All the trainer asks of an nn.Module is

    forward(observations) -> logits, value                  over a batch (B, ...), without memory; or, with one,
    forward(observations, state) -> logits, value           over (T, N, ...): T steps of N agents
    forward_eval(observations, state) -> logits, value      over (N, ...), optional: the rollout's form
    initial_state(num_agents) -> dict                       optional: recurrent tensors, each (layers, N, size); the
                                                            trainer reads the shapes, and begins with zeros
    thread_safe = True                                      optional, in the class of each module of your own: forward
                                                            keeps nothing from call to call and draws no random
                                                            numbers, so threads may run it side by side (faster on
                                                            a CPU)
    rollout_fields = {name: (shape, dtype)}                 optional: forward and forward_eval return a third value,
                                                            {name: tensor (..., *shape)}. The rollout keeps it, and
                                                            train.loss gets minibatch.<name>, the network's now, and
                                                            minibatch.old_<name>, the rollout's (engine autograd)

where `logits` is one tensor, a list with one a head, or a torch.distributions.Normal, and `value`
is (..., 1) or (...). `state` is a dict: the recurrent tensors (write the new ones into it),
"resets" (1 if an observation begins an episode: zero the recurrent state before that step),
"valid" (0 if an agent is dead: leave its state as it is).
"""

import contextlib
import functools
import inspect
import itertools
import math

import gymnasium
import numpy as np
import torch
from torch import nn

import absolute_imports  # noqa: F401  first
import emulation
import flat_spaces
import kernels
from fast import pictures, recurrent


class NetworkFault(TypeError):
    """A fault of a network; the message says what happened, what was expected, and what to do."""


# --------------------------------------------------------------------------------------------------
# What a policy must produce, and initialisation


def action_layout(space):
    """(heads, dims) of an action space: ([n, ...], 0) for Discrete and
    MultiDiscrete, (None, dims) for Box.

    Raises TypeError for any other space.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return [int(space.n)], 0
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.reshape(-1)], 0
    if isinstance(space, gymnasium.spaces.Box):
        return None, math.prod(space.shape)
    raise TypeError(f"The action space is {space}; a policy can act in Discrete, MultiDiscrete "
                    "and Box spaces.")


def orthogonal(linear, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014), zero bias, in place; returns the layer."""
    nn.init.orthogonal_(linear.weight, gain)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class Decoder(nn.Linear):
    """One linear map to logits (or means) and, as its last row, the value; log-std is
    a parameter of its own."""

    def __init__(self, hidden_size, action_space):
        self.heads, dims = action_layout(action_space)
        width = dims or sum(self.heads)
        super().__init__(hidden_size, width + 1)
        with torch.no_grad():
            # a near-uniform first policy: Andrychowicz et al. 2021, 3.2
            nn.init.orthogonal_(self.weight[:width], 0.01)
            nn.init.orthogonal_(self.weight[width:], 1.0)
            nn.init.zeros_(self.bias)
        self.log_std = nn.Parameter(torch.zeros(dims)) if dims else None

    def split(self, outputs):
        """(..., A + 1) -> logits (a tensor, a list a head, or a Normal) and value (..., 1)."""
        logits, value = outputs[..., :-1], outputs[..., -1:]
        if self.log_std is not None:
            std = self.log_std.exp().expand_as(logits)
            # this waits for a GPU
            return torch.distributions.Normal(logits, std, validate_args=False), value
        return (logits if len(self.heads) == 1 else list(logits.split(self.heads, dim=-1))), value


def begin_with(policy, log_std):
    """Have the policy's continuous actions begin with a deviation of e^log_std. TypeError if it has
    no Decoder with one, or if log_std is not within -10 and 2."""
    decoders = [module for module in policy.modules()
                if isinstance(module, Decoder) and module.log_std is not None]
    if not decoders:
        raise TypeError("this network has no models.Decoder of continuous actions, which would begin with it. "
                        "Take --policy.log-std-init 0, and begin with it in the network itself.")
    if not -10 <= log_std <= 2:
        raise TypeError("must lie within -10 and 2, deviations of 0.00005 and 7.")
    for decoder in decoders:
        nn.init.constant_(decoder.log_std, log_std)


def join_outputs(logits, value):
    """The inverse of Decoder.split, for any policy: outputs (..., A + 1) and log_std (..., A) or
    None, for kernels."""
    log_std = None
    if isinstance(logits, torch.distributions.Normal):
        logits, log_std = logits.loc, logits.scale.log()
    elif isinstance(logits, (list, tuple)):
        logits = torch.cat(list(logits), dim=-1)
    return torch.cat([logits, value.reshape(*logits.shape[:-1], 1)], dim=-1), log_std


def squash(policy, space):
    """Fit the Gaussian's samples u to the bounds of `space`, the single_action_space, number by
    number, for any policy with continuous actions.

    A number with two finite bounds becomes low + (tanh(u) + 1)/2 · (high - low) (Haarnoja et al.
    2018, appendix C). The environment clips any other, which becomes start + scale · u: start is
    the number within the bounds that is nearest to 0, scale is |start|, and 1 at least. The policy
    gets a buffer action_squash (3, A), which is saved with its weights: the middle of the bounds,
    half of their distance and its logarithm, or start, -scale and the logarithm of scale. Returns
    the policy. Raises TypeError for actions that are discrete, or if no number would change.
    """
    if not isinstance(space, gymnasium.spaces.Box):
        raise TypeError("a tanh is for continuous actions, in a Box; these environments "
                        f"act in {space}.")
    low, high = map(torch.from_numpy, action_bounds(space))
    half, start = (high - low) / 2, torch.zeros_like(low).clamp(low, high)
    between = half.isfinite() & (half > 0)
    if not between.any() and not start.any():
        raise TypeError("a tanh needs a number with a lower and a higher finite bound; the action "
                        f"space is {space}. Clip instead: --policy.squash none.")
    scale = torch.where(between, half, start.abs().clamp(min=1.0))
    bounds = torch.stack([torch.where(between, low + half, start),
                          torch.where(between, half, -scale), scale.log()]).float()
    policy.register_buffer("action_squash", bounds)
    return policy


def squashed(bounds, u):
    """The actions (..., A) of samples u; bounds: squash_of(policy)."""
    return bounds[0] + bounds[1].abs() * torch.where(bounds[1] > 0, u.tanh(), u)


def action_bounds(space):
    """(low, high) of a Box's numbers, each (A,) float64, infinite where there is none; None for another space. Many
    environments write "no bound" as a huge number, often float32's largest: within a range of over 2e9 one beyond 1e9
    counts as none."""
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    low, high = (bound.astype(np.float64).ravel() for bound in (space.low, space.high))
    vast = high / 2 - low / 2 > 1e9
    return np.where(vast & (low < -1e9), -np.inf, low), np.where(vast & (high > 1e9), np.inf, high)


def why_squash(space):
    """Why actions in this space want a tanh; None if the clip is as good. A Gaussian begins near 0 with
    a deviation near 1: clipped to bounds that are far from -1 and 1, its samples reach a small part of
    the range, or hardly anything but its ends."""
    bounds = action_bounds(space)
    if bounds is None:
        return None
    low, high = bounds
    half = (high - low) / 2
    far = (half < 0.3) | ((half > 3) & np.isfinite(half)) | (low > 1) | (high < -1)
    far &= half > 0  # a number that cannot move is left alone
    return "the bounds of actions are far from -1 and 1" if far.any() else None


def squash_of(policy):
    """What `squash` gave the policy, (3, A), for kernels.sample; None if
    all its actions are clipped."""
    return getattr(policy, "action_squash", None)


# --------------------------------------------------------------------------------------------------
# Scale: observations in deviations from their mean, rewards in deviations of the return


def merge_moments(count, mean, squares, others):
    """Add batches, each its (count, mean, sum of squared deviations), to the first three, float64
    tensors, in place and in order (Chan et al. 1979)."""
    for n, other_mean, other_squares in others:
        if n > 0:
            total, difference = count + n, other_mean - mean
            squares += other_squares + difference**2 * (count * n / total)
            mean += difference * (n / total)
            count.copy_(total)


def beyond_float32(space):
    """Whether numbers of a space may differ and be the same in float32, whose whole numbers end at 2^24."""
    return (isinstance(space, gymnasium.spaces.Box) and not np.can_cast(space.dtype, np.float32)
            and max(-space.low.astype(float).min(), space.high.astype(float).max()) > 2**24)


def flattened(observations):
    return observations.flatten(1)


MEASURE_FIRST = 1024  # steps whose observations are measured before anything is learnt; a twentieth of a run's if less


class Normalizer(nn.Module):
    """clip((x - mean) / sqrt(var + 1e-8), ±10), an element each, with the moments of all
    observations so far.

    The moments stay as they are until the trainer calls `merge`, after an epoch, so a rollout and
    the learning from it use the same moments. They are saved with the weights, and frozen in
    evaluation and in exports. read: from a batch of observations (B, *observation) to the numbers
    (B, size) that are normalised. exact: the mean is subtracted in float64; see `beyond_float32`.
    """

    def __init__(self, size, read=flattened, exact=False):
        super().__init__()
        self.read = read
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))
        # from the last merge: shift and scale of observations
        self.register_buffer("shift", torch.zeros(size, dtype=torch.float64 if exact else torch.float32))
        self.register_buffer("scale", torch.ones(size))

    def only_measures(self, step, total_timesteps):
        """Whether a rollout that began at `step` is measured and not learnt from. The first one always is."""
        few = self.count < MEASURE_FIRST and step < min(MEASURE_FIRST, total_timesteps / 20)
        return self.count == 0 or bool(few)

    def forward(self, x):
        """x (..., size) normalised, float32."""
        return ((x.to(self.shift.dtype) - self.shift).float() * self.scale).clamp(-10.0, 10.0)

    @torch.no_grad()
    def moments(self, observations, valid):
        """(count, mean, squares) of the valid rows of observations (B,
        *observation); valid (B,) uint8."""
        x, around = self.read(observations), self.mean
        x = (x.float() if x.dtype.itemsize == 2 and x.is_floating_point() else x).contiguous()
        count = float((valid != 0).sum())
        if self.shift.dtype == torch.float64 and self.count == 0:  # around 0 the squares would lose small deviations
            around = around + kernels.observation_moments(x, valid.contiguous(), around)[0] / max(count, 1.0)
        sums = kernels.observation_moments(x, valid.contiguous(), around)
        mean = sums[0] / max(count, 1.0)
        # for other ranks
        return count, (around + mean).cpu(), (sums[1] - count * mean**2).clamp(min=0.0).cpu()

    @torch.no_grad()
    def merge(self, parts):
        """Add the ranks' moments, in their order; from now on normalise with the result."""
        device = self.mean.device
        parts = [(count, mean.to(device), squares.to(device)) for count, mean, squares in parts]
        merge_moments(self.count, self.mean, self.squares, parts)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.squares / self.count.clamp(min=1.0) + 1e-8).rsqrt())


def find_normalizer(policy):
    """The Normalizer of a network's observations, or None."""
    return next((part for part in policy.modules() if isinstance(part, Normalizer)), None)


class RewardScale:
    """Keeps values near 1 whatever an environment pays. Rewards are divided by sqrt(var + 1e-8) with
    the variance of the discounted return of all agents, and are not centred (Engstrom et al. 2020).
    If the mean of the value targets is beyond FAR such deviations, the network learns values relative
    to `value_mean`, what is beyond (the shift of PopArt, van Hasselt et al. 2016). A step counts 1/e
    once it is WINDOW times as many steps ago as the discount looks ahead, 1 / (1 - gamma): a policy
    that has learnt earns other returns than before.

    All float64: `returns` (N,) are the agents' discounted returns at present, `moments` (3,) the
    count, mean and squared deviations of those so far, `targets` (3,) those of the targets; all in
    the environment's units."""

    WINDOW = 25  # a short one sees few episodes, and the scale would change with each of them
    FAR = 10.0  # below it a mean that follows the policy only moves the target of the values (docs/LOG.md)

    def __init__(self, agents, gamma):
        self.gamma, self.kept = gamma, 1.0  # kept: what the moments so far count beside a new rollout
        self.returns = torch.zeros(agents, dtype=torch.float64)
        self.moments = torch.zeros(3, dtype=torch.float64)
        self.targets = torch.zeros(3, dtype=torch.float64)

    def follow(self, rewards, resets, valid):
        """(count, mean, squares) of the discounted returns of a rollout: rewards (T, N),
        resets, valid (>= T, N)."""
        self.kept = math.exp(-len(rewards) * (1 - self.gamma) / self.WINDOW)
        around = float(self.moments[1])
        count, total, squares = kernels.return_moments(
            rewards.numpy(), valid.numpy(), resets.numpy(), self.returns.numpy(),
            float(self.gamma), around)
        mean = total / max(count, 1.0)
        return count, around + mean, max(0.0, squares - count * mean**2)

    def merge(self, moments, parts):
        """Add the ranks' moments of a rollout, in their order, to `moments` or `targets`."""
        moments[::2] *= self.kept
        merge_moments(moments[0], moments[1], moments[2], parts)

    @property
    def scale(self):
        count, _, squares = self.moments.tolist()
        return (squares / max(count, 1.0) + 1e-8) ** -0.5

    @property
    def value_mean(self):
        mean = float(self.targets[1]) * self.scale
        return mean - min(self.FAR, max(-self.FAR, mean))


# --------------------------------------------------------------------------------------------------
# MinGRU: the plain torch form, and the same through the fused kernels


def mingru_layer(x, hgp, state, resets, valid):
    """One MinGRU layer with highway gate in plain torch: x (T, N, H), hgp (T, N, 3H), state (N, H)
    -> (out (T, N, H), final state). The form for export, torch.compile and gradient checks. In float32
    and bfloat16 `MinGRU` runs the kernels in its place: to change the layer, call yours in
    `MinGRU.forward`. See kernels.mingru_cell."""
    h, g, p = hgp.chunk(3, dim=-1)
    z, candidate = torch.sigmoid(g), torch.where(h >= 0, h + 0.5, torch.sigmoid(h))
    keep, live = 1.0 - resets.to(x.dtype).unsqueeze(-1), valid.unsqueeze(-1) != 0
    states = []
    for t in range(len(x)):
        state = state * keep[t]
        state = torch.where(live[t], state + z[t] * (candidate[t] - state), state)
        states.append(state)
    return x + torch.sigmoid(p) * (torch.stack(states) - x), state


class _FusedScan(torch.autograd.Function):
    """mingru_layer through the kernels; the initial state gets no gradient
    (it is the rollout's)."""

    @staticmethod
    @kernels.unwatched
    def forward(ctx, x, hgp, state, resets, valid):
        if len(x) == 1 and not any(ctx.needs_input_grad):  # a step of a rollout: no gates are kept
            x, new = x.contiguous(), state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            out = torch.empty_like(x)
            kernels.mingru_step(hgp.contiguous()[0], x[0], new, resets[0], valid[0], out[0])
            return out, new
        states = torch.empty(len(x) + 1, *state.shape, device=x.device)
        states[0], x, hgp = state, x.detach().contiguous(), hgp.detach().contiguous()
        out, ctx.gates = torch.empty_like(x), torch.empty_like(hgp)
        kernels.mingru_scan(hgp, x, states, resets, valid, out, gates=ctx.gates)
        ctx.save_for_backward(x, hgp, states, resets, valid)
        return out, states[-1]

    @staticmethod
    def backward(ctx, grad_out, _):
        x, hgp, states, resets, valid = ctx.saved_tensors
        grad, grad_hgp, ctx.gates = grad_out.contiguous().clone(), ctx.gates, None
        # a second backward through one graph: the first has overwritten the gates
        if grad_hgp is None:
            grad_hgp = torch.empty_like(hgp)
            kernels.mingru_scan(hgp, x, states, resets, valid, torch.empty_like(x), gates=grad_hgp)
        sums = torch.empty(x.shape[1], hgp.shape[2], device=x.device)
        kernels.mingru_scan_grad(grad_hgp, x, states, resets, valid, grad, sums)
        return grad, grad_hgp, None, None, None


LONGEST = 64  # the longest time, in steps, that a channel of a new MinGRU remembers


class MinGRU(nn.Module):
    """A stack of MinGRU layers with highway gates over (T, N, hidden_size); state
    (layers, N, hidden_size)."""

    def __init__(self, hidden_size, num_layers=1):
        super().__init__()
        if num_layers < 1:
            raise ValueError(
                f"MinGRU has {num_layers} layers; it needs one at least (--rnn.name none for "
                "no recurrence)."
            )
        self.layers = nn.ModuleList(nn.Linear(hidden_size, 3 * hidden_size)
                                    for _ in range(num_layers))
        for layer in self.layers:
            for block in layer.weight.data.chunk(3):
                nn.init.orthogonal_(block, 1.0)
            # A quarter of the channels begins with time scales of 2 to LONGEST steps (chrono
            # initialisation, Tallec and Ollivier 2018): without it every channel halves its state
            # at each blank step, and nothing learns to remember (docs/LOG.md).
            nn.init.zeros_(layer.bias)
            layer.bias.data[hidden_size : hidden_size + hidden_size // 4].uniform_(1, LONGEST - 1).log_().neg_()

    def forward(self, x, state, resets, valid):
        traced = x.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
        states = []
        for i, layer in enumerate(self.layers):
            hgp = layer(x)
            scan = mingru_layer if traced or hgp.dtype not in (torch.float32, torch.bfloat16) else _FusedScan.apply
            # autocast rounds what a Linear returns, but not what a LayerNorm or an Embedding does
            x, final = scan(x.to(hgp.dtype), hgp, state[i], resets, valid)
            states.append(final)
        return x, torch.stack(states)


# --------------------------------------------------------------------------------------------------
# Policies


class _Recurrent(nn.Module):
    """forward_eval and flags that all recurrent policies share."""

    def flags(self, state, T, N, device):
        flags = (state.get("resets"), 0), (state.get("valid"), 1)
        return [torch.full((T, N), usual, dtype=torch.uint8, device=device) if flag is None else flag.view(T, N)
                for flag, usual in flags]

    def forward_eval(self, observations, state):
        """One step of N agents: (N, ...) -> logits and value of (N, ...)."""
        return squeeze_time(*self(observations.unsqueeze(0), state))


class MinGRUPolicy(_Recurrent):
    """The default policy: linear encoder, MinGRU layers with highway gates, one linear
    decoder for logits and value.

    normalize: observations go through a `Normalizer` first. The engines of fast/compiled.py and fast/fused.py
    compute the same without autograd. If `forward` is changed (here, in a subclass or by a hook),
    the trainer notices and runs `forward`; fast/verify.py says how.
    """

    def __init__(self, env, hidden_size=128, num_layers=1, normalize=False):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        inputs = math.prod(env.single_observation_space.shape)
        self.normalizer = (Normalizer(inputs, exact=beyond_float32(env.single_observation_space)) if normalize
                           else None)
        self.encoder = orthogonal(nn.Linear(inputs, hidden_size))
        self.rnn = MinGRU(hidden_size, num_layers)
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def initial_state(self, num_agents):
        return {"mingru": torch.zeros(self.num_layers, num_agents, self.hidden_size,
                                      device=self.decoder.weight.device)}

    def forward(self, observations, state):
        T, N = observations.shape[:2]
        x = observations.reshape(T, N, -1)
        x = self.encoder(x.float() if self.normalizer is None else self.normalizer(x))
        x, state["mingru"] = self.rnn(x, state["mingru"], *self.flags(state, T, N, x.device))
        return self.decoder.split(self.decoder(x))


class FeedForward(nn.Module):
    """A feed-forward policy for any flat observation; the template for your own: copy it and edit
    encode_observations and decode_actions. As it stands here, fast/compiled.py computes the same on a
    CPU without autograd."""

    def __init__(self, env, hidden_size=128):
        super().__init__()
        self.hidden_size = hidden_size
        self.encoder = nn.Sequential(
            orthogonal(nn.Linear(math.prod(env.single_observation_space.shape), hidden_size)),
            nn.ReLU(), orthogonal(nn.Linear(hidden_size, hidden_size)), nn.ReLU())
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def forward(self, observations, state=None):
        return self.decode_actions(
            self.encode_observations(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        )

    def forward_eval(self, observations, state=None):
        return self.decode_actions(self.encode_observations(observations))

    def encode_observations(self, observations, state=None):
        """(B, *observation) -> (B, hidden_size)."""
        return self.encoder(observations.flatten(1).float())

    def decode_actions(self, hidden):
        """(..., hidden_size) -> logits and value."""
        return self.decoder.split(self.decoder(hidden))


Default = FeedForward  # PufferLib's name; the default network here is MinGRUPolicy


class Separate(nn.Module):
    """Policy and value in networks of their own, two tanh layers each, without memory, for plain
    numbers. The value's errors then cannot disturb what the policy sees (Andrychowicz et al. 2021,
    3.2, on robots). As it stands here, fast/compiled.py computes the same on a CPU without autograd."""

    def __init__(self, env, hidden_size=64):
        super().__init__()
        if wants_encoding(env):
            raise TypeError(f"Separate reads plain numbers, and these observations are "
                            f"{env.env_single_observation_space}; take policy.name auto.")
        size = math.prod(env.single_observation_space.shape)
        self.actor, self.critic = (nn.Sequential(
            orthogonal(nn.Linear(size, hidden_size)), nn.Tanh(),
            orthogonal(nn.Linear(hidden_size, hidden_size)), nn.Tanh()) for _ in range(2))
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def forward(self, observations):
        x, weight, bias = observations.flatten(1).float(), self.decoder.weight, self.decoder.bias
        logits = nn.functional.linear(self.actor(x), weight[:-1], bias[:-1])
        value = nn.functional.linear(self.critic(x), weight[-1:], bias[-1:])
        return self.decoder.split(torch.cat([logits, value], dim=-1))


class _Added(nn.Module):
    """Groups of features, each through a linear map of its own, added. One map for all would let the
    thousands of features of an image drown a few numbers beside it (docs/LOG.md). normed: the groups
    whose results get a norm; not numbers, of which it would leave the signs alone if there is one."""

    def __init__(self, widths, normed, hidden_size):
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Sequential(orthogonal(nn.Linear(width, hidden_size)), *([nn.LayerNorm(hidden_size)] if norm else []))
            for width, norm in zip(widths, normed, strict=True))

    def forward(self, groups):
        return sum(linear(group) for linear, group in zip(self.maps, groups, strict=True))


class Encoded(nn.Module):
    """A feed-forward policy for observations that a linear map reads badly: images go through
    convolutions, Discrete and MultiDiscrete values become one-hot. The fields of a Dict or Tuple are
    encoded each: those without convolutions are put side by side, and join the others in `_Added`.

    env: with `env_single_observation_space`, the structured space, as emulation.py's wrappers have
    it. boards: small boards of integers or flags become planes, one a kind of piece, and go through
    convolutions as well. normalize: the other numbers go through a `Normalizer` first.
    image_encoder: makes the convolutions from an image's space. trained: as in `leaf_kinds`.
    """

    def __init__(self, env, hidden_size=128, boards=False, normalize=False, image_encoder=None, trained=()):
        super().__init__()
        space = emulation.seen_space(env)
        flat = flat_spaces.FlatObservation(space)
        self.hidden_size, self.native = hidden_size, flat_spaces.nativize_dtype(flat.dtype)
        self.leaves = [(names, leaf, kind) for (_, names, leaf), kind in
                       zip(flat.leaves, leaf_kinds(flat.leaves, boards, trained), strict=True)]
        encoders = {"image": image_encoder or _image_encoder, "board": _board_encoder}
        self.parts = nn.ModuleList(
            encoders[kind](leaf) if kind in encoders else nn.Identity()
            for _, leaf, kind in self.leaves)
        self.numbers = [math.prod(flat_spaces.space_dtype(leaf).shape)  # a Text has no shape of its own
                        for _, leaf, kind in self.leaves if kind == "numbers"]
        exact = any(beyond_float32(leaf) for _, leaf, kind in self.leaves if kind == "numbers")
        self.normalizer = (Normalizer(sum(self.numbers), self._numbers, exact)
                           if normalize and self.numbers else None)
        # an observation that lies in the space, for the widths of its features
        with torch.no_grad():
            groups = self._features(torch.from_numpy(flat.flatten(space.sample())[None]))
        widths, convolved = [group.shape[1] for group in groups], sum(kind in encoders for *_, kind in self.leaves)
        normed = [False] * (len(widths) - convolved) + [True] * convolved
        first = (_Added(widths, normed, hidden_size) if len(widths) > 1
                 else orthogonal(nn.Linear(widths[0], hidden_size)))
        # A picture's background is the same in every observation, so without norms one update can
        # push a unit below zero for good: nine in ten of Pong's units died (docs/LOG.md).
        picture = any(kind == "image" and _side(leaf) >= PICTURE for _, leaf, kind in self.leaves)
        norm = nn.LayerNorm(hidden_size) if picture else nn.Identity()
        self.encoder = nn.Sequential(first, norm, nn.ReLU())
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def _values(self, observations):
        """[(space, kind, values (B, *shape)), ...] of the fields."""
        fields, values = flat_spaces.nativize_tensor(observations, self.native), []
        for names, leaf, kind in self.leaves:
            value = fields
            for name in names:
                value = value[name]
            values.append((leaf, kind, value))
        return values

    def _numbers(self, observations):
        return self._join(self._values(observations))

    def _join(self, values):
        dtype = self.normalizer.shift.dtype
        return torch.cat([value.reshape(value.shape[0], -1).to(dtype) for _, kind, value in values
                          if kind == "numbers"], dim=1)

    def _features(self, observations):
        """The groups of features, (B, width) each: numbers and choices, if there are any, then one for
        each field that goes through convolutions."""
        features, convolved, normalised, values = [], [], None, self._values(observations)
        if self.normalizer is not None:
            normalised = iter(self.normalizer(self._join(values)).split(self.numbers, dim=1))
        for (leaf, kind, value), part in zip(values, self.parts, strict=True):
            if kind == "choices":
                sizes = ([leaf.n] if isinstance(leaf, gymnasium.spaces.Discrete)
                         else leaf.nvec.ravel().tolist())
                # plain numbers: a tensor would be copied to a GPU in each forward
                starts = torch.as_tensor(leaf.start).reshape(-1).tolist()
                columns = value.reshape(value.shape[0], -1).long().unbind(1)
                features += [nn.functional.one_hot((column - start).clamp(0, int(n) - 1),
                                                   int(n)).float()
                             for column, start, n in zip(columns, starts, sizes, strict=True)]
            elif kind == "numbers":
                features.append(value.reshape(value.shape[0], -1).float() if normalised is None
                                else next(normalised))
            else:
                convolved.append(part(value))
        return [*([torch.cat(features, dim=1)] if features else []), *convolved]

    def encode_observations(self, observations, state=None):
        """(B, *flat observation) -> (B, hidden_size)."""
        groups = self._features(observations)
        return self.encoder(groups if len(groups) > 1 else groups[0])

    forward, forward_eval, decode_actions = FeedForward.forward, FeedForward.forward_eval, FeedForward.decode_actions


class Impala(Encoded):
    """`Encoded` with IMPALA's residual network for images (Espeholt et al. 2018): for each number
    of `channels` a convolution, a max-pooling that halves the sides, and two residual blocks. It
    costs several times as much as the plain convolutions and reads varied pictures better, as
    Procgen's. TypeError if nothing seen is an image.
    """

    def __init__(self, env, hidden_size=256, channels=(16, 32, 32), normalize=False, trained=()):
        super().__init__(env, hidden_size, normalize=normalize, trained=trained,
                         image_encoder=lambda space: _residual_encoder(space, channels))
        if not any(kind == "image" for *_, kind in self.leaves):
            raise TypeError("models.Impala reads images (docs/environments.md says which spaces are), "
                            f"and none is in {env.single_observation_space}: take "
                            "policy.name auto.")


class Normalized(nn.Module):
    """A network of your own behind a `Normalizer`: it sees observations minus their mean, in
    deviations."""

    def __init__(self, env, policy):
        super().__init__()
        size = math.prod(env.single_observation_space.shape)
        if not isinstance(getattr(env, "env_single_observation_space", None),
                          gymnasium.spaces.Box | None):
            raise TypeError("train.norm_obs takes observations that are one array; a network of "
                            "your own normalises the fields of a Dict or Tuple itself "
                            "(models.Normalizer).")
        self.policy = policy
        self.normalizer = Normalizer(size, exact=beyond_float32(env.single_observation_space))

    @property
    def decoder(self):
        return self.policy.decoder

    def _normalised(self, observations, dims):
        flat = self.normalizer(observations.flatten(dims))
        return flat.view(observations.shape)

    def initial_state(self, num_agents):
        return (self.policy.initial_state(num_agents) if hasattr(self.policy, "initial_state")
                else {})

    def forward(self, observations, state):
        return over_time(self.policy, self._normalised(observations, 2), state)

    def forward_eval(self, observations, state):
        return one_step(self.policy, self._normalised(observations, 1), state)


class Board(nn.Module):
    """A feed-forward policy for stacks of planes (planes, H, W) that reads every cell with the same
    weights: 3 × 3 convolutions of `hidden_size` channels, and a 1 × 1 convolution for each cell's
    logit. What is learnt in one corner of a board holds for all of it; a linear map learns
    each place by itself.

    The first H · W actions are the cells, row after row; further ones (to pass) and the
    value read the mean of each channel. Actions that are fewer than the cells read the whole
    board through a linear map.
    """

    def __init__(self, env, hidden_size=32, num_layers=3):
        super().__init__()
        shape, (heads, _) = env.single_observation_space.shape, action_layout(env.single_action_space)
        if len(shape) != 3 or heads is None or len(heads) != 1:
            raise TypeError("models.Board reads planes (planes, H, W) and has one Discrete "
                            f"action, not {shape} and {env.single_action_space}: take "
                            "policy.name default.")
        planes, cells = shape[0], shape[1] * shape[2]
        self.convolutions = nn.ModuleList(
            orthogonal(nn.Conv2d(hidden_size if i else planes, hidden_size, 3, padding=1))
            for i in range(num_layers))
        self.cells = orthogonal(nn.Conv2d(hidden_size, 1, 1), 0.01) if heads[0] >= cells else None
        inputs, others = ((hidden_size * cells, heads[0]) if self.cells is None
                          else (hidden_size, heads[0] - cells))
        self.others = orthogonal(nn.Linear(inputs, others), 0.01) if others else None
        self.value = orthogonal(nn.Linear(hidden_size, 1), 1.0)
        self.operations = 2 * cells * sum(conv.weight.numel() for conv in self.convolutions)

    def forward_eval(self, observations, state=None):
        x = torch.relu(self.convolutions[0](observations.to(torch.float32,
                                                            memory_format=torch.channels_last)))
        for convolution in self.convolutions[1:]:
            x = x + torch.relu(convolution(x))
        logits, mean = [] if self.cells is None else [self.cells(x).flatten(1)], x.mean((2, 3))
        if self.others is not None:
            logits.append(self.others(x.flatten(1) if self.cells is None else mean))
        return torch.cat(logits, dim=1), self.value(mean)

    def forward(self, observations, state=None):
        outputs = self.forward_eval(observations.flatten(0, 1))
        return tuple(output.unflatten(0, observations.shape[:2]) for output in outputs)


PICTURE = 28  # pixels: a smaller picture is a grid, as MiniGrid's, which have 25 at most
IMAGE = 32  # pixels: a side of an array that is an image whatever its layout
KINDS = 32  # at most so many kinds of pieces on a board, and so long sides


def leaf_kind(space, boards=True):
    """How a space that is no Dict or Tuple is read: "choices" (one-hot),
    "image", "board" or "numbers"."""
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return "choices"
    if boards and _is_board(space):
        return "board"
    return "image" if _is_image(space) else "numbers"


def leaf_kinds(leaves, boards=True, trained=()):
    """leaf_kind of each of the leaves of a FlatObservation. trained: the names of the weights that the network gets, if
    there are some; it keeps a linear map of what has no convolutions among them."""
    kinds = [leaf_kind(space, boards) for *_, space in leaves]
    return ["numbers" if trained and kind in ("image", "board") and not any(f"parts.{i}." in name for name in trained)
            else kind for i, kind in enumerate(kinds)]


def seen_spaces(vecenv):
    """The spaces of the fields that an agent of a vectorized environment sees."""
    return [leaf for _, _, leaf in flat_spaces.FlatObservation(emulation.seen_space(vecenv.driver_env)).leaves]


def sees_choices(vecenv):
    """Whether an agent sees choices."""
    return any(leaf_kind(space) == "choices" for space in seen_spaces(vecenv))


def _is_image(space):
    """Three dimensions of uint8, 5 × 5 or more; of IMAGE × IMAGE or more also a plane, a stack, uint16, and floats
    within [0, 1] or [0, 255]."""
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) not in (2, 3, 4):
        return False
    if space.dtype == np.uint8 and len(space.shape) == 3:
        return _side(space) >= 5
    return _side(space) >= IMAGE and (space.dtype in (np.uint8, np.uint16) or (
        space.dtype.kind == "f" and space.low.min() == 0 and space.high.max() in (1, 255)))


def _is_board(space):
    if (not isinstance(space, gymnasium.spaces.Box) or space.dtype.kind not in "iub"
            or len(space.shape) not in (2, 3)):
        return False
    sides = sorted(space.shape)[-2:]
    return (sides[0] >= 3 and sides[1] <= KINDS
            and int(space.high.max()) - int(space.low.min()) < KINDS)


def _pieces(space):
    return range(int(space.low.min()), int(space.high.max()) + 1)


def _side(space):
    """The shorter side of an image; the smallest of its last three sizes is taken for the channels."""
    return sorted(space.shape[-3:])[-2]


def _layout(space):
    """(channels, whether they are last, layout in letters) of an image or board; a stack's images are channels too."""
    *_, rows, columns, depth = (0, *space.shape)
    last = len(space.shape) > 2 and (rows == columns or (columns != depth and depth < rows))
    sides = space.shape[-3:-1] if last else space.shape[-2:]
    letters = ["K"] * (len(space.shape) == 4) + (["H", "W", "C"] if last else ["C", "H", "W"][-len(space.shape):])
    return math.prod(space.shape) // math.prod(sides), last, f"({', '.join(letters)})"


def _scale(space):
    """What the numbers of an image are multiplied by; a small grid's are kinds of things."""
    if _side(space) < PICTURE:
        return 0.1
    return 1 / 255 if space.dtype == np.uint8 else 1 / float(space.high.max())


def wrapped(policy):
    """The network that another one, as a recurrent layer behind it, keeps in its `policy`; else the network itself. (A
    layer of torch's by that name is a part of a network.)"""
    inner = getattr(policy, "policy", None)
    return inner if isinstance(inner, nn.Module) and not type(inner).__module__.startswith("torch.") else policy


def describe(policy):
    """A network in one line, for people."""
    parameters = f"{sum(parameter.numel() for parameter in policy.parameters()):,} weights"
    if isinstance(policy, Normalized):
        return "normalised, " + describe(policy.policy)
    if isinstance(policy, MinGRUPolicy):
        first = "normalised, " if policy.normalizer is not None else ""
        return (f"{first}linear {policy.encoder.in_features} to {policy.hidden_size}, "
                f"{policy.num_layers} MinGRU, linear; {parameters}")
    inner = wrapped(policy)
    memory = {MinGRUWrapper: "MinGRU", LSTMWrapper: "LSTM", GRUWrapper: "GRU"}.get(type(policy))
    if memory is None and (kept := policy.initial_state(1) if hasattr(policy, "initial_state") else {}):
        memory = f"keeps {', '.join(kept)} from step to step"
    words = {"image": "convolutions of an image", "board": "convolutions of a board",
             "choices": "one-hot", "numbers": "numbers"}
    seen = type(inner).__name__
    if isinstance(inner, Impala):
        words["image"] = "residual convolutions of an image"
    if isinstance(inner, Encoded):
        seen = "; ".join(f"{'/'.join(names) + ' ' if names else ''}{flat_spaces.space_dtype(leaf).shape} {words[kind]}"
                         + (f" {_layout(leaf)[2]}" if kind == "image" else "") for names, leaf, kind in inner.leaves)
    return f"{seen}, {memory or 'no recurrent layer'}; {parameters}"


def wants_encoding(env, boards=False, trained=()):
    """Whether `Encoded` suits an environment's observations. trained: as in `leaf_kinds`."""
    space = getattr(env, "env_single_observation_space", None)
    return space is not None and (
        not isinstance(space, gymnasium.spaces.Box)
        or leaf_kinds([(space,)], boards, trained)[0] in ("image", "board"))


def _image_encoder(space):
    """Mnih et al. 2015 for pictures, with norms, and half of it in stride and width for those below
    64 pixels, so that as much of where things are is left; 3 × 3 convolutions that keep the size
    for small grids, as MiniGrid's."""
    channels, last, _ = _layout(space)
    side, scale = _side(space), _scale(space)
    if side >= PICTURE:
        half = 2 if side < 64 else 1
        narrow, wide = 32 // half, 64 // half
        layers = [orthogonal(pictures.BytesConvolution(channels, narrow, 8 // half, 4 // half, last, scale)),
                  pictures.NormReLU(narrow)]
        for size in ((narrow, wide, 4, 2), (wide, wide, 3, 1)):
            layers += [orthogonal(nn.Conv2d(*size)), pictures.NormReLU(wide)]
        return nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(pictures.Bytes(last, scale),
                         orthogonal(nn.Conv2d(channels, 16, 3, padding=1)), nn.ReLU(),
                         orthogonal(nn.Conv2d(16, 32, 3, padding=1)), nn.ReLU(), nn.Flatten())


class _Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels):
        super().__init__()
        self.first = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.second = orthogonal(nn.Conv2d(channels, channels, 3, padding=1), 1.0)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(torch.relu(x))))


def _residual_encoder(space, channels):
    """Espeholt et al. 2018, figure 3, right, without its LSTM."""
    first, last, _ = _layout(space)
    layers = [pictures.Bytes(last, _scale(space))]
    for inputs, outputs in itertools.pairwise((first, *channels)):
        layers += [orthogonal(nn.Conv2d(inputs, outputs, 3, padding=1)),
                   nn.MaxPool2d(3, 2, padding=1), _Residual(outputs), _Residual(outputs)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


class _Planes(nn.Module):
    """Boards (B, H, W), (B, H, W, C) or (B, C, H, W) of integers as planes (B, planes, H, W), one a
    kind of piece and channel; flags are planes already."""

    def __init__(self, space):
        super().__init__()
        self.pieces = _pieces(space)
        self.channels, self.last, _ = _layout(space)
        self.planes = self.channels * (1 if len(self.pieces) == 2 else len(self.pieces))

    def forward(self, x):
        x = pictures.channels_first(x, self.last).long() - self.pieces[0]
        if len(self.pieces) != 2:
            x = nn.functional.one_hot(x.clamp(0, len(self.pieces) - 1), len(self.pieces)).movedim(-1, 2).flatten(1, 2)
        return x.to(torch.float32, memory_format=torch.channels_last)


def _board_encoder(space):
    """One layer of 3 × 3 convolutions, which sees neighbours. Later layers see the whole board."""
    planes = _Planes(space)
    return nn.Sequential(planes, orthogonal(nn.Conv2d(planes.planes, 16, 3, padding=1)), nn.ReLU(),
                         nn.Flatten())


def _widths(input_size, hidden_size):
    """(input_size, hidden_size) of a recurrent layer; either may be left out."""
    hidden_size = hidden_size or input_size or 128
    return input_size or hidden_size, hidden_size


def encode(policy, observations):
    """(hidden (T, N, H), [lookup] or []) of observations (T, N, ...): PufferLib 2's policies return
    a lookup beside the encoded observations, and get it back."""
    hidden, lookup = policy.encode_observations(observations.flatten(0, 1)), []
    if isinstance(hidden, tuple):
        hidden, *lookup = hidden
    return hidden.unflatten(0, observations.shape[:2]), lookup


def decode(policy, hidden, *lookup):
    """Logits and value (T, N, ...) from the recurrent layer's output, hidden (T, N, H)."""
    if not lookup:
        return policy.decode_actions(hidden)
    # a policy with a lookup (PufferLib 2's) expects rows without a time axis
    logits, value = policy.decode_actions(hidden.flatten(0, 1), *lookup)
    return _with_time(logits, *hidden.shape[:2]), value.reshape(*hidden.shape[:2], 1)


def check_halves(policy, wrapper):
    """NetworkFault for a network without the two methods that recurrent layers go between."""
    missing = [name for name in ("encode_observations", "decode_actions")
               if not hasattr(policy, name)]
    if missing:
        raise NetworkFault(
            f"{type(policy).__name__} has no {' and no '.join(missing)}: {type(wrapper).__name__} "
            "puts its layers between encode_observations(observations) -> hidden and "
            "decode_actions(hidden) -> logits, value. Split its forward into these two, as "
            "models.FeedForward does, or let it do without (--rnn.name none).")


class MinGRUWrapper(_Recurrent):
    """MinGRU layers between your policy's `encode_observations` and `decode_actions`."""

    def __init__(self, env, policy, input_size=None, hidden_size=None, num_layers=1):
        super().__init__()
        check_halves(policy, self)
        input_size, hidden_size = _widths(input_size, hidden_size)
        if input_size != hidden_size:
            raise ValueError(f"MinGRU's highway needs input_size = hidden_size, got {input_size} "
                             f"and {hidden_size}.")
        self.policy = policy
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.rnn = MinGRU(hidden_size, num_layers)

    def initial_state(self, num_agents):
        device = next(self.parameters()).device
        return {"mingru": torch.zeros(self.num_layers, num_agents, self.hidden_size, device=device)}

    def forward(self, observations, state):
        T, N = observations.shape[:2]
        x, lookup = encode(self.policy, observations)
        x, state["mingru"] = self.rnn(x, state["mingru"], *self.flags(state, T, N, x.device))
        return decode(self.policy, x, *lookup)


class _TorchRecurrent(_Recurrent):
    """A recurrent layer of torch between your policy's `encode_observations` and `decode_actions`,
    reset inside a segment when an episode begins, and kept while an agent is dead. states: the
    names of its tensors in `state`.

    With a tuple of those tensors or None as the state, a call is one step of N agents, as PufferLib
    2 has it: observations (N, ...), tensors (layers, N, hidden_size) -> logits, value, their tuple.
    """

    states = ()

    def __init__(self, env, policy, input_size=None, hidden_size=None, num_layers=1):
        super().__init__()
        check_halves(policy, self)
        self.policy = policy
        self.input_size, self.hidden_size = _widths(input_size, hidden_size)
        self.num_layers = num_layers

    def _layer(self, kind):
        """nn.LSTM or nn.GRU with orthogonal weights."""
        layer = kind(self.input_size, self.hidden_size, self.num_layers)
        for name, parameter in layer.named_parameters():
            nn.init.orthogonal_(parameter, 1.0) if "weight" in name else nn.init.zeros_(parameter)
        return layer

    def initial_state(self, num_agents):
        shape, device = (self.num_layers, num_agents, self.hidden_size), next(self.parameters()).device
        return {name: torch.zeros(shape, device=device) for name in self.states}

    def _run(self, layer, observations, state):
        if not isinstance(state, dict):
            return self._one_step(observations, state)
        T, N = observations.shape[:2]
        x, lookup = encode(self.policy, observations)
        resets, valid = self.flags(state, T, N, x.device)
        memory = [state[name] for name in self.states]
        if recurrent.fits(layer, x):
            out, memory = recurrent.scan(layer, x, memory, resets, valid)
            state.update(zip(self.states, memory, strict=True))
            return decode(self.policy, out, *lookup)
        precision = contextlib.nullcontext()
        # where autocast takes these layers to float16, even if another precision was asked for
        if x.is_cuda:
            x, precision = x.float(), torch.autocast("cuda", enabled=False)
        keep, live = 1.0 - resets.to(x.dtype).unsqueeze(-1), valid.unsqueeze(-1) != 0
        # One call for each stretch without a reset or a dead step. It is one call a step if looking
        # for these waits for a GPU or breaks a traced graph.
        look = x.device.type == "cpu" and not torch.compiler.is_compiling()
        events = (resets.any(1) | (valid == 0).any(1)).tolist() if look else [True] * T
        outputs, t = [], 0
        while t < T:
            stop, whole = t + 1, not events[t] or (look and bool(live[t].all()))
            while stop < T and whole and not events[stop]:
                stop += 1
            memory = [tensor * keep[t] for tensor in memory]
            with precision:
                out, new = layer(x[t:stop], tuple(memory) if len(memory) > 1 else memory[0])
            new = new if len(memory) > 1 else [new]
            if events[t]:  # a dead agent keeps its memory, and gives out what it last gave
                new = [torch.where(live[t], after, before)
                       for after, before in zip(new, memory, strict=True)]
                out = new[0][-1:] if stop == t + 1 else out
            memory = new
            outputs.append(out)
            t = stop
        state.update(zip(self.states, memory, strict=True))
        return decode(self.policy, torch.cat(outputs), *lookup)

    def _one_step(self, observations, state):
        names = self.initial_state(len(observations))
        carried = names if state is None else dict(zip(names, state, strict=True))
        logits, value = self.forward_eval(observations, carried)
        return logits, value, tuple(carried[name] for name in names)


class LSTMWrapper(_TorchRecurrent):
    """An LSTM (Hochreiter and Schmidhuber 1997) between your policy's two methods."""

    states = ("lstm_h", "lstm_c")

    def __init__(self, env, policy, input_size=None, hidden_size=None, num_layers=1):
        super().__init__(env, policy, input_size, hidden_size, num_layers)
        self.lstm = self._layer(nn.LSTM)

    def forward(self, observations, state=None):
        return self._run(self.lstm, observations, state)


class GRUWrapper(_TorchRecurrent):
    """A GRU (Cho et al. 2014) between your policy's two methods."""

    states = ("gru_h",)

    def __init__(self, env, policy, input_size=None, hidden_size=None, num_layers=1):
        super().__init__(env, policy, input_size, hidden_size, num_layers)
        self.gru = self._layer(nn.GRU)

    def forward(self, observations, state=None):
        return self._run(self.gru, observations, state)


# --------------------------------------------------------------------------------------------------
# Calling a policy of any form


def squeeze_time(logits, value):
    """Logits and value of one step, (1, N, ...), without the time axis."""
    if isinstance(logits, torch.distributions.Normal):
        return torch.distributions.Normal(logits.loc[0], logits.scale[0], validate_args=False), value[0]
    return ([head[0] for head in logits] if isinstance(logits, (list, tuple)) else logits[0]), value[0]


@functools.lru_cache(maxsize=64)
def _parameters(function):
    return tuple(inspect.signature(function).parameters.values())


def is_plain(policy):
    """Whether a network is forward(observations) -> logits, value over a batch (B,
    *observation), without a state."""
    forward = policy.forward
    if hasattr(forward, "__func__"):  # a method of its class, which may be kept; any other may hold the network
        parameters = _parameters(forward.__func__)[1:]
    else:
        parameters = inspect.signature(forward).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1 and (
        not any(p.kind is p.VAR_POSITIONAL or p.name == "state" for p in parameters))


@contextlib.contextmanager
def on_trial(policy):
    """Within: the network may be tried; nothing of it is learnt, by a batch norm neither, and torch's random numbers go
    on afterwards as if it had not been."""
    learning = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module in learning:
            module.training = True


def find_form(policy, space):
    """PufferLib 3's networks without memory take a state all the same. Find out and remember
    whether such a forward takes a batch (B, *observation) or time (T, N, *observation): try it once
    on zeros, without changing the network or torch's random numbers."""
    if type(policy).forward is nn.Module.forward and "forward" not in vars(policy):
        raise NetworkFault(f"{type(policy).__name__} has no forward(observations) -> logits, value. Of CleanRL's actor "
                           "and critic make: def forward(self, x): return self.actor(x), self.critic(x)")
    known = any(hasattr(policy, name) for name in ("initial_state", "takes_batches"))
    ours = [kind.forward for kind in (FeedForward, Encoded, Normalized, Board)]
    if known or is_plain(policy) or type(policy).forward in ours:
        return
    parameter = next(policy.parameters(), torch.zeros(()))
    zeros = torch.from_numpy(np.zeros((2, 3, *space.shape), space.dtype)).to(parameter.device)
    policy.takes_batches = False
    with on_trial(policy):
        try:
            over_time(policy, zeros, {})
        except Exception as error:
            policy.takes_batches = True
            try:
                over_time(policy, zeros, {})
            except Exception:
                del policy.takes_batches
                raise error from None


def over_time(policy, observations, state, forward=None):
    """Logits and value (T, N, ...) of T steps of N agents by any policy; forward: what to call in
    its place, for one that torch.compile has made of it."""
    forward, (T, N) = policy if forward is None else forward, observations.shape[:2]
    form, given = "(T, N, *observation), T steps of N agents, and a state", observations
    plain = is_plain(policy)
    batch = plain or getattr(policy, "takes_batches", False)
    if batch:
        form, given = "(B, *observation), a batch without time", observations.flatten(0, 1)
    with _shapes_explained(policy, form, given):
        outputs = forward(given) if plain else forward(given, state)
        logits, value = _take_outputs(policy, "forward", outputs, state)
        first = logits.loc if isinstance(logits, torch.distributions.Normal) else logits
        first = first[0] if isinstance(first, (list, tuple)) else first
        if not (isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor)):
            raise no_pair(policy, "forward", outputs)
        size = f"{T * N}" if batch else f"{T}, {N}"
        if first.shape[:-1] != given.shape[: 1 if batch else 2] or value.numel() != T * N:
            raise NetworkFault(f"{type(policy).__name__} was given observations "
                               f"{tuple(given.shape)}, {form}; the shapes of its logits and value "
                               f"are {tuple(first.shape)} and {tuple(value.shape)}, expected "
                               f"({size}, actions) and ({size}, 1). (models.py says what a "
                               "network must have)")
        if batch:
            logits, value = _with_time(logits, T, N), value.reshape(T, N, 1)
            state |= _map_fields(state, lambda field: field.unflatten(0, (T, N)))
    return logits, value


def check_logits(policy, outputs, log_std, heads, dims):
    """NetworkFault unless what join_outputs gave, outputs (..., A + 1), is for these action heads,
    or, if they are None, for so many dimensions."""
    got, name = outputs.shape[-1] - 1, type(policy).__name__
    if heads is not None and log_std is not None:
        raise NetworkFault(f"{name} returns a Normal, which is for continuous actions; these "
                           f"environments want a choice of {' and of '.join(map(str, heads))}, so "
                           "return logits.")
    if heads is None and log_std is None:
        raise NetworkFault(f"{name} returns logits, which are for choices; these environments want "
                           f"{dims} continuous numbers, so return a torch.distributions.Normal.")
    wanted = dims if heads is None else sum(heads)
    if got != wanted:
        each = f" ({' + '.join(map(str, heads))})" if heads is not None and len(heads) > 1 else ""
        raise NetworkFault(f"{name} returns {got} {'means' if heads is None else 'logits'} for an "
                           f"observation; these environments want {wanted}{each}: take "
                           "the number from env.single_action_space.")


def are_probabilities(outputs, heads):
    """Whether outputs (..., A + 1) hold probabilities in the place of logits: those of each head lie within 0 and 1,
    and their sum is 1."""
    parts = [part for part in outputs[..., :-1].split(heads, -1) if part.shape[-1] > 1]
    return bool(parts) and all(part.min() >= 0 and (part.sum(-1) - 1).abs().max() < 0.01 for part in parts)


def _take_outputs(policy, method, outputs, state):
    """Return logits and value of a network's result; its rollout_fields become state["fields"]."""
    fields = getattr(policy, "rollout_fields", None)
    try:
        logits, value = outputs[:2] if fields else outputs
        if fields:
            state["fields"] = {name: outputs[2][name] for name in fields}
    except (TypeError, ValueError, LookupError):
        raise no_pair(policy, method, outputs) from None
    return logits, value


def _map_fields(state, function):
    """Return {"fields": ...} with the function of each of them; {} if there are none."""
    return {"fields": {name: function(field) for name, field in state["fields"].items()}} if "fields" in state else {}


def no_pair(policy, method, outputs):
    """The NetworkFault for a result that is not (logits, value)."""
    parts = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    got = [f"{type(one).__name__} {tuple(one.shape)}" if isinstance(one, torch.Tensor)
           else type(one).__name__
           for one in parts]
    got = f"a {got[0]}" if parts is not outputs else f"{len(parts)}: {', '.join(got)}"
    fields = getattr(policy, "rollout_fields", None)
    wanted = f"(logits, value, {{{', '.join(fields)}}})" if fields else "(logits, value)"
    return NetworkFault(f"{type(policy).__name__}.{method} must return {wanted}, got {got}; "
                        "value is one number for each observation. (models.py says what a "
                        "network must have)")


def _with_time(logits, T, N):
    if isinstance(logits, torch.distributions.Normal):
        return torch.distributions.Normal(*(x.unflatten(0, (T, N))
                                            for x in (logits.loc, logits.scale)),
                                          validate_args=False)
    if isinstance(logits, (list, tuple)):
        return [head.unflatten(0, (T, N)) for head in logits]
    return logits.unflatten(0, (T, N))


@contextlib.contextmanager
def _shapes_explained(policy, form, observations):
    """Add to errors about shapes what the network was given, and in which form."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if any(word in str(error) for word in ("shape", "size", "dimension", "dim ")):
            error.add_note(
                f"{type(policy).__name__} was given observations {tuple(observations.shape)}, "
                f"{form}. A network without memory is forward(observations) over (B, "
                "*observation); one that takes a state sees time, forward(observations, state) "
                "over (T, N, *observation), with forward_eval(observations, state) over (N, "
                "*observation) for one step. Each returns logits and value. (models.py)")
        raise


def one_step(policy, observations, state):
    """Logits and value (N, ...) of one step of N agents, for policies with and without
    forward_eval. `state` holds the recurrent tensors, updated, and the flags of this step, (N,)."""
    if hasattr(policy, "forward_eval"):
        with _shapes_explained(policy, "(N, *observation), one step of N agents", observations):
            outputs = policy.forward_eval(observations, state)
        return _take_outputs(policy, "forward_eval", outputs, state)
    flags = {name: state[name].unsqueeze(0) for name in ("resets", "valid")
             if state.get(name) is not None}
    timed = {**state, **flags}
    logits, value = over_time(policy, observations.unsqueeze(0), timed)
    timed |= _map_fields(timed, lambda field: field.squeeze(0))
    state.update({name: tensor for name, tensor in timed.items() if name not in flags})
    return squeeze_time(logits, value)


def sample_logits(logits, value, *, seed, step, first_agent=0, heads=None, masks=None, squash=None,
                  deterministic=False):
    """Draw actions from any policy's outputs through kernels.sample: logits as in this file's
    docstring, over (N, ...).

    `heads`: the sizes of the action heads, if one tensor of logits holds several; squash:
    squash_of(policy). Returns actions (N, heads) int32 or (N, dims) float32, joint
    log-probabilities (N,), values (N,).
    """
    outputs, log_std = join_outputs(logits, value)
    outputs, n = outputs.detach().float().contiguous(), len(outputs)
    if log_std is None:
        sizes = heads or [head.shape[-1]
                          for head in (logits if isinstance(logits, (list, tuple)) else [logits])]
        heads = torch.tensor(sizes)
        actions = outputs.new_empty(n, len(sizes), dtype=torch.int32)
    else:
        heads, log_std = None, log_std.detach().float().contiguous()
        actions = outputs.new_empty(n, log_std.shape[-1])
    logprobs, values = outputs.new_empty(n), outputs.new_empty(n)
    kernels.sample(outputs, actions, logprobs, values, seed=seed, step=step,
                   first_agent=first_agent, heads=heads,
                   log_std=log_std, masks=masks, squash=squash, deterministic=deterministic,
                   samples=None if squash is None else torch.empty_like(actions))
    return actions, logprobs, values


# --------------------------------------------------------------------------------------------------
# CleanRL's two agents over any policy of this file: the whole loop in this form is in
# docs/recipes.md, and tested


def _distributions(logits):
    """One torch distribution a head (or dimension) from a policy's logits."""
    if isinstance(logits, torch.distributions.Normal):
        return [torch.distributions.Independent(logits, 1)]
    heads = logits if isinstance(logits, (list, tuple)) else [logits]
    return [torch.distributions.Categorical(logits=head) for head in heads]


def act(logits, action=None):
    """(action, log-probability, entropy) of the joint distribution; draws the
    action if it is None."""
    parts = _distributions(logits)
    single = len(parts) == 1
    if action is None:
        action = parts[0].sample() if single else torch.stack([part.sample() for part in parts],
                                                              dim=-1)
    columns = [action] if single else action.unbind(-1)
    logprob = sum(part.log_prob(column) for part, column in zip(parts, columns, strict=True))
    return action, logprob, sum(part.entropy() for part in parts)


class CleanRLAgent(nn.Module):
    """The agent of CleanRL's ppo.py over a feed-forward policy, that of ppo_atari_lstm.py over a recurrent one.

    x (B, *observation): get_value(x) -> (B, 1); get_action_and_value(x, action=None) -> action (B,)
    or (B, heads or dims), logprob (B,), entropy (B,), value (B, 1).
    Of a recurrent policy: get_value(x, state, done); get_action_and_value(x, state, done,
    action=None) -> the same, and the new state. `state` is a tuple of tensors (layers, N, size),
    from initial_state(N); x (T·N, *observation) holds T steps of N agents, time outside, and done
    (T·N,) is 1 if an observation begins an episode. Without a state x is one step of agents that
    begin, and without done none begins.
    """

    def __init__(self, policy):
        super().__init__()
        if squash_of(policy) is not None:
            raise NetworkFault(f"{type(policy).__name__} squashes its actions by a tanh (models.squash), which "
                               "CleanRL's loops do not do. Make the policy without, or train it with PuffeRL.")
        self.policy = policy
        self.has_memory = bool(policy.initial_state(1)) if hasattr(policy, "initial_state") else False

    def initial_state(self, num_agents):
        return tuple(self.policy.initial_state(num_agents).values())

    def _run(self, x, state=None, done=None):
        if not self.has_memory:
            return *getattr(self.policy, "forward_eval", self.policy)(x), ()
        state = self.initial_state(len(x)) if state is None else state
        names, N = list(self.policy.initial_state(1)), state[0].shape[1]
        T = len(x) // N
        done = torch.zeros(T, N) if done is None else done.reshape(T, N)
        carried = {**dict(zip(names, state, strict=True)), "resets": done.to(x.device, torch.uint8),
                   "valid": torch.ones(T, N, dtype=torch.uint8, device=x.device)}
        logits, value = self.policy(x.reshape(T, N, *x.shape[1:]), carried)
        if isinstance(logits, torch.distributions.Normal):
            logits = torch.distributions.Normal(logits.loc.flatten(0, 1),
                                                logits.scale.flatten(0, 1))
        elif isinstance(logits, (list, tuple)):
            logits = [head.flatten(0, 1) for head in logits]
        else:
            logits = logits.flatten(0, 1)
        return logits, value.reshape(T * N, 1), tuple(carried[name] for name in names)

    def get_value(self, x, state=None, done=None):
        return self._run(x, state, done)[1]

    def get_action_and_value(self, x, *arguments, action=None):
        """arguments: (action,), or of a recurrent policy (state, done, action); each may be left out."""
        count = 2 if self.has_memory else 0
        logits, value, state = self._run(x, *arguments[:count])
        result = *act(logits, *arguments[count:] or (action,)), value
        return (*result, state) if self.has_memory else result


RecurrentCleanRLAgent = CleanRLAgent
