"""Checks of .pth files before torch reads them: the globals and opcodes of their pickle, and their zip central directory.

torch's restricted unpickler runs no code from a file, but it calls functions that allocate as much as the file demands, such as
bytearray(n) and torch.Tensor(n, n). A file with two central directories shows one to Python's zipfile and another to torch.
"""

import pickletools
import struct
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

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
# May be named but not called.
TYPES = {f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype) or name.endswith("Storage")}
TYPES |= {"torch.storage.UntypedStorage"}
ALLOWED = REBUILDERS | CONTAINERS | TYPES

# torch.save writes protocol 2. Each of these opcodes pops this many values from the stack and pushes one.
POPS = dict.fromkeys(("NONE", "NEWFALSE", "NEWTRUE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0)
POPS |= dict.fromkeys(("BINFLOAT", "SHORT_BINSTRING"), 0) | {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "EMPTY_TUPLE": 0}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}
MUTATES = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # pop this many values and mutate the one below
FRESH, SHARED = object(), object()  # values that are not tracked further: used once, or again through the memo


class _Global(str):
    """The name of a global that a pickle asks for."""

    __slots__ = ()


def check_pickle(content: bytes) -> None:
    """Traces a pickle without running it; raises UnpicklingError if it does anything that no weights file needs."""
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each open mark
    memo: dict[Any, Any] = {}
    for opcode, value, _ in pickletools.genops(content):
        name = opcode.name
        if name == "GLOBAL":
            stack.append(_allowed_global(str(value).replace(" ", ".")))
        elif name in LITERALS:
            stack.append(value)
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
            _check_call(*_pop(stack, 2))
            stack.append(FRESH)
        elif name == "BINPERSID":
            _check_storage(*_pop(stack, 1))
            stack.append(FRESH)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value] if isinstance(memo[value], str | int) else SHARED)
        elif name not in ("PROTO", "STOP"):
            raise UnpicklingError(f"{name} is not an opcode that torch.save writes")


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
    used_once = isinstance(arguments, tuple) and all(one is FRESH or isinstance(one, tuple) for one in arguments)
    if function in TYPES or (function in CONTAINERS and not used_once):
        raise UnpicklingError(f"GLOBAL {function}")


def _check_storage(reference: Any) -> None:
    """Raises unless the key is a string of digits: 0 and "0", or "a" and "A", would read one archive entry twice."""
    key = reference[2] if isinstance(reference, tuple) and len(reference) == 5 else None
    if not isinstance(key, str) or not (key.isascii() and key.isdecimal()):
        raise UnpicklingError("a storage has no number")


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
