"""Convolutions of pictures: what `models.Encoded` reads images with.

    layers = nn.Sequential(BytesConvolution(4, 32, 8, 4), NormReLU(32))   # (B, 4, 84, 84) uint8 -> (B, 32, 20, 20)
    python -m pytest tests/test_pictures.py                               # each against torch's own layers

On a CPU a picture's convolutions take less time than what stands between them: bytes become floats,
values are normalised, negative ones are cut off, and each of these is a pass over memory. Here the
first is done once, on the way into the convolution, and the other two in one pass.
"""

import numpy as np
import torch
from torch import nn

from arena import distinct_driver, f32, host_array, run, without_torch_function
from kernels import narrow, widen


def plain():
    """Whether torch is looking at the network to compile or to export it, and so must see its own operations only."""
    return torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()


def laid_out(x):
    """Pictures x (B, C, H, W), channels last in memory, which a CPU convolves 1.4 times as fast. ONNX has no
    such layout, and for one channel torch would export strides that fit either."""
    if torch.onnx.is_in_onnx_export():
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous(memory_format=torch.channels_last)


# --------------------------------------------------------------------------------------------------
# From bytes to the first convolution's output


def channels_first(x, last=False):
    """Images (B, H, W), (B, C, H, W) or stacks (B, K, C, H, W) as (B, channels, H, W); last: each C is at the end."""
    x = x.movedim(-1, -3) if last else x
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(1, -3)


class Bytes(nn.Module):
    """Images as `channels_first` takes them as floats (B, C, H, W) times `scale`, channels last in memory, which a
    CPU's convolutions take 1.4 times as fast."""

    def __init__(self, last, scale):
        super().__init__()
        self.last, self.scale = last, scale

    def forward(self, x):
        x = channels_first(x, self.last)
        x = x if x.dtype == torch.uint8 else x.float()
        # bytes times a float, in one pass
        return laid_out(x) * self.scale


