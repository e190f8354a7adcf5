"""State dicts from files and into files. Nothing here runs code that a file brings.

Read: safetensors, and .pth files (the authors', a bare state dict, timm's) with PyTorch's restricted unpickler, which builds
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

from polaformer.regular_files import open_regular, reason, too_large
from polaformer.weights.errors import WeightsError
from polaformer.weights.pth import CONFIGURATION_CLASSES, check_pickle, ends_as_torch_writes

StateDict = dict[str, Any]

FORMAT = {"format": "polaformer", "version": "1"}
WRAPPERS = ("model", "state_dict", "state_dict_ema", "model_ema", "module")  # keys under which files keep the state dict
MOST_BYTES = 4 * 2**30  # of a weights file: the largest of these models with its optimizer and average needs a third
MOST_WRAPPERS = 8  # how deep a state dict may lie in a file
NOT_PLAIN = "a sparse, quantised or meta tensor, or one with more elements than its storage holds"
PREFIXES = ("module.", "_orig_mod.", "model.")  # before every name, where a wrapped model was saved


def read_state_dict(path: str | PathLike[str]) -> StateDict:
    """The state dict of a safetensors or .pth file, on the CPU; raises WeightsError, and executes nothing."""
    path = Path(path)
    with _readable(path) as size:
        if _is_safetensors(path):
            return _read_safetensors(path)
        state = state_dict_in(_read_pth(path), str(path))
        check_storages(state, size, str(path))
        return state


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """What a safetensors file says about itself; {} for other files; raises WeightsError."""
    path = Path(path)
    with _readable(path):
        if not _is_safetensors(path):
            return {}
        with _opened(path) as file:
            return dict(file.metadata() or {})


def write_safetensors(tensors: Mapping[str, Tensor], path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    """Writes beside the target, then renames, so that a kill leaves the old file or the new one."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
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
    """Looks at a file before it is opened, gives its size, and turns what the operating system says into WeightsError."""
    try:
        if path.is_dir():
            raise WeightsError(f"{path} is a directory; give a .safetensors or .pth file")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if not size:
            raise WeightsError(f"{path} is empty; fetch or write it again")
        if size > MOST_BYTES:
            raise OSError(too_large(size, MOST_BYTES))
        yield size
    except WeightsError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise WeightsError(f"{path} cannot be read: {reason(error)}; check the path") from error


def _read_safetensors(path: Path) -> StateDict:
    with _opened(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") == FORMAT["format"] and metadata.get("version") != FORMAT["version"]:
            raise WeightsError(
                f"{path} is version {metadata.get('version')!r} of our format, but this library reads {FORMAT['version']!r}; "
                "update polaformer"
            )
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is not a dict


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a whole safetensors file: {error}; fetch or write it again") from error


def _read_pth(path: Path) -> Any:
    """The content of a file of torch.save, through the restricted unpickler and never through another."""
    pickled = _check_archive(path)
    try:
        with zipfile.ZipFile(path) as archive:
            check_pickle(archive.read(pickled))
        with torch.serialization.safe_globals([(OrderedDict, name) for name in CONFIGURATION_CLASSES]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        asked_for = re.search(r"GLOBAL:? (\S+)", str(error))
        why = f"it asks for {asked_for[1]}" if asked_for else "it is not in the restricted form of pickle"
        raise WeightsError(
            f"{path} holds more than tensors and plain containers ({why}); it was not loaded, and nothing in it was run. "
            "If you trust its origin, save its state dict alone, as safetensors"
        ) from error
    except Exception as error:
        # A damaged file fails in many ways inside torch; none of them may pass as anything but a damaged file.
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{path} is damaged: {what}; fetch or write it again") from error


def _check_archive(path: Path) -> str:
    """The name of its pickle; raises unless it is a zip archive as torch.save writes it: not compressed, so it cannot swell."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise WeightsError(f"{path} is damaged: {error}; fetch or write it again") from error
    if not is_archive:
        raise WeightsError(
            f"{path} is neither a safetensors file nor a whole file of torch.save (of torch 1.6 or later); "
            "fetch it again, or save its state dict as safetensors"
        )
    if not ends_as_torch_writes(path):
        raise WeightsError(f"{path} does not end with its list of contents, as files of torch.save do; it was not loaded")
    names = [entry.filename for entry in entries]
    root = names[0].partition("/")[0] if names else ""
    # torch takes the folder of the first name and looks for the others below it, whatever their case.
    is_usual = all(name.startswith(f"{root}/") and ".." not in name.split("/") for name in names)
    is_usual = is_usual and names == [entry.orig_filename for entry in entries]
    if not root or not is_usual or len({name.lower() for name in names}) < len(names):
        raise WeightsError(f"{path} names its parts twice or outside of itself, as torch.save does not; it was not loaded")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise WeightsError(f"{path} is a compressed archive, which torch.save does not write; it was not loaded")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise WeightsError(f"{path} claims to hold more bytes than it has; it was not loaded")
    return f"{root}/data.pkl"


def _is_safetensors(path: Path) -> bool:
    """By content: a header length of 8 bytes, then JSON; by name if it is too short to tell."""
    with open_regular(path) as file:
        start = file.read(9)
    return (len(start) == 9 and start[8:] == b"{" and start[:2] != b"PK") or path.suffix == ".safetensors"


def state_dict_in(content: Any, origin: str = "the state dict") -> StateDict:
    """The state dict in what a file holds: the content itself, or what lies under one of the usual keys."""
    for _ in range(MOST_WRAPPERS):
        inside = [content[key] for key in WRAPPERS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
        content = inside[0] if inside else content
    if not isinstance(content, Mapping) or not content:
        kind = "an empty mapping" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise WeightsError(f"{origin} holds {kind}; a mapping from names to tensors is needed")
    for key, value in content.items():
        if not isinstance(key, str) or not is_plain(value):
            kind = f"a {type(value).__name__}" if not isinstance(value, Tensor) else NOT_PLAIN
            raise WeightsError(
                f"{origin} holds no state dict: {key!r} is {kind if isinstance(key, str) else 'no name'}; "
                f"a mapping from names to plain tensors is needed, bare or under {', '.join(WRAPPERS)}"
            )
    # Saved from inside DistributedDataParallel, torch.compile or timm's wrapper for features.
    found = dict(content)
    while prefix := next((one for one in PREFIXES if all(key.startswith(one) for key in found)), None):
        found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found


def is_plain(value: Any) -> bool:
    """Whether it is a dense tensor whose elements all lie in memory.

    One with strides of 0 takes a few bytes in a file and any number of them once it is copied.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_storages(state: StateDict, size: int, origin: str) -> None:
    """Raises WeightsError where tensors take more memory than the file has bytes: something in it made them larger."""
    stored = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in state.values()}
    if sum(stored.values()) > size:
        raise WeightsError(f"{origin} has {size:,} bytes, but its tensors take {sum(stored.values()):,}; it was not loaded")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
