"""Readers and writers open regular files only: none waits for a FIFO, follows a link to write, or fills all memory."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import small
from polaformer.backbones import save_checkpoint
from polaformer.cli.errors import BAD_DATA
from polaformer.cli.main import main
from polaformer.data.audit import read_manifest
from polaformer.data.batch import Batch
from polaformer.data.images import read_image
from polaformer.data.sources.opening import open_data
from polaformer.errors import CannotWriteError, DataError
from polaformer.regular_files import write_atomically
from polaformer.training import checkpoint, divergence, journal
from polaformer.training.engine import NonFiniteError
from polaformer.training.run import Run
from polaformer.weights.files import read_metadata, read_state_dict

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "an image": ("x.jpg", read_image),
    "an archive": ("x.tar", lambda path: open_data(str(path.parent))),
    "an archive by its name": ("x.tar", lambda path: open_data(str(path))),
    "arrays": ("x.npz", lambda path: open_data(str(path))),
    "a manifest of data": ("manifest.json", read_manifest),
    "weights": ("model.safetensors", read_state_dict),
    "weights of the old kind": ("model.pth", read_state_dict),
    "what is said about weights": ("model.safetensors", read_metadata),
    "a manifest of a checkpoint": ("manifest.json", lambda path: checkpoint.read(path.parent)),
    "a configuration": ("config.json", lambda path: Run.open(path.parent)),
    "a journal": ("journal.jsonl", lambda path: journal.read(path.parent)),
    "a journal to go on with": ("journal.jsonl", lambda path: journal.Journal(path.parent)),
    "a batch left behind": ("step.safetensors", lambda path: divergence.read(path, Batch)),
}

WEIGHTS = "model.safetensors"
DIVERGED = "diverged/step-000000001-rank-0.safetensors"


def _save_diverged_batch(folder: Path) -> Path:
    error = NonFiniteError(1.0, 1.0, 1.0, True)
    batch = Batch(indices=torch.ones(1), bad=[])
    return divergence.save_diverged_batch(folder, [batch], ["a"], error, {"step": 1, "rank": 0, "seed": 0})


def _lock(folder: Path) -> None:
    with Run(folder).lock():
        pass


# The obstructed path, the writer, and what it writes.
WRITERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a configuration": (".config.json.tmp", lambda folder: write_atomically(folder / "config.json", "{}"), "config.json"),
    "a table": (".metrics.csv.tmp", journal.write_csv, "metrics.csv"),
    "weights": (WEIGHTS, lambda folder: save_checkpoint(small("pola_pvt_tiny"), folder / WEIGHTS), WEIGHTS),
    "a batch left behind": (DIVERGED, _save_diverged_batch, DIVERGED),
}
APPENDERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a journal": ("journal.jsonl", lambda folder: journal.Journal(folder).close()),
    "a lock": (".lock", _lock),
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
    with pytest.raises((DataError, OSError), match="not a regular file"):
        read(tmp_path / name)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "reader", ["an image", "a manifest of data", "weights", "a manifest of a checkpoint", "a configuration", "a journal"]
)
def test_a_file_larger_than_its_kind_can_be_is_one_error_and_is_not_read(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**40)  # sparse: takes no disk space
    with pytest.raises(DataError, match=r"1,099,511,627,776 bytes, more than the [\d,]+ allowed"):
        read(tmp_path / name)


def _stand_in_the_way(path: Path, kind: str, victim: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    victim.write_text("not of this run\n")
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "FIFO"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_stands_in_the_way_of_a_writer_is_replaced_and_neither_followed_nor_waited_for(
    writer: str, kind: str, tmp_path: Path
) -> None:
    name, write, written = WRITERS[writer]
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    _stand_in_the_way(run / name, kind, victim)
    write(run)
    assert victim.read_text() == "not of this run\n"
    assert stat.S_ISREG(os.lstat(run / written).st_mode)
    assert os.lstat(run / written).st_size > 0
    assert [path.name for path in run.rglob("*.tmp")] == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "FIFO"])
@pytest.mark.parametrize("writer", APPENDERS)
def test_what_is_written_on_is_a_regular_file_of_the_run(writer: str, kind: str, tmp_path: Path) -> None:
    name, write = APPENDERS[writer]
    _stand_in_the_way(tmp_path / "run" / name, kind, tmp_path / "victim")
    with pytest.raises((DataError, CannotWriteError), match=rf"{name}.* is not a regular file"):
        write(tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "not of this run\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["x.npz", "x.tar", "x.pth"])
def test_the_commands_name_what_is_not_a_regular_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / name)
    given = str(tmp_path / name)
    code = main(["convert", given, str(tmp_path / "out.safetensors")] if name == "x.pth" else ["check", given])
    assert code == BAD_DATA
    assert "it is not a regular file" in " ".join(capsys.readouterr().err.split())
