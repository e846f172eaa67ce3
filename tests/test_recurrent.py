"""fast/recurrent.py against torch's own layers, called step by step; on a GPU in tests/test_cuda.py."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from arena import threads
from fast import recurrent

KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


def by_steps(layer, x, memory, resets, valid):
    """The layer's own call at each step, its memory cut and held as models._TorchWrapper says."""
    out = []
    for t in range(len(x)):
        memory = [tensor * (1 - resets[t].float())[:, None] for tensor in memory]
        step, new = layer(x[t : t + 1], tuple(memory) if len(memory) > 1 else memory[0])
        new = new if len(memory) > 1 else [new]
        memory = [torch.where(valid[t, :, None] != 0, after, before) for after, before in zip(new, memory, strict=True)]
        out.append(step)
    return torch.cat(out), memory


def case(kind, T, N, inputs, hidden, layers=1):
    torch.manual_seed(0)
    layer = kind(inputs, hidden, layers)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, 0.6)
    x = torch.randn(T, N, inputs, requires_grad=True)
    memory = [torch.randn(layers, N, hidden, requires_grad=True) for _ in range(2 if kind is nn.LSTM else 1)]
    return layer, x, memory, *((torch.rand(T, N) < p).to(torch.uint8) for p in (0.2, 0.8))


def results(function, layer, x, memory, resets, valid):
    """Outputs of live agents, memory, and the gradients of everything by a random slope of them."""
    out, after = function(layer, x, memory, resets, valid)
    found = [torch.where(valid[..., None] != 0, out, 0.0), *after]
    random = torch.Generator().manual_seed(5)
    loss = sum((each * torch.randn(each.shape, generator=random).to(each.device)).sum() for each in found)
    return [each.detach() for each in found] + list(torch.autograd.grad(loss, [x, *memory, *layer.parameters()]))


def moved(to, layer, x, memory, *flags):
    """A case on another device or in another precision."""
    x, *memory = (tensor.detach().to(to).requires_grad_() for tensor in (x, *memory))
    return copy.deepcopy(layer).to(to), x, memory, *(flag.to(x.device) for flag in flags)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@KINDS
@settings(max_examples=30, deadline=None)
@given(T=st.integers(1, 9), N=st.integers(1, 9), inputs=st.integers(1, 7), hidden=st.integers(1, 33),
       layers=st.sampled_from([1, 3]), count=st.sampled_from([1, 2]))
@example(T=3, N=150, inputs=3, hidden=33, layers=1, count=1)  # more than a block of agents
def test_a_segment_is_what_the_layer_gives_step_by_step(kind, T, N, inputs, hidden, layers, count):
    data = case(kind, T, N, inputs, hidden, layers)
    with threads(count):
        ours = results(recurrent.scan, *data)
    close(ours, results(by_steps, *data))


@KINDS
def test_work_that_is_worth_two_threads_gives_the_same_bits(kind):
    data, found = case(kind, 3, 700, 8, 64), []
    for count in (1, 2):
        with threads(count):
            found.append(results(recurrent.scan, *data))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@KINDS
def test_gradients(kind):
    """Twice from one graph, in another order, of flags that are bool; a second derivative is refused."""
    layer, x, memory, resets, valid = case(kind, 4, 3, 2, 5, 2)
    out, _ = recurrent.scan(layer, x, memory, resets, valid)
    assert torch.equal(recurrent.scan(layer, x, memory, resets.bool(), valid.bool())[0], out)
    loss = out.square().sum()
    first = torch.autograd.grad(loss, layer.parameters(), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, layer.parameters(), retain_graph=True)))
    slope, = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()

    def turned(function):
        _, (h, *_) = function(layer, x, memory, resets, valid)
        return torch.autograd.grad(h.transpose(1, 2).contiguous().sin().sum(), memory)

    close(turned(recurrent.scan), turned(by_steps))


@KINDS
def test_wrong_sizes_are_refused(kind):
    layer, x, memory, resets, valid = case(kind, 4, 3, 2, 5)
    for inputs, state in ((torch.randn(4, 3, 6), memory), (x, [torch.zeros(1, 3, 8) for _ in memory])):
        with pytest.raises(RuntimeError, match=r"inputs|memory"):
            recurrent.scan(layer, inputs, state, resets, valid)


@KINDS
def test_a_layer_that_somebody_has_changed_runs_itself(kind):
    class Own(kind):
        pass

    x = torch.zeros(2, 3, 4)
    assert recurrent.is_supported(kind(4, 5, 2), x) and recurrent.is_supported(kind(4, 5, 2), torch.zeros(1, 256, 4))
    assert not recurrent.is_supported(kind(4, 5, 2), x[:1])
    hooked, replaced, dropping = kind(4, 5), kind(4, 5), kind(4, 5, 2, dropout=0.5)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = kind.forward.__get__(replaced)
    parametrized = nn.utils.parametrizations.weight_norm(kind(4, 5), "weight_hh_l0")
    for layer in (Own(4, 5), hooked, replaced, dropping, parametrized, kind(4, 5, bidirectional=True),
                  kind(4, 5, bias=False), kind(4, 5, batch_first=True)):
        assert not recurrent.is_supported(layer, x)
    assert recurrent.is_supported(dropping.eval(), x) and not recurrent.is_supported(kind(4, 5), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not recurrent.is_supported(kind(4, 5), x)
