"""The tables of `bench op`, from results that are made up."""

import pytest

from polaformer.analysis.timing import Ratio, Timing
from polaformer.bench.op import OpResult
from polaformer.bench.runner import Measurement
from polaformer.cli.bench_op import shape_tables
from polaformer.cli.bench_tables import ratio_text
from polaformer.cli.output import print_all

PUBLISHED, COMPILED, OURS = "polarity (published)", "published, torch.compile", "polarity (cpu)"


def _result(speedups: dict[str, float], saved: int | None) -> OpResult:
    timing = Timing((0.001, 0.001), 0.001)
    rows = {}
    for name, speedup in speedups.items():
        over = Ratio.of([speedups[OURS] / speedup])
        rows[name] = Measurement(1e-7, timing, Ratio.of([speedup]), sizes={"saved": saved}, fastest_over=over)
    return OpResult(rows, None, OURS, [])


@pytest.mark.parametrize("compiled_at", [0, 1])
@pytest.mark.parametrize(("mode", "saved", "tables"), [("forward", None, 2), ("both", 4096, 3)])
def test_what_was_compiled_at_one_shape_and_not_at_another_is_shown_at_the_one(
    compiled_at: int, mode: str, saved: int | None, tables: int, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    without, whole = {PUBLISHED: 1.0, OURS: 4.0}, {PUBLISHED: 1.0, COMPILED: 1.6, OURS: 4.0}
    speedups = [whole, without] if compiled_at == 0 else [without, whole]
    shapes = ["1,2,24,6", "1,2,48,6"]
    print_all(*shape_tables({shape: _result(one, saved) for shape, one in zip(shapes, speedups, strict=True)}, mode))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "not compiled" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    values = ["1.60 (1.6–1.6)", "2.50 (2.5–2.5)", "1.000"][:tables]
    names = [COMPILED, COMPILED, f"bytes: {COMPILED}"]
    cells = [[value, "not compiled"] if compiled_at == 0 else ["not compiled", value] for value in values]
    assert rows == [[name, *pair] for name, pair in zip(names, cells, strict=False)]


def test_a_ratio_with_too_wide_an_interval_shows_no_median() -> None:
    assert ratio_text(Ratio.of([1.0, 1.2, 1.4])) == "1.20 (1–1.4)"
    assert ratio_text(Ratio.of([1.0, 1.2, 1.6])) == "noisy: 1–1.6"
