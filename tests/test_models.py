"""The networks: recurrent wrappers, boards and pictures, and the faults of a custom network."""

import copy
import json
import re
import shutil
import warnings

import numpy as np
import pytest
import test_devices
import torch
from gymnasium import spaces
from small_envs import declares
from trainers import NETWORKS, learn, make_trainer, run_epochs

import configuration
import flat_spaces
import models
import pufferl
from errors import ConfigError, NetworkError, error_text
from fast import pictures
from tools import history
from tools.sweep import command as sweep

DISCRETE = spaces.Discrete(3)
MULTI = spaces.MultiDiscrete([2, 3])
BOX = spaces.Box(-1, 1, (2,), np.float32)


def environment(action_space=DISCRETE, inputs=5):
    return declares(spaces.Box(-9, 9, (inputs,), np.float32), action_space)


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


def segment(T=11, N=6, inputs=5):
    """(observations, resets, valid) with resets and steps that are not valid inside."""
    generator = torch.Generator().manual_seed(1)
    flags = [(torch.rand(T, N, generator=generator) < p).to(torch.uint8) for p in (0.2, 0.8)]
    return torch.randn(T, N, inputs, generator=generator), *flags


def over_time(policy, observations, state, resets, valid):
    """outputs (T, N, A + 1), and the state after them."""
    state = {**state, "resets": resets, "valid": valid}
    outputs, _ = models.join_outputs(*policy(observations, state))
    return outputs, state


def test_a_forward_without_a_truth_value_replaces_the_policys():
    """As the module that torch.compile returns, whose len() raises."""
    policy = models.FeedForward(environment())
    observations = segment()[0]

    class Compiled:
        __call__ = staticmethod(policy)

        def __len__(self):
            raise TypeError("no len()")

    torch.testing.assert_close(models.over_time(policy, observations, {}, Compiled()),
                               models.over_time(policy, observations, {}))


def step_by_step(policy, observations, state, resets, valid):
    state, outputs = dict(state), []
    for t in range(len(observations)):
        state |= {"resets": resets[t], "valid": valid[t]}
        outputs.append(models.join_outputs(*policy.forward_eval(observations[t], state))[0])
    return torch.stack(outputs), state


# -- recurrent layers

WRAPPERS = {"lstm": models.LSTMWrapper, "gru": models.GRUWrapper, "mingru": models.MinGRUWrapper}


def wrapped(kind, space=DISCRETE):
    torch.manual_seed(0)
    env = environment(space)
    return WRAPPERS[kind](env, models.FeedForward(env, hidden_size=16), hidden_size=16, num_layers=2)


@pytest.mark.parametrize("given", [dict, lambda: {"lstm_h": None, "lstm_c": None},
                                   lambda: {name: torch.zeros(6, 16) for name in ("lstm_h", "lstm_c")}])
def test_a_step_takes_states_of_pufferlib(given):
    env = environment()
    policy = models.LSTMWrapper(env, models.FeedForward(env, hidden_size=16), hidden_size=16)
    state, flat = policy.initial_state(6), given()
    for step in torch.randn(2, 6, 5):
        expected, result = policy.forward_eval(step, state), policy.forward_eval(step, flat)
        torch.testing.assert_close(result, expected)
    assert all(torch.equal(flat[name].view(1, 6, 16), state[name]) for name in state)
    assert all(tensor.dim() == (2 if given() and given()["lstm_h"] is not None else 3) for tensor in flat.values())


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX], ids=["discrete", "multidiscrete", "box"])
def test_wrappers_step_reset_and_hold(kind, space):
    """Over time as step by step; a reset begins again; a step that is not valid changes nothing."""
    policy = wrapped(kind, space)
    observations, resets, valid = segment()
    state = {name: tensor.normal_() for name, tensor in policy.initial_state(6).items()}
    outputs, after = over_time(policy, observations, state, resets, valid)
    stepped, after_steps = step_by_step(policy, observations, state, resets, valid)
    torch.testing.assert_close(stepped, outputs, atol=1e-5, rtol=1e-4)
    for name in state:
        torch.testing.assert_close(after_steps[name], after[name], atol=1e-5, rtol=1e-4)

    fresh, late, none, all_valid = policy.initial_state(6), resets * 0, resets * 0, valid * 0 + 1
    late[5] = 1
    whole, _ = over_time(policy, observations, fresh, late, all_valid)
    begun, _ = over_time(policy, observations[5:], fresh, none[5:], all_valid[5:])
    torch.testing.assert_close(whole[5:], begun, atol=1e-5, rtol=1e-4)

    others, held = [t for t in range(len(observations)) if t != 3], all_valid.clone()
    held[3] = 0
    whole, _ = over_time(policy, observations, fresh, none, held)
    without, _ = over_time(policy, observations[others], fresh, none[others], held[others])
    torch.testing.assert_close(whole[others], without, atol=1e-5, rtol=1e-4)


