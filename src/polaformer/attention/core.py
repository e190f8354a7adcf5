"""What every attention mechanism looks like from outside, and what most of them share.

# B batch, H heads, N queries, M keys, D head width, F features
"""

from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from polaformer.ops.linear import reciprocal
from polaformer.ops.precision import computing_dtype, without_autocast

Mask = Tensor | None  # (B, M), True where the key exists
Bias = Tensor | None  # additive, broadcastable to (B, H, N, M)
Size = tuple[int, int] | None  # (height, width) of the queries
Maps = dict[str, Tensor]  # by name, each (B, H, N, M)


class Facts(NamedTuple):
    """What a mechanism is, for tables and for those who choose one.

    cost: how its time grows with the number of tokens: "linear", "n log n" or "quadratic".
    approximates: the mechanism whose result it aims at; None: a formula of its own.
    stochastic: it draws random numbers in every call, from PyTorch's generator.
    cross: queries may be other tokens than keys, in another number.
    together: what a query gets depends on the other queries too. Masked tokens are then no queries either, where N = M.
    needs_length: `max_length`, the largest number of tokens, is one of its arguments, without a default.
    """

    cost: str
    approximates: str | None = None
    stochastic: bool = False
    cross: bool = True
    together: bool = False
    needs_length: bool = False


class Core(Protocol):
    """An attention mechanism: a module that maps q, k and v to outputs and can show the maps that it applies.

    q (B, H, N, D), k and v (B, H, M, D), mask (B, M) True where the key exists, bias additive and broadcastable to
    (B, H, N, M), grid the (height, width) of the queries. A core that cannot honour an argument refuses it.
    """

    num_heads: int
    head_dim: int
    facts: ClassVar[Facts]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        ...

    def weights(self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Maps:
        """The explicit maps that a call applies, by name, each (B, H, N, M)."""
        ...

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """What a call makes of v (B, H, M, D) by the maps that `weights` gave; v must be zero for keys that do not exist."""
        ...


class WideCore(nn.Module):
    """A core that computes in float32 (float64 for float64), whatever it is given, and takes no additive bias.

    A mechanism writes `attend` and, where there is a map, `map`. Both get q, k and v in the computing dtype, with autocast off,
    and k and v zeroed (also where they are NaN) under the mask; so is q, where tokens are mixed before they attend and N = M.
    """

    name: ClassVar[str]
    facts: ClassVar[Facts]

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        check_heads(self.name, num_heads, head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        self.check_call(q, k, bias)
        return _attend(q, k, v, mask, self)

    def weights(self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None) -> Maps:
        """The explicit map, (B, H, N, M), under the mechanism's name."""
        self.check_call(q, k, bias)
        return _maps(q, k, mask, self)

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """What a call makes of v (B, H, M, D) by the maps that `weights` gave; v must be zero for keys that do not exist."""
        return maps[self.name] @ v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D); see above for the arguments."""
        raise NotImplementedError

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, M), zero where a key does not exist."""
        raise NotImplementedError

    def maps(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Maps:
        """The maps by name; one, unless the mechanism says otherwise."""
        return {self.name: self.map(q, k, mask)}

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None) -> None:
        """Raises for what the mechanism cannot honour."""
        refuse_bias(self.name, bias)
        if not self.facts.cross and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"attention {self.name!r}: got {q.shape[2]} queries and {k.shape[2]} keys, but this mechanism relates tokens "
                "of one sequence; give as many of both (no reduction of keys, no other context), or use another mechanism"
            )


