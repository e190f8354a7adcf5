"""Masks are those of pycocotools, bit by bit, whatever they are made from; run lengths are read without trusting them."""

import random
from importlib import util

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coco_files import runs
from polaformer import extras
from polaformer.data import masks
from polaformer.errors import MissingExtraError

coco = pytest.importorskip("pycocotools.mask")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools
SIZE = (31, 47)


def as_pycocotools(polygons: list[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    return coco.decode(coco.merge(coco.frPyObjects([one.reshape(-1).tolist() for one in polygons], *size)))


def random_polygons(draw: np.random.Generator, size: tuple[int, int], reach: float = 0.3) -> tuple[np.ndarray, ...]:
    """Polygons that may leave the image by a share of its sides, cross themselves, or be very small."""
    sides = np.array(size[::-1])
    numbers = draw.integers(3, 12, draw.integers(1, 4))
    scales = draw.choice([0.02, 0.3, 1.0], len(numbers))
    centres = draw.uniform(-reach, 1 + reach, (len(numbers), 1, 2))
    spread = [scale * draw.uniform(-0.5, 0.5, (n, 2)) for n, scale in zip(numbers, scales, strict=True)]
    return tuple(np.round((centre + one) * sides, 2) for centre, one in zip(centres, spread, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_polygons_become_the_masks_of_pycocotools(seed: int) -> None:
    draw = np.random.default_rng(seed)
    objects = [random_polygons(draw, SIZE) for _ in range(5)]
    wanted = [as_pycocotools(list(polygons), SIZE) for polygons in objects]
    for polygons, mask in zip(objects, wanted, strict=True):
        assert np.array_equal(masks.mask_of(polygons, SIZE), mask)
        assert masks.has_pixels(masks.rle_of(polygons, SIZE)) == mask.any()
    assert torch.equal(masks.masks_of(objects, SIZE), torch.from_numpy(np.stack(wanted)))


def test_several_polygons_of_an_object_are_one_mask() -> None:
    one, other = (np.array([[x, 2], [x + 6, 2], [x + 6, 9], [x, 9]], dtype=float) for x in (3, 20))
    found = masks.mask_of((one, other), SIZE)
    assert found.dtype == np.uint8
    assert (found.sum(), found[2:9, 3:9].sum(), found[2:9, 20:26].sum()) == (84, 42, 42)


def test_no_objects_no_polygons_and_objects_outside_are_empty_masks() -> None:
    outside = (np.array([[100.0, 100], [120, 100], [120, 120]]),)
    assert masks.masks_of([], SIZE).shape == (0, *SIZE)
    for segmentation in ((), outside):
        assert not masks.masks_of([segmentation], SIZE).any()
        assert not masks.has_pixels(masks.rle_of(segmentation, SIZE))


@given(seed=st.integers(0, 2**32), height=st.integers(1, 40), width=st.integers(1, 40), share=st.floats(0, 1))
def test_law_a_mask_comes_back_from_its_run_lengths(seed: int, height: int, width: int, share: float) -> None:
    mask = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    rle = masks.rle_from_mask(mask)
    assert rle == {"size": [height, width], "counts": coco.encode(np.asfortranarray(mask))["counts"].decode()}
    assert rle == masks.rle_from_mask(torch.from_numpy(mask).bool())
    assert masks.run_lengths(rle["counts"]).tolist() == runs(mask)
    assert masks.compressed(runs(mask), (height, width)) == rle
    assert np.array_equal(masks.mask_of(rle, (height, width)), mask)
    assert np.array_equal(masks.masks_of([rle, rle], (height, width))[1].numpy(), mask)


@given(st.text(alphabet=[chr(code) for code in range(44, 116)], max_size=30))
def test_law_no_text_crashes_the_reader_of_run_lengths(text: str) -> None:
    try:
        found = masks.run_lengths(text)
    except ValueError:
        return
    assert found.dtype == np.int64
    assert np.abs(found).max() < 2**40


def test_long_runs_are_read_as_they_were_written() -> None:
    choose = random.Random(0)
    for _ in range(50):
        lengths = [choose.choice([0, 1, 15, 16, 17, 31, 32, 1023, 1024, 2**20 + 1]) for _ in range(choose.randint(1, 12))]
        rle = masks.compressed(lengths, (1, sum(lengths)))
        assert masks.run_lengths(rle["counts"]).tolist() == lengths


def test_what_pycocotools_would_misread_is_refused() -> None:
    with pytest.raises(ValueError, match="a polygon has 2 points; at least 3 are needed"):
        masks.mask_of((np.array([[1.0, 2], [3, 4]]),), SIZE)
    rle = masks.rle_from_mask(np.ones((5, 6), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"the run lengths are for \[5, 6\], but the image has \[6, 5\] \(height, width\)"):
        masks.mask_of(rle, (6, 5))


def test_without_pycocotools_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = util.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "pycocotools" else find_spec(name))
    masks._pycocotools.cache_clear()
    with pytest.raises(MissingExtraError, match=r'pycocotools not installed; run: pip install "polaformer\[train\]"'):
        masks.rle_from_mask(np.ones((5, 6), dtype=np.uint8))
