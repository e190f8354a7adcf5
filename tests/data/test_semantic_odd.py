"""Bad images and masks: each is one error that says where, what was given, and what to do."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pictures import refused
from polaformer.data import images
from polaformer.data.sources.label_sets import IGNORED, LabelSet
from polaformer.data.sources.semantic import open_semantic
from polaformer.data.sources.semantic_folders import Folders, matched
from polaformer.errors import DataError, ImageError
from semantic_files import ANIMALS, CLASSES, HEIGHT, RED, WIDTH, mask, picture, save, source_of, write_pairs

Spoil = Callable[[Path], object]  # changes a folder with images/a.png and masks/a.png


def masked(pixels: np.ndarray | Image.Image, name: str = "a.png", **options: object) -> Spoil:
    """Another mask instead."""

    def spoil(root: Path) -> None:
        (root / "masks" / "a.png").unlink()
        save(root / "masks" / name, pixels, **options)

    return spoil


def with_bytes(content: bytes) -> Spoil:
    return lambda root: (root / "masks" / "a.png").write_bytes(content)


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def with_values(*counts: tuple[int, int], dtype: type = np.uint8) -> np.ndarray:
    """Zeros, and so many pixels of each value."""
    found = np.zeros(HEIGHT * WIDTH, dtype=dtype)
    start = 0
    for value, number in counts:
        found[start : start + number] = value
        start += number
    return found.reshape(HEIGHT, WIDTH)


def of_colour(*colours: tuple[int, int, int]) -> np.ndarray:
    """Red, and one pixel of each colour."""
    found = np.full((HEIGHT, WIDTH, 3), RED, dtype=np.uint8)
    for place, colour in enumerate(colours):
        found[0, place] = colour
    return found


def rotated(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    save(root / "images" / "a.png", picture(), exif=exif)


def half_transparent() -> Image.Image:
    image = Image.fromarray(of_colour()).convert("RGBA")
    image.putalpha(100)
    return image


def loop(root: Path) -> None:
    (root / "masks" / "a.png").unlink()
    (root / "masks" / "a.png").symlink_to("a.png")


def pipe(root: Path) -> None:
    (root / "masks" / "a.png").unlink()
    os.mkfifo(root / "masks" / "a.png")


FEW, MANY = [(7, 5), (3, 12), (255, 1)], [(value, 1) for value in range(20, 40)]
WHOLE = encoded(mask())
ODD: dict[str, tuple[Spoil, list[str]]] = {
    "no mask": (lambda root: (root / "masks/a.png").unlink(), ["masks/a.png cannot be read: No such file or directory"]),
    "no image": (lambda root: (root / "images/a.png").unlink(), ["images/a.png cannot be read: No such file or directory"]),
    "a link to itself": (loop, ["masks/a.png cannot be read: Too many levels of symbolic links"]),
    "a pipe": (pipe, ["masks/a.png cannot be read: it is not a regular file"]),
    "an empty mask": (with_bytes(b""), ["masks/a.png is empty; fetch it again"]),
    "text": (with_bytes(b"<html>"), ["masks/a.png is not a readable image"]),
    "a mask cut short": (with_bytes(WHOLE[: len(WHOLE) // 2]), ["masks/a.png is damaged"]),
    "an empty image": (lambda root: (root / "images/a.png").write_bytes(b""), ["images/a.png is empty"]),
    "a damaged image": (
        lambda root: (root / "images/a.png").write_bytes(encoded(picture())[:99]),
        ["images/a.png is damaged"],
    ),
    "another width": (
        masked(mask(width=WIDTH + 1)),
        ["masks/a.png has 33×24 pixels, but its image ", "images/a.png has 32×24; give both the same size"],
    ),
    "another height": (masked(mask(height=1)), ["masks/a.png has 32×1 pixels, but its image "]),
    "a turned image": (
        rotated,
        [
            "masks/a.png has 32×24 pixels, but",
            "has 24×32 when it is upright; give both the same size, and the image no rotation",
        ],
    ),
    "a thumbnail": (masked(mask(height=6, width=8)), ["masks/a.png has 8×6 pixels, but"]),
    "unknown values": (
        masked(with_values(*FEW)),
        ["masks/a.png has values that are not in the label set, which knows 0 to 2, 9: 3 (12 pixels), 7 (5 pixels), 255 (1 "],
    ),
    "many unknown values": (masked(with_values(*MANY)), ["20 (1 pixel), ", "29 (1 pixel) and 10 more; correct it, or give"]),
    "unknown values of 16 bits": (
        masked(with_values((256, 4), (65535, 2), dtype=np.uint16)),
        ["not in the label set, which knows 0 to 2, 9: 256 (4 pixels), 65535 (2 pixels); correct it"],
    ),
    "unknown indices": (masked(Image.fromarray(with_values((5, 3))).convert("P")), ["which knows 0 to 2, 9: 5 (3 pixels)"]),
    "classes scaled to be seen": (masked(100 * mask(values=(0, 1, 2))), ["100 (", "200 ("]),
    "unknown colours": (
        masked(of_colour((1, 2, 3), (254, 0, 0))),
        ["masks/a.png has colours that are not in the label set: #010203 (1 pixel), #fe0000 (1 pixel); correct it, or give"],
    ),
    "a JPEG": (
        masked(of_colour(), "a.jpg"),
        ["masks/a.jpg is a JPEG, whose compression changes values; save it as a PNG of 8 or 16 bits"],
    ),
    "a JPEG by another name": (
        masked(Image.fromarray(mask()), format="JPEG"),
        ["masks/a.png is a JPEG, whose compression changes values"],
    ),
    "transparent colours": (masked(half_transparent()), ["masks/a.png is partly transparent, so its values are not classes"]),
    "transparent grey": (masked(half_transparent().convert("LA")), ["masks/a.png is partly transparent"]),
    "fractions": (
        masked(Image.fromarray(mask().astype(np.float32)), "a.tif"),
        ["masks/a.tif is of mode F, so its values are not classes; save it as a PNG"],
    ),
    "colours for print": (
        masked(Image.fromarray(of_colour()).convert("CMYK"), "a.tif"),
        ["masks/a.tif is of mode CMYK, so its values are not classes"],
    ),
    "negative values": (
        masked(Image.fromarray(with_values((-3, 2), dtype=np.int32)), "a.tif"),
        ["masks/a.tif has values that are not in the label set, which knows 0 to 2, 9: -3 (2 pixels)"],
    ),
    "values beyond 16 bits": (
        masked(Image.fromarray(with_values((2**30, 2), dtype=np.int32)), "a.tif"),
        ["not in the label set, which knows 0 to 2, 9: 1073741824 (2 pixels)"],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_one_error(name: str, tmp_path: Path) -> None:
    spoil, told = ODD[name]
    write_pairs(tmp_path / "images", tmp_path / "masks", ["a", "b"])
    source = source_of(tmp_path)
    spoil(tmp_path)
    renamed = next((path for path in (tmp_path / "masks").glob("a.*") if path.suffix != ".png"), None)
    source = source if renamed is None else source_of(tmp_path)
    with pytest.raises(ImageError) as caught:
        source.pair(0)
    for text in told:
        assert text in str(caught.value)
    assert source.pair(1)[0].size == (WIDTH, HEIGHT)


def test_a_mask_that_would_swell_is_refused_before_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", ["a"])
    save(tmp_path / "masks" / "a.png", Image.new("1", (8001, 8000)))
    monkeypatch.setattr(images, "_values", None)
    with pytest.raises(ImageError, match=r"a\.png has 8001×8000 pixels, more than the 64,000,000 allowed"):
        source_of(tmp_path).label_map(0)


def test_colours_need_a_label_set_with_colours(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", ["a"])
    save(tmp_path / "masks" / "a.png", of_colour())
    source = source_of(tmp_path, LabelSet(CLASSES, ANIMALS.colours, {0: 0}, {}))
    with pytest.raises(ImageError, match="has RGB colours, but the label set has values alone; write colours into it, or save"):
        source.label_map(0)


def labels_or_error(content: bytes) -> np.ndarray | ImageError:
    """Any other exception is a failure."""
    try:
        return ANIMALS.labels(images.decode_values(content, "mask.png"))
    except ImageError as error:
        return error


@given(seed=st.integers(0, 2**32), number=st.integers(1, 4))
def test_law_a_mask_with_changed_bytes_is_labels_or_one_error(seed: int, number: int) -> None:
    draw = np.random.default_rng(seed)
    content = bytearray(WHOLE)
    for place in draw.integers(0, len(content), number):
        content[place] = draw.integers(0, 256)
    found = labels_or_error(bytes(content))
    if isinstance(found, ImageError):
        assert str(found).startswith("mask.png is ") or "pixels, more than" in str(found)
    else:
        assert set(np.unique(found)) <= {-1, 0, 1, 2, IGNORED}


# Images and masks that have no counterpart


def test_images_without_mask_and_masks_without_image_are_named(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", ["a"])
    for name in range(12):
        save(tmp_path / "images" / f"{name:02d}.png", picture())
    save(tmp_path / "masks" / "a_mask.png", mask())
    with refused(
        f"{tmp_path}/images: 12 images have no mask in {tmp_path}/masks: 00.png, 01.png, ",
        "08.png, 09.png and 2 more; an image and its mask have the same name up to the ending; add what is missing",
        f"\n{tmp_path}/masks: 1 mask has no image in {tmp_path}/images: a_mask.png; an image",
    ):
        source_of(tmp_path)


def test_folders_that_give_no_pairs_are_refused(tmp_path: Path) -> None:
    both = Folders(tmp_path / "images", tmp_path / "masks")
    with refused(f"{tmp_path}/images cannot be listed: No such file"):
        matched(both)
    for one in both:
        one.mkdir()
    with refused("images has no images; .jpg, .jpeg, .png"):
        matched(both)
    with refused("is both the folder of images and that of masks; put the masks into their own"):
        matched(Folders(tmp_path / "images", tmp_path / "masks" / ".." / "images"))
    save(tmp_path / "images" / "a.png", picture())
    save(tmp_path / "images" / "a.jpg", picture())
    with refused("images has both a.jpg and a.png, which would be one pair; rename or remove one"):
        matched(both)


BAD_LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "nothing": (
        [],
        [" has no images with masks in a known layout; give a folder with images/training and annotations/training"],
    ),
    "images alone": (["images/training/a.png"], ["has no images with masks in a known layout"]),
    "masks alone": (["annotations/training/a.png"], ["has no images with masks in a known layout"]),
    "no masks for validation": (
        ["images/train/a.png", "masks/train/a.png", "images/val/b.png"],
        ["there is ", "images/val, but no folder ", "masks/validation for its val split; add it, or remove the other"],
    ),
    "no images for validation": (
        ["images/train/a.png", "masks/train/a.png", "masks/val/b.png"],
        ["there is ", "masks/val, but no folder ", "images/validation for its val split"],
    ),
    "masks of SegNet alone": (["train/a.png", "trainannot/a.png", "valannot/a.png"], ["valannot, but no folder ", "/val for"]),
    "nothing to train on": (["images/val/a.png", "masks/val/a.png"], ["has val, and nothing to train on; give a folder with"]),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_what_is_no_layout_is_one_error_that_says_what_is(name: str, tmp_path: Path) -> None:
    files, told = BAD_LAYOUTS[name]
    for file in files:
        save(tmp_path / file, mask())
    with refused(*told):
        open_semantic(str(tmp_path), label_set="camvid")


@pytest.mark.parametrize(("data", "told"), [("gone", "No such file or directory"), ("a\0b", "embedded null byte")])
def test_what_is_no_folder_is_refused(data: str, told: str, tmp_path: Path) -> None:
    with refused(f"is not a folder of images and masks: {told}; give a folder with images/training"):
        open_semantic(str(tmp_path / data))


def test_pairs_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone cannot be listed: No such file or directory"):
        open_semantic(f"{tmp_path}/gone:{tmp_path}/masks", label_set="camvid")
