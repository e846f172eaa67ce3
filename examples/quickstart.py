"""Train a policy with settings as keywords.

    python -m examples.quickstart

Settings that are not passed have the defaults in configuration.py. The environment's file in
config/, which the command line reads, is not read here. batch_size is agents x horizon. With
data_dir=None no file is written.
"""

import models
from pufferl import PuffeRL, make

if __name__ == "__main__":
    env = make("cartpole", num_envs=256)
    policy = models.MinGRUPolicy(env, hidden_size=32)
    trainer = PuffeRL(env=env, policy=policy, learning_rate=0.02, batch_size=256 * 32,
                      minibatch_size=1024, total_timesteps=300_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()
        losses = trainer.train()
    print(f"score {trainer.environment['score']:.0f}, entropy {losses['entropy']:.2f}")
    trainer.close()
