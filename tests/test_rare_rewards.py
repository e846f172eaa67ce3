"""The games of bench/rare_rewards.py: their tables, and what is learnt of one."""

import numpy as np
import pytest

from bench import rare_rewards


def play(env, choose, episodes):
    """Returns, and whether each episode ended with success, of episodes in which `choose(state)` acts."""
    returns, won = [], []
    for episode in range(episodes):
        env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            observation, reward, end, cut, _ = env.step(choose(env.state))
            assert env.observation_space.contains(np.asarray(observation))
            total, over = total + reward, end or cut
        returns.append(total)
        won.append(end and reward >= 0.5)
    return np.array(returns), np.mean(won)


@pytest.mark.parametrize("name", rare_rewards.GAMES)
def test_random_play_is_what_the_tables_say(name):
    env, facts = rare_rewards.Game(rare_rewards.tables_of(name)), rare_rewards.tables_of(name).facts
    rng = np.random.default_rng(0)
    returns, success = play(env, lambda state: rng.integers(env.action_space.n), 1500)
    error = np.sqrt(facts["success"] / 1500)  # standard error
    assert 0.002 < facts["success"] < 0.05 and abs(success - facts["success"]) < 4 * error
    assert abs(returns.mean() - facts["random"]) < 4 * returns.std() / 1500**0.5 + 1e-3
    assert facts["best"] > 0.8


@pytest.mark.parametrize("name", ["maze", "lock", "deep_sea_5", "corridor", "key_and_door", "push_box"])
def test_the_best_score_is_reached_by_the_policy_that_the_tables_give(name):
    tables = rare_rewards.tables_of(name)
    env, value, best = rare_rewards.Game(tables), np.zeros(len(tables.rewards)), []
    for _ in range(tables.length):
        chances = tables.rewards + np.where(tables.ends, 0.0, value[tables.following])
        value = chances.max(1)
        best.insert(0, chances.argmax(1))  # by the steps that are left
    returns, _ = play(env, lambda state: best[env.steps][state], 300)
    assert returns.mean() == pytest.approx(tables.facts["best"], abs=4 * returns.std() / 300**0.5 + 1e-9)
