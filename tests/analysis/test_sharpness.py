"""Positive sequence entropy (Eq. 7) of three mechanisms on the same queries and keys, and its figure."""

import sys
from math import log
from pathlib import Path

import pytest
import torch

from polaformer.analysis import figures
from polaformer.analysis.sharpness import Sharpness, compare, digit_images, pixel_tokens, random_queries_and_keys
from polaformer.extras import MissingExtraError
from polaformer.ops.polarity.operator import polarity_attention

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return digit_images(8)


@pytest.fixture(scope="module")
def found(images: torch.Tensor) -> list[Sharpness]:
    return compare(*random_queries_and_keys(pixel_tokens(images)))


def by_name(found: list[Sharpness]) -> dict[tuple[str, float | None], Sharpness]:
    return {(one.mechanism, one.power): one for one in found}


def test_softmax_linear_and_both_streams_at_every_power_are_compared(found: list[Sharpness]) -> None:
    streams = [(f"polarity, {sign} sign", power) for power in (1.0, 2.0, 3.0, 5.0) for sign in ("same", "opposite")]
    assert [(one.mechanism, one.power) for one in found] == [("softmax", None), ("linear", None), *streams]


def test_every_row_of_every_map_sums_to_one(found: list[Sharpness]) -> None:
    for one in found:
        assert one.weights.shape == (8, 4, 64, 64)
        torch.testing.assert_close(one.weights.sum(dim=-1), torch.ones(8, 4, 64))


def test_on_digits_a_larger_power_is_sharper_in_both_streams(found: list[Sharpness]) -> None:
    for sign in ("same", "opposite"):
        means = [one.mean for one in found if one.mechanism == f"polarity, {sign} sign"]
        assert means == sorted(means, reverse=True)


def test_on_digits_plain_linear_attention_is_nearly_uniform_and_polarity_is_sharper(found: list[Sharpness]) -> None:
    mechanisms = by_name(found)
    assert mechanisms["linear", None].fraction > 0.99
    assert mechanisms["polarity, same sign", 3.0].fraction < mechanisms["softmax", None].fraction < 0.95


def test_equal_keys_have_the_entropy_of_uniform_attention() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 1, 8).expand(1, 2, 7, 8)
    for one in compare(q, k):
        assert one.mean == pytest.approx(log(7), abs=1e-5)
        assert one.fraction == pytest.approx(1.0, abs=1e-5)


def test_the_maps_are_those_that_the_operator_applies(images: torch.Tensor, found: list[Sharpness]) -> None:
    q, k = random_queries_and_keys(pixel_tokens(images))
    v, power = torch.randn_like(k), torch.full((4, 32), 3.0)
    mechanisms = by_name(found)
    same, opposite = (mechanisms[f"polarity, {sign} sign", 3.0].weights for sign in ("same", "opposite"))
    by_maps = torch.cat([same @ v[..., :16], opposite @ v[..., 16:]], dim=-1)
    torch.testing.assert_close(by_maps, polarity_attention(q, k, v, power), rtol=1e-4, atol=1e-5)


def test_pixel_tokens_are_standardised_and_hold_neighbourhood_and_place(images: torch.Tensor) -> None:
    tokens = pixel_tokens(images)
    assert tokens.shape == (8, 64, 11)
    torch.testing.assert_close(tokens.mean(dim=(0, 1)), torch.zeros(11), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.std(dim=(0, 1)), torch.ones(11))
    centre = images.flatten(1)
    torch.testing.assert_close(tokens[..., 4], (centre - centre.mean()) / centre.std())
    assert tokens[0, :8, 10].diff().min() > 0  # the column grows along the first row


def test_queries_and_keys_have_about_unit_variance_and_depend_on_the_seed_alone(images: torch.Tensor) -> None:
    tokens = pixel_tokens(images)
    q, k = random_queries_and_keys(tokens, seed=3)
    again, _ = random_queries_and_keys(tokens, seed=3)
    other, _ = random_queries_and_keys(tokens, seed=4)
    assert q.shape == k.shape == (8, 4, 64, 32)
    assert 0.7 < float(q.var()) < 1.3
    assert 0.7 < float(k.var()) < 1.3
    assert torch.equal(q, again)
    assert not torch.equal(q, other)
    assert not torch.equal(q, k)


def test_the_figure_of_sharpness_is_a_png(tmp_path: Path, images: torch.Tensor, found: list[Sharpness]) -> None:
    figures.save_sharpness(tmp_path / "sharpness.png", found, images[0], query=(2, 2), title="digits")
    assert (tmp_path / "sharpness.png").read_bytes().startswith(PNG)


def test_the_figure_of_times_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    times, slopes = {"a": [1e-3, 2e-3, 4e-3], "b": [1e-3, 4e-3, None], "c": [None] * 3}, {"a": 1.0, "b": 2.0, "c": None}
    figures.save_times(tmp_path / "time.png", [10, 20, 40], times, slopes, title="times")
    assert (tmp_path / "time.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_error_is_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "polaformer\[train\]"'):
        figures.save_times(tmp_path / "time.png", [1, 2], {"a": [1.0, 2.0]}, {"a": 1.0}, title="times")
    assert not (tmp_path / "time.png").exists()


def test_without_scikit_learn_the_error_is_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r'sklearn not installed; run: pip install "polaformer\[train\]"'):
        digit_images(1)
