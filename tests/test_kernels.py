"""Every kernel against its float64 reference (tests/reference.py): values and every gradient, at
awkward sizes, with outputs full of NaN before the call. (What the kernels promise besides:
tests/test_kernel_promises.py.)

    python -m pytest tests/test_kernels.py -k advantage
"""

import copy
import io
import itertools
import math

import gymnasium
import numba
import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import arena
import kernels
import models
import optim
import ppo

pytestmark = pytest.mark.usefixtures("one_torch_thread")
BOUNDED = settings(max_examples=25)
SIZES = [1, 3, 17, 65, 257]
NAN = math.nan


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def poison(*shape, dtype=torch.float32):
    """An output before the call: NaN, or a number that no kernel writes."""
    return torch.full(shape, NAN if dtype.is_floating_point else -77 if dtype != torch.uint8
                      else 77, dtype=dtype)


def flags(rng, probability, *shape):
    return (torch.rand(shape, generator=rng) < probability).to(torch.uint8)


def close(actual, expected, tolerance=1e-5):
    """|actual - expected| <= tolerance · (1 + |expected|) everywhere; a NaN is never close."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert actual.shape == expected.shape
    error = (actual - expected).abs() / (1 + expected.abs())
    assert actual.numel() == 0 or (error <= tolerance).all(), (
        f"error {error.max():.2e} above {tolerance:.0e}")


def bits(tensor):
    return (tensor.contiguous().view(torch.uint8).clone() if tensor.dtype.itemsize > 1
            else tensor.clone())


THREAD_COUNTS = (1, 2, 3)


# --------------------------------------------------------------------------------------------------
# Arena


class Recurrent(torch.nn.Module):
    """Odd sizes before and after an LSTM, so that alignment and packing have
    something to get wrong."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(5, 7)
        self.lstm = torch.nn.LSTM(7, 6, num_layers=2)
        self.decoder = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.decoder(self.lstm(torch.tanh(self.encoder(x)))[0])


def adopted(module, *others):
    arena = kernels.Arena()
    arena.adopt(module)
    made = [make(arena) for make in others]
    arena.allocate("cpu")
    return (arena, *made)


def test_arena_views_are_aligned_zero_and_in_one_allocation():
    arena = kernels.Arena()
    specs = {"a": ((3, 5), torch.float32), "b": ((7,), torch.uint8), "c": ((2, 0), torch.float32),
             "d": ((), torch.int64), "e": ((1, 1, 11), torch.float64)}
    for name, (shape, dtype) in specs.items():
        arena.register(name, shape, dtype)
    arena.allocate("cpu")
    low, high = arena.memory.data_ptr(), arena.memory.data_ptr() + arena.memory.numel()
    end = low
    for name, (shape, dtype) in specs.items():
        view = arena[name]
        assert view.shape == shape and view.dtype == dtype and view.is_contiguous()
        assert not view.any()
        if view.numel():
            assert view.data_ptr() % arena.ALIGNMENT == 0
            assert (end <= view.data_ptr()
                    and view.data_ptr() + view.numel() * dtype.itemsize <= high)
            end = view.data_ptr() + view.numel() * dtype.itemsize
            view.fill_(1)
    assert all((arena[name] == 1).all() for name in specs)  # nobody wrote over anybody


def test_arena_groups_are_contiguous_and_flat_is_their_memory():
    arena = kernels.Arena()
    # registered interleaved, laid out side by side
    for i, group in enumerate(["g", "other", "g", "other", "g"]):
        arena.register(f"t{i}", (i + 1, 3), group=group)
    arena.allocate()
    for group, members in (("g", [0, 2, 4]), ("other", [1, 3])):
        flat = arena.flat(group)
        assert flat.ndim == 1 and flat.data_ptr() == arena[f"t{members[0]}"].data_ptr()
        addresses = [arena[f"t{i}"].data_ptr() for i in members]
        assert addresses == sorted(addresses)
        flat.fill_(2)
        assert all((arena[f"t{i}"] == 2).all() for i in members)
    assert (arena.flat("g").data_ptr() - arena.flat("other").data_ptr()) != 0
    arena.flat("g").zero_()
    assert (arena["t1"] == 2).all() and (arena["t3"] == 2).all()


def test_arena_errors():
    arena = kernels.Arena()
    arena.register("x", (2,))
    with pytest.raises(ValueError, match=r"'x'.*taken"):
        arena.register("x", (2,))
    with pytest.raises(ValueError, match=r"'y'.*negative"):
        arena.register("y", (2, -1))
    with pytest.raises(TypeError, match=r"weight.*float64"):
        arena.adopt(torch.nn.Linear(2, 2).double())
    arena.register("bytes", (2,), torch.uint8)  # the same group as x: no flat view of both
    arena.allocate()
    with pytest.raises(KeyError):
        arena.flat("data")
    with pytest.raises(KeyError):
        arena["nobody"]
    with pytest.raises(ValueError, match=r"'late'.*allocate"):
        arena.register("late", (2,))
    with pytest.raises(ValueError, match="allocate"):
        arena.adopt(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="adopt"):
        optim.Muon(kernels.Arena())


def test_adopt_keeps_values_and_shares_memory():
    torch.manual_seed(0)
    module = Recurrent()
    before = copy.deepcopy(module.state_dict())
    (arena,) = adopted(module)
    weights, gradients = arena.flat("weights"), arena.flat("gradients")
    assert weights.numel() == gradients.numel()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() == arena[f"weights/policy.{name}"].data_ptr()
        assert parameter.grad.data_ptr() == arena[f"gradients/policy.{name}"].data_ptr()
        offset = parameter.data_ptr() - weights.data_ptr()
        assert offset == parameter.grad.data_ptr() - gradients.data_ptr()  # the same order and gaps
    addresses = [p.grad.data_ptr() for p in module.parameters()]
    module(torch.randn(4, 2, 5)).sum().backward()
    assert addresses == [p.grad.data_ptr() for p in module.parameters()]
    assert gradients.norm() > 0
    gradients.zero_()
    assert not any(p.grad.any() for p in module.parameters())
    weights.fill_(0.25)
    assert all((p == 0.25).all() for p in module.parameters())


def test_adopted_lstm_is_one_block_and_trains_as_a_free_one():
    torch.manual_seed(1)
    free = Recurrent()
    module = copy.deepcopy(free)
    adopted(module)
    for group in (lambda p: p, lambda p: p.grad):
        block = [group(p) for p in module.lstm._flat_weights]
        for left, right in itertools.pairwise(block):
            assert left.data_ptr() + left.numel() * 4 == right.data_ptr()
        assert block[0].data_ptr() % kernels.Arena.ALIGNMENT == 0, (
            "the block itself starts unaligned")
        assert block[-1].untyped_storage().data_ptr() == block[0].data_ptr(), (
            "cuDNN copies what begins elsewhere")
    x = torch.randn(9, 4, 5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (free, module)]
    for _ in range(3):
        for m, optimizer in zip((free, module), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            m(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(free.parameters(), module.parameters(), strict=True):
        close(b.detach(), a.detach(), 1e-6)


def test_two_modules_under_two_prefixes():
    arena = kernels.Arena()
    first, second = torch.nn.Linear(3, 2), torch.nn.LSTM(2, 3)
    arena.adopt(first, "first")
    with pytest.raises(ValueError, match="taken"):
        arena.adopt(torch.nn.Linear(3, 2), "first")
    arena.adopt(second, "second")
    arena.allocate()
    assert first.weight.data_ptr() == arena["weights/first.weight"].data_ptr()
    assert second.bias_hh_l0.data_ptr() == arena["weights/second.bias_hh_l0"].data_ptr()


# --------------------------------------------------------------------------------------------------
# The numpy view that is kept on a tensor


def test_host_view_does_not_outlive_a_copy():
    tensor = torch.zeros(5)
    kernels.gradient_norm(tensor)
    twin = copy.deepcopy(tensor)
    twin += 1
    assert kernels.gradient_norm(twin) == pytest.approx(math.sqrt(5))
    tensor += 2
    assert kernels.gradient_norm(tensor) == pytest.approx(2 * math.sqrt(5))


def test_host_view_follows_new_data():
    parameter = torch.nn.Parameter(torch.zeros(3))
    kernels.gradient_norm(parameter)
    parameter.data = torch.ones(3)  # what arena.adopt does
    assert kernels.gradient_norm(parameter) == pytest.approx(math.sqrt(3))


def test_tensors_that_kernels_have_seen_can_be_saved():
    tensor = torch.arange(4.0)
    kernels.gradient_norm(tensor)
    file = io.BytesIO()
    torch.save({"weights": tensor}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weights"], tensor)


# --------------------------------------------------------------------------------------------------
# Scalar mathematics


def probe(cell):
    """loop(x, out): out = cell(x), compiled as a driver compiles it."""

    @numba.njit(error_model="numpy", fastmath=arena.FASTMATH)
    def loop(x, out):
        for i in range(len(x)):
            out[i] = cell(x[i])

    return loop


exp_probe, sigmoid_probe, tanh_probe = map(probe, (kernels.exp_cell, kernels.sigmoid_cell, kernels.tanh_cell))
log_probe, cos_turn_probe = probe(kernels.log_cell), probe(kernels.cos_turn_cell)


def test_log_and_cosine():
    rng = np.random.default_rng(0)
    x = np.concatenate([1 - np.arange(2**16) * 2.0**-24, np.exp(rng.uniform(-80, 80, 100_000))]).astype(np.float32)
    out = np.full_like(x, np.nan)
    log_probe(x, out)
    exact = np.log(x.astype(np.float64))
    assert np.abs(out - exact).max() < 1e-5 and (np.abs(out - exact) <= 2e-7 * np.abs(exact)).all()
    x = np.arange(0, 1, 2.0**-20, dtype=np.float32)
    out = np.full_like(x, np.nan)
    cos_turn_probe(x, out)
    assert np.abs(out - np.cos(2 * np.pi * x.astype(np.float64))).max() < 1e-6


@numba.njit(error_model="numpy", fastmath=arena.FASTMATH)
def bfloat_probe(x, bits, back):
    for i in range(len(x)):
        bits[i] = kernels.bfloat_of_float(x[i])
        back[i] = kernels.float_of_bfloat(bits[i])


def test_bfloat16_rounds_to_the_nearest():
    words = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    # half way between two, and just beside
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([words, ties, ties - 1, ties + 1]).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], np.float32([np.nan])])
    bits, back = np.zeros(len(x), np.uint16), np.zeros_like(x)
    bfloat_probe(x, bits, back)
    # torch rounds a tie to even, the kernels away from zero
    away = (x.view(np.uint32) & 0xFFFF) == 0x8000
    expected = torch.from_numpy(np.where(away, (x.view(np.uint32) + 1).view(np.float32), x)).bfloat16()
    assert np.array_equal(back, expected.float().numpy(), equal_nan=True)
    assert np.array_equal(bits[:-1], expected.view(torch.uint16).numpy()[:-1])
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0x7F808000, 0x7FFF8000], np.uint32)
    bits, back = np.zeros(len(nans), np.uint16), np.zeros(len(nans), np.float32)
    bfloat_probe(nans.view(np.float32), bits, back)
    assert np.isnan(back).all(), "a rounding up would carry into the sign and leave a zero"


