"""A network, a loss and optimizers as users write them, for bench/same_bits.py; some with a mistake."""

import torch
from torch import nn


class Net(nn.Module):
    """One layer, then logits and value."""

    def __init__(self, env, hidden_size=32):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(hidden_size), nn.Tanh())
        self.body(torch.zeros(2, *env.single_observation_space.shape))
        self.head = nn.Linear(hidden_size, int(env.single_action_space.n) + 1)

    def encode_observations(self, observations):
        return self.body(observations.float())

    def decode_actions(self, hidden):
        y = self.head(hidden)
        return y[..., :-1], y[..., -1:]

    def forward(self, observations):
        return self.decode_actions(self.encode_observations(observations))


class Threaded(Net):
    thread_safe = True


def calm(minibatch):
    """The square of the logits."""
    return 0.1 * (minibatch.logits.square().mean(-1) * (minibatch.valid != 0)).mean()


class Slow(torch.optim.RMSprop):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, alpha=0.95)


class TooFewLogits(Net):
    def forward(self, observations):
        logits, value = super().forward(observations)
        return logits[..., :-1], value


class RaisesInForward(Net):
    def forward(self, observations):
        raise ValueError("this layer is missing")


class Detached(Net):
    def forward(self, observations):
        logits, value = super().forward(observations)
        return logits.detach(), value.detach()


def no_tensor(minibatch):
    return None
