"""Add a term to the loss and replace the optimizer.

    python -m examples.custom_loss
    python pufferl.py train cartpole --train.loss examples/custom_loss.py:smooth
    python pufferl.py train cartpole --train.optimizer examples/custom_loss.py:Slow

The loss function returns a scalar tensor. Autograd differentiates it, and it is logged as
losses/custom_smooth_loss. docs/recipes.md lists the fields of a minibatch. The optimizer is made as
Class(parameters, lr=learning_rate); the schedule sets its learning rate.
"""

import torch

import models
from pufferl import PuffeRL, make


def smooth(minibatch):
    """Penalise changes of the action probabilities within an episode."""
    probabilities = minibatch.logits.softmax(-1)
    change = (probabilities[1:] - probabilities[:-1]).square().sum(-1)
    mask = (minibatch.resets[1:] == 0) & (minibatch.valid[1:] != 0)
    return 0.1 * (change * mask).mean()


class Slow(torch.optim.RMSprop):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, alpha=0.95)


if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    trainer = PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=32), loss=smooth,
                      optimizer=Slow, learning_rate=0.001, batch_size=64 * 32,
                      minibatch_size=512, total_timesteps=20_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        losses = trainer.train()
    print(f"smoothness loss {losses['custom_smooth_loss']:.5f}")
    trainer.close()
