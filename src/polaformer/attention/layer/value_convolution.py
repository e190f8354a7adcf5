"""The convolution branch: it adds rank to a low-rank attention map (section 4.1 and the ablation table of the paper).

All heads share the same filters, except with "channelwise", which has one per channel. A sequence is a grid of one row, on
which only the middle row of a k×k filter acts; a kernel of (1, k) is for sequences only and omits the rows that they never use.

# B batch, N tokens, C = num_heads · D channels
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.ops.grid import Grid, Sizes
from polaformer.ops.precision import computing_dtype, without_autocast

CONVOLUTIONS = ("depthwise", "channelwise", "deformable", "sequence", None)


def create_convolution(kind: str | None, num_heads: int, head_dim: int, kernel_size: tuple[int, int]) -> nn.Module | None:
    """A module that maps images (B, D, H, W), or values (B, heads, N, D) for "sequence", to the same shape; or None."""
    if kind is None:
        return None
    if kind == "sequence":
        return SequenceConvolution(num_heads, max(kernel_size))
    if kind in ("depthwise", "channelwise"):
        padding, channels = (kernel_size[0] // 2, kernel_size[1] // 2), head_dim * (num_heads if kind == "channelwise" else 1)
        return nn.Conv2d(channels, channels, kernel_size, padding=padding, groups=channels)
    return DeformableConvolution(head_dim, kernel_size)


def is_plain_depthwise(module: nn.Module | None) -> TypeGuard[nn.Conv2d]:
    """Whether the module is an unmodified depthwise convolution, so that its parameters can be used without calling it.

    With hooks, pruning, parametrisations, or other strides or paddings, the module itself must be called.
    """
    if type(module) is not nn.Conv2d or module._forward_hooks or module._forward_pre_hooks:
        return False
    same_size = module.padding == (module.kernel_size[0] // 2, module.kernel_size[1] // 2) and module.padding_mode == "zeros"
    depthwise = module.groups == module.in_channels == module.out_channels
    return same_size and depthwise and module.stride == (1, 1) and module.dilation == (1, 1)


class SequenceConvolution(nn.Conv2d):
    """One filter per head over the sequence of all tokens, prefix included, shared by the head's channels; no bias.

    Values (B, heads, N, D) to the same shape. The branch of linear-angular attention (Castling-ViT).
    """

    def __init__(self, num_heads: int, kernel_size: int) -> None:
        size, padding = (kernel_size, 1), (kernel_size // 2, 0)
        super().__init__(num_heads, num_heads, size, padding=padding, groups=num_heads, bias=False)


class DeformableConvolution(nn.Module):
    """A depthwise convolution whose sampling points are moved by offsets that a plain convolution predicts (initially zero).

    The paper names "deformable convolution" and its accuracy only. Groups and offsets are our reconstruction, chosen to differ
    from the depthwise branch only in the deformation.
    """

    def __init__(self, head_dim: int, kernel_size: tuple[int, int]) -> None:
        super().__init__()
        # torchvision takes seconds to import and nothing else here needs it.
        from torchvision.ops import DeformConv2d

        padding = (kernel_size[0] // 2, kernel_size[1] // 2)
        self.offsets = nn.Conv2d(head_dim, 2 * kernel_size[0] * kernel_size[1], kernel_size, padding=padding)
        self.deform = DeformConv2d(head_dim, head_dim, kernel_size, padding=padding, groups=head_dim)
        nn.init.zeros_(self.offsets.weight)
        if self.offsets.bias is not None:
            nn.init.zeros_(self.offsets.bias)

    def forward(self, image: Tensor) -> Tensor:
        """(B, D, H, W) to the same shape; sampled in at least float32, as torchvision has no bf16 kernel for CPUs."""
        return _deform(image, self.offsets(image), self.deform).to(image.dtype)


@without_autocast
def _deform(image: Tensor, offsets: Tensor, deform: nn.Module) -> Tensor:
    from torchvision.ops import deform_conv2d

    dtype = computing_dtype(image)
    weight, bias = deform.weight.to(dtype), deform.bias.to(dtype)
    return deform_conv2d(image.to(dtype), offsets.to(dtype), weight, bias, padding=deform.padding)


def convolve_tokens(convolution: nn.Module, values: Tensor, grid: Grid, num_heads: int) -> Tensor:
    """The convolution of values (B, H·W, C) on their grid, each of `num_heads` groups of channels separately, (B, H·W, C)."""
    batch = values.shape[0]
    images = values.unflatten(1, grid).unflatten(-1, (num_heads, -1)).permute(0, 3, 4, 1, 2)  # (B, heads, D, H, W)
    images = convolution(images.flatten(0, 1)).unflatten(0, (batch, num_heads))
    return images.permute(0, 3, 4, 1, 2).flatten(3).flatten(1, 2)


def stretch_tokens(values: Tensor, old: Grid, new: Grid, old_sizes: Sizes = None, new_sizes: Sizes = None) -> Tensor:
    """Reduced values (B, old height·width, C) interpolated to the new grid, linearly in raster order, as the authors do.

    This ignores the second dimension of the grid; kept because published parameters were trained with it. With sizes, the
    (height, width) of each sample at the top left of both grids, each sample is interpolated in its own raster order.
    """
    if old_sizes is None or new_sizes is None:
        return F.interpolate(values.mT, size=new[0] * new[1], mode="linear", align_corners=False).mT
    stretched = []
    for image, (height, width), size in zip(values.unflatten(1, old), old_sizes, new_sizes, strict=True):
        tokens = stretch_tokens(image[:height, :width].flatten(0, 1)[None], (height, width), size)[0]
        stretched.append(F.pad(tokens.unflatten(0, size), (0, 0, 0, new[1] - size[1], 0, new[0] - size[0])).flatten(0, 1))
    return torch.stack(stretched) if stretched else values.new_zeros(0, new[0] * new[1], values.shape[2])
