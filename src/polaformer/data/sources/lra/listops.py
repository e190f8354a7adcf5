"""ListOps: nested operations on lists of digits. Their grammar, their value, and the release's files.

An expression such as [MAX 2 [MIN 3 4 ] 9 ] is a sequence of 15 symbols: digits, operators and the closing bracket. The release
writes it with parentheses around every pair, "( ( ( ( [MAX 2 ) …", which mean nothing and are dropped.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polaformer.data.sources.lra.datasets import DATASETS
from polaformer.data.sources.lra.sequences import SPLITS, SequenceSplit
from polaformer.errors import DataError
from polaformer.regular_files import open_regular, reason, too_large_reason

CLASSES = DATASETS["listops"].classes
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*CLASSES, *OPERATORS, "]")
CLOSER = SYMBOLS.index("]")
HEADER = b"Source\tTarget"
ALLOWED = f"digits 0 to 9, {', '.join(OPERATORS)}, ] and parentheses are allowed"
MAX_BYTES = 2**33  # of a file: the release's largest has 0.6 GB
BLOCK_BYTES = 2**24  # read at a time; no row is longer


def file_name(split: str) -> str:
    """The name of a split's file in the release."""
    return f"basic_{split}.tsv"


def value(operator: int, arguments: list[int]) -> int:
    """The value of an operator (0 to 3, as in OPERATORS) for its arguments.

    MED is the median, of an even number of arguments the mean of the two middle ones, rounded down; SM the sum modulo 10.
    """
    if operator == 0:
        return min(arguments)
    if operator == 1:
        return max(arguments)
    if operator == 2:
        in_order, middle = sorted(arguments), len(arguments) // 2
        return in_order[middle] if len(arguments) % 2 else (in_order[middle - 1] + in_order[middle]) // 2
    return sum(arguments) % 10


def evaluate(symbols: np.ndarray) -> int:
    """The value of a valid expression."""
    lists: list[list[int]] = [[]]
    operators: list[int] = []
    for symbol in symbols.tolist():
        if symbol < len(CLASSES):
            lists[-1].append(symbol)
        elif symbol < CLOSER:
            operators.append(symbol - len(CLASSES))
            lists.append([])
        else:
            arguments = lists.pop()
            lists[-1].append(value(operators.pop(), arguments))
    return lists[0][0]


def parse(text: str, where: str = "the expression") -> np.ndarray:
    """The symbols of an expression in prefix form, with or without parentheses; raises DataError that says `where`."""
    symbols: list[int] = []
    depth = parentheses = 0
    for found in _TOKENS.finditer(text):
        token = found[0]
        if token in "()":
            parentheses += 1 if token == "(" else -1
            if parentheses < 0:
                raise DataError(f"{where} has an unmatched ) at character {found.start() + 1}")
            continue
        if token not in _NUMBERS:
            raise DataError(f"{where} has {_shortened(token)} at character {found.start() + 1}; {ALLOWED}")
        if symbols and depth == 0:
            problem = "] without an operator" if token == "]" else f"{token} after the end"
            raise DataError(f"{where} has {problem}, at character {found.start() + 1}; give one expression")
        symbol = _NUMBERS[token]
        if symbol == CLOSER and (not symbols or len(CLASSES) <= symbols[-1] < CLOSER):
            problem = "an operator without arguments" if symbols else "] without an operator"
            raise DataError(f"{where} has {problem}, at character {found.start() + 1}; write for instance [MAX 2 9 ]")
        depth += _DEPTHS[symbol]
        symbols.append(symbol)
    if not symbols:
        raise DataError(f"{where} is empty; write for instance [MAX 2 9 ]")
    if depth or parentheses:
        missing = f"{depth} × ]" if depth else f"{parentheses} × )"
        raise DataError(f"{where} ends too early, with {missing} missing; close all brackets")
    return np.array(symbols, dtype=np.uint8)


