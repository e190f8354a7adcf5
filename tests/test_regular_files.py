"""Every reader opens regular files alone: none waits for a FIFO, none reads a sparse file that would fill all memory."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polaformer.backbones.files import read_metadata, read_state_dict
from polaformer.data.checking import read_manifest
from polaformer.data.images import read_image
from polaformer.data.sources import open_data
from polaformer.errors import DataError
from polaformer.training import checkpoint, divergence, journal
from polaformer.training.run import Run

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "an image": ("x.jpg", read_image),
    "an archive": ("x.tar", lambda path: open_data(str(path.parent))),
    "arrays": ("x.npz", lambda path: open_data(str(path))),
    "a manifest of data": ("manifest.json", read_manifest),
    "weights": ("model.safetensors", read_state_dict),
    "weights of the old kind": ("model.pth", read_state_dict),
    "what is said about weights": ("model.safetensors", read_metadata),
    "a manifest of a checkpoint": ("manifest.json", lambda path: checkpoint.read(path.parent)),
    "a configuration": ("config.json", lambda path: Run.open(path.parent)),
    "a journal": ("journal.jsonl", lambda path: journal.read(path.parent)),
    "a journal to go on with": ("journal.jsonl", lambda path: journal.Journal(path.parent)),
    "a batch left behind": ("step.safetensors", divergence.read),
}


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


KINDS: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_a_regular_file_is_one_error_and_is_not_waited_for(
    reader: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, read = READERS[reader]
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    KINDS[kind](Path(name))
    with pytest.raises((DataError, OSError), match=r"not a regular file|there is no"):
        read(tmp_path / name)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "reader", ["an image", "a manifest of data", "weights", "a manifest of a checkpoint", "a configuration", "a journal"]
)
def test_a_file_larger_than_its_kind_can_be_is_one_error_and_is_not_read(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**40)  # takes no room on the disk
    with pytest.raises(DataError, match=r"1,099,511,627,776 bytes, more than the [\d,]+ that are allowed"):
        read(tmp_path / name)
