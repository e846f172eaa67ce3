"""The networks: the fused default policy against its torch form, the wrappers,
resets and dead steps."""

import json
import math
import shutil
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import reference
import test_devices
import torch
from conftest import slow_but

import configuration
import kernels
import models
import pufferl
from fast import compiled, fused, pictures
from tools import history
from tools.sweep import command as sweep

# here fused is on a CPU
both = pytest.mark.parametrize("engine", [compiled, fused], ids=["compiled", "fused"])

DISCRETE = gymnasium.spaces.Discrete(3)
MULTI = gymnasium.spaces.MultiDiscrete([2, 3])
BOX = gymnasium.spaces.Box(-1, 1, (2,), np.float32)


def environment(action_space=DISCRETE, inputs=5):
    return SimpleNamespace(
        single_observation_space=gymnasium.spaces.Box(-9, 9, (inputs,), np.float32),
        single_action_space=action_space
    )


def segment(T=11, N=6, inputs=5):
    """(observations, resets, valid) with resets and dead steps inside."""
    generator = torch.Generator().manual_seed(1)
    flags = [(torch.rand(T, N, generator=generator) < p).to(torch.uint8) for p in (0.2, 0.8)]
    return torch.randn(T, N, inputs, generator=generator), *flags


def sample(engine, policy, steps, rows, precision=torch.float32):
    """The engine's network over an arena that has adopted the policy."""
    arena = kernels.Arena()
    arena.adopt(policy)
    network = engine.Sample(policy, arena, steps, rows, precision)
    arena.allocate()
    network.bind()
    return network


@both
@pytest.mark.parametrize("layers", slow_but([1, 2, 3], 2))
def test_bfloat16_is_near_float32(engine, layers):
    """Outputs within the rounding of 8 bits, gradients of the same direction and length, the
    rollout's step alike."""
    torch.manual_seed(0)
    policy = models.MinGRUPolicy(environment(MULTI), hidden_size=64, num_layers=layers)
    with torch.no_grad():
        policy.decoder.weight.mul_(30)
    observations, resets, valid = segment(T=16, N=8)
    initial = torch.randn(layers, 8, 64)
    grad, outputs, gradients, steps = torch.randn(16, 8, policy.decoder.out_features), [], [], []
    for precision in (torch.float32, torch.bfloat16):
        network = sample(engine, policy, 16, 8, precision)
        outputs.append(network.forward(observations, initial, resets, valid).clone())
        network.backward(grad)
        gradients.append({name: parameter.grad.flatten().clone()
                          for name, parameter in policy.named_parameters()})
        steps.append(network.step(observations[0], initial.clone(), resets[0], valid[0]).clone())
    scale = outputs[0].abs().max()
    assert (outputs[1] - outputs[0]).abs().max() < 0.02 * scale and not torch.equal(*outputs)
    assert (steps[1] - outputs[1][0]).abs().max() < 0.01 * scale
    for name, exact in gradients[0].items():
        near = gradients[1][name]
        assert torch.cosine_similarity(exact, near, dim=0) > 0.998, name
        assert (near.norm() / exact.norm() - 1).abs() < 0.02, name


class Wide(models.FeedForward):
    """Autocast does not round what it encodes."""

    def encode_observations(self, observations, state=None):
        return super().encode_observations(observations).float()


def picture(vecenv, hidden_size):
    """A network with a LayerNorm, which autocast keeps in float32 on a GPU."""
    return models.Encoded(vecenv, hidden_size)


PICTURES = SimpleNamespace(single_observation_space=gymnasium.spaces.Box(0, 255, (3, 48, 48), np.uint8),
                           single_action_space=DISCRETE)


