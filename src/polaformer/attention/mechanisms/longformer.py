"""Longformer's sliding window (Beltagy et al., 2020), without global tokens: each token attends to its neighbourhood.

    out_t = Σ_i softmax_i(⟨q_t, k_i⟩ D^-1/2) v_i,   over the tokens i with t − before ≤ i ≤ t + after

Shapes: q, k and v (B, H, N, D), all from the same tokens; a block of S queries reads S + before + after keys.
Normaliser: the softmax over the unmasked keys of the window; a window without any gives zeros.
Cost O(N·(window + S)·D), S = 64, and never more than that of all pairs. Parameters: none.
Paper: Longformer: The Long-Document Transformer. Source: the Long Range Arena's code: an even window of w tokens means
before = w/2 − 1, after = w/2, and no token is global. transformers' window of w tokens is (w/2, w/2): give the pair.
Departs: the Long Range Arena's code computes all N² scores, has a second, unused set of projections, and lets a masked query
average all tokens; here it attends to the unmasked keys of its window.
Departs: transformers requires N to be a multiple of the window and gives zeros for a masked query.

# B batch, H heads, N tokens, D head width, G blocks, S queries per block, L keys that a block reads
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.attention.core import Facts, WideCore, attend_in_blocks, masked_softmax
from polaformer.attention.mechanisms.local import pad_mask, pad_tokens

BLOCK = 64  # queries at a time: fewer make the matmuls too small to be fast, more compute too much outside their windows


class LongformerCore(WideCore):
    """Sliding-window attention; window: an even number of tokens, or the numbers (before, after) on each side of a token."""

    name, facts = "longformer", Facts("linear", approximates="softmax", cross=False, coarse=(("window", 32),))

    def __init__(self, num_heads: int, head_dim: int, *, window: int | tuple[int, int] = 512) -> None:
        super().__init__(num_heads, head_dim)
        self.before, self.after = _sides(window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs, (B, H, N, D)."""
        tokens = q.shape[2]
        before, after = min(self.before, tokens - 1), min(self.after, tokens - 1)
        if before + after + BLOCK >= tokens:
            return self.map(q, k, mask) @ v
        block = BLOCK
        length, span = -(-tokens // block) * block, block + before + after
        queries = pad_tokens(q * self.head_dim**-0.5, length).unflatten(2, (length // block, block))  # (B, H, G, S, D)
        around = (before, length - tokens + after)
        keys, values = (F.pad(x, (0, 0, *around)).unfold(2, span, block).mT for x in (k, v))  # (B, H, G, L, D)
        exists = F.pad(pad_mask(q, mask, tokens), around).unfold(1, span, block)[:, None, :, None]  # (B, 1, G, 1, L)
        inside = _band(block, span, 0, before + after, q.device)
        return attend_in_blocks(queries, keys, values, exists & inside).flatten(2, 3)[:, :, :tokens]

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention map, (B, H, N, N)."""
        tokens = q.shape[2]
        inside = _band(tokens, tokens, self.before, self.after, q.device)
        return masked_softmax(q * self.head_dim**-0.5 @ k.mT, pad_mask(q, mask, tokens)[:, None, None] & inside)

    def extra_repr(self) -> str:
        """The window."""
        return f"window=({self.before}, {self.after})"


def _band(rows: int, columns: int, before: int, after: int, device: torch.device) -> Tensor:
    """(rows, columns): True where −before ≤ column − row ≤ after."""
    offset = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    return (offset >= -before) & (offset <= after)


def _sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """The numbers of tokens before and after a query that it attends to; raises ValueError for an invalid window."""
    if isinstance(window, int) and not isinstance(window, bool) and window > 0 and window % 2 == 0:
        return window // 2 - 1, window // 2
    if isinstance(window, tuple | list) and len(window) == 2:
        before, after = window
        if all(isinstance(side, int) and not isinstance(side, bool) and side >= 0 for side in window):
            return before, after
    raise ValueError(
        f"attention 'longformer': window is {window!r}; give an even integer ≥ 2 (e.g. 512), or the numbers of tokens "
        "(before, after) on each side of a token, a pair of integers ≥ 0 (e.g. (256, 256))"
    )
