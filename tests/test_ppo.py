"""ppo.py computes what pufferl.py does: the same actions, draws and weights, epoch by epoch."""

import math

import pytest
import torch
from small_envs import Leavers

import kernels
import models
import ppo
import vector
from pufferl import PuffeRL

pytestmark = pytest.mark.usefixtures("one_torch_thread")
EPOCHS = 6
# distance of a random word from a boundary between two actions below which rounding decides
NEAR = 1e-5
SETTINGS = {
    "horizon": 16, "minibatch_size": 128, "replay_ratio": 1.3, "learning_rate": 0.01, "momentum": 0.9,
    "weight_decay": 0.1, "max_grad_norm": 0.7, "gamma": 0.97, "gae_lambda": 0.9, "vtrace_rho_clip": 1.1,
    "vtrace_c_clip": 0.9, "prio_alpha": 0.7, "prio_beta0": 0.3, "clip_coef": 0.2, "vf_coef": 0.7,
    "vf_clip_coef": 0.2, "ent_coef": 0.01, "reward_clip": 0.8, "norm_reward": False, "norm_obs": False,
    "vf_error_bound": math.inf, "min_advantage_std": 0.0, "target_kl": None, "seed": 3,
    "total_timesteps": EPOCHS * 16 * 32,
}


class Chances:
    """In place of `kernels` in ppo.py: compares samples and draws with the trainer's, and takes
    the trainer's where a random word lies next to a boundary."""

    def __init__(self):
        # the trainer's of the epoch, in order
        self.actions, self.draws, self.taken = [], [], 0

    def sample(self, outputs, actions, logprobs, values, **options):
        kernels.sample(outputs, actions, logprobs, values, **options)
        theirs = self.actions.pop(0)
        if actions.dtype != torch.int32:
            torch.testing.assert_close(actions, theirs, atol=1e-4, rtol=1e-3)
        else:
            first = torch.cat([torch.zeros(1, dtype=torch.int64), options["heads"].cumsum(0)[:-1]])
            for agent in (actions != theirs).any(-1).nonzero()[:, 0].tolist():
                row = outputs[agent : agent + 1].clone()
                # of a logit: at most NEAR of a probability
                row[0, first + theirs[agent]] += 4 * NEAR
                masks = options.get("masks")
                nudged = torch.zeros_like(actions[:1]), torch.zeros(1), torch.zeros(1)
                kernels.sample(row, *nudged, **{**options, "first_agent": agent,
                                                "masks": None if masks is None
                                                else masks[agent : agent + 1]})
                assert torch.equal(nudged[0][0], theirs[agent]), (
                    f"agent {agent}: {actions[agent]}, not {theirs[agent]}")
                self.taken += 1
        # continuous ones may differ in their last bits, and environments are to see the same
        actions.copy_(theirs)

    def draw_segments(self, priorities, cumulative, index, weights, **options):
        kernels.draw_segments(priorities, cumulative, index, weights, **options)
        theirs, theirs_weights = self.draws.pop(0)
        for m in (index != theirs).nonzero()[:, 0].tolist():
            low, high = sorted((int(index[m]), int(theirs[m])))
            assert priorities[low + 1 : high].sum() == 0, (
                f"draw {m}: segment {index[m]}, not {theirs[m]}")
            self.taken += 1
        torch.testing.assert_close(weights, theirs_weights, atol=1e-5, rtol=1e-3)
        index.copy_(theirs), weights.copy_(theirs_weights)


CASES = {
    "cartpole": {"max_steps": 20},  # truncated now and then, and so bootstrapped
    "pendulum": {"max_steps": 30},  # continuous actions
    "masked": {},  # some actions are forbidden
    "spaces": {},  # several heads
    "scaled": {"max_steps": 20},  # with all that may be switched on
    "dying": {},  # in Python, agents that leave, and all that
}
SCALED = {"norm_obs": True, "norm_reward": True, "target_kl": 0.01, "reward_clip": 100.0,
          "learning_rate": 0.003, "vf_error_bound": 0.3, "min_advantage_std": 0.1}


