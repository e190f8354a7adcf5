"""Memory of a call, measured in three ways: what autograd keeps, what PyTorch's allocator hands out, what the process holds.

The first two know tensors alone. The third also sees what a native kernel allocates for itself, and, being counted in pages
that were written to, does not see memory that was asked for and never used.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

STATUS = Path("/proc/self/status")


def saved_bytes(forward: Callable[[], object], *, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass of a call, each storage once, inputs among them.

    apart_from: tensors, for instance weights, whose storage is not counted.
    """
    left_out = {tensor.untyped_storage()._cdata for tensor in apart_from}
    seen: dict[int, int] = {}
    alive: list[object] = []  # as long as they live, no other tensor has their number

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive.append(forward())
    return sum(size for number, size in seen.items() if number not in left_out)


def allocated_peak(call: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that PyTorch's allocator had handed out during the call at one time, beyond those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler else tells on stderr that it starts and stops
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
    """By how many bytes the process's resident memory grew at most during the call; None where the system does not tell."""
    if not STATUS.exists():
        return None
    _give_back_free_memory()
    _reset_peak()
    before = _status("VmRSS")
    kept = call()
    grown = _status("VmHWM") - before
    del kept
    return max(0, grown)


def available_bytes() -> int | None:
    """Memory that a program can still get without anything being swapped out; None where the system does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), flags=re.M)
    except OSError:  # not Linux
        return None
    return 1024 * int(found[1]) if found else None


def _status(name: str) -> int:
    """A line of the process's status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(encoding="utf-8"), flags=re.M)
    assert found, f"{STATUS} has no {name}"
    return 1024 * int(found[1])


def _give_back_free_memory() -> None:
    """What the C library kept of freed memory would serve the call, and not be seen to grow."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak() -> None:
    """Starts the peak afresh; where this is forbidden, the peak of the past counts too, and the growth is an upper bound."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return
