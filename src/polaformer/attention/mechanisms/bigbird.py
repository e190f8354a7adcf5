"""BigBird (Zaheer et al., 2020): block-sparse softmax attention to global, neighbouring and random blocks of tokens.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩ D^-1/2) v_i,   over the tokens i of the blocks that t's block c attends to:
    the first and the last block; c − (window−1)/2 … c + (window−1)/2; num_random others, drawn separately per head and block;
    the first and the last block attend to all blocks

Shapes: q, k and v (B, H, N, D), all from the same tokens; G blocks of S tokens, the last one shorter if S does not divide N.
Normaliser: the softmax over the unmasked keys of those blocks; a query without any gives zeros.
Cost O(N·(2 + window + num_random)·S·D), plus 2·S·N·D for the two global blocks. Parameters: none.
Paper: Big Bird: Transformers for Longer Sequences. Source: transformers' block-sparse form (ITC), as Skyformer used it.
The random blocks depend only on the seed, the number of heads and the number of blocks: they are the same in every call and on
every device. Layers draw different blocks only with different seeds; our models set these. If the pattern would cover every
block, a sequence gets full softmax attention. The pattern depends on the number of blocks: masked tokens at the end have no
effect on those before them only if they add no block.
Departs: for 1024 or 4096 tokens transformers draws from the first 1024 only, and in evaluation it attends to the first block
again instead of random ones; here random blocks are drawn from all that are not attended to yet, and stay fixed.
Departs: transformers' models use full attention up to 5 + 2·num_random blocks; here only while the pattern covers every block.
Departs: transformers requires N to be a multiple of S and gives zeros for a masked query; here it attends to unmasked keys.

# B batch, H heads, N tokens, D head width, G blocks, S tokens per block, K blocks that a block attends to
"""

from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from polaformer.arguments import check_integer
from polaformer.attention.core import Facts, WideCore, attend_in_blocks, masked_softmax
from polaformer.attention.mechanisms.local import pad_mask, pad_tokens


