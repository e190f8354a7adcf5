"""Polarity-aware attention by Triton kernels, for CUDA and ROCm devices: launching and checks.

The mathematics is that of `polaformer.ops.polarity.plain`; the kernels, and how they keep it safe at every magnitude, are in
`polaformer.ops.polarity.triton_kernels`, which is imported on first use, so that this module does not need triton.

Precision. Everything is computed in float32. For float32 inputs the products are plain float32 ("ieee"). For float16 and
bfloat16 inputs the operands stay float32 and tensor cores multiply them as three bfloat16 products ("bf16x3": each operand in
two parts, the product of the two small parts left out), which moves values and gradients by 5e-5 of their norm where rounding
a float16 result moves them by 2e-4. One half-precision product would be faster and is not sound: emulated, float16 or TF32
operands move everything by 3.8e-4, against the 5e-4 we allow, and bfloat16 operands by 3e-3; and a state, being a sum over all
keys, overflows float16.

Order. Keys and queries are taken in splits whose number depends on the shapes and the device only. Each split writes its own
part, and the parts are summed in one order, so the same call gives the same bits. For that reason, too, block sizes are a
table. Numbers of warps and stages are found by timing on the device, at the first call for a width and dtype; since the number
of warps has a say in the order of sums, `torch.use_deterministic_algorithms(True)` and POLAFORMER_TUNE=0 take a table for them.

Triton's interpreter (TRITON_INTERPRET=1 before the kernels are imported) runs all of it on CPU tensors, slowly, for tests. It
rounds to bfloat16 wrongly, so bfloat16 is widened before and narrowed after it.

# B batch, H heads, N queries, M keys, D head width
"""

import functools
import importlib
import importlib.util
import os
from math import frexp
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 256
# Programs wanted for each multiprocessor: as many as its registers hold at once.
PROGRAMS_PER_PROCESSOR = 2
# A split takes at least this many tokens for each channel: with fewer, moving its state costs more than reading its tokens.
TOKENS_PER_CHANNEL = 4
# With the interpreter: several, so that tests see them summed.
INTERPRETED_SPLITS = 3


class Sizes(NamedTuple):
    """How the kernels cut up heads of one width."""

    width: int  # D
    half: int  # ceil(D / 2)
    padded: int  # the next power of two, at least 16, which is the least a product takes
    block: int  # tokens at a time
    state_tile: int  # value columns at a time where keys or queries are summed up into a state, of a stream or of both
    token_tile: int  # value columns at a time where tokens meet a state
    num_warps: int | None  # None: found by timing


def why_not() -> str | None:
    """None if the kernels can run here, else one line that says why they cannot."""
    if not _installed():
        return "triton is not installed; install it (pip install triton) or choose another backend"
    return None if _interpreter_wanted() else _missing_device()


