"""Every kernel against float64 (tests/kernel_cases.py, tests/reference.py): values and gradients at
odd sizes, NaNs that stay, errors that name the tensor, the same bits for any split.

    python -m pytest tests/test_kernels.py -k advantage
"""

import itertools
import math

import gymnasium
import kernel_cases as cases
import numba
import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import NAN, bits, close

import arena
import kernels
import models
from arena import threads

pytestmark = pytest.mark.usefixtures("one_torch_thread")
BOUNDED = settings(max_examples=25)


@pytest.mark.parametrize("make, options", cases.CASES)
def test_values(make, options):
    make(**options).check()


# --------------------------------------------------------------------------------------------------
# Scalar mathematics


def by_cell(name, x, dtype=np.float32):
    """Return the cell's results, compiled as a driver compiles it."""
    out = np.zeros(len(x), dtype)
    numba.njit(cases.cell_loop(name), error_model="numpy", fastmath=arena.FASTMATH)(x, out)
    return out


NORMAL = np.linspace(-87, 88, 300_007, dtype=np.float32)
STRANGE = np.float32([-1e30, -1e3, -0.0, 0.0, 1e3, 1e30, -np.inf, np.inf, np.nan])
TINY = np.exp(np.linspace(-80, 0, 100_003))
FORMULAS = [  # cell, formula, numbers, the largest errors: absolute and relative
    ("exp_cell", np.exp, [*NORMAL, np.nan], np.inf, 2e-7),
    ("log_cell", np.log, [*(1 - np.arange(2**16) * 2.0**-24), *TINY, *(1 / TINY)], 1e-5, 2e-7),
    ("cos_turn_cell", lambda x: np.cos(2 * np.pi * x), np.arange(0, 1, 2.0**-20), 1e-6, np.inf),
    ("sigmoid_cell", lambda x: 1 / (1 + np.exp(-x)), [*NORMAL, *STRANGE], 1e-6, np.inf),
    ("tanh_cell", np.tanh, [*NORMAL, *STRANGE], 4e-7, np.inf),
    ("tanh_cell", np.tanh, TINY, np.inf, 3e-7),
]


@pytest.mark.parametrize("cell, formula, numbers, absolute, relative", FORMULAS)
def test_a_cell_is_its_formula(cell, formula, numbers, absolute, relative):
    x = np.array(numbers, np.float32)
    out = by_cell(cell, x)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = formula(x.astype(float))
        error, most = np.abs(out - exact), relative * np.abs(exact)
    assert np.array_equal(np.isnan(out), np.isnan(x))
    assert np.nanmax(error) < absolute and not (error > most).any()
    if np.isinf(x).any():
        assert np.nanmin(exact) <= np.nanmin(out) and np.nanmax(out) <= np.nanmax(exact)


def test_bfloat16_rounds_to_the_nearest():
    words = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000  # half way between two
    x = np.concatenate([words, ties, ties - 1, ties + 1]).view(np.float32)
    # a rounding up of these would carry into the sign and leave a zero
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0x7F808000,
                     0x7FFF8000], np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], nans])
    halves = by_cell("bfloat_of_float", x, np.uint16)
    back = by_cell("float_of_bfloat", halves)
    # torch rounds a tie to even, the kernels away from zero
    away = (x.view(np.uint32) & 0xFFFF) == 0x8000
    nearest = np.where(away & ~np.isnan(x), (x.view(np.uint32) + 1).view(np.float32), x)
    expected = torch.from_numpy(nearest).bfloat16()
    assert np.array_equal(back, expected.float().numpy(), equal_nan=True)
    numbers = ~np.isnan(x)
    assert np.array_equal(halves[numbers], expected.view(torch.uint16).numpy()[numbers])


