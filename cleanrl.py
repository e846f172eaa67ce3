"""CleanRL's two agents over any policy of models.py: a CleanRL script trains with this vectorizer by a few lines.

    envs = vector.make("gym/CartPole-v1", num_envs=16)
    agent = cleanrl.Policy(models.Default(envs.driver_env))                 # the Agent of ppo.py
    agent = cleanrl.RecurrentPolicy(models.Policy(envs.driver_env))         # the Agent of ppo_atari_lstm.py

The whole loop of ppo.py in this form is in docs/recipes.md, and tested.
"""

import torch
from torch import nn


def _distributions(logits):
    """One torch distribution a head (or dimension) from a policy's logits."""
    if isinstance(logits, torch.distributions.Normal):
        return [torch.distributions.Independent(logits, 1)]
    heads = logits if isinstance(logits, (list, tuple)) else [logits]
    return [torch.distributions.Categorical(logits=head) for head in heads]


def _act(logits, action):
    """(action, log-probability, entropy) of the joint distribution; draws the action where it is None."""
    parts = _distributions(logits)
    single = len(parts) == 1
    if action is None:
        action = parts[0].sample() if single else torch.stack([part.sample() for part in parts], dim=-1)
    columns = [action] if single else action.unbind(-1)
    logprob = sum(part.log_prob(column) for part, column in zip(parts, columns, strict=True))
    return action, logprob, sum(part.entropy() for part in parts)


class Policy(nn.Module):
    """The agent of CleanRL's ppo.py over a feed-forward policy.

    get_value(x) -> (B, 1); get_action_and_value(x, action=None) -> action (B,) or (B, heads or dims), logprob (B,),
    entropy (B,), value (B, 1); x (B, *observation).
    """

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def get_value(self, x):
        return self.policy.forward_eval(x)[1]

    def get_action_and_value(self, x, action=None):
        logits, value = self.policy.forward_eval(x)
        return *_act(logits, action), value


class RecurrentPolicy(nn.Module):
    """The agent of CleanRL's ppo_atari_lstm.py over a recurrent policy.

    `state` is a tuple of tensors (layers, N, size), from initial_state(N); x (T·N, *observation) holds T steps of N
    agents, time outside, and done (T·N,) is 1 where an observation begins an episode.
    get_value(x, state, done) -> (T·N, 1); get_action_and_value(x, state, done, action=None) -> action, logprob
    (T·N,), entropy (T·N,), value (T·N, 1), new state.
    """

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def initial_state(self, num_agents):
        return tuple(self.policy.initial_state(num_agents).values())

    def _run(self, x, state, done):
        names, N = list(self.policy.initial_state(1)), state[0].shape[1]
        T = len(x) // N
        carried = dict(zip(names, state, strict=True)) | {"resets": done.reshape(T, N).to(torch.uint8)}
        logits, value = self.policy(x.reshape(T, N, *x.shape[1:]), carried)
        if isinstance(logits, torch.distributions.Normal):
            logits = torch.distributions.Normal(logits.loc.flatten(0, 1), logits.scale.flatten(0, 1))
        elif isinstance(logits, (list, tuple)):
            logits = [head.flatten(0, 1) for head in logits]
        else:
            logits = logits.flatten(0, 1)
        return logits, value.reshape(T * N, 1), tuple(carried[name] for name in names)

    def get_value(self, x, state, done):
        return self._run(x, state, done)[1]

    def get_action_and_value(self, x, state, done, action=None):
        logits, value, state = self._run(x, state, done)
        return *_act(logits, action), value, state
