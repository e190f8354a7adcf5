"""What is installed and what works here: versions, backends, compiler, devices."""

import os
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from polaformer import __version__
from polaformer.bench.machine import fingerprint
from polaformer.ops.gated_convolution import cpu as convolution
from polaformer.ops.native import cache, compiler
from polaformer.ops.polarity import backends, cpu
from polaformer.ops.processor import bfloat16_unavailable_reason

# Packages that are reported, and the extra that installs each; "" for those that are always installed.
PACKAGES = {
    "torch": "",
    "torchvision": "",
    "timm": "",
    "numpy": "",
    "safetensors": "",
    "triton": "",
    "accelerate": "train",
    "scikit-learn": "train",
    "matplotlib": "train",
    "tensorboard": "train",
    "datasets": "data",
    "webdataset": "data",
    "onnx": "export",
    "onnxruntime": "export",
}


def environment() -> dict[str, Any]:
    """Everything as numbers and strings; never fails because something is broken."""
    return {
        "backends": {one.name: {"works": one.works, "reason": in_home(one.reason)} for one in _statuses()},
        "versions": {"polaformer": __version__} | {name: installed(name) for name in PACKAGES},
        "machine": fingerprint() | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS")},
        "devices": devices(),
        "bfloat16_on_cpu": {"works": bfloat16_unavailable_reason() is None, "reason": bfloat16_unavailable_reason()},
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


def devices() -> list[str]:
    """The devices that PyTorch can compute on."""
    cuda = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def in_home(text: str) -> str:
    """The string with ~ in place of the user's home directory, so that it can be shared."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _statuses() -> Sequence[backends.Status]:
    """The status of the backends; if asking one raises, its error is the reason for all but the plain path."""
    try:
        return backends.status()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        torch_row = backends.Status("torch", True, backends.MODULES["torch"].describe())
        return [torch_row, *(backends.Status(name, False, reason) for name in backends.BACKENDS[2:])]


class Kernel(Protocol):
    """A module with a native kernel."""

    def unavailable_reason(self) -> str | None:
        """Why it cannot be used here; None if it can."""
        ...

    def options(self) -> list[str]:
        """What it was built with beside the options of every build."""
        ...


def _kernel(module: Kernel) -> dict[str, Any]:
    """Whether it works, and how it was built or why it does not."""
    try:
        reason, options = module.unavailable_reason(), module.options()
    except Exception as error:
        reason, options = f"{type(error).__name__}: {error}".splitlines()[0], []
    if reason is not None:
        return {"works": False, "reason": in_home(f"none, plain PyTorch serves: {reason}"), "options": []}
    told = "built for this processor" if set(options) & set(compiler.FOR_THIS_PROCESSOR) else "slow: built for any processor"
    return {"works": True, "reason": f"{told} ({' '.join(options) or 'no options of its own'})", "options": options}


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
    """The folder of built kernels, or why there is none."""
    try:
        return in_home(str(cache.cache_directory()))
    except OSError as error:
        return in_home(f"none: {error}; set POLAFORMER_CACHE to a writable directory")
