"""Memory of the operator and its rivals, each at each shape measured in a separate process.

`probe` starts `python -m polaformer.bench.memory` with the arguments of `measure_here` as JSON, which prints the fields of a
Measurement as JSON on its last line.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import isqrt
from typing import Any

import torch

from polaformer.analysis.agreement import Pass, Shape, random_inputs
from polaformer.analysis.call_memory import allocated_peak, resident_peak, saved_bytes
from polaformer.analysis.machine import available_bytes
from polaformer.bench.contenders import CONTENDERS, FOR_MEMORY, Contender
from polaformer.bench.correctness import cut, relative_error
from polaformer.bench.op import check, forecast
from polaformer.bench.runner import USABLE, BenchSettings, Measurement

WARM_UP = 256  # tokens: everything is loaded, little is allocated
FORECAST_NUMBERS = 2**25  # of a map, 128 MB, in the call that a forecast is from
# Bytes by kind; peaks are those beyond the inputs, of forward alone and of forward and backward.
SIZES = ("inputs", "saved", "forward_allocated", "both_allocated", "forward_resident", "both_resident")
ENVIRONMENT = {
    # The C library returns larger blocks as soon as they are freed, instead of keeping some of them for later.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # Compile in one process: leftover worker processes would use memory.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def as_record(row: Measurement) -> dict[str, Any]:
    """The measurement for JSON; `skipped` also says why a process failed."""
    return {**row.as_record("error", "correct"), **{kind: row.sizes.get(kind) for kind in SIZES}, "failed": row.skipped}


def benchmark(shape: Shape, contenders: Mapping[str, Contender], settings: BenchSettings) -> dict[str, Measurement]:
    """The measurements of the contenders at a shape, by name: check, forecast, then measure each in a separate process.

    A process checks again what it measures; one that compiles is checked there alone. It may request USABLE of the free memory.
    """
    plain = {name: one for name, one in contenders.items() if not one.is_compiled}
    errors, _ = check(plain, [cut(shape, WARM_UP)], settings)
    found = {name: Measurement(errors.get(name)) for name in contenders}
    right = {name: contenders[name] for name, row in found.items() if row.correct}
    short = cut(shape, max(1, isqrt(FORECAST_NUMBERS // (shape[0] * shape[1]))))
    reasons = forecast(right, shape, short, replace(settings, backward=True))
    for name in right:
        settings.on_call(name)
        free = available_bytes() if settings.device == "cpu" else None
        question = (name, shape, settings.device, settings.threads, free and int(USABLE * free))
        skipped = replace(found[name], skipped=reasons[name]) if name in reasons else None
        found[name] = skipped or probe(*question, seconds=settings.seconds)
    return found


def probe(
    name: str, shape: Shape, device: str, threads: int | None, limit: int | None, *, seconds: float = 120.0
) -> Measurement:
    """What a fresh process measures; if it dies or takes longer than `seconds`, the reason."""
    command = [sys.executable, "-m", "polaformer.bench.memory", json.dumps([name, shape, device, threads, limit])]
    environment = os.environ | ENVIRONMENT
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Measurement(skipped=f"stopped after {seconds:g} s")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Measurement(skipped=f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else ""))
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        return Measurement(skipped=f"died with code {done.returncode}" + (f": {lines[-1][:120]}" if lines else ""))
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def measure_here(name: str, shape: Shape, device: str, threads: int | None, limit: int | None) -> Measurement:
    """Checks that the contender is correct at a small shape, which also loads what it needs, then measures it.

    limit: the bytes that the process may request, so that the machine does not run out of memory.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if limit is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    contender = (CONTENDERS | FOR_MEMORY)[name]
    try:
        found = Measurement(relative_error(contender, cut(shape, WARM_UP), device))
        if not found.correct:
            return found
        inputs, attention = random_inputs(shape, device=device), contender.build(shape)
        passes = [Pass(attention, inputs, backward) for backward in (False, True)]
        for one in passes if contender.is_compiled else ():
            one()  # the compiler itself needs memory
        resident = [resident_peak(one) if device == "cpu" else None for one in passes]
        allocated = [allocated_peak(one, device) for one in passes]
        held = sum(x.untyped_storage().nbytes() for x in inputs), saved_bytes(passes[1].recorded)
        return replace(found, sizes=dict(zip(SIZES, [*held, *allocated, *resident], strict=True)))
    except (MemoryError, RuntimeError) as problem:
        text = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        is_memory = isinstance(problem, MemoryError) or "memory" in text or "bad_alloc" in text
        return Measurement(skipped="out of memory" if is_memory else f"{type(problem).__name__}: {text}")


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(*json.loads(sys.argv[1])))))
