"""Annotated images as batches: a function of (seed, epoch, index) for any number of workers, with and without objects."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coco_files import HEIGHT, WIDTH, annotated, crowd, document, entry, write_coco, write_split
from pictures import taken
from polaformer.data.detection_images import DetectionBatch, DetectionReader, aspect_groups
from polaformer.data.detection_transforms import RandomCrop, RandomView, Resize
from polaformer.data.masks import mask_of, masks_of
from polaformer.data.order import EvaluationOrder, Key, Order
from polaformer.data.samples import Samples
from polaformer.data.sources.coco import CocoSource, open_coco
from polaformer.errors import ImageError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALED = RandomView((40, 48), 80, crop=RandomCrop((30, 40), 24, 36))
SAME = Resize(40, 60)  # keeps images of 60×40
TRIANGLE = [10, 5, 30, 5, 30, 20]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_coco(tmp_path)


def source_of(root: Path, annotations: list[Any]) -> CocoSource:
    """Images 1 and 2 with these annotations."""
    write_split(root, "file.json", "images", document([entry(1), entry(2)], annotations))
    return CocoSource(root / "file.json", root / "images")


def reader_of(source: CocoSource, transform: Any = SAME, **changes: Any) -> DetectionReader:
    return DetectionReader(source, transform, MEAN, STD, **{"with_masks": True, "training": True} | changes)


def read(source: CocoSource, **changes: Any) -> DetectionBatch:
    """All images of a source in one batch."""
    reader = reader_of(source, **changes)
    indices = list(range(len(source)))
    return reader.collate([reader.read(index) for index in indices], indices, [])


def assert_same(found: DetectionBatch, wanted: DetectionBatch) -> None:
    for name in ("images", "mask", "indices"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.sizes, found.truths, found.bad) == (wanted.sizes, wanted.truths, wanted.bad)
    assert len(found.targets) == len(wanted.targets)
    for one, other in zip(found.targets, wanted.targets, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


# Training


def test_targets_have_boxes_labels_and_masks_of_the_resized_image(tmp_path: Path) -> None:
    objects = [annotated(1, 1), annotated(2, 1, (1, 2, 8, 30), category_id=12), annotated(3, 2, segmentation=[TRIANGLE])]
    batch = read(source_of(tmp_path, objects), transform=Resize(80, 120))
    first, second = batch.targets
    assert first["boxes"].tolist() == [[20, 10, 60, 40], [2, 4, 18, 64]]
    assert first["boxes"].dtype == torch.float32
    assert first["labels"].tolist() == [0, 2]  # the categories 3, 7 and 12 are dog, cat and mouse
    assert first["labels"].dtype == torch.int64
    assert (first["masks"].shape, first["masks"].dtype) == ((2, 80, 120), torch.uint8)
    assert first["masks"].sum(dim=(1, 2)).tolist() == [40 * 30, 16 * 60]
    assert first["masks"][0, 10:40, 20:60].all()
    wanted = mask_of((2.0 * np.array(TRIANGLE, dtype=float).reshape(-1, 2),), (80, 120))
    assert np.array_equal(second["masks"][0].numpy(), wanted)
    assert (batch.sizes, batch.truths) == ([(80, 120)] * 2, [])


def test_images_are_normalised_and_padded_with_zeros(tmp_path: Path) -> None:
    source = source_of(tmp_path, [])
    batch = read(source)
    assert (batch.images.shape, batch.mask.shape) == ((2, 3, 64, 64), (2, 64, 64))
    pixels = torch.from_numpy(np.array(source.read(0, 3))).permute(2, 0, 1) / 255
    wanted = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(batch.images[0, :, :HEIGHT, :WIDTH], wanted)
    assert batch.mask.sum().item() == 2 * HEIGHT * WIDTH
    assert not batch.images.masked_select(~batch.mask[:, None]).any()
    assert read(source, multiple=50).images.shape[2:] == (50, 100)


def test_crowds_are_not_learned(tmp_path: Path) -> None:
    batch = read(source_of(tmp_path, [crowd(1, 1), annotated(2, 1), crowd(3, 2)]))
    assert [len(target["labels"]) for target in batch.targets] == [1, 0]
    assert batch.targets[0]["masks"][0, 5:20, 10:30].all()


def test_without_masks_none_are_made_and_objects_without_one_are_kept(tmp_path: Path) -> None:
    tiny = [[10.1, 5.1, 10.2, 5.1, 10.2, 5.2]]  # has no pixel
    source = source_of(tmp_path, [annotated(1, 1), annotated(2, 1, segmentation=None), annotated(3, 1, segmentation=tiny)])
    with_masks, without = read(source), read(source, with_masks=False)
    assert with_masks.targets[0]["masks"].shape == (1, HEIGHT, WIDTH)
    assert [target["boxes"].shape for target in with_masks.targets] == [(1, 4), (0, 4)]
    assert without.targets[0].keys() == {"boxes", "labels"}
    assert without.targets[0]["boxes"].shape == (3, 4)


@pytest.mark.parametrize("with_masks", [False, True])
def test_images_without_objects_and_empty_batches_have_empty_tensors(with_masks: bool, tmp_path: Path) -> None:
    source = source_of(tmp_path, [])
    for target in read(source, with_masks=with_masks).targets:
        assert (target["boxes"].shape, target["boxes"].dtype) == ((0, 4), torch.float32)
        assert (target["labels"].shape, target["labels"].dtype) == ((0,), torch.int64)
        assert not with_masks or target["masks"].shape == (0, HEIGHT, WIDTH)
    for training in (False, True):
        empty = reader_of(source, with_masks=with_masks, training=training).collate([], [], ["2.png is damaged"])
        assert (len(empty), empty.images.shape, empty.mask.shape) == (0, (0, 3, 32, 32), (0, 32, 32))
        assert (empty.sizes, empty.targets, empty.truths, empty.bad) == ([], [], [], ["2.png is damaged"])
        assert_same(DetectionBatch.unflatten(*empty.flatten("0")), empty)


# Evaluation


def test_truths_are_the_annotations_of_the_file_with_labels_for_categories(tmp_path: Path) -> None:
    objects = [annotated(1, 1, (10.1, 5.3, 20.2, 15.7), area=3.25), crowd(2, 1), annotated(3, 1, segmentation=None)]
    source = source_of(tmp_path, objects)
    batch = read(source, transform=Resize(80, 120), training=False)
    assert (batch.targets, batch.sizes) == ([], [(80, 120)] * 2)
    first, second = batch.truths
    assert second == {"image_id": 2, "height": HEIGHT, "width": WIDTH, "annotations": []}
    for found, given in zip(first["annotations"], objects, strict=True):
        wanted = {"image_id": 1, "category_id": 0, **{key: given[key] for key in ("id", "bbox", "area", "iscrowd")}}
        assert {key: one for key, one in found.items() if key != "segmentation"} == wanted
        assert ("segmentation" in found) == ("segmentation" in given)
    assert first["annotations"][1]["segmentation"]["size"] == [HEIGHT, WIDTH]
    assert mask_of(first["annotations"][1]["segmentation"], (HEIGHT, WIDTH)).sum() == 300
    assert json.loads(json.dumps(batch.truths)) == batch.truths
    boxes_alone = read(source, training=False, with_masks=False).truths
    assert all("segmentation" not in one for truth in boxes_alone for one in truth["annotations"])


# Order, workers, files


@pytest.mark.parametrize("training", [True, False])
def test_batches_are_bitwise_equal_whatever_the_number_of_workers(training: bool, folder: str) -> None:
    source = open_coco(folder).train
    reader = reader_of(source, SCALED if training else Resize(48, 80), training=training)

    def first_batches(num_workers: int, seed: int = 3) -> list[DetectionBatch]:
        order = Order(len(source), 2, seed, groups=aspect_groups(source.sizes))
        keys = order.micro_batches(0) if training else EvaluationOrder(len(source), 2)
        return taken(Samples(reader, seed=seed), keys, 4 if training else 3, num_workers)

    alone, with_workers = first_batches(0), first_batches(2)
    for one, other in zip(alone, with_workers, strict=True):
        assert_same(one, other)
    assert sum(len(target["labels"]) for batch in alone for target in batch.targets) > 0 or not training
    if training:
        assert not all(torch.equal(one.images, other.images) for one, other in zip(alone, first_batches(0, 4), strict=True))


def test_a_sample_depends_on_seed_epoch_and_index_alone(folder: str) -> None:
    samples = Samples(reader_of(open_coco(folder).train, SCALED), seed=1)
    first = samples[Key(2, 3)].content
    samples[Key(0, 1)]
    torch.rand(3)
    again, other_epoch = samples[Key(2, 3)].content, samples[Key(3, 3)].content
    assert torch.equal(first.image, again.image)
    assert torch.equal(first.target["masks"], again.target["masks"])
    assert first.image.shape != other_epoch.image.shape or not torch.equal(first.image, other_epoch.image)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_survives_a_file(training: bool, tmp_path: Path) -> None:
    batch = read(source_of(tmp_path, [annotated(1, 1), crowd(2, 1)]), training=training)
    tensors, outline = batch.flatten("0")
    assert_same(DetectionBatch.unflatten(tensors, json.loads(json.dumps(outline))), batch)


def test_half_precision_is_for_images_and_not_for_boxes(tmp_path: Path) -> None:
    batch = read(source_of(tmp_path, [annotated(1, 1)])).to(torch.device("cpu"), torch.bfloat16)
    assert (batch.images.dtype, batch.mask.dtype) == (torch.bfloat16, torch.bool)
    assert (batch.targets[0]["boxes"].dtype, batch.targets[0]["masks"].dtype) == (torch.float32, torch.uint8)
    moved = batch.to(torch.device("meta"))
    assert moved.images.is_meta
    assert moved.targets[0]["boxes"].is_meta
    assert not moved.indices.is_meta


def test_a_bad_image_is_one_error_or_is_replaced(folder: str) -> None:
    source = open_coco(folder).train
    (Path(folder) / "train2017" / source.name(2)).write_bytes(b"")
    reader = reader_of(source)
    with pytest.raises(ImageError, match=r"3\.png is empty"):
        Samples(reader, seed=0)[Key(0, 2)]
    replaced = Samples(reader, seed=0, on_bad="skip")[Key(0, 2)]
    assert replaced.index != 2
    assert "3.png is empty" in replaced.bad[0]
    left_out = Samples(reader, seed=0, on_bad="skip", replace=False)
    (batch,) = taken(left_out, iter([[Key(0, 2), Key(0, 3)]]), 1, 0)
    assert (len(batch), len(batch.sizes), len(batch.bad)) == (1, 1, 1)


def test_images_of_a_batch_are_all_wide_or_all_high(folder: str) -> None:
    assert aspect_groups([(40, 60), (60, 40), (50, 50)]) == [1, 0, 0]
    source = open_coco(folder).train
    groups = aspect_groups(source.sizes)
    order = Order(len(source), 2, 0, groups=groups)
    assert {len({groups[key.index] for key in order.batch(step)}) for step in range(2 * order.steps_per_epoch)} == {1}


def test_many_masks_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    objects = [annotated(one, 1, (one, one / 2, 9.5, 3 + one)) for one in range(1, 20)]
    source = source_of(tmp_path, objects)
    masks = read(source).targets[0]["masks"]
    for one, mask in zip(source.annotations(0), masks, strict=True):
        assert torch.equal(masks_of([one.segmentation], (HEIGHT, WIDTH))[0], mask)  # type: ignore[list-item]