def forward(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, scale: Tensor | None, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Eq. 6 before the gate, and the shifted denominators of its two streams.

    q (B, H, N, D), k and v (B, H, M, D) of any strides, read in place unless the last is not 1; power (H, D); scale (H, D), by
    which q and k are divided, or None; mask (B, M), True where a key exists, or None. Returns (B, H, N, D) in v's dtype, heads
    inside tokens if q has them so, and (B, H, N, 2) in float32, which only `backward` understands.
    A query that meets no key mass in a stream, and any without keys, gets zeros there.
    """
    kernels = _load_kernels(q)
    if kernels.INTERPRETED and q.dtype == torch.bfloat16:
        out, norms = forward(q.float(), k.float(), v.float(), power, scale, mask, eps)
        return out.to(v.dtype), norms
    out = _like(q, v.dtype)
    norms = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), norms.zero_()
    q, k, v = _readable(q), _readable(k), _readable(v)
    sizes, precision = _sizes(q), _precision(q)
    p, s = _parameter(power), None if scale is None else _parameter(scale)
    batch, heads, num_queries, _ = q.shape
    mantissa, exponent = frexp(eps)
    counts = mask.sum(dim=-1, dtype=torch.float32) if mask is not None and eps else None
    with torch.cuda.device_of(q):
        peaks, memory = _summarise(kernels, k, v, mask, p, sizes, precision)
        kernels.attend[(batch * heads * _ceil_div(num_queries, sizes.block),)](
            q,
            *q.stride()[:3],
            p,
            s,
            peaks,
            memory,
            counts,
            float(k.shape[-2]),
            mantissa if eps else None,
            float(exponent) if eps else None,
            out,
            *out.stride()[:3],
            norms,
            heads,
            num_queries,
            peaks.shape[1],
            **_options(sizes, precision, "half", "token_tile"),
        )
    return out, norms


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    scale: Tensor | None,
    norms: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v, power and scale (None without one); features are computed again rather than kept.

    grad (B, H, N, D), norms as `forward` returned them. Each gradient has the dtype of its tensor, and heads inside tokens
    where that has them so. The shifts count as constants: the result does not depend on them.
    """
    kernels = _load_kernels(q)
    if kernels.INTERPRETED and q.dtype == torch.bfloat16:
        dq, dk, dv, dpower, dscale = backward(grad.float(), q.float(), k.float(), v.float(), power, scale, norms, mask)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dpower, dscale
    dq, dk, dv = _like(q, q.dtype), _like(k, k.dtype), _like(v, v.dtype)
    if q.numel() == 0 or k.numel() == 0:
        none = None if scale is None else torch.zeros_like(scale)
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(power), none
    grad, q, k, v, norms = _readable(grad), _readable(q), _readable(k), _readable(v), norms.contiguous()
    sizes, precision = _sizes(q), _precision(q)
    p, s = _parameter(power), None if scale is None else _parameter(scale)
    with torch.cuda.device_of(q):
        peaks, memory = _summarise(kernels, k, v, mask, p, sizes, precision)
        # Parts of power's gradient: one for each split of the queries, then one for each split of the keys.
        splits = _num_splits(q, sizes), _num_splits(k, sizes)
        dpower = q.new_empty((q.shape[0], q.shape[1], sum(splits), q.shape[3]), dtype=torch.float32)
        dmemory, exponents = _attend_backward(
            kernels, grad, q, p, s, norms, peaks, memory, dq, dpower, splits[0], sizes, precision
        )
        _summarise_backward(kernels, k, v, mask, p, peaks, dmemory, dk, dv, dpower, splits, sizes, precision)
    dscale = None if s is None or scale is None else (-2 * p / s * exponents.sum(dim=(0, 2))).to(scale.dtype)
    return dq, dk, dv, dpower.sum(dim=(0, 2)).to(power.dtype), dscale


def _summarise(
    kernels: ModuleType | SimpleNamespace, k: Tensor, v: Tensor, mask: Tensor | None, p: Tensor, sizes: Sizes, precision: str
) -> tuple[Tensor, Tensor]:
    """The peaks of the keys' splits (B·H, splits, 2, D), and the state and total over all keys (B·H, 2D(D + 1))."""
    batch, heads, num_keys, width = k.shape
    splits = _num_splits(k, sizes)
    per_split = _per_split(num_keys, splits, sizes)
    peaks = k.new_empty((batch * heads, splits, 2, width), dtype=torch.float32)
    memory = k.new_empty((batch * heads, splits, 2 * width * (width + 1)), dtype=torch.float32)
    kernels.find_peaks[(batch * heads, splits)](
        k, *k.stride()[:3], *_mask_arguments(mask), peaks, heads, num_keys, per_split, **_options(sizes)
    )
    kernels.summarise[(batch * heads, splits, _ceil_div(width, sizes.state_tile))](
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        *_mask_arguments(mask),
        p,
        peaks,
        memory,
        heads,
        num_keys,
        per_split,
        **_options(sizes, precision, "state_tile"),
    )
    return peaks, _sum_splits(memory)


def _attend_backward(
    kernels: ModuleType | SimpleNamespace,
    grad: Tensor,
    q: Tensor,
    p: Tensor,
    s: Tensor | None,
    norms: Tensor,
    peaks: Tensor,
    memory: Tensor,
    dq: Tensor,
    dpower: Tensor,
    splits: int,
    sizes: Sizes,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Fills dq and the queries' parts of dpower; returns the gradient of memory and Σ d(p·ln|q|) (B, H, splits, D)."""
    batch, heads, num_queries, width = q.shape
    per_split = _per_split(num_queries, splits, sizes)
    dmemory = q.new_empty((batch * heads, splits, memory.shape[-1]), dtype=torch.float32)
    exponents = q.new_empty((batch, heads, splits, width), dtype=torch.float32)
    kernels.attend_backward[(batch * heads, splits)](
        grad,
        *grad.stride()[:3],
        q,
        *q.stride()[:3],
        p,
        s,
        peaks,
        memory,
        norms,
        dq,
        *dq.stride()[:3],
        dmemory,
        dpower,
        None if s is None else exponents,
        heads,
        num_queries,
        peaks.shape[1],
        per_split,
        dpower.shape[2],
        **_options(sizes, precision, "half", "token_tile"),
    )
    tiles = _ceil_div(sizes.half, sizes.state_tile)
    kernels.state_backward[(batch * heads, splits, 2 * tiles)](
        grad,
        *grad.stride()[:3],
        q,
        *q.stride()[:3],
        p,
        s,
        peaks,
        norms,
        dmemory,
        heads,
        num_queries,
        peaks.shape[1],
        per_split,
        tiles,
        **_options(sizes, precision, "half", "state_tile"),
    )
    return _sum_splits(dmemory), exponents


def _summarise_backward(
    kernels: ModuleType | SimpleNamespace,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: Tensor,
    peaks: Tensor,
    dmemory: Tensor,
    dk: Tensor,
    dv: Tensor,
    dpower: Tensor,
    splits: tuple[int, int],
    sizes: Sizes,
    precision: str,
) -> None:
    """Fills dk, dv and the keys' parts of dpower, which follow those of the queries."""
    batch, heads, num_keys, _ = k.shape
    kernels.summarise_backward[(batch * heads, splits[1])](
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        *_mask_arguments(mask),
        p,
        peaks,
        dmemory,
        dk,
        *dk.stride()[:3],
        dv,
        *dv.stride()[:3],
        dpower,
        heads,
        num_keys,
        peaks.shape[1],
        _per_split(num_keys, splits[1], sizes),
        dpower.shape[2],
        splits[0],
        **_options(sizes, precision, "token_tile"),
    )


def _load_kernels(q: Tensor) -> ModuleType | SimpleNamespace:
    """The kernels, once it is certain that they can take q."""
    where = "polaformer.ops.polarity.triton"
    problem = why_not()
    if problem is not None:
        raise RuntimeError(f"{where}: {problem}")
    if q.dtype not in DTYPES:
        raise ValueError(f"{where}: q has dtype {q.dtype}; give float16, bfloat16 or float32, or use the backend 'torch'")
    if q.shape[-1] > MAX_WIDTH:
        raise ValueError(
            f"{where}: q has head width {q.shape[-1]}; give at most {MAX_WIDTH}, which fits on a processor, or use 'torch'"
        )
    kernels = importlib.import_module("polaformer.ops.polarity.triton_kernels")
    if q.device.type != "cuda" and not kernels.INTERPRETED:
        raise ValueError(
            f"{where}: q is on {q.device}; move it to a CUDA or ROCm device, "
            "or set TRITON_INTERPRET=1 before anything is computed"
        )
    if _tunes(q):
        tuned: SimpleNamespace = kernels.tuned()
        return tuned
    return kernels


def _tunes(q: Tensor) -> bool:
    """Whether launches are tuned by timing: on devices, unless equal bits are wanted everywhere."""
    wanted = os.environ.get("POLAFORMER_TUNE", "1") != "0" and not torch.are_deterministic_algorithms_enabled()
    return wanted and q.is_cuda


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreter_wanted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _missing_device() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA or ROCm device (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "the CUDA device has a compute capability below 8.0, which triton does not support"
    return None


def _sizes(q: Tensor) -> Sizes:
    """The table: compiled for compute capability 8.0, these spill few or no registers and take less than 99 KiB of a processor.

    Larger blocks spill: an operand of a product is held by every warp that needs it.
    """
    width = q.shape[-1]
    padded = max(16, 1 << (width - 1).bit_length())
    half = (width + 1) // 2
    num_warps = None if _tunes(q) else 8 if padded > 64 or q.dtype == torch.float32 else 4
    if padded <= 64:
        return Sizes(width, half, padded, 32, min(padded, 32), 16, num_warps)
    return Sizes(width, half, padded, 16, 32 if padded == 128 else 16, 16, num_warps)


def _options(sizes: Sizes, precision: str | None = None, *names: str) -> dict[str, Any]:
    """What a kernel is compiled for."""
    options: dict[str, Any] = {"D": sizes.width, "DP": sizes.padded, "BLOCK": sizes.block}
    if sizes.num_warps is not None:
        options["num_warps"] = sizes.num_warps
    if precision is not None:
        options["PRECISION"] = precision
    for name in names:
        options["HALF" if name == "half" else "TILE"] = getattr(sizes, name)
    return options


def _precision(x: Tensor) -> str:
    """How products are multiplied; see the top of this file."""
    return "ieee" if x.dtype == torch.float32 or not x.is_cuda else "bf16x3"


def _num_splits(x: Tensor, sizes: Sizes) -> int:
    """Into how many parts the tokens of x (B, H, T, D) are split; at least one token in each."""
    blocks = _ceil_div(x.shape[2], sizes.block)
    wanted = INTERPRETED_SPLITS
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        wanted = _ceil_div(PROGRAMS_PER_PROCESSOR * processors, x.shape[0] * x.shape[1])
        wanted = min(wanted, max(1, x.shape[2] // (TOKENS_PER_CHANNEL * x.shape[3])))
    # As many as are left over when each takes the same number of blocks.
    return _ceil_div(blocks, _ceil_div(blocks, min(wanted, blocks)))


def _per_split(num_tokens: int, splits: int, sizes: Sizes) -> int:
    """How many tokens a split takes: whole blocks."""
    return _ceil_div(_ceil_div(num_tokens, sizes.block), splits) * sizes.block


def _sum_splits(parts: Tensor) -> Tensor:
    """(heads, splits, …) to (heads, …), in one order."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(dim=1)


def _mask_arguments(mask: Tensor | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 0) if mask is None else (mask.view(torch.uint8), mask.stride(0), mask.stride(1))


def _parameter(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _readable(x: Tensor) -> Tensor:
    """x itself, unless its channels do not lie beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty (B, H, T, D), in memory with heads inside tokens if x has them so."""
    batch, heads, num_tokens, width = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, num_tokens, heads, width), dtype=dtype).transpose(1, 2)
    return x.new_empty(x.shape, dtype=dtype)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
