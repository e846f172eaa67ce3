"""Split a minibatch of a custom network into parts that fit into memory.

    python -m examples.gradient_accumulation

The gradients of the parts add up, so the update is the same. The default network works in small
parts by itself.
"""

import torch

import models
from pufferl import PuffeRL, make


def train(max_minibatch_size):
    torch.manual_seed(0)
    env = make("cartpole", num_envs=64, num_threads=1)
    policy = models.FeedForward(env, hidden_size=32)
    trainer = PuffeRL(env=env, policy=policy, batch_size=64 * 16, minibatch_size=1024,
                      max_minibatch_size=max_minibatch_size, total_timesteps=4_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        trainer.train()
    trainer.close()
    return policy.encoder[0].weight.detach().clone()


if __name__ == "__main__":
    difference = (train(None) - train(128)).abs().max()
    print(f"largest difference between one pass and eight: {difference:.1e}")