def test_exp_sigmoid_and_tanh():
    x = np.linspace(-87, 88, 1_000_003, dtype=np.float32)
    out = np.full_like(x, np.nan)
    exp_probe(x, out)
    assert (np.abs(out / np.exp(x.astype(np.float64)) - 1)).max() < 2e-7
    x = np.concatenate([x, np.float32([-1e30, -1e3, -0.0, 0.0, 1e3, 1e30, -np.inf, np.inf])])
    out = np.full_like(x, np.nan)
    sigmoid_probe(x, out)
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.abs(out - exact).max() < 1e-6
    assert out.min() >= 0 and out.max() <= 1
    tanh_probe(np.full_like(x, np.nan), out)
    assert np.isnan(out).all()
    tanh_probe(x, out)
    exact = np.tanh(x.astype(np.float64))
    assert np.abs(out - exact).max() < 4e-7 and np.abs(out).max() <= 1
    x = np.exp(np.linspace(-80, 0, 100_003)).astype(np.float32)
    out = np.full_like(x, np.nan)
    tanh_probe(x, out)
    assert np.abs(out / np.tanh(x.astype(np.float64)) - 1).max() < 3e-7


@pytest.mark.parametrize("counter, key, expected", reference.PHILOX_KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = kernels.philox_cell(*(np.uint32(c) for c in counter), *(np.uint32(k) for k in key))
    assert tuple(int(w) for w in words) == expected
    assert reference.philox4x32(counter, key) == expected


# --------------------------------------------------------------------------------------------------
# Sample


def draw_actions(outputs, *, heads=None, first_agent=0, step=0, seed=7, **options):
    """kernels.sample into poisoned outputs: (actions, logprobs, values)."""
    n, width = outputs.shape
    if heads is not None:
        heads = torch.tensor(heads)
        actions = poison(n, len(heads), dtype=torch.int32)
    else:
        actions = poison(n, width - 1)
    logprobs, values = poison(n), poison(n)
    kernels.sample(outputs, actions, logprobs, values, seed=seed, step=step,
                   first_agent=first_agent, heads=heads,
                   **options)
    return actions, logprobs, values


def some_masks(rng, n, heads):
    """Random masks with at least one allowed action a head."""
    masks = flags(rng, 0.6, n, sum(heads))
    first = 0
    for size in heads:
        allowed = torch.randint(size, (n,), generator=rng) + first
        masks[torch.arange(n), allowed] = 1
        first += size
    return masks


def expected_word(agent, step, head, seed):
    counter = (agent, step & 0xFFFFFFFF, (step >> 32) << 16 | head, 1)
    return reference.philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n, heads",
                         [(1, [1]), (3, [2]), (17, [5, 3]), (257, [1, 4, 2]), (65, [33])])
@pytest.mark.parametrize("seed, step, first_agent",
                         [(0, 0, 0), (2**63 + 9, 2**33 + 5, 4_000_000_000)])
def test_sample_discrete(n, heads, masked, seed, step, first_agent):
    rng = generator(n)
    outputs = 2 * torch.randn(n, sum(heads) + 1, generator=rng)
    masks = some_masks(rng, n, heads) if masked else None
    if masked:
        outputs[:, :-1] += 40 * (masks == 0)  # a forbidden action is not to be seen, however likely
    actions, logprobs, values = draw_actions(outputs, heads=heads, masks=masks,
                                             seed=seed, step=step, first_agent=first_agent)
    assert torch.equal(values, outputs[:, -1])
    logp = reference.log_softmax_heads(outputs[:, :-1].double(), heads, masks)
    for i in range(n):
        for head, p in enumerate(logp[i].exp().split(heads)):
            u = (expected_word(first_agent + i, step, head, seed)[0] >> 8) * 2.0**-24
            cdf = p.cumsum(0)
            choice = int((cdf > u * cdf[-1]).nonzero()[0])
            near = (cdf - u).abs().min() < 1e-6  # float32 may land on the other side of a step
            assert actions[i, head] == choice or near
            assert p[actions[i, head]] > 0
    logprob, _ = reference.discrete_logprob_entropy(outputs[:, :-1].double(), actions, heads, masks)
    close(logprobs, logprob, 2e-6)


@BOUNDED
@given(st.integers(0, 2**32), st.sampled_from([(1, [2]), (7, [3, 1]), (200, [1, 4, 2]), (65, [33])]), st.booleans(),
       st.booleans(), st.booleans())
def test_a_block_of_agents_chooses_as_one_agent_does(seed, case, masked, deterministic, strange):
    """On a CPU 64 agents choose together, on a GPU each by itself: the same actions, whatever the logits are. (Of an
    agent that has a NaN, or no logit above -inf, the most likely action is any allowed one.)"""
    (n, heads), rng = case, generator(seed)
    outputs = 3 * torch.randn(n, sum(heads) + 1, generator=rng)
    if strange:
        values = torch.tensor([NAN, -math.inf, 0.0, 0.0, 200.0, -200.0, math.inf])
        there = torch.rand(outputs.shape, generator=rng) < 0.2
        outputs[there] = values[torch.randint(len(values), (int(there.sum()),), generator=rng)]
    masks = some_masks(rng, n, heads) if masked else None
    together = draw_actions(outputs, heads=heads, masks=masks, seed=seed, deterministic=deterministic)
    alone = [torch.empty_like(array).numpy() for array in together]
    kernels._sample_discrete_cuda(
        0, n, outputs.numpy(), masked, (masks if masked else torch.ones(1, 1, dtype=torch.uint8)).numpy(),
        np.array(heads), np.uint64(seed), np.uint64(0), np.zeros(1, np.int64), deterministic, *alone)
    for got, expected in zip(together, map(torch.from_numpy, alone), strict=True):
        if deterministic:
            logits = outputs[:, :-1] if masks is None else outputs[:, :-1].masked_fill(masks == 0, -math.inf)
            usual = torch.stack([head.amax(1) > -math.inf for head in logits.split(heads, 1)]).all(0)  # false if NaN
            got, expected = got[usual], expected[usual]
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    if masked:
        first = torch.tensor([sum(heads[:i]) for i in range(len(heads))])
        assert masks.gather(1, together[0].long() + first).all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("n, dims", [(1, 1), (3, 2), (257, 3), (65, 17)])
def test_sample_continuous(n, dims, wide):
    rng = generator(n)
    outputs = torch.randn(n, dims + 1, generator=rng)
    log_std = 0.5 * torch.randn(*((n, dims) if wide else (dims,)), generator=rng)
    seed, step, first_agent = 2**40 + 3, 2**34 + 1, 123_456
    actions, logprobs, values = draw_actions(outputs, log_std=log_std, seed=seed, step=step,
                                             first_agent=first_agent)
    assert torch.equal(values, outputs[:, -1])
    noise = torch.empty(n, dims, dtype=torch.float64)
    for i in range(n):
        for j in range(dims):
            a, b, *_ = expected_word(first_agent + i, step, j, seed)
            u, v = (a >> 8) * 2.0**-24, (b >> 8) * 2.0**-24
            noise[i, j] = math.sqrt(-2 * math.log1p(-u)) * math.cos(2 * math.pi * v)
    close(actions, outputs[:, :-1].double() + log_std.double().exp() * noise, 3e-6)
    logprob, _ = reference.gaussian_logprob_entropy(outputs[:, :-1].double(), log_std.double(),
                                                    actions.double())
    close(logprobs, logprob, 1e-5)


