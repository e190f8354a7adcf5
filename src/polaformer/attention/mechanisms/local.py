"""Local attention, as the Long Range Arena calls it (Tay et al., 2021): softmax within contiguous blocks of tokens.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩ D^-1/2) v_i,   over the tokens i with ⌊i/block⌋ = ⌊t/block⌋

Shapes: q, k and v (B, H, N, D), all from the same tokens; the last block is shorter if block does not divide N.
Normaliser: the softmax over the unmasked keys of the block; a block without any gives zeros. Cost O(N·block·D).
Parameters: none.
Paper: Long Range Arena: A Benchmark for Efficient Transformers. Source: the paper's description; its runs have blocks of 50
(ListOps, Text, Retrieval) or 64 (Image, Pathfinder).
Departs: the Long Range Arena's code, which is strided, not local. It appends block − (N mod block) zero tokens, a whole block
if N is a multiple, and of the N' tokens those attend to each other whose positions differ by multiples of G = N'/block: group g
has the tokens g, g + G, g + 2G, … `as_published=True` computes this.
Departs: that code cuts its mask into contiguous blocks: entry a of group g, the token g + a·G, is masked if the token
g·block + a is. The appended tokens count as unmasked; masked tokens keep their content; a masked query averages its group.
`as_published=True` does the same: there the content of masked tokens matters.

# B batch, H heads, N tokens, D head width, G blocks, S tokens per block
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.arguments import check_flag, check_integer
from polaformer.attention.core import Facts, WideCore, attend_in_blocks, masked_softmax


class LocalCore(WideCore):
    """Softmax attention within blocks of `block` tokens; as_published: the strided pattern of the benchmark's table."""

    name, facts = "local", Facts("linear", approximates="softmax", cross=False, coarse=(("block", 16),))

    def __init__(self, num_heads: int, head_dim: int, *, block: int = 64, as_published: bool = False) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "block", block)
        check_flag(self.where, "as_published", as_published)
        self.block, self.as_published = block, as_published
        if as_published:
            self.facts = replace(self.facts, reads_masked=True, trims=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        if self.as_published:
            out = (self._weights(q, k, mask) @ self._split(v)).transpose(2, 3)
        else:
            scaled = self._split(q * self.head_dim**-0.5)
            out = attend_in_blocks(scaled, self._split(k), self._split(v), self._block_mask(q, mask))  # (B, H, G, S, D)
        return out.flatten(2, 3)[:, :, : q.shape[2]]

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, N); as published, not zero at masked tokens."""
        weights = torch.diag_embed(self._weights(q, k, mask).movedim(2, -1))  # (B, H, S, S, G, G)
        order = (0, 1, 2, 4, 3, 5) if self.as_published else (0, 1, 4, 2, 5, 3)
        full = weights.permute(order).flatten(4, 5).flatten(2, 3)
        return full[:, :, : q.shape[2], : q.shape[2]]

    def extra_repr(self) -> str:
        """The settings."""
        return f"block={self.block}" + (", as_published=True" if self.as_published else "")

    def _sizes(self, tokens: int) -> tuple[int, int]:
        """The number of tokens per block, and in all blocks."""
        if self.as_published:
            return self.block, tokens + self.block - tokens % self.block
        size = min(self.block, tokens)
        return size, -(-tokens // size) * size

    def _split(self, x: Tensor) -> Tensor:
        """(B, H, N, D) to (B, H, G, S, D)."""
        size, length = self._sizes(x.shape[2])
        x = pad_tokens(x, length)
        if self.as_published:
            return x.unflatten(2, (size, length // size)).transpose(2, 3)
        return x.unflatten(2, (length // size, size))

    def _block_mask(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """The mask of the tokens of each block, (B, 1, G, 1, S)."""
        size, length = self._sizes(q.shape[2])
        return pad_mask(q, mask, length, value=self.as_published).unflatten(1, (length // size, size))[:, None, :, None]

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The map within each block, (B, H, G, S, S)."""
        scores, exists = self._split(q * self.head_dim**-0.5) @ self._split(k).mT, self._block_mask(q, mask)
        if not self.as_published:
            return masked_softmax(scores, exists)
        # The published −1e10 leaves no digit of a score in float32: a masked query averages its group.
        return scores.masked_fill(~(exists & exists.mT), -1e10).softmax(dim=-1)


def pad_tokens(x: Tensor, length: int) -> Tensor:
    """x (B, H, N, D) padded with zeros to (B, H, length, D)."""
    return F.pad(x, (0, 0, 0, length - x.shape[2]))


def pad_mask(x: Tensor, mask: Tensor | None, length: int, *, value: bool = False) -> Tensor:
    """(B, length): the mask of the tokens of x (B, H, N, D), all True without one, padded with `value`."""
    if mask is None:
        mask = x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool)
    return F.pad(mask, (0, length - x.shape[2]), value=value)
