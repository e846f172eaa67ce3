"""Train a custom network with an LSTM.

    python -m examples.custom_network
    python pufferl.py train cartpole --policy.name examples/custom_network.py:Wide --rnn.name lstm

`encode_observations` and `decode_actions` are what a recurrent wrapper calls. A network without
memory needs `forward(observations)` over a batch instead. Keyword arguments of `__init__` whose
default is a number, bool or string are settings: `hidden_size=64` is --policy.hidden-size.
"""

import torch

import models
from pufferl import PuffeRL, make


class Wide(torch.nn.Module):
    """Two layers with a normalisation between them."""

    def __init__(self, env, hidden_size=64):
        super().__init__()
        inputs, actions = env.single_observation_space.shape[0], env.single_action_space.n
        self.body = torch.nn.Sequential(
            torch.nn.Linear(inputs, hidden_size), torch.nn.LayerNorm(hidden_size), torch.nn.GELU(),
            torch.nn.Linear(hidden_size, hidden_size), torch.nn.GELU())
        self.logits = torch.nn.Linear(hidden_size, actions)
        self.value = torch.nn.Linear(hidden_size, 1)

    def encode_observations(self, observations, state=None):
        return self.body(observations)

    def decode_actions(self, hidden):
        return self.logits(hidden), self.value(hidden)


if __name__ == "__main__":
    env = make("cartpole", num_envs=32, num_threads=1)  # small networks are faster on one core
    policy = models.LSTMWrapper(env, Wide(env), hidden_size=64, input_size=64)
    trainer = PuffeRL(env=env, policy=policy, batch_size=32 * 16, minibatch_size=512,
                      optimizer="adam", learning_rate=1e-3, total_timesteps=4_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        trainer.evaluate()
        losses = trainer.train()
    print(f"entropy {losses['entropy']:.3f}, of a random policy 0.693")
    trainer.close()
