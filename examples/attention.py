"""Remember the last steps with a small transformer.

    python -m examples.attention

The recurrent state stores the features of the last steps. An update can thus attend to steps before
its segment, as the rollout does. The task, `memory`, is to recall a cue after 16 steps.
"""

import torch

import models
from pufferl import PuffeRL, make


class Attention(torch.nn.Module):
    """Attend to the last `window` steps of the current episode."""

    def __init__(self, env, hidden_size=64, window=24):
        super().__init__()
        inputs, self.window = env.single_observation_space.shape[0], window
        self.encoder = torch.nn.Linear(inputs, hidden_size)
        self.age = torch.nn.Parameter(0.02 * torch.randn(window, hidden_size))
        self.queries = torch.nn.Linear(hidden_size, hidden_size)
        self.pairs = torch.nn.Linear(hidden_size, 2 * hidden_size)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden_size) for _ in range(2))
        self.mlp = torch.nn.Sequential(torch.nn.Linear(hidden_size, 2 * hidden_size),
                                       torch.nn.GELU(),
                                       torch.nn.Linear(2 * hidden_size, hidden_size))
        self.decoder = models.Decoder(hidden_size, env.single_action_space)

    def initial_state(self, num_agents):
        """Make the features of the last steps, oldest first.

        The last column is 1 in rows of the current episode."""
        return {"past": torch.zeros(self.window, num_agents, self.encoder.out_features + 1)}

    def forward(self, observations, state):
        """Attend, at each step, to `past` and to the segment before it.

        observations: (T, N, D)."""
        x, past = self.encoder(observations.float()), state["past"]
        rows, episode = torch.cat([past[..., :-1], x]), state["resets"].cumsum(0)
        episodes = torch.cat([past[..., -1] - 1, episode])  # -1: an episode that has ended
        # (T, N, window, hidden)
        keys = rows.unfold(0, self.window, 1)[1:].movedim(-1, 2) + self.age
        mask = episodes.unfold(0, self.window, 1)[1:] == episode[..., None]
        key, value = self.pairs(keys).chunk(2, -1)
        query = self.queries(self.norms[0](x))[..., None, :]
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value,
                                                                    mask[..., None, :])
        x = x + attended.squeeze(-2)
        current = (episodes[-self.window:] == episode[-1])[..., None]
        state["past"] = torch.cat([rows[-self.window:], current], -1)
        return self.decoder.split(self.decoder(x + self.mlp(self.norms[1](x))))

    def forward_eval(self, observations, state):
        """Run one step; observations: (N, D)."""
        step = {**state, "resets": state["resets"][None]}
        logits, value = self(observations[None], step)
        state["past"] = step["past"]
        return logits[0], value[0]


if __name__ == "__main__":
    env = make("memory", num_envs=64, num_threads=1)
    policy = Attention(env)
    trainer = PuffeRL(env=env, policy=policy, batch_size=64 * 32, minibatch_size=512,
                      replay_ratio=4, gamma=0.98, optimizer="adam", learning_rate=1e-3,
                      ent_coef=0.001, total_timesteps=120_000, data_dir=None)
    while trainer.epoch < trainer.total_epochs:
        statistics = trainer.evaluate()
        trainer.train()
    print(f"recalled {statistics['score']:.2f} of the cues; chance is 0.5")
    trainer.close()
