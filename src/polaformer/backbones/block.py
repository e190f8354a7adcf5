"""The block that all four backbones are made of: x + attention(norm(x)), then x + mlp(norm(x)).

# B batch, N tokens, C channels
"""

from collections.abc import Iterable

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polaformer.attention import AttentionLayer
from polaformer.backbones.token_grid import Layout


class ConvolutionalMlp(nn.Module):
    """Linear, a depthwise 3×3 convolution over the grid, GELU, linear; prefix tokens skip the convolution.

    timm has the same, but not for tokens of which some do not exist: these must be zero where the convolution looks.
    """

    def __init__(self, dim: int, hidden: int, drop: float, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, kernel_size=3, padding=1, groups=hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (B, P + N, C) to (B, P + N, C)."""
        hidden = self.fc1(x)
        cells = self.dwconv(layout.image(hidden[:, self.num_prefix_tokens :])).flatten(2).mT
        hidden = cells if self.num_prefix_tokens == 0 else torch.cat([hidden[:, : self.num_prefix_tokens], cells], dim=1)
        return self.drop(self.fc2(self.drop(self.act(hidden))))


class Block(nn.Module):
    """A pre-norm transformer block around any attention layer; local_mlp: the MLP looks at neighbours, by a convolution."""

    def __init__(
        self,
        dim: int,
        attention: AttentionLayer,
        *,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        proj_drop: float = 0.0,
        local_mlp: bool = False,
    ) -> None:
        super().__init__()
        if int(dim * mlp_ratio) < 1:
            raise ValueError(f"mlp_ratio is {mlp_ratio}, which leaves no channel of {dim}; give a larger one")
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        hidden = int(dim * mlp_ratio)
        self.mlp: nn.Module = (
            ConvolutionalMlp(dim, hidden, proj_drop, attention.num_prefix_tokens)
            if local_mlp
            else Mlp(dim, hidden, drop=proj_drop)
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (B, N, C) to (B, N, C)."""
        mask = layout.token_mask(self.attn.num_prefix_tokens)
        x = x + self.drop_path(self.attn(self.norm1(x), layout.grid, mask, sizes=layout.sizes))
        return x + self.drop_path(self.feed_forward(self.norm2(x), layout))

    def feed_forward(self, x: Tensor, layout: Layout) -> Tensor:
        """The second half, (B, N, C) to (B, N, C)."""
        return self.mlp(x, layout) if isinstance(self.mlp, ConvolutionalMlp) else self.mlp(x)


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
