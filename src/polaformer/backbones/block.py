"""The block of all four backbones: x + attention(norm(x)), then x + mlp(norm(x)).

# B batch, N tokens, C channels
"""

from collections.abc import Iterable

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polaformer.attention import AttentionLayer
from polaformer.backbones.config import WHERE, StageConfig
from polaformer.backbones.token_layout import TokenLayout


class ConvolutionalMlp(nn.Module):
    """Linear, a depthwise 3×3 convolution over the grid, GELU, linear; prefix tokens skip the convolution.

    timm's version does not support masks: masked tokens must be zero before the convolution.
    """

    def __init__(self, dim: int, hidden: int, drop: float, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, kernel_size=3, padding=1, groups=hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Tokens (B, P + N, C) to (B, P + N, C)."""
        hidden = self.fc1(x)
        cells = self.dwconv(layout.image(hidden[:, self.num_prefix_tokens :])).flatten(2).mT
        hidden = cells if self.num_prefix_tokens == 0 else torch.cat([hidden[:, : self.num_prefix_tokens], cells], dim=1)
        return self.drop(self.fc2(self.drop(self.act(hidden))))


class Block(nn.Module):
    """A pre-norm transformer block of a stage, around any attention layer.

    local_mlp: the MLP has a depthwise convolution; it also has one if the attention's mechanism is published with it.
    """

    def __init__(
        self,
        stage: StageConfig,
        attention: AttentionLayer,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        proj_drop: float = 0.0,
        *,
        local_mlp: bool = False,
    ) -> None:
        super().__init__()
        dim, hidden = stage.dim, int(stage.dim * stage.mlp_ratio)
        if hidden < 1:
            raise ValueError(f"{WHERE}: mlp_ratio is {stage.mlp_ratio}, too small for a hidden channel at dim {dim}; give more")
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp: nn.Module = (
            ConvolutionalMlp(dim, hidden, proj_drop, attention.num_prefix_tokens)
            if local_mlp or attention.core.facts.published.local_mlp
            else Mlp(dim, hidden, drop=proj_drop)
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Tokens (B, N, C) to (B, N, C)."""
        mask = layout.token_mask(self.attn.num_prefix_tokens)
        x = x + self.drop_path(self.attn(self.norm1(x), layout.grid, mask, sizes=layout.sizes))
        return x + self.drop_path(self.feed_forward(self.norm2(x), layout))

    def feed_forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """The MLP, (B, N, C) to (B, N, C)."""
        return self.mlp(x, layout) if isinstance(self.mlp, ConvolutionalMlp) else self.mlp(x)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, layout: TokenLayout, *, recompute: bool) -> Tensor:
    """Runs the blocks in order; recompute: keep only their inputs for backward and recompute the rest there."""
    for block in blocks:
        x = checkpoint(block, x, layout, use_reentrant=False) if recompute and torch.is_grad_enabled() else block(x, layout)
    return x


def initialise_linear(module: nn.Module) -> None:
    """Truncated normal weights and zero biases, as in all four published families. For `Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
