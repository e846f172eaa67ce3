"""What the kernels promise besides their numbers: errors that name the tensor, NaNs that are
never lost, the same bits for any thread count, vectorised loops in single precision, no
memory kept and none made.

    python -m pytest tests/test_kernel_promises.py -k nan
"""

import concurrent.futures
import gc
import itertools
import math
import re
import tracemalloc

import llvmlite.binding
import numba
import numpy as np
import pytest
import torch
from numba.core.runtime import _nrt_python, rtsys
from test_kernels import (
    COEFFICIENTS,
    GAE,
    NAN,
    THREAD_COUNTS,
    Weights,
    adopted,
    bits,
    draw_actions,
    exp_probe,
    fused_loss,
    generator,
    loss_settings,
    minibatch,
    poison,
    rollout,
    run_loss,
    segments,
    sigmoid_probe,
)

import arena
import kernels
import optim

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# --------------------------------------------------------------------------------------------------
# Errors that name the tensor


def good_calls():
    """kernel -> (function, tensors by argument name, other arguments):
    small calls that are right."""
    T, N, M, H, A = 3, 5, 4, 6, 4
    f = torch.rand
    byte = lambda *shape: torch.ones(shape, dtype=torch.uint8)  # noqa: E731
    double = lambda *shape: torch.rand(shape, dtype=torch.float64)  # noqa: E731
    index = torch.tensor([0, 1, 1, 3])
    drawn = lambda: f(T, N)[:, index].contiguous()  # noqa: E731
    scan = {"hgp": f(T, M, 3 * H), "x": f(T, M, H), "states": f(T + 1, M, H), "resets": byte(T, M),
            "valid": byte(T, M)}
    batch = {"logprobs": f(T, M), "values": f(T, M), "advantages": f(T, M), "weights": f(M), "valid": byte(T, M),
             "settings": f(7), "grad": f(T, M, A + 1), "new_values": f(T, M), "ratios": f(T, M),
             "sums": double(kernels.SUMS)}
    advantage = {"values": f(T + 1, N), "rewards": f(T, N), "terminals": byte(T, N),
                 "truncations": byte(T, N),
                 "bootstraps": f(T, N), "ratios": f(T, N), "valid": byte(T + 1, N),
                 "advantages": f(T, N)}
    discount = {"gamma": 0.9, "gae_lambda": 0.9}
    heads = {"heads": torch.tensor([2, 2])}
    return {
        "sample": (kernels.sample,
                   {"outputs": f(N, A + 1), "actions": torch.zeros(N, 2, dtype=torch.int32),
                    "logprobs": f(N), "values": f(N), **heads, "masks": byte(N, A)},
                   {"seed": 1, "step": 0}),
        "sample continuous": (kernels.sample,
                              {"outputs": f(N, A + 1), "actions": f(N, A), "logprobs": f(N),
                               "values": f(N), "log_std": f(A)},
                              {"seed": 1, "step": 0}),
        "advantage": (kernels.advantage, advantage, discount),
        "advantage columns": (kernels.advantage, {**advantage, "index": index}, discount),
        "priorities": (kernels.priorities,
                       {"advantages": f(T, N), "valid": byte(T, N), "masses": double(N),
                        "index": index}, {"alpha": 0.5}),
        "draw": (kernels.draw,
                 {"masses": double(N), "cumulative": double(N), "index": torch.zeros(M).long(),
                  "weights": f(M)}, {"seed": 1, "counter": (0, 0), "beta": 0.5}),
        "gather": (kernels.gather, {"source": f(T, N, 2), "index": index, "out": f(T, M, 2)}, {}),
        "write_back": (kernels.write_back,
                       {"index": index, "new_values": drawn(), "new_ratios": drawn(),
                        "counter": torch.zeros(2).long(), "values": f(T + 1, N), "ratios": f(T, N)}, {}),
        "mingru_step": (kernels.mingru_step,
                        {"hgp": f(M, 3 * H), "x": f(M, H), "state": f(M, H), "resets": byte(M),
                         "valid": byte(M), "out": f(M, H)}, {}),
        "mingru_scan": (kernels.mingru_scan, {**scan, "out": f(T, M, H)}, {}),
        "mingru_scan_grad": (kernels.mingru_scan_grad,
                             {**scan, "grad_out": f(T, M, H), "sums": f(M, 3 * H)}, {}),
        "ppo_loss": (kernels.ppo_loss,
                     {"outputs": f(T, M, A + 1), "actions": torch.zeros(T, M, 2).int(), **batch,
                      **heads, "masks": byte(T, M, A)}, {}),
        "ppo_loss continuous": (kernels.ppo_loss,
                                {"outputs": f(T, M, A + 1), "actions": f(T, M, A), **batch,
                                 "log_std": f(A), "grad_log_std": f(T, M, A),
                                 "index": torch.tensor([0, 1, 2, 2])}, {}),
        "advantage_moments": (kernels.advantage_moments,
                              {"advantages": f(T, N), "valid": byte(T, N), "index": index}, {}),
        "normalisation": (kernels.normalisation, {"moments": double(3), "settings": f(7)}, {}),
        "gradient_norm": (kernels.gradient_norm, {"flat": f(9)}, {}),
    }


