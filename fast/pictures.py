"""Convolve images, for models.MultiInputPolicy.

    # (B, 4, 84, 84) uint8 -> (B, 32, 20, 20)
    layers = nn.Sequential(BytesConvolution(4, 32, 8, 4), NormReLU(32))
    python -m pytest tests/test_pictures.py          # each against torch's layers

On a CPU an image's convolutions take less time than the operations between them: bytes become
floats, values are normalised, a ReLU follows, and each of these is a pass over memory. Here the
first is done once, in the convolution, and the other two in one pass.
"""

import numpy as np
import torch
from torch import nn

from arena import as_array, distinct_driver, f32, run, without_torch_function
from kernels import narrow, widen


def is_exporting():
    """Return whether torch compiles or exports the network, by its own operations."""
    return torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()


def as_channels_last(x):
    """Return images x (B, C, H, W), channels last in memory.

    A CPU convolves them 1.4 times as fast. ONNX has no such layout, and for one channel torch would
    export strides that fit either.
    """
    if torch.onnx.is_in_onnx_export():
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous(memory_format=torch.channels_last)
# --------------------------------------------------------------------------------------------------
# From bytes to the first convolution's output


def channels_first(x, last=False):
    """Return images as (B, channels, H, W).

    x: (B, H, W), (B, C, H, W) or stacks (B, K, C, H, W); last: each C is the last dimension.
    """
    x = x.movedim(-1, -3) if last else x
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(1, -3)


class Bytes(nn.Module):
    """Convert images to floats (B, C, H, W) times `scale`, channels last in memory.

    Images are as `channels_first` takes them.
    """

    def __init__(self, last, scale):
        super().__init__()
        self.last, self.scale = last, scale

    def forward(self, x):
        x = channels_first(x, self.last)
        x = x if x.dtype == torch.uint8 else x.float()
        # bytes times a float, in one pass
        return as_channels_last(x) * self.scale


