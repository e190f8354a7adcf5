"""Memory of the operator and its rivals, each at each shape measured in a separate process.

`probe` starts `python -m polaformer.bench.memory` with the arguments of `answer` as JSON, which prints an Answer as JSON on its
last line.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from polaformer.analysis.agreement import Pass, Shape, random_inputs
from polaformer.analysis.call_memory import allocated_peak, resident_peak, saved_bytes
from polaformer.analysis.machine import available_bytes
from polaformer.bench.contenders import CONTENDERS, FOR_MEMORY
from polaformer.bench.correctness import TOLERANCE, cut, relative_error
from polaformer.bench.runner import BenchSettings

WARM_UP = 256  # tokens: everything is loaded, little is allocated
ENVIRONMENT = {
    # The C library returns larger blocks as soon as they are freed, instead of keeping some of them for later.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # Compile in one process: others would stay behind and take memory.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


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

    def as_record(self) -> dict[str, Any]:
        """The answer for JSON."""
        return self._asdict() | {"correct": self.correct}

    def value(self, kind: str) -> int | None:
        """The bytes of one kind; None if it failed or is incorrect."""
        return getattr(self, kind) if self.correct else None


def benchmark(shape: Shape, names: Iterable[str], threads: int | None, settings: BenchSettings) -> dict[str, Answer]:
    """The answers for the contenders at a shape, by name; a process may request nine tenths of the free memory."""
    found = {}
    for name in names:
        settings.on_call(name)
        free = available_bytes() if settings.device == "cpu" else None
        found[name] = probe(name, shape, settings.device, threads, free and free * 9 // 10, seconds=settings.seconds)
    return found


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
        error = relative_error(contender, cut(shape, WARM_UP), device)
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
