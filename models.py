"""Define the networks, and the contract of a policy.

    policy = MinGRUPolicy(env, hidden_size=64, num_layers=2)    # linear, MinGRU layers, linear
    policy = FeedForward(env, hidden_size=128)                  # no memory
    policy = Separate(env, hidden_size=64)                      # policy and value apart, no memory
    policy = Board(env, hidden_size=32)                         # convolutions over a board's planes
    policy = Impala(env, hidden_size=256)                       # residual convolutions of images
    policy = LSTMWrapper(env, MyPolicy(env), hidden_size=128)   # makes a custom network recurrent,
                                                                # as GRUWrapper and MinGRUWrapper do
    agent = CleanRLAgent(FeedForward(env))                      # for CleanRL's ppo.py
    python pufferl.py train breakout --policy.name my_file.py:MyPolicy --rnn.name lstm

`env` is any object with `single_observation_space` and `single_action_space`. To write a custom
network, copy `FeedForward` and edit it. The trainer expects an nn.Module with:

    forward(observations) -> logits, value
        over a batch (B, ...), for a network without memory; or with memory:
    forward(observations, state) -> logits, value
        over (T, N, ...): T steps of N agents
    forward_eval(observations, state) -> logits, value
        optional: the same over (N, ...), one step, for the rollout
    initial_state(num_agents) -> dict
        optional: recurrent tensors, each (layers, N, size). The trainer reads the shapes, and
        starts with zeros
    thread_safe = True
        optional, in the class of each custom module: forward keeps nothing between calls and draws
        no random numbers, so threads may call it at the same time (faster on a CPU)
    rollout_fields = {name: (shape, dtype)}
        optional: forward and forward_eval return a third value, {name: tensor (..., *shape)}. The
        rollout stores it; train.loss gets the network's present one as minibatch.<name> and the
        rollout's as minibatch.old_<name> (engine autograd)

`logits` is one tensor, a list with one per head, or a torch.distributions.Normal; `value` is (...,
1) or (...). `state` is a dict: the recurrent tensors (write the new ones into it), "resets" (1 if
an observation begins an episode: zero the recurrent state before that step), "valid" (0 if an agent
is inactive: leave its state as it is).
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
import operator

import gymnasium
import numpy as np
import torch
from torch import nn

import absolute_imports  # noqa: F401  first
import auto
import configuration
import data_parallel
import emulation
import flat_spaces
import kernels
import runs
from arena import without_torch_function
from errors import ConfigError, NetworkError
from fast import pictures, recurrent
from flat_spaces import PICTURE, action_bounds, leaf_kind, shorter_side

# --------------------------------------------------------------------------------------------------
# Actions, initialisation and the decoder


def orthogonal(linear, gain=2**0.5):
    """Initialise orthogonal weights and zero bias in place; return the layer.

    Saxe et al. 2014.
    """
    nn.init.orthogonal_(linear.weight, gain)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class Decoder(nn.Linear):
    """One linear map to logits (or means) and, as its last row, the value.

    The log-std is a parameter, the same for all observations.
    """

    def __init__(self, hidden_size, action_space):
        action = flat_spaces.FlatAction(action_space)
        self.heads = action.heads or None
        width = sum(action.heads) or action.columns
        super().__init__(hidden_size, width + 1)
        with torch.no_grad():
            # a near-uniform first policy: Andrychowicz et al. 2021, 3.2
            nn.init.orthogonal_(self.weight[:width], 0.01)
            nn.init.orthogonal_(self.weight[width:], 1.0)
            nn.init.zeros_(self.bias)
        self.log_std = None if self.heads else nn.Parameter(torch.zeros(width))

    def split(self, outputs):
        """Return logits and value (..., 1) of outputs (..., A + 1).

        logits: a tensor, a list with one per head, or a Normal.
        """
        logits, value = outputs[..., :-1], outputs[..., -1:]
        if self.log_std is not None:
            std = self.log_std.exp().expand_as(logits)
            return torch.distributions.Normal(logits, std, validate_args=False), value
        return (logits if len(self.heads) == 1 else list(logits.split(self.heads, dim=-1))), value


def map_logits(function, logits):
    """Return logits of any form with `function` of each tensor."""
    if isinstance(logits, torch.distributions.Normal):
        # validate_args would wait for the GPU
        return torch.distributions.Normal(function(logits.loc), function(logits.scale),
                                          validate_args=False)
    if isinstance(logits, (list, tuple)):
        return [function(head) for head in logits]
    return function(logits)


def join_outputs(logits, value):
    """Return outputs (..., A + 1) and log_std (..., A) or None, for kernels.

    Both are float32. The inverse of Decoder.split, for any policy.
    """
    log_std = None
    if isinstance(logits, torch.distributions.Normal):
        logits, log_std = logits.loc, logits.scale.log().float().contiguous()
    elif isinstance(logits, (list, tuple)):
        logits = torch.cat(list(logits), dim=-1)
    outputs = torch.cat([logits, value.reshape(*logits.shape[:-1], 1)], dim=-1)
    return outputs.float().contiguous(), log_std


def squash(policy, space):
    """Make a policy map the Gaussian's samples u to the bounds of `space`.

    For any policy with continuous actions; space: the single_action_space. A number with two finite
    bounds becomes low + (tanh(u) + 1)/2 · (high - low) (Haarnoja et al. 2018, appendix C). The
    environment clips any other, which becomes start + scale · u: start is the number within the
    bounds that is nearest to 0, scale is |start|, at least 1.

    The policy gets a buffer action_squash (3, A), which is saved with its weights: the middle of
    the bounds, half of their distance and its logarithm, or start, -scale and the logarithm of
    scale. Returns the policy. Raises NetworkError for discrete actions, or if no number would
    change.
    """
    if not isinstance(space, gymnasium.spaces.Box):
        raise NetworkError(f"policy.squash = tanh: the actions are not a Box, but {space}. Set "
                           "it to none.")
    low, high = map(torch.from_numpy, action_bounds(space))
    half, start = (high - low) / 2, torch.zeros_like(low).clamp(low, high)
    is_bounded = half.isfinite() & (half > 0)
    if not is_bounded.any() and not start.any():
        raise NetworkError(f"policy.squash = tanh: no dimension of {space} has two finite bounds. "
                           "Set it to none.")
    scale = torch.where(is_bounded, half, start.abs().clamp(min=1.0))
    bounds = torch.stack([torch.where(is_bounded, low + half, start),
                          torch.where(is_bounded, half, -scale), scale.log()]).float()
    policy.register_buffer("action_squash", bounds)
    return policy


def squashed(bounds, u):
    """Return the actions (..., A) of samples u; bounds: squash_of(policy)."""
    return bounds[0] + bounds[1].abs() * torch.where(bounds[1] > 0, u.tanh(), u)


def squash_of(policy):
    """Return the policy's action_squash (3, A); None if all its actions are clipped."""
    return getattr(policy, "action_squash", None)


# --------------------------------------------------------------------------------------------------
# Scale: observations in deviations from their mean, rewards in deviations of the return


def merge_moments(count, mean, squares, batches):
    """Add batches of moments to (count, mean, squares), in place and in order.

    A batch is (count, mean, sum of squared deviations); the first three arguments are float64
    tensors (Chan et al. 1979).
    """
    for n, other_mean, other_squares in batches:
        if n > 0:
            total, shift = count + n, other_mean - mean
            squares += other_squares + shift**2 * (count * n / total)
            mean += shift * (n / total)
            count.copy_(total)


def exceeds_float32(space):
    """Return whether a space has numbers that float32 cannot tell apart.

    float32 has all whole numbers up to 2^24.
    """
    return (isinstance(space, gymnasium.spaces.Box) and not np.can_cast(space.dtype, np.float32)
            and max(-space.low.astype(float).min(), space.high.astype(float).max()) > 2**24)