@pytest.mark.parametrize("device", ["cpu", "recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("network", [models.FeedForward, Wide, picture], ids=["rounded", "wide", "picture"])
@pytest.mark.parametrize("wrapper", [models.MinGRUWrapper, models.LSTMWrapper, models.GRUWrapper])
def test_a_memory_takes_what_autocast_gives_it(wrapper, network, device, monkeypatch):
    """In bfloat16, over time and step by step: near float32, with gradients."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if device == "recorder":
        test_devices.install(monkeypatch, test_devices.on_a_cpu)
        device = "cpu"
    torch.manual_seed(0)
    vecenv = PICTURES if network is picture else environment()
    policy = wrapper(vecenv, network(vecenv, 32), hidden_size=32, num_layers=2).to(device)
    observations, resets, valid = segment(T=5, N=4)
    if network is picture:
        observations = torch.randint(0, 256, (5, 4, 3, 48, 48), dtype=torch.uint8)
    observations, resets, valid = (tensor.to(device) for tensor in (observations, resets, valid))
    results = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            state = policy.initial_state(4)
            whole, _ = models.join_outputs(*policy(observations, {**state, "resets": resets, "valid": valid}))
            steps = []
            for t in range(5):
                state |= {"resets": resets[t], "valid": valid[t]}
                with torch.no_grad():
                    steps.append(models.join_outputs(*policy.forward_eval(observations[t], state))[0])
        policy.zero_grad()
        whole.float().square().sum().backward()
        results.append((whole.float(), *(parameter.grad.clone() for parameter in policy.parameters())))
        torch.testing.assert_close(torch.stack(steps).float(), whole.float(), atol=0.01, rtol=0.05)
    for name, exact, near in zip(["outputs", *dict(policy.named_parameters())], *results, strict=True):
        assert torch.cosine_similarity(exact.flatten(), near.flatten(), dim=0) > 0.98, name


@both
@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX], ids=["discrete", "multidiscrete", "box"])
@pytest.mark.parametrize("layers, hidden", [(1, 24), (3, 24), (2, 70)])
def test_forward_and_backward_equal_autograd(engine, space, layers, hidden):
    torch.manual_seed(0)
    policy = models.MinGRUPolicy(environment(space), hidden_size=hidden, num_layers=layers)
    observations, resets, valid = segment(N=4)
    network = sample(engine, policy, len(resets), 4)
    initial = torch.randn(layers, 4, hidden)
    found = network.forward(observations, initial, resets, valid)

    outputs, log_std = models.join_outputs(*policy(observations,
                                                   {"mingru": initial, "resets": resets,
                                                    "valid": valid}))
    torch.testing.assert_close(found, outputs, atol=1e-6, rtol=1e-5)

    leaves, grads = [outputs], [torch.randn_like(outputs)]
    if log_std is not None:
        leaves.append(log_std)
        grads.append(torch.randn_like(log_std))
    expected = torch.autograd.grad(leaves, list(policy.parameters()), grads)
    network.backward(*grads)
    for (name, parameter), gradient in zip(policy.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=2e-5, rtol=1e-4,
                                   msg=lambda m, n=name: f"{n}: {m}")


@both
def test_step_equals_the_scan_and_commits_the_state(engine):
    torch.manual_seed(0)
    policy = models.MinGRUPolicy(environment(), hidden_size=24, num_layers=2)
    observations, resets, valid = segment()
    network = sample(engine, policy, len(resets), 8)
    initial = torch.randn(2, 6, 24)
    state = {"mingru": initial.clone(), "resets": resets, "valid": valid}
    expected, _ = models.join_outputs(*policy(observations, state))
    running = initial.clone()
    for t in range(len(observations)):
        outputs = network.step(observations[t], running, resets[t], valid[t])
        torch.testing.assert_close(outputs, expected[t], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(running, state["mingru"], atol=1e-6, rtol=1e-5)


@both
@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.float64])
def test_step_casts_other_observation_types(engine, kind):
    policy = models.MinGRUPolicy(environment(), hidden_size=8)
    network = sample(engine, policy, 1, 4)
    observations = torch.randint(0, 3, (4, 5)).to(kind)
    flags = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    outputs = network.step(observations, torch.zeros(1, 4, 8), *flags)
    expected, _ = models.join_outputs(*policy.forward_eval(observations, policy.initial_state(4)))
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)


def test_plain_mingru_layer_equals_the_reference():
    observations, resets, valid = segment(inputs=7)
    hgp, state = torch.randn(11, 6, 21), torch.randn(6, 7)
    out, final = models.mingru_layer(observations, hgp, state, resets, valid)
    expected, states = reference.mingru_layer(observations.double(), hgp.double(), state.double(),
                                              resets, valid)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(final.double(), states[-1], atol=1e-6, rtol=1e-5)


def wrapped(kind, space=DISCRETE):
    torch.manual_seed(0)
    env = environment(space)
    inner = models.FeedForward(env, hidden_size=16)
    wrapper = {"lstm": models.LSTMWrapper, "gru": models.GRUWrapper,
               "mingru": models.MinGRUWrapper}[kind]
    return wrapper(env, inner, hidden_size=16, num_layers=2)


@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX], ids=["discrete", "multidiscrete", "box"])
def test_wrappers_whole_segment_equals_step_by_step(kind, space):
    policy = wrapped(kind, space)
    observations, resets, valid = segment()
    state = policy.initial_state(6)
    for tensor in state.values():
        tensor.normal_()
    whole = {**{k: v.clone() for k, v in state.items()}, "resets": resets, "valid": valid}
    expected, _ = models.join_outputs(*policy(observations, whole))
    for t in range(len(observations)):
        state |= {"resets": resets[t], "valid": valid[t]}
        outputs, _ = models.join_outputs(*policy.forward_eval(observations[t], state))
        torch.testing.assert_close(outputs, expected[t], atol=1e-5, rtol=1e-4)
    for name in policy.initial_state(1):
        torch.testing.assert_close(state[name], whole[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_wrappers_reset_inside_a_segment_and_hold_dead_agents(kind):
    policy = wrapped(kind)
    observations, resets, valid = segment()
    resets.zero_()
    valid.fill_(1)
    resets[5] = 1
    late, _ = models.join_outputs(*policy(observations, {**policy.initial_state(6),
                                                         "resets": resets, "valid": valid}))
    fresh, _ = models.join_outputs(
        *policy(observations[5:],
                {**policy.initial_state(6), "resets": resets[5:], "valid": valid[5:]})
    )
    torch.testing.assert_close(late[5:], fresh, atol=1e-5, rtol=1e-4)

    resets.zero_()
    valid[3] = 0
    state = {**policy.initial_state(6), "resets": resets, "valid": valid}
    held, _ = models.join_outputs(*policy(observations, state))
    keep = [t for t in range(len(observations)) if t != 3]
    without = {**policy.initial_state(6), "resets": resets[keep], "valid": valid[keep]}
    expected, _ = models.join_outputs(*policy(observations[keep], without))
    torch.testing.assert_close(held[keep], expected, atol=1e-5, rtol=1e-4)


class OldStyle(models.FeedForward):
    """As PufferLib 3's: a state that it does not use; a norm and a dropout."""

    def __init__(self, env):
        super().__init__(env, 8)
        self.norm, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)

    def forward(self, observations, state=None):
        return self.decode_actions(self.drop(self.norm(self.encode_observations(observations))))


def test_to_find_out_the_form_of_a_network_leaves_no_trace():
    env = SimpleNamespace(single_observation_space=gymnasium.spaces.Box(-1, 1, (3,)),
                          single_action_space=gymnasium.spaces.Discrete(2))
    policy = OldStyle(env)
    policy.drop.eval()
    before, random = {name: tensor.clone() for name, tensor in policy.state_dict().items()}, torch.get_rng_state()
    models.find_form(policy, env.single_observation_space)
    assert policy.takes_batches and all(torch.equal(before[name], now)
                                        for name, now in policy.state_dict().items())
    assert (torch.equal(random, torch.get_rng_state()) and policy.norm.training
            and not policy.drop.training)


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    """The scan's gradient consumes what the forward pass left for it."""
    gru = models.MinGRU(6, 2)
    x, state = torch.randn(5, 3, 6), torch.randn(2, 3, 6)
    resets, valid = torch.zeros(5, 3, dtype=torch.uint8), torch.ones(5, 3, dtype=torch.uint8)
    out, _ = gru(x, state, resets, valid)
    first = torch.autograd.grad(out.square().sum(), gru.parameters(), retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), gru.parameters())
    assert (all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            and first[0].abs().sum() > 0)


