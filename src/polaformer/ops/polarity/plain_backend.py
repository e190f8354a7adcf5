"""The plain PyTorch path of linear.py as a backend: in blocks, with its results laid out as all backends lay them out."""

from torch import Tensor

from polaformer.ops.head_strides import laid_out_like
from polaformer.ops.polarity import plain as linear


def why_not() -> str | None:
    """None: it works everywhere."""
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, D) and its denominators (B, H, N, 2)."""
    out, norms = linear.forward(q, k, v, power, mask, eps, linear.block_size(q), scale)
    return laid_out_like(q, out), norms.contiguous()


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    norms: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v, power and scale."""
    *tokens, grad_power, grad_scale = linear.backward(grad, q, k, v, power, norms, mask, linear.block_size(q), scale)
    grad_q, grad_k, grad_v = (laid_out_like(x, g) for x, g in zip((q, k, v), tokens, strict=True))
    return grad_q, grad_k, grad_v, grad_power.contiguous(), None if grad_scale is None else grad_scale.contiguous()
