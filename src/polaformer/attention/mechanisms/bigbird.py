"""BigBird (Zaheer et al., 2020): softmax attention over global, neighbouring and random blocks of tokens.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩ D^-1/2) v_i,   over the tokens i of the blocks that t's block c sees:
    the first and the last block; c − (window−1)/2 … c + (window−1)/2; num_random others, drawn apart for each head and block;
    the first and the last block see all blocks

Shapes: q, k and v (B, H, N, D), the same tokens in all three; G blocks of S tokens, the last shorter if S does not divide N.
Normaliser: the softmax over the keys seen that exist; a query that sees none gives zeros.
Cost O(N·(2 + window + num_random)·S·D), and 2·S·N·D for the two global blocks. Parameters: none.
Paper: Big Bird: Transformers for Longer Sequences. Source: transformers' block-sparse form (ITC), as Skyformer used it.
The random blocks follow from seed, the number of heads and that of blocks alone, the same in every call and on every device;
layers that are to differ get different seeds, and those of our models do. A sequence of so few blocks that every block would be
seen gets softmax attention. Which blocks are global, neighbours and drawn depends on the number of blocks: masked tokens at the
end change nothing for those before them only as long as they add no block.
Departs: transformers' code draws from the first 1024 tokens only where there are 1024 or 4096, and in evaluation sees the first
block again in place of random ones; here they are drawn from all blocks that are not seen yet, and stay.
Departs: transformers' models see all pairs up to 5 + 2·num_random blocks; here that ends where the pattern leaves a block out.
Departs: transformers' code wants N to be a multiple of S, and gives zeros for a masked query; here it sees what exists.

# B batch, H heads, N tokens, D head width, G blocks, S tokens of a block, K blocks seen
"""

from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from polaformer.arguments import check_integer
from polaformer.attention.core import Facts, WideCore, attend_in_blocks, masked_softmax
from polaformer.attention.mechanisms.local import existing, fill_up


