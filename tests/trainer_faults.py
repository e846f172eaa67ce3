"""Mistakes around one trainer, as users make them, for test_messages.py."""

import math
import warnings

import gymnasium
import numpy as np
import torch
from test_models import DECODED, LostState, Returns, decoding, environment, lazy  # noqa: F401
from trainers import NETWORKS, make_trainer, run_epochs

import flat_spaces
import models
import pufferl
import vector


def train(trainer):
    """An epoch, in which a warning is an error, whatever was said before."""
    flat_spaces.warn_once.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            run_epochs(trainer, 1)
    finally:
        trainer.release()


def construct(vecenv=None, logger=None, wrap=lambda policy: policy):
    with vector.make("cartpole", 4) as envs:
        pufferl.PuffeRL({}, vecenv or envs, wrap(models.FeedForward(envs)), logger)


def swap():
    with vector.make("cartpole", 4) as envs:
        pufferl.PuffeRL(models.FeedForward(envs), envs)


class Mine:
    log = close = print


def hook():
    train(make_trainer(change=lambda policy: policy.encoder.register_forward_hook(lambda *_: None)))


def new_decoder():
    trainer = make_trainer()
    trainer.policy.decoder = models.Decoder(16, trainer.vecenv.single_action_space)
    train(trainer)


def assign(name, value):
    trainer = make_trainer()
    try:
        trainer.config[name] = value
    finally:
        trainer.release()


def meddle(env="cartpole", **numbers):
    """Learn from a rollout of which some numbers are others: {name: (place, value)}."""
    trainer = make_trainer(env=env)
    trainer.evaluate()
    for name, (place, value) in numbers.items():
        (trainer.storage[name] if name in trainer.storage else getattr(trainer.buffers, name))[place] = value
    try:
        trainer.train()
    finally:
        trainer.release()


def forbid():
    meddle("masked", valid=((2, 1), 1), action_masks=((2, 1), 0), logprobs=((2, 1), math.inf))


def rule_out():
    def forbid(policy):
        split = policy.decoder.split
        policy.decoder.split = lambda outputs: (split(outputs)[0] - math.inf, split(outputs)[1])

    train(make_trainer(env="squared", policy=NETWORKS["feed-forward"], change=forbid))


class NanInDict(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({
        "place": gymnasium.spaces.Box(-math.inf, math.inf, (2,)), "on": gymnasium.spaces.Discrete(2)})
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.t = 0
        return {"place": np.zeros(2, np.float32), "on": 0}, {}

    def step(self, action):
        self.t += 1
        return {"place": np.float32([0, math.nan if self.t == 5 else 0]), "on": 1}, 0.0, False, False, {}


def nan_loss(minibatch):
    return minibatch.values.sum() * math.nan


class RateOnly(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)


def returns(function):
    train(make_trainer(policy=lambda env: Returns(env, function)))


def decode(name, **settings):
    train(make_trainer(policy=decoding(DECODED[name]), **settings))


def squash_unbounded():
    space = gymnasium.spaces.Box(-math.inf, 1, (1,))
    models.squash(models.FeedForward(environment(space)), space)


TRIPLED = {"policy": NETWORKS["tripled"], "engine": "compiled"}
