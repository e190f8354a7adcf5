"""Memory of a call, measured in three ways: what autograd saves, what PyTorch's allocator hands out, what the process holds.

The first two count tensors only. The third also includes what a native kernel allocates itself; it counts pages that were
written to, and therefore not memory that was requested and never used.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from polaformer.analysis.machine import proc_bytes


def saved_bytes(forward: Callable[[], object], *, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd saves for the backward pass of a call, inputs included, each storage once.

    apart_from: tensors, for instance weights, whose storage is not counted.
    """
    left_out = {tensor.untyped_storage()._cdata for tensor in apart_from}
    seen: dict[int, int] = {}
    alive: list[object] = []  # as long as they live, no other tensor has their number

    def keep(tensor: Tensor) -> None:
        """The graph saves nothing instead: a result that its own graph refers to would never be freed."""
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        alive.append(tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing):
        alive.append(forward())
    alive.clear()  # `keep` refers to it, and the graph in it to `keep`
    return sum(size for number, size in seen.items() if number not in left_out)


def allocated_peak(call: Callable[[], object], device: str = "cpu") -> int:
    """The peak of live bytes of PyTorch's allocator during the call, beyond those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler reports on stderr that it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    live = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del kept
    return peak


def resident_peak(call: Callable[[], object]) -> int | None:
    """The growth of the process's peak resident memory during the call in bytes; None where the system does not report it."""
    # Memory that the C library has kept after it was freed would serve the call without visible growth.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    with suppress(OSError):  # where resetting the peak is forbidden, past peaks count too, and the growth is an upper bound
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = proc_bytes("self/status", "VmRSS")
    kept = call()
    after = proc_bytes("self/status", "VmHWM")
    del kept
    return None if before is None or after is None else max(0, after - before)
