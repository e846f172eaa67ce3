"""Train by PPO: the whole algorithm in one file, in its order. Read this first.

    python ppo.py breakout                                     # a C environment: a folder of ocean/
    python ppo.py cartpole --total-timesteps 4_000_000
    python ppo.py gym/Acrobot-v1 --num-envs 32 --minibatch-size 512 --norm-obs --norm-reward
    tensorboard --logdir runs

To change it, copy it into the same folder under another name and edit the copy. Its network runs on
one core of a CPU. Given the same settings, pufferl.py with the default network gives the same
results on many cores, GPUs and machines: tests/test_ppo.py checks that both take equal actions.
(Continuous actions are clipped here, as with `--policy.squash none`.) The defaults here are this
file's own: config/ is not read. Only the environments (vector.py) and the random draws
(kernels.sample for actions, kernels.draw_segments) come from other files; the trainer uses the same
ones, so it draws the same numbers.

Everything is time-major: T steps (the horizon) of N agents are arrays (T, N, ...). An agent's T
steps are a segment. Minibatches are made of whole segments, so that a network with memory sees time
in order. (One without may learn from single steps in pufferl.py: `--train.draw steps`.) A discrete
action has one or more heads (choices made at once); a continuous one has dims (numbers). `storage`
holds a rollout:

    observations (T+1, N, ...)     what the policy sees at t; row T is row 0 of the next rollout
    resets (T+1, N)                1 if an episode begins with this observation
    valid (T+1, N)                 1 if the agent acts
    action_masks (T+1, N, A)       0 forbids an action; None if nothing is ever forbidden
    actions (T, N, heads or dims)  taken at t
    rewards, terminals, truncations (T, N)    results of the actions at t
    final_observations (N, ...)    last observations of the episodes that this step truncated
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import kernels
import vector
from errors import exit_on_error


@dataclass
class Args:
    env: tyro.conf.Positional[str] = "breakout"
    """A C environment (a folder of ocean/), gym/ID, pettingzoo/FAMILY/NAME or FILE.py:callable."""
    total_timesteps: int = 20_000_000
    """Steps of all agents together."""
    num_envs: int = 1024
    """Environments that run side by side; if they are in Python, 8 to 64 are enough."""
    horizon: int = 64
    """Steps per agent in a rollout (num_steps in CleanRL); these are one segment."""
    minibatch_size: int = 4096
    """Agent steps in one gradient step, a multiple of the horizon."""
    replay_ratio: float = 1.0
    """How often each step is used in updates, on average (as CleanRL's update_epochs)."""
    hidden_size: int = 64
    """Width of the network."""
    num_layers: int = 1
    """MinGRU layers."""
    learning_rate: float = 0.01
    """Muon's step size at the start; it falls to zero on a cosine (Loshchilov and Hutter 2017)."""
    momentum: float = 0.95
    """Muon's Nesterov momentum."""
    weight_decay: float = 0.0
    """Each update scales the weights by 1 - learning rate * weight_decay."""
    max_grad_norm: float = 1.5
    """Gradients of a larger norm, all weights together, are scaled down to it."""
    gamma: float = 0.98
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of GAE: 0 uses the value function alone, 1 the observed returns."""
    vtrace_rho_clip: float = 1.0
    """V-trace's rho-bar: upper bound of the importance weight of each TD error."""
    vtrace_c_clip: float = 1.0
    """V-trace's c-bar: upper bound of the weights by which later TD errors propagate back."""
    prio_alpha: float = 0.1
    """Exponent of prioritized sampling, p ∝ (sum of |advantage|)^alpha; 0 samples uniformly."""
    prio_beta0: float = 0.2
    """Initial exponent of the importance weights that correct the policy loss for it; annealed to
    1."""
    clip_coef: float = 0.2
    """PPO's clipping range: ratios are clipped to 1 ± this."""
    min_advantage_std: float = 0.0
    """Advantages are divided by their standard deviation, or by this if it is larger."""
    vf_coef: float = 1.0
    """Weight of the value loss."""
    vf_clip_coef: float = 1.0
    """Value clipping: a new value is clipped to the old one ± this."""
    vf_error_bound: float = math.inf
    """If the value errors of a minibatch have a larger standard deviation, divide its value loss
    by (deviation / this)^1.5."""
    ent_coef: float = 0.003
    """Weight of the entropy bonus."""
    target_kl: float | None = None
    """Adapt the learning rate each epoch so that the policy moves by this KL divergence (try 0.01);
    None leaves the rate to the cosine."""
    norm_obs: bool = False
    """Subtract the mean of all observations so far and divide by their standard deviation. The
    first rollout, and those that begin before step min(1024, total_timesteps / 20), update only
    these statistics."""
    norm_reward: bool = False
    """Divide rewards by the standard deviation of recent discounted returns. If the mean value
    target is then outside ±10, the network learns values without the excess (value_offset)."""
    reward_clip: float = math.inf
    """Clip rewards to ± this, after norm_reward."""
    seed: int = 0
    """Seed of the weights, the environments, the actions and the minibatches."""


class Moments:
    """Hold mean and 1 / standard deviation (`scale`) of all rows so far.

    Rows (n, ...) are added as in Chan et al. 1979.
    """

    def __init__(self, *shape):
        self.count, self.mean = 0, torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros_like(self.mean)

    def add(self, rows):
        if len(rows) == 0:
            return
        n, mean = len(rows), rows.double().mean(0)
        difference, total = mean - self.mean, self.count + n
        self.squares += ((rows - mean) ** 2).sum(0) + difference**2 * (self.count * n / total)
        self.mean += difference * (n / total)
        self.count = total

    @property
    def scale(self):
        return (self.squares / max(1, self.count) + 1e-8).rsqrt().float()


# -- The network: linear encoder, MinGRU layers, linear decoder ------------------------------------


class Policy(nn.Module):
    """observations (T, N, ...), state (layers, N, H) -> logits or means (T, N, A),
    values (T, N), state after."""

    def __init__(self, observation_size, heads, dims, width, num_layers):
        super().__init__()
        self.heads, self.outputs = heads, sum(heads) if heads else dims
        self.register_buffer("shift", None)  # with norm_obs: the observations' mean,
        self.register_buffer("scale", None)  # and 1 / their standard deviation
        self.encoder = nn.Linear(observation_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(num_layers))
        self.decoder = nn.Linear(width, self.outputs + 1)
        self.log_std = None if heads else nn.Parameter(torch.zeros(dims))
        nn.init.orthogonal_(self.encoder.weight, 2**0.5)
        for layer in self.layers:
            for block in layer.weight.data.chunk(3):
                nn.init.orthogonal_(block)
        # small weights: at first all actions are about equally likely
        nn.init.orthogonal_(self.decoder.weight[: self.outputs].data, 0.01)
        nn.init.orthogonal_(self.decoder.weight[self.outputs :].data, 1.0)
        for linear in (self.encoder, *self.layers, self.decoder):
            nn.init.zeros_(linear.bias)
        # chrono initialization (Tallec and Ollivier 2018): a quarter of the channels starts with
        # time constants of 2 to 64 steps
        for layer in self.layers:
            layer.bias.data[width : width + width // 4].uniform_(1, 63).log_().neg_()

    def forward(self, observations, state, resets, valid):
        x, after = observations.flatten(2).float(), []
        if self.shift is not None:
            x = ((x - self.shift) * self.scale).clamp(-10, 10)
        x = self.encoder(x)
        for layer, h in zip(self.layers, state, strict=True):
            candidate, gate, highway = layer(x).chunk(3, dim=-1)
            candidate = torch.where(candidate >= 0, candidate + 0.5, candidate.sigmoid())
            gate, remembered = gate.sigmoid(), []
            # MinGRU (Feng et al. 2024): the gate says how far h moves towards the candidate
            for t in range(len(x)):
                h = h * (1.0 - resets[t, :, None].float())  # a new episode begins without memory
                h = torch.where(valid[t, :, None] != 0, h + gate[t] * (candidate[t] - h), h)
                remembered.append(h)
            x = x + highway.sigmoid() * (torch.stack(remembered) - x)
            after.append(h)
        y = self.decoder(x)
        return y[..., :-1], y[..., -1], torch.stack(after)


# -- The rollout: T steps of all agents ------------------------------------------------------------


@torch.no_grad()
def rollout(args, envs, storage, policy, state, epoch):
    """Fill `storage`, and return what else learning needs.

    A namespace: logprobs (T, N), values (T+1, N), bootstraps (T, N), and the network's state before
    (`state`) and after (`following`).
    """
    T, N = storage.actions.shape[:2]
    data = SimpleNamespace(logprobs=torch.zeros(T, N), values=torch.zeros(T + 1, N),
                           bootstraps=torch.zeros(T, N), state=state)
    heads = torch.tensor(envs.action_heads) if envs.action_heads else None
    log_std = None if policy.log_std is None else policy.log_std.data
    no_reset, all_valid = torch.zeros(1, N), torch.ones(1, N)
    envs.begin()  # row T of the last rollout becomes row 0
    for t in range(T + 1):
        ready = envs.wait()
        assert ready == (0, t), "expected one buffer of environments"
        # A truncated episode would have continued: bootstrap from its final observation's value.
        if t > 0:
            cut = (storage.truncations[t - 1] != 0) & (storage.terminals[t - 1] == 0)
            if cut.any():
                _, final, _ = policy(storage.final_observations[None], state, no_reset, all_valid)
                data.bootstraps[t - 1] = torch.where(cut, final[0], 0.0)
        row = slice(t, t + 1)
        outputs, value, following = policy(storage.observations[row], state, storage.resets[row],
                                           storage.valid[row])
        if t == T:  # only the value is wanted
            data.values[t] = value[0]
        else:
            state = following
            # Writes actions, logprobs and values. Actions ~ Categorical(softmax(outputs)) for each
            # head, or Normal(outputs, exp(log_std)).
            masks = None if storage.action_masks is None else storage.action_masks[t]
            kernels.sample(torch.cat([outputs, value[..., None]], -1)[0], storage.actions[t],
                           data.logprobs[t], data.values[t], seed=args.seed, step=epoch * T + t,
                           heads=heads, log_std=log_std, masks=masks)
            envs.advance(0)
    data.following = state
    return data


def advantage(args, storage, rewards, offset, values, bootstraps, ratios):
    """Return advantages (T, N) by GAE with V-trace's clipped weights.

    Schulman et al. 2016, Espeholt et al. 2018. values and bootstraps exclude `offset`
    (value_offset); rewards are reduced to match.
    """
    advantages, next_advantage = torch.zeros_like(ratios), torch.zeros_like(ratios[0])
    next_value = values[-1]
    terminal, done = storage.terminals.float(), (storage.terminals | storage.truncations).float()
    rewards = rewards.clamp(-args.reward_clip, args.reward_clip)
    has_next_value = torch.ones_like(next_advantage)  # 0: terminated while inactive
    for t in reversed(range(len(ratios))):
        valid, not_done = storage.valid[t] != 0, 1.0 - done[t]
        rho, c = ratios[t].clamp(max=args.vtrace_rho_clip), ratios[t].clamp(max=args.vtrace_c_clip)
        has_future_value = not_done * has_next_value + done[t] - terminal[t]
        centered_reward = rewards[t] - offset * (1 - args.gamma * has_future_value)
        future_value = not_done * next_value + bootstraps[t]
        target = centered_reward + args.gamma * future_value
        delta = rho * (target - values[t])
        current_advantage = delta + args.gamma * args.gae_lambda * c * not_done * next_advantage
        advantages[t] = torch.where(valid, current_advantage, 0.0)
        # In a step without an action, carry the reward and what follows back to the last action.
        next_advantage = torch.where(valid, current_advantage, not_done * next_advantage)
        next_value = torch.where(valid, values[t], rewards[t] + future_value)
        has_next_value = torch.where(valid, 1.0, has_future_value)
    return advantages


# -- The loss and the optimizer --------------------------------------------------------------------


def log_probability(policy, y, actions, mask):
    """Return the log-probability (...) of actions and the entropy (...).

    actions (..., heads or dims); logits or means y (..., A).
    """
    if policy.log_std is not None:  # a Gaussian, with one standard deviation for each dimension
        normal = torch.distributions.Normal(y, policy.log_std.exp().expand_as(y),
                                            validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
    logprob, entropy = 0.0, 0.0
    y = y if mask is None else y.masked_fill(mask == 0, -1e9)
    for k, logits in enumerate(y.split(policy.heads, dim=-1)):
        logp = logits.log_softmax(-1).clamp(min=-1e9)  # logits may be -inf, and 0 * -inf is NaN
        logprob = logprob + logp.gather(-1, actions[..., k : k + 1].long())[..., 0]
        entropy = entropy - (logp.exp() * logp).sum(-1)
    return logprob, entropy


def ppo_loss(args, policy, y, v, batch, weights):
    """Return (loss, ratios (T, M), statistics) over the valid steps of M segments.

    The loss: clipped policy loss (Schulman et al. 2017), clipped value loss, entropy bonus.
    """
    valid = batch.valid != 0
    logprob, entropy = log_probability(policy, y, batch.actions, batch.action_masks)
    log_ratio = torch.where(valid, logprob - batch.logprobs, 0.0).clamp(-20, 20)
    ratio = log_ratio.exp()
    advantages = batch.advantages[valid].double()
    std = advantages.std(correction=0).float()  # also that of returns - batch.values
    a = batch.advantages - advantages.mean().float()
    a = weights * a / (std.clamp(min=args.min_advantage_std) + 1e-8)
    pg = torch.maximum(-a * ratio, -a * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef))
    returns = batch.advantages + batch.values
    clipped = batch.values + (v - batch.values).clamp(-args.vf_clip_coef, args.vf_clip_coef)
    vf = 0.5 * torch.maximum((v - returns) ** 2, (clipped - returns) ** 2)
    policy_loss, value_loss, entropy = pg[valid].mean(), vf[valid].mean(), entropy[valid].mean()
    kl = (ratio - 1 - log_ratio)[valid].mean()
    clipfrac = ((ratio - 1).abs() > args.clip_coef)[valid].float().mean()
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy,
              "approx_kl": kl, "clipfrac": clipfrac}
    vf_coef = args.vf_coef / (std / args.vf_error_bound).clamp(min=1) ** 1.5
    return policy_loss + vf_coef * value_loss - args.ent_coef * entropy, ratio.detach(), losses


NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                 (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))  # a, b, c of each step


