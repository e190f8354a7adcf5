"""What the pages of a Parquet file say of their size, each in a header of Thrift's compact protocol.

The list at the end of the file says it too, but readers allocate what the pages say.
"""

from typing import Any, BinaryIO

UNPACKED, PACKED = 2, 3  # numbers of fields: the bytes of a page in memory, and in the file
# Of a page of either version: the field of its structure, in it that of the encoding, the number there, and its name.
ENCODINGS = tuple(
    (page, field, number, name)
    for page, field in ((5, 2), (8, 4))
    for number, name in ((2, "PLAIN_DICTIONARY"), (7, "DELTA_BYTE_ARRAY"), (8, "RLE_DICTIONARY"))
)
SHORT, LONGEST = 2**12, 2**24  # bytes of a header: most, and all that pyarrow reads
TRUE, FALSE, BYTE, NUMBERS, DOUBLE, TEXT, STRUCTURE = 1, 2, 3, (4, 5, 6), 7, 8, 12


def look_at_pages(file: BinaryIO, chunk: Any) -> tuple[int, set[str]]:
    """The bytes in memory that the pages of a column chunk claim, and their encodings among ENCODINGS.

    Raises ValueError where a header makes no sense.
    """
    starts = (chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None)
    place = min(start for start in starts if start)
    end, total, encodings = place + chunk.total_compressed_size, 0, set()
    while place < end:
        fields, size = _header(file, place)
        unpacked, packed = fields.get(UNPACKED), fields.get(PACKED)
        if not isinstance(unpacked, int) or not isinstance(packed, int) or min(unpacked, packed) < 0:
            raise ValueError(f"the page at byte {place:,} has no size")
        total += unpacked
        encodings |= {name for page, field, number, name in ENCODINGS if fields.get(page, {}).get(field) == number}
        place += size + packed
    return total, encodings


def _header(file: BinaryIO, place: int) -> tuple[dict[int, Any], int]:
    """The numbers and structures in a header, by field, and its length."""
    for most in (SHORT, LONGEST):
        file.seek(place)
        data = file.read(most)
        try:
            return _structure(data, 0)
        except IndexError:
            continue
    raise ValueError(f"the header at byte {place:,} has no end")


def _structure(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The numbers and structures in one, by field, and where it ends; raises IndexError where it goes on beyond the data."""
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        field, at = (field + (head >> 4), at) if head >> 4 else _signed(data, at)
        kind = head & 15
        if kind in NUMBERS:
            found[field], at = _signed(data, at)
        elif kind == STRUCTURE:
            found[field], at = _structure(data, at)
        elif kind == TEXT:
            size, at = _number(data, at)
            at += size
        elif kind in (TRUE, FALSE, BYTE, DOUBLE):
            at += {BYTE: 1, DOUBLE: 8}.get(kind, 0)
        else:
            raise ValueError(f"a header has a field of kind {kind}")
    return found, at + 1


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _number(data, at)
    return (value >> 1) ^ -(value & 1), at


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a header has a number of more than ten bytes")