@pytest.mark.parametrize("counter, key, expected", reference.PHILOX_KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = kernels.philox_cell(*map(np.uint32, counter), *map(np.uint32, key))
    assert tuple(map(int, words)) == reference.philox4x32(counter, key) == expected


# --------------------------------------------------------------------------------------------------
# Sample


def draw_actions(outputs, heads=None, **options):
    """(actions, logprobs, values) of kernels.sample."""
    kind = {"heads": heads} if heads else {"dims": outputs.shape[1] - 1}
    outputs = cases.sample(len(outputs), outputs=outputs, **kind, **options).run()
    return outputs["actions"], outputs["logprobs"], outputs["values"]


@BOUNDED
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans(),
       st.sampled_from([(1, [2]), (7, [3, 1]), (200, [1, 4, 2]), (65, [33])]))
def test_a_block_of_agents_chooses_as_one_agent_does(seed, masked, deterministic, strange, case):
    """On a CPU 64 agents choose together, on a GPU each by itself: the same actions, whatever the
    logits are. (Of an agent that has a NaN, or no logit above -inf, the most likely action is any
    allowed one.)"""
    (n, heads), rng = case, cases.generator(seed)
    outputs = 3 * torch.randn(n, sum(heads) + 1, generator=rng)
    if strange:
        values = torch.tensor([NAN, -math.inf, 0.0, 0.0, 200.0, -200.0, math.inf])
        there = torch.rand(outputs.shape, generator=rng) < 0.2
        outputs[there] = values[torch.randint(len(values), (int(there.sum()),), generator=rng)]
    masks = cases.some_masks(rng, n, heads) if masked else None
    block = draw_actions(outputs, heads, masks=masks, seed=seed, deterministic=deterministic)
    alone = [torch.empty_like(array).numpy() for array in block]
    kernels._sample_discrete_cuda(
        0, n, outputs.numpy(), masked,
        (masks if masked else torch.ones(1, 1, dtype=torch.uint8)).numpy(), np.array(heads),
        np.uint64(seed), np.uint64(0), np.zeros(1, np.int64), deterministic, *alone)
    logits = outputs[:, :-1] if masks is None else outputs[:, :-1].masked_fill(masks == 0, -math.inf)
    usual = torch.stack([head.amax(1) > -math.inf for head in logits.split(heads, 1)]).all(0)
    usual = usual | (not deterministic)
    for actual, expected in zip(block, map(torch.from_numpy, alone), strict=True):
        torch.testing.assert_close(actual[usual], expected[usual], rtol=1e-6, atol=1e-6,
                                   equal_nan=True)
    if masked:
        first = torch.tensor([sum(heads[:i]) for i in range(len(heads))])
        assert masks.gather(1, block[0].long() + first).all()


def test_each_number_is_squashed_by_its_own_bounds():
    inf, vast = np.inf, np.finfo(np.float64).max
    low = [-2.0, -inf, 0.0, -inf, 100.0, -inf, -vast, 3.0]
    high = [6.0, inf, inf, 9.0, inf, -5.0, vast, 3.0]
    space = gymnasium.spaces.Box(np.array(low), np.array(high), dtype=np.float64)
    squash = models.squash(torch.nn.Identity(), space).action_squash
    assert squash[:2].T.tolist() == [
        [2, 4], [0, -1], [0, -1], [0, -1], [100, -100], [-5, -5], [0, -1], [3, -3]]
    close(squash[2], squash[1].abs().log(), 1e-7)
    u = torch.tensor([0.5, -40.0, 1e9]).repeat(8, 1).T
    actions = models.squashed(squash, u)
    close(actions[:, 0], 2 + 4 * u[:, 0].tanh(), 1e-6)
    assert torch.equal(actions[:, [1, 2, 3, 6]], u[:, :4])
    close(actions[:, 4], 100 + 100 * u[:, 4], 1e-6)


def test_squashed_actions_stay_within_the_bounds_however_far_the_means_are():
    outputs = torch.tensor([[3e38, -3e38, 0.0]])
    results = cases.sample(1, dims=2, outputs=outputs, squash=True).run()
    close(results["actions"], torch.tensor([[0.5, -2.0]]), 1e-5)
    assert not results["logprobs"].isnan().any()


