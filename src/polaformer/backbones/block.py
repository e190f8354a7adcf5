"""The block that all four backbones are made of: x + attention(norm(x)), then x + mlp(norm(x)).

# B batch, N tokens, C channels
"""

from collections.abc import Iterable

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polaformer.attention import AttentionLayer
from polaformer.backbones.layout import Layout


class Block(nn.Module):
    """A pre-norm transformer block around any attention layer."""

    def __init__(
        self,
        dim: int,
        attention: AttentionLayer,
        *,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if int(dim * mlp_ratio) < 1:
            raise ValueError(f"mlp_ratio is {mlp_ratio}, which leaves no channel of {dim}; give a larger one")
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp: nn.Module = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (B, N, C) to (B, N, C)."""
        mask = layout.token_mask(self.attn.num_prefix_tokens)
        x = x + self.drop_path(self.attn(self.norm1(x), layout.grid, mask, sizes=layout.sizes))
        return x + self.drop_path(self.feed_forward(self.norm2(x), layout))

    def feed_forward(self, x: Tensor, layout: Layout) -> Tensor:
        """The second half, (B, N, C) to (B, N, C); a family whose MLP looks at neighbours says so here."""
        return self.mlp(x)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, layout: Layout, *, recompute: bool) -> Tensor:
    """The blocks one after the other; recompute: keep only their inputs for backward and compute the rest again there."""
    for block in blocks:
        x = checkpoint(block, x, layout, use_reentrant=False) if recompute and torch.is_grad_enabled() else block(x, layout)
    return x


def initialise_linear(module: nn.Module) -> None:
    """As all four families publish it: truncated normal weights, zero biases. For `Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
