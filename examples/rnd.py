"""Add an exploration bonus: random network distillation (Burda et al. 2018).

    python -m examples.rnd

A predictor learns the output of a random network. Its error is large for rare observations and
is added to the rewards between `evaluate` and `train`. The logs keep the true rewards.
"""

import torch

import models
from pufferl import PuffeRL, make


def network(inputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(),
                               torch.nn.Linear(64, 32))


if __name__ == "__main__":
    env = make("mountaincar", num_envs=64)
    trainer = PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=32),
                      batch_size=64 * 64, minibatch_size=1024, total_timesteps=80_000,
                      data_dir=None)
    inputs = env.single_observation_space.shape[0]
    target, predictor = network(inputs), network(inputs)
    optimizer = torch.optim.Adam(predictor.parameters(), 1e-3)
    errors = []
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        # after the action at t; after an episode's end, the first observation of the next
        observations = trainer.storage["observations"][1:].float()
        with torch.no_grad():
            features = target(observations)
            error = (predictor(observations) - features).square().mean(-1)
        trainer.storage["rewards"].add_(0.1 * error / (error.std() + 1e-8))
        trainer.train()
        observations, features = observations.flatten(0, 1), features.flatten(0, 1)
        for rows in torch.randperm(len(observations)).split(1024):
            loss = (predictor(observations[rows]) - features[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        errors.append(error.mean().item())
    print(f"prediction error: first {errors[0]:.4f}, last {errors[-1]:.4f}")
    trainer.close()
