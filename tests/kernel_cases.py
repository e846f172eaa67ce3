"""List calls of every kernel with float64 results, for the tests on all devices.

    call = kernel_cases.advantage(T=7, N=5)     # small random arguments, outputs full of NaN
    call.check()                                # every output against tests/reference.py

`CASES` are the calls whose numbers are compared, `SMALL` has one valid call of each kind.
"""

import math

import pytest
import reference
import torch

import arena
import kernels

NAN = math.nan
THREAD_COUNTS = (1, 2, 3)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def poison(*shape, dtype=torch.float32):
    """Return an output for a call: NaN, or a number that no kernel writes."""
    return torch.full(shape, NAN if dtype.is_floating_point else 77, dtype=dtype)


def flags(rng, probability, *shape):
    return (torch.rand(shape, generator=rng) < probability).to(torch.uint8)


def close(actual, expected, tolerance=1e-5, name=""):
    """Assert |actual - expected| <= tolerance · (1 + |expected|); a NaN is not."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert actual.shape == expected.shape, name
    error = (actual - expected).abs() / (1 + expected.abs())
    assert actual.numel() == 0 or (error <= tolerance).all(), (
        f"{name}: error {error.max():.2e} above {tolerance:.0e}")


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).clone()


class Call:
    """A kernel's call; compare(**written) yields (name, actual, expected, tolerance)."""

    def __init__(self, kernel, written, compare, *, scratch=(), **arguments):
        self.kernel, self.written, self.compare = kernel, written, compare
        self.scratch, self.arguments = scratch, arguments

    @property
    def tensors(self):
        return {name: value for name, value in self.arguments.items()
                if isinstance(value, torch.Tensor)}

    def run(self, **changes):
        """Return what the call writes or returns, by name."""
        arguments = self.arguments | changes
        return self.outputs(arguments, getattr(kernels, self.kernel)(**arguments))

    def outputs(self, arguments, result):
        """Return what was written to the arguments, and the result, as tensors on the CPU."""
        if isinstance(result, float):
            result = torch.tensor(result, dtype=torch.float64)
        outputs = {name: arguments[name].cpu() for name in self.written}
        return outputs if result is None else {**outputs, "result": result.cpu()}

    def check(self):
        """Compare all outputs; no other argument may change."""
        inputs = self.tensors.keys() - {*self.written, *self.scratch}
        before = {name: bits(self.tensors[name]) for name in inputs}
        for name, actual, expected, tolerance in self.compare(**self.run()):
            close(actual, expected, tolerance, name)
        for name, old in before.items():
            assert torch.equal(bits(self.tensors[name]), old), f"{name} was changed"


# -- Sample


def some_masks(rng, n, heads):
    """Random masks with at least one allowed action a head."""
    masks = flags(rng, 0.6, n, sum(heads))
    first = 0
    for size in heads:
        masks[torch.arange(n), torch.randint(size, (n,), generator=rng) + first] = 1
        first += size
    return masks


def bounds(dims, mixed=False):
    """Return models.squash's rows; mixed: two of three have at most one bound."""
    low, high = -1.0 - torch.arange(dims), torch.linspace(0.5, 4.0, dims)
    middle, half = (low + high) / 2, (high - low) / 2
    if mixed:
        unbounded = torch.arange(dims) % 3 > 0
        middle[unbounded], half[unbounded] = 0.0, -1.0
    return torch.stack([middle, half, half.abs().log()])


FAR = {"seed": 2**63 + 9, "step": 2**33 + 5, "first_agent": 4_000_000_000}


def uniforms(n, parts, seed=0, step=0, first_agent=0):
    """Return two numbers in [0, 1) per agent and head or dimension, (2, n, parts)."""
    low, high, key = step & 0xFFFFFFFF, step >> 32 << 16, (seed & 0xFFFFFFFF, seed >> 32)
    words = [[reference.philox4x32((first_agent + i, low, high | part, 1), key)[:2]
              for part in range(parts)] for i in range(n)]
    return (torch.tensor(words).permute(2, 0, 1) >> 8) * torch.tensor(2.0**-24, dtype=torch.float64)