def holds(path: Path) -> bool:
    """Whether it is a directory with a file of the release."""
    return any(os.path.isfile(path / file_name(split)) for split in SPLITS)


def load(path: Path, advance: Callable[[int, int], object] = lambda done, total: None) -> dict[str, SequenceSplit]:
    """The splits in a directory of the release's files; raises DataError. Progress is in bytes."""
    files = {split: path / file_name(split) for split in SPLITS if os.path.lexists(path / file_name(split))}
    if not files:
        raise DataError(f"{path} has no {', '.join(map(file_name, SPLITS))}; give the directory listops-1000 of the release")
    sizes = {split: _size(file) for split, file in files.items()}
    total, splits, before = sum(sizes.values()), {}, 0
    for split, file in files.items():
        splits[split] = read(file, lambda done, before=before: advance(before + done, total))  # type: ignore[misc]
        before += sizes[split]
        advance(before, total)
    return splits


def read(file: Path, advance: Callable[[int], object] = lambda done: None) -> SequenceSplit:
    """The expressions in one of the release's files; raises DataError that names file and line."""
    blocks = []
    done = 0
    for block, line in _blocks(file):
        found = _fast(block)
        blocks.append(_slow(block, f"{file}", line) if found is None else found)
        done += len(block)
        advance(done)
    if not blocks:
        raise DataError(f"{file} has no rows after its header; fetch it again")
    symbols, lengths, labels = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    own = np.arange(len(labels), dtype=np.int64)[:, None]
    return SequenceSplit(CLASSES, symbols, offsets, own, labels.astype(np.int64), str(file))


def statistics(split: SequenceSplit) -> dict[str, Any]:
    """The common statistics, plus lengths without closing brackets, operators per tree, and the root-operator rule's accuracy.

    That rule predicts the most frequent value of expressions with the same root operator: it sees only the first symbol.
    """
    if not len(split):
        return split.statistics()
    closers = np.diff(np.searchsorted(np.flatnonzero(split.symbols == CLOSER), split.offsets))[split.documents[:, 0]]
    lengths = split.lengths()[:, 0] - closers
    roots = split.symbols[split.offsets[split.documents[:, 0]]]
    counts = np.zeros((len(SYMBOLS), len(CLASSES)), dtype=np.int64)
    np.add.at(counts, (roots, split.labels), 1)
    return {
        **split.statistics(),
        "length_without_closers": {
            "mean": round(float(lengths.mean()), 1),
            "median": int(np.median(lengths)),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
        },
        "operators": round(float(closers.mean()), 1),
        "root_operator_rule": round(float(counts.max(1).sum() / len(split)), 4),
    }


class _Rows(NamedTuple):
    """Some rows of a file."""

    symbols: np.ndarray  # of all rows, one after the other
    lengths: np.ndarray
    labels: np.ndarray


_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_DEPTHS = np.array([0] * len(CLASSES) + [1] * len(OPERATORS) + [-1], dtype=np.int8)
_TOKENS = re.compile(r"\[(?:MIN|MAX|MED|SM)|[()\]]|[^\s()\[\]]+|\[[^\s()\[\]]*")
_CANONICAL = b"".join(symbol.encode() for symbol in SYMBOLS) + b"() \t\n"
# One byte per operator, and which symbol a byte is.
_SHORT = {name.encode(): bytes([1 + number]) for number, name in enumerate(OPERATORS)}
_UNKNOWN = len(SYMBOLS)
_SYMBOL_OF_BYTE = np.full(256, _UNKNOWN, dtype=np.uint8)
for _number, _symbol in enumerate(SYMBOLS):
    _SYMBOL_OF_BYTE[_SHORT.get(_symbol.encode(), _symbol.encode())[0]] = _number


