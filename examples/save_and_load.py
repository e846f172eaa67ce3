"""Save a checkpoint with metadata and continue from it in another trainer.

    python -m examples.save_and_load      # writes half.pt and two run folders in experiments/

A checkpoint is one file: weights, optimizer, step, random counters, recurrent state, and the
environments if they are in C. A trainer with the same settings continues bit for bit. Without a
path, `save_checkpoint` writes into the run's folder, where --load-model-path and --resume look.
"""

import torch

import models
from pufferl import PuffeRL, make


def make_trainer():
    torch.manual_seed(1)
    env = make("cartpole", num_envs=64, num_buffers=2, num_threads=2)
    policy = models.MinGRUPolicy(env, hidden_size=16)
    return PuffeRL(env=env, policy=policy, batch_size=64 * 32, total_timesteps=40_000, seed=1)


if __name__ == "__main__":
    first, second = make_trainer(), make_trainer()
    for epoch in range(6):
        if epoch == 3:
            first.save_checkpoint("half.pt", metadata={"note": "half way"})
            print(second.load_checkpoint("half.pt"))
        first.evaluate()
        first.train()
    for _ in range(3):
        second.evaluate()
        second.train()
    pairs = zip(first.policy.parameters(), second.policy.parameters(), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)
    print("the same weights, bit for bit:", equal)
    first.close()
    second.close()
