"""Train one policy on tasks of increasing difficulty.

    python -m examples.curriculum

Each stage has a new trainer, which takes over the policy. The optimizer's momentum and the
schedule of the learning rate restart. The observations must keep their size.
"""

import models
from pufferl import PuffeRL, make

if __name__ == "__main__":
    policy, scores = None, []
    for length in (2, 4, 8):  # memory: recall a cue from this many steps ago
        env = make("memory", num_envs=256, env_kwargs={"length": length})
        if policy is None:
            policy = models.MinGRUPolicy(env, hidden_size=32)
        trainer = PuffeRL(env=env, policy=policy, batch_size=256 * 32, total_timesteps=200_000,
                          data_dir=None)
        while trainer.epoch < trainer.total_epochs:
            trainer.evaluate()
            trainer.train()
        scores.append(trainer.environment["score"])
        print(f"length {length}: score {scores[-1]:.2f}")
        trainer.close()
