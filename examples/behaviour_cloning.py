"""Clone recorded episodes, then train with PPO.

    python -m examples.behaviour_cloning

Episodes are tensors, time first: observations, actions, and resets, which are 1 where an
observation is the first of an episode. Here a rule for CartPole records them.

The value is untrained at first, so the first updates can undo the cloned policy. If random play
finds no reward, use smaller steps: optimizer="adam", learning_rate=0.0003, ent_coef=0.0,
norm_reward=True, 4,096 steps an epoch.
"""

import torch

import models
from pufferl import PuffeRL, make

T, N = 64, 32


def record():
    """Play the rule: push to the side to which the pole falls."""
    episodes = {"observations": torch.zeros(T, N, 4),
                "actions": torch.zeros(T, N, dtype=torch.int64),
                "resets": torch.zeros(T, N, dtype=torch.uint8)}
    with make("cartpole", num_envs=N) as env:
        observations, done = env.reset(seed=1)[0], torch.ones(N, dtype=torch.uint8)
        for t in range(T):
            x = torch.from_numpy(observations)
            actions = (x[:, 2] + 0.5 * x[:, 3] > 0).long()
            episodes["observations"][t] = x
            episodes["actions"][t] = actions
            episodes["resets"][t] = done
            observations, _, terminals, truncations, _ = env.step(actions.int().numpy())
            done = torch.from_numpy(terminals | truncations)
    return episodes


def clone(policy, episodes, steps=80):
    """Maximise the likelihood of the recorded actions; returns the last cross-entropy."""
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    valid = torch.ones(T, N, dtype=torch.uint8)
    for _ in range(steps):
        state = {**policy.initial_state(N), "resets": episodes["resets"], "valid": valid}
        logits, _ = policy(episodes["observations"], state)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1),
                                                 episodes["actions"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    policy = models.MinGRUPolicy(env, hidden_size=32)
    loss = clone(policy, record())
    print(f"cross-entropy {loss:.3f}")
    trainer = PuffeRL(env=env, policy=policy, batch_size=64 * 64, minibatch_size=1024,
                      learning_rate=0.003, total_timesteps=40_000, data_dir=None)
    scores = []
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()
        if "score" in statistics:  # an episode ended
            scores.append(statistics["score"])
        trainer.train()
    print(f"score: best of the first epochs {max(scores[:5]):.0f}, last {scores[-1]:.0f}")
    trainer.close()