@pytest.mark.parametrize("n, dims, mixed", [(1, 1, False), (257, 3, False), (257, 6, True)])
def test_sample_squashed(n, dims, mixed):
    """The same noise as without; actions within the bounds, and the density is
    torch's of the actions."""
    rng, squash, samples = generator(n), bounds(dims, mixed), poison(n, dims)
    outputs, log_std = torch.randn(n, dims + 1, generator=rng), 0.5 * torch.randn(dims, generator=rng)
    unbounded, _, _ = draw_actions(outputs, log_std=log_std)
    actions, logprobs, values = draw_actions(outputs, log_std=log_std, squash=squash,
                                             samples=samples)
    assert torch.equal(samples, unbounded) and torch.equal(values, outputs[:, -1])
    close(actions, models.squashed(squash, samples.double()), 1e-6)
    known = outputs[:, :-1].double(), log_std.double(), samples.double()
    close(logprobs, reference.squashed_logprob_entropy(*known, squash.double())[0], 1e-5)
    most_likely, _, _ = draw_actions(outputs, log_std=log_std, squash=squash, samples=samples,
                                     deterministic=True)
    close(most_likely, models.squashed(squash, outputs[:, :-1].double()), 1e-6)


def test_each_number_is_squashed_by_its_own_bounds():
    inf, vast = np.inf, np.finfo(np.float64).max
    space = gymnasium.spaces.Box(np.array([-2.0, -inf, 0.0, -inf, 100.0, -inf, -vast, 3.0]),
                                 np.array([6.0, inf, inf, 9.0, inf, -5.0, vast, 3.0]), dtype=np.float64)
    squash = models.squash(torch.nn.Identity(), space).action_squash
    expected = [[2, 4], [0, -1], [0, -1], [0, -1], [100, -100], [-5, -5], [0, -1], [3, -3]]
    assert squash[:2].T.tolist() == expected
    close(squash[2], squash[1].abs().log(), 1e-7)
    assert torch.equal(ppo.squash_rows(space), squash)
    u = torch.tensor([0.5, -40.0, 1e9]).repeat(8, 1).T
    actions = models.squashed(squash, u)
    assert torch.equal(actions[:, [1, 2, 3, 6]], u[:, :4])
    close(actions[:, 4], 100 + 100 * u[:, 4], 1e-6)


@pytest.mark.parametrize("far", [9.0, 60.0, 3e38])
def test_squashed_far_from_the_middle_stays_finite_and_within_the_bounds(far):
    outputs, samples = torch.tensor([[far, -far, 0.0]]), poison(1, 2)
    actions, logprobs, _ = draw_actions(outputs, log_std=torch.zeros(2), squash=bounds(2),
                                        samples=samples)
    close(actions, torch.tensor([[0.5, -2.0]]), 1e-5)
    if far < 1e30:  # log(1 - tanh² u) is 2 (log 2 - |u|) there
        expected = reference.gaussian_logprob_entropy(outputs[:, :2].double(), torch.zeros(2),
                                                      samples.double())[0]
        close(logprobs, expected - (bounds(2)[2] + 2 * (math.log(2) - samples.abs())).sum(-1), 1e-4)
    assert not actions.isnan().any() and not logprobs.isnan().any()


def test_the_entropy_of_squashed_actions_is_minus_the_mean_of_their_log_probability():
    """By torch's own draws, and as the loss reports it, which knows no formula either."""
    T, N, squash, log_std = 40, 500, bounds(2), torch.tensor([-0.5, 0.4])
    outputs, samples = torch.tensor([0.7, -0.3, 0.0]).repeat(T * N, 1), poison(T * N, 2)
    _, logprobs, _ = draw_actions(outputs, log_std=log_std, squash=squash, samples=samples)
    data = {"outputs": outputs.view(T, N, 3), "actions": samples.view(T, N, 2),
            "logprobs": logprobs.view(T, N), "values": torch.zeros(T + 1, N),
            "advantages": torch.randn(T, N, generator=generator(0)), "index": None,
            "weights": torch.ones(N), "valid": torch.ones(T + 1, N, dtype=torch.uint8),
            "log_std": log_std, "squash": squash}
    torch.manual_seed(0)
    theirs = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(outputs[0, :2], log_std.exp()),
        [torch.distributions.TanhTransform(cache_size=1),
         torch.distributions.AffineTransform(squash[0], squash[1])])
    expected = -theirs.log_prob(theirs.sample((T * N,))).sum(-1).mean().item()
    assert fused_loss(data, **COEFFICIENTS)[0]["entropy"] == pytest.approx(expected, abs=0.03)
    assert -logprobs.mean().item() == pytest.approx(expected, abs=0.03)


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected)[expected > 0].sum().item()


def test_sample_frequencies_heads_and_steps_are_independent():
    n, heads = 200_000, [3, 4]
    row = torch.tensor([0.3, -1.0, 1.2, 0.0, 2.0, 5.0, -0.5, 9.0])
    masks = torch.ones(n, 7, dtype=torch.uint8)
    masks[:, 5] = 0
    outputs = row.repeat(n, 1)
    actions, _, _ = draw_actions(outputs, heads=heads, masks=masks, step=10)
    later, _, _ = draw_actions(outputs, heads=heads, masks=masks, step=11)
    other, _, _ = draw_actions(outputs, heads=heads, masks=masks, step=10, seed=8)
    p0, p1 = (p.exp() for p in reference.log_softmax_heads(row[:-1].double(), heads,
                                                           masks[0]).split(heads))
    for left, p_left, right, p_right in ((actions[:, 0], p0, actions[:, 1], p1),  # heads
                                         (actions[:, 0], p0, later[:, 0], p0),  # steps
                                         (actions[:-1, 0], p0, actions[1:, 0], p0),  # agents
                                         (actions[:, 1], p1, other[:, 1], p1)):  # seeds
        joint = torch.bincount(left.long() * len(p_right) + right,
                               minlength=len(p_left) * len(p_right)).double()
        p = torch.outer(p_left, p_right).flatten()
        assert not joint[p == 0].any()
        freedom = int((p > 0).sum()) - 1
        assert chi_square(joint, p) < freedom + 5 * math.sqrt(2 * freedom)


def test_sample_gaussian_moments():
    n = 200_000
    mean, log_std = torch.tensor([0.5, -2.0, 0.0]), torch.tensor([0.0, -1.0, 1.0])
    outputs = torch.cat([mean, torch.zeros(1)]).repeat(n, 1)
    noise = [(draw_actions(outputs, log_std=log_std, step=step)[0].double() - mean) / log_std.double().exp()
             for step in (0, 1)]
    z = noise[0]
    assert torch.isfinite(z).all()
    assert z.mean(0).abs().max() < 5 / math.sqrt(n)
    assert (z.square().mean(0) - 1).abs().max() < 5 * math.sqrt(2 / n)
    assert z.pow(3).mean(0).abs().max() < 5 * math.sqrt(15 / n)
    assert (z.pow(4).mean(0) - 3).abs().max() < 5 * math.sqrt(96 / n)
    assert 4 < z.abs().max() < 6.5
    for a, b in ((z[:, 0], z[:, 1]), (z[:, 1], z[:, 2]), (z[:, 0], noise[1][:, 0]),
                 (z[1:, 0], z[:-1, 0])):
        assert (a * b).mean().abs() < 5 / math.sqrt(n)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_sample_is_the_same_for_any_split_and_thread_count(kind, monkeypatch):
    monkeypatch.setattr(arena, "WORTH_A_THREAD", 1)
    n, rng = 1003, generator(3)
    outputs = torch.randn(n, 8, generator=rng)
    options = ({"heads": [4, 3]} if kind == "discrete"
               else {"log_std": torch.randn(7, generator=rng)})
    masks = some_masks(rng, n, [4, 3]) if kind == "discrete" else None
    whole = [bits(x) for x in draw_actions(outputs, masks=masks, step=5, **options)]
    for count in THREAD_COUNTS:
        for cuts in ([0, n], [0, 1, n], [0, 300, 301, 777, n], [*range(0, n, 64), n]):
            with kernels.threads(count):
                parts = [draw_actions(outputs[a:b], masks=None if masks is None else masks[a:b], step=5, first_agent=a,
                                      **options) for a, b in itertools.pairwise(cuts)]
            for expected, pieces in zip(whole, zip(*parts, strict=True), strict=True):
                assert torch.equal(torch.cat([bits(p) for p in pieces]), expected)


def test_a_thread_that_chooses_keeps_to_its_own_agents():
    """Of the outputs, and of the memory that the choice works with."""
    n, rng, kept = 200, generator(3), 12345
    outputs, heads = torch.randn(n, 6, generator=rng).numpy(), np.array([3, 2])
    written = [np.full((n, width), kept, kind) for width, kind in ((2, np.int32), (1, np.float32), (1, np.float32))]
    work = np.full((n, kernels.CHOICE_ROWS + 10), kept, np.float32)
    kernels._sample_discrete_lanes(30, 171, outputs, False, np.ones((1, 1), np.uint8), heads, np.uint64(1),
                                   np.uint64(0), np.zeros(1, np.int64), False, written[0], written[1][:, 0],
                                   written[2][:, 0], work)
    for array in (*written, work):
        assert (array[:30] == kept).all() and (array[171:] == kept).all() and (array[30:171] != kept).any()


