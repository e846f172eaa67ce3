"""Log to MLflow.

    pip install mlflow
    python -m examples.mlflow_logger

MLFLOW_TRACKING_URI, or mlflow.set_tracking_uri, says where it writes.
"""

import math

import mlflow

import models
from pufferl import NoLogger, PuffeRL, make


class MLflowLogger(NoLogger):
    """Log one MLflow run; settings are parameters named section.key."""

    def __init__(self, experiment="pufferl", name=None):
        mlflow.set_experiment(experiment)
        self.run = mlflow.start_run(run_name=name)

    def config(self, settings):
        flat = {f"{section}.{key}": value for section, values in settings.items()
                if isinstance(values, dict) for key, value in values.items()}
        mlflow.log_params({"env_name": settings["env_name"], **flat})

    def log(self, metrics, step):
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        mlflow.log_metrics(finite, step=step)

    def close(self):
        mlflow.end_run()


if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    trainer = PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=16),
                      logger=MLflowLogger(name="first"), log_interval=0.0, batch_size=64 * 16,
                      minibatch_size=512, total_timesteps=5_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        trainer.train()
    trainer.close()
