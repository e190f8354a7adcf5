"""The interface of all attention mechanisms (cores), and the code that most of them share.

# B batch, H heads, N queries, M keys, D head width, F features
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.arguments import check_integer
from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype, reciprocal, without_autocast

Mask = Tensor | None  # (B, M), True where the key exists
Bias = Tensor | None  # additive, broadcastable to (B, H, N, M)
Size = Grid | None  # (height, width) of the queries
Maps = dict[str, Tensor]  # by name, each (B, H, N, M)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The parts of the layer and of the block that a mechanism is published with.

    gate, conv, kernel_size: arguments of AttentionLayer. key_positions: a table of positions is added to the keys.
    local_mlp: the block's MLP has a depthwise convolution.
    core_options: names and values of the core's arguments that differ from its defaults in the published models.
    """

    gate: str | None = None
    conv: str | None = None
    kernel_size: int = 5
    key_positions: bool = False
    local_mlp: bool = False
    core_options: tuple[tuple[str, Any], ...] = ()

    def with_options(self, options: Mapping[str, Any]) -> "LayerParts":
        """The parts of a layer for which `options` replace some of these."""
        return replace(self, **{name: options[name] for name in ("gate", "conv", "kernel_size") if name in options})

    def layer_options(self, tokens: int | Grid | None) -> dict[str, Any]:
        """The arguments of AttentionLayer for a native number of tokens, or for the (height, width) of their grid."""
        options: dict[str, Any] = {"gate": self.gate, "conv": self.conv, "kernel_size": self.kernel_size}
        return options | {"key_positions": tokens if self.key_positions else None}


@dataclass(frozen=True)
class Facts:
    """The properties of a mechanism. A core class declares them; an instance whose options change one has a modified copy.

    cost: how the time grows with the number of tokens: "linear", "n log n" or "quadratic".
    approximates: the mechanism whose result it approximates; None: it defines its own.
    stochastic: every call draws random numbers from PyTorch's generator.
    cross: it supports cross-attention: queries and keys may be different tokens, also in different numbers.
    mixes_queries: the output of a query also depends on the other queries. Masked tokens are then excluded as queries too,
        except in cross-attention.
    seeded: it draws a random pattern from its argument and attribute `seed`; the layers of a model get different seeds.
    sized_by: the arguments that size its parameters: "max_length" (number of tokens) and "max_keys" (number of keys).
    max_length, max_keys: the largest numbers of tokens and keys that an instance supports; None: any number.
    num_maps: the number of maps per head; None: one per channel.
    distributions: no map entry is negative, and rows sum to 1, or to less for queries with little or no key mass.
    scaled_by_length: its result depends on the nominal number of tokens, its optional argument `max_length`; None: on the
        number of tokens of each call.
    trims: masked tokens at the end of all sequences of a batch can be left out; the other tokens get the same outputs.
    reads_masked: neither the core nor the layer zeroes masked tokens, because the published code reads them.
    in_windows: in Swin it attends within shifted windows (WindowAttention).
    takes_bias: it supports an additive bias, as windows need.
    coarse: names and values of arguments with which it approximates already at 257 tokens, where checks see it.
    set_by_model: names of the core's arguments that are also arguments of the backbones.
    published: the parts that it is published with.
    """

    cost: str
    _: KW_ONLY
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
    scaled_by_length: bool = False
    trims: bool = True
    reads_masked: bool = False
    in_windows: bool = False
    takes_bias: bool = False
    coarse: tuple[tuple[str, Any], ...] = ()
    set_by_model: tuple[str, ...] = ()
    published: LayerParts = LayerParts()

    @property
    def needs_length(self) -> bool:
        """Whether `max_length`, the largest number of tokens, is required."""
        return "max_length" in self.sized_by