# steps that are measured before the network learns; a twentieth of a run's if that is less
MEASURE_FIRST = 1024


class Normalizer(nn.Module):
    """clip((x - mean) / sqrt(var + 1e-8), ±10) per element, over all observations.

    The moments change only when the trainer calls `merge`, after an epoch, so a rollout and the
    learning from it use the same ones. They are saved with the weights, and frozen in evaluation
    and in exports. read: a function from observations (B, *observation) to the numbers (B, size) to
    normalise; None if all are. exact: subtract the mean in float64; see `exceeds_float32`.
    """

    thread_safe = True  # `forward` does not call `read`

    def __init__(self, size, read=None, exact=False):
        super().__init__()
        self.read = read
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))
        # from the last merge: shift and scale of observations
        self.register_buffer("shift", torch.zeros(size, dtype=torch.float64 if exact
                                                  else torch.float32))
        self.register_buffer("scale", torch.ones(size))

    def is_warmup(self, step, total_timesteps):
        """Return whether the rollout that starts at `step` is not learnt from.

        It then only sets the moments. True for the first rollout.
        """
        is_early = self.count < MEASURE_FIRST and step < min(MEASURE_FIRST, total_timesteps / 20)
        return self.count == 0 or bool(is_early)

    def forward(self, x):
        """Return x (..., size) normalised, float32."""
        return ((x.to(self.shift.dtype) - self.shift).float() * self.scale).clamp(-10.0, 10.0)

    @torch.no_grad()
    def moments(self, observations, valid):
        """Return (count, mean, squares) of the valid rows of observations.

        observations (B, *observation), valid (B,) uint8.
        """
        x = observations.flatten(1) if self.read is None else self.read(observations)
        center = self.mean
        x = (x.float() if x.dtype.itemsize == 2 and x.is_floating_point() else x).contiguous()
        count = float((valid != 0).sum())
        # around 0 the squares would lose small deviations
        if self.shift.dtype == torch.float64 and self.count == 0:
            center = center + kernels.observation_moments(x, valid.contiguous(),
                                                          center)[0] / max(count, 1.0)
        sums = kernels.observation_moments(x, valid.contiguous(), center)
        mean = sums[0] / max(count, 1.0)
        # on the CPU, for other ranks
        return count, (center + mean).cpu(), (sums[1] - count * mean**2).clamp(min=0.0).cpu()

    @torch.no_grad()
    def merge(self, moments):
        """Add the ranks' moments, in order, and normalise with the result from now on."""
        device = self.mean.device
        moments = [(count, mean.to(device), squares.to(device)) for count, mean, squares in moments]
        merge_moments(self.count, self.mean, self.squares, moments)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.squares / self.count.clamp(min=1.0) + 1e-8).rsqrt())


def find_normalizer(policy):
    """Return the Normalizer of a network's observations, or None."""
    return next((module for module in policy.modules() if isinstance(module, Normalizer)), None)


class RewardScale:
    """A scale for rewards that keeps values near 1 for any environment.

    Rewards are divided by sqrt(var + 1e-8), with the variance of the discounted return of all
    agents, and are not centred (Engstrom et al. 2020). If the mean of the value targets exceeds FAR
    such deviations, the network learns values relative to `value_offset`, the excess (the shift of
    PopArt, van Hasselt et al. 2016). A step's weight falls to 1/e after WINDOW discount horizons, 1
    / (1 - gamma) steps each, because the returns change while the policy learns.

    All float64, in the environment's units: `returns` (N,) are the agents' discounted returns,
    `moments` (3,) the count, mean and squared deviations of all returns, `targets` (3,) the same of
    the value targets.
    """

    WINDOW = 25  # horizons; a shorter one has few episodes, each of which changes the scale
    # smaller means stay: they change with the policy and would only move the value targets
    # (docs/findings.md)
    FAR = 10.0

    def __init__(self, agents, gamma, window=WINDOW):
        # decay: the weight of earlier moments when a rollout is added
        self.gamma = gamma
        self.window = window
        self.decay = 1.0
        self.returns = torch.zeros(agents, dtype=torch.float64)
        self.moments = torch.zeros(3, dtype=torch.float64)
        self.targets = torch.zeros(3, dtype=torch.float64)

    def measure_returns(self, rewards, resets, valid):
        """Return (count, mean, squares) of the discounted returns of a rollout.

        Continues `returns` (N,), and sets the `decay` of the next `merge`. rewards (T, N); resets,
        valid (>= T, N).
        """
        self.decay = math.exp(-len(rewards) * (1 - self.gamma) / self.window)
        center = float(self.moments[1])
        count, total, squares = kernels.return_moments(
            rewards.numpy(), valid.numpy(), resets.numpy(), self.returns.numpy(),
            float(self.gamma), center)
        mean = total / max(count, 1.0)
        return count, center + mean, max(0.0, squares - count * mean**2)

    def merge(self, moments, rank_moments):
        """Add the ranks' moments of a rollout, in order, to `moments` or `targets`."""
        moments[::2] *= self.decay
        merge_moments(moments[0], moments[1], moments[2], rank_moments)

    @property
    def factor(self):
        count, _, squares = self.moments.tolist()
        return (squares / max(count, 1.0) + 1e-8) ** -0.5

    @property
    def value_offset(self):
        mean = float(self.targets[1]) * self.factor
        return mean - min(self.FAR, max(-self.FAR, mean))


# --------------------------------------------------------------------------------------------------
# Exploration: a bonus for observations that are new to the run (train.bonus)


class RND(nn.Module):
    """Measure novelty by random network distillation (Burda et al. 2018).

    A network learns to predict the features of a fixed, random network. The novelty of an
    observation is its mean squared error. env: with any spaces that `MultiInputPolicy` reads.
    """

    CHUNK = 512  # observations of a gradient step

    def __init__(self, env, device, hidden_size=64):
        super().__init__()
        self.target = MultiInputPolicy(env, hidden_size, boards=True, normalize=True)
        self.target.requires_grad_(False)
        self.encoder = MultiInputPolicy(env, hidden_size, boards=True, normalize=True)
        self.target.normalizer = self.encoder.normalizer
        self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(),
                                  nn.Linear(hidden_size, hidden_size))
        self.to(device)
        self.optimizer = torch.optim.Adam(
            [*self.encoder.parameters(), *self.head.parameters()], lr=1e-3)

    def forward(self, observations):
        """Return the novelty (B,) of observations (B, *observation)."""
        prediction = self.head(self.encoder.encode_observations(observations))
        return (prediction - self.target.encode_observations(observations)).square().mean(1)

    def update(self, observations, valid):
        """Return the novelty (B,), then learn the valid observations (B, *observation)."""
        if (normalizer := self.encoder.normalizer) is not None:
            normalizer.merge([normalizer.moments(observations, valid)])
        with torch.no_grad():
            novelty = torch.cat([self(chunk) for chunk in observations.split(self.CHUNK)])
        for chunk in filter(len, observations[valid != 0].split(self.CHUNK)):
            self.optimizer.zero_grad()
            self(chunk).mean().backward()
            self.optimizer.step()
        return novelty

    def get_extra_state(self):
        return self.optimizer.state_dict()

    def set_extra_state(self, state):
        self.optimizer.load_state_dict(state)


