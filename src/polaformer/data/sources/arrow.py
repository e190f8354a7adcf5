"""Whether an Arrow file takes only as much memory as it has bytes: columns may be compressed or dictionary-encoded."""

import struct
from pathlib import Path
from typing import Any

HEADER, DICTIONARY_DATA, COMPRESSION = 2, 1, 3  # field numbers in the FlatBuffers tables of Arrow's messages


def is_plain_stream(path: Path) -> bool:
    """Whether it is a stream, as `datasets` writes, of uncompressed columns of plain types; raises what pyarrow raises."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        if not all(_is_plain_type(kind) for kind in pa.ipc.open_stream(file).schema.types):
            return False
        file.seek(0)
        return not any(_is_compressed(message) for message in pa.ipc.MessageReader.open_stream(file))


def _is_plain_type(kind: Any) -> bool:
    from pyarrow import types

    if any(test(kind) for test in (types.is_struct, types.is_list, types.is_large_list, types.is_fixed_size_list)):
        return all(_is_plain_type(kind.field(index).type) for index in range(kind.num_fields))
    numbers = (types.is_integer, types.is_floating, types.is_boolean, types.is_temporal, types.is_decimal)
    strings = (types.is_binary, types.is_string, types.is_large_binary, types.is_large_string)
    return any(test(kind) for test in (*numbers, *strings))


def _is_compressed(message: Any) -> bool:
    if message.type == "schema":
        return False
    data = message.metadata.to_pybytes()
    batch = _table(data, _field(data, _table(data, 0), HEADER))
    if message.type != "record batch":
        batch = _table(data, _field(data, batch, DICTIONARY_DATA))
    return bool(_field(data, batch, COMPRESSION))


def _table(data: bytes, reference: int) -> int:
    """The offset of the FlatBuffers table that the value at offset `reference` refers to."""
    return reference + struct.unpack_from("<I", data, reference)[0]


def _field(data: bytes, table: int, number: int) -> int:
    """The offset of a field of a FlatBuffers table; 0 if the table has no field of that number."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size, entry = struct.unpack_from("<H", data, vtable)[0], 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else 0
