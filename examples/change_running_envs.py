"""Change an attribute of environments in Python while a trainer runs.

    python -m examples.change_running_envs

`set_attr` sets an attribute of each environment or of what its wrappers hold, in any backend.
`call` calls a method or reads an attribute. What `reset` reads takes effect at the next episode.
"""

import models
from pufferl import PuffeRL, make

if __name__ == "__main__":
    env = make("gym/CartPole-v1", num_envs=8)
    trainer = PuffeRL(env=env, policy=models.FeedForward(env), batch_size=8 * 64,
                      total_timesteps=5_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        env.set_attr("force_mag", 15.0 - trainer.epoch)
        trainer.evaluate()
        trainer.train()
    forces = env.call("force_mag")
    print(f"force at the end: {forces}")
    trainer.close()