def test_a_thread_that_chooses_keeps_to_its_own_agents():
    """Of the outputs, and of the memory that the choice works with."""
    n, rng, untouched = 200, cases.generator(3), 12345
    outputs, heads = torch.randn(n, 6, generator=rng).numpy(), np.array([3, 2])
    written = [np.full((n, width), untouched, kind)
               for width, kind in ((2, np.int32), (1, np.float32), (1, np.float32))]
    work = np.full((n, kernels.CHOICE_ROWS + 10), untouched, np.float32)
    kernels._sample_discrete_lanes(
        30, 171, outputs, False, np.ones((1, 1), np.uint8), heads, np.uint64(1), np.uint64(0),
        np.zeros(1, np.int64), False, written[0], written[1][:, 0], written[2][:, 0], work)
    for array in (*written, work):
        assert (array[:30] == untouched).all() and (array[171:] == untouched).all()
        assert (array[30:171] != untouched).any()


# --------------------------------------------------------------------------------------------------
# Advantage, draw, ranges of returns


@BOUNDED
@given(T=st.integers(1, 9), N=st.integers(1, 40), seed=st.integers(0, 99),
       live=st.sampled_from([0.0, 0.5, 1.0]), reward_clip=st.sampled_from([math.inf, 1.0]),
       rho_clip=st.sampled_from([0.5, 1.0, math.inf]), c_clip=st.sampled_from([0.5, 1.0, math.inf]),
       gamma=st.sampled_from([0.0, 0.99, 1.0]))
def test_advantage_of_any_flags(T, N, seed, **options):
    call = cases.advantage(T, N, seed=seed, **options)
    call.arguments["valid"][-1] = seed % 2  # row T is not looked at
    call.check()


@BOUNDED
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_a_pass_draws_each_segment_once_if_priorities_are_equal(M, minibatches, seed):
    priorities = torch.full((M * minibatches,), 0.3, dtype=torch.float64)

    def index(number):
        return cases.draw_segments(M=M, priorities=priorities, seed=seed, counter=(0, number)).run()["index"]

    found = [index(2 * minibatches + k) for k in range(minibatches)]
    assert torch.cat(found).sort().values.tolist() == list(range(len(priorities)))
    if M > 4 < minibatches:  # and the next pass puts others together
        assert not torch.equal(found[0], index(3 * minibatches))


@BOUNDED
@given(st.lists(st.sampled_from([0.0, 1e-300, 1.0, 1e300, math.inf, NAN]), min_size=1, max_size=9),
       st.integers(0, 99))
def test_draw_stays_in_bounds_whatever_the_priorities(priorities, seed):
    case = cases.draw_segments(M=17, priorities=torch.tensor(priorities, dtype=torch.float64), seed=seed, beta=0.0)
    results = case.run()
    index = results["index"]
    assert index.min() >= 0 and index.max() < len(priorities) and (index.diff() >= 0).all()
    if sum(priorities) < math.inf and any(priorities):
        assert all(priorities[i] > 0 for i in index.tolist())
    if not math.isfinite(sum(priorities)) and max(priorities) < math.inf:
        assert results["weights"].isnan().all()  # NaN to the power of zero is 1


def test_return_moments():
    """Of discounted returns, as a loop in Python."""
    rng, (T, N) = np.random.default_rng(0), (9, 40)
    rewards = rng.normal(size=(T, N)).astype(np.float32)
    valid, resets = ((rng.random((T + 1, N)) < p).astype(np.uint8) for p in (0.7, 0.3))
    valid[:, :2] = 0
    returns, deviations = rng.normal(size=N), []
    discounted = returns.copy()
    for t, n in itertools.product(range(T), range(N)):
        discounted[n] *= not resets[t, n]
        discounted[n] = (0.9 if valid[t, n] else 1.0) * discounted[n] + rewards[t, n]
        if valid[t, n]:
            deviations.append(discounted[n] - 0.25)
    found = kernels.return_moments(rewards, valid, resets, returns, 0.9, 0.25)
    sums = [len(deviations), sum(deviations), np.square(deviations).sum()]
    close(np.array(found), np.array(sums), 1e-12)
    close(returns, discounted, 1e-12)