def test_mingru_wrapper_gradients_go_through_the_fused_scan():
    policy = wrapped("mingru")
    _, resets, valid = segment()
    state = {**policy.initial_state(6), "resets": resets, "valid": valid}
    x = torch.randn(11, 6, 16, requires_grad=True)
    out, _ = policy.rnn(x, state["mingru"], resets, valid)
    plain = x
    for i, layer in enumerate(policy.rnn.layers):
        plain, _ = models.mingru_layer(plain, layer(plain), state["mingru"][i], resets, valid)
    torch.testing.assert_close(out, plain, atol=1e-6, rtol=1e-5)
    weights = [x, *policy.rnn.parameters()]
    grad = torch.randn_like(out)
    for ours, expected in zip(
        torch.autograd.grad(out, weights, grad),
        torch.autograd.grad(plain, weights, grad), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_default_forward_equals_forward_eval():
    policy = models.FeedForward(environment(), hidden_size=16)
    observations, _, _ = segment()
    whole, value = policy(observations)
    for t in range(len(observations)):
        logits, v = policy.forward_eval(observations[t])
        torch.testing.assert_close(logits, whole[t], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(v, value[t], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX], ids=["discrete", "multidiscrete", "box"])
def test_separate_shares_no_weight_between_policy_and_value(space):
    policy = models.Separate(environment(space), hidden_size=16)
    outputs, log_std = models.join_outputs(*policy(torch.randn(50, 5)))
    assert outputs.shape == (50, 3 if space is BOX else 1 + sum(models.action_layout(space)[0]))
    assert (log_std is not None) == (space is BOX)
    for part, weights, others in ((outputs[:, :-1], policy.actor, policy.critic),
                                  (outputs[:, -1:], policy.critic, policy.actor)):
        policy.zero_grad()
        part.square().sum().backward(retain_graph=True)
        assert all(weight.grad.abs().sum() > 0 for weight in weights.parameters())
        assert all(weight.grad is None or not weight.grad.any() for weight in others.parameters())


def test_separate_reads_plain_numbers():
    env = environment()
    env.env_single_observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3)})
    with pytest.raises(TypeError, match="Separate reads plain numbers, and these"):
        models.Separate(env)


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX], ids=["discrete", "multidiscrete", "box"])
def test_first_policy_is_near_uniform_and_sampling_returns_its_logprob(space):
    policy = models.FeedForward(environment(space), hidden_size=16)
    observations = torch.randn(500, 5)
    logits, value = policy.forward_eval(observations)
    actions, logprobs, values = models.sample_logits(logits, value, seed=1, step=0)
    torch.testing.assert_close(values, value.squeeze(-1))
    if space is BOX:
        expected = logits.log_prob(actions).sum(-1)
    else:
        heads = logits if isinstance(logits, list) else [logits]
        expected = sum(
            head.log_softmax(-1).gather(1, actions[:, i : i + 1].long())[:, 0]
            for i, head in enumerate(heads)
        )
        sizes = [head.shape[-1] for head in heads]
        assert abs(logprobs.mean().item() + sum(math.log(n) for n in sizes)) < 0.1
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


