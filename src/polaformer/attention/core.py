"""What every attention mechanism looks like from outside, and what most of them share.

# B batch, H heads, N queries, M keys, D head width, F features
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_integer
from polaformer.ops.grid import Grid
from polaformer.ops.polarity.plain import reciprocal
from polaformer.ops.precision import computing_dtype, without_autocast

Mask = Tensor | None  # (B, M), True where the key exists
Bias = Tensor | None  # additive, broadcastable to (B, H, N, M)
Size = Grid | None  # (height, width) of the queries
Maps = dict[str, Tensor]  # by name, each (B, H, N, M)


class LayerParts(NamedTuple):
    """What surrounds a mechanism where it was published: parts of the layer and of the block.

    gate, conv, kernel_size: arguments of AttentionLayer. key_positions: the keys have a table of positions.
    local_mlp: the block's MLP has a depthwise convolution.
    core_options: the core's own arguments in the published models, where they differ from its defaults.
    """

    gate: str | None = None
    conv: str | None = None
    kernel_size: int = 5
    key_positions: bool = False
    local_mlp: bool = False
    core_options: Mapping[str, Any] = {}

    def layer_options(self, tokens: int | Grid | None) -> dict[str, Any]:
        """The arguments of AttentionLayer for a native number of tokens, or (height, width) of their grid."""
        options: dict[str, Any] = {"gate": self.gate, "conv": self.conv, "kernel_size": self.kernel_size}
        return options | {"key_positions": tokens if self.key_positions else None}


class Facts(NamedTuple):
    """What a mechanism is. A core declares it on its class; an instance whose options change a fact replaces its own copy.

    cost: how the time grows with the number of tokens: "linear", "n log n" or "quadratic".
    approximates: the mechanism whose result it aims at; None: it has a formula of its own.
    stochastic: it draws random numbers in every call, from PyTorch's generator.
    cross: queries may be other tokens than keys, in the same or another number.
    mixes_queries: the output of a query depends on the other queries too. Masked tokens are then left out as queries as well,
        unless queries are other tokens than keys.
    seeded: it draws a random pattern once, from its argument `seed`; the layers of a model get different seeds.
    sized_by: its arguments that are numbers of tokens and have no default: "max_length" (tokens) and "max_keys" (keys).
    max_length, max_keys: how many tokens and keys an instance takes; None: any number.
    num_maps: how many maps each head has; None: one per channel.
    distributions: the rows of every map are non-negative and sum to 1.
    reads_masked: masked tokens are not zeroed, neither by the core nor by the layer: what is published reads them.
    in_windows: in Swin it attends within shifted windows, by WindowAttention.
    published: what surrounds it where it was published.
    """

    cost: str
    approximates: str | None = None
    stochastic: bool = False
    cross: bool = True
    mixes_queries: bool = False
    seeded: bool = False
    sized_by: tuple[str, ...] = ()
    max_length: int | None = None
    max_keys: int | None = None
    num_maps: int | None = 1
    distributions: bool = True
    reads_masked: bool = False
    in_windows: bool = False
    published: LayerParts = LayerParts()

    @property
    def needs_length(self) -> bool:
        """Whether `max_length`, the largest number of tokens, must be given."""
        return "max_length" in self.sized_by


class Core(Protocol):
    """An attention mechanism: a module that maps q, k and v to outputs and can show the maps that it applies.

    q (B, H, N, D), k and v (B, H, M, D), mask (B, M) True where the key exists, bias additive and broadcastable to
    (B, H, N, M), grid the (height, width) of the queries. cross: queries are other tokens than keys, even if N = M; N != M
    implies it. A core that does not support an argument refuses it. The layer zeroes masked tokens first, unless
    `facts.reads_masked`.
    """

    num_heads: int
    head_dim: int
    facts: Facts

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        ...

    def weights(
        self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Maps:
        """The explicit maps that a call applies, by name, each (B, H, N, M)."""
        ...

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """What a call makes of v (B, H, M, D) by the maps that `weights` gave; v must be zero for keys that do not exist."""
        ...


class WideCore(nn.Module):
    """A core that computes in float32 (float64 for float64), whatever it is given, and takes no additive bias.

    A mechanism implements `attend` and, if it has a map, `map`. Both get q, k and v in the computing dtype, with autocast off;
    masked positions of k and v are zero (even if they were NaN), and so are those of q if the mechanism mixes queries and they
    are the same tokens. A mechanism that mixes queries and supports other tokens as queries implements `attend_mixed` and
    `map_mixed` instead.
    """

    name: ClassVar[str]
    facts: Facts

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        check_heads(self.name, num_heads, head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim

    @property
    def where(self) -> str:
        """How messages name the mechanism."""
        return f"attention {self.name!r}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Tensor:
        """(B, H, N, D) in v's dtype."""
        check_tensors(self.name, self, q, k, v, mask)
        self.check_call(q, k, bias, cross)
        return _attend(q, k, v, mask, cross, self)

    def weights(
        self, q: Tensor, k: Tensor, *, mask: Mask = None, bias: Bias = None, grid: Size = None, cross: bool = False
    ) -> Maps:
        """The explicit map, (B, H, N, M), under the mechanism's name."""
        check_tensors(self.name, self, q, k, None, mask)
        self.check_call(q, k, bias, cross)
        return _maps(q, k, mask, cross, self)

    def apply_maps(self, maps: Maps, v: Tensor) -> Tensor:
        """What a call makes of v (B, H, M, D) by the maps that `weights` gave; v must be zero for keys that do not exist."""
        return apply_map(maps[self.name], v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D); see above for the arguments."""
        raise NotImplementedError

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, M), zero where a key does not exist."""
        raise NotImplementedError

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """As `attend`, and told which queries exist: (B, N), True where one does; None: all do."""
        return self.attend(q, k, v, mask)

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """As `map`, and told which queries exist."""
        return self.map(q, k, mask)

    def maps(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Maps:
        """The maps by name; one, unless the mechanism says otherwise."""
        return {self.name: self.map_mixed(q, k, mask, queries)}

    def map_names(self) -> list[str]:
        """The names of `maps`."""
        return [self.name]

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises for what the mechanism cannot honour."""
        refuse_bias(self.name, bias)
        if cross and not self.facts.cross:
            raise ValueError(
                f"attention {self.name!r}: got cross=True, or its layer a context, but this mechanism relates tokens of one "
                "sequence; leave it out, or use another mechanism"
            )
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
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cross: bool, core: WideCore) -> Tensor:
    if 0 in (q.numel(), k.numel()):
        return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)  # a part of the graph, as any result
    dtype, queries = computing_dtype(v), _existing_queries(q, k, mask, cross, core)
    wide = (_zeroed(q.to(dtype), queries, core), _zeroed(k.to(dtype), mask, core), _zeroed(v.to(dtype), mask, core))
    return core.attend_mixed(*wide, mask, queries).to(v.dtype)


@without_autocast
def _maps(q: Tensor, k: Tensor, mask: Tensor | None, cross: bool, core: WideCore) -> Maps:
    if 0 in (q.numel(), k.numel()):
        return {name: q.new_zeros(*q.shape[:3], k.shape[2], dtype=computing_dtype(q)) for name in core.map_names()}
    dtype, queries = computing_dtype(q), _existing_queries(q, k, mask, cross, core)
    return core.maps(_zeroed(q.to(dtype), queries, core), _zeroed(k.to(dtype), mask, core), mask, queries)


def _existing_queries(q: Tensor, k: Tensor, mask: Tensor | None, cross: bool, core: WideCore) -> Tensor | None:
    """The mask of the queries (B, N), where they are mixed: that of the keys, where they are the same tokens; None: no mask."""
    same_tokens = not cross and q.shape[2] == k.shape[2]
    return mask if core.facts.mixes_queries and same_tokens else None


def _zeroed(x: Tensor, mask: Tensor | None, core: WideCore) -> Tensor:
    return zero_absent(x, None if core.facts.reads_masked else mask)


def zero_absent(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, M, …) with zeros, also in place of NaN, for tokens that do not exist."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def count_keys(k: Tensor, mask: Tensor | None) -> Tensor | int:
    """How many keys exist: a number, or (B, 1, 1, 1) in k's dtype if samples differ."""
    return k.shape[2] if mask is None else mask.sum(dim=-1).to(k.dtype)[:, None, None, None]


def at_least_one(count: Tensor | int) -> Tensor | int:
    """The number of keys as a divisor, where there may be none."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def masked_softmax(scores: Tensor, exists: Tensor | None) -> Tensor:
    """The softmax over the last dimension among what exists (broadcastable to scores); zeros where nothing does."""
    if exists is None:
        return scores.softmax(dim=-1)
    # Where nothing exists the softmax sees everything, so that neither it nor its gradient is NaN.
    seen = exists | ~exists.any(dim=-1, keepdim=True)
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) * exists


def apply_map(weights: Tensor, v: Tensor) -> Tensor:
    """A map (B, H, N, M) times v (B, H, M, D), computed in the map's dtype, in v's."""
    return (weights @ v.to(weights.dtype)).to(v.dtype)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, exists: Tensor) -> Tensor:
    """Softmax attention of each block of queries to the keys that it sees, on PyTorch's fused kernels, (B, H, G, S, D).

    q (B, H, G, S, D), already scaled, k and v (B, H, G, L, D), exists broadcastable to (B, H, G, S, L). A query that sees no
    key gives zeros.
    """
    batch, _, num_blocks = q.shape[:3]
    some = exists.any(dim=-1, keepdim=True)
    # Where nothing exists everything is seen, so that neither the softmax nor its gradient is NaN.
    seen = (exists | ~some).expand(batch, -1, num_blocks, -1, -1)
    q, k, v, seen = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, seen))  # (B·G, H, …)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    return out.unflatten(0, (batch, num_blocks)).transpose(1, 2) * some


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


def check_tensors(name: str, core: Core | nn.Module, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None) -> None:
    """Raises before any work: TypeError for wrong kinds, ValueError for shapes and devices. Looks at no values."""
    where, named = f"attention {name!r}", {"q": q, "k": k} | ({} if v is None else {"v": v})
    for label, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}: {label} is a {type(tensor).__name__}; give a torch.Tensor")
        if not tensor.is_floating_point():
            raise TypeError(f"{where}: {label} has dtype {tensor.dtype}; give a floating-point tensor")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise TypeError(
                f"{where}: {label} has dtype {tensor.dtype} on {tensor.device} but q {q.dtype} on {q.device}; convert one"
            )
        if tensor.ndim != 4:
            raise ValueError(
                f"{where}: {label} has shape {tuple(tensor.shape)}; give 4 axes (batch, heads, tokens, head width)"
            )
    heads = (core.num_heads, core.head_dim)
    if (q.shape[1], q.shape[3]) != heads:
        raise ValueError(
            f"{where}: q has {q.shape[1]} heads of width {q.shape[3]}, but the core is for {heads[0]} of width {heads[1]}; "
            "create it for those"
        )
    if (k.shape[0], k.shape[1], k.shape[3]) != (q.shape[0], *heads):
        raise ValueError(
            f"{where}: k has shape {tuple(k.shape)} but q has shape {tuple(q.shape)}; "
            "batch, heads and head width must agree, only the number of tokens may differ"
        )
    if v is not None and v.shape != k.shape:
        raise ValueError(f"{where}: v has shape {tuple(v.shape)} but k has shape {tuple(k.shape)}; give them one shape")
    if mask is not None:
        _check_mask(where, mask, k)


def _check_mask(where: str, mask: Tensor, k: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{where}: mask is a {type(mask).__name__}; give a torch.Tensor")
    if mask.dtype != torch.bool:
        raise TypeError(f"{where}: mask has dtype {mask.dtype}; give booleans, True where the key exists")
    if mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"{where}: mask has shape {tuple(mask.shape)} but k has {k.shape[0]} samples of {k.shape[2]} keys; "
            f"give ({k.shape[0]}, {k.shape[2]}), True where the key exists"
        )
    if mask.device != k.device:
        raise ValueError(f"{where}: mask is on {mask.device} but k on {k.device}; move one")


def check_heads(name: str, num_heads: int, head_dim: int) -> None:
    """Raises unless there is at least one head with at least one channel."""
    for what, given in (("num_heads", num_heads), ("head_dim", head_dim)):
        check_integer(f"attention {name!r}", what, given)


def check_length(name: str, most: int, given: int, *, what: str = "tokens", argument: str = "max_length") -> None:
    """Raises if there are more tokens than a mechanism was made for."""
    if given > most:
        raise ValueError(
            f"attention {name!r}: got {given} {what}, but it was made for at most {most}; "
            f"create it with {argument}={given} or more, or a model of it with a larger img_size"
        )


def refuse_bias(name: str, bias: Tensor | None) -> None:
    """Raises for a core that adds nothing to its scores, or has none."""
    if bias is not None:
        raise ValueError(
            f"attention {name!r}: got an additive bias of shape {tuple(bias.shape)}, but this mechanism forms no N×M scores "
            "to add it to; use 'softmax', or leave bias out"
        )
