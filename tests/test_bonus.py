"""Exploration bonuses: novelty falls with visits, a step is paid for what it led to."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_envs import declares
from trainers import make_trainer

import models
from errors import ConfigError

BOARD = spaces.Box(0, 3, (4, 5), np.int8)
NUMBERS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
CPU = torch.device("cpu")


def test_counts_are_of_whole_observations():
    counts = models.Counts(declares(BOARD), CPU)
    boards = torch.zeros(4, 4, 5, dtype=torch.int8)
    boards[2, 3, 4] = 1
    valid = torch.tensor([1, 1, 1, 0], dtype=torch.uint8)
    novelty = counts.update(boards, valid)
    np.testing.assert_allclose(novelty, [2**-0.5, 2**-0.5, 1, 2**-0.5])
    np.testing.assert_allclose(counts.update(boards[:1], valid[:1]), [3**-0.5])
    again = models.Counts(declares(BOARD), CPU)
    again.load_state_dict(counts.state_dict())
    np.testing.assert_allclose(again.update(boards[2:3], valid[:1]), [2**-0.5])
    with pytest.raises(ConfigError, match="float32"):
        models.Counts(declares(NUMBERS), CPU)


@pytest.mark.parametrize("space", [BOARD, NUMBERS, spaces.Discrete(7)], ids=str)
def test_what_is_often_observed_is_less_novel_than_what_never_was(space):
    torch.manual_seed(0)
    space.seed(0)
    rnd = models.RND(declares(space), CPU)
    often, never = (torch.as_tensor(np.array([space.sample()] * 64)) for _ in range(2))
    often, never = (rows.view(64, -1) if rows.dim() == 1 else rows for rows in (often, never))
    target = [parameter.clone() for parameter in rnd.target.parameters()]
    valid = torch.ones(64, dtype=torch.uint8)
    with torch.no_grad():
        first = rnd(never[:1]).item()
    for _ in range(60):
        rnd.update(often, valid)
    with torch.no_grad():
        assert rnd(often[:1]) < 0.1 * rnd(never[:1]) and rnd(never[:1]) > 0.1 * first
    assert all(map(torch.equal, target, rnd.target.parameters()))
    head = rnd.head[0].weight.clone()
    rnd.update(never, 0 * valid)
    assert head.equal(rnd.head[0].weight)


def test_a_step_is_paid_for_what_it_led_to_in_the_same_episode():
    bonus = models.Bonus("count", declares(BOARD), 2, CPU)
    observations = torch.zeros(4, 2, 4, 5, dtype=torch.int8)
    observations[1, 0, 0, 0] = 1  # new after step 0 of agent 0
    observations[2, 1, 0, 0] = 2  # the start of another episode of agent 1
    resets, valid = torch.zeros(2, 4, 2, dtype=torch.uint8)
    valid += 1
    resets[2, 1], valid[3, 0] = 1, 0
    bonuses = bonus.update(observations, resets, valid)
    novelty = torch.tensor([[1, 3**-0.5], [3**-0.5, 0], [0, 3**-0.5]])
    np.testing.assert_allclose(bonuses / bonuses[0, 0], novelty, rtol=1e-6)
    steps = torch.cat([novelty, torch.zeros(1, 2)]).double()
    returns, expected = torch.zeros(2, dtype=torch.float64), []
    for row, flags in zip(steps, valid, strict=False):
        returns = torch.where(flags != 0, 0.99 * returns + row, returns)
        expected += returns[flags != 0].tolist()
    deviation = np.std(expected[:6])
    np.testing.assert_allclose(bonuses[0, 0], 1 / deviation, rtol=1e-5)


@pytest.mark.parametrize("norm_reward", [False, True])
def test_the_trainer_learns_from_rewards_and_bonuses_and_logs_rewards(norm_reward):
    trainer = make_trainer(bonus="rnd", bonus_coef=2.0, norm_reward=norm_reward, log_interval=0.0)
    trainer.evaluate()
    trainer.train()
    rewards = trainer.storage["rewards"] * (trainer.reward_scale.factor if norm_reward else 1.0)
    extra = trainer.buffers.rewards - rewards
    assert extra.min() >= 0 and extra.max() > 0
    assert trainer.statistics.entry["losses/bonus"] == pytest.approx(float(extra.mean()) / 2, rel=1e-5)
    trainer.release()