# --------------------------------------------------------------------------------------------------
# MinGRU


@BOUNDED
@given(T=st.integers(1, 8), M=st.integers(1, 9), H=st.integers(1, 35), start=st.integers(0, 4),
       extra=st.integers(0, 3), resets=st.sampled_from([0.0, 0.3, 1.0]),
       live=st.sampled_from([0.0, 0.6, 1.0]), drawn=st.booleans(), seed=st.integers(0, 99))
def test_scan_of_any_flags(T, M, H, start, extra, **options):
    options |= {"start": start, "columns": start + M + extra}
    cases.mingru_scan(T, M, H, **options).check()
    cases.mingru_scan_grad(T, M, H, **options).check()


@pytest.mark.parametrize("make, sizes", [
    (cases.mingru_step, (5, 7)), (cases.mingru_step, (4, 64)), (cases.mingru_scan, (3, 5, 7)),
    (cases.mingru_scan, (9, 4, 64)), (cases.mingru_scan_grad, (3, 5, 7)), (cases.mingru_scan_grad, (9, 4, 64))])
def test_bfloat16_rounds_only_what_is_written(make, sizes):
    """From rounded inputs it gives what float32 gives, rounded."""
    single, half = (make(*sizes, rounded=True, dtype=dtype)
                    for dtype in (torch.float32, torch.bfloat16))
    expected, results = single.run(), half.run()
    for name, tensor in results.items():
        assert torch.equal(expected[name].to(tensor.dtype), tensor), name


# --------------------------------------------------------------------------------------------------
# PPO loss


@pytest.mark.parametrize("low", [-math.inf, float(np.finfo(np.float32).min), -1e30])
@pytest.mark.parametrize("heads", [[6], [4, 3, 2]])
def test_logits_that_rule_a_choice_out_are_a_mask(heads, low):
    """A network may mask by itself: the same results as with a mask, also of the entropy."""
    data = cases.minibatch(7, 5, heads=heads, masked=True)
    coefficients = {"vf_coef": 0.0, "ent_coef": 1.0}
    masked = cases.ppo_loss(data=data, coefficients=coefficients).run()
    out = data.pop("masks")[:7] == 0
    data["outputs"][..., :-1] = data["outputs"][..., :-1].masked_fill(out, low)
    for name, tensor in cases.ppo_loss(data=data, coefficients=coefficients).run().items():
        close(tensor, masked[name], 1e-6, name)