def test_unsupported_action_space_is_named():
    with pytest.raises(TypeError, match="MultiBinary"):
        models.MinGRUPolicy(environment(gymnasium.spaces.MultiBinary(3)))


def board(actions, hidden_size=8, shape=(3, 6, 7)):
    torch.manual_seed(0)
    space = gymnasium.spaces.Box(0, 1, shape, np.uint8)
    env = SimpleNamespace(single_observation_space=space,
                          single_action_space=gymnasium.spaces.Discrete(actions))
    return models.Board(env, hidden_size=hidden_size)


@pytest.mark.parametrize("actions", [42, 43, 45, 7],
                         ids=["cells", "and a pass", "and more", "columns"])
def test_board_forward_equals_forward_eval_and_every_weight_learns(actions):
    policy, observations = board(actions), torch.randint(0, 2, (4, 5, 3, 6, 7), dtype=torch.uint8)
    logits, value = policy(observations)
    assert logits.shape == (4, 5, actions) and value.shape == (4, 5, 1)
    assert logits.softmax(-1).amax() < 1.5 / actions, "the first policy is near uniform"
    for t in range(4):
        outputs = policy.forward_eval(observations[t])
        torch.testing.assert_close(outputs, (logits[t], value[t]), atol=1e-6, rtol=1e-5)
    (logits.square().sum() + value.sum()).backward()  # a softmax has no gradient of a bias that all cells share
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.parameters())


def test_board_reads_every_cell_alike():
    """A pattern moved by a cell moves its logits by a cell, where no edge is in sight."""
    policy, pattern = board(100, shape=(3, 10, 10)), torch.randint(0, 2, (3, 3, 3),
                                                                   dtype=torch.uint8)
    planes = torch.zeros(2, 3, 10, 10, dtype=torch.uint8)
    planes[0, :, 3:6, 3:6] = planes[1, :, 4:7, 3:6] = pattern
    logits, _ = policy.forward_eval(planes)
    first, second = logits.view(2, 10, 10)
    torch.testing.assert_close(second[4:8, 3:7], first[3:7, 3:7])
    assert (second[4:8] - first[4:8]).abs().max() > 1e-3


def test_board_says_what_it_cannot_read():
    space = gymnasium.spaces.Box(0, 1, (3, 6, 7), np.uint8)
    for wrong in (environment(),
                  SimpleNamespace(single_observation_space=space, single_action_space=BOX)):
        with pytest.raises(TypeError, match=r"Board reads planes .* take policy.name default"):
            models.Board(wrong)


def seen(space, action_space=DISCRETE):
    return SimpleNamespace(single_observation_space=space, single_action_space=action_space)


def image(*shape):
    return gymnasium.spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize(("shape", "high"),
                         [((4, 84, 84), 255), ((64, 64, 3), 255), ((7, 7, 3), 10)])
def test_impala_forward_equals_forward_eval_and_every_weight_learns(shape, high):
    torch.manual_seed(0)
    policy = models.Impala(seen(image(*shape)), hidden_size=32)
    observations = torch.randint(0, high + 1, (2, 3, *shape), dtype=torch.uint8)
    logits, value = policy(observations)
    assert logits.shape == (2, 3, 3) and value.shape == (2, 3, 1)
    assert logits.softmax(-1).amax() < 0.45, "the first policy is near uniform"
    for t in range(2):
        torch.testing.assert_close(policy.forward_eval(observations[t]), (logits[t], value[t]),
                                   atol=1e-5, rtol=1e-4)
    (logits.log_softmax(-1)[..., -1].sum() + value.sum()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.parameters())


