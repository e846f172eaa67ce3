"""Measure GFLOP/s of the default policy's matrix products, ours and torch's.

    python bench/bench_products.py [--rows 64] [--repeats 7]

On one core; ours are fast/products.py. The products are those of an epoch: the map forward, the
gradient of its input, the gradient of its weight. Each is checked against float64 before it is
timed; the two are interleaved, and the best of the repeats counts. The last line of the output is
one JSON object.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import engines
from fast import products

LAYERS = {"encoder": (118, 64), "64 × 192": (64, 192), "128 × 384": (128, 384),
          "256 × 768": (256, 768), "512 × 1536": (512, 1536), "decoder": (64, 4)}


@dataclass
class Arguments:
    rows: int = 64
    """Steps that go through the network together."""
    repeats: int = 7
    """Interleaved measurements of 10 ms."""


def best(repeats, *functions):
    """Return the fewest seconds that each of the functions took."""
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
    error = float((abs(out - expected) / (1 + abs(expected))).max())
    if not error < tolerance:
        raise SystemExit(f"{name} is off by {error:.1e}, more than {tolerance:.0e}")


def measure(name, inputs, outputs, half, a):
    """Return {"forward": (our GFLOP/s, torch's), "input gradient": ..., ...}.

    Ours start with float32 and round it, torch's start with bfloat16.
    """
    numbers = np.random.default_rng(0).standard_normal
    x, grad, weight, bias = (numbers(shape, np.float32) for shape in (
        (a.rows, inputs), (a.rows, outputs), (outputs, inputs), (outputs,)))
    forward, back = (np.empty(products.packed_size(*size, half), np.uint32 if half else np.float32)
                     for size in ((inputs, outputs), (outputs, inputs)))
    products.pack(weight.T, forward)
    products.pack(weight, back)
    out, out_grad, gradient = np.empty_like(grad), np.empty_like(x), np.zeros_like(weight)
    zero, dtype = np.zeros(inputs, np.float32), torch.bfloat16 if half else torch.float32
    x1, grad1, weight1, bias1 = (torch.from_numpy(array).to(dtype)
                                 for array in (x, grad, weight, bias))
    out1, out_grad1, gradient1 = torch.empty_like(grad1), torch.empty_like(x1), torch.empty_like(weight1)
    pairs = {
        "forward": (lambda: products.multiply_rows(a.rows, x, forward, bias, 0, out),
                    lambda: torch.addmm(bias1, x1, weight1.t(), out=out1)),
        "input gradient": (lambda: products.multiply_rows(a.rows, grad, back, zero, 0, out_grad),
                           lambda: torch.mm(grad1, weight1, out=out_grad1)),
        "weight gradient": (lambda: products.accumulate_rows(half, grad, x, gradient),
                            lambda: torch.mm(grad1.t(), x1, out=gradient1)),
    }
    for ours, _ in pairs.values():
        ours()
    tolerance = 0.1 if half else 1e-3
    check(f"{name}: forward", out, bias + x.astype(float) @ weight.T, tolerance * inputs**0.5)
    check(f"{name}: input gradient", out_grad, grad.astype(float) @ weight,
          tolerance * outputs**0.5)
    check(f"{name}: weight gradient", gradient, grad.T.astype(float) @ x, tolerance * a.rows**0.5)
    flops = 2 * a.rows * inputs * outputs
    return {key: [flops / seconds / 1e9 for seconds in best(a.repeats, *pair)]
            for key, pair in pairs.items()}


def main():
    a = tyro.cli(Arguments, description=__doc__)
    if products.find_problem():
        raise SystemExit(products.find_problem())
    results = {}
    print(f"GFLOP/s with {a.rows:,} rows, ours (torch's)\n")
    with engines.torch_threads(1):
        for precision in ("float32", "bfloat16"):
            print(f"{precision:12}{'forward':>20}{'input gradient':>20}{'weight gradient':>20}")
            for name, (inputs, outputs) in LAYERS.items():
                row = results[f"{precision}/{name}"] = measure(name, inputs, outputs,
                                                               precision == "bfloat16", a)
                print(f"{name:12}" + "".join(f"{ours:>11.0f} ({theirs:6.0f})"
                                             for ours, theirs in row.values()))
    print(json.dumps({"benchmark": "products", "rows": a.rows, "gflops": results}))


if __name__ == "__main__":
    main()
