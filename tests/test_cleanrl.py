"""Our policies with CleanRL's methods: they give the same numbers as the policies themselves, and the
recipe's training loop learns."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

import models

ROOT = Path(__file__).resolve().parent.parent
ACTIONS = [spaces.Discrete(3), spaces.MultiDiscrete([2, 4]), spaces.Box(-1, 1, (2,), np.float32)]


def environment(action_space):
    return SimpleNamespace(
        single_observation_space=spaces.Box(-1, 1, (5,), np.float32),
        single_action_space=action_space
    )


@pytest.mark.parametrize("action_space", ACTIONS)
def test_feed_forward(action_space):
    torch.manual_seed(0)
    agent, x = models.CleanRLAgent(models.FeedForward(environment(action_space), hidden_size=8)), torch.randn(7, 5)
    action, logprob, entropy, value = agent.get_action_and_value(x)
    assert (action.shape == (7, *action_space.shape) and logprob.shape == entropy.shape == (7,)
            and value.shape == (7, 1))
    again = agent.get_action_and_value(x, action)
    torch.testing.assert_close(again[1], logprob)
    torch.testing.assert_close(agent.get_value(x), value)
    logprob.sum().backward()
    assert all(p.grad is not None for p in agent.policy.encoder.parameters())


def test_a_policy_that_squashes_its_actions_is_refused():
    env = environment(ACTIONS[2])
    for agent, policy in ((models.CleanRLAgent, models.Default(env, 8)),
                          (models.RecurrentCleanRLAgent, models.MinGRUPolicy(env, 8))):
        with pytest.raises(models.NetworkFault, match="squashes its actions by a tanh"):
            agent(models.squash(policy, env.single_action_space))


@pytest.mark.parametrize("wrapper", ["mingru", "lstm"])
@pytest.mark.parametrize("action_space", ACTIONS)
def test_recurrent_in_one_pass_or_step_by_step(action_space, wrapper):
    torch.manual_seed(0)
    env, T, N = environment(action_space), 6, 4
    policy = models.MinGRUPolicy(env, hidden_size=8) if wrapper == "mingru" else models.LSTMWrapper(
        env, models.FeedForward(env, hidden_size=8), hidden_size=8)
    agent = models.RecurrentCleanRLAgent(policy)
    x, done, state = torch.randn(T, N, 5), torch.rand(T, N) < 0.3, agent.initial_state(N)
    steps = []
    for t in range(T):
        *outputs, state = agent.get_action_and_value(x[t], state, done[t])
        steps.append(outputs)
    actions, logprobs, entropies, values = (torch.cat(parts) for parts in zip(*steps, strict=True))
    whole = agent.get_action_and_value(x.flatten(0, 1), agent.initial_state(N),
                                       done.flatten(), actions)
    for ours, expected in zip(whole, (actions, logprobs, entropies, values), strict=False):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(agent.get_value(x.flatten(0, 1), agent.initial_state(N), done.flatten()), values)
    for a, b in zip(whole[4], state, strict=True):
        torch.testing.assert_close(a, b)


def recipe():
    text = (ROOT / "docs" / "recipes.md").read_text()
    return re.search(r"## CleanRL's loop.*?```python\n(.*?)```", text, re.DOTALL).group(1)


def test_the_recipe_runs():
    exec(compile(recipe().replace("range(80)", "range(2)"), "recipes.md", "exec"), {})


@pytest.mark.slow
def test_the_recipe_learns():
    names = {}
    exec(compile(recipe(), "recipes.md", "exec"), names)
    assert np.mean(names["returns_of_episodes"][-20:]) > 150
