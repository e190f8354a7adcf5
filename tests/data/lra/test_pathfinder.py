"""Pathfinder: the release's files, the malformed ones too, and the generator of such files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from arena import from_documents, write_level
from polaformer.data.sources.lra import pathfinder, pathfinder_generator
from polaformer.data.sources.lra import pathfinder_stamps as stamps
from polaformer.data.sources.lra.pathfinder_contours import Pairs, Segments
from polaformer.data.sources.lra.pathfinder_generator import draw_images, generate
from polaformer.errors import DataError, ImageError, SettingsError


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


# Reading


def test_every_image_is_read_once_in_a_seeded_split(tmp_path):
    images = write_level(tmp_path / "level", {"0": 12, "1": 12, "2": 12, "10": 4})
    splits = pathfinder.load(tmp_path / "level")
    assert {name: len(split) for name, split in splits.items()} == {"train": 32, "val": 4, "test": 4}
    read = [(split.read(index).tobytes(), int(split.labels[index])) for split in splits.values() for index in range(len(split))]
    labels = [index % 2 for number in (12, 12, 12, 4) for index in range(number)]
    assert sorted(read) == sorted((image.tobytes(), label) for image, label in zip(images, labels, strict=True))
    again, other = pathfinder.load(tmp_path / "level"), pathfinder.load(tmp_path / "level", seed=1)
    assert [split.digest() for split in again.values()] == [split.digest() for split in splits.values()]
    assert other["test"].digest() != splits["test"].digest()


def test_samples_are_named_by_their_files_and_hold_flat_grey_levels(tmp_path):
    images = write_level(tmp_path, {"0": 10})
    test = pathfinder.load(tmp_path)["test"]
    name = test.name(0)
    number = int(re.fullmatch(rf"{re.escape(str(tmp_path))}/imgs/0/sample_(\d+)\.png", name)[1])
    assert np.array_equal(test.read(0), images[number].ravel())
    assert test.read(0).dtype == np.uint8
    assert test.labels[0] == number % 2
    assert test.classes == ("apart", "connected")


def test_batches_are_in_the_order_of_their_numbers(tmp_path):
    write_level(tmp_path, {"10": 1, "9": 1, "1": 1})
    assert [file.split("/")[1] for file in pathfinder.read_index(tmp_path).files] == ["1", "9", "10"]


HELD_OUT = {"val": [4, 19, 27, 34], "test": [2, 15, 16, 20]}  # of 40 images


def numbers_of(splits) -> dict[str, list[int]]:
    """The images of each split, numbered over all batches of 20."""
    parts = {name: [split.name(index).split("/")[-2:] for index in range(len(split))] for name, split in splits.items()}
    return {name: [20 * int(batch) + int(file[7:-4]) for batch, file in files] for name, files in parts.items()}


def test_splits_are_always_the_same(tmp_path):
    write_level(tmp_path, {"0": 20, "1": 20})
    found = numbers_of(pathfinder.load(tmp_path))
    assert {name: found[name] for name in HELD_OUT} == HELD_OUT
    assert found["train"] == [number for number in range(40) if number not in HELD_OUT["val"] + HELD_OUT["test"]]


def test_an_empty_file_is_left_out_and_moves_no_other_image(tmp_path):
    """The release has one."""
    write_level(tmp_path, {"0": 20, "1": 20})
    before = pathfinder.load(tmp_path)
    in_train, in_test = before["train"].name(17), before["test"].name(2)
    for name in (in_train, in_test):
        Path(name).write_bytes(b"")
    after = pathfinder.load(tmp_path)
    assert after["train"].skipped == {17: in_train}
    assert after["test"].skipped == {2: in_test}
    assert pathfinder.statistics(after["train"])["skipped"] == 1
    assert after["val"].digest() == before["val"].digest()
    for name, split in before.items():
        kept = [index for index in range(len(split)) if split.name(index) not in (in_train, in_test)]
        expected = split.subset(kept)
        assert list(after[name].names) == list(expected.names)
        assert after[name].labels.tolist() == expected.labels.tolist()
        assert [after[name].read(index).tobytes() for index in range(len(kept))] == [
            expected.read(index).tobytes() for index in range(len(kept))
        ]


def test_too_few_images_for_all_splits_are_refused(tmp_path):
    write_level(tmp_path, {"0": 9})
    with pytest.raises(DataError, match="lists 9 images, with none for val, test; give at least 10"):
        pathfinder.load(tmp_path)
    for file in (tmp_path / "imgs/0").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match="lists no images with content"):
        pathfinder.load(tmp_path)


def test_the_hard_level_is_found_among_others(tmp_path):
    for name in ("curv_baseline", "curv_contour_length_14", "curv_contour_length_9"):
        write_level(tmp_path / name, {"0": 10})
    assert pathfinder.holds(tmp_path)
    assert pathfinder.holds(tmp_path / "curv_baseline")
    assert pathfinder.read_index(tmp_path).level == tmp_path / "curv_contour_length_14"
    assert pathfinder.read_index(tmp_path / "curv_baseline").level == tmp_path / "curv_baseline"
    (tmp_path / "curv_contour_length_14").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"has several levels \(curv_baseline, curv_contour_length_9\); give one of them"):
        pathfinder.load(tmp_path)
    (tmp_path / "curv_baseline").rename(tmp_path / "away")
    assert pathfinder.read_index(tmp_path).level == tmp_path / "curv_contour_length_9"


def test_what_is_no_level_is_not_recognised(tmp_path):
    for path in (tmp_path, tmp_path / "missing", Path("/dev/null"), tmp_path / "a\0b"):
        assert not pathfinder.holds(path)
    with pytest.raises(DataError, match="has no folders imgs and metadata; give a level of pathfinder32, such as"):
        pathfinder.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("imgs/0 sample_0.png 0", "has 3 fields; it must have at least 4"),
        ("", "has 0 fields; it must have at least 4"),
        ("imgs/0 sample_0.png 0 2 1.0", ": the label is '2'; it must be 0 or 1"),
        ("imgs/0 sample_0.png 0 1.0 1.0", ": the label is '1.0'"),
        ("imgs/0 sample_99.png 0 1 1.0", ": imgs/0/sample_99.png cannot be read: No such file"),
        ("imgs/7 sample_0.png 0 1 1.0", ": imgs/7/sample_0.png cannot be read"),
        ("../secret sample_0.png 0 1 1.0", "names ../secret/sample_0.png, which is not a path below"),
        ("imgs/0 /etc/passwd 0 1 1.0", "names imgs/0//etc/passwd, which is not a path below"),
        ("/imgs sample_0.png 0 1 1.0", "names /imgs/sample_0.png, which is not a path below"),
        ("imgs/0 .. 0 1 1.0", "names imgs/0/.., which is not a path below"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_file_and_line(line, told, tmp_path):
    write_level(tmp_path, {"0": 10})
    file = tmp_path / "metadata/0.npy"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:4], line, *lines[5:]]) + "\n")
    with pytest.raises(DataError, match=f"^{re.escape(f'{file}, line 5')}:? ?{re.escape(told.removeprefix(': '))}"):
        pathfinder.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x93NUMPY\x01\x00rest", "is a NumPy file; the release's are text"),
        (b"\xff\x00\xfe\n", "line 1 has 1 fields"),
        (b"", "lists no images"),
    ],
)
def test_metadata_that_are_not_text_are_refused(content, told, tmp_path):
    write_level(tmp_path, {"0": 10})
    (tmp_path / "metadata/0.npy").write_bytes(content)
    with pytest.raises(DataError, match=told):
        pathfinder.load(tmp_path)


def test_metadata_that_are_not_a_regular_file_or_too_large_are_refused(tmp_path):
    write_level(tmp_path, {"0": 10})
    os.mkfifo(tmp_path / "metadata/1.npy")
    with pytest.raises(DataError, match=r"1\.npy cannot be read: it is not a regular file"):
        pathfinder.load(tmp_path)
    (tmp_path / "metadata/1.npy").unlink()
    with open(tmp_path / "metadata/2.npy", "wb") as sparse:
        sparse.truncate(pathfinder.MAX_METADATA_BYTES + 1)
    with pytest.raises(DataError, match=r"2\.npy cannot be read: it has .* bytes, more than the .* allowed"):
        pathfinder.load(tmp_path)


def test_damaged_images_and_those_of_another_size_are_named(tmp_path):
    write_level(tmp_path, {"0": 10})
    file = tmp_path / "imgs/0/sample_3.png"
    whole = file.read_bytes()
    file.write_bytes(whole[:200])
    with pytest.raises(ImageError, match=r"imgs/0/sample_3\.png is damaged"):
        pathfinder.load(tmp_path)
    file.write_text("text")
    with pytest.raises(ImageError, match=r"imgs/0/sample_3\.png is not a readable image"):
        pathfinder.load(tmp_path)
    Image.new("L", (64, 32)).save(file)
    with pytest.raises(DataError, match=r"imgs/0/sample_3\.png has 64×32 pixels instead of 32×32"):
        pathfinder.load(tmp_path)


def test_statistics_are_those_of_the_pixels(tmp_path):
    write_level(tmp_path, {"0": 10})
    for index in range(10):
        image = np.zeros((32, 32), dtype=np.uint8)
        image[: 8 if index % 2 else 16] = 100
        Image.fromarray(image).save(tmp_path / f"imgs/0/sample_{index}.png")
    train = pathfinder.load(tmp_path)["train"]
    share = float((train.labels == 1).mean())
    found = pathfinder.statistics(train)
    assert found["samples"] == 8
    assert found["visible_percent"]["mean"] == pytest.approx(share * 25 + (1 - share) * 50, abs=0.01)
    assert (found["visible_percent"]["least"], found["visible_percent"]["most"]) == (25.0, 50.0)
    assert found["intensity"] == pytest.approx(found["visible_percent"]["mean"], abs=0.01)
    assert found["skipped"] == 0
    assert set(found["visible_quantiles"].values()) == {100.0}
    assert pathfinder.statistics(train.subset([0]))["visible_percent"]["sd"] == 0


def test_quantiles_are_rounded():
    image = np.zeros(32 * 32, dtype=np.uint8)
    image[:4] = 1, 180, 180, 181
    found = pathfinder.statistics(from_documents([image.tobytes()], [0], pathfinder.CLASSES, "made up"))
    assert list(found["visible_quantiles"].values()) == [135.2, 180.0, 180.2, 180.7]  # 135.25 and 180.25


# Drawing


def test_markers_are_at_both_ends_of_one_contour_or_of_two():
    ends = {(4, 4), (4, 20), (27, 27), (27, 10)}
    first, second = (
        np.tile(stamps.position(*np.array(points).T), (40, 1)) for points in ([(4, 4), (4, 20)], [(27, 27), (27, 10)])
    )
    pairs = Pairs(np.zeros((40, stamps.AREA)), Segments(first, first), Segments(second, second))
    labels = np.arange(40) % 2
    seen: dict[int, set] = {0: set(), 1: set()}
    for image, label in zip(pathfinder_generator._draw_markers(pairs, labels, generator()), labels, strict=True):
        assert image.max() == 1
        seen[label].add(tuple(sorted(ends & set(map(tuple, np.argwhere(image > 0.9))))))
    assert seen[1] == {((4, 4), (4, 20)), ((27, 10), (27, 27))}
    assert seen[0] == {((4, 4), (27, 10)), ((4, 20), (27, 27))}


def test_images_are_scaled_to_the_full_range_of_grey_levels():
    images, labels = draw_images(20, 6, generator())
    assert images.shape == (20, 32, 32)
    assert images.dtype == np.uint8
    assert (images.min((1, 2)) == 0).all()
    assert (images.max((1, 2)) == 255).all()
    assert set(labels) == {0, 1}


# Section 3.5 of the facts sheet: percentage of pixels that are not black with its standard deviation, mean intensity, images.
REFERENCE = {14: (34.3, 3.9, 20.3, 200), 9: (25.6, 3.1, 14.7, 100), 6: (19.3, 2.5, 11.3, 100)}
# Measured later on more images of the original generator.
MORE = {14: (34.07, 3.86, 20.15, 1500), 9: (25.94, 3.51, 15.05, 1000)}


def check_statistics(images, labels, share, deviation, intensity, number):
    error = np.sqrt(1 / number + 1 / len(images))
    shares = 100 * (images > 0).mean((1, 2))
    assert abs(shares.mean() - share) < 3 * deviation * error
    assert abs(shares.std() - deviation) < 3 * deviation * error / np.sqrt(2) + 0.05
    assert abs(images.mean() - intensity) < 3 * 2.1 * error + 0.05
    assert abs(labels.mean() - 0.5) < 3 * 0.5 / np.sqrt(len(images))


@pytest.mark.parametrize("contour_length", [14, 9, 6])
def test_images_have_the_statistics_of_the_original(contour_length):
    images, labels = draw_images(1000, contour_length, generator(1))
    check_statistics(images, labels, *REFERENCE[contour_length])
    visible = images[images > 0]
    assert 0.48 < (visible <= 5).mean() < 0.55  # half of them is faint ringing
    if contour_length == 14:
        assert np.abs(np.quantile(visible, (0.25, 0.5, 0.75, 0.9)) - (2, 5, 127, 170)).max() <= 5
        check_statistics(images, labels, *MORE[14])


@pytest.mark.long
@pytest.mark.parametrize("contour_length", [14, 9])
def test_many_images_have_the_statistics_of_the_original(contour_length):
    parts = [draw_images(1000, contour_length, generator(seed)) for seed in range(10)]
    check_statistics(*(np.concatenate(part) for part in zip(*parts, strict=True)), *MORE[contour_length])


# Generating

NUM_IMAGES, LENGTH, BATCH = 70, 4, 30


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def _small_batches(monkeypatch):
    monkeypatch.setattr(pathfinder_generator, "BATCH_IMAGES", BATCH)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder made without interruption."""
    folder = tmp_path_factory.mktemp("pathfinder") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathfinder_generator, "BATCH_IMAGES", BATCH)
        generate(folder, NUM_IMAGES, LENGTH, seed=3)
    return folder