@pytest.mark.parametrize("name", CASES)
def test_the_page_says_what_the_trainer_does(name, monkeypatch):
    env, settings = {"scaled": ("cartpole", SETTINGS | SCALED),
                     "dying": (Leavers, SETTINGS | SCALED)}.get(name, (name, SETTINGS))
    options = {"num_envs": 32, "num_buffers": 1}
    if name == "dying":
        options = {"num_envs": 11, "backend": "serial"}
    envs = [vector.make(env, seed=3, env_kwargs=CASES[name], **options) for _ in range(2)]
    theirs = models.MinGRUPolicy(envs[0], hidden_size=16, num_layers=2,
                                 normalize=settings["norm_obs"])
    trainer = PuffeRL(env=envs[0], policy=theirs, data_dir=None, **settings)
    args = ppo.Args(env=name, hidden_size=16, num_layers=2, num_envs=32, **settings)
    heads = list(envs[1].action_heads or ())
    ours = ppo.Policy(math.prod(envs[1].observation_shape), heads, envs[1].action_dims, 16, 2)
    names = {key.replace("rnn.layers", "layers").replace("decoder.log_std", "log_std"): key
             for key, _ in theirs.named_parameters()}
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(theirs.get_parameter(names[key]))
    chances, draw = Chances(), kernels.draw_segments

    def note(priorities, cumulative, index, weights, **options):
        draw(priorities, cumulative, index, weights, **options)
        chances.draws.append((index.clone(), weights.clone()))

    epochs = ppo.train(args, envs[1], ours)
    monkeypatch.setattr(ppo, "kernels", chances)
    for epoch in range(EPOCHS):
        trainer.evaluate()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "draw_segments", note)
            logs = trainer.train()
        chances.actions = list(trainer.storage["actions"].clone())
        updates = len(chances.draws)
        steps, _, losses, _ = next(epochs)
        assert steps == trainer.global_step and not chances.draws
        assert updates in (5, 6) or (updates == 0 and settings["norm_obs"] and epoch == 0)
        assert losses["learning_rate"] == pytest.approx(trainer._used_lr, rel=1e-3)
        for key in losses.keys() & logs.keys() if updates else ():
            rel = 0.05 if key == "grad_norm" else 0.01  # a minibatch counts by its valid steps here
            assert losses[key] == pytest.approx(logs[key], rel=rel, abs=1e-4), (epoch, key)
        for key, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter.data, theirs.get_parameter(names[key]).data,
                                       atol=2e-5, rtol=1e-3,
                                       msg=lambda text, key=key, epoch=epoch: f"epoch {epoch}, {key}: {text}")
    assert chances.taken < 10, "boundaries are rare"
    trainer.release()
    envs[1].close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "score"),
                         [("cartpole", 2_000_000, 475), ("breakout", 2_600_000, 10.2)])
def test_the_page_learns(name, steps, score):
    """With its own defaults; a random policy has 2.04 at Breakout."""
    args, scores = ppo.Args(env=name, total_timesteps=steps), []
    envs = vector.make(name, num_envs=args.num_envs, num_buffers=1)
    for _, episodes, _, _ in ppo.train(args, envs):
        scores += [episodes["score"]] if episodes.get("n") else []
    envs.close()
    assert scores[-1] > score


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min])
def test_a_choice_that_the_network_rules_out_costs_no_entropy(low):
    y = torch.tensor([[low, 0.3, -0.2, 1.0, low]]).requires_grad_()
    heads = y.split([3, 2], -1)
    expected = sum(torch.distributions.Categorical(logits=head).entropy() for head in heads)
    page = type("Page", (), {"log_std": None, "heads": [3, 2]})
    logprob, entropy = ppo.log_probability(page, y, torch.tensor([[1, 0]]), None)
    torch.testing.assert_close(entropy, expected)
    (entropy + logprob).sum().backward()
    ours, y.grad = y.grad, None
    chosen = sum(torch.distributions.Categorical(logits=head).log_prob(torch.tensor([a]))
                 for head, a in zip(heads, (1, 0), strict=True))
    (sum(torch.distributions.Categorical(logits=head).entropy() for head in heads)
     + chosen).sum().backward()
    torch.testing.assert_close(ours, y.grad)


def test_the_page_leaves_what_is_frozen():
    args = ppo.Args("cartpole", total_timesteps=1024, num_envs=16, horizon=16, minibatch_size=128,
                    weight_decay=0.1)
    with vector.make("cartpole", 16, num_buffers=1) as envs:
        policy = ppo.Policy(4, [2], 0, 8, 1)
        policy.encoder.requires_grad_(False)
        before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
        for _ in ppo.train(args, envs, policy):
            pass
    same = {name for name, parameter in policy.named_parameters()
            if torch.equal(parameter, before[name])}
    assert same == {"encoder.weight", "encoder.bias"}
