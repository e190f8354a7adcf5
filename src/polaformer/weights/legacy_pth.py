"""Checks of .pth files in the format from before torch 1.6, in which mmdetection publishes its models.

Such a file is five pickles: a magic number, a version, facts about the system, the content, and the keys of the storages in the
order in which they follow, each after its number of elements in 8 bytes. torch allocates what the content claims, then reads.
"""

import pickletools
from pathlib import Path
from pickle import UnpicklingError
from typing import IO

import torch

from polaformer.weights.pth import storage_key, trace

START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of the magic number
LIST_OF_STRINGS = {"PROTO", "EMPTY_LIST", "MARK", "BINUNICODE", "BINPUT", "LONG_BINPUT", "APPEND", "APPENDS", "STOP"}
# The dtypes of weights and of optimisers' states, by the name of their storages.
_DTYPES = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}
_DTYPES |= {"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8}
_DTYPES |= {"Bool": torch.bool}
ITEM_SIZES = {f"torch.{name}Storage": dtype.itemsize for name, dtype in _DTYPES.items()}


def is_legacy(path: Path) -> bool:
    """Whether torch.save wrote the file in the old format."""
    with path.open("rb") as file:
        return file.read(len(START)) == START


def check_legacy(path: Path) -> None:
    """Raises UnpicklingError if a pickle does what no weights file needs, ValueError if the storages have another size."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        # References to storages have no place before the content, and none of their sizes would be counted.
        if any(trace(file, size) for _ in ("magic number", "version", "system")):
            raise UnpicklingError("a storage has no place in its header")
        claimed = _claimed_bytes(trace(file, size))
        listed = _strings(file)
        if sorted(listed) != sorted(claimed):
            raise UnpicklingError("it does not list each of its storages once")
        expected = sum(claimed.values()) + 8 * len(claimed)
        if expected != size - file.tell():
            raise ValueError(f"its storages take {size - file.tell():,} bytes, but should take {expected:,}")


def _claimed_bytes(references: list[object]) -> dict[str, int]:
    """The bytes of each storage by key, according to the references to it."""
    found: dict[str, int] = {}
    for reference in references:
        key = storage_key(reference, length=6)
        assert isinstance(reference, tuple)
        _, kind, _, _, count, view = reference
        if not isinstance(count, int) or count < 0 or view is not None or kind not in ITEM_SIZES:
            raise UnpicklingError("a storage is not plain")
        if found.setdefault(key, count * ITEM_SIZES[kind]) != count * ITEM_SIZES[kind]:
            raise UnpicklingError("a storage has two sizes")
    return found


def _strings(file: IO[bytes]) -> list[str]:
    """The next pickle, a list of strings."""
    found = []
    for opcode, value, _ in pickletools.genops(file):
        if opcode.name not in LIST_OF_STRINGS:
            raise UnpicklingError(f"its list of storages has the opcode {opcode.name}")
        if opcode.name == "BINUNICODE":
            found.append(str(value))
    return found
