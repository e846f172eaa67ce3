"""The trainer: one epoch against the float64 reference, determinism, resume, networks of one's own, what ends a run."""

import contextlib
import copy
import json
import math
import re
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import gymnasium
import numpy as np
import pytest
import reference
import torch
from conftest import slow_but

import configuration
import engines
import kernels
import models
import pufferl
import vector
from tools import watch


def make_trainer(
    tmp_path,
    env="cartpole",
    policy=None,
    *,
    num_envs=24,
    env_kwargs=None,
    num_buffers=2,
    num_threads=2,
    hidden_size=16,
    num_layers=2,
    seed=3,
    **train,
):
    torch.manual_seed(seed)
    vecenv = vector.make(
        env, num_envs, num_buffers=num_buffers, num_threads=num_threads, seed=seed,
        env_kwargs=env_kwargs
    )
    policy = policy(vecenv) if policy else models.MinGRUPolicy(vecenv, hidden_size=hidden_size,
                                                               num_layers=num_layers)
    settings = {
        "horizon": 8,
        "minibatch_size": 64,
        "total_timesteps": 10**5,
        "learning_rate": 0.01,
        "seed": seed,
        "log_interval": 0.0,
        **train,
    }
    return pufferl.PuffeRL({**settings, "env": env, "data_dir": str(tmp_path)}, vecenv, policy)


def parameters_of(policy):
    """The default policy's weights as the reference wants them."""
    p = {name: tensor.detach().double().clone() for name, tensor in policy.named_parameters()}
    params = {
        "encoder_weight": p["encoder.weight"],
        "encoder_bias": p["encoder.bias"],
        "layer_weights": [p[f"rnn.layers.{i}.weight"] for i in range(policy.num_layers)],
        "layer_biases": [p[f"rnn.layers.{i}.bias"] for i in range(policy.num_layers)],
        "decoder_weight": p["decoder.weight"],
        "decoder_bias": p["decoder.bias"],
    }
    return params | ({"log_std": p["decoder.log_std"]} if "decoder.log_std" in p else {})


def squashed(env):
    return models.squash(models.MinGRUPolicy(env, hidden_size=16, num_layers=2),
                         env.single_action_space)