class Counts(nn.Module):
    """Measure novelty by counts, 1 / sqrt(visits) (Strehl and Littman 2008).

    Observations are integers. Those that differ in one bit are different. Raises ConfigError for
    floats.
    """

    def __init__(self, env, device):
        super().__init__()
        dtype = np.dtype(emulation.FlatObservation(emulation.declared_space(env)).dtype)
        if dtype.kind not in "iub":
            raise ConfigError(f"train.bonus = count: observations of {dtype} are hardly ever "
                              "equal. Use rnd.")
        self.visits = {}  # digest of an observation -> how often it was met

    def update(self, observations, valid):
        """Return the novelty (B,), and count the valid observations (B, *observation)."""
        rows = observations.cpu().numpy().reshape(len(observations), -1)
        distinct, places = np.unique(rows, axis=0, return_inverse=True)
        is_valid = valid.cpu().numpy() != 0
        counts = np.bincount(places.ravel(), weights=is_valid, minlength=len(distinct))
        keys = [hashlib.blake2b(row, digest_size=8).digest() for row in distinct]
        for key, count in zip(keys, counts.astype(int).tolist(), strict=True):
            self.visits[key] = self.visits.get(key, 0) + count
        visits = np.array([self.visits[key] for key in keys], np.float32)
        novelty = torch.from_numpy(visits.clip(1) ** -0.5)
        return novelty[places.ravel()].to(observations.device)

    def get_extra_state(self):
        return {"keys": list(self.visits), "visits": list(self.visits.values())}

    def set_extra_state(self, state):
        self.visits = dict(zip(state["keys"], state["visits"], strict=True))


class Bonus(nn.Module):
    """Compute a step's bonus: how new the observation is that follows it.

    Bonuses are divided by the standard deviation of their discounted returns over the run. These
    returns continue across the ends of episodes (Burda et al. 2018). The observation after an
    episode's end is another episode's, so that step has no bonus. name: rnd or count.
    """

    GAMMA = 0.99

    def __init__(self, name, env, agents, device):
        super().__init__()
        self.novelty = {"rnd": RND, "count": Counts}[name](env, device)
        self.scale = RewardScale(agents, self.GAMMA, window=math.inf)
        self.register_buffer("returns", self.scale.returns)
        self.register_buffer("moments", self.scale.moments)

    def update(self, observations, resets, valid):
        """Return the bonuses (T, N) of a rollout.

        observations (T+1, N, ...), resets, valid (T+1, N).
        """
        T, N = len(observations) - 1, observations.shape[1]
        counted = (valid[1:] != 0) & (resets[1:] == 0)
        novelty = self.novelty.update(observations[1:].flatten(0, 1), valid[1:].flatten())
        bonuses = (novelty.view(T, N) * counted).float()
        rollout = bonuses.cpu(), torch.zeros_like(resets, device="cpu"), valid.cpu()
        self.scale.merge(self.scale.moments, [self.scale.measure_returns(*rollout)])
        return bonuses * self.scale.factor


# --------------------------------------------------------------------------------------------------
# MinGRU in plain torch, and through the fused kernels


def mingru_layer(x, hgp, state, resets, valid):
    """Compute one MinGRU layer with highway gate in plain torch.

    x (T, N, H), hgp (T, N, 3H) (see kernels.py), state (N, H) -> (out (T, N, H), final state). For
    export, torch.compile and gradient checks. In float32 and bfloat16 `MinGRU` runs the kernels
    instead: to change the layer, call yours in `MinGRU.forward`. See kernels.mingru_cell.
    """
    h, g, p = hgp.chunk(3, dim=-1)
    z, candidate = torch.sigmoid(g), torch.where(h >= 0, h + 0.5, torch.sigmoid(h))
    keep_state, is_valid = 1.0 - resets.to(x.dtype).unsqueeze(-1), valid.unsqueeze(-1) != 0
    states = []
    for t in range(len(x)):
        state = state * keep_state[t]
        state = torch.where(is_valid[t], state + z[t] * (candidate[t] - state), state)
        states.append(state)
    return x + torch.sigmoid(p) * (torch.stack(states) - x), state


class _FusedScan(torch.autograd.Function):
    """mingru_layer through the kernels.

    The initial state gets no gradient, because it is the rollout's.
    """

    @staticmethod
    @without_torch_function
    def forward(ctx, x, hgp, state, resets, valid):
        if len(x) == 1 and not any(ctx.needs_input_grad):  # a step of a rollout saves no gates
            x, final_state = x.contiguous(), state.to(torch.float32, copy=True,
                                                      memory_format=torch.contiguous_format)
            out = torch.empty_like(x)
            kernels.mingru_step(hgp.contiguous()[0], x[0], final_state, resets[0], valid[0], out[0])
            return out, final_state
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


LONGEST_MEMORY = 64  # the longest time, in steps, that a channel of a new MinGRU remembers


