"""Set the learning rate by hand, in stages.

    python -m examples.learning_rate_stages

An assignment to `trainer.learning_rate` overrides the schedule and is saved in checkpoints.
"""

import models
from pufferl import PuffeRL, make

if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    policy = models.MinGRUPolicy(env, hidden_size=32)
    trainer = PuffeRL(env=env, policy=policy, batch_size=64 * 32, total_timesteps=200_000,
                      data_dir=None)
    stages = {0: 0.02, 100_000: 0.005, 160_000: 0.001}  # from this step on, this learning rate
    rates = []
    while trainer.epoch < trainer.total_epochs:
        trainer.learning_rate = stages[max(step for step in stages if step <= trainer.global_step)]
        trainer.evaluate()
        rates.append(trainer.train()["learning_rate"])
    print(f"{len(rates)} updates, from {rates[0]} to {rates[-1]}")
    trainer.close()
