"""CleanRL's loop: our policies with its methods give the same numbers as by themselves, and its
script and the recipe train."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_envs import declares

import models
from errors import NetworkError

ROOT = Path(__file__).resolve().parent.parent
ACTIONS = [spaces.Discrete(3), spaces.MultiDiscrete([2, 4]), spaces.Box(-1, 1, (2,), np.float32)]
NUMBERS = spaces.Box(-1, 1, (5,), np.float32)


@pytest.mark.parametrize("action_space", ACTIONS)
def test_feed_forward(action_space):
    torch.manual_seed(0)
    policy, x = models.FeedForward(declares(NUMBERS, action_space), hidden_size=8), torch.randn(7, 5)
    agent = models.CleanRLAgent(policy)
    action, logprob, entropy, value = agent.get_action_and_value(x)
    assert action.shape == (7, *action_space.shape)
    assert logprob.shape == entropy.shape == (7,) and value.shape == (7, 1)
    torch.testing.assert_close(agent.get_action_and_value(x, action)[1], logprob)
    torch.testing.assert_close(agent.get_value(x), value)
    logprob.sum().backward()
    assert all(p.grad is not None for p in agent.policy.encoder.parameters())


def test_a_policy_that_squashes_its_actions_is_refused():
    env = declares(NUMBERS, ACTIONS[2])
    for agent, policy in ((models.CleanRLAgent, models.FeedForward(env, 8)),
                          (models.RecurrentCleanRLAgent, models.MinGRUPolicy(env, 8))):
        with pytest.raises(NetworkError, match="squash"):
            agent(models.squash(policy, env.single_action_space))


@pytest.mark.parametrize(("wrapper", "action_space"), [
    ("mingru", ACTIONS[0]), ("mingru", ACTIONS[2]), ("lstm", ACTIONS[1])])
def test_recurrent_in_one_pass_or_step_by_step(wrapper, action_space):
    torch.manual_seed(0)
    env, T, N = declares(NUMBERS, action_space), 6, 4
    policy = models.MinGRUPolicy(env, hidden_size=8) if wrapper == "mingru" else models.LSTMWrapper(
        env, models.FeedForward(env, hidden_size=8), hidden_size=8)
    agent = models.RecurrentCleanRLAgent(policy)
    x, done, state = torch.randn(T, N, 5), torch.rand(T, N) < 0.3, agent.initial_state(N)
    steps = []
    for t in range(T):
        *outputs, state = agent.get_action_and_value(x[t], state, done[t])
        steps.append(outputs)
    parts = [torch.cat(part) for part in zip(*steps, strict=True)]
    arguments = x.flatten(0, 1), agent.initial_state(N), done.flatten()
    *whole, last = agent.get_action_and_value(*arguments, parts[0])
    for ours, expected in zip([*whole, agent.get_value(*arguments), *last],
                              [*parts, parts[3], *state], strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples/cleanrl_ppo_atari.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look for it there
    specification.loader.exec_module(module)
    return module


def test_the_script_trains_reads_pictures_and_is_short(example, capsys):
    args = example.Args(env="gym/CartPole-v1", total_timesteps=512, num_steps=32,
                        learning_rate=1e-3)
    assert np.mean(example.train(args)) > 5
    assert capsys.readouterr().out.count("steps/s") == 2
    pictures = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    agent = example.Agent(declares(pictures, spaces.Discrete(6)))
    outputs = agent.get_action_and_value(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    assert [tuple(output.shape) for output in outputs] == [(2,), (2,), (2,), (2, 1)]
    text = (ROOT / "examples/cleanrl_ppo_atari.py").read_text()
    assert len(text.splitlines()) <= 250 and 5 <= text.count("# ours") <= 15


@pytest.mark.slow
def test_the_script_learns(example):
    args = example.Args(env="gym/CartPole-v1", total_timesteps=80_000, num_steps=64,
                        learning_rate=2.5e-3)
    assert np.mean(example.train(args)[-20:]) > 100, "a random policy has 22"
