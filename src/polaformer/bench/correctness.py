"""Whether an implementation computes what it should, before it gets a number: every row of its output and of every gradient.

The reference is the explicit N×M maps in float64. If a mechanism also has a form in O(N), that form in float64 is used instead,
after it has been compared with the maps, output and gradients, at a length at which they are affordable.

# B batch, H heads, N queries and keys, D head width
"""

from functools import cache
from math import isqrt, prod

import torch

from polaformer.analysis.agreement import Attention, Pass, Shape, difference, differences, largest, random_inputs, worst
from polaformer.bench.contenders import Contender

TOLERANCE = 1e-5  # of fp32 against float64; a correct implementation stays near 1e-6
MAX_CHECKED = 4096  # tokens: several blocks of the operator; beyond it the backward pass of softmax takes too long
MAP_NUMBERS = 2**22  # B·H·n·m·D: how many numbers explicit maps may hold at a time, 32 MB for each of their temporaries
MIN_PIECE = 32  # queries per piece for which maps are computed
WHOLE = 2**25  # numbers of an output, 256 MB in float64, up to which every row is compared at the timed length
STRETCH = 4096  # queries at the beginning, in the middle and at the end that are compared beyond it


def cut(shape: Shape, most: int = MAX_CHECKED) -> Shape:
    """The shape with at most that many tokens."""
    return shape[0], shape[1], min(shape[2], most), shape[3]


def relative_error(contender: Contender, shape: Shape, device: str = "cpu") -> float:
    """The worst relative error over all rows of output and gradients at `shape`, cut to MAX_CHECKED tokens."""
    shape = cut(shape)
    inputs, attention = random_inputs(shape, device=device), contender.build(shape)
    if contender.linear is None:
        piece = max(MIN_PIECE, MAP_NUMBERS // prod(shape))
        return worst(differences(attention, contender.reference, inputs, gradients=contender.is_safe, piece=piece))
    found = worst(differences(attention, contender.linear, inputs, gradients=contender.is_safe))
    affordable = cut(shape, max(2, isqrt(MAP_NUMBERS // (shape[0] * shape[1] * shape[3]))))
    return largest(found, _linear_form(contender.linear, contender.reference, affordable, device))


def relative_error_at_length(contender: Contender, one: Pass) -> float:
    """The relative error of the output of exactly what is timed, for lengths beyond MAX_CHECKED tokens.

    Compares every row of outputs of up to WHOLE numbers, and of larger ones the first, middle and last STRETCH rows, which
    attend to all keys; other rows and gradients are not compared. Returns 0 for a mechanism without a form in O(N), softmax,
    and for a length that `relative_error` has compared in full.
    """
    num_tokens = one.inputs.q.shape[2]
    if contender.linear is None or num_tokens <= MAX_CHECKED:
        return 0.0
    starts = (0, (num_tokens - STRETCH) // 2, num_tokens - STRETCH)
    rows = [slice(n, n + STRETCH) for n in starts] if one.inputs.q.numel() > WHOLE else [slice(None)]
    with torch.no_grad():
        queries, found = (torch.cat([x[:, :, part] for part in rows], dim=2) for x in (one.inputs.q, one.output()))
        expected = contender.linear(queries.double(), *(x.double() for x in one.inputs[1:4]))
        return difference(found, expected).relative


@cache
def _linear_form(linear: Attention, reference: Attention, shape: Shape, device: str) -> float:
    """How far the form in O(N) is from explicit maps, both in float64."""
    return worst(differences(linear, reference, random_inputs(shape, dtype=torch.float64, device=device)))
