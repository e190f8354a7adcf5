"""Polarity-aware attention, slow and obvious: the reference that every fast path is tested against.

It has three parts. `polarity_maps` and `polarity_attention` write the paper's Eq. 3-6 and 9 as explicit N×M maps in
float64, pair by pair, in the log domain, so that no magnitude is too large or too small. `subtractive_map` is Eq. 5, which
the paper rejects. `published_polarity_attention` is the formulation of the authors' code in the input's own dtype, kept as
the baseline of benchmarks; it overflows and underflows where theirs does.

# B batch, H heads, N queries, M keys, D head width, E = ceil(D / 2): value channels of the same-sign stream
"""

import torch
from torch import Tensor

MINUS_INFINITY = float("-inf")


def polarity_maps(
    q: Tensor, k: Tensor, power: Tensor, *, scale: Tensor | None = None, mask: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The two attention maps (same-signed, opposite-signed) of Eq. 6, each (B, H, N, M) in float64.

    q (B, H, N, D), k (B, H, M, D), power and scale (H, D) or (D,), mask (B, M) True where the key exists.
    With eps = 0 a row sums to 1 if the query meets any key mass in that stream, else it is zero. With eps > 0 a row sums to
    s / (s + n·eps), s its unnormalised sum and n the number of keys, as in the authors' code.
    Takes memory for B·H·N·M·D numbers: for tests and small figures.
    """
    if scale is not None:
        scale = scale.double().expand(q.shape[1], -1)[:, None]  # (H, 1, D)
        q, k = q.double() / scale, k.double() / scale
    log_same, log_opposite = _log_weights(q, k, power, mask)
    num_keys = _num_keys(k, mask)
    return _normalise(log_same, num_keys * eps), _normalise(log_opposite, num_keys * eps)


def polarity_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, scale: Tensor | None = None, mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Eq. 6 before the gate, by its explicit maps: (B, H, N, D) in v's dtype, computed in float64."""
    same, opposite = polarity_maps(q, k, power, scale=scale, mask=mask, eps=eps)
    values = v.double()
    if mask is not None:
        values = values.masked_fill(~mask[:, None, :, None], 0.0)
    half = (v.shape[-1] + 1) // 2
    return torch.cat([same @ values[..., :half], opposite @ values[..., half:]], dim=-1).to(v.dtype)  # (B, H, N, D)


def subtractive_map(q: Tensor, k: Tensor, power: Tensor, *, mask: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Eq. 5 inserted into Eq. 2: (same − opposite) divided by its own row sum plus n·eps, (B, H, N, M) in float64.

    For study. Entries can be negative and the row sum arbitrarily close to zero, which is why the paper rejects it. A row
    whose sum is exactly zero is zero here.
    """
    log_same, log_opposite = _log_weights(q, k, power, mask)
    if k.shape[-2] == 0:
        return log_same.exp()
    both = torch.cat([log_same, log_opposite], dim=-1)
    shift = _finite_or_zero(both.detach().amax(dim=-1, keepdim=True))
    weights = (log_same - shift).exp() - (log_opposite - shift).exp()  # (B, H, N, M)
    return _divide(weights, weights.sum(dim=-1, keepdim=True) + ((_num_keys(k, mask) * eps).log() - shift).exp())


def published_polarity_attention(q: Tensor, k: Tensor, v: Tensor, power: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Steps 5 to 8 of the authors' layer as they compute them: four powers, concatenations, matmuls, eps.

    Shapes as in `polaformer.polarity_attention`; no mask; everything in the input's dtype.
    """
    power = power.expand(q.shape[1], -1)[:, None]  # (H, 1, D)
    q_plus, q_minus = q.relu() ** power, (-q).relu() ** power
    k_plus, k_minus = k.relu() ** power, (-k).relu() ** power
    q_same = torch.cat([q_plus, q_minus], dim=-1)  # (B, H, N, 2D)
    q_opposite = torch.cat([q_minus, q_plus], dim=-1)
    keys = torch.cat([k_plus, k_minus], dim=-1)  # (B, H, M, 2D)
    v_same, v_opposite = torch.chunk(v, 2, dim=-1)
    root = k.shape[-2] ** -0.5
    mean_key = keys.mean(dim=-2, keepdim=True).mT  # (B, H, 2D, 1)
    same = q_same @ ((keys.mT * root) @ (v_same * root)) / (q_same @ mean_key + eps)
    opposite = q_opposite @ ((keys.mT * root) @ (v_opposite * root)) / (q_opposite @ mean_key + eps)
    return torch.cat([same, opposite], dim=-1)


def _log_weights(q: Tensor, k: Tensor, power: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logarithms of Σ_d |q|^p |k|^p over the channels that agree in sign and over those that differ, (B, H, N, M) each."""
    q, k, power = q.double(), k.double(), power.double()
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], 0.0)
    q, k = q[:, :, :, None, :], k[:, :, None, :, :]
    power = power.expand(q.shape[1], -1)[:, None, None, :]  # (H, 1, 1, D)
    signs = q.sign() * k.sign()  # (B, H, N, M, D)
    terms = power * (_safe_log(q) + _safe_log(k))
    unknown = terms.isnan()  # counts for both signs, so that it shows
    return _log_sum(terms, (signs > 0) | unknown), _log_sum(terms, (signs < 0) | unknown)


def _safe_log(x: Tensor) -> Tensor:
    """log|x|, and 0 at x = 0, where the sign removes the term anyway."""
    return torch.where(x == 0, 1.0, x.abs()).log()


def _log_sum(terms: Tensor, chosen: Tensor) -> Tensor:
    """log Σ exp(terms) over the chosen entries of the last axis; −inf, without a gradient, where none is chosen."""
    any_chosen = chosen.any(dim=-1, keepdim=True)
    terms = torch.where(chosen | ~any_chosen, terms, MINUS_INFINITY)
    return torch.where(any_chosen.squeeze(-1), terms.logsumexp(dim=-1), MINUS_INFINITY)


def _normalise(log_weights: Tensor, added: Tensor) -> Tensor:
    """exp(log_weights) / (row sum + added), row by row; zero where that sum is."""
    if log_weights.shape[-1] == 0:
        return log_weights.exp()
    shift = _finite_or_zero(log_weights.detach().amax(dim=-1, keepdim=True))
    weights = (log_weights - shift).exp()
    return _divide(weights, weights.sum(dim=-1, keepdim=True) + (added.log() - shift).exp())


def _divide(weights: Tensor, total: Tensor) -> Tensor:
    """weights / total, and 0 where the total is."""
    empty = total == 0
    return torch.where(empty, 0.0, weights / torch.where(empty, 1.0, total))


def _num_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """The number of keys of each sample, (B or 1, 1, 1, 1) in float64."""
    if mask is None:
        return torch.full((1, 1, 1, 1), k.shape[-2], dtype=torch.float64, device=k.device)
    return mask.sum(dim=-1).double()[:, None, None, None]


def _finite_or_zero(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)
