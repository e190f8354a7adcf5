"""The benchmark of whole models: the right rivals, the right comparison, no number for a wrong one."""

from dataclasses import replace

import pytest
import timm
import torch

from models import SMALL
from polaformer.attention.layer.published_layer import PublishedLayer
from polaformer.backbones import list_models
from polaformer.bench import model as bench_model
from polaformer.bench import runner
from polaformer.bench.model import OURS, PUBLISHED, TIMM, TWIN, as_record, benchmark, build
from polaformer.bench.runner import BenchSettings, Measurement

QUICK = BenchSettings(rounds=1, seconds=40.0, batch=2)  # one round: several may disagree, and are then refused


def small(name: str, **settings: object) -> dict[str, Measurement]:
    return benchmark(64, name, replace(QUICK, **settings), num_classes=5, **SMALL[name])[0]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_large_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "TIMM", {})


@pytest.mark.parametrize("name", ["pola_swin_tiny", "pola_pvt_tiny", "pola_deit_tiny"])
def test_ours_agrees_with_the_published_form_and_all_are_timed_in_turns(name: str) -> None:
    told: list[str] = []
    rows = small(name, on_call=told.append)
    assert list(rows) == [OURS, PUBLISHED, TWIN]
    assert told[:3] == list(rows)
    assert sorted(told) == sorted(2 * list(rows))
    assert 1e-8 < (rows[OURS].error or 0.0) < 1e-5
    assert all((row.images_per_second or 0) > 0 for row in rows.values())
    assert rows[OURS].speedup == (1.0, 1.0, 1.0, 1)
    assert rows[PUBLISHED].speedup is not None


def test_a_training_step_compares_gradients_and_counts_what_is_saved() -> None:
    rows = small("pola_pvt_tiny", backward=True)
    assert (rows[OURS].gradients_error or 1.0) < 1e-4
    ratio = rows[PUBLISHED].saved_ratio
    assert ratio is not None
    assert 0.1 < ratio < 0.95
    assert as_record(rows[PUBLISHED])["saved_ratio"] == ratio
    assert as_record(rows[OURS])["correct"]


@pytest.mark.parametrize("name", ["pola_swin_tiny", "pola_pvt_tiny", "pola_deit_tiny"])
def test_a_model_that_differs_from_the_published_form_gets_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: torch.nn.Module) -> torch.nn.Module:
        """A hundredth is missing from the powers of the first layer."""
        changed = as_published(model)
        layer = next(module for module in changed.modules() if isinstance(module, PublishedLayer))
        layer.core.alpha *= 0.99
        return changed

    as_published = bench_model.as_published
    monkeypatch.setattr(bench_model, "as_published", wrong)
    row = small(name)[OURS]
    assert (row.error or 0.0) > 1e-4
    assert not row.correct
    assert row.timing is None


def test_what_would_take_too_long_or_too_much_memory_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (small("pola_deit_tiny", seconds=1e-6)[TWIN].skipped or "").startswith("would take about")
    monkeypatch.setattr(runner, "available_bytes", lambda: 1)
    assert "GB of memory" in (small("pola_deit_tiny", backward=True)[TWIN].skipped or "")


def test_powers_scales_and_tables_of_ours_are_not_trivial_and_the_same_each_time() -> None:
    first, second = (build("pola_deit_tiny", 64, **SMALL["pola_deit_tiny"])[OURS].state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    for part in ("core.power", "core.scale", "key_positions.rows"):
        assert all(value.std() > 0.01 for key, value in first.items() if key.endswith(part))


def test_timms_model_of_the_same_size_is_a_rival_where_there_is_one() -> None:
    ours = {name.removeprefix("pola_") for name in list_models("pola_*")}
    assert set(TIMM) <= ours
    assert all(timm.is_model(name) for name in TIMM.values())
    assert {"swin_tiny", "deit_tiny", "pvt_v2_b0"} <= set(TIMM)
    assert not any(name.startswith("pvt_t") for name in TIMM)