@pytest.mark.parametrize(("layout", "shape"), [
    ("(H, W)", (40, 48)), ("(H, W, C)", (40, 48, 3)), ("(C, H, W)", (3, 40, 48)), ("(K, H, W, C)", (4, 40, 48, 3)),
    ("(K, C, H, W)", (4, 3, 40, 48))])
@pytest.mark.parametrize(("dtype", "high"), [(np.uint8, 255), (np.uint16, 65535), (np.float32, 1), (np.float64, 255)])
@pytest.mark.parametrize("network", [models.Encoded, models.Impala])
def test_an_image_is_the_same_in_every_layout_and_type(network, dtype, high, layout, shape):
    picture = np.random.default_rng(0).integers(0, 256, (2, *shape))
    first = np.moveaxis(picture, -1, -3) if layout.endswith("C)") else picture
    first = first.reshape(2, -1, 40, 48).astype(np.uint8)
    outputs = []
    for space, x in ((image(*first.shape[1:]), first),
                     (gymnasium.spaces.Box(0, high, shape, dtype), (picture * (high / 255)).astype(dtype))):
        torch.manual_seed(0)
        policy = network(seen(space), hidden_size=8)
        outputs.append(policy.forward_eval(torch.from_numpy(x)))
    assert layout in models.describe(policy)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


def test_impala_is_the_network_of_the_paper():
    """15 convolutions of 3 × 3 (Espeholt et al. 2018, figure 3); sides halved thrice, rounded up;
    all again by hand."""
    torch.manual_seed(0)
    policy = models.Impala(seen(image(72, 96, 3)))
    convolutions = [module for module in policy.modules() if isinstance(module, torch.nn.Conv2d)]
    wanted = [(3, 16), *[(16, 16)] * 4, (16, 32), *[(32, 32)] * 4, (32, 32), *[(32, 32)] * 4]
    assert [(conv.in_channels, conv.out_channels) for conv in convolutions] == wanted
    assert all(conv.kernel_size == (3, 3) and conv.stride == (1, 1) for conv in convolutions)
    assert policy.encoder[0].in_features == 32 * 9 * 12 and policy.encoder[0].out_features == 256
    pictures = torch.randint(0, 256, (2, 72, 96, 3), dtype=torch.uint8)
    x, layers = pictures.movedim(-1, 1) / 255, iter(convolutions)
    for _ in range(3):
        x = torch.nn.functional.max_pool2d(next(layers)(x), 3, 2, 1)
        for _ in range(2):
            first, second = next(layers), next(layers)
            x = x + second(first(x.relu()).relu())
    torch.testing.assert_close(policy.parts[0](pictures), x.relu().flatten(1), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("side", "picture"), [(25, False), (28, True), (32, True)])
def test_what_is_larger_than_a_grid_is_a_picture(side, picture):
    """MiniGrid's grids have 25 squares at most; as one, a picture of 32 pixels would have four million weights."""
    layers = list(models._image_encoder(image(side, side, 3)))
    assert isinstance(layers[0], pictures.BytesConvolution) == picture


def test_impala_reads_the_image_of_a_dict_and_needs_one():
    space = gymnasium.spaces.Dict({"camera": image(48, 48, 3),
                                   "speed": gymnasium.spaces.Box(-1, 1, (2,), np.float32)})
    env = seen(models.emulation.FlatObservation(space).flat_space)
    env.env_single_observation_space = space
    policy = models.Impala(env, hidden_size=16, normalize=True)
    flat = torch.from_numpy(models.emulation.FlatObservation(space).flatten(space.sample()))
    assert policy.forward_eval(flat[None])[0].shape == (1, 3) and policy.normalizer is not None
    with pytest.raises(TypeError, match=r"Impala reads images .* take policy.name auto"):
        models.Impala(environment())