ARGUMENTS = [(call, name) for call, (_, tensors, _) in good_calls().items() for name in tensors]
# The tensors whose shape says what T, M, H ... are: another one is then found not to fit.
LEADING = {"sample": {"outputs"}, "advantage": {"rewards", "index"},
           "priorities": {"advantages", "index"},
           "draw": {"masses", "index"}, "gather": {"source", "index", "out"},
           "write_back": {"ratios", "index"}, "mingru_step": {"x"}, "mingru_scan": {"x", "resets"},
           "mingru_scan_grad": {"x", "resets"},
           "ppo_loss": {"outputs", "logprobs", "weights"},
           "advantage_moments": {"advantages", "index"}, "normalisation": set(),
           "gradient_norm": {"flat"}}
FREE = {("gather", "index"), ("gather", "source"), ("gradient_norm", "flat"), ("advantage", "index"),
        ("priorities", "index"), ("advantage_moments", "index")}  # any length will do
LONGER = {("mingru_scan", "resets"), ("mingru_scan", "valid"),
          ("mingru_scan_grad", "resets"), ("mingru_scan_grad", "valid"),
          ("ppo_loss", "values"), ("ppo_loss", "valid"), ("ppo_loss", "masks"),
          ("ppo_loss", "index"),
          ("priorities", "valid"), ("advantage_moments", "valid")}  # what lies beyond is not looked at
SHORTER = {("priorities", "advantages"), ("advantage_moments", "advantages")}  # then the others are longer


