"""What timings depend on: the machine, and what else it was doing."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch


class ProcessorUse(NamedTuple):
    """Seconds since some moment: computed by all programs together, computed by this one, and on the clock.

    This program's include those of its processes that have ended, such as data loading workers.
    """

    everyone: float
    own: float
    clock: float


def processor_use() -> ProcessorUse | None:
    """The processor's counters now, to be compared with later ones; None where the system does not report them (not Linux)."""
    try:
        counts = [int(count) for count in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    except OSError:
        return None
    ticks = sum(counts) - sum(counts[3:5])  # all but idle and waiting for input
    times = os.times()
    own = time.process_time() + times.children_user + times.children_system
    return ProcessorUse(ticks / os.sysconf("SC_CLK_TCK"), own, time.perf_counter())


def share_of_others(before: ProcessorUse | None, after: ProcessorUse | None) -> float | None:
    """The share of the processor, 0 to 1, that other programs used between two moments, which disturbs timings."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    others = (after.everyone - before.everyone) - (after.own - before.own)
    return max(0.0, others / ((after.clock - before.clock) * (os.cpu_count() or 1)))


@contextmanager
def described(threads: int | None) -> Iterator[dict[str, Any]]:
    """Let torch use that many threads inside, if given; yields a dictionary that describes the machine once the work is done.

    Its "used_by_others" is the share of the processor that other programs used meanwhile.
    """
    found: dict[str, Any] = {}
    before, used = torch.get_num_threads(), processor_use()
    torch.set_num_threads(threads or before)
    try:
        yield found
        found |= fingerprint() | {"used_by_others": share_of_others(used, processor_use())}
    finally:
        torch.set_num_threads(before)


def fingerprint() -> dict[str, Any]:
    """What a timing depends on: processor, cores, threads, versions, GPU. Contains neither host names nor paths."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