@torch.no_grad()
def muon(args, policy, momenta, learning_rate):
    """Update by one step of Muon (Jordan et al. 2024); return the gradients' norm.

    The Nesterov momentum of a matrix is orthogonalized by Newton-Schulz, that of a vector is used
    as it is. The norm is that before clipping.
    """
    norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    if not norm.isfinite():
        raise FloatingPointError("a gradient is not finite: try a smaller --learning-rate.")
    for weight, m in zip(policy.parameters(), momenta, strict=True):
        if weight.grad is None:  # this weight is frozen
            continue
        m.mul_(args.momentum).add_(weight.grad)
        update = weight.grad + args.momentum * m
        if weight.ndim > 1:
            update = update.flatten(1)  # a convolution's weight has four dimensions
            tall = update.shape[0] > update.shape[1]
            x = update.T if tall else update
            x = x / (x.norm() + 1e-7)
            for a, b, c in NEWTON_SCHULZ:
                s = x @ x.T
                x = a * x + (b * s + c * s @ s) @ x
            update = (x.T if tall else x) * max(1, update.shape[0] / update.shape[1]) ** 0.5
        weight.mul_(1 - learning_rate * args.weight_decay)
        weight.sub_(learning_rate * update.view_as(weight))
        weight.grad.zero_()
    return norm