def spacious(tensor):
    """The same tensor in the middle of a much larger buffer: an overrun that no check stops stays
    in memory of ours."""
    memory = torch.zeros(8192 + 64 * tensor.numel(), dtype=tensor.dtype)
    view = memory[4096 : 4096 + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def call_with(call, name, change):
    function, tensors, options = good_calls()[call]
    function(**{**tensors, name: change(tensors[name])}, **options)


@pytest.mark.parametrize("call", good_calls())
def test_good_calls_are_good(call):
    function, tensors, options = good_calls()[call]
    function(**tensors, **options)


@pytest.mark.parametrize("more", [False, True], ids=["shorter", "longer"])
@pytest.mark.parametrize("call, name", ARGUMENTS)
def test_wrong_size_is_refused_by_name(call, name, more):
    kernel = call.split()[0]
    if ((kernel, name) in FREE or (kernel, name) in (LONGER if more else SHORTER)
            or (call, name, more) == ("gather", "out", False)):
        pytest.skip("that length is right here")
    with pytest.raises(ValueError,
                       match=kernel if name in LEADING[kernel] else rf"{kernel}: .*\b{name}\b"):
        call_with(call, name, lambda x: spacious(torch.cat([x, x[-1:]]) if more else x[:-1]))


@pytest.mark.parametrize("call, name", ARGUMENTS)
def test_wrong_rank_is_refused_by_name(call, name):
    kernel = call.split()[0]
    if (kernel, name) in {("gather", "source"), ("gather", "out"), ("gradient_norm", "flat")}:
        pytest.skip("any trailing shape is right for gather's source and out together")
    with pytest.raises(ValueError,
                       match=rf"{kernel}\b.*{name}\b" if name not in LEADING[kernel] else kernel):
        call_with(call, name, lambda x: x[..., None].contiguous())


@pytest.mark.parametrize("call, name", ARGUMENTS)
def test_wrong_dtype_is_refused_by_name(call, name):
    kernel = call.split()[0]
    if kernel == "gather" and name != "index":
        pytest.skip("gather casts")
    other = {torch.float32: torch.float64, torch.float64: torch.float32, torch.uint8: torch.bool,
             torch.int32: torch.int64, torch.int64: torch.int32}
    with pytest.raises(TypeError, match=rf"{kernel}: {name} is "):
        call_with(call, name, lambda x: x.to(other[x.dtype]))


@pytest.mark.parametrize("call, name", ARGUMENTS)
def test_non_contiguous_is_refused_by_name(call, name):
    kernel = call.split()[0]
    with pytest.raises(ValueError, match=rf"{kernel}: {name} is not contiguous"):
        call_with(call, name, lambda x: torch.stack([x, x], -1)[..., 0])


def test_other_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="gradient_norm: flat is on meta"):
        kernels.gradient_norm(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("call",
                         ["mingru_scan", "mingru_scan_grad", "ppo_loss", "ppo_loss continuous"])
@pytest.mark.parametrize("start", [1, -1])
def test_chunk_outside_the_minibatch_is_refused(call, start):
    function, tensors, options = good_calls()[call]
    with pytest.raises(ValueError, match=call.split()[0]):
        function(**{k: spacious(v) for k, v in tensors.items()}, **options, start=start)


def test_chunk_beyond_the_minibatch_is_refused_though_the_index_is_longer():
    function, tensors, options = good_calls()["ppo_loss"]
    with pytest.raises(ValueError, match="ppo_loss"):
        function(**{k: spacious(v) for k, v in tensors.items()}, **options,
                 index=torch.arange(4).repeat(2), start=4)


@pytest.mark.parametrize("call", ["sample", "ppo_loss"])
def test_heads_that_do_not_add_up_are_refused(call):
    with pytest.raises(ValueError, match="heads"):
        call_with(call, "heads", lambda x: torch.tensor([2, 1]))


# --------------------------------------------------------------------------------------------------
# A NaN is never lost


def test_nan_exp_sigmoid():
    for probe in (exp_probe, sigmoid_probe):
        out = np.zeros(64, np.float32)
        probe(np.full(64, np.nan, np.float32), out)
        assert np.isnan(out).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_sample(place, masked):
    outputs = torch.zeros(3, 4)
    outputs[1, place] = NAN
    masks = torch.ones(3, 3, dtype=torch.uint8) if masked else None
    for deterministic in (False, True):
        actions, logprobs, _ = draw_actions(outputs, heads=[3], masks=masks,
                                            deterministic=deterministic)
        assert logprobs.isnan().tolist() == [False, True, False]
        assert actions.min() >= 0 and actions.max() < 3  # the environments must get something legal
    actions, logprobs, _ = draw_actions(outputs, log_std=torch.zeros(3))
    assert actions.isnan().any(-1).tolist() == [False, True, False]


def test_nan_sample_masked_action_is_never_taken():
    outputs, masks = torch.zeros(1, 4), torch.tensor([[0, 1, 1]], dtype=torch.uint8)
    for place in (1, 2):
        bad = outputs.clone()
        bad[0, place] = NAN
        for deterministic in (False, True):
            assert draw_actions(bad, heads=[3], masks=masks, deterministic=deterministic)[0].item() > 0


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", ["values", "rewards", "bootstraps", "ratios"])
def test_nan_advantage(name, columns):
    data = rollout(6, 70, live=1.0)
    data["terminals"].zero_()
    data["truncations"].zero_()
    data[name][3, 33] = NAN
    out = torch.zeros(6, 70)
    kernels.advantage(**data, advantages=out, **GAE, index=torch.arange(70) if columns else None)
    assert out[: 4, 33].isnan().all()
    assert out.isnan().sum() == 4
    masses = poison(70, dtype=torch.float64)
    kernels.priorities(out, data["valid"], masses, alpha=0.5)
    assert masses.isnan().nonzero().tolist() == [[33]]


@pytest.mark.parametrize("valid", [0, 1])
@pytest.mark.parametrize("name", ["h", "g", "p", "x", "state"])
def test_nan_mingru(name, valid):
    if not valid and name in ("h", "g"):
        pytest.skip("an invalid step takes in nothing")
    T, M, H = 4, 3, 21
    data = segments(T, M, H, resets=0.0)
    data["valid"].fill_(valid)
    place = {"h": 0, "g": H, "p": 2 * H}.get(name, 0) + 5
    target = {"x": data["x"][2], "state": data["states"][0]}.get(name, data["hgp"][2])
    target[1, place] = NAN
    out, dy, hgp = poison(T, M, H), torch.ones(T, M, H), data["hgp"].clone()
    kernels.mingru_scan(**data, out=out)
    assert out[2, 1, 5].isnan() and out[:, [0, 2]].isfinite().all()
    state, step_out = data["states"][2].clone(), torch.zeros(M, H)
    kernels.mingru_step(hgp[2], data["x"][2], state, data["resets"][2], data["valid"][2], step_out)
    assert (torch.equal(step_out.isnan(), out[2].isnan())
            and torch.equal(state.isnan(), data["states"][3].isnan()))
    kernels.mingru_scan_grad(data["hgp"], data["x"], data["states"], data["resets"],
                             data["valid"], dy, torch.zeros(M, 3 * H))
    assert data["hgp"][2, 1].isnan().any()
    dy = torch.ones(T, M, H)
    dy[3, 0, 7] = NAN
    clean = segments(T, M, H, resets=0.0, live=1.0)
    kernels.mingru_scan(**clean, out=out)
    kernels.mingru_scan_grad(clean["hgp"], clean["x"], clean["states"], clean["resets"],
                             clean["valid"], dy, torch.zeros(M, 3 * H))
    assert clean["hgp"][:, 0, [7, H + 7]].isnan().all() and clean["hgp"][3, 0, 2 * H + 7].isnan()


@pytest.mark.parametrize("kind",
                         [{"heads": [3, 2]}, {"heads": [3, 2], "masked": True}, {"dims": 2}],
                         ids=str)
@pytest.mark.parametrize("name", ["logits", "value", "logprobs", "values", "advantages", "weights"])
def test_nan_ppo_loss(name, kind):
    data = minibatch(4, 5, **kind, live=1.0)
    # of clean data, so that the NaN has only its own way out
    settings_ = loss_settings(data, **COEFFICIENTS)
    if name == "logits":
        first = 0 if "masks" not in data else int(data["masks"][2, 3].argmax())
        data["outputs"][2, 3, first] = NAN
    elif name == "value":
        data["outputs"][2, 3, -1] = NAN
    elif name == "weights":
        data["weights"][3] = NAN
    else:
        data[name][2, 3] = NAN
    grad, new_values, ratios = poison(*data["outputs"].shape), poison(4, 5), poison(4, 5)
    sums = torch.zeros(kernels.SUMS, dtype=torch.float64)
    log_std = data.get("log_std")
    run_loss(data, settings_, data["outputs"], grad, new_values, ratios, sums,
             None if log_std is None else poison(4, 5, 2), log_std=log_std)
    assert sums[:2].isnan().any(), "not in the losses"
    assert grad[2, 3].isnan().any(), "not in the gradient"
    clean = grad.clone()
    clean[:, 3] = 0
    assert clean.isfinite().all()


def test_nan_moments_norm_and_muon():
    advantages = torch.zeros(3, 4)
    advantages[1, 2] = NAN
    moments = kernels.advantage_moments(advantages, torch.ones(4, 4, dtype=torch.uint8),
                                        torch.arange(4))
    settings = torch.zeros(len(kernels.LOSS_SETTINGS))
    kernels.normalisation(moments, settings)
    assert math.isnan(moments[1]) and settings.isnan().any()
    flat = torch.zeros(10_000)
    flat[7_777] = NAN
    assert math.isnan(kernels.gradient_norm(flat))
    for value in (NAN, math.inf):
        module = Weights([(3, 4), (5,)])
        _, optimizer = adopted(module, lambda a: optim.Muon(a, together=kernels.on_gpu(flat)))
        before = module.tensors[0].detach().clone()
        module.tensors[0].grad[1, 1] = value
        assert not math.isfinite(optimizer.step(0.1))
        assert torch.equal(module.tensors[0], before), (
            "an update without a finite gradient must change nothing")


# --------------------------------------------------------------------------------------------------
# The same bits for any thread count


@pytest.mark.parametrize(
    "call", [c for c in good_calls() if c not in ("draw", "gather", "write_back", "normalisation")])
def test_thread_count_changes_no_bit(call, monkeypatch):
    """Shared out among two threads or more, however little there is to do."""
    T, N, H = 17, 1100, 33
    data = {**rollout(T, N), "advantages": poison(T, N)}
    loss = {kind: minibatch(T, N, **{kind: size})
            for kind, size in (("heads", [3, 2]), ("dims", 3))}
    flat = torch.randn(150_001, generator=generator())
    run_in_kernels, shares = kernels.run, []

    def count_shares(function, lanes, cost, *arguments):
        ranges = []

        def counted(first, last, *arguments):
            ranges.append((first, last))
            function(first, last, *arguments)

        run_in_kernels(counted, lanes, cost, *arguments)
        assert sorted(itertools.chain(*itertools.starmap(range, ranges))) == list(range(lanes))
        if lanes > 1:  # there is nothing to share out of one
            shares.append(len(ranges))

    monkeypatch.setattr(kernels, "run", count_shares)
    monkeypatch.setattr(arena, "WORTH_A_THREAD", 1)

    def run():
        if call.startswith("sample"):
            options = {"heads": [2, 3]} if call == "sample" else {"log_std": torch.zeros(5)}
            return draw_actions(torch.randn(N, 6, generator=generator(1)), **options)
        if call.startswith("advantage") and call != "advantage_moments":
            out = torch.zeros(T, N)
            index = torch.arange(0, N, 2) if "columns" in call else None
            kernels.advantage(**{**data, "advantages": out}, **GAE, index=index)
            return [out]
        if call == "priorities":
            masses = poison(N, dtype=torch.float64)
            kernels.priorities(data["rewards"], data["valid"], masses, alpha=0.3)
            return [masses]
        if call.startswith("mingru"):
            scan = segments(T, N, H)
            out, hgp = poison(T, N, H), scan["hgp"].clone()
            kernels.mingru_scan(**scan, out=out)
            if call == "mingru_scan_grad":
                dy, sums = out.clone(), poison(N, 3 * H)
                kernels.mingru_scan_grad(*scan.values(), dy, sums)
                return [scan["hgp"], dy, sums]
            if call == "mingru_step":
                state = scan["states"][0].clone()
                kernels.mingru_step(hgp[0], scan["x"][0], state, scan["resets"][0],
                                    scan["valid"][0], out[0])
                return [state, out[0]]
            return [out, scan["states"]]
        if call.startswith("ppo_loss"):
            return [x for x in fused_loss(loss["dims" if "continuous" in call else "heads"],
                                          **COEFFICIENTS)[1:]
                    if x is not None]
        if call == "advantage_moments":
            return [kernels.advantage_moments(data["rewards"], data["valid"], torch.arange(N))]
        return [torch.tensor([kernels.gradient_norm(flat)])]

    expected = [bits(x) for x in run()]
    for count in THREAD_COUNTS:
        shares.clear()
        with kernels.threads(count):
            results = [run() for _ in range(3)]
        for result in results:
            assert all(torch.equal(bits(x), e) for x, e in zip(result, expected, strict=True))
        assert min(shares) == count


def test_kernels_run_from_several_python_threads_at_once():
    """As the trainer's workers do: each its own arrays, the same code."""
    jobs = [(segments(17, 9, 33, seed), poison(17, 9, 33)) for seed in range(8)]
    expected, given = [], [data["hgp"].clone() for data, _ in jobs]
    for data, out in jobs:
        kernels.mingru_scan(**data, out=out)
        expected.append(out.clone())
        out.fill_(NAN)

    def work(job, hgp):
        for _ in range(50):
            job[0]["hgp"].copy_(hgp)
            kernels.mingru_scan(**job[0], out=job[1])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, jobs, given))
    assert all(torch.equal(out, e) for (_, out), e in zip(jobs, expected, strict=True))


