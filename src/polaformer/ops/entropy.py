"""Positive sequence entropy: how sharp a row of attention is (Eq. 7 of the paper)."""

import torch
from torch import Tensor


def positive_sequence_entropy(x: Tensor, dim: int = -1, *, invalid: str = "error") -> Tensor:
    """Entropy in nats of the non-negative numbers along `dim` after division by their sum; `dim` is removed (Eq. 7).

    0 when one entry holds everything, log(length) when all are equal; 0·log 0 counts as 0; a common factor changes nothing.
    Negative entries and rows without any mass have no entropy: invalid="error" raises ValueError and names the first such
    row; invalid="nan" returns NaN there, without looking at values from Python (so it compiles and does not synchronise).

    What holds: for positive numbers and p > 1, PSE(x^p) ≤ PSE(x). What does not: the paper's theorem for rows of inner
    products ⟨g(q), g(k)⟩; tests/ops/test_entropy.py has counter-examples.
    """
    if invalid not in ("error", "nan"):
        raise ValueError(f"positive_sequence_entropy: invalid is {invalid!r}; choose 'error' or 'nan'")
    if not x.is_floating_point():
        raise TypeError(f"positive_sequence_entropy: x has dtype {x.dtype}; give a floating-point tensor")
    if x.ndim == 0 or x.shape[dim] == 0:
        raise ValueError(f"positive_sequence_entropy: x has shape {tuple(x.shape)}; give at least one entry along axis {dim}")
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    wide = x.to(dtype)
    largest = wide.amax(dim=dim, keepdim=True)
    bad = (wide.amin(dim=dim) < 0) | (largest.squeeze(dim) == 0)
    if invalid == "error" and bool(bad.any()):
        _raise_invalid(x, bad, dim)
    share = wide / largest  # first by the largest, so that no sum overflows
    share = share / share.sum(dim=dim, keepdim=True)
    return torch.special.entr(share).sum(dim=dim).masked_fill(bad, float("nan")).to(x.dtype)


def _raise_invalid(x: Tensor, bad: Tensor, dim: int) -> None:
    where = tuple(bad.nonzero()[0].tolist())
    row = x.movedim(dim, -1)[where]
    negative = row[row < 0]
    found = f"the entry {negative[0].item():g}" if len(negative) else "only zeros"
    raise ValueError(
        f"positive_sequence_entropy: row {where} along axis {dim} of x, shape {tuple(x.shape)}, holds {found}; "
        "give non-negative numbers with a positive sum, or invalid='nan' to get NaN for such rows"
    )
