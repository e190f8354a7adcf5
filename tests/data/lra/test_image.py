"""Image: grey levels by the formula, in the order of the pixels; the held-out images; and malformed files."""

import os
import pickle
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arena
from hostile import Payload
from pictures import refused
from polaformer.data.sources.lra import image

TRAIN = [f"data_batch_{n}.bin" for n in range(1, 6)]


def grey_of(red: int, green: int, blue: int) -> int:
    """The formula of the specification, written out, without rounding."""
    weighted = Fraction("0.2989") * red + Fraction("0.5870") * green + Fraction("0.1140") * blue
    return min(max(floor(weighted / 255 * Fraction("255.5")), 0), 255)


def test_grey_levels_follow_the_formula() -> None:
    draw = np.random.default_rng(0)
    corners = np.stack(np.meshgrid(*[[0, 1, 127, 128, 254, 255]] * 3), axis=-1).reshape(-1, 3)
    greys = np.repeat(np.arange(256)[:, None], 3, axis=1)
    colours = np.concatenate([corners, greys, draw.integers(0, 256, (3000, 3))]).astype(np.uint8)
    found = image.to_grey(*colours.T)
    assert found.dtype == np.uint8
    assert found.tolist() == [grey_of(*map(int, colour)) for colour in colours]


def test_grey_levels_are_those_of_floating_point() -> None:
    """In float64 no colour is close enough to a whole number to be rounded the other way."""
    colours = np.random.default_rng(1).integers(0, 256, (200_000, 3), dtype=np.uint8)
    levels = colours.astype(np.float64) @ [0.2989, 0.5870, 0.1140] / 255
    assert np.array_equal(image.to_grey(*colours.T), np.floor(levels * 255.5).clip(0, 255))


@pytest.mark.parametrize("form", ["binary", "binary, the folder above", "arrays", "arrays in grey"])
def test_both_forms_give_the_same_images(form: str, tmp_path: Path) -> None:
    batches = [arena.cifar(6, seed) for seed in range(6)]
    images, labels = (np.concatenate(part) for part in zip(*batches[:5], strict=True))
    if form.startswith("binary"):
        path = arena.write_cifar(tmp_path / "cifar-10-batches-bin")
        path = path.parent if "above" in form else path
    else:
        path, (test, test_labels) = tmp_path / "cifar.npz", batches[5]
        if "grey" in form:
            images, test = (image.to_grey(x[..., 0], x[..., 1], x[..., 2]) for x in (images, test))
        np.savez(path, x_train=images, y_train=labels, x_test=test, y_test=test_labels)
        images = batches[0][0] if "grey" in form else images
    assert image.holds(path)
    found = image.load(path)
    assert {name: len(split) for name, split in found.items()} == {"train": 27, "val": 3, "test": 6}
    held = set(image.held_out(30).tolist())
    kept = [index for index in range(30) if index not in held]
    assert found["val"].labels.tolist() == [int(labels[index]) for index in sorted(held)]
    assert found["train"].labels.tolist() == [int(labels[index]) for index in kept]
    for place, index in list(enumerate(kept))[:3]:
        pixels = batches[index // 6][0][index % 6].reshape(-1, 3)
        assert found["train"].read(place).tolist() == [grey_of(*map(int, pixel)) for pixel in pixels]
    assert found["test"].classes == image.CLASSES


def test_both_forms_have_the_same_digest(tmp_path: Path) -> None:
    binary = image.load(arena.write_cifar(tmp_path / "bin"))
    batches = [arena.cifar(6, seed) for seed in range(6)]
    images, labels = (np.concatenate(part) for part in zip(*batches[:5], strict=True))
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=batches[5][0], y_test=batches[5][1])
    arrays = image.load(tmp_path / "x.npz")
    assert [split.digest() for split in binary.values()] == [split.digest() for split in arrays.values()]


