"""Compares generated data with the manifest that their generator wrote beside them."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polaformer.data.audit import SampleProblem
from polaformer.data.sources.lra.generation import FORMAT, MANIFEST
from polaformer.data.sources.lra.pathfinder import level_name
from polaformer.data.sources.lra.sequences import SequenceSplit
from polaformer.regular_files import open_regular, read_regular, reason


def changes(path: Path, splits: Mapping[str, SequenceSplit]) -> list[SampleProblem]:
    """The splits that are no longer as they were generated; [] if they were not generated.

    path: where the splits were read: a directory, or a level of Pathfinder, whose manifest is one directory above.
    """
    path = path.resolve()
    folder = next((folder for folder in (path, path.parent) if _is_generated(folder)), None)
    if folder is None:
        return []
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
        named = manifest["splits"].items()
        found = [(name, _change(splits.get(name), about, _source(folder, manifest, about))) for name, about in named]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [SampleProblem("manifest", f"{folder / MANIFEST}", f"it is damaged: {reason(error)}")]
    return [SampleProblem(name, f"{folder / MANIFEST}", text) for name, text in found if text is not None]


def _is_generated(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        return FORMAT.encode() in read_regular(folder / MANIFEST)
    return False


def _source(folder: Path, manifest: dict[str, Any], about: dict[str, Any]) -> Path:
    """The file of a split, or the level that it is a part of."""
    return folder / (about["file"] if "file" in about else level_name(manifest["about"]["contour_length"]))


def _change(split: SequenceSplit | None, about: dict[str, Any], source: Path) -> str | None:
    """What has changed; None if nothing has, or if the manifest is about other data than the split."""
    if split is None:
        return "it was generated, but it is not in the data"
    if Path(split.origin).resolve() != source:
        return None
    if source.is_dir():
        digest = split.digest()
    else:
        with open_regular(source) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == about["sha256"]:
        return None
    return (
        f"it has changed since it was generated, from {about['samples']:,} samples to {len(split):,}: sha256 should be "
        f"{about['sha256']} but is {digest}"
    )