class FeatureCore(WideCore):
    """A core of the form out_t = φ(q_t) Σ_i ψ(k_i)ᵀ v_i / φ(q_t) Σ_i ψ(k_i)ᵀ: linear in the number of tokens.

    A mechanism writes `features`. A query that meets no key mass gives zeros.
    """

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) (B, H, N, F) and ψ(k) (B, H, M, F), the latter zero for keys that do not exist."""
        raise NotImplementedError

    def divisors(self, norms: Tensor, num_keys: Tensor | int) -> Tensor:
        """What sums are multiplied with, from φ(q_t) Σ_i ψ(k_i)ᵀ (B, H, N, 1) and the number of keys that exist."""
        return reciprocal(norms)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D)."""
        queries, keys = self.features(q, k, mask)
        norms = queries @ keys.sum(dim=-2, keepdim=True).mT  # (B, H, N, 1)
        return queries @ (keys.mT @ v) * self.divisors(norms, count_keys(k, mask))

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, M)."""
        queries, keys = self.features(q, k, mask)
        scores = queries @ keys.mT
        return scores * self.divisors(scores.sum(dim=-1, keepdim=True), count_keys(k, mask))


@without_autocast
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, core: WideCore) -> Tensor:
    dtype = computing_dtype(v)
    k, values = zero_absent(k.to(dtype), mask), zero_absent(v.to(dtype), mask)
    return core.attend(_seen(q, k, mask, core), k, values, mask).to(v.dtype)


@without_autocast
def _maps(q: Tensor, k: Tensor, mask: Tensor | None, core: WideCore) -> Maps:
    return core.maps(_seen(q, k, mask, core), zero_absent(k.to(computing_dtype(k)), mask), mask)


def _seen(q: Tensor, k: Tensor, mask: Tensor | None, core: WideCore) -> Tensor:
    q = q.to(computing_dtype(q))
    return zero_absent(q, mask) if core.facts.together and q.shape[2] == k.shape[2] else q


def zero_absent(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, M, …) with zeros, also in place of NaN, for tokens that do not exist."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def count_keys(k: Tensor, mask: Tensor | None) -> Tensor | int:
    """How many keys exist: a number, or (B, 1, 1, 1) in k's dtype if samples differ."""
    return k.shape[2] if mask is None else mask.sum(dim=-1).to(k.dtype)[:, None, None, None]


def masked_softmax(scores: Tensor, exists: Tensor | None) -> Tensor:
    """The softmax over the last dimension among what exists (broadcastable to scores); zeros where nothing does."""
    if exists is None:
        return scores.softmax(dim=-1)
    # Where nothing exists the softmax sees everything, so that neither it nor its gradient is NaN.
    seen = exists | ~exists.any(dim=-1, keepdim=True)
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) * exists


def unit_vectors(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """x / ‖x‖₂ over the given dimensions, at any magnitude; zero for a zero vector, which also passes no gradient."""
    largest = x.detach().abs().amax(dim=dim, keepdim=True)
    scaled = x / torch.where(largest == 0, 1.0, largest)  # its squares neither overflow nor vanish
    return scaled * reciprocal(norm_of(scaled, dim))


def norm_of(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """‖x‖₂ over the given dimensions, which are kept; at zero the gradient is zero, not NaN."""
    square = x.square().sum(dim=dim, keepdim=True)
    empty = square == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, square).sqrt())


def check_heads(name: str, num_heads: int, head_dim: int) -> None:
    """Raises unless there is at least one head with at least one channel."""
    for what, given in (("num_heads", num_heads), ("head_dim", head_dim)):
        check_count(name, what, given)


def check_count(name: str, what: str, given: int) -> None:
    """Raises unless an argument of a mechanism is a whole number of at least 1."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"attention {name!r}: {what} is {given!r}; give a whole number of at least 1")


def check_length(name: str, max_length: int, given: int) -> None:
    """Raises if there are more tokens than a mechanism was made for."""
    if given > max_length:
        raise ValueError(
            f"attention {name!r}: got {given} tokens, but it was made for at most {max_length}; "
            f"create it with max_length={given} or more"
        )


def refuse_bias(name: str, bias: Tensor | None) -> None:
    """Raises for a core that adds nothing to its scores, or has none."""
    if bias is not None:
        raise ValueError(
            f"attention {name!r}: got an additive bias of shape {tuple(bias.shape)}, but this mechanism forms no N×M scores "
            "to add it to; use 'softmax', or leave bias out"
        )