def test_sample_deterministic_is_argmax_or_mean():
    rng, heads = generator(4), [4, 3]
    outputs = torch.randn(257, 8, generator=rng)
    masks = some_masks(rng, 257, heads)
    actions, logprobs, _ = draw_actions(outputs, heads=heads, masks=masks, deterministic=True)
    logits = outputs[:, :-1].masked_fill(masks == 0, -math.inf)
    assert torch.equal(actions.long(),
                       torch.stack([x.argmax(-1) for x in logits.split(heads, -1)], -1))
    close(logprobs,
          reference.discrete_logprob_entropy(outputs[:, :-1].double(), actions, heads, masks)[0],
          2e-6)
    tie = torch.zeros(1, 4)
    assert draw_actions(tie, heads=[3], deterministic=True)[0].item() == 0
    log_std = torch.randn(7, generator=rng)
    actions, logprobs, _ = draw_actions(outputs, log_std=log_std, deterministic=True)
    assert torch.equal(actions, outputs[:, :-1])
    expected = reference.gaussian_logprob_entropy(outputs[:, :-1].double(), log_std.double(),
                                                  actions.double())[0]
    close(logprobs, expected, 1e-5)


# --------------------------------------------------------------------------------------------------
# Advantage


def rollout(T, N, seed=0, live=0.85):
    rng = generator(seed)
    truncations = flags(rng, 0.1, T, N)
    return {
        "values": torch.randn(T + 1, N, generator=rng),
        "rewards": 2 * torch.randn(T, N, generator=rng),
        "terminals": flags(rng, 0.15, T, N),
        "truncations": truncations,
        "bootstraps": torch.randn(T, N, generator=rng) * truncations,
        "ratios": (0.5 * torch.randn(T, N, generator=rng)).exp(),
        "valid": flags(rng, live, T + 1, N),
    }


GAE = {"gamma": 0.97, "gae_lambda": 0.9, "rho_clip": 1.3, "c_clip": 0.9}


def expected_advantage(data, gamma, gae_lambda, rho_clip=1.0, c_clip=1.0, reward_clip=None, mean=0.0):
    doubles = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    return reference.advantage(**doubles, gamma=gamma, lam=gae_lambda, rho_clip=rho_clip,
                               c_clip=c_clip, reward_clip=reward_clip, mean=mean)


@pytest.mark.parametrize("T", [1, 2, 17, 64])
@pytest.mark.parametrize("N", SIZES)
def test_advantage(T, N):
    data = rollout(T, N, seed=N)
    out = poison(T, N)
    kernels.advantage(**data, advantages=out, **GAE)
    close(out, expected_advantage(data, **GAE))


@BOUNDED
@given(T=st.integers(1, 9), N=st.integers(1, 40), seed=st.integers(0, 99),
       live=st.sampled_from([0.0, 0.5, 1.0]),
       reward_clip=st.sampled_from([None, 1.0]), rho_clip=st.sampled_from([0.5, 1.0, math.inf]),
       c_clip=st.sampled_from([0.5, 1.0, math.inf]), gamma=st.sampled_from([0.0, 0.99, 1.0]))
def test_advantage_any_flags(T, N, seed, live, reward_clip, rho_clip, c_clip, gamma):
    data = rollout(T, N, seed, live)
    data["valid"][-1] = seed % 2  # row T of valid is not looked at
    given_ = {"gamma": gamma, "gae_lambda": 0.95, "rho_clip": rho_clip, "c_clip": c_clip}
    out = poison(T, N)
    clip = {} if reward_clip is None else {"reward_clip": reward_clip}
    kernels.advantage(**data, advantages=out, **given_, **clip)
    close(out, expected_advantage(data, **given_, **clip))


@pytest.mark.parametrize("offset", [3.0, -20_000.0])
def test_advantage_of_values_relative_to_a_mean(offset):
    """What follows a step does not depend on the offset, and rounding does not grow with it."""
    data = rollout(17, 67)
    data["bootstraps"] *= data["terminals"] == 0  # nothing follows a terminal step
    data["rewards"] += offset  # every step pays it, so nearly all of it is in the mean
    out = poison(17, 67)
    kernels.advantage(**data, advantages=out, **GAE, mean=torch.tensor([offset]))
    close(out, expected_advantage(data, **GAE, mean=offset))


@pytest.mark.parametrize("index", [[0], [2, 2, 2], [0, 1, 1, 5, 66], list(range(67))])
def test_advantage_of_drawn_segments_equals_the_full_pass(index):
    data = rollout(13, 67)
    full, part = poison(13, 67), poison(13, 67)
    kernels.advantage(**data, advantages=full, **GAE)
    kernels.advantage(**data, advantages=part, **GAE, index=torch.tensor(index))
    chosen = torch.zeros(67, dtype=torch.bool)
    chosen[index] = True
    close(part[:, chosen], full[:, chosen], 1e-6)
    assert part[:, ~chosen].isnan().all()


