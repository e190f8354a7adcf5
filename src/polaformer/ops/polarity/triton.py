"""Polarity-aware attention by Triton kernels, for CUDA and ROCm devices: launching and checks.

The mathematics is that of `polaformer.ops.polarity.plain`. The kernels, and how they keep it safe at every magnitude, are in
`polaformer.ops.polarity.triton_kernels`, which is imported on first use, so that this module does not need triton.

Precision. Everything is computed in float32. For float32 inputs the matmuls are plain float32 ("ieee"). For float16 and
bfloat16 inputs the operands stay float32 and tensor cores multiply them as three bfloat16 products ("bf16x3": each operand in
two parts, the product of the two small parts left out), which moves values and gradients by 5e-5 of their norm, where rounding
a float16 result moves them by 2e-4. A single half-precision product would be faster but not sound: emulated, float16 or TF32
operands move everything by 3.8e-4, against the 5e-4 we allow, and bfloat16 operands by 3e-3; and a state, being a sum over all
keys, overflows float16.

Order. Keys and queries are processed in splits whose number depends on the shapes and the device only. Each split writes its
own part, and the parts are summed in a fixed order, so the same call gives bit-identical results. For that reason, too, block
sizes are a table. Numbers of warps and stages are found by timing on the device, at the first call for a width and dtype. Since
the number of warps affects the order of sums, `torch.use_deterministic_algorithms(True)` and POLAFORMER_TUNE=0 select a table.

Triton's interpreter (TRITON_INTERPRET=1 before the kernels are imported) runs all of it on CPU tensors, slowly, for tests. It
rounds to bfloat16 wrongly, so bfloat16 is widened before and narrowed after it.

# B batch, H heads, N queries, M keys, D head width
"""

import functools
import importlib
import importlib.util
import os
import sys
from math import frexp
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polaformer.ops.memory_layout import empty_like_heads, with_contiguous_rows
from polaformer.ops.polarity.inputs import Gradients, Inputs

WHERE, KERNELS = "polaformer.ops.polarity.triton", "polaformer.ops.polarity.triton_kernels"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 256
# Programs per multiprocessor: as many as its registers hold at once.
PROGRAMS_PER_PROCESSOR = 2
# A split has at least this many tokens per channel: with fewer, moving its state costs more than reading its tokens.
TOKENS_PER_CHANNEL = 4
# With the interpreter: several, so that tests see them summed.
INTERPRETED_SPLITS = 3


class Sizes(NamedTuple):
    """How the kernels divide heads of one width."""

    width: int  # D
    half: int  # ceil(D / 2)
    padded: int  # the next power of two, at least 16, the minimum of a matmul
    block: int  # tokens at a time
    state_tile: int  # value columns at a time where keys or queries are summed into a state, of one stream or of both
    token_tile: int  # value columns at a time where tokens meet a state
    num_warps: int | None  # None: found by timing


class Launch(NamedTuple):
    """The kernels and the inputs as they take them: rows contiguous, parameters in float32."""

    kernels: ModuleType | SimpleNamespace
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor  # (H, D): power
    s: Tensor | None  # (H, D): scale
    mask: Tensor | None
    sizes: Sizes
    precision: str  # of matmuls; see the top of this file


def describe() -> str:
    """What this backend is."""
    return "fused kernels for GPUs"


def unavailable_reason() -> str | None:
    """Why the kernels cannot run on this machine, in one line; None if they can."""
    if not _installed():
        return "triton is not installed; install it (pip install triton) or choose another backend"
    return None if _interpreter_requested() else _missing_device()


def unsupported_reason(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Why the kernels cannot compute on such tensors, in one line; None if they can."""
    if dtype not in DTYPES:
        return f"it supports float16, bfloat16 and float32 but the tensors are {dtype}"
    if width > MAX_WIDTH:
        return f"it supports heads of width up to {MAX_WIDTH}, which fit on a multiprocessor, but these have {width}"
    if device != "cuda" and not _interprets():
        return f"it computes on CUDA and ROCm devices (with TRITON_INTERPRET=1 anywhere) but the tensors are on {device}"
    return None


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Eq. 6 before the gate, and the shifted denominators of its two streams.

    q, k and v may have any strides; they are read in place unless the last stride is not 1. Returns (B, H, N, D) in v's dtype,
    a view of tokens (B, N, H·D) if q is one, and (B, H, N, 2) in float32, which only `backward` understands.
    A query that meets no key mass in a stream gets zeros there.
    """
    q, k, v, _, _, mask, eps = inputs
    kernels = _load_kernels(q)
    if kernels.INTERPRETED and q.dtype == torch.bfloat16:
        out, norms = forward(_widened(inputs))
        return out.to(v.dtype), norms
    out = empty_like_heads(q)
    norms = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), norms.zero_()
    launch = _prepare(kernels, inputs)
    sizes = launch.sizes
    batch, heads, num_queries, _ = q.shape
    mantissa, exponent = frexp(eps)
    counts = mask.sum(dim=-1, dtype=torch.float32) if mask is not None and eps else None
    with torch.cuda.device_of(q):
        peaks, memory = _summarise(launch)
        kernels.attend[(batch * heads * _ceil_div(num_queries, sizes.block),)](
            *_strided(launch.q),
            launch.p,
            launch.s,
            peaks,
            memory,
            counts,
            float(k.shape[-2]),
            mantissa if eps else None,
            float(exponent) if eps else None,
            *_strided(out),
            norms,
            heads,
            num_queries,
            peaks.shape[1],
            **_options(sizes, launch.precision, "half", "token_tile"),
        )
    return out, norms