def test_the_held_out_images_are_a_function_of_their_number() -> None:
    found = image.held_out(50_000)
    assert len(found) == len(set(found.tolist())) == 5000
    assert found[:5].tolist() == [0, 8, 11, 13, 20]  # the same on every machine, in every version
    assert np.array_equal(found, np.sort(found))
    assert not np.array_equal(found[:500], image.held_out(5000))
    assert len(image.held_out(9)) == 0


def test_images_are_named_by_file_and_record(tmp_path: Path) -> None:
    found = image.load(arena.write_cifar(tmp_path))
    assert found["test"].name(5) == "test_batch.bin, record 5"
    index = int(image.held_out(30)[0])
    assert found["val"].name(0) == f"data_batch_{index // 6 + 1}.bin, record {index % 6}"


def test_statistics_hold_brightness_and_black_pixels(tmp_path: Path) -> None:
    arena.write_batch(arena.write_cifar(tmp_path) / "test_batch.bin", np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, np.uint8))
    found = image.load(tmp_path)
    facts = image.statistics(found["test"])
    assert (facts["samples"], facts["mean_grey"], facts["black"], facts["length"]["mean"]) == (2, 0.0, 1.0, 1024.0)
    assert image.statistics(found["train"].subset([0]))["mean_grey"] == round(float(found["train"].read(0).mean()), 2)


def test_cifar10_beside_the_checkout(tmp_path: Path) -> None:
    from PIL import Image

    tiles = np.asarray(Image.open(arena.shared("cifar10-webp") / "test_00.webp").convert("RGB"))
    images = tiles.reshape(25, 32, 40, 32, 3).transpose(0, 2, 1, 3, 4).reshape(1000, 32, 32, 3)
    labels = np.load(arena.shared("cifar10-webp") / "labels.npz")["y_test"][:1000].astype(np.uint8)
    arena.write_batch(arena.write_cifar(tmp_path) / "test_batch.bin", images, labels)
    found = image.load(tmp_path)["test"]
    assert found.labels.tolist() == labels.tolist()
    assert found.read(17).tolist() == [grey_of(*map(int, pixel)) for pixel in images[17].reshape(-1, 3)]
    assert 110 < image.statistics(found)["mean_grey"] < 135


def write_pickle(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("data_batch_1", "."),
        ("data_batch_1", "data_batch_1"),
        ("cifar-10-batches-py/data_batch_1", "."),
        ("lra-image.train.pickle", "."),
        ("lra-image.train.pickle", "lra-image.train.pickle"),
    ],
)
def test_pickles_are_refused_unread_with_a_hint_at_the_binary_form(place: str, given: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    write_pickle(tmp_path / place, Payload(mark))
    assert not image.holds(tmp_path / given)
    with refused(f"{tmp_path / given} holds the Python form, pickles, which are not read", "cifar-10-binary.tar.gz"):
        image.load(tmp_path / given)
    assert not mark.exists()


def damage(kind: str, root: Path) -> str:
    """Damage the binary form and return what the error says."""
    path = root / "data_batch_3.bin"
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[:-1])
        return "data_batch_3.bin has 18,437 bytes, not a multiple of 3,073; fetch the binary form"
    if kind == "empty":
        path.write_bytes(b"")
        return "data_batch_3.bin has 0 bytes, not a multiple of 3,073"
    if kind == "a label":
        path.write_bytes(content[: 2 * 3073] + b"\x0a" + content[2 * 3073 + 1 :])
        return "data_batch_3.bin, record 2: label is 10, not 0 to 9"
    if kind == "CIFAR-100":
        path.write_bytes(bytes(3074))
        return "data_batch_3.bin has 3,074 bytes, not a multiple of 3,073"
    if kind == "missing":
        path.unlink()
        return "has no data_batch_3.bin; fetch the binary form"
    if kind == "the first is missing":
        (root / TRAIN[0]).unlink()
        return "has no data_batch_1.bin; fetch the binary form"
    if kind == "two are missing":
        path.unlink()
        (root / "test_batch.bin").unlink()
        return "has no data_batch_3.bin, no test_batch.bin; fetch the binary form"
    if kind == "a FIFO":
        path.unlink()
        os.mkfifo(path)
        return "data_batch_3.bin cannot be read: it is not a regular file"
    if kind == "a folder":
        path.unlink()
        path.mkdir()
        return "data_batch_3.bin cannot be read: it is not a regular file"
    if kind == "sparse":
        os.truncate(path, 2**40)
        return "data_batch_3.bin cannot be read: it has 1,099,511,627,776 bytes, more than the 1,073,741,824 allowed"
    if kind == "other classes":
        (root / "batches.meta.txt").write_text("apple\nbear\n")
        return "batches.meta.txt lists apple, bear; CIFAR-10 has airplane, automobile"
    (root / "batches.meta.txt").unlink()
    (root / "batches.meta.txt").mkdir()
    return "batches.meta.txt cannot be read: it is not a regular file"