# --------------------------------------------------------------------------------------------------
# What the compiler made of it

FEATURES = llvmlite.binding.get_host_cpu_features()
CONVERSIONS = re.compile(r"\tv?cvt(?:ss2sd|sd2ss|ps2pd|pd2ps)\b.*")
FUNCTION = re.compile(r"^(\w[\w$.]*):", re.MULTILINE)
PACKED = re.compile(r"\tv(?:mul|div|add|sub|fn?m(?:add|sub)\d*|rcp14)ps\t.*%[yz]mm")
needs_avx = pytest.mark.skipif(not FEATURES.get("avx2"), reason="this processor has no AVX2")
F = numba.float32[::1]
f4 = numba.float32


def assembly_of(compiled):
    """The machine code without the wrapper for Python callers, which turns Python's
    double scalars to single."""
    (text,) = compiled.inspect_asm().values()
    parts = FUNCTION.split(text)[1:]
    code = [body for name, body in zip(parts[::2], parts[1::2], strict=True)
            if "cpython" not in name]
    assert code
    return "".join(code)


def exp_loop(x, out):
    for i in range(len(x)):
        out[i] = kernels.exp_cell(x[i])


def sigmoid_loop(x, out):
    for i in range(len(x)):
        out[i] = kernels.sigmoid_cell(x[i])


