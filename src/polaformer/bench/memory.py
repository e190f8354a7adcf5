"""Memory of a call, measured in three ways: what autograd saves, what PyTorch's allocator hands out, what the process holds.

The first two count tensors only. The third also includes what a native kernel allocates itself; it counts pages that were
written to, and therefore not memory that was requested and never used. `probe` measures a contender in a separate process:
`python -m polaformer.bench.memory` with the arguments of `answer` as JSON, which prints an Answer as JSON on its last line.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from polaformer.analysis.agreement import Pass, Shape, random_inputs
from polaformer.bench.contenders import CONTENDERS, FOR_MEMORY
from polaformer.bench.correctness import TOLERANCE, correctness, cut

WARM_UP = 256  # tokens: everything is loaded, little is allocated
ENVIRONMENT = {
    # The C library returns larger blocks as soon as they are freed, instead of keeping some of them for later.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # Compile in one process: others would stay behind and take memory.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def saved_bytes(forward: Callable[[], object], *, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd saves for the backward pass of a call, inputs included, each storage once.

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
    before = _kilobytes("self/status", "VmRSS")
    kept = call()
    after = _kilobytes("self/status", "VmHWM")
    del kept
    return None if before is None or after is None else max(0, after - before)


def available_bytes() -> int | None:
    """Memory that a program can get without anything being swapped out; None where the system does not report it."""
    return _kilobytes("meminfo", "MemAvailable")


def _kilobytes(path: str, name: str) -> int | None:
    """A line "name: … kB" of a file in /proc, in bytes; None if it is missing, as it is where the system is not Linux."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc", path).read_text(encoding="utf-8"), flags=re.M)
        return 1024 * int(found[1]) if found else None
    return None


class Answer(NamedTuple):
    """Bytes beyond the inputs, of forward alone and of forward and backward; or why there are none."""

    error: float | None = None
    inputs: int | None = None
    saved: int | None = None
    forward_allocated: int | None = None
    forward_resident: int | None = None
    both_allocated: int | None = None
    both_resident: int | None = None
    failed: str | None = None

    @property
    def correct(self) -> bool:
        """Whether what was measured computes what it should."""
        return self.failed is not None or (self.error is not None and self.error <= TOLERANCE)


def probe(name: str, shape: Shape, device: str, threads: int | None, limit: int | None, *, seconds: float = 120.0) -> Answer:
    """The `answer` of a fresh process; if it dies or takes longer than `seconds`, the answer gives the reason."""
    command = [sys.executable, "-m", "polaformer.bench.memory", json.dumps([name, shape, device, threads, limit])]
    environment = os.environ | ENVIRONMENT
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Answer(failed=f"stopped after {seconds:g} s")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Answer(failed=f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else ""))
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        return Answer(failed=f"died with code {done.returncode}" + (f": {lines[-1][:120]}" if lines else ""))
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


def answer(name: str, shape: Shape, device: str, threads: int | None, limit: int | None) -> Answer:
    """Check that the contender is correct at a small shape, which also loads what it needs, then measure it.

    limit: the bytes that the process may request, so that the machine does not run out of memory.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if limit is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    contender = (CONTENDERS | FOR_MEMORY)[name]
    try:
        error = correctness(contender, cut(shape, WARM_UP), device)
        inputs, attention = random_inputs(shape, device=device), contender.build(shape)
        passes = [Pass(attention, inputs, backward) for backward in (False, True)]
        for one in passes if contender.is_compiled else ():
            one()  # the compiler itself needs memory
        resident = [resident_peak(one) if device == "cpu" else None for one in passes]
        allocated = [allocated_peak(one, device) for one in passes]
        given = sum(x.untyped_storage().nbytes() for x in inputs)
        return Answer(error, given, saved_bytes(passes[1].recorded), allocated[0], resident[0], allocated[1], resident[1])
    except (MemoryError, RuntimeError) as problem:
        text = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        is_memory = isinstance(problem, MemoryError) or "memory" in text or "bad_alloc" in text
        return Answer(failed="out of memory" if is_memory else f"{type(problem).__name__}: {text}")


if __name__ == "__main__":
    print(json.dumps(answer(*json.loads(sys.argv[1]))._asdict()))