def backward(grad: Tensor, norms: Tensor, inputs: Inputs) -> Gradients:
    """The gradients of q, k, v, power and scale (None without one); features are recomputed rather than kept.

    grad (B, H, N, D), norms as `forward` returned them. Each gradient has the dtype of its tensor, and is a view of tokens if
    its tensor is. The shifts are treated as constants: the result does not depend on them.
    """
    q, k, v, power, scale, _, _ = inputs
    kernels = _load_kernels(q)
    if kernels.INTERPRETED and q.dtype == torch.bfloat16:
        dq, dk, dv, dpower, dscale = backward(grad.float(), norms, _widened(inputs))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dpower, dscale
    dq, dk, dv = empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)
    if q.numel() == 0 or k.numel() == 0:
        zeros = None if scale is None else torch.zeros_like(scale)
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(power), zeros
    launch = _prepare(kernels, inputs)
    with torch.cuda.device_of(q):
        peaks, memory = _summarise(launch)
        # Parts of power's gradient: one for each split of the queries, then one for each split of the keys.
        splits = _num_splits(launch.q, launch.sizes), _num_splits(launch.k, launch.sizes)
        dpower = q.new_empty((q.shape[0], q.shape[1], sum(splits), q.shape[3]), dtype=torch.float32)
        dmemory, exponents = _attend_backward(
            launch, with_contiguous_rows(grad), norms.contiguous(), peaks, memory, dq, dpower, splits[0]
        )
        _summarise_backward(launch, peaks, dmemory, dk, dv, dpower, splits)
    p, s = launch.p, launch.s
    dscale = None if s is None or scale is None else (-2 * p / s * exponents.sum(dim=(0, 2))).to(scale.dtype)
    return dq, dk, dv, dpower.sum(dim=(0, 2)).to(power.dtype), dscale


def _widened(inputs: Inputs) -> Inputs:
    return inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())


def _prepare(kernels: ModuleType | SimpleNamespace, inputs: Inputs) -> Launch:
    q, k, v = (with_contiguous_rows(x) for x in inputs.tokens)
    p, s = (None if x is None else x.float().contiguous() for x in (inputs.power, inputs.scale))
    assert p is not None
    precision = "ieee" if q.dtype == torch.float32 or not q.is_cuda else "bf16x3"
    return Launch(kernels, q, k, v, p, s, inputs.mask, _sizes(q), precision)


def _summarise(launch: Launch) -> tuple[Tensor, Tensor]:
    """The peaks of the keys' splits (B·H, splits, 2, D), and the state and total over all keys (B·H, 2D(D + 1))."""
    k, sizes = launch.k, launch.sizes
    batch, heads, num_keys, width = k.shape
    splits = _num_splits(k, sizes)
    per_split = _per_split(num_keys, splits, sizes)
    peaks = k.new_empty((batch * heads, splits, 2, width), dtype=torch.float32)
    memory = k.new_empty((batch * heads, splits, 2 * width * (width + 1)), dtype=torch.float32)
    mask = _mask_arguments(launch.mask)
    launch.kernels.find_peaks[(batch * heads, splits)](
        *_strided(k), *mask, peaks, heads, num_keys, per_split, **_options(sizes)
    )
    launch.kernels.summarise[(batch * heads, splits, _ceil_div(width, sizes.state_tile))](
        *_strided(k),
        *_strided(launch.v),
        *mask,
        launch.p,
        peaks,
        memory,
        heads,
        num_keys,
        per_split,
        **_options(sizes, launch.precision, "state_tile"),
    )
    return peaks, _sum_splits(memory)


def _attend_backward(
    launch: Launch, grad: Tensor, norms: Tensor, peaks: Tensor, memory: Tensor, dq: Tensor, dpower: Tensor, splits: int
) -> tuple[Tensor, Tensor]:
    """Fills dq and the queries' parts of dpower; returns the gradient of memory and Σ d(p·ln|q|) (B, H, splits, D)."""
    q, sizes = launch.q, launch.sizes
    batch, heads, num_queries, width = q.shape
    per_split = _per_split(num_queries, splits, sizes)
    dmemory = q.new_empty((batch * heads, splits, memory.shape[-1]), dtype=torch.float32)
    exponents = q.new_empty((batch, heads, splits, width), dtype=torch.float32)
    queries = (*_strided(grad), *_strided(q), launch.p, launch.s, peaks)
    counts = (heads, num_queries, peaks.shape[1], per_split)
    launch.kernels.attend_backward[(batch * heads, splits)](
        *queries,
        memory,
        norms,
        *_strided(dq),
        dmemory,
        dpower,
        None if launch.s is None else exponents,
        *counts,
        dpower.shape[2],
        **_options(sizes, launch.precision, "half", "token_tile"),
    )
    tiles = _ceil_div(sizes.half, sizes.state_tile)
    launch.kernels.state_backward[(batch * heads, splits, 2 * tiles)](
        *queries, norms, dmemory, *counts, tiles, **_options(sizes, launch.precision, "half", "state_tile")
    )
    return _sum_splits(dmemory), exponents


