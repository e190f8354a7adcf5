"""What timings depend on: the machine, what else it was doing, what is installed and which backends work."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polaformer import __version__
from polaformer.ops.gated_convolution import cpu as convolution
from polaformer.ops.native import cache, compiler
from polaformer.ops.polarity import backends, cpu
from polaformer.ops.processor import bfloat16_unavailable_reason

# Packages that are reported, by the extra that installs them; "" for those that are always installed.
EXTRAS = {
    "": ("torch", "torchvision", "timm", "numpy", "safetensors", "triton"),
    "train": ("accelerate", "scikit-learn", "matplotlib", "tensorboard"),
    "data": ("datasets", "webdataset"),
    "export": ("onnx", "onnxruntime"),
}
PACKAGES = {name: extra for extra, names in EXTRAS.items() for name in names}


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
    ticks, times = sum(counts) - sum(counts[3:5]), os.times()  # all but idle and waiting for input
    own = time.process_time() + times.children_user + times.children_system
    return ProcessorUse(ticks / os.sysconf("SC_CLK_TCK"), own, time.perf_counter())


def share_of_others(before: ProcessorUse | None, after: ProcessorUse | None) -> float | None:
    """The share of the processor, 0 to 1, that other programs used between two moments, which disturbs timings."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    others = (after.everyone - before.everyone) - (after.own - before.own)
    return max(0.0, others / ((after.clock - before.clock) * (os.cpu_count() or 1)))


def available_bytes() -> int | None:
    """Memory that a program can get without anything being swapped out; None where the system does not report it."""
    return proc_bytes("meminfo", "MemAvailable")


def proc_bytes(path: str, name: str) -> int | None:
    """A line "name: … kB" of a file in /proc, in bytes; None if it is missing, as it is where the system is not Linux."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc", path).read_text(encoding="utf-8"), flags=re.M)
        return 1024 * int(found[1]) if found else None
    return None


@contextmanager
def described(threads: int | None) -> Iterator[dict[str, Any]]:
    """Lets torch use that many threads inside, if given; yields a dictionary that describes the machine once the work is done.

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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        models = [platform.processor() or platform.machine()]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def environment() -> dict[str, Any]:
    """What is installed and what works here, as numbers and strings; never fails because something is broken."""
    cuda = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    bfloat16 = bfloat16_unavailable_reason()
    return {
        "backends": {one.name: {"works": one.works, "reason": in_home(one.reason)} for one in _statuses()},
        "versions": {"polaformer": __version__} | {name: installed(name) for name in PACKAGES},
        "machine": fingerprint() | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS")},
        "devices": ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])],
        "bfloat16_on_cpu": {"works": bfloat16 is None, "reason": bfloat16},
        "compiler": _compiler(),
        "kernels": {"polarity attention": _kernel(cpu), "convolution and gate": _kernel(convolution)},
        "kernel_cache": _cache(),
    }


def installed(package: str) -> str | None:
    """The version of the package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def in_home(text: str) -> str:
    """The string with ~ in place of the user's home directory, so that it can be shared."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _statuses() -> list[backends.Status]:
    """The status of the backends; if asking one raises, its error is the reason for all but the plain path."""
    try:
        return list(backends.status())
    except Exception as error:
        plain = backends.Status("torch", True, backends.MODULES["torch"].describe())
        return [plain, *(backends.Status(name, False, _in_one_line(error)) for name in backends.BACKENDS[2:])]


def _kernel(module: Any) -> dict[str, Any]:
    """Whether the native kernel of a module works, and how it was built or why it does not work."""
    try:
        reason, options = module.unavailable_reason(), module.options()
    except Exception as error:
        reason, options = _in_one_line(error), []
    if reason is not None:
        return {"works": False, "reason": in_home(f"none; plain PyTorch is used: {reason}"), "options": []}
    told = "built for this processor" if set(options) & set(compiler.FOR_THIS_PROCESSOR) else "slow: built for any processor"
    return {"works": True, "reason": f"{told} ({' '.join(options) or 'no extra options'})", "options": options}


def _compiler() -> str | None:
    """The C++ compiler that kernels are built with, and the first line of what it says of itself."""
    found = compiler.find_compiler()
    if found is None:
        return None
    try:
        said = subprocess.run([*found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"cannot be run: {error}"
    return f"{in_home(' '.join(found))}: {said.splitlines()[0] if said else 'reports no version'}"


def _cache() -> str:
    """The directory of built kernels, or why there is none."""
    try:
        return in_home(str(cache.cache_directory()))
    except OSError as error:
        return in_home(f"none: {error}; set POLAFORMER_CACHE to a writable directory")


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
