"""Checks of .pth files before torch reads them: what their pickle may ask for, and where their list of contents stands.

torch's restricted unpickler runs no code of a file, but it calls functions that allocate as much as the file says, such as
bytearray(n) and torch.Tensor(n, n). A file with two lists of contents shows one to Python's zipfile and another to torch.
"""

import pickletools
import struct
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

# The authors' files hold their configuration, an object of a class that need not be installed; it is read as a plain dict.
CONFIGURATION_CLASSES = ("yacs.config.CfgNode",)
# Called with anything: none of them allocates more than its arguments hold.
REBUILDERS = {
    *(f"torch._utils._rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state")),
    *(f"torch._utils._rebuild_{what}" for what in ("sparse_tensor", "meta_tensor_no_storage")),
    *("torch.serialization._get_layout", "torch.device", "builtins.complex", "__builtin__.complex"),
}
# Called with what is used once only: many copies of one large container would need little room in a file.
CONTAINERS = {"collections.OrderedDict", "collections.Counter", "torch.Size", "builtins.set", "__builtin__.set"}
CONTAINERS |= set(CONFIGURATION_CLASSES)
# Never called.
KINDS = {f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype) or name.endswith("Storage")}
KINDS |= {"torch.storage.UntypedStorage"}
ALLOWED = REBUILDERS | CONTAINERS | KINDS

# torch.save writes protocol 2. Each of these opcodes replaces so many values at the top of the stack by one.
TAKES = dict.fromkeys(("NONE", "NEWFALSE", "NEWTRUE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0)
TAKES |= dict.fromkeys(("BINFLOAT", "SHORT_BINSTRING"), 0) | {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "EMPTY_TUPLE": 0}
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}  # that stand in the file
CHANGES = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # take so many values, and change the one below
FRESH, SHARED = object(), object()  # what is not followed further: used in one place, and again


class _Name(str):
    """What a pickle asks for by its name."""

    __slots__ = ()


def check_pickle(content: bytes) -> None:
    """Follows a pickle without running it; raises UnpicklingError where it does what no weights file needs."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks before every mark that is open
    memo: dict[Any, Any] = {}
    for opcode, value, _ in pickletools.genops(content):
        name = opcode.name
        if name == "GLOBAL":
            stack.append(_allowed(str(value).replace(" ", ".")))
        elif name in VALUES:
            stack.append(value)
        elif name in TAKES:
            taken = _pop(stack, TAKES[name])
            stack.append(taken if "TUPLE" in name else FRESH)
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            taken, stack = tuple(stack), below.pop()
            if name == "TUPLE":
                stack.append(taken)
        elif name in CHANGES:
            _pop(stack, CHANGES[name])
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
            raise UnpicklingError(f"{name} is no opcode that torch.save writes")


def _pop(stack: list[Any], count: int) -> tuple[Any, ...]:
    if count > len(stack):
        raise UnpicklingError("its stack is empty")
    taken = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return taken


def _allowed(name: str) -> _Name:
    if name not in ALLOWED:
        raise UnpicklingError(f"GLOBAL {name}")
    return _Name(name)


def _check_call(function: Any, arguments: Any) -> None:
    if not isinstance(function, _Name):
        raise UnpicklingError("it calls what is no function")
    copies_once = isinstance(arguments, tuple) and all(one is FRESH or isinstance(one, tuple) for one in arguments)
    if function in KINDS or (function in CONTAINERS and not copies_once):
        raise UnpicklingError(f"GLOBAL {function}")


def _check_storage(about: Any) -> None:
    """Raises unless its name is a number in text: 0 and "0", or "a" and "A", would be one part of the archive read twice."""
    key = about[2] if isinstance(about, tuple) and len(about) == 5 else None
    if not isinstance(key, str) or not (key.isascii() and key.isdecimal()):
        raise UnpicklingError("a storage has no number")


def ends_as_torch_writes(path: Path) -> bool:
    """Whether the archive ends with its list of contents and the records that say where it stands, and they say it.

    Python's zipfile takes the list that stands before these records; torch takes the one at the place that they name.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 98, 0))
        tail = file.read().rjust(98, b"\0")
    large, locator, end = tail[:56], tail[56:76], tail[76:]
    listed, first, comment = struct.unpack("<12x2IH", end)
    if end[:4] != b"PK\5\6" or comment:
        return False
    if locator[:4] != b"PK\6\7":
        return bool(listed + first == size - 22)
    place = struct.unpack("<8xQ4x", locator)[0]
    rest, large_listed, large_first = struct.unpack("<4xQ28x2Q", large)
    return large[:4] == b"PK\6\6" and rest == 44 and place == size - 98 and large_listed + large_first == place
