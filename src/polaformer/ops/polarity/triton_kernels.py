"""The Triton kernels of polarity-aware attention; `polaformer.ops.polarity.triton` launches them.

Features never reach global memory: every kernel forms them in registers from q or k and feeds them to a matmul.

    find_peaks           largest |k| of each channel and sign          one program per head and split of keys
    summarise            state Σ features ⊗ v and total Σ features     … and tile of value columns
    attend               out and denominators                          one program per head and block of queries
    attend_backward      dq, gradients of the total, power and scale   one program per head and split of queries
    state_backward       gradient of the state                         … and tile of value columns
    summarise_backward   dk, dv, gradient of power                     one program per head and split of keys

state_backward reads q and grad again: as part of attend_backward its accumulators spilled kilobytes of registers.

The two shifts of `polaformer.ops.polarity.plain` are integers here. With log2|x| = exponent + fraction, both taken exactly from
the float's bits, and c = ceil(p · log2 peak):

    keys      2^(fma(p, exponent, −c) + p·fraction)                       → a column's largest entry is in (1/2, 1]
    queries   2^(fma(p, exponent, c − shift) + p·fraction + …)            → a row's largest entry is in (1/2, 1]

c and shift cancel exactly between keys and queries, and the fused multiply-add rounds once, after the large parts have
cancelled, so that no digit is lost at extreme magnitudes. A scale s multiplies a pair's weight by s^(−2p), which joins the
queries' exponents in the same way: an integer and a fraction.

`memory` is one buffer per head: state [sign, channel, value column], then total [sign, channel]. `dmemory` has the same form.
Where a kernel runs over splits, each writes its own part and the caller sums them in a fixed order; there are no atomics.

Reductions name the combining functions of `tl.standard` instead of calling `tl.sum` and `tl.max`, and zeros are `tl.full`,
because `tl.sum`, `tl.max` and `tl.zeros` are fixed as compiled or interpreted when triton is first imported. The others follow
this module, so that it can be loaded for the interpreter in a process that has already used triton for a device.

# D head width, HALF = ceil(D / 2) value columns of the same-sign stream, DP and TILE powers of two ≥ 16, BLOCK tokens at a time
"""
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

import functools
from types import SimpleNamespace

import triton
import triton.language as tl

# Whether the kernels below are for the interpreter; triton decides when they are decorated.
INTERPRETED = bool(triton.knobs.runtime.interpret)