WRONG = """
import torch
class NoValue(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)
class Three(NoValue):
    def forward(self, x):
        logits = self.layer(x)
        return logits, logits[:, :1], None
class NoValueInASstep(NoValue):
    def forward(self, x, state):
        logits = self.layer(x)
        return logits, logits[..., :1]
    def forward_eval(self, x, state):
        return self.layer(x)
class NoArgs(NoValue):
    def __init__(self):
        super().__init__(None)
class NoEnv(NoValue):
    def __init__(self, hidden_size):
        super().__init__(None)
class Few(NoValue):
    def forward(self, x):
        logits = self.layer(x)
        return logits[:, :1], logits[:, :1]
class Gaussian(NoValue):
    def forward(self, x):
        logits = self.layer(x)
        return torch.distributions.Normal(logits, torch.ones_like(logits)), logits[:, :1]
class NoBatch(NoValue):
    def forward(self, x):
        logits = self.layer(x)
        return logits[0], logits[:, :1]
class TwoValues(NoValue):
    def forward(self, x):
        logits = self.layer(x)
        return logits, logits
class Distribution(NoValue):
    def forward(self, x):
        logits = self.layer(x)
        return torch.distributions.Categorical(logits=logits), logits[:, :1]
class Lazy(NoValue):
    def __init__(self, env):
        super().__init__(env)
        self.layer = torch.nn.LazyLinear(2)
class Doubles(NoValue):
    def __init__(self, env):
        super().__init__(env)
        self.double()
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
class Forgets(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.cell, self.out = torch.nn.LSTMCell(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x, state=None):
        x = x.flatten(1).float()
        held = (state["lstm_h"], state["lstm_c"]) if state and "lstm_h" in state else None
        state["lstm_h"], state["lstm_c"] = self.cell(x, held)
        y = self.out(state["lstm_h"])
        return y[:, :2], y[:, 2:]
class Noisy(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.out = torch.nn.Linear(4, 3)
    def forward(self, x, state=None):
        y = self.out(x.flatten(1).float())
        state["hidden"] = y = y + 0.1 * torch.randn_like(y)
        return y[:, :2], y[:, 2:]
class Breaks(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.out = torch.nn.Linear(env.single_observation_space["numbers"].shape[0], 3)
class FlatState(LostState):
    def initial_state(self, agents):
        return {"h": torch.zeros(agents, 8), "c": torch.zeros(agents, 8)}
class Cleanrl(torch.nn.Module):
    def __init__(self, env):
        super().__init__()
        self.actor, self.critic = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
    def get_value(self, x):
        return self.critic(x)
def nothing(env):
    return 3
"""


@pytest.mark.parametrize(("name", "options", "text"), [
    ("NoValue", (), r"NoValue.forward must return \(logits, value\), got a Tensor \(\d+, 2\)"),
    ("Three", (),
     r"Three.forward must return \(logits, value\), got 3: Tensor \(\d+, 2\), .*, NoneType"),
    ("NoValueInASstep", (), r"forward_eval must return \(logits, value\), got a Tensor \(\d+, 2\)"),
    ("NoValue", ("--rnn.name", "lstm"),
     "NoValue has no encode_observations and no decode_actions: LSTMWrapper puts"),
    ("NoValue", ("--rnn.name", "mingru"),
     "NoValue has no encode_observations and no decode_actions: MinGRUWrapper"),
    ("Few", (), "Few returns 1 logits for an observation; these environments want 2: take the "
     "number from env.single"),
    ("Gaussian", (), "Gaussian returns a Normal, which is for continuous actions; .* a choice of "
     "2, so return logits"),
    ("NoBatch", (),
     r"logits and value are \(2,\) and \(\d+, 1\), expected \(\d+, actions\) and \(\d+, 1\)"),
    ("TwoValues", (),
     r"logits and value are \(\d+, 2\) and \(\d+, 2\), expected \(\d+, actions\) and \(\d+, 1\)"),
    ("NoArgs", (), r"is called with \(env\), but takes \(\)"),
    ("NoEnv", (), r"is called with \(env, hidden_size\), but takes \(hidden_size\)"),
    ("Distribution", (), r"must return \(logits, value\), got 2: Categorical, Tensor \(\d+, 1\)"),
    ("Lazy", (), r"Lazy: layer.weight has no shape yet, because its layer is lazy\. Call the network"),
    ("Doubles", (), r"Doubles: layer.weight is torch.float64\. What is trained must be float32"),
    ("Forgets", (), r"Forgets.forward leaves lstm_c, lstm_h in the state, which would be lost: .* --rnn.name lstm"),
    ("Breaks", (), r"this is in the network's own code:\n[\s\S]*wrong.py[\s\S]*'Box' object is not subscriptable"),
    ("LostState", (), r"LostState.forward_eval leaves c, h in the state, which would be lost: initial_state"),
    ("BatchFirst", (), r"takes the first dimension for agents .* given time first, .* batch_first=True\?"),
    ("FlatState", (), r"initial_state\(1\): h has the shape \(1, 8\), expected \(layers, 1, size\)"),
    ("Cleanrl", (), r"Cleanrl has no forward\(observations\) -> logits, value. Of CleanRL's actor"),
    ("nothing", (), "must make a torch.nn.Module, it made a int"),
    ("NoVale", (), "has no NoVale; it has NoValue, Three, "),
    ("", (),
     r"policy.name = .*wrong.py: say what in that file, .*wrong.py:NAME; it has NoValue, Three, "),
])
def test_a_network_that_cannot_be_used_is_named_in_a_line(tmp_path, name, options, text):
    (tmp_path / "wrong.py").write_text(WRONG)
    with pytest.raises((configuration.ConfigError, models.NetworkFault), match=text) as error:
        pufferl.train("cartpole", pufferl.load_config("cartpole", [
            "--env.num-envs", "64", "--data-dir", str(tmp_path), "--policy.name",
            f"{tmp_path}/wrong.py" + f":{name}" * bool(name), *options]))
    assert configuration.error_text(error.value) == str(error.value)


