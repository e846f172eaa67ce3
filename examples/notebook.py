"""Train in a notebook until the stop button is pressed.

Copy each part behind `# %%` into a cell; VS Code and Jupytext open this file as a notebook.

    python -m examples.notebook

An interrupt can stop an epoch halfway. `load_checkpoint` then restores the last complete epoch.
Run the last cell again to continue.
"""

# %%
import models
from pufferl import PuffeRL, make

env = make("cartpole", num_envs=64)
trainer = PuffeRL(env=env, policy=models.MinGRUPolicy(env, hidden_size=32), batch_size=64 * 32,
                  total_timesteps=10_000_000)
scores = []
trainer.save_checkpoint("last.pt")


# %%
def train_until_stopped(epochs):
    """Train for some epochs; after an interrupt, restore the last complete one."""
    try:
        for _ in range(epochs):
            trainer.evaluate()
            trainer.train()
            trainer.save_checkpoint("last.pt")
            scores.append(trainer.environment.get("score"))
    except KeyboardInterrupt:
        trainer.load_checkpoint("last.pt")
    print(f"epoch {trainer.epoch}, scores {scores}")


# %%
train_until_stopped(5)