def value_offset(mean):
    """Return mean - clip(mean, -10, 10), which the network's values leave out.

    mean: of the value targets, in standard deviations of the return. PopArt has such a shift (van
    Hasselt et al. 2016).
    """
    return (mean - mean.clamp(-10, 10)).float()


# -- Learning from a rollout, and the run ----------------------------------------------------------


def learn(args, storage, data, rewards, offset, policy, momenta, count, epoch, progress,
          learning_rate):
    """Update `count` times on minibatches of segments; return the losses' means."""
    T, N = data.logprobs.shape
    valid, ratios, M = storage.valid[:T] != 0, torch.ones(T, N), args.minibatch_size // T
    index, weights = torch.zeros(M, dtype=torch.int64), torch.zeros(M)
    scratch = torch.zeros(N, dtype=torch.float64)
    beta = args.prio_beta0 + (1 - args.prio_beta0) * progress
    means, steps = {}, 0
    for minibatch in range(count):
        # Each minibatch computes all advantages again, with the newest values and ratios. (Only
        # those of the last minibatch's segments have changed.) Segments of larger |advantage| are
        # drawn more often (prioritized replay, Schaul et al. 2016).
        advantages = advantage(args, storage, rewards, offset, data.values, data.bootstraps, ratios)
        priorities = (advantages.abs() * valid).double().sum(0) ** args.prio_alpha + 1e-6
        priorities = torch.where(valid.any(0), priorities, 0.0)
        # Stratified sampling: one segment from each of M equal parts of the cumulated
        # priorities; weights = (K * priorities[index] / priorities.sum())^-beta for K segments
        # with a valid step.
        kernels.draw_segments(priorities, scratch, index, weights, seed=args.seed,
                              counter=(epoch, minibatch), beta=beta)
        batch = SimpleNamespace(
            valid=storage.valid[:T, index], actions=storage.actions[:, index],
            logprobs=data.logprobs[:, index], values=data.values[:T, index],
            advantages=advantages[:, index],
            action_masks=None if storage.action_masks is None else storage.action_masks[:T, index])
        y, v, _ = policy(storage.observations[:T, index], data.state[:, index],
                         storage.resets[:T, index], batch.valid)
        loss, ratios[:, index], losses = ppo_loss(args, policy, y, v, batch, weights)
        loss.backward()
        losses["grad_norm"] = muon(args, policy, momenta, learning_rate)
        data.values[:T, index] = torch.where(batch.valid != 0, v.detach(), batch.values)
        n = int(valid[:, index].sum())
        means = {key: means.get(key, 0.0) + (x.item() - means.get(key, 0.0)) * n / (steps + n)
                 for key, x in losses.items()}
        steps += n
    if count > 1:  # scales target_kl in train; one minibatch measures no KL
        means["advantage_std"] = batch.advantages[batch.valid != 0].std(correction=0).item()
    return means | {"learning_rate": learning_rate}


