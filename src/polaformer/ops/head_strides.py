"""Where in memory results for heads are put, so that what comes next need not copy them.

# B batch, H heads, T tokens, D head width
"""

import torch
from torch import Tensor


def empty_like_heads(x: Tensor) -> Tensor:
    """Memory for a tensor of the shape and dtype of x (B, H, T, D), dense.

    If x is a view of tokens (B, T, H·D), as projections give it, so is the result: heads are joined again without a copy.
    """
    batch, heads, tokens, width = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty((batch, tokens, heads, width), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((batch, heads, tokens, width), dtype=x.dtype, device=x.device)


def laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """`result`, of the shape of x, in the memory that `empty_like_heads` would give it; copied only if it lies otherwise."""
    _, heads, tokens, width = (max(size, 1) for size in x.shape)
    steps = (width, heads * width) if x.stride(1) < x.stride(2) else (tokens * width, width)
    lies_so = result.stride() == (heads * tokens * width, *steps, 1)
    return result if lies_so and result.dtype == x.dtype else empty_like_heads(x).copy_(result)