class BigBirdCore(WideCore):
    """Block-sparse attention; window (odd) and num_random count blocks of `block` tokens; seed fixes the random blocks."""

    name = "bigbird"
    facts = Facts("linear", approximates="softmax", seeded=True, cross=False, trims=False, coarse=(("block", 16),))

    def __init__(
        self, num_heads: int, head_dim: int, *, block: int = 64, num_random: int = 3, window: int = 3, seed: int = 0
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_integer(self.where, "block", block)
        check_integer(self.where, "window", window)
        if window % 2 == 0:
            raise ValueError(f"attention 'bigbird': window is {window!r}; give an odd number of blocks (e.g. 3)")
        check_integer(self.where, "num_random", num_random, least=0)
        check_integer(self.where, "seed", seed, least=0)
        self.block, self.num_random, self.window, self.seed = block, num_random, window, seed

    @torch.compiler.disable  # it would trace the random draws and bypass their cache
    def random_blocks(self, num_blocks: int) -> Tensor:
        """(H, num_blocks − 2, num_random): the random blocks of all but the first and last block; −1 if none is left."""
        drawn = _draw(self.seed, self.num_heads, num_blocks, self.num_random, self.window // 2)
        return torch.tensor(drawn, dtype=torch.long).view(self.num_heads, num_blocks - 2, self.num_random)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        tokens = q.shape[2]
        if self._pattern_covers_all(tokens):
            return self._softmax(q, k, mask) @ v
        queries, keys, values = self._split(q * self.head_dim**-0.5), self._split(k), self._split(v)
        attended, exists, attended_mask = self._pattern(q, mask)
        ends = torch.cat([queries[:, :, 0], queries[:, :, -1]], dim=2)  # (B, H, 2·S, D)
        all_keys, all_values = (x.flatten(2, 3)[:, :, None] for x in (keys, values))  # (B, H, 1, G·S, D)
        ends = attend_in_blocks(ends[:, :, None], all_keys, all_values, exists[:, None, None, None])[:, :, 0]
        first, last = ends.split(self.block, dim=2)
        some_keys, some_values = (_gather_blocks(x, attended.clamp(min=0)) for x in (keys, values))  # (B, H, G − 2, K·S, D)
        inner = attend_in_blocks(queries[:, :, 1:-1], some_keys, some_values, attended_mask)
        return torch.cat([first, inner.flatten(2, 3), last], dim=2)[:, :, :tokens]

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, N)."""
        tokens = q.shape[2]
        if self._pattern_covers_all(tokens):
            return self._softmax(q, k, mask)
        attended, ends, inner = self._block_maps(q, k, mask)
        by_block = inner.unflatten(-1, (-1, self.block))  # (B, H, G − 2, S, K, S)
        full = by_block.new_zeros(*by_block.shape[:4], ends.shape[-1] // self.block, self.block)
        full = full.scatter_add(4, attended.clamp(min=0)[None, :, :, None, :, None].expand_as(by_block), by_block)
        first, last = ends.split(self.block, dim=2)
        return torch.cat([first, full.flatten(4, 5).flatten(2, 3), last], dim=2)[:, :, :tokens, :tokens]

    def extra_repr(self) -> str:
        """The settings."""
        return f"block={self.block}, num_random={self.num_random}, window={self.window}, seed={self.seed}"

    def _pattern_covers_all(self, tokens: int) -> bool:
        """Whether the second block, which has the fewest neighbours, attends to all: first, last, itself, random ones."""
        return -(-tokens // self.block) <= 3 + self.window // 2 + self.num_random

    def _softmax(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The map of full softmax attention, (B, H, N, N)."""
        return masked_softmax(q * self.head_dim**-0.5 @ k.mT, None if mask is None else mask[:, None, None])

    def _split(self, x: Tensor) -> Tensor:
        """(B, H, N, D) to (B, H, G, S, D)."""
        num_blocks = -(-x.shape[2] // self.block)
        return pad_tokens(x, num_blocks * self.block).unflatten(2, (num_blocks, self.block))

    def _block_maps(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Attended blocks (H, G − 2, K), −1 for none; the maps of the two global blocks (B, H, 2·S, G·S) and of the others
        (B, H, G − 2, S, K·S)."""
        queries, keys = self._split(q * self.head_dim**-0.5), self._split(k)
        attended, exists, attended_mask = self._pattern(q, mask)
        ends = torch.cat([queries[:, :, 0], queries[:, :, -1]], dim=2) @ keys.flatten(2, 3).mT
        inner = queries[:, :, 1:-1] @ _gather_blocks(keys, attended.clamp(min=0)).mT
        return attended, masked_softmax(ends, exists[:, None, None]), masked_softmax(inner, attended_mask)

    def _pattern(self, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Attended blocks (H, G − 2, K), −1 for none; the masks of all (B, G·S) and attended tokens (B, H, G − 2, 1, K·S)."""
        num_blocks = -(-q.shape[2] // self.block)
        exists = pad_mask(q, mask, num_blocks * self.block)
        attended = self._attended_blocks(num_blocks).to(q.device)
        attended_mask = exists.unflatten(1, (num_blocks, self.block))[:, attended.clamp(min=0)] & (attended >= 0)[..., None]
        return attended, exists, attended_mask.flatten(3)[:, :, :, None]

    def _attended_blocks(self, num_blocks: int) -> Tensor:
        """(H, G − 2, K): the blocks that each block but the first and last attends to; −1 for none."""
        own = torch.arange(1, num_blocks - 1)[:, None]
        near = own + torch.arange(self.window) - self.window // 2  # (G − 2, window)
        near = near.masked_fill((near < 1) | (near > num_blocks - 2), -1)
        fixed = torch.cat([torch.zeros_like(own), near, torch.full_like(own, num_blocks - 1)], dim=1)
        return torch.cat([fixed.expand(self.num_heads, -1, -1), self.random_blocks(num_blocks).to(fixed.device)], dim=2)


def _gather_blocks(blocks: Tensor, index: Tensor) -> Tensor:
    """The tokens of the indexed blocks: blocks (B, H, G, S, D), index (H, G − 2, K); returns (B, H, G − 2, K·S, D)."""
    batch, heads, num_blocks, size, width = blocks.shape
    flat = index + num_blocks * torch.arange(heads, device=index.device)[:, None, None]
    gathered = blocks.reshape(batch, heads * num_blocks, size * width).index_select(1, flat.flatten())
    return gathered.view(batch, heads, index.shape[1], index.shape[2] * size, width)


# Integers, not tensors: cached values must not belong to a device, to inference mode or to a trace.
@lru_cache(maxsize=64)
def _draw(seed: int, num_heads: int, num_blocks: int, num_random: int, reach: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    generator = Random(seed)
    return tuple(
        tuple(_draw_blocks(generator, own, num_blocks, num_random, reach) for own in range(1, num_blocks - 1))
        for _ in range(num_heads)
    )


def _draw_blocks(generator: Random, own: int, num_blocks: int, num_random: int, reach: int) -> tuple[int, ...]:
    """num_random distinct blocks, neither first, last nor within reach of `own`, all sets equally likely; −1 if none is left.

    Floyd's algorithm on the ranks of the candidates; of Random's methods only random() is stable across Python versions.
    """
    before = max(0, own - reach - 1)  # the candidates 1 … own − reach − 1
    candidates = before + max(0, num_blocks - 2 - own - reach)  # and own + reach + 1 … num_blocks − 2
    ranks: list[int] = []
    for last in range(candidates - num_random, candidates):
        rank = int(generator.random() * (last + 1)) if last >= 0 else -1
        ranks.append(last if last >= 0 and rank in ranks else rank)
    return tuple(rank if rank < 0 else 1 + rank if rank < before else own + reach + 1 + rank - before for rank in ranks)
