"""Linear attention with the feature map ELU + 1 (Katharopoulos et al., 2020), Eq. 2 of the paper.

    out_t = φ(q_t) Σ_i φ(k_i)ᵀ v_i / φ(q_t) Σ_i φ(k_i)ᵀ,   φ(x) = elu(x) + 1

Normaliser: the sum over the keys that exist. Cost O((N + M)·D²). No parameters.

# B batch, H heads, N queries, M keys, D head width
"""

from torch import Tensor, nn

from polaformer.attention.core import Bias, Maps, Mask, Size, check_heads, refuse_bias
from polaformer.ops.linear import reciprocal
from polaformer.ops.precision import computing_dtype, without_autocast


class LinearCore(nn.Module):
    """ELU + 1 linear attention, computed in float32; a query that meets no key mass gives zeros."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        check_heads("linear", num_heads, head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        refuse_bias("linear", bias)
        return _attend(q, k, v, mask)

    def weights(self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Maps:
        """The explicit map, {"linear": (B, H, N, M)}."""
        refuse_bias("linear", bias)
        return {"linear": _map(q, k, mask)}


@without_autocast
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    queries, keys = _features(q), _keys(k, mask)
    values = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0.0)
    total = keys.sum(dim=-2, keepdim=True).mT  # (B, H, D, 1)
    return (queries @ (keys.mT @ values.to(keys.dtype)) * reciprocal(queries @ total)).to(v.dtype)


@without_autocast
def _map(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = _features(q) @ _keys(k, mask).mT  # (B, H, N, M)
    return scores * reciprocal(scores.sum(dim=-1, keepdim=True))


def _features(x: Tensor) -> Tensor:
    # elu(x) + 1 as it stands loses all digits below −17 in fp32: there it is exp(x).
    x = x.to(computing_dtype(x))
    return x.clamp(max=0).exp() + x.relu()


def _keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """The keys' features, zero (also where the content is NaN) for keys that do not exist."""
    return _features(k) if mask is None else _features(k).masked_fill(~mask[:, None, :, None], 0.0)
