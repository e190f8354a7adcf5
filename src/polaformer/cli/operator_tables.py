"""The findings of `polaformer demo operator` as tables and as a record for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from polaformer import __version__
from polaformer.cli.demo_operator import NUM_HEADS, POWER, QUERIES_AND_KEYS, SHAPE, WIDTH, Findings
from polaformer.cli.output import machine_lines, new_table, print_all, threads_text

if TYPE_CHECKING:
    from polaformer.analysis.agreement import Difference
    from polaformer.analysis.timing import Timing


def show(findings: Findings, paths: Sequence[Path]) -> None:
    """Prints the tables, the machine, and where the files are."""
    tables = (_agreement(findings), _safety(findings), _sharpness(findings), _times(findings))
    print_all(*tables, *machine_lines(findings.machine), *(f"saved {path.as_posix()}" for path in paths))


def as_record(findings: Findings, seed: int) -> dict[str, Any]:
    """Everything as numbers and strings, for JSON."""
    return {
        "command": "demo operator",
        "version": __version__,
        "seed": seed,
        "machine": findings.machine,
        "shape": SHAPE,
        "agreement": {dtype: {name: asdict(one) for name, one in found.items()} for dtype, found in findings.agreement.items()},
        "safety": {
            f"{size:g}": {form: {name: asdict(one) for name, one in found.items()} for form, found in forms.items()}
            for size, forms in findings.safety.items()
        },
        "queries_and_keys": QUERIES_AND_KEYS,
        "sharpness": [
            {"mechanism": one.mechanism, "power": one.power, "entropy_nats": one.mean, "fraction_of_log_m": one.fraction}
            for one in findings.sharpness
        ],
        "times": [
            {"length": length, "speedup": _speedup(one)} | {name: timing.as_record() for name, timing in one.items()}
            for length, one in findings.timings.items()
        ],
        "slopes": findings.times()[2],
    }


def _agreement(findings: Findings) -> Table:
    table = new_table(
        "Agreement with the quadratic form",
        "difference of",
        *(f"{dtype}\n{kind}" for dtype in findings.agreement for kind in ("largest", "relative")),
        caption=f"against explicit N×M maps in float64; (batch, heads, tokens, width) = {SHAPE}, powers 1 to 5;\n"
        "largest: of the absolute differences; relative: ‖difference‖ / ‖reference‖",
    )
    for name in next(iter(findings.agreement.values())):
        found = [differences[name] for differences in findings.agreement.values()]
        label = name if name == "output" else f"gradient of {name}"
        table.add_row(label, *(f"{value:.1e}" for one in found for value in (one.largest, one.relative)))
    return table


def _safety(findings: Findings) -> Table:
    table = new_table(
        "Safety: the same in float32 with q and k scaled up and down",
        "q and k",
        "output",
        "worst gradient",
        "NaN",
        "zeros",
        caption=f"relative differences from the float64 form, all powers {POWER:g}; NaN, zeros: share of the output;\n"
        "published: the authors' formulation, with their eps = 1e-6",
    )
    for size, forms in findings.safety.items():
        for form, found in forms.items():
            output = found["output"]
            shares = (f"{100 * share:.0f} %" for share in (output.nan_share, output.zero_share))
            table.add_row(f"× {size:g}, {form}", f"{output.relative:.1e}", f"{_worst_gradient(found):.1e}", *shares)
    return table


def _worst_gradient(found: "dict[str, Difference]") -> float:
    from polaformer.analysis.agreement import worst

    return worst({name: one for name, one in found.items() if name != "output"})


def _sharpness(findings: Findings) -> Table:
    num_keys = findings.sharpness[0].weights.shape[-1]
    table = new_table(
        "Sharpness: positive sequence entropy (Eq. 7), less is sharper",
        "mechanism",
        "power",
        "mean entropy (nats)",
        f"of ln {num_keys} = {log(num_keys):.3f}",
        caption=f"Queries and keys: {QUERIES_AND_KEYS}",
    )
    for one in findings.sharpness:
        power = "" if one.power is None else f"{one.power:g}"
        name = "linear (ELU + 1)" if one.mechanism == "linear" else one.mechanism
        table.add_row(name, power, f"{one.mean:.3f}", f"{100 * one.fraction:.1f} %")
    return table


def _times(findings: Findings) -> Table:
    _, _, slopes = findings.times()
    grows = "; ".join(f"{name}: time ∝ N^{power:.2f}" for name, power in slopes.items() if power is not None)
    table = new_table(
        f"Time of a forward pass, batch 1, {NUM_HEADS} heads of width {WIDTH}, float32, {threads_text(findings.machine)}",
        "tokens N",
        "polarity (ms)",
        "SDPA (ms)",
        "SDPA / polarity",
        caption=f"medians, interleaved; SDPA: torch's scaled_dot_product_attention; fitted: {grows or 'too few lengths'}",
    )
    for length, one in findings.timings.items():
        speedup = _speedup(one)
        ratio = "" if speedup is None else f"{speedup:.2f}"
        table.add_row(str(length), *(_milliseconds(one[name]) for name in ("polarity", "softmax")), ratio)
    return table


def _speedup(timings: "dict[str, Timing]") -> float | None:
    """How many times longer softmax takes."""
    from polaformer.analysis.timing import slowdown

    ratio = slowdown(timings["softmax"], timings["polarity"])
    return ratio and ratio.median


def _milliseconds(timing: "Timing") -> str:
    return f"skipped: one call took {timing.first:.1f} s" if timing.median is None else f"{1e3 * timing.median:.2f}"