def test_gradients_go_through_the_fused_scan_twice():
    """The scan's gradient consumes what the forward pass left for it."""
    gru, (_, resets, valid) = models.MinGRU(16, 2), segment()
    out, _ = gru(torch.randn(11, 6, 16), torch.randn(2, 6, 16), resets, valid)
    weights, grad = [*gru.parameters()], torch.randn_like(out)
    first = torch.autograd.grad(out, weights, grad, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, weights, grad)))


class Wide(models.FeedForward):
    """Autocast does not round what it encodes."""

    def encode_observations(self, observations, state=None):
        return super().encode_observations(observations).float()


def picture(vecenv, hidden_size):
    """A network with a LayerNorm, which autocast keeps in float32 on a GPU."""
    return models.MultiInputPolicy(vecenv, hidden_size)


@pytest.mark.parametrize("device", ["cpu", "recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "network"), [
    ("mingru", Wide), ("mingru", picture), ("lstm", models.FeedForward), ("lstm", picture), ("gru", Wide)])
def test_a_memory_takes_what_autocast_gives_it(kind, network, device, monkeypatch):
    """In bfloat16, over time and step by step: near float32, with gradients."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if device == "recorder":
        test_devices.install(monkeypatch, test_devices.on_a_cpu)
        device = "cpu"
    torch.manual_seed(0)
    vecenv = declares(image(3, 32, 32)) if network is picture else environment()
    policy = WRAPPERS[kind](vecenv, network(vecenv, 32), hidden_size=32, num_layers=2).to(device)
    observations, resets, valid = segment(T=5, N=4)
    if network is picture:
        observations = torch.randint(0, 256, (5, 4, 3, 32, 32), dtype=torch.uint8)
    arrays, results = [tensor.to(device) for tensor in (observations, resets, valid)], []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            state = policy.initial_state(4)
            whole, _ = over_time(policy, arrays[0], state, *arrays[1:])
            with torch.no_grad():
                steps, _ = step_by_step(policy, arrays[0], state, *arrays[1:])
        policy.zero_grad()
        whole.float().square().sum().backward()
        results.append((whole.float(), *(parameter.grad.clone() for parameter in policy.parameters())))
        torch.testing.assert_close(steps.float(), whole.float(), atol=0.01, rtol=0.05)
    for name, exact, near in zip(["outputs", *dict(policy.named_parameters())], *results, strict=True):
        assert torch.cosine_similarity(exact.flatten(), near.flatten(), dim=0) > 0.98, name


# -- networks without memory, boards and pictures


def board(actions, shape=(3, 6, 7)):
    return models.Board(declares(spaces.Box(0, 1, shape, np.uint8), spaces.Discrete(actions)), hidden_size=8)


FORMS = {  # name -> (the network, the shape of an observation, the highest byte)
    "feed-forward": (lambda: models.FeedForward(environment(), 16), (5,), 9),
    **{f"board {actions}": (lambda actions=actions: board(actions), (3, 6, 7), 1) for actions in (42, 43, 45, 7)},
    **{f"impala {shape}": (lambda shape=shape: models.Impala(declares(image(*shape)), 32), shape, high)
       for shape, high in (((4, 40, 40), 255), ((36, 32, 3), 255), ((7, 7, 3), 10))},
}


@pytest.mark.parametrize("name", FORMS)
def test_forward_equals_forward_eval_and_every_weight_learns(name):
    torch.manual_seed(0)
    make, shape, high = FORMS[name]
    policy, observations = make(), torch.randint(0, high + 1, (2, 2, *shape), dtype=torch.uint8)
    logits, value = policy(observations)
    assert logits.shape[:2] == (2, 2) and value.shape == (2, 2, 1)
    assert logits.softmax(-1).amax() < 1.5 / logits.shape[-1], "the first policy is near uniform"
    for t in range(2):
        torch.testing.assert_close(policy.forward_eval(observations[t]), (logits[t], value[t]), atol=1e-5, rtol=1e-4)
    if "board" not in name:  # which takes (T, N, ...) only
        torch.testing.assert_close(policy(observations[1]), (logits[1], value[1]), atol=1e-5, rtol=1e-4)
    # a softmax has no gradient of a bias that all cells share
    (logits.square().sum() + value.sum()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.parameters())


@pytest.mark.parametrize("space", [MULTI, BOX], ids=["multidiscrete", "box"])
def test_separate_shares_no_weight_between_policy_and_value(space):
    policy = models.Separate(environment(space), hidden_size=16)
    outputs, log_std = models.join_outputs(*policy(torch.randn(50, 5)))
    assert outputs.shape == (50, 3 if space is BOX else 6) and (log_std is not None) == (space is BOX)
    for part, weights, others in ((outputs[:, :-1], policy.actor, policy.critic),
                                  (outputs[:, -1:], policy.critic, policy.actor)):
        policy.zero_grad()
        part.square().sum().backward(retain_graph=True)
        assert all(weight.grad.abs().sum() > 0 for weight in weights.parameters())
        assert all(weight.grad is None or not weight.grad.any() for weight in others.parameters())


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX], ids=["discrete", "multidiscrete", "box"])
def test_sampling_returns_the_log_probability_of_its_actions(space):
    logits, value = models.FeedForward(environment(space), hidden_size=16).forward_eval(torch.randn(500, 5))
    actions, logprobs, values = models.sample_logits(logits, value, seed=1, step=0)
    torch.testing.assert_close(values, value.squeeze(-1))
    expected = models.act(logits, actions[:, 0] if space is DISCRETE else actions)[1]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


def test_board_reads_every_cell_alike():
    """A pattern moved by a cell moves its logits by a cell, where no edge is in sight."""
    pattern = torch.randint(0, 2, (3, 3, 3), dtype=torch.uint8)
    planes = torch.zeros(2, 3, 10, 10, dtype=torch.uint8)
    planes[0, :, 3:6, 3:6] = planes[1, :, 4:7, 3:6] = pattern
    first, second = board(100, (3, 10, 10)).forward_eval(planes)[0].view(2, 10, 10)
    torch.testing.assert_close(second[4:8, 3:7], first[3:7, 3:7])
    assert (second[4:8] - first[4:8]).abs().max() > 1e-3


@pytest.mark.parametrize(("network", "layout", "shape", "dtype", "high"), [
    (models.MultiInputPolicy, "(H, W)", (40, 48), np.uint8, 255),
    (models.MultiInputPolicy, "(H, W, C)", (40, 48, 3), np.uint16, 65535),
    (models.MultiInputPolicy, "(C, H, W)", (3, 40, 48), np.float32, 1),
    (models.MultiInputPolicy, "(K, H, W, C)", (4, 40, 48, 3), np.uint8, 255),
    (models.MultiInputPolicy, "(K, C, H, W)", (4, 3, 40, 48), np.float64, 255),
    (models.Impala, "(K, H, W, C)", (4, 40, 48, 3), np.float32, 1),
    (models.Impala, "(H, W)", (40, 48), np.uint16, 65535)])
def test_an_image_is_the_same_in_every_layout_and_type(network, layout, shape, dtype, high):
    pixels = np.random.default_rng(0).integers(0, 256, (2, *shape))
    first = np.moveaxis(pixels, -1, -3) if layout.endswith("C)") else pixels
    first = first.reshape(2, -1, 40, 48).astype(np.uint8)
    outputs = []
    for space, x in ((image(*first.shape[1:]), first),
                     (spaces.Box(0, high, shape, dtype), (pixels * (high / 255)).astype(dtype))):
        torch.manual_seed(0)
        policy = network(declares(space), hidden_size=8)
        outputs.append(policy.forward_eval(torch.from_numpy(x)))
    assert layout in models.summarize(policy)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


def test_impala_is_the_network_of_the_paper():
    """15 convolutions of 3 × 3 (Espeholt et al. 2018, figure 3); sides halved thrice, rounded up."""
    torch.manual_seed(0)
    policy = models.Impala(declares(image(72, 96, 3)))
    convolutions = [module for module in policy.modules() if isinstance(module, torch.nn.Conv2d)]
    wanted = [(3, 16), *[(16, 16)] * 4, (16, 32), *[(32, 32)] * 4, (32, 32), *[(32, 32)] * 4]
    assert [(conv.in_channels, conv.out_channels) for conv in convolutions] == wanted
    assert all(conv.kernel_size == (3, 3) and conv.stride == (1, 1) for conv in convolutions)
    assert policy.encoder[0].in_features == 32 * 9 * 12 and policy.encoder[0].out_features == 256
    observations = torch.randint(0, 256, (2, 72, 96, 3), dtype=torch.uint8)
    x, layers = observations.movedim(-1, 1) / 255, iter(convolutions)
    for _ in range(3):
        x = torch.nn.functional.max_pool2d(next(layers)(x), 3, 2, 1)
        for _ in range(2):
            first, second = next(layers), next(layers)
            x = x + second(first(x.relu()).relu())
    torch.testing.assert_close(policy.parts[0](observations), x.relu().flatten(1), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("side", "is_picture"), [(25, False), (28, True)])
def test_what_is_larger_than_a_grid_is_a_picture(side, is_picture):
    """MiniGrid's grids have 25 squares at most."""
    layers = list(models._image_encoder(image(side, side, 3)))
    assert isinstance(layers[0], pictures.BytesConvolution) == is_picture