def _blocks(file: Path) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, which end with a line feed, and the number of the first line of each; the header is checked."""
    try:
        with open_regular(file) as opened:
            header = opened.readline(1000)
            if header.rstrip(b"\r\n") != HEADER:
                raise DataError(f"{file}, line 1: the header is {_shortened(header)}; it must be {HEADER!r}")
            line, rest = 2, b""
            while found := opened.read(BLOCK_BYTES):
                whole, feed, rest = (rest + found).rpartition(b"\n")
                if feed:
                    yield whole + feed, line
                    line += whole.count(b"\n") + 1
                elif len(rest) > BLOCK_BYTES:
                    raise DataError(f"{file}, line {line}: the row has more than {BLOCK_BYTES:,} bytes; fetch the file again")
            if rest:
                yield rest + b"\n", line
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason(error)}; check the path, or fetch it again") from error


def _fast(block: bytes) -> _Rows | None:
    """The rows of a block in which all is as in the release, down to the spaces; otherwise None.

    Without parentheses, and with one byte for an operator, bytes alternate between symbols and separators.
    """
    block = block.replace(b"\r\n", b"\n")
    if block.translate(None, _CANONICAL) or block.count(b"(") != block.count(b")"):
        return None
    block = block.replace(b"( ", b"").replace(b" )", b"")
    for name, short in _SHORT.items():
        block = block.replace(name, short)
    if len(block) % 2:
        return None
    pairs = np.frombuffer(block, dtype=np.uint8).reshape(-1, 2)
    symbols, separators = _SYMBOL_OF_BYTE[pairs[:, 0]], pairs[:, 1]
    last, ends = np.flatnonzero(separators == ord("\t")), np.flatnonzero(separators == ord("\n"))
    num_spaces = np.count_nonzero(separators == ord(" "))
    if not np.array_equal(last + 1, ends) or num_spaces + 2 * len(ends) != len(pairs) or (symbols == _UNKNOWN).any():
        return None
    labels = symbols[ends]
    lengths = np.diff(ends, prepend=-1) - 1
    symbols = np.delete(symbols, ends)
    if (labels >= len(CLASSES)).any() or not _is_balanced(symbols, np.cumsum(lengths) - 1):
        return None
    return _Rows(symbols, lengths, labels)


def _is_balanced(symbols: np.ndarray, last: np.ndarray) -> bool:
    """Whether every expression is one whole tree. last: the index of the last symbol of each."""
    depths = np.cumsum(_DEPTHS[symbols], dtype=np.int64)
    is_closer = symbols == CLOSER
    is_opener = (symbols >= len(CLASSES)) & ~is_closer
    without_arguments = (is_opener[:-1] & is_closer[1:]).any()
    return not without_arguments and bool((depths >= 0).all()) and np.array_equal(np.flatnonzero(depths == 0), last)


def _slow(block: bytes, file: str, line: int) -> _Rows:
    """The rows of any block, one at a time; raises DataError for the first that is malformed."""
    rows = []
    for number, row in enumerate(block[:-1].split(b"\n"), start=line):
        where = f"{file}, line {number}"
        columns = row.removesuffix(b"\r").split(b"\t")
        if len(columns) != 2:
            raise DataError(f"{where}: the row has {len(columns)} columns; it must have 2, the expression and its value")
        source, label = columns[0].decode("utf-8", "backslashreplace"), columns[1]
        if not re.fullmatch(rb"[0-9]", label):
            raise DataError(f"{where}: the value is {_shortened(label)}; it must be a digit from 0 to 9")
        rows.append((parse(source, f"{where}: the expression"), int(label)))
    symbols, labels = zip(*rows, strict=True)
    return _Rows(np.concatenate(symbols), np.array([len(one) for one in symbols]), np.array(labels, dtype=np.uint8))


def _size(file: Path) -> int:
    try:
        size = os.stat(file).st_size
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason(error)}; check the path") from error
    if size > MAX_BYTES:
        raise DataError(f"{file} cannot be read: {too_large_reason(size, MAX_BYTES)}; split it")
    return size


def _shortened(text: str | bytes) -> str:
    return repr(text if len(text) <= 40 else text[:40])