def test_files_are_those_of_the_release(whole):
    level = whole / f"curv_contour_length_{LENGTH}"
    assert sorted(path.name for path in (level / "metadata").iterdir()) == ["0.npy", "1.npy", "2.npy"]
    lines = (level / "metadata/2.npy").read_text().splitlines()
    assert len(lines) == NUM_IMAGES - 2 * BATCH
    assert re.fullmatch(r"imgs/2 sample_9\.png 9 [01] 1\.0 4 1 2 0\.5 1 1", lines[9])
    with Image.open(level / "imgs/2/sample_9.png") as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (32, 32))
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["about"] == {"generator": "pathfinder 1", "seed": 3, "images": NUM_IMAGES, "contour_length": LENGTH}
    splits = pathfinder.load(whole)
    for name, split in splits.items():
        assert manifest["splits"][name]["samples"] == len(split)
        assert manifest["splits"][name]["sha256"] == split.digest()
        assert manifest["splits"][name]["statistics"] == pathfinder.statistics(split)


def test_the_files_do_not_depend_on_the_number_of_workers(tmp_path):
    generate(tmp_path / "one", 1020, LENGTH, seed=0, num_workers=1)
    generate(tmp_path / "two", 1020, LENGTH, seed=0, num_workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.usefixtures("_small_batches")
def test_another_seed_or_batch_gives_other_images(whole, tmp_path):
    generate(tmp_path, NUM_IMAGES, LENGTH, seed=4)
    level = f"curv_contour_length_{LENGTH}"
    images = {
        content
        for folder in (whole, tmp_path)
        for content in ((folder / level / f"imgs/{batch}/sample_0.png").read_bytes() for batch in (0, 1, 2))
    }
    assert len(images) == 6


KILLED = """
import os, signal
from pathlib import Path
from polaformer.data.sources.lra import pathfinder_generator

pathfinder_generator.BATCH_IMAGES = {batch}
write, written = pathfinder_generator.write_atomically, 0
def counted(path, text):
    global written
    written += 1
    if {point!r} == "before the metadata of a batch" and written == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, text)
    if {point!r} == "after the metadata of a batch" and written == 2:
        os.kill(os.getpid(), signal.SIGKILL)
pathfinder_generator.write_atomically = counted

def stage(name):
    if {point!r} == "before the manifest" and name == "checking":
        os.kill(os.getpid(), signal.SIGKILL)
    return lambda done, total: None

pathfinder_generator.generate(Path({out!r}), {images}, {length}, 3, stage=stage)
"""


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("point", ["before the metadata of a batch", "after the metadata of a batch", "before the manifest"])
def test_resume_after_a_kill_gives_the_same_bytes(point, whole, tmp_path):
    out = tmp_path / "out"
    script = KILLED.format(point=point, out=str(out), batch=BATCH, images=NUM_IMAGES, length=LENGTH)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    assert not (out / "manifest.json").exists()
    drawn = []
    generate(out, NUM_IMAGES, LENGTH, seed=3, stage=lambda name: lambda done, total: drawn.append((name, done)))
    assert content(out) == content(whole)
    finished = {"before the metadata of a batch": BATCH, "after the metadata of a batch": 2 * BATCH}.get(point, NUM_IMAGES)
    assert drawn[0] == ("generating", finished)


@pytest.mark.usefixtures("_small_batches")
def test_a_finished_folder_is_left_alone_and_other_options_need_overwrite(whole, tmp_path, monkeypatch):
    generate(tmp_path, 40, 5, seed=1)
    with pytest.raises(SettingsError, match=r"has other data \(seed 1, images 40, contour_length 5\)"):
        generate(tmp_path, NUM_IMAGES, LENGTH, seed=3)
    generate(tmp_path, NUM_IMAGES, LENGTH, seed=3, overwrite=True)
    assert content(tmp_path) == content(whole)
    monkeypatch.setattr(pathfinder_generator, "write_batch", None)
    assert generate(tmp_path, NUM_IMAGES, LENGTH, seed=3) == json.loads((whole / "manifest.json").read_text())


@pytest.mark.usefixtures("_small_batches")
def test_an_image_that_was_lost_meanwhile_is_reported(tmp_path):
    def stage(name):
        if name == "checking":
            (tmp_path / f"curv_contour_length_{LENGTH}/imgs/1/sample_2.png").write_bytes(b"")
        return lambda done, total: None

    with pytest.raises(DataError, match="has 69 readable images instead of 70; remove it, and generate it again"):
        generate(tmp_path, NUM_IMAGES, LENGTH, seed=3, stage=stage)