@pytest.mark.parametrize(("make", "word"), [
    (lambda: models.Separate(declares(spaces.Dict({"a": DISCRETE}))), "separate"),
    (lambda: models.Board(environment()), "board"), (lambda: models.Impala(environment()), "impala"),
    (lambda: models.Board(declares(spaces.Box(0, 1, (3, 6, 7), np.uint8), BOX)), "board"),
    (lambda: models.Normalized(declares(spaces.Dict({"a": DISCRETE})), None), "norm_obs")])
def test_spaces_that_a_network_cannot_read_are_named(make, word):
    with pytest.raises(NetworkError, match=word):
        make()


def test_a_layer_that_is_called_policy_is_no_network_within():
    actor = models.FeedForward(environment())
    actor.policy = torch.nn.Linear(2, 2)
    assert models.inner_policy(actor) is actor


# -- a network of the user's

FILE = """
import numpy as np
import torch
class Net(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        y = self.layer(x)
        return y[:, :2], y[:, 2:]
class NoArgs(Net):
    def __init__(self):
        super().__init__(None)
class Noisy(Net):
    def forward(self, x, state=None):
        y = self.layer(x.flatten(1).float())
        state["hidden"] = y = y + 0.1 * torch.randn_like(y)
        return y[:, :2], y[:, 2:]
def nothing(env):
    return 3
class Deep(torch.nn.Module):
    def __init__(self, env, hidden_size=16, depth=1, rate=0.5, bias=True, what="relu", device=None,
                 num_layers=1, std=np.sqrt(2), scale: float = 1):
        super().__init__()
        self.options = depth, rate, bias, what, num_layers, std, scale
        sizes = [env.single_observation_space.shape[0]] + [hidden_size] * depth
        self.body = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=bias) for a, b in zip(sizes, sizes[1:])))
        self.head = torch.nn.Linear(hidden_size, env.single_action_space.n + 1)
    def forward(self, observations):
        y = self.head(self.body(observations.flatten(1)).relu())
        return y[..., :-1], y[..., -1:]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def train(file, name, *options):
    return pufferl.train("cartpole", configuration.load_config("cartpole", [
        "--env.num-envs", "16", "--train.minibatch-size", "128", "--train.horizon", "16", "--logger", "none",
        "--policy.name", f"{file}:{name}", *options]))


@pytest.mark.parametrize(("name", "rnn", "word"), [
    ("NoArgs", "auto", "env"), ("", "auto", "Deep"), ("nothing", "auto", "int"),
    ("NoArg", "auto", "NoArgs"), ("Net", "lstm", "LSTMWrapper")])
def test_a_network_that_cannot_be_made_is_named_in_a_line(file, name, rnn, word):
    with pytest.raises((ConfigError, NetworkError, TypeError)) as error:
        train(file, name, "--data-dir", "none", "--rnn.name", rnn)
    assert re.search(word, error_text(error.value))


class Faulty(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)


class Returns(Faulty):
    def __init__(self, env, function):
        super().__init__(env)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


class NoValueInAStep(Faulty):
    def forward(self, x, state):
        return self.layer(x), self.layer(x)[..., :1]

    def forward_eval(self, x, state):
        return self.layer(x)


class LostState(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.inside = torch.nn.Linear(4, 8)
        self.lstm, self.out = torch.nn.LSTM(8, 8, batch_first=True), torch.nn.Linear(8, 3)

    def forward(self, x, state=None):
        y = self.out(self.lstm(self.inside(x))[0])
        return y[..., :2], y[..., 2:]

    def forward_eval(self, x, state):
        before = (state["h"], state["c"]) if "h" in state else None
        y, (state["h"], state["c"]) = self.lstm(self.inside(x)[:, None], before)
        y = self.out(y[:, 0])
        return y[:, :2], y[:, 2:]


class BatchFirst(LostState):
    def initial_state(self, agents):
        return {"h": torch.zeros(1, agents, 8), "c": torch.zeros(1, agents, 8)}


class FlatState(LostState):
    def initial_state(self, agents):
        return {"h": torch.zeros(agents, 8), "c": torch.zeros(agents, 8)}


def lazy(env):
    policy = models.FeedForward(env, 8)
    policy.encoder[0] = torch.nn.LazyLinear(8)
    return policy


RETURNED = {
    "three": lambda y: (y, y[:, :1], None),
    "Normal": lambda y: (torch.distributions.Normal(y, 1.0), y[:, :1]),
    "no batch": lambda y: (y[0], y[:, :1]),
    "two values": lambda y: (y, y),
    "distribution": lambda y: (torch.distributions.Categorical(logits=y), y[:, :1]),
}
FAULTS = [*[(name, lambda env, f=function: Returns(env, f), "Returns") for name, function in RETURNED.items()],
          *[(kind.__name__, kind, kind.__name__) for kind in (Faulty, NoValueInAStep)],
          ("float64", lambda env: models.FeedForward(env, 8).double(), "FeedForward"),
          ("BatchFirst", BatchFirst, "batch_first"), ("FlatState", FlatState, "initial_state")]


@pytest.mark.parametrize(("network", "word"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_network_with_a_fault_is_named_in_a_line(network, word):
    with pytest.raises((ConfigError, NetworkError), match=word) as error:
        make_trainer(policy=network).evaluate()
    assert error_text(error.value) == str(error.value)


@pytest.mark.parametrize("normalize", ["false", "true"])
def test_a_network_may_leave_in_the_state_what_nobody_reads(file, normalize):
    """PufferLib 3's form: over batches, with a state that it does not use."""
    trainer = train(file, "Noisy", "--data-dir", "none", "--train.total-timesteps", "6000",
                    "--train.norm-obs", normalize)
    assert (type(trainer.policy) is models.Normalized) == (normalize == "true")
    assert normalize == "false" or trainer.policy.normalizer.count > 0
    assert trainer.losses["grad_norm"] > 0


