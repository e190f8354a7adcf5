"""Row D1: `check` finds every planted problem, and none in a clean dataset; its manifest reveals every changed byte."""

import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polaformer.cli.main import main
from polaformer.data.audit import FORMAT, AuditReport, audit, read_manifest, write_manifest
from polaformer.data.sources.opening import open_data
from polaformer.errors import DataError

PARTS, CLASSES, NUM_IMAGES = ("train", "val"), ("cat", "dog"), 3


def content(seed: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9 + seed % 3, 12, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Twelve images, all different."""
    for seed in range(len(PARTS) * len(CLASSES) * NUM_IMAGES):
        path = tmp_path / "photos" / PARTS[seed % 2] / CLASSES[seed // 2 % 2] / f"{seed // 4}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(seed))
    return tmp_path / "photos"


def report_of(folder: Path, known: dict[str, str] | None = None) -> AuditReport:
    return audit(open_data(str(folder)), known)


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_nothing_is_found_in_a_clean_data_set_and_its_facts_are_right(clean: Path) -> None:
    found = report_of(clean)
    assert found.problems == []
    facts = {"images": 6, "classes": 2, "smallest_class": "dog: 3", "largest_class": "cat: 3", "sizes": "12×9 to 12×11"}
    assert found.parts == {"train": facts, "val": facts}
    assert len(set(found.digests.values())) == len(found.digests) == 12
    assert "train/cat/0.png" in found.digests


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_report_does_not_depend_on_the_number_of_threads(num_workers: int, clean: Path) -> None:
    (clean / "train" / "cat" / "1.png").write_bytes(b"broken")
    counted = []
    found = audit(open_data(str(clean)), num_workers=num_workers, advance=lambda: counted.append(1))
    assert found == report_of(clean)
    assert len(counted) == 12


Plant = Callable[[Path], object]
PLANTED: dict[str, tuple[Plant, list[tuple[str, str, str]]]] = {
    "damaged": (
        lambda root: (root / "train/cat/1.png").write_bytes(content(1)[:60] + b"?" + content(1)[61:]),
        [("train", "cat/1.png", "1.png is damaged")],
    ),
    "cut": (
        lambda root: (root / "val/dog/2.png").write_bytes(content(1)[:-40]),
        [("val", "dog/2.png", "2.png is damaged: image file is truncated")],
    ),
    "empty": (
        lambda root: (root / "train/cat/1.png").write_bytes(b""),
        [("train", "cat/1.png", "1.png is empty; fetch it again")],
    ),
    "a bomb": (
        lambda root: (root / "train/dog/0.png").write_bytes(bomb()),
        [("train", "dog/0.png", "has more pixels than the 64,000,000 allowed")],
    ),
    "no image": (
        lambda root: (root / "train/dog/0.png").write_text("404"),
        [("train", "dog/0.png", "is not a readable image")],
    ),
    "a dangling link": (
        lambda root: (root / "train/dog/link.png").symlink_to("gone"),
        [("train", "dog/link.png", "cannot be read: No such file or directory")],
    ),
    "the same in training and validation": (
        lambda root: (root / "val/cat/new.png").write_bytes((root / "train/cat/1.png").read_bytes()),
        [("val", "cat/new.png", "same image as train, cat/1.png: it is in both splits")],
    ),
    "the same under two classes": (
        lambda root: (root / "train/dog/new.png").write_bytes((root / "train/cat/1.png").read_bytes()),
        [("train", "dog/new.png", "same image as train, cat/1.png, but labelled 'dog', not 'cat'")],
    ),
    "the same under two classes of two parts": (
        lambda root: (root / "val/dog/new.png").write_bytes((root / "train/cat/1.png").read_bytes()),
        [("val", "dog/new.png", "same image as train, cat/1.png, but labelled 'dog', not 'cat'")],
    ),
    "the same twice in one class, which does no harm": (
        lambda root: (root / "train/cat/new.png").write_bytes((root / "train/cat/1.png").read_bytes()),
        [],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_problem_is_found_and_nothing_else(name: str, clean: Path) -> None:
    plant, expected = PLANTED[name]
    plant(clean)
    found = report_of(clean).problems
    assert [(problem.part, problem.image) for problem in found] == [(part, image) for part, image, _ in expected]
    for problem, (_, _, text) in zip(found, expected, strict=True):
        assert text in problem.text


def test_all_problems_are_found_at_once(clean: Path) -> None:
    (clean / "train/cat/0.png").write_bytes(b"")
    (clean / "train/cat/1.png").write_bytes(b"?")
    (clean / "val/dog/0.png").write_bytes((clean / "train/dog/0.png").read_bytes())
    assert [problem.image for problem in report_of(clean).problems] == ["cat/0.png", "cat/1.png", "dog/0.png"]


def test_archives_and_arrays_are_checked_like_folders(clean: Path, tmp_path: Path) -> None:
    (clean / "train/cat/1.png").write_bytes(b"broken")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(clean, "photos")
    [problem] = report_of(tmp_path / "photos.tar").problems
    assert (problem.part, problem.image) == ("train", "photos.tar/photos/train/cat/1.png")
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=[0, 1, 0, 1, 0, 1], x_test=images[:1], y_test=[0])
    [problem] = report_of(tmp_path / "a.npz").problems
    assert problem.text == "same image as train, train/0: it is in both splits"


# The manifest


def test_changed_missing_and_new_images_are_found_against_a_manifest(clean: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.json", report_of(clean).digests)
    known = read_manifest(tmp_path / "manifest.json")
    assert report_of(clean, known).problems == []
    (clean / "train/cat/0.png").write_bytes(content(70))
    (clean / "train/cat/1.png").unlink()
    (clean / "val/dog/new.png").write_bytes(content(71))
    found = report_of(clean, known).problems
    assert [(problem.part, problem.image) for problem in found] == [
        ("train", "cat/0.png"),
        ("train", "cat/1.png"),
        ("val", "dog/new.png"),
    ]
    assert found[0].text.startswith(f"it has changed: sha256 should be {known['train/cat/0.png']} but is ")
    assert found[1].text == "it is in the manifest but not in the data"
    assert found[2].text == "it is in the data but not in the manifest"


def test_every_one_of_100_flipped_bits_is_found_against_a_manifest(tmp_path: Path) -> None:
    """Even if the image can still be read."""
    draw = random.Random(0)
    for part in PARTS:
        for seed in range(100):
            path = tmp_path / part / CLASSES[seed % 2] / f"{seed}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(seed if part == "train" else 200 + seed, "JPEG"))
    known = report_of(tmp_path).digests
    for path in (tmp_path / "train").rglob("*.jpg"):
        whole = bytearray(path.read_bytes())
        whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(whole)
    found = report_of(tmp_path, known).problems
    unreadable = [problem for problem in found if not problem.text.startswith("it has changed")]
    changed = {problem.image for problem in found if problem.text.startswith("it has changed")}
    assert changed == {f"{CLASSES[seed % 2]}/{seed}.jpg" for seed in range(100)}
    assert 0 < len(unreadable) < 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "null",
        "{}",
        '{"format": "other", "sha256": {}}',
        f'{{"format": "{FORMAT}"}}',
        "[" * 100_000,
        "\\xff",
    ],
)
def test_a_file_that_is_no_manifest_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\xff" if text == "\\xff" else text.encode())
    with pytest.raises(DataError, match=r"manifest.json is not a dataset manifest: .*; write one with --write-manifest"):
        read_manifest(tmp_path / "manifest.json")


def test_a_manifest_with_a_list_in_place_of_digests_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "sha256": ["a"]}), encoding="utf-8")
    with pytest.raises(DataError, match="it has another format"):
        read_manifest(tmp_path / "manifest.json")


# The command


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_ends_with_0_where_nothing_is_wrong(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([str(clean)], capsys)
    assert code == 0
    assert out.splitlines()[-1] == "no problems found"
    assert "cat: 3" in out


def test_the_command_ends_with_65_and_lists_what_is_wrong(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clean / "train/cat/0.png").write_bytes(b"")
    (clean / "train/cat/1.png").write_bytes(b"?")
    code, out, _ = run([str(clean)], capsys)
    assert code == 65
    assert "train, cat/0.png: " in out
    assert "train, cat/1.png: " in out
    assert out.splitlines()[-1] == "2 problems"


def test_the_command_lists_a_screenful_and_says_how_many_more_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in PARTS:
        for seed in range(60):
            (tmp_path / part / CLASSES[seed % 2]).mkdir(parents=True, exist_ok=True)
            (tmp_path / part / CLASSES[seed % 2] / f"{seed}.png").write_bytes(b"")
    code, out, _ = run([str(tmp_path)], capsys)
    assert (code, out.splitlines()[-2:]) == (65, ["… and 70 more; --json lists them all", "120 problems"])
    code, out, _ = run([str(tmp_path), "--json"], capsys)
    assert (code, len(json.loads(out)["problems"])) == (65, 120)


def test_the_command_as_json_prints_nothing_else(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([str(clean), "--json"], capsys)
    found: dict[str, Any] = json.loads(out)
    assert (code, found["command"], found["data"], found["problems"]) == (0, "check", str(clean), [])
    assert found["parts"]["val"]["images"] == 6
    (clean / "train/cat/1.png").write_bytes(b"?")
    code, out, _ = run([str(clean), "--json"], capsys)
    [problem] = json.loads(out)["problems"]
    assert (code, problem["part"], problem["image"]) == (65, "train", "cat/1.png")


def test_the_command_writes_a_manifest_and_compares_with_it(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = str(tmp_path / "manifest.json")
    assert run([str(clean), "--write-manifest", manifest], capsys)[0] == 0
    assert run([str(clean), "--manifest", manifest], capsys)[0] == 0
    (clean / "train/cat/1.png").write_bytes(content(80))
    code, out, _ = run([str(clean), "--manifest", manifest], capsys)
    assert code == 65
    assert "train, cat/1.png: it has changed: sha256 should be " in out


def test_the_share_that_is_held_out_is_an_option_as_in_training(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([str(clean / "train"), "--val-share", "0.5", "--json"], capsys)
    held_out = json.loads(out)["parts"]["val"]["images"]
    assert (code, held_out) == (0, len(open_data(str(clean / "train"), val_share=0.5).val))


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--num-workers", "0"], 2, "--num-workers is 0; give an integer from 1 to 256"),
        (["--num-workers", "100000"], 2, "--num-workers is 100000; give an integer from 1 to 256"),
        (["--val-share", "1"], 2, "--val-share is 1.0; give a number in [0, 1)"),
        (["--manifest", "gone.json"], 2, "there is no manifest gone.json; write one with --write-manifest gone.json"),
        (["--write-manifest", "photos"], 2, "photos exists; give another name, or compare with --manifest photos"),
        (
            ["--write-manifest", "gone/manifest.json"],
            74,
            "cannot write to gone/manifest.json: there is no directory gone; create it",
        ),
        (["--manifest", "photos/train/cat/0.png"], 65, "0.png is not a dataset manifest"),
    ],
)
def test_options_that_make_no_sense_end_the_command_before_any_work(
    options: list[str], code: int, told: str, clean: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clean.parent)
    found, out, err = run(["photos", *options], capsys)
    assert (found, out) == (code, "")
    assert err.startswith("polaformer check: ")
    assert told in err
    assert "reading images" not in err