def train(args, envs, policy=None):
    """Roll out and learn; yield (steps, episodes' means, losses, policy) per epoch."""
    torch.manual_seed(args.seed)
    T, N = args.horizon, envs.num_agents
    if args.minibatch_size % T or not T <= args.minibatch_size <= T * N:
        raise SystemExit(f"--minibatch-size {args.minibatch_size}: take a multiple of --horizon "
                         f"{T}, {T * N} at most.")
    if hasattr(getattr(envs.driver_env, "env_single_observation_space", None), "spaces"):
        raise SystemExit("Dict and Tuple observations need an encoder for each field: add them "
                         "here, or use pufferl.py.")
    storage = SimpleNamespace(**{name: None if array is None else torch.from_numpy(array)
                                 for name, array in vars(envs.allocate(T)).items()})
    size = math.prod(envs.observation_shape)
    policy = policy or Policy(size, list(envs.action_heads or ()), envs.action_dims,
                              args.hidden_size, args.num_layers)
    if args.norm_obs:
        policy.shift, policy.scale = torch.zeros(size), torch.ones(size)
    momenta = [torch.zeros_like(weight) for weight in policy.parameters()]
    state = torch.zeros(len(policy.layers), N, policy.encoder.out_features)
    observation_stats, return_stats, target_stats = Moments(size), Moments(), Moments()
    returns, offset = torch.zeros(N, dtype=torch.float64), 0.0
    updates_owed, rate_factor, losses = 0.0, 1.0, {}
    for epoch in range(-(-args.total_timesteps // (T * N))):
        data = rollout(args, envs, storage, policy, state, epoch)
        state, valid, rewards = data.following, storage.valid[:T] != 0, storage.rewards
        if args.norm_reward:
            # Forget over 25 / (1 - gamma) steps of an agent: earlier policies earned those.
            for moments in (return_stats, target_stats):
                moments.count *= math.exp(-T * (1 - args.gamma) / 25)
                moments.squares *= math.exp(-T * (1 - args.gamma) / 25)
            for t in range(T):
                returns = returns * (1 - storage.resets[t].double())
                returns = torch.where(valid[t], args.gamma * returns + rewards[t], returns)
                return_stats.add(returns[valid[t]])
            rewards = rewards * return_stats.scale
            offset = value_offset(target_stats.mean * return_stats.scale)
            value_targets = advantage(args, storage, rewards, offset, data.values, data.bootstraps,
                                      torch.ones(T, N)) + data.values[:T] + offset
            # in the environment's units
            target_stats.add(value_targets[valid].double() / return_stats.scale.double())
            offset = value_offset(target_stats.mean * return_stats.scale)
        is_warmup = (observation_stats.count == 0
                            or epoch * T * N < min(1024, args.total_timesteps / 20))
        if not (args.norm_obs and is_warmup):
            updates_owed += args.replay_ratio * T * N / args.minibatch_size
        count, progress = int(updates_owed + 1e-9), min(1.0, epoch * T * N / args.total_timesteps)
        updates_owed -= count  # the fraction of an update that is left waits for the next epoch
        schedule = 0.5 * (1 + math.cos(math.pi * progress))
        # While the schedule is above 0.05, rate_factor steers approx_kl towards target_kl.
        if args.target_kl is not None and "advantage_std" in losses and schedule > 0.05:
            target = args.target_kl
            # Small advantages are mostly noise, and Muon's steps do not shrink with the gradient.
            if args.norm_reward:
                target *= min(1.0, losses["advantage_std"] / 0.2)
            step = math.sqrt(target / max(losses["approx_kl"], 1e-12))
            rate_factor = max(0.1, rate_factor * min(1.2, max(0.5, step)))
            # Rates above 4 * learning_rate make the policy unlearn rare decisive steps.
            rate_factor = min(10.0, 4.0 / schedule, rate_factor)
        losses = learn(args, storage, data, rewards, offset, policy, momenta, count, epoch,
                       progress, args.learning_rate * rate_factor * schedule)
        if args.norm_obs:
            observation_stats.add(storage.observations[:T].flatten(2)[valid])
            policy.shift, policy.scale = observation_stats.mean.float(), observation_stats.scale
        yield (epoch + 1) * T * N, envs.log(), losses, policy


def main(args):
    # The operations are so small that several threads would wait longer than they work.
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # products with denormal numbers are a hundred times slower
    envs = vector.make(args.env, num_envs=args.num_envs, seed=args.seed, num_buffers=1)
    folder = f"runs/{Path(args.env).stem}_{args.seed}_{int(time.time())}"
    writer, begun, last, score = SummaryWriter(folder), time.perf_counter(), 0.0, math.nan
    writer.add_text("settings", "\n".join(f"{key} {value}  " for key, value in vars(args).items()))
    try:
        for steps, episodes, losses, policy in train(args, envs):
            seconds = time.perf_counter() - begun
            for key, value in {**{f"environment/{k}": x for k, x in episodes.items()},
                               **{f"losses/{k}": x for k, x in losses.items()},
                               "charts/SPS": steps / seconds}.items():
                writer.add_scalar(key, value, steps)
            if episodes.get("n"):
                score = episodes.get("score", episodes.get("episode_return"))
            if seconds - last > 1 or steps >= args.total_timesteps:
                last = seconds
                print(f"{steps:12,} steps  {seconds:6.0f} s  {steps / seconds:9,.0f} a second  "
                      f"score {score:.3g}")
                torch.save(policy.state_dict(), f"{folder}/policy.pt")
    except KeyboardInterrupt:
        print("stopped")
    finally:
        envs.close()
        writer.close()
    print(f"the weights and the curves are in {folder}")


if __name__ == "__main__":
    with exit_on_error("ppo.py"):
        main(tyro.cli(Args))
