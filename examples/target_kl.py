"""Adapt the learning rate to a target KL divergence.

    python -m examples.target_kl

Each epoch the learning rate rises or falls so that the next one moves the policy by about
`target_kl`. It starts at `learning_rate` and stays between a tenth and four times of it. The
divergence shrinks when the agent has learned and its advantages are small.
"""

import models
from pufferl import PuffeRL, make

if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    trainer = PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=32),
                      batch_size=64 * 32, minibatch_size=512, learning_rate=0.003, target_kl=0.02,
                      anneal_lr=False, total_timesteps=40_000, data_dir=None)
    divergences, rates = [], []
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        losses = trainer.train()
        divergences.append(losses["approx_kl"])
        rates.append(losses["learning_rate"])
    print(f"learning rate: first {rates[0]:.4f}, largest {max(rates):.4f}")
    print(f"KL divergence: first {divergences[0]:.4f}, last {divergences[-1]:.4f}")
    trainer.close()
