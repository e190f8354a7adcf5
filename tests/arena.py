"""Small datasets of the Long Range Arena on disk, in the forms in which they are released."""

import gzip
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polaformer.data.sources.lra import listops
from polaformer.data.sources.lra.sequences import SequenceSplit

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
REVIEWS = [
    (split, label, f"{split} {label} {n} café\x85\t{'!' * n}")
    for split in ("train", "test")
    for label in (0, 1)
    for n in range(3)
]
PAPERS = {f"P{n:02d}": f'paper {n} "quoted" ' + "word " * n for n in range(6)}
PAIRS = {
    "train": [(1, "P00", "P01"), (0, "P02", "P00"), (1, "P01", "P00"), (0, "P03", "P04")],
    "eval": [(1, "P04", "P05")],
    "test": [(0, "P05", "P01"), (1, "P03", "P05")],
}


def from_documents(
    documents: Sequence[bytes],
    labels: Sequence[int],
    classes: tuple[str, ...],
    origin: str,
    *,
    names: Sequence[str] | None = None,
) -> SequenceSplit:
    """A split with one document per sample."""
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents], dtype=np.int64)]).astype(np.int64)
    symbols = np.frombuffer(b"".join(documents), dtype=np.uint8)
    own = np.arange(len(documents), dtype=np.int64)[:, None]
    return SequenceSplit(classes, symbols, offsets, own, np.asarray(labels, dtype=np.int64), origin, names)


def shared(name: str) -> Path:
    """A dataset that lies beside the checkout; skips the test if it does not."""
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} is not there")
    return SHARED / name


def documents(split: SequenceSplit) -> list[tuple[bytes, ...]]:
    """The documents of each sample."""
    return [tuple(split.read(n, which).tobytes() for which in range(split.num_documents)) for n in range(len(split))]


def reviews_of(split: str) -> list[tuple[bytes, int]]:
    return [(text.encode(), label) for one, label, text in REVIEWS if one == split]


def found_reviews(split: SequenceSplit) -> list[tuple[bytes, int]]:
    return [(one[0], int(label)) for one, label in zip(documents(split), split.labels, strict=True)]


def write(path: Path, content: bytes) -> Path:
    """Compressed as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON value per line; strings and bytes as they are."""
    lines = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
    return write(path, b"".join(line + b"\n" for line in lines))


def review_rows() -> list[dict[str, Any]]:
    return [{"split": split, "label": label, "text": text, "rating": 3} for split, label, text in REVIEWS]


def write_tree(root: Path) -> Path:
    for n, (split, label, text) in enumerate(REVIEWS):
        write(root / split / ("neg", "pos")[label] / f"{n:02d}_7.txt", text.encode())
    write(root / "train" / "unsup" / "0_0.txt", b"no label")
    return root


def write_parquet(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(dict(columns)), path, **options)
    return path


def write_release(root: Path, texts: Mapping[str, str] = PAPERS) -> Path:
    """The AAN files of the release."""
    for split, pairs in PAIRS.items():
        rows = ["\t".join((f"{label}.0", one, two, texts[one], texts[two])) for label, one, two in pairs]
        write_lines(root / f"new_aan_pairs.{split}.tsv", rows)
    return root


def write_pairs(root: Path, ending: str = ".jsonl.xz") -> Path:
    """Pairs of ids, and the documents beside them."""
    for split, pairs in PAIRS.items():
        write_lines(root / f"mini_pairs.{split}.tsv", [f"{label}\t{one}\t{two}" for label, one, two in pairs])
    write_lines(root / f"docs{ending}", [{"id": name, "text": text} for name, text in PAPERS.items()])
    return root


def pairs_of(split: str) -> list[tuple[tuple[bytes, bytes], int]]:
    return [((PAPERS[one].encode(), PAPERS[two].encode()), label) for label, one, two in PAIRS[split]]


def cifar(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Colour images (N, 32, 32, 3) and labels."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8), draw.integers(0, 10, number).astype(np.uint8)


def write_batch(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(len(images), -1)], axis=1).tofile(path)
    return path


def write_cifar(root: Path, number: int = 6) -> Path:
    """The binary form, with `number` images per file."""
    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    for seed, name in enumerate(names):
        write_batch(root / name, *cifar(number, seed))
    write(root / "batches.meta.txt", b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n")
    return root


def write_listops(root: Path) -> Path:
    """Short expressions, all different."""
    texts = [f"[{name} {one} [MIN {two} 7 ] 3 ]" for name, one, two in product(("MAX", "SM", "MED"), range(6), range(4))]
    order = np.random.default_rng(0).permutation(len(texts))
    for split, chosen in zip(("train", "val", "test"), np.split(order, [48, 60]), strict=True):
        rows = [f"{texts[one]}\t{listops.evaluate(listops.parse(texts[one]))}" for one in chosen]
        write_lines(root / f"basic_{split}.tsv", ["Source\tTarget", *rows])
    return root


def write_level(level: Path, batches: Mapping[str, int], *, seed: int = 0) -> np.ndarray:
    """A level of Pathfinder with random images, by batch; returns the images."""
    random, images = np.random.default_rng(seed), []
    (level / "metadata").mkdir(parents=True)
    for batch, number in batches.items():
        (level / "imgs" / batch).mkdir(parents=True)
        lines = []
        for index in range(number):
            images.append(random.integers(0, 256, (32, 32), dtype=np.uint8))
            Image.fromarray(images[-1]).save(level / "imgs" / batch / f"sample_{index}.png")
            lines.append(f"imgs/{batch} sample_{index}.png {index} {index % 2} 1.0 14 4 2 0.5 1 1\n")
        (level / "metadata" / f"{batch}.npy").write_text("".join(lines))
    return np.stack(images)


def write_pathfinder(root: Path) -> Path:
    """The hard level."""
    write_level(root / "curv_contour_length_14", {"0": 30, "1": 10})
    return root


RELEASED: dict[str, Callable[[Path], Path]] = {
    "text": write_tree,
    "listops": write_listops,
    "retrieval": write_pairs,
    "pathfinder": write_pathfinder,
    "image": write_cifar,
}
