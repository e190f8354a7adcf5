"""Rows C4, C5 and C6: checkpoints are complete or absent, and all damage is detected."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import faults
from polaformer.training import checkpoint
from polaformer.training.checkpoint import DamagedError

FILES = {"state.json": b'{"step": 7}\n', "model.safetensors": bytes(range(256)) * 8, "optimizer.safetensors": os.urandom(999)}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return checkpoint.write(tmp_path / "checkpoints", 7, FILES, keep=3)


def draws(seed: int) -> random.Random:
    return random.Random(seed)


def some_file(folder: Path, chance: random.Random) -> Path:
    """A random file of the checkpoint; the manifest is as likely as the others."""
    return chance.choice(sorted(folder.iterdir()))


def test_what_was_written_is_read_and_stands_under_its_step(written: Path) -> None:
    assert written.name == "step-000000007"
    assert checkpoint.read(written) == FILES


def test_a_thousand_bit_flips_are_all_detected(written: Path) -> None:
    chance = draws(0)
    for _ in range(1000):
        path = some_file(written, chance)
        content = path.read_bytes()
        place, bit = chance.randrange(len(content)), chance.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
        with pytest.raises(DamagedError, match="damaged"):
            checkpoint.read(written)
        path.write_bytes(content)
    assert checkpoint.read(written) == FILES


def test_a_thousand_truncations_are_all_detected(written: Path) -> None:
    chance = draws(1)
    for _ in range(1000):
        path = some_file(written, chance)
        content = path.read_bytes()
        path.write_bytes(content[: chance.randrange(len(content))])
        with pytest.raises(DamagedError, match="damaged"):
            checkpoint.read(written)
        path.write_bytes(content)
    assert checkpoint.read(written) == FILES


@pytest.mark.parametrize("name", [*FILES, checkpoint.MANIFEST])
def test_a_missing_file_is_detected(name: str, written: Path) -> None:
    (written / name).unlink()
    with pytest.raises(DamagedError, match=name):
        checkpoint.read(written)


def test_the_message_names_the_file_and_both_digests(written: Path) -> None:
    content = bytearray((written / "model.safetensors").read_bytes())
    content[0] ^= 1
    (written / "model.safetensors").write_bytes(bytes(content))
    expected = json.loads((written / checkpoint.MANIFEST).read_bytes())["files"]["model.safetensors"]["sha256"]
    message = rf"step-000000007/model.safetensors .*sha256 should be {expected} but is [0-9a-f]{{64}}"
    with pytest.raises(DamagedError, match=message):
        checkpoint.read(written)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"sha256": 3}',
        b"\xff\xfe",
        b"[" * 5000,
        json.dumps({"format": checkpoint.FORMAT, "files": {}, "sha256": "0" * 64}).encode(),
    ],
)
def test_a_manifest_that_makes_no_sense_is_one_error(manifest: bytes, written: Path) -> None:
    (written / checkpoint.MANIFEST).write_bytes(manifest)
    with pytest.raises(DamagedError, match=r"manifest.json is damaged"):
        checkpoint.read(written)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content + b"\n",
        lambda content: json.dumps(json.loads(content)).encode(),
        lambda content: content.replace(b"{", b'{"sha256": "",', 1),
    ],
    ids=["cut by one byte", "longer by one byte", "on one line", "with a key twice"],
)
def test_a_manifest_that_says_the_same_in_other_bytes_is_damaged(change: Callable[[bytes], bytes], written: Path) -> None:
    path = written / checkpoint.MANIFEST
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert json.loads(path.read_bytes()) == json.loads(content)
    with pytest.raises(DamagedError, match=r"manifest.json is damaged: it is not what was written"):
        checkpoint.read(written)


def test_a_manifest_cannot_name_files_outside(tmp_path: Path) -> None:
    """An attacker who can write a valid manifest could put `../…` into it."""
    (tmp_path / "secret").write_bytes(b"x")
    with pytest.raises(DamagedError, match="is not a plain file name"):
        checkpoint.read(_forged(tmp_path, "../../secret"))


def _forged(folder: Path, name: str) -> Path:
    path = folder / "checkpoints" / "step-000000001"
    path.mkdir(parents=True)
    (path / checkpoint.MANIFEST).write_bytes(checkpoint._manifest({name: b"x"}))
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("size", [2**40, -1, 2**70])
def test_a_manifest_cannot_allow_a_file_that_would_fill_all_memory(size: int, tmp_path: Path) -> None:
    path = _forged(tmp_path, "model.safetensors")
    body = {"format": checkpoint.FORMAT, "files": {"model.safetensors": {"bytes": size, "sha256": "0" * 64}}}
    digest = hashlib.sha256(checkpoint._canonical(body)).hexdigest()
    (path / checkpoint.MANIFEST).write_bytes(checkpoint._canonical(body | {"sha256": digest}))
    (path / "model.safetensors").touch()
    os.truncate(path / "model.safetensors", 2**40)  # sparse: occupies nothing on the disk
    message = (
        "it has 1,099,511,627,776 bytes but takes 0 on the disk" if size == 2**40 else f"bytes should be {size} but is {2**40}"
    )
    with pytest.raises(DamagedError, match=rf"model\.safetensors .*{message}; use another checkpoint"):
        checkpoint.read(path)


def test_a_large_file_that_lies_on_the_disk_is_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 0)
    assert checkpoint.read(written) == FILES


def test_the_newest_valid_one_is_taken_and_the_damaged_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        checkpoint.write(folder, step, {"state.json": str(step).encode()}, keep=3)
    (folder / "step-000000030" / "state.json").write_bytes(b"31")
    found = checkpoint.newest(folder)
    assert found is not None
    assert (found.path.name, found.files) == ("step-000000020", {"state.json": b"20"})
    assert [path.name for path in found.damaged] == ["step-000000030"]


@pytest.mark.parametrize("name", [".tmp-000000001", "step-000000001"])
def test_removing_old_checkpoints_follows_no_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("not of this run")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / name).symlink_to(tmp_path / "elsewhere")
    checkpoint.write(tmp_path / "checkpoints", 2, FILES, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000002"]
    assert (tmp_path / "elsewhere" / "file").read_text() == "not of this run"


def test_none_is_taken_where_all_are_damaged_or_there_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.newest(folder) is None
    checkpoint.write(folder, 1, FILES, keep=3)
    (folder / "step-000000001" / checkpoint.MANIFEST).unlink()
    with pytest.raises(DamagedError, match="no checkpoint can be used"):
        checkpoint.newest(folder)


def test_a_name_is_never_used_twice(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    names = [checkpoint.write(folder, 5, {"state.json": b"%d" % n}, keep=3).name for n in range(3)]
    assert names == ["step-000000005", "step-000000005-1", "step-000000005-2"]
    found = checkpoint.newest(folder)
    assert found is not None
    assert found.files == {"state.json": b"2"}


def test_what_a_killed_process_left_half_written_is_removed_by_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / ".tmp-000000004-77").mkdir(parents=True)
    (folder / ".tmp-000000004-77" / "model.safetensors").write_bytes(b"half")
    checkpoint.write(folder, 5, FILES, keep=3)
    assert [path.name for path in folder.iterdir()] == ["step-000000005"]


def test_everything_is_synced_before_it_is_named_and_named_before_anything_is_removed(tmp_path: Path) -> None:
    """Row C4, from the log of system calls."""
    folder = tmp_path / "checkpoints"
    for step in range(3):
        checkpoint.write(folder, step, FILES, keep=3)
    counting = faults.Counting()
    with faults.seen_by(checkpoint, counting):
        checkpoint.write(folder, 3, FILES, keep=3)
    calls = [name for name, _ in counting.log]
    rename = calls.index("rename")
    opened = [path for name, path in counting.log[:rename] if name == "open"]
    assert [Path(path).name for path in opened[:-1]] == [*FILES, checkpoint.MANIFEST]
    assert calls[:rename].count("fsync") == len(opened) == len(FILES) + 2  # every file, and their directory
    assert calls[rename + 1 : rename + 4] == ["open", "fsync", "close"]  # the parent directory
    assert counting.log[rename + 1][1] == str(folder)
    assert not {"unlink", "rmdir"} & set(calls[: rename + 4])
    assert "unlink" in calls[rename + 4 :]
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == [f"step-{step:09d}" for step in (1, 2, 3)]


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
def test_a_failing_disk_is_an_error_and_the_older_ones_are_intact(reason: int, call: str, tmp_path: Path) -> None:
    """The partly written new one is removed, which frees its space on a full disk."""
    folder = tmp_path / "checkpoints"
    for step in range(3):
        checkpoint.write(folder, step, FILES, keep=3)

    def fail(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == call:
            raise OSError(reason, os.strerror(reason))

    with faults.seen_by(checkpoint, faults.Counting(fail)), pytest.raises(OSError, match=os.strerror(reason)):
        checkpoint.write(folder, 3, FILES, keep=3)
    assert sorted(folder.iterdir()) == checkpoint.list_checkpoints(folder)
    assert len(checkpoint.list_checkpoints(folder)) == 3
    assert all(checkpoint.read(path) == FILES for path in checkpoint.list_checkpoints(folder))


@pytest.mark.parametrize("kind", ["before a call", "within a write"])
def test_a_kill_at_any_system_call_of_a_save_leaves_whole_checkpoints(kind: str, tmp_path: Path) -> None:
    """Each in a separate process. Whole training runs are killed there too: some in test_resume, all in `make test-faults`."""
    counting, folder = faults.Counting(), tmp_path / "checkpoints"
    for step in range(3):
        checkpoint.write(folder, step, FILES, keep=3)
    shutil.copytree(folder, tmp_path / "before")
    with faults.seen_by(checkpoint, counting):
        checkpoint.write(folder, 3, FILES, keep=3)
    places = [number for number, (name, _) in enumerate(counting.log, 1) if kind == "before a call" or name == "write"]
    assert len(places) >= 4
    newest = set()
    for place in places:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
        assert killed_at(place, folder, half=kind == "within a write") == -signal.SIGKILL
        assert all(checkpoint.read(path) == FILES for path in checkpoint.list_checkpoints(folder))
        assert len(checkpoint.list_checkpoints(folder)) >= 3
        newest.add(checkpoint.list_checkpoints(folder)[-1].name)
    assert newest == {"step-000000002"} | ({"step-000000003"} if kind == "before a call" else set())


def killed_at(place: int, folder: Path, *, half: bool) -> int:
    """The exit code of a process that is killed at a system call of a save, before the call or halfway through its write."""

    def kill(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if number == place:
            if half:
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        with faults.seen_by(checkpoint, faults.Counting(kill)):
            checkpoint.write(folder, 3, FILES, keep=3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_clock_does_not_matter(tmp_path: Path) -> None:
    """Checkpoints are ordered by step; a clock that was set back has no effect."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        os.utime(checkpoint.write(folder, step, {"state.json": b"%d" % step}, keep=3), (1e9 - step, 1e9 - step))
    found = checkpoint.newest(folder)
    assert found is not None
    assert found.files == {"state.json": b"3"}