# Represents the exponent of a channel without keys of the needed sign; far below that of any pair of floats.
ABSENT = tl.constexpr(-1.0e30)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sum_over(x, axis: tl.constexpr):
    """The sum over an axis."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@triton.jit
def max_over(x, axis: tl.constexpr):
    """The largest entry along an axis; NaN is ignored."""
    return tl.reduce(x, axis, tl.standard._elementwise_max)


@triton.jit
def of_head(head, num_heads, batch_stride, head_stride):
    """The offset of a head's first token."""
    return (head // num_heads).to(tl.int64) * batch_stride + (head % num_heads).to(tl.int64) * head_stride


@triton.jit
def load_tokens(pointer, token_stride, rows, valid, columns, width):
    """(BLOCK, columns) in fp32; zero where a row is not valid or a column not below width."""
    places = pointer + rows.to(tl.int64)[:, None] * token_stride + columns[None, :]
    return tl.load(places, mask=valid[:, None] & (columns < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tokens(pointer, token_stride, rows, valid, columns, width, values):
    """The reverse of `load_tokens`, in the dtype of the pointer."""
    places = pointer + rows.to(tl.int64)[:, None] * token_stride + columns[None, :]
    tl.store(places, values.to(pointer.dtype.element_ty), mask=valid[:, None] & (columns < width)[None, :])


@triton.jit
def existing(rows, num_rows, mask, mask_token):
    """Which of these keys exist; `mask` is the sample's, or None."""
    inside = rows < num_rows
    if mask is not None:
        inside = inside & (tl.load(mask + rows.to(tl.int64) * mask_token, mask=inside, other=0) != 0)
    return inside


@triton.jit
def load_channels(pointer, channels, D: tl.constexpr, other):
    """(DP,) in fp32 from D contiguous numbers."""
    return tl.load(pointer + channels, mask=channels < D, other=other)


@triton.jit
def store_channels(pointer, channels, D: tl.constexpr, values):
    """The reverse of `load_channels`."""
    tl.store(pointer + channels, values, mask=channels < D)


@triton.jit
def load_state(pointer, channels, columns, last, D: tl.constexpr):
    """(DP, TILE) of one sign's state; zero from column `last` on."""
    places = pointer + channels[:, None] * D + columns[None, :]
    return tl.load(places, mask=(channels < D)[:, None] & (columns < last)[None, :], other=0.0)


@triton.jit
def store_state(pointer, channels, columns, last, D: tl.constexpr, values):
    """The reverse of `load_state`."""
    places = pointer + channels[:, None] * D + columns[None, :]
    tl.store(places, values, mask=(channels < D)[:, None] & (columns < last)[None, :])


@triton.jit
def load_peaks(peaks, head, num_splits, channels, D: tl.constexpr):
    """The largest positive and the largest negative magnitude of each channel, over all splits of the keys."""
    peaks += head.to(tl.int64) * num_splits * 2 * D
    positive, negative = load_channels(peaks, channels, D, 0.0), load_channels(peaks + D, channels, D, 0.0)
    for split in range(1, num_splits):
        positive = tl.maximum(positive, load_channels(peaks + split * 2 * D, channels, D, 0.0))
        negative = tl.maximum(negative, load_channels(peaks + split * 2 * D + D, channels, D, 0.0))
    return positive, negative


@triton.jit
def split_logarithm(x):
    """log2|x| as an integer and a fraction in [0, 1), from the bits; the fraction is NaN where x is not finite.

    Meaningless, but finite, at 0. Subnormals are read as integers, so that nothing depends on the device supporting them.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    subnormal = bits < 0x00800000
    normal = tl.where(subnormal, bits.to(tl.float32).to(tl.int32, bitcast=True), bits)
    exponent = (normal >> 23) - tl.where(subnormal, 127 + 149, 127)
    mantissa = ((normal & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32), tl.log2(mantissa) + x * 0.0


@triton.jit
def key_shift(peak, p):
    """c = ceil(p · log2 peak), ABSENT where there is no peak."""
    exponent, fraction = split_logarithm(peak)
    return tl.where(peak > 0, tl.ceil(tl.fma(p, exponent, p * fraction)), ABSENT)


@triton.jit
def scale_exponent(scale, p):
    """−2p·log2 s as an integer and the rest."""
    exponent, fraction = split_logarithm(scale)
    whole = tl.ceil(tl.fma(-2 * p, exponent, -2 * p * fraction))
    return whole, tl.fma(-2 * p, exponent, -whole) - 2 * p * fraction


@triton.jit
def by_sign(x, positive, negative):
    """Values (DP,) for each entry of x by its sign."""
    return tl.where(x > 0, positive[None, :], negative[None, :])


@triton.jit
def positive_part(x, weight):
    """The weights of positive entries, zero elsewhere; NaN in x is kept."""
    return tl.where(x <= 0, 0.0, weight)


@triton.jit
def negative_part(x, weight):
    """The weights of negative entries, zero elsewhere; NaN in x is kept."""
    return tl.where(x >= 0, 0.0, weight)


@triton.jit
def key_weights(k, p, c_positive, c_negative):
    """(BLOCK, DP): |k|^p · 2^−c, zero where k is zero."""
    exponent, fraction = split_logarithm(k)
    power_of_two = tl.fma(p[None, :], exponent, -by_sign(k, c_positive, c_negative)) + p[None, :] * fraction
    return tl.exp2(tl.where(k == 0, ABSENT, power_of_two))


@triton.jit
def query_weights(q, exponent, fraction, p, positive, negative):
    """(BLOCK, DP): |q|^p · 2^(c − shift), zero where no key is met, and the shift (BLOCK,).

    positive, negative (DP,): the integer exponents c that a positive and a negative query entry meet; fraction: p times that of
    the query, plus the scale's.
    """
    c = by_sign(q, positive, negative)
    absent = (q == 0) | (c < 0.5 * ABSENT)
    shift = tl.ceil(max_over(tl.where(absent, ABSENT, tl.fma(p[None, :], exponent, c) + fraction), 1))
    shift = tl.where(shift < 0.5 * ABSENT, 0.0, shift)
    weight = tl.exp2(tl.fma(p[None, :], exponent, c - shift[:, None]) + fraction)
    return tl.where(absent, 0.0, weight) + q * 0.0, shift


@triton.jit
def reciprocal(norm):
    """1 / norm, and 0 where norm is 0."""
    return tl.where(norm == 0, 0.0, tl.div_rn(1.0, tl.where(norm == 0, 1.0, norm)))


@triton.jit
def divide(values, x):
    """values / x, and 0 where x is 0 or subnormal (see `plain.py`)."""
    tiny = tl.abs(x) < TINY
    return tl.where(tiny, 0.0, tl.div_rn(values, tl.where(tiny, 1.0, x)))


@triton.jit
def find_peaks(
    k, k_batch, k_head, k_token, mask, mask_batch, mask_token, peaks, num_heads, num_keys, per_split,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """peaks (heads, splits, 2, D): the largest positive and the largest negative magnitude of each channel."""
    head, split = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, DP)
    k += of_head(head, num_heads, k_batch, k_head)
    if mask is not None:
        mask += of_head(head, num_heads, mask_batch, 0)
    positive = tl.full((DP,), 0.0, tl.float32)
    negative = tl.full((DP,), 0.0, tl.float32)
    begin = split * per_split
    for start in range(begin, tl.minimum(begin + per_split, num_keys), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = load_tokens(k, k_token, rows, existing(rows, num_keys, mask, mask_token), channels, D)
        positive = tl.maximum(positive, max_over(x, 0))
        negative = tl.maximum(negative, max_over(-x, 0))
    peaks += (head.to(tl.int64) * tl.num_programs(1) + split) * 2 * D
    store_channels(peaks, channels, D, positive)
    store_channels(peaks + D, channels, D, negative)


@triton.jit
def summarise(
    k, k_batch, k_head, k_token, v, v_batch, v_head, v_token, mask, mask_batch, mask_token, power, peaks, memory,
    num_heads, num_keys, per_split,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """memory (heads, splits, 2D(D + 1)): the state and total of each split of the keys."""
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels = tl.arange(0, DP)
    columns = tile * TILE + tl.arange(0, TILE)
    k += of_head(head, num_heads, k_batch, k_head)
    v += of_head(head, num_heads, v_batch, v_head)
    if mask is not None:
        mask += of_head(head, num_heads, mask_batch, 0)
    p = load_channels(power + (head % num_heads) * D, channels, D, 1.0)
    peak_positive, peak_negative = load_peaks(peaks, head, tl.num_programs(1), channels, D)
    c_positive, c_negative = key_shift(peak_positive, p), key_shift(peak_negative, p)
    state_positive = tl.full((DP, TILE), 0.0, tl.float32)
    state_negative = tl.full((DP, TILE), 0.0, tl.float32)
    total_positive = tl.full((DP,), 0.0, tl.float32)
    total_negative = tl.full((DP,), 0.0, tl.float32)
    begin = split * per_split
    for start in range(begin, tl.minimum(begin + per_split, num_keys), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        valid = existing(rows, num_keys, mask, mask_token)
        x = load_tokens(k, k_token, rows, valid, channels, D)
        values = load_tokens(v, v_token, rows, valid, columns, D)
        weight = key_weights(x, p, c_positive, c_negative)
        positive, negative = positive_part(x, weight), negative_part(x, weight)
        state_positive = tl.dot(tl.trans(positive), values, state_positive, input_precision=PRECISION)
        state_negative = tl.dot(tl.trans(negative), values, state_negative, input_precision=PRECISION)
        total_positive += sum_over(positive, 0)
        total_negative += sum_over(negative, 0)
    memory += (head.to(tl.int64) * tl.num_programs(1) + split) * 2 * D * (D + 1)
    store_state(memory, channels, columns, D, D, state_positive)
    store_state(memory + D * D, channels, columns, D, D, state_negative)
    if tile == 0:
        store_channels(memory + 2 * D * D, channels, D, total_positive)
        store_channels(memory + 2 * D * D + D, channels, D, total_negative)


@triton.jit
def query_exponents(peaks, head, num_splits, num_heads, power, scale, channels, D: tl.constexpr):
    """What all queries of a head need, each (DP,): p, the integer exponents of positive and negative keys, the scale's rest."""
    p = load_channels(power + (head % num_heads) * D, channels, D, 1.0)
    peak_positive, peak_negative = load_peaks(peaks, head, num_splits, channels, D)
    c_positive, c_negative = key_shift(peak_positive, p), key_shift(peak_negative, p)
    rest = tl.full(p.shape, 0.0, tl.float32)
    if scale is not None:
        whole, rest = scale_exponent(load_channels(scale + (head % num_heads) * D, channels, D, 1.0), p)
        c_positive += whole
        c_negative += whole
    return p, c_positive, c_negative, rest


@triton.jit
def load_queries(q, q_token, rows, valid, p, rest, channels, D: tl.constexpr):
    """A block of queries and its log2|q|, each (BLOCK, DP): q, the integer, the fraction f, and p · f plus the scale's rest."""
    x = load_tokens(q, q_token, rows, valid, channels, D)
    exponent, fraction = split_logarithm(x)
    return x, exponent, fraction, p[None, :] * fraction + rest[None, :]


@triton.jit
def attend_stream(
    q, exponent, fraction, p, c_positive, c_negative, memory, count, eps_mantissa, eps_exponent, out, out_token, norms,
    rows, num_queries,
    FLIP: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One stream of a block of queries: value columns FIRST to LAST. FLIP: 1 if queries meet keys of the other sign, else 0."""
    channels = tl.arange(0, DP)
    valid = rows < num_queries
    weight, shift = query_weights(q, exponent, fraction, p, c_positive, c_negative)
    total_positive = load_channels(memory + 2 * D * D + FLIP * D, channels, D, 0.0)
    total_negative = load_channels(memory + 2 * D * D + (1 - FLIP) * D, channels, D, 0.0)
    norm = sum_over(weight * by_sign(q, total_positive, total_negative), 1)
    if eps_mantissa is not None:
        # Infinite where the true sum is negligible beside it. Never 0 · infinity: without keys the shift is 0.
        norm += count * eps_mantissa * tl.exp2(eps_exponent - shift)
    tl.store(norms + rows.to(tl.int64) * 2 + FLIP, norm, mask=valid)
    positive, negative = positive_part(q, weight), negative_part(q, weight)
    for start in range(FIRST, LAST, TILE):
        columns = start + tl.arange(0, TILE)
        numerator = tl.dot(positive, load_state(memory + FLIP * D * D, channels, columns, LAST, D), input_precision=PRECISION)
        numerator = tl.dot(
            negative, load_state(memory + (1 - FLIP) * D * D, channels, columns, LAST, D), numerator, input_precision=PRECISION
        )
        store_tokens(out, out_token, rows, valid, columns, LAST, numerator * reciprocal(norm)[:, None])


@triton.jit
def attend(
    q, q_batch, q_head, q_token, power, scale, peaks, memory, counts, count, eps_mantissa, eps_exponent,
    out, out_batch, out_head, out_token, norms, num_heads, num_queries, num_splits,
    D: tl.constexpr, HALF: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, H, N, D) by its strides, norms (heads, N, 2); memory is summed over the splits, peaks has num_splits of them.

    count: the number of keys, or counts (B,) that of each sample; eps is mantissa · 2^exponent, or None and None.
    """
    # One axis for heads and blocks: devices limit the other axes to 65,535 programs.
    blocks = (num_queries + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, DP)
    p, c_positive, c_negative, rest = query_exponents(peaks, head, num_splits, num_heads, power, scale, channels, D)
    q += of_head(head, num_heads, q_batch, q_head)
    x, exponent, _, fraction = load_queries(q, q_token, rows, rows < num_queries, p, rest, channels, D)
    if counts is not None:
        count = tl.load(counts + head // num_heads)
    out += of_head(head, num_heads, out_batch, out_head)
    memory += head.to(tl.int64) * 2 * D * (D + 1)
    norms += head.to(tl.int64) * num_queries * 2
    # fmt: off
    attend_stream(x, exponent, fraction, p, c_positive, c_negative, memory, count, eps_mantissa, eps_exponent,
                  out, out_token, norms, rows, num_queries, 0, 0, HALF, D, DP, TILE, PRECISION)
    attend_stream(x, exponent, fraction, p, c_negative, c_positive, memory, count, eps_mantissa, eps_exponent,
                  out, out_token, norms, rows, num_queries, 1, HALF, D, D, DP, TILE, PRECISION)
    # fmt: on


@triton.jit
def stream_backward(
    q, exponent, fraction, p, c_positive, c_negative, memory, grad, grad_token, norms, rows, num_queries,
    FLIP: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients that one stream passes back from a block of queries.

    Returns the gradient of each p·ln|q| (BLOCK, DP), that of each denominator (BLOCK,), and the weights (BLOCK, DP) divided by
    their denominators.
    """
    channels = tl.arange(0, DP)
    valid = rows < num_queries
    weight, _ = query_weights(q, exponent, fraction, p, c_positive, c_negative)
    norm = tl.load(norms + rows.to(tl.int64) * 2 + FLIP, mask=valid, other=0.0)
    weight *= reciprocal(norm)[:, None]
    from_positive = tl.full((BLOCK, DP), 0.0, tl.float32)
    from_negative = tl.full((BLOCK, DP), 0.0, tl.float32)
    for start in range(FIRST, LAST, TILE):
        columns = start + tl.arange(0, TILE)
        cotangent = load_tokens(grad, grad_token, rows, valid, columns, LAST)
        state_positive = load_state(memory + FLIP * D * D, channels, columns, LAST, D)
        state_negative = load_state(memory + (1 - FLIP) * D * D, channels, columns, LAST, D)
        from_positive = tl.dot(cotangent, tl.trans(state_positive), from_positive, input_precision=PRECISION)
        from_negative = tl.dot(cotangent, tl.trans(state_negative), from_negative, input_precision=PRECISION)
    numerator = weight * tl.where(q > 0, from_positive, from_negative)
    # The gradient of the denominator is −⟨grad, out⟩. Summed from the numerator's own terms, not from a rounded output, it
    # cancels them as it should where attention is sharp.
    slope = -sum_over(numerator, 1)
    total_positive = load_channels(memory + 2 * D * D + FLIP * D, channels, D, 0.0)
    total_negative = load_channels(memory + 2 * D * D + (1 - FLIP) * D, channels, D, 0.0)
    exponents = numerator + slope[:, None] * (weight * by_sign(q, total_positive, total_negative))
    return exponents, slope, weight


@triton.jit
def attend_backward(
    grad, grad_batch, grad_head, grad_token, q, q_batch, q_head, q_token, power, scale, peaks, memory, norms,
    dq, dq_batch, dq_head, dq_token, dmemory, dpower, dscale, num_heads, num_queries, num_splits, per_split, num_parts,
    D: tl.constexpr, HALF: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq by its strides; each split's part of dmemory's total, of dpower (heads, num_parts, D) and of dscale.

    dscale (heads, splits, D) holds Σ d(p·ln|q|), from which the caller computes the gradient.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, DP)
    p, c_positive, c_negative, rest = query_exponents(peaks, head, num_splits, num_heads, power, scale, channels, D)
    peak_positive, peak_negative = load_peaks(peaks, head, num_splits, channels, D)
    whole_positive, rest_positive = split_logarithm(peak_positive)
    whole_negative, rest_negative = split_logarithm(peak_negative)
    if scale is not None:
        s_exponent, s_fraction = split_logarithm(load_channels(scale + (head % num_heads) * D, channels, D, 1.0))
        whole_positive, rest_positive = whole_positive - 2 * s_exponent, rest_positive - 2 * s_fraction
        whole_negative, rest_negative = whole_negative - 2 * s_exponent, rest_negative - 2 * s_fraction
    grad += of_head(head, num_heads, grad_batch, grad_head)
    q += of_head(head, num_heads, q_batch, q_head)
    dq += of_head(head, num_heads, dq_batch, dq_head)
    memory += head.to(tl.int64) * 2 * D * (D + 1)
    norms += head.to(tl.int64) * num_queries * 2
    power_sum = tl.full((DP,), 0.0, tl.float32)
    exponent_sum = tl.full((DP,), 0.0, tl.float32)
    total_positive = tl.full((DP,), 0.0, tl.float32)
    total_negative = tl.full((DP,), 0.0, tl.float32)
    begin = split * per_split
    for start in range(begin, tl.minimum(begin + per_split, num_queries), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        valid = rows < num_queries
        x, exponent, fraction, shared = load_queries(q, q_token, rows, valid, p, rest, channels, D)
        # fmt: off
        same, same_slope, same_weight = stream_backward(
            x, exponent, shared, p, c_positive, c_negative, memory, grad, grad_token, norms, rows, num_queries,
            0, 0, HALF, D, DP, BLOCK, TILE, PRECISION)
        opposite, opposite_slope, opposite_weight = stream_backward(
            x, exponent, shared, p, c_negative, c_positive, memory, grad, grad_token, norms, rows, num_queries,
            1, HALF, D, D, DP, BLOCK, TILE, PRECISION)
        # fmt: on
        store_tokens(dq, dq_token, rows, valid, channels, D, divide((same + opposite) * p[None, :], x))
        same_log = (exponent + by_sign(x, whole_positive, whole_negative)) + (
            fraction + by_sign(x, rest_positive, rest_negative)
        )
        opposite_log = (exponent + by_sign(x, whole_negative, whole_positive)) + (
            fraction + by_sign(x, rest_negative, rest_positive)
        )
        power_sum += sum_over(same * same_log + opposite * opposite_log, 0)
        exponent_sum += sum_over(same + opposite, 0)
        same_total, opposite_total = same_weight * same_slope[:, None], opposite_weight * opposite_slope[:, None]
        total_positive += sum_over(positive_part(x, same_total) + negative_part(x, opposite_total), 0)
        total_negative += sum_over(negative_part(x, same_total) + positive_part(x, opposite_total), 0)
    place = head.to(tl.int64) * tl.num_programs(1) + split
    dmemory += place * 2 * D * (D + 1)
    store_channels(dmemory + 2 * D * D, channels, D, total_positive)
    store_channels(dmemory + 2 * D * D + D, channels, D, total_negative)
    store_channels(dpower + (head.to(tl.int64) * num_parts + split) * D, channels, D, power_sum * LN2)
    if dscale is not None:
        store_channels(dscale + place * D, channels, D, exponent_sum)


@triton.jit
def state_backward(
    grad, grad_batch, grad_head, grad_token, q, q_batch, q_head, q_token, power, scale, peaks, norms, dmemory,
    num_heads, num_queries, num_splits, per_split, num_tiles,
    D: tl.constexpr, HALF: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state's part of dmemory (heads, splits, 2D(D + 1)); the value columns of each stream are num_tiles tiles."""
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    flip = tile // num_tiles
    channels = tl.arange(0, DP)
    columns = flip * HALF + (tile % num_tiles) * TILE + tl.arange(0, TILE)
    last = tl.where(flip == 0, HALF, D)
    p, c_positive, c_negative, rest = query_exponents(peaks, head, num_splits, num_heads, power, scale, channels, D)
    met_positive, met_negative = tl.where(flip == 0, c_positive, c_negative), tl.where(flip == 0, c_negative, c_positive)
    grad += of_head(head, num_heads, grad_batch, grad_head)
    q += of_head(head, num_heads, q_batch, q_head)
    norms += head.to(tl.int64) * num_queries * 2
    state_positive = tl.full((DP, TILE), 0.0, tl.float32)
    state_negative = tl.full((DP, TILE), 0.0, tl.float32)
    begin = split * per_split
    for start in range(begin, tl.minimum(begin + per_split, num_queries), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        valid = rows < num_queries
        x, exponent, _, fraction = load_queries(q, q_token, rows, valid, p, rest, channels, D)
        weight, _ = query_weights(x, exponent, fraction, p, met_positive, met_negative)
        weight *= reciprocal(tl.load(norms + rows.to(tl.int64) * 2 + flip, mask=valid, other=0.0))[:, None]
        cotangent = load_tokens(grad, grad_token, rows, valid, columns, last)
        state_positive = tl.dot(tl.trans(positive_part(x, weight)), cotangent, state_positive, input_precision=PRECISION)
        state_negative = tl.dot(tl.trans(negative_part(x, weight)), cotangent, state_negative, input_precision=PRECISION)
    dmemory += (head.to(tl.int64) * tl.num_programs(1) + split) * 2 * D * (D + 1)
    store_state(dmemory + flip * D * D, channels, columns, last, D, state_positive)
    store_state(dmemory + (1 - flip) * D * D, channels, columns, last, D, state_negative)


@triton.jit
def summarise_backward(
    k, k_batch, k_head, k_token, v, v_batch, v_head, v_token, mask, mask_batch, mask_token, power, peaks, dmemory,
    dk, dk_batch, dk_head, dk_token, dv, dv_batch, dv_head, dv_token, dpower, num_heads, num_keys, num_splits,
    per_split, num_parts, first_part,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv by their strides, zero at masked positions; dpower (heads, num_parts, D) from first_part on, one per split."""
    head, split = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, DP)
    k += of_head(head, num_heads, k_batch, k_head)
    v += of_head(head, num_heads, v_batch, v_head)
    dk += of_head(head, num_heads, dk_batch, dk_head)
    dv += of_head(head, num_heads, dv_batch, dv_head)
    if mask is not None:
        mask += of_head(head, num_heads, mask_batch, 0)
    dmemory += head.to(tl.int64) * 2 * D * (D + 1)
    p = load_channels(power + (head % num_heads) * D, channels, D, 1.0)
    peak_positive, peak_negative = load_peaks(peaks, head, num_splits, channels, D)
    c_positive, c_negative = key_shift(peak_positive, p), key_shift(peak_negative, p)
    whole_positive, rest_positive = split_logarithm(peak_positive)
    whole_negative, rest_negative = split_logarithm(peak_negative)
    total_positive = load_channels(dmemory + 2 * D * D, channels, D, 0.0)
    total_negative = load_channels(dmemory + 2 * D * D + D, channels, D, 0.0)
    power_sum = tl.full((DP,), 0.0, tl.float32)
    begin = split * per_split
    for start in range(begin, tl.minimum(begin + per_split, num_keys), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < num_keys
        valid = existing(rows, num_keys, mask, mask_token)
        x = load_tokens(k, k_token, rows, valid, channels, D)
        weight = key_weights(x, p, c_positive, c_negative)
        positive, negative = positive_part(x, weight), negative_part(x, weight)
        for column in range(0, D, TILE):
            columns = column + tl.arange(0, TILE)
            gradient = tl.dot(positive, load_state(dmemory, channels, columns, D, D), input_precision=PRECISION)
            state_negative = load_state(dmemory + D * D, channels, columns, D, D)
            gradient = tl.dot(negative, state_negative, gradient, input_precision=PRECISION)
            store_tokens(dv, dv_token, rows, inside, columns, D, tl.where(valid[:, None], gradient, 0.0))
        # A second loop over the columns: merged with the first it would need more registers than there are.
        from_positive = tl.full((BLOCK, DP), 0.0, tl.float32) + total_positive[None, :]
        from_negative = tl.full((BLOCK, DP), 0.0, tl.float32) + total_negative[None, :]
        for column in range(0, D, TILE):
            columns = column + tl.arange(0, TILE)
            values = load_tokens(v, v_token, rows, valid, columns, D)
            state_positive = load_state(dmemory, channels, columns, D, D)
            state_negative = load_state(dmemory + D * D, channels, columns, D, D)
            from_positive = tl.dot(values, tl.trans(state_positive), from_positive, input_precision=PRECISION)
            from_negative = tl.dot(values, tl.trans(state_negative), from_negative, input_precision=PRECISION)
        exponents = weight * tl.where(x > 0, from_positive, from_negative)
        gradient = divide(exponents * p[None, :], x)
        store_tokens(dk, dk_token, rows, inside, channels, D, tl.where(valid[:, None], gradient, 0.0))
        exponent, fraction = split_logarithm(x)
        ratio = (exponent - by_sign(x, whole_positive, whole_negative)) + (fraction - by_sign(x, rest_positive, rest_negative))
        power_sum += sum_over(exponents * ratio, 0)
    store_channels(dpower + (head.to(tl.int64) * num_parts + first_part + split) * D, channels, D, power_sum * LN2)


@functools.cache
def tuned() -> SimpleNamespace:
    """The kernels with the numbers of warps and stages chosen by timing, once per width, dtype and device.

    The choice is stored on disk beside the compiled code, so that other processes compute bit-identical results. No kernel
    writes where it reads, so that it can be timed on real data. The numbers of tokens and columns per block are not tuned.
    """
    configs = [triton.Config({}, num_warps=warps, num_stages=stages) for warps in (4, 8) for stages in (1, 2, 3)]
    kernels = (find_peaks, summarise, attend, attend_backward, state_backward, summarise_backward)
    found = SimpleNamespace(INTERPRETED=INTERPRETED)
    for kernel in kernels:
        key = [name for name in ("D", "BLOCK", "TILE", "PRECISION") if name in kernel.arg_names]
        setattr(found, kernel.__name__, triton.autotune(configs, key, cache_results=True)(kernel))
    return found
