"""Muon against its float64 reference, and what it leaves alone."""

import math

import pytest
import reference
import torch
from kernel_cases import NAN, close, generator
from test_arena import adopted

import arena
import optim
from arena import on_gpu, threads

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = [(4, 9), (9, 4), (6, 6), (5,), (3, 2, 2, 2), (6, 6), (1, 7), (7, 1), (9, 4),
          *([] if arena.SIMULATOR else [(192, 64), (65, 118)]), (1,), (17, 3), (3, 257)]
ON_EACH = pytest.mark.parametrize("batched", [False, True], ids=["apart", "batched"])


class Weights(torch.nn.Module):
    def __init__(self, shapes, seed=0):
        super().__init__()
        rng = generator(seed)
        self.tensors = torch.nn.ParameterList([torch.randn(shape, generator=rng)
                                               for shape in shapes])


def made(shapes, *options, **names):
    """(weights, arena, optimizer)."""
    module = Weights(shapes)
    return module, *adopted(module, lambda memory: optim.Muon(memory, *options, **names))


def skip_on_gpu(batched):
    if not batched and on_gpu(torch.zeros(1)):
        pytest.skip("on a GPU small matrices are batched")


@pytest.mark.parametrize("products", ["fast/tile.c", "torch", "batched"])
@pytest.mark.parametrize("momentum, weight_decay, max_grad_norm",
                         [(0.95, 0.1, 0.5), (0.0, 0.0, 1e9)])
def test_muon(momentum, weight_decay, max_grad_norm, products, monkeypatch):
    skip_on_gpu(products == "batched")
    if products == "torch":  # as for large matrices
        monkeypatch.setattr(optim, "find_problem", lambda: "no C compiler was found")
    module, arena, optimizer = made(SHAPES, momentum, weight_decay, max_grad_norm,
                                    products == "batched")
    expected = [p.detach().double() for p in module.parameters()]
    momenta, rng = [torch.zeros_like(p) for p in expected], generator(1)
    names = list(dict(module.named_parameters()))
    for step in range(4):
        grads = [torch.randn(p.shape, generator=rng) for p in module.parameters()]
        if step == 1:
            grads[0].zero_()
        for p, g in zip(module.parameters(), grads, strict=True):
            p.grad.copy_(g)
        before, old = [p.detach().double() for p in module.parameters()], expected
        norm = optimizer.step(torch.tensor(0.02), torch.zeros(()))
        doubles = [g.double() for g in grads]
        expected, momenta = reference.muon_step(
            expected, doubles, momenta, 0.02, momentum, weight_decay,
            torch.tensor(max_grad_norm, dtype=torch.float64))
        total = torch.cat([g.flatten() for g in doubles]).norm().item()
        assert norm == pytest.approx(total, rel=1e-6)
        for p, start, was, now, m, name in zip(module.parameters(), before, old, expected, momenta,
                                               names, strict=True):
            delta, change = p.detach().double() - start, now - was
            size = max(change.norm().item(), 1e-30)
            rounding = 2.0**-23 * was.norm().item()  # of the weight that the step is added to
            assert (delta - change).norm() < 1e-5 * size + rounding
            close(p.detach(), now, 1e-5)
            close(arena[f"momentum/policy.{name}"], m, 1e-6)


def test_the_same_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(arena, "MIN_THREAD_NANOSECONDS", 1)

    def weights(count):
        _, memory, optimizer = made([(60, 60)] * 8, 0.9, 0.0, 1e9)
        gradients = memory.flat("gradients")
        gradients.copy_(torch.randn(gradients.shape, generator=generator(1)))
        with threads(count):
            for _ in range(10):
                optimizer.step(torch.tensor(0.1), torch.zeros(()))
        return memory.flat("weights").clone()

    assert torch.equal(weights(1), weights(3))


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    module, memory, optimizer = made([(3, 4), (5,)], batched=on_gpu(torch.zeros(1)))
    before = memory.flat("weights").clone()
    module.tensors[0].grad[1, 1] = value
    assert not math.isfinite(optimizer.step(torch.tensor(0.1), torch.zeros(())))
    assert torch.equal(memory.flat("weights"), before) and not memory.flat("momentum").any()


def test_small_matrices_are_batched():
    """In few groups, none of which is large where its members are small; each matrix once."""
    shapes = [(64, 118), (192, 64), (192, 64), (4, 64), (512, 3000), (600, 512), (3, 40_000),
              (512, 3000)]
    _, _, optimizer = made(shapes, batched=True)
    groups = {shape: len(members) for shape, members in optimizer._shapes.items()}
    assert groups == {(512, 3000): 2, (512, 600): 1, (3, 40_000): 1, (64, 192): 4}


@ON_EACH
@pytest.mark.parametrize("shapes", [[(5,), (3,)], [(5, 3), (3,)]], ids=["vectors", "both"])
def test_where_doubles_are_the_default(batched, shapes):
    torch.set_default_dtype(torch.float64)
    try:
        module = Weights(shapes).float()
        _, optimizer = adopted(module, lambda a: optim.Muon(a, batched=batched))
        before = [p.detach().clone() for p in module.parameters()]
        for p in module.parameters():
            p.grad.fill_(0.1)
        optimizer.step(torch.tensor(0.1), torch.zeros(()))
        assert all((p != old).any() for p, old in zip(module.parameters(), before, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


@ON_EACH
def test_a_zero_gradient_is_a_zero_step_and_gaps_stay_zero(batched):
    skip_on_gpu(batched)
    module, arena, optimizer = made(SHAPES, 0.9, 0.0, 1.0, batched)
    before = arena.flat("weights").clone()
    assert optimizer.step(torch.tensor(0.1), torch.zeros(())) == 0
    assert torch.equal(arena.flat("weights"), before)
    arena.flat("weights").zero_()
    for p in module.parameters():
        p.grad.fill_(1)
    optimizer.step(torch.tensor(0.1), torch.zeros(()))
    for group in ("weights", "gradients", "momentum", *(() if batched else ("updates",))):
        flat, used = arena.flat(group), torch.zeros(arena.flat(group).numel(), dtype=torch.bool)
        for name in dict(module.named_parameters()):
            view = arena[f"{group}/policy.{name}"]
            first = (view.data_ptr() - flat.data_ptr()) // 4
            used[first : first + view.numel()] = True
            assert view.any()
        assert used.sum() == sum(p.numel() for p in module.parameters())
        assert not flat[~used].any()
