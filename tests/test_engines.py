"""Engines: the fast ones compute the same as the network, and if a user changes the network, the
changed one runs."""

import contextlib
import functools
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import gymnasium
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import configuration
import engines
import models
import pufferl
import vector
from fast import products

ROOT = Path(__file__).resolve().parent.parent


def make_trainer(change=lambda policy: None, kind=models.MinGRUPolicy, env="cartpole",
                 normalize=False, **settings):
    torch.manual_seed(0)
    vecenv = vector.make(env, num_envs=16, seed=1, num_threads=1)
    policy = kind(vecenv, 16, 2, normalize)
    change(policy)
    settings = {"horizon": 8, "minibatch_size": 64, "data_dir": None, "log_interval": 1e9,
                "learning_rate": 0.01, "total_timesteps": 10**5, **settings}
    return pufferl.PuffeRL(settings, vecenv, policy)


def learn(trainer, epochs=2):
    """The weights after some epochs."""
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    weights = trainer.arena.flat("weights").clone()
    trainer.release()
    return weights


@pytest.mark.parametrize("env", ["cartpole", "pendulum", "spaces", "masked", "squared"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_default_network_is_compiled(env, normalize, capsys):
    trainer = make_trainer(env=env, normalize=normalize, norm_obs=normalize)
    assert trainer.engine.name == "compiled" and trainer.engine.outdated(True) is None
    assert trainer.engine.rollout_name == "compiled"
    weights = trainer.arena.flat("weights").clone()
    assert trainer.engine.difference(trainer.policy, trainer.vecenv) is None
    assert torch.equal(weights, trainer.arena.flat("weights")), "comparing changes nothing"
    assert trainer.policy.encoder.weight.grad.data_ptr() == trainer.arena["gradients/policy.encoder.weight"].data_ptr()
    assert capsys.readouterr().err == ""
    trainer.release()


@pytest.mark.parametrize("precision", ["none", "tf32"])
def test_a_comparison_is_without_tf32_and_leaves_what_the_user_chose(precision, monkeypatch):
    chosen, seen, given = torch.backends.cuda.matmul, [], engines._given
    monkeypatch.setattr(engines, "_given", lambda *call: (seen.append(chosen.fp32_precision), given(*call))[1])
    trainer = make_trainer()
    try:
        chosen.fp32_precision = precision
        assert trainer.engine.difference(trainer.policy, trainer.vecenv) is None
        assert chosen.fp32_precision == precision and set(seen[-2:]) == {"ieee"}
    finally:
        chosen.fp32_precision = "none"
        trainer.release()


def without_memory(vecenv, hidden_size, num_layers, normalize, kind=models.FeedForward):
    policy = kind(vecenv, hidden_size)
    return models.Normalized(vecenv, policy) if normalize else policy


apart = functools.partial(without_memory, kind=models.Separate)


@pytest.mark.parametrize("env", ["cartpole", "pendulum", "spaces", "masked"])
@pytest.mark.parametrize("kind, normalize", [(without_memory, False), (without_memory, True), (apart, True)])
def test_the_networks_without_memory_are_compiled(env, kind, normalize, capsys):
    trainer = make_trainer(kind=kind, env=env, normalize=normalize, norm_obs=normalize)
    assert trainer.engine.name == trainer.engine.rollout_name == "compiled"
    assert trainer.engine.outdated(True) is None and capsys.readouterr().err == ""
    trainer.release()


def squashed(policy):
    models.squash(policy, gymnasium.spaces.Box(-1, 1, (1,)))


@pytest.mark.parametrize("settings",
                         [{}, {"env": "pendulum"}, {"env": "pendulum", "change": squashed},
                          {"kind": without_memory}, {"kind": without_memory, "env": "pendulum"},
                          {"kind": without_memory, "normalize": True, "norm_obs": True},
                          {"kind": apart}, {"kind": apart, "env": "pendulum", "normalize": True, "norm_obs": True}])
def test_every_engine_learns_the_same(settings):
    """From the same environments and draws; sums in another order."""
    ours, theirs = learn(make_trainer(**settings)), learn(make_trainer(**settings,
                                                                       engine="autograd"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    assert torch.equal(ours, learn(make_trainer(**settings, rollout="plain"))), (
        "the compiled rollout is the plain one")


@pytest.mark.parametrize("settings", [{}, {"rollout": "plain"}, {"engine": "autograd"}])
def test_what_the_environments_get_is_squashed_and_so_is_its_probability(settings):
    trainer = make_trainer(squashed, env="pendulum", learning_rate=1e-9, **settings)
    trainer.evaluate()
    s, u = trainer.storage, trainer.engine.samples
    torch.testing.assert_close(s["actions"], u.tanh(), atol=1e-6, rtol=1e-6)
    assert s["actions"].abs().max() < 1 < u.abs().max()
    state = {"mingru": trainer.engine.initial_state["mingru"].clone(), "resets": s["resets"],
             "valid": s["valid"]}
    with torch.no_grad():
        normal, _ = trainer.policy(s["observations"], state)
        normal = torch.distributions.Normal(normal.loc[:-1].double(), normal.scale[:-1].double())
    expected = torch.distributions.TransformedDistribution(normal,
                                                           torch.distributions.TanhTransform())
    logprobs = expected.log_prob(u.double().tanh()).sum(-1)
    torch.testing.assert_close(trainer.buffers.logprobs.double(), logprobs, atol=1e-4, rtol=1e-4)
    entropy = (normal.entropy() + torch.log1p(-u.double().tanh() ** 2)).sum(-1).mean()
    assert trainer.train()["entropy"] == pytest.approx(entropy.item(), abs=1e-4), (
        "each pass meets each step once, and the policy hardly moves")
    trainer.release()


class Tripled(models.MinGRUPolicy):
    def forward(self, observations, state):
        logits, value = super().forward(observations, state)
        return logits * 3, value


def tripled(policy):
    forward = policy.forward
    policy.forward = lambda observations, state: (lambda logits, value: (logits * 3, value))(
        *forward(observations, state))


def clamped(policy):
    split = policy.decoder.split

    def forward(outputs):
        return split(outputs.clamp(-20, 20))

    policy.decoder.split = forward


@pytest.mark.parametrize("limit", [lambda outputs: outputs.clamp(-100, 100),
                                   lambda outputs: 30 * torch.tanh(outputs / 30)])
@pytest.mark.parametrize("kind", ["MinGRUPolicy", "FeedForward", "Separate"])
def test_a_bound_of_the_outputs_is_seen_however_small_they_are_at_first(kind, limit, monkeypatch):
    def split(self, outputs, split=models.Decoder.split):
        return split(self, limit(outputs))

    monkeypatch.setattr(models.Decoder, "split", split)
    monkeypatch.setitem(engines.OWN, models.Decoder, {"split": split})  # as in an edited file
    trainer = make_trainer(kind=lambda env, size, *others: getattr(models, kind)(env, size))
    assert trainer.engine.name == "autograd"
    trainer.release()


def hooked(policy):
    policy.encoder.register_forward_hook(lambda module, inputs, output: torch.tanh(output))


def parametrized(policy):
    parametrizations.weight_norm(policy.encoder)


def another_layer(policy):
    policy.encoder = nn.Sequential(policy.encoder, nn.Tanh())
    policy.encoder.in_features = policy.encoder[0].in_features


def rounder(policy):
    policy.encoder[1] = nn.Tanh()


def wider(policy):
    policy.encoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())


def doubled(policy):
    encode = policy.encode_observations
    policy.encode_observations = lambda observations: 2 * encode(observations)


def softer(policy):
    policy.critic[1] = nn.ReLU()  # and the others are tanh


def deeper_value(policy):
    policy.critic.extend([nn.Linear(16, 16), nn.Tanh()])


def shared(policy):
    policy.actor[0] = policy.critic[0]


@pytest.mark.parametrize("change, kind", [(rounder, without_memory), (wider, without_memory), (doubled, without_memory),
                                          (softer, apart), (deeper_value, apart), (shared, apart)])
def test_what_is_edited_is_what_runs_without_memory(change, kind):
    trainer = make_trainer(change, kind)
    assert trainer.engine.name == "autograd"
    assert torch.isfinite(learn(trainer)).all()


def deeper(policy):
    policy.encoder.extend([nn.Linear(16, 16), nn.ReLU()])


def both_deeper(policy):
    """And with other activations, of which each of these engines has two."""
    for name in ("actor", "critic"):
        setattr(policy, name, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
                                            nn.Linear(16, 16), nn.ReLU()))


@pytest.mark.slow
@pytest.mark.parametrize("change, kind", [(deeper, without_memory), (both_deeper, apart)])
def test_one_more_layer_of_the_same_kind_is_no_other_network(change, kind):
    trainer = make_trainer(change, kind)
    assert trainer.engine.name == "compiled"
    torch.testing.assert_close(learn(trainer), learn(make_trainer(change, kind, engine="autograd")),
                               atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", [models.MinGRUPolicy, without_memory])
def test_a_decoder_for_other_actions_is_no_crash(kind):
    def change(policy):
        policy.decoder = models.Decoder(16, gymnasium.spaces.Discrete(5))

    trainer = make_trainer(change, kind)
    with pytest.raises(models.NetworkFault, match="these environments want 2"):
        trainer.evaluate()
    trainer.release()


def test_a_normalizer_that_is_edited_is_seen(monkeypatch):
    monkeypatch.setattr(models.Normalizer, "forward", lambda self, x: (x.float() * self.scale).clamp(-10, 10))
    monkeypatch.setitem(engines.OWN, models.Normalizer, {"forward": models.Normalizer.forward})  # as in an edited file
    for kind in (models.MinGRUPolicy, without_memory):
        trainer = make_trainer(kind=kind, normalize=True, norm_obs=True)
        assert trainer.engine.name == "autograd"
        trainer.release()


@pytest.mark.parametrize(("kind", "change"), [
    (without_memory, lambda policy: policy.encoder.pop(3)),
    (without_memory, lambda policy: policy.encoder.__setitem__(1, nn.Sequential())),
    (models.MinGRUPolicy, lambda policy: policy.rnn.layers.pop(1))])
def test_a_part_that_goes_while_it_trains_is_seen(kind, change):
    trainer = make_trainer(kind=kind)
    trainer.evaluate()
    trainer.train()
    change(trainer.policy)
    with contextlib.suppress(Exception):  # a MinGRU of one layer has another state
        trainer.evaluate()
    assert trainer.engine.name == "autograd"
    trainer.release()


def test_what_torch_compiles_is_not_compiled_by_hand():
    vecenv = vector.make("cartpole", num_envs=16)
    settings = {"device": "cpu", "engine": "auto", "loss": None, "compile": True}
    policy = models.FeedForward(vecenv, 16)
    assert engines.choose(policy, vecenv, settings) == (engines.Autograd, None)
    _, _, given = pufferl.what_is_what({"compile": False}, vecenv, torch.compile(policy))
    assert given is policy and pufferl.what_is_what(None, vecenv, torch.compile(policy))[0] == {"compile": True}


def test_a_network_that_torch_spreads_is_refused():
    vecenv = vector.make("cartpole", num_envs=16)
    with pytest.raises(configuration.ConfigError, match=r"the network itself in place of its DataParallel\."):
        pufferl.PuffeRL({"device": "cpu", "data_dir": None}, vecenv, torch.nn.DataParallel(models.FeedForward(vecenv)))


CHANGES = {"in place": (tripled, models.MinGRUPolicy), "a subclass": (lambda policy: None, Tripled),
           "a clamp far from zero": (clamped, models.MinGRUPolicy),
           "a hook": (hooked, models.MinGRUPolicy),
           "a parametrization": (parametrized, models.MinGRUPolicy),
           "a layer": (another_layer, models.MinGRUPolicy)}


def test_another_network_in_the_loss_begins_with_the_same_memory():
    gaps = []

    def leash(minibatch):
        with torch.no_grad():
            logits, _ = models.over_time(trainer.policy, minibatch.observations, minibatch.state)
        gaps.append((logits - minibatch.logits).abs().max().item())
        return 0 * minibatch.values.mean()

    trainer = make_trainer(loss=leash)
    for _ in range(3):
        trainer.evaluate()
        trainer.train()
    assert len(gaps) > 2 and max(gaps) < 1e-5
    assert any(state.abs().max() > 0.01 for state in trainer.engine.initial_state.values())
    trainer.release()


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in engines.RESTATED.items() for name in names])
def test_an_edit_of_engines_is_what_runs(kind, name, monkeypatch, capsys):
    assert engines.checksum() == engines.CHECKED, f"the checksum of what is restated is {engines.checksum():#x}"
    own, runs = getattr(kind, name), []
    monkeypatch.setattr(kind, name, lambda *args, **options: runs.append(name) or own(*args, **options))
    trainer = make_trainer()
    assert trainer.engine.name == "autograd"
    assert "engine: autograd, because engines.py was edited" in capsys.readouterr().err
    learn(trainer)
    assert runs or name in ("_bootstrap", "_copy_state")  # nothing is truncated here


def test_an_edit_in_the_middle_of_a_run_is_followed_and_noted(tmp_path, capsys):
    trainer = make_trainer(data_dir=str(tmp_path))
    trainer.evaluate()
    trainer.train()
    assert trainer.engine.name == "compiled"
    hooked(trainer.policy)
    learn(trainer)
    assert trainer.engine.name == "autograd"
    noted = (trainer.run_folder / "signs.txt").read_text()
    assert noted.startswith("step 128: engine: autograd, because ") and noted.count("\n") == 1
    assert noted.partition(": ")[2].strip() in capsys.readouterr().err


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_edited_is_what_runs(change, capsys):
    function, kind = CHANGES[change]
    trainer = make_trainer(function, kind)
    assert trainer.engine.name == "autograd"
    assert capsys.readouterr().err.count("engine: autograd, because ") == 1
    assert torch.isfinite(learn(trainer)).all()
    if change not in ("a clamp far from zero", "a parametrization"):  # which change no number here
        assert not torch.allclose(learn(make_trainer(function, kind)),
                                  learn(make_trainer()), atol=1e-3)


def test_an_edit_of_the_class_is_seen(monkeypatch, capsys):
    """As one of models.py itself: nothing shows it but its results."""
    forward = models.MinGRUPolicy.forward

    def edited(self, observations, state):
        logits, value = forward(self, observations, state)
        return logits.clamp(-30, 30), value

    monkeypatch.setattr(models.MinGRUPolicy, "forward", edited)
    monkeypatch.setitem(engines.OWN[models.MinGRUPolicy], "forward", edited)
    learn(make_trainer())
    assert "at 30 times its weights" in capsys.readouterr().err


def smaller_spread(self, outputs):
    logits, value = outputs[..., :-1], outputs[..., -1:]
    return torch.distributions.Normal(logits, self.log_std.clamp(-1, 0.5).exp().expand_as(logits)), value


def near(self, x):
    return ((x.float() - self.shift) * self.scale).clamp(-5.0, 5.0)


def half_as_far(self, observations, state):
    logits, value = models._Recurrent.forward_eval(self, observations, state)
    return logits / 2, value


def forgets(forward):
    def edited(self, observations, state):
        result = forward(self, observations, state)
        state["mingru"] = state["mingru"] / 2
        return result
    return edited


EDITS = {  # of the classes, as an edit of models.py is: (class, method, what it becomes, settings)
    "log_std": (models.Decoder, "split", smaller_spread, {"env": "pendulum"}),
    "the normaliser": (models.Normalizer, "forward", near, {"normalize": True, "norm_obs": True}),
    "the rollout's form": (models.MinGRUPolicy, "forward_eval", half_as_far, {}),
    "the state": (models.MinGRUPolicy, "forward", forgets(models.MinGRUPolicy.forward), {}),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_of_models_py_is_seen(what, monkeypatch, capsys):
    kind, name, method, settings = EDITS[what]
    monkeypatch.setattr(kind, name, method)
    monkeypatch.setitem(engines.OWN[kind], name, method)
    trainer = make_trainer(**settings)
    assert trainer.engine.name == "autograd" and "would differ" in capsys.readouterr().err
    learn(trainer)


def test_another_network_in_its_place_is_no_crash(capsys):
    """Two heads for one, the commonest edit."""

    def two_heads(policy):
        actor, critic = nn.Linear(16, 2), nn.Linear(16, 1)
        del policy.decoder
        policy.actor, policy.critic = actor, critic

        def forward(observations, state):
            T, N = observations.shape[:2]
            x, state["mingru"] = policy.rnn(policy.encoder(observations.float()), state["mingru"],
                                            *policy.flags(state, T, N, observations.device))
            return actor(x), critic(x)

        policy.forward = forward
        policy.initial_state = lambda n: {"mingru": torch.zeros(2, n, 16)}

    learn(make_trainer(two_heads))
    assert "engine: autograd" in capsys.readouterr().err


class Lstm(models.LSTMWrapper):
    def __init__(self, env, *_):
        super().__init__(env, models.FeedForward(env, 16), 16)


def part_of(policy):
    return policy.encoder if hasattr(policy, "encoder") else policy.lstm


OWN_ADAM = """
import torch
class Own(torch.optim.Adam):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, weight_decay=0.1)
"""


@pytest.mark.parametrize("optimizer", ["muon", "adam", "own.py:Own"])
@pytest.mark.parametrize("kind", [models.MinGRUPolicy, Tripled, Lstm])
def test_what_is_frozen_stays(kind, optimizer, tmp_path):
    """Bit for bit, from the start, in the middle of a run (with momentum), and in a resumed one;
    the rest is trained as if nothing else were there."""
    (tmp_path / "own.py").write_text(OWN_ADAM)
    own = optimizer.startswith("own.py")
    settings = {"kind": kind, "optimizer": optimizer.replace("own.py", f"{tmp_path}/own.py"),
                "weight_decay": 0.0 if own else 0.1}
    trainer = make_trainer(lambda policy: part_of(policy).requires_grad_(False), **settings)
    frozen = [parameter.clone() for parameter in part_of(trainer.policy).parameters()]

    def unchanged(trainer):
        pairs = zip(part_of(trainer.policy).parameters(), frozen, strict=True)
        return all(torch.equal(*pair) and not pair[0].grad.any() for pair in pairs)

    first = trainer.arena.flat("weights").clone()
    trainer.evaluate()
    trainer.train()
    trainer.save_checkpoint(tmp_path / "half.pt")
    weights = learn(trainer)
    assert unchanged(trainer) and not torch.equal(first, weights)
    assert trainer.engine.name == ("compiled" if kind is models.MinGRUPolicy else "autograd")
    again = make_trainer(lambda policy: part_of(policy).requires_grad_(False), **settings)
    again.load_checkpoint(tmp_path / "half.pt")
    assert torch.equal(learn(again), weights) and unchanged(again)

    trainer = make_trainer(**settings)
    trainer.evaluate()
    trainer.train()
    part_of(trainer.policy).requires_grad_(False)
    frozen = [parameter.clone() for parameter in part_of(trainer.policy).parameters()]
    moved = []
    for _ in range(2):
        trainer.evaluate()
        trainer.train()
        moved.append(trainer.arena.flat("weights").clone())
    assert unchanged(trainer) and not torch.equal(*moved)
    part_of(trainer.policy).requires_grad_(True)
    learn(trainer)
    assert not unchanged(trainer), "and then it is trained again"


def test_the_engines_agree_on_what_is_frozen():
    def freeze(policy):
        policy.rnn.layers[0].requires_grad_(False)
        policy.decoder.bias.requires_grad_(False)

    ours, theirs = learn(make_trainer(freeze)), learn(make_trainer(freeze, engine="autograd"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


def test_a_network_that_is_frozen_whole_is_stepped_and_stays():
    for engine, name in (("auto", "compiled"), ("autograd", "autograd")):
        trainer = make_trainer(lambda policy: policy.requires_grad_(False), engine=engine)
        before = trainer.arena.flat("weights").clone()
        assert torch.equal(before, learn(trainer)) and trainer.engine.name == name


def test_weights_that_come_later_are_refused():
    trainer = make_trainer()
    trainer.evaluate()
    trainer.policy.decoder = models.Decoder(16, trainer.vecenv.single_action_space)
    with pytest.raises(RuntimeError, match=r"decoder.* would not be trained"):
        trainer.evaluate()
    trainer.release()


def test_an_edit_while_it_trains_is_seen(capsys):
    trainer = make_trainer()
    for change in (lambda: None, lambda: hooked(trainer.policy)):
        change()
        trainer.evaluate()
        trainer.train()
    assert trainer.engine.name == "autograd" and "encoder has hooks" in capsys.readouterr().err
    learn(trainer)


def test_a_checkpoint_is_compared_anew(tmp_path, capsys, monkeypatch):
    """A clamp beyond 30 times the weights of a new network shows at those of a trained one."""
    split = models.Decoder.split

    def far(self, outputs):
        return split(self, outputs.clamp(-20, 20))

    monkeypatch.setattr(engines, "AT", (1.0,))
    monkeypatch.setattr(models.Decoder, "split", far)
    monkeypatch.setitem(engines.OWN[models.Decoder], "split", far)
    trainer = make_trainer()
    assert trainer.engine.name == "compiled"
    with torch.no_grad():
        trainer.arena.flat("weights").mul_(100)
    trainer.save_checkpoint(tmp_path / "large.pt")
    trainer.release()
    trainer = make_trainer()
    trainer.load_checkpoint(tmp_path / "large.pt")
    assert trainer.engine.name == "autograd" and "would differ" in capsys.readouterr().err
    learn(trainer)


@pytest.mark.parametrize(("settings", "text"), [
    ({"engine": "fused"}, "there are compiled and autograd"),
    ({"engine": "compiled", "kind": Tripled}, "Tripled is not models.MinGRUPolicy"),
    ({"compile": True}, "train.compile"),
])
def test_an_engine_that_cannot_run_this_is_refused(settings, text):
    with pytest.raises(configuration.ConfigError, match=text):
        make_trainer(**settings)


def test_a_minibatch_goes_through_in_parts_of_equal_size(monkeypatch):
    """They add up to the whole minibatch; a batch norm gets all of it, and
    so does who asks for it."""
    whole = learn(make_trainer(engine="autograd"))
    monkeypatch.setattr(engines, "PASS", 3 * 8 * 48)  # three segments; hgp is 48 wide
    trainer = make_trainer(engine="autograd")
    assert trainer.engine.at_once == 3 * 8, "8 segments: 3, 3 and 2"
    torch.testing.assert_close(learn(trainer), whole, atol=2e-4, rtol=1e-3)
    for change, settings in ((lambda policy: setattr(policy, "norm", nn.BatchNorm1d(4)), {}),
                             (lambda policy: None, {"max_minibatch_size": 64})):
        trainer = make_trainer(change, engine="autograd", **settings)
        assert trainer.engine.at_once == 64
        trainer.release()


class Leaves(models.FeedForward):
    """A network whose forward may leave something behind, as if models.py had been edited."""

    __module__ = "models"

    left = ""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("passes", torch.zeros(()))
        self.count, self.seen, self.last = 0, [], {"x": None}

    def forward(self, observations, state=None):
        if self.left == "attribute":
            self.count += 1
        elif self.left == "list":
            self.seen.append(len(observations))
        elif self.left == "dict":
            self.last["x"] = observations
        elif self.left == "buffer":
            self.passes += 1
        elif self.left == "random":
            observations = observations + torch.rand(()) / 10
        return super().forward(observations, state)


def leaving(left, threads, hook=False):
    """(the trainer of a Leaves after an epoch, its weights)."""
    torch.manual_seed(0)
    vecenv = vector.make("squared", num_envs=8, seed=1, num_threads=threads)
    policy = Leaves(vecenv, 16)
    policy.left = left
    if hook:
        next(policy.parameters()).register_post_accumulate_grad_hook(lambda weight: None)
    settings = {"horizon": 8, "minibatch_size": 32, "data_dir": None, "log_interval": 1e9, "learning_rate": 0.01,
                "total_timesteps": 10**5}
    trainer = pufferl.PuffeRL(settings, vecenv, policy)
    assert trainer.engine.name == "autograd" and trainer.engine.num_learners == (1 if hook else threads)
    return trainer, learn(trainer, 1)


@pytest.mark.parametrize("left", ["attribute", "list", "dict", "buffer", "random", "hook", ""])
def test_threads_share_a_network_whose_forward_leaves_nothing_behind(left):
    """Another one has one learner, which gives the same bits as one thread does."""
    trainer, weights = leaving(left, 2, hook=left == "hook")
    assert trainer.engine.num_learners == (1 if left else 2)
    one, expected = leaving(left, 1)
    if left:
        assert torch.equal(weights, expected)
    else:
        torch.testing.assert_close(weights, expected, atol=2e-4, rtol=1e-3)
        assert torch.equal(leaving(left, 2)[1], weights), "sums have one order"
    if left == "buffer":
        assert trainer.policy.passes == one.policy.passes > 0, "the trial is not counted"


def by_autograd(kind=models.FeedForward, change=lambda policy: None, threads=2, **settings):
    """A trainer of a small network that was changed first."""
    torch.manual_seed(0)
    vecenv = vector.make("squared", num_envs=8, seed=1, num_threads=threads, num_buffers=2)
    policy = kind(vecenv, 16)
    change(policy)
    settings |= {"horizon": 8, "minibatch_size": 32, "data_dir": None, "engine": "autograd", "total_timesteps": 10**5}
    return pufferl.PuffeRL(settings, vecenv, policy)


def test_one_thread_learns_what_is_not_thread_safe():
    """A forward of one's own, a hook, dropout, and all that train.max_minibatch_size bounds."""
    class Own(models.FeedForward):
        pass

    def learners(change=lambda policy: None, kind=models.FeedForward, **settings):
        trainer = by_autograd(kind, change, **settings)
        trainer.evaluate()
        trainer.train()
        change(trainer.policy)  # later, too
        trainer.evaluate()
        trainer.train()
        trainer.release()
        return trainer.engine.num_learners

    assert learners() == 2
    assert learners(kind=Own) == learners(max_minibatch_size=16) == 1
    assert learners(lambda policy: setattr(policy, "drop", nn.Dropout(0.1))) == 1
    assert learners(lambda policy: policy.encoder[0].register_forward_hook(lambda *_: None)) == 1
    assert learners(lambda policy: next(policy.parameters()).register_hook(lambda grad: grad)) == 1
    assert learners(lambda policy: policy.encoder.requires_grad_(False)) == 2
    Own.thread_safe = True
    assert learners(kind=Own) == 2
    assert learners(lambda policy: policy.register_forward_hook(lambda *_: None), kind=Own) == 1


class Inward(models.FeedForward):
    """It keeps its memory in itself."""

    def encode_observations(self, observations, state=None):
        x = super().encode_observations(observations)
        kept = getattr(self, "kept", x.detach() * 0)
        self.kept = (x + (kept if kept.shape == x.shape else kept.mean() + 1)).detach()
        return self.kept + x


@pytest.mark.parametrize("gain", [0.01, 1.0])
@pytest.mark.parametrize("kind, said", [(Inward, True), (models.FeedForward, False), (models.MinGRUPolicy, False)])
def test_a_network_that_learns_otherwise_than_it_acts_is_named(kind, said, gain, capsys):
    """Also if the first logits are so small that each action is equally likely."""
    trainer = by_autograd(kind, lambda policy: nn.init.orthogonal_(policy.decoder.weight.data[:-1], gain))
    for _ in range(2):
        trainer.evaluate()
        trainer.train()
    trainer.release()
    assert capsys.readouterr().err.count("does not learn what it does: before the first update") == said


class Detached(models.FeedForward):
    @torch.no_grad()
    def forward(self, observations, state=None):
        return super().forward(observations, state)


class DetachedLogits(models.FeedForward):
    def decode_actions(self, hidden):
        logits, value = super().decode_actions(hidden)
        return logits.detach(), value


class DetachedValue(models.FeedForward):
    def decode_actions(self, hidden):
        logits, value = super().decode_actions(hidden)
        return logits, value.detach()


class Softmax(models.FeedForward):
    """Probabilities in the place of logits."""

    def decode_actions(self, hidden):
        logits, value = super().decode_actions(hidden)
        return logits.softmax(-1), value


@pytest.mark.parametrize("kind, said", [(Softmax, True), (models.FeedForward, False)])
def test_probabilities_in_the_place_of_logits_are_said(kind, said):
    trainer = by_autograd(kind)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.evaluate()
            trainer.train()
    trainer.release()
    assert ["Softmax returns probabilities, but logits" in str(one.message) for one in found] == [True] * said


def test_what_counts_as_probabilities():
    logits = torch.randn(5, 3, 8)
    parts = [head.softmax(-1) for head in logits[..., :7].split((4, 1, 2), -1)]
    assert models.are_probabilities(torch.cat((*parts, logits[..., 7:]), -1), (4, 1, 2))
    assert not models.are_probabilities(torch.cat((*parts, logits[..., 7:]), -1), (5, 2))
    assert not models.are_probabilities(logits, (4, 1, 2))
    assert not models.are_probabilities(torch.ones(4, 2), (1,))  # a single choice says nothing


def test_what_a_minibatch_lacks_is_said_with_what_it_has():
    trainer = make_trainer(loss=lambda minibatch: minibatch.rewards.mean())
    trainer.evaluate()
    with pytest.raises(AttributeError, match=r"has no rewards; it has observations, logits, .*returns"):
        trainer.train()
    trainer.release()


def test_frozen_parts_are_not_told_as_detached():
    """A value that learns first, alone."""
    trainer = by_autograd(DetachedLogits)
    trainer.policy.decoder.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no gradient leads")
        trainer.evaluate()
        trainer.train()
    trainer.release()


@pytest.mark.parametrize("kind, words", [
    (Detached, "nothing is learnt, because no gradient leads from its outputs back"),
    (DetachedLogits, "the policy is not learnt, because no gradient leads from the logits back"),
    (DetachedValue, "the value is not learnt, because no gradient leads from it back")])
def test_a_network_without_a_gradient_is_said(kind, words):
    trainer = by_autograd(kind)
    trainer.evaluate()
    with pytest.warns(UserWarning, match=words):
        trainer.train()
    trainer.release()


@pytest.mark.parametrize("safe", [False, True])
def test_a_run_says_that_one_thread_learns(safe, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"import models\nclass Mine(models.FeedForward):\n    thread_safe = {safe}\n")
    options = ["--policy.name", f"{tmp_path}/mine.py:Mine", "--rnn.name", "none", "--vec.num-threads", "2",
               "--train.total-timesteps", "1024", "--env.num-envs", "16", "--train.minibatch-size", "256",
               "--data-dir", "none"]
    pufferl.main(["train", "squared", *options])
    assert ("write thread_safe = True into Mine" in capsys.readouterr().out) != safe


def acting(kind=models.FeedForward, between=lambda policy: None, workers=2):
    """(the engine after two rollouts, between which something was done to the network; its actions and values)."""
    trainer = by_autograd(kind, threads=workers)
    trainer.evaluate()
    between(trainer.policy)
    trainer.evaluate()
    engine = trainer.engine
    trainer.release()
    return engine, torch.cat([engine.storage["actions"].float().flatten(), engine.values.flatten()])


class FromOne(models.FeedForward):
    """It refuses what no environment gives, and keeps a function."""

    thread_safe = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.activation = torch.tanh

    def encode_observations(self, observations, state=None):
        assert observations.flatten(1).any(-1).all(), "squared shows where the agent is"
        return self.activation(super().encode_observations(observations))


class Normed(models.FeedForward):
    """Threads would write its moments at once."""

    thread_safe = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.encoder.append(nn.BatchNorm1d(16))
        self.eval()


class Counts(models.FeedForward):
    """It says more than it keeps."""

    thread_safe, count = True, 0

    def encode_observations(self, observations, state=None):
        self.count += 1
        return super().encode_observations(observations)


def test_workers_act_side_by_side():
    """Each with buffers of its own, if the network may be run so; the results are those of one thread."""
    _, expected = acting(workers=1)
    both, step = threading.Barrier(2, timeout=60), engines.Acting.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines.Acting, "step", lambda *arguments: (both.wait(), step(*arguments)))
        engine, found = acting()
    assert engine.side_by_side and torch.equal(found, expected)
    hooked, found = acting(between=lambda policy: policy.register_forward_hook(lambda *_: None))
    assert not hooked.side_by_side and torch.equal(found, expected)
    counted, found = acting(kind=Counts)
    assert not counted.side_by_side and torch.equal(found, expected)
    assert acting(kind=FromOne)[0].side_by_side
    assert not acting(kind=Normed)[0].side_by_side


def test_only_who_could_say_thread_safe_is_told_to():
    def held_back(*how):
        trainer = by_autograd(*how)
        trainer.release()
        return list(trainer.engine.held_back)

    class Own(models.FeedForward):
        operations = "not a number"

    assert held_back(Own) == ["Own"] and held_back(FromOne) == held_back(models.FeedForward) == []
    assert held_back(Own, lambda policy: policy.register_forward_hook(lambda *_: None)) == []
    policy = models.FeedForward(vector.make("squared", num_envs=2), 16)
    policy.initial_state = lambda agents: {}  # a method that its class has not
    assert engines.edited(policy, "compiled") and not engines.thread_safe(policy)
    with FlopCounterMode(display=False):
        assert not engines.thread_safe(models.FeedForward(vector.make("squared", num_envs=2), 16))


def test_learners_learn_side_by_side(monkeypatch):
    both, learn_part = threading.Barrier(2, timeout=60), engines.Autograd._learn_part

    def wait_and_learn(*arguments):
        both.wait()
        learn_part(*arguments)

    monkeypatch.setattr(engines.Autograd, "_learn_part", wait_and_learn)
    leaving("", 2)


def own_network(threads, change=lambda policy: None):
    """(the weights after an epoch, torch's threads in each of the network's maps by fast/tile.c)."""
    torch.manual_seed(0)
    vecenv = vector.make("cartpole", num_envs=512, seed=1, num_threads=threads)
    policy, seen, multiply = models.FeedForward(vecenv, 128), [], products.multiply
    change(policy)
    settings = {"horizon": 8, "minibatch_size": 4096, "data_dir": None, "log_interval": 1e9, "learning_rate": 0.01,
                "total_timesteps": 10**5, "engine": "autograd"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "multiply", lambda *tensors: seen.append(torch.get_num_threads()) or multiply(*tensors))
        return learn(pufferl.PuffeRL(settings, vecenv, policy), 1), seen


def test_the_linear_maps_of_ones_own_network_go_through_tile_c(monkeypatch):
    """With more threads only if torch multiplies by no other matrix: its threads spin on the cores."""
    weights, seen = own_network(2)
    steps = 9  # of the horizon, and one that only gives values; the middle map is large enough
    assert len(seen) >= steps + 2 and set(seen) == {1}

    def picture(policy):
        policy.convolution = nn.Conv1d(2, 2, 2)

    assert own_network(1, picture)[1] and not own_network(2, picture)[1]
    monkeypatch.setattr(products, "missing", lambda: "no compiler")
    expected, seen = own_network(2)
    assert not seen
    torch.testing.assert_close(weights, expected, atol=2e-4, rtol=1e-3)


LOSS = """
def extra(minibatch):
    value = (minibatch.values * (minibatch.valid != 0)).mean()
    assert minibatch.logits.shape[:2] == minibatch.values.shape == minibatch.advantages.shape
    return 100 * value
"""


def test_a_loss_term_of_ones_own(tmp_path, capsys):
    (tmp_path / "my_file.py").write_text(LOSS)
    trainer = make_trainer(loss=f"{tmp_path}/my_file.py:extra", minibatch_size=128,
                           max_minibatch_size=32, replay_ratio=1.0)
    assert "train.loss needs its derivative" in capsys.readouterr().err
    values = []
    for _ in range(30):
        trainer.evaluate()
        logs = trainer.train()
        values.append(trainer.buffers.values.mean().item())
        assert logs["own_extra_loss"] == pytest.approx(100 * trainer.buffers.new_values.mean().item(),
                                                       rel=1e-3, abs=1e-3)
    assert values[-1] < values[0] - 0.5, "values go where the term takes them"
    trainer.release()
    trainer = make_trainer(loss=f"{tmp_path}/my_file.py:extra")
    assert trainer.engine.at_once == 64, (
        "a term of one's own may take moments of the whole minibatch")
    trainer.release()


@pytest.mark.parametrize("value, said", [
    ("mb.values.sum() * float('nan')", "train.loss not finite (your own function returned it)"),
    ("(mb.values * 0).sum() ** 0.5", "gradients not finite .*mend the derivative of train.loss")])
def test_a_loss_term_of_ones_own_is_named_if_it_is_not_finite(tmp_path, value, said):
    (tmp_path / "my_file.py").write_text(f"def extra(mb):\n    return {value}\n")
    trainer = make_trainer(loss=f"{tmp_path}/my_file.py:extra")
    trainer.evaluate()
    with pytest.raises(FloatingPointError, match=said.replace("(your", r"\(your").replace("it)", r"it\)")):
        trainer.train()
    trainer.release()


def test_a_loss_term_without_a_gradient_is_named(tmp_path):
    (tmp_path / "my_file.py").write_text("def extra(mb):\n    return mb.advantages.abs().mean()\n")
    trainer = make_trainer(loss=f"{tmp_path}/my_file.py:extra")
    trainer.evaluate()
    with pytest.warns(UserWarning, match="does not depend on the network's outputs"):
        trainer.train()
    trainer.release()


def test_a_loss_term_of_ones_own_sees_the_samples_that_a_tanh_squashes():
    """So that what it makes of them by the network's Normal are the
    log-probabilities that it is given."""
    seen = []

    def extra(minibatch):
        seen.append((minibatch.logits.log_prob(minibatch.actions).sum(-1).detach(),
                     minibatch.logprobs.clone()))
        return minibatch.values.sum() * 0

    trainer = make_trainer(squashed, env="pendulum", loss=extra)
    learn(trainer, 1)
    torch.testing.assert_close(*seen[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("setting", ["loss", "optimizer"])
def test_a_file_that_is_not_there_is_named(setting):
    with pytest.raises(configuration.ConfigError,
                       match=rf"train.{setting} = missing.py:name: .* a file that exists"):
        make_trainer(**{setting: "missing.py:name"})


def test_an_object_of_ones_own_may_be_given_itself(tmp_path):
    """A script holds the class or the function already; config.json says where it is from."""

    def push(minibatch):
        return 100 * minibatch.values.mean()

    (tmp_path / "my_file.py").write_text("import torch\nclass SGD(torch.optim.SGD): ...\n"
                                         "def push(minibatch):\n    return 100 * "
                                         "minibatch.values.mean()\n")
    given = make_trainer(optimizer=torch.optim.SGD, loss=push, learning_rate=0.01)
    assert given.args["train"]["optimizer"] == "torch.optim.sgd.SGD"
    assert given.args["train"]["loss"].endswith("test_an_object_of_ones_own_may_be_given_itself.<locals>.push")
    weights, extra = learn(given), given.losses["own_push_loss"]
    by_file = make_trainer(optimizer=f"{tmp_path}/my_file.py:SGD",
                           loss=f"{tmp_path}/my_file.py:push",
                           learning_rate=0.01)
    assert torch.equal(weights, learn(by_file)) and extra == by_file.losses["own_push_loss"]
    trainer = make_trainer(optimizer=torch.optim.SGD, loss=push, learning_rate=0.01)
    trainer.evaluate()
    trainer.train()
    trainer.save_checkpoint(tmp_path / "state.pt")
    again = make_trainer(optimizer=torch.optim.SGD, loss=push, learning_rate=0.01)
    again.load_checkpoint(tmp_path / "state.pt")
    assert torch.equal(learn(again), learn(trainer))


def test_a_run_with_an_object_of_ones_own_says_how_it_is_resumed():
    for setting in ("optimizer", "loss"):
        with pytest.raises(configuration.ConfigError,
                           match=rf"train.{setting} = .?torch\.optim\.sgd.*resumed by its"):
            make_trainer(**{setting: "torch.optim.sgd.SGD"})


WRONG = """
import functools, torch
def make(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr)
class NoRate(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
number = 3
"""


def test_weight_decay_needs_an_optimizer_that_takes_it(tmp_path):
    (tmp_path / "plain.py").write_text(OPTIMIZER + """
class Kw(torch.optim.AdamW):
    def __init__(self, parameters, lr, **others):
        super().__init__(parameters, lr=lr, **others)
""")
    trainer = make_trainer(optimizer=f"{tmp_path}/plain.py:Kw", weight_decay=0.25)
    assert trainer.optimizer.optimizer.param_groups[0]["weight_decay"] == 0.25
    trainer.release()
    with pytest.raises(configuration.ConfigError, match=r"is for an optimizer that takes it, and MyOptimizer does not"):
        make_trainer(optimizer=f"{tmp_path}/plain.py:MyOptimizer", weight_decay=0.1)


@pytest.mark.parametrize(("setting", "name", "text"), [
    ("optimizer", "make", r"must be a class of torch.optim.Optimizer's kind, it is a function"),
    ("optimizer", "number", r"must be a class of torch.optim.Optimizer's kind, it is a int"),
    ("optimizer", "NoRate", r"takes no lr"), ("loss", "number", r"must be a function"),
    ("optimizer", "Mke", r"has no Mke; it has make, NoRate"),
])
def test_what_is_no_optimizer_or_loss_is_named(tmp_path, setting, name, text):
    (tmp_path / "wrong.py").write_text(WRONG)
    with pytest.raises(configuration.ConfigError, match=rf"train.{setting} = .*{text}"):
        make_trainer(**{setting: f"{tmp_path}/wrong.py:{name}"})


OPTIMIZER = """
import torch
class MyOptimizer(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, momentum=0.9)
"""


ODD = """
import torch
class Base(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
class Zeroes(Base):
    def step(self):
        super().step()
        self.zero_grad()
class Centres(Base):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad - 0.0
        super().step()
class Replaces(Base):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.param_groups[0]["lr"] * p.grad
class LBFGS(torch.optim.LBFGS): ...
"""


def test_an_optimizer_may_write_weights_and_gradients_as_it_likes(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    weights = {kind: learn(make_trainer(optimizer=f"{tmp_path}/odd.py:{kind}", learning_rate=0.1))
               for kind in ("Base", "Zeroes", "Centres", "Replaces")}
    assert not torch.equal(weights["Base"], learn(make_trainer(), 0))
    for kind, trained in weights.items():
        torch.testing.assert_close(trained, weights["Base"], msg=kind)
    with pytest.raises(configuration.ConfigError, match="without a closure"):
        make_trainer(optimizer=f"{tmp_path}/odd.py:LBFGS")


def test_an_optimizer_of_ones_own_and_its_state_resumes(tmp_path):
    (tmp_path / "my_file.py").write_text(OPTIMIZER)
    own = {"optimizer": f"{tmp_path}/my_file.py:MyOptimizer", "learning_rate": 0.01}
    trainer = make_trainer(**own)
    for _ in range(2):
        trainer.evaluate()
        trainer.train()
    assert trainer.engine.name == "compiled" and trainer.optimizer.optimizer.state
    trainer.save_checkpoint(tmp_path / "state.pt")
    again = make_trainer(**own)
    again.load_checkpoint(tmp_path / "state.pt")
    assert torch.equal(learn(again), learn(trainer))
    with pytest.raises(configuration.ConfigError, match="cannot be changed at resume"):
        make_trainer().load_checkpoint(tmp_path / "state.pt")


TRAIN = ["train", "cartpole", "--env.num-envs", "64", "--train.total-timesteps", "30000",
         "--logger", "none"]


def assert_trains_without(done):
    assert done.returncode == 0, done.stderr
    assert "engine autograd" in done.stdout and "there is no fast/compiled.py" in done.stderr


def test_the_trainer_does_without_the_fast_engines(tmp_path):
    code = ("import sys; sys.modules |= dict.fromkeys(('fast.compiled', 'fast.fused'))\n"
            f"import pufferl; pufferl.main({[*TRAIN, '--data-dir', str(tmp_path)]})")
    assert_trains_without(subprocess.run([sys.executable, "-c", code], cwd=ROOT,
                                         capture_output=True, text=True))


@pytest.mark.slow  # everything is compiled anew
def test_the_fast_engines_can_be_deleted(tmp_path):
    """A fork that does not want them drops them, and trains."""
    copy = tmp_path / "fork"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "tests", "docs", "experiments", "compiled.py", "fused.py", "tile.c"))
    code = ("import os, sys\n"  # `make` puts a checkout on the import path, where the fork would find them
            "sys.path = [folder for folder in sys.path if not os.path.exists(folder + '/fast/compiled.py')]\n"
            f"import pufferl; pufferl.main({[*TRAIN, '--data-dir', str(tmp_path)]})")
    assert_trains_without(subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True))