def test_the_form_of_a_network_is_found_without_a_trace():
    class OldStyle(models.FeedForward):
        """As PufferLib 3's: a state that it does not use; a norm and a dropout."""

        def __init__(self, env):
            super().__init__(env, 8)
            self.norm, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)

        def forward(self, observations, state=None):
            return self.decode_actions(self.drop(self.norm(self.encode_observations(observations))))

    env = environment()
    policy = OldStyle(env)
    policy.drop.eval()
    before, random = copy.deepcopy(policy.state_dict()), torch.get_rng_state()
    models.find_form(policy, env.single_observation_space)
    assert policy.takes_batches and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], now) for name, now in policy.state_dict().items())
    assert policy.norm.training and not policy.drop.training


def decoding(function):
    """A FeedForward whose logits and value go through a function."""
    class Decodes(models.FeedForward):
        def decode_actions(self, hidden):
            return function(*super().decode_actions(hidden))

    return lambda env: Decodes(env, 16)


DECODED = {
    "probabilities": lambda logits, value: (logits.softmax(-1), value),
    "noise": lambda logits, value: (logits + torch.rand_like(logits), value),
    "nothing": lambda logits, value: (logits.detach(), value.detach()),
    "logits": lambda logits, value: (logits.detach(), value),
    "value": lambda logits, value: (logits, value.detach()),
}


