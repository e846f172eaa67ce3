"""Hand-written engines run only for what they implement; what users give in place of a part of the algorithm."""

from pathlib import Path

import pytest
import torch
from torch import nn
from trainers import NETWORKS, learn, make_trainer

import models
import ppo
from errors import ConfigError, NetworkError
from fast import verify

ROOT = Path(__file__).resolve().parent.parent


def test_the_digest_is_that_of_the_source():
    assert verify.digest() == verify.DIGEST, f"make the edit in fast/, then DIGEST = {verify.digest()!r}"


@pytest.mark.parametrize("engine", ["compiled", "autograd"])
@pytest.mark.parametrize("settings", [{}, {"norm_reward": True, "reward_clip": 0.5}, {"draw": "steps"}], ids=str)
def test_the_pages_advantage_in_place_of_the_kernel(engine, settings):
    network = NETWORKS["feed-forward" if "draw" in settings else "mingru"]
    # as a script gives it, or the command line
    results, advantages = [], [None, f"{ROOT}/ppo.py:advantage" if settings else ppo.advantage]
    for advantage in advantages:
        trainer = make_trainer(policy=network, engine=engine, advantage=advantage, **settings)
        assert trainer.engine.name == engine
        results.append(learn(trainer, 3))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_another_advantage_is_learnt_from():
    def zeros(args, storage, rewards, offset, values, bootstraps, ratios):
        assert rewards.shape == ratios.shape == storage.terminals.shape and args.gamma > 0
        assert values.shape[0] == rewards.shape[0] + 1
        return torch.zeros_like(rewards)

    assert not torch.equal(learn(make_trainer()), learn(make_trainer(advantage=zeros)))
    with pytest.raises(ConfigError, match=r"train\.advantage"):
        make_trainer(advantage="nowhere.py:function")


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
        assert minibatch.latent.requires_grad and minibatch.latent.shape == (8, 8, 3)
        differences.append(float((minibatch.latent - minibatch.old_latent).detach().abs().max()))
        assert float(minibatch.old_latent.abs().sum()) > 0
        return 0.1 * (minibatch.latent - minibatch.old_latent).square().mean()

    learn(make_trainer(policy=kind, loss=loss), 1)
    assert differences[0] < 1e-5 < differences[-1]  # as in the rollout, until the first update


def test_a_field_that_is_not_returned_is_named():
    class Without(Latent):
        def forward(self, observations):
            return super().forward(observations)[:2]

    with pytest.raises(NetworkError, match="latent"):
        learn(make_trainer(policy=Without), 1)
