"""What every attention mechanism looks like from outside.

# B batch, H heads, N queries, M keys, D head width
"""

from typing import Protocol

from torch import Tensor

Mask = Tensor | None  # (B, M), True where the key exists
Bias = Tensor | None  # additive, broadcastable to (B, H, N, M)
Size = tuple[int, int] | None  # (height, width) of the queries
Maps = dict[str, Tensor]  # by name, each (B, H, N, M)


class Core(Protocol):
    """An attention mechanism: a module that maps q, k and v to outputs and can show the maps that it applies.

    q (B, H, N, D), k and v (B, H, M, D), mask (B, M) True where the key exists, bias additive and broadcastable to
    (B, H, N, M), grid the (height, width) of the queries. A core that cannot honour an argument refuses it.
    """

    num_heads: int
    head_dim: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        ...

    def weights(self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Maps:
        """The explicit maps that a call applies, by name, each (B, H, N, M)."""
        ...


def check_heads(name: str, num_heads: int, head_dim: int) -> None:
    """Raises unless there is at least one head with at least one channel."""
    for what, given in (("num_heads", num_heads), ("head_dim", head_dim)):
        if not isinstance(given, int) or given < 1:
            raise ValueError(f"attention {name!r}: {what} is {given!r}; give a whole number of at least 1")


def refuse_bias(name: str, bias: Tensor | None) -> None:
    """Raises for a core whose scores are never formed, so that nothing can be added to them."""
    if bias is not None:
        raise ValueError(
            f"attention {name!r}: got an additive bias of shape {tuple(bias.shape)}, but this mechanism forms no N×M scores "
            "to add it to; use 'softmax', or leave bias out"
        )