def mingru_loop(x, hgp, state, out):
    n = len(x)
    h, g, p = hgp[:n], hgp[n : 2 * n], hgp[2 * n :]
    for i in range(n):
        candidate, z, q = kernels.mingru_gates_cell(h[i], g[i], p[i])
        s, y = kernels.mingru_cell(x[i], candidate, z, q, state[i], True)
        state[i] = s
        out[i] = y


def mingru_grad_loop(x, hgp, state, dy, carry):
    n = len(x)
    h, g, p = hgp[:n], hgp[n : 2 * n], hgp[2 * n :]
    for i in range(n):
        h[i], g[i], p[i], dy[i], carry[i] = kernels.mingru_cell_grad(
            x[i], h[i], g[i], p[i], state[i], True, dy[i], carry[i])


def advantage_loop(values, rewards, done, cut, live, ratios, carry, mean, gamma, gae_lambda, rho_clip, c_clip,
                   reward_clip):
    n = len(values) // 3
    value, following, follows = values[:n], values[n : 2 * n], values[2 * n :]
    for i in range(n):
        a, v, f = kernels.advantage_cell(value[i], rewards[i], done[i] != 0, cut[i] != 0, kernels.ZERO, ratios[i],
                                         live[i] != 0, carry[i], following[i], follows[i], mean, gamma, gae_lambda,
                                         rho_clip, c_clip, reward_clip)
        carry[i] = a
        following[i] = v
        follows[i] = f