def _summarise_backward(
    launch: Launch, peaks: Tensor, dmemory: Tensor, dk: Tensor, dv: Tensor, dpower: Tensor, splits: tuple[int, int]
) -> None:
    """Fills dk, dv and the keys' parts of dpower, which follow those of the queries."""
    batch, heads, num_keys, _ = launch.k.shape
    launch.kernels.summarise_backward[(batch * heads, splits[1])](
        *_strided(launch.k),
        *_strided(launch.v),
        *_mask_arguments(launch.mask),
        launch.p,
        peaks,
        dmemory,
        *_strided(dk),
        *_strided(dv),
        dpower,
        heads,
        num_keys,
        peaks.shape[1],
        _per_split(num_keys, splits[1], launch.sizes),
        dpower.shape[2],
        splits[0],
        **_options(launch.sizes, launch.precision, "token_tile"),
    )


def _load_kernels(q: Tensor) -> ModuleType | SimpleNamespace:
    """The kernels, after checking that they can take q."""
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"{WHERE}: {reason}")
    reason = unsupported_reason(q.device.type, q.dtype, q.shape[-1])
    if reason is not None:
        raise ValueError(f"{WHERE}: {reason}; use the backend 'torch'")
    kernels = importlib.import_module(KERNELS)
    if _tunes(q):
        tuned: SimpleNamespace = kernels.tuned()
        return tuned
    return kernels


def _interprets() -> bool:
    """Whether the kernels run, or would run, in the interpreter; decided when they are imported."""
    kernels = sys.modules.get(KERNELS)
    return _interpreter_requested() if kernels is None else kernels.INTERPRETED


def _tunes(q: Tensor) -> bool:
    """Whether launches are tuned by timing: on devices, unless deterministic results are requested."""
    allowed = os.environ.get("POLAFORMER_TUNE", "1") != "0" and not torch.are_deterministic_algorithms_enabled()
    return allowed and q.is_cuda


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreter_requested() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _missing_device() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA or ROCm device (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "the CUDA device has a compute capability below 8.0, which triton does not support"
    return None


def _sizes(q: Tensor) -> Sizes:
    """The table of sizes: compiled for compute capability 8.0, these spill few or no registers and take less than 99 KiB.

    Larger blocks spill: every warp holds the operands of the matmuls that it needs.
    """
    width = q.shape[-1]
    padded = max(16, 1 << (width - 1).bit_length())
    half = (width + 1) // 2
    num_warps = None if _tunes(q) else 8 if padded > 64 or q.dtype == torch.float32 else 4
    if padded <= 64:
        return Sizes(width, half, padded, 32, min(padded, 32), 16, num_warps)
    return Sizes(width, half, padded, 16, 32 if padded == 128 else 16, 16, num_warps)


def _options(sizes: Sizes, precision: str | None = None, *names: str) -> dict[str, Any]:
    """The compile-time arguments of a kernel."""
    options: dict[str, Any] = {"D": sizes.width, "DP": sizes.padded, "BLOCK": sizes.block}
    if sizes.num_warps is not None:
        options["num_warps"] = sizes.num_warps
    if precision is not None:
        options["PRECISION"] = precision
    for name in names:
        options["HALF" if name == "half" else "TILE"] = getattr(sizes, name)
    return options


def _num_splits(x: Tensor, sizes: Sizes) -> int:
    """The number of splits of the tokens of x (B, H, T, D); each has at least one token."""
    blocks = _ceil_div(x.shape[2], sizes.block)
    most = INTERPRETED_SPLITS
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        most = _ceil_div(PROGRAMS_PER_PROCESSOR * processors, x.shape[0] * x.shape[1])
        most = min(most, max(1, x.shape[2] // (TOKENS_PER_CHANNEL * x.shape[3])))
    # Fewer if all splits but the last can have the same number of blocks.
    return _ceil_div(blocks, _ceil_div(blocks, min(most, blocks)))


def _per_split(num_tokens: int, splits: int, sizes: Sizes) -> int:
    """The number of tokens of a split: whole blocks."""
    return _ceil_div(_ceil_div(num_tokens, sizes.block), splits) * sizes.block


def _sum_splits(parts: Tensor) -> Tensor:
    """(heads, splits, …) to (heads, …), in a fixed order."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(dim=1)


def _strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """The arguments of a kernel for a tensor (B, H, T, D): the tensor and its strides but the last."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def _mask_arguments(mask: Tensor | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 0) if mask is None else (mask.view(torch.uint8), mask.stride(0), mask.stride(1))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
