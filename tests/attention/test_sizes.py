"""Batches of images of different sizes in one layer: all that is sized by the grid follows each image's own size."""

import pytest
import torch

from layers import pola, tokens
from polaformer.attention.layer.token_table import TokenTable

LARGE, SIZES = (6, 8), [(6, 5), (3, 8), (4, 4)]


def batch_of(images):
    """Images (1, h·w, C) of SIZES at the top left of a grid that is NaN elsewhere, and their mask."""
    batch = torch.full((len(images), *LARGE, images[0].shape[-1]), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(images), *LARGE, dtype=torch.bool)
    for index, (image, (height, width)) in enumerate(zip(images, SIZES, strict=True)):
        batch[index, :height, :width], mask[index, :height, :width] = image[0].unflatten(0, (height, width)), True
    return batch.flatten(1, 2), mask.flatten(1)


@pytest.mark.parametrize(
    "options",
    [
        {"key_positions": (5, 5)},
        {"key_positions": (5, 5), "gate": "matrix"},
        {"key_positions": (5, 5), "reduction": 2},
        {"key_positions": (5, 5), "reduction": 2, "gate": "matrix", "kernel_size": 3},
        {"reduction": 3},
        {},
    ],
    ids=str,
)
def test_padding_law_with_sizes(options):
    layer = pola(**options)
    images = [tokens(height * width, batch=1) for height, width in SIZES]
    batch, mask = batch_of(images)
    out = layer(batch, LARGE, mask, sizes=SIZES).unflatten(1, LARGE)
    maps = layer.maps(batch, LARGE, mask, sizes=SIZES)
    for index, (image, size) in enumerate(zip(images, SIZES, strict=True)):
        alone = layer(image, size)[0].unflatten(0, size)
        assert torch.allclose(out[index, : size[0], : size[1]], alone, rtol=1e-9, atol=1e-9)
        for name, own in layer.maps(image, size).items():
            keys = maps[name][index].sum(dim=-2) != 0
            assert keys.any(dim=0).sum() == own.shape[-1]


def test_without_sizes_the_table_is_that_of_the_padded_grid():
    layer = pola(key_positions=(5, 5))
    images = [tokens(height * width, batch=1) for height, width in SIZES]
    batch, mask = batch_of(images)
    assert not torch.allclose(layer(batch, LARGE, mask), layer(batch, LARGE, mask, sizes=SIZES))


def test_a_table_for_sizes_holds_each_samples_own_rows_and_zeros():
    table = TokenTable((3, 4), 2, num_prefix_tokens=1)
    torch.nn.init.normal_(table.rows)
    rows = table((5, 6), sizes=[(3, 4), (5, 2)])
    assert rows.shape == (2, 31, 2)
    assert torch.equal(rows[:, 0], table.rows[:1].expand(2, -1))
    image = rows[:, 1:].unflatten(1, (5, 6))
    assert torch.equal(image[0, :3, :4].flatten(0, 1), table.rows[1:])
    assert torch.equal(image[1, :5, :2].flatten(0, 1), table((5, 2))[1:])
    assert not image[0, 3:].any()
    assert not image[0, :, 4:].any()
    assert not image[1, :, 2:].any()


def test_a_table_is_resized_in_its_mode():
    rows = torch.randn(12, 2)
    for mode in ("bilinear", "bicubic"):
        table = TokenTable((3, 4), 2, mode=mode)
        table.rows.data = rows
        expected = torch.nn.functional.interpolate(rows.T.reshape(1, 2, 3, 4), (5, 7), mode=mode)[0].flatten(1).T
        assert torch.allclose(table((5, 7)), expected)
        at_run_time = table((5, 7)).detach()
        table.resize((5, 7))
        assert torch.equal(table((5, 7)), at_run_time)
        assert table.rows.shape == (35, 2)


def test_set_grid_resizes_everything_that_is_sized_by_the_grid():
    layer = pola(key_positions=(4, 4), gate="matrix", reduction=2)
    x = tokens(6 * 7)
    before = layer(x, (6, 7))
    layer.set_grid((6, 7))
    assert layer.key_positions.size == (3, 4)
    assert layer.gate.size == (6, 7)
    assert torch.allclose(layer(x, (6, 7)), before)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("sizes has 1 entries for 3 samples", [(6, 5)]),
        (r"sizes has \(7, 5\), outside the grid \(6, 8\)", [(6, 5), (7, 5), (4, 4)]),
        (r"sizes has \(0, 5\), outside the grid", [(6, 5), (0, 5), (4, 4)]),
    ],
)
def test_wrong_sizes_are_refused(message, sizes):
    with pytest.raises(ValueError, match=message):
        pola()(tokens(48, batch=3), LARGE, sizes=sizes)


def test_sizes_need_a_grid_and_no_other_context():
    with pytest.raises(ValueError, match="give grid="):
        pola()(tokens(48, batch=3), sizes=SIZES)
    with pytest.raises(ValueError, match="give grid="):
        pola()(tokens(48, batch=3), LARGE, context=tokens(5, batch=3), sizes=SIZES)