def ppo_loop(logprobs, old, advantages, out, ratios, clip_coef):
    for i in range(len(old)):
        loss, gradient, ratio, _ = kernels.ppo_cell(logprobs[i], old[i], advantages[i], clip_coef)
        advantages[i] = loss
        out[i] = gradient
        ratios[i] = ratio


def value_loop(new, old, target, out, vf_clip_coef):
    for i in range(len(new)):
        loss, gradient = kernels.value_cell(new[i], old[i], target[i], vf_clip_coef)
        target[i] = loss
        out[i] = gradient


def nesterov_loop(gradients, buffers, updates, momentum):
    for i in range(len(gradients)):
        buffers[i], updates[i] = kernels.nesterov_cell(gradients[i], buffers[i], momentum)


B = numba.uint8[::1]
LOOPS = {exp_loop: (F, F), sigmoid_loop: (F, F), mingru_loop: (F,) * 4, mingru_grad_loop: (F,) * 5,
         advantage_loop: (F, F, B, B, B, F, F, *(f4,) * 6), ppo_loop: (*(F,) * 5, f4),
         value_loop: (*(F,) * 4, f4), nesterov_loop: (*(F,) * 3, f4)}


@needs_avx
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_cell_is_vectorised_in_single_precision(loop):
    compiled = numba.njit(LOOPS[loop], error_model="numpy", fastmath=arena.FASTMATH)(loop)
    assembly = assembly_of(compiled)
    assert PACKED.search(assembly), f"{loop.__name__} is scalar"
    assert not CONVERSIONS.search(assembly), CONVERSIONS.search(assembly)[0]


