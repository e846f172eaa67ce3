"""Hand-written engines run only for what they implement; what users give in place of a part of the algorithm."""

from pathlib import Path

import pytest
import torch
from torch import nn

import models
import ppo
import pufferl
import vector
from errors import NetworkError
from fast import compiled, verify

ROOT = Path(__file__).resolve().parent.parent


def without_memory(env, hidden_size=16):
    return models.FeedForward(env, hidden_size)


def normalised(env, hidden_size=16):
    return models.Normalized(env, models.Separate(env, hidden_size))


def with_memory(env, hidden_size=16):
    return models.MinGRUPolicy(env, hidden_size, num_layers=2, normalize=True)


def test_the_digest_is_that_of_the_source():
    assert verify.digest() == verify.DIGEST, f"make the edit in fast/, then DIGEST = {verify.digest()!r}"


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("env", ["cartpole", "pendulum", "spaces", "masked"])
@pytest.mark.parametrize("kind", [without_memory, normalised, with_memory])
def test_the_compiled_network_is_the_policy(kind, env, scale, monkeypatch):
    """Outputs, state and gradients, also where large weights make large numbers."""
    torch.manual_seed(0)
    vecenv = vector.make(env, num_envs=2, num_threads=1)
    policy = kind(vecenv)
    with torch.no_grad():
        for parameter in policy.parameters():
            waves = torch.arange(parameter.numel()).view(parameter.shape).cos()
            parameter.copy_(scale * parameter if parameter.dim() > 1 else parameter + waves * (scale - 1) / 10)
        for module in policy.modules():
            if isinstance(module, models.Normalizer):
                module.shift.copy_(torch.arange(len(module.shift)).cos() / 3)
                module.scale.copy_(0.7 + module.shift / 2)
    monkeypatch.setattr(verify, "TOLERANCE", 1e-3 if scale == 1 else 2e-2)
    before = [parameter.clone() for parameter in policy.parameters()]
    assert verify.compare(policy, vecenv, compiled.Sample) is None
    assert all(map(torch.equal, before, policy.parameters()))
    monkeypatch.setattr(verify, "TOLERANCE", 0.0)
    assert verify.compare(policy, vecenv, compiled.Sample) is not None


def plain(env):
    return models.MinGRUPolicy(env, 16)


def train(kind, epochs=3, env="cartpole", **settings):
    torch.manual_seed(0)
    vecenv = vector.make(env, num_envs=16, num_threads=1, seed=1)
    config = {"horizon": 16, "minibatch_size": 64, "data_dir": None, "log_interval": 1e9, **settings}
    trainer = pufferl.PuffeRL(config, vecenv, kind(vecenv))
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    weights = trainer.arena.flat("weights").clone()
    trainer.release()
    return trainer.engine.name, weights


@pytest.mark.parametrize("engine", ["compiled", "autograd"])
@pytest.mark.parametrize("settings", [{}, {"norm_reward": True, "reward_clip": 0.5}, {"draw": "steps"}], ids=str)
def test_the_pages_advantage_in_place_of_the_kernel(engine, settings):
    kind = without_memory if "draw" in settings else plain
    name, weights = train(kind, engine=engine, **settings)
    given = f"{ROOT}/ppo.py:advantage" if settings else ppo.advantage  # as the command line names it, or a script
    other_name, other = train(kind, engine=engine, advantage=given, **settings)
    assert name == other_name == engine
    torch.testing.assert_close(other, weights, rtol=1e-4, atol=1e-5)


def test_another_advantage_is_learnt_from():
    def zeros(args, storage, rewards, mean, values, bootstraps, ratios):
        assert rewards.shape == ratios.shape == storage.terminals.shape and args.gamma > 0
        assert values.shape[0] == rewards.shape[0] + 1
        return torch.zeros_like(rewards)

    assert not torch.equal(train(plain)[1], train(plain, advantage=zeros)[1])
    with pytest.raises(pufferl.ConfigError, match=r"train\.advantage"):
        train(plain, advantage="nowhere.py:function")


class Latent(nn.Module):
    """A network without memory that gives the rollout a field of its own."""

    thread_safe = True
    rollout_fields = {"latent": ((3,), torch.float32)}  # noqa: RUF012

    def __init__(self, env):
        super().__init__()
        self.inner = models.FeedForward(env, 16)

    def forward(self, observations):
        hidden = self.inner.encode_observations(observations)
        return *self.inner.decode_actions(hidden), {"latent": hidden[..., :3]}


class Timed(models.FeedForward):
    """The same over time, with a step of its own."""

    rollout_fields = Latent.rollout_fields
    thread_safe = True

    def forward(self, observations, state=None):
        hidden = self.encode_observations(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        return *self.decode_actions(hidden), {"latent": hidden[..., :3]}

    def forward_eval(self, observations, state=None):
        hidden = self.encode_observations(observations)
        return *self.decode_actions(hidden), {"latent": hidden[..., :3]}


@pytest.mark.parametrize("kind", [Latent, Timed])
def test_a_rollout_keeps_a_networks_fields(kind):
    differences = []

    def loss(minibatch):
        assert minibatch.latent.requires_grad and minibatch.latent.shape == (16, 4, 3)
        differences.append(float((minibatch.latent - minibatch.old_latent).detach().abs().max()))
        assert float(minibatch.old_latent.abs().sum()) > 0
        return 0.1 * (minibatch.latent - minibatch.old_latent).square().mean()

    train(kind, epochs=1, loss=loss)
    assert differences[0] < 1e-5 < differences[-1]  # as in the rollout, until the first update


def test_a_field_that_is_not_returned_is_named():
    class Without(Latent):
        def forward(self, observations):
            return super().forward(observations)[:2]

    with pytest.raises(NetworkError, match="latent"):
        train(Without)
