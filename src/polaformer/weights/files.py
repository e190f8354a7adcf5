"""Reading and writing state dicts. Nothing here runs code from a file.

Reads safetensors, and .pth files (the authors', timm's, or a bare state dict) with PyTorch's restricted unpickler, which builds
tensors and plain containers and refuses everything else.
"""

import os
import re
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polaformer.regular_files import open_regular, reason, too_large_reason
from polaformer.weights.errors import WeightsError
from polaformer.weights.legacy_pth import check_legacy, is_legacy
from polaformer.weights.pth import CONFIGURATION_CLASSES, DROPPED, Dropped, check_pickle, ends_with_central_directory

StateDict = dict[str, Any]

FORMAT = {"format": "polaformer", "version": "1"}
WRAPPERS = ("model", "state_dict", "state_dict_ema", "model_ema", "module")  # keys under which files keep the state dict
MAX_BYTES = 4 * 2**30  # of a weights file: the largest of these models needs a third, with optimiser and EMA
MAX_WRAPPERS = 8  # how deeply a state dict may be nested
NOT_PLAIN = "a sparse, quantised or meta tensor, or one with more elements than its storage holds"
# What torch builds instead of classes that may not be installed, by their names.
STUBS: list[Any] = [(OrderedDict, name) for name in CONFIGURATION_CLASSES] + [(Dropped, name) for name in DROPPED]
PREFIXES = ("module.", "_orig_mod.", "model.")  # before every name, if a wrapped model was saved


def read_state_dict(path: str | PathLike[str]) -> StateDict:
    """The state dict of a safetensors or .pth file, on the CPU; raises WeightsError. Executes nothing."""
    path = Path(path)
    with _readable(path) as size:
        if _is_safetensors(path):
            return _read_safetensors(path)
        state = extract_state_dict(_read_pth(path), str(path))
        check_storages(state, size, str(path))
        return state


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file; {} for other files; raises WeightsError."""
    path = Path(path)
    with _readable(path):
        if not _is_safetensors(path):
            return {}
        with _open_safetensors(path) as file:
            return dict(file.metadata() or {})


def write_safetensors(tensors: Mapping[str, Tensor], path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    """Writes to a temporary file beside the target, then renames it: a kill leaves either the old file or the new one."""
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    try:
        save_file(dict(tensors), temporary, metadata=dict(metadata) | FORMAT)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _readable(path: Path) -> Iterator[int]:
    """Checks that a file can be read, yields its size, and turns an OSError raised inside the context into WeightsError."""
    try:
        if path.is_dir():
            raise WeightsError(f"{path} is a directory; give a .safetensors or .pth file")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if not size:
            raise WeightsError(f"{path} is empty; fetch or write it again")
        if size > MAX_BYTES:
            raise OSError(too_large_reason(size, MAX_BYTES))
        yield size
    except WeightsError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise WeightsError(f"{path} cannot be read: {reason(error)}; check the path") from error


def _read_safetensors(path: Path) -> StateDict:
    with _open_safetensors(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") == FORMAT["format"] and metadata.get("version") != FORMAT["version"]:
            raise WeightsError(
                f"{path} is version {metadata.get('version')!r} of our format, but this library reads {FORMAT['version']!r}; "
                "update polaformer"
            )
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is not a dict


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a complete safetensors file: {error}; fetch or write it again") from error


def _read_pth(path: Path) -> Any:
    """The content of a torch.save file, through the restricted unpickler only."""
    legacy = is_legacy(path)
    pickled = "" if legacy else _check_archive(path)
    try:
        if legacy:
            check_legacy(path)
        else:
            with zipfile.ZipFile(path) as archive:
                check_pickle(archive.read(pickled))
        with _stubs():
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        requested = re.search(r"GLOBAL:? (\S+)", str(error))
        why = f"it asks for {requested[1]}" if requested else "its pickle is not of the restricted form"
        raise WeightsError(
            f"{path} holds more than tensors and plain containers ({why}); it was not loaded, and nothing in it was run. "
            "If you trust its origin, save its state dict alone, as safetensors"
        ) from error
    except Exception as error:
        # A damaged file can raise nearly anything inside torch; report all of it as a damaged file.
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{path} is damaged: {what}; fetch or write it again") from error


@contextmanager
def _stubs() -> Iterator[None]:
    """In this context torch reads STUBS for the classes of their names, even if this process allowed the classes themselves."""
    allowed = torch.serialization.get_safe_globals()
    clashing = [one for one in allowed if one not in STUBS and _name_of(one) in {name for _, name in STUBS}]
    if clashing:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([one for one in allowed if one not in clashing])
    try:
        with torch.serialization.safe_globals(STUBS):
            yield
    finally:
        torch.serialization.add_safe_globals(clashing)


def _name_of(allowed: Any) -> str:
    """The name by which a pickle asks for an allowed global."""
    return str(allowed[1]) if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


def _check_archive(path: Path) -> str:
    """The name of its pickle; raises unless it is a zip archive as torch.save writes it: uncompressed, so it cannot expand."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise WeightsError(f"{path} is damaged: {error}; fetch or write it again") from error
    if not is_archive:
        raise WeightsError(
            f"{path} is neither a safetensors file nor a complete torch.save file; "
            "fetch it again, or save its state dict as safetensors"
        )
    if not ends_with_central_directory(path):
        raise WeightsError(f"{path} does not end with its central directory, as torch.save files do; it was not loaded")
    names = [entry.filename for entry in entries]
    root = names[0].partition("/")[0] if names else ""
    # torch takes the directory of the first name and looks for the others in it, ignoring case.
    is_regular = all(name.startswith(f"{root}/") and ".." not in name.split("/") for name in names)
    is_regular = is_regular and names == [entry.orig_filename for entry in entries]
    if not root or not is_regular or len({name.lower() for name in names}) < len(names):
        raise WeightsError(f"{path} has duplicate entries or some outside its root, unlike torch.save files; it was not loaded")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise WeightsError(f"{path} is a compressed archive, which torch.save does not write; it was not loaded")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise WeightsError(f"{path} claims to hold more bytes than it has; it was not loaded")
    return f"{root}/data.pkl"


