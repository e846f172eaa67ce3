"""A script as users write one, for bench/same_bits.py: three epochs, and a checkpoint of them."""

import torch

import models
from pufferl import PuffeRL, make

torch.manual_seed(3)  # the weights
env = make("cartpole", num_envs=64, seed=3)
trainer = PuffeRL(env=env, policy=models.FeedForward(env), learning_rate=0.01, horizon=32,
                  minibatch_size=512, replay_ratio=2, gamma=0.98, total_timesteps=3 * 64 * 32,
                  seed=3, data_dir=None)
while trainer.global_step < trainer.config["total_timesteps"]:
    trainer.evaluate()
    trainer.train()
    trainer.config["ent_coef"] = 0.02  # a schedule
trainer.save_checkpoint("trainer_state.pt")
trainer.close()