# --------------------------------------------------------------------------------------------------
# Priorities, draw, gather, write back


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("N", SIZES)
def test_priorities(N, alpha):
    rng = generator(N)
    advantages, valid = torch.randn(7, N, generator=rng), flags(rng, 0.8, 8, N)
    valid[:-1, N // 2] = 0  # a dead segment: valid only in row T, which does not count
    masses = poison(N, dtype=torch.float64)
    kernels.priorities(advantages, valid, masses, alpha=alpha)
    assert masses[N // 2] == 0
    if N > 1:
        close(masses / masses.sum(), reference.priorities(advantages.double(), valid, alpha), 1e-12)
    index = torch.tensor([0, N - 1, N - 1])
    part = poison(N, dtype=torch.float64)
    kernels.priorities(advantages, valid, part, alpha=alpha, index=index)
    assert torch.equal(part[index], masses[index])
    assert part.isnan().sum() == N - len(index.unique())


def draw_segments(masses, M, *, seed=5, epoch=0, minibatch=0, beta=0.6):
    index, weights = poison(M, dtype=torch.int64), poison(M)
    kernels.draw(masses, poison(len(masses), dtype=torch.float64), index, weights, seed=seed,
                 counter=(epoch, minibatch), beta=beta)
    return index, weights


@pytest.mark.parametrize("N, M", [(1, 1), (3, 17), (257, 65), (65, 1), (1000, 257)])
def test_draw(N, M):
    masses = torch.rand(N, generator=generator(N), dtype=torch.float64) * 7
    masses[:-1:3] = 0
    seed, epoch, minibatch = 2**50 + 1, 3, 2
    index, weights = draw_segments(masses, M, seed=seed, epoch=epoch, minibatch=minibatch)
    p = masses / masses.sum()
    assert torch.equal(index, reference.draw_segments(p, M, seed, epoch, minibatch))
    assert (masses[index] > 0).all()
    close(weights, reference.importance_weights(p, 0.6)[index], 1e-6)


def test_draw_takes_no_segment_without_a_mass():
    rng = generator(3)
    masses = torch.rand(5000, generator=rng, dtype=torch.float64) * (torch.rand(5000, generator=rng)
                                                                     < 0.1)
    masses[-7:] = 0
    index, weights = draw_segments(masses, 4000)
    assert (masses[index] > 0).all() and weights.isfinite().all() and (index.diff() >= 0).all()


def test_draw_frequencies():
    masses = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    for M in (1, 3):
        drawn = torch.cat([draw_segments(masses, M, epoch=epoch, minibatch=5)[0] for epoch in range(6000)])
        counts = torch.bincount(drawn, minlength=7).double()
        assert not counts[masses == 0].any()
        assert chi_square(counts, masses / masses.sum()) < 3 + 5 * math.sqrt(6)
    masses = torch.rand(200, generator=generator(1), dtype=torch.float64)
    index, _ = draw_segments(masses, 100)
    assert not torch.equal(index, draw_segments(masses, 100, minibatch=1)[0])
    assert not torch.equal(index, draw_segments(masses, 100, epoch=1)[0])
    assert not torch.equal(index, draw_segments(masses, 100, seed=6)[0])


@BOUNDED
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_a_pass_draws_each_segment_once_if_masses_are_equal(M, minibatches, seed):
    masses = torch.full((M * minibatches,), 0.3, dtype=torch.float64)
    drawn = [draw_segments(masses, M, seed=seed, minibatch=2 * minibatches + k)[0] for k in range(minibatches)]
    assert torch.cat(drawn).sort().values.tolist() == list(range(len(masses)))
    if M > 4 < minibatches:  # and the next pass puts others together
        assert not torch.equal(drawn[0], draw_segments(masses, M, seed=seed, minibatch=3 * minibatches)[0])


@BOUNDED
@given(st.lists(st.sampled_from([0.0, 1e-300, 1.0, 1e300, math.inf, NAN]), min_size=1, max_size=9),
       st.integers(0, 99))
def test_draw_stays_in_bounds_whatever_the_masses(masses, seed):
    index, _ = draw_segments(torch.tensor(masses, dtype=torch.float64), 17, seed=seed)
    assert index.min() >= 0 and index.max() < len(masses)
    assert (index.diff() >= 0).all()
    if sum(masses) < math.inf and any(masses):
        assert all(masses[i] > 0 for i in index.tolist())


@pytest.mark.parametrize("source_dtype, dtype", [
    (torch.float32, torch.float32), (torch.uint8, torch.uint8), (torch.int32, torch.int32),
    *((dtype, torch.float32) for dtype in (torch.bool, torch.uint8, torch.int8, torch.uint16,
                                           torch.int16,
                                           torch.uint32, torch.int32, torch.uint64, torch.int64,
                                           torch.float64)),
    (torch.uint8, torch.bfloat16), (torch.uint16, torch.bfloat16)])
@pytest.mark.parametrize("tail", [(), (1,), (3, 17)])
def test_gather(tail, source_dtype, dtype):
    rng = generator()
    source = (100 * torch.rand(6, 19, *tail, generator=rng)).to(source_dtype)
    index = torch.randint(19, (11,), generator=rng)
    out = poison(5, 4, *tail, dtype=dtype)
    kernels.gather(source, index, out, start=3)
    drawn = torch.from_numpy(source.numpy()[:5, index[3:7].numpy()])
    assert torch.equal(out, drawn.to(dtype))


@pytest.mark.parametrize("source_dtype, dtype", [
    (torch.float32, torch.float32), (torch.uint8, torch.float32), (torch.float32, torch.bfloat16),
    (torch.int64, torch.float32), (torch.float64, torch.float32)])
@pytest.mark.parametrize("tail", [(1,), (3, 17)])
def test_gather_normalises(tail, source_dtype, dtype):
    rng = generator()
    source = (100 * torch.rand(6, 19, *tail, generator=rng)).to(source_dtype)
    shift, scale = 40 + 20 * torch.rand(tail, generator=rng), 0.3 + 0.2 * torch.rand(tail, generator=rng)
    if source.element_size() == 8:  # float32 has every hundredth number there
        source, shift = source + 10**9, shift.double() + 10**9
    index = torch.randint(19, (11,), generator=rng)
    out = poison(5, 4, *tail, dtype=dtype)
    kernels.gather(source, index, out, start=3, shift=shift, scale=scale)
    expected = ((source[:5, index[3:7]].double() - shift) * scale).clamp(-10, 10)
    assert (expected.abs() == 10).any() and (expected.abs() < 10).any()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_gather_errors():
    source, index = torch.zeros(4, 6, 2), torch.arange(6)
    for out, start in ((torch.zeros(5, 3, 2), 0), (torch.zeros(4, 3, 3), 0),
                       (torch.zeros(4, 3, 2), 4)):
        with pytest.raises(ValueError, match="gather"):
            kernels.gather(source, index, out, start=start)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match=f"source is {dtype}"):
            kernels.gather(source.to(dtype), index, torch.zeros(4, 3, 2))


@pytest.mark.parametrize("N", SIZES)
def test_write_back(N):
    rng = generator(N)
    index = torch.randint(N, (5,), generator=rng).sort().values
    columns = torch.randn(2, 4, N, generator=rng)[:, :, index]
    values, ratios = torch.randn(5, N, generator=rng), torch.randn(4, N, generator=rng)
    expected_values, expected_ratios = values.clone(), ratios.clone()
    expected_values[:4, index], expected_ratios[:, index] = columns
    counter = torch.tensor([3, 7])
    kernels.write_back(index, *(c.contiguous() for c in columns), counter, values, ratios)
    assert torch.equal(values, expected_values) and torch.equal(ratios, expected_ratios)
    assert counter.tolist() == [3, 8]


# --------------------------------------------------------------------------------------------------
# MinGRU


def segments(T, M, H, seed=0, columns=None, resets=0.2, live=0.8, rows=0):
    rng = generator(seed)
    columns = columns or M
    return {"hgp": 2 * torch.randn(T, M, 3 * H, generator=rng),
            "x": torch.randn(T, M, H, generator=rng),
            "states": torch.cat([torch.randn(1, M, H, generator=rng), poison(T, M, H)]),
            "resets": flags(rng, resets, T + rows, columns),
            "valid": flags(rng, live, T + rows, columns)}


def check_mingru(T, M, H, seed=0, start=0, columns=None, resets=0.2, live=0.8, drawn=False):
    data = segments(T, M, H, seed, columns, resets, live, rows=seed % 2)
    rng = generator(seed + 1)
    out, dy = poison(T, M, H), torch.randn(T, M, H, generator=rng)
    columns = data["resets"].shape[1]
    index = torch.randint(columns, (start + M,), generator=rng) if drawn else None
    where = {"start": start, "index": index}
    hgp, x = data["hgp"].double().requires_grad_(), data["x"].double().requires_grad_()
    initial = None
    if drawn:  # the initial states of all agents, of which the drawn ones' are taken
        initial, data["states"] = torch.randn(columns, H, generator=rng), poison(T + 1, M, H)
        where["initial"] = initial
    kernels.mingru_scan(**data, out=out, **where)
    where.pop("initial", None)
    chosen = (torch.arange(columns) if index is None else index)[start : start + M]
    resets, valid = (data[name][:T, chosen] for name in ("resets", "valid"))
    expected, states = reference.mingru_layer(x, hgp, data["states"][0].double(), resets, valid)
    assert initial is None or torch.equal(data["states"][0], initial[chosen])
    close(out, expected, 2e-6)
    close(data["states"][1:], states, 2e-6)
    expected.backward(dy.double())
    dhgp, dx, sums = data["hgp"].clone(), dy.clone(), poison(M, 3 * H)
    kernels.mingru_scan_grad(dhgp, data["x"], data["states"], data["resets"], data["valid"], dx,
                             sums, **where)
    close(dhgp, hgp.grad, 1e-5)
    close(sums, hgp.grad.sum(0), 1e-5)
    close(dx, x.grad, 1e-5)


@pytest.mark.parametrize("T, M, H",
                         [(1, 1, 1), (3, 17, 3), (17, 3, 65), (64, 5, 64), (9, 65, 17), (2, 257, 1),
                          (65, 1, 257)])
def test_mingru_scan_and_every_gradient(T, M, H):
    check_mingru(T, M, H)


@BOUNDED
@given(T=st.integers(1, 8), M=st.integers(1, 9), H=st.integers(1, 35), start=st.integers(0, 4),
       extra=st.integers(0, 3), resets=st.sampled_from([0.0, 0.3, 1.0]),
       live=st.sampled_from([0.0, 0.6, 1.0]),
       drawn=st.booleans(), seed=st.integers(0, 99))
def test_mingru_scan_any_flags(T, M, H, start, extra, resets, live, drawn, seed):
    check_mingru(T, M, H, seed, start, start + M + extra, resets, live, drawn)


@pytest.mark.parametrize("T, M, H", [(17, 3, 65), (9, 65, 16), (5, 130, 1)])
def test_mingru_scan_equals_the_step_by_step_rollout(T, M, H):
    data = segments(T, M, H)
    out, hgp = poison(T, M, H), data["hgp"].clone()
    kernels.mingru_scan(**data, out=out)
    state = data["states"][0].clone()
    for t in range(T):
        y = poison(M, H)
        kernels.mingru_step(hgp[t], data["x"][t], state, data["resets"][t], data["valid"][t], y)
        close(y, out[t], 1e-6)
        close(state, data["states"][t + 1], 1e-6)


@pytest.mark.parametrize("M, H", [(1, 1), (3, 17), (65, 3), (257, 65)])
def test_mingru_step(M, H):
    data = segments(1, M, H, seed=M)
    state, out = data["states"][0].clone(), poison(M, H)
    expected, states = reference.mingru_layer(
        data["x"].double(), data["hgp"].double(), state.double(), data["resets"], data["valid"])
    kernels.mingru_step(data["hgp"][0], data["x"][0], state, data["resets"][0],
                        data["valid"][0], out)
    close(out, expected[0], 2e-6)
    close(state, states[0], 2e-6)


@pytest.mark.parametrize("T, M, H", [(3, 5, 7), (9, 4, 64)])
def test_mingru_in_bfloat16(T, M, H):
    """The same as in float32 from the rounded inputs, but for the rounding of what is written."""
    rng = generator(H)
    hgp, x, grad_out = (torch.randn(T, M, width, generator=rng).bfloat16()
                        for width in (3 * H, H, H))
    resets, valid, states = flags(rng, 0.2, T, M), flags(rng, 0.8, T, M), torch.randn(T + 1, M, H, generator=rng)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        y, s, step_state = poison(T, M, H).to(dtype), states.clone(), states[0].clone()
        d_hgp, dy = hgp.to(dtype, copy=True), grad_out.to(dtype, copy=True)
        kernels.mingru_scan(d_hgp, x.to(dtype), s, resets, valid, y)
        sums = poison(M, 3 * H)
        kernels.mingru_scan_grad(d_hgp, x.to(dtype), s, resets, valid, dy, sums)
        step = poison(M, H).to(dtype)
        kernels.mingru_step(hgp[0].to(dtype), x[0].to(dtype), step_state, resets[0], valid[0], step)
        results.append((y, s, d_hgp, dy, sums, step, step_state))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected.to(actual.dtype), actual)


def test_mingru_extreme_gates_stay_finite():
    """Gates far in saturation; rounding is that of the largest state, which is about 5e4."""
    data = segments(4, 3, 5)
    data["hgp"] *= 1e4
    out = poison(4, 3, 5)
    expected, _ = reference.mingru_layer(data["x"].double(), data["hgp"].double(),
                                         data["states"][0].double(), data["resets"], data["valid"])
    kernels.mingru_scan(**data, out=out)
    close(out / 5e4, expected / 5e4, 1e-6)


# --------------------------------------------------------------------------------------------------
# PPO loss


COEFFICIENTS = {"clip_coef": 0.2, "vf_coef": 1.7, "vf_clip_coef": 0.3, "ent_coef": 0.05}


def bounds(dims, mixed=False):
    """models.squash's of some space; mixed: of each three numbers one has no upper bound, one no bound."""
    low, high = -1.0 - torch.arange(dims), torch.linspace(0.5, 4.0, dims)
    if mixed:
        low[1::3], high[1::3], low[2::3], high[2::3] = 7.0, np.inf, -np.inf, np.inf
    space = gymnasium.spaces.Box(low.numpy(), high.numpy(), (dims,), np.float32)
    return models.squash(torch.nn.Identity(), space).action_squash