class Core(Protocol):
    """An attention mechanism: a module that maps q, k and v to outputs and can return the maps that it applies.

    q (B, H, N, D), k and v (B, H, M, D), mask (B, M) True where the key exists, bias additive and broadcastable to
    (B, H, N, M), grid the (height, width) of the queries. cross: queries and keys are different tokens, even if N = M;
    N != M implies it. A core refuses arguments that it does not support. The layer zeroes masked tokens first, unless
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
        """The output of a call for v (B, H, M, D), given the maps of `weights`; v must be zero for masked keys."""
        ...


class WideCore(nn.Module):
    """A core that computes in float32 (float64 for float64 inputs) and does not support an additive bias.

    A mechanism implements `attend` and, if it has a map, `map`. Both get q, k and v in the computing dtype, with autocast off.
    Masked positions of k and v are zero (even if they were NaN); so are those of q if the mechanism mixes queries and this is
    not cross-attention. A mechanism that mixes queries and supports cross-attention implements `attend_mixed` and
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
        """The mechanism's name in error messages."""
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
        """The output of a call for v (B, H, M, D), given the maps of `weights`; v must be zero for masked keys."""
        return apply_map(maps[self.name], v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, D); the class describes the arguments."""
        raise NotImplementedError

    def map(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, M), zero for masked keys."""
        raise NotImplementedError

    def attend_mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """As `attend`; queries (B, N) is True where the query exists, None if all do."""
        return self.attend(q, k, v, mask)

    def map_mixed(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Tensor:
        """As `map`; queries as in `attend_mixed`."""
        return self.map(q, k, mask)

    def maps(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> Maps:
        """The maps by name; a single one unless a mechanism overrides this."""
        return {self.name: self.map_mixed(q, k, mask, queries)}

    def map_names(self) -> list[str]:
        """The keys of `maps`."""
        return [self.name]

    def check_call(self, q: Tensor, k: Tensor, bias: Tensor | None, cross: bool) -> None:
        """Raises ValueError for arguments that the mechanism does not support."""
        refuse_bias(self.name, bias)
        if cross and not self.facts.cross:
            raise ValueError(
                f"attention {self.name!r}: got cross=True, or its layer a context, but queries and keys of this mechanism must "
                "be the same tokens; leave it out, or use another mechanism"
            )
        if not self.facts.cross and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"attention {self.name!r}: got {q.shape[2]} queries and {k.shape[2]} keys, but both must be the same tokens in "
                "this mechanism; give the same number (no key reduction, no other context), or use another mechanism"
            )


class FeatureCore(WideCore):
    """A core of the form out_t = φ(q_t) Σ_i ψ(k_i)ᵀ v_i / φ(q_t) Σ_i ψ(k_i)ᵀ: linear in the number of tokens.

    A mechanism implements `features`. A query without key mass gives zeros.
    """

    def features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ(q) (B, H, N, F) and ψ(k) (B, H, M, F), the latter zero for masked keys."""
        raise NotImplementedError

    def divisors(self, norms: Tensor, num_keys: Tensor | int) -> Tensor:
        """The factors that normalise the sums, from norms = φ(q_t) Σ_i ψ(k_i)ᵀ (B, H, N, 1) and the number of existing keys."""
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
        return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)  # stays in the autograd graph
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
    """The mask of the queries (B, N): that of the keys if queries are mixed and are the same tokens, else None."""
    same_tokens = not cross and q.shape[2] == k.shape[2]
    return mask if core.facts.mixes_queries and same_tokens else None


def _zeroed(x: Tensor, mask: Tensor | None, core: WideCore) -> Tensor:
    return zero_absent(x, None if core.facts.reads_masked else mask)


def zero_absent(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, M, …) with zeros for masked tokens, even if they were NaN."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def count_keys(k: Tensor, mask: Tensor | None) -> Tensor | int:
    """The number of existing keys: an int, or with a mask (B, 1, 1, 1) in k's dtype."""
    return k.shape[2] if mask is None else mask.sum(dim=-1).to(k.dtype)[:, None, None, None]


def at_least_one(count: Tensor | int) -> Tensor | int:
    """The number of keys as a divisor: 1 if there are none."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def masked_softmax(scores: Tensor, exists: Tensor | None) -> Tensor:
    """The softmax over the last dimension where `exists` (broadcastable to scores) is True; zeros for rows without any."""
    if exists is None:
        return scores.softmax(dim=-1)
    # Rows without any key are left unmasked, so that neither their softmax nor its gradient is NaN.
    seen = exists | ~exists.any(dim=-1, keepdim=True)
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) * exists


def apply_map(weights: Tensor, v: Tensor) -> Tensor:
    """A map (B, H, N, M) times v (B, H, M, D), computed in the map's dtype and returned in v's."""
    return (weights @ v.to(weights.dtype)).to(v.dtype)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, exists: Tensor) -> Tensor:
    """Softmax attention of each block of queries to the keys that it sees, by PyTorch's fused kernels, (B, H, G, S, D).

    q (B, H, G, S, D), already scaled, k and v (B, H, G, L, D), exists broadcastable to (B, H, G, S, L). A query that sees no
    key gives zeros.
    """
    batch, _, num_blocks = q.shape[:3]
    has_keys = exists.any(dim=-1, keepdim=True)
    # Queries without any key are left unmasked, so that neither their softmax nor its gradient is NaN.
    seen = (exists | ~has_keys).expand(batch, -1, num_blocks, -1, -1)
    q, k, v, seen = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, seen))  # (B·G, H, …)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    return out.unflatten(0, (batch, num_blocks)).transpose(1, 2) * has_keys


def unit_vectors(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """x / ‖x‖₂ over the given dimensions, at any magnitude; zero for a zero vector, which also passes no gradient."""
    largest = x.detach().abs().amax(dim=dim, keepdim=True)
    scaled = x / torch.where(largest == 0, 1.0, largest)  # its squares neither overflow nor vanish
    return scaled * reciprocal(norm_of(scaled, dim))


def norm_of(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """‖x‖₂ over the given dimensions, which are kept; at zero the gradient is zero, not NaN."""
    square = x.square().sum(dim=dim, keepdim=True)
    is_zero = square == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, square).sqrt())


def check_tensors(name: str, core: Core | nn.Module, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None) -> None:
    """Raises TypeError or ValueError unless types, dtypes, devices and shapes fit; reads no values."""
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
            f"{where}: q has {q.shape[1]} heads of width {q.shape[3]}, but the core has {heads[0]} of width {heads[1]}; "
            f"create it with num_heads={q.shape[1]}, head_dim={q.shape[3]}"
        )
    if (k.shape[0], k.shape[1], k.shape[3]) != (q.shape[0], *heads):
        raise ValueError(
            f"{where}: k has shape {tuple(k.shape)} but q has shape {tuple(q.shape)}; "
            "batch, heads and head width must agree, only the number of tokens may differ"
        )
    if v is not None and v.shape != k.shape:
        raise ValueError(f"{where}: v has shape {tuple(v.shape)} but k has shape {tuple(k.shape)}; give both the same shape")
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
    """Raises ValueError if there are more tokens than a mechanism was created for."""
    if given > most:
        raise ValueError(
            f"attention {name!r}: got {given} {what}, but it was created for at most {most}; "
            f"create it with {argument}={given} or more, or its model with a larger img_size"
        )


def refuse_bias(name: str, bias: Tensor | None) -> None:
    """Raises ValueError if a core that does not support a bias is given one."""
    if bias is not None:
        raise ValueError(
            f"attention {name!r}: got an additive bias of shape {tuple(bias.shape)}, but this mechanism forms no N×M scores "
            "to add it to; use 'softmax', or leave bias out"
        )