def sample(n=5, heads=None, dims=None, masked=False, wide=False, squash=None, far=False,
           outputs=None, log_std=None, masks=None, **options):
    """Make a call of sample; `wide`: a log-std for every agent; squash: see bounds."""
    rng, where = generator(n), FAR if far else {"seed": 7, "step": 0, "first_agent": 0}
    where = {**where, **{name: options.pop(name) for name in FAR if name in options}}
    width = sum(heads) if heads else dims
    outputs = 2 * torch.randn(n, width + 1, generator=rng) if outputs is None else outputs
    arguments = {"outputs": outputs, "logprobs": poison(n), "values": poison(n), **where, **options}
    written, logits = ["actions", "logprobs", "values"], outputs[:, :-1].double()
    deterministic = options.get("deterministic", False)
    if heads:
        masks = some_masks(rng, n, heads) if masked else masks
        if masked:
            outputs[:, :-1] += 40 * (masks == 0)  # forbidden, however likely
        arguments |= {"heads": torch.tensor(heads), "masks": masks,
                      "actions": poison(n, len(heads), dtype=torch.int32)}
    else:
        if log_std is None:
            log_std = 0.5 * torch.randn(*((n, dims) if wide else (dims,)), generator=rng)
        arguments |= {"log_std": log_std, "actions": poison(n, dims)}
        if squash:
            arguments |= {"squash": bounds(dims, squash == "mixed"), "samples": poison(n, dims)}
            written.append("samples")

    def discrete(actions, logprobs, values):
        logp = reference.log_softmax_heads(logits, heads, masks)
        u = uniforms(n, len(heads), **where)[0]
        for head, p in enumerate(logp.exp().split(heads, 1)):
            cdf, chosen = p.cumsum(1), actions[:, head].long()
            expected = p.argmax(1) if deterministic else torch.searchsorted(
                cdf, u[:, head, None] * cdf[:, -1:], right=True)[:, 0]
            # float32 may land on the other side of a step
            near = (cdf - u[:, head, None]).abs().amin(1) < 1e-6
            assert ((chosen == expected) | (near & (not deterministic))).all()
            assert (p.gather(1, chosen[:, None]) > 0).all()
        yield "values", values, outputs[:, -1], 0
        logprob, _ = reference.discrete_logprob_entropy(logits, actions, heads, masks)
        yield "logprobs", logprobs, logprob, 2e-6

    def continuous(actions, logprobs, values, samples=None):
        u, v = uniforms(n, dims, **where)
        noise = (-2 * (-u).log1p()).sqrt() * (2 * math.pi * v).cos() * (not deterministic)
        drawn, spread = actions if samples is None else samples, log_std.double()
        yield "values", values, outputs[:, -1], 0
        yield "samples", drawn, logits + spread.exp() * noise, 3e-6
        rows, drawn = arguments.get("squash"), drawn.double()
        if rows is not None:
            middle, half, _ = rows = rows.double()
            expected = torch.where(half > 0, middle + half * drawn.tanh(), middle - half * drawn)
            yield "actions", actions, expected, 1e-6
        logprob, _ = reference.logprob_entropy(logits, drawn, log_std=spread, squash=rows)
        yield "logprobs", logprobs, logprob, 1e-5

    return Call("sample", written, discrete if heads else continuous, **arguments)


# -- Advantage, priorities, draw, gather, write back


GAE = {"gamma": 0.97, "gae_lambda": 0.9, "rho_clip": 1.3, "c_clip": 0.9}


def rollout(T, N, seed=0, live=0.85):
    rng = generator(seed)
    truncations = flags(rng, 0.1, T, N)
    return {"values": torch.randn(T + 1, N, generator=rng), "rewards": 2 * torch.randn(T, N, generator=rng),
            "terminals": flags(rng, 0.15, T, N), "truncations": truncations,
            "bootstraps": torch.randn(T, N, generator=rng) * truncations,
            "ratios": (0.5 * torch.randn(T, N, generator=rng)).exp(), "valid": flags(rng, live, T + 1, N)}


def advantage(T=3, N=5, index=None, offset=None, seed=0, live=0.85, **settings):
    data, settings = rollout(T, N, seed or N, live), GAE | settings
    if offset is not None:  # every step pays it, so nearly all of it is in the offset
        data["bootstraps"] *= data["terminals"] == 0  # nothing follows a terminal step
        data["rewards"] += offset
    index = None if index is None else torch.tensor(index)

    def compare(advantages):
        doubles = {name: value.double() if value.is_floating_point() else value
                   for name, value in data.items()}
        options = {name.replace("gae_lambda", "lam"): value for name, value in settings.items()}
        expected = reference.advantage(**doubles, offset=offset or 0.0, **options)
        chosen = torch.ones(N, dtype=torch.bool)
        if index is not None:
            chosen.fill_(False)[index] = True
        yield "advantages", advantages[:, chosen], expected[:, chosen], 1e-5
        assert advantages[:, ~chosen].isnan().all()

    return Call("advantage", ["advantages"], compare, **data, **settings, index=index,
                advantages=poison(T, N), offset=torch.tensor([offset or 0.0]))