CASES = {
    "discrete with truncations": {"env": "cartpole", "env_kwargs": {"max_steps": 5}},
    "continuous": {"env": "cartpole", "env_kwargs": {"continuous": True, "max_steps": 9}},
    "multi-agent, two heads": {"env": "target", "num_envs": 6,
                               "env_kwargs": {"num_agents": 4, "patience": 6}},
    "bytes": {"env": "squared", "env_kwargs": {"distance": 2}},
    "masks": {"env": "masked"},
    "squashed": {"env": "pendulum", "env_kwargs": {"max_steps": 9}, "policy": squashed},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_epoch_equals_the_float64_reference(tmp_path, case):
    settings = {
        "gamma": 0.97,
        "gae_lambda": 0.9,
        "ent_coef": 0.001,
        "vf_clip_coef": 0.2,
        "norm_reward": False,
        "prio_alpha": 0.7,
        "prio_beta0": 0.3,
        "reward_clip": 0.8,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "max_grad_norm": 0.7,
        "replay_ratio": 1.5,
        "vtrace_rho_clip": 1.1,
        "vtrace_c_clip": 0.9,
    }
    trainer = make_trainer(tmp_path, **case, **settings)
    draws, draw = [], kernels.draw

    def remember(masses, cumulative, index, weights, **options):
        draw(masses, cumulative, index, weights, **options)
        draws.append(index.tolist())

    for _ in range(2):  # from the second epoch on, the recurrent state and the momentum are not zero
        trainer.evaluate()
        trainer.storage["valid"][2:5, ::5] = 0
        before = parameters_of(trainer.policy)
        momenta = [
            trainer.arena[f"momentum/policy.{name}"].double().clone() for name, _ in trainer.policy.named_parameters()
        ]
        s = {name: None if tensor is None else tensor.clone() for name, tensor in trainer.storage.items()}
        rollout = {
            "observations": s["observations"][:-1].flatten(2).double(),
            "rewards": s["rewards"].double(),
            **{name: s[name] for name in ("terminals", "truncations", "valid")},
            "resets": s["resets"][:-1],
            "actions": trainer.engine.samples.double() if trainer.engine.heads is None else s["actions"].long(),
            "logprobs": trainer.buffers.logprobs.double(),
            "values": trainer.buffers.values.double(),
            "bootstraps": trainer.buffers.bootstraps.double(),
            "state": trainer.engine.initial_state["mingru"].double(),
        }
        if s["action_masks"] is not None:
            rollout["action_masks"] = s["action_masks"][:-1]
        draws.clear()
        learning_rate = trainer.learning_rate
        beta = 0.3 + 0.7 * trainer.global_step / 10**5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "draw", remember)
            logs = trainer.train()
    order = [name for name, _ in trainer.policy.named_parameters()]
    canonical = [
        "encoder.weight",
        "encoder.bias",
        *[f"rnn.layers.{i}.{part}" for part in ("weight", "bias") for i in range(2)],
        "decoder.weight",
        "decoder.bias",
        *(["decoder.log_std"] if trainer.engine.heads is None else []),
    ]
    expected = reference.epoch(
        before,
        [momenta[order.index(name)] for name in canonical],
        rollout,
        draws,
        gamma=0.97,
        gae_lambda=0.9,
        rho_clip=1.1,
        c_clip=0.9,
        prio_alpha=0.7,
        prio_beta=beta,
        clip_coef=0.2,
        vf_coef=2.0,
        vf_clip_coef=0.2,
        ent_coef=0.001,
        learning_rate=learning_rate,
        momentum=0.9,
        weight_decay=0.1,
        max_grad_norm=0.7,
        heads=None if trainer.engine.heads is None else trainer.engine.heads.tolist(),
        reward_clip=0.8,
        squash=trainer.policy.action_squash.double() if case.get("policy") else None,
    )
    assert len(draws) >= 3
    if "max_steps" in case.get("env_kwargs", {}):
        assert s["truncations"].any() and trainer.buffers.bootstraps.abs().sum() > 0
    after = parameters_of(trainer.policy)
    for name, tensor in expected["params"].items():
        for a, b in zip(after[name], tensor, strict=True) if isinstance(tensor, list) else [(after[name], tensor)]:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(trainer.buffers.ratios.double(), expected["ratios"], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(trainer.buffers.advantages.double(), expected["advantages"], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(trainer.buffers.values.double(), expected["values"], atol=1e-4, rtol=1e-3)
    counts = [int(s["valid"][:-1, drawn].sum()) for drawn in draws]
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
        mean = np.average([float(losses[name]) for losses in expected["losses"]], weights=counts)
        assert logs[name] == pytest.approx(mean, abs=1e-4), name
    trainer.release()


class Tanh(torch.nn.Module):
    """A network without memory of one's own, for which no fast engine runs."""

    def __init__(self, env):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(math.prod(env.single_observation_space.shape), 16), torch.nn.Tanh())
        self.decoder = models.Decoder(16, env.single_action_space)

    def forward(self, observations):
        return self.decoder.split(self.decoder(self.encoder(observations.flatten(1).float())))


@pytest.mark.parametrize("case", ["discrete with truncations", "continuous", "masks"])
@pytest.mark.parametrize("kind", [lambda env: models.FeedForward(env, 16), Tanh], ids=["compiled", "autograd"])
def test_minibatches_of_single_steps_equal_the_float64_reference(tmp_path, kind, case):
    """Advantages and priorities once a rollout, then torch's AdamW on the drawn steps."""
    settings = {"gamma": 0.97, "gae_lambda": 0.9, "ent_coef": 0.001, "norm_reward": False, "prio_alpha": 0.7,
                "prio_beta0": 0.3, "reward_clip": 0.8, "replay_ratio": 1.5, "max_grad_norm": 0.7}
    trainer = make_trainer(tmp_path, **CASES[case], policy=kind, optimizer="adam", draw="steps", minibatch_size=44,
                           **settings)
    assert trainer.engine.name == ("autograd" if kind is Tanh else "compiled")
    T, draws, draw = trainer.horizon, [], kernels.draw

    def remember(masses, cumulative, index, weights, **options):
        draw(masses, cumulative, index, weights, **options)
        draws.append(index.clone())

    trainer.evaluate()
    trainer.storage["valid"][2:5, ::5] = 0
    policy = copy.deepcopy(trainer.policy).double()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=trainer.learning_rate, betas=(0.95, 0.999), weight_decay=0.0)
    s = {name: None if tensor is None else tensor.clone() for name, tensor in trainer.storage.items()}
    flat = {name: s[name][:T].flatten(0, 1) for name in ("observations", "actions", "valid")}
    advantages = reference.advantage(
        trainer.buffers.values.double(), s["rewards"].double(), s["terminals"], s["truncations"], trainer.buffers.bootstraps.double(),
        torch.ones(s["rewards"].shape).double(), s["valid"], 0.97, 0.9, 1.0, 1.0, 0.8)
    chances = reference.priorities(advantages.view(1, -1), flat["valid"].view(1, -1), 0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "draw", remember)
        logs = trainer.train()
    losses = []
    for drawn in draws:
        x = policy.encoder(flat["observations"][drawn].flatten(1).double())
        outputs, log_std = models.join_outputs(*policy.decoder.split(policy.decoder(x)))
        loss = reference.ppo_loss(
            outputs[None, :, :-1], outputs[None, :, -1],
            flat["actions"][drawn][None].to(torch.int64 if log_std is None else torch.float64),
            *(array[:T].reshape(-1)[drawn][None].double() for array in (trainer.buffers.logprobs, trainer.buffers.values, advantages)),
            reference.importance_weights(chances, 0.3)[drawn], flat["valid"][drawn][None], 0.2, 2.0, 0.2, 0.001,
            heads=None if log_std is not None else trainer.engine.heads.tolist(),
            log_std=None if log_std is None else policy.decoder.log_std,
            mask=None if s["action_masks"] is None else s["action_masks"][:T].flatten(0, 1)[drawn][None])
        optimizer.zero_grad()
        loss["loss"].backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.7)
        optimizer.step()
        losses.append(loss["policy_loss"].item())
    assert len(draws) == 6 and all((flat["valid"][drawn] != 0).all() for drawn in draws)
    for (name, ours), theirs in zip(trainer.policy.named_parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(trainer.buffers.advantages.double(), advantages, atol=2e-4, rtol=1e-3)
    assert logs["policy_loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    trainer.release()


def test_rollout_stores_what_the_policy_said(tmp_path):
    trainer = make_trainer(tmp_path, env_kwargs={"max_steps": 5})
    for _ in range(2):
        trainer.evaluate()
    s = trainer.storage
    state = {"mingru": trainer.engine.initial_state["mingru"].clone(), "resets": s["resets"],
             "valid": s["valid"]}
    with torch.no_grad():
        logits, value = trainer.policy(s["observations"], state)
    torch.testing.assert_close(trainer.buffers.values, value.squeeze(-1), atol=1e-5, rtol=1e-4)
    logprobs = logits[:-1].log_softmax(-1).gather(-1, s["actions"].long()).squeeze(-1)
    torch.testing.assert_close(trainer.buffers.logprobs, logprobs, atol=1e-5, rtol=1e-4)
    done = s["terminals"] | s["truncations"]
    assert torch.equal(s["resets"][1:], done)
    assert done.any() and not done.all()
    assert torch.equal(trainer.buffers.bootstraps != 0, s["truncations"].bool())
    trainer.release()


def test_bootstrap_is_the_value_of_the_final_observation_in_the_running_state(tmp_path, monkeypatch):
    # step by step, so that one can look between
    monkeypatch.setattr(vector.Native, "can_step_in_kernels", False)
    trainer = make_trainer(tmp_path, env_kwargs={"max_steps": 5}, num_buffers=1, num_threads=1)
    seen, bootstrap = [], trainer.engine._bootstrap

    def spy(worker, buffer, t):
        seen.append((t, trainer.engine.state["mingru"].clone(),
                     trainer.storage["final_observations"].clone()))
        bootstrap(worker, buffer, t)
        assert torch.equal(trainer.engine.state["mingru"], seen[-1][1]), (
            "looking ahead must not commit a state")

    trainer.engine._bootstrap = spy
    trainer.evaluate()
    states = {t: (state, final) for t, state, final in seen}  # after step t, before any reset
    cut = torch.nonzero(trainer.buffers.bootstraps).tolist()
    assert len(cut) > trainer.num_agents / 2
    for t, agent in cut:
        state, final = states[t]
        with torch.no_grad():
            _, value = trainer.policy.forward_eval(final[agent : agent + 1],
                                                   {"mingru": state[:, agent : agent + 1]})
        assert trainer.buffers.bootstraps[t, agent].item() == pytest.approx(value.item(), abs=1e-5)
        assert not torch.equal(final[agent], trainer.storage["observations"][t + 1, agent])
    trainer.release()


@pytest.mark.parametrize("space", ["discrete", "continuous"])
def test_one_rollout_is_the_same_for_any_number_of_buffers_and_threads(tmp_path, space):
    results = []
    for buffers, threads in ((1, 1), (1, 2), (2, 2), (3, 2), (4, 1)):
        trainer = make_trainer(
            tmp_path,
            num_envs=192,
            num_buffers=buffers,
            num_threads=threads,
            env_kwargs={"continuous": space == "continuous"},
        )
        trainer.evaluate()
        results.append(
            [trainer.storage["actions"].clone(), trainer.storage["observations"].clone(),
             trainer.buffers.values.clone()]
        )
        trainer.release()
    for actions, observations, values in results[1:]:
        torch.testing.assert_close(actions, results[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(observations, results[0][1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, results[0][2], atol=1e-5, rtol=1e-5)


def run_epochs(trainer, epochs):
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    return {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_run_repeats_bit_for_bit_and_resumes_bit_for_bit(tmp_path, optimizer):
    settings = {"optimizer": optimizer, "env_kwargs": {"max_steps": 30}, "replay_ratio": 1.3}
    whole = run_epochs(make_trainer(tmp_path, **settings), 6)
    # the allocator hands out other places than before
    shift = [np.empty(n) for n in range(1, 200, 7)]
    again = run_epochs(make_trainer(tmp_path, **settings), 6)
    assert len(shift) and make_trainer(tmp_path, **settings).vecenv.storage.observations.ctypes.data % 256 == 0
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    first = make_trainer(tmp_path, **settings)
    run_epochs(first, 3)
    first.save_checkpoint(tmp_path / "half.pt")
    second = make_trainer(tmp_path, **settings)
    second.load_checkpoint(tmp_path / "half.pt")
    assert second.epoch == 3 and second.global_step == first.global_step
    resumed = run_epochs(second, 3)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


RESUMED = {
    "masks": {"env": "masked"},
    "agents": CASES["multi-agent, two heads"],
    "lstm": {"policy": lambda env: models.LSTMWrapper(env, models.FeedForward(env, 16), 16)},
    "heap": {"env": "nmmo3", "num_envs": 2, "num_buffers": 1,
             "env_kwargs": {"num_agents": 32, "num_foes": 16, "width": 32, "height": 24,
                            "villages": 2, "max_steps": 20}},
    "bfloat16": {"precision": "bfloat16"},
    "single steps": {"draw": "steps", "minibatch_size": 40, "policy": lambda env: models.FeedForward(env, 16)},
}


@pytest.mark.parametrize("case", [
    pytest.param(settings, id=name)
    for name, settings in RESUMED.items()
])
def test_every_kind_of_run_resumes_bit_for_bit(tmp_path, case):
    first, second = (make_trainer(tmp_path, **case) for _ in range(2))
    run_epochs(first, 2)
    first.save_checkpoint(tmp_path / "half.pt")
    whole = run_epochs(first, 2)
    second.load_checkpoint(tmp_path / "half.pt")
    resumed = run_epochs(second, 2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    first.release()
    second.release()


@pytest.mark.parametrize(("state", "carried"), [("carry", True), ("zero", False)])
def test_state_is_carried_over_or_begins_at_zero(tmp_path, state, carried):
    trainer = make_trainer(tmp_path, state=state)
    run_epochs(trainer, 1)
    trainer.evaluate()
    assert bool(trainer.engine.initial_state["mingru"].any()) == carried
    trainer.release()


@pytest.mark.parametrize("parts", [{"max_minibatch_size": 12}, {"num_threads": 1}, {"loss": lambda minibatch: (
    minibatch.values - minibatch.old_values).square().mean() * 0 + minibatch.observations.shape[0] - 1}])
def test_single_steps_in_parts_give_the_same(tmp_path, parts):
    """By two threads, one after the other, or with a loss of one's own, which sees T = 1 and adds nothing here."""
    weights = []
    for options in ({}, parts):
        trainer = make_trainer(tmp_path, policy=Tanh, draw="steps", minibatch_size=60, **options)
        if not options:
            trainer.engine._set_learners(2)
            trainer.engine._start_pool()
        weights.append(run_epochs(trainer, 2))
        trainer.release()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=1e-4)


def test_a_loss_of_ones_own_that_is_not_finite_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path, policy=Tanh, draw="steps", minibatch_size=60,
                           loss=lambda minibatch: minibatch.values[1:].mean())  # of nothing
    trainer.evaluate()
    with pytest.raises(FloatingPointError, match=r"gave nan; .* T = 1 steps"):
        trainer.train()
    trainer.release()


def test_adam_is_torchs(tmp_path):
    settings = {"momentum": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
    trainer = make_trainer(tmp_path, optimizer="adam", max_grad_norm=0.05,
                           replay_ratio=1 / 3, **settings)
    ours = list(trainer.policy.parameters())
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    other = torch.optim.AdamW(theirs, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    for _ in range(3):  # of one minibatch each
        other.param_groups[0]["lr"] = trainer.learning_rate
        trainer.evaluate()
        assert trainer.train()["grad_norm"] > 0.05
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone()
        assert torch.cat([q.grad.flatten() for q in theirs]).norm().item() == pytest.approx(0.05, rel=1e-3)
        other.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-7)
    trainer.release()


class Inline:
    """A pool that runs everything here: torch's profiler sees one thread's memory."""

    def submit(self, function, item):
        call = Future()
        call.set_result(function(item))
        return call

    def shutdown(self): ...


def test_nothing_is_allocated_after_the_first_epochs(tmp_path):
    trainer = make_trainer(tmp_path, "breakout", num_envs=256, horizon=64, minibatch_size=4096,
                           hidden_size=64)
    trainer.engine.pool = Inline()
    run_epochs(trainer, 2)
    options = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
    with torch.profiler.profile(**options):  # its first use imports what it needs
        pass
    tracemalloc.start()
    with torch.profiler.profile(**options) as profile:
        trainer.evaluate()
        trainer.train()
        torch.empty(100_000)  # shows that the profiler sees allocations
    peak = tracemalloc.get_traced_memory()[1]  # numpy's and Python's
    tracemalloc.stop()
    sizes = sorted(event.nbytes() for event in profile.profiler.kineto_results.events()
                   if event.name() == "[memory]")
    assert sizes[-1] == 400_000, "the profiler saw no allocation"
    assert sizes[-2] < 65536
    assert peak < 10 * 65536  # the profiler's own events are in it
    trainer.release()


class Plain(torch.nn.Module):
    """A user's own network: forward over (T, N, ...) alone."""

    def __init__(self, env):
        super().__init__()
        self.body = torch.nn.Linear(env.single_observation_space.shape[0], 16)
        self.logits = torch.nn.Linear(16, env.single_action_space.n)
        self.value = torch.nn.Linear(16, 1)

    def forward(self, observations, state):
        hidden = torch.tanh(self.body(observations))
        return self.logits(hidden), self.value(hidden)


class Timed(torch.nn.Module):
    """Recurrent by hand, over (T, N, ...) alone, with several heads and reading the flags."""

    def __init__(self, env):
        super().__init__()
        self.body = torch.nn.Linear(env.single_observation_space.shape[0], 16)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, n) for n in env.action_heads)
        self.value = torch.nn.Linear(16, 1)

    def initial_state(self, num_agents):
        return {"sum": torch.zeros(1, num_agents, 16)}

    def forward(self, observations, state):
        x, s, outputs = torch.tanh(self.body(observations)), state["sum"][0], []
        keep = 1 - state["resets"].float().unsqueeze(-1)
        for t in range(len(x)):
            s = 0.5 * s * keep[t] + x[t]
            outputs.append(s)
        state["sum"] = s.unsqueeze(0)
        hidden = torch.stack(outputs)
        return [head(hidden) for head in self.heads], self.value(hidden)


class FixedSpread(Plain):
    """A Normal whose standard deviation is no parameter."""

    def __init__(self, env):
        torch.nn.Module.__init__(self)
        self.body = torch.nn.Linear(env.single_observation_space.shape[0], 16)
        self.logits, self.value = torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)

    def forward(self, observations, state):
        mean, value = super().forward(observations, state)
        return torch.distributions.Normal(mean, 0.5), value


def test_a_network_over_time_alone_sees_its_flags_and_heads(tmp_path):
    trainer = make_trainer(tmp_path, "target", Timed, num_envs=6,
                           env_kwargs={"num_agents": 4, "patience": 6})
    run_epochs(trainer, 1)
    trainer.evaluate()
    s, T = trainer.storage, trainer.horizon
    state = {"sum": trainer.engine.initial_state["sum"], "resets": s["resets"][:T],
             "valid": s["valid"][:T]}
    with torch.no_grad():
        logits, value = trainer.policy(s["observations"][:T], state)
    torch.testing.assert_close(trainer.buffers.values[:T], value.squeeze(-1), atol=1e-5, rtol=1e-4)
    logprobs = sum(head.log_softmax(-1).gather(-1, s["actions"][..., i : i + 1].long()).squeeze(-1)
                   for i, head in enumerate(logits))
    torch.testing.assert_close(trainer.buffers.logprobs, logprobs, atol=1e-5, rtol=1e-4)
    assert s["resets"][1:T].any()
    observation, flags = s["observations"][0], {name: s[name][0] for name in ("resets", "valid")}
    one = models.one_step(trainer.policy, observation, {"sum": torch.zeros(1, 24, 16), **flags})
    actions, _, _ = models.sample_logits(*one, seed=0, step=0)
    assert actions.shape == (24, 2) and (actions[:, 0] < 9).all() and (actions[:, 1] < 5).all()
    trainer.release()


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_settings_that_changed_count_after_a_resume(tmp_path, optimizer):
    first = make_trainer(tmp_path, optimizer=optimizer, momentum=0.9)
    run_epochs(first, 1)
    first.save_checkpoint(tmp_path / "half.pt")
    second = make_trainer(tmp_path, optimizer=optimizer, momentum=0.5, weight_decay=0.1)
    second.load_checkpoint(tmp_path / "half.pt")
    if optimizer == "adam":
        group = second.optimizer.optimizer.param_groups[0]
        assert (group["betas"][0], group["weight_decay"]) == (0.5, 0.1)
    ours, others = run_epochs(second, 1), run_epochs(first, 1)
    assert any(not torch.equal(ours[name], others[name]) for name in ours)


def test_evaluate_and_train_take_turns(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match="call evaluate"):
        trainer.train()
    trainer.evaluate()
    trainer.evaluate()
    assert trainer.arena["steps"].tolist() == list(range(8, 16)), (
        "a second rollout has random words of its own")
    trainer.train()
    assert trainer.global_step == trainer.batch_size
    with pytest.raises(RuntimeError, match="call evaluate"):
        trainer.train()
    trainer.release()


def test_a_closed_trainer_says_so(tmp_path):
    trainer = make_trainer(tmp_path)
    run_epochs(trainer, 1)
    trainer.evaluate()
    trainer.close()
    with pytest.raises(RuntimeError, match="call evaluate"):
        trainer.train()
    with pytest.raises(RuntimeError, match=r"this trainer was closed.*load_checkpoint"):
        trainer.evaluate()


FAILS = """
import gymnasium, numpy as np

class Fails(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32), gymnasium.spaces.Discrete(2)
    def __init__(self, at=10): self.at, self.steps = at, 0
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        if self.steps == self.at:
            raise ConnectionError("the simulator hung up")
        return np.zeros(2, np.float32), 0.0, self.steps % 5 == 0, False, {}
"""


@pytest.mark.parametrize("at, options, note", [
    (24, [], "No run had begun: this was while steps were measured"),
    (400, ["--train.replay-ratio", "1", "--train.gamma", "0.9", "--train.checkpoint-interval", "1"],
     "The last checkpoint is whole: .* --resume .*Fails_")])
def test_an_error_in_an_environment_says_what_is_left_of_the_run(at, options, note, tmp_path):
    (tmp_path / "Fails.py").write_text(FAILS)
    name = f"{tmp_path}/Fails.py:Fails"
    args = pufferl.load_config(name, ["--env.at", str(at), *options, "--vec.backend", "serial", "--logger", "none",
                                      "--train.total-timesteps", "30_000", "--data-dir", str(tmp_path)])
    with pytest.raises(ConnectionError) as failed:
        pufferl.train(name, args)
    assert re.search(note, configuration.error_text(failed.value)), configuration.error_text(failed.value)


def test_a_logger_without_a_method_is_told_at_once():
    class Mine:
        def log(self, metrics, step): ...

        def close(self): ...

    with vector.make("cartpole", 4) as vecenv, pytest.raises(pufferl.ConfigError,
                                                             match="logger: Mine has no config and no artifact"):
        pufferl.PuffeRL({}, vecenv, models.MinGRUPolicy(vecenv), Mine())


def test_arguments_in_the_wrong_place_are_told():
    with vector.make("cartpole", 4) as vecenv:
        policy = models.MinGRUPolicy(vecenv)
        for arguments in (({}, policy, vecenv), (policy, vecenv)):
            with pytest.raises(pufferl.ConfigError,
                               match=r"vecenv is a MinGRUPolicy, expected what make.*swapped"):
                pufferl.PuffeRL(*arguments)
        with pytest.raises(pufferl.ConfigError,
                           match=r"policy is a dict, expected a torch.nn.Module\.$"):
            pufferl.PuffeRL({}, vecenv, {})
        with pytest.raises(pufferl.ConfigError,
                           match=r"vecenv is a CartPoleEnv, expected what make or load_env gives"):
            pufferl.PuffeRL({}, gymnasium.make("CartPole-v1").unwrapped, policy)


@pytest.mark.parametrize("rollouts", [0, 1])
def test_a_trainer_that_learnt_nothing_closes(tmp_path, rollouts):
    trainer = make_trainer(tmp_path)
    for _ in range(rollouts):
        trainer.evaluate()
    assert Path(trainer.close()).exists() and (trainer.run_folder / "config.json").exists()
    assert trainer.vecenv.closed


def test_no_worker_writes_any_more_when_a_rollout_was_left(tmp_path, monkeypatch):
    trainer, left = make_trainer(tmp_path), []

    def rollout(worker):
        if worker == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        left.append(worker)

    monkeypatch.setattr(trainer.engine, "_rollout", rollout)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert left == [1]
    trainer.release()


def test_the_best_weights_survive_epochs_without_an_episode(tmp_path):
    trainer = make_trainer(tmp_path)
    for log in ({"score": 1.0, "n": 60}, {}, {"score": 3.0, "n": 60}):
        trainer.statistics.add_episodes(log, trainer.policy)
    assert trainer.statistics.best_score == 2.0 and trainer.statistics.best_unsaved
    trainer.release()


@pytest.mark.parametrize("name", sorted(pufferl.FIXED))
def test_a_setting_that_would_do_nothing_cannot_be_assigned(tmp_path, name):
    trainer = make_trainer(tmp_path)
    trainer.config[name] = trainer.config[name]
    for assign in (trainer.config.__setitem__, lambda key, value: trainer.config.update({key: value})):
        with pytest.raises(configuration.ConfigError, match=rf"train\.{name} = 12345: this trainer .* gamma,"):
            assign(name, 12345)
    trainer.release()


@pytest.mark.parametrize("name, value, words", [
    ("learning_rate", "fast", "fast"), ("learning_rate", -1, "must be above 0"), ("gamma", 1.5, "within 0 and 1"),
    ("target_kl", "auto", "was decided when"), ("total_timesteps", 0, "must be above 0"), ("state", "keep", "one of"),
    ("clip_coef", None, "clip_coef"), ("checkpoint_interval", 0, "must be 1 or more")])
def test_an_assigned_value_must_be_one_that_could_be_given(tmp_path, name, value, words):
    trainer = make_trainer(tmp_path)
    before = trainer.config[name]
    with pytest.raises(configuration.ConfigError, match=words):
        trainer.config[name] = value
    assert trainer.config[name] == before
    trainer.config["learning_rate"] = 0.0  # where a schedule of one's own ends
    run_epochs(trainer, 1)
    trainer.config["learning_rate"] = "0.25"  # as from a command line
    assert trainer.config["learning_rate"] == 0.25
    trainer.release()


def test_an_assigned_name_must_be_one_and_is_saved(tmp_path):
    trainer = make_trainer(tmp_path, norm_reward=True)
    with pytest.raises(configuration.ConfigError, match=r"train\.learning_rat: did you mean learning_rate"):
        trainer.config["learning_rat"] = 0.1
    trainer.config |= {"gamma": 0.5}
    run_epochs(trainer, 1)
    assert trainer.reward_scale.gamma == trainer.args["train"]["gamma"] == 0.5
    trainer.release()


@pytest.mark.parametrize("name, value", [
    ("learning_rate", 0.1), ("gamma", 0.2), ("gae_lambda", 0.1), ("clip_coef", 0.001), ("vf_coef", 0.0),
    ("vf_clip_coef", 0.001), ("ent_coef", 1.0), ("prio_alpha", 1.0), ("reward_clip", 0.1), ("anneal_lr", True)])
def test_what_is_assigned_between_epochs_takes_effect(tmp_path, name, value):
    weights = []
    for assign in (False, True):
        trainer = make_trainer(tmp_path, anneal_lr=False, total_timesteps=1000)
        run_epochs(trainer, 2)
        trainer.engine.forget = mock.Mock()
        if assign:
            trainer.config[name] = value
        run_epochs(trainer, 2)
        weights.append(trainer.arena.flat("weights").clone())
        assert trainer.engine.forget.call_count == (assign and name in pufferl.CAPTURED), "graphs with the old one"
        trainer.release()
    assert not torch.equal(*weights)


@pytest.mark.parametrize("score, newer", [(0.0, True), (-0.1, False)])
def test_of_equal_scores_the_newest_weights_are_the_best(tmp_path, score, newer):
    """If one's gain is the other's loss, the mean of all scores is always 0."""
    trainer = make_trainer(tmp_path)
    trainer.statistics.add_episodes({"score": 0.0, "n": 100}, trainer.policy)
    with torch.no_grad():
        weight = next(trainer.policy.parameters()).add_(1)
    trainer.statistics.add_episodes({"score": score, "n": 100}, trainer.policy)
    assert torch.equal(next(iter(trainer.statistics.best.values())), weight) == newer
    trainer.release()


def test_a_buffer_whose_shape_changes_is_named(tmp_path):
    class Remembers(models.FeedForward):
        def __init__(self, env, hidden_size=16):
            super().__init__(env, hidden_size)
            self.register_buffer("past", torch.zeros(1, 2))

    trainer = make_trainer(tmp_path, policy=Remembers)
    trainer.policy.past = torch.zeros(4, 2)
    with pytest.raises(pufferl.ConfigError, match=r"its past is \(4, 2\) now, but \(1, 2\) when the run began"):
        trainer.statistics.add_episodes({"score": 1.0, "n": 100}, trainer.policy)
    trainer.release()


def test_half_precision_observations_are_for_autograd(tmp_path, capsys):
    class Half(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float16), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(3, np.float16), {}

        def step(self, action):
            return np.zeros(3, np.float16), 0.0, False, False, {}

    vecenv = vector.make(Half, num_envs=2, backend="serial")
    trainer = pufferl.PuffeRL({"data_dir": None, "horizon": 4}, vecenv, models.MinGRUPolicy(vecenv))
    assert trainer.engine.name == "autograd" and "float16" in capsys.readouterr().err
    trainer.evaluate()
    trainer.train()
    trainer.release()


def test_a_normal_with_fixed_spread_trains(tmp_path):
    run_epochs(make_trainer(tmp_path, policy=FixedSpread, env_kwargs={"continuous": True}), 2)


def test_statistics_that_are_not_in_every_log_keep_their_own_weight(tmp_path):
    trainer = make_trainer(tmp_path)
    for log in ({"score": 0.0, "n": 90}, {"score": 1.0, "success": 1.0, "n": 10}, {},
                {"score": 1.0, "n": 100}):
        trainer.statistics.add_episodes(log, trainer.policy)
    assert trainer.environment == pytest.approx({"score": 110 / 200, "success": 1.0, "n": 200})
    trainer.release()


CUSTOM = {
    "plain module": Plain,
    "feed-forward": lambda env: models.FeedForward(env, hidden_size=16),
    "separate": lambda env: models.Separate(env, hidden_size=16),
    "lstm": lambda env: models.LSTMWrapper(env, models.FeedForward(env, hidden_size=16),
                                           hidden_size=16),
    "gru": lambda env: models.GRUWrapper(env, models.FeedForward(env, hidden_size=16),
                                         hidden_size=16),
    "mingru": lambda env: models.MinGRUWrapper(env, models.FeedForward(env, hidden_size=16),
                                               hidden_size=16),
}


@pytest.mark.parametrize("policy", CUSTOM.values(), ids=CUSTOM.keys())
def test_custom_policies_train_and_accumulate_gradients(tmp_path, policy):
    whole = run_epochs(make_trainer(tmp_path, policy=policy, env_kwargs={"max_steps": 12}), 3)
    parts = run_epochs(make_trainer(tmp_path, policy=policy, env_kwargs={"max_steps": 12}, max_minibatch_size=16), 3)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], atol=1e-4, rtol=1e-3)


def test_the_board_policy_trains_with_masks_resumes_and_is_evaluated(tmp_path):
    options = ["--policy.name", "board", "--policy.hidden-size", "8", "--env.num-envs", "64",
               "--train.horizon", "16",
               "--train.minibatch-size", "512", "--logger", "none", "--data-dir", str(tmp_path)]
    for name in ("minesweeper", "go", "connect4"):
        args = pufferl.load_config(name, [*options, "--train.total-timesteps", "3072"])
        trainer = pufferl.train(name, args)
        assert trainer.global_step == 3072
        more = ["--resume", str(trainer.run_folder), "--train.total-timesteps", "5120"]
        trainer = pufferl.train(name, pufferl.load_config(name, more))
        assert trainer.global_step == 5120 and type(trainer.policy) is models.Board
        assert trainer.engine._threads(1024) == trainer.vecenv.num_threads, (
            "a convolution's weights work on every cell")
        played = ["--load-model-path", str(trainer.run_folder), "--eval.episodes", "16"]
        assert math.isfinite(watch.evaluate(name, pufferl.load_config(name, played))["score"].mean)


def test_the_board_policy_says_what_it_cannot_do():
    for name, options, message in (("cartpole", [], "Board reads planes"),
                                   ("go", ["--rnn.name", "mingru"], "set rnn.name none")):
        args = pufferl.load_config(name,
                                   ["--policy.name", "board", "--env.num-envs", "2", *options])
        vecenv = pufferl.load_env(name, args)
        with pytest.raises(configuration.ConfigError, match=message):
            pufferl.load_policy(args, vecenv, name)
        vecenv.close()


@pytest.mark.parametrize("memory", slow_but(["auto", "lstm"], "auto"))
def test_the_impala_policy_trains_and_is_evaluated(tmp_path, memory):
    options = ["--policy.name", "impala", "--policy.hidden-size", "16", "--rnn.name", memory,
               "--env.num-envs", "1",
               "--env.num-agents", "16", "--train.horizon", "8", "--train.minibatch-size", "64",
               "--logger", "none", "--train.total-timesteps", "256", "--data-dir", str(tmp_path)]
    trainer = pufferl.train("snake", pufferl.load_config("snake", options))
    inner = trainer.policy if memory == "auto" else trainer.policy.policy
    assert trainer.global_step == 256 and type(inner) is models.Impala
    assert "residual convolutions of an image" in models.describe(trainer.policy)
    played = ["--load-model-path", str(trainer.run_folder), "--eval.episodes", "4"]
    assert math.isfinite(watch.evaluate("snake", pufferl.load_config("snake", played))["score"].mean)


def test_the_impala_policy_wants_an_image(tmp_path):
    args = pufferl.load_config("cartpole", ["--policy.name", "impala", "--env.num-envs", "2"])
    vecenv = pufferl.load_env("cartpole", args)
    with pytest.raises(configuration.ConfigError, match="Impala reads images"):
        pufferl.load_policy(args, vecenv, "cartpole")
    vecenv.close()


@pytest.mark.parametrize("options", [[], ["--policy.name", "feed-forward"], ["--policy.name", "separate"],
                                     ["--rnn.name", "lstm"]])
def test_continuous_actions_begin_with_the_deviation_that_is_asked(options):
    args = pufferl.load_config("pendulum", ["--policy.log-std-init", "-2", "--env.num-envs", "2", *options])
    vecenv = pufferl.load_env("pendulum", args)
    policy = pufferl.load_policy(args, vecenv, "pendulum")
    found = [weight for name, weight in policy.named_parameters() if name.endswith("log_std")]
    assert len(found) == 1 and found[0].tolist() == [-2.0]
    vecenv.close()


@pytest.mark.parametrize(("name", "value", "message"), [
    ("cartpole", "-1", "no models.Decoder of continuous actions"),
    ("pendulum", "3", "must lie within -10 and 2"), ("pendulum", "nan", "must"), ("pendulum", "-inf", "must")])
def test_a_deviation_that_cannot_be_is_refused(name, value, message):
    with pytest.raises(configuration.ConfigError, match=message):
        args = pufferl.load_config(name, [f"--policy.log-std-init={value}", "--env.num-envs", "2"])
        vecenv = pufferl.load_env(name, args)
        try:
            pufferl.load_policy(args, vecenv, name)
        finally:
            vecenv.close()


class Unbounded(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, 1, (2,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}


def test_a_tanh_is_kept_with_the_weights_and_needs_bounds(tmp_path):
    options = ["--env.num-envs", "16", "--train.horizon", "8", "--train.minibatch-size", "64", "--rnn.num-layers", "2",
               "--logger", "none", "--train.total-timesteps", "256", "--data-dir", str(tmp_path)]
    folders = {}
    for squash in ("none", "tanh"):
        trainer = pufferl.train("pendulum",
                                pufferl.load_config("pendulum",
                                                    [*options, "--policy.squash", squash]))
        assert trainer.engine.name == "compiled" and trainer.engine.rollout_name == "compiled"
        assert ("action_squash" in trainer.policy.state_dict()) == (squash == "tanh")
        folders[squash] = str(trainer.run_folder)
    more = [*options, "--train.total-timesteps", "512", "--resume", folders["tanh"]]
    resumed = pufferl.train("pendulum", pufferl.load_config("pendulum", more))
    assert resumed.global_step == 512 and resumed.engine.squash is not None

    def load(env, folder, squash, **settings):
        args = pufferl.load_config(env, ["--env.num-envs", "2", *options[-2:]])
        args["env"] |= settings
        args["load_model_path"], args["policy"]["squash"], args["train"]["norm_obs"] = folder, squash, False
        args["policy"]["hidden_size"], args["rnn"]["num_layers"] = 64, 2
        with contextlib.closing(pufferl.load_env(env, args)) as vecenv:
            return pufferl.load_policy(args, vecenv, env)

    assert models.squash_of(load("pendulum", folders["tanh"], "none")) is not None, (
        "as it was trained")
    assert models.squash_of(load("pendulum", folders["none"], "none")) is None, (
        "as before there was a tanh")
    with pytest.raises(configuration.ConfigError, match="action_squash"):
        load("pendulum", folders["none"], "tanh")
    for env, settings in (("cartpole", {}), ("pendulum", {"continuous": False})):
        with pytest.raises(configuration.ConfigError, match="is for continuous actions"):
            load(env, None, "tanh", **settings)
    played = ["--load-model-path", folders["tanh"], "--eval.episodes", "4",
              "--eval.deterministic", "True"]
    assert watch.evaluate("pendulum", pufferl.load_config("pendulum", played))["score"].mean < 0
    mine = vector.make(Unbounded, num_envs=1)
    with pytest.raises(TypeError, match="finite bound"):
        models.squash(models.MinGRUPolicy(mine), mine.single_action_space)


def test_weights_of_other_bounds_are_refused(tmp_path):
    env = "gym/Pendulum-v1"
    args = pufferl.load_config(env, ["--policy.squash", "tanh", "--vec.num-envs", "2",
                                     "--vec.backend", "serial"])
    with contextlib.closing(pufferl.load_env(env, args)) as vecenv:
        policy = pufferl.load_policy(args, vecenv, env)
        assert policy.action_squash[:2, 0].tolist() == [0, 2], "a torque within -2..2"
        play = models.sample_logits(torch.distributions.Normal(torch.full((1, 1), 9.0),
                                                               torch.ones(1, 1)),
                                    torch.zeros(1, 1), seed=0, step=0, squash=policy.action_squash)
        assert play[0].item() == pytest.approx(2)
        policy.action_squash.mul_(3)
        torch.save(policy.state_dict(), tmp_path / "model_0.pt")
        with pytest.raises(configuration.ConfigError, match="to act between other bounds"):
            pufferl.load_policy({**args, "load_model_path": str(tmp_path / "model_0.pt")},
                                vecenv, env)


def test_custom_form_of_the_default_policy_learns_the_same(tmp_path):
    """The same network through autograd and through the fused path."""

    class Slow(models.MinGRUPolicy):
        pass

    fused = run_epochs(make_trainer(tmp_path, env_kwargs={"max_steps": 12}), 3)
    slow = run_epochs(
        make_trainer(
            tmp_path, policy=lambda env: Slow(env, hidden_size=16, num_layers=2),
            env_kwargs={"max_steps": 12}
        ),
        3,
    )
    for name in fused:
        torch.testing.assert_close(fused[name], slow[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("policy",
                         [None,
                          lambda env: models.LSTMWrapper(env, models.FeedForward(env, 16), 16)],
                         ids=["default", "lstm"])
@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_an_epoch_in_bfloat16_is_near_one_in_float32(tmp_path, policy, env):
    """The rollout's logits differ in the third digit, so most actions and what is learnt
    from them are the same."""
    values, losses, steps = [], [], []
    for precision in ("float32", "bfloat16"):
        trainer = make_trainer(tmp_path, env, policy, precision=precision)
        before = trainer.arena.flat("weights").clone()
        trainer.evaluate()
        losses.append(trainer.train())
        values.append(trainer.buffers.values[0].clone())
        steps.append(trainer.arena.flat("weights") - before)
        assert trainer.arena.flat("weights").dtype == torch.float32
        trainer.release()
    # A processor without bfloat16 computes a network that goes through torch in float32, and says so.
    assert torch.equal(*values) == (policy is not None and not engines.has_bfloat16())
    torch.testing.assert_close(values[1], values[0], rtol=0.02, atol=0.02)
    assert losses[1]["entropy"] == pytest.approx(losses[0]["entropy"], rel=0.01)
    assert torch.cosine_similarity(*steps, dim=0) > 0.7 and all(math.isfinite(loss)
                                                                for loss in losses[1].values())


def test_bootstraps_in_bfloat16_are_near_those_in_float32(tmp_path):
    bootstraps = []
    for precision in ("float32", "bfloat16"):
        trainer = make_trainer(tmp_path, env_kwargs={"max_steps": 3}, precision=precision)
        trainer.evaluate()
        bootstraps.append(trainer.buffers.bootstraps[:3].clone())
        trainer.release()
    assert (bootstraps[0][2] != 0).any() and not torch.equal(*bootstraps)
    torch.testing.assert_close(bootstraps[1], bootstraps[0], rtol=0.03, atol=0.02)


@pytest.mark.parametrize(("env", "settings", "precision"), [
    ("cartpole", {"max_steps": 5}, "float32"), ("pendulum", {"max_steps": 7}, "float32"),
    ("masked", {}, "float32"),
    ("target", {"num_agents": 4, "patience": 6}, "float32"), ("spaces", {}, "float32"),
    ("squared", {}, "float32"), ("cartpole", {"max_steps": 5}, "bfloat16"),
])
def test_a_rollout_in_one_call_is_the_one_step_by_step(tmp_path, monkeypatch, env,
                                                       settings, precision):
    """Bit for bit: truncations, masks, several heads, several agents, continuous actions, bytes."""
    rollouts, calls = [], []
    for one_call in (True, False):
        monkeypatch.setattr(vector.Native, "can_step_in_kernels", one_call)
        trainer = make_trainer(tmp_path, env, env_kwargs=settings, precision=precision)
        advance = trainer.vecenv.advance
        trainer.vecenv.advance = lambda buffer, advance=advance: (calls.append(buffer),
                                                                  advance(buffer))
        for _ in range(3):
            trainer.evaluate()
            trainer.train()
        storage = [tensor.clone() for tensor in trainer.storage.values() if tensor is not None]
        rollouts.append([*storage, trainer.arena.memory.clone()])
        assert bool(calls) != one_call
        trainer.release()
    assert all(torch.equal(a, b) for a, b in zip(*rollouts, strict=True))


def test_who_changes_how_a_vector_steps_is_asked(tmp_path):
    trainer = make_trainer(tmp_path)
    assert trainer.vecenv.can_step_in_kernels
    trainer.vecenv.advance = trainer.vecenv.advance
    assert not trainer.vecenv.can_step_in_kernels
    trainer.release()
    trainer = make_trainer(tmp_path, num_buffers=1)
    assert not trainer.vecenv.can_step_in_kernels, "two threads step one buffer together"
    trainer.release()


def test_the_script_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    from pufferl import PuffeRL, load_config, load_env, load_policy

    name = "puffer_breakout"
    args = load_config(name)
    args["vec"]["num_envs"] = 2
    args["env"]["num_envs"] = 64
    args["policy"]["hidden_size"] = 32
    args["rnn"]["input_size"] = 32
    args["rnn"]["hidden_size"] = 32
    args["train"]["total_timesteps"] = 20_000
    args["train"]["learning_rate"] = 0.03
    vecenv = load_env(name, args)
    assert vecenv.num_agents == 128
    policy = load_policy(args, vecenv, name)
    trainer = PuffeRL({**args["train"], "env": name}, vecenv, policy)
    steps = 0
    while trainer.global_step < args["train"]["total_timesteps"]:
        trainer.evaluate()
        logs = trainer.train()
        steps += 1
    assert steps == trainer.total_epochs == trainer.epoch
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"} <= set(logs)
    trainer.print_dashboard()
    path = trainer.close()
    assert Path(path).exists() and "breakout" in path
    assert "100.0%" in capsys.readouterr().out


def test_logging_interval_and_mean_and_log_never_log_twice(tmp_path):
    class Memory(pufferl.NoLogger):
        def __init__(self):
            self.steps = []

        def log(self, metrics, step):
            self.steps.append(step)
            assert all(isinstance(value, (int, float)) for value in metrics.values())

    trainer = make_trainer(tmp_path, log_interval=0.0)
    trainer.logger = Memory()
    for _ in range(3):
        trainer.evaluate()
        trainer.train()
        trainer.mean_and_log()
    assert trainer.logger.steps == [192, 384, 576]
    trainer.release()


def test_assigned_learning_rate_overrides_the_schedule(tmp_path):
    trainer = make_trainer(tmp_path, learning_rate=0.1, min_lr_ratio=0.0, total_timesteps=192 * 4)
    rates = []
    for _ in range(2):
        trainer.evaluate()
        trainer.train()
        rates.append(trainer.learning_rate)
    assert rates[0] == pytest.approx(0.1 * 0.5 * (1 + np.cos(np.pi / 4)))
    trainer.learning_rate = 0.0
    before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    after = run_epochs(trainer, 1)
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.release()


@pytest.mark.parametrize("anneal", [True, False])
def test_schedules_follow_the_steps(tmp_path, anneal):
    trainer = make_trainer(tmp_path, learning_rate=0.1, min_lr_ratio=0.2, ent_coef=0.01,
                           prio_beta0=0.4,
                           anneal_lr=anneal, anneal_ent_coef=anneal, total_timesteps=192 * 4)
    for done in (0.0, 0.25, 0.5, 0.75):
        rate = trainer.learning_rate
        run_epochs(trainer, 1)
        assert rate == pytest.approx(reference.cosine_lr(done, 1, 0.1, 0.2) if anneal else 0.1)
        assert trainer.settings[6].item() == pytest.approx(0.01 * (1 - done) if anneal else 0.01)
        assert trainer.arena["beta"].item() == pytest.approx(0.4 + 0.6 * done)
    trainer.release()


def test_clipped_rewards_are_logged_as_they_were(tmp_path):
    trainer = make_trainer(tmp_path, reward_clip=0.1, env_kwargs={"max_steps": 5}, log_interval=1e9)
    run_epochs(trainer, 2)
    logs = trainer.mean_and_log()
    assert logs["environment/episode_return"] == logs["environment/episode_return_max"] == 5
    trainer.release()


def test_nan_reward_stops_the_run_and_leaves_the_weights(tmp_path):
    trainer = make_trainer(tmp_path)
    run_epochs(trainer, 1)
    trainer.evaluate()
    trainer.storage["rewards"][3, 2] = float("nan")
    before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
    with pytest.raises(FloatingPointError, match="rewards"):
        trainer.train()
    assert all(torch.equal(before[name], tensor)
               for name, tensor in trainer.policy.state_dict().items())
    trainer.release()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_caught_in_the_first_epoch_without_beta(tmp_path, broken):
    trainer = make_trainer(tmp_path, prio_beta0=0.0)
    trainer.evaluate()
    trainer.storage["rewards"][3, 2] = broken
    with pytest.raises(FloatingPointError, match="rewards not finite, first at step 3"):
        trainer.train()
    trainer.release()


def test_masks_of_the_dead_are_no_cause(tmp_path):
    """A dead agent's mask may forbid everything: its log-probability is not
    finite, and never used."""
    trainer = make_trainer(tmp_path, env="masked")

    def kill():
        trainer.evaluate()
        trainer.storage["valid"][2, 1] = 0
        trainer.storage["action_masks"][2, 1] = 0
        trainer.buffers.logprobs[2, 1] = math.inf

    kill()
    assert all(map(math.isfinite, trainer.train().values()))
    kill()
    trainer.storage["rewards"][5, 2] = math.nan
    with pytest.raises(FloatingPointError, match="rewards not finite, first at step 5"):
        trainer.train()
    kill()
    trainer.storage["valid"][2, 1] = 1
    with pytest.raises(FloatingPointError, match="action mask of agent 1 forbids every choice"):
        trainer.train()
    trainer.release()


class RulesOut(torch.nn.Module):
    """A network that rules out by itself, with logits of `low`, the first choice of
    each head, or all of them."""

    def __init__(self, env, low, everything=False):
        super().__init__()
        self.sizes, self.low, self.everything = list(env.action_heads), low, everything
        self.linear = torch.nn.Linear(math.prod(env.observation_shape), sum(self.sizes) + 1)

    def forward(self, observations):
        x = self.linear(observations.flatten(1).float())
        heads = [torch.cat([head[:, :1] * 0 + self.low, head[:, 1:] + (self.low if self.everything else 0)], 1)
                 for head in x[:, :-1].split(self.sizes, 1)]
        return heads if len(heads) > 1 else heads[0], x[:, -1:]


LOWS = [torch.finfo(torch.float32).min, -math.inf]


@pytest.mark.parametrize("case", [{"env": "squared"}, CASES["multi-agent, two heads"]],
                         ids=["one head", "two heads"])
@pytest.mark.parametrize("low", LOWS)
def test_a_network_that_rules_out_by_itself_learns_as_with_plain_numbers(tmp_path, case, low):
    results = []
    for number in (low, -1e4):
        trainer = make_trainer(tmp_path, policy=lambda env, number=number: RulesOut(env, number), **case,
                               minibatch_size=24 * 8, replay_ratio=1.0)  # one minibatch
        trainer.evaluate()
        T, network = trainer.horizon, trainer.policy
        with torch.no_grad():
            logits, _ = network(trainer.storage["observations"][:T].flatten(0, 1))
        heads = logits if isinstance(logits, list) else [logits]
        entropy = sum(torch.distributions.Categorical(logits=head).entropy() for head in heads)
        entropy, logs = entropy.view(T, -1), trainer.train()
        live = trainer.storage["valid"][:T, trainer.buffers.index] != 0
        assert logs["entropy"] == pytest.approx(float(entropy[:, trainer.buffers.index][live].mean()),
                                                abs=1e-5)
        results.append(run_epochs(trainer, 2)["linear.weight"])
        trainer.release()
    assert torch.equal(*results)


def test_a_network_that_rules_out_everything_is_told(tmp_path):
    trainer = make_trainer(tmp_path, "squared",
                           lambda env: RulesOut(env, -math.inf, everything=True))
    trainer.evaluate()
    with pytest.raises(FloatingPointError, match=r"logprobs not finite.*all -inf: leave one"):
        trainer.train()
    trainer.release()


# -- learning: threshold and seed
# -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_needs_the_recurrent_state(tmp_path):
    args = pufferl.load_config("memory", ["--data-dir", str(tmp_path), "--logger", "none",
                                          "--rnn.name", "none"])
    args["load_model_path"] = str(pufferl.train("memory", args).run_folder)
    assert watch.evaluate("memory", args)["score"][0] < 0.65


def test_resume_auto_is_the_latest_run_or_a_new_one(tmp_path):
    options = ["--resume", "auto", "--data-dir", str(tmp_path)]
    assert pufferl.named_run("squared", options)[-2:] == ["--resume", "None"]
    assert pufferl.load_config("squared", pufferl.named_run("squared", options))["resume"] is None
    assert pufferl.named_run("squared", ["--resume", "auto", "--data-dir", "none"])[-1] == "None"
    for start in range(2):
        text = subprocess.run(
            [sys.executable, pufferl.__file__, "train", "squared", *options, "--logger", "none",
             "--train.total-timesteps", str(65_536 * (start + 1))], capture_output=True, text=True, timeout=300).stdout
        assert (f"resumed {tmp_path}" in text) == bool(start), text
    assert len(list(tmp_path.glob("squared_*"))) == 1


def test_a_run_of_an_ini_file_is_found_by_that_files_name(tmp_path):
    run = tmp_path / "drone_1"
    run.mkdir()
    (run / "trainer_state.pt").touch()
    (run / "config.json").write_text(json.dumps({"config_name": "drone_race", "env_name": "drone"}))
    options = ["--data-dir", str(tmp_path)]
    assert pufferl.load_config("drone_race", ["--resume", "latest", *options])["resume"] == "latest"
    assert pufferl.named_run("drone_race", ["--resume", "auto", *options])[-1] == str(run)
    assert pufferl.named_run("drone", ["--resume", "auto", *options])[-1] == "None"
