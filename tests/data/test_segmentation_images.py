"""Images with a class per pixel as batches: a function of (seed, epoch, index) for any number of workers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Resampling

from arena import shared
from pictures import taken
from polaformer.data.order import EvaluationOrder, Key, Order
from polaformer.data.padded_images import normalised
from polaformer.data.samples import Samples
from polaformer.data.segmentation_images import SegmentationBatch, SegmentationReader
from polaformer.data.segmentation_transforms import RandomScaleCrop, ResizeShorter
from polaformer.data.sources.label_sets import IGNORED
from polaformer.data.sources.semantic import SemanticSource, open_semantic
from polaformer.errors import ImageError
from semantic_files import HEIGHT, WIDTH, mask, picture, save, source_of, write_pairs, write_semantic

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SAME = RandomScaleCrop(40, (HEIGHT, 100), (1, 1), hflip=0, photometric=False)  # keeps images of 32×24
RANDOM = RandomScaleCrop(20, (HEIGHT, 100))


def reader_of(source: SemanticSource, transform: Any = None, training: bool = True, **changes: Any) -> SegmentationReader:
    return SegmentationReader(source, transform or (SAME if training else ResizeShorter(None)), MEAN, STD, training, **changes)


def read(reader: SegmentationReader) -> SegmentationBatch:
    """All images in one batch."""
    indices = list(range(len(reader)))
    return reader.collate([reader.read(index) for index in indices], indices, [])


def assert_same(found: SegmentationBatch, wanted: SegmentationBatch) -> None:
    for name in ("images", "mask", "labels", "indices"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    assert (found.sizes, found.bad, len(found.truths)) == (wanted.sizes, wanted.bad, len(wanted.truths))
    for views, others in zip([*found.views, found.truths], [*wanted.views, wanted.truths], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(views, others, strict=True))


@pytest.fixture
def source(tmp_path: Path) -> SemanticSource:
    """Two images of 32×24, and one of 20×30."""
    write_pairs(tmp_path / "images", tmp_path / "masks", ["a", "b"])
    save(tmp_path / "images" / "c.png", picture(2, 30, 20))
    save(tmp_path / "masks" / "c.png", mask(2, 30, 20))
    return source_of(tmp_path)


# Training


def test_labels_are_those_of_the_masks_and_ignored_around_the_image(source: SemanticSource) -> None:
    batch = read(reader_of(source.subset([0, 1])))
    assert (batch.labels.shape, batch.labels.dtype) == ((2, 64, 64), torch.uint8)  # 40, in multiples of 32
    for index, labels in enumerate(batch.labels):
        wanted = np.where(mask(index) == 9, IGNORED, mask(index))
        assert np.array_equal(labels[:HEIGHT, :WIDTH].numpy(), wanted)
        assert labels.sum().item() == wanted.sum() + IGNORED * (64 * 64 - HEIGHT * WIDTH)
    assert (batch.sizes, batch.truths) == ([(HEIGHT, WIDTH)] * 2, [])


def test_images_are_normalised_and_padded_with_zeros(source: SemanticSource) -> None:
    batch = read(reader_of(source.subset([0, 1])))
    assert (batch.images.shape, batch.mask.shape) == ((2, 3, 64, 64), (2, 64, 64))
    pixels = torch.from_numpy(picture(1)).permute(2, 0, 1) / 255
    wanted = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(batch.images[1, :, :HEIGHT, :WIDTH], wanted)
    assert batch.mask.sum().item() == 2 * HEIGHT * WIDTH
    assert not batch.images.masked_select(~batch.mask[:, None]).any()
    assert (batch.labels[~batch.mask] == IGNORED).all()


def test_crops_are_padded_to_the_size_of_a_crop_and_a_multiple(source: SemanticSource) -> None:
    for size, multiple, wanted in ((20, 32, 32), (32, 32, 32), (33, 32, 64), (40, 1, 40), (100, 10, 100)):
        transform = RandomScaleCrop(size, (16, 100), (1, 1))
        assert read(reader_of(source, transform, multiple=multiple)).images.shape == (3, 3, wanted, wanted)


def test_images_of_one_channel_are_read_as_such(source: SemanticSource) -> None:
    reader = SegmentationReader(source, RANDOM, (0.5,), (0.25,), True)
    assert read(reader).images.shape == (3, 1, 32, 32)


# Evaluation


def test_truths_are_in_original_pixels_and_images_are_resized(source: SemanticSource) -> None:
    batch = read(reader_of(source, ResizeShorter(48, 200), training=False))
    assert [[tuple(view.shape) for view in views] for views in batch.views] == [[(3, 48, 64)], [(3, 48, 64)], [(3, 72, 48)]]
    assert (batch.images.shape, batch.mask.shape, batch.sizes) == ((3, 3, 0, 0), (3, 0, 0), [])
    assert (batch.labels.shape, batch.labels.dtype) == ((3, 0, 0), torch.uint8)
    assert [truth.shape for truth in batch.truths] == [(HEIGHT, WIDTH), (HEIGHT, WIDTH), (30, 20)]
    for index, truth in enumerate(batch.truths):
        assert truth.dtype == torch.uint8
        assert np.array_equal(truth.numpy(), source.label_map(index))


def test_every_scale_of_an_image_is_resized_from_the_original_pixels(source: SemanticSource) -> None:
    """One that shrinks below the evaluation's size and one that grows beyond the original are not blurred by another resize."""
    [views] = read(reader_of(source.subset([0]), ResizeShorter(12, 200, (1.0, 0.5, 2.0)), training=False)).views
    image = source.pair(0)[0]
    for view, size in zip(views, ((16, 12), (8, 6), (32, 24)), strict=True):
        assert torch.equal(view, normalised(image.resize(size, Resampling.BILINEAR), MEAN, STD))
    [kept, half] = read(reader_of(source.subset([0]), ResizeShorter(None, scales=(1.0, 0.5)), training=False)).views[0]
    assert torch.equal(kept, normalised(image, MEAN, STD))
    assert torch.equal(half, normalised(image.resize((16, 12), Resampling.BILINEAR), MEAN, STD))