def priorities(T=3, N=5, alpha=0.5, index=None):
    rng = generator(N)
    advantages, valid = torch.randn(T, N, generator=rng), flags(rng, 0.8, T + 1, N)
    valid[:-1, N // 2] = 0  # an inactive segment: valid only in row T, which does not count
    index = None if index is None else torch.tensor(index)

    def compare(priorities):
        expected = reference.priorities(advantages.double(), valid, alpha)
        assert N < 5 or expected[N // 2] == 0 < expected.sum()
        here = torch.arange(N) if index is None else index
        yield "priorities", priorities[here], expected[here], 1e-12
        assert priorities.isnan().sum() == N - len(here.unique())

    return Call("priorities", ["priorities"], compare, advantages=advantages, valid=valid,
                alpha=alpha, priorities=poison(N, dtype=torch.float64), index=index)


def draw_segments(N=5, M=4, priorities=None, seed=5, counter=(0, 0), beta=0.6):
    if priorities is None:
        priorities = torch.rand(N, generator=generator(N), dtype=torch.float64) * 7
        priorities[:-1:3] = 0

    def compare(index, weights):
        p = priorities / priorities.sum()
        yield "index", index, reference.draw_segments(p, M, seed, *map(int, counter)), 0
        assert (priorities[index] > 0).all()
        yield "weights", weights, reference.importance_weights(p, beta)[index], 1e-6

    return Call("draw_segments", ["index", "weights"], compare, scratch=["cumulative"],
                priorities=priorities, weights=poison(M),
                cumulative=poison(len(priorities), dtype=torch.float64),
                index=poison(M, dtype=torch.int64), seed=seed, counter=counter, beta=beta)


def gather(source=torch.float32, out=torch.float32, tail=(3, 17), scaled=False, T=5, N=19, M=4,
           start=3):
    rng = generator()
    data = (100 * torch.rand(T + 1, N, *tail, generator=rng)).to(source)
    index, arguments = torch.randint(N, (start + M + 4,), generator=rng), {}
    if scaled:
        shift = 40 + 20 * torch.rand(tail, generator=rng)
        if data.element_size() == 8:  # float32 has every hundredth number there
            data, shift = data + 10**9, shift.double() + 10**9
        arguments = {"shift": shift, "scale": 0.3 + 0.2 * torch.rand(tail, generator=rng)}

    def compare(out):
        expected = torch.from_numpy(data.numpy()[:T, index[start : start + M].numpy()])
        if not scaled:
            yield "out", out, expected.to(out.dtype), 0
            return
        expected = ((expected.double() - arguments["shift"]) * arguments["scale"]).clamp(-10, 10)
        assert (expected.abs() == 10).any() and (expected.abs() < 10).any()
        yield "out", out, expected, 1e-5 if out.dtype == torch.float32 else 1e-2

    return Call("gather", ["out"], compare, source=data, index=index, start=start, **arguments,
                out=poison(T, M, *tail, dtype=out))


def write_back(T=4, N=5, M=5):
    rng = generator(N)
    index = torch.randint(N, (M,), generator=rng).sort().values
    # a segment that is drawn twice has equal columns
    news = [columns[:, index].contiguous() for columns in torch.randn(2, T, N, generator=rng)]
    values, ratios = torch.randn(T + 1, N, generator=rng), torch.randn(T, N, generator=rng)
    before = values.clone(), ratios.clone()

    def compare(counter, values, ratios):
        before[0][:T, index], before[1][:, index] = news
        yield "values", values, before[0], 0
        yield "ratios", ratios, before[1], 0
        yield "counter", counter, torch.tensor([3, 8]), 0

    return Call("write_back", ["counter", "values", "ratios"], compare, index=index,
                new_values=news[0], new_ratios=news[1], counter=torch.tensor([3, 7]),
                values=values, ratios=ratios)


# -- MinGRU


def segments(T, M, H, seed=0, columns=None, resets=0.2, live=0.8, rows=0, scale=1.0, rounded=False,
             dtype=torch.float32):
    """Make the arguments of a scan; rounded: to bfloat16, in arrays of this dtype."""
    rng = generator(seed)
    columns = columns or M
    data = {"hgp": 2 * scale * torch.randn(T, M, 3 * H, generator=rng),
            "x": torch.randn(T, M, H, generator=rng)}
    if rounded:
        data = {name: tensor.bfloat16().to(dtype) for name, tensor in data.items()}
    return data | {"states": torch.cat([torch.randn(1, M, H, generator=rng), poison(T, M, H)]),
                   "resets": flags(rng, resets, T + rows, columns),
                   "valid": flags(rng, live, T + rows, columns)}


def mingru_scan(T=3, M=4, H=6, seed=0, start=0, columns=None, resets=0.2, live=0.8, drawn=False,
                scale=1.0, rounded=False, dtype=torch.float32):
    """Make a call; drawn: segments are columns of an index, initial of all agents."""
    columns = columns or start + M
    data = segments(T, M, H, seed, columns, resets, live, seed % 2, scale, rounded, dtype)
    rng, where, chosen, first = generator(seed + 1), {"start": start}, torch.arange(columns), data["states"][0].clone()
    if drawn:
        where["index"] = chosen = torch.randint(columns, (start + M,), generator=rng)
        where["initial"], data["states"] = torch.randn(columns, H, generator=rng), poison(T + 1, M, H)
    chosen = chosen[start : start + M]
    first = where["initial"][chosen] if drawn else first
    hgp, x = data["hgp"].double(), data["x"].double()

    def compare(states, out):
        resets, valid = (data[name][:T, chosen] for name in ("resets", "valid"))
        expected, after = reference.mingru_layer(x, hgp, first.double(), resets, valid)
        yield "first states", states[0], first, 0
        size = max(scale * 5, 1.0)  # rounding is that of the largest state
        yield "out", out / size, expected / size, 2e-6
        yield "states", states[1:] / size, after / size, 2e-6

    return Call("mingru_scan", ["states", "out"], compare, scratch=["hgp"], **data, **where,
                out=poison(T, M, H, dtype=dtype))


def mingru_scan_grad(T=3, M=4, H=6, **options):
    scan = mingru_scan(T, M, H, **options)
    data = dict(scan.arguments)
    hgp, x = (data[name].double().requires_grad_() for name in ("hgp", "x"))
    scan.run()
    data = {name: value for name, value in data.items() if name not in ("out", "initial")}
    rng = generator(options.get("seed", 0) + 1)
    dy = torch.randn(T, M, H, generator=rng).bfloat16().to(data["x"].dtype)
    # which the scan has taken
    slope, start, first = dy.double(), data["start"], data["states"][0].double()
    chosen = data.get("index", torch.arange(data["resets"].shape[1]))[start : start + M]

    def compare(**written):
        hgp_grad, dx, sums = written.values()
        resets, valid = (data[name][:T, chosen] for name in ("resets", "valid"))
        expected, _ = reference.mingru_layer(x, hgp, first, resets, valid)
        d_hgp, d_x = torch.autograd.grad(expected, (hgp, x), slope)
        yield "hgp", hgp_grad, d_hgp, 1e-5
        yield "sums", sums, d_hgp.sum(0), 1e-5
        yield "grad_out", dx, d_x, 1e-5

    return Call("mingru_scan_grad", ["hgp", "grad_out", "sums"], compare, **data, grad_out=dy,
                sums=poison(M, 3 * H))


def mingru_step(M=4, H=6, rounded=False, dtype=torch.float32):
    data = segments(1, M, H, seed=M, rounded=rounded, dtype=dtype)
    state = data.pop("states")[0].clone()
    data = {name: tensor[0] for name, tensor in data.items()}
    before = state.double()

    def compare(state, out):
        x, hgp, *flags = (data[name][None] for name in ("x", "hgp", "resets", "valid"))
        expected, states = reference.mingru_layer(x.double(), hgp.double(), before, *flags)
        yield "out", out, expected[0], 2e-6
        yield "state", state, states[0], 2e-6

    return Call("mingru_step", ["state", "out"], compare, **data, state=state,
                out=poison(M, H, dtype=dtype))


# -- PPO loss

COEFFICIENTS = dict.fromkeys(kernels.LOSS_SETTINGS[kernels.CLIP_COEF :], 0.05) | {
    "clip_coef": 0.2, "vf_coef": 1.7, "vf_clip_coef": 0.3, "min_advantage_std": 0.0, "vf_error_bound": math.inf}


def minibatch(T, B, *, heads=None, dims=None, masked=False, seed=0, live=0.8, spread=0.4, N=None,
              wide=False, squash=False):
    """Make the inputs of one loss over B segments.

    They are columns `index` of a rollout of N (all in order if N is None); at least one step is
    valid. `wide`: the log-std has a row for every step.
    """
    rng = generator(seed)
    index = None if N is None else torch.randint(N, (B,), generator=rng).sort().values
    N, columns = N or B, slice(None) if index is None else index
    outputs = torch.randn(T, N, (sum(heads) if heads else dims) + 1, generator=rng)
    values = torch.randn(T, N, generator=rng)
    data = {"values": torch.cat([values, poison(1, N)]),  # row T is not read
            "advantages": 2 * torch.randn(T, N, generator=rng) + 0.3,
            "weights": torch.rand(B, generator=rng) + 0.5,
            "valid": flags(rng, live, T + 1, N), "index": index}
    data["valid"][T // 2, N // 2 if index is None else index[B // 2]] = 1
    if heads:
        masks = some_masks(rng, (T + 1) * N, heads) if masked else None
        flat, mask = outputs[..., :-1].reshape(T * N, -1), masks[: T * N] if masked else None
        logp = reference.log_softmax_heads(flat, heads, mask)
        actions = torch.stack([torch.multinomial(p.exp(), 1, generator=rng)[:, 0]
                               for p in logp.split(heads, -1)], -1)
        logprobs, _ = reference.discrete_logprob_entropy(flat.double(), actions, heads, mask)
        data |= {"heads": torch.tensor(heads), "actions": actions.int().view(T, N, -1)}
        if masked:
            data["masks"] = masks.view(T + 1, N, -1)
            outputs[..., :-1] += 40 * (data["masks"][:T] == 0)
    else:
        log_std = 0.4 * torch.randn(*((T, N) if wide else ()), dims, generator=rng)
        noise = torch.randn(T, N, dims, generator=rng)
        data["actions"] = outputs[..., :-1] + log_std.exp() * noise
        if squash:
            data["squash"] = bounds(dims, squash == "mixed")
        logprobs, _ = reference.logprob_entropy(
            outputs[..., :-1].double(), data["actions"].double(), log_std=log_std.double(),
            squash=data["squash"].double() if squash else None)
        data["log_std"] = log_std[:, columns].contiguous() if wide else log_std
    data["logprobs"] = logprobs.view(T, N).float() + spread * torch.randn(T, N, generator=rng)
    data["outputs"] = outputs[:, columns].contiguous()
    return data


def drawn(data, name):
    """Return the part of a rollout array that the loss uses; floats as float64."""
    array = data[name][: len(data["outputs"])]
    array = array if data["index"] is None else array[:, data["index"]]
    return array.double() if array.is_floating_point() else array


def expected_loss(data, **coefficients):
    """Return the reference's (statistics, d loss/d outputs, d loss/d log_std or None)."""
    outputs = data["outputs"].double().requires_grad_()
    log_std = data["log_std"].double().requires_grad_() if "log_std" in data else None
    rows = log_std  # of which the reference takes one for each valid step as well
    if log_std is not None and log_std.ndim > 1:
        rows = log_std[drawn(data, "valid") != 0]
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
    moments = kernels.masked_moments(data["advantages"], data["valid"], index)
    settings = torch.tensor([coefficients.get(name, 0.0) for name in kernels.LOSS_SETTINGS])
    kernels.normalisation(moments, settings)
    return settings


def compare_loss(data, coefficients, tolerance, grad, new_values, ratios, sums, grad_log_std=None):
    statistics = kernels.loss_statistics(sums)
    expected, slopes, spreads = expected_loss(data, **coefficients)
    for name, value in statistics.items():
        if name != "explained_variance" or expected[name].isfinite():  # else rounding decides
            yield name, value, expected[name].detach(), tolerance
    live = drawn(data, "valid") != 0
    count = live.sum()
    yield "grad", grad * count, slopes * count, 2 * tolerance
    yield "ratios", ratios, expected["ratio"], tolerance
    old = torch.where(live, data["outputs"][..., -1], drawn(data, "values").float())
    yield "new_values", new_values, old, 0
    yield "count", sums[-1], count, 0
    if spreads is not None and spreads.ndim == 1:
        yield "grad_log_std", grad_log_std.double().sum((0, 1)), spreads, tolerance
    elif spreads is not None:
        yield "grad_log_std", grad_log_std * count, spreads * count, 2 * tolerance


def ppo_loss(T=3, B=4, data=None, tolerance=1e-5, coefficients=None, **options):
    data = minibatch(T, B, **options) if data is None else data
    coefficients = COEFFICIENTS | (coefficients or {})
    T, B, width = data["outputs"].shape
    written = {"grad": poison(T, B, width), "new_values": poison(T, B), "ratios": poison(T, B),
               "sums": torch.zeros(kernels.SUMS, dtype=torch.float64)}
    if "log_std" in data:
        written["grad_log_std"] = poison(T, B, width - 1)
    return Call("ppo_loss", list(written),
                lambda **outputs: compare_loss(data, coefficients, tolerance, **outputs), **written,
                **data, settings=loss_settings(data, **coefficients))


def in_chunks(call, sizes):
    """Run a ppo_loss call in chunks of so many segments."""
    whole, results, start = call.arguments, [], 0
    for size in sizes:
        here = slice(start, start + size)
        part = {name: whole[name][:, here].contiguous() for name in ("outputs", "grad")}
        for name in ("log_std", "grad_log_std"):
            if whole.get(name) is not None and whole[name].ndim > 1:
                part[name] = whole[name][:, here].contiguous()
        results.append(call.run(**part, start=start))
        start += size
    joined = {name: torch.cat([result[name] for result in results], 1)
              for name in call.written if name.startswith("grad")}
    return results[-1] | joined


def masked_moments(T=9, N=5, M=12):
    rng = generator(N)
    advantages, valid = 3 * torch.randn(T, N, generator=rng) + 100, flags(rng, 0.7, T + 1, N)
    valid[0, 0] = 1
    index = torch.randint(N, (M,), generator=rng)
    index[0] = 0

    def compare(result):
        x = advantages[:, index].double()[valid[:-1, index] != 0]
        expected = torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()])
        yield "moments", result, expected, 1e-12

    return Call("masked_moments", [], compare, numbers=advantages, valid=valid, index=index)


def normalisation(N=5, bound=1e30, floor=0.0):
    x = 3 * torch.randn(N, generator=generator(N), dtype=torch.float64) + 100
    moments = torch.stack([x.new_tensor(N), x.sum(), x.square().sum()])

    def compare(settings):
        yield "mean", settings[0], x.mean(), 1e-7
        yield "1/count", settings[2], 1 / N, 1e-7
        if N > 1 or floor:
            yield "1/scale", 1 / settings[1].double(), x.std(correction=0).clamp(min=floor), 1e-7
        yield "value", settings[3], 7 / (x.std(correction=0) / bound).clamp(min=1) ** 1.5, 1e-7
        yield "others", settings[4:], others, 0

    settings = torch.full((len(kernels.LOSS_SETTINGS),), 7.0)
    settings[kernels.VF_ERROR_BOUND], settings[kernels.MIN_ADVANTAGE_STD] = bound, floor
    others = settings[4:].clone()
    return Call("normalisation", ["settings"], compare, moments=moments, settings=settings)


def gradient_norm(n=9):
    flat = torch.randn(n, generator=generator(n)) * 1e3

    def compare(result):
        norm = flat.double().norm()
        yield "norm", result.double() / norm, torch.ones((), dtype=torch.float64), 1e-12

    return Call("gradient_norm", [], compare, flat=flat)


def observation_moments(rows=7, D=5, dtype=torch.float32):
    rng = generator(D)
    observations = (100 * torch.rand(rows, D, generator=rng)).to(dtype)
    valid = flags(rng, 0.6, rows)
    center = 40 + 20 * torch.rand(D, generator=rng, dtype=torch.float64)

    def compare(result):
        x = observations.double()[valid != 0] - center
        yield "sums", result, torch.stack([x.sum(0), x.square().sum(0)]), 1e-12

    return Call("observation_moments", [], compare, observations=observations, valid=valid,
                center=center)


def add_bias_gradients(n=7, columns=5, dtype=torch.float32, add=True):
    """Make a call with two pairs, which adds to gradients or replaces them."""
    rng = generator(n)
    sources = [torch.randn(n, columns, generator=rng).to(dtype)]
    sources.append(sources[0].float()[::2].contiguous())
    pairs = [(rows, torch.randn(columns, generator=rng) if add else poison(columns))
             for rows in sources]
    before = [gradient.double() if add else 0.0 for _, gradient in pairs]

    def compare():
        for (rows, gradient), old in zip(pairs, before, strict=True):
            yield "gradient", gradient, old + rows.double().sum(0), 1e-6 * n**0.5

    return Call("add_bias_gradients", [], compare, pairs=pairs, accumulate=add)


# -- The tables

DTYPES = (torch.float32, torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16,
          torch.uint32, torch.int32, torch.uint64, torch.int64, torch.float64)
KINDS = [{"heads": [3]}, {"heads": [1]}, {"heads": [2, 5, 3]}, {"heads": [3], "masked": True},
         {"heads": [4, 3], "masked": True}, {"dims": 1}, {"dims": 4}, {"dims": 3, "wide": True},
         {"dims": 3, "squash": True}, {"dims": 2, "squash": True, "wide": True},
         {"dims": 4, "squash": "mixed"}]
SCANS = [{"T": T, "M": M, "H": H} for T, M, H in (
    (1, 1, 1), (3, 17, 3), (17, 3, 65), (64, 5, 64), (9, 65, 17), (2, 257, 1), (65, 1, 257))]
SCANS += [{"T": 5, "M": 7, "H": 3, "seed": 1, "start": 2, "columns": 11, "drawn": True}]
WHOLE = [{"T": T, "B": B} for T, B in ((1, 1), (3, 17), (17, 3), (5, 65), (64, 9))]
DRAWN = [{"T": T, "B": B, "N": N} for T, B, N in ((3, 5, 17), (5, 9, 4), (2, 1, 3))]
EQUAL = {"T": 5, "B": 7, "spread": 0.0}  # ratios of 1: both sides of each max are equal
TABLE = {
    sample: [
        *({"n": n, "heads": heads, "masked": masked, "far": masked}
          for n, heads in ((1, [1]), (3, [2]), (17, [5, 3]), (257, [1, 4, 2]), (65, [33]))
          for masked in (False, True)),
        {"n": 33, "heads": [4, 3], "masked": True, "deterministic": True},
        {"n": 1, "dims": 1}, {"n": 3, "dims": 2, "wide": True, "far": True},
        {"n": 257, "dims": 3}, {"n": 65, "dims": 17, "wide": True},
        {"n": 33, "dims": 7, "deterministic": True}, {"n": 1, "dims": 1, "squash": True},
        {"n": 257, "dims": 3, "squash": True, "far": True},
        {"n": 65, "dims": 6, "squash": "mixed", "wide": True},
        {"n": 33, "dims": 2, "squash": True, "deterministic": True},
        *({"n": 1, "dims": 2, "squash": True, "outputs": far * torch.tensor([[1.0, -1.0, 0.0]])}
          for far in (9.0, 60.0))],
    advantage: [
        *({"T": T, "N": N} for T, N in ((1, 1), (2, 3), (17, 17), (64, 65), (2, 257), (9, 513))),
        *({"T": 17, "N": 67, "offset": offset} for offset in (3.0, -20_000.0)),
        *({"T": 13, "N": 67, "index": index} for index in ([0], [2, 2, 2], [0, 1, 1, 5, 66])),
        {"T": 3, "N": 300, "index": list(range(1, 300))}],
    priorities: [
        {"N": 1, "alpha": 0.4}, {"N": 3, "alpha": 1.0}, {"N": 65, "alpha": 0.0},
        {"T": 7, "N": 257, "alpha": 0.4}, {"N": 17, "alpha": 1.0, "index": [0, 16, 16]},
        {"N": 300, "index": list(range(300))}],
    draw_segments: [{"N": N, "M": M, "seed": 2**50 + 1, "counter": (3, 2), "beta": beta}
                    for N, M, beta in ((1, 1, 0.6), (3, 17, 0.0), (257, 65, 0.6), (65, 1, 1.0),
                                       (1000, 257, 0.6))],
    gather: [
        *({"source": source, "tail": tail} for source in DTYPES for tail in ((), (3, 17))),
        {"tail": (1,)}, {"source": torch.uint8, "out": torch.uint8},
        {"source": torch.int32, "out": torch.int32}, {"out": torch.bfloat16, "scaled": True},
        {"source": torch.uint8, "out": torch.bfloat16}, {"T": 9, "M": 1, "N": 1},
        {"source": torch.uint16, "out": torch.bfloat16, "tail": ()},
        *({"source": source, "scaled": True} for source in (
            torch.float32, torch.uint8, torch.int64, torch.float64)),
        {"scaled": True, "tail": (1,)}],
    write_back: [{"N": N} for N in (1, 3, 17, 257)],
    mingru_step: [{"M": M, "H": H} for M, H in ((1, 1), (3, 17), (65, 3), (257, 65))],
    mingru_scan: [*SCANS, {"T": 4, "M": 3, "H": 5, "scale": 1e4}],
    mingru_scan_grad: SCANS,
    ppo_loss: [*(kind | KIND for kind in KINDS for KIND in (*WHOLE, *DRAWN)),
               *(kind | EQUAL for kind in KINDS),
               *(kind | {"coefficients": {"vf_error_bound": 0.3, "min_advantage_std": 2.0}} for kind in KINDS),
               {"T": 4, "B": 6, "heads": [3], "spread": 30.0}],  # log-ratios are clamped
    masked_moments: [{"N": N} for N in (1, 3, 17, 257)],
    normalisation: [{"N": N, "bound": bound, "floor": floor} for N in (1, 3, 257)
                    for bound, floor in ((0.5, 0.0), (50.0, 1000.0), (1e30, 0.0))],
    gradient_norm: [{"n": n} for n in (1, 3, 4095, 4096, 4097, 100_001)],
    add_bias_gradients: [{"n": n, "columns": columns, "dtype": dtype, "add": n % 2 == 0}
                         for n, columns in ((1, 1), (5, 3), (1000, 64), (7, 192), (70, 300), (5000, 33))
                         for dtype in (torch.float32, torch.bfloat16)],
    observation_moments: [{"rows": 1, "D": 1}, {"rows": 257, "D": 33}] + [
        {"rows": 7, "dtype": dtype} for dtype in (torch.uint8, torch.float64, torch.int32)],
}


def params(table):
    return [pytest.param(make, options, id=f"{make.__name__}-{str(options)[1:60]}".replace(" ", ""))
            for make, rows in table.items() for options in rows]


# numba's simulator is slow: the drivers that run there, few lanes of each
SIMULATED = {make: [options for options in TABLE[make]
                    if all(size < 20 for size in options.values() if isinstance(size, int))]
             for make in (sample, gather, write_back, mingru_step, normalisation)}
CASES = params(SIMULATED if arena.SIMULATOR else TABLE)
INDEX = [0, 1, 1, 3]
SMALL = {  # a right call of each kind, whose sizes all differ
    "sample": lambda: sample(heads=[2, 3], masks=torch.ones(5, 5, dtype=torch.uint8), step=torch.tensor([3])),
    "sample continuous": lambda: sample(dims=4),
    "sample squashed": lambda: sample(dims=4, squash=True, wide=True),
    "advantage": advantage,
    "advantage columns": lambda: advantage(index=INDEX, offset=1.0),
    "priorities": lambda: priorities(index=INDEX),
    "draw_segments": lambda: draw_segments(counter=torch.tensor([3, 2]), beta=torch.tensor([0.6])),
    "gather": lambda: gather(tail=(2,), T=3, N=5, M=4),
    "gather scaled": lambda: gather(tail=(2,), scaled=True),
    "write_back": lambda: write_back(T=3, N=5, M=4),
    "mingru_step": mingru_step,
    "mingru_scan": mingru_scan,
    "mingru_scan drawn": lambda: mingru_scan(drawn=True, columns=5),
    "mingru_scan_grad": mingru_scan_grad,
    "ppo_loss": lambda: ppo_loss(heads=[2, 3], masked=True),
    "ppo_loss continuous": lambda: ppo_loss(dims=5, N=6),
    "masked_moments": lambda: masked_moments(T=3, N=5, M=4),
    "normalisation": normalisation,
    "gradient_norm": gradient_norm,
    "observation_moments": observation_moments,
}

# -- Cells: what each takes and returns (float32, int32, uint32, uint16, bool)

CELLS = {
    "power_of_two": ("f", "f"), "exp_cell": ("f", "f"), "sigmoid_cell": ("f", "f"),
    "log_cell": ("f", "f"), "half_tanh_cell": ("f", "f"), "tanh_cell": ("f", "f"),
    "exponent_and_mantissa": ("f", "ff"), "cos_turn_cell": ("f", "f"), "uniform_cell": ("u", "f"),
    "philox_cell": ("uuuuuu", "uuuu"), "float_of_bfloat": ("h", "f"), "bfloat_of_float": ("f", "h"),
    "normalise_cell": ("fff", "f"), "advantage_cell": ("ffbbffbfffffffff", "fff"),
    "mingru_gates_cell": ("fff", "fff"), "mingru_cell": ("fffffb", "ff"),
    "mingru_cell_grad": ("fffffbff", "fffff"), "ppo_cell": ("ffff", "ffff"),
    "value_cell": ("ffff", "ff"), "entropy_cell": ("ff", "f"), "entropy_grad_cell": ("fff", "f"),
    "nesterov_cell": ("fff", "ff"), "squash_cell": ("ff", "ff"), "gaussian_cell": ("ffff", "ff"),
    "gaussian_draw_cell": ("ffuub", "ff"),
}


def cell_loop(name):
    """Return loop(in0, ..., out0, ...) over arrays that applies the cell, in Python."""
    inputs, outputs = ([f"{kind}{i}" for i in range(len(kinds))]
                       for kind, kinds in zip(("in", "out"), CELLS[name], strict=True))
    scope = {"cell": getattr(kernels, name)}
    targets, values = (", ".join(f"{array}[k]" for array in names) for names in (outputs, inputs))
    exec(f"def loop({', '.join(inputs + outputs)}):\n"
         f"    for k in range(len(in0)):\n        {targets} = cell({values})", scope)
    return scope["loop"]
