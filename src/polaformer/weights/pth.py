"""Checks of .pth files before torch reads them: the globals and opcodes of their pickle, and their zip central directory.

torch's restricted unpickler runs no code from a file, but it calls functions that allocate as much as the file demands, such as
bytearray(n) and torch.Tensor(n, n). A file with two central directories shows one to Python's zipfile and another to torch.
"""

import pickletools
import struct
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

# The authors' files hold their configuration, an object of a class that may not be installed; it is read as a plain dict.
CONFIGURATION_CLASSES = ("yacs.config.CfgNode",)
# May be called with anything: none of them allocates more than its arguments hold.
REBUILDERS = {
    *(f"torch._utils._rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state")),
    *(f"torch._utils._rebuild_{what}" for what in ("sparse_tensor", "meta_tensor_no_storage")),
    *("torch.serialization._get_layout", "torch.device", "builtins.complex", "__builtin__.complex"),
}
# May be called with values used once only: many copies of one large container would take little room in a file.
CONTAINERS = {"collections.OrderedDict", "collections.Counter", "torch.Size", "builtins.set", "__builtin__.set"}
CONTAINERS |= set(CONFIGURATION_CLASSES)
# mmengine's checkpoints (mmdetection, mmsegmentation) also hold the history of their training, and numbers of NumPy. Whatever
# these names stand for is not called: each is read as `Dropped`, which keeps nothing. getattr is how methods are pickled.
HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"
_NUMPY = {f"numpy.{core}.multiarray.{what}" for core in ("core", "_core") for what in ("_reconstruct", "scalar")}
DROPPED = {HISTORY, "numpy.ndarray", "numpy.dtype", *_NUMPY, "builtins.getattr", "builtins.bytes"}
DROPPED |= {"__builtin__.getattr", "__builtin__.bytes"}
_GETATTR, _BYTES = ("builtins.getattr", "__builtin__.getattr"), ("builtins.bytes", "__builtin__.bytes")
_ENCODE = "_codecs.encode"  # how the bytes of NumPy's numbers are pickled; torch calls it
# May be named but not called.
TYPES = {f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype) or name.endswith("Storage")}
TYPES |= {"torch.storage.UntypedStorage"}
ALLOWED = REBUILDERS | CONTAINERS | TYPES | DROPPED | {_ENCODE}

# torch.save writes protocol 2. Each of these opcodes pops this many values from the stack and pushes one.
POPS = dict.fromkeys(("NEWFALSE", "NEWTRUE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0)
POPS |= dict.fromkeys(("BINFLOAT", "SHORT_BINSTRING"), 0) | {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "EMPTY_TUPLE": 0}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}
MUTATES = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # pop this many values and mutate the one below
FRESH, SHARED = object(), object()  # values that are not tracked further: used once, or again through the memo


class Dropped:
    """Stands for an object that is of no use for weights; ignores its arguments and its state."""

    __slots__ = ()

    def __new__(cls, *_: Any) -> "Dropped":
        """The one and only instance."""
        return _DROPPED

    def __setstate__(self, _: Any) -> None:
        pass


_DROPPED = object.__new__(Dropped)


class _Global(str):
    """The name of a global that a pickle asks for."""

    __slots__ = ()


def check_pickle(content: bytes) -> None:
    """Traces a pickle without running it; raises UnpicklingError if it does anything that no weights file needs."""
    for reference in trace(content, len(content)):
        storage_key(reference, length=5)


def trace(stream: bytes | IO[bytes], size: int) -> list[Any]:
    """Checks the next pickle, of a file of `size` bytes; returns its references to storages, as far as they were tracked."""
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each open mark
    memo: dict[Any, Any] = {}
    references: list[Any] = []
    encoded = 0
    for opcode, value, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "GLOBAL":
            stack.append(_allowed_global(str(value).replace(" ", ".")))
        elif name in LITERALS:
            stack.append(value)
        elif name == "NONE":
            stack.append(None)
        elif name in POPS:
            popped = _pop(stack, POPS[name])
            stack.append(popped if "TUPLE" in name else FRESH)
        elif name == "MARK":
            outer.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            popped, stack = tuple(stack), outer.pop()
            if name == "TUPLE":
                stack.append(popped)
        elif name in MUTATES:
            _pop(stack, MUTATES[name])
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = _pop(stack, 2)
            _check_call(function, arguments)
            # The text of a call can come from the memo, any number of times.
            encoded += len(arguments[0]) if function == _ENCODE else 0
            if encoded > size:
                raise UnpicklingError(f"GLOBAL {function}")
            stack.append(FRESH)
        elif name == "BINPERSID":
            references += _pop(stack, 1)
            stack.append(FRESH)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value] if isinstance(memo[value], str | int) else SHARED)
        elif name not in ("PROTO", "STOP"):
            raise UnpicklingError(f"{name} is not an opcode that torch.save writes")
    return references


def storage_key(reference: Any, *, length: int) -> str:
    """The key of a storage; raises unless it is a string of digits: 0 and "0", or "a" and "A", would read one entry twice.

    length: of the reference; 5 in archives.
    """
    key = reference[2] if isinstance(reference, tuple) and len(reference) == length else None
    if not isinstance(key, str) or not (key.isascii() and key.isdecimal()):
        raise UnpicklingError("a storage has no number")
    return key


def _pop(stack: list[Any], count: int) -> tuple[Any, ...]:
    if count > len(stack):
        raise UnpicklingError("its stack is empty")
    popped = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return popped


def _allowed_global(name: str) -> _Global:
    if name not in ALLOWED:
        raise UnpicklingError(f"GLOBAL {name}")
    return _Global(name)


def _check_call(function: Any, arguments: Any) -> None:
    if not isinstance(function, _Global):
        raise UnpicklingError("it calls something that is not a function")
    given = arguments if isinstance(arguments, tuple) else (SHARED,)
    used_once = all(one is FRESH or one is None or isinstance(one, tuple) for one in given)
    is_text = len(given) == 2 and type(given[0]) is str and given[1] == "latin1"
    is_wrong = function in TYPES or (function in CONTAINERS and not used_once)
    is_wrong |= function == _ENCODE and not is_text
    is_wrong |= function in _GETATTR and given[:1] != (HISTORY,)
    is_wrong |= function in _BYTES and bool(given)
    if is_wrong:
        raise UnpicklingError(f"GLOBAL {function}")


def ends_with_central_directory(path: Path) -> bool:
    """Whether the archive ends with its central directory and the end records, and these point to that directory.

    Python's zipfile reads the directory just before the end records; torch reads the one that they point to.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 98, 0))
        tail = file.read().rjust(98, b"\0")
    end64, locator, end = tail[:56], tail[56:76], tail[76:]  # zip64 end record, its locator, end record
    length, offset, comment = struct.unpack("<12x2IH", end)
    if end[:4] != b"PK\5\6" or comment:
        return False
    if locator[:4] != b"PK\6\7":
        return bool(length + offset == size - 22)
    end64_offset = struct.unpack("<8xQ4x", locator)[0]
    rest, length, offset = struct.unpack("<4xQ28x2Q", end64)
    return end64[:4] == b"PK\6\6" and rest == 44 and end64_offset == size - 98 and length + offset == end64_offset