def _is_safetensors(path: Path) -> bool:
    """By content: an 8-byte header length, then JSON; by extension if that does not decide."""
    with open_regular(path) as file:
        start = file.read(9)
    return (len(start) == 9 and start[8:] == b"{" and start[:2] != b"PK") or path.suffix == ".safetensors"


def extract_state_dict(content: Any, origin: str = "the state dict") -> StateDict:
    """The state dict in the content of a file: the content itself, or the value under one of the usual keys."""
    for _ in range(MAX_WRAPPERS):
        inside = [content[key] for key in WRAPPERS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
        content = inside[0] if inside else content
    if not isinstance(content, Mapping) or not content:
        kind = "an empty mapping" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise WeightsError(f"{origin} holds {kind}; a mapping from names to tensors is needed")
    for key, value in content.items():
        if not isinstance(key, str) or not is_plain_tensor(value):
            kind = f"a {type(value).__name__}" if not isinstance(value, Tensor) else NOT_PLAIN
            raise WeightsError(
                f"{origin} holds no state dict: {key!r} is {kind if isinstance(key, str) else 'not a name'}; "
                f"a mapping from names to plain tensors is needed, bare or under {', '.join(WRAPPERS)}"
            )
    # Saved from inside DistributedDataParallel, torch.compile or timm's feature wrapper.
    state = dict(content)
    while prefix := next((one for one in PREFIXES if all(key.startswith(one) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def is_plain_tensor(value: Any) -> bool:
    """Whether it is a dense tensor whose storage holds all its elements.

    A tensor with strides of 0 takes a few bytes in a file, and any number of them once copied.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_storages(state: StateDict, size: int, origin: str) -> None:
    """Raises WeightsError if the tensors take more memory than the file has bytes, which a genuine file never does."""
    stored = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in state.values()}
    if sum(stored.values()) > size:
        raise WeightsError(f"{origin} has {size:,} bytes, but its tensors take {sum(stored.values()):,}; it was not loaded")


def check_finite(path: str | PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Raises WeightsError if a parameter that was read from the file is NaN or infinite."""
    if broken := [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]:
        raise WeightsError(f"{path} has weights that are not finite, first in {broken[0]}; train or download it again")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