def to_blocks(x, side):
    """Return images (B, C, H, W) as (B, H / side, W / side, C · side²).

    Each block of side × side pixels becomes the channels of one pixel, in the order of C, rows,
    columns. H and W must be multiples of `side`.
    """
    B, C, H, W = x.shape
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(side)
    # is_contiguous ignores the strides of dimensions of one element; a view as larger numbers
    # does not
    offsets = x.storage_offset(), x.data_ptr(), *x.stride()[:3]
    is_aligned = x.stride(3) == 1 and all(n % side == 0 for n in offsets)
    if x.dtype == torch.uint8 and dtype and x.is_contiguous() and is_aligned and x.numel():
        # the pixels of a block's row move as one number
        rows = x.view(dtype).view(B, C, H // side, side, W // side)
        rows = rows.permute(0, 2, 4, 1, 3).contiguous().view(x.dtype)
        return rows.view(B, H // side, W // side, -1)
    return x.reshape(B, C, H // side, side, W // side, side).permute(0, 2, 4, 1, 3, 5).flatten(3)


class BytesConvolution(nn.Conv2d):
    """Compute nn.Conv2d of images of bytes or other numbers, times `scale`.

    Images are as `channels_first` takes them. A kernel that moves by `stride` pixels over few
    channels equals a small kernel that moves by one over blocks of stride × stride pixels, whose
    pixels are its channels. Convolutions of many channels are up to twice as fast. The scale is in
    the weights. Raises ValueError if `size` is not a multiple of `stride`, or if an image is smaller
    than the kernel.
    """

    def __init__(self, channels, outputs, size, stride, last=False, scale=1 / 255):
        if size % stride:
            raise ValueError(f"BytesConvolution: a kernel of {size} is not a multiple of the "
                             f"stride {stride}.")
        super().__init__(channels, outputs, size, stride)
        self.last, self.scale = last, scale

    def forward(self, x):
        x = channels_first(x, self.last)
        if is_exporting():
            return super().forward(as_channels_last(x.float()) * self.scale)
        side, (size, _) = self.stride[0], self.kernel_size
        if min(x.shape[2:]) < size:
            raise ValueError(
                f"BytesConvolution: images of {x.shape[2]} × {x.shape[3]} are smaller than the "
                f"kernel, {size} × {size}. Take a smaller kernel.")
        # pixels at the right and the bottom that no kernel reaches
        height, width = (n - (n - size) % side for n in x.shape[2:])
        x = x if (height, width) == x.shape[2:] else x[:, :, :height, :width].contiguous()
        device = x.device.type
        precision = (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device)
                     else self.weight.dtype)
        weight = to_blocks(self.weight * self.scale, side).movedim(3, 1)
        blocks = to_blocks(x, side).to(precision).movedim(3, 1)
        return nn.functional.conv2d(blocks, weight, self.bias)


# --------------------------------------------------------------------------------------------------
# GroupNorm of one group and ReLU, in one pass each way


@distinct_driver
def _norm_relu_lanes(begin, end, x, weight, bias, eps, moments, out, work):
    # x, out (B, P, C): pixels, channels; moments (B, 2): each image's mean, and 1 over its
    # standard deviation
    for b in range(begin, end):
        rows, sums, count, lanes = x[b], moments[b], f32(x.shape[1] * x.shape[2]), work[b]
        lanes[:] = f32(0.0)
        for p in range(len(rows)):
            for c in range(len(lanes)):
                lanes[c] += widen(rows[p, c])
        mean = lanes.sum() / count
        lanes[:] = f32(0.0)
        for p in range(len(rows)):
            for c in range(len(lanes)):
                deviation = widen(rows[p, c]) - mean
                lanes[c] += deviation * deviation
        scale = f32(1.0) / np.sqrt(lanes.sum() / count + eps)
        sums[0], sums[1] = mean, scale
        for p in range(len(rows)):
            for c in range(len(lanes)):
                y = (widen(rows[p, c]) - mean) * scale * weight[c] + bias[c]
                out[b, p, c] = narrow(f32(0.0) if y < f32(0.0) else y, out)


@distinct_driver
def _norm_relu_grad_lanes(begin, end, x, weight, bias, moments, grad_out, grad, sums):
    # sums (B, 2, C): each image's gradients of weight and bias
    for b in range(begin, end):
        rows, slopes, count = x[b], grad_out[b], f32(x.shape[1] * x.shape[2])
        mean, scale, grad_weight, grad_bias = moments[b, 0], moments[b, 1], sums[b, 0], sums[b, 1]
        grad_weight[:], grad_bias[:] = f32(0.0), f32(0.0)
        for p in range(len(rows)):
            for c in range(len(weight)):
                normal = (widen(rows[p, c]) - mean) * scale
                is_cut = normal * weight[c] + bias[c] <= f32(0.0)
                slope = f32(0.0) if is_cut else widen(slopes[p, c])
                grad_weight[c] += slope * normal
                grad_bias[c] += slope
        along, level = f32(0.0), f32(0.0)
        for c in range(len(weight)):
            along += grad_weight[c] * weight[c]
            level += grad_bias[c] * weight[c]
        along, level = along / count, level / count
        for p in range(len(rows)):
            for c in range(len(weight)):
                normal = (widen(rows[p, c]) - mean) * scale
                is_cut = normal * weight[c] + bias[c] <= f32(0.0)
                slope = f32(0.0) if is_cut else widen(slopes[p, c])
                grad[b, p, c] = narrow(scale * (slope * weight[c] - level - normal * along), grad)


def _pixels(x):
    """Return (B, C, H, W), channels last in memory, as (B, H · W, C)."""
    return x.movedim(1, 3).flatten(1, 2)


class _NormReLU(torch.autograd.Function):

    @staticmethod
    @without_torch_function
    def forward(ctx, x, weight, bias, eps):
        x = x.contiguous(memory_format=torch.channels_last)
        out, moments = torch.empty_like(x), torch.empty(len(x), 2)
        work = torch.empty(len(x), x.shape[1])
        run(_norm_relu_lanes, len(x), x.shape[1:].numel(),
            *map(as_array, (_pixels(x), weight, bias)), f32(eps),
            *map(as_array, (moments, _pixels(out), work)))
        ctx.save_for_backward(x, weight, bias, moments)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        x, weight, bias, moments = ctx.saved_tensors
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        grad, sums = torch.empty_like(x), torch.empty(len(x), 2, len(weight))
        run(_norm_relu_grad_lanes, len(x), x.shape[1:].numel(), *map(as_array, (
            _pixels(x), weight, bias, moments, _pixels(grad_out), _pixels(grad), sums)))
        return grad, *sums.sum(0), None


class NormReLU(nn.GroupNorm):
    """Compute ReLU of nn.GroupNorm with one group, (B, C, H, W) -> the same shape.

    On a CPU the dtype stays, and the gradient is not differentiable.
    """

    def __init__(self, channels):
        super().__init__(1, channels)

    def forward(self, x):
        is_supported = (x.dtype in (torch.float32, torch.bfloat16) and x.dim() == 4
                        and self.weight.dtype == torch.float32)
        if x.device.type != "cpu" or not is_supported or is_exporting():
            return torch.relu(super().forward(x))
        return _NormReLU.apply(x, self.weight, self.bias, self.eps)
