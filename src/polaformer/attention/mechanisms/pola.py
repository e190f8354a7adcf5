"""Polarity-aware attention (PolaFormer, Eq. 3-6 and 9 of the paper): the mechanism of this library.

    s = softplus(scale), p = 1 + α·sigmoid(power)           one entry per head and channel
    out = polarity_attention(q / s, k / s, v, p)            see polaformer.ops.polarity.operator

Shapes: q (B, H, N, D), k and v (B, H, M, D), s and p (H, D); the first ceil(D/2) output channels are the same-sign stream, the
others the opposite-sign stream.
Normaliser: the sum over the unmasked keys, plus n·eps. Cost O((N + M)·D²). Parameters: power and scale, H·D each.
Paper: PolaFormer: Polarity-aware Linear Attention for Vision Transformers (Meng et al., 2025).
Source: the paper for the formula; the authors' code for the learnable scale, one exponent per head and channel, and the initial
values (zeros: p = 1 + α/2, s = ln 2).

# B batch, H heads, N queries, M keys, D head width
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_choice, check_flag, check_number
from polaformer.attention.core import (
    Bias,
    Facts,
    LayerParts,
    Maps,
    Mask,
    Size,
    apply_map,
    check_heads,
    check_tensors,
    refuse_bias,
)
from polaformer.ops.polarity import variants
from polaformer.ops.polarity.checks import check_backend, check_eps
from polaformer.ops.polarity.operator import polarity_attention
from polaformer.ops.precision import computing_dtype

POLARITIES = ("both", "same", "positive", "subtract")


class PolaCore(nn.Module):
    """Polarity-aware attention with its learnable powers and scales.

    polarity: "both" (the paper), "same" (same-sign stream over all of v), "positive" (ReLU features only: classical),
        "subtract" (Eq. 5: the difference of the two streams over all of v; unbounded, for study).
    learn_scale: False omits the division by softplus(scale), as the paper's formulas do.
    shared_power: one exponent per channel for all heads, as the paper's formulas have it, instead of one per head and channel.
    """

    facts = Facts(
        "linear",
        num_maps=2,
        set_by_model=("alpha",),
        published=LayerParts(gate="linear", conv="depthwise", key_positions=True, core_options=(("eps", 1e-6),)),
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        alpha: float = 4.0,
        polarity: str = "both",
        learn_scale: bool = True,
        shared_power: bool = False,
        eps: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        _check(num_heads, head_dim, alpha, polarity, eps, backend)
        check_flag("PolaCore", "learn_scale", learn_scale)
        check_flag("PolaCore", "shared_power", shared_power)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.alpha, self.polarity, self.eps, self.backend = alpha, polarity, eps, backend
        if polarity != "both":
            self.facts = replace(self.facts, num_maps=1, distributions=polarity != "subtract")
        self.power = nn.Parameter(torch.zeros(1 if shared_power else num_heads, head_dim))
        self.scale = nn.Parameter(torch.zeros(num_heads, head_dim)) if learn_scale else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Tensor:
        """Outputs, (B, H, N, D), in v's dtype, before the gate."""
        check_tensors("pola", self, q, k, v, mask)
        refuse_bias("pola", bias)
        if self.polarity == "both":
            scale = self.divisor()
            return polarity_attention(q, k, v, self.exponent(), scale=scale, mask=mask, eps=self.eps, backend=self.backend)
        q, k, wide = self._scaled(q), self._scaled(k), v.to(computing_dtype(v))
        if self.polarity == "subtract":
            out = variants.subtractive_attention(q, k, wide, self.exponent(), mask=mask, eps=self.eps)
        else:
            out = variants.same_sign_attention(q, k, wide, self.exponent(), mask=mask, eps=self.eps)
        return out.to(v.dtype)

    def weights(
        self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Maps:
        """The explicit attention maps, (B, H, N, M) each.

        polarity "both": {"same", "opposite"}, applied to the first ceil(D/2) and the other channels of v; otherwise one map,
        named after the polarity and applied to all of v.
        """
        check_tensors("pola", self, q, k, None, mask)
        refuse_bias("pola", bias)
        q, k = self._scaled(q), self._scaled(k)
        if self.polarity == "subtract":
            return {"subtract": variants.subtractive_map(q, k, self.exponent(), mask=mask, eps=self.eps)}
        same, opposite = variants.polarity_maps(q, k, self.exponent(), mask=mask, eps=self.eps)
        return {"same": same, "opposite": opposite} if self.polarity == "both" else {self.polarity: same}

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """Outputs, (B, H, N, D): the maps of `weights` applied to v (B, H, M, D)."""
        if self.polarity != "both":
            return apply_map(maps[self.polarity], v)
        half = (v.shape[-1] + 1) // 2
        return torch.cat([apply_map(maps["same"], v[..., :half]), apply_map(maps["opposite"], v[..., half:])], dim=-1)

    def exponent(self) -> Tensor:
        """p of Eq. 9, (H, D), between 1 and 1 + α; at least float32, so that bf16 does not round it."""
        exponent = 1 + self.alpha * torch.sigmoid(self.power.to(computing_dtype(self.power)))
        return exponent.expand(self.num_heads, -1)

    def divisor(self) -> Tensor | None:
        """What q and k are divided by, (H, D), at least float32; None without a scale.

        Clamped to [1e-19, 1e19] (float32), so that neither it nor its reciprocal comes near the ends of the range.
        """
        if self.scale is None:
            return None
        scale = self.scale.to(computing_dtype(self.scale))
        least = torch.finfo(scale.dtype).tiny ** 0.5
        return F.softplus(scale).clamp(least, 1 / least)

    def extra_repr(self) -> str:
        """The settings that are not visible in the parameters."""
        return f"alpha={self.alpha}, polarity={self.polarity!r}, eps={self.eps}, backend={self.backend!r}"

    def _scaled(self, x: Tensor) -> Tensor:
        """Queries or keys divided by softplus(scale); for polarity "positive" with their negative part set to zero.

        In the computing dtype: rounding the quotient to half precision would lose more digits than the rest of the operator,
        and could overflow.
        """
        x, divisor = x.to(computing_dtype(x)), self.divisor()
        if divisor is not None:
            x = x / divisor.to(x.dtype)[:, None]  # (H, 1, D)
        return x.relu() if self.polarity == "positive" else x


def _check(num_heads: int, head_dim: int, alpha: float, polarity: str, eps: float, backend: str) -> None:
    check_choice("PolaCore", "polarity", polarity, POLARITIES)
    check_heads("pola", num_heads, head_dim)
    if polarity == "both" and head_dim < 2:
        raise ValueError("PolaCore: head width is 1, but each polarity needs a channel of v; use fewer heads")
    check_number("PolaCore", "alpha", alpha, above=True, hint="4 in the authors' models")
    check_eps("PolaCore", eps)
    check_backend("PolaCore", backend)
    if polarity != "both" and backend not in ("auto", "torch"):
        raise ValueError(f"PolaCore: polarity {polarity!r} is computed in plain PyTorch only; use backend 'auto' or 'torch'")