@pytest.mark.parametrize(("network", "gain", "is_faulty"), [
    *[(decoding(function), 1.0, True) for function in DECODED.values()],
    (decoding(DECODED["noise"]), 0.01, True), (NETWORKS["feed-forward"], 0.01, False),
    (NETWORKS["feed-forward"], 1.0, False), (None, 0.01, False), (None, 1.0, False)])
def test_what_is_wrong_with_a_network_is_said_once(network, gain, is_faulty, capsys):
    """Also if the first logits are so small that each action is equally likely."""
    flat_spaces.warn_once.cache_clear()
    trainer = make_trainer(env="squared", policy=network, num_envs=8, minibatch_size=32, engine="autograd")
    torch.nn.init.orthogonal_(trainer.policy.decoder.weight.data[:-1], gain)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        learn(trainer)
    printed = capsys.readouterr().err.count("network:")
    assert len([one for one in found if "network:" in str(one.message)]) + printed == is_faulty


def test_frozen_parts_are_not_detached():
    """A value that learns first, alone."""
    trainer = make_trainer(policy=decoding(DECODED["logits"]))
    trainer.policy.decoder.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_epochs(trainer, 1)
    trainer.release()


def test_keywords_of_a_custom_network_are_settings(file, tmp_path, monkeypatch):
    name = f"{file}:Deep"
    options = ["--policy.depth", "3", "--policy.bias", "false", "--policy.hidden_size=8", "--policy.num-layers", "2",
               "--policy.std", "1.5", "--policy.scale", "2.5"]
    trainer = train(file, "Deep", *options, "--train.total-timesteps", "512", "--data-dir", str(tmp_path / "runs"))
    folder = str(trainer.run_folder)
    assert trainer.policy.options == (3, 0.5, False, "relu", 2, 1.5, 2.5)
    assert trainer.policy.body[2].in_features == 8 and trainer.args["rnn"]["num_layers"] == 1
    config = trainer.run_folder / "config.json"
    changed = history.changes(json.loads(config.read_text()))
    assert changed["policy.depth"] == 3 and changed["policy.what"] == "relu" and "policy.squash" not in changed
    saved = configuration.load_config("cartpole", ["--load-model-path", folder])["policy"]
    assert (saved["name"], saved["depth"], saved["bias"]) == (name, 3, False)
    resumed = pufferl.train("cartpole", configuration.load_config(
        "cartpole", ["--resume", folder, "--train.total-timesteps", "1024"]))
    assert resumed.policy.options == trainer.policy.options and resumed.global_step == 1024
    options = ["--policy.name", name]
    space = sweep.searched_settings("cartpole", {"policy.depth": {
        "distribution": "int_uniform", "min": 1, "max": 4, "mean": 2, "scale": "auto"}}, options)
    assert list(space) == ["policy.depth"]
    for wrong in ([*options, "--policy.dept", "3"], [*options, "--policy.device", "cpu"],
                  [*options, "--policy.depth", "many"], ["--policy.depth", "3"]):
        with pytest.raises(ConfigError, match=r"depth|device"):
            configuration.load_config("cartpole", wrong)


def test_another_network_than_that_of_an_ini(file, tmp_path, monkeypatch):
    """What only the .ini's own network has goes; what both have stays."""
    shutil.copytree(configuration.ROOT / "config", tmp_path / "config")
    ini = tmp_path / "config/cartpole.ini"
    ini.write_text(ini.read_text().replace("name = default\n", f"name = {file}:Deep\ndepth = 2\n"))
    monkeypatch.setattr(configuration, "ROOT", tmp_path)

    def policy(env, *options):
        return configuration.load_config(env, options)["policy"]

    assert (policy("cartpole")["depth"], policy("cartpole")["hidden_size"]) == (2, 64), "the size is beside its name"
    assert policy("acrobot", "--policy.name", f"{file}:Deep")["hidden_size"] == 16, "that size is for another network"
    plain = policy("cartpole", "--policy.name", "default")
    assert "depth" not in plain and (plain["name"], plain["hidden_size"]) == ("default", 64)
    ini.write_text(ini.read_text().replace("hidden_size = 64\n", ""))
    assert policy("cartpole")["hidden_size"] == 16
    assert policy("cartpole", "--policy.name", "default")["hidden_size"] == 128