def test_the_conversion_check_sees_a_bare_literal():
    @numba.njit((F, F), error_model="numpy", fastmath=arena.FASTMATH)
    def careless(x, out):
        for i in range(len(x)):
            out[i] = x[i] * 0.1

    if llvmlite.binding.get_default_triple().startswith("x86_64"):
        assert CONVERSIONS.search(assembly_of(careless))
    else:
        pytest.skip("the check reads x86-64 assembly")


# Packed arithmetic that each hot loop needs at least: the divisions of its sigmoids,
# or its multiplications.
DRIVERS = {"_advantage_lanes": "mul", "_sample_discrete_lanes": "mul", "_mingru_step_lanes": "div",
           "_mingru_scan_lanes": "div", "_mingru_scan_grad_lanes": "mul", "_nesterov_lanes": "mul",
           "_apply_lanes": "mul"}


def compiled_anew(driver):
    """The driver for the types of its last call, as it is compiled when it is not kept."""
    options = {name: value for name, value in driver.targetoptions.items() if name not in ("nopython", "boundscheck")}
    again = numba.njit(pipeline_class=driver._compiler.pipeline_class, **options)(driver.py_func)
    again.compile(driver.signatures[0])
    return again


@needs_avx
@pytest.mark.parametrize("name", DRIVERS)
def test_cpu_driver_is_vectorised(name):
    """The driver as it runs; the cache keeps no assembly."""
    calls = {"_advantage_lanes": "advantage", "_sample_discrete_lanes": "sample", "_mingru_step_lanes": "mingru_step",
             "_mingru_scan_lanes": "mingru_scan",
             "_mingru_scan_grad_lanes": "mingru_scan_grad"}
    driver = getattr(kernels, name)
    if name in calls:
        function, tensors, options = good_calls()[calls[name]]
        function(**tensors, **options)
    else:
        _, optimizer = adopted(Weights([(3, 4)]), lambda a: optim.Muon(a))
        optimizer.step(0.1)
    assembly = assembly_of(compiled_anew(driver))
    wide = re.compile(r"\tv(?:div|rcp14)ps\t.*%[yz]mm" if DRIVERS[name] == "div"
                      else r"\tv(?:mul|fn?m(?:add|sub)\d*)ps\t.*%[yz]mm")
    assert wide.search(assembly), f"{name} is scalar"
    assert not CONVERSIONS.search(assembly), CONVERSIONS.search(assembly)[0]
    assert ("\tprefetch" in assembly) == ("scan" in name)  # steps of a segment lie far apart: they are asked for ahead


