"""Every engine, with every kind of network, actions and precision, computes what the float64 reference
does; the network that a user has edited is the one that runs.

Engines are seen from outside alone: a trainer's weights, buffers and logs, and `trainer.engine.name`.
tests/test_compiled.py looks inside.
"""

import copy
import math
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import reference
import torch
from torch import nn
from torch.nn.utils import parametrizations
from trainers import ACTIONS, NETWORKS, initial_state, learn, make_trainer, run_epochs

import arena
import engines
import kernels
import models
from errors import NetworkError
from fast import verify

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_torch_thread")

# -- An epoch equals the reference

SETTINGS = {
    "gamma": 0.97, "gae_lambda": 0.9, "ent_coef": 0.001, "vf_coef": 2.0, "vf_clip_coef": 0.2, "norm_reward": False,
    "prio_alpha": 0.7, "prio_beta0": 0.3, "reward_clip": 0.8, "momentum": 0.9, "weight_decay": 0.1,
    "max_grad_norm": 0.7, "replay_ratio": 1.5, "vtrace_rho_clip": 1.1, "vtrace_c_clip": 0.9, "target_kl": None,
    "seed": 4,  # with 3 an Adam step magnifies one rounding
    "total_timesteps": 3000,  # so that normalised observations are measured in the first epoch alone
}
ADAM = {"optimizer": "adam", "momentum": 0.8, "beta2": 0.9, "eps": 1e-3, "max_grad_norm": 0.05}
STEPS = {"draw": "steps", "minibatch_size": 44, **ADAM}


def freeze(policy):
    policy.rnn.layers[0].requires_grad_(False)
    policy.decoder.bias.requires_grad_(False)


def deeper(policy):
    policy.encoder.extend([nn.Linear(16, 16), nn.ReLU()])


def both_deeper(policy):
    """And with the other kind of activations."""
    for name in ("actor", "critic"):
        maps = [nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 16)]
        setattr(policy, name, nn.Sequential(*(layer for one in maps for layer in (one, nn.ReLU()))))


EPOCHS = [
    ("compiled", "mingru", "discrete", {}),
    ("compiled", "mingru", "discrete", {"precision": "float32", "threads": True}),
    ("compiled", "mingru", "discrete", {"change": freeze}),
    ("compiled", "mingru", "continuous", ADAM),
    ("compiled", "mingru", "heads", {"num_buffers": 1, "num_threads": 1}),
    ("compiled", "mingru", "bytes", {"state": "zero"}),
    ("compiled", "mingru", "spaces", {}),
    ("compiled", "mingru", "masks", {}),
    ("compiled", "mingru", "squashed", {}),
    ("compiled", "mingru", "torque", {"normalize": True}),
    ("compiled", "feed-forward", "discrete", STEPS),
    ("compiled", "feed-forward", "continuous", {}),
    ("compiled", "feed-forward", "heads", {**STEPS, "threads": True}),
    ("compiled", "feed-forward", "masks", {**STEPS, "normalize": True}),
    ("compiled", "separate", "masks", {"threads": True}),
    ("compiled", "separate", "squashed", STEPS),
    ("compiled", "separate", "torque", {"normalize": True}),
    ("autograd", "mingru", "discrete", {"engine": "autograd", "threads": True}),
    ("autograd", "mingru", "squashed", {"engine": "autograd", "change": freeze}),
    ("autograd", "mingru", "masks", {"engine": "autograd", "max_minibatch_size": 16}),
    ("autograd", "feed-forward", "masks", {"engine": "autograd", "threads": True}),
    ("autograd", "feed-forward", "discrete", {"engine": "autograd", "threads": True, **STEPS}),
    ("autograd", "separate", "continuous", {"engine": "autograd", **ADAM}),
    ("autograd", "lstm", "discrete", {"max_minibatch_size": 16}),
    ("autograd", "gru", "continuous", {**ADAM, "normalize": True}),
    ("autograd", "wrapped mingru", "masks", {}),
    ("autograd", "planes", "planes", {}),
    ("autograd", "tripled", "bytes", {}),
    ("autograd", "tanh", "discrete", {**STEPS, "max_minibatch_size": 12}),
    ("autograd", "tanh", "continuous", STEPS),
    ("autograd", "tanh", "squashed", {"normalize": True}),
    ("autograd", "plain", "discrete", {"max_minibatch_size": 16}),
    ("autograd", "timed", "heads", {}),
    ("autograd", "fixed spread", "continuous", {}),
    ("autograd", "mingru", "half", {}),
    # kernels of a chain of maps of another length are compiled anew
    pytest.param("compiled", "feed-forward", "discrete", {"change": deeper}, marks=pytest.mark.slow),
    pytest.param("compiled", "separate", "discrete", {"change": both_deeper}, marks=pytest.mark.slow),
]


