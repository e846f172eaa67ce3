"""fast/pictures.py against torch's own layers."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainers import Tanh, make_trainer

import engines
from arena import threads
from fast import pictures

ROOT = Path(__file__).resolve().parent.parent


def alike(layer, other, x, tolerance, owner=None):
    """Outputs and all gradients of two layers with the same parameters; `owner` has the other's."""
    found = []
    for each, module in ((layer, layer), (other, owner or other)):
        seen = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
        out = each(seen)
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * slope).sum().backward()
        gradients = [leaf.grad for leaf in (seen, *module.parameters()) if leaf.requires_grad]
        found.append([out.detach(), *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        scale = theirs.float().abs().max().clamp(min=1e-3)
        assert ((ours.float() - theirs.float()).abs().max() / scale).item() < tolerance


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 2), channels=st.integers(1, 5), stride=st.integers(1, 4),
       times=st.integers(1, 3), height=st.integers(12, 23), width=st.integers(12, 23),
       last=st.booleans(), late=st.integers(0, 3))
def test_the_convolution_of_bytes_is_torchs(batch, channels, stride, times, height, width, last,
                                            late):
    torch.manual_seed(0)
    size = stride * times
    ours = pictures.BytesConvolution(channels, 3, size, stride, last)
    theirs = nn.Conv2d(channels, 3, size, stride)
    theirs.load_state_dict(ours.state_dict())
    shape = (height, width, channels) if last else (channels, height, width)
    # as a field of a structured observation: it need not begin at a multiple of four
    rows = torch.randint(0, 256, (batch, math.prod(shape) + late), dtype=torch.uint8)
    x = rows[:, late:].unflatten(1, shape)
    alike(ours, lambda x: theirs((x.movedim(-1, 1) if last else x) / 255), x, 1e-5, theirs)
    assert len(ours(x[:0])) == 0


def test_bytes_are_exact_in_bfloat16():
    """The scale goes into the weights, so that 255 different pixels stay 255."""
    layer = pictures.BytesConvolution(1, 1, 2, 2, scale=1.0)
    nn.init.constant_(layer.weight, 0.25)
    nn.init.zeros_(layer.bias)
    x = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).flatten().tolist() == list(range(256))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 16, 5, 5), (4, 33, 7, 3), (40, 32, 20, 20)])
def test_norm_and_relu_are_torchs(shape, memory, count):
    torch.manual_seed(0)
    ours, norm = pictures.NormReLU(shape[1]), nn.GroupNorm(1, shape[1])
    nn.init.normal_(ours.weight)
    nn.init.normal_(ours.bias)
    norm.load_state_dict(ours.state_dict())
    x = (3 * torch.randn(shape) + 1).contiguous(memory_format=memory)
    with threads(count):
        alike(ours, nn.Sequential(norm, nn.ReLU()), x, 2e-5)


def test_norm_and_relu_in_bfloat16_are_as_exact_as_torchs():
    torch.manual_seed(0)
    ours, norm = pictures.NormReLU(32), nn.GroupNorm(1, 32)
    x = torch.randn(8, 32, 9, 9).bfloat16()
    truth = torch.relu(norm(x.float()))
    assert ours(x).dtype == torch.bfloat16
    assert (ours(x).float() - truth).abs().max() <= truth.abs().max() / 256
    slope, slopes = torch.randn_like(truth), []
    for layer, seen in ((nn.Sequential(norm, nn.ReLU()), x.float()), (ours, x.clone())):
        (layer(seen.requires_grad_()).float() * slope).sum().backward()
        slopes.append(seen.grad.float())
    assert (slopes[0] - slopes[1]).abs().max() < slopes[0].abs().max() / 64
    small, x = pictures.NormReLU(4).bfloat16(), torch.randn(2, 4, 3, 3).bfloat16()
    assert torch.equal(small(x), torch.relu(nn.GroupNorm(1, 4).bfloat16()(x)))
    assert pictures.NormReLU(4)(torch.zeros(0, 4, 3, 3)).shape == (0, 4, 3, 3)


def test_norm_and_relu_keep_nan_and_go_backward_twice():
    layer, x = pictures.NormReLU(2), torch.randn(2, 2, 3, 3)
    x[0, 0, 0, 0] = float("nan")
    out = layer(x)
    assert out[0].isnan().all() and not out[1].isnan().any()
    loss = layer(x[1:].requires_grad_()).sum()
    first, = torch.autograd.grad(loss, layer.weight, retain_graph=True)
    again, = torch.autograd.grad(loss, layer.weight)
    assert torch.equal(first, again)


def test_float32_where_the_processor_has_no_bfloat16(monkeypatch, capsys):
    """torch would take up to ten times as long for it."""
    for there, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(engines, "has_bfloat16", lambda there=there: there)
        trainer = make_trainer(policy=Tanh, precision="bfloat16")
        assert trainer.engine.precision == expected
        assert ("precision" in capsys.readouterr().err) == (not there)
        trainer.release()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_stays():
    """Else each pass through a network of images takes thousands of page faults."""
    code = """
from arena import threads
import ctypes, resource, torch, pufferl
def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        parts = [torch.ones(2_000_000) for _ in range(6)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(hasattr(ctypes.CDLL(None), "mallopt"), faults(10))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    there, count = done.stdout.split()
    assert there == "False" or int(count) < 2_000  # 120,000 without