@pytest.mark.parametrize("call, driver, loops", [
    ("ppo_loss", "_ppo_loss_discrete_lanes", ("_head_rows", "_objective_rows", "_logit_grad_rows")),
    ("sample", "_sample_discrete_lanes", ("_uniform_rows", "_choose_rows"))])
def test_rows_lie_side_by_side(call, driver, loops):
    """numba knows that their numbers do, else their loops are scalar: what it unpacks from an array of two dimensions,
    it takes to have any stride."""
    function, tensors, options = good_calls()[call]
    function(**tensors, **options)
    compiled_anew(getattr(kernels, driver))  # and what it calls
    for rows in (getattr(kernels, name) for name in loops):
        arrays = [kind for kind in rows.signatures[0] if isinstance(kind, numba.types.Array)]
        assert arrays and {array.layout for array in arrays} == {"C"}, rows.__name__


# --------------------------------------------------------------------------------------------------
# Nothing is kept, nothing large is made


def held_by_numba():
    """Blocks that numba's runtime has handed out and not got back."""
    return rtsys.get_allocation_stats().alloc - rtsys.get_allocation_stats().free


@pytest.fixture
def counting():
    was_on = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    if not was_on:
        _nrt_python.memsys_disable_stats()


def growth(function, repeats=50):
    """(Python and numpy bytes kept, their peak above the start, numba blocks
    kept) over the repeats."""
    for _ in range(3):
        function()
    blocks, (before, _) = held_by_numba(), tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for _ in range(repeats):
        function()
    gc.collect()  # Python's free lists of small tuples too
    after, peak = tracemalloc.get_traced_memory()
    return after - before, peak - before, held_by_numba() - blocks


def test_the_memory_check_sees_a_leak(counting):
    kept = []
    assert growth(lambda: kept.append(np.zeros(1000)))[0] > 50 * 8000

    @numba.njit
    def make():
        return np.zeros(1000)

    make()
    assert growth(lambda: kept.append(make()))[2] >= 50


@pytest.mark.parametrize("call", good_calls())
def test_repeated_calls_keep_no_memory(call, counting):
    function, tensors, options = good_calls()[call]
    # what is kept is kept each time; another thread of the test's process may allocate once
    seen = []
    for _ in range(3):
        seen.append(growth(lambda: function(**tensors, **options)))
        kept, peak, blocks = seen[-1]
        if kept < 4096 and peak < 65536 and blocks == 0:
            return
    raise AssertionError(f"bytes kept, their peak, and blocks of numba's: {seen}")


@pytest.mark.slow
def test_muon_keeps_no_memory_and_makes_no_large_block(counting):
    module = Weights([(192, 64), (64, 118), (192, 64), (4, 64), (64,)])
    arena, optimizer = adopted(module, lambda a: optim.Muon(a))
    arena.flat("gradients").fill_(0.01)
    kept, peak, blocks = growth(lambda: optimizer.step(0.01), 20)
    assert kept < 4096 and peak < 65536 and blocks == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step(0.01)
        probe = torch.zeros(20_000)  # 80 kB, which the profile must show
    del probe
    large = [(event.name, event.cpu_memory_usage) for event in profile.events()
             if event.self_cpu_memory_usage >= 65536]
    assert len(large) == 1 and large[0][1] == 80_000, f"blocks made: {large}"