class BigBirdCore(WideCore):
    """Block-sparse attention; window (odd) and num_random in blocks of `block` tokens, seed for the random blocks."""

    name, facts = "bigbird", Facts("linear", approximates="softmax", seeded=True, cross=False)

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

    @torch.compiler.disable  # it would trace the drawing, and forget what is kept
    def random_blocks(self, num_blocks: int) -> Tensor:
        """(H, num_blocks − 2, num_random): which blocks each one but the first and last sees; −1 where none is left to draw."""
        drawn = _draw(self.seed, self.num_heads, num_blocks, self.num_random, self.window // 2)
        return torch.tensor(drawn, dtype=torch.long).view(self.num_heads, num_blocks - 2, self.num_random)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        tokens = q.shape[2]
        if self._sees_all(tokens):
            return self._softmax(q, k, mask) @ v
        queries, keys, values = self._split(q * self.head_dim**-0.5), self._split(k), self._split(v)
        seen, exists, seen_exists = self._existing(q, mask)
        ends = torch.cat([queries[:, :, 0], queries[:, :, -1]], dim=2)  # (B, H, 2·S, D)
        all_keys, all_values = (x.flatten(2, 3)[:, :, None] for x in (keys, values))  # (B, H, 1, G·S, D)
        ends = attend_in_blocks(ends[:, :, None], all_keys, all_values, exists[:, None, None, None])[:, :, 0]
        first, last = ends.split(self.block, dim=2)
        some_keys, some_values = (_take(x, seen.clamp(min=0)) for x in (keys, values))  # (B, H, G − 2, K·S, D)
        inner = attend_in_blocks(queries[:, :, 1:-1], some_keys, some_values, seen_exists)
        return torch.cat([first, inner.flatten(2, 3), last], dim=2)[:, :, :tokens]

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, N)."""
        tokens = q.shape[2]
        if self._sees_all(tokens):
            return self._softmax(q, k, mask)
        seen, ends, inner = self._weights(q, k, mask)
        by_block = inner.unflatten(-1, (-1, self.block))  # (B, H, G − 2, S, K, S)
        full = by_block.new_zeros(*by_block.shape[:4], ends.shape[-1] // self.block, self.block)
        full = full.scatter_add(4, seen.clamp(min=0)[None, :, :, None, :, None].expand_as(by_block), by_block)
        first, last = ends.split(self.block, dim=2)
        return torch.cat([first, full.flatten(4, 5).flatten(2, 3), last], dim=2)[:, :, :tokens, :tokens]

    def extra_repr(self) -> str:
        """The settings."""
        return f"block={self.block}, num_random={self.num_random}, window={self.window}, seed={self.seed}"

    def _sees_all(self, tokens: int) -> bool:
        """Whether the second block, which has the fewest neighbours, sees every block: first, last, itself, and those drawn."""
        return -(-tokens // self.block) <= 3 + self.window // 2 + self.num_random

    def _softmax(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The map of softmax attention, (B, H, N, N)."""
        return masked_softmax(q * self.head_dim**-0.5 @ k.mT, None if mask is None else mask[:, None, None])

    def _split(self, x: Tensor) -> Tensor:
        """(B, H, N, D) to (B, H, G, S, D)."""
        num_blocks = -(-x.shape[2] // self.block)
        return fill_up(x, num_blocks * self.block).unflatten(2, (num_blocks, self.block))

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks seen (H, G − 2, K), −1 for none; the maps of the two global blocks (B, H, 2·S, G·S) and of the others
        (B, H, G − 2, S, K·S)."""
        queries, keys = self._split(q * self.head_dim**-0.5), self._split(k)
        seen, exists, seen_exists = self._existing(q, mask)
        ends = torch.cat([queries[:, :, 0], queries[:, :, -1]], dim=2) @ keys.flatten(2, 3).mT
        inner = queries[:, :, 1:-1] @ _take(keys, seen.clamp(min=0)).mT
        return seen, masked_softmax(ends, exists[:, None, None]), masked_softmax(inner, seen_exists)

    def _existing(self, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks seen (H, G − 2, K), −1 for none; which tokens exist (B, G·S); which of those seen do (B, H, G − 2, 1, K·S)."""
        num_blocks = -(-q.shape[2] // self.block)
        exists = existing(q, mask, num_blocks * self.block)
        seen = self._seen(num_blocks).to(q.device)
        seen_exists = exists.unflatten(1, (num_blocks, self.block))[:, seen.clamp(min=0)] & (seen >= 0)[..., None]
        return seen, exists, seen_exists.flatten(3)[:, :, :, None]

    def _seen(self, num_blocks: int) -> Tensor:
        """(H, G − 2, K): the blocks that each one but the first and last sees; −1 for none."""
        own = torch.arange(1, num_blocks - 1)[:, None]
        near = own + torch.arange(self.window) - self.window // 2  # (G − 2, window)
        near = near.masked_fill((near < 1) | (near > num_blocks - 2), -1)
        fixed = torch.cat([torch.zeros_like(own), near, torch.full_like(own, num_blocks - 1)], dim=1)
        return torch.cat([fixed.expand(self.num_heads, -1, -1), self.random_blocks(num_blocks).to(fixed.device)], dim=2)


def _take(blocks: Tensor, which: Tensor) -> Tensor:
    """The tokens of the blocks `which` (H, G − 2, K) among (B, H, G, S, D): (B, H, G − 2, K·S, D)."""
    batch, heads, num_blocks, size, width = blocks.shape
    flat = which + num_blocks * torch.arange(heads, device=which.device)[:, None, None]
    taken = blocks.reshape(batch, heads * num_blocks, size * width).index_select(1, flat.flatten())
    return taken.view(batch, heads, which.shape[1], which.shape[2] * size, width)


# Numbers, not tensors: what is kept must not belong to a device, to inference mode or to a trace.
@lru_cache(maxsize=64)
def _draw(seed: int, num_heads: int, num_blocks: int, num_random: int, reach: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    generator = Random(seed)
    return tuple(
        tuple(_draw_others(generator, own, num_blocks, num_random, reach) for own in range(1, num_blocks - 1))
        for _ in range(num_heads)
    )


def _draw_others(generator: Random, own: int, num_blocks: int, num_random: int, reach: int) -> tuple[int, ...]:
    """num_random blocks, all sets equally likely, neither first nor last nor within reach of `own`; −1 where none is left.

    Floyd's algorithm on the ranks of the candidates; random() is the one method whose numbers never change with the version.
    """
    before = max(0, own - reach - 1)  # the candidates 1 … own − reach − 1
    candidates = before + max(0, num_blocks - 2 - own - reach)  # and own + reach + 1 … num_blocks − 2
    ranks: list[int] = []
    for last in range(candidates - num_random, candidates):
        rank = int(generator.random() * (last + 1)) if last >= 0 else -1
        ranks.append(last if last >= 0 and rank in ranks else rank)
    return tuple(rank if rank < 0 else 1 + rank if rank < before else own + reach + 1 + rank - before for rank in ranks)