@pytest.mark.parametrize("kind", cases.KINDS, ids=str)
@pytest.mark.parametrize("T, B, N", [(3, 5, 17), (9, 17, 40), (4, 6, None)])
def test_loss_in_chunks(T, B, N, kind):
    """As in one call, though only drawn segments have numbers; each writes its own columns."""
    data = cases.minibatch(T, B, **kind, N=N, seed=B)
    expected = cases.ppo_loss(data=data).run()
    call = cases.ppo_loss(data=data)
    if N is not None:  # nothing may be read of segments that are not drawn
        unused = torch.ones(N, dtype=torch.bool)
        unused[data["index"]] = False
        for name in ("values", "advantages", "logprobs"):
            data[name][:, unused] = NAN
    results = cases.in_chunks(call, [B - B // 2, B // 2])
    for name, actual, right, tolerance in call.compare(**results):
        close(actual, right, tolerance, name)
    for name, tensor in results.items():
        close(tensor, expected[name], 1e-6, name)
    again = cases.ppo_loss(data=data)
    cases.in_chunks(again, [2])  # of more
    for name in ("new_values", "ratios"):
        written = again.arguments[name]
        assert written[:, :2].isfinite().all() and written[:, 2:].isnan().all()
    assert again.arguments["sums"][-1] == cases.drawn(data, "valid")[:, :2].sum()


@BOUNDED
@given(T=st.integers(1, 6), B=st.integers(1, 8), N=st.sampled_from([None, 5]),
       kind=st.sampled_from(cases.KINDS), seed=st.integers(0, 999), live=st.sampled_from([0.0, 0.5, 1.0]),
       clip_coef=st.sampled_from([0.0, 0.1, 0.67]), vf_clip_coef=st.sampled_from([0.05, 10.0]),
       ent_coef=st.sampled_from([0.0, 0.5]))
def test_loss_of_any_settings(T, B, N, kind, seed, live, **coefficients):
    cases.ppo_loss(T, B, N=N, seed=seed, live=live, coefficients=coefficients, **kind).check()


@pytest.mark.parametrize("bound", [math.inf, 0.1])
def test_the_terms_add_up_to_the_loss(bound):
    data = cases.minibatch(3, 4, heads=[3])
    known = {name: cases.COEFFICIENTS[name] for name in ("clip_coef", "vf_coef", "vf_clip_coef", "ent_coef")}
    known["vf_error_bound"] = bound
    statistics = kernels.loss_statistics(cases.ppo_loss(data=data, coefficients=known).run()["sums"])
    value_scale = cases.loss_settings(data, **known)[kernels.VALUE_SCALE]
    total = (statistics["policy_loss"] + value_scale * statistics["value_loss"]
             - known["ent_coef"] * statistics["entropy"])
    close(total, cases.expected_loss(data, **known)[0]["loss"].detach(), 1e-5)


def test_explained_variance():
    """Returns of 1,000 ± 1 that the value explains to 10%: their squares must not be summed in
    float32. Constant returns have none, and no step at all is no error; a NaN reaches the settings."""
    data = cases.minibatch(64, 65, heads=[3], live=1.0)
    data["values"] = 1000 + data["values"]
    data["advantages"] *= 0.1
    noise = torch.randn(64, 65, generator=cases.generator(9))
    data["outputs"][..., -1] = data["values"][:-1] + data["advantages"] + 0.3 * noise
    statistics = kernels.loss_statistics(cases.ppo_loss(data=data).run()["sums"])
    expected, *_ = cases.expected_loss(data, **cases.COEFFICIENTS)
    close(statistics["explained_variance"], expected["explained_variance"], 1e-3)
    data["values"].fill_(0.5)
    data["advantages"].fill_(0.25)
    statistics = kernels.loss_statistics(cases.ppo_loss(data=data).run()["sums"])
    assert math.isnan(statistics["explained_variance"])
    nothing = torch.zeros(kernels.SUMS, dtype=torch.float64)
    assert kernels.loss_statistics(nothing)["policy_loss"] == 0
    for moments, finite in ((torch.zeros(3), True), (torch.tensor([3.0, NAN, NAN]), False)):
        settings = torch.full((len(kernels.LOSS_SETTINGS),), NAN if finite else 0.0)
        kernels.normalisation(moments.double(), settings)
        assert (settings[:2].isfinite() == finite).all()


# --------------------------------------------------------------------------------------------------
# A NaN is never lost

ALL, SCAN = slice(None), {"T": 4, "M": 3, "H": 21}
NANS = [  # kernel, options, argument, place of the NaN, {output: (some NaN here, nothing outside)}
    *((cases.sample, {"n": 3, "heads": [3], "masked": masked, "deterministic": likely}, "outputs",
       (1, place), {"logprobs": (1, 1)})
      for masked in (False, True) for likely in (False, True) for place in (0, 1, 2)),
    *((cases.sample, {"n": 3, "dims": 3}, "outputs", (1, place), {"actions": ((1, place), (1, place))})
      for place in (0, 1, 2)),
    *((cases.advantage, {"T": 6, "N": 70, "index": index}, name, (3, 33),
       {"advantages": ((0, 33), (slice(4), 33))})
      for index in (None, list(range(70))) for name in ("values", "rewards", "bootstraps", "ratios")),
    (cases.priorities, {"T": 6, "N": 70}, "advantages", (3, 33), {"priorities": (33, 33)}),
    *((cases.mingru_step, {}, name, place, {output: ((1, 5), (1, 5)) for output in outputs})
      for name, place, outputs in (
          ("x", (1, 5), ["out"]), ("hgp", (1, 5), ["out", "state"]),
          ("hgp", (1, 11), ["out", "state"]), ("hgp", (1, 17), ["out"]))),
    *((cases.ppo_loss, {"T": 4, "B": 5, **kind}, name, place,
       {"sums": (slice(2), ALL), "grad": ((2, 3), (ALL, 3))})
      for kind in ({"heads": [3, 2]}, {"heads": [3, 2], "masked": True}, {"dims": 2})
      for name, place in (("outputs", (2, 3, 0)), ("outputs", (2, 3, -1)), ("logprobs", (2, 3)),
                          ("values", (2, 3)), ("advantages", (2, 3)), ("weights", (3,)))),
    *((cases.mingru_scan, SCAN, name, place, {"out": ((2, 1, 5), (ALL, 1))})
      for name, place in (("hgp", (2, 1, 5)), ("hgp", (2, 1, 26)), ("hgp", (2, 1, 47)),
                          ("x", (2, 1, 5)), ("states", (0, 1, 5)))),
    *((cases.mingru_scan_grad, SCAN, name, place, {"hgp": ((ALL, 1), (ALL, 1))})
      for name, place in (("hgp", (2, 1, 5)), ("x", (2, 1, 5)), ("states", (2, 1, 5)))),
    (cases.mingru_scan_grad, SCAN, "grad_out", (3, 0, 7),
     {"hgp": ((0, 0, [7, 28]), (ALL, 0)), "sums": ((0, [7, 28]), 0)}),
    (cases.masked_moments, {"T": 3, "N": 4}, "numbers", (1, 2), {"result": ([1, 2], ALL)}),
    (cases.gradient_norm, {"n": 10_000}, "flat", (7_777,), {"result": ((), ())}),
    (cases.observation_moments, {}, "observations", (3, 2), {"result": ((ALL, 2), (ALL, 2))}),
]
NANS = [row for row in NANS if row[0] in cases.SIMULATED or not arena.SIMULATOR]


@pytest.mark.parametrize("make, options, name, place, regions", NANS)
def test_nan_is_never_lost(make, options, name, place, regions):
    call = make(**options)
    for each, value in (("valid", 1), ("terminals", 0), ("truncations", 0), ("resets", 0)):
        if each in call.tensors:
            call.tensors[each].fill_(value)
    if make is cases.masked_moments:
        call.arguments["index"] = torch.arange(4)
    if call.arguments.get("masks") is not None and name == "outputs" and place[-1] >= 0:
        call.arguments["masks"][place] = 1  # a forbidden one is not seen
    call.tensors[name][place] = NAN
    results = call.run()
    for output, (must, may) in regions.items():
        tensor = results[output].clone()
        assert tensor[must].isnan().any(), output
        tensor[may] = 0
        assert tensor.isfinite().all(), output
    if make is cases.sample and "heads" in options:  # the environments must get something legal
        assert results["actions"].min() >= 0 and results["actions"].max() < 3


def test_a_masked_action_is_never_taken_for_a_nan():
    for place, likely in itertools.product((1, 2), (False, True)):
        outputs, masks = torch.zeros(1, 4), torch.tensor([[0, 1, 1]], dtype=torch.uint8)
        outputs[0, place] = NAN
        assert draw_actions(outputs, [3], masks=masks, deterministic=likely)[0].item() > 0


# --------------------------------------------------------------------------------------------------
# Errors that name the tensor

# Arguments of which any number of rows is right, or any number of axes.
ANY_LENGTH = {("gather", "index"), ("gather", "out"), ("gradient_norm", "flat"),
              ("advantage", "index"), ("priorities", "index"), ("masked_moments", "index"),
              ("priorities", "advantages"), ("masked_moments", "numbers")}
ANY_RANK = {("gather", "source"), ("gather", "out"), ("gradient_norm", "flat")}
OTHER = {torch.float32: torch.float64, torch.float64: torch.float32, torch.uint8: torch.bool,
         torch.int32: torch.int64, torch.int64: torch.int32}


def spacious(tensor):
    """The same tensor within a much larger buffer: an overrun that no check stops stays there."""
    memory = torch.zeros(8192 + 64 * tensor.numel(), dtype=tensor.dtype)
    return memory[4096 : 4096 + tensor.numel()].view(tensor.shape).copy_(tensor)


def wrong(kernel, name, tensor):
    """(error, the tensor as it is refused) of each kind."""
    if (kernel, name) not in ANY_LENGTH and len(tensor) > 1:
        yield ValueError, spacious(tensor[:1])
    if (kernel, name) not in ANY_RANK:
        yield ValueError, spacious(tensor[..., None])
    if name == "index" or kernel not in ("gather", "observation_moments") or name in ("valid", "center"):
        yield TypeError, spacious(tensor.to(OTHER[tensor.dtype]))
    if tensor.numel() > 1:
        yield ValueError, torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize("call", cases.SMALL)
def test_a_wrong_argument_is_refused(call):
    for name in cases.SMALL[call]().tensors:
        kernel = cases.SMALL[call]().kernel
        for index, (error, tensor) in enumerate(wrong(kernel, name, cases.SMALL[call]().tensors[name])):
            with pytest.raises(error) as refusal:
                cases.SMALL[call]().run(**{name: tensor})
            is_named = error is TypeError or not tensor.is_contiguous()
            assert not is_named or f"kernels.{kernel}: {name} " in str(refusal.value), (name, index)


@pytest.mark.parametrize("call, more", [
    ("mingru_scan", {"start": 1}), ("mingru_scan_grad", {"start": 1}), ("ppo_loss", {"start": 1}),
    ("ppo_loss continuous", {"start": 1}),
    ("ppo_loss", {"index": torch.arange(4).repeat(2), "start": 4}),  # only the index is longer
    ("gather", {"out": torch.zeros(5, 4, 2)}), ("gather", {"out": torch.zeros(3, 4, 3)}),
    ("gather", {"start": 8})])
def test_a_chunk_outside_of_the_minibatch_is_refused(call, more):
    call = cases.SMALL[call]()
    with pytest.raises(ValueError, match=call.kernel):
        call.run(**{name: spacious(tensor) for name, tensor in call.tensors.items()} | more)


# --------------------------------------------------------------------------------------------------
# The same bits for any number of threads


@pytest.mark.parametrize("make, options", cases.CASES)
def test_thread_count_changes_no_bit(make, options, monkeypatch):
    """Shared out among all threads, however little there is to do, each lane once."""
    monkeypatch.setattr(arena, "MIN_THREAD_NANOSECONDS", 1)
    expected, run_shared = make(**options).run(), kernels.run

    def run_and_count(function, lanes, cost, *arguments):
        ranges = []

        def counted(first, last, *arguments):
            ranges.append((first, last))
            function(first, last, *arguments)

        run_shared(counted, lanes, cost, *arguments)
        assert sorted(itertools.chain(*itertools.starmap(range, ranges))) == list(range(lanes))
        assert len(ranges) == min(lanes, count)

    monkeypatch.setattr(kernels, "run", run_and_count)
    for count in cases.THREAD_COUNTS:
        with threads(count):
            results = make(**options).run()
        assert all(torch.equal(bits(results[name]), bits(x)) for name, x in expected.items())