DAMAGES = ["cut", "empty", "a label", "CIFAR-100", "missing", "the first is missing", "two are missing", "a FIFO", "a folder"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [*DAMAGES, "sparse", "other classes", "a folder of names"])
def test_a_damaged_binary_form_is_one_error_that_names_file_and_record(kind: str, tmp_path: Path) -> None:
    told = damage(kind, arena.write_cifar(tmp_path))
    with refused(str(tmp_path), told):
        image.load(tmp_path)


def test_class_names_may_be_missing(tmp_path: Path) -> None:
    (arena.write_cifar(tmp_path) / "batches.meta.txt").unlink()
    assert image.load(tmp_path)["test"].classes == image.CLASSES


PIXELS, LABELS = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 10


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"x_train": PIXELS, "y_train": LABELS}, "has no x_test and y_test; add them"),
        ({"x_test": PIXELS, "y_test": LABELS}, "has no x_train and no y_train"),
        ({"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS}, "has only one of x_test and y_test"),
        (
            {"x_train": PIXELS[:, :28, :28], "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS},
            "x_train has shape (20, 28, 28, 3); give images of 32×32 pixels",
        ),
        (
            {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS[:0], "y_test": LABELS[:0]},
            "x_test has shape (0, 32, 32, 3); give images of 32×32 pixels",
        ),
        (
            {"x_train": PIXELS / 255, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS},
            "x_train is float64 of shape (20, 32, 32, 3); give uint8",
        ),
        (
            {"x_train": PIXELS, "y_train": LABELS + 1, "x_test": PIXELS, "y_test": LABELS},
            "has 11 classes; CIFAR-10 has 10",
        ),
        (
            {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS, "classes": list("abcdefghij")},
            "has the classes a, b, c, d, e, f, g, h, i, j; CIFAR-10 has airplane",
        ),
        (
            {"x_train": PIXELS, "y_train": np.array([object()] * 20), "x_test": PIXELS, "y_test": LABELS},
            "is not a complete .npz of plain arrays: ",
        ),
    ],
)
def test_an_array_file_that_cannot_be_used_is_one_error(arrays: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    with refused(str(path), told):
        image.load(path)


@pytest.mark.parametrize("kind", ["nothing", "a file", "a folder", "an archive", "a broken .npz", "another .npz"])
def test_what_is_not_recognised_is_refused_with_the_forms_that_are(kind: str, tmp_path: Path) -> None:
    path, told = (
        tmp_path / ("x.npz" if "npz" in kind else "x.tar.gz" if "archive" in kind else "x"),
        "is not CIFAR-10; give the binary form",
    )
    if kind == "a folder":
        path.mkdir()
    elif kind == "another .npz":
        np.savez(path, a=[1])
        told = "has no x_train and no y_train"
    elif kind == "a broken .npz":
        path.write_bytes(b"PK")
        told = "is not a complete .npz of plain arrays"
    elif kind != "nothing":
        path.touch()
    assert not image.holds(path)
    with refused(f"{path} {told}"):
        image.load(path)