# Order, workers, files


@pytest.mark.parametrize("training", [True, False])
def test_empty_batches_have_empty_tensors(training: bool, source: SemanticSource) -> None:
    empty = reader_of(source, training=training).collate([], [], ["b.png is damaged"])
    side = 64 if training else 0
    assert (len(empty), empty.images.shape, empty.mask.shape) == (0, (0, 3, side, side), (0, side, side))
    assert empty.labels.shape == ((0, 64, 64) if training else (0, 0, 0))
    assert (empty.sizes, empty.truths, empty.bad) == ([], [], ["b.png is damaged"])
    assert_same(SegmentationBatch.unflatten(*empty.flatten("0")), empty)


@pytest.mark.parametrize("training", [True, False])
def test_batches_are_bitwise_equal_whatever_the_number_of_workers(training: bool, tmp_path: Path) -> None:
    source = open_semantic(write_semantic(tmp_path)).train
    reader = reader_of(source, RANDOM if training else ResizeShorter(40, 80), training=training)

    def first_batches(num_workers: int, seed: int = 3) -> list[SegmentationBatch]:
        keys = Order(len(source), 2, seed).micro_batches(0) if training else EvaluationOrder(len(source), 2)
        return taken(Samples(reader, seed=seed), keys, 4 if training else 3, num_workers)

    alone, with_workers = first_batches(0), first_batches(2)
    for one, other in zip(alone, with_workers, strict=True):
        assert_same(one, other)
    if training:
        assert not all(torch.equal(one.labels, other.labels) for one, other in zip(alone, first_batches(0, 4), strict=True))


def test_a_sample_depends_on_seed_epoch_and_index_alone(source: SemanticSource) -> None:
    samples = Samples(reader_of(source, RANDOM), seed=1)
    first = samples[Key(2, 1)].content
    samples[Key(0, 0)]
    torch.rand(3)
    again, other_epoch = samples[Key(2, 1)].content, samples[Key(3, 1)].content
    assert torch.equal(first.views[0], again.views[0])
    assert torch.equal(first.labels, again.labels)
    assert first.views[0].shape != other_epoch.views[0].shape or not torch.equal(first.views[0], other_epoch.views[0])


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_survives_a_file(training: bool, source: SemanticSource) -> None:
    batch = read(reader_of(source, training=training))
    tensors, outline = batch.flatten("0")
    assert_same(SegmentationBatch.unflatten(tensors, json.loads(json.dumps(outline))), batch)


def test_half_precision_is_for_images_and_labels_stay_whole(source: SemanticSource) -> None:
    batch = read(reader_of(source)).to(torch.device("cpu"), torch.bfloat16)
    assert (batch.images.dtype, batch.mask.dtype, batch.labels.dtype) == (torch.bfloat16, torch.bool, torch.uint8)
    moved = read(reader_of(source, training=False)).to(torch.device("meta"))
    assert moved.views[0][0].is_meta
    assert all(truth.is_meta for truth in moved.truths)
    assert not moved.indices.is_meta


@pytest.mark.parametrize("replace", [True, False])
def test_a_bad_mask_is_replaced_or_left_out(replace: bool, tmp_path: Path) -> None:
    source = open_semantic(write_semantic(tmp_path)).train
    save(tmp_path / "annotations" / "training" / "3.png", mask(width=WIDTH + 4))
    samples = Samples(reader_of(source), seed=0, on_bad="skip", replace=replace)
    (batch,) = taken(samples, iter([[Key(0, 2), Key(0, 3)]]), 1, 0)
    assert len(batch) == len(batch.labels) == len(batch.sizes) == 1 + replace
    assert 2 not in batch.indices
    assert ["3.png has 36×24 pixels, but its image" in line for line in batch.bad] == [True]
    with pytest.raises(ImageError, match=r"3\.png has 36×24 pixels"):
        Samples(reader_of(source), seed=0)[Key(0, 2)]


def test_camvid_becomes_training_samples() -> None:
    source = open_semantic(str(shared("camvid"))).train.subset([0, 100, 200, 300])
    batch = read(reader_of(source, RandomScaleCrop(360, (360, 480))))
    assert batch.images.shape == (4, 3, 384, 384)
    assert set(batch.labels.unique().tolist()) <= {*range(11), IGNORED}
    assert (batch.labels != IGNORED).float().mean() > 0.3
