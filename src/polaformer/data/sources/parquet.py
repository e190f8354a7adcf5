"""How large a Parquet file becomes in memory: a few kilobytes can hold gigabytes of equal bytes or equal rows.

What the list of columns at the end of the file says is believed.
"""

from pathlib import Path
from typing import Any

WIDEST_NUMBER = 16  # bytes: a number, or the place of a text, and whether it is there
# How a value may stand in a file as the number of a text, or as an end to the text before it.
BY_NUMBER, BY_THE_ONE_BEFORE = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}, {"DELTA_BYTE_ARRAY"}


def unpacked_size(path: Path, most: int) -> int:
    """The bytes of all columns in memory, or a number above `most`; what is larger than that is not unpacked.

    Raises what pyarrow raises for a damaged file.
    """
    from pyarrow.parquet import read_metadata

    total, about = 0, read_metadata(path)
    for group, column in ((group, column) for group in range(about.num_row_groups) for column in range(about.num_columns)):
        chunk, width = about.row_group(group).column(column), about.schema.column(column).length
        stored = chunk.total_uncompressed_size + chunk.num_values * max(WIDEST_NUMBER, width)
        total += _chunk_size(path, chunk, stored, group, most)
        if total > most:
            break
    return total


def _chunk_size(path: Path, chunk: Any, stored: int, group: int, most: int) -> int:
    """Of one column in one group of rows. stored: its pages, not compressed, and the places of its values."""
    longest, encodings = stored * chunk.num_values, set(chunk.encodings)  # each value could be all that is stored
    if chunk.physical_type != "BYTE_ARRAY" or stored > most or longest <= most:
        return stored
    if encodings & BY_THE_ONE_BEFORE:
        return longest
    return stored + (_texts_size(path, chunk.path_in_schema, group) if encodings & BY_NUMBER else 0)


def _texts_size(path: Path, column: str, group: int) -> int:
    """The bytes of all texts of a column, counted while each different one is in memory once."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, read_dictionary=[column]) as file:
        chunks = file.read_row_group(group, columns=[column]).column(0).chunks
    total = 0
    for chunk in chunks:
        while not isinstance(chunk, pa.DictionaryArray):  # inside structures and lists
            chunk = chunk.flatten()[0] if isinstance(chunk, pa.StructArray) else chunk.flatten()
        total += pc.sum(pc.binary_length(chunk.dictionary).cast(pa.int64()).take(chunk.indices)).as_py() or 0
    return total
