"""Train PPO on Atari in one file, like CleanRL's ppo_atari.py.

    pip install ale-py opencv-python
    python examples/cleanrl_ppo_atari.py                                # Breakout
    python examples/cleanrl_ppo_atari.py --env gym/ALE/Pong-v5 --num-envs 16 --num-workers 4
    python examples/cleanrl_ppo_atari.py --env gym/CartPole-v1 --learning-rate 2.5e-3

Plain Gymnasium and torch (github.com/vwxyzjn/cleanrl), except for the lines with "# ours".

What differs from a loop over gymnasium.vector: `make` finds the environment by name, preprocesses
Atari as usual, and chooses what steps it (ALE's own vector environment, or processes); `step` gives
infos as a list, one dict for each episode that ended; after an end the observation is the next
episode's first, so no step is lost.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this project's files

import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions.categorical import Categorical

import pufferlib.vector  # ours


@dataclass
class Args:
    env: str = "gym/ALE/Breakout-v5"
    """any name that `python pufferl.py train` takes, with discrete actions"""
    seed: int = 1
    """of the weights, the draws and the environments"""
    total_timesteps: int = 10_000_000
    """environment steps of all environments"""
    learning_rate: float = 2.5e-4
    """of Adam, falling to 0 linearly"""
    num_envs: int = 8
    """environments side by side"""
    num_workers: int | None = None
    """processes that step them (default: what is quickest for this environment)"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """of the generalised advantage estimate"""
    num_minibatches: int = 4
    """in one pass over a rollout"""
    update_epochs: int = 4
    """passes over a rollout"""
    clip_coef: float = 0.1
    """how far the probability ratio may leave 1, and a value its old one"""
    ent_coef: float = 0.01
    """weight of the entropy"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """above which the gradient is scaled down"""
    device: str = "cpu"
    """cpu, or cuda"""


def layer_init(layer, std=2**0.5, bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """Convolutions for images (Mnih et al. 2015), two layers of 64 otherwise."""

    def __init__(self, envs):
        super().__init__()
        # ours: of one environment, as gymnasium.vector has it
        shape = envs.single_observation_space.shape
        self.picture = len(shape) == 3
        if self.picture:
            convolutions = nn.Sequential(
                layer_init(nn.Conv2d(shape[0], 32, 8, stride=4)), nn.ReLU(),
                layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
                layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(), nn.Flatten())
            inputs, width = convolutions(torch.zeros(1, *shape)).shape[1], 512
            self.network = nn.Sequential(convolutions,
                                         layer_init(nn.Linear(inputs, width)), nn.ReLU())
        else:
            # in products this small threads wait for each other longer than they work
            torch.set_num_threads(1)
            inputs, width = int(np.prod(shape)), 64
            self.network = nn.Sequential(nn.Flatten(),
                                         layer_init(nn.Linear(inputs, width)), nn.Tanh(),
                                         layer_init(nn.Linear(width, width)), nn.Tanh())
        self.actor = layer_init(nn.Linear(width, envs.single_action_space.n), std=0.01)
        self.critic = layer_init(nn.Linear(width, 1), std=1)

    def hidden(self, x):
        return self.network(x.float() / 255.0 if self.picture else x.float())

    def get_value(self, x):
        return self.critic(self.hidden(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.hidden(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def train(args):
    """Train; returns the returns of all finished episodes."""
    np.random.seed(args.seed)  # noqa: NPY002, as CleanRL does
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    num_steps, num_envs = args.num_steps, args.num_envs
    batch_size = num_envs * num_steps
    envs = pufferlib.vector.make(args.env, num_envs=num_envs,  # ours
                                 num_workers=args.num_workers, seed=args.seed)
    agent = Agent(envs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    observation, _ = envs.reset(seed=args.seed)
    dtype = torch.as_tensor(observation).dtype  # ours: bytes stay bytes, a quarter of the memory
    obs = torch.zeros((num_steps, num_envs, *envs.single_observation_space.shape), dtype=dtype,
                      device=device)
    actions = torch.zeros((num_steps, num_envs), dtype=torch.int64, device=device)
    logprobs, rewards, dones, values = torch.zeros((4, num_steps, num_envs), device=device)
    next_obs = torch.tensor(observation, device=device)
    next_done = torch.zeros(num_envs, device=device)
    start_time, returns = time.time(), []
    num_iterations = max(1, args.total_timesteps // batch_size)

    for iteration in range(num_iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - iteration / num_iterations)
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[step], _, value = agent.get_action_and_value(next_obs)
            actions[step], values[step] = action, value.flatten()
            observation, reward, terminals, truncations, infos = envs.step(  # ours
                action.cpu().numpy())
            rewards[step] = torch.tensor(np.clip(reward, -1, 1), device=device)  # ours: unclipped
            next_done = torch.tensor(terminals | truncations, device=device).float()
            next_obs = torch.tensor(observation, device=device)  # ours: a copy, `step` reuses it
            returns += [info["episode_return"] for info in infos  # ours
                        if "episode_return" in info]

        with torch.no_grad():
            next_value = agent.get_value(next_obs).flatten()
            lastgaelam = torch.zeros(num_envs, device=device)
            advantages = torch.zeros_like(rewards)
            for t in reversed(range(num_steps)):
                last = t == num_steps - 1
                nonterminal = 1.0 - (next_done if last else dones[t + 1])
                nextvalues = next_value if last else values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nonterminal - values[t]
                lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
                advantages[t] = lastgaelam

        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
        b_advantages, b_values = advantages.flatten(), values.flatten()
        b_returns = b_advantages + b_values
        minibatch_size = -(-batch_size // args.num_minibatches)
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size, device=device).split(minibatch_size):
                _, logprob, entropy, value = agent.get_action_and_value(b_obs[index],
                                                                        b_actions[index])
                ratio, value = (logprob - b_logprobs[index]).exp(), value.flatten()
                a = b_advantages[index]
                a = (a - a.mean()) / (a.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(-a * ratio, -a * clipped).mean()
                change = (value - b_values[index]).clamp(-args.clip_coef, args.clip_coef)
                v_clipped = b_values[index] + change
                v_loss = 0.5 * torch.max((value - b_returns[index]).square(),
                                         (v_clipped - b_returns[index]).square()).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        steps, recent = (iteration + 1) * batch_size, returns[-20:]
        mean = f"{np.mean(recent):.1f}" if recent else "none yet"
        speed = steps / (time.time() - start_time)
        print(f"step {steps:,}  return {mean}  loss {loss.item():.3f}  {speed:,.0f} steps/s")
    envs.close()
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