def test_a_network_may_leave_in_the_state_what_nobody_reads(tmp_path):
    (tmp_path / "noisy.py").write_text(WRONG)
    pufferl.train("cartpole", pufferl.load_config("cartpole", [
        "--env.num-envs", "64", "--data-dir", "none", "--train.total-timesteps", "4096",
        "--policy.name", f"{tmp_path}/noisy.py:Noisy"]))


def test_logits_are_held_to_the_actions():
    outputs = torch.zeros(3, 5)
    models.check_logits(None, outputs, None, [1, 3], 2)
    models.check_logits(None, outputs, torch.zeros(3, 4), None, 4)
    with pytest.raises(models.NetworkFault, match=r"4 logits .* want 5 \(2 \+ 3\)"):
        models.check_logits(None, outputs, None, [2, 3], 2)
    with pytest.raises(models.NetworkFault, match=r"returns 4 means .* want 3"):
        models.check_logits(None, outputs, torch.zeros(3, 4), None, 3)
    with pytest.raises(models.NetworkFault,
                       match=r"returns logits, which are for choices; .* want 4 continuous"):
        models.check_logits(None, outputs, None, None, 4)


DEEP = """
import numpy as np
import torch
class Deep(torch.nn.Module):
    def __init__(self, env, hidden_size=16, depth=1, rate=0.5, bias=True, what="relu", device=None,
                 num_layers=1, std=np.sqrt(2), scale: float = 1):
        super().__init__()
        self.also = num_layers, std, scale
        self.said, size = (depth, rate, bias, what), env.single_observation_space.shape[0]
        sizes = [size] + [hidden_size] * depth
        self.body = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias=bias) for a, b in zip(sizes, sizes[1:])))
        self.head = torch.nn.Linear(hidden_size, env.single_action_space.n + 1)
    def forward(self, observations):
        y = self.head(self.body(observations.flatten(1)).relu())
        return y[..., :-1], y[..., -1:]
"""


def test_keywords_of_a_network_of_ones_own_are_settings(tmp_path):
    (tmp_path / "net.py").write_text(DEEP)
    name = f"{tmp_path}/net.py:Deep"
    options = ["--policy.name", name, "--policy.depth", "3", "--policy.bias", "false", "--policy.hidden_size=8",
               "--policy.num-layers", "2", "--policy.std", "1.5", "--policy.scale", "2.5"]
    args = configuration.load_config("cartpole", [
        *options, "--train.total-timesteps", "2048", "--train.minibatch-size", "512", "--env.num-envs", "16",
        "--data-dir", str(tmp_path / "runs")])
    trainer = pufferl.train("cartpole", args)
    assert trainer.policy.also == (2, 1.5, 2.5) and args["rnn"]["num_layers"] == 1
    assert trainer.policy.said == (3, 0.5, False, "relu") and trainer.policy.body[2].in_features == 8
    changed = history.changes(json.loads((trainer.run_folder / "config.json").read_text()))
    assert changed["policy.depth"] == 3 and changed["policy.what"] == "relu" and "policy.squash" not in changed
    loaded = configuration.load_config("cartpole", ["--load-model-path", str(trainer.run_folder)])
    again = configuration.load_config("cartpole", [f"--load_model_path={trainer.run_folder}", "--policy.depth", "2"])
    assert again["policy"]["depth"] == 2 and again["policy"]["hidden_size"] == 8
    assert {key: loaded["policy"][key] for key in ("name", "depth", "bias")} == {
        "name": name, "depth": 3, "bias": False}
    file = trainer.run_folder / "config.json"
    saved = json.loads(file.read_text())
    assert saved["train"].pop("draw") == "segments"  # a run from before there was that setting, and an .ini of after it
    file.write_text(json.dumps(saved))
    values = configuration.resolve("cartpole")
    values[1]["train"]["draw"] = "steps"
    configuration.apply_saved(["--resume", str(trainer.run_folder)], "cartpole", *values)
    assert values[1]["train"]["draw"] == "segments"
    resumed = pufferl.train("cartpole", configuration.load_config(
        "cartpole", ["--resume", str(trainer.run_folder), "--train.total-timesteps", "4096"]))
    assert resumed.policy.said == (3, 0.5, False, "relu") and resumed.global_step == 4096
    space = sweep.searched_settings("cartpole", {"policy.depth": {
        "distribution": "int_uniform", "min": 1, "max": 4, "mean": 2, "scale": "auto"}}, options[:2])
    assert list(space) == ["policy.depth"]
    for wrong in (["--policy.dept", "3"], ["--policy.device", "cpu"], ["--policy.depth", "many"]):
        with pytest.raises(configuration.ConfigError, match="depth"):
            configuration.load_config("cartpole", [*options, *wrong])
    with pytest.raises(configuration.ConfigError, match="no such setting"):
        configuration.load_config("cartpole", ["--policy.depth", "3"])


