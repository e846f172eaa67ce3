"""GFLOP/s of the default policy's matrix products, ours (compiled.py) beside torch's, on one core.

    python tests/bench_products.py [--rows 2048] [--repeats 7]

The products are those of an epoch: the map forward, the gradient of its input, the gradient of its weight. Each is
checked against float64 before it is timed; the two kinds take turns, and the best of the repeats counts. The last line
of the output is one JSON object.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compiled
import engines

LAYERS = {"encoder": (118, 64), "64 × 192": (64, 192), "128 × 384": (128, 384), "256 × 768": (256, 768),
          "512 × 1536": (512, 1536), "decoder": (64, 4)}  # fmt: skip


@dataclass
class Arguments:
    rows: int = 2048
    """Steps of a chunk."""
    repeats: int = 7
    """Interleaved measurements of 10 ms."""


def best(repeats, *functions):
    """The fewest seconds that each of the functions took."""
    least = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            begun = now = time.perf_counter()
            while now - begun < 0.01:
                before = now
                function()
                now = time.perf_counter()
                least[i] = min(least[i], now - before)
    return least


def check(name, out, expected, tolerance):
    error = float(((out.double() - expected).abs() / (1 + expected.abs())).max())
    if not error < tolerance:
        raise SystemExit(f"{name} is off by {error:.1e}, more than {tolerance:.0e}")


def measure(name, inputs, outputs, dtype, a):
    """{"forward": (our GFLOP/s, torch's), "input gradient": ..., "weight gradient": ...}"""
    half, rounded = dtype == torch.bfloat16, torch.int32 if dtype == torch.bfloat16 else torch.float32
    x, grad = torch.randn(a.rows, inputs).to(dtype), torch.randn(a.rows, outputs).to(dtype)
    weight, bias = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    forward, back = (torch.empty(compiled.packed_size(*size, half), dtype=rounded)
                     for size in ((inputs, outputs), (outputs, inputs)))  # fmt: skip
    compiled.pack(weight.t(), forward)
    compiled.pack(weight, back)
    near = weight.to(dtype)
    out, out_grad, gradient = torch.empty_like(grad), torch.empty_like(x), torch.zeros(outputs, inputs)
    near_bias, near_gradient = bias.to(dtype), torch.empty_like(near)
    pairs = {
        "forward": (lambda: compiled.multiply(x, forward, out, bias=bias),
                    lambda: torch.addmm(near_bias, x, near.t(), out=out)),
        "input gradient": (lambda: compiled.multiply(grad, back, out_grad),
                           lambda: torch.mm(grad, near, out=out_grad)),
        "weight gradient": (lambda: compiled.accumulate(grad, x, gradient),
                            lambda: torch.mm(grad.t(), x, out=near_gradient)),
    }  # fmt: skip
    for ours, _ in pairs.values():
        ours()
    tolerance = 1e-2 if half else 1e-3
    check(f"{name}: forward", out, bias.double() + x.double() @ near.double().t(), tolerance)
    check(f"{name}: input gradient", out_grad, grad.double() @ near.double(), tolerance)
    check(f"{name}: weight gradient", gradient, grad.double().t() @ x.double(), tolerance)
    flops = 2 * a.rows * inputs * outputs
    return {key: [flops / seconds / 1e9 for seconds in best(a.repeats, *pair)] for key, pair in pairs.items()}


def main():
    a = tyro.cli(Arguments, description=__doc__)
    torch.manual_seed(0)
    results = {}
    print(f"GFLOP/s with {a.rows:,} rows, ours (torch's){'' if compiled.fast() else '; torch is what is used here'}\n")
    kinds = [("float32", torch.float32), *([("bfloat16", torch.bfloat16)] if compiled.fast() else [])]
    with engines.torch_threads(1):
        for precision, dtype in kinds:
            print(f"{precision:12}{'forward':>20}{'input gradient':>20}{'weight gradient':>20}")
            for name, (inputs, outputs) in LAYERS.items():
                row = results[f"{precision}/{name}"] = measure(name, inputs, outputs, dtype, a)
                print(f"{name:12}" + "".join(f"{ours:>11.0f} ({theirs:6.0f})" for ours, theirs in row.values()))
    print(json.dumps({"benchmark": "products", "rows": a.rows, "gflops": results}))


if __name__ == "__main__":
    main()
