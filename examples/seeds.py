"""Train several seeds in one script and print mean and deviation of the score.

    python -m examples.seeds
"""

import numpy as np
import torch

import models
from pufferl import PuffeRL, make


def make_trainer(seed):
    torch.manual_seed(seed)
    env = make("cartpole", num_envs=64, seed=seed)
    return PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=32), batch_size=64 * 32,
                   minibatch_size=512, learning_rate=0.02, seed=seed, total_timesteps=80_000,
                   data_dir=None)


if __name__ == "__main__":
    trainers = [make_trainer(seed) for seed in range(3)]
    curves = []
    while any(trainer.epoch < trainer.total_epochs for trainer in trainers):
        for trainer in trainers:
            trainer.evaluate()
            trainer.train()
        curves.append([trainer.environment.get("score", np.nan) for trainer in trainers])
    for epoch, scores in list(enumerate(curves, 1))[9::10]:
        print(f"{epoch * 64 * 32:7,} steps: {np.mean(scores):5.1f} ± {np.std(scores):4.1f}")
    for trainer in trainers:
        trainer.close()