def blocks(x, side):
    """Pictures (B, C, H, W) as (B, H / side, W / side, C · side²): each block of side × side pixels becomes
    the channels of one, in the order of C, rows, columns. H and W must be multiples of `side`."""
    B, C, H, W = x.shape
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(side)
    # is_contiguous does not look at the strides of dimensions of one element; a view as larger numbers does
    even = x.stride(3) == 1 and all(n % side == 0 for n in (x.storage_offset(), x.data_ptr(), *x.stride()[:3]))
    if x.dtype == torch.uint8 and whole and x.is_contiguous() and even and x.numel():
        # the pixels of a block's row move as one number
        rows = x.view(whole).view(B, C, H // side, side, W // side).permute(0, 2, 4, 1, 3).contiguous().view(x.dtype)
        return rows.view(B, H // side, W // side, -1)
    return x.reshape(B, C, H // side, side, W // side, side).permute(0, 2, 4, 1, 3, 5).flatten(3)


class BytesConvolution(nn.Conv2d):
    """nn.Conv2d of images as `channels_first` takes them, of bytes or other numbers, times `scale`.

    A kernel that moves by `stride` pixels over few channels is the same as a small kernel that moves by one over blocks
    of stride × stride pixels, whose pixels are its channels. Processors' convolutions want many channels, and take that
    up to twice as fast. The scale goes into the weights. ValueError if `size` is no multiple of `stride`, or if a
    picture is smaller than the kernel.
    """

    def __init__(self, channels, outputs, size, stride, last=False, scale=1 / 255):
        if size % stride:
            raise ValueError(f"BytesConvolution: a kernel of {size} is not a multiple of the stride {stride}.")
        super().__init__(channels, outputs, size, stride)
        self.last, self.scale = last, scale

    def forward(self, x):
        x = channels_first(x, self.last)
        if plain():
            return super().forward(laid_out(x.float()) * self.scale)
        side, (size, _) = self.stride[0], self.kernel_size
        if min(x.shape[2:]) < size:
            raise ValueError(f"BytesConvolution: pictures of {x.shape[2]} × {x.shape[3]} are smaller than the kernel, "
                             f"{size} × {size}; take a smaller kernel.")
        # pixels at the right and the bottom that no kernel reaches
        height, width = (n - (n - size) % side for n in x.shape[2:])
        x = x if (height, width) == x.shape[2:] else x[:, :, :height, :width].contiguous()
        device = x.device.type
        precision = (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype)
        weight = blocks(self.weight * self.scale, side).movedim(3, 1)
        return nn.functional.conv2d(blocks(x, side).to(precision).movedim(3, 1), weight, self.bias)


# --------------------------------------------------------------------------------------------------
# GroupNorm of one group and ReLU, in one pass each way


@distinct_driver
def _norm_relu_lanes(begin, end, x, weight, bias, eps, moments, out, work):
    # x, out (B, P, C): pixels, channels; moments (B, 2): the mean and one over the deviation of each picture
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
    # sums (B, 2, C): each picture's gradients of weight and bias
    for b in range(begin, end):
        rows, slopes, count = x[b], grad_out[b], f32(x.shape[1] * x.shape[2])
        mean, scale, of_weight, of_bias = moments[b, 0], moments[b, 1], sums[b, 0], sums[b, 1]
        of_weight[:], of_bias[:] = f32(0.0), f32(0.0)
        for p in range(len(rows)):
            for c in range(len(weight)):
                normal = (widen(rows[p, c]) - mean) * scale
                slope = f32(0.0) if normal * weight[c] + bias[c] <= f32(0.0) else widen(slopes[p, c])
                of_weight[c] += slope * normal
                of_bias[c] += slope
        along, level = f32(0.0), f32(0.0)
        for c in range(len(weight)):
            along += of_weight[c] * weight[c]
            level += of_bias[c] * weight[c]
        along, level = along / count, level / count
        for p in range(len(rows)):
            for c in range(len(weight)):
                normal = (widen(rows[p, c]) - mean) * scale
                slope = f32(0.0) if normal * weight[c] + bias[c] <= f32(0.0) else widen(slopes[p, c])
                grad[b, p, c] = narrow(scale * (slope * weight[c] - level - normal * along), grad)


def _pixels(x):
    """(B, C, H, W), channels last in memory, as (B, H · W, C)."""
    return x.movedim(1, 3).flatten(1, 2)


class _NormReLU(torch.autograd.Function):

    @staticmethod
    @without_torch_function
    def forward(ctx, x, weight, bias, eps):
        x = x.contiguous(memory_format=torch.channels_last)
        out, moments = torch.empty_like(x), torch.empty(len(x), 2)
        run(_norm_relu_lanes, len(x), x.shape[1:].numel(), *map(host_array, (_pixels(x), weight, bias)),
                    f32(eps), *map(host_array, (moments, _pixels(out), torch.empty(len(x), x.shape[1]))))
        ctx.save_for_backward(x, weight, bias, moments)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        x, weight, bias, moments = ctx.saved_tensors
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        grad, sums = torch.empty_like(x), torch.empty(len(x), 2, len(weight))
        run(_norm_relu_grad_lanes, len(x), x.shape[1:].numel(), *map(host_array, (
            _pixels(x), weight, bias, moments, _pixels(grad_out), _pixels(grad), sums)))
        return grad, *sums.sum(0), None


class NormReLU(nn.GroupNorm):
    """ReLU of nn.GroupNorm with one group: (B, C, H, W) -> the same shape. On a CPU the type stays,
    and its gradient has none of its own."""

    def __init__(self, channels):
        super().__init__(1, channels)

    def forward(self, x):
        known = x.dtype in (torch.float32, torch.bfloat16) and self.weight.dtype == torch.float32 and x.dim() == 4
        if x.device.type != "cpu" or not known or plain():
            return torch.relu(super().forward(x))
        return _NormReLU.apply(x, self.weight, self.bias, self.eps)
