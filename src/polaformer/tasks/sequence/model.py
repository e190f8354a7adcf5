"""The model of the Long Range Arena, as in Skyformer's code, around any attention mechanism.

    x₀ = Dropout(E[id] + P[position])
    x ← x + Dropout(Attention(LN(x), mask)),  x ← x + MLP(LN(x))        per layer
    h = Σ_t mask_t LN(x)_t / N,  logits = W₂ ReLU(W₁ h)                 with two documents: h = [u, v, u∘v, u − v]

mask = (id ≠ 0). Masked tokens have no effect on others.

# B samples, K documents per sample, N tokens, C channels
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polaformer.attention import AttentionLayer, create_layer, facts
from polaformer.attention.layer.seeds import separate_seeds
from polaformer.ops.grid import Grid


class SequenceModel(nn.Module):
    """Logits of sequences, from their token ids.

    length: rows of the position table; with pooling="padded" also the N that sums are divided by. pooling="valid" divides by
    the number of tokens that exist. grid: (height, width) of the tokens if convolutions are to act on it, else None.
    attention_options: arguments of the attention layers and their cores.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        num_classes: int,
        num_documents: int = 1,
        attention: str = "pola",
        attention_options: dict[str, Any] | None = None,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_dim: int = 128,
        dropout: float = 0.1,
        pooling: str = "padded",
        grid: Grid | None = None,
    ) -> None:
        super().__init__()
        self.length, self.num_documents, self.pooling, self.grid = length, num_documents, pooling, grid
        self.embedding, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        options = layer_options(attention, length, grid, attention_options or {})
        self.layers = nn.ModuleList(
            SequenceLayer(create_layer(attention, dim, num_heads, proj_drop=dropout, **options), mlp_dim, dropout)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        features = dim if num_documents == 1 else 4 * dim
        self.head = nn.Sequential(nn.Linear(features, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, num_classes))
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        if "seed" not in options:
            separate_seeds(self)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, K, N), 0 where there is no token, to logits (B, classes)."""
        pooled = self.encode(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])  # (B, K, C)
        if self.num_documents == 1:
            return self.head(pooled[:, 0])
        first, second = pooled.unbind(dim=1)
        return self.head(torch.cat([first, second, first * second, first - second], dim=-1))

    def encode(self, ids: Tensor) -> Tensor:
        """ids (B, N) to the features of each document, (B, C)."""
        mask = ids != 0
        x = self.drop(self.embedding(ids) + self.positions.weight[: ids.shape[1]])  # (B, N, C)
        for layer in self.layers:
            x = layer(x, mask, self.grid)
        total = self.norm(x).masked_fill(~mask[..., None], 0.0).sum(dim=1)
        return total / (self.length if self.pooling == "padded" else mask.sum(dim=1, keepdim=True).clamp(min=1))

    @property
    def trims(self) -> bool:
        """Whether padding after the longest document of a batch changes nothing, and can be left out."""
        return self.grid is None and all(layer.core.facts.trims and layer.key_positions is None for layer in self.attentions())

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes the activations of each layer in the backward pass."""
        for layer in self.layers:
            layer.checkpointed = enable  # type: ignore[assignment]

    def attentions(self) -> list[AttentionLayer]:
        """The attention layer of each layer."""
        return [layer.attention for layer in self.layers if isinstance(layer, SequenceLayer)]


class SequenceLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, attention: AttentionLayer, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.attention, dim, self.checkpointed = attention, attention.dim, False
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_dim, dim), nn.Dropout(dropout)
        )
        # The published model keeps PyTorch's initial values; those of the layer are for vision.
        attention.qkv.reset_parameters()
        attention.proj.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor, grid: Grid | None) -> Tensor:
        """x (B, N, C), mask (B, N) True where the token exists, to (B, N, C)."""
        if self.checkpointed and self.training:
            return checkpoint(self._forward, x, mask, grid, use_reentrant=False)
        return self._forward(x, mask, grid)

    def _forward(self, x: Tensor, mask: Tensor, grid: Grid | None) -> Tensor:
        x = x + self.attention(self.norm1(x), grid, mask)
        return x + self.mlp(self.norm2(x))


def layer_options(attention: str, length: int, grid: Grid | None, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention layer in this model: the given ones, and what it is published with, adapted to sequences.

    No key positions, since the input has positions. Without a grid, depthwise convolutions have a kernel of one row. The gate
    starts as PyTorch's linear layers do, the default of the paper's study of G.
    """
    about = facts(attention)
    parts = about.published.with_options(given)
    options: dict[str, Any] = {"key_positions": None, **dict(parts.core_options), **given}
    if parts.conv in ("depthwise", "channelwise") and grid is None and isinstance(parts.kernel_size, int):
        options["kernel_size"] = (1, parts.kernel_size)
    if parts.gate is not None:
        options.setdefault("gate_init", "kaiming_uniform")
    if about.needs_length or about.scaled_by_length:
        options.setdefault("max_length", length)
    return options
