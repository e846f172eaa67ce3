"""Make small trainers, networks and kinds of actions for the tests of the trainer."""

import math

import numpy as np
import torch
from gymnasium import spaces
from small_envs import Drawn

import models
import pufferl
import vector


def make_trainer(folder=None, env="cartpole", policy=None, *, num_envs=24, env_kwargs=None,
                 backend="native", num_buffers=2, num_threads=2, hidden_size=16, num_layers=2,
                 normalize=False, squash=False, change=lambda policy: None, seed=3, **train):
    """Return a trainer of 24 environments.

    policy: from the environments to a network, which `change` edits.
    """
    torch.manual_seed(seed)
    options = {"num_buffers": num_buffers} if backend == "native" else {}
    vecenv = vector.make(env, num_envs, backend=backend, num_threads=num_threads, seed=seed,
                         env_kwargs=env_kwargs, **options)
    if policy is None:
        policy = models.MinGRUPolicy(vecenv, hidden_size, num_layers, normalize)
    else:
        policy = policy(vecenv)
        policy = models.Normalized(vecenv, policy) if normalize else policy
    if squash:
        models.squash(policy, vecenv.single_action_space)
    change(policy)
    settings = {"horizon": 8, "minibatch_size": 64, "total_timesteps": 10**5, "learning_rate": 0.01,
                "seed": seed, "log_interval": 0.0,
                "env": env if isinstance(env, str) else env.__name__,
                "data_dir": None if folder is None else str(folder), **train}
    if normalize:
        settings["norm_obs"] = True
    return pufferl.PuffeRL(settings, vecenv, policy)


def run_epochs(trainer, epochs):
    """Run more epochs; return the network's tensors."""
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    return {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}


def learn(trainer, epochs=2):
    """Run more epochs, the last of this trainer; return the weights."""
    run_epochs(trainer, epochs)
    trainer.release()
    return trainer.arena.flat("weights").clone()


def initial_state(trainer):
    """Return the network's memory at the start of the rollout."""
    names = trainer.policy.initial_state(1) if hasattr(trainer.policy, "initial_state") else ()
    return {name: trainer.arena[f"initial_state/{name}"].clone() for name in names}


ACTIONS = {
    "discrete": {"env": "cartpole", "env_kwargs": {"max_steps": 5}},
    "continuous": {"env": "cartpole", "env_kwargs": {"continuous": True, "max_steps": 9}},
    "heads": {"env": "target", "num_envs": 6, "env_kwargs": {"num_agents": 4, "patience": 6}},
    "bytes": {"env": "squared", "env_kwargs": {"distance": 2}},
    "spaces": {"env": "spaces"},
    "masks": {"env": "masked"},
    "torque": {"env": "pendulum", "env_kwargs": {"max_steps": 9}},
    "squashed": {"env": "pendulum", "env_kwargs": {"max_steps": 9}, "squash": True},
    "planes": {"env": "minesweeper"},
    "half": {"env": lambda: Drawn(spaces.Box(-1, 1, (3,), np.float16), spaces.Discrete(2)),
             "backend": "serial"},
}


class Tanh(torch.nn.Module):
    """A custom network without memory, for which no fast engine runs."""

    def __init__(self, env):
        super().__init__()
        inputs = math.prod(env.single_observation_space.shape)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(inputs, 16), torch.nn.Tanh())
        self.decoder = models.Decoder(16, env.single_action_space)

    def forward(self, observations):
        x = self.encoder(observations.flatten(1).float())
        return self.decoder.split(self.decoder(x))


class Planes(Tanh):
    def __init__(self, env):
        super().__init__(env)
        shape = env.single_observation_space.shape
        inputs = 4 * math.prod(shape[1:])
        self.encoder = torch.nn.Sequential(
            torch.nn.Conv2d(shape[0], 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(inputs, 16), torch.nn.Tanh())

    def forward(self, observations):
        return self.decoder.split(self.decoder(self.encoder(observations.float())))


class Plain(torch.nn.Module):
    """A custom network: forward over (T, N, ...) alone."""

    def __init__(self, env):
        super().__init__()
        self.body = torch.nn.Linear(env.single_observation_space.shape[0], 16)
        self.logits = torch.nn.Linear(16, env.single_action_space.n)
        self.value = torch.nn.Linear(16, 1)

    def forward(self, observations, state):
        hidden = torch.tanh(self.body(observations.float()))
        return self.logits(hidden), self.value(hidden)


class Timed(torch.nn.Module):
    """A recurrent network over (T, N, ...) alone that reads the flags; several heads."""

    def __init__(self, env):
        super().__init__()
        self.body = torch.nn.Linear(env.single_observation_space.shape[0], 16)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, n) for n in env.action_heads)
        self.value = torch.nn.Linear(16, 1)

    def initial_state(self, num_agents):
        return {"sum": torch.zeros(1, num_agents, 16)}

    def forward(self, observations, state):
        x, s, outputs = torch.tanh(self.body(observations.float())), state["sum"][0], []
        keep = 1 - state["resets"].float().unsqueeze(-1)
        for t in range(len(x)):
            s = 0.5 * s * keep[t] + x[t]
            outputs.append(s)
        state["sum"] = s.unsqueeze(0)
        hidden = torch.stack(outputs)
        return [head(hidden) for head in self.heads], self.value(hidden)


class FixedSpread(torch.nn.Module):
    """A Normal whose standard deviation is no parameter."""

    def __init__(self, env):
        super().__init__()
        self.body = torch.nn.Linear(env.single_observation_space.shape[0], 2)

    def forward(self, observations):
        x = self.body(observations.float())
        return torch.distributions.Normal(x[:, :1], 0.5), x[:, 1:]


class Tripled(models.MinGRUPolicy):
    """An edit of the default network: logits times three."""

    def forward(self, observations, state):
        logits, value = super().forward(observations, state)
        return logits * 3, value


def around(wrapper):
    """Return a network with a recurrent layer around a FeedForward."""
    return lambda env: wrapper(env, models.FeedForward(env, 16), hidden_size=16)


NETWORKS = {
    "mingru": None,
    "feed-forward": lambda env: models.FeedForward(env, 16),
    "separate": lambda env: models.Separate(env, 16),
    "lstm": around(models.LSTMWrapper),
    "gru": around(models.GRUWrapper),
    "wrapped mingru": around(models.MinGRUWrapper),
    "planes": Planes,
    "tripled": lambda env: Tripled(env, 16, 2),
    "tanh": Tanh,
    "plain": Plain,
    "timed": Timed,
    "fixed spread": FixedSpread,
}
