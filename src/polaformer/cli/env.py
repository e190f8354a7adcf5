"""`polaformer env`: installed versions, available backends, and why the others are unavailable."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from polaformer.cli.output import load, new_table, print_all, print_json, steps


@dataclass(frozen=True)
class Env:
    """Show backends (and why some are unavailable), versions, devices and the machine.

    Builds the native kernels if they are not built yet, which takes a few seconds.

    Example: polaformer env --json
    """

    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Collects and prints."""
        with steps({"loading PyTorch": 3.0, "checking backends": 3.0}) as begin:
            begin("loading PyTorch")
            load("polaformer.analysis.machine")
            from polaformer.analysis.machine import environment

            begin("checking backends")
            found = environment()
        if self.json:
            print_json({"command": "env"} | found)
        else:
            print_all(_backends_table(found["backends"]), _versions_table(found["versions"]), _machine_table(found))
        return 0


def _backends_table(backends: dict[str, dict[str, Any]]) -> Table:
    table = _text_table("Backends of polarity_attention", "backend", "available", "description, or why unavailable")
    for name, one in backends.items():
        table.add_row(name, "yes" if one["works"] else "no", one["reason"])
    return table


def _versions_table(versions: dict[str, str | None]) -> Table:
    from polaformer.analysis.machine import PACKAGES

    table = _text_table("Versions", "package", "version")
    for name, version in versions.items():
        extra = PACKAGES.get(name, "")
        how = f'pip install "polaformer[{extra}]"' if extra else f"pip install {name}"
        table.add_row(name, version or f"not installed: {how}")
    return table


def _machine_table(found: dict[str, Any]) -> Table:
    machine = found["machine"]
    table = _text_table("Machine", "", "")
    rows = {
        "processor": f"{machine['cpu']}, {machine['cores']} cores",
        "PyTorch threads": f"{machine['torch_threads']} (OMP_NUM_THREADS is {machine['omp_num_threads'] or 'not set'})",
        "system": f"{machine['os']}, Python {machine['python']}",
        "devices": ", ".join(found["devices"]),
        "bfloat16 on the CPU": found["bfloat16_on_cpu"]["reason"] or "works",
        "C++ compiler": found["compiler"] or "none found; install g++ or clang++, or name one in the environment variable CXX",
        "kernel cache": found["kernel_cache"],
    } | {f"kernel of {name}": one["reason"] for name, one in found["kernels"].items()}
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _text_table(title: str, *columns: str) -> Table:
    table = new_table(title, *columns)
    table.show_header = any(columns)
    for column in table.columns:
        column.justify = "left"
    return table
