"""Positive sequence entropy: a measure of how sharp a row of attention is (Eq. 7 of the paper)."""

from math import inf

import torch
from torch import Tensor

from polaformer.ops.precision import computing_dtype


def positive_sequence_entropy(x: Tensor, dim: int = -1, *, invalid: str = "error") -> Tensor:
    """Entropy in nats of the non-negative numbers along `dim` after division by their sum; `dim` is removed (Eq. 7).

    0 if one entry has all the mass, log(length) if all are equal; 0·log 0 counts as 0; a common factor has no effect. An entry
    of zero gets no gradient of its own (it would be infinite).
    Rows with negative, infinite or NaN entries, and rows without any mass, have no entropy: invalid="error" raises ValueError
    and names the first such row; invalid="nan" returns NaN there, without reading values from Python (so it compiles and does
    not synchronise).

    For positive numbers and p > 1, PSE(x^p) ≤ PSE(x). The paper's theorem for rows of inner products ⟨g(q), g(k)⟩ does not
    hold; tests/ops/test_entropy.py has counter-examples.
    """
    if invalid not in ("error", "nan"):
        raise ValueError(f"positive_sequence_entropy: invalid is {invalid!r}; choose 'error' or 'nan'")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = f"has dtype {x.dtype}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise TypeError(f"positive_sequence_entropy: x {given}; give a floating-point tensor")
    if x.ndim == 0 or x.shape[dim] == 0:
        raise ValueError(f"positive_sequence_entropy: x has shape {tuple(x.shape)}; give at least one entry along axis {dim}")
    wide = x.to(computing_dtype(x))
    smallest, largest = wide.amin(dim=dim, keepdim=True), wide.amax(dim=dim, keepdim=True)
    bad = ~((smallest >= 0) & (largest > 0) & (largest < inf))  # also where there are NaNs
    if invalid == "error" and bool(bad.any()):
        _raise_invalid(x, bad.squeeze(dim), dim)
    share = torch.where(bad, 1.0, wide) / torch.where(bad, 1.0, largest)  # by the largest first, so that no sum overflows
    share = share / share.sum(dim=dim, keepdim=True)
    entropy = -(share * torch.where(share > 0, share, 1.0).log()).sum(dim=dim)
    return entropy.masked_fill(bad.squeeze(dim), float("nan")).to(x.dtype)


def _raise_invalid(x: Tensor, bad: Tensor, dim: int) -> None:
    where = tuple(bad.nonzero()[0].tolist())
    row = x.movedim(dim, -1)[where]
    odd = row[~((row >= 0) & (row < inf))]
    found = f"the entry {odd[0].item():g}" if len(odd) else "only zeros"
    raise ValueError(
        f"positive_sequence_entropy: row {where} along axis {dim} of x, shape {tuple(x.shape)}, holds {found}; "
        "give non-negative numbers with a positive sum, or invalid='nan' to get NaN for such rows"
    )
