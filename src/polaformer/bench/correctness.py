"""Whether a contender computes what it should, before it gets a number: every row of its output and of every gradient.

The truth are explicit N×M maps in float64. Where a mechanism also has a form in O(N), that form in float64 stands for them,
after it was compared with them, output and gradients, at a length at which they can be afforded.

# B batch, H heads, N queries and keys, D head width
"""

from functools import cache
from math import isqrt

import torch

from polaformer.bench.agreement import Attention, Shape, difference, differences, random_inputs, worst
from polaformer.bench.contenders import Contender
from polaformer.bench.forecast import LONGEST_CHECKED, cut
from polaformer.bench.passes import Pass

MAP_NUMBERS = 2**22  # B·H·n·m·D: what explicit maps may hold at a time, 32 MB for each of their temporaries
LEAST_PIECE = 32  # queries for which maps are made at a time, at least
WHOLE = 2**25  # numbers of an output, 256 MB in float64, up to which every row is compared at the timed length
STRETCH = 4096  # queries at the beginning, in the middle and at the end that are compared beyond it


def correctness(contender: Contender, shape: Shape, device: str = "cpu") -> float:
    """The worst relative error over all rows of output and gradients at `shape`, cut to LONGEST_CHECKED tokens."""
    checked = cut(shape)
    inputs, attention = random_inputs(checked, device=device), contender.build(checked)
    if contender.linear is None:
        piece = max(LEAST_PIECE, MAP_NUMBERS // (checked[0] * checked[1] * checked[2] * checked[3]))
        return worst(differences(attention, contender.truth, inputs, gradients=contender.is_safe, piece=piece))
    found = worst(differences(attention, contender.linear, inputs, gradients=contender.is_safe))
    return largest(found, _linear_form(contender.linear, contender.truth, _affordable(checked), device))


def correctness_at_length(contender: Contender, one: Pass) -> float:
    """The relative error of the output at the length that is timed, of what is timed, beyond LONGEST_CHECKED tokens.

    Of every row up to WHOLE numbers; beyond it of the first, the middle and the last STRETCH rows, all keys among what they
    attend to: the others are not compared, nor are gradients. 0 for a mechanism without a form in O(N), softmax, and for what
    was compared in full before.
    """
    num_tokens = one.inputs.q.shape[2]
    if contender.linear is None or num_tokens <= LONGEST_CHECKED:
        return 0.0
    rows = _stretches(num_tokens) if one.inputs.q.numel() > WHOLE else [slice(None)]
    with torch.no_grad():
        queries, found = (torch.cat([x[:, :, part] for part in rows], dim=2) for x in (one.inputs.q, one.output()))
        truth = contender.linear(queries.double(), *(x.double() for x in one.inputs[1:4]))
        return difference(found, truth).relative


def largest(*errors: float) -> float:
    """The largest; NaN if any is, unlike Python's max."""
    return float(torch.tensor(errors).max())


@cache
def _linear_form(linear: Attention, truth: Attention, shape: Shape, device: str) -> float:
    """How far the form in O(N) is from explicit maps, both in float64."""
    return worst(differences(linear, truth, random_inputs(shape, dtype=torch.float64, device=device)))


def _affordable(shape: Shape) -> Shape:
    """The shape with as many tokens as explicit maps can be made for at once."""
    batch, heads, tokens, width = shape
    return batch, heads, min(tokens, max(2, isqrt(MAP_NUMBERS // (batch * heads * width)))), width


def _stretches(num_tokens: int) -> list[slice]:
    middle = (num_tokens - STRETCH) // 2
    return [slice(start, start + STRETCH) for start in (0, middle, num_tokens - STRETCH)]
