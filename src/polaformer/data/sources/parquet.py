"""How large a Parquet file becomes in memory: a few kilobytes can hold gigabytes of equal bytes or equal rows.

The metadata at the end of the file is trusted.
"""

from itertools import product
from pathlib import Path
from typing import Any

from polaformer.regular_files import unpacked_limit

MAX_NUMBER_BYTES = 16  # of a number, or the offset of a string, and the validity bit
# Encodings that store a string as an index into a dictionary, or as a suffix of the string before it.
DICTIONARY, INCREMENTAL = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}, {"DELTA_BYTE_ARRAY"}


def problem(path: Path, advice: str) -> str | None:
    """Why a file must not be unpacked, to follow its name in a message, or None. advice: what to do if it is too large."""
    most = unpacked_limit(path.stat())
    try:
        unpacked = unpacked_size(path, most)
    except Exception as error:
        # A damaged file can raise nearly anything inside pyarrow; it all means the same.
        what = " ".join(str(error).split()) or type(error).__name__
        return f"is not a complete Parquet file ({what}); fetch it again"
    too_large = f"would take {unpacked:,} bytes in memory, more than the {most:,} allowed; {advice}"
    return too_large if unpacked > most else None


def unpacked_size(path: Path, most: int) -> int:
    """The bytes of all columns in memory, or some number above `most`; anything larger than that is not unpacked.

    Raises what pyarrow raises for a damaged file.
    """
    from pyarrow.parquet import read_metadata

    total, metadata = 0, read_metadata(path)
    for group, column in product(range(metadata.num_row_groups), range(metadata.num_columns)):
        chunk, width = metadata.row_group(group).column(column), metadata.schema.column(column).length
        stored = chunk.total_uncompressed_size + chunk.num_values * max(MAX_NUMBER_BYTES, width)
        total += _chunk_size(path, chunk, stored, group, most)
        if total > most:
            break
    return total


def _chunk_size(path: Path, chunk: Any, stored: int, group: int, most: int) -> int:
    """The bytes of one column in one row group. stored: its pages, uncompressed, plus the offsets of its values."""
    longest, encodings = stored * chunk.num_values, set(chunk.encodings)  # each value could be as long as everything stored
    if chunk.physical_type != "BYTE_ARRAY" or stored > most or longest <= most:
        return stored
    if encodings & INCREMENTAL:
        return longest
    return stored + (_strings_size(path, chunk.path_in_schema, group) if encodings & DICTIONARY else 0)


def _strings_size(path: Path, column: str, group: int) -> int:
    """The bytes of all strings of a column, counted with only one copy of each distinct string in memory."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, read_dictionary=[column]) as file:
        chunks = file.read_row_group(group, columns=[column]).column(0).chunks
    total = 0
    for chunk in chunks:
        while not isinstance(chunk, pa.DictionaryArray):  # nested in structs and lists
            chunk = chunk.flatten()[0] if isinstance(chunk, pa.StructArray) else chunk.flatten()
        total += pc.sum(pc.binary_length(chunk.dictionary).cast(pa.int64()).take(chunk.indices)).as_py() or 0
    return total
