"""Write metrics to a CSV file with a custom logger.

    python -m examples.custom_logger      # writes score.csv

A logger derives from NoLogger and overrides what it needs of its four methods: config, log,
artifact, close.
WandbLogger and TensorBoardLogger of pufferl are passed in the same way.
"""

import csv

import models
from pufferl import NoLogger, PuffeRL, make


class CsvLogger(NoLogger):
    """Append two columns: step and score."""

    def __init__(self, path):
        self.path = path

    def config(self, settings):
        self.append("step", f"score of {settings['env_name']}")

    def log(self, metrics, step):
        self.append(step, metrics.get("environment/score"))

    def append(self, *row):
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerow(row)


if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    trainer = PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=16),
                      logger=CsvLogger("score.csv"), log_interval=0.0, batch_size=64 * 16,
                      minibatch_size=512, total_timesteps=5_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        trainer.train()
    trainer.close()
