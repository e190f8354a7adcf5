"""`polaformer env`: what is installed here, which backends work, and why others do not."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from polaformer.cli.output import load, new_table, print_all, print_json, steps


@dataclass(frozen=True)
class Env:
    """Show which backends work here and why others do not, versions, devices and the machine.

    The native kernel is built if that was not done before, which takes seconds.

    Example: polaformer env --json
    """

    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Asks and prints."""
        with steps({"loading PyTorch": 3.0, "asking the backends": 3.0}) as begin:
            begin("loading PyTorch")
            load("polaformer.bench.environment")
            from polaformer.bench.environment import environment

            begin("asking the backends")
            found = environment()
        if self.json:
            print_json({"command": "env"} | found)
        else:
            print_all(_backends(found["backends"]), _versions(found["versions"]), _here(found))
        return 0


def _backends(backends: dict[str, dict[str, Any]]) -> Table:
    table = _texts("Backends of polarity_attention", "backend", "works here", "what it is, or why not")
    for name, one in backends.items():
        table.add_row(name, "yes" if one["works"] else "no", one["reason"])
    return table


def _versions(versions: dict[str, str | None]) -> Table:
    from polaformer.bench.environment import PACKAGES

    table = _texts("Versions", "package", "version")
    for name, version in versions.items():
        extra = PACKAGES.get(name, "")
        how = f'pip install "polaformer[{extra}]"' if extra else f"pip install {name}"
        table.add_row(name, version or f"not installed: {how}")
    return table


def _here(found: dict[str, Any]) -> Table:
    machine = found["machine"]
    table = _texts("Machine", "", "")
    rows = {
        "processor": f"{machine['cpu']}, {machine['cores']} cores",
        "threads of torch": f"{machine['torch_threads']} (OMP_NUM_THREADS is {machine['omp_num_threads'] or 'not set'})",
        "system": f"{machine['os']}, Python {machine['python']}",
        "devices": ", ".join(found["devices"]),
        "bfloat16 on the CPU": found["bfloat16_on_cpu"]["reason"] or "works",
        "C++ compiler": found["compiler"] or "none found; install g++ or clang++, or name one in the variable CXX",
        "built kernels": found["kernel_cache"],
    } | {f"kernel of {name}": one["reason"] for name, one in found["kernels"].items()}
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _texts(title: str, *columns: str) -> Table:
    table = new_table(title, *columns)
    table.show_header = any(columns)
    for column in table.columns:
        column.justify = "left"
    return table