def minibatch(T, B, *, heads=None, dims=None, masked=False, seed=0, live=0.8, spread=0.4,
              N=None, wide=False, squash=False):
    """Inputs of one loss over B segments, which are columns `index` of a rollout of N (all in
    order if N is None); at least one step is valid. `wide`: the log-std has a row for every
    step of every segment."""
    rng = generator(seed)
    index = None if N is None else torch.randint(N, (B,), generator=rng).sort().values
    N, columns = N or B, slice(None) if index is None else index
    width = (sum(heads) if heads else dims) + 1
    outputs = torch.randn(T, N, width, generator=rng)
    # row T is not looked at
    data = {"values": torch.cat([torch.randn(T, N, generator=rng), poison(1, N)]),
            "advantages": 2 * torch.randn(T, N, generator=rng) + 0.3,
            "weights": torch.rand(B, generator=rng) + 0.5,
            "valid": flags(rng, live, T + 1, N), "index": index}
    data["valid"][T // 2, N // 2 if index is None else index[B // 2]] = 1
    if heads:
        masks = some_masks(rng, (T + 1) * N, heads) if masked else None
        flat = outputs[..., :-1].reshape(T * N, -1)
        mask = masks[: T * N] if masked else None
        logp = reference.log_softmax_heads(flat, heads, mask)
        actions = torch.stack([torch.multinomial(p.exp(), 1, generator=rng)[:, 0] for p in logp.split(heads, -1)], -1)
        logprobs, _ = reference.discrete_logprob_entropy(flat.double(), actions, heads, mask)
        data |= {"heads": torch.tensor(heads), "actions": actions.int().view(T, N, -1)}
        if masked:
            data["masks"] = masks.view(T + 1, N, -1)
            outputs[..., :-1] += 40 * (data["masks"][:T] == 0)
    else:
        log_std = 0.4 * torch.randn(*((T, N) if wide else ()), dims, generator=rng)
        data["actions"] = outputs[..., :-1] + log_std.exp() * torch.randn(T, N, dims, generator=rng)
        known = outputs[..., :-1].double(), log_std.double(), data["actions"].double()
        logprobs, _ = reference.gaussian_logprob_entropy(*known)
        if squash:
            data["squash"] = bounds(dims, squash == "mixed")
            logprobs, _ = reference.squashed_logprob_entropy(*known, data["squash"].double())
        data["log_std"] = log_std[:, columns].contiguous() if wide else log_std
    data["logprobs"] = logprobs.view(T, N).float() + spread * torch.randn(T, N, generator=rng)
    data["outputs"] = outputs[:, columns].contiguous()
    return data


def drawn(data, name):
    """A rollout array's rows and columns that the loss is about; floats as float64."""
    array = data[name][: len(data["outputs"])]
    array = array if data["index"] is None else array[:, data["index"]]
    return array.double() if array.is_floating_point() else array


def expected_loss(data, **coefficients):
    """(statistics, d loss/d outputs, d loss/d log_std or None) of the reference."""
    outputs = data["outputs"].double().requires_grad_()
    log_std = data["log_std"].double().requires_grad_() if "log_std" in data else None
    on, rows = drawn(data, "valid") != 0, log_std
    if log_std is not None and log_std.ndim > 1:
        # the reference takes one log-std a row as well, once only the valid rows are left
        rows = log_std[on]
    loss = reference.ppo_loss(
        outputs[..., :-1], outputs[..., -1],
        *(drawn(data, name) for name in ("actions", "logprobs", "values", "advantages")),
        data["weights"].double(), drawn(data, "valid"), **coefficients,
        heads=data["heads"].tolist() if "heads" in data else None, log_std=rows,
        mask=drawn(data, "masks") if "masks" in data else None,
        squash=data["squash"].double() if "squash" in data else None)
    loss["loss"].backward()
    return loss, outputs.grad, None if log_std is None else log_std.grad


def loss_settings(data, **coefficients):
    index = torch.arange(data["valid"].shape[1]) if data["index"] is None else data["index"]
    moments = kernels.advantage_moments(data["advantages"], data["valid"], index)
    settings = torch.tensor([coefficients.get(name, 0.0) for name in kernels.LOSS_SETTINGS])
    kernels.normalisation(moments, settings)
    return settings


def run_loss(data, settings_, outputs, grad, new_values, ratios, sums, grad_log_std=None, start=0,
             log_std=None):
    batch = [data[name]
             for name in ("actions", "logprobs", "values", "advantages", "weights", "valid")]
    kernels.ppo_loss(outputs, *batch, settings_, grad, new_values, ratios, sums,
                     heads=data.get("heads"),
                     log_std=log_std, grad_log_std=grad_log_std, masks=data.get("masks"),
                     squash=data.get("squash"), index=data["index"], start=start)


def fused_loss(data, chunks=None, **coefficients):
    """(statistics, grad, grad_log_std or None, ratios, new_values, sums) of the kernel,
    in chunks of segments."""
    T, B, width = data["outputs"].shape
    settings_ = loss_settings(data, **coefficients)
    new_values, ratios = poison(T, B), poison(T, B)
    sums = torch.zeros(kernels.SUMS, dtype=torch.float64)
    continuous = "log_std" in data
    grads, spreads, start = [], [], 0
    for M in chunks or [B]:
        here = slice(start, start + M)
        grad, grad_log_std = poison(T, M, width), poison(T, M, width - 1) if continuous else None
        log_std = data.get("log_std")
        if continuous and log_std.ndim > 1:
            log_std = log_std[:, here].contiguous()
        run_loss(data, settings_, data["outputs"][:, here].contiguous(), grad, new_values, ratios,
                 sums, grad_log_std, start, log_std)
        grads.append(grad)
        spreads.append(grad_log_std)
        start += M
    spreads = torch.cat(spreads, 1) if continuous else None
    return kernels.loss_statistics(sums), torch.cat(grads, 1), spreads, ratios, new_values, sums


@pytest.mark.parametrize("low", [-math.inf, float(np.finfo(np.float32).min)])
def test_logits_that_rule_a_choice_out_are_a_mask(low):
    """A network may mask by itself: the same loss, gradient and entropy as with a mask."""
    data = minibatch(7, 5, heads=[4, 3], masked=True)
    masked = fused_loss(data, **COEFFICIENTS)
    allowed = data.pop("masks")[:7] != 0
    data["outputs"][..., :-1] = torch.where(allowed, data["outputs"][..., :-1], low)
    for expected, actual in zip(masked[1:], fused_loss(data, **COEFFICIENTS)[1:], strict=True):
        if expected is not None:
            close(actual, expected, 1e-6)


@pytest.mark.parametrize("low", [-math.inf, float(np.finfo(np.float32).min), -1e30])
@pytest.mark.parametrize("heads", [[6], [4, 3, 2]])
def test_entropy_and_gradient_of_a_networks_own_mask_are_those_of_categorical(heads, low):
    data = minibatch(7, 5, heads=heads, masked=True)
    ruled_out = data.pop("masks")[:7] == 0
    data["outputs"][..., :-1] = data["outputs"][..., :-1].masked_fill(ruled_out, low)
    statistics, grad, *_ = fused_loss(data, **{**COEFFICIENTS, "ent_coef": 1.0, "vf_coef": 0.0})
    without = fused_loss(data, **{**COEFFICIENTS, "ent_coef": 0.0, "vf_coef": 0.0})[1]
    logits = data["outputs"][..., :-1].double().requires_grad_()
    parts = [torch.distributions.Categorical(logits=head) for head in logits.split(heads, -1)]
    live = drawn(data, "valid") != 0
    entropy = sum(part.entropy() for part in parts)[live].mean()
    entropy.backward()
    assert statistics["entropy"] == pytest.approx(entropy.item(), abs=1e-5)
    close((without - grad)[..., :-1], logits.grad, 1e-5)


def test_a_draw_tells_of_a_nan_whatever_beta_is():
    """NaN to the power of zero is 1."""
    for broken in (math.nan, math.inf):
        masses = torch.ones(8, dtype=torch.float64)
        masses[6] = broken
        index, weights = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
        kernels.draw(masses, torch.zeros(8, dtype=torch.float64), index, weights, seed=1,
                     counter=(0, 0), beta=0.0)
        assert weights.isnan().all() and ((index >= 0) & (index < 8)).all()


def check_loss(data, tolerance=1e-5, chunks=None, **coefficients):
    coefficients = COEFFICIENTS | coefficients
    statistics, grad, grad_log_std, ratios, new_values, _ = fused_loss(data, chunks, **coefficients)
    expected, expected_grad, expected_grad_log_std = expected_loss(data, **coefficients)
    count = int((drawn(data, "valid") != 0).sum())
    for name, value in statistics.items():
        if name == "explained_variance" and not expected[name].isfinite():
            continue  # there is no variance to explain; rounding decides what comes out
        close(value, expected[name].detach(), tolerance)
    total = (statistics["policy_loss"] + coefficients["vf_coef"] * statistics["value_loss"]
             - coefficients["ent_coef"] * statistics["entropy"])
    close(total, expected["loss"].detach(), tolerance)
    close(grad * count, expected_grad * count, 2 * tolerance)
    close(ratios, expected["ratio"], tolerance)
    live, old = drawn(data, "valid") != 0, drawn(data, "values").float()
    assert torch.equal(new_values, torch.where(live, data["outputs"][..., -1], old))
    if grad_log_std is not None:
        if data["log_std"].ndim == 1:
            close(grad_log_std.double().sum((0, 1)), expected_grad_log_std, tolerance)
        else:
            close(grad_log_std * count, expected_grad_log_std * count, 2 * tolerance)


KINDS = [{"heads": [3]}, {"heads": [1]}, {"heads": [2, 5, 3]}, {"heads": [3], "masked": True},
         {"heads": [4, 3], "masked": True}, {"dims": 1}, {"dims": 4}, {"dims": 3, "wide": True},
         {"dims": 3, "squash": True}, {"dims": 2, "squash": True, "wide": True},
         {"dims": 4, "squash": "mixed"}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("T, B", [(1, 1), (3, 17), (17, 3), (5, 65), (64, 9)])
def test_ppo_loss_and_every_gradient(T, B, kind):
    check_loss(minibatch(T, B, **kind, seed=T))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("T, B, N", [(3, 5, 17), (5, 9, 4), (2, 1, 3)])
def test_ppo_loss_of_drawn_segments(T, B, N, kind):
    """The rollout read through `index`, a segment drawn twice counting twice; other
    columns do not matter."""
    data = minibatch(T, B, **kind, N=N, seed=B)
    for name in ("values", "advantages", "logprobs"):
        unused = torch.ones(N, dtype=torch.bool)
        unused[data["index"]] = False
        data[name][:, unused] = NAN
    check_loss(data)
    check_loss(data, chunks=[B - B // 2, B // 2] if B > 1 else [1])


@BOUNDED
@given(T=st.integers(1, 6), B=st.integers(1, 8), N=st.sampled_from([None, 5]),
       kind=st.sampled_from(KINDS), seed=st.integers(0, 999),
       live=st.sampled_from([0.0, 0.5, 1.0]), clip_coef=st.sampled_from([0.0, 0.1, 0.67]),
       vf_clip_coef=st.sampled_from([0.05, 10.0]), ent_coef=st.sampled_from([0.0, 0.5]))
def test_ppo_loss_any_settings(T, B, N, kind, seed, live, clip_coef, vf_clip_coef, ent_coef):
    check_loss(minibatch(T, B, **kind, N=N, seed=seed, live=live), clip_coef=clip_coef,
               vf_clip_coef=vf_clip_coef, ent_coef=ent_coef)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ppo_loss_at_ratio_one(kind):
    """The first minibatch of an epoch: both sides of each max are equal, and the
    gradient must not vanish."""
    check_loss(minibatch(5, 7, **kind, spread=0.0))


def test_ppo_loss_clamps_the_log_ratio():
    data = minibatch(4, 6, heads=[3])
    data["logprobs"][0] += 30
    data["logprobs"][1] -= 30
    statistics, grad, _, ratios, *_ = fused_loss(data, **COEFFICIENTS)
    expected, expected_grad, _ = expected_loss(data, **COEFFICIENTS)
    torch.testing.assert_close(ratios.double(), expected["ratio"], rtol=3e-6, atol=0)
    assert statistics["policy_loss"] == pytest.approx(expected["policy_loss"].item(), rel=1e-5)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [{"heads": [2, 3], "masked": True}, {"dims": 3}], ids=str)
def test_ppo_loss_in_chunks_equals_the_whole(kind):
    data = minibatch(9, 17, **kind)
    whole, pieces = fused_loss(data, **COEFFICIENTS), fused_loss(data, [1, 5, 11], **COEFFICIENTS)
    for a, b in zip(whole[1:], pieces[1:], strict=True):
        if a is not None:
            close(b, a, 1e-6)
    check_loss(data, chunks=[16, 1])


def test_ppo_loss_writes_only_its_chunk():
    data = minibatch(3, 8, heads=[3])
    new_values, ratios = poison(3, 8), poison(3, 8)
    sums = torch.zeros(kernels.SUMS, dtype=torch.float64)
    run_loss(data, loss_settings(data, **COEFFICIENTS), data["outputs"][:, 2:5].contiguous(),
             poison(3, 3, 4), new_values, ratios, sums, start=2)
    for written in (new_values, ratios):
        assert written[:, 2:5].isfinite().all()
        assert written[:, :2].isnan().all() and written[:, 5:].isnan().all()
    assert sums[-1] == int(data["valid"][:3, 2:5].sum())


def test_ppo_loss_sums_are_added_to():
    data = minibatch(3, 4, dims=2)
    once = fused_loss(data, **COEFFICIENTS)[-1]
    sums = once.clone()
    run_loss(data, loss_settings(data, **COEFFICIENTS), data["outputs"], poison(3, 4, 3),
             poison(3, 4), poison(3, 4), sums, poison(3, 4, 2), log_std=data["log_std"])
    close(sums, 2 * once, 1e-12)


def test_explained_variance_of_large_returns():
    """Returns of 1,000 ± 1 that the value explains to 10%: their squares must
    not be summed in float32."""
    data = minibatch(64, 65, heads=[3], live=1.0)
    data["values"] = 1000 + data["values"]
    data["advantages"] *= 0.1
    noise = torch.randn(64, 65, generator=generator(9))
    data["outputs"][..., -1] = data["values"][:-1] + data["advantages"] + 0.3 * noise
    statistics = fused_loss(data, **COEFFICIENTS)[0]
    expected = expected_loss(data, **COEFFICIENTS)[0]
    close(statistics["explained_variance"], expected["explained_variance"], 1e-3)


def test_loss_statistics_of_nothing_and_of_constant_returns():
    assert kernels.loss_statistics(torch.zeros(kernels.SUMS, dtype=torch.float64))["policy_loss"] == 0
    data = minibatch(3, 4, heads=[2], live=1.0)
    data["values"].fill_(0.5)
    data["advantages"].fill_(0.25)
    assert math.isnan(fused_loss(data, **COEFFICIENTS)[0]["explained_variance"])


@pytest.mark.parametrize("N", SIZES)
def test_advantage_moments_and_normalisation(N):
    rng = generator(N)
    advantages, valid = 3 * torch.randn(9, N, generator=rng) + 100, flags(rng, 0.7, 10, N)
    valid[0, 0] = 1
    index = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(N, (11,), generator=rng)])
    chosen = advantages[:, index].double()[valid[:-1, index] != 0]
    moments = kernels.advantage_moments(advantages, valid, index)
    close(moments,
          torch.stack([torch.tensor(len(chosen)).double(), chosen.sum(), chosen.square().sum()]),
          1e-12)
    settings = torch.full((len(kernels.LOSS_SETTINGS),), 7.0)
    kernels.normalisation(moments, settings)
    mean, scale, row_scale = settings[:3].double()
    close(mean, chosen.mean(), 1e-7)
    close(row_scale, 1 / len(chosen), 1e-7)
    if chosen.std(correction=0) > 0:
        close(1 / scale, chosen.std(correction=0), 1e-7)
    assert (settings[3:] == 7).all()
    nothing = torch.zeros(3, dtype=torch.float64)  # no valid step: finite, and nothing to scale
    kernels.normalisation(nothing, settings)
    assert settings.isfinite().all()


@pytest.mark.parametrize("n, columns",
                         [(1, 1), (5, 3), (1000, 64), (7, 192), (70, 300), (5000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rows(n, columns, dtype):
    """To what is there, or in its place, whatever it was."""
    rng = generator(n)
    rows, gradient = torch.randn(n, columns, generator=rng).to(dtype), torch.randn(columns, generator=rng)
    fresh, expected = poison(columns), rows.double().sum(0)
    kernels.add_rows([(rows, fresh)], add=False)
    close(fresh, expected, 1e-6 * n**0.5)
    expected += gradient.double()
    more, other, wanted = rows.float()[::2].contiguous(), gradient.clone(), gradient + rows.float()[::2].sum(0)
    kernels.add_rows([(rows, gradient), (more, other)])
    close(gradient, expected, 1e-6 * n**0.5)
    close(other, wanted, 1e-5 * n**0.5)


# --------------------------------------------------------------------------------------------------
# Muon


class Weights(torch.nn.Module):
    def __init__(self, shapes, seed=0):
        super().__init__()
        rng = generator(seed)
        self.tensors = torch.nn.ParameterList([torch.randn(shape, generator=rng)
                                               for shape in shapes])


SHAPES = [(4, 9), (9, 4), (6, 6), (5,), (3, 2, 2, 2), (6, 6), (1, 7), (7, 1), (9, 4), (192, 64),
          (65, 118), (1,)]


@pytest.mark.parametrize("products", ["fast/tile.c", "torch", "together"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
@pytest.mark.parametrize("momentum, weight_decay", [(0.95, 0.1), (0.0, 0.0)])
def test_muon(momentum, weight_decay, max_grad_norm, products, monkeypatch):
    together = products == "together"
    if not together and kernels.on_gpu(torch.zeros(1)):
        pytest.skip("on a GPU small matrices go together")
    if products == "torch":  # as for large matrices
        monkeypatch.setattr(optim, "missing", lambda: "no C compiler was found")
    module = Weights(SHAPES)
    arena, optimizer = adopted(module, lambda a: optim.Muon(a, momentum, weight_decay,
                                                              max_grad_norm, together))
    expected = [p.detach().double() for p in module.parameters()]
    momenta, rng = [torch.zeros_like(p) for p in expected], generator(1)
    for step in range(4):
        grads = [torch.randn(p.shape, generator=rng) for p in module.parameters()]
        if step == 1:
            grads[0].zero_()
        for p, g in zip(module.parameters(), grads, strict=True):
            p.grad.copy_(g)
        before, old = [p.detach().double() for p in module.parameters()], expected
        norm = optimizer.step(0.02)
        doubles = [g.double() for g in grads]
        expected, momenta = reference.muon_step(expected, doubles, momenta, 0.02, momentum,
                                                weight_decay,
                                                torch.tensor(max_grad_norm, dtype=torch.float64))
        assert norm == pytest.approx(torch.cat([g.flatten() for g in doubles]).norm().item(),
                                     rel=1e-6)
        for p, start, was, now, m, name in zip(module.parameters(), before, old, expected, momenta,
                                               dict(module.named_parameters()), strict=True):
            delta, change = p.detach().double() - start, now - was
            size = max(change.norm().item(), 1e-30)
            rounding = 2.0**-23 * was.norm().item()  # of the weight that the step is added to
            assert (delta - change).norm() < 1e-5 * size + rounding
            close(p.detach(), now, 1e-5)
            close(arena[f"momentum/policy.{name}"], m, 1e-6)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_muon_leaves_what_is_frozen(together):
    """Weights and momentum, bit for bit, and the others as if the frozen were not there."""
    frozen, grads = [0, 2, 3, 9, 11], [torch.randn(shape, generator=generator(7))
                                       for shape in SHAPES]
    names = [f"policy.tensors.{i}" for i in frozen]
    rest = [i for i in range(len(SHAPES)) if i not in frozen]
    few = Weights([SHAPES[i] for i in rest])

    def make(arena):
        return optim.Muon(arena, 0.9, 0.1, 1.0, together)

    module = Weights(SHAPES)
    (arena, optimizer), (_, other) = adopted(module, make), adopted(few, make)
    for i, parameter in zip(rest, few.parameters(), strict=True):
        parameter.data.copy_(module.tensors[i])

    def step(everything):
        for gradient, parameter in zip(grads, module.parameters(), strict=True):
            parameter.grad.copy_(gradient)
        for i, parameter in zip(rest, few.parameters(), strict=True):
            parameter.grad.copy_(grads[i])
        optimizer.step(0.02)
        if not everything:
            other.step(0.02)

    optimizer.freeze(names)
    before = [(module.tensors[i].clone(), arena[f"momentum/policy.tensors.{i}"].clone())
              for i in frozen]
    for _ in range(3):
        step(False)
    for i, (weight, momentum) in zip(frozen, before, strict=True):
        assert (torch.equal(module.tensors[i], weight)
                and torch.equal(arena[f"momentum/policy.tensors.{i}"], momentum))
    for i, parameter in zip(rest, few.parameters(), strict=True):
        close(module.tensors[i].detach(), parameter.detach(), 1e-5)
    optimizer.freeze([])
    step(True)
    assert all(not torch.equal(module.tensors[i], weight)
               for i, (weight, _) in zip(frozen, before, strict=True))


def test_muon_matrix_step_within_1e_5_of_the_reference():
    """The update alone, from weights of zero, so that no rounding of a weight hides it."""
    for shape in [(64, 64), (192, 64), (64, 118), (17, 3), (3, 257), (1, 1), (2, 5), (128, 90)]:
        module = Weights([shape, shape])
        _, optimizer = adopted(module, lambda a: optim.Muon(a, 0.9, 0.0, 1e9))
        for p in module.parameters():
            p.data.zero_()
            p.grad.copy_(torch.randn(shape, generator=generator(p.numel())))
        optimizer.step(1.0)
        for p in module.parameters():
            u = p.grad.double()
            expected = -reference.newton_schulz(u) * math.sqrt(max(1, shape[0] / shape[1]))
            assert (p.detach() - expected).norm() < 1e-5 * expected.norm()


def test_muon_gives_the_same_on_any_number_of_threads(monkeypatch):
    """Each matrix has scratch of its own."""
    monkeypatch.setattr(arena, "WORTH_A_THREAD", 1)

    def weights(count):
        module = Weights([(60, 60)] * 8)
        memory, optimizer = adopted(module, lambda a: optim.Muon(a, 0.9, 0.0, 1e9))
        memory.flat("gradients").copy_(torch.randn(memory.flat("gradients").shape, generator=generator(1)))
        with kernels.threads(count):
            for _ in range(10):
                optimizer.step(0.1)
        return memory.flat("weights").clone()

    assert torch.equal(weights(1), weights(3))


def test_muon_recovers_from_what_is_not_finite():
    """A momentum may be set from outside."""
    module, fresh = Weights([(5, 7)]), Weights([(5, 7)])
    fresh.load_state_dict(module.state_dict())
    (arena, optimizer), (_, other) = (adopted(one, lambda a: optim.Muon(a, 0.9, 0.0, 1e9)) for one in (module, fresh))
    before = arena.flat("weights").clone()
    arena.flat("momentum").fill_(math.nan)
    optimizer.step(0.1)
    arena.flat("momentum").zero_()
    arena.flat("weights").copy_(before)
    for one in (module, fresh):
        one.tensors[0].grad.fill_(0.5)
    optimizer.step(0.1), other.step(0.1)
    assert torch.equal(module.tensors[0], fresh.tensors[0])


def test_muon_puts_small_matrices_together():
    """In few groups, none of which is large where its members are small; each matrix once."""
    shapes = [(64, 118), (192, 64), (192, 64), (4, 64), (512, 3000), (600, 512), (3, 40_000),
              (512, 3000)]
    _, optimizer = adopted(Weights(shapes), lambda a: optim.Muon(a, together=True))
    groups = {shape: len(members) for shape, members in optimizer._shapes.items()}
    assert groups == {(512, 3000): 2, (512, 600): 1, (3, 40_000): 1, (64, 192): 4}


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_muon_of_vectors_and_of_doubles_by_default(together):
    torch.set_default_dtype(torch.float64)
    try:
        for shapes in ([(5,), (3,)], [(5, 3), (3,)]):
            module = Weights(shapes).float()
            _, optimizer = adopted(module, lambda a: optim.Muon(a, together=together))
            before = [p.detach().clone() for p in module.parameters()]
            for p in module.parameters():
                p.grad.fill_(0.1)
            optimizer.step(0.1)
            assert all((p != old).any() for p, old in zip(module.parameters(), before, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_muon_zero_gradient_gives_a_zero_step_and_gaps_stay_zero(together):
    if not together and kernels.on_gpu(torch.zeros(1)):
        pytest.skip("on a GPU small matrices go together")
    module = Weights(SHAPES)
    arena, optimizer = adopted(module, lambda a: optim.Muon(a, 0.9, 0.0, 1.0, together))
    before = arena.flat("weights").clone()
    assert optimizer.step(0.1) == 0
    assert torch.equal(arena.flat("weights"), before)
    arena.flat("weights").zero_()
    for p in module.parameters():
        p.grad.fill_(1)
    optimizer.step(0.1)
    for group in ("weights", "gradients", "momentum", *(() if together else ("updates",))):
        flat, used = arena.flat(group), torch.zeros(arena.flat(group).numel(), dtype=torch.bool)
        for name in dict(module.named_parameters()):
            view = arena[f"{group}/policy.{name}"]
            first = (view.data_ptr() - flat.data_ptr()) // 4
            used[first : first + view.numel()] = True
            assert view.any()
        assert used.sum() == sum(p.numel() for p in module.parameters())
        assert not flat[~used].any()


def test_muon_against_torch(monkeypatch):
    """torch's takes one (a, b, c), damps its momentum (which the normalisation undoes)
    and works in bfloat16."""
    triple = (3.4445, -4.7750, 2.0315)
    monkeypatch.setattr(optim, "NEWTON_SCHULZ", (triple,) * 5)
    shapes = [(64, 118), (192, 64), (40, 64), (17, 17)]
    module, theirs = Weights(shapes), Weights(shapes)
    _, optimizer = adopted(module, lambda a: optim.Muon(a, 0.9, 0.1, 1e9))
    other = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, momentum=0.9,
                             nesterov=True,
                             ns_coefficients=triple, ns_steps=5, adjust_lr_fn="original")
    rng = generator(2)
    for _ in range(4):
        starts = [p.detach().clone() for p in module.parameters()]
        for p, q in zip(module.parameters(), theirs.parameters(), strict=True):
            q.data.copy_(p.data)
            p.grad.copy_(torch.randn(p.shape, generator=rng))
            q.grad = p.grad.clone()
        optimizer.step(0.02)
        other.step()
        for p, q, start in zip(module.parameters(), theirs.parameters(), starts, strict=True):
            assert (p - q).norm() < 2e-2 * (q - start).norm()


def test_muon_steps_an_adopted_lstm():
    module = Recurrent()
    arena, optimizer = adopted(module, lambda a: optim.Muon(a, 0.9, 0.0, 1.0))
    assert len({arena.flat(g).numel() for g in ("weights", "gradients", "momentum", "updates")}) == 1
    torch.manual_seed(0)
    x, losses = torch.randn(9, 4, 5), []
    for _ in range(20):
        arena.flat("gradients").zero_()
        loss = (module(x) - 1).square().mean()
        loss.backward()
        optimizer.step(0.02)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("n", [1, 3, 4095, 4096, 4097, 100_001])
def test_gradient_norm(n):
    flat = torch.randn(n, generator=generator(n)) * 1e3
    assert kernels.gradient_norm(flat) == pytest.approx(flat.double().norm().item(), rel=1e-12)


def test_learning_rate_of_one_call_does_not_stick():
    module = Weights([(3, 3)])
    _, optimizer = adopted(module, lambda a: optim.Muon(a, 0.0, 0.0, 1e9))
    deltas = []
    for rate in (0.1, 0.0, 0.2):
        module.tensors[0].grad.copy_(torch.eye(3))
        before = module.tensors[0].detach().clone()
        optimizer.step(rate)
        deltas.append(module.tensors[0].detach() - before)
    assert not deltas[1].any()
    close(deltas[2], 2 * deltas[0], 1e-6)
