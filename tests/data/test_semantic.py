"""Images with a class per pixel are found in every usual layout, and their masks are read in every usual form."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from arena import shared
from pictures import names, refused
from polaformer.data.sources.coco import looks_like_coco
from polaformer.data.sources.label_sets import ADE20K, CAMVID, IGNORED
from polaformer.data.sources.semantic import (
    absolute,
    digest_of_pairs,
    looks_like_semantic,
    open_semantic,
    open_semantic_split,
)
from polaformer.errors import SettingsError
from semantic_files import (
    ANIMALS,
    CLASSES,
    HEIGHT,
    LINES,
    WHITE,
    WIDTH,
    mask,
    picture,
    save,
    source_of,
    write_pairs,
    write_semantic,
)

# Layouts: the folders of images and masks for training and for validation.
LAYOUTS = {
    "ADE20K's": ("images/training", "annotations/training", "images/validation", "annotations/validation"),
    "short names": ("images/train", "annotations/train", "images/val", "annotations/val"),
    "masks": ("images/train", "masks/train", "images/valid", "masks/valid"),
    "labels": ("images/training", "labels/training", "images/validation", "labels/validation"),
    "names that differ": ("images/train", "annotations/training", "images/val", "annotations/validation"),
    "SegNet's": ("train", "trainannot", "val", "valannot"),
}


def write_layout(root: Path, layout: str) -> str:
    train_images, train_masks, val_images, val_masks = LAYOUTS[layout]
    write_pairs(root / train_images, root / train_masks, ["b", "a", "deep/c"])
    write_pairs(root / val_images, root / val_masks, ["d"], first_seed=9)
    (root / "classes.txt").write_text(LINES)
    return str(root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_usual_layout_is_found(layout: str, tmp_path: Path) -> None:
    root = write_layout(tmp_path, layout)
    assert looks_like_semantic(root)
    assert not looks_like_coco(root)
    found = open_semantic(root)
    assert (names(found.train), names(found.val), found.test) == (["a.png", "b.png", "deep/c.png"], ["d.png"], None)
    assert found.classes == found.val.classes == CLASSES
    image, labels = found.train.pair(1)
    assert np.array_equal(np.asarray(image), picture(0))
    assert np.array_equal(labels, np.where(mask(0) == 9, IGNORED, mask(0)))
    assert (labels.dtype, labels.shape) == (np.uint8, (HEIGHT, WIDTH))
    train_images, train_masks, val_images, val_masks = (tmp_path / one for one in LAYOUTS[layout])
    pairs = f"{train_images}:{train_masks},{val_images}:{val_masks}"
    assert looks_like_semantic(pairs)
    assert names(open_semantic(pairs, label_set=str(tmp_path / "classes.txt")).val) == ["d.png"]


@pytest.mark.parametrize(
    ("layout", "images", "masks"), [("SegNet's", "test", "testannot"), ("ADE20K's", "images/testing", "annotations/testing")]
)
def test_a_test_split_is_found_too_and_one_without_masks_is_none(layout: str, images: str, masks: str, tmp_path: Path) -> None:
    root = write_layout(tmp_path, layout)
    save(tmp_path / images / "e.png", picture())
    assert list(open_semantic(root).splits) == ["train", "val"]
    save(tmp_path / masks / "e.png", mask())
    found = open_semantic(root)
    assert names(found.split("test")) == ["e.png"]
    with pytest.raises(SettingsError, match="there is no split 'dev'"):
        found.split("dev")


@pytest.mark.parametrize("masks", ["annotations", "masks", "labels"])
def test_images_and_masks_in_one_folder_each_are_one_split(masks: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / masks, list(map(str, range(60))), height=4, width=4)
    (tmp_path / "classes.txt").write_text(LINES)
    assert looks_like_semantic(str(tmp_path))
    found = open_semantic(str(tmp_path), val_share=0.2)
    assert sorted([*names(found.train), *names(found.val)]) == sorted(f"{one}.png" for one in range(60))
    assert 4 < len(found.val) < 24
    assert set(names(open_semantic(str(tmp_path)).val)) < set(names(found.val))
    for index in range(len(found.val)):
        seed = int(found.val.name(index).removesuffix(".png"))
        assert np.array_equal(np.asarray(found.val.pair(index)[0]), picture(seed, 4, 4))
    both = open_semantic(str(tmp_path), val_share=0)
    assert both.train is both.val
    assert len(both.val) == 60
    with refused("there are no images to validate with; add some, or a validation split, or hold out another share"):
        open_semantic(str(tmp_path), val_share=1e-6)


def test_a_folder_of_other_annotations_is_passed_over(tmp_path: Path) -> None:
    root = write_layout(tmp_path, "masks")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train2017.json").write_text("{}")
    assert names(open_semantic(root).val) == ["d.png"]


def test_one_split_can_be_opened_alone(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images/validation", tmp_path / "annotations/validation", ["a", "b"])
    (tmp_path / "classes.txt").write_text(LINES)
    assert names(open_semantic_split(str(tmp_path), "val", classes=CLASSES)) == ["a.png", "b.png"]
    with refused("has val, and nothing to train on; give a folder with images/training and annotations/training"):
        open_semantic(str(tmp_path))
    pair = f"{tmp_path}/images/validation:{tmp_path}/annotations/validation"
    for split in ("train", "val", "test"):
        assert len(open_semantic_split(pair, split, label_set=str(tmp_path / "classes.txt"))) == 2
    write_pairs(tmp_path / "images/training", tmp_path / "annotations/training", ["c"])
    with pytest.raises(SettingsError, match="there is no split 'test'"):
        open_semantic_split(str(tmp_path), "test")


def test_a_split_that_is_held_out_is_the_same_when_it_is_opened_alone(tmp_path: Path) -> None:
    write_pairs(tmp_path / "train", tmp_path / "trainannot", list(map(str, range(40))), height=4, width=4)
    data = open_semantic(str(tmp_path), label_set="camvid", val_share=0.3)
    for split, source in data.splits.items():
        assert names(open_semantic_split(str(tmp_path), split, label_set="camvid", val_share=0.3)) == names(source)


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    write_layout(tmp_path / "real", "masks")
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "data" / "masks").mkdir()
    for one in ("images/train", "masks/train"):
        (tmp_path / "data" / one).symlink_to(tmp_path / "real" / one)
    assert looks_like_semantic(str(tmp_path / "data"))


def test_only_images_with_masks_look_semantic(tmp_path: Path) -> None:
    for one in ("photos/cat/1.png", "half/images/training/1.png", "plain/train/cat/1.png", "plain/val/cat/1.png"):
        save(tmp_path / one, picture())
    (tmp_path / "boxes" / "labels").mkdir(parents=True)
    (tmp_path / "boxes" / "labels" / "1.txt").touch()
    save(tmp_path / "boxes" / "images" / "1.png", picture())
    others = ["", "digits", "hfds:x", "a:b", "a\0b", "a\0b:c", "a" * 5000, str(tmp_path), f"{tmp_path}/photos:{tmp_path}/gone"]
    assert not any(map(looks_like_semantic, [*others, *(str(tmp_path / one) for one in ("photos", "half", "plain", "boxes"))]))


@pytest.mark.parametrize(
    ("data", "wanted"), [("data", "{}/data"), ("gone", "gone"), ("a:b,c/d:e", "{0}/a:{0}/b,{0}/c/d:{0}/e")]
)
def test_data_have_the_same_name_from_any_folder(
    data: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert absolute(data) == wanted.format(os.getcwd())


# Classes


def test_a_label_set_is_found_or_given(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images/training", tmp_path / "annotations/training", ["ADE_train_00000001"])
    pair = f"{tmp_path}/images/training:{tmp_path}/annotations/training"
    assert all(open_semantic(data, val_share=0).classes == ADE20K.classes for data in (str(tmp_path), pair))
    assert open_semantic(str(tmp_path), val_share=0, label_set="camvid").train.colours == CAMVID.colours
    write_pairs(tmp_path / "images/training", tmp_path / "annotations/training", ["a"])
    with refused("annotations does not tell what the values in its masks mean; add classes.txt"):
        open_semantic(pair, val_share=0)
    (tmp_path / "annotations" / "classes.txt").write_text(LINES)
    assert open_semantic(pair, val_share=0).classes == CLASSES


def test_classes_of_a_model_decide_the_labels_and_others_are_refused(tmp_path: Path) -> None:
    root = write_layout(tmp_path, "ADE20K's")
    found = open_semantic(root, classes=("mouse", "cat", "dog"))
    assert found.classes == found.val.classes == ("mouse", "cat", "dog")
    plain = open_semantic(root).train.label_map(0)
    wanted = np.array([1, 2, 0, *[IGNORED] * 253], dtype=np.uint8)[plain]
    assert np.array_equal(found.train.label_map(0), wanted)
    with refused("the masks have other classes than the model: they lack 'ox' and add 'cat', 'dog', 'mouse'"):
        open_semantic_split(root, "val", classes=("ox",))


# Masks

PALETTE = np.array([*ANIMALS.colours, *[WHITE] * 7], dtype=np.uint8)
MASKS = {
    "greyscale": lambda values: Image.fromarray(values),
    "palette": lambda values: Image.fromarray(values).convert("P"),
    "16 bits": lambda values: Image.fromarray(values.astype(np.uint16)),
    "RGB": lambda values: Image.fromarray(PALETTE[values]),
    "RGBA": lambda values: MASKS["RGB"](values).convert("RGBA"),
    "greyscale with alpha": lambda values: Image.fromarray(values).convert("LA"),
}


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize("form", MASKS)
def test_masks_of_every_form_have_the_same_labels(form: str, ending: str, tmp_path: Path) -> None:
    save(tmp_path / "images" / "a.jpg", picture())
    save(tmp_path / "masks" / f"a.{ending}", MASKS[form](mask()))
    found = source_of(tmp_path).label_map(0)
    assert np.array_equal(found, np.where(mask() == 9, IGNORED, mask()))
    assert found.dtype == np.uint8


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_masks_of_few_bits_keep_their_values(bits: int, tmp_path: Path) -> None:
    values = mask(values=(0, 1) if bits == 1 else (0, 1, 2))
    save(tmp_path / "images" / "a.png", picture())
    image = Image.fromarray(values)
    image.putpalette([0, 0, 0, 90, 90, 90, 7, 7, 7])
    save(tmp_path / "masks" / "a.png", Image.fromarray(values.astype(bool)) if bits == 1 else image, bits=bits)
    assert np.array_equal(source_of(tmp_path).label_map(0), values)


def test_values_beyond_8_bits_are_read(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("1000 cat\n65535 dog\n0 -\n")
    values = np.array([0, 1000, 65535], dtype=np.uint16)[mask(values=(0, 1, 2))]
    save(tmp_path / "images" / "a.png", picture())
    save(tmp_path / "masks" / "a.png", values)
    found = open_semantic(f"{tmp_path}/images:{tmp_path}/masks", val_share=0).train.label_map(0)
    assert np.array_equal(found, np.array([IGNORED, 0, 1], dtype=np.uint8)[mask(values=(0, 1, 2))])


# Names and digests


def test_subsets_and_digests_follow_names_masks_and_meanings(tmp_path: Path) -> None:
    root = write_semantic(tmp_path)
    source = open_semantic(root).train
    part = source.subset([4, 0])
    assert (names(part), part.mask_name(0), len(source)) == (["5.png", "1.png"], "5.png", 6)
    assert part.content(1) == source.content(0)
    assert part.mask_content(1) == source.mask_content(0) != source.content(0)
    found = {digest_of_pairs(one) for one in (source, part, open_semantic(root, classes=("dog", "cat", "mouse")).train)}
    assert digest_of_pairs(open_semantic(root).train) in found
    save(tmp_path / "annotations/training/1.png", np.zeros((HEIGHT, WIDTH), np.uint8))
    found.add(digest_of_pairs(open_semantic(root).train))
    (tmp_path / "classes.txt").write_text(LINES.replace("9", "8"))
    found.add(digest_of_pairs(open_semantic(root).train))
    assert len(found) == 5
    (tmp_path / "annotations/training/1.png").unlink()
    assert digest_of_pairs(source)


def test_names_that_would_change_a_terminal_are_escaped(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", ["\x1b[31m", "\udcff"])
    source = source_of(tmp_path)
    assert names(source) == ["\\x1b[31m.png", "\\udcff.png"]
    assert digest_of_pairs(source)
    assert source.pair(1)[0].size == (WIDTH, HEIGHT)


# Published data


def test_camvid_is_found_with_its_classes() -> None:
    data = open_semantic(str(shared("camvid")))
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 367, "val": 101, "test": 233}
    assert data.classes == CAMVID.classes
    for index in range(0, 101, 25):
        image, labels = data.val.pair(index)
        assert (image.size, labels.shape) == ((480, 360), (360, 480))
        assert set(np.unique(labels)) <= {*range(11), IGNORED}


def test_samples_of_ade20k_show_what_can_be_seen_on_them() -> None:
    data = open_semantic(str(shared("ade20k-samples")), val_share=0)
    _, labels = data.train.pair(names(data.train).index("ADE_val_00000001.jpg"))
    shares = {name: float((labels == label).mean()) for label, name in enumerate(data.classes) if (labels == label).any()}
    assert sorted(shares, key=lambda name: -shares[name])[:3] == ["sky", "building", "grass"]
    assert 0 < (labels == IGNORED).mean() < 0.02
