"""Squash continuous actions into their bounds with a tanh.

    python -m examples.squashed_actions

docs/scripts.md compares a clip and a tanh. On the command line: --policy.squash tanh.
"""

import models
from pufferl import PuffeRL, make

if __name__ == "__main__":
    env = make("continuous", num_envs=64, num_threads=1)
    policy = models.squash(models.MinGRUPolicy(env, hidden_size=32), env.single_action_space)
    trainer = PuffeRL(env=env, policy=policy, horizon=32, minibatch_size=512, learning_rate=0.02,
                      gamma=0.95, vf_clip_coef=float("inf"), total_timesteps=150_000,
                      data_dir=None, log_interval=0)
    scores = []
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()  # with log_interval=0: episodes since the last epoch
        scores.append(statistics.get("score", 0.0))
        entropy = trainer.train()["entropy"]
    largest = trainer.storage["actions"].abs().max()
    print(f"score: first {scores[0]:.2f}, last {scores[-1]:.2f}; largest action {largest:.2f}")
    trainer.close()
