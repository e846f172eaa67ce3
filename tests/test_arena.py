"""The one allocation of a trainer, and the numpy view that is kept on a tensor."""

import copy
import io
import itertools
import math
from unittest import mock

import pytest
import torch

import arena
import kernels
from arena import Arena


class Recurrent(torch.nn.Module):
    """Odd sizes before and after an LSTM, for alignment and packing."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(5, 7)
        self.lstm = torch.nn.LSTM(7, 6, num_layers=2)
        self.decoder = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.decoder(self.lstm(torch.tanh(self.encoder(x)))[0])


def adopted(module, *others):
    """(arena with the module, allocated, what each of `others` makes of it before)."""
    arena = Arena()
    arena.adopt(module)
    results = [make(arena) for make in others]
    arena.allocate("cpu")
    return (arena, *results)


def test_views_are_aligned_zero_and_apart_and_groups_are_contiguous():
    arena = Arena()
    specs = {"a": ((3, 5), torch.float32), "b": ((7,), torch.float32), "c": ((2, 0), torch.float32),
             "d": ((), torch.int64), "e": ((1, 1, 11), torch.float64), "f": ((2,), torch.uint8)}
    for name, (shape, dtype) in specs.items():
        arena.register(name, shape, dtype, group="floats" if dtype == torch.float32 else name)
    arena.allocate("cpu")
    end = arena.memory.data_ptr()
    for name, (shape, dtype) in specs.items():
        view = arena[name]
        assert view.shape == shape and view.dtype == dtype and view.is_contiguous() and not view.any()
        if view.numel():
            assert view.data_ptr() % arena.ALIGNMENT == 0 and view.data_ptr() >= end
            end = view.data_ptr() + view.numel() * dtype.itemsize
            view.fill_(1)
    assert end <= arena.memory.data_ptr() + arena.memory.numel()
    assert arena.flat("floats").data_ptr() == arena["a"].data_ptr()
    arena.flat("floats").fill_(2)
    assert all((arena[name] == (2 if name in "abc" else 1)).all() for name in specs)


def test_adopt_keeps_values_and_shares_memory():
    module, arena, other = Recurrent(), Arena(), torch.nn.LSTM(2, 3)
    before = copy.deepcopy(module.state_dict())
    arena.adopt(module)
    arena.adopt(other, "second")
    arena.allocate()
    weights, gradients = arena.flat("weights"), arena.flat("gradients")
    assert weights.numel() == gradients.numel()
    assert other.bias_hh_l0.data_ptr() == arena["weights/second.bias_hh_l0"].data_ptr()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() == arena[f"weights/policy.{name}"].data_ptr()
        assert parameter.grad.data_ptr() == arena[f"gradients/policy.{name}"].data_ptr()
        offset = parameter.data_ptr() - weights.data_ptr()
        assert offset == parameter.grad.data_ptr() - gradients.data_ptr()
    addresses = [p.grad.data_ptr() for p in module.parameters()]
    module(torch.randn(4, 2, 5)).sum().backward()
    assert addresses == [p.grad.data_ptr() for p in module.parameters()]
    assert gradients.norm() > 0
    gradients.zero_()
    assert not any(p.grad.any() for p in module.parameters())
    weights.fill_(0.25)
    assert all((p == 0.25).all() for p in module.parameters())


def test_an_lstm_is_one_block():
    module = Recurrent()
    adopted(module)
    for group in (lambda p: p, lambda p: p.grad):
        block = [group(p) for p in module.lstm._flat_weights]
        for left, right in itertools.pairwise(block):
            assert left.data_ptr() + left.numel() * 4 == right.data_ptr()
        assert block[0].data_ptr() % Arena.ALIGNMENT == 0
        # cuDNN copies what begins elsewhere
        assert block[-1].untyped_storage().data_ptr() == block[0].data_ptr()


def test_a_view_follows_its_tensor():
    """Not a copy, nor data that was there before; and the tensor can be saved."""
    tensor = torch.zeros(5)
    kernels.gradient_norm(tensor)
    twin = copy.deepcopy(tensor)
    twin += 1
    assert kernels.gradient_norm(twin) == pytest.approx(math.sqrt(5))
    tensor += 2
    assert kernels.gradient_norm(tensor) == pytest.approx(2 * math.sqrt(5))
    file = io.BytesIO()
    torch.save({"weights": tensor}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weights"], tensor)
    tensor.data = torch.ones(3)  # as arena.adopt does
    assert kernels.gradient_norm(tensor) == pytest.approx(math.sqrt(3))


@pytest.mark.skipif(arena.SIMULATOR, reason="nothing is compiled")
def test_a_full_disk_costs_the_cache_and_not_the_run(capsys, monkeypatch):
    """As numba's cache raises it."""
    function = arena.cached_njit()(lambda x: x + 1)
    monkeypatch.setattr(type(function._cache._cache_file), "save", mock.Mock(side_effect=OSError(28, "no space")))
    assert function(1) == 2 and function(1.5) == 2.5
    assert capsys.readouterr().err.count("no space") == 1