class MinGRU(nn.Module):
    """A stack of MinGRU layers with highway gates over (T, N, hidden_size).

    state (layers, N, hidden_size).
    """

    def __init__(self, hidden_size, num_layers=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, 3 * hidden_size)
                                    for _ in range(num_layers))
        for layer in self.layers:
            for block in layer.weight.data.chunk(3):
                nn.init.orthogonal_(block, 1.0)
            # A quarter of the channels begins with time scales of 2 to LONGEST_MEMORY steps (chrono
            # initialisation, Tallec and Ollivier 2018): without it every channel halves its state
            # at each blank step, and nothing learns to remember (docs/findings.md).
            nn.init.zeros_(layer.bias)
            slow = layer.bias.data[hidden_size : hidden_size + hidden_size // 4]
            slow.uniform_(1, LONGEST_MEMORY - 1).log_().neg_()

    def forward(self, x, state, resets, valid):
        traced = (x.device.type not in ("cpu", "cuda") or torch.compiler.is_compiling()
                  or torch.onnx.is_in_onnx_export())
        states = []
        for i, layer in enumerate(self.layers):
            hgp = layer(x)
            scan = (mingru_layer if traced or hgp.dtype not in (torch.float32, torch.bfloat16)
                    else _FusedScan.apply)
            # autocast rounds what a Linear returns, but not what a LayerNorm or an Embedding does
            x, final = scan(x.to(hgp.dtype), hgp, state[i], resets, valid)
            states.append(final)
        return x, torch.stack(states)


# --------------------------------------------------------------------------------------------------
# Policies


class _Recurrent(nn.Module):
    """The state, the flags and the single step of all recurrent policies.

    states: the names of the recurrent tensors (num_layers, N, hidden_size) in `state`.
    """

    states = ("mingru",)

    def initial_state(self, num_agents):
        shape = self.num_layers, num_agents, self.hidden_size
        device = next(self.parameters()).device
        return {name: torch.zeros(shape, device=device) for name in self.states}

    def flags(self, state, T, N, device):
        flags = (state.get("resets"), 0), (state.get("valid"), 1)
        return [torch.full((T, N), usual, dtype=torch.uint8, device=device) if flag is None
                else flag.view(T, N) for flag, usual in flags]

    def forward_eval(self, observations, state):
        """Compute one step of N agents: (N, ...) -> logits and value of (N, ...).

        state: tensors (layers, N, size). As in PufferLib, those of one layer may be (N, size); if
        one is missing or None, all begin with zeros.
        """
        if any(state.get(name) is None for name in self.states):
            state.update(self.initial_state(len(observations)))
        is_flat = state[self.states[0]].dim() == 2
        if is_flat:
            state.update({name: state[name].unsqueeze(0) for name in self.states})
        logits, value = self(observations.unsqueeze(0), state)
        if is_flat:
            state.update({name: state[name].squeeze(0) for name in self.states})
        return map_logits(lambda tensor: tensor[0], logits), value[0]


class MinGRUPolicy(_Recurrent):
    """The default policy: linear encoder, MinGRU layers, one linear decoder.

    The decoder gives logits and value. normalize: observations go through a `Normalizer` first. The
    engines of fast/compiled.py and fast/fused.py compute the same without autograd. If `forward` is
    changed (here, in a subclass or by a hook), the trainer notices and runs `forward`:
    pufferl.choose_engine and PuffeRL._check_engine call the checks of fast/verify.py.
    """

    def __init__(self, env, hidden_size=128, num_layers=1, normalize=False):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        inputs = math.prod(env.single_observation_space.shape)
        self.normalizer = (Normalizer(inputs, exact=exceeds_float32(env.single_observation_space))
                           if normalize else None)
        self.encoder = orthogonal(nn.Linear(inputs, hidden_size))
        self.rnn = MinGRU(hidden_size, num_layers)
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def forward(self, observations, state):
        T, N = observations.shape[:2]
        x = observations.reshape(T, N, -1)
        x = self.encoder(x.float() if self.normalizer is None else self.normalizer(x))
        x, state["mingru"] = self.rnn(x, state["mingru"], *self.flags(state, T, N, x.device))
        return self.decoder.split(self.decoder(x))


class FeedForward(nn.Module):
    """A feed-forward policy for flat observations, and the template for custom ones.

    Copy it and edit encode_observations and decode_actions. While this class is not edited,
    fast/compiled.py computes the same on a CPU without autograd.
    """

    def __init__(self, env, hidden_size=128):
        super().__init__()
        self.hidden_size = hidden_size
        self.observation_dims = len(env.single_observation_space.shape)
        self.encoder = nn.Sequential(
            orthogonal(nn.Linear(math.prod(env.single_observation_space.shape), hidden_size)),
            nn.ReLU(), orthogonal(nn.Linear(hidden_size, hidden_size)), nn.ReLU())
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def forward(self, observations, state=None):
        """Return logits and value (*steps, ...) of observations (*steps, *observation).

        steps: (T, N), or (B,) if a script calls a batch.
        """
        steps = observations.shape[: observations.dim() - self.observation_dims]
        hidden = self.encode_observations(observations.flatten(0, len(steps) - 1))
        return self.decode_actions(hidden.unflatten(0, steps))

    def forward_eval(self, observations, state=None):
        return self.decode_actions(self.encode_observations(observations))

    def encode_observations(self, observations, state=None):
        """Return hidden (B, hidden_size) of observations (B, *observation)."""
        return self.encoder(observations.flatten(1).float())

    def decode_actions(self, hidden):
        """Return logits and value of hidden (..., hidden_size)."""
        return self.decoder.split(self.decoder(hidden))


class Separate(nn.Module):
    """A policy with separate networks for logits and value, without memory.

    Two tanh layers each, for plain numbers. The value's errors then cannot disturb the features of
    the policy (Andrychowicz et al. 2021, 3.2, on robots). While this class is not edited,
    fast/compiled.py computes the same on a CPU without autograd.
    """

    def __init__(self, env, hidden_size=64):
        super().__init__()
        if wants_encoding(env):
            raise NetworkError(
                "policy.name = separate: reads plain numbers, not "
                f"{emulation.wrapped_space(env)}. Use policy.name auto.")
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


class _SummedLinear(nn.Module):
    """A linear map for each group of features, and their sum.

    One map for all would let the thousands of features of an image drown a few numbers
    (docs/findings.md). has_norm: the groups whose results get a LayerNorm; not numbers, because a
    norm of a single number keeps only its sign.
    """

    def __init__(self, widths, has_norm, hidden_size):
        super().__init__()
        self.maps = nn.ModuleList(nn.Sequential(orthogonal(nn.Linear(width, hidden_size)),
                                                *([nn.LayerNorm(hidden_size)] if is_normed else []))
                                  for width, is_normed in zip(widths, has_norm, strict=True))

    def forward(self, groups):
        return sum(linear(group) for linear, group in zip(self.maps, groups, strict=True))


class _OneHot(nn.Module):
    """The one-hot vectors of Discrete or MultiDiscrete values (B, n), side by side."""

    def __init__(self, space):
        super().__init__()
        sizes = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.nvec
        # plain numbers: a tensor would be copied to a GPU in each forward
        self.sizes = np.ravel(sizes).tolist()
        self.starts = np.ravel(space.start).tolist()

    def forward(self, values):
        # nn.functional.one_hot reads the largest value, which a CUDA graph forbids
        return torch.cat([
            (column - start).clamp(0, size - 1).unsqueeze(1)
            == torch.arange(size, device=values.device)
            for column, start, size in zip(values.long().unbind(1), self.starts, self.sizes,
                                           strict=True)], dim=1)


CONVOLVED = "image", "board"  # kinds of fields that go through convolutions


class MultiInputPolicy(nn.Module):
    """A feed-forward policy for images, categories, and Dict and Tuple observations.

    Images go through convolutions, Discrete and MultiDiscrete values become one-hot. Each field of
    a Dict or Tuple is encoded: those without convolutions are concatenated, and join the others in
    `_SummedLinear`.

    env: a vector, or an environment whose `env_single_observation_space` is the structured space.
    boards: small boards of integers or flags become planes, one per kind of piece, and go through
    convolutions as well. normalize: the other numbers go through a `Normalizer` first.
    image_encoder: makes the convolutions from an image's space.
    """

    def __init__(self, env, hidden_size=128, boards=False, normalize=False, image_encoder=None):
        super().__init__()
        space = emulation.declared_space(env)
        flat = flat_spaces.FlatObservation(space)
        self.hidden_size = hidden_size
        self.observation_dims = len(env.single_observation_space.shape)
        self.native = flat_spaces.nativize_dtype(flat.dtype)
        self.leaves = [(names, leaf, leaf_kind(leaf, boards)) for _, names, leaf in flat.leaves]
        encoders = {"image": image_encoder or _image_encoder, "board": _board_encoder,
                    "choices": _OneHot, "numbers": nn.Identity}
        self.parts = nn.ModuleList(encoders[kind](leaf) for _, leaf, kind in self.leaves)
        self.numbers = [math.prod(leaf.shape)
                        for _, leaf, kind in self.leaves if kind == "numbers"]
        exact = any(exceeds_float32(leaf) for _, leaf, kind in self.leaves if kind == "numbers")
        self.normalizer = (Normalizer(sum(self.numbers), self._numbers, exact)
                           if normalize and self.numbers else None)
        # an observation that lies in the space, for the widths of its features
        with torch.no_grad():
            groups = self._features(torch.from_numpy(flat.flatten(space.sample())[None]))
        widths = [group.shape[1] for group in groups]
        num_convolved = sum(kind in CONVOLVED for *_, kind in self.leaves)
        has_norm = [False] * (len(widths) - num_convolved) + [True] * num_convolved
        first = (_SummedLinear(widths, has_norm, hidden_size) if len(widths) > 1
                 else orthogonal(nn.Linear(widths[0], hidden_size)))
        # A picture's background is the same in every observation, so without norms one update can
        # push a unit below zero for good: nine in ten of Pong's units died (docs/findings.md).
        has_picture = any(kind == "image" and shorter_side(leaf) >= PICTURE
                          for _, leaf, kind in self.leaves)
        norm = nn.LayerNorm(hidden_size) if has_picture else nn.Identity()
        self.encoder = nn.Sequential(first, norm, nn.ReLU())
        self.decoder = Decoder(hidden_size, env.single_action_space)

    def _values(self, observations):
        """Return the fields' values: (B, *shape) for a convolution, else (B, size)."""
        fields = flat_spaces.nativize_tensor(observations, self.native)
        values = [functools.reduce(operator.getitem, names, fields) for names, *_ in self.leaves]
        # not len(value), which an export would write as a constant
        return [value if kind in CONVOLVED else value.reshape(value.shape[0], -1)
                for value, (*_, kind) in zip(values, self.leaves, strict=True)]

    def _numbers(self, observations):
        values = zip(self._values(observations), self.leaves, strict=True)
        return torch.cat([value.to(self.normalizer.shift.dtype)
                          for value, (*_, kind) in values if kind == "numbers"], dim=1)

    def _features(self, observations):
        """Return the groups of features, (B, width) each.

        Numbers and choices, if there are any, then one group per field with convolutions.
        """
        features, convolved, numbers = [], [], None
        if self.normalizer is not None:
            normalised = self.normalizer(self._numbers(observations))
            numbers = iter(normalised.split(self.numbers, dim=1))
        for (*_, kind), encoder, value in zip(self.leaves, self.parts, self._values(observations),
                                              strict=True):
            if kind == "numbers" and numbers is not None:
                value = next(numbers)
            group = convolved if kind in CONVOLVED else features
            group.append(encoder(value))
        if features:
            convolved.insert(0, torch.cat([feature.float() for feature in features], dim=1))
        return convolved

    def encode_observations(self, observations, state=None):
        """Return hidden (B, hidden_size) of flat observations (B, size)."""
        groups = self._features(observations)
        return self.encoder(groups if len(groups) > 1 else groups[0])

    forward = FeedForward.forward
    forward_eval = FeedForward.forward_eval
    decode_actions = FeedForward.decode_actions


class Impala(MultiInputPolicy):
    """`MultiInputPolicy` with IMPALA's residual network (Espeholt et al. 2018).

    For each number of `channels` a convolution, a max-pooling that halves the sides, and two
    residual blocks. It costs several times as much as the plain convolutions and reads varied
    pictures better, as Procgen's. Raises NetworkError if no observation is an image.
    """

    def __init__(self, env, hidden_size=256, channels=(16, 32, 32), normalize=False):
        super().__init__(env, hidden_size, normalize=normalize,
                         image_encoder=lambda space: _residual_encoder(space, channels))
        if not any(kind == "image" for *_, kind in self.leaves):
            raise NetworkError(
                "policy.name = impala: there is no image (docs/environments.md) in "
                f"{env.single_observation_space}. Use policy.name auto.")


class Normalized(nn.Module):
    """A custom network behind a `Normalizer` of its observations."""

    def __init__(self, env, policy):
        super().__init__()
        size = math.prod(env.single_observation_space.shape)
        if not isinstance(emulation.wrapped_space(env), gymnasium.spaces.Box | None):
            raise NetworkError(
                "train.norm_obs = True: the observations are not one array. Normalise "
                "the fields of a Dict or Tuple in the network (models.Normalizer).")
        self.policy = policy
        self.normalizer = Normalizer(size, exact=exceeds_float32(env.single_observation_space))

    @property
    def decoder(self):
        return self.policy.decoder

    def _normalised(self, observations, dims):
        flat = self.normalizer(observations.flatten(dims))
        return flat.view(observations.shape)

    def initial_state(self, num_agents):
        return initial_state(self.policy, num_agents)

    def forward(self, observations, state):
        return over_time(self.policy, self._normalised(observations, 2), state)

    def forward_eval(self, observations, state):
        return one_step(self.policy, self._normalised(observations, 1), state)


class Board(nn.Module):
    """A feed-forward policy for planes (planes, H, W), with the same weights per cell.

    3 × 3 convolutions of `hidden_size` channels, and a 1 × 1 convolution for each cell's logit.
    What the network learns in one corner of a board holds for all of it; a linear map learns each
    place separately.

    The first H · W actions are the cells, row after row; further ones (to pass) and the value read
    the mean of each channel. If there are fewer actions than cells, they read the whole board
    through a linear map.
    """

    def __init__(self, env, hidden_size=32, num_layers=3):
        super().__init__()
        shape = env.single_observation_space.shape
        heads = flat_spaces.FlatAction(env.single_action_space).heads
        if len(shape) != 3 or len(heads) != 1:
            raise NetworkError(
                "policy.name = board: reads planes (planes, H, W) and has one Discrete "
                f"action, not {shape} and {env.single_action_space}. Use policy.name "
                "default.")
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


def _layout(space):
    """Return (channels, whether they are last, layout letters) of an image or board.

    A stack's images count as channels.
    """
    *_, rows, columns, depth = (0, *space.shape)
    last = len(space.shape) > 2 and (rows == columns or (columns != depth and depth < rows))
    sides = space.shape[-3:-1] if last else space.shape[-2:]
    letters = ["K"] * (len(space.shape) == 4) + (["H", "W", "C"] if last
                                                 else ["C", "H", "W"][-len(space.shape):])
    return math.prod(space.shape) // math.prod(sides), last, f"({', '.join(letters)})"


def _scale(space):
    """Return the factor that scales an image, or the categories of a small grid."""
    if shorter_side(space) < PICTURE:
        return 0.1
    return 1 / 255 if space.dtype == np.uint8 else 1 / float(space.high.max())


def inner_policy(policy):
    """Return the network inside all wrappers (their attribute `policy`).

    If the attribute is a layer of torch, such as nn.Sequential, it is a part of the network.
    """
    inner = getattr(policy, "policy", None)
    is_wrapper = (isinstance(inner, nn.Module)
                  and not type(inner).__module__.startswith("torch."))
    return inner_policy(inner) if is_wrapper else policy


def summarize(policy):
    """Describe a network in one line."""
    parameters = f"{sum(parameter.numel() for parameter in policy.parameters()):,} weights"
    if isinstance(policy, Normalized):
        return "normalised, " + summarize(policy.policy)
    if isinstance(policy, MinGRUPolicy):
        normalisation = "normalised, " if policy.normalizer is not None else ""
        return (f"{normalisation}linear {policy.encoder.in_features} to {policy.hidden_size}, "
                f"{policy.num_layers} MinGRU, linear; {parameters}")
    inner = inner_policy(policy)
    memory = {MinGRUWrapper: "MinGRU", LSTMWrapper: "LSTM", GRUWrapper: "GRU"}.get(type(policy))
    if memory is None and (state_names := initial_state(policy, 1)):
        memory = f"keeps {', '.join(state_names)} from step to step"
    encodings = {"image": "convolutions of an image", "board": "convolutions of a board",
                 "choices": "one-hot", "numbers": "numbers"}
    description = type(inner).__name__
    if isinstance(inner, Impala):
        encodings["image"] = "residual convolutions of an image"
    if isinstance(inner, MultiInputPolicy):
        fields = [f"{'/'.join(names) + ' ' if names else ''}{flat_spaces.space_dtype(leaf).shape} "
                  f"{encodings[kind]}" + (f" {_layout(leaf)[2]}" if kind == "image" else "")
                  for names, leaf, kind in inner.leaves]
        description = "; ".join(fields)
    return f"{description}, {memory or 'no recurrent layer'}; {parameters}"


def wants_encoding(env, boards=False):
    """Return whether `MultiInputPolicy` suits an environment's observations."""
    space = emulation.wrapped_space(env)
    return space is not None and (
        not isinstance(space, gymnasium.spaces.Box)
        or leaf_kind(space, boards) in ("image", "board"))


def _image_encoder(space):
    """Return the convolutions of Mnih et al. 2015, with norms, for pictures.

    Pictures below 64 pixels get half the stride and width, to retain positions; small grids as
    MiniGrid's get 3 × 3 convolutions that keep the size.
    """
    channels, last, _ = _layout(space)
    side, scale = shorter_side(space), _scale(space)
    if side >= PICTURE:
        half = 2 if side < 64 else 1
        narrow, wide = 32 // half, 64 // half
        layers = [orthogonal(pictures.BytesConvolution(channels, narrow, 8 // half, 4 // half, last,
                                                       scale)), pictures.NormReLU(narrow)]
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
    """Return the convolutions of Espeholt et al. 2018, figure 3, without its LSTM."""
    first, last, _ = _layout(space)
    layers = [pictures.Bytes(last, _scale(space))]
    for inputs, outputs in itertools.pairwise((first, *channels)):
        layers += [orthogonal(nn.Conv2d(inputs, outputs, 3, padding=1)),
                   nn.MaxPool2d(3, 2, padding=1), _Residual(outputs), _Residual(outputs)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


class _Planes(nn.Module):
    """Boards of integers as planes, one per kind of piece and channel.

    (B, H, W), (B, H, W, C) or (B, C, H, W) -> (B, planes, H, W); flags are planes already.
    """

    def __init__(self, space):
        super().__init__()
        self.pieces = range(int(space.low.min()), int(space.high.max()) + 1)
        self.channels, self.last, _ = _layout(space)
        self.planes = self.channels * (1 if len(self.pieces) == 2 else len(self.pieces))

    def forward(self, x):
        x = pictures.channels_first(x, self.last).long() - self.pieces[0]
        if len(self.pieces) != 2:
            x = nn.functional.one_hot(x.clamp(0, len(self.pieces) - 1),
                                      len(self.pieces)).movedim(-1, 2).flatten(1, 2)
        return x.to(torch.float32, memory_format=torch.channels_last)


def _board_encoder(space):
    """Return one layer of 3 × 3 convolutions for a board.

    It sees neighbours; later layers see the whole board.
    """
    planes = _Planes(space)
    return nn.Sequential(planes, orthogonal(nn.Conv2d(planes.planes, 16, 3, padding=1)), nn.ReLU(),
                         nn.Flatten())


class _RecurrentWrapper(_Recurrent):
    """A recurrent layer between a policy's `encode_observations` and `decode_actions`.

    It is reset inside a segment when an episode begins, and keeps its state while an agent is
    inactive. A subclass has scan(x, memory, resets, valid), which returns (outputs, memory): x
    (T, N, input_size), outputs (T, N, hidden_size), memory, in and out, a list of the tensors that
    `states` names.

    With a tuple of those tensors or None as the state, a call is one step of N agents, as in
    PufferLib 2: observations (N, ...), tensors (layers, N, hidden_size) -> logits, value, their
    tuple.
    """

    def __init__(self, env, policy, input_size=None, hidden_size=None, num_layers=1):
        super().__init__()
        missing_methods = [name for name in ("encode_observations", "decode_actions")
                           if not hasattr(policy, name)]
        if missing_methods:
            raise NetworkError(
                f"{type(policy).__name__} has no {' and no '.join(missing_methods)}: "
                f"{type(self).__name__} calls encode_observations(observations) -> hidden and "
                "decode_actions(hidden) -> logits, value. Split forward as models.FeedForward "
                "does, or set --rnn.name none.")
        self.policy = policy
        self.hidden_size = hidden_size or input_size or 128
        self.input_size = input_size or self.hidden_size
        self.num_layers = num_layers

    def forward(self, observations, state=None):
        if not isinstance(state, dict):
            return self._one_step(observations, state)
        T, N = observations.shape[:2]
        # PufferLib 2's policies return a lookup beside the hidden rows, which they decode with it
        hidden, lookup = self.policy.encode_observations(observations.flatten(0, 1)), []
        if isinstance(hidden, tuple):
            hidden, *lookup = hidden
        memory = [state[name] for name in self.states]
        out, memory = self.scan(hidden.unflatten(0, (T, N)), memory,
                                *self.flags(state, T, N, hidden.device))
        state.update(zip(self.states, memory, strict=True))
        logits, value = self.policy.decode_actions(out.flatten(0, 1), *lookup)
        return map_logits(lambda rows: rows.unflatten(0, (T, N)), logits), value.reshape(T, N, 1)

    def _one_step(self, observations, state):
        initial = self.initial_state(len(observations))
        named_state = initial if state is None else dict(zip(initial, state, strict=True))
        logits, value = self.forward_eval(observations, named_state)
        return logits, value, tuple(named_state[name] for name in initial)


class MinGRUWrapper(_RecurrentWrapper):
    """MinGRU layers between a policy's two methods; input_size equals hidden_size."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if self.input_size != self.hidden_size:
            raise NetworkError(f"rnn.input_size = {self.input_size}: MinGRU's highway needs "
                               f"rnn.hidden_size = {self.hidden_size}. Give one of the two.")
        self.rnn = MinGRU(self.hidden_size, self.num_layers)

    def scan(self, x, memory, resets, valid):
        out, final = self.rnn(x, *memory, resets, valid)
        return out, [final]


class _TorchWrapper(_RecurrentWrapper):
    """A recurrent layer of torch; kind: its class, which names the attribute."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.layer_name = self.kind.__name__.lower()
        layer = self.kind(self.input_size, self.hidden_size, self.num_layers)
        for name, parameter in layer.named_parameters():
            nn.init.orthogonal_(parameter, 1.0) if "weight" in name else nn.init.zeros_(parameter)
        setattr(self, self.layer_name, layer)

    def scan(self, x, memory, resets, valid):
        layer = getattr(self, self.layer_name)
        precision = contextlib.nullcontext()
        # autocast on a GPU runs these layers in float16, whatever its precision
        if x.is_cuda:
            x, precision = x.float(), torch.autocast("cuda", enabled=False)
        with precision:
            if recurrent.is_supported(layer, x):
                return recurrent.scan(layer, x, memory, resets, valid)
        keep_state, is_valid = 1.0 - resets.to(x.dtype).unsqueeze(-1), valid.unsqueeze(-1) != 0
        outputs = []
        for t in range(len(x)):
            memory = [tensor * keep_state[t] for tensor in memory]
            with precision:
                _, new_memory = layer(x[t : t + 1], tuple(memory) if len(memory) > 1 else memory[0])
            new_memory = new_memory if len(memory) > 1 else [new_memory]
            # an inactive agent keeps its memory and repeats its output
            memory = [torch.where(is_valid[t], new_tensor, old_tensor)
                      for new_tensor, old_tensor in zip(new_memory, memory, strict=True)]
            outputs.append(memory[0][-1:])
        return torch.cat(outputs), memory


class LSTMWrapper(_TorchWrapper):
    """An LSTM (Hochreiter and Schmidhuber 1997) between a policy's two methods."""

    kind = nn.LSTM
    states = ("lstm_h", "lstm_c")


class GRUWrapper(_TorchWrapper):
    """A GRU (Cho et al. 2014) between a policy's two methods."""

    kind = nn.GRU
    states = ("gru_h",)


# --------------------------------------------------------------------------------------------------
# Calling a policy of any form


@functools.lru_cache(maxsize=64)
def _parameters(function):
    return tuple(inspect.signature(function).parameters.values())


def is_plain(policy):
    """Return whether a network is forward(observations), without a state."""
    # only a method of a class may be cached; any other function may refer to the network
    method = getattr(policy.forward, "__func__", None)
    parameters = (inspect.signature(policy.forward).parameters.values() if method is None
                  else _parameters(method)[1:])
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return count == 1 and not any(p.kind is p.VAR_POSITIONAL or p.name == "state"
                                  for p in parameters)


@contextlib.contextmanager
def evaluation_mode(policy):
    """Call a network within the context without a lasting effect.

    Batch norms learn nothing, and torch's random numbers continue as if nothing had been drawn.
    """
    training_modules = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module in training_modules:
            module.training = True


def find_form(policy, space):
    """Find out whether a forward with a state takes a batch or time.

    PufferLib 3's networks without memory take a state too. One call on zeros tells whether forward
    takes (B, *observation) or (T, N, *observation); the answer is the attribute `takes_batches`.
    Raises NetworkError for a network without a forward.
    """
    forward = getattr(policy, "forward", None)
    if getattr(forward, "__func__", forward) in (None, nn.Module.forward):
        raise NetworkError(f"{type(policy).__name__} has no forward(observations) -> logits, "
                           "value. For CleanRL's actor and critic: def forward(self, x): return "
                           "self.actor(x), self.critic(x)")
    is_known = any(hasattr(policy, name) for name in ("initial_state", "takes_batches"))
    if is_known or is_plain(policy) or getattr(forward, "__module__", "") == __name__:
        return  # a subclass of a network of this file may refuse zeros
    parameter = next(policy.parameters(), torch.zeros(()))
    zeros = torch.from_numpy(np.zeros((2, 3, *space.shape), space.dtype)).to(parameter.device)
    errors = []
    with evaluation_mode(policy):
        for takes_batches in (False, True):
            policy.takes_batches = takes_batches
            try:
                over_time(policy, zeros, {})
                return
            except Exception as error:
                errors.append(error)
    del policy.takes_batches
    raise errors[0]


def initial_state(policy, num_agents):
    """Return a policy's recurrent tensors, {name: (layers, num_agents, size)}."""
    return policy.initial_state(num_agents) if hasattr(policy, "initial_state") else {}


def one_step(policy, observations, state):
    """Return logits and value (N, ...) of one step of N agents, by any policy.

    `state` has the recurrent tensors, whose entries are replaced, and the flags of this step, (N,).
    """
    return _call(policy, observations, state, observations.shape[:1])


def over_time(policy, observations, state, forward=None):
    """Return logits and value (T, N, ...) of T steps of N agents, by any policy.

    forward: a replacement for the policy's, such as the one of torch.compile.
    """
    return _call(policy, observations, state, observations.shape[:2], forward)


def _call(policy, observations, state, shape, forward=None):
    """Return logits and value (*shape, ...) of observations (*shape, ...).

    The network gets them as its method takes them: (N, ...), (T, N, ...) or a batch (B, ...). Its
    rollout_fields become state["fields"].
    """
    is_step = len(shape) == 1 and hasattr(policy, "forward_eval")
    is_stateless = not is_step and is_plain(policy)
    if is_stateless or getattr(policy, "takes_batches", False):
        form = (math.prod(shape),)
    else:
        form = shape if is_step else (1, *shape)[-2:]
    # not `forward or policy`: what torch.compile returns has no truth value
    over_steps = policy if forward is None else forward
    function = policy.forward_eval if is_step else over_steps
    x = observations.reshape(*form, *observations.shape[len(shape):])
    flags = {name: state[name].reshape(form) for name in ("resets", "valid")
             if state.get(name) is not None}
    named_state = state | flags
    try:
        outputs = function(x) if is_stateless else function(x, named_state)
    except (RuntimeError, IndexError, ValueError) as error:
        if any(word in str(error) for word in ("shape", "size", "dimension", "dim ")):
            error.add_note(
                f"{type(policy).__name__} got observations {tuple(x.shape)}. "
                "Without memory: forward(observations) over (B, *observation). With memory: "
                "forward(observations, state) over (T, N, *observation), and forward_eval over (N, "
                "*observation). Both return logits and value. See models.py.")
        raise
    method = "forward_eval" if is_step else "forward"
    logits, value, fields = _check_outputs(policy, method, outputs, form)
    state.update({name: tensor for name, tensor in named_state.items() if name not in flags})
    if form != shape:
        def reshape(tensor):
            return tensor.reshape(*shape, *tensor.shape[len(form):])

        logits, value = map_logits(reshape, logits), value.reshape(*shape, 1)
        fields = {name: reshape(field) for name, field in fields.items()}
    if fields:
        state["fields"] = fields
    return logits, value


def check_logits(policy, logits, outputs, log_std, heads, dims):
    """Raise NetworkError unless outputs fit these action heads, or dims without heads.

    outputs (..., A + 1) and log_std: of join_outputs(logits, value).
    """
    is_normal, width = log_std is not None, outputs.shape[-1] - 1
    expected = dims if heads is None else sum(heads)
    if (heads is None) != is_normal or width != expected:
        kinds = [f"{count} {'means of a Normal' if normal else 'logits'}"
                 for count, normal in ((width, is_normal), (expected, heads is None))]
        advice = ("Read the number from env.single_action_space." if width != expected else
                  "Continuous actions need torch.distributions.Normal(mean, std)."
                  if heads is None else "Discrete actions need a tensor of logits.")
        raise NetworkError(f"{type(policy).__name__} returns {kinds[0]} per observation, expected "
                           f"{kinds[1]}. {advice}")
    if isinstance(logits, (list, tuple)) and [head.shape[-1] for head in logits] != [*heads]:
        raise NetworkError(f"{type(policy).__name__} returns heads of "
                           f"{[head.shape[-1] for head in logits]} logits, expected {[*heads]}: "
                           "the order is that of env.single_action_space.")


def are_probabilities(outputs, heads):
    """Return whether outputs (..., A + 1) hold probabilities instead of logits.

    Those of each head are within 0 and 1, and add up to 1.
    """
    probabilities = [head for head in outputs[..., :-1].split(heads, -1) if head.shape[-1] > 1]
    return bool(probabilities) and all(head.min() >= 0 and (head.sum(-1) - 1).abs().max() < 0.01
                                       for head in probabilities)


def _check_outputs(policy, method, outputs, shape):
    """Return logits, value and fields of a network's result; shape: of the steps."""
    names = getattr(policy, "rollout_fields", {})
    try:
        logits, value = outputs[:2] if names else outputs
        fields = {name: outputs[2][name] for name in names}
        first = logits.loc if isinstance(logits, torch.distributions.Normal) else logits
        first = first[0] if isinstance(first, (list, tuple)) else first
        is_valid = first.shape[:-1] == shape and value.numel() == math.prod(shape)
    except (TypeError, ValueError, LookupError, AttributeError):
        is_valid = False
    if not is_valid:
        results = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        received = ", ".join(map(_describe_output, results))
        third = f", {{{', '.join(names)}}}" if names else ""
        raise NetworkError(f"{type(policy).__name__}.{method} must return (logits, value{third}), "
                           f"got {received}; expected are {(*shape, 'actions')}, a tensor or a "
                           f"torch.distributions.Normal, and {(*shape, 1)}. See models.py.")
    return logits, value, fields


def _describe_output(output):
    """Return the type and the shape of an output, of each one in a list."""
    if isinstance(output, (list, tuple)):
        return f"[{', '.join(map(_describe_output, output))}]"
    shape = getattr(output, "shape", None)
    return type(output).__name__ + ("" if shape is None else f" {tuple(shape)}")


def sample_logits(logits, value, *, seed, step, first_agent=0, heads=None, masks=None, squash=None,
                  deterministic=False):
    """Draw actions from any policy's outputs through kernels.sample.

    logits: as in this file's docstring, over (N, ...); heads: the sizes of the action heads, if one
    tensor of logits holds several; squash: squash_of(policy). Returns actions (N, heads) int32 or
    (N, dims) float32, joint log-probabilities (N,), values (N,).
    """
    outputs, log_std = join_outputs(logits, value)
    n = len(outputs)
    if log_std is None:
        sizes = heads or [head.shape[-1]
                          for head in (logits if isinstance(logits, (list, tuple)) else [logits])]
        heads = torch.tensor(sizes, device=outputs.device)
        actions = outputs.new_empty(n, len(sizes), dtype=torch.int32)
    else:
        heads = None
        actions = outputs.new_empty(n, log_std.shape[-1])
    logprobs, values = outputs.new_empty(n), outputs.new_empty(n)
    kernels.sample(outputs, actions, logprobs, values, seed=seed, step=step,
                   first_agent=first_agent, heads=heads,
                   log_std=log_std, masks=masks, squash=squash, deterministic=deterministic,
                   samples=None if squash is None else torch.empty_like(actions))
    return actions, logprobs, values


# --------------------------------------------------------------------------------------------------
# CleanRL's two agents over any policy of this file; docs/recipes.md has the whole loop


def act(logits, action=None):
    """Return (action, log-probability, entropy) of the joint distribution.

    The action is drawn if it is None.
    """
    if isinstance(logits, torch.distributions.Normal):
        distributions = [torch.distributions.Independent(logits, 1)]
    else:
        heads = logits if isinstance(logits, (list, tuple)) else [logits]
        distributions = [torch.distributions.Categorical(logits=head) for head in heads]
    is_single = len(distributions) == 1
    if action is None:
        samples = [distribution.sample() for distribution in distributions]
        action = samples[0] if is_single else torch.stack(samples, dim=-1)
    columns = [action] if is_single else action.unbind(-1)
    logprob = sum(distribution.log_prob(column)
                  for distribution, column in zip(distributions, columns, strict=True))
    return action, logprob, sum(distribution.entropy() for distribution in distributions)


class CleanRLAgent(nn.Module):
    """Act in CleanRL's ppo.py, or in ppo_atari_lstm.py with a recurrent policy.

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
            raise NetworkError(f"{type(policy).__name__} squashes its actions (models.squash), but "
                               "CleanRL's loops do not. Train it with PuffeRL.")
        self.policy = policy
        self.has_memory = bool(initial_state(policy, 1))

    def initial_state(self, num_agents):
        return tuple(self.policy.initial_state(num_agents).values())

    def _run(self, x, state=None, done=None):
        if not self.has_memory:
            return *getattr(self.policy, "forward_eval", self.policy)(x), ()
        state = self.initial_state(len(x)) if state is None else state
        names, N = list(self.policy.initial_state(1)), state[0].shape[1]
        T = len(x) // N
        done = torch.zeros(T, N) if done is None else done.reshape(T, N)
        named_state = {**dict(zip(names, state, strict=True)),
                       "resets": done.to(x.device, torch.uint8),
                       "valid": torch.ones(T, N, dtype=torch.uint8, device=x.device)}
        logits, value = self.policy(x.reshape(T, N, *x.shape[1:]), named_state)
        logits = map_logits(lambda tensor: tensor.flatten(0, 1), logits)
        return logits, value.reshape(T * N, 1), tuple(named_state[name] for name in names)

    def get_value(self, x, state=None, done=None):
        return self._run(x, state, done)[1]

    def get_action_and_value(self, x, *arguments, action=None):
        """Return action, logprob, entropy, value, and the new state of a recurrent policy.

        arguments: (action,), or of a recurrent policy (state, done, action); each may be left out.
        """
        count = 2 if self.has_memory else 0
        logits, value, state = self._run(x, *arguments[:count])
        result = *act(logits, *arguments[count:] or (action,)), value
        return (*result, state) if self.has_memory else result


RecurrentCleanRLAgent = CleanRLAgent


# --------------------------------------------------------------------------------------------------
# From a configuration


def load_policy(args, vecenv, env_name=""):
    """Return the network of the policy and rnn sections.

    It has weights if load_model_path or baseline names them.
    """
    configuration.check_names(args)
    torch.manual_seed(args["train"]["seed"])
    settings, rnn, env = args["policy"], args["rnn"], vecenv.driver_env
    name, hidden = settings["name"], settings["hidden_size"]
    kind = configuration.recurrent_layer(args)
    is_ours, (path, weights) = name in configuration.POLICIES, _load_weights(args)
    normalize = args["train"]["norm_obs"]
    if weights is not None:
        normalize = any("normalizer." in key for key in weights)
    elif normalize == "auto" or "train.norm_obs" in args.get("auto", ()):  # not of a custom one
        facts = auto.facts_of(env, vecenv.num_agents, args["train"]["total_timesteps"])
        normalize = is_ours and auto.wants_normalising(facts)[0]
    width, inputs = rnn["hidden_size"] or hidden, rnn["input_size"] or hidden
    encoded = name == "impala" or (name in ("auto", "default", "feed-forward")
                                   and wants_encoding(env, name == "auto"))
    if kind != "none" and is_ours and (width, inputs) != (hidden, hidden):
        raise ConfigError(f"rnn.hidden_size = {width}, rnn.input_size = {inputs}: must equal "
                          f"policy.hidden_size = {hidden}.")
    if name in ("default", "auto") and kind == "mingru" and not encoded:
        policy = MinGRUPolicy(env, hidden, rnn["num_layers"], normalize)
    else:
        policy = build(settings, env, encoded, normalize)
        if kind != "none":
            wrapper = {"mingru": MinGRUWrapper, "lstm": LSTMWrapper, "gru": GRUWrapper}[kind]
            policy = wrapper(env, policy, inputs, width, rnn["num_layers"])
        find_form(policy, env.single_observation_space)
        if normalize and not encoded and find_normalizer(policy) is None:
            policy = Normalized(env, policy)
    _shape_actions(policy, env.single_action_space, args, weights or {})
    if weights is not None:
        runs.check_weights(weights, policy.state_dict(), path)
        policy.load_state_dict(weights)
    return policy


def build(settings, env, encoded=False, normalize=False):
    """Return the network of policy.name, without a recurrent layer of models.py.

    settings: the policy section.
    """
    name, hidden = settings["name"], settings["hidden_size"]
    if name == "impala":
        return Impala(env, hidden_size=hidden, normalize=normalize)
    if encoded:
        return MultiInputPolicy(env, hidden_size=hidden, boards=name == "auto", normalize=normalize)
    if name in configuration.POLICIES:
        kind = {"board": Board, "separate": Separate}.get(name, FeedForward)
        return kind(env, hidden_size=hidden)
    cls = configuration.load_attribute("policy.name", name, configuration.POLICIES)
    options = {"hidden_size": hidden} if emulation.takes(cls, "hidden_size") else {}
    options |= {key: value for key, value in settings.items()
                if not hasattr(configuration.Policy, key)}
    try:
        inspect.signature(cls).bind(env, **options)
    except TypeError as error:
        raise ConfigError(
            f"policy.name = {name}: is called with ({', '.join(['env', *options])}), but takes "
            f"{inspect.signature(cls)} ({error}). --policy.NAME sets an argument with a default."
            ) from None
    return cls(env, **options)


def _shape_actions(policy, space, args, weights):
    """Set the first log-std, and squash the actions.

    They are squashed if the weights or the settings are for it. The choice for policy.squash = auto
    is written to args.
    """
    settings, saved = args["policy"], weights.get("action_squash")
    if settings["squash"] == "auto":
        reason = None if weights else auto.why_squash(space)
        settings["squash"] = "none" if reason is None else "tanh"
        args.setdefault("auto", {}).update({} if reason is None else {"policy.squash": reason})
    if settings["log_std_init"] != 0:
        log_stds = [module.log_std for module in policy.modules()
                    if isinstance(module, Decoder) and module.log_std is not None]
        if not log_stds:
            raise NetworkError(
                "policy.log_std_init: the network has no models.Decoder of continuous actions. "
                "Set it to 0, and the log-std in the network.")
        for log_std in log_stds:
            nn.init.constant_(log_std, settings["log_std_init"])
    if settings["squash"] == "tanh" or saved is not None:
        squash(policy, space)
    if saved is not None and not torch.equal(saved, policy.action_squash):
        raise ConfigError(f"these weights act between other bounds than {space} has. Use the "
                          "environment and the settings that they were trained with.")


def _load_weights(args):
    """Return (path, weights) that the settings name, or (None, None)."""
    model, is_baseline = args.get("load_model_path"), args.get("baseline")
    if model and is_baseline:
        raise ConfigError("--load-model-path and --baseline both name weights to start from. Give "
                          "one of them.")

    def read():
        if is_baseline:
            name = args["env_name"]
            return configuration.find_baseline(name), configuration.read_baseline(name)[0]
        path = configuration.find_model(model, args["data_dir"], args["config_name"])
        return path, runs.load(path)

    return data_parallel.connect().first(read) if model or is_baseline else (None, None)