class Reference:
    """A trainer's network and optimizer in float64, which go through the same epochs."""

    def __init__(self, trainer):
        self.trainer, self.policy = trainer, copy.deepcopy(trainer.policy).double()
        self.trained = [p for p in self.policy.parameters() if p.requires_grad]
        self.momenta = [torch.zeros_like(parameter) for parameter in self.trained]
        self.adam = torch.optim.AdamW(self.trained, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
        self.draws, self.finals = [], {}

    def forward(self, observations, state):
        """outputs (T, n, A + 1) and log_std (A,) or None; networks ask for floats and get doubles."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            outputs, log_std = models.join_outputs(*models.over_time(self.policy, observations, state))
        return outputs, None if log_std is None else log_std[0, 0]

    def read_rollout(self):
        """Take the trainer's weights and rollout, with some agents that are not valid."""
        self.policy.load_state_dict(self.trainer.policy.state_dict())
        self.rollout = {n: x.clone() for n, x in self.trainer.storage.items() if x is not None}
        self.rollout["logprobs"] = self.trainer.buffers.logprobs.double()
        self.rollout["bootstraps"] = self.trainer.buffers.bootstraps.double()
        self.rollout["samples"] = (self.trainer.arena["samples"] if hasattr(self.policy, "action_squash")
                                   else self.trainer.storage["actions"]).clone()
        self.state = {name: x.double() for name, x in initial_state(self.trainer).items()}
        self.values = self.trainer.buffers.values.double()
        squash = models.squash_of(self.policy)
        self.distribution = {"heads": self.trainer.vecenv.action_heads or None,
                             "squash": None if squash is None else squash.double()}

    def check_rollout(self):
        """Values and log-probabilities are the network's, and of what was truncated, the last values."""
        r, flags = self.rollout, ("resets", "valid")
        with torch.no_grad():
            outputs, log_std = self.forward(r["observations"], self.state | {name: r[name] for name in flags})
        torch.testing.assert_close(self.values, outputs[..., -1], atol=1e-5, rtol=1e-4)
        logits, samples = outputs[:-1, :, :-1], r["samples"].double()
        masks = r["action_masks"][:-1] if "action_masks" in r else None
        logprobs, _ = reference.logprob_entropy(logits, samples, log_std=log_std, mask=masks, **self.distribution)
        if self.distribution["squash"] is not None:
            middle, half, _ = self.distribution["squash"][:, 0]
            torch.testing.assert_close(r["actions"].double(), middle + half * samples.tanh(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(r["logprobs"], logprobs.double(), atol=1e-4, rtol=1e-4)
        assert torch.equal(r["resets"][1:], r["terminals"] | r["truncations"])
        assert torch.equal(r["bootstraps"] != 0, r["truncations"] > r["terminals"])
        for t, final in self.finals.items():  # seen after step t, in the state before the reset
            cut = r["truncations"][t] > r["terminals"][t]
            state = {name: torch.cat([r[name][: t + 1], torch.full_like(r[name][:1], last)])
                     for name, last in zip(flags, (0, 1), strict=True)}
            with torch.no_grad():
                outputs, _ = self.forward(torch.cat([r["observations"][: t + 1], final[None]]), self.state | state)
            torch.testing.assert_close(r["bootstraps"][t, cut], outputs[-1, cut, -1], atol=1e-5, rtol=1e-4)

    def watch_final_observations(self):
        """From now on they are kept, and the environments stepped one by one."""
        vecenv, wait, horizon = self.trainer.vecenv, self.trainer.vecenv.wait, self.trainer.horizon
        self.finals = {t: torch.zeros_like(self.trainer.storage["final_observations"]) for t in range(horizon)}

        def watch(actor=0):
            if (ready := wait(actor)) is not None and ready[1] > 0:
                agents, final = vecenv.ranges[ready[0]], self.trainer.storage["final_observations"]
                self.finals[ready[1] - 1][agents] = final[agents]
            return ready

        vecenv.wait = watch

    def train(self, rate, beta):
        """Learn from the drawn columns: agents' segments, or single steps, one batch without time."""
        r, s, T = self.rollout, self.trainer.config, self.trainer.horizon
        span = 1 if s["draw"] == "steps" else T
        names = "observations", "resets", "valid", "samples", "logprobs", "action_masks"
        columns = {n: r[n][:T].reshape(span, -1, *r[n].shape[2:]) for n in names if n in r}
        self.ratios, self.losses, self.norms = torch.ones_like(r["logprobs"]), [], []
        self.find_advantages()
        for n in self.draws:
            column = {name: x[:, n] for name, x in columns.items()}
            state = {name: x[:, n] for name, x in self.state.items()}
            outputs, log_std = self.forward(column["observations"], state | {
                name: column[name] for name in ("resets", "valid")})
            p = reference.probabilities(self.advantages.view(span, -1), columns["valid"], s["prio_alpha"])
            values, advantages = (x[:T].reshape(span, -1)[:, n] for x in (self.values, self.advantages))
            loss = reference.ppo_loss(
                outputs[..., :-1], outputs[..., -1],
                column["samples"].to(torch.int64 if log_std is None else torch.float64),
                column["logprobs"], values, advantages, reference.importance_weights(p, beta)[n],
                column["valid"], s["clip_coef"], s["vf_coef"], s["vf_clip_coef"], s["ent_coef"],
                log_std=log_std, mask=column.get("action_masks"), **self.distribution)
            self.step(loss["loss"], rate)
            if span > 1:
                self.values[:T, n] = torch.where(column["valid"] != 0, outputs[..., -1].detach(), values)
                self.ratios[:, n] = loss["ratio"]
                self.find_advantages()
            self.losses.append({name: x.detach() for name, x in loss.items()})
        self.counts = [int(columns["valid"][:, n].sum()) for n in self.draws]

    def find_advantages(self):
        r, s = self.rollout, self.trainer.config
        self.advantages = reference.advantage(
            self.values, r["rewards"].double(), r["terminals"], r["truncations"], r["bootstraps"], self.ratios,
            r["valid"], s["gamma"], s["gae_lambda"], s["vtrace_rho_clip"], s["vtrace_c_clip"], s["reward_clip"])

    def step(self, loss, rate):
        grads = torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)
        norm = self.trainer.config["max_grad_norm"]
        clipped, found = reference.clip_gradients(grads, norm)
        self.norms.append(found.item())
        if self.trainer.config["optimizer"] == "muon":
            new, self.momenta = reference.muon_step(
                [p.detach() for p in self.trained], grads, self.momenta, rate, 0.9, 0.1, norm)
            with torch.no_grad():
                for parameter, tensor in zip(self.trained, new, strict=True):
                    parameter.copy_(tensor)
            return
        for parameter, grad in zip(self.trained, clipped, strict=True):
            parameter.grad = grad
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()


@pytest.mark.parametrize(("engine", "network", "actions", "settings"), EPOCHS)
def test_an_epoch_equals_the_float64_reference(engine, network, actions, settings, request, monkeypatch, capsys):
    """From the second epoch on, the recurrent state and the momentum are not zero."""
    settings = dict(settings)
    if settings.pop("threads", False):
        request.getfixturevalue("several_learners")
    trainer = make_trainer(policy=NETWORKS[network], **ACTIONS[actions], **SETTINGS | settings)
    assert trainer.engine.name == engine
    assert ("engine:" in capsys.readouterr().err) == (network == "tripled" or actions == "half")
    expected, draw = Reference(trainer), kernels.draw_segments

    def remember(priorities, cumulative, index, weights, **options):
        draw(priorities, cumulative, index, weights, **options)
        expected.draws.append(index.tolist())

    monkeypatch.setattr(kernels, "draw_segments", remember)
    epochs = 3 if settings.get("normalize") else 2
    for epoch in range(epochs):
        if epoch == epochs - 1 and actions != "half":
            expected.watch_final_observations()
        trainer.evaluate()
        expected.read_rollout()
        expected.check_rollout()
        carried = epoch > 0 and bool(expected.state) and settings.get("state") != "zero"
        assert any(x.any() for x in expected.state.values()) == carried
        for storage in (trainer.storage, expected.rollout):
            storage["valid"][2:5, ::5] = 0
        expected.draws.clear()
        rate, progress = trainer.learning_rate, trainer.global_step / 3000
        logs = trainer.train()
        expected.train(rate, 0.3 + 0.7 * progress)
        for (name, ours), theirs in zip(trainer.policy.named_parameters(), expected.policy.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-3,
                                       msg=lambda text, name=name, epoch=epoch: f"epoch {epoch}, {name}: {text}")
    assert len(expected.draws) >= 4 and all(count > 0 for count in expected.counts)
    if "max_steps" in ACTIONS[actions].get("env_kwargs", ()):
        assert expected.rollout["truncations"].any()
    for name in ("ratios", "advantages", "values"):
        tolerance = {"atol": 2e-4 if name == "advantages" else 1e-4, "rtol": 1e-3}
        torch.testing.assert_close(getattr(trainer.buffers, name).double(), getattr(expected, name), **tolerance)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
        mean = np.average([float(losses[name]) for losses in expected.losses], weights=expected.counts)
        assert logs[name] == pytest.approx(mean, abs=1e-4), name
    assert logs["grad_norm"] == pytest.approx(np.mean(expected.norms), rel=1e-3)
    assert max(expected.norms) > settings.get("max_grad_norm", 0)
    trainer.release()


# -- Rollouts

ROLLOUTS = [
    ("mingru", "discrete", {}),
    ("mingru", "discrete", {"precision": "bfloat16"}),
    ("mingru", "squashed", {}),
    ("mingru", "masks", {}),
    ("mingru", "heads", {}),
    ("mingru", "spaces", {}),
    ("feed-forward", "continuous", {}),
    ("feed-forward", "bytes", {"normalize": True}),
    ("separate", "torque", {"normalize": True}),
]


@pytest.mark.parametrize(("network", "actions", "settings"), ROLLOUTS)
def test_a_rollout_in_one_call_is_the_one_step_by_step(network, actions, settings):
    """Bit for bit. Whoever changes how an environment steps is asked at each step."""
    results = []
    for by_step in (False, True):
        trainer = make_trainer(policy=NETWORKS[network], total_timesteps=3000, **ACTIONS[actions], **settings)
        assert trainer.engine.name == "compiled" and trainer.vecenv.can_step_in_kernels
        if by_step:
            trainer.vecenv.advance = trainer.vecenv.advance
            assert not trainer.vecenv.can_step_in_kernels
        run_epochs(trainer, 3)
        storage = [tensor.clone() for tensor in trainer.storage.values() if tensor is not None]
        results.append([*storage, trainer.arena.memory.clone()])
        trainer.release()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_a_rollout_is_the_same_for_any_number_of_buffers_and_threads(actions):
    results = []
    for buffers, threads in ((1, 1), (1, 2), (3, 2), (4, 1)):
        trainer = make_trainer(**ACTIONS[actions], num_envs=192, num_buffers=buffers, num_threads=threads)
        # two threads step one buffer together
        assert trainer.vecenv.can_step_in_kernels == ((buffers, threads) != (1, 2))
        trainer.evaluate()
        results.append([trainer.storage[name].clone() for name in ("actions", "observations")])
        results[-1].append(trainer.buffers.values.clone())
        trainer.release()
    for result in results[1:]:
        for tensor, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(tensor, first, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("network", ["mingru", "lstm"])
@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_an_epoch_in_bfloat16_is_near_one_in_float32(network, env):
    """Logits differ in the third digit, so most actions and what is learnt from them are the same."""
    values, bootstraps, losses, steps = [], [], [], []
    for precision in ("float32", "bfloat16"):
        trainer = make_trainer(env=env, policy=NETWORKS[network], env_kwargs={"max_steps": 3}, precision=precision)
        before = trainer.arena.flat("weights").clone()
        trainer.evaluate()
        values.append(trainer.buffers.values[0].clone())
        bootstraps.append(trainer.buffers.bootstraps[:3].clone())
        losses.append(trainer.train())
        steps.append(trainer.arena.flat("weights") - before)
        assert before.dtype == torch.float32
        trainer.release()
    # A processor without bfloat16 computes a network that goes through torch in float32, and says so.
    same = network == "lstm" and not engines.has_bfloat16()
    assert torch.equal(*values) == torch.equal(*bootstraps) == same
    torch.testing.assert_close(values[1], values[0], rtol=0.02, atol=0.02)
    assert bootstraps[0][2].any()
    torch.testing.assert_close(bootstraps[1], bootstraps[0], rtol=0.03, atol=0.02)
    assert losses[1]["entropy"] == pytest.approx(losses[0]["entropy"], rel=0.01)
    assert torch.cosine_similarity(*steps, dim=0) > 0.7
    assert all(map(math.isfinite, losses[1].values()))


# -- What is edited is what runs


def clamp(policy):
    split = policy.decoder.split
    policy.decoder.split = lambda outputs: split(outputs.clamp(-20, 20))


def hook(policy):
    policy.encoder.register_forward_hook(lambda module, inputs, output: torch.tanh(output))


def hook_weight(policy):
    policy.encoder.weight.register_hook(lambda grad: grad)


def parametrize(policy):
    parametrizations.weight_norm(policy.encoder)


def another_layer(policy):
    policy.encoder = nn.Sequential(policy.encoder, nn.Tanh())
    policy.encoder.in_features = policy.encoder[0].in_features


def other_activation(policy):
    policy.encoder[1] = nn.Tanh()


def widen(policy):
    policy.encoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())


def mix_activations(policy):
    policy.critic[1] = nn.ReLU()


def deepen_value(policy):
    policy.critic.extend([nn.Linear(16, 16), nn.Tanh()])


def share(policy):
    policy.actor[0] = policy.critic[0]


EDITS = [
    *[("mingru", edit) for edit in (clamp, hook, hook_weight, parametrize, another_layer)],
    *[("feed-forward", edit) for edit in (other_activation, widen)],
    *[("separate", edit) for edit in (mix_activations, deepen_value, share)],
]


def check_values(trainer):
    """Those of the last rollout are the network's, as it is now."""
    flags = {name: trainer.storage[name] for name in ("resets", "valid")}
    with torch.no_grad():
        _, value = models.over_time(trainer.policy, trainer.storage["observations"],
                                    initial_state(trainer) | flags)
    torch.testing.assert_close(trainer.buffers.values, value.squeeze(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("network", "edit"), EDITS)
def test_an_edited_network_is_what_runs(network, edit, capsys):
    trainer = make_trainer(policy=NETWORKS[network], change=edit)
    assert trainer.engine.name == "autograd"
    assert capsys.readouterr().err.count("engine:") == 1
    for _ in range(2):
        trainer.evaluate()
        check_values(trainer)
        assert all(map(math.isfinite, trainer.train().values()))
    trainer.release()


LATER = [
    ("mingru", hook),
    ("mingru", lambda policy: policy.rnn.layers.pop(1)),
    ("feed-forward", other_activation),
    ("feed-forward", lambda policy: policy.encoder.pop(3)),
    ("feed-forward", lambda policy: policy.encoder.__setitem__(1, nn.Sequential())),
]


@pytest.mark.parametrize(("network", "edit"), LATER)
def test_an_edit_in_the_middle_of_a_run_is_followed_and_noted_once(network, edit, tmp_path, capsys):
    trainer = make_trainer(tmp_path, policy=NETWORKS[network], log_interval=1e9)
    run_epochs(trainer, 1)
    assert trainer.engine.name == "compiled"
    edit(trainer.policy)
    for _ in range(2):
        trainer.evaluate()
        check_values(trainer)
        trainer.train()
    assert trainer.engine.name == "autograd"
    note = (trainer.run_folder / "warnings.txt").read_text()
    assert "192" in note and "engine:" in note and note.count("\n") == 1
    assert note.partition(": ")[2].strip() in capsys.readouterr().err
    trainer.release()


@pytest.mark.parametrize("network", ["mingru", "feed-forward"])
def test_a_decoder_for_other_actions_is_an_error(network):
    def replace(policy):
        policy.decoder = models.Decoder(16, gymnasium.spaces.Discrete(5))

    trainer = make_trainer(policy=NETWORKS[network], change=replace)
    with pytest.raises(NetworkError, match=type(trainer.policy).__name__):
        trainer.evaluate()
    trainer.release()


@pytest.mark.parametrize(("kind", "name"), [
    (kind, name) for kind, names in verify.REIMPLEMENTED.items() if kind.__module__ == "engines" for name in names])
def test_an_edit_of_engines_is_what_runs(kind, name, monkeypatch, capsys):
    original, runs = getattr(kind, name), []

    def edited(*args, **options):
        runs.append(name)
        return original(*args, **options)

    monkeypatch.setattr(kind, name, edited)
    trainer = make_trainer(env_kwargs={"max_steps": 5})
    assert trainer.engine.name == "autograd" and "engines.py" in capsys.readouterr().err
    learn(trainer, 1)
    assert runs


def test_what_torch_compiles_is_not_compiled_by_hand(capsys):
    trainer = make_trainer(policy=lambda env: torch.compile(NETWORKS["feed-forward"](env)))
    assert type(trainer.policy) is models.FeedForward and trainer.config["compile"]
    assert trainer.engine.name == "autograd" and "train.compile" in capsys.readouterr().err
    trainer.release()


# -- Frozen parameters


class DecayingAdam(torch.optim.Adam):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, weight_decay=0.1)


FROZEN = [("mingru", "encoder", "muon"), ("mingru", "encoder", DecayingAdam), ("feed-forward", "encoder", "adam"),
          ("separate", "critic", "muon"), ("tripled", "encoder", "adam"), ("lstm", "lstm", "muon"),
          ("lstm", "lstm", DecayingAdam)]


@pytest.mark.parametrize(("network", "part", "optimizer"), FROZEN)
def test_what_is_frozen_stays(network, part, optimizer, tmp_path):
    """Bit for bit, from the start, in a resumed run, and in the middle of one, with momentum."""
    def make(trained):
        return make_trainer(
            policy=NETWORKS[network], optimizer=optimizer, weight_decay=0.0 if optimizer is DecayingAdam else 0.1,
            change=lambda policy: getattr(policy, part).requires_grad_(trained))

    def train(trainer):
        """Run an epoch; return the parameters that it changes."""
        before = {name: tensor.detach().clone() for name, tensor in trainer.policy.named_parameters()}
        run_epochs(trainer, 1)
        return {name for name, tensor in trainer.policy.named_parameters()
                if not torch.equal(tensor, before[name])}

    trainer = make(False)
    assert trainer.engine.name == ("autograd" if network in ("tripled", "lstm") else "compiled")
    names = {name for name, _ in trainer.policy.named_parameters()}
    others = {name for name in names if not name.startswith(part)}
    assert train(trainer) == others
    trainer.save_checkpoint(tmp_path / "half.pt")
    assert train(trainer) == others
    assert not any(p.grad.any() for p in getattr(trainer.policy, part).parameters())
    again = make(False)
    again.load_checkpoint(tmp_path / "half.pt")
    assert torch.equal(learn(again, 1), trainer.arena.flat("weights"))

    trainer = make(True)
    for trained, expected in ((True, names), (False, others), (True, names)):
        getattr(trainer.policy, part).requires_grad_(trained)
        assert train(trainer) == expected
    trainer.release()


@pytest.mark.parametrize(("engine", "name"), [("auto", "compiled"), ("autograd", "autograd")])
def test_a_network_that_is_frozen_whole_is_stepped_and_stays(engine, name):
    trainer = make_trainer(change=lambda policy: policy.requires_grad_(False), engine=engine)
    before = trainer.arena.flat("weights").clone()
    assert torch.equal(before, learn(trainer)) and trainer.engine.name == name


# -- Without the fast engines


@pytest.mark.parametrize(("missing", "reason"), [
    (None, "fast/compiled.py"), (RuntimeError("no C compiler found: install gcc"), "compiler")])
def test_without_a_fast_engine_the_default_network_runs_through_autograd(missing, reason, monkeypatch, capsys):
    class NoCompiler:
        __spec__ = True

        def __getattr__(self, name):
            raise missing

    monkeypatch.setitem(sys.modules, "fast.compiled", missing and NoCompiler())
    trainer = make_trainer()
    assert trainer.engine.name == "autograd" and reason in capsys.readouterr().err
    learn(trainer, 1)


@pytest.mark.slow  # everything is compiled anew
def test_the_fast_engines_can_be_deleted(tmp_path):
    fork = tmp_path / "fork"
    shutil.copytree(ROOT, fork, ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "tests", "docs", "experiments", "compiled.py", "fused.py", "tile.c"))
    command = "train cartpole --env.num-envs 64 --train.total-timesteps 30000 --logger none --data-dir none"
    code = ("import os, sys\n"  # `make` puts a checkout on the import path, where the fork would find them
            "sys.path = [folder for folder in sys.path if not os.path.exists(folder + '/fast/compiled.py')]\n"
            f"import pufferl; pufferl.main({command.split()})")
    done = subprocess.run([sys.executable, "-c", code], cwd=fork, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "engine autograd" in done.stdout and "fast/compiled.py" in done.stderr


@arena.cached_njit()
def _halve(first, last, array):
    for i in range(first, last):
        array[i] *= np.float32(0.5)


def test_denormal_numbers_are_zero_on_the_threads_of_an_engine():
    """A product with them is a hundred times slower; a solved game has them in its momenta."""
    smallest = torch.full((1 << 20,), torch.finfo(torch.float32).tiny)
    halves = smallest.clone()
    with engines.torch_threads(2), arena.threads(2):
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor has no such mode")
    with engines.torch_threads(2), arena.threads(2):
        arena.run(_halve, len(halves), 1000, halves.numpy())
        assert not halves.numpy().view(np.int32).any()
        assert not (smallest[:1] * 0.5).numpy().view(np.int32).any()
    assert (smallest[:1] * 0.5).numpy().view(np.int32).any()