def test_another_network_than_that_of_an_ini(tmp_path, monkeypatch):
    """What only the .ini's own network has goes; what both have stays."""
    (tmp_path / "net.py").write_text(DEEP)
    shutil.copytree(configuration.ROOT / "config", tmp_path / "config")
    ini = tmp_path / "config/cartpole.ini"
    ini.write_text(ini.read_text().replace("name = default\n", f"name = {tmp_path}/net.py:Deep\ndepth = 2\n"))
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    own = configuration.load_config("cartpole")["policy"]
    assert (own["depth"], own["hidden_size"]) == (2, 64), "the size stands beside its name"
    there = configuration.load_config("acrobot", ["--policy.name", f"{tmp_path}/net.py:Deep"])["policy"]
    assert there["hidden_size"] == 16, "that file's size is for another network"
    plain = configuration.load_config("cartpole", ["--policy.name", "default"])["policy"]
    assert "depth" not in plain and (plain["name"], plain["hidden_size"]) == ("default", 64)
    ini.write_text(ini.read_text().replace("hidden_size = 64\n", ""))
    assert configuration.load_config("cartpole")["policy"]["hidden_size"] == 16
    assert configuration.load_config("cartpole", ["--policy.name", "default"])["policy"]["hidden_size"] == 128
    ini.write_text("[policy]\nhidden_size = 96\n")
    there = configuration.load_config("cartpole", ["--policy.name", f"{tmp_path}/net.py:Deep"])["policy"]
    assert there["hidden_size"] == 96, "a size beside no name is for any network"


def test_a_network_of_ones_own_says_what_it_keeps():
    class Keeps(models.FeedForward):
        def initial_state(self, agents):
            return {"seen": torch.zeros(1, agents, 2), "told": torch.zeros(1, agents, 3)}

    vecenv = pufferl.make("squared", 2)
    assert "Keeps, keeps seen, told from step to step; " in models.describe(Keeps(vecenv))
    assert "FeedForward, no recurrent layer; " in models.describe(models.FeedForward(vecenv))
    actor = models.FeedForward(vecenv)
    actor.policy = torch.nn.Linear(2, 2)  # a layer by that name, not a network within
    assert "FeedForward, no recurrent layer; " in models.describe(actor)
    vecenv.close()


def test_text_and_bits_are_read_as_numbers():
    class Told(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(word=gymnasium.spaces.Text(5), bits=gymnasium.spaces.MultiBinary(3))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            return {"word": "ab", "bits": [0, 1, 0]}, {}

        def step(self, action):
            return {"word": "cd", "bits": [0, 1, 0]}, 1.0, True, False, {}

    with pufferl.make(Told, 2) as vecenv:
        policy = models.Encoded(vecenv.driver_env, hidden_size=8)
        assert policy.numbers == [5, 3] and "(5,) numbers" in models.describe(policy)
        assert policy(torch.from_numpy(vecenv.reset()[0])[None])[0].shape == (1, 2, 2)


def test_a_network_over_batches_that_takes_a_state_may_be_normalised(tmp_path):
    """PufferLib 3's form, within models.Normalized."""
    (tmp_path / "noisy.py").write_text(WRONG)
    trainer = pufferl.train("cartpole", pufferl.load_config("cartpole", [
        "--env.num-envs", "64", "--data-dir", "none", "--train.total-timesteps", "16384", "--train.norm-obs", "true",
        "--policy.name", f"{tmp_path}/noisy.py:Noisy"]))
    assert type(trainer.policy) is models.Normalized and trainer.policy.normalizer.count > 0
    assert trainer.losses["grad_norm"] > 0
